"""Helpers of the tests in this folder: they make the tensors of a call, compile functions, and compare results.

Arguments that could be mistaken for one another differ. q and k have different numbers of heads and different strides.
cos and sin, the two weights of the norm, and the two caches have different strides.
"""

import copy
import itertools

import pytest
import torch
from cases import LAYOUTS, OPERATORS, schema_of
from torch.utils._pytree import tree_leaves

import torch_rope

rope = torch.ops.rope

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTH = 64  # rows of a table, and cells in each block of a cache

IN_PLACE = [op for op in OPERATORS if schema_of(op).is_mutable]
ROTATING = [op for op in OPERATORS if "offset" in [a.name for a in schema_of(op).arguments]]
OF_A_LAYER = ["rotate_qk", "rotate_qk_", "norm_rotate_qk", "rotate_into_cache_"]

# Maps the name of a tensor that is rotated or copied, or of its gradient, to (heads, layout).
ROTATED = {
    "x": (HEADS, LAYOUTS["packed"]),
    "q": (HEADS, LAYOUTS["bshd"]),
    "k": (KV_HEADS, LAYOUTS["bhsd"]),
    "v": (KV_HEADS, LAYOUTS["packed"]),
    "q_out_grad": (HEADS, LAYOUTS["bhsd"]),
    "k_out_grad": (KV_HEADS, LAYOUTS["sbhd"]),
}


def tables(device, rotary_dim=DIM, rows=LENGTH):
    """Returns cos and sin, [rows, rotary_dim / 2]."""
    cos, sin = rope.cos_sin(torch.arange(rows, device=device), torch_rope.inv_freq(rotary_dim, device=device))
    return cos, torch.stack([sin, cos], -1)[..., 0]


def norm_weights(device, over_heads=False, kv_heads=KV_HEADS):
    if over_heads:
        return [torch.rand(HEADS, DIM, device=device) + 0.5, torch.rand(DIM, kv_heads, device=device).T + 0.5]
    return [torch.rand(DIM, device=device) + 0.5, (torch.rand(DIM, 2, device=device) + 0.5)[:, 0]]


def operands(op, device, seq=6, batch=2, *, dims=4, layouts=None, kv_heads=KV_HEADS, over_heads=False):
    """Returns the tensors that op takes before its angles. over_heads: its norm takes all heads of a token together.

    layouts: functions as in LAYOUTS; the tensors that are rotated or copied take one after the other.
    """
    layouts = layouts and itertools.cycle(layouts)
    weights = norm_weights(device, over_heads, kv_heads)
    weights = dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True))

    def make(name):
        if name in weights:
            return weights[name]
        if name == "k_cache":
            t = torch.randn(batch, LENGTH, kv_heads, DIM, device=device)
        elif name == "v_cache":
            t = torch.randn(batch, kv_heads, LENGTH, DIM, device=device).transpose(1, 2)
        else:
            heads, layout = ROTATED[name]
            layout = next(layouts) if layouts else layout
            heads = kv_heads if heads == KV_HEADS else heads
            t = layout(torch.Size((batch, seq, heads, DIM)), torch.float32, device)
        return t if dims == 4 else t[0]

    names = [a.name for a in schema_of(op).arguments]
    return [make(name) for name in names[: names.index("cos")]]


def call_of(op, device, source="table"):
    """Returns, by name, every tensor that op takes and that could have a gradient."""
    if op not in ROTATING:
        axes = (2,) if "axial" in op else ()
        return {"positions": torch.rand(*axes, 5, device=device), "inv_freq": torch.rand(*axes, 4, device=device)}
    call = dict(zip((a.name for a in schema_of(op).arguments), operands(op, device), strict=False))
    if source == "inv_freq":
        return call | {"inv_freq": torch_rope.inv_freq(DIM, device=device)}
    return call | dict(zip(("cos", "sin"), tables(device), strict=True))


def qk(device, seq=6, batch=2):
    return operands("rotate_qk", device, seq, batch)


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
