// The launch plan of a rotation: whether a usual kernel takes the call, its arguments, and how the heads are divided.
//
// A thread block has up to three axes: x over the chunks of a head, y over heads, z over tokens. The x threads with the
// same y and z are a team: they share one head of one token, a chunk for each thread. The grid has x for runs of
// block.z tokens, y for shares of the heads, and z for the sequences of the batch. In a usual kernel a share has
// steps * block.y heads of one side; team y takes the y-th and then each block.y-th one. In a general kernel, team y of
// share j takes head j * block.y + y of q, k and v as one list, and then each (grid.y * block.y)-th one.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <utility>

#include "tiling.h"

namespace rope::cuda {

// Several thread blocks share the heads of a token, up to this many for each multiprocessor, some four times as many as
// it holds. A team takes at most kMostHeads heads.
constexpr rope_int kFilling = 32, kMostHeads = 10;

// The q, k or v of a usual kernel.
struct UsualSide {
  const void* in;
  void* out;
  int in_strides[3], out_strides[3];  // in vectors: batch, token, head; of a cache: block, cell, head
  int heads;
  uint16_t chunks;  // of a head. In place those that are not rotated need not be written
  uint16_t norm : 1, is_cache : 1, format : 2, scale_by_head : 1;  // is_cache: `out` is one
  // With a norm
  const void* weight;
  float weight_offset, per_channel;
};

// The arguments of a usual kernel. On an H100 a kernel waits about 0.1 us for each line of 64 bytes of its arguments. A
// thread block needs the first two of these and that of its side, and for results in 8 bits one more.
struct UsualArgs {
  const void *cos, *sin;  // with frequencies, cos is inv_freq
  const void *positions, *slots;
  int seq, first_sequence;  // first_sequence: that of blockIdx.z == 0
  int position_strides[2];  // in bytes: batch, token
  int slot_strides[2];      // in bytes: batch, token
  int offset;
  unsigned allowed;      // each position is below this; 0: every position is allowed
  unsigned cells;        // of a cache
  int table_strides[2];  // in bytes: batch, row. With frequencies, the last one is that of their parts, in numbers
  unsigned wide_positions : 1, wide_slots : 1;  // int64, not int32
  unsigned wide_angles : 1;    // float32 tables, not those of x's dtype; float64 frequencies, not float32
  unsigned by_token : 1;       // the table row of a token follows from the token
  unsigned split : 1;          // frequencies have two parts
  unsigned same_position : 1;  // without positions, each token has position 0
  unsigned inverse : 1, frequencies : 1;
  unsigned narrow : 1, round_before_weight : 1;  // narrow: kEachNarrow
  unsigned wide_weights : 1;                     // float32, not x's dtype
  unsigned block_shift : 5;    // a block of a cache has 2^block_shift cells, or the cache is like one block
  unsigned all_heads : 1;      // a group has all heads of a side, and not one
  uint16_t chunks, half;       // of a head; half: vectors of half of the rotated channels
  uint16_t start, others;      // vectors before the rotated channels, and of all that are not rotated
  int first_of_k, first_of_v;  // their first shares, in the grid
  int steps;                   // heads that a team takes
  float factor_hi, factor_lo, norm_eps;
  UsualSide sides[kSides];
  int weight_stride, table_head_stride;  // of heads, in numbers and in bytes
  const float* scales[kSides];           // of results in 8 bits
};
static_assert(offsetof(UsualArgs, sides) == 48 + 64 && sizeof(UsualSide) == 64);  // the first line has 48 bytes

// ---- which calls are usual ----

// Returns whether slots lead to cells as if the caches had one block.
inline bool is_one_block(const Args& a) {
  const auto dense = [&](const Side& s) { return s.heads == 0 || s.out_strides[0] == a.block_size * s.out_strides[1]; };
  return a.blocks <= 1 || (a.block_size > 1 && dense(a.sides[kK]) && dense(a.sides[kV]));
}

// Returns stride d of a tensor of a side, in vectors: that of batch, token or head, or of the blocks, cells or heads of
// a cache. It is 0 for a dimension of one element.
inline rope_int stride_of(const Args& a, const Tiling& t, int side, const rope_int* strides, bool is_result, int d) {
  const bool cache = is_result && side != kQ && a.has_cache;
  const rope_int sizes[3] = {cache ? a.blocks : a.batch, cache ? a.block_size : a.seq, a.sides[side].heads};
  return sizes[d] == 1 ? 0 : strides[d] / t.vector;
}

// Returns whether a number that a usual kernel holds in 31 bits does not fit there. An OR of numbers is negative or too
// large if one of them is.
inline bool passes_31_bits(const Args& a, const Tiling& t) {
  rope_int numbers = 2 * a.seq * a.batch | a.blocks * a.block_size;  // the kernel counts past the last token
  for (int d = 0; d < 2; d++) numbers |= 8 * a.position_strides[d] | 8 * a.slot_strides[d];  // in bytes
  if (a.source == kInvFreq) numbers |= a.inv_freq_strides[0];
  for (int d = 0; d < 3 && a.source != kInvFreq; d++) numbers |= 4 * a.cos_strides[d];
  rope_int heads = 0;
  for (int i = 0; i < kSides; i++) {
    const Side& side = a.sides[i];
    if (side.heads == 0) continue;
    rope_int largest = 0;
    for (int d = 0; d < 3; d++) {
      largest = std::max(stride_of(a, t, i, side.in_strides, false, d), stride_of(a, t, i, side.out_strides, true, d));
      if (side.before) largest = std::max(largest, stride_of(a, t, i, side.before_strides, false, d));
      numbers |= largest;
    }
    heads += side.heads;
    numbers |= heads | (side.heads * largest + t.chunks);  // largest: of heads; the sum is that of offsets in a token
    if (i != kV && side.norm) numbers |= side.heads * side.weight_strides[0];
  }
  return numbers < 0 || numbers > INT32_MAX || a.offset != int(a.offset);
}

// Returns the rules by which no usual kernel takes a call: whether each holds, and its words. docs/cuda.md quotes them.
inline std::array<std::pair<bool, const char*>, 21> general_rules(const Args& a, const Plan& plan) {
  const Side &q = a.sides[kQ], &k = a.sides[kK], &v = a.sides[kV];
  const Tiling& t = plan.tiling;
  const int size = size_of(a.x_dtype);
  const bool all_heads = q.norm == kAllHeads, frequencies = a.source == kInvFreq, eager = a.rounding != kOnce;
  const rope_int heads = q.heads + k.heads + v.heads, most = std::max({q.heads, k.heads, v.heads});
  const rope_int held = plan.by_block ? ceil_div(all_heads ? most : 1, plan.block.y) * 2 * t.vector : 0;
  const bool one_size = is_one_block(a) || std::has_single_bit(rope_uint(a.block_size));
  const bool backward = std::any_of(a.sides, a.sides + kSides, [](const Side& side) { return side.before; });
  const bool has_factor = a.factor_hi != 1 || a.factor_lo != 0;
  const bool like_sin = std::equal(a.cos_strides, a.cos_strides + 3, a.sin_strides);
  const bool in_run = a.inv_freq_strides[1] == 1 && a.inv_freq_strides[0] % 4 == 0 && begins_vector(a.inv_freq);
  bool in_bytes = false, scales_apart = false, weights_apart = false;
  for (const Side& side : a.sides) {
    if (side.heads == 0) continue;
    in_bytes |= side.format != kUnquantised, scales_apart |= side.scale_stride > 1;
    if (&side == &v || side.norm == kNoNorm) continue;
    const auto& [head, channel] = side.weight_strides;
    weights_apart |= channel != 1 || head % t.vector != 0 || !begins_vector(side.weight) ||
                     head != q.weight_strides[0] || side.weight_dtype != q.weight_dtype;
  }
  return {{
      {!has_usual_kernels(size, t.vector) || !t.vectors, "x is float64, or is not accessed in 16 bytes"},
      {v.heads && v.head_dim != q.head_dim, "v has another head_dim than k"},
      {plan.by_block && (t.chunks > plan.block.x || held > kHeldChannels), "a thread block cannot hold a group"},
      {all_heads && v.norm, "the norm is over all heads, and v has a norm too"},
      {plan.by_block && heads > kMaxGrid, "thread blocks take more than 65,535 heads of a token"},
      {!plan.by_block && a.source == kTableByHead, "tables are by head, but thread blocks take no groups"},
      {!frequencies && !t.table_vectors, "the rows of cos and sin are not aligned to 16 bytes"},
      {!frequencies && !like_sin, "cos and sin have other strides than each other"},
      {frequencies && !(a.rotary_dim && in_run), "the frequencies are none, not adjacent, or not aligned to 16 bytes"},
      {(takes_norm(a) || a.has_cache) && (bool(a.inverse) != backward || (has_factor && !frequencies)),
       "inverse, or an attention_factor of tables, is used with a norm or a cache"},
      {q.factor != nullptr, "q has a factor"},
      {v.weight != nullptr, "the norm of v has a weight"},
      {plan.by_block && a.weight_offset != 0, "a thread block takes a group, and weights have an offset"},
      {eager && frequencies, "eager_rounding is used with frequencies"},
      {eager && (takes_norm(a) ? size != 2 : a.has_cache),
       "eager_rounding is used with a norm of float32, or with a cache and no norm"},
      {a.has_slots && !one_size, "the blocks of a cache are neither adjacent nor of 2^n cells"},
      {t.positions.limited && rope_uint(t.positions.last) >= INT32_MAX, "no position is allowed, or 2^31 of them"},
      {in_bytes && (size != 2 || eager), "results are in 8 bits, and x is float32, or eager_rounding is used"},
      {scales_apart, "the scales of a side are not adjacent"},
      {weights_apart, "the weights of q and k are not adjacent, not aligned to 16 bytes, or of two dtypes or strides"},
      {passes_31_bits(a, t), "offset, a size or a stride does not fit in 31 bits"},
  }};
}

// Returns the words of the first rule that holds, or null: then a usual kernel takes the call.
inline const char* why_general(const Args& a, const Plan& plan) {
  for (const auto& [holds, words] : general_rules(a, plan)) {
    if (holds) return words;
  }
  return nullptr;
}

// ---- the arguments of usual kernels ----

// Returns the arguments of the usual kernel that takes a call.
inline UsualArgs pack(const Args& a, const Tiling& t) {
  const Side& q = a.sides[kQ];
  const bool frequencies = a.source == kInvFreq, by_head = a.source == kTableByHead;
  UsualArgs u{frequencies ? a.inv_freq : a.cos, a.sin, a.positions, a.slots, int(a.seq)};
  for (int d = 0; d < 2; d++) {
    u.position_strides[d] = int(a.position_strides[d]) * (a.wide_positions ? 8 : 4);
    u.slot_strides[d] = int(a.slot_strides[d]) * (a.wide_slots ? 8 : 4);
    u.table_strides[d] = int(!frequencies ? a.cos_strides[d] * size_of(a.table_dtype) : d ? a.inv_freq_strides[0] : 0);
  }
  u.offset = int(a.offset), u.allowed = t.positions.limited ? unsigned(t.positions.last) + 1 : 0;
  u.cells = unsigned(a.blocks * a.block_size);
  u.block_shift = is_one_block(a) ? 31 : std::countr_zero(uint64_t(a.block_size));
  u.wide_positions = a.wide_positions, u.wide_slots = a.wide_slots;
  u.wide_angles = frequencies ? a.inv_freq_dtype == DType::kDouble : a.table_dtype == DType::kFloat;
  u.same_position = !a.has_positions && a.position_strides[1] == 0;
  u.by_token = a.source == kTableByToken || by_head, u.split = a.split_inv_freq, u.frequencies = frequencies;
  u.inverse = a.inverse, u.narrow = a.rounding == kEachNarrow;
  u.steps = t.steps, u.chunks = uint16_t(t.chunks), u.half = uint16_t(t.rotated);
  u.start = uint16_t(a.rotary_start / t.vector);
  u.others = uint16_t((q.head_dim - a.rotary_dim) / t.vector);
  u.factor_hi = a.factor_hi, u.factor_lo = a.factor_lo;
  u.all_heads = q.norm == kAllHeads, u.table_head_stride = by_head ? int(a.cos_strides[2]) * size_of(a.table_dtype) : 0;
  u.first_of_k = t.shares[kQ], u.first_of_v = t.shares[kQ] + t.shares[kK];
  u.norm_eps = a.narrow_eps, u.round_before_weight = a.round_before_weight;
  for (int i = 0; i < kSides; i++) {
    const Side& side = a.sides[i];
    if (side.heads == 0) continue;
    UsualSide& s = u.sides[i] = {side.in, side.out};
    s.heads = int(side.heads);
    for (int d = 0; d < 3; d++) {
      s.in_strides[d] = int(stride_of(a, t, i, side.in_strides, false, d));
      s.out_strides[d] = int(stride_of(a, t, i, side.out_strides, true, d));
    }
    s.norm = side.norm != kNoNorm, s.is_cache = i != kQ && a.has_cache;
    s.chunks = uint16_t(t.in_place[i] && !takes_norm(a) ? t.rotated : t.chunks), s.format = uint16_t(side.format);
    s.scale_by_head = side.scale_stride != 0, u.scales[i] = side.scale;
    s.per_channel = float(t.per_channel[i]), s.weight = side.weight, s.weight_offset = a.narrow_weight_offset;
    if (!side.weight) continue;
    u.wide_weights = side.weight_dtype == DType::kFloat, u.weight_stride = int(side.weight_strides[0]);
  }
  return u;
}

// ---- the plan ----

// Returns the plan of a rotation, with or without a norm. Neighbouring teams access neighbouring memory: different
// heads of a token if those are adjacent ([batch, seq, heads, head_dim]), else different tokens ([batch, heads, seq,
// head_dim]).
inline Plan plan_rotate(const Args& a, int processors) {
  const Side &q = a.sides[kQ], &k = a.sides[kK], &v = a.sides[kV];
  const bool norm = takes_norm(a);
  Plan plan = plan_head(a, norm);
  Tiling& t = plan.tiling;
  if (q.heads + k.heads + v.heads == 0 || t.chunks == 0) return plan;  // an empty grid
  // A v with another head_dim is cut into pieces of k's, of which the last one may be short.
  t.pieces = ceil_div(v.head_dim, q.head_dim);
  for (int i = 0; i < kSides; i++) t.starts[i + 1] = t.starts[i] + a.sides[i].heads * (i == kV ? t.pieces : 1);
  const rope_int heads = t.starts[kSides], chunks = std::min<rope_int>(t.chunks, kThreads);
  if (plan.by_block) plan.block = group_block(a, t, kGroupThreads);
  plan.general = why_general(a, plan);
  const bool all_heads = q.norm == kAllHeads;
  // A usual kernel divides the heads of each side, and a general kernel those of the list.
  const std::array<rope_int, kSides> divided =
      plan.general ? std::array{heads, rope_int(0), rope_int(0)} : std::array{q.heads, k.heads, v.heads};
  // Returns the sum, over what is divided, of its shares or steps if each has so many heads.
  const auto sum_of = [&](rope_int each) {
    return ceil_div(divided[kQ], each) + ceil_div(divided[kK], each) + ceil_div(divided[kV], each);
  };
  if (plan.by_block) {
    const rope_int groups = all_heads ? (v.heads ? 3 : 2) : q.heads + k.heads + v.heads;
    plan.grid = {a.seq, std::min(groups, kMaxGrid), a.batch};
    for (int i = 0; i < kSides; i++) t.shares[i] = int(all_heads ? 1 : divided[i]);
    return plan;
  }
  // The threads of a team. The lanes of one warp sum a norm with shuffles, which need a power of two of them.
  const rope_int x = !norm ? chunks : plan.general ? kWarp : power_of_two(chunks), teams = kThreads / x;
  const rope_int filling = rope_int(processors) * kFilling;
  const rope_int most =
      a.seq > 1 && q.in_strides[2] > q.in_strides[1] ? teams / std::min({a.seq, teams, kMaxBlockZ}) : teams;
  // The teams over heads are a power of two, so that whole warps sum norms. At most one in five has no head.
  rope_int y = power_of_two(std::min(most, heads) + 1) / 2;
  while (y > 1 && 4 * sum_of(y) * y > 5 * heads) y /= 2;
  const rope_int z = std::min({teams / y, kMaxBlockZ, norm ? kMaxBlockZ : a.seq}), runs = ceil_div(a.seq, z);
  rope_int steps = std::clamp<rope_int>(sum_of(y) * runs * a.batch / filling, 1, kMostHeads);
  steps = std::max(steps, ceil_div(sum_of(y), kMaxGrid - kSides));
  plan.block = {x, y, z};
  plan.grid = {runs, sum_of(y * steps), a.batch};
  for (int i = 0; i < kSides; i++) t.shares[i] = int(ceil_div(divided[i], y * steps));
  t.steps = int(steps);
  return plan;
}

}  // namespace rope::cuda
