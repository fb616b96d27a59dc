// The rotation without a norm.
#include "rotate.cuh"

namespace rope::cuda {

cudaError_t architecture(int& found) {
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, rotate_kernel<Policy<Shape<float, 4, false>, int32_t, Plain>>);
  found = attributes.ptxVersion;
  return error;
}

cudaError_t rotate(const RotateArgs& a, const Plan& plan, Queue queue) {
  return with_shape</*halves=*/true>(a, plan.tiling, [&](auto shape) {
    using S = decltype(shape);
    const auto with = [&](auto index, auto features) {
      return start(plan, queue, rotate_kernel<Policy<S, decltype(index), decltype(features)>>, a);
    };
    if constexpr (has_usual_kernels(sizeof(typename S::T), S::V)) {
      if (!plan.general) {
        if (a.params.has_cache) return plan.wide_index ? with(int64_t(), Cache()) : with(int32_t(), Cache());
        return plan.wide_index ? with(int64_t(), Plain()) : with(int32_t(), Plain());
      }
    }
    if constexpr (sizeof(typename S::T) == 2 && S::V == 8) {
      if (!plan.wide_index) return with(int32_t(), General());
    }
    return with(int64_t(), General());
  });
}

}  // namespace rope::cuda
