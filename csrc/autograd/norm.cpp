// The derivatives of norm_rotate_qk and of its backward.
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>

#include <numeric>

#include "autograd.h"

namespace rope::autograd {
namespace {

const auto& norm_rotate_qk_op() {
  static const Operator<TwoTensors(const NormAngles&, const Tensor&, const Tensor&, const Tensor&, const Tensor&)> op(
      "norm_rotate_qk");
  return op;
}
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
const auto& norm_rotate_qk_backward_op() {
  static const Operator<FourTensors(const NormAngles&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                    const Tensor&, const Tensor&)>
      op("_norm_rotate_qk_backward");
  return op;
}

// ---- the norm in torch's operators, for the derivatives that no kernel computes ----
//
// The norm is n = x r w, where r = 1 / sqrt(mean(x^2) + eps). Let h be the gradient of n, and u = h w. Then
//   gradient of x = r (u - r^2 mean(u x) x),
//   gradient of w = sum of h x r over all tokens, and over all heads if these share w.
// A weight has the dimensions over which a mean is taken: [head_dim] or [heads, head_dim].

Tensor widened(const Tensor& t) { return t.to(at::toOpMathType(t.scalar_type())); }
Tensor mean_product(const Tensor& a, const Tensor& b, const Tensor& weight) {
  const int64_t dims[] = {-1, -2};
  return (a * b).mean(at::IntArrayRef(dims, size_t(weight.dim())), /*keepdim=*/true);
}
Tensor inverse_rms(const Tensor& x, const Tensor& weight, double eps) {
  return (mean_product(x, x, weight) + eps).rsqrt();
}
Tensor sum_for(const Tensor& weight, const Tensor& terms) {
  std::vector<int64_t> dims(terms.dim() - weight.dim());
  std::iota(dims.begin(), dims.end(), 0);
  return terms.sum(dims).to(weight.scalar_type());
}

Tensor norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor wide = widened(x);
  return (wide * inverse_rms(wide, weight, eps) * weight).to(x.scalar_type());
}

std::pair<Tensor, Tensor> norm_backward(const Tensor& gradient, const Tensor& x_narrow, const Tensor& weight,
                                        double eps) {
  const Tensor x = widened(x_narrow), h = widened(gradient), r = inverse_rms(x, weight, eps), u = h * weight;
  const Tensor x_grad = r * (u - r.square() * mean_product(u, x, weight) * x);
  return {x_grad.to(x_narrow.scalar_type()), sum_for(weight, h * x * r)};
}

// Computes the backward of norm_backward: returns the gradients of h, x and w, given the gradients a of x_grad and b of
// weight_grad.
std::tuple<Tensor, Tensor, Tensor> norm_backward_backward(const Tensor& a_narrow, const Tensor& b,
                                                          const Tensor& gradient, const Tensor& x_narrow,
                                                          const Tensor& weight, double eps) {
  const Tensor x = widened(x_narrow), h = widened(gradient), a = widened(a_narrow), w = widened(weight);
  const Tensor r = inverse_rms(x, w, eps), r2 = r.square(), u = h * w;
  const Tensor ux = mean_product(u, x, w), ax = mean_product(a, x, w);
  const Tensor du = r * (a - r2 * ax * x);
  // the gradient of r, divided by the number of channels over which the mean is taken
  const Tensor dr = mean_product(a, u, w) - 3 * r2 * ux * ax + mean_product(b * h, x, w);
  const Tensor dx = r * (b * h - r2 * (ux * a + ax * u + dr * x));
  const Tensor dh = du * w + b * x * r;
  return {dh.to(gradient.scalar_type()), dx.to(x_narrow.scalar_type()), sum_for(weight, h * du)};
}

struct NormRotateQkBackwardFunction : torch::autograd::Function<NormRotateQkBackwardFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q_out_grad, const Tensor& k_out_grad,
                               const Tensor& q, const Tensor& k, const Tensor& q_norm_weight,
                               const Tensor& k_norm_weight, const NormAngles& angles, const variable_list* own) {
    const BelowThisLevel guard;
    save(ctx, angles, *own);
    auto [q_grad, k_grad, q_weight_grad, k_weight_grad] =
        norm_rotate_qk_backward_op()(angles, q_out_grad, k_out_grad, q, k, q_norm_weight, k_norm_weight);
    const bool of_q = any_needed(q_out_grad, q, q_norm_weight), of_k = any_needed(k_out_grad, k, k_norm_weight);
    return with_gradients(ctx, {q_grad, k_grad, q_weight_grad, k_weight_grad}, {of_q, of_k, of_q, of_k});
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved<NormAngles> s(ctx);
    const NormAngles angles = s.angles();
    variable_list result(8);
    const auto [q_h, k_h] = rotate_qk_op()(angles.back(), s.own[0], s.own[1]);
    Tensor q_h_grad, k_h_grad;
    std::tie(q_h_grad, result[2], result[4]) =
        norm_backward_backward(grads[0], grads[2], q_h, s.own[2], s.own[4], angles.norm_eps);
    std::tie(k_h_grad, result[3], result[5]) =
        norm_backward_backward(grads[1], grads[3], k_h, s.own[3], s.own[5], angles.norm_eps);
    std::tie(result[0], result[1]) = rotate_qk_op()(angles, q_h_grad, k_h_grad);
    return result;
  }
};

struct NormRotateQkFunction : torch::autograd::Function<NormRotateQkFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& q_norm_weight,
                               const Tensor& k_norm_weight, const NormAngles& angles, const variable_list* own) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    save(ctx, angles, *own);
    auto [q_out, k_out] = norm_rotate_qk_op()(angles, q, k, q_norm_weight, k_norm_weight);
    return with_gradients(ctx, {q_out, k_out}, {any_needed(q, q_norm_weight), any_needed(k, k_norm_weight)});
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved<NormAngles> s(ctx);
    variable_list result(6);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const auto or_zeros = [&](int i) { return grads[i].defined() ? grads[i] : at::zeros_like(s.own[i]); };
    std::tie(result[0], result[1], result[2], result[3]) =
        norm_rotate_qk_backward_op()(s.angles(), or_zeros(0), or_zeros(1), s.own[0], s.own[1], s.own[2], s.own[3]);
    for (int i : {0, 1}) {
      if (!grads[i].defined()) result[i] = result[i + 2] = Tensor();
    }
    return result;
  }
};

// The operators with a norm have no gradient of the angles. This function raises an error if one is needed, because the
// gradient would be a silent zero otherwise.
void refuse_angle_gradients(const char* op, const Angles& angles) {
  const auto check = [&](const char* name, const OptTensor& t) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !(t && t->requires_grad() && at::GradMode::is_enabled()), op, ": ", name,
        " requires grad but must not, because its gradient is not implemented; detach it, or compute the norm with "
        "torch.nn.functional.rms_norm and rotate with rope.rotate_qk");
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(t), op, ": ", name,
                                " has a forward-mode tangent but must not, because its derivative is not implemented; "
                                "detach it");
  };
  check("cos", angles.cos);
  check("sin", angles.sin);
  check("inv_freq", angles.inv_freq);
}

// Gives each result the tangent of its dual tensor, if that has one.
void carry_tangents(std::initializer_list<Tensor> duals, const variable_list& outs) {
  size_t i = 0;
  for (const Tensor& dual : duals) {
    Tensor out = outs[i++];
    if (has_tangent(dual)) set_tangent(out, dual._fw_grad(/*level=*/0));
  }
}

TwoTensors norm_rotate_qk(const NormAngles& angles, c10::DispatchKeySet keys, const Tensor& q, const Tensor& k,
                          const Tensor& q_norm_weight, const Tensor& k_norm_weight) {
  refuse_angle_gradients("rope.norm_rotate_qk", angles);
  if (!any_needed(q, k, q_norm_weight, k_norm_weight)) {
    return norm_rotate_qk_op().below(keys, angles, q, k, q_norm_weight, k_norm_weight);
  }
  const Inputs in({q, k, q_norm_weight, k_norm_weight});
  const variable_list& p = in.primals;
  variable_list out = apply<NormRotateQkFunction>(p[0], p[1], p[2], p[3], angles, &in.own);
  if (in.dual) {
    const auto [q_dual, k_dual] =
        rotate_qk_op()(angles, norm(q, q_norm_weight, angles.norm_eps), norm(k, k_norm_weight, angles.norm_eps));
    carry_tangents({q_dual, k_dual}, out);
  }
  return {std::move(out[0]), std::move(out[1])};
}

FourTensors norm_rotate_qk_backward(const NormAngles& angles, c10::DispatchKeySet keys, const Tensor& q_out_grad,
                                    const Tensor& k_out_grad, const Tensor& q, const Tensor& k,
                                    const Tensor& q_norm_weight, const Tensor& k_norm_weight) {
  refuse_angle_gradients("rope._norm_rotate_qk_backward", angles);
  if (!any_needed(q_out_grad, k_out_grad, q, k, q_norm_weight, k_norm_weight)) {
    return norm_rotate_qk_backward_op().below(keys, angles, q_out_grad, k_out_grad, q, k, q_norm_weight, k_norm_weight);
  }
  const Inputs in({q_out_grad, k_out_grad, q, k, q_norm_weight, k_norm_weight});
  const variable_list& p = in.primals;
  variable_list out = apply<NormRotateQkBackwardFunction>(p[0], p[1], p[2], p[3], p[4], p[5], angles, &in.own);
  if (in.dual) {
    const auto [q_h, k_h] = rotate_qk_op()(angles.back(), q_out_grad, k_out_grad);
    const auto [q_dual, q_weight_dual] = norm_backward(q_h, q, q_norm_weight, angles.norm_eps);
    const auto [k_dual, k_weight_dual] = norm_backward(k_h, k, k_norm_weight, angles.norm_eps);
    carry_tangents({q_dual, k_dual, q_weight_dual, k_weight_dual}, out);
  }
  return {std::move(out[0]), std::move(out[1]), std::move(out[2]), std::move(out[3])};
}

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Autograd, m) {
  m.impl("norm_rotate_qk", kernel<&norm_rotate_qk>);
  m.impl("_norm_rotate_qk_backward", kernel<&norm_rotate_qk_backward>);
}

}  // namespace rope::autograd
