// The structs that host code and kernels share. They hold plain sizes, strides and flags, and no pointers, because
// Metal gets them as bytes (setBytes).
#ifndef ROPE_PARAMS_H
#define ROPE_PARAMS_H

#ifdef __METAL_VERSION__
typedef long rope_int;
#else
#include <cstdint>
typedef std::int64_t rope_int;
#endif

namespace rope {

enum AngleSource : int {
  kTableByPosition = 0,  // cos, sin: [max_position, rotary_dim / 2]
  kTableByToken = 1,     // cos, sin: [batch or 1, seq, rotary_dim / 2]
  kInvFreq = 2,          // inv_freq: [rotary_dim / 2] or [2, rotary_dim / 2]
  kTableByHead = 3,      // cos, sin: [batch or 1, seq, heads, rotary_dim / 2]
};

// How often a rotated element is rounded. The last two have the bits of the formula in torch's operators.
enum Rounding : int {
  kOnce = 0,        // once, at the end
  kEachWide = 1,    // each product and each sum, to the arithmetic type; then once more to x's dtype
  kEachNarrow = 2,  // each product and each sum, to x's dtype, which is that of cos and sin too
};

// The dtype of the positions that cos_sin takes.
enum class PositionType : int { kInt8, kUInt8, kInt16, kInt32, kInt64, kFloat, kDouble };

// How the numbers of a result are stored: in the dtype of x, or divided by a scale and quantised, see quantise.h.
enum Format : int { kUnquantised = 0, kFloat8E4M3 = 1, kFloat8E5M2 = 2, kInt8 = 3 };

// What is normalised together: each head by itself, or all heads of a token.
enum NormGroup : int { kNoNorm = 0, kEachHead = 1, kAllHeads = 2 };

// The sides of a call: the tensors that it rotates, or copies to a cache.
enum { kQ = 0, kK = 1, kV = 2, kSides = 3 };

// The sizes and strides of q, k or v, and how it is written. Strides count elements.
struct Side {
  rope_int heads;      // 0: the call has no such tensor, or it has no heads
  rope_int head_dim;   // k has that of q; v may have another one
  rope_int in[4];      // [batch, seq, heads, head_dim]
  rope_int out[4];     // [batch, seq, heads, head_dim], or of a cache [blocks, block_size, heads, head_dim]
  rope_int weight[2];  // of the norm's weights: head, channel. v has no weights
  rope_int scale;      // of the scales of a quantised result, one for each head; 0: there is one scale for all
  int format;          // Format
  int norm;            // NormGroup. That of k is that of q; that of v is never kAllHeads
};

// The numbers of one call of a rotating operator: what Metal's kernels read.
struct Layout {
  rope_int batch, seq;
  rope_int rotary_start, rotary_dim;  // the channels rotary_start .. rotary_start + rotary_dim - 1 are rotated
  Side sides[kSides];                 // q, k and v. v: only if there are caches; it is not rotated
  rope_int cos[4], sin[4];            // strides: batch, row, head, column; a stride is 0 if there is one for all
  rope_int inv_freq[2];               // strides: part, column; see split_inv_freq
  rope_int positions[2];              // strides: batch, seq. Without positions, token s has position s * positions[1]
  rope_int slots[2];                  // strides: batch, seq
  rope_int offset;
  rope_int blocks, block_size;
  float factor_hi, factor_lo;  // attention_factor is the sum of the two
  float norm_eps;
};

static_assert(sizeof(Layout) == 520, "Layout must have the same size on host and device");

#ifndef __METAL_VERSION__
// The same, and what Metal's compiler knows as function constants.
struct RopeParams : Layout {
  int source;          // AngleSource
  int rounding;        // Rounding; kOnce if q and k have a norm
  int split_inv_freq;  // inv_freq is [2, rotary_dim / 2], and a frequency is the sum of its two parts
  int has_positions;
  int has_slots;
  int has_cache;  // rotated k and a copy of v are written to caches
  int interleaved;
  int inverse;
  rope_int table_rows;  // the number of rows of a table by position
};
#endif

// Lists the tokens that each table row rotated; the gradient of a row is a sum over these tokens. Token t is the token
// t % seq of sequence t / seq.
//
// The tokens of a row are given by entries. An entry is the number of a token, and stands for `sequences` tokens that
// have the same row in different sequences: entry, entry + seq, entry + 2 seq ... The entries of row r are
//   if listed: order[starts[r]] .. order[starts[r + 1] - 1];
//   otherwise: the one entry r - shift, or none if r - shift is not in [0, entries).
struct TokensOfRows {
  rope_int rows;  // the number of rows of the table; a table by token has batch * seq, or seq if its batch is 1. A
                  // table by head has as many rows for each head, which are counted once
  rope_int sequences, shift, entries;
  int listed;
};

// One call of cos_sin: the angle of a token is the sum over axes of position * inv_freq.
struct CosSinParams {
  rope_int axes, tokens, pairs;
  rope_int positions[2];       // strides: axis, token
  rope_int inv_freq[3];        // strides: part, axis, pair; see split_inv_freq
  float factor_hi, factor_lo;  // attention_factor is the sum of the two
  PositionType position_type;
  int split_inv_freq;  // inv_freq is [2, axes, pairs], and a frequency is the sum of its two parts
};

static_assert(sizeof(CosSinParams) == 80, "CosSinParams must have the same layout on host and device");

}  // namespace rope

#endif
