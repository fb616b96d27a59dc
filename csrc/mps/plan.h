// How a call is laid out on the GPU: which kernel runs, its function constants, and its grid. This file uses none of
// Apple's types, so that it compiles and is tested on machines without Metal.
//
// How a call is cut into threads
// ------------------------------
// A head is cut into chunks, and a chunk belongs to one thread. A chunk is two vectors of V channels; V is 8, 4 or 1,
// and is called `vector` below. Eight channels are used for types of 2 bytes alone, so that a vector has at most 16
// bytes. Which channels these are depends on the pairing:
//   half-split    V neighbouring channels of the first half of the rotated channels, and their partners, which are the
//                 same V channels of the second half;
//   interleaved   2V neighbouring rotated channels, which are V whole pairs;
//   not rotated   the next 2V of the channels before and after the rotated ones. The last chunk of a head may have only
//                 V channels.
// So both channels of a pair are always in one chunk, chunk c rotates the pairs cV .. cV + V - 1, whose angles are
// neighbours in a table row, and neighbouring threads read neighbouring memory. The rotated chunks of a head come
// first. Chunks that are not rotated exist only if their channels must be written; see copies() in csrc/plan.h.
//
// The heads of a token are divided into shares; the heads of q, k and v are one list. If v has another head_dim than q,
// each of its heads is taken in pieces of q's head_dim, and each piece counts as a head; the last may be shorter. (If v
// has a norm, all pieces of a head belong to one team and count as one head.) With n shares, share s has the heads s, s
// + n, s + 2n ... A thread takes its chunk of every head of its share, so that the angles are computed or read once for
// these heads, unless a table by head has a row for each. Neighbouring threads take neighbouring chunks, then
// neighbouring shares, whose heads lie side by side in memory, then neighbouring tokens. If tokens lie closer together
// in memory than heads, tokens come before shares.
//
// Many tokens have few shares, so that a table row is read seldom. Few tokens have many, down to one head in a share,
// so that many cores work; if that is not enough, V is smaller too.
//
// The kernels are:
//   rotate           A thread for each chunk, token and share.
//   norm_rotate      The same, but a norm needs the sum over a whole head. So the threads that share a head, one for
//                    each chunk, are a team: k_lanes threads of one SIMD group, where k_lanes is the smallest power of
//                    two that is not less than the number of chunks. A team takes one share of one token. It also runs
//                    if only v has a norm.
//   norm_backward    Has the same teams, but a team takes many items. An item is kHeads neighbouring heads of q or of
//                    k, because a threadgroup sums the gradient of one weight; see Parts.
//   ..._wide         norm_rotate and norm_backward for heads of more than 32 chunks if V is 4: the team is a whole SIMD
//                    group, V is 1, and a thread takes every 32nd chunk of a head.
//   ..._over_heads   norm_rotate and norm_backward for a norm over all heads of a token. A threadgroup takes q, k or
//                    v of one token; in the backward it takes a part: neighbouring tokens of q or of k. Its threads
//                    divide the chunks of all heads. V is 4 or 1.
//   table_backward   A threadgroup sums the gradients of one or more table rows; see grid_of.
//   cos_sin          A thread for each element of cos.
//
// In the names of kernels _v8, _v4 and _v1 give V. Kernels with _u32 compute element offsets in 32 bits, all others in
// 64 bits.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <tuple>

#include "../call.h"
#include "../plan.h"
#include "kernels.h"

namespace rope::mps {

struct Constants {
#define ROPE_MEMBER(index, name) int name;
  ROPE_CONSTANTS(ROPE_MEMBER)
#undef ROPE_MEMBER
  bool operator<(const Constants& other) const { return std::memcmp(this, &other, sizeof other) < 0; }
};

// A kernel in the shaders: the file shaders/<file>.metal, and the name in parts. The parts are texts that live as long
// as the process, so a call whose pipeline exists makes no string.
struct Kernel {
  std::string_view file, family, type, variant;
  std::string name() const { return std::string(family).append("_").append(type).append(variant); }
  bool operator<(const Kernel& other) const {
    return std::tie(family, type, variant) < std::tie(other.family, other.type, other.variant);
  }
};

struct Size3 {
  rope_int x, y, z;
};

struct Plan {
  Kernel kernel;
  Constants constants;
  TiledParams rotate;
  Size3 grid;       // threads; for a norm: teams, in x; for a norm over all heads: threadgroups
  bool wide_head;   // there is a norm of each head, and heads have more chunks than a SIMD group has threads
  bool over_heads;  // there is a norm over all heads
};

// True if attention_factor is not 1.
template <typename Params>
bool is_scaled(const Params& p) {
  return p.factor_hi != 1.0f || p.factor_lo != 0.0f;
}

// True if `vector` neighbouring elements of t are one aligned access, for every element of the last dimension whose
// index is a multiple of `vector`. A buffer of Metal begins aligned, so the storage offset tells how the first element
// is aligned.
inline bool in_vectors(const Tensor& t, int vector) {
  const int size = int(t.element_size());
  const auto start = uintptr_t(t.storage_offset()) * uintptr_t(size);
  return t.numel() == 0 || is_aligned(start, t.strides().data(), t.sizes().data(), int(t.dim()), size, vector * size);
}

// Returns how a thread with chunks of at least four pairs reads cos and sin.
inline TableAccess table_access(const Tensor& cos, const Tensor& sin) {
  if (in_vectors(cos, 4) && in_vectors(sin, 4)) return kVectors;
  // The parts of complex numbers alternate in memory. Seen as one table of floats, they are rows of vectors.
  const bool alternate = cos.scalar_type() == at::kFloat && cos.stride(-1) == 2 && cos.strides() == sin.strides() &&
                         cos.is_alias_of(sin) && sin.storage_offset() == cos.storage_offset() + 1;
  if (!alternate) return kElements;
  c10::SmallVector<int64_t, 3> strides(cos.strides().begin(), cos.strides().end());
  strides.back() = 1;
  const auto start = uintptr_t(cos.storage_offset()) * sizeof(float);
  return is_aligned(start, strides.data(), cos.sizes().data(), int(cos.dim()), sizeof(float), 4 * sizeof(float))
             ? kComplex
             : kElements;
}

// True if the element offset of the last element of t does not fit in 32 bits.
inline bool needs_64_bits(const Tensor& t) {
  return t.numel() && last_offset(t.strides().data(), t.sizes().data(), int(t.dim())) > UINT32_MAX;
}

// Ends a message about frequencies.
constexpr const char* kNoFloat64 =
    "float64 but must be float32, because Metal has no float64; pass torch_rope.inv_freq(..., device=\"mps\"), in "
    "which two float32 numbers add up to each frequency";

// Returns the name of the dtype of t in Metal. The error message calls t `name`.
inline const char* type_of(const char* op, const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf:
      return "half";
    case at::kBFloat16:
      return "bfloat";
    case at::kFloat:
      return "float";
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": ", name,
                                  " is float64 but must be float16, bfloat16 or float32, because Metal has no float64");
  }
}

// Refuses a cache of float8. x: the name of what is written to it.
inline void check_cache_type(const RotateCall& call, const char* name, const Tensor& cache, const char* x) {
  const at::ScalarType type = cache.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type != at::kFloat8_e4m3fn && type != at::kFloat8_e5m2, call.op, ": ", name, " is ",
                              type == at::kFloat8_e5m2 ? "float8_e5m2" : "float8_e4m3fn",
                              " but must be int8 or the dtype of ", x, ", because Metal has no float8");
}

// The heads of tokens are divided into about this many shares: the shares of a token are fewer the more tokens there
// are. A GPU needs some ten thousand threads to read memory at its full speed, and a share has several threads.
constexpr rope_int kSpread = 2048;
// A call of fewer threads than these, which are 16 SIMD groups, takes smaller vectors to have more.
constexpr rope_int kEnough = 16 * kSimd;

// Lays out a call that rotates. A backward also passes `before`: q and k, or null for k, as they were before the norm
// or the rotation.
inline Plan plan(const RotateCall& call, std::initializer_list<const Tensor*> before = {}) {
  const bool backward = before.size() != 0;
  c10::SmallVector<const Tensor*, 8> tensors, parameters;
  for (const Tensor* t : before) {
    if (t) tensors.push_back(t);
  }
  for (const Tensor* t : {call.q, call.q_out, call.k, call.k_out, call.v, call.v_out}) {
    if (t) tensors.push_back(t);
  }
  for (const OptTensor* t : {&call.cos, &call.sin, &call.inv_freq, &call.positions}) {
    if (*t) parameters.push_back(&**t);
  }
  for (const Tensor* t : {call.slots, call.q_norm_weight, call.k_norm_weight, call.k_scale, call.v_scale}) {
    if (t) parameters.push_back(t);
  }
  if (call.v) {
    check_cache_type(call, "k_cache", *call.k_out, "k");
    check_cache_type(call, "v_cache", *call.v_out, "v");
  }
  const auto all = [](const auto& list, auto&& f) { return std::all_of(list.begin(), list.end(), f); };
  const auto fits_32 = [](const Tensor* t) { return !needs_64_bits(*t); };

  Plan plan{};
  TiledParams& r = plan.rotate;
  Constants& c = plan.constants;
  RopeParams& p = r.params = call.params();
  const auto bytes = [](const Tensor* t) { return t ? int(t->element_size()) : 0; };
  const auto native = [&](const Tensor* t) { return t && t->scalar_type() == call.q->scalar_type(); };
  c.tensors = call.v ? 3 : call.k ? 2 : 1;
  c.interleaved = p.interleaved;
  c.inverse = p.inverse;
  c.source = p.source;
  c.rounding = p.rounding;
  c.split_inv_freq = p.split_inv_freq;
  c.scaled = is_scaled(p);
  c.position_bytes = bytes(call.positions ? &*call.positions : nullptr);
  c.slot_bytes = bytes(call.slots);
  c.native_tables = native(call.cos ? &*call.cos : nullptr);
  c.native_q_weight = native(call.q_norm_weight);
  c.native_k_weight = native(call.k_norm_weight);

  c.q_in_place = call.q == call.q_out;
  c.k_in_place = call.k && call.k == call.k_out;
  c.has_norm = p.has_norm;
  c.norm_v = p.norm_v && p.v.heads && p.v_dim;
  c.k_quantised = p.k_cache.quantised;
  c.v_quantised = p.v_cache.quantised;

  if (p.head_dim == 0) {  // only v has channels
    p.q.heads = p.k.heads = 0;
    p.head_dim = p.v_dim;
  }
  const rope_int pieces = ceil_div(p.v_dim, p.head_dim), tokens = p.batch * p.seq,
                 heads = p.q.heads + p.k.heads + p.v.heads * (c.norm_v ? 1 : pieces);
  c.v_pieces = p.v.heads && p.v_dim != p.head_dim;
  const auto check_size = [&](const char* name, rope_int n, rope_int most) {
    TORCH_CHECK_NOT_IMPLEMENTED(n <= most, call.op, ": ", name, " is ", n, " but must be at most ", most,
                                "; the tensors are too large for Metal");
  };
  check_size("head_dim", p.head_dim, INT32_MAX);
  check_size("the number of heads", heads, INT32_MAX / kHeads);  // a kernel's loop goes kHeads shares past the last
  check_size("batch * seq", tokens, INT32_MAX);
  const rope_int share_heads = std::max(ceil_div(heads * tokens, kSpread), rope_int(1));
  const rope_int shares = ceil_div(heads, share_heads);
  const bool teams = p.has_norm || c.norm_v;  // threads share a head
  plan.over_heads = p.norm_over_heads;
  if (teams) check_size("batch * seq * heads", tokens * shares, INT32_MAX);
  if (plan.over_heads) check_size("heads * head_dim", std::max(p.q.heads, p.k.heads) * p.head_dim, INT32_MAX);

  // With a norm, whether V is 1 and whether heads are wide follows from sizes alone, never from strides or addresses,
  // because it determines the order of the norm's sums: the layout of a tensor must not change a bit of the result.
  // V = 8 gives the bits of V = 4; see dot() in shaders/device.h.
  const auto aligned = [&](int vector) {
    return fits(p, vector) && (!p.v.heads || p.v_dim % vector == 0) &&
           all(tensors, [&](const Tensor* t) { return in_vectors(*t, vector); });
  };
  const bool four = teams ? fits(p, 4) : aligned(4);
  plan.wide_head = teams && !plan.over_heads && chunks_of(p, four ? 4 : 1, true).all > kSimd;
  const bool eight =
      !backward && call.q->element_size() == 2 && !plan.wide_head && !plan.over_heads && four && aligned(8);
  const bool copied = copies(p, c.q_in_place, c.k_in_place);
  const auto threads = [&](int v) {  // with vectors of v channels
    const rope_int chunks = chunks_of(p, v, copied).all;
    return tokens * shares * (teams ? power_of_two(chunks) : chunks);
  };
  int vector = 1;
  if (eight && threads(8) >= kEnough) {
    vector = 8;
  } else if (four && !plan.wide_head && (teams || backward || threads(4) >= kEnough)) {
    vector = 4;
  }
  const Chunks chunks = chunks_of(p, vector, copied);
  c.vectors = vector != 1 && aligned(vector);
  c.table_access = call.cos && vector != 1 ? table_access(*call.cos, *call.sin) : kElements;
  c.weight_vectors = p.has_norm && vector != 1;
  for (const Tensor* t : {call.q_norm_weight, call.k_norm_weight}) c.weight_vectors &= !t || in_vectors(*t, 4);

  r.rotated = unsigned(chunks.rotated);
  r.chunks = unsigned(chunks.all);
  r.k_start = unsigned(p.q.heads);
  r.v_start = unsigned(p.q.heads + p.k.heads);
  r.heads = unsigned(heads);
  r.shares = unsigned(shares);
  r.tokens = unsigned(tokens);
  r.pieces = unsigned(pieces);
  r.tokens_first = p.q.in[2] > p.q.in[p.seq > 1 ? 1 : 0];
  const PositionRange range = position_range(p, /*cache_by_position=*/call.v && !call.slots);
  r.has_range = range.limited;
  r.last_position = range.last;
  r.one = 1.0f;

  TORCH_CHECK_NOT_IMPLEMENTED(p.source != kInvFreq || call.inv_freq->scalar_type() == at::kFloat, call.op,
                              ": inv_freq is ", kNoFloat64);
  const bool narrow = std::max({tokens * heads, p.table_rows, p.blocks * p.block_size}) <= INT32_MAX &&
                      all(tensors, fits_32) && all(parameters, fits_32);
  const std::string_view type = type_of(call.op, call.q_name(), *call.q);
  static constexpr std::string_view kVariants[2][3] = {{"_v1_u64", "_v4_u64", "_v8_u64"},
                                                       {"_v1_u32", "_v4_u32", "_v8_u32"}};
  const std::string_view variant = kVariants[narrow][vector / 4];
  if (!teams) {
    plan.kernel = {"rotate", "rotate", type, variant};
    plan.grid = {r.chunks, r.tokens_first ? tokens : shares, r.tokens_first ? shares : tokens};
    return plan;
  }
  if (plan.over_heads) {
    c.lanes = int(kSimd);
    plan.kernel = {backward ? "norm_backward" : "norm",
                   backward ? "norm_backward_over_heads" : "norm_rotate_over_heads", type, variant.substr(0, 3)};
    plan.grid = {tokens, c.tensors, 1};
    return plan;
  }
  c.lanes = plan.wide_head ? int(kSimd) : int(power_of_two(chunks.all));
  if (backward) {
    plan.kernel = {"norm_backward", plan.wide_head ? "norm_backward_wide" : "norm_backward", type,
                   plan.wide_head ? "" : variant.substr(0, 3)};
  } else {
    plan.kernel = {"norm", plan.wide_head ? "norm_rotate_wide" : "norm_rotate", type, plan.wide_head ? "" : variant};
  }
  plan.grid = {tokens * shares, 1, 1};
  return plan;
}

// Returns how many threads a threadgroup has, of `all` threads of a grid: whole SIMD groups, so few that there are at
// least 32 threadgroups if there are as many SIMD groups, and at most `most` threads. `most` is a multiple of kSimd.
inline rope_int group_threads(rope_int all, rope_int most) {
  return std::clamp(all / 32 / kSimd * kSimd, rope_int(kSimd), most);
}

// Returns how many threads take q, k or v of a token if a norm is over all heads: at most `most`, which is a multiple
// of kSimd, and not many more than there are chunks.
inline rope_int token_threads(const Plan& plan, rope_int most) {
  const rope_int chunks = std::max(plan.rotate.params.q.heads, plan.rotate.params.k.heads) * plan.rotate.chunks;
  return std::clamp(ceil_div(chunks, kSimd) * kSimd, rope_int(kSimd), most);
}

// Returns the size of a threadgroup of at most `threads` threads. It takes as much of the grid as it can along x, then
// along y, then along z, because threads that are neighbours along x read neighbouring memory.
inline Size3 group_of(const Size3& grid, rope_int threads) {
  const rope_int x = std::min(grid.x, threads), y = std::min(grid.y, threads / x),
                 z = std::min(grid.z, threads / x / y);
  return {x, y, z};
}

// How the norm's backward sums the gradients of the weights. The items of q, and separately those of k, are cut into
// parts: neighbouring items, which one threadgroup sums. A second kernel adds up the sums of the parts. The cut follows
// from sizes and from the number of threads in a threadgroup, which depends only on the kind of GPU and on Metal's
// compiler; so one kind of GPU with one release of macOS always gives the same bits. There are at most 1024 parts, or
// 256 if the norm is over all heads. A part has at least 4 items for each team of the threadgroup, or 32 items if heads
// are wide or the norm is over all heads.
struct Parts {
  rope_int q_items, k_items;
  rope_int part_items;  // items of a part
  rope_int count;       // parts of q, and as many of k; if one has fewer items, its last parts are empty
};
// teams: of a threadgroup.
inline Parts parts_of(const Plan& plan, rope_int teams) {
  const RopeParams& p = plan.rotate.params;
  const rope_int tokens = p.batch * p.seq, heads = plan.wide_head ? 1 : kHeads;  // heads of an item
  Parts parts{tokens * ceil_div(p.q.heads, heads), tokens * ceil_div(p.k.heads, heads)};
  if (plan.over_heads) parts.q_items = parts.k_items = tokens;
  const rope_int items = std::max(parts.q_items, parts.k_items);
  const rope_int least = plan.wide_head || plan.over_heads ? rope_int(kSimd) : teams * 4;
  const rope_int most = plan.over_heads ? 256 : 1024;  // over all heads the sums of a part are longer
  parts.part_items = least * std::max(ceil_div(items, most * least), rope_int(1));
  parts.count = ceil_div(items, parts.part_items);
  return parts;
}

// Returns the grid of table_backward, in threads: chunks along x, table rows along z; a table by head has a row for
// each head. The threads along y share the work for one chunk of one table row: the heads, in groups of kHeads, of all
// tokens that it rotated. They are in one threadgroup, which adds their sums, so the order of a sum follows from sizes
// and `threads` alone. `threads` is the size limit of a threadgroup.
inline Size3 grid_of(const Plan& plan, const TokensOfRows& tokens, rope_int threads) {
  const rope_int chunks = plan.rotate.chunks;
  // How many tokens a row rotated. If the tokens are listed, the host does not know it; mostly it is one token of each
  // sequence.
  const rope_int row_tokens = tokens.listed ? plan.rotate.params.batch : tokens.copies;
  const bool by_head = plan.rotate.params.source == kTableByHead;
  const rope_int groups = by_head ? 1 : ceil_div(plan.rotate.heads, kHeads);
  return {chunks, std::min(row_tokens * groups, threads / std::min(chunks, threads)),
          tokens.rows * (by_head ? plan.rotate.params.q.heads : 1)};
}

// Lays out the gradients of cos and sin. Only the function constants that table_backward uses are set: the others would
// only multiply the pipelines.
inline Plan plan(const TableBackwardCall& call) {
  Plan plan = mps::plan(call.rotate, {&call.q, call.k});
  const Constants all = plan.constants;
  plan.kernel.file = "tables";
  plan.kernel.family = "table_backward";
  plan.constants = {};
  plan.constants.tensors = all.tensors;
  plan.constants.interleaved = all.interleaved;
  plan.constants.inverse = all.inverse;
  if (all.source == kTableByHead) plan.constants.source = kTableByHead;
  plan.constants.scaled = all.scaled;
  plan.constants.vectors = all.vectors;
  plan.constants.native_tables = all.native_tables;
  plan.constants.listed = call.tokens().listed;
  return plan;
}

}  // namespace rope::mps
