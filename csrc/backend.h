// What all back ends share: a call is read, checked and turned into the struct that kernels take, and its results are
// allocated. A back end is a struct with four functions, which get real tensors, and their sizes, strides and
// addresses:
//   static void check(const Call&, const Args&);
//     Raises an error for what the back end lacks, and for positions and slots whose tensors it can read. Optional. The
//     other functions are not called if no tensor has an element.
//   static void rotate(const Call&, Args&);
//     Rotates q and k, after the norm if there is one, and copies v, which may have a norm too, each into the `out` of
//     its side. Quantises it if `out` is quantised.
//   static void norm_backward(const Call&, Args&);
//     Writes the gradients of q, k and both weights for a rotation with a norm.
//   static void cos_sin(const Call&);
//     Writes the tables of cos and sin for positions and frequencies.
// Besides the struct, which inherits from AnyBackend, a back end needs one line:
//   TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, <key>, m) { rope::register_backend<Backend>(m); }
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include "operators.h"
#include "overlap.h"

namespace rope {

// A back end inherits from this struct, and may hide its members by its own.
struct AnyBackend {
  static constexpr bool is_fake = false;  // true: tensors have no memory, so nothing is computed

  static void begin(const Operator&, const Stack&) {}  // called before the arguments are read
  static void check(const Call&, const Args&) {}
  // Returns a new tensor with the sizes and strides of x, which is dense.
  static Tensor empty_strided_like(const Tensor& x) {
    return at::empty_strided_symint(x.sym_sizes(), x.sym_strides(), x.options());
  }
};

// Returns at::empty_like(x). For fake tensors, torch's at::empty_like gives dimensions of size 1 other strides than for
// real ones, so this function spells out the strides that the result has: those of x, if x is dense.
template <typename Backend>
Tensor result_like(const Tensor& x) {
  if (!x.unsafeGetTensorImpl()->is_non_overlapping_and_dense_or_false()) return at::empty_like(x);
  return Backend::empty_strided_like(x);
}

// Returns the struct that kernels take, after a check of what the shapes of a checked call do not tell.
template <typename Backend>
Args checked_args(const Call& call) {
  const Args a = call.args();
  // Positions in a tensor are for the back end to check, and so are those of tokens with slots, because a pad may have
  // any position.
  if (!call.positions && !call.slots && a.batch && a.seq) check_position_range(call, a, 0, a.seq - 1);
  Backend::check(call, a);
  return a;
}

// All operators that rotate, with and without a norm, in place, into new tensors and into caches.
template <typename Backend>
void rotate(const Operator& op, const c10::OperatorHandle&, c10::DispatchKeySet, Stack& stack) {
  Backend::begin(op, stack);
  Call call = op.read(stack);
  const Tensor*& q_out = call.sides[kQ].out;
  if (q_out && Memory(*q_out).is(Memory(call.q()))) q_out = nullptr;  // a q_out that is q itself leaves q in place
  check(call, op.in_place);
  Tensor results[2];
  for (int i : {kQ, kK}) {
    SideTensors& side = call.sides[i];
    if (!side.in) continue;
    if (!op.in_place) results[i] = result_like<Backend>(*side.in);
    if (!side.out) side.out = op.in_place ? side.in : &results[i];
  }
  if constexpr (!Backend::is_fake) {
    Args a = checked_args<Backend>(call);
    if (!is_empty(a)) Backend::rotate(call, a);
  }
  op.finish(stack, {results, op.schema.returns().size()});
}

// _norm_rotate_qk_backward: the gradients of q, k and both weights.
template <typename Backend>
void norm_backward(const Operator& op, const c10::OperatorHandle&, c10::DispatchKeySet, Stack& stack) {
  Backend::begin(op, stack);
  Call call = op.read(stack);
  check(call, false);
  Tensor results[4];
  for (int i : {kQ, kK}) {
    SideTensors& side = call.sides[i];
    results[i] = result_like<Backend>(*side.in);
    results[2 + i] = at::empty_symint(side.weight->sym_sizes(), side.weight->options());
    side.out = &results[i], side.weight_grad = &results[2 + i];
  }
  if constexpr (!Backend::is_fake) {
    Args a = checked_args<Backend>(call);
    if (!is_empty(a)) Backend::norm_backward(call, a);
    for (int i = kQ; i <= kK && is_empty(a); i++) call.sides[i].weight_grad->zero_();
  }
  op.finish(stack, results);
}

// cos_sin and axial_cos_sin.
template <typename Backend, bool axes>
void cos_sin(const Operator& op, const c10::OperatorHandle&, c10::DispatchKeySet, Stack& stack) {
  Backend::begin(op, stack);
  Call call = op.read(stack);
  const at::ScalarType type = check_cos_sin(call, axes);
  const Tensor positions = axes ? *call.positions : call.positions->unsqueeze(0),
               inv_freq = axes ? *call.inv_freq : call.inv_freq->unsqueeze(-2);
  auto sizes = positions.sym_sizes().slice(1).vec();
  sizes.push_back(inv_freq.sym_size(-1));
  Tensor results[2] = {at::empty_symint(sizes, inv_freq.options().dtype(type)), {}};
  results[1] = result_like<Backend>(results[0]);
  call.positions = &positions, call.inv_freq = &inv_freq, call.cos = &results[0], call.sin = &results[1];
  if constexpr (!Backend::is_fake) {
    if (results[0].numel() != 0) Backend::cos_sin(call);
  }
  op.finish(stack, results);
}

template <typename Backend>
void register_backend(torch::Library& m) {
  for (const Operator& op : operators()) {
    const std::string& name = op.schema.name();
    name == "cos_sin"                    ? implement<&cos_sin<Backend, false>>(m, op)
    : name == "axial_cos_sin"            ? implement<&cos_sin<Backend, true>>(m, op)
    : name == "_norm_rotate_qk_backward" ? implement<&norm_backward<Backend>>(m, op)
                                         : implement<&rotate<Backend>>(m, op);
  }
}

}  // namespace rope
