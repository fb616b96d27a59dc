// cos and sin of position * inv_freq to 5e-7 in float32 alone, for C++, CUDA and Metal alike.
//
// A float32 product of a position near 2^17 and a frequency near 1 is already wrong by 4e-3 radians. So the angle is
// counted in turns, and the frequency in turns is a sum of two floats. One fma gives the exact product of the position
// and the larger float; its whole turns are dropped without error, and what was rounded away is added to the small
// rest. No double is needed (Metal has none, and consumer GPUs run it at 1/64 of the speed). A double only pays where
// the result is double.
//
// No result depends on what a compiler contracts: Metal's cannot be told everywhere, and the bits are to be the same on
// every back end. The including file provides fma(T, T, T) and rint(T), and cosine_and_sine(double, double&, double&)
// where there are doubles. T is float, or a vector of floats with T(float).
#ifndef ROPE_ANGLE_H
#define ROPE_ANGLE_H

#include "rotation.h"

namespace rope {

// inv_freq / (2 pi), in turns per position: hi + lo is right to about 2^-47 of it.
template <typename T>
ROPE_FN void turns_per_position(T freq_hi, T freq_lo, ROPE_THREAD T& turns_hi, ROPE_THREAD T& turns_lo) {
  const T hi = T(0.15915494f);  // 1 / (2 pi) = hi + lo
  const T lo = T(6.4206382e-9f);
  turns_hi = freq_hi * hi;
  turns_lo = fma(freq_hi, hi, -turns_hi) + fma(freq_hi, lo, freq_lo * hi);
}

// sum + error = a + b, exactly. b may be a product.
template <typename T>
ROPE_FN void two_sum(T a, T b, ROPE_THREAD T& sum, ROPE_THREAD T& error) {
  const T one = T(1.0f);
  sum = fma(b, one, a);
  const T of_b = sum - a;
  error = (a - (sum - of_b)) + fma(b, one, -of_b);
}

// The angle in turns, without whole turns: fraction is exact and within 1/2, rest is what was rounded away.
// The position is position_hi + position_lo; position_lo is 0 for integers below 2^24.
template <typename T>
ROPE_FN void turns_of(T position_hi, T position_lo, T turns_hi, T turns_lo, ROPE_THREAD T& fraction,
                      ROPE_THREAD T& rest) {
  const T product = position_hi * turns_hi;
  const T lost = fma(position_hi, turns_hi, -product);
  fraction = fma(rint(product), T(-1.0f), product);  // not -, which could be contracted with the product
  rest = fma(position_hi, turns_lo, fma(position_lo, turns_hi, lost));
  rest = rest - rint(rest);
}

// The angles of several axes are added. A zero one, before or after, changes no bit.
template <typename T>
ROPE_FN void add_turns(T more_fraction, T more_rest, ROPE_THREAD T& fraction, ROPE_THREAD T& rest) {
  T sum, error;
  two_sum(fraction, more_fraction, sum, error);
  fraction = sum - rint(sum);
  rest = rest + more_rest + error;
  rest = rest - rint(rest);
}

template <typename T>
ROPE_FN void cos_sin_of_turns(T fraction, T rest, ROPE_THREAD T& cos, ROPE_THREAD T& sin) {
  // To the nearest half turn: both cos and sin change sign with each half, and |t| <= 1/4 remains.
  const T halves = rint((fraction + rest) * T(2.0f));
  const T t = fma(halves, T(-0.5f), fraction) + rest;
  const T odd = fma(rint(halves * T(0.5f)), T(-2.0f), halves);  // -1, 0 or 1
  const T sign = fma(odd * T(-2.0f), odd, T(1.0f));
  // Minimax polynomials in u = t^2 for sin(2 pi t) / t and (cos(2 pi t) - 1) / u on |t| <= 1/4: errors 3.4e-9
  // and 2.5e-10 before rounding.
  const T u = t * t;
  T s = T(39.526894f);
  s = fma(s, u, T(-76.548553f));
  s = fma(s, u, T(81.600952f));
  s = fma(s, u, T(-41.341656f));
  s = fma(s, u, T(6.283185f));
  T c = T(-25.001259f);
  c = fma(c, u, T(60.147446f));
  c = fma(c, u, T(-85.453796f));
  c = fma(c, u, T(64.939354f));
  c = fma(c, u, T(-19.739208f));
  cos = fma(c, u, T(1.0f)) * sign;
  sin = s * (t * sign);
}

template <typename T>
ROPE_FN void cos_sin_of(T position_hi, T position_lo, T turns_hi, T turns_lo, ROPE_THREAD T& cos, ROPE_THREAD T& sin) {
  T fraction, rest;
  turns_of(position_hi, position_lo, turns_hi, turns_lo, fraction, rest);
  cos_sin_of_turns(fraction, rest, cos, sin);
}

#ifndef __METAL_VERSION__
// In double the angle is an exact product too: angle + lost. The library reduces the angle, and what was lost is
// rotated on.
ROPE_FN void angle_of(double position, double inv_freq, double& angle, double& lost) {
  angle = position * inv_freq;
  lost = fma(position, inv_freq, -angle);
}
ROPE_FN void add_angle(double more, double more_lost, double& angle, double& lost) {
  double sum, error;
  two_sum(angle, more, sum, error);
  angle = sum;
  lost = lost + more_lost + error;
}
ROPE_FN void cos_sin_of_angle(double angle, double lost, double& cos, double& sin) {
  double c, s, lost_cos = 1.0, lost_sin = lost;
  cosine_and_sine(angle, c, s);
  if (!(lost < 1e-8 && lost > -1e-8)) cosine_and_sine(lost, lost_cos, lost_sin);
  cos = rotated(c, s, lost_cos, -lost_sin);
  sin = rotated(s, c, lost_cos, lost_sin);
}
ROPE_FN void cos_sin_of(double position, double inv_freq, double& cos, double& sin) {
  double angle, lost;
  angle_of(position, inv_freq, angle, lost);
  cos_sin_of_angle(angle, lost, cos, sin);
}
#endif

}  // namespace rope

#endif
