#pragma once

#include "cuda_runtime.h"

struct alignas(2) __half {
  unsigned short bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half h) {
  const unsigned sign = (h.bits & 0x8000u) << 16, rest = h.bits & 0x7fffu;
  if (rest < 0x0400) return __uint_as_float(__float_as_uint(float(rest) * 0x1p-24f) | sign);  // zero or subnormal
  return __uint_as_float(((rest << 13) + (rest < 0x7c00 ? 0x38000000u : 0x70000000u)) | sign);
}
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half __float2half_rn(float f) {
  const unsigned all = __float_as_uint(f), sign = all >> 16 & 0x8000u, rest = all & 0x7fffffffu;
  unsigned bits;
  if (rest > 0x7f800000) return {0x7fff};  // CUDA's NaN
  if (rest >= 0x47800000)
    bits = 0x7c00;  // at least 65536: infinity
  else if (rest < 0x38800000)
    bits = unsigned(rintf(std::fabs(f) * 0x1p24f));  // below 2^-14: subnormal, or rounded up to the first normal
  else
    bits = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
  return {static_cast<unsigned short>(sign | bits)};
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
