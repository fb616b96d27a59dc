// The kernels that rotate without a norm.
#include "general.cuh"
#include "usual.cuh"

namespace rope::cuda {
cudaError_t architecture(int& found) {
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, usual_kernel<Usual<Shape<float, 4, false>, false, Plainly>>);
  found = attributes.ptxVersion;
  return error;
}

cudaError_t rotate(const RotateArgs& a, const RotatePlan& plan, Queue queue) {
  if (plan.usual) {
    return with_usual(a, plan, [&](auto shape, auto frequencies, auto bytes) {
      using S = decltype(shape);
      if (a.params.has_cache) return start_usual<Usual<S, frequencies(), WithCache<false, bytes()>>>(plan, queue);
      if constexpr (!frequencies()) {
        if (a.params.rounding != kOnce) return start_usual<Usual<S, false, WithEagerRounding>>(plan, queue);
      }
      return start_usual<Usual<S, frequencies(), Plainly>>(plan, queue);
    });
  }
  return with_shape</*halves=*/true>(a, plan.tiling, [&](auto shape) {
    return start(plan, queue, general_kernel<Policy<decltype(shape), General>>, a);
  });
}

}  // namespace rope::cuda
