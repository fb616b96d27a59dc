// Device code that the kernels share: conversions, memory accesses, the position and slot of a token, the angles of a
// chunk, and the loop over the heads of a token. plan.h and ../plan.h explain chunks and teams.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#undef NDEBUG  // a position outside its table must stop the kernel, as torch's own indexing does
#include <cassert>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels.h"

#define ROPE_FN __device__ __forceinline__

namespace rope {
// The functions that rotation.h, angle.h and quantise.h expect.
ROPE_FN float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
ROPE_FN double fma(double a, double b, double c) { return ::fma(a, b, c); }
ROPE_FN float rint(float a) { return ::rintf(a); }
ROPE_FN void cosine_and_sine(double angle, double& cos, double& sin) { ::sincos(angle, &sin, &cos); }
ROPE_FN int bits_of(float a) { return __float_as_int(a); }
ROPE_FN float float_of(int a) { return __int_as_float(a); }
}  // namespace rope

#include "../angle.h"
#include "../quantise.h"
#include "../rotation.h"

namespace rope::cuda {

// The type that elements of type T are computed in: float, and double for double.
template <typename T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <typename T>
using arithmetic_t = typename Arithmetic<T>::type;

// ---- conversions and vectors ----

template <typename To, typename From>
ROPE_FN To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// n adjacent elements, as a thread loads and stores them. Pairs of 16-bit elements are held as words of 32 bits: as
// single elements they would each need a register, and instructions (PRMT) to take the words apart and to put them
// together.
template <typename T, int n>
struct alignas(sizeof(T) * n) Vector {
  static constexpr bool words = sizeof(T) == 2 && n % 2 == 0;
  std::conditional_t<words, uint32_t, T> of[words ? n / 2 : n];
};

ROPE_FN float to_arithmetic(__half x) { return __half2float(x); }
ROPE_FN float to_arithmetic(__nv_bfloat16 x) { return __bfloat162float(x); }
ROPE_FN float to_arithmetic(float x) { return x; }
ROPE_FN double to_arithmetic(double x) { return x; }

ROPE_FN void round_to(float x, __half& y) { y = __float2half_rn(x); }
ROPE_FN void round_to(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
ROPE_FN void round_to(float x, float& y) { y = x; }
ROPE_FN void round_to(double x, double& y) { y = x; }
ROPE_FN void round_to(double x, float& y) { y = float(x); }
// Returns x rounded to T.
template <typename T>
ROPE_FN arithmetic_t<T> rounded_to(arithmetic_t<T> x) {
  T y;
  round_to(x, y);
  return to_arithmetic(y);
}

// Returns x as a float, rounded to odd: cut off, and with the last bit set if that changed it. A float8 or int8 that is
// rounded from the result is the one that x itself is rounded to.
ROPE_FN float narrowed_to_odd(double x) {
  const float cut = __double2float_rz(x);
  return float_of(bits_of(cut) | int(double(cut) != x));
}
ROPE_FN float narrowed_to_odd(float x) { return x; }

// Converts a word to its two elements, the first of which is in the lower half, and back.
template <typename T>
ROPE_FN void unpack(uint32_t word, float& first, float& second) {
  if constexpr (std::is_same_v<T, __half>) {
    const float2 two = __half22float2(bits_as<__half2>(word));
    first = two.x, second = two.y;
  } else {
    first = __uint_as_float(word << 16), second = __uint_as_float(word & 0xffff0000u);
  }
}
template <typename T>
ROPE_FN uint32_t pack(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    return bits_as<uint32_t>(__floats2half2_rn(first, second));
  } else {
    return bits_as<uint32_t>(__floats2bfloat162_rn(first, second));
  }
}

template <typename T, int n, typename A>
ROPE_FN void to_arithmetic(const Vector<T, n>& v, A* to) {
  if constexpr (Vector<T, n>::words) {
#pragma unroll
    for (int i = 0; i < n / 2; i++) unpack<T>(v.of[i], to[2 * i], to[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) to[i] = A(to_arithmetic(v.of[i]));
  }
}
template <typename T, typename A, int n>
ROPE_FN Vector<T, n> rounded(const A (&x)[n]) {
  Vector<T, n> v;
  if constexpr (Vector<T, n>::words) {
#pragma unroll
    for (int i = 0; i < n / 2; i++) v.of[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) round_to(x[i], v.of[i]);
  }
  return v;
}

// Reads or writes the elements of a vector one by one: the channels from `first` on, but none after channel `last`.
// stride: the distance between two of them
template <typename T, int n, typename I>
ROPE_FN void read_each(const T* from, I stride, I first, I last, Vector<T, n>& v) {
  from += first * stride;
  if constexpr (Vector<T, n>::words) {
    const auto bits = [&](int i) {
      return first + i <= last ? uint32_t(bits_as<uint16_t>(from[i * stride])) : uint32_t(0);
    };
#pragma unroll
    for (int i = 0; i < n / 2; i++) v.of[i] = bits(2 * i) | bits(2 * i + 1) << 16;
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) {
      if (first + i <= last) v.of[i] = from[i * stride];
    }
  }
}
template <typename T, int n, typename I>
ROPE_FN void write_each(const Vector<T, n>& v, T* to, I stride, I first, I last) {
  to += first * stride;
#pragma unroll
  for (int i = 0; i < n; i++) {
    if (first + i > last) break;
    if constexpr (Vector<T, n>::words) {
      to[i * stride] = bits_as<T>(uint16_t(v.of[i / 2] >> i % 2 * 16));
    } else {
      to[i * stride] = v.of[i];
    }
  }
}

// Reads n numbers that many threads read and no thread of the kernel writes: table rows and weights.
// vectors: they are adjacent and aligned to the largest access that they need.
template <bool vectors, int n, typename From, typename A>
ROPE_FN void read_shared(const From* from, rope_int stride, A* to) {
  if constexpr (vectors && n > 1) {
    constexpr int m = n * sizeof(From) > 16 ? int(16 / sizeof(From)) : n;
#pragma unroll
    for (int i = 0; i < n; i += m) {
      const auto v = *reinterpret_cast<const Vector<From, m>*>(from + i);
      to_arithmetic(v, to + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) to[i] = A(to_arithmetic(from[i * stride]));
  }
}

// ---- tokens ----

// Waits until the previous kernel of the stream has ended, and lets the next one begin. Every kernel calls this before
// it loads or stores anything, because Queue::dependent lets it begin before the previous kernel has ended.
ROPE_FN void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// An int32 or int64 that is being loaded. The thread waits for the load only in value(), so that several loads can be
// under way at once.
struct Integer {
  int32_t low, high;

  template <typename I>
  ROPE_FN static Integer read(const void* from, bool wide, I i) {
    const auto* words = reinterpret_cast<const int32_t*>(static_cast<const char*>(from) + int64_t(i) * (wide ? 8 : 4));
    return {words[0], words[wide ? 1 : 0]};
  }
  ROPE_FN int64_t value(bool wide) const {
    return int64_t(uint64_t(uint32_t(wide ? high : low >> 31)) << 32 | uint32_t(low));
  }
};

// Token s of sequence b, with its position and slot. I is an integer type that holds every element offset of the call.
template <typename I>
struct Token {
  I b, s;
  const RotateArgs& a;
  const RopeParams& p;
  const Tiling& tiling;
  Integer given_position, given_slot;  // the elements of positions and slots; a number made from s if there are none
  int64_t position = 0;  // given_position + offset. The sum wraps around: with inv_freq every position is allowed.
  bool valid = true;     // the position is allowed
  I slot = 0;            // without slots, the position; -1: the token is a pad, which goes to no cell

  // Starts the loads of position and slot.
  ROPE_FN Token(const RotateArgs& a, const Tiling& tiling, I b, I s) : b(b), s(s), a(a), p(a.params), tiling(tiling) {
    const int64_t own = int64_t(s) * tiling.position_step;
    given_position = given_slot = Integer{int32_t(own), int32_t(own >> 32)};
    if (p.has_slots) given_slot = Integer::read(a.slots, a.wide_slots, b * I(p.slots[0]) + s * I(p.slots[1]));
    if (p.has_positions) {
      given_position = Integer::read(a.positions, a.wide_positions, b * I(p.positions[0]) + s * I(p.positions[1]));
    }
  }

  // Waits for the position. Call it before the loads of heads: a later wait would be for those loads too, because the
  // compiler (nvcc 13.0) gives each load a scoreboard to wait on, and loads that are used in other branches may share
  // one.
  ROPE_FN void arrive() {
    position = int64_t(uint64_t(given_position.value(!p.has_positions || a.wide_positions)) + uint64_t(p.offset));
    valid = position >= tiling.first_position && position <= tiling.last_position;
  }

  // Stops the kernel if position or slot is not allowed. Call it after the loads of table rows and heads have started:
  // the compiler moves no instruction across an assertion, and in a decode step nothing should delay those loads.
  // cache: a token whose slot is negative is a pad, and may have any position.
  template <bool cache>
  ROPE_FN void check() {
    bool pad = false, fits = true;
    if (cache) slot = I(position);
    if (cache && p.has_slots) {
      const int64_t given = given_slot.value(a.wide_slots);
      pad = given < 0;
      fits = given < p.blocks * p.block_size;
      slot = pad ? I(-1) : I(given);
    }
    if ((valid || pad) && fits) return;
    assert((valid || pad) && "position + offset must be a row of cos and sin, and a cell of the caches");
    assert(fits && "slot must be less than the number of cells in the caches");
    __builtin_unreachable();
  }
};

// A cell of a cache: a block, and the index of the cell in it. Nothing is written if block is -1.
template <typename I>
struct Cell {
  I block, in_block;
};
template <typename I>
ROPE_FN Cell<I> cell_of(const Token<I>& t) {
  const RopeParams& p = t.p;
  if (!p.has_slots) return {t.b, t.slot};
  if (p.blocks == 1 || t.slot < 0) return {t.slot < 0 ? I(-1) : I(0), t.slot};
  if (sizeof(I) == 4 || t.tiling.narrow_slots) {
    const uint32_t size = uint32_t(p.block_size), block = uint32_t(t.slot) / size;
    return {I(block), I(uint32_t(t.slot) - block * size)};
  }
  const I block = t.slot / I(p.block_size);
  return {block, t.slot - block * I(p.block_size)};
}

// ---- angles ----

template <typename A, int V>
struct Angles {
  A cos[V], sin[V];
};

// Multiplies cos and sin by attention_factor.
template <typename A, int V>
ROPE_FN void scale(Angles<A, V>& angles, A factor_hi, A factor_lo) {
  if (factor_hi == A(1) && factor_lo == A(0)) return;
#pragma unroll
  for (int i = 0; i < V; i++) {
    angles.cos[i] = scaled(angles.cos[i], factor_hi, factor_lo);
    angles.sin[i] = scaled(angles.sin[i], factor_hi, factor_lo);
  }
}

// The pairs of a chunk have adjacent columns in the tables and in inv_freq, in one run or in two. With interleaved
// pairs and vectors of several channels there are two runs, because each of the chunk's two vectors has V / 2 pairs of
// its own.
template <bool interleaved, int V>
struct Runs {
  static constexpr int count = interleaved && V > 1 ? 2 : 1, length = V / count;
  // Returns the first column of a run.
  template <typename I>
  ROPE_FN static I first(int run, int chunk, I pairs) {
    return run * (pairs / 2) + I(chunk) * length;
  }
};

// The frequencies of a call, see split_inv_freq in ../rope.h.
struct Frequencies {
  const void* from;
  bool is_double, split;
  rope_int part;  // the distance between the two parts
};

// An angle whose cos and sin are not computed yet, as a sum of two numbers: in float32 in turns, see turns_of() in
// angle.h, and in double in radians, see angle_of() there.
template <typename A>
struct Angle {
  A angle, rest;
};

// Computes an angle: the product of position and frequency `at`. Doubles cost each thread four conversions and a
// subtraction for its position, and with a float64 inv_freq three conversions and a subtraction for each pair. Even on
// GPUs with slow doubles this is little compared with the rest, which is all float32.
ROPE_FN void angle_at(double position, const Frequencies& f, int64_t at, Angle<float>& angle) {
  float freq, rest = 0.0f;
  if (f.is_double) {
    const double wide = static_cast<const double*>(f.from)[at];
    freq = float(wide);
    rest = float(wide - double(freq));
  } else {
    freq = static_cast<const float*>(f.from)[at];
    if (f.split) two_sum(freq, static_cast<const float*>(f.from)[at + f.part], freq, rest);
  }
  float turns_hi, turns_lo;
  turns_per_position(freq, rest, turns_hi, turns_lo);
  const float position_hi = float(position), position_lo = float(position - double(position_hi));
  turns_of(position_hi, position_lo, turns_hi, turns_lo, angle.angle, angle.rest);
}
ROPE_FN void angle_at(double position, const Frequencies& f, int64_t at, Angle<double>& angle) {
  double freq;
  if (f.is_double) {
    freq = static_cast<const double*>(f.from)[at];
  } else {
    freq = static_cast<const float*>(f.from)[at];
    if (f.split) freq += static_cast<const float*>(f.from)[at + f.part];
  }
  angle_of(position, freq, angle.angle, angle.rest);
}

ROPE_FN void add(Angle<float>& sum, const Angle<float>& more) { add_turns(more.angle, more.rest, sum.angle, sum.rest); }
ROPE_FN void add(Angle<double>& sum, const Angle<double>& more) {
  add_angle(more.angle, more.rest, sum.angle, sum.rest);
}

ROPE_FN void cos_sin_of(const Angle<float>& angle, float& cos, float& sin) {
  cos_sin_of_turns(angle.angle, angle.rest, cos, sin);
}
ROPE_FN void cos_sin_of(const Angle<double>& angle, double& cos, double& sin) {
  cos_sin_of_angle(angle.angle, angle.rest, cos, sin);
}

// ---- a chunk of a head ----

// The channels of a chunk. If the vectors have several channels, the two vectors of a rotated chunk are one from each
// half of the rotated channels, with either pairing: interleaved pairs do not cross a vector. The other channels, those
// before and after the rotated ones, are taken as if they were adjacent; there second is (chunks - rotated) vectors
// after first. I is an integer type that holds every element offset of the call.
template <typename I>
struct Chunk {
  I first, second;  // the first channels of its two vectors
  int rotated;      // an int, because a bool that stays in a register costs a PRMT at each use

  // Returns false if the chunk has only one vector.
  ROPE_FN bool whole() const { return second != first; }

  template <int V>
  ROPE_FN static Chunk at(const RopeParams& p, const Tiling& t, int index) {
    if (index < t.rotated) {
      const I pairs = I(p.rotary_dim / 2), pair = V == 1 ? first_channel(I(index), p.interleaved) : I(index) * V;
      const I first = I(p.rotary_start) + pair;
      return {first, first + (V == 1 ? partner_distance(pairs, p.interleaved) : pairs), 1};
    }
    const auto channel = [&](I other) { return other < I(p.rotary_start) ? other : other + I(p.rotary_dim); };
    const I first = I(index - t.rotated) * V, second = first + I(t.chunks - t.rotated) * V;
    return {channel(first), channel(second < I(p.head_dim - p.rotary_dim) ? second : first), 0};
  }
};

// The elements of a chunk.
template <typename T, int V>
struct Elements {
  Vector<T, V> first, second;
};

// These access the channels up to `last`, by default all.
template <typename I>
constexpr I kAllChannels = std::numeric_limits<I>::max();
template <bool vectors, typename T, int V, typename I>
ROPE_FN void read(const T* from, I stride, const Chunk<I>& c, Elements<T, V>& x, I last = kAllChannels<I>) {
  if constexpr (vectors) {
    if (c.first <= last) x.first = *reinterpret_cast<const Vector<T, V>*>(from + c.first);
    if (c.second <= last) x.second = *reinterpret_cast<const Vector<T, V>*>(from + c.second);
  } else {
    read_each(from, stride, c.first, last, x.first);
    read_each(from, stride, c.second, last, x.second);
  }
}

template <bool vectors, typename T, int V, typename I>
ROPE_FN void write(const Elements<T, V>& x, T* to, I stride, const Chunk<I>& c, I last = kAllChannels<I>) {
  if constexpr (vectors) {
    if (c.first <= last) *reinterpret_cast<Vector<T, V>*>(to + c.first) = x.first;
    if (c.whole() && c.second <= last) *reinterpret_cast<Vector<T, V>*>(to + c.second) = x.second;
  } else {
    write_each(x.first, to, stride, c.first, last);
    if (c.whole()) write_each(x.second, to, stride, c.second, last);
  }
}

// The elements of a chunk in the arithmetic type.
template <typename A, int V>
struct Numbers {
  A first[V], second[V];
};

template <typename T, int V>
ROPE_FN Numbers<arithmetic_t<T>, V> numbers_of(const Elements<T, V>& x) {
  Numbers<arithmetic_t<T>, V> n;
  to_arithmetic(x.first, n.first);
  to_arithmetic(x.second, n.second);
  return n;
}

template <typename T, int V>
ROPE_FN Elements<T, V> rounded(const Numbers<arithmetic_t<T>, V>& n) {
  return {rounded<T>(n.first), rounded<T>(n.second)};
}

// Returns member 0 or 1 of pair i. A chunk of interleaved vectors has the first half of its pairs in its first vector.
template <bool interleaved, typename A, int V>
ROPE_FN A& member(Numbers<A, V>& n, int i, int which) {
  if constexpr (!interleaved || V == 1) {
    return which == 0 ? n.first[i] : n.second[i];
  } else {
    return i < V / 2 ? n.first[2 * i + which] : n.second[2 * i + which - V];
  }
}

// Replaces both channels of each pair by what channel(own, partner, cos, signed_sin) returns, see ../rotation.h.
template <bool interleaved, typename A, int V, typename F>
ROPE_FN void rotate_with(Numbers<A, V>& n, const Angles<A, V>& angles, F&& channel) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    A &x = member<interleaved>(n, i, 0), &y = member<interleaved>(n, i, 1);
    const A own = x, cos = angles.cos[i], sin = angles.sin[i];
    x = channel(own, y, cos, -sin);
    y = channel(y, own, cos, sin);
  }
}
template <bool interleaved, typename A, int V>
ROPE_FN void rotate(Numbers<A, V>& n, const Angles<A, V>& angles) {
  rotate_with<interleaved>(n, angles, [](A own, A partner, A cos, A sin) { return rotated(own, partner, cos, sin); });
}
template <bool interleaved, typename A, int V, typename Round>
ROPE_FN void rotate_eagerly(Numbers<A, V>& n, const Angles<A, V>& angles, Round round) {
  rotate_with<interleaved>(
      n, angles, [&](A own, A partner, A cos, A sin) { return rotated_eagerly(own, partner, cos, sin, round); });
}

// The sums of one thread, one for each channel of its chunk, with Kahan's compensation: the result is sum - over.
template <typename A, int V>
struct Sums {
  Numbers<A, V> sum{}, over{};  // over: by how much rounding made the sum too large

  ROPE_FN static void add(A& sum, A& over, A x) {
    const A y = x - over, larger = sum + y;
    over = (larger - sum) - y;
    sum = larger;
  }
  ROPE_FN void add(const Numbers<A, V>& x) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      add(sum.first[i], over.first[i], x.first[i]);
      add(sum.second[i], over.second[i], x.second[i]);
    }
  }
};

// ---- the angles of a chunk ----

// cos and sin of the pairs of a chunk, scaled by attention_factor. They are computed in three steps, between which the
// thread does other work: the constructor needs no position, read() starts the loads of table rows, and finish() waits
// for them. The angles of a table by head are those of one head, so rotate() takes these steps for each head.
// general: the source may be a table by head, and the rounding not kOnce.
template <typename T, bool interleaved, int V, typename I, bool general>
struct AnglesOf {
  using A = arithmetic_t<T>;
  using R = Runs<interleaved, V>;
  static constexpr bool words = Vector<T, R::length>::words;
  const RotateArgs& a;
  const Token<I>& t;
  const int chunk;
  I cos_at, sin_at;  // the chunk's first element in row 0 of the token's tables
  Angles<A, V> angles;

  ROPE_FN AnglesOf(const RotateArgs& a, const Token<I>& t, int chunk) : a(a), t(t), chunk(chunk) {
    const RopeParams& p = a.params;
    const I column = I(chunk) * R::length;
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
    if constexpr (general) {
      if (a.params.rounding != kOnce) {
        const bool narrow = a.params.rounding == kEachNarrow;
        return rotate_eagerly<interleaved>(n, angles, [=](A x) { return narrow ? rounded_to<T>(x) : x; });
      }
    }
    cuda::rotate<interleaved>(n, angles);
  }

 private:
  ROPE_FN bool by_head() const { return general && a.params.source == kTableByHead; }

  ROPE_FN void compute() {
    const RopeParams& p = a.params;
    const double position = double(t.position);
    const Frequencies frequencies{a.inv_freq, a.inv_freq_dtype == DType::kDouble, p.split_inv_freq != 0, p.inv_freq[0]};
#pragma unroll
    for (int i = 0; i < V; i++) {
      const I at = R::first(i / R::length, chunk, I(p.rotary_dim / 2)) + i % R::length;
      Angle<A> angle;
      angle_at(position, frequencies, at * I(p.inv_freq[1]), angle);
      cos_sin_of(angle, angles.cos[i], angles.sin[i]);
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

  ROPE_FN void finish_numbers() {
    const RopeParams& p = a.params;
    if (general && p.rounding != kOnce) {
      scale_eagerly(angles.cos);
      scale_eagerly(angles.sin);
    } else {
      const A hi = sizeof(A) == 8 ? A(a.attention_factor) : A(p.factor_hi), lo = sizeof(A) == 8 ? A(0) : A(p.factor_lo);
      scale(angles, hi, lo);
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
    if (p.rounding == kEachNarrow) to_arithmetic(rounded<T>(numbers), numbers);
  }

  ROPE_FN void read_row(I head) {
    if (t.tiling.table_vectors) {
      read_tables<true>(head);
    } else {
      read_tables<false>(head);
    }
  }
  template <bool vectors>
  ROPE_FN void read_tables(I head) {
    const RopeParams& p = a.params;
    const I row = p.source == kTableByPosition ? I(t.position) : t.s;
    const I cos_row = cos_at + row * I(p.cos[1]) + head * I(p.cos[2]);
    const I sin_row = sin_at + row * I(p.sin[1]) + head * I(p.sin[2]);
    if (a.table_dtype == DType::kFloat) {
      read_row<vectors>(static_cast<const float*>(a.cos) + cos_row, p.cos[3], angles.cos);
      read_row<vectors>(static_cast<const float*>(a.sin) + sin_row, p.sin[3], angles.sin);
    } else {
      read_row<vectors>(static_cast<const T*>(a.cos) + cos_row, p.cos[3], angles.cos);
      read_row<vectors>(static_cast<const T*>(a.sin) + sin_row, p.sin[3], angles.sin);
    }
  }
  template <bool vectors, typename Table>
  ROPE_FN void read_row(const Table* from, rope_int stride, A* to) {
    const rope_int next_run = a.params.rotary_dim / 4 * (vectors ? 1 : stride);
#pragma unroll
    for (int run = 0; run < R::count; run++, from += next_run, to += R::length) {
      if constexpr (vectors && words && sizeof(Table) == 2) {  // the words stay as they are until finish()
        const auto row = *reinterpret_cast<const Vector<Table, R::length>*>(from);
#pragma unroll
        for (int i = 0; i < R::length / 2; i++) to[i] = bits_as<float>(row.of[i]);
      } else {
        read_shared<vectors, R::length>(from, stride, to);
      }
    }
  }
  ROPE_FN static void unpack_all(A (&numbers)[V]) {
#pragma unroll
    for (int run = 0; run < V; run += R::length) {
#pragma unroll
      for (int i = R::length / 2 - 1; i >= 0; i--) {  // the last first, because a word is where its results go
        unpack<T>(bits_as<uint32_t>(numbers[run + i]), numbers[run + 2 * i], numbers[run + 2 * i + 1]);
      }
    }
  }
};

// Rotates chunk `chunk` of a head.
template <typename T, bool interleaved, int V, typename I>
ROPE_FN void rotate_chunk(const RotateArgs& a, const Token<I>& t, int chunk, I head, Numbers<arithmetic_t<T>, V>& n) {
  AnglesOf<T, interleaved, V, I, true> angles(a, t, chunk);
  angles.read();
  angles.finish();
  angles.rotate(n, head);
}

// ---- the heads of a token ----

// A loop over the heads that a team takes of its thread block's share of the list of heads, see plan.h. Team
// threadIdx.y begins with head threadIdx.y of the share and goes on by blockDim.y. The loop is in one of the three
// tensors at a time. I is an integer type that holds every element offset of the call. cache: the call may have a v,
// and then k and v go to a cache. general: the heads of v may be in pieces. any: the caches may be quantised, and v
// normalised.
template <typename T, typename I, bool cache, bool general, bool any = false>
struct Heads {
  const RotateArgs& a;
  const Token<I>& token;
  const bool skip_in_place;         // this chunk is not rotated, so tensors that are changed in place keep it
  I share_end;                      // end of the thread block's share of the list
  int tensor = 0;                   // 0 q, 1 k, 2 v
  I start = 0;                      // where the heads of the tensor begin in the list
  I head = 0;                       // the next head of the tensor that the team takes
  I end = 0;                        // end of the tensor's heads in the share
  I out_end = -1;                   // end of the heads that are written: 0 if the token is a pad; -1: not located yet
  const T* in = nullptr;            // head 0 of the token
  T* out = nullptr;                 // head 0 of the result; of a quantised cache, the address of its bytes
  I in_step = 0, out_step = 0;      // stride of heads
  I in_stride = 0, out_stride = 0;  // stride of channels

  ROPE_FN Heads(const RotateArgs& a, const Token<I>& token, bool skip_in_place)
      : a(a), token(token), skip_in_place(skip_in_place) {
    const I share = I(token.tiling.heads_per_thread_block);
    start = I(blockIdx.y) * share;
    share_end = min(start + share, I(token.tiling.heads));
    head = I(threadIdx.y);
  }

  // Returns whether the tensor is rotated: v is only copied.
  ROPE_FN bool rotates() const { return !cache || tensor < 2; }

  // Returns whether the heads of the tensor are normalised.
  ROPE_FN bool normalises() const {
    if constexpr (!any) return rotates();
    return tensor < 2 ? a.params.has_norm : a.params.norm_v;
  }

  // Begins with all heads of a tensor, whatever the thread block's share is.
  ROPE_FN void take(int which) {
    tensor = which;
    start = head = 0;
    end = I(operand().heads);
    find_input();
  }

  // Returns the head that this team takes i steps from now.
  ROPE_FN I head_at(int i) const { return head + I(i) * I(blockDim.y); }

  // Goes on by `count` steps, to the next tensor if this one is done. Returns false if the share is done.
  ROPE_FN bool next(int count) {
    head = head_at(count);
    while (head >= end || (skip_in_place && in_place())) {
      // The team's first head past this tensor. blockDim.y is a power of two.
      const I at = start + end + ((head - end) & (I(blockDim.y) - 1));
      if (at >= share_end) return false;
      enter(at);
    }
    return true;
  }

  // Returns whether locate() was called since the loop began with this tensor.
  ROPE_FN bool located() const { return out_end >= 0; }

  // Reads the chunk of a head, or of a piece of a head of v.
  template <bool vectors, int V>
  ROPE_FN void read(I head, const Chunk<I>& c, Elements<T, V>& x) const {
    if (in_pieces()) {
      const Piece piece(token, head);
      cuda::read<vectors>(in + piece.head * in_step + piece.first * in_stride, in_stride, c, x, piece.last);
    } else {
      cuda::read<vectors>(in + head * in_step, in_stride, c, x);
    }
  }
  // Writes the same. If `changes`, it first applies change() to the numbers.
  template <bool vectors, int V, typename F>
  ROPE_FN void write(I head, const Chunk<I>& c, Elements<T, V>& x, bool changes, F&& change) const {
    const bool quantises = any && format().quantised;
    if (changes || quantises) {
      auto numbers = numbers_of(x);
      if (changes) change(numbers);
      if (quantises) return write_to<vectors>(reinterpret_cast<uint8_t*>(out), head, c, quantised(head, numbers));
      x = rounded<T, V>(numbers);
    }
    write_to<vectors>(out, head, c, x);
  }

  // Points `out` at this tensor's result. Call it after reading and before writing, so that no read waits for the slot.
  ROPE_FN void locate() {
    if (located()) return;
    out_end = end;
    const Operand& o = operand();
    out = static_cast<T*>(tensor == 0 ? a.q_out : tensor == 1 ? a.k_out : a.v_out);
    out_step = I(o.out[2]);
    out_stride = I(o.out[3]);
    Cell<I> cell{token.b, token.s};
    if (cache && tensor > 0 && a.params.has_cache) {
      cell = cell_of(token);
      if (cell.block < 0) out_end = 0;
    }
    const I offset = cell.block * I(o.out[0]) + cell.in_block * I(o.out[1]);
    if (any && format().quantised) {
      out = reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(out) + offset);
    } else {
      out += offset;
    }
  }

 private:
  // A piece of a head of v, see Tiling.
  struct Piece {
    I head, first, last;  // `first` is its first channel, and its channel `last` is the last one of the head

    ROPE_FN Piece(const Token<I>& token, I index) {
      const I pieces = I(token.tiling.v_pieces);
      head = index / pieces;
      first = (index - head * pieces) * I(token.p.head_dim);
      last = I(token.p.v_dim) - first - 1;
    }
  };
  ROPE_FN bool in_pieces() const { return general && tensor == 2; }

  // Writes the chunk of a head, or of a piece of a head of v, to a result that begins at `to`.
  template <bool vectors, typename E, int V>
  ROPE_FN void write_to(E* to, I head, const Chunk<I>& c, const Elements<E, V>& x) const {
    if (in_pieces()) {
      const Piece piece(token, head);
      cuda::write<vectors>(x, to + piece.head * out_step + piece.first * out_stride, out_stride, c, piece.last);
    } else {
      cuda::write<vectors>(x, to + head * out_step, out_stride, c);
    }
  }

  // The format of what the tensor is written to. That of q has no member that is not 0.
  ROPE_FN CacheFormat format() const {
    return tensor == 0 ? CacheFormat{} : tensor == 1 ? a.params.k_cache : a.params.v_cache;
  }

  // Returns what a quantised cache stores of a head, or of a piece of a head of v.
  template <typename A, int V>
  ROPE_FN Elements<uint8_t, V> quantised(I head, Numbers<A, V> n) const {
    if (a.params.rounding != kOnce) n = numbers_of(rounded<T, V>(n));
    const CacheFormat f = format();
    const rope_int of_scale = tensor == 2 ? Piece(token, head).head : head;
    const A scale = A((tensor == 1 ? a.k_scale : a.v_scale)[of_scale * f.scale]);
    Elements<uint8_t, V> bytes;
#pragma unroll
    for (int i = 0; i < V; i++) {
      bytes.first.of[i] = uint8_t(rope::quantised(narrowed_to_odd(n.first[i] / scale), f));
      bytes.second.of[i] = uint8_t(rope::quantised(narrowed_to_odd(n.second[i] / scale), f));
    }
    return bytes;
  }

  ROPE_FN const Operand& operand() const {
    const RopeParams& p = a.params;
    return tensor == 0 ? p.q : !cache || tensor == 1 ? p.k : p.v;
  }

  ROPE_FN bool in_place() const {
    return tensor == 0 ? token.tiling.q_in_place : tensor == 1 && token.tiling.k_in_place;
  }

  // Begins with the head at this index of the list.
  ROPE_FN void enter(I at) {
    const Tiling& tiling = token.tiling;
    const I k_start = I(tiling.k_start), v_start = I(tiling.v_start);
    tensor = at < k_start ? 0 : !cache || at < v_start ? 1 : 2;
    start = tensor == 0 ? I(0) : !cache || tensor == 1 ? k_start : v_start;
    head = at - start;
    const Operand& o = operand();
    end = in_pieces() ? share_end - start : min(share_end - start, I(o.heads));
    find_input();
  }

  // Points `in` at this tensor.
  ROPE_FN void find_input() {
    const Operand& o = operand();
    out_end = -1;
    in = static_cast<const T*>(tensor == 0 ? a.q_in : !cache || tensor == 1 ? a.k_in : a.v_in);
    in += token.b * I(o.in[0]) + token.s * I(o.in[1]);
    in_step = I(o.in[2]);
    in_stride = I(o.in[3]);
  }
};

// ---- launching ----

// Calls f with a value of the type that dtype names.
template <typename F>
cudaError_t with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kHalf:
      return f(__half());
    case DType::kBFloat16:
      return f(__nv_bfloat16());
    case DType::kFloat:
      return f(float());
    case DType::kDouble:
      return f(double());
  }
  return cudaErrorInvalidValue;
}

template <typename... Parameters>
cudaError_t start(Dim3 grid, Dim3 block, Queue queue, void (*kernel)(Parameters...),
                  const std::type_identity_t<Parameters>&... args) {
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.x, grid.y, grid.z);
  config.blockDim = dim3(block.x, block.y, block.z);
  config.dynamicSmemBytes = queue.dynamic_shared;
  config.stream = queue.stream;
  config.attrs = &dependent;
  config.numAttrs = queue.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Launches a kernel once for every 65535 sequences, because gridDim.z has that limit.
inline cudaError_t start(const Plan& plan, Queue queue, void (*kernel)(RotateArgs, Tiling), const RotateArgs& args) {
  Tiling tiling = plan.tiling;
  for (rope_int left = args.params.batch; left > 0; left -= kMaxGrid, tiling.first_sequence += kMaxGrid) {
    const Dim3 grid{plan.grid.x, plan.grid.y, unsigned(std::min(left, kMaxGrid))};
    if (const cudaError_t error = start(grid, plan.block, queue, kernel, args, tiling)) return error;
  }
  return cudaSuccess;
}

}  // namespace rope::cuda
