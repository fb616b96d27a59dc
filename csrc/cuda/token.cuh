// The shape of a kernel, how kernels of a stream follow each other, and how positions and slots are read and checked.
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
  static constexpr bool usual = has_usual_kernels(sizeof(T), V);
  static constexpr bool interleaved = interleaved_pairs;
};

// The place of a head of the list of heads, see rotate_plan.h.
template <typename I>
struct Place {
  int side;
  I head, first;  // of the head in its side; its first channel, which is not 0 in the later pieces of a v
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

}  // namespace rope::cuda
