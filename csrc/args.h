// The arguments of the kernels: the sizes, strides, addresses and flags of one call, as plain data without torch. All
// back ends take these structs. Metal gets them as bytes (setBytes), and reads memory through buffers instead of the
// addresses. This file defines no function with external linkage, because the CPU kernels are compiled several times,
// for different processors.
#ifndef ROPE_ARGS_H
#define ROPE_ARGS_H

#ifdef __METAL_VERSION__
typedef long rope_int;
typedef ulong rope_uint;
typedef ulong rope_double;  // Metal has no double
#define ROPE_POINTER(type) ulong
#else
#include <cstdint>
typedef std::int64_t rope_int;
typedef std::uint64_t rope_uint;
typedef double rope_double;
#define ROPE_POINTER(type) type*
#endif

namespace rope {

// The integers are dtypes of positions alone.
enum class DType : int { kHalf, kBFloat16, kFloat, kDouble, kInt8, kUInt8, kInt16, kInt32, kInt64 };

enum AngleSource : int {
  kTableByPosition = 0,  // cos, sin: [max_position, rotary_dim / 2]
  kTableByToken = 1,     // cos, sin: [batch or 1, seq, rotary_dim / 2]
  kInvFreq = 2,          // inv_freq: [rotary_dim / 2] or [2, rotary_dim / 2]
  kTableByHead = 3,      // cos, sin: [batch or 1, seq, heads, rotary_dim / 2]
};

// How often a rotated element is rounded. The last two have the bits of the formula in torch's operators: what a norm
// gives is rounded to x's dtype before the rotation, and the rotated element before it is multiplied by a factor.
enum Rounding : int {
  kOnce = 0,        // once, at the end
  kEachWide = 1,    // each product and each sum, to the arithmetic type; then once more to x's dtype
  kEachNarrow = 2,  // each product and each sum, to x's dtype, which is that of cos and sin too
};

// How the numbers of a result are stored: in the dtype of x, or divided by a scale and quantised, see quantise.h.
enum Format : int { kUnquantised = 0, kFloat8E4M3 = 1, kFloat8E5M2 = 2, kInt8 = 3 };

// What is normalised together: each head by itself, or all heads of a token.
enum NormGroup : int { kNoNorm = 0, kEachHead = 1, kAllHeads = 2 };

// The sides of a call: the tensors that it rotates, or copies to a cache.
enum { kQ = 0, kK = 1, kV = 2, kSides = 3 };

// q, k or v. Strides count elements. What a call lacks is null.
struct Side {
  ROPE_POINTER(const void) in;       // [batch, seq, heads, head_dim]
  ROPE_POINTER(void) out;            // the same, or a cache: [blocks, block_size, heads, head_dim]
  ROPE_POINTER(const void) weight;   // of the norm: [head_dim] or [heads, head_dim]. v may have a norm without one
  ROPE_POINTER(const float) factor;  // of each head of a token, which the result is multiplied by. Only q may have one
  ROPE_POINTER(const float) scale;   // of a quantised result: one number, or [heads]
  ROPE_POINTER(const void) before;   // in a backward, q or k as the forward call took it
  rope_int heads;                    // 0: the call has no such tensor, or it has no heads
  rope_int head_dim;                 // k has that of q; v may have another one
  rope_int in_strides[4], out_strides[4], before_strides[4];
  rope_int weight_strides[2];  // head, channel
  rope_int factor_strides[3];  // batch, seq, head; a stride is 0 if there is one for all
  rope_int scale_stride;       // 0: there is one scale for all heads
  DType weight_dtype;
  int format;  // Format
  int norm;    // NormGroup. That of k is that of q; that of v is never kAllHeads
};

// One call of a rotating operator. In the backward of norm and rotation, the inputs of q and k are the gradients of
// the results, which are rotated back. Let x be what is normalised together, a head or all heads of a token, and w the
// weights plus weight_offset. The normalised and weighted x is scale x w. Let g be its gradient: the gradient of the
// result, rotated back and times its factor.
//   scale = 1 / sqrt(mean(x^2) + norm_eps)
//   gradient of x = scale * (g w + common x), where common = -scale^2 * mean(g w x)
//   gradient of w = sum of scale g x over all tokens, and over all heads that have the weight w
struct Args {
  rope_int batch, seq;
  rope_int rotary_start, rotary_dim;  // the channels rotary_start .. rotary_start + rotary_dim - 1 are rotated
  Side sides[kSides];                 // q, k and v. v: only if there are caches; it is not rotated
  ROPE_POINTER(const void) cos;
  ROPE_POINTER(const void) sin;
  ROPE_POINTER(const void) inv_freq;
  ROPE_POINTER(const void) positions;
  ROPE_POINTER(const void) slots;
  rope_int cos_strides[4], sin_strides[4];  // batch, row, head, column; a stride is 0 if there is one for all
  rope_int inv_freq_strides[2];             // part, column; see split_inv_freq
  rope_int position_strides[2];             // batch, seq. Without positions, that of token s is s * position_strides[1]
  rope_int slot_strides[2];                 // batch, seq
  rope_int offset;
  rope_int table_rows;  // the number of rows of a table by position
  rope_int blocks, block_size;
  rope_double attention_factor, norm_eps, weight_offset;  // for float64 arithmetic
  float factor_hi, factor_lo;                             // attention_factor is the sum of the two
  float narrow_eps, narrow_weight_offset;                 // the others for float32 arithmetic
  DType x_dtype, table_dtype, inv_freq_dtype;             // table_dtype: of cos and sin, x_dtype or float32
  int source;                                             // AngleSource
  int rounding;                                           // Rounding
  int round_before_weight;  // not kOnce: what a norm gives is also rounded before it takes its weight
  int split_inv_freq;       // inv_freq is [2, rotary_dim / 2], and a frequency is the sum of its two parts
  int has_positions, has_slots;
  int wide_positions, wide_slots;  // int64, not int32
  int has_cache;                   // rotated k and a copy of v are written to caches
  int interleaved, inverse;
};

// One call of cos_sin: the angle of a token is the sum over axes of position * inv_freq.
struct CosSinArgs {
  rope_int axes, tokens, pairs;
  ROPE_POINTER(const void) positions;  // [axes, tokens]
  ROPE_POINTER(const void) inv_freq;   // [axes, pairs], or [2, axes, pairs], which is the sum of two parts
  ROPE_POINTER(void) cos;              // [tokens, pairs], contiguous, aligned to 16 bytes
  ROPE_POINTER(void) sin;
  rope_int position_strides[2];                 // axis, token
  rope_int inv_freq_strides[3];                 // part, axis, pair
  rope_double attention_factor;                 // for float64 arithmetic
  float factor_hi, factor_lo;                   // attention_factor is the sum of the two
  DType dtype, inv_freq_dtype, position_dtype;  // dtype: of cos and sin
  int split_inv_freq;                           // inv_freq has two parts
};

static_assert(sizeof(Side) == 224 && sizeof(Args) == 984 && sizeof(CosSinArgs) == 128,
              "the structs must have the same layout on host and device");

// The range that a position must lie in.
struct PositionRange {
  bool limited;   // false: every position is allowed
  rope_int last;  // the allowed positions are 0 to last
};

#ifndef __METAL_VERSION__

static inline int size_of(DType t) { return t == DType::kDouble ? 8 : t == DType::kFloat ? 4 : 2; }

// Returns the range that a table by position and a cache leave. A table by position has a row for each allowed
// position. In a cache without slots, sequence b is written to block b, and each token to the cell of that block whose
// index is the position; the block has block_size cells.
static inline PositionRange position_range(const Args& a) {
  const bool by_row = a.source == kTableByPosition, by_cell = a.has_cache && !a.has_slots;
  const rope_int rows = by_row ? a.table_rows - 1 : INT64_MAX, cells = by_cell ? a.block_size - 1 : INT64_MAX;
  // A negative offset reaches no position above INT64_MAX + offset. A sum that is above it has wrapped around.
  const rope_int last = rows < cells ? rows : cells, most = INT64_MAX + (a.offset < 0 ? a.offset : 0);
  return {by_row || by_cell, last < most ? last : most};
}

// Returns whether q, k and v have no element. Then a back end reads no tensor, however many tokens there are.
static inline bool is_empty(const Args& a) {
  bool has_channels = false;
  for (const Side& side : a.sides) has_channels = has_channels || (side.heads && side.head_dim);
  return !(a.batch && a.seq && has_channels);
}

#endif

}  // namespace rope

#endif
