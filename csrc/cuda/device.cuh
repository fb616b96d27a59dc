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
#include <type_traits>

#include "kernels.h"

#define ROPE_FN __device__ __forceinline__

namespace rope {
// The functions that rotation.h and angle.h expect.
ROPE_FN float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
ROPE_FN double fma(double a, double b, double c) { return ::fma(a, b, c); }
ROPE_FN float rint(float a) { return ::rintf(a); }
ROPE_FN void cosine_and_sine(double angle, double& cos, double& sin) { ::sincos(angle, &sin, &cos); }
}  // namespace rope

#include "../angle.h"
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

// Reads or writes the elements of a vector one by one. `stride` is the distance between two of them.
template <typename T, int n, typename I>
ROPE_FN void read_each(const T* from, I stride, Vector<T, n>& v) {
  if constexpr (Vector<T, n>::words) {
#pragma unroll
    for (int i = 0; i < n / 2; i++) {
      v.of[i] = bits_as<uint16_t>(from[2 * i * stride]) | uint32_t(bits_as<uint16_t>(from[(2 * i + 1) * stride])) << 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) v.of[i] = from[i * stride];
  }
}
template <typename T, int n, typename I>
ROPE_FN void write_each(const Vector<T, n>& v, T* to, I stride) {
  if constexpr (Vector<T, n>::words) {
#pragma unroll
    for (int i = 0; i < n / 2; i++) {
      to[2 * i * stride] = bits_as<T>(uint16_t(v.of[i]));
      to[(2 * i + 1) * stride] = bits_as<T>(uint16_t(v.of[i] >> 16));
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) to[i * stride] = v.of[i];
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

// ---- the angles of a chunk ----

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

// An angle whose cos and sin are not computed yet, as a sum of two numbers: in float32 in turns, see turns_of() in
// angle.h, and in double in radians, see angle_of() there.
template <typename A>
struct Angle {
  A angle, rest;
};

// Computes an angle: the product of position and inv_freq[at]. Doubles cost each thread four conversions and a
// subtraction for its position, and with a float64 inv_freq three conversions and a subtraction for each pair. Even on
// GPUs with slow doubles this is little compared with the rest, which is all float32.
ROPE_FN void angle_at(double position, const void* inv_freq, bool is_double, int64_t at, Angle<float>& angle) {
  float freq, rest = 0.0f;
  if (is_double) {
    const double f = static_cast<const double*>(inv_freq)[at];
    freq = float(f);
    rest = float(f - double(freq));
  } else {
    freq = static_cast<const float*>(inv_freq)[at];
  }
  float turns_hi, turns_lo;
  turns_per_position(freq, rest, turns_hi, turns_lo);
  const float position_hi = float(position), position_lo = float(position - double(position_hi));
  turns_of(position_hi, position_lo, turns_hi, turns_lo, angle.angle, angle.rest);
}
ROPE_FN void angle_at(double position, const void* inv_freq, bool is_double, int64_t at, Angle<double>& angle) {
  angle_of(position,
           is_double ? static_cast<const double*>(inv_freq)[at] : double(static_cast<const float*>(inv_freq)[at]),
           angle.angle, angle.rest);
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

// cos and sin of the pairs of a chunk, scaled by attention_factor. They are computed in three steps, between which the
// thread does other work: the constructor needs no position, read() starts the loads of table rows, and finish() waits
// for them.
template <typename T, bool interleaved, int V, typename I>
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
    cos_at = t.b * I(p.cos[0]) + column * I(p.cos[2]);
    sin_at = t.b * I(p.sin[0]) + column * I(p.sin[2]);
  }

  ROPE_FN void read() {
    if (a.params.source == kInvFreq || !t.valid) return;
    if (t.tiling.table_vectors) {
      read_tables<true>();
    } else {
      read_tables<false>();
    }
  }

  ROPE_FN const Angles<A, V>& finish() {
    const RopeParams& p = a.params;
    if (!t.valid) {  // a pad
#pragma unroll
      for (int i = 0; i < V; i++) angles.cos[i] = angles.sin[i] = A(NAN);
      return angles;
    }
    if (p.source == kInvFreq) {
      const double position = double(t.position);
#pragma unroll
      for (int i = 0; i < V; i++) {
        const I at = R::first(i / R::length, chunk, I(p.rotary_dim / 2)) + i % R::length;
        Angle<A> angle;
        angle_at(position, a.inv_freq, a.inv_freq_dtype == DType::kDouble, at * I(p.inv_freq), angle);
        cos_sin_of(angle, angles.cos[i], angles.sin[i]);
      }
    } else if constexpr (words) {
      if (a.table_dtype != DType::kFloat && t.tiling.table_vectors) {
        unpack_all(angles.cos);
        unpack_all(angles.sin);
      }
    }
    const A hi = sizeof(A) == 8 ? A(a.attention_factor) : A(p.factor_hi), lo = sizeof(A) == 8 ? A(0) : A(p.factor_lo);
    scale(angles, hi, lo);
    if (p.inverse) {
#pragma unroll
      for (int i = 0; i < V; i++) angles.sin[i] = -angles.sin[i];
    }
    return angles;
  }

 private:
  template <bool vectors>
  ROPE_FN void read_tables() {
    const RopeParams& p = a.params;
    const I row = p.source == kTableByPosition ? I(t.position) : t.s;
    const I cos_row = cos_at + row * I(p.cos[1]), sin_row = sin_at + row * I(p.sin[1]);
    if (a.table_dtype == DType::kFloat) {
      read_row<vectors>(static_cast<const float*>(a.cos) + cos_row, p.cos[2], angles.cos);
      read_row<vectors>(static_cast<const float*>(a.sin) + sin_row, p.sin[2], angles.sin);
    } else {
      read_row<vectors>(static_cast<const T*>(a.cos) + cos_row, p.cos[2], angles.cos);
      read_row<vectors>(static_cast<const T*>(a.sin) + sin_row, p.sin[2], angles.sin);
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

// Returns cos and sin of the pairs of chunk `chunk`, scaled by attention_factor, from the tables or from inv_freq.
template <typename T, bool interleaved, int V, typename I>
ROPE_FN Angles<arithmetic_t<T>, V> angles_of(const RotateArgs& a, const Token<I>& t, int chunk) {
  AnglesOf<T, interleaved, V, I> angles(a, t, chunk);
  angles.read();
  return angles.finish();
}

// ---- a chunk of a head ----

// The channels of a chunk. If the vectors have several channels, the two vectors of a rotated chunk are one from each
// half of the rotated channels, with either pairing: interleaved pairs do not cross a vector. Past rotary_dim, second
// is (chunks - rotated) vectors after first. I is an integer type that holds every element offset of the call.
template <typename I>
struct Chunk {
  I first, second;  // the first channels of its two vectors
  int rotated;      // an int, because a bool that stays in a register costs a PRMT at each use

  // Returns false if the chunk has only one vector.
  ROPE_FN bool whole() const { return second != first; }

  template <bool interleaved, int V>
  ROPE_FN static Chunk at(const RopeParams& p, const Tiling& t, int index) {
    if (index < t.rotated) {
      const I pairs = I(p.rotary_dim / 2), first = V == 1 ? first_channel(I(index), interleaved) : I(index) * V;
      return {first, first + (V == 1 ? partner_distance(pairs, interleaved) : pairs), 1};
    }
    const I first = I(p.rotary_dim) + I(index - t.rotated) * V, second = first + I(t.chunks - t.rotated) * V;
    return {first, second < I(p.head_dim) ? second : first, 0};
  }
};

// The elements of a chunk.
template <typename T, int V>
struct Elements {
  Vector<T, V> first, second;
};

template <bool vectors, typename T, int V, typename I>
ROPE_FN void read(const T* from, I stride, const Chunk<I>& c, Elements<T, V>& x) {
  if constexpr (vectors) {
    x.first = *reinterpret_cast<const Vector<T, V>*>(from + c.first);
    x.second = *reinterpret_cast<const Vector<T, V>*>(from + c.second);
  } else {
    read_each(from + c.first * stride, stride, x.first);
    read_each(from + c.second * stride, stride, x.second);
  }
}

template <bool vectors, typename T, int V, typename I>
ROPE_FN void write(const Elements<T, V>& x, T* to, I stride, const Chunk<I>& c) {
  if constexpr (vectors) {
    *reinterpret_cast<Vector<T, V>*>(to + c.first) = x.first;
    if (c.whole()) *reinterpret_cast<Vector<T, V>*>(to + c.second) = x.second;
  } else {
    write_each(x.first, to + c.first * stride, stride);
    if (c.whole()) write_each(x.second, to + c.second * stride, stride);
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

template <bool interleaved, typename A, int V>
ROPE_FN void rotate(Numbers<A, V>& n, const Angles<A, V>& angles) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    A &x = member<interleaved>(n, i, 0), &y = member<interleaved>(n, i, 1);
    const A own = x, cos = angles.cos[i], sin = angles.sin[i];
    x = rotated(own, y, cos, -sin);
    y = rotated(y, own, cos, sin);
  }
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

// ---- the heads of a token ----

// A loop over the heads that a team takes of its thread block's share of the list of heads, see plan.h. Team
// threadIdx.y begins with head threadIdx.y of the share and goes on by blockDim.y. The loop is in one of the three
// tensors at a time. I is an integer type that holds every element offset of the call. cache: the call may have a v,
// and then k and v go to a cache.
template <typename T, typename I, bool cache>
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
  T* out = nullptr;                 // head 0 of the result
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

  // Points `out` at this tensor's result. Call it after reading and before writing, so that no read waits for the slot.
  ROPE_FN void locate() {
    if (located()) return;
    out_end = end;
    const Operand& o = operand();
    out = static_cast<T*>(tensor == 0 ? a.q_out : tensor == 1 ? a.k_out : a.v_out);
    out_step = I(o.out[2]);
    out_stride = I(o.out[3]);
    Cell<I> cell{token.b, token.s};
    if (cache && tensor > 0 && a.params.v.heads) {
      cell = cell_of(token);
      if (cell.block < 0) out_end = 0;
    }
    out += cell.block * I(o.out[0]) + cell.in_block * I(o.out[1]);
  }

 private:
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
    end = min(share_end - start, I(o.heads));
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
