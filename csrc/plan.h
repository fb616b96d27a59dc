// The part of a launch plan that all GPUs share: how a head is cut into chunks, which accesses are aligned, how large
// an element offset can become, and which positions are allowed. It is plain arithmetic on sizes, strides and
// addresses, so that it is tested without a GPU.
//
// A vector is a run of `vector` neighbouring channels; it may be a single channel. A chunk is two vectors of one head:
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
//   The channels before and after them are not rotated. If they have to be written nevertheless (see copies()), they
//   are the chunks that follow. The last chunk has only one vector if the number of vectors is odd.
//
// Chunk::of in csrc/cuda/vectors.cuh and chunk_at in shaders/chunks.h compute the channels of a chunk from its number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rope.h"

namespace rope {

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
inline bool fits(const RopeParams& p, int vector) {
  return p.rotary_start % vector == 0 && p.rotary_dim / 2 % vector == 0 && p.sides[kQ].head_dim % vector == 0;
}

// The number of chunks of a head.
struct Chunks {
  rope_int rotated;  // they come first
  rope_int all;
};
// copies: the channels that are not rotated need chunks too.
inline Chunks chunks_of(const RopeParams& p, int vector, bool copies) {
  const rope_int rotated = p.rotary_dim / 2 / vector;
  return {rotated, rotated + (copies ? ceil_div(p.sides[kQ].head_dim - p.rotary_dim, 2 * vector) : 0)};
}

// Returns whether channels that are not rotated are written too. A norm scales them; without a norm they only have to
// be copied to a result that is not the input itself.
inline bool copies(const RopeParams& p, bool q_in_place, bool k_in_place) {
  return p.sides[kQ].norm || !q_in_place || ((p.sides[kK].heads || p.sides[kV].heads) && !k_in_place);
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

// Returns the element offset of the last element.
inline rope_int last_offset(const rope_int* strides, const rope_int* sizes, int dims) {
  rope_int offset = 0;
  for (int d = 0; d < dims; d++) offset += std::max<rope_int>(sizes[d] - 1, 0) * strides[d];
  return offset;
}

// The range that a position must lie in.
struct PositionRange {
  bool limited;   // false: every position is allowed
  rope_int last;  // the allowed positions are 0 to last
};
// Returns the range that a table by position and a cache leave. A table by position has a row for each allowed
// position. In a cache without slots, sequence b is written to block b, and each token to the cell of that block whose
// index is the position; the block has block_size cells.
inline PositionRange position_range(const RopeParams& p) {
  const bool table = p.source == kTableByPosition, cache_by_position = p.has_cache && !p.has_slots;
  return {table || cache_by_position,
          std::min(table ? p.table_rows - 1 : INT64_MAX, cache_by_position ? p.block_size - 1 : INT64_MAX)};
}

}  // namespace rope
