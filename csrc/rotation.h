// The rotation, written once for C++, CUDA and Metal. This file includes nothing: the including file provides
// fma(T, T, T).
#ifndef ROPE_ROTATION_H
#define ROPE_ROTATION_H

#ifndef ROPE_FN
#define ROPE_FN static inline  // internal linkage: the CPU kernels are compiled for several processors
#endif

#ifdef __METAL_VERSION__
#define ROPE_THREAD thread  // in Metal, a reference must name its address space
#else
#define ROPE_THREAD
#endif

namespace rope {

// Returns one channel of a rotated pair. A pair (x, y) rotated by an angle is x' = x cos - y sin, y' = y cos + x sin,
// so both channels are own * cos + partner * (-sin or +sin). The fma is written out, so that no compiler chooses which
// product to contract, and an element gets the same bits from every loop that computes it.
template <typename T>
ROPE_FN T rotated(T own, T partner, T cos, T signed_sin) {
  return fma(own, cos, partner * signed_sin);
}

// Returns the same channel with the bits of the formula in torch's operators. round(x) rounds a product to the dtype
// that torch gives it; the caller rounds the sum.
template <typename T, typename Round>
ROPE_FN T rotated_eagerly(T own, T partner, T cos, T signed_sin, Round round) {
  return round(own * cos) + round(partner * signed_sin);
}

// The channels of pair i are (2i, 2i + 1) if interleaved, and (i, i + pairs) if half-split. They are counted from
// rotary_start on.
template <typename I>
ROPE_FN I first_channel(I pair, bool interleaved) {
  return interleaved ? 2 * pair : pair;
}
template <typename I>
ROPE_FN I partner_distance(I pairs, bool interleaved) {
  return interleaved ? I(1) : pairs;
}

// Returns value (cos or sin) times attention_factor. The factor is the sum of two floats, so the result has one
// rounding instead of two.
template <typename T>
ROPE_FN T scaled(T value, T factor_hi, T factor_lo) {
  return fma(value, factor_hi, value * factor_lo);
}

}  // namespace rope

#endif
