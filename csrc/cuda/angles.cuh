// Angles: from frequencies, and the cos and sin of a chunk from any source.
#pragma once

#include "token.cuh"

namespace rope::cuda {

// attention_factor, as the sum of two numbers.
template <typename A>
struct Factor {
  A hi, lo;

  template <typename Args>
  ROPE_FN explicit Factor(const Args& a)
      : hi(sizeof(A) == 8 ? A(a.attention_factor) : A(a.params.factor_hi)),
        lo(sizeof(A) == 8 ? A(0) : A(a.params.factor_lo)) {}
  ROPE_FN A times(A x) const { return scaled(x, hi, lo); }
  template <int V>
  ROPE_FN void scale(CosSin<A, V>& angles) const {
    if (hi == A(1) && lo == A(0)) return;
    for (int i = 0; i < V; i++) {
      angles.cos[i] = times(angles.cos[i]);
      angles.sin[i] = times(angles.sin[i]);
    }
  }
};

// Reads n frequencies of a call, which are `stride` apart, as sums of two numbers: in float32 the turns per position,
// see turns_per_position() in angle.h, and in double the frequency and 0.
template <int n, typename A, typename Args>
ROPE_FN void read_frequencies(const Args& a, rope_int at, rope_int stride, A* hi, A* lo) {
  const auto read = [&](auto tag, bool split) {
    using F = decltype(tag);
    const auto read_part = [&](const F* from, F* to) {
      constexpr unsigned bytes = n * sizeof(F) < 16 ? n * sizeof(F) : 16;
      read_shared<n>(from, stride, stride == 1 && reinterpret_cast<uintptr_t>(from) % bytes == 0, to);
    };
    F whole[n], more[n] = {};
    read_part(static_cast<const F*>(a.inv_freq) + at, whole);
    if (split) read_part(static_cast<const F*>(a.inv_freq) + at + a.params.inv_freq[0], more);
    for (int i = 0; i < n; i++) {
      hi[i] = A(whole[i]);
      lo[i] = A(whole[i] - F(hi[i]));
      if (split) two_sum(hi[i], A(more[i]), hi[i], lo[i]);
    }
  };
  a.inv_freq_dtype == DType::kDouble ? read(double(), false) : read(float(), a.params.split_inv_freq != 0);
  if constexpr (sizeof(A) == 4) {
    for (int i = 0; i < n; i++) turns_per_position(hi[i], lo[i], hi[i], lo[i]);
  }
}

// An angle whose cos and sin are not computed yet, as a sum of two numbers: in float32 in turns, see turns_of() in
// angle.h, and in double in radians, see angle_of() there.
template <typename A>
struct Angle {
  A angle, rest;
};

// Computes the angle of a position and a frequency that read_frequencies() has read. Doubles cost each thread four
// conversions and a subtraction for its position, and with a float64 inv_freq three conversions and a subtraction for
// each pair. Even on GPUs with slow doubles this is little compared with the rest, which is all float32.
ROPE_FN Angle<float> angle_of(double position, float turns_hi, float turns_lo) {
  Angle<float> angle;
  const float position_hi = float(position), position_lo = float(position - double(position_hi));
  turns_of(position_hi, position_lo, turns_hi, turns_lo, angle.angle, angle.rest);
  return angle;
}
ROPE_FN Angle<double> angle_of(double position, double freq, double) {
  Angle<double> angle;
  rope::angle_of(position, freq, angle.angle, angle.rest);
  return angle;
}
ROPE_FN void add(Angle<float>& sum, Angle<float> more) { add_turns(more.angle, more.rest, sum.angle, sum.rest); }
ROPE_FN void add(Angle<double>& sum, Angle<double> more) { add_angle(more.angle, more.rest, sum.angle, sum.rest); }
ROPE_FN void cos_sin_of(Angle<float> a, float& cos, float& sin) { cos_sin_of_turns(a.angle, a.rest, cos, sin); }
ROPE_FN void cos_sin_of(Angle<double> a, double& cos, double& sin) { cos_sin_of_angle(a.angle, a.rest, cos, sin); }

// cos and sin of the pairs of a chunk, scaled by attention_factor. They are computed in three steps, between which the
// thread does other work: the constructor needs no position and reads the frequencies, read() starts the loads of table
// rows, and finish() waits for them. The angles of a table by head are those of one head, so rotate() takes these steps
// for each head. rotates: the chunk is rotated; else the angles are not used.
//
// The pairs of a chunk have adjacent columns in the tables and in inv_freq, in one run or in two. With interleaved
// pairs and vectors of several channels there are two runs, because each of the chunk's two vectors has V / 2 pairs of
// its own.
template <typename K>
struct Angles {
  using T = typename K::T;
  using A = typename K::A;
  using I = typename K::I;
  static constexpr int V = K::V, runs = K::interleaved && V > 1 ? 2 : 1, length = V / runs;
  static constexpr bool words = Vector<T, length>::words;
  const RotateArgs& a;
  const Token<K>& t;
  const bool rotates;
  I cos_at, sin_at;     // the chunk's first element in row 0 of the token's tables
  CosSin<A, V> angles;  // before finish(), the frequencies

  ROPE_FN Angles(const RotateArgs& a, const Token<K>& t, int chunk, bool rotates) : a(a), t(t), rotates(rotates) {
    const RopeParams& p = a.params;
    const I column = I(chunk) * length;
    cos_at = t.b * I(p.cos[0]) + column * I(p.cos[3]);
    sin_at = t.b * I(p.sin[0]) + column * I(p.sin[3]);
    for (int run = 0; rotates && p.source == kInvFreq && run < runs; run++) {
      const I at = (column + run * I(p.rotary_dim / 4)) * I(p.inv_freq[1]);
      read_frequencies<length>(a, at, p.inv_freq[1], angles.cos + run * length, angles.sin + run * length);
    }
  }

  ROPE_FN void read() {
    if (rotates && a.params.source != kInvFreq && !by_head() && t.valid) read_row(0);
  }

  ROPE_FN void finish() {
    const RopeParams& p = a.params;
    if (!rotates || by_head()) return;
    if (!t.valid) {  // a pad
      for (int i = 0; i < V; i++) angles.cos[i] = angles.sin[i] = A(NAN);
    } else if (p.source == kInvFreq) {
      for (int i = 0; i < V; i++) {
        cos_sin_of(cuda::angle_of(double(t.position), angles.cos[i], angles.sin[i]), angles.cos[i], angles.sin[i]);
      }
      scale();
    } else {
      finish_row();
    }
  }

  // Rotates the chunk of a head.
  ROPE_FN void rotate(Numbers<A, V>& n, I head) {
    if (by_head()) {
      read_row(head);
      finish_row();
    }
    if (!K::eager || a.params.rounding == kOnce) return cuda::rotate<K::interleaved>(n, angles);
    const auto round = [narrow = a.params.rounding == kEachNarrow](A x) {
      if (!narrow) return x;
      T y;
      round_to(x, y);
      return to_arithmetic(y);
    };
    rotate_with<K::interleaved>(
        n, angles, [&](A own, A partner, A cos, A sin) { return rotated_eagerly(own, partner, cos, sin, round); });
  }

 private:
  ROPE_FN bool by_head() const { return K::general && a.params.source == kTableByHead; }

  ROPE_FN void read_row(I head) { a.table_dtype == DType::kFloat ? read_tables<float>(head) : read_tables<T>(head); }
  template <typename Table>
  ROPE_FN void read_tables(I head) {
    const RopeParams& p = a.params;
    const I row = p.source == kTableByPosition ? I(t.position) : t.s;
    const bool vectors = t.tiling.table_vectors;
    const auto read = [&](const void* table, I at, const rope_int* strides, A* to) {
      const Table* from = static_cast<const Table*>(table) + at + row * I(strides[1]) + head * I(strides[2]);
      for (int run = 0; run < runs; run++) {
        const rope_int column = run * (p.rotary_dim / 4);
        if constexpr (words && sizeof(Table) == 2) {  // the words stay as they are until finish_row()
          if (vectors) {
            const auto row = *reinterpret_cast<const Vector<Table, length>*>(from + column);
            for (int i = 0; i < length / 2; i++) to[run * length / 2 + i] = bits_as<float>(row.of[i]);
            continue;
          }
        }
        read_shared<length>(from + column * strides[3], strides[3], vectors, to + run * length);
      }
    };
    read(a.cos, cos_at, p.cos, angles.cos);
    read(a.sin, sin_at, p.sin, angles.sin);
  }

  ROPE_FN void finish_row() {
    if (words && a.table_dtype != DType::kFloat && t.tiling.table_vectors) {
      unpack_all(angles.cos);
      unpack_all(angles.sin);
    }
    scale();
  }
  ROPE_FN void scale() {
    const RopeParams& p = a.params;
    if (K::eager && p.rounding != kOnce) {
      scale_eagerly(angles.cos);
      scale_eagerly(angles.sin);
    } else {
      Factor<A>(a).scale(angles);
    }
    for (int i = 0; i < V && p.inverse; i++) angles.sin[i] = -angles.sin[i];
  }
  ROPE_FN static void unpack_all(A (&numbers)[V]) {
    if constexpr (words) {
      for (int i = V / 2 - 1; i >= 0; i--) {  // the last first, because a word is where its results go
        const float2 two = unpack(T(), bits_as<uint32_t>(numbers[i]));
        numbers[2 * i] = two.x, numbers[2 * i + 1] = two.y;
      }
    }
  }

  // Multiplies cos or sin by attention_factor as torch does: the product has the dtype of the table.
  ROPE_FN void scale_eagerly(A (&numbers)[V]) {
    const RopeParams& p = a.params;
    if (a.attention_factor == 1.0) return;
    const bool is_float = sizeof(A) == 4 || (p.source != kInvFreq && a.table_dtype == DType::kFloat);
    for (A& number : numbers) number = is_float ? A(float(number) * p.factor_hi) : number * A(a.attention_factor);
    if (p.rounding == kEachNarrow) to_arithmetic(rounded<T, V>(numbers), numbers);
  }
};

}  // namespace rope::cuda
