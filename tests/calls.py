"""Makes legal calls of every operator, as torch_rope/selfcheck/calls.py does, of more layouts, sources and values.

Arguments that could be mistaken for one another may differ in every respect: q and k in their heads and strides, and cos,
sin, positions, weights, scales and caches in their strides.
"""

import functools
import math
import random
from typing import Any

import torch
from torch import Tensor

from torch_rope.selfcheck import calls
from torch_rope.selfcheck.calls import DTYPES, QUANTISED, Source, arguments_of, laid_out, supported, taken  # noqa: F401

LAYOUTS = calls.LAYOUTS | {
    "sbhd": lambda make, b, s, h, d: make(s, b, h, d).transpose(0, 1),
    "bhds": lambda make, b, s, h, d: make(b, h, d, s).permute(0, 3, 1, 2),  # of a convolution
}
EXPANDED = {  # a tensor that is only read may have stride 0
    "batch expanded": lambda make, b, s, h, d: make(1, s, h, d).expand(b, -1, -1, -1),
    "heads expanded": lambda make, b, s, h, d: make(b, s, 1, d).expand(-1, -1, h, -1),
}
calls.LAYOUTS |= LAYOUTS | EXPANDED


def tensor(layout: str, shape, dtype: torch.dtype, device) -> Tensor:
    """Returns a tensor [batch, seq, heads, head_dim] of random numbers."""
    return calls.LAYOUTS[layout](calls.filled(dtype, device), *shape)


CACHES = calls.CACHES
CACHES |= {
    "heads sequence": lambda make, _, size, h, d: tuple(make(h, size, d).transpose(0, 1) for _ in "kv"),  # akunu's
    "blocks heads": lambda make, n, size, h, d: tuple(make(n, h, size, d).transpose(1, 2) for _ in "kv"),
    "kv blocks": lambda make, n, size, h, d: make(2, n, size, h, d).unbind(0),
    "blocks kv": lambda make, n, size, h, d: make(n, 2, size, h, d).unbind(1),  # FlashInfer's NHD
    "vLLM's LBNHC": lambda make, n, size, h, d: make(n, size, h, 2 * d).split([d, d], -1),
    "vLLM's BLHNC": lambda make, n, size, h, d: make(n, 3, h, size, 2 * d)[:, 1].transpose(1, 2).split([d, d], -1),
    "part of a larger one": lambda make, n, size, h, d: tuple(
        make(n + 2, size + 3, h + 1, d + 5)[1:-1, 2:-1, 1:, 4:-1] for _ in "kv"
    ),
}
# apart: gaps between rows, of a size that keeps vectors of 16 bytes aligned in every dtype.
# closer: gaps between rows that keep vectors of 16 bytes aligned in float32, but not in a 16-bit dtype.
calls.STRIDES |= {
    "apart": {"cos": ((1, 1, 1), (0, 1, 16)), "sin": ((1, 1, 1), (0, 2, 32)), "positions": ((1, 1), (0, 3))},
    "closer": {"cos": ((1, 1, 1), (0, 1, 4)), "sin": ((1, 1, 1), (0, 2, 12))},
}
calls.STRIDES["strided"] |= {"q_scale": ((4,), (1,)), "k_scale": ((2,), (1,)), "v_scale": ((3,), (1,))}

SOURCES = [*calls.SOURCES, Source("table", offset=7, strides="apart"), Source("table", "int64 [1,S]", strides="closer")]
SOURCES += [Source("token", strides="apart"), Source("token", strides="strided"), Source("head", strides="apart")]
CELLS = [*calls.CELLS, Source("token shared", "int32 [S]"), Source("head shared", offset=2)]

SCALES = [0.37, -2.5, 1.0, 2.0**-20, 1e30, 1e-30, 0.0, math.inf, math.nan, 1e-45]  # usual and unusual ones


def slots_of(kind: str, slots: Tensor, cells: int) -> Tensor:
    """Returns slots [batch, seq] in another form, with the first and the last cell. kind: a value of the factor "slots"."""
    device, slots = slots.device, slots.cpu()[0] if kind.endswith("[S]") else slots.cpu()
    padding = torch.tensor([-1, -2, -(2**31)])[torch.randint(0, 3, slots.shape)]
    slots = torch.where(slots < 0, padding, slots).to(torch.int32 if "int32" in kind else torch.int64)
    if (slots >= 0).any():
        slots[slots == slots[slots >= 0].min()] = 0
        slots[slots == slots.max()] = cells - 1
    slots = laid_out(slots, "strided" if "strided" in kind else "dense", "slots", device)
    return slots.mT.contiguous().mT if "column" in kind else slots


def scale_of(kind: str, scale: Tensor, name: str) -> Tensor:
    """Returns the scale of this name in another form. kind: a value of the factor "scales"."""
    if kind == "unusual":
        scale = scale * torch.tensor(SCALES, device=scale.device)[torch.randint(len(SCALES), scale.shape)]
    if kind == "strided":
        return laid_out(scale.cpu(), "strided", name, scale.device)
    one = scale[0] if len(scale) else torch.ones((), device=scale.device)
    return one if kind == "no dimensions" else one.view(1) if kind == "one element" else scale


CALL = calls.FACTORS["positions"] | {"source": SOURCES, "q": list(LAYOUTS), "k": list(LAYOUTS), "dims": [4, 3]}
CACHE = calls.FACTORS["k_cache"] | {
    "source": SOURCES + CELLS,
    "q": ["qkv", *LAYOUTS],
    "k": [*LAYOUTS, "heads expanded"],
    "v": [*LAYOUTS, "heads expanded", "k"],  # v may be k
    "v_shape": [None, None, (1, 201), (2, 200), (3, 16), (0, 8)],
    "cache": list(CACHES),
    "slots": ["none", "int64 [S]", "strided int32 [S]", "int64 [B,S]", "strided int32 [B,S]", "[B,S] by column"],
    "quantised": [*calls.FACTORS["k_cache"]["quantised"], (torch.int8, None)],
    "q_out": [None, "q", *LAYOUTS],
    "scales": ["one element", "no dimensions", "heads", "strided", "unusual"],  # unusual: of heads, any of SCALES
}
FACTORS = calls.FACTORS | {
    "positions": CALL,
    "eager_rounding": {"eager_rounding": [False, False, True]},
    "round_before_weight": {"round_before_weight": [False, True]},
    "q_out_grad": {"q_grad": list(LAYOUTS), "k_grad": list(LAYOUTS)},
    "k_cache": CACHE,
}
factors = functools.partial(calls.factors, table=FACTORS)


def allowed(
    size, dims=4, slots="none", eager_rounding=False, round_before_weight=False, q_weight="own", k_weight="own",
    v_weight=None, **others,
) -> bool:  # fmt: skip
    """Returns whether an operator takes these arguments together."""
    if size[0] != 1 and (dims == 3 or slots.endswith("[S]")):
        return False
    if round_before_weight and not (eager_rounding and all("own" in w for w in (q_weight, k_weight, v_weight) if w)):
        return False
    return calls.allowed(size, slots=slots, **others)


describe = functools.partial(calls.describe, table=FACTORS, allowed=allowed)


def any_size(pick: random.Random) -> dict[str, Any]:
    """Returns any size, and one of v, which may be zero in each respect."""
    pairs, rest = pick.choice([pick.randint(0, 3), pick.randint(0, 40)]), pick.randint(0, 9)
    size = *(pick.randint(0, most) for most in (3, 8, 3, 3)), 2 * pairs + rest, 2 * pairs
    return {"size": size, "v_shape": pick.choice([None, (pick.randint(0, 3), pick.randint(0, 200))])}


def make(
    op: str, device="cpu", *, size=calls.SIZES[0], source=SOURCES[0], dims=4, dtype=torch.float32, v="packed",
    q_grad="bhsd", k_grad="sbhd", slots="none", v_shape=None, q_out=None, scales="heads", **others,
) -> dict[str, Any]:  # fmt: skip
    """Returns the arguments of a call by name. The arguments are the factors of the call, and others of calls.make."""
    arguments = arguments_of(op)
    if "cos" not in arguments:
        return taken(op, _call_of_tables(op, device, size, source, dtype) | others)
    v_layout = v if v != "k" else "heads expanded" if v_shape else "bshd"
    of_cache = {"v": v_layout, "slots": "none" if slots == "none" else "int64", "v_shape": v_shape, "q_out": q_out}
    call = calls.make(op, device, size=size, source=source, dtype=dtype, **of_cache, **others)
    if "q_out_grad" in arguments:
        call["q_out_grad"] = tensor(q_grad, call["q"].shape, dtype, device)
        call["k_out_grad"] = tensor(k_grad, call["k"].shape, dtype, device)
    if dims == 3:
        rotated = ("x", "q", "k", "v", "q_out", "q_out_grad", "k_out_grad")
        call |= {name: call[name][0] for name in rotated if name in call}
    # What was one tensor still is one.
    call |= ({"v": call["k"]} if v == "k" and not v_shape else {}) | ({"q_out": call["q"]} if q_out == "q" else {})
    if slots != "none" and "slots" in call:
        call["slots"] = slots_of(slots, call["slots"], call["k_cache"].shape[:-2].numel())
    call |= {name: scale_of(scales, call[name], name) for name in call if name.endswith("_scale")}
    return taken(op, call)


def _call_of_tables(op, device, size, source, dtype) -> dict[str, Any]:
    """Returns the arguments of an operator that makes tables."""
    batch, seq, *_, rotary_dim = size
    axes, parts = (2,) * ("axial" in op), (2,) * ("parts" in source.kind)
    of_positions = getattr(torch, source.positions.split()[0]) if source.positions else torch.float32
    positions = (torch.randn(*axes, batch, seq) * 50).to(of_positions)
    freq = torch.rand(*parts, *axes, rotary_dim // 2, dtype=torch.float64).to(source.freq_dtype)
    tensors = {"positions": positions, "inv_freq": freq}
    call = {name: laid_out(t, source.strides, name, device) for name, t in tensors.items()}
    return call | {"dtype": None if dtype == torch.float32 else dtype}
