// What a kernel is compiled for, and the position and slot of a token.
#pragma once

#include "vectors.cuh"

namespace rope::cuda {

// What the calls of a kernel may ask for. Each feature costs registers or time.
struct UsualBackward {                    // the backward of a norm, as models usually need it
  static constexpr bool general = false;  // caches, tables by head, a v without weights
  static constexpr bool norm = true;      // norms, and vectors that are not single accesses
  using I = int32_t;                      // holds every element offset
};
struct GeneralNorm {
  static constexpr bool general = true, norm = true;
  using I = int64_t;
};
struct General : GeneralNorm {
  static constexpr bool norm = false;
};

// T: the type of x's elements. V: the channels of a vector. If it is one, interleaved is false and the kernel takes
// either pairing.
template <typename Type, int vector, bool interleaved_pairs>
struct Shape {
  using T = Type;
  using A = arithmetic_t<T>;
  static constexpr int V = vector;
  static constexpr bool interleaved = interleaved_pairs;
};

template <typename Shape, typename Features>
struct Policy : Shape, Features {};

// Waits until the previous kernel of the stream has ended. Every kernel calls this before it loads or stores anything,
// because a dependent launch lets it begin before the previous kernel has ended.
ROPE_FN void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Lets the next kernel of the stream begin. Every kernel calls this after its last store.
ROPE_FN void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// An int32 or int64 that is being loaded. The thread waits for the load only in value(), so that several loads can be
// under way at once.
struct Integer {
  int32_t low, high;

  template <typename I>
  ROPE_FN static Integer read(const void* from, bool wide, I i) {
    const auto* words = reinterpret_cast<const int32_t*>(static_cast<const char*>(from) + int64_t(i) * (wide ? 8 : 4));
    return {words[0], words[wide ? 1 : 0]};
  }
  ROPE_FN int64_t value(bool wide) const {
    return int64_t(uint64_t(uint32_t(wide ? high : low >> 31)) << 32 | uint32_t(low));
  }
};

// A cell of a cache: a block, and the index of the cell in it. Nothing is written if block is -1.
template <typename I>
struct Cell {
  I block, in_block;
};

// Token s of sequence b, with its position and slot.
template <typename K>
struct Token {
  using I = typename K::I;
  I b, s;
  const RotateArgs& a;
  const RopeParams& p;
  const Tiling& tiling;
  Integer given_position, given_slot;  // the elements of positions and slots; a number made from s if there are none
  int64_t position = 0;  // given_position + offset. The sum wraps around: with inv_freq every position is allowed.
  bool valid = true;     // the position is allowed
  I slot = 0;            // without slots, the position; -1: the token is a pad, which goes to no cell

  // Starts the loads of position and slot.
  ROPE_FN Token(const RotateArgs& a, const Tiling& tiling, I b, I s) : b(b), s(s), a(a), p(a.params), tiling(tiling) {
    const int64_t own = int64_t(s) * tiling.position_step;
    given_position = given_slot = Integer{int32_t(own), int32_t(own >> 32)};
    if (K::general && p.has_slots)
      given_slot = Integer::read(a.slots, a.wide_slots, b * I(p.slots[0]) + s * I(p.slots[1]));
    if (p.has_positions) {
      given_position = Integer::read(a.positions, a.wide_positions, b * I(p.positions[0]) + s * I(p.positions[1]));
    }
  }

  // Waits for the position.
  ROPE_FN void arrive() {
    position = int64_t(uint64_t(given_position.value(!p.has_positions || a.wide_positions)) + uint64_t(p.offset));
    valid = position >= tiling.first_position && position <= tiling.last_position;
  }

  // Stops the kernel if position or slot is not allowed; a pad may have any position. Call it after the loads of table
  // rows and heads have started: the compiler moves no instruction across an assertion, and in a decode step nothing
  // should delay those loads.
  ROPE_FN void check() {
    bool pad = false, fits = true;
    slot = I(position);
    if (K::general && p.has_slots) {
      const int64_t given = given_slot.value(a.wide_slots);
      pad = given < 0;
      fits = given < p.blocks * p.block_size;
      slot = pad ? I(-1) : I(given);
    }
    if ((valid || pad) && fits) return;
    assert((valid || pad) && "position + offset must be a row of cos and sin, and a cell of the caches");
    assert(fits && "slot must be less than the number of cells in the caches");
    __builtin_unreachable();
  }

  ROPE_FN Cell<I> cell() const {
    if (!p.has_slots) return {b, slot};
    if (p.blocks == 1 || slot < 0) return {slot < 0 ? I(-1) : I(0), slot};
    using Unsigned = std::make_unsigned_t<I>;
    const I block = I(Unsigned(slot) / Unsigned(p.block_size));
    return {block, slot - block * I(p.block_size)};
  }
};

}  // namespace rope::cuda
