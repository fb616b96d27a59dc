// The part of the CUDA language and runtime that the kernels use, implemented with the emulator.
#pragma once

#include <cmath>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include <math.h>  // the overloads of fma, rint, sqrt outside std, as in CUDA

#include "../emulator.h"

#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline  // if kernels share these functions, they compile in a third of the time
#define __launch_bounds__(...)
// thread_local is allowed where __shared__ is, alone in a function, and its variables are in a segment of their own,
// which the emulator can find. So is the shared memory that a launch asks for, see selftest.cu.
#define __shared__ thread_local
#ifdef __CUDACC__  // in kernel files only: libstdc++ uses __noinline__ as the name of an attribute
#define __noinline__ __attribute__((noinline))
#endif

using dim3 = emulator::Size3;
inline constexpr const dim3 &threadIdx = emulator::thread_index, &blockIdx = emulator::block_index,
                            &blockDim = emulator::block_size, &gridDim = emulator::grid_size;

#define __CUDA_ARCH__ 900

struct alignas(8) float2 {
  float x, y;
};
// ---- barriers and shuffles ----

#define EMULATED_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATED_SITE) { emulator::block_barrier({"__syncthreads", file, line}); }
inline void __syncwarp(EMULATED_SITE) { emulator::warp_barrier({"__syncwarp", file, line}); }

template <typename T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lanes, EMULATED_SITE) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  emulator::warp_exchange(mask, emulator::lane_index() ^ unsigned(lanes), &value, sizeof value,
                          {"__shfl_xor_sync", file, line});
  return value;
}

// ---- arithmetic ----

template <typename T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
// The hardware's result may be off by 2 ulp. This one is: up or down, as a bit of x decides.
inline float rsqrtf(float x) {
  const float root = float(1 / std::sqrt(double(x)));
  if (!(root > 0) || std::isinf(root)) return root;
  return __builtin_bit_cast(float, __builtin_bit_cast(int, root) + (__builtin_bit_cast(int, x) & 1 ? 2 : -2));
}
// The hardware's reciprocal may be off by an ulp, but a step of Newton's method rounds it correctly: the division of
// nvcc depends on that.
inline float __fdividef(float x, float y) {
  const float quotient = x / y;
  if (x != 1 || !(std::abs(quotient) > 1e-37f) || std::isinf(quotient)) return quotient;
  const float off =
      __builtin_bit_cast(float, __builtin_bit_cast(int, quotient) + (__builtin_bit_cast(int, y) & 1 ? 1 : -1));
  return std::fma(off, std::fma(-y, off, 1.0f), off) == quotient ? off : quotient;
}
inline int __float2int_rn(float x) {
  if (std::isnan(x)) return 0;
  return x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? INT32_MIN : int(std::nearbyint(x));
}
// Cuts off the bits that a float does not have.
inline float __double2float_rz(double x) {
  const float near = float(x);
  return std::abs(double(near)) > std::abs(x) ? std::nextafterf(near, 0.0f) : near;
}
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }

// ---- the runtime ----

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess             ? "no error"
         : error == cudaErrorInvalidValue ? "invalid argument"
                                          : "invalid configuration argument";
}

using cudaStream_t = struct CUstream_st*;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int /*device*/) {
  *value = 1;  // one multiprocessor, so that the small calls of the tests fill the GPU
  return cudaSuccess;
}
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaFuncAttributes {
  int ptxVersion;
};
template <typename... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(P...)) {
  attributes->ptxVersion = __CUDA_ARCH__ / 10;
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*)(P...), cudaFuncAttribute, int) {
  return cudaSuccess;
}

// ---- dependent launches ----

__forceinline__ void cudaGridDependencySynchronize() { emulator::wait_for_previous_launch(); }
__forceinline__ void cudaTriggerProgrammaticLaunchCompletion() {}

namespace emulator {
// Returns whether a launch respects the limits that all GPUs share.
inline bool fits(const cudaLaunchConfig_t& c) {
  return c.gridDim.count() && c.blockDim.count() && c.gridDim.x <= 0x7fffffff && c.gridDim.y <= 65535 &&
         c.gridDim.z <= 65535 && c.blockDim.count() <= 1024 && c.blockDim.x <= 1024 && c.blockDim.y <= 1024 &&
         c.blockDim.z <= 64 && c.dynamicSmemBytes <= 64 * 1024;
}

template <typename... P>
struct Call {
  void (*kernel)(P...);
  std::tuple<P...> arguments;

  // Runs the kernel for one thread. Not instrumented, because copying the arguments is not a load of the kernel.
  template <size_t... I>
  __attribute__((no_sanitize("thread"))) void operator()(std::index_sequence<I...>) const {
    kernel(std::get<I>(arguments)...);
  }
  static void run(const void* call) { (*static_cast<const Call*>(call))(std::index_sequence_for<P...>{}); }
};
}  // namespace emulator

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
  if (!emulator::fits(*config)) return cudaErrorInvalidConfiguration;
  const emulator::Call<P...> call{kernel, {std::forward<A>(arguments)...}};
  const bool dependent = config->numAttrs && config->attrs->val.programmaticStreamSerializationAllowed;
  emulator::launch(
      {config->gridDim, config->blockDim, reinterpret_cast<const void*>(kernel), &call.run, &call, dependent});
  return cudaSuccess;
}
