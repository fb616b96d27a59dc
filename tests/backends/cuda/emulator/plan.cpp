// The Python module rope_plan: the functions of csrc/cuda/plan.h, which test_plan.py builds. Plain C++, without
// torch or CUDA.
#include "../../../../csrc/cuda/plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>

namespace py = pybind11;
using namespace rope;

namespace {

template <size_t n>
using Strides = std::array<rope_int, n>;
template <size_t n>
using Given = std::optional<std::tuple<uintptr_t, Strides<n>>>;  // the address and strides of a tensor, if it is given
using Side = std::tuple<Given<4>, Given<4>>;                     // q, k or v: the tensor that is read, and its result

// Copies the strides of a tensor and returns its address, or null if it is not given.
template <size_t n>
void* set(const Given<n>& given, rope_int* strides) {
  if (!given) return nullptr;
  const auto& [address, values] = *given;
  std::copy(values.begin(), values.end(), strides);
  return reinterpret_cast<void*>(address);
}

// A call is normalised and quantised as these bits say: 0 without a norm, kNorm alone if each head is normalised.
enum Features { kNorm = 1, kOverHeads = 2, kNormV = 4, kQuantisedK = 8, kQuantisedV = 16 };

RotateArgs args(int dtype, const Strides<6>& sizes, const Strides<3>& heads, const std::array<Side, 3>& qkv,
                const Strides<2>& cache, const Given<2>& positions, const Given<2>& slots, const Given<4>& cos,
                const Given<4>& sin, int source, rope_int table_rows, rope_int inv_freq, int features, int rounding) {
  RotateArgs a{};
  RopeParams& p = a.params;
  a.x_dtype = DType(dtype);
  a.table_dtype = dtype == int(DType::kDouble) ? DType::kDouble : DType::kFloat;
  p.batch = sizes[0], p.seq = sizes[1], p.head_dim = sizes[2], p.rotary_dim = sizes[3], p.rotary_start = sizes[4];
  p.v_dim = sizes[5];
  p.q.heads = heads[0], p.k.heads = heads[1], p.v.heads = heads[2];
  a.q_in = set(std::get<0>(qkv[0]), p.q.in), a.q_out = set(std::get<1>(qkv[0]), p.q.out);
  a.k_in = set(std::get<0>(qkv[1]), p.k.in), a.k_out = set(std::get<1>(qkv[1]), p.k.out);
  a.v_in = set(std::get<0>(qkv[2]), p.v.in), a.v_out = set(std::get<1>(qkv[2]), p.v.out);
  p.has_cache = cache[1] > 0, p.blocks = cache[0], p.block_size = cache[1];
  p.has_positions = bool(positions), a.positions = set(positions, p.positions);
  p.has_slots = bool(slots), a.slots = set(slots, p.slots);
  a.cos = set(cos, p.cos), a.sin = set(sin, p.sin);
  p.source = source, p.table_rows = table_rows, p.inv_freq[1] = inv_freq;
  p.has_norm = bool(features & kNorm), p.norm_over_heads = bool(features & kOverHeads);
  p.norm_v = bool(features & kNormV), p.rounding = rounding;
  p.k_cache.quantised = bool(features & kQuantisedK), p.v_cache.quantised = bool(features & kQuantisedV);
  a.wide_positions = a.wide_slots = true;
  p.factor_hi = 1;
  return a;
}

// The parameters of a kernel, as its constant bank holds them.
template <typename Parameter>
py::bytes bytes_of(const Parameter& p) {
  static_assert(sizeof(Parameter) % 8 == 0);
  return {reinterpret_cast<const char*>(&p), sizeof(Parameter)};
}

// What all plans have.
template <typename Plan>
py::dict of(const Plan& plan, const cuda::Tiling& t) {
  py::dict d;
  d["vector"] = t.vector, d["vectors"] = t.vectors, d["chunks"] = t.chunks, d["rotated"] = t.rotated;
  d["block"] = py::make_tuple(plan.block.x, plan.block.y, plan.block.z);
  d["grid"] = py::make_tuple(plan.grid.x, plan.grid.y, plan.grid.z);
  return d;
}

template <typename... Call>
py::dict plan(int processors, Call... call) {
  RotateArgs a = args(call...);
  const cuda::Plan plan = cuda::plan_rotate(a, processors);
  const cuda::Tiling& t = plan.tiling;
  py::dict d = of(plan, t);
  d["wide_index"] = plan.wide_index, d["general"] = plan.general;
  d["table_vectors"] = t.table_vectors;
  d["heads_per_thread_block"] = t.heads_per_thread_block;
  d["v_pieces"] = t.v_pieces, d["v_together"] = t.v_together;
  d["batch"] = a.params.batch, d["seq"] = a.params.seq;
  d["parameters"] = bytes_of(a) + bytes_of(t);  // both are aligned to 8 bytes
  return d;
}

// x: the q and k that the forward call normalised.
template <typename... Call>
py::dict plan_backward(const std::array<Given<4>, 2>& x, Call... call) {
  NormBackwardArgs n{args(call...), nullptr, nullptr, {}, {}};
  n.q_in = set(x[0], n.q), n.k_in = set(x[1], n.k);
  const cuda::BackwardPlan plan = cuda::plan_norm_backward(n);
  py::dict d = of(plan, plan.tiling.tiling);
  d["wide_index"] = plan.wide_index;
  for (const auto& [name, share] : {std::pair("q", plan.tiling.q), std::pair("k", plan.tiling.k)})
    d[name] = py::make_tuple(share.parts, share.tokens, share.teams);
  return d;
}

// The call has the gradients as its inputs, and as its results the q and k that were rotated.
using Tokens = std::tuple<rope_int, rope_int, rope_int, bool>;  // rows, copies, entries, listed
template <typename... Call>
py::dict plan_tables(const Tokens& tokens, Call... call) {
  TableBackwardArgs t{args(call...)};
  RotateArgs& a = t.rotate;
  RopeParams& p = a.params;
  t.q_in = a.q_out, t.k_in = a.k_out;
  a.q_out = const_cast<void*>(a.q_in), a.k_out = const_cast<void*>(a.k_in);
  for (const auto& [o, strides] : {std::pair(&p.q, t.q), std::pair(&p.k, t.k)}) {
    std::copy(o->out, o->out + 4, strides);
    std::copy(o->in, o->in + 4, o->out);
  }
  std::tie(t.tokens.rows, t.tokens.copies, t.tokens.entries, t.tokens.listed) = tokens;
  const cuda::TablePlan plan = cuda::plan_table_backward(t);
  py::dict d = of(plan, plan.tiling.tiling);
  d["blocks_per_row"] = plan.tiling.blocks_per_row;
  return d;
}

template <typename... Call>
void bind(py::module_& m, RotateArgs (*)(Call...)) {
  m.def("plan", &plan<Call...>);
  m.def("plan_backward", &plan_backward<Call...>);
  m.def("plan_tables", &plan_tables<Call...>);
}

}  // namespace

PYBIND11_MODULE(rope_plan, m) { bind(m, &args); }
