"""The cases of the tests of the operators, which calls.py makes into calls, and what all tests use."""

import contextlib
import itertools
import operator
import os
import random
import subprocess
import sys
from pathlib import Path

import calls
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_rope

ROOT = Path(__file__).resolve().parents[1]  # the root of the repository
OPERATORS = sorted(
    name.removeprefix("rope::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("rope::")
)
EMULATED = torch_rope._C.devices == ("cuda emulated",)  # the CUDA kernels compute on CPU tensors
SLOW = EMULATED or (sys.platform == "linux" and "mps" in torch_rope._C.devices)  # a GPU's kernels run on the CPU


def schema_of(op: str) -> torch._C.FunctionSchema:
    """Returns the schema of torch.ops.rope.<op>."""
    return getattr(torch.ops.rope, op).default._schema


def written_by(op: str) -> list[str]:
    """Returns the names of the arguments that an operator writes in place."""
    return [a.name for a in schema_of(op).arguments if a.alias_info is not None]


def python(program: str, to_the_end: bool = False, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program in a new process that finds the same modules. There the CUDA kernels are not emulated.

    The process leaves out the steps by which Python ends, unless to_the_end is True: torch (2.13) aborts if one of its
    threads releases a tensor at that time.
    """
    program += "" if to_the_end else "\nimport os, sys\nsys.stdout.flush(), sys.stderr.flush(), os._exit(0)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, encoding="utf-8")


def missing(what: str) -> None:
    """Skips the test, or fails it if TORCH_ROPE_REQUIRE_ALL=1. what: the thing that is missing."""
    if os.environ.get("TORCH_ROPE_REQUIRE_ALL") == "1":
        pytest.fail(what)
    pytest.skip(what, allow_module_level=True)


def needed(module: str, minversion: str | None = None):
    """Imports and returns a module that this test or this file needs. See missing() for what happens without it."""
    try:
        return pytest.importorskip(module, minversion)
    except pytest.skip.Exception as skipped:
        missing(skipped.msg)


def on_gpu(device: str) -> bool:
    """Returns whether GPU kernels compute on tensors of this device: on a GPU, or emulated or simulated."""
    return device != "cpu" or EMULATED


def many(n: int, device: str) -> int:
    """Returns n, a number of tokens, or n // 20 if the kernels of a GPU run on the CPU."""
    return n // 20 if SLOW else n


class Calls(TorchDispatchMode):
    """Records the names of the operators that run while this mode is active."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.name())
        return op(*args, **kwargs or {})


def assert_same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    """Makes this dtype the default of torch within the context."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def thread_counts():
    """Sets the number of torch's threads to 1, 2 and 3, yields each number, and restores the number at the end."""
    before = torch.get_num_threads()
    try:
        for n in (1,) if SLOW else (1, 2, 3):
            torch.set_num_threads(n)
            yield n
    finally:
        torch.set_num_threads(before)


EXHAUSTIVE = os.environ.get("ROPE_EXHAUSTIVE") == "1"  # set by make exhaustive


def covering(
    factors: dict, allowed=lambda **case: True, strength: int = 2, interacting=(), exhaustive=None
) -> list[dict]:
    """Returns a short list of cases in which every combination of two values of different factors occurs.

    A case is a dict that gives each factor one of its values.

    Args:
        factors: the values of each factor, by name.
        allowed: ``allowed(**case)`` returns whether a case is possible. Combinations that no possible case has are left
            out.
        strength: how many factors a combination has that must occur; 1 if every value of a factor must.
        interacting: groups of names. Every combination of the values of a group occurs, because these factors interact.
        exhaustive: one more such group, with ROPE_EXHAUSTIVE=1 (make exhaustive) only. If it is None, ROPE_EXHAUSTIVE=1
            returns all possible cases.
    """
    names = list(factors)

    def case_of(indices):
        return {name: factors[name][i] for name, i in indices.items()}

    if EXHAUSTIVE and exhaustive is None:
        product = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
        return [case for case in product if allowed(**case)]
    if EXHAUSTIVE:
        interacting = [*interacting, exhaustive]
    elif SLOW:
        interacting = interacting[-1:]
    groups = list(dict.fromkeys([*itertools.combinations(names, strength), *interacting]))
    values_of = [operator.itemgetter(*group) for group in groups]  # the values of a group in a case
    missing = {}  # maps a group and values of it that no case has yet to these values by name
    for g, group in enumerate(groups):
        for values in itertools.product(*(range(len(factors[name])) for name in group)):
            fixed = dict(zip(group, values, strict=True))
            missing[g, values_of[g](fixed)] = fixed
    draw, sizes, chosen = random.Random(0), [(name, len(values)) for name, values in factors.items()], []

    def new(case):
        """Returns the combinations of a case that are still missing."""
        return [known for g, of_case in enumerate(values_of) if (known := (g, of_case(case))) in missing]

    while missing:
        wanted, fixed = next(iter(missing.items()))
        tries = ({name: int(draw.random() * n) for name, n in sizes} | fixed for _ in range(500))
        tries = list(itertools.islice((case for case in tries if allowed(**case_of(case))), 30))
        if tries:
            best = max(tries, key=lambda case: len(new(case)))
            chosen.append(case_of(best))
            for known in new(best):
                del missing[known]
        missing.pop(wanted, None)  # if it is still there, no allowed case has it
    return chosen


def name_of(case) -> str:
    """Returns the id of a case in pytest. It is the same in every process, as pytest-xdist requires."""

    def text(value):
        parts = map(text, value) if isinstance(value, (tuple, list)) else None
        return f"({', '.join(parts)})" if parts else str(getattr(value, "__name__", value)).removeprefix("torch.")

    return "-".join(map(text, case.values()))


# The factors of a call that rotates q and k.
SIZES = [(batch, min(seq, 10 if SLOW else seq), *heads) for batch, seq, *heads in calls.CALL["size"]]
CALLS = {name: calls.CALL[name] for name in ("source", "start", "q", "k", "dtype", "interleaved")} | {"size": SIZES}
# The groups of factors that decide which loop or kernel runs, and how wide its memory accesses are.
KERNELS = list(itertools.combinations(("q", "size", "dtype", "interleaved"), 3))
# The factors that make exhaustive combines completely. The layouts of q and k vary along with them.
ALL_CALLS = ("size", "source", "dtype", "interleaved")


def make_qk(device, **case):
    """Returns q, k and the other arguments of a call of rotate_qk. case: factors of calls.make."""
    need(device, case.get("dtype"), case["source"].freq_dtype)
    call = calls.make("rotate_qk", device, **case)
    return call.pop("q"), call.pop("k"), call


def need(device: str, *dtypes: torch.dtype | None) -> None:
    """Skips the test if the device lacks one of these dtypes."""
    if not calls.supported(device, *dtypes):
        pytest.skip("Apple GPUs have no float64 and no float8")
