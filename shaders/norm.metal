// Kernels that normalise and rotate heads. The results may go into a cache.
//
// A team of k_lanes threads, which are part of one SIMD group or all of it, shares a head and sums over its channels.
// Every thread of a SIMD group must take part in every sum. So all threads reach every sum, and a thread without a
// chunk, a head or a token takes part with zeros and writes nothing. Heads of more chunks than a SIMD group has threads
// have a kernel of their own, norm_rotate_wide, which reads a head twice.
#include "device.h"

namespace rope {
namespace mps {

// A share of a token: its heads belong to one team.
struct Share {
  uint share, t;  // t: the token, counted through all sequences
};
// Returns the share with this index in the list of all shares of all tokens.
inline Share share_at(constant TiledParams& r, uint index) {
  const uint neighbours = r.tokens_first ? r.tokens : r.shares, outer = index / neighbours,
             inner = index - outer * neighbours;
  return {r.tokens_first ? outer : inner, r.tokens_first ? inner : outer};
}

// Returns the numbers of a chunk after the norm. native: the weights have type T.
template <typename T, int V>
inline Numbers<V> normalised(Numbers<V> x, float scale, Numbers<V> weights, bool native) {
  return rounded_eagerly<T>(product(rounded_eagerly<T>(product(x, scale), native), weights));
}

}  // namespace mps
}  // namespace rope

// Normalises and rotates heads; v is copied. A team takes the heads of one share of a token.
template <typename T, int V, typename I>
[[kernel]] void norm_rotate(constant TiledParams& r [[buffer(kBufferParams)]], ROPE_BUFFERS(T), ROPE_WEIGHTS,
                            uint group [[threadgroup_position_in_grid]], uint threads [[threads_per_threadgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]],
                            uint thread_of_simd [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_BUFFERS_PASSED(q_weight, k_weight);
  constant RopeParams& p = r.params;
  const TeamLane self = team_lane_of(simd, thread_of_simd);
  const uint team = group * (threads / uint(k_lanes)) + self.team;
  const bool inside = team < r.tokens * r.shares;
  const Share own = share_at(r, inside ? team : 0);
  const uint seq = uint(p.seq), b = own.t / seq;
  const Token<I> token = token_at<T, I>(r, buffers, I(b), I(own.t - b * seq));
  const bool active = inside && self.lane < r.chunks;
  const Chunk<V, I> chunk = chunk_at<V, I>(r, active ? self.lane : 0);
  Angles<V> angles;
  Numbers<V> weights;
  int weights_for = -1;  // the tensor whose weights these are
  // The loop ends at the same time for all shares, because all threads of the SIMD group must reach the sums.
  for (uint step = 0; step < r.heads; step += kHeads * r.shares) {
    Head<T, I> heads[kHeads];
    Values<T, V> x[kHeads];
    bool present[kHeads];
#pragma unroll
    for (uint i = 0; i < kHeads; i++) {
      const uint h = own.share + step + i * r.shares;
      heads[i] = head_at<T, I>(r, buffers, token, min(h, r.heads - 1));
      present[i] = active && h < r.heads;
      for (int j = 0; j < 2 * V; j++) x[i].of[j] = T(0);
      if (present[i]) x[i] = read(heads[i].in, heads[i].in_stride, chunk, heads[i].end);
    }
    if (!k_by_head && step == 0 && active && chunk.rotated && own.share < r.v_start)
      angles = angles_of<T, V>(r, buffers, token, I(0), self.lane);
#pragma unroll
    for (uint i = 0; i < kHeads; i++) {
      Numbers<V> n = numbers_of(x[i]);
      const float squares = sum_over_lanes(dot(n, n, chunk));
      if (present[i] && heads[i].written) {
        if (heads[i].tensor != kV) {
          if (weights_for != heads[i].tensor) weights = weights_of<T, V>(r, buffers, heads[i].tensor, chunk);
          weights_for = heads[i].tensor;
          n = normalised<T>(n, scale_of(squares, p), weights, has_native_weights(heads[i].tensor));
          if (k_by_head && chunk.rotated) angles = angles_of<T, V>(r, buffers, token, heads[i].index, self.lane);
          if (chunk.rotated) n = rotate<T>(n, angles);
          x[i] = rounded<T, V>(n);
        }
        write(x[i], heads[i].out, heads[i].out_stride, chunk, heads[i].end);
      }
    }
  }
}

// Does the same for heads of any width: a team is a whole SIMD group, and each thread goes through the head in steps of
// kSimd chunks, once for the sum and once to rotate.
template <typename T>
[[kernel]] void norm_rotate_wide(constant TiledParams& r [[buffer(kBufferParams)]], ROPE_BUFFERS(T), ROPE_WEIGHTS,
                                 uint group [[threadgroup_position_in_grid]], uint threads [[threads_per_threadgroup]],
                                 uint simd [[simdgroup_index_in_threadgroup]],
                                 uint lane [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_BUFFERS_PASSED(q_weight, k_weight);
  constant RopeParams& p = r.params;
  const uint team = group * (threads / kSimd) + simd;
  if (team >= r.tokens * r.shares) return;  // the whole SIMD group leaves, so no sum lacks a thread
  const Share own = share_at(r, team);
  const uint seq = uint(p.seq), b = own.t / seq;
  const Token<ulong> token = token_at<T, ulong>(r, buffers, ulong(b), ulong(own.t - b * seq));
  for (uint first = own.share; first < r.heads; first += kHeads * r.shares) {
    float scales[kHeads];
    for (uint i = 0; i < kHeads && first + i * r.shares < r.heads; i++) {
      const Head<T, ulong> head = head_at<T, ulong>(r, buffers, token, first + i * r.shares);
      if (head.tensor == kV) break;
      Sum squares;
      for (uint index = lane; index < r.chunks; index += kSimd) {
        const Chunk<1, ulong> chunk = chunk_at<1, ulong>(r, index);
        const Numbers<1> n = numbers_of(read(head.in, head.in_stride, chunk));
        squares.add(dot(n, n, chunk));
      }
      scales[i] = scale_of(sum_over_lanes(squares.value()), p);
    }
    for (uint index = lane; index < r.chunks; index += kSimd) {
      const Chunk<1, ulong> chunk = chunk_at<1, ulong>(r, index);
      Angles<1> angles;
      if (!k_by_head && chunk.rotated && first < r.v_start)
        angles = angles_of<T, 1>(r, buffers, token, ulong(0), index);
      for (uint i = 0; i < kHeads && first + i * r.shares < r.heads; i++) {
        const Head<T, ulong> head = head_at<T, ulong>(r, buffers, token, first + i * r.shares);
        Values<T, 1> x = read(head.in, head.in_stride, chunk, head.end);
        if (head.tensor != kV) {
          Numbers<1> n = normalised<T>(numbers_of(x), scales[i], weights_of<T, 1>(r, buffers, head.tensor, chunk),
                                       has_native_weights(head.tensor));
          if (k_by_head && chunk.rotated) angles = angles_of<T, 1>(r, buffers, token, head.index, index);
          if (chunk.rotated) n = rotate<T>(n, angles);
          x = rounded<T, 1>(n);
        }
        if (head.written) write(x, head.out, head.out_stride, chunk, head.end);
      }
    }
  }
}

#define ROPE_NORM(T, V)                                                  \
  ROPE_KERNEL("norm_rotate_" #T "_v" #V "_u32", norm_rotate<T, V, uint>) \
  ROPE_KERNEL("norm_rotate_" #T "_v" #V "_u64", norm_rotate<T, V, ulong>)
ROPE_NORM(float, 4)
ROPE_NORM(float, 1)
ROPE_NORM(half, 8)
ROPE_NORM(half, 4)
ROPE_NORM(half, 1)
ROPE_NORM(bfloat, 8)
ROPE_NORM(bfloat, 4)
ROPE_NORM(bfloat, 1)
ROPE_KERNEL("norm_rotate_wide_float", norm_rotate_wide<float>)
ROPE_KERNEL("norm_rotate_wide_half", norm_rotate_wide<half>)
ROPE_KERNEL("norm_rotate_wide_bfloat", norm_rotate_wide<bfloat>)
