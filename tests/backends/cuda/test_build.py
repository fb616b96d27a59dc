"""Tests that the CUDA back end compiles without a warning, with or without a CUDA build of torch."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cases import EXHAUSTIVE, ROOT
from torch.utils import cpp_extension

# The oldest architecture is enough for a quick run: no kernel asks for which one it is compiled, so an instruction that only newer ones
# have is an error there.
ARCHITECTURES = (80, 90, 100, 120) if EXHAUSTIVE else (80,)
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


def compile_without_warnings(*command, out=()):
    """Runs a compiler and fails on a warning. A command that has succeeded is skipped until it or a file of csrc changes."""
    known = hashlib.sha256(repr(command).encode())
    sources = [p for p in ROOT.glob("csrc/**/*") if p.suffix in (".h", ".cuh") or p.parent.name == "cuda"]
    for path in sorted([*sources, *ROOT.glob("benchmarks/*.cu")]):
        known.update(path.read_bytes())
    done = ROOT / "build/nvcc" / known.hexdigest()
    if done.exists():
        return
    result = subprocess.run(
        [*command, *out], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    assert result.returncode == 0 and "warning" not in result.stdout, result.stdout
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_kernels_compile_without_warnings(source, tmp_path):
    # The quick run leaves out most of the optimisation, if nvcc has an option for that: few warnings depend on it, and
    # test_kernels.py compiles the most important kernels with all of it.
    quick = not EXHAUSTIVE and "--Ofast-compile" in subprocess.getoutput(f"{cuda_home()}/bin/nvcc --help")
    # The kernels of the benchmarks ask for the architecture, and their two files compile in seconds.
    architectures = ARCHITECTURES if source.parent.name == "cuda" else {*ARCHITECTURES, 90}
    compile_without_warnings(
        f"{cuda_home()}/bin/nvcc",
        *("-c", source, "-std=c++20", "-Ofc=max" if quick else "-O3", "--fmad=false"),
        *("--Werror=all-warnings", "-Xcompiler=-Wall", "--threads=2"),
        *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures),
        out=("-o", tmp_path / "kernels.o"),
    )


@needs_nvcc
def test_host_code_compiles_without_warnings():
    """Needs no CUDA build of torch: the CPU build has the headers too, only without a configuration of CUDA."""
    includes = [f"-isystem{p}" for p in (*cpp_extension.include_paths(), cuda_home() / "include")]
    define = "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"
    compile_without_warnings(
        "g++", "-fsyntax-only", "-std=c++20", "-Wall", "-Werror", define, *includes, "csrc/cuda/cuda.cpp"
    )
