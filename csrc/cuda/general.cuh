// What the general kernels share: a token with its angles and cell, and how its heads are read and written.
#pragma once

#include "norm.cuh"

namespace rope::cuda {

// The chunks of token s of sequence b. The constructor stops the kernel if position or slot is not allowed.
template <typename S>
struct GeneralToken {
  using T = typename S::T;
  using A = typename S::A;
  static constexpr int V = S::V;
  const Args& a;
  const Tiling& tiling;
  const Chunk<rope_int>& chunk;
  const Args& p = a;
  rope_int b, s, position;   // position: positions[b, s] + offset
  bool valid;                // the position is allowed; that of a pad need not be
  rope_int block, in_block;  // of the caches, and the cell in the block. block: -1 for a pad, which goes to no cell
  int index = -1;            // the chunk that the angles are of
  CosSin<A, V> angles;

  ROPE_FN GeneralToken(const Args& a, const Tiling& tiling, const Chunk<rope_int>& chunk, rope_int b, rope_int s)
      : a(a), tiling(tiling), chunk(chunk), b(b), s(s) {
    const rope_int implied = s * p.position_strides[1];
    Integer given{int32_t(implied), int32_t(implied >> 32)}, slot{};
    if (p.has_positions) given = Integer::read(a.positions, a.wide_positions, b * p.position_strides[0] + s * p.position_strides[1]);
    if (p.has_slots) slot = Integer::read(a.slots, a.wide_slots, b * p.slot_strides[0] + s * p.slot_strides[1]);
    // The sum wraps around: with inv_freq every position is allowed.
    position = int64_t(uint64_t(given.value(!p.has_positions || a.wide_positions)) + uint64_t(p.offset));
    valid = position >= tiling.first_position && position <= tiling.last_position;
    block = b, in_block = position;
    bool fits = true;
    if (p.has_slots) {
      const int64_t cell = slot.value(a.wide_slots);
      fits = cell < p.blocks * p.block_size;
      block = cell < 0 || !fits ? -1 : int64_t(uint64_t(cell) / uint64_t(p.block_size));
      in_block = block < 0 ? 0 : cell - block * p.block_size;
    }
    check_token(valid || (p.has_slots && block < 0), fits);
  }

  // Computes cos and sin of the chunk. rotates: they are used. head: the one of the angles, if the table is by head
  ROPE_FN void arrive(bool rotates, rope_int head) {
    if (!rotates || (index == chunk.index && p.source != kTableByHead)) return;
    index = chunk.index;
    const Columns<S> columns(index, p.rotary_dim / 2);
    if (p.source == kInvFreq) {
      columns.template read<false>(Frequencies::of(a, p.inv_freq_strides[1]), angles);
      turn(angles, position);
    } else if (valid) {
      const rope_int row = p.source == kTableByPosition ? position : s;
      const auto read_table = [&](auto tag, const void* table, const rope_int* strides, A(&to)[V]) {
        const rope_int at = b * strides[0] + row * strides[1] + head * strides[2];
        columns.read(static_cast<const decltype(tag)*>(table) + at, strides[3], tiling.table_vectors, to);
      };
      const auto read = [&](auto tag) {
        read_table(tag, a.cos, p.cos_strides, angles.cos), read_table(tag, a.sin, p.sin_strides, angles.sin);
      };
      a.table_dtype == DType::kFloat ? read(float()) : read(T());
    }
    if (p.rounding == kOnce) {
      Factor<A>::of(a).scale(angles);
    } else if (a.attention_factor != 1.0) {
      const bool is_float = sizeof(A) == 4 || (p.source != kInvFreq && a.table_dtype == DType::kFloat);
      Eagerly<T>{p.rounding == kEachNarrow}.scale(
          angles, [&](A x) { return is_float ? A(float(x) * p.factor_hi) : x * A(a.attention_factor); });
    }
    for (int i = 0; i < V && p.inverse; i++) angles.sin[i] = -angles.sin[i];
    for (int i = 0; i < V && !valid; i++) angles.cos[i] = angles.sin[i] = A(NAN);  // a pad
  }
  ROPE_FN void go(bool rotates, rope_int head) { arrive(rotates, head); }
  ROPE_FN void rotate(Numbers<A, V>& n) const {
    if (p.rounding == kOnce) return cuda::rotate<S::interleaved>(n, angles);
    Eagerly<T>{p.rounding == kEachNarrow}.template rotate<S::interleaved>(n, angles);
  }

  // Returns the heads of a tensor. last: its last channel
  template <typename E>
  ROPE_FN TokenHeads<V, E, rope_int> heads(const void* data, const rope_int* strides, bool to_cell = false,
                                           rope_int last = INT64_MAX) const {
    auto* const of_token = static_cast<E*>(const_cast<void*>(data)) + (to_cell ? block : b) * strides[0] +
                           (to_cell ? in_block : s) * strides[1];
    return {of_token, strides, tiling.vectors, last};
  }
};

// Returns the weights of a chunk.
template <typename S>
ROPE_FN Numbers<typename S::A, S::V> weights_of(const Args& a, int side, const Chunk<rope_int>& c,
                                                rope_int head) {
  const rope_int* strides = a.sides[side].weight_strides;
  Numbers<typename S::A, S::V> w;
  const auto read = [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(a.sides[side].weight) + head * strides[0];
    const bool vectors = S::V > 1 && strides[1] == 1 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
    for (int k = 0; k < 2; k++) read_shared<S::V>(from + c.at[k] * strides[1], strides[1], vectors, w.of + k * S::V);
  };
  a.sides[side].weight_dtype == DType::kFloat ? read(float()) : read(typename S::T());
  return w;
}

}  // namespace rope::cuda
