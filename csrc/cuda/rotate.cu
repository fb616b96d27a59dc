// The kernel that rotates q and k without a norm. It can write k and v to a cache.
#include "device.cuh"

namespace rope::cuda {
namespace {

template <typename T, int V, bool cache, bool interleaved, typename I, bool general>
__global__ void __launch_bounds__(kThreads, resident_thread_blocks(cache && !general, sizeof(I) == 8))
    rotate_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  constexpr bool vectors = V > 1;
  constexpr int at_once = kHeadsAtOnce<general>;
  const RopeParams& p = a.params;
  wait_for_previous_kernel();
  const int64_t s = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (s >= p.seq) return;
  int index = int(threadIdx.x);
  do {
    Token<I> token(a, tiling, I(tiling.first_sequence) + I(blockIdx.z), I(s));
    const auto chunk = Chunk<I>::template at<V>(p, tiling, index);
    Heads<T, I, cache, general> heads(a, token, !chunk.rotated);
    if (!heads.next(0)) continue;
    Elements<T, V> x[at_once];
    // Starts all loads at once. The thread does not read a head of another team, which may be about to write it.
    const auto read_heads = [&] {
#pragma unroll
      for (int i = 0; i < at_once; i++) {
        const I head = heads.head_at(i);
        if (i == 0 || head < heads.end) heads.template read<vectors>(head, chunk, x[i]);
      }
    };
    AnglesOf<T, interleaved, V, I, general> angles(a, token, index);
    const bool rotates = chunk.rotated && heads.rotates();
    token.arrive();
    if (rotates) angles.read();
    read_heads();
    token.template check<cache>();
    if (rotates) angles.finish();
    for (;;) {
      heads.locate();
#pragma unroll
      for (int i = 0; i < at_once; i++) {
        const I head = heads.head_at(i);
        if (head >= heads.out_end) break;
        heads.template write<vectors>(head, chunk, x[i], chunk.rotated && heads.rotates(),
                                      [&](auto& numbers) { angles.rotate(numbers, head); });
      }
      if (!heads.next(at_once)) break;
      read_heads();
    }
  } while (!vectors &&
           (index += int(blockDim.x)) < tiling.chunks);  // with vectors, the team has a thread for every chunk
}

template <typename T, int V>
cudaError_t launch(const RotateArgs& a, const Plan& plan, Queue queue) {
  const auto with = [&](auto cache, auto index, auto general) {
    using I = decltype(index);
    // If vectors have one channel, the same kernel rotates either pairing.
    return start(plan, queue,
                 a.params.interleaved ? rotate_kernel<T, V, cache(), (V > 1), I, general()>
                                      : rotate_kernel<T, V, cache(), false, I, general()>,
                 a);
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if (plan.general) {  // offsets of 32 bits are for the widest vectors alone
    using Narrow = std::conditional_t<sizeof(T) * V == 16, int32_t, int64_t>;
    return plan.wide_index ? with(yes, int64_t(), yes) : with(yes, Narrow(), yes);
  }
  if (a.params.has_cache) return plan.wide_index ? with(yes, int64_t(), no) : with(yes, int32_t(), no);
  return plan.wide_index ? with(no, int64_t(), no) : with(no, int32_t(), no);
}

}  // namespace

cudaError_t architecture(int& found) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, rotate_kernel<float, 4, false, false, int32_t, false>);
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
