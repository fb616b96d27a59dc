#include "definition.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/stack.h>

#include <numeric>
#include <utility>

#include "operators.h"

namespace rope {
namespace {

using Pair = std::pair<Tensor, Tensor>;

Tensor widened(const Tensor& t) { return t.to(at::toOpMathType(t.scalar_type())); }

// ---- angles ----

// Returns position + offset of each token, int64, [1 or batch, seq].
Tensor positions_of(const Call& call) {
  const Tensor& like = call.inv_freq ? *call.inv_freq : *call.cos;  // new_ones makes a DTensor of a DTensor
  const Tensor given =
      call.positions ? call.positions->to(at::kLong)
                     : like.new_ones_symint({call.q().sym_size(-3)}, like.options().dtype(at::kLong)).cumsum(0) - 1;
  return (given.dim() == 1 ? given.unsqueeze(0) : given) + at::Scalar(call.offset);
}

// Returns the rows of a table by position. A pad, a token with a negative slot, may have no row; then it gets NaN.
Tensor rows_of(const Call& call, const Tensor& table) {
  const Tensor positions = positions_of(call);
  if (positions.sym_numel().sym_eq(0).guard_or_false(__FILE__, __LINE__)) {  // its second derivative fails in embedding
    return table.narrow(0, 0, 0).reshape_symint({positions.sym_size(0), positions.sym_size(1), table.sym_size(-1)});
  }
  if (!call.slots) {
    // In embedding, the gradient of a row is a sum in a fixed order, and a position outside the table is an error. The
    // sum is in double, because it may have many terms; Metal has no double.
    const Tensor rows = at::embedding(table.to(table.is_mps() ? at::kFloat : at::kDouble), positions);
    return call.eager_rounding ? rows.to(table.scalar_type()) : rows;
  }
  const Tensor outside = (*call.slots < 0).logical_and((positions < 0).logical_or(positions >= table.sym_size(0)));
  return at::embedding(table, positions.masked_fill(outside, 0)).masked_fill(outside.unsqueeze(-1), NAN);
}

// Returns cos and sin of the tokens, [1 or batch, seq, 1 or heads, pairs], or without a batch if q has none.
Pair angles_of(const Call& call) {
  const at::ScalarType type = at::toOpMathType(call.q().scalar_type());
  Tensor cos, sin;
  if (call.inv_freq) {
    Call tables{"rope.cos_sin"};
    const Tensor positions = positions_of(call);
    tables.positions = &positions;
    tables.inv_freq = call.inv_freq;
    tables.dtype = type;
    const std::vector<Tensor> made = find("cos_sin")(tables);
    cos = made[0], sin = made[1];
  } else {
    const bool by_position = call.cos->dim() == 2;
    cos = by_position ? rows_of(call, *call.cos) : *call.cos;
    sin = by_position ? rows_of(call, *call.sin) : *call.sin;
  }
  if (!call.eager_rounding) cos = cos.to(type), sin = sin.to(type);
  if (call.attention_factor != 1) cos = cos * call.attention_factor, sin = sin * call.attention_factor;
  if (call.inverse != call.is_backward()) sin = -sin;
  if (cos.dim() == 3) cos = cos.unsqueeze(-2), sin = sin.unsqueeze(-2);
  return call.q().dim() == 4 ? Pair(cos, sin) : Pair(cos.squeeze(0), sin.squeeze(0));
}

// ---- rotation and norm ----

// Returns x rotated, [..., seq, heads, head_dim], in the dtype that torch's promotion gives.
Tensor rotated(const Call& call, const Tensor& x, const Pair& angles) {
  auto [cos, sin] = angles;
  if (x.sym_size(-2).sym_eq(0).guard_or_false(__FILE__, __LINE__)) {  // a table by head has rows of other heads
    cos = cos.narrow(-2, 0, 0), sin = sin.narrow(-2, 0, 0);
  }
  const c10::SymInt start = call.rotary_start, pairs = cos.sym_size(-1), end = start + pairs * 2;
  const Tensor part = x.narrow_symint(-1, start, pairs * 2);
  const int64_t dim = call.interleaved ? -1 : -2;  // of the two channels of a pair
  const Tensor both = call.interleaved ? part.unflatten_symint(-1, {pairs, 2}) : part.unflatten_symint(-1, {2, pairs});
  const Tensor a = both.select(dim, 0), b = both.select(dim, 1);
  const Tensor turned = at::stack({a * cos - b * sin, b * cos + a * sin}, dim).flatten(-2);
  if (end - start == x.sym_size(-1)) return turned;
  return at::cat({x.narrow_symint(-1, 0, start), turned, x.narrow_symint(-1, end, x.sym_size(-1) - end)}, -1);
}

// A weight has the dimensions over which a norm takes the mean: [head_dim], or [heads, head_dim].
Tensor mean_product(const Tensor& a, const Tensor& b, int64_t dims) {
  const int64_t last[] = {-1, -2};
  return (a * b).mean(at::IntArrayRef(last, size_t(dims)), /*keepdim=*/true);
}
Tensor inverse_rms(const Tensor& x, int64_t dims, double eps) { return (mean_product(x, x, dims) + eps).rsqrt(); }

Tensor weights_of(const Call& call, int i) {
  const Tensor& weight = *call.sides[i].weight;
  if (call.norm_weight_offset == 0) return widened(weight);
  return weight.to(at::toOpMathType(call.q().scalar_type())) + call.norm_weight_offset;
}

// Returns q, k or v after its norm.
Tensor normalised(const Call& call, int i) {
  const Tensor &in = *call.sides[i].in, *weight = call.sides[i].weight;
  if (!weight && !(i == kV && call.norm_v)) return call.eager_rounding || i == kV ? in : widened(in);
  Tensor x = widened(in);
  x = x * inverse_rms(x, weight ? weight->dim() : 1, call.norm_eps);
  if (call.round_before_weight) x = widened(x.to(in.scalar_type()));
  if (weight) x = x * weights_of(call, i);
  return call.eager_rounding ? x.to(in.scalar_type()) : x;
}

// Returns q, k or v after norm, rotation and factor, not rounded to its dtype.
Tensor side_of(const Call& call, int i, const Pair& angles) {
  const SideTensors& side = call.sides[i];
  const Tensor x = i == kV ? normalised(call, i) : rotated(call, normalised(call, i), angles);
  if (!side.factor) return x;
  return times_factor(call.eager_rounding ? x.to(side.in->scalar_type()) : x, *side.factor);
}

// Returns the gradients of q or k and of its weight. Let h be the gradient of the normalised x, and r = 1 / rms. Then
// u = h w, the gradient of x is r (u - r^2 mean(u x) x), and that of w is the sum of h x r.
Pair norm_gradients(const Call& call, int i, const Pair& angles) {
  const SideTensors& side = call.sides[i];
  const Tensor x = widened(*side.in), w = weights_of(call, i), back = rotated(call, widened(*side.gradient), angles),
               h = side.factor ? times_factor(back, *side.factor) : back, u = h * w,
               r = inverse_rms(x, w.dim(), call.norm_eps);
  const Tensor x_grad = r * (u - r.square() * mean_product(u, x, w.dim()) * x);
  std::vector<int64_t> tokens(x.dim() - w.dim());
  std::iota(tokens.begin(), tokens.end(), 0);
  return {x_grad.to(side.in->scalar_type()), (h * x * r).sum(tokens).to(side.weight->scalar_type())};
}

// ---- results ----

// Returns what a result of this dtype stores.
Tensor stored(const Tensor& x, const Tensor& like, const Tensor* scale) {
  if (!scale) return x.to(like.scalar_type());
  const Tensor quotient = widened(x) / (scale->numel() == 1 ? scale->reshape({}) : scale->unsqueeze(-1));
  if (like.scalar_type() == at::kChar) return quotient.nan_to_num(0).clamp(-128, 127).round().to(at::kChar);
  const double most = like.scalar_type() == at::kFloat8_e4m3fn ? 448 : 57344;
  return quotient.clamp(-most, most).to(like.scalar_type());
}

// Writes the tokens of k or v to the cells of their cache.
void write_cells(const Call& call, const Tensor& tokens, const Tensor& given) {
  const Tensor cache = given.dim() == 4 ? given : given.unsqueeze(0);
  const c10::SymInt batch = call.q().dim() == 4 ? call.q().sym_size(0) : 1;
  const int64_t block_size = cache.size(1);
  if (cache.numel() == 0 || tokens.numel() == 0) return;
  Tensor block, cell;
  if (call.slots) {
    const Tensor slots = call.slots->to(at::kLong).reshape(-1);
    block = slots.div(block_size, "floor"), cell = slots.remainder(block_size);
  } else {
    cell = positions_of(call).expand_symint({batch, tokens.sym_size(-3)}).reshape(-1);
    block = at::arange(batch.guard_int(__FILE__, __LINE__), cell.options()).repeat_interleave(tokens.size(-3));
  }
  Tensor rows = tokens.flatten(0, -3);
  if (call.slots) {  // pads have no cell
    const Tensor kept = (block >= 0).nonzero().squeeze(-1);
    block = block.index_select(0, kept), cell = cell.index_select(0, kept), rows = rows.index_select(0, kept);
  }
  cache.index_put_({block, cell}, rows);
}

}  // namespace

Tensor times_factor(const Tensor& q, Tensor factor) {
  if (factor.dim() < 3) factor = factor.unsqueeze(-1);
  factor = factor.unsqueeze(-1);  // [seq, 1 or heads, 1], or [1 or batch, seq, 1 or heads, 1]
  return q * (q.dim() == 3 && factor.dim() == 4 ? factor.squeeze(0) : factor);
}

std::vector<Tensor> define(const Call& call) {
  const Pair angles = angles_of(call);
  std::vector<Tensor> results(call.is_backward() ? 4 : call.has_cache() ? 3 : call.sides[kK].in ? 2 : 1);
  for (int i = 0; i < kSides && call.sides[i].in; i++) {
    if (call.is_backward()) {
      std::tie(results[i], results[2 + i]) = norm_gradients(call, i, angles);
    } else {
      results[i] = side_of(call, i, angles);
      if (!call.has_cache() || call.eager_rounding) results[i] = results[i].to(call.sides[i].in->scalar_type());
    }
  }
  return results;
}

void write(const Call& call, const std::vector<Tensor>& results) {
  for (int i = 0; i < kSides && call.sides[i].in; i++) {
    const SideTensors& side = call.sides[i];
    const Tensor result = stored(results[i], *side.out, side.scale);
    call.has_cache() && i != kQ ? write_cells(call, result, *side.out) : void(side.out->copy_(result));
    if (side.weight_grad) side.weight_grad->copy_(results[2 + i]);
  }
}

void define_cos_sin(const Call& call) {
  // float64 rounds an angle below 2^24 by 1e-9. The first dimension is that of the axes.
  Tensor inv_freq = call.inv_freq->to(at::kDouble);
  if (inv_freq.dim() == 3) inv_freq = inv_freq.sum(0);
  const Tensor positions = call.positions->to(at::kDouble).flatten(1).unsqueeze(-1);  // [axes, tokens, 1]
  const Tensor angle = (positions * inv_freq.unsqueeze(1)).sum(0).view(call.cos->sizes());
  call.cos->copy_(angle.cos() * call.attention_factor);
  call.sin->copy_(angle.sin() * call.attention_factor);
}

}  // namespace rope
