// The part of a launch plan that all GPUs share: how a head is cut into chunks, which accesses are aligned, and which
// calls are simpler. It is plain arithmetic on sizes, strides and addresses, so that it is tested without a GPU.
//
// A vector is `vector` neighbouring channels; it may be a single channel. A chunk is two vectors of one head:
// the channels that one thread takes. The chunks of a head are numbered, and neighbouring threads take neighbouring
// chunks, so that they access neighbouring memory.
//
//   The rotated channels, rotary_dim from rotary_start on, are rotary_dim / 2 / vector chunks of `vector` pairs each.
//   Both channels of a pair are in the same chunk, so that a thread rotates its chunk without the data of other
//   threads. Half-split pairing: chunk c is vector c of the first half of the rotated channels and vector c of the
//   second half. Interleaved pairing, vectors of a single channel: chunk c is pair c, two neighbouring channels.
//   Interleaved pairing, longer vectors: their length is even, so each holds whole pairs and any two vectors form a
//   chunk. CUDA takes one from each half, Metal takes two neighbouring ones.
//
//   The channels before and after them are not rotated. If they have to be written nevertheless (see writes_rest()),
//   they are the chunks that follow. The last chunk has only one vector if the number of vectors is odd.
//
// chunk.h computes the channels of a chunk from its number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "args.h"

namespace rope {

// A size of a grid, of a thread block or of a threadgroup.
struct Size3 {
  rope_int x, y, z;
};

// Returns a / b, rounded up.
inline rope_int ceil_div(rope_int a, rope_int b) { return (a + b - 1) / b; }
// Returns the smallest power of two that is at least n.
inline rope_int power_of_two(rope_int n) {
  rope_int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Returns whether heads can be cut into whole vectors of this many channels, with no vector across the first, the
// middle or the last of the rotated channels.
inline bool fits(const Args& p, int vector) {
  return p.rotary_start % vector == 0 && p.rotary_dim / 2 % vector == 0 && p.sides[kQ].head_dim % vector == 0;
}

// The number of chunks of a head.
struct Chunks {
  rope_int rotated;  // they come first
  rope_int all;
};
// rest: the channels that are not rotated need chunks too.
inline Chunks chunks_of(const Args& p, int vector, bool rest) {
  const rope_int rotated = p.rotary_dim / 2 / vector;
  return {rotated, rotated + (rest ? ceil_div(p.sides[kQ].head_dim - p.rotary_dim, 2 * vector) : 0)};
}

// Returns whether channels that are not rotated are written too. A norm and a factor scale them; without these they
// only have to be copied to a result that is not the input itself.
inline bool writes_rest(const Args& p, bool q_in_place, bool k_in_place) {
  const Side& q = p.sides[kQ];
  return q.norm || q.factor || !q_in_place || ((p.sides[kK].heads || p.sides[kV].heads) && !k_in_place);
}

// Returns whether each vector of a tensor, `bytes` bytes long, can be one aligned access: neighbouring channels (the
// last dimension) are adjacent in memory, and the start and all other strides are multiples of `bytes`. The stride of a
// dimension of one element does not matter, because nothing is accessed at a multiple of it.
// start: the address of the first element, or its byte offset in a buffer whose own start is aligned.
inline bool is_aligned(uintptr_t start, const rope_int* strides, const rope_int* sizes, int dims, int itemsize,
                       int bytes) {
  if (start % unsigned(bytes) || strides[dims - 1] != 1) return false;
  for (int d = 0; d < dims - 1; d++) {
    if (sizes[d] > 1 && strides[d] * itemsize % bytes) return false;
  }
  return true;
}

// ---- simpler calls ----

// Merges the batch into one sequence of batch * seq tokens if strides allow it. A decode step, which has many sequences
// of one token, is then one sequence, whose tokens a GPU divides like others.
inline void merge_batch(Args& p) {
  if (p.batch == 1 || (p.has_cache && !p.has_slots)) return;  // without slots, sequence b is written to block b
  rope_int* strides[15] = {p.slot_strides};
  int n = 1;
  if (p.source == kTableByToken || p.source == kTableByHead) {
    strides[n++] = p.cos_strides, strides[n++] = p.sin_strides;
  } else {
    strides[n++] = p.position_strides;
  }
  for (Side& side : p.sides) {
    if (side.heads == 0) continue;
    strides[n++] = side.in_strides;
    if (side.before) strides[n++] = side.before_strides;
    if (side.factor) strides[n++] = side.factor_strides;
    if (&side == p.sides || !p.has_cache) strides[n++] = side.out_strides;
  }
  const auto follow = [&](const rope_int* s) { return p.seq == 1 || s[0] == p.seq * s[1]; };
  if (!std::all_of(strides, strides + n, follow)) return;
  for (int i = 0; i < n && p.seq == 1; i++) strides[i][1] = strides[i][0];
  p.seq *= p.batch;
  p.batch = 1;
}

// Changes a call to one that a plan cuts more evenly, with the same results. If heads of k have no channels, v is
// alone. A v with wider heads than k gets heads of k's head_dim, if their channels are alike: the latent of MLA, for
// example, is one head of 512 channels beside a k of 64.
inline void simplify(Args& a) {
  Side &q = a.sides[kQ], &k = a.sides[kK], &v = a.sides[kV];
  const auto adjacent = [&](const rope_int* strides) {
    return strides[3] == 1 && (v.heads == 1 || strides[2] == v.head_dim);
  };
  if (q.head_dim == 0) {
    q.heads = k.heads = 0;
    q.head_dim = v.head_dim;
  } else if (v.heads && v.head_dim % q.head_dim == 0 && !v.norm && !v.scale_stride && adjacent(v.in_strides) &&
             adjacent(v.out_strides)) {
    v.heads *= v.head_dim / q.head_dim;
    v.head_dim = v.in_strides[2] = v.out_strides[2] = q.head_dim;
  }
  merge_batch(a);
}

}  // namespace rope
