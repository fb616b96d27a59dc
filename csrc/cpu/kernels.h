// The CPU kernels, which are built once for each instruction set, and the data that the host file cpu.cpp passes to
// them. This header has only plain data and pointers, because the kernel files must not include inline functions with
// external linkage (see vec.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../args.h"

namespace rope::cpu {

// RotateArgs, and how to access memory.
struct TunedRotateArgs : RotateArgs {
  bool stream;  // write results past the caches
  bool fetch;   // prefetch memory
};

struct Kernels {
  const char* name;
  size_t (*rotate_scratch)(const RotateArgs&);  // bytes of scratch that one thread needs
  // Rotates the tokens [begin, end) of batch * seq, and copies v if there is one.
  void (*rotate)(const TunedRotateArgs&, int64_t begin, int64_t end, void* scratch);
  size_t (*norm_backward_scratch)(const NormBackwardArgs&);
  // Writes the gradients of q and k for the tokens [begin, end), and to weight_grads what these tokens add to the
  // gradients of both weights, that of q first.
  void (*norm_backward)(const NormBackwardArgs&, int64_t begin, int64_t end, double* weight_grads, void* scratch);
  size_t (*table_backward_scratch)(const TableBackwardArgs&);
  // Writes the gradients of the table rows whose first entry has an index in [begin, end), see TokensOfRows. The index
  // of an entry is its index in `order` if entries are listed, otherwise the entry itself. Does not write a row that
  // has no entries.
  void (*table_backward)(const TableBackwardArgs&, int64_t begin, int64_t end, void* scratch);
  size_t (*cos_sin_scratch)(const CosSinArgs&);
  // Writes the rows [begin, end) of cos and sin. positions and inv_freq must be double and contiguous.
  void (*cos_sin)(const CosSinArgs&, int64_t begin, int64_t end, void* scratch);
};

const Kernels& kernels();  // the ones for the instruction set that torch has chosen

extern const Kernels plain;  // NEON on arm64
#if defined(__x86_64__)
extern const Kernels avx2, avx512;
#endif

}  // namespace rope::cpu
