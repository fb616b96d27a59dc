"""A build with a compiler that finds only the static libstdc++."""

import os
import shutil
import subprocess
import sys

import pytest
from cases import ROOT, python

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(sys.platform != "linux", reason="libstdc++ is the library of Linux")]
# What such a g++ does: it does not find the shared library, and links the static one.
COMPILER = """#!/bin/sh
case "$*" in *-print-file-name=libstdc++.so) echo libstdc++.so; exit;; esac
case " $* " in *" -shared "*) set -- "$@" -static-libstdc++;; esac
exec g++ "$@"
"""


def test_an_error_with_a_number_has_its_number_though_the_compiler_links_libstdcxx_statically(tmp_path):
    for part in "csrc", "shaders", "torch_rope":
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.so"))
    for file in "setup.py", "pyproject.toml", "README.md", "LICENSE":
        shutil.copy(ROOT / file, tmp_path)
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler), "TORCH_ROPE_CUDA": "0", "MAX_JOBS": "2"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    done = python(f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import torch, torch_rope
print(torch_rope.__file__)
torch_rope.rotate(torch.ones(1, 3, 2, 8), inv_freq=torch.ones(7))
""")
    assert done.stdout.startswith(str(tmp_path))
    assert "inv_freq has 7 frequencies but must have at most 4" in done.stderr, done.stderr
