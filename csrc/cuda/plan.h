// Launch plans of calls on CUDA: what all kernels share, and the plans of the backwards. rotate_plan.h has those of the
// rotations, and csrc/plan.h explains vectors and chunks. For 16- and 32-bit types there are kernels for what models
// usually need, with vectors of 16 bytes as single accesses. General kernels take all else.
#pragma once

#include <optional>

#include "../args.h"
#include "../plan.h"

namespace rope::cuda {

constexpr int kThreads = 128;       // the most threads of a thread block
constexpr int kGroupThreads = 512;  // the most of one that takes a group, see group_block()
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
  int blocks_per_row;                      // in the gradients of tables: thread blocks that divide the chunks of a row
};

struct Plan {
  Tiling tiling;
  bool by_block;  // a thread block, and not a team, takes what is normalised together
  Dim3 block;     // chunks, heads, tokens; of tables: chunks, heads and tokens, rows
  Dim3 grid;      // runs of tokens, shares of the heads, sequences; of backwards: parts, or runs of rows
  rope_int sums;  // the sums of all parts
};

template <typename Arguments>
struct PlanOf : Plan {
  std::optional<Arguments> usual;  // of the usual kernel; if not given, a general kernel takes the call
};

// Returns whether a kernel with a norm takes the call.
inline bool takes_norm(const RopeParams& p) { return p.sides[kQ].norm || p.sides[kV].norm; }

// Returns whether a vector of 16 bytes may begin at an address.
inline bool begins_vector(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// A group is what is normalised together: a head, or all heads of a token. A thread block takes all heads of a token,
// and a head that a warp cannot hold if there are usual kernels: x threads the chunks of a head, y threads the heads.
// Each has as many heads as have 32 channels, or more if `most` threads are not enough.
constexpr int kHeldChannels = 32;
inline Dim3 group_block(const RopeParams& p, const Tiling& t, rope_int most) {
  rope_int heads = 1;
  if (p.sides[kQ].norm == kAllHeads) heads = std::max({p.sides[kQ].heads, p.sides[kK].heads, heads});
  const rope_int x = std::min(power_of_two(t.chunks), most), y = ceil_div(heads * 2 * t.vector, kHeldChannels);
  return {x, std::min(ceil_div(x * y, kWarp) * kWarp, most) / x, 1};
}

// Returns the part of a plan that follows from the sizes of one head and from alignment; block and grid stay empty.
// x: in a backward, the q and k of the forward call
inline Plan plan_head(const RotateArgs& a, bool norm, const Before* x = nullptr) {
  const RopeParams& p = a.params;
  const Side& q = p.sides[kQ];
  const int itemsize = size_of(a.x_dtype), full = 16 / itemsize;
  // Returns whether a head can be cut into vectors of n channels. Without a norm, a vector kernel gives each thread one
  // chunk, so all chunks of a head must fit in one thread block: a head has at most head_dim / (2 * n) + 1 chunks.
  const auto fits_thread_block = [&](int n) { return fits(p, n) && (norm || q.head_dim <= 2 * n * (kThreads - 1)); };
  // Returns whether each vector of n channels of q, k, v, their results and x is one aligned access.
  const auto reaches = [&](int n) {
    for (int i = 0; i < kSides; i++) {
      const Side& side = p.sides[i];
      const auto aligned = [&](const void* data, const rope_int* strides, bool cache, int size) {
        const rope_int sizes[4] = {cache ? p.blocks : p.batch, cache ? p.block_size : p.seq, side.heads, side.head_dim};
        return is_aligned(reinterpret_cast<uintptr_t>(data), strides, sizes, 4, size, n * size);
      };
      if (side.heads == 0 || side.head_dim == 0) continue;
      if (side.head_dim % n || !aligned(a.sides[i].in, side.in, false, itemsize)) return false;
      if (!aligned(a.sides[i].out, side.out, i != kQ && p.has_cache, side.format ? 1 : itemsize)) return false;
      if (x && !aligned(x[i].data, x[i].strides, false, itemsize)) return false;
    }
    return true;
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
  const Chunks chunks = chunks_of(p, t.vector, norm || writes_rest(p, t.in_place[kQ], t.in_place[kK]));
  t.rotated = int(chunks.rotated);
  t.chunks = int(chunks.all);
  const bool wide = t.chunks > kWarp && has_usual_kernels(itemsize, t.vector);
  plan.by_block = norm && (q.norm == kAllHeads || wide);
  const auto rows_aligned = [&](const void* data, const rope_int* strides) {
    const rope_int several[4] = {2, 2, 2, 2};  // the strides of all dimensions count
    return is_aligned(reinterpret_cast<uintptr_t>(data), strides, several, 4, size_of(a.table_dtype), 16);
  };
  t.table_vectors = a.cos && rows_aligned(a.cos, p.cos) && rows_aligned(a.sin, p.sin);
  const PositionRange range = position_range(p);
  t.first_position = range.limited ? 0 : INT64_MIN;
  // The kernel adds offset to a position without regard to overflow. If both are negative, their sum may become a
  // number that is at least 0; it is greater than INT64_MAX + offset.
  t.last_position = range.limited ? std::min(range.last, INT64_MAX + std::min<rope_int>(p.offset, 0)) : INT64_MAX;
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
  const rope_int tokens = b.tokens.sequences * (b.tokens.listed ? ceil_div(b.tokens.entries, rows) : 1);
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
