// Conversion to float8 as sm_89 and later have it.
#pragma once

#include <cuda_runtime.h>

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

namespace emulator {
// Returns the code of the float8 nearest to x, ties to the even code, saturated. Every NaN has the code 0x7f.
inline unsigned float8_code(float x, __nv_fp8_interpretation_t format) {
  const int mantissa = format == __NV_E4M3 ? 3 : 2, bias = format == __NV_E4M3 ? 7 : 15;
  const int largest = format == __NV_E4M3 ? 0x7e : 0x7b;
  if (std::isnan(x)) return 0x7f;
  const auto number = [&](int code) {
    const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1), normal = exponent != 0;
    return std::ldexp(fraction + (normal << mantissa), (normal ? exponent : 1) - bias - mantissa);
  };
  int code = 0;  // of the largest number that is at most |x|
  const double magnitude = std::abs(double(x));
  for (int step = 64; step; step /= 2) code += code + step <= largest && number(code + step) <= magnitude ? step : 0;
  if (code < largest) {
    const double middle = (number(code) + number(code + 1)) / 2;
    code += magnitude > middle || (magnitude == middle && code % 2);
  }
  return unsigned(code) | (std::signbit(x) ? 0x80u : 0u);
}
}  // namespace emulator

inline uint16_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t saturation, __nv_fp8_interpretation_t format) {
  if (saturation != __NV_SATFINITE) std::abort();  // the emulator has no other one
  return uint16_t(emulator::float8_code(x.x, format) | emulator::float8_code(x.y, format) << 8);
}
