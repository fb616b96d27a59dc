// The schemas of the operators, the Meta kernels, which check the arguments and return results without values, and the
// kernel that refuses tensors which no back end takes.
#include "ops.h"

namespace rope {
namespace {

struct Meta : AnyBackend {
  static constexpr bool is_fake = true;
};

// Ends the message for a tensor on a device that this build has no kernels for.
const char* remedy(const at::Device& device) {
  if (device.is_cuda()) {
    return "; to build them, install nvcc, set TORCH_ROPE_CUDA=1, and run in the source folder of torch_rope: "
           "pip install -v --no-build-isolation --no-deps --force-reinstall .";
  }
  return device.is_mps() ? "; a build on macOS 14 or later has them" : "";
}

// The kernel of every operator for tensors that no back end takes, and for None. It raises the error.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = python_name(op);
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < values.size(); i++) {
    const bool is_needed = arguments[i].type()->kind() == c10::TypeKind::TensorType;
    const bool is_given = values[i].isTensor() && values[i].toTensor().defined();
    TORCH_CHECK_VALUE(is_given || !is_needed, name, ": ", arguments[i].name(), " is None but must be a tensor");
    if (!is_given) continue;
    const Tensor& t = values[i].toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !t.is_nested(), name, ": ", arguments[i].name(),
        " is a nested tensor but must be a plain tensor; pass the values of a nested tensor with layout=torch.jagged, "
        "and positions that torch_rope.positions_from_cu_seqlens makes of its offsets");
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided && !t.is_quantized(), name, ": ", arguments[i].name(),
                                " is a ", t.toString(), " but must be dense and not quantized");
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasKernelForDispatchKey(c10::highestPriorityBackendTypeId(t.key_set())), name, ": ",
                                arguments[i].name(), " is on ", t.device(),
                                " but must be on cpu, or on a device for which this build of torch_rope has kernels",
                                remedy(t.device()));
  }
}

}  // namespace

std::vector<std::string> schemas() {
  const std::string source =
      "Tensor? cos=None, Tensor? sin=None, Tensor? inv_freq=None, Tensor? positions=None, SymInt offset=0, ";
  const std::string start = ", int rotary_start=0", eager = ", bool eager_rounding=False";
  const std::string angles =
      source + "*, float attention_factor=1.0, bool interleaved=False, bool inverse=False" + start + eager;
  const std::string norm = "float norm_eps=1e-6, float attention_factor=1.0, bool interleaved=False";
  const std::string norm_flags = "*, " + norm + start;
  const std::string cos_sin =
      "Tensor positions, Tensor inv_freq, *, float attention_factor=1.0, ScalarType? dtype=None) -> "
      "(Tensor cos, Tensor sin)";
  return {
      "cos_sin(" + cos_sin,
      "axial_cos_sin(" + cos_sin,
      "rotate(Tensor x, " + angles + ") -> Tensor",
      "rotate_(Tensor(a!) x, " + angles + ") -> ()",
      "rotate_qk(Tensor q, Tensor k, " + angles + ") -> (Tensor, Tensor)",
      "rotate_qk_(Tensor(a!) q, Tensor(b!) k, " + angles + ") -> ()",
      "_rotate_table_backward(Tensor q_out_grad, Tensor? k_out_grad, Tensor q, Tensor? k, " + angles +
          ") -> (Tensor, Tensor)",
      "norm_rotate_qk(Tensor q, Tensor k, Tensor q_norm_weight, Tensor k_norm_weight, " + source + norm_flags +
          ") -> (Tensor, Tensor)",
      "_norm_rotate_qk_backward(Tensor q_out_grad, Tensor k_out_grad, Tensor q, Tensor k, Tensor q_norm_weight, "
      "Tensor k_norm_weight, " +
          source + norm_flags + ") -> (Tensor, Tensor, Tensor, Tensor)",
      "rotate_into_cache_(Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, " + source +
          "Tensor? slots=None, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, *, Tensor? k_scale=None, "
          "Tensor? v_scale=None, Tensor(d!)? q_out=None, Tensor? q_scale=None, " +
          norm + ", bool norm_v=False" + start + eager + ") -> ()",
  };
}

// TORCH_LIBRARY does not expand a macro in its first argument.
#define ROPE_LIBRARY(name, m) TORCH_LIBRARY(name, m)
ROPE_LIBRARY(ROPE_NAMESPACE, m) {
  for (const std::string& schema : schemas()) m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Meta, m) { register_ops<Meta>(m); }

void register_refusal(torch::Library& m) {
  for (const std::string& schema : schemas()) {
    m.impl(schema.substr(0, schema.find('(')).c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, CompositeExplicitAutograd, m) { register_refusal(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, NestedTensorCPU, m) { register_refusal(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, NestedTensorCUDA, m) { register_refusal(m); }

}  // namespace rope
