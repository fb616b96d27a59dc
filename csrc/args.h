// The arguments of the CPU and CUDA kernels: sizes, strides and addresses. They are plain data, so that the kernel
// files need no header of torch. This file defines no function with external linkage, because the CPU kernels are
// compiled several times, for different processors.
#pragma once

#include "params.h"

namespace rope {

enum class DType : int { kHalf, kBFloat16, kFloat, kDouble };

static inline int size_of(DType t) { return t == DType::kDouble ? 8 : t == DType::kFloat ? 4 : 2; }

// The memory of q, k or v, with the sizes and strides of the Side in RopeParams. What a call lacks is null.
struct SideData {
  const void* in;
  void* out;
  const void* weight;
  const float* scale;
  DType weight_dtype;
};

// The range that a position must lie in.
struct PositionRange {
  bool limited;   // false: every position is allowed
  rope_int last;  // the allowed positions are 0 to last
};
// Returns the range that a table by position and a cache leave. A table by position has a row for each allowed
// position. In a cache without slots, sequence b is written to block b, and each token to the cell of that block whose
// index is the position; the block has block_size cells.
static inline PositionRange position_range(const RopeParams& p) {
  const bool by_row = p.source == kTableByPosition, by_cell = p.has_cache && !p.has_slots;
  const rope_int rows = by_row ? p.table_rows - 1 : INT64_MAX, cells = by_cell ? p.block_size - 1 : INT64_MAX;
  return {by_row || by_cell, rows < cells ? rows : cells};
}

// Returns whether q, k and v have no element. Then a back end reads no tensor, however many tokens there are.
static inline bool is_empty(const RopeParams& p) {
  bool has_channels = false;
  for (const Side& side : p.sides) has_channels = has_channels || (side.heads && side.head_dim);
  return !(p.batch && p.seq && has_channels);
}

struct RotateArgs {
  RopeParams params;
  double attention_factor, norm_eps;           // for float64 arithmetic; params has them for float32
  DType x_dtype, table_dtype, inv_freq_dtype;  // table_dtype: of cos and sin, x_dtype or float32
  bool wide_positions, wide_slots;             // true: int64, false: int32
  SideData sides[kSides];
  const void *cos, *sin, *inv_freq, *positions, *slots;
};

// What a backward reads besides the gradients: q or k before the norm or the rotation.
struct Before {
  const void* data;
  rope_int strides[4];  // [batch, seq, heads, head_dim]
};

// The arguments of the backward of norm and rotation. Let x be what is normalised together, a head or all heads of a
// token, and w the weights. The normalised and weighted x is scale x w. Let g be its gradient: the gradient of the
// result, rotated back. Then
//   scale = 1 / sqrt(mean(x^2) + norm_eps)
//   gradient of x = scale * (g w + common x), where common = -scale^2 * mean(g w x)
//   gradient of w = sum of scale g x over all tokens, and over all heads that have the weight w
struct NormBackwardArgs {
  RotateArgs rotate;  // rotates the gradients of the results, its q and k, back
  Before x[2];        // q and k, which the forward call normalised
};

// The arguments for the gradients of cos and sin. Let (a, b) be a pair of x before the rotation, and (g, h) the
// gradient of the pair after the rotation. The gradients of one element of cos and sin are sums over all heads of all
// tokens that the table row rotated:
//   gradient of cos = factor * sum of (g a + h b)
//   gradient of sin = factor * sum of (h a - g b), with the opposite sign if the rotation is inverse
struct TableBackwardArgs {
  RotateArgs rotate;  // its q and k are the gradients of the results; it writes nothing
  Before x[2];        // q and k, which the forward call rotated
  TokensOfRows tokens;
  const rope_int *order, *starts;  // [tokens or seq], [rows + 1]; null unless listed
  void *cos_grad, *sin_grad;       // [rows, rotary_dim / 2], contiguous, of table_dtype; zeros for a row without tokens
};

struct CosSinArgs {
  CosSinParams params;
  double attention_factor;           // for float64 arithmetic; params has it for float32
  DType dtype, inv_freq_dtype;       // dtype is that of cos and sin
  const void *positions, *inv_freq;  // [axes, tokens], [axes, pairs] or [2, axes, pairs], with the strides in params
  void *cos, *sin;                   // [tokens, pairs], contiguous, aligned to 16 bytes
};

}  // namespace rope
