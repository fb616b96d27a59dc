// One call of an operator: its arguments, their checks, and what a back end gets of them.
#pragma once

#include <ATen/core/Tensor.h>

#include "args.h"

namespace rope {

using at::Tensor;
using OptTensor = std::optional<at::Tensor>;

// The arguments that the rotating operators share, in the order of the schemas. It refers to the caller's tensors.
struct Angles {
  const OptTensor &cos, &sin;  // [max_position, rotary_dim / 2] or [batch or 1, seq, rotary_dim / 2]
  const OptTensor& inv_freq;   // [rotary_dim / 2]
  const OptTensor& positions;  // [seq], [1, seq] or [batch, seq]
  const c10::SymInt& offset;
  double attention_factor;
  bool interleaved, inverse;

  // f of each.
  template <typename F>
  auto pass(F&& f) const {
    return f(cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse);
  }
  Angles back() const {
    Angles a = *this;
    a.inverse = !inverse;
    return a;
  }
};

// The same of the operators with a norm, which have no inverse.
struct NormAngles : Angles {
  double norm_eps;

  NormAngles(const OptTensor& cos, const OptTensor& sin, const OptTensor& inv_freq, const OptTensor& positions,
             const c10::SymInt& offset, double norm_eps, double attention_factor, bool interleaved)
      : Angles{cos, sin, inv_freq, positions, offset, attention_factor, interleaved, false}, norm_eps(norm_eps) {}

  template <typename F>
  auto pass(F&& f) const {
    return f(cos, sin, inv_freq, positions, offset, norm_eps, attention_factor, interleaved);
  }
};

struct RotateCall : Angles {
  const char* op;   // "rope.rotate"
  const Tensor* q;  // [seq, heads, head_dim] or [batch, seq, heads, head_dim]; x of rotate
  const Tensor* k;  // the same with its own heads, or null
  const Tensor* q_out = q;
  const Tensor* k_out = k;

  // RMS norm of every head before it is rotated; both weights or neither.
  const Tensor* q_norm_weight = nullptr;  // [head_dim]
  const Tensor* k_norm_weight = nullptr;
  double norm_eps = 0;

  // Into a cache, where there is a v: k_out and v_out are [blocks, block_size, heads, head_dim], or one block of it.
  const Tensor* v = nullptr;  // as k; copied
  const Tensor* v_out = nullptr;
  const Tensor* slots = nullptr;  // [seq] or [batch, seq], or null: row b writes block b at its positions

  void set_norm(const Tensor* q_weight, const Tensor* k_weight, double eps) {
    q_norm_weight = q_weight;
    k_norm_weight = k_weight;
    norm_eps = eps;
  }
  const char* q_name() const { return k ? "q" : "x"; }

  // Of real tensors, after check.
  RopeParams params() const;
  RotateArgs args() const;
};

struct NormBackwardCall {
  RotateCall rotate;  // of the gradients, back
  const Tensor& q;    // what was normalised
  const Tensor& k;
  const Tensor& q_norm_weight_grad;  // [head_dim], contiguous
  const Tensor& k_norm_weight_grad;

  NormBackwardArgs args() const;  // of real tensors, after check
};

struct TableBackwardCall {
  RotateCall rotate;       // q and k are the gradients of the results; there is nothing else to write
  const Tensor& q;         // what was rotated
  const Tensor* k;         // or null
  const Tensor& cos_grad;  // as cos, contiguous
  const Tensor& sin_grad;

  // Of real tensors, after check; of every back end.
  TokensOfRows tokens() const;
  // For tokens().listed: the tokens (of one sequence, where all have the same positions) in the order of their rows,
  // and where each row begins. int64, [tokens] and [rows + 1].
  std::pair<Tensor, Tensor> order_and_starts() const;
  TableBackwardArgs args(const Tensor& order, const Tensor& starts) const;  // both undefined unless listed
};

// The angle is the sum over axes of position * inv_freq.
struct CosSinCall {
  const Tensor& positions;  // [axes, *P]; any shape P
  const Tensor& inv_freq;   // [axes, rotary_dim / 2]
  double attention_factor;
  const Tensor& cos;  // [*P, rotary_dim / 2], contiguous
  const Tensor& sin;

  // Of real tensors, after check; positions and inv_freq of the dtype that the back end takes, positions contiguous or
  // [axes, tokens].
  CosSinParams params(const Tensor& positions, const Tensor& inv_freq) const;
  CosSinArgs args(const Tensor& positions, const Tensor& inv_freq) const;
};

// As [batch, seq, heads, head_dim]: a 3-D tensor is a batch of one.
void strides_of(const Tensor& t, rope_int* strides);

// ValueError and TypeError of the contract. Also right for fake tensors: sizes stay symbolic, and values are not looked
// at.
void check(const RotateCall& call, bool in_place);
// q and k (or null) are what the gradients belong to.
void check_gradients(const RotateCall& gradients, const Tensor& q, const Tensor* k);
// IndexError of the contract, for positions from low to high, without the offset.
void check_position_range(const RotateCall& call, const RopeParams& p, int64_t low, int64_t high);
// -> the dtype of the result. axes: positions and inv_freq have a dimension of axes in front.
at::ScalarType check_cos_sin(const char* op, const Tensor& positions, const Tensor& inv_freq,
                             std::optional<at::ScalarType> dtype, bool axes);

}  // namespace rope
