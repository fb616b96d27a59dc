"""Calls of every operator that raise an error, and the error.

All messages have one form: `rope.rotate: x is int64 but must be float16, bfloat16, float32 or float64`.
"""

import re
from dataclasses import dataclass

import pytest
import torch
from calls import arguments_of, make
from cases import OPERATORS, need

B, S, H, D, R = 2, 6, 3, 16, 8  # batch, seq, heads, head_dim, rotary_dim

ROTATING = [op for op in OPERATORS if "offset" in arguments_of(op) and not op.startswith("_")]
# The groups of operators that a case can be for. Any other operator is a group of its own.
GROUPS = {
    "all": ROTATING,
    "qk": [op for op in ROTATING if "k" in arguments_of(op)],
    "norm": [op for op in ROTATING if "q_norm_weight" in arguments_of(op)],
    "factor": [op for op in ROTATING if "q_factor" in arguments_of(op)],
    "without a cache": [op for op in ROTATING if "k_cache" not in arguments_of(op)],
    "in place": [op for op in ROTATING if op.endswith("_")],
    "cache": ["rotate_into_cache_"],
}


def arguments(op, device="cpu") -> dict:
    """Returns the arguments of a legal call with tables, by name. Each case changes some of them. The x of rotate is q."""
    if op.endswith("cos_sin"):
        return make(op, device, size=(1, 3, H, 1, D, R))
    size, lengths = (B, S, H, 1, D, R), {"rows": 20, "cells": 20, "blocks": B}
    call = make(op, device, size=size, k="bshd", v="bshd", k_weight="float32", cache="blocks kv", **lengths)
    if "k_cache" in call:
        call |= {name: torch.rand(D, device=device) for name in ("q_norm_weight", "k_norm_weight")}
    return {"q" if name == "x" else name: value for name, value in call.items()}


@dataclass
class Case:
    operators: str  # a key of GROUPS, or an operator
    error: type  # of the exception
    changes: str  # the keyword arguments that differ from the legal call, in Python
    message: str


def table(text: str) -> list:
    """Returns the cases of a table, as parameters of pytest.

    A line in brackets names the operators and the type of the error in the lines that follow. Each of these reads
    "changes -> message", and goes on in the next line if that is indented. The message may stop early. It may contain
    {q}, the name of the operator's first argument, and "...", which stands for anything.
    """
    cases, operators, error = [], "", ValueError
    for line in filter(None, re.sub(r"\n +", " ", text).split("\n")):
        if heading := re.fullmatch(r"\[(.*): (\w+)\]", line):
            operators, error = heading[1], {e.__name__: e for e in (ValueError, TypeError, IndexError)}[heading[2]]
        else:
            cases.append(Case(operators, error, *line.split(" -> ")))
    return [
        # The kernel finds numbers that are out of range, code that all back ends share the other errors.
        pytest.param(c, id=f"{c.operators}: {c.message[:70]}", marks=[pytest.mark.shared] * (c.error is not IndexError))
        for c in cases
    ]


def changed(a, changes, device) -> dict:
    """Returns the arguments `a` after the changes. These may use the legal arguments and the names below."""

    def ones(*shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype)

    with torch.device(device):
        names = a | {
            "ones": ones,
            "ints": lambda *shape: torch.zeros(shape, dtype=torch.int64),
            "values": torch.tensor,
            "both": lambda *shape: {"cos": ones(*shape), "sin": ones(*shape)},  # tables of this shape
            "freq": lambda *shape, **dtype: {"cos": None, "sin": None, "inv_freq": ones(*shape, **dtype)},
            "scales": {"k_scale": ones(1), "v_scale": ones()},
            "int8": {name: a[name].to(torch.int8) for name in ("k_cache", "v_cache") if name in a},
            "three_heads": {"k": ones(B, S, H, D), "k_cache": ones(B, 20, H, D).to(torch.int8)},
        }
        return a | eval(f"dict({changes})", globals() | names)


def calls(case, device):
    """Yields, for each operator of a case, the operator, its arguments by name, and a pattern of the message."""
    if re.search("double|float64", case.changes):
        need(device, torch.float64)
    for op in GROUPS.get(case.operators, [case.operators]):
        a = changed(arguments(op, device), case.changes, device)
        q = "x" if "x" in arguments_of(op) else "q"
        if q == "x":
            a["x"] = a.pop("q")
        message = re.escape(f"rope.{op}: " + case.message.replace("{q}", q))
        yield getattr(torch.ops.rope, op), a, message.replace(r"\.\.\.", ".*")


CASES = table("""
[all: ValueError]
q=ones(S, D) -> {q} has shape [6, 16] but must have shape [seq, heads, head_dim] or [batch, seq, heads, head_dim];
    if the head axis is missing, pass {q}.unsqueeze(-2)
cos=None, sin=None -> cos, sin and inv_freq are None but must not all be None; pass one angle source: cos and sin, or
    inv_freq
inv_freq=ones(4) -> inv_freq is given but must be None, because cos and sin are given; pass one angle source: cos and
    sin, or inv_freq
sin=None -> sin is None but must be given together with cos; pass one angle source: cos and sin, or inv_freq
cos=None, inv_freq=ones(4) -> cos is None but must be given together with sin; pass one angle source
cos=ones(20, 32), sin=ones(20, 32) -> cos has 32 columns but must have at most 8, because {q} has head_dim 16:
    rotary_dim 64 is larger than head_dim
cos=ones(4), sin=ones(4) -> cos has shape [4] but must have shape [max_position, rotary_dim / 2],
    [batch or 1, seq, rotary_dim / 2] or [batch or 1, seq, heads, rotary_dim / 2]
sin=ones(20, 3) -> sin has shape [20, 3] but must have shape [20, 4], the shape of cos
sin=ones(1, 20, 4) -> sin has shape [1, 20, 4] but must have shape [20, 4], the shape of cos
**both(B, 1, S, 4) -> cos has 1 rows ... a row per token; pass a table [batch, 1, seq, rotary_dim / 2] as cos.squeeze(1)
**both(1, 5, 4) -> cos has 5 rows per sequence but must have 6, the seq of {q}: such a table has a row per token
**both(3, S, 4) -> cos has batch 3 but must have batch 2, as {q} has, or batch 1
**both(B, S, 1, 4) -> cos has 1 heads but must have 3, as {q} has: a 4-D table has a row per token and head; pass a
    table for all heads as cos.squeeze(-2)
rotary_start=-1 -> rotary_start is -1 but must be at least 0
rotary_start=9 -> rotary_start is 9 but must be at most 8, because {q} has head_dim 16 and 8 channels are rotated
**freq(1, 4) -> inv_freq has shape [1, 4] but must have shape [rotary_dim / 2] or [2, rotary_dim / 2]
**freq(9) -> inv_freq has 9 frequencies but must have at most 8, because {q} has head_dim 16: rotary_dim 18 is larger than
    head_dim
positions=ints(3, 1, S) -> positions has shape [3, 1, 6] but must have shape [seq], [1, seq] or [batch, seq]; for several
    axes, make tables with axial_cos_sin
positions=ints(5) -> positions has shape [5] but must have shape [seq], [1, seq] or [batch, seq] with seq 6, as {q} has
positions=ints(3, S) -> positions has batch 3 but must have batch 2, as {q} has, or batch 1; for several axes, make tables
attention_factor=torch.inf -> attention_factor is inf but must be finite

[without a cache: ValueError]
**both(1, S, 4), positions=ints(S) -> positions is given but must be None, because cos has shape [1, 6, 4]: such a table
    has a row per token; pass a 2-D table to select rows by position
**both(1, S, 4), offset=3 -> offset is 3 but must be 0, because cos has shape [1, 6, 4]: such a table has a row per
    token; pass a 2-D table to select rows by position

[all: TypeError]
q=ints(B, S, H, D) -> {q} is int64 but must be float16, bfloat16, float32 or float64
sin=sin.bfloat16() -> sin is bfloat16 but must be float32, the dtype of cos
cos=cos.half(), sin=sin.half() -> cos and sin are float16 but must be float32, the dtype of {q}
cos=cos.double(), sin=sin.double() -> cos and sin are float64 ... the dtype of {q}; pass cos.float() and sin.float()
**freq(2, 4, dtype=torch.float64) -> inv_freq has shape [2, 4] and is float64 but must be float32, because it is the sum
    of two parts
cos=cos.cfloat(), sin=sin.cfloat() -> cos and sin are complex64 but must be float32, the dtype of {q}; torch.view_as_real
**freq(4, dtype=torch.half) -> inv_freq is float16 but must be float32 or float64
positions=ones(S) -> positions is float32 but must be int32 or int64; make tables of other positions with cos_sin
positions=ones(B, S, 1, D) -> positions is float32 but must be int32 or int64; if it is v, leave it out, because v is not

[qk: ValueError]
k=ones(S, 1, D) -> k has 3 dimensions but must have 4, as q has
k=ones(1, S, 1, D) -> k has batch 1 but must have batch 2, as q has; only the heads may differ
k=ones(B, S, 1, 12) -> k has head_dim 12 but must have head_dim 16, as q has; only the heads may differ
**both(B, S, 3, 4) -> cos has 3 heads but must have 1, as k has: a 4-D table has a row per token and head

[rotate_qk: ValueError]
k=ones(B, 5, 1, D) -> k has seq 5 but must have seq 6, as q has; only the heads may differ; pass tensors [batch, heads, seq,
    head_dim] transposed, as x.transpose(1, 2); if q and k have different lengths, call rotate for each

[qk: TypeError]
k=k.bfloat16() -> k is bfloat16 but must be float32, the dtype of q

[norm: ValueError]
q_norm_weight=ones(1, 1, D) -> q_norm_weight has shape [1, 1, 16] but must have shape [head_dim], to normalise each head,
    or [heads, head_dim], to normalise all heads of a token together
q_norm_weight=ones(1, D) -> q_norm_weight has 1 heads but must have 3, as q has: a 2-D weight has a row for each head
q_norm_weight=ones(H, D), k_norm_weight=ones(H, D) -> k_norm_weight has 3 heads but must have 1, as k has: a 2-D weight
q_norm_weight=ones(H, D) -> k_norm_weight has shape [16] but must have shape [heads, head_dim], as q_norm_weight has
k_norm_weight=ones(R) -> k_norm_weight has shape [8] but must have shape [head_dim] with head_dim 16, as q has
q_norm_weight=ones(H * D) -> q_norm_weight has shape [48] but must ... as q has; pass that of a norm over all heads as
    weight.view(heads, head_dim)
norm_eps=-1.0 -> norm_eps is -1 but must be at least 0, and finite
norm_eps=torch.nan -> norm_eps is nan but must be at least 0, and finite
norm_weight_offset=torch.inf -> norm_weight_offset is inf but must be finite
round_before_weight=True -> round_before_weight is True but must be False, because eager_rounding is False

[factor: ValueError]
q_factor=values(1.5) -> q_factor has shape [] but must have shape [seq], [batch or 1, seq] or [batch or 1, seq, heads]
q_factor=ones(5) -> q_factor has shape [5] but must have shape [seq], [batch or 1, seq] ... heads] with seq 6, as q has
q_factor=ones(3, S) -> q_factor has batch 3 but must have batch 2, as q has, or batch 1
q_factor=ones(1, S, 1) -> q_factor has shape [1, 6, 1] but must have ... [batch or 1, seq, heads] with 3 heads, as q has
q_factor=ones(B, H, S) -> q_factor has shape [2, 3, 6] but must have ... heads] with seq 6, as q has

[factor: TypeError]
q_factor=ones(S).bfloat16() -> q_factor is bfloat16 but must be float32

[norm: TypeError]
q_norm_weight=ones(D).bfloat16() -> q_norm_weight is bfloat16 but must be float32, the dtype of q
k_norm_weight=ones(D).double() -> k_norm_weight is float64 but must be float32, the dtype of q

[cache: ValueError]
v_norm_weight=ones(D) -> v_norm_weight is given but must be None, because norm_v is False
norm_v=True, v_norm_weight=ones(R) -> v_norm_weight has shape [8] but must have shape [v_dim] with v_dim 16, as v has
norm_v=True, v_norm_weight=ones(1, D) -> v_norm_weight has shape [1, 16] but must have shape [v_dim]
k_norm_weight=None -> k_norm_weight is None but must be given together with q_norm_weight; pass both, or neither
q_norm_weight=None -> q_norm_weight is None but must be given together with k_norm_weight; pass both, or neither
v=ones(1, S, 1, D) -> v has batch 1 but must have batch 2, as q has; only the heads and head_dim may differ
**int8, v_scale=ones(1) -> k_scale is None but must be given, because k_cache is int8
v_cache=ints(B, 20, 1, D).char().view(torch.float8_e5m2) -> v_scale is None but must be given, because v_cache is
    float8_e5m2
k_scale=ones(1) -> k_scale is given but must be None, because k_cache is float32, the dtype of k
q_out=ones(B, S, 1, D) -> q_out has shape [2, 6, 1, 16] but must have shape [2, 6, 3, 16], the shape of q
q_out=q[0] -> q_out has shape [6, 3, 16] but must have shape [2, 6, 3, 16], the shape of q
q_scale=ones(1) -> q_scale is given but must be None, because q is written in place; pass a float8 or int8 q_out
q_out=ones(B, S, H, D), q_scale=ones(1) -> q_scale is given but must be None, because q_out is float32, the dtype of q
q_out=q.char() -> q_scale is None but must be given, because q_out is int8
q_out=q.char(), q_scale=ones(2) -> q_scale has shape [2] but must have ... [heads] with 3 heads, as q_out has
**int8 | scales | dict(v_scale=ones(2)) -> v_scale has shape [2] but must have one element, or shape [heads] with 1
    heads, as v_cache has
**int8 | scales | three_heads | dict(k_scale=ones(1, H)) -> k_scale has shape [1, 3] but must have one element, or
k_cache=ones(20, D) -> k_cache has shape [20, 16] but must have shape [blocks, block_size, kv_heads, head_dim] or
    [max_seq, kv_heads, head_dim]
k_cache=ones(B, 1, 20, D) -> k_cache has 20 heads but must have 1, as k has; pass a head-major cache as
    k_cache.transpose(-3, -2)
v_cache=ones(B, 20, H, D) -> v_cache has 3 heads but must have 1, as v has; pass a head-major cache as v_cache.transpose
k_cache=ones(B, 20, 1, 12) -> k_cache has head_dim 12 but must have head_dim 16, as k has
v=ones(B, S, 1, 12) -> v_cache has head_dim 16 but must have head_dim 12, as v has
v_cache=ones(20, 1, D) -> v_cache has shape [20, 1, 16] but must have the blocks and block_size of k_cache, which has
    shape [2, 20, 1, 16]
v_cache=ones(B, 19, 1, D) -> v_cache has shape [2, 19, 1, 16] but must have the blocks and block_size of k_cache
**both(1, S, 4), slots=ints(B, S), positions=ints(S) -> positions is given but must be None, because cos has shape
    [1, 6, 4]: such a table has a row per token, and slots choose the cells
**both(B, S, 4), slots=ints(B, S), offset=-1 -> offset is -1 but must be 0, because cos has shape [2, 6, 4]: such a table
    has a row per token, and slots choose the cells
k_cache=ones(1, 20, 1, D), v_cache=ones(1, 20, 1, D) -> k_cache has shape [1, 20, 1, 16] but must have at least 2 blocks,
    the batch of q: without slots, sequence b is written to block b
slots=ints(1, B, S) -> slots has shape [1, 2, 6] but must have shape [seq] or [batch, seq]
slots=ints(B, 5) -> slots has shape [2, 5] but must have shape [seq] or [batch, seq] with seq 6, as q has; give the slot -1
slots=ints(S) -> slots has shape [6] but must have shape [batch, seq] with batch 2, as q has: each token needs its own

[norm_rotate_qk: TypeError]
q=q.bfloat16(), k=k.bfloat16(), cos=cos.bfloat16(), sin=sin.bfloat16(), k_norm_weight=ones(D).bfloat16(),
    eager_rounding=True, round_before_weight=True -> q_norm_weight is float32 but must be bfloat16, the dtype of q, because
    round_before_weight is True

[cache: TypeError]
norm_v=True, v_norm_weight=ones(D).half() -> v_norm_weight is float16 but must be float32, the dtype of q
v=v.bfloat16() -> v is bfloat16 but must be float32, the dtype of q
k_cache=k_cache.bfloat16() -> k_cache is bfloat16 but must be float32, the dtype of k
v_cache=v_cache.byte() -> v_cache is uint8 but must be float32, the dtype of v, or float8_e4m3fn, float8_e5m2 or int8
**int8 | scales | dict(k_scale=ones(1).bfloat16()) -> k_scale is bfloat16 but must be float32
q_out=q.char(), q_scale=ones(1).half() -> q_scale is float16 but must be float32
q_out=q.bfloat16() -> q_out is bfloat16 but must be float32, the dtype of q, or float8_e4m3fn, float8_e5m2 or int8
slots=ones(B, S) -> slots is float32 but must be int32 or int64

[_norm_rotate_qk_backward: TypeError]
q_out_grad=q.bfloat16() -> q_out_grad is bfloat16 but must be float32, the dtype of q
[_norm_rotate_qk_backward: ValueError]
q_out_grad=ones(S, H, D) -> q_out_grad has shape [6, 3, 16] but must have shape [2, 6, 3, 16], the shape of q
k_out_grad=ones(B, S, 2, D) -> k_out_grad has shape [2, 6, 2, 16] but must have shape [2, 6, 1, 16], the shape of k
k_norm_weight=ones(R) -> k_norm_weight has shape [8] but must have shape [head_dim]

[cos_sin: TypeError]
positions=ints(3).to(torch.uint16) -> positions is uint16 but must be int8, uint8, int16, int32, int64, float32 or float64
positions=ints(3).bool() -> positions is bool but must be int8
positions=ints(3).char().view(torch.float8_e5m2) -> positions is float8_e5m2 but must be int8
positions=ones(3).half() -> positions is float16 but must be ... or float64, because float16 has no odd number above 2048;
    make positions in float32, or pass positions.float() if they may be rounded
dtype=torch.int64 -> dtype is int64 but must be float16, bfloat16, float32 or float64
[cos_sin: ValueError]
attention_factor=torch.nan -> attention_factor is nan but must be finite
inv_freq=ones(3, 4) -> inv_freq has shape [3, 4] but must have shape [rotary_dim
[axial_cos_sin: TypeError]
positions=ones(2, 3).bfloat16() -> positions is bfloat16 but must be ... because bfloat16 has no odd number above 256; make
[axial_cos_sin: ValueError]
positions=values(3) -> positions has shape [] but must have shape [axes, ...]
positions=ints(3, 5) -> positions has 3 axes but must have 2, as inv_freq has
""")
# k and v are compared with a cache by address ranges. In the cases where k is a part of v_cache, and v of k_cache, the
# ranges overlap, although the tensors share no element.
OVERLAPS = table("""
[in place: ValueError]
q=ones(B, S, 1, D).expand(B, S, H, D) -> {q} has shape [2, 6, 3, 16] and strides [96, 16, 0, 1], so some of its elements
    share memory, but must have separate memory for each element, because {q} is written in place; clone it first
q=ones(400).as_strided((B, S, H, D), (24, 4, 8, 1)) -> {q} has ... strides [24, 4, 8, 1], so some of its elements share
cos=q.view(-1)[:80].view(20, 4) -> {q} overlaps cos but must have separate memory, because {q} is written in place and cos
    is read
cos=None, sin=None, inv_freq=q[1, 2, 0, :4] -> {q} overlaps inv_freq but ... and inv_freq is read

[rotate_: ValueError]
q=(x := ones(B, S, H, D, dtype=torch.float64)), positions=x.view(torch.int32)[0, :, 0, 1] -> x overlaps positions but

[rotate_qk_: ValueError]
k=q[:, :, 1:2] -> q overlaps k but must have separate memory, because both are written in place
sin=k.view(-1)[:80].view(20, 4) -> k overlaps sin but ... because k is written in place and sin is read

[cache: ValueError]
k=q[:, :, 1:2] -> q overlaps k but ... because q is written in place and k is read
k_cache=ones(B, 1, 1, D).expand(B, 20, 1, D) -> k_cache has shape [2, 20, 1, 16] and strides [16, 0, 16, 1], so some
v_cache=k_cache -> k_cache overlaps v_cache but ... because both are written in place
k_cache=ones(B, 20, 1, D), v=k_cache[1:, :S].expand(B, S, 1, D) -> v_cache overlaps v but ... and v is read
norm_v=True, v_norm_weight=k_cache[0, 0, 0] -> k_cache overlaps v_norm_weight but ... and v_norm_weight is read
q_factor=q[0, :, 0, 3] -> q overlaps q_factor but ... and q_factor is read
slots=k_cache.view(torch.int32)[:, 3:9, 0, 7] -> k_cache overlaps slots but ... and slots is read
**int8 | scales | dict(v_cache=v_cache.view(torch.int8)[..., :D], k_scale=v_cache[0, 0, 0, :1]) -> v_cache overlaps
    k_scale but ... and k_scale is read
**int8 | scales | dict(v_scale=q[1, 5, 2, 15]) -> q overlaps v_scale but ... and v_scale is read
cos=k_cache[0, :, 0, :4] -> k_cache overlaps cos but ... and cos is read
q=(x := ones(B, S, 5, D))[:, :, :H], q_out=x[:, :, 2:] -> q_out overlaps q but ... q_out is written in place and q is read
q=(x := ones(B, S, S, D)), q_out=x.transpose(1, 2) -> q_out overlaps q but ... and q is read
q=q[0], k=k[0], v=v[0], q_out=q.view(torch.int8)[0, ..., :D], q_scale=ones(1) -> q_out overlaps q but ... and q is read
q_out=(x := ones(B, S, H, D)), k=x[:, :, 1:2] -> q_out overlaps k but ... and k is read
q_out=(x := ones(B, 20, H, D))[:, :S], k_cache=x[:, :, :1] -> q_out overlaps k_cache but ... both are written in place
q_out=(x := ones(B, S, H, D)).view(torch.int8)[..., :D], q_scale=x[1, 5, 2, :1] -> q_out overlaps q_scale but ... is read
q_out=ones(B, S, 1, D).expand(B, S, H, D) -> q_out has shape [2, 6, 3, 16] and strides [96, 16, 0, 1], so some of its
k_cache=(x := ones(B, 20, 5, D))[:, :, :1], q=x[:, :S, 2:], q_out=ones(B, S, H, D) -> k_cache overlaps q but ... is read
""")
# Errors that depend on the values of positions and slots, which only the kernel reads. Without slots, a position is also
# the index of a cell in a block. The position of a token with a negative slot is no error, and is not in the message.
RANGES = table("""
[all: IndexError]
offset=15 -> positions go from 0 to 5 with offset 15 but position + offset must be at least 0 and below 20, the number of
    rows of cos
offset=-1 -> positions go from 0 to 5 with offset -1 but ... below 20, the number of rows of cos
positions=values([0, 3, -1, 7, 2, 2]) -> positions go from -1 to 7 with offset 0 but ... below 20, the number of rows
positions=values([[0] * 6, [1, 2, 3, 4, 5, 20]]).int() -> positions go from 0 to 20 with offset 0 but ... rows of cos
offset=2**63 - 1 -> positions go from 0 to 5 with offset 9223372036854775807 but ... the number of rows of cos

[cache: IndexError]
**freq(4), offset=15 -> positions go from 0 to 5 with offset 15 but position + offset must be at least 0 and below 20,
    the block_size (or max_seq) of k_cache
**both(1, S, 4), offset=-1 -> positions go from 0 to 5 with offset -1 but ... below 20, the block_size (or max_seq)
**both(B, S, 4), positions=values([[0] * 6, [1, 2, 3, 4, 5, 18]]), offset=2 -> positions go from 0 to 18 with offset 2 but
k_cache=ones(B, 12, 1, D), v_cache=ones(B, 12, 1, D), offset=7 -> positions go from 0 to 5 with offset 7 but ... below 12,
    the block_size (or max_seq) of k_cache
slots=values([[0, 1, 2, 3, 4, 5], [-1, -1, 40, 8, 9, 10]]) -> slots go up to 40 but must be below 40, the number of cells
    of each cache (blocks * block_size = 2 * 20)
q=q[0], k=k[0], v=v[0], k_cache=k_cache[0], v_cache=v_cache[0], slots=values([0, 1, 20, -1, 4, 5]).int() -> slots go up to
    20 but must be below 20, the number of cells of each cache (blocks * block_size = 1 * 20)
positions=values([[-1, 2, 20, 30, 4, 5], [0, 1, 2, 3, 2**62, 5]]), slots=values([[-1, 0, 1, -2, 3, 4],
    [-1, 8, 9, 10, -1, 12]]) -> positions go from 1 to 20 with offset 0 but ... below 20, the number of rows of cos
offset=16, slots=values([[-1, 0, 1, -1, -1, -1], [-1, -1, -1, -1, 9, -1]]) -> positions go from 1 to 4 with offset 16 but
slots=values([[0, 1, 2, 9, -1, -1], [-1, -1, 8, 7, 9, 6]]) -> slots is 9 for token 3 of sequence 0 and for token 4 of
    sequence 1 but must be another cell for each token; pass slots: -1 for padding and for what a ring does not keep
**both(1, S, 4), positions=values([5, 0, 1, 2, 1, 3]), offset=4 -> position + offset is 5 for token 2 of sequence 0 and for token 4 of
positions=values([[0, 1, 2, 3, 4, 5], [5, 4, 3, 3, 1, 0]]).int() -> position + offset is 3 for token 2 of sequence 1 and for
""")
