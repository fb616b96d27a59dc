"""Builds torch_rope._C against the installed torch. Metadata is in pyproject.toml."""

import sys
import sysconfig
from pathlib import Path

import pybind11
import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

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


setup(
    ext_modules=[
        CppExtension(
            "torch_rope._C",
            sources=sorted(map(str, [*Path("csrc").glob("*.cpp"), *Path("csrc/cpu").glob("*.cpp")])),
            include_dirs=[pybind11.get_include()],
            extra_compile_args={"cxx": FLAGS},
            extra_link_args=["-Wl,-s"] if sys.platform == "linux" else [],
        )
    ],
    cmdclass={"build_ext": Build},
)
