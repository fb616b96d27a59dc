// The operators, for any back end. They make a call of the arguments, check it, and allocate the results. A back end is
// a struct with five functions, which get a call with real tensors, and its sizes, strides and addresses:
//   static void check(const RotateCall&, const RotateArgs&);
//     Raises an error for what the back end lacks, and for positions and slots whose tensors it can read. Optional. The
//     other functions are not called if no tensor has an element.
//   static void rotate(const RotateCall&, RotateArgs&);
//     Rotates q and k, after the norm if there is one, and copies v, which may have a norm too, each into the `out` of
//     its side. Quantises it if `out` is quantised.
//   static void norm_backward(const NormBackwardCall&, NormBackwardArgs&);
//     Writes the gradients of q, k and both weights for a rotation with a norm.
//   static void table_backward(const TableBackwardCall&, const TableBackwardArgs&);
//     Writes the gradients of cos and sin for a rotation without a norm.
//   static void cos_sin(const CosSinCall&);
//     Writes the tables of cos and sin for positions and frequencies.
// Besides the struct, which inherits from AnyBackend, a back end needs one line:
//   TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, <key>, m) { rope::register_ops<Backend>(m); }
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "call.h"
#include "namespace.h"
#include "overlap.h"

namespace rope {

std::vector<std::string> schemas();

// ---- kernels for the dispatcher ----
//
// The functions of Ops take the arguments that the operators share as one struct, Rotation or NormRotation. The
// dispatcher passes each argument separately. kernel<f> converts a function of the first kind to one of the second.

template <typename... T>
struct Types {};

// TypesOf<A> lists the types of the arguments that the struct A (Rotation or NormRotation) stands for.
template <typename A>
auto types_of(const A& rotation) {
  return rotation.pass([](const auto&... each) { return Types<std::decay_t<decltype(each)>...>(); });
}
template <typename A>
using TypesOf = decltype(types_of(std::declval<A>()));

// The type with which a kernel takes an argument of type T.
template <typename T>
using Argument = std::conditional_t<std::is_same_v<T, OptTensor>, const OptTensor&, T>;

template <typename A, typename R, typename Own, typename Each>
struct UnpackedAs;
template <typename A, typename R, typename... Own, typename... Each>
struct UnpackedAs<A, R, Types<Own...>, Types<Each...>> {
  using Type = R(Own..., Argument<Each>...);
  template <auto f>
  static R kernel(Own... own, Argument<Each>... each) {
    return f(A{each...}, std::forward<Own>(own)...);
  }
};

// The dispatcher's form of R f(rotation, own...) is R(own..., arguments of rotation...).
template <typename F>
struct Unpacked;
template <typename A, typename R, typename... Own>
struct Unpacked<R(const A&, Own...)> : UnpackedAs<A, R, Types<Own...>, TypesOf<A>> {};

template <auto f>
constexpr auto* kernel = &Unpacked<std::remove_pointer_t<decltype(f)>>::template kernel<f>;

// Returns the name of an operator as messages have it, such as rope.rotate_.
inline std::string python_name(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();  // rope::rotate_, or another namespace
  return "rope." + name.substr(name.find("::") + 2);
}

// ---- the operators ----

// A back end inherits from this struct, and may hide its members by its own.
struct AnyBackend {
  static constexpr bool is_fake = false;  // true: tensors have no memory, so nothing is computed

  static void check(const RotateCall&, const RotateArgs&) {}
  // Returns a new tensor with the sizes and strides of x, which is dense.
  static Tensor empty_strided_like(const Tensor& x) {
    return at::empty_strided_symint(x.sym_sizes(), x.sym_strides(), x.options());
  }
};

template <typename Backend>
struct Ops {
  static Tensor rotate(const Rotation& rotation, const Tensor& x) {
    return std::get<0>(to_new({rotation, "rope.rotate", &x, nullptr}));
  }
  static void rotate_(const Rotation& rotation, Tensor& x) { to_given({rotation, "rope.rotate_", &x, nullptr}); }
  static std::tuple<Tensor, Tensor> rotate_qk(const Rotation& rotation, const Tensor& q, const Tensor& k) {
    return to_new({rotation, "rope.rotate_qk", &q, &k});
  }
  static void rotate_qk_(const Rotation& rotation, Tensor& q, Tensor& k) {
    to_given({rotation, "rope.rotate_qk_", &q, &k});
  }

  static std::tuple<Tensor, Tensor> norm_rotate_qk(const NormRotation& rotation, const Tensor& q, const Tensor& k,
                                                   const Tensor& q_norm_weight, const Tensor& k_norm_weight) {
    RotateCall call(rotation, "rope.norm_rotate_qk", &q, &k);
    set_norm(call, &q_norm_weight, &k_norm_weight, rotation.norm_eps);
    return to_new(std::move(call));
  }

  // Returns the gradients of q, k, q_norm_weight and k_norm_weight.
  static std::tuple<Tensor, Tensor, Tensor, Tensor> norm_rotate_qk_backward(
      const NormRotation& rotation, const Tensor& q_out_grad, const Tensor& k_out_grad, const Tensor& q,
      const Tensor& k, const Tensor& q_norm_weight, const Tensor& k_norm_weight) {
    RotateCall call(rotation.back(), "rope._norm_rotate_qk_backward", &q, &k);
    set_norm(call, &q_norm_weight, &k_norm_weight, rotation.norm_eps);
    check(call, false);
    check_gradients(call, {&q_out_grad, &k_out_grad});
    Tensor q_grad = result_like(q), k_grad = result_like(k);
    Tensor q_weight_grad = at::empty_symint(q_norm_weight.sym_sizes(), q_norm_weight.options()),
           k_weight_grad = at::empty_symint(k_norm_weight.sym_sizes(), k_norm_weight.options());
    call.sides[kQ].in = &q_out_grad, call.sides[kQ].out = &q_grad;
    call.sides[kK].in = &k_out_grad, call.sides[kK].out = &k_grad;
    if constexpr (!Backend::is_fake) {
      const NormBackwardCall backward{call, {&q, &k}, {&q_weight_grad, &k_weight_grad}};
      NormBackwardArgs a = backward.args();
      check_values(call, a.rotate);
      is_empty(a.rotate.params) ? backward.zero() : Backend::norm_backward(backward, a);
    }
    return {std::move(q_grad), std::move(k_grad), std::move(q_weight_grad), std::move(k_weight_grad)};
  }

  static void rotate_into_cache_(Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_cache, Tensor& v_cache,
                                 const OptTensor& cos, const OptTensor& sin, const OptTensor& inv_freq,
                                 const OptTensor& positions, c10::SymInt offset, const OptTensor& slots,
                                 const OptTensor& q_norm_weight, const OptTensor& k_norm_weight,
                                 const OptTensor& k_scale, const OptTensor& v_scale, const OptTensor& q_out,
                                 const OptTensor& q_scale, double norm_eps, double attention_factor, bool interleaved,
                                 bool norm_v, int64_t rotary_start, bool eager_rounding) {
    const Rotation rotation{cos,         sin,   inv_freq,     positions,     offset, attention_factor,
                            interleaved, false, rotary_start, eager_rounding};
    RotateCall call(rotation, "rope.rotate_into_cache_", &q, &k);
    set_norm(call, pointer(q_norm_weight), pointer(k_norm_weight), norm_eps);
    // A q_out that is q itself leaves the call in place.
    if (q_out && !(q.defined() && Memory(*q_out).is(Memory(q)))) call.sides[kQ].out = &*q_out;
    call.sides[kQ].scale = pointer(q_scale);
    call.sides[kK].out = &k_cache;
    call.sides[kK].scale = pointer(k_scale);
    call.sides[kV] = {&v, &v_cache, nullptr, pointer(v_scale)};
    call.norm_v = norm_v;
    call.slots = pointer(slots);
    to_given(call);
  }

  // Returns the gradients of cos and sin.
  static std::tuple<Tensor, Tensor> rotate_table_backward(const Rotation& rotation, const Tensor& q_out_grad,
                                                          const OptTensor& k_out_grad, const Tensor& q,
                                                          const OptTensor& k) {
    RotateCall call(rotation, "rope._rotate_table_backward", &q, pointer(k));
    check(call, false);
    check_gradients(call, {&q_out_grad, pointer(k_out_grad)});
    TORCH_CHECK_VALUE(call.cos, call.op, ": inv_freq is given but must be None, because this operator computes the ",
                      "gradients of cos and sin; rope.cos_sin has the gradient of inv_freq");
    Tensor cos_grad = at::empty_symint(call.cos->sym_sizes(), call.cos->options()), sin_grad = at::empty_like(cos_grad);
    call.sides[kQ].in = call.sides[kQ].out = &q_out_grad;
    call.sides[kK].in = call.sides[kK].out = pointer(k_out_grad);
    if constexpr (!Backend::is_fake) {
      TableBackwardCall backward{call, {&q, pointer(k)}, cos_grad, sin_grad};
      const RotateArgs gradients = call.args();
      check_values(call, gradients);
      const bool has_terms = !is_empty(gradients.params) && cos_grad.numel() != 0;
      has_terms ? Backend::table_backward(backward, backward.args(gradients)) : backward.zero();
    }
    return {std::move(cos_grad), std::move(sin_grad)};
  }

  static std::tuple<Tensor, Tensor> cos_sin(const Tensor& positions, const Tensor& inv_freq, double attention_factor,
                                            std::optional<at::ScalarType> dtype) {
    const at::ScalarType type = check_cos_sin("rope.cos_sin", positions, inv_freq, attention_factor, dtype, false);
    return cos_sin_of(positions.unsqueeze(0), inv_freq.unsqueeze(-2), attention_factor, type);
  }

  static std::tuple<Tensor, Tensor> axial_cos_sin(const Tensor& positions, const Tensor& inv_freq,
                                                  double attention_factor, std::optional<at::ScalarType> dtype) {
    const at::ScalarType type = check_cos_sin("rope.axial_cos_sin", positions, inv_freq, attention_factor, dtype, true);
    return cos_sin_of(positions, inv_freq, attention_factor, type);
  }

 private:
  // Returns at::empty_like(x). For fake tensors, torch's at::empty_like gives dimensions of size 1 other strides than
  // for real ones, so this function spells out the strides that the result has: those of x, if x is dense.
  static Tensor result_like(const Tensor& x) {
    if (!x.unsafeGetTensorImpl()->is_non_overlapping_and_dense_or_false()) return at::empty_like(x);
    return Backend::empty_strided_like(x);
  }

  static std::tuple<Tensor, Tensor> cos_sin_of(const Tensor& positions, const Tensor& inv_freq, double attention_factor,
                                               at::ScalarType type) {
    auto sizes = positions.sym_sizes().slice(1).vec();
    sizes.push_back(inv_freq.sym_size(-1));
    Tensor cos = at::empty_symint(sizes, inv_freq.options().dtype(type)), sin = at::empty_like(cos);
    if constexpr (!Backend::is_fake) {
      if (cos.numel() != 0) Backend::cos_sin({positions, inv_freq, attention_factor, cos, sin});
    }
    return {std::move(cos), std::move(sin)};
  }

  // Runs a call on q, and on k if there is one, that writes new tensors, and returns them.
  static std::tuple<Tensor, Tensor> to_new(RotateCall call) {
    check(call, false);
    Tensor results[2];
    for (int side : {kQ, kK}) {
      if (!call.sides[side].in) continue;
      results[side] = result_like(*call.sides[side].in);
      call.sides[side].out = &results[side];
    }
    run(call);
    return {std::move(results[kQ]), std::move(results[kK])};
  }

  static void to_given(const RotateCall& call) {
    check(call, true);
    run(call);
  }

  // Raises an error for what the shapes of a call do not tell. Positions in a tensor are for the back end to check, and
  // so are those of tokens with slots, because a pad may have any position.
  static void check_values(const RotateCall& call, const RotateArgs& a) {
    const RopeParams& p = a.params;
    if (!call.positions && !call.slots && p.batch && p.seq) check_position_range(call, p, 0, p.seq - 1);
    Backend::check(call, a);
  }

  // Runs a checked call.
  static void run(const RotateCall& call) {
    if constexpr (!Backend::is_fake) {
      RotateArgs a = call.args();
      check_values(call, a);
      if (!is_empty(a.params)) Backend::rotate(call, a);
    }
  }

  static void set_norm(RotateCall& call, const Tensor* q_weight, const Tensor* k_weight, double eps) {
    call.sides[kQ].weight = q_weight;
    call.sides[kK].weight = k_weight;
    call.norm_eps = eps;
  }

  static const Tensor* pointer(const OptTensor& t) { return t ? &*t : nullptr; }
};

template <typename Backend>
void register_ops(torch::Library& m) {
  m.impl("rotate", kernel<&Ops<Backend>::rotate>);
  m.impl("rotate_", kernel<&Ops<Backend>::rotate_>);
  m.impl("rotate_qk", kernel<&Ops<Backend>::rotate_qk>);
  m.impl("rotate_qk_", kernel<&Ops<Backend>::rotate_qk_>);
  m.impl("norm_rotate_qk", kernel<&Ops<Backend>::norm_rotate_qk>);
  m.impl("_norm_rotate_qk_backward", kernel<&Ops<Backend>::norm_rotate_qk_backward>);
  m.impl("rotate_into_cache_", &Ops<Backend>::rotate_into_cache_);
  m.impl("_rotate_table_backward", kernel<&Ops<Backend>::rotate_table_backward>);
  m.impl("cos_sin", &Ops<Backend>::cos_sin);
  m.impl("axial_cos_sin", &Ops<Backend>::axial_cos_sin);
}

}  // namespace rope
