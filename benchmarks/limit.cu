// The least that a decode step can take: load a position, load the row it names, store. No rotation can wait for less.
// Built by implementations.py.
#include <cuda_runtime.h>

namespace {

// A thread stores 16 bytes. A token is a row of blocks, so that nothing is divided before the position is loaded.
__global__ void limit_kernel(const long long* positions, const float4* cos, const float4* sin, float4* out,
                             int row_vectors, int token_vectors) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= token_vectors) return;
  const long long at = positions[blockIdx.y] * row_vectors + i % row_vectors;
  const float4 c = cos[at], s = sin[at];
  out[blockIdx.y * token_vectors + i] = make_float4(c.x + s.x, c.y + s.y, c.z + s.z, c.w + s.w);
}

}  // namespace

// cos and sin: [rows, row_vectors] of 16 bytes; out: [tokens, token_vectors] of 16 bytes. Returns CUDA's error code.
extern "C" int rope_limit(const void* positions, const void* cos, const void* sin, void* out, int row_vectors,
                          int token_vectors, int tokens, int threads, void* stream) {
  const dim3 blocks((token_vectors + threads - 1) / threads, tokens);
  limit_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const long long*>(positions), static_cast<const float4*>(cos), static_cast<const float4*>(sin),
      static_cast<float4*>(out), row_vectors, token_vectors);
  return cudaGetLastError();
}
