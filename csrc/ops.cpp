// The schemas of the operators, and the Meta kernels, which check the arguments and return results without values.
#include "ops.h"

namespace rope {
namespace {

struct Meta {
  static void rotate(const RotateCall&) {}
  static void norm_backward(const NormBackwardCall&) {}
  static void table_backward(const TableBackwardCall&) {}
  static void cos_sin(const CosSinCall&) {}
};

}  // namespace

std::vector<std::string> schemas() {
  const std::string source =
      "Tensor? cos=None, Tensor? sin=None, Tensor? inv_freq=None, Tensor? positions=None, SymInt offset=0, ";
  const std::string angles = source + "*, float attention_factor=1.0, bool interleaved=False, bool inverse=False";
  const std::string norm_flags = "*, float norm_eps=1e-6, float attention_factor=1.0, bool interleaved=False";
  const std::string cos_sin =
      "Tensor positions, Tensor inv_freq, *, float attention_factor=1.0, ScalarType? dtype=None) -> "
      "(Tensor cos, Tensor sin)";
  return {
      "cos_sin(" + cos_sin,
      "_axial_cos_sin(" + cos_sin,
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
          "Tensor? slots=None, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, " + norm_flags + ") -> ()",
  };
}

TORCH_LIBRARY(rope, m) {
  for (const std::string& schema : schemas()) m.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(rope, Meta, m) { register_ops<Meta>(m); }

}  // namespace rope
