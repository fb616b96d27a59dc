// The kernel that computes the gradients of cos and sin; see TableBackwardArgs in ../args.h. Written as complex
// numbers, its two sums are the real and the imaginary part of one sum of (g + ih)(a - ib). Each product is computed by
// the function that rotates a pair: it rotates (g, h) by an "angle" whose cos is a and whose sin is -b.
#include "launch.cuh"

namespace rope::cuda {
namespace {

// The sums of one thread, one for each channel of its chunk, with Kahan's compensation: the result is sum - over.
template <typename A, int V>
struct Sums {
  Numbers<A, V> sum{}, over{};  // over: by how much rounding made the sum too large

  ROPE_FN static void add(A& sum, A& over, A x) {
    const A y = x - over, larger = sum + y;
    over = (larger - sum) - y;
    sum = larger;
  }
  ROPE_FN void add(const Numbers<A, V>& x) {
    for (int i = 0; i < 2 * V; i++) add(sum.of[i], over.of[i], x.of[i]);
  }
};

// Returns the conjugates of the pairs of x as the angles that rotate() takes.
template <bool interleaved, typename A, int V>
ROPE_FN CosSin<A, V> conjugate(const Numbers<A, V>& x) {
  CosSin<A, V> angles;
  for (int i = 0; i < V; i++) {
    angles.cos[i] = x.of[member<interleaved, V>(i, 0)];
    angles.sin[i] = -x.of[member<interleaved, V>(i, 1)];
  }
  return angles;
}

// First each thread sums the products of some heads of some tokens for the channels of its chunk. Then the threads of a
// chunk share its channels: each adds up the sums of all of them for a channel, and writes the result. The first
// channel of a pair is the real part, the gradient of cos, and the second one is the imaginary part, the gradient of
// sin. The launch bound of 2 thread blocks of 256 threads limits a thread to 128 registers, see plan.h.
template <typename S>
__global__ void __launch_bounds__(kTableThreads, 2)
    table_backward_kernel(const __grid_constant__ TableBackwardArgs t, const __grid_constant__ Tiling tiling) {
  using T = typename S::T;
  using A = typename S::A;
  using I = int64_t;
  constexpr int V = S::V;
  const RotateArgs& a = t.rotate;
  wait_for_previous_kernel();
  const RopeParams& p = a.params;
  const TokensOfRows& tokens = t.tokens;
  const unsigned blocks = unsigned(tiling.blocks_per_row), run = blockIdx.x / blocks,
                 of_run = blockIdx.x - run * blocks;
  const bool by_head = p.source == kTableByHead;
  const int64_t table_heads = p.sides[kQ].heads;
  const int64_t out_row = int64_t(run) * blockDim.z + threadIdx.z;  // [rows, heads], if the table is by head
  const int64_t row = by_head ? out_row / table_heads : out_row, first_head = by_head ? out_row % table_heads : 0;
  const int index = int(of_run * blockDim.x + threadIdx.x), teams = int(blockDim.y);
  const bool inside = row < tokens.rows && index < tiling.chunks;
  const auto chunk = Chunk<I>::template of<V>(p, tiling, index);
  Sums<A, V> total;
  if (inside) {
    // The row has the entries begin to end - 1, see TokensOfRows.
    int64_t begin = row - tokens.shift, end = begin + (begin >= 0 && begin < tokens.entries);
    if (tokens.listed) {
      begin = t.starts[row];
      end = t.starts[row + 1];
      // The lists of all rows together must have all tokens. A token is in none if its position is outside the tables.
      assert((row > 0 || begin == 0) && (row + 1 < tokens.rows || end == tokens.entries) &&
             "position + offset must be a row of cos and sin");
    }
    for (int side = kQ; side <= kK; side++) {
      const Side& o = p.sides[side];
      const rope_int* strides = t.x[side].strides;
      const T *gradients = static_cast<const T*>(a.sides[side].in), *xs = static_cast<const T*>(t.x[side].data);
      if (o.heads == 0) continue;
      const rope_int heads = by_head ? 1 : o.heads;  // that the row rotated
      // The teams are divided among heads and tokens: head_teams teams take the heads of one token, and token_teams
      // tokens are taken at the same time. To go on by token_teams tokens, each team goes to another entry and sequence
      // of it.
      const unsigned head_teams = unsigned(min((heads + kTableHeads - 1) / kTableHeads, rope_int(teams)));
      const unsigned token_teams = unsigned(teams) / head_teams;
      const unsigned token_team = threadIdx.y / head_teams, head_team = threadIdx.y - token_team * head_teams;
      // A division in 32 bits is faster. All numbers of sequences that are greater than the number of threads give the
      // same quotient and remainder.
      const unsigned sequences = unsigned(min(tokens.sequences, rope_int(kTableThreads + 1)));
      if (token_team >= token_teams) continue;
      int64_t entry = begin + token_team / sequences, nth = token_team % sequences;
      while (entry < end) {
        const uint64_t token = uint64_t(tokens.listed ? t.order[entry] : entry), b = token / uint64_t(p.seq);
        const I s = I(token - b * uint64_t(p.seq)), sequence = I(b) + nth;
        const TokenHeads<V, const T, I> g{gradients + sequence * o.in[0] + s * o.in[1] + first_head * o.in[2], o.in,
                                          true};
        const TokenHeads<V, const T, I> x{xs + sequence * strides[0] + s * strides[1] + first_head * strides[2],
                                          strides, true};
        for (I h = head_team; h < heads; h += kTableHeads * head_teams) {
          Elements<T, V> g_read[kTableHeads], x_read[kTableHeads];
          for (int i = 0; i < kTableHeads; i++) {  // not past the last head
            const I head = h + i * head_teams < heads ? h + i * head_teams : h;
            g_read[i] = g.read(head, chunk);
            x_read[i] = x.read(head, chunk);
          }
          for (int i = 0; i < kTableHeads; i++) {
            if (h + i * head_teams >= heads) break;
            auto product = numbers_of(g_read[i]);
            rotate<S::interleaved>(product, conjugate<S::interleaved>(numbers_of(x_read[i])));
            total.add(product);
          }
        }
        entry += token_teams / sequences;
        nth += token_teams % sequences;
        if (nth >= tokens.sequences) nth -= tokens.sequences, entry++;
      }
    }
  }

  __shared__ A sums[kTableThreads][2 * V + 1];  // + 1, so that neighbouring threads use different banks
  const int first = int(threadIdx.z * blockDim.y * blockDim.x + threadIdx.x), step = int(blockDim.x);
  A* const own = sums[first + int(threadIdx.y) * step];
  for (int i = 0; i < 2 * V; i++) own[i] = total.sum.of[i] - total.over.of[i];
  __syncthreads();
  if (!inside) return;
  const auto factor = Factor<A>::of(a);
  for (int i = int(threadIdx.y); i < 2 * V; i += teams) {
    A sum = A(0), over = A(0);
    for (int other = 0; other < teams; other++) Sums<A, V>::add(sum, over, sums[first + other * step][i]);
    sum = factor.times(sum - over);
    // The result belongs to cos or sin of the pair that this channel is in.
    const I channel = chunk.template channel<V>(i) - p.rotary_start, pairs = I(p.rotary_dim / 2);
    const bool of_sin = p.interleaved ? channel % 2 != 0 : channel >= pairs;
    const I at = out_row * pairs + (p.interleaved ? channel / 2 : of_sin ? channel - pairs : channel);
    if (of_sin && p.inverse) sum = -sum;
    void* const to = of_sin ? t.sin_grad : t.cos_grad;
    const auto store = [&](auto tag) { round_to(sum, static_cast<decltype(tag)*>(to)[at]); };
    a.table_dtype == DType::kFloat ? store(float()) : store(T());
  }
  let_next_kernel_begin();
}

}  // namespace

cudaError_t table_backward(const TableBackwardArgs& b, const Plan& plan, Queue queue) {
  return with_shape(b.rotate, plan.tiling, [&](auto shape) {
    return start(plan.grid, plan.block, queue, table_backward_kernel<decltype(shape)>, b, plan.tiling);
  });
}

}  // namespace rope::cuda
