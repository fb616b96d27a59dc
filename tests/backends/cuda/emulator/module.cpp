// The module torch_rope._C with the CUDA back end on the emulator. It registers the CUDA operators for CPU tensors.
#include <c10/core/CPUAllocator.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "emulator.h"

namespace py = pybind11;

namespace {

// The allocator of all CPU memory of torch: memory that the emulator guards.
struct GuardedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = bytes ? emulator::allocate(bytes) : nullptr;
    return {data, data, &emulator::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &emulator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Returns how many loads or stores there were of each size in bytes.
py::dict counts(const emulator::Record& r, emulator::Accesses emulator::Record::Allocation::* kind) {
  py::dict counts;
  for (int i = 0; i < 6; i++) {
    uint64_t n = 0;
    for (const auto& allocation : r.allocations) n += (allocation.*kind).count[i];
    if (n) counts[i < 5 ? py::object(py::int_(1 << i)) : py::str("other")] = n;
  }
  return counts;
}

py::list last_launches() {
  py::list launches;
  for (const emulator::Record& r : emulator::last_launches()) {
    py::dict d;
    d["grid"] = py::make_tuple(r.grid.x, r.grid.y, r.grid.z);
    d["loads"] = counts(r, &emulator::Record::Allocation::loads);
    d["stores"] = counts(r, &emulator::Record::Allocation::stores);
    py::dict bytes;  // that were loaded from each allocation, by its address
    for (const auto& allocation : r.allocations) bytes[py::int_(uintptr_t(allocation.data))] = allocation.loads.bytes;
    d["bytes"] = bytes;
    launches.append(d);
  }
  return launches;
}

}  // namespace

// Launches a kernel of selftest.cu, see there.
std::string self_test(const std::string& kernel, unsigned blocks, unsigned threads, uintptr_t in, uintptr_t out, int n);
// Returns the divisions of division.cpp that are wrong, see there.
std::string wrong_divisions(int count, unsigned seed, const std::vector<float>& scales);
// Defines the functions of plan.cpp.
void bind_plans(py::module_&);

PYBIND11_MODULE(_C, m) {
  m.doc() = "The CUDA back end of torch_rope, emulated on the CPU.";
  m.attr("devices") = py::make_tuple("cuda emulated");
  m.def(
      "install_allocator",
      [] {
#ifndef __SANITIZE_ADDRESS__  // which guards all memory itself
        c10::SetCPUAllocator(new GuardedAllocator, 255);
#endif
      },
      "Makes torch allocate all CPU memory with guards, which the emulator checks.");
  m.def(
      "allow_foreign", [](bool allow) { emulator::options.foreign = allow; },
      "Sets whether kernels may touch memory that torch did not allocate.");
  m.def("check_guards", &emulator::check_guards, "Raises RuntimeError if memory next to a tensor was written.");
  m.def("last_launches", &last_launches, "Returns what at most 1000 launches since the last call did, as dicts.");
  m.def(
      "thread_order", [](int order) { emulator::options.order = emulator::Order(order); },
      "Sets the order of thread blocks, and of the threads in each: 0 forward, 1 backward, 2 scrambled.");
  m.def("wrong_divisions", &wrong_divisions, "Returns lines of divisions of csrc/cuda/quantise.cuh that are wrong.");
  bind_plans(m);
  m.def("run", &self_test, py::call_guard<py::gil_scoped_release>(), "Launches a kernel of selftest.cu.");
}
