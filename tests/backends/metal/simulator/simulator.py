"""Builds the library that gives torch a simulated device "mps" on Linux, and loads it. It holds csrc/mps and the shaders
unchanged.

    python tests/backends/metal/simulator/simulator.py            # builds the library
    python tests/backends/metal/simulator/simulator.py --missing  # prints which packages the build lacks, and fails
    python tests/backends/metal/simulator/simulator.py --kernels  # also compiles every kernel, as its first use would
    python tests/backends/metal/simulator/simulator.py -m MODULE [arguments]

The last line runs a module as python itself does, after load(). That function sets the environment variable
TORCH_ROPE_PYTHON to the command that does it, for programs that start further processes.
"""

import ast
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
from backends.cuda.emulator import emulator  # noqa: E402
from backends.metal.simulator import metal  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]
HERE = "tests/backends/metal/simulator"
COMMON = "-std=c++20 -fPIC -g1 -Wall -Wno-deprecated-declarations -ffp-contract=off -I."
OBJECTIVE = (
    "-x objective-c++ -fobjc-runtime=gcc -fblocks -fexceptions"
    f" -isystem {HERE}/frameworks -isystem {HERE}/frameworks_linux"
)
LIBRARY = "libtorch_rope_simulator.so"


def _objc() -> Path | None:
    """Returns the folder of GCC that has libobjc and its headers, or None."""
    there = [p.parent for p in Path("/usr/lib/gcc").glob("*/*/libobjc.so") if (p.parent / "include/objc").exists()]
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


def _ninja(folder: Path, extension: Path) -> str:
    """Returns the text of build.ninja. The library links those objects of the extension that all back ends share."""
    from torch.utils import cpp_extension

    torch_paths = " ".join(f"-isystem {p}" for p in cpp_extension.include_paths())
    libraries = " ".join(f"-L{p} -Wl,-rpath,{p}" for p in cpp_extension.library_paths())
    compiler, objc = metal.compiler(), _objc()
    lines = [
        "rule compile",
        f"  command = {compiler} -c -o $out -MMD -MF $out.d {COMMON} $flags {torch_paths} $in",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule embed",
        f"  command = {sys.executable} shaders/embed.py $out",
        "  restat = true",
        "rule link",
        f"  command = {compiler} -shared $in -o $out -Wl,-soname,{LIBRARY} {libraries} -lc10 -ltorch_cpu -ltorch"
        f" -L{objc} -lobjc -lBlocksRuntime -ldl",
    ]
    # The headers of torch take most of the time, so what needs them is one source.
    host = [f"{HERE}/{name}" for name in ("device.cpp", "runtime.mm", "selftest.mm")] + ["csrc/mps/mps.mm"]
    text = "".join(f'#include "{source}"\n' for source in host)
    together = folder / "host.mm"
    if not together.exists() or together.read_text() != text:
        together.write_text(text)
    quick, hidden = "-O2", "-O0 -fvisibility=hidden"
    sources = {
        **dict.fromkeys(emulator.EMULATOR, quick),  # shader libraries see its symbols
        f"{HERE}/dispatch.cpp": f"""{quick} '-DSIMULATOR_COMPILER="{sys.executable} {ROOT / HERE}/metal.py"'""",
        str(together): f"{hidden} {OBJECTIVE} -isystem {objc}/include",
    }
    shared = ["call", "checks", "overlap"]
    if (extension / "build.ninja").exists():
        lines += [f"builddir = {extension}", f"subninja {extension}/build.ninja"]  # with its record of what was made
        objects = [f"{extension}/csrc/{name}.o" for name in shared]
    else:
        lines.append(f"builddir = {folder}")
        objects = []
        sources |= {f"csrc/{name}.cpp": hidden for name in shared}
    shaders = [p for f in ("shaders/*.*", "csrc/*.h", "csrc/mps/*.h") for p in sorted(ROOT.glob(f))]
    # The extension defines the operators, and torch lets only one library do so for a namespace.
    sources["csrc/operators.cpp"] = f"{hidden} -DROPE_NAMESPACE=rope_of_the_simulator"
    lines.append(f"build {folder}/shaders.cpp: embed | {' '.join(map(str, shaders))}")
    sources[f"{folder}/shaders.cpp"] = hidden
    for source, flags in sources.items():
        lines += [f"build {folder}/{Path(source).name}.o: compile {source}", f"  flags = {flags}"]
    objects[:0] = [f"{folder}/{Path(source).name}.o" for source in sources]
    lines.append(f"build {folder}/{LIBRARY}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def build() -> Path:
    """Builds the library and returns its path."""
    import torch

    if reason := problem():
        raise RuntimeError(reason)
    tag = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
    with emulator.folder_of(f"simulator-{tag}") as folder:
        extension = ROOT / f"build/{sysconfig.get_platform()}-{tag}"
        return emulator.ninja(folder, _ninja(folder, extension), LIBRARY)


def program(source: str, out: Path) -> None:
    """Compiles a program in Objective-C++ that uses Metal without torch, and the embedded shaders, for the simulated device."""
    library, objc = build(), _objc()
    command = f"{metal.compiler()} {COMMON} {OBJECTIVE} -isystem {objc}/include {source} {library.parent}/shaders.cpp"
    command += f" -x none {library} -Wl,-rpath,{library.parent} -L{objc} -lobjc -lBlocksRuntime -o {out}"
    subprocess.run(command.split(), cwd=ROOT, check=True)


def mistakes() -> str:
    """Compiles every kernel. Returns the compiler's messages, which name the files that have the texts."""
    library = build()
    kernels = library.parent / "kernels"
    kernels.mkdir(exist_ok=True)
    program("tests/exhaustive/metal/pipelines.mm", library.parent / "pipelines")
    subprocess.run([library.parent / "pipelines", kernels], check=True)

    def mistakes_in(kernel: Path) -> str:
        try:
            metal.compiled(kernel.read_text(), library.parent / "shaders", library)
        except metal.NotMetal as error:
            return re.sub("^program_source:", f"{kernel}:", str(error), flags=re.M)
        return ""

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        return "".join(pool.map(mistakes_in, sorted(kernels.iterdir())))


def load() -> None:
    """Loads the simulated device."""
    import torch

    import torch_rope  # defines the operators whose kernels the library registers

    torch.ops.load_library(build())
    os.environ["TORCH_ROPE_PYTHON"] = shlex.join([sys.executable, os.path.abspath(__file__)])
    # A build of torch and torch_rope for macOS has these.
    torch_rope._C.devices = ("cpu", "mps")
    torch._C._has_mps = True
    torch._C._mps_is_available = lambda: True
    torch._C._mps_is_on_macos_or_newer = lambda major, minor: True
    torch._C._mps_deviceSynchronize = lambda: torch.ops.simulator.synchronize()
    torch._C._mps_get_core_count = lambda: 8
    torch._C._mps_get_name = lambda: "simulated"
    torch_rope._C.metal_pipelines = lambda: ast.literal_eval(torch.ops.simulator.pipelines())
    torch.mps._default_mps_generator = torch.Generator()
    torch.UntypedStorage.mps = lambda self: (
        torch.empty(self.nbytes(), dtype=torch.uint8, device="mps").untyped_storage().copy_(self, False)
    )


def last_dispatches() -> list[dict]:
    """Returns records of the kernels that ran since the call before, at most 1000.

    A record has the keys kernel, source (the path of its library's source, as C++), constants (index to value of function
    constants), threads (of the grid, [x, y, z]), group (the threads of a threadgroup), groups (the number
    of threadgroups), rints (the number of calls of rint), messages (name to the number that the encoder got since the
    previous dispatch) and buffers. The last maps the index of a buffer to its bytes, bytes_read, bytes_written, loads and
    stores; these two map the size of an access in bytes to the number of accesses. A buffer that is bound twice has the same
    numbers twice, and one that the function constants leave out has no entry.

    After count_lines(True) buffers also have lines_read and lines_written. A load or store that a SIMD group executes counts
    the lines of 128 bytes that its threads touch. If a kernel loads each line of a tensor once, lines_read * 128 is the
    tensor's size; if two instructions load half of each line, it is twice the size.
    """
    return ast.literal_eval(__getattr__("last_dispatches")())


def __getattr__(name: str):
    """Returns one of the other functions of the library, which device.cpp defines."""
    import torch

    return getattr(torch.ops.simulator, name)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            print(build())
        case ["--missing"]:
            sys.exit(problem() or 0)
        case ["--kernels"]:
            sys.exit(mistakes() or 0)
        case ["-m", _, *_]:
            sys.argv, sys.path[0] = sys.argv[2:], os.getcwd()
            load()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        case _:
            sys.exit(__doc__)
