// The CPU kernels, one build of them per instruction set, and what the host file hands to them.
// Plain data and pointers only: the kernel files may include nothing with inline functions of external linkage (see
// vec.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../args.h"

namespace rope::cpu {

// With how to use memory.
struct TunedRotateArgs : RotateArgs {
  bool stream;  // write past the caches
  bool fetch;   // ask for memory ahead
};

struct Kernels {
  const char* name;
  size_t (*rotate_scratch)(const RotateArgs&);  // bytes of scratch that one thread needs
  // Tokens [begin, end) of batch * seq.
  void (*rotate)(const TunedRotateArgs&, int64_t begin, int64_t end, void* scratch);
  size_t (*norm_backward_scratch)(const NormBackwardArgs&);
  // weight_grads: what these tokens add to the gradients of both weights, [2, head_dim].
  void (*norm_backward)(const NormBackwardArgs&, int64_t begin, int64_t end, double* weight_grads, void* scratch);
  size_t (*table_backward_scratch)(const TableBackwardArgs&);
  // The rows whose first entry is one of [begin, end), see TokensOfRows. A row without entries is not written.
  void (*table_backward)(const TableBackwardArgs&, int64_t begin, int64_t end, void* scratch);
  size_t (*cos_sin_scratch)(const CosSinArgs&);
  // positions and inv_freq are double, and contiguous.
  void (*cos_sin)(const CosSinArgs&, int64_t begin, int64_t end, void* scratch);
};

const Kernels& kernels();  // those that torch's choice of instruction set selects

extern const Kernels plain;  // NEON on arm64
#if defined(__x86_64__)
extern const Kernels avx2, avx512;
#endif

}  // namespace rope::cpu
