"""Builds and loads torch_rope._C with the CUDA back end on the grid emulator, for CPU tensors. g++ compiles the kernels.

What all back ends share comes from the build of the extension, as setup.py makes it.

A build with AddressSanitizer needs an environment of its own:
env $(python tests/backends/cuda/emulator/emulator.py --environment) python ...
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

COMMON = "-std=c++20 -fPIC -g1 -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wno-unknown-pragmas"
# -fno-tree-sra keeps the load of a vector as one load.
KERNEL = f"-fno-tree-sra -Werror -D__CUDACC__ -I{HERE}/device"
WATCHED = (
    "-O1 -finline-small-functions"
    " -fsanitize=thread,alignment,signed-integer-overflow,shift,integer-divide-by-zero,bounds,float-cast-overflow"
    " --param tsan-instrument-func-entry-exit=0"
)
OPTIMISED = {"": "-O1", "emulator.cpp": "-O2", "module.cpp": "-O0"}  # to optimise pybind11's templates takes long
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
# The kernels compile twice as fast without the checks that WATCHED has too, and without that of null pointers, an
# access to which AddressSanitizer reports too.
SANITIZED_KERNEL = (
    f"-O0 {SANITIZED} -fno-sanitize=null,alignment,signed-integer-overflow,shift,integer-divide-by-zero,bounds"
)


def _ninja(folder: Path, extension: Path) -> str:
    """Returns the text of build.ninja, which makes checked/_C.so and asan/_C.so. Both link objects of the extension."""

    def sources_of(pattern: str) -> list[str]:
        return sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob(pattern))

    kernels = [*sources_of("csrc/cuda/*.cu"), "benchmarks/peers.cu", f"{HERE}/selftest.cu"]
    shared = [s for room in ("", "autograd/") for s in sources_of(f"csrc/{room}*.cpp")]
    shared.remove("csrc/module.cpp")
    torch_paths = " ".join(f"-isystem {p}" for p in [*cpp_extension.include_paths(), pybind11.get_include()])
    python = f"-isystem {sysconfig.get_path('include')}"
    libraries = " ".join(f"-L{p} -Wl,-rpath,{p}" for p in cpp_extension.library_paths())
    compile_ = f"g++ $in -c -o $out -MMD -MF $out.d {COMMON} $flags -I{HERE}/cuda"
    lines = [
        f"builddir = {extension}",  # it has ninja's record of when and how the objects were made
        f"subninja {extension}/build.ninja",
        "rule kernel",
        f"  command = {compile_.replace('g++', 'g++ -x c++')} {KERNEL}",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule host",
        f"  command = {compile_} -DROPE_CUDA_KEY=CPU {torch_paths} {python}",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        f"  command = g++ -shared $in -o $out $flags {libraries} -lc10 -ltorch_cpu -ltorch -ltorch_python",
    ]

    def objects(kind: str, rule: str, sources: list[str], flags: dict[str, str]) -> list[str]:
        made = []
        for source in sources:
            made.append(f"{folder}/{kind}/{source.replace('/', '_')}.o")
            lines.extend([f"build {made[-1]}: {rule} {source}", f"  flags = {flags.get(Path(source).name, flags[''])}"])
        return made

    common = [f"{extension}/{Path(source).with_suffix('.o')}" for source in shared]
    own = [f"{HERE}/emulator.cpp", f"{HERE}/module.cpp", "csrc/cuda/cuda.cpp"]
    for kind, kernel_flags, flags in ("checked", WATCHED, OPTIMISED), ("asan", SANITIZED_KERNEL, {"": SANITIZED}):
        # The kernels come before emulator.cpp, which takes every thread_local that is linked before its own for shared memory.
        made = objects(kind, "kernel", kernels, {"": kernel_flags}) + objects(kind, "host", own, flags)
        lines.append(f"build {folder}/{kind}/_C.so: link {' '.join(made + common)}")
        lines.append(f"  flags = {SANITIZED if kind == 'asan' else ''}")
    return "\n".join(lines) + "\n"


def build(sanitize: bool = False) -> Path:
    """Builds the module if its sources have changed, and returns its path."""
    tag = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
    folder, extension = ROOT / f"build/emulator-{tag}", ROOT / f"build/{sysconfig.get_platform()}-{tag}"
    library = folder / ("asan" if sanitize else "checked") / "_C.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (extension / "build.ninja").exists():
            subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT, check=True)
        (folder / "build.ninja").write_text(_ninja(folder, extension))
        jobs = os.environ.get("MAX_JOBS", "2")
        made = subprocess.run(
            [sys.executable, "-m", "ninja", "--quiet", "-f", folder / "build.ninja", "-j", jobs, library],
            cwd=ROOT,
            env={
                name: value for name, value in os.environ.items() if name != "LD_PRELOAD"
            },  # the compiler must not load the sanitizer
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if made.returncode:
            raise RuntimeError(made.stdout)
    return library


def load(path: Path):
    """Loads the module as torch_rope._C. Call it before torch_rope is imported."""
    loader = importlib.machinery.ExtensionFileLoader("torch_rope._C", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("torch_rope._C", loader))
    loader.exec_module(module)
    sys.modules["torch_rope._C"] = module
    module.install_allocator()
    import torch_rope

    torch_rope._C = module  # Python makes only those modules attributes that it loads itself
    return module


def environment() -> dict[str, str]:
    """Returns the environment variables of a Python process that can load a build with sanitize=True."""

    def library(name: str) -> str:
        return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()

    return {
        "LD_PRELOAD": ":".join(map(library, ["libasan.so", "libubsan.so", "libstdc++.so"])),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


if __name__ == "__main__" and sys.argv[1:] == ["--environment"]:
    print(*(f"{name}={value}" for name, value in environment().items()))
