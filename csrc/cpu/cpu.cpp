// The CPU back end: it checks positions and slots, selects the instruction set, and divides a call among threads.
// The loops are in kernels.inc.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <string>

#include "../backend.h"
#include "kernels.h"

namespace rope::cpu {

// Returns the kernels for the instruction set that torch itself has chosen, so ATEN_CPU_CAPABILITY=default|avx2 applies
// to them too. Those for AVX-512 need its extension VNNI, which the first processors with AVX-512 did not have.
const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512" && at::cpu::is_avx512_vnni_supported()) return avx512;
    if (capability == "AVX512" || capability == "AVX2") return avx2;
#endif
    return plain;
  }();
  return chosen;
}

namespace {

// Returns a function (b, s) that reads positions or slots: int32 or int64, [batch, seq] with these strides.
auto integers(const void* data, bool wide, const rope_int* strides) {
  return [=](int64_t b, int64_t s) { return integer(data, wide, b * strides[0] + s * strides[1]); };
}

// Raises IndexError if a position or a slot is out of range. Runs before anything is written. The position of a pad, a
// token with a negative slot, may be any number.
void check_ranges(const Call& call, const Args& a) {
  const bool limited = position_range(a).limited;
  if (!call.slots && !(limited && call.positions)) return;  // the others are checked already
  const auto position_at = integers(a.positions, a.wide_positions, a.position_strides),
             slot_at = integers(a.slots, a.wide_slots, a.slot_strides);
  const bool shared = !call.slots && a.position_strides[0] == 0;  // all sequences have the positions of the first one
  int64_t low = INT64_MAX, high = INT64_MIN, last_slot = -1;
  for (int64_t b = 0; b < (shared ? 1 : a.batch); b++) {
    for (int64_t s = 0; s < a.seq; s++) {
      const int64_t slot = call.slots ? slot_at(b, s) : 0, position = call.positions ? position_at(b, s) : s;
      last_slot = std::max(last_slot, slot);
      if (slot < 0) continue;
      low = std::min(low, position);
      high = std::max(high, position);
    }
  }
  if (limited && low <= high) check_position_range(call, a, low, high);
  TORCH_CHECK_INDEX(!call.slots || last_slot < a.blocks * a.block_size, call.op, ": slots go up to ", last_slot,
                    " but must be below ", a.blocks * a.block_size,
                    ", the number of cells of each cache (blocks * block_size = ", a.blocks, " * ", a.block_size, ")");
}

// Raises IndexError if two tokens write one cell: which of them stays would be chance. Runs after check_ranges, before
// anything is written.
void check_cells(const Call& call, const Args& a) {
  if (!a.has_cache || !(call.slots ? a.batch * a.seq > 1 : call.positions && a.seq > 1)) return;
  const rope_int* const strides = call.slots ? a.slot_strides : a.position_strides;
  const auto given =
      call.slots ? integers(a.slots, a.wide_slots, strides) : integers(a.positions, a.wide_positions, strides);
  // Without slots, all sequences may share the positions of the first one; each has a block of its own.
  const int64_t sequences = !call.slots && strides[0] == 0 ? 1 : a.batch;
  const auto is_written = [&](int64_t cell) { return !call.slots || cell >= 0; };
  c10::SmallVector<int64_t, 64> cells(sequences * a.seq);
  int64_t last = INT64_MIN;
  bool rise = true;
  for (int64_t b = 0, i = 0; b < sequences; b++) {
    for (int64_t t = 0; t < a.seq; t++, i++) {
      cells[i] = call.slots ? given(b, t) : given(b, t) + a.offset + b * a.block_size;
      if (!is_written(cells[i])) continue;
      rise = rise && cells[i] > last;
      last = cells[i];
    }
  }
  if (rise) return;  // as in most prompts: no two are equal

  ska::flat_hash_map<int64_t, int64_t> tokens;  // by the cell that they write
  tokens.reserve(cells.size());
  for (int64_t i = 0; i < int64_t(cells.size()); i++) {
    if (!is_written(cells[i])) continue;
    const auto [first, is_new] = tokens.emplace(cells[i], i);
    TORCH_CHECK_INDEX(is_new, call.op, ": ", call.slots ? "slots" : "position + offset", " is ",
                      call.slots ? cells[i] : cells[i] % a.block_size, " for token ", first->second % a.seq,
                      " of sequence ", first->second / a.seq, " and for token ", i % a.seq, " of sequence ", i / a.seq,
                      " but must be another cell for each token; pass slots: -1 for padding and for what a ring does "
                      "not keep (torch_rope.slots_of_window), other cells for the tokens of a tree");
  }
}

constexpr int64_t kGrain = 32768;  // the least number of elements that is worth a thread of its own

// Calls compute(begin, end) for parts of the items [0, n) on torch's threads.
template <typename F>
void parallel(int64_t n, int64_t work_per_item, F&& compute) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work_per_item));
  if (n <= grain) return compute(0, n);  // at::parallel_for would cost a decode step more than its work
  at::parallel_for(0, n, grain, compute);
}

struct Cpu : AnyBackend {
  // Does not call the dispatcher, which takes longer than a decode step's rotation.
  static Tensor empty_strided_like(const Tensor& x) {
    return at::detail::empty_strided_cpu(x.sizes(), x.strides(), x.options());
  }

  static void check(const Call& call, const Args& a) {
    if (is_empty(a)) return;
    check_ranges(call, a);
    check_cells(call, a);
  }

  static void rotate(const Call&, const Args& a) {
    parallel(a.batch * a.seq, elements_of_token(a),
             [&](int64_t begin, int64_t end) { kernels().rotate(a, begin, end); });
  }

  static void norm_backward(const Call& call, const Args& a) {
    // The gradients of the weights are sums over all tokens: over those of each slice, which one thread sums, and then
    // over the slices in their order. The size of a slice follows from the shapes alone, so the number of threads does
    // not change a bit of the result. A slice has at least about kGrain elements, and there are at most 256 slices, or
    // 128 if there is a weight for each head, which limits `sums`.
    const int64_t tokens = a.batch * a.seq, of_token = elements_of_token(a),
                  most = a.sides[kQ].norm == kAllHeads ? 128 : 256,
                  slice = std::max({int64_t(1), kGrain / std::max<int64_t>(1, of_token), (tokens + most - 1) / most}),
                  slices = (tokens + slice - 1) / slice;
    const Tensor &q_grad = *call.sides[kQ].weight_grad, &k_grad = *call.sides[kK].weight_grad;
    const int64_t weights = q_grad.numel() + k_grad.numel();
    const Tensor sums = at::empty({slices, weights}, q_grad.options().dtype(at::kDouble));
    double* const sum = sums.mutable_data_ptr<double>();
    parallel(slices, slice * of_token,
             [&](int64_t begin, int64_t end) { kernels().norm_backward(a, slice, sum, begin, end); });
    at::parallel_for(0, weights, std::max<int64_t>(1, kGrain / slices), [&](int64_t begin, int64_t end) {
      for (int64_t i = 1; i < slices; i++) {
        for (int64_t d = begin; d < end; d++) sum[d] += sum[i * weights + d];
      }
    });
    q_grad.copy_(sums[0].narrow(0, 0, q_grad.numel()).view_as(q_grad));
    k_grad.copy_(sums[0].narrow(0, q_grad.numel(), k_grad.numel()).view_as(k_grad));
  }

  static void cos_sin(const Call& call) {
    const Tensor positions = call.positions->to(at::kDouble).contiguous(), wide = call.inv_freq->to(at::kDouble),
                 inv_freq = wide.dim() == 3 ? wide.sum(0) : wide.contiguous();
    Call wide_call = call;
    wide_call.positions = &positions, wide_call.inv_freq = &inv_freq;
    const CosSinArgs c = wide_call.cos_sin_args();
    // The angle of a pair on one axis counts as much work as 8 elements of a rotation.
    parallel(c.tokens, 8 * c.axes * c.pairs, [&](int64_t begin, int64_t end) { kernels().cos_sin(c, begin, end); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, CPU, m) { register_backend<Cpu>(m); }

}  // namespace rope::cpu
