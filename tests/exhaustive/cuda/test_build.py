"""Tests that the CUDA back end compiles without a warning, with or without a CUDA build of torch, and that its kernels are few
and need few registers."""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cases import ROOT
from torch.utils import cpp_extension

ARCHITECTURES = (80, 90, 100, 120)
KERNELS = {"rotate": 46, "norm": 42, "norm_backward": 43, "tables": 12, "cos_sin": 16}  # how many each file has
# The most registers of a thread, in the kernels that models usually need: bfloat16, half-split pairs, 32-bit offsets.
USUAL = "Shape<__nv_bfloat16, 8, false>"
REGISTERS = {
    ("rotate", f"rotate_kernel<Policy<{USUAL}, int, Plain> >"): 72,
    ("rotate", f"rotate_kernel<Policy<{USUAL}, int, Cache> >"): 76,
    ("norm", f"rotate_kernel<Policy<{USUAL}, int, CacheNorm> >"): 96,
    ("norm_backward", f"norm_backward_kernel<Policy<{USUAL}, int, Plain> >"): 168,
    ("tables", f"table_backward_kernel<{USUAL} >"): 122,
}
SOURCES = sorted([*ROOT.glob("csrc/cuda/*.cu"), *ROOT.glob("benchmarks/*.cu")])


def cuda_home() -> Path | None:
    """Returns a folder with nvcc and CUDA's headers, if there is one: make exhaustive installs them as packages."""
    nvcc = shutil.which("nvcc")
    folders = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    with contextlib.suppress(ImportError):
        folders += importlib.import_module("nvidia.cu13").__path__
    homes = [Path(folder) for folder in folders if folder]
    return next((p for p in homes if (p / "bin/nvcc").exists() and (p / "include/nv").exists()), None)


pytestmark = pytest.mark.cpu
needs_nvcc = pytest.mark.skipif(cuda_home() is None, reason="nvcc was not found")


def compile_without_warnings(*command):
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout
    return done.stdout


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_kernels_compile_without_warnings_to_few_registers(source, tmp_path):
    """Only the backward of a norm may keep registers in memory, and its usual kernel keeps none."""
    log = compile_without_warnings(
        f"{cuda_home()}/bin/nvcc",
        *("-c", source, "-std=c++20", "-O3", "--fmad=false"),
        *("--Werror=all-warnings", "-Xcompiler=-Wall", "--threads=2", "--resource-usage"),
        *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES),
        *("-o", tmp_path / "kernels.o"),
    )
    log = subprocess.run("c++filt", input=log, capture_output=True, check=True, encoding="utf-8").stdout
    entry = r"entry function '.*?(\w+<.*>|\w+)\(.*' for 'sm_90'\n.*\n.*?(\d+) bytes spill stores.*\n.* (\d+) registers"
    figures = re.findall(entry, log)
    assert len(figures) == KERNELS.get(source.stem, len(figures))
    named = [((source.stem, kernel.replace("rope::cuda::", "")), spilled, int(n)) for kernel, spilled, n in figures]
    assert {key for key, *_ in named} >= {key for key in REGISTERS if key[0] == source.stem}
    for key, spilled, registers in named:
        assert registers <= REGISTERS.get(key, 255), key
        assert spilled == "0" or source.stem == "norm_backward" and key not in REGISTERS, key


@needs_nvcc
def test_host_code_compiles_without_warnings():
    """Needs no CUDA build of torch: the CPU build has the headers too, only without a configuration of CUDA."""
    includes = [f"-isystem{p}" for p in (*cpp_extension.include_paths(), cuda_home() / "include")]
    define = "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"
    compile_without_warnings(
        "g++", "-fsyntax-only", "-std=c++20", "-Wall", "-Werror", define, *includes, "csrc/cuda/cuda.cpp"
    )
