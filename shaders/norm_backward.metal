// The backward of the norm followed by the rotation. norm.metal explains teams.
//
// A threadgroup takes one part of q (at.y = 0) or of k (1): it writes the gradients of these heads, and its part of
// the gradient of the weight into `sums`, which holds the parts of q, [parts, channels], and then those of k. sum_parts
// adds up the parts.
#include "heads.h"

namespace rope {

// Returns `common` of the formulas in csrc/args.h. channels: how many are normalised together; products: the sum of
// g w x over them.
inline float common_of(float scale, float products, rope_int channels) {
  return -(scale * scale * precise::divide(products, float(channels)));
}

// A chunk of a head in the backward: x, g and g w.
template <int V>
struct BackwardChunk {
  Numbers<V> x, gradient, weighted;
};

// Reads a chunk of a head. x: q or k before the norm.
template <typename T, int V>
inline BackwardChunk<V> backward_chunk_at(constant TiledParams& r, Buffers<T> buffers, device const T* x,
                                          Token<ulong> token, Head<T, ulong> head, Chunk<V, ulong> chunk,
                                          CosSin<V> angles, Numbers<V> weights) {
  constant rope_int* strides = r.args.sides[head.side].before_strides;
  BackwardChunk<V> c;
  c.x = to<float>(read(x + offset_of(strides, token.b, token.s, head.index), ulong(strides[3]), chunk));
  c.gradient = to<float>(read(head.in, head.in_stride, chunk));
  if (k_by_head && chunk.rotated)
    angles = angles_of<T, V>(r, buffers, token, table_row(r, token), head.index, chunk.index);
  if (chunk.rotated) c.gradient = rotated_chunk<T>(c.gradient, angles);
  if (has_factor(head.side)) c.gradient = product(c.gradient, head.factor);
  c.weighted = product(c.gradient, weights);
  return c;
}

// Writes the gradient of x, and adds the terms of the gradient of w to the sums of the channels.
template <typename T, int V>
inline void finish_backward(BackwardChunk<V> c, float scale, float common, Head<T, ulong> head, Chunk<V, ulong> chunk,
                            thread Sum (&total)[2 * V]) {
  Numbers<V> gradient;
  for (int i = 0; i < 2 * V; i++) gradient.of[i] = fma(c.x.of[i], common, c.weighted.of[i]) * scale;
  write(to<T>(gradient), gradient, head, chunk);
  const Numbers<V> terms = product(c.gradient, product(c.x, scale));
  for (int i = 0; i < 2 * V; i++) total[i].add(terms.of[i]);
}

}  // namespace rope

#define ROPE_BACKWARD_ARGUMENTS(T)                                           \
  constant TiledParams &r [[buffer(kBufferParams)]],                         \
      ROPE_ARGUMENTS(T) device const T *q_before [[buffer(kBufferQBefore)]], \
      device const T *k_before [[buffer(kBufferKBefore)]], device float *sums [[buffer(kBufferSums)]]

// Each head is normalised by itself. An item is kHeads neighbouring heads.
template <typename T, int V>
ROPE_KERNEL(kThreads)
void norm_backward_kernel(ROPE_BACKWARD_ARGUMENTS(T), threadgroup float* shared [[threadgroup(0)]],
                          uint2 at [[threadgroup_position_in_grid]], uint2 grid [[threadgroups_per_grid]],
                          uint2 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]]) {
  const Buffers<T> buffers = ROPE_ARGUMENTS_PASSED;
  constant Args& p = r.args;
  const int side = int(at.y);
  device const T* x = side == kQ ? q_before : k_before;
  const ulong head_dim = ulong(p.sides[kQ].head_dim), begin = ulong(at.x) * r.part_items,
              end = min(begin + r.part_items, ulong(r.items[side]));
  device float* own_sums = sums + (ulong(at.y) * grid.x + at.x) * head_dim;
  const uint heads = uint(p.sides[side].heads), per_token = (heads + kHeads - 1) / kHeads;
  const uint lanes = uint(k_lanes), teams = threads.x / lanes, own_team = index / lanes, lane = index % lanes;
  const bool active = lane < r.chunks;
  const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, active ? lane : 0);
  Numbers<V> weights;
  if (active) weights = weights_of<T, V>(r, buffers, side, ulong(0), chunk);
  Sum total[2 * V];
  for (ulong first_item = begin; first_item < end; first_item += teams) {
    const bool inside = first_item + own_team < end;
    const ulong item = inside ? first_item + own_team : begin, t = item / per_token;
    const Token<ulong> token = token_of<ulong>(r, buffers, uint(t));
    const TokenSide<T, ulong> of_token = side_of_token(r, buffers, token, side);
    const CosSin<V> angles = common_angles<T, V>(r, buffers, token, active && chunk.rotated, lane);
    for (uint i = 0; i < kHeads; i++) {
      const uint h = uint(item - t * per_token) * kHeads + i;
      const bool present = active && inside && h < heads;
      const Head<T, ulong> head = head_at(of_token, token, side, ulong(min(h, heads - 1)));
      BackwardChunk<V> c;
      float squares = 0.0f, products = 0.0f;
      if (present) {
        c = backward_chunk_at(r, buffers, x, token, head, chunk, angles, weights);
        squares = sum_of_products(c.x, c.x, chunk);
        products = sum_of_products(c.weighted, c.x, chunk);
      }
      squares = sum_over_lanes(squares);
      products = sum_over_lanes(products);
      const float scale = scale_of(squares, p.sides[kQ].head_dim, p);
      if (present) finish_backward(c, scale, common_of(scale, products, p.sides[kQ].head_dim), head, chunk, total);
    }
  }
  // The first team adds the sums of all teams, in their order.
  threadgroup float* of_thread = shared + index * (2 * V);
  for (int j = 0; j < 2 * V; j++) of_thread[j] = total[j].value();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (own_team != 0 || !active) return;
  for (int j = 0; j < 2 * V; j++) {
    Sum sum;
    for (uint team = 0; team < teams; team++) sum.add(shared[(team * lanes + lane) * (2 * V) + j]);
    if (exists(chunk, j)) own_sums[channel_of(chunk, j)] = sum.value();
  }
}

// Does the same for wide groups: an item is a head of any width, or all heads of q or of k of a token. The threadgroup
// takes kSimd items at a time. First each SIMD group computes the factors of its items. Then the threads divide the
// chunks of an item: each reads its chunks again in all of these items, writes their gradients, and adds to the sums of
// the weights' gradients. So no order follows from the number of threads.
template <typename T, int V>
ROPE_KERNEL(kSharedThreads)
void norm_backward_wide_kernel(ROPE_BACKWARD_ARGUMENTS(T), threadgroup float* factors [[threadgroup(0)]],
                               uint2 at [[threadgroup_position_in_grid]], uint2 grid [[threadgroups_per_grid]],
                               uint2 threads [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_ARGUMENTS_PASSED;
  constant Args& p = r.args;
  const int side = int(at.y);
  device const T* x = side == kQ ? q_before : k_before;
  const ulong head_dim = ulong(p.sides[kQ].head_dim), all_heads = ulong(p.sides[side].heads);
  const ulong heads = k_all_heads ? all_heads : 1, items_of_token = k_all_heads ? 1 : all_heads;
  const ulong begin = ulong(at.x) * r.part_items, end = min(begin + r.part_items, ulong(r.items[side]));
  device float* own_sums = sums + at.x * heads * head_dim;
  if (side == kK) own_sums += grid.x * (k_all_heads ? ulong(p.sides[kQ].heads) : 1) * head_dim;
  const Walk walk = walk_of(lane, kSimd, r.chunks), walk_of_all = walk_of(simd * kSimd + lane, threads.x, r.chunks);
  ulong some = begin;
  do {  // once at least, because a part without items has sums too
    const uint count = some < end ? uint(min(end - some, ulong(kSimd))) : 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the factors of the items before are not needed any more
    for (uint i = simd; i < count; i += threads.x / kSimd) {
      const ulong t = (some + i) / items_of_token, first_head = some + i - t * items_of_token;
      const Token<ulong> token = token_of<ulong>(r, buffers, uint(t));
      const TokenSide<T, ulong> of_token = side_of_token(r, buffers, token, side);
      Sum squares, products;
      for (uint index = walk.chunk; index < r.chunks; index += walk.chunk_step) {
        const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
        const CosSin<V> angles = common_angles<T, V>(r, buffers, token, chunk.rotated, index);
        for (ulong h = walk.head; h < heads; h += walk.head_step) {
          const Head<T, ulong> head = head_at(of_token, token, side, first_head + h);
          const Numbers<V> weights = weights_of<T, V>(r, buffers, side, head.index, chunk);
          const BackwardChunk<V> c = backward_chunk_at(r, buffers, x, token, head, chunk, angles, weights);
          squares.add(sum_of_products(c.x, c.x, chunk));
          products.add(sum_of_products(c.weighted, c.x, chunk));
        }
      }
      const float all_squares = sum_over_lanes(squares.value()), all_products = sum_over_lanes(products.value());
      const float scale = scale_of(all_squares, rope_int(heads * head_dim), p);
      if (lane == 0) {
        factors[2 * i] = scale;
        factors[2 * i + 1] = common_of(scale, all_products, rope_int(heads * head_dim));
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint index = walk_of_all.chunk; index < r.chunks; index += walk_of_all.chunk_step) {
      const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
      for (ulong h = walk_of_all.head; h < heads; h += walk_of_all.head_step) {
        const Numbers<V> weights = weights_of<T, V>(r, buffers, side, h, chunk);
        Sum total[2 * V];
        for (uint i = 0; i < count; i++) {
          const ulong t = (some + i) / items_of_token, first_head = some + i - t * items_of_token;
          const Token<ulong> token = token_of<ulong>(r, buffers, uint(t));
          const TokenSide<T, ulong> of_token = side_of_token(r, buffers, token, side);
          const Head<T, ulong> head = head_at(of_token, token, side, first_head + h);
          const CosSin<V> angles = common_angles<T, V>(r, buffers, token, chunk.rotated, index);
          const BackwardChunk<V> c = backward_chunk_at(r, buffers, x, token, head, chunk, angles, weights);
          finish_backward(c, factors[2 * i], factors[2 * i + 1], head, chunk, total);
        }
        for (int j = 0; j < 2 * V; j++) {
          if (!exists(chunk, j)) continue;
          device float* sum = own_sums + h * head_dim + channel_of(chunk, j);
          *sum = some == begin ? total[j].value() : *sum + total[j].value();
        }
      }
    }
    some += kSimd;
  } while (some < end);
}

// Writes the gradients of the weights: the sums of the parts, added in the order of the parts. at: the channel; 0 for
// q, 1 for k.
template <typename T>
ROPE_KERNEL(kThreads)
void sum_parts_kernel(constant TiledParams& r [[buffer(kBufferParams)]], device const float* sums [[buffer(1)]],
                      device void* q_weight_grad [[buffer(2)]], device void* k_weight_grad [[buffer(3)]],
                      uint2 at [[thread_position_in_grid]]) {
  const uint channels = r.channels[at.y];
  if (at.x >= channels) return;
  device const float* own = sums + (at.y == 0 ? 0 : ulong(r.parts) * r.channels[kQ]) + at.x;
  Sum sum;
  for (uint part = 0; part < r.parts; part++) sum.add(own[ulong(part) * channels]);
  device void* to = at.y == 0 ? q_weight_grad : k_weight_grad;
  if (has(k_native_weights, int(at.y))) {
    static_cast<device T*>(to)[at.x] = static_cast<T>(sum.value());
  } else {
    static_cast<device float*>(to)[at.x] = sum.value();
  }
}
