"""Tests that the CUDA back end compiles without a warning, with or without a CUDA build of torch, and that its kernels
are few, need few registers and have good instructions. No test needs a GPU."""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cases import ROOT
from torch.utils import cpp_extension

KERNELS = {"rotate": 46, "norm": 42, "norm_backward": 43, "tables": 12, "cos_sin": 16}  # how many each file has
# The kernels that models usually need, in bfloat16, half-split pairs and 32-bit offsets: the most registers of a thread,
# and how many loads of 16 bytes begin before the position is used: frequencies, and the weights of a norm.
USUAL = "Shape<__nv_bfloat16, 8, false>"
EXPECTED = {
    ("rotate", f"rotate_kernel<Policy<{USUAL}, int, Plain>>"): (72, 8),
    ("rotate", f"rotate_kernel<Policy<{USUAL}, int, Cache>>"): (77, 8),
    ("norm", f"rotate_kernel<Policy<{USUAL}, int, CacheNorm>>"): (96, 12),
    ("norm_backward", f"norm_backward_kernel<Policy<{USUAL}, int, Plain>>"): (168, None),
    ("tables", f"table_backward_kernel<{USUAL}>"): (122, None),
}
QUANTISED = f"rotate_kernel<Policy<{USUAL}, int, General>>"  # writes float8 caches too
SOURCES = sorted([*ROOT.glob("csrc/cuda/*.cu"), *ROOT.glob("benchmarks/*.cu")])


def folder_with(program: str) -> Path | None:
    """Returns the folder of CUDA's programs that has this one, if there is one. make exhaustive installs packages."""
    folders = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    with contextlib.suppress(ImportError):
        folders += importlib.import_module("nvidia.cu13").__path__
    if found := shutil.which(program):
        folders.append(Path(found).resolve().parents[1])
    return next((p for p in map(Path, filter(None, folders)) if (p / "bin" / program).exists()), None)


pytestmark = pytest.mark.cpu
HOME = folder_with("nvcc")
needs_nvcc = pytest.mark.skipif(HOME is None, reason="nvcc was not found")


def run(*command, text=None):
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout + done.stderr


def instructions_of(compiled) -> dict[str, list[str]]:
    """Returns the instructions of each kernel for sm_90, by its name."""
    if not (folder := folder_with("cuobjdump")):
        pytest.skip("cuobjdump was not found")
    text = run("c++filt", text=run(folder / "bin/cuobjdump", "--dump-sass", "-arch=sm_90", compiled))
    return {name_in(t): re.findall(r"/\*[0-9a-f]{4,}\*/ +(\S.*?) *;", t) for t in text.split("Function : ")[1:]}


def name_in(text):
    return re.search(r"\w+<.*>(?=\()|\w+(?=\()", text.replace("rope::cuda::", ""))[0].replace("> >", ">>")


def to_the_store(code, at, passed=()):
    """Yields the instructions of each way from the one at `at` to the first store that follows."""
    for i in range(at, len(code)):
        passed = (*passed, code[i])
        if "STG" in code[i]:
            return (yield passed)
        if branch := re.fullmatch(r"(@\S+ )?BRA (?:\S+, )?0x([0-9a-f]+)", code[i]):
            if (target := int(branch[2], 16) // 16) > i:
                yield from to_the_store(code, target, passed)
            if not branch[1]:
                return


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_kernels_compile_without_warnings_to_few_registers_and_good_instructions(source, tmp_path):
    """Only general kernels of norms, and the backward of a norm in float16, keep a few registers in memory."""
    nvcc = (HOME / "bin/nvcc", "-c", source, "-std=c++20", "-O3", "--fmad=false", "--threads=2")
    flags = "--Werror=all-warnings", "-Xcompiler=-Wall", "--resource-usage", "--compress-mode=size"
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (80, 89, 90, 100, 120)]
    log = run("c++filt", text=run(*nvcc, *flags, *code, "-o", tmp_path / "all.o"))
    entry = r"entry function '(.*)' for 'sm_90'\n.*\n.*?(\d+) bytes spill stores.*\n.* (\d+) registers"
    figures = {name_in(name): (int(spilled), int(n)) for name, spilled, n in re.findall(entry, log)}
    assert len(figures) == KERNELS.get(source.stem, len(figures))
    expected = {name: limits for (stem, name), limits in EXPECTED.items() if stem == source.stem}
    assert expected.keys() <= figures.keys()
    for name, (spilled, registers) in figures.items():
        assert registers <= expected.get(name, (255,))[0], name
        assert spilled <= (32 if name not in expected and "norm" in source.stem else 0), name
    run(*nvcc, "--compress-mode=size", code[2], "-o", tmp_path / "sm_90.o")
    assert (tmp_path / "sm_90.o").stat().st_size < 1_000_000  # all files together at most 4 MB
    if source.stem not in KERNELS:
        return
    for name, code in instructions_of(tmp_path / "sm_90.o").items():
        loads, stores, triggers = ([i for i, line in enumerate(code) if op in line] for op in ("LDG", "STG", "PREEXIT"))
        assert code.index("ACQBULK") < min(loads + stores) and max(stores) < min(triggers)
        if (wide := expected.get(name, (0, None))[1]) is not None:
            # The first loads are those of the position, and of the slot if there are slots.
            wides = [i for i in loads if "LDG.E.128" in code[i]]
            first = [(i, re.search(r" R\d+", code[i])[0]) for i in loads if i < wides[0]]
            uses = [next(k for k in range(i + 1, len(code)) if re.search(rf",.*{r}\b", code[k])) for i, r in first]
            assert sum(i < min(uses) for i in wides) >= wide
        if name == QUANTISED:
            # One reciprocal of the scale, and no division. An extreme scale and eager rounding each take 16 instructions.
            found = [i for i, line in enumerate(code) if "MUFU.RCP" in line]
            divides = [i for i in found if "F2I.FTZ" not in str(code[i : i + 12])]  # that of integers converts soon
            ways = [[way for way in to_the_store(code, i) if ".SATFINITE" in str(way)] for i in divides]
            assert any(ways) and all(str(way).count("MUFU") == 1 and len(way) <= 152 for way in sum(ways, []))
            assert all(min(map(len, some)) <= 120 for some in ways if some)


@needs_nvcc
def test_host_code_compiles_without_warnings():
    """Needs no CUDA build of torch: the CPU build has the headers too, only without a configuration of CUDA."""
    includes = [f"-isystem{p}" for p in (*cpp_extension.include_paths(), HOME / "include")]
    flags = "-fsyntax-only", "-std=c++20", "-Wall", "-Werror", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"
    run("g++", *flags, *includes, "csrc/cuda/cuda.cpp")
