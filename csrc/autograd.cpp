// Gradients, and what in-place operators owe to autograd.
//
// A rotation is linear in x: its backward is the same operator with inverse flipped, so it is differentiable to any
// order, and a forward-mode tangent is rotated like x itself.
#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops.h"

namespace rope {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using RotateSchema = Tensor(const Tensor&, ROPE_ANGLES);
using RotateQkSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, ROPE_ANGLES);

const auto& rotate_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("rope::rotate", "").typed<RotateSchema>();
  return op;
}
const auto& rotate_qk_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("rope::rotate_qk", "").typed<RotateQkSchema>();
  return op;
}

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
bool has_tangent(const OptTensor& t) { return t.has_value() && has_tangent(*t); }
bool requires_grad(const OptTensor& t) { return t.has_value() && t->requires_grad(); }

// What backward needs beside the gradient.
void save_angles(AutogradContext* ctx, ROPE_ANGLES) {
  ctx->save_for_backward(
      {cos.value_or(Tensor()), sin.value_or(Tensor()), inv_freq.value_or(Tensor()), positions.value_or(Tensor())});
  ctx->saved_data["offset"] = std::move(offset);
  ctx->saved_data["attention_factor"] = attention_factor;
  ctx->saved_data["flags"] = int64_t(interleaved) | int64_t(inverse) << 1;
}

// Calls f with the saved angles, the other way round.
template <typename F>
auto with_inverse_angles(AutogradContext* ctx, F&& f) {
  const auto saved = ctx->get_saved_variables();
  const auto optional = [&](int i) { return saved[i].defined() ? OptTensor(saved[i]) : std::nullopt; };
  const int64_t flags = ctx->saved_data["flags"].toInt();
  return f(optional(0), optional(1), optional(2), optional(3), ctx->saved_data["offset"].toSymInt(),
           ctx->saved_data["attention_factor"].toDouble(), bool(flags & 1), !(flags & 2));
}

constexpr int kAngleCount = 8;

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
    save_angles(ctx, cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse);
    return rotate_op().call(x, ROPE_ANGLES_PASSED);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(1 + kAngleCount);
    result[0] = with_inverse_angles(ctx, [&](auto&&... angles) { return rotate_op().call(grads[0], angles...); });
    return result;
  }
};

struct RotateQk : torch::autograd::Function<RotateQk> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, ROPE_ANGLES) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    save_angles(ctx, cos, sin, inv_freq, positions, offset, attention_factor, interleaved, inverse);
    auto [q_out, k_out] = rotate_qk_op().call(q, k, ROPE_ANGLES_PASSED);
    return {std::move(q_out), std::move(k_out)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(2 + kAngleCount);
    const bool q = grads[0].defined() && ctx->needs_input_grad(0), k = grads[1].defined() && ctx->needs_input_grad(1);
    with_inverse_angles(ctx, [&](auto&&... angles) {
      if (q && k) {
        std::tie(result[0], result[1]) = rotate_qk_op().call(grads[0], grads[1], angles...);
      } else if (q) {
        result[0] = rotate_op().call(grads[0], angles...);
      } else if (k) {
        result[1] = rotate_op().call(grads[1], angles...);
      }
    });
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

std::string functional_name(const c10::OperatorHandle& op) {
  std::string name = python_name(op);
  name.pop_back();
  return name;
}

void refuse_tangent(const c10::OperatorHandle& op, const c10::Argument& argument, const Tensor& t) {
  std::optional<c10::AutoFwGradMode> look;
  if (c10::InferenceMode::is_enabled()) look.emplace(true);  // it hides tangents
  TORCH_CHECK(!has_tangent(t), python_name(op), ": ", argument.name(),
              " has a forward-mode tangent, which the in-place operator would leave as it is; use ",
              functional_name(op));
}

// Autograd of an in-place operator: the graph would keep the gradient of the values before.
void guard_in_place(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for_each_tensor(op, stack, [&](const c10::Argument& argument, const Tensor& t) {
    TORCH_CHECK(!(at::GradMode::is_enabled() && t.requires_grad()), python_name(op), ": ", argument.name(),
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
  std::vector<Tensor> written;
  for_each_tensor(op, stack, [&](const c10::Argument& argument, const Tensor& t) {
    refuse_tangent(op, argument, t);  // guard_in_place has, but not in inference_mode
    if (!argument.alias_info() || !argument.alias_info()->isWrite()) return;
    TORCH_CHECK(!t.is_inference() || c10::InferenceMode::is_enabled(), python_name(op), ": ", argument.name(),
                " is an inference tensor, which can be written only in inference_mode; clone it, or use ",
                functional_name(op));
    written.push_back(t);
  });
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const Tensor& t : written) torch::autograd::impl::bump_version(t);
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

TORCH_LIBRARY_IMPL(rope, Autograd, m) {
  m.impl("rotate", &rotate);
  m.impl("rotate_qk", &rotate_qk);
  m.impl("cos_sin", torch::CppFunction::makeFromBoxedFunction<&no_gradient>());
  for (const char* op : {"rotate_", "rotate_qk_"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&guard_in_place>());
}

TORCH_LIBRARY_IMPL(rope, ADInplaceOrView, m) {
  for (const char* op : {"rotate_", "rotate_qk_"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}

}  // namespace rope
