// What a kernel is compiled for, and the position and slot of a token.
#pragma once

#include "vectors.cuh"

namespace rope::cuda {

// T: the type of x's elements. V: the channels of a vector. If it is one, interleaved is false and the kernel takes
// either pairing.
template <typename Type, int vector, bool interleaved_pairs>
struct Shape {
  using T = Type;
  using A = arithmetic_t<T>;
  static constexpr int V = vector;
  static constexpr bool interleaved = interleaved_pairs;
};

// What a general kernel, or one of a backward, is compiled for.
template <typename Shape, bool is_general, bool has_norm>
struct Policy : Shape {
  static constexpr bool general = is_general;  // tables by head, a v without weights, vectors that are not one access
  static constexpr bool norm = has_norm;       // there are norms, and no eager rounding
  using I = std::conditional_t<general, int64_t, int32_t>;  // holds every element offset in a token
};

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

  ROPE_FN static Integer read(const void* from, bool wide, int64_t i) {
    const auto* words = reinterpret_cast<const int32_t*>(static_cast<const char*>(from) + i * (wide ? 8 : 4));
    return {words[0], words[wide ? 1 : 0]};
  }
  ROPE_FN int64_t value(bool wide) const {
    return int64_t(uint64_t(uint32_t(wide ? high : low >> 31)) << 32 | uint32_t(low));
  }
};

// Stops the kernel if the position or the slot of a token is not allowed. The compiler moves no instruction across an
// assertion.
ROPE_FN void check_token(bool position, bool slot) {
  if (position && slot) return;
  assert(position && "position + offset must be a row of cos and sin, and a cell of the caches");
  assert(slot && "slot must be less than the number of cells in the caches");
  __builtin_unreachable();
}

// Token s of sequence b, with its position and the cell that it goes to.
struct Token {
  const RotateArgs& a;
  const Tiling& tiling;
  rope_int b, s;
  rope_int position;         // positions[b, s] + offset
  bool valid;                // the position is allowed; that of a pad need not be
  rope_int block, in_block;  // of the caches, and the cell in the block. block: -1 for a pad, which goes to no cell

  // Stops the kernel if position or slot is not allowed.
  ROPE_FN Token(const RotateArgs& a, const Tiling& tiling, rope_int b, rope_int s) : a(a), tiling(tiling), b(b), s(s) {
    const RopeParams& p = a.params;
    Integer given{int32_t(s), int32_t(s >> 32)}, slot{};
    if (p.has_positions) given = Integer::read(a.positions, a.wide_positions, b * p.positions[0] + s * p.positions[1]);
    if (p.has_slots) slot = Integer::read(a.slots, a.wide_slots, b * p.slots[0] + s * p.slots[1]);
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
};

}  // namespace rope::cuda
