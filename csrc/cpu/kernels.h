// The CPU kernels, one build of them per instruction set, and what the host file hands to them.
// Plain data and pointers only: the kernel files may include nothing with inline functions of external linkage (see
// vec.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../rope.h"

namespace rope::cpu {

enum class DType { kHalf, kBFloat16, kFloat, kDouble };

struct Rotate {
  RopeParams params;
  double attention_factor, norm_eps;           // params has them for float32 arithmetic
  DType x_dtype, table_dtype, inv_freq_dtype;  // of cos and sin; of inv_freq
  DType q_norm_dtype, k_norm_dtype;
  bool wide_positions, wide_slots;  // int64, else int32
  bool stream;                      // write past the caches
  bool fetch;                       // ask for memory ahead
  const void *q_in, *k_in, *v_in;   // [batch, seq, heads, head_dim] by the strides of params
  void *q_out, *k_out, *v_out;
  const void *cos, *sin, *inv_freq, *positions, *slots, *q_norm_weight, *k_norm_weight;
};

struct NormBackward {
  Rotate rotate;          // of the gradients, back
  const rope_int *q, *k;  // strides of what was normalised
  const void *q_in, *k_in;
};

struct CosSin {
  int64_t pairs;
  double attention_factor;
  float factor_hi, factor_lo;  // the same, for float32 arithmetic
  DType out_dtype;
  const double* positions;  // [tokens]
  const double* inv_freq;   // [pairs]
  void *cos, *sin;          // [tokens, pairs]
};

struct Kernels {
  const char* name;
  size_t (*rotate_scratch)(const Rotate&);                                   // bytes of scratch that one thread needs
  void (*rotate)(const Rotate&, int64_t begin, int64_t end, void* scratch);  // tokens [begin, end) of batch * seq
  size_t (*norm_backward_scratch)(const NormBackward&);
  // weight_grads: what these tokens add to the gradients of both weights, [2, head_dim].
  void (*norm_backward)(const NormBackward&, int64_t begin, int64_t end, double* weight_grads, void* scratch);
  size_t (*cos_sin_scratch)(const CosSin&);
  void (*cos_sin)(const CosSin&, int64_t begin, int64_t end, void* scratch);
};

const Kernels& kernels();  // those that torch's choice of instruction set selects

extern const Kernels plain;  // NEON on arm64
#if defined(__x86_64__)
extern const Kernels avx2, avx512;
#endif

}  // namespace rope::cpu
