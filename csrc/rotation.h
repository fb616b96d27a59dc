// The rotation, written once for C++, CUDA and Metal. Includes nothing: the including file provides fma(T, T, T).
#ifndef ROPE_ROTATION_H
#define ROPE_ROTATION_H

#ifndef ROPE_FN
#define ROPE_FN static inline  // internal: the CPU's kernels are built for several processors
#endif

#ifdef __METAL_VERSION__
#define ROPE_THREAD thread  // Metal wants to know in which memory a reference leads
#else
#define ROPE_THREAD
#endif

namespace rope {

// A pair (x, y) turned by an angle is  x' = x cos - y sin,  y' = y cos + x sin:
// both are own * cos + partner * (-sin or +sin). The fma is written out so that no compiler chooses the contraction,
// and an element gets the same bits from every loop that computes it.
template <typename T>
ROPE_FN T rotated(T own, T partner, T cos, T signed_sin) {
  return fma(own, cos, partner * signed_sin);
}

// Channels of pair i. Interleaved: (2i, 2i + 1). Half-split: (i, i + pairs).
template <typename I>
ROPE_FN I first_channel(I pair, bool interleaved) {
  return interleaved ? 2 * pair : pair;
}
template <typename I>
ROPE_FN I partner_distance(I pairs, bool interleaved) {
  return interleaved ? I(1) : pairs;
}

// cos or sin times attention_factor, which comes as two floats: one rounding instead of two.
template <typename T>
ROPE_FN T scaled(T value, T factor_hi, T factor_lo) {
  return fma(value, factor_hi, value * factor_lo);
}

}  // namespace rope

#endif
