// The conversion to the dtypes of quantised results, written once for C++, CUDA and Metal: saturated to the finite
// range, and rounded to nearest, ties to even. A NaN becomes the positive NaN of a float8, and 0 in an int8.
//
// The including file provides bits_of(F), the bits of a float as an int, and float_of, its inverse. F is float, or a
// vector of floats. Then the int is a vector too, and all operators work lane by lane.
#ifndef ROPE_QUANTISE_H
#define ROPE_QUANTISE_H

#include "args.h"
#include "rotation.h"

namespace rope {

// The dtypes, as they are stored. A float8 has this many bits of mantissa, this bias of its exponent, and this code for
// its largest number. kHighest and kLowest are the magnitudes of its highest and lowest number, as bits of a float.
template <int mantissa, int bias, int largest>
struct Float8 {
  unsigned char bits;
  enum : int { kHighest = (largest + ((127 - bias) << mantissa)) << (23 - mantissa), kLowest = kHighest };
};
typedef Float8<3, 7, 0x7e> E4M3;
typedef Float8<2, 15, 0x7b> E5M2;
struct Int8 {
  unsigned char bits;
  enum : int { kHighest = 0x42fe0000, kLowest = 0x43000000 };  // 127 and 128
};

// What quantised() divides by: here by 1. Another divisor has these two magnitudes multiplied by its scale.
template <typename Type>
struct Undivided {
  enum : int { highest = Type::kHighest, lowest = Type::kLowest };
  template <typename F>
  ROPE_FN F quotient(F magnitude) {
    return magnitude;
  }
};

// These return x in a dtype, divided by a scale: in the lowest byte of the result. The other bytes have no meaning.
//
// The numbers of a float8 are steps apart: a step belongs to an exponent, and all exponents below the least one have
// its step. 2^shift times the exponent is a float whose neighbour is one step away. A sum with it is rounded to whole
// steps, which its lowest bits count. Each exponent that is skipped has 2^mantissa numbers. So the code is
// steps + ((exponent - least) << mantissa). `uncounted` subtracts least << mantissa in the lowest byte of the sum; it
// is an even number, so that ties go to even.
template <typename F, int mantissa, int bias, int largest, typename Divisor>
ROPE_FN auto quantised(F x, Float8<mantissa, bias, largest>, Divisor divisor) {
  constexpr int shift = 23 - mantissa, least = 128 - bias, uncounted = 256 - ((least << mantissa) & 0xff);
  const auto bits = bits_of(x), given = bits & 0x7fffffff, zero = bits ^ bits, most = zero + int(divisor.highest);
  const auto magnitude = divisor.quotient(float_of(most < given ? most : given));
  const auto own = bits_of(magnitude) & 0x7f800000, first = zero + (least << 23);
  const auto exponent = own > first ? own : first;
  const auto sum = magnitude + float_of(exponent + ((shift << 23) + uncounted));
  const auto code = (bits_of(sum) + (exponent >> shift)) ^ (bits >> 24 & 0x80);
  return given > 0x7f800000 ? zero + 0x7f : code;
}

template <typename F, typename Divisor>
ROPE_FN auto quantised(F x, Int8, Divisor divisor) {
  const auto bits = bits_of(x), sign = bits >> 31;  // sign: all bits are set if x is negative
  const auto given = bits & 0x7fffffff, zero = bits ^ bits;
  const auto most = (sign & int(divisor.lowest - divisor.highest)) + int(divisor.highest);
  const auto magnitude = divisor.quotient(float_of(most < given ? most : given));
  const auto number = bits_of(magnitude + float_of(zero + (150 << 23)));  // 2^23, whose neighbour is 1 away
  return given > 0x7f800000 ? zero : (number ^ sign) - sign;
}

// Returns x, which is divided by the scale already.
template <typename F, typename Type>
ROPE_FN auto quantised(F x, Type type) {
  return quantised(x, type, Undivided<Type>());
}

}  // namespace rope

#endif
