// The angles of a chunk.
#include "tokens.h"

namespace rope {

// cos and sin for the V pairs of a chunk. one: that of TiledParams.
template <int V>
struct Angles {
  float cos[V], sin[V], one;
};

// A frequency, which is the sum of two floats. hi is the nearest float.
struct Frequency {
  float hi, lo;
};

// Returns the frequency at element offset `at`. part: the stride from its first part to its second, if there are two.
template <typename I>
inline Frequency frequency_at(device const float* inv_freq, I at, I part) {
  Frequency f = {inv_freq[at], 0.0f};
  if (k_split_inv_freq) two_sum(f.hi, inv_freq[at + part], f.hi, f.lo);
  return f;
}

// Returns position * freq in turns, see turns_of in csrc/angle.h. The position is passed there as the sum of two
// floats: the nearest float and what the rounding lost. A position beyond 4e18 is passed as one float, because
// the nearest float may not fit in a long.
inline void turns_of_position(long position, Frequency freq, thread float& fraction, thread float& rest) {
  const float near = float(position);
  const long rounded = fabs(near) < 4e18f ? long(near) : position;
  float turns_hi, turns_lo;
  turns_per_position(freq.hi, freq.lo, turns_hi, turns_lo);
  turns_of(near, float(position - rounded), turns_hi, turns_lo, fraction, rest);
}

inline void angle_of(long position, Frequency freq, thread float& cos, thread float& sin) {
  float fraction, rest;
  turns_of_position(position, freq, fraction, rest);
  cos_sin_of_turns(fraction, rest, cos, sin);
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

// Returns the angles of a rotated chunk, which are those of the pairs chunk * V .. chunk * V + V - 1: cos and sin times
// attention_factor, with the sign of sin changed for the inverse, or NaN if the token is not valid. head: the head of q
// or of k. It matters only if k_by_head, otherwise all heads of the token have these angles.
template <typename T, int V, typename I>
inline Angles<V> angles_of(constant TiledParams& r, Buffers<T> x, Token<I> token, I head, uint chunk) {
  constant Args& p = r;
  Angles<V> a;
  a.one = r.one;
  const RoundedStep<T> step = {r.one};
  const I column = I(chunk) * V;
  for (int i = 0; i < V; i++) a.cos[i] = a.sin[i] = NAN;
  if (token.valid && k_source == kInvFreq) {
#pragma unroll
    for (int i = 0; i < V; i++)
      angle_of(token.position, frequency_at(x.inv_freq, (column + I(i)) * I(p.inv_freq_strides[1]), I(p.inv_freq_strides[0])), a.cos[i],
               a.sin[i]);
  } else if (token.valid) {
    const I row = k_source == kTableByPosition ? I(token.position) : token.s;
    // cos and sin are element offsets here: x.cos and x.sin are the tables, p.cos_strides and p.sin_strides their strides, and a.cos
    // and a.sin the values that are read.
    const I cos = token.b * I(p.cos_strides[0]) + row * I(p.cos_strides[1]) + head * I(p.cos_strides[2]) + column * I(p.cos_strides[3]);
    const I sin = token.b * I(p.sin_strides[0]) + row * I(p.sin_strides[1]) + head * I(p.sin_strides[2]) + column * I(p.sin_strides[3]);
    read_parameters<T, V>(k_native_tables != 0, x.cos, cos, I(p.cos_strides[3]), k_table_vectors != 0, a.cos);
    read_parameters<T, V>(k_native_tables != 0, x.sin, sin, I(p.sin_strides[3]), k_table_vectors != 0, a.sin);
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
inline Angles<V> common_angles(constant TiledParams& r, Buffers<T> x, Token<I> token, bool rotated, uint chunk) {
  Angles<V> a;
  if (!k_by_head && rotated) a = angles_of<T, V>(r, x, token, I(0), chunk);
  return a;
}

}  // namespace rope
