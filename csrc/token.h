// Which position a token has, which row of the tables, and which cell of the caches. C++, CUDA and Metal share this
// code. The including file reads the position and the slot from memory.
#ifndef ROPE_TOKEN_H
#define ROPE_TOKEN_H

#include "args.h"
#include "rotation.h"

namespace rope {

// Token s of sequence b. Truths are ints, because on NVIDIA a bool in a struct costs an instruction at each use.
template <typename I>
struct Token {
  I b, s;
  rope_int position;  // with the offset
  int valid;          // the position is allowed
  int pad;            // the slot is negative: the token has no cell, and its position need not be allowed
  int fits;           // the slot is less than the number of cells; true without slots
  I block, in_block;  // the cell, if the token has one: its block, and its index there
};

// Returns a token whose cell follows from its position: without slots, sequence b is written to block b. given: the
// position without the offset.
template <typename I>
ROPE_FN Token<I> token_at(I b, I s, rope_int given, rope_int offset, PositionRange range) {
  // The sum may wrap around: with inv_freq every position is allowed. No range holds a sum that wrapped.
  const rope_int position = rope_int(rope_uint(given) + rope_uint(offset));
  const bool valid = !range.limited || rope_uint(position) < rope_uint(range.last) + 1;
  return {b, s, position, valid, false, true, b, I(position)};
}

// Notes what follows from the slot of a token, and returns whether it names one of the cells.
template <typename I>
ROPE_FN bool take_slot(ROPE_THREAD Token<I>& t, rope_int slot, rope_int cells) {
  t.pad = slot < 0;
  t.fits = slot < cells;
  return t.fits && !t.pad;
}

// Moves a token to the cell of a slot. U is the type in which the slot is divided.
template <typename I, typename U>
ROPE_FN void take_cell(ROPE_THREAD Token<I>& t, U slot, U block_size) {
  const U block = slot / block_size;
  t.block = I(block);
  t.in_block = I(slot - block * block_size);
}

// Returns the table row of a token. Where tokens have rows of their own, it is that of s. A token whose position is not
// allowed gets row 0, which it must not use.
template <typename I>
ROPE_FN I row_of(Token<I> t, bool by_position) {
  return !by_position ? t.s : t.valid ? I(t.position) : I(0);
}

}  // namespace rope

#endif
