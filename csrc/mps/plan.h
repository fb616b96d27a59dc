// How a call is laid out on the GPU: kernel, function constants, and grid. No type of Apple's, so that it is the same
// on a machine without Metal.
#pragma once

#include <cstring>
#include <string>
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

// Its name in the shaders is the three parts, which are literals: a call makes no string.
struct Kernel {
  const char *family, *type, *variant;
  std::string name() const { return std::string(family) + "_" + type + variant; }
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
  Size3 grid;      // threads; of a norm: rows of threads, in x
  bool wide_head;  // of a norm
};

template <typename Params>
bool is_scaled(const Params& p) {
  return p.factor_hi != 1.0f || p.factor_lo != 0.0f;
}

// Whether four elements side by side are one aligned access everywhere.
inline bool in_vectors(const Tensor& t) {
  const int size = int(t.element_size());
  const auto start = uintptr_t(t.storage_offset()) * uintptr_t(size);
  return t.numel() == 0 || is_aligned(start, t.strides().data(), t.sizes().data(), int(t.dim()), size, 4 * size);
}

inline bool needs_64_bits(const Tensor& t) {
  return t.numel() && last_offset(t.strides().data(), t.sizes().data(), int(t.dim())) > UINT32_MAX;
}

inline const char* type_of(const char* op, const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kHalf:
      return "half";
    case at::kBFloat16:
      return "bfloat";
    case at::kFloat:
      return "float";
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": Metal has no float64");
  }
}

// before: in a backward, q and k (or null) as they were
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
  for (const Tensor* t : {call.slots, call.q_norm_weight, call.k_norm_weight}) {
    if (t) parameters.push_back(t);
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
  c.scaled = is_scaled(p);
  c.position_bytes = bytes(call.positions ? &*call.positions : nullptr);
  c.slot_bytes = bytes(call.slots);
  c.native_tables = native(call.cos ? &*call.cos : nullptr);
  c.native_q_weight = native(call.q_norm_weight);
  c.native_k_weight = native(call.k_norm_weight);

  const rope_int heads = p.q.heads + p.k.heads + p.v.heads;
  const bool by_four = fits(p, 4), reached = by_four && all(tensors, [](const Tensor* t) { return in_vectors(*t); });
  // The order of a norm's sums follows from sizes alone, never from strides or addresses.
  int width = (p.has_norm ? by_four : reached) ? 4 : 1;
  plan.wide_head = p.has_norm && chunks_of(p, width, true).all > kSimd;
  if (plan.wide_head) width = 1;
  c.vectors = width == 4 && reached;
  c.parameter_vectors = width == 4;
  for (const OptTensor* t : {&call.cos, &call.sin}) c.parameter_vectors &= !*t || in_vectors(**t);
  for (const Tensor* t : {call.q_norm_weight, call.k_norm_weight}) c.parameter_vectors &= !t || in_vectors(*t);

  r.q_in_place = call.q == call.q_out;
  r.k_in_place = call.k && call.k == call.k_out;
  const Chunks chunks = chunks_of(p, width, copies(p, r.q_in_place, r.k_in_place));
  r.rotated = unsigned(chunks.rotated);
  r.chunks = unsigned(chunks.all);
  r.k_start = unsigned(p.q.heads);
  r.v_start = unsigned(p.q.heads + p.k.heads);
  r.heads = unsigned(heads);
  r.groups = unsigned(ceil_div(heads, kHeads));
  const Places places = places_of(p, /*at_place=*/call.v && !call.slots);
  r.has_range = places.limited;
  r.last_place = places.last;

  const rope_int rows = p.batch * p.seq * r.groups;
  for (const rope_int n : {p.head_dim, heads, p.seq, p.batch * r.groups}) {
    TORCH_CHECK_NOT_IMPLEMENTED(n <= INT32_MAX, call.op, ": a size of ", n, " is too large for Metal");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!p.has_norm || rows <= INT32_MAX, call.op, ": too many tokens for Metal");
  TORCH_CHECK_NOT_IMPLEMENTED(p.source != kInvFreq || call.inv_freq->scalar_type() == at::kFloat, call.op,
                              ": inv_freq is float64, which Metal does not have");
  const bool narrow = std::max({rows, p.rows, p.blocks * p.block_size}) <= INT32_MAX && all(tensors, fits_32) &&
                      all(parameters, fits_32);
  const char* const type = type_of(call.op, *call.q);
  const char* const variant = width == 4 ? narrow ? "_v4_u32" : "_v4_u64" : narrow ? "_v1_u32" : "_v1_u64";
  if (!p.has_norm) {
    plan.kernel = {"rotate", type, variant};
    plan.grid = {r.chunks, p.seq, p.batch * r.groups};
    return plan;
  }
  c.lanes = plan.wide_head ? int(kSimd) : int(power_of_two(chunks.all));
  if (plan.wide_head) {
    plan.kernel = {backward ? "norm_backward_wide" : "norm_rotate_wide", type, ""};
  } else if (backward) {
    plan.kernel = {"norm_backward", type, width == 4 ? "_v4" : "_v1"};
  } else {
    plan.kernel = {"norm_rotate", type, variant};
  }
  plan.grid = {rows, 1, 1};
  return plan;
}

// As many threads as may be, along x first: threads side by side read memory side by side.
inline Size3 group_of(const Size3& grid, rope_int threads) {
  const rope_int x = std::min(grid.x, threads), y = std::min(grid.y, threads / x),
                 z = std::min(grid.z, threads / x / y);
  return {x, y, z};
}

// Sums of a backward. The parts follow from sizes, so that no call changes a bit on one kind of GPU.
struct Parts {
  rope_int q_items, k_items, part, count;
};
inline Parts parts_of(const Plan& plan, rope_int rows_of_threads) {
  const RopeParams& p = plan.rotate.params;
  const rope_int tokens = p.batch * p.seq, heads = plan.wide_head ? 1 : kHeads;  // of an item
  Parts parts{tokens * ceil_div(p.q.heads, heads), tokens * ceil_div(p.k.heads, heads)};
  const rope_int items = std::max(parts.q_items, parts.k_items);
  const rope_int least = plan.wide_head ? rope_int(kSimd) : rows_of_threads * 4;
  parts.part = least * std::max(ceil_div(items, 1024 * least), rope_int(1));
  parts.count = ceil_div(items, parts.part);
  return parts;
}

// The gradients of tables: a row of them in z. The threads along y share the heads of its tokens, kHeads at a time, and
// are in one threadgroup, which sums over them. So the order of a sum follows from sizes and `threads` alone.
inline Size3 grid_of(const Plan& plan, const TokensOfRows& tokens, rope_int threads) {
  const rope_int chunks = plan.rotate.chunks;
  // Of a row; listed ones mostly have one of each sequence.
  const rope_int row_tokens = tokens.listed ? plan.rotate.params.batch : tokens.copies;
  return {chunks, std::min(row_tokens * plan.rotate.groups, threads / std::min(chunks, threads)), tokens.rows};
}

// Of the kernel of table gradients alone: what it does not look at would only make more pipelines.
inline Plan plan(const TableBackwardCall& call) {
  Plan plan = mps::plan(call.rotate, {&call.q, call.k});
  const Constants all = plan.constants;
  plan.kernel.family = "table_backward";
  plan.constants = {};
  plan.constants.tensors = all.tensors;
  plan.constants.interleaved = all.interleaved;
  plan.constants.inverse = all.inverse;
  plan.constants.scaled = all.scaled;
  plan.constants.vectors = all.vectors;
  plan.constants.native_tables = all.native_tables;
  return plan;
}

}  // namespace rope::mps
