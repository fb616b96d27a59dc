// Which position a token has, and which cell of the caches.
#include "device.h"

namespace rope {

// Returns the integer with index i of an array of integers of 4 or 8 bytes.
inline long integer_at(device const void* from, int bytes, ulong i) {
  return bytes == 8 ? static_cast<device const long*>(from)[i] : long(static_cast<device const int*>(from)[i]);
}

// Token s of sequence b. It is valid if its position and its slot are in range. If it is not valid, its rotated
// channels become NaN and nothing is written into a cache.
template <typename I>
struct Token {
  I b, s;
  long position;  // with the offset added
  bool valid;
  bool cached;        // the token has a cell in the caches; false for a negative slot
  I block, in_block;  // the cell: its block, and its index in the block; 0 if there is none
};

// Returns token number t of all sequences.
template <typename I, typename T>
inline Token<I> token_at(constant TiledParams& r, Buffers<T> x, uint t) {
  constant Args& p = r;
  const uint sequence = t / uint(p.seq);
  const I b = sequence, s = t - sequence * uint(p.seq);
  const long given_position =
      k_position_bytes ? integer_at(x.positions, k_position_bytes, b * I(p.position_strides[0]) + s * I(p.position_strides[1]))
                       : long(s) * p.position_strides[1];
  // The sum may wrap around. That is an error only if there is a range: with inv_freq every position is valid.
  const long position = long(ulong(given_position) + ulong(p.offset));
  const bool wrapped = (position < given_position) != (p.offset < 0);
  bool valid = !r.has_range || (position >= 0 && position <= r.last_position && !wrapped);
  long slot = 0;
  if (k_slot_bytes) {
    slot = integer_at(x.slots, k_slot_bytes, b * I(p.slot_strides[0]) + s * I(p.slot_strides[1]));
    valid = valid && slot < p.blocks * p.block_size;
  }
  const bool cached = valid && slot >= 0;
  Token<I> token = {b, s, position, valid, cached, 0, 0};
  if (cached) {
    // Without slots the cache has a block for each sequence, and the position is the index in it.
    token.block = k_slot_bytes ? I(slot) / I(p.block_size) : b;
    token.in_block = k_slot_bytes ? I(slot) - token.block * I(p.block_size) : I(position);
  }
  return token;
}

}  // namespace rope
