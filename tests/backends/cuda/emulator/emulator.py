"""Builds the CUDA back end with the grid emulator: torch_rope._C for CPU tensors, compiled by g++.

What is built with AddressSanitizer loads in:  env $(python tests/backends/cuda/emulator/emulator.py --environment) python ...
"""

import fcntl
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[4]
HERE = "tests/backends/cuda/emulator"
SELF_TEST = f"{HERE}/selftest.cu"

COMMON = "-std=c++20 -fPIC -g1 -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wno-unknown-pragmas"
# -fno-tree-sra: a vector that is loaded at once stays one load.
KERNEL = f"-fno-tree-sra -Werror -D__CUDACC__ -I{HERE}/device"
WATCHED = (
    "-O1 -finline-small-functions"
    " -fsanitize=thread,alignment,signed-integer-overflow,shift,integer-divide-by-zero,bounds,float-cast-overflow"
    " --param tsan-instrument-func-entry-exit=0"
)
OPTIMISED = {"emulator.cpp": "-O2", "module.cpp": "-O0"}  # pybind11 takes long to optimise
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"


def _ninja(folder: Path, kernels: list[str], hosts: list[str], sanitize: bool) -> str:
    torch_paths = " ".join(f"-isystem {p}" for p in [*cpp_extension.include_paths(), pybind11.get_include()])
    python = f"-isystem {sysconfig.get_path('include')}"
    libraries = " ".join(f"-L{p} -Wl,-rpath,{p}" for p in cpp_extension.library_paths())
    host = SANITIZED if sanitize else ""
    lines = [
        f"builddir = {folder}",
        "rule kernel",
        f"  command = g++ -x c++ $in -c -o $out -MMD -MF $out.d {COMMON} {KERNEL} {f'-O0 {SANITIZED}' if sanitize else WATCHED} -I{HERE}/cuda",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule host",
        f"  command = g++ $in -c -o $out -MMD -MF $out.d {COMMON} $define {host} -I{HERE}/cuda {torch_paths} {python}",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        f"  command = g++ -shared $in -o $out {host} {libraries} -lc10 -ltorch_cpu -ltorch -ltorch_python",
    ]
    define = "-DEMULATOR_SELF_TEST" if kernels == [SELF_TEST] else "-DROPE_CUDA_KEY=CPU"
    # In this order, as emulator.cpp asks for: what is thread_local before it is shared memory.
    sources = [*kernels, f"{HERE}/emulator.cpp", f"{HERE}/module.cpp", *hosts]
    objects = {source: folder / (source.replace("/", "_") + ".o") for source in sources}
    for source, made in objects.items():
        lines.append(f"build {made}: {'kernel' if source in kernels else 'host'} {source}")
        lines.append(f"  define = {OPTIMISED.get(Path(source).name, '-O0' if sanitize else '-O1')} {define}")
    lines.append(f"build {folder}/_C.so: link {' '.join(map(str, objects.values()))}")
    return "\n".join(lines) + "\n"


def _build(name: str, kernels: list[str], hosts: list[str], sanitize: bool) -> Path:
    configuration = f"{name}-{'asan' if sanitize else 'checked'}"
    folder = Path("build", f"{configuration}-{sys.implementation.cache_tag}-torch-{torch.__version__}")
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    with open(ROOT / folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (ROOT / folder / "build.ninja").write_text(_ninja(folder, kernels, hosts, sanitize))
        jobs = os.environ.get("MAX_JOBS", "2")
        made = subprocess.run(
            [sys.executable, "-m", "ninja", "--quiet", "-f", folder / "build.ninja", "-j", jobs],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},  # not for the compiler
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if made.returncode:
            raise RuntimeError(made.stdout)
    return ROOT / folder / "_C.so"


def build(sanitize: bool = False) -> Path:
    def sources(pattern: str) -> list[str]:
        return sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern))

    hosts = [s for folder in ("", "autograd/", "cuda/") for s in sources(f"csrc/{folder}*.cpp")]
    hosts.remove("csrc/module.cpp")
    return _build("emulator", sources("csrc/cuda/*.cu"), hosts, sanitize)


def build_self_test(sanitize: bool = False) -> Path:
    return _build("emulator-self-test", [SELF_TEST], [], sanitize)


def load(path: Path, name: str = "torch_rope._C"):
    """As this module. For torch_rope._C: before torch_rope is imported."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    sys.modules[name] = module
    if name == "torch_rope._C":
        module.install_allocator()
    return module


def environment() -> dict[str, str]:
    """Of a Python that loads what was built with sanitize."""

    def library(name: str) -> str:
        return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()

    return {
        "LD_PRELOAD": ":".join(map(library, ["libasan.so", "libubsan.so", "libstdc++.so"])),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


if __name__ == "__main__" and sys.argv[1:] == ["--environment"]:
    print(*(f"{name}={value}" for name, value in environment().items()))
