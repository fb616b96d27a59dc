// The extension module torch_rope._C. Loading it registers the operators; its attributes tell what was built.
#include <pybind11/pybind11.h>

#include <string>

#include "cpu/kernels.h"
#ifdef ROPE_WITH_MPS
#include "mps/pipelines.h"
#endif

PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
  m.doc() = "Describes this build of torch_rope. The operators are in torch.ops.rope.";
#if defined(ROPE_WITH_CUDA)
  m.attr("devices") = pybind11::make_tuple("cpu", "cuda");
#elif defined(ROPE_WITH_MPS)
  m.attr("devices") = pybind11::make_tuple("cpu", "mps");
  m.def(
      "metal_pipelines",
      [] {
        pybind11::list all;
        for (const auto& p : rope::mps::pipelines())
          all.append(pybind11::make_tuple(p.kernel, p.milliseconds, p.calls));
        return all;
      },
      "Returns (kernel, milliseconds, calls) of each Metal pipeline that this process has made, and of each library, "
      "which holds one kernel and is named `library` and the kernel: how long it took to make, how often it was "
      "launched.");
#else
  m.attr("devices") = pybind11::make_tuple("cpu");
#endif
  m.def(
      "cpu_instruction_set", [] { return std::string(rope::cpu::kernels().name); },
      "Returns the name of the CPU kernels in use: plain, avx2 or avx512.");
}
