"""The cases that every test of the rotating operators runs over: layouts, caches, angle sources and sizes."""

import itertools
import math
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import torch_rope

ROOT = Path(__file__).resolve().parents[1]  # of the repository
OPERATORS = sorted(
    name.removeprefix("rope::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("rope::")
)
EMULATED = torch_rope._C.devices == ("cuda emulated",)  # tensors of the CPU go through the kernels of CUDA


def on_cuda(device: str) -> bool:
    return device == "cuda" or EMULATED


def schema_of(op: str) -> torch._C.FunctionSchema:
    return getattr(torch.ops.rope, op).default._schema


def python(program: str, **environment: str) -> subprocess.CompletedProcess:
    """In a process of its own, with the same modules, and never emulated."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, encoding="utf-8")


def on_gpu(device: str) -> bool:
    return device != "cpu" or EMULATED


def checks_ranges(device: str) -> bool:
    """Whether a bad position or slot in a tensor is an IndexError: the CPU looks before it writes, a GPU in the kernel."""
    return not on_gpu(device)


def opcheck(op: str, args: tuple, keywords: dict, device: str) -> None:
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device != "mps":  # where torch's check says that it does not know the device
        tests.append("test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.rope, op).default, args, keywords, test_utils=tests)


EXHAUSTIVE = os.environ.get("ROPE_EXHAUSTIVE") == "1"


def covering(factors: dict, allowed=lambda **case: True, strength: int = 2, interacting=()) -> list[dict]:
    """Few cases in which any two values (or three: strength) of different factors stand together.

    factors: name -> values. A case is a dict, name -> value. interacting: groups of names whose values stand together in
    every combination, because they interact. allowed(**case) tells which cases there are at all. make exhaustive sets
    ROPE_EXHAUSTIVE=1, which gives every allowed case.
    """
    names = list(factors)

    def case_of(indices):
        return {name: factors[name][i] for name, i in indices.items()}

    if EXHAUSTIVE:
        product = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
        return [case for case in product if allowed(**case)]
    groups = [*itertools.combinations(names, strength), *interacting]
    missing = dict.fromkeys(
        tuple(zip(group, indices, strict=True))
        for group in groups
        for indices in itertools.product(*(range(len(factors[name])) for name in group))
    )
    draw, chosen = random.Random(0), []

    def new(case):
        return [known for group in groups if (known := tuple((name, case[name]) for name in group)) in missing]

    while missing:
        wanted = next(iter(missing))
        tries = ({name: draw.randrange(len(factors[name])) for name in names} | dict(wanted) for _ in range(500))
        tries = list(itertools.islice((case for case in tries if allowed(**case_of(case))), 30))
        if tries:
            best = max(tries, key=lambda case: len(new(case)))
            chosen.append(case_of(best))
            for known in new(best):
                del missing[known]
        missing.pop(wanted, None)  # no allowed case has it
    return chosen


def name_of(case) -> str:
    """The id of a case in pytest."""
    return "-".join(str(getattr(value, "__name__", value)).removeprefix("torch.") for value in case.values())


def _dense(shape, dtype, device):
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=torch.float64, device="cpu").to(dtype).to(device)


def _strided(order):
    """Stored with its dimensions in this order, seen as [batch, seq, heads, head_dim]."""

    def make(shape, dtype, device):
        stored = _dense([shape[d] for d in order], dtype, device)
        return stored.permute(*(order.index(d) for d in range(4)))

    return make


def _slice_of_packed(shape, dtype, device):
    batch, seq, heads, head_dim = shape
    return _dense((batch, seq, heads + 3, head_dim), dtype, device)[:, :, 1 : heads + 1]


def _every_second_channel(shape, dtype, device):
    return _dense((*shape[:3], 2 * shape[3]), dtype, device)[..., ::2]


def _odd_start(shape, dtype, device):
    return _dense((shape.numel() + 1,), dtype, device)[1:].view(shape)


# name -> function of (shape, dtype, device): a [batch, seq, heads, head_dim] tensor whose elements do not share memory
LAYOUTS = {
    "bshd": _dense,
    "bhsd": _strided((0, 2, 1, 3)),
    "sbhd": _strided((1, 0, 2, 3)),
    "channels first": _strided((0, 3, 1, 2)),
    "packed": _slice_of_packed,
    "every second channel": _every_second_channel,
    "odd start": _odd_start,
}


def _part_of_a_larger_one(make, n, size, heads, dim):
    return tuple(make(n + 2, size + 3, heads + 1, dim + 5)[1:-1, 2:-1, 1:, 4:-1] for _ in "kv")


# name -> function of (make, blocks, block_size, heads, head_dim), where make(*shape) is memory: (k_cache, v_cache) as
# the operator takes them, [blocks, block_size, heads, head_dim] or, for one block, [max_seq, heads, head_dim].
CACHES = {
    "sequence": lambda make, _, size, h, d: (make(size, h, d), make(size, h, d)),
    "heads sequence": lambda make, _, size, h, d: tuple(make(h, size, d).transpose(0, 1) for _ in "kv"),  # akunu
    "blocks": lambda make, n, size, h, d: (make(n, size, h, d), make(n, size, h, d)),  # vLLM's NHD
    "blocks heads": lambda make, n, size, h, d: tuple(make(n, h, size, d).transpose(1, 2) for _ in "kv"),  # HF; HND
    "kv blocks": lambda make, n, size, h, d: make(2, n, size, h, d).unbind(0),  # vLLM's FlashAttention
    "blocks kv": lambda make, n, size, h, d: make(n, 2, size, h, d).unbind(1),  # FlashInfer's NHD
    "blocks kv heads": lambda make, n, size, h, d: make(n, 2, h, size, d).transpose(2, 3).unbind(1),  # and its HND
    "kv in a row": lambda make, n, size, h, d: make(n, size, h, 2 * d).split(d, -1),
    "strides of their own": lambda make, n, size, h, d: (make(n, size, h, d), make(n, h, size, d).transpose(1, 2)),
    "values by channel": lambda make, n, size, h, d: (make(n, size, h, d), make(n, h, d, size).permute(0, 3, 1, 2)),
    "part of a larger one": _part_of_a_larger_one,
}


@dataclass(frozen=True)
class Source:
    """How a call says its angles."""

    kind: str  # table, token, inv_freq
    positions: str = ""  # dtype and shape, or none
    offset: int = 0
    strided: bool = False  # tables cut out of full-width ones, positions and inv_freq every second element
    freq_dtype: torch.dtype = torch.float32

    def __str__(self):
        return "-".join(
            [self.kind, *([self.positions] if self.positions else []), *(["strided"] if self.strided else [])]
            + ([f"offset{self.offset}"] if self.offset else [])
            + (["float64"] if self.freq_dtype == torch.float64 else [])
        )

    def arguments(self, batch, seq, rotary_dim, table_dtype, device) -> dict:
        rows, half = seq + 40, rotary_dim // 2
        freq = torch_rope.inv_freq(rotary_dim).double()
        arguments = {"offset": self.offset} if self.offset else {}

        def cut(t):
            return torch.stack([t, t], -1).flatten(-2)[..., ::2] if self.strided else t

        if self.kind == "inv_freq":
            arguments["inv_freq"] = cut(freq).to(self.freq_dtype).to(device)
        else:
            shape = {"table": (rows,), "token": (batch, seq), "token shared": (1, seq)}[self.kind]
            angle = torch.randint(0, 3000, shape).double().unsqueeze(-1) * freq
            arguments["cos"], arguments["sin"] = (
                torch.cat([t, t], -1).to(table_dtype).to(device)[..., :half]
                if self.strided
                else t.to(table_dtype).to(device)
                for t in (angle.cos(), angle.sin())
            )
        if self.positions:
            dtype, shape = self.positions.split()
            low = -self.offset if self.kind == "table" else -20
            positions = torch.randint(
                low, rows - self.offset, {"[S]": (seq,), "[1,S]": (1, seq), "[B,S]": (batch, seq)}[shape]
            )
            arguments["positions"] = cut(positions.to(getattr(torch, dtype)).to(device))
        return arguments


SOURCES = [
    Source("table"),
    Source("table", offset=7),
    Source("table", "int64 [S]", offset=-3),
    Source("table", "int32 [B,S]", strided=True),
    Source("table", "int64 [1,S]"),
    Source("token"),
    Source("token shared", strided=True),
    Source("inv_freq", offset=11),
    Source("inv_freq", "int32 [1,S]", strided=True),
    Source("inv_freq", "int64 [B,S]", freq_dtype=torch.float64),
]


def some_slots(shape, cells, dtype, device, *, skipped=0.2):
    """No two equal, some negative."""
    slots = torch.randperm(cells)[: math.prod(shape)].view(shape)
    padding = torch.tensor([-1, -2, -(2**31)])[torch.randint(0, 3, shape)]
    return torch.where(torch.rand(shape) < skipped, padding, slots).to(dtype).to(device)


def set_apart(angles, batch, limit):
    """Gives every token of a row a position of its own, below limit with the offset added: one cell for each token."""
    positions = angles.get("positions")
    if positions is not None:
        places = torch.rand(batch, limit).argsort(-1)[:, : positions.shape[-1]] - angles.get("offset", 0)
        positions.copy_(places[: positions.shape[0]] if positions.dim() == 2 else places[0])


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# (batch, seq, heads of q, heads of k, head_dim, rotary_dim)
SIZES = [
    (2, 5, 3, 1, 64, 64),
    (1, 1, 9, 3, 64, 64),
    (1, 130, 4, 2, 128, 128),
    (3, 7, 2, 2, 80, 32),
    (2, 3, 5, 1, 66, 66),
    (2, 4, 1, 3, 7, 6),
    (1, 3, 2, 1, 2, 2),
    (2, 2, 1, 1, 100, 52),
]


def combinations():
    """Every layout, source and size, each with every other at least once, without the full product."""
    layouts = list(LAYOUTS)
    for (i, size), (j, source) in itertools.product(enumerate(SIZES), enumerate(SOURCES)):
        q, k = layouts[(i + j) % len(layouts)], layouts[(i + 3 * j + 1) % len(layouts)]
        yield size, source, q, k


def supported(device: str, dtype: torch.dtype, source: Source | None = None) -> bool:
    """Apple GPUs have no float64."""
    return device != "mps" or torch.float64 not in (dtype, source.freq_dtype if source else None)
