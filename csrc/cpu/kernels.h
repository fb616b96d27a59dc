// The CPU kernels, which are built once for each instruction set. This header has only plain data and pointers, because
// the kernel files must not include inline functions with external linkage (see vec.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../args.h"

namespace rope::cpu {

// Each kernel computes the items [begin, end) of a call.
struct Kernels {
  const char* name;
  void (*rotate)(const Args&, int64_t begin, int64_t end);  // items: tokens. Writes v too, if there is one
  // Items: slices, which have `slice` tokens each. Writes the gradients of x, and to `sums` those of the weights,
  // [slices, weights of q, then those of k]. The tokens of a slice are summed in their order.
  void (*norm_backward)(const Args&, int64_t slice, double* sums, int64_t begin, int64_t end);
  // Items: tokens. positions and inv_freq must be double and contiguous.
  void (*cos_sin)(const CosSinArgs&, int64_t begin, int64_t end);
};

const Kernels& kernels();  // the ones for the instruction set that torch has chosen

extern const Kernels plain;  // NEON on arm64
#if defined(__x86_64__)
extern const Kernels avx2, avx512;
#endif

// Returns an element of positions or slots.
static inline int64_t integer(const void* from, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(from)[i] : static_cast<const int32_t*>(from)[i];
}

// Returns the number of elements of q, k and v that belong to a token.
static inline int64_t elements_of_token(const Args& a) {
  int64_t n = 0;
  for (const Side& side : a.sides) n += side.heads * side.head_dim;
  return n;
}

}  // namespace rope::cpu
