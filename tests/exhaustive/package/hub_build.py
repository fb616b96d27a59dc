"""Builds the CPU variant of the layout for the Hugging Face Hub, with the steps of kernel-builder: its flags and
definitions, a namespace that no other version has, and the folder that the kernels package loads.

The library stays in build/hub until a source of it changes.
"""

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
from cases import ROOT, needed
from torch.utils import cpp_extension

from hub import layout

tomllib = needed("tomllib" if sys.version_info >= (3, 11) else "tomli")
CONFIG = tomllib.loads((ROOT / "hub/build.toml").read_text())
FOLDER = ROOT / "build/hub"
TORCH = "".join(torch.__version__.split(".")[:2])
VARIANT = f"torch{TORCH}-cxx11-cpu-{platform.machine()}-linux"
OPS_PY = """import torch
from . import {name}
ops = torch.ops.{name}
def add_op_namespace_prefix(op_name):
    return f"{name}::{{op_name}}"
"""


def build() -> Path:
    """Returns the folder with the variant. Its library is built only if a source has changed."""
    if torch.version.cuda:
        pytest.skip("under a torch with CUDA, the kernels package looks for a CUDA variant alone")
    config, source = CONFIG, FOLDER / "source"
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
    """Compiles the sources into a library, whose extension module and namespace have this name.

    They are optimised little, because that takes long and changes no bit.
    """
    flags = [re.sub(r"\$<\$<PLATFORM_ID:Linux>:(.*)>", r"\1", flag) for flag in config["torch"]["cxx-flags"]]
    flags += [f"-DTORCH_EXTENSION_NAME={name}", "-DPy_LIMITED_API=0x03000000", "-DCPU_KERNEL", "-fno-gnu-unique"]
    flags += [f"-I{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]]
    compiler = [*(["ccache"] if shutil.which("ccache") else []), *os.environ.get("CXX", "c++").split()]

    def compiled(file: str) -> Path:
        out = FOLDER / "objects" / f"{file.replace('/', '_')}.o"
        out.parent.mkdir(exist_ok=True)
        # From the folder of the sources, so that ccache knows the files of another clone.
        subprocess.run([*compiler, *flags, "-std=c++20", "-fPIC", "-O1", "-c", file, "-o", out], cwd=source, check=True)
        return out

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        linked = list(pool.map(compiled, sources))
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
    subprocess.run([*compiler[-1:], "-shared", "-o", library, *linked, *libraries], check=True)
