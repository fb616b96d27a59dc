// Gradients, and what in-place operators owe to autograd.
//
// A rotation is linear in x: its backward is the same operator with inverse flipped, so it is differentiable to any
// order, and a forward-mode tangent is rotated like x itself. It is linear in cos and sin too: their gradient is an
// operator of its own, whose derivatives are rotations again. The norm is not linear: its backward is one pass, whose
// backward in turn is written in torch's operators, and so is that of cos_sin.
#include <ATen/FuncTorchTLS.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/new_ones.h>
#include <ATen/ops/promote_types.h>
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
const auto& table_backward_op() {
  static const auto op =
      find<std::tuple<Tensor, Tensor>(const Tensor&, const OptTensor&, const Tensor&, const OptTensor&, ROPE_ANGLES)>(
          "rope::_rotate_table_backward");
  return op;
}
using CosSinSchema = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double, std::optional<at::ScalarType>);
const auto& cos_sin_op() {
  static const auto op = find<CosSinSchema>("rope::cos_sin");
  return op;
}
const auto& axial_cos_sin_op() {
  static const auto op = find<CosSinSchema>("rope::_axial_cos_sin");
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
// Whether a derivative in t is asked for.
bool needed(const Tensor& t) {
  return has_tangent(t) || (t.defined() && t.requires_grad() && at::GradMode::is_enabled());
}
bool needed(const OptTensor& t) { return t.has_value() && needed(*t); }

OptTensor optional(const Tensor& t) { return t.defined() ? OptTensor(t) : std::nullopt; }

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
  const int64_t flags = ctx->saved_data["flags"].toInt();
  return {{tensors.begin() + 4, tensors.end()},
          optional(tensors[0]),
          optional(tensors[1]),
          optional(tensors[2]),
          optional(tensors[3]),
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
// come out right (tests/operators/test_autograd.py). So the transforms are out of sight while apply looks for them, until forward
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

// The gradients of q and k, where there are any, to result[first] and after it.
void turn_back(AutogradContext* ctx, const Saved& s, const variable_list& grads, size_t first, variable_list& result) {
  const auto wanted = [&](size_t i) {
    return i < grads.size() && grads[i].defined() && ctx->needs_input_grad(first + i);
  };
  if (wanted(0) && wanted(1)) {
    std::tie(result[first], result[first + 1]) = rotate_qk_op().call(grads[0], grads[1], ROPE_SAVED_ANGLES(s, true));
  } else if (wanted(0)) {
    result[first] = rotate_op().call(grads[0], ROPE_SAVED_ANGLES(s, true));
  } else if (wanted(1)) {
    result[first + 1] = rotate_op().call(grads[1], ROPE_SAVED_ANGLES(s, true));
  }
}

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
    turn_back(ctx, s, grads, 0, result);
    return result;
  }
};

// ---- learned tables: with derivatives in cos and sin too ----

// k may be missing, and needs_input_grad counts the tensors that are there: so it comes after the others.
struct RotateLearned : torch::autograd::Function<RotateLearned> {
  static variable_list forward(AutogradContext* ctx, const Tensor& cos, const Tensor& sin, const Tensor& q,
                               const OptTensor& k, const OptTensor& positions, c10::SymInt offset,
                               double attention_factor, bool interleaved, bool inverse, const variable_list* own) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    const variable_list& o = *own;
    save(ctx, {o[2], o[3]}, o[0], o[1], std::nullopt, positions, offset, attention_factor, interleaved, inverse);
    if (!k) {
      return {rotate_op().call(q, cos, sin, std::nullopt, positions, std::move(offset), attention_factor, interleaved,
                               inverse)};
    }
    auto [q_out, k_out] = rotate_qk_op().call(q, *k, cos, sin, std::nullopt, positions, std::move(offset),
                                              attention_factor, interleaved, inverse);
    return {std::move(q_out), std::move(k_out)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s = saved(ctx);
    variable_list result(10);
    turn_back(ctx, s, grads, 2, result);
    const bool q = grads[0].defined(), k = grads.size() > 1 && grads[1].defined();
    if ((q || k) && (ctx->needs_input_grad(0) || ctx->needs_input_grad(1))) {
      const OptTensor none;
      std::tie(result[0], result[1]) =
          table_backward_op().call(grads[q ? 0 : 1], q && k ? grads[1] : none, s.own[q ? 0 : 1],
                                   q && k ? s.own[1] : none, ROPE_SAVED_ANGLES(s, false));
      for (int i : {0, 1}) {
        if (!ctx->needs_input_grad(i)) result[i] = Tensor();
      }
    }
    return result;
  }
};

// x rotated, and zeros for the channels that pass through: the derivative in the tables, for cos and sin any numbers.
Tensor turned(const Tensor& x, ROPE_ANGLES) {
  const c10::SymInt rotary_dim = cos->sym_size(-1) * 2, head_dim = x.sym_size(-1);
  if (rotary_dim == head_dim) return rotate_op().call(x, ROPE_ANGLES_PASSED);
  const Tensor part = rotate_op().call(x.narrow_symint(-1, 0, rotary_dim), ROPE_ANGLES_PASSED);
  return at::constant_pad_nd_symint(part, {0, head_dim - rotary_dim});
}

// The gradients of the tables are linear in the gradients of the results and in x; cos and sin say only their shape.
struct TableBackward : torch::autograd::Function<TableBackward> {
  static variable_list forward(AutogradContext* ctx, const Tensor& q_out_grad, const Tensor& q,
                               const OptTensor& k_out_grad, const OptTensor& k, ROPE_ANGLES, const variable_list* own) {
    const BelowThisLevel guard;
    ctx->set_materialize_grads(false);
    save(ctx, *own, std::nullopt, std::nullopt, std::nullopt, positions, offset, attention_factor, interleaved,
         inverse);
    auto [cos_grad, sin_grad] = table_backward_op().call(q_out_grad, k_out_grad, q, k, ROPE_ANGLES_PASSED);
    return {std::move(cos_grad), std::move(sin_grad)};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved s = saved(ctx);
    variable_list result(4 + kAngleCount + 1);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    const Tensor cos = grads[0].defined() ? grads[0] : at::zeros_like(grads[1]),
                 sin = grads[1].defined() ? grads[1] : at::zeros_like(grads[0]);
    for (int i : {0, 1, 2, 3}) {  // a gradient and its x are side by side
      if (!s.own[i].defined() || !ctx->needs_input_grad(i)) continue;
      result[i] = turned(s.own[i ^ 1], cos, sin, std::nullopt, s.positions, s.offset, s.attention_factor, s.interleaved,
                         i % 2 ? !s.inverse : s.inverse);
    }
    return result;
  }
};

// ---- cos_sin ----
//
// The gradient of an angle is h = sin_grad cos - cos_grad sin, and an angle is linear in positions and in frequencies.
// cos and sin are made anew, because the results may be narrow, and so that forward over reverse has their tangents.
// Sums of products, not products of matrices: autocast and TF32 would round the positions.

at::ScalarType type_of_derivative(const Tensor& positions, const Tensor& inv_freq,
                                  std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = at::promote_types(positions.scalar_type(), inv_freq.scalar_type());
  return at::promote_types(type, dtype.value_or(at::kFloat));
}

// Positions [axes, *P] and frequencies [axes, pairs], as they meet in [axes, *P, pairs].
Tensor of_pairs(const Tensor& positions, at::ScalarType type) { return positions.to(type).unsqueeze(-1); }
Tensor of_places(Tensor inv_freq, const Tensor& positions, at::ScalarType type) {
  for (int64_t d = 1; d < positions.dim(); d++) inv_freq = inv_freq.unsqueeze(1);
  return inv_freq.to(type);
}

struct AxialCosSin : torch::autograd::Function<AxialCosSin> {
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
      result[0] = (of_places(inv_freq, positions, type) * h).sum(-1).to(positions.scalar_type());
    }
    if (ctx->needs_input_grad(1)) {
      Tensor f = of_pairs(positions, type) * h;
      for (int64_t d = 1; d < positions.dim(); d++) f = f.sum(1);
      result[1] = f.to(inv_freq.scalar_type());
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

// Of the norm the angles have no gradient: an error now rather than a silent zero.
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
Tensor tangent_or_zeros(const Tensor& t) {
  return has_tangent(t) ? t._fw_grad(/*level=*/0) : t.defined() ? at::zeros_like(t) : t;
}

// Some derivatives depend on the inputs. So what backward saves are the inputs with their tangents (forward over
// reverse needs them), while the operator runs on what is below the tangents. Undefined stands for None.
struct Inputs {
  variable_list own, primals;
  bool dual;
  explicit Inputs(variable_list inputs) : own(std::move(inputs)) {
    dual = std::any_of(own.begin(), own.end(), [](const Tensor& t) { return has_tangent(t); });
    for (const Tensor& t : own) primals.push_back(has_tangent(t) ? primal(t) : t);
  }
};
template <typename... T>
bool any_needed(const T&... inputs) {
  return (needed(inputs) || ...);
}

void carry_tangents(std::initializer_list<Tensor> duals, const variable_list& outs) {
  size_t i = 0;
  for (const Tensor& dual : duals) {
    Tensor out = outs[i++];
    if (has_tangent(dual)) set_tangent(out, dual._fw_grad(/*level=*/0));
  }
}

// Tables for each token, where a derivative in inv_freq is asked for: cos_sin has it.
std::tuple<Tensor, Tensor> tables_of_tokens(const RotateCall& call) {
  const Tensor& x = *call.q;
  const auto of_sequence = [&] {  // an arange, and a DTensor where inv_freq is one
    const at::TensorOptions options = call.inv_freq->options().dtype(at::kLong);
    return (call.inv_freq->new_ones_symint({x.sym_size(-3)}, options).cumsum(0) - 1).unsqueeze(0);
  };
  Tensor positions = call.positions ? call.positions->to(at::kLong) : of_sequence();
  if (positions.dim() == 1) positions = positions.unsqueeze(0);
  return cos_sin_op().call(positions + at::Scalar(call.offset), *call.inv_freq, /*attention_factor=*/1.0,
                           x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// rotate (k is None) and rotate_qk, where a derivative in the tables or in inv_freq is asked for.
variable_list rotate_learned(const char* op, const Tensor& q, const OptTensor& k, ROPE_ANGLES) {
  const RotateCall call = ROPE_CALL(op, &q, k ? &*k : nullptr, inverse);
  check(call, /*in_place=*/false);
  if (inv_freq) {
    const auto [cos_of_tokens, sin_of_tokens] = tables_of_tokens(call);
    return rotate_learned(op, q, k, cos_of_tokens, sin_of_tokens, std::nullopt, std::nullopt, 0, attention_factor,
                          interleaved, inverse);
  }
  const Inputs in({*cos, *sin, q, k.value_or(Tensor())});
  const variable_list& p = in.primals;
  variable_list out;
  {
    OutOfFunctorchsSight until_forward;
    out = RotateLearned::apply(p[0], p[1], p[2], optional(p[3]), positions, offset, attention_factor, interleaved,
                               inverse, &in.own);
  }
  if (!in.dual) return out;
  for (size_t i = 0; i < out.size(); i++) {
    const Tensor& x = in.own[2 + i];
    Tensor tangent;
    if (has_tangent(x)) {
      tangent = rotate_op().call(x._fw_grad(/*level=*/0), p[0], p[1], std::nullopt, positions, offset, attention_factor,
                                 interleaved, inverse);
    }
    if (has_tangent(cos) || has_tangent(sin)) {
      const Tensor of_tables = turned(p[2 + i], tangent_or_zeros(*cos), tangent_or_zeros(*sin), std::nullopt, positions,
                                      offset, attention_factor, interleaved, inverse);
      tangent = tangent.defined() ? tangent + of_tables : of_tables;
    }
    if (tangent.defined()) set_tangent(out[i], tangent);
  }
  return out;
}

Tensor rotate(c10::DispatchKeySet keys, const Tensor& x, ROPE_ANGLES) {
  if (any_needed(cos, sin, inv_freq)) return rotate_learned("rope.rotate", x, std::nullopt, ROPE_ANGLES_PASSED)[0];
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
  if (any_needed(cos, sin, inv_freq)) {
    variable_list out = rotate_learned("rope.rotate_qk", q, k, ROPE_ANGLES_PASSED);
    return {std::move(out[0]), std::move(out[1])};
  }
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

std::tuple<Tensor, Tensor> rotate_table_backward(c10::DispatchKeySet keys, const Tensor& q_out_grad,
                                                 const OptTensor& k_out_grad, const Tensor& q, const OptTensor& k,
                                                 ROPE_ANGLES) {
  if (!any_needed(q_out_grad, k_out_grad, q, k)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return table_backward_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q_out_grad, k_out_grad, q, k,
                                          ROPE_ANGLES_PASSED);
  }
  const auto or_undefined = [](const OptTensor& t) { return t.value_or(Tensor()); };
  const Inputs in({q_out_grad, q, or_undefined(k_out_grad), or_undefined(k), or_undefined(cos), or_undefined(sin)});
  const variable_list& p = in.primals;
  variable_list out;
  {
    OutOfFunctorchsSight until_forward;
    out = TableBackward::apply(p[0], p[1], optional(p[2]), optional(p[3]), optional(p[4]), optional(p[5]), inv_freq,
                               positions, offset, attention_factor, interleaved, inverse, &in.own);
  }
  Tensor cos_tangent, sin_tangent;
  for (int varied : {0, 1}) {  // the gradients, then x
    if (!has_tangent(in.own[varied]) && !has_tangent(in.own[varied + 2])) continue;
    const auto given = [&](int i) { return i % 2 == varied ? tangent_or_zeros(in.own[i]) : p[i]; };
    const auto [c, s] = table_backward_op().call(given(0), optional(given(2)), given(1), optional(given(3)), p[4], p[5],
                                                 inv_freq, positions, offset, attention_factor, interleaved, inverse);
    cos_tangent = cos_tangent.defined() ? cos_tangent + c : c;
    sin_tangent = sin_tangent.defined() ? sin_tangent + s : s;
  }
  if (cos_tangent.defined()) {
    set_tangent(out[0], cos_tangent);
    set_tangent(out[1], sin_tangent);
  }
  return {std::move(out[0]), std::move(out[1])};
}

std::tuple<Tensor, Tensor> axial_cos_sin(c10::DispatchKeySet keys, const Tensor& positions, const Tensor& inv_freq,
                                         double attention_factor, std::optional<at::ScalarType> dtype) {
  if (!any_needed(positions, inv_freq)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return axial_cos_sin_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, positions, inv_freq,
                                         attention_factor, dtype);
  }
  const Inputs in({positions, inv_freq});
  const variable_list& p = in.primals;
  variable_list out;
  {
    OutOfFunctorchsSight until_forward;
    out = AxialCosSin::apply(p[0], p[1], attention_factor, dtype, &in.own);
  }
  if (in.dual) {
    const at::ScalarType type = type_of_derivative(positions, inv_freq, dtype);
    const auto [cos, sin] = axial_cos_sin_op().call(p[0], p[1], attention_factor, type);
    Tensor angle;
    const auto add = [&](const Tensor& positions, const Tensor& inv_freq) {
      const Tensor part = (of_pairs(positions, type) * of_places(inv_freq, positions, type)).sum(0);
      angle = angle.defined() ? angle + part : part;
    };
    if (has_tangent(positions)) add(positions._fw_grad(/*level=*/0), p[1]);
    if (has_tangent(inv_freq)) add(p[0], inv_freq._fw_grad(/*level=*/0));
    set_tangent(out[0], -(sin * angle).to(out[0].scalar_type()));
    set_tangent(out[1], (cos * angle).to(out[1].scalar_type()));
  }
  return {std::move(out[0]), std::move(out[1])};
}

std::tuple<Tensor, Tensor> cos_sin(c10::DispatchKeySet keys, const Tensor& positions, const Tensor& inv_freq,
                                   double attention_factor, std::optional<at::ScalarType> dtype) {
  if (!any_needed(positions, inv_freq)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return cos_sin_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, positions, inv_freq, attention_factor,
                                   dtype);
  }
  check_cos_sin("rope.cos_sin", positions, inv_freq, dtype, /*axes=*/false);
  return axial_cos_sin_op().call(positions.unsqueeze(0), inv_freq.unsqueeze(0), attention_factor, dtype);
}

std::tuple<Tensor, Tensor> norm_rotate_qk(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k,
                                          const Tensor& q_norm_weight, const Tensor& k_norm_weight, ROPE_NORM_ANGLES) {
  refuse_angle_gradients("rope.norm_rotate_qk", cos, sin, inv_freq);
  if (!any_needed(q, k, q_norm_weight, k_norm_weight)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return norm_rotate_qk_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, q_norm_weight, k_norm_weight,
                                          ROPE_NORM_ANGLES_PASSED);
  }
  const Inputs in({q, k, q_norm_weight, k_norm_weight});
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
  if (!any_needed(q_out_grad, k_out_grad, q, k, q_norm_weight, k_norm_weight)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return norm_rotate_qk_backward_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q_out_grad, k_out_grad, q,
                                                   k, q_norm_weight, k_norm_weight, ROPE_NORM_ANGLES_PASSED);
  }
  const Inputs in({q_out_grad, k_out_grad, q, k, q_norm_weight, k_norm_weight});
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

// ---- in-place operators, which have no gradient: boxed, so that one function serves every schema ----

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

}  // namespace

constexpr const char* kInPlace[] = {"rotate_", "rotate_qk_", "rotate_into_cache_"};

TORCH_LIBRARY_IMPL(rope, Autograd, m) {
  m.impl("rotate", &rotate);
  m.impl("rotate_qk", &rotate_qk);
  m.impl("_rotate_table_backward", &rotate_table_backward);
  m.impl("norm_rotate_qk", &norm_rotate_qk);
  m.impl("_norm_rotate_qk_backward", &norm_rotate_qk_backward);
  m.impl("cos_sin", &cos_sin);
  m.impl("_axial_cos_sin", &axial_cos_sin);
  for (const char* op : kInPlace) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&guard_in_place>());
}

TORCH_LIBRARY_IMPL(rope, ADInplaceOrView, m) {
  for (const char* op : kInPlace) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}

TORCH_LIBRARY_IMPL(rope, Negative, m) {
  for (const char* op : kInPlace) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&resolve_negated>());
}

}  // namespace rope
