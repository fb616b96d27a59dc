// The kernels of the backward of norm and rotation. They write the gradients of q and k, and the sums of each part: the
// gradient of a weight from the tokens of a thread block alone. A last kernel adds up the parts.
#include "general.cuh"
#include "usual.cuh"

namespace rope::cuda {
namespace {

// Lets the next kernel begin. That may be sum_parts_kernel, which waits until this one has ended.
ROPE_FN void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

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
  const UsualSide& gradients = a.sides[side];
  const int heads = gradients.heads, chunks = a.chunks;
  const bool all_heads = a.all_heads;
  const UsualChunk chunk = chunk_at(a, int(threadIdx.x));
  const float per_channel = gradients.per_channel, eps = a.norm_eps;

  ROPE_FN explicit UsualPart(const UsualBackwardArgs& n) : PartRange{n.parts, n.tokens, n.rotate.seq}, n(n) {}
  ROPE_FN UsualToken<K> token(int b, int s) const { return {a, chunk, bool(chunk.rotated), b, s}; }
  // Computes the angles of a head. first: those of the token are not computed yet
  ROPE_FN void arrive(UsualToken<K>& token, int head, bool first = false) const {
    if (first || (by_block && a.table_head_stride)) token.arrive(head), token.wait();
  }
  // Returns the sum of channel i of the chunk.
  ROPE_FN double& sum_of(double* sums, int head, int i) const {
    const int first = all_heads ? head * (2 * a.half + a.others) : 0;
    return sums_of(sums)[(first + (i < V ? chunk.at[0] : chunk.at[1])) * V + i % V];
  }
  ROPE_FN Numbers<float, V> weights(int head) const {
    return Weights<T, V>(a, gradients, chunk, head).template numbers<by_block>(a, gradients);
  }
  ROPE_FN void multiply(const UsualToken<K>&, int, Numbers<float, V>&) const {}  // by the factor of a head
  ROPE_FN void read(const UsualToken<K>& token, int head, Elements<T, V>& g, Elements<T, V>& x) const {
    g = UsualHeads<T, V>(gradients.in, gradients.in_strides, token.b, token.s, chunk).read(head);
    x = UsualHeads<T, V>(n.x[side].in, n.x[side].in_strides, token.b, token.s, chunk).read(head);
  }
  ROPE_FN void write(const UsualToken<K>& token, int head, const Numbers<float, V>& y) const {
    UsualHeads<T, V>(gradients.out, gradients.out_strides, token.b, token.s, chunk).write(head, rounded<T, V>(y));
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
  const int chunks = t.chunks;
  Chunk<V, rope_int> chunk = chunk_at<V>(a, t, min(int(threadIdx.x), chunks - 1));
  const A per_channel = A(t.per_channel[side]), eps = A(a.norm_eps);

  ROPE_FN GeneralPart(const Args& a, const Tiling& t) : PartRange{t.parts, a.batch * a.seq, a.seq}, a(a), t(t) {}
  ROPE_FN void take_chunk(int index) { chunk = chunk_at<V>(a, t, index); }
  ROPE_FN GeneralToken<S> token(rope_int b, rope_int s) const { return {a, t, chunk, b, s}; }
  ROPE_FN void arrive(GeneralToken<S>& token, rope_int head, bool = false) const { token.arrive(chunk.rotated, head); }
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
  constexpr int V = K::V, kTerms = 8;  // heads whose terms are added up in the arithmetic type
  const int lane = int(threadIdx.x), lanes = int(blockDim.x);
  double* const totals = numbers_of_thread(int(threadIdx.y) * lanes + lane, 2 * V);
  const int head_teams = part.parts.teams, token_teams = int(blockDim.y) / head_teams;
  const int head_team = int(threadIdx.y) & (head_teams - 1), token_team = int(threadIdx.y) / head_teams;
  // A lane or team past the last chunk, token or head takes another one, so that it takes part in the shuffles, and
  // adds and writes nothing.
  const bool active = lane < part.chunks;
  const auto weights = part.weights(0);
  Numbers<A, V> terms{};
  for (int i = 0; i < 2 * V; i++) totals[i] = 0.0;
  const auto add_terms = [&] {
    for (int i = 0; i < 2 * V; i++) totals[i] += double(terms.of[i]);
    terms = {};
  };
  I b = part.begin / part.seq, s = part.begin - b * part.seq, step = token_team;
  int taken = 0;
  for (I token_at = part.begin; token_at < part.end; token_at += token_teams) {
    const bool inside = token_at + token_team < part.end;
    if (inside) s += step, step = token_teams;
    while (s >= part.seq) s -= part.seq, b++;
    auto token = part.token(b, s);
    Elements<typename K::T, V> g, x;
    I head = head_team;
    const auto read_head = [&] { part.read(token, min(head, part.heads - 1), g, x); };
    read_head();
    part.arrive(token, min(head, part.heads - 1), true);
    for (;;) {
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
      if (++taken % kTerms == 0) add_terms();
      if (last) break;
      read_head();
      part.arrive(token, min(head, part.heads - 1));
    }
  }
  add_terms();
  __syncthreads();
  if (!active) return;
  for (int i = int(threadIdx.y); i < 2 * V; i += int(blockDim.y)) {
    if (i >= V && !is_whole(part.chunk)) break;
    double sum = 0.0;
    for (int team = 0; team < int(blockDim.y); team++) sum += numbers_of_thread(team * lanes + lane, 2 * V)[i];
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
  double* const totals = numbers_of_thread(own.thread, held * 2 * V);
  for (int i = 0; i < held * 2 * V; i++) totals[i] = 0.0;
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
        part.take_chunk(index);
        for (I head = first + own.y; head < first + of_group; head += own.ys) f(head, 0);
      }
    }
  };
  const auto write_totals = [&](I head, int j) {
    for (int i = 0; i < 2 * V; i++) {
      if (i < V || is_whole(part.chunk)) part.sum_of(sums, head, i) = held ? totals[j * 2 * V + i] : 0.0;
    }
  };
  if (!held) for_chunks(0, write_totals);
  I b = part.begin / part.seq, s = part.begin - b * part.seq;
  for (I at = part.begin; at < part.end; at++, s++) {
    if (s == part.seq) s = 0, b++;
    auto token = part.token(b, s);
    for (I first = 0; first < part.heads; first += of_group) {
      const auto rotated_back = [&](I head, int j) {  // g in the formulas of ../args.h
        if (!held) part.read(token, head, g[j], x[j]);
        part.arrive(token, head);
        auto back = numbers_of(g[j]);
        if (part.chunk.rotated) token.rotate(back);
        part.multiply(token, head, back);
        return back;
      };
      if (held) {
        for_chunks(first, [&](I head, int j) { part.read(token, head, g[j], x[j]); });
        part.arrive(token, first, true);
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
          if (i < V || is_whole(part.chunk))
            (held ? totals[j * 2 * V + i] : part.sum_of(sums, head, i)) += double(terms.of[i]);
        }
      });
    }
  }
  if (held) for_chunks(0, write_totals);
}

template <typename K>
__global__ void __launch_bounds__(kThreads, 3)
    heads_backward_kernel(const __grid_constant__ UsualBackwardArgs n, double* sums) {
  take_heads<K>(UsualPart<K, false>(n), sums);
  let_next_kernel_begin();
}
// 12 warps on a multiprocessor leave a thread 168 registers, which are too few for the code of sm_110 and sm_120.
#if __CUDA_ARCH__ >= 1100
constexpr int kGroupsBound = kBackwardGroupThreads;
#else
constexpr int kGroupsBound = kHeldThreads;
#endif
template <typename K>
__global__ void __launch_bounds__(kGroupsBound)
    groups_backward_kernel(const __grid_constant__ UsualBackwardArgs n, double* sums) {
  UsualPart<K, true> part(n);
  take_groups<K, kHeldChannels / (2 * K::V)>(part, sums);
  let_next_kernel_begin();
}
template <typename K>
__global__ void __launch_bounds__(kBackwardGroupThreads, 1)
    general_backward_kernel(const __grid_constant__ Args a, const __grid_constant__ Tiling tiling, double* sums) {
  GeneralPart<K> part(a, tiling);
  part.all_heads || part.chunks > kWarp ? take_groups<K, 0>(part, sums) : take_heads<K>(part, sums);
}

// Writes the gradients of the weights: the sums of the parts. A thread takes every kSumTeams-th part of one channel;
// blockIdx.y is the side.
__global__ void __launch_bounds__(kSumChannels* kSumTeams)
    sum_parts_kernel(const __grid_constant__ Parts q, const __grid_constant__ Parts k, const double* sums, void* q_grad,
                     void* k_grad, DType q_dtype, DType k_dtype) {
  __shared__ double of_teams[kSumTeams][kSumChannels];
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();  // it is launched as a dependent kernel
#endif
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
}

}  // namespace

cudaError_t architecture(int& found) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, sum_parts_kernel);
  found = attributes.ptxVersion;
  return error;
}

cudaError_t norm_backward(const Args& a, const Plan& plan, double* sums, void* const (&weight_grad)[2],
                          cudaStream_t stream, bool dependent) {
  const Launch launch{stream, plan.grid, plan.block, plan.shared};
  const auto start_parts = [&](auto shape) {
    using S = decltype(shape);
    if constexpr (S::usual) {
      using K = Usual<S, kBackward | kNorm>;
      const auto kernel = plan.by_block ? groups_backward_kernel<K> : heads_backward_kernel<K>;
      if (!plan.general) return start(launch, kernel, pack_backward(a, plan.tiling), sums);
    }
    return start(launch, general_backward_kernel<S>, a, plan.tiling, sums);
  };
  if (plan.grid.x != 0) {
    if (const cudaError_t error = with_shape(a, plan.tiling, start_parts)) return error;
  }
  const Parts &q = plan.tiling.parts[kQ], &k = plan.tiling.parts[kK];
  const rope_int blocks = ceil_div(std::max(q.channels, k.channels), kSumChannels);
  if (blocks == 0) return cudaSuccess;
  const Launch last{stream, {blocks, 2, 1}, {kSumChannels, kSumTeams, 1}, 0, dependent};
  return start(last, sum_parts_kernel, q, k, sums, weight_grad[kQ], weight_grad[kK], a.sides[kQ].weight_dtype,
               a.sides[kK].weight_dtype);
}

}  // namespace rope::cuda
