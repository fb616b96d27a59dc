"""Helpers of tests that compile, export, map or differentiate small calls: they make them, and compare results."""

import copy

import pytest
import torch
from calls import Source, arguments_of, make
from cases import OPERATORS, schema_of
from torch.utils._pytree import tree_leaves

import torch_rope

rope = torch.ops.rope

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTH = 64  # rows of a table, and cells in each block of a cache

IN_PLACE = [op for op in OPERATORS if schema_of(op).is_mutable]
FUNCTIONAL = [op for op in OPERATORS if not schema_of(op).is_mutable]
ROTATING = [op for op in IN_PLACE + FUNCTIONAL if "offset" in arguments_of(op)]
OF_A_LAYER = ["rotate_qk", "rotate_qk_", "norm_rotate_qk", "norm_rotate_qk_", "rotate_into_cache_"]


def call_of(op, device, source="table", seq=6, batch=2, **more):
    """Returns the arguments of a small call by name. source: a kind of Source, or a Source."""
    source = Source(source, strides="strided") if isinstance(source, str) else source
    sizes = {"size": (batch, seq, HEADS, KV_HEADS, DIM, DIM), "rows": LENGTH, "blocks": batch, "cells": LENGTH}
    return make(op, device, **sizes | {"source": source} | more)


def operands(op, device, seq=6, batch=2, **more):
    """Returns the tensors that op takes before its angles."""
    names, call = list(arguments_of(op)), call_of(op, device, seq=seq, batch=batch, **more)
    return [call[name] for name in names[: names.index("cos")]]


def qk(device, seq=6, batch=2):
    return operands("rotate_qk", device, seq, batch)


def norm_weights(device, **more):
    return operands("norm_rotate_qk", device, **more)[2:]


def tables(device, rotary_dim=DIM, rows=LENGTH):
    """Returns cos and sin, [rows, rotary_dim / 2], which have different strides."""
    cos, sin = rope.cos_sin(torch.arange(rows, device=device), torch_rope.inv_freq(rotary_dim, device=device))
    return cos, torch.stack([sin, cos], -1)[..., 0]


def split(qkv):
    """Returns q, k and v, each [batch, seq, heads, DIM], as views of qkv [batch, seq, width]."""
    return qkv.view(*qkv.shape[:2], -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 2)


# ---- comparing ----


def copies(tensors):
    """Returns copies with the same strides. Views of one tensor become views of one copy.

    On mps the copies are dense, because torch makes them so.
    """
    return copy.deepcopy(list(tensors))


def tensors_of(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


def assert_same_bits(actual, expected, what=""):
    actual, expected = tensors_of(actual), tensors_of(expected)
    assert len(actual) == len(expected), what
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e) and a.stride() == e.stride(), what


def assert_same_call(function, other, *inputs):
    """Checks that both functions return the same results and leave the same values in their inputs."""
    a, b = copies(inputs), copies(inputs)
    assert_same_bits(other(*b), function(*a))
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


# ---- compiling ----

COMPILING = [  # marks of a test module that compiles
    pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec", "ignore:No complete tensor"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd"),
    pytest.mark.usefixtures("_nothing_compiled", "_memory_of_others"),
]


def compiled(function, device, backend="inductor", **options):
    """Compiles a function without a graph break. On mps aot_eager replaces Inductor, whose Metal kernels need a Mac."""
    if device == "mps" and backend == "inductor":
        backend = "aot_eager"
    return torch.compile(function, fullgraph=True, backend=backend, **options)


class Everything(torch.nn.Module):
    """Calls every operator, with the same angles and other flags. Some slots are of pads."""

    def __init__(self, quantised=True):
        """quantised: whether some results are int8, which not every compiler has."""
        super().__init__()
        self.quantised = quantised

    def forward(self, q, slots, angles):
        *rotated, weight = q * 1, q * 2, q * 3, q * 4, torch.arange(DIM) + 0.5
        rope.rotate_(rotated[0], **angles, rotary_start=3)
        rope.rotate_qk_(*rotated[1:3], **angles, interleaved=True, attention_factor=1.3)
        dtype, scale, q_scale = (torch.int8, weight[:1], weight[:1] / 40) if self.quantised else (q.dtype, None, None)
        caches = [torch.zeros(4, LENGTH, *q.shape[2:], dtype=dtype) for dtype in (q.dtype, dtype)]
        options = angles | {"slots": slots, "v_scale": scale}
        rope.rotate_into_cache_(rotated[3], q, q, *caches, **options, norm_v=True)
        q_out = torch.zeros_like(q, dtype=dtype)
        rope.rotate_into_cache_(q * 5, q, q, *caches, **options, q_out=q_out, q_scale=q_scale)
        caches.append(q_out)
        rotated += rope.norm_rotate_qk(q, -q, *[weight.expand(HEADS, -1)] * 2, **angles)
        rotated += rope.rotate(q, **angles, eager_rounding=True), *rope.rotate_qk(q, -q, **angles, inverse=True)
        tables = rope.cos_sin(slots, weight), rope.axial_cos_sin(torch.stack([slots, slots]), weight.view(2, -1))
        return rotated, caches, tables
