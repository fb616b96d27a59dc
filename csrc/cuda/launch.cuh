// How a kernel is chosen and launched.
#pragma once

#include "heads.cuh"

namespace rope::cuda {

// Calls f with a value of the type that dtype names.
template <typename F>
cudaError_t with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kHalf:
      return f(__half());
    case DType::kBFloat16:
      return f(__nv_bfloat16());
    case DType::kFloat:
      return f(float());
    case DType::kDouble:
      return f(double());
  }
  return cudaErrorInvalidValue;
}

// Calls f with the Shape of a call's kernel. A vector has 16 bytes or, if `halves`, 8 bytes, or one channel.
template <bool halves = false, typename F>
cudaError_t with_shape(const RotateArgs& a, const Tiling& tiling, F&& f) {
  return with_type(a.x_dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int full = 16 / sizeof(T);
    const auto with_pairing = [&](auto v) {
      return a.params.interleaved ? f(Shape<T, v(), true>()) : f(Shape<T, v(), false>());
    };
    if (tiling.vector == full) return with_pairing(std::integral_constant<int, full>());
    if constexpr (halves && full > 2) {
      if (tiling.vector == full / 2) return with_pairing(std::integral_constant<int, full / 2>());
    }
    return f(Shape<T, 1, false>());
  });
}

template <typename... Parameters>
cudaError_t start(Dim3 grid, Dim3 block, Queue queue, void (*kernel)(Parameters...),
                  const std::type_identity_t<Parameters>&... args) {
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.x, grid.y, grid.z);
  config.blockDim = dim3(block.x, block.y, block.z);
  config.dynamicSmemBytes = queue.dynamic_shared;
  config.stream = queue.stream;
  config.attrs = &dependent;
  config.numAttrs = queue.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Launches a kernel once for every 65535 sequences, because gridDim.z has that limit.
inline cudaError_t start(const Plan& plan, Queue queue, void (*kernel)(RotateArgs, Tiling), const RotateArgs& args) {
  Tiling tiling = plan.tiling;
  for (rope_int left = args.params.batch; left > 0; left -= kMaxGrid, tiling.first_sequence += kMaxGrid) {
    const Dim3 grid{plan.grid.x, plan.grid.y, unsigned(std::min(left, kMaxGrid))};
    if (const cudaError_t error = start(grid, plan.block, queue, kernel, args, tiling)) return error;
  }
  return cudaSuccess;
}

}  // namespace rope::cuda
