"""Tests rotate_into_cache_ and the gradients of tables with arguments that hypothesis chooses."""

import os

import pytest
import torch
from cases import DTYPES, QUANTISED, has_dtype, misplace_pads, moved, some_slots, spread, supported
from oracle import table_backward
from test_cache import Caches, check, make_norm, make_scales, same
from test_tables import assert_sums

import torch_rope

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies


@st.composite
def layouts(draw, dims):
    """Draws a memory layout: (the order in which the dimensions are stored, the step along each dimension: 1 or 2)."""
    order = tuple(draw(st.permutations(range(dims))))
    return order, tuple(draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=dims, max_size=dims)))


def lay_out(layout, shape, make):
    """Returns a tensor of this shape in a layout of layouts(); make(*shape) allocates its memory."""
    order, steps = layout
    memory = make(*(shape[d] * steps[d] for d in order))
    t = memory.permute(*(order.index(d) for d in range(len(shape))))
    return t[tuple(slice(step - 1, None, step) for step in steps)]


@st.composite
def calls(draw):
    """Draws the arguments of a call of rotate_into_cache_."""
    small = st.integers(0, 3)
    batch, seq, pairs = draw(small), draw(st.integers(0, 8)), draw(st.one_of(small, st.integers(0, 40)))
    kind = draw(st.sampled_from(["table", "token", "head", "inv_freq"]))
    per_token = kind in ("token", "head")
    slots = draw(st.sampled_from(["int32", "int64"])) if per_token or draw(st.booleans()) else None
    positions = draw(st.sampled_from([None, "int32", "int64"])) if not per_token else None
    heads, rest = draw(small), draw(st.integers(0, 9))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "size": (batch, seq, heads, heads if kind == "head" else draw(small), 2 * pairs + rest, 2 * pairs),
        "start": draw(st.integers(0, rest)),
        "v_shape": draw(st.one_of(st.none(), st.tuples(small, st.integers(0, 200)))),
        "dims": draw(st.sampled_from([4, 3])) if batch == 1 else 4,
        "scale": draw(st.sampled_from([1.0, 1e-4, 300.0])),
        "packed": draw(st.booleans()),
        "q": draw(layouts(4)),
        "k": draw(layouts(4)),
        "v": draw(layouts(4)),
        "kind": kind,
        "table_dtype": draw(st.sampled_from(["float32", "dtype of x"])),
        "two_parts": draw(st.booleans()),  # of inv_freq
        "shared": draw(st.booleans()),  # positions, or a table by token, for all sequences of the batch
        "positions": positions,
        "offset": draw(st.integers(0, 9)) if not per_token else 0,
        "strided": draw(st.booleans()),
        "slots": slots,
        "slots_dims": draw(st.sampled_from([2, 1])) if batch == 1 else 2,
        "cache": draw(layouts(4)),
        "v_cache": draw(st.one_of(layouts(4), layouts(5))),  # 5 dimensions: both caches are in one tensor
        "block_size": draw(st.integers(1, 20)),
        "more_blocks": draw(st.integers(0, 2)),
        "weights": draw(st.sampled_from(["none", "dtype of x", "float32", "strided", "over heads"])),
        "quantised": draw(st.tuples(*[st.sampled_from([None, *QUANTISED])] * 2)),
        "scales": draw(st.sampled_from(["one element", "no dimensions", "heads", "strided"])),
        "norm_v": draw(st.booleans()),
        "eager_rounding": draw(st.sampled_from([False, False, True])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "attention_factor": draw(st.sampled_from([1.0, 1.2079441541679836, -0.37])),
        "interleaved": draw(st.booleans()),
    }


many = hypothesis.settings(
    max_examples=int(os.environ.get("ROPE_EXAMPLES", 150)),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)


@many
@hypothesis.given(call=calls())
def test_any_call_writes_the_right_values_and_nothing_else(call, device):
    """Draws any shapes, strides, caches, angles and slots. ROPE_EXAMPLES=5000 in the environment tries 5000 calls."""
    dtype = call["dtype"]
    if not supported(device, dtype):
        return
    torch.manual_seed(call["seed"])
    batch, seq, q_heads, k_heads, head_dim, rotary_dim = call["size"]
    memory = []  # the memory of q, k and v, including what lies between their elements

    def make(*shape):
        memory.append((torch.randn(shape, dtype=torch.float64) * call["scale"]).to(dtype).to(device))
        return memory[-1]

    if call["packed"]:
        qkv = lay_out(call["q"], (batch, seq, q_heads + 2 * k_heads, head_dim), make)
        q, k, v = qkv.split([q_heads, k_heads, k_heads], 2)
    else:
        heads = {"q": q_heads, "k": k_heads, "v": k_heads}
        q, k, v = (lay_out(call[name], (batch, seq, n, head_dim), make) for name, n in heads.items())
    if call["v_shape"]:
        v = lay_out(call["v"], (batch, seq, *call["v_shape"]), make)

    def strided(t, step=2):
        return spread(t.cpu(), (step,) * t.dim(), range(t.dim())) if call["strided"] else t

    def laid_out(t, step=2):
        return moved(strided(t, step), device)

    # The slots come first, because without them the positions are limited by block_size.
    count, block_size = batch * seq, call["block_size"]
    if call["slots"]:
        blocks = -(-count // block_size) + call["more_blocks"]
        shape = (batch, seq)[-call["slots_dims"] :]
        slots = laid_out(some_slots(shape, blocks * block_size, getattr(torch, call["slots"]), "cpu"))
    else:
        block_size, blocks, slots = block_size + seq + call["offset"], batch + call["more_blocks"], None

    rows = seq + call["offset"] + 20 if slots is not None else block_size
    table_dtype = dtype if dtype == torch.float64 or call["table_dtype"] == "dtype of x" else torch.float32
    freq = torch_rope.inv_freq(rotary_dim).double()
    one_or_batch = 1 if call["shared"] else batch
    angles = {"offset": call["offset"]} if call["offset"] else {}
    if call["positions"]:
        unique = torch.rand(one_or_batch, rows).argsort(-1)[:, :seq] - call["offset"]
        unique = unique - (20 if slots is not None and call["kind"] == "inv_freq" else 0)
        unique = unique[0] if call["shared"] and call["strided"] else unique
        angles["positions"] = laid_out(unique.to(getattr(torch, call["positions"])), 3)
    if call["kind"] == "inv_freq":
        first = (freq * torch.rand(freq.shape)).float()
        parts = torch.stack([first, (freq - first).float()]) if call["two_parts"] else freq.float()
        angles["inv_freq"] = laid_out(parts)
    else:
        shape = {"table": (rows,), "token": (one_or_batch, seq)}.get(call["kind"], (one_or_batch, seq, q_heads))
        angle = torch.randint(0, 3000, shape).double().unsqueeze(-1) * freq
        angles["cos"] = laid_out(angle.cos().to(table_dtype))
        angles["sin"] = laid_out(angle.sin().to(table_dtype), 3)

    if call["start"]:
        angles["rotary_start"] = call["start"]
    if slots is not None:
        misplace_pads(angles, slots)

    def cache(make, *shape):
        if len(call["v_cache"][0]) == 5:
            return lay_out(call["v_cache"], (*shape, 2), make).unbind(-1)
        return lay_out(call["cache"], shape, make), lay_out(call["v_cache"], shape, make)

    quantised = [d if has_dtype(device, d) else torch.int8 for d in call["quantised"]]
    caches = Caches(cache, blocks, block_size, k_heads, head_dim, dtype, device, call["v_shape"], quantised)
    norm = make_norm(call["weights"], head_dim, dtype, device, call["norm_eps"], (q_heads, k_heads))
    of_cache = make_scales(call["scales"], quantised, (k_heads, v.shape[-2]), device) | {"norm_v": call["norm_v"]}
    if call["dims"] == 3:
        q, k, v = q[0], k[0], v[0]
    before = [m.clone() for m in memory]
    q_before = q.clone()
    options = {n: call[n] for n in ("attention_factor", "interleaved", "eager_rounding")}
    check(q, k, v, caches, angles, slots, norm, of_cache, **options)
    q.copy_(q_before)
    assert all(map(same, memory, before))  # q is the only one of these that was written


@st.composite
def table_calls(draw):
    """Draws the arguments of a call of _rotate_table_backward."""
    dims = draw(st.sampled_from([3, 4]))
    pairs = draw(st.one_of(st.integers(1, 3), st.integers(1, 40)))
    kind = draw(st.sampled_from(["table", "token", "token shared", "head", "head shared"]))
    heads = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
    return {
        "seed": draw(st.integers(0, 2**32)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "table_dtype": draw(st.sampled_from(["float32", "dtype of x"])),
        "size": (1 if dims == 3 else draw(st.integers(0, 3)), draw(st.integers(0, 20))),
        "heads": heads[:1] * len(heads) if kind.startswith("head") else heads,
        "head_dim": 2 * pairs + draw(st.integers(0, 9)),
        "pairs": pairs,
        "dims": dims,
        "layouts": draw(st.lists(layouts(4), min_size=4, max_size=4)),
        "kind": kind,
        "positions": draw(st.sampled_from([None, "int32", "int64"])) if kind == "table" else None,
        "positions_of": draw(st.sampled_from(["[seq]", "[1, seq]", "[batch, seq]"])),
        "rows": draw(st.integers(1, 30)),
        "offset": draw(st.integers(0, 9)) if kind == "table" else 0,
        "flags": {
            "attention_factor": draw(st.sampled_from([1.0, 1.2079441541679836, -0.37])),
            "interleaved": draw(st.booleans()),
            "inverse": draw(st.booleans()),
        },
        "at_the_end": draw(st.booleans()),  # the last channels are rotated
    }


@many
@hypothesis.given(call=table_calls())
def test_gradients_of_tables_are_right_in_any_call(call, device):
    dtype, pairs, (batch, seq) = call["dtype"], call["pairs"], call["size"]
    if not supported(device, dtype):
        return
    torch.manual_seed(call["seed"])

    def make(*shape):
        return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)

    def tensors(layouts):
        shapes = [(batch, seq, heads, call["head_dim"]) for heads in call["heads"]]
        made = [lay_out(layout, shape, make) for layout, shape in zip(layouts, shapes, strict=False)]
        return made if call["dims"] == 4 else [t[0] for t in made]

    given, x = tensors(call["layouts"][:2]), tensors(call["layouts"][2:])
    rows = call["rows"] if call["positions"] else seq + call["offset"] + call["rows"]
    shape = {"table": (rows,), "token": (batch, seq), "token shared": (1, seq)}
    shape |= {"head": (batch, seq, call["heads"][0]), "head shared": (1, seq, call["heads"][0])}
    shape = shape[call["kind"]]
    table_dtype = dtype if dtype == torch.float64 or call["table_dtype"] == "dtype of x" else torch.float32
    angles = {
        name: moved(spread(torch.randn(*shape, pairs).to(table_dtype), *strides), device)
        for name, strides in (
            ("cos", ((1,) * (len(shape) + 1), (1,) * (len(shape) + 1))),
            ("sin", ((2,) * (len(shape) + 1), (0,) * (len(shape) + 1))),
        )
    }
    if call["kind"] == "table":
        angles["offset"] = call["offset"]
    if call["positions"]:
        shape = {"[seq]": (seq,), "[1, seq]": (1, seq), "[batch, seq]": (batch, seq)}[call["positions_of"]]
        positions = torch.randint(0, rows, shape) - call["offset"]
        angles["positions"] = positions.to(getattr(torch, call["positions"])).to(device)
    both = [t for side in (given, x) for t in (*side, None)[:2]]
    tables = (angles["cos"], angles["sin"], None, angles.get("positions"), angles.get("offset", 0))
    flags = call["flags"] | {"rotary_start": (call["head_dim"] - 2 * pairs) * call["at_the_end"]}
    outs = torch.ops.rope._rotate_table_backward(*both, *tables, **flags)
    *expected, cos_size, sin_size = table_backward(given, x, **angles, **flags)
    terms = 2 * batch * seq * sum(call["heads"])
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    for out, e, size in zip(outs, expected, (cos_size, sin_size), strict=True):
        assert out.shape == angles["cos"].shape and out.dtype == table_dtype
        assert_sums(out, e, size, arithmetic, terms)
