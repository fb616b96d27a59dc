// The derivatives of rotate and rotate_qk with respect to x, and with respect to cos, sin and inv_freq if they are
// learned.
#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/new_ones.h>

#include "autograd.h"

namespace rope::autograd {

Tensor rotate_and_zero_rest(const Tensor& x, const Angles& angles) {
  const c10::SymInt rotary_dim = angles.cos->sym_size(-1) * 2, head_dim = x.sym_size(-1), start = angles.rotary_start;
  if (rotary_dim == head_dim) return rotate_op()(angles, x);
  Angles of_part = angles;
  of_part.rotary_start = 0;
  const Tensor part = rotate_op()(of_part, x.narrow_symint(-1, start, rotary_dim));
  return at::constant_pad_nd_symint(part, {start, head_dim - rotary_dim - start});
}

namespace {

variable_list rotated(const Angles& angles, const Tensor& q, const OptTensor& k) {
  if (!k) return {rotate_op()(angles, q)};
  auto [q_out, k_out] = rotate_qk_op()(angles, q, *k);
  return {std::move(q_out), std::move(k_out)};
}

// Rotates the gradients of the results back, and writes those of q and k, if they are needed, to result[first] and
// result[first + 1].
void rotate_back(AutogradContext* ctx, const Angles& angles, const variable_list& grads, size_t first,
                 variable_list& result) {
  const auto wanted = [&](size_t i) {
    return i < grads.size() && grads[i].defined() && ctx->needs_input_grad(first + i);
  };
  if (wanted(0) && wanted(1)) {
    std::tie(result[first], result[first + 1]) = rotate_qk_op()(angles.back(), grads[0], grads[1]);
  } else if (wanted(0)) {
    result[first] = rotate_op()(angles.back(), grads[0]);
  } else if (wanted(1)) {
    result[first + 1] = rotate_op()(angles.back(), grads[1]);
  }
}

// The graph node of rotate (k is None) and rotate_qk if only x, or q and k, need a gradient.
struct RotateFunction : torch::autograd::Function<RotateFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const OptTensor& k, const Angles& angles) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    save(ctx, angles, {});
    return with_gradients(ctx, rotated(angles, q, k), {q.requires_grad(), k && k->requires_grad()});
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved<Angles> s(ctx);
    variable_list result(3);
    rotate_back(ctx, s.angles(), grads, 0, result);
    return result;
  }
};

// The graph node of rotate and rotate_qk if cos and sin are learned. needs_input_grad counts only the tensors that are
// given, so k, which may be missing, comes after the others.
struct RotateLearnedFunction : torch::autograd::Function<RotateLearnedFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& cos, const Tensor& sin, const Tensor& q,
                               const OptTensor& k, const Angles& angles, const variable_list* own) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    const variable_list& o = *own;
    save(ctx, Tables{o[0], o[1], {}}.in(angles), {o[2], o[3]});
    return rotated(Tables{cos, sin, {}}.in(angles), q, k);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved<Angles> s(ctx);
    variable_list result(6);
    rotate_back(ctx, s.angles(), grads, 2, result);
    const bool q = grads[0].defined(), k = grads.size() > 1 && grads[1].defined();
    if ((q || k) && (ctx->needs_input_grad(0) || ctx->needs_input_grad(1))) {
      const OptTensor none;
      std::tie(result[0], result[1]) = table_backward_op()(s.angles(), grads[q ? 0 : 1], q && k ? grads[1] : none,
                                                           s.own[q ? 0 : 1], q && k ? s.own[1] : none);
      for (int i : {0, 1}) {
        if (!ctx->needs_input_grad(i)) result[i] = Tensor();
      }
    }
    return result;
  }
};

// Computes tables by token from inv_freq with the operator cos_sin, which has a derivative with respect to inv_freq.
TwoTensors tables_of_tokens(const RotateCall& call) {
  const Tensor& x = *call.q;
  const auto positions_from_zero = [&] {  // an arange that is a DTensor if inv_freq is one
    const at::TensorOptions options = call.inv_freq->options().dtype(at::kLong);
    return (call.inv_freq->new_ones_symint({x.sym_size(-3)}, options).cumsum(0) - 1).unsqueeze(0);
  };
  Tensor positions = call.positions ? call.positions->to(at::kLong) : positions_from_zero();
  if (positions.dim() == 1) positions = positions.unsqueeze(0);
  return cos_sin_op().call(positions + at::Scalar(call.offset), *call.inv_freq, /*attention_factor=*/1.0,
                           x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// Computes rotate (k is None) or rotate_qk if a derivative with respect to the tables or to inv_freq is needed.
variable_list rotate_learned(const char* op, const Tensor& q, const OptTensor& k, const Angles& angles) {
  const RotateCall call{angles, op, &q, k ? &*k : nullptr};
  check(call, /*in_place=*/false);
  if (angles.inv_freq) {
    const auto [cos, sin] = tables_of_tokens(call);
    const Tables tables{cos, sin, {}};
    const OptTensor no_positions;
    return tables.in(angles).pass([&](auto& c, auto& s, auto& f, auto&, auto&, auto&... flags) {
      return rotate_learned(op, q, k, {c, s, f, no_positions, 0, flags...});
    });
  }
  const Inputs in({*angles.cos, *angles.sin, q, k.value_or(Tensor())});
  const variable_list& p = in.primals;
  variable_list out = apply<RotateLearnedFunction>(p[0], p[1], p[2], optional(p[3]), angles, &in.own);
  if (!in.dual) return out;
  const Tables primals{p[0], p[1], {}}, tangents{tangent_or_zeros(in.own[0]), tangent_or_zeros(in.own[1]), {}};
  for (size_t i = 0; i < out.size(); i++) {
    const Tensor& x = in.own[2 + i];
    Tensor tangent;
    if (has_tangent(x)) tangent = rotate_op()(primals.in(angles), x._fw_grad(/*level=*/0));
    if (has_tangent(in.own[0]) || has_tangent(in.own[1])) {
      const Tensor of_tables = rotate_and_zero_rest(p[2 + i], tangents.in(angles));
      tangent = tangent.defined() ? tangent + of_tables : of_tables;
    }
    if (tangent.defined()) set_tangent(out[i], tangent);
  }
  return out;
}

Tensor rotate(const Angles& angles, c10::DispatchKeySet keys, const Tensor& x) {
  if (any_needed(angles.cos, angles.sin, angles.inv_freq)) {
    return rotate_learned("rope.rotate", x, std::nullopt, angles)[0];
  }
  if (has_tangent(x)) {
    const Tensor out = rotate_op()(angles, primal(x));
    set_tangent(out, rotate_op()(angles, x._fw_grad(/*level=*/0)));
    return out;
  }
  if (at::GradMode::is_enabled() && x.requires_grad()) return apply<RotateFunction>(x, OptTensor(), angles)[0];
  return rotate_op().below(keys, angles, x);
}

TwoTensors rotate_qk(const Angles& angles, c10::DispatchKeySet keys, const Tensor& q, const Tensor& k) {
  if (any_needed(angles.cos, angles.sin, angles.inv_freq)) {
    variable_list out = rotate_learned("rope.rotate_qk", q, k, angles);
    return {std::move(out[0]), std::move(out[1])};
  }
  if (has_tangent(q) || has_tangent(k)) {
    auto out = rotate_qk_op()(angles, primal(q), primal(k));
    const auto [q_tangent, k_tangent] = rotate_qk_op()(angles, tangent_or_zeros(q), tangent_or_zeros(k));
    if (has_tangent(q)) set_tangent(std::get<0>(out), q_tangent);
    if (has_tangent(k)) set_tangent(std::get<1>(out), k_tangent);
    return out;
  }
  if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad())) {
    auto out = apply<RotateFunction>(q, OptTensor(k), angles);
    return {std::move(out[0]), std::move(out[1])};
  }
  return rotate_qk_op().below(keys, angles, q, k);
}

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Autograd, m) {
  m.impl("rotate", kernel<&rotate>);
  m.impl("rotate_qk", kernel<&rotate_qk>);
}

}  // namespace rope::autograd
