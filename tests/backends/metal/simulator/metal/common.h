// The part of metal_stdlib that shaders use and that shim.h and strict.h have in common. The type half and the function
// simulator::rint must be known.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __bf16 bfloat;

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define VECTORS(T)        \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
VECTORS(float)
VECTORS(half)
VECTORS(char)
VECTORS(uchar)
VECTORS(short)
VECTORS(ushort)
VECTORS(int)
VECTORS(uint)
VECTORS(long)
VECTORS(ulong)
#undef VECTORS

// These functions exist for float only.
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float rint(float x) { return simulator::rint(x); }
inline float fabs(float x) { return __builtin_fabsf(x); }
namespace precise {
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float divide(float x, float y) { return x / y; }
}  // namespace precise
inline bool isfinite(float x) { return __builtin_isfinite(x); }
template <typename T>
T min(T x, T y) {
  return y < x ? y : x;
}
template <typename T>
T max(T x, T y) {
  return x < y ? y : x;
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

}  // namespace metal

using namespace metal;  // as_type and vector types are global in Metal
template <typename T, typename F>
T as_type(F from) {
  static_assert(sizeof(T) == sizeof(F), "as_type takes a type of the same size");
  T to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
