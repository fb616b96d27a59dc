// Elements and numbers: conversions, vectors, the two vectors of a chunk, and how they are read and written. ../plan.h
// explains vectors and chunks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#undef NDEBUG  // a position outside its table must stop the kernel, as torch's own indexing does
#include <cassert>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "entry_points.h"

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
#include "../chunk.h"
#include "../quantise.h"
#include "../rotation.h"
#include "../token.h"

namespace rope::cuda {

// The type that elements of type T are computed in.
template <typename T>
using arithmetic_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename To, typename From>
ROPE_FN To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

ROPE_FN float to_arithmetic(__half x) { return __half2float(x); }
ROPE_FN float to_arithmetic(__nv_bfloat16 x) { return __bfloat162float(x); }
ROPE_FN float to_arithmetic(float x) { return x; }
ROPE_FN double to_arithmetic(double x) { return x; }

ROPE_FN void round_to(float x, __half& y) { y = __float2half_rn(x); }
ROPE_FN void round_to(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
ROPE_FN void round_to(float x, float& y) { y = x; }
ROPE_FN void round_to(double x, float& y) { y = float(x); }
ROPE_FN void round_to(double x, double& y) { y = x; }

// n adjacent elements, as a thread loads and stores them. Pairs of 16-bit elements are held as words of 32 bits: as
// single elements they would each need a register, and instructions (PRMT) to take the words apart and to put them
// together.
template <typename T, int n>
struct alignas(sizeof(T) * n) Vector {
  static constexpr bool words = sizeof(T) == 2 && n % 2 == 0;
  std::conditional_t<words, uint32_t, T> of[words ? n / 2 : n];
};

// Converts a word to its two elements, the first of which is in the lower half, and back.
ROPE_FN float2 unpack(__half, uint32_t word) { return __half22float2(bits_as<__half2>(word)); }
ROPE_FN float2 unpack(__nv_bfloat16, uint32_t w) { return {__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000)}; }
ROPE_FN uint32_t pack(__half, float x, float y) { return bits_as<uint32_t>(__floats2half2_rn(x, y)); }
ROPE_FN uint32_t pack(__nv_bfloat16, float x, float y) { return bits_as<uint32_t>(__floats2bfloat162_rn(x, y)); }

template <typename T, int n, typename A>
ROPE_FN void to_arithmetic(const Vector<T, n>& v, A* to) {
  if constexpr (Vector<T, n>::words) {
    for (int i = 0; i < n / 2; i++) {
      const float2 two = unpack(T(), v.of[i]);
      to[2 * i] = two.x, to[2 * i + 1] = two.y;
    }
  } else {
    for (int i = 0; i < n; i++) to[i] = A(to_arithmetic(v.of[i]));
  }
}
template <typename T, int n, typename A>
ROPE_FN Vector<T, n> rounded(const A* x) {
  Vector<T, n> v;
  if constexpr (Vector<T, n>::words) {
    for (int i = 0; i < n / 2; i++) v.of[i] = pack(T(), x[2 * i], x[2 * i + 1]);
  } else {
    for (int i = 0; i < n; i++) round_to(x[i], v.of[i]);
  }
  return v;
}

// Reads n numbers that many threads read and no thread of the kernel writes: table rows and weights.
// vectors: they are adjacent and aligned to the largest access that they need.
template <int n, typename From, typename A>
ROPE_FN void read_shared(const From* from, rope_int stride, bool vectors, A* to) {
  constexpr int m = n * sizeof(From) > 16 ? int(16 / sizeof(From)) : n;
  if (n > 1 && vectors) {
    for (int i = 0; i < n; i += m) {
      const auto v = *reinterpret_cast<const Vector<From, m>*>(from + i);
      to_arithmetic(v, to + i);
    }
  } else {
    for (int i = 0; i < n; i++) to[i] = A(to_arithmetic(from[i * stride]));
  }
}

// The elements of a chunk, and the same in the arithmetic type: first those of the first vector.
template <typename T, int V>
struct Elements {
  Vector<T, V> of[2];
};
template <typename A, int V>
struct Numbers {
  A of[2 * V];
};

template <typename T, int V>
ROPE_FN Numbers<arithmetic_t<T>, V> numbers_of(const Elements<T, V>& x) {
  Numbers<arithmetic_t<T>, V> n;
  to_arithmetic(x.of[0], n.of);
  to_arithmetic(x.of[1], n.of + V);
  return n;
}
template <typename T, int V>
ROPE_FN Elements<T, V> rounded(const Numbers<arithmetic_t<T>, V>& n) {
  return {rounded<T, V>(n.of), rounded<T, V>(n.of + V)};
}

// The heads of one token in a tensor with strides [batch, seq, heads, head_dim].
// vectors: a vector is one access; else its channels are accessed one by one.
template <int V, typename T, typename I>
struct TokenHeads {
  using E = std::remove_const_t<T>;
  T* token;  // its head 0
  const rope_int* strides;
  bool vectors;

  // Reads the chunk of a head. Channels past the last one are 0.
  ROPE_FN auto read(I head, const Chunk<V, I>& c) const {
    const T* const from = token + head * I(strides[2]);
    Elements<E, V> x{};
    for (int k = 0; k < 2; k++) {
      if (V > 1 && vectors) {
        if (c.at[k] <= c.last) x.of[k] = *reinterpret_cast<const Vector<E, V>*>(from + c.at[k]);
      } else {
        E each[V] = {};
        for (int i = 0; i < V; i++) {
          if (c.at[k] + i <= c.last) each[i] = from[(c.at[k] + i) * I(strides[3])];
        }
        x.of[k] = bits_as<Vector<E, V>>(each);
      }
    }
    return x;
  }
  ROPE_FN void write(I head, const Chunk<V, I>& c, const Elements<T, V>& x) const {
    T* const to = token + head * I(strides[2]);
    for (int k = 0; k < 1 + is_whole(c); k++) {
      if (V > 1 && vectors) {
        if (c.at[k] <= c.last) *reinterpret_cast<Vector<T, V>*>(to + c.at[k]) = x.of[k];
      } else {
        E each[V];
        memcpy(each, &x.of[k], sizeof each);
        for (int i = 0; i < V; i++) {
          if (c.at[k] + i <= c.last) to[(c.at[k] + i) * I(strides[3])] = each[i];
        }
      }
    }
  }
};

// cos and sin of the pairs of a chunk.
template <typename A, int V>
struct CosSin {
  A cos[V], sin[V];
};

// Returns the index, in the numbers of a chunk, of member 0 or 1 of pair i.
template <bool interleaved, int V>
ROPE_FN constexpr int member(int i, int which) {
  return interleaved && V > 1 ? 2 * i + which : i + which * V;
}

// Replaces both channels of each pair by what channel(own, partner, cos, signed_sin) returns, see ../rotation.h.
template <bool interleaved, typename A, int V, typename F>
ROPE_FN void rotate_with(Numbers<A, V>& n, const CosSin<A, V>& angles, F&& channel) {
  for (int i = 0; i < V; i++) {
    A &x = n.of[member<interleaved, V>(i, 0)], &y = n.of[member<interleaved, V>(i, 1)];
    const A own = x, cos = angles.cos[i], sin = angles.sin[i];
    x = channel(own, y, cos, -sin);
    y = channel(y, own, cos, sin);
  }
}
template <bool interleaved, typename A, int V>
ROPE_FN void rotate(Numbers<A, V>& n, const CosSin<A, V>& angles) {
  rotate_with<interleaved>(n, angles, [](A own, A partner, A cos, A sin) { return rotated(own, partner, cos, sin); });
}

}  // namespace rope::cuda
