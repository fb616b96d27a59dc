// How a thread reads, rotates and writes a chunk.
#include "angles.h"

namespace rope {

// Returns the chunk with this index in its head.
template <int V, typename I>
inline Chunk<V, I> chunk_at(constant TiledParams& r, uint index) {
  constant Args& p = r.args;
  return chunk_of<V, I>(index, r.rotated, r.chunks, I(p.rotary_start), I(p.sides[kQ].head_dim - p.rotary_dim),
                        k_interleaved, true, ~I(0));
}

// The 2V elements of a chunk, the first vector before the second. Numbers are the same in float, to compute with.
template <typename T, int V>
struct Elements {
  T of[2 * V];
};
template <int V>
using Numbers = Elements<float, V>;

template <typename To, typename From, int V>
inline Elements<To, V> to(Elements<From, V> x) {
  Elements<To, V> y;
  for (int i = 0; i < 2 * V; i++) y.of[i] = static_cast<To>(x.of[i]);
  return y;
}

// Read or write neighbouring channels in one access of at most 16 bytes: four channels, or eight of at most 2 bytes. A
// vector of Metal has no more than four elements.
template <int channels>
struct Width {};
template <typename T>
inline vec<T, 4> four_of(thread const T* x) {
  return vec<T, 4>(x[0], x[1], x[2], x[3]);
}
template <typename T>
inline void spread(vec<T, 4> four, thread T* to) {
  for (int i = 0; i < 4; i++) to[i] = four[i];
}
template <typename T>
inline void load(device const T* from, thread T* to, Width<4>) {
  spread(*reinterpret_cast<device const vec<T, 4>*>(from), to);
}
template <typename T>
inline void load(device const T* from, thread T* to, Width<8>) {
  const uint4 words = *reinterpret_cast<device const uint4*>(from);
  spread(as_type<vec<T, 4>>(words.xy), to);
  spread(as_type<vec<T, 4>>(words.zw), to + 4);
}
template <typename T>
inline void store(thread const T* x, device T* to, Width<4>) {
  *reinterpret_cast<device vec<T, 4>*>(to) = four_of(x);
}
template <typename T>
inline void store(thread const T* x, device T* to, Width<8>) {
  const uint2 low = as_type<uint2>(four_of(x)), high = as_type<uint2>(four_of(x + 4));
  *reinterpret_cast<device uint4*>(to) = uint4(low[0], low[1], high[0], high[1]);
}
inline void store(thread const char* x, device char* to, Width<8>) {
  *reinterpret_cast<device uint2*>(to) = uint2(as_type<uint>(four_of(x)), as_type<uint>(four_of(x + 4)));
}

// Channels that do not exist become 0, so that a sum over them is right.
template <typename T, int V, typename I>
inline Elements<T, V> read(device const T* from, I stride, Chunk<V, I> c) {
  Elements<T, V> x = {};
  if (V >= 4 && k_vectors) {
    if (exists(c, 0)) load(from + c.at[0], x.of, Width<V == 8 ? 8 : 4>());
    if (exists(c, V)) load(from + c.at[1], x.of + V, Width<V == 8 ? 8 : 4>());
  } else {
    for (int i = 0; i < 2 * V; i++) {
      if (exists(c, i)) x.of[i] = from[channel_of(c, i) * stride];
    }
  }
  return x;
}

template <typename T, int V, typename I>
inline void write(Elements<T, V> x, device T* to, I stride, Chunk<V, I> c) {
  if (V >= 4 && k_vectors) {
    if (exists(c, 0)) store(x.of, to + c.at[0], Width<V == 8 ? 8 : 4>());
    if (exists(c, V)) store(x.of + V, to + c.at[1], Width<V == 8 ? 8 : 4>());
  } else {
    for (int i = 0; i < 2 * V; i++) {
      if (exists(c, i)) to[channel_of(c, i) * stride] = x.of[i];
    }
  }
}

template <typename T>
inline float rotated_channel(float own, float partner, float cos, float signed_sin, RoundedStep<T> step) {
  return k_rounding == kOnce ? rotated(own, partner, cos, signed_sin)
                             : rotated_eagerly(own, partner, cos, signed_sin, step);
}

// Rotates the V pairs of a chunk. A chunk is laid out like a small head of 2V channels: pair i is (i, V + i) if the
// pairing is half-split, and (2i, 2i + 1) if it is interleaved.
template <typename T, int V>
inline Numbers<V> rotated_chunk(Numbers<V> n, CosSin<V> angles) {
  const RoundedStep<T> step = {angles.one};
  for (int i = 0; i < V; i++) {
    const int a = first_channel(i, k_interleaved), b = a + partner_distance(V, k_interleaved);
    const float x = n.of[a], y = n.of[b];
    n.of[a] = rotated_channel(x, y, angles.cos[i], -angles.sin[i], step);
    n.of[b] = rotated_channel(y, x, angles.cos[i], angles.sin[i], step);
  }
  return n;
}

}  // namespace rope
