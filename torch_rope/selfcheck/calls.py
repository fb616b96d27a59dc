"""Makes legal calls of every operator, for the self-check and for the tests of the repository.

``make`` makes the arguments of a call from a description: sizes, dtypes, memory layouts, where the angles come from, and
what a norm and a cache add. ``factors`` has the values that a description is chosen from, and ``describe`` chooses.
Arguments that could be mistaken for one another may differ in every respect: q and k in their heads and strides, and cos,
sin, positions, weights, scales and caches in their strides.

This file needs torch alone. tests/tools/bits.py loads it without the package that it belongs to.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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

# ---- memory layouts ----

# Layouts of a tensor [batch, seq, heads, head_dim]: functions that view memory which make(*shape) returns.
LAYOUTS = {
    "bshd": lambda make, b, s, h, d: make(b, s, h, d),
    "bhsd": lambda make, b, s, h, d: make(b, h, s, d).transpose(1, 2),
    "sbhd": lambda make, b, s, h, d: make(s, b, h, d).transpose(0, 1),
    "bhds": lambda make, b, s, h, d: make(b, h, d, s).permute(0, 3, 1, 2),  # of a convolution
    "packed": lambda make, b, s, h, d: make(b, s, h + 3, d)[:, :, 1 : h + 1],
    "every second channel": lambda make, b, s, h, d: make(b, s, h, 2 * d)[..., ::2],
    "odd start": lambda make, b, s, h, d: make(b * s * h * d + 1)[1:].view(b, s, h, d),
}
EXPANDED = {  # a tensor that is only read may have stride 0
    "batch expanded": lambda make, b, s, h, d: make(1, s, h, d).expand(b, -1, -1, -1),
    "heads expanded": lambda make, b, s, h, d: make(b, s, 1, d).expand(-1, -1, h, -1),
}


def _part_of_a_larger_one(make, n, size, heads, dim):
    return tuple(make(n + 2, size + 3, heads + 1, dim + 5)[1:-1, 2:-1, 1:, 4:-1] for _ in "kv")


# Layouts of a KV cache: functions (make, blocks, block_size, heads, head_dim) that return k_cache and v_cache as the
# operator takes them, [blocks, block_size, heads, head_dim] or, if there is one block only, [max_seq, heads, head_dim].
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

# How tables, positions and frequencies lie in memory. For each tensor STRIDES has the (steps, gaps) of spread, for its
# last dimensions: [batch, row, column], [batch, row, head, column], [batch, token] or [part, pair].
#   dense: without gaps.
#   apart: gaps between rows, of a size that keeps vectors of 16 bytes aligned in every dtype.
#   closer: gaps between rows that keep vectors of 16 bytes aligned in float32, but not in a 16-bit dtype.
#   strided: gaps between rows and between the elements of a row.
STRIDES = {
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
        "slots": ((3, 2), (1, 5)),
        "q_weight": ((1, 2), (0, 1)),
        "k_weight": ((1, 3), (1, 2)),
        "q_scale": ((4,), (1,)),
        "k_scale": ((2,), (1,)),
        "v_scale": ((3,), (1,)),
    },
}


def spread(t: Tensor, steps: tuple[int, ...], gaps: tuple[int, ...]) -> Tensor:
    """Returns a copy of t with other strides: a view of a larger memory.

    Dimension d of the memory has size t.shape[d] * steps[d] + gaps[d], and the view takes every steps[d]-th index of
    it. The elements in between hold what a call must not read: NaN, or an integer outside of any table.
    """
    sizes = [size * step + gap for size, step, gap in zip(t.shape, steps, gaps, strict=True)]
    poison = math.nan if t.is_floating_point() else torch.iinfo(t.dtype).max
    memory = torch.full(sizes, poison, dtype=t.dtype)
    view = memory[tuple(slice(0, size * step, step) for size, step in zip(t.shape, steps, strict=True))]
    return view.copy_(t)


def moved(t: Tensor, device) -> Tensor:
    """Returns a copy of t on the device, with the same strides and with the same memory around it."""
    storage = t.as_strided((t.untyped_storage().size() // t.element_size(),), (1,), 0).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def laid_out(t: Tensor, strides: str, name: str, device) -> Tensor:
    """Returns a copy of the tensor of this name on the device. strides: a key of STRIDES."""
    steps, gaps = STRIDES[strides].get(name, ((), ()))
    extra = t.dim() - len(steps)
    steps, gaps = (1,) * extra + steps[max(-extra, 0) :], (0,) * extra + gaps[max(-extra, 0) :]
    return moved(spread(t, steps, gaps), device)


def filled(dtype: torch.dtype, device) -> Callable[..., Tensor]:
    """Returns a function of a shape that makes a tensor of normally distributed numbers."""
    return lambda *shape: torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


# ---- where the angles come from ----


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

    def __str__(self):
        parts = [self.kind, self.positions, self.strides.replace("dense", "")]
        parts += [f"offset{self.offset}" * (self.offset != 0), "float64" * (self.freq_dtype == torch.float64)]
        return "-".join(filter(None, parts))

    def arguments(self, batch, seq, rotary_dim, table_dtype, device, heads=1, rows=None) -> dict[str, Any]:
        """Returns the arguments of a call by name.

        heads: the number of heads of q, and of k, if the tables are by head. rows: of a table by position.
        """
        rows = rows or seq + 40
        freq = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
        arguments: dict[str, Any] = {"offset": self.offset} if self.offset else {}
        laid = partial(laid_out, strides=self.strides, device=device)
        if self.kind == "inv_freq":
            arguments["inv_freq"] = laid(freq.to(self.freq_dtype), name="inv_freq")
        elif self.kind == "inv_freq in two parts":  # the first part is not the nearest float32
            first = (freq * torch.rand(freq.shape)).float()
            arguments["inv_freq"] = laid(torch.stack([first, (freq - first).float()]), name="inv_freq")
        else:
            shapes = {"table": (rows,), "token": (batch, seq), "token shared": (1, seq)}
            shapes |= {"head": (batch, seq, heads), "head shared": (1, seq, heads)}
            angle = torch.randint(0, 3000, shapes[self.kind]).double().unsqueeze(-1) * freq
            suffix = " by head" * (angle.dim() == 4)
            arguments["cos"] = laid(angle.cos().to(table_dtype), name="cos" + suffix)
            arguments["sin"] = laid(angle.sin().to(table_dtype), name="sin" + suffix)
        if self.positions:
            dtype, shape = self.positions.split()
            low = -self.offset if self.kind == "table" else -20
            shape = {"[S]": (seq,), "[1,S]": (1, seq), "[B,S]": (batch, seq)}[shape]
            positions = torch.randint(low, rows - self.offset, shape).to(getattr(torch, dtype))
            arguments["positions"] = laid(positions, name="positions")
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

# ---- slots, positions and scales ----

SCALES = [0.37, -2.5, 1.0, 2.0**-20, 1e30, 1e-30, 0.0, math.inf, math.nan, 1e-45]  # usual and unusual ones


def some_slots(shape, cells, dtype, device, *, skipped=0.2) -> Tensor:
    """Returns random slots below `cells`, no two of them equal; a share `skipped` of them is negative instead."""
    slots = torch.randperm(cells)[: math.prod(shape)].view(shape)
    padding = torch.tensor([-1, -2, -(2**31)])[torch.randint(0, 3, shape)]
    return torch.where(torch.rand(shape) < skipped, padding, slots).to(dtype).to(device)


def slots_of(kind: str, batch: int, seq: int, cells: int, device) -> Tensor:
    """Returns random slots below `cells`, with the first and the last cell. kind: one of CACHE["slots"], not "none"."""
    dtype = torch.int32 if "int32" in kind else torch.int64
    slots = some_slots((seq,) if kind.endswith("[S]") else (batch, seq), cells, dtype, "cpu")
    if (slots >= 0).any():
        slots[slots == slots[slots >= 0].min()] = 0
        slots[slots == slots.max()] = cells - 1
    slots = laid_out(slots, "strided" if "strided" in kind else "dense", "slots", device)
    return slots.mT.contiguous().mT if "column" in kind else slots


def set_apart(angles: dict, batch: int, limit: int) -> None:
    """Changes the positions in `angles` so that every token of a sequence has a cache cell of its own.

    No two tokens of a sequence then have the same position, and position + offset is in [0, limit).
    """
    positions = angles.get("positions")
    if positions is not None:
        distinct = torch.rand(max(batch, 1), limit).argsort(-1)[:, : positions.shape[-1]] - angles.get("offset", 0)
        positions.copy_(distinct[: positions.shape[0]] if positions.dim() == 2 else distinct[0])


def scale_of(kind: str, name: str, dtype: torch.dtype, heads: int, device) -> Tensor:
    """Returns the scale of a result of this dtype. kind: one of CACHE["scales"]."""
    scale = (torch.rand(1 if kind in ("one element", "no dimensions") else heads) + 0.5) * 4 / QUANTISED[dtype][1]
    if kind == "unusual":
        scale *= torch.tensor(SCALES)[torch.randint(len(SCALES), scale.shape)]
    scale = laid_out(scale, "strided" if kind == "strided" else "dense", name, device)
    return scale.view(()) if kind == "no dimensions" else scale


# ---- descriptions ----

# The factors of a call: each has a name, which is an argument of make, and some values.
CALL = {
    "size": SIZES,
    "source": SOURCES,
    "start": list(STARTS),
    "q": list(LAYOUTS),
    "k": list(LAYOUTS),
    "dtype": DTYPES,
    "interleaved": [False, True],
    "tables": ["float32", "dtype of x"],
    "attention_factor": [1.0, 1.2079441541679836, -0.37],
    "dims": [4, 3],
}
# A weight is kept in float32 or in the dtype of x ("own"). Its elements are adjacent in memory unless it is strided.
WEIGHTS = ["float32", "own", "float32 strided", "own strided"]
NORM = {
    "q_weight": WEIGHTS,
    "k_weight": WEIGHTS,
    "over_heads": [False, True],  # whether all heads of a token are normalised together, with a weight for each
    "norm_eps": [1e-6, 1e-5, 0.5, 1e3],
}
CACHE = {
    "source": SOURCES + CELLS,
    "q_weight": [None, None, *WEIGHTS],  # None: there is no norm
    # qkv: q, k and v are slices of one tensor. v may be k.
    "q": ["qkv", *LAYOUTS],
    "k": [*LAYOUTS, "heads expanded"],
    "v": [*LAYOUTS, "heads expanded", "k"],
    "v_shape": [None, None, (1, 201), (2, 200), (3, 16), (0, 8)],  # heads and head_dim; None: those of k
    "cache": list(CACHES),
    "slots": ["none", "int64 [S]", "strided int32 [S]", "int64 [B,S]", "strided int32 [B,S]", "[B,S] by column"],
    "quantised": [(None, None), *((k, v) for k in (None, *QUANTISED) for v in QUANTISED), (torch.int8, None)],
    "q_out": [None, "q", *LAYOUTS],
    "q_dtype": [None, *QUANTISED],  # None: that of q
    "scales": ["one element", "no dimensions", "heads", "strided", "unusual"],  # unusual: of heads, any of SCALES
    "norm_v": [False, True],
}
# The factors that an operator has besides, if it has this argument.
MORE = {
    "inverse": {"inverse": [False, True]},
    "eager_rounding": {"eager_rounding": [False, False, True]},
    "q_out_grad": {"q_grad": list(LAYOUTS), "k_grad": list(LAYOUTS)},
    "q_norm_weight": NORM,
    "k_cache": CACHE,
}


def arguments_of(op: str) -> dict[str, Any]:
    """Returns what the schema says about each argument of an operator, by name."""
    return {a.name: a for a in getattr(torch.ops.rope, op).default._schema.arguments}


def factors(op: str) -> dict[str, list]:
    """Returns the values of each factor of a call of this operator."""
    found, arguments = dict(CALL), arguments_of(op)
    for name, more in MORE.items():
        found |= more if name in arguments else {}
    return found


def allowed(
    size, source=None, dims=4, q_weight=None, cache="", slots="none", norm_v=False, eager_rounding=False, q_out=None,
    q_dtype=None, **_,
) -> bool:  # fmt: skip
    """Returns whether an operator takes these arguments together."""
    is_one = size[0] == 1
    if not is_one and (dims == 3 or slots.endswith("[S]") or (slots == "none" and "sequence" in cache)):
        return False
    if eager_rounding and (norm_v or q_weight):
        return False
    return (q_dtype is None or q_out not in (None, "q")) and (slots == "none" or source not in CELLS)


def supported(device, *dtypes: torch.dtype | None) -> bool:
    """Returns whether the device has these dtypes. Apple GPUs have no float64 and no float8."""
    return torch.device(device).type != "mps" or not ({torch.float64, *QUANTISED} - {torch.int8}) & {*dtypes}


def describe(op: str, pick: random.Random, device="cpu", **given) -> dict[str, Any]:
    """Returns a random description of a call that the device supports, with these values of some factors."""
    while True:
        case = {name: pick.choice(values) for name, values in factors(op).items()} | given
        if allowed(**case) and supported(device, case["dtype"], case["source"].freq_dtype):
            return case


def any_size(pick: random.Random) -> dict[str, Any]:
    """Returns any size, and one of v, which may be zero in each respect."""
    pairs, rest = pick.choice([pick.randint(0, 3), pick.randint(0, 40)]), pick.randint(0, 9)
    size = *(pick.randint(0, most) for most in (3, 8, 3, 3)), 2 * pairs + rest, 2 * pairs
    return {"size": size, "v_shape": pick.choice([None, (pick.randint(0, 3), pick.randint(0, 200))])}


# ---- calls ----


def make(
    op: str, device="cpu", *, size=SIZES[0], source=SOURCES[0], start="first", dims=4, dtype=torch.float32,
    tables="float32", rows=None, q="bshd", k="bhsd", v="packed", q_grad="bhsd", k_grad="sbhd", q_weight=None,
    k_weight="float32 strided", over_heads=False, cache="strides of their own", blocks=None, cells=None, slots="none",
    v_shape=None, quantised=(None, None), q_out=None, q_dtype=None, scales="heads", **flags,
) -> dict[str, Any]:  # fmt: skip
    """Returns the arguments of a call by name, without those that have their default.

    Args:
        size, source, start, ...: the factors of the call, whose values factors() has. What the operator does not take is
            left out.
        rows: the number of rows of a table by position; by default seq + 40.
        blocks, cells: the number of blocks of the caches, and of cells of each block; by default a few more blocks than
            the call needs, and no more cells.
        flags: the arguments that are no tensors.
    """
    batch, seq, heads, kv_heads, head_dim, rotary_dim = size
    arguments = arguments_of(op)
    if "cos" not in arguments:
        return _call_of_tables(op, device, size, source, dtype, flags)
    kv_heads = heads if source.kind.startswith("head") else kv_heads
    layouts = LAYOUTS | EXPANDED
    # On a device without float8, int8 stands for it.
    q_dtype, *quantised = (d if supported(device, d) else torch.int8 for d in (q_dtype, *quantised))

    def tensor(layout, heads, head_dim=head_dim, dtype=dtype):
        return layouts[layout](filled(dtype, device), batch, seq, heads, head_dim)

    # What is rotated or copied.
    if q == "qkv":
        whole = tensor("bshd", heads + 2 * kv_heads)
        call = dict(zip("qkv", whole.split([heads, kv_heads, kv_heads], 2), strict=True))
    else:
        call = {"q": tensor(q, heads), "k": tensor(k, kv_heads)}
        call["v"] = call["k"] if v == "k" else tensor(v, kv_heads)
    if v_shape:
        call["v"] = tensor(v if v in layouts else "heads expanded", *v_shape)
    call |= {"x": call["q"], "q_out_grad": tensor(q_grad, heads), "k_out_grad": tensor(k_grad, kv_heads)}
    if q_out not in (None, "q"):
        call["q_out"] = tensor(q_out, heads, dtype=q_dtype or dtype)
    if dims == 3:
        call = {name: t[0] for name, t in call.items()}
    if q_out == "q":
        call["q_out"] = call["q"]

    # The angles.
    call |= source.arguments(batch, seq, rotary_dim, dtype if "x" in tables else torch.float32, device, heads, rows)
    call["rotary_start"] = STARTS[start](head_dim - rotary_dim)
    # The norm.
    needs_norm = "q_norm_weight" in arguments and not arguments["q_norm_weight"].has_default_value()
    if q_weight or needs_norm:
        for name, kind, n in ("q", q_weight or "float32", heads), ("k", k_weight, kv_heads):
            weight = torch.rand(*[n] * over_heads, head_dim, dtype=torch.float64) * 2 - 0.5  # of both signs
            weight = weight.to(dtype if "own" in kind else torch.float32)
            strides = "strided" if "strided" in kind else "dense"
            call[f"{name}_norm_weight"] = laid_out(weight, strides, f"{name}_weight", device)
    # The caches, and the scales of what is quantised.
    if "k_cache" in arguments:
        if slots == "none":  # sequence b is written to block b
            set_apart(call, batch, rows or seq + 40)
            last = call["positions"].max() if "positions" in call and seq * batch else seq - 1
            needed = batch, int(last) + call.get("offset", 0) + 1
        else:
            needed = (1, batch * seq + 5) if "sequence" in cache else (batch * seq // 13, 13)
        blocks = blocks if blocks is not None else 1 if "sequence" in cache else needed[0] + 2
        cells = cells if cells is not None else max(needed[1], 1)
        k_dtype, v_dtype = quantised
        caches = CACHES[cache](filled(k_dtype or dtype, device), blocks, cells, kv_heads, head_dim)
        if v_shape or k_dtype != v_dtype:
            others = CACHES[cache](filled(v_dtype or dtype, device), blocks, cells, *(v_shape or (kv_heads, head_dim)))
            caches = caches[0], others[1]
        call["k_cache"], call["v_cache"] = caches
        if slots != "none":
            call["slots"] = slots_of(slots, batch, seq, caches[0].shape[:-2].numel(), device)
        for name, of, n in ("q", q_dtype, heads), ("k", k_dtype, kv_heads), ("v", v_dtype, call["v"].shape[-2]):
            if of and (name != "q" or q_out):
                call[f"{name}_scale"] = scale_of(scales, f"{name}_scale", of, n, device)

    return _without_defaults(op, call | flags)


def _call_of_tables(op, device, size, source, dtype, flags) -> dict[str, Any]:
    """Returns the arguments of an operator that makes tables."""
    batch, seq, *_, rotary_dim = size
    axes, parts = (2,) * ("axial" in op), (2,) * ("parts" in source.kind)
    of_positions = getattr(torch, source.positions.split()[0]) if source.positions else torch.float32
    positions = (torch.randn(*axes, batch, seq) * 50).to(of_positions)
    freq = torch.rand(*parts, *axes, rotary_dim // 2, dtype=torch.float64).to(source.freq_dtype)
    tensors = {"positions": positions, "inv_freq": freq}
    call = {name: laid_out(t, source.strides, name, device) for name, t in tensors.items()}
    return _without_defaults(op, call | flags | {"dtype": None if dtype == torch.float32 else dtype})


def _without_defaults(op: str, call: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that an operator takes, in its order, without those that have their default."""
    given = {name: (call.get(name), a.default_value) for name, a in arguments_of(op).items()}
    return {
        name: value
        for name, (value, default) in given.items()
        if isinstance(value, Tensor) or value not in (None, default)
    }
