// The derivatives of the operators that return tensors.
//
// A rotation is linear in x: its backward is the same operator with inverse flipped. The gradients of a norm in q, k
// and the weights are an operator with a kernel of its own. All other derivatives are those of the definition: a
// backward calls it again, with the tensors that were saved, and lets torch differentiate it. The derivatives of
// cos_sin are written out, because a product of a far position and a frequency would round the angle.
#include <ATen/FuncTorchTLS.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>

#include "definition.h"
#include "operators.h"

namespace rope {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
bool varies(const Tensor& t) { return t.defined() && (t.requires_grad() || has_tangent(t)); }
// Returns whether a derivative with respect to an argument on the stack is needed.
bool needed(const Operator& op, const Stack& stack) {
  const auto arguments = torch::jit::last(stack, op.schema.arguments().size());
  const bool recording = at::GradMode::is_enabled();
  return std::any_of(arguments.begin(), arguments.end(), [&](const c10::IValue& value) {
    return value.isTensor() && (recording ? varies(value.toTensor()) : has_tangent(value.toTensor()));
  });
}

// ---- the tensors of a call ----

// The numbers of tensors in a list of all tensors of a call. The first three are numbers of q; that of k is one more. A
// tensor that the call lacks is undefined in the list.
constexpr int kGradients = 0, kXs = 2, kWeights = 4, kCos = 6, kSin = 7, kInvFreq = 8, kPositions = 9, kFactor = 10,
              kTensors = 11;

std::array<const Tensor**, kTensors> members_of(Call& c) {
  return {&c.sides[kQ].gradient,
          &c.sides[kK].gradient,
          &c.sides[kQ].in,
          &c.sides[kK].in,
          &c.sides[kQ].weight,
          &c.sides[kK].weight,
          &c.cos,
          &c.sin,
          &c.inv_freq,
          &c.positions,
          &c.sides[kQ].factor};
}
variable_list tensors_of(Call& call) {
  variable_list tensors;
  for (const Tensor** member : members_of(call)) tensors.push_back(*member ? **member : Tensor());
  return tensors;
}
// Returns the call with these tensors, which must live as long.
Call with_tensors(Call call, const variable_list& tensors) {
  const auto members = members_of(call);
  for (int i = 0; i < kTensors; i++) *members[i] = tensors[i].defined() ? &tensors[i] : nullptr;
  return call;
}

// Returns the call whose derivatives are those of a call: with a norm, they are rounded once.
Call rounded_once(Call call) {
  if (call.sides[kQ].weight) call.eager_rounding = call.round_before_weight = false;
  return call;
}

// ---- Function::apply ----

// Function::apply refuses to run inside torch.func transforms, because an arbitrary forward could mix their levels. The
// forwards here only call an operator, and save tensors of the level that runs them, as torch's own operators do, so
// their gradients are right (tests/operators/test_autograd.py shows it). Therefore the transforms are hidden while
// apply looks for them, and shown again when forward begins.
thread_local std::unique_ptr<at::functorch::FuncTorchTLSBase> hidden_transforms;

void show_transforms() {
  if (hidden_transforms) at::functorch::functorchTLSAccessor() = std::move(hidden_transforms);
}
template <typename F, typename... T>
variable_list apply(const T&... arguments) {
  struct Hidden {
    Hidden() { hidden_transforms = std::move(at::functorch::functorchTLSAccessor()); }
    ~Hidden() { show_transforms(); }  // if forward did not begin, because of an error
  } hidden;
  return F::apply(arguments...);
}

// Calls an operator in a forward. The graph of this level has its node already, so the operator runs below autograd on
// this level. The levels below must still be able to record it, so grad mode is on again: apply has switched it off for
// all levels.
variable_list call_below(const Operator& op, const Call& call) {
  show_transforms();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::AutoGradMode record(true);
  return op(call);
}

void redispatch(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  handle.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, &stack);
}

// ---- tangents ----

Tensor primal(const Tensor& t) { return has_tangent(t) ? t._fw_primal(/*level=*/0) : t; }
Tensor tangent_or_zeros(const Tensor& t) {
  return has_tangent(t) ? t._fw_grad(/*level=*/0) : t.defined() ? at::zeros_like(t) : t;
}
variable_list each(const variable_list& tensors, Tensor (*f)(const Tensor&)) {
  variable_list results(tensors.size());
  std::transform(tensors.begin(), tensors.end(), results.begin(), f);
  return results;
}
void set_tangent(const Tensor& out, const Tensor& tangent) {
  if (tangent.defined()) out._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}

// ---- the operators that rotate, and the backward of a norm ----

// Returns the gradients of the wanted tensors of a call (their numbers), given those of the results.
variable_list gradients_of_definition(const Call& call, variable_list tensors, const std::vector<int>& wanted,
                                      const variable_list& given) {
  if (wanted.empty()) return {};
  const bool create_graph = at::GradMode::is_enabled();
  const c10::AutoGradMode record(true);
  variable_list inputs, outputs, gradients;
  for (int i : wanted) {  // views, because one tensor may be computed from another one
    tensors[i] = tensors[i].view_as(tensors[i]);
    if (!tensors[i].requires_grad()) tensors[i].requires_grad_();  // its torch.func transform has ended
    inputs.push_back(tensors[i]);
  }
  const variable_list results = define(with_tensors(call, tensors));
  for (size_t i = 0; i < results.size(); i++) {
    if (!given[i].defined() || !results[i].requires_grad()) continue;
    outputs.push_back(results[i]);
    gradients.push_back(given[i]);
  }
  if (outputs.empty()) return variable_list(wanted.size());
  return torch::autograd::grad(outputs, inputs, gradients, create_graph, create_graph, /*allow_unused=*/true);
}

// The graph node of rotate, rotate_qk, norm_rotate_qk and _norm_rotate_qk_backward.
struct Derivatives : torch::autograd::Function<Derivatives> {
  // given: the tensors that the call has, without their tangents. numbers: of these tensors
  // own: the tensors with their tangents, which forward over reverse needs
  static variable_list forward(AutogradContext* ctx, at::TensorList given, const std::vector<int64_t>& numbers,
                               const Operator* op, const Call* call, const variable_list* own) {
    variable_list tensors(kTensors), saved = *own, constant;
    for (size_t n = 0; n < numbers.size(); n++) tensors[numbers[n]] = given[n];
    variable_list results = call_below(*op, with_tensors(*call, tensors));
    const auto any = [&](std::initializer_list<int> numbers) {
      return std::any_of(numbers.begin(), numbers.end(), [&](int i) { return varies((*own)[i]); });
    };
    const bool of_angles = any({kCos, kSin, kInvFreq}), of_factor = any({kFactor});
    for (size_t i = 0; i < results.size(); i++) {  // the results that need no gradient
      const int side = int(i % 2);
      const bool constant_factor = side == kK || !of_factor;
      if (!of_angles && constant_factor && !any({kGradients + side, kXs + side, kWeights + side})) {
        constant.push_back(results[i]);
      }
    }
    ctx->mark_non_differentiable(constant);
    ctx->set_materialize_grads(false);
    if (!of_angles && !of_factor && !call->sides[kQ].weight) {  // a rotation back needs no x
      saved[kXs] = saved[kXs + kK] = Tensor();
    }
    ctx->save_for_backward(std::move(saved));
    const Stack flags = op->arguments(with_tensors(*call, variable_list(kTensors)));
    for (size_t i = 0; i < flags.size(); i++) ctx->saved_data[std::to_string(i)] = flags[i];
    ctx->saved_data["operator"] = op->schema.name();
    ctx->saved_data["numbers"] = numbers;
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Operator& op = find(ctx->saved_data["operator"].toStringView());
    Stack flags;
    for (size_t i = 0; i < op.schema.arguments().size(); i++) flags.push_back(ctx->saved_data[std::to_string(i)]);
    const variable_list own = ctx->get_saved_variables();
    const Call call = rounded_once(with_tensors(op.read_flags(flags), own));
    const std::vector<int64_t> numbers = ctx->saved_data["numbers"].toIntVector();
    const auto wanted = [&](int i) {
      const auto at = std::find(numbers.begin(), numbers.end(), i);
      return at != numbers.end() && ctx->needs_input_grad(size_t(at - numbers.begin()));
    };
    variable_list result(kTensors);
    std::vector<int> others;  // those that no kernel computes
    if (call.is_backward()) {
      others = {kGradients, kGradients + kK, kXs, kXs + kK, kWeights, kWeights + kK};
    } else if (call.sides[kQ].weight) {
      if (wanted(kXs) || wanted(kXs + kK) || wanted(kWeights) || wanted(kWeights + kK)) norm_back(call, grads, result);
    } else {
      rotate_back(call, grads, wanted(kXs), wanted(kXs + kK), result);
    }
    others.insert(others.end(), {kCos, kSin, kInvFreq, kFactor});
    others.erase(std::remove_if(others.begin(), others.end(), [&](int i) { return !wanted(i); }), others.end());
    const variable_list defined = gradients_of_definition(call, own, others, grads);
    for (size_t i = 0; i < others.size(); i++) result[others[i]] = defined[i];
    variable_list of_arguments;  // of the given tensors, and then nothing for the other arguments of forward
    for (int64_t number : numbers) of_arguments.push_back(result[number]);
    of_arguments.resize(numbers.size() + 4);
    return of_arguments;
  }

 private:
  // Rotates the gradients of the results back.
  static void rotate_back(const Call& call, const variable_list& grads, bool q, bool k, variable_list& result) {
    Call back = call;
    back.inverse = !call.inverse;
    const bool wanted[] = {q && grads[kQ].defined(), k && grads.size() > 1 && grads[kK].defined()};
    Tensor given[] = {wanted[kQ] ? grads[kQ] : Tensor(), wanted[kK] ? grads[kK] : Tensor()};
    const Tensor*& factor = back.sides[kQ].factor;
    if (!wanted[kQ]) factor = nullptr;
    if (factor && call.eager_rounding) {  // torch multiplies before it rotates back
      given[kQ] = times_factor(given[kQ], *factor).to(given[kQ].scalar_type());
      factor = nullptr;
    }
    if (factor && !wanted[kK]) given[kK] = given[kQ].narrow(-2, 0, 0);  // only rotate_qk has a factor
    std::vector<int> sides;
    for (int i : {kQ, kK}) {
      back.sides[i].in = nullptr;
      if (!given[i].defined()) continue;
      back.sides[sides.size()].in = &given[i];
      sides.push_back(i);
    }
    if (sides.empty()) return;
    const variable_list rotated = find(sides.size() == 2 ? "rotate_qk" : "rotate")(back);
    for (size_t n = 0; n < sides.size(); n++) {
      if (wanted[sides[n]]) result[kXs + sides[n]] = rotated[n];
    }
  }

  static void norm_back(const Call& call, const variable_list& grads, variable_list& result) {
    if (!grads[kQ].defined() && !grads[kK].defined()) return;
    Call back = call;
    Tensor given[2];
    for (int i : {kQ, kK}) {
      given[i] = grads[i].defined() ? grads[i] : at::zeros_like(*call.sides[i].in);
      back.sides[i].gradient = &given[i];
    }
    const variable_list computed = find("_norm_rotate_qk_backward")(back);
    for (int i : {kQ, kK}) {
      if (!grads[i].defined()) continue;
      result[kXs + i] = computed[i];
      result[kWeights + i] = computed[2 + i];
    }
  }
};

void differentiate(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack& stack) {
  if (!needed(op, stack)) return redispatch(handle, keys, stack);
  Call call = op.read(stack);
  const variable_list own = tensors_of(call);
  const variable_list primals = each(own, primal);
  variable_list given;
  std::vector<int64_t> numbers;
  for (int i = 0; i < kTensors; i++) {
    if (!primals[i].defined()) continue;
    given.push_back(primals[i]);
    numbers.push_back(i);
  }
  variable_list results = apply<Derivatives>(at::TensorList(given), numbers, &op, &call, &own);
  const auto has = [&](int i) { return has_tangent(own[i]); };
  const bool linear = !call.sides[kQ].weight && !has(kCos) && !has(kSin) && !has(kInvFreq) && !has(kFactor);
  if (linear && (has(kXs) || has(kXs + kK))) {  // a tangent of x is rotated like x
    variable_list tensors = primals;
    for (int i : {kQ, kK}) tensors[kXs + i] = tangent_or_zeros(own[kXs + i]);
    const variable_list rotated = op(with_tensors(call, tensors));
    for (size_t i = 0; i < results.size(); i++) {
      if (has(kXs + int(i))) set_tangent(results[i], rotated[i]);
    }
  } else if (std::any_of(own.begin(), own.end(), has_tangent)) {
    const variable_list dual = define(rounded_once(call));
    for (size_t i = 0; i < results.size(); i++) set_tangent(results[i], dual[i]._fw_grad(/*level=*/0));
  }
  op.finish(stack, results);
}

// ---- cos_sin ----
//
// The gradient of an angle is h = sin_grad cos - cos_grad sin, and an angle is linear in positions and in frequencies.
// backward computes cos and sin again, because the results of forward may be of a narrow dtype, and because forward
// over reverse needs their tangents. It uses sums of products and not matrix products, in which autocast and TF32 would
// round the positions.

variable_list axial_cos_sin(const Tensor& positions, const Tensor& inv_freq, double attention_factor,
                            std::optional<at::ScalarType> dtype) {
  Call call{"rope.axial_cos_sin"};
  call.positions = &positions, call.inv_freq = &inv_freq;
  call.attention_factor = attention_factor, call.dtype = dtype;
  return find("axial_cos_sin")(call);
}

// Returns the dtype in which derivatives are computed.
at::ScalarType type_of_derivative(const Tensor& positions, const Tensor& inv_freq,
                                  std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = c10::promoteTypes(positions.scalar_type(), inv_freq.scalar_type());
  return c10::promoteTypes(type, dtype.value_or(at::kFloat));
}

// These two broadcast positions [axes, *P] and frequencies [axes, pairs] to [axes, *P, pairs]. Frequencies
// [2, axes, pairs] are the sum of two parts.
Tensor positions_over_pairs(const Tensor& positions, at::ScalarType type) { return positions.to(type).unsqueeze(-1); }
Tensor inv_freq_over_positions(Tensor inv_freq, const Tensor& positions, at::ScalarType type) {
  if (inv_freq.dim() == 3) inv_freq = inv_freq.sum(0);
  for (int64_t d = 1; d < positions.dim(); d++) inv_freq = inv_freq.unsqueeze(1);
  return inv_freq.to(type);
}

struct DerivativesOfCosSin : torch::autograd::Function<DerivativesOfCosSin> {
  static variable_list forward(AutogradContext* ctx, const Tensor& positions, const Tensor& inv_freq, const Call* call,
                               const variable_list* own) {
    Call below = *call;
    below.positions = &positions, below.inv_freq = &inv_freq;
    const variable_list results = call_below(find("axial_cos_sin"), below);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(*own);
    ctx->saved_data["attention_factor"] = call->attention_factor;
    ctx->saved_data["type"] = type_of_derivative(positions, inv_freq, call->dtype);
    return results;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list own = ctx->get_saved_variables();
    const Tensor &positions = own[0], &inv_freq = own[1];
    const auto type = ctx->saved_data["type"].toScalarType();
    variable_list result(4);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const variable_list tables =
        axial_cos_sin(positions, inv_freq, ctx->saved_data["attention_factor"].toDouble(), type);
    Tensor h;
    if (grads[1].defined()) h = grads[1].to(type) * tables[0];
    if (grads[0].defined()) h = h.defined() ? h - grads[0].to(type) * tables[1] : -(grads[0].to(type) * tables[1]);
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

template <bool axes>
void differentiate_cos_sin(const Operator& op, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                           Stack& stack) {
  if (!needed(op, stack)) return redispatch(handle, keys, stack);
  const Call call = op.read(stack);
  check_cos_sin(call, axes);
  if (!axes) {
    variable_list tables =
        axial_cos_sin(call.positions->unsqueeze(0), call.inv_freq->unsqueeze(-2), call.attention_factor, call.dtype);
    return op.finish(stack, tables);
  }
  const variable_list own{*call.positions, *call.inv_freq}, primals = each(own, primal);
  variable_list results = apply<DerivativesOfCosSin>(primals[0], primals[1], &call, &own);
  if (has_tangent(own[0]) || has_tangent(own[1])) {
    const at::ScalarType type = type_of_derivative(own[0], own[1], call.dtype);
    const variable_list tables = axial_cos_sin(primals[0], primals[1], call.attention_factor, type);
    const auto product = [&](const Tensor& positions, const Tensor& inv_freq) {
      return (positions_over_pairs(positions, type) * inv_freq_over_positions(inv_freq, positions, type)).sum(0);
    };
    const variable_list tangents = each(own, tangent_or_zeros);
    const Tensor angle = product(tangents[0], primals[1]) + product(primals[0], tangents[1]);
    set_tangent(results[0], -(tables[1] * angle).to(results[0].scalar_type()));
    set_tangent(results[1], (tables[0] * angle).to(results[1].scalar_type()));
  }
  op.finish(stack, results);
}

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Autograd, m) {
  for (const Operator& op : operators()) {
    if (op.in_place) continue;
    const std::string& name = op.schema.name();
    name == "cos_sin"         ? implement<&differentiate_cos_sin<false>>(m, op)
    : name == "axial_cos_sin" ? implement<&differentiate_cos_sin<true>>(m, op)
                              : implement<&differentiate>(m, op);
  }
}

}  // namespace rope
