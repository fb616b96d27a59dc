// Arguments are checked once, and turned into what the back ends take.
#include "ops.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "overlap.h"

namespace rope {
namespace {

bool holds(bool condition) { return condition; }
// Guards under torch.compile; for a size that is data (unbacked) it becomes an assertion of the compiled program.
bool holds(const c10::SymBool& condition) { return condition.expect_true(__FILE__, __LINE__); }
bool equal(const c10::SymInt& a, const c10::SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();  // the usual case, without a call
  return x && y ? *x == *y : holds(a.sym_eq(b));
}

// By reference, where sym_size makes a SymInt.
const c10::SymInt& size(const Tensor& t, int64_t d) {
  const auto sizes = t.sym_sizes();
  return sizes[d < 0 ? d + int64_t(sizes.size()) : d];
}
const c10::SymInt kOne = 1;
const c10::SymInt& batch_of(const Tensor& x) { return x.dim() == 4 ? size(x, 0) : kOne; }  // blocks of a cache

#define ROPE_CHECK_VALUE(condition, ...) TORCH_CHECK_VALUE(holds(condition), call.op, ": ", __VA_ARGS__)
#define ROPE_CHECK_TYPE(condition, ...) TORCH_CHECK_TYPE(condition, call.op, ": ", __VA_ARGS__)

const char* name_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      return c10::toString(type);
  }
}

bool is_rotatable(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

void check_x(const RotateCall& call, const char* name, const Tensor& x) {
  ROPE_CHECK_VALUE(
      x.dim() == 3 || x.dim() == 4, name, " has ", x.dim(), " dimensions ", x.sym_sizes(),
      ", needs [seq, heads, head_dim] or [batch, seq, heads, head_dim] (without a head axis: unsqueeze(-2))");
  ROPE_CHECK_TYPE(is_rotatable(x.scalar_type()), name, " is ", name_of(x.scalar_type()),
                  ", needs float16, bfloat16, float32 or float64");
}

// k or v beside q
void check_beside_q(const RotateCall& call, const char* name, const Tensor& k) {
  const Tensor& q = *call.q;
  check_x(call, name, k);
  ROPE_CHECK_TYPE(k.scalar_type() == q.scalar_type(), name, " is ", name_of(k.scalar_type()), ", q is ",
                  name_of(q.scalar_type()), "; they need one dtype");
  ROPE_CHECK_VALUE(k.dim() == q.dim(), name, " has ", k.dim(), " dimensions, q has ", q.dim(), "; they need the same");
  const char* axes[] = {"batch", "seq", "heads", "head_dim"};
  for (int64_t d = 0; d < q.dim(); d++) {
    if (d == q.dim() - 2) continue;
    ROPE_CHECK_VALUE(equal(size(k, d), size(q, d)), name, " has ", axes[d + 4 - q.dim()], " ", size(k, d), ", q has ",
                     size(q, d), "; only their heads may differ");
  }
}

// The last dimension of cos, sin or inv_freq is rotary_dim / 2.
void check_rotary_dim(const RotateCall& call, const char* name, const Tensor& source, const char* unit) {
  const c10::SymInt &half = size(source, -1), &head_dim = size(*call.q, -1);
  ROPE_CHECK_VALUE((half * 2).sym_le(head_dim), name, " has ", half, " ", unit, ", ", call.q_name(), " has head_dim ",
                   head_dim, ": rotary_dim ", half * 2, " is larger than head_dim");
}

void check_tables(const RotateCall& call) {
  const Tensor &cos = *call.cos, &sin = *call.sin;
  const at::ScalarType x_type = call.q->scalar_type(), type = cos.scalar_type();
  ROPE_CHECK_TYPE(sin.scalar_type() == type, "sin is ", name_of(sin.scalar_type()), ", cos is ", name_of(type),
                  "; they need one dtype");
  ROPE_CHECK_TYPE(type == at::kFloat || type == x_type, "cos and sin are ", name_of(type), ", need float32 or ",
                  call.q_name(), "'s dtype, ", name_of(x_type));
  ROPE_CHECK_VALUE(cos.dim() == 2 || cos.dim() == 3, "cos has ", cos.dim(), " dimensions ", cos.sym_sizes(),
                   ", needs [max_position, rotary_dim / 2] or [batch or 1, seq, rotary_dim / 2]");
  ROPE_CHECK_VALUE(sin.dim() == cos.dim(), "sin has shape ", sin.sym_sizes(), ", cos has ", cos.sym_sizes(),
                   "; they need the same");
  for (int64_t d = 0; d < cos.dim(); d++) {
    ROPE_CHECK_VALUE(equal(size(sin, d), size(cos, d)), "sin has shape ", sin.sym_sizes(), ", cos has ",
                     cos.sym_sizes(), "; they need the same");
  }
  check_rotary_dim(call, "cos", cos, "columns");
  if (cos.dim() == 2) return;
  const Tensor& x = *call.q;
  const c10::SymInt &batch = batch_of(x), &seq = size(x, -3);
  ROPE_CHECK_VALUE(!call.positions, "positions with cos of shape ", cos.sym_sizes(),
                   ": a 3-D table has a row per token, so positions needs to be None (or cos 2-D, a row per position)");
  ROPE_CHECK_VALUE(equal(call.offset, 0), "offset is ", call.offset, " with cos of shape ", cos.sym_sizes(),
                   ": a 3-D table has a row per token, so offset needs to be 0 (or cos 2-D, a row per position)");
  ROPE_CHECK_VALUE(equal(size(cos, 1), seq), "cos has ", size(cos, 1), " rows per sequence, ", call.q_name(),
                   " has seq ", seq, "; a 3-D table needs a row per token");
  ROPE_CHECK_VALUE(size(cos, 0).sym_eq(1).sym_or(size(cos, 0).sym_eq(batch)), "cos has batch ", size(cos, 0), ", ",
                   call.q_name(), " has batch ", batch, "; a 3-D table needs that or 1");
}

void check_inv_freq(const RotateCall& call) {
  const Tensor& inv_freq = *call.inv_freq;
  ROPE_CHECK_TYPE(inv_freq.scalar_type() == at::kFloat || inv_freq.scalar_type() == at::kDouble, "inv_freq is ",
                  name_of(inv_freq.scalar_type()), ", needs float32 or float64");
  ROPE_CHECK_VALUE(inv_freq.dim() == 1, "inv_freq has ", inv_freq.dim(), " dimensions ", inv_freq.sym_sizes(),
                   ", needs [rotary_dim / 2]");
  check_rotary_dim(call, "inv_freq", inv_freq, "frequencies");
}

void check_positions(const RotateCall& call) {
  const Tensor &positions = *call.positions, &x = *call.q;
  ROPE_CHECK_TYPE(positions.scalar_type() == at::kInt || positions.scalar_type() == at::kLong, "positions is ",
                  name_of(positions.scalar_type()), ", needs int32 or int64");
  const c10::SymInt &batch = batch_of(x), &seq = size(x, -3);
  ROPE_CHECK_VALUE(positions.dim() == 1 || positions.dim() == 2, "positions has ", positions.dim(), " dimensions ",
                   positions.sym_sizes(), ", needs [seq], [1, seq] or [batch, seq]");
  ROPE_CHECK_VALUE(equal(size(positions, -1), seq), "positions has ", size(positions, -1), " tokens ",
                   positions.sym_sizes(), ", ", call.q_name(), " has seq ", seq,
                   "; positions needs [seq], [1, seq] or [batch, seq]");
  if (positions.dim() == 2) {
    ROPE_CHECK_VALUE(size(positions, 0).sym_eq(1).sym_or(size(positions, 0).sym_eq(batch)), "positions has batch ",
                     size(positions, 0), ", ", call.q_name(), " has batch ", batch,
                     "; positions needs [seq], [1, seq] or [batch, seq]");
  }
}

void check_norm(const RotateCall& call) {
  ROPE_CHECK_VALUE((call.q_norm_weight == nullptr) == (call.k_norm_weight == nullptr),
                   call.q_norm_weight ? "q_norm_weight without k_norm_weight" : "k_norm_weight without q_norm_weight",
                   "; needs both, or neither for no norm");
  if (!call.q_norm_weight) return;
  const c10::SymInt& head_dim = size(*call.q, -1);
  const at::ScalarType x_type = call.q->scalar_type();
  const auto check = [&](const char* name, const Tensor& weight) {
    ROPE_CHECK_TYPE(weight.scalar_type() == at::kFloat || weight.scalar_type() == x_type, name, " is ",
                    name_of(weight.scalar_type()), ", needs float32 or q's dtype, ", name_of(x_type));
    ROPE_CHECK_VALUE(weight.dim() == 1, name, " has ", weight.dim(), " dimensions ", weight.sym_sizes(),
                     ", needs [head_dim], one weight for each channel of a head");
    ROPE_CHECK_VALUE(equal(size(weight, 0), head_dim), name, " has ", size(weight, 0), " weights, q has head_dim ",
                     head_dim, "; they need the same");
  };
  check("q_norm_weight", *call.q_norm_weight);
  check("k_norm_weight", *call.k_norm_weight);
}

// q and k have been checked.
void check_cache(const RotateCall& call) {
  const Tensor &q = *call.q, &k = *call.k, &v = *call.v;
  const c10::SymInt &batch = batch_of(q), &seq = size(q, -3);
  check_beside_q(call, "v", v);
  ROPE_CHECK_VALUE(equal(size(v, -2), size(k, -2)), "v has ", size(v, -2), " heads, k has ", size(k, -2),
                   "; they need the same");
  const auto check = [&](const char* name, const Tensor& cache) {
    ROPE_CHECK_TYPE(cache.scalar_type() == k.scalar_type(), name, " is ", name_of(cache.scalar_type()), ", k is ",
                    name_of(k.scalar_type()), "; they need one dtype");
    ROPE_CHECK_VALUE(cache.dim() == 3 || cache.dim() == 4, name, " has ", cache.dim(), " dimensions ",
                     cache.sym_sizes(),
                     ", needs [blocks, block_size, kv_heads, head_dim] or [max_seq, kv_heads, head_dim]");
    ROPE_CHECK_VALUE(equal(size(cache, -2), size(k, -2)), name, " has ", size(cache, -2), " heads, k has ", size(k, -2),
                     "; they need the same (a head-major cache is passed transposed)");
    ROPE_CHECK_VALUE(equal(size(cache, -1), size(k, -1)), name, " has head_dim ", size(cache, -1), ", k has ",
                     size(k, -1), "; they need the same");
  };
  const Tensor &k_cache = *call.k_out, &v_cache = *call.v_out;
  check("k_cache", k_cache);
  check("v_cache", v_cache);
  ROPE_CHECK_VALUE(v_cache.dim() == k_cache.dim(), "v_cache has shape ", v_cache.sym_sizes(), ", k_cache has ",
                   k_cache.sym_sizes(), "; they need the same");
  for (int64_t d = 0; d < k_cache.dim() - 2; d++) {
    ROPE_CHECK_VALUE(equal(size(v_cache, d), size(k_cache, d)), "v_cache has shape ", v_cache.sym_sizes(),
                     ", k_cache has ", k_cache.sym_sizes(), "; they need the same");
  }
  if (!call.slots) {
    ROPE_CHECK_VALUE(!(call.cos && call.cos->dim() == 3), "cos of shape ", call.cos->sym_sizes(),
                     " says no positions, and there are no slots; a 3-D table needs slots");
    const c10::SymInt& blocks = batch_of(k_cache);
    ROPE_CHECK_VALUE(batch.sym_le(blocks), "q has batch ", batch, ", k_cache has ", blocks,
                     " blocks; without slots row b writes block b, so it needs at least as many blocks");
    return;
  }
  const Tensor& slots = *call.slots;
  ROPE_CHECK_TYPE(slots.scalar_type() == at::kInt || slots.scalar_type() == at::kLong, "slots is ",
                  name_of(slots.scalar_type()), ", needs int32 or int64");
  ROPE_CHECK_VALUE(slots.dim() == 1 || slots.dim() == 2, "slots has ", slots.dim(), " dimensions ", slots.sym_sizes(),
                   ", needs [seq] or [batch, seq]");
  ROPE_CHECK_VALUE(equal(size(slots, -1), seq), "slots has ", size(slots, -1), " tokens ", slots.sym_sizes(),
                   ", q has seq ", seq, "; slots needs [seq] or [batch, seq]");
  const c10::SymInt& rows = slots.dim() == 2 ? size(slots, 0) : kOne;
  ROPE_CHECK_VALUE(equal(rows, batch), "slots has shape ", slots.sym_sizes(), ", q has batch ", batch,
                   "; each token needs its own slot, [batch, seq] (or [seq] with batch 1)");
}

struct Named {
  const char* name;
  const Tensor* tensor;
};

// What is read beside q, k and v: f(Named).
template <typename F>
void for_each_parameter(const RotateCall& call, F&& f) {
  const auto optional = [&](const char* name, const Tensor* t) {
    if (t) f(Named{name, t});
  };
  const auto address = [](const OptTensor& t) { return t ? &*t : nullptr; };
  optional("cos", address(call.cos));
  optional("sin", address(call.sin));
  optional("inv_freq", address(call.inv_freq));
  optional("positions", address(call.positions));
  optional("slots", call.slots);
  optional("q_norm_weight", call.q_norm_weight);
  optional("k_norm_weight", call.k_norm_weight);
}

// The schema lets None through where it says Tensor.
void check_given(const RotateCall& call) {
  const auto check = [&](const char* name, const Tensor* t) {
    ROPE_CHECK_VALUE(!t || t->defined(), name, " is None, needs a tensor");
  };
  check("k", call.k);
  check("q_norm_weight", call.q_norm_weight);
  check("k_norm_weight", call.k_norm_weight);
  if (!call.v) return;
  check("v", call.v);
  check("k_cache", call.k_out);
  check("v_cache", call.v_out);
}

void check_devices(const RotateCall& call) {
  const c10::Device device = call.q->device();
  const auto check = [&](const Named& t) {
    ROPE_CHECK_VALUE(t.tensor->device() == device, t.name, " is on ", t.tensor->device(), ", ", call.q_name(),
                     " is on ", device, "; all tensors need one device");
  };
  if (call.k) check({"k", call.k});
  if (call.v) {
    check({"v", call.v});
    check({"k_cache", call.k_out});
    check({"v_cache", call.v_out});
  }
  for_each_parameter(call, check);
}

// What is written may share memory with nothing else. Slices of one packed tensor interleave, and are looked at
// exactly; a cache and q, k, v are not expected to come from one tensor, and their address ranges decide.
void check_overlap(const RotateCall& call) {
  struct Used : Named {
    Memory memory;
    bool is_cache;
    Used(const char* name, const Tensor* t, bool is_cache = false) : Named{name, t}, memory(*t), is_cache(is_cache) {}
  };
  c10::SmallVector<Used, 4> written;
  c10::SmallVector<Used, 10> read;
  written.emplace_back(call.q_name(), call.q);
  if (call.v) {
    written.emplace_back("k_cache", call.k_out, true);
    written.emplace_back("v_cache", call.v_out, true);
    read.emplace_back("k", call.k);
    read.emplace_back("v", call.v);
  } else if (call.k) {
    written.emplace_back("k", call.k);
  }
  const size_t k_and_v = read.size();
  for_each_parameter(call, [&](const Named& t) { read.emplace_back(t.name, t.tensor); });

  for (const Used& a : written) {
    const Tensor& x = *a.tensor;
    ROPE_CHECK_VALUE(!a.memory.overlaps_itself(), a.name, " has shape ", x.sym_sizes(), " and strides ",
                     x.sym_strides(),
                     ": some of its elements share memory, and it is written in place; needs its own memory for each "
                     "element (clone it)");
    for (size_t i = 0; i < read.size(); i++) {
      const Memory& b = read[i].memory;
      ROPE_CHECK_VALUE(!(a.is_cache && i < k_and_v ? a.memory.range_overlaps(b) : a.memory.overlaps(b)), a.name,
                       " is written in place and overlaps ", read[i].name,
                       ", which is read; they need separate memory");
    }
  }
  for (size_t i = 0; i < written.size(); i++) {
    for (size_t j = i + 1; j < written.size(); j++) {
      const Used &a = written[i], &b = written[j];
      ROPE_CHECK_VALUE(!(a.is_cache == b.is_cache ? a.memory.overlaps(b.memory) : a.memory.range_overlaps(b.memory)),
                       a.name, " and ", b.name, " overlap and both are written in place; they need separate memory");
    }
  }
}

}  // namespace

void check(const RotateCall& call, bool in_place) {
  check_given(call);
  check_x(call, call.q_name(), *call.q);
  if (call.k) check_beside_q(call, "k", *call.k);
  ROPE_CHECK_VALUE(call.cos.has_value() == call.sin.has_value(), call.cos ? "cos without sin" : "sin without cos",
                   "; an angle source is cos and sin together, or inv_freq");
  ROPE_CHECK_VALUE(call.cos.has_value() || call.inv_freq.has_value(),
                   "no angle source; needs cos and sin, or inv_freq");
  ROPE_CHECK_VALUE(!(call.cos.has_value() && call.inv_freq.has_value()),
                   "two angle sources, cos and sin, and inv_freq; needs exactly one");
  check_devices(call);
  if (call.cos) check_tables(call);
  if (call.inv_freq) check_inv_freq(call);
  if (call.positions) check_positions(call);
  check_norm(call);
  if (call.v) check_cache(call);
  if (in_place) check_overlap(call);
}

void check_gradients(const RotateCall& call, const Tensor& q, const Tensor* k) {
  const auto check = [&](const char* name, const Tensor& x, const Tensor& gradient) {
    ROPE_CHECK_TYPE(x.scalar_type() == gradient.scalar_type(), name, " is ", name_of(x.scalar_type()),
                    ", its gradient is ", name_of(gradient.scalar_type()), "; they need one dtype");
    ROPE_CHECK_VALUE(x.dim() == gradient.dim(), name, " has shape ", x.sym_sizes(), ", its gradient ",
                     gradient.sym_sizes(), "; they need the same");
    for (int64_t d = 0; d < x.dim(); d++) {
      ROPE_CHECK_VALUE(equal(size(x, d), size(gradient, d)), name, " has shape ", x.sym_sizes(), ", its gradient ",
                       gradient.sym_sizes(), "; they need the same");
    }
    ROPE_CHECK_VALUE(x.device() == gradient.device(), name, " is on ", x.device(), ", its gradient is on ",
                     gradient.device(), "; all tensors need one device");
  };
  check("q", q, *call.q);
  ROPE_CHECK_VALUE((k == nullptr) == (call.k == nullptr), "k and its gradient come together, or not at all");
  if (k) check("k", *k, *call.k);
}

at::ScalarType check_cos_sin(const char* op, const Tensor& positions, const Tensor& inv_freq,
                             std::optional<at::ScalarType> dtype, bool axes) {
  const struct {
    const char* op;
  } call{op};
  const at::ScalarType type = positions.scalar_type(), result = dtype.value_or(at::kFloat);
  ROPE_CHECK_TYPE(is_rotatable(type) || (at::isIntegralType(type, /*includeBool=*/false) && type <= at::kLong),
                  "positions is ", name_of(type), ", needs an integer or floating dtype");
  ROPE_CHECK_TYPE(inv_freq.scalar_type() == at::kFloat || inv_freq.scalar_type() == at::kDouble, "inv_freq is ",
                  name_of(inv_freq.scalar_type()), ", needs float32 or float64");
  ROPE_CHECK_TYPE(is_rotatable(result), "dtype is ", name_of(result), ", needs float16, bfloat16, float32 or float64");
  ROPE_CHECK_VALUE(inv_freq.dim() == (axes ? 2 : 1), "inv_freq has ", inv_freq.dim(), " dimensions ",
                   inv_freq.sym_sizes(), axes ? ", needs [axes, rotary_dim / 2]" : ", needs [rotary_dim / 2]");
  if (axes) {
    ROPE_CHECK_VALUE(positions.dim() > 0, "positions has no dimensions, needs [axes, ...]");
    ROPE_CHECK_VALUE(equal(size(positions, 0), size(inv_freq, 0)), "positions has ", size(positions, 0),
                     " axes, inv_freq has ", size(inv_freq, 0), "; they need the same");
  }
  ROPE_CHECK_VALUE(positions.device() == inv_freq.device(), "positions is on ", positions.device(), ", inv_freq is on ",
                   inv_freq.device(), "; they need one device");
  return result;
}

void strides_of(const Tensor& t, rope_int* strides) {
  std::copy(t.strides().rbegin(), t.strides().rend(), std::reverse_iterator(strides + 4));
}

namespace {

Operand operand_of(const Tensor& in, const Tensor& out) {
  Operand o{in.size(-2), {}, {}};
  if (o.heads == 0) return o;  // strides that lead nowhere may be too large for a back end's offsets
  strides_of(in, o.in);
  strides_of(out, o.out);
  return o;
}

// Strides of a table, right-aligned into [batch, row, column]; a batch of one serves all.
void table_strides(const Tensor& table, rope_int* strides) {
  std::copy(table.strides().rbegin(), table.strides().rend(), std::reverse_iterator(strides + 3));
  if (table.dim() == 3 && table.size(0) == 1) strides[0] = 0;
}

// Strides of positions or slots as [batch, seq]; a batch of one serves all.
void token_strides(const Tensor& t, rope_int* strides) {
  strides[0] = t.dim() == 2 && t.size(0) > 1 ? t.stride(0) : 0;
  strides[1] = t.stride(-1);
}

}  // namespace

SplitFactor split_factor(double attention_factor) {
  const float hi = std::isnan(attention_factor) ? NAN : float(attention_factor);
  return {hi, std::isfinite(hi) ? float(attention_factor - hi) : 0.0f};
}

RopeParams RotateCall::params() const {
  RopeParams p{};
  p.batch = q->dim() == 4 ? q->size(0) : 1;
  p.seq = q->size(-3);
  p.head_dim = q->size(-1);
  p.q = operand_of(*q, *q_out);
  if (k) p.k = operand_of(*k, *k_out);
  if (inv_freq) {
    p.source = kInvFreq;
    p.rotary_dim = 2 * inv_freq->size(0);
    p.inv_freq = inv_freq->stride(0);
  } else {
    p.source = cos->dim() == 3 ? kTableByToken : kTableByPosition;
    p.rotary_dim = 2 * cos->size(-1);
    p.rows = cos->size(-2);
    table_strides(*cos, p.cos);
    table_strides(*sin, p.sin);
  }
  if (positions) {
    p.has_positions = 1;
    token_strides(*positions, p.positions);
  }
  if (v) {
    p.v = operand_of(*v, *v_out);
    p.blocks = k_out->dim() == 4 ? k_out->size(0) : 1;
    p.block_size = k_out->size(-3);
  }
  if (slots) {
    p.has_slots = 1;
    token_strides(*slots, p.slots);
  }
  if (q_norm_weight) {
    p.has_norm = 1;
    p.q_norm_weight = q_norm_weight->stride(0);
    p.k_norm_weight = k_norm_weight->stride(0);
    p.norm_eps = float(norm_eps);
  }
  p.offset = offset.guard_int(__FILE__, __LINE__);
  const SplitFactor factor = split_factor(attention_factor);
  p.factor_hi = factor.hi;
  p.factor_lo = factor.lo;
  p.interleaved = interleaved;
  p.inverse = inverse;
  return p;
}

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat;
    default:
      return DType::kDouble;  // the checks have seen to it that there is no other
  }
}

PositionType position_type(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return PositionType::kInt8;
    case at::kByte:
      return PositionType::kUInt8;
    case at::kShort:
      return PositionType::kInt16;
    case at::kInt:
      return PositionType::kInt32;
    case at::kLong:
      return PositionType::kInt64;
    case at::kHalf:
      return PositionType::kHalf;
    case at::kBFloat16:
      return PositionType::kBFloat16;
    case at::kFloat:
      return PositionType::kFloat;
    default:
      return PositionType::kDouble;
  }
}

RotateArgs RotateCall::args() const {
  const auto address = [](const Tensor& t) { return t.const_data_ptr(); };
  RotateArgs a{params()};
  a.attention_factor = attention_factor;
  a.norm_eps = norm_eps;
  a.x_dtype = dtype_of(*q);
  a.q_in = address(*q);
  a.q_out = q_out->mutable_data_ptr();
  if (k) {
    a.k_in = address(*k);
    a.k_out = k_out->mutable_data_ptr();
  }
  if (v) {
    a.v_in = address(*v);
    a.v_out = v_out->mutable_data_ptr();
  }
  if (inv_freq) {
    a.inv_freq = address(*inv_freq);
    a.inv_freq_dtype = dtype_of(*inv_freq);
  } else {
    a.cos = address(*cos);
    a.sin = address(*sin);
    a.table_dtype = dtype_of(*cos);
  }
  if (positions) {
    a.positions = address(*positions);
    a.wide_positions = positions->scalar_type() == at::kLong;
  }
  if (slots) {
    a.slots = address(*slots);
    a.wide_slots = slots->scalar_type() == at::kLong;
  }
  if (q_norm_weight) {
    a.q_norm_weight = address(*q_norm_weight);
    a.k_norm_weight = address(*k_norm_weight);
    a.q_norm_dtype = dtype_of(*q_norm_weight);
    a.k_norm_dtype = dtype_of(*k_norm_weight);
  }
  return a;
}

NormBackwardArgs NormBackwardCall::args() const {
  NormBackwardArgs a{rotate.args(), q.const_data_ptr(), k.const_data_ptr(), {}, {}};
  strides_of(q, a.q);
  strides_of(k, a.k);
  return a;
}

TokensOfRows TableBackwardCall::tokens() const {
  const RopeParams p = rotate.params();
  const bool by_position = p.source == kTableByPosition;
  // Whether each sequence has rows, or positions, of its own.
  const OptTensor& positions = rotate.positions;
  const bool own = by_position ? positions && positions->dim() == 2 && positions->size(0) > 1 : rotate.cos->size(0) > 1;
  TokensOfRows t{};
  t.rows = cos_grad.numel() / std::max<int64_t>(1, cos_grad.size(-1));
  t.copies = own ? 1 : p.batch;
  t.shift = by_position ? p.offset : 0;
  t.entries = own ? p.batch * p.seq : p.seq;
  t.listed = by_position && p.has_positions;
  return t;
}

std::pair<Tensor, Tensor> TableBackwardCall::order_and_starts() const {
  const Tensor& positions = *rotate.positions;
  const auto [sorted, order] = positions.to(at::kLong).reshape(-1).sort(/*stable=*/std::optional<bool>(true));
  const int64_t first = -rotate.offset.guard_int(__FILE__, __LINE__);
  return {order, at::searchsorted(sorted, at::arange(first, first + rotate.cos->size(0) + 1, sorted.options()))};
}

TableBackwardArgs TableBackwardCall::args(const Tensor& order, const Tensor& starts) const {
  TableBackwardArgs a{rotate.args()};
  a.q_in = q.const_data_ptr();
  strides_of(q, a.q);
  if (k) {
    a.k_in = k->const_data_ptr();
    strides_of(*k, a.k);
  }
  a.tokens = tokens();
  if (a.tokens.listed) {
    a.order = static_cast<const rope_int*>(order.const_data_ptr());
    a.starts = static_cast<const rope_int*>(starts.const_data_ptr());
  }
  a.cos_grad = cos_grad.mutable_data_ptr();
  a.sin_grad = sin_grad.mutable_data_ptr();
  return a;
}

// A table by position is read at position + offset, a cache without slots is written there.
void check_position_range(const RotateCall& call, const RopeParams& p, int64_t low, int64_t high) {
  int64_t first = 0, last = 0;
  const bool overflow = __builtin_add_overflow(low, p.offset, &first) || __builtin_add_overflow(high, p.offset, &last);
  const auto check = [&](int64_t rows, const char* has, const char* unit) {
    TORCH_CHECK_INDEX(!overflow && first >= 0 && last < rows, call.op, ": positions go from ", low, " to ", high,
                      " with offset ", p.offset, ", ", has, rows, unit,
                      "; position + offset needs to be at least 0 and below that");
  };
  if (p.source == kTableByPosition) check(p.rows, "cos has ", " rows");
  if (call.v && !call.slots) check(p.block_size, "k_cache has block_size ", "");
}

}  // namespace rope
