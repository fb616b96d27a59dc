"""Builds the library that gives torch a simulated device "mps" on Linux. It holds csrc/mps and the shaders unchanged.

    python tests/backends/metal/simulator/simulator_build.py --missing

prints which packages the build lacks, and fails; it prints nothing if the library can be built.
"""

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import metal

ROOT = Path(__file__).resolve().parents[4]
HERE = "tests/backends/metal/simulator"

COMMON = "-std=c++20 -fPIC -g1 -Wall -ffp-contract=off -I."
OBJECTIVE = (
    "-x objective-c++ -fobjc-runtime=gcc -fconstant-string-class=NSConstantString -fblocks -fexceptions"
    f" -isystem {HERE}/frameworks -isystem {HERE}/frameworks_linux"
)

LIBRARIES = ["libtorch_rope_simulator.so", "libtorch_rope_simulator_compiled.so"]


def _objc() -> Path | None:
    """Returns the folder of GCC that has libobjc and its headers, or None."""
    there = [
        p.parent for p in Path("/usr/lib/gcc").glob("*/*/libobjc.so") if (p.parent / "include/objc/objc.h").exists()
    ]
    return max(there, key=lambda p: int(p.name.split(".")[0]), default=None)


def problem() -> str:
    """Returns why the simulator cannot be built, or an empty string if it can be."""
    blocks = Path("/usr/include/Block.h").exists()
    packages = {  # names of Debian packages
        "clang-19": metal.compiler(),
        "gobjc": _objc(),
        "libblocksruntime-dev": blocks and any(Path("/usr/lib").rglob("libBlocksRuntime.so")),
    }
    if missing := [package for package, there in packages.items() if not there]:
        return f"packages are missing for the simulated mps device: apt-get install {' '.join(missing)}"
    if importlib.util.find_spec("torch"):
        import torch

        if torch.version.cuda:  # autograd asks for the one accelerator that torch was built for
            return "torch is a build with CUDA but must be one without CUDA for the simulated mps device"
    return ""


def _ninja(folder: Path) -> str:
    from torch.utils import cpp_extension

    torch_paths = " ".join(f"-isystem {p}" for p in cpp_extension.include_paths())
    libraries = " ".join(f"-L{p} -Wl,-rpath,{p}" for p in cpp_extension.library_paths())
    compiler, objc = metal.compiler(), _objc()
    build = f"{compiler} $in -c -o $out -MMD -MF $out.d {COMMON} $flags"
    lines = [
        f"builddir = {folder}",
        "rule cpp",
        f"  command = {build} {torch_paths}",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule mm",
        f"  command = {compiler} -c -o $out -MMD -MF $out.d {COMMON} $flags {OBJECTIVE} -isystem {objc}/include {torch_paths} $in",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule embed",
        f"  command = PATH={ROOT / HERE}/bin:$$PATH TORCH_ROPE_METALLIB=$metallib {sys.executable} shaders/embed.py $out",
        "  restat = true",
        "rule link",
        f"  command = {compiler} -shared $in -o $out -Wl,-soname,libtorch_rope_simulator.so {libraries} -lc10 -ltorch_cpu -ltorch"
        f" -L{objc} -lobjc -lBlocksRuntime -ldl",
    ]
    shaders = " ".join(
        str(p.relative_to(ROOT))
        for f in ("shaders/*", "csrc/*.h", "csrc/mps/*.h")
        for p in sorted(ROOT.glob(f))
        if p.is_file()
    )
    # emulator.cpp comes first, because the emulator takes the thread_local variables that are linked before it for shared
    # memory. Shader libraries see its symbols, so it is built without -fvisibility=hidden.
    sources = [
        "tests/backends/cuda/emulator/emulator.cpp",
        *(f"{HERE}/{name}" for name in ("dispatch.cpp", "device.cpp", "runtime.mm", "selftest.mm")),
        *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("csrc/mps/*.mm")),
        *(f"csrc/{name}.cpp" for name in ("call", "checks", "overlap")),
    ]
    embedded = [f"{folder}/source.cpp", f"{folder}/compiled.cpp"]
    for metallib, source in enumerate(embedded):
        lines += [f"build {source}: embed | {shaders}", f"  metallib = {metallib}"]
    made = {}
    for source in [*sources, *embedded]:
        made[source] = folder / (Path(source).name + ".o")
        lines.append(f"build {made[source]}: {'mm' if source.endswith('.mm') else 'cpp'} {source}")
        flags = "-O2" if source.endswith(("emulator.cpp", "dispatch.cpp")) else "-O1 -fvisibility=hidden"
        if source.endswith("dispatch.cpp"):
            flags += f""" '-DSIMULATOR_COMPILER="{sys.executable} {ROOT / HERE / "metal.py"}"'"""
        lines.append(f"  flags = {flags}")
    objects = " ".join(str(made[source]) for source in sources)
    for library, source in zip(LIBRARIES, embedded, strict=True):
        lines.append(f"build {folder}/{library}: link {objects} {made[source]}")
    lines.append(f"default {folder}/{LIBRARIES[0]}")
    return "\n".join(lines) + "\n"


def build(compiled: bool = False) -> Path:
    """Builds the library and returns its path.

    compiled: True if the library must also hold the shaders compiled ahead, and not only their source.
    """
    import torch

    if reason := problem():
        raise RuntimeError(reason)
    folder = Path("build", f"simulator-{sys.implementation.cache_tag}-torch-{torch.__version__}")
    library = LIBRARIES[compiled]
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    with open(ROOT / folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (ROOT / folder / "build.ninja").write_text(_ninja(folder))
        jobs = os.environ.get("MAX_JOBS", "2")
        made = subprocess.run(
            [sys.executable, "-m", "ninja", "--quiet", "-f", folder / "build.ninja", "-j", jobs, folder / library],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if made.returncode:
            raise RuntimeError(made.stdout)
    return ROOT / folder / library


if __name__ == "__main__":
    if sys.argv[1:] == ["--missing"]:
        reason = problem()
        print(reason, end="\n" if reason else "")
        sys.exit(bool(reason))
    print(build())
