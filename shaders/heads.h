// Where the heads of a token are, how they are written, and what happens to a v that is not in the list of heads.
#include "sums.h"

namespace rope {

// The heads of one side of a token. The strides lead from a head, or a channel, to the next.
template <typename T, typename I>
struct TokenSide {
  device const T* in;  // of head 0
  device void* out;
  I out_at;  // head 0 is written from element out_at of `out` on
  I in_head, in_channel, out_head, out_channel;
  device const float* scale;  // of head 0, if the side is quantised
  I scale_head;
  device const float* factor;  // of head 0 of q, if there is one
  I factor_head;
};

template <typename T, typename I>
inline TokenSide<T, I> side_of_token(constant TiledParams& r, Buffers<T> x, Token<I> token, int side) {
  constant Side& own = r.args.sides[side];
  const bool to_cache = k_tensors == kSides && side != kQ;
  TokenSide<T, I> of_token;
  of_token.out = of_side(side, x.q_out, x.k_out, x.v_out);
  of_token.out_at =
      offset_of(own.out_strides, to_cache ? token.block : token.b, to_cache ? token.in_block : token.s, I(0));
  of_token.in =
      has(k_in_place, side) ? static_cast<device const T*>(of_token.out) : of_side(side, x.q_in, x.k_in, x.v_in);
  of_token.in += offset_of(own.in_strides, token.b, token.s, I(0));
  of_token.in_head = I(own.in_strides[2]);
  of_token.in_channel = I(own.in_strides[3]);
  of_token.out_head = I(own.out_strides[2]);
  of_token.out_channel = I(own.out_strides[3]);
  of_token.scale = of_side(side, x.q_scale, x.k_scale, x.v_scale);
  of_token.scale_head = I(own.scale_stride);
  of_token.factor = x.q_factor + (k_factor ? offset_of(own.factor_strides, token.b, token.s, I(0)) : I(0));
  of_token.factor_head = I(own.factor_strides[2]);
  return of_token;
}

template <typename T, typename I>
inline void sides_of_token(constant TiledParams& r, Buffers<T> x, Token<I> token,
                           thread TokenSide<T, I> (&sides)[kSides]) {
#pragma unroll
  for (int side = 0; side < kSides; side++) sides[side] = side_of_token(r, x, token, side);
}

// One head of a token. The numbers go to `out` from element offset `out_at` on.
template <typename T, typename I>
struct Head {
  int side;
  I index;  // in its side
  device const T* in;
  device void* out;
  I out_at, in_stride, out_stride;  // the strides lead from a channel to the next
  float scale;                      // of a quantised side
  float factor;                     // of a side that has factors
  bool written;                     // false if the head belongs into a cache, but its token has no cell
};

// Returns whether the heads of a side are multiplied by factors.
inline bool has_factor(int side) { return k_factor && side == kQ; }

template <typename T, typename I>
inline Head<T, I> head_at(TokenSide<T, I> of_token, Token<I> token, int side, I index) {
  Head<T, I> head;
  head.side = side;
  head.index = index;
  head.in = of_token.in + index * of_token.in_head;
  head.out = of_token.out;
  head.out_at = of_token.out_at + index * of_token.out_head;
  head.in_stride = of_token.in_channel;
  head.out_stride = of_token.out_channel;
  head.scale = has(k_quantised, side) ? of_token.scale[index * of_token.scale_head] : 1.0f;
  head.factor = has_factor(side) ? of_token.factor[index * of_token.factor_head] : 1.0f;
  head.written = k_tensors != kSides || side == kQ || (token.valid && !token.pad);
  return head;
}

// Returns the side of head h of the list of heads.
inline int side_of(constant TiledParams& r, uint h) {
  return k_tensors <= kK || h < r.first[kK] ? kQ : k_tensors <= kV || h < r.first[kV] ? kK : kV;
}
template <typename T, typename I>
inline Head<T, I> head_at(constant TiledParams& r, thread const TokenSide<T, I> (&sides)[kSides], Token<I> token,
                          uint h) {
  const int side = side_of(r, h);
  // Each member is chosen by itself: a choice between structs would be one between addresses.
  TokenSide<T, I> of_token;
  of_token.in = of_side(side, sides[kQ].in, sides[kK].in, sides[kV].in);
  of_token.out = of_side(side, sides[kQ].out, sides[kK].out, sides[kV].out);
  of_token.out_at = of_side(side, sides[kQ].out_at, sides[kK].out_at, sides[kV].out_at);
  of_token.in_head = of_side(side, sides[kQ].in_head, sides[kK].in_head, sides[kV].in_head);
  of_token.in_channel = of_side(side, sides[kQ].in_channel, sides[kK].in_channel, sides[kV].in_channel);
  of_token.out_head = of_side(side, sides[kQ].out_head, sides[kK].out_head, sides[kV].out_head);
  of_token.out_channel = of_side(side, sides[kQ].out_channel, sides[kK].out_channel, sides[kV].out_channel);
  of_token.scale = of_side(side, sides[kQ].scale, sides[kK].scale, sides[kV].scale);
  of_token.scale_head = of_side(side, sides[kQ].scale_head, sides[kK].scale_head, sides[kV].scale_head);
  of_token.factor = sides[kQ].factor;
  of_token.factor_head = sides[kQ].factor_head;
  return head_at(of_token, token, side, I(h - of_side(side, 0u, r.first[kK], r.first[kV])));
}

// Writes a chunk of a head. x: its numbers, rounded to T. A quantised side takes the numbers themselves, unless torch's
// operators would round them.
template <typename T, int V, typename I>
inline void write(Elements<T, V> x, Numbers<V> numbers, Head<T, I> head, Chunk<V, I> c) {
  if (has(k_quantised, head.side)) {
    if (k_rounding != kOnce) numbers = to<float>(x);
    Elements<char, V> bytes;
#pragma unroll
    for (int i = 0; i < 2 * V; i++)
      bytes.of[i] = static_cast<char>(quantised(precise::divide(numbers.of[i], head.scale), Int8()));
    write(bytes, static_cast<device char*>(head.out) + head.out_at, head.out_stride, c);
  } else {
    write(x, static_cast<device T*>(head.out) + head.out_at, head.out_stride, c);
  }
}

// Returns whether a chunk of a head must be written. Without a norm and a factor, channels in place that are not
// rotated stay as they are.
template <int V, typename I>
inline bool must_write(int side, Chunk<V, I> chunk) {
  return has(k_normalised, side) || has_factor(side) || chunk.rotated || !has(k_in_place, side);
}

// Returns numbers as eager rounding leaves them, which rounds each step to T.
template <typename T, int V>
inline Numbers<V> rounded_eagerly(Numbers<V> n) {
  if (k_rounding != kOnce) n = to<float>(to<T>(n));
  return n;
}

// Returns a chunk after the norm of its side. scale: 1 / rms
template <typename T, int V>
inline Numbers<V> normalised(Numbers<V> n, int side, float scale, Numbers<V> weights) {
  n = product(n, scale);
  if (k_round_before_weight) n = rounded_eagerly<T>(n);
  if (has(k_weighted, side)) n = product(n, weights);
  return rounded_eagerly<T>(n);
}

// Normalises and rotates a chunk x of a head, and writes it. What nothing changes is copied.
template <typename T, int V, typename I>
inline void finish(constant TiledParams& r, Buffers<T> buffers, Token<I> token, TableRow<I> row, Head<T, I> head,
                   Chunk<V, I> chunk, Elements<T, V> x, float scale, Numbers<V> weights, CosSin<V> angles) {
  const bool rotates = chunk.rotated && head.side != kV;
  Numbers<V> n = to<float>(x);
  if (has(k_normalised, head.side)) n = normalised<T>(n, head.side, scale, weights);
  if (k_by_head && rotates) angles = angles_of<T, V>(r, buffers, token, row, head.index, chunk.index);
  if (rotates) n = rotated_chunk<T>(n, angles);
  if (has_factor(head.side)) n = product(rounded_eagerly<T>(n), head.factor);
  if (rotates || has(k_normalised, head.side) || has_factor(head.side)) x = to<T>(n);
  write(x, n, head, chunk);
}

// Normalises and rotates chunk `index` of the heads of a share; v is copied, unless it has a norm too. With a norm,
// `index` is the lane of a team, all threads of the SIMD group reach every sum, and a thread without a chunk or a token
// (inside is false) adds zeros and writes nothing.
template <typename T, int V, typename I>
inline void rotate_share(constant TiledParams& r, Buffers<T> x, Token<I> token, uint share, uint index, bool inside) {
  const uint end = r.first[kSides];
  const bool active = inside && index < r.chunks;
  const Chunk<V, I> chunk = chunk_at<V, I>(r, active ? index : 0);
  TokenSide<T, I> sides[kSides];
  sides_of_token(r, x, token, sides);
  const TableRow<I> row = table_row(r, token);
  CosSin<V> angles;
  Numbers<V> weights;
  int weights_for = -1;  // the side whose weights these are
  // With a norm the loop ends at the same time for all shares.
  for (uint step = 0; step + (k_normalised ? 0 : share) < end; step += kHeads * r.shares) {
    Head<T, I> heads[kHeads];
    Elements<T, V> given[kHeads];
    bool present[kHeads];  // the head exists, and this chunk of it must be written
#pragma unroll
    for (uint i = 0; i < kHeads; i++) {
      const uint h = share + step + i * r.shares;
      heads[i] = head_at(r, sides, token, min(h, end - 1));
      present[i] = active && h < end && must_write(heads[i].side, chunk);
      given[i] = {};
      if (present[i]) given[i] = read(heads[i].in, heads[i].in_stride, chunk);
    }
    // The first heads are read before the angles, so that both are under way at once.
    if (!k_by_head && step == 0 && active && chunk.rotated && share < r.first[kV])
      angles = angles_of<T, V>(r, x, token, row, I(0), chunk.index);
#pragma unroll
    for (uint i = 0; i < kHeads; i++) {
      const int side = heads[i].side;
      float scale = 1.0f;
      if (k_normalised) {
        const Numbers<V> n = to<float>(given[i]);
        scale = scale_of(sum_over_lanes(sum_of_products(n, n, chunk)), r.args.sides[kQ].head_dim, r.args);
      }
      if (!present[i] || !heads[i].written) continue;
      if (has(k_weighted, side) && side != weights_for) {
        weights = weights_of<T, V>(r, x, side, I(0), chunk);
        weights_for = side;
      }
      finish(r, x, token, row, heads[i], chunk, given[i], scale, weights, angles);
    }
  }
}

// ---- a v that is apart ----

// Copies v of a token. This thread is number `index` of the `threads` threads that share the work; each of them takes
// every threads-th chunk.
template <typename T, int V, typename I>
inline void copy_v(constant TiledParams& r, Buffers<T> x, Token<I> token, uint index, uint threads) {
  constant Side& v = r.args.sides[kV];
  const uint end = uint(v.head_dim), chunks = (end + 2 * V - 1) / (2 * V), all = chunks * uint(v.heads);
  if (!token.valid || token.pad) return;
  const TokenSide<T, I> of_token = side_of_token(r, x, token, kV);
  for (uint i = index; i < all; i += threads) {
    const uint h = i / chunks;
    const I first = I(i - h * chunks) * 2 * V;
    const Chunk<V, I> chunk = {{first, first + V}, I(end - 1), false, 0};
    const Head<T, I> head = head_at(of_token, token, kV, I(h));
    const Elements<T, V> values = read(head.in, head.in_stride, chunk);
    write(values, to<float>(values), head, chunk);
  }
}

}  // namespace rope
