// The kernel for what models usually need: vectors of 16 bytes as single accesses, tables with a row for each position
// or token or frequencies, norms of each head, caches, results in 8 bits.
#pragma once

#include "norm.cuh"

namespace rope::cuda {

// What a kernel does besides the rotation.
struct Plainly {
  static constexpr bool cache = false;  // k and v may go to caches
  static constexpr bool norm = false;   // heads may be normalised
  static constexpr bool bytes = false;  // results may be quantised
  static constexpr bool eager = false;  // eager rounding
};
struct WithEagerRounding : Plainly {
  static constexpr bool eager = true;
};
template <bool has_norm, bool quantises>
struct WithCache : Plainly {
  static constexpr bool cache = true, norm = has_norm, bytes = quantises;
};

// frequencies: the angles come from inv_freq, and not from tables.
template <typename Shape, bool has_frequencies, typename Features>
struct Usual : Shape, Features {
  using I = int;
  static constexpr bool frequencies = has_frequencies;
};

// A thread takes one chunk of a head, then of the next head of its team. Offsets in a token have 32 bits, and count
// vectors. What needs the position comes as late as possible, and the assertion after all loads: the compiler moves no
// instruction across it.
template <typename K>
__global__ void __launch_bounds__(kThreads, K::norm ? 5 : 8) usual_kernel(const __grid_constant__ UsualArgs a) {
  using T = typename K::T;
  constexpr int V = K::V;
  wait_for_previous_kernel();
  const int b = a.first_sequence + int(blockIdx.z), token = int(blockIdx.x * blockDim.z + threadIdx.z);
  // The lanes of a norm stay, because all of a warp take part in each sum.
  if (!K::norm && token >= a.seq) return;
  const int s = K::norm ? min(token, a.seq - 1) : token;
  const int index = K::norm ? min(int(threadIdx.x), a.chunks - 1) : int(threadIdx.x);
  const auto chunk = Chunk<int>::of<1>(index, a.half, a.chunks, a.start, a.half, a.others, false);

  Integer given_position{a.same_position ? 0 : s, 0}, given_slot{0, 0};
  if (a.positions) {
    const int64_t at = int64_t(b) * a.position_batch + int64_t(s) * a.position_token;
    given_position = Integer::read(a.positions, a.wide_positions, at);
  }
  if (K::cache && a.slots) {
    const int64_t at = int64_t(b) * a.slot_batch + int64_t(s) * a.slot_token;
    given_slot = Integer::read(a.slots, a.wide_slots, at);
  }

  int side = kQ, head = 0, weights_of = -1;
  bool present = false;
  float scale = 1.0f;
  Elements<T, V> x;
  Numbers<float, V> weights;
  const int heads = a.ends[K::cache ? kV : kK];
  const auto read_head = [&](int h) {
    side = int(h >= a.ends[kQ]) + int(K::cache && h >= a.ends[kK]);
    head = h - (side ? a.ends[side - 1] : 0);
    present = !K::norm || (token < a.seq && int(threadIdx.x) < a.chunks && h < heads);
    if (K::cache && !chunk.rotated && h < a.kept) present = false;
    const UsualSide& o = a.sides[side];
    const auto* from =
        static_cast<const Vector<T, V>*>(o.in) + int64_t(b) * o.in_batch + int64_t(s) * o.in_token + head * o.in_head;
    if (K::norm) x = {};
    if (present) x = {from[chunk.at[0]], from[chunk.at[1]]};
    if (K::bytes && (a.formats >> 2 * side & 3) && present)
      scale = a.scales[side][a.scale_by_head >> side & 1 ? head : 0];
    if (K::norm && side != weights_of) {
      weights_of = side;
      if (side == kV || !(a.norms >> side & 1)) {
        for (float& weight : weights.of) weight = 1.0f;
      } else {
        for (int k = 0; k < 2; k++) {
          const auto read = [&](auto tag) {
            read_shared<V>(static_cast<const decltype(tag)*>(a.weights[side]) + chunk.at[k] * V, 1, true,
                           weights.of + k * V);
          };
          a.wide_weights ? read(float()) : read(T());
        }
      }
    }
  };
  int h = int(blockIdx.y * blockDim.y + threadIdx.y);
  if (!K::norm && h >= heads) return;
  read_head(h);
  const Columns<K> columns(index, a.half * V);
  CosSin<float, V> angles;
  if (K::frequencies && chunk.rotated) {
    columns.template read<true>(Frequencies{a.cos, bool(a.wide_angles), bool(a.split), a.table_row, 1}, angles);
  }

  const int64_t position = int64_t(uint64_t(given_position.value(a.wide_positions)) + uint64_t(int64_t(a.offset)));
  const bool valid = (K::frequencies && !K::cache) || a.allowed == 0 || uint64_t(position) < a.allowed;
  if (!K::frequencies && chunk.rotated) {
    const int row = a.by_token ? s : valid ? int(position) : 0;
    const int64_t at = int64_t(b) * a.table_batch + int64_t(row) * a.table_row;
    const auto read = [&](auto tag) {
      columns.read(static_cast<const decltype(tag)*>(a.cos) + at, 1, true, angles.cos);
      columns.read(static_cast<const decltype(tag)*>(a.sin) + at, 1, true, angles.sin);
    };
    a.wide_angles ? read(float()) : read(T());
  }
  bool pad = false, fits = true;
  int block = b, in_block = int(position);  // of the cell in the caches
  if (K::cache && a.slots) {
    const int64_t slot = given_slot.value(a.wide_slots);
    pad = slot < 0;
    fits = slot < int64_t(a.cells);
    block = int(slot) >> a.block_shift;
    in_block = int(slot) - (block << a.block_shift);
  }
  if (!((valid || pad) && fits)) {
    assert((valid || pad) && "position + offset must be a row of cos and sin, and a cell of the caches");
    assert(fits && "slot must be less than the number of cells in the caches");
    __builtin_unreachable();
  }
  if (K::frequencies) turn(angles, position);
  if constexpr (K::eager) {
    if (a.factor_hi != 1.0f) Eagerly<T>{bool(a.narrow)}.scale(angles, [&](float x) { return x * a.factor_hi; });
  } else {
    Factor<float>{a.factor_hi, a.factor_lo}.scale(angles);
  }
  if (a.inverse) invert(angles);
  if (K::cache && !valid) {
    for (int i = 0; i < V; i++) angles.cos[i] = angles.sin[i] = NAN;
  }

  for (;;) {
    float squares[1] = {0.0f};
    if constexpr (K::norm) {
      const auto numbers = numbers_of(x);
      squares[0] = dot(numbers, numbers, chunk.whole());
      sum_over_lanes(squares);
    }
    const bool to_cache = K::cache && side != kQ && a.has_cache;
    if (present && !(to_cache && pad)) {
      const bool rotates = chunk.rotated && (!K::cache || side != kV), norms = K::norm && (a.norms >> side & 1);
      const int format = K::bytes ? a.formats >> 2 * side & 3 : 0;
      const UsualSide& o = a.sides[side];
      const int64_t to = int64_t(to_cache ? block : b) * o.out_batch + int64_t(to_cache ? in_block : s) * o.out_token +
                         head * o.out_head;
      auto numbers = numbers_of(x);
      if (norms) {
        const float root = inverse_root(fma(squares[0], a.per_channel, a.norm_eps));
        for (int i = 0; i < 2 * V; i++) numbers.of[i] = numbers.of[i] * root * weights.of[i];
      }
      if (rotates) {
        if constexpr (K::eager) {
          Eagerly<T>{bool(a.narrow)}.template rotate<K::interleaved>(numbers, angles);
        } else {
          rotate<K::interleaved>(numbers, angles);
        }
      }
      if (norms || rotates) x = rounded<T, V>(numbers);
      const auto write = [&](const auto& vectors) {
        auto* const out = static_cast<std::remove_cvref_t<decltype(vectors.of[0])>*>(o.out) + to;
        out[chunk.at[0]] = vectors.of[0];
        if (chunk.whole()) out[chunk.at[1]] = vectors.of[1];
      };
      if (K::bytes && format) {
        write(quantised_to(format, numbers, scale));
      } else {
        write(x);
      }
    }
    h += int(gridDim.y * blockDim.y);
    if (h - (K::norm ? int(threadIdx.y) : 0) >= heads) break;
    read_head(h);
  }
  let_next_kernel_begin();
}

// Calls f(shape, frequencies, bytes), with types that tell what the usual kernel of a plan must do.
template <typename F>
cudaError_t with_usual(const RotateArgs& a, const RotatePlan& plan, F&& f) {
  return with_shape(a, plan.tiling, [&](auto shape) {
    using S = decltype(shape);
    if constexpr (has_usual_kernels(sizeof(typename S::T), S::V)) {
      const auto with_source = [&](auto frequencies) {
        if constexpr (sizeof(typename S::T) == 2) {
          if (plan.usual->formats) return f(shape, frequencies, std::true_type());
        }
        return f(shape, frequencies, std::false_type());
      };
      return a.params.source == kInvFreq ? with_source(std::true_type()) : with_source(std::false_type());
    }
    return cudaErrorInvalidValue;  // such a plan has no usual kernel
  });
}
template <typename K>
cudaError_t start_usual(const RotatePlan& plan, Queue queue) {
  return for_sequences(plan.grid, [&](Dim3 grid, rope_int first) {
    UsualArgs args = *plan.usual;
    args.first_sequence = int(first);
    return start(grid, plan.block, 0, queue, usual_kernel<K>, args);
  });
}

}  // namespace rope::cuda
