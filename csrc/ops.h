// One checked call, and how a back end takes it. A back end is a struct with
//   static void rotate(const RotateCall&);
//   static void norm_backward(const NormBackwardCall&);
//   static void table_backward(const TableBackwardCall&);
//   static void cos_sin(const CosSinCall&);
// and one line: TORCH_LIBRARY_IMPL(rope, <key>, m) { rope::register_ops<Backend>(m); }
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "args.h"

namespace rope {

using at::Tensor;
using OptTensor = std::optional<at::Tensor>;

// The arguments that the operators share, and how to hand them on.
#define ROPE_SOURCE \
  const OptTensor &cos, const OptTensor &sin, const OptTensor &inv_freq, const OptTensor &positions, c10::SymInt offset
#define ROPE_SOURCE_PASSED cos, sin, inv_freq, positions, std::move(offset)
#define ROPE_ANGLES ROPE_SOURCE, double attention_factor, bool interleaved, bool inverse
#define ROPE_ANGLES_PASSED ROPE_SOURCE_PASSED, attention_factor, interleaved, inverse
#define ROPE_NORM_ANGLES ROPE_SOURCE, double norm_eps, double attention_factor, bool interleaved
#define ROPE_NORM_ANGLES_PASSED ROPE_SOURCE_PASSED, norm_eps, attention_factor, interleaved

struct RotateCall {
  const char* op;   // "rope.rotate"
  const Tensor* q;  // [seq, heads, head_dim] or [batch, seq, heads, head_dim]; x of rotate
  const Tensor* k;  // the same with its own heads, or null
  const Tensor* q_out;
  const Tensor* k_out;
  const OptTensor &cos, &sin;  // [max_position, rotary_dim / 2] or [batch or 1, seq, rotary_dim / 2]
  const OptTensor& inv_freq;   // [rotary_dim / 2]
  const OptTensor& positions;  // [seq], [1, seq] or [batch, seq]
  const c10::SymInt& offset;
  double attention_factor;
  bool interleaved, inverse;

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

// In place unless q_out and k_out are set afterwards.
#define ROPE_CALL(op, q, k, inverse) \
  {op, q, k, q, k, cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse}

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

DType dtype_of(const Tensor& t);
PositionType position_type(at::ScalarType type);
// As [batch, seq, heads, head_dim]: a 3-D tensor is a batch of one.
void strides_of(const Tensor& t, rope_int* strides);

// attention_factor as two floats, for float32 arithmetic.
struct SplitFactor {
  float hi, lo;
};
SplitFactor split_factor(double attention_factor);

// The angle is the sum over axes of position * inv_freq.
struct CosSinCall {
  const Tensor& positions;  // [axes, *P]; any shape P
  const Tensor& inv_freq;   // [axes, rotary_dim / 2]
  double attention_factor;
  const Tensor& cos;  // [*P, rotary_dim / 2], contiguous
  const Tensor& sin;
};

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

// at::empty_like(x). The fake one of torch differs from the real one in strides of dimensions of size 1, so those that
// x keeps are said here.
inline Tensor result_like(const Tensor& x) {
  if (!x.unsafeGetTensorImpl()->is_non_overlapping_and_dense_or_false()) return at::empty_like(x);
  return at::empty_strided_symint(x.sym_sizes(), x.sym_strides(), x.options());
}

template <typename Backend>
struct Ops {
  static Tensor rotate(const Tensor& x, ROPE_ANGLES) {
    RotateCall call = ROPE_CALL("rope.rotate", &x, nullptr, inverse);
    check(call, false);
    Tensor out = result_like(x);
    call.q_out = &out;
    Backend::rotate(call);
    return out;
  }

  static void rotate_(Tensor& x, ROPE_ANGLES) {
    const RotateCall call = ROPE_CALL("rope.rotate_", &x, nullptr, inverse);
    check(call, true);
    Backend::rotate(call);
  }

  static std::tuple<Tensor, Tensor> rotate_qk(const Tensor& q, const Tensor& k, ROPE_ANGLES) {
    RotateCall call = ROPE_CALL("rope.rotate_qk", &q, &k, inverse);
    return to_new(call);
  }

  static void rotate_qk_(Tensor& q, Tensor& k, ROPE_ANGLES) {
    const RotateCall call = ROPE_CALL("rope.rotate_qk_", &q, &k, inverse);
    check(call, true);
    Backend::rotate(call);
  }

  static std::tuple<Tensor, Tensor> norm_rotate_qk(const Tensor& q, const Tensor& k, const Tensor& q_norm_weight,
                                                   const Tensor& k_norm_weight, ROPE_NORM_ANGLES) {
    RotateCall call = ROPE_CALL("rope.norm_rotate_qk", &q, &k, false);
    call.set_norm(&q_norm_weight, &k_norm_weight, norm_eps);
    return to_new(call);
  }

  // -> gradients of q, k, q_norm_weight, k_norm_weight
  static std::tuple<Tensor, Tensor, Tensor, Tensor> norm_rotate_qk_backward(
      const Tensor& q_out_grad, const Tensor& k_out_grad, const Tensor& q, const Tensor& k, const Tensor& q_norm_weight,
      const Tensor& k_norm_weight, ROPE_NORM_ANGLES) {
    RotateCall call = ROPE_CALL("rope._norm_rotate_qk_backward", &q_out_grad, &k_out_grad, true);
    call.set_norm(&q_norm_weight, &k_norm_weight, norm_eps);
    check(call, false);
    check_gradients(call, q, &k);
    Tensor q_grad = result_like(q), k_grad = result_like(k);
    Tensor q_weight_grad = at::empty_symint(q_norm_weight.sym_sizes(), q_norm_weight.options()),
           k_weight_grad = at::empty_symint(k_norm_weight.sym_sizes(), k_norm_weight.options());
    call.q_out = &q_grad;
    call.k_out = &k_grad;
    Backend::norm_backward({call, q, k, q_weight_grad, k_weight_grad});
    return {std::move(q_grad), std::move(k_grad), std::move(q_weight_grad), std::move(k_weight_grad)};
  }

  static void rotate_into_cache_(Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_cache, Tensor& v_cache,
                                 ROPE_SOURCE, const OptTensor& slots, const OptTensor& q_norm_weight,
                                 const OptTensor& k_norm_weight, double norm_eps, double attention_factor,
                                 bool interleaved) {
    RotateCall call = ROPE_CALL("rope.rotate_into_cache_", &q, &k, false);
    call.set_norm(pointer(q_norm_weight), pointer(k_norm_weight), norm_eps);
    call.k_out = &k_cache;
    call.v = &v;
    call.v_out = &v_cache;
    call.slots = pointer(slots);
    check(call, true);
    Backend::rotate(call);
  }

  // -> gradients of cos and sin
  static std::tuple<Tensor, Tensor> rotate_table_backward(const Tensor& q_out_grad, const OptTensor& k_out_grad,
                                                          const Tensor& q, const OptTensor& k, ROPE_ANGLES) {
    const RotateCall call = ROPE_CALL("rope._rotate_table_backward", &q_out_grad, pointer(k_out_grad), inverse);
    check(call, false);
    check_gradients(call, q, pointer(k));
    TORCH_CHECK_VALUE(cos, call.op, ": inv_freq instead of cos and sin; its gradient is that of cos_sin");
    Tensor cos_grad = at::empty_symint(cos->sym_sizes(), cos->options()), sin_grad = at::empty_like(cos_grad);
    Backend::table_backward({call, q, pointer(k), cos_grad, sin_grad});
    return {std::move(cos_grad), std::move(sin_grad)};
  }

  static std::tuple<Tensor, Tensor> cos_sin(const Tensor& positions, const Tensor& inv_freq, double attention_factor,
                                            std::optional<at::ScalarType> dtype) {
    const at::ScalarType type = check_cos_sin("rope.cos_sin", positions, inv_freq, dtype, /*axes=*/false);
    return cos_sin_of(positions.unsqueeze(0), inv_freq.unsqueeze(0), attention_factor, type);
  }

  static std::tuple<Tensor, Tensor> axial_cos_sin(const Tensor& positions, const Tensor& inv_freq,
                                                  double attention_factor, std::optional<at::ScalarType> dtype) {
    const at::ScalarType type = check_cos_sin("rope._axial_cos_sin", positions, inv_freq, dtype, /*axes=*/true);
    return cos_sin_of(positions, inv_freq, attention_factor, type);
  }

 private:
  static std::tuple<Tensor, Tensor> cos_sin_of(const Tensor& positions, const Tensor& inv_freq, double attention_factor,
                                               at::ScalarType type) {
    auto sizes = positions.sym_sizes().slice(1).vec();
    sizes.push_back(inv_freq.sym_size(1));
    Tensor cos = at::empty_symint(sizes, inv_freq.options().dtype(type)), sin = at::empty_like(cos);
    Backend::cos_sin({positions, inv_freq, attention_factor, cos, sin});
    return {std::move(cos), std::move(sin)};
  }

  static std::tuple<Tensor, Tensor> to_new(RotateCall& call) {
    check(call, false);
    Tensor q_out = result_like(*call.q), k_out = result_like(*call.k);
    call.q_out = &q_out;
    call.k_out = &k_out;
    Backend::rotate(call);
    return {std::move(q_out), std::move(k_out)};
  }

  static const Tensor* pointer(const OptTensor& t) { return t ? &*t : nullptr; }
};

template <typename Backend>
void register_ops(torch::Library& m) {
  m.impl("rotate", &Ops<Backend>::rotate);
  m.impl("rotate_", &Ops<Backend>::rotate_);
  m.impl("rotate_qk", &Ops<Backend>::rotate_qk);
  m.impl("rotate_qk_", &Ops<Backend>::rotate_qk_);
  m.impl("norm_rotate_qk", &Ops<Backend>::norm_rotate_qk);
  m.impl("_norm_rotate_qk_backward", &Ops<Backend>::norm_rotate_qk_backward);
  m.impl("rotate_into_cache_", &Ops<Backend>::rotate_into_cache_);
  m.impl("_rotate_table_backward", &Ops<Backend>::rotate_table_backward);
  m.impl("cos_sin", &Ops<Backend>::cos_sin);
  m.impl("_axial_cos_sin", &Ops<Backend>::axial_cos_sin);
}

}  // namespace rope
