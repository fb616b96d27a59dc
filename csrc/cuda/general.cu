// The kernel that takes every rotation which is not usual: any dtype and layout, angles of any source, norms of any
// group, caches of any shape.
#include "general.cuh"
#include "quantise.cuh"

namespace rope::cuda {
namespace {

// Returns the place of a head of the list of heads. A v with another head_dim than k is cut into pieces of k's
// head_dim, of which the last may be short; each piece is in the list.
ROPE_FN Place<rope_int> place_of(const Args& a, const Tiling& t, rope_int at) {
  const int side = int(at >= t.starts[kK]) + int(at >= t.starts[kV]);
  const rope_int head = at - t.starts[side];
  if (side != kV || t.pieces == 1) return {side, head, 0};
  return {side, head / t.pieces, head % t.pieces * a.sides[kQ].head_dim};
}

// Takes every step-th head of the list from `begin` to `end`. With a norm, the threads take a group together.
template <typename S, bool norm>
ROPE_FN void take(GeneralToken<S>& token, Chunk<S::V, rope_int>& chunk, GroupThreads& own, rope_int begin, rope_int end,
                  rope_int step) {
  using T = typename S::T;
  using A = typename S::A;
  constexpr int V = S::V;
  const Args& a = token.a;
  const Tiling& t = token.tiling;
  // Calls f(head) for each chunk of this thread in some heads of the list.
  const auto for_chunks = [&](rope_int from, rope_int to, auto&& f) {
    for (int index = own.x; index < t.chunks; index += own.xs) {
      chunk = chunk_at<V>(a, t, index);
      for (rope_int at = from; at < to; at += step) f(place_of(a, t, at));
    }
  };
  const auto read = [&](const Place<rope_int>& h) {
    const Side& side = a.sides[h.side];
    return token.template heads<const T>(side.in, side.in_strides)
        .read(h.head, moved(chunk, h.first, side.head_dim - 1));
  };
  const auto one = place_of(a, t, begin < end ? begin : end - 1);
  A scale = A(1);
  if (norm && a.sides[one.side].norm) {
    double squares[1] = {0.0};
    for (rope_int from = begin, to; from < end; from = to) {
      to = own.warp ? from + 1 : end;  // one piece of v after another: another order could change bits
      for_chunks(from, to, [&](const Place<rope_int>& h) { squares[0] += squares_of(read(h), is_whole(chunk)); });
    }
    if (!own.warp || t.chunks > kWarp || (one.side == kV && t.pieces > 1)) {
      own.sum(squares);
    } else {  // a head that other kernels hold at once: the sum has the same bits
      A narrow[1] = {A(squares[0])};
      sum_over_lanes(narrow, kWarp);
      squares[0] = narrow[0];
    }
    scale = inverse_root(fma(A(squares[0]), A(t.per_channel[one.side]), A(a.norm_eps)));
  }
  for_chunks(begin, end, [&](const Place<rope_int>& h) {
    const Side& side = a.sides[h.side];
    const bool norms = norm && side.norm, rotates = chunk.rotated && h.side != kV,
               to_cell = h.side != kQ && a.has_cache;
    if ((to_cell && token.pad) || !(chunk.rotated || norms || side.factor || !t.in_place[h.side])) return;
    auto x = read(h);
    token.arrive(rotates, h.head);
    auto numbers = numbers_of(x);
    const auto round = [&] { numbers = numbers_of(x = rounded<T, V>(numbers)); };
    if (norms) {
      for (A& number : numbers.of) number *= scale;
      if (a.round_before_weight) round();
      const auto of_head = moved(chunk, h.first, side.head_dim - 1);
      if (side.weight) numbers = product_of(numbers, weights_of<S>(a, h.side, of_head, h.head));
      if (a.rounding != kOnce) round();
    }
    if (rotates) token.rotate(numbers);
    if (side.factor) {
      if (a.rounding != kOnce) round();
      for (A& number : numbers.of) number *= token.factor(side, h.head);
    }
    if (norms || rotates || side.factor) {
      x = rounded<T, V>(numbers);
      if (a.rounding != kOnce) numbers = numbers_of(x);
    }
    const auto write = [&]<typename E>(const Elements<E, V>& to_write) {
      token.template heads<E>(side.out, side.out_strides, to_cell)
          .write(h.head, moved(chunk, h.first, side.head_dim - 1), to_write);
    };
    side.format ? write(quantised_to(side.format, numbers, A(side.scale[h.head * side.scale_stride]))) : write(x);
  });
}

// Without a norm, a team takes its heads of the list. With norms of each head, a warp or a thread block takes a head
// after another. With a norm over all heads, a thread block takes all heads of q or k of a token, as blockIdx.y says;
// or those of v, of which a warp takes each.
template <typename S, bool norm>
__global__ void __launch_bounds__(norm ? kGroupThreads : kThreads, norm ? 1 : 4)
    general_kernel(const __grid_constant__ Args a, const __grid_constant__ Tiling tiling) {
  const rope_int s = rope_int(blockIdx.x) * blockDim.z + threadIdx.z;
  if (s >= a.seq) return;
  Chunk<S::V, rope_int> chunk{};
  GeneralToken<S> token(a, tiling, chunk, tiling.first_sequence + blockIdx.z, s);
  const rope_int *starts = tiling.starts, pieces = tiling.pieces;
  const bool all = norm && a.sides[kQ].norm == kAllHeads, whole_side = all && blockIdx.y != kV;
  GroupThreads own{norm && !whole_side && (all || tiling.chunks <= kWarp || !S::usual)};
  const rope_int first = rope_int(blockIdx.y) * blockDim.y + threadIdx.y;
  const rope_int teams = all ? blockDim.x * blockDim.y / kWarp : rope_int(gridDim.y) * blockDim.y;
  if constexpr (!norm) {
    take<S, norm>(token, chunk, own, first, starts[kSides], teams);
  } else {
    // The groups: a whole side, or the heads of q, k and v, whose pieces are one group.
    const rope_int groups = whole_side ? 1 : starts[kV] + a.sides[kV].heads;
    rope_int group = whole_side ? 0 : all ? starts[kV] + own.thread / kWarp : first;
    for (; group < groups; group += teams) {
      rope_int begin = group, end = group + 1;
      if (group >= starts[kV]) begin = starts[kV] + (group - starts[kV]) * pieces, end = begin + pieces;
      if (whole_side) begin = starts[blockIdx.y], end = starts[blockIdx.y + 1];
      take<S, norm>(token, chunk, own, begin + own.y, end, rope_int(own.ys));
    }
  }
}

}  // namespace

cudaError_t rotate_generally(const Args& a, const Plan& plan, cudaStream_t stream) {
  Tiling tiling = plan.tiling;
  const auto start = [&](auto kernel) {
    return start_sequences(plan, stream, tiling.first_sequence, kernel, a, tiling);
  };
  return takes_norm(a) ? with_shape(a, tiling, [&](auto s) { return start(general_kernel<decltype(s), true>); })
                       : with_shape<true>(a, tiling, [&](auto s) { return start(general_kernel<decltype(s), false>); });
}

}  // namespace rope::cuda
