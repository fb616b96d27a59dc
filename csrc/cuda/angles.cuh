// Angles: from frequencies, and the cos and sin of a chunk from any source.
#pragma once

#include "token.cuh"

namespace rope::cuda {

// attention_factor, as the sum of two numbers.
template <typename A>
struct Factor {
  A hi, lo;

  template <typename Args>
  ROPE_FN static Factor of(const Args& a) {
    if constexpr (sizeof(A) == 8) return {A(a.attention_factor), A(0)};
    return {A(a.factor_hi), A(a.factor_lo)};
  }
  template <int V>
  ROPE_FN void scale(CosSin<A, V>& angles) const {
    if (hi == A(1) && lo == A(0)) return;
    for (int i = 0; i < V; i++) {
      angles.cos[i] = scaled(angles.cos[i], hi, lo);
      angles.sin[i] = scaled(angles.sin[i], hi, lo);
    }
  }
};

// The frequencies of a call.
struct Frequencies {
  const void* data;
  bool wide, split;       // float64, not float32; each is the sum of two parts
  rope_int part, stride;  // strides between the parts, and between frequencies

  template <typename Args>
  ROPE_FN static Frequencies of(const Args& a, rope_int stride) {
    return {a.inv_freq, a.inv_freq_dtype == DType::kDouble, a.split_inv_freq != 0, a.inv_freq_strides[0], stride};
  }

  // Reads n frequencies from `at` on, as sums of two numbers: in float32 the turns per position, see
  // turns_per_position() in angle.h, and in double the frequency and 0.
  template <int n, typename A>
  ROPE_FN void read(rope_int at, A* hi, A* lo) const {
    const auto read = [&](auto tag, bool split) {
      using F = decltype(tag);
      const auto read_part = [&](const F* from, F* to) {
        constexpr unsigned bytes = n * sizeof(F) < 16 ? n * sizeof(F) : 16;
        read_shared<n>(from, stride, stride == 1 && reinterpret_cast<uintptr_t>(from) % bytes == 0, to);
      };
      F whole[n], more[n] = {};
      read_part(static_cast<const F*>(data) + at, whole);
      if (split) read_part(static_cast<const F*>(data) + at + part, more);
      for (int i = 0; i < n; i++) sum_of(whole[i], more[i], split, hi[i], lo[i]);
    };
    wide ? read(double(), false) : read(float(), split);
    if constexpr (sizeof(A) == 4) {
      for (int i = 0; i < n; i++) turns_per_position(hi[i], lo[i], hi[i], lo[i]);
    }
  }

  // Begins to load the parts of one frequency.
  ROPE_FN void load(int at, Loaded (&parts)[2]) const {
    parts[0] = Loaded::read(data, int64_t(at) * (wide ? 8 : 4), wide);
    if (split) parts[1] = Loaded::read(data, 4 * (at + part), false);
  }
  // Computes its turns per position.
  ROPE_FN void take(const Loaded (&parts)[2], float& hi, float& lo) const {
    wide ? sum_of(parts[0].wide(), 0.0, false, hi, lo) : sum_of(parts[0].narrow(), parts[1].narrow(), split, hi, lo);
    turns_per_position(hi, lo, hi, lo);
  }

 private:
  template <typename F, typename A>
  ROPE_FN static void sum_of(F whole, F more, bool split, A& hi, A& lo) {
    hi = A(whole);
    lo = A(whole - F(hi));
    if (split) two_sum(hi, A(more), hi, lo);
  }
};

// An angle whose cos and sin are not computed yet, as a sum of two numbers: in float32 in turns, see turns_of() in
// angle.h, and in double in radians, see angle_of() there.
template <typename A>
struct Angle {
  A angle, rest;
};

// Computes the angle of a position and a frequency that was read. Doubles cost each thread four conversions and a
// subtraction for its position, and with a float64 inv_freq three conversions and a subtraction for each pair. Even on
// GPUs with slow doubles this is little compared with the rest, which is all float32.
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

// The pairs of a chunk have adjacent columns in the tables and in inv_freq, in one run or in two. With interleaved
// pairs and vectors of several channels there are two runs, because each of the chunk's two vectors has V / 2 pairs of
// its own. Half of the pairs lie between the two.
template <typename K>
struct Columns {
  static constexpr int V = K::V, runs = K::interleaved && V > 1 ? 2 : 1, length = V / runs;
  unsigned first, distance;

  ROPE_FN Columns(int chunk, rope_int pairs) : first(chunk * length), distance(unsigned(pairs / 2)) {}

  // Reads the columns of a table row. aligned: they are adjacent, and vectors of them are aligned.
  template <typename Table, typename A>
  ROPE_FN void read(const Table* row, rope_int stride, bool aligned, A (&to)[V]) const {
    for (int run = 0; run < runs; run++) {
      read_shared<length>(row + first * stride + run * distance * stride, stride, aligned, to + run * length);
    }
  }
  // Reads their frequencies to the places of cos and sin.
  template <typename A>
  ROPE_FN void read(const Frequencies& frequencies, CosSin<A, V>& to) const {
    for (int run = 0; run < runs; run++) {
      const rope_int at = (first + run * distance) * frequencies.stride;
      frequencies.template read<length>(at, to.cos + run * length, to.sin + run * length);
    }
  }
};

// Computes cos and sin of a position, in the place of the frequencies.
template <typename A, int V>
ROPE_FN void turn(CosSin<A, V>& angles, int64_t position) {
  for (int i = 0; i < V; i++) {
    cos_sin_of(angle_of(double(position), angles.cos[i], angles.sin[i]), angles.cos[i], angles.sin[i]);
  }
}

// Rotations with the bits of torch's operators, see Rounding. T: the dtype of x. narrow: kEachNarrow
template <typename T>
struct Eagerly {
  using A = arithmetic_t<T>;
  bool narrow;

  ROPE_FN A rounded(A x) const {
    if (!narrow) return x;
    T y;
    round_to(x, y);
    return to_arithmetic(y);
  }
  // Multiplies cos and sin by attention_factor as torch does: the product has the dtype of the table.
  template <int V, typename Product>
  ROPE_FN void scale(CosSin<A, V>& angles, Product&& product) const {
    for (A& cos : angles.cos) cos = rounded(product(cos));
    for (A& sin : angles.sin) sin = rounded(product(sin));
  }
  template <bool interleaved, int V>
  ROPE_FN void rotate(Numbers<A, V>& n, const CosSin<A, V>& angles) const {
    const auto round = [this](A x) { return rounded(x); };
    rotate_with<interleaved>(
        n, angles, [&](A own, A partner, A cos, A sin) { return rotated_eagerly(own, partner, cos, sin, round); });
  }
};

}  // namespace rope::cuda
