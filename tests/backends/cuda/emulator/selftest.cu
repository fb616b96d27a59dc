// Kernels for test_emulator.py: correct ones, and one for each mistake that the emulator must report.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>
#include <map>
#include <string>

extern __shared__ unsigned char dynamic_shared[];

namespace {

using Kernel = void (*)(const float* in, float* out, int n);

__device__ unsigned me() { return blockIdx.x * blockDim.x + threadIdx.x; }
// Returns n in a way that the compiler cannot see through. Otherwise it would warn about the mistakes below.
__device__ __noinline__ int opaque(int n) {
  asm volatile("" : "+r"(n));
  return n;
}

// ---- correct kernels ----

template <typename T>
__global__ void copy(const float* in, float* out, int n) {
  if (int(me() * sizeof(T)) < n * 4) reinterpret_cast<T*>(out)[me()] = __ldg(reinterpret_cast<const T*>(in) + me());
}

// barrier: each round waits for the one before; without it there is a race.
template <bool barrier, bool dynamic>
__global__ void block_sum(const float* in, float* out, int) {
  __shared__ float fixed[256];
  float* const part = dynamic ? reinterpret_cast<float*>(dynamic_shared) : fixed;
  part[threadIdx.x] = in[me()];
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (barrier) __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

__global__ void warp_sum(const float* in, float* out, int) {
  float x = in[me()];
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  out[me()] = x;
}

// The warp is not full, and one of its lanes has left the kernel.
__global__ void part_of_a_warp(const float* in, float* out, int) {
  if (threadIdx.x == 8) return;
  const double from_below = __shfl_down_sync(0xff, double(in[threadIdx.x]), 2, 4);
  out[threadIdx.x] = float(from_below) + float(__shfl_sync(0xff, (long long)(threadIdx.x), 5, 4));
}

// The even and the odd lanes of a warp are at different shuffles.
__global__ void two_masks(const float* in, float* out, int) {
  const float x = in[me()];
  if (threadIdx.x & 1)
    out[me()] = __shfl_xor_sync(0xaaaaaaaa, x, 2);
  else
    out[me()] = __shfl_xor_sync(0x55555555, x, 4);
}

template <bool barrier>
__global__ void through_a_warp(const float* in, float* out, int) {
  __shared__ float part[64];
  part[threadIdx.x] = in[me()];
  if (barrier) __syncwarp();
  out[me()] = part[threadIdx.x ^ 1];
}

__global__ void angle(const float* in, float* out, int) {
  double s, c;
  sincos(double(in[me()]), &s, &c);
  out[me()] = float(fma(c, c, s * s)) + fmaf(rintf(0.4f), 2.0f, float(min(3, 4) + max(3u, 4u)) - 7.0f) +
              float(__float2ll_rn(-0.5f)) + sqrtf(0.0f) + rsqrtf(4.0f) - 0.5f + __uint_as_float(__float_as_uint(1.0f)) -
              1.0f;
}

__global__ void shared_at_first(const float*, float* out, int) {
  __shared__ float fixed[4];
  out[2 * me()] = fixed[threadIdx.x];
  out[2 * me() + 1] = reinterpret_cast<float*>(dynamic_shared)[threadIdx.x];
  __syncthreads();
  fixed[threadIdx.x] = reinterpret_cast<float*>(dynamic_shared)[threadIdx.x] = 1.0f;
}

// Writes all 65536 values of T as floats, and after them n numbers rounded to T and back.
template <typename T, float (*widen)(T), T (*round)(float)>
__global__ void through(const float* in, float* out, int n) {
  const unsigned i = me();
  if (i < 65536) out[i] = widen(T{static_cast<unsigned short>(i)});
  if (i < unsigned(n)) out[65536 + i] = widen(round(in[i]));
}

// ---- kernels with mistakes ----

__global__ void past_the_end(const float* in, float* out, int n) { out[0] = in[n]; }
__global__ void before_the_start(const float*, float* out, int) { out[opaque(-2)] = 1.0f; }
__global__ void null_pointer(const float*, float* out, int) {
  out[0] = *reinterpret_cast<const float*>(uintptr_t(opaque(8)));
}
__global__ void misaligned(const float* in, float* out, int) {
  *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(in + opaque(1));
}
__global__ void past_shared(const float*, float* out, int) {
  out[0] = reinterpret_cast<float*>(dynamic_shared)[opaque(64)];
}
__global__ void two_writes(const float*, float* out, int) { out[0] = 1.0f; }
__global__ void neighbour(const float*, float* out, int n) { out[me()] = out[(me() + 1) % n]; }
__global__ void halves_of_an_element(const float*, float* out, int) { reinterpret_cast<short*>(out)[me() + 1] = 1; }
__global__ void half_at_a_barrier(const float*, float* out, int) {
  if (threadIdx.x < blockDim.x / 2) __syncthreads();
  out[me()] = 1.0f;
}
__global__ void two_barriers(const float*, float* out, int) {
  if (threadIdx.x & 32)
    __syncthreads();
  else
    __syncthreads();
  out[me()] = 1.0f;
}
__global__ void full_mask_in_a_branch(const float* in, float* out, int) {
  if (threadIdx.x < 16) out[me()] = __shfl_xor_sync(0xffffffff, in[me()], 1);
}
__global__ void barrier_against_shuffle(const float* in, float* out, int) {
  if (threadIdx.x == 3) __syncthreads();
  out[me()] = __shfl_xor_sync(0xffffffff, in[me()], 1);
}
__global__ void two_shuffles(const float* in, float* out, int) {
  if (threadIdx.x & 1)
    out[me()] = __shfl_xor_sync(0xffffffff, in[me()], 1);
  else
    out[me()] = __shfl_xor_sync(0xffffffff, in[me()], 2);
}
__global__ void other_lane(const float* in, float* out, int) {
  if (threadIdx.x < 4) out[me()] = __shfl_sync(0xf, in[me()], 4);
}
__global__ void asserts(const float*, float* out, int n) {
  assert(int(threadIdx.x) != 5 && "five");
  out[me()] = float(n);
}
template <bool waits>
__global__ void dependent(const float* in, float* out, int) {
  if (waits) cudaGridDependencySynchronize();
  out[me()] = in[me()];
}
__global__ void overflow(const float*, float* out, int) { out[0] = float(opaque(0x7fffffff) + 1); }

#define KERNEL(name) {#name, name}
const std::map<std::string, Kernel> kernels = {
    KERNEL(copy<float>),
    KERNEL(copy<float4>),
    {"block_sum", block_sum<true, false>},
    {"block_sum dynamic", block_sum<true, true>},
    {"block_sum without barrier", block_sum<false, false>},
    KERNEL(warp_sum),
    KERNEL(part_of_a_warp),
    KERNEL(two_masks),
    KERNEL(through_a_warp<true>),
    KERNEL(through_a_warp<false>),
    KERNEL(angle),
    KERNEL(shared_at_first),
    {"half", through<__half, __half2float, __float2half_rn>},
    {"bfloat16", through<__nv_bfloat16, __bfloat162float, __float2bfloat16_rn>},
    KERNEL(past_the_end),
    KERNEL(before_the_start),
    KERNEL(null_pointer),
    KERNEL(misaligned),
    KERNEL(past_shared),
    KERNEL(two_writes),
    KERNEL(neighbour),
    KERNEL(halves_of_an_element),
    KERNEL(half_at_a_barrier),
    KERNEL(two_barriers),
    KERNEL(full_mask_in_a_branch),
    KERNEL(barrier_against_shuffle),
    KERNEL(two_shuffles),
    KERNEL(other_lane),
    KERNEL(asserts),
    KERNEL(dependent<true>),
    KERNEL(dependent<false>),
    KERNEL(overflow),
};

}  // namespace

// Launches a kernel of this file by name and returns the text of the launch's error code.
std::string self_test(const std::string& kernel, unsigned blocks, unsigned threads, uintptr_t in, uintptr_t out, int n,
                      size_t dynamic) {
  cudaLaunchAttribute dependent{cudaLaunchAttributeProgrammaticStreamSerialization, {1}};
  const cudaLaunchConfig_t config{blocks, threads, dynamic, nullptr, &dependent, kernel.starts_with("dependent")};
  return cudaGetErrorString(cudaLaunchKernelEx(&config, kernels.at(kernel), reinterpret_cast<const float*>(in),
                                               reinterpret_cast<float*>(out), n));
}
