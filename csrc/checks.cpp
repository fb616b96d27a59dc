// What the contract says of arguments: ValueError, TypeError and IndexError.
#include "call.h"
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
  constexpr std::pair<at::ScalarType, const char*> names[] = {{at::kHalf, "float16"},
                                                              {at::kBFloat16, "bfloat16"},
                                                              {at::kFloat, "float32"},
                                                              {at::kDouble, "float64"},
                                                              {at::kInt, "int32"},
                                                              {at::kLong, "int64"},
                                                              {at::kShort, "int16"},
                                                              {at::kChar, "int8"},
                                                              {at::kByte, "uint8"},
                                                              {at::kBool, "bool"},
                                                              {at::kComplexFloat, "complex64"},
                                                              {at::kComplexDouble, "complex128"}};
  for (const auto& [known, name] : names) {
    if (known == type) return name;
  }
  return c10::toString(type);
}

bool is_rotatable(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

// ---- one or two tensors, by name ----

struct Named {
  const char* name;
  const Tensor* tensor;
  const Tensor& operator*() const { return *tensor; }
  const Tensor* operator->() const { return tensor; }
};

template <typename Call>
void check_dims(const Call& call, const Named& t, int64_t least, int64_t most, const char* needs) {
  ROPE_CHECK_VALUE(least <= t->dim() && t->dim() <= most, t.name, " has ", t->dim(), " dimensions ", t->sym_sizes(),
                   ", needs ", needs);
}

void check_same_type(const RotateCall& call, const Named& a, const Named& b) {
  ROPE_CHECK_TYPE(a->scalar_type() == b->scalar_type(), a.name, " is ", name_of(a->scalar_type()), ", ", b.name, " is ",
                  name_of(b->scalar_type()), "; they need one dtype");
}

// An axis, and how a message counts along it.
struct Axis {
  int64_t d;
  const char *before, *after;
};
constexpr Axis kBatch{-4, "batch ", ""}, kSeq{-3, "seq ", ""}, kHeads{-2, "", " heads"}, kHeadDim{-1, "head_dim ", ""};

template <typename Call>
void check_same(const Call& call, const Axis& axis, const Named& a, const Named& b,
                const char* why = "they need the same") {
  ROPE_CHECK_VALUE(equal(size(*a, axis.d), size(*b, axis.d)), a.name, " has ", axis.before, size(*a, axis.d),
                   axis.after, ", ", b.name, " has ", size(*b, axis.d), "; ", why);
}

// has: "has ", or empty. The last `except` dimensions are not looked at.
void check_same_shape(const RotateCall& call, const Named& a, const Named& b, const char* has, int64_t except = 0) {
  bool same = a->dim() == b->dim();
  for (int64_t d = 0; same && d < a->dim() - except; d++) same = equal(size(*a, d), size(*b, d));
  ROPE_CHECK_VALUE(same, a.name, " has shape ", a->sym_sizes(), ", ", b.name, " ", has, b->sym_sizes(),
                   "; they need the same");
}

template <typename Call>
void check_type_of_inv_freq(const Call& call, const Tensor& inv_freq) {
  const at::ScalarType type = inv_freq.scalar_type();
  ROPE_CHECK_TYPE(type == at::kFloat || type == at::kDouble, "inv_freq is ", name_of(type),
                  ", needs float32 or float64");
}

// ---- the arguments of a rotation ----

void check_x(const RotateCall& call, const Named& x) {
  check_dims(call, x, 3, 4,
             "[seq, heads, head_dim] or [batch, seq, heads, head_dim] (without a head axis: unsqueeze(-2))");
  ROPE_CHECK_TYPE(is_rotatable(x->scalar_type()), x.name, " is ", name_of(x->scalar_type()),
                  ", needs float16, bfloat16, float32 or float64");
}

// k or v
void check_beside_q(const RotateCall& call, const Named& k) {
  const Named q{"q", call.q};
  check_x(call, k);
  check_same_type(call, k, q);
  ROPE_CHECK_VALUE(k->dim() == q->dim(), k.name, " has ", k->dim(), " dimensions, q has ", q->dim(),
                   "; they need the same");
  const char* why = "only their heads may differ";
  if (q->dim() == 4) check_same(call, kBatch, k, q, why);
  check_same(call, kSeq, k, q, why);
  check_same(call, kHeadDim, k, q, why);
}

// The last dimension of cos, sin or inv_freq is rotary_dim / 2.
void check_rotary_dim(const RotateCall& call, const char* name, const Tensor& source, const char* unit) {
  const c10::SymInt &half = size(source, -1), &head_dim = size(*call.q, -1);
  ROPE_CHECK_VALUE((half * 2).sym_le(head_dim), name, " has ", half, " ", unit, ", ", call.q_name(), " has head_dim ",
                   head_dim, ": rotary_dim ", half * 2, " is larger than head_dim");
}

// The batch of a table or of positions.
void check_batch(const RotateCall& call, const Named& t, const char* why) {
  const c10::SymInt &own = size(*t, 0), &batch = batch_of(*call.q);
  ROPE_CHECK_VALUE(own.sym_eq(1).sym_or(own.sym_eq(batch)), t.name, " has batch ", own, ", ", call.q_name(),
                   " has batch ", batch, "; ", why);
}

void check_tables(const RotateCall& call) {
  const Named cos{"cos", &*call.cos}, sin{"sin", &*call.sin};
  const at::ScalarType x_type = call.q->scalar_type(), type = cos->scalar_type();
  check_same_type(call, sin, cos);
  ROPE_CHECK_TYPE(type == at::kFloat || type == x_type, "cos and sin are ", name_of(type), ", need float32 or ",
                  call.q_name(), "'s dtype, ", name_of(x_type));
  check_dims(call, cos, 2, 3, "[max_position, rotary_dim / 2] or [batch or 1, seq, rotary_dim / 2]");
  check_same_shape(call, sin, cos, "has ");
  check_rotary_dim(call, "cos", *cos, "columns");
  if (cos->dim() == 2) return;
  const c10::SymInt& seq = size(*call.q, -3);
  ROPE_CHECK_VALUE(!call.positions, "positions with cos of shape ", cos->sym_sizes(),
                   ": a 3-D table has a row per token, so positions needs to be None (or cos 2-D, a row per position)");
  ROPE_CHECK_VALUE(equal(call.offset, 0), "offset is ", call.offset, " with cos of shape ", cos->sym_sizes(),
                   ": a 3-D table has a row per token, so offset needs to be 0 (or cos 2-D, a row per position)");
  ROPE_CHECK_VALUE(equal(size(*cos, 1), seq), "cos has ", size(*cos, 1), " rows per sequence, ", call.q_name(),
                   " has seq ", seq, "; a 3-D table needs a row per token");
  check_batch(call, cos, "a 3-D table needs that or 1");
}

// positions or slots
void check_tokens(const RotateCall& call, const Named& t, const char* shapes) {
  ROPE_CHECK_TYPE(t->scalar_type() == at::kInt || t->scalar_type() == at::kLong, t.name, " is ",
                  name_of(t->scalar_type()), ", needs int32 or int64");
  check_dims(call, t, 1, 2, shapes);
  const c10::SymInt& seq = size(*call.q, -3);
  ROPE_CHECK_VALUE(equal(size(*t, -1), seq), t.name, " has ", size(*t, -1), " tokens ", t->sym_sizes(), ", ",
                   call.q_name(), " has seq ", seq, "; ", t.name, " needs ", shapes);
}

void check_norm(const RotateCall& call) {
  ROPE_CHECK_VALUE((call.q_norm_weight == nullptr) == (call.k_norm_weight == nullptr),
                   call.q_norm_weight ? "q_norm_weight without k_norm_weight" : "k_norm_weight without q_norm_weight",
                   "; needs both, or neither for no norm");
  if (!call.q_norm_weight) return;
  const c10::SymInt& head_dim = size(*call.q, -1);
  const at::ScalarType x_type = call.q->scalar_type();
  for (const Named& weight : {Named{"q_norm_weight", call.q_norm_weight}, Named{"k_norm_weight", call.k_norm_weight}}) {
    const at::ScalarType type = weight->scalar_type();
    ROPE_CHECK_TYPE(type == at::kFloat || type == x_type, weight.name, " is ", name_of(type),
                    ", needs float32 or q's dtype, ", name_of(x_type));
    check_dims(call, weight, 1, 1, "[head_dim], one weight for each channel of a head");
    ROPE_CHECK_VALUE(equal(size(*weight, 0), head_dim), weight.name, " has ", size(*weight, 0),
                     " weights, q has head_dim ", head_dim, "; they need the same");
  }
}

// q and k have been checked.
void check_cache(const RotateCall& call) {
  const Named k{"k", call.k}, v{"v", call.v}, k_cache{"k_cache", call.k_out}, v_cache{"v_cache", call.v_out};
  const c10::SymInt& batch = batch_of(*call.q);
  check_beside_q(call, v);
  check_same(call, kHeads, v, k);
  for (const Named& cache : {k_cache, v_cache}) {
    check_same_type(call, cache, k);
    check_dims(call, cache, 3, 4, "[blocks, block_size, kv_heads, head_dim] or [max_seq, kv_heads, head_dim]");
    check_same(call, kHeads, cache, k, "they need the same (a head-major cache is passed transposed)");
    check_same(call, kHeadDim, cache, k);
  }
  check_same_shape(call, v_cache, k_cache, "has ", /*except=*/2);
  if (!call.slots) {
    ROPE_CHECK_VALUE(!(call.cos && call.cos->dim() == 3), "cos of shape ", call.cos->sym_sizes(),
                     " says no positions, and there are no slots; a 3-D table needs slots");
    const c10::SymInt& blocks = batch_of(*k_cache);
    ROPE_CHECK_VALUE(batch.sym_le(blocks), "q has batch ", batch, ", k_cache has ", blocks,
                     " blocks; without slots row b writes block b, so it needs at least as many blocks");
    return;
  }
  const Tensor& slots = *call.slots;
  check_tokens(call, {"slots", &slots}, "[seq] or [batch, seq]");
  const c10::SymInt& rows = slots.dim() == 2 ? size(slots, 0) : kOne;
  ROPE_CHECK_VALUE(equal(rows, batch), "slots has shape ", slots.sym_sizes(), ", q has batch ", batch,
                   "; each token needs its own slot, [batch, seq] (or [seq] with batch 1)");
}

// What is read beside q, k and v: f(Named).
template <typename F>
void for_each_parameter(const RotateCall& call, F&& f) {
  const auto address = [](const OptTensor& t) { return t ? &*t : nullptr; };
  for (const Named& t :
       {Named{"cos", address(call.cos)}, Named{"sin", address(call.sin)}, Named{"inv_freq", address(call.inv_freq)},
        Named{"positions", address(call.positions)}, Named{"slots", call.slots},
        Named{"q_norm_weight", call.q_norm_weight}, Named{"k_norm_weight", call.k_norm_weight}}) {
    if (t.tensor) f(t);
  }
}

// All beside q.
template <typename F>
void for_each_other(const RotateCall& call, F&& f) {
  if (call.k) f(Named{"k", call.k});
  if (call.v) {
    f(Named{"v", call.v});
    f(Named{"k_cache", call.k_out});
    f(Named{"v_cache", call.v_out});
  }
  for_each_parameter(call, f);
}

// The schema lets None through where it says Tensor.
void check_given(const RotateCall& call) {
  for_each_other(call, [&](const Named& t) { ROPE_CHECK_VALUE(t->defined(), t.name, " is None, needs a tensor"); });
}

void check_devices(const RotateCall& call) {
  const c10::Device device = call.q->device();
  for_each_other(call, [&](const Named& t) {
    ROPE_CHECK_VALUE(t->device() == device, t.name, " is on ", t->device(), ", ", call.q_name(), " is on ", device,
                     "; all tensors need one device");
  });
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
  check_x(call, {call.q_name(), call.q});
  if (call.k) check_beside_q(call, {"k", call.k});
  ROPE_CHECK_VALUE(call.cos.has_value() == call.sin.has_value(), call.cos ? "cos without sin" : "sin without cos",
                   "; an angle source is cos and sin together, or inv_freq");
  ROPE_CHECK_VALUE(call.cos.has_value() || call.inv_freq.has_value(),
                   "no angle source; needs cos and sin, or inv_freq");
  ROPE_CHECK_VALUE(!(call.cos.has_value() && call.inv_freq.has_value()),
                   "two angle sources, cos and sin, and inv_freq; needs exactly one");
  check_devices(call);
  if (call.cos) check_tables(call);
  if (call.inv_freq) {
    check_type_of_inv_freq(call, *call.inv_freq);
    check_dims(call, {"inv_freq", &*call.inv_freq}, 1, 1, "[rotary_dim / 2]");
    check_rotary_dim(call, "inv_freq", *call.inv_freq, "frequencies");
  }
  if (call.positions) {
    const Named positions{"positions", &*call.positions};
    check_tokens(call, positions, "[seq], [1, seq] or [batch, seq]");
    if (positions->dim() == 2) check_batch(call, positions, "positions needs [seq], [1, seq] or [batch, seq]");
  }
  check_norm(call);
  if (call.v) check_cache(call);
  if (in_place) check_overlap(call);
}

void check_gradients(const RotateCall& call, const Tensor& q, const Tensor* k) {
  const auto check = [&](const Named& x, const Named& gradient) {
    check_same_type(call, x, gradient);
    check_same_shape(call, x, gradient, "");
    ROPE_CHECK_VALUE(x->device() == gradient->device(), x.name, " is on ", x->device(), ", its gradient is on ",
                     gradient->device(), "; all tensors need one device");
  };
  check({"q", &q}, {"its gradient", call.q});
  ROPE_CHECK_VALUE((k == nullptr) == (call.k == nullptr), "k and its gradient come together, or not at all");
  if (k) check({"k", k}, {"its gradient", call.k});
}

at::ScalarType check_cos_sin(const char* op, const Tensor& positions, const Tensor& inv_freq,
                             std::optional<at::ScalarType> dtype, bool axes) {
  const struct {
    const char* op;
  } call{op};
  const at::ScalarType type = positions.scalar_type(), result = dtype.value_or(at::kFloat);
  ROPE_CHECK_TYPE(is_rotatable(type) || (at::isIntegralType(type, /*includeBool=*/false) && type <= at::kLong),
                  "positions is ", name_of(type), ", needs an integer or floating dtype");
  check_type_of_inv_freq(call, inv_freq);
  ROPE_CHECK_TYPE(is_rotatable(result), "dtype is ", name_of(result), ", needs float16, bfloat16, float32 or float64");
  const int64_t dims = axes ? 2 : 1;
  check_dims(call, {"inv_freq", &inv_freq}, dims, dims, axes ? "[axes, rotary_dim / 2]" : "[rotary_dim / 2]");
  if (axes) {
    ROPE_CHECK_VALUE(positions.dim() > 0, "positions has no dimensions, needs [axes, ...]");
    check_same(call, {0, "", " axes"}, {"positions", &positions}, {"inv_freq", &inv_freq});
  }
  ROPE_CHECK_VALUE(positions.device() == inv_freq.device(), "positions is on ", positions.device(), ", inv_freq is on ",
                   inv_freq.device(), "; they need one device");
  return result;
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
