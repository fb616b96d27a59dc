// One checked call, and how a back end takes it. A back end is a struct with
//   static void rotate(const RotateCall&);
//   static void cos_sin(const CosSinCall&);
// and one line: TORCH_LIBRARY_IMPL(rope, <key>, m) { rope::register_ops<Backend>(m); }
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "rope.h"

namespace rope {

using at::Tensor;
using OptTensor = std::optional<at::Tensor>;

// The arguments that every rotating operator ends with, and how to hand them on.
#define ROPE_ANGLES                                                                                  \
  const OptTensor &cos, const OptTensor &sin, const OptTensor &inv_freq, const OptTensor &positions, \
      c10::SymInt offset, double attention_factor, bool interleaved, bool inverse
#define ROPE_ANGLES_PASSED cos, sin, inv_freq, positions, std::move(offset), attention_factor, interleaved, inverse

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

  const char* q_name() const { return k ? "q" : "x"; }
  RopeParams params() const;  // of real tensors, after check
};

// In place unless q_out and k_out are set afterwards.
#define ROPE_CALL(op, q, k) \
  {op, q, k, q, k, cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse}

// attention_factor as two floats, for float32 arithmetic.
struct SplitFactor {
  float hi, lo;
};
SplitFactor split_factor(double attention_factor);

struct CosSinCall {
  const Tensor& positions;  // any shape P
  const Tensor& inv_freq;   // [rotary_dim / 2]
  double attention_factor;
  const Tensor& cos;  // [*P, rotary_dim / 2], contiguous
  const Tensor& sin;
};

// ValueError and TypeError of the contract. Also right for fake tensors: sizes stay symbolic, and values are not looked
// at.
void check(const RotateCall& call, bool in_place);
at::ScalarType check_cos_sin(const Tensor& positions, const Tensor& inv_freq, std::optional<at::ScalarType> dtype);

// at::empty_like(x). The fake one of torch differs from the real one in strides of dimensions of size 1, so those that
// x keeps are said here.
inline Tensor result_like(const Tensor& x) {
  if (!x.unsafeGetTensorImpl()->is_non_overlapping_and_dense_or_false()) return at::empty_like(x);
  return at::empty_strided_symint(x.sym_sizes(), x.sym_strides(), x.options());
}

template <typename Backend>
struct Ops {
  static Tensor rotate(const Tensor& x, ROPE_ANGLES) {
    RotateCall call = ROPE_CALL("rope.rotate", &x, nullptr);
    check(call, false);
    Tensor out = result_like(x);
    call.q_out = &out;
    Backend::rotate(call);
    return out;
  }

  static void rotate_(Tensor& x, ROPE_ANGLES) {
    const RotateCall call = ROPE_CALL("rope.rotate_", &x, nullptr);
    check(call, true);
    Backend::rotate(call);
  }

  static std::tuple<Tensor, Tensor> rotate_qk(const Tensor& q, const Tensor& k, ROPE_ANGLES) {
    RotateCall call = ROPE_CALL("rope.rotate_qk", &q, &k);
    check(call, false);
    Tensor q_out = result_like(q), k_out = result_like(k);
    call.q_out = &q_out;
    call.k_out = &k_out;
    Backend::rotate(call);
    return {std::move(q_out), std::move(k_out)};
  }

  static void rotate_qk_(Tensor& q, Tensor& k, ROPE_ANGLES) {
    const RotateCall call = ROPE_CALL("rope.rotate_qk_", &q, &k);
    check(call, true);
    Backend::rotate(call);
  }

  static std::tuple<Tensor, Tensor> cos_sin(const Tensor& positions, const Tensor& inv_freq, double attention_factor,
                                            std::optional<at::ScalarType> dtype) {
    const at::ScalarType type = check_cos_sin(positions, inv_freq, dtype);
    auto sizes = positions.sym_sizes().vec();
    sizes.push_back(inv_freq.sym_size(0));
    Tensor cos = at::empty_symint(sizes, inv_freq.options().dtype(type)), sin = at::empty_like(cos);
    Backend::cos_sin({positions, inv_freq, attention_factor, cos, sin});
    return {std::move(cos), std::move(sin)};
  }
};

template <typename Backend>
void register_ops(torch::Library& m) {
  m.impl("rotate", &Ops<Backend>::rotate);
  m.impl("rotate_", &Ops<Backend>::rotate_);
  m.impl("rotate_qk", &Ops<Backend>::rotate_qk);
  m.impl("rotate_qk_", &Ops<Backend>::rotate_qk_);
  m.impl("cos_sin", &Ops<Backend>::cos_sin);
}

}  // namespace rope
