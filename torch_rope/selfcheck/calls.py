"""Makes legal calls of the operators.

``make`` makes the arguments of a call from a description: sizes, dtypes, memory layouts, where the angles come from, and
what a norm and a cache add. ``factors`` has the values that a description is chosen from, and ``describe`` chooses.
tests/calls.py in the repository adds layouts, sources and values.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# The dtypes of quantised results, and their least and largest numbers.
QUANTISED = {torch.float8_e4m3fn: (-448, 448), torch.float8_e5m2: (-57344, 57344), torch.int8: (-128, 127)}

# (batch, seq, heads of q, heads of k and v, head_dim, rotary_dim)
SIZES = [(2, 5, 3, 1, 64, 64), (4, 1, 9, 3, 64, 64), (1, 130, 4, 2, 128, 128), (3, 7, 2, 2, 80, 32)]
SIZES += [(2, 3, 5, 1, 66, 66), (2, 2, 1, 1, 100, 52), (2, 6, 3, 3, 192, 64), (2, 4, 1, 3, 7, 6), (1, 3, 2, 1, 2, 2)]
# The first rotated channel, given head_dim - rotary_dim. With "middle", vectors of 16 bytes stay aligned.
STARTS = {"first": lambda rest: 0, "second": lambda rest: min(rest, 1), "middle": lambda rest: rest // 16 * 8}
STARTS["last"] = lambda rest: rest

# Layouts of a tensor [batch, seq, heads, head_dim]: functions that view memory which make(*shape) returns.
LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "bshd": lambda make, b, s, h, d: make(b, s, h, d),
    "bhsd": lambda make, b, s, h, d: make(b, h, s, d).transpose(1, 2),
    "packed": lambda make, b, s, h, d: make(b, s, h + 3, d)[:, :, 1 : h + 1],
    "every second channel": lambda make, b, s, h, d: make(b, s, h, 2 * d)[..., ::2],
    "odd start": lambda make, b, s, h, d: make(b * s * h * d + 1)[1:].view(b, s, h, d),
}
# Layouts of a KV cache: functions (make, blocks, block_size, heads, head_dim) that return k_cache and v_cache as the
# operator takes them, [blocks, block_size, heads, head_dim] or, if there is one block only, [max_seq, heads, head_dim].
CACHES: dict[str, Callable[..., Any]] = {
    "sequence": lambda make, _, size, h, d: (make(size, h, d), make(size, h, d)),  # SGLang's
    "blocks": lambda make, n, size, h, d: (make(n, size, h, d), make(n, size, h, d)),
    "vLLM's LBHNC": lambda make, n, size, h, d: make(n, h, size, 2 * d).transpose(1, 2).split([d, d], -1),
    "strides of their own": lambda make, n, size, h, d: (make(n, size, h, d), make(n, h, size, d).transpose(1, 2)),
    "by channel": lambda make, n, size, h, d: tuple(make(d, size, h, n).permute(3, 1, 2, 0) for _ in "kv"),
}
# The (steps, gaps) of spread for the last dimensions of small tensors. A tensor that is not named has no gaps.
STRIDES: dict[str, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {"dense": {}}
STRIDES["strided"] = {
    "cos": ((2, 1, 2), (1, 1, 3)),
    "sin": ((1, 2, 3), (1, 3, 1)),
    "positions": ((2, 3), (1, 2)),
    "inv_freq": ((3, 2), (1, 1)),
    "slots": ((3, 2), (1, 5)),
    "q_norm_weight": ((1, 2), (0, 1)),
    "k_norm_weight": ((1, 3), (1, 2)),
    "v_norm_weight": ((2,), (1,)),
    "q_factor": ((2, 1, 3), (1, 2, 1)),
}


def spread(t: Tensor, steps: tuple[int, ...], gaps: tuple[int, ...], device="cpu") -> Tensor:
    """Returns a copy of t on the device with other strides: a view of a larger memory.

    Dimension d of the memory has size t.shape[d] * steps[d] + gaps[d], and the view takes every steps[d]-th index of
    it. The elements in between hold what a call must not read: NaN, or an integer outside of any table.
    """
    sizes = [size * step + gap for size, step, gap in zip(t.shape, steps, gaps, strict=True)]
    poison = math.nan if t.is_floating_point() else torch.iinfo(t.dtype).max
    memory = torch.full(sizes, poison, dtype=t.dtype, device=device)
    return memory[tuple(slice(0, n * step, step) for n, step in zip(t.shape, steps, strict=True))].copy_(t)


def laid_out(t: Tensor, strides: str, name: str, device) -> Tensor:
    """Returns a copy of the tensor of this name on the device. strides: a key of STRIDES."""
    steps, gaps = STRIDES[strides].get(name, ((), ()))
    missing, first = t.dim() - len(steps), max(len(steps) - t.dim(), 0)
    return spread(t, (1,) * missing + steps[first:], (0,) * missing + gaps[first:], device)


def filled(dtype: torch.dtype, device) -> Callable[..., Tensor]:
    """Returns a function of a shape that makes a tensor of random numbers, whose mean is 0 and whose variance is 1.

    They are the same on every processor, as those of torch.randn are only in float64, where it is slow.
    """
    drawn = dtype if dtype == torch.float64 else torch.float32  # torch draws no float8
    return lambda *shape: ((torch.rand(2, *shape, dtype=drawn).sum(0) - 1) * 6**0.5).to(dtype).to(device)


@dataclass(frozen=True)
class Source:
    """An angle source: which arguments of a call give the angles, and how these tensors lie in memory."""

    # table (by position), token (table by token), token shared (one such table for all sequences), head (table by head),
    # head shared, inv_freq, inv_freq in two parts
    kind: str = "table"
    positions: str = ""  # "dtype shape", or "" for none
    offset: int = 0
    strides: str = "dense"  # a key of STRIDES
    freq_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.kind, self.positions, self.strides, self.offset) if part)

    def takes_slots(self) -> bool:
        """Returns whether slots may be given: positions and offset do not only choose the cells of a cache."""
        return self.kind == "table" or "inv_freq" in self.kind or not (self.positions or self.offset)

    def arguments(self, batch, seq, rotary_dim, table_dtype, device, heads=1, rows=None) -> dict[str, Any]:
        """Returns the arguments of a call by name.

        heads: the number of heads of q, and of k, if the tables are by head. rows: of a table by position.
        """
        rows, found = rows or seq + 40, {}
        freq = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
        if self.kind == "inv_freq":
            found["inv_freq"] = freq.to(self.freq_dtype)
        elif self.kind == "inv_freq in two parts":  # the first part is not the nearest float32
            first = (freq * torch.rand(freq.shape)).float()
            found["inv_freq"] = torch.stack([first, (freq - first).float()])
        else:
            shapes = {"table": (rows,), "token": (batch, seq), "head": (batch, seq, heads)}
            shapes |= {"token shared": (1, seq), "head shared": (1, seq, heads)}
            angle = torch.randint(0, 3000, shapes[self.kind]).double().unsqueeze(-1) * freq
            found |= {"cos": angle.cos().to(table_dtype), "sin": angle.sin().to(table_dtype)}
        if self.positions:
            dtype, shape = self.positions.split()
            low = -self.offset if self.kind == "table" else -20
            sizes = {"[S]": (seq,), "[1,S]": (1, seq), "[B,S]": (batch, seq)}[shape]
            found["positions"] = torch.randint(low, rows - self.offset, sizes).to(getattr(torch, dtype))
        tensors = {name: laid_out(t, self.strides, name, device) for name, t in found.items()}
        return tensors | ({"offset": self.offset} if self.offset else {})


SOURCES = [
    Source("table"),
    Source("table", "int64 [S]", offset=-3),
    Source("table", "int32 [B,S]", strides="strided"),
    Source("token"),
    Source("token shared", strides="strided"),
    Source("inv_freq", offset=11),
    Source("inv_freq", "int32 [1,S]", strides="strided"),
    Source("inv_freq", "int64 [B,S]", strides="strided", freq_dtype=torch.float64),
    Source("head shared", strides="strided"),
    Source("inv_freq in two parts", "int64 [B,S]", offset=3, strides="strided"),
]
# Only rotate_into_cache_ takes these, without slots: positions and offset choose the cells, and no angles.
CELLS = [Source("token", "int64 [B,S]", offset=-3, strides="strided"), Source("head", "int64 [1,S]", offset=9)]


# A weight is kept in float32 or in the dtype of x ("own"). Its elements are adjacent in memory unless it is strided.
WEIGHTS = ["float32", "own", "float32 strided", "own strided"]
# The factors that a call of an operator has if it has this argument, and their values. A factor is an argument of make.
FACTORS: dict[str, dict[str, list]] = {
    "positions": {
        "size": SIZES,
        "source": SOURCES,
        "start": list(STARTS),
        "q": list(LAYOUTS),
        "k": list(LAYOUTS),
        "dtype": DTYPES,
        "interleaved": [False, True],
        "tables": ["float32", "dtype of x"],
        "attention_factor": [1.0, 1.2079441541679836, -0.37],
    },
    "inverse": {"inverse": [False, True]},
    "q_norm_weight": {
        "q_weight": WEIGHTS,
        "k_weight": WEIGHTS,
        "over_heads": [False, True],  # whether all heads of a token are normalised together, with a weight for each
        "norm_eps": [1e-6, 1e-5, 0.5, 1e3],
    },
    "norm_weight_offset": {"norm_weight_offset": [0.0, 1.0]},
    "q_factor": {"q_factor": [None, None, "[S]", "[1,S]", "[B,S]", "[1,S,H]", "[B,S,H]"]},  # the last two are strided
    "k_cache": {
        "source": SOURCES + CELLS,
        "q_weight": [None, None, *WEIGHTS],  # None: there is no norm
        "q": ["qkv", *LAYOUTS],  # qkv: q, k and v are slices of one tensor
        "v": list(LAYOUTS),
        "v_shape": [None, None, (1, 201), (3, 16)],  # heads and head_dim; None: those of k
        "cache": list(CACHES),
        "slots": ["none", "int64", "strided int32"],
        "quantised": [(None, None), *((k, v) for k in (None, *QUANTISED) for v in QUANTISED)],
        "q_out": [None, "q", *LAYOUTS],
        "q_dtype": [None, *QUANTISED],  # None: that of q
        "norm_v": [False, True],
        "v_weight": [None, *WEIGHTS],
    },
}


def arguments_of(op: str) -> dict[str, Any]:
    """Returns what the schema says about each argument of an operator, by name."""
    return {a.name: a for a in getattr(torch.ops.rope, op).default._schema.arguments}


def taken(op: str, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that an operator takes, in its order, without those that have their default."""
    given = {name: (call[name], a.default_value) for name, a in arguments_of(op).items() if name in call}
    return {name: value for name, (value, default) in given.items() if isinstance(value, Tensor) or value != default}


def factors(op: str, table: dict[str, dict[str, list]] = FACTORS) -> dict[str, list]:
    """Returns the values of each factor of a call of this operator."""
    arguments = arguments_of(op)
    return {factor: v for name, values in table.items() if name in arguments for factor, v in values.items()}


def allowed(size, source, cache="", slots="none", q_out=None, q_dtype=None, **_) -> bool:
    """Returns whether an operator takes these arguments together."""
    cells = source.takes_slots() if slots != "none" else size[0] == 1 or "sequence" not in cache
    return cells and (q_dtype is None or q_out not in (None, "q"))


def supported(device, *dtypes: torch.dtype | None) -> bool:
    """Returns whether the device has these dtypes. Apple GPUs have no float64 and no float8."""
    return torch.device(device).type != "mps" or not ({torch.float64, *QUANTISED} - {torch.int8}) & {*dtypes}


def describe(op: str, pick: random.Random, device="cpu", table=FACTORS, allowed=allowed, **given) -> dict[str, Any]:
    """Returns a random description of a call that the device supports, with these values of some factors."""
    while True:
        case = {name: pick.choice(values) for name, values in factors(op, table).items()} | given
        if allowed(**case) and supported(device, case["dtype"], case["source"].freq_dtype):
            return case


def make(
    op: str, device="cpu", *, size=SIZES[0], source=SOURCES[0], start="first", dtype=torch.float32, tables="float32",
    rows=None, q="bshd", k="bhsd", v="packed", q_weight=None, k_weight="float32 strided", v_weight=None,
    over_heads=False, q_factor=None, cache="strides of their own", blocks=None, cells=None, slots="none", v_shape=None,
    quantised=(None, None), q_out=None, q_dtype=None, **flags,
) -> dict[str, Any]:  # fmt: skip
    """Returns the arguments of a call by name.

    Args:
        size, source, start, ...: the factors of the call, whose values factors() has. What the operator does not take is
            left out.
        rows: the number of rows of a table by position; by default seq + 40.
        blocks, cells: the number of blocks of the caches, and of cells of each block.
        flags: the arguments that are no tensors.
    """
    batch, seq, heads, kv_heads, head_dim, rotary_dim = size
    kv_heads = heads if source.kind.startswith("head") else kv_heads
    # On a device without float8, int8 stands for it.
    q_dtype, k_dtype, v_dtype = (d if supported(device, d) else torch.int8 for d in (q_dtype, *quantised))

    def tensor(layout, heads, head_dim=head_dim, dtype=dtype):
        return LAYOUTS[layout](filled(dtype, device), batch, seq, heads, head_dim)

    if q == "qkv":
        qkv = tensor("bshd", heads + 2 * kv_heads).split([heads, kv_heads, kv_heads], 2)
        call = dict(zip("qkv", qkv, strict=True))
    else:
        call = {"q": tensor(q, heads), "k": tensor(k, kv_heads), "v": tensor(v, kv_heads)}
    if v_shape:
        call["v"] = tensor(v, *v_shape)
    if q_out:
        call["q_out"] = call["q"] if q_out == "q" else tensor(q_out, heads, dtype=q_dtype or dtype)
    call |= source.arguments(batch, seq, rotary_dim, dtype if "x" in tables else torch.float32, device, heads, rows)
    call |= {"x": call["q"], "rotary_start": STARTS[start](head_dim - rotary_dim)}

    def take(name, t, kind):
        call[name] = laid_out(t, "strided" if "strided" in kind else "dense", name, device)

    def take_weight(name, kind, *shape):
        weight = torch.rand(*shape, dtype=torch.float64) * 2 - 0.5  # of both signs
        take(name, weight.to(dtype if "own" in kind else torch.float32), kind)

    if q_weight or "norm" in op:
        take_weight("q_norm_weight", q_weight or "float32", *[heads] * over_heads, head_dim)
        take_weight("k_norm_weight", k_weight, *[kv_heads] * over_heads, head_dim)
    if v_weight and flags.get("norm_v"):
        take_weight("v_norm_weight", v_weight, call["v"].shape[-1])
    if q_factor:
        sizes = [{"1": 1, "B": batch, "S": seq, "H": heads}[size] for size in q_factor[1:-1].split(",")]
        take("q_factor", torch.rand(sizes) + 0.5, "strided" if "H" in q_factor else "dense")
    if "cache" in op:
        cell_count = rows or seq + 40
        if "positions" in call and slots == "none":  # each token of a sequence is written to a cell of its own
            order = torch.rand(max(batch, 1), cell_count)
            order[:, -1] = -1.0  # the last cell is one of them
            positions = call["positions"]
            order = order.argsort(-1)[: positions.shape[:-1].numel(), :seq]
            positions.copy_(order.view(positions.shape) - source.offset)
        blocks = 1 if "sequence" in cache else batch + 2 if blocks is None else blocks
        cells = cells or (cell_count * max(batch, 1) if "sequence" in cache else cell_count)
        of_k, of_v = (k_dtype, kv_heads, head_dim), (v_dtype, *(v_shape or (kv_heads, head_dim)))
        caches = [CACHES[cache](filled(of or dtype, device), blocks, cells, *shape) for of, *shape in (of_k, of_v)]
        call["k_cache"], call["v_cache"] = caches[0] if of_k == of_v else (caches[0][0], caches[1][1])
        if slots != "none":
            found = torch.randperm(blocks * cells)[: batch * seq].view(batch, seq)
            found = found.masked_fill(torch.rand(batch, seq) < 0.2, -1)  # pads, which write nothing
            found = found.to(torch.int32 if "int32" in slots else torch.int64)
            call["slots"] = laid_out(found, "strided" if "strided" in slots else "dense", "slots", device)
        for name, of in ("q", q_dtype if q_out else None), ("k", k_dtype), ("v", v_dtype):
            if of:
                call[f"{name}_scale"] = ((torch.rand(call[name].shape[-2]) + 0.5) * 4 / QUANTISED[of][1]).to(device)
    return taken(op, call | flags)
