"""Builds torch_rope._C against the installed torch. The other metadata of the package is in pyproject.toml.

The build includes CUDA if torch has CUDA. It stops if CUDA cannot be built, unless TORCH_ROPE_CUDA=0 leaves CUDA out.
TORCH_ROPE_CUDA=1 stops it also if torch has no CUDA. docs/cuda.md has the other variables. The build includes Metal on
macOS; shaders/embed.py describes how the shaders get into the library.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from urllib.parse import urlsplit

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "shaders"))
import embed  # noqa: E402

ADDRESS = "https://github.com/OWNER/torch_rope"  # a placeholder in README.md
PAGES = {"Source": "", "Documentation": "/tree/HEAD/docs", "Issues": "/issues", "Changes": "/blob/HEAD/CHANGELOG.md"}


def address() -> str | None:
    """Returns the address of the repository that was cloned, without a name or a token, or None if it is not known."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return None
    git = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True)
    url = urlsplit(re.sub(r"^\w+@([\w.-]+):/?", r"ssh://\1/", git.stdout.strip()))  # git@host:path means SSH
    if url.scheme not in ("https", "ssh") or "." not in (url.hostname or ""):
        return None
    port = f":{url.port}" if url.port and url.scheme == "https" else ""
    return f"https://{url.hostname}{port}{url.path.rstrip('/').removesuffix('.git')}"


[version] = re.findall(r'^__version__ = "(.*)"', (ROOT / "torch_rope/__init__.py").read_text(), re.M)
own, text = address(), (ROOT / "README.md").read_text(encoding="utf-8")
if own:  # the links and pictures of README.md lead to the repository
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{own}/raw/HEAD/", text.replace(ADDRESS, own))
    text = re.sub(r"(\]\()(?!\w+:|#)", rf"\1{own}/blob/HEAD/", text)
metadata = {
    "version": version,
    "install_requires": ["torch>=2.11"],
    "long_description": text,
    "long_description_content_type": "text/markdown",
    "project_urls": {name: own + path for name, path in PAGES.items()} if own else {},
}

# pyproject.toml does not ask for torch: pip would then build in an environment of its own, with the newest torch instead
# of the one that is installed.
try:
    import pybind11
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ModuleNotFoundError as error:
    # uv lock, for example, asks for the metadata alone, in an environment without torch.
    if {"egg_info", "dist_info"} & {*sys.argv}:
        setup(**metadata)
        sys.exit()
    sys.exit(
        f"torch_rope: this build found no {error.name}, and it needs the torch that will run torch_rope. Install torch, "
        'then run: pip install "setuptools>=77" pybind11 ninja && pip install --no-build-isolation .'
    )

if sys.platform == "win32" or torch.version.hip:
    sys.exit("torch_rope supports Linux and macOS. It does not support Windows or ROCm builds of torch.")
TORCH = ".".join(torch.__version__.split(".")[:2])  # such as 2.13; releases like 2.13.1 can load the same build
if tuple(map(int, TORCH.split("."))) < (2, 11):
    sys.exit(f"torch_rope needs torch 2.11 or later, and this is torch {torch.__version__}.")
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    sys.exit("torch_rope needs Python.h: install Python's headers (python3-dev on Debian and Ubuntu).")
if not shutil.which(COMPILER := os.environ.get("CXX", "c++").split()[0]):
    sys.exit(f"torch_rope needs a C++ compiler, and found no {COMPILER}: install g++ or clang, or set CXX.")

FLAGS = [
    "-std=c++20",  # torch 2.11 would ask for an older one
    "-O3",
    "-g0",
    "-Wall",
    "-Wno-psabi",  # GCC warns about the ABI of vector arguments, but the functions that take them are inlined
    "-ffp-contract=off",  # the kernels call fma themselves, so the compiler must not contract other expressions
    "-fno-math-errno",
    "-fvisibility=hidden",
]
# at::parallel_for is serial without OpenMP. Its flag is given to the compiler and not to the linker: the symbols come
# from the OpenMP runtime that torch has loaded, so that the process has one pool of threads.
if sys.platform == "linux":
    # GCC 12 gives these warnings for its own AVX-512 intrinsics.
    FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    FLAGS.append("-fopenmp")
else:
    FLAGS += ["-Xpreprocessor", "-fopenmp"]  # the driver of Apple's clang refuses the flag; torch brings omp.h

# --fmad=false switches contraction off for CUDA, as -ffp-contract=off does for C++: csrc/angle.h, and the compensated
# sums (Sum in shaders/sums.h), add to products and subtract from them, and must have the same bits everywhere.
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false"]
ARCHITECTURES = "7.5;8.0;8.9;9.0;10.0;12.0+PTX"  # T4, A100, RTX 40, H100, B200, RTX 50 and later


def nvcc_release() -> tuple[int, ...]:
    """Returns the release of the nvcc in CUDA_HOME, such as (13, 0), or () if there is none."""
    nvcc = CUDA_HOME and shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout if nvcc else ""
    found = re.search(r"release (\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def without_cuda(nvcc: tuple[int, ...]) -> str | None:
    """Returns why CUDA cannot be built, or None if it can."""
    if os.environ.get("TORCH_ROPE_CUDA") == "0":
        return "TORCH_ROPE_CUDA is 0"
    if not torch.version.cuda:
        return f"torch {torch.__version__} has no CUDA"
    if not nvcc:
        return f"nvcc was not found in CUDA_HOME, the folder of the CUDA toolkit, which is {CUDA_HOME}"
    if nvcc[0] != int(torch.version.cuda.split(".")[0]):
        return f"nvcc in {CUDA_HOME} is of CUDA {nvcc[0]}.{nvcc[1]}, and this torch is of CUDA {torch.version.cuda}"
    if not Path(CUDA_HOME, "include/cuda_runtime.h").exists():
        return f"CUDA_HOME is {CUDA_HOME}, which has no include/cuda_runtime.h"
    return None


nvcc = nvcc_release()
reason, wanted = without_cuda(nvcc), os.environ.get("TORCH_ROPE_CUDA", "")
if wanted not in ("", "0", "1"):
    sys.exit(f"torch_rope: TORCH_ROPE_CUDA is {wanted!r} but must be 0, 1 or unset.")
if not reason:
    known = ARCHITECTURES if nvcc >= (12, 8) else "7.5;8.0;8.9;9.0+PTX"
    if nvcc >= (13,) and platform.machine() == "aarch64":
        known = known.replace("12.0", "11.0;12.0")  # Jetson Thor
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", known)
    NVCC_FLAGS.append("--threads=2")  # two architectures at a time
    if nvcc >= (13,):  # the drivers of CUDA 12 before 12.4 cannot read files that are compressed so
        NVCC_FLAGS.append("--compress-mode=size")
    if os.environ.get("TORCH_ROPE_LINES") == "1":  # for profilers; it doubles the size
        NVCC_FLAGS.append("-lineinfo")
elif "sdist" not in sys.argv and (wanted == "1" or (torch.version.cuda and wanted != "0")):
    advice = f"Install the CUDA toolkit {torch.version.cuda}, or set TORCH_ROPE_CUDA=0 to build for the CPU only."
    advice = advice if torch.version.cuda else "Unset TORCH_ROPE_CUDA to build for the CPU only."
    sys.exit(f"torch_rope cannot be built for CUDA: {reason}. {advice}")


class Build(BuildExtension):
    def finalize_options(self):
        super().finalize_options()
        # pip gives every editable build a new folder. In this fixed one ninja finds what it has compiled before.
        self.build_temp = f"build/{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch-{torch.__version__}"

    def run(self):
        super().run()
        # torch_rope/__init__.py reads this file before it loads the library.
        package = Path("torch_rope" if self.inplace else f"{self.build_lib}/torch_rope")
        (package / "built_for_torch.txt").write_text(torch.__version__ + "\n")


def shared_library() -> list[str]:
    """Returns the flags that link the shared C++ library, which torch loads, if the compiler would link the static one.

    Two copies of the library in a process do not know each other's locale: a number in an error message crashes.
    """

    def finds(name: str) -> bool:
        command = [*os.environ.get("CXX", "c++").split(), f"-print-file-name={name}"]
        return "/" in subprocess.run(command, capture_output=True, text=True).stdout  # else it prints the name as it is

    if finds("libstdc++.so"):
        return []
    if finds("libstdc++.so.6"):
        return ["-l:libstdc++.so.6"]
    sys.exit(
        f"torch_rope: {COMPILER} finds no libstdc++.so, and beside torch a library with a static libstdc++ crashes. "
        "Install libstdc++'s development files (g++ on Debian and Ubuntu), or set CXX to a compiler that finds them."
    )


# The kernels take longest to compile. They come first, so that no processor waits for them at the end.
folders, sources, defines, link = ["csrc/cpu", "csrc"], [], [], []
# The kernels of CUDA depend neither on torch nor on Python, so that a release compiles them once for many wheels.
kernels = []
if not reason and (given := os.environ.get("TORCH_ROPE_KERNELS")):
    kernels = sorted(map(str, Path(given).resolve().glob("*.o")))
    if not kernels:
        sys.exit(f"torch_rope: TORCH_ROPE_KERNELS is {given}, a folder without object files of the kernels.")
if sys.platform == "linux":
    link = ["-Wl,-s", *shared_library()]
if not reason:
    folders.append("csrc/cuda")
    defines = [("ROPE_WITH_CUDA", None)]
if sys.platform == "darwin":
    # Python may be built for two architectures, but torch is built for one.
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")
    # The shaders need macOS 14, but Python may be built for an older one. The platform in the name of a wheel is the newer
    # of the two.
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")
    folders.append("csrc/mps")
    defines = [("ROPE_WITH_MPS", None)]
    link = ["-framework", "Foundation", "-framework", "Metal"]
    embed.write(ROOT / "build/shaders.cpp")
    sources = ["build/shaders.cpp"]
for folder in folders:
    suffixes = (".cpp", ".mm") if kernels else (".cpp", ".mm", ".cu")
    sources += sorted(str(p) for p in Path(folder).iterdir() if p.suffix in suffixes)

# A source distribution works with every torch, and a build only with the release that it was made for. A wheel made here
# also says so in its version, so that an index may hold the wheels of all releases; pip wants a build of a source
# distribution, which has the file PKG-INFO, to keep the version of that.
if "sdist" not in sys.argv:
    metadata["install_requires"] = [f"torch=={TORCH}.*"]
    if not (ROOT / "PKG-INFO").exists():
        metadata["version"] += f"+torch{TORCH}" + ("" if reason else ".cu" + torch.version.cuda.replace(".", ""))

setup(
    ext_modules=[
        (CppExtension if reason else CUDAExtension)(
            "torch_rope._C",
            sources=sources,
            include_dirs=[str(ROOT), pybind11.get_include()],
            define_macros=defines,
            extra_compile_args={"cxx": FLAGS, "nvcc": NVCC_FLAGS},
            extra_link_args=link,
            extra_objects=kernels,
        )
    ],
    cmdclass={"build_ext": Build},
    **metadata,
)
