"""Tests of what only the CUDA back end has: assertions in its kernels, its grid, streams, graphs, tensors of any size.

On the emulator (--emulate) the same kernels run on CPU tensors. Tests of the CUDA runtime need a GPU.
"""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from caches import check
from calls import Source, arguments_of, make
from cases import EMULATED, OPERATORS, assert_same, covering, name_of, python
from cuda_calls import BLOCKS, CELLS, ROWS, call_outside, make_call, results_of
from oracle import assert_accurate, assert_close, limits, rotate

import torch_rope

rope = torch.ops.rope


@pytest.fixture
def gpu():
    if EMULATED or "cuda" not in torch_rope._C.devices or not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return "cuda"


def launched(function, *tensors, **options):
    """Makes a call and returns what its launches did. The emulator counts."""
    torch_rope._C.last_launches()
    function(*tensors, **options)
    return torch_rope._C.last_launches()


# ---- a call of each operator ----


CASES = [(op, "table") for op in OPERATORS if "cos" in arguments_of(op)] + [(op, "inv_freq") for op in OPERATORS]


# The operator, its source, and a position or slot that is out of range
OUTSIDE = [
    ("rotate", "table", {"positions": ROWS}),
    ("rotate_qk_", "table", {"positions": -(2**62)}),
    ("rotate_qk_", "table", {"positions": 2**63 - 1, "offset": 1}),  # the sum wraps
    ("norm_rotate_qk", "table", {"positions": 2**40}),
    ("_norm_rotate_qk_backward", "table", {"positions": -3}),
    ("rotate_into_cache_", "table", {"positions": ROWS, "slots": None}),
    ("rotate_into_cache_", "token", {"positions": CELLS, "slots": None}),
    ("rotate_into_cache_", "inv_freq", {"positions": CELLS, "slots": None}),
    ("rotate_into_cache_", "inv_freq", {"positions": -1, "slots": None}),
    ("rotate_into_cache_", "table", {"slots": BLOCKS * CELLS}),
    ("rotate_into_cache_", "table", {"slots": 2**40}),
]


@pytest.mark.parametrize("case", OUTSIDE, ids=str)
def test_a_position_or_slot_out_of_range_fails_an_assertion_on_the_device(case, device):
    """The emulator would report an access out of bounds instead. On a GPU, CUDA is unusable in the process afterwards."""
    if device == "cuda":
        error = python(f"import cuda_calls; print(cuda_calls.call_outside(*{case!r}, 'cuda'))").stdout
    else:
        error = call_outside(*case, device)
    assert "device-side assert" in error, error


# ---- sizes ----

# (batch, seq, heads of q, heads of k, head_dim, rotary_dim)
SHAPES = [
    (70, 1, 8, 2, 64, 64),  # a decode step
    (130, 3, 5, 1, 16, 16),
    (1, 1, 1, 1, 2, 2),
    (2, 300, 1, 1, 2, 2),
    (1, 3, 70, 3, 2, 2),
    (1, 129, 2, 1, 6, 4),  # the last thread block has threads without a token
    (3, 65, 3, 2, 24, 24),
    (2, 3, 3, 2, 2032, 2032),  # the widest head that is cut into vectors
    (1, 2, 3, 2, 4098, 4098),
    (1, 2, 3, 2, 4098, 66),
    (2, 2, 2, 1, 640, 130),
    (1, 3, 2, 1, 257, 256),  # more chunks than lanes of a warp
]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "case",
    covering(
        {
            "shape": SHAPES,
            "dtype": [torch.float32, torch.bfloat16],
            "layouts": [("bhsd", "packed", "bshd"), ("packed", "bhsd", "sbhd")],
            "interleaved": [False, True],
            "positions": ["", "int64 [B,S]", "int32 [S]"],
            "where": ["block", "slots"],
            "q_weight": [None, "float32", "own"],
        },
        exhaustive=("shape", "layouts", "dtype", "interleaved", "positions"),
    ),
    ids=name_of,
)
def test_every_operator_is_right_for_a_shape(case, device):
    given = {name: case[name] for name in ("dtype", "interleaved", "q_weight")} | {"size": case["shape"]}
    given |= dict(zip("qkv", case["layouts"], strict=True)) | {"k_weight": "own", "cache": "blocks"}
    given["slots"] = "int64 [B,S]" if case["where"] == "slots" else "none"
    source, options = (
        Source("table", case["positions"], offset=4, strides="apart"),
        {"interleaved": case["interleaved"]},
    )
    call = make("rotate_into_cache_", device, source=source, **given)
    q, k = call["q"].clone(), call["k"]
    angles = {name: call[name] for name in ("cos", "sin", "positions", "offset") if name in call}
    outs = rope.rotate_qk(q, k, **angles, **options)
    for x, out in zip((q, k), outs, strict=True):
        assert_close(out, rotate(x, **angles, **options), *limits(x.dtype, angles))
        assert_same([rope.rotate(x, **angles, **options)], [out])
    in_place = [q.clone(), k.clone()]
    rope.rotate_qk_(*in_place, **angles, **options)
    assert_same(in_place, outs)
    gradients = [torch.randn_like(x) for x in (q, k)]

    check(call)
    if case["q_weight"]:
        tensors = [q, k, call["q_norm_weight"], call["k_norm_weight"]]
        outs = rope._norm_rotate_qk_backward(*gradients, *tensors, **angles, **options)
        assert_accurate(outs, tensors, gradients, angles, **options)


@pytest.mark.parametrize("norm", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("shape", [(65540, 2, 1, 2), (65540, 2, 1, 8), (1, 1, 70000, 2), (1, 70000, 1, 2)], ids=str)
def test_more_than_65535_sequences_heads_or_tokens_are_rotated(shape, norm, device):
    """The sequences cannot be merged into one, so they need two launches: of a usual kernel with 8 channels."""
    q, k = (torch.randn(*shape[:2], h, shape[3], device=device) for h in (shape[2], 2))
    freq, weight = torch.ones(shape[3] // 2, device=device), torch.rand(shape[3], device=device)
    angles = {"inv_freq": freq, "positions": torch.randint(0, 1000, (1, shape[1]), device=device)}
    if norm:
        out, _ = rope.norm_rotate_qk(q, k, weight, weight, **angles)
        assert_close(out, rotate(q, **angles, norm_weight=weight), *limits(q.dtype, angles, norm=True))
    else:
        assert_close(rope.rotate(q, **angles), rotate(q, **angles), *limits(q.dtype, angles))


def test_slots_may_pass_2_32(untouched, device):
    """The cache has three blocks of `size` cells, of which few are touched."""
    size = 2**31 + 8
    k_cache, v_cache = untouched(12 * size, torch.bfloat16).view(3, size, 2, 1, 2).unbind(2)
    slots = torch.tensor([2**32 + 5, 3, size + 7, 2 * size + 9], device=device)
    q, k, v = torch.randn(3, 4, 1, 2, device=device).to(torch.bfloat16)
    freq = torch.ones(1, device=device)
    expected = rope.rotate(k, inv_freq=freq)
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, inv_freq=freq, slots=slots)
    blocks, in_block = slots // size, slots % size
    assert_same([k_cache[blocks, in_block], v_cache[blocks, in_block]], [expected, v])


# (blocks, cells of a block, the distance of two blocks of k in blocks, that of v)
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize(
    "pages", [(30, 1, 1, 1), (30, 1, 2, 1), (5, 8, 1, 3), (5, 8, 2, 1), (3, 12, 2, 2), (3, 12, 1, 1)]
)
def test_slots_reach_pages_of_any_shape(pages, has_positions, device):
    """The frequencies are sums of two float32 parts, and have the bits of the same frequencies in float64."""
    blocks, size, *distances = pages
    q, k, v = (torch.randn(3, 7, h, 64, device=device).bfloat16() for h in (3, 2, 2))
    caches = [torch.zeros(blocks, d, size, 2, 64, device=device).bfloat16()[:, d - 1] for d in distances]
    cells = torch.randperm(blocks * size)[:21].view(3, 7).to(device)
    options = {"positions": torch.randint(999, (3, 7), device=device)} if has_positions else {"offset": 5}
    parts = torch.rand(32, device=device) * torch.tensor([[1.0], [2.0**-26]], device=device)
    expected = rope.rotate(k, inv_freq=parts.double().sum(0), **options)
    rope.rotate_into_cache_(q, k, v, *caches, inv_freq=parts, slots=cells, **options)
    for cache, x in zip(caches, (expected, v), strict=True):
        right = torch.zeros_like(cache)
        right[cells // size, cells % size] = x
        assert torch.equal(cache, right)


@pytest.mark.large
@pytest.mark.parametrize("heads", [8, 1])
def test_a_tensor_may_have_more_than_2_31_elements(heads, gpu):
    """Parts of each result are those of a call for the part alone."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free memory")
    tokens = 2**31 // (heads * 128) + 1001
    q = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device=gpu).normal_()
    k, freq, weight = q[:, :1], torch_rope.inv_freq(128, device=gpu), torch.rand(128, device=gpu)
    parts = [slice(0, 99), slice(tokens // 2, tokens // 2 + 99), slice(tokens - 99, tokens)]
    for op, *tensors in [
        (rope.rotate_qk, q, k),
        (rope.norm_rotate_qk, q, k, weight, weight),
        (rope._norm_rotate_qk_backward, q, k, q, k, weight, weight),
    ]:
        whole = op(*tensors, inv_freq=freq)[:2]
        for part in parts:
            of_part = [t[part] if t.dim() == 3 else t for t in tensors]
            assert_same([t[part] for t in whole], op(*of_part, inv_freq=freq, offset=part.start)[:2])
    del whole
    expected = [rope.rotate(q[part], inv_freq=freq, offset=part.start) for part in parts]
    rope.rotate_(q, inv_freq=freq)
    assert_same([q[part] for part in parts], expected)


# ---- the loads and stores of a kernel ----


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_written_once_in_16_byte_stores(dtype, device):
    """Loads have 16 bytes too, but a thread takes one frequency. A rotation in place writes only the rotated channels."""
    vectors, freq = 2 * 10 * 10 * 128 * dtype.itemsize // 16, torch_rope.inv_freq(128)
    q, k = torch.randn(2, 10, 12, 128, device=device).to(dtype)[:, :, :10].split([8, 2], 2)
    weights, table = torch.ones(2, 128, device=device), torch.rand(60, 68, device=device)[:, :64]
    for angles, loads in ({"inv_freq": freq}, {4, 16}), ({"cos": table, "sin": table}, {16}):
        for op, *tensors in (rope.rotate_qk, q, k), (rope.rotate_qk_, q, k), (rope.norm_rotate_qk, q, k, *weights):
            (launch,) = launched(op, *tensors, **angles)
            assert launch["loads"].keys() <= loads and launch["stores"] == {16: vectors}
    (launch,) = launched(rope.rotate_qk_, q, k, inv_freq=freq[:32])
    assert launch["stores"] == {16: vectors // 2}
    for more, width in (16 // dtype.itemsize, 16), (1, dtype.itemsize):  # the last chunk has only one vector
        x = torch.randn(2, 10, 3, 64 + more, device=device).to(dtype)
        (launch,) = launched(rope.rotate, x, inv_freq=freq[:32])
        assert launch["stores"] == {width: x.numel() * dtype.itemsize // width}


# head_dim, dtypes of q_out and of the caches of k and v (None: that of x), norm over all heads (None: no norm), whether v
# is normalised
INTO_CACHES = [
    (128, None, None, None, None, False),
    (128, None, None, None, False, False),
    (128, torch.float8_e4m3fn, torch.int8, torch.float8_e5m2, None, False),
    (128, None, torch.float8_e4m3fn, None, False, True),
    (128, torch.int8, None, torch.int8, True, False),
    (128, None, None, None, True, True),
    (128, None, None, None, None, True),
    (1024, None, None, None, None, True),  # a thread block takes a head
]


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim, q_dtype, k_dtype, v_dtype, over_heads, norm_v", INTO_CACHES)
def test_results_are_written_once_in_whole_vectors(
    head_dim, q_dtype, k_dtype, v_dtype, over_heads, norm_v, dtype, device
):
    """In one launch, whatever is normalised. A quantised result takes in one store what 16 bytes of x become."""
    per_head = 2 * 10 * head_dim * dtype.itemsize // 16
    q, k, v = torch.randn(2, 10, 12, head_dim, device=device).to(dtype).split([8, 2, 2], 2)
    results, options, stores = [], {"norm_v": norm_v}, Counter()
    for x, seq, heads, stored in ("q", 10, 8, q_dtype), ("k", 60, 2, k_dtype), ("v", 60, 2, v_dtype):
        results.append(torch.zeros(2, seq, heads, head_dim, device=device, dtype=stored or dtype))
        options[f"{x}_scale"] = stored and torch.ones(1, device=device)
        stores[16 * results[-1].itemsize // dtype.itemsize] += heads * per_head
    options["q_out"], *caches = results
    if over_heads is not None:
        for x, heads in ("q", 8), ("k", 2):
            options[f"{x}_norm_weight"] = torch.ones(*[heads] * over_heads, head_dim, device=device)
    (launch,) = launched(rope.rotate_into_cache_, q, k, v, *caches, inv_freq=torch_rope.inv_freq(head_dim), **options)
    assert launch["stores"] == stores
    assert launch["loads"].keys() <= {4, 16}  # 4: scales, and words of frequencies


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, over_heads, reads",
    [
        ((8, 128), False, 1),
        ((48, 128), True, 1),
        ((40, 96), True, 1),  # a head has 6 chunks, or 12
        ((2, 1536), True, 1),
        ((2, 1024), False, 1),  # a thread block takes a head
        ((130, 128), True, 2),  # more than a thread block holds
    ],
    ids=str,
)
def test_a_norm_reads_everything_once(size, over_heads, reads, dtype, device):
    """If a thread block can hold it; otherwise twice.

    The backward is two launches: of gradients and of float64 sums for each thread block, which the second adds up.
    """
    heads, head_dim = size
    g, x = (torch.randn(2, 16, heads + 2, head_dim, device=device).to(dtype) for _ in "gx")
    weights = [torch.rand(*[h] * over_heads, head_dim, device=device) for h in (heads, 2)]
    of_g, of_x, vectors = g.data_ptr(), x.data_ptr(), x.numel() * dtype.itemsize // 16
    (g, g_k), (q, k), freq = g.split([heads, 2], 2), x.split([heads, 2], 2), torch_rope.inv_freq(head_dim)
    (forward,) = launched(rope.norm_rotate_qk, q, k, *weights, inv_freq=freq)
    assert forward["stores"] == {16: vectors} and forward["bytes"][of_x] == reads * 16 * vectors
    parts, sums = launched(rope._norm_rotate_qk_backward, g, g_k, q, k, *weights, inv_freq=freq)
    assert parts["bytes"][of_x] == parts["bytes"][of_g] == reads * 16 * vectors
    assert parts["stores"][16] == vectors and parts["stores"].keys() == {8, 16} and parts["loads"].keys() <= {8, 16}
    assert sums["loads"].keys() == {8} and sums["stores"] == {4: sum(w.numel() for w in weights)}
    assert reads == 2 or parts["stores"][8] == sums["loads"][8]


# ---- quantised results ----

# Scales with ordinary, with extreme and with special exponents. All bits of the mantissa of the last two are set.
SCALES = "1 0.03 -448 0x1.5p-59 0x1.5p-61 0x1.9p61 0x1.3p127 0x1.7p-126 0x1.7p-140 0x1p-149 -0 0 inf -inf nan "
SCALES += "0x1.fffffep0 0x1.fffffep-9"


@pytest.mark.emulator
@pytest.mark.parametrize("count", [10**6, pytest.param(10**8, marks=pytest.mark.exhaustive)])
def test_quotients_are_those_of_a_division(count):
    """No kernel divides. The numbers are all of float16 and bfloat16, with these scales, and random float32 ones."""
    seed = random.SystemRandom().getrandbits(32)
    scales = [float.fromhex(s) if "x" in s else float(s) for s in SCALES.split()]
    assert not (wrong := torch_rope._C.wrong_divisions(count, seed, scales)), (seed, wrong)


# ---- streams, graphs and host threads: on a GPU ----


@pytest.mark.parametrize("op, source", CASES)
def test_a_cuda_graph_replays_with_other_values(op, source, gpu):
    """So every launch is on the current stream, and the host never waits for the GPU: a graph captures neither."""
    given = make_call(op, source, gpu)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results_of(op, given)  # loads the kernels: a graph cannot capture their first run
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = results_of(op, given)
    for _ in range(3):
        for t in given.values():
            if isinstance(t, torch.Tensor):
                t.copy_(torch.randn_like(t) if t.is_floating_point() else t.flip(0))
        graph.replay()
        assert_same(results, results_of(op, given))


@pytest.mark.parametrize("op, source", CASES)
def test_a_call_runs_on_the_device_of_its_tensors(op, source, gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = make_call(op, source, "cuda:1")
    assert torch.cuda.current_device() == 0
    actual = results_of(op, given)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert_same(actual, results_of(op, given))
    assert all(t.device == torch.device("cuda:1") for t in actual)


def test_two_host_threads_may_use_streams_of_their_own(gpu):
    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            given = {case: make_call(*case, gpu) for case in CASES}
            expected = {case: results_of(case[0], given[case]) for case in CASES}
            for case in CASES * 50:
                assert_same(results_of(case[0], given[case]), expected[case])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def test_a_head_of_2_31_channels_is_refused(device):
    x, message = torch.empty(1, 1, 0, 2**31 + 2, device=device), "head_dim is 2147483650 but must be at most 2147483647"
    with pytest.raises(NotImplementedError, match=f"rope.rotate: {message} on CUDA"):
        rope.rotate(x, inv_freq=torch.ones(4, device=device))
