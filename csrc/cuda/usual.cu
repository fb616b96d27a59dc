// The kernels for what models usually need: vectors of 16 bytes as single accesses, tables with a row for each position
// or token or frequencies, norms, caches, results in 8 bits.
#include "usual.cuh"

namespace rope::cuda {
namespace {

// A thread takes one chunk of a head, then of the next head of its team. What needs no position is loaded first.
template <typename K>
__global__ void __launch_bounds__(kThreads, K::norm ? 5 : 8) usual_kernel(const __grid_constant__ UsualArgs a) {
  wait_for_previous_kernel();
  const int b = a.first_sequence + int(blockIdx.z), s = int(blockIdx.x * blockDim.z + threadIdx.z);
  int h = int(blockIdx.y * blockDim.y + threadIdx.y);  // in the list of heads
  const int heads = a.ends[K::cache ? kV : kK];
  // All lanes of a warp take part in the sums of norms, also those past the last token, head or chunk.
  const auto chunk = chunk_at(a, K::norm ? min(int(threadIdx.x), a.chunks - 1) : int(threadIdx.x));
  while (K::cache && !K::norm && !chunk.rotated && h < a.kept) h += int(gridDim.y * blockDim.y);
  if (!K::norm && (s >= a.seq || h >= heads)) return;
  UsualToken<K> token(a, chunk, b, K::norm ? min(s, a.seq - 1) : s);
  UsualHead<K> head;
  Weights<typename K::T, K::V> weights;
  int weights_of = -1;
  const auto read_head = [&] {
    const Place<int> place = place_of<K>(a, h);
    head.read(token, place, !K::norm || (s < a.seq && int(threadIdx.x) < a.chunks && h < heads));
    if (!head.normalises(a) || place.side == weights_of || place.side == kV) return;
    weights_of = place.side;
    weights.read(a, place.side, chunk, 0);
  };
  read_head();
  token.arrive(chunk.rotated);
  for (;;) {
    float squares[1] = {0.0f};
    if (K::norm) {
      squares[0] = squares_of(head.x, is_whole(chunk));
      sum_over_lanes(squares);
    }
    head.write(token, squares[0], weights);
    h += int(gridDim.y * blockDim.y);
    if ((K::norm ? h - int(threadIdx.y) : h) >= heads) break;  // all lanes of a warp at once
    read_head();
  }
  let_next_kernel_begin();
}

// A thread block takes a group, which it holds in registers so that each element is loaded once, or the v of a token.
template <typename K>
__global__ void __launch_bounds__(kGroupThreads) group_kernel(const __grid_constant__ UsualArgs a) {
  constexpr int held = kHeldChannels / (2 * K::V);  // heads of a thread
  wait_for_previous_kernel();
  const auto chunk = chunk_at(a, min(int(threadIdx.x), a.chunks - 1));
  UsualToken<K> token(a, chunk, a.first_sequence + int(blockIdx.z), int(blockIdx.x));
  const auto place = a.all_heads ? Place<int>{int(blockIdx.y), 0, 0} : place_of<K>(a, int(blockIdx.y));
  const int side = place.side, first = place.head;
  const int end = a.all_heads ? a.ends[side] - (side == kQ ? 0 : a.ends[side - 1]) : first + 1;
  if (first == end) return;
  UsualHead<K> heads[held];
  Weights<typename K::T, K::V> weights[held];
#pragma unroll
  for (int j = 0; j < held; j++) {
    const int head = first + int(threadIdx.y + j * blockDim.y), near = min(head, end - 1);
    heads[j].read(token, {side, near, 0}, int(threadIdx.x) < a.chunks && head < end);
    if (side != kV && heads[j].normalises(a)) weights[j].read(a, side, chunk, near);
  }
  const bool rotates = chunk.rotated && side != kV;
  token.arrive(rotates, heads[0].head);
  double squares[1] = {0.0};
  if (heads[0].normalises(a)) {  // as all threads of the thread block do
    for (const auto& head : heads) squares[0] += double(squares_of(head.x, is_whole(chunk)));
    GroupThreads{false}.sum(squares);
  }
#pragma unroll
  for (int j = 0; j < held; j++) {
    if (j > 0) token.go(rotates, heads[j].head);
    heads[j].template write<true>(token, float(squares[0]), weights[j]);
  }
  let_next_kernel_begin();
}

// Starts the kernel for the features of a call, which is one of those that are compiled.
template <typename Shape, int... compiled>
cudaError_t start_usual(int features, const Plan& plan, UsualArgs& args, Queue queue) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto start_if = [&](auto of) {
    if (of() != features) return;
    using K = Usual<Shape, of()>;
    auto kernel = usual_kernel<K>;
    if constexpr (K::norm) kernel = plan.by_block ? group_kernel<K> : kernel;
    error = start_sequences(plan, queue, args.first_sequence, kernel, args);
  };
  (start_if(std::integral_constant<int, compiled>()), ...);
  return error;
}

}  // namespace

cudaError_t architecture(int& found) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, usual_kernel<Usual<Shape<float, 4, false>, 0>>);
  found = attributes.ptxVersion;
  return error;
}

cudaError_t rotate_usually(const Args& a, const Plan& plan, Queue queue) {
  constexpr int F = kFrequencies, C = kCache, CN = kCache | kNorm, B = kBytes, E = kEager;
  UsualArgs args = pack(a, plan.tiling);
  const int norm = takes_norm(a), bytes = args.formats != 0;
  const int features =
      F * (a.source == kInvFreq) | C * (norm || a.has_cache) | kNorm * norm | B * bytes | E * (a.rounding != kOnce);
  return with_shape(a, plan.tiling, [&](auto shape) {
    using S = decltype(shape);
    if constexpr (S::usual && sizeof(typename S::T) == 2) {
      if (bytes) return start_usual<S, C | B, C | B | F, CN | B, CN | B | F>(features, plan, args, queue);
      if (norm && a.rounding != kOnce) return start_usual<S, CN | E>(features, plan, args, queue);
    }
    if constexpr (S::usual) return start_usual<S, 0, F, C, C | F, CN, CN | F, E>(features, plan, args, queue);
    return cudaErrorInvalidValue;  // such a call is not usual
  });
}

}  // namespace rope::cuda
