// Converts checked calls to the structs that the back ends take.
#include "call.h"

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

// The order is that of DType. The checks let no other dtype pass.
constexpr at::ScalarType kTypes[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kChar,
                                     at::kByte, at::kShort,    at::kInt,   at::kLong};
DType dtype_of(const Tensor& t) {
  return DType(std::find(std::begin(kTypes), std::end(kTypes), t.scalar_type()) - kTypes);
}

// Returns the address of the first element, or null for a tensor that has no memory or that wraps others.
void* address(const Tensor& t, bool is_written = false) {
  if (!t.has_storage() || t.key_set().has(c10::DispatchKey::Python)) return nullptr;
  return is_written ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr());
}

// Writes what the tensors of a side give. All members are zeros before.
void describe(const SideTensors& t, Side& side) {
  if (!t.in) return;
  const Tensor& in = t.gradient ? *t.gradient : *t.in;
  side.in = address(in);
  side.out = address(*t.out, /*is_written=*/true);
  side.heads = t.in->size(-2);
  side.head_dim = t.in->size(-1);
  side.format = format_of(t.out->scalar_type());
  if (t.scale) {
    side.scale_stride = t.scale->numel() == 1 ? 0 : t.scale->stride(0);
    side.scale = static_cast<const float*>(address(*t.scale));
  }
  if (t.weight) {
    side.weight = address(*t.weight);
    side.weight_dtype = dtype_of(*t.weight);
    side.norm = t.weight->dim() == 2 ? kAllHeads : kEachHead;
    side.weight_strides[0] = t.weight->dim() == 2 ? t.weight->stride(0) : 0;
    side.weight_strides[1] = t.weight->stride(-1);
  }
  if (t.factor) {
    side.factor = static_cast<const float*>(address(*t.factor));
    const int64_t dims = t.factor->dim();
    side.factor_strides[0] = dims > 1 && t.factor->size(0) > 1 ? t.factor->stride(0) : 0;
    side.factor_strides[1] = t.factor->stride(dims == 3 ? 1 : -1);
    side.factor_strides[2] = dims == 3 ? t.factor->stride(2) : 0;
  }
  if (side.heads == 0) return;  // strides to no element may be too large for a back end's element offsets
  strides_of(in, side.in_strides);
  strides_of(*t.out, side.out_strides);
  if (t.gradient) {
    side.before = address(*t.in);
    strides_of(*t.in, side.before_strides);
  }
}

// Splits attention_factor into a sum of two floats, for float32 arithmetic.
template <typename A>
void split_factor(double attention_factor, A& a) {
  a.attention_factor = attention_factor;
  a.factor_hi = float(attention_factor);
  a.factor_lo = std::isfinite(a.factor_hi) ? float(attention_factor - a.factor_hi) : 0.0f;
}

}  // namespace

Format format_of(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn ? kFloat8E4M3
         : type == at::kFloat8_e5m2 ? kFloat8E5M2
         : type == at::kChar        ? kInt8
                                    : kUnquantised;
}

Args Call::args() const {
  Args a{};
  a.batch = q().dim() == 4 ? q().size(0) : 1;
  a.seq = q().size(-3);
  a.rotary_start = rotary_start;
  for (int i = 0; i < kSides; i++) describe(sides[i], a.sides[i]);
  if (norm_v) a.sides[kV].norm = kEachHead;
  if (inv_freq) {
    a.source = kInvFreq;
    a.rotary_dim = 2 * inv_freq->size(-1);
    a.split_inv_freq = frequency_strides(*inv_freq, 1, a.inv_freq_strides);
    a.inv_freq = address(*inv_freq);
    a.inv_freq_dtype = dtype_of(*inv_freq);
  } else {
    a.source = cos->dim() == 2 ? kTableByPosition : cos->dim() == 3 ? kTableByToken : kTableByHead;
    a.rotary_dim = 2 * cos->size(-1);
    a.table_rows = cos->size(0);
    table_strides(*cos, a.cos_strides);
    table_strides(*sin, a.sin_strides);
    a.cos = address(*cos);
    a.sin = address(*sin);
    a.table_dtype = dtype_of(*cos);
  }
  a.position_strides[1] = 1;
  if (positions) {
    a.has_positions = 1;
    token_strides(*positions, a.position_strides);
    a.positions = address(*positions);
    a.wide_positions = positions->scalar_type() == at::kLong;
  }
  if (has_cache()) {
    const Tensor& cache = *sides[kK].out;
    a.has_cache = 1;
    a.blocks = cache.dim() == 4 ? cache.size(0) : 1;
    a.block_size = cache.size(-3);
  }
  if (slots) {
    a.has_slots = 1;
    token_strides(*slots, a.slot_strides);
    a.slots = address(*slots);
    a.wide_slots = slots->scalar_type() == at::kLong;
  }
  a.norm_eps = norm_eps;
  a.narrow_eps = float(norm_eps);
  a.weight_offset = norm_weight_offset == 0 ? -0.0 : norm_weight_offset;  // -0 changes no weight, not even one of -0
  a.narrow_weight_offset = float(a.weight_offset);
  a.round_before_weight = round_before_weight;
  a.offset = offset.guard_int(__FILE__, __LINE__);
  split_factor(attention_factor, a);
  a.interleaved = interleaved;
  a.inverse = inverse != is_backward();  // gradients are rotated back
  if (eager_rounding) {
    a.rounding = cos && cos->scalar_type() == q().scalar_type() ? kEachNarrow : kEachWide;
    a.factor_lo = 0.0f;  // torch multiplies a table by the nearest float
  }
  a.x_dtype = dtype_of(q());
  return a;
}

CosSinArgs Call::cos_sin_args() const {
  CosSinArgs c{};
  c.axes = inv_freq->size(-2);
  c.pairs = inv_freq->size(-1);
  c.tokens = cos->numel() / std::max<rope_int>(1, c.pairs);
  c.positions = address(*positions);
  c.inv_freq = address(*inv_freq);
  c.cos = address(*cos, /*is_written=*/true);
  c.sin = address(*sin, /*is_written=*/true);
  c.position_strides[0] = positions->stride(0);
  c.position_strides[1] = positions->stride(-1);
  c.split_inv_freq = frequency_strides(*inv_freq, 2, c.inv_freq_strides);
  split_factor(attention_factor, c);
  c.dtype = dtype_of(*cos);
  c.inv_freq_dtype = dtype_of(*inv_freq);
  c.position_dtype = dtype_of(*positions);
  return c;
}

}  // namespace rope
