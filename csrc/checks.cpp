// The checks of the arguments, and the messages of their ValueErrors, TypeErrors and IndexErrors. A message names the
// operator, the argument, what the argument is or has, then "but must" and what is needed.
#include <algorithm>
#include <cmath>

#include "call.h"
#include "overlap.h"

namespace rope {
namespace {

bool holds(bool condition) { return condition; }
// Installs a guard under torch.compile. If a size is data (unbacked), the condition becomes an assertion in the
// compiled program.
bool holds(const c10::SymBool& condition) { return condition.expect_true(__FILE__, __LINE__); }
bool equal(const c10::SymInt& a, const c10::SymInt& b) {
  if (a.is_symbolic() || b.is_symbolic()) return holds(a.sym_eq(b));
  return a.as_int_unchecked() == b.as_int_unchecked();  // the usual case needs no call
}

// Returns whether a size is known to be 0.
bool is_zero(const c10::SymInt& a) { return a.sym_eq(0).guard_or_false(__FILE__, __LINE__); }

// Returns a reference to the size of dimension d; Tensor::sym_size would create a SymInt.
const c10::SymInt& size(const Tensor& t, int64_t d) {
  const auto sizes = t.sym_sizes();
  return sizes[d < 0 ? d + int64_t(sizes.size()) : d];
}
const c10::SymInt kOne = 1;
// Returns the batch of x, or the number of blocks if x is a cache. A 3-D tensor has one.
const c10::SymInt& batch_of(const Tensor& x) { return x.dim() == 4 ? size(x, 0) : kOne; }

#define ROPE_CHECK_VALUE(condition, ...) TORCH_CHECK_VALUE(holds(condition), call.op, ": ", __VA_ARGS__)
#define ROPE_CHECK_TYPE(condition, ...) TORCH_CHECK_TYPE(condition, call.op, ": ", __VA_ARGS__)

// The name of a dtype, which is looked up when it is printed.
struct NameOf {
  at::ScalarType type;
};
std::ostream& operator<<(std::ostream& out, NameOf name) { return out << c10::getDtypeNames(name.type).first; }

bool is_rotatable(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

// ---- checks of one or two tensors; `must` ends a message ----

// A tensor and the name of the argument that it is.
struct Named {
  const char* name;
  const Tensor* tensor;
  const Tensor& operator*() const { return *tensor; }
  const Tensor* operator->() const { return tensor; }
};

// The names of the arguments that are tensors of q, k and v.
constexpr struct {
  const char *in, *out, *weight, *scale;
} kNames[kSides] = {{"q", "q_out", "q_norm_weight", "q_scale"},
                    {"k", "k_cache", "k_norm_weight", "k_scale"},
                    {"v", "v_cache", "v_norm_weight", "v_scale"}};
Named in(const Call& call, int side) { return {side == kQ ? call.q_name() : kNames[side].in, call.sides[side].in}; }
// The result of a side, if it is an argument of its own.
Named result(const Call& call, int side) {
  const SideTensors& t = call.sides[side];
  return {kNames[side].out, t.out != t.in ? t.out : nullptr};
}
Named weight(const Call& call, int side) { return {kNames[side].weight, call.sides[side].weight}; }
Named scale(const Call& call, int side) { return {kNames[side].scale, call.sides[side].scale}; }

template <typename... Must>
void check_type(const Call& call, bool condition, const Named& t, const Must&... must) {
  ROPE_CHECK_TYPE(condition, t.name, " is ", NameOf{t->scalar_type()}, " but must be ", must...);
}
template <typename Condition, typename... Must>
void check_shape(const Call& call, const Condition& condition, const Named& t, const Must&... must) {
  ROPE_CHECK_VALUE(condition, t.name, " has shape ", t->sym_sizes(), " but must have shape ", must...);
}
template <typename... Must>
void check_dims(const Call& call, const Named& t, int64_t least, int64_t most, const Must&... must) {
  check_shape(call, least <= t->dim() && t->dim() <= most, t, must...);
}
// Checks that both tensors are given, or neither.
template <typename... Must>
void check_together(const Call& call, const Named& a, const Named& b, const Must&... must) {
  ROPE_CHECK_VALUE((a.tensor == nullptr) == (b.tensor == nullptr), a.tensor ? b.name : a.name,
                   " is None but must be given together with ", a.tensor ? a.name : b.name, must...);
}

// Checks that a has the dtype of b.
void check_same_type(const Call& call, const Named& a, const Named& b) {
  const at::ScalarType type = b->scalar_type();
  check_type(call, a->scalar_type() == type, a, NameOf{type}, ", the dtype of ", b.name);
}
// Returns whether a table or a weight is float32 or has the dtype of q, and ends the message if not.
bool is_parameter(const Call& call, const Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == call.q().scalar_type();
}
const char* or_float32(const Call& call) { return call.q().scalar_type() == at::kFloat ? "" : ", or float32"; }

void check_same_device(const Call& call, const Named& a, const Named& b) {
  ROPE_CHECK_VALUE(a->device() == b->device(), a.name, " is on ", a->device(), " but must be on ", b->device(),
                   ", the device of ", b.name);
}

// An axis, and the words before and after a size of that axis in a message: "seq 6", "3 heads".
struct Axis {
  int64_t d;
  const char *before, *after;
};
constexpr Axis kBatchAxis{-4, "batch ", ""}, kSeqAxis{-3, "seq ", ""}, kHeadsAxis{-2, "", " heads"},
    kHeadDimAxis{-1, "head_dim ", ""};

// Checks that a has the size of b along an axis.
template <typename... Must>
void check_same(const Call& call, const Axis& axis, const Named& a, const Named& b, const Must&... must) {
  ROPE_CHECK_VALUE(equal(size(*a, axis.d), size(*b, axis.d)), a.name, " has ", axis.before, size(*a, axis.d),
                   axis.after, " but must have ", axis.before, size(*b, axis.d), ", as ", b.name, " has", must...);
}

// Returns whether a and b have the same sizes, but for the last `rest` dimensions.
bool same_sizes(const Named& a, const Named& b, int64_t rest = 0) {
  bool same = a->dim() == b->dim();
  for (int64_t d = 0; same && d < a->dim() - rest; d++) same = equal(size(*a, d), size(*b, d));
  return same;
}
void check_same_shape(const Call& call, const Named& a, const Named& b) {
  check_shape(call, same_sizes(a, b), a, b->sym_sizes(), ", the shape of ", b.name);
}

// Checks inv_freq, which has `dims` dimensions, or one more before them: then it is the sum of two float32 tensors.
// shapes: the shapes that are allowed.
void check_inv_freq(const Call& call, const Tensor& inv_freq, int64_t dims, const char* shapes,
                    const char* advice = "") {
  const Named f{"inv_freq", &inv_freq};
  const at::ScalarType type = inv_freq.scalar_type();
  check_type(call, type == at::kFloat || type == at::kDouble, f, "float32 or float64",
             at::isReducedFloatingType(type) ? "; compute it again, because a cast back does not restore it" : "");
  check_dims(call, f, dims, dims + 1, shapes, advice);
  if (inv_freq.dim() == dims) return;
  check_shape(call, equal(size(inv_freq, 0), 2), f, shapes, advice);
  ROPE_CHECK_TYPE(type == at::kFloat, "inv_freq has shape ", inv_freq.sym_sizes(), " and is ", NameOf{type},
                  " but must be float32, because it is the sum of two parts");
}

// ---- the arguments of a rotation ----

void check_x(const Call& call, const Named& x) {
  check_dims(call, x, 3, 4, "[seq, heads, head_dim] or [batch, seq, heads, head_dim]",
             "; if the head axis is missing, pass ", x.name, ".unsqueeze(-2)");
  check_type(call, is_rotatable(x->scalar_type()), x, "float16, bfloat16, float32 or float64");
}

// Checks k or v, which must have the tokens and the dtype of q. may_differ: says in a message what may differ.
void check_like_q(const Call& call, const Named& k, const char* may_differ) {
  const Named q = in(call, kQ);
  check_x(call, k);
  check_same_type(call, k, q);
  ROPE_CHECK_VALUE(k->dim() == q->dim(), k.name, " has ", k->dim(), " dimensions but must have ", q->dim(),
                   ", as q has");
  if (q->dim() == 4) check_same(call, kBatchAxis, k, q, may_differ);
  check_same(call, kSeqAxis, k, q, may_differ,
             "; pass tensors [batch, heads, seq, head_dim] transposed, as x.transpose(1, 2)",
             call.has_cache() ? "" : "; if q and k have different lengths, call rotate for each");
}

// Checks rotary_start, and the last dimension of cos or inv_freq, which is rotary_dim / 2. unit: what the last
// dimension counts.
void check_rotary_dim(const Call& call, const Named& source, const char* unit, const char* advice = "") {
  const c10::SymInt &half = size(*source, -1), &head_dim = size(call.q(), -1);
  ROPE_CHECK_VALUE((half * 2).sym_le(head_dim), source.name, " has ", half, " ", unit, " but must have at most ",
                   head_dim / 2, ", because ", call.q_name(), " has head_dim ", head_dim, ": rotary_dim ", half * 2,
                   " is larger than head_dim", advice);
  if (call.rotary_start == 0) return;
  ROPE_CHECK_VALUE(call.rotary_start > 0, "rotary_start is ", call.rotary_start, " but must be at least 0");
  ROPE_CHECK_VALUE((head_dim - half * 2).sym_ge(call.rotary_start), "rotary_start is ", call.rotary_start,
                   " but must be at most ", head_dim - half * 2, ", because ", call.q_name(), " has head_dim ",
                   head_dim, " and ", half * 2, " channels are rotated");
}

// Checks the batch of a table or of positions.
void check_batch(const Call& call, const Named& t, const char* advice = "") {
  const c10::SymInt &own = size(*t, 0), &batch = batch_of(call.q());
  ROPE_CHECK_VALUE(own.sym_eq(1).sym_or(own.sym_eq(batch)), t.name, " has batch ", own, " but must have batch ", batch,
                   ", as ", call.q_name(), " has, or batch 1", advice);
}

// Ends the message for complex tables.
const char* of_complex(const Tensor* t) {
  return t && t->is_complex() ? "; torch.view_as_real(table).unbind(-1) makes cos and sin of a complex table" : "";
}

void check_tables(const Call& call) {
  const Named cos{"cos", call.cos}, sin{"sin", call.sin};
  check_same_type(call, sin, cos);
  ROPE_CHECK_TYPE(is_parameter(call, *cos), "cos and sin are ", NameOf{cos->scalar_type()}, " but must be ",
                  NameOf{call.q().scalar_type()}, ", the dtype of ", call.q_name(), or_float32(call),
                  cos->scalar_type() == at::kDouble ? "; pass cos.float() and sin.float()" : of_complex(call.cos));
  check_dims(call, cos, 2, 4,
             "[max_position, rotary_dim / 2], [batch or 1, seq, rotary_dim / 2] or [batch or 1, seq, heads, "
             "rotary_dim / 2]");
  check_same_shape(call, sin, cos);
  check_rotary_dim(call, cos, "columns", "; if cos has each angle twice, pass the first half of its columns");
  if (cos->dim() == 2) return;
  const c10::SymInt& seq = size(call.q(), -3);
  if (!call.has_cache() || call.slots) {  // in a cache without slots, positions choose cells
    const char* advice = call.slots ? ": such a table has a row per token, and slots choose the cells"
                                    : ": such a table has a row per token; pass a 2-D table to select rows by position";
    ROPE_CHECK_VALUE(!call.positions, "positions is given but must be None, because cos has shape ", cos->sym_sizes(),
                     advice);
    ROPE_CHECK_VALUE(equal(call.offset, 0), "offset is ", call.offset, " but must be 0, because cos has shape ",
                     cos->sym_sizes(), advice);
  }
  ROPE_CHECK_VALUE(equal(size(*cos, 1), seq), "cos has ", size(*cos, 1), " rows per sequence but must have ", seq,
                   ", the seq of ", call.q_name(), ": such a table has a row per token",
                   cos->dim() == 4 ? "; pass a table [batch, 1, seq, rotary_dim / 2] as cos.squeeze(1)" : "");
  check_batch(call, cos);
  if (cos->dim() == 3) return;
  for (const Named& x : {in(call, kQ), in(call, kK)}) {
    const bool has_rows = x.tensor && !(x.tensor == call.sides[kK].in && is_zero(size(*x, -2)));
    if (has_rows)
      check_same(call, kHeadsAxis, cos, x,
                 ": a 4-D table has a row per token and head; pass a table for all heads as cos.squeeze(-2)");
  }
}

// Checks positions or slots, which hold one number for each token. shapes: the shapes that are allowed. advice: ends
// the message about a dtype or a number of dimensions; of_seq ends that about a number of tokens.
void check_tokens(const Call& call, const Named& t, const char* shapes, const char* advice, const char* of_seq) {
  check_type(call, t->scalar_type() == at::kInt || t->scalar_type() == at::kLong, t, "int32 or int64", advice);
  check_dims(call, t, 1, 2, shapes, advice);
  const c10::SymInt& seq = size(call.q(), -3);
  check_shape(call, equal(size(*t, -1), seq), t, shapes, " with seq ", seq, ", as ", call.q_name(), " has", of_seq);
}

void check_norm(const Call& call) {
  const Named q_weight = weight(call, kQ), k_weight = weight(call, kK);
  check_together(call, q_weight, k_weight, "; pass both, or neither for no norm");
  ROPE_CHECK_VALUE(call.eager_rounding || !call.round_before_weight,
                   "round_before_weight is True but must be False, because eager_rounding is False");
  const Named v_weight = weight(call, kV);
  ROPE_CHECK_VALUE(call.norm_v || !v_weight.tensor, "v_norm_weight is given but must be None, because norm_v is False");
  if (!q_weight.tensor && !call.norm_v) return;
  ROPE_CHECK_VALUE(call.norm_eps >= 0 && std::isfinite(call.norm_eps), "norm_eps is ", call.norm_eps,
                   " but must be at least 0, and finite");
  ROPE_CHECK_VALUE(std::isfinite(call.norm_weight_offset), "norm_weight_offset is ", call.norm_weight_offset,
                   " but must be finite");
  for (const Named& w : {q_weight, k_weight, v_weight}) {
    if (!w.tensor) continue;
    const bool wide = is_parameter(call, *w), is_q_type = w->scalar_type() == call.q().scalar_type();
    check_type(call, call.round_before_weight ? is_q_type : wide, w, NameOf{call.q().scalar_type()}, ", the dtype of q",
               call.round_before_weight ? ", because round_before_weight is True" : or_float32(call));
  }
  if (v_weight.tensor) {
    const c10::SymInt& v_dim = size(*call.sides[kV].in, -1);
    check_shape(call, v_weight->dim() == 1, v_weight, "[v_dim]");
    check_shape(call, equal(size(*v_weight, 0), v_dim), v_weight, "[v_dim] with v_dim ", v_dim, ", as v has");
  }
  if (!q_weight.tensor) return;
  const auto shape_of = [](const Named& w) { return w->dim() == 1 ? "[head_dim]" : "[heads, head_dim]"; };
  const c10::SymInt& head_dim = size(call.q(), -1);
  for (int side : {kQ, kK}) {
    const Named w = weight(call, side);
    check_dims(call, w, 1, 2,
               "[head_dim], to normalise each head, or [heads, head_dim], to normalise all heads of a token together");
    check_shape(call, equal(size(*w, -1), head_dim), w, shape_of(w), " with head_dim ", head_dim, ", as q has",
                w->dim() == 1 && equal(size(*w, -1), head_dim * size(*in(call, side), -2))
                    ? "; pass that of a norm over all heads as weight.view(heads, head_dim)"
                    : "");
    if (w->dim() == 2) check_same(call, kHeadsAxis, w, in(call, side), ": a 2-D weight has a row for each head");
  }
  check_shape(call, k_weight->dim() == q_weight->dim(), k_weight, shape_of(q_weight), ", as q_norm_weight has");
}

void check_factor(const Call& call) {
  const Named factor{"q_factor", call.sides[kQ].factor};
  if (!factor.tensor) return;
  const char* shapes = "[seq], [batch or 1, seq] or [batch or 1, seq, heads]";
  check_type(call, factor->scalar_type() == at::kFloat, factor, "float32");
  check_dims(call, factor, 1, 3, shapes);
  const bool by_head = factor->dim() == 3;
  const c10::SymInt &seq = size(call.q(), -3), &heads = size(call.q(), -2);
  check_shape(call, equal(size(*factor, by_head ? -2 : -1), seq), factor, shapes, " with seq ", seq, ", as q has");
  if (factor->dim() > 1) check_batch(call, factor);
  if (by_head) check_shape(call, equal(size(*factor, -1), heads), factor, shapes, " with ", heads, " heads, as q has");
}

// Checks the dtype of a result, and its scale, which a quantised result needs and no other one has.
void check_format(const Call& call, int side) {
  const Named x = in(call, side), y = result(call, side), scale = rope::scale(call, side);
  if (!y.tensor) {
    ROPE_CHECK_VALUE(!scale.tensor, scale.name, " is given but must be None, because ", x.name,
                     " is written in place; pass a float8 or int8 ", y.name);
    return;
  }
  const at::ScalarType type = y->scalar_type(), x_type = x->scalar_type();
  check_type(call, type == x_type || format_of(type) != kUnquantised, y, NameOf{x_type}, ", the dtype of ", x.name,
             ", or float8_e4m3fn, float8_e5m2 or int8",
             type == at::kByte ? "; pass float8 numbers as bytes.view(torch.float8_e4m3fn)" : "");
  ROPE_CHECK_VALUE(scale.tensor || type == x_type, scale.name, " is None but must be given, because ", y.name, " is ",
                   NameOf{type});
  if (!scale.tensor) return;
  ROPE_CHECK_VALUE(type != x_type, scale.name, " is given but must be None, because ", y.name, " is ", NameOf{type},
                   ", the dtype of ", x.name);
  check_type(call, scale->scalar_type() == at::kFloat, scale, "float32");
  const c10::SymInt& heads = size(*y, -2);
  const c10::SymBool one = scale->sym_numel().sym_eq(1);
  ROPE_CHECK_VALUE(scale->dim() == 1 ? one.sym_or(size(*scale, 0).sym_eq(heads)) : one, scale.name, " has shape ",
                   scale->sym_sizes(), " but must have one element, or shape [heads] with ", heads, " heads, as ",
                   y.name, " has");
}

// Checks v, the results and slots. Call it after q and k have been checked.
void check_cache(const Call& call) {
  const Named k_cache = result(call, kK), v_cache = result(call, kV);
  const c10::SymInt& batch = batch_of(call.q());
  check_like_q(call, in(call, kV), "; only the heads and head_dim may differ");
  if (const Named q_out = result(call, kQ); q_out.tensor) check_same_shape(call, q_out, in(call, kQ));
  for (int side : {kK, kV}) {
    const Named to = result(call, side), x = in(call, side);
    check_dims(call, to, 3, 4, "[blocks, block_size, kv_heads, head_dim] or [max_seq, kv_heads, head_dim]");
    check_same(call, kHeadsAxis, to, x, "; pass a head-major cache as ", to.name, ".transpose(-3, -2)");
    check_same(call, kHeadDimAxis, to, x);
  }
  for (int side = 0; side < kSides; side++) check_format(call, side);
  ROPE_CHECK_VALUE(same_sizes(v_cache, k_cache, 2), "v_cache has shape ", v_cache->sym_sizes(),
                   " but must have the blocks and block_size of ", "k_cache, which has shape ", k_cache->sym_sizes());
  if (!call.slots) {
    const c10::SymInt& blocks = batch_of(*k_cache);
    ROPE_CHECK_VALUE(batch.sym_le(blocks), "k_cache has shape ", k_cache->sym_sizes(), " but must have at least ",
                     batch, " blocks, the batch of q: without slots, sequence b is written to block b");
    return;
  }
  const Named slots{"slots", call.slots};
  check_tokens(call, slots, "[seq] or [batch, seq]", "", "; give the slot -1 to a token without a cell");
  const c10::SymInt& own = slots->dim() == 2 ? size(*slots, 0) : kOne;
  check_shape(call, equal(own, batch), slots, "[batch, seq] with batch ", batch,
              ", as q has: each token needs its own slot");
}

// A tensor of a call that may be written in place, or that is only read.
struct Used : Named {
  enum Kind { kSide, kCache, kParameter } kind;
  bool written;
};
using UsedTensors = c10::SmallVector<Used, 16>;
UsedTensors tensors_of(const Call& call) {
  UsedTensors tensors;
  const auto add = [&](const Named& t, Used::Kind kind, bool written) {
    if (t.tensor) tensors.push_back({t, kind, written});
  };
  for (int side = 0; side < kSides; side++) {
    const Named x = in(call, side), y = result(call, side);
    add(x, Used::kSide, !y.tensor);
    add(y, side == kQ ? Used::kSide : Used::kCache, true);
  }
  for (const Named& t : {Named{"cos", call.cos}, Named{"sin", call.sin}, Named{"inv_freq", call.inv_freq},
                         Named{"positions", call.positions}, Named{"slots", call.slots}, weight(call, kQ),
                         weight(call, kK), weight(call, kV), scale(call, kQ), scale(call, kK), scale(call, kV),
                         Named{"q_factor", call.sides[kQ].factor}}) {
    add(t, Used::kParameter, false);
  }
  return tensors;
}

// Checks that a tensor which is written shares no memory with another tensor or with itself. Slices of one packed
// tensor may interleave, so they are compared byte by byte. A cache and q, k or v are not expected to be slices of one
// tensor, so it is enough to compare their address ranges, from the first to the last byte.
void check_overlap(const Call& call, const UsedTensors& tensors) {
  c10::SmallVector<Memory, 16> memory;
  for (const Used& t : tensors) memory.emplace_back(*t);
  for (size_t i = 0; i < tensors.size(); i++) {
    const Used& a = tensors[i];
    if (!a.written) continue;
    ROPE_CHECK_VALUE(!memory[i].overlaps_itself(), a.name, " has shape ", memory[i].tensor().sym_sizes(),
                     " and strides ", memory[i].tensor().sym_strides(),
                     ", so some of its elements share memory, but must have separate memory for each ",
                     "element, because ", a.name, " is written in place; clone it first");
    for (size_t j = 0; j < tensors.size(); j++) {
      const Used& b = tensors[j];
      if ((b.written && j <= i) || !memory[i].range_overlaps(memory[j])) continue;
      const bool exactly = a.kind == b.kind || b.kind == Used::kParameter;
      if (exactly && !memory[i].overlaps(memory[j])) continue;
      const std::string reason = b.written ? "both are written in place"
                                           : std::string(a.name) + " is written in place and " + b.name + " is read";
      ROPE_CHECK_VALUE(false, a.name, " overlaps ", b.name, " but must have separate memory, because ", reason);
    }
  }
}

// Checks that the gradients of the results match q and k.
void check_gradients(const Call& call) {
  for (int side : {kQ, kK}) {
    const Named x = in(call, side), gradient{side == kQ ? "q_out_grad" : "k_out_grad", call.sides[side].gradient};
    check_same_type(call, gradient, x);
    check_same_shape(call, gradient, x);
    check_same_device(call, gradient, x);
  }
}

}  // namespace

void check(const Call& call, bool in_place) {
  const UsedTensors tensors = tensors_of(call);
  for (const Used& t : tensors) check_same_device(call, t, in(call, kQ));
  check_x(call, in(call, kQ));
  if (const Named k = in(call, kK); k.tensor) {
    const char* may_differ = "; only the heads may differ";
    check_like_q(call, k, may_differ);
    check_same(call, kHeadDimAxis, k, in(call, kQ), may_differ);
  }
  const char* advice = "; pass one angle source: cos and sin, or inv_freq";
  check_together(call, Named{"cos", call.cos}, Named{"sin", call.sin}, advice, of_complex(call.cos));
  ROPE_CHECK_VALUE(call.cos || call.inv_freq, "cos, sin and inv_freq are None but must not all be None", advice);
  ROPE_CHECK_VALUE(!(call.cos && call.inv_freq), "inv_freq is given but must be None, because cos and sin are given",
                   advice);
  if (call.cos) check_tables(call);
  if (call.inv_freq) {
    check_inv_freq(call, *call.inv_freq, 1, "[rotary_dim / 2] or [2, rotary_dim / 2]",
                   "; for several axes, make tables with axial_cos_sin");
    check_rotary_dim(call, Named{"inv_freq", call.inv_freq}, "frequencies");
  }
  if (call.positions) {
    const Named positions = Named{"positions", call.positions};
    const bool is_float = at::isFloatingType(positions->scalar_type()), is_deep = positions->dim() > 2;
    const bool is_v = is_float && is_deep && equal(size(*positions, -1), size(call.q(), -1));
    const char* of_axes = "; for several axes, make tables with axial_cos_sin";
    const char* advice = is_v       ? "; if it is v, leave it out, because v is not rotated"
                         : is_deep  ? of_axes
                         : is_float ? "; make tables of other positions with cos_sin"
                                    : "";
    check_tokens(call, positions, "[seq], [1, seq] or [batch, seq]", advice, "");
    if (positions->dim() == 2) check_batch(call, positions, of_axes);
  }
  ROPE_CHECK_VALUE(std::isfinite(call.attention_factor), "attention_factor is ", call.attention_factor,
                   " but must be finite");
  check_factor(call);
  if (call.has_cache()) check_cache(call);
  check_norm(call);
  if (call.is_backward()) check_gradients(call);
  if (in_place) check_overlap(call, tensors);
}

at::ScalarType check_cos_sin(const Call& call, bool axes) {
  const Tensor &positions = *call.positions, &inv_freq = *call.inv_freq;
  const at::ScalarType type = positions.scalar_type(), result = call.dtype.value_or(at::kFloat);
  const bool is_float = type == at::kFloat || type == at::kDouble;
  const char* advice = type == at::kHalf       ? ", because float16 has no odd number above 2048"
                       : type == at::kBFloat16 ? ", because bfloat16 has no odd number above 256"
                                               : "";
  const Named p{"positions", &positions}, f{"inv_freq", &inv_freq};
  check_type(call, is_float || (at::isIntegralType(type, /*includeBool=*/false) && type <= at::kLong), p,
             "int8, uint8, int16, int32, int64, float32 or float64", advice,
             *advice ? "; make positions in float32, or pass positions.float() if they may be rounded" : "");
  check_inv_freq(
      call, inv_freq, axes ? 2 : 1,
      axes ? "[axes, rotary_dim / 2] or [2, axes, rotary_dim / 2]" : "[rotary_dim / 2] or [2, rotary_dim / 2]");
  ROPE_CHECK_TYPE(is_rotatable(result), "dtype is ", NameOf{result},
                  " but must be float16, bfloat16, float32 or float64");
  ROPE_CHECK_VALUE(std::isfinite(call.attention_factor), "attention_factor is ", call.attention_factor,
                   " but must be finite");
  if (axes) {
    check_shape(call, positions.dim() > 0, p, "[axes, ...]");
    const c10::SymInt &own = size(positions, 0), &needed = size(inv_freq, -2);
    ROPE_CHECK_VALUE(equal(own, needed), "positions has ", own, " axes but must have ", needed, ", as inv_freq has");
  }
  check_same_device(call, p, f);
  return result;
}

// A position selects a row of a table by position. Without slots, it also selects a cell of the sequence's block. The
// message spells a position out as position + offset, because the caller passes the two separately.
void check_position_range(const Call& call, const Args& a, int64_t low, int64_t high) {
  int64_t first = 0, last = 0;
  const bool overflow = __builtin_add_overflow(low, a.offset, &first) || __builtin_add_overflow(high, a.offset, &last);
  const auto within = [&](int64_t highest) { return !overflow && first >= 0 && last <= highest; };
  const PositionRange range = position_range(a);
  const bool of_table = a.source == kTableByPosition && !within(a.table_rows - 1);
  TORCH_CHECK_INDEX(!range.limited || within(range.last), call.op, ": positions go from ", low, " to ", high,
                    " with offset ", a.offset, " but position + offset must be at least 0 and below ",
                    of_table ? a.table_rows : a.block_size, ", ",
                    of_table ? "the number of rows of cos" : "the block_size (or max_seq) of k_cache");
}

}  // namespace rope
