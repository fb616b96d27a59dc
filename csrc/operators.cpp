// The schemas of the operators and the arguments that they have.
#include "operators.h"

#include <algorithm>
#include <variant>

namespace rope {

// An argument of a schema, and the member of Call that it is.
struct Field {
  std::string_view name;
  std::variant<const Tensor * SideTensors::*, const Tensor * Call::*, c10::SymInt Call::*, double Call::*, bool Call::*,
               int64_t Call::*, std::optional<at::ScalarType> Call::*>
      member;
  int side = kQ;  // if it is a member of SideTensors
};

namespace {

constexpr Field kFields[] = {
    {"x", &SideTensors::in},
    {"q", &SideTensors::in},
    {"k", &SideTensors::in, kK},
    {"v", &SideTensors::in, kV},
    {"q_out", &SideTensors::out},
    {"k_cache", &SideTensors::out, kK},
    {"v_cache", &SideTensors::out, kV},
    {"q_norm_weight", &SideTensors::weight},
    {"k_norm_weight", &SideTensors::weight, kK},
    {"v_norm_weight", &SideTensors::weight, kV},
    {"q_factor", &SideTensors::factor},
    {"q_scale", &SideTensors::scale},
    {"k_scale", &SideTensors::scale, kK},
    {"v_scale", &SideTensors::scale, kV},
    {"q_out_grad", &SideTensors::gradient},
    {"k_out_grad", &SideTensors::gradient, kK},
    {"cos", &Call::cos},
    {"sin", &Call::sin},
    {"inv_freq", &Call::inv_freq},
    {"positions", &Call::positions},
    {"slots", &Call::slots},
    {"offset", &Call::offset},
    {"attention_factor", &Call::attention_factor},
    {"norm_eps", &Call::norm_eps},
    {"norm_weight_offset", &Call::norm_weight_offset},
    {"norm_v", &Call::norm_v},
    {"interleaved", &Call::interleaved},
    {"inverse", &Call::inverse},
    {"rotary_start", &Call::rotary_start},
    {"eager_rounding", &Call::eager_rounding},
    {"round_before_weight", &Call::round_before_weight},
    {"dtype", &Call::dtype},
};

bool is_given(const c10::IValue& v) { return v.isTensor() && v.toTensor().defined(); }

// These convert an argument from the dispatcher's form, and back. None is a null tensor.
void from_value(const c10::IValue& v, const Tensor*& to) { to = is_given(v) ? &v.toTensor() : nullptr; }
void from_value(const c10::IValue& v, c10::SymInt& to) { to = v.toSymInt(); }
void from_value(const c10::IValue& v, double& to) { to = v.toDouble(); }
void from_value(const c10::IValue& v, bool& to) { to = v.toBool(); }
void from_value(const c10::IValue& v, int64_t& to) { to = v.toInt(); }
void from_value(const c10::IValue& v, std::optional<at::ScalarType>& to) { to = v.toOptional<at::ScalarType>(); }
template <typename T>
c10::IValue to_value(const T& value) {
  return value;
}
c10::IValue to_value(const Tensor* t) { return t ? c10::IValue(*t) : c10::IValue(); }

// Calls f with the member of a call that the field stands for.
template <typename C, typename F>
void visit(const Field& field, C& call, F&& f) {
  std::visit(
      [&](auto member) {
        if constexpr (std::is_same_v<decltype(member), const Tensor * SideTensors::*>) {
          f(call.sides[field.side].*member);
        } else {
          f(call.*member);
        }
      },
      field.member);
}

std::vector<std::string> schemas() {
  const std::string source =
      "Tensor? cos=None, Tensor? sin=None, Tensor? inv_freq=None, Tensor? positions=None, SymInt offset=0, ";
  const std::string pairs = "float attention_factor=1.0, bool interleaved=False";
  const std::string start = ", int rotary_start=0", eager = start + ", bool eager_rounding=False";
  const std::string before = ", bool round_before_weight=False";
  const std::string offset = "float norm_weight_offset=0.0, ", q_factor = "Tensor? q_factor=None";
  const std::string angles = source + "*, " + pairs + ", bool inverse=False" + eager;
  const std::string norm = "Tensor q_norm_weight, Tensor k_norm_weight, " + source + "*, float norm_eps=1e-6, " +
                           offset + q_factor + ", " + pairs;
  const std::string cos_sin =
      "Tensor positions, Tensor inv_freq, *, float attention_factor=1.0, ScalarType? dtype=None) -> "
      "(Tensor cos, Tensor sin)";
  return {
      "cos_sin(" + cos_sin,
      "axial_cos_sin(" + cos_sin,
      "rotate(Tensor x, " + angles + ") -> Tensor",
      "rotate_(Tensor(a!) x, " + angles + ") -> ()",
      "rotate_qk(Tensor q, Tensor k, " + angles + ", " + q_factor + ") -> (Tensor, Tensor)",
      "rotate_qk_(Tensor(a!) q, Tensor(b!) k, " + angles + ", " + q_factor + ") -> ()",
      "norm_rotate_qk(Tensor q, Tensor k, " + norm + eager + before + ") -> (Tensor, Tensor)",
      "norm_rotate_qk_(Tensor(a!) q, Tensor(b!) k, " + norm + eager + before + ") -> ()",
      "_norm_rotate_qk_backward(Tensor q_out_grad, Tensor k_out_grad, Tensor q, Tensor k, " + norm + start +
          ") -> (Tensor, Tensor, Tensor, Tensor)",
      "rotate_into_cache_(Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, " + source +
          "Tensor? slots=None, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, *, Tensor? k_scale=None, "
          "Tensor? v_scale=None, Tensor(d!)? q_out=None, Tensor? q_scale=None, float norm_eps=1e-6, " +
          pairs + ", bool norm_v=False" + eager + ", Tensor? v_norm_weight=None, " + offset + q_factor + before +
          ") -> ()",
  };
}

}  // namespace

Operator::Operator(const std::string& text)
    : schema(torch::schema(text.c_str())), name("rope." + schema.name()), in_place(schema.is_mutable()) {
  for (const c10::Argument& argument : schema.arguments()) {
    fields_.push_back(std::find_if(std::begin(kFields), std::end(kFields),
                                   [&](const Field& field) { return field.name == argument.name(); }));
    TORCH_INTERNAL_ASSERT(fields_.back() != std::end(kFields), argument.name(), " is not in kFields");
    if (argument.name() == "q_out") q_out_ = written_.size();
    written_.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    needed_ += argument.type()->kind() == c10::TypeKind::TensorType;
  }
}

Call Operator::read_flags(const Stack& stack) const {
  Call call{name.c_str()};
  const c10::IValue* value = stack.data() + stack.size() - fields_.size();
  for (const Field* field : fields_) {
    visit(*field, call, [&](auto& member) { from_value(*value, member); });
    value++;
  }
  return call;
}

Call Operator::read(const Stack& stack) const {
  const c10::IValue* const values = stack.data() + stack.size() - fields_.size();
  for (size_t i = 0; i < needed_; i++) {
    TORCH_CHECK_VALUE(is_given(values[i]), name, ": ", fields_[i]->name, " is None but must be a tensor");
  }
  return read_flags(stack);
}

bool Operator::writes(const Stack& stack, size_t number) const {
  const auto values = torch::jit::last(stack, fields_.size());
  return written_[number] && !(number == 0 && q_out_ && is_given(values[*q_out_]));
}

Stack Operator::arguments(const Call& call) const {
  Stack stack;
  stack.reserve(fields_.size());
  for (const Field* field : fields_) {
    visit(*field, call, [&](const auto& member) { stack.push_back(to_value(member)); });
  }
  return stack;
}

void Operator::finish(Stack& stack, std::span<Tensor> results) const {
  torch::jit::drop(stack, fields_.size());
  for (Tensor& result : results) stack.emplace_back(std::move(result));
}

std::vector<Tensor> Operator::operator()(const Call& call) const {
  Stack stack = arguments(call);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow((C10_STRINGIZE(ROPE_NAMESPACE) "::" + schema.name()).c_str(), "")
      .callBoxed(stack);
  std::vector<Tensor> results;
  for (c10::IValue& value : stack) results.push_back(std::move(value).toTensor());
  return results;
}

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all = [] {
    std::vector<Operator> made;
    for (const std::string& schema : schemas()) made.emplace_back(schema);
    return made;
  }();
  return all;
}

const Operator& find(std::string_view name) {
  return *std::find_if(operators().begin(), operators().end(),
                       [&](const Operator& op) { return op.schema.name() == name; });
}

// TORCH_LIBRARY does not expand a macro in its first argument.
#define ROPE_LIBRARY(name, m) TORCH_LIBRARY(name, m)
ROPE_LIBRARY(ROPE_NAMESPACE, m) {
  for (const Operator& op : operators()) {
    m.def(c10::FunctionSchema(op.schema), {at::Tag::pt2_compliant_tag});
  }
}

}  // namespace rope
