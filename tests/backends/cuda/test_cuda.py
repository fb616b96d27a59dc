"""Tests of what only the CUDA back end has: assertions in its kernels, its grid, streams, graphs, tensors of any size.

On the emulator (--emulate) the same kernels run on CPU tensors. Tests of the CUDA runtime need a GPU.
"""

import functools
import itertools
import math
import pickle
import threading
from collections import Counter

import pytest
import torch
from cases import (
    ALL_CALLS,
    CALLS,
    EMULATED,
    EXHAUSTIVE,
    KERNELS,
    LAYOUTS,
    Source,
    covering,
    make_qk,
    name_of,
    on_cuda,
    python,
    set_apart,
)
from oracle import assert_close, limits, rotate, table_backward
from test_cache import Caches, check, make_norm
from test_norm import assert_accurate
from test_tables import assert_sums

import torch_rope

rope = torch.ops.rope


@pytest.fixture(autouse=True)
def _kernels_of_cuda(request):
    """Skips a test whose device does not run the kernels of CUDA."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else None
    if device is not None and not on_cuda(device):
        pytest.skip("needs the kernels of CUDA: an NVIDIA GPU, or --emulate")


@pytest.fixture
def gpu():
    if EMULATED or "cuda" not in torch_rope._C.devices or not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return "cuda"


@pytest.fixture
def launched(device, request):
    """Returns a function that makes a call and returns what its launches did."""
    if request.config.getoption("--emulate") != "checked":
        pytest.skip("needs an emulator that counts accesses: --emulate")

    def launched(function, *tensors, **options):
        torch_rope._C.last_launches()
        function(*tensors, **options)
        return torch_rope._C.last_launches()

    return launched


def same(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


# ---- positions and slots out of range ----

B, S, D = 2, 5, 16
ROWS, CELLS = 12, 9  # of the tables, and of a block of the caches
# Calls with a position or slot out of range: tensors, and other arguments
CACHES = "q k v k_cache v_cache"
OUTSIDE = {
    "rotate": ("q", {"positions": [0, 1, ROWS, 3, 4]}),
    "rotate_": ("q", {"positions": [[0, 1, 2, 3, 4], [0, 1, 2, 3, -1]]}),
    "rotate_qk": ("q k", {"positions": [0, 1, 2**31, 3, 4]}),
    "rotate_qk_": ("q k", {"positions": [0, 1, 2, -(2**62), 4]}),
    "rotate_qk_ with an offset that wraps": ("q k", {"positions": [0, 0, 0, 0, 2**63 - 1], "offset": 1}),
    "norm_rotate_qk": ("q k weight weight", {"positions": [0, 1, 2**40, 3, 4]}),
    "_norm_rotate_qk_backward": ("q k q k weight weight", {"positions": [-3, 1, 2, 3, 4]}),
    "_rotate_table_backward": ("q k q k", {"positions": [[0, 1, 2, 3, 4], [0, 1, ROWS, 3, 4]]}),
    "_rotate_table_backward far away": ("q k q k", {"positions": [0, 1, 2**32 + 3, 3, 4]}),
    "_rotate_table_backward before the table": ("q k q k", {"positions": [0, 1, 2, 3, 4], "offset": -1}),
    "rotate_into_cache_ past the block": (CACHES, {"positions": [0, 1, CELLS, 3, 4]}),
    "rotate_into_cache_ before the block": (CACHES, {"positions": [0, 1, 2, 3, -1]}),
    "rotate_into_cache_ past the last slot": (CACHES, {"slots": [[0, 1, 2, 3, 4], [5, 6, -1, 2 * CELLS, 8]]}),
    "rotate_into_cache_ far past the last slot": (CACHES, {"slots": [[0, 1, 2**40, 3, 4], [5, 6, -1, 8, 9]]}),
}


def call_outside(name, norm, device):
    """Makes a call out of range with tensors that are each in the middle of a larger one, and returns the text of the error.
    Nothing outside the tensors may be read or written."""
    cos, sin = torch_rope.cos_sin(torch.arange(ROWS, device=device), torch_rope.inv_freq(D, device=device))
    shapes = {"q": (B, S, 3, D), "k": (B, S, 2, D), "v": (B, S, 2, D), "k_cache": (B, CELLS, 2, D)}
    shapes |= {"v_cache": shapes["k_cache"], "weight": (D,), "cos": cos.shape, "sin": sin.shape}
    larger = {name: torch.rand([n + 2 for n in shape], device=device) for name, shape in shapes.items()}
    tensors = {name: t[(slice(1, -1),) * t.dim()] for name, t in larger.items()}
    tensors["cos"].copy_(cos), tensors["sin"].copy_(sin)
    names, integers = OUTSIDE[name]
    angles = {name: tensors[name] for name in ("cos", "sin")}
    if "the block" in name:  # without tables, so that only the cache limits positions
        angles = {"inv_freq": torch_rope.inv_freq(D, device=device)}
    weights = {"q_norm_weight": tensors["weight"], "k_norm_weight": tensors["weight"]} if norm else {}
    integers = {x: torch.tensor(n, device=device) if isinstance(n, list) else n for x, n in integers.items()}
    before = {name: t.clone() for name, t in larger.items()}
    error = ""
    try:
        getattr(rope, name.split()[0])(*(tensors[n] for n in names.split()), **angles, **weights, **integers)
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as e:  # torch.AcceleratorError is one
        error = str(e)
    if device == "cuda":
        return error  # the assertion has made CUDA unusable in this process
    torch_rope._C.check_guards()
    for name, t in before.items():
        t[(slice(1, -1),) * t.dim()] = tensors[name]
        assert torch.equal(t, larger[name])
    return error


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_position_or_slot_out_of_range_fails_an_assertion_on_the_device(name, device):
    for norm in (False, True) if "cache" in name else (False,):
        if device == "cuda":
            done = python(f"import test_cuda; print(test_cuda.call_outside({name!r}, {norm}, 'cuda'))")
            assert "device-side assert" in done.stdout, done.stdout + done.stderr
        else:
            assert "device-side assert" in call_outside(name, norm, device)


# ---- sizes ----

# (batch, seq, heads of q, heads of k, head_dim, rotary_dim)
SHAPES = [
    (300, 1, 8, 2, 64, 64),  # a decode step
    (257, 3, 5, 1, 16, 16),
    (1, 1, 1, 1, 2, 2),
    (2, 300, 1, 1, 2, 2),
    (1, 3, 70, 3, 2, 2),
    (1, 129, 2, 1, 6, 4),  # the last thread block has threads without a token
    (3, 65, 3, 2, 24, 24),
    (1, 2, 200, 3, 8, 8),
    (1, 1030, 2, 1, 8, 8),  # in the gradients of tables several rows share a thread block, each with its own threads
    (2, 3, 3, 2, 2032, 2032),  # the widest head that is cut into vectors
    (1, 3, 3, 1, 2048, 2048),
    (1, 2, 3, 2, 4098, 4098),
    (1, 2, 3, 2, 4098, 66),
    (2, 2, 2, 1, 640, 130),
    (1, 3, 2, 1, 257, 256),  # more chunks than lanes of a warp
    (1, 3, 2, 1, 66, 66),
    (5, 7, 1, 9, 128, 64),
]


def rotated_by_all(q, k, angles, **options):
    """Returns q and k rotated. Checks that all operators give the same bits."""
    q_out, k_out = rope.rotate_qk(q, k, **angles, **options)
    same([rope.rotate(x, **angles, **options) for x in (q, k)], [q_out, k_out])
    q, k = q.clone(), k.clone()
    rope.rotate_qk_(q, k, **angles, **options)
    same([q, k], [q_out, k_out])
    return q_out, k_out


def assert_gradients_of_tables(gradients, x, angles, **options):
    outs = rope._rotate_table_backward(*gradients, *x, **angles, **options)
    cos_grad, sin_grad, *magnitudes = table_backward(gradients, x, **angles, **options)
    for out, expected, magnitude in zip(outs, (cos_grad, sin_grad), magnitudes, strict=True):
        assert_sums(out, expected, magnitude, torch.float32, 0)


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "case",
    covering(
        {
            "shape": SHAPES,
            "dtype": [torch.float32, torch.bfloat16],
            "layouts": [("bhsd", "packed", "bshd"), ("packed", "bhsd", "sbhd")],
            "interleaved": [False, True],
            "positions": ["none", "[B,S]", "[S]"],
            "where": ["block", "slots"],
            "weights": ["none", "float32", "dtype of x"],
        },
        exhaustive=("shape", "layouts", "dtype", "interleaved", "positions"),
    ),
    ids=name_of,
)
def test_every_operator_is_right_for_a_shape(case, device):
    batch, seq, q_heads, k_heads, head_dim, rotary_dim = case["shape"]
    q, k, v = (
        LAYOUTS[layout](torch.Size((batch, seq, h, head_dim)), case["dtype"], device)
        for layout, h in zip(case["layouts"], (q_heads, k_heads, k_heads), strict=True)
    )
    options = {"interleaved": case["interleaved"]}
    positions = {"none": "", "[B,S]": "int64 [B,S]", "[S]": "int32 [S]"}[case["positions"]]
    angles = Source("table", positions, offset=4, strides="apart").arguments(
        batch, seq, rotary_dim, torch.float32, device
    )
    gradients = [torch.randn_like(x) for x in (q, k)]
    assert_gradients_of_tables(gradients, [q, k], angles, **options)
    for x, out in zip((q, k), rotated_by_all(q, k, angles, **options), strict=True):
        assert_close(out, rotate(x, **angles, **options), *limits(x.dtype, angles))

    norm, slots, size = make_norm(case["weights"], head_dim, case["dtype"], device), None, seq + 44
    if case["where"] == "slots":
        slots, size = torch.randperm(batch * seq + 3)[: batch * seq].view(batch, seq).to(device), seq + 3 // batch + 1
    else:
        set_apart(angles, batch, size - 4)
    check(
        q.clone(),
        k,
        v,
        Caches("blocks", batch, size, k_heads, head_dim, q.dtype, device),
        angles,
        slots,
        norm,
        **options,
    )
    if norm:
        tensors = [q, k, norm["q_norm_weight"], norm["k_norm_weight"]]
        outs = rope._norm_rotate_qk_backward(*gradients, *tensors, **angles, **options)
        assert_accurate(outs, tensors, gradients, angles, norm_eps=1e-6, **options)


@pytest.mark.parametrize("norm", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("shape", [(65540, 2, 1, 2), (1, 1, 70000, 2), (1, 70000, 1, 2)], ids=str)
def test_more_than_65535_sequences_heads_or_tokens_are_rotated(shape, norm, device):
    """The sequences cannot be merged into one, so they need two launches."""
    q, k = (torch.randn(*shape[:2], h, shape[3], device=device) for h in (shape[2], 2))
    freq, weight = torch.ones(1, device=device), torch.rand(shape[3], device=device)
    angles = {"inv_freq": freq, "positions": torch.randint(0, 1000, (1, shape[1]), device=device)}
    if norm:
        out, _ = rope.norm_rotate_qk(q, k, weight, weight, **angles)
        assert_close(out, rotate(q, **angles, norm_weight=weight), *limits(q.dtype, angles, norm=True))
    else:
        assert_close(rope.rotate(q, **angles), rotate(q, **angles), *limits(q.dtype, angles))
        cos, sin = torch.rand(2, 1000, shape[3] // 2, device=device)
        tables = {"cos": cos, "sin": sin, "positions": angles["positions"]}
        assert_gradients_of_tables([q, k], [q, k], tables)


def test_a_tensor_without_heads_may_have_strides_that_overflow(device):
    q = torch.randn(1, 70000, 1, 2, device=device).transpose(0, 1)
    freq = torch.ones(1, device=device)
    out, none = rope.rotate_qk(q, q[:, :, :0], inv_freq=freq, offset=3)
    assert q.stride(1) * 69999 > 2**31 and none.shape == (70000, 1, 0, 2)
    assert_close(out, rotate(q, inv_freq=freq, offset=3), 1)


@pytest.mark.parametrize("heads_first", [False, True])
def test_element_offsets_may_pass_2_31(heads_first, untouched, device):
    """The tensor is small, but its heads, tokens and sequences are far apart in memory."""
    strides = [2**30 + 2**20, 2**30, 2**28, 1]
    if heads_first:
        strides[:3] = strides[2::-1]
    x = untouched(2**31 + 2**29, torch.bfloat16).as_strided((2, 2, 2, 64), strides, 2**19)
    assert max(strides) < 2**31 < sum(strides)
    x.copy_(torch.randn(x.shape, device=device))
    dense, freq, weight = x.contiguous(), torch_rope.inv_freq(64, device=device), torch.rand(64, device=device)
    y = dense.clone()
    for eager in (False, True):
        options = {"inv_freq": freq, "eager_rounding": eager}
        same(*(rope.rotate_qk(q, y, **options) for q in (x, dense)))
        same(*(rope.norm_rotate_qk(q, y, weight, weight, **options) for q in (x, dense)))
        same(*(rope._norm_rotate_qk_backward(g, y, g, y, weight, weight, **options) for g in (x, dense)))
    slots, caches = (
        torch.tensor([[4, 1], [3, 6]], device=device),
        torch.zeros(2, 3, 4, 2, 2, 64, device=device).bfloat16(),
    )
    for k, cache in zip((x, dense), caches, strict=True):
        rope.rotate_into_cache_(dense.clone(), k, k, *cache.unbind(2), inv_freq=freq, slots=slots)
    same(caches[0], caches[1])
    table = torch.rand(2, 32, device=device)
    gradients = [rope._rotate_table_backward(g, y, y, g, table, table) for g in (x, dense)]
    same(*gradients)
    rope.rotate_(x, inv_freq=freq)
    assert torch.equal(x, rope.rotate(dense, inv_freq=freq))


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
    same([k_cache[blocks, in_block], v_cache[blocks, in_block]], [expected, v])


@pytest.mark.large
@pytest.mark.parametrize("heads", [8, 1])
def test_a_tensor_may_have_more_than_2_31_elements(heads, gpu):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free memory")
    tokens = 2**31 // (heads * 128) + 1001
    q = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device=gpu).normal_()
    k, freq = q[:, :1], torch_rope.inv_freq(128, device=gpu)
    weight = torch.rand(128, device=gpu)
    parts = [slice(0, 99), slice(tokens // 2, tokens // 2 + 99), slice(tokens - 99, tokens)]

    def compare(op, *more, results=2):
        """Compares parts of the results with those of a call for each part alone."""
        whole = op(q, k, *more, inv_freq=freq)[:results]
        for part in parts:
            of_part = [t[part] if t.dim() == 3 else t for t in more]
            same([t[part] for t in whole], op(q[part], k[part], *of_part, inv_freq=freq, offset=part.start)[:results])

    compare(rope.rotate_qk)
    compare(rope.norm_rotate_qk, weight, weight)
    compare(rope._norm_rotate_qk_backward, q, k, weight, weight)
    cos, sin = (t.expand(tokens, 64) for t in torch.rand(2, 1, 64, device=gpu))
    whole = rope._rotate_table_backward(q, k, k.expand_as(q), k, cos, sin)
    for part in parts:
        g, x = (q[part], k[part]), (k[part].expand_as(q[part]), k[part])
        cos_grad, sin_grad, *magnitudes = table_backward(g, x, cos[part], sin[part])
        for out, expected, magnitude in zip(whole, (cos_grad, sin_grad), magnitudes, strict=True):
            assert_sums(out[part], expected, magnitude, torch.float32, 0)
    del whole
    expected = [rope.rotate(q[part], inv_freq=freq, offset=part.start) for part in parts]
    for part, out in zip(parts, expected, strict=True):
        assert_close(out, rotate(q[part], inv_freq=freq, offset=part.start), 1)
    rope.rotate_(q, inv_freq=freq)
    same([q[part] for part in parts], expected)


# ---- the bits of the CPU ----


def bits(device, cases):
    """Yields results that have the same bits on CPU and CUDA: all but sums over a head, and angles in double."""
    for i, case in enumerate(cases):
        if case["dtype"] == torch.float64 and case["source"].kind == "inv_freq":
            continue
        torch.manual_seed(i)
        q, k, angles = make_qk(device, **case)
        yield from rope.rotate_qk(q, k, **angles, interleaved=case["interleaved"], attention_factor=1.2)
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(500), torch.randint(-(2**24), 2**24, (500,))]).to(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield from rope.cos_sin(positions, torch_rope.inv_freq(128, device=device), dtype=dtype, attention_factor=1.1)


def test_results_have_the_bits_of_the_cpu(device, tmp_path):
    cases = covering(CALLS, interacting=KERNELS, exhaustive=ALL_CALLS)[:: 3 if EMULATED and not EXHAUSTIVE else 1]
    if EMULATED:  # then this process has no CPU kernels
        file = tmp_path / "bits"
        file.write_bytes(pickle.dumps(cases))
        load = f"import pickle, test_cuda, torch; cases = pickle.loads(open({str(file)!r}, 'rb').read())"
        done = python(f"{load}; torch.save(list(test_cuda.bits('cpu', cases)), {str(file)!r})")
        assert done.returncode == 0, done.stderr
        expected = torch.load(file)
    else:
        expected = bits("cpu", cases)
    for actual, there in zip(bits(device, cases), expected, strict=True):
        assert torch.equal(actual.cpu(), there)


# ---- the loads and stores of a kernel ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_written_once_in_16_byte_stores(dtype, device, launched):
    """Loads have 16 bytes too, except those of frequencies. A rotation in place writes only the rotated channels."""
    per_head, freq = 2 * 10 * 128 * dtype.itemsize // 16, torch_rope.inv_freq(128)
    q, k, v = torch.randn(2, 10, 12, 128, device=device).to(dtype).split([8, 2, 2], 2)
    caches = [torch.zeros(2, 60, 2, 128, device=device, dtype=dtype) for _ in "kv"]
    weights, table = [torch.ones(128, device=device)] * 2, torch.rand(60, 68, device=device)[:, :64]
    norm = dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True))
    for angles, loads in ({"inv_freq": freq}, {8, 16}), ({"cos": table, "sin": table}, {16}):
        for heads, function, *tensors, options in (
            (10, rope.rotate_qk, q, k, {}),
            (10, rope.rotate_qk_, q, k, {}),
            (10, rope.norm_rotate_qk, q, k, *weights, {}),
            (12, rope.rotate_into_cache_, q, k, v, *caches, {}),
            (12, rope.rotate_into_cache_, q, k, v, *caches, norm),
        ):
            (launch,) = launched(function, *tensors, **angles, **options)
            assert launch["loads"].keys() <= loads and launch["stores"] == {16: heads * per_head}
    (launch,) = launched(rope.rotate_qk_, q, k, inv_freq=freq[:32])
    assert launch["stores"] == {16: 10 * per_head // 2}
    for more, width in (16 // dtype.itemsize, 16), (1, dtype.itemsize):  # the last chunk has only one vector
        x = torch.randn(2, 10, 3, 64 + more, device=device).to(dtype)
        (launch,) = launched(rope.rotate, x, inv_freq=freq[:32])
        assert launch["stores"] == {width: x.numel() * dtype.itemsize // width}


# dtypes of the caches of k and v (None: that of x), norm over all heads (None: no norm), whether v is normalised
INTO_CACHES = [
    (torch.int8, torch.float8_e5m2, None, False),
    (torch.float8_e4m3fn, None, False, True),
    (None, torch.int8, True, False),
    (None, None, True, True),
    (None, None, None, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_cache_is_written_once_in_whole_vectors(dtype, device, launched):
    """In one launch, whatever is normalised. A quantised cache takes in one store what 16 bytes of x become."""
    per_head, freq = 2 * 10 * 128 * dtype.itemsize // 16, torch_rope.inv_freq(128)
    q, k, v = torch.randn(2, 10, 12, 128, device=device).to(dtype).split([8, 2, 2], 2)
    scale = torch.ones(1, device=device)
    for *dtypes, over_heads, norm_v in INTO_CACHES:
        caches = [torch.zeros(2, 60, 2, 128, device=device, dtype=d or dtype) for d in dtypes]
        options = {f"{x}_scale": d and scale for x, d in zip("kv", dtypes, strict=True)} | {"norm_v": norm_v}
        if over_heads is not None:
            shapes = [(h, 128) if over_heads else (128,) for h in (8, 2)]
            options |= {f"{x}_norm_weight": torch.ones(s, device=device) for x, s in zip("qk", shapes, strict=True)}
        (launch,) = launched(rope.rotate_into_cache_, q, k, v, *caches, inv_freq=freq, **options)
        stores = Counter({16: 8 * per_head})
        for cache in caches:
            stores[16 * cache.itemsize // dtype.itemsize] += 2 * per_head
        assert launch["stores"] == stores
        assert launch["loads"].keys() <= {4, 8, 16}  # 4: scales; 8: frequencies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_tables_read_everything_once_in_16_byte_loads(dtype, device, launched):
    """The gradients and the tensors that were rotated are read once, and each row is written once."""
    (g, g_k), (q, k) = (torch.randn(2, 10, 10, 128, device=device).to(dtype).split([8, 2], 2) for _ in "gx")
    table, positions = torch.rand(20, 64, device=device), torch.randint(20, (2, 10), device=device)
    by_token = torch.rand(2, 10, 64, device=device)
    for cos, angles in ((table, {"offset": 3}), (table, {"positions": positions}), (by_token, {})):
        (launch,) = launched(rope._rotate_table_backward, g, g_k, q, k, cos, cos, **angles)
        loads = launch["loads"]
        assert loads.pop(16) == 2 * 2 * 10 * 10 * 128 * dtype.itemsize // 16
        assert loads.keys() == ({8} if "positions" in angles else set())  # the list of the tokens of each row
        assert launch["stores"] == {4: 2 * cos.numel()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backward_of_a_norm_is_two_launches_that_read_everything_once(dtype, device, launched):
    """The first writes the gradients of q and k, and a row of float64 sums for each thread block, which also reads the
    weights. The second adds up the rows."""
    (g, g_k), (q, k) = (torch.randn(2, 16, 10, 128, device=device).to(dtype).split([8, 2], 2) for _ in "gx")
    weights, freq = torch.rand(2, 128, device=device), torch_rope.inv_freq(128, device=device)
    parts, sums = launched(rope._norm_rotate_qk_backward, g, g_k, q, k, *weights, inv_freq=freq)
    rows, vectors, per_thread = parts["grid"][0], 2 * 16 * 10 * 128 * dtype.itemsize // 16, 32 // dtype.itemsize
    assert parts["loads"].keys() == {8, 16}  # 8: the frequencies
    assert parts["loads"][16] == 2 * vectors + rows * 128 * per_thread * 4 // 16
    assert parts["stores"] == {16: vectors, 8: rows * 128}
    assert sums["loads"] == {8: rows * 128} and sums["stores"] == {4: 2 * 128}


@pytest.mark.parametrize("heads", [8, 48])
def test_the_backward_of_a_norm_over_all_heads_is_two_launches(heads, device, launched):
    """The first reads everything twice. It keeps the sums in shared memory, unless there are too many."""
    tokens, dtype = 2 * 40, torch.bfloat16
    (g, g_k), (q, k) = (torch.randn(2, 40, heads + 2, 128, device=device).to(dtype).split([heads, 2], 2) for _ in "gx")
    weights = [torch.rand(h, 128, device=device) for h in (heads, 2)]
    freq = torch_rope.inv_freq(128, device=device)
    parts, sums = launched(rope._norm_rotate_qk_backward, g, g_k, q, k, *weights, inv_freq=freq)
    of_part = math.ceil(max(16, tokens * (heads + 2) / 384) / heads) * heads  # heads; 16: the teams
    rows = [math.ceil(tokens / math.ceil(of_part / h)) for h in (heads, 2)]
    channels = rows[0] * heads * 128 + rows[1] * 2 * 128  # of all parts
    assert parts["grid"] == (sum(rows), 1, 1)
    vectors = tokens * (heads + 2) * 128 * dtype.itemsize // 16
    in_memory = channels if heads == 8 else tokens * heads * 128 + rows[1] * 2 * 128
    assert parts["stores"] == {16: vectors, 8: in_memory}
    assert parts["loads"][16] == 2 * 2 * vectors + 2 * tokens * (heads + 2) * 128 * 4 // 16  # the last: weights
    assert sums["loads"] == {8: channels} and sums["stores"] == {4: (heads + 2) * 128}


def test_no_layout_changes_a_bit_of_the_gradients_of_tables(device):
    for dtype in (torch.float32, torch.bfloat16):
        g, x = (torch.randn(3, 70, 5, 64, device=device).to(dtype) for _ in "gx")
        table = torch.rand(70, 32, device=device)
        expected = rope._rotate_table_backward(g, None, x, None, table, table)
        for layout in LAYOUTS.values():
            g_there, x_there = (layout(t.shape, dtype, device).copy_(t) for t in (g, x))
            same(rope._rotate_table_backward(g_there, None, x, None, table, table), expected)
            same(rope._rotate_table_backward(g, None, x_there, None, table, table), expected)


# ---- streams, graphs and host threads: on a GPU ----


def calls(device):
    """Returns the input tensors, and a dict of functions by name that make a call with them and return its results."""
    rand = functools.partial(torch.rand, device=device)
    q, k, v = torch.randn(3, 7, 8, 64, device=device).bfloat16().split([4, 2, 2], 2)
    positions = torch.randint(0, 90, (3, 7), device=device)
    slots = torch.randperm(6 * 16, device=device)[:21].view(3, 7)
    freq = torch_rope.inv_freq(64, device=device)
    cos, sin = torch_rope.cos_sin(torch.arange(90, device=device), freq)
    caches = torch.zeros(2, 6, 16, 2, 64, device=device).bfloat16()
    inputs = {"q": q, "k": k, "v": v, "positions": positions, "slots": slots, "caches": caches}
    inputs |= {"a": rand(64), "b": rand(64), "heads a": rand(4, 64), "heads b": rand(2, 64), "scales": rand(2, 2)}
    tables, frequencies = {"cos": cos, "sin": sin}, {"inv_freq": freq}

    def call(op, names, source, in_place=False):
        def run(t):
            tensors = [t[name].clone() if in_place else t[name] for name in names.split(",")]
            out = op(*tensors, **source, positions=t["positions"])
            return tensors if in_place else list(out) if isinstance(out, tuple) else [out]

        return run

    def into_cache(norm="", quantised=False):
        def run(t):
            q, caches, more = t["q"].clone(), t["caches"].clone(), {}
            if norm:
                more = {f"{x}_norm_weight": t[name] for x, name in zip("qk", norm.split(","), strict=True)}
            if quantised:
                caches = torch.zeros_like(caches, dtype=torch.int8)
                more |= {"k_scale": t["scales"][0], "v_scale": t["scales"][1], "norm_v": True}
            of_tokens = {name: t[name] for name in ("positions", "slots")}
            rope.rotate_into_cache_(q, t["k"], t["v"], *caches, **frequencies, **of_tokens, **more)
            return [q, caches]

        return run

    return inputs, {
        "rotate": call(rope.rotate, "q", tables),
        "rotate inv_freq": call(rope.rotate, "q", frequencies),
        "rotate_qk": call(rope.rotate_qk, "q,k", tables),
        "rotate_": call(rope.rotate_, "q", tables, in_place=True),
        "rotate_qk_": call(rope.rotate_qk_, "q,k", tables, in_place=True),
        "norm": call(rope.norm_rotate_qk, "q,k,a,b", tables),
        "backward": call(rope._norm_rotate_qk_backward, "q,k,q,k,a,b", frequencies),
        "norm over heads": call(rope.norm_rotate_qk, "q,k,heads a,heads b", tables),
        "backward over heads": call(rope._norm_rotate_qk_backward, "q,k,q,k,heads a,heads b", frequencies),
        "cache": into_cache(),
        "cache, norm": into_cache("a,b"),
        "cache, quantised": into_cache(quantised=True),
        "cache, norm over heads": into_cache("heads a,heads b", quantised=True),
        "gradients of tables": call(rope._rotate_table_backward, "q,k,q,k", tables),
        "cos_sin": lambda t: list(rope.cos_sin(t["positions"], freq)),
        "axial_cos_sin": lambda t: list(rope.axial_cos_sin(t["positions"], freq.expand(3, -1))),
    }


OPS = list(calls("meta")[1])


def change(inputs):
    """Writes other values to the memory of the inputs."""
    for name, t in inputs.items():
        t.copy_(t.flip(0) if name in ("positions", "slots") else torch.randn_like(t))


@pytest.mark.parametrize("op", OPS)
def test_a_cuda_graph_replays_with_other_values(op, gpu):
    """So every launch is on the current stream, and the host never waits for the GPU: a graph captures neither."""
    inputs, functions = calls(gpu)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        functions[op](inputs)  # loads the kernels: a graph cannot capture their first run
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = functions[op](inputs)
    for _ in range(3):
        change(inputs)
        graph.replay()
        same(results, functions[op](inputs))


@pytest.mark.parametrize("op", OPS)
def test_a_call_runs_on_the_device_of_its_tensors(op, gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs, functions = calls("cuda:1")
    assert torch.cuda.current_device() == 0
    actual = functions[op](inputs)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        same(actual, functions[op](inputs))
    assert all(t.device == torch.device("cuda:1") for t in actual)


def test_two_host_threads_may_use_streams_of_their_own(gpu):
    failures = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs, functions = calls(gpu)
                expected = {op: function(inputs) for op, function in functions.items()}
                for _, (op, function) in itertools.product(range(50), functions.items()):
                    same(function(inputs), expected[op])
        except BaseException as error:  # noqa: B902
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_gradients_are_right_on_a_side_stream(gpu):
    """Autograd runs the backward on the stream of the forward."""
    q = torch.randn(2, 300, 4, 64, device=gpu, requires_grad=True)
    weight, freq = torch.rand(64, device=gpu, requires_grad=True), torch_rope.inv_freq(64, device=gpu)

    def step(wait):
        out = rope.norm_rotate_qk(q, q, weight, weight, inv_freq=freq)
        wait()
        return torch.autograd.grad(sum(t.square().sum() for t in out), (q, weight))

    expected = step(lambda: None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = step(functools.partial(torch.cuda._sleep, 50_000_000))
    stream.synchronize()
    same(actual, expected)


def test_a_head_of_2_31_channels_is_refused(device):
    x = torch.empty(1, 1, 0, 2**31 + 2, device=device)
    with pytest.raises(
        NotImplementedError, match="rope.rotate: head_dim is 2147483650 but must be at most 2147483647 on CUDA"
    ):
        torch.ops.rope.rotate(x, inv_freq=torch.ones(4, device=device))
