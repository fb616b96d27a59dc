// The autograd behaviour of the in-place operators, which have no gradient. The kernels are boxed, so that one function
// serves every schema.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include "../ops.h"

namespace rope::autograd {
namespace {

bool has_tangent(const Tensor& t) { return t._fw_grad(/*level=*/0).defined(); }

// Calls f(argument, tensor) for each tensor argument.
template <typename F>
void for_each_tensor(const c10::OperatorHandle& op, const torch::jit::Stack* stack, F&& f) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); i++) {
    if (values[i].isTensor() && values[i].toTensor().defined()) f(arguments[i], values[i].toTensor());
  }
}

// Returns what a message recommends instead of an in-place operator.
std::string functional_name(const c10::OperatorHandle& op) {
  std::string name = python_name(op);
  if (name == "rope.rotate_into_cache_") return "rope.rotate_qk or rope.norm_rotate_qk, and write the caches yourself";
  name.pop_back();
  return name;
}

// The kernel of an in-place operator above the back ends. It raises an error if a derivative is needed, because the
// graph would have that of the values before the rotation. It increases the version of each tensor that is written, so
// that a backward which has saved the tensor raises an error. It is registered for two keys, Autograd and
// ADInplaceOrView, and runs once: for the second key in inference_mode, which skips the first.
void guard_in_place(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool inference = c10::InferenceMode::is_enabled(), recording = at::GradMode::is_enabled();
  c10::SmallVector<Tensor, 4> written;
  {
    std::optional<c10::AutoFwGradMode> look;
    if (inference) look.emplace(true);  // inference_mode hides tangents
    for_each_tensor(op, stack, [&](const c10::Argument& argument, const Tensor& t) {
      TORCH_CHECK(!(recording && t.requires_grad()), python_name(op), ": ", argument.name(),
                  " requires grad but must not, because the in-place operator has no gradient; use ",
                  functional_name(op), ", or torch.no_grad()");
      TORCH_CHECK(!has_tangent(t), python_name(op), ": ", argument.name(),
                  " has a forward-mode tangent but must not, because the in-place operator does not change tangents; "
                  "use ",
                  functional_name(op));
      if (!argument.alias_info() || !argument.alias_info()->isWrite()) return;
      TORCH_CHECK(inference || !t.is_inference(), python_name(op), ": ", argument.name(),
                  " is an inference tensor but must be a normal tensor outside inference_mode; clone it first, or use ",
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

// The kernel for negated views, such as x.conj().imag. torch's own kernel expects an operator to return the tensors
// that it writes, and these operators return nothing.
void resolve_negated(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_neg()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !arguments[i].alias_info() || !arguments[i].alias_info()->isWrite(), python_name(op), ": ", arguments[i].name(),
        " is a negated view but must not be one, because it is written in place; call resolve_neg() first, or use ",
        functional_name(op));
    value = value.toTensor().resolve_neg();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative), stack);
}

template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* f>
void register_in_place(torch::Library& m) {
  for (const std::string& schema : schemas()) {
    if (schema.find("!)") == std::string::npos) continue;  // writes nothing
    m.impl(schema.substr(0, schema.find('(')).c_str(), torch::CppFunction::makeFromBoxedFunction<f>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Autograd, m) { register_in_place<&guard_in_place>(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, ADInplaceOrView, m) { register_in_place<&guard_in_place>(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Negative, m) { register_in_place<&resolve_negated>(m); }

}  // namespace rope::autograd
