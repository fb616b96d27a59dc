// How the in-place operators, which have no gradient, behave under autograd, vmap and with negated views.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>

#include "operators.h"

namespace rope {
namespace {

// Calls f(name, value, is_written) for each tensor argument.
template <typename F>
void for_each_tensor(const Operator& op, Stack& stack, F&& f) {
  const auto& arguments = op.schema.arguments();
  c10::IValue* const values = &torch::jit::peek(stack, 0, arguments.size());
  for (size_t i = 0; i < arguments.size(); i++) {
    if (values[i].isTensor() && values[i].toTensor().defined()) f(arguments[i].name(), values[i], op.writes(stack, i));
  }
}

// Returns what a message recommends instead of an in-place operator.
std::string functional_name(const Operator& op) {
  if (op.name == "rope.rotate_into_cache_")
    return "rope.rotate_qk or rope.norm_rotate_qk, and write the caches yourself";
  return op.name.substr(0, op.name.size() - 1);
}

// The kernel of an in-place operator above the back ends. It raises an error if a derivative is needed, because the
// graph would have that of the values before the rotation. It increases the version of each tensor that is written, so
// that a backward which has saved the tensor raises an error. It is registered for two keys, Autograd and
// ADInplaceOrView, and runs once: for the second key in inference_mode, which skips the first.
void guard(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack& stack) {
  const bool inference = c10::InferenceMode::is_enabled(), recording = at::GradMode::is_enabled();
  c10::SmallVector<Tensor, 4> written;
  {
    std::optional<c10::AutoFwGradMode> look;
    if (inference) look.emplace(true);  // inference_mode hides tangents
    for_each_tensor(op, stack, [&](const std::string& name, const c10::IValue& value, bool is_written) {
      const Tensor& t = value.toTensor();
      TORCH_CHECK(!(recording && t.requires_grad()), op.name, ": ", name,
                  " requires grad but must not, because the in-place operator has no gradient; use ",
                  functional_name(op), ", or torch.no_grad()");
      TORCH_CHECK(!t._fw_grad(/*level=*/0).defined(), op.name, ": ", name,
                  " has a forward-mode tangent but must not, because the in-place operator does not change tangents; "
                  "use ",
                  functional_name(op));
      if (!is_written) return;
      TORCH_CHECK(inference || !t.is_inference(), op.name, ": ", name,
                  " is an inference tensor but must be a normal tensor outside inference_mode; clone it first, or use ",
                  functional_name(op));
      written.push_back(t);
    });
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    handle.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, &stack);
  }
  for (const Tensor& t : written) t.unsafeGetTensorImpl()->bump_version();
}

// The kernel for negated views, such as x.conj().imag. torch's own kernel expects an operator to return the tensors
// that it writes, and these operators return nothing.
void resolve_negated(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack& stack) {
  for_each_tensor(op, stack, [&](const std::string& name, c10::IValue& value, bool is_written) {
    if (!value.toTensor().is_neg()) return;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_written, op.name, ": ", name,
        " is a negated view but must not be one, because it is written in place; call resolve_neg() first, or use ",
        functional_name(op));
    value = value.toTensor().resolve_neg();
  });
  handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Negative),
                         &stack);
}

// The kernel under vmap, whose rule may call the operator for one sample after the other. It checks the arguments
// before, and with them the memory of all samples.
void check_samples(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack& stack) {
  Stack arguments = torch::jit::last(stack, op.schema.arguments().size()).vec();
  handle.callBoxedForDispatchKey(c10::DispatchKey::Meta, arguments);
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::FuncTorchVmapMode);
  handle.redispatchBoxed(keys & below, &stack);
}

template <void (*f)(const Operator&, const c10::OperatorHandle&, c10::DispatchKeySet, Stack&)>
void implement_in_place(torch::Library& m) {
  for (const Operator& op : operators()) {
    if (op.in_place) implement<f>(m, op);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Autograd, m) { implement_in_place<&guard>(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, ADInplaceOrView, m) { implement_in_place<&guard>(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Negative, m) { implement_in_place<&resolve_negated>(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, FuncTorchVmapMode, m) { implement_in_place<&check_samples>(m); }

}  // namespace rope
