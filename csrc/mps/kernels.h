// What the host and the shaders say to each other: function constants, structs by setBytes, and buffer numbers.
#ifndef ROPE_MPS_KERNELS_H
#define ROPE_MPS_KERNELS_H

#include "../rope.h"

// Fixed for a call, and known to Metal's compiler when it makes a pipeline: X(index, name).
#define ROPE_CONSTANTS(X)                                                          \
  X(0, tensors) /* 1: x. 2: q and k. 3: q, k and v, into a cache */                \
  X(1, interleaved)                                                                \
  X(2, inverse)                                                                    \
  X(3, source)         /* AngleSource */                                           \
  X(4, scaled)         /* attention_factor is not 1 */                             \
  X(5, position_bytes) /* 0: there are none */                                     \
  X(6, slot_bytes)                                                                 \
  X(7, vectors)           /* four channels of a head are one access */             \
  X(8, parameter_vectors) /* of cos and sin, and of the norm's weights, too */     \
  X(9, native_tables)     /* cos and sin have x's dtype, else float */             \
  X(10, native_q_weight)                                                           \
  X(11, native_k_weight)                                                           \
  X(12, lanes)         /* that share a head for its norm: a power of two, to 32 */ \
  X(13, position_type) /* of cos_sin: PositionType */

namespace rope {
namespace mps {

// A thread takes so many heads of a token, one after another, with the same angles.
enum { kHeads = 4 };
enum { kSimd = 32 };  // threads of a SIMD group; the host makes sure

// See csrc/plan.h for chunks. The heads of q, k and v are one list.
struct TiledParams {
  RopeParams params;
  rope_int last_place;               // position + offset may be that far, if there is a range
  unsigned chunks, rotated;          // of a head; the rotated ones come first
  unsigned k_start, v_start, heads;  // of the list: where k and v begin, and its end
  unsigned groups;                   // of kHeads heads
  int q_in_place, k_in_place;
  int has_range;
};

// An item is kHeads heads of q, or of k, for a row of threads; or one head, where they are wide. A part is so many
// items, which one threadgroup sums.
struct NormBackward {
  TiledParams rotate;   // of the gradients, back
  rope_int q[4], k[4];  // strides of what was normalised
  rope_int q_items, k_items;
  unsigned part;
};

struct SumParts {
  unsigned parts, head_dim;
};

struct TableBackward {
  TiledParams rotate;   // of the gradients; the list has the heads of q and k
  rope_int q[4], k[4];  // strides of what was rotated
  TokensOfRows tokens;
};

static_assert(sizeof(TiledParams) == sizeof(RopeParams) + 48 && sizeof(NormBackward) == sizeof(TiledParams) + 88 &&
                  sizeof(TableBackward) == sizeof(TiledParams) + 104,
              "the same layout on host and device");

// Buffers of the kernels on heads.
enum Buffer : int {
  kBufferParams,
  kBufferQIn,
  kBufferQOut,
  kBufferKIn,
  kBufferKOut,
  kBufferVIn,  // of the norm's backward: q, and in place of v_out k, as they were normalised
  kBufferVOut,
  kBufferCos,
  kBufferSin,
  kBufferInvFreq,
  kBufferPositions,
  kBufferSlots,
  kBufferQWeight,
  kBufferKWeight,
  kBufferSums,
};

// Buffers of the gradients of tables, after the parameters.
enum TableBuffer : int {
  kTableQGiven = 1,  // the gradient of what q became
  kTableKGiven,
  kTableQ,
  kTableK,
  kTableOrder,
  kTableStarts,
  kTableCosGrad,
  kTableSinGrad,
};

}  // namespace mps
}  // namespace rope

#endif
