// The kernels of the backward of norm and rotation. They write the gradients of q and k, and the sums of each part: the
// gradient of a weight from the tokens of a thread block alone. A last kernel adds up the parts.
#include "general.cuh"
#include "usual.cuh"

namespace rope::cuda {
namespace {

// The part that a thread block takes: some tokens of q or of k. Token i is the token i % seq of sequence i / seq.
template <typename Integer>
struct PartRange {
  using I = Integer;
  const Parts (&all)[2];
  const I tokens, seq;
  const int side = blockIdx.x < all[kQ].count ? kQ : kK;
  const Parts& parts = all[side];
  const rope_int index = blockIdx.x - (side == kQ ? 0 : all[kQ].count);
  const I begin = I(index * parts.tokens), end = min(begin + I(parts.tokens), tokens);

  // Returns the sums of the part. All are [parts of q, channels of q], then [parts of k, channels of k].
  ROPE_FN double* sums_of(double* sums) const {
    return sums + (side == kQ ? 0 : all[kQ].count * all[kQ].channels) + index * parts.channels;
  }
};

// How a usual kernel reads and writes the heads of its part. GeneralPart has the same functions. by_block: the weights
// have no offset
template <typename K, bool by_block>
struct UsualPart : PartRange<int> {
  using T = typename K::T;
  static constexpr int V = K::V;
  const UsualBackwardArgs& n;
  const UsualArgs& a = n.rotate;
  const int heads = a.ends[side] - (side == kQ ? 0 : a.ends[kQ]), chunks = a.chunks, heads_of_step = 2;
  const bool all_heads = a.all_heads;
  const UsualChunk chunk = chunk_at(a, min(int(threadIdx.x), chunks - 1));
  const float per_channel = a.per_channel[side], eps = a.norm_eps;

  ROPE_FN explicit UsualPart(const UsualBackwardArgs& n) : PartRange{n.parts, n.tokens, n.rotate.seq}, n(n) {}
  ROPE_FN UsualToken<K> token(int b, int s) const { return {a, chunk, b, s}; }
  // Returns the sum of channel i of the chunk.
  ROPE_FN double& sum_of(double* sums, int head, int i) const {
    const int first = all_heads ? head * (2 * a.half + a.others) : 0;
    return sums_of(sums)[(first + (i < V ? chunk.at[0] : chunk.at[1])) * V + i % V];
  }
  ROPE_FN Numbers<float, V> weights(int head) const {
    Numbers<float, V> w;
    const auto read = [&](auto tag) {
      const auto* const from = static_cast<const decltype(tag)*>(a.weights[side]) + head * a.weight_stride * V;
      for (int k = 0; k < 2; k++) read_shared<V>(from + chunk.at[k] * V, 1, true, w.of + k * V);
    };
    a.wide_weights ? read(float()) : read(T());
    for (int i = 0; i < 2 * V && !by_block; i++) w.of[i] += a.weight_offset;
    return w;
  }
  ROPE_FN void multiply(const UsualToken<K>&, int, Numbers<float, V>&) const {}  // by the factor of a head
  ROPE_FN void read(const UsualToken<K>& token, int head, Elements<T, V>& g, Elements<T, V>& x) const {
    g = token.read(a.sides[side].in, a.sides[side].in_strides, head);
    x = token.read(n.x[side].in, n.x[side].in_strides, head);
  }
  ROPE_FN void write(const UsualToken<K>& token, int head, const Numbers<float, V>& y) const {
    token.write(a.sides[side].out, a.sides[side].out_strides, head, rounded<T, V>(y));
  }
};

template <typename S>
struct GeneralPart : PartRange<rope_int> {
  using T = typename S::T;
  using A = typename S::A;
  static constexpr int V = S::V;
  const Args& a;
  const Tiling& t;
  const Side& params = a.sides[side];
  const rope_int heads = params.heads;
  const bool all_heads = params.norm == kAllHeads;
  const int chunks = t.chunks, heads_of_step = a.source == kTableByHead ? 1 : 2;
  Chunk<V, rope_int> chunk = chunk_at<V>(a, t, min(int(threadIdx.x), chunks - 1));
  const A per_channel = A(t.per_channel[side]), eps = A(a.norm_eps);

  ROPE_FN GeneralPart(const Args& a, const Tiling& t) : PartRange{t.parts, a.batch * a.seq, a.seq}, a(a), t(t) {}
  ROPE_FN void go(int to) { chunk = chunk_at<V>(a, t, to); }
  ROPE_FN GeneralToken<S> token(rope_int b, rope_int s) const { return {a, t, chunk, b, s}; }
  ROPE_FN double& sum_of(double* sums, rope_int head, int i) const {
    return sums_of(sums)[(all_heads ? head * params.head_dim : 0) + channel_of(chunk, i)];
  }
  ROPE_FN Numbers<A, V> weights(rope_int head) const { return weights_of<S>(a, side, chunk, head); }
  ROPE_FN void multiply(const GeneralToken<S>& token, rope_int head, Numbers<A, V>& n) const {
    if (!params.factor) return;
    for (A& number : n.of) number *= token.factor(params, head);
  }
  ROPE_FN void read(const GeneralToken<S>& token, rope_int head, Elements<T, V>& g, Elements<T, V>& x) const {
    g = token.template heads<const T>(params.in, params.in_strides).read(head, chunk);
    x = token.template heads<const T>(params.before, params.before_strides).read(head, chunk);
  }
  ROPE_FN void write(const GeneralToken<S>& token, rope_int head, const Numbers<A, V>& y) const {
    token.template heads<T>(params.out, params.out_strides).write(head, chunk, rounded<T, V>(y));
  }
};

// A team holds a head at once. A thread adds up the terms of a few heads in the arithmetic type, and these sums in
// double, in shared memory.
template <typename K, typename P, typename I = typename P::I>
ROPE_FN void take_heads(const P& part, double* sums) {
  using A = typename K::A;
  constexpr int V = K::V, kSteps = 4;  // steps whose terms are added up in the arithmetic type
  __shared__ double totals[2 * V][kThreads];
  const int lane = int(threadIdx.x), lanes = int(blockDim.x), thread = int(threadIdx.y) * lanes + lane;
  const int head_teams = part.parts.teams, token_teams = int(blockDim.y) / head_teams;
  const int head_team = int(threadIdx.y) & (head_teams - 1), token_team = int(threadIdx.y) / head_teams;
  // A lane or team past the last chunk, token or head takes another one, so that it takes part in the shuffles, and
  // adds and writes nothing.
  const bool active = lane < part.chunks;
  const auto weights = part.weights(0);
  Numbers<A, V> terms{};
  for (int i = 0; i < 2 * V; i++) totals[i][thread] = 0.0;
  int steps = 0;
  const auto add_terms = [&] {
    for (int i = 0; i < 2 * V; i++) totals[i][thread] += double(terms.of[i]);
    terms = {};
    steps = 0;
  };
  I b = part.begin / part.seq, s = part.begin - b * part.seq, step = token_team;
  for (I token_at = part.begin; token_at < part.end; token_at += token_teams) {
    const bool inside = token_at + token_team < part.end;
    if (inside) s += step, step = token_teams;
    while (s >= part.seq) s -= part.seq, b++;
    auto token = part.token(b, s);
    Elements<typename K::T, V> g, x;
    I head = head_team;
    const auto read_head = [&] { part.read(token, min(head, part.heads - 1), g, x); };
    read_head();
    token.arrive(part.chunk.rotated, min(head, part.heads - 1));
    for (int taken = 1;; taken++) {
      auto back = numbers_of(g);  // g in the formulas of ../args.h
      if (part.chunk.rotated) token.rotate(back);
      part.multiply(token, min(head, part.heads - 1), back);
      const auto numbers = numbers_of(x);
      A products[2] = {dot(numbers, numbers, is_whole(part.chunk)),
                       dot(back, product_of(numbers, weights), is_whole(part.chunk))};
      for (A& product : products) product = active ? product : A(0);
      sum_over_lanes(products);
      if (active && inside && head < part.heads) {
        const A scale = inverse_root(fma(products[0], part.per_channel, part.eps));
        part.write(token, head, gradient(numbers, back, weights, scale, products[1] * part.per_channel, terms));
      }
      head += head_teams;
      const bool last = head >= part.heads + head_team;
      if ((last || taken % part.heads_of_step == 0) && ++steps == kSteps) add_terms();
      if (last) break;
      read_head();
      token.go(part.chunk.rotated, min(head, part.heads - 1));
    }
  }
  add_terms();
  __syncthreads();
  if (!active) return;
  for (int i = int(threadIdx.y); i < 2 * V; i += int(blockDim.y)) {
    if (i >= V && !is_whole(part.chunk)) break;
    double sum = 0.0;
    for (int team = 0; team < int(blockDim.y); team++) sum += totals[i][team * lanes + lane];
    part.sum_of(sums, 0, i) = sum;
  }
}

// The threads of a thread block take one group after another. If `held`, each thread holds that many heads of a group,
// and the sums of their channels. Otherwise it reads the group twice, and its sums are those of the part. Both take a
// channel of all groups in one thread, and add in the same order.
template <typename K, int held, typename P, typename I = typename P::I>
ROPE_FN void take_groups(P& part, double* sums) {
  using A = typename K::A;
  constexpr int V = K::V, n = held ? held : 1;
  const I of_group = part.all_heads ? part.heads : 1;
  GroupThreads own{false};
  double totals[n][2 * V] = {};
  Elements<typename K::T, V> g[n], x[n];
  // Calls f(head, j) for the chunks of this thread in a group. A thread that holds them has them in g[j] and x[j].
  const auto for_chunks = [&](I first, auto&& f) {
    if constexpr (held) {
#pragma unroll
      for (int j = 0; j < held; j++) {
        const I head = first + own.y + j * own.ys;
        if (own.x < part.chunks && head < first + of_group) f(head, j);
      }
    } else {
      for (int index = own.x; index < part.chunks; index += own.xs) {
        part.go(index);
        for (I head = first + own.y; head < first + of_group; head += own.ys) f(head, 0);
      }
    }
  };
  const auto write_totals = [&](I head, int j) {
    for (int i = 0; i < 2 * V; i++) {
      if (i < V || is_whole(part.chunk)) part.sum_of(sums, head, i) = totals[j][i];
    }
  };
  if (!held) for_chunks(0, write_totals);
  for (I at = part.begin; at < part.end; at++) {
    auto token = part.token(at / part.seq, at % part.seq);
    for (I first = 0; first < part.heads; first += of_group) {
      const auto rotated_back = [&](I head, int j) {  // g in the formulas of ../args.h
        if (!held) part.read(token, head, g[j], x[j]);
        token.go(part.chunk.rotated, head);
        auto back = numbers_of(g[j]);
        if (part.chunk.rotated) token.rotate(back);
        part.multiply(token, head, back);
        return back;
      };
      if (held) {
        for_chunks(first, [&](I head, int j) { part.read(token, head, g[j], x[j]); });
        token.arrive(part.chunk.rotated, first);
      }
      double products[2] = {0.0, 0.0};
      for_chunks(first, [&](I head, int j) {
        const auto back = rotated_back(head, j), numbers = numbers_of(x[j]);
        products[0] += double(dot(numbers, numbers, is_whole(part.chunk)));
        products[1] += double(dot(back, product_of(numbers, part.weights(head)), is_whole(part.chunk)));
      });
      own.sum(products);
      const A scale = inverse_root(fma(A(products[0]), part.per_channel, part.eps));
      for_chunks(first, [&](I head, int j) {
        const auto back = rotated_back(head, j);
        Numbers<A, V> terms{};
        const A mean = A(products[1]) * part.per_channel;
        part.write(token, head, gradient(numbers_of(x[j]), back, part.weights(head), scale, mean, terms));
        for (int i = 0; i < 2 * V; i++) {
          if (i < V || is_whole(part.chunk)) (held ? totals[j][i] : part.sum_of(sums, head, i)) += double(terms.of[i]);
        }
      });
    }
  }
  if (held) for_chunks(0, write_totals);
}

template <typename K>
__global__ void __launch_bounds__(kThreads, 4)
    heads_backward_kernel(const __grid_constant__ UsualBackwardArgs n, double* sums) {
  wait_for_previous_kernel();
  take_heads<K>(UsualPart<K, false>(n), sums);
  let_next_kernel_begin();
}
// A bound of 384 threads leaves each 168 registers: 12 warps fit, and not 8. Other types than bfloat16 would spill.
template <typename K>
__global__ void __launch_bounds__(std::is_same_v<typename K::T, __nv_bfloat16> ? 384 : kBackwardGroupThreads)
    groups_backward_kernel(const __grid_constant__ UsualBackwardArgs n, double* sums) {
  wait_for_previous_kernel();
  UsualPart<K, true> part(n);
  take_groups<K, kHeldChannels / (2 * K::V)>(part, sums);
  let_next_kernel_begin();
}
template <typename K>
__global__ void __launch_bounds__(kBackwardGroupThreads, 1)
    general_backward_kernel(const __grid_constant__ Args a, const __grid_constant__ Tiling tiling, double* sums) {
  wait_for_previous_kernel();
  GeneralPart<K> part(a, tiling);
  part.all_heads || part.chunks > kWarp ? take_groups<K, 0>(part, sums) : take_heads<K>(part, sums);
  let_next_kernel_begin();
}

// Writes the gradients of the weights: the sums of the parts. A thread takes every kSumTeams-th part of one channel;
// blockIdx.y is the side.
__global__ void __launch_bounds__(kSumChannels* kSumTeams)
    sum_parts_kernel(const __grid_constant__ Parts q, const __grid_constant__ Parts k, const double* sums, void* q_grad,
                     void* k_grad, DType q_dtype, DType k_dtype) {
  __shared__ double of_teams[kSumTeams][kSumChannels];
  wait_for_previous_kernel();
  const int side = int(blockIdx.y), team = int(threadIdx.y);
  const Parts& parts = side == kQ ? q : k;
  if (side == kK) sums += q.count * q.channels;
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
    round_to(sum, static_cast<decltype(tag)*>(side == kQ ? q_grad : k_grad)[channel]);
  };
  const DType dtype = side == kQ ? q_dtype : k_dtype;
  dtype == DType::kHalf       ? store(__half())
  : dtype == DType::kBFloat16 ? store(__nv_bfloat16())
  : dtype == DType::kFloat    ? store(float())
                              : store(double());
  let_next_kernel_begin();
}

}  // namespace

cudaError_t norm_backward(const Args& a, const Plan& plan, double* sums, void* const (&weight_grad)[2], Queue queue) {
  const auto start_parts = [&](auto shape) {
    using S = decltype(shape);
    if constexpr (S::usual) {
      using K = Usual<S, kAnySource | kNorm>;
      const auto kernel = plan.by_block ? groups_backward_kernel<K> : heads_backward_kernel<K>;
      if (!plan.general) return start(plan.grid, plan.block, queue, kernel, pack_backward(a, plan.tiling), sums);
    }
    return start(plan.grid, plan.block, queue, general_backward_kernel<S>, a, plan.tiling, sums);
  };
  if (plan.grid.x != 0) {
    if (const cudaError_t error = with_shape(a, plan.tiling, start_parts)) return error;
  }
  const Parts &q = plan.tiling.parts[kQ], &k = plan.tiling.parts[kK];
  const rope_int blocks = ceil_div(std::max(q.channels, k.channels), kSumChannels);
  if (blocks == 0) return cudaSuccess;
  return start({blocks, 2, 1}, {kSumChannels, kSumTeams, 1}, queue, sum_parts_kernel, q, k, sums, weight_grad[kQ],
               weight_grad[kK], a.sides[kQ].weight_dtype, a.sides[kK].weight_dtype);
}

}  // namespace rope::cuda
