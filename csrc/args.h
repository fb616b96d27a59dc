// A call as the kernels of the CPU and of CUDA take it: sizes, strides and addresses. Plain data, so that kernel files
// need no header of torch, and no function with external linkage, because the CPU's are built for several processors.
#pragma once

#include "rope.h"

namespace rope {

enum class DType : int { kHalf, kBFloat16, kFloat, kDouble };

static inline int size_of(DType t) { return t == DType::kDouble ? 8 : t == DType::kFloat ? 4 : 2; }

struct RotateArgs {
  RopeParams params;
  double attention_factor, norm_eps;           // params has them for float32 arithmetic
  DType x_dtype, table_dtype, inv_freq_dtype;  // table: of cos and sin
  DType q_norm_dtype, k_norm_dtype;
  bool wide_positions, wide_slots;  // int64, else int32
  const void *q_in, *k_in, *v_in;   // [batch, seq, heads, head_dim] by the strides of params
  void *q_out, *k_out, *v_out;
  const void *cos, *sin, *inv_freq, *positions, *slots, *q_norm_weight, *k_norm_weight;
};

struct NormBackwardArgs {
  RotateArgs rotate;        // of the gradients, back
  const void *q_in, *k_in;  // what was normalised
  rope_int q[4], k[4];      // its strides
};

// The gradients of cos and sin: with (a, b) a pair of x, (g, h) the gradient of what it became, over all heads and
// tokens that a row turned,
//   gradient of cos = factor * sum of (g a + h b),   of sin = factor * sum of (h a - g b), negative if inverse.
struct TableBackwardArgs {
  RotateArgs rotate;        // q_in and k_in are the gradients of the results; nothing goes to q_out and k_out
  const void *q_in, *k_in;  // what was rotated
  rope_int q[4], k[4];      // its strides
  TokensOfRows tokens;
  const rope_int *order, *starts;  // [tokens or seq], [rows + 1]; null unless listed
  void *cos_grad, *sin_grad;       // [rows, rotary_dim / 2], contiguous, of table_dtype; each row is written once
};

struct CosSinArgs {
  CosSinParams params;
  double attention_factor;           // params has it for float32 arithmetic
  DType dtype, inv_freq_dtype;       // dtype: of cos and sin
  const void *positions, *inv_freq;  // [axes, tokens], [axes, pairs], by the strides of params
  void *cos, *sin;                   // [tokens, pairs], contiguous, aligned to 16 bytes
};

}  // namespace rope
