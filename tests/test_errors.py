"""Every error that the contract names: its type, a message that says the operator, the argument, what it got and what it needs;
the same from fake tensors and under torch.compile; nothing written."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_rope

B, S, H, D, R = 2, 6, 3, 16, 8
rope = torch.ops.rope


def arguments(device="cpu") -> dict:
    """A good call with tables; each case changes it into a bad one."""
    cos, sin = torch_rope.cos_sin(torch.arange(20), torch_rope.inv_freq(R))
    good = {"q": torch.randn(B, S, H, D), "k": torch.randn(B, S, 1, D), "cos": cos, "sin": sin}
    return {name: t.to(device) for name, t in good.items()}


def bad(message, error=ValueError, ops="all", **changes):
    """changes: a function of the good arguments for each changed one, or a value."""
    return pytest.param(message, error, ops, changes, id=message[:70])


def freq(n=R // 2, dtype=torch.float32):
    return lambda a: torch.ones(n, dtype=dtype, device=a["q"].device)


def ones(*shape, dtype=torch.float32):
    return lambda a: torch.ones(shape, dtype=dtype, device=a["q"].device)


def ints(*shape, dtype=torch.int64):
    return lambda a: torch.zeros(shape, dtype=dtype, device=a["q"].device)


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
        positions=lambda a: torch.tensor([0, 3, -1, 7, 2, 2], device=a["q"].device),
    ),
    bad(
        "positions go from 0 to 20 with offset 0, cos has 20 rows",
        IndexError,
        positions=lambda a: torch.tensor([[0] * 6, [1, 2, 3, 4, 5, 20]], device=a["q"].device).int(),
    ),
    bad(
        "positions go from 0 to 9223372036854775807 with offset 1, cos has 20 rows",
        IndexError,
        offset=1,
        positions=lambda a: torch.tensor([0, 0, 0, 0, 0, 2**63 - 1], device=a["q"].device),
    ),
    bad("positions go from 0 to 5 with offset 9223372036854775807", IndexError, offset=2**63 - 1),
]

OPS = {
    "all": ["rotate", "rotate_", "rotate_qk", "rotate_qk_"],
    "qk": ["rotate_qk", "rotate_qk_"],
    "in place": ["rotate_", "rotate_qk_"],
    "qk in place": ["rotate_qk_"],
}


def calls(message, ops, changes, device):
    """(operator, its arguments, keyword arguments, the message that it shall raise)."""
    for op in OPS[ops]:
        a = arguments(device)
        new = {name: change(a) if callable(change) else change for name, change in changes.items()}
        a |= new
        q, k = a.pop("q"), a.pop("k")
        tensors = (q, k) if "qk" in op else (q,)
        if "qk" in op and "k" not in changes and q.dim() != 4 and ops == "all":
            tensors = (q, q)
        name = "q" if "qk" in op else "x"
        yield getattr(rope, op), tensors, a, f"rope.{op}: " + message.format(q=name)


@pytest.mark.parametrize("message, error, ops, changes", CASES + RANGES)
def test_eager(message, error, ops, changes, device):
    if error is IndexError and device != "cpu":
        pytest.skip("ranges are checked on the device, without an exception here")
    for op, tensors, keywords, expected in calls(message, ops, changes, device):
        before = [t.clone() for t in tensors]
        versions = [t._version for t in tensors]
        with pytest.raises(error, match=re.escape(expected)) as raised:
            op(*tensors, **keywords)
        assert type(raised.value) is error
        assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
        assert [t._version for t in tensors] == versions


@pytest.mark.parametrize("message, error, ops, changes", CASES)
def test_fake_tensors(message, error, ops, changes, device):
    for op, tensors, keywords, expected in calls(message, ops, changes, device):
        with FakeTensorMode() as mode:
            fake = {id(t): mode.from_tensor(t) for t in (*tensors, *keywords.values()) if isinstance(t, torch.Tensor)}
            if "overlap" in message:  # from_tensor gives each its own storage; take the alias over
                fake = alias(fake, tensors, keywords)
            with pytest.raises(error, match=re.escape(expected)):
                op(*(fake[id(t)] for t in tensors), **{n: fake.get(id(v), v) for n, v in keywords.items()})


def alias(fake, tensors, keywords):
    """Fake views that share a storage where the real ones do."""
    by_storage = {}
    out = {}
    for t in (*tensors, *(v for v in keywords.values() if isinstance(v, torch.Tensor))):
        storage = t.untyped_storage().data_ptr()
        first = by_storage.setdefault(storage, fake[id(t)])
        if first is fake[id(t)]:
            out[id(t)] = first
        else:
            flat = first if first.dtype == t.dtype else first.view(t.dtype)
            out[id(t)] = flat.as_strided(t.shape, t.stride(), t.storage_offset())
    return out


# Shapes and dtypes are told apart by Dynamo in the same way in every case: one of a kind is enough, each costs a compilation.
COMPILED = [c for c in CASES if c.values[2] in ("all", "qk")][::4]


@pytest.mark.parametrize("message, error, ops, changes", COMPILED)
def test_compiled(message, error, ops, changes, device):
    """Dynamo wraps what the fake implementation raises, and keeps the message."""
    for op, tensors, keywords, expected in list(calls(message, ops, changes, device))[-1:]:
        torch._dynamo.reset()
        compiled = torch.compile(lambda t, k, op=op: op(*t, **k), fullgraph=True, backend="aot_eager")
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=re.escape(expected)):
            compiled(tensors, keywords)


@pytest.mark.parametrize("message, error, ops, changes", RANGES[:3])
def test_compiled_ranges(message, error, ops, changes, device):
    """What the kernel raises keeps its type."""
    if device != "cpu":
        pytest.skip("ranges are checked on the device, without an exception here")
    for op, tensors, keywords, expected in list(calls(message, ops, changes, device))[::2]:
        torch._dynamo.reset()
        compiled = torch.compile(lambda t, k, op=op: op(*t, **k), fullgraph=True)
        with pytest.raises(IndexError, match=re.escape(expected)):
            compiled(tensors, keywords)


@pytest.mark.parametrize(
    "positions, inv_freq, dtype, error, message",
    [
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


@pytest.mark.parametrize("name", ["k", "cos", "sin", "positions", "inv_freq"])
def test_another_device(name):
    """All tensors are on x's device. The meta device is another one that every machine has; x stays real."""
    a = arguments()
    a["positions"] = torch.arange(S)
    if name == "inv_freq":
        a = {n: t for n, t in a.items() if n in ("q", "k")} | {"inv_freq": torch_rope.inv_freq(R)}
    a[name] = a[name].to("meta")
    q, k = a.pop("q"), a.pop("k")
    with pytest.raises(
        ValueError, match=rf"rope.rotate_qk: {name} is on meta, q is on cpu; all tensors need one device"
    ):
        rope.rotate_qk(q, k, **a)


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


def test_unusual_strides_without_overlap(device):
    """Strides 2 and 3 over two elements each: not nested, and still four elements."""
    storage = torch.randn(400, device=device)
    x = storage.as_strided((2, 2, 1, 2), (2, 3, 1, 100))
    expected = rope.rotate(x, inv_freq=torch.ones(1, device=device))
    rope.rotate_(x, inv_freq=torch.ones(1, device=device))
    assert torch.equal(x, expected)


@pytest.mark.parametrize("seed", range(300))
def test_overlap_is_exact(seed):
    """Against the set of addresses, over random strides."""
    g = torch.Generator().manual_seed(seed)

    def pick(n):
        return int(torch.randint(0, n, (), generator=g))

    storage = torch.zeros(4000)

    def view(last):
        sizes = [1 + pick(3), 1 + pick(4), 1 + pick(3), last]
        return storage.as_strided(sizes, [pick(60), pick(40), pick(20), 1 + pick(6)], pick(60))

    def addresses(t):
        return torch.arange(4000).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()

    q = view(2)
    k = storage.as_strided((*q.shape[:2], 1 + pick(3), 2), [pick(60), pick(40), pick(20), 1 + pick(6)], pick(60))
    in_q, in_k = addresses(q), addresses(k)
    shared = len(set(in_q)) < len(in_q) or len(set(in_k)) < len(in_k) or bool(set(in_q) & set(in_k))
    try:
        rope.rotate_qk_(q, k, inv_freq=torch.ones(1))
        assert not shared
    except ValueError:
        assert shared
