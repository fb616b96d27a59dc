// The kernels that apply the RMS norm and then rotate. They can write k and v to a cache.
#include "rotate.cuh"

namespace rope::cuda {
namespace {

// Takes the heads first .. end - 1 of a side, which are normalised together. A v with more channels than k is cut into
// heads of k's head_dim, of which the last may be short.
template <int threads, typename K, typename I = typename K::I>
ROPE_FN void take_group(const Heads<K>& heads, const GroupThreads<threads>& own, I first, I end) {
  using A = typename K::A;
  const RotateArgs& a = heads.a;
  const Tiling& tiling = heads.token.tiling;
  const Side& side = heads.params();
  const I cut = I(a.params.sides[kQ].head_dim), channels = I(side.head_dim);
  // Calls f with each chunk of this thread and its index.
  const auto each_chunk = [&](auto&& f) {
    for (I begin = 0; begin < channels; begin += cut) {
      for (int index = own.x; index < tiling.chunks; index += own.xs) {
        auto c = Chunk<I>::template of<K::V>(a.params, tiling, index);
        c.at[0] += begin, c.at[1] += begin;
        f(c, index);
      }
    }
  };
  const Norm<K> norm(a, tiling, heads.side);
  const bool norms = heads.normalises();
  A scale = A(1);
  if (norms) {
    double squares[1] = {0.0};
    each_chunk([&](const Chunk<I>& c, int) {
      for (I head = first + own.y; head < end; head += own.ys) {
        const auto x = numbers_of(heads.read(head, c));
        squares[0] += dot(x, x, c.whole());
      }
    });
    if (!own.warp || tiling.chunks > kWarp || channels > cut) {
      own.sum(squares);
    } else {  // a head that other kernels hold at once: the sum has the same bits
      A narrow[1] = {A(squares[0])};
      sum_over_lanes(narrow, kWarp);
      squares[0] = narrow[0];
    }
    scale = norm.scale(A(squares[0]));
  }
  each_chunk([&](const Chunk<I>& c, int index) {
    const bool rotates = c.rotated && heads.rotates();
    Angles<K> angles(a, heads.token, index, rotates);
    angles.read();
    angles.finish();
    for (I head = first + own.y; head < end; head += own.ys) {
      heads.write(head, c, heads.read(head, c), heads.scale(head), norms || rotates, [&](auto& numbers) {
        if (norms) norm.apply(numbers, scale, norm.weights(heads.side, c, head));
        if (rotates) angles.rotate(numbers, head);
      });
    }
  });
}

// Normalises groups that `threads` threads share. A warp takes each head of the thread block's share of the list. Or a
// thread block takes all heads of q or k of a token, as blockIdx.y says, so that the angles of a chunk are computed
// once; or those of v, of which a warp takes each.
template <typename K, int threads>
__global__ void __launch_bounds__(threads == kWarp ? kThreads : kTokenThreads, threads == kWarp ? 3 : 2)
    norm_group_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  using I = typename K::I;
  wait_for_previous_kernel();
  const I s = I(blockIdx.x) * blockDim.z + threadIdx.z;
  if (s >= a.params.seq) return;
  Token<K> token(a, tiling, tiling.first_sequence + blockIdx.z, s);
  token.arrive();
  token.check();
  Heads<K> heads(a, token, false);
  if constexpr (threads == kWarp) {
    const GroupThreads<threads> own{true};
    for (bool more = heads.next(0); more; more = heads.next(1)) {
      heads.locate();
      if (heads.head < heads.out_end) take_group(heads, own, heads.head, heads.head + 1);
    }
  } else {
    heads.take(int(blockIdx.y));
    heads.locate();
    const GroupThreads<threads> own{heads.side == kV};
    const I first = own.warp ? own.thread / kWarp : 0, step = own.warp ? threads / kWarp : heads.end;
    for (I head = first; head < heads.out_end; head += step) {
      take_group(heads, own, head, own.warp ? head + 1 : heads.end);
    }
  }
  let_next_kernel_begin();
}

}  // namespace

cudaError_t norm_rotate(const RotateArgs& a, const Plan& plan, Queue queue) {
  return with_policy<CacheNorm, GeneralNorm>(a, plan, [&](auto policy) {
    using K = decltype(policy);
    if constexpr (K::strided) {
      if (a.params.sides[kQ].norm == kAllHeads) return start(plan, queue, norm_group_kernel<K, kTokenThreads>, a);
      if (!plan.one_step) return start(plan, queue, norm_group_kernel<K, kWarp>, a);
    }
    return start(plan, queue, rotate_kernel<K>, a);
  });
}

}  // namespace rope::cuda
