// The backward of the norm followed by the rotation. norm.metal explains teams.
#include "device.h"

namespace rope {
namespace mps {

// A head in the backward.
template <typename T>
struct BackwardHead {
  device const T *gradient, *x;                 // the gradient of the result; the head before the norm
  device T* out;                                // the gradient of x
  ulong gradient_stride, x_stride, out_stride;  // from a channel to the next
};

template <typename T>
inline BackwardHead<T> backward_head_at(constant NormBackward& n, Buffers<T> buffers, device const T* xs, int tensor,
                                        Token<ulong> token, ulong h) {
  constant Operand& o = tensor == kQ ? n.rotate.params.q : n.rotate.params.k;
  constant rope_int* strides = tensor == kQ ? n.q : n.k;
  BackwardHead<T> head;
  head.gradient = head_of(tensor == kQ ? buffers.q_in : buffers.k_in, o.in, token.b, token.s, h);
  head.x = head_of(xs, strides, token.b, token.s, h);
  head.out = head_of(static_cast<device T*>(tensor == kQ ? buffers.q_out : buffers.k_out), o.out, token.b, token.s, h);
  head.gradient_stride = o.in[3];
  head.x_stride = strides[3];
  head.out_stride = o.out[3];
  return head;
}

// The scale and common of the formulas in csrc/args.h, see NormBackwardArgs. x, g and w below are those of the
// formulas. With eager rounding the formulas are those of torch's autograd, in the order in which it computes them:
//   common = -1/2 * sum(g w x) * scale^3 / channels, gradient of x = g w scale + common * 2 x
struct Factors {
  float scale, common;
};
// channels: how many are normalised together; squares: the sum of x^2 over them; products: the sum of g w x.
inline Factors factors_of(float squares, float products, float channels, constant RopeParams& p) {
  const float scale = scale_of(squares, channels, p);
  return {scale, k_rounding == kOnce ? -(scale * scale * (products / channels))
                                     : -0.5f * products * (scale * scale * scale) / channels};
}

// Returns the gradient of x. weighted: g w.
template <int V>
inline Numbers<V> gradient_of(Numbers<V> x, Numbers<V> weighted, Factors f) {
  for (int i = 0; i < 2 * V; i++) {
    x.of[i] = k_rounding == kOnce ? fma(x.of[i], f.common, weighted.of[i]) * f.scale
                                  : weighted.of[i] * f.scale + f.common * (2.0f * x.of[i]);
  }
  return x;
}

// Returns the terms g x scale of the gradient of w. native: w has type T.
template <typename T, int V>
inline Numbers<V> terms_of(Numbers<V> gradient, Numbers<V> x, float scale, bool native) {
  return rounded_eagerly<T>(product(gradient, rounded_eagerly<T>(product(x, scale), native)), native);
}

// A chunk of a head in the backward: x, g and g w.
template <int V>
struct BackwardChunk {
  Numbers<V> x, gradient, weighted;
};

// Reads chunk `index` of head h. The weights are those of a norm over all heads.
template <typename T, int V>
inline BackwardChunk<V> backward_chunk_at(constant TiledParams& r, Buffers<T> buffers, int tensor, Token<ulong> token,
                                          ulong h, uint index, BackwardHead<T> head, Angles<V> angles) {
  const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
  BackwardChunk<V> c;
  c.x = numbers_of(read(head.x, head.x_stride, chunk));
  c.gradient = numbers_of(read(head.gradient, head.gradient_stride, chunk));
  if (k_by_head && chunk.rotated) angles = angles_of<T, V>(r, buffers, token, h, index);
  if (chunk.rotated) c.gradient = rounded_eagerly<T>(rotate<T>(c.gradient, angles));
  const Numbers<V> weights = weights_of<T, V>(r, buffers, tensor, chunk, h);
  c.weighted = rounded_eagerly<T>(product(c.gradient, weights), has_native_weights(tensor));
  return c;
}

}  // namespace mps
}  // namespace rope

#define ROPE_BACKWARD_BUFFERS(T)                                                                                \
  device const T *q_in [[buffer(kBufferQIn)]], device T *q_out [[buffer(kBufferQOut)]],                         \
      device const T *k_in [[buffer(kBufferKIn)]], device T *k_out [[buffer(kBufferKOut)]], ROPE_ANGLE_BUFFERS, \
      ROPE_WEIGHTS, device const T *q_before [[buffer(kBufferQBefore)]],                                        \
      device const T *k_before [[buffer(kBufferKBefore)]], device float *sums [[buffer(kBufferSums)]]
#define ROPE_BACKWARD_BUFFERS_PASSED    \
  {q_in,                                \
   k_in,                                \
   nullptr,                             \
   q_out,                               \
   k_out,                               \
   nullptr,                             \
   ROPE_IF(k_has_cos, cos),             \
   ROPE_IF(k_has_sin, sin),             \
   ROPE_IF(k_has_inv_freq, inv_freq),   \
   ROPE_IF(k_has_positions, positions), \
   nullptr,                             \
   q_weight,                            \
   k_weight}

// The backward. A threadgroup takes one part of q (group.y = 0) or of k (1): it writes the gradients of these heads,
// and its part of the gradient of the weight into sums [2, parts, head_dim]. sum_parts adds up the parts.
template <typename T, int V>
[[kernel]] void norm_backward(constant NormBackward& n [[buffer(kBufferParams)]], ROPE_BACKWARD_BUFFERS(T),
                              threadgroup float* shared [[threadgroup(0)]],
                              uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]],
                              uint2 threads [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
                              uint thread_of_simd [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_BACKWARD_BUFFERS_PASSED;
  constant TiledParams& r = n.rotate;
  constant RopeParams& p = r.params;
  const int tensor = group.y == 0 ? kQ : kK;
  device const T* xs = tensor == kQ ? q_before : k_before;
  const uint heads = uint(tensor == kQ ? p.q.heads : p.k.heads), per_token = (heads + kHeads - 1) / kHeads;
  const bool native = has_native_weights(tensor);
  const TeamLane self = team_lane_of(simd, thread_of_simd);
  const uint teams = threads.x / uint(k_lanes);
  const bool active = self.lane < r.chunks;
  const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, active ? self.lane : 0);
  const ulong begin = ulong(group.x) * n.part_items,
              end = min(begin + n.part_items, ulong(tensor == kQ ? n.q_items : n.k_items));
  Numbers<V> weights;
  if (active) weights = weights_of<T, V>(r, buffers, tensor, chunk);
  Sum total[2 * V];
  for (ulong first_item = begin; first_item < end; first_item += teams) {
    const bool inside = first_item + self.team < end;
    const ulong item = inside ? first_item + self.team : begin, t = item / per_token, b = t / ulong(p.seq);
    const Token<ulong> token = token_at<T, ulong>(r, buffers, b, t - b * ulong(p.seq));
    Angles<V> angles;
    if (!k_by_head && active && chunk.rotated) angles = angles_of<T, V>(r, buffers, token, ulong(0), self.lane);
    for (uint i = 0; i < kHeads; i++) {
      const uint h = uint(item - t * per_token) * kHeads + i;
      const bool present = active && inside && h < heads;
      const BackwardHead<T> head = backward_head_at<T>(n, buffers, xs, tensor, token, ulong(min(h, heads - 1)));
      Numbers<V> x, gradient, weighted;
      float squares = 0.0f, products = 0.0f;
      if (present) {
        x = numbers_of(read(head.x, head.x_stride, chunk));
        gradient = numbers_of(read(head.gradient, head.gradient_stride, chunk));
        if (k_by_head && chunk.rotated) angles = angles_of<T, V>(r, buffers, token, ulong(h), self.lane);
        if (chunk.rotated) gradient = rounded_eagerly<T>(rotate<T>(gradient, angles));
        weighted = rounded_eagerly<T>(product(gradient, weights), native);
        squares = dot(x, x, chunk);
        products = dot(weighted, x, chunk);
      }
      squares = sum_over_lanes(squares);
      products = sum_over_lanes(products);
      if (present) {
        const Factors f = factors_of(squares, products, float(p.head_dim), p);
        write(rounded<T, V>(gradient_of(x, weighted, f)), head.out, head.out_stride, chunk);
        const Numbers<V> terms = terms_of<T>(gradient, x, f.scale, native);
        for (int j = 0; j < 2 * V; j++) total[j].add(terms.of[j]);
      }
    }
  }
  // The first team adds the sums of all teams, in their order.
  threadgroup float* own = shared + (self.team * uint(k_lanes) + self.lane) * (2 * V);
  for (int j = 0; j < 2 * V; j++) own[j] = total[j].value();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (self.team != 0 || !active) return;
  device float* to = sums + (ulong(group.y) * groups.x + group.x) * ulong(p.head_dim);
  for (int j = 0; j < (chunk.whole ? 2 * V : V); j++) {
    Sum sum;
    for (uint team = 0; team < teams; team++) sum.add(shared[(team * uint(k_lanes) + self.lane) * (2 * V) + j]);
    to[chunk.channel(j)] = sum.value();
  }
}

// The backward for heads of any width, with one SIMD group in a threadgroup. It takes kSimd heads at a time. It first
// reads them to compute the factors of each head; thread i keeps the factors of head i. Then it goes through the
// chunks, kSimd at a time: each thread takes one chunk, reads it again in all of these heads, writes their gradients,
// and adds to the sums of the weight's gradient.
template <typename T>
[[kernel]] void norm_backward_wide(constant NormBackward& n [[buffer(kBufferParams)]], ROPE_BACKWARD_BUFFERS(T),
                                   uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_BACKWARD_BUFFERS_PASSED;
  constant TiledParams& r = n.rotate;
  constant RopeParams& p = r.params;
  const int tensor = group.y == 0 ? kQ : kK;
  const bool native = has_native_weights(tensor);
  device const T* xs = tensor == kQ ? q_before : k_before;
  const ulong heads = ulong(tensor == kQ ? p.q.heads : p.k.heads), items = ulong(tensor == kQ ? n.q_items : n.k_items);
  const ulong begin = ulong(group.x) * n.part_items, end = min(begin + n.part_items, items);
  device float* to = sums + (ulong(group.y) * groups.x + group.x) * ulong(p.head_dim);
  for (uint index = lane; index < r.chunks; index += kSimd) {
    const Chunk<1, ulong> chunk = chunk_at<1, ulong>(r, index);
    to[chunk.first] = to[chunk.second] = 0.0f;
  }
  for (ulong some = begin; some < end; some += kSimd) {
    const uint count = uint(min(end - some, ulong(kSimd)));
    Factors factors = {0.0f, 0.0f};
    for (uint i = 0; i < count; i++) {
      const ulong t = (some + i) / heads, h = some + i - t * heads, b = t / ulong(p.seq);
      const Token<ulong> token = token_at<T, ulong>(r, buffers, b, t - b * ulong(p.seq));
      const BackwardHead<T> head = backward_head_at<T>(n, buffers, xs, tensor, token, h);
      Sum squares, products;
      for (uint index = lane; index < r.chunks; index += kSimd) {
        const Chunk<1, ulong> chunk = chunk_at<1, ulong>(r, index);
        const Numbers<1> x = numbers_of(read(head.x, head.x_stride, chunk));
        Numbers<1> gradient = numbers_of(read(head.gradient, head.gradient_stride, chunk));
        if (chunk.rotated)
          gradient = rounded_eagerly<T>(rotate<T>(gradient, angles_of<T, 1>(r, buffers, token, h, index)));
        const Numbers<1> weights = weights_of<T, 1>(r, buffers, tensor, chunk);
        squares.add(dot(x, x, chunk));
        products.add(dot(rounded_eagerly<T>(product(gradient, weights), native), x, chunk));
      }
      const Factors f =
          factors_of(sum_over_lanes(squares.value()), sum_over_lanes(products.value()), float(p.head_dim), p);
      if (i == lane) factors = f;
    }
    for (uint first = 0; first < r.chunks; first += kSimd) {  // no thread may leave: they exchange factors
      const bool active = first + lane < r.chunks;
      const uint index = active ? first + lane : 0;
      const Chunk<1, ulong> chunk = chunk_at<1, ulong>(r, index);
      const Numbers<1> weights = weights_of<T, 1>(r, buffers, tensor, chunk);
      Sum total[2];
      for (uint i = 0; i < count; i++) {
        const Factors f = {simd_shuffle(factors.scale, ushort(i)), simd_shuffle(factors.common, ushort(i))};
        if (active) {
          const ulong t = (some + i) / heads, h = some + i - t * heads, b = t / ulong(p.seq);
          const Token<ulong> token = token_at<T, ulong>(r, buffers, b, t - b * ulong(p.seq));
          const BackwardHead<T> head = backward_head_at<T>(n, buffers, xs, tensor, token, h);
          const Numbers<1> x = numbers_of(read(head.x, head.x_stride, chunk));
          Numbers<1> gradient = numbers_of(read(head.gradient, head.gradient_stride, chunk));
          if (chunk.rotated)
            gradient = rounded_eagerly<T>(rotate<T>(gradient, angles_of<T, 1>(r, buffers, token, h, index)));
          const Numbers<1> weighted = rounded_eagerly<T>(product(gradient, weights), native);
          write(rounded<T, 1>(gradient_of(x, weighted, f)), head.out, head.out_stride, chunk);
          const Numbers<1> terms = terms_of<T>(gradient, x, f.scale, native);
          for (int j = 0; j < 2; j++) total[j].add(terms.of[j]);
        }
      }
      if (active) {
        to[chunk.first] += total[0].value();
        if (chunk.whole) to[chunk.second] += total[1].value();
      }
    }
  }
}

// The backward of a norm over all heads. A part is some neighbouring tokens of q or of k, which the threadgroup takes
// kSimd at a time. First each SIMD group computes the factors of its tokens. Then the threads divide the chunks of all
// heads: each reads its chunks again in all of these tokens, writes their gradients, and adds to the sums of the
// weights' gradients. So no order follows from the number of threads.
template <typename T, int V>
[[kernel]] void norm_backward_over_heads(constant NormBackward& n [[buffer(kBufferParams)]], ROPE_BACKWARD_BUFFERS(T),
                                         threadgroup float* factors [[threadgroup(0)]],
                                         uint2 group [[threadgroup_position_in_grid]],
                                         uint2 groups [[threadgroups_per_grid]],
                                         uint2 threads [[threads_per_threadgroup]],
                                         uint simd [[simdgroup_index_in_threadgroup]],
                                         uint lane [[thread_index_in_simdgroup]]) {
  const Buffers<T> buffers = ROPE_BACKWARD_BUFFERS_PASSED;
  constant TiledParams& r = n.rotate;
  constant RopeParams& p = r.params;
  const int tensor = group.y == 0 ? kQ : kK;
  const bool native = has_native_weights(tensor);
  device const T* xs = tensor == kQ ? q_before : k_before;
  const uint heads = uint(tensor == kQ ? p.q.heads : p.k.heads);
  const ulong channels = ulong(heads) * ulong(p.head_dim);
  const ulong begin = ulong(group.x) * n.part_items,
              end = min(begin + n.part_items, ulong(tensor == kQ ? n.q_items : n.k_items));
  device float* to = sums + ulong(group.x) * channels;
  if (tensor == kK) to += ulong(groups.x) * ulong(p.q.heads * p.head_dim);
  const Walk walk = walk_of(lane, kSimd, r.chunks), walk_of_group = walk_of(simd * kSimd + lane, threads.x, r.chunks);
  for (ulong some = begin; some < end; some += kSimd) {
    const uint count = uint(min(end - some, ulong(kSimd)));
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the factors of the tokens before are not needed any more
    for (uint i = simd; i < count; i += threads.x / kSimd) {
      const ulong b = (some + i) / ulong(p.seq);
      const Token<ulong> token = token_at<T, ulong>(r, buffers, b, some + i - b * ulong(p.seq));
      Sum squares, products;
      for (uint index = walk.chunk; index < r.chunks; index += walk.chunk_step) {
        const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
        Angles<V> angles;
        if (!k_by_head && chunk.rotated) angles = angles_of<T, V>(r, buffers, token, ulong(0), index);
        for (uint h = walk.head; h < heads; h += walk.head_step) {
          const BackwardHead<T> head = backward_head_at<T>(n, buffers, xs, tensor, token, ulong(h));
          const BackwardChunk<V> c = backward_chunk_at<T, V>(r, buffers, tensor, token, ulong(h), index, head, angles);
          squares.add(dot(c.x, c.x, chunk));
          products.add(dot(c.weighted, c.x, chunk));
        }
      }
      const Factors f =
          factors_of(sum_over_lanes(squares.value()), sum_over_lanes(products.value()), float(channels), p);
      if (lane == 0) {
        factors[2 * i] = f.scale;
        factors[2 * i + 1] = f.common;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint index = walk_of_group.chunk; index < r.chunks; index += walk_of_group.chunk_step) {
      const Chunk<V, ulong> chunk = chunk_at<V, ulong>(r, index);
      for (uint h = walk_of_group.head; h < heads; h += walk_of_group.head_step) {
        Sum total[2 * V];
        for (uint i = 0; i < count; i++) {
          const ulong b = (some + i) / ulong(p.seq);
          const Token<ulong> token = token_at<T, ulong>(r, buffers, b, some + i - b * ulong(p.seq));
          const BackwardHead<T> head = backward_head_at<T>(n, buffers, xs, tensor, token, ulong(h));
          Angles<V> angles;
          if (!k_by_head && chunk.rotated) angles = angles_of<T, V>(r, buffers, token, ulong(0), index);
          const BackwardChunk<V> c = backward_chunk_at<T, V>(r, buffers, tensor, token, ulong(h), index, head, angles);
          const Factors f = {factors[2 * i], factors[2 * i + 1]};
          write(rounded<T, V>(gradient_of(c.x, c.weighted, f)), head.out, head.out_stride, chunk);
          const Numbers<V> terms = terms_of<T>(c.gradient, c.x, f.scale, native);
          for (int j = 0; j < 2 * V; j++) total[j].add(terms.of[j]);
        }
        device float* row = to + ulong(h) * ulong(p.head_dim);
        for (int j = 0; j < (chunk.whole ? 2 * V : V); j++) {
          device float* sum = row + chunk.channel(j);
          *sum = some == begin ? total[j].value() : *sum + total[j].value();
        }
      }
    }
  }
}

// Writes the gradients of the weights: the sums of the parts, added in the order of the parts. at: the channel; 0 for
// q, 1 for k.
template <typename T>
[[kernel]] void sum_parts(constant SumParts& s [[buffer(0)]], device const float* sums [[buffer(1)]],
                          device void* q_weight_grad [[buffer(2)]], device void* k_weight_grad [[buffer(3)]],
                          uint2 at [[thread_position_in_grid]]) {
  const uint channels = at.y == 0 ? s.q_channels : s.k_channels;
  if (at.x >= channels) return;
  device const float* own = sums + (at.y == 0 ? 0 : ulong(s.parts) * s.q_channels) + at.x;
  Sum sum;
  for (uint part = 0; part < s.parts; part++) sum.add(own[ulong(part) * channels]);
  device void* to = at.y == 0 ? q_weight_grad : k_weight_grad;
  if (has_native_weights(at.y == 0 ? kQ : kK)) {
    static_cast<device T*>(to)[at.x] = static_cast<T>(sum.value());
  } else {
    static_cast<device float*>(to)[at.x] = sum.value();
  }
}

#define ROPE_NORM_BACKWARD(T)                                                       \
  ROPE_KERNEL("norm_backward_" #T "_v4", norm_backward<T, 4>)                       \
  ROPE_KERNEL("norm_backward_" #T "_v1", norm_backward<T, 1>)                       \
  ROPE_KERNEL("norm_backward_wide_" #T, norm_backward_wide<T>)                      \
  ROPE_KERNEL("norm_backward_over_heads_" #T "_v4", norm_backward_over_heads<T, 4>) \
  ROPE_KERNEL("norm_backward_over_heads_" #T "_v1", norm_backward_over_heads<T, 1>) \
  ROPE_KERNEL("sum_parts_" #T, sum_parts<T>)
ROPE_NORM_BACKWARD(float)
ROPE_NORM_BACKWARD(half)
ROPE_NORM_BACKWARD(bfloat)
