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
// In the order of CacheFormat:          highest  beyond least_exponent shift power nan flip carry
constexpr CacheFormat kFloat8E4M3 = {0, 1, 0x43e00000, 0, 121 << 23, 20, (20 << 23) + 56, 0x7f, 0x80, 0};
constexpr CacheFormat kFloat8E5M2 = {0, 1, 0x47600000, 0, 113 << 23, 21, (21 << 23) + 60, 0x7f, 0x80, 0};
constexpr CacheFormat kInt8 = {0, 1, 0x42fe0000, 0x20000, 134 << 23, 16, 16 << 23, 0, -1, 1};
#endif

// Returns x, which is divided by the scale already, in the dtype of the cache: in the lowest byte of the result. The
// other bytes have no meaning.
//
// The numbers of a dtype are steps apart: a step belongs to an exponent, and all exponents below the least one have its
// step. 2^shift times the exponent is a float whose neighbour is one step away. A sum with it is rounded to whole
// steps, which its lowest bits count. Each exponent that is skipped has as many numbers: 2^23 divided by 2^shift. So
// the code is steps + ((exponent - least_exponent) >> shift). `power` multiplies by 2^shift, and its lowest byte
// subtracts least_exponent >> shift; that is an even number, so that ties go to even. An int8 has one exponent, of 128,
// with step 1.
template <typename F, typename Format>
ROPE_FN auto quantised(F x, Format f) {
  const auto bits = bits_of(x), sign = bits >> 31;  // sign: all bits are set if x is negative
  const auto given = bits & 0x7fffffff, limit = (sign & f.beyond) + f.highest;
  const auto magnitude = given < limit ? given : limit;
  const auto own = magnitude & 0x7f800000, least = (sign ^ sign) + f.least_exponent;
  const auto exponent = own > least ? own : least;
  const auto number = bits_of(float_of(magnitude) + float_of(exponent + f.power)) + (exponent >> f.shift);
  const auto result = given > 0x7f800000 ? (sign ^ sign) + f.nan : number;
  return (result ^ (sign & f.flip)) + (sign & f.carry);
}

}  // namespace rope

#endif
