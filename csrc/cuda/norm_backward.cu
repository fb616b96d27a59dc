// The kernels of the backward of norm and rotation. They write the gradients of q and k, and the sums of each part: the
// gradient of a weight from the tokens of a thread block alone. A last kernel adds up the parts.
#include "norm.cuh"

extern __shared__ double dynamic_shared[];

namespace rope::cuda {
namespace {

// The part that a thread block takes: some tokens of q or of k.
template <typename K>
struct Part {
  using T = typename K::T;
  using I = typename K::I;
  const NormBackwardArgs& n;
  const Tiling& t;
  const RopeParams& p = n.rotate.params;
  const int side = blockIdx.x < t.parts[kQ].count ? kQ : kK;
  const Parts &q = t.parts[kQ], &parts = t.parts[side];
  const Side& params = p.sides[side];  // of the gradients
  const rope_int index = side == kQ ? blockIdx.x : blockIdx.x - q.count;
  const I heads = I(params.heads);
  // Token i is the token i % seq of sequence i / seq.
  const rope_int begin = index * parts.tokens, end = min(begin + parts.tokens, p.batch* p.seq);
  // The sums are [parts of q, channels of q], then [parts of k, channels of k].
  const rope_int first_sum = (side == kQ ? 0 : q.count * q.channels) + index * parts.channels;

  // The heads of a token: in the gradients of the results, in x, and in the gradients of x.
  struct Heads {
    TokenHeads<K::V, const T, I> g, x;
    TokenHeads<K::V, T, I> out;
  };
  ROPE_FN Heads heads_of(const Token& token) const {
    const auto of = [&](auto* data, const rope_int* strides) {
      data += token.b * strides[0] + token.s * strides[1];
      return TokenHeads<K::V, std::remove_pointer_t<decltype(data)>, I>{data, strides, !K::general || t.vectors};
    };
    const SideData& data = n.rotate.sides[side];
    const Before& x = n.x[side];
    return {of(static_cast<const T*>(data.in), params.in), of(static_cast<const T*>(x.data), x.strides),
            of(static_cast<T*>(data.out), params.out)};
  }
};

// A team holds a head at once. A thread adds up the terms of a few heads in the arithmetic type, and these sums in
// double, in shared memory. The launch bounds leave a thread 168 registers, or 128 if it has few channels.
template <typename K>
__global__ void __launch_bounds__(kThreads, K::V == 8 ? kBackwardThreadBlocks : 4)
    norm_backward_kernel(const __grid_constant__ NormBackwardArgs n, const __grid_constant__ Tiling tiling,
                         double* sums) {
  using T = typename K::T;
  using A = typename K::A;
  using I = typename K::I;
  constexpr int V = K::V, at_once = K::general ? 1 : 2;  // heads that a thread loads at a time
  constexpr int kSteps = 4;                              // whose terms are added up in the arithmetic type
  __shared__ double totals[2 * V][kThreads];
  const RotateArgs& a = n.rotate;
  const RopeParams& p = a.params;
  wait_for_previous_kernel();
  const Part<K> part{n, tiling};
  const int lane = int(threadIdx.x), lanes = int(blockDim.x), thread = int(threadIdx.y) * lanes + lane;
  const int head_teams = part.parts.teams, token_teams = int(blockDim.y) / head_teams;
  const int head_team = int(threadIdx.y) & (head_teams - 1), token_team = int(threadIdx.y) / head_teams;
  // A lane or team past the last chunk, token or head takes another one, so that it takes part in the shuffles, and
  // adds and writes nothing.
  const bool active = lane < tiling.chunks;
  const int index = min(lane, tiling.chunks - 1);
  const auto chunk = Chunk<I>::template of<V>(p, tiling, index);
  const Norm<K> norm(a, tiling, kQ);  // q and k have one head_dim
  const auto weights = norm.weights(part.side, chunk);
  Numbers<A, V> terms{};
  for (int i = 0; i < 2 * V; i++) totals[i][thread] = 0.0;
  int steps = 0;
  const auto add_terms = [&] {
    for (int i = 0; i < 2 * V; i++) totals[i][thread] += double(terms.of[i]);
    terms = {};
    steps = 0;
  };
  const rope_int seq = p.seq;
  rope_int b = part.begin / seq, s = part.begin - b * seq, step = token_team;
  for (rope_int token_at = part.begin; token_at < part.end; token_at += token_teams) {
    const bool inside = token_at + token_team < part.end;
    if (inside) s += step, step = token_teams;
    while (s >= seq) s -= seq, b++;
    const Token token(a, tiling, b, s);
    const auto at = part.heads_of(token);
    Elements<T, V> x[at_once], g[at_once];
    const auto head_at = [&](I first, int i) { return min(first + i * head_teams, part.heads - 1); };
    const auto read_heads = [&](I first) {
      for (int i = 0; i < at_once; i++) {
        const I head = head_at(first, i);
        g[i] = at.g.read(head, chunk);
        x[i] = at.x.read(head, chunk);
      }
    };
    read_heads(head_team);
    Angles<K> angles(a, token, index, chunk.rotated);
    int taken = 0;
    for (I first = head_team;;) {
      Numbers<A, V> back[at_once];  // g in the formulas of ../args.h
      A products[2 * at_once];      // of each head: the sum of x^2, and that of g w x
      for (int i = 0; i < at_once; i++) {
        back[i] = numbers_of(g[i]);
        if (chunk.rotated) angles.rotate(back[i], head_at(first, i));
        const auto numbers = numbers_of(x[i]);
        const A squares = dot(numbers, numbers, chunk.whole()),
                product = dot(back[i], product_of(numbers, weights), chunk.whole());
        products[2 * i] = active ? squares : A(0);
        products[2 * i + 1] = active ? product : A(0);
      }
      sum_over_lanes(products);
      for (int i = 0; i < at_once; i++) {
        const I head = first + i * head_teams;
        if (!active || !inside || head >= part.heads) break;
        forget_numbers(x[i], uint32_t(tiling.vector) >> 31);
        const auto y =
            norm.gradient(numbers_of(x[i]), back[i], weights, norm.scale(products[2 * i]), products[2 * i + 1], terms);
        at.out.write(head, chunk, rounded<T, V>(y));
      }
      first += at_once * head_teams;
      taken += at_once;
      const bool last = first >= part.heads + head_team;
      if ((at_once > 1 || last || taken % tiling.at_once == 0) && ++steps == kSteps) add_terms();
      if (last) break;
      read_heads(first);
    }
  }
  add_terms();
  __syncthreads();
  if (!active) return;
  for (int i = int(threadIdx.y); i < 2 * V; i += int(blockDim.y)) {
    if (i >= V && !chunk.whole()) break;
    double sum = 0.0;
    for (int team = 0; team < int(blockDim.y); team++) sum += totals[i][team * lanes + lane];
    sums[part.first_sum + chunk.template channel<V>(i)] = sum;
  }
  let_next_kernel_begin();
}

// The threads of a thread block share a group: a warp a wide head, or more threads all heads of a token. A thread takes
// the same channels of all groups, so each sum of a part belongs to one thread. If the sums are those of all heads and
// fit in shared memory, they are there.
template <typename K, int threads>
__global__ void __launch_bounds__(threads, threads == kWarp ? 12 : kBackwardThreadBlocks)
    norm_group_backward_kernel(const __grid_constant__ NormBackwardArgs n, const __grid_constant__ Tiling tiling,
                               double* sums) {
  using A = typename K::A;
  using I = typename K::I;
  constexpr int V = K::V;
  constexpr bool all_heads = threads > kWarp;
  const RotateArgs& a = n.rotate;
  wait_for_previous_kernel();
  const Part<K> part{n, tiling};
  const GroupThreads<threads> own{!all_heads};
  const Norm<K> norm(a, tiling, part.side);
  const I head_dim = I(part.params.head_dim), step = all_heads ? part.heads : I(1);  // step: the heads of a group
  double* const of_part = sums + part.first_sum;
  double* const of_channels = all_heads && part.parts.channels <= kSharedSums ? dynamic_shared : of_part;
  for (rope_int token_at = part.begin; token_at < part.end; token_at++) {
    const Token token(a, tiling, token_at / a.params.seq, token_at % a.params.seq);
    const auto at = part.heads_of(token);
    for (I first = 0; first < part.heads; first += step) {
      const bool begins = token_at == part.begin && first == 0;  // then the sums hold nothing yet
      double products[2] = {0.0, 0.0};
      A scale = A(0);
#pragma unroll 1
      for (int pass = 0; pass < 2; pass++) {  // the first pass computes the products, the second one the gradients
        for (int index = own.x; index < tiling.chunks; index += own.xs) {
          const auto c = Chunk<I>::template of<V>(a.params, tiling, index);
          Angles<K> angles(a, token, index, c.rotated);
          for (I head = first + own.y; head < first + step; head += own.ys) {
            auto g = numbers_of(at.g.read(head, c));
            const auto x = numbers_of(at.x.read(head, c));
            if (c.rotated) angles.rotate(g, head);
            const auto weights = norm.weights(part.side, c, head);
            if (pass == 0) {
              products[0] += dot(x, x, c.whole());
              products[1] += dot(g, product_of(x, weights), c.whole());
              continue;
            }
            Numbers<A, V> terms{};
            const auto y = norm.gradient(x, g, weights, scale, A(products[1]), terms);
            at.out.write(head, c, rounded<typename K::T, V>(y));
            for (int i = 0; i < 2 * V; i++) {
              if (i >= V && !c.whole()) break;
              double& sum = of_channels[(all_heads ? head * head_dim : 0) + c.template channel<V>(i)];
              sum = begins ? double(terms.of[i]) : sum + double(terms.of[i]);
            }
          }
        }
        if (pass == 0) {
          own.sum(products);
          scale = norm.scale(A(products[0]));
        }
      }
    }
  }
  if (of_channels != of_part) {
    __syncthreads();
    for (int i = own.thread; i < part.parts.channels; i += threads) of_part[i] = of_channels[i];
  }
  let_next_kernel_begin();
}

// Writes the gradients of the weights: the sums of the parts. A thread takes every kSumTeams-th part of one channel;
// blockIdx.y is the side.
__global__ void __launch_bounds__(kSumChannels* kSumTeams)
    sum_parts_kernel(const __grid_constant__ NormBackwardArgs n, const __grid_constant__ Tiling tiling,
                     const double* sums, void* q_gradient, void* k_gradient) {
  __shared__ double of_teams[kSumTeams][kSumChannels];
  wait_for_previous_kernel();
  const int side = int(blockIdx.y), team = int(threadIdx.y);
  const Parts &q = tiling.parts[kQ], &parts = tiling.parts[side];
  if (side != kQ) sums += q.count * q.channels;
  const rope_int channel = rope_int(blockIdx.x) * kSumChannels + threadIdx.x;
  double sum = 0.0;
  if (channel < parts.channels) {
#pragma unroll 8
    for (rope_int part = team; part < parts.count; part += kSumTeams) sum += sums[part * parts.channels + channel];
  }
  of_teams[team][threadIdx.x] = sum;
  __syncthreads();
  if (team != 0 || channel >= parts.channels) return;
  for (int other = 1; other < kSumTeams; other++) sum += of_teams[other][threadIdx.x];
  const auto store = [&](auto tag) {
    round_to(sum, static_cast<decltype(tag)*>(side == kQ ? q_gradient : k_gradient)[channel]);
  };
  const DType dtype = n.rotate.sides[side].weight_dtype;
  dtype == DType::kHalf       ? store(__half())
  : dtype == DType::kBFloat16 ? store(__nv_bfloat16())
  : dtype == DType::kFloat    ? store(float())
                              : store(double());
  let_next_kernel_begin();
}

}  // namespace

cudaError_t norm_backward(const NormBackwardArgs& n, const Plan& plan, double* sums, void* const (&weight_grad)[2],
                          Queue queue) {
  const RotateArgs& a = n.rotate;
  const auto with_kernel = [&](auto shape) {
    using S = decltype(shape);
    using K = Policy<S, true, true>;
    const auto start_parts = [&](auto kernel) { return start(plan, queue, kernel, n, sums); };
    if constexpr (has_usual_kernels(sizeof(typename S::T), S::V)) {
      if (!plan.general) return start_parts(norm_backward_kernel<Policy<S, false, true>>);
    }
    if (a.params.sides[kQ].norm == kAllHeads) return start_parts(norm_group_backward_kernel<K, kThreads>);
    if (!plan.one_step) return start_parts(norm_group_backward_kernel<K, kWarp>);
    return start_parts(norm_backward_kernel<K>);
  };
  if (plan.grid.x != 0) {
    if (const cudaError_t error = with_shape(a, plan.tiling, with_kernel)) return error;
  }
  const Parts &q = plan.tiling.parts[kQ], &k = plan.tiling.parts[kK];
  Plan sum{plan.tiling};
  sum.block = {kSumChannels, kSumTeams, 1};
  sum.grid = {ceil_div(std::max(q.channels, k.channels), kSumChannels), 2, 1};
  if (sum.grid.x == 0) return cudaSuccess;
  return start(sum, queue, sum_parts_kernel, n, sums, weight_grad[kQ], weight_grad[kK]);
}

}  // namespace rope::cuda
