// The channels of a chunk, computed from its number. CUDA and Metal share this code. plan.h explains chunks.
#ifndef ROPE_CHUNK_H
#define ROPE_CHUNK_H

#include "rotation.h"

namespace rope {

// Two vectors of V channels of a head. I is an integer type that holds every element offset of the call.
template <int V, typename I>
struct Chunk {
  I at[2];      // the first channels of the two vectors; they are equal if there is only one
  I last;       // the head may end within the chunk: then this is its last channel
  int rotated;  // an int, because on NVIDIA a bool that stays in a register costs an instruction at each use
  int index;    // in the head
};

template <int V, typename I>
ROPE_FN bool is_whole(Chunk<V, I> c) {
  return c.at[1] != c.at[0];
}
// Returns channel i of the 2 V channels.
template <int V, typename I>
ROPE_FN I channel_of(Chunk<V, I> c, int i) {
  return (i < V ? c.at[0] : c.at[1]) + I(i % V);
}
template <int V, typename I>
ROPE_FN bool exists(Chunk<V, I> c, int i) {
  return (i < V || is_whole(c)) && channel_of(c, i) <= c.last;
}

// Returns the chunk that begins `by` channels later, in a head whose last channel is `last`.
template <int V, typename I>
ROPE_FN Chunk<V, I> moved(Chunk<V, I> c, I by, I last) {
  return {{c.at[0] + by, c.at[1] + by}, last, c.rotated, c.index};
}

// Returns a channel of those that are not rotated. They are counted as if they were adjacent.
template <typename I>
ROPE_FN I skip_rotated(I channel, I start, I rotary_dim) {
  return channel < start ? channel : channel + rotary_dim;
}

// Returns chunk `index` of a head, which has `chunks` chunks; the first `rotated` of them are rotated. start and others
// count channels: those before the rotated ones, and all that are not rotated. If `pairs_adjacent`, the two vectors of
// a rotated chunk are neighbours; otherwise each is from one half of the rotated channels. If `rest_adjacent`, the two
// vectors of other chunks are neighbours; otherwise they are (chunks - rotated) vectors apart. `last` becomes that of
// the chunk.
template <int V, typename I>
ROPE_FN Chunk<V, I> chunk_of(I index, I rotated, I chunks, I start, I others, bool pairs_adjacent, bool rest_adjacent,
                             I last) {
  // These are selections, because a GPU takes longer for branches.
  const bool is_rotated = index < rotated;
  const I i = is_rotated ? index : index - rotated;
  const bool adjacent = is_rotated ? pairs_adjacent : rest_adjacent;
  const I apart = is_rotated ? rotated : chunks - rotated;  // vectors from the first to the second
  const I first = V * (adjacent ? 2 * i : i), second = first + V * (adjacent ? I(1) : apart);
  const I first_rest = skip_rotated(first, start, 2 * V * rotated),
          second_rest = second < others ? skip_rotated(second, start, 2 * V * rotated) : first_rest;
  return {{is_rotated ? start + first : first_rest, is_rotated ? start + second : second_rest},
          last,
          is_rotated,
          int(index)};
}

}  // namespace rope

#endif
