// Launch plans of calls on CUDA: what all kernels share. rotate_plan.h and norm_plan.h have the rest, and csrc/plan.h
// explains vectors and chunks. For 16- and 32-bit types there are kernels for what models usually need, with vectors of
// 16 bytes as single accesses. General kernels take all else.
#pragma once

#include "../args.h"
#include "../plan.h"

namespace rope::cuda {

constexpr int kThreads = 128;       // the most threads of a thread block
constexpr int kGroupThreads = 512;  // the most of one that takes a group, see group_block()
constexpr int kHeldChannels = 32;   // the most of a group that a thread of a usual kernel holds
// Whether there are kernels for what models usually need, with vectors of this length.
constexpr bool has_usual_kernels(int itemsize, int vector) { return itemsize < 8 && itemsize * vector == 16; }
constexpr int kWarp = 32;
constexpr rope_int kMaxGrid = 65535;  // CUDA's limit of gridDim.y and gridDim.z
constexpr rope_int kMaxBlockZ = 64;   // CUDA's limit of blockDim.z

// How the tokens of q, or those of k, are divided into parts in the backward of a norm.
struct Parts {
  rope_int count;
  rope_int tokens;    // of a part
  rope_int channels;  // the sums of a part: of each weight
  int teams;          // teams over the heads of a token, a power of two; the other teams are over tokens
};

// The numbers that the kernels need besides the arguments of the call.
struct Tiling {
  int vector;                   // channels of a vector
  int chunks, rotated;          // of a head; the rotated chunks come first
  rope_int starts[kSides + 1];  // where the heads of q, k and v begin in the list, and where the list ends
  int shares[kSides], steps;    // of q, k and v in a usual kernel, see rotate_plan.h
  rope_int pieces;              // of k's head_dim, that a head of v is cut into
  rope_int first_sequence;      // the sequence of blockIdx.z == 0
  PositionRange positions;      // those that are allowed
  int in_place[kSides];         // the result is written over the input
  bool vectors;                 // a vector is one access; else its channels are accessed one by one
  bool table_vectors;           // rows of cos and sin are read in vectors
  double per_channel[kSides];   // 1 / the number of channels that are normalised together
  Parts parts[2];               // of q and k, in the backward of a norm
};

struct Plan {
  Tiling tiling;
  bool by_block;        // a thread block, and not a team, takes what is normalised together
  Size3 block;          // chunks, heads, tokens
  Size3 grid;           // runs of tokens, shares of the heads, sequences; of backwards: parts
  rope_int sums;        // the sums of all parts
  rope_int shared;      // bytes of shared memory, of backwards
  const char* general;  // why a general kernel takes the call; null if a usual one does
};

// Returns whether a kernel with a norm takes the call.
inline bool takes_norm(const Args& a) { return a.sides[kQ].norm || a.sides[kV].norm; }

// Returns whether a vector of 16 bytes may begin at an address.
inline bool begins_vector(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// A group is what is normalised together: a head, or all heads of a token. A thread block takes all heads of a token,
// and a head that a warp cannot hold if there are usual kernels: x threads the chunks of a head, y threads the heads.
// Each has as many heads as have kHeldChannels channels, or more if `most` threads are not enough.
inline Size3 group_block(const Args& a, const Tiling& t, rope_int most) {
  rope_int heads = 1;
  if (a.sides[kQ].norm == kAllHeads) heads = std::max({a.sides[kQ].heads, a.sides[kK].heads, heads});
  const rope_int x = std::min(power_of_two(t.chunks), most), y = ceil_div(heads * 2 * t.vector, kHeldChannels);
  return {x, std::min(ceil_div(x * y, kWarp) * kWarp, most) / x, 1};
}

// Returns the part of a plan that follows from the sizes of one head and from alignment; block and grid stay empty.
inline Plan plan_head(const Args& a, bool norm) {
  const Side& q = a.sides[kQ];
  const int itemsize = size_of(a.x_dtype), full = 16 / itemsize;
  // Returns whether a head can be cut into vectors of n channels. Without a norm, a vector kernel gives each thread one
  // chunk, so all chunks of a head must fit in one thread block: a head has at most head_dim / (2 * n) + 1 chunks.
  const auto fits_thread_block = [&](int n) { return fits(a, n) && (norm || q.head_dim <= 2 * n * (kThreads - 1)); };
  // Returns whether each vector of n channels of q, k, v, their results and `before` is one aligned access.
  const auto reaches = [&](int n) {
    for (int i = 0; i < kSides; i++) {
      const Side& side = a.sides[i];
      const auto aligned = [&](const void* data, const rope_int* strides, bool cache, int size) {
        const rope_int sizes[4] = {cache ? a.blocks : a.batch, cache ? a.block_size : a.seq, side.heads, side.head_dim};
        return is_aligned(reinterpret_cast<uintptr_t>(data), strides, sizes, 4, size, n * size);
      };
      if (side.heads == 0 || side.head_dim == 0) continue;
      if (side.head_dim % n || !aligned(side.in, side.in_strides, false, itemsize)) return false;
      if (!aligned(side.out, side.out_strides, i != kQ && a.has_cache, side.format ? 1 : itemsize)) return false;
      if (side.before && !aligned(side.before, side.before_strides, false, itemsize)) return false;
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
    const Side& side = a.sides[i];
    t.in_place[i] = side.in == side.out && (i == kQ || !a.has_cache);
    t.per_channel[i] = 1.0 / double(side.norm == kAllHeads ? side.heads * side.head_dim : side.head_dim);
  }
  const Chunks chunks = chunks_of(a, t.vector, norm || writes_rest(a, t.in_place[kQ], t.in_place[kK]));
  t.rotated = int(chunks.rotated);
  t.chunks = int(chunks.all);
  const bool wide = t.chunks > kWarp && has_usual_kernels(itemsize, t.vector);
  plan.by_block = norm && (q.norm == kAllHeads || wide);
  const auto rows_aligned = [&](const void* data, const rope_int* strides) {
    const rope_int several[4] = {2, 2, 2, 2};  // the strides of all dimensions count
    return is_aligned(reinterpret_cast<uintptr_t>(data), strides, several, 4, size_of(a.table_dtype), 16);
  };
  t.table_vectors = a.cos && rows_aligned(a.cos, a.cos_strides) && rows_aligned(a.sin, a.sin_strides);
  t.positions = position_range(a);
  return plan;
}

}  // namespace rope::cuda
