"""Tests rotate_into_cache_ with arguments that hypothesis chooses."""

import os

import pytest
import torch
from cases import DTYPES, EXHAUSTIVE, QUANTISED, has_dtype, misplace_pads, moved, some_slots, spread, supported
from test_cache import Caches, check, make_norm, make_scales, same

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


@hypothesis.settings(
    max_examples=int(os.environ.get("ROPE_EXAMPLES", 600 if EXHAUSTIVE else 60)),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
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
