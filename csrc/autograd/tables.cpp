// The derivatives of the operators that compute tables and their gradients: cos_sin, axial_cos_sin and
// _rotate_table_backward.
#include <ATen/TensorOperators.h>
#include <ATen/ops/promote_types.h>
#include <ATen/ops/zeros_like.h>

#include "autograd.h"

namespace rope::autograd {
namespace {

const auto& axial_cos_sin_op() {
  static const auto op = find<CosSinSchema>("axial_cos_sin");
  return op;
}

// The graph node of _rotate_table_backward. The gradients of the tables are linear in the gradients of the results and
// linear in x. They do not depend on the values of cos and sin, which give only a shape.
struct TableBackwardFunction : torch::autograd::Function<TableBackwardFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q_out_grad, const Tensor& q,
                               const OptTensor& k_out_grad, const OptTensor& k, const Angles& angles,
                               const variable_list* own) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    save(ctx, Tables{}.in(angles), *own);
    auto [cos_grad, sin_grad] = table_backward_op()(angles, q_out_grad, k_out_grad, q, k);
    return {std::move(cos_grad), std::move(sin_grad)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved<Angles> s(ctx);
    variable_list result(6);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const Tables given{grads[0].defined() ? grads[0] : at::zeros_like(grads[1]),
                       grads[1].defined() ? grads[1] : at::zeros_like(grads[0]),
                       {}};
    const Angles angles = given.in(s.angles());
    for (int i : {0, 1, 2, 3}) {  // each gradient is followed by its x
      if (!s.own[i].defined() || !ctx->needs_input_grad(i)) continue;
      result[i] = rotate_and_zero_rest(s.own[i ^ 1], i % 2 ? angles.back() : angles);
    }
    return result;
  }
};

// ---- cos_sin ----
//
// The gradient of an angle is h = sin_grad cos - cos_grad sin, and an angle is linear in positions and in frequencies.
// backward computes cos and sin again, because the results of forward may be of a narrow dtype, and because forward
// over reverse needs their tangents. It uses sums of products and not matrix products, in which autocast and TF32 would
// round the positions.

// Returns the dtype in which derivatives are computed.
at::ScalarType type_of_derivative(const Tensor& positions, const Tensor& inv_freq,
                                  std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = at::promote_types(positions.scalar_type(), inv_freq.scalar_type());
  return at::promote_types(type, dtype.value_or(at::kFloat));
}

// These two broadcast positions [axes, *P] and frequencies [axes, pairs] to [axes, *P, pairs]. Frequencies
// [2, axes, pairs] are the sum of two parts.
Tensor positions_over_pairs(const Tensor& positions, at::ScalarType type) { return positions.to(type).unsqueeze(-1); }
Tensor inv_freq_over_positions(Tensor inv_freq, const Tensor& positions, at::ScalarType type) {
  if (inv_freq.dim() == 3) inv_freq = inv_freq.sum(0);
  for (int64_t d = 1; d < positions.dim(); d++) inv_freq = inv_freq.unsqueeze(1);
  return inv_freq.to(type);
}

struct AxialCosSinFunction : torch::autograd::Function<AxialCosSinFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& positions, const Tensor& inv_freq,
                               double attention_factor, std::optional<at::ScalarType> dtype, const variable_list* own) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(*own);
    ctx->saved_data["attention_factor"] = attention_factor;
    ctx->saved_data["type"] = type_of_derivative(positions, inv_freq, dtype);
    auto [cos, sin] = axial_cos_sin_op().call(positions, inv_freq, attention_factor, dtype);
    return {std::move(cos), std::move(sin)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list own = ctx->get_saved_variables();
    const Tensor &positions = own[0], &inv_freq = own[1];
    const auto type = ctx->saved_data["type"].toScalarType();
    variable_list result(5);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const auto [cos, sin] =
        axial_cos_sin_op().call(positions, inv_freq, ctx->saved_data["attention_factor"].toDouble(), type);
    Tensor h;
    if (grads[1].defined()) h = grads[1].to(type) * cos;
    if (grads[0].defined()) h = h.defined() ? h - grads[0].to(type) * sin : -(grads[0].to(type) * sin);
    if (ctx->needs_input_grad(0)) {
      result[0] = (inv_freq_over_positions(inv_freq, positions, type) * h).sum(-1).to(positions.scalar_type());
    }
    if (ctx->needs_input_grad(1)) {
      Tensor f = positions_over_pairs(positions, type) * h;
      for (int64_t d = 1; d < positions.dim(); d++) f = f.sum(1);
      f = f.to(inv_freq.scalar_type());
      result[1] = inv_freq.dim() == 3 ? f.unsqueeze(0).expand_symint(inv_freq.sym_sizes()) : f;
    }
    return result;
  }
};

TwoTensors rotate_table_backward(const Angles& given, c10::DispatchKeySet keys, const Tensor& q_out_grad,
                                 const OptTensor& k_out_grad, const Tensor& q, const OptTensor& k) {
  if (!any_needed(q_out_grad, k_out_grad, q, k)) {
    return table_backward_op().below(keys, given, q_out_grad, k_out_grad, q, k);
  }
  const auto or_undefined = [](const OptTensor& t) { return t.value_or(Tensor()); };
  const Inputs in(
      {q_out_grad, q, or_undefined(k_out_grad), or_undefined(k), or_undefined(given.cos), or_undefined(given.sin)});
  const variable_list& p = in.primals;
  const Tables shapes{optional(p[4]), optional(p[5]), given.inv_freq};
  const Angles angles = shapes.in(given);
  variable_list out = apply<TableBackwardFunction>(p[0], p[1], optional(p[2]), optional(p[3]), angles, &in.own);
  Tensor cos_tangent, sin_tangent;
  for (int varied : {0, 1}) {  // 0: the gradients vary, 1: x varies
    if (!has_tangent(in.own[varied]) && !has_tangent(in.own[varied + 2])) continue;
    const auto at = [&](int i) { return i % 2 == varied ? tangent_or_zeros(in.own[i]) : p[i]; };
    const auto [c, s] = table_backward_op()(angles, at(0), optional(at(2)), at(1), optional(at(3)));
    cos_tangent = cos_tangent.defined() ? cos_tangent + c : c;
    sin_tangent = sin_tangent.defined() ? sin_tangent + s : s;
  }
  if (cos_tangent.defined()) {
    set_tangent(out[0], cos_tangent);
    set_tangent(out[1], sin_tangent);
  }
  return {std::move(out[0]), std::move(out[1])};
}

TwoTensors axial_cos_sin(c10::DispatchKeySet keys, const Tensor& positions, const Tensor& inv_freq,
                         double attention_factor, std::optional<at::ScalarType> dtype) {
  if (!any_needed(positions, inv_freq)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return axial_cos_sin_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, positions, inv_freq,
                                         attention_factor, dtype);
  }
  const Inputs in({positions, inv_freq});
  const variable_list& p = in.primals;
  variable_list out = apply<AxialCosSinFunction>(p[0], p[1], attention_factor, dtype, &in.own);
  if (in.dual) {
    const at::ScalarType type = type_of_derivative(positions, inv_freq, dtype);
    const auto [cos, sin] = axial_cos_sin_op().call(p[0], p[1], attention_factor, type);
    Tensor angle;
    const auto add = [&](const Tensor& positions, const Tensor& inv_freq) {
      const Tensor part =
          (positions_over_pairs(positions, type) * inv_freq_over_positions(inv_freq, positions, type)).sum(0);
      angle = angle.defined() ? angle + part : part;
    };
    if (has_tangent(positions)) add(positions._fw_grad(/*level=*/0), p[1]);
    if (has_tangent(inv_freq)) add(p[0], inv_freq._fw_grad(/*level=*/0));
    set_tangent(out[0], -(sin * angle).to(out[0].scalar_type()));
    set_tangent(out[1], (cos * angle).to(out[1].scalar_type()));
  }
  return {std::move(out[0]), std::move(out[1])};
}

TwoTensors cos_sin(c10::DispatchKeySet keys, const Tensor& positions, const Tensor& inv_freq, double attention_factor,
                   std::optional<at::ScalarType> dtype) {
  if (!any_needed(positions, inv_freq)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return cos_sin_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, positions, inv_freq, attention_factor,
                                   dtype);
  }
  check_cos_sin("rope.cos_sin", positions, inv_freq, dtype, /*axes=*/false);
  return axial_cos_sin_op().call(positions.unsqueeze(0), inv_freq.unsqueeze(-2), attention_factor, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Autograd, m) {
  m.impl("_rotate_table_backward", kernel<&rotate_table_backward>);
  m.impl("cos_sin", &cos_sin);
  m.impl("axial_cos_sin", &axial_cos_sin);
}

}  // namespace rope::autograd
