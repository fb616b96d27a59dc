// The kernels for what models usually need: vectors of 16 bytes as single accesses, tables with a row for each position
// or token or frequencies, norms, caches, results in 8 bits.
#include "usual.cuh"

namespace rope::cuda {
namespace {

// Returns the side of a thread block, and as its head the index of the share that the thread block has.
template <typename K>
ROPE_FN Place<int> share_of_block(const UsualArgs& a) {
  const int y = int(blockIdx.y), side = K::cache && y >= a.first_of_v ? kV : y >= a.first_of_k ? kK : kQ;
  return {side, y - (side == kV ? a.first_of_v : side == kK ? a.first_of_k : 0), 0};
}

// A thread takes one chunk of a head, then of the next head of its team. A head is normalised while cos and sin are on
// their way. All lanes of a warp take part in the sums of norms, and all threads in shared angles, also those past the
// last token, head or chunk.
template <typename K>
__global__ void __launch_bounds__(kThreads, K::norm    ? (K::eager ? 4 : 5)
                                            : K::bytes ? 7
                                                       : 8) usual_kernel(const __grid_constant__ UsualArgs a) {
  const int b = a.first_sequence + int(blockIdx.z), s = int(blockIdx.x * blockDim.z + threadIdx.z);
  const int x = int(threadIdx.x), teams = int(blockDim.y);
  const auto share = share_of_block<K>(a);
  const UsualSide side = a.sides[share.side];
  int head = share.head * a.steps * teams + int(threadIdx.y), left = a.steps;
  const auto chunk = chunk_at(a, x);
  const auto takes = [&] { return s < a.seq && head < side.heads && x < side.chunks; };
  const UsualHeads<typename K::T, K::V> in(side.in, side.in_strides, b, min(s, a.seq - 1), chunk);
  Elements<typename K::T, K::V> elements;
  if (takes()) elements = in.read(head);
  Weights<typename K::T, K::V> held_weights;
  if (K::norm && side.weight) held_weights = {a, side, chunk, 0};
  __syncwarp();  // the loads above begin before those below
  UsualToken<K> token(a, chunk, chunk.rotated && share.side != kV, b, min(s, a.seq - 1));
  Numbers<float, K::V> weights;
  if (K::norm && side.weight) weights = held_weights.template numbers<false>(a, side);
  K::shares_angles ? token.template share_angles<kThreads>() : token.arrive();
  const UsualResult<K> result{side, a.scales[share.side], token};
  if (!K::norm && !(takes() && result.is_written)) return;
  const auto normalise = [&] {
    float squares[1] = {0.0f};
    if (K::norm && side.norm) {
      squares[0] = x < side.chunks ? squares_of(elements, is_whole(chunk)) : 0.0f;
      sum_over_lanes(squares);
    }
    return normalised<K>(a, side, elements, squares[0], weights);
  };
  auto numbers = normalise();
  token.wait();
  for (;;) {
    if (!K::norm || (takes() && result.is_written)) result.write(head, elements, numbers);
    head += teams;
    if (--left == 0 || (K::norm ? head - int(threadIdx.y) : head) >= side.heads) return;  // all lanes of a warp at once
    if (!K::norm || takes()) elements = in.read(head);
    numbers = normalise();
  }
}

// A thread block takes a group, which it holds in registers so that each element is loaded once, or the v of a token.
template <typename K>
__global__ void __launch_bounds__(kGroupThreads) group_kernel(const __grid_constant__ UsualArgs a) {
  constexpr int held = kHeldChannels / (2 * K::V);  // heads of a thread
  const int b = a.first_sequence + int(blockIdx.z), s = int(blockIdx.x);
  const auto share = share_of_block<K>(a);
  const UsualSide side = a.sides[share.side];
  const int first = a.all_heads ? 0 : share.head, end = a.all_heads ? side.heads : first + 1;
  if (first == end) return;
  const auto chunk = chunk_at(a, int(threadIdx.x));
  const auto head = [&](int j) { return first + int(threadIdx.y + j * blockDim.y); };
  const auto takes = [&](int j) { return int(threadIdx.x) < side.chunks && head(j) < end; };
  const UsualHeads<typename K::T, K::V> in(side.in, side.in_strides, b, s, chunk);
  Elements<typename K::T, K::V> elements[held] = {};
  Weights<typename K::T, K::V> weights[held];
#pragma unroll
  for (int j = 0; j < held; j++) {
    if (takes(j)) elements[j] = in.read(head(j));
    if (side.weight) weights[j] = {a, side, chunk, min(head(j), end - 1)};
  }
  __syncwarp();
  UsualToken<K> token(a, chunk, chunk.rotated && share.side != kV, b, s);
  K::shares_angles ? token.template share_angles<kGroupThreads>() : token.arrive(min(head(0), end - 1));
  const UsualResult<K> result{side, a.scales[share.side], token};
  double squares[1] = {0.0};
  if (side.norm) {
    for (const auto& x : elements) squares[0] += double(squares_of(x, is_whole(chunk)));
    GroupThreads{false}.sum(squares);
  }
#pragma unroll
  for (int j = 0; j < held; j++) {
    if (!takes(j) || !result.is_written) continue;
    auto numbers = normalised<K>(a, side, elements[j], float(squares[0]), weights[j].template numbers<true>(a, side));
    if (j > 0 && a.table_head_stride) token.read_row(head(j));
    token.wait();
    result.write(head(j), elements[j], numbers);
  }
}

// Starts the kernel for the features of a call, which is one of those that are compiled.
template <typename Shape, int... compiled>
cudaError_t start_usual(int features, const Plan& plan, UsualArgs& args, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto start_if = [&](auto of) {
    if (of() != features) return;
    using K = Usual<Shape, of()>;
    auto kernel = usual_kernel<K>;
    if constexpr (K::norm) kernel = plan.by_block ? group_kernel<K> : kernel;
    error = start_sequences(plan, stream, args.first_sequence, kernel, args);
  };
  (start_if(std::integral_constant<int, compiled>()), ...);
  return error;
}

}  // namespace

cudaError_t rotate_usually(const Args& a, const Plan& plan, cudaStream_t stream) {
  constexpr int F = kFrequencies, C = kCache, CN = kCache | kNorm, B = kBytes, E = kEager;
  UsualArgs args = pack(a, plan.tiling);
  const int norm = takes_norm(a),
            bytes = std::any_of(a.sides, a.sides + kSides, [](const Side& s) { return s.format; });
  const int features =
      F * (a.source == kInvFreq) | C * (norm || a.has_cache) | kNorm * norm | B * bytes | E * (a.rounding != kOnce);
  return with_shape(a, plan.tiling, [&](auto shape) {
    using S = decltype(shape);
    if constexpr (S::usual && sizeof(typename S::T) == 2) {
      if (bytes) return start_usual<S, C | B, C | B | F, CN | B, CN | B | F>(features, plan, args, stream);
      if (norm && a.rounding != kOnce) return start_usual<S, CN | E>(features, plan, args, stream);
    }
    if constexpr (S::usual) return start_usual<S, 0, F, C, C | F, CN, CN | F, E>(features, plan, args, stream);
    return cudaErrorInvalidValue;  // such a call is not usual
  });
}

}  // namespace rope::cuda
