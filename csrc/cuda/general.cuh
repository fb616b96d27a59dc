// What the general kernels share: a token with its angles and cell, and how its heads are read and written.
#pragma once

#include "norm.cuh"

namespace rope::cuda {

// Returns the chunk with this index in each head.
template <int V>
ROPE_FN Chunk<V, rope_int> chunk_at(const Args& a, const Tiling& t, int index) {
  return chunk_of<V, rope_int>(index, t.rotated, t.chunks, a.rotary_start, a.sides[kQ].head_dim - a.rotary_dim,
                               V == 1 && a.interleaved, false, INT64_MAX);
}

// A token and its chunk. The constructor stops the kernel if position or slot is not allowed.
template <typename S>
struct GeneralToken : Token<rope_int> {
  using T = typename S::T;
  using A = typename S::A;
  static constexpr int V = S::V;
  const Args& a;
  const Tiling& tiling;
  const Chunk<V, rope_int>& chunk;
  int index = -1;  // the chunk that the angles are of
  CosSin<A, V> angles;

  ROPE_FN GeneralToken(const Args& a, const Tiling& tiling, const Chunk<V, rope_int>& chunk, rope_int b, rope_int s)
      : Token<rope_int>{b, s}, a(a), tiling(tiling), chunk(chunk) {
    const rope_int implied = s * a.position_strides[1];
    Loaded given{int32_t(implied), int32_t(implied >> 32)}, slot{};
    const auto read = [&](const void* from, const rope_int* strides, bool wide) {
      return Loaded::read(from, (b * strides[0] + s * strides[1]) * (wide ? 8 : 4), wide);
    };
    if (a.has_positions) given = read(a.positions, a.position_strides, a.wide_positions);
    if (a.has_slots) slot = read(a.slots, a.slot_strides, a.wide_slots);
    Token<rope_int>::operator=(
        token_at(b, s, given.integer(!a.has_positions || a.wide_positions), a.offset, tiling.positions));
    if (a.has_slots && take_slot(*this, slot.integer(a.wide_slots), a.blocks * a.block_size)) {
      take_cell(*this, rope_uint(slot.integer(a.wide_slots)), rope_uint(a.block_size));
    }
    check_token(valid || pad, fits);
  }

  // Computes cos and sin of the chunk. rotates: they are used. head: the one of the angles, if the table is by head
  ROPE_FN void arrive(bool rotates, rope_int head) {
    if (!rotates || (index == chunk.index && a.source != kTableByHead)) return;
    index = chunk.index;
    const Columns<S> columns(index, a.rotary_dim / 2);
    if (a.source == kInvFreq) {
      columns.read(Frequencies::of(a, a.inv_freq_strides[1]), angles);
      turn(angles, position);
    } else if (valid) {
      const rope_int row = row_of(*this, a.source == kTableByPosition);
      const auto read_table = [&](auto tag, const void* table, const rope_int* strides, A(&to)[V]) {
        const rope_int at = b * strides[0] + row * strides[1] + head * strides[2];
        columns.read(static_cast<const decltype(tag)*>(table) + at, strides[3], tiling.table_vectors, to);
      };
      const auto read = [&](auto tag) {
        read_table(tag, a.cos, a.cos_strides, angles.cos), read_table(tag, a.sin, a.sin_strides, angles.sin);
      };
      a.table_dtype == DType::kFloat ? read(float()) : read(T());
    }
    if (a.rounding == kOnce) {
      Factor<A>::of(a).scale(angles);
    } else if (a.attention_factor != 1.0) {
      const bool is_float = sizeof(A) == 4 || (a.source != kInvFreq && a.table_dtype == DType::kFloat);
      Eagerly<T>{a.rounding == kEachNarrow}.scale(
          angles, [&](A x) { return is_float ? A(float(x) * a.factor_hi) : x * A(a.attention_factor); });
    }
    for (int i = 0; i < V && a.inverse; i++) angles.sin[i] = -angles.sin[i];
    for (int i = 0; i < V && !valid; i++) angles.cos[i] = angles.sin[i] = A(NAN);  // a pad
  }
  ROPE_FN void go(bool rotates, rope_int head) { arrive(rotates, head); }
  ROPE_FN void rotate(Numbers<A, V>& n) const {
    if (a.rounding == kOnce) return cuda::rotate<S::interleaved>(n, angles);
    Eagerly<T>{a.rounding == kEachNarrow}.template rotate<S::interleaved>(n, angles);
  }

  // Returns the factor of a head of a side that has factors.
  ROPE_FN A factor(const Side& side, rope_int head) const {
    const rope_int* strides = side.factor_strides;
    return A(side.factor[b * strides[0] + s * strides[1] + head * strides[2]]);
  }

  // Returns the heads of a tensor.
  template <typename E>
  ROPE_FN TokenHeads<V, E, rope_int> heads(const void* data, const rope_int* strides, bool to_cell = false) const {
    auto* const of_token = static_cast<E*>(const_cast<void*>(data)) + (to_cell ? block : b) * strides[0] +
                           (to_cell ? in_block : s) * strides[1];
    return {of_token, strides, tiling.vectors};
  }
};

// Returns the weights of a chunk. Those past its last channel have no meaning.
template <typename S>
ROPE_FN Numbers<typename S::A, S::V> weights_of(const Args& a, int side, const Chunk<S::V, rope_int>& c,
                                                rope_int head) {
  using A = typename S::A;
  const rope_int* strides = a.sides[side].weight_strides;
  Numbers<A, S::V> w;
  const auto read = [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(a.sides[side].weight) + head * strides[0];
    const bool adjacent = S::V > 1 && strides[1] == 1 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
    for (int i = 0; i < 2 * S::V; i++) {
      const rope_int at = c.at[i / S::V];
      if (adjacent && c.at[1] + S::V - 1 <= c.last) {
        if (i % S::V == 0) read_shared<S::V>(from + at, 1, true, w.of + i);
      } else {
        w.of[i] = A(to_arithmetic(from[min(at + i % S::V, c.last) * strides[1]]));
      }
    }
  };
  a.sides[side].weight_dtype == DType::kFloat ? read(float()) : read(typename S::T());
  for (A& weight : w.of) weight += sizeof(A) == 8 ? A(a.weight_offset) : A(a.narrow_weight_offset);
  return w;
}

}  // namespace rope::cuda
