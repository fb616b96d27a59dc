// The shape of a kernel, and how positions and slots are read and checked.
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

// The place of a head of the list of heads, or of a share of a side, see rotate_plan.h.
template <typename I>
struct Place {
  int side;
  I head, first;  // of the head in its side; its first channel, which is not 0 in the later pieces of a v
};

// A number of 4 or, if `wide`, 8 bytes that is being loaded, `at` bytes behind an address. The thread waits for the
// load only where it takes the number, so that several loads can be under way at once.
struct Loaded {
  int32_t low, high;

  ROPE_FN static Loaded read(const void* from, int64_t at, bool wide) {
    const auto* words = reinterpret_cast<const int32_t*>(static_cast<const char*>(from) + at);
    return {words[0], words[wide ? 1 : 0]};
  }
  ROPE_FN int64_t integer(bool wide) const {
    return int64_t(uint64_t(uint32_t(wide ? high : low >> 31)) << 32 | uint32_t(low));
  }
  ROPE_FN float narrow() const { return __int_as_float(low); }
  ROPE_FN double wide() const { return bits_as<double>(*this); }
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
