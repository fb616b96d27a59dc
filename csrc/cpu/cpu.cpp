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

const void* data(const Tensor& t) { return t.const_data_ptr(); }
bool is_wide(const Tensor& t) { return t.scalar_type() == at::kLong; }

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
  return is_wide(t) ? scan(t.const_data_ptr<int64_t>()) : scan(t.const_data_ptr<int32_t>());
}

// A table by position is read at position + offset, a cache without slots is written there: looked at before anything
// is written.
void check_ranges(const RotateCall& call, const RopeParams& p) {
  const bool places = call.v && !call.slots;
  if (p.source == kTableByPosition || places) {
    Range position{0, p.seq - 1};
    if (call.positions) position = range_of(*call.positions, p.positions, p.batch, p.seq);
    int64_t first = 0, last = 0;
    const bool overflow = __builtin_add_overflow(position.low, p.offset, &first) ||
                          __builtin_add_overflow(position.high, p.offset, &last);
    const auto check = [&](int64_t rows, const char* has, const char* unit) {
      TORCH_CHECK_INDEX(!overflow && first >= 0 && last < rows, call.op, ": positions go from ", position.low, " to ",
                        position.high, " with offset ", p.offset, ", ", has, rows, unit,
                        "; position + offset needs to be at least 0 and below that");
    };
    if (p.source == kTableByPosition) check(p.rows, "cos has ", " rows");
    if (places) check(p.block_size, "k_cache has block_size ", "");
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

// What a call hands to the kernels beside its params; false where there is nothing to do.
bool prepare(const RotateCall& call, Rotate& r) {
  const RopeParams& p = r.params;
  if (p.batch == 0 || p.seq == 0) return false;
  check_ranges(call, p);
  if (p.head_dim == 0) return false;
  r.attention_factor = call.attention_factor;
  r.norm_eps = call.norm_eps;
  r.x_dtype = dtype_of(*call.q);
  r.q_in = data(*call.q);
  r.q_out = call.q_out->mutable_data_ptr();
  if (call.k) {
    r.k_in = data(*call.k);
    r.k_out = call.k_out->mutable_data_ptr();
  }
  if (call.v) {
    r.v_in = data(*call.v);
    r.v_out = call.v_out->mutable_data_ptr();
  }
  if (call.inv_freq) {
    r.inv_freq = data(*call.inv_freq);
    r.inv_freq_dtype = dtype_of(*call.inv_freq);
  } else {
    r.cos = data(*call.cos);
    r.sin = data(*call.sin);
    r.table_dtype = dtype_of(*call.cos);
  }
  if (call.positions) {
    r.positions = data(*call.positions);
    r.wide_positions = is_wide(*call.positions);
  }
  if (call.slots) {
    r.slots = data(*call.slots);
    r.wide_slots = is_wide(*call.slots);
  }
  if (call.q_norm_weight) {
    r.q_norm_weight = data(*call.q_norm_weight);
    r.k_norm_weight = data(*call.k_norm_weight);
    r.q_norm_dtype = dtype_of(*call.q_norm_weight);
    r.k_norm_dtype = dtype_of(*call.k_norm_weight);
  }
  return true;
}

struct Cpu {
  static void rotate(const RotateCall& call) {
    Rotate r{call.params()};
    const RopeParams& p = r.params;
    if (!prepare(call, r)) return;
    const int64_t per_token = (p.q.heads + p.k.heads + p.v.heads) * p.head_dim,
                  bytes = p.batch * p.seq * per_token * int64_t(call.q->element_size());
    r.fetch = bytes >= kFetchBytes;
    r.stream = r.q_in != r.q_out && !p.has_norm && bytes >= kStreamBytes;
    const Kernels& k = kernels();
    parallel(p.batch * p.seq, per_token, k.rotate_scratch(r),
             [&](int64_t begin, int64_t end, void* scratch) { k.rotate(r, begin, end, scratch); });
  }

  static void norm_backward(const NormBackwardCall& call) {
    const NormBackwardParams params = call.params();
    const RopeParams& p = params.rotate;
    NormBackward n{{p}};
    if (!prepare(call.rotate, n.rotate)) {
      call.q_norm_weight_grad.zero_();
      call.k_norm_weight_grad.zero_();
      return;
    }
    n.q = params.q;
    n.k = params.k;
    n.q_in = data(call.q);
    n.k_in = data(call.k);
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
