"""Compiles the library for macOS (arm64) on Linux and links it with the macOS releases of torch.

zig brings Clang, the C and C++ headers and libSystem. tests/backends/metal/simulator/frameworks has the few declarations
of Foundation and Metal. torch's macOS wheels are downloaded once.
"""

import fcntl
import functools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cases import missing, needed

lief = needed("lief")
lief.disable_leak_warning()  # which it prints when Python ends
ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build/macos"

# Releases of torch, the oldest supported one first: the platform in the name of their macOS wheels, and the version of C++
# that their headers need.
RELEASES = {"2.11.0": "macosx_11_0_arm64", "2.13.0": "macosx_14_0_arm64", "2.15.0": "macosx_14_0_arm64"}

ZIG, TARGET = [sys.executable, "-m", "ziglang"], ["-target", "aarch64-macos.14.0"]
FLAGS = "-O0 -DNDEBUG -fno-sanitize=all -fblocks -Werror -I."  # besides those of setup.py
# Runs setup.py as on macOS, and prints what it passes to the compiler. What the second line does fails if another platform
# is pretended.
SETUP = """
import json, os, runpy, shutil, sys, sysconfig, setuptools
import torch.utils.cpp_extension; sysconfig.get_config_vars()
sys.platform = "darwin"
shutil.which = lambda name, **_: name if name == "c++" else None
setuptools.setup = lambda ext_modules, **_: print(
    json.dumps([ext_modules[0].extra_compile_args["cxx"], os.environ["MACOSX_DEPLOYMENT_TARGET"]])
)
runpy.run_path("setup.py")
"""

LIBRARIES = "libtorch_cpu", "libc10", "libomp"

# The symbols that are not torch's: those of libc++, libobjc, Foundation and Metal. zig's libSystem has the C library.
APPLE = re.compile(
    r"__Z(T[ISTV])?N?K?(St|10__cxxabiv1)|__Z(nw|na|dl|da)|___cxa_|___gxx_personality_v0$|_objc_\w+$"
    r"|_OBJC_CLASS_\$_(NSString|MTLCompileOptions|MTLFunctionConstantValues)$"
)


def _run(*command, **environment) -> str:
    """Runs a command and returns its output. Raises RuntimeError with the output if it fails."""
    environment |= {f"ZIG_{kind}_CACHE_DIR": str(BUILD / "zig") for kind in ("GLOBAL", "LOCAL")}
    made = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if made.returncode:
        raise RuntimeError(made.stdout)
    return made.stdout


def setup(**environment) -> tuple[list[str], str]:
    """Returns the flags of setup.py for the C++ compiler on macOS, and the release of macOS that it builds for."""
    return json.loads(_run(sys.executable, "-c", SETUP, TORCH_ROPE_CUDA="0", **environment).splitlines()[-1])


@functools.cache
def wheel(release: str) -> Path:
    """Returns the folder `torch` with the headers and libraries of the release's wheel for macOS, downloaded once."""
    folder = BUILD / f"torch-{release}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / f"torch-{release}.lock", "w") as lock, tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be downloading it
        if folder.exists():
            return folder / "torch"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1", "download", "-q", "--no-deps"]
        platform = ["--only-binary=:all:", "--platform", RELEASES[release], "--python-version=312"]
        try:
            _run(*pip, *platform, "-d", scratch, f"torch=={release}")
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            missing(f"torch {release} for macOS was not downloaded: {reason}")
        archive = zipfile.ZipFile(next(Path(scratch).glob("*.whl")))
        parts = ("torch/include/", *(f"torch/lib/{library}.dylib" for library in LIBRARIES))
        archive.extractall(f"{scratch}/all", [name for name in archive.namelist() if name.startswith(parts)])
        Path(scratch, "all").rename(folder)  # so that the folder is complete if it exists
    return folder / "torch"


def _sources() -> list[str]:
    """Returns all sources except module.cpp, after writing those that are generated.

    module.cpp needs Python's headers, and those here are not for macOS. It uses nothing of torch.
    """
    patterns = "*.cpp", "cpu/*.cpp", "mps/*.mm"
    found = [str(p.relative_to(ROOT)) for name in patterns for p in ROOT.glob(f"csrc/{name}") if p.stem != "module"]
    _run(sys.executable, "shaders/embed.py", BUILD / "shaders.cpp")
    return [*sorted(found), str(BUILD / "shaders.cpp")]


def compile(release: str) -> list[Path]:
    """Compiles the whole library with the headers of this release. Returns the objects."""
    include, folder = wheel(release) / "include", BUILD / f"objects-{release}"
    folder.mkdir(parents=True, exist_ok=True)
    objects = {source: folder / f"{Path(source).name}.o" for source in _sources()}
    lines = [
        f"builddir = {folder}",
        "rule compile",
        f"  command = {' '.join([*ZIG, 'c++', *TARGET, *setup()[0]])} {FLAGS} $flags $in -o $out -MD -MF $out.d"
        f" -isystem {include} -isystem {include}/torch/csrc/api/include -isystem tests/backends/metal/simulator/frameworks",
        "  deps = gcc",
        "  depfile = $out.d",
        # Compiling torch's headers takes most of the time, so those of backend.h are precompiled. All sources are compiled as
        # Objective-C++, because a precompiled header has one language.
        f"build {folder}/backend.pch: compile csrc/backend.h",
        "  flags = -x objective-c++-header -fpch-instantiate-templates",
    ]
    for source, made in objects.items():
        lines.append(f"build {made}: compile {source} | {folder}/backend.pch")
        lines.append(f"  flags = -c -x objective-c++ -include-pch {folder}/backend.pch")
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "build.ninja").write_text("\n".join(lines) + "\n")
        jobs = os.environ.get("MAX_JOBS", "2")
        _run(sys.executable, "-m", "ninja", "--quiet", "-f", folder / "build.ninja", "-j", jobs, *objects.values())
    return list(objects.values())


def link(release: str, objects: list[Path]) -> Path:
    """Links these objects with the libraries of this release. Raises RuntimeError, with the symbols that are missing."""
    libraries = [wheel(release) / f"lib/{library}.dylib" for library in LIBRARIES]
    names = ", ".join(f"'{name}'" for name in sorted(undefined(objects)) if APPLE.match(name))
    folder = objects[0].parent
    (folder / "apple.tbd").write_text(  # stands in for Apple's libraries
        "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: apple\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {names} ]\n...\n"
    )
    own = ["-lc", "-fno-compiler-rt", "-fno-ubsan-rt"]  # zig would need half a minute to compile the other two
    made = ["--name", "torch_rope", f"-femit-bin={folder}/_C.so"]
    _run(*ZIG, "build-lib", "-dynamic", *TARGET, *own, *made, *objects, folder / "apple.tbd", *libraries)
    return folder / "_C.so"


def air(library: bytes) -> list[bytes]:
    """Returns the bitcode of each kernel of all Metal libraries that are embedded in a library.

    A Metal library begins with MTLB. At byte 16 are its size, and then offset and size of each of its four parts, of which
    the last has the bitcode.
    """
    kernels = []
    for found in re.finditer(b"MTLB", library[:-88]):
        size, first, *_, offset, length = struct.unpack_from("<9Q", library, found.start() + 16)
        if first == 88 and offset + length == size:
            bitcode = library[found.start() + offset : found.start() + size]
            kernels += bitcode.split(b"\xde\xc0\x17\x0b")[1:]  # the number that the bitcode of a kernel begins with
    return kernels


def undefined(objects: list[Path]) -> set[str]:
    """Returns the external symbols that these objects use and none of them defines."""
    found = {False: set(), True: set()}
    for files in [lief.MachO.parse(str(path)) for path in objects]:
        for symbol in files.at(0).symbols:
            if symbol.raw_type & 0xE1 == 1:  # external, and no debugging symbol
                found[bool(symbol.raw_type & 0x0E)].add(symbol.name)
    return found[False] - found[True]


def selectors(path: Path) -> set[str]:
    """Returns the selectors of all messages that an object sends."""
    files = lief.MachO.parse(str(path))
    sections = [s for s in files.at(0).sections if s.name == "__objc_methname"]
    return {name for s in sections for name in bytes(s.content).decode().split("\0")} - {""}
