// The kernel that takes every rotation which is not usual: any dtype and layout, angles of any source, norms of any
// group, caches of any shape.
#include "norm.cuh"
#include "quantise.cuh"

namespace rope::cuda {
namespace {

// A head of the list of heads, see rotate_plan.h. A v with another head_dim than k is cut into pieces of k's head_dim,
// of which the last may be short; each piece is in the list.
template <typename K>
struct Head {
  using T = typename K::T;
  using A = typename K::A;
  using I = typename K::I;
  static constexpr int V = K::V;
  const RotateArgs& a;
  const Token& token;
  int side = -1;
  I index, first;  // of the head in its side; its first channel, which is that of a piece
  const T* in;     // head 0 of the token
  T* out;          // head 0 of the result, which is bytes if it is quantised; null: nothing is written

  ROPE_FN const Side& params() const { return a.params.sides[side]; }
  ROPE_FN bool normalises() const { return K::norm && params().norm != kNoNorm; }
  // Returns whether a chunk is written. A pad is not, nor what is neither rotated nor normalised in place.
  ROPE_FN bool writes(const Chunk<I>& c) const {
    return out && (c.rotated || normalises() || !token.tiling.in_place[side]);
  }

  // Goes to head `at` of the list.
  ROPE_FN void go(I at) {
    const rope_int *starts = token.tiling.starts, pieces = token.tiling.pieces;
    if (const int now = int(at >= starts[kK]) + int(at >= starts[kV]); now != side) {
      side = now;
      const Side& o = params();
      void* const to = a.sides[side].out;
      in = static_cast<const T*>(a.sides[side].in) + token.b * o.in[0] + token.s * o.in[1];
      const bool to_cell = side != kQ && a.params.has_cache;
      const I offset =
          to_cell ? token.block * o.out[0] + token.in_block * o.out[1] : token.b * o.out[0] + token.s * o.out[1];
      out = bytes() ? reinterpret_cast<T*>(static_cast<uint8_t*>(to) + offset) : static_cast<T*>(to) + offset;
      if (to_cell && token.block < 0) out = nullptr;
    }
    index = at - starts[side], first = 0;
    if (side != kV || pieces == 1) return;
    first = index % pieces * a.params.sides[kQ].head_dim;
    index /= pieces;
  }

  ROPE_FN Elements<T, V> read(const Chunk<I>& c) const { return heads(in, params().in).read(index, c.after(first)); }
  // Reads what write() divides the numbers of the head by if it quantises them.
  ROPE_FN A scale() const { return bytes() ? A(a.sides[side].scale[index * params().scale]) : A(1); }
  // Writes a chunk: as elements, or quantised as bytes. If `changes`, it first applies change() to the numbers.
  template <typename F>
  ROPE_FN void write(const Chunk<I>& c, Elements<T, V> x, A scale, bool changes, F&& change) const {
    if (changes || bytes()) {
      auto numbers = numbers_of(x);
      if (changes) change(numbers);
      x = rounded<T, V>(numbers);
      if (bytes()) {
        if (a.params.rounding != kOnce) numbers = numbers_of(x);
        return heads(reinterpret_cast<uint8_t*>(out), params().out)
            .write(index, c.after(first), quantised_to(params().format, numbers, scale));
      }
    }
    heads(out, params().out).write(index, c.after(first), x);
  }

 private:
  ROPE_FN bool bytes() const { return params().format != kUnquantised; }
  template <typename Element>
  ROPE_FN TokenHeads<V, Element, I> heads(Element* token_heads, const rope_int* strides) const {
    return {token_heads, strides, !K::norm || token.tiling.vectors, params().head_dim - 1};
  }
};

// Takes every step-th head of the list from `begin` to `end`. With a norm they are a group.
template <typename K, typename I = typename K::I>
ROPE_FN void take(const Token& token, const GroupThreads<kGroupThreads>& own, I begin, I end, I step) {
  using A = typename K::A;
  const RotateArgs& a = token.a;
  const int chunks = token.tiling.chunks;
  Head<K> head{a, token};
  head.go(begin < end ? begin : end - 1);
  const Norm<K> norm(a, token.tiling, head.side);
  const bool norms = head.normalises();
  A scale = A(1);
  if (norms) {
    double squares[1] = {0.0};
    const auto add = [&](int index, I at) {
      const auto c = Chunk<I>::template of<K::V>(a.params, token.tiling, index);
      head.go(at);
      const auto x = numbers_of(head.read(c));
      squares[0] += dot(x, x, c.whole());
    };
    // A head is added up piece by piece, and all heads chunk by chunk. Another order could change bits.
    for (I at = begin; own.warp && at < end; at += step) {
      for (int index = own.x; index < chunks; index += own.xs) add(index, at);
    }
    for (int index = own.x; !own.warp && index < chunks; index += own.xs) {
      for (I at = begin; at < end; at += step) add(index, at);
    }
    if (!own.warp || chunks > kWarp || (head.side == kV && token.tiling.pieces > 1)) {
      own.sum(squares);
    } else {  // a head that other kernels hold at once: the sum has the same bits
      A narrow[1] = {A(squares[0])};
      sum_over_lanes(narrow, kWarp);
      squares[0] = narrow[0];
    }
    scale = norm.scale(A(squares[0]));
  }
  if (begin >= end) return;
  for (int index = own.x; index < chunks; index += own.xs) {
    const auto c = Chunk<I>::template of<K::V>(a.params, token.tiling, index);
    Elements<typename K::T, K::V> x;
    A divisor;
    const auto read = [&](I at) {
      head.go(at);
      divisor = head.scale();
      if (head.writes(c)) x = head.read(c);
    };
    read(begin);
    Angles<K> angles(a, token, index, c.rotated && (!K::norm || head.side != kV));
    for (I at = begin;;) {
      if (head.writes(c)) {
        const bool rotates = c.rotated && head.side != kV;
        head.write(c, x, divisor, norms || rotates, [&](auto& numbers) {
          if (norms) apply_norm(numbers, scale, norm.weights(head.side, c.after(head.first), head.index));
          if (rotates) angles.rotate(numbers, head.index);
        });
      }
      if ((at += step) >= end) break;
      read(at);
    }
  }
}

// Without a norm, a team takes its heads of the list. With norms of each head, a warp takes a head after another. With
// a norm over all heads, a thread block takes all heads of q or k of a token, as blockIdx.y says, so that the angles of
// a chunk are computed once; or those of v, of which a warp takes each.
template <typename K>
__global__ void __launch_bounds__(K::norm ? kGroupThreads : kThreads, K::norm ? 2 : 5)
    general_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  using I = typename K::I;
  wait_for_previous_kernel();
  const I s = I(blockIdx.x) * blockDim.z + threadIdx.z;
  if (s >= a.params.seq) return;
  const Token token(a, tiling, tiling.first_sequence + blockIdx.z, s);
  const bool all = K::norm && a.params.sides[kQ].norm == kAllHeads;
  const GroupThreads<kGroupThreads> own{K::norm && (!all || blockIdx.y == kV)};
  const rope_int *starts = tiling.starts, pieces = tiling.pieces;
  if (!K::norm || !own.warp) {
    const I begin = all ? starts[blockIdx.y] : I(blockIdx.y) * own.ys;
    take<K>(token, own, begin + own.y, I(starts[all ? blockIdx.y + 1 : kSides]),
            all ? I(own.ys) : I(gridDim.y) * own.ys);
  } else {
    // Groups: the heads of q, k and v, whose pieces are one group.
    const I warps = all ? kGroupThreads / kWarp : I(gridDim.y) * blockDim.y,
            groups = starts[kV] + a.params.sides[kV].heads;
    I group = all ? starts[kV] + own.thread / kWarp : I(blockIdx.y) * blockDim.y + threadIdx.y;
    for (; group < groups; group += warps) {
      const bool of_v = group >= starts[kV];
      const I begin = of_v ? starts[kV] + (group - starts[kV]) * pieces : group;
      take<K>(token, own, begin, begin + (of_v ? pieces : 1), I(1));
    }
  }
  let_next_kernel_begin();
}

}  // namespace

cudaError_t rotate_generally(const RotateArgs& a, const RotatePlan& plan, Queue queue) {
  if (takes_norm(a.params)) {
    return with_shape(a, plan.tiling, [&](auto shape) {
      return start(plan, queue, general_kernel<Policy<decltype(shape), true, true>>, a);
    });
  }
  return with_shape</*halves=*/true>(a, plan.tiling, [&](auto shape) {
    return start(plan, queue, general_kernel<Policy<decltype(shape), true, false>>, a);
  });
}

}  // namespace rope::cuda
