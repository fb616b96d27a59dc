// The rotation without a norm. Its result may go into a cache.
#include "heads.h"

// Rotates heads; v is copied. A thread takes one chunk of each head of one share of a token. at: the chunk; the share
// and the token, in the order that TiledParams::tokens_first says.
template <typename T, int V, typename I>
ROPE_KERNEL(kThreads)
void rotate_kernel(constant TiledParams& r [[buffer(kBufferParams)]],
                   ROPE_ARGUMENTS(T) uint3 at [[thread_position_in_grid]]) {
  const Buffers<T> buffers = ROPE_ARGUMENTS_PASSED;
  const uint share = r.tokens_first ? at.z : at.y, t = r.tokens_first ? at.y : at.z;
  const Token<I> token = token_of<I>(r, buffers, t);
  rotate_share<T, V>(r, buffers, token, share, at.x, true);
  if (k_v_apart) copy_v<T, V>(r, buffers, token, (r.shares - 1 - share) * r.chunks + at.x, r.shares * r.chunks);
}
