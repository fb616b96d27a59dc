// The kernel that applies the RMS norm to every head and then rotates it, and the kernel of its backward. The first can
// write k and v to a cache.
//
// A team has a power of two of threads, at most a warp, which sum over their head with shuffles. Every lane of a warp
// takes part in every shuffle: a lane past the last token, head or chunk reaches it too, but writes nothing. ../args.h
// has the formulas of the backward, see NormBackwardArgs.
//
// The launch bounds (see rotate.cu) limit a thread to 128 registers in norm_kernel, with 4 thread blocks on a
// multiprocessor, and to 168 in norm_backward_kernel, with 3. Only a few variants of norm_backward_kernel spill
// (benchmarks/results/kernels.md).
#include "device.cuh"

namespace rope::cuda {
namespace {

// Returns the sum of the numbers that the lanes of a team give, to each of them.
template <typename A>
ROPE_FN A sum_over_lanes(A sum) {
  for (unsigned lane = 1; lane < blockDim.x; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, int(lane));
  return sum;
}

ROPE_FN float root(float a) { return ::sqrtf(a); }
ROPE_FN double root(double a) { return ::sqrt(a); }

// Returns this lane's share of the dot product of two heads: that of its chunk, computed in four accumulators. The
// caller adds up the lanes of the team with sum_over_lanes(). If a head takes several steps of its team, the caller
// first adds up the steps of a lane, in double.
template <typename A, int V>
ROPE_FN A dot(const Numbers<A, V>& x, const Numbers<A, V>& y, bool whole) {
  A sum[4] = {A(0), A(0), A(0), A(0)};
#pragma unroll
  for (int i = 0; i < V; i++) sum[i % 4] = fma(x.first[i], y.first[i], sum[i % 4]);
  if (whole) {
#pragma unroll
    for (int i = 0; i < V; i++) sum[i % 4] = fma(x.second[i], y.second[i], sum[i % 4]);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <bool once, typename A>
using sum_t = std::conditional_t<once, A, double>;

// Returns the norm weights of a chunk.
template <typename A, int V, typename I>
ROPE_FN Numbers<A, V> weights_of(const RotateArgs& a, int tensor, const Chunk<I>& c) {
  const void* weight = tensor == 0 ? a.q_norm_weight : a.k_norm_weight;
  const DType dtype = tensor == 0 ? a.q_norm_dtype : a.k_norm_dtype;
  const rope_int stride = tensor == 0 ? a.params.q_norm_weight : a.params.k_norm_weight;
  Numbers<A, V> w;
  const auto get = [&](auto tag) {
    using W = decltype(tag);
    const W* from = static_cast<const W*>(weight);
    if (V > 1 && stride == 1 && reinterpret_cast<uintptr_t>(weight) % 16 == 0) {
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

// Multiplies each channel by the scale of its head and by its own weight.
template <typename A, int V>
ROPE_FN void multiply(Numbers<A, V>& x, A scale, const Numbers<A, V>& weights) {
#pragma unroll
  for (int i = 0; i < V; i++) {
    x.first[i] = x.first[i] * scale * weights.first[i];
    x.second[i] = x.second[i] * scale * weights.second[i];
  }
}

// vectors: a vector is one access. once: a team holds a whole head, see in_one_step().
template <typename T, int V, bool vectors, bool once, bool interleaved>
__global__ void __launch_bounds__(kThreads, 4)
    norm_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  using A = arithmetic_t<T>;
  using I = int64_t;
  constexpr int kHeadsAtOnce = 1;
  const RopeParams& p = a.params;
  wait_for_previous_kernel();
  const int64_t s = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  const bool inside = s < p.seq;
  Token<I> token(a, tiling, tiling.first_sequence + blockIdx.z, min(s, p.seq - 1));
  const int lane = int(threadIdx.x), lanes = int(blockDim.x);
  const auto chunk_at = [&](int index) { return Chunk<I>::template at<interleaved, V>(p, tiling, index); };
  const auto chunk = chunk_at(lane);
  Heads<T, I, true> heads(a, token, false);
  // A lane without a chunk, head or token reads nothing: another thread may be about to write there.
  const bool active = inside && lane < tiling.chunks;
  bool more_heads = heads.next(0);
  int steps = int((tiling.heads_per_thread_block + blockDim.y - 1) / blockDim.y);
  Elements<T, V> x[kHeadsAtOnce] = {};
  const auto read_heads = [&] {
    if (!active || !more_heads) return;
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; i++) {
      read<vectors>(heads.in + heads.head * heads.in_step, heads.in_stride, chunk, x[i]);
    }
  };
  Numbers<A, V> weights;
  int weights_for = -1;  // the tensor that the weights are of
  const auto read_weights = [&] {
    if (!once || !active || !heads.rotates() || weights_for == heads.tensor) return;
    weights = weights_of<A, V>(a, heads.tensor, chunk);
    weights_for = heads.tensor;
  };
  if (more_heads) read_weights();
  token.arrive();
  token.template check<true>();
  Angles<A, V> angles;
  if (once && active && chunk.rotated && heads.rotates()) {
    angles = angles_of<T, interleaved, V>(a, token, lane);
  }
  read_heads();  // after the table rows, because the compiler makes the thread wait for the heads right after their
                 // loads
  for (;;) {
    if (more_heads) heads.locate();
#pragma unroll
    for (int i = 0; i < kHeadsAtOnce; i++) {
      const bool present = active && more_heads, written = present && heads.head < heads.out_end;
      A scale = A(0);
      Numbers<A, V> numbers;
      if (heads.rotates()) {
        numbers = numbers_of(x[i]);
        sum_t<once, A> sum = lane < tiling.chunks ? dot(numbers, numbers, chunk.whole()) : A(0);
        if constexpr (!once) {
          for (int index = lane + lanes; present && index < tiling.chunks; index += lanes) {
            const auto c = chunk_at(index);
            Elements<T, V> more;
            read<vectors>(heads.in + heads.head * heads.in_step, heads.in_stride, c, more);
            const auto m = numbers_of(more);
            sum += dot(m, m, c.whole());
          }
        }
        scale = A(1) / root(A(sum_over_lanes(sum)) / A(p.head_dim) + A(a.norm_eps));
      }
      const auto finish = [&](const Chunk<I>& c, const Angles<A, V>& chunk_angles, const Numbers<A, V>& w) {
        if (heads.rotates()) {
          multiply(numbers, scale, w);
          if (c.rotated) rotate<interleaved>(numbers, chunk_angles);
          x[i] = rounded<T, V>(numbers);
        }
        if (written) write<vectors>(x[i], heads.out + heads.head * heads.out_step, heads.out_stride, c);
      };
      if constexpr (once) {
        finish(chunk, angles, weights);
      } else {
        for (int index = lane; written && index < tiling.chunks; index += lanes) {
          const auto c = chunk_at(index);
          if (index != lane) {
            read<vectors>(heads.in + heads.head * heads.in_step, heads.in_stride, c, x[i]);
            numbers = numbers_of(x[i]);
          }
          if (c.rotated) angles = angles_of<T, interleaved, V>(a, token, index);
          if (heads.rotates()) weights = weights_of<A, V>(a, heads.tensor, c);
          finish(c, angles, weights);
        }
      }
    }
    if (--steps == 0) break;
    if (more_heads) more_heads = heads.next(kHeadsAtOnce);
    read_heads();
    if (more_heads) read_weights();
  }
}

// Writes the gradients of q and k. A thread block takes one part of the tokens, for q (blockIdx.y is 0) or for k (1).
// sums: [2, parts * warps, head_dim]; each warp writes head_dim sums, its share of the gradient of a weight.
template <typename T, int V, bool vectors, bool once, bool interleaved>
__global__ void __launch_bounds__(kThreads, 3)
    norm_backward_kernel(const __grid_constant__ NormBackwardArgs n, const __grid_constant__ BackwardTiling backward,
                         double* sums) {
  using A = arithmetic_t<T>;
  using I = int64_t;
  const RotateArgs& a = n.rotate;
  const RopeParams& p = a.params;
  const Tiling& tiling = backward.tiling;
  wait_for_previous_kernel();
  const int tensor = int(blockIdx.y), lane = int(threadIdx.x), lanes = int(blockDim.x);
  const Operand& o = tensor == 0 ? p.q : p.k;
  const rope_int* x_strides = tensor == 0 ? n.q : n.k;
  const int head_teams = tensor == 0 ? backward.q_teams : backward.k_teams, token_teams = int(blockDim.y) / head_teams;
  const int head_team = int(threadIdx.y) & (head_teams - 1), token_team = int(threadIdx.y) / head_teams;
  const bool active = lane < tiling.chunks;
  const auto chunk_at = [&](int index) { return Chunk<I>::template at<interleaved, V>(p, tiling, index); };
  const int warp = int(threadIdx.y) * lanes / kWarp, warps = kThreads / kWarp;
  double* warp_sums = sums + ((int64_t(tensor) * gridDim.x + blockIdx.x) * warps + warp) * p.head_dim;
  const auto chunk = chunk_at(lane);
  Numbers<A, V> weights;
  if (once && active) weights = weights_of<A, V>(a, tensor, chunk);
  Sums<A, V> total;

  const int64_t begin = int64_t(blockIdx.x) * backward.tokens, end = min(begin + backward.tokens, p.batch * p.seq);
  const int64_t first_b = begin / p.seq, first_s = begin - first_b * p.seq;
  int64_t b = first_b, s = first_s + token_team;
  for (int64_t token_at = begin; token_at < end; token_at += token_teams, s += token_teams) {
    while (s >= p.seq) s -= p.seq, b++;
    // A team past the last token or head computes another one, so that it takes part in the shuffles, and writes
    // nothing.
    const bool inside = token_at + token_team < end;
    Token<I> token(a, tiling, inside ? b : first_b, inside ? s : first_s);
    token.arrive();
    token.template check<false>();
    Angles<A, V> angles;
    if (once && active && chunk.rotated) angles = angles_of<T, interleaved, V>(a, token, lane);
    const T* gradients = static_cast<const T*>(tensor == 0 ? a.q_in : a.k_in) + token.b * o.in[0] + token.s * o.in[1];
    const T* xs =
        static_cast<const T*>(tensor == 0 ? n.q_in : n.k_in) + token.b * x_strides[0] + token.s * x_strides[1];
    T* ys = static_cast<T*>(tensor == 0 ? a.q_out : a.k_out) + token.b * o.out[0] + token.s * o.out[1];
    for (int64_t first = 0; first < o.heads; first += head_teams) {
      const bool written = inside && first + head_team < o.heads;
      const int64_t h = min(first + head_team, o.heads - 1);
      // Reads x, and the gradient of the result, which it rotates back. `back` is g in the formulas of ../args.h.
      const auto get = [&](const Chunk<I>& c, const Angles<A, V>& chunk_angles, Numbers<A, V>& x, Numbers<A, V>& back) {
        Elements<T, V> x_read, g_read;
        read<vectors>(gradients + h * o.in[2], I(o.in[3]), c, g_read);
        read<vectors>(xs + h * x_strides[2], I(x_strides[3]), c, x_read);
        x = numbers_of(x_read);
        back = numbers_of(g_read);
        if (c.rotated) rotate<interleaved>(back, chunk_angles);
      };
      const auto weighted = [](const Numbers<A, V>& x, const Numbers<A, V>& w) {
        Numbers<A, V> y;
#pragma unroll
        for (int i = 0; i < V; i++) {
          y.first[i] = x.first[i] * w.first[i];
          y.second[i] = x.second[i] * w.second[i];
        }
        return y;
      };
      Numbers<A, V> x, back;
      sum_t<once, A> squares = A(0), product = A(0);
      for (int index = lane; index < tiling.chunks; index += lanes) {
        const auto c = once ? chunk : chunk_at(index);
        if constexpr (!once) {
          if (c.rotated) angles = angles_of<T, interleaved, V>(a, token, index);
          weights = weights_of<A, V>(a, tensor, c);
        }
        get(c, angles, x, back);
        squares += dot(x, x, c.whole());
        product += dot(weighted(back, weights), x, c.whole());
        if constexpr (once) break;
      }
      const A scale = A(1) / root(A(sum_over_lanes(squares)) / A(p.head_dim) + A(a.norm_eps));
      const A common = -(scale * scale * (A(sum_over_lanes(product)) / A(p.head_dim)));
      if (!written) continue;  // no shuffle follows for this head
      for (int index = lane; index < tiling.chunks; index += lanes) {
        const auto c = once ? chunk : chunk_at(index);
        if constexpr (!once) {
          if (c.rotated) angles = angles_of<T, interleaved, V>(a, token, index);
          weights = weights_of<A, V>(a, tensor, c);
          get(c, angles, x, back);
        }
        Numbers<A, V> y, w;
#pragma unroll
        for (int i = 0; i < V; i++) {
          w.first[i] = back.first[i] * (x.first[i] * scale);
          w.second[i] = back.second[i] * (x.second[i] * scale);
          y.first[i] = fma(x.first[i], common, back.first[i] * weights.first[i]) * scale;
          y.second[i] = fma(x.second[i], common, back.second[i] * weights.second[i]) * scale;
        }
        write<vectors>(rounded<T, V>(y), ys + h * o.out[2], I(o.out[3]), c);
        if constexpr (once) {
          total.add(w);
          break;
        } else {
          // The team of a head this wide is a whole warp, so that no other thread adds to these sums.
#pragma unroll
          for (int i = 0; i < V; i++) {
            warp_sums[c.first + i] += double(w.first[i]);
            if (c.whole()) warp_sums[c.second + i] += double(w.second[i]);
          }
        }
      }
    }
  }
  if constexpr (once) {
    const bool writes = active && (int(threadIdx.y) * lanes) % kWarp == 0;
#pragma unroll
    for (int i = 0; i < V; i++) {
      double first = double(total.sum.first[i]) - double(total.over.first[i]),
             second = double(total.sum.second[i]) - double(total.over.second[i]);
      for (int other = lanes; other < kWarp; other *= 2) {
        first += __shfl_xor_sync(0xffffffffu, first, other);
        second += __shfl_xor_sync(0xffffffffu, second, other);
      }
      if (writes) {
        warp_sums[chunk.first + i] = first;
        if (chunk.whole()) warp_sums[chunk.second + i] = second;
      }
    }
  }
}

template <typename T, typename F>
cudaError_t with_shape(const Tiling& tiling, F&& f) {
  constexpr int full = 16 / sizeof(T);
  const auto with_steps = [&](auto v, auto vectors) {
    return in_one_step(tiling) ? f(v, vectors, std::true_type()) : f(v, vectors, std::false_type());
  };
  using Full = std::integral_constant<int, full>;
  if (tiling.vector == 1) return with_steps(std::integral_constant<int, 1>(), std::false_type());
  return tiling.vectors ? with_steps(Full(), std::true_type()) : with_steps(Full(), std::false_type());
}

}  // namespace

cudaError_t norm_rotate(const RotateArgs& a, const Plan& plan, Queue queue) {
  return with_type(a.x_dtype, [&](auto tag) {
    using T = decltype(tag);
    return with_shape<T>(plan.tiling, [&](auto v, auto vectors, auto once) {
      constexpr int V = decltype(v)::value;
      constexpr bool vec = decltype(vectors)::value, one = decltype(once)::value;
      return start(plan, queue,
                   a.params.interleaved ? norm_kernel<T, V, vec, one, true> : norm_kernel<T, V, vec, one, false>, a);
    });
  });
}

cudaError_t norm_backward(const NormBackwardArgs& n, const BackwardPlan& plan, double* sums, Queue queue) {
  return with_type(n.rotate.x_dtype, [&](auto tag) {
    using T = decltype(tag);
    return with_shape<T>(plan.tiling.tiling, [&](auto v, auto vectors, auto once) {
      constexpr int V = decltype(v)::value;
      constexpr bool vec = decltype(vectors)::value, one = decltype(once)::value;
      return start(plan.grid, plan.block, queue,
                   n.rotate.params.interleaved ? norm_backward_kernel<T, V, vec, one, true>
                                               : norm_backward_kernel<T, V, vec, one, false>,
                   n, plan.tiling, sums);
    });
  });
}

}  // namespace rope::cuda
