// How a call is laid out on the GPU: the width of accesses and of offsets, and the grid.
//
// A thread keeps the angles of its chunk and takes several heads one after another; the heads of q, k and v count as
// one list. The threads of a block lie over the heads of a token where those are adjacent in memory, and over tokens
// where those are: [batch, heads, seq, head_dim].
#pragma once

#include "../args.h"
#include "../plan.h"

namespace rope::cuda {

constexpr int kThreads = 128;   // of a block, at most
constexpr int kFilling = 2048;  // for a multiprocessor: threads with one head each, before they take more
constexpr int kWarp = 32;
constexpr rope_int kMaxGrid = 65535;  // in y and z
constexpr rope_int kMaxBlockZ = 64;

struct Dim3 {
  unsigned x, y, z;
};

// What the kernels need beside the arguments.
struct Tiling {
  int vector;                 // channels
  int chunks, rotated;        // of a head; the rotated ones come first
  rope_int heads_per_block;   // of the list of heads of q, k and v; a thread takes every block.y-th
  rope_int k_start, v_start;  // where they begin in it
  rope_int first_sequence;    // of blockIdx.z
  int position_step;          // between tokens without positions: 0 where many sequences of one token are one of many
  rope_int first_place, last_place;  // position + offset is within, or the kernel asserts
  bool q_in_place, k_in_place;
  bool vectors;        // a vector is one access
  bool table_vectors;  // rows of cos and sin are read in vectors
  bool narrow_slots;   // 32 bits hold every slot
};

// Of a norm: a warp holds a head. Else it goes over the head in steps.
inline bool in_one_step(const Tiling& t) { return t.chunks <= kWarp; }

struct Plan {
  Tiling tiling;
  bool wide_index;   // offsets need 64 bits
  Dim3 block, grid;  // block: chunks, heads, tokens. grid: tokens, heads, batch (at most: see start)
};

// f(data, strides, sizes) for each tensor that is read or written by channels.
template <typename F>
bool all_sides(const RotateArgs& a, F&& f) {
  const RopeParams& p = a.params;
  const auto side = [&](const void* data, const rope_int* strides, rope_int heads, bool cache) {
    const rope_int sizes[4] = {cache ? p.blocks : p.batch, cache ? p.block_size : p.seq, heads, p.head_dim};
    return heads == 0 || f(data, strides, sizes);
  };
  const bool cache = p.v.heads != 0;
  return side(a.q_in, p.q.in, p.q.heads, false) && side(a.q_out, p.q.out, p.q.heads, false) &&
         side(a.k_in, p.k.in, p.k.heads, false) && side(a.k_out, p.k.out, p.k.heads, cache) &&
         side(a.v_in, p.v.in, p.v.heads, false) && side(a.v_out, p.v.out, p.v.heads, cache);
}

// The last offset of positions, slots, tables and frequencies.
inline rope_int last_parameter(const RopeParams& p) {
  const rope_int b = p.batch - 1, s = p.seq - 1, columns = p.rotary_dim / 2 - 1;
  const rope_int row = p.source == kTableByPosition ? p.rows - 1 : s;
  return std::max({b * p.positions[0] + s * p.positions[1], b * p.slots[0] + s * p.slots[1],
                   b * p.cos[0] + row * p.cos[1] + columns * p.cos[2],
                   b * p.sin[0] + row * p.sin[1] + columns * p.sin[2], columns * p.inv_freq});
}

// Many sequences as one, where memory allows it: a decode step has many of one token.
// -> position_step
inline int merge_batch(RotateArgs& a) {
  RopeParams& p = a.params;
  if (p.batch == 1) return 1;
  const bool cache = p.v.heads != 0, by_token = p.source == kTableByToken;
  if (cache && !p.has_slots) return 1;
  if (!p.has_positions && !by_token && p.seq != 1) return 1;
  rope_int* pairs[10];  // strides of batch and seq
  int n = 0;
  const auto add = [&](bool used, rope_int* strides) {
    if (used) pairs[n++] = strides;
  };
  add(p.q.heads, p.q.in);
  add(p.q.heads, p.q.out);
  add(p.k.heads, p.k.in);
  add(p.k.heads && !cache, p.k.out);
  add(cache, p.v.in);
  add(p.has_positions, p.positions);
  add(by_token, p.cos);
  add(by_token, p.sin);
  add(p.has_slots, p.slots);
  for (int i = 0; i < n; i++) {
    if (p.seq != 1 && pairs[i][0] != p.seq * pairs[i][1]) return 1;
  }
  for (int i = 0; i < n; i++) {
    if (p.seq == 1) pairs[i][1] = pairs[i][0];
  }
  const int step = p.seq == 1 && !p.has_positions ? 0 : 1;
  p.seq *= p.batch;
  p.batch = 1;
  return step;
}

// The part of a plan that follows from one head and from alignment. f: all_sides, or more.
template <typename Sides>
Plan plan_head(const RotateArgs& a, bool norm, Sides&& all) {
  const RopeParams& p = a.params;
  const int itemsize = size_of(a.x_dtype), full = 16 / itemsize;
  const auto in_block = [&](int v) { return fits(p, v) && (norm || p.head_dim <= 2 * v * (kThreads - 1)); };
  const auto reaches = [&](int v) {
    return all([&](const void* data, const rope_int* strides, const rope_int* sizes) {
      return is_aligned(reinterpret_cast<uintptr_t>(data), strides, sizes, 4, itemsize, v * itemsize);
    });
  };
  Plan plan{};
  Tiling& t = plan.tiling;
  t.vector = 1;
  if (norm) {  // the order of its sums follows from sizes alone, never from strides or addresses
    if (full > 1 && in_block(full)) t.vector = full;
    t.vectors = t.vector > 1 && reaches(full);
  } else {
    for (int v = full; v > 1 && v >= full / 2 && !t.vectors; v /= 2) {
      t.vectors = in_block(v) && reaches(v);
      if (t.vectors) t.vector = v;
    }
  }
  t.q_in_place = a.q_in == a.q_out;
  t.k_in_place = a.k_in == a.k_out;
  const Chunks chunks = chunks_of(p, t.vector, norm || copies(p, t.q_in_place, t.k_in_place));
  t.rotated = int(chunks.rotated);
  t.chunks = int(chunks.all);
  plan.wide_index = !all([&](const void*, const rope_int* strides, const rope_int* sizes) {
    return last_offset(strides, sizes, 4) <= INT32_MAX && sizes[2] <= INT32_MAX / 4 && sizes[3] <= INT32_MAX / 4;
  }) || last_parameter(p) > INT32_MAX;
  if (a.cos) {
    const int table_size = size_of(a.table_dtype);
    const auto aligned = [&](const void* data, const rope_int* strides) {
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides[2] == 1 && strides[1] * table_size % 16 == 0 &&
             strides[0] * table_size % 16 == 0;
    };
    t.table_vectors = aligned(a.cos, p.cos) && aligned(a.sin, p.sin);
  }
  t.narrow_slots = p.blocks * p.block_size <= INT32_MAX;
  const Places places = places_of(p, /*at_place=*/p.v.heads && !p.has_slots);
  t.first_place = places.limited ? 0 : INT64_MIN;
  t.last_place = places.last;
  return plan;
}

// Blocks lie over the heads of a token, or over tokens, whichever are adjacent in memory. With few tokens a thread
// takes one head, and q, k and v are in blocks of their own: all is latency. With many a thread takes several, and all
// of a token's heads are in one block, so that its angles are loaded or computed once.
inline Plan plan_rotate(RotateArgs& a, int processors) {
  const int position_step = merge_batch(a);
  const RopeParams& p = a.params;
  Plan plan = plan_head(a, p.has_norm, [&](auto&& f) { return all_sides(a, f); });
  Tiling& t = plan.tiling;
  t.position_step = position_step;
  const rope_int heads = p.q.heads + p.k.heads + p.v.heads, most_heads = std::max(p.q.heads, p.k.heads);
  if (heads == 0 || t.chunks == 0) return plan;  // an empty grid

  // A norm is summed over a power of two of lanes of one warp.
  const rope_int x = p.has_norm ? power_of_two(std::min(t.chunks, kWarp)) : std::min(t.chunks, kThreads);
  const rope_int rows = kThreads / x;
  const rope_int filling = p.batch * p.seq * heads * x / (rope_int(processors) * kFilling);  // heads for a thread
  const bool tokens_adjacent = p.seq > 1 && p.q.in[2] > p.q.in[1];
  rope_int y, z, n;
  if (tokens_adjacent) {
    z = std::min({p.seq, rows, kMaxBlockZ});
    if (p.has_norm) z = power_of_two(z);
    y = p.has_norm ? rows / z : std::min(most_heads, rows / z);
    n = std::clamp<rope_int>(filling, 1, ceil_div(most_heads, y));
  } else {
    n = std::clamp<rope_int>(filling, 1, std::max<rope_int>(4, ceil_div(most_heads, rows)));
    y = std::min(ceil_div(most_heads, n), rows);
    if (p.has_norm) y = power_of_two(y);
    z = std::min(rows / y, kMaxBlockZ);
    if (!p.has_norm) z = std::min(z, p.seq);
  }
  const rope_int turns = ceil_div(p.q.heads, y) + ceil_div(p.k.heads, y) + ceil_div(p.v.heads, y);
  if (filling >= turns) {
    t.heads_per_block = heads;
    t.k_start = p.q.heads;
    t.v_start = p.q.heads + p.k.heads;
  } else {
    n = std::max(n, ceil_div(heads, y * (kMaxGrid - 3)));
    n = ceil_div(most_heads, y * ceil_div(most_heads, y * n));  // blocks of one size
    t.heads_per_block = y * n;
    const auto padded = [&](rope_int n) { return ceil_div(n, t.heads_per_block) * t.heads_per_block; };
    t.k_start = padded(p.q.heads);
    t.v_start = t.k_start + padded(p.k.heads);
  }
  plan.block = {unsigned(x), unsigned(y), unsigned(z)};
  plan.grid = {unsigned(ceil_div(p.seq, z)), unsigned(ceil_div(t.v_start + p.v.heads, t.heads_per_block)),
               unsigned(std::min(p.batch, kMaxGrid))};
  return plan;
}

// The backward of norm and rotation. Besides a gradient for every channel it has sums over all tokens, for the weights:
// a block sums a part of the tokens for q or for k, a row of sums for each of its warps, and torch sums the rows. Parts
// follow from sizes alone, so that no launch changes a bit.
struct BackwardTiling {
  Tiling tiling;
  rope_int tokens;     // of a part
  int q_rows, k_rows;  // rows of threads over the heads of a token, a power of two; the others over tokens
};

struct BackwardPlan {
  BackwardTiling tiling;
  Dim3 block, grid;  // block: chunks, rows. grid: parts, q and k
  rope_int sums;     // rows of sums for each of q and k
};

// all_sides of the gradients, and what they belong to.
template <typename Args, typename F>
bool all_gradient_sides(const Args& args, F&& f) {
  const RopeParams& p = args.rotate.params;
  const auto side = [&](const void* data, const rope_int* strides, rope_int heads) {
    const rope_int sizes[4] = {p.batch, p.seq, heads, p.head_dim};
    return heads == 0 || f(data, strides, sizes);
  };
  return all_sides(args.rotate, f) && side(args.q_in, args.q, p.q.heads) && side(args.k_in, args.k, p.k.heads);
}

inline BackwardPlan plan_norm_backward(const NormBackwardArgs& n) {
  const RotateArgs& a = n.rotate;
  const RopeParams& p = a.params;
  BackwardPlan plan{};
  Tiling& t = plan.tiling.tiling;
  t = plan_head(a, true, [&](auto&& f) { return all_gradient_sides(n, f); }).tiling;
  t.position_step = 1;
  const rope_int x = power_of_two(std::min(t.chunks, kWarp)), rows = kThreads / x;
  const rope_int tokens = p.batch * p.seq, heads = std::max(p.q.heads, p.k.heads);
  const rope_int parts = std::clamp<rope_int>(tokens * heads / (rows * 8), 1, std::min<rope_int>(tokens, 1024));
  plan.tiling.tokens = ceil_div(tokens, parts);
  plan.tiling.q_rows = int(std::min(power_of_two(p.q.heads), rows));
  plan.tiling.k_rows = int(std::min(power_of_two(p.k.heads), rows));
  plan.block = {unsigned(x), unsigned(rows), 1};
  plan.grid = {unsigned(ceil_div(tokens, plan.tiling.tokens)), 2, 1};
  plan.sums = rope_int(plan.grid.x) * (kThreads / kWarp);
  return plan;
}

// The gradients of cos and sin. A block owns chunks of some rows of the tables; its threads lie over chunks, over the
// heads and tokens that each row turned, and over rows. What a thread sums follows from sizes alone, so that no layout
// changes a bit.
constexpr int kTableThreads = 256;           // of a block, at most
constexpr int kTableHeads = 2;               // that a thread has under way
constexpr rope_int kTableFilling = 1 << 17;  // for a GPU: threads with one head each, before they take more
constexpr rope_int kTableBlocks = 512;       // for a GPU

struct TableTiling {
  Tiling tiling;
  int parts;  // blocks that share the chunks of a row
};

struct TablePlan {
  TableTiling tiling;
  Dim3 block, grid;  // block: chunks, heads and tokens, rows. grid: rows and, faster, parts of them
};

inline TablePlan plan_table_backward(const TableBackwardArgs& b) {
  const RotateArgs& a = b.rotate;
  const RopeParams& p = a.params;
  TablePlan plan{};
  Tiling& t = plan.tiling.tiling;
  t = plan_head(a, true, [&](auto&& f) { return all_gradient_sides(b, f); }).tiling;
  const rope_int chunks = t.rotated, bytes = t.vector * size_of(a.x_dtype);
  if (!t.vectors) {
    t.vector = 1;
    t.rotated = int(p.rotary_dim / 2);
  }
  t.chunks = t.rotated;
  const rope_int rows = b.tokens.rows;
  if (rows == 0 || chunks == 0) return plan;  // an empty grid

  // Where tokens are listed, it is known only on the device how many each row has.
  const rope_int tokens = b.tokens.copies * (b.tokens.listed ? ceil_div(b.tokens.entries, rows) : 1);
  const rope_int heads = std::max<rope_int>(1, tokens * (p.q.heads + p.k.heads));
  const rope_int filling = std::clamp<rope_int>(rows * chunks * heads / kTableFilling, kTableHeads, 4 * kTableHeads);
  const rope_int most = power_of_two(ceil_div(heads, filling));
  rope_int x = std::min<rope_int>(chunks, kTableThreads), y = std::min(most, kTableThreads / x);
  // With few rows blocks share the chunks of one, while 32 bytes of memory stay together.
  while (y < most && rows * ceil_div(chunks, x) < kTableBlocks && x * bytes > 32) {
    x = ceil_div(x, 2);
    y = std::min(most, kTableThreads / x);
  }
  const rope_int z =
      std::clamp<rope_int>(rows * ceil_div(chunks, x) / kTableBlocks, 1, std::min(kTableThreads / (x * y), kMaxBlockZ));
  plan.tiling.parts = int(ceil_div(t.chunks, x));
  plan.block = {unsigned(x), unsigned(y), unsigned(z)};
  plan.grid = {unsigned(ceil_div(rows, z) * plan.tiling.parts), 1, 1};
  return plan;
}

}  // namespace rope::cuda
