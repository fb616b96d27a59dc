// The CPU back end: ranges of positions, the instruction set, and threads. The loops are in kernels.inc.
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <memory>
#include <string>

#include "../ops.h"
#include "kernels.h"

namespace rope::cpu {

// The instruction set that torch itself has chosen, so ATEN_CPU_CAPABILITY=default|avx2 sets ours too.
const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return avx512;
    if (capability == "AVX2") return avx2;
#endif
    return plain;
  }();
  return chosen;
}

namespace {

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat;
    default:
      return DType::kDouble;  // check() has seen to it that there is no other
  }
}

// A table by position is read at position + offset: looked at before anything is written.
void check_range(const RotateCall& call, const RopeParams& p) {
  if (p.source != kTableByPosition || p.batch == 0 || p.seq == 0) return;
  int64_t low = 0, high = p.seq - 1;
  if (call.positions) {
    const auto scan = [&](const auto* positions) {
      low = high = *positions;
      for (int64_t b = 0; b < (p.positions[0] ? p.batch : 1); b++) {
        for (int64_t s = 0; s < p.seq; s++) {
          const int64_t position = positions[b * p.positions[0] + s * p.positions[1]];
          low = std::min(low, position);
          high = std::max(high, position);
        }
      }
    };
    if (call.positions->scalar_type() == at::kLong) {
      scan(call.positions->const_data_ptr<int64_t>());
    } else {
      scan(call.positions->const_data_ptr<int32_t>());
    }
  }
  int64_t first = 0, last = 0;
  const bool overflow = __builtin_add_overflow(low, p.offset, &first) || __builtin_add_overflow(high, p.offset, &last);
  TORCH_CHECK_INDEX(!overflow && first >= 0 && last < p.rows, call.op, ": positions go from ", low, " to ", high,
                    " with offset ", p.offset, ", cos has ", p.rows,
                    " rows; position + offset needs to be at least 0 and below that");
}

// Runs body(begin, end, scratch) over n items on torch's threads, each with its own scratch.
template <typename F>
void parallel(int64_t n, int64_t work_per_item, size_t scratch_bytes, F&& body) {
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, work_per_item));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> scratch(new char[scratch_bytes]);
    body(begin, end, scratch.get());
  });
}

// What is larger than a core's own caches is asked for ahead. A result so large that with what it was made from it
// would not stay in the shared cache either is written past them all.
constexpr int64_t kFetchBytes = 1 << 20, kStreamBytes = 16 << 20;

struct Cpu {
  static void rotate(const RotateCall& call) {
    Rotate r{};
    r.params = call.params();
    const RopeParams& p = r.params;
    check_range(call, p);
    if (p.batch == 0 || p.seq == 0 || p.head_dim == 0) return;
    r.attention_factor = call.attention_factor;
    r.x_dtype = dtype_of(*call.q);
    r.q_in = call.q->const_data_ptr();
    r.q_out = call.q_out->mutable_data_ptr();
    if (call.k) {
      r.k_in = call.k->const_data_ptr();
      r.k_out = call.k_out->mutable_data_ptr();
    }
    if (call.inv_freq) {
      r.inv_freq = call.inv_freq->const_data_ptr();
      r.inv_freq_dtype = dtype_of(*call.inv_freq);
    } else {
      r.cos = call.cos->const_data_ptr();
      r.sin = call.sin->const_data_ptr();
      r.table_dtype = dtype_of(*call.cos);
    }
    if (call.positions) {
      r.positions = call.positions->const_data_ptr();
      r.wide_positions = call.positions->scalar_type() == at::kLong;
    }
    const int64_t bytes = p.batch * p.seq * (p.q.heads + p.k.heads) * p.head_dim * int64_t(call.q->element_size());
    r.fetch = bytes >= kFetchBytes;
    r.stream = r.q_in != r.q_out && bytes >= kStreamBytes;
    const Kernels& k = kernels();
    parallel(p.batch * p.seq, (p.q.heads + p.k.heads) * p.head_dim, k.rotate_scratch(r),
             [&](int64_t begin, int64_t end, void* scratch) { k.rotate(r, begin, end, scratch); });
  }

  static void cos_sin(const CosSinCall& call) {
    const Tensor positions = call.positions.to(at::kDouble).contiguous(),
                 inv_freq = call.inv_freq.to(at::kDouble).contiguous();
    const SplitFactor factor = split_factor(call.attention_factor);
    const CosSin c{inv_freq.numel(),
                   call.attention_factor,
                   factor.hi,
                   factor.lo,
                   dtype_of(call.cos),
                   positions.const_data_ptr<double>(),
                   inv_freq.const_data_ptr<double>(),
                   call.cos.mutable_data_ptr(),
                   call.sin.mutable_data_ptr()};
    if (c.pairs == 0) return;
    const Kernels& k = kernels();
    parallel(positions.numel(), 8 * c.pairs, k.cos_sin_scratch(c),
             [&](int64_t begin, int64_t end, void* scratch) { k.cos_sin(c, begin, end, scratch); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, CPU, m) { register_ops<Cpu>(m); }

}  // namespace rope::cpu
