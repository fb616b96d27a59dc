// The rotation without a norm. Its result may go into a cache.
#include "heads.h"

// Rotates heads; v is copied. A thread takes one chunk of each head of one share of a token. at: the chunk; the share
// and the token, in the order that TiledParams::tokens_first says.
template <typename T, int V, typename I>
[[kernel]] void rotate_heads(constant TiledParams& r [[buffer(kBufferParams)]],
                             ROPE_ARGUMENTS(T) uint3 at [[thread_position_in_grid]]) {
  const Buffers<T> buffers = ROPE_ARGUMENTS_PASSED;
  const uint share = r.tokens_first ? at.z : at.y, t = r.tokens_first ? at.y : at.z;
  const Token<I> token = token_at<I>(r, buffers, t);
  const Chunk<V, I> chunk = chunk_at<V, I>(r, at.x);
  const uint end = r.first[kSides];
  Angles<V> angles;
  for (uint first = share; first < end; first += kHeads * r.shares) {
    Head<T, I> heads[kHeads];
    Values<T, V> x[kHeads];
    bool present[kHeads];  // the head exists, and this chunk of it must be written
#pragma unroll
    for (uint i = 0; i < kHeads; i++) {
      const uint h = first + i * r.shares;
      heads[i] = head_at(r, buffers, token, min(h, end - 1));
      present[i] = h < end && must_write(heads[i].side, chunk);
      if (present[i]) x[i] = read(heads[i].in, heads[i].in_stride, chunk);
    }
    // The angles serve all heads of the share, unless the table is by head. The first heads are read before them, so
    // that both are under way at once.
    if (!k_by_head && first == share && chunk.rotated && first < r.first[kV])
      angles = angles_of<T, V>(r, buffers, token, I(0), at.x);
#pragma unroll
    for (uint i = 0; i < kHeads; i++) {
      if (present[i] && heads[i].written) finish(r, buffers, token, heads[i], at.x, x[i], 1.0f, Numbers<V>(), angles);
    }
  }
  if (k_v_apart) copy_v<T, V>(r, buffers, token, share * r.chunks + at.x, r.shares * r.chunks);
}

#define ROPE_ROTATE(T, V)                                            \
  ROPE_KERNEL("rotate_" #T "_v" #V "_u32", rotate_heads<T, V, uint>) \
  ROPE_KERNEL("rotate_" #T "_v" #V "_u64", rotate_heads<T, V, ulong>)
ROPE_EACH_VECTOR(ROPE_ROTATE)
