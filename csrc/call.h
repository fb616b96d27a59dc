// One call of an operator: its arguments, the checks of them, and the structs that back ends get from them.
#pragma once

#include <ATen/core/Tensor.h>

#include "args.h"

namespace rope {

using at::Tensor;
using OptTensor = std::optional<at::Tensor>;

// The arguments that the rotating operators share, in the order of the schemas. The struct holds references to the
// caller's tensors and offset.
struct Angles {
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
  // Returns the angles of the opposite rotation, by which gradients are rotated.
  Angles back() const {
    Angles a = *this;
    a.inverse = !inverse;
    return a;
  }
};

// The arguments that the operators with a norm share, in the order of their schemas. They have no argument `inverse`.
struct NormAngles : Angles {
  double norm_eps;

  NormAngles(const OptTensor& cos, const OptTensor& sin, const OptTensor& inv_freq, const OptTensor& positions,
             const c10::SymInt& offset, double norm_eps, double attention_factor, bool interleaved,
             int64_t rotary_start, bool eager_rounding)
      : Angles{cos,         sin,   inv_freq,     positions,     offset, attention_factor,
               interleaved, false, rotary_start, eager_rounding},
        norm_eps(norm_eps) {}

  template <typename F>
  auto pass(F&& f) const {
    return f(cos, sin, inv_freq, positions, offset, norm_eps, attention_factor, interleaved, rotary_start,
             eager_rounding);
  }
};

// One call of a rotating operator. It rotates in place unless q_out and k_out are set.
struct RotateCall : Angles {
  const char* op;   // the name for messages, such as "rope.rotate"
  const Tensor* q;  // [seq, heads, head_dim] or [batch, seq, heads, head_dim]; the x of rotate
  const Tensor* k;  // like q, but the number of heads may differ; or null
  const Tensor* q_out = q;
  const Tensor* k_out = k;

  // The weights of the RMS norm before the rotation: [head_dim] to normalise each head, or [heads, head_dim] to
  // normalise all heads of a token together. Both are null if there is no norm.
  const Tensor* q_norm_weight = nullptr;
  const Tensor* k_norm_weight = nullptr;
  double norm_eps = 0;

  // If v is set, rotated k and a copy of v are written to the caches k_out and v_out, which are
  // [blocks, block_size, heads, head_dim], or [block_size, heads, head_dim] if there is one block. v and its cache have
  // heads and a head_dim of their own.
  const Tensor* v = nullptr;  // [seq, v_heads, v_dim] or [batch, seq, v_heads, v_dim]
  const Tensor* v_out = nullptr;
  const Tensor* slots = nullptr;  // [seq] or [batch, seq]; null: sequence b writes to block b, at its positions
  // The numbers of a quantised cache are divided by its scale: one element, or [heads] of that cache. Null for a cache
  // of the dtype of q.
  const Tensor* k_scale = nullptr;
  const Tensor* v_scale = nullptr;
  bool norm_v = false;  // each head of v is normalised, without a weight

  void set_norm(const Tensor* q_weight, const Tensor* k_weight, double eps) {
    q_norm_weight = q_weight;
    k_norm_weight = k_weight;
    norm_eps = eps;
  }
  const char* q_name() const { return k ? "q" : "x"; }
  bool norm_over_heads() const { return q_norm_weight && q_norm_weight->dim() == 2; }

  // These need real tensors and a call that passed check().
  RopeParams params() const;
  RotateArgs args() const;
};

// One call of norm_rotate_qk's backward.
struct NormBackwardCall {
  RotateCall rotate;  // rotates the gradients of the results back
  const Tensor& q;    // the tensors that the forward call normalised
  const Tensor& k;
  const Tensor& q_norm_weight_grad;  // the shape of the weight, contiguous
  const Tensor& k_norm_weight_grad;

  NormBackwardArgs args() const;  // needs real tensors and a call that passed the checks
};

// One call that computes the gradients of cos and sin.
struct TableBackwardCall {
  RotateCall rotate;       // its q and k are the gradients of the results; its q_out and k_out are not written
  const Tensor& q;         // the tensors that the forward call rotated
  const Tensor* k;         // null if there is no k
  const Tensor& cos_grad;  // the shape of cos, contiguous
  const Tensor& sin_grad;

  // These need real tensors and a call that passed the checks. Every back end uses the first two.
  TokensOfRows tokens() const;
  // Returns, if tokens().listed, the tokens in the order of their table rows, and the index in this order where each
  // row begins. int64, [tokens or seq] and [rows + 1]: if all sequences have the same positions, only the tokens of
  // the first are listed.
  std::pair<Tensor, Tensor> order_and_starts() const;
  TableBackwardArgs args(const Tensor& order, const Tensor& starts) const;  // both are undefined unless listed
};

// One call of cos_sin: the angle is the sum over axes of position * inv_freq.
struct CosSinCall {
  const Tensor& positions;  // [axes, *P], where P is any shape
  const Tensor& inv_freq;   // [axes, rotary_dim / 2], or [2, axes, rotary_dim / 2], which is the sum of two parts
  double attention_factor;
  const Tensor& cos;  // [*P, rotary_dim / 2], contiguous
  const Tensor& sin;

  // These need real tensors and a call that passed check_cos_sin(). A back end passes positions and inv_freq again, in
  // dtypes that its kernels read; positions must be contiguous or [axes, tokens].
  CosSinParams params(const Tensor& positions, const Tensor& inv_freq) const;
  CosSinArgs args(const Tensor& positions, const Tensor& inv_freq) const;
};

// Writes the strides of t to strides[4], as [batch, seq, heads, head_dim]. A 3-D tensor is a batch of one: strides[0]
// stays as it was.
void strides_of(const Tensor& t, rope_int* strides);

// Raises the ValueErrors and TypeErrors that the operators document. Fake tensors are allowed: sizes stay symbolic, and
// no value in a tensor is read.
void check(const RotateCall& call, bool in_place);
// Checks that q and k (or null) match their gradients, which are the q and k of the call.
void check_gradients(const RotateCall& gradients, const Tensor& q, const Tensor* k);
// Raises an IndexError if a position is out of range. low and high are the smallest and largest element of positions,
// without the offset.
void check_position_range(const RotateCall& call, const RopeParams& p, int64_t low, int64_t high);
// Checks the arguments of cos_sin and returns the dtype of the results. axes: the first dimension of positions and
// inv_freq is that of the axes.
at::ScalarType check_cos_sin(const char* op, const Tensor& positions, const Tensor& inv_freq,
                             std::optional<at::ScalarType> dtype, bool axes);

}  // namespace rope
