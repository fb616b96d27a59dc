"""Tests of what is special to the Metal back end: its loads and stores, its limits, and how the host launches kernels.

On a Mac these tests run on the GPU. Tests that count loads and stores, or that make limits smaller, need the simulator.
"""

import collections
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import ALL_CALLS, CALLS, KERNELS, covering, make_qk, moved
from oracle import assert_close, limits, rotate

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


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).to("mps")


def tables(rows, rotary_dim):
    return [t.to("mps") for t in torch_rope.cos_sin(torch.arange(rows), torch_rope.inv_freq(rotary_dim))]


def table_backward(given, x, cos, sin, positions=None, offset=0, **flags):
    return torch.ops.rope._rotate_table_backward(
        *(given, None, x, None) if torch.is_tensor(x) else (*given, *x), cos, sin, None, positions, offset, **flags
    )


def shares_of(tokens, heads):
    """Returns how many threads share the heads of a token: kSpread in csrc/mps/plan.h."""
    return math.ceil(heads / math.ceil(heads * tokens / 2048))


def one_dispatch(simulator, names=BUFFERS):
    """Checks that one kernel ran. Returns (bytes read, bytes written) of each buffer by name, and the whole record."""
    (dispatch,) = simulator.last_dispatches()
    return {names[i]: (b["bytes_read"], b["bytes_written"]) for i, b in dispatch["buffers"].items()}, dispatch


# ---- what a call costs ----

# (batch, seq, heads of q, heads of k, head_dim, rotary_dim, rotary_start)
COSTS = [
    (1, 1, 32, 8, 128, 128, 0),
    (1, 33, 9, 3, 64, 32, 16),
    (1, 5, 4, 4, 80, 20, 60),
    (2, 3, 6, 5, 7, 6, 1),
    (1, 257, 37, 8, 16, 16, 0),  # a share has 6 heads, and the last share 3
]


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", COSTS, ids=str)
def test_each_element_is_read_once_and_written_once(size, dtype, interleaved, device, simulated):
    batch, seq, q_heads, k_heads, head_dim, rotary_dim, start = size
    q, k, v = (randn(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads, k_heads))
    k_cache, v_cache = (randn(batch, seq + 3, k_heads, head_dim, dtype=dtype) for _ in "kv")
    weights = [randn(head_dim) for _ in "qk"]
    cos, sin = tables(seq + 3, rotary_dim)
    positions = torch.arange(seq).to("mps")
    tokens, many = batch * seq, seq == 257
    options = dict(positions=positions, interleaved=interleaved, rotary_start=start)

    def check(heads, **expected):
        """Checks what the dispatch read and wrote. Each share reads the angles of its token at most once."""
        buffers, dispatch = one_dispatch(simulated)
        for name, bytes_of in expected.items():
            assert buffers[name] == bytes_of, name
        assert buffers["cos"] == buffers["sin"]
        assert buffers["cos"][0] <= tokens * shares_of(tokens, heads) * rotary_dim // 2 * 4
        assert buffers["cos"][1] == 0 and dispatch["rints"] == 0
        for name in expected if many else ():
            buffer = dispatch["buffers"][BUFFERS.index(name)]
            assert set(buffer["loads"]) | set(buffer["stores"]) == {"16"}, name

    heads = q_heads + k_heads
    torch.ops.rope.rotate_qk(q, k, cos, sin, **options)
    check(heads, q_in=(q.nbytes, 0), q_out=(0, q.nbytes), k_in=(k.nbytes, 0), k_out=(0, k.nbytes))

    # The backward is the same call with inverse.
    torch.ops.rope.rotate(q, cos, sin, inverse=True, **options)
    check(q_heads, q_in=(q.nbytes, 0), q_out=(0, q.nbytes))

    # A call in place leaves the channels alone that are not rotated.
    torch.ops.rope.rotate_qk_(q, k, cos, sin, **options)
    rotated_q, rotated_k = (x.nbytes // head_dim * rotary_dim for x in (q, k))
    check(heads, q_out=(rotated_q,) * 2, k_out=(rotated_k,) * 2)

    torch.ops.rope.rotate_qk(q, k, inv_freq=torch_rope.inv_freq(rotary_dim, device="mps"), **options)
    # Each share of a token computes cos and sin of a pair once, with 4 calls of rint.
    assert one_dispatch(simulated)[1]["rints"] == 4 * tokens * shares_of(tokens, heads) * rotary_dim // 2

    copies = dict(k_in=(k.nbytes, 0), k_out=(0, k.nbytes), v_in=(v.nbytes, 0), v_out=(0, v.nbytes))
    torch.ops.rope.rotate_into_cache_(q, k, v, k_cache, v_cache, cos, sin, **options)
    check(heads + k_heads, q_out=(rotated_q,) * 2, **copies)

    if head_dim == 80:
        return  # this head is wide; the next test is about wide heads
    torch.ops.rope.norm_rotate_qk(q, k, *weights, cos, sin, **options)
    check(heads, q_in=(q.nbytes, 0), q_out=(0, q.nbytes), k_in=(k.nbytes, 0), k_out=(0, k.nbytes))
    torch.ops.rope.rotate_into_cache_(
        q, k, v, k_cache, v_cache, cos, sin, q_norm_weight=weights[0], k_norm_weight=weights[1], **options
    )
    check(heads + k_heads, q_out=(q.nbytes,) * 2, **copies)

    torch.ops.rope._norm_rotate_qk_backward(q, k, q * 2, k * 2, *weights, cos, sin, **options)
    backward, total = simulated.last_dispatches()
    buffers = {BUFFERS[i]: (b["bytes_read"], b["bytes_written"]) for i, b in backward["buffers"].items()}
    for name, x in dict(q_in=q, k_in=k, q_before=q, k_before=k).items():
        assert buffers[name] == (x.nbytes, 0), name
    for name, x in dict(q_out=q, k_out=k).items():
        assert buffers[name] == (0, x.nbytes), name
    assert total["kernel"].startswith("sum_parts")
    assert total["buffers"][1]["bytes_read"] == buffers["sums"][1]


@pytest.mark.parametrize("q_heads, k_heads", [(1, 1), (8, 1), (5, 3)])
def test_heads_too_wide_for_a_simd_group_are_read_twice(q_heads, k_heads, device, simulated):
    q, k, v, weight = randn(3, q_heads, 512), randn(3, k_heads, 512), randn(3, k_heads, 512), randn(512)
    torch.ops.rope.norm_rotate_qk(q, k, weight, weight, *tables(3, 512))
    buffers, dispatch = one_dispatch(simulated)
    assert "wide" in dispatch["kernel"]
    assert buffers["q_in"] == (2 * q.nbytes, 0) and buffers["q_out"] == (0, q.nbytes)
    assert buffers["k_in"] == (2 * k.nbytes, 0) and buffers["k_out"] == (0, k.nbytes)
    weights = dict(q_norm_weight=weight, k_norm_weight=weight)
    caches = [randn(3, k_heads, 512) for _ in "kv"]
    torch.ops.rope.rotate_into_cache_(q, k, v, *caches, *tables(3, 512), **weights)
    buffers, _ = one_dispatch(simulated)
    assert buffers["k_in"] == (2 * k.nbytes, 0) and buffers["v_in"] == (v.nbytes, 0)
    assert buffers["k_out"] == buffers["v_out"] == (0, v.nbytes)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", COSTS, ids=str)
def test_gradients_of_tables_are_one_dispatch(size, dtype, interleaved, device, simulated):
    """The dispatch reads each element once and writes each table row once, even a row that rotated no token."""
    batch, seq, q_heads, k_heads, head_dim, rotary_dim, start = size
    q, k = (randn(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads))
    positions = torch.randint(0, seq + 3, (batch, seq)).to("mps")
    by_position, by_token = tables(seq + 3, rotary_dim), [randn(batch, seq, rotary_dim // 2, dtype=dtype) for _ in "cs"]
    rotated_q, rotated_k = (x.nbytes // head_dim * rotary_dim for x in (q, k))
    for angles in (by_position, by_token, [*by_position, positions], [*by_position, positions[0] - 2, 2]):
        cos_grad, _ = table_backward((q, k), (q * 2, k * 2), *angles, interleaved=interleaved, rotary_start=start)
        buffers, dispatch = one_dispatch(simulated, TABLE_BUFFERS)
        assert buffers["q_given"] == buffers["q"] == (rotated_q, 0)
        assert buffers["k_given"] == buffers["k"] == (rotated_k, 0)
        assert buffers["cos_grad"] == buffers["sin_grad"] == (0, cos_grad.nbytes)
        tokens_of_a_row = 1 if angles is by_token else batch
        assert dispatch["threads"][1] == tokens_of_a_row * math.ceil((q_heads + k_heads) / 4)
        if head_dim % 8 == rotary_dim % 8 == start % 4 == 0:
            for name in ("q_given", "k_given", "q", "k"):
                assert set(dispatch["buffers"][TABLE_BUFFERS.index(name)]["loads"]) == {str(4 * dtype.itemsize)}


@pytest.mark.parametrize("shared", [False, True])
def test_tables_by_head_are_read_once_for_q_and_once_for_k(shared, device, simulated):
    q, k = randn(3, 9, 5, 32), randn(3, 9, 5, 32)
    cos, sin = randn(1 if shared else 3, 9, 5, 16), randn(1 if shared else 3, 9, 5, 16)
    reads, weight = 2 * (3 if shared else 1), randn(32)
    for args in (q, k), (q, k, weight, weight):
        (torch.ops.rope.norm_rotate_qk if len(args) == 4 else torch.ops.rope.rotate_qk)(*args, cos, sin)
        buffers, dispatch = one_dispatch(simulated)
        assert buffers["cos"] == buffers["sin"] == (reads * cos.nbytes, 0)
        assert buffers["q_in"] == (q.nbytes, 0) and buffers["k_out"] == (0, k.nbytes)
    for given, x in ((q, k), (q * 2, k * 2)), (q, q * 2):
        cos_grad, _ = table_backward(given, x, cos, sin)
        buffers, dispatch = one_dispatch(simulated, TABLE_BUFFERS)
        assert buffers["q_given"] == buffers["q"] == (q.nbytes, 0)
        assert buffers["cos_grad"] == buffers["sin_grad"] == (0, cos_grad.nbytes)
        assert dispatch["threads"] == [4, 3 if shared else 1, cos.numel() // 16]


V_SHAPES = [  # (heads of q, heads of k, head_dim, heads of v, head_dim of v, bytes of a load of v)
    (128, 1, 64, 1, 512, 16),  # DeepSeek's latents
    (7, 3, 32, 3, 24, 16),
    (7, 3, 32, 2, 84, 8),
    (7, 3, 32, 2, 33, 2),
    (7, 3, 33, 2, 64, 2),
    (7, 3, 300, 2, 310, 2),  # with a norm these heads are wide
    (7, 0, 32, 5, 50, 2),
    (7, 3, 32, 0, 50, None),
    (7, 3, 0, 20, 24, 16),
]


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("shape", V_SHAPES, ids=str)
def test_a_v_of_its_own_shape_is_read_once_and_written_once(shape, norm, device, simulated):
    q_heads, k_heads, head_dim, v_heads, v_dim, load = shape
    new, tokens = (lambda *s: randn(*s, dtype=torch.float16)), 40
    q, k, v = new(tokens, q_heads, head_dim), new(tokens, k_heads, head_dim), new(tokens, v_heads, v_dim)
    k_cache, v_cache = new(50, k_heads, head_dim), new(50, v_heads, v_dim)
    cos, sin = tables(50, head_dim // 4 * 2)
    weights = dict(q_norm_weight=randn(head_dim), k_norm_weight=randn(head_dim)) if norm else {}
    expected = v_cache.clone()
    expected[3 : 3 + tokens] = v
    rotated = torch.ops.rope.rotate_qk(q, k, cos, sin, offset=3)
    simulated.last_dispatches()
    torch.ops.rope.rotate_into_cache_(q, k, v, k_cache, v_cache, cos, sin, offset=3, **weights)
    buffers, dispatch = one_dispatch(simulated)
    assert torch.equal(v_cache, expected)
    assert norm or (torch.equal(q, rotated[0]) and torch.equal(k_cache[3 : 3 + tokens], rotated[1]))
    if v_heads:
        assert buffers["v_in"] == (v.nbytes, 0) and buffers["v_out"] == (0, v.nbytes)
        assert set(dispatch["buffers"][BUFFERS.index("v_in")]["loads"]) == {str(load)}


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(
    "size, loads, stores",
    [
        ((40, 9, 3, 64, 40), {"16"}, {"8"}),
        ((40, 9, 3, 64, 60), {"8"}, {"4"}),
        ((3, 9, 3, 66, 50), {"2"}, {"1"}),
    ],
    ids=str,
)
def test_quantised_caches_are_written_once_in_vectors(size, loads, stores, norm, device, simulated):
    tokens, q_heads, heads, head_dim, v_dim = size
    q, k, v = (
        randn(tokens, h, d, dtype=torch.float16)
        for h, d in ((q_heads, head_dim), (heads, head_dim), (heads + 1, v_dim))
    )
    caches = [torch.zeros(tokens, *x.shape[1:], dtype=torch.int8, device="mps") for x in (k, v)]
    scales = dict(k_scale=torch.rand(1).to("mps"), v_scale=torch.rand(heads + 1).to("mps"))
    weights = dict(q_norm_weight=randn(head_dim), k_norm_weight=randn(head_dim)) if norm else {}
    torch.ops.rope.rotate_into_cache_(q, k, v, *caches, *tables(tokens, head_dim), **scales, **weights)
    buffers, dispatch = one_dispatch(simulated)
    wide = norm and head_dim == 66  # such heads are read twice
    assert buffers["k_in"] == ((1 + wide) * k.nbytes, 0) and buffers["v_in"] == (v.nbytes, 0)
    assert buffers["k_out"] == (0, caches[0].nbytes) and buffers["v_out"] == (0, caches[1].nbytes)
    assert dispatch["messages"]["setBuffer"] == 9 + 2 * norm
    for x in "kv":
        assert buffers[f"{x}_scale"][0] > 0
        assert set(dispatch["buffers"][BUFFERS.index(f"{x}_in")]["loads"]) == loads
        assert set(dispatch["buffers"][BUFFERS.index(f"{x}_out")]["stores"]) == stores


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("start", [1, 4, 8])
def test_a_quantised_cache_may_begin_at_any_byte(start, which, device):
    q, k, v = (randn(40, 9, 64, dtype=torch.float16) for _ in "qkv")
    scales = {f"{x}_scale": torch.rand(9).to("mps") / 50 for x in "kv"}
    results = []
    for at in 0, start:
        caches = {
            name: torch.zeros(41 * 9 * 64, dtype=torch.int8, device="mps")[at * (name == which) :][: 40 * 9 * 64]
            for name in ("k_cache", "v_cache")
        }
        caches = {name: t.view(40, 9, 64) for name, t in caches.items()}
        torch.ops.rope.rotate_into_cache_(
            q.clone(), k, v, **caches, inv_freq=torch_rope.inv_freq(48, device="mps"), **scales
        )
        results.append([t.cpu() for t in caches.values()])
    assert all(map(torch.equal, *results)) and all(t.any() for t in results[0])


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(
    "head_dim, v_dim, reads",
    [(64, 64, 1), (64, 24, 1), (64, 512, 15 / 8), (300, 300, 2), (300, 700, 2), (7, 33, 59 / 33)],
    ids=str,
)
def test_a_norm_of_v_reads_a_head_once_or_twice(head_dim, v_dim, reads, norm, device, simulated):
    """A thread keeps a chunk of v's first piece, and reads those of the other pieces again."""
    q, k, v = randn(3, 9, head_dim), randn(3, 2, head_dim), randn(3, 5, v_dim)
    caches, weight = [randn(4, 2, head_dim), randn(4, 5, v_dim)], randn(head_dim)
    weights = dict(q_norm_weight=weight, k_norm_weight=weight) if norm else {}
    angles, before = tables(4, head_dim // 4 * 2), q.clone()
    expected = torch.ops.rope.rotate_qk(q, k, *angles)
    simulated.last_dispatches()
    torch.ops.rope.rotate_into_cache_(q, k, v, *caches, *angles, **weights, norm_v=True)
    buffers, dispatch = one_dispatch(simulated)
    assert ("wide" in dispatch["kernel"]) == (head_dim == 300)
    assert buffers["v_in"] == (round(v.nbytes * reads), 0) and buffers["v_out"] == (0, v.nbytes)
    scale = torch.rsqrt(v.cpu().double().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(caches[1][:3].cpu().double(), v.cpu() * scale, rtol=4e-7, atol=0)
    if norm:
        return
    assert "q_weight" not in buffers
    assert torch.equal(q, expected[0]) and torch.equal(caches[0][:3], expected[1])
    rotated = before.nbytes // head_dim * (head_dim // 4 * 2)
    assert buffers["q_out"] == (rotated, rotated)  # the other channels are left alone


# (tokens, heads of q, heads of k, head_dim, rotary_dim)
OVER_HEADS = [(1, 32, 8, 128, 128), (37, 5, 3, 80, 40), (70, 3, 1, 7, 6), (2, 130, 2, 64, 64), (40, 3, 2, 512, 512)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", OVER_HEADS, ids=str)
def test_a_norm_over_all_heads_is_one_dispatch(size, dtype, device, simulated):
    """It reads q and k twice. Its backward is two dispatches, of which the first reads q, k and their gradients twice."""
    tokens, q_heads, k_heads, head_dim, rotary_dim = size
    q, k, v = (randn(tokens, h, head_dim, dtype=dtype) for h in (q_heads, k_heads, k_heads))
    weights = [randn(h, head_dim) for h in (q_heads, k_heads)]
    angles = tables(tokens, rotary_dim)
    torch.ops.rope.norm_rotate_qk(q, k, *weights, *angles)
    buffers, dispatch = one_dispatch(simulated)
    assert dispatch["groups"] == [tokens, 2, 1]
    for name, x in dict(q=q, k=k).items():
        assert buffers[f"{name}_in"] == (2 * x.nbytes, 0) and buffers[f"{name}_out"] == (0, x.nbytes)
    if head_dim % 8 == 0:
        assert set(dispatch["buffers"][BUFFERS.index("q_in")]["loads"]) == {str(4 * dtype.itemsize)}

    torch.ops.rope._norm_rotate_qk_backward(q, k, q * 2, k * 2, *weights, *angles)
    backward, total = simulated.last_dispatches()
    buffers = {BUFFERS[i]: (b["bytes_read"], b["bytes_written"]) for i, b in backward["buffers"].items()}
    for name, x in dict(q=q, k=k).items():
        assert buffers[f"{name}_in"] == buffers[f"{name}_before"] == (2 * x.nbytes, 0)
        assert buffers[f"{name}_out"] == (0, x.nbytes)
    assert total["kernel"].startswith("sum_parts")
    assert total["buffers"][1]["bytes_read"] == math.ceil(tokens / 32) * (q.numel() + k.numel()) // tokens * 4

    caches = [randn(tokens, k_heads, head_dim, dtype=dtype) for _ in "kv"]
    named = dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True))
    for norm_v in False, True:
        torch.ops.rope.rotate_into_cache_(q, k, v, *caches, *angles, **named, norm_v=norm_v)
        buffers, dispatch = one_dispatch(simulated)
        assert dispatch["groups"] == [tokens, 3, 1] and buffers["q_out"] == (2 * q.nbytes, q.nbytes)
        assert buffers["v_in"] == ((1 + norm_v) * v.nbytes, 0) and buffers["v_out"] == (0, v.nbytes)


@pytest.mark.parametrize(
    "shape, stride",
    [((1, 5), (0, 1)), ((1, 5), (0, 2)), ((1, 2, 3), (7, 3, 1)), ((3, 4), (1, 2)), ((2,), (9,))],
    ids=str,
)
def test_cos_sin_is_one_dispatch(shape, stride, device, simulated):
    """The dispatch reads positions of any strides without a copy."""
    positions = torch.arange(10).to("mps").as_strided(shape, stride)
    freq = torch_rope.inv_freq(64).float().to("mps").expand(shape[0], 32)
    cos, sin = torch.ops.rope.axial_cos_sin(positions, freq)
    (dispatch,) = simulated.last_dispatches()
    assert dispatch["rints"] == 4 * shape[0] * cos.numel()
    assert dispatch["buffers"][3]["bytes_written"] == dispatch["buffers"][4]["bytes_written"] == cos.nbytes
    assert dispatch["buffers"][1]["bytes"] == 10 * 8 and dispatch["buffers"][2]["bytes"] == 32 * 4
    dense = torch.ops.rope.axial_cos_sin(positions.clone(memory_format=torch.contiguous_format), freq)
    assert torch.equal(cos, dense[0]) and torch.equal(sin, dense[1])
    if shape[0] == 1:
        simulated.last_dispatches()
        of_one_axis = torch.ops.rope.cos_sin(positions[0], freq[0])
        assert torch.equal(cos, of_one_axis[0]) and torch.equal(sin, of_one_axis[1])
        (dispatch,) = simulated.last_dispatches()
        assert dispatch["rints"] == 4 * cos.numel()


# ---- many tokens and few ----


@pytest.mark.parametrize(
    "head_dim, rotary_dim, start, dtype",
    [
        (32, 32, 0, torch.float32),
        (32, 32, 0, torch.bfloat16),
        (56, 48, 8, torch.bfloat16),
        (48, 32, 8, torch.float16),
        (12, 8, 4, torch.float32),
        (66, 66, 0, torch.float32),  # with a norm these heads are wide
    ],
    ids=str,
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_token_has_the_same_bits_among_many_tokens(
    heads_first, interleaved, head_dim, rotary_dim, start, dtype, device
):
    """Among many tokens a thread takes several heads and long vectors, alone it takes one head and short ones."""

    def make(heads, seq=201, head_dim=head_dim):
        x = randn(2, heads, seq, head_dim, dtype=dtype)
        return x.transpose(1, 2) if heads_first else x.transpose(1, 2).contiguous()

    v_dim = 40 if heads_first else head_dim
    q, k, v, caches = make(17), make(5), make(5, head_dim=v_dim), [make(5, 205), make(5, 205, v_dim)]
    weights = [randn(head_dim), randn(head_dim, dtype=dtype)]
    options = dict(
        zip(("cos", "sin"), tables(205, rotary_dim), strict=True), interleaved=interleaved, rotary_start=start
    )
    named = dict(q_norm_weight=weights[0], k_norm_weight=weights[1])
    ops = torch.ops.rope

    def results(at, offset):
        """Returns the results of all operators for the tokens of the slice."""
        xs = [t[:, at] for t in (q, k, v)]
        found = [ops.rotate(xs[1], offset=offset, inverse=True, **options)]
        found += ops.rotate_qk(*xs[:2], offset=offset, **options)
        found += ops.norm_rotate_qk(*xs[:2], *weights, offset=offset, **options)
        for norm in {}, named:
            x, kv = xs[0].clone(), [c.clone() for c in caches]
            ops.rotate_into_cache_(x, *xs[1:], *kv, offset=offset, **options, **norm)
            found += [x, *(c[:, offset : offset + x.shape[1]] for c in kv)]
        return [t.cpu() for t in found]

    many = results(slice(None), 3)
    for at in slice(0, 1), slice(100, 102), slice(200, 201):
        for one, whole in zip(results(at, at.start + 3), many, strict=True):
            assert torch.equal(one, whole[:, at])


@pytest.mark.parametrize("head_dim, rotary_dim, start", [(64, 64, 0), (56, 48, 8), (48, 32, 8)])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_a_norm_has_the_same_bits_with_vectors_of_eight_and_of_four(
    interleaved, head_dim, rotary_dim, start, device, simulated
):
    """The order of a sum shows in few of many numbers, after they are rounded to 16 bits."""
    base, weight = randn(4 + 200 * 24 * head_dim, dtype=torch.float16), randn(head_dim)
    aligned = base[:-4].view(200, 24, head_dim)
    shifted = torch.cat([base[-4:], base[:-4]])[4:].view(200, 24, head_dim)  # begins 8 bytes past an aligned address
    angles = tables(200, rotary_dim)
    simulated.last_dispatches()
    outs = [
        torch.ops.rope.norm_rotate_qk(x, x[:, :3], weight, weight, *angles, interleaved=interleaved, rotary_start=start)
        for x in (aligned, shifted)
    ]
    assert [d["kernel"][-7:] for d in simulated.last_dispatches()] == ["_v8_u32", "_v4_u32"]
    assert all(map(torch.equal, *outs))


@pytest.mark.parametrize("v_dim", [64, 24, 200])
def test_a_norm_of_v_has_the_same_bits_with_vectors_of_eight_and_of_four(v_dim, device, simulated):
    base = randn(4 + 200 * 24 * v_dim, dtype=torch.float16)
    shifted = torch.cat([base[-4:], base[:-4]])[4:]
    k, angles, found = randn(200, 3, 64, dtype=torch.float16), tables(200, 64), []
    simulated.last_dispatches()
    for v in base[:-4], shifted:  # the second begins 8 bytes past an aligned address
        caches = [torch.empty(200, h, d, dtype=torch.float16, device="mps") for h, d in ((3, 64), (24, v_dim))]
        torch.ops.rope.rotate_into_cache_(k.clone(), k, v.view(200, 24, v_dim), *caches, *angles, norm_v=True)
        found.append(caches[1])
    assert [d["kernel"][-7:] for d in simulated.last_dispatches()] == ["_v8_u32", "_v4_u32"]
    assert torch.equal(*found)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 512])
@pytest.mark.parametrize("op", ["rotate", "rotate_qk", "rotate_qk_", "rotate_into_cache_", "norm_rotate_qk"])
def test_one_token_keeps_many_cores_busy(op, head_dim, device, simulated):
    """A threadgroup runs on one core. Absent tensors cost no message to the encoder."""
    q, k, v = (randn(1, 1, heads, head_dim, dtype=torch.bfloat16) for heads in (32, 8, 8))
    caches, weights = [randn(1, 9, 8, head_dim, dtype=torch.bfloat16) for _ in "kv"], [randn(head_dim) for _ in "qk"]
    args = dict(rotate=[q], rotate_into_cache_=[q, k, v, *caches], norm_rotate_qk=[q, k, *weights]).get(op, [q, k])
    getattr(torch.ops.rope, op)(*args, *tables(8, head_dim), offset=7)
    (dispatch,) = simulated.last_dispatches()
    # The norm of a head of 64 channels is computed by 8 threads, whose vectors determine the order of the sum.
    assert math.prod(dispatch["groups"]) >= (10 if op == "norm_rotate_qk" and head_dim == 64 else 16)
    assert math.prod(dispatch["group"]) == 32 or head_dim == 80
    sent = dispatch["messages"]
    expected = dict(rotate=4, rotate_qk=6, rotate_qk_=4, rotate_into_cache_=7, norm_rotate_qk=8)
    assert sent["setBytes"] == 1 and sent["setBuffer"] == expected[op]
    assert sum(sent.values()) == expected[op] + 3  # the others set the pipeline and the parameters, and dispatch


@pytest.mark.parametrize("tokens, heads, head_dim, accesses", [(2048, (6, 2), 128, 1), (128, (32, 8), 32, 2)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_neighbouring_threads_read_neighbouring_memory(
    heads_first, tokens, heads, head_dim, accesses, device, simulated
):
    """Each access touches a line of 128 bytes in one SIMD group alone. A share of a token reads its table row once.

    accesses: 2 if a line has both halves of a head, which are read by two instructions.
    """
    shapes = [(1, h, tokens, head_dim) if heads_first else (1, tokens, h, head_dim) for h in heads]
    q, k = (randn(*shape, dtype=torch.bfloat16).transpose(1, 2 if heads_first else 1) for shape in shapes)
    cos, sin = tables(tokens, head_dim)
    simulated.count_lines(True)
    try:
        torch.ops.rope.rotate_qk(q, k, cos, sin)
        torch.ops.rope.norm_rotate_qk(q, k, randn(head_dim), randn(head_dim), cos, sin)
        torch.ops.rope.rotate(q, cos, sin)
    finally:
        simulated.count_lines(False)
    both = dict(q_in=q, q_out=q, k_in=k, k_out=k)
    for dispatch, tensors in zip(simulated.last_dispatches(), (both, both, dict(q_in=q, q_out=q)), strict=True):
        buffers = {BUFFERS[i]: b for i, b in dispatch["buffers"].items()}
        for name, x in tensors.items():
            assert (buffers[name]["lines_read"] + buffers[name]["lines_written"]) * 128 == x.nbytes * accesses, name
        reads = 1
        if accesses == 2:
            reads = shares_of(tokens, sum(heads) if tensors is both else heads[0])
        else:
            assert math.prod(dispatch["group"]) == 128
        assert buffers["cos"]["bytes_read"] == buffers["sin"]["bytes_read"] == cos.nbytes * reads


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_parts_of_complex_numbers_are_read_as_vectors(dtype, by_token, device, simulated):
    """Llama's freqs_cis: cos and sin are the real and imaginary parts of one complex tensor."""
    freqs, x = torch.randn(200, 24, 2), torch.randn(1, 200, 7, 40).to(dtype)
    # The first vector is aligned, or it begins between two vectors, and then the tables are read element by element.
    for start, loads in (8, {"16"}), (10, {"4"}):
        flat = torch.cat([torch.zeros(start), freqs.flatten()])
        here, there = (t[start:].view(200, 24, 2)[:, 4:20] for t in (flat, flat.to("mps")))
        here, there = ((t[None] if by_token else t).unbind(-1) for t in (here, there))
        simulated.last_dispatches()
        out = torch.ops.rope.rotate(x.to("mps"), *there, interleaved=True)
        buffers, dispatch = one_dispatch(simulated)
        assert set(dispatch["buffers"][BUFFERS.index("cos")]["loads"]) == loads
        assert ("sin" in buffers) == (loads == {"4"})
        assert torch.equal(out.cpu(), torch.ops.rope.rotate(x, *here, interleaved=True))


LIKE_COMPLEX = {  # each takes cos and sin from a table, almost like the parts of complex numbers
    "sin before cos": lambda t: (t[:, 4::2], t[:, 1:-3:2]),
    "two tensors": lambda t: (t[:, ::2], t.clone()[:, 1::2]),
    "far apart": lambda t: (t[:, ::4], t[:, 1::4]),
    "other rows": lambda t: (t[: len(t) // 2, ::2], t.as_strided((len(t) // 2, 16), (128, 2), 1)),
    "16 bits": lambda t: [t.view(torch.float16)[:, column::2] for column in (0, 1)],
}


@pytest.mark.parametrize("which", LIKE_COMPLEX)
def test_tables_that_only_look_complex_are_read_one_by_one(which, device, simulated):
    both = torch.rand(200, 64)
    here, there = ([t[:, :16] for t in LIKE_COMPLEX[which](b)] for b in (both, both.to("mps")))
    x = torch.randn(100, 7, 32).to(here[0].dtype)
    simulated.last_dispatches()
    out = torch.ops.rope.rotate(x.to("mps"), *there)
    _, dispatch = one_dispatch(simulated)
    assert set(dispatch["buffers"][BUFFERS.index("sin")]["loads"]) == {str(there[0].dtype.itemsize)}
    torch.testing.assert_close(out.cpu(), torch.ops.rope.rotate(x, *here), rtol=0, atol=0, equal_nan=True)


# ---- positions and slots that are out of range ----


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_position_out_of_range_gives_nan_and_writes_no_cell(dtype, norm, device):
    far = 2**31 - 1 if dtype == torch.int32 else 2**40
    positions = torch.tensor([3, 8, -1, far, -far, 7], dtype=dtype).to("mps")
    wrong, right = [1, 2, 3, 4], [0, 5]
    cos, sin = tables(8, 32)
    q, k, v = randn(6, 5, 48), randn(6, 2, 48), randn(6, 2, 48)
    weights = [randn(48), randn(48)] if norm else []
    op = torch.ops.rope.norm_rotate_qk if norm else torch.ops.rope.rotate_qk
    expected = op(q[right], k[right], *weights, cos, sin, positions=positions[right])
    outs = op(q, k, *weights, cos, sin, positions=positions)
    for out, e, x in zip(outs, expected, (q, k), strict=True):
        assert torch.equal(out[right], e)
        assert out[wrong][..., :32].isnan().all()
        assert not out[..., 32:].isnan().any() and (norm or torch.equal(out[..., 32:], x[..., 32:]))

    named = dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=False))
    slots = torch.tensor([[1, 2, 4, 0, 3, -1]]).to("mps")
    for angles in dict(cos=cos, sin=sin), dict(inv_freq=torch_rope.inv_freq(32, device="mps")):
        for where in dict(slots=slots[0]), {}:  # without slots the table or the cache ends after position 7
            if "cos" not in angles and where:
                continue  # then every position is valid
            caches = [torch.zeros(12 if "cos" in angles else 8, 2, 48, device="mps") for _ in "kv"]
            x = q.clone()
            torch.ops.rope.rotate_into_cache_(x, k, v, *caches, **angles, positions=positions, **where, **named)
            assert x[wrong][..., :32].isnan().all() and not x[right].isnan().any() and not x[..., 32:].isnan().any()
            written = [1] if where else [3, 7]
            for cache in caches:
                assert cache[written].count_nonzero() == len(written) * 2 * 48
                assert cache.count_nonzero() == len(written) * 2 * 48


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_slot_past_the_cache_gives_nan_in_q_and_writes_no_cell(dtype, norm, device):
    far = 2**31 - 1 if dtype == torch.int32 else 2**33 + 1
    slots = torch.tensor([5, 12, far, -far, 0], dtype=dtype).to("mps")
    q, k, v = randn(5, 4, 64), randn(5, 2, 64), randn(5, 2, 64)
    weights = dict(q_norm_weight=randn(64), k_norm_weight=randn(64)) if norm else {}
    caches = [torch.zeros(3, 4, 2, 64, device="mps") for _ in "kv"]
    torch.ops.rope.rotate_into_cache_(q, k, v, *caches, *tables(5, 64), slots=slots, **weights)
    assert q[1:3].isnan().all() and not q[[0, 3, 4]].isnan().any()
    assert torch.equal(caches[1][1, 1], v[0]) and torch.equal(caches[1][0, 0], v[4])
    assert all(cache.count_nonzero() == 2 * 2 * 64 for cache in caches)


@pytest.mark.parametrize("norm_v", [False, True])
def test_a_norm_over_all_heads_writes_no_cell_for_a_pad(norm_v, device):
    slots = torch.tensor([5, -1, 12, -7, 1]).to("mps")
    q, k, v, weights = randn(5, 4, 64), randn(5, 2, 64), randn(5, 3, 64), dict(norm_v=norm_v)
    weights |= dict(q_norm_weight=randn(4, 64), k_norm_weight=randn(2, 64))
    caches = [torch.zeros(3, 4, heads, 64, device="mps") for heads in (2, 3)]
    torch.ops.rope.rotate_into_cache_(q, k, v, *caches, *tables(5, 64), slots=slots, **weights)
    assert q[2].isnan().all() and not q[[0, 1, 3, 4]].isnan().any()
    for cache in caches:
        assert cache.view(12, -1).any(-1).nonzero().flatten().tolist() == [1, 5]


def test_a_position_that_overflows_is_out_of_range(device):
    positions = torch.tensor([2**63 - 3, -(2**63) + 3, 0], device="mps")
    q, k, (cos, sin) = randn(3, 1, 32), randn(3, 1, 32), tables(8, 32)
    for offset, inside in (5, [2]), (-(2**63), []):
        out, _ = torch.ops.rope.rotate_qk(q, k, cos, sin, positions=positions, offset=offset)
        assert [i for i in range(3) if not out[i].isnan().all()] == inside
        x, caches = q.clone(), [torch.zeros(9, 1, 32, device="mps") for _ in "kv"]
        freq = torch_rope.inv_freq(32, device="mps")
        torch.ops.rope.rotate_into_cache_(x, k, k, *caches, inv_freq=freq, positions=positions, offset=offset)
        assert [i for i in range(3) if not x[i].isnan().any()] == inside
        assert all(cache.any(-1).sum() == len(inside) for cache in caches)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_position_out_of_range_adds_nothing_to_a_gradient(dtype, device):
    far = 2**31 - 1 if dtype == torch.int32 else 2**63 - 1
    positions = torch.tensor([3, 8, -1, far, -far, 7], dtype=dtype).to("mps")
    right = [0, 5]
    given, x, (cos, sin) = randn(6, 5, 48), randn(6, 5, 48), tables(8, 32)
    expected = table_backward(given[right], x[right], cos, sin, positions[right])
    for out, e in zip(table_backward(given, x, cos, sin, positions), expected, strict=True):
        assert torch.equal(out, e) and out.any(-1).nonzero().flatten().tolist() == [3, 7]


def test_a_position_that_overflows_adds_nothing_to_a_gradient(device):
    positions = torch.tensor([2**63 - 3, -(2**63) + 3, 0], device="mps")
    given, x, (cos, sin) = randn(3, 1, 32), randn(3, 1, 32), tables(8, 32)
    for offset, rows in (5, [5]), (-(2**63), []), (-(2**63) + 5, [2]), (2**63 - 1, [2]):
        for out in table_backward(given, x, cos, sin, positions, offset):
            assert [i for i in range(8) if out[i].any()] == rows


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
        expected = torch.ops.rope.rotate_qk(q, k, **angles, **options)
        for x, e in zip(
            torch.ops.rope.rotate_qk(moved(q, "mps"), moved(k, "mps"), **there, **options), expected, strict=True
        ):
            assert torch.equal(x.cpu(), e)
    positions = torch.randint(-(2**40), 2**40, (3, 500))
    positions[:, 250:] %= 7  # the sum over axes rounds small angles
    for kind in (torch.int64, torch.float32):
        for op, given in (("cos_sin", positions[0]), ("axial_cos_sin", positions)):
            freq = torch_rope.inv_freq(64).float() * torch.rand(*given.shape[:-1], 32)
            outs = getattr(torch.ops.rope, op)(given.to(kind).to("mps"), freq.to("mps"))
            for t, e in zip(outs, getattr(torch.ops.rope, op)(given.to(kind), freq), strict=True):
                assert torch.equal(t.cpu(), e)


@pytest.mark.parametrize("head_dim", [128, 300, 1024])
@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_a_norm_whose_sum_overflows_gives_what_the_cpu_gives(value, head_dim, device):
    """A value that is too large for a sum makes this sum infinite and changes nothing else."""
    x, weight = torch.ones(1, 3, 2, head_dim), torch.ones(head_dim)
    x[0, 1, 0, 3] = value
    freq = torch_rope.inv_freq(head_dim).float()
    results = []
    for where in "cpu", "mps":
        leaves = [t.to(where).requires_grad_() for t in (x, x.clone(), weight, weight.clone())]
        outs = torch.ops.rope.norm_rotate_qk(*leaves, inv_freq=freq.to(where), norm_eps=0.5)
        results.append([t.cpu() for t in (*outs, *torch.autograd.grad(outs, leaves, [o.detach() for o in outs]))])
    for name, a, b in zip(["q", "k", "dq", "dk", "dw", "dw"], *results, strict=True):
        torch.testing.assert_close(b, a, equal_nan=True, rtol=1e-5, atol=1e-5, msg=name)


def test_gradients_of_weights_sum_over_many_wide_heads(device):
    """There are so many heads that the SIMD group of a part adds to its sums more than once."""
    x, weight, freq = torch.randn(1, 8300, 4, 67), torch.randn(67), torch_rope.inv_freq(66).float()
    seed = torch.randn(1, 8300, 4, 67)
    results = []
    for where in "cpu", "mps":
        leaves = [t.to(where) for t in (x, x[:, :1, :1], weight, weight)]
        given = seed.to(where), seed[:, :1, :1].to(where)
        k, k_seed = leaves[1].expand(1, 8300, 1, 67), given[1].expand(1, 8300, 1, 67)
        backward = torch.ops.rope._norm_rotate_qk_backward
        results.append(backward(given[0], k_seed, leaves[0], k, *leaves[2:], inv_freq=freq.to(where)))
    for expected, found in zip(*results, strict=True):
        size = expected.abs().max().item()
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=2e-6 * size)


def test_gradients_of_weights_over_all_heads_sum_over_many_tokens(device):
    """There are so many tokens that the threadgroup of a part adds to its sums more than once."""
    q, k, freq = torch.randn(8300, 3, 2), torch.randn(8300, 1, 2), torch.ones(1)
    leaves = [q, k, torch.randn(3, 2), torch.randn(1, 2)]
    given = torch.randn(8300, 3, 2), torch.randn(8300, 1, 2)
    found = torch.ops.rope._norm_rotate_qk_backward(*(t.to("mps") for t in (*given, *leaves)), inv_freq=freq.to("mps"))
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


@pytest.mark.parametrize("threads", [32, 96, 1024])
@pytest.mark.parametrize("head_dim, rotary_dim", [(128, 128), (96, 40), (1024, 64), (512, 512), (7, 6)])
def test_small_threadgroups_give_the_same_results(head_dim, rotary_dim, threads, device, simulated):
    """A pipeline allows only small threadgroups if its kernel needs many registers."""
    simulated.max_threads(threads)
    q, k = randn(2, 9, 5, head_dim), randn(2, 9, 2, head_dim)
    freq = torch_rope.inv_freq(rotary_dim, device="mps")
    for x, out in zip((q, k), torch.ops.rope.rotate_qk(q, k, inv_freq=freq), strict=True):
        assert_close(out, rotate(x, inv_freq=freq), *limits(torch.float32, {"inv_freq": freq}))
    leaves = [t.requires_grad_() for t in (q, k, randn(head_dim), randn(head_dim))]
    outs = torch.ops.rope.norm_rotate_qk(*leaves, inv_freq=freq)
    grads = torch.autograd.grad(outs, leaves, outs)
    angles = (*tables(9, rotary_dim), torch.arange(9).to("mps") // 4)
    grads += table_backward((q * 2, k * 2), (q, k), *angles)
    over_heads = [q.detach(), k.detach(), randn(5, head_dim), randn(2, head_dim)]
    both = [*torch.ops.rope.norm_rotate_qk(*over_heads, inv_freq=freq)]
    both += torch.ops.rope._norm_rotate_qk_backward(q * 2, k * 2, *over_heads, inv_freq=freq)
    simulated.max_threads(1024)
    same = [*torch.ops.rope.norm_rotate_qk(*over_heads, inv_freq=freq)]
    same += torch.ops.rope._norm_rotate_qk_backward(q * 2, k * 2, *over_heads, inv_freq=freq)
    assert all(map(torch.equal, both, same))
    others = torch.ops.rope.norm_rotate_qk(*leaves, inv_freq=freq)
    for a, b in zip(outs, others, strict=True):
        assert torch.equal(a, b)
    expected = torch.autograd.grad(others, leaves, others) + table_backward((q * 2, k * 2), (q, k), *angles)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("where", ["start", "heads"])
def test_one_tensor_that_is_not_aligned_is_enough(where, norm, device):
    """One tensor at a time begins, or has its second head, 4 bytes past an aligned address. No result changes."""
    shapes = dict(q=(3, 2, 16), k=(3, 2, 16), v=(3, 2, 16), k_cache=(5, 2, 16), v_cache=(5, 2, 16))
    values = {name: randn(*shape) for name, shape in shapes.items()}
    values["cos"], values["sin"] = tables(9, 16)
    values |= dict(q_norm_weight=randn(16), k_norm_weight=randn(16)) if norm else {}
    expected = None
    for odd in [None, *(values if where == "start" else shapes)]:
        tensors = {name: t.clone() for name, t in values.items()}
        if odd:
            strides, start = (values[odd].stride(), 1) if where == "start" else ((36, 17, 1), 0)
            tensors[odd] = randn(200).as_strided(values[odd].shape, strides, start).copy_(values[odd])
        torch.ops.rope.rotate_into_cache_(**tensors, slots=torch.tensor([4, 0, 2]).to("mps"), offset=1)
        expected = expected or tensors
        assert all(torch.equal(tensors[name], expected[name]) for name in ("q", "k_cache", "v_cache")), odd


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
        torch.ops.rope.rotate(x, inv_freq=torch_rope.inv_freq(16, device="mps"))
        assert simulated.last_dispatches()[0]["kernel"].endswith(kernel)


@pytest.mark.parametrize("heads_first", [False, True])
def test_element_offsets_may_exceed_2_31_and_2_32(heads_first, untouched, device):
    for far in (2**31 + 8, 2**32 + 16):
        shape, strides = (2, 3, 2, 16), (far, 64, 16, 1)
        if heads_first:
            strides = (far, 16, 64, 1)
        q = untouched(far + 256, torch.float16).as_strided(shape, strides, 8)
        q.copy_(randn(*shape, dtype=torch.float16))
        dense = q.contiguous()
        freq, weight = torch_rope.inv_freq(16, device="mps"), randn(16)
        expected = torch.ops.rope.rotate(dense, inv_freq=freq)
        assert torch.equal(torch.ops.rope.rotate(q, inv_freq=freq), expected)
        normed = torch.ops.rope.norm_rotate_qk(dense, dense, weight, weight, inv_freq=freq)[1]
        assert torch.equal(torch.ops.rope.norm_rotate_qk(q, q, weight, weight, inv_freq=freq)[1], normed)
        angles = tables(3, 8)
        for a, b in (q, dense), (q[..., 1:], dense[..., 1:]):
            for x, y in zip(table_backward(a, a, *angles), table_backward(b, b, *angles), strict=True):
                assert torch.equal(x, y)
        torch.ops.rope.rotate_(q, inv_freq=freq)
        assert torch.equal(q, expected)


def test_element_offsets_of_parameters_may_exceed_2_32(untouched, device):
    """In each case the second element of one parameter is far from its first."""
    far = 2**32 + 16
    q, k = randn(2, 1, 2, dtype=torch.float16), randn(2, 1, 2, dtype=torch.float16)
    near = {name: randn(2, dtype=torch.float16) for name in ("q_norm_weight", "k_norm_weight")}
    near |= {name: randn(2, 1, dtype=torch.float16) for name in ("cos", "sin")}
    near["positions"] = torch.tensor([1, 0], dtype=torch.int32).to("mps")
    parts = {"inv_freq": torch.rand(2, 1).to("mps")}

    def check(xs, near, names):
        expected = torch.ops.rope.norm_rotate_qk(*xs, **near)
        for name in names:
            t = near[name]
            dim = next(d for d in range(t.dim()) if t.shape[d] == 2)
            strides = [far if d == dim else 1 for d in range(t.dim())]
            there = untouched(far + 8, t.dtype).as_strided(t.shape, strides).copy_(t)
            outs = torch.ops.rope.norm_rotate_qk(*xs, **near | {name: there})
            assert all(map(torch.equal, outs, expected)), name

    check((q, k), near, near)
    weights = {name: t for name, t in near.items() if "weight" in name}
    check((q, k), weights | parts, parts)
    by_head = {name: randn(1, 1, 2, 1, dtype=torch.float16) for name in ("cos", "sin")}
    check((q.view(1, 2, 2), k.view(1, 2, 2)), weights | by_head, by_head)


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm over all heads"])
def test_element_offsets_of_scales_and_caches_may_exceed_2_32(norm, untouched, device):
    """In each case one tensor has elements far from its first."""
    far = 2**32 + 16
    q, k, v = (randn(3, 2, 4, dtype=torch.float16) for _ in "qkv")
    near = {f"{x}_scale": torch.rand(2).to("mps") / 50 for x in "kv"}
    near |= {f"{x}_norm_weight": randn(2, 4, dtype=torch.float16) for x in "qk" if norm}
    near |= {f"{x}_cache": torch.zeros(3, 2, 4, dtype=torch.int8, device="mps") for x in "kv"}
    freq, expected = torch_rope.inv_freq(4, device="mps"), None
    for name in [None, *near]:
        tensors = {n: t.clone() for n, t in near.items()}
        if name:
            t = near[name]
            strides = (far,) if t.dim() == 1 else (far, 1) if t.dim() == 2 else (4, far, 1)
            tensors[name] = untouched(far + 64, t.dtype).as_strided(t.shape, strides).copy_(t)
        x = q.clone()
        torch.ops.rope.rotate_into_cache_(x, k, v, inv_freq=freq, **tensors)
        found = [x, tensors["k_cache"].contiguous(), tensors["v_cache"].contiguous()]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), name


def test_an_empty_tensor_may_begin_past_the_end_of_its_storage(device):
    x = randn(2, 2, 16)
    empty = x.as_strided((2, 0, 16), (32, 16, 1), 300)
    freq = torch_rope.inv_freq(16, device="mps")
    out, none = torch.ops.rope.rotate_qk(x, empty, inv_freq=freq)
    assert none.shape == empty.shape and torch.equal(out, torch.ops.rope.rotate(x, inv_freq=freq))


def test_a_cache_of_2_32_blocks_may_have_no_heads(device):
    cache = torch.empty(2**32, 0, 16, device="mps")
    q, k = randn(2, 3, 16), randn(2, 0, 16)
    expected = torch.ops.rope.rotate(q, inv_freq=torch_rope.inv_freq(16, device="mps"))
    torch.ops.rope.rotate_into_cache_(
        q,
        k,
        k,
        cache,
        cache.clone(),
        inv_freq=torch_rope.inv_freq(16, device="mps"),
        slots=torch.tensor([3, 4]).to("mps"),
    )
    assert torch.equal(q, expected)
    torch.ops.rope.rotate_(torch.empty(2**31, 0, 16, device="mps"), inv_freq=torch_rope.inv_freq(16, device="mps"))


@pytest.mark.parametrize("size", [(2**31, 1, 1, 2), (1, 2**31, 1, 2), (1, 1, 2**31, 2), (1, 1, 1, 2**31)], ids=str)
def test_sizes_past_2_31_are_refused(size, device):
    """The tensors need no memory: q has no heads, k is expanded, and the caches have no blocks."""
    batch, seq, heads, head_dim = size
    q, k = torch.empty(batch, seq, 0, head_dim, device="mps"), randn(1, 1, 1, 1).expand(size)
    cache = torch.empty(0, 16, heads, head_dim, device="mps")
    slots = torch.tensor([[-1]]).to("mps").expand(batch, seq)
    with pytest.raises(NotImplementedError, match=r"rope.rotate_into_cache_: .* is \d+ but .*; .* too large for Metal"):
        torch.ops.rope.rotate_into_cache_(q, k, k, cache, cache.clone(), inv_freq=randn(1), slots=slots)


def test_70000_sequences_tokens_or_heads(device):
    """In CUDA some axes of a grid end at 65535. Metal has no such limit, so nothing has to be split."""
    freq = torch_rope.inv_freq(2, device="mps")
    for shape in (70000, 1, 1, 2), (1, 70000, 1, 2), (1, 1, 70000, 2):
        x = randn(*shape)
        assert_close(
            torch.ops.rope.rotate(x, inv_freq=freq),
            rotate(x, inv_freq=freq),
            *limits(torch.float32, {"inv_freq": freq}),
        )
        weight = randn(2)
        q, _ = torch.ops.rope.norm_rotate_qk(x, x[:, :, :1], weight, weight, inv_freq=freq)
        normed = torch.nn.functional.rms_norm(x, (2,), weight, 1e-6)
        torch.testing.assert_close(q, torch.ops.rope.rotate(normed, inv_freq=freq), rtol=0, atol=1e-5)
        cos_grad, _ = table_backward(x, x, *tables(x.shape[1], 2))
        squares = x.cpu().double().square().sum((0, 2, 3)).float()
        torch.testing.assert_close(cos_grad.cpu()[:, 0], squares, rtol=3e-7, atol=0)


# ---- the host ----


def test_every_operator_has_a_metal_kernel():
    """An operator without one would run on the CPU unnoticed if PYTORCH_ENABLE_MPS_FALLBACK is set."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("rope::")]
    assert len(names) == 10
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("MPS")
    if not any(n.startswith("rope::") for n in registered):
        pytest.skip("there is no Metal back end in this process")
    assert set(names) <= set(registered)


def test_float64_is_refused(device):
    x, bits = randn(1, 1, 16), randn(16)
    try:
        freq = bits.view(torch.float64)
    except TypeError:
        pytest.skip("torch makes no float64 tensor on mps")
    with pytest.raises(
        NotImplementedError, match="rope.rotate: inv_freq is float64 .* no float64; pass torch_rope.inv_freq"
    ):
        torch.ops.rope.rotate(x, inv_freq=freq)
    with pytest.raises(
        NotImplementedError, match="rope.cos_sin: inv_freq is float64 .* no float64; pass torch_rope.inv_freq"
    ):
        torch.ops.rope.cos_sin(bits, freq)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
def test_float8_is_refused(which, dtype, device):
    q, k, v = (randn(2, 3, 16) for _ in "qkv")
    caches = {f"{x}_cache": torch.zeros(2, 3, 16, dtype=torch.uint8, device="mps") for x in "kv"}
    try:
        given = {n: t.view(dtype if n[0] == which else torch.int8) for n, t in caches.items()}
    except TypeError:
        pytest.skip("torch makes no float8 tensor on mps")
    before, scale = q.clone(), torch.ones(1, device="mps")
    name = f"{which}_cache is {str(dtype).removeprefix('torch.')}"
    with pytest.raises(
        NotImplementedError,
        match=f"rope.rotate_into_cache_: {name} but must be int8 or the dtype of {which}, because Metal has no float8",
    ):
        torch.ops.rope.rotate_into_cache_(
            q, k, v, **given, inv_freq=torch_rope.inv_freq(16, device="mps"), k_scale=scale, v_scale=scale
        )
    assert torch.equal(q, before) and not any(t.any() for t in caches.values())


def test_an_error_inside_the_queue_reaches_the_caller(simulated):
    """The simulator raises an error there: it allows threadgroups of 16 threads, and this kernel needs 32."""
    x, weight = randn(1, 1, 67), randn(67)
    simulated.max_threads(16)
    with pytest.raises(RuntimeError, match="a threadgroup has 32 threads but must have at most 16"):
        torch.ops.rope._norm_rotate_qk_backward(
            x, x, x, x, weight, weight, inv_freq=torch_rope.inv_freq(66, device="mps")
        )


def test_threads_of_the_host_may_call_at_the_same_time(device):
    """Many threads make the first calls with new function constants, so they all want new pipelines."""
    q, k = randn(2, 6, 4, 64), randn(2, 6, 2, 64)
    cos, sin = tables(300, 64)

    def calls(offset):
        return [
            torch.ops.rope.rotate_qk(q, k, cos, sin, offset=offset, interleaved=bool(i & 1), inverse=bool(i & 2))
            for i in range(8)
        ]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(calls, range(8)))
    for offset, outs in enumerate(found):
        for out, expected in zip(outs, calls(offset), strict=True):
            assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])


def test_the_module_counts_the_calls_of_each_kernel(device):
    """A kernel is compiled with its file alone, when it is first used."""

    def counts():
        found = collections.Counter()
        for kernel, milliseconds, calls in torch_rope._C.metal_pipelines():
            assert milliseconds > 0
            found[kernel] += calls
        return found

    x, freq = randn(3, 2, 10), torch_rope.inv_freq(10, device="mps")
    torch.ops.rope.rotate(x, inv_freq=freq)
    before = counts()
    assert before["library rotate"] == 0
    for inverse in False, True, True:
        torch.ops.rope.rotate(x, inv_freq=freq, inverse=inverse)
    torch.ops.rope.cos_sin(torch.arange(3).to("mps"), freq)
    assert counts() - before == {"rotate_float_v1_u32": 3, "cos_sin_float": 1} and "library cos_sin" in counts()


def test_calls_are_reported_to_the_profiler_of_torch(device, simulated):
    """The profiler ends the encoder after each call, so every call has to begin anew with a new encoder."""
    x, weight, freq = randn(3, 2, 64), randn(64), torch_rope.inv_freq(64, device="mps")
    expected = torch.ops.rope.rotate(x, inv_freq=freq)
    simulated.profile(True)
    found = torch.ops.rope.rotate(x, inv_freq=freq)
    torch.ops.rope._norm_rotate_qk_backward(x, x, x, x, weight, weight, inv_freq=freq)
    torch.ops.rope.cos_sin(torch.arange(3).to("mps"), freq)
    assert simulated.profile(False) == ["rotate_float_v1_u32", "norm_backward_float_v4", "cos_sin_float"]
    torch.ops.rope.rotate_(x, inv_freq=freq)
    assert not simulated.profile(False) and torch.equal(x, expected) and torch.equal(found, expected)


def test_a_call_does_not_see_the_buffers_of_the_call_before(device):
    """A buffer stays bound in the encoder, which all operators share, until another one is bound."""
    q, k, v = randn(2, 4, 64), randn(2, 1, 64), randn(2, 1, 64)
    freq, caches = torch_rope.inv_freq(64, device="mps"), [randn(4, 1, 64) for _ in "kv"]
    positions, weight = torch.tensor([3, 1]).to("mps"), randn(64)
    slots = torch.tensor([2, 0]).to("mps")
    expected = torch.ops.rope.rotate(q, inv_freq=freq)
    with_norm = dict(q_norm_weight=weight, k_norm_weight=weight)
    x = q.clone()
    torch.ops.rope.rotate_into_cache_(x, k, v, *caches, inv_freq=freq, positions=positions, slots=slots, **with_norm)
    assert torch.equal(torch.ops.rope.rotate(q, inv_freq=freq), expected)
