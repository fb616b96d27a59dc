// The kernel that computes tables of cos and sin.
#include "launch.cuh"

namespace rope::cuda {
namespace {

// Returns element i of positions, which may have any dtype, as a double.
ROPE_FN double position_at(const CosSinArgs& c, int64_t i) {
  const auto as = [&](auto tag) { return double(static_cast<const decltype(tag)*>(c.positions)[i]); };
  const DType type = c.position_dtype;
  if (type == DType::kInt8) return as(int8_t());
  if (type == DType::kUInt8) return as(uint8_t());
  if (type == DType::kInt16) return as(int16_t());
  if (type == DType::kInt32) return as(int32_t());
  if (type == DType::kInt64) return as(int64_t());
  return type == DType::kFloat ? as(float()) : as(double());
}

// A thread computes V adjacent columns of a table row at a time. several: the angle is a sum over any number of axes;
// with exactly one axis nothing has to be added. The launch bound of 8 thread blocks lets a thread have 64 registers.
template <typename T, int V, bool several>
__global__ void __launch_bounds__(kThreads, several ? 8 : 0) cos_sin_kernel(const __grid_constant__ CosSinArgs c) {
  using A = arithmetic_t<T>;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= c.tokens) return;
  const double only = several ? 0.0 : position_at(c, row);
  const auto factor = Factor<A>::of(c);
  const auto frequencies = Frequencies::of(c, c.inv_freq_strides[2]);
  for (int64_t first = int64_t(threadIdx.x) * V; first < c.pairs; first += int64_t(blockDim.x) * V) {
    CosSin<A, V> angles;
    Angle<A> sums[V] = {};
    for (int64_t axis = 0; axis < (several ? c.axes : 1); axis++) {
      const double position = several ? position_at(c, axis * c.tokens + row) : only;
      A hi[V], lo[V];
      frequencies.read<V>(axis * c.inv_freq_strides[1] + first * c.inv_freq_strides[2], hi, lo);
      for (int i = 0; i < V; i++) {
        const auto angle = angle_of(position, hi[i], lo[i]);
        if constexpr (several) {
          add(sums[i], angle);
        } else {
          cos_sin_of(angle, angles.cos[i], angles.sin[i]);
        }
      }
    }
    if constexpr (several) {
      for (int i = 0; i < V; i++) cos_sin_of(sums[i], angles.cos[i], angles.sin[i]);
    }
    factor.scale(angles);
    *reinterpret_cast<Vector<T, V>*>(static_cast<T*>(c.cos) + row * c.pairs + first) = rounded<T, V>(angles.cos);
    *reinterpret_cast<Vector<T, V>*>(static_cast<T*>(c.sin) + row * c.pairs + first) = rounded<T, V>(angles.sin);
  }
}

}  // namespace

cudaError_t cos_sin(const CosSinArgs& c, cudaStream_t stream) {
  return with_type(c.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int full = 16 / sizeof(T);
    const auto launch = [&](auto v, auto several) {
      const rope_int x = std::min(ceil_div(c.pairs, v()), rope_int(kThreads)), y = kThreads / x;
      return start({stream, {ceil_div(c.tokens, y), 1, 1}, {x, y, 1}}, cos_sin_kernel<T, v(), several()>, c);
    };
    const auto with = [&](auto v) { return c.axes == 1 ? launch(v, std::false_type()) : launch(v, std::true_type()); };
    return c.pairs % full == 0 ? with(std::integral_constant<int, full>()) : with(std::integral_constant<int, 1>());
  });
}

}  // namespace rope::cuda
