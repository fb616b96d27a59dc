// The launch plan of a rotation: the arguments of a usual kernel, if one takes the call, and how the heads are divided.
//
// A thread block has up to three axes: x over the chunks of a head, y over heads, z over tokens. The x threads with the
// same y and z are a team: they share one head of one token, a chunk for each thread. The heads of q, k and v are
// numbered as one list. The grid has x for runs of block.z tokens, y for shares of the list, and z for the sequences
// of the batch: team y of share j takes the heads j * block.y + y, and then every (grid.y * block.y)-th one.
#pragma once

#include <bit>

#include "plan.h"

namespace rope::cuda {

// Several thread blocks share the heads of a token, up to this many for each multiprocessor, some four times as many as
// it holds. Each needs the angles of its tokens. Those from frequencies take the instructions of three to four heads:
// then a quarter has to do, and with many tokens a team takes at least four heads. None takes more than kMostHeads.
constexpr rope_int kFilling = 32, kHeadsOfAngles = 4, kMostHeads = 10;

// The q, k or v of a usual kernel.
struct UsualSide {
  const void* in;
  void* out;
  int in_strides[3], out_strides[3];  // in vectors: batch, token, head; of a cache: block, cell, head
};

// The arguments of a usual kernel. On an H100 a kernel waits about 0.1 us for each line of 64 bytes of its arguments.
// Args and Tiling have 15 lines. A rotation needs the first 3 of these, and no kernel a sixth.
struct UsualArgs {
  const void *cos, *sin;  // with frequencies, cos is inv_freq
  const void* positions;
  int seq, first_sequence;                      // first_sequence: that of blockIdx.z == 0
  int position_strides[2], offset;              // batch, token
  unsigned allowed;                             // each position is below this; 0: every position is allowed
  int table_strides[2];                         // batch, row; with frequencies, the last one is that of their parts
  unsigned wide_positions : 1, wide_slots : 1;  // int64, not int32
  unsigned wide_angles : 1;    // float32 tables, not those of x's dtype; float64 frequencies, not float32
  unsigned by_token : 1;       // the table row of a token follows from the token
  unsigned split : 1;          // frequencies have two parts
  unsigned same_position : 1;  // without positions, each token has position 0
  unsigned inverse : 1, has_cache : 1, frequencies : 1;
  unsigned narrow : 1;                                                    // kEachNarrow
  unsigned wide_weights : 1;                                              // float32, not x's dtype
  unsigned norms : kSides, scale_by_head : kSides, formats : 2 * kSides;  // of each side
  unsigned block_shift : 5;         // a block of a cache has 2^block_shift cells, or the cache is like one block
  unsigned all_heads : 1;           // a group has all heads of a side, and not one
  int chunks, half, start, others;  // vectors: chunks, of half the rotated channels, before these, and not rotated
  float factor_hi, factor_lo;
  int ends[kSides];  // where the heads of q, k and v end in the list
  UsualSide sides[kSides];
  // With a cache
  const void* slots;
  int slot_strides[2];  // batch, token
  int kept;             // without a norm, the first heads of the list keep the channels that are not rotated
  unsigned cells;
  // With a norm
  float norm_eps, per_channel[2];
  int weight_stride;  // head, in vectors
  const void* weights[2];
  // With results in 8 bits
  const float* scales[kSides];
  // With groups that thread blocks take
  int table_head_stride;
};
static_assert(sizeof(UsualArgs) <= 48 + 4 * 64, "the first line of a kernel's arguments has 48 bytes of them");

using RotatePlan = PlanOf<UsualArgs>;

// Returns the arguments of the usual kernel that takes a call, if there is one.
inline std::optional<UsualArgs> usual_args(const Args& a, const Plan& plan) {
  const Args& p = a;
  const Tiling& t = plan.tiling;
  const Side &q = p.sides[kQ], &k = p.sides[kK], &v = p.sides[kV];
  const bool frequencies = p.source == kInvFreq;
  const int size = size_of(a.x_dtype), most = takes_norm(p) ? kWarp : kThreads;
  // The channels that a thread has of a group, or of all heads of v, which do not count in the thread block.
  const bool all_heads = q.norm == kAllHeads, by_head = p.source == kTableByHead;
  const rope_int heads = all_heads ? std::max({q.heads, k.heads, v.heads}) : 1;
  const rope_int held = plan.by_block ? ceil_div(heads, plan.block.y) * 2 * t.vector : 0;
  const auto dense = [&](const Side& s) { return s.heads == 0 || s.out_strides[0] == p.block_size * s.out_strides[1]; };
  const bool one_block = p.blocks <= 1 || (p.block_size > 1 && dense(k) && dense(v));
  const PositionRange range = position_range(p);
  bool fits = has_usual_kernels(size, t.vector) && t.vectors && (v.heads == 0 || v.head_dim == q.head_dim) &&
              (plan.by_block ? t.chunks <= int(plan.block.x) && held <= kHeldChannels && !(all_heads && v.norm) &&
                                   q.heads + k.heads + v.heads <= kMaxGrid
                             : t.chunks <= most && !by_head) &&
              (p.rounding == kOnce || !(p.has_cache || frequencies)) &&
              (!p.has_slots || one_block || p.block_size == power_of_two(p.block_size)) &&
              (!range.limited || (range.last >= 0 && range.last < INT32_MAX)) && p.offset == int(p.offset) &&
              (frequencies ? p.inv_freq_strides[1] == 1 && p.inv_freq_strides[0] % 4 == 0 && begins_vector(a.inv_freq)
                           : t.table_vectors && std::equal(p.cos_strides, p.cos_strides + 3, p.sin_strides));
  // Returns a number, which must fit in 31 bits.
  const auto narrow = [&](rope_int number) {
    fits = fits && number >= 0 && number <= INT32_MAX;
    return int(number);
  };
  UsualArgs u{frequencies ? a.inv_freq : a.cos, a.sin, a.positions, narrow(p.seq)};
  narrow(2 * p.seq * p.batch);  // the kernel counts past the last token
  for (int d = 0; d < 2; d++) {
    u.position_strides[d] = narrow(p.position_strides[d]), u.slot_strides[d] = narrow(p.slot_strides[d]);
    u.table_strides[d] = narrow(!frequencies ? p.cos_strides[d] : d ? p.inv_freq_strides[0] : 0);
  }
  u.offset = int(p.offset), u.allowed = range.limited ? unsigned(range.last) + 1 : 0;
  u.wide_positions = a.wide_positions, u.wide_slots = a.wide_slots;
  u.wide_angles = frequencies ? a.inv_freq_dtype == DType::kDouble : a.table_dtype == DType::kFloat;
  u.same_position = !p.has_positions && p.position_strides[1] == 0;
  u.by_token = p.source == kTableByToken || by_head, u.split = p.split_inv_freq, u.frequencies = frequencies;
  u.inverse = p.inverse, u.narrow = p.rounding == kEachNarrow, u.has_cache = p.has_cache;
  u.chunks = t.chunks, u.half = t.rotated, u.start = int(p.rotary_start) / t.vector;
  u.others = int(q.head_dim - p.rotary_dim) / t.vector;
  u.factor_hi = p.factor_hi, u.factor_lo = p.factor_lo;
  for (int i = 0; i < kSides; i++) {
    const Side& side = p.sides[i];
    u.ends[i] = narrow((i == kQ ? 0 : u.ends[i - 1]) + side.heads);
    if (side.heads == 0) continue;
    const bool cache = i != kQ && p.has_cache;
    const rope_int in[3] = {p.batch, p.seq, side.heads};
    const rope_int out[3] = {cache ? p.blocks : p.batch, cache ? p.block_size : p.seq, side.heads};
    const auto stride = [&](rope_int stride, rope_int n) { return n == 1 ? 0 : narrow(stride / t.vector); };
    UsualSide& s = u.sides[i] = {side.in, side.out};
    for (int d = 0; d < 3; d++)
      s.in_strides[d] = stride(side.in_strides[d], in[d]), s.out_strides[d] = stride(side.out_strides[d], out[d]);
    narrow(side.heads * std::max(s.in_strides[2], s.out_strides[2]) + t.chunks);  // the offsets in a token
    u.norms |= unsigned(side.norm != kNoNorm) << i, u.scale_by_head |= unsigned(side.scale_stride != 0) << i;
    u.formats |= unsigned(side.format) << 2 * i, u.scales[i] = side.scale;
    fits = fits && (side.format == kUnquantised || size == 2) && side.scale_stride <= 1;
    if (i == kV || side.norm == kNoNorm) continue;
    u.weights[i] = side.weight, u.wide_weights = side.weight_dtype == DType::kFloat;
    u.weight_stride = narrow(side.weight_strides[0] / t.vector);
    narrow(side.heads * side.weight_strides[0]);
    fits = fits && side.weight_strides[0] % t.vector == 0 && side.weight_strides[1] == 1 && begins_vector(side.weight) &&
           side.weight_dtype == a.sides[kQ].weight_dtype && side.weight_strides[0] == q.weight_strides[0];
  }
  u.all_heads = all_heads, u.table_head_stride = by_head ? narrow(p.cos_strides[2]) : 0;
  u.norm_eps = p.narrow_eps, u.per_channel[kQ] = float(t.per_channel[kQ]), u.per_channel[kK] = float(t.per_channel[kK]);
  u.slots = a.slots, u.cells = unsigned(narrow(p.blocks * p.block_size));
  u.block_shift = one_block ? 31 : std::countr_zero(uint64_t(p.block_size));
  u.kept = t.in_place[kQ] ? u.ends[kQ] : 0;
  return fits ? std::optional(u) : std::nullopt;
}

// Returns the plan of a rotation, with or without a norm. Neighbouring teams access neighbouring memory: different
// heads of a token if those are adjacent ([batch, seq, heads, head_dim]), else different tokens ([batch, heads, seq,
// head_dim]).
inline RotatePlan plan_rotate(const Args& a, int processors) {
  const Args& p = a;
  const Side &q = p.sides[kQ], &k = p.sides[kK], &v = p.sides[kV];
  const bool norm = takes_norm(p);
  RotatePlan plan{plan_head(a, norm), {}};
  Tiling& t = plan.tiling;
  if (q.heads + k.heads + v.heads == 0 || t.chunks == 0) return plan;  // an empty grid
  // A v with another head_dim is cut into pieces of k's, of which the last one may be short.
  t.pieces = ceil_div(v.head_dim, q.head_dim);
  for (int i = 0; i < kSides; i++) t.starts[i + 1] = t.starts[i] + p.sides[i].heads * (i == kV ? t.pieces : 1);
  const rope_int heads = t.starts[kSides], chunks = std::min<rope_int>(t.chunks, kThreads);
  if (plan.by_block) plan.block = group_block(p, t, kGroupThreads);
  plan.usual = usual_args(a, plan);
  if (plan.by_block) {
    const rope_int sides = v.heads ? 3 : 2, groups = q.norm == kAllHeads ? sides : q.heads + k.heads + v.heads;
    plan.grid = {p.seq, std::min(groups, kMaxGrid), p.batch};
    return plan;
  }
  // The threads of a team. The lanes of one warp sum a norm with shuffles, which need a power of two of them.
  const rope_int x = !norm ? chunks : plan.usual ? power_of_two(chunks) : kWarp, teams = kThreads / x;
  const bool frequencies = p.source == kInvFreq;
  const rope_int filling = rope_int(processors) * kFilling / (frequencies ? kHeadsOfAngles : 1);
  const rope_int each = frequencies && p.seq * p.batch >= filling ? kHeadsOfAngles : 1;  // heads that a team takes
  const rope_int most = p.seq > 1 && q.in_strides[2] > q.in_strides[1] ? teams / std::min({p.seq, teams, kMaxBlockZ}) : teams;
  // The teams over heads are a power of two, so that whole warps sum norms. At most one in five has no head.
  rope_int y = power_of_two(std::min(most, std::max<rope_int>(heads / each, 1)) + 1) / 2;
  while (y > 1 && 4 * ceil_div(heads, y) * y > 5 * heads) y /= 2;
  const rope_int z = std::min({teams / y, kMaxBlockZ, norm ? kMaxBlockZ : p.seq}), runs = ceil_div(p.seq, z);
  const rope_int steps = std::max<rope_int>(ceil_div(heads, y), 1);  // of one thread block that takes all heads
  const rope_int of_share = std::clamp<rope_int>(steps * runs * p.batch / filling, 1, kMostHeads);
  plan.block = {x, y, z};
  plan.grid = {runs, std::min(ceil_div(steps, of_share), kMaxGrid), p.batch};
  return plan;
}

}  // namespace rope::cuda
