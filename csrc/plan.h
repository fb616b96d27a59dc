// What the plans of all GPUs know: how a head is cut, which accesses are aligned, how far offsets and positions go.
// Plain arithmetic on sizes, strides and addresses, so that it is tested without a GPU.
//
// A head is cut into chunks, one for a thread. A chunk is two vectors, one from each half of the rotated channels: so
// both members of every pair are in it whatever the pairing, and neighbouring threads read neighbouring memory.
// Channels past rotary_dim are cut the same way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rope.h"

namespace rope {

inline rope_int ceil_div(rope_int a, rope_int b) { return (a + b - 1) / b; }
inline rope_int power_of_two(rope_int n) {
  rope_int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Whether heads can be cut into chunks of whole vectors.
inline bool fits(const RopeParams& p, int vector) { return p.rotary_dim / 2 % vector == 0 && p.head_dim % vector == 0; }

struct Chunks {
  rope_int rotated, all;  // the rotated ones come first
};
inline Chunks chunks_of(const RopeParams& p, int vector, bool copies) {
  const rope_int rotated = p.rotary_dim / 2 / vector;
  return {rotated, rotated + (copies ? ceil_div(p.head_dim - p.rotary_dim, 2 * vector) : 0)};
}

// Whether channels past rotary_dim are written too.
inline bool copies(const RopeParams& p, bool q_in_place, bool k_in_place) {
  return p.has_norm || !q_in_place || (p.k.heads && !k_in_place);
}

// Whether every access of this many bytes would be aligned, channels side by side. start: an address, or the offset of
// the first element in a buffer that begins aligned, in bytes.
inline bool is_aligned(uintptr_t start, const rope_int* strides, const rope_int* sizes, int dims, int itemsize,
                       int bytes) {
  if (start % unsigned(bytes) || strides[dims - 1] != 1) return false;
  for (int d = 0; d < dims - 1; d++) {
    if (sizes[d] > 1 && strides[d] * itemsize % bytes) return false;
  }
  return true;
}

// Of the last element.
inline rope_int last_offset(const rope_int* strides, const rope_int* sizes, int dims) {
  rope_int offset = 0;
  for (int d = 0; d < dims; d++) offset += std::max<rope_int>(sizes[d] - 1, 0) * strides[d];
  return offset;
}

// Where position + offset is to be, if anywhere: from 0 to last.
struct Places {
  bool limited;
  rope_int last;
};
// at_place: into a cache at the position itself, without slots.
inline Places places_of(const RopeParams& p, bool at_place) {
  const bool table = p.source == kTableByPosition;
  return {table || at_place, std::min(table ? p.rows - 1 : INT64_MAX, at_place ? p.block_size - 1 : INT64_MAX)};
}

}  // namespace rope
