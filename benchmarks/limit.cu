// A kernel that measures the least time of a decode step: it loads a position, loads the table row that the position
// selects, and stores as many bytes as the result has. A rotation has to wait for the same loads and stores, one after
// another. implementations.py builds this file.
#include <cuda_runtime.h>

namespace {

// Each thread stores 16 bytes. A token is one value of blockIdx.y, so that no division comes before the position's
// load.
__global__ void limit_kernel(const long long* positions, const float4* cos, const float4* sin, float4* out,
                             int row_vectors, int token_vectors) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= token_vectors) return;
  const long long at = positions[blockIdx.y] * row_vectors + i % row_vectors;
  const float4 c = cos[at], s = sin[at];
  out[blockIdx.y * token_vectors + i] = make_float4(c.x + s.x, c.y + s.y, c.z + s.z, c.w + s.w);
}

}  // namespace

// Launches the kernel and returns CUDA's error code. In vectors of 16 bytes, cos and sin are [rows, row_vectors] and
// out is [tokens, token_vectors].
extern "C" int rope_limit(const void* positions, const void* cos, const void* sin, void* out, int row_vectors,
                          int token_vectors, int tokens, int threads, void* stream) {
  const dim3 blocks((token_vectors + threads - 1) / threads, tokens);
  limit_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const long long*>(positions), static_cast<const float4*>(cos), static_cast<const float4*>(sin),
      static_cast<float4*>(out), row_vectors, token_vectors);
  return cudaGetLastError();
}
