// The interface between the host and the shaders: function constants, structs passed by setBytes, and buffer numbers.
#ifndef ROPE_MPS_KERNELS_H
#define ROPE_MPS_KERNELS_H

#include "../rope.h"

// Function constants: numbers that are fixed for a call and that Metal's compiler knows when it makes a pipeline.
// X(index, name); the shaders see each of them as k_name.
#define ROPE_CONSTANTS(X)                                                                                   \
  X(0, tensors) /* 1: x. 2: q and k. 3: q, k and v, and k and v go into caches */                           \
  X(1, interleaved)                                                                                         \
  X(2, inverse)                                                                                             \
  X(3, source)           /* AngleSource */                                                                  \
  X(4, scaled)           /* attention_factor is not 1 */                                                    \
  X(5, position_bytes)   /* size of a position; 0: there is no tensor of positions */                       \
  X(6, slot_bytes)       /* size of a slot; 0: there are no slots */                                        \
  X(7, vectors)          /* neighbouring channels of a head are read and written as one vector */           \
  X(8, table_access)     /* TableAccess */                                                                  \
  X(9, weight_vectors)   /* the norm's weights are read as vectors of four elements */                      \
  X(10, native_tables)   /* cos and sin have the dtype of x; otherwise they are float */                    \
  X(11, native_q_weight) /* q_norm_weight has the dtype of x; otherwise it is float */                      \
  X(12, native_k_weight)                                                                                    \
  X(13, q_in_place) /* q_out is q */                                                                        \
  X(14, k_in_place)                                                                                         \
  X(15, lanes)         /* threads of a team, which share a head for its norm: a power of two, at most 32 */ \
  X(16, listed)        /* in table_backward: the tokens of each table row are listed */                     \
  X(17, position_type) /* PositionType of the positions that cos_sin takes */                               \
  X(18, split_inv_freq)                                                                                     \
  X(19, rounding)    /* Rounding */                                                                         \
  X(20, v_pieces)    /* v has another head_dim than q, and its heads are taken in pieces */                 \
  X(21, has_norm)    /* q and k are normalised */                                                           \
  X(22, norm_v)      /* each head of v is normalised */                                                     \
  X(23, k_quantised) /* the cache of k is quantised */                                                      \
  X(24, v_quantised)

namespace rope {
namespace mps {

// How a thread reads cos and sin.
enum TableAccess : int {
  kElements = 0,  // one element at a time
  kVectors = 1,   // four neighbouring elements of cos at a time, and four of sin
  kComplex = 2,   // cos and sin are the parts of complex numbers, and two numbers are read at a time
};

// A thread holds its chunks of this many heads at a time, so that several of its loads are under way.
enum { kHeads = 4 };
// The number of threads in a SIMD group. The host checks that the GPU agrees.
enum { kSimd = 32 };

// csrc/mps/plan.h explains chunks, shares and pieces. The kernels count the heads of q, k and v in one list: first
// those of q, then those of k, then those of v.
struct TiledParams {
  RopeParams params;
  rope_int last_position;            // the largest valid position, if there is a range
  unsigned chunks, rotated;          // of a head: all chunks, and the rotated ones, which come first
  unsigned k_start, v_start, heads;  // in the list of heads: the first of k, the first of v, and the end
  unsigned shares;                   // of a token: share s takes the heads s, s + shares, s + 2 shares ...
  unsigned tokens;                   // batch * seq
  unsigned pieces;                   // of a head of v; each piece counts as a head, unless there is a norm of v
  int tokens_first;                  // neighbouring threads take neighbouring tokens; otherwise neighbouring shares
  int has_range;                     // a position must lie in 0 .. last_position
  float one;                         // 1, which the shaders' compiler does not know; see RoundedStep
};

// Parameters of the norm's backward. An item is the work that a team does at once: kHeads neighbouring heads of q or of
// k, or a single head if heads are wide, or a token if the norm is over all heads. A part is a number of neighbouring
// items, which one threadgroup sums.
struct NormBackward {
  TiledParams rotate;   // rotates the gradients back
  rope_int q[4], k[4];  // strides of q and k before the norm
  rope_int q_items, k_items;
  unsigned part_items;  // items of a part; the last part may have fewer
};

// Parameters of the sums over parts. The channels are those of a part's sums: head_dim, or heads * head_dim if the norm
// is over all heads.
struct SumParts {
  unsigned parts, q_channels, k_channels;
};

// Parameters of the gradients of cos and sin.
struct TableBackward {
  TiledParams rotate;   // has the gradients of the rotated q and k as its inputs
  rope_int q[4], k[4];  // strides of q and k before the rotation
  TokensOfRows tokens;
};

static_assert(sizeof(TiledParams) == sizeof(RopeParams) + 56 && sizeof(NormBackward) == sizeof(TiledParams) + 88 &&
                  sizeof(TableBackward) == sizeof(TiledParams) + 104,
              "the layout must be the same on host and device");

// Buffer numbers of the kernels that rotate or normalise heads.
enum Buffer : int {
  kBufferParams,
  kBufferQIn,
  kBufferQOut,
  kBufferKIn,
  kBufferKOut,
  kBufferVIn,
  kBufferVOut,
  kBufferCos,
  kBufferSin,
  kBufferInvFreq,
  kBufferPositions,
  kBufferSlots,
  kBufferQWeight,
  kBufferKWeight,
  kBufferQBefore,  // in the norm's backward: q before the norm
  kBufferKBefore,
  kBufferSums,  // in the norm's backward: the sums of each part
  kBufferKScale,
  kBufferVScale,
};

// Buffer numbers of the kernel that computes the gradients of cos and sin. kBufferParams comes before them.
enum TableBuffer : int {
  kTableQGiven = 1,  // the gradient of the rotated q
  kTableKGiven,
  kTableQ,  // q before the rotation
  kTableK,
  kTableOrder,
  kTableStarts,
  kTableCosGrad,
  kTableSinGrad,
};

}  // namespace mps
}  // namespace rope

#endif
