// How a call is laid out on the GPU: which kernel runs, its function constants, and its grid. This file uses none of
// Apple's types, so that it compiles and is tested on machines without Metal.
//
// How a call is cut into threads
// ------------------------------
// A head is cut into chunks, which csrc/plan.h explains, and a chunk belongs to one thread. It is two vectors of V
// channels; V is 8, 4 or 1, and is called `vector` below. Eight channels are used for types of 2 bytes alone, so that a
// vector has at most 16 bytes. Chunk c rotates the pairs cV .. cV + V - 1, whose angles are neighbours in a table row.
//
// The heads of a token are divided into shares; the heads of q, k and v are one list. With n shares, share s has the
// heads s, s + n, s + 2n ... A thread takes its chunk of every head of its share, so that the angles are computed or
// read once for these heads, unless a table by head has a row for each. Neighbouring threads take neighbouring chunks,
// then neighbouring shares, whose heads lie side by side in memory, then neighbouring tokens. If tokens lie closer
// together in memory than heads, tokens come before shares. A v whose head_dim is not k's is apart: it is not in the
// list, and the threads of a token divide its channels among themselves after its heads.
//
// Many tokens have few shares, so that a table row is read seldom. Few tokens have many, down to one head in a share,
// so that many cores work; if that is not enough, V is smaller too.
//
// A norm needs the sum over a whole head. So the threads that share a head, one for each chunk, are a team: k_lanes
// threads of one SIMD group, where k_lanes is the smallest power of two that is not less than the number of chunks. A
// team takes one share of one token. What is normalised together is a group. A group is wide if it is a head of more
// chunks than a SIMD group has threads, or all heads of a token. Kernels with _wide in their names take it: a SIMD
// group or a threadgroup shares it, and each thread takes several of its chunks.
//
// In the names of kernels _v8, _v4 and _v1 give V. Kernels with _u32 compute element offsets in 32 bits, all others in
// 64 bits.
#pragma once

#include <string_view>

#include "../call.h"
#include "../plan.h"
#include "source.h"

namespace rope::mps {

struct BoundTensor {
  int buffer;  // Buffer
  const Tensor* tensor;

  // True if the tensor has heads, which are read or written in vectors.
  bool has_heads() const { return buffer <= kBufferVOut || buffer == kBufferQBefore || buffer == kBufferKBefore; }
};

// One dispatch of a kernel: which kernel, and what it is given.
struct Dispatch {
  Kernel kernel;
  Constants constants;
  TiledParams params;
  c10::SmallVector<BoundTensor, 24> tensors;
  bool wide;   // what is normalised together is a wide group
  Size3 work;  // rotate: threads. norm_rotate: teams, in x. A norm over all heads: tokens in x, and sides in y
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

// True if the element offset of the last element of t does not fit in 32 bits.
inline bool needs_64_bits(const Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  return t.numel() && last > UINT32_MAX;
}

// Ends a message about frequencies.
constexpr const char* kNoFloat64 =
    "float64 but must be float32, because Metal has no float64; pass torch_rope.inv_freq(..., device=\"mps\"), in "
    "which two float32 numbers add up to each frequency";

// Returns the name of the dtype of t in Metal. The error message calls t `name`.
inline const char* type_of(const char* op, const char* name, const Tensor& t) {
  const at::ScalarType type = t.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(type != at::kDouble, op, ": ", name,
                              " is float64 but must be float16, bfloat16 or float32, because Metal has no float64");
  return type == at::kHalf ? "half" : type == at::kBFloat16 ? "bfloat" : "float";
}

// Refuses what Metal lacks.
inline void check_types(const Call& call) {
  constexpr const char* names[][2] = {{"q_out", "q"}, {"k_cache", "k"}, {"v_cache", "v"}};
  for (int i = 0; i < kSides && call.sides[i].out; i++) {
    const at::ScalarType type = call.sides[i].out->scalar_type();
    TORCH_CHECK_NOT_IMPLEMENTED(type != at::kFloat8_e4m3fn && type != at::kFloat8_e5m2, call.op, ": ", names[i][0],
                                " is ", type == at::kFloat8_e5m2 ? "float8_e5m2" : "float8_e4m3fn",
                                " but must be int8 or the dtype of ", names[i][1], ", because Metal has no float8");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!call.inv_freq || call.inv_freq->scalar_type() == at::kFloat, call.op, ": inv_freq is ",
                              kNoFloat64);
}

// Returns the tensors that the kernels take. A backward also has q and k before the norm.
inline auto tensors_of(const Call& call) {
  decltype(Dispatch::tensors) all;
  const auto add = [&](int buffer, const Tensor* t) {
    if (t) all.push_back({buffer, t});
  };
  for (int i = 0; i < kSides; i++) {
    const SideTensors& side = call.sides[i];
    const Tensor* const in = side.gradient ? side.gradient : side.in;
    if (in != side.out) add(kBufferQIn + i, in);
    add(kBufferQOut + i, side.out);
    add(kBufferQWeight + i, side.weight);
    add(kBufferQScale + i, side.scale);
    if (side.gradient) add(kBufferQBefore + i, side.in);
  }
  const Tensor* const of_tokens[] = {call.cos,       call.sin,   call.inv_freq,
                                     call.positions, call.slots, call.sides[kQ].factor};
  for (int i = 0; i < 6; i++) add(kBufferCos + i, of_tokens[i]);
  return all;
}

// Returns the function constants that follow from the arguments alone.
inline Constants constants_of(const Call& call, const Args& p) {
  const auto native = [&](const Tensor& t) { return t.scalar_type() == call.q().scalar_type(); };
  Constants c{};
  c.interleaved = p.interleaved;
  c.inverse = p.inverse;
  c.source = p.source;
  c.scaled = is_scaled(p);
  c.split_inv_freq = p.split_inv_freq;
  c.rounding = p.rounding;
  c.position_bytes = call.positions ? int(call.positions->element_size()) : 0;
  c.slot_bytes = call.slots ? int(call.slots->element_size()) : 0;
  c.native_tables = call.cos && native(*call.cos);
  for (int i = 0; i < kSides && call.sides[i].in; i++) {
    const SideTensors& side = call.sides[i];
    c.tensors = i + 1;
    c.native_weights |= (side.weight && native(*side.weight)) << i;
    c.in_place |= (side.in == side.out) << i;
    c.quantised |= (p.sides[i].format != kUnquantised) << i;
    c.normalised |= (p.sides[i].norm != kNoNorm) << i;
    c.weighted |= (side.weight != nullptr) << i;
  }
  c.all_heads = p.sides[kQ].norm == kAllHeads;
  c.factor = call.sides[kQ].factor != nullptr;
  c.round_before_weight = p.round_before_weight;
  return c;
}

// The heads of tokens are divided into about this many shares: the shares of a token are fewer the more tokens there
// are. A GPU needs some ten thousand threads to read memory at its full speed, and a share has several threads.
constexpr rope_int kSpread = 2048;

// Makes the list of heads and cuts it into shares. Refuses sizes that do not fit in the numbers of the kernels.
inline void lay_out_heads(const Call& call, TiledParams& r, Constants& c) {
  const Side &q = r.args.sides[kQ], &k = r.args.sides[kK], &v = r.args.sides[kV];
  c.v_apart = v.heads && v.head_dim != q.head_dim;
  // A v that is apart is as much work as this many heads of q.
  const rope_int v_heads = c.v_apart && !v.norm ? v.heads * ceil_div(v.head_dim, q.head_dim) : v.heads;
  const rope_int heads = q.heads + k.heads + v_heads, tokens = r.args.batch * r.args.seq;
  const auto check_size = [&](const char* name, rope_int n, rope_int most) {
    TORCH_CHECK_NOT_IMPLEMENTED(n <= most, call.op, ": ", name, " is ", n, " but must be at most ", most,
                                "; the tensors are too large for Metal");
  };
  check_size("head_dim", std::max(q.head_dim, v.head_dim), INT32_MAX);
  check_size("the number of heads", heads, INT32_MAX / kHeads);  // a kernel's loop goes kHeads shares past the last
  check_size("batch * seq", tokens, INT32_MAX);
  const rope_int share_heads = std::max(ceil_div(heads * tokens, kSpread), rope_int(1));
  const rope_int shares = ceil_div(heads, share_heads);
  if (c.normalised) check_size("batch * seq * heads", tokens * shares, INT32_MAX);
  if (c.all_heads || c.v_apart) check_size("heads * head_dim", heads * q.head_dim, INT32_MAX);
  r.first[kK] = unsigned(q.heads);
  r.first[kV] = unsigned(q.heads + k.heads);
  r.first[kSides] = unsigned(q.heads + k.heads + (c.v_apart ? 0 : v.heads));
  r.shares = unsigned(shares);
  r.tokens = unsigned(tokens);
  r.tokens_first = q.in_strides[2] > q.in_strides[r.args.seq > 1 ? 1 : 0];
}

// A call of fewer threads than these, which are 16 SIMD groups, takes smaller vectors to have more.
constexpr rope_int kEnough = 16 * kSimd;

// Cuts heads into chunks, and returns V.
//
// With a norm, whether V is 1 and whether heads are wide follows from sizes alone, never from strides or addresses,
// because it determines the order of the norm's sums: the layout of a tensor must not change a bit of the result. V = 8
// gives the bits of V = 4; see sum_of_products() in shaders/sums.h.
inline int lay_out_channels(const Call& call, Dispatch& dispatch) {
  TiledParams& r = dispatch.params;
  Constants& c = dispatch.constants;
  const Args& p = r.args;
  const auto aligned = [&](int vector) {
    return fits(p, vector) && (!c.v_apart || p.sides[kV].head_dim % vector == 0) &&
           std::all_of(dispatch.tensors.begin(), dispatch.tensors.end(),
                       [&](const BoundTensor& t) { return !t.has_heads() || in_vectors(*t.tensor, vector); });
  };
  const bool teams = c.normalised != 0, four = teams ? fits(p, 4) : aligned(4);
  const bool wide_head = teams && !c.all_heads && chunks_of(p, four ? 4 : 1, true).all > kSimd;
  dispatch.wide = wide_head || c.all_heads;
  const bool rest = writes_rest(p, c.in_place & 1 << kQ, c.in_place & 1 << kK);
  const auto enough = [&](int vector) {
    const rope_int chunks = chunks_of(p, vector, rest).all;
    return r.tokens * rope_int(r.shares) * (teams ? power_of_two(chunks) : chunks) >= kEnough;
  };
  int vector = 1;
  if (!call.is_backward() && call.q().element_size() == 2 && !dispatch.wide && four && aligned(8) && enough(8)) {
    vector = 8;
  } else if (four && !wide_head && (teams || call.is_backward() || enough(4))) {
    vector = 4;
  }
  const Chunks chunks = chunks_of(p, vector, rest);
  r.rotated = unsigned(chunks.rotated);
  r.chunks = unsigned(chunks.all);
  c.vectors = vector != 1 && aligned(vector);
  c.weight_vectors = vector != 1 && c.weighted;
  for (const SideTensors& side : call.sides) c.weight_vectors &= !side.weight || in_vectors(*side.weight, 4);
  c.table_vectors = call.cos && vector != 1 && in_vectors(*call.cos, 4) && in_vectors(*call.sin, 4);
  if (teams) c.lanes = dispatch.wide ? int(kSimd) : int(power_of_two(chunks.all));
  return vector;
}

// Chooses the kernel, and the work that it divides among threads.
inline void choose_kernel(std::string_view type, bool backward, int vector, Dispatch& dispatch) {
  static constexpr std::string_view kFamilies[2][2] = {{"norm_rotate", "norm_rotate_wide"},
                                                       {"norm_backward", "norm_backward_wide"}};
  const TiledParams& r = dispatch.params;
  const Args& p = r.args;
  const rope_int tokens = r.tokens, shares = r.shares;
  const bool narrow = std::max({tokens * r.first[kSides], p.table_rows, p.blocks * p.block_size}) <= INT32_MAX &&
                      std::none_of(dispatch.tensors.begin(), dispatch.tensors.end(),
                                   [](const BoundTensor& t) { return needs_64_bits(*t.tensor); });
  const int offset_bits = narrow ? 32 : 64;
  if (!dispatch.constants.normalised) {
    dispatch.kernel = {"rotate", "rotate", type, vector, offset_bits};
    dispatch.work = {r.chunks, r.tokens_first ? tokens : shares, r.tokens_first ? shares : tokens};
  } else {
    dispatch.kernel = {backward ? "norm_backward" : "norm", kFamilies[backward][dispatch.wide], type, vector,
                       backward || dispatch.wide ? 0 : offset_bits};
    dispatch.work = {tokens * shares, 1, 1};
  }
  if (dispatch.constants.all_heads) dispatch.work = {tokens, dispatch.constants.tensors, 1};
}

// Lays out a call that rotates, or the backward of one with a norm.
inline Dispatch dispatch_of(const Call& call, const Args& a) {
  const std::string_view type = type_of(call.op, call.q_name(), call.q());
  Dispatch dispatch{};
  TiledParams& r = dispatch.params;
  r.args = a;
  dispatch.constants = constants_of(call, a);
  dispatch.tensors = tensors_of(call);
  r.positions = position_range(a);
  r.one = 1.0f;
  lay_out_heads(call, r, dispatch.constants);
  choose_kernel(type, call.is_backward(), lay_out_channels(call, dispatch), dispatch);
  return dispatch;
}

// A number of threads that is cut into threadgroups, or a number of threadgroups.
struct Grid {
  Size3 size, threads;  // threads: of a threadgroup
  bool of_threadgroups = false;
};

// Returns a grid of threads, with threadgroups of at most `threads` threads. A threadgroup takes as much of the grid as
// it can along x, then along y, then along z, because threads that are neighbours along x read neighbouring memory.
inline Grid grid_of(const Size3& size, rope_int threads) {
  const rope_int x = std::min(size.x, threads), y = std::min(size.y, threads / x);
  return {size, {x, y, std::min(size.z, threads / x / y)}};
}

// Returns how many threads share the work for a wide group: at most `most`, and not many more than there are chunks.
inline rope_int group_threads(const Dispatch& dispatch, rope_int most) {
  const Side* const sides = dispatch.params.args.sides;
  const rope_int heads = dispatch.constants.all_heads ? std::max(sides[kQ].heads, sides[kK].heads) : 1;
  const rope_int threads = ceil_div(heads * dispatch.params.chunks, kSimd) * kSimd;
  return std::clamp(threads, rope_int(kSimd), std::min<rope_int>(most, kSharedThreads));
}

// Returns the grid of a kernel that rotates. most: how many threads a threadgroup may have, a multiple of kSimd. It has
// whole SIMD groups, so few that there are at least 32 threadgroups if there are as many SIMD groups.
inline Grid grid_of(const Dispatch& dispatch, rope_int most) {
  const Size3& work = dispatch.work;
  if (dispatch.constants.all_heads) return {work, {group_threads(dispatch, most), 1, 1}, true};
  const rope_int lanes = dispatch.constants.lanes, all = work.x * work.y * work.z * std::max(lanes, rope_int(1));
  const rope_int threads = std::clamp(all / 32 / kSimd * kSimd, rope_int(kSimd), std::min<rope_int>(most, kThreads));
  if (!lanes) return grid_of(work, threads);
  return {{ceil_div(work.x, threads / lanes), 1, 1}, {threads, 1, 1}, true};
}

// How the norm's backward sums the gradients of the weights. An item is the work that a team does at once: kHeads
// neighbouring heads of q or of k, or in norm_backward_wide one group. The items of q, and separately those of k, are
// cut into parts: neighbouring items, which one threadgroup sums. A second kernel adds up the sums of the parts. The
// cut follows from sizes and from the number of threads in a threadgroup, which depends only on the kind of GPU and on
// Metal's compiler; so one kind of GPU with one release of macOS always gives the same bits. There are at most 1024
// parts, or 256 if the norm is over all heads, because the sums of a part are longer then. A part has at least 4 items
// for each team of the threadgroup, or 32 wide groups.
//
// Fills params with the cut, and returns how many threads a threadgroup has. most: how many it may have.
inline rope_int cut_into_parts(Dispatch& dispatch, rope_int most) {
  TiledParams& r = dispatch.params;
  const bool all_heads = dispatch.constants.all_heads;
  for (int i = 0; i < kV; i++) {
    const rope_int heads = r.args.sides[i].heads;
    r.items[i] = r.args.batch * r.args.seq * (all_heads ? 1 : dispatch.wide ? heads : ceil_div(heads, kHeads));
    r.channels[i] = unsigned(r.args.sides[kQ].head_dim * (all_heads ? heads : 1));
  }
  const rope_int threads = dispatch.wide ? group_threads(dispatch, most) : std::min<rope_int>(most, kThreads);
  const rope_int items = std::max(r.items[kQ], r.items[kK]), parts = all_heads ? 256 : 1024,
                 least = dispatch.wide ? rope_int(kSimd) : threads / dispatch.constants.lanes * 4;
  r.part_items = unsigned(least * std::max(ceil_div(items, parts * least), rope_int(1)));
  r.parts = unsigned(ceil_div(items, r.part_items));  // of q, and as many of k; those past the last item are empty
  return threads;
}

}  // namespace rope::mps
