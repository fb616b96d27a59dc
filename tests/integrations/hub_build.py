"""Builds the CPU variant of the layout for the Hugging Face Hub, with the steps of kernel-builder: its flags and
definitions, a namespace that no other version has, and the folder that the kernels package loads.

The object files of torch_rope's own build serve again if they do not depend on the namespace. The library stays in
build/hub until a source of it changes.
"""

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cases import ROOT
from torch.utils import cpp_extension

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

sys.path.append(str(ROOT / "hub"))
import layout  # noqa: E402

FOLDER = ROOT / "build/hub"
TORCH = "".join(torch.__version__.split(".")[:2])
VARIANT = f"torch{TORCH}-cxx11-cpu-{platform.machine()}-linux"
OPS_PY = """import torch
from . import {name}
ops = torch.ops.{name}
def add_op_namespace_prefix(op_name):
    return f"{name}::{{op_name}}"
"""


def build_toml() -> dict:
    return tomllib.loads((ROOT / "hub/build.toml").read_text())


@functools.cache
def includes(path: Path) -> set[Path]:
    """Returns the headers of this project that a file includes, and those that they include."""
    own = {(path.parent / name).resolve() for name in re.findall('^#include "(.+)"', path.read_text(), re.M)}
    return own.union(*map(includes, own))


def build() -> Path:
    """Returns the folder with the variant. Its library is built only if a source has changed."""
    if torch.version.cuda:
        pytest.skip("under a torch with CUDA, the kernels package looks for a CUDA variant alone")
    config, source = build_toml(), FOLDER / "source"
    layout.write(source)
    sources = [s for part in (config["torch"], config["kernel"]["cpu"]) for s in part["src"]]
    hashed = hashlib.sha1(torch.__version__.encode() + Path(__file__).read_bytes())
    for file in sources:
        hashed.update((source / file).read_bytes())
    name = f"_torch_rope_cpu_{hashed.hexdigest()[:7]}"
    library = FOLDER / f"{name}.abi3.so"
    if not library.exists():
        build_library(config, source, name, [s for s in sources if s.endswith(".cpp")], library)

    variant = FOLDER / "build" / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(source / "torch-ext/torch_rope", variant)
    shutil.copy(library, variant)
    (variant / "_ops.py").write_text(OPS_PY.format(name=name))
    metadata = {key: config["general"][key] for key in ("name", "version", "license")}
    metadata |= {"id": name, "python-depends": [], "backend": {"type": "cpu"}}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return variant


def build_library(config: dict, source: Path, name: str, sources: list[str], library: Path) -> None:
    """Compiles the sources into a library, whose extension module and namespace have this name."""
    flags = [re.sub(r"\$<\$<PLATFORM_ID:Linux>:(.*)>", r"\1", flag) for flag in config["torch"]["cxx-flags"]]
    flags += [f"-DTORCH_EXTENSION_NAME={name}", "-DPy_LIMITED_API=0x03000000", "-DCPU_KERNEL", "-fno-gnu-unique"]
    flags += [f"-I{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]]
    compiler = [*(["ccache"] if shutil.which("ccache") else []), *os.environ.get("CXX", "c++").split()]
    own = f"build/{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch-{torch.__version__}"

    def compiled(file: str, optimize: str) -> Path:
        out = FOLDER / "objects" / f"{file.replace('/', '_')}.o"
        out.parent.mkdir(exist_ok=True)
        # From the folder of the sources, so that ccache knows the files of another clone.
        command = [*compiler, *flags, "-std=c++20", "-fPIC", optimize, "-c", file, "-o", out]
        subprocess.run(command, cwd=source, check=True)
        return out

    def kernels(file: str) -> Path:
        ready = (folder / own / Path(file).with_suffix(".o") for folder in (ROOT, *ROOT.parents))
        return next(filter(Path.exists, ready), None) or compiled(file, "-O3")

    named = [s for s in sources if "csrc" not in s or source / "csrc/namespace.h" in includes(source / s)]
    # torch's headers take nearly all of the time, so these files are compiled together, and not optimised. The last of
    # them, in_place.cpp, has a function with the name of another one.
    (source / "named.cpp").write_text("".join(f'#include "{file}"\n' for file in reversed(named)))
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        rest = pool.map(kernels, [s for s in sources if s not in named])
        linked = [compiled("named.cpp", "-O0"), *rest]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
    subprocess.run([*compiler[-1:], "-shared", "-o", library, *linked, *libraries], check=True)
