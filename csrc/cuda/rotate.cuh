// The kernel in which a thread holds one chunk of each head that it takes. rotate.cu and norm.cu choose its policy.
#pragma once

#include "norm.cuh"

namespace rope::cuda {

// Rotates q and k, with or without a norm of each head, and can write k and v to a cache. With a norm the lanes of a
// team sum over a head, so that all of them stay until the last one is done.
template <typename K>
__global__ void __launch_bounds__(kThreads, K::thread_blocks)
    rotate_kernel(const __grid_constant__ RotateArgs a, const __grid_constant__ Tiling tiling) {
  using A = typename K::A;
  using I = typename K::I;
  constexpr int V = K::V, at_once = K::at_once;
  const RopeParams& p = a.params;
  wait_for_previous_kernel();
  const int64_t s = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (!K::norm && s >= p.seq) return;
  Token<K> token(a, tiling, I(tiling.first_sequence) + I(blockIdx.z), I(K::norm ? min(s, p.seq - 1) : s));
  if (K::general && blockIdx.y >= tiling.shares) {
    token.arrive();
    token.check();
    if (s < p.seq) copy_v(a, token);
    return;
  }
  int index = int(threadIdx.x);
  do {
    const auto chunk = Chunk<I>::template of<V>(p, tiling, index);
    Heads<K> heads(a, token, !K::norm && !chunk.rotated);
    // A thread past the last token or chunk takes no head, and none reads a head of another team: another thread may be
    // about to write it.
    bool present = (!K::norm || (s < p.seq && index < tiling.chunks)) && heads.next(0);
    const Norm<K> norm(a, tiling, kQ);  // all heads of the list have one head_dim
    Numbers<A, V> weights;              // of the side that the heads are in
    A scale = A(1);                     // of the next head, if it is quantised
    Elements<typename K::T, V> x[at_once] = {};
    // These two start all loads for the next heads at once. The first one needs no position.
    const auto read_parameters = [&] {
      if (K::norm && heads.normalises() && !heads.located()) weights = norm.weights(heads.side, chunk);
      if (K::general) scale = heads.scale(heads.head);
    };
    const auto read_heads = [&] {
      for (int i = 0; i < at_once; i++) {
        const I head = heads.head_at(i);
        if (i == 0 || head < heads.end) x[i] = heads.read(head, chunk);
      }
    };
    Angles<K> angles(a, token, index, present && chunk.rotated && heads.rotates());
    if (present) read_parameters();
    token.arrive();
    angles.read();
    if (present) read_heads();
    token.check();
    angles.finish();
    while (K::norm ? __any_sync(kAllLanes, present) != 0 : present) {
      A squares[at_once];
      if constexpr (K::norm) {
        for (int i = 0; i < at_once; i++) {
          const auto numbers = numbers_of(x[i]);
          squares[i] = dot(numbers, numbers, chunk.whole());
        }
        sum_over_lanes(squares);
        for (int i = 0; i < at_once; i++) forget_numbers(x[i], uint32_t(tiling.vector) >> 31);
      }
      if (!present) continue;
      heads.locate();
      for (int i = 0; i < at_once; i++) {
        const I head = heads.head_at(i);
        if (head >= heads.out_end) break;
        const bool norms = K::norm && heads.normalises(), rotated = chunk.rotated && heads.rotates();
        heads.write(head, chunk, x[i], scale, norms || rotated, [&](auto& numbers) {
          if (norms) norm.apply(numbers, norm.scale(squares[i]), weights);
          if (rotated) angles.rotate(numbers, head);
        });
      }
      present = heads.next(at_once);
      if (present) read_parameters(), read_heads();
    }
    // A team has a thread for every chunk, unless vectors have one channel.
  } while (!K::norm && V == 1 && (index += int(blockDim.x)) < tiling.chunks);
  let_next_kernel_begin();
}

}  // namespace rope::cuda
