// Launch plans of calls on CUDA: what all kernels share, and the plans of the backwards. rotate_plan.h has those of the
// rotations, and csrc/plan.h explains vectors and chunks. For 16- and 32-bit types there are kernels for what models
// usually need, with vectors of 16 bytes as single accesses. General kernels take all else.
#pragma once

#include "../args.h"
#include "../plan.h"

namespace rope::cuda {

constexpr int kThreads = 128;       // the most threads of a thread block
constexpr int kGroupThreads = 256;  // of a thread block that normalises all heads of a token together
// Whether there are kernels for what models usually need, with vectors of this length.
constexpr bool has_usual_kernels(int itemsize, int vector) { return itemsize < 8 && itemsize * vector == 16; }
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
  int vector;                              // channels of a vector
  int chunks, rotated;                     // of a head; the rotated chunks come first
  rope_int starts[kSides + 1];             // where the heads of q, k and v begin in the list, and where the list ends
  rope_int pieces;                         // of k's head_dim, that a head of v is cut into
  rope_int first_sequence;                 // the sequence of blockIdx.z == 0
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
  bool one_step, general;   // of the backward of a norm: a team holds a whole head; it needs a general kernel
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

// Returns whether a vector of 16 bytes may begin at an address.
inline bool begins_vector(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Returns the part of a plan that follows from the sizes of one head and from alignment; block and grid stay empty.
// x: in a backward, the q and k of the forward call
inline Plan plan_head(const RotateArgs& a, bool norm, const Before* x = nullptr) {
  const RopeParams& p = a.params;
  const Side &q = p.sides[kQ], &v = p.sides[kV];
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
  if (a.cos) {
    const int table_size = size_of(a.table_dtype);
    const auto aligned = [&](const void* data, const rope_int* strides) {
      const auto whole = [&](rope_int stride) { return stride * table_size % 16 == 0; };
      return begins_vector(data) && strides[3] == 1 && std::all_of(strides, strides + 3, whole);
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
  const bool all_heads = q.norm == kAllHeads;
  // Offsets in a token then fit in 32 bits, and so do counters that go past the last head.
  const auto is_near = [](const void*, const rope_int* strides, const rope_int* sizes, int) {
    return last_offset(strides + 2, sizes + 2, 2) <= INT32_MAX && sizes[2] <= INT32_MAX / 4;
  };
  plan.general = !has_usual_kernels(size_of(n.rotate.x_dtype), t.vector) || !t.vectors || all_heads || !plan.one_step ||
                 p.source == kTableByHead || !all_sides(n.rotate, n.x, is_near);
  // The thread block of a wide head is a single team, which takes one head at a time.
  const rope_int x = power_of_two(std::min(t.chunks, kWarp)), teams = all_heads || plan.one_step ? kThreads / x : 1;
  t.at_once = p.source == kTableByHead ? 1 : 2;
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
