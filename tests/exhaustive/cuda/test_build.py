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

KERNELS = {"usual": 86, "general": 30, "norm_backward": 25, "cos_sin": 16}  # how many each file has
# By the features of a usual kernel (Features in usual.cuh): its most registers, and the most lines of 64 bytes of its
# arguments and the most instructions before its first store. The first store decides how long one token takes.
FREQUENCIES, CACHE, NORM, BYTES, EAGER = 1, 2, 4, 8, 16
USUAL = {
    0: (64, 3, 360),
    EAGER: (64, 3, 455),
    CACHE: (64, 3, 410),
    CACHE | BYTES: (72, 3, 625),
    CACHE | NORM: (96, 3, 590),
    CACHE | NORM | BYTES: (96, 4, 815),
    CACHE | NORM | EAGER: (128, 3, 740),
    FREQUENCIES: (64, 3, 375),
    FREQUENCIES | CACHE: (64, 3, 470),
    FREQUENCIES | CACHE | BYTES: (72, 3, 685),
    FREQUENCIES | CACHE | NORM: (96, 3, 665),
    FREQUENCIES | CACHE | NORM | BYTES: (96, 4, 890),
}
# The same of the kernels that take groups: those of the forward, and of the backward.
GROUPS = {
    CACHE | NORM | EAGER: (128, 4, 870),
    CACHE | NORM: (128, 4, 810),
    CACHE | NORM | BYTES: (128, 4, 1030),
    FREQUENCIES | CACHE | NORM: (128, 4, 800),
    FREQUENCIES | CACHE | NORM | BYTES: (128, 4, 1010),
}
BACKWARDS = {"heads_backward_kernel": (168, 6, 1210), "groups_backward_kernel": (168, 8, 3600)}
BFLOAT16 = "Shape<__nv_bfloat16, 8, false>"
# Bytes that a thread spills. No usual kernel of a forward does, nor any kernel for sm_90.
SPILLED = {
    ("groups_backward_kernel<Usual<Shape<__nv_bfloat16, 8, true>, 36>>", "80"): 4,
    ("general_kernel<Shape<__half, 8, true>, true>", "120"): 8,
}
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


def instructions_of(compiled, arch="90") -> dict[str, list[str]]:
    """Returns the instructions of each kernel for an architecture, by its name."""
    if not (folder := folder_with("cuobjdump")):
        pytest.skip("cuobjdump was not found")
    text = run("c++filt", text=run(folder / "bin/cuobjdump", "--dump-sass", f"-arch=sm_{arch}", compiled))
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


def before_the_store(code) -> tuple[int, int]:
    """Returns how many lines of arguments and how many instructions stand before the first store of a kernel for sm_90."""
    count = next(i for i, line in enumerate(code) if "STG" in line) + 1
    addresses = [int(a, 16) for a in re.findall(r"c\[0x0\]\[(?:U?R\d+\+)?0x([0-9a-f]+)\]", " ".join(code[:count]))]
    return len({a // 64 for a in addresses if a >= 0x210}), count  # the arguments begin at 0x210


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_kernels_compile_without_warnings_to_few_registers_and_good_instructions(source, tmp_path):
    nvcc = (HOME / "bin/nvcc", "-c", source, "-std=c++20", "-O3", "--fmad=false", "--threads=2")
    flags = "--Werror=all-warnings", "-Xcompiler=-Wall", "--resource-usage", "--compress-mode=size"
    named = {a + b for a, b in re.findall(r"(\d+)\.(\d)(?=[;+])", (ROOT / "setup.py").read_text())}
    code = {a: f"-gencode=arch=compute_{a},code=sm_{a}" for a in sorted(named)}
    log = run("c++filt", text=run(*nvcc, *flags, *code.values(), "-o", tmp_path / "all.o"))
    entry = r"entry function '(.*)' for 'sm_(\d+)'\n.*\n.*?(\d+) bytes spill stores.*\n.* (\d+) registers"
    figures = {(name_in(name), arch): (int(spilled), int(n)) for name, arch, spilled, n in re.findall(entry, log)}
    assert len(figures) == KERNELS.get(source.stem, len(figures) // len(code)) * len(code)
    for (name, arch), (spilled, _) in figures.items():
        assert spilled <= SPILLED.get((name, arch), 0), (name, arch)
    run(*nvcc, "--compress-mode=size", code["90"], "-o", tmp_path / "sm_90.o")
    assert (tmp_path / "sm_90.o").stat().st_size < 1_000_000  # all files together at most 4 MB
    if source.stem not in KERNELS:
        return
    for arch in ("80", "90", "100", "120") if source.stem == "usual" else ():
        for name, instructions in instructions_of(tmp_path / "all.o", arch).items():
            # Data, in 16 bytes, is asked for before positions, slots and frequencies. So it waits for none of them.
            loads = [line for line in instructions if "LDG" in line]
            assert all(".128" in line for line in loads[:2]), (name, arch)
    for name, code in instructions_of(tmp_path / "sm_90.o").items():
        loads, stores, waits, triggers = (
            [i for i, line in enumerate(code) if op in line] for op in ("LDG", "STG", "ACQBULK", "PREEXIT")
        )
        assert bool(waits) == (name == "sum_parts_kernel") and (not waits or waits[0] < min(loads + stores))
        assert bool(triggers) == ("s_backward" in name) and (not triggers or max(stores) < triggers[0])
        if not (usual := re.fullmatch(r"(\w+)<Usual<.* (\d+)>>", name)):
            continue
        kernel, features = usual[1], int(usual[2])
        registers, *limits = BACKWARDS.get(kernel) or (GROUPS if kernel == "group_kernel" else USUAL)[features]
        assert figures[name, "90"][1] <= registers and all(map(int.__le__, before_the_store(code), limits)), name
        if features & BYTES and kernel == "usual_kernel" and BFLOAT16 in name:
            # One reciprocal of the scale, and no division. An extreme scale takes 16 instructions.
            found = [i for i, line in enumerate(code) if "MUFU.RCP" in line]
            ways = [[way for way in to_the_store(code, i) if ".SATFINITE" in str(way)] for i in found]
            assert any(ways) and all(str(way).count("MUFU") == 1 and len(way) <= 152 for way in sum(ways, []))
            assert all(min(map(len, some)) <= 120 for some in ways if some)


@needs_nvcc
def test_host_code_compiles_without_warnings():
    """Needs no CUDA build of torch: the CPU build has the headers too, only without a configuration of CUDA."""
    includes = [f"-isystem{p}" for p in (*cpp_extension.include_paths(), HOME / "include")]
    flags = "-fsyntax-only", "-std=c++20", "-Wall", "-Werror", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"
    run("g++", *flags, *includes, "csrc/cuda/cuda.cpp")
