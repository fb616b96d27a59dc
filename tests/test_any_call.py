"""rotate_into_cache_ with any shapes, strides, caches, angles and slots."""

import os

import pytest
import torch
from cases import DTYPES, some_slots, supported
from test_cache import Caches, check, make_norm, same

import torch_rope

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies


@st.composite
def layouts(draw, dims):
    """How a tensor lies in memory: its dimensions in some order, each element next to its neighbour or every second."""
    order = tuple(draw(st.permutations(range(dims))))
    return order, tuple(draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=dims, max_size=dims)))


def lay_out(layout, shape, make):
    order, steps = layout
    memory = make(*(shape[d] * steps[d] for d in order))
    t = memory.permute(*(order.index(d) for d in range(len(shape))))
    return t[tuple(slice(step - 1, None, step) for step in steps)]


@st.composite
def calls(draw):
    small = st.integers(0, 3)
    batch, seq, pairs = draw(small), draw(st.integers(0, 8)), draw(st.one_of(small, st.integers(0, 40)))
    kind = draw(st.sampled_from(["table", "token", "inv_freq"]))
    slots = draw(st.sampled_from(["int32", "int64"])) if kind == "token" or draw(st.booleans()) else None
    positions = draw(st.sampled_from([None, "int32", "int64"])) if kind != "token" else None
    return {
        "seed": draw(st.integers(0, 2**32)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "size": (batch, seq, draw(small), draw(small), 2 * pairs + draw(st.integers(0, 9)), 2 * pairs),
        "dims": draw(st.sampled_from([4, 3])) if batch == 1 else 4,
        "scale": draw(st.sampled_from([1.0, 1e-4, 300.0])),
        "packed": draw(st.booleans()),
        "q": draw(layouts(4)),
        "k": draw(layouts(4)),
        "v": draw(layouts(4)),
        "kind": kind,
        "table_dtype": draw(st.sampled_from(["float32", "dtype of x"])),
        "shared": draw(st.booleans()),  # a row of positions or of a table by token for the whole batch
        "positions": positions,
        "offset": draw(st.integers(0, 9)) if kind != "token" else 0,
        "strided": draw(st.booleans()),
        "slots": slots,
        "slots_dims": draw(st.sampled_from([2, 1])) if batch == 1 else 2,
        "cache": draw(layouts(4)),
        "v_cache": draw(st.one_of(layouts(4), layouts(5))),  # 5: k and v in one tensor
        "block_size": draw(st.integers(1, 20)),
        "more_blocks": draw(st.integers(0, 2)),
        "weights": draw(st.sampled_from(["none", "dtype of x", "float32", "strided"])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "attention_factor": draw(st.sampled_from([1.0, 1.2079441541679836, -0.37])),
        "interleaved": draw(st.booleans()),
    }


@hypothesis.settings(
    max_examples=int(os.environ.get("ROPE_EXAMPLES", 150)),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(call=calls())
def test_any_call(call, device):
    """Any shapes, strides, caches, angles and slots. ROPE_EXAMPLES=5000 in the environment tries as many."""
    dtype = call["dtype"]
    if not supported(device, dtype):
        return
    torch.manual_seed(call["seed"])
    batch, seq, q_heads, k_heads, head_dim, rotary_dim = call["size"]
    memory = []  # of q, k and v, with what lies between their elements

    def make(*shape):
        memory.append((torch.randn(shape, dtype=torch.float64) * call["scale"]).to(dtype).to(device))
        return memory[-1]

    if call["packed"]:
        qkv = lay_out(call["q"], (batch, seq, q_heads + 2 * k_heads, head_dim), make)
        q, k, v = qkv.split([q_heads, k_heads, k_heads], 2)
    else:
        heads = {"q": q_heads, "k": k_heads, "v": k_heads}
        q, k, v = (lay_out(call[name], (batch, seq, n, head_dim), make) for name, n in heads.items())

    def strided(t):
        return torch.stack([t, t], -1).flatten(-2)[..., ::2] if call["strided"] else t

    # Slots first: without them the positions are places in a block.
    count, block_size = batch * seq, call["block_size"]
    if call["slots"]:
        blocks = -(-count // block_size) + call["more_blocks"]
        shape = (batch, seq)[-call["slots_dims"] :]
        slots = strided(some_slots(shape, blocks * block_size, getattr(torch, call["slots"]), device))
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
        angles["positions"] = strided(unique.to(getattr(torch, call["positions"])).to(device))
    if call["kind"] == "inv_freq":
        angles["inv_freq"] = strided(freq.float().to(device))
    else:
        shape = (rows,) if call["kind"] == "table" else (one_or_batch, seq)
        angle = torch.randint(0, 3000, shape).double().unsqueeze(-1) * freq
        angles |= {
            name: strided(t.to(table_dtype).to(device)) for name, t in (("cos", angle.cos()), ("sin", angle.sin()))
        }

    def cache(make, *shape):
        if len(call["v_cache"][0]) == 5:
            return lay_out(call["v_cache"], (*shape, 2), make).unbind(-1)
        return lay_out(call["cache"], shape, make), lay_out(call["v_cache"], shape, make)

    caches = Caches(cache, blocks, block_size, k_heads, head_dim, dtype, device)
    norm = make_norm(call["weights"], head_dim, dtype, device, call["norm_eps"])
    if call["dims"] == 3:
        q, k, v = q[0], k[0], v[0]
    before = [m.clone() for m in memory]
    q_before = q.clone()
    check(q, k, v, caches, angles, slots, norm, **{n: call[n] for n in ("attention_factor", "interleaved")})
    q.copy_(q_before)
    assert all(map(same, memory, before))  # nothing but q was written
