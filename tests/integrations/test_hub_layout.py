"""The layout for the Hugging Face Hub: build.toml has the sources and flags of setup.py, and the package stands alone.
tests/exhaustive/package/test_hub.py builds it."""

import ast
import re
import subprocess
import sys

import pytest
from cases import ROOT, needed

from hub import layout

tomllib = needed("tomllib" if sys.version_info >= (3, 11) else "tomli")

pytestmark = pytest.mark.cpu
CONFIG = tomllib.loads((ROOT / "hub/build.toml").read_text())


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    layout.write(folder)
    return folder


def section_of(file: str) -> str:
    """Returns the section of build.toml in which a file of csrc/ belongs."""
    if file.startswith("csrc/cuda/"):
        return "cuda"
    if re.match(r"csrc/mps/.*\.(mm|cpp)$", file):
        return "metal"
    return "cpu" if file == "csrc/cpu/kernels.h" else "torch"


def test_every_source_is_in_the_section_of_its_back_end(tree):
    files = sorted(str(path.relative_to(tree)) for path in (tree / "csrc").rglob("*") if path.is_file())
    assert "csrc/module.cpp" not in files and "csrc/mps/shaders.cpp" in files
    for name, section in {"torch": CONFIG["torch"], **CONFIG["kernel"]}.items():
        assert sorted(f for f in section["src"] if "csrc" in f) == [f for f in files if section_of(f) == name], name
        assert all((tree / f).is_file() for f in section["src"])
    assert {k["backend"] for k in CONFIG["kernel"].values()} == set(CONFIG["general"]["backends"])


def test_the_flags_are_those_of_setup_py():
    values, linux, wanted = {}, [], ("FLAGS", "NVCC_FLAGS", "ARCHITECTURES")
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in wanted:
            values[node.targets[0].id] = ast.literal_eval(node.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "FLAGS.append":
            linux += [f"$<$<PLATFORM_ID:Linux>:{ast.literal_eval(node.args[0])}>"]
    flags = [flag for flag in values["FLAGS"] if flag not in ("-O3", "-g0", "-Wall")]  # kernel-builder has its own
    cuda = CONFIG["kernel"]["cuda"]
    assert CONFIG["torch"]["cxx-flags"] == flags + linux
    assert cuda["cxx-flags"] == [flag for flag in flags if not flag.startswith("-W")]
    assert cuda["cuda-flags"] == [flag for flag in values["NVCC_FLAGS"] if not flag.startswith("-std")]
    assert cuda["cuda-capabilities"] == values["ARCHITECTURES"].split(";")


def test_the_package_imports_only_itself_torch_and_python(tree):
    """The Hub loads it under another name, so it must not import torch_rope; and it may need transformers only later."""
    for path in (tree / "torch-ext/torch_rope").rglob("*.py"):
        nodes = ast.parse(path.read_text())
        for node in ast.walk(nodes):
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.rope"), path
            if isinstance(node, ast.ImportFrom) and node.level and node.module not in (None, "_ops"):  # which is built
                module = path.parents[node.level - 1] / node.module.replace(".", "/")
                assert module.is_dir() or module.with_suffix(".py").is_file(), f"{path} imports {module}"
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in (name.partition(".")[0] for name in names):
                later = node not in nodes.body or path.name == "fuse.py"  # which is imported later
                known = name == "torch" or name in sys.stdlib_module_names
                assert known or (later and name in ("transformers", "kernels")), f"{path} imports {name}"


def test_the_metal_kernels_are_text(tree):
    metal = CONFIG["kernel"]["metal"]
    [shaders] = [f for f in metal["src"] if f.endswith(".cpp")]
    command = ["c++", "-std=c++20", "-fsyntax-only", *(f"-I{path}" for path in metal["include"]), shaders]
    subprocess.run(command, cwd=tree, check=True)
    text = (tree / shaders).read_text()
    assert text.count("_kernel(") == 7
