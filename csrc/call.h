// One call of an operator: its arguments, the checks of them, and the structs that back ends get from them.
#pragma once

#include <ATen/core/Tensor.h>

#include "args.h"

namespace rope {

using at::Tensor;
using OptTensor = std::optional<at::Tensor>;

// The arguments that the rotating operators share, in the order of the schemas. The struct holds references to the
// caller's tensors and offset.
struct Rotation {
  // [max_position, rotary_dim / 2], [batch or 1, seq, rotary_dim / 2] or [batch or 1, seq, heads, rotary_dim / 2]
  const OptTensor &cos, &sin;
  const OptTensor& inv_freq;   // [rotary_dim / 2], or [2, rotary_dim / 2], which is the sum of two parts
  const OptTensor& positions;  // [seq], [1, seq] or [batch, seq]
  const c10::SymInt& offset;
  double attention_factor;
  bool interleaved, inverse;
  int64_t rotary_start;
  bool eager_rounding;

  // Returns f(...) of all members, in the order of the schemas.
  template <typename F>
  auto pass(F&& f) const {
    return f(cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse, rotary_start,
             eager_rounding);
  }
  // Returns the opposite rotation, by which gradients are rotated.
  Rotation back() const {
    Rotation a = *this;
    a.inverse = !inverse;
    return a;
  }
};

// The arguments that the operators with a norm share, in the order of their schemas. They have no arguments `inverse`
// and `eager_rounding`.
struct NormRotation : Rotation {
  double norm_eps;

  NormRotation(const OptTensor& cos, const OptTensor& sin, const OptTensor& inv_freq, const OptTensor& positions,
               const c10::SymInt& offset, double norm_eps, double attention_factor, bool interleaved,
               int64_t rotary_start)
      : Rotation{cos, sin, inv_freq, positions, offset, attention_factor, interleaved, false, rotary_start, false},
        norm_eps(norm_eps) {}

  template <typename F>
  auto pass(F&& f) const {
    return f(cos, sin, inv_freq, positions, offset, norm_eps, attention_factor, interleaved, rotary_start);
  }
};

// The tensors of q, k or v. What a call lacks is null.
struct SideTensors {
  const Tensor* in = nullptr;      // [seq, heads, head_dim] or [batch, seq, heads, head_dim]
  const Tensor* out = nullptr;     // `in` itself, or another tensor of its shape, or a cache
  const Tensor* weight = nullptr;  // [head_dim] to normalise each head, [heads, head_dim] to normalise all together
  const Tensor* scale = nullptr;   // if `out` is quantised: one element, or [heads]
};

// One call of a rotating operator.
struct RotateCall : Rotation {
  const char* op;  // the name for messages, such as "rope.rotate"
  // q, which may be the only one and is then called x; k, whose number of heads may differ; and v. If there is a v,
  // rotated k and a copy of v are written to caches, which are [blocks, block_size, heads, head_dim], or
  // [block_size, heads, head_dim] if there is one block. v and its cache have heads and a head_dim of their own.
  SideTensors sides[kSides];
  double norm_eps = 0;
  bool norm_v = false;            // each head of v is normalised, without a weight
  const Tensor* slots = nullptr;  // [seq] or [batch, seq]; null: sequence b writes to block b, at its positions

  // Rotates in place, unless the caller sets other results.
  RotateCall(const Rotation& rotation, const char* op, const Tensor* q, const Tensor* k)
      : Rotation(rotation), op(op), sides{{q, q}, {k, k}, {}} {}

  const Tensor& q() const { return *sides[kQ].in; }
  const char* q_name() const { return sides[kK].in ? "q" : "x"; }
  bool has_cache() const { return sides[kV].in != nullptr; }

  RotateArgs args() const;  // needs real tensors and a call that passed check()
};

// One call of norm_rotate_qk's backward.
struct NormBackwardCall {
  RotateCall rotate;             // rotates the gradients of the results back
  const Tensor* x[2];            // q and k, which the forward call normalised
  const Tensor* weight_grad[2];  // those of the weights of q and k: their shapes, contiguous

  void zero() const {
    for (const Tensor* grad : weight_grad) grad->zero_();
  }
  NormBackwardArgs args() const;  // needs real tensors and a call that passed the checks
};

// One call that computes the gradients of cos and sin.
struct TableBackwardCall {
  RotateCall rotate;       // its q and k are the gradients of the results; it writes nothing
  const Tensor* x[2];      // q and k, or null, which the forward call rotated
  const Tensor& cos_grad;  // the shape of cos, contiguous
  const Tensor& sin_grad;

  void zero() const {
    for (const Tensor* grad : {&cos_grad, &sin_grad}) grad->zero_();
  }
  // If the tokens of the rows are listed: the tokens in the order of their table rows, and the index in this order
  // where each row begins. int64, [tokens or seq] and [rows + 1]: if all sequences have the same positions, only the
  // tokens of the first are listed.
  Tensor order = {}, starts = {};

  // Needs real tensors and a call that passed the checks. Fills order and starts.
  TableBackwardArgs args(const RotateArgs& gradients);
};

// One call of cos_sin: the angle is the sum over axes of position * inv_freq.
struct CosSinCall {
  const Tensor& positions;  // [axes, *P], where P is any shape
  const Tensor& inv_freq;   // [axes, rotary_dim / 2], or [2, axes, rotary_dim / 2], which is the sum of two parts
  double attention_factor;
  const Tensor& cos;  // [*P, rotary_dim / 2], contiguous
  const Tensor& sin;

  // Needs real tensors and a call that passed check_cos_sin(). A back end passes positions and inv_freq again, in
  // dtypes that its kernels read; positions must be contiguous or [axes, tokens].
  CosSinArgs args(const Tensor& positions, const Tensor& inv_freq) const;
};

// Raises the ValueErrors and TypeErrors that the operators document. Fake tensors are allowed: sizes stay symbolic, and
// no value in a tensor is read.
void check(const RotateCall& call, bool writes);
// Checks that the gradients of the results match q and k of a checked call, or are null too.
void check_gradients(const RotateCall& call, const Tensor* const (&gradients)[2]);
// Raises an IndexError if a position is out of range. low and high are the smallest and largest element of positions,
// without the offset.
void check_position_range(const RotateCall& call, const RopeParams& p, int64_t low, int64_t high);
// Checks the arguments of cos_sin and returns the dtype of the results. axes: the first dimension of positions and
// inv_freq is that of the axes.
at::ScalarType check_cos_sin(const char* op, const Tensor& positions, const Tensor& inv_freq, double attention_factor,
                             std::optional<at::ScalarType> dtype, bool axes);

}  // namespace rope
