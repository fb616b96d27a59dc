"""The launch plans of csrc/cuda/plan.h, for calls whose tensors have no memory. Needs g++ and pybind11, no torch and no GPU."""

import importlib.machinery
import importlib.util
import random
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests/backends/cuda/emulator/plan.cpp"
PROCESSORS = 132  # multiprocessors of an H200
BFLOAT16, HEAD_DIM, BLOCK_SIZE = 1, 128, 16
# The tensors of a call. Tensor i begins at address i << 40, which names it again.
TENSORS = ["", "q", "k", "v", "q_out", "k_out", "v_out", "positions", "slots", "cos", "sin"]


@cache
def module():
    """Builds the Python module rope_plan if it is older than its sources, and returns it."""
    import pybind11

    library = ROOT / "build" / f"plan-{sys.implementation.cache_tag}" / "rope_plan.so"
    made_of = [SOURCE, *ROOT.glob("csrc/*.h"), ROOT / "csrc/cuda/plan.h"]
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in made_of):
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_suffix(f".{random.SystemRandom().getrandbits(32)}")
        include = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
        flags = ["-std=c++20", "-O0", "-Wall", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
        subprocess.run(["g++", *flags, *include, SOURCE, "-o", new], check=True)
        new.replace(library)
    loader = importlib.machinery.ExtensionFileLoader("rope_plan", str(library))
    found = importlib.util.module_from_spec(importlib.util.spec_from_loader("rope_plan", loader))
    loader.exec_module(found)
    return found


def tensor_at(address: int) -> str | None:
    return TENSORS[address >> 40] if 0 < address >> 40 < len(TENSORS) else None


def plan(operator: str, tokens: int, heads: tuple[int, int], in_place: bool = True) -> dict:
    """Returns the plan of a call in bfloat16 on one sequence, with int64 positions and tables in float32.

    operator: "rotate", "cache" or "norm cache"; a cache has blocks of 16 cells, and the call has slots."""
    q_heads, k_heads = heads
    into_cache = "cache" in operator

    def given(name, *sizes):
        strides, step = [], 1
        for size in reversed(sizes):
            strides.insert(0, step)
            step *= size
        return TENSORS.index(name) << 40, strides

    def activations(name, heads):
        return given(name, 1, tokens, heads, HEAD_DIM)

    blocks = -(-max(tokens, 1) // BLOCK_SIZE)

    def result(name, heads):
        if into_cache and name != "q":
            return given(f"{name}_out", blocks, BLOCK_SIZE, heads, HEAD_DIM)
        return activations(name if in_place or into_cache else f"{name}_out", heads)

    operands = [("q", q_heads), ("k", k_heads), *[("v", k_heads)] * into_cache]
    sides = [(activations(name, n), result(name, n)) for name, n in operands]
    return module().plan(
        PROCESSORS,
        BFLOAT16,
        (1, tokens, HEAD_DIM, HEAD_DIM, 0, HEAD_DIM * into_cache),
        (q_heads, k_heads, k_heads * into_cache),
        [*sides, *[(None, None)] * (3 - len(sides))],
        (blocks, BLOCK_SIZE) if into_cache else (0, 0),
        given("positions", 1, tokens),
        given("slots", 1, tokens) if into_cache else None,
        *((given(name, 1, 40960, HEAD_DIM // 2)[0], [0, HEAD_DIM // 2, 0, 1]) for name in ("cos", "sin")),
        0,
        40960,
        1,
        "norm" in operator,
        0,
    )
