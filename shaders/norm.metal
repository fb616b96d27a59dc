// Kernels that normalise and rotate heads. The results may go into a cache. If only v has a norm, q and k are rotated
// as they are.
//
// A team of k_lanes threads, which are part of one SIMD group or all of it, shares a head and sums over its channels.
// Every thread of a SIMD group must take part in every sum. So all threads reach every sum, and a thread without a
// chunk, a head or a token takes part with zeros and writes nothing. Heads of more chunks than a SIMD group has threads
// have a kernel of their own, norm_rotate_wide, which reads a head twice. So does norm_rotate_over_heads, in which a
// threadgroup normalises all heads of a token together.
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

// Returns the sum of the squares of a head, with all of its pieces, to each lane of a SIMD group that takes every
// kSimd-th chunk.
template <int V, typename T, typename I>
inline float squares_of(constant TiledParams& r, Head<T, I> head, uint lane) {
  Sum squares;
  for (uint i = 0; i < pieces_of(r, head.tensor); i++) {
    const Head<T, I> piece = piece_of(r.params, head, I(i));
    for (uint index = lane; index < r.chunks; index += kSimd) {
      const Chunk<V, I> chunk = chunk_at<V, I>(r, index);
      const Numbers<V> n = numbers_of(read(piece.in, piece.in_stride, chunk, piece.end));
      squares.add(dot(n, n, chunk));
    }
  }
  return sum_over_lanes(squares.value());
}

// Returns whether a chunk of a head must be written. Without a norm, channels in place that are not rotated stay as
// they are.
template <typename T, int V, typename I>
inline bool must_write(Head<T, I> head, Chunk<V, I> chunk) {
  return is_normalised(head.tensor) || chunk.rotated || !head.in_place;
}

// Returns whether the norm or the rotation changes a chunk. Other chunks are copied.
template <typename T, int V, typename I>
inline bool changes(Head<T, I> head, Chunk<V, I> chunk) {
  return is_normalised(head.tensor) || (chunk.rotated && head.tensor != kV);
}

// Normalises a chunk of a head of v, or of a piece of it.
template <int V, typename T, typename I>
inline void normalise_v(constant RopeParams& p, float scale, Head<T, I> head, Chunk<V, I> chunk) {
  const Numbers<V> n = product(numbers_of(read(head.in, head.in_stride, chunk, head.end)), scale);
  write(p, rounded<T, V>(n), n, head, chunk);
}

}  // namespace mps
}  // namespace rope

#define ROPE_NORM_BUFFERS_PASSED ROPE_BUFFERS_PASSED(ROPE_IF(k_has_weights, q_weight), ROPE_IF(k_has_weights, k_weight))

// Normalises and rotates heads; v is copied, unless it has a norm too. A team takes the heads of one share of a token.
template <typename T, int V, typename I>
[[kernel]] void norm_rotate(constant TiledParams& r [[buffer(kBufferParams)]], ROPE_BUFFERS(T), ROPE_WEIGHTS,
                            uint group [[threadgroup_position_in_grid]], uint threads [[threads_per_threadgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]],
                            uint thread_of_simd [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_NORM_BUFFERS_PASSED;
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
      present[i] = active && h < r.heads && must_write(heads[i], chunk);
      for (int j = 0; j < 2 * V; j++) x[i].of[j] = T(0);
      if (present[i]) x[i] = read(heads[i].in, heads[i].in_stride, chunk, heads[i].end);
    }
    if (!k_by_head && step == 0 && active && chunk.rotated && own.share < r.v_start)
      angles = angles_of<T, V>(r, buffers, token, I(0), self.lane);
#pragma unroll
    for (uint i = 0; i < kHeads; i++) {
      const int tensor = heads[i].tensor;
      Numbers<V> n = numbers_of(x[i]);
      Sum squares;
      squares.add(sum_over_lanes(dot(n, n, chunk)));
      // All threads go through the pieces of v, although only some of them may have a head of v.
      for (uint piece = 1; piece < pieces_of(r, kV); piece++) {
        Numbers<V> more = {};
        if (present[i] && tensor == kV) {
          const Head<T, I> own_piece = piece_of(p, heads[i], I(piece));
          more = numbers_of(read(own_piece.in, own_piece.in_stride, chunk, own_piece.end));
        }
        squares.add(sum_over_lanes(dot(more, more, chunk)));
      }
      if (present[i] && heads[i].written) {
        const float scale = scale_of(squares.value(), float(tensor == kV ? p.v_dim : p.head_dim), p);
        if (tensor != kV) {
          if (k_has_norm) {
            if (weights_for != tensor) weights = weights_of<T, V>(r, buffers, tensor, chunk);
            weights_for = tensor;
            n = normalised<T>(n, scale, weights, has_native_weights(tensor));
          }
          if (k_by_head && chunk.rotated) angles = angles_of<T, V>(r, buffers, token, heads[i].index, self.lane);
          if (chunk.rotated) n = rotate<T>(n, angles);
        } else if (k_norm_v) {
          n = product(n, scale);
        }
        if (changes(heads[i], chunk)) x[i] = rounded<T, V>(n);
        write(p, x[i], n, heads[i], chunk);
        for (uint piece = 1; piece < pieces_of(r, tensor); piece++)
          normalise_v(p, scale, piece_of(p, heads[i], I(piece)), chunk);
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
  const Buffers<T> buffers = ROPE_NORM_BUFFERS_PASSED;
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
      if (!is_normalised(head.tensor)) continue;
      scales[i] = scale_of(squares_of<1>(r, head, lane), float(head.tensor == kV ? p.v_dim : p.head_dim), p);
    }
    for (uint index = lane; index < r.chunks; index += kSimd) {
      const Chunk<1, ulong> chunk = chunk_at<1, ulong>(r, index);
      Angles<1> angles;
      if (!k_by_head && chunk.rotated && first < r.v_start)
        angles = angles_of<T, 1>(r, buffers, token, ulong(0), index);
      for (uint i = 0; i < kHeads && first + i * r.shares < r.heads; i++) {
        const Head<T, ulong> head = head_at<T, ulong>(r, buffers, token, first + i * r.shares);
        if (!head.written || !must_write(head, chunk)) continue;
        if (k_norm_v && head.tensor == kV) {
          for (uint piece = 0; piece < pieces_of(r, kV); piece++)
            normalise_v(p, scales[i], piece_of(p, head, ulong(piece)), chunk);
          continue;
        }
        Values<T, 1> x = read(head.in, head.in_stride, chunk, head.end);
        Numbers<1> n = numbers_of(x);
        if (head.tensor != kV) {
          if (k_has_norm)
            n = normalised<T>(n, scales[i], weights_of<T, 1>(r, buffers, head.tensor, chunk),
                              has_native_weights(head.tensor));
          if (k_by_head && chunk.rotated) angles = angles_of<T, 1>(r, buffers, token, head.index, index);
          if (chunk.rotated) n = rotate<T>(n, angles);
          if (changes(head, chunk)) x = rounded<T, 1>(n);
        }
        write(p, x, n, head, chunk);
      }
    }
  }
}

// Normalises all heads of q, or of k, of a token together, and rotates them. A threadgroup takes one tensor (group.y)
// of one token (group.x) and reads it twice. v is copied, or a SIMD group normalises each of its heads.
//
// The sum has kSimd parts, which each are the sum of a SIMD group, whatever the number of SIMD groups is: so the order
// of the sum follows from sizes alone.
template <typename T, int V>
[[kernel]] void norm_rotate_over_heads(constant TiledParams& r [[buffer(kBufferParams)]], ROPE_BUFFERS(T), ROPE_WEIGHTS,
                                       threadgroup float* shared [[threadgroup(0)]],
                                       uint2 group [[threadgroup_position_in_grid]],
                                       uint2 threads [[threads_per_threadgroup]],
                                       uint simd [[simdgroup_index_in_threadgroup]],
                                       uint lane [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_NORM_BUFFERS_PASSED;
  constant RopeParams& p = r.params;
  const int tensor = int(group.y);
  const uint seq = uint(p.seq), b = group.x / seq, simds = threads.x / kSimd;
  const Token<ulong> token = token_at<T, ulong>(r, buffers, ulong(b), ulong(group.x - b * seq));
  const uint begin = tensor == kQ   ? 0
                     : tensor == kK ? r.k_start
                                    : r.v_start,
             end = tensor == kQ   ? r.k_start
                   : tensor == kK ? r.v_start
                                  : r.heads;
  if (k_norm_v && tensor == kV) {
    for (uint h = begin + simd; h < end && token.cached; h += simds) {
      const Head<T, ulong> head = head_at<T, ulong>(r, buffers, token, h);
      const float scale = scale_of(squares_of<V>(r, head, lane), float(p.v_dim), p);
      for (uint piece = 0; piece < pieces_of(r, kV); piece++) {
        for (uint index = lane; index < r.chunks; index += kSimd)
          normalise_v(p, scale, piece_of(p, head, ulong(piece)), chunk_at<V, ulong>(r, index));
      }
    }
    return;
  }
  float scale = 1.0f;
  if (tensor != kV) {
    for (uint part = simd; part < kSimd; part += simds) {
      const Walk walk = walk_of(part * kSimd + lane, kSimd * kSimd, r.chunks);
      Sum squares;
      for (uint index = walk.chunk; index < r.chunks; index += walk.chunk_step) {
        const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
        for (uint h = begin + walk.head; h < end; h += walk.head_step) {
          const Head<T, ulong> head = head_at<T, ulong>(r, buffers, token, h);
          const Numbers<V> n = numbers_of(read(head.in, head.in_stride, chunk, head.end));
          squares.add(dot(n, n, chunk));
        }
      }
      const float sum = sum_over_lanes(squares.value());
      if (lane == 0) shared[part] = sum;
    }
    // In place, a thread may write after the barrier what others have read before it.
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    scale = scale_of(sum_over_lanes(shared[lane]), float(long(end - begin) * p.head_dim), p);
  }
  const Walk walk = walk_of(simd * kSimd + lane, threads.x, r.chunks);
  for (uint index = walk.chunk; index < r.chunks; index += walk.chunk_step) {
    const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
    Angles<V> angles;
    if (!k_by_head && chunk.rotated && tensor != kV) angles = angles_of<T, V>(r, buffers, token, ulong(0), index);
    for (uint h = begin + walk.head; h < end; h += walk.head_step) {
      const Head<T, ulong> head = head_at<T, ulong>(r, buffers, token, h);
      if (!head.written) continue;
      Values<T, V> x = read(head.in, head.in_stride, chunk, head.end);
      Numbers<V> n = numbers_of(x);
      if (tensor != kV) {
        n = normalised<T>(n, scale, weights_of<T, V>(r, buffers, tensor, chunk, head.index),
                          has_native_weights(tensor));
        if (k_by_head && chunk.rotated) angles = angles_of<T, V>(r, buffers, token, head.index, index);
        if (chunk.rotated) n = rotate<T>(n, angles);
        x = rounded<T, V>(n);
      }
      write(p, x, n, head, chunk);
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

#define ROPE_NORM_OVER_HEADS(T)                                                 \
  ROPE_KERNEL("norm_rotate_over_heads_" #T "_v4", norm_rotate_over_heads<T, 4>) \
  ROPE_KERNEL("norm_rotate_over_heads_" #T "_v1", norm_rotate_over_heads<T, 1>)
ROPE_NORM_OVER_HEADS(float)
ROPE_NORM_OVER_HEADS(half)
ROPE_NORM_OVER_HEADS(bfloat)
