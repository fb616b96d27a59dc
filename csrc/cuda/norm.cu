// The kernels that apply the RMS norm and then rotate. They can write k and v to a cache.
#include "general.cuh"
#include "usual.cuh"

namespace rope::cuda {

cudaError_t norm_rotate(const RotateArgs& a, const RotatePlan& plan, Queue queue) {
  if (plan.usual) {
    return with_usual(a, plan, [&](auto shape, auto frequencies, auto bytes) {
      return start_usual<Usual<decltype(shape), frequencies(), WithCache<true, bytes()>>>(plan, queue);
    });
  }
  return with_shape(a, plan.tiling, [&](auto shape) {
    return start(plan, queue, general_kernel<Policy<decltype(shape), GeneralNorm>>, a);
  });
}

}  // namespace rope::cuda
