// What host code and kernels share: plain sizes, strides and flags, no pointers. Metal gets the struct by setBytes.
#ifndef ROPE_ROPE_H
#define ROPE_ROPE_H

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
  kInvFreq = 2,          // inv_freq: [rotary_dim / 2]
};

// Of the positions that cos_sin takes.
enum class PositionType : int { kInt8, kUInt8, kInt16, kInt32, kInt64, kHalf, kBFloat16, kFloat, kDouble };

// One tensor of the call, [batch, seq, heads, head_dim]. Strides count elements, in that order.
struct Operand {
  rope_int heads;  // 0: there is no such tensor
  rope_int in[4];
  rope_int out[4];  // of a cache: [blocks, block_size, heads, head_dim]
};

struct RopeParams {
  rope_int batch, seq, head_dim, rotary_dim;
  Operand q, k, v;          // v is copied; it and k go to a cache where there is a v
  rope_int cos[3], sin[3];  // strides: batch, row, column; a row is a position or a token
  rope_int rows;            // rows of a table by position
  rope_int inv_freq;        // stride
  rope_int positions[2];    // strides: batch, seq
  rope_int offset;
  rope_int slots[2];  // strides: batch, seq
  rope_int blocks, block_size;
  rope_int q_norm_weight, k_norm_weight;  // strides
  float factor_hi, factor_lo;             // attention_factor
  float norm_eps;
  int source;  // AngleSource
  int has_positions;
  int has_slots;
  int has_norm;
  int interleaved;
  int inverse;
};

static_assert(sizeof(RopeParams) == 424, "the same layout on host and device");

// The tokens that a row of the tables turned, for the gradient of that row. Token t is (t / seq, t % seq) of [batch,
// seq]. A row has entries; each stands for `copies` tokens: entry, entry + seq, entry + 2 seq ...
//   listed: the entries of row r are order[starts[r]] .. order[starts[r + 1] - 1];
//   else row r has the entry r - shift, where that is at least 0 and below `entries`, or none.
struct TokensOfRows {
  rope_int rows;  // of all tables
  rope_int copies, shift, entries;
  int listed;
};

// The angle of a token is the sum over axes of position * inv_freq.
struct CosSinParams {
  rope_int axes, tokens, pairs;
  rope_int positions[2];       // strides: axis, token
  rope_int inv_freq[2];        // strides: axis, pair
  float factor_hi, factor_lo;  // attention_factor
  PositionType position_type;
};

static_assert(sizeof(CosSinParams) == 72, "the same layout on host and device");

}  // namespace rope

#endif
