"""The cases that the tests of the rotating operators draw from: layouts, caches, angle sources, sizes and dtypes."""

import contextlib
import itertools
import math
import operator
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_rope
from torch_rope.selfcheck import checks
from torch_rope.selfcheck.checks import DTYPES, QUANTISED, STARTS

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


def python(program: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program in a new process that finds the same modules. There the CUDA kernels are not emulated."""
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
        strength: 3 if every combination of three values must occur.
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
    missing = {
        (g, values): None
        for g, group in enumerate(groups)
        for values in itertools.product(*(range(len(factors[name])) for name in group))
    }
    draw, chosen = random.Random(0), []

    def new(case):
        """Returns the combinations of a case that are still missing."""
        return [known for g, of_case in enumerate(values_of) if (known := (g, of_case(case))) in missing]

    while missing:
        g, values = wanted = next(iter(missing))
        fixed = dict(zip(groups[g], values, strict=True))
        tries = ({name: draw.randrange(len(factors[name])) for name in names} | fixed for _ in range(500))
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


# Layouts that the self-check lacks.
MORE_LAYOUTS = {
    "sbhd": lambda make, b, s, h, d: make(s, b, h, d).transpose(0, 1),
    "bhds": lambda make, b, s, h, d: make(b, h, d, s).permute(0, 3, 1, 2),  # of a convolution
    "packed": lambda make, b, s, h, d: make(b, s, h + 3, d)[:, :, 1 : h + 1],
}


def _layout(function):
    def layout(shape, dtype, device):
        return function(lambda *s: torch.randn(s, dtype=torch.float64).to(dtype).to(device), *shape)

    return layout


# Memory layouts of a [batch, seq, heads, head_dim] tensor. A layout is a function (shape, dtype, device) -> tensor of
# random numbers; no two elements of the tensor share memory.
LAYOUTS = {name: _layout(function) for name, function in (checks.LAYOUTS | MORE_LAYOUTS).items()}


def _part_of_a_larger_one(make, n, size, heads, dim):
    return tuple(make(n + 2, size + 3, heads + 1, dim + 5)[1:-1, 2:-1, 1:, 4:-1] for _ in "kv")


# Memory layouts of a KV cache. A layout is a function (make, blocks, block_size, heads, head_dim) -> (k_cache, v_cache)
# that allocates memory with make(*shape). It returns the caches as the operator takes them: [blocks, block_size, heads,
# head_dim] or, if there is one block only, [max_seq, heads, head_dim].
CACHES = {
    "sequence": lambda make, _, size, h, d: (make(size, h, d), make(size, h, d)),  # SGLang's
    "heads sequence": lambda make, _, size, h, d: tuple(make(h, size, d).transpose(0, 1) for _ in "kv"),  # akunu's
    "blocks": lambda make, n, size, h, d: (make(n, size, h, d), make(n, size, h, d)),
    "blocks heads": lambda make, n, size, h, d: tuple(make(n, h, size, d).transpose(1, 2) for _ in "kv"),
    "kv blocks": lambda make, n, size, h, d: make(2, n, size, h, d).unbind(0),
    "blocks kv": lambda make, n, size, h, d: make(n, 2, size, h, d).unbind(1),  # FlashInfer's NHD
    "vLLM's LBNHC": lambda make, n, size, h, d: make(n, size, h, 2 * d).split([d, d], -1),
    "vLLM's LBHNC": lambda make, n, size, h, d: make(n, h, size, 2 * d).transpose(1, 2).split([d, d], -1),
    "vLLM's BLHNC": lambda make, n, size, h, d: make(n, 3, h, size, 2 * d)[:, 1].transpose(1, 2).split([d, d], -1),
    "strides of their own": lambda make, n, size, h, d: (make(n, size, h, d), make(n, h, size, d).transpose(1, 2)),
    "by channel": lambda make, n, size, h, d: (
        make(d, size, h, n).permute(3, 1, 2, 0),
        make(n, h, d, size).permute(0, 3, 1, 2),
    ),
    "part of a larger one": _part_of_a_larger_one,
}


def spread(t, steps, gaps):
    """Returns a copy of t with other strides: a view of a larger memory.

    Dimension d of the memory has size t.shape[d] * steps[d] + gaps[d], and the view takes every steps[d]-th index of
    it. The elements in between hold what a call must not read: NaN, or an integer outside of any table.
    """
    sizes = [size * step + gap for size, step, gap in zip(t.shape, steps, gaps, strict=True)]
    poison = math.nan if t.is_floating_point() else torch.iinfo(t.dtype).max
    memory = torch.full(sizes, poison, dtype=t.dtype)
    view = memory[tuple(slice(0, size * step, step) for size, step in zip(t.shape, steps, strict=True))]
    return view.copy_(t)


def moved(t, device):
    """Returns a copy of t on the device, with the same strides and with the same memory around it."""
    storage = t.as_strided((t.untyped_storage().size() // t.element_size(),), (1,), 0).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


# How tables, positions and frequencies lie in memory. Unless they are dense, cos, sin and positions have different
# strides, so that a kernel that uses the strides of one for another fails.
#   dense: without gaps.
#   apart: gaps between rows, of a size that keeps vectors of 16 bytes aligned in every dtype.
#   closer: gaps between rows that keep vectors of 16 bytes aligned in float32, but not in a 16-bit dtype.
#   strided: gaps between rows and between the elements of a row.
STRIDES = {
    # For each tensor the (steps, gaps) of spread, for its last dimensions: [batch, row, column], [batch, row, head,
    # column], [batch, token] or [part, pair].
    "dense": {},
    "apart": {
        "cos": ((1, 1, 1), (0, 1, 16)),
        "sin": ((1, 1, 1), (0, 2, 32)),
        "cos by head": ((1, 1, 1, 1), (0, 1, 2, 16)),
        "sin by head": ((1, 1, 1, 1), (0, 2, 1, 32)),
        "positions": ((1, 1), (0, 3)),
    },
    "closer": {"cos": ((1, 1, 1), (0, 1, 4)), "sin": ((1, 1, 1), (0, 2, 12))},
    "strided": {
        "cos": ((2, 1, 2), (1, 1, 3)),
        "sin": ((1, 2, 3), (0, 3, 1)),
        "cos by head": ((2, 1, 1, 2), (1, 1, 3, 3)),
        "sin by head": ((1, 2, 2, 3), (0, 3, 1, 1)),
        "positions": ((2, 3), (1, 2)),
        "inv_freq": ((3, 2), (1, 1)),
    },
}


@dataclass(frozen=True)
class Source:
    """An angle source: which arguments of a call give the angles, and how these tensors lie in memory."""

    # table (by position), token (table by token), token shared (one such table for all sequences), head (table by head),
    # head shared, inv_freq, inv_freq in two parts
    kind: str
    positions: str = ""  # "dtype shape", or "" for none
    offset: int = 0
    strides: str = "dense"  # a key of STRIDES
    freq_dtype: torch.dtype = torch.float32

    def __str__(self):
        parts = [self.kind, self.positions, self.strides.replace("dense", "")]
        parts += [f"offset{self.offset}" * (self.offset != 0), "float64" * (self.freq_dtype == torch.float64)]
        return "-".join(filter(None, parts))

    def arguments(self, batch, seq, rotary_dim, table_dtype, device, heads=1) -> dict:
        """Returns the arguments of a call by name. A table by position has seq + 40 rows.

        heads: the number of heads of q, and of k, if the tables are by head.
        """
        rows = seq + 40
        freq = torch_rope.inv_freq(rotary_dim).double()
        arguments = {"offset": self.offset} if self.offset else {}

        def laid_out(name, t):
            steps, gaps = STRIDES[self.strides].get(name, ((1, 1, 1, 1), (0, 0, 0, 0)))
            return moved(spread(t, steps[-t.dim() :], gaps[-t.dim() :]), device)

        if self.kind == "inv_freq":
            arguments["inv_freq"] = laid_out("inv_freq", freq.to(self.freq_dtype))
        elif self.kind == "inv_freq in two parts":  # the first part is not the nearest float32
            first = (freq * torch.rand(freq.shape)).float()
            arguments["inv_freq"] = laid_out("inv_freq", torch.stack([first, (freq - first).float()]))
        else:
            shapes = {"table": (rows,), "token": (batch, seq), "token shared": (1, seq)}
            shapes |= {"head": (batch, seq, heads), "head shared": (1, seq, heads)}
            angle = torch.randint(0, 3000, shapes[self.kind]).double().unsqueeze(-1) * freq
            suffix = " by head" * (angle.dim() == 4)
            arguments["cos"] = laid_out("cos" + suffix, angle.cos().to(table_dtype))
            arguments["sin"] = laid_out("sin" + suffix, angle.sin().to(table_dtype))
        if self.positions:
            dtype, shape = self.positions.split()
            low = -self.offset if self.kind == "table" else -20
            shape = {"[S]": (seq,), "[1,S]": (1, seq), "[B,S]": (batch, seq)}[shape]
            positions = torch.randint(low, rows - self.offset, shape).to(getattr(torch, dtype))
            arguments["positions"] = laid_out("positions", positions)
        return arguments


SOURCES = [
    Source("table"),
    Source("table", offset=7, strides="apart"),
    Source("table", "int64 [S]", offset=-3),
    Source("table", "int32 [B,S]", strides="strided"),
    Source("table", "int64 [1,S]", strides="closer"),
    Source("token"),
    Source("token shared", strides="strided"),
    Source("inv_freq", offset=11),
    Source("inv_freq", "int32 [1,S]", strides="strided"),
    Source("inv_freq", "int64 [B,S]", strides="apart", freq_dtype=torch.float64),
    Source("token", strides="apart"),
    Source("token", strides="strided"),
    Source("head", strides="apart"),
    Source("head shared", strides="strided"),
    Source("inv_freq in two parts", "int64 [B,S]", offset=3, strides="strided"),
]
# Only rotate_into_cache_ takes these, without slots: positions and offset choose the cells, and no angles.
CELLS = [
    Source("token", "int64 [B,S]", offset=-3, strides="strided"),
    Source("token shared", "int32 [S]"),
    Source("head", "int64 [1,S]", offset=9),
    Source("head shared", offset=2),
]


def some_slots(shape, cells, dtype, device, *, skipped=0.2):
    """Returns random slots below `cells`, no two of them equal; a share `skipped` of them is negative instead."""
    slots = torch.randperm(cells)[: math.prod(shape)].view(shape)
    padding = torch.tensor([-1, -2, -(2**31)])[torch.randint(0, 3, shape)]
    return torch.where(torch.rand(shape) < skipped, padding, slots).to(dtype).to(device)


def misplace_pads(angles, slots):
    """Changes the positions of pads (tokens with a negative slot) to numbers that a table by position has no row for."""
    positions = angles.get("positions")
    if positions is None or "cos" not in angles:
        return
    pads = slots.cpu() < 0
    if pads.dim() == 2 and positions.shape[:-1].numel() == 1:  # all sequences share the positions
        pads = pads.all(0)
    info = torch.iinfo(positions.dtype)
    numbers = torch.tensor([-1 - angles.get("offset", 0), info.min, info.max, 2**30])
    numbers = numbers[torch.randint(len(numbers), positions.shape)].to(positions)
    positions.copy_(torch.where(pads.view(positions.shape).to(positions.device), numbers, positions))


def set_apart(angles, batch, limit):
    """Changes the positions in `angles` so that every token of a sequence has a cache cell of its own.

    No two tokens of a sequence then have the same position, and position + offset is in [0, limit).
    """
    positions = angles.get("positions")
    if positions is not None:
        distinct = torch.rand(max(batch, 1), limit).argsort(-1)[:, : positions.shape[-1]] - angles.get("offset", 0)
        positions.copy_(distinct[: positions.shape[0]] if positions.dim() == 2 else distinct[0])


SIZES = [(batch, min(seq, 10 if SLOW else seq), *heads) for batch, seq, *heads in checks.SIZES]
SIZES += [(2, 4, 1, 3, 7, 6), (1, 3, 2, 1, 2, 2)]
# The factors of a call that rotates q and k.
CALLS = {
    "size": SIZES,
    "source": SOURCES,
    "start": list(STARTS),
    "q": list(LAYOUTS),
    "k": list(LAYOUTS),
    "dtype": DTYPES,
    "interleaved": [False, True],
}
# The groups of factors that decide which loop or kernel runs, and how wide its memory accesses are.
KERNELS = list(itertools.combinations(("q", "size", "dtype", "interleaved"), 3))
# The factors that make exhaustive combines completely. The layouts of q and k vary along with them.
ALL_CALLS = ("size", "source", "dtype", "interleaved")


def make_angles(size, source, table_dtype, device, start="first") -> tuple[int, dict]:
    """Returns the number of heads of k, and the arguments of a call that say how it rotates.

    If the tables are by head, k has as many heads as q. start: a key of STARTS.
    """
    batch, seq, q_heads, k_heads, head_dim, rotary_dim = size
    angles = source.arguments(batch, seq, rotary_dim, table_dtype, device, q_heads)
    if rotary_start := STARTS[start](head_dim - rotary_dim):
        angles["rotary_start"] = rotary_start
    return q_heads if source.kind.startswith("head") else k_heads, angles


def make_qk(device, size, source, q="bshd", k="bshd", dtype=torch.float32, table_dtype=None, start="first", **_):
    """Returns q, k and the arguments that say how a call rotates, for a case of CALLS.

    q is [batch, seq, q_heads, head_dim] and k is [batch, seq, k_heads, head_dim]. The arguments q and k name their
    layouts. Factors that are not in CALLS are ignored. table_dtype is float64 by default if dtype is float64, else
    float32.
    """
    need(device, dtype, source.freq_dtype)
    if table_dtype is None:
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    k_heads, angles = make_angles(size, source, table_dtype, device, start)
    heads = (q, size[2]), (k, k_heads)
    q, k = (LAYOUTS[layout](torch.Size((*size[:2], n, size[4])), dtype, device) for layout, n in heads)
    return q, k, angles


SCALES = [0.37, -2.5, 1.0, 2.0**-20, 1e30, 1e-30, 0.0, math.inf, math.nan, 1e-45]  # usual and unusual ones


def supported(device: str, *dtypes: torch.dtype | None) -> bool:
    """Returns whether the device has these dtypes. Apple GPUs have no float64 and no float8."""
    return device != "mps" or not ({torch.float64, *QUANTISED} - {torch.int8}) & {*dtypes}


def need(device: str, *dtypes: torch.dtype | None) -> None:
    """Skips the test if the device lacks one of these dtypes."""
    if not supported(device, *dtypes):
        pytest.skip("Apple GPUs have no float64 and no float8")
