// The CPU kernels, which are built once for each instruction set, and the data that the host file cpu.cpp passes to
// them. This header has only plain data and pointers, because the kernel files must not include inline functions with
// external linkage (see vec.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../args.h"

namespace rope::cpu {

// The arguments of a rotation, and how to access memory.
struct TunedArgs : Args {
  bool stream;  // write results past the caches
  bool fetch;   // prefetch memory
};

// The arguments of the backward of a norm, and how the gradients of the weights are summed. The tokens are cut into
// slices of this size, and the tokens of a slice are summed in their order.
struct SlicedArgs : Args {
  int64_t slice;
  double* sums;  // [slices, weights of q, then those of k]
};

// A kernel computes the items [begin, end) of a call.
template <typename Args>
struct Kernel {
  size_t (*scratch_bytes)(const Args&);  // that one thread needs
  void (*run)(const Args&, int64_t begin, int64_t end, void* scratch);
};

struct Kernels {
  const char* name;
  Kernel<TunedArgs> rotate;                // items: tokens. Writes v too, if there is one
  Kernel<SlicedArgs> norm_backward;  // items: slices
  Kernel<CosSinArgs> cos_sin;  // items: tokens. positions and inv_freq must be double and contiguous
};

const Kernels& kernels();  // the ones for the instruction set that torch has chosen

extern const Kernels plain;  // NEON on arm64
#if defined(__x86_64__)
extern const Kernels avx2, avx512;
#endif

}  // namespace rope::cpu
