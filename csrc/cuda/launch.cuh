// How a kernel is chosen and launched.
#pragma once

#include "angles.cuh"

namespace rope::cuda {

// Calls f with a value of the type that dtype names.
template <typename F>
cudaError_t with_type(DType dtype, F&& f) {
  if (dtype == DType::kHalf) return f(__half());
  if (dtype == DType::kBFloat16) return f(__nv_bfloat16());
  return dtype == DType::kFloat ? f(float()) : f(double());
}

// Calls f with the Shape of a call's kernel. A vector has 16 bytes or, if `halves`, 8 bytes, or one channel.
template <bool halves = false, typename F>
cudaError_t with_shape(const Args& a, const Tiling& tiling, F&& f) {
  return with_type(a.x_dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int full = 16 / sizeof(T);
    const auto with_pairing = [&](auto v) {
      return a.interleaved ? f(Shape<T, v(), true>()) : f(Shape<T, v(), false>());
    };
    if (tiling.vector == full) return with_pairing(std::integral_constant<int, full>());
    if constexpr (halves && full > 2) {
      if (tiling.vector == full / 2) return with_pairing(std::integral_constant<int, full / 2>());
    }
    return f(Shape<T, 1, false>());
  });
}

// How a kernel is launched.
struct Launch {
  cudaStream_t stream;
  Size3 grid, block;
  rope_int shared = 0;     // bytes of shared memory besides the kernel's own variables
  bool dependent = false;  // it may begin before the previous kernel of the stream has ended, and waits for that itself
};

template <typename... Parameters>
cudaError_t start(const Launch& launch, void (*kernel)(Parameters...),
                  const std::type_identity_t<Parameters>&... args) {
  if (launch.shared > 47 * 1024) {  // every kernel may have 48 KiB, with its own variables
    const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, limit, int(launch.shared))) return error;
  }
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  const auto dims = [](const Size3& s) { return dim3(unsigned(s.x), unsigned(s.y), unsigned(s.z)); };
  const cudaLaunchConfig_t config{dims(launch.grid), dims(launch.block), size_t(launch.shared),
                                  launch.stream,     &dependent,         launch.dependent};
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Starts a kernel once for every 65535 sequences, because gridDim.z has that limit. first: which of the arguments is
// the first sequence
template <typename First, typename... Parameters>
cudaError_t start_sequences(const Plan& plan, cudaStream_t stream, First& first, void (*kernel)(Parameters...),
                            const std::type_identity_t<Parameters>&... args) {
  Size3 grid = plan.grid;
  for (rope_int done = 0; done < plan.grid.z; done += kMaxGrid) {
    grid.z = std::min(plan.grid.z - done, kMaxGrid);
    first = First(done);
    if (const cudaError_t error = start({stream, grid, plan.block}, kernel, args...)) return error;
  }
  return cudaSuccess;
}

}  // namespace rope::cuda
