// cos and sin of position * inv_freq, computed in float32 alone. C++, CUDA and Metal share this code. The error is at
// most 5e-7 below position 2^24. Beyond, it grows with the position: it is about 3e-6 near 2^29 and 4e-5 near 2^32.
//
// A float32 product of a position near 2^17 and a frequency near 1 is already wrong by 4e-3 radians. Therefore the
// angle is measured in turns (1 turn = 2 pi radians), and the frequency in turns is a sum of two floats, hi + lo. The
// product of the position and hi is computed exactly: an fma gives what the rounded product lacks. The whole turns of
// the rounded product are dropped without error, and all that was rounded away is added to a small rest. This needs no
// double: Metal has none, and consumer GPUs compute doubles at 1/64 of the speed of floats. Doubles are used only if
// the result is double.
//
// The bits must be the same on every back end, so no compiler may contract a product and a sum to an fma: options
// switch that off for C++ and CUDA, and a pragma in shaders/device.h for Metal.
//
// The including file provides fma(T, T, T) and rint(T), and, if it has doubles, cosine_and_sine(double, double&,
// double&). T is float, or a vector of floats that can be constructed from one float.
#ifndef ROPE_ANGLE_H
#define ROPE_ANGLE_H

#include "rotation.h"

namespace rope {

// Computes inv_freq / (2 pi), the turns per position, as turns_hi + turns_lo with a relative error of about 2^-47.
template <typename T>
ROPE_FN void turns_per_position(T freq_hi, T freq_lo, ROPE_THREAD T& turns_hi, ROPE_THREAD T& turns_lo) {
  const T hi = T(0.15915494f);  // 1 / (2 pi) = hi + lo
  const T lo = T(6.4206382e-9f);
  turns_hi = freq_hi * hi;
  turns_lo = fma(freq_hi, hi, -turns_hi) + fma(freq_hi, lo, freq_lo * hi);
}

// Computes sum and error so that sum + error = a + b exactly.
template <typename T>
ROPE_FN void two_sum(T a, T b, ROPE_THREAD T& sum, ROPE_THREAD T& error) {
  sum = a + b;
  const T of_b = sum - a;
  error = (a - (sum - of_b)) + (b - of_b);
}

// Computes the angle in turns, without whole turns, as fraction + rest: fraction is exact and in [-1/2, 1/2], and rest
// holds what was rounded away. The position is position_hi + position_lo; position_lo is 0 for integers below 2^24.
template <typename T>
ROPE_FN void turns_of(T position_hi, T position_lo, T turns_hi, T turns_lo, ROPE_THREAD T& fraction,
                      ROPE_THREAD T& rest) {
  const T product = position_hi * turns_hi;
  const T lost = fma(position_hi, turns_hi, -product);
  // This is product - rint(product). Written as an fma, it is no minus that a compiler could contract with the product
  // above, if it does not obey the pragma for Metal, unless it folds the fma first (as clang does with
  // -ffp-contract=fast).
  fraction = fma(rint(product), T(-1.0f), product);
  rest = fma(position_hi, turns_lo, fma(position_lo, turns_hi, lost));
  rest = rest - rint(rest);
}

// Adds the angle of another axis. Adding zero, or adding to zero, changes no bit.
template <typename T>
ROPE_FN void add_turns(T more_fraction, T more_rest, ROPE_THREAD T& fraction, ROPE_THREAD T& rest) {
  T sum, error;
  two_sum(fraction, more_fraction, sum, error);
  fraction = sum - rint(sum);
  rest = rest + more_rest + error;
  rest = rest - rint(rest);
}

// Computes cos and sin of the angle fraction + rest, in turns.
template <typename T>
ROPE_FN void cos_sin_of_turns(T fraction, T rest, ROPE_THREAD T& cos, ROPE_THREAD T& sin) {
  // Subtract the nearest number of half turns, so that |t| <= 1/4. Each half turn changes the sign of both cos and sin.
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

#ifndef __METAL_VERSION__
// In double, the angle in radians is an exact product too: angle + lost. The math library computes cos and sin of
// `angle`, and (cos, sin) is then rotated by `lost`.
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
  // If |lost| < 1e-8, 1 and lost are already the doubles nearest to its cos and sin: the terms that follow in their
  // series, lost^2 / 2 and lost^3 / 6, are less than half an ulp.
  if (!(lost < 1e-8 && lost > -1e-8)) cosine_and_sine(lost, lost_cos, lost_sin);
  cos = rotated(c, s, lost_cos, -lost_sin);
  sin = rotated(s, c, lost_cos, lost_sin);
}
#endif

}  // namespace rope

#endif
