"""Builds torch_rope._C against the installed torch. Metadata is in pyproject.toml.

CUDA is built where torch has it and nvcc is found; TORCH_ROPE_CUDA=0 leaves it out, =1 makes its absence an error.
TORCH_CUDA_ARCH_LIST chooses the GPUs. Metal is built on macOS; shaders/embed.py says how.
"""

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

import pybind11
import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "shaders"))
import embed  # noqa: E402

if sys.platform == "win32" or torch.version.hip:
    sys.exit("torch_rope supports Linux and macOS; Windows and ROCm builds of torch are not supported.")
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    sys.exit("Python.h is missing: install Python's headers (python3-dev on Debian and Ubuntu).")

FLAGS = [
    "-O3",
    "-g0",
    "-Wall",
    "-Wno-psabi",  # vectors passed between inlined functions
    "-ffp-contract=off",  # the kernels say where they contract
    "-fno-math-errno",
    "-fvisibility=hidden",
]
if sys.platform == "linux":
    FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC 12 on its own AVX-512 intrinsics
    # at::parallel_for is serial without it. Compiled but not linked: the symbols come from the OpenMP runtime that
    # torch has loaded, so that there is one pool of threads in the process.
    FLAGS.append("-fopenmp")

# Contraction is off here too: angle.h must give the bits that it gives on the CPU.
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false"]
ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"  # A100, H100, B200, RTX 50 and later
ARCHITECTURES_BEFORE_CUDA_12_8 = "8.0;9.0+PTX"


def without_cuda() -> str | None:
    """Why CUDA is not built; None where it is."""
    if os.environ.get("TORCH_ROPE_CUDA") == "0":
        return "TORCH_ROPE_CUDA is 0"
    if not torch.version.cuda:
        return f"torch {torch.__version__} has no CUDA"
    if not (CUDA_HOME and shutil.which("nvcc", path=f"{CUDA_HOME}/bin")):
        return "nvcc was not found (CUDA_HOME tells where CUDA is)"
    if not Path(CUDA_HOME, "include/cuda_runtime.h").exists():
        return f"CUDA_HOME is {CUDA_HOME}, and has no include/cuda_runtime.h"
    return None


reason = without_cuda()
if reason and os.environ.get("TORCH_ROPE_CUDA") == "1":
    sys.exit(f"torch_rope: TORCH_ROPE_CUDA is 1, but {reason}")
if reason:
    print(f"torch_rope: built without CUDA: {reason}", file=sys.stderr)
else:
    old = tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 8)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES_BEFORE_CUDA_12_8 if old else ARCHITECTURES)


class Build(BuildExtension):
    def finalize_options(self):
        super().finalize_options()
        # pip gives an editable build a new folder each time; in this one ninja finds what it has compiled.
        self.build_temp = f"build/{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch-{torch.__version__}"

    def run(self):
        super().run()
        # Read by torch_rope/__init__.py before it loads the library.
        package = Path("torch_rope" if self.inplace else f"{self.build_lib}/torch_rope")
        (package / "built_for_torch.txt").write_text(torch.__version__ + "\n")


folders, sources, defines, link = ["csrc", "csrc/autograd", "csrc/cpu"], [], [], []
if sys.platform == "linux":
    link = ["-Wl,-s"]
if not reason:
    folders.append("csrc/cuda")
    defines = [("ROPE_WITH_CUDA", None)]
if sys.platform == "darwin":
    # Python may be built for two architectures, torch is for one.
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
    folders.append("csrc/mps")
    defines = [("ROPE_WITH_MPS", None)]
    link = ["-framework", "Foundation", "-framework", "Metal"]
    embed.write(ROOT / "build/shaders.cpp")
    sources = ["build/shaders.cpp"]
for folder in folders:
    sources += sorted(str(p) for p in Path(folder).iterdir() if p.suffix in (".cpp", ".cu", ".mm"))

setup(
    ext_modules=[
        (CppExtension if reason else CUDAExtension)(
            "torch_rope._C",
            sources=sources,
            include_dirs=[str(ROOT), pybind11.get_include()],
            define_macros=defines,
            extra_compile_args={"cxx": FLAGS, "nvcc": NVCC_FLAGS},
            extra_link_args=link,
        )
    ],
    cmdclass={"build_ext": Build},
)
