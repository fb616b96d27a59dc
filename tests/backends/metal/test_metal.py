"""Tests of what is special to the Metal back end: its loads and stores, its limits, and how the host launches kernels.

On a Mac these tests run on the GPU. Tests that count loads and stores, or that make limits smaller, need the simulator.
"""

import collections
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import ALL_CALLS, CALLS, KERNELS, covering, make_qk, moved

import torch_rope
from torch_rope import reference

BUFFERS = [
    "params",
    "q_in",
    "q_out",
    "k_in",
    "k_out",
    "v_in",
    "v_out",
    "cos",
    "sin",
    "inv_freq",
    "positions",
    "slots",
    "q_weight",
    "k_weight",
    "q_before",
    "k_before",
    "sums",
    "k_scale",
    "v_scale",
]
TABLE_BUFFERS = ["params", "q_given", "k_given", "q", "k", "order", "starts", "cos_grad", "sin_grad"]
HALVES = [torch.float32, torch.float16, torch.bfloat16]
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
NORM = pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
ops = torch.ops.rope


@pytest.fixture(autouse=True)
def _only_on_metal(request):
    if "device" in request.fixturenames and request.getfixturevalue("device") != "mps":
        pytest.skip("this test is for Metal only")


@pytest.fixture
def simulated(device):
    """Returns the module with the simulator's own functions. Skips the test if the device is not simulated."""
    simulator = pytest.importorskip("simulator", reason="only the simulator counts accesses")
    if not hasattr(torch.ops.simulator, "last_dispatches"):
        pytest.skip("only the simulator counts accesses")
    torch.mps.synchronize()
    simulator.last_dispatches()
    yield simulator
    simulator.max_threads(1024)
    simulator.count_lines(False)


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).to("mps")


def freqs(rotary_dim):
    return torch_rope.inv_freq(rotary_dim, device="mps")


def tables(rows, rotary_dim):
    return [t.to("mps") for t in torch_rope.cos_sin(torch.arange(rows), torch_rope.inv_freq(rotary_dim))]


def weights_of(*shape, k_shape=None):
    return dict(q_norm_weight=randn(*shape), k_norm_weight=randn(*k_shape or shape))


def table_backward(given, x, cos, sin, positions=None, offset=0, **flags):
    return ops._rotate_table_backward(
        *(given, None, x, None) if torch.is_tensor(x) else (*given, *x), cos, sin, None, positions, offset, **flags
    )


def shares_of(tokens, heads):
    """Returns how many threads share the heads of a token: kSpread in csrc/mps/plan.h."""
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
        return set(map(int, [*self.buffers[name]["loads"], *self.buffers[name]["stores"]]))


def one_dispatch(simulator, names=BUFFERS):
    """Returns what the only kernel did that ran since the call before."""
    (record,) = simulator.last_dispatches()
    return Dispatch(record, names)


# ---- what a call costs ----

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


@pytest.mark.parametrize("case", OF_COSTS, ids=str)
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
    if times == 2:
        return
    ops._norm_rotate_qk_backward(q, k, q * 2, k * 2, *weights.values(), *angles, **options)
    backward, total = map(Dispatch, simulated.last_dispatches())
    backward.check(**both, q_before=read(q), k_before=read(k))
    assert total["kernel"].startswith("sum_parts")
    assert total["buffers"][1]["bytes_read"] == backward.bytes["sums"][1]


@pytest.mark.parametrize("case", OF_COSTS, ids=str)
def test_gradients_of_tables_are_one_dispatch(case, device, simulated):
    """The dispatch reads each element once and writes each table row once, even a row that rotated no token."""
    (batch, seq, q_heads, k_heads, head_dim, rotary_dim, start), dtype = case["size"], case["dtype"]
    q, k = (randn(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads))
    positions = torch.randint(0, seq + 3, (batch, seq)).to("mps")
    by_position, by_token = tables(seq + 3, rotary_dim), [randn(batch, seq, rotary_dim // 2, dtype=dtype) for _ in "cs"]
    part, options = rotary_dim / head_dim, dict(interleaved=case["interleaved"], rotary_start=start)
    for angles in (by_position, by_token, [*by_position, positions], [*by_position, positions[0] - 2, 2]):
        cos_grad, _ = table_backward((q, k), (q * 2, k * 2), *angles, **options)
        done = one_dispatch(simulated, TABLE_BUFFERS)
        done.check(q_given=read(q, part), q=read(q, part), k_given=read(k, part), k=read(k, part))
        done.check(cos_grad=written(cos_grad), sin_grad=written(cos_grad))
        tokens_of_a_row = 1 if angles is by_token else batch
        assert done["threads"][1] == tokens_of_a_row * math.ceil((q_heads + k_heads) / 4)
        if head_dim % 8 == rotary_dim % 8 == start % 4 == 0:
            assert all(done.widths(name) == {4 * dtype.itemsize} for name in ("q_given", "k_given", "q", "k"))


@pytest.mark.parametrize("shared", [False, True])
def test_tables_by_head_are_read_once_for_q_and_once_for_k(shared, device, simulated):
    q, k, weight = randn(3, 9, 5, 32), randn(3, 9, 5, 32), randn(32)
    cos, sin = (randn(1 if shared else 3, 9, 5, 16) for _ in "cs")
    for op, args in (ops.rotate_qk, (q, k)), (ops.norm_rotate_qk, (q, k, weight, weight)):
        op(*args, cos, sin)
        reads = read(cos, 6 if shared else 2)
        one_dispatch(simulated).check(cos=reads, sin=reads, q_in=read(q), k_out=written(k))
    for given, x in ((q, k), (q * 2, k * 2)), (q, q * 2):
        cos_grad, _ = table_backward(given, x, cos, sin)
        done = one_dispatch(simulated, TABLE_BUFFERS)
        done.check(q_given=read(q), q=read(q), cos_grad=written(cos_grad), sin_grad=written(cos_grad))
        assert done["threads"] == [4, 3 if shared else 1, cos.numel() // 16]


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


@NORM
@pytest.mark.parametrize("quantised", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("case", CACHES, ids=str)
def test_what_goes_into_a_cache_is_read_once_and_written_once(case, quantised, norm, device, simulated):
    """For a norm of v a thread keeps a chunk of v's first piece, and reads those of the other pieces again."""
    q_heads, k_heads, head_dim, v_heads, v_dim, width = case
    shapes = (q_heads, head_dim), (k_heads, head_dim), (v_heads, v_dim)
    q, k, v = (randn(40, *shape, dtype=torch.float16) for shape in shapes)
    given = weights_of(head_dim) if norm else {}
    if quantised:
        given |= dict(k_scale=torch.rand(1).to("mps"), v_scale=torch.rand(v_heads).to("mps"))
    for norm_v in [False, True] if v_heads and head_dim else [False]:
        caches = [torch.empty_like(x, dtype=torch.int8 if quantised else x.dtype) for x in (k, v)]
        ops.rotate_into_cache_(q, k, v, *caches, *tables(40, head_dim // 4 * 2), **given, norm_v=norm_v)
        done = one_dispatch(simulated)
        wide = head_dim == 300 and (norm or norm_v)
        assert ("wide" in done["kernel"]) == wide
        if v_heads:
            again = norm_v * (v_dim if wide else max(v_dim - head_dim, 0))
            done.check(v_in=read(v, 1 + again / v_dim), v_out=written(caches[1]))
            assert done.widths("v_in") == {width} and done.widths("v_out") == {width // (1 + quantised)}
        if k_heads and head_dim:
            done.check(k_in=read(k, 1 + (wide and norm)), k_out=written(caches[0]))
            assert norm or done.bytes["q_out"][1] == q.nbytes // head_dim * (head_dim // 4 * 2)
        if v_heads and k_heads and head_dim:
            assert done["messages"]["setBuffer"] == 7 + 2 * norm + 2 * quantised


# (tokens, heads of q, heads of k, head_dim, rotary_dim)
OVER_HEADS = [(1, 32, 8, 128, 128), (37, 5, 3, 80, 40), (40, 3, 1, 7, 6), (2, 130, 2, 64, 64), (33, 3, 2, 512, 512)]


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
    assert total["kernel"].startswith("sum_parts")
    assert total["buffers"][1]["bytes_read"] == math.ceil(tokens / 32) * (q.numel() + k.numel()) // tokens * 4

    for norm_v in False, True:
        ops.rotate_into_cache_(q, k, v, k.clone(), v.clone(), *angles, **weights, norm_v=norm_v)
        done = one_dispatch(simulated)
        assert done["groups"] == [tokens, 3, 1]
        done.check(q_out=(2 * q.nbytes, q.nbytes), v_in=read(v, 1 + norm_v), v_out=written(v))


@pytest.mark.parametrize(
    "shape, stride", [((1, 5), (0, 1)), ((1, 5), (0, 2)), ((1, 2, 3), (7, 3, 1)), ((3, 4), (1, 2)), ((2,), (9,))]
)
def test_cos_sin_is_one_dispatch(shape, stride, device, simulated):
    """The dispatch reads positions of any strides without a copy."""
    positions = torch.arange(10).to("mps").as_strided(shape, stride)
    freq = torch_rope.inv_freq(64).float().to("mps").expand(shape[0], 32)
    found = ops.axial_cos_sin(positions, freq)
    done = one_dispatch(simulated)
    assert done["rints"] == 4 * shape[0] * found[0].numel()
    assert done["buffers"][3]["bytes_written"] == done["buffers"][4]["bytes_written"] == found[0].nbytes
    assert done["buffers"][1]["bytes"] == 10 * 8 and done["buffers"][2]["bytes"] == 32 * 4
    dense = positions.clone(memory_format=torch.contiguous_format)
    assert all(map(torch.equal, found, ops.axial_cos_sin(dense, freq)))
    if shape[0] == 1:
        simulated.last_dispatches()
        assert all(map(torch.equal, found, ops.cos_sin(positions[0], freq[0])))
        assert one_dispatch(simulated)["rints"] == 4 * found[0].numel()


# ---- many tokens and few ----

SAME_BITS = [  # head_dim, rotary_dim, rotary_start, dtype, interleaved, heads first
    (32, 32, 0, torch.float32, False, True),
    (32, 32, 0, torch.bfloat16, True, False),
    (56, 48, 8, torch.bfloat16, True, True),
    (56, 48, 8, torch.bfloat16, False, False),
    (48, 32, 8, torch.float16, False, False),
    (12, 8, 4, torch.float32, True, True),
    (66, 66, 0, torch.float32, False, True),  # with a norm these heads are wide
]


@pytest.mark.parametrize("head_dim, rotary_dim, start, dtype, interleaved, heads_first", SAME_BITS, ids=str)
def test_a_token_has_the_same_bits_among_many_tokens(
    head_dim, rotary_dim, start, dtype, interleaved, heads_first, device
):
    """Among many tokens a thread takes several heads and long vectors, alone it takes one head and short ones."""
    seq = 41 if head_dim == 66 else 201

    def make(heads, seq=seq, head_dim=head_dim):
        x = randn(2, heads, seq, head_dim, dtype=dtype).transpose(1, 2)
        return x if heads_first else x.contiguous()

    v_dim = 40 if heads_first else head_dim
    q, k, v, caches = make(17), make(5), make(5, head_dim=v_dim), [make(5, seq + 4), make(5, seq + 4, v_dim)]
    weights = dict(q_norm_weight=randn(head_dim), k_norm_weight=randn(head_dim, dtype=dtype))
    options = dict(interleaved=interleaved, rotary_start=start)
    options |= dict(zip(("cos", "sin"), tables(seq + 4, rotary_dim), strict=True))

    def results(at, offset):
        """Returns the results of all operators for the tokens of the slice."""
        xs = [t[:, at] for t in (q, k, v)]
        found = [ops.rotate(xs[1], offset=offset, inverse=True, **options)]
        found += ops.rotate_qk(*xs[:2], offset=offset, **options)
        found += ops.norm_rotate_qk(*xs[:2], *weights.values(), offset=offset, **options)
        for norm in {}, weights:
            x, kv = xs[0].clone(), [c.clone() for c in caches]
            ops.rotate_into_cache_(x, *xs[1:], *kv, offset=offset, **options, **norm)
            found += [x, *(c[:, offset : offset + x.shape[1]] for c in kv)]
        return [t.cpu() for t in found]

    many = results(slice(None), 3)
    for at in slice(0, 1), slice(seq // 2, seq // 2 + 2), slice(seq - 1, seq):
        assert all(torch.equal(a, b[:, at]) for a, b in zip(results(at, at.start + 3), many, strict=True))


def aligned_and_shifted(*shape):
    """Returns float16 numbers twice; the second time they begin 8 bytes past an aligned address."""
    base = randn(4 + math.prod(shape), dtype=torch.float16)
    return [t.view(shape) for t in (base[:-4], torch.cat([base[-4:], base[:-4]])[4:])]


@INTERLEAVED
@pytest.mark.parametrize("head_dim, rotary_dim, start, v_dim", [(64, 64, 0, 24), (56, 48, 8, 56), (48, 32, 8, 200)])
def test_norms_have_the_same_bits_with_vectors_of_eight_and_of_four(
    head_dim, rotary_dim, start, v_dim, interleaved, device, simulated
):
    """The order of a sum shows in few of many numbers, after they are rounded to 16 bits."""
    weights, angles = weights_of(head_dim), tables(200, rotary_dim)
    inputs = zip(aligned_and_shifted(200, 24, head_dim), aligned_and_shifted(200, 24, v_dim), strict=True)
    options, results = dict(interleaved=interleaved, rotary_start=start, norm_v=True), []
    for q, v in inputs:
        k, v_cache = torch.empty_like(q[:, :3]), torch.empty_like(v)
        ops.rotate_into_cache_(q, q[:, :3].clone(), v, k, v_cache, *angles, **weights, **options)
        results.append([q, k, v_cache])
    assert [d["kernel"][-7:] for d in simulated.last_dispatches()] == ["_v8_u32", "_v4_u32"]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 512])
@pytest.mark.parametrize("op, bound", [("rotate", 4), ("rotate_qk", 6), ("rotate_qk_", 4), ("rotate_into_cache_", 7), ("norm_rotate_qk", 8)])  # fmt: skip
def test_one_token_keeps_many_cores_busy(op, bound, head_dim, device, simulated):
    """A threadgroup runs on one core. Absent tensors cost no message to the encoder."""
    q, k, v = (randn(1, 1, heads, head_dim, dtype=torch.bfloat16) for heads in (32, 8, 8))
    caches, weights = [randn(1, 9, 8, head_dim, dtype=torch.bfloat16) for _ in "kv"], weights_of(head_dim).values()
    args = dict(rotate=[q], rotate_into_cache_=[q, k, v, *caches], norm_rotate_qk=[q, k, *weights]).get(op, [q, k])
    getattr(ops, op)(*args, *tables(8, head_dim), offset=7)
    done = one_dispatch(simulated)
    # The norm of a head of 64 channels is computed by 8 threads, whose vectors determine the order of the sum.
    assert math.prod(done["groups"]) >= (10 if op == "norm_rotate_qk" and head_dim == 64 else 16)
    assert math.prod(done["group"]) == 32 or head_dim == 80
    messages = dict(setBytes=1, setBuffer=bound, setComputePipelineState=1, dispatchThreads=1)
    assert done["messages"] == messages or (
        sum(done["messages"].values()) == bound + 3 and done["messages"]["setBuffer"] == bound
    )


@pytest.mark.parametrize("tokens, heads, head_dim, accesses", [(2048, (6, 2), 128, 1), (128, (32, 8), 32, 2)])
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
        reads = shares_of(tokens, sum(heads) if tensors is both else heads[0]) if accesses == 2 else 1
        assert accesses == 2 or math.prod(done["group"]) == 128
        done.check(cos=read(cos, reads), sin=read(sin, reads))


# How cos and sin are taken from a table of 64 columns, and the bytes of an access. Llama's freqs_cis has the first kind: cos
# and sin are the real and imaginary parts of complex numbers, and are read as vectors if these are aligned.
COMPLEX = {
    "complex": (lambda t: (t[:, 8::2], t[:, 9::2]), 16),
    "by token": (lambda t: (t[None, :100, 8::2], t[None, :100, 9::2]), 16),
    "not aligned": (lambda t: (t[:, 10::2], t[:, 11::2]), 4),
    "sin before cos": (lambda t: (t[:, 4::2], t[:, 1:-3:2]), 4),
    "two tensors": (lambda t: (t[:, ::2], t.clone()[:, 1::2]), 4),
    "far apart": (lambda t: (t[:, ::4], t[:, 1::4]), 4),
    "other rows": (lambda t: (t[: len(t) // 2, ::2], t.as_strided((len(t) // 2, 16), (128, 2), 1)), 4),
    "16 bits": (lambda t: [t.view(torch.float16)[:, column::2] for column in (0, 1)], 2),
}


@INTERLEAVED
@pytest.mark.parametrize("which", COMPLEX)
def test_only_parts_of_complex_numbers_are_read_as_vectors(which, interleaved, device, simulated):
    (parts, width), both = COMPLEX[which], torch.rand(200, 64)
    here, there = ([t[..., :16] for t in parts(b)] for b in (both, both.to("mps")))
    for dtype in [torch.float16] if which == "16 bits" else HALVES:
        x = torch.randn(1, 100, 7, 40).to(dtype)
        simulated.last_dispatches()
        out = ops.rotate(x.to("mps"), *there, interleaved=interleaved)
        done = one_dispatch(simulated)
        assert done.widths("cos") == {width} and ("sin" in done.bytes) == (width < 16)
        torch.testing.assert_close(
            out.cpu(), ops.rotate(x, *here, interleaved=interleaved), rtol=0, atol=0, equal_nan=True
        )


# ---- positions and slots that are out of range ----


def rows(x):
    """Returns the numbers of the rows that have an element other than zero."""
    return x.flatten(1).any(-1).nonzero().flatten().tolist()


@NORM
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_position_out_of_range_gives_nan_and_writes_no_cell(dtype, norm, device):
    far = 2**31 - 1 if dtype == torch.int32 else 2**40
    positions = torch.tensor([3, 8, -1, far, -far, 7], dtype=dtype).to("mps")
    wrong, right, (cos, sin) = [1, 2, 3, 4], [0, 5], tables(8, 32)
    q, k, v, weights = randn(6, 5, 48), randn(6, 2, 48), randn(6, 2, 48), weights_of(48) if norm else {}
    op, extra = ops.norm_rotate_qk if norm else ops.rotate_qk, weights.values()
    expected = op(q[right], k[right], *extra, cos, sin, positions=positions[right])
    outs = op(q, k, *extra, cos, sin, positions=positions)
    for out, e, x in zip(outs, expected, (q, k), strict=True):
        assert torch.equal(out[right], e) and out[wrong][..., :32].isnan().all()
        assert not out[..., 32:].isnan().any() and (norm or torch.equal(out[..., 32:], x[..., 32:]))
    tabled, slots = dict(cos=cos, sin=sin), dict(slots=torch.tensor([1, 2, 4, 0, 3, -1]).to("mps"))
    # Without slots the table or the cache ends after position 7.
    for angles, where, size, cells in (
        (tabled, slots, 12, [1]),
        (tabled, {}, 12, [3, 7]),
        (dict(inv_freq=freqs(32)), {}, 8, [3, 7]),
    ):
        caches, x = [torch.zeros(size, 2, 48, device="mps") for _ in "kv"], q.clone()
        ops.rotate_into_cache_(x, k, v, *caches, **angles, positions=positions, **where, **weights)
        assert x[wrong][..., :32].isnan().all() and not x[right].isnan().any() and not x[..., 32:].isnan().any()
        assert all(rows(cache) == cells and cache.count_nonzero() == len(cells) * 2 * 48 for cache in caches)
    grads = table_backward(q, q, cos, sin, positions)
    for out, e in zip(grads, table_backward(q[right], q[right], cos, sin, positions[right]), strict=True):
        assert torch.equal(out, e) and not set(rows(out)) - {3, 7}


@NORM
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_slot_past_the_cache_gives_nan_in_q_and_writes_no_cell(dtype, norm, device):
    far = 2**31 - 1 if dtype == torch.int32 else 2**33 + 1
    slots = torch.tensor([5, 12, far, -far, 0], dtype=dtype).to("mps")
    for shapes in ((64,), (64,)), ((4, 64), (2, 64)):  # a norm of each head, and over all heads
        q, k, v = randn(5, 4, 64), randn(5, 2, 64), randn(5, 3, 64)
        weights = weights_of(*shapes[0], k_shape=shapes[1]) if norm else {}
        caches = [torch.zeros(3, 4, heads, 64, device="mps") for heads in (2, 3)]
        ops.rotate_into_cache_(q, k, v, *caches, *tables(5, 64), slots=slots, **weights, norm_v=norm)
        assert q[1:3].isnan().all() and not q[[0, 3, 4]].isnan().any()
        assert norm or torch.equal(caches[1].view(12, 3, 64)[[5, 0]], v[[0, 4]])
        assert all(rows(cache.flatten(0, 1)) == [0, 5] for cache in caches)


def test_a_position_that_overflows_is_out_of_range(device):
    positions = torch.tensor([2**63 - 3, -(2**63) + 3, 0], device="mps")
    q, k, (cos, sin) = randn(3, 1, 32), randn(3, 1, 32), tables(8, 32)
    for offset, inside, entries in (5, [2], [5]), (-(2**63), [], []), (-(2**63) + 5, [0], [2]), (2**63 - 1, [1], [2]):
        out, _ = ops.rotate_qk(q, k, cos, sin, positions=positions, offset=offset)
        assert [i for i in range(3) if not out[i].isnan().all()] == inside
        x, caches = q.clone(), [torch.zeros(9, 1, 32, device="mps") for _ in "kv"]
        ops.rotate_into_cache_(x, k, k, *caches, inv_freq=freqs(32), positions=positions, offset=offset)
        assert [i for i in range(3) if not x[i].isnan().any()] == inside
        assert all(rows(cache) == entries for cache in caches)
        assert all(rows(grad) == entries for grad in table_backward(q, k, cos, sin, positions, offset))


# ---- bits ----


def test_the_bits_are_those_of_the_cpu(device):
    """The rotation in every layout and the angles have the same bits, because both compile the same files.

    A norm is left out: the order of its sum differs.
    """
    for case in covering(CALLS | {"dtype": HALVES}, interacting=KERNELS, exhaustive=ALL_CALLS):
        if case["source"].freq_dtype == torch.float64:
            continue
        q, k, angles = make_qk("cpu", **case)
        there = {name: moved(a, "mps") if isinstance(a, torch.Tensor) else a for name, a in angles.items()}
        options = dict(interleaved=case["interleaved"], attention_factor=1.1)
        expected = ops.rotate_qk(q, k, **angles, **options)
        for x, e in zip(ops.rotate_qk(moved(q, "mps"), moved(k, "mps"), **there, **options), expected, strict=True):
            assert torch.equal(x.cpu(), e)
    positions = torch.randint(-(2**40), 2**40, (3, 500))
    positions[:, 250:] %= 7  # the sum over axes rounds small angles
    for kind in (torch.int64, torch.float32):
        for op, given in ((ops.cos_sin, positions[0]), (ops.axial_cos_sin, positions)):
            freq = torch_rope.inv_freq(64).float() * torch.rand(*given.shape[:-1], 32)
            outs = op(given.to(kind).to("mps"), freq.to("mps"))
            assert all(torch.equal(t.cpu(), e) for t, e in zip(outs, op(given.to(kind), freq), strict=True))


@pytest.mark.parametrize("head_dim, value", [(128, 1e30), (300, float("inf")), (1024, float("nan")), (1024, 1e30)])
def test_a_norm_whose_sum_overflows_gives_what_the_cpu_gives(value, head_dim, device):
    """A value that is too large for a sum makes this sum infinite and changes nothing else."""
    x, weight = torch.ones(1, 3, 2, head_dim), torch.ones(head_dim)
    x[0, 1, 0, 3] = value
    freq, results = torch_rope.inv_freq(head_dim).float(), []
    for where in "cpu", "mps":
        leaves = [t.to(where).requires_grad_() for t in (x, x.clone(), weight, weight.clone())]
        outs = ops.norm_rotate_qk(*leaves, inv_freq=freq.to(where), norm_eps=0.5)
        results.append([t.cpu() for t in (*outs, *torch.autograd.grad(outs, leaves, [o.detach() for o in outs]))])
    torch.testing.assert_close(*reversed(results), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("over_heads", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_gradients_of_weights_sum_over_many_tokens(over_heads, device):
    """There are so many tokens that a part adds to its sums more than once. The heads of 67 channels are wide."""
    heads, dim, tokens = (3, 2, 8300) if over_heads else (4, 67, 8300)
    q, k, freq = torch.randn(tokens, heads, dim), torch.randn(tokens, 1, dim), torch_rope.inv_freq(dim // 2 * 2).float()
    given = torch.randn(tokens, heads, dim), torch.randn(tokens, 1, dim)
    leaves = [q, k, *(torch.randn(*(h, dim)[not over_heads :]) for h in (heads, 1))]
    found = ops._norm_rotate_qk_backward(*(t.to("mps") for t in (*given, *leaves)), inv_freq=freq.to("mps"))
    leaves = [t.double().requires_grad_() for t in leaves]
    outs = reference.norm_rotate_qk(*leaves, inv_freq=freq.double())
    expected = torch.autograd.grad(outs, leaves, [t.double() for t in given])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-6, atol=2e-6 * b.abs().max().item())


def test_a_gradient_of_a_table_that_overflows_is_infinite(device):
    """The gradient is infinite where its sum is, and no NaN appears. A NaN stays in its pair."""
    x = torch.ones(3, 2, 8)
    x[0, 0, 0], x[2, 1, 1] = 1e30, float("nan")
    cos_grad, sin_grad = (t.cpu() for t in table_backward(x.to("mps"), x.to("mps"), *tables(4, 8)))
    assert cos_grad[0].tolist() == [float("inf"), 4, 4, 4] and cos_grad[1].tolist() == [4] * 4
    assert cos_grad[2].isnan().tolist() == sin_grad[2].isnan().tolist() == [False, True, False, False]
    assert not sin_grad[:2].any() and not cos_grad[3].any()


# ---- sizes ----


@pytest.mark.parametrize(
    "head_dim, rotary_dim, threads", [(128, 128, 32), (96, 40, 96), (1024, 64, 32), (512, 512, 96), (7, 6, 32)]
)
def test_small_threadgroups_give_the_same_results(head_dim, rotary_dim, threads, device, simulated):
    """A pipeline allows only small threadgroups if its kernel needs many registers."""
    q, k, freq = randn(2, 9, 5, head_dim), randn(2, 9, 2, head_dim), freqs(rotary_dim)
    norm, over_heads = weights_of(head_dim).values(), weights_of(5, head_dim, k_shape=(2, head_dim)).values()
    angles = *tables(9, rotary_dim), torch.arange(9).to("mps") // 4
    results = []
    for most in threads, 1024:
        simulated.max_threads(most)
        same = [*ops.rotate_qk(q, k, inv_freq=freq), *ops.norm_rotate_qk(q, k, *norm, inv_freq=freq)]
        same += ops.norm_rotate_qk(q, k, *over_heads, inv_freq=freq)
        same += ops._norm_rotate_qk_backward(q * 2, k * 2, q, k, *over_heads, inv_freq=freq)
        close = ops._norm_rotate_qk_backward(q * 2, k * 2, q, k, *norm, inv_freq=freq)
        results.append((same, [*close, *table_backward((q * 2, k * 2), (q, k), *angles)]))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


@NORM
@pytest.mark.parametrize("quantised", [False, True], ids=["", "int8"])
def test_one_tensor_that_is_not_aligned_is_enough(quantised, norm, device):
    """One tensor at a time begins, or has its second head, past an aligned address. No result changes."""
    values = {name: randn(40, 9, 64, dtype=torch.float16) for name in ("q", "k", "v", "k_cache", "v_cache")}
    strided = list(values)
    if quantised:
        values |= {f"{x}_cache": values[f"{x}_cache"].to(torch.int8) for x in "kv"}
        values |= {f"{x}_scale": torch.rand(9).to("mps") / 50 for x in "kv"}
    values |= dict(zip(("cos", "sin"), tables(41, 64), strict=True)) | (weights_of(64) if norm else {})
    odd = [None, *((name, start, 0) for name in values for start in (1, 4)), *((name, 0, 1) for name in strided)]
    expected = None
    for case in odd:
        tensors = {name: t.clone() for name, t in values.items()}
        if case:
            name, start, more = case
            t = tensors[name]
            strides = [stride + more * stride // 64 for stride in t.stride()] if more else t.stride()
            memory = torch.zeros(start + 2 * t.numel(), dtype=t.dtype, device="mps")
            tensors[name] = memory.as_strided(t.shape, strides, start).copy_(t)
        ops.rotate_into_cache_(**tensors, slots=torch.arange(40).flip(0).to("mps"), offset=1)
        found = [tensors[name].contiguous() for name in ("q", "k_cache", "v_cache")]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), case


def test_strides_choose_the_kernel(untouched, device, simulated):
    """The stride of a dimension of size 1 does not count. The last element decides how wide element offsets must be."""
    for x, kernel in (
        (randn(16 * 256).as_strided((1, 1, 256, 16), (3, 5, 16, 1)), "v4_u32"),
        (untouched(2**31 + 2048, torch.float16).as_strided((2, 128, 16), (2**31, 16, 1)).zero_(), "v4_u32"),
        (untouched(2**32 + 2048, torch.float16).as_strided((2, 128, 16), (2**32, 16, 1)).zero_(), "v4_u64"),
        (untouched(2**32 + 8192, torch.float16).as_strided((2, 512, 16), (2**32, 16, 1)).zero_(), "v8_u64"),
        (randn(8196, dtype=torch.float16)[4:].view(1, 2, 256, 16), "v4_u32"),  # aligned to 8 bytes
        (randn(2048, dtype=torch.float16).as_strided((1, 2, 32, 16), (0, 512, 16, 1)), "v1_u32"),  # few threads
    ):
        simulated.last_dispatches()
        ops.rotate(x, inv_freq=freqs(16))
        assert one_dispatch(simulated)["kernel"].endswith(kernel)


@pytest.mark.parametrize("strides", [(64, 16, 1), (16, 64, 1)])
def test_element_offsets_may_exceed_2_31_and_2_32(strides, untouched, device):
    for far in (2**31 + 8, 2**32 + 16):
        q = untouched(far + 256, torch.float16).as_strided((2, 3, 2, 16), (far, *strides), 8)
        q.copy_(randn(2, 3, 2, 16, dtype=torch.float16))
        dense, weight, angles = q.contiguous(), randn(16), tables(3, 8)
        results = []
        for x in q, dense:
            found = [ops.rotate(x, *angles), *ops.norm_rotate_qk(x, x, weight, weight, *angles)]
            found += table_backward(x, x, *angles) + table_backward(x[..., 1:], x[..., 1:], *angles)
            ops.rotate_(x, *angles)
            results.append([*found, x])
        assert all(map(torch.equal, *results))


FAR = [  # the shapes of arguments; in each case one of them has elements far from its first
    dict(k_scale=(2,), v_scale=(2,), k_cache=(3, 2, 4), v_cache=(3, 2, 4), inv_freq=(2, 2)),
    dict(q_norm_weight=(4,), k_norm_weight=(4,), cos=(2, 2), sin=(2, 2), positions=(2,), slots=(2,)),
    dict(q_norm_weight=(2, 4), k_norm_weight=(2, 4), cos=(1, 2, 2, 2), sin=(1, 2, 2, 2), slots=(2,)),
]


@pytest.mark.parametrize("shapes", FAR, ids=" ".join)
def test_element_offsets_of_each_argument_may_exceed_2_32(shapes, untouched, device):
    far, near = 2**32 + 16, {x: randn(1, 2, 2, 4, dtype=torch.float16) for x in "qkv"}
    near |= {f"{x}_cache": torch.zeros(3, 2, 4, dtype=torch.float16, device="mps") for x in "kv"}
    for name, shape in shapes.items():
        dtype = {"scale": torch.float32, "cache": torch.int8, "freq": torch.float32}.get(
            name.split("_")[-1], torch.float16
        )
        near[name] = (torch.rand(shape).to(dtype) if "cache" not in name else torch.zeros(shape, dtype=dtype)).to("mps")
        if name in ("positions", "slots"):
            near[name] = torch.tensor([1, 0]).to("mps")
    expected = None
    for name in [None, *shapes]:
        tensors = {n: t.clone() for n, t in near.items()}
        if name:
            t = near[name]
            strides = {1: (far,), 2: (far, 1), 3: (4, far, 1), 4: (8, 4, far, 1)}[t.dim()]
            tensors[name] = untouched(3 * far + 64, t.dtype).as_strided(t.shape, strides).copy_(t)
        ops.rotate_into_cache_(**tensors)
        found = [tensors[n].contiguous() for n in ("q", "k_cache", "v_cache")]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), name


def test_tensors_without_elements_may_have_any_size_and_start(device):
    x, freq = randn(2, 2, 16), freqs(16)
    expected = ops.rotate(x, inv_freq=freq)
    empty = x.as_strided((2, 0, 16), (32, 16, 1), 300)  # begins past the end of its storage
    out, none = ops.rotate_qk(x, empty, inv_freq=freq)
    assert none.shape == empty.shape and torch.equal(out, expected)
    cache, slots = torch.empty(2**32, 0, 16, device="mps"), torch.tensor([3, 4]).to("mps")
    ops.rotate_into_cache_(x, none, none, cache, cache.clone(), inv_freq=freq, slots=slots)
    assert torch.equal(x, expected)
    ops.rotate_(torch.empty(2**31, 0, 16, device="mps"), inv_freq=freq)


@pytest.mark.parametrize("size", [(2**31, 1, 1, 2), (1, 2**31, 1, 2), (1, 1, 2**31, 2), (1, 1, 1, 2**31)], ids=str)
def test_sizes_past_2_31_are_refused(size, device):
    """The tensors need no memory: q has no heads, k is expanded, and the caches have no blocks."""
    batch, seq, heads, head_dim = size
    q, k = torch.empty(batch, seq, 0, head_dim, device="mps"), randn(1, 1, 1, 1).expand(size)
    cache, slots = torch.empty(0, 16, heads, head_dim, device="mps"), torch.tensor([[-1]]).to("mps").expand(batch, seq)
    with pytest.raises(NotImplementedError, match=r"rope.rotate_into_cache_: .* is \d+ but .*; .* too large for Metal"):
        ops.rotate_into_cache_(q, k, k, cache, cache.clone(), inv_freq=randn(1), slots=slots)


# ---- the host ----


def test_every_operator_has_a_metal_kernel():
    """An operator without one would run on the CPU unnoticed if PYTORCH_ENABLE_MPS_FALLBACK is set."""
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("rope::")}
    registered = {n for n in torch._C._dispatch_get_registrations_for_dispatch_key("MPS") if n.startswith("rope::")}
    if not registered:
        pytest.skip("there is no Metal back end in this process")
    assert len(names) == 10 and names == registered


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dtypes_that_metal_lacks_are_refused(dtype, device):
    x, numbers, scale = randn(2, 3, 16), torch.zeros(2, 3, 16, device="mps"), torch.ones(1, device="mps")
    try:
        wrong = (numbers if dtype.itemsize == 8 else numbers.to(torch.uint8)).view(dtype)
    except TypeError:
        pytest.skip(f"torch makes no {dtype} tensor on mps")

    def refused(operator, match, *args, **given):
        q = x.clone()
        with pytest.raises(NotImplementedError, match=f"rope.{operator}: {match}"):
            getattr(ops, operator)(q, *args, **given)
        assert torch.equal(q, x) and not numbers.any()

    if dtype == torch.float64:
        match = "inv_freq is float64 .* no float64; pass torch_rope.inv_freq"
        refused("rotate", match, inv_freq=wrong[0, 0])
        return refused("cos_sin", match, wrong[0, 0])
    for name in "kv":
        caches = {f"{n}_cache": wrong if n == name else torch.zeros_like(numbers, dtype=torch.int8) for n in "kv"}
        match = f"{name}_cache is {str(dtype)[6:]} but must be int8 or the dtype of {name}, because Metal has no float8"
        refused("rotate_into_cache_", match, x, x, **caches, inv_freq=freqs(16), k_scale=scale, v_scale=scale)


def test_an_error_inside_the_queue_reaches_the_caller(simulated):
    """The simulator raises an error there: it allows threadgroups of 16 threads, and this kernel needs 32."""
    x, weight = randn(1, 1, 67), randn(67)
    simulated.max_threads(16)
    with pytest.raises(RuntimeError, match="a threadgroup has 32 threads but must have at most 16"):
        ops._norm_rotate_qk_backward(x, x, x, x, weight, weight, inv_freq=freqs(66))


def test_threads_of_the_host_may_call_at_the_same_time(device):
    """Many threads make the first calls with new function constants, so they all want new pipelines."""
    q, k, angles = randn(2, 6, 4, 64), randn(2, 6, 2, 64), tables(300, 64)

    def calls(offset):
        flags = [dict(interleaved=bool(i & 1), inverse=bool(i & 2)) for i in range(8)]
        return [out for given in flags for out in ops.rotate_qk(q, k, *angles, offset=offset, **given)]

    with ThreadPoolExecutor(8) as pool:
        for offset, found in enumerate(pool.map(calls, range(8))):
            assert all(map(torch.equal, found, calls(offset)))


def test_the_module_counts_the_calls_of_each_kernel(device):
    """A kernel is compiled with its file alone, when it is first used."""

    def counts():
        found = collections.Counter()
        for kernel, milliseconds, calls in torch_rope._C.metal_pipelines():
            assert milliseconds > 0
            found[kernel] += calls
        return found

    x, freq = randn(3, 2, 10), freqs(10)
    ops.rotate(x, inv_freq=freq)
    before = counts()
    assert before["library rotate"] == 0
    for inverse in False, True, True:
        ops.rotate(x, inv_freq=freq, inverse=inverse)
    ops.cos_sin(torch.arange(3).to("mps"), freq)
    assert counts() - before == {"rotate_float_v1_u32": 3, "cos_sin_float": 1} and "library cos_sin" in counts()


def test_calls_are_reported_to_the_profiler_of_torch(device, simulated):
    """The profiler ends the encoder after each call, so every call has to begin anew with a new encoder."""
    x, weight, freq = randn(3, 2, 64), randn(64), freqs(64)
    expected = ops.rotate(x, inv_freq=freq)
    simulated.profile(True)
    found = ops.rotate(x, inv_freq=freq)
    ops._norm_rotate_qk_backward(x, x, x, x, weight, weight, inv_freq=freq)
    ops.cos_sin(torch.arange(3).to("mps"), freq)
    assert simulated.profile(False) == ["rotate_float_v1_u32", "norm_backward_float_v4", "cos_sin_float"]
    ops.rotate_(x, inv_freq=freq)
    assert not simulated.profile(False) and torch.equal(x, expected) and torch.equal(found, expected)


def test_a_call_does_not_see_the_buffers_of_the_call_before(device):
    """A buffer stays bound in the encoder, which all operators share, until another one is bound."""
    q, k, caches = randn(2, 4, 64), randn(2, 1, 64), [randn(4, 1, 64) for _ in "kv"]
    expected = ops.rotate(q, inv_freq=freqs(64))
    given = dict(positions=torch.tensor([3, 1]).to("mps"), slots=torch.tensor([2, 0]).to("mps"))
    ops.rotate_into_cache_(q.clone(), k, k, *caches, inv_freq=freqs(64), **given, **weights_of(64))
    assert torch.equal(ops.rotate(q, inv_freq=freqs(64)), expected)
