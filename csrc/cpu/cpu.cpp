// The CPU back end: it checks positions and slots, selects the instruction set, and divides a call among threads.
// The loops are in kernels.inc.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>

#include <algorithm>
#include <memory>
#include <string>

#include "../ops.h"
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

// Positions or slots: int32 or int64, [batch, seq] with these strides, in elements.
struct Integers {
  const void* data;
  bool wide;  // int64
  const rope_int* strides;
  Integers(const Tensor* t, const rope_int* strides)
      : data(t ? t->const_data_ptr() : nullptr), wide(t && t->scalar_type() == at::kLong), strides(strides) {}
  int64_t at(int64_t b, int64_t s) const {
    const int64_t i = b * strides[0] + s * strides[1];
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The smallest and the largest of the numbers that were added.
struct Range {
  int64_t low = INT64_MAX, high = INT64_MIN;
  void add(int64_t n) {
    low = std::min(low, n);
    high = std::max(high, n);
  }
};

// Raises IndexError if a position or a slot is out of range. Runs before anything is written. The position of a pad, a
// token with a negative slot, may be any number.
void check_ranges(const RotateCall& call, const RopeParams& p) {
  const bool limited = p.source == kTableByPosition || (p.has_cache && !call.slots);
  if (!limited && !call.slots) return;
  if (!call.positions && !call.slots) return check_position_range(call, p, 0, p.seq - 1);
  const Integers positions(call.positions ? &*call.positions : nullptr, p.positions), slots(call.slots, p.slots);
  const bool shared = !call.slots && positions.strides[0] == 0;  // all sequences have the positions of the first one
  Range position, slot;
  for (int64_t b = 0; b < (shared ? 1 : p.batch); b++) {
    for (int64_t s = 0; s < p.seq; s++) {
      if (call.slots) {
        slot.add(slots.at(b, s));
        if (slots.at(b, s) < 0) continue;
      }
      position.add(call.positions ? positions.at(b, s) : s);
    }
  }
  if (limited && position.low <= position.high) check_position_range(call, p, position.low, position.high);
  TORCH_CHECK_INDEX(!call.slots || slot.high < p.blocks * p.block_size, call.op, ": slots go up to ", slot.high,
                    " but must be below ", p.blocks * p.block_size,
                    ", the number of cells of each cache (blocks * block_size = ", p.blocks, " * ", p.block_size, ")");
}

// Raises IndexError if two tokens write one cell: which of them stays would be chance. Runs after check_ranges, before
// anything is written.
void check_cells(const RotateCall& call, const RopeParams& p) {
  if (!p.has_cache || !(call.slots ? p.batch * p.seq > 1 : call.positions && p.seq > 1)) return;
  const Integers given(call.slots ? call.slots : &*call.positions, call.slots ? p.slots : p.positions);
  // Without slots, all sequences may share the positions of the first one; each has a block of its own.
  const int64_t sequences = !call.slots && given.strides[0] == 0 ? 1 : p.batch;
  const auto is_written = [&](int64_t cell) { return !call.slots || cell >= 0; };
  c10::SmallVector<int64_t, 64> cells(sequences * p.seq);
  int64_t last = INT64_MIN;
  bool rise = true;
  for (int64_t b = 0, i = 0; b < sequences; b++) {
    for (int64_t t = 0; t < p.seq; t++, i++) {
      // Without slots, the cell is counted from that of position 0 in the first block.
      cells[i] = given.at(b, t) + (call.slots ? 0 : b * p.block_size);
      if (!is_written(cells[i])) continue;
      rise = rise && cells[i] > last;
      last = cells[i];
    }
  }
  if (rise) return;  // as in most prompts: no two are equal

  int bits = 2;  // of a place in the hash table, of which at most half is taken
  while ((size_t(1) << bits) < 2 * cells.size()) bits++;
  c10::SmallVector<int64_t, 64> tokens(size_t(1) << bits, -1);  // the token at each place
  for (int64_t i = 0; i < int64_t(cells.size()); i++) {
    if (!is_written(cells[i])) continue;
    // The golden ratio spreads cells with any distance from each other.
    uint64_t place = uint64_t(cells[i]) * 0x9E3779B97F4A7C15 >> (64 - bits);
    for (; tokens[place] >= 0; place = (place + 1) % tokens.size()) {
      const int64_t other = tokens[place];
      TORCH_CHECK_INDEX(cells[other] != cells[i], call.op, ": ", call.slots ? "slots" : "position + offset", " is ",
                        call.slots ? cells[i] : given.at(i / p.seq, i % p.seq) + p.offset, " for token ", other % p.seq,
                        " of sequence ", other / p.seq, " and for token ", i % p.seq, " of sequence ", i / p.seq,
                        " but must be another cell for each token; pass slots: -1 for padding and for what a ring does "
                        "not keep (torch_rope.slots_of_window), other cells for the tokens of a tree");
    }
    tokens[place] = i;
  }
}

constexpr int64_t kGrain = 32768;  // the least number of elements that is worth a thread of its own
constexpr size_t kLine = 64;       // bytes of a cache line

// Runs body(begin, end, scratch) over the items [0, n) on torch's threads. Each thread has scratch of its own.
template <typename F>
void parallel(int64_t n, int64_t work_per_item, size_t scratch_bytes, F&& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work_per_item));
  const auto run = [&](int64_t begin, int64_t end) {
    // Scratch begins at a cache line, so that no whole vector in it straddles two lines.
    alignas(kLine) char small[8192];  // enough for one token with a usual head_dim
    if (scratch_bytes <= sizeof small) return body(begin, end, small);
    const std::unique_ptr<char[]> large(new char[scratch_bytes + kLine]);
    body(begin, end, large.get() + (kLine - reinterpret_cast<uintptr_t>(large.get()) % kLine) % kLine);
  };
  if (n <= grain) return run(0, n);  // at::parallel_for would cost a decode step more than its work
  at::parallel_for(0, n, grain, run);
}

// A call of at least kFetchBytes does not fit in the caches that a core has for itself, so its memory is prefetched. A
// result of at least kStreamBytes, together with the input that it is computed from, would not stay in the cache that
// cores share either, so it is written past all caches.
constexpr int64_t kFetchBytes = 1 << 20, kStreamBytes = 16 << 20;

// Checks positions and slots, if there are any tokens. Returns false if there is nothing to compute: there are no
// tokens, or no head has channels.
bool ready(const RotateCall& call, const RopeParams& p) {
  if (p.batch == 0 || p.seq == 0) return false;
  check_ranges(call, p);
  check_cells(call, p);
  return p.sides[kQ].head_dim != 0 || p.sides[kV].head_dim != 0;
}

// Returns into how many shares the heads are divided among threads, or 1 if tokens are divided instead. Threads that
// write neighbouring tokens of one head would wait for each other if these are adjacent in memory, because they have
// cache lines in common.
int64_t shares_of_heads(const RopeParams& p) {
  if (p.sides[kQ].out[1] >= p.sides[kQ].out[3] || p.source == kTableByHead || p.has_cache || (p.sides[kQ].norm == kAllHeads)) return 1;
  return std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), std::max(p.sides[kQ].heads, p.sides[kK].heads)));
}
// Returns the call for share i of the heads of q and k.
TunedRotateArgs share_of_heads(TunedRotateArgs r, int64_t i, int64_t shares) {
  const auto take = [&](Side& o, const void*& in, void*& out) {
    const int64_t first = o.heads * i / shares, size = size_of(r.x_dtype);
    in = static_cast<const char*>(in) + first * o.in[2] * size;
    out = static_cast<char*>(out) + first * o.out[2] * size;
    o.heads = o.heads * (i + 1) / shares - first;
  };
  take(r.params.sides[kQ], r.sides[kQ].in, r.sides[kQ].out);
  take(r.params.sides[kK], r.sides[kK].in, r.sides[kK].out);
  return r;
}

struct Cpu : AnyBackend {
  // Does not call the dispatcher, which takes longer than a decode step's rotation.
  static Tensor empty_strided_like(const Tensor& x) {
    return at::detail::empty_strided_cpu(x.sizes(), x.strides(), x.options());
  }

  static void rotate(const RotateCall& call) {
    TunedRotateArgs r{call.args(), false, false};
    const RopeParams& p = r.params;
    if (!ready(call, p)) return;
    const int64_t per_token = (p.sides[kQ].heads + p.sides[kK].heads) * p.sides[kQ].head_dim + p.sides[kV].heads * p.sides[kV].head_dim,
                  bytes = p.batch * p.seq * per_token * int64_t(call.q().element_size());
    r.fetch = bytes >= kFetchBytes;
    // The loops of the norm have no streaming stores.
    r.stream = r.sides[kQ].in != r.sides[kQ].out && !p.sides[kQ].norm && bytes >= kStreamBytes;
    const Kernels& k = kernels();
    const int64_t tokens = p.batch * p.seq, shares = shares_of_heads(p);
    if (shares == 1) {
      return parallel(tokens, per_token, k.rotate_scratch(r),
                      [&](int64_t begin, int64_t end, void* scratch) { k.rotate(r, begin, end, scratch); });
    }
    parallel(shares, tokens * per_token / shares, k.rotate_scratch(r), [&](int64_t begin, int64_t end, void* scratch) {
      for (int64_t i = begin; i < end; i++) k.rotate(share_of_heads(r, i, shares), 0, tokens, scratch);
    });
  }

  static void norm_backward(const NormBackwardCall& call) {
    const NormBackwardArgs n = call.args();
    const RopeParams& p = n.rotate.params;
    if (!ready(call.rotate, p)) {
      for (const Tensor* grad : call.weight_grad) grad->zero_();
      return;
    }
    // The gradients of the weights are sums over all tokens. The tokens are cut into slices whose size follows from the
    // shapes alone, one thread sums each slice, and the sums of the slices are then added in their order. So the number
    // of threads does not change a bit of the result. A slice has at least about kGrain elements, and there are at most
    // 256 slices, or 128 if there is a weight for each head, which limits `sums`.
    const int64_t tokens = p.batch * p.seq, per_token = (p.sides[kQ].heads + p.sides[kK].heads) * p.sides[kQ].head_dim,
                  most = (p.sides[kQ].norm == kAllHeads) ? 128 : 256,
                  slice = std::max({int64_t(1), kGrain / std::max<int64_t>(1, per_token), (tokens + most - 1) / most}),
                  slices = (tokens + slice - 1) / slice;
    const Tensor &q_weight_grad = *call.weight_grad[kQ], &k_weight_grad = *call.weight_grad[kK];
    const int64_t of_q = q_weight_grad.numel(), of_k = k_weight_grad.numel(), both_weights = of_q + of_k;
    const Tensor sums = at::empty({slices, both_weights}, call.x[kQ]->options().dtype(at::kDouble));
    double* const sum = sums.mutable_data_ptr<double>();
    const Kernels& k = kernels();
    parallel(slices, slice * per_token, k.norm_backward_scratch(n), [&](int64_t begin, int64_t end, void* scratch) {
      for (int64_t i = begin; i < end; i++)
        k.norm_backward(n, i * slice, std::min(tokens, (i + 1) * slice), sum + i * both_weights, scratch);
    });
    parallel(both_weights, slices, 0, [&](int64_t begin, int64_t end, void*) {
      for (int64_t i = 1; i < slices; i++) {
        for (int64_t d = begin; d < end; d++) sum[d] += sum[i * both_weights + d];
      }
    });
    const Tensor total = sums.select(0, 0);
    q_weight_grad.copy_(total.narrow(0, 0, of_q).view_as(q_weight_grad));
    k_weight_grad.copy_(total.narrow(0, of_q, of_k).view_as(k_weight_grad));
  }

  // Divides the entries among threads, not the table rows: a table may have many more rows than there are tokens.
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
    parallel(tokens.entries, tokens.copies * (p.sides[kQ].heads + p.sides[kK].heads) * p.sides[kQ].head_dim, k.table_backward_scratch(t),
             [&](int64_t begin, int64_t end, void* scratch) { k.table_backward(t, begin, end, scratch); });
  }

  static void cos_sin(const CosSinCall& call) {
    const Tensor positions = call.positions.to(at::kDouble).contiguous(), wide = call.inv_freq.to(at::kDouble),
                 inv_freq = wide.dim() == 3 ? wide.sum(0) : wide.contiguous();
    const CosSinArgs c = call.args(positions, inv_freq);
    const CosSinParams& p = c.params;
    if (p.pairs == 0) return;
    const Kernels& k = kernels();
    // The angle of a pair on one axis counts as much work as 8 elements of a rotation.
    parallel(p.tokens, 8 * p.axes * p.pairs, k.cos_sin_scratch(c),
             [&](int64_t begin, int64_t end, void* scratch) { k.cos_sin(c, begin, end, scratch); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(ROPE_NAMESPACE, CPU, m) { register_ops<Cpu>(m); }

}  // namespace rope::cpu
