// The kernel that rotates q and k without a norm. It can write k and v to a cache.
#include "launch.cuh"

namespace rope::cuda {
namespace {

template <typename K>
__global__ void __launch_bounds__(kThreads,
                                  resident_thread_blocks(K::cache && !K::general_v, sizeof(typename K::I) == 8))
    rotate_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  using I = typename K::I;
  constexpr bool vectors = K::V > 1;
  const RopeParams& p = a.params;
  wait_for_previous_kernel();
  const int64_t s = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (s >= p.seq) return;
  int index = int(threadIdx.x);
  do {
    Token<K> token(a, tiling, I(tiling.first_sequence) + I(blockIdx.z), I(s));
    if (K::general_v && blockIdx.y >= tiling.shares) {
      token.arrive();
      token.check();
      return copy_v(a, token);
    }
    const auto chunk = Chunk<I>::template of<K::V>(p, tiling, index);
    Heads<K> heads(a, token, !chunk.rotated);
    if (!heads.next(0)) continue;
    Elements<typename K::T, K::V> x[K::at_once];
    // Starts all loads at once. The thread does not read a head of another team, which may be about to write it.
    const auto read_heads = [&] {
      for (int i = 0; i < K::at_once; i++) {
        const I head = heads.head_at(i);
        if (i == 0 || head < heads.end) x[i] = heads.read(head, chunk);
      }
    };
    Angles<K> angles(a, token, index);
    const bool rotates = chunk.rotated && heads.rotates();
    token.arrive();
    if (rotates) angles.read();
    read_heads();
    token.check();
    if (rotates) angles.finish();
    for (;;) {
      heads.locate();
      for (int i = 0; i < K::at_once; i++) {
        const I head = heads.head_at(i);
        if (head >= heads.out_end) break;
        heads.write(head, chunk, x[i], chunk.rotated && heads.rotates(),
                    [&](auto& numbers) { angles.rotate(numbers, head); });
      }
      if (!heads.next(K::at_once)) break;
      read_heads();
    }
  } while (!vectors &&
           (index += int(blockDim.x)) < tiling.chunks);  // with vectors, the team has a thread for every chunk
}

}  // namespace

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
    return with(int64_t(), General());
  });
}

}  // namespace rope::cuda
