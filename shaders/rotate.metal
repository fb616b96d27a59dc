// The rotation without a norm. Its result may go into a cache.
#include "device.h"

namespace rope {
namespace mps {

// Rotates heads; v is copied. at: the chunk; the token in its sequence; the sequence and the head group.
template <typename T, int V, typename I>
[[kernel]] void rotate_heads(constant TiledParams& r [[buffer(kBufferParams)]], ROPE_BUFFERS(T),
                             uint3 at [[thread_position_in_grid]]) {
  const Buffers<T> buffers = ROPE_BUFFERS_PASSED;
  const uint b = at.z / r.head_groups, first = (at.z - b * r.head_groups) * kHeads, end = min(first + kHeads, r.heads);
  const Token<I> token = token_at<I>(r, positions, slots, I(b), I(at.y));
  const Chunk<V, I> chunk = chunk_at<V, I>(r, at.x);
  Head<T, I> heads[kHeads];
  Values<T, V> x[kHeads];
  bool present[kHeads];  // the head exists, and this chunk of it must be written
#pragma unroll
  for (uint i = 0; i < kHeads; i++) {
    heads[i] = head_at<T, I>(r, buffers, token, min(first + i, end - 1));
    present[i] = first + i < end && (chunk.rotated || !heads[i].in_place);
    if (present[i]) x[i] = read(heads[i].in, heads[i].in_stride, chunk);
  }
  Angles<V> angles;
  if (chunk.rotated && first < r.v_start) angles = angles_of<T, V>(r, buffers, token, at.x);
#pragma unroll
  for (uint i = 0; i < kHeads; i++) {
    if (!present[i] || !heads[i].written) continue;
    if (chunk.rotated && heads[i].tensor != kV) x[i] = rounded<T, V>(rotate(numbers_of(x[i]), angles));
    write(x[i], heads[i].out, heads[i].out_stride, chunk);
  }
}

#define ROPE_ROTATE(T)                                           \
  ROPE_KERNEL("rotate_" #T "_v4_u32", rotate_heads<T, 4, uint>)  \
  ROPE_KERNEL("rotate_" #T "_v4_u64", rotate_heads<T, 4, ulong>) \
  ROPE_KERNEL("rotate_" #T "_v1_u32", rotate_heads<T, 1, uint>)  \
  ROPE_KERNEL("rotate_" #T "_v1_u64", rotate_heads<T, 1, ulong>)
ROPE_ROTATE(float)
ROPE_ROTATE(half)
ROPE_ROTATE(bfloat)

}  // namespace mps
}  // namespace rope
