"""Builds and loads torch_rope._C with the CUDA back end on the grid emulator, for CPU tensors. g++ compiles the kernels.

What all back ends share comes from the build of the extension, as setup.py makes it.

    python tests/backends/cuda/emulator/emulator.py            # builds the module
    python tests/backends/cuda/emulator/emulator.py --kernels  # compiles the kernels alone, which need no torch
    env $(python tests/backends/cuda/emulator/emulator.py --environment) python ...

The last line gives a program the environment that a module with AddressSanitizer needs.
"""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
HERE = "tests/backends/cuda/emulator"
# The kernels come before the emulator, which takes every thread_local that is linked before its own for shared memory.
EMULATOR = [f"{HERE}/{name}.cpp" for name in ("launch", "threads", "memory", "accesses")]
JOBS = int(os.environ.get("MAX_JOBS", "2"))

COMPILE = (
    "g++ -c -std=c++20 -fPIC -g1 -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wno-unknown-pragmas"
    f" -I{HERE}/cuda"
)
# -fno-tree-sra keeps the load of a vector as one load.
KERNEL = f"-x c++ -Og -fno-tree-sra -Werror -D__CUDACC__ -I{HERE}/device"
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
KINDS = {
    # the flags for the kernels, for host code that must be fast, and for the rest of the host code
    "checked": (
        "-fsanitize=thread,signed-integer-overflow --param tsan-instrument-func-entry-exit=0",
        "-O2",
        "-O0",  # to optimise the templates of torch and pybind11 takes long
    ),
    # AddressSanitizer reports accesses to null pointers too.
    "asan": (f"{SANITIZED} -fno-sanitize=null", SANITIZED, SANITIZED),
}


def _run(command: list[str]) -> None:
    """Runs a compiler, which must not load the sanitizer."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stdout)


@contextlib.contextmanager
def folder_of(name: str):
    """Yields a folder in build/ that no other process uses."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def ninja(folder: Path, rules: str, name: str) -> Path:
    """Makes a file in a folder by the rules of a build.ninja, and returns its path."""
    (folder / "build.ninja").write_text(rules)
    _run([sys.executable, "-m", "ninja", "--quiet", "-f", folder / "build.ninja", "-j", str(JOBS), folder / name])
    return folder / name


def kernels(kind: str = "checked") -> list[Path]:
    """Compiles the kernels whose sources have changed, and returns the object files of all."""
    sources = [*ROOT.glob("csrc/cuda/*.cu"), ROOT / "benchmarks/peers.cu", ROOT / HERE / "selftest.cu"]
    headers = [p for p in ROOT.glob("csrc/**/*") if p.suffix in (".h", ".cuh")]
    headers = sorted([*headers, *(p for p in (ROOT / HERE).rglob("*") if p.suffix in (".h", ""))])
    known = hashlib.sha256(b"".join(p.read_bytes() for p in headers if p.is_file()))

    def compiled(source: Path) -> Path:
        command = f"{COMPILE} {KERNEL} {KINDS[kind][0]} {source.relative_to(ROOT)} -o"
        key = known.copy()
        key.update(command.encode() + source.read_bytes())
        path = folder / f"{kind}-{source.stem}-{key.hexdigest()[:16]}.o"
        if not path.exists():
            for old in folder.glob(f"{kind}-{source.stem}-*"):
                old.unlink()
            _run([*command.split(), path.with_suffix(".new")])
            path.with_suffix(".new").replace(path)
        return path

    # The longest comes first, so that no processor is idle at the end.
    with folder_of("emulator-kernels") as folder, ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(compiled, sorted(sources, key=lambda p: -p.stat().st_size)))


def _ninja(folder: Path, kind: str, extension: Path) -> str:
    """Returns the text of build.ninja, which makes _C.so from kernels, host code and objects of the extension."""
    import pybind11
    from torch.utils import cpp_extension

    includes = [*cpp_extension.include_paths(), pybind11.get_include(), sysconfig.get_path("include")]
    libraries = " ".join(f"-L{p} -Wl,-rpath,{p}" for p in cpp_extension.library_paths())
    shared = sorted(p.relative_to(ROOT) for p in ROOT.glob("csrc/*.cpp"))
    common = [extension / path.with_suffix(".o") for path in shared if path.name != "module.cpp"]
    lines = [
        f"builddir = {extension}",  # it has ninja's record of when and how the objects were made
        f"subninja {extension}/build.ninja",
        "rule host",
        f"  command = {COMPILE} $flags -DROPE_CUDA_KEY=CPU {' '.join(f'-isystem {p}' for p in includes)}"
        " $in -o $out -MMD -MF $out.d",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        f"  command = g++ -shared $in -o $out $flags {libraries} -lc10 -ltorch_cpu -ltorch -ltorch_python",
    ]
    own = []
    fast = EMULATOR[: 3 if kind == "asan" else 4] + [f"{HERE}/division.cpp"]  # AddressSanitizer checks the accesses
    for source in *fast, f"{HERE}/module.cpp", f"{HERE}/plan.cpp", "csrc/cuda/cuda.cpp":
        own.append(folder / Path(source).with_suffix(".o").name)
        lines += [f"build {own[-1]}: host {source}", f"  flags = {KINDS[kind][1 if source in fast else 2]}"]
    lines.append(f"build {folder}/_C.so: link {' '.join(map(str, [*kernels(kind), *own, *common]))}")
    lines.append(f"  flags = {SANITIZED if kind == 'asan' else ''}")
    return "\n".join(lines) + "\n"


def build(sanitize: bool = False) -> Path:
    """Builds the module if its sources have changed, and returns its path."""
    import torch

    kind = "asan" if sanitize else "checked"
    tag = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
    extension = f"{sysconfig.get_platform()}-{tag}"
    with folder_of(extension) as extension, folder_of(f"emulator-{kind}-{tag}") as folder:
        if not (extension / "build.ninja").exists():
            subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT, check=True)
        return ninja(folder, _ninja(folder, kind, extension), "_C.so")


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


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            build()
        case ["--kernels"]:
            kernels()
        case ["--environment"]:
            print(*(f"{name}={value}" for name, value in environment().items()))
        case _:
            sys.exit(__doc__)
