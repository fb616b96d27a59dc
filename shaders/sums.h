// How numbers are summed, and what a norm computes from the sums.
#include "chunks.h"

namespace rope {

// A sum with Kahan's compensation, because the numbers that are added may be much smaller than the sum.
struct Sum {
  float sum = 0.0f, over = 0.0f;  // over: by how much the sum is too large

  void add(float x) {
    // fma instead of x - over: the compiler could contract the minus with the multiplication that computed x.
    const float y = fma(over, -1.0f, x), larger = sum + y;
    over = isfinite(larger) ? (larger - sum) - y : 0.0f;  // a sum that overflows stays infinite, without a NaN
    sum = larger;
  }
  float value() const { return sum - over; }
};

// Returns the sum over the lanes of a team, to each of its lanes. All threads of the SIMD group have to call it.
inline float sum_over_lanes(float sum) {
  for (int lane = 1; lane < k_lanes; lane *= 2) sum += simd_shuffle_xor(sum, ushort(lane));
  return sum;
}

// Returns the dot product of two chunks c. A chunk with V = 8 consists of two chunks as there are with V = 4, whose
// products are added in the order in which two lanes would add them. So the bits of a norm do not depend on whether V
// is 8 or 4.
template <int V, typename I>
inline float sum_of_products(Numbers<V> x, Numbers<V> y, Chunk<V, I> c) {
  const int part = V < 4 ? 2 * V : 8;
  const bool split = V == 8 && c.rotated && !k_interleaved;  // each part has half of its channels in each vector
  float total = 0.0f;
  for (int begin = 0; begin < 2 * V; begin += part) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < part; i++) {
      const int at = split ? (i < 4 ? 0 : V) + begin / 2 + i % 4 : begin + i;
      if (at < V || is_whole(c)) sum[i % 4] = fma(x.of[at], y.of[at], sum[i % 4]);
    }
    total = total + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  return total;
}

// Returns the weights of a norm for the channels of a chunk. head: matters only if the norm is over all heads. Those of
// channels past the last one have no meaning.
template <typename T, int V, typename I>
inline Numbers<V> weights_of(constant TiledParams& r, Buffers<T> x, int side, I head, Chunk<V, I> c) {
  constant rope_int* strides = r.args.sides[side].weight_strides;
  device const void* from = side == kQ ? x.q_weight : side == kK ? x.k_weight : x.v_weight;
  const I row = head * I(strides[0]), stride = I(strides[1]);
  const bool native = has(k_native_weights, side), vectors = k_weight_vectors != 0;
  Numbers<V> w;
  if (c.at[1] + I(V - 1) <= c.last) {
    read_parameters<T, V>(native, from, row + c.at[0] * stride, stride, vectors, w.of);
    read_parameters<T, V>(native, from, row + c.at[1] * stride, stride, vectors, w.of + V);
  } else {  // the head ends within the chunk
    for (int i = 0; i < 2 * V; i++) {
      const I channel = min(channel_of(c, i), c.last);
      read_parameters<T, 1>(native, from, row + channel * stride, stride, false, w.of + i);
    }
  }
  for (int i = 0; i < 2 * V; i++) w.of[i] = w.of[i] + r.args.narrow_weight_offset;
  return w;
}

// Multiplies the numbers of a chunk by those of another chunk, or by one factor.
template <int V>
inline Numbers<V> product(Numbers<V> x, Numbers<V> y) {
  for (int i = 0; i < 2 * V; i++) x.of[i] = x.of[i] * y.of[i];
  return x;
}
template <int V>
inline Numbers<V> product(Numbers<V> x, float y) {
  for (int i = 0; i < 2 * V; i++) x.of[i] = x.of[i] * y;
  return x;
}

// Returns the factor by which the norm multiplies every channel: 1 / sqrt(mean of the squares + norm_eps). channels:
// how many are normalised together.
inline float scale_of(float squares, rope_int channels, constant Args& p) {
  return precise::divide(1.0f, precise::sqrt(precise::divide(squares, float(channels)) + p.narrow_eps));
}

// How threads divide the chunks of many heads, so that neighbouring threads take neighbouring chunks, and a thread has
// few chunks of many heads: it takes the chunks chunk, chunk + chunk_step ... of the heads head, head + head_step ...
struct Walk {
  uint chunk, chunk_step, head, head_step;
};
// Returns the walk of a thread, one of `threads`, through heads of `chunks` chunks. Threads that are left over get no
// chunk.
inline Walk walk_of(uint thread_index, uint threads, uint chunks) {
  const uint columns = min(chunks, threads), rows = threads / columns, row = thread_index / columns;
  return {row < rows ? thread_index - row * columns : chunks, columns, row, rows};
}

}  // namespace rope
