"""Tests of what a call costs on Metal: how often it reads and writes each element, and how its threads share the work.

They need the simulator, which counts.
"""

import math
import re

import pytest
import torch
from backends.metal.simulator import metal
from cases import covering, name_of
from metal_calls import HALVES, freqs, ops, randn, tables, weights_of

import torch_rope

BUFFERS = str.split(
    "params q_in k_in v_in q_out k_out v_out q_weight k_weight v_weight q_scale k_scale v_scale"
    " cos sin inv_freq positions slots q_factor q_before k_before sums"
)


def shares_of(tokens, heads):
    """Returns how many threads share the heads of a token: kSpread in csrc/mps/dispatch.h."""
    return math.ceil(heads / math.ceil(heads * tokens / 2048))


def read(x, times=1):
    """Returns the bytes (read, written) of a buffer of which each element is read this often. See written()."""
    return (round(times * x.nbytes), 0)


def written(x):
    return (0, x.nbytes)


class Dispatch:
    """What a kernel did, by the names of the buffers."""

    def __init__(self, record, names=BUFFERS):
        self.record, self.buffers = record, {names[i]: buffer for i, buffer in record["buffers"].items()}
        self.bytes = {name: (b["bytes_read"], b["bytes_written"]) for name, b in self.buffers.items()}

    def __getitem__(self, name):
        return self.record[name]

    def check(self, **expected):
        assert {name: self.bytes[name] for name in expected} == expected

    def widths(self, name):
        """Returns the sizes of all accesses to a buffer, in bytes."""
        return {*self.buffers[name]["loads"], *self.buffers[name]["stores"]}


def one_dispatch(simulator, names=BUFFERS):
    """Returns what the only kernel did that ran since the call before."""
    (record,) = simulator.last_dispatches()
    return Dispatch(record, names)


# (batch, seq, heads of q, heads of k, head_dim, rotary_dim, rotary_start)
COSTS = [
    (1, 1, 32, 8, 128, 128, 0),
    (1, 33, 9, 3, 64, 32, 16),
    (1, 5, 4, 4, 80, 20, 60),
    (2, 3, 6, 5, 7, 6, 1),
    (1, 257, 37, 8, 16, 16, 0),  # a share has 6 heads, and the last share 3
    (1, 3, 5, 3, 512, 512, 0),  # with a norm these heads are too wide for a SIMD group, and are read twice
]
OF_COSTS = covering({"size": COSTS, "dtype": HALVES, "interleaved": [False, True]})


@pytest.mark.parametrize("case", OF_COSTS, ids=name_of)
def test_each_element_is_read_once_and_written_once(case, device, simulated):
    (batch, seq, q_heads, k_heads, head_dim, rotary_dim, start), dtype = case["size"], case["dtype"]
    q, k, v = (randn(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads, k_heads))
    caches = [randn(batch, seq + 3, k_heads, head_dim, dtype=dtype) for _ in "kv"]
    weights, angles = weights_of(head_dim), tables(seq + 3, rotary_dim)
    tokens, heads = batch * seq, q_heads + k_heads
    options = dict(positions=torch.arange(seq).to("mps"), interleaved=case["interleaved"], rotary_start=start)

    def check(heads, **expected):
        """Checks what the dispatch read and wrote. Each share reads the angles of its token at most once."""
        done = one_dispatch(simulated)
        done.check(**expected, sin=done.bytes["cos"])
        assert done.bytes["cos"][0] <= tokens * shares_of(tokens, heads) * rotary_dim // 2 * 4
        assert done.bytes["cos"][1] == 0 and done["rints"] == 0
        assert seq != 257 or all(done.widths(name) == {16} for name in expected)

    both = dict(q_in=read(q), q_out=written(q), k_in=read(k), k_out=written(k))
    ops.rotate_qk(q, k, *angles, **options)
    check(heads, **both)
    ops.rotate(q, *angles, inverse=True, **options)  # the backward is the same call with inverse
    check(q_heads, q_in=read(q), q_out=written(q))
    ops.rotate_qk_(q, k, *angles, **options)  # in place leaves the channels alone that are not rotated
    rotated_q, rotated_k = (x.nbytes // head_dim * rotary_dim for x in (q, k))
    check(heads, q_out=(rotated_q,) * 2, k_out=(rotated_k,) * 2)
    ops.rotate_qk(q, k, inv_freq=freqs(rotary_dim), **options)
    # Each share of a token computes cos and sin of a pair once, with 4 calls of rint.
    assert one_dispatch(simulated)["rints"] == 4 * tokens * shares_of(tokens, heads) * rotary_dim // 2
    copies = dict(k_in=read(k), k_out=written(k), v_in=read(v), v_out=written(v))
    ops.rotate_into_cache_(q, k, v, *caches, *angles, **options)
    check(heads + k_heads, q_out=(rotated_q,) * 2, **copies)

    if head_dim == 80:
        return  # this head is wide, and its vectors are short
    times = 1 + (head_dim == 512)
    ops.norm_rotate_qk(q, k, *weights.values(), *angles, **options)
    check(heads, q_in=read(q, times), q_out=written(q), k_in=read(k, times), k_out=written(k))
    ops.rotate_into_cache_(q, k, v, *caches, *angles, **weights, **options)
    check(heads + k_heads, q_out=(times * q.nbytes, q.nbytes), **copies | dict(k_in=read(k, times)))
    if times == 1:
        ops._norm_rotate_qk_backward(q, k, q * 2, k * 2, *weights.values(), *angles, **options)
        backward, total = map(Dispatch, simulated.last_dispatches())
        backward.check(**both, q_before=read(q), k_before=read(k))
        assert total["buffers"][1]["bytes_read"] == backward.bytes["sums"][1]
        barriers = [done["messages"].get("memoryBarrierWithScope", 0) for done in (backward, total)]
        assert barriers == [0, 1]  # the second kernel reads what the first wrote


@pytest.mark.parametrize("shared", [False, True])
def test_tables_by_head_are_read_once_for_q_and_once_for_k(shared, device, simulated):
    q, k, weight = randn(3, 9, 5, 32), randn(3, 9, 5, 32), randn(32)
    cos, sin = (randn(1 if shared else 3, 9, 5, 16) for _ in "cs")
    for op, args in (ops.rotate_qk, (q, k)), (ops.norm_rotate_qk, (q, k, weight, weight)):
        op(*args, cos, sin)
        reads = read(cos, 6 if shared else 2)
        one_dispatch(simulated).check(cos=reads, sin=reads, q_in=read(q), k_out=written(k))


CACHES = [  # (heads of q, heads of k, head_dim, heads of v, head_dim of v, bytes of an access to v)
    (128, 1, 64, 1, 512, 16),  # DeepSeek's latents
    (7, 3, 32, 3, 24, 16),
    (7, 3, 32, 2, 84, 8),
    (7, 3, 32, 2, 33, 2),
    (7, 3, 33, 2, 64, 2),
    (7, 3, 300, 2, 310, 2),  # these heads are wide if there is a norm
    (7, 0, 32, 5, 50, 2),
    (7, 3, 32, 0, 50, None),
    (7, 3, 0, 20, 24, 16),
]


@pytest.mark.parametrize(
    "case", covering({"size": CACHES, "quantised": [False, True], "norm": [False, True]}), ids=name_of
)
def test_what_goes_into_a_cache_is_read_once_and_written_once(case, device, simulated):
    """A v whose head_dim is not k's is read twice for its norm. With quantised caches, q goes to a q_out of int8."""
    (q_heads, k_heads, head_dim, v_heads, v_dim, width), quantised, norm = case.values()
    shapes = (q_heads, head_dim), (k_heads, head_dim), (v_heads, v_dim)
    q, k, v = (randn(40, *shape, dtype=torch.float16) for shape in shapes)
    given = weights_of(head_dim) if norm else {}
    if quantised:
        given |= dict(k_scale=torch.rand(1).to("mps"), v_scale=torch.rand(v_heads).to("mps"))
        given |= dict(q_out=torch.empty_like(q, dtype=torch.int8), q_scale=torch.rand(q_heads).to("mps"))
    for norm_v in [False, True] if v_heads and head_dim else [False]:
        caches = [torch.empty_like(x, dtype=torch.int8 if quantised else x.dtype) for x in (k, v)]
        ops.rotate_into_cache_(q, k, v, *caches, *tables(40, head_dim // 4 * 2), **given, norm_v=norm_v)
        done = one_dispatch(simulated)
        wide = head_dim == 300 and (norm or norm_v)
        assert ("wide" in done["kernel"]) == wide
        if v_heads:
            done.check(v_in=read(v, 1 + norm_v), v_out=written(caches[1]))
            assert done.widths("v_in") == {width} and done.widths("v_out") == {width // (1 + quantised)}
        if k_heads and head_dim:
            done.check(k_in=read(k, 1 + (wide and norm)), k_out=written(caches[0]))
            if quantised:
                done.check(q_in=read(q, 1 + (wide and norm)), q_out=written(given["q_out"]))
            assert norm or quantised or done.bytes["q_out"][1] == q.nbytes // head_dim * (head_dim // 4 * 2)
        if v_heads and k_heads and head_dim:
            assert done["messages"]["setBuffer"] == 7 + 2 * norm + 4 * quantised


# (tokens, heads of q, heads of k, head_dim, rotary_dim)
OVER_HEADS = [(1, 32, 8, 128, 128), (37, 5, 3, 80, 40), (40, 3, 1, 7, 6), (2, 130, 2, 64, 64), (33, 3, 2, 96, 96)]


@pytest.mark.parametrize("size, dtype", [*zip(OVER_HEADS, HALVES * 2, strict=False)], ids=str)
def test_a_norm_over_all_heads_is_one_dispatch(size, dtype, device, simulated):
    """It reads q and k twice. Its backward is two dispatches, of which the first reads q, k and their gradients twice."""
    tokens, q_heads, k_heads, head_dim, rotary_dim = size
    q, k, v = (randn(tokens, h, head_dim, dtype=dtype) for h in (q_heads, k_heads, k_heads))
    weights, angles = weights_of(q_heads, head_dim, k_shape=(k_heads, head_dim)), tables(tokens, rotary_dim)
    both = dict(q_in=read(q, 2), k_in=read(k, 2), q_out=written(q), k_out=written(k))
    ops.norm_rotate_qk(q, k, *weights.values(), *angles)
    done = one_dispatch(simulated)
    done.check(**both)
    assert done["groups"] == [tokens, 2, 1] and (head_dim % 8 or done.widths("q_in") == {4 * dtype.itemsize})

    ops._norm_rotate_qk_backward(q, k, q * 2, k * 2, *weights.values(), *angles)
    backward, total = map(Dispatch, simulated.last_dispatches())
    backward.check(**both, q_before=read(q, 2), k_before=read(k, 2))
    assert total["buffers"][1]["bytes_read"] == math.ceil(tokens / 32) * (q.numel() + k.numel()) // tokens * 4

    for norm_v in False, True:
        ops.rotate_into_cache_(q, k, v, k.clone(), v.clone(), *angles, **weights, norm_v=norm_v)
        done = one_dispatch(simulated)
        assert done["groups"] == [tokens, 3, 1]
        done.check(q_out=(2 * q.nbytes, q.nbytes), v_in=read(v, 1 + norm_v), v_out=written(v))


@pytest.mark.parametrize("shape, stride", [((1, 5), (0, 2)), ((1, 2, 3), (7, 3, 1)), ((3, 4), (1, 2)), ((2,), (9,))])
def test_cos_sin_is_one_dispatch(shape, stride, device, simulated):
    """The dispatch reads positions of any strides without a copy."""
    positions = torch.arange(10).to("mps").as_strided(shape, stride)
    freq = torch_rope.inv_freq(64).float().to("mps").expand(shape[0], 32)
    cos, sin = ops.axial_cos_sin(positions, freq)
    done = one_dispatch(simulated, ["params", "positions", "inv_freq", "cos", "sin"])
    done.check(cos=written(cos), sin=written(sin))
    assert done["rints"] == 4 * shape[0] * cos.numel()
    assert done.buffers["positions"]["bytes"] == 10 * 8 and done.buffers["inv_freq"]["bytes"] == 32 * 4


BOUND = dict(rotate=4, rotate_qk=6, rotate_qk_=4, rotate_into_cache_=7, norm_rotate_qk=8)  # the buffers of a call


@pytest.mark.parametrize("head_dim", [64, 80, 128, 512])
@pytest.mark.parametrize("op", BOUND)
def test_one_token_keeps_many_cores_busy(op, head_dim, device, simulated):
    """A threadgroup runs on one core. Absent tensors cost no message to the encoder."""
    q, k, v = (randn(1, 1, heads, head_dim, dtype=torch.bfloat16) for heads in (32, 8, 8))
    caches, weights = [randn(1, 9, 8, head_dim, dtype=torch.bfloat16) for _ in "kv"], weights_of(head_dim).values()
    args = dict(rotate=[q], rotate_into_cache_=[q, k, v, *caches], norm_rotate_qk=[q, k, *weights]).get(op, [q, k])
    getattr(ops, op)(*args, *tables(8, head_dim), offset=7)
    done = one_dispatch(simulated)
    # The norm of a head of 64 channels is computed by 8 threads, whose vectors determine the order of the sum.
    assert math.prod(done["groups"]) >= (10 if op == "norm_rotate_qk" and head_dim == 64 else 16)
    assert math.prod(done["group"]) == 32 or head_dim == 80
    others = 3 + ("wide" in done["kernel"])
    assert done["messages"]["setBuffer"] == BOUND[op] and sum(done["messages"].values()) == BOUND[op] + others


SOURCES = ["tables", "native tables", "tables by head", "inv_freq"]
USUAL = {"dtype": HALVES, "tokens": [1, 128], "interleaved": [False, True], "angles": SOURCES, "eager": [False, True]}
OF_USUAL = [pytest.param(c, marks=[pytest.mark.exhaustive] * (i > 1)) for i, c in enumerate(covering(USUAL))]


@pytest.mark.parametrize("case", OF_USUAL, ids=name_of)
def test_a_kernel_keeps_its_numbers_in_registers(case, device, simulated):
    """A compiler that knows the function constants leaves no array in memory.

    It reads the strides of q, k and v once, before the loop over heads, so that it reads few parameters of the call.
    """
    dtype, tokens, _, angles, eager = case.values()
    q, k, v = (randn(tokens, heads, 128, dtype=dtype) for heads in (8, 2, 2))
    weights, caches = weights_of(128), [[torch.empty_like(x, dtype=d) for x in (k, v)] for d in (dtype, torch.int8)]
    scales = dict(k_scale=torch.ones(2).to("mps"), v_scale=torch.ones(1).to("mps"))
    table = [t.to(dtype) for t in tables(tokens, 128)] if "native" in angles else tables(tokens, 128)
    given = dict(zip(("cos", "sin"), table, strict=True)) if "tables" in angles else dict(inv_freq=freqs(128))
    options = dict(interleaved=case["interleaved"])
    by_position = given | options | dict(positions=torch.arange(tokens).to("mps"))
    if angles == "tables by head":
        k, by_head = q * 2, [t[None, :, None].expand(1, tokens, 8, 64) for t in table]
        by_position = options | dict(zip(("cos", "sin"), by_head, strict=True))
    else:
        ops.rotate_into_cache_(q, k, v, *caches[0], **by_position, eager_rounding=eager)
        to_q_out = dict(q_out=torch.empty_like(q, dtype=torch.int8), q_scale=scales["v_scale"])
        by_slots = weights | scales | dict(slots=by_position["positions"])
        for more in {}, to_q_out:
            ops.rotate_into_cache_(q, k, v, *caches[1], **by_position, **by_slots, **more)
    ops.rotate_qk(q, k, **by_position, eager_rounding=eager)
    ops.norm_rotate_qk(q, k, *weights.values(), **by_position)
    over_heads = [w.expand(heads, 128) for w, heads in zip(weights.values(), (q.shape[1], k.shape[1]), strict=True)]
    ops.norm_rotate_qk(q, k, *over_heads, **by_position)
    for norm in weights.values(), over_heads:
        ops._norm_rotate_qk_backward(q, k, q, k, *norm, **by_position)
    if angles == "inv_freq":
        ops.cos_sin(torch.arange(tokens).to("mps"), given["inv_freq"])
    for record in simulated.last_dispatches():
        code = metal.specialised(record["source"], record["constants"])
        assert not re.search(r"= alloca [\[%]", code), record["kernel"]
        parameters = len(re.findall(r"load .*, ptr addrspace\(2\)", code))
        assert parameters <= (50 if record["kernel"].startswith("rotate") else 75), record["kernel"]


@pytest.mark.parametrize("tokens, heads, head_dim, accesses", [(2048, (2, 1), 128, 1), (128, (32, 8), 32, 2)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_neighbouring_threads_read_neighbouring_memory(heads_first, tokens, heads, head_dim, accesses, simulated):
    """Each access touches a line of 128 bytes in one SIMD group alone. A share of a token reads its table row once.

    accesses: 2 if a line has both halves of a head, which are read by two instructions.
    """
    shapes = [(1, h, tokens, head_dim) if heads_first else (1, tokens, h, head_dim) for h in heads]
    q, k = (randn(*shape, dtype=torch.bfloat16).transpose(1, 2 if heads_first else 1) for shape in shapes)
    cos, sin = tables(tokens, head_dim)
    simulated.count_lines(True)
    ops.rotate_qk(q, k, cos, sin)
    ops.norm_rotate_qk(q, k, *weights_of(head_dim).values(), cos, sin)
    ops.rotate(q, cos, sin)
    both = dict(q_in=q, q_out=q, k_in=k, k_out=k)
    for record, tensors in zip(simulated.last_dispatches(), (both, both, dict(q_in=q, q_out=q)), strict=True):
        done = Dispatch(record)
        for name, x in tensors.items():
            lines = done.buffers[name]["lines_read"] + done.buffers[name]["lines_written"]
            assert lines * 128 == x.nbytes * accesses, name
        reads = shares_of(tokens, sum(heads) if tensors is both else heads[0])
        assert accesses == 2 or (reads == 1 and math.prod(done["group"]) == 128)
        done.check(cos=read(cos, reads), sin=read(sin, reads))
