// Device code that the kernels share: conversions, memory accesses, the position and slot of a token, the angles of a
// chunk, and the loop over the heads of a token. plan.h and ../plan.h explain chunks and teams.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#undef NDEBUG  // a position outside its table must stop the kernel, as torch's own indexing does
#include <cassert>
#include <cstdint>
#include <type_traits>

#include "plan.h"

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

template <typename T, int n>
struct alignas(sizeof(T) * n) Vector {
  T of[n];
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

template <typename T, int n>
ROPE_FN void round_to(const arithmetic_t<T> (&x)[n], T (&y)[n]) {
  if constexpr (sizeof(T) == 2 && n % 2 == 0) {  // two in one instruction
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 two = __floats2half2_rn(x[i], x[i + 1]);
        y[i] = two.x, y[i + 1] = two.y;
      } else {
        const __nv_bfloat162 two = __floats2bfloat162_rn(x[i], x[i + 1]);
        y[i] = two.x, y[i + 1] = two.y;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) round_to(x[i], y[i]);
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
#pragma unroll
      for (int j = 0; j < m; j++) to[i + j] = A(to_arithmetic(v.of[j]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; i++) to[i] = A(to_arithmetic(from[i * stride]));
  }
}

// ---- tokens ----

// An int32 or int64 that is being loaded. The thread waits for the load only in value(), so that several loads can be
// under way at once.
struct Integer {
  int32_t low, high;
  bool wide;

  template <typename I>
  ROPE_FN static Integer read(const void* from, bool wide, I i) {
    const auto* words = reinterpret_cast<const int32_t*>(static_cast<const char*>(from) + int64_t(i) * (wide ? 8 : 4));
    return {words[0], words[wide ? 1 : 0], wide};
  }
  ROPE_FN int64_t value() const { return wide ? int64_t(uint64_t(uint32_t(high)) << 32 | uint32_t(low)) : low; }
};

// Token s of sequence b, with its position and slot. I is an integer type that holds every element offset of the call.
template <typename I>
struct Token {
  I b, s;
  const RopeParams& p;
  const Tiling& tiling;
  Integer given_position, given_slot;  // the elements of positions and slots; a number made from s if there are none
  int64_t position = 0;  // given_position + offset. The sum wraps around: with inv_freq every position is allowed.
  int64_t slot = 0;

  // Starts the loads of position and slot.
  ROPE_FN Token(const RotateArgs& a, const Tiling& tiling, I b, I s) : b(b), s(s), p(a.params), tiling(tiling) {
    const int64_t own = int64_t(s) * tiling.position_step;
    given_position = given_slot = Integer{int32_t(own), int32_t(own >> 32), true};
    if (p.has_slots) given_slot = Integer::read(a.slots, a.wide_slots, b * I(p.slots[0]) + s * I(p.slots[1]));
    if (p.has_positions) {
      given_position = Integer::read(a.positions, a.wide_positions, b * I(p.positions[0]) + s * I(p.positions[1]));
    }
  }

  // Waits for both loads. Call it before the loads of heads and table rows start: a later wait would be for those loads
  // too. The reason is that the compiler (nvcc 13.0) gives each load a scoreboard to wait on, and loads that are used
  // in other branches may share one.
  ROPE_FN void arrive() {
    position = int64_t(uint64_t(given_position.value()) + uint64_t(p.offset));
    slot = given_slot.value();
    assert(position >= tiling.first_position && position <= tiling.last_position &&
           "position + offset must be a row of cos and sin, and a cell of the caches");
  }
};

// A cell of a cache: a block, and the index of the cell in it. Nothing is written if block is -1.
struct Cell {
  int64_t block, in_block;
};
template <typename I>
ROPE_FN Cell cell_of(const Token<I>& t) {
  const RopeParams& p = t.p;
  const int64_t slot = t.slot;
  if (!p.has_slots) return {t.b, t.position};
  if (slot < 0) return {-1, 0};
  assert(slot < p.blocks * p.block_size && "slot must be less than the number of cells in the caches");
  if (p.blocks == 1) return {0, slot};
  if (t.tiling.narrow_slots) {
    const uint32_t size = uint32_t(p.block_size), block = uint32_t(slot) / size;
    return {block, uint32_t(slot) - block * size};
  }
  const int64_t block = slot / p.block_size;
  return {block, slot - block * p.block_size};
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

// Reads the columns of a chunk from the table row of the token.
template <bool interleaved, int V, typename Table, typename A, typename I>
ROPE_FN void read_tables(const RotateArgs& a, const Token<I>& t, int chunk, Angles<A, V>& angles) {
  const RopeParams& p = a.params;
  using R = Runs<interleaved, V>;
  const I row = p.source == kTableByPosition ? I(t.position) : t.s;
  const Table* cos = static_cast<const Table*>(a.cos) + (t.b * I(p.cos[0]) + row * I(p.cos[1]));
  const Table* sin = static_cast<const Table*>(a.sin) + (t.b * I(p.sin[0]) + row * I(p.sin[1]));
#pragma unroll
  for (int run = 0; run < R::count; run++) {
    const I at = R::first(run, chunk, I(p.rotary_dim / 2));
    if (t.tiling.table_vectors) {
      read_shared<true, R::length>(cos + at, 1, angles.cos + run * R::length);
      read_shared<true, R::length>(sin + at, 1, angles.sin + run * R::length);
    } else {
      read_shared<false, R::length>(cos + at * I(p.cos[2]), p.cos[2], angles.cos + run * R::length);
      read_shared<false, R::length>(sin + at * I(p.sin[2]), p.sin[2], angles.sin + run * R::length);
    }
  }
}

// Returns cos and sin of the pairs of chunk `chunk`, scaled by attention_factor, from the tables or from inv_freq.
template <typename T, bool interleaved, int V, typename I>
ROPE_FN Angles<arithmetic_t<T>, V> angles_of(const RotateArgs& a, const Token<I>& t, int chunk) {
  using A = arithmetic_t<T>;
  using R = Runs<interleaved, V>;
  const RopeParams& p = a.params;
  Angles<A, V> angles;
  if (p.source == kInvFreq) {
    const double position = double(t.position);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const I at = R::first(i / R::length, chunk, I(p.rotary_dim / 2)) + i % R::length;
      Angle<A> angle;
      angle_at(position, a.inv_freq, a.inv_freq_dtype == DType::kDouble, at * I(p.inv_freq), angle);
      cos_sin_of(angle, angles.cos[i], angles.sin[i]);
    }
  } else if (a.table_dtype == DType::kFloat) {
    read_tables<interleaved, V, float>(a, t, chunk, angles);
  } else {
    read_tables<interleaved, V, T>(a, t, chunk, angles);
  }
  const A hi = sizeof(A) == 8 ? A(a.attention_factor) : A(p.factor_hi), lo = sizeof(A) == 8 ? A(0) : A(p.factor_lo);
  scale(angles, hi, lo);
  if (p.inverse) {
#pragma unroll
    for (int i = 0; i < V; i++) angles.sin[i] = -angles.sin[i];
  }
  return angles;
}

// ---- a chunk of a head ----

// The channels of a chunk. If the vectors have several channels, the two vectors of a rotated chunk are one from each
// half of the rotated channels, with either pairing: interleaved pairs do not cross a vector. Past rotary_dim, second
// is (chunks - rotated) vectors after first. I is an integer type that holds every element offset of the call.
template <typename I>
struct Chunk {
  I first, second;  // the first channels of its two vectors
  bool rotated;
  bool whole;  // false: the chunk has only one vector, and second is the same as first

  template <bool interleaved, int V>
  ROPE_FN static Chunk at(const RopeParams& p, const Tiling& t, int index) {
    if (index < t.rotated) {
      const I pairs = I(p.rotary_dim / 2), first = V == 1 ? first_channel(I(index), interleaved) : I(index) * V;
      return {first, first + (V == 1 ? partner_distance(pairs, interleaved) : pairs), true, true};
    }
    const I first = I(p.rotary_dim) + I(index - t.rotated) * V, second = first + I(t.chunks - t.rotated) * V;
    const bool whole = second < I(p.head_dim);
    return {first, whole ? second : first, false, whole};
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
#pragma unroll
    for (int i = 0; i < V; i++) {
      x.first.of[i] = from[(c.first + i) * stride];
      x.second.of[i] = from[(c.second + i) * stride];
    }
  }
}

template <bool vectors, typename T, int V, typename I>
ROPE_FN void write(const Elements<T, V>& x, T* to, I stride, const Chunk<I>& c) {
  if constexpr (vectors) {
    *reinterpret_cast<Vector<T, V>*>(to + c.first) = x.first;
    if (c.whole) *reinterpret_cast<Vector<T, V>*>(to + c.second) = x.second;
  } else {
#pragma unroll
    for (int i = 0; i < V; i++) {
      to[(c.first + i) * stride] = x.first.of[i];
      if (c.whole) to[(c.second + i) * stride] = x.second.of[i];
    }
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
#pragma unroll
  for (int i = 0; i < V; i++) {
    n.first[i] = to_arithmetic(x.first.of[i]);
    n.second[i] = to_arithmetic(x.second.of[i]);
  }
  return n;
}

template <typename T, int V>
ROPE_FN Elements<T, V> rounded(const Numbers<arithmetic_t<T>, V>& n) {
  Elements<T, V> x;
  round_to<T>(n.first, x.first.of);
  round_to<T>(n.second, x.second.of);
  return x;
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

// A loop over the heads that a team takes: those of its thread block's share of the heads of q, k and v. The teams of a
// token take neighbouring heads at the same time: team threadIdx.y takes head first_head + threadIdx.y, then the head
// blockDim.y later, and so on. The loop is in one of the three tensors at a time.
//
// I is an integer type that holds every element offset of the call. cache: the call may have a v, and then k and v go
// to a cache. together: all teams stay in the loop until the last of them is done, as shuffles need it.
template <typename T, typename I, bool cache, bool together>
struct Heads {
  const RotateArgs& a;
  const Tiling& tiling;
  const Token<I>& token;
  const bool skip_in_place;         // this chunk is not rotated, so tensors that are changed in place keep it
  int tensor;                       // 0 q, 1 k, 2 v; -1 before q
  int located = -1;                 // the tensor that out points into
  I first_head = 0;                 // the head of team 0
  I end = 0;                        // end of the thread block's share of this tensor
  I out_end = 0;                    // end of the heads that are written: end, or 0 if the token has no cell
  const T* in = nullptr;            // head 0 of the token
  T* out = nullptr;                 // head 0 of the result
  I in_step = 0, out_step = 0;      // stride of heads
  I in_stride = 0, out_stride = 0;  // stride of channels

  ROPE_FN Heads(const RotateArgs& a, const Token<I>& token, bool skip_in_place)
      : a(a), tiling(token.tiling), token(token), skip_in_place(skip_in_place) {
    const rope_int begin = rope_int(blockIdx.y) * tiling.heads_per_thread_block;
    // The tensor before the share: the first call of next() enters the share.
    tensor = begin < tiling.k_start ? -1 : begin < tiling.v_start ? 0 : 1;
  }

  // Returns whether the tensor is rotated: v is only copied.
  ROPE_FN bool rotates() const { return !cache || tensor < 2; }
  ROPE_FN const T* in_at(I h) const { return in + h * in_step; }
  ROPE_FN T* out_at(I h) const { return out + h * out_step; }

  // Returns the head that this team takes i steps from now.
  ROPE_FN I head(int i) const { return first_head + I(i) * I(blockDim.y) + I(threadIdx.y); }

  // Goes on by `count` steps, to the next tensor if this one is done. Returns false after the last tensor.
  ROPE_FN bool next(int count) {
    first_head += I(count) * I(blockDim.y);
    while ((together ? first_head : head(0)) >= end) {
      if (++tensor == (cache ? 3 : 2)) return false;
      enter();
    }
    return true;
  }

  // Points `out` at this tensor's result. Call it after reading and before writing, so that no read waits for the slot.
  ROPE_FN void locate() {
    if (located == tensor) return;
    located = tensor;
    const Operand& o = operand();
    out = static_cast<T*>(tensor == 0 ? a.q_out : tensor == 1 ? a.k_out : a.v_out);
    out_step = I(o.out[2]);
    out_stride = I(o.out[3]);
    Cell cell{token.b, token.s};
    if (cache && tensor > 0 && a.params.v.heads) {
      cell = cell_of(token);
      if (cell.block < 0) out_end = 0;
    }
    out += I(cell.block) * I(o.out[0]) + I(cell.in_block) * I(o.out[1]);
  }

 private:
  ROPE_FN const Operand& operand() const {
    const RopeParams& p = a.params;
    return tensor == 0 ? p.q : tensor == 1 ? p.k : p.v;
  }

  // Begins the heads of a tensor.
  ROPE_FN void enter() {
    const Operand& o = operand();
    const I start = I(tensor == 0 ? 0 : tensor == 1 ? tiling.k_start : tiling.v_start);
    const I begin = I(blockIdx.y) * I(tiling.heads_per_thread_block) - start;
    first_head = max(begin, I(0));
    end = out_end = min(begin + I(tiling.heads_per_thread_block), I(o.heads));
    if (skip_in_place && (tensor == 0 ? tiling.q_in_place : tensor == 1 && tiling.k_in_place)) end = 0;
    in = static_cast<const T*>(tensor == 0 ? a.q_in : tensor == 1 ? a.k_in : a.v_in);
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
cudaError_t start(Dim3 grid, Dim3 block, cudaStream_t stream, void (*kernel)(Parameters...),
                  const std::type_identity_t<Parameters>&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.x, grid.y, grid.z);
  config.blockDim = dim3(block.x, block.y, block.z);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Launches a kernel once for every 65535 sequences, because gridDim.z has that limit.
inline cudaError_t start(const Plan& plan, cudaStream_t stream, void (*kernel)(RotateArgs, Tiling),
                         const RotateArgs& args) {
  Tiling tiling = plan.tiling;
  for (rope_int left = args.params.batch; left > 0; left -= kMaxGrid, tiling.first_sequence += kMaxGrid) {
    const Dim3 grid{plan.grid.x, plan.grid.y, unsigned(std::min(left, kMaxGrid))};
    if (const cudaError_t error = start(grid, plan.block, stream, kernel, args, tiling)) return error;
  }
  return cudaSuccess;
}

}  // namespace rope::cuda
