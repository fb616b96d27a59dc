// The operators where no kernel of ours computes: on fake tensors, which have no values, and on devices without
// kernels, where the definition computes.
#include <atomic>

#include "backend.h"
#include "definition.h"

namespace rope {
namespace {

struct Meta : AnyBackend {
  static constexpr bool is_fake = true;
};

struct Definition : AnyBackend {
  // Refuses a tensor that is nested, sparse or quantized.
  static void begin(const Operator& op, const Stack& stack) {
    const auto& arguments = op.schema.arguments();
    const auto values = torch::jit::last(stack, arguments.size());
    for (size_t i = 0; i < values.size(); i++) {
      const std::string& name = arguments[i].name();
      if (!values[i].isTensor() || !values[i].toTensor().defined()) continue;
      const Tensor& t = values[i].toTensor();
      TORCH_CHECK_NOT_IMPLEMENTED(
          !t.is_nested(), op.name, ": ", name,
          " is a nested tensor but must be a plain tensor; pass the values of a nested tensor with "
          "layout=torch.jagged, and positions that torch_rope.positions_from_cu_seqlens makes of its offsets");
      TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided && !t.is_quantized(), op.name, ": ", name, " is a ",
                                  t.toString(), " but must be dense and not quantized");
    }
  }

  static void rotate(const Call& call, Args&) {
    warn(call.op, call.q().device());
    write(call, define(call));
  }
  static void norm_backward(const Call& call, Args& a) { rotate(call, a); }
  static void cos_sin(const Call& call) {
    warn(call.op, call.positions->device());
    define_cos_sin(call);
  }

 private:
  // Warns once for each type of device.
  static void warn(const char* op, const at::Device& device) {
    static std::atomic<bool> warned[int(at::COMPILE_TIME_MAX_DEVICE_TYPES)]{};
    if (warned[int(device.type())].exchange(true)) return;
    TORCH_WARN(op, ": this build of torch_rope has no kernels for ", device.type(),
               ", so torch's operators compute the same, slower",
               device.is_cuda()  ? "; to build the kernels, install nvcc, set TORCH_ROPE_CUDA=1, and run in the source "
                                   "folder of torch_rope: pip install -v --no-build-isolation --no-deps "
                                   "--force-reinstall ."
               : device.is_mps() ? "; a build on macOS 14 or later has them"
                                 : "");
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, Meta, m) { register_backend<Meta>(m); }
// PyTorch takes this registration for a device only if no back end has its own.
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, CompositeExplicitAutograd, m) { register_backend<Definition>(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, NestedTensorCPU, m) { register_backend<Definition>(m); }
TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, NestedTensorCUDA, m) { register_backend<Definition>(m); }

}  // namespace rope
