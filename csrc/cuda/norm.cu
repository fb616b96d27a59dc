// The kernels that apply the RMS norm and then rotate, and the kernels of their backward. The first ones can write k
// and v to a cache.
//
// If each head is normalised by itself, its team has a power of two of threads, at most a warp, which sum over it with
// shuffles. There is a kernel for heads that a team holds at once, a chunk for each lane (see Tiling::one_step), and
// one for wider heads, which a warp goes over in steps of a chunk for each lane. Every lane of a warp takes part in
// every shuffle: a lane past the last token, head or chunk reaches it too, but writes nothing. If all heads of a token
// are normalised together, a thread block sums over them. ../args.h has the formulas of the backward, see
// NormBackwardArgs.
#include "device.cuh"

extern __shared__ double dynamic_shared[];

namespace rope::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

// Adds up what the lanes of a team give for each of n sums, and returns the results to each of them.
template <typename A, int n>
ROPE_FN void sum_over_lanes(A (&sums)[n], int team = int(blockDim.x)) {
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    if (lanes == 8 && team <= 8) break;  // a test at every step would take longer than the steps that it saves
#pragma unroll
    for (int i = 0; i < n; i++) {
      const A other = __shfl_xor_sync(kAllLanes, sums[i], lanes);
      if (lanes < team) sums[i] += other;
    }
  }
}

// Adds up what the threads of a thread block give for each of n sums, and returns the results to each of them.
template <int threads, int n>
ROPE_FN void sum_over_thread_block(double (&sums)[n]) {
  __shared__ double of_warps[n][threads / kWarp];
  const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
  sum_over_lanes(sums, kWarp);
  __syncthreads();  // all threads have read the sums of the call before this one
#pragma unroll
  for (int i = 0; i < n; i++) {
    if (thread % kWarp == 0) of_warps[i][thread / kWarp] = sums[i];
    sums[i] = 0.0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; i++) {
    for (const double of_warp : of_warps[i]) sums[i] += of_warp;
  }
}

// Returns the scale of a head: 1 / sqrt(mean + eps).
ROPE_FN float scale_of(float mean_and_eps) {
  const float root = rsqrtf(mean_and_eps);
  // rsqrtf may be off by 2 ulp. A step of Newton's method leaves less than one. If the argument is 0 or infinite, the
  // error is NaN; fminf then returns its other argument, which changes neither an infinite root nor a root of 0.
  const float error = fminf(fma(-mean_and_eps * root, root, 1.0f), 1e-6f);
  return fma(0.5f * root, error, root);
}
ROPE_FN double scale_of(double mean_and_eps) { return 1.0 / ::sqrt(mean_and_eps); }
// Returns the same with the bits of torch.rsqrt.
ROPE_FN float eager_scale_of(float mean_and_eps) { return rsqrtf(mean_and_eps); }
ROPE_FN double eager_scale_of(double mean_and_eps) { return scale_of(mean_and_eps); }

// Returns this lane's share of the dot product of two heads: that of its chunk. The caller adds up the lanes of the
// team with sum_over_lanes(). For a wide head it first adds up the steps of a lane, in double.
template <typename A, int V>
ROPE_FN A dot(const Numbers<A, V>& x, const Numbers<A, V>& y, bool whole) {
  A first[2] = {A(0), A(0)}, second[2] = {A(0), A(0)};
#pragma unroll
  for (int i = 0; i < V; i++) {
    first[i % 2] = fma(x.first[i], y.first[i], first[i % 2]);
    second[i % 2] = fma(x.second[i], y.second[i], second[i % 2]);
  }
  return (first[0] + first[1]) + (whole ? second[0] + second[1] : A(0));
}

template <typename A, int V>
ROPE_FN Numbers<A, V> product_of(const Numbers<A, V>& x, const Numbers<A, V>& y) {
  Numbers<A, V> z;
#pragma unroll
  for (int i = 0; i < V; i++) {
    z.first[i] = x.first[i] * y.first[i];
    z.second[i] = x.second[i] * y.second[i];
  }
  return z;
}

template <typename A, int V>
ROPE_FN Numbers<A, V> product_of(const Numbers<A, V>& x, A y) {
  Numbers<A, V> z;
#pragma unroll
  for (int i = 0; i < V; i++) {
    z.first[i] = x.first[i] * y;
    z.second[i] = x.second[i] * y;
  }
  return z;
}

template <typename A, int V>
ROPE_FN void add(Numbers<A, V>& sum, const Numbers<A, V>& x) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    sum.first[i] += x.first[i];
    sum.second[i] += x.second[i];
  }
}

template <typename A, int V>
ROPE_FN void add_product(Numbers<A, V>& sum, const Numbers<A, V>& x, const Numbers<A, V>& y) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    sum.first[i] = fma(x.first[i], y.first[i], sum.first[i]);
    sum.second[i] = fma(x.second[i], y.second[i], sum.second[i]);
  }
}

template <typename A, int V>
ROPE_FN void add_product(Numbers<A, V>& sum, const Numbers<A, V>& x, A y) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    sum.first[i] = fma(x.first[i], y, sum.first[i]);
    sum.second[i] = fma(x.second[i], y, sum.second[i]);
  }
}

// The norm of a head or of all heads of a token, and the steps of its backward, see ../args.h. Each step works on one
// chunk.
// general: the steps may have to be rounded as torch's operators round them. Then `narrow` says that the weights have
// x's dtype, so that torch rounds their products to it.
template <typename T, int V, bool general>
struct Norm {
  using A = arithmetic_t<T>;
  using N = Numbers<A, V>;
  const RotateArgs& a;
  const bool eager;
  const A per_channel, eps;

  ROPE_FN Norm(const RotateArgs& a, const Tiling& tiling, int tensor = 0)
      : a(a),
        eager(general && a.params.rounding != kOnce),
        per_channel(A(tiling.per_channel[tensor])),
        eps(sizeof(A) == 8 ? A(a.norm_eps) : A(a.params.norm_eps)) {}

  ROPE_FN bool narrow(int tensor) const { return (tensor == 0 ? a.q_norm_dtype : a.k_norm_dtype) == a.x_dtype; }

  // Returns the scale, given the sum of the squares.
  ROPE_FN A scale(A squares) const {
    return eager ? eager_scale_of(squares * per_channel + eps) : scale_of(fma(squares, per_channel, eps));
  }

  // Returns the normalised and weighted chunk.
  ROPE_FN N normalised(const N& x, A scale, const N& weights, int tensor) const {
    if (!eager) return product_of(product_of(x, scale), weights);
    return rounded_if(true, product_of(rounded_if(narrow(tensor), product_of(x, scale)), weights));
  }

  // Returns g, given the gradient of the result, rotated back.
  ROPE_FN N rotated_back(const N& gradient) const { return rounded_if(eager, gradient); }

  // Returns this lane's share of the sum of g w x.
  ROPE_FN A product(const N& x, const N& g, const N& weights, int tensor, bool whole) const {
    if (!eager) return dot(g, product_of(x, weights), whole);
    return dot(rounded_if(narrow(tensor), product_of(g, weights)), x, whole);
  }

  // Returns the gradient of x, and adds the terms of the gradient of w. product: the sum of g w x
  ROPE_FN N gradient(const N& x, const N& g, const N& weights, int tensor, A scale, A product, N& terms) const {
    if (eager) {
      const bool round = narrow(tensor);
      const N term = rounded_if(round, product_of(g, rounded_if(round, product_of(x, scale))));
      add(terms, term);
      // what autograd computes for x * rsqrt(mean(x^2) + eps)
      const A of_mean = A(-0.5) * product * (scale * scale * scale) * per_channel;
      N y = product_of(rounded_if(round, product_of(g, weights)), scale);
      add(y, product_of(product_of(x, A(2)), of_mean));
      return y;
    }
    const A scaled_common = -(scale * scale * (product * per_channel)) * scale;
    const N scaled_g = product_of(g, scale);
    add_product(terms, scaled_g, x);
    N y = product_of(scaled_g, weights);
    add_product(y, x, scaled_common);
    return y;
  }

 private:
  ROPE_FN static N rounded_if(bool round, const N& x) {
    if constexpr (general) {
      if (round) return numbers_of(rounded<T, V>(x));
    }
    return x;
  }
};

// Returns the norm weights of a chunk; those of v are 1.
// head: its stride is 0 if all heads have the same weights
template <typename A, int V, typename I>
ROPE_FN Numbers<A, V> weights_of(const RotateArgs& a, int tensor, const Chunk<I>& c, I head = 0) {
  const void* weight = tensor == 0 ? a.q_norm_weight : a.k_norm_weight;
  const DType dtype = tensor == 0 ? a.q_norm_dtype : a.k_norm_dtype;
  const rope_int* strides = tensor == 0 ? a.params.q_norm_weight : a.params.k_norm_weight;
  const rope_int stride = strides[1];
  Numbers<A, V> w;
  if (tensor == 2) {
#pragma unroll
    for (int i = 0; i < V; i++) w.first[i] = w.second[i] = A(1);
    return w;
  }
  const auto get = [&](auto tag) {
    using W = decltype(tag);
    const W* from = static_cast<const W*>(weight) + head * strides[0];
    if (V > 1 && stride == 1 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      read_shared<true, V>(from + c.first, 1, w.first);
      read_shared<true, V>(from + c.second, 1, w.second);
    } else {
      read_shared<false, V>(from + c.first * stride, stride, w.first);
      read_shared<false, V>(from + c.second * stride, stride, w.second);
    }
  };
  if (dtype == DType::kFloat) {
    get(float());
  } else if (dtype == DType::kDouble) {
    if constexpr (sizeof(A) == 8) get(double());
  } else if constexpr (sizeof(A) == 4) {
    if (dtype == DType::kHalf) get(__half());
    if (dtype == DType::kBFloat16) get(__nv_bfloat16());
  }
  return w;
}

// These make the compiler convert elements to numbers again where they are needed next. Otherwise it keeps the numbers,
// which take twice the registers. Each kernel has the way with which nvcc 13.0 spills no register.
// zero: 0, a value that the compiler does not know
template <typename T, int V>
ROPE_FN void forget_numbers(Elements<T, V>& x, uint32_t zero) {
  if constexpr (Vector<T, V>::words) {
#pragma unroll
    for (int i = 0; i < V / 2; i++) x.first.of[i] ^= zero, x.second.of[i] ^= zero;
  }
}
template <typename T, int V>
ROPE_FN void forget_numbers(Elements<T, V>& x) {
  if constexpr (Vector<T, V>::words) {
#pragma unroll
    for (int i = 0; i < V / 2; i++) asm volatile("" : "+r"(x.first.of[i]), "+r"(x.second.of[i]));
  }
}

// vectors: a vector is one access. any: see Heads.
template <typename T, int V, bool vectors, bool interleaved, typename I, bool general, bool any>
__global__ void __launch_bounds__(kThreads, sizeof(I) == 4 && !any ? kNormThreadBlocks : 4)
    norm_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  using A = arithmetic_t<T>;
  constexpr int at_once = kHeadsAtOnce<general>;
  const RopeParams& p = a.params;
  wait_for_previous_kernel();
  const int64_t s = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  Token<I> token(a, tiling, I(tiling.first_sequence) + I(blockIdx.z), I(min(s, p.seq - 1)));
  const int lane = int(threadIdx.x);
  const auto chunk = Chunk<I>::template at<V>(p, tiling, lane);
  Heads<T, I, true, general, any> heads(a, token, false);
  // A lane past the last token or chunk takes no head. It must not read one: another thread may be about to write it.
  bool present = s < p.seq && lane < tiling.chunks && heads.next(0);
  AnglesOf<T, interleaved, V, I, general> angles(a, token, lane);
  const bool rotates = present && chunk.rotated && heads.rotates();
  Numbers<A, V> weights;  // of the tensor that was located last
  Elements<T, V> x[at_once] = {};
  const auto read_heads = [&] {
#pragma unroll
    for (int i = 0; i < at_once; i++) {
      const I head = heads.head_at(i);
      if (i == 0 || head < heads.end) heads.template read<vectors>(head, chunk, x[i]);
    }
  };
  token.arrive();
  if (rotates) angles.read();
  if (present) read_heads();
  token.template check<true>();
  if (rotates) angles.finish();
  const Norm<T, V, general> norm(a, tiling);
  do {
    if (present && heads.normalises() && !heads.located()) weights = weights_of<A, V>(a, heads.tensor, chunk);
    A squares[at_once];
#pragma unroll
    for (int i = 0; i < at_once; i++) {
      const auto numbers = numbers_of(x[i]);
      squares[i] = dot(numbers, numbers, chunk.whole());
    }
    if (!any || p.has_norm || p.norm_v) sum_over_lanes(squares);
    if (!present) continue;
#pragma unroll
    for (int i = 0; i < at_once; i++) forget_numbers(x[i], uint32_t(tiling.vector) >> 31);
    heads.locate();
#pragma unroll
    for (int i = 0; i < at_once; i++) {
      const I head = heads.head_at(i);
      if (head >= heads.out_end) break;
      const bool norms = heads.normalises(), rotated = chunk.rotated && heads.rotates();
      heads.template write<vectors>(head, chunk, x[i], norms || rotated, [&](auto& numbers) {
        if (norms) numbers = norm.normalised(numbers, norm.scale(squares[i]), weights, heads.tensor);
        if (rotated) angles.rotate(numbers, head);
      });
    }
    present = heads.next(at_once);
    if (!present) continue;
    read_heads();
  } while (__any_sync(kAllLanes, present));
}

// Takes a head in steps of a chunk for each lane of a warp. Heads of v may have several pieces.
template <typename T, int V, bool vectors, bool interleaved, typename I>
ROPE_FN void take_head(const RotateArgs& a, const Tiling& tiling, const Token<I>& token,
                       const Heads<T, I, true, true, true>& heads, I head, int lane) {
  using A = arithmetic_t<T>;
  const I pieces = heads.tensor == 2 ? I(tiling.v_together) : I(1);
  // Calls f with each chunk of this lane, its index, the piece that it is in, and its elements.
  const auto each_chunk = [&](auto&& f) {
    for (I piece = head * pieces; piece < (head + 1) * pieces; piece++) {
      for (int index = lane; index < tiling.chunks; index += kWarp) {
        const auto c = Chunk<I>::template at<V>(a.params, tiling, index);
        Elements<T, V> x{};  // channels past the end of v stay 0
        heads.template read<vectors>(piece, c, x);
        f(c, index, piece, x);
      }
    }
  };
  const Norm<T, V, true> norm(a, tiling, heads.tensor);
  const bool norms = heads.normalises();
  A scale = A(1);
  if (norms) {
    double squares[1] = {0.0};
    each_chunk([&](const Chunk<I>& c, int, I, const Elements<T, V>& x) {
      const auto numbers = numbers_of(x);
      squares[0] += dot(numbers, numbers, c.whole());
    });
    if (tiling.chunks > kWarp || pieces > 1) {
      sum_over_lanes(squares, kWarp);
    } else {  // a head that other kernels hold in one step: the sum has the same bits
      A narrow[1] = {A(squares[0])};
      sum_over_lanes(narrow, kWarp);
      squares[0] = narrow[0];
    }
    scale = norm.scale(A(squares[0]));
  }
  each_chunk([&](const Chunk<I>& c, int index, I piece, Elements<T, V>& x) {
    const bool rotates = c.rotated && heads.rotates();
    heads.template write<vectors>(piece, c, x, norms || rotates, [&](auto& numbers) {
      if (norms) numbers = norm.normalised(numbers, scale, weights_of<A, V>(a, heads.tensor, c), heads.tensor);
      if (rotates) rotate_chunk<T, interleaved>(a, token, index, head, numbers);
    });
  });
}

// A team is a warp. This kernel and that of its backward are always general ones.
template <typename T, int V, bool vectors, bool interleaved>
__global__ void __launch_bounds__(kThreads, 3)
    norm_wide_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  using I = int64_t;
  wait_for_previous_kernel();
  const I s = I(blockIdx.x) * blockDim.z + threadIdx.z;
  if (s >= a.params.seq) return;
  Token<I> token(a, tiling, tiling.first_sequence + blockIdx.z, s);
  token.arrive();
  token.template check<true>();
  Heads<T, I, true, true, true> heads(a, token, false);
  for (bool more = heads.next(0); more; more = heads.next(1)) {
    heads.locate();
    if (heads.head >= heads.out_end) continue;
    take_head<T, V, vectors, interleaved>(a, tiling, token, heads, heads.head, int(threadIdx.x));
  }
}

// Normalises all heads of a token together. A thread block takes q, k or v of a token, as blockIdx.y says. The threads
// of one x take the same chunks of different heads of q or k, so that the angles of a chunk are computed once. A warp
// takes a head of v.
template <typename T, int V, bool vectors, bool interleaved>
__global__ void __launch_bounds__(kTokenThreads, 2)
    norm_over_heads_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  using A = arithmetic_t<T>;
  using I = int64_t;
  wait_for_previous_kernel();
  const int tensor = int(blockIdx.y);
  Token<I> token(a, tiling, tiling.first_sequence + blockIdx.z, I(blockIdx.x));
  token.arrive();
  token.template check<true>();
  Heads<T, I, true, true, true> heads(a, token, false);
  heads.take(tensor);
  heads.locate();
  if (heads.out_end == 0) return;
  if (tensor == 2) {
    const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
    for (I head = thread / kWarp; head < heads.end; head += kTokenThreads / kWarp) {
      take_head<T, V, vectors, interleaved>(a, tiling, token, heads, head, thread % kWarp);
    }
    return;
  }
  const Norm<T, V, true> norm(a, tiling, tensor);
  double squares[1] = {0.0};
  for (int index = int(threadIdx.x); index < tiling.chunks; index += int(blockDim.x)) {
    const auto c = Chunk<I>::template at<V>(a.params, tiling, index);
    for (I head = threadIdx.y; head < heads.end; head += blockDim.y) {
      Elements<T, V> x;
      heads.template read<vectors>(head, c, x);
      const auto numbers = numbers_of(x);
      squares[0] += dot(numbers, numbers, c.whole());
    }
  }
  sum_over_thread_block<kTokenThreads>(squares);
  const A scale = norm.scale(A(squares[0]));
  for (int index = int(threadIdx.x); index < tiling.chunks; index += int(blockDim.x)) {
    const auto c = Chunk<I>::template at<V>(a.params, tiling, index);
    AnglesOf<T, interleaved, V, I, true> angles(a, token, index);
    if (c.rotated) angles.read();
    if (c.rotated) angles.finish();
    for (I head = threadIdx.y; head < heads.end; head += blockDim.y) {
      Elements<T, V> x;
      heads.template read<vectors>(head, c, x);
      heads.template write<vectors>(head, c, x, true, [&](auto& numbers) {
        numbers = norm.normalised(numbers, scale, weights_of<A, V>(a, tensor, c, head), tensor);
        if (c.rotated) angles.rotate(numbers, head);
      });
    }
  }
}

// ---- the backward ----

// The part that a thread block takes: some tokens of q or of k. I is an integer type that holds every element offset.
template <typename I>
struct Part {
  int tensor;               // 0 q, 1 k
  const Operand& o;         // of the gradients
  const rope_int* strides;  // of x, the tensor that the forward call normalised
  const Share& share;
  I heads;
  I begin, end;  // tokens: token t is the token t % seq of sequence t / seq

  ROPE_FN Part(const NormBackwardArgs& n, const BackwardTiling& backward)
      : tensor(blockIdx.x < backward.q.parts ? 0 : 1),
        o(tensor == 0 ? n.rotate.params.q : n.rotate.params.k),
        strides(tensor == 0 ? n.q : n.k),
        share(tensor == 0 ? backward.q : backward.k),
        heads(I(o.heads)) {
    begin = (I(blockIdx.x) - (tensor == 0 ? I(0) : I(backward.q.parts))) * I(share.tokens);
    end = min(begin + I(share.tokens), I(n.rotate.params.batch * n.rotate.params.seq));
  }
};

// Head 0 of a token: in the gradients of the results, in x, and in the gradients of x.
template <typename T, typename I>
struct Heads0 {
  const T *gradients, *x;
  T* out;

  ROPE_FN Heads0(const NormBackwardArgs& n, const Part<I>& part, I b, I s) {
    const auto offset = [&](const rope_int* strides) { return b * I(strides[0]) + s * I(strides[1]); };
    const RotateArgs& a = n.rotate;
    const bool q = part.tensor == 0;
    gradients = static_cast<const T*>(q ? a.q_in : a.k_in) + offset(part.o.in);
    x = static_cast<const T*>(q ? n.q_in : n.k_in) + offset(part.strides);
    out = static_cast<T*>(q ? a.q_out : a.k_out) + offset(part.o.out);
  }
};

// Writes the gradients of q and k, and the sums of each part: the gradient of a weight from these tokens alone.
// sums: [parts of q and k, head_dim]
//
// A thread adds up the terms of a few heads in the arithmetic type, and these sums in double, in shared memory. The
// launch bounds leave a thread 168 registers, or 128 if it has few channels.
template <typename T, int V, bool vectors, bool interleaved, typename I, bool general>
__global__ void __launch_bounds__(kThreads, V == 8 ? kBackwardThreadBlocks : 4)
    norm_backward_kernel(const __grid_constant__ NormBackwardArgs n, const __grid_constant__ BackwardTiling backward,
                         double* sums) {
  using A = arithmetic_t<T>;
  constexpr int at_once = kHeadsAtOnce<general>;
  constexpr int kSteps = 4;  // whose terms are added up in the arithmetic type
  __shared__ double totals[2 * V][kThreads];
  const RotateArgs& a = n.rotate;
  const RopeParams& p = a.params;
  const Tiling& tiling = backward.tiling;
  wait_for_previous_kernel();
  const Part<I> part(n, backward);
  const int lane = int(threadIdx.x), lanes = int(blockDim.x), thread = int(threadIdx.y) * lanes + lane;
  const int head_teams = part.share.teams, token_teams = int(blockDim.y) / head_teams;
  const int head_team = int(threadIdx.y) & (head_teams - 1), token_team = int(threadIdx.y) / head_teams;
  // A lane or team past the last chunk, token or head takes another one, so that it takes part in the shuffles, and
  // adds and writes nothing.
  const bool active = lane < tiling.chunks;
  const int index = min(lane, tiling.chunks - 1);
  const auto chunk = Chunk<I>::template at<V>(p, tiling, index);
  const auto weights = weights_of<A, V>(a, part.tensor, chunk);
  const Norm<T, V, general> norm(a, tiling);
  Numbers<A, V> terms{};
#pragma unroll
  for (int i = 0; i < 2 * V; i++) totals[i][thread] = 0.0;
  int steps = 0;
  const auto add_terms = [&] {
#pragma unroll
    for (int i = 0; i < V; i++) {
      totals[i][thread] += double(terms.first[i]);
      totals[V + i][thread] += double(terms.second[i]);
    }
    terms = {};
    steps = 0;
  };
  const I seq = I(p.seq), first_b = part.begin / seq, first_s = part.begin - first_b * seq;
  I b = first_b, s = first_s + token_team;
  for (I token_at = part.begin; token_at < part.end; token_at += token_teams, s += token_teams) {
    while (s >= seq) s -= seq, b++;
    const bool inside = token_at + token_team < part.end;
    Token<I> token(a, tiling, inside ? b : first_b, inside ? s : first_s);
    AnglesOf<T, interleaved, V, I, general> angles(a, token, index);
    const Heads0<T, I> at(n, part, token.b, token.s);
    Elements<T, V> x[at_once], g[at_once];
    const auto head_at = [&](I first, int i) { return min(first + i * head_teams, part.heads - 1); };
    const auto read_heads = [&](I first) {
#pragma unroll
      for (int i = 0; i < at_once; i++) {
        const I head = head_at(first, i);
        read<vectors>(at.gradients + head * I(part.o.in[2]), I(part.o.in[3]), chunk, g[i]);
        read<vectors>(at.x + head * I(part.strides[2]), I(part.strides[3]), chunk, x[i]);
      }
    };
    token.arrive();
    token.template check<false>();
    if (chunk.rotated) angles.read();
    read_heads(head_team);
    if (chunk.rotated) angles.finish();
    for (I first = head_team;;) {
      Numbers<A, V> back[at_once];  // g in the formulas of ../args.h
      A products[2 * at_once];      // of each head: the sum of x^2, and that of g w x
#pragma unroll
      for (int i = 0; i < at_once; i++) {
        back[i] = numbers_of(g[i]);
        if (chunk.rotated) angles.rotate(back[i], head_at(first, i));
        back[i] = norm.rotated_back(back[i]);
        const auto numbers = numbers_of(x[i]);
        const A squares = dot(numbers, numbers, chunk.whole()),
                product = norm.product(numbers, back[i], weights, part.tensor, chunk.whole());
        products[2 * i] = active ? squares : A(0);
        products[2 * i + 1] = active ? product : A(0);
      }
      sum_over_lanes(products);
#pragma unroll
      for (int i = 0; i < at_once; i++) {
        const I head = first + i * head_teams;
        if (!active || !inside || head >= part.heads) break;
        forget_numbers(x[i]);
        const auto y = norm.gradient(numbers_of(x[i]), back[i], weights, part.tensor, norm.scale(products[2 * i]),
                                     products[2 * i + 1], terms);
        write<vectors>(rounded<T, V>(y), at.out + head * I(part.o.out[2]), I(part.o.out[3]), chunk);
      }
      if (++steps == kSteps) add_terms();
      first += at_once * head_teams;
      if (first - head_team >= part.heads) break;
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
    sums[blockIdx.x * p.head_dim + (i < V ? chunk.first + i : chunk.second + (i - V))] = sum;
  }
}

// Adds the terms of a chunk to the sums of a head. begins: the sums hold nothing yet
template <typename A, int V, typename I>
ROPE_FN void add_to_sums(double* own, const Chunk<I>& c, const Numbers<A, V>& terms, bool begins) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    double &first = own[c.first + i], &second = own[c.second + i];
    first = begins ? double(terms.first[i]) : first + double(terms.first[i]);
    if (c.whole()) second = begins ? double(terms.second[i]) : second + double(terms.second[i]);
  }
}

// A thread block is one warp, the team of every head.
template <typename T, int V, bool vectors, bool interleaved>
__global__ void __launch_bounds__(kWarp, 12)
    norm_wide_backward_kernel(const __grid_constant__ NormBackwardArgs n,
                              const __grid_constant__ BackwardTiling backward, double* sums) {
  using A = arithmetic_t<T>;
  using I = int64_t;
  const RotateArgs& a = n.rotate;
  const RopeParams& p = a.params;
  const Tiling& tiling = backward.tiling;
  wait_for_previous_kernel();
  const Part<I> part(n, backward);
  const Norm<T, V, true> norm(a, tiling);
  for (I token_at = part.begin; token_at < part.end; token_at++) {
    Token<I> token(a, tiling, token_at / p.seq, token_at % p.seq);
    token.arrive();
    token.template check<false>();
    const Heads0<T, I> at(n, part, token.b, token.s);
    for (I head = 0; head < part.heads; head++) {
      const bool begins = token_at == part.begin && head == 0;  // then the sums hold nothing yet
      double products[2] = {0.0, 0.0};
      A scale = A(0);
#pragma unroll 1
      for (int pass = 0; pass < 2; pass++) {  // the first pass computes the products, the second one the gradients
        for (int index = int(threadIdx.x); index < tiling.chunks; index += kWarp) {
          const auto c = Chunk<I>::template at<V>(p, tiling, index);
          Elements<T, V> x_read, g_read;
          read<vectors>(at.gradients + head * part.o.in[2], I(part.o.in[3]), c, g_read);
          read<vectors>(at.x + head * part.strides[2], I(part.strides[3]), c, x_read);
          auto g = numbers_of(g_read);
          if (c.rotated) rotate_chunk<T, interleaved>(a, token, index, head, g);
          g = norm.rotated_back(g);
          const auto x = numbers_of(x_read), weights = weights_of<A, V>(a, part.tensor, c);
          if (pass == 0) {
            products[0] += dot(x, x, c.whole());
            products[1] += norm.product(x, g, weights, part.tensor, c.whole());
            continue;
          }
          Numbers<A, V> terms{};
          const auto y = norm.gradient(x, g, weights, part.tensor, scale, A(products[1]), terms);
          write<vectors>(rounded<T, V>(y), at.out + head * part.o.out[2], I(part.o.out[3]), c);
          // No other thread adds to the sums of these channels.
          add_to_sums(sums + blockIdx.x * p.head_dim, c, terms, begins);
        }
        if (pass == 0) {
          sum_over_lanes(products);
          scale = norm.scale(A(products[0]));
        }
      }
    }
  }
}

// A thread block takes tokens of q or of k, as those of norm_backward_kernel do, and a thread the same chunks of the
// same heads in all of them. So each sum of a part belongs to one thread. The sums are in shared memory, if they fit.
// sums: [parts of q, channels of q], then [parts of k, channels of k], where the channels are those of all heads
template <typename T, int V, bool vectors, bool interleaved>
__global__ void __launch_bounds__(kThreads, vectors && !interleaved ? kBackwardThreadBlocks : 2)
    norm_over_heads_backward_kernel(const __grid_constant__ NormBackwardArgs n,
                                    const __grid_constant__ BackwardTiling backward, double* sums) {
  using A = arithmetic_t<T>;
  using I = int64_t;
  const RotateArgs& a = n.rotate;
  const RopeParams& p = a.params;
  const Tiling& tiling = backward.tiling;
  wait_for_previous_kernel();
  const Part<I> part(n, backward);
  const Norm<T, V, true> norm(a, tiling, part.tensor);
  const Share &q = backward.q, &share = part.share;
  const I first_sum = part.tensor == 0 ? 0 : q.parts * (q.channels - share.channels);
  double* const of_part = sums + first_sum + blockIdx.x * share.channels;
  double* const own = share.channels <= kSharedSums ? dynamic_shared : of_part;
  for (I token_at = part.begin; token_at < part.end; token_at++) {
    Token<I> token(a, tiling, token_at / p.seq, token_at % p.seq);
    token.arrive();
    token.template check<false>();
    const Heads0<T, I> at(n, part, token.b, token.s);
    double products[2] = {0.0, 0.0};
    A scale = A(0);
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {  // the first pass computes the products, the second one the gradients
      for (int index = int(threadIdx.x); index < tiling.chunks; index += int(blockDim.x)) {
        const auto c = Chunk<I>::template at<V>(p, tiling, index);
        AnglesOf<T, interleaved, V, I, true> angles(a, token, index);
        if (c.rotated) angles.read();
        if (c.rotated) angles.finish();
        for (I head = threadIdx.y; head < part.heads; head += blockDim.y) {
          Elements<T, V> x_read, g_read;
          read<vectors>(at.gradients + head * part.o.in[2], I(part.o.in[3]), c, g_read);
          read<vectors>(at.x + head * part.strides[2], I(part.strides[3]), c, x_read);
          auto g = numbers_of(g_read);
          if (c.rotated) angles.rotate(g, head);
          g = norm.rotated_back(g);
          const auto x = numbers_of(x_read), weights = weights_of<A, V>(a, part.tensor, c, head);
          if (pass == 0) {
            products[0] += dot(x, x, c.whole());
            products[1] += norm.product(x, g, weights, part.tensor, c.whole());
            continue;
          }
          Numbers<A, V> terms{};
          const auto y = norm.gradient(x, g, weights, part.tensor, scale, A(products[1]), terms);
          write<vectors>(rounded<T, V>(y), at.out + head * part.o.out[2], I(part.o.out[3]), c);
          add_to_sums(own + head * p.head_dim, c, terms, token_at == part.begin);
        }
      }
      if (pass == 0) {
        sum_over_thread_block<kThreads>(products);
        scale = norm.scale(A(products[0]));
      }
    }
  }
  if (own == of_part) return;
  __syncthreads();
  const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
  for (int i = thread; i < share.channels; i += kThreads) of_part[i] = own[i];
}

// Writes the gradients of the weights: the sums of the parts. A thread takes every kSumTeams-th part of one channel;
// blockIdx.y is 0 for q and 1 for k.
// sums: [parts of q, channels of q], then [parts of k, channels of k]
__global__ void __launch_bounds__(kSumChannels* kSumTeams)
    sum_parts_kernel(const double* sums, const __grid_constant__ Share q_share, const __grid_constant__ Share k_share,
                     DType q_dtype, DType k_dtype, void* q_gradient, void* k_gradient) {
  __shared__ double of_teams[kSumTeams][kSumChannels];
  wait_for_previous_kernel();
  const bool q = blockIdx.y == 0;
  const rope_int parts = q ? q_share.parts : k_share.parts, channels = q ? q_share.channels : k_share.channels;
  if (!q) sums += q_share.parts * q_share.channels;
  const rope_int channel = rope_int(blockIdx.x) * kSumChannels + threadIdx.x;
  const int team = int(threadIdx.y);
  double sum = 0.0;
  if (channel < channels) {
#pragma unroll 8
    for (rope_int part = team; part < parts; part += kSumTeams) sum += sums[part * channels + channel];
  }
  of_teams[team][threadIdx.x] = sum;
  __syncthreads();
  if (team != 0 || channel >= channels) return;
  for (int other = 1; other < kSumTeams; other++) sum += of_teams[other][threadIdx.x];
  void* const gradient = q ? q_gradient : k_gradient;
  switch (q ? q_dtype : k_dtype) {
    case DType::kHalf:
      return round_to(float(sum), static_cast<__half*>(gradient)[channel]);
    case DType::kBFloat16:
      return round_to(float(sum), static_cast<__nv_bfloat16*>(gradient)[channel]);
    case DType::kFloat:
      return round_to(sum, static_cast<float*>(gradient)[channel]);
    case DType::kDouble:
      return round_to(sum, static_cast<double*>(gradient)[channel]);
  }
}

// Calls f with the length of a vector, whether a vector is one access, and whether pairs are interleaved.
template <typename T, typename F>
cudaError_t with_shape(const Tiling& tiling, bool interleaved, F&& f) {
  using Full = std::integral_constant<int, 16 / sizeof(T)>;
  if (tiling.vector == 1) return f(std::integral_constant<int, 1>(), std::false_type(), std::false_type());
  const auto with_pairing = [&](auto vectors) {
    return interleaved ? f(Full(), vectors, std::true_type()) : f(Full(), vectors, std::false_type());
  };
  return tiling.vectors ? with_pairing(std::true_type()) : with_pairing(std::false_type());
}

}  // namespace

cudaError_t norm_rotate(const RotateArgs& a, const Plan& plan, Queue queue) {
  return with_type(a.x_dtype, [&](auto tag) {
    using T = decltype(tag);
    return with_shape<T>(plan.tiling, a.params.interleaved, [&](auto v, auto vectors, auto interleaved) {
      constexpr int V = v();
      constexpr bool vec = vectors(), pairs = interleaved();
      if (a.params.norm_over_heads) return start(plan, queue, norm_over_heads_kernel<T, V, vec, pairs>, a);
      if (!plan.tiling.one_step) return start(plan, queue, norm_wide_kernel<T, V, vec, pairs>, a);
      if constexpr (vec) {  // only kernels that access vectors exist with element offsets of 32 bits too
        if (plan.any) return start(plan, queue, norm_kernel<T, V, vec, pairs, int32_t, true, true>, a);
        if (plan.general) return start(plan, queue, norm_kernel<T, V, vec, pairs, int32_t, true, false>, a);
        if (!plan.wide_index) return start(plan, queue, norm_kernel<T, V, vec, pairs, int32_t, false, false>, a);
      }
      return start(plan, queue, norm_kernel<T, V, vec, pairs, int64_t, false, false>, a);
    });
  });
}

cudaError_t norm_backward(const NormBackwardArgs& n, const BackwardPlan& plan, double* sums, void* q_gradient,
                          void* k_gradient, Queue queue) {
  const RotateArgs& a = n.rotate;
  const BackwardTiling& tiling = plan.tiling;
  const auto start_parts = [&](auto kernel) {
    return start(plan.grid, plan.block, queue.with_shared(plan.dynamic_shared), kernel, n, tiling, sums);
  };
  const auto with_kernel = [&](auto tag) {
    using T = decltype(tag);
    return with_shape<T>(tiling.tiling, a.params.interleaved, [&](auto v, auto vectors, auto interleaved) {
      constexpr int V = v();
      constexpr bool vec = vectors(), pairs = interleaved();
      if (a.params.norm_over_heads) return start_parts(norm_over_heads_backward_kernel<T, V, vec, pairs>);
      if (!tiling.tiling.one_step) return start_parts(norm_wide_backward_kernel<T, V, vec, pairs>);
      if constexpr (vec) {
        if (plan.general && !plan.wide_index) return start_parts(norm_backward_kernel<T, V, vec, pairs, int32_t, true>);
        if (!plan.wide_index) return start_parts(norm_backward_kernel<T, V, vec, pairs, int32_t, false>);
      }
      if (plan.general) return start_parts(norm_backward_kernel<T, V, false, pairs, int64_t, true>);
      return start_parts(norm_backward_kernel<T, V, vec, pairs, int64_t, false>);
    });
  };
  if (plan.grid.x != 0) {
    if (const cudaError_t error = with_type(a.x_dtype, with_kernel)) return error;
  }
  const Dim3 grid{unsigned(ceil_div(std::max(tiling.q.channels, tiling.k.channels), kSumChannels)), 2, 1};
  if (grid.x == 0) return cudaSuccess;
  return start(grid, {kSumChannels, kSumTeams, 1}, queue, sum_parts_kernel, sums, tiling.q, tiling.k, a.q_norm_dtype,
               a.k_norm_dtype, q_gradient, k_gradient);
}

}  // namespace rope::cuda
