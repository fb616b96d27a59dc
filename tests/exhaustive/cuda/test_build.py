"""Tests that the CUDA back end compiles without a warning, with or without a CUDA build of torch, and that the committed figures
of the kernels are those of the compiler."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import ROOT
from torch.utils import cpp_extension

sys.path.insert(0, str(ROOT))
from benchmarks import kernels  # noqa: E402

ARCHITECTURES = (80, 90, 100, 120)
SOURCES = sorted([*ROOT.glob("csrc/cuda/*.cu"), *ROOT.glob("benchmarks/*.cu")])


def cuda_home() -> Path | None:
    """Returns a folder with nvcc and CUDA's headers, if there is one. The test requirements install both, also on a machine
    without CUDA."""
    nvcc = shutil.which("nvcc")
    folders = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    try:
        import nvidia.cu13

        folders += nvidia.cu13.__path__
    except ImportError:
        pass
    return next(
        (Path(p) for p in folders if p and Path(p, "bin/nvcc").exists() and Path(p, "include/nv").exists()), None
    )


pytestmark = pytest.mark.cpu
needs_nvcc = pytest.mark.skipif(cuda_home() is None, reason="nvcc was not found")


def compile_without_warnings(*command):
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_kernels_compile_without_warnings(source, tmp_path):
    compile_without_warnings(
        f"{cuda_home()}/bin/nvcc",
        *("-c", source, "-std=c++20", "-O3", "--fmad=false"),
        *("--Werror=all-warnings", "-Xcompiler=-Wall", "--threads=2"),
        *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES),
        *("-o", tmp_path / "kernels.o"),
    )


@needs_nvcc
def test_host_code_compiles_without_warnings():
    """Needs no CUDA build of torch: the CPU build has the headers too, only without a configuration of CUDA."""
    includes = [f"-isystem{p}" for p in (*cpp_extension.include_paths(), cuda_home() / "include")]
    define = "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"
    compile_without_warnings(
        "g++", "-fsyntax-only", "-std=c++20", "-Wall", "-Werror", define, *includes, "csrc/cuda/cuda.cpp"
    )


# ---- the figures of the kernels ----

COMMITTED = json.loads(kernels.RESULTS.read_text())
JUDGED = {row["name"]: row for row in COMMITTED["judged"] if row["arch"] == "sm_90"}
FIGURES = ("registers", "spills", "chain", "loop", "prmt", "at_once")
needs_judge = pytest.mark.skipif(
    not all(map(kernels.find, ("nvcc", "cuobjdump", "nvdisasm"))), reason="nvcc, cuobjdump or nvdisasm was not found"
)


@needs_judge
@pytest.mark.parametrize("source", ["rotate", "norm"])
def test_the_committed_figures_are_those_of_the_compiler(source, tmp_path):
    """Compiles the judged kernels for sm_90. If a kernel changed on purpose, `python -m benchmarks kernels` writes the new
    figures."""
    if kernels.releases()["nvcc"] != COMMITTED["nvcc"]:
        pytest.skip(f"the committed figures are those of nvcc {COMMITTED['nvcc']}")
    found = {row["name"]: row for row in kernels.judge(*kernels.read_kernels(*compiled(source, tmp_path)))}
    assert found
    for name, row in found.items():
        committed = JUDGED[name]
        assert {key: row.get(key) for key in FIGURES} == {key: committed.get(key) for key in FIGURES}


def compiled(source, folder):
    """Compiles the judged kernels of csrc/cuda/<source>.cu, and returns the log of the compiler and the fatbin."""
    # with_type() chooses the kernels that the sources compile. Here it chooses none, so that only the judged ones, whose
    # addresses are taken, are compiled.
    names = [row["kernel"] for row in JUDGED.values() if row["kernel"].startswith(source)]
    addresses = ", ".join(f"(const void*){name.replace('bfloat16', '__nv_bfloat16')}" for name in names)
    text = f"""
        #include "cuda/device.cuh"
        namespace rope::cuda {{
        template <typename F>
        cudaError_t with_no_type(DType, F&&) {{ return cudaSuccess; }}
        }}
        #define with_type with_no_type
        #include "cuda/{source}.cu"
        namespace rope::cuda {{
        extern const void* const judged[];
        const void* const judged[] = {{{addresses}}};
        }}
    """
    file, fatbin = folder / "judged.cu", folder / "judged.fatbin"
    file.write_text(text)
    return kernels.compile_kernels(file, ["90"], fatbin), fatbin
