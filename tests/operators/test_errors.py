"""Every error that the contract names: its type, a message that says the operator, the argument, what it got and what it needs;
the same from fake tensors and under torch.compile; nothing written."""

import re

import numpy as np
import pytest
import torch
from cases import checks_ranges, supported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_rope

B, S, H, D, R = 2, 6, 3, 16, 8
rope = torch.ops.rope
pytestmark = pytest.mark.heart

# Operator -> the tensors that it takes beside the angles. The x of rotate is called q until it is passed.
OWN = {
    "rotate": ["q"],
    "rotate_": ["q"],
    "rotate_qk": ["q", "k"],
    "rotate_qk_": ["q", "k"],
    "norm_rotate_qk": ["q", "k", "q_norm_weight", "k_norm_weight"],
    "rotate_into_cache_": ["q", "k", "v", "k_cache", "v_cache", "q_norm_weight", "k_norm_weight"],
}
# Which operators a case is for.
OPS = {
    "all": list(OWN),
    "qk": [op for op in OWN if "k" in OWN[op]],
    "norm": [op for op in OWN if "q_norm_weight" in OWN[op]],
    "in place": [op for op in OWN if op.endswith("_")],
    "qk in place": ["rotate_qk_"],
    "cache": ["rotate_into_cache_"],
}


def arguments(op, device="cpu") -> dict:
    """A good call with tables; each case changes it into a bad one."""
    with torch.device(device):
        cos, sin = torch_rope.cos_sin(torch.arange(20), torch_rope.inv_freq(R))
        good = {"q": torch.randn(B, S, H, D), "k": torch.randn(B, S, 1, D), "v": torch.randn(B, S, 1, D)}
        good["k_cache"], good["v_cache"] = torch.randn(B, 2, 20, 1, D).unbind(1)
        good["q_norm_weight"], good["k_norm_weight"] = torch.rand(D), torch.rand(D)
    return {name: good[name] for name in OWN[op]} | {"cos": cos, "sin": sin}


def bad(message, error=ValueError, ops="all", **changes):
    """changes: a function of the good arguments for each changed one, or a value."""
    return pytest.param(message, error, ops, changes, id=message[:70])


def freq(n=R // 2, dtype=torch.float32):
    return lambda a: torch.ones(n, dtype=dtype, device=a["q"].device)


def ones(*shape, dtype=torch.float32):
    return lambda a: torch.ones(shape, dtype=dtype, device=a["q"].device)


def ints(*shape, dtype=torch.int64):
    return lambda a: torch.zeros(shape, dtype=dtype, device=a["q"].device)


def values(numbers, dtype=torch.int64):
    return lambda a: torch.tensor(numbers, dtype=dtype, device=a["q"].device)


def cast(name, dtype):
    return lambda a: a[name].to(dtype)


CASES = [
    # x, q and k
    bad("{q} has 2 dimensions [6, 16], needs [seq, heads, head_dim] or [batch, seq, heads, head_dim]", q=ones(S, D)),
    bad("{q} has 5 dimensions [1, 2, 6, 3, 16], needs", q=ones(1, B, S, H, D)),
    bad("{q} is int64, needs float16, bfloat16, float32 or float64", TypeError, q=ints(B, S, H, D)),
    bad("{q} is complex64, needs float16", TypeError, q=ones(B, S, H, D, dtype=torch.complex64)),
    bad("k is bfloat16, q is float32; they need one dtype", TypeError, "qk", k=cast("k", torch.bfloat16)),
    bad("k is int32, needs float16", TypeError, "qk", k=cast("k", torch.int32)),
    bad("k has 3 dimensions, q has 4; they need the same", ops="qk", k=ones(S, 1, D)),
    bad("k has batch 1, q has 2; only their heads may differ", ops="qk", k=ones(1, S, 1, D)),
    bad("k has seq 5, q has 6; only their heads may differ", ops="qk", k=ones(B, 5, 1, D)),
    bad("k has head_dim 12, q has 16; only their heads may differ", ops="qk", k=ones(B, S, 1, 12)),
    # the angle source
    bad("no angle source; needs cos and sin, or inv_freq", cos=None, sin=None),
    bad("two angle sources, cos and sin, and inv_freq; needs exactly one", inv_freq=freq()),
    bad("cos without sin; an angle source is cos and sin together, or inv_freq", sin=None),
    bad("sin without cos; an angle source is cos and sin together, or inv_freq", cos=None),
    bad("sin without cos; an angle source is cos and sin together, or inv_freq", cos=None, inv_freq=freq()),
    # tables
    bad(
        "cos has 32 columns, {q} has head_dim 16: rotary_dim 64 is larger than head_dim",
        cos=ones(20, 32),
        sin=ones(20, 32),
    ),
    bad("cos has 1 dimensions [4], needs [max_position, rotary_dim / 2] or", cos=ones(4), sin=ones(4)),
    bad("cos has 4 dimensions", cos=ones(B, S, 1, 4), sin=ones(B, S, 1, 4)),
    bad("sin has shape [20, 3], cos has [20, 4]; they need the same", sin=ones(20, 3)),
    bad("sin has shape [19, 4], cos has [20, 4]; they need the same", sin=ones(19, 4)),
    bad("sin has shape [1, 20, 4], cos has [20, 4]; they need the same", sin=ones(1, 20, 4)),
    bad("sin has shape [2, 6], cos has [2, 6, 4]; they need the same", cos=ones(B, S, 4), sin=ones(B, S)),
    bad("sin is bfloat16, cos is float32; they need one dtype", TypeError, sin=cast("sin", torch.bfloat16)),
    bad(
        "cos and sin are float16, need float32 or {q}'s dtype, float32",
        TypeError,
        cos=cast("cos", torch.float16),
        sin=cast("sin", torch.float16),
    ),
    bad(
        "cos and sin are float64, need float32 or {q}'s dtype, float32",
        TypeError,
        cos=cast("cos", torch.float64),
        sin=cast("sin", torch.float64),
    ),
    bad("cos has 5 rows per sequence, {q} has seq 6", cos=ones(1, 5, 4), sin=ones(1, 5, 4)),
    bad("cos has batch 3, {q} has batch 2; a 3-D table needs that or 1", cos=ones(3, S, 4), sin=ones(3, S, 4)),
    bad("positions with cos of shape [1, 6, 4]", cos=ones(1, S, 4), sin=ones(1, S, 4), positions=ints(S)),
    bad("offset is 3 with cos of shape [1, 6, 4]", cos=ones(1, S, 4), sin=ones(1, S, 4), offset=3),
    # inv_freq
    bad("inv_freq has 2 dimensions [1, 4], needs [rotary_dim / 2]", cos=None, sin=None, inv_freq=ones(1, 4)),
    bad("inv_freq is float16, needs float32 or float64", TypeError, cos=None, sin=None, inv_freq=freq(4, torch.half)),
    bad(
        "inv_freq has 9 frequencies, {q} has head_dim 16: rotary_dim 18 is larger than head_dim",
        cos=None,
        sin=None,
        inv_freq=freq(9),
    ),
    # positions
    bad("positions is float32, needs int32 or int64", TypeError, positions=ones(S)),
    bad("positions is int16, needs int32 or int64", TypeError, positions=ints(S, dtype=torch.int16)),
    bad("positions has 3 dimensions [1, 1, 6], needs [seq], [1, seq] or [batch, seq]", positions=ints(1, 1, S)),
    bad("positions has 0 dimensions [], needs [seq], [1, seq] or [batch, seq]", positions=ints()),
    bad("positions has 5 tokens [5], {q} has seq 6; positions needs [seq]", positions=ints(5)),
    bad("positions has batch 3, {q} has batch 2; positions needs [seq]", positions=ints(3, S)),
    # norm weights
    bad("q_norm_weight without k_norm_weight; needs both, or neither for no norm", ops="cache", k_norm_weight=None),
    bad("k_norm_weight without q_norm_weight; needs both, or neither for no norm", ops="cache", q_norm_weight=None),
    bad(
        "q_norm_weight is bfloat16, needs float32 or q's dtype, float32",
        TypeError,
        "norm",
        q_norm_weight=ones(D, dtype=torch.bfloat16),
    ),
    bad(
        "k_norm_weight is float64, needs float32 or q's dtype, float32",
        TypeError,
        "norm",
        k_norm_weight=ones(D, dtype=torch.float64),
    ),
    bad("k_norm_weight is int64, needs float32 or q's dtype, float32", TypeError, "norm", k_norm_weight=ints(D)),
    bad(
        "q_norm_weight has 2 dimensions [1, 16], needs [head_dim], one weight for each channel of a head",
        ops="norm",
        q_norm_weight=ones(1, D),
    ),
    bad("k_norm_weight has 0 dimensions [], needs [head_dim]", ops="norm", k_norm_weight=ones()),
    bad("q_norm_weight has 1 weights, q has head_dim 16; they need the same", ops="norm", q_norm_weight=ones(1)),
    bad("k_norm_weight has 8 weights, q has head_dim 16; they need the same", ops="norm", k_norm_weight=ones(R)),
    # v
    bad("v has 2 dimensions [6, 16], needs [seq, heads, head_dim] or", ops="cache", v=ones(S, D)),
    bad("v is bfloat16, q is float32; they need one dtype", TypeError, "cache", v=cast("v", torch.bfloat16)),
    bad("v has 3 dimensions, q has 4; they need the same", ops="cache", v=ones(S, 1, D)),
    bad("v has batch 1, q has 2; only their heads may differ", ops="cache", v=ones(1, S, 1, D)),
    bad("v has seq 5, q has 6; only their heads may differ", ops="cache", v=ones(B, 5, 1, D)),
    bad("v has head_dim 8, q has 16; only their heads may differ", ops="cache", v=ones(B, S, 1, 8)),
    bad("v has 3 heads, k has 1; they need the same", ops="cache", v=ones(B, S, H, D)),
    # the caches
    bad(
        "k_cache is bfloat16, k is float32; they need one dtype",
        TypeError,
        "cache",
        k_cache=cast("k_cache", torch.bfloat16),
    ),
    bad(
        "v_cache is uint8, k is float32; they need one dtype", TypeError, "cache", v_cache=cast("v_cache", torch.uint8)
    ),
    bad(
        "k_cache has 2 dimensions [20, 16], needs [blocks, block_size, kv_heads, head_dim] or [max_seq, kv_heads,",
        ops="cache",
        k_cache=ones(20, D),
    ),
    bad("v_cache has 5 dimensions [2, 2, 20, 1, 16], needs", ops="cache", v_cache=ones(2, B, 20, 1, D)),
    bad(
        "k_cache has 20 heads, k has 1; they need the same (a head-major cache is passed transposed)",
        ops="cache",
        k_cache=ones(B, 1, 20, D),
    ),
    bad("v_cache has 3 heads, k has 1; they need the same", ops="cache", v_cache=ones(B, 20, H, D)),
    bad("v_cache has head_dim 12, k has 16; they need the same", ops="cache", v_cache=ones(B, 20, 1, 12)),
    bad("v_cache has shape [20, 1, 16], k_cache has [2, 20, 1, 16]", ops="cache", v_cache=ones(20, 1, D)),
    bad("v_cache has shape [2, 19, 1, 16], k_cache has [2, 20, 1, 16]", ops="cache", v_cache=ones(B, 19, 1, D)),
    bad("v_cache has shape [3, 20, 1, 16], k_cache has [2, 20, 1, 16]", ops="cache", v_cache=ones(3, 20, 1, D)),
    # where in the caches
    bad(
        "cos of shape [2, 6, 4] says no positions, and there are no slots; a 3-D table needs slots",
        ops="cache",
        cos=ones(B, S, 4),
        sin=ones(B, S, 4),
    ),
    bad(
        "q has batch 2, k_cache has 1 blocks; without slots row b writes block b, so it needs at least as many",
        ops="cache",
        k_cache=ones(1, 20, 1, D),
        v_cache=ones(1, 20, 1, D),
    ),
    bad("q has batch 2, k_cache has 1 blocks", ops="cache", k_cache=ones(20, 1, D), v_cache=ones(20, 1, D)),
    bad("slots is float32, needs int32 or int64", TypeError, "cache", slots=ones(B, S)),
    bad("slots is int16, needs int32 or int64", TypeError, "cache", slots=ints(B, S, dtype=torch.int16)),
    bad("slots has 0 dimensions [], needs [seq] or [batch, seq]", ops="cache", slots=ints()),
    bad("slots has 3 dimensions [1, 2, 6], needs [seq] or [batch, seq]", ops="cache", slots=ints(1, B, S)),
    bad("slots has 5 tokens [2, 5], q has seq 6; slots needs [seq] or [batch, seq]", ops="cache", slots=ints(B, 5)),
    bad("slots has shape [6], q has batch 2; each token needs its own slot", ops="cache", slots=ints(S)),
    bad("slots has shape [1, 6], q has batch 2; each token needs its own slot", ops="cache", slots=ints(1, S)),
    bad("slots has shape [3, 6], q has batch 2; each token needs its own slot", ops="cache", slots=ints(3, S)),
    # what is written
    bad(
        "{q} has shape [2, 6, 3, 16] and strides [96, 16, 0, 1]: some of its elements share memory",
        ops="in place",
        q=lambda a: ones(B, S, 1, D)(a).expand(B, S, H, D),
    ),
    bad(
        "{q} has shape [2, 6, 3, 16] and strides [24, 4, 8, 1]: some of its elements share memory",
        ops="in place",
        q=lambda a: ones(400)(a).as_strided((B, S, H, D), (24, 4, 8, 1)),
    ),
    bad(
        "{q} has shape [2, 6, 3, 16] and strides [16, 48, 176, 1]: some of its elements share memory",
        ops="in place",
        q=lambda a: ones(700)(a).as_strided((B, S, H, D), (D, 3 * D, 11 * D, 1)),
    ),
    bad("q and k overlap and both are written in place", ops="qk in place", k=lambda a: a["q"][:, :, 1:2]),
    bad(
        "{q} is written in place and overlaps cos, which is read",
        ops="in place",
        cos=lambda a: a["q"].view(-1)[:80].view(20, 4),
    ),
    bad(
        "k is written in place and overlaps sin, which is read",
        ops="qk in place",
        sin=lambda a: a["k"].view(-1)[:80].view(20, 4),
    ),
    bad(
        "{q} is written in place and overlaps positions, which is read",
        ops="in place",
        positions=lambda a: a["q"].view(torch.int32).view(-1)[2:8],
    ),
    bad(
        "{q} is written in place and overlaps inv_freq, which is read",
        ops="in place",
        cos=None,
        sin=None,
        inv_freq=lambda a: a["q"][1, 2, 0, :4],
    ),
    bad("q is written in place and overlaps k, which is read", ops="cache", k=lambda a: a["q"][:, :, 1:2]),
    bad("q is written in place and overlaps v, which is read", ops="cache", v=lambda a: a["q"][:, :, 2:]),
    bad(
        "q is written in place and overlaps k_norm_weight, which is read",
        ops="cache",
        k_norm_weight=lambda a: a["q"][1, 2, 0],
    ),
    bad(
        "k_cache has shape [2, 20, 1, 16] and strides [16, 0, 16, 1]: some of its elements share memory",
        ops="cache",
        k_cache=lambda a: ones(B, 1, 1, D)(a).expand(B, 20, 1, D),
    ),
    bad(
        "v_cache has shape [2, 20, 1, 16] and strides [16, 16, 16, 1]: some of its elements share memory",
        ops="cache",
        v_cache=lambda a: ones(21 * D)(a).as_strided((B, 20, 1, D), (D, D, D, 1)),
    ),
    bad("k_cache and v_cache overlap and both are written", ops="cache", v_cache=lambda a: a["k_cache"]),
    bad(
        "k_cache and v_cache overlap and both are written in place",
        ops="cache",
        k_cache=lambda a: a["v_cache"].as_strided((B, 20, 1, D), (40 * D, D, D, 1), 19 * D),
    ),
    # Address ranges decide here: a row in the memory between the two blocks of v_cache, which is the k_cache of row 1.
    bad("k_cache is written in place and overlaps k, which is read", ops="cache", k=lambda a: a["k_cache"][:, :S]),
    bad("k_cache is written in place and overlaps k, which is read", ops="cache", k=lambda a: a["v_cache"][:, :S]),
    bad(
        "v_cache is written in place and overlaps v, which is read",
        ops="cache",
        k_cache=ones(B, 20, 1, D),
        v=lambda a: a["k_cache"][1:, :S].expand(B, S, 1, D),
    ),
    bad(
        "q and k_cache overlap and both are written in place",
        ops="cache",
        q=lambda a: a["k_cache"][:, 14:],
    ),
    bad(
        "q and v_cache overlap and both are written in place",
        ops="cache",
        k_cache=ones(B, 20, 1, D),
        q=lambda a: a["v_cache"][:, 14:],
    ),
    bad(
        "k_cache is written in place and overlaps slots, which is read",
        ops="cache",
        slots=lambda a: a["k_cache"].view(torch.int32)[:, 3:9, 0, 7],
    ),
    bad(
        "v_cache is written in place and overlaps positions, which is read",
        ops="cache",
        positions=lambda a: a["v_cache"].view(torch.int32)[1, 19, 0, 10:],
    ),
    bad(
        "v_cache is written in place and overlaps q_norm_weight, which is read",
        ops="cache",
        q_norm_weight=lambda a: a["v_cache"][1, 19, 0],
    ),
    bad(
        "k_cache is written in place and overlaps cos, which is read",
        ops="cache",
        cos=lambda a: a["k_cache"][0, :, 0, :4],
    ),
]
# Only the kernel looks at values.
RANGES = [
    bad(
        "positions go from 0 to 5 with offset 15, cos has 20 rows; position + offset needs to be at least 0",
        IndexError,
        offset=15,
    ),
    bad("positions go from 0 to 5 with offset -1, cos has 20 rows", IndexError, offset=-1),
    bad(
        "positions go from -1 to 7 with offset 0, cos has 20 rows",
        IndexError,
        positions=values([0, 3, -1, 7, 2, 2]),
    ),
    bad(
        "positions go from 0 to 20 with offset 0, cos has 20 rows",
        IndexError,
        positions=values([[0] * 6, [1, 2, 3, 4, 5, 20]], torch.int32),
    ),
    bad(
        "positions go from 0 to 9223372036854775807 with offset 1, cos has 20 rows",
        IndexError,
        offset=1,
        positions=values([0, 0, 0, 0, 0, 2**63 - 1]),
    ),
    bad("positions go from 0 to 5 with offset 9223372036854775807", IndexError, offset=2**63 - 1),
    # Into a cache, a position is a place too: where there is no table, and where the table is longer.
    bad(
        "positions go from 0 to 5 with offset 15, k_cache has block_size 20; position + offset needs to be at least 0",
        IndexError,
        "cache",
        cos=None,
        sin=None,
        inv_freq=freq(),
        offset=15,
    ),
    bad(
        "positions go from -1 to 3 with offset 0, k_cache has block_size 20",
        IndexError,
        "cache",
        cos=None,
        sin=None,
        inv_freq=freq(),
        positions=values([0, 1, 2, -1, 3, 3]),
    ),
    bad(
        "positions go from 0 to 5 with offset 9223372036854775803, k_cache has block_size 20",
        IndexError,
        "cache",
        cos=None,
        sin=None,
        inv_freq=freq(),
        offset=2**63 - 5,
    ),
    bad(
        "positions go from 0 to 5 with offset 7, k_cache has block_size 12",
        IndexError,
        "cache",
        k_cache=ones(B, 12, 1, D),
        v_cache=ones(B, 12, 1, D),
        offset=7,
    ),
    bad(
        "slots go up to 40, the caches have 2 blocks of 20; a slot needs to be below 40",
        IndexError,
        "cache",
        slots=values([[0, 1, 2, 3, 4, 5], [-1, -1, 40, 8, 9, 10]]),
    ),
    bad(
        "slots go up to 4611686018427387904, the caches have 2 blocks of 20",
        IndexError,
        "cache",
        slots=values([[2**62, 1, 2, 3, 4, 5], [-(2**63), -1, 7, 8, 9, 10]]),
    ),
    bad(
        "slots go up to 20, the caches have 1 blocks of 20; a slot needs to be below 20",
        IndexError,
        "cache",
        **{name: lambda a, name=name: a[name][0] for name in OWN["rotate_into_cache_"][:5]},
        slots=values([0, 1, 20, -1, 4, 5], torch.int32),
    ),
    bad(
        "positions go from 0 to 5 with offset 15, cos has 20 rows",  # of a token that is not written too
        IndexError,
        "cache",
        offset=15,
        slots=values([[-1] * S] * B),
    ),
]


def calls(message, ops, changes, device):
    """(operator, its arguments by name, the message that it shall raise)."""
    for op in OPS[ops]:
        a = arguments(op, device)
        a |= {name: change(a) if callable(change) else change for name, change in changes.items()}
        q = "q" if "k" in a else "x"
        a[q] = a.pop("q")
        yield getattr(rope, op), a, f"rope.{op}: " + message.format(q=q)


def tensors_of(a):
    return {name: t for name, t in a.items() if isinstance(t, torch.Tensor)}


def skip_if_the_kernel_looks(changes, device):
    if {"positions", "slots"} & changes.keys() and not checks_ranges(device):
        pytest.skip("positions and slots in a tensor are looked at by the kernel, without an exception here")


def skip_what_metal_lacks(message, device):
    if device == "mps" and re.search("(is|are) float64", message):
        pytest.skip("Apple GPUs have no float64")


@pytest.mark.parametrize("message, error, ops, changes", CASES + RANGES)
def test_eager(message, error, ops, changes, device):
    skip_what_metal_lacks(message, device)
    if error is IndexError:
        skip_if_the_kernel_looks(changes, device)
    for op, a, expected in calls(message, ops, changes, device):
        before = {name: (t.clone(), t._version) for name, t in tensors_of(a).items()}
        with pytest.raises(error, match=re.escape(expected)) as raised:
            op(**a)
        assert type(raised.value) is error
        assert all(torch.equal(a[name], t) and a[name]._version == version for name, (t, version) in before.items())


@pytest.mark.parametrize("offset", [2**62, -(2**62) - 1, -(2**63), 2**63 - 1])
def test_an_offset_too_large_for_a_symint_that_is_inline(offset, device):
    x, table = torch.randn(1, 3, 2, 8, device=device), torch.randn(1, 3, 4, device=device)
    with pytest.raises(ValueError, match=f"offset is {offset} with cos of shape"):
        torch.ops.rope.rotate(x, table, table, offset=offset)


@pytest.mark.parametrize("message, error, ops, changes", CASES)
def test_fake_tensors(message, error, ops, changes, device):
    skip_what_metal_lacks(message, device)
    for op, a, expected in calls(message, ops, changes, device):
        mode = FakeTensorMode()  # which shares storages where the real tensors do
        fake = {name: mode.from_tensor(t) for name, t in tensors_of(a).items()}
        with mode, pytest.raises(error, match=re.escape(expected)):
            op(**a | fake)


# Shapes and dtypes are told apart by Dynamo in the same way in every case: a few of a kind are enough, each costs a
# compilation. The operators take turns.
COMPILED = [(i, *c.values) for i, c in enumerate(c for c in CASES if "in place" not in c.values[2])][::4]


@pytest.mark.parametrize("turn, message, error, ops, changes", COMPILED)
def test_compiled(turn, message, error, ops, changes, device):
    """Dynamo wraps what the fake implementation raises, and keeps the message."""
    skip_what_metal_lacks(message, device)
    of_each = list(calls(message, ops, changes, device))
    op, a, expected = of_each[turn // 4 % len(of_each)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: op(**a), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=re.escape(expected)):
        compiled(a)


@pytest.mark.parametrize("message, error, ops, changes", RANGES[:3] + RANGES[-5:-2])
def test_compiled_ranges(message, error, ops, changes, device):
    """What the kernel raises keeps its type."""
    skip_if_the_kernel_looks(changes, device)
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
            "positions is UInt16, needs an integer or",
        ),
        (torch.zeros(3, dtype=torch.bool), torch.ones(4), None, TypeError, "positions is bool, needs an integer or"),
        (torch.zeros(3, dtype=torch.cfloat), torch.ones(4), None, TypeError, "positions is complex64, needs an"),
        (torch.arange(3), torch.ones(4).half(), None, TypeError, "inv_freq is float16, needs float32 or float64"),
        (torch.arange(3), torch.ones(4).long(), None, TypeError, "inv_freq is int64, needs float32 or float64"),
        (torch.arange(3), torch.ones(2, 4), None, ValueError, "inv_freq has 2 dimensions [2, 4], needs [rotary_dim"),
        (torch.arange(3), torch.ones(4), torch.int64, TypeError, "dtype is int64, needs float16, bfloat16, float32"),
    ],
    ids=str,
)
def test_cos_sin(positions, inv_freq, dtype, error, message, device):
    positions, inv_freq = positions.to(device), inv_freq.to(device)
    with pytest.raises(error, match=re.escape("rope.cos_sin: " + message)):
        rope.cos_sin(positions, inv_freq, dtype=dtype)
    with FakeTensorMode() as mode, pytest.raises(error, match=re.escape("rope.cos_sin: " + message)):
        rope.cos_sin(mode.from_tensor(positions), mode.from_tensor(inv_freq), dtype=dtype)


@pytest.mark.parametrize(
    "op, name",
    [(op, name) for op in OPS["qk"] for name in (*OWN[op][1:], "cos", "sin", "positions", "inv_freq")]
    + [("rotate_into_cache_", "slots")],
)
def test_another_device(op, name, device):
    """All tensors are on x's device. The meta device is another one that every machine has; x stays real."""
    a = arguments(op, device) | {"positions": torch.arange(S, device=device)}
    if name == "inv_freq":
        a |= {"cos": None, "sin": None, "inv_freq": torch_rope.inv_freq(R, device=device)}
    if name == "slots":
        a["slots"] = torch.arange(B * S, device=device).view(B, S)
    a[name] = a[name].to("meta")
    here = re.escape(str(a["q"].device))
    with pytest.raises(ValueError, match=rf"rope.{op}: {name} is on meta, q is on {here}; all tensors need one device"):
        getattr(rope, op)(**a)


@pytest.mark.parametrize(
    "positions, message",
    [
        (torch.tensor(3), "positions has no dimensions, needs [axes, ...]"),
        (torch.zeros(3, 5), "positions has 3 axes, inv_freq has 2; they need the same"),
    ],
)
def test_axial_cos_sin(positions, message, device):
    with pytest.raises(ValueError, match=re.escape("rope._axial_cos_sin: " + message)):
        rope._axial_cos_sin(positions.to(device), torch.ones(2, 4, device=device))


def test_sizes_that_are_symbols():
    rotate = make_fx(lambda q, k: rope.rotate_qk(q, k, inv_freq=torch.ones(R // 2)), tracing_mode="symbolic")
    with pytest.raises(ValueError, match="rope.rotate_qk: k has seq s.*, q has s.*; only their heads may differ"):
        rotate(torch.ones(B, S, H, D), torch.ones(B, S + 1, H, D))


OF_BOTH_BACKWARDS = [
    (TypeError, "q is bfloat16, its gradient is float32; they need one dtype", {"q": cast("q", torch.bfloat16)}),
    (ValueError, "q has shape [6, 3, 16], its gradient [2, 6, 3, 16]; they need the same", {"q": ones(S, H, D)}),
    (ValueError, "k has shape [2, 6, 2, 16], its gradient [2, 6, 1, 16]", {"k": ones(B, S, 2, D)}),
    (ValueError, "k is on meta, its gradient is on {device}; all tensors", {"k": lambda a: a["k"].to("meta")}),
    (ValueError, "no angle source; needs cos and sin, or inv_freq", {"cos": None, "sin": None}),
]


@pytest.mark.parametrize(
    "op, error, message, changes",
    [(op, *case) for op in ("norm_rotate_qk", "rotate_table") for case in OF_BOTH_BACKWARDS]
    + [
        ("norm_rotate_qk", ValueError, "k_norm_weight has 8 weights, q has head_dim 16", {"k_norm_weight": ones(R)}),
        ("rotate_table", ValueError, "k and its gradient come together, or not at all", {"k": None}),
        ("rotate_table", ValueError, "k and its gradient come together, or not at all", {"k_out_grad": None}),
    ],
)
def test_a_backward(op, error, message, changes, device):
    a = arguments("norm_rotate_qk" if op == "norm_rotate_qk" else "rotate_qk", device)
    a |= {"q_out_grad": torch.randn_like(a["q"]), "k_out_grad": torch.randn_like(a["k"])}
    message = message.format(device=a["q"].device)
    a |= {name: change(a) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(error, match=re.escape(f"rope._{op}_backward: {message}")):
        getattr(rope, f"_{op}_backward")(**a)


REQUIRED = {op: own[1:5] for op, own in OWN.items()}  # beside q; the cache operator takes no norm weights for no norm


@pytest.mark.parametrize("op, name", [(op, name) for op, names in REQUIRED.items() for name in names])
def test_none_for_a_tensor(op, name, device):
    """A schema's Tensor takes None from Python."""
    good = arguments(op, device)
    with pytest.raises(ValueError, match=f"rope.{op}: {name} is None, needs a tensor"):
        getattr(rope, op)(**good | {name: None})


# ---- what may be written ----


@pytest.mark.parametrize("op", ["rotate_", "rotate_qk_"])
def test_slices_of_one_packed_tensor_are_apart(op, device):
    """q, k, v of qkv, and kv[:, 0], kv[:, 1]: their address ranges interleave, and no element is shared."""
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


@pytest.mark.parametrize("pair", ["kv blocks", "blocks kv", "kv in a row", "every second place", "heads"])
def test_slices_of_one_packed_cache_are_apart(pair, device):
    """As are q, k and v of one qkv."""
    freq = torch_rope.inv_freq(D, device=device)
    k_cache, v_cache = {
        "kv blocks": lambda: torch.randn(2, B, 8, 2, D, device=device).unbind(0),
        "blocks kv": lambda: torch.randn(B, 2, 8, 2, D, device=device).unbind(1),
        "kv in a row": lambda: torch.randn(B, 8, 2, 2 * D, device=device).chunk(2, -1),
        "every second place": lambda: (lambda kv: (kv[:, ::2], kv[:, 1::2]))(torch.randn(B, 16, 2, D, device=device)),
        "heads": lambda: (lambda kv: (kv[:, :, ::2], kv[:, :, 1::2]))(torch.randn(B, 8, 4, D, device=device)),
    }[pair]()
    q, k, v = torch.randn(B, S, 7, D, device=device).split([3, 2, 2], 2)
    q_rotated, k_rotated = rope.rotate_qk(q, k, inv_freq=freq, offset=1)
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, inv_freq=freq, offset=1)
    assert torch.equal(q, q_rotated)
    assert torch.equal(k_cache[:, 1:7], k_rotated) and torch.equal(v_cache[:, 1:7], v)


def test_parameters_in_the_gaps_of_what_is_written_are_apart(device):
    """Weights, tables and integers between the rows of q and of the caches: what they share is looked at exactly."""
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


def test_unusual_strides_without_overlap(device):
    """Strides 2 and 3 over two elements each: not nested, and still four elements."""
    storage = torch.randn(400, device=device)
    x = storage.as_strided((2, 2, 1, 2), (2, 3, 1, 100))
    expected = rope.rotate(x, inv_freq=torch.ones(1, device=device))
    rope.rotate_(x, inv_freq=torch.ones(1, device=device))
    assert torch.equal(x, expected)


def test_half_of_an_element_is_shared(device):
    if not supported(device, torch.float64):
        pytest.skip("Apple GPUs have no float64")
    x = torch.zeros(1, S, 1, 4, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="x is written in place and overlaps positions"):
        rope.rotate_(x, inv_freq=torch.ones(2, device=device), positions=x.view(torch.int32)[0, :, 0, 1])


@pytest.mark.cpu
def test_one_memory_in_two_storages():
    memory = np.zeros((1, S, 1, 4), np.float32)
    q, k = torch.from_numpy(memory), torch.from_numpy(memory)
    with pytest.raises(ValueError, match="q and k overlap and both are written in place"):
        rope.rotate_qk_(q, k, inv_freq=torch.ones(2))


class RandomViews:
    """Views of one storage with random strides, and the addresses of their elements."""

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
def test_overlap_is_exact(seed):
    """Against the set of addresses, over random strides."""
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
def test_overlap_with_caches(seed):
    """q, k and v against a cache by the range of addresses, all else exactly. They are put further apart, so that some
    calls are legal."""
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
