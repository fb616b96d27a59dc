// The kernel that rotates q and k without a norm. It can write k and v to a cache.
#include "device.cuh"

namespace rope::cuda {
namespace {

constexpr int kHeadsAtOnce = 2;  // heads that a thread loads at a time

template <typename T, int V, bool cache, bool interleaved, typename I>
__global__ void __launch_bounds__(kThreads, resident_thread_blocks(cache, sizeof(I) == 8))
    rotate_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  constexpr bool vectors = V > 1;
  const RopeParams& p = a.params;
  wait_for_previous_kernel();
  const int64_t s = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (s >= p.seq) return;
  int index = int(threadIdx.x);
  do {
    Token<I> token(a, tiling, I(tiling.first_sequence) + I(blockIdx.z), I(s));
    const auto chunk = Chunk<I>::template at<interleaved, V>(p, tiling, index);
    Heads<T, I, cache> heads(a, token, !chunk.rotated);
    if (!heads.next(0)) continue;
    Elements<T, V> x[kHeadsAtOnce];
    // Starts all loads at once. The thread does not read a head of another team, which may be about to write it.
    const auto read_heads = [&] {
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; i++) {
        const I head = heads.head_at(i);
        if (i == 0 || head < heads.end) read<vectors>(heads.in + head * heads.in_step, heads.in_stride, chunk, x[i]);
      }
    };
    AnglesOf<T, interleaved, V, I> angles(a, token, index);
    const bool rotates = chunk.rotated && heads.rotates();
    token.arrive();
    if (rotates) angles.read();
    read_heads();
    token.template check<cache>();
    if (rotates) angles.finish();
    for (;;) {
      heads.locate();
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; i++) {
        const I head = heads.head_at(i);
        if (head >= heads.out_end) break;
        if (chunk.rotated && heads.rotates()) {
          auto numbers = numbers_of(x[i]);
          rotate<interleaved>(numbers, angles.angles);
          x[i] = rounded<T, V>(numbers);
        }
        write<vectors>(x[i], heads.out + head * heads.out_step, heads.out_stride, chunk);
      }
      if (!heads.next(kHeadsAtOnce)) break;
      read_heads();
    }
  } while (!vectors &&
           (index += int(blockDim.x)) < tiling.chunks);  // with vectors, the team has a thread for every chunk
}

template <typename T, int V>
cudaError_t launch(const RotateArgs& a, const Plan& plan, Queue queue) {
  const auto with_index = [&](auto index) {
    using I = decltype(index);
    const auto with_cache = [&](auto cache) {
      constexpr bool c = decltype(cache)::value;
      return start(plan, queue,
                   a.params.interleaved ? rotate_kernel<T, V, c, true, I> : rotate_kernel<T, V, c, false, I>, a);
    };
    return a.params.v.heads ? with_cache(std::true_type()) : with_cache(std::false_type());
  };
  return plan.wide_index ? with_index(int64_t()) : with_index(int32_t());
}

}  // namespace

cudaError_t architecture(int& found) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, rotate_kernel<float, 4, false, false, int32_t>);
  found = attributes.ptxVersion;
  return error;
}

cudaError_t rotate(const RotateArgs& a, const Plan& plan, Queue queue) {
  return with_type(a.x_dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int full = 16 / sizeof(T);
    if (plan.tiling.vector == full) return launch<T, full>(a, plan, queue);
    if constexpr (full > 2) {
      if (plan.tiling.vector == full / 2) return launch<T, full / 2>(a, plan, queue);
    }
    return launch<T, 1>(a, plan, queue);
  });
}

}  // namespace rope::cuda
