// Which position a token has, and which cell of the caches.
#include "device.h"

namespace rope {

// Returns the integer with index i of an array of integers of 4 or 8 bytes.
inline long integer_at(device const void* from, int bytes, ulong i) {
  return bytes == 8 ? static_cast<device const long*>(from)[i] : long(static_cast<device const int*>(from)[i]);
}

// Returns the element offset of head h of token s of sequence b, for a tensor [batch, seq, heads, head_dim] with these
// strides. For a cache b is the block, and s the index in the block; for a table s is the row.
template <typename I>
inline I offset_of(constant rope_int* strides, I b, I s, I h) {
  return b * I(strides[0]) + s * I(strides[1]) + h * I(strides[2]);
}

// Returns token number t of all sequences. It is valid if its position and its slot are in range. If it is not valid,
// its rotated channels become NaN and nothing is written into a cache.
template <typename I, typename T>
inline Token<I> token_of(constant TiledParams& r, Buffers<T> x, uint t) {
  constant Args& p = r.args;
  const uint sequence = t / uint(p.seq);
  const I b = sequence, s = t - sequence * uint(p.seq);
  const ulong at = b * I(p.position_strides[0]) + s * I(p.position_strides[1]);
  const long given = k_position_bytes ? integer_at(x.positions, k_position_bytes, at) : long(s) * p.position_strides[1];
  const PositionRange range = r.positions;
  Token<I> token = token_at(b, s, given, p.offset, range);
  if (k_slot_bytes) {
    const long slot = integer_at(x.slots, k_slot_bytes, b * I(p.slot_strides[0]) + s * I(p.slot_strides[1]));
    if (take_slot(token, slot, p.blocks * p.block_size)) take_cell(token, I(slot), I(p.block_size));
    token.valid = token.valid && token.fits;
  }
  if (!token.valid || token.pad) token.block = token.in_block = 0;  // no element offset may be too large
  return token;
}

}  // namespace rope
