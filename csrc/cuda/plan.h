// The launch plan of a call on CUDA: which vectors the kernels access, whether element offsets need 64 bits, and how
// the work is divided among thread blocks. csrc/plan.h explains vectors and chunks.
//
// A thread block has up to three axes: x over the chunks of a head, y over heads, z over tokens. The x threads with the
// same y and z are a team: they share one head of one token, a chunk for each thread. A team takes several heads of its
// token one after another, so that the angles of a chunk are loaded or computed once for all of them. Neighbouring
// teams access neighbouring memory: different heads of a token if those are adjacent ([batch, seq, heads, head_dim]),
// else different tokens ([batch, heads, seq, head_dim]).
//
// The heads of q, k and v are numbered as one list. The grid has x for groups of block.z tokens, y for shares of that
// list, and z for the sequences of the batch. A v with another head_dim than k is not in the list, unless a warp takes
// each head; the thread blocks that follow the shares copy it.
//
// For 16- and 32-bit types there are kernels for what models usually need, with the widest vectors as single accesses.
// A general kernel takes all else, see Plain in token.cuh. Norms of heads that are wider than a team, or of all heads
// of a token together, have general kernels of their own.
#pragma once

#include <cmath>

#include "../args.h"
#include "../plan.h"

namespace rope::cuda {

constexpr int kThreads = 128;  // the most threads of a thread block
// The number of thread blocks that a multiprocessor holds at a time. The launch bounds of the kernels ask for it, so it
// limits the registers of a thread: 7 thread blocks of 128 threads leave it 72 registers, 6 leave 80, 5 leave 96, and 4
// leave 128. A general kernel, a cache and element offsets of 64 bits need more registers.
constexpr int resident_thread_blocks(bool general, bool cache, bool wide_index) {
  return general ? 5 : 7 - cache - 2 * wide_index;
}
constexpr int kNormThreadBlocks = 5;  // the same for the usual kernel with a norm
constexpr int kTokenThreads = 256;    // of a thread block that normalises all heads of a token together
// Heads that a thread loads at a time. A general kernel needs more registers for each.
constexpr int heads_at_once(bool general) { return general ? 1 : 2; }
// Whether there are kernels for what models usually need, with vectors of this length.
constexpr bool has_usual_kernels(int itemsize, int vector) { return itemsize < 8 && itemsize * vector == 16; }
// Bytes of q, k and v that a multiprocessor must be loading at any time to reach the speed of a copy: an H200 loads
// 2.15 TB/s with 132 multiprocessors, and a load takes 0.8 us, so that (Little's law) 13 KB are under way in each.
constexpr double kBytesUnderWay = 13e3;
// How much of the time of a full GPU depends on the plan, and not on the bytes alone: this much for a norm or a general
// kernel, less with a cache, and least without. Half of it is for steps, each of as many heads as a thread loads at a
// time; and what a thread does before its first head takes as long as 0.6 heads. These are figures of an H200.
constexpr double kWork[] = {1.0, 0.55, 0.25}, kStep = 0.5, kPrologue = 0.6;
constexpr rope_int kDependentBlocks = 1024;  // the most thread blocks of a kernel that is launched as a dependent one
constexpr int kWarp = 32;
constexpr rope_int kMaxGrid = 65535;  // CUDA's limit of gridDim.y and gridDim.z
constexpr rope_int kMaxBlockZ = 64;   // CUDA's limit of blockDim.z

struct Dim3 {
  unsigned x, y, z;

  constexpr Dim3(rope_int x = 0, rope_int y = 0, rope_int z = 0) : x(unsigned(x)), y(unsigned(y)), z(unsigned(z)) {}
};

// How the tokens of q, or those of k, are divided into parts in the backward of a norm.
struct Parts {
  rope_int count;
  rope_int tokens;    // of a part
  rope_int channels;  // the sums of a part: of each weight
  int teams;          // teams over the heads of a token, a power of two; the other teams are over tokens
};

// The numbers that the kernels need besides the arguments of the call.
struct Tiling {
  int vector;                       // channels of a vector
  int chunks, rotated;              // of a head; the rotated chunks come first
  rope_int heads_per_thread_block;  // a thread block's share of the list of heads; team y takes every block.y-th
  rope_int starts[kSides + 1];      // where the heads of q, k and v begin in the list, and where the list ends
  unsigned shares;                  // of the list; thread blocks with a greater blockIdx.y copy a v of another shape
  int position_step;                // a token without positions has position s * position_step, see merge_batch()
  rope_int first_sequence;          // the sequence of blockIdx.z == 0
  rope_int first_position, last_position;  // the positions that are allowed
  int in_place[kSides];                    // the result is written over the input
  bool vectors;                            // a vector is one access; else its channels are accessed one by one
  bool table_vectors;                      // rows of cos and sin are read in vectors
  double per_channel[kSides];              // 1 / the number of channels that are normalised together
  Parts parts[2];                          // of q and k, in the backward of a norm
  int at_once;         // there: heads whose terms are added up in one step, whatever the kernel loads at a time
  int blocks_per_row;  // in the gradients of tables: thread blocks that divide the chunks of a row
};

struct Plan {
  Tiling tiling;
  bool wide_index;          // element offsets need 64 bits
  bool general;             // a general kernel is needed
  bool one_step;            // with a norm: a team holds a whole head, one chunk for each thread
  Dim3 block;               // chunks, heads, tokens; of tables: chunks, heads and tokens, rows
  Dim3 grid;                // groups of tokens, shares of the heads, sequences; of backwards: parts, or groups of rows
  rope_int sums;            // the sums of all parts
  unsigned dynamic_shared;  // bytes of shared memory besides the variables of the kernel
};

// Returns whether a kernel with a norm takes the call.
inline bool takes_norm(const RopeParams& p) { return p.sides[kQ].norm || p.sides[kV].norm; }

// Calls f(data, strides, sizes, itemsize) for each tensor of the call that has channels: q, k, v and their results, and
// in a backward, x. Stops and returns false as soon as f does.
template <typename F>
bool all_sides(const RotateArgs& a, const Before* x, F&& f) {
  const RopeParams& p = a.params;
  const int itemsize = size_of(a.x_dtype);
  for (int i = 0; i < kSides; i++) {
    const Side& side = p.sides[i];
    if (side.heads == 0 || side.head_dim == 0) continue;
    const bool cache = i != kQ && p.has_cache;
    const rope_int in[4] = {p.batch, p.seq, side.heads, side.head_dim};
    const rope_int out[4] = {cache ? p.blocks : p.batch, cache ? p.block_size : p.seq, side.heads, side.head_dim};
    if (!f(a.sides[i].in, side.in, in, itemsize)) return false;
    if (!f(a.sides[i].out, side.out, out, side.format ? 1 : itemsize)) return false;
    if (x && !f(x[i].data, x[i].strides, in, itemsize)) return false;
  }
  return true;
}

// Returns the largest element offset in positions, slots, tables and frequencies.
inline rope_int last_parameter(const RopeParams& p) {
  const rope_int row = p.source == kTableByPosition ? p.table_rows : p.seq, columns = p.rotary_dim / 2;
  const rope_int table[4] = {p.batch, row, p.sides[kQ].heads, columns};  // k has as many heads if a table is by head
  const rope_int tokens[2] = {p.batch, p.seq};
  return std::max({last_offset(p.positions, tokens, 2), last_offset(p.slots, tokens, 2), last_offset(p.cos, table, 4),
                   last_offset(p.sin, table, 4), last_offset(p.inv_freq + 1, &columns, 1)});
}

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

// Returns the part of a plan that follows from the sizes of one head and from alignment; block and grid stay empty.
// x: in a backward, the q and k of the forward call
inline Plan plan_head(const RotateArgs& a, bool norm, const Before* x = nullptr) {
  const RopeParams& p = a.params;
  const Side &q = p.sides[kQ], &k = p.sides[kK], &v = p.sides[kV];
  const int itemsize = size_of(a.x_dtype), full = 16 / itemsize;
  // Returns whether a head can be cut into vectors of n channels. Without a norm, a vector kernel gives each thread one
  // chunk, so all chunks of a head must fit in one thread block: a head has at most head_dim / (2 * n) + 1 chunks.
  const auto fits_thread_block = [&](int n) { return fits(p, n) && (norm || q.head_dim <= 2 * n * (kThreads - 1)); };
  const auto reaches = [&](int n) {
    const auto aligned = [&](const void* data, const rope_int* strides, const rope_int* sizes, int size) {
      return is_aligned(reinterpret_cast<uintptr_t>(data), strides, sizes, 4, size, n * size);
    };
    return v.head_dim % n == 0 && all_sides(a, x, aligned);
  };
  Plan plan{};
  Tiling& t = plan.tiling;
  t.vector = 1;
  // The order of the sums of a norm follows from sizes alone, so only sizes choose its vectors, of 16 bytes. Otherwise
  // they have 16 bytes, or 8, or one channel.
  for (int n = full; n > 1 && n >= (norm ? full : full / 2) && t.vector == 1; n /= 2) {
    t.vectors = fits_thread_block(n) && reaches(n);
    if (t.vectors || (norm && fits_thread_block(n))) t.vector = n;
  }
  for (int i = 0; i < kSides; i++) {
    const Side& side = p.sides[i];
    t.in_place[i] = a.sides[i].in == a.sides[i].out && (i == kQ || !p.has_cache);
    t.per_channel[i] = 1.0 / double(side.norm == kAllHeads ? side.heads * side.head_dim : side.head_dim);
  }
  const Chunks chunks = chunks_of(p, t.vector, norm || copies(p, t.in_place[kQ], t.in_place[kK]));
  t.rotated = int(chunks.rotated);
  t.chunks = int(chunks.all);
  plan.one_step = t.chunks <= kWarp;
  // Offsets of 32 bits also limit the numbers of heads and channels to INT32_MAX / 4, so that loop counters cannot
  // overflow: a list has the heads of q, k and v, and a kernel counts past the last head or channel before it stops.
  const auto is_near = [](const void*, const rope_int* strides, const rope_int* sizes, int) {
    return last_offset(strides, sizes, 4) <= INT32_MAX && sizes[2] <= INT32_MAX / 4 && sizes[3] <= INT32_MAX / 4;
  };
  plan.wide_index = !all_sides(a, x, is_near) || last_parameter(p) > INT32_MAX;
  plan.general = !has_usual_kernels(itemsize, t.vector) || !t.vectors || (norm && plan.wide_index) ||
                 p.rounding != kOnce || p.source == kTableByHead || v.norm || q.format || k.format || v.format ||
                 (v.heads && v.head_dim != q.head_dim);
  if (a.cos) {
    const int table_size = size_of(a.table_dtype);
    const auto aligned = [&](const void* data, const rope_int* strides) {
      const auto whole = [&](rope_int stride) { return stride * table_size % 16 == 0; };
      return reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides[3] == 1 && std::all_of(strides, strides + 3, whole);
    };
    t.table_vectors = aligned(a.cos, p.cos) && aligned(a.sin, p.sin);
  }
  const PositionRange range = position_range(p);
  t.first_position = range.limited ? 0 : INT64_MIN;
  // The kernel adds offset to a position without regard to overflow. If both are negative, their sum may become a
  // number that is at least 0; it is greater than INT64_MAX + offset.
  t.last_position = range.limited ? std::min(range.last, INT64_MAX + std::min<rope_int>(p.offset, 0)) : INT64_MAX;
  return plan;
}

// Returns the plan of a rotation, with or without a norm. Of all plans that leave few threads idle it takes the one
// with the least time. If some have about the same, it takes the one with most teams over heads, which share angles.
//
// Times count loads: the time from one load to the next that needs it is 1. A thread loads the position, then angles,
// then its heads, some at a time: these are its steps. The GPU takes all thread blocks in rounds of as many as it
// holds.
inline Plan plan_rotate(RotateArgs& a, int processors) {
  const int position_step = merge_batch(a);
  RopeParams& p = a.params;
  Side &q = p.sides[kQ], &k = p.sides[kK], &v = p.sides[kV];
  if (q.head_dim == 0) {  // v alone has channels
    q.heads = k.heads = 0;
    q.head_dim = v.head_dim;
  }
  const bool norm = takes_norm(p);
  Plan plan = plan_head(a, norm);
  Tiling& t = plan.tiling;
  t.position_step = position_step;
  if (q.heads + k.heads + v.heads == 0 || t.chunks == 0) return plan;  // an empty grid
  if (q.norm == kAllHeads) {
    const rope_int x = power_of_two(std::min(t.chunks, kWarp));
    plan.block = {x, kTokenThreads / x, 1};
    plan.grid = {p.seq, v.heads ? 3 : 2, p.batch};
    return plan;
  }
  const bool other_v = v.head_dim != q.head_dim;
  if (other_v && v.norm) plan.one_step = false;  // a warp takes each head
  const bool lists_v = !other_v || (norm && !plan.one_step);
  for (int i = 0; i < kSides; i++) t.starts[i + 1] = t.starts[i] + (i != kV || lists_v ? p.sides[i].heads : 0);
  const rope_int heads = std::max<rope_int>(t.starts[kSides], 1);
  // x: threads of a team. The lanes of one warp sum a norm with shuffles, which need a power of two of them.
  const rope_int x = !norm ? std::min(t.chunks, kThreads) : plan.one_step ? power_of_two(t.chunks) : kWarp;
  const rope_int teams = kThreads / x;
  const double held = double(processors) * (norm ? kNormThreadBlocks  // thread blocks that the GPU holds at a time
                                                 : resident_thread_blocks(plan.general, p.has_cache, plan.wide_index));
  // The time in which memory gives all heads.
  const double memory =
      double(p.batch * p.seq) * double(heads * q.head_dim * size_of(a.x_dtype)) / (double(processors) * kBytesUnderWay);
  const rope_int at_once = heads_at_once(plan.general);
  const double work = kWork[norm || plan.general ? 0 : p.has_cache ? 1 : 2];
  // Returns the steps of y teams that take all heads of a token. A step loads heads of one side; sides with fewer heads
  // than teams are taken in one step, by different teams.
  const auto steps_of = [&](rope_int y) {
    rope_int steps = 0, of_small = 0;
    for (int i = 0; i < kSides; i++) {
      const rope_int of_side = t.starts[i + 1] - t.starts[i];
      of_side < y ? of_small += of_side : steps += ceil_div(ceil_div(of_side, y), at_once);
    }
    return steps + ceil_div(of_small, y);
  };
  // Returns the time of `rounds` rounds that would take the time `busy` if they were whole. The GPU is not full in a
  // last round that is not whole; then the loads of a thread, with its steps, may take longer than the GPU is busy.
  const auto time_of = [&](double rounds, double busy, rope_int steps) {
    const double whole = std::floor(rounds), rest = rounds - whole;
    return whole / rounds * busy + (rest == 0 ? 0 : std::max(rest / rounds * busy, double(2 + steps)));
  };
  const bool tokens_adjacent = p.seq > 1 && q.in[2] > q.in[1];
  const rope_int most = tokens_adjacent ? teams / std::min({p.seq, teams, kMaxBlockZ}) : teams;
  double least = INFINITY;
  // y: teams over heads, a power of two. z: teams over tokens. n: heads that a team takes.
  for (rope_int y = power_of_two(most + 1) / 2; y >= 1; y /= 2) {
    rope_int z = std::min(teams / y, kMaxBlockZ);
    if (!norm) z = std::min(z, p.seq);
    const rope_int all = ceil_div(heads, y);  // n, if one thread block takes all heads of a token
    const double groups = double(ceil_div(p.seq, z)) * double(p.batch);
    // As many thread blocks share the heads of a token as the GPU holds at a time.
    const rope_int most_blocks = std::clamp(rope_int(held / groups), rope_int(1), kMaxGrid / 2);
    rope_int n = ceil_div(all, most_blocks);
    // Returns whether more than one in 16 threads would be idle.
    const auto idles = [&](rope_int n) { return 15 * ceil_div(all, n) * n * y > 16 * heads; };
    while (n < all && idles(n)) n++;
    if (y > 1 && idles(n)) continue;
    if (n > 1 && n % at_once != 0 && !idles(n + 1)) n++;  // its last step is full
    const rope_int shares = ceil_div(all, n), steps = std::max(steps_of(y), shares);
    const rope_int of_v = lists_v ? 0 : ceil_div(v.heads * ceil_div(v.head_dim, 2 * t.vector), x * y);
    const double of_head = (kStep * double(at_once * steps) + kPrologue * double(shares)) * double(y) / double(heads);
    const double busy = memory * (1 + work * (of_head - kStep));
    const double time = time_of(groups * double(shares) / held, busy, ceil_div(steps, shares));
    if (time >= 0.95 * least) continue;
    least = time;
    t.heads_per_thread_block = y * n;
    t.shares = unsigned(shares);
    plan.block = {x, y, z};
    plan.grid = {ceil_div(p.seq, z), shares + std::min(of_v, most_blocks), p.batch};
  }
  return plan;
}

// The backward of norm and rotation writes a gradient for every channel. The gradients of the weights are sums over all
// tokens and heads. A thread block computes one part of such a sum, for consecutive tokens of q or of k, and writes
// head_dim sums. A second kernel adds up the parts. A part of q has about as many heads as one of k. The parts follow
// from sizes alone, so that every launch of a call gives the same bits.
constexpr rope_int kParts = 1024;  // the most parts, or one more; an H200 holds 396 of these thread blocks at a time
constexpr int kBackwardThreadBlocks = 3;  // that a multiprocessor holds at a time
// A thread block that adds up parts has kSumChannels x kSumTeams threads.
constexpr int kSumChannels = 16, kSumTeams = 32;
// The norm over all heads has fewer parts, because each writes a sum for each channel of all heads. A thread block
// holds up to kSharedSums of them in shared memory: in 96 of the 99 KB that each GPU has for a thread block.
constexpr rope_int kTokenParts = 384, kSharedSums = 12288;
constexpr unsigned kGivenShared = 40 << 10;  // bytes that a kernel gets without asking, which leave 8 KB for variables

inline Plan plan_norm_backward(const NormBackwardArgs& n) {
  const RopeParams& p = n.rotate.params;
  const Side &q = p.sides[kQ], &k = p.sides[kK];
  Plan plan = plan_head(n.rotate, true, n.x);
  Tiling& t = plan.tiling;
  t.position_step = 1;
  const bool all_heads = q.norm == kAllHeads;
  // The thread block of a wide head is a single team, which takes one head at a time.
  const rope_int x = power_of_two(std::min(t.chunks, kWarp)), teams = all_heads || plan.one_step ? kThreads / x : 1;
  t.at_once = heads_at_once(p.source == kTableByHead);
  const rope_int heads = !all_heads && plan.one_step ? t.at_once : 1;  // that a team takes at a time
  const rope_int tokens = p.batch * p.seq, most_heads = std::max({q.heads, k.heads, rope_int(1)});
  // The heads of a part: those of whole tokens, of q and of k.
  rope_int of_part = std::max(teams * heads, ceil_div(tokens * (q.heads + k.heads), all_heads ? kTokenParts : kParts));
  of_part = ceil_div(of_part, most_heads) * most_heads;
  for (int i = kQ; i <= kK; i++) {
    const Side& side = p.sides[i];
    Parts& parts = t.parts[i];
    parts = {0, 0, side.head_dim * (all_heads ? side.heads : 1), 1};
    if (side.heads != 0) {
      parts.tokens = ceil_div(of_part, side.heads);
      parts.count = ceil_div(tokens, parts.tokens);
      parts.teams = int(std::min(power_of_two(ceil_div(side.heads, heads)), teams));
    }
    plan.sums += parts.count * parts.channels;
    if (all_heads && parts.channels <= kSharedSums)
      plan.dynamic_shared = std::max(plan.dynamic_shared, unsigned(parts.channels * sizeof(double)));
  }
  plan.block = {x, teams, 1};
  plan.grid = {t.parts[kQ].count + t.parts[kK].count, 1, 1};
  return plan;
}

// The gradients of cos and sin have one row for each table row. A thread block computes some chunks of block.z rows,
// without other thread blocks adding to them. Its axes are x over chunks, y over the heads and tokens that a row
// rotated, and z over rows; the y threads of a chunk add up what each has summed. The terms that a thread sums follow
// from sizes alone, so that no memory layout changes a bit.
constexpr int kTableThreads = 256;           // the most threads of a thread block
constexpr int kTableHeads = 2;               // heads that a thread loads at a time
constexpr rope_int kTableFilling = 1 << 17;  // threads that fill a GPU; beyond that a thread takes more heads
constexpr rope_int kTableBlocks = 512;       // thread blocks that fill a GPU

inline Plan plan_table_backward(const TableBackwardArgs& b) {
  const RopeParams& p = b.rotate.params;
  Plan plan = plan_head(b.rotate, true, b.x);
  Tiling& t = plan.tiling;
  // The vectors that sizes allow, even if addresses do not: y below, and with it the order of the sums, follows from
  // them.
  const rope_int chunks = t.rotated, bytes = t.vector * size_of(b.rotate.x_dtype);
  if (!t.vectors) {
    t.vector = 1;
    t.rotated = int(p.rotary_dim / 2);
  }
  t.chunks = t.rotated;
  const bool by_head = p.source == kTableByHead;
  const rope_int q_heads = p.sides[kQ].heads, k_heads = p.sides[kK].heads;
  const rope_int rows = b.tokens.rows * (by_head ? q_heads : 1);
  if (rows == 0 || chunks == 0) return plan;  // an empty grid

  // If the tokens of each row are listed, only the device knows how many it has; the plan takes the average.
  const rope_int tokens = b.tokens.copies * (b.tokens.listed ? ceil_div(b.tokens.entries, rows) : 1);
  const rope_int of_token = by_head ? 1 + (k_heads != 0) : q_heads + k_heads;
  const rope_int heads = std::max<rope_int>(1, tokens * of_token);
  const rope_int filling = std::clamp<rope_int>(rows * chunks * heads / kTableFilling, kTableHeads, 4 * kTableHeads);
  const rope_int most = power_of_two(ceil_div(heads, filling));
  rope_int x = std::min<rope_int>(chunks, kTableThreads), y = std::min(most, kTableThreads / x);
  // If there are few rows, several thread blocks divide the chunks of a row, down to 32 adjacent bytes for each.
  while (y < most && rows * ceil_div(chunks, x) < kTableBlocks && x * bytes > 32) {
    x = ceil_div(x, 2);
    y = std::min(most, kTableThreads / x);
  }
  const rope_int z =
      std::clamp<rope_int>(rows * ceil_div(chunks, x) / kTableBlocks, 1, std::min(kTableThreads / (x * y), kMaxBlockZ));
  t.blocks_per_row = int(ceil_div(t.chunks, x));
  plan.block = {x, y, z};
  plan.grid = {ceil_div(rows, z) * t.blocks_per_row, 1, 1};
  return plan;
}

}  // namespace rope::cuda
