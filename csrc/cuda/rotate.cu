// The kernel that rotates q and k without a norm. It can write k and v to a cache.
#include "device.cuh"
#include "kernels.h"

namespace rope::cuda {
namespace {

constexpr int kHeadsAtOnce = 2;  // heads that a thread loads at a time

// The second of the launch bounds is the number of thread blocks that a multiprocessor must hold, so it limits the
// registers of a thread: 6 thread blocks of 128 threads leave it 80 registers, 5 leave 96, and 4 leave 128. A cache and
// element offsets of 64 bits need more registers. With these bounds no kernel spills (benchmarks/results/kernels.md).
template <typename T, int V, bool cache, bool interleaved, typename I>
__global__ void __launch_bounds__(kThreads, 6 - cache - (sizeof(I) == 8))
    rotate_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  constexpr bool vectors = V > 1;
  const RopeParams& p = a.params;
  const int64_t s = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (s >= p.seq) return;
  int index = int(threadIdx.x);
  do {
    Token<I> token(a, tiling, I(tiling.first_sequence) + I(blockIdx.z), I(s));
    token.arrive();
    const auto chunk = Chunk<I>::template at<interleaved, V>(p, tiling, index);
    Heads<T, I, cache, false> heads(a, token, !chunk.rotated);
    Elements<T, V> x[kHeadsAtOnce];
    // Starts all loads at once. Instead of a head past the last one, the first head of these is read again. A branch
    // around the load would make one load wait for the other; and to read the head of another team is not safe, because
    // that team may be about to write it.
    const auto read_heads = [&] {
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; i++) {
        const I head = heads.head(i) < heads.end ? heads.head(i) : heads.head(0);
        read<vectors>(heads.in_at(head), heads.in_stride, chunk, x[i]);
      }
    };
    if (!heads.next(0)) continue;
    read_heads();
    Angles<arithmetic_t<T>, V> angles;
    if (chunk.rotated && heads.rotates()) angles = angles_of<T, interleaved, V>(a, token, index);
    for (;;) {
      heads.locate();
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; i++) {
        if (chunk.rotated && heads.rotates()) {
          auto numbers = numbers_of(x[i]);
          rotate<interleaved>(numbers, angles);
          x[i] = rounded<T, V>(numbers);
        }
        if (heads.head(i) < heads.out_end) {
          write<vectors>(x[i], heads.out_at(heads.head(i)), heads.out_stride, chunk);
        }
      }
      if (!heads.next(kHeadsAtOnce)) break;
      read_heads();
    }
  } while (!vectors &&
           (index += int(blockDim.x)) < tiling.chunks);  // with vectors, the team has a thread for every chunk
}

template <typename T, int V>
cudaError_t launch(const RotateArgs& a, const Plan& plan, cudaStream_t stream) {
  const auto with_index = [&](auto index) {
    using I = decltype(index);
    const auto with_cache = [&](auto cache) {
      constexpr bool c = decltype(cache)::value;
      return start(plan, stream,
                   a.params.interleaved ? rotate_kernel<T, V, c, true, I> : rotate_kernel<T, V, c, false, I>, a);
    };
    return a.params.v.heads ? with_cache(std::true_type()) : with_cache(std::false_type());
  };
  return plan.wide_index ? with_index(int64_t()) : with_index(int32_t());
}

}  // namespace

cudaError_t rotate(const RotateArgs& a, const Plan& plan, cudaStream_t stream) {
  return with_type(a.x_dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int full = 16 / sizeof(T);
    if (plan.tiling.vector == full) return launch<T, full>(a, plan, stream);
    if constexpr (full > 2) {
      if (plan.tiling.vector == full / 2) return launch<T, full / 2>(a, plan, stream);
    }
    return launch<T, 1>(a, plan, stream);
  });
}

}  // namespace rope::cuda
