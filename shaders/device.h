// What all shaders begin with: the function constants, and the buffers that the kernels take.
//
// csrc/mps/dispatch.h explains how a call is cut into chunks, shares and teams; read it first. In short: a chunk is the
// part of a head that belongs to one thread. It has 2V channels, where V is 8, 4 or 1 and is a template parameter of
// the kernels. In all functions the type I is an unsigned integer that holds every element offset of the call: uint or
// ulong.
//
// The kernels themselves are at global scope, because Apple's compiler calls a kernel in a namespace by its qualified
// name. A tensor that a call lacks is left out of the kernel's arguments by a function constant, and the host binds
// nothing for it. A call in place has no argument q_in: the kernel reads q through q_out. So no memory is written
// through one argument and accessed through another, which Metal's compiler may assume.
#include <metal_stdlib>
using namespace metal;

// Safe math allows contraction within a statement, and no option of the host switches contraction off. Published
// measurements show that Metal's compiler takes the first pragma for Metal 3.1, and obeys it when it compiles a text at
// run time. The second one says what the host also says by an option. A compiler that does not know a pragma ignores
// it.
#pragma METAL fp contract(off)
#pragma METAL fp math_mode(safe)

#include "../csrc/angle.h"
#include "../csrc/chunk.h"
#include "../csrc/mps/interface.h"
#include "../csrc/rotation.h"
#include "../csrc/token.h"

namespace rope {
// These are for csrc/quantise.h.
inline int bits_of(float x) { return as_type<int>(x); }
inline float float_of(int bits) { return as_type<float>(bits); }
}  // namespace rope

#include "../csrc/quantise.h"

using namespace rope;
using namespace rope::mps;

#define ROPE_CONSTANT(index, name) constant int k_##name [[function_constant(index)]];
ROPE_CONSTANTS(ROPE_CONSTANT)

// Each head of a token has angles of its own.
constant bool k_by_head = k_source == kTableByHead;

#define ROPE_HAS(type, name, number, present) constant bool k_has_##name = present;
#define ROPE_MEMBER(type, name, number, present) type name;
#define ROPE_ARGUMENT(type, name, number, present) \
  type name [[buffer(kBuffer##number), function_constant(k_has_##name)]],
#define ROPE_PASSED(type, name, number, present) (k_has_##name) ? (name) : nullptr,  // an absent argument is not read

ROPE_BUFFERS(ROPE_HAS, void)

namespace rope {

template <typename T>
struct Buffers {
  ROPE_BUFFERS(ROPE_MEMBER, T)
};

// Returns whether a set of sides has this side.
inline bool has(int set, int side) { return (set >> side & 1) != 0; }

// Returns what belongs to a side. An array with an index that the compiler does not know would lie in memory.
template <typename P>
inline P of_side(int side, P q, P k, P v) {
  return side == kQ ? q : side == kK ? k : v;
}

}  // namespace rope

// A kernel, whose threadgroups have at most this many threads.
#define ROPE_KERNEL(threads) [[kernel, max_total_threads_per_threadgroup(threads)]]
#define ROPE_ARGUMENTS(T) ROPE_BUFFERS(ROPE_ARGUMENT, T)
#define ROPE_ARGUMENTS_PASSED {ROPE_BUFFERS(ROPE_PASSED, T)}
