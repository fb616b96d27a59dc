// Kernels for test_emulator.py: one for each mistake that the emulator must report, and correct ones next to them.
#include <cuda_runtime.h>

#include <cassert>
#include <map>
#include <string>

// The shared memory that launches ask for, which the kernels declare without a size.
namespace rope::cuda {
thread_local double numbers_of_block[64 * 1024 / sizeof(double)];
}

namespace {

using In = const float*;
using Out = float*;
using Kernel = void (*)(In in, Out out, int n);

unsigned me() { return blockIdx.x * blockDim.x + threadIdx.x; }
// Returns n in a way that the compiler cannot see through. Otherwise it would warn about the mistakes below.
__noinline__ int opaque(int n) {
  asm volatile("" : "+r"(n));
  return n;
}

// barrier: each round waits for the one before; without it there is a race.
template <bool barrier>
void block_sum(In in, Out out, int) {
  __shared__ float part[256];
  part[threadIdx.x] = in[me()];
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (barrier) __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

template <bool barrier>
void through_a_warp(In in, Out out, int) {
  __shared__ float of_lanes[256];
  of_lanes[threadIdx.x] = in[me()];
  if (barrier) __syncwarp();
  out[me()] = of_lanes[threadIdx.x ^ 1];
}

void warp_sum(In in, Out out, int) {
  float x = in[me()];
  for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  out[me()] = x;
}

void not_written_before(In, Out out, int) {
  __shared__ float shared[4];
  out[me()] = shared[threadIdx.x];
  shared[threadIdx.x] = 1.0f;
}

void half_at_a_barrier(In, Out, int) {
  if (threadIdx.x < blockDim.x / 2) __syncthreads();
}

void two_barriers(In, Out, int) {
  if (threadIdx.x & 32)
    __syncthreads();
  else
    __syncthreads();
}

void two_shuffles(In in, Out out, int) {
  if (threadIdx.x & 1)
    out[me()] = __shfl_xor_sync(0xffffffff, in[me()], 1);
  else
    out[me()] = __shfl_xor_sync(0xffffffff, in[me()], 2);
}

void barrier_against_shuffle(In in, Out out, int) {
  if (threadIdx.x == 3) __syncthreads();
  out[me()] = __shfl_xor_sync(0xffffffff, in[me()], 1);
}

void full_mask_in_a_branch(In in, Out out, int) {
  if (threadIdx.x < 16) out[me()] = __shfl_xor_sync(0xffffffff, in[me()], 1);
}

void misaligned(In in, Out out, int) {
  *reinterpret_cast<float2*>(out) = *reinterpret_cast<const float2*>(in + opaque(1));
}

template <bool waits>
void dependent(In in, Out out, int) {
  if (waits) cudaGridDependencySynchronize();
  out[me()] = in[me()];
}

const std::map<std::string, Kernel> kernels = {
    {"block_sum", block_sum<true>},
    {"block_sum without barrier", block_sum<false>},
    {"through_a_warp", through_a_warp<true>},
    {"through_a_warp without barrier", through_a_warp<false>},
    {"warp_sum", warp_sum},
    {"not_written_before", not_written_before},
    {"two_barriers", two_barriers},
    {"two_shuffles", two_shuffles},
    {"barrier_against_shuffle", barrier_against_shuffle},
    {"full_mask_in_a_branch", full_mask_in_a_branch},
    {"dependent", dependent<true>},
    {"dependent that does not wait", dependent<false>},
    {"half_at_a_barrier", half_at_a_barrier},
    {"part_of_a_mask", [](In in, Out out, int) { out[me()] = __shfl_xor_sync(0xf, in[me()], 1); }},
    {"past_the_end", [](In in, Out out, int n) { out[0] = in[n]; }},
    {"before_the_start", [](In, Out out, int) { out[opaque(-2)] = 1.0f; }},
    {"null_pointer", [](In, Out out, int) { out[0] = *In(uintptr_t(opaque(8))); }},
    {"misaligned", misaligned},
    {"two_writes", [](In, Out out, int) { out[0] = 1.0f; }},
    {"neighbour", [](In, Out out, int n) { out[me()] = out[(me() + 1) % unsigned(n)]; }},
    {"halves_of_an_element", [](In, Out out, int) { reinterpret_cast<short*>(out)[me() + 1] = 1; }},
    {"asserts", [](In, Out, int) { assert(int(threadIdx.x) != 5 && "five"); }},
    {"overflow", [](In, Out out, int) { out[0] = float(opaque(0x7fffffff) + 1); }},
};

}  // namespace

// Launches a kernel of this file by name and returns the text of the launch's error code.
std::string self_test(const std::string& kernel, unsigned blocks, unsigned threads, uintptr_t in, uintptr_t out,
                      int n) {
  cudaLaunchAttribute dependent{cudaLaunchAttributeProgrammaticStreamSerialization, {1}};
  const cudaLaunchConfig_t config{blocks, threads, 0, nullptr, &dependent, kernel.starts_with("dependent")};
  return cudaGetErrorString(cudaLaunchKernelEx(&config, kernels.at(kernel), In(in), Out(out), n));
}
