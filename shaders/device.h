// The functions that the kernels share. They answer, in the order of this file: which position and which cell a token
// has, what the angles of a chunk are, how a thread reads, rotates and writes a chunk, where the heads of a token are,
// and how numbers are summed.
//
// csrc/mps/plan.h explains how a call is cut into chunks, shares and teams; read it first. In short: a chunk is the
// part of a head that belongs to one thread. It has 2V channels, where V is 8, 4 or 1 and is a template parameter of
// the kernels; they are two vectors of V channels, which begin at channel `first` and at channel `second`.
//
// The kernels themselves are at global scope, because Apple's compiler calls a kernel in a namespace by its qualified
// name. A tensor that a call lacks is left out of the kernel's arguments by a function constant, and the host binds
// nothing for it. A call in place has no argument q_in: the kernel reads q through q_out. So no memory is written
// through one argument and accessed through another, which Metal's compiler may assume.
#include <metal_stdlib>
using namespace metal;

// Safe math allows contraction within a statement, so contraction is switched off here: when Metal compiles this text
// on the user's machine, no option does it. Published measurements show that a compiler takes this spelling for Metal
// 3.1 and obeys it; one that does not know it ignores it, as C++ requires. csrc/angle.h explains why its results do not
// depend on the pragma. Safe math itself is set by an option of the compiler.
#pragma METAL fp contract(off)

#include "../csrc/angle.h"
#include "../csrc/mps/kernels.h"
#include "../csrc/rotation.h"

namespace rope {
// These are for csrc/quantise.h.
inline int bits_of(float x) { return as_type<int>(x); }
inline float float_of(int bits) { return as_type<float>(bits); }
}  // namespace rope

#include "../csrc/quantise.h"

#define ROPE_CONSTANT(index, name) constant int k_##name [[function_constant(index)]];
ROPE_CONSTANTS(ROPE_CONSTANT)

// These tell which arguments a kernel has.
constant bool k_has_q_in = k_q_in_place == 0;
constant bool k_has_k = k_tensors >= 2;
constant bool k_has_k_in = k_tensors >= 2 && k_k_in_place == 0;
constant bool k_has_v = k_tensors >= 3;
constant bool k_has_cos = k_source != rope::kInvFreq;
constant bool k_has_sin = k_source != rope::kInvFreq && k_table_access != rope::mps::kComplex;
constant bool k_has_inv_freq = k_source == rope::kInvFreq;
constant bool k_has_positions = k_position_bytes != 0;
constant bool k_has_slots = k_slot_bytes != 0;
constant bool k_is_listed = k_listed != 0;
constant bool k_has_weights = k_has_norm != 0;
constant bool k_has_k_scale = k_k_quantised != 0;
constant bool k_has_v_scale = k_v_quantised != 0;

// Each head of a token has angles of its own.
constant bool k_by_head = k_source == rope::kTableByHead;

namespace rope {
namespace mps {

// The tensors of a call. In all functions the type I is an unsigned integer that holds every element offset of the
// call: uint or ulong.
template <typename T>
struct Buffers {
  device const T *q_in, *k_in, *v_in;  // [batch, seq, heads, head_dim], with the strides of RopeParams
  device T* q_out;                     // the same
  device void *k_out, *v_out;          // the same, or caches [blocks, block_size, heads, head_dim], of T or of bytes
  device const void *cos, *sin;
  device const float* inv_freq;
  device const void *positions, *slots, *q_weight, *k_weight;
  device const float *k_scale, *v_scale;
};

#define ROPE_ANGLE_BUFFERS                                                                        \
  device const void *cos [[buffer(kBufferCos), function_constant(k_has_cos)]],                    \
      device const void *sin [[buffer(kBufferSin), function_constant(k_has_sin)]],                \
      device const float *inv_freq [[buffer(kBufferInvFreq), function_constant(k_has_inv_freq)]], \
      device const void *positions [[buffer(kBufferPositions), function_constant(k_has_positions)]]
#define ROPE_BUFFERS(T)                                                                                                \
  device const T *q_in [[buffer(kBufferQIn), function_constant(k_has_q_in)]], device T *q_out [[buffer(kBufferQOut)]], \
      device const T *k_in [[buffer(kBufferKIn), function_constant(k_has_k_in)]],                                      \
      device void *k_out [[buffer(kBufferKOut), function_constant(k_has_k)]],                                          \
      device const T *v_in [[buffer(kBufferVIn), function_constant(k_has_v)]],                                         \
      device void *v_out [[buffer(kBufferVOut), function_constant(k_has_v)]], ROPE_ANGLE_BUFFERS,                      \
      device const void *slots [[buffer(kBufferSlots), function_constant(k_has_slots)]],                               \
      device const float *k_scale [[buffer(kBufferKScale), function_constant(k_has_k_scale)]],                         \
      device const float *v_scale [[buffer(kBufferVScale), function_constant(k_has_v_scale)]]
#define ROPE_WEIGHTS                                                                        \
  device const void *q_weight [[buffer(kBufferQWeight), function_constant(k_has_weights)]], \
      device const void *k_weight [[buffer(kBufferKWeight), function_constant(k_has_weights)]]
// Absent arguments are not read, not even as addresses.
#define ROPE_IF(has, argument) (has) ? (argument) : nullptr
#define ROPE_BUFFERS_PASSED(q_weight, k_weight)                               \
  {k_has_q_in ? q_in : q_out,                                                 \
   k_has_k_in ? k_in : static_cast<device const T*>(ROPE_IF(k_has_k, k_out)), \
   ROPE_IF(k_has_v, v_in),                                                    \
   q_out,                                                                     \
   ROPE_IF(k_has_k, k_out),                                                   \
   ROPE_IF(k_has_v, v_out),                                                   \
   ROPE_IF(k_has_cos, cos),                                                   \
   ROPE_IF(k_has_sin, sin),                                                   \
   ROPE_IF(k_has_inv_freq, inv_freq),                                         \
   ROPE_IF(k_has_positions, positions),                                       \
   ROPE_IF(k_has_slots, slots),                                               \
   q_weight,                                                                  \
   k_weight,                                                                  \
   ROPE_IF(k_has_k_scale, k_scale),                                           \
   ROPE_IF(k_has_v_scale, v_scale)}

#define ROPE_KERNEL(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;

// ---- tokens ----

// Returns the integer with index i of an array of integers of 4 or 8 bytes.
inline long integer_at(device const void* from, int bytes, ulong i) {
  return bytes == 8 ? static_cast<device const long*>(from)[i] : long(static_cast<device const int*>(from)[i]);
}

// Token s of sequence b. It is valid if its position and its slot are in range. If it is not valid, its rotated
// channels become NaN and nothing is written into a cache.
template <typename I>
struct Token {
  I b, s;
  long position;  // with the offset added
  bool valid;
  bool cached;        // the token has a cell in the caches; false for a negative slot
  I block, in_block;  // the cell: its block, and its index in the block
};

template <typename T, typename I>
inline Token<I> token_at(constant TiledParams& r, Buffers<T> x, I b, I s) {
  constant RopeParams& p = r.params;
  const long given_position =
      k_position_bytes ? integer_at(x.positions, k_position_bytes, b * I(p.positions[0]) + s * I(p.positions[1]))
                       : long(s);
  // The sum may wrap around. That is an error only if there is a range: with inv_freq every position is valid.
  const long position = long(ulong(given_position) + ulong(p.offset));
  const bool wrapped = (position < given_position) != (p.offset < 0);
  bool valid = !r.has_range || (position >= 0 && position <= r.last_position && !wrapped);
  long slot = 0;
  if (k_slot_bytes) {
    slot = integer_at(x.slots, k_slot_bytes, b * I(p.slots[0]) + s * I(p.slots[1]));
    valid = valid && slot < p.blocks * p.block_size;
  }
  const bool cached = valid && slot >= 0;
  // Without slots the cache has a block for each sequence, and the position is the index in it.
  Token<I> token = {b, s, position, valid, cached, b, I(position)};
  if (k_slot_bytes && cached) {
    token.block = I(slot) / I(p.block_size);
    token.in_block = I(slot) - token.block * I(p.block_size);
  }
  return token;
}

// ---- the angles of a chunk ----

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
inline void read_parameters(device const void* base, I at, I stride, bool in_vectors, thread float (&to)[V]) {
  device const From* from = static_cast<device const From*>(base) + at;
  if (V >= 4 && in_vectors) {
    for (int i = 0; i < V; i += 4) {
      const vec<From, 4> four = *reinterpret_cast<device const vec<From, 4>*>(from + i);
      for (int j = 0; j < 4 && i + j < V; j++) to[i + j] = static_cast<float>(four[j]);
    }
  } else {
    for (int i = 0; i < V; i++) to[i] = static_cast<float>(from[I(i) * stride]);
  }
}

// Reads the parts of V complex numbers, the first of them at element offset `at`.
template <int V, typename I>
inline void read_complex(device const void* base, I at, thread float (&real)[V], thread float (&imaginary)[V]) {
  device const float* from = static_cast<device const float*>(base) + at;
  for (int i = 0; i + 1 < V; i += 2) {
    const float4 two = *reinterpret_cast<device const float4*>(from + 2 * i);
    real[i] = two[0];
    imaginary[i] = two[1];
    real[i + 1] = two[2];
    imaginary[i + 1] = two[3];
  }
}

// Returns the angles of a rotated chunk, which are those of the pairs chunk * V .. chunk * V + V - 1: cos and sin times
// attention_factor, with the sign of sin changed for the inverse, or NaN if the token is not valid. head: the head of q
// or of k. It matters only if k_by_head, otherwise all heads of the token have these angles.
template <typename T, int V, typename I>
inline Angles<V> angles_of(constant TiledParams& r, Buffers<T> x, Token<I> token, I head, uint chunk) {
  constant RopeParams& p = r.params;
  Angles<V> a;
  a.one = r.one;
  const RoundedStep<T> step = {r.one};
  const I column = I(chunk) * V;
  if (!token.valid) {
    for (int i = 0; i < V; i++) a.cos[i] = a.sin[i] = NAN;
  } else if (k_source == kInvFreq) {
    for (int i = 0; i < V; i++)
      angle_of(token.position, frequency_at(x.inv_freq, (column + I(i)) * I(p.inv_freq[1]), I(p.inv_freq[0])), a.cos[i],
               a.sin[i]);
  } else {
    const I row = k_source == kTableByPosition ? I(token.position) : token.s;
    // cos and sin are element offsets here: x.cos and x.sin are the tables, p.cos and p.sin their strides, and a.cos
    // and a.sin the values that are read.
    I cos = token.b * I(p.cos[0]) + row * I(p.cos[1]) + column * I(p.cos[3]);
    I sin = token.b * I(p.sin[0]) + row * I(p.sin[1]) + column * I(p.sin[3]);
    if (k_by_head) {
      cos += head * I(p.cos[2]);
      sin += head * I(p.sin[2]);
    }
    const bool vectors = k_table_access == kVectors;
    if (k_table_access == kComplex) {
      read_complex(x.cos, cos, a.cos, a.sin);
    } else if (k_native_tables) {
      read_parameters<T>(x.cos, cos, I(p.cos[3]), vectors, a.cos);
      read_parameters<T>(x.sin, sin, I(p.sin[3]), vectors, a.sin);
    } else {
      read_parameters<float>(x.cos, cos, I(p.cos[3]), vectors, a.cos);
      read_parameters<float>(x.sin, sin, I(p.sin[3]), vectors, a.sin);
    }
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

// ---- a chunk of a head ----

// The channels of a chunk: V channels that begin at `first`, and V channels that begin at `second`.
//   Half-split: second = first + rotary_dim / 2, so channel first + i and channel second + i are a pair.
//   Interleaved: second = first + V, so the chunk is 2V neighbouring channels, which are V whole pairs.
//   Not rotated: the vectors are neighbours among the channels that are not rotated, so the rotated channels may lie
//   between them.
template <int V, typename I>
struct Chunk {
  I first, second;
  bool rotated;
  bool whole;  // false: the head ends before `second`; then second = first, and only the first V channels are written

  I channel(int i) const { return i < V ? first + I(i) : second + I(i - V); }
};

// Returns the first channel of vector `index` of those that are not rotated.
template <int V, typename I>
inline I unrotated_channel(constant RopeParams& p, I index) {
  const I channel = index * V;
  return channel < I(p.rotary_start) ? channel : channel + I(p.rotary_dim);
}

// Returns the chunk with this index in its head. The rotated chunks come first.
template <int V, typename I>
inline Chunk<V, I> chunk_at(constant TiledParams& r, uint index) {
  constant RopeParams& p = r.params;
  if (index < r.rotated) {
    const I first = I(p.rotary_start) + first_channel(I(index) * V, k_interleaved);
    return {first, first + (k_interleaved ? I(V) : I(p.rotary_dim / 2)), true, true};
  }
  const I vector = I(index - r.rotated) * 2;
  const I first = unrotated_channel<V>(p, vector), second = unrotated_channel<V>(p, vector + 1);
  const bool whole = second < I(p.head_dim);
  return {first, whole ? second : first, false, whole};
}

// The 2V elements of a chunk, the first vector before the second. Numbers are the same in float, to compute with.
template <typename T, int V>
struct Values {
  T of[2 * V];
};
template <int V>
using Numbers = Values<float, V>;

// Reads or writes neighbouring channels in one access of at most 16 bytes: four channels, or eight of 2 bytes. The
// functions for one channel are there only to be compiled.
template <typename T>
inline void read_vector(device const T* from, thread T (&to)[4]) {
  const vec<T, 4> four = *reinterpret_cast<device const vec<T, 4>*>(from);
  for (int i = 0; i < 4; i++) to[i] = four[i];
}
template <typename T>
inline void read_vector(device const T* from, thread T (&to)[8]) {
  const uint4 words = *reinterpret_cast<device const uint4*>(from);
  const vec<T, 4> low = as_type<vec<T, 4>>(words.xy), high = as_type<vec<T, 4>>(words.zw);
  for (int i = 0; i < 4; i++) {
    to[i] = low[i];
    to[4 + i] = high[i];
  }
}
template <typename T>
inline void read_vector(device const T* from, thread T (&to)[1]) {
  to[0] = from[0];
}
template <typename T>
inline void write_vector(thread const T (&x)[4], device T* to) {
  vec<T, 4> four;
  for (int i = 0; i < 4; i++) four[i] = x[i];
  *reinterpret_cast<device vec<T, 4>*>(to) = four;
}
template <typename T>
inline void write_vector(thread const T (&x)[8], device T* to) {
  vec<T, 4> low, high;
  for (int i = 0; i < 4; i++) {
    low[i] = x[i];
    high[i] = x[4 + i];
  }
  const uint2 left = as_type<uint2>(low), right = as_type<uint2>(high);
  *reinterpret_cast<device uint4*>(to) = uint4(left[0], left[1], right[0], right[1]);
}
inline void write_vector(thread const char (&x)[8], device char* to) {
  char4 low, high;
  for (int i = 0; i < 4; i++) {
    low[i] = x[i];
    high[i] = x[4 + i];
  }
  *reinterpret_cast<device uint2*>(to) = uint2(as_type<uint>(low), as_type<uint>(high));
}
template <typename T>
inline void write_vector(thread const T (&x)[1], device T* to) {
  to[0] = x[0];
}

// Returns whether a channel exists. end: the number of channels, which matters only for pieces of v; see Head.
template <typename I>
inline bool exists(I channel, I end) {
  return !k_v_pieces || channel < end;
}

// Channels that do not exist become 0, so that a sum over them is right.
template <typename T, int V, typename I>
inline Values<T, V> read(device const T* from, I stride, Chunk<V, I> c, I end = ~I(0)) {
  Values<T, V> x;
  if (V >= 4 && k_vectors) {
    T first[V] = {}, second[V] = {};
    if (exists(c.first, end)) read_vector(from + c.first, first);
    if (c.whole && exists(c.second, end)) read_vector(from + c.second, second);
    for (int i = 0; i < V; i++) {
      x.of[i] = first[i];
      x.of[V + i] = second[i];
    }
  } else {
    for (int i = 0; i < V; i++) {
      const I first = c.first + I(i), second = c.second + I(i);
      x.of[i] = exists(first, end) ? from[first * stride] : T(0);
      x.of[V + i] = c.whole && exists(second, end) ? from[second * stride] : T(0);
    }
  }
  return x;
}

template <typename T, int V, typename I>
inline void write(Values<T, V> x, device T* to, I stride, Chunk<V, I> c, I end = ~I(0)) {
  if (V >= 4 && k_vectors) {
    T first[V], second[V];
    for (int i = 0; i < V; i++) {
      first[i] = x.of[i];
      second[i] = x.of[V + i];
    }
    if (exists(c.first, end)) write_vector(first, to + c.first);
    if (c.whole && exists(c.second, end)) write_vector(second, to + c.second);
  } else {
    for (int i = 0; i < (c.whole ? 2 * V : V); i++) {
      if (exists(c.channel(i), end)) to[c.channel(i) * stride] = x.of[i];
    }
  }
}

template <typename T, int V>
inline Numbers<V> numbers_of(Values<T, V> x) {
  Numbers<V> n;
  for (int i = 0; i < 2 * V; i++) n.of[i] = static_cast<float>(x.of[i]);
  return n;
}

template <typename T, int V>
inline Values<T, V> rounded(Numbers<V> n) {
  Values<T, V> x;
  for (int i = 0; i < 2 * V; i++) x.of[i] = static_cast<T>(n.of[i]);
  return x;
}

// With eager rounding, rounds numbers to T if torch's operators do so. Otherwise returns them as they are.
template <typename T, int V>
inline Numbers<V> rounded_eagerly(Numbers<V> n, bool narrow = true) {
  if (k_rounding != kOnce && narrow) n = numbers_of(rounded<T, V>(n));
  return n;
}

template <typename T>
inline float rotated_channel(float own, float partner, float cos, float signed_sin, RoundedStep<T> step) {
  return k_rounding == kOnce ? rotated(own, partner, cos, signed_sin)
                             : rotated_eagerly(own, partner, cos, signed_sin, step);
}

// Rotates the V pairs of a chunk. A chunk is laid out like a small head of 2V channels: pair i is (i, V + i) if the
// pairing is half-split, and (2i, 2i + 1) if it is interleaved.
template <typename T, int V>
inline Numbers<V> rotate(Numbers<V> n, Angles<V> angles) {
  const RoundedStep<T> step = {angles.one};
  for (int i = 0; i < V; i++) {
    const int a = first_channel(i, k_interleaved), b = a + partner_distance(V, k_interleaved);
    const float x = n.of[a], y = n.of[b];
    n.of[a] = rotated_channel(x, y, angles.cos[i], -angles.sin[i], step);
    n.of[b] = rotated_channel(y, x, angles.cos[i], angles.sin[i], step);
  }
  return n;
}

// ---- the heads of a token ----

enum Tensor { kQ = 0, kK = 1, kV = 2 };

// Returns whether the heads of a tensor are normalised.
inline bool is_normalised(int tensor) { return tensor == kV ? k_norm_v != 0 : k_has_norm != 0; }
// Returns whether the heads of a tensor go into a quantised cache.
inline bool is_quantised(int tensor) { return tensor == kK ? k_k_quantised != 0 : tensor == kV && k_v_quantised != 0; }
// Returns how many pieces of a head belong to one team: the norm of v needs a whole head.
inline uint pieces_of(constant TiledParams& r, int tensor) {
  return k_norm_v && k_v_pieces && tensor == kV ? r.pieces : 1;
}

// Returns the address of head h of token s of sequence b, for a tensor [batch, seq, heads, head_dim] with these
// strides. For a cache b is the block, and s the index in the block.
template <typename T, typename I>
inline device T* head_of(device T* x, constant rope_int* strides, I b, I s, I h) {
  return x + b * I(strides[0]) + s * I(strides[1]) + h * I(strides[2]);
}

// One head of a token, or one piece of a head of v: the addresses that it is read from and written to.
template <typename T, typename I>
struct Head {
  int tensor;
  I index;  // of the head in its tensor
  I end;    // of a piece: the channels from its first to the end of v's head, which may be fewer or more than head_dim
  device const T* in;
  device T* out;
  device char* bytes;       // instead of `out`, if the head goes into a quantised cache
  float scale;              // of such a cache
  I in_stride, out_stride;  // from a channel to the next
  bool in_place;
  bool written;  // false if the head belongs into a cache, but its token has no cell; then `out` must not be used
};

// Returns piece `index` of a head of v, whose first piece is given.
template <typename T, typename I>
inline Head<T, I> piece_of(constant RopeParams& p, Head<T, I> head, I index) {
  const I first = index * I(p.head_dim);
  head.end = head.end - first;
  head.in += first * head.in_stride;
  if (is_quantised(head.tensor)) {
    head.bytes += first * head.out_stride;
  } else {
    head.out += first * head.out_stride;
  }
  return head;
}

// Returns head h of the list of heads: those of q, then those of k, then those of v.
template <typename T, typename I>
inline Head<T, I> head_at(constant TiledParams& r, Buffers<T> x, Token<I> token, uint h) {
  constant RopeParams& p = r.params;
  Head<T, I> head;
  head.tensor = k_tensors < 2 || h < r.k_start ? kQ : k_tensors < 3 || h < r.v_start ? kK : kV;
  constant Operand& o = head.tensor == kQ ? p.q : head.tensor == kK ? p.k : p.v;
  head.index = I(h - (head.tensor == kQ ? 0 : head.tensor == kK ? r.k_start : r.v_start));
  const bool in_pieces = k_v_pieces && head.tensor == kV;
  head.end = in_pieces ? I(p.v_dim) : I(p.head_dim);
  I piece = 0;
  if (in_pieces && !k_norm_v) {
    const I number = head.index;
    head.index = number / I(r.pieces);
    piece = number - head.index * I(r.pieces);
  }
  const bool to_cache = k_tensors == 3 && head.tensor != kQ;
  head.written = !to_cache || token.cached;
  const I block = to_cache ? token.block : token.b, index = to_cache ? token.in_block : token.s;
  head.in = head.tensor == kQ ? x.q_in : head.tensor == kK ? x.k_in : x.v_in;
  head.in_stride = I(o.in[3]);
  head.in = head_of(head.in, o.in, token.b, token.s, head.index);
  head.out_stride = I(o.out[3]);
  device void* out = head.tensor == kQ ? x.q_out : head.tensor == kK ? x.k_out : x.v_out;
  if (is_quantised(head.tensor)) {
    head.bytes = static_cast<device char*>(out);
    if (head.written) head.bytes = head_of(head.bytes, o.out, block, index, head.index);
    head.scale =
        head.tensor == kK ? x.k_scale[head.index * I(p.k_cache.scale)] : x.v_scale[head.index * I(p.v_cache.scale)];
  } else {
    head.out = static_cast<device T*>(out);
    if (head.written) head.out = head_of(head.out, o.out, block, index, head.index);
  }
  head.in_place = head.tensor == kQ ? k_q_in_place != 0 : head.tensor == kK && k_k_in_place != 0;
  if (piece) head = piece_of(p, head, piece);
  return head;
}

// Writes a chunk of a head. x: its numbers, rounded to T. A quantised cache takes the numbers themselves, unless
// torch's operators would round them.
template <typename T, int V, typename I>
inline void write(constant RopeParams& p, Values<T, V> x, Numbers<V> numbers, Head<T, I> head, Chunk<V, I> c) {
  if (!is_quantised(head.tensor)) {
    write(x, head.out, head.out_stride, c, head.end);
    return;
  }
  constant CacheFormat& format = head.tensor == kK ? p.k_cache : p.v_cache;
  const Numbers<V> given = rounded_eagerly<T>(numbers);
  Values<char, V> bytes;
  for (int i = 0; i < 2 * V; i++)
    bytes.of[i] = static_cast<char>(quantised<float, constant CacheFormat&>(given.of[i] / head.scale, format));
  write(bytes, head.bytes, head.out_stride, c, head.end);
}

// ---- teams and sums ----

// A thread's team, counted in its threadgroup, and the thread's lane in that team. The threadgroup is one-dimensional.
struct TeamLane {
  uint team, lane;
};
inline TeamLane team_lane_of(uint simd, uint thread_of_simd) {
  return {simd * (kSimd / uint(k_lanes)) + thread_of_simd / uint(k_lanes), thread_of_simd % uint(k_lanes)};
}

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
inline float dot(Numbers<V> x, Numbers<V> y, Chunk<V, I> c) {
  const int part = V < 4 ? 2 * V : 8;
  const bool split = V == 8 && c.rotated && !k_interleaved;  // each part has half of its channels in each vector
  float total = 0.0f;
  for (int begin = 0; begin < 2 * V; begin += part) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < part; i++) {
      const int at = split ? (i < 4 ? 0 : V) + begin / 2 + i % 4 : begin + i;
      if (c.whole || at < V) sum[i % 4] = fma(x.of[at], y.of[at], sum[i % 4]);
    }
    total = total + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  return total;
}

// Returns whether the weights of q's or k's norm have type T.
inline bool has_native_weights(int tensor) { return tensor == kQ ? k_native_q_weight != 0 : k_native_k_weight != 0; }

// Returns the weights of q's or k's norm for the channels of a chunk. head: matters only if the norm is over all heads.
template <typename T, int V, typename I>
inline Numbers<V> weights_of(constant TiledParams& r, Buffers<T> x, int tensor, Chunk<V, I> c, I head = 0) {
  device const void* from = tensor == kQ ? x.q_weight : x.k_weight;
  constant rope_int* strides = tensor == kQ ? r.params.q_norm_weight : r.params.k_norm_weight;
  const I row = head * I(strides[0]), stride = I(strides[1]);
  float first[V], second[V];
  if (has_native_weights(tensor)) {
    read_parameters<T>(from, row + c.first * stride, stride, k_weight_vectors, first);
    read_parameters<T>(from, row + c.second * stride, stride, k_weight_vectors, second);
  } else {
    read_parameters<float>(from, row + c.first * stride, stride, k_weight_vectors, first);
    read_parameters<float>(from, row + c.second * stride, stride, k_weight_vectors, second);
  }
  Numbers<V> w;
  for (int i = 0; i < V; i++) {
    w.of[i] = first[i];
    w.of[V + i] = second[i];
  }
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
inline float scale_of(float squares, float channels, constant RopeParams& p) {
  return 1.0f / precise::sqrt(squares / channels + p.norm_eps);
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

}  // namespace mps
}  // namespace rope

using namespace rope;
using namespace rope::mps;
