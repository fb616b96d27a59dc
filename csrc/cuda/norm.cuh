// What the kernels of norms and those of their backward share. ../args.h has the formulas, see NormBackwardArgs.
//
// A team that holds a head at once, a chunk for each lane, sums over it with shuffles; it has a power of two of
// threads, at most a warp. Otherwise several threads share a group, a wide head or all heads of a token, and each adds
// up its chunks in double. Every lane of a warp takes part in every shuffle, also one past the last token, head or
// chunk.
#pragma once

#include "launch.cuh"

namespace rope::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Adds up what the lanes of a team give for each of n sums, and returns the results to each of them.
template <typename A, int n>
ROPE_FN void sum_over_lanes(A (&sums)[n], int team = int(blockDim.x)) {
  for (int lanes = 1; lanes < kWarp; lanes *= 2) {
    if (lanes == 8 && team <= 8) break;  // a test at every step would take longer than the steps that it saves
    for (int i = 0; i < n; i++) {
      const A other = __shfl_xor_sync(kAllLanes, sums[i], lanes);
      if (lanes < team) sums[i] += other;
    }
  }
}

// The threads that share a group: a warp, or all threads of a thread block. Thread (x, y) takes every xs-th chunk of
// every ys-th head.
template <int threads>
struct GroupThreads {
  const bool warp;
  const int thread = int(threadIdx.y * blockDim.x + threadIdx.x);
  const int x = warp ? thread % kWarp : int(threadIdx.x), xs = warp ? kWarp : int(blockDim.x);
  const int y = warp ? 0 : int(threadIdx.y), ys = warp ? 1 : int(blockDim.y);

  // Adds up what the threads give for each of n sums, and returns the results to each of them.
  template <int n>
  ROPE_FN void sum(double (&sums)[n]) const {
    sum_over_lanes(sums, kWarp);
    if (warp) return;
    __shared__ double of_warps[n][threads / kWarp];
    __syncthreads();  // all threads have read the sums of the call before this one
    for (int i = 0; i < n && thread % kWarp == 0; i++) of_warps[i][thread / kWarp] = sums[i];
    __syncthreads();
    for (int i = 0; i < n; i++) {
      sums[i] = 0.0;
      for (const double of_warp : of_warps[i]) sums[i] += of_warp;
    }
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

// Normalises and weights a chunk.
template <typename A, int V>
ROPE_FN void apply_norm(Numbers<A, V>& x, A scale, const Numbers<A, V>& weights) {
  for (int i = 0; i < 2 * V; i++) x.of[i] = x.of[i] * scale * weights.of[i];
}

// The norm of a side, and the steps of its backward, see ../args.h.
template <typename K>
struct Norm {
  using T = typename K::T;
  using A = typename K::A;
  using I = typename K::I;
  using N = Numbers<A, K::V>;
  const RotateArgs& a;
  const A per_channel, eps;

  ROPE_FN Norm(const RotateArgs& a, const Tiling& tiling, int side)
      : a(a), per_channel(A(tiling.per_channel[side])), eps(sizeof(A) == 8 ? A(a.norm_eps) : A(a.params.norm_eps)) {}

  // Returns the scale, given the sum of the squares.
  ROPE_FN A scale(A squares) const { return inverse_root(fma(squares, per_channel, eps)); }

  // Returns the weights of a chunk; those of v are 1.
  ROPE_FN N weights(int side, const Chunk<I>& c, I head = 0) const {
    const rope_int* strides = a.params.sides[side].weight;
    const rope_int stride = strides[1];
    N w;
    const auto get = [&](auto tag) {
      using W = decltype(tag);
      const W* from = static_cast<const W*>(a.sides[side].weight) + head * strides[0];
      const bool vectors = K::V > 1 && stride == 1 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
      for (int k = 0; k < 2; k++) read_shared<K::V>(from + c.at[k] * stride, stride, vectors, w.of + k * K::V);
    };
    if (K::general && side == kV) {
      for (int i = 0; i < 2 * K::V; i++) w.of[i] = A(1);
    } else if (a.sides[side].weight_dtype == DType::kFloat) {
      get(float());
    } else {
      get(T());
    }
    return w;
  }

  // Returns the gradient of x, and adds the terms of the gradient of w. product: the sum of g w x
  ROPE_FN N gradient(const N& x, const N& g, const N& weights, A scale, A product, N& terms) const {
    const A scaled_common = -(scale * scale * (product * per_channel)) * scale;
    N y;
    for (int i = 0; i < 2 * K::V; i++) {
      const A scaled_g = g.of[i] * scale;
      terms.of[i] = fma(scaled_g, x.of[i], terms.of[i]);
      y.of[i] = fma(x.of[i], scaled_common, scaled_g * weights.of[i]);
    }
    return y;
  }
};

// Makes the compiler convert elements to numbers again where they are needed next. Otherwise it keeps the numbers,
// which take twice the registers. zero: 0, a value that the compiler does not know
template <typename T, int V>
ROPE_FN void forget_numbers(Elements<T, V>& x, uint32_t zero) {
  if constexpr (Vector<T, V>::words) {
    for (int i = 0; i < V; i++) x.of[i / (V / 2)].of[i % (V / 2)] ^= zero;
  }
}

}  // namespace rope::cuda
