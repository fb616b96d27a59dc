"""Writes the tree that kernel-builder of the Hugging Face Hub builds a kernel from.

    python hub/layout.py OUT

The tree has the C++, CUDA and Objective-C++ files of csrc/, the shaders as text, and of the Python package what needs
only torch, or transformers. kernel-builder adds torch_rope/_ops.py and the build files. docs/integrations/hub.md says
how to go on.
"""

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "shaders"))
import embed  # noqa: E402

PACKAGE = [
    "*.py",
    "frequencies/*.py",
    "integrations/__init__.py",
    "integrations/_*.py",
    "integrations/transformers/*.py",
]
NAMESPACE = """// A namespace that no other version of this kernel has: kernel-builder names the extension after the back end and a hash.
#pragma once

#define ROPE_NAMESPACE TORCH_EXTENSION_NAME
"""


def write(out: Path) -> None:
    """Writes the tree into a folder. What an earlier call has written there is replaced."""
    for folder in ("csrc", "torch-ext"):
        shutil.rmtree(out / folder, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", out / "csrc", ignore=shutil.ignore_patterns("module.cpp"))  # it needs pybind11
    (out / "csrc/namespace.h").write_text(NAMESPACE)
    embed.write(out / "csrc/mps/shaders.cpp")

    package = out / "torch-ext/torch_rope"
    for path in sorted(path for pattern in PACKAGE for path in (ROOT / "torch_rope").glob(pattern)):
        if path.name != "_ops.py":
            to = package / path.relative_to(ROOT / "torch_rope")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    init = package / "__init__.py"
    before, names, after = init.read_text().partition("__all__ = [\n")
    init.write_text(f'{before}from . import layers\n\n{names}    "layers",\n{after}')

    shutil.copy(ROOT / "hub/layers.py", package)
    shutil.copy(ROOT / "hub/torch_binding.cpp", out / "torch-ext")
    for name in ("hub/build.toml", "hub/flake.nix", "LICENSE"):
        shutil.copy(ROOT / name, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    write(parser.parse_args().out)
