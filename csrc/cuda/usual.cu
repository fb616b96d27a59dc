// The kernel for what models usually need: vectors of 16 bytes as single accesses, tables with a row for each position
// or token or frequencies, norms of each head, caches, results in 8 bits.
#include "norm.cuh"
#include "quantise.cuh"

namespace rope::cuda {
namespace {

// What a kernel is compiled for.
enum Features : int {
  kFrequencies = 1,  // the angles come from inv_freq, and not from tables
  kCache = 2,        // k and v may go to caches
  kNorm = 4,         // heads may be normalised
  kBytes = 8,        // results may be quantised
  kEager = 16,       // eager rounding
};
template <typename Shape, int features>
struct Usual : Shape {
  static constexpr bool frequencies = features & kFrequencies, cache = features & kCache, norm = features & kNorm,
                        bytes = features & kBytes, eager = features & kEager;
};

// A thread takes one chunk of a head, then of the next head of its team. What needs no position is loaded first.
template <typename K>
__global__ void __launch_bounds__(kThreads, K::norm ? 5 : 8) usual_kernel(const __grid_constant__ UsualArgs a) {
  using T = typename K::T;
  constexpr int V = K::V;
  wait_for_previous_kernel();
  const int b = a.first_sequence + int(blockIdx.z), token = int(blockIdx.x * blockDim.z + threadIdx.z);
  int h = int(blockIdx.y * blockDim.y + threadIdx.y);  // in the list of heads
  const int heads = a.ends[K::cache ? kV : kK];
  // All lanes of a warp take part in the sums of norms, also those past the last token, head or chunk.
  const int s = K::norm ? min(token, a.seq - 1) : token;
  const int index = K::norm ? min(int(threadIdx.x), a.chunks - 1) : int(threadIdx.x);
  const auto chunk = Chunk<int>::of<1>(index, a.half, a.chunks, a.start, a.half, a.others, false);  // in vectors
  while (K::cache && !K::norm && !chunk.rotated && h < a.kept) h += int(gridDim.y * blockDim.y);
  if (!K::norm && (token >= a.seq || h >= heads)) return;
  const auto at = [](const int* strides, int i, int j) { return int64_t(i) * strides[0] + int64_t(j) * strides[1]; };

  Integer given_position, given_slot;
  if (a.positions) given_position = Integer::read(a.positions, a.wide_positions, at(a.position_strides, b, s));
  if (K::cache && a.slots) given_slot = Integer::read(a.slots, a.wide_slots, at(a.slot_strides, b, s));

  // Head h: its side, its index there, whether it exists, its chunk, and what its side needs.
  int side = kQ, head = 0, weights_of = -1;
  bool present = true;
  Elements<T, V> x;
  float scale = 1.0f;
  Numbers<float, V> weights;
  const auto read_head = [&] {
    const bool after_q = h >= a.ends[kQ], after_k = K::cache && h >= a.ends[kK];
    side = int(after_q) + int(after_k);
    head = h - (after_k ? a.ends[kK] : after_q ? a.ends[kQ] : 0);
    if (K::norm) present = token < a.seq && int(threadIdx.x) < a.chunks && h < heads;
    const UsualSide& o = a.sides[side];
    const auto* in = static_cast<const Vector<T, V>*>(o.in) + at(o.in_strides, b, s);
    const unsigned first = unsigned(head * o.in_strides[2]);
    if (K::norm) x = {};
    if (present) x = {in[first + chunk.at[0]], in[first + chunk.at[1]]};
    if (K::bytes && present && a.scales[side]) scale = a.scales[side][a.scale_by_head >> side & 1 ? head : 0];
    if (!K::norm || side == weights_of) return;
    weights_of = side;
    const auto read = [&](auto tag) {
      const auto* from = static_cast<const decltype(tag)*>(a.weights[side]);
      for (int k = 0; k < 2; k++) read_shared<V>(from + chunk.at[k] * V, 1, true, weights.of + k * V);
    };
    if (side == kV || !a.weights[side]) {
      for (float& weight : weights.of) weight = 1.0f;
    } else {
      a.wide_weights ? read(float()) : read(T());
    }
  };
  read_head();

  const Columns<K> columns(index, a.half * V);
  CosSin<float, V> angles;
  if (K::frequencies && chunk.rotated) {
    const Frequencies frequencies{a.cos, bool(a.wide_angles), bool(a.split), a.table_strides[1], 1};
    columns.template read<true>(frequencies, angles);
  }
  const int64_t given = a.positions ? given_position.value(a.wide_positions) : a.same_position ? 0 : s;
  const int64_t position = int64_t(uint64_t(given) + uint64_t(int64_t(a.offset)));
  const bool valid = (K::frequencies && !K::cache) || a.allowed == 0 || uint64_t(position) < a.allowed;
  if (!K::frequencies && chunk.rotated) {
    const int64_t row = at(a.table_strides, b, a.by_token ? s : valid ? int(position) : 0);
    const auto read = [&](auto tag) {
      columns.read(static_cast<const decltype(tag)*>(a.cos) + row, 1, true, angles.cos);
      columns.read(static_cast<const decltype(tag)*>(a.sin) + row, 1, true, angles.sin);
    };
    a.wide_angles ? read(float()) : read(T());
  }
  bool pad = false, fits = true;
  int block = b, in_block = int(position);  // the cell of the caches
  if (K::cache && a.slots) {
    const int64_t slot = given_slot.value(a.wide_slots);
    pad = slot < 0, fits = slot < int64_t(a.cells);
    block = int(slot) >> a.block_shift, in_block = int(slot) - (block << a.block_shift);
  }
  check_token(valid || pad, fits);
  if (K::frequencies && chunk.rotated) turn(angles, position);
  const Eagerly<T> eagerly{bool(a.narrow)};
  if (!K::eager) {
    Factor<float>{a.factor_hi, a.factor_lo}.scale(angles);
  } else if (a.factor_hi != 1.0f) {
    eagerly.scale(angles, [&](float x) { return x * a.factor_hi; });
  }
  for (int i = 0; i < V && a.inverse; i++) angles.sin[i] = -angles.sin[i];
  for (int i = 0; i < V && K::cache && !valid; i++) angles.cos[i] = angles.sin[i] = NAN;  // a pad

  for (;;) {
    float squares[1] = {0.0f};
    if constexpr (K::norm) {
      const auto numbers = numbers_of(x);
      squares[0] = dot(numbers, numbers, chunk.whole());
      sum_over_lanes(squares);
    }
    const bool to_cell = K::cache && side != kQ && a.has_cache;
    if (present && !(to_cell && pad)) {
      const bool norms = K::norm && (a.norms >> side & 1), rotates = chunk.rotated && (!K::cache || side != kV);
      auto numbers = numbers_of(x);
      if (norms) apply_norm(numbers, inverse_root(fma(squares[0], a.per_channel, a.norm_eps)), weights);
      if (rotates && K::eager) eagerly.template rotate<K::interleaved>(numbers, angles);
      if (rotates && !K::eager) rotate<K::interleaved>(numbers, angles);
      if (norms || rotates) x = rounded<T, V>(numbers);
      const UsualSide& o = a.sides[side];
      const int64_t to = at(o.out_strides, to_cell ? block : b, to_cell ? in_block : s);
      const unsigned first = unsigned(head * o.out_strides[2]);
      const auto write = [&](const auto& vectors) {
        auto* const out = static_cast<std::remove_cvref_t<decltype(vectors.of[0])>*>(o.out) + to;
        out[first + chunk.at[0]] = vectors.of[0];
        if (chunk.whole()) out[first + chunk.at[1]] = vectors.of[1];
      };
      const int format = K::bytes ? a.formats >> 2 * side & 3 : kUnquantised;
      format ? write(quantised_to(format, numbers, scale)) : write(x);
    }
    h += int(gridDim.y * blockDim.y);
    if ((K::norm ? h - int(threadIdx.y) : h) >= heads) break;  // all lanes of a warp at once
    read_head();
  }
  let_next_kernel_begin();
}

template <typename Shape, int features>
cudaError_t start_usual(const RotatePlan& plan, Queue queue) {
  return for_sequences(plan.grid, [&](Dim3 grid, rope_int first) {
    UsualArgs args = *plan.usual;
    args.first_sequence = int(first);
    return start(grid, plan.block, 0, queue, usual_kernel<Usual<Shape, features>>, args);
  });
}

}  // namespace

cudaError_t architecture(int& found) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, usual_kernel<Usual<Shape<float, 4, false>, 0>>);
  found = attributes.ptxVersion;
  return error;
}

cudaError_t rotate_usually(const RotateArgs& a, const RotatePlan& plan, Queue queue) {
  return with_shape(a, plan.tiling, [&](auto shape) {
    using S = decltype(shape);
    if constexpr (has_usual_kernels(sizeof(typename S::T), S::V)) {
      const auto with_source = [&](auto source) {
        constexpr int from = source(), bytes = sizeof(typename S::T) == 2 ? kBytes : 0;
        const bool quantises = bytes && plan.usual->formats;
        if (takes_norm(a.params)) {
          return quantises ? start_usual<S, from | kCache | kNorm | bytes>(plan, queue)
                           : start_usual<S, from | kCache | kNorm>(plan, queue);
        }
        if (a.params.has_cache) {
          return quantises ? start_usual<S, from | kCache | bytes>(plan, queue)
                           : start_usual<S, from | kCache>(plan, queue);
        }
        if (from == 0 && a.params.rounding != kOnce) return start_usual<S, kEager>(plan, queue);
        return start_usual<S, from>(plan, queue);
      };
      return a.params.source == kInvFreq ? with_source(std::integral_constant<int, kFrequencies>())
                                         : with_source(std::integral_constant<int, 0>());
    }
    return cudaErrorInvalidValue;  // such a call is not usual
  });
}

}  // namespace rope::cuda
