// The gradients of cos and sin: the gradient of a table row is a sum over all tokens that the row rotated.
#include "heads.h"

constant bool k_is_listed = k_listed != 0;

// at: the rotated chunk; the portion of the work; the table row. A table by head has a row for each head of a token, to
// which only this head of q and of k contribute. The threads with the same chunk and row are in one
// threadgroup. Their work is a list of items; an item is kHeads neighbouring heads of one token. Each thread takes
// every size.y-th item, which are its portion, and sums over them. After the barrier these threads divide the 2V sums,
// V of cos and V of sin, among themselves, and each thread adds up its sums over all portions, in the order of the
// portions.
//
// csrc/params.h explains the entries of a row, and TableBackwardArgs in csrc/args.h has the formulas. q_in and k_in
// hold the gradients of the results, (g, h) in the formulas, and q_before and k_before the heads before the rotation,
// (a, b).
template <typename T, int V, typename I>
ROPE_KERNEL(kSharedThreads)
void table_backward_kernel(constant TableBackward& n [[buffer(kBufferParams)]],
                           device const T* q_in [[buffer(kBufferQIn)]],
                           device const T* k_in [[buffer(kBufferKIn), function_constant(k_has_k_in)]],
                           device const T* q_before [[buffer(kBufferQBefore)]],
                           device const T* k_before [[buffer(kBufferKBefore), function_constant(k_has_k_in)]],
                           device const long* order [[buffer(kBufferOrder), function_constant(k_is_listed)]],
                           device const long* starts [[buffer(kBufferStarts), function_constant(k_is_listed)]],
                           device void* cos_grad [[buffer(kBufferCosGrad)]],
                           device void* sin_grad [[buffer(kBufferSinGrad)]],
                           threadgroup float* shared [[threadgroup(0)]], uint3 at [[thread_position_in_grid]],
                           uint3 size [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]]) {
  constant TiledParams& r = n.rotate;
  constant Layout& p = r.params;
  constant TokensOfRows& tokens = n.tokens;
  const Chunk<V, I> chunk = chunk_at<V, I>(r, at.x);
  // The heads of q and of k from first_head on belong to the row: first_of_k heads of q, and then those of k.
  const uint row_heads = uint(p.sides[kQ].heads), row = k_by_head ? at.z / row_heads : at.z;
  const uint first_head = k_by_head ? at.z - row * row_heads : 0;
  const uint heads = k_by_head ? uint(k_tensors) : r.first[kSides], first_of_k = k_by_head ? 1 : r.first[kK];
  long begin, end;  // the entries of the row
  if (k_listed) {
    begin = starts[row];
    end = starts[row + 1];
  } else {
    begin = long(row) - tokens.shift;
    end = begin + (begin >= 0 && begin < tokens.entries);
  }
  const I items_of_token = (heads + kHeads - 1) / kHeads, sequences = I(tokens.sequences), seq = I(p.seq);
  const I items = I(end - begin) * sequences * items_of_token;
  Sum cos[V], sin[V];
  for (I item = at.y; item < items; item += size.y) {
    const I nth_token = item / items_of_token, nth_entry = nth_token / sequences;
    const I entry = k_listed ? I(order[begin + long(nth_entry)]) : I(begin);
    const I token = entry + (nth_token - nth_entry * sequences) * seq, b = token / seq, s = token - b * seq;
    const uint first = uint(item - nth_token * items_of_token) * kHeads, end_head = min(first + kHeads, heads);
    for (uint h = first; h < end_head; h++) {
      const int side = k_tensors > kK && h >= first_of_k ? kK : kQ;
      const I own = first_head + (side == kK ? h - first_of_k : h);
      constant rope_int *given_strides = p.sides[side].in, *strides = n.before[side];
      device const T* given_at = (side == kK ? k_in : q_in) + offset_of(given_strides, b, s, own);
      device const T* x_at = (side == kK ? k_before : q_before) + offset_of(strides, b, s, own);
      const Numbers<V> given = to<float>(read(given_at, I(given_strides[3]), chunk));
      const Numbers<V> x = to<float>(read(x_at, I(strides[3]), chunk));
      // one and other: the two channels of pair i. The terms are g a + h b for cos, and h a - g b for sin.
      for (int i = 0; i < V; i++) {
        const int one = first_channel(i, k_interleaved), other = one + partner_distance(V, k_interleaved);
        cos[i].add(rotated(given.of[one], given.of[other], x.of[one], x.of[other]));
        sin[i].add(rotated(given.of[other], given.of[one], x.of[one], -x.of[other]));
      }
    }
  }
  // first_portion: the thread that has the same chunk and row, and portion 0.
  const uint threads = size.x * size.y * size.z, first_portion = index - at.y * size.x;
  for (int i = 0; i < V; i++) {
    shared[uint(i) * threads + index] = cos[i].value();
    shared[uint(V + i) * threads + index] = sin[i].value();
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint j = at.y; j < 2 * V; j += size.y) {
    Sum sum;
    for (uint portion = 0; portion < size.y; portion++) sum.add(shared[j * threads + first_portion + portion * size.x]);
    const bool of_sin = j >= V;
    float value = sum.value();
    if (k_scaled) value = scaled(value, p.factor_hi, p.factor_lo);
    if (k_inverse && of_sin) value = -value;
    device void* grad = of_sin ? sin_grad : cos_grad;
    const ulong to = ulong(at.z) * ulong(p.rotary_dim / 2) + at.x * V + j % V;
    if (k_native_tables) {
      static_cast<device T*>(grad)[to] = static_cast<T>(value);
    } else {
      static_cast<device float*>(grad)[to] = value;
    }
  }
}
