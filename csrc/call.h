// One call of an operator: its arguments as torch gives them, the checks of them, and the structs that kernels get.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "args.h"

namespace rope {

using at::Tensor;

// The tensors of q, k or v. What a call lacks is null.
struct SideTensors {
  const Tensor* in = nullptr;      // [seq, heads, head_dim] or [batch, seq, heads, head_dim]
  const Tensor* out = nullptr;     // `in` itself, or another tensor of its shape, or a cache
  const Tensor* weight = nullptr;  // [head_dim] to normalise each head, [heads, head_dim] to normalise all together
  const Tensor* factor = nullptr;  // of q: [seq], [batch or 1, seq] or [batch or 1, seq, heads]; the result is times it
  const Tensor* scale = nullptr;   // if `out` is quantised: one element, or [heads]
  // In the backward of a norm: the gradient of the rotated side, of the shape of `in`, and the gradient of the weight.
  // `out` is the gradient of `in` there.
  const Tensor *gradient = nullptr, *weight_grad = nullptr;
};

// The arguments of all operators. Each operator has some of them; the others keep their defaults.
struct Call {
  const char* op;  // the name for messages, such as rope.rotate
  // q, which may be the only one and is then called x; k, whose number of heads may differ; and v. If there is a v,
  // rotated k and a copy of v are written to caches, which are [blocks, block_size, heads, head_dim], or
  // [block_size, heads, head_dim] if there is one block. v and its cache have heads and a head_dim of their own.
  SideTensors sides[kSides];
  // [max_position, rotary_dim / 2], [batch or 1, seq, rotary_dim / 2] or [batch or 1, seq, heads, rotary_dim / 2].
  // They are the results of cos_sin, [*P, rotary_dim / 2].
  const Tensor *cos = nullptr, *sin = nullptr;
  const Tensor* inv_freq = nullptr;   // [rotary_dim / 2], or [2, rotary_dim / 2], which is the sum of two parts
  const Tensor* positions = nullptr;  // [seq], [1, seq] or [batch, seq]; of cos_sin any shape P, or [axes, *P]
  const Tensor* slots = nullptr;      // [seq] or [batch, seq]; null: sequence b writes to block b, at its positions
  c10::SymInt offset = 0;
  double attention_factor = 1, norm_eps = 0;
  double norm_weight_offset = 0;  // is added to the weights of norms
  bool interleaved = false, inverse = false, eager_rounding = false;
  bool round_before_weight = false;  // with eager_rounding: a norm is rounded before and after it takes its weight
  bool norm_v = false;               // each head of v is normalised
  int64_t rotary_start = 0;
  std::optional<at::ScalarType> dtype = {};  // of the results of cos_sin

  const Tensor& q() const { return *sides[kQ].in; }
  const char* q_name() const { return sides[kK].in ? "q" : "x"; }
  bool has_cache() const { return sides[kV].in != nullptr; }
  bool is_backward() const { return sides[kQ].gradient != nullptr; }

  // These need real tensors and a call that passed its check.
  Args args() const;
  CosSinArgs cos_sin_args() const;  // positions: contiguous, or [axes, tokens]; inv_freq has axes
};

// Returns how a result of this dtype is stored.
Format format_of(at::ScalarType type);

// Raises the ValueErrors and TypeErrors that the operators document. Fake tensors are allowed: sizes stay symbolic, and
// no value in a tensor is read.
void check(const Call& call, bool in_place);
// Raises an IndexError if a position is out of range. low and high are the smallest and largest element of positions,
// without the offset.
void check_position_range(const Call& call, const Args& a, int64_t low, int64_t high);
// Checks the arguments of cos_sin and returns the dtype of the results. axes: the first dimension of positions and
// inv_freq is that of the axes.
at::ScalarType check_cos_sin(const Call& call, bool axes);

}  // namespace rope
