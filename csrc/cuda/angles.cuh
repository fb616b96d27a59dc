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
#pragma unroll
    for (int i = 0; i < V; i++) {
      angles.cos[i] = times(angles.cos[i]);
      angles.sin[i] = times(angles.sin[i]);
    }
  }
};

// The frequencies of a call, see split_inv_freq in ../rope.h.
struct Frequencies {
  const void* from;
  bool is_double, split;
  rope_int part;  // the distance between the two parts

  // Computes frequency `at` as the sum of two floats, or as a double.
  ROPE_FN void read(int64_t at, float& freq, float& rest) const {
    rest = 0.0f;
    if (is_double) {
      const double wide = static_cast<const double*>(from)[at];
      freq = float(wide);
      rest = float(wide - double(freq));
    } else {
      freq = static_cast<const float*>(from)[at];
      if (split) two_sum(freq, static_cast<const float*>(from)[at + part], freq, rest);
    }
  }
  ROPE_FN double read(int64_t at) const {
    if (is_double) return static_cast<const double*>(from)[at];
    const float* const floats = static_cast<const float*>(from);
    return split ? double(floats[at]) + double(floats[at + part]) : double(floats[at]);
  }
};

// An angle whose cos and sin are not computed yet, as a sum of two numbers: in float32 in turns, see turns_of() in
// angle.h, and in double in radians, see angle_of() there.
//
// Doubles cost each thread four conversions and a subtraction for its position, and with a float64 inv_freq three
// conversions and a subtraction for each pair. Even on GPUs with slow doubles this is little compared with the rest,
// which is all float32.
template <typename A>
struct Angle {
  A angle, rest;

  // Returns the product of position and frequency `at`.
  ROPE_FN static Angle of(double position, const Frequencies& frequencies, int64_t at) {
    Angle product;
    if constexpr (sizeof(A) == 8) {
      angle_of(position, frequencies.read(at), product.angle, product.rest);
    } else {
      float freq, rest, turns_hi, turns_lo;
      frequencies.read(at, freq, rest);
      turns_per_position(freq, rest, turns_hi, turns_lo);
      const float position_hi = float(position), position_lo = float(position - double(position_hi));
      turns_of(position_hi, position_lo, turns_hi, turns_lo, product.angle, product.rest);
    }
    return product;
  }
  ROPE_FN void add(const Angle& more) {
    if constexpr (sizeof(A) == 8) {
      add_angle(more.angle, more.rest, angle, rest);
    } else {
      add_turns(more.angle, more.rest, angle, rest);
    }
  }
  ROPE_FN void cos_sin(A& cos, A& sin) const {
    if constexpr (sizeof(A) == 8) {
      cos_sin_of_angle(angle, rest, cos, sin);
    } else {
      cos_sin_of_turns(angle, rest, cos, sin);
    }
  }
};

// cos and sin of the pairs of a chunk, scaled by attention_factor. They are computed in three steps, between which the
// thread does other work: the constructor needs no position, read() starts the loads of table rows, and finish() waits
// for them. The angles of a table by head are those of one head, so rotate() takes these steps for each head.
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
  const int chunk;
  I cos_at, sin_at;  // the chunk's first element in row 0 of the token's tables
  CosSin<A, V> angles;

  ROPE_FN Angles(const RotateArgs& a, const Token<K>& t, int chunk) : a(a), t(t), chunk(chunk) {
    const RopeParams& p = a.params;
    const I column = I(chunk) * length;
    cos_at = t.b * I(p.cos[0]) + column * I(p.cos[3]);
    sin_at = t.b * I(p.sin[0]) + column * I(p.sin[3]);
  }

  ROPE_FN void read() {
    if (a.params.source != kInvFreq && !by_head() && t.valid) read_row(0);
  }

  ROPE_FN void finish() {
    if (by_head()) return;
    if (!t.valid) {  // a pad
#pragma unroll
      for (int i = 0; i < V; i++) angles.cos[i] = angles.sin[i] = A(NAN);
    } else if (a.params.source == kInvFreq) {
      compute();
      finish_numbers();
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
  ROPE_FN bool by_head() const { return K::by_head && a.params.source == kTableByHead; }

  ROPE_FN void compute() {
    const RopeParams& p = a.params;
    const Frequencies frequencies{a.inv_freq, a.inv_freq_dtype == DType::kDouble, p.split_inv_freq != 0, p.inv_freq[0]};
#pragma unroll
    for (int i = 0; i < V; i++) {
      const I at = i / length * (I(p.rotary_dim / 2) / 2) + I(chunk) * length + i % length;
      Angle<A>::of(double(t.position), frequencies, at * I(p.inv_freq[1])).cos_sin(angles.cos[i], angles.sin[i]);
    }
  }

  ROPE_FN void read_row(I head) {
    const RopeParams& p = a.params;
    const I row = p.source == kTableByPosition ? I(t.position) : t.s;
    const I cos_row = cos_at + row * I(p.cos[1]) + head * I(p.cos[2]);
    const I sin_row = sin_at + row * I(p.sin[1]) + head * I(p.sin[2]);
    const auto read = [&](auto vectors, auto tag) {
      using Table = const decltype(tag)*;
      read_runs<decltype(vectors)::value>(static_cast<Table>(a.cos) + cos_row, p.cos[3], angles.cos);
      read_runs<decltype(vectors)::value>(static_cast<Table>(a.sin) + sin_row, p.sin[3], angles.sin);
    };
    const auto read_any = [&](auto vectors) {
      a.table_dtype == DType::kFloat ? read(vectors, float()) : read(vectors, T());
    };
    t.tiling.table_vectors ? read_any(std::true_type()) : read_any(std::false_type());
  }
  template <bool vectors, typename Table>
  ROPE_FN void read_runs(const Table* from, rope_int stride, A* to) {
    const rope_int next_run = a.params.rotary_dim / 4 * (vectors ? 1 : stride);
#pragma unroll
    for (int run = 0; run < runs; run++, from += next_run, to += length) {
      if constexpr (vectors && words && sizeof(Table) == 2) {  // the words stay as they are until finish_row()
        const auto row = *reinterpret_cast<const Vector<Table, length>*>(from);
#pragma unroll
        for (int i = 0; i < length / 2; i++) to[i] = bits_as<float>(row.of[i]);
      } else {
        read_shared<vectors, length>(from, stride, to);
      }
    }
  }

  ROPE_FN void finish_row() {
    if constexpr (words) {
      if (a.table_dtype != DType::kFloat && t.tiling.table_vectors) {
        unpack_all(angles.cos);
        unpack_all(angles.sin);
      }
    }
    finish_numbers();
  }
  ROPE_FN static void unpack_all(A (&numbers)[V]) {
#pragma unroll
    for (int run = 0; run < V; run += length) {
#pragma unroll
      for (int i = length / 2 - 1; i >= 0; i--) {  // the last first, because a word is where its results go
        unpack<T>(bits_as<uint32_t>(numbers[run + i]), numbers[run + 2 * i], numbers[run + 2 * i + 1]);
      }
    }
  }

  ROPE_FN void finish_numbers() {
    const RopeParams& p = a.params;
    if (K::eager && p.rounding != kOnce) {
      scale_eagerly(angles.cos);
      scale_eagerly(angles.sin);
    } else {
      Factor<A>(a).scale(angles);
    }
    if (p.inverse) {
#pragma unroll
      for (int i = 0; i < V; i++) angles.sin[i] = -angles.sin[i];
    }
  }
  // Multiplies cos or sin by attention_factor as torch does: the product has the dtype of the table.
  ROPE_FN void scale_eagerly(A (&numbers)[V]) {
    const RopeParams& p = a.params;
    if (a.attention_factor == 1.0) return;
    const bool is_float = p.source != kInvFreq && a.table_dtype == DType::kFloat;
#pragma unroll
    for (int i = 0; i < V; i++) {
      if constexpr (sizeof(A) == 8) {
        numbers[i] = is_float ? A(float(numbers[i]) * p.factor_hi) : numbers[i] * a.attention_factor;
      } else {
        numbers[i] *= p.factor_hi;
      }
    }
    if (p.rounding == kEachNarrow) to_arithmetic(rounded<T, V>(numbers), numbers);
  }
};

}  // namespace rope::cuda
