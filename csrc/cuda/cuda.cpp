// The host side of the CUDA back end: for each operator, the checks that need no data of the GPU, the launch plan, and
// the launch on the current stream. The kernels are in the .cu files.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>

#include "../backend.h"
#include "entry_points.h"

#ifndef ROPE_CUDA_KEY
#define ROPE_CUDA_KEY CUDA  // CPU in the emulator of the tests, which runs the kernels on CPU tensors
#endif

namespace rope::cuda {
namespace {

// Returns a number that each device has. ask(), which must be a lambda, asks the driver for it once.
template <typename F>
int known(c10::DeviceIndex device, F&& ask) {
  static std::array<std::atomic<int>, 64> numbers{};
  std::atomic<int>& number = numbers[std::clamp<int>(device, 0, int(numbers.size()) - 1)];
  if (number == 0) {
    int n = 0;
    C10_CUDA_CHECK(ask(n));
    number = n;
  }
  return number;
}

// The device of a tensor, which is the current one as long as this lives.
struct Device {
  const c10::DeviceIndex index;
  const c10::cuda::CUDAGuard guard;

  explicit Device(const Tensor& t) : index(t.device().index()), guard(t.device()) {}

  // Returns the number of multiprocessors.
  int processors() const {
    return known(index, [&](int& n) {
      return cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, std::max<int>(index, 0));
    });
  }
  // Returns whether the code that runs on it can wait for the kernel before.
  bool waits() const {
    return known(index, [](int& n) { return architecture(n); }) >= 90;
  }
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(index).stream(); }
};

struct Cuda : AnyBackend {
  // The kernel asserts positions and slots: to read them here would wait for the GPU.
  static void check(const Call& call, const Args& a) {
    const rope_int head_dim = std::max(a.sides[kQ].head_dim, a.sides[kV].head_dim);
    TORCH_CHECK_NOT_IMPLEMENTED(head_dim <= INT_MAX, call.op, ": head_dim is ", head_dim, " but must be at most ",
                                INT_MAX, " on CUDA");
  }

  static void rotate(const Call& call, Args& a) {
    const Device device(call.q());
    simplify(a);
    const Plan plan = plan_rotate(a, device.processors());
    if (plan.grid.x == 0) return;
    C10_CUDA_CHECK((plan.general ? rotate_generally : rotate_usually)(a, plan, device.stream()));
  }

  static void norm_backward(const Call& call, Args& a) {
    const Device device(call.q());
    merge_batch(a);
    const Plan plan = plan_norm_backward(a);
    const Tensor sums = at::empty({plan.sums}, call.q().options().dtype(at::kDouble));
    void* const weight_grad[2] = {call.sides[kQ].weight_grad->mutable_data_ptr(),
                                  call.sides[kK].weight_grad->mutable_data_ptr()};
    C10_CUDA_CHECK(
        cuda::norm_backward(a, plan, sums.mutable_data_ptr<double>(), weight_grad, device.stream(), device.waits()));
  }

  static void cos_sin(const Call& call) {
    const Device device(*call.positions);
    const Tensor positions = call.positions->contiguous();
    Call with_contiguous = call;
    with_contiguous.positions = &positions;
    C10_CUDA_CHECK(cuda::cos_sin(with_contiguous.cos_sin_args(), device.stream()));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, ROPE_CUDA_KEY, m) { register_backend<Cuda>(m); }

}  // namespace rope::cuda
