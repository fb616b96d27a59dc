// What the kernels of usual calls share: a token with its angles and cell, and a chunk of one of its heads.
#pragma once

#include "norm.cuh"
#include "quantise.cuh"

namespace rope::cuda {

// What a kernel is compiled for.
enum Features : int {
  kFrequencies = 1,  // the angles come from inv_freq, and not from tables
  kCache = 2,        // k and v may go to caches
  kNorm = 4,         // heads may be normalised
  kBytes = 8,        // results may be quantised
  kEager = 16,       // eager rounding
  kAnySource = 32,   // the arguments say where the angles come from
};
template <typename Shape, int features>
struct Usual : Shape {
  static constexpr bool cache = features & kCache, norm = features & kNorm, bytes = features & kBytes,
                        eager = features & kEager;

  ROPE_FN static bool frequencies(const UsualArgs& a) {
    return features & kAnySource ? a.frequencies : features & kFrequencies;
  }
};

ROPE_FN int64_t offset_of(const int* strides, int i, int j) {
  return int64_t(i) * strides[0] + int64_t(j) * strides[1];
}

// Returns the place of a head of the list of heads.
template <typename K>
ROPE_FN Place<int> place_of(const UsualArgs& a, int h) {
  const bool after_q = h >= a.ends[kQ], after_k = K::cache && h >= a.ends[kK];
  return {int(after_q) + int(after_k), h - (after_k ? a.ends[kK] : after_q ? a.ends[kQ] : 0), 0};
}

// Returns the chunk of each head that a thread takes. Its channels count in vectors.
using UsualChunk = Chunk<1, int>;
ROPE_FN UsualChunk chunk_at(const UsualArgs& a, int index) {
  return chunk_of<1, int>(index, a.half, a.chunks, a.start, a.others, false, false, INT32_MAX);
}

// A token and its chunk. The constructor begins to load the position and the slot.
template <typename K>
struct UsualToken {
  using T = typename K::T;
  static constexpr int V = K::V;
  const UsualArgs& a;
  const UsualChunk& chunk;
  const int b, s;
  Integer given_position, given_slot;
  bool pad = false;
  int block, in_block;  // the cell of the caches
  CosSin<float, V> angles;

  ROPE_FN UsualToken(const UsualArgs& a, const UsualChunk& chunk, int b, int s) : a(a), chunk(chunk), b(b), s(s) {
    if (a.positions) {
      given_position = Integer::read(a.positions, a.wide_positions, offset_of(a.position_strides, b, s));
    }
    if (K::cache && a.slots) given_slot = Integer::read(a.slots, a.wide_slots, offset_of(a.slot_strides, b, s));
  }

  // Waits for the position and the slot, and computes cos and sin. Stops the kernel if one of the two is not allowed.
  // rotates: the angles are used. head: the one of the angles, if the table is by head. by_head: go() calls this again
  template <bool by_head = false>
  ROPE_FN void arrive(bool rotates, int head = 0) {
    const bool has_frequencies = !by_head && K::frequencies(a);
    const Columns<K> columns(chunk.index, a.half * V);
    const Frequencies frequencies{a.cos, bool(a.wide_angles), bool(a.split), a.table_strides[1], 1};
    if (has_frequencies && rotates) columns.template read<true>(frequencies, angles);
    Token<int> token{b, s, s, true};
    if (!by_head) {
      const int64_t given = a.positions ? given_position.value(a.wide_positions) : a.same_position ? 0 : s;
      const bool limited = (!has_frequencies || K::cache) && a.allowed != 0;
      token = token_at(b, s, given, a.offset, {limited, int64_t(a.allowed) - 1});
    }
    if (!has_frequencies && rotates) {
      const int64_t at =
          offset_of(a.table_strides, b, row_of(token, !a.by_token)) + int64_t(head) * a.table_head_stride;
      const auto read = [&](auto tag) {
        columns.read(static_cast<const decltype(tag)*>(a.cos) + at, 1, true, angles.cos);
        columns.read(static_cast<const decltype(tag)*>(a.sin) + at, 1, true, angles.sin);
      };
      a.wide_angles ? read(float()) : read(T());
    }
    if (!by_head) block = b, in_block = token.in_block;
    if (!by_head && K::cache && a.slots) {
      const int64_t slot = given_slot.value(a.wide_slots);
      take_slot(token, slot, a.cells);
      block = int(slot) >> a.block_shift, in_block = int(slot) - (block << a.block_shift);
    }
    if (!by_head) pad = token.pad, check_token(token.valid || pad, token.fits);
    if (has_frequencies && rotates) turn(angles, token.position);
    if (!K::eager) {
      Factor<float>{a.factor_hi, a.factor_lo}.scale(angles);
    } else if (a.factor_hi != 1.0f) {
      Eagerly<T>{bool(a.narrow)}.scale(angles, [&](float x) { return x * a.factor_hi; });
    }
    for (int i = 0; i < V && a.inverse; i++) angles.sin[i] = -angles.sin[i];
    for (int i = 0; i < V && K::cache && !token.valid; i++) angles.cos[i] = angles.sin[i] = NAN;  // a pad
  }
  // Goes to the angles of another head, if the table is by head.
  ROPE_FN void go(bool rotates, int head) {
    if (a.table_head_stride) arrive<true>(rotates, head);
  }
  ROPE_FN void rotate(Numbers<float, V>& numbers) const {
    if (K::eager) return Eagerly<T>{bool(a.narrow)}.template rotate<K::interleaved>(numbers, angles);
    cuda::rotate<K::interleaved>(numbers, angles);
  }

  ROPE_FN Elements<T, V> read(const void* data, const int* strides, int head) const {
    const auto* const from = static_cast<const Vector<T, V>*>(data) + offset_of(strides, b, s);
    const int first = head * strides[2];
    return {from[unsigned(first + chunk.at[0])], from[unsigned(first + chunk.at[1])]};
  }
  template <typename E>
  ROPE_FN void write(void* data, const int* strides, int head, const Elements<E, V>& x, bool to_cell = false) const {
    auto* const to = static_cast<Vector<E, V>*>(data) + offset_of(strides, to_cell ? block : b, to_cell ? in_block : s);
    const int first = head * strides[2];
    to[unsigned(first + chunk.at[0])] = x.of[0];
    if (is_whole(chunk)) to[unsigned(first + chunk.at[1])] = x.of[1];
  }
};

// The weights of a chunk as they are in memory, so that no thread waits for them before it needs them.
template <typename T, int V>
struct Weights {
  static constexpr int most = V / 4;  // accesses of a vector, if the weights are float32
  Vector<float, 4> of[2][most];

  ROPE_FN void read(const UsualArgs& a, int side, const UsualChunk& chunk, int head) {
    const auto* const from = static_cast<const Vector<float, 4>*>(a.weights[side]);
    for (int k = 0; k < 2; k++) {
      const int at = head * a.weight_stride + chunk.at[k];
      for (int i = 0; i < most; i++) {
        if (i == 0 || a.wide_weights) of[k][i] = from[(a.wide_weights ? at * most : at) + i];
      }
    }
  }
  // by_block: a thread block takes a group. Then weights have no offset.
  template <bool by_block>
  ROPE_FN Numbers<float, V> numbers(const UsualArgs& a) const {
    Numbers<float, V> n;
    for (int k = 0; k < 2; k++) {
      for (int i = 0; i < most && a.wide_weights; i++) to_arithmetic(of[k][i], n.of + k * V + 4 * i);
      if (!a.wide_weights) to_arithmetic(bits_as<Vector<T, 16 / sizeof(T)>>(of[k][0]), n.of + k * V);
    }
    for (int i = 0; i < 2 * V && !by_block; i++) n.of[i] += a.weight_offset;
    return n;
  }
};

// A chunk of a head.
template <typename K>
struct UsualHead {
  using T = typename K::T;
  static constexpr int V = K::V;
  int side, head;  // head: its index in its side
  bool present;    // else the chunk is past the last one
  Elements<T, V> x;
  float scale = 1.0f;

  // Reads what needs no position.
  ROPE_FN void read(const UsualToken<K>& t, Place<int> place, bool is_present) {
    const UsualArgs& a = t.a;
    side = place.side, head = place.head, present = is_present;
    const UsualSide& o = a.sides[side];
    if (K::norm) x = {};
    if (present) x = t.read(o.in, o.in_strides, head);
    if (K::bytes && present && a.scales[side]) scale = a.scales[side][a.scale_by_head >> side & 1 ? head : 0];
  }
  ROPE_FN bool normalises(const UsualArgs& a) const { return K::norm && (a.norms >> side & 1); }

  // Normalises, rotates and writes the chunk.
  template <bool by_block = false>
  ROPE_FN void write(const UsualToken<K>& t, float squares, const Weights<T, V>& weights) {
    const UsualArgs& a = t.a;
    const bool to_cell = K::cache && side != kQ && a.has_cache;
    if (!present || (to_cell && t.pad)) return;
    const bool rotates = t.chunk.rotated && (!K::cache || side != kV);
    auto numbers = numbers_of(x);
    if (normalises(a)) {
      // A v that is normalised has groups of one head, as q and k have.
      const float root = inverse_root(fma(squares, a.per_channel[side == kK], a.norm_eps));
      const auto round = [&] { numbers = numbers_of(rounded<T, V>(numbers)); };
      for (float& number : numbers.of) number *= root;
      if (K::eager && a.round_before_weight) round();
      if (side != kV) numbers = product_of(numbers, weights.template numbers<by_block>(a));
      if (K::eager) round();
    }
    if (rotates) t.rotate(numbers);
    if (normalises(a) || rotates) x = rounded<T, V>(numbers);
    const UsualSide& o = a.sides[side];
    const int format = K::bytes ? a.formats >> 2 * side & 3 : kUnquantised;
    format ? t.write(o.out, o.out_strides, head, quantised_to(format, numbers, scale), to_cell)
           : t.write(o.out, o.out_strides, head, x, to_cell);
  }
};

}  // namespace rope::cuda
