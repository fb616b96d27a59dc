// The code that the derivatives of the operators share.
//
// A rotation is linear in x: its backward is the same operator with inverse flipped, so it is differentiable to any
// order, and a forward-mode tangent is rotated like x itself (rotation.inc). A rotation is linear in cos and sin too:
// their gradient is an operator of its own, whose derivatives are rotations again (tables.inc). The norm is not linear:
// its backward is an operator that computes all gradients in one pass, and the backward of that operator is written in
// torch's operators (norm.inc). The backward of cos_sin is written in torch's operators too (tables.inc).
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "../ops.h"

namespace rope::autograd {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- calls of the operators ----

template <typename Schema>
c10::TypedOperatorHandle<Schema> find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((C10_STRINGIZE(ROPE_NAMESPACE) "::" + std::string(name)).c_str(), "")
      .typed<Schema>();
}

// An operator that takes a rotation. op(rotation, own...) calls it from the top of the dispatcher;
// op.below(keys, rotation, own...) calls the kernels below autograd.
template <typename F>
class Operator;
template <typename A, typename R, typename... Own>
class Operator<R(const A&, Own...)> {
 public:
  explicit Operator(const char* name) : op_(find<Schema>(name)) {}

  R operator()(const A& rotation, Own... own) const {
    return rotation.pass([&](const auto&... each) { return op_.call(own..., each...); });
  }
  R below(c10::DispatchKeySet keys, const A& rotation, Own... own) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return rotation.pass(
        [&](const auto&... each) { return op_.redispatch(keys & c10::after_ADInplaceOrView_keyset, own..., each...); });
  }

 private:
  using Schema = typename Unpacked<R(const A&, Own...)>::Type;
  c10::TypedOperatorHandle<Schema> op_;
};

using TwoTensors = std::tuple<Tensor, Tensor>;
inline const auto& rotate_op() {
  static const Operator<Tensor(const Rotation&, const Tensor&)> op("rotate");
  return op;
}
inline const auto& rotate_qk_op() {
  static const Operator<TwoTensors(const Rotation&, const Tensor&, const Tensor&)> op("rotate_qk");
  return op;
}
inline const auto& table_backward_op() {
  static const Operator<TwoTensors(const Rotation&, const Tensor&, const OptTensor&, const Tensor&, const OptTensor&)>
      op("_rotate_table_backward");
  return op;
}
using CosSinSchema = TwoTensors(const Tensor&, const Tensor&, double, std::optional<at::ScalarType>);
inline const auto& cos_sin_op() {
  static const auto op = find<CosSinSchema>("cos_sin");
  return op;
}

// ---- which derivatives are needed ----

inline bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
inline bool has_tangent(const OptTensor& t) { return t.has_value() && has_tangent(*t); }
// Returns whether a derivative with respect to t is needed.
inline bool needed(const Tensor& t) {
  return has_tangent(t) || (t.defined() && t.requires_grad() && at::GradMode::is_enabled());
}
inline bool needed(const OptTensor& t) { return t.has_value() && needed(*t); }
template <typename... T>
bool any_needed(const T&... inputs) {
  return (needed(inputs) || ...);
}

// ---- what backward needs besides the gradient: the rotation, and tensors of the operator's own ----

// Saves the rotation and the own tensors for backward.
template <typename A>
void save(AutogradContext* ctx, const A& rotation, const variable_list& own) {
  variable_list tensors;
  int numbers = 0;
  const auto keep = [&](const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, OptTensor>) {
      tensors.push_back(value.value_or(Tensor()));
    } else {
      ctx->saved_data[std::to_string(numbers++)] = value;
    }
  };
  rotation.pass([&](const auto&... each) { (keep(each), ...); });
  tensors.insert(tensors.end(), own.begin(), own.end());
  ctx->save_for_backward(std::move(tensors));
}

inline OptTensor optional(const Tensor& t) { return t.defined() ? OptTensor(t) : std::nullopt; }
inline Tensor or_undefined(const OptTensor& t) { return t.value_or(Tensor()); }

// Reads what save() saved.
template <typename A, typename = TypesOf<A>>
class Saved;
template <typename A, typename... Each>
class Saved<A, Types<Each...>> {
 public:
  variable_list own;

  explicit Saved(AutogradContext* ctx) : own(ctx->get_saved_variables()), each_{next<Each>(ctx)...} {
    own.erase(own.begin(), own.begin() + tensors_);
  }
  A rotation() const {
    return std::apply([](const auto&... each) { return A{each...}; }, each_);
  }

 private:
  int tensors_ = 0, numbers_ = 0;  // how many next() has read
  std::tuple<Each...> each_;

  template <typename T>
  T next(AutogradContext* ctx) {
    if constexpr (std::is_same_v<T, OptTensor>) {
      return optional(own[size_t(tensors_++)]);
    } else {
      return ctx->saved_data[std::to_string(numbers_++)].template to<T>();
    }
  }
};

// The tables or frequencies of a call. in(rotation) returns the rotation with these instead of their own.
struct Tables {
  OptTensor cos, sin, inv_freq;
  Rotation in(const Rotation& rotation) const {
    return rotation.pass([&](auto&, auto&, auto&, auto&... others) { return Rotation{cos, sin, inv_freq, others...}; });
  }
};

// ---- Function::apply ----

// Function::apply refuses to run inside torch.func transforms, because an arbitrary forward could mix their levels. The
// forwards here only call an operator, and save tensors of the level that runs them, as torch's own operators do, so
// their gradients are right (tests/operators/test_autograd.py shows it). Therefore the transforms are hidden while
// apply looks for them, and shown again when forward begins.
inline thread_local std::unique_ptr<at::functorch::FuncTorchTLSBase> hidden_transforms;

inline void show_transforms() {
  if (hidden_transforms) at::functorch::functorchTLSAccessor() = std::move(hidden_transforms);
}

template <typename F, typename... T>
auto apply(const T&... arguments) {
  struct Hidden {
    Hidden() { hidden_transforms = std::move(at::functorch::functorchTLSAccessor()); }
    ~Hidden() { show_transforms(); }  // if forward did not begin, because of an error
  } hidden;
  return F::apply(arguments...);
}

// A guard for forward. The graph of this level has its node already, so the operators that forward calls run below
// autograd on this level. The levels below must still be able to record them, so grad mode is on again: apply has
// switched it off for all levels.
struct BelowThisLevel {
  BelowThisLevel() { show_transforms(); }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::AutoGradMode record{true};
};

// Returns the results of a forward, and tells autograd which of them do not require grad: those computed from inputs
// that do not. differentiable: whether each result requires grad.
inline variable_list with_gradients(AutogradContext* ctx, variable_list results,
                                    std::initializer_list<bool> differentiable) {
  variable_list constant;
  for (size_t i = 0; i < results.size(); i++) {
    if (!differentiable.begin()[i]) constant.push_back(results[i]);
  }
  ctx->mark_non_differentiable(constant);
  return results;
}

// ---- tangents ----

inline void set_tangent(const Tensor& out, const Tensor& tangent) {
  out._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}
inline Tensor tangent_or_zeros(const Tensor& t) {
  return has_tangent(t) ? t._fw_grad(/*level=*/0) : t.defined() ? at::zeros_like(t) : t;
}
inline Tensor primal(const Tensor& t) { return t._fw_primal(/*level=*/0); }

// The inputs of an operator whose derivatives depend on them. For backward, the inputs are saved with their tangents
// (own), which forward over reverse needs, while the operator runs on the values without tangents (primals). An
// undefined tensor stands for None.
struct Inputs {
  variable_list own, primals;
  bool dual;
  explicit Inputs(variable_list inputs) : own(std::move(inputs)) {
    dual = std::any_of(own.begin(), own.end(), [](const Tensor& t) { return has_tangent(t); });
    for (const Tensor& t : own) primals.push_back(has_tangent(t) ? primal(t) : t);
  }
};

// Returns x rotated, with zeros in the channels that pass through. This is the derivative of a rotation with respect to
// its tables, in the direction of the given cos and sin, which may be any numbers.
Tensor rotate_and_zero_rest(const Tensor& x, const Rotation& rotation);

}  // namespace rope::autograd
