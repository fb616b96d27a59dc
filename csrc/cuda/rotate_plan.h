// The launch plan of a rotation: the arguments of a usual kernel, if one takes the call, and how the heads are divided.
//
// A thread block has up to three axes: x over the chunks of a head, y over heads, z over tokens. The x threads with the
// same y and z are a team: they share one head of one token, a chunk for each thread. The heads of q, k and v are
// numbered as one list. The grid has x for groups of block.z tokens, y for shares of the list, and z for the sequences
// of the batch: team y of share j takes the heads j * block.y + y, and then every (grid.y * block.y)-th one.
#pragma once

#include <optional>

#include "plan.h"

namespace rope::cuda {

// Few tokens are divided into as many teams as there are heads. The angles of a token are loaded or computed by each of
// its thread blocks. So there is one for all heads as soon as tokens alone make this many thread blocks for each
// multiprocessor: as many as it holds, or with frequencies, whose angles take about as long as four heads, a quarter.
constexpr rope_int kFilling = 16;
constexpr rope_int kHeadsOfAngles = 4;

// The q, k or v of a usual kernel. Strides count vectors.
struct UsualSide {
  const void* in;
  void* out;
  int in_batch, in_token, in_head;
  int out_batch, out_token, out_head;  // of a cache: block, cell, head
};

// The arguments of a usual kernel. A kernel waits about 0.1 us for each line of 64 bytes of its arguments that it is
// the first to touch. RotateArgs and Tiling have 19 lines; a rotation touches the first 3 of these, and nothing the
// sixth.
struct UsualArgs {
  const void *cos, *sin;  // with frequencies, cos is inv_freq
  const void* positions;
  int seq, first_sequence;  // first_sequence: that of blockIdx.z == 0
  int position_batch, position_token, offset;
  unsigned allowed;            // each position is below this; 0: every position is allowed
  int table_batch, table_row;  // strides of elements; with frequencies, table_row is that of their parts
  unsigned wide_positions : 1, wide_slots : 1;  // int64, not int32
  unsigned wide_angles : 1;          // float32 tables, not those of x's dtype; float64 frequencies, not float32
  unsigned by_token : 1;             // the table row of a token follows from the token
  unsigned split : 1;                // frequencies have two parts
  unsigned same_position : 1;        // without positions, each token has position 0
  unsigned inverse : 1, narrow : 1;  // narrow: kEachNarrow
  unsigned has_cache : 1;
  unsigned wide_weights : 1;                                              // float32, not x's dtype
  unsigned norms : kSides, scale_by_head : kSides, formats : 2 * kSides;  // of each side
  int chunks, half, start, others;  // vectors: chunks, of half the rotated channels, before these, and not rotated
  float factor_hi, factor_lo;
  int ends[kSides];  // where the heads of q, k and v end in the list
  UsualSide sides[kSides];
  // These are used with a cache.
  const void* slots;
  int slot_batch, slot_token;
  int block_shift;  // a block has 2^block_shift cells, or the cache is like one block
  int kept;         // the first heads of the list keep the channels that are not rotated
  unsigned cells;
  // These are used with a norm.
  float norm_eps, per_channel;
  const void* weights[2];
  // These are used with results in 8 bits.
  const float* scales[kSides];
};
static_assert(sizeof(UsualArgs) <= 48 + 4 * 64, "the first line of a kernel's arguments has 48 bytes of them");

struct RotatePlan : Plan {
  std::optional<UsualArgs> usual;  // if not given, a general kernel takes the call
};

// Merges the batch into one sequence of batch * seq tokens if strides allow it. A decode step, which has many sequences
// of one token, then fills thread blocks with tokens of different sequences. Returns position_step: 0 if the tokens
// were sequences of one token each and all have position 0, otherwise 1.
inline int merge_batch(RotateArgs& a) {
  RopeParams& p = a.params;
  if (p.batch == 1) return 1;
  const bool by_token = p.source == kTableByToken || p.source == kTableByHead;
  if (p.has_cache && !p.has_slots) return 1;                  // sequence b goes to block b
  if (!p.has_positions && !by_token && p.seq != 1) return 1;  // each sequence starts at position 0 again
  rope_int* strides[10];  // of each tensor: strides[i][0] between sequences, strides[i][1] between tokens
  int n = 0;
  for (int i = 0; i < kSides; i++) {
    Side& side = p.sides[i];
    if (side.heads) strides[n++] = side.in;
    if (side.heads && (i == kQ || !p.has_cache)) strides[n++] = side.out;
  }
  if (p.has_positions) strides[n++] = p.positions;
  if (p.has_slots) strides[n++] = p.slots;
  if (by_token) strides[n++] = p.cos, strides[n++] = p.sin;
  for (int i = 0; i < n; i++) {
    if (p.seq != 1 && strides[i][0] != p.seq * strides[i][1]) return 1;
  }
  for (int i = 0; i < n && p.seq == 1; i++) strides[i][1] = strides[i][0];
  const int step = p.seq != 1 || p.has_positions;
  p.seq *= p.batch;
  p.batch = 1;
  return step;
}

// Makes heads of k's head_dim of a v with wider ones, if their channels are alike: the latent of MLA, for example, is
// one head of 512 channels beside a k of 64.
inline void cut_v(RotateArgs& a) {
  const rope_int channels = a.params.sides[kQ].head_dim;
  Side& v = a.params.sides[kV];
  const auto adjacent = [&](const rope_int* strides) {
    return strides[3] == 1 && (v.heads == 1 || strides[2] == v.head_dim);
  };
  if (channels == 0 || v.heads == 0 || v.head_dim % channels || v.norm || !adjacent(v.in) || !adjacent(v.out)) return;
  if (v.scale) return;  // of each head
  v.heads *= v.head_dim / channels;
  v.head_dim = v.in[2] = v.out[2] = channels;
}

// Returns the arguments of the usual kernel that takes a call, if there is one. t: the tiling of the call.
inline std::optional<UsualArgs> usual_args(const RotateArgs& a, const Tiling& t) {
  const RopeParams& p = a.params;
  const Side &q = p.sides[kQ], &v = p.sides[kV];
  const bool norm = takes_norm(p), table = p.source != kInvFreq, eager = p.rounding != kOnce;
  const int size = size_of(a.x_dtype);
  bool fits = has_usual_kernels(size, t.vector) && t.vectors && q.norm != kAllHeads && p.source != kTableByHead &&
              t.chunks <= (norm ? kWarp : kThreads) && (v.heads == 0 || v.head_dim == q.head_dim) &&
              !(eager && (p.has_cache || !table));
  // Returns a number, which must fit in 31 bits.
  const auto narrow = [&](rope_int number) {
    fits = fits && number >= 0 && number <= INT32_MAX;
    return int(number);
  };
  UsualArgs u{};
  u.seq = narrow(2 * p.seq) / 2;  // the kernel counts past it
  narrow(p.batch);
  if (table) {
    u.cos = a.cos, u.sin = a.sin;
    u.table_batch = narrow(p.cos[0]), u.table_row = narrow(p.cos[1]);
    u.wide_angles = a.table_dtype == DType::kFloat;
    fits = fits && t.table_vectors && std::equal(p.cos, p.cos + 2, p.sin);
  } else {
    u.cos = a.inv_freq;
    u.table_row = narrow(p.inv_freq[0]);
    u.wide_angles = a.inv_freq_dtype == DType::kDouble;
    u.split = p.split_inv_freq && !u.wide_angles;
    fits = fits && p.inv_freq[1] == 1 && begins_vector(a.inv_freq) && u.table_row % 4 == 0;
  }
  u.by_token = p.source == kTableByToken;
  u.positions = a.positions, u.wide_positions = a.wide_positions;
  u.position_batch = narrow(p.positions[0]), u.position_token = narrow(p.positions[1]);
  u.same_position = t.position_step == 0;
  u.offset = int(p.offset);
  fits = fits && u.offset == p.offset;
  if (const PositionRange range = position_range(p); range.limited) {
    u.allowed = unsigned(narrow(range.last)) + 1;
    fits = fits && u.allowed != 0;
  }
  u.inverse = p.inverse, u.narrow = p.rounding == kEachNarrow, u.has_cache = p.has_cache;
  u.factor_hi = p.factor_hi, u.factor_lo = p.factor_lo;
  u.chunks = t.chunks, u.half = t.rotated, u.start = narrow(p.rotary_start) / t.vector;
  u.others = narrow(q.head_dim - p.rotary_dim) / t.vector;
  for (int i = 0; i < kSides; i++) {
    const Side& side = p.sides[i];
    const SideData& data = a.sides[i];
    u.ends[i] = narrow(t.starts[i + 1]);
    if (side.heads == 0) continue;
    const bool cache = i != kQ && p.has_cache;
    const rope_int in[3] = {p.batch, p.seq, side.heads};
    const rope_int out[3] = {cache ? p.blocks : p.batch, cache ? p.block_size : p.seq, side.heads};
    // Returns a stride, by which all heads of a token lie in the reach of 31 bits.
    const auto stride = [&](const rope_int* strides, const rope_int* sizes, int d) {
      const rope_int vectors = sizes[d] > 1 ? strides[d] / t.vector : 0;
      if (d == 2) narrow((sizes[d] - 1) * vectors + q.head_dim);
      return narrow(vectors);
    };
    u.sides[i] = {data.in, data.out, stride(side.in, in, 0), stride(side.in, in, 1), stride(side.in, in, 2)};
    UsualSide& s = u.sides[i];
    s.out_batch = stride(side.out, out, 0), s.out_token = stride(side.out, out, 1),
    s.out_head = stride(side.out, out, 2);
    u.norms |= unsigned(side.norm != kNoNorm) << i;
    u.scale_by_head |= unsigned(side.scale != 0) << i;
    u.formats |= unsigned(side.format) << 2 * i;
    u.scales[i] = data.scale;
    fits = fits && (side.format == kUnquantised || size == 2) && (side.scale == 0 || side.scale == 1);
    if (i == kV || side.norm == kNoNorm) continue;
    u.weights[i] = data.weight;
    u.wide_weights = data.weight_dtype == DType::kFloat;
    fits = fits && side.weight[1] == 1 && begins_vector(data.weight) && data.weight_dtype == a.sides[kQ].weight_dtype;
  }
  u.norm_eps = p.norm_eps, u.per_channel = float(t.per_channel[kQ]);
  if (p.has_cache) {
    u.slots = a.slots, u.wide_slots = a.wide_slots;
    u.slot_batch = narrow(p.slots[0]), u.slot_token = narrow(p.slots[1]);
    u.cells = unsigned(narrow(p.blocks * p.block_size));
    u.kept = t.in_place[kQ] && q.norm == kNoNorm ? u.ends[kQ] : 0;
    const auto like_one = [&](const Side& side) {
      return side.heads == 0 || side.out[0] == p.block_size * side.out[1];
    };
    const bool one = p.blocks == 1 || (like_one(p.sides[kK]) && like_one(v));
    u.block_shift = one ? 31 : 0;
    while (!one && (rope_int(1) << u.block_shift) < p.block_size) u.block_shift++;
    fits = fits && (!p.has_slots || one || rope_int(1) << u.block_shift == p.block_size);
  }
  return fits ? std::optional(u) : std::nullopt;
}

// Returns the plan of a rotation, with or without a norm. Neighbouring teams access neighbouring memory: different
// heads of a token if those are adjacent ([batch, seq, heads, head_dim]), else different tokens ([batch, heads, seq,
// head_dim]).
inline RotatePlan plan_rotate(RotateArgs& a, int processors) {
  const int position_step = merge_batch(a);
  cut_v(a);
  RopeParams& p = a.params;
  Side &q = p.sides[kQ], &k = p.sides[kK], &v = p.sides[kV];
  if (q.head_dim == 0) {  // v alone has channels
    q.heads = k.heads = 0;
    q.head_dim = v.head_dim;
  }
  const bool norm = takes_norm(p);
  RotatePlan plan{plan_head(a, norm), {}};
  Tiling& t = plan.tiling;
  t.position_step = position_step;
  if (q.heads + k.heads + v.heads == 0 || t.chunks == 0) return plan;  // an empty grid
  // A v with another head_dim is cut into pieces of k's, of which the last one may be short.
  t.pieces = ceil_div(v.head_dim, q.head_dim);
  for (int i = 0; i < kSides; i++) t.starts[i + 1] = t.starts[i] + p.sides[i].heads * (i == kV ? t.pieces : 1);
  if (q.norm == kAllHeads) {
    const rope_int x = power_of_two(std::min<rope_int>(t.chunks, kWarp));
    plan.block = {x, kGroupThreads / x, 1};
    plan.grid = {p.seq, v.heads ? 3 : 2, p.batch};
    return plan;
  }
  plan.usual = usual_args(a, t);
  // The threads of a team. The lanes of one warp sum a norm with shuffles, which need a power of two of them.
  const rope_int chunks = std::min<rope_int>(t.chunks, kThreads);
  const rope_int x = !norm ? chunks : plan.usual ? power_of_two(chunks) : kWarp, teams = kThreads / x;
  const rope_int heads = std::max<rope_int>(t.starts[kSides], 1), filling = rope_int(processors) * kFilling;
  const bool many = p.source == kInvFreq && p.seq * p.batch * kHeadsOfAngles >= filling;
  const rope_int most = p.seq > 1 && q.in[2] > q.in[1] ? teams / std::min({p.seq, teams, kMaxBlockZ}) : teams;
  // The teams over heads are a power of two, so that whole warps sum norms.
  const rope_int y = std::min(power_of_two(most + 1) / 2, power_of_two(many ? ceil_div(heads, kHeadsOfAngles) : heads));
  const rope_int z = std::min({teams / y, kMaxBlockZ, norm ? kMaxBlockZ : p.seq});
  const rope_int groups = ceil_div(p.seq, z);
  const bool fills = many || groups * p.batch >= filling;
  plan.block = {x, y, z};
  plan.grid = {groups, fills ? 1 : std::min(ceil_div(heads, y), kMaxGrid), p.batch};
  return plan;
}

}  // namespace rope::cuda
