// Kernels that normalise and rotate heads. The results may go into a cache. If only v has a norm, q and k are rotated
// as they are.
//
// A team of k_lanes threads, which are part of one SIMD group or all of it, shares a head and sums over its channels.
// Every thread of a SIMD group must take part in every sum.
#include "heads.h"

namespace rope {

// Computes a share of a token, whose heads belong to one team, from its index in the list of all shares of all tokens.
// t: the token, counted through all sequences
inline void share_at(constant TiledParams& r, uint index, thread uint& share, thread uint& t) {
  const uint neighbours = r.tokens_first ? r.tokens : r.shares, outer = index / neighbours,
             inner = index - outer * neighbours;
  share = r.tokens_first ? outer : inner;
  t = r.tokens_first ? inner : outer;
}

// Writes a v that is apart. A team takes the heads team, team + teams ... For a norm, a head is taken in spans of k's
// head_dim, and a span is cut into chunks as a head of k is. sum_spans: the lanes add up each span by itself.
template <typename T, int V, typename I>
inline void write_v(constant TiledParams& r, Buffers<T> x, Token<I> token, uint team, uint teams, uint lane,
                    bool inside, bool sum_spans) {
  const uint lanes = uint(k_lanes);
  if (!has(k_normalised, kV)) {
    if (inside) copy_v<T, V>(r, x, token, team * lanes + lane, teams * lanes);
    return;
  }
  const uint heads = uint(r.args.sides[kV].heads);
  const I end = I(r.args.sides[kV].head_dim), span = I(r.args.sides[kQ].head_dim);
  const TokenSide<T, I> of_token = side_of_token(r, x, token, kV);
  for (uint first = 0; first < heads; first += teams) {  // all threads reach the sums
    const bool present = inside && first + team < heads;
    const Head<T, I> head = head_at(of_token, token, kV, I(min(first + team, heads - 1)));
    const uint chunks = present ? r.chunks : 0;
    Sum squares, of_spans;
    for (I begin = 0; begin < end; begin += span) {
      for (uint index = lane; index < chunks; index += lanes) {
        const Chunk<V, I> chunk = moved(chunk_at<V, I>(r, index), begin, end - 1);
        const Numbers<V> n = to<float>(read(head.in, head.in_stride, chunk));
        squares.add(sum_of_products(n, n, chunk));
      }
      if (sum_spans) {
        of_spans.add(sum_over_lanes(squares.value()));
        squares = {};
      }
    }
    const float all = sum_spans ? of_spans.value() : sum_over_lanes(squares.value());
    if (!head.written) continue;
    const float scale = scale_of(all, r.args.sides[kV].head_dim, r.args);
    for (I begin = 0; begin < end; begin += span) {
      for (uint index = lane; index < chunks; index += lanes) {
        const Chunk<V, I> chunk = moved(chunk_at<V, I>(r, index), begin, end - 1);
        Numbers<V> weights;
        if (has(k_weighted, kV)) weights = weights_of<T, V>(r, x, kV, I(0), chunk);
        const Numbers<V> n = normalised<T>(to<float>(read(head.in, head.in_stride, chunk)), kV, scale, weights);
        write(to<T>(n), n, head, chunk);
      }
    }
  }
}

// Returns the sum of the squares of the heads first .. end - 1 of the list, to each lane of a SIMD group. walk: that of
// this thread through these heads.
template <typename T, int V>
inline float squares_of(constant TiledParams& r, thread const TokenSide<T, ulong> (&sides)[kSides], Token<ulong> token,
                        uint first, uint end, Walk walk) {
  Sum squares;
  for (uint index = walk.chunk; index < r.chunks; index += walk.chunk_step) {
    const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
    for (uint h = first + walk.head; h < end; h += walk.head_step) {
      const Head<T, ulong> head = head_at(r, sides, token, h);
      const Numbers<V> n = to<float>(read(head.in, head.in_stride, chunk));
      squares.add(sum_of_products(n, n, chunk));
    }
  }
  return sum_over_lanes(squares.value());
}

}  // namespace rope

// Normalises and rotates heads; v is copied, unless it has a norm too. A team takes the heads of one share of a token.
template <typename T, int V, typename I>
ROPE_KERNEL(kThreads)
void norm_rotate_kernel(constant TiledParams& r [[buffer(kBufferParams)]],
                        ROPE_ARGUMENTS(T) uint at [[threadgroup_position_in_grid]],
                        uint threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]]) {
  const Buffers<T> buffers = ROPE_ARGUMENTS_PASSED;
  const uint lanes = uint(k_lanes), team = at * (threads / lanes) + index / lanes, lane = index % lanes;
  const bool inside = team < r.tokens * r.shares;
  uint share, t;
  share_at(r, inside ? team : 0, share, t);
  const Token<I> token = token_of<I>(r, buffers, t);
  rotate_share<T, V>(r, buffers, token, share, lane, inside);
  if (k_v_apart) write_v<T, V>(r, buffers, token, r.shares - 1 - share, r.shares, lane, inside, true);
}

// Does the same for wide groups, of which each is normalised together: heads of more chunks than a SIMD group has
// threads, or all heads of q, or of k, of a token. They are read twice, once for the sum and once to rotate.
//   Each head by itself: a SIMD group takes the heads of one share of a token.
//   All heads: a threadgroup takes one side (at.y) of one token (at.x). The sum has kSimd parts, which each are
//   the sum of a SIMD group, whatever the number of SIMD groups is: so the order of the sum follows from sizes alone.
//   If v has a norm, each SIMD group takes some of its heads.
template <typename T, int V>
ROPE_KERNEL(kSharedThreads)
void norm_rotate_wide_kernel(constant TiledParams& r [[buffer(kBufferParams)]],
                             ROPE_ARGUMENTS(T) threadgroup float* parts [[threadgroup(0)]],
                             uint2 at [[threadgroup_position_in_grid]], uint2 threads [[threads_per_threadgroup]],
                             uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_ARGUMENTS_PASSED;
  constant Args& p = r.args;
  const uint simds = threads.x / kSimd, team = at.x * simds + simd;
  if (!k_all_heads && team >= r.tokens * r.shares) return;  // the whole SIMD group leaves, so no sum lacks a thread
  uint share = simd, t = at.x;
  if (!k_all_heads) share_at(r, team, share, t);
  const Token<ulong> token = token_of<ulong>(r, buffers, t);
  TokenSide<T, ulong> sides[kSides];
  sides_of_token(r, buffers, token, sides);

  // The heads of this SIMD group, or if they are taken together of this threadgroup, are first, first + step ...
  const int side = int(at.y);
  const bool together = k_all_heads && !(side == kV && has(k_normalised, kV));
  const uint start = k_all_heads ? r.first[side] : 0, end = k_all_heads ? r.first[side + 1] : r.first[kSides];
  const uint teams = k_all_heads ? simds : r.shares;
  Walk walk = {lane, kSimd, share, teams};
  if (together) walk = walk_of(simd * kSimd + lane, threads.x, r.chunks);
  float scale = 1.0f;
  if (together && has(k_normalised, side)) {
    for (uint part = simd; part < kSimd; part += simds) {
      const Walk of_part = walk_of(part * kSimd + lane, kSimd * kSimd, r.chunks);
      const float sum = squares_of<T, V>(r, sides, token, start, end, of_part);
      if (lane == 0) parts[part] = sum;
    }
    // In place, a thread may write after the barrier what others have read before it.
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    scale = scale_of(sum_over_lanes(parts[lane]), rope_int(end - start) * p.sides[side].head_dim, p);
  }
  for (uint first = start + walk.head; first < end; first += kHeads * walk.head_step) {
    float scales[kHeads];
#pragma unroll
    for (uint i = 0; i < kHeads; i++) {
      const uint h = first + i * walk.head_step;
      scales[i] = scale;
      if (!together && h < end && has(k_normalised, side_of(r, h)))
        scales[i] = scale_of(squares_of<T, V>(r, sides, token, h, h + 1, {lane, kSimd, 0, 1}), p.sides[kQ].head_dim, p);
    }
    for (uint index = walk.chunk; index < r.chunks; index += walk.chunk_step) {
      const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
      const bool rotates = chunk.rotated && first < r.first[kV];
      const CosSin<V> angles = common_angles<T, V>(r, buffers, token, rotates, chunk.index);
#pragma unroll
      for (uint i = 0; i < kHeads; i++) {
        if (first + i * walk.head_step >= end) break;
        const Head<T, ulong> head = head_at(r, sides, token, first + i * walk.head_step);
        if (!head.written || !must_write(head.side, chunk)) continue;
        Numbers<V> weights;
        if (has(k_weighted, head.side)) weights = weights_of<T, V>(r, buffers, head.side, head.index, chunk);
        finish(r, buffers, token, table_row(r, token), head, chunk, read(head.in, head.in_stride, chunk), scales[i],
               weights, angles);
      }
    }
  }
  if (k_v_apart && (!k_all_heads || side == kV)) write_v<T, V>(r, buffers, token, share, teams, lane, true, false);
}
