// The conversion to the dtypes of quantised caches, written once for C++, CUDA and Metal: saturated to the finite
// range, and rounded to nearest, ties to even. A NaN stays a NaN in a float8 and becomes 0 in an int8.
//
// The including file provides bits_of(F), the bits of a float as an int, and float_of, its inverse. F is float, or a
// vector of floats. Then the int is a vector too, and all operators work lane by lane.
#ifndef ROPE_QUANTISE_H
#define ROPE_QUANTISE_H

#include "rope.h"
#include "rotation.h"

namespace rope {

#ifndef __METAL_VERSION__  // the host passes the formats to Metal
// In the order of CacheFormat.                      magic  highest     beyond least_normal shift bias      nan   flip
constexpr CacheFormat kFloat8E4M3 = {0, 1, 16384.0f, 0x43e00000, 0, 121 << 23, 20, 120 << 3, 0x7f, 0x80, 0};
constexpr CacheFormat kFloat8E5M2 = {0, 1, 128.0f, 0x47600000, 0, 113 << 23, 21, 112 << 2, 0x7f, 0x80, 0};
constexpr CacheFormat kInt8 = {0, 1, 8388608.0f, 0x42fe0000, 0x20000, 0x7f800000, 23, 0, 0, -1, 1};
#endif

// Returns x, which is divided by the scale already, in the dtype of the cache: in the lowest byte of the result.
template <typename F, typename Format>
ROPE_FN auto quantised(F x, Format f) {
  const auto bits = bits_of(x), sign = bits >> 31;  // sign: all bits are set if x is negative
  const auto given = bits & 0x7fffffff, limit = (sign & f.beyond) + f.highest;
  const auto magnitude = given < limit ? given : limit;
  // All numbers below the least normal one are multiples of one step, and so are all numbers of an int8. The floats
  // from `magic` on are one step apart, so the sum is rounded to whole steps, and the difference of the bits counts
  // them.
  const auto steps = bits_of(float_of(magnitude) + F(f.magic)) - (bits_of(F(f.magic)));
  // A normal float8 is a float with a shorter mantissa and a smaller bias.
  const auto half = (1 << (f.shift - 1)) - 1;
  const auto normal = ((magnitude + half + ((magnitude >> f.shift) & 1)) >> f.shift) - f.bias;
  const auto rounded = magnitude < f.least_normal ? steps : normal;
  const auto result = given > 0x7f800000 ? (sign ^ sign) + f.nan : rounded;
  return (result ^ (sign & f.flip)) + (sign & f.carry);
}

}  // namespace rope

#endif
