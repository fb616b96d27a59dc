// Schemas, and the Meta kernels: results without values.
#include "ops.h"

namespace rope {
namespace {

struct Meta {
  static void rotate(const RotateCall&) {}
  static void norm_backward(const NormBackwardCall&) {}
  static void table_backward(const TableBackwardCall&) {}
  static void cos_sin(const CosSinCall&) {}
};

const std::string kSource =
    "Tensor? cos=None, Tensor? sin=None, Tensor? inv_freq=None, Tensor? positions=None, SymInt offset=0, ";
const std::string kAngles = kSource + "*, float attention_factor=1.0, bool interleaved=False, bool inverse=False";
const std::string kNormFlags = "*, float norm_eps=1e-6, float attention_factor=1.0, bool interleaved=False";

}  // namespace

TORCH_LIBRARY(rope, m) {
  const auto def = [&](const std::string& schema) { m.def(schema.c_str(), {at::Tag::pt2_compliant_tag}); };
  def("cos_sin(Tensor positions, Tensor inv_freq, *, float attention_factor=1.0, ScalarType? dtype=None) -> (Tensor "
      "cos, Tensor sin)");
  def("_axial_cos_sin(Tensor positions, Tensor inv_freq, *, float attention_factor=1.0, ScalarType? dtype=None) -> "
      "(Tensor cos, Tensor sin)");
  def("rotate(Tensor x, " + kAngles + ") -> Tensor");
  def("rotate_(Tensor(a!) x, " + kAngles + ") -> ()");
  def("rotate_qk(Tensor q, Tensor k, " + kAngles + ") -> (Tensor, Tensor)");
  def("rotate_qk_(Tensor(a!) q, Tensor(b!) k, " + kAngles + ") -> ()");
  def("_rotate_table_backward(Tensor q_out_grad, Tensor? k_out_grad, Tensor q, Tensor? k, " + kAngles +
      ") -> (Tensor, Tensor)");
  def("norm_rotate_qk(Tensor q, Tensor k, Tensor q_norm_weight, Tensor k_norm_weight, " + kSource + kNormFlags +
      ") -> (Tensor, Tensor)");
  def("_norm_rotate_qk_backward(Tensor q_out_grad, Tensor k_out_grad, Tensor q, Tensor k, Tensor q_norm_weight, "
      "Tensor k_norm_weight, " +
      kSource + kNormFlags + ") -> (Tensor, Tensor, Tensor, Tensor)");
  def("rotate_into_cache_(Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, " + kSource +
      "Tensor? slots=None, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, " + kNormFlags + ") -> ()");
}

TORCH_LIBRARY_IMPL(rope, Meta, m) { register_ops<Meta>(m); }

}  // namespace rope
