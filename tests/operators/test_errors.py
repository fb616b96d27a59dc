"""Tests of every error that the operators document: its type and its message, for real tensors, for fake tensors and
under torch.compile. A call that raises an error writes nothing.

All messages have one form: `rope.rotate: x is int64 but must be float16, bfloat16, float32 or float64`.
"""

import re

import numpy as np
import pytest
import torch
from cases import OPERATORS, checks_ranges, schema_of, supported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_rope

B, S, H, D, R = 2, 6, 3, 16, 8
rope = torch.ops.rope
pytestmark = pytest.mark.heart

# The tensors that each operator takes besides those of the angles. The x of rotate is called q here.
OWN = {
    "rotate": ["q"],
    "rotate_": ["q"],
    "rotate_qk": ["q", "k"],
    "rotate_qk_": ["q", "k"],
    "norm_rotate_qk": ["q", "k", "q_norm_weight", "k_norm_weight"],
    "rotate_into_cache_": ["q", "k", "v", "k_cache", "v_cache", "q_norm_weight", "k_norm_weight"],
}
# The groups of operators that a case can be for.
OPS = {
    "all": list(OWN),
    "qk": [op for op in OWN if "k" in OWN[op]],
    "norm": [op for op in OWN if "q_norm_weight" in OWN[op]],
    "in place": [op for op in OWN if op.endswith("_")],
    "qk in place": ["rotate_qk_"],
    "cache": ["rotate_into_cache_"],
}


def arguments(op, device="cpu") -> dict:
    """Returns the arguments of a legal call with tables. Each case changes some of them to make the call illegal."""
    with torch.device(device):
        cos, sin = torch_rope.cos_sin(torch.arange(20), torch_rope.inv_freq(R))
        good = {"q": torch.randn(B, S, H, D), "k": torch.randn(B, S, 1, D), "v": torch.randn(B, S, 1, D)}
        good["k_cache"], good["v_cache"] = torch.randn(B, 2, 20, 1, D).unbind(1)
        good["q_norm_weight"], good["k_norm_weight"] = torch.rand(D), torch.rand(D)
    return {name: good[name] for name in OWN[op]} | {"cos": cos, "sin": sin}


def bad(message, error=ValueError, ops="all", **changes):
    """Returns a case: a call that must raise this error with this message.

    The message may contain {q}, the name of the operator's first argument, and may stop early. `ops` names a group of
    operators. `changes` holds new values of arguments, or functions that compute them from the legal arguments.
    """
    return pytest.param(message, error, ops, changes, id=message[:70])


def freq(n=R // 2, dtype=torch.float32):
    return lambda a: torch.ones(n, dtype=dtype, device=a["q"].device)


def ones(*shape, dtype=torch.float32):
    return lambda a: torch.ones(shape, dtype=dtype, device=a["q"].device)


def ints(*shape, dtype=torch.int64):
    return lambda a: torch.zeros(shape, dtype=dtype, device=a["q"].device)


def values(numbers, dtype=torch.int64):
    return lambda a: torch.tensor(numbers, dtype=dtype, device=a["q"].device)


def both_tables(*shape):
    return {"cos": ones(*shape), "sin": ones(*shape)}


def cast(name, dtype):
    return lambda a: a[name].to(dtype)


# ---- messages that several cases share ----


def overlaps(written, read):
    why = f"{written} is written in place and {read} is read"
    return f"{written} overlaps {read} but must have separate memory, because {why}"


def both_written(a, b):
    return f"{a} overlaps {b} but must have separate memory, because both are written in place"


def elements_share_memory(name, shape, strides):
    return (
        f"{name} has shape {shape} and strides {strides}, so some of its elements share memory, "
        f"but must have separate memory for each element, because {name} is written in place; clone it first"
    )


def out_of_range(low, high, offset, limit):
    given = f"positions go from {low} to {high} with offset {offset}"
    return f"{given} but position + offset must be at least 0 and below {limit}"


ANGLE_SOURCE = "; pass one angle source: cos and sin, or inv_freq"
ROW_PER_TOKEN = ": such a table has a row per token; pass a 2-D table to select rows by position"

INT8_CACHES = {name: cast(name, torch.int8) for name in ("k_cache", "v_cache")}
SCALES = {"k_scale": ones(1), "v_scale": ones()}
THREE_HEADS = {"k": ones(B, S, H, D), "k_cache": ones(B, 20, H, D)}

CASES = [
    # x, q and k
    bad(
        "{q} has shape [6, 16] but must have shape [seq, heads, head_dim] or [batch, seq, heads, head_dim]"
        "; if the head axis is missing, pass {q}.unsqueeze(-2)",
        q=ones(S, D),
    ),
    bad("{q} has shape [1, 2, 6, 3, 16] but must have shape [seq", q=ones(1, B, S, H, D)),
    bad("{q} is None but must be a tensor", q=None),
    bad("{q} is int64 but must be float16, bfloat16, float32 or float64", TypeError, q=ints(B, S, H, D)),
    bad("{q} is complex64 but must be float16", TypeError, q=ones(B, S, H, D, dtype=torch.complex64)),
    bad("k is bfloat16 but must be float32, the dtype of q", TypeError, "qk", k=cast("k", torch.bfloat16)),
    bad("k is int32 but must be float16", TypeError, "qk", k=cast("k", torch.int32)),
    bad("k has 3 dimensions but must have 4, as q has", ops="qk", k=ones(S, 1, D)),
    bad("k has batch 1 but must have batch 2, as q has; only the heads may differ", ops="qk", k=ones(1, S, 1, D)),
    bad("k has seq 5 but must have seq 6, as q has; only the heads may differ", ops="qk", k=ones(B, 5, 1, D)),
    bad(
        "k has head_dim 12 but must have head_dim 16, as q has; only the heads may differ",
        ops="qk",
        k=ones(B, S, 1, 12),
    ),
    # the angle source
    bad(
        "cos, sin and inv_freq are None but must not all be None" + ANGLE_SOURCE,
        cos=None,
        sin=None,
    ),
    bad(
        "inv_freq is given but must be None, because cos and sin are given" + ANGLE_SOURCE,
        inv_freq=freq(),
    ),
    bad("sin is None but must be given together with cos" + ANGLE_SOURCE, sin=None),
    bad("cos is None but must be given together with sin" + ANGLE_SOURCE, cos=None),
    bad(
        "cos is None but must be given together with sin" + ANGLE_SOURCE,
        cos=None,
        inv_freq=freq(),
    ),
    # tables
    bad(
        "cos has 32 columns but must have at most 8, because {q} has head_dim 16"
        ": rotary_dim 64 is larger than head_dim",
        cos=ones(20, 32),
        sin=ones(20, 32),
    ),
    bad(
        "cos has shape [4] but must have shape [max_position, rotary_dim / 2], [batch or 1, seq, rotary_dim / 2] or "
        "[batch or 1, seq, heads, rotary_dim / 2]",
        cos=ones(4),
        sin=ones(4),
    ),
    bad("cos has shape [1, 2, 6, 1, 4] but must have shape [max_position", **both_tables(1, B, S, 1, 4)),
    bad("sin has shape [20, 3] but must have shape [20, 4], the shape of cos", sin=ones(20, 3)),
    bad("sin has shape [19, 4] but must have shape [20, 4], the shape of cos", sin=ones(19, 4)),
    bad("sin has shape [1, 20, 4] but must have shape [20, 4], the shape of cos", sin=ones(1, 20, 4)),
    bad("sin has shape [2, 6] but must have shape [2, 6, 4], the shape of cos", cos=ones(B, S, 4), sin=ones(B, S)),
    bad("sin is bfloat16 but must be float32, the dtype of cos", TypeError, sin=cast("sin", torch.bfloat16)),
    bad(
        "cos and sin are float16 but must be float32, the dtype of {q}",
        TypeError,
        cos=cast("cos", torch.float16),
        sin=cast("sin", torch.float16),
    ),
    bad(
        "cos and sin are float64 but must be float32, the dtype of {q}",
        TypeError,
        cos=cast("cos", torch.float64),
        sin=cast("sin", torch.float64),
    ),
    bad(
        "cos has 5 rows per sequence but must have 6, the seq of {q}: such a table has a row per token",
        cos=ones(1, 5, 4),
        sin=ones(1, 5, 4),
    ),
    bad("cos has batch 3 but must have batch 2, as {q} has, or batch 1", cos=ones(3, S, 4), sin=ones(3, S, 4)),
    bad(
        "positions is given but must be None, because cos has shape [1, 6, 4]" + ROW_PER_TOKEN,
        cos=ones(1, S, 4),
        sin=ones(1, S, 4),
        positions=ints(S),
    ),
    bad(
        "offset is 3 but must be 0, because cos has shape [1, 6, 4]" + ROW_PER_TOKEN,
        cos=ones(1, S, 4),
        sin=ones(1, S, 4),
        offset=3,
    ),
    bad(
        "cos has 2 heads but must have 3, as {q} has: a 4-D table has a row per token and head",
        **both_tables(B, S, 2, 4),
    ),
    bad(
        "cos has 3 heads but must have 1, as k has: a 4-D table has a row per token and head",
        ops="qk",
        **both_tables(B, S, 3, 4),
    ),
    bad("cos has batch 3 but must have batch 2, as {q} has, or batch 1", **both_tables(3, S, 3, 4)),
    bad("positions is given but must be None, because cos has", positions=ints(S), **both_tables(1, S, 3, 4)),
    bad("slots is None but must be given, because cos has", ops="cache", **(both_tables(B, S, 3, 4) | THREE_HEADS)),
    # rotary_start
    bad("rotary_start is -1 but must be at least 0", rotary_start=-1),
    bad(
        "rotary_start is 9 but must be at most 8, because {q} has head_dim 16 and 8 channels are rotated",
        rotary_start=9,
    ),
    bad(f"rotary_start is {2**63 - 1} but must be at most 8", rotary_start=2**63 - 1),
    # inv_freq
    bad(
        "inv_freq has shape [1, 4] but must have shape [rotary_dim / 2] or [2, rotary_dim / 2]",
        cos=None,
        sin=None,
        inv_freq=ones(1, 4),
    ),
    bad(
        "inv_freq has shape [2, 4] and is float64 but must be float32, because it is the sum of two parts",
        TypeError,
        cos=None,
        sin=None,
        inv_freq=ones(2, 4, dtype=torch.float64),
    ),
    bad(
        "inv_freq is float16 but must be float32 or float64",
        TypeError,
        cos=None,
        sin=None,
        inv_freq=freq(4, torch.half),
    ),
    bad(
        "inv_freq has 9 frequencies but must have at most 8, because {q} has head_dim 16"
        ": rotary_dim 18 is larger than head_dim",
        cos=None,
        sin=None,
        inv_freq=freq(9),
    ),
    # positions
    bad("positions is float32 but must be int32 or int64", TypeError, positions=ones(S)),
    bad("positions is int16 but must be int32 or int64", TypeError, positions=ints(S, dtype=torch.int16)),
    bad("positions has shape [1, 1, 6] but must have shape [seq], [1, seq] or [batch, seq]", positions=ints(1, 1, S)),
    bad("positions has shape [] but must have shape [seq], [1, seq] or [batch, seq]", positions=ints()),
    bad(
        "positions has shape [5] but must have shape [seq], [1, seq] or [batch, seq] with seq 6, as {q} has",
        positions=ints(5),
    ),
    bad("positions has batch 3 but must have batch 2, as {q} has, or batch 1", positions=ints(3, S)),
    # norm weights
    bad(
        "k_norm_weight is None but must be given together with q_norm_weight; pass both, or neither",
        ops="cache",
        k_norm_weight=None,
    ),
    bad(
        "q_norm_weight is None but must be given together with k_norm_weight; pass both, or neither",
        ops="cache",
        q_norm_weight=None,
    ),
    bad(
        "q_norm_weight is bfloat16 but must be float32, the dtype of q",
        TypeError,
        "norm",
        q_norm_weight=ones(D, dtype=torch.bfloat16),
    ),
    bad(
        "k_norm_weight is float64 but must be float32, the dtype of q",
        TypeError,
        "norm",
        k_norm_weight=ones(D, dtype=torch.float64),
    ),
    bad("k_norm_weight is int64 but must be float32, the dtype of q", TypeError, "norm", k_norm_weight=ints(D)),
    bad(
        "q_norm_weight has shape [1, 1, 16] but must have shape [head_dim], to normalise each head, or [heads, head_dim], "
        "to normalise all heads of a token together",
        ops="norm",
        q_norm_weight=ones(1, 1, D),
    ),
    bad(
        "q_norm_weight has 1 heads but must have 3, as q has: a 2-D weight has a row for each head",
        ops="norm",
        q_norm_weight=ones(1, D),
    ),
    bad(
        "k_norm_weight has 3 heads but must have 1, as k has: a 2-D weight has a row for each head",
        ops="norm",
        q_norm_weight=ones(H, D),
        k_norm_weight=ones(H, D),
    ),
    bad(
        "q_norm_weight has shape [3, 8] but must have shape [heads, head_dim] with head_dim 16, as q has",
        ops="norm",
        q_norm_weight=ones(H, R),
    ),
    bad(
        "k_norm_weight has shape [16] but must have shape [heads, head_dim], as q_norm_weight has",
        ops="norm",
        q_norm_weight=ones(H, D),
    ),
    bad(
        "k_norm_weight has shape [1, 16] but must have shape [head_dim], as q_norm_weight has",
        ops="norm",
        k_norm_weight=ones(1, D),
    ),
    bad("k_norm_weight has shape [] but must have shape [head_dim]", ops="norm", k_norm_weight=ones()),
    bad(
        "q_norm_weight has shape [1] but must have shape [head_dim] with head_dim 16, as q has",
        ops="norm",
        q_norm_weight=ones(1),
    ),
    bad(
        "k_norm_weight has shape [8] but must have shape [head_dim] with head_dim 16, as q has",
        ops="norm",
        k_norm_weight=ones(R),
    ),
    # v
    bad("v has shape [6, 16] but must have shape [seq, heads, head_dim] or", ops="cache", v=ones(S, D)),
    bad("v is bfloat16 but must be float32, the dtype of q", TypeError, "cache", v=cast("v", torch.bfloat16)),
    bad("v has 3 dimensions but must have 4, as q has", ops="cache", v=ones(S, 1, D)),
    bad(
        "v has batch 1 but must have batch 2, as q has; only the heads and head_dim may differ",
        ops="cache",
        v=ones(1, S, 1, D),
    ),
    bad("v has seq 5 but must have seq 6, as q has; only the heads and", ops="cache", v=ones(B, 5, 1, D)),
    # the caches
    bad(
        "k_cache is bfloat16 but must be float32, the dtype of k",
        TypeError,
        "cache",
        k_cache=cast("k_cache", torch.bfloat16),
    ),
    bad(
        "v_cache is uint8 but must be float32, the dtype of v, or float8_e4m3fn, float8_e5m2 or int8",
        TypeError,
        "cache",
        v_cache=cast("v_cache", torch.uint8),
    ),
    # scales
    bad("k_scale is None but must be given, because k_cache is int8", ops="cache", **INT8_CACHES, v_scale=ones(1)),
    bad(
        "v_scale is None but must be given, because v_cache is float8_e5m2",
        ops="cache",
        v_cache=lambda a: torch.zeros(B, 20, 1, D, dtype=torch.int8, device=a["q"].device).view(torch.float8_e5m2),
    ),
    bad(
        "k_scale is given but must be None, because k_cache is float32, the dtype of k",
        ops="cache",
        k_scale=ones(1),
    ),
    bad(
        "v_scale is given but must be None, because v_cache is float32, the dtype of v",
        ops="cache",
        k_cache=INT8_CACHES["k_cache"],
        **SCALES,
    ),
    bad(
        "k_scale is bfloat16 but must be float32",
        TypeError,
        "cache",
        **INT8_CACHES | SCALES | {"k_scale": ones(1, dtype=torch.bfloat16)},
    ),
    bad(
        "v_scale is float64 but must be float32",
        TypeError,
        "cache",
        **INT8_CACHES | SCALES | {"v_scale": ones(1, dtype=torch.float64)},
    ),
    bad(
        "v_scale has shape [2] but must have one element, or shape [heads] with 1 heads, as v_cache has",
        ops="cache",
        **INT8_CACHES | SCALES | {"v_scale": ones(2)},
    ),
    bad(
        "k_scale has shape [0] but must have one element, or shape [heads] with 3 heads, as k_cache has",
        ops="cache",
        **INT8_CACHES | THREE_HEADS | {"k_cache": ints(B, 20, H, D, dtype=torch.int8)} | SCALES | {"k_scale": ones(0)},
    ),
    bad(
        "k_scale has shape [1, 3] but must have one element, or shape [heads] with 3 heads, as k_cache has",
        ops="cache",
        **INT8_CACHES
        | THREE_HEADS
        | {"k_cache": ints(B, 20, H, D, dtype=torch.int8)}
        | SCALES
        | {"k_scale": ones(1, H)},
    ),
    bad(
        "k_cache has shape [20, 16] but must have shape "
        "[blocks, block_size, kv_heads, head_dim] or [max_seq, kv_heads, head_dim]",
        ops="cache",
        k_cache=ones(20, D),
    ),
    bad("v_cache has shape [2, 2, 20, 1, 16] but must have shape [blocks", ops="cache", v_cache=ones(2, B, 20, 1, D)),
    bad(
        "k_cache has 20 heads but must have 1, as k has; pass a head-major cache as k_cache.transpose(-3, -2)",
        ops="cache",
        k_cache=ones(B, 1, 20, D),
    ),
    bad(
        "v_cache has 3 heads but must have 1, as v has; pass a head-major cache as v_cache.transpose",
        ops="cache",
        v_cache=ones(B, 20, H, D),
    ),
    bad("k_cache has head_dim 12 but must have head_dim 16, as k has", ops="cache", k_cache=ones(B, 20, 1, 12)),
    bad("v_cache has head_dim 16 but must have head_dim 12, as v has", ops="cache", v=ones(B, S, 1, 12)),
    bad(
        "v_cache has shape [20, 1, 16] but must have the blocks and block_size of k_cache, which has shape "
        "[2, 20, 1, 16]",
        ops="cache",
        v_cache=ones(20, 1, D),
    ),
    bad(
        "v_cache has shape [2, 19, 1, 16] but must have the blocks and block_size of k_cache",
        ops="cache",
        v_cache=ones(B, 19, 1, D),
    ),
    bad(
        "v_cache has shape [3, 20, 1, 16] but must have the blocks and block_size of k_cache",
        ops="cache",
        v_cache=ones(3, 20, 1, D),
    ),
    # the cells to write: blocks and slots
    bad(
        "slots is None but must be given, because cos has shape [2, 6, 4]: such a table has a row per token",
        ops="cache",
        cos=ones(B, S, 4),
        sin=ones(B, S, 4),
    ),
    bad(
        "k_cache has shape [1, 20, 1, 16] but must have at least 2 blocks, the batch of q"
        ": without slots, sequence b is written to block b",
        ops="cache",
        k_cache=ones(1, 20, 1, D),
        v_cache=ones(1, 20, 1, D),
    ),
    bad(
        "k_cache has shape [20, 1, 16] but must have at least 2 blocks, the batch of q",
        ops="cache",
        k_cache=ones(20, 1, D),
        v_cache=ones(20, 1, D),
    ),
    bad("slots is float32 but must be int32 or int64", TypeError, "cache", slots=ones(B, S)),
    bad("slots is int16 but must be int32 or int64", TypeError, "cache", slots=ints(B, S, dtype=torch.int16)),
    bad("slots has shape [] but must have shape [seq] or [batch, seq]", ops="cache", slots=ints()),
    bad("slots has shape [1, 2, 6] but must have shape [seq] or [batch, seq]", ops="cache", slots=ints(1, B, S)),
    bad(
        "slots has shape [2, 5] but must have shape [seq] or [batch, seq] with seq 6, as q has",
        ops="cache",
        slots=ints(B, 5),
    ),
    bad(
        "slots has shape [6] but must have shape [batch, seq] with batch 2, as q has: each token needs its own slot",
        ops="cache",
        slots=ints(S),
    ),
    bad(
        "slots has shape [1, 6] but must have shape [batch, seq] with batch 2, as q has: each token needs its own slot",
        ops="cache",
        slots=ints(1, S),
    ),
    bad(
        "slots has shape [3, 6] but must have shape [batch, seq] with batch 2, as q has: each token needs its own slot",
        ops="cache",
        slots=ints(3, S),
    ),
    # overlapping memory
    bad(
        elements_share_memory("{q}", [2, 6, 3, 16], [96, 16, 0, 1]),
        ops="in place",
        q=lambda a: ones(B, S, 1, D)(a).expand(B, S, H, D),
    ),
    bad(
        elements_share_memory("{q}", [2, 6, 3, 16], [24, 4, 8, 1]),
        ops="in place",
        q=lambda a: ones(400)(a).as_strided((B, S, H, D), (24, 4, 8, 1)),
    ),
    bad(
        elements_share_memory("{q}", [2, 6, 3, 16], [16, 48, 176, 1]),
        ops="in place",
        q=lambda a: ones(700)(a).as_strided((B, S, H, D), (D, 3 * D, 11 * D, 1)),
    ),
    bad(
        both_written("q", "k"),
        ops="qk in place",
        k=lambda a: a["q"][:, :, 1:2],
    ),
    bad(
        overlaps("{q}", "cos"),
        ops="in place",
        cos=lambda a: a["q"].view(-1)[:80].view(20, 4),
    ),
    bad(
        overlaps("k", "sin"),
        ops="qk in place",
        sin=lambda a: a["k"].view(-1)[:80].view(20, 4),
    ),
    bad(
        overlaps("{q}", "positions"),
        ops="in place",
        positions=lambda a: a["q"].view(torch.int32).view(-1)[2:8],
    ),
    bad(
        overlaps("{q}", "inv_freq"),
        ops="in place",
        cos=None,
        sin=None,
        inv_freq=lambda a: a["q"][1, 2, 0, :4],
    ),
    bad(
        overlaps("q", "k"),
        ops="cache",
        k=lambda a: a["q"][:, :, 1:2],
    ),
    bad(
        overlaps("q", "v"),
        ops="cache",
        v=lambda a: a["q"][:, :, 2:],
    ),
    bad(
        overlaps("q", "k_norm_weight"),
        ops="cache",
        k_norm_weight=lambda a: a["q"][1, 2, 0],
    ),
    bad(
        elements_share_memory("k_cache", [2, 20, 1, 16], [16, 0, 16, 1]),
        ops="cache",
        k_cache=lambda a: ones(B, 1, 1, D)(a).expand(B, 20, 1, D),
    ),
    bad(
        elements_share_memory("v_cache", [2, 20, 1, 16], [16, 16, 16, 1]),
        ops="cache",
        v_cache=lambda a: ones(21 * D)(a).as_strided((B, 20, 1, D), (D, D, D, 1)),
    ),
    bad(
        both_written("k_cache", "v_cache"),
        ops="cache",
        v_cache=lambda a: a["k_cache"],
    ),
    bad(
        both_written("k_cache", "v_cache"),
        ops="cache",
        k_cache=lambda a: a["v_cache"].as_strided((B, 20, 1, D), (40 * D, D, D, 1), 19 * D),
    ),
    # k and v are compared with a cache by address ranges. In the second and third case, the ranges overlap, although
    # the tensors share no element.
    bad(
        overlaps("k_cache", "k"),
        ops="cache",
        k=lambda a: a["k_cache"][:, :S],
    ),
    bad(
        overlaps("k_cache", "k"),
        ops="cache",
        k=lambda a: a["v_cache"][:, :S],
    ),
    bad(
        overlaps("v_cache", "v"),
        ops="cache",
        k_cache=ones(B, 20, 1, D),
        v=lambda a: a["k_cache"][1:, :S].expand(B, S, 1, D),
    ),
    bad(
        both_written("q", "k_cache"),
        ops="cache",
        q=lambda a: a["k_cache"][:, 14:],
    ),
    bad(
        both_written("q", "v_cache"),
        ops="cache",
        k_cache=ones(B, 20, 1, D),
        q=lambda a: a["v_cache"][:, 14:],
    ),
    bad(
        overlaps("k_cache", "slots"),
        ops="cache",
        slots=lambda a: a["k_cache"].view(torch.int32)[:, 3:9, 0, 7],
    ),
    bad(
        overlaps("v_cache", "positions"),
        ops="cache",
        positions=lambda a: a["v_cache"].view(torch.int32)[1, 19, 0, 10:],
    ),
    bad(
        overlaps("v_cache", "k_scale"),
        ops="cache",
        **INT8_CACHES
        | SCALES
        | {"v_cache": lambda a: a["v_cache"].view(torch.int8)[..., :D], "k_scale": lambda a: a["v_cache"][0, 0, 0, :1]},
    ),
    bad(
        overlaps("q", "v_scale"),
        ops="cache",
        **INT8_CACHES | SCALES | {"v_scale": lambda a: a["q"][1, 5, 2, 15]},
    ),
    bad(
        overlaps("v_cache", "q_norm_weight"),
        ops="cache",
        q_norm_weight=lambda a: a["v_cache"][1, 19, 0],
    ),
    bad(
        overlaps("k_cache", "cos"),
        ops="cache",
        cos=lambda a: a["k_cache"][0, :, 0, :4],
    ),
]
# Errors that depend on the values of positions and slots, which only the kernel reads.
RANGES = [
    bad(
        out_of_range(0, 5, 15, "20, the number of rows of cos"),
        IndexError,
        offset=15,
    ),
    bad(
        out_of_range(0, 5, -1, "20, the number of rows of cos"),
        IndexError,
        offset=-1,
    ),
    bad(
        out_of_range(-1, 7, 0, "20, the number of rows of cos"),
        IndexError,
        positions=values([0, 3, -1, 7, 2, 2]),
    ),
    bad(
        out_of_range(0, 20, 0, "20, the number of rows of cos"),
        IndexError,
        positions=values([[0] * 6, [1, 2, 3, 4, 5, 20]], torch.int32),
    ),
    bad(
        out_of_range(0, 2**63 - 1, 1, "20, the number of rows of cos"),
        IndexError,
        offset=1,
        positions=values([0, 0, 0, 0, 0, 2**63 - 1]),
    ),
    bad(
        out_of_range(0, 5, 2**63 - 1, "20, the number of rows of cos"),
        IndexError,
        offset=2**63 - 1,
    ),
    # Without slots, a position is also the index of a cell in a block. These calls have no table, or one with more rows
    # than the block has cells.
    bad(
        out_of_range(0, 5, 15, "20, the block_size (or max_seq) of k_cache"),
        IndexError,
        "cache",
        cos=None,
        sin=None,
        inv_freq=freq(),
        offset=15,
    ),
    bad(
        out_of_range(-1, 3, 0, "20, the block_size (or max_seq) of k_cache"),
        IndexError,
        "cache",
        cos=None,
        sin=None,
        inv_freq=freq(),
        positions=values([0, 1, 2, -1, 3, 3]),
    ),
    bad(
        out_of_range(0, 5, 2**63 - 5, "20, the block_size (or max_seq) of k_cache"),
        IndexError,
        "cache",
        cos=None,
        sin=None,
        inv_freq=freq(),
        offset=2**63 - 5,
    ),
    bad(
        out_of_range(0, 5, 7, "12, the block_size (or max_seq) of k_cache"),
        IndexError,
        "cache",
        k_cache=ones(B, 12, 1, D),
        v_cache=ones(B, 12, 1, D),
        offset=7,
    ),
    bad(
        "slots go up to 40 but must be below 40, the number of cells of each cache (blocks * block_size = 2 * 20)",
        IndexError,
        "cache",
        slots=values([[0, 1, 2, 3, 4, 5], [-1, -1, 40, 8, 9, 10]]),
    ),
    bad(
        "slots go up to 4611686018427387904 but must be below 40, the number of cells of each cache",
        IndexError,
        "cache",
        slots=values([[2**62, 1, 2, 3, 4, 5], [-(2**63), -1, 7, 8, 9, 10]]),
    ),
    bad(
        "slots go up to 20 but must be below 20, the number of cells of each cache (blocks * block_size = 1 * 20)",
        IndexError,
        "cache",
        **{name: lambda a, name=name: a[name][0] for name in OWN["rotate_into_cache_"][:5]},
        slots=values([0, 1, 20, -1, 4, 5], torch.int32),
    ),
    # The position of a token with a negative slot is no error, and is not in the message.
    bad(
        out_of_range(1, 20, 0, "20, the number of rows of cos"),
        IndexError,
        "cache",
        positions=values([[-1, 2, 20, 30, 4, 5], [0, 1, 2, 3, 2**62, 5]]),
        slots=values([[-1, 0, 1, -2, 3, 4], [-1, 8, 9, 10, -1, 12]]),
    ),
    bad(
        out_of_range(1, 4, 16, "20, the number of rows of cos"),
        IndexError,
        "cache",
        offset=16,
        slots=values([[-1, 0, 1, -1, -1, -1], [-1, -1, -1, -1, 9, -1]]),
    ),
]


def calls(message, ops, changes, device):
    """Yields, for each operator of a case, the operator, its arguments by name, and the message that it must raise."""
    for op in OPS[ops]:
        a = arguments(op, device)
        a |= {name: change(a) if callable(change) else change for name, change in changes.items()}
        q = "q" if "k" in a else "x"
        a[q] = a.pop("q")
        yield getattr(rope, op), a, f"rope.{op}: " + message.format(q=q)


def tensors_of(a):
    return {name: t for name, t in a.items() if isinstance(t, torch.Tensor)}


def skip_if_the_gpu_checks(changes, device):
    if {"positions", "slots"} & changes.keys() and not checks_ranges(device):
        pytest.skip("on a GPU the kernel checks the values in a tensor, and raises no exception here")


def skip_float64_on_metal(message, device):
    if device == "mps" and re.search("(is|are) float64", message):
        pytest.skip("Apple GPUs have no float64")


# The form of every ValueError, TypeError and IndexError. An IndexError of positions is about their sum with the offset.
FORM = r"rope\._?[a-z]\w+: \w.* but (position \+ offset )?must "


@pytest.mark.parametrize("message, error, ops, changes", CASES + RANGES)
def test_a_bad_call_raises_the_error_and_writes_nothing(message, error, ops, changes, device):
    skip_float64_on_metal(message, device)
    if error is IndexError:
        skip_if_the_gpu_checks(changes, device)
    for op, a, expected in calls(message, ops, changes, device):
        before = {name: (t.clone(), t._version) for name, t in tensors_of(a).items()}
        with pytest.raises(error, match=re.escape(expected)) as raised:
            op(**a)
        assert type(raised.value) is error
        assert re.match(FORM, str(raised.value))
        assert all(torch.equal(a[name], t) and a[name]._version == version for name, (t, version) in before.items())


@pytest.mark.parametrize("offset", [2**62, -(2**62) - 1, -(2**63), 2**63 - 1])
def test_a_message_shows_an_offset_that_a_symint_keeps_on_the_heap(offset, device):
    x, table = torch.randn(1, 3, 2, 8, device=device), torch.randn(1, 3, 4, device=device)
    with pytest.raises(ValueError, match=f"offset is {offset} but must be 0, because cos has shape"):
        torch.ops.rope.rotate(x, table, table, offset=offset)


@pytest.mark.parametrize("message, error, ops, changes", CASES)
def test_a_bad_call_with_fake_tensors_raises_the_same_error(message, error, ops, changes, device):
    skip_float64_on_metal(message, device)
    for op, a, expected in calls(message, ops, changes, device):
        mode = FakeTensorMode()  # its tensors share a storage if the real ones do
        fake = {name: mode.from_tensor(t) for name, t in tensors_of(a).items()}
        with mode, pytest.raises(error, match=re.escape(expected)):
            op(**a | fake)


# Every fourth case, without those of overlapping memory. A few of each kind are enough, because Dynamo treats shapes and
# dtypes in the same way in every case, and each costs a compilation. Each is compiled for one of its operators.
COMPILED = [(i, *c.values) for i, c in enumerate(c for c in CASES if "in place" not in c.values[2])][::4]


@pytest.mark.parametrize("index, message, error, ops, changes", COMPILED)
def test_a_bad_call_under_torch_compile_raises_the_same_message(index, message, error, ops, changes, device):
    """Dynamo wraps the exception that the fake implementation raises, and keeps its message."""
    skip_float64_on_metal(message, device)
    calls_of_case = list(calls(message, ops, changes, device))
    op, a, expected = calls_of_case[index // 4 % len(calls_of_case)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: op(**a), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=re.escape(expected)):
        compiled(a)


@pytest.mark.parametrize("message, error, ops, changes", RANGES[:3] + RANGES[-6:-3])
def test_an_index_error_keeps_its_type_under_torch_compile(message, error, ops, changes, device):
    """The kernel raises it when the compiled program runs."""
    skip_if_the_gpu_checks(changes, device)
    for op, a, expected in list(calls(message, ops, changes, device))[::2]:
        torch._dynamo.reset()
        compiled = torch.compile(lambda a, op=op: op(**a), fullgraph=True)
        with pytest.raises(IndexError, match=re.escape(expected)):
            compiled(a)


@pytest.mark.parametrize(
    "positions, inv_freq, dtype, error, message",
    [
        (
            torch.zeros(3, dtype=torch.uint16),
            torch.ones(4),
            None,
            TypeError,
            "positions is uint16 but must be int8, uint8, int16, int32, int64, float16, bfloat16, float32 or float64",
        ),
        (torch.zeros(3, dtype=torch.bool), torch.ones(4), None, TypeError, "positions is bool but must be int8"),
        (torch.zeros(3, dtype=torch.cfloat), torch.ones(4), None, TypeError, "positions is complex64 but must be int8"),
        (torch.arange(3), torch.ones(4).half(), None, TypeError, "inv_freq is float16 but must be float32 or float64"),
        (torch.arange(3), torch.ones(4).long(), None, TypeError, "inv_freq is int64 but must be float32 or float64"),
        (
            torch.arange(3),
            torch.ones(3, 4),
            None,
            ValueError,
            "inv_freq has shape [3, 4] but must have shape [rotary_dim",
        ),
        (
            torch.arange(3),
            torch.ones(4),
            torch.int64,
            TypeError,
            "dtype is int64 but must be float16, bfloat16, float32 or float64",
        ),
    ],
    ids=str,
)
def test_cos_sin_raises_errors(positions, inv_freq, dtype, error, message, device):
    positions, inv_freq = positions.to(device), inv_freq.to(device)
    with pytest.raises(error, match=re.escape("rope.cos_sin: " + message)) as raised:
        rope.cos_sin(positions, inv_freq, dtype=dtype)
    assert re.match(FORM, str(raised.value))
    with FakeTensorMode() as mode, pytest.raises(error, match=re.escape("rope.cos_sin: " + message)):
        rope.cos_sin(mode.from_tensor(positions), mode.from_tensor(inv_freq), dtype=dtype)


@pytest.mark.parametrize(
    "op, name",
    [(op, name) for op in OPS["qk"] for name in (*OWN[op][1:], "cos", "sin", "positions", "inv_freq")]
    + [("rotate_into_cache_", name) for name in ("slots", "k_scale", "v_scale")],
)
def test_a_tensor_on_another_device_is_an_error(op, name, device):
    """All tensors must be on the device of x. The other device is meta, which every machine has."""
    a = arguments(op, device) | {"positions": torch.arange(S, device=device)}
    if name == "inv_freq":
        a |= {"cos": None, "sin": None, "inv_freq": torch_rope.inv_freq(R, device=device)}
    if name == "slots":
        a["slots"] = torch.arange(B * S, device=device).view(B, S)
    if name.endswith("scale"):
        a |= {n: a[n].to(torch.int8) for n in ("k_cache", "v_cache")}
        a |= {n: torch.ones(1, device=device) for n in ("k_scale", "v_scale")}
    a[name] = a[name].to("meta")
    here = re.escape(str(a["q"].device))
    with pytest.raises(ValueError, match=rf"rope.{op}: {name} is on meta but must be on {here}, the device of q"):
        getattr(rope, op)(**a)


@pytest.mark.parametrize(
    "positions, message",
    [
        (torch.tensor(3), "positions has shape [] but must have shape [axes, ...]"),
        (torch.zeros(3, 5), "positions has 3 axes but must have 2, as inv_freq has"),
    ],
)
def test_axial_cos_sin_raises_errors(positions, message, device):
    with pytest.raises(ValueError, match=re.escape("rope.axial_cos_sin: " + message)):
        rope.axial_cos_sin(positions.to(device), torch.ones(2, 4, device=device))


def test_a_message_shows_symbolic_sizes():
    rotate_qk = make_fx(lambda q, k: rope.rotate_qk(q, k, inv_freq=torch.ones(R // 2)), tracing_mode="symbolic")
    with pytest.raises(
        ValueError, match="rope.rotate_qk: k has seq s.* but must have seq s.*, as q has; only the heads"
    ):
        rotate_qk(torch.ones(B, S, H, D), torch.ones(B, S + 1, H, D))
    rotate = make_fx(lambda x, freq: rope.rotate(x, inv_freq=freq), tracing_mode="symbolic")
    with pytest.raises(
        ValueError, match="inv_freq has s.* but must have at most .*s.*, because x has head_dim s.*: rotary"
    ):
        rotate(torch.ones(S, H, D), torch.ones(D))


CASES_OF_BOTH_BACKWARDS = [
    (TypeError, "q is bfloat16 but must be float32, the dtype of q_out_grad", {"q": cast("q", torch.bfloat16)}),
    (
        ValueError,
        "q has shape [6, 3, 16] but must have shape [2, 6, 3, 16], the shape of q_out_grad",
        {"q": ones(S, H, D)},
    ),
    (
        ValueError,
        "k has shape [2, 6, 2, 16] but must have shape [2, 6, 1, 16], the shape of k_out_grad",
        {"k": ones(B, S, 2, D)},
    ),
    (ValueError, "k is on meta but must be on {device}, the device of k_out_grad", {"k": lambda a: a["k"].to("meta")}),
    (ValueError, "cos, sin and inv_freq are None but must not all be None", {"cos": None, "sin": None}),
]


@pytest.mark.parametrize(
    "op, error, message, changes",
    [(op, *case) for op in ("norm_rotate_qk", "rotate_table") for case in CASES_OF_BOTH_BACKWARDS]
    + [
        (
            "norm_rotate_qk",
            ValueError,
            "k_norm_weight has shape [8] but must have shape [head_dim]",
            {"k_norm_weight": ones(R)},
        ),
        (
            "rotate_table",
            ValueError,
            "inv_freq is given but must be None, because this operator computes the gradients of cos and sin",
            {"cos": None, "sin": None, "inv_freq": freq()},
        ),
        ("rotate_table", ValueError, "k is None but must be given together with k_out_grad", {"k": None}),
        ("rotate_table", ValueError, "k_out_grad is None but must be given together with k", {"k_out_grad": None}),
    ],
)
def test_a_backward_operator_raises_errors(op, error, message, changes, device):
    a = arguments("norm_rotate_qk" if op == "norm_rotate_qk" else "rotate_qk", device)
    a |= {"q_out_grad": torch.randn_like(a["q"]), "k_out_grad": torch.randn_like(a["k"])}
    message = message.format(device=a["q"].device)
    a |= {name: change(a) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(error, match=re.escape(f"rope._{op}_backward: {message}")) as raised:
        getattr(rope, f"_{op}_backward")(**a)
    assert re.match(FORM, str(raised.value))


# The tensors besides q that must not be None. rotate_into_cache_ takes norm weights after these, which may be None.
REQUIRED = {op: own[1:5] for op, own in OWN.items()}


@pytest.mark.parametrize("op, name", [(op, name) for op, names in REQUIRED.items() for name in names])
def test_none_instead_of_a_tensor_is_an_error(op, name, device):
    """From Python, None passes for an argument that the schema declares as Tensor, so the operator must check it."""
    good = arguments(op, device)
    with pytest.raises(ValueError, match=f"rope.{op}: {name} is None but must be a tensor"):
        getattr(rope, op)(**good | {name: None})


@pytest.mark.parametrize("op", [op for op in OPERATORS if op not in ("cos_sin", "axial_cos_sin")])
def test_none_instead_of_all_tensors_is_an_error(op):
    needed = [a.name for a in schema_of(op).arguments if not a.has_default_value()]
    with pytest.raises(ValueError, match=f"rope.{op}: {needed[0]} is None but must be a tensor"):
        getattr(rope, op)(**dict.fromkeys(needed))


@pytest.mark.parametrize("op", ["cos_sin", "axial_cos_sin"])
@pytest.mark.parametrize("none", [["positions"], ["inv_freq"], ["positions", "inv_freq"]])
def test_none_instead_of_positions_or_frequencies_is_an_error(op, none):
    given = {"positions": torch.ones(1, 3), "inv_freq": torch.ones(1, 4)}
    with pytest.raises(ValueError, match=f"rope.{op}: {none[0]} is None but must be a tensor"):
        getattr(rope, op)(**given | dict.fromkeys(none))


class OnXpu(torch.Tensor):
    """A tensor on a device for which there are no kernels."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device="xpu")

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return op(*args, **kwargs)


NESTED = (
    " is a nested tensor but must be a plain tensor; pass the values of a nested tensor with layout=torch.jagged, and "
    "positions that torch_rope.positions_from_cu_seqlens makes of its offsets"
)
REFUSED = {  # how to make the tensor -> the end of the message
    "jagged": (lambda t: torch.nested.nested_tensor([*t], layout=torch.jagged), NESTED),
    "nested": (lambda t: torch.nested.nested_tensor([*t], layout=torch.strided), NESTED),
    "sparse": (torch.Tensor.to_sparse, " is a torch.sparse.FloatTensor but must be dense and not quantized"),
    "quantized": (
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        " is a QuantizedCPUQInt8Type but must be dense and not quantized",
    ),
    "xpu": (OnXpu, " is on xpu but must be on a device for which this build of torch_rope has kernels"),
}


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*(nested|quantiz)")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("op", OPERATORS)
def test_tensors_that_no_back_end_takes_are_refused_by_name(op, kind):
    """The last tensor is of this kind and all others are plain. Without autograd, the error is the same."""
    needed = [a for a in schema_of(op).arguments if not a.has_default_value()]
    names = [a.name for a in needed if a.type.kind() == "TensorType"]
    make, message = REFUSED[kind]
    given = dict.fromkeys(a.name for a in needed) | {name: torch.ones(2, 3, 1, 4) for name in names}
    given[names[-1]] = make(given[names[-1]])
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(NotImplementedError, match=re.escape(f"rope.{op}: {names[-1]}{message}")):
            getattr(rope, op)(**given)


@pytest.mark.parametrize("n", [2**63, -(2**63) - 1])
@pytest.mark.parametrize("name", ["offset", "rotary_start"])
@pytest.mark.parametrize("op", OWN)
def test_an_argument_that_is_no_int64_is_an_error(op, name, n):
    function = getattr(torch_rope, op.removesuffix("_") if "cache" in op else op)
    a = arguments(op)
    own = [a.pop(name) for name in OWN[op][:5]]
    with pytest.raises(ValueError, match=f"rope.{op}: {name} is {n} but must be at least -2..63 and below 2..63"):
        function(*own, **a | {name: n})


# ---- which tensors may be written in place ----


@pytest.mark.parametrize("op", ["rotate_", "rotate_qk_"])
def test_slices_of_one_packed_tensor_do_not_overlap(op, device):
    """The address ranges of the slices interleave, but the slices share no element."""
    freq = torch_rope.inv_freq(D, device=device)
    qkv = torch.randn(B, S, 5, D, device=device)
    packed = torch.randn(B, S, 2, H, D, device=device)
    heads_last = torch.randn(B, S, D, 4, device=device)
    for q, k in (
        (qkv[:, :, :3], qkv[:, :, 3:4]),
        (packed[:, :, 0], packed[:, :, 1]),
        (qkv[:, ::2], qkv[:, 1::2]),
        (qkv[:, :, ::2], qkv[:, :, 1::2]),
        (heads_last[..., :3].transpose(2, 3), heads_last[..., 3:].transpose(2, 3)),
        (qkv[:1], qkv[1:]),
    ):
        tensors = (q, k) if "qk" in op else (q,)
        expected = [rope.rotate(t, inv_freq=freq) for t in tensors]
        getattr(rope, op)(*tensors, inv_freq=freq)
        assert all(torch.equal(t, e) for t, e in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("pair", ["kv blocks", "blocks kv", "kv in a row", "every second cell", "heads"])
def test_slices_of_one_packed_cache_do_not_overlap(pair, device):
    """Neither do q, k and v, which are slices of one packed tensor."""
    freq = torch_rope.inv_freq(D, device=device)
    k_cache, v_cache = {
        "kv blocks": lambda: torch.randn(2, B, 8, 2, D, device=device).unbind(0),
        "blocks kv": lambda: torch.randn(B, 2, 8, 2, D, device=device).unbind(1),
        "kv in a row": lambda: torch.randn(B, 8, 2, 2 * D, device=device).chunk(2, -1),
        "every second cell": lambda: (lambda kv: (kv[:, ::2], kv[:, 1::2]))(torch.randn(B, 16, 2, D, device=device)),
        "heads": lambda: (lambda kv: (kv[:, :, ::2], kv[:, :, 1::2]))(torch.randn(B, 8, 4, D, device=device)),
    }[pair]()
    q, k, v = torch.randn(B, S, 7, D, device=device).split([3, 2, 2], 2)
    q_rotated, k_rotated = rope.rotate_qk(q, k, inv_freq=freq, offset=1)
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, inv_freq=freq, offset=1)
    assert torch.equal(q, q_rotated)
    assert torch.equal(k_cache[:, 1:7], k_rotated) and torch.equal(v_cache[:, 1:7], v)


def test_parameters_in_the_gaps_of_a_tensor_that_is_written_do_not_overlap(device):
    """Weights, tables, positions and slots lie between the heads of q and of the caches, and share no element with them."""
    by_q, by_cache = torch.randn(B, S, 1, 3 * D, device=device), torch.randn(B, 20, 1, 5 * D, device=device)
    q, k_cache, v_cache = by_q[..., :D], by_cache[..., :D], by_cache[..., D : 2 * D]
    weights = {"q_norm_weight": by_q[0, 3, 0, D : 2 * D], "k_norm_weight": by_cache[1, 19, 0, 2 * D : 3 * D]}
    angles = {"cos": by_cache[0, :, 0, 3 * D : 3 * D + 4], "sin": by_cache[1, :, 0, 3 * D : 3 * D + 4]}
    angles["positions"], slots = (t.view(torch.int32)[:, :S, 0, -1] for t in (by_q, by_cache))
    angles["positions"].copy_(torch.randint(0, 20, (B, S), device=device))
    slots.copy_(torch.randperm(40, device=device)[: B * S].view(B, S))
    k, v = torch.randn(2, B, S, 1, D, device=device)
    q_rotated, k_rotated = rope.norm_rotate_qk(q, k, **weights, **angles)
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, **angles, slots=slots, **weights)
    assert torch.equal(q, q_rotated)
    for cache, x in (k_cache, k_rotated), (v_cache, v):
        assert torch.equal(cache.reshape(40, 1, D)[slots.long()], x)


def test_dimensions_that_are_not_nested_may_be_written(device):
    """Two dimensions of size 2 with strides 2 and 3 are not nested, but their four elements are distinct."""
    storage = torch.randn(400, device=device)
    x = storage.as_strided((2, 2, 1, 2), (2, 3, 1, 100))
    expected = rope.rotate(x, inv_freq=torch.ones(1, device=device))
    rope.rotate_(x, inv_freq=torch.ones(1, device=device))
    assert torch.equal(x, expected)


def test_sharing_half_of_an_element_is_an_overlap(device):
    if not supported(device, torch.float64):
        pytest.skip("Apple GPUs have no float64")
    x = torch.zeros(1, S, 1, 4, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="x overlaps positions but must have separate memory"):
        rope.rotate_(x, inv_freq=torch.ones(2, device=device), positions=x.view(torch.int32)[0, :, 0, 1])


@pytest.mark.cpu
def test_two_storages_of_the_same_memory_overlap():
    memory = np.zeros((1, S, 1, 4), np.float32)
    q, k = torch.from_numpy(memory), torch.from_numpy(memory)
    with pytest.raises(ValueError, match=both_written("q", "k")):
        rope.rotate_qk_(q, k, inv_freq=torch.ones(2))


class RandomViews:
    """Makes views of one storage with random strides, and compares the addresses of their elements."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.storage = torch.zeros(4000)

    def pick(self, n):
        return int(torch.randint(0, n, (), generator=self.generator))

    def view(self, *sizes, apart=60):
        strides = [self.pick(60), self.pick(40), self.pick(20), 1 + self.pick(6)]
        return self.storage.as_strided(sizes, strides[-len(sizes) :], self.pick(apart))

    def addresses(self, t):
        return torch.arange(4000).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()

    def share_exactly(self, a, b):
        return not set(self.addresses(a)).isdisjoint(self.addresses(b))

    def share_a_range(self, a, b):
        a, b = self.addresses(a), self.addresses(b)
        return min(a) <= max(b) and min(b) <= max(a)

    def shares_with_itself(self, t):
        addresses = self.addresses(t)
        return len(set(addresses)) < len(addresses)


@pytest.mark.parametrize("seed", range(300))
def test_an_overlap_is_found_exactly(seed):
    """The sets of the elements' addresses say whether q and k overlap."""
    views = RandomViews(seed)
    batch, seq, heads = 1 + views.pick(3), 1 + views.pick(4), 1 + views.pick(3)
    q, k = views.view(batch, seq, heads, 2), views.view(batch, seq, 1 + views.pick(3), 2)
    shared = views.shares_with_itself(q) or views.shares_with_itself(k) or views.share_exactly(q, k)
    try:
        rope.rotate_qk_(q, k, inv_freq=torch.ones(1))
        assert not shared
    except ValueError:
        assert shared


@pytest.mark.parametrize("seed", range(300))
def test_an_overlap_with_a_cache_is_found_by_address_ranges(seed):
    """q, k and v are compared with a cache by address ranges, all other tensors exactly. The views lie further apart than
    in the previous test, so that some calls are legal."""
    views = RandomViews(seed)
    batch, seq, heads = 1 + views.pick(2), 1 + views.pick(2), 1 + views.pick(2)
    q, k, v = (views.view(batch, seq, h, 2, apart=500) for h in (1 + views.pick(2), heads, heads))
    k_cache, v_cache = (views.view(batch, seq, heads, 2, apart=3000) for _ in "kv")
    weight = views.view(2, apart=3000)
    shared = (
        any(views.shares_with_itself(t) for t in (q, k_cache, v_cache))
        or views.share_exactly(k_cache, v_cache)
        or any(views.share_exactly(q, t) for t in (k, v))
        or any(views.share_exactly(t, weight) for t in (q, k_cache, v_cache))
        or any(views.share_a_range(t, cache) for t in (q, k, v) for cache in (k_cache, v_cache))
    )
    try:
        rope.rotate_into_cache_(
            q, k, v, k_cache, v_cache, inv_freq=torch.ones(1), q_norm_weight=weight, k_norm_weight=weight
        )
        assert not shared
    except ValueError:
        assert shared
