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

struct Range {
  int64_t low, high;
};
// Of integers [batch, seq] by their strides; not of none.
Range range_of(const Tensor& t, const rope_int* strides, int64_t batch, int64_t seq) {
  const auto scan = [&](const auto* from) {
    Range range{*from, *from};
    for (int64_t b = 0; b < (strides[0] ? batch : 1); b++) {
      for (int64_t s = 0; s < seq; s++) {
        const int64_t n = from[b * strides[0] + s * strides[1]];
        range = {std::min(range.low, n), std::max(range.high, n)};
      }
    }
    return range;
  };
  return t.scalar_type() == at::kLong ? scan(static_cast<const int64_t*>(t.const_data_ptr()))
                                      : scan(static_cast<const int32_t*>(t.const_data_ptr()));
}

// Looked at before anything is written.
void check_ranges(const RotateCall& call, const RopeParams& p) {
  if (p.source == kTableByPosition || (call.v && !call.slots)) {
    Range position{0, p.seq - 1};
    if (call.positions) position = range_of(*call.positions, p.positions, p.batch, p.seq);
    check_position_range(call, p, position.low, position.high);
  }
  if (call.slots) {
    const Range slot = range_of(*call.slots, p.slots, p.batch, p.seq);
    TORCH_CHECK_INDEX(slot.high < p.blocks * p.block_size, call.op, ": slots go up to ", slot.high,
                      ", the caches have ", p.blocks, " blocks of ", p.block_size, "; a slot needs to be below ",
                      p.blocks * p.block_size);
  }
}

constexpr int64_t kGrain = 32768;  // elements that are worth a thread
constexpr size_t kLine = 64;       // bytes

// Runs body(begin, end, scratch) over n items on torch's threads, each with its own scratch.
template <typename F>
void parallel(int64_t n, int64_t work_per_item, size_t scratch_bytes, F&& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work_per_item));
  const auto run = [&](int64_t begin, int64_t end) {
    // Whole vectors of scratch shall not straddle two lines of the cache.
    alignas(kLine) char small[8192];  // enough for one token
    if (scratch_bytes <= sizeof small) return body(begin, end, small);
    const std::unique_ptr<char[]> large(new char[scratch_bytes + kLine]);
    body(begin, end, large.get() + (kLine - reinterpret_cast<uintptr_t>(large.get()) % kLine) % kLine);
  };
  if (n <= grain) return run(0, n);  // a decode step is all overhead
  at::parallel_for(0, n, grain, run);
}

// What is larger than a core's own caches is asked for ahead. A result so large that with what it was made from it
// would not stay in the shared cache either is written past them all.
constexpr int64_t kFetchBytes = 1 << 20, kStreamBytes = 16 << 20;

// False where there is nothing to do.
bool ready(const RotateCall& call, const RopeParams& p) {
  if (p.batch == 0 || p.seq == 0) return false;
  check_ranges(call, p);
  return p.head_dim != 0;
}

struct Cpu {
  static void rotate(const RotateCall& call) {
    TunedRotateArgs r{call.args(), false, false};
    const RopeParams& p = r.params;
    if (!ready(call, p)) return;
    const int64_t per_token = (p.q.heads + p.k.heads + p.v.heads) * p.head_dim,
                  bytes = p.batch * p.seq * per_token * int64_t(call.q->element_size());
    r.fetch = bytes >= kFetchBytes;
    r.stream = r.q_in != r.q_out && !p.has_norm && bytes >= kStreamBytes;
    const Kernels& k = kernels();
    parallel(p.batch * p.seq, per_token, k.rotate_scratch(r),
             [&](int64_t begin, int64_t end, void* scratch) { k.rotate(r, begin, end, scratch); });
  }

  static void norm_backward(const NormBackwardCall& call) {
    const NormBackwardArgs n = call.args();
    const RopeParams& p = n.rotate.params;
    if (!ready(call.rotate, p)) {
      call.q_norm_weight_grad.zero_();
      call.k_norm_weight_grad.zero_();
      return;
    }
    // The gradients of the weights are sums over all tokens: of parts whose size follows from the shapes alone, each
    // summed by one thread, and then in their order. So the number of threads does not change a bit.
    const int64_t tokens = p.batch * p.seq, per_token = (p.q.heads + p.k.heads) * p.head_dim,
                  part = std::max({int64_t(1), kGrain / std::max<int64_t>(1, per_token), (tokens + 255) / 256}),
                  parts = (tokens + part - 1) / part;
    const int64_t row = 2 * p.head_dim;
    const Tensor sums = at::empty({parts, 2, p.head_dim}, call.q.options().dtype(at::kDouble));
    double* const sum = sums.mutable_data_ptr<double>();
    const Kernels& k = kernels();
    parallel(parts, part * per_token, k.norm_backward_scratch(n), [&](int64_t begin, int64_t end, void* scratch) {
      for (int64_t i = begin; i < end; i++)
        k.norm_backward(n, i * part, std::min(tokens, (i + 1) * part), sum + i * row, scratch);
    });
    for (int64_t i = 1; i < parts; i++) {
      for (int64_t d = 0; d < row; d++) sum[d] += sum[i * row + d];
    }
    call.q_norm_weight_grad.copy_(sums[0][0]);
    call.k_norm_weight_grad.copy_(sums[0][1]);
  }

  // By entries, and not by rows: a table may be much longer than what was turned by it.
  static void table_backward(const TableBackwardCall& call) {
    const RopeParams p = call.rotate.params();
    const TokensOfRows tokens = call.tokens();
    if (tokens.listed || tokens.rows != tokens.entries || p.batch == 0) {
      call.cos_grad.zero_();
      call.sin_grad.zero_();
    }
    if (!ready(call.rotate, p)) return;
    Tensor order, starts;
    if (tokens.listed) std::tie(order, starts) = call.order_and_starts();
    const TableBackwardArgs t = call.args(order, starts);
    const Kernels& k = kernels();
    parallel(tokens.entries, tokens.copies * (p.q.heads + p.k.heads) * p.head_dim, k.table_backward_scratch(t),
             [&](int64_t begin, int64_t end, void* scratch) { k.table_backward(t, begin, end, scratch); });
  }

  static void cos_sin(const CosSinCall& call) {
    const Tensor positions = call.positions.to(at::kDouble).contiguous(),
                 inv_freq = call.inv_freq.to(at::kDouble).contiguous();
    const CosSinArgs c = call.args(positions, inv_freq);
    const CosSinParams& p = c.params;
    if (p.pairs == 0) return;
    const Kernels& k = kernels();
    parallel(p.tokens, 8 * p.axes * p.pairs, k.cos_sin_scratch(c),
             [&](int64_t begin, int64_t end, void* scratch) { k.cos_sin(c, begin, end, scratch); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(rope, CPU, m) { register_ops<Cpu>(m); }

}  // namespace rope::cpu
