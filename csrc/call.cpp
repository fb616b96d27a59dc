// Converts checked calls to the structs that the back ends take.
#include "call.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace rope {

namespace {

// Writes the strides of t to strides[4], as [batch, seq, heads, head_dim]. A 3-D tensor is a batch of one: strides[0]
// stays as it was.
void strides_of(const Tensor& t, rope_int* strides) {
  std::copy(t.strides().rbegin(), t.strides().rend(), std::reverse_iterator(strides + 4));
}

// Writes the strides of a table as [batch, row, head, column]. If there is one batch or head, its stride is 0, so that
// all sequences or heads share it.
void table_strides(const Tensor& table, rope_int* strides) {
  const int64_t dims = table.dim();
  strides[0] = dims > 2 && table.size(0) > 1 ? table.stride(0) : 0;
  strides[1] = table.stride(dims == 2 ? 0 : 1);
  strides[2] = dims == 4 ? table.stride(2) : 0;
  strides[3] = table.stride(-1);
}

// Writes the strides of inv_freq, of which the last `dims` dimensions are left if its two parts are added. Returns
// whether there are two parts.
bool frequency_strides(const Tensor& inv_freq, int64_t dims, rope_int* strides) {
  const bool split = inv_freq.dim() > dims;
  strides[0] = split ? inv_freq.stride(0) : 0;
  for (int64_t d = 1; d <= dims; d++) strides[d] = inv_freq.stride(d - !split);
  return split;
}

// Writes the strides of positions or slots as [batch, seq]. If the batch is one, its stride is 0, so that all sequences
// share it.
void token_strides(const Tensor& t, rope_int* strides) {
  strides[0] = t.dim() == 2 && t.size(0) > 1 ? t.stride(0) : 0;
  strides[1] = t.stride(-1);
}

// The orders are those of DType and PositionType. The checks let no other dtype pass.
constexpr at::ScalarType kTypes[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
constexpr at::ScalarType kPositionTypes[] = {at::kChar, at::kByte,  at::kShort, at::kInt,
                                             at::kLong, at::kFloat, at::kDouble};
DType dtype_of(const Tensor& t) {
  return DType(std::find(std::begin(kTypes), std::end(kTypes), t.scalar_type()) - kTypes);
}
PositionType position_type(const Tensor& t) {
  return PositionType(std::find(std::begin(kPositionTypes), std::end(kPositionTypes), t.scalar_type()) -
                      kPositionTypes);
}

const void* address(const Tensor& t) { return t.const_data_ptr(); }

Format format_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat8_e4m3fn:
      return kFloat8E4M3;
    case at::kFloat8_e5m2:
      return kFloat8E5M2;
    case at::kChar:
      return kInt8;
    default:
      return kUnquantised;
  }
}

// Writes what the tensors of a side give. All members are zeros before.
void describe(const SideTensors& t, Side& side, SideData& data) {
  if (!t.in) return;
  data.in = address(*t.in);
  data.out = t.out->mutable_data_ptr();
  side.heads = t.in->size(-2);
  side.head_dim = t.in->size(-1);
  side.format = format_of(t.out->scalar_type());
  if (t.scale) {
    side.scale = t.scale->numel() == 1 ? 0 : t.scale->stride(0);
    data.scale = static_cast<const float*>(address(*t.scale));
  }
  if (t.weight) {
    data.weight = address(*t.weight);
    data.weight_dtype = dtype_of(*t.weight);
    side.norm = t.weight->dim() == 2 ? kAllHeads : kEachHead;
    side.weight[0] = t.weight->dim() == 2 ? t.weight->stride(0) : 0;
    side.weight[1] = t.weight->stride(-1);
  }
  if (side.heads == 0) return;  // strides to no element may be too large for a back end's element offsets
  strides_of(*t.in, side.in);
  strides_of(*t.out, side.out);
}

// Splits attention_factor into a sum of two floats, for float32 arithmetic.
template <typename Params>
void split_factor(double attention_factor, Params& p) {
  p.factor_hi = float(attention_factor);
  p.factor_lo = std::isfinite(p.factor_hi) ? float(attention_factor - p.factor_hi) : 0.0f;
}

Before before(const Tensor* x) {
  Before b{x ? address(*x) : nullptr, {}};
  if (x) strides_of(*x, b.strides);
  return b;
}

}  // namespace

RotateArgs RotateCall::args() const {
  RotateArgs a{};
  RopeParams& p = a.params;
  p.batch = q().dim() == 4 ? q().size(0) : 1;
  p.seq = q().size(-3);
  p.rotary_start = rotary_start;
  for (int i = 0; i < kSides; i++) describe(sides[i], p.sides[i], a.sides[i]);
  if (norm_v) p.sides[kV].norm = kEachHead;
  if (inv_freq) {
    p.source = kInvFreq;
    p.rotary_dim = 2 * inv_freq->size(-1);
    p.split_inv_freq = frequency_strides(*inv_freq, 1, p.inv_freq);
    a.inv_freq = address(*inv_freq);
    a.inv_freq_dtype = dtype_of(*inv_freq);
  } else {
    p.source = cos->dim() == 2 ? kTableByPosition : cos->dim() == 3 ? kTableByToken : kTableByHead;
    p.rotary_dim = 2 * cos->size(-1);
    p.table_rows = cos->size(0);
    table_strides(*cos, p.cos);
    table_strides(*sin, p.sin);
    a.cos = address(*cos);
    a.sin = address(*sin);
    a.table_dtype = dtype_of(*cos);
  }
  p.positions[1] = 1;
  if (positions) {
    p.has_positions = 1;
    token_strides(*positions, p.positions);
    a.positions = address(*positions);
    a.wide_positions = positions->scalar_type() == at::kLong;
  }
  if (has_cache()) {
    const Tensor& cache = *sides[kK].out;
    p.has_cache = 1;
    p.blocks = cache.dim() == 4 ? cache.size(0) : 1;
    p.block_size = cache.size(-3);
  }
  if (slots) {
    p.has_slots = 1;
    token_strides(*slots, p.slots);
    a.slots = address(*slots);
    a.wide_slots = slots->scalar_type() == at::kLong;
  }
  p.norm_eps = float(norm_eps);
  p.offset = offset.guard_int(__FILE__, __LINE__);
  split_factor(attention_factor, p);
  p.interleaved = interleaved;
  p.inverse = inverse;
  if (eager_rounding) {
    p.rounding = cos && cos->scalar_type() == q().scalar_type() ? kEachNarrow : kEachWide;
    p.factor_lo = 0.0f;  // torch multiplies a table by the nearest float
  }
  a.attention_factor = attention_factor;
  a.norm_eps = norm_eps;
  a.x_dtype = dtype_of(q());
  return a;
}

NormBackwardArgs NormBackwardCall::args() const { return {rotate.args(), {before(x[kQ]), before(x[kK])}}; }

TableBackwardArgs TableBackwardCall::args(const RotateArgs& gradients) {
  const RopeParams& p = gradients.params;
  const bool by_position = p.source == kTableByPosition;
  // own: each sequence has its own positions or, in a table by token, its own rows.
  const OptTensor& positions = rotate.positions;
  const bool own = by_position ? positions && positions->dim() == 2 && positions->size(0) > 1 : rotate.cos->size(0) > 1;
  TableBackwardArgs a{gradients, {before(x[kQ]), before(x[kK])}};
  TokensOfRows& t = a.tokens;
  t.rows = by_position ? cos_grad.size(0) : cos_grad.size(0) * cos_grad.size(1);
  t.sequences = own ? 1 : p.batch;
  t.entries = own ? p.batch * p.seq : p.seq;
  t.listed = by_position && p.has_positions;
  // The offset may be any number if positions are given, and then row - offset could overflow.
  t.shift = by_position && !t.listed ? p.offset : 0;
  if (t.listed) {
    int64_t last = 0;  // positions outside of the table become row -1 or row `rows`, so that no sum overflows
    if (__builtin_sub_overflow(t.rows, p.offset, &last)) last = INT64_MAX;
    const Tensor row = positions->to(at::kLong).reshape(-1).clamp(-1 - p.offset, last).add(p.offset);
    // torch 2.11 sorts int64 wrongly on some releases of macOS (pytorch/pytorch#155560).
    const Tensor key = row.to(t.rows <= INT32_MAX ? at::kInt : at::kLong);
    Tensor sorted;
    std::tie(sorted, order) = key.sort(/*stable=*/std::optional<bool>(true));
    starts = at::searchsorted(sorted, at::arange(t.rows + 1, sorted.options()));
    a.order = static_cast<const rope_int*>(order.const_data_ptr());
    a.starts = static_cast<const rope_int*>(starts.const_data_ptr());
  }
  a.cos_grad = cos_grad.mutable_data_ptr();
  a.sin_grad = sin_grad.mutable_data_ptr();
  return a;
}

CosSinArgs CosSinCall::args(const Tensor& positions, const Tensor& inv_freq) const {
  CosSinParams p{};
  p.axes = inv_freq.size(-2);
  p.pairs = inv_freq.size(-1);
  p.tokens = cos.numel() / std::max<rope_int>(1, p.pairs);
  p.positions[0] = positions.stride(0);
  p.positions[1] = positions.stride(-1);
  p.split_inv_freq = frequency_strides(inv_freq, 2, p.inv_freq);
  split_factor(attention_factor, p);
  p.position_type = position_type(positions);
  return {p,
          attention_factor,
          dtype_of(cos),
          dtype_of(inv_freq),
          address(positions),
          address(inv_freq),
          cos.mutable_data_ptr(),
          sin.mutable_data_ptr()};
}

}  // namespace rope
