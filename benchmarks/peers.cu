// Three rotations in place that work as the kernels of SGLang, FlashInfer and vLLM do, so that torch_rope can be
// compared with them where none is installed. implementations.py builds this file.
//
// q: [tokens, q_heads, head_dim] and k: [tokens, k_heads, head_dim] in half types, with any stride between tokens.
// cos_sin: [rows, rotary_dim] in float32, the cosines of a position before its sines. positions: [tokens].
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 128, kMostThreads = 512;  // of a thread block; vLLM's way has up to kMostThreads

struct Call {  // implementations.py packs it
  void *q, *k;
  const float* cos_sin;
  const int64_t* positions;
  int64_t q_stride, k_stride;  // elements between two tokens
  int tokens, q_heads, k_heads, head_dim, rotary_dim;
};

__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ void convert(float from, __nv_bfloat16& to) { to = __float2bfloat16_rn(from); }
__device__ void convert(float from, __half& to) { to = __float2half_rn(from); }

// Neighbouring channels of a head, or numbers of a table row, which one instruction loads.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};

template <typename T, int kCount>
__device__ Vector<T, kCount> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kCount>*>(from);
}

template <typename T, int kCount>
__device__ void store(T* to, const Vector<T, kCount>& x) {
  *reinterpret_cast<Vector<T, kCount>*>(to) = x;
}

template <typename T>
__device__ void rotate_pair(T& a, T& b, float cos, float sin) {
  const float x = to_float(a), y = to_float(b);
  convert(x * cos - y * sin, a);
  convert(y * cos + x * sin, b);
}

// ---- SGLang: a team of rotary_dim / 8 threads rotates one head of one token, then the next ----

// Each thread owns four whole pairs, so it loads nothing that another thread stores. As many thread blocks run as are
// resident, and share all heads of all tokens.
template <typename T, int kRotaryDim, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) heads_kernel(const __grid_constant__ Call call) {
  constexpr int kTeam = kRotaryDim / 8, kHalf = kRotaryDim / 2;
  const int lane = threadIdx.x % kTeam, heads = call.q_heads + call.k_heads;
  const int teams = gridDim.x * (kThreads / kTeam);
#if __CUDA_ARCH__ >= 900  // the kernel may have begun before the one ahead of it has ended
  cudaGridDependencySynchronize();
#endif
  for (int i = blockIdx.x * (kThreads / kTeam) + threadIdx.x / kTeam; i < call.tokens * heads; i += teams) {
    const int token = i / heads, head = i - token * heads;
    const bool is_q = head < call.q_heads;
    T* const x = is_q ? static_cast<T*>(call.q) + token * call.q_stride + head * call.head_dim
                      : static_cast<T*>(call.k) + token * call.k_stride + (head - call.q_heads) * call.head_dim;
    const float* const row = call.cos_sin + call.positions[token] * kRotaryDim + 4 * lane;
    const auto cos = load<float, 4>(row), sin = load<float, 4>(row + kHalf);
    if constexpr (kInterleaved) {
      auto pairs = load<T, 8>(x + 8 * lane);
      for (int j = 0; j < 4; j++) rotate_pair(pairs.at[2 * j], pairs.at[2 * j + 1], cos.at[j], sin.at[j]);
      store(x + 8 * lane, pairs);
    } else {
      T* const first = x + 4 * lane;
      auto a = load<T, 4>(first), b = load<T, 4>(first + kHalf);
      for (int j = 0; j < 4; j++) rotate_pair(a.at[j], b.at[j], cos.at[j], sin.at[j]);
      store(first, a);
      store(first + kHalf, b);
    }
  }
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// ---- FlashInfer: head_dim / 8 threads hold cos and sin of a token, and rotate one head or all heads ----

// Each thread loads 8 channels, and the 8 channels of their partners. blockIdx.y selects the head; if gridDim.y is 1,
// the threads rotate all heads of their token, one after another.
template <typename T, int kHeadDim, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) tokens_kernel(const __grid_constant__ Call call) {
  constexpr int kTeam = kHeadDim / 8;
  const int channel = threadIdx.x % kTeam * 8, rotary_dim = call.rotary_dim, half = rotary_dim / 2;
  const int token = blockIdx.x * (kThreads / kTeam) + threadIdx.x / kTeam;
  const bool rotates = token < call.tokens && channel < rotary_dim;
  float cos[8], sin[8];
  if (rotates) {
    const float* const row = call.cos_sin + call.positions[token] * rotary_dim;
    if constexpr (kInterleaved) {
      const auto c = load<float, 4>(row + channel / 2), s = load<float, 4>(row + half + channel / 2);
      for (int j = 0; j < 8; j++) cos[j] = c.at[j / 2], sin[j] = j % 2 ? s.at[j / 2] : -s.at[j / 2];
    } else {
      const float* const from = row + (channel < half ? channel : channel - half);
      for (int j = 0; j < 8; j += 4) {
        const auto c = load<float, 4>(from + j), s = load<float, 4>(from + half + j);
        for (int l = 0; l < 4; l++) cos[j + l] = c.at[l], sin[j + l] = channel < half ? -s.at[l] : s.at[l];
      }
    }
  }
  const int heads = call.q_heads + call.k_heads;
#pragma unroll 1
  for (int head = blockIdx.y; head < heads; head += gridDim.y) {
    T* const x = head < call.q_heads
                     ? static_cast<T*>(call.q) + token * call.q_stride + head * call.head_dim
                     : static_cast<T*>(call.k) + token * call.k_stride + (head - call.q_heads) * call.head_dim;
    Vector<T, 8> own, partners;
    if (rotates) {
      own = load<T, 8>(x + channel);
      if constexpr (!kInterleaved) partners = load<T, 8>(x + (channel < half ? channel + half : channel - half));
    }
    __syncwarp();  // nobody stores before its partner has loaded
    if (rotates) {
      Vector<T, 8> out;
      for (int j = 0; j < 8; j++) {
        const T partner = kInterleaved ? own.at[j ^ 1] : partners.at[j];
        convert(to_float(own.at[j]) * cos[j] + to_float(partner) * sin[j], out.at[j]);
      }
      store(x + channel, out);
    }
  }
}

// ---- vLLM: a thread block takes a token, and a thread takes one pair after another ----

// The two channels of a pair are loaded and stored one by one, in 2 bytes each.
template <typename T, bool kInterleaved>
__device__ void rotate_pairs(T* token, int heads, const Call& call, const float* row) {
  const int half = call.rotary_dim / 2;
  for (int i = threadIdx.x; i < heads * half; i += blockDim.x) {
    const int head = i / half, pair = i % half;
    T* const x = token + head * call.head_dim;
    rotate_pair(x[kInterleaved ? 2 * pair : pair], x[kInterleaved ? 2 * pair + 1 : half + pair], row[pair],
                row[half + pair]);
  }
}

template <typename T, bool kInterleaved>
__global__ void __launch_bounds__(kMostThreads) pairs_kernel(const __grid_constant__ Call call) {
  const int token = blockIdx.x;
  const float* const row = call.cos_sin + call.positions[token] * call.rotary_dim;
  rotate_pairs<T, kInterleaved>(static_cast<T*>(call.q) + token * call.q_stride, call.q_heads, call, row);
  rotate_pairs<T, kInterleaved>(static_cast<T*>(call.k) + token * call.k_stride, call.k_heads, call, row);
}

// ---- The host ----

// Returns the number of thread blocks of a kernel that are resident on the whole GPU.
template <typename Kernel>
int resident(Kernel* kernel) {
#ifdef __CUDACC_VER_MAJOR__
  int device = 0, processors = 0, blocks = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0);
  return processors * blocks;
#else  // on the emulator, whose small calls then have both forms of grids
  return 2;
#endif
}

cudaError_t launch(void (*kernel)(Call), dim3 blocks, int threads, bool dependent, void* stream, const Call& call) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent;
  return cudaLaunchKernelEx(&config, kernel, call);
}

template <typename T, bool kInterleaved, int kRotaryDim>
cudaError_t launch_heads(const Call& call, bool dependent, void* stream) {
  const auto kernel = heads_kernel<T, kRotaryDim, kInterleaved>;
  const int teams = kThreads / (kRotaryDim / 8), fitting = resident(kernel);
  const int needed = (call.tokens * (call.q_heads + call.k_heads) + teams - 1) / teams;
  return launch(kernel, dim3(needed < fitting ? needed : fitting), kThreads, dependent, stream, call);
}

template <typename T, bool kInterleaved, int kHeadDim>
cudaError_t launch_tokens(const Call& call, void* stream) {
  const auto kernel = tokens_kernel<T, kHeadDim, kInterleaved>;
  const int teams = kThreads / (kHeadDim / 8), blocks = (call.tokens + teams - 1) / teams;
  const bool fills = blocks >= resident(kernel);
  return launch(kernel, dim3(blocks, fills ? 1 : call.q_heads + call.k_heads), kThreads, false, stream, call);
}

template <typename T, bool kInterleaved>
cudaError_t launch_pairs(const Call& call, void* stream) {
  const int pairs = call.q_heads * call.rotary_dim / 2, threads = pairs < kMostThreads ? pairs : kMostThreads;
  return launch(pairs_kernel<T, kInterleaved>, dim3(call.tokens), threads, false, stream, call);
}

enum Way { kSGLang, kFlashInfer, kVLLM };  // in the order of WAYS in implementations.py

template <typename T, bool kInterleaved, int kSize>
cudaError_t launch_way(Way way, const Call& call, bool dependent, void* stream) {
  return way == kFlashInfer ? launch_tokens<T, kInterleaved, kSize>(call, stream)
                            : launch_heads<T, kInterleaved, kSize>(call, dependent, stream);
}

template <typename T, bool kInterleaved>
cudaError_t of_size(Way way, const Call& call, bool dependent, void* stream) {
  if (way == kVLLM) return launch_pairs<T, kInterleaved>(call, stream);
  switch (way == kFlashInfer ? call.head_dim : call.rotary_dim) {
    case 32:
      return launch_way<T, kInterleaved, 32>(way, call, dependent, stream);
    case 64:
      return launch_way<T, kInterleaved, 64>(way, call, dependent, stream);
    case 128:
      return launch_way<T, kInterleaved, 128>(way, call, dependent, stream);
    case 256:
      return launch_way<T, kInterleaved, 256>(way, call, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

// Rotates q and k in place and returns CUDA's error code. dependent: the kernel may begin before the one ahead of it in
// the stream has ended; only SGLang's way has this.
extern "C" __attribute__((visibility("default"))) int rope_peer(const Call* call, Way way, int bfloat16,
                                                                int interleaved, int dependent, void* stream) {
  const auto run = bfloat16 ? (interleaved ? of_size<__nv_bfloat16, true> : of_size<__nv_bfloat16, false>)
                            : (interleaved ? of_size<__half, true> : of_size<__half, false>);
  return run(way, *call, dependent, stream);
}
