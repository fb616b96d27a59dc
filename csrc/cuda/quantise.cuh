// The division by a scale and the conversion of a quantised result.
#pragma once

#include <cuda_fp8.h>

#include "vectors.cuh"

namespace rope::cuda {

// Returns x as a float, rounded to odd: cut off, and with the last bit set if that changed it. A float8 or int8 that is
// rounded from the result is the one that x itself is rounded to.
ROPE_FN float narrowed_to_odd(double x) {
  const float cut = __double2float_rz(x);
  return float_of(bits_of(cut) | int(double(cut) != x));
}

// Divides many numbers by one scale with one reciprocal. The quotients are quantised to the same numbers as those of
// the operator /: a rounded quotient is corrected by its remainder, which is exact if no exponent is extreme
// (Markstein). So a scale with an extreme exponent, and x with it, is multiplied by a power of two; and by -1 if the
// scale is negative.
struct Divisor {
  float scale, inverse, power;

  ROPE_FN explicit Divisor(float given) {
    const float size = fabsf(given);
    power = copysignf(size < 0x1p-60f ? 0x1p100f : size > 0x1p60f ? 0x1p-100f : 1.0f, given);
    scale = given * power;
    inverse = __fdividef(1.0f, scale);  // off by an ulp at most; a step of Newton's method rounds it correctly
    const float error = fma(-scale, inverse, 1.0f);
    if (fabsf(error) < 1.0f) inverse = fma(inverse, error, inverse);  // not if the scale is 0, infinite or NaN
    if (inverse == 0.0f) scale = 0.0f;  // so that the remainder of an infinite scale is not NaN
  }
  // Divides each of n numbers.
  template <int n>
  ROPE_FN void divide(float (&x)[n]) const {
    if (power != 1.0f) {
      for (float& number : x) number *= power;
    }
    for (float& number : x) {
      const float near = number * inverse;
      // The largest quotients are infinite or saturate, and have no remainder. Signs are such that -0 stays -0.
      number = fabsf(near) < 0x1p100f ? fma(-fma(near, scale, -number), inverse, near) : near;
    }
  }
};

// Quantises two numbers to neighbouring bytes. sm_89 and later have instructions that round as quantised() does.
template <typename T>
ROPE_FN uint16_t two_bytes(float x, float y, T type) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2({x, y}, __NV_SATFINITE, std::is_same_v<T, E4M3> ? __NV_E4M3 : __NV_E5M2);
#else
  return uint16_t((quantised(x, type) & 0xff) | quantised(y, type) << 8);
#endif
}
ROPE_FN uint16_t two_bytes(float x, float y, Int8) {
  const auto byte = [](float x) { return max(min(__float2int_rn(x), 127), -128) & 0xff; };
  return uint16_t(byte(x) | byte(y) << 8);
}

// Divides the numbers of a chunk by a scale, and quantises them to a Format.
template <typename A, int V>
ROPE_FN Elements<uint8_t, V> quantised_to(int format, const Numbers<A, V>& n, A scale) {
  float divided[2 * V];
  if constexpr (sizeof(A) == 8) {
    for (int i = 0; i < 2 * V; i++) divided[i] = narrowed_to_odd(n.of[i] / scale);
  } else {
    for (int i = 0; i < 2 * V; i++) divided[i] = n.of[i];
    Divisor(scale).divide(divided);
  }
  uint16_t pairs[V];
  const auto convert = [&](auto type) {
    for (int i = 0; i < V; i++) pairs[i] = two_bytes(divided[2 * i], divided[2 * i + 1], type);
  };
  format == kInt8 ? convert(Int8()) : format == kFloat8E4M3 ? convert(E4M3()) : convert(E5M2());
  return bits_as<Elements<uint8_t, V>>(pairs);
}

}  // namespace rope::cuda
