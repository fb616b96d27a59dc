// Schemas, argument checks and the Meta kernels: everything that is the same on every device.
#include "ops.h"

#include <cmath>

#include "overlap.h"

namespace rope {
namespace {

bool holds(bool condition) { return condition; }
// Guards under torch.compile; for a size that is data (unbacked) it becomes an assertion of the compiled program.
bool holds(const c10::SymBool& condition) { return condition.expect_true(__FILE__, __LINE__); }

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

void check_k(const RotateCall& call) {
  const Tensor &q = *call.q, &k = *call.k;
  check_x(call, "k", k);
  ROPE_CHECK_TYPE(k.scalar_type() == q.scalar_type(), "k is ", name_of(k.scalar_type()), ", q is ",
                  name_of(q.scalar_type()), "; they need one dtype");
  ROPE_CHECK_VALUE(k.dim() == q.dim(), "k has ", k.dim(), " dimensions, q has ", q.dim(), "; they need the same");
  const char* axes[] = {"batch", "seq", "heads", "head_dim"};
  for (int64_t d = 0; d < q.dim(); d++) {
    if (d == q.dim() - 2) continue;
    ROPE_CHECK_VALUE(k.sym_size(d).sym_eq(q.sym_size(d)), "k has ", axes[d + 4 - q.dim()], " ", k.sym_size(d),
                     ", q has ", q.sym_size(d), "; only their heads may differ");
  }
}

// The last dimension of cos, sin or inv_freq is rotary_dim / 2.
void check_rotary_dim(const RotateCall& call, const char* name, const Tensor& source, const char* unit) {
  const c10::SymInt half = source.sym_size(-1), head_dim = call.q->sym_size(-1);
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
    ROPE_CHECK_VALUE(sin.sym_size(d).sym_eq(cos.sym_size(d)), "sin has shape ", sin.sym_sizes(), ", cos has ",
                     cos.sym_sizes(), "; they need the same");
  }
  check_rotary_dim(call, "cos", cos, "columns");
  if (cos.dim() == 2) return;
  const Tensor& x = *call.q;
  const c10::SymInt batch = x.dim() == 4 ? x.sym_size(0) : 1, seq = x.sym_size(-3);
  ROPE_CHECK_VALUE(!call.positions, "positions with cos of shape ", cos.sym_sizes(),
                   ": a 3-D table has a row per token, so positions needs to be None (or cos 2-D, a row per position)");
  ROPE_CHECK_VALUE(call.offset.sym_eq(0), "offset is ", call.offset, " with cos of shape ", cos.sym_sizes(),
                   ": a 3-D table has a row per token, so offset needs to be 0 (or cos 2-D, a row per position)");
  ROPE_CHECK_VALUE(cos.sym_size(1).sym_eq(seq), "cos has ", cos.sym_size(1), " rows per sequence, ", call.q_name(),
                   " has seq ", seq, "; a 3-D table needs a row per token");
  ROPE_CHECK_VALUE(cos.sym_size(0).sym_eq(1).sym_or(cos.sym_size(0).sym_eq(batch)), "cos has batch ", cos.sym_size(0),
                   ", ", call.q_name(), " has batch ", batch, "; a 3-D table needs that or 1");
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
  const c10::SymInt batch = x.dim() == 4 ? x.sym_size(0) : 1, seq = x.sym_size(-3);
  ROPE_CHECK_VALUE(positions.dim() == 1 || positions.dim() == 2, "positions has ", positions.dim(), " dimensions ",
                   positions.sym_sizes(), ", needs [seq], [1, seq] or [batch, seq]");
  ROPE_CHECK_VALUE(positions.sym_size(-1).sym_eq(seq), "positions has ", positions.sym_size(-1), " tokens ",
                   positions.sym_sizes(), ", ", call.q_name(), " has seq ", seq,
                   "; positions needs [seq], [1, seq] or [batch, seq]");
  if (positions.dim() == 2) {
    ROPE_CHECK_VALUE(positions.sym_size(0).sym_eq(1).sym_or(positions.sym_size(0).sym_eq(batch)),
                     "positions has batch ", positions.sym_size(0), ", ", call.q_name(), " has batch ", batch,
                     "; positions needs [seq], [1, seq] or [batch, seq]");
  }
}

struct Named {
  const char* name;
  const Tensor* tensor;
};

// What a call reads beside q and k.
template <typename F>
void for_each_read(const RotateCall& call, F&& f) {
  if (call.cos) f(Named{"cos", &*call.cos});
  if (call.sin) f(Named{"sin", &*call.sin});
  if (call.inv_freq) f(Named{"inv_freq", &*call.inv_freq});
  if (call.positions) f(Named{"positions", &*call.positions});
}

void check_overlap(const RotateCall& call, const char* name, const Tensor& x) {
  ROPE_CHECK_VALUE(!overlaps_itself(x), name, " has shape ", x.sym_sizes(), " and strides ", x.sym_strides(),
                   ": some of its elements share memory, and it is written in place; needs its own memory for each "
                   "element (clone it)");
  for_each_read(call, [&](const Named& read) {
    ROPE_CHECK_VALUE(!overlap(x, *read.tensor), name, " is written in place and overlaps ", read.name,
                     ", which is read; they need separate memory");
  });
}

}  // namespace

void check(const RotateCall& call, bool in_place) {
  const Tensor& q = *call.q;
  check_x(call, call.q_name(), q);
  if (call.k) check_k(call);
  ROPE_CHECK_VALUE(call.cos.has_value() == call.sin.has_value(), call.cos ? "cos without sin" : "sin without cos",
                   "; an angle source is cos and sin together, or inv_freq");
  ROPE_CHECK_VALUE(call.cos.has_value() || call.inv_freq.has_value(),
                   "no angle source; needs cos and sin, or inv_freq");
  ROPE_CHECK_VALUE(!(call.cos.has_value() && call.inv_freq.has_value()),
                   "two angle sources, cos and sin, and inv_freq; needs exactly one");
  if (call.k) {
    ROPE_CHECK_VALUE(call.k->device() == q.device(), "k is on ", call.k->device(), ", q is on ", q.device(),
                     "; all tensors need one device");
  }
  for_each_read(call, [&](const Named& read) {
    ROPE_CHECK_VALUE(read.tensor->device() == q.device(), read.name, " is on ", read.tensor->device(), ", ",
                     call.q_name(), " is on ", q.device(), "; all tensors need one device");
  });
  if (call.cos) check_tables(call);
  if (call.inv_freq) check_inv_freq(call);
  if (call.positions) check_positions(call);
  if (in_place) {
    check_overlap(call, call.q_name(), q);
    if (call.k) {
      check_overlap(call, "k", *call.k);
      ROPE_CHECK_VALUE(!overlap(q, *call.k),
                       "q and k overlap and both are written in place; they need separate memory");
    }
  }
}

at::ScalarType check_cos_sin(const Tensor& positions, const Tensor& inv_freq, std::optional<at::ScalarType> dtype) {
  const struct {
    const char* op;
  } call{"rope.cos_sin"};
  const at::ScalarType type = positions.scalar_type(), result = dtype.value_or(at::kFloat);
  ROPE_CHECK_TYPE(is_rotatable(type) || (at::isIntegralType(type, /*includeBool=*/false) && type <= at::kLong),
                  "positions is ", name_of(type), ", needs an integer or floating dtype");
  ROPE_CHECK_TYPE(inv_freq.scalar_type() == at::kFloat || inv_freq.scalar_type() == at::kDouble, "inv_freq is ",
                  name_of(inv_freq.scalar_type()), ", needs float32 or float64");
  ROPE_CHECK_TYPE(is_rotatable(result), "dtype is ", name_of(result), ", needs float16, bfloat16, float32 or float64");
  ROPE_CHECK_VALUE(inv_freq.dim() == 1, "inv_freq has ", inv_freq.dim(), " dimensions ", inv_freq.sym_sizes(),
                   ", needs [rotary_dim / 2]");
  ROPE_CHECK_VALUE(positions.device() == inv_freq.device(), "positions is on ", positions.device(), ", inv_freq is on ",
                   inv_freq.device(), "; they need one device");
  return result;
}

namespace {

Operand operand_of(const Tensor& in, const Tensor& out) {
  Operand o{in.size(-2), {}, {}};
  const int64_t missing = 4 - in.dim();  // a 3-D tensor is a batch of one
  for (int64_t d = 0; d < in.dim(); d++) {
    o.in[d + missing] = in.stride(d);
    o.out[d + missing] = out.stride(d);
  }
  return o;
}

// Strides of a table, right-aligned into [batch, row, column]; a batch of one serves all.
void table_strides(const Tensor& table, rope_int* strides) {
  for (int64_t d = 0; d < table.dim(); d++) strides[d + 3 - table.dim()] = table.stride(d);
  if (table.dim() == 3 && table.size(0) == 1) strides[0] = 0;
}

}  // namespace

SplitFactor split_factor(double attention_factor) {
  const float hi = float(attention_factor);
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
    p.positions[0] = positions->dim() == 2 && positions->size(0) > 1 ? positions->stride(0) : 0;
    p.positions[1] = positions->stride(-1);
  }
  p.offset = offset.guard_int(__FILE__, __LINE__);
  const SplitFactor factor = split_factor(attention_factor);
  p.factor_hi = factor.hi;
  p.factor_lo = factor.lo;
  p.interleaved = interleaved;
  p.inverse = inverse;
  return p;
}

namespace {

struct Meta {
  static void rotate(const RotateCall&) {}
  static void cos_sin(const CosSinCall&) {}
};

const std::string kAngles =
    "Tensor? cos=None, Tensor? sin=None, Tensor? inv_freq=None, Tensor? positions=None, SymInt offset=0, *, "
    "float attention_factor=1.0, bool interleaved=False, bool inverse=False";

}  // namespace

TORCH_LIBRARY(rope, m) {
  const auto def = [&](const std::string& schema) { m.def(schema.c_str(), {at::Tag::pt2_compliant_tag}); };
  def("cos_sin(Tensor positions, Tensor inv_freq, *, float attention_factor=1.0, ScalarType? dtype=None) -> (Tensor "
      "cos, Tensor sin)");
  def("rotate(Tensor x, " + kAngles + ") -> Tensor");
  def("rotate_(Tensor(a!) x, " + kAngles + ") -> ()");
  def("rotate_qk(Tensor q, Tensor k, " + kAngles + ") -> (Tensor, Tensor)");
  def("rotate_qk_(Tensor(a!) q, Tensor(b!) k, " + kAngles + ") -> ()");
}

TORCH_LIBRARY_IMPL(rope, Meta, m) { register_ops<Meta>(m); }

}  // namespace rope
