// What the kernels of norms and those of their backward share. ../args.h has the formulas. Every
// lane of a warp takes part in every shuffle, also one past the last token, head or chunk.
#pragma once

#include "launch.cuh"

namespace rope::cuda {

// Adds up what the lanes of a team give for each of n sums, and returns the results to each of them. A team has a power
// of two of threads.
template <typename A, int n>
ROPE_FN void sum_over_lanes(A (&sums)[n], int team = int(blockDim.x)) {
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    if (lanes == 8 && team <= 8) break;  // a test at every step would take longer than the steps that it saves
    for (int i = 0; i < n; i++) {
      const A other = __shfl_xor_sync(0xffffffffu, sums[i], lanes);
      if (lanes < team) sums[i] += other;
    }
  }
}

// Returns `count` numbers of a thread in the shared memory that the launch asks for. They begin an odd number of
// doubles apart, so that the threads of a warp access different banks.
ROPE_FN double* numbers_of_thread(int thread, int count) {
  extern __shared__ double numbers_of_block[];
  return numbers_of_block + thread * (count + 1);
}

// The threads that share a group: a warp, or all threads of a thread block. Thread (x, y) takes every xs-th chunk of
// every ys-th head, and adds up its chunks in double.
struct GroupThreads {
  const bool warp;
  const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
  const int x = warp ? thread % kWarp : int(threadIdx.x), xs = warp ? kWarp : int(blockDim.x);
  const int y = warp ? 0 : int(threadIdx.y), ys = warp ? 1 : int(blockDim.y);
  int sums_before = 0;

  // Adds up what the threads give for each of n sums, and returns the results to each of them.
  template <int n>
  ROPE_FN void sum(double (&sums)[n]) {
    sum_over_lanes(sums, kWarp);
    if (warp) return;
    __shared__ double of_warps[2][kGroupThreads / kWarp][n];
    auto& these = of_warps[sums_before++ % 2];  // the others may still be read
    const int lane = thread % kWarp, warps = int(blockDim.x * blockDim.y) / kWarp;
    for (int i = 0; i < n && lane == 0; i++) these[thread / kWarp][i] = sums[i];
    __syncthreads();
    int team = 1;  // the smallest power of two that is not below `warps`, as the lanes of a team
    while (team < warps) team *= 2;
    for (int i = 0; i < n; i++) sums[i] = (lane & (team - 1)) < warps ? these[lane & (team - 1)][i] : 0.0;
    sum_over_lanes(sums, team);
  }
};

// Returns this thread's part of the dot product of two groups: that of one chunk.
template <typename A, int V>
ROPE_FN A dot(const Numbers<A, V>& x, const Numbers<A, V>& y, bool whole) {
  A sums[4] = {A(0), A(0), A(0), A(0)};
  for (int i = 0; i < V; i++) {
    sums[i % 2] = fma(x.of[i], y.of[i], sums[i % 2]);
    sums[2 + i % 2] = fma(x.of[V + i], y.of[V + i], sums[2 + i % 2]);
  }
  return (sums[0] + sums[1]) + (whole ? sums[2] + sums[3] : A(0));
}

// Returns this thread's part of the sum of the squares.
template <typename T, int V>
ROPE_FN arithmetic_t<T> squares_of(const Elements<T, V>& x, bool whole) {
  const auto numbers = numbers_of(x);
  return dot(numbers, numbers, whole);
}

// Returns the product of all numbers of x and y.
template <typename A, int V>
ROPE_FN Numbers<A, V> product_of(const Numbers<A, V>& x, const Numbers<A, V>& y) {
  Numbers<A, V> z;
  for (int i = 0; i < 2 * V; i++) z.of[i] = x.of[i] * y.of[i];
  return z;
}

// Returns 1 / sqrt(mean + eps).
ROPE_FN float inverse_root(float mean_and_eps) {
  const float root = rsqrtf(mean_and_eps);
  // rsqrtf may be off by 2 ulp. A step of Newton's method leaves less than one. If the argument is 0 or infinite, the
  // error is NaN; fminf then returns its other argument, which changes neither an infinite root nor a root of 0.
  const float error = fminf(fma(-mean_and_eps * root, root, 1.0f), 1e-6f);
  return fma(0.5f * root, error, root);
}
ROPE_FN double inverse_root(double mean_and_eps) { return 1.0 / ::sqrt(mean_and_eps); }

// Returns the gradient of x, see Args in ../args.h, and adds the terms of the gradient of w. mean: of g w x
template <typename A, int V>
ROPE_FN Numbers<A, V> gradient(const Numbers<A, V>& x, const Numbers<A, V>& g, const Numbers<A, V>& weights, A scale,
                               A mean, Numbers<A, V>& terms) {
  const A scaled_common = -(scale * scale * mean) * scale;
  Numbers<A, V> y;
  for (int i = 0; i < 2 * V; i++) {
    const A scaled_g = g.of[i] * scale;
    terms.of[i] = fma(scaled_g, x.of[i], terms.of[i]);
    y.of[i] = fma(x.of[i], scaled_common, scaled_g * weights.of[i]);
  }
  return y;
}

}  // namespace rope::cuda
