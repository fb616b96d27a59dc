// The plans of csrc/cuda as functions of the Python module, for test_plan.py.
#include "../../../../csrc/cuda/norm_plan.h"

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
using Tensors = std::tuple<Given<4>, Given<4>>;                  // q, k or v: the tensor that is read, and its result

// Copies the strides of a tensor and returns its address, or null if it is not given.
template <size_t n>
void* set(const Given<n>& given, rope_int* strides) {
  if (!given) return nullptr;
  const auto& [address, values] = *given;
  std::copy(values.begin(), values.end(), strides);
  return reinterpret_cast<void*>(address);
}

// What a call has. Without kOverHeads, kNorm normalises each head.
enum Features {
  kNorm = 1,
  kOverHeads = 2,
  kNormV = 4,
  kQuantisedK = 8,
  kQuantisedV = 16,
  kFactor = 32,
  kWeightV = 64,
  kOffset = 128,
  kInverse = 256,
  kAttentionFactor = 512
};

Args args(int dtype, const Strides<6>& sizes, const Strides<3>& heads, const std::array<Tensors, 3>& qkv,
          const Strides<2>& cache, const Given<2>& positions, const Given<2>& slots, const Given<4>& cos,
          const Given<4>& sin, int source, rope_int table_rows, rope_int inv_freq, int features, int rounding,
          rope_int offset, rope_int scale_stride, const Strides<2>& weight_strides) {
  Args a{};
  a.x_dtype = DType(dtype);
  a.table_dtype = dtype == int(DType::kDouble) ? DType::kDouble : DType::kFloat;
  a.batch = sizes[0], a.seq = sizes[1], a.rotary_dim = sizes[3], a.rotary_start = sizes[4];
  for (int i = 0; i < kSides; i++) {
    Side& side = a.sides[i];
    side.heads = heads[i], side.head_dim = sizes[i == kV ? 5 : 2], side.scale_stride = scale_stride;
    std::copy(weight_strides.begin(), weight_strides.end(), side.weight_strides);
    side.in = set(std::get<0>(qkv[i]), side.in_strides), side.out = set(std::get<1>(qkv[i]), side.out_strides);
  }
  a.has_cache = cache[1] > 0, a.blocks = cache[0], a.block_size = cache[1];
  a.position_strides[1] = 1, a.has_positions = bool(positions), a.positions = set(positions, a.position_strides);
  a.has_slots = bool(slots), a.slots = set(slots, a.slot_strides);
  a.cos = set(cos, a.cos_strides), a.sin = set(sin, a.sin_strides);
  a.source = source, a.table_rows = table_rows, a.inv_freq_strides[1] = inv_freq, a.rounding = rounding;
  a.sides[kQ].norm = a.sides[kK].norm = features & kOverHeads ? kAllHeads : features & kNorm ? kEachHead : kNoNorm;
  a.sides[kV].norm = features & kNormV ? kEachHead : kNoNorm;
  a.sides[kK].format = features & kQuantisedK ? kInt8 : kUnquantised;
  a.sides[kV].format = features & kQuantisedV ? kInt8 : kUnquantised;
  static const float number = 1;
  if (features & kFactor) a.sides[kQ].factor = &number;
  if (features & kWeightV) a.sides[kV].weight = &number;
  a.weight_offset = features & kOffset ? 1 : -0.0;
  a.wide_positions = a.wide_slots = true;
  a.factor_hi = features & kAttentionFactor ? 1.5f : 1, a.inverse = bool(features & kInverse), a.offset = offset;
  return a;
}

py::dict of(const cuda::Plan& plan) {
  const cuda::Tiling& t = plan.tiling;
  py::dict d;
  d["vector"] = t.vector, d["vectors"] = t.vectors, d["chunks"] = t.chunks, d["rotated"] = t.rotated;
  d["block"] = py::make_tuple(plan.block.x, plan.block.y, plan.block.z);
  d["grid"] = py::make_tuple(plan.grid.x, plan.grid.y, plan.grid.z);
  d["usual"] = plan.general == nullptr, d["general"] = plan.general, d["by_block"] = plan.by_block;
  d["table_vectors"] = t.table_vectors, d["listed"] = t.starts[kSides];
  d["shares"] = py::make_tuple(t.shares[kQ], t.shares[kK], t.shares[kV]), d["steps"] = t.steps;
  for (int i = kQ; i <= kK; i++) {
    const cuda::Parts& parts = t.parts[i];
    d[i == kQ ? "q" : "k"] = py::make_tuple(parts.count, parts.tokens, parts.teams);
  }
  return d;
}

template <typename... Call>
py::dict plan(int processors, Call... call) {
  Args a = args(call...);
  simplify(a);
  const cuda::Plan plan = cuda::plan_rotate(a, processors);
  py::dict d = of(plan);
  d["seq"] = a.seq;
  py::list rules;
  for (const auto& [holds, words] : cuda::general_rules(a, plan)) rules.append(words);
  d["rules"] = rules;
  return d;
}

// x: the q and k that the forward call normalised.
template <typename... Call>
py::dict plan_backward(const std::array<Given<4>, 2>& x, Call... call) {
  Args a = args(call...);
  a.inverse = true;
  for (int i = kQ; i <= kK; i++) a.sides[i].before = set(x[i], a.sides[i].before_strides);
  merge_batch(a);
  const cuda::Plan plan = cuda::plan_norm_backward(a);
  return of(plan);
}

template <typename... Call>
void bind(py::module_& m, Args (*)(Call...)) {
  m.def("plan", &plan<Call...>);
  m.def("plan_backward", &plan_backward<Call...>);
}

}  // namespace

void bind_plans(py::module_& m) { bind(m, &args); }
