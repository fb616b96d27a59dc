// Gradients, and what in-place operators owe to autograd.
//
// A rotation is linear in x: its backward is the same operator with inverse flipped, so it is differentiable to any
// order, and a forward-mode tangent is rotated like x itself. The norm is not linear: its backward is an operator of
// its own, one pass, whose backward in turn is written in torch's operators.
#include <ATen/FuncTorchTLS.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>

#include "ops.h"

namespace rope {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <typename Schema>
c10::TypedOperatorHandle<Schema> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}
const auto& rotate_op() {
  static const auto op = find<Tensor(const Tensor&, ROPE_ANGLES)>("rope::rotate");
  return op;
}
const auto& rotate_qk_op() {
  static const auto op = find<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, ROPE_ANGLES)>("rope::rotate_qk");
  return op;
}
const auto& norm_rotate_qk_op() {
  static const auto op =
      find<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, ROPE_NORM_ANGLES)>(
          "rope::norm_rotate_qk");
  return op;
}
const auto& norm_rotate_qk_backward_op() {
  static const auto op = find<std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, ROPE_NORM_ANGLES)>(
      "rope::_norm_rotate_qk_backward");
  return op;
}

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
bool has_tangent(const OptTensor& t) { return t.has_value() && has_tangent(*t); }
bool requires_grad(const OptTensor& t) { return t.has_value() && t->requires_grad(); }

// What backward needs beside the gradient: tensors of the operator's own, and the angles.
struct Saved {
  variable_list own;
  OptTensor cos, sin, inv_freq, positions;
  c10::SymInt offset;
  double norm_eps, attention_factor;
  bool interleaved, inverse;
};

void save(AutogradContext* ctx, const variable_list& own, ROPE_ANGLES, double norm_eps = 0) {
  variable_list tensors = {cos.value_or(Tensor()), sin.value_or(Tensor()), inv_freq.value_or(Tensor()),
                           positions.value_or(Tensor())};
  tensors.insert(tensors.end(), own.begin(), own.end());
  ctx->save_for_backward(std::move(tensors));
  ctx->saved_data["offset"] = std::move(offset);
  ctx->saved_data["norm_eps"] = norm_eps;
  ctx->saved_data["attention_factor"] = attention_factor;
  ctx->saved_data["flags"] = int64_t(interleaved) | int64_t(inverse) << 1;
}

Saved saved(AutogradContext* ctx) {
  variable_list tensors = ctx->get_saved_variables();
  const auto optional = [&](int i) { return tensors[i].defined() ? OptTensor(tensors[i]) : std::nullopt; };
  const int64_t flags = ctx->saved_data["flags"].toInt();
  return {{tensors.begin() + 4, tensors.end()},
          optional(0),
          optional(1),
          optional(2),
          optional(3),
          ctx->saved_data["offset"].toSymInt(),
          ctx->saved_data["norm_eps"].toDouble(),
          ctx->saved_data["attention_factor"].toDouble(),
          bool(flags & 1),
          bool(flags & 2)};
}

// What the operators have in their schema after the tensors of their own; inverse relative to what was saved.
#define ROPE_SAVED_SOURCE(s) (s).cos, (s).sin, (s).inv_freq, (s).positions, (s).offset
#define ROPE_SAVED_ANGLES(s, flip) \
  ROPE_SAVED_SOURCE(s), (s).attention_factor, (s).interleaved, (flip) ? !(s).inverse : (s).inverse
#define ROPE_SAVED_NORM_ANGLES(s) ROPE_SAVED_SOURCE(s), (s).norm_eps, (s).attention_factor, (s).interleaved

constexpr int kAngleCount = 8;  // arguments from cos on; the norm's functions take one more, what to save

// Function::apply refuses to run inside torch.func transforms, because an arbitrary forward could mix their levels.
// Ours only calls an operator, and saves what belongs to the level that runs it, as torch's own operators do: gradients
// come out right (tests/test_autograd.py). So the transforms are out of sight while apply looks for them, until forward
// begins.
class OutOfFunctorchsSight {
 public:
  OutOfFunctorchsSight() : transforms_(std::move(at::functorch::functorchTLSAccessor())), outer_(current_) {
    current_ = this;
  }
  ~OutOfFunctorchsSight() {
    end();
    current_ = outer_;
  }
  static void end() {
    if (current_ && current_->transforms_) at::functorch::functorchTLSAccessor() = std::move(current_->transforms_);
  }

 private:
  std::unique_ptr<at::functorch::FuncTorchTLSBase> transforms_;
  OutOfFunctorchsSight* outer_;
  static thread_local OutOfFunctorchsSight* current_;
};
thread_local OutOfFunctorchsSight* OutOfFunctorchsSight::current_ = nullptr;

// In forward: this level's graph has its node; what is called belongs to the levels below, which record if they want to
// (apply has switched grad mode off for them all).
struct BelowThisLevel {
  BelowThisLevel() { OutOfFunctorchsSight::end(); }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::AutoGradMode record{true};
};

struct Rotate : torch::autograd::Function<Rotate> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, ROPE_ANGLES) {
    const BelowThisLevel guard;
    save(ctx, {}, cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse);
    return rotate_op().call(x, ROPE_ANGLES_PASSED);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s = saved(ctx);
    variable_list result(1 + kAngleCount);
    result[0] = rotate_op().call(grads[0], ROPE_SAVED_ANGLES(s, true));
    return result;
  }
};

struct RotateQk : torch::autograd::Function<RotateQk> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, ROPE_ANGLES) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    save(ctx, {}, cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse);
    auto [q_out, k_out] = rotate_qk_op().call(q, k, ROPE_ANGLES_PASSED);
    return {std::move(q_out), std::move(k_out)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s = saved(ctx);
    variable_list result(2 + kAngleCount);
    const bool q = grads[0].defined() && ctx->needs_input_grad(0), k = grads[1].defined() && ctx->needs_input_grad(1);
    if (q && k) {
      std::tie(result[0], result[1]) = rotate_qk_op().call(grads[0], grads[1], ROPE_SAVED_ANGLES(s, true));
    } else if (q) {
      result[0] = rotate_op().call(grads[0], ROPE_SAVED_ANGLES(s, true));
    } else if (k) {
      result[1] = rotate_op().call(grads[1], ROPE_SAVED_ANGLES(s, true));
    }
    return result;
  }
};

// ---- the norm in torch's operators, for the derivatives that no kernel computes ----
//
// With r = 1 / sqrt(mean(x^2) + eps) the norm is n = x r w. For a gradient h of n, and u = h w:
//   gradient of x = r (u - r^2 mean(u x) x),   gradient of w = sum of h x r over all heads of all tokens.

Tensor widened(const Tensor& t) { return t.to(at::toOpMathType(t.scalar_type())); }
Tensor mean_product(const Tensor& a, const Tensor& b) { return (a * b).mean(-1, /*keepdim=*/true); }
Tensor inverse_rms(const Tensor& x, double eps) { return (mean_product(x, x) + eps).rsqrt(); }
Tensor sum_of_heads(const Tensor& t) {
  std::vector<int64_t> dims(t.dim() - 1);
  std::iota(dims.begin(), dims.end(), 0);
  return t.sum(dims);
}

Tensor norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor wide = widened(x);
  return (wide * inverse_rms(wide, eps) * weight).to(x.scalar_type());
}

std::pair<Tensor, Tensor> norm_backward(const Tensor& gradient, const Tensor& x_narrow, const Tensor& weight,
                                        double eps) {
  const Tensor x = widened(x_narrow), h = widened(gradient), r = inverse_rms(x, eps), u = h * weight;
  const Tensor x_grad = r * (u - r.square() * mean_product(u, x) * x);
  return {x_grad.to(x_narrow.scalar_type()), sum_of_heads(h * x * r).to(weight.scalar_type())};
}

// The backward of norm_backward: from the gradients a of x_grad and b of weight_grad to those of h, x and w.
std::tuple<Tensor, Tensor, Tensor> norm_backward_backward(const Tensor& a_narrow, const Tensor& b,
                                                          const Tensor& gradient, const Tensor& x_narrow,
                                                          const Tensor& weight, double eps) {
  const Tensor x = widened(x_narrow), h = widened(gradient), a = widened(a_narrow), w = widened(weight);
  const Tensor r = inverse_rms(x, eps), r2 = r.square(), u = h * w;
  const Tensor ux = mean_product(u, x), ax = mean_product(a, x);
  const Tensor du = r * (a - r2 * ax * x);
  const Tensor dr = mean_product(a, u) - 3 * r2 * ux * ax + mean_product(b * h, x);  // divided by head_dim
  const Tensor dx = r * (b * h - r2 * (ux * a + ax * u + dr * x));
  const Tensor dh = du * w + b * x * r;
  return {dh.to(gradient.scalar_type()), dx.to(x_narrow.scalar_type()), sum_of_heads(h * du).to(weight.scalar_type())};
}

struct NormRotateQkBackward : torch::autograd::Function<NormRotateQkBackward> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q_out_grad, const Tensor& k_out_grad,
                               const Tensor& q, const Tensor& k, const Tensor& q_norm_weight,
                               const Tensor& k_norm_weight, ROPE_NORM_ANGLES, const variable_list* own) {
    const BelowThisLevel guard;
    save(ctx, *own, cos, sin, inv_freq, positions, offset, attention_factor, interleaved, /*inverse=*/false, norm_eps);
    auto [q_grad, k_grad, q_weight_grad, k_weight_grad] = norm_rotate_qk_backward_op().call(
        q_out_grad, k_out_grad, q, k, q_norm_weight, k_norm_weight, ROPE_NORM_ANGLES_PASSED);
    return {std::move(q_grad), std::move(k_grad), std::move(q_weight_grad), std::move(k_weight_grad)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s = saved(ctx);
    variable_list result(6 + kAngleCount + 1);
    const auto [q_h, k_h] = rotate_qk_op().call(s.own[0], s.own[1], ROPE_SAVED_ANGLES(s, true));
    Tensor q_h_grad, k_h_grad;
    std::tie(q_h_grad, result[2], result[4]) =
        norm_backward_backward(grads[0], grads[2], q_h, s.own[2], s.own[4], s.norm_eps);
    std::tie(k_h_grad, result[3], result[5]) =
        norm_backward_backward(grads[1], grads[3], k_h, s.own[3], s.own[5], s.norm_eps);
    std::tie(result[0], result[1]) = rotate_qk_op().call(q_h_grad, k_h_grad, ROPE_SAVED_ANGLES(s, false));
    return result;
  }
};

struct NormRotateQk : torch::autograd::Function<NormRotateQk> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& q_norm_weight,
                               const Tensor& k_norm_weight, ROPE_NORM_ANGLES, const variable_list* own) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    save(ctx, *own, cos, sin, inv_freq, positions, offset, attention_factor, interleaved, /*inverse=*/false, norm_eps);
    auto [q_out, k_out] = norm_rotate_qk_op().call(q, k, q_norm_weight, k_norm_weight, ROPE_NORM_ANGLES_PASSED);
    return {std::move(q_out), std::move(k_out)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s = saved(ctx);
    variable_list result(4 + kAngleCount + 1);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const auto or_zeros = [&](int i) { return grads[i].defined() ? grads[i] : at::zeros_like(s.own[i]); };
    std::tie(result[0], result[1], result[2], result[3]) = norm_rotate_qk_backward_op().call(
        or_zeros(0), or_zeros(1), s.own[0], s.own[1], s.own[2], s.own[3], ROPE_SAVED_NORM_ANGLES(s));
    for (int i : {0, 1}) {
      if (!grads[i].defined()) result[i] = result[i + 2] = Tensor();
    }
    return result;
  }
};

// The angles have no gradient: an error now rather than a silent zero.
void refuse_angle_gradients(const char* op, const OptTensor& cos, const OptTensor& sin, const OptTensor& inv_freq) {
  const auto check = [&](const char* name, const OptTensor& t) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !(requires_grad(t) && at::GradMode::is_enabled()), op, ": ", name,
        " requires grad, and its gradient is not implemented; detach it, or rotate with torch's own operators");
    TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(t), op, ": ", name,
                                " has a forward-mode tangent, and its derivative is not implemented; detach it");
  };
  check("cos", cos);
  check("sin", sin);
  check("inv_freq", inv_freq);
}

void set_tangent(Tensor& out, const Tensor& tangent) {
  out._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}
Tensor primal(const Tensor& t) { return t._fw_primal(/*level=*/0); }
Tensor tangent_or_zeros(const Tensor& t) { return has_tangent(t) ? t._fw_grad(/*level=*/0) : at::zeros_like(t); }

Tensor rotate(c10::DispatchKeySet keys, const Tensor& x, ROPE_ANGLES) {
  refuse_angle_gradients("rope.rotate", cos, sin, inv_freq);
  if (has_tangent(x)) {
    Tensor out =
        rotate_op().call(primal(x), cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse);
    set_tangent(out, rotate_op().call(x._fw_grad(/*level=*/0), ROPE_ANGLES_PASSED));
    return out;
  }
  if (at::GradMode::is_enabled() && x.requires_grad()) {
    OutOfFunctorchsSight until_forward;
    return Rotate::apply(x, ROPE_ANGLES_PASSED);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return rotate_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, x, ROPE_ANGLES_PASSED);
}

std::tuple<Tensor, Tensor> rotate_qk(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, ROPE_ANGLES) {
  refuse_angle_gradients("rope.rotate_qk", cos, sin, inv_freq);
  if (has_tangent(q) || has_tangent(k)) {
    auto out = rotate_qk_op().call(primal(q), primal(k), cos, sin, inv_freq, positions, offset, attention_factor,
                                   interleaved, inverse);
    const auto [q_tangent, k_tangent] =
        rotate_qk_op().call(tangent_or_zeros(q), tangent_or_zeros(k), ROPE_ANGLES_PASSED);
    if (has_tangent(q)) set_tangent(std::get<0>(out), q_tangent);
    if (has_tangent(k)) set_tangent(std::get<1>(out), k_tangent);
    return out;
  }
  if (at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad())) {
    OutOfFunctorchsSight until_forward;
    auto out = RotateQk::apply(q, k, ROPE_ANGLES_PASSED);
    return {std::move(out[0]), std::move(out[1])};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return rotate_qk_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, ROPE_ANGLES_PASSED);
}

// A derivative of the norm depends on its inputs. So what backward saves are the inputs with their tangents (forward
// over reverse needs them), while the operator runs on what is below the tangents.
struct NormInputs {
  variable_list own, primals;
  bool dual;
  explicit NormInputs(variable_list inputs) : own(std::move(inputs)) {
    dual = std::any_of(own.begin(), own.end(), [](const Tensor& t) { return has_tangent(t); });
    for (const Tensor& t : own) primals.push_back(dual ? primal(t) : t);
  }
  static bool needed(std::initializer_list<const Tensor*> inputs) {
    return std::any_of(inputs.begin(), inputs.end(), [](const Tensor* t) {
      return has_tangent(*t) || (at::GradMode::is_enabled() && t->requires_grad());
    });
  }
};

void carry_tangents(std::initializer_list<Tensor> duals, const variable_list& outs) {
  size_t i = 0;
  for (const Tensor& dual : duals) {
    Tensor out = outs[i++];
    if (has_tangent(dual)) set_tangent(out, dual._fw_grad(/*level=*/0));
  }
}

std::tuple<Tensor, Tensor> norm_rotate_qk(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k,
                                          const Tensor& q_norm_weight, const Tensor& k_norm_weight, ROPE_NORM_ANGLES) {
  refuse_angle_gradients("rope.norm_rotate_qk", cos, sin, inv_freq);
  if (!NormInputs::needed({&q, &k, &q_norm_weight, &k_norm_weight})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return norm_rotate_qk_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, q_norm_weight, k_norm_weight,
                                          ROPE_NORM_ANGLES_PASSED);
  }
  const NormInputs in({q, k, q_norm_weight, k_norm_weight});
  const variable_list& p = in.primals;
  variable_list out;
  {
    OutOfFunctorchsSight until_forward;
    out = NormRotateQk::apply(p[0], p[1], p[2], p[3], cos, sin, inv_freq, positions, offset, norm_eps, attention_factor,
                              interleaved, &in.own);
  }
  if (in.dual) {
    const auto [q_dual, k_dual] =
        rotate_qk_op().call(norm(q, q_norm_weight, norm_eps), norm(k, k_norm_weight, norm_eps), ROPE_SOURCE_PASSED,
                            attention_factor, interleaved, /*inverse=*/false);
    carry_tangents({q_dual, k_dual}, out);
  }
  return {std::move(out[0]), std::move(out[1])};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_rotate_qk_backward(c10::DispatchKeySet keys, const Tensor& q_out_grad,
                                                                   const Tensor& k_out_grad, const Tensor& q,
                                                                   const Tensor& k, const Tensor& q_norm_weight,
                                                                   const Tensor& k_norm_weight, ROPE_NORM_ANGLES) {
  refuse_angle_gradients("rope._norm_rotate_qk_backward", cos, sin, inv_freq);
  if (!NormInputs::needed({&q_out_grad, &k_out_grad, &q, &k, &q_norm_weight, &k_norm_weight})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return norm_rotate_qk_backward_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q_out_grad, k_out_grad, q,
                                                   k, q_norm_weight, k_norm_weight, ROPE_NORM_ANGLES_PASSED);
  }
  const NormInputs in({q_out_grad, k_out_grad, q, k, q_norm_weight, k_norm_weight});
  const variable_list& p = in.primals;
  variable_list out;
  {
    OutOfFunctorchsSight until_forward;
    out = NormRotateQkBackward::apply(p[0], p[1], p[2], p[3], p[4], p[5], cos, sin, inv_freq, positions, offset,
                                      norm_eps, attention_factor, interleaved, &in.own);
  }
  if (in.dual) {
    const auto [q_h, k_h] = rotate_qk_op().call(q_out_grad, k_out_grad, ROPE_SOURCE_PASSED, attention_factor,
                                                interleaved, /*inverse=*/true);
    const auto [q_dual, q_weight_dual] = norm_backward(q_h, q, q_norm_weight, norm_eps);
    const auto [k_dual, k_weight_dual] = norm_backward(k_h, k, k_norm_weight, norm_eps);
    carry_tangents({q_dual, k_dual, q_weight_dual, k_weight_dual}, out);
  }
  return {std::move(out[0]), std::move(out[1]), std::move(out[2]), std::move(out[3])};
}

// ---- operators without a gradient of their own: boxed, so that one function serves every schema ----

// Calls f(argument, tensor) for each tensor argument.
template <typename F>
void for_each_tensor(const c10::OperatorHandle& op, const torch::jit::Stack* stack, F&& f) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); i++) {
    if (values[i].isTensor() && values[i].toTensor().defined()) f(arguments[i], values[i].toTensor());
  }
}

std::string python_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();  // rope::rotate_
  return name.replace(name.find("::"), 2, ".");
}

// What to use instead of an in-place operator.
std::string functional_name(const c10::OperatorHandle& op) {
  std::string name = python_name(op);
  if (name == "rope.rotate_into_cache_") return "rope.rotate_qk or rope.norm_rotate_qk, and write the cache yourself";
  name.pop_back();
  return name;
}

void refuse_tangent(const c10::OperatorHandle& op, const c10::Argument& argument, const Tensor& t) {
  TORCH_CHECK(!has_tangent(t), python_name(op), ": ", argument.name(),
              " has a forward-mode tangent, which the in-place operator would leave as it is; use ",
              functional_name(op));
}

// Autograd of an in-place operator: the graph would keep the gradient of the values before.
void guard_in_place(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool recording = at::GradMode::is_enabled();
  for_each_tensor(op, stack, [&](const c10::Argument& argument, const Tensor& t) {
    TORCH_CHECK(!(recording && t.requires_grad()), python_name(op), ": ", argument.name(),
                " requires grad, and the in-place operator has no gradient; use ", functional_name(op),
                ", or torch.no_grad()");
    refuse_tangent(op, argument, t);
  });
  at::AutoDispatchBelowAutograd guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// What was written gets a version bump, so that a backward which saved it complains; in inference_mode too, where
// Autograd is passed over.
void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool inference = c10::InferenceMode::is_enabled();
  c10::SmallVector<Tensor, 4> written;
  {
    std::optional<c10::AutoFwGradMode> look;
    if (inference) look.emplace(true);  // it hides tangents
    for_each_tensor(op, stack, [&](const c10::Argument& argument, const Tensor& t) {
      refuse_tangent(op, argument, t);  // guard_in_place has, but not in inference_mode
      if (!argument.alias_info() || !argument.alias_info()->isWrite()) return;
      TORCH_CHECK(inference || !t.is_inference(), python_name(op), ": ", argument.name(),
                  " is an inference tensor, which can be written only in inference_mode; clone it, or use ",
                  functional_name(op));
      written.push_back(t);
    });
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const Tensor& t : written) torch::autograd::impl::bump_version(t);
}

// torch's own handling of negated views (x.conj().imag) expects what was written as a return value, and there is none.
void resolve_negated(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_neg()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !arguments[i].alias_info() || !arguments[i].alias_info()->isWrite(), python_name(op), ": ", arguments[i].name(),
        " is a negated view, which cannot be written in place; resolve_neg() it, or use ", functional_name(op));
    value = value.toTensor().resolve_neg();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative), stack);
}

void no_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for_each_tensor(op, stack, [&](const c10::Argument& argument, const Tensor& t) {
    TORCH_CHECK_NOT_IMPLEMENTED(!(at::GradMode::is_enabled() && t.requires_grad()) && !has_tangent(t), python_name(op),
                                ": ", argument.name(),
                                " requires grad or has a tangent, and its gradient is not implemented; detach it");
  });
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

}  // namespace

constexpr const char* kInPlace[] = {"rotate_", "rotate_qk_", "rotate_into_cache_"};

TORCH_LIBRARY_IMPL(rope, Autograd, m) {
  m.impl("rotate", &rotate);
  m.impl("rotate_qk", &rotate_qk);
  m.impl("norm_rotate_qk", &norm_rotate_qk);
  m.impl("_norm_rotate_qk_backward", &norm_rotate_qk_backward);
  m.impl("cos_sin", torch::CppFunction::makeFromBoxedFunction<&no_gradient>());
  for (const char* op : kInPlace) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&guard_in_place>());
}

TORCH_LIBRARY_IMPL(rope, ADInplaceOrView, m) {
  for (const char* op : kInPlace) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}

TORCH_LIBRARY_IMPL(rope, Negative, m) {
  for (const char* op : kInPlace) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&resolve_negated>());
}

}  // namespace rope
