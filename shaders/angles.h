// The angles of a chunk.
#include "tokens.h"

namespace rope {

// cos and sin for the V pairs of a chunk. one: that of TiledParams.
template <int V>
struct CosSin {
  float cos[V], sin[V], one;
};

// Computes the turns per position of the frequency at element offset `at`, see turns_per_position in csrc/angle.h.
// part: the stride from its first part to its second, if there are two.
template <typename I>
inline void turns_at(device const float* inv_freq, I at, I part, thread float& turns_hi, thread float& turns_lo) {
  float hi = inv_freq[at], lo = 0.0f;
  if (k_split_inv_freq) two_sum(hi, inv_freq[at + part], hi, lo);
  turns_per_position(hi, lo, turns_hi, turns_lo);
}

// Computes the angle of a position in turns, see turns_of in csrc/angle.h. The position is passed there as the sum of
// two floats: the nearest float and what the rounding lost. A position beyond 4e18 is passed as one float, because the
// nearest float may not fit in a long.
inline void turns_of_position(long position, float turns_hi, float turns_lo, thread float& fraction,
                              thread float& rest) {
  const float near = float(position);
  const long rounded = fabs(near) < 4e18f ? long(near) : position;
  turns_of(near, float(position - rounded), turns_hi, turns_lo, fraction, rest);
}

// Rounds a number as torch's operators round an intermediate result: to T if cos and sin are of type T too. The fma
// changes no number. But it keeps a compiler that does not obey the pragma from contracting a product with the sum that
// follows; a compiler that knew that `one` is 1 would leave it out.
template <typename T>
struct RoundedStep {
  float one;

  float operator()(float x) const {
    return fma(k_rounding == kEachNarrow ? static_cast<float>(static_cast<T>(x)) : x, one, -0.0f);
  }
};

// Reads V elements of cos, sin or a norm's weights, the first of them at element offset `at`. in_vectors: they are
// neighbours, and four of them are one aligned access.
template <typename From, int V, typename I>
inline void read_elements(device const void* base, I at, I stride, bool in_vectors, thread float* to) {
  device const From* from = static_cast<device const From*>(base) + at;
  for (int i = 0; i < V; i += V < 4 ? 1 : 4) {
    if (V >= 4 && in_vectors) {
      const vec<From, 4> four = *reinterpret_cast<device const vec<From, 4>*>(from + i);
      for (int j = 0; j < 4; j++) to[i + j] = static_cast<float>(four[j]);
    } else {
      for (int j = i; j < i + 4 && j < V; j++) to[j] = static_cast<float>(from[I(j) * stride]);
    }
  }
}
// native: the elements have type T; otherwise they are float.
template <typename T, int V, typename I>
inline void read_parameters(bool native, device const void* base, I at, I stride, bool in_vectors, thread float* to) {
  native ? read_elements<T, V>(base, at, stride, in_vectors, to)
         : read_elements<float, V>(base, at, stride, in_vectors, to);
}

// Where the row of a token begins in cos and in sin, for head 0, and the strides from a head, or a column, to the next.
template <typename I>
struct TableRow {
  I cos, sin, cos_head, sin_head, cos_column, sin_column;
};
template <typename I>
inline TableRow<I> table_row(constant TiledParams& r, Token<I> token) {
  constant rope_int *const cos = r.args.cos_strides, *const sin = r.args.sin_strides;
  const I row = row_of(token, k_source == kTableByPosition);
  return {offset_of(cos, token.b, row, I(0)),
          offset_of(sin, token.b, row, I(0)),
          I(cos[2]),
          I(sin[2]),
          I(cos[3]),
          I(sin[3])};
}

// Returns the angles of a rotated chunk, which are those of the pairs chunk * V .. chunk * V + V - 1: cos and sin times
// attention_factor, with the sign of sin changed for the inverse, or NaN if the token is not valid. row: that of the
// token. head: the head of q or of k. It matters only if k_by_head, otherwise all heads of the token have these angles.
template <typename T, int V, typename I>
inline CosSin<V> angles_of(constant TiledParams& r, Buffers<T> x, Token<I> token, TableRow<I> row, I head, uint chunk) {
  constant Args& p = r.args;
  CosSin<V> a;
  a.one = r.one;
  const RoundedStep<T> step = {r.one};
  const I column = I(chunk) * V;
  for (int i = 0; i < V; i++) a.cos[i] = a.sin[i] = NAN;
  if (token.valid && k_source == kInvFreq) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      float turns_hi, turns_lo, fraction, rest;
      turns_at(x.inv_freq, (column + I(i)) * I(p.inv_freq_strides[1]), I(p.inv_freq_strides[0]), turns_hi, turns_lo);
      turns_of_position(token.position, turns_hi, turns_lo, fraction, rest);
      cos_sin_of_turns(fraction, rest, a.cos[i], a.sin[i]);
    }
  } else if (token.valid) {
    const I cos = row.cos + head * row.cos_head + column * row.cos_column;
    const I sin = row.sin + head * row.sin_head + column * row.sin_column;
    const bool native = k_native_tables != 0, vectors = k_table_vectors != 0;
    read_parameters<T, V>(native, x.cos, cos, row.cos_column, vectors, a.cos);
    read_parameters<T, V>(native, x.sin, sin, row.sin_column, vectors, a.sin);
  }
  for (int i = 0; i < V; i++) {
    if (k_scaled && k_rounding != kOnce) {
      a.cos[i] = step(a.cos[i] * p.factor_hi);
      a.sin[i] = step(a.sin[i] * p.factor_hi);
    } else if (k_scaled) {
      a.cos[i] = scaled(a.cos[i], p.factor_hi, p.factor_lo);
      a.sin[i] = scaled(a.sin[i], p.factor_hi, p.factor_lo);
    }
    if (k_inverse) a.sin[i] = -a.sin[i];
  }
  return a;
}

// Returns the angles that all heads of a token have in a chunk. If there are none, the result has no meaning.
template <typename T, int V, typename I>
inline CosSin<V> common_angles(constant TiledParams& r, Buffers<T> x, Token<I> token, bool rotated, uint chunk) {
  CosSin<V> a;
  if (!k_by_head && rotated) a = angles_of<T, V>(r, x, token, table_row(r, token), I(0), chunk);
  return a;
}

}  // namespace rope
