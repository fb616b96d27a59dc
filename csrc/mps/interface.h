// The interface between the host and the shaders: function constants, structs passed by setBytes, and buffer numbers.
#ifndef ROPE_MPS_INTERFACE_H
#define ROPE_MPS_INTERFACE_H

#include "../args.h"

// Function constants: numbers that are fixed for a call and that Metal's compiler knows when it makes a pipeline.
// X(index, name); the shaders see each of them as k_name. A set of sides has bit 1 << s if it has side s.
#define ROPE_CONSTANTS(X)                                                                                         \
  X(0, tensors) /* 1: x. 2: q and k. 3: q, k and v, and k and v go into caches */                                 \
  X(1, interleaved)                                                                                               \
  X(2, inverse)                                                                                                   \
  X(3, source) /* AngleSource */                                                                                  \
  X(4, scaled) /* attention_factor is not 1 */                                                                    \
  X(5, split_inv_freq)                                                                                            \
  X(6, rounding)             /* Rounding */                                                                       \
  X(7, position_bytes)       /* size of a position; 0: there is no tensor of positions */                         \
  X(8, slot_bytes)           /* size of a slot; 0: there are no slots */                                          \
  X(9, vectors)              /* neighbouring channels of a head are read and written as one vector */             \
  X(10, table_vectors)       /* cos and sin are read as vectors of four elements */                               \
  X(11, weight_vectors)      /* so are the norm's weights */                                                      \
  X(12, native_tables)       /* cos and sin have the dtype of x; otherwise they are float */                      \
  X(13, native_weights)      /* the sides whose weights have the dtype of x; the others are float */              \
  X(14, in_place)            /* the sides that are written where they are read */                                 \
  X(15, quantised)           /* the sides that are written as int8 */                                             \
  X(16, normalised)          /* the sides that are normalised */                                                  \
  X(17, all_heads)           /* the norm of q and k is over all heads of a token */                               \
  X(18, v_apart)             /* v has another head_dim than k, and is not in the list of heads */                 \
  X(19, lanes)               /* threads of a team, which share a head for its norm: a power of two, at most 32 */ \
  X(20, position_dtype)      /* DType of the positions that cos_sin takes */                                      \
  X(21, weighted)            /* the sides whose norm has weights */                                               \
  X(22, factor)              /* q has a factor */                                                                 \
  X(23, round_before_weight) /* with eager rounding: that of Args */

// The buffers of the kernels that rotate. X(type, name, number, present): kBuffer<number> is the number of the buffer,
// and a function constant k_has_<name> tells whether it is present. Those of q, k and v follow each other. T is the
// dtype of x.
//   in: [batch, seq, heads, head_dim], with the strides of Args
//   out: the same, or caches [blocks, block_size, heads, head_dim]; of T, or of bytes if they are quantised
#define ROPE_BUFFERS(X, T)                                                 \
  X(device const T*, q_in, QIn, !(k_in_place & 1 << kQ))                   \
  X(device const T*, k_in, KIn, k_tensors > kK && !(k_in_place & 1 << kK)) \
  X(device const T*, v_in, VIn, k_tensors > kV)                            \
  X(device void*, q_out, QOut, k_tensors > kQ)                             \
  X(device void*, k_out, KOut, k_tensors > kK)                             \
  X(device void*, v_out, VOut, k_tensors > kV)                             \
  X(device const void*, q_weight, QWeight, (k_weighted & 1 << kQ) != 0)    \
  X(device const void*, k_weight, KWeight, (k_weighted & 1 << kK) != 0)    \
  X(device const void*, v_weight, VWeight, (k_weighted & 1 << kV) != 0)    \
  X(device const float*, q_scale, QScale, (k_quantised & 1 << kQ) != 0)    \
  X(device const float*, k_scale, KScale, (k_quantised & 1 << kK) != 0)    \
  X(device const float*, v_scale, VScale, (k_quantised & 1 << kV) != 0)    \
  X(device const void*, cos, Cos, k_source != kInvFreq)                    \
  X(device const void*, sin, Sin, k_source != kInvFreq)                    \
  X(device const float*, inv_freq, InvFreq, k_source == kInvFreq)          \
  X(device const void*, positions, Positions, k_position_bytes != 0)       \
  X(device const void*, slots, Slots, k_slot_bytes != 0)                   \
  X(device const float*, q_factor, QFactor, k_factor != 0)

namespace rope {
namespace mps {

// A thread holds its chunks of this many heads at a time, so that several of its loads are under way.
enum { kHeads = 4 };
// The number of threads in a SIMD group. The host checks that the GPU agrees.
enum { kSimd = 32 };
// The most threads of a threadgroup: usually, and if it shares the work for all heads of a token, a part or a row.
enum { kThreads = 128, kSharedThreads = 256 };

// csrc/mps/dispatch.h explains chunks and shares. The kernels count the heads of q, k and v in one list: first those of
// q, then those of k, then those of v, unless v is apart.
struct TiledParams {
  Args args;
  PositionRange positions;     // those that are allowed
  unsigned chunks, rotated;    // of a head: all chunks, and the rotated ones, which come first
  unsigned first[kSides + 1];  // in the list of heads: the first of q, of k and of v, and the end
  unsigned shares;             // of a token: share s takes the heads s, s + shares, s + 2 shares ...
  unsigned tokens;             // batch * seq
  int tokens_first;            // neighbouring threads take neighbouring tokens; otherwise neighbouring shares
  float one;                   // 1, which the shaders' compiler does not know; see RoundedStep
  // For the backward of a norm, whose threadgroups each sum a part: see cut_into_parts() in csrc/mps/dispatch.h.
  unsigned parts;
  unsigned part_items;   // items of a part; the last part may have fewer
  rope_int items[2];     // of q and of k
  unsigned channels[2];  // of the sums for q and for k: head_dim, or heads * head_dim if the norm is over all heads
};
static_assert(sizeof(TiledParams) == sizeof(Args) + 88 && sizeof(TiledParams) <= 4096,
              "the layout must be the same on host and device, and setBytes takes at most 4096 bytes");

// Buffer numbers. The last ones are for the backward of a norm: q and k before the norm, and the sums of the parts.
#define ROPE_NUMBER(type, name, number, present) kBuffer##number,
enum Buffer : int { kBufferParams, ROPE_BUFFERS(ROPE_NUMBER, ) kBufferQBefore, kBufferKBefore, kBufferSums };

}  // namespace mps
}  // namespace rope

#endif
