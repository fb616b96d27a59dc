// The extension module torch_rope._C. Loading it registers the operators; its attributes tell what was built.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>

#include "cpu/kernels.h"
#ifdef ROPE_WITH_MPS
#include "mps/pipelines.h"
#include "mps/source.h"
#endif

PYBIND11_MODULE(_C, m) {
  m.doc() = "Describes this build of torch_rope. The operators are in torch.ops.rope.";
#if defined(ROPE_WITH_CUDA)
  m.attr("devices") = pybind11::make_tuple("cpu", "cuda");
#elif defined(ROPE_WITH_MPS)
  m.attr("devices") = pybind11::make_tuple("cpu", "mps");
  const bool compiled = std::all_of(rope::mps::kShaders, rope::mps::kShaders + rope::mps::kShaderCount,
                                    [](const rope::mps::Shader& shader) { return shader.library_size != 0; });
  m.attr("metal_library") = compiled ? "compiled with the extension" : "compiled at the first call";
  m.def(
      "metal_pipelines",
      [] {
        pybind11::list all;
        for (const auto& p : rope::mps::pipelines())
          all.append(pybind11::make_tuple(p.kernel, p.milliseconds, p.calls));
        return all;
      },
      "Returns (kernel, milliseconds, calls) of each Metal pipeline that this process has made, and of each library of "
      "kernels, whose name begins with `library`: the time that it took to make, and how often it was launched.");
#else
  m.attr("devices") = pybind11::make_tuple("cpu");
#endif
  m.def(
      "cpu_instruction_set", [] { return std::string(rope::cpu::kernels().name); },
      "Returns the name of the CPU kernels in use: plain, avx2 or avx512.");
}
