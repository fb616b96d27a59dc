"""Builds torch_rope._C against the installed torch. Metadata is in pyproject.toml."""

import platform
import sys
from pathlib import Path

import pybind11
import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

if sys.platform == "win32" or torch.version.hip:
    sys.exit("torch_rope supports Linux and macOS, without ROCm; Windows and ROCm builds of torch are not supported.")

FLAGS = [
    "-O3",
    "-g0",
    "-Wall",
    "-Wno-psabi",  # vectors passed between inlined functions
    "-Wno-maybe-uninitialized",  # GCC 12 on its own AVX-512 intrinsics
    "-ffp-contract=off",  # the kernels say where they contract
    "-fno-math-errno",
    "-fvisibility=hidden",
]
if sys.platform == "linux":
    # at::parallel_for is serial without it. Compiled but not linked: the symbols come from the OpenMP runtime that
    # torch has loaded, so that there is one pool of threads in the process.
    FLAGS.append("-fopenmp")


class Build(BuildExtension):
    def run(self):
        super().run()
        # Read by torch_rope/__init__.py before it loads the library, which lies in one of the two (the first if editable).
        for package in (Path("torch_rope"), Path(self.build_lib, "torch_rope")):
            package.mkdir(parents=True, exist_ok=True)
            (package / "built_for_torch.txt").write_text(torch.__version__ + "\n")


setup(
    ext_modules=[
        CppExtension(
            "torch_rope._C",
            sources=sorted(str(p) for p in Path("csrc").glob("*.cpp")) + sorted(str(p) for p in Path("csrc/cpu").glob("*.cpp")),
            include_dirs=[pybind11.get_include()],
            extra_compile_args={"cxx": FLAGS},
            extra_link_args=["-Wl,-s"] if platform.system() == "Linux" else [],
        )
    ],
    cmdclass={"build_ext": Build},
)
