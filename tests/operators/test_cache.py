"""Tests that rotate_into_cache_ writes the right values to q or q_out and to the caches, and no other bit of memory."""

import itertools
import math
import random

import cases
import numpy as np
import pytest
import torch
from caches import Caches, bits, check, garbage, make_norm, positions_of
from oracle import numpy_of, quantise

import torch_rope

rope = torch.ops.rope


# --- Layouts, sources, slots, norm ------------------------------------------------------------------------------------


def allowed(size, dims, source, cache, slots, weights, norm_v, eager_rounding, q_out, q_dtype, **_):
    """Returns whether the operator takes these arguments together."""
    batch = size[0]
    if q_out in (None, "q") and q_dtype is not None:
        return False
    if batch != 1 and (dims == 3 or slots.endswith("[S]") or (slots == "none" and "sequence" in cache)):
        return False
    if eager_rounding and (norm_v or weights != "none"):
        return False
    return slots == "none" or source not in cases.CELLS


FACTORS = cases.CALLS | {
    "source": (cases.SOURCES[1::2] if cases.SLOW else cases.SOURCES) + cases.CELLS,
    "dims": [4, 3],
    # qkv: q, k and v are slices of one tensor. k and v are only read, so they may be expanded, and v may be k.
    "q": ["qkv", *cases.LAYOUTS],
    "k": [*cases.LAYOUTS, "expanded"],
    "v": [*cases.LAYOUTS, "expanded", "k"],
    "v_shape": [None, None, (1, 201), (2, 200), (3, 16), (0, 8)],  # heads and head_dim; None: those of k
    "cache": list(cases.CACHES),
    "slots": ["none", "int64 [S]", "strided int32 [S]", "int64 [B,S]", "strided int32 [B,S]", "[B,S] by column"],
    "weights": ["none", "dtype of x", "float32", "strided", "over heads"],
    "quantised": [(None, None), *itertools.product([None, *cases.QUANTISED], cases.QUANTISED), (torch.int8, None)][
        :: 1 + 2 * cases.SLOW
    ],
    "q_out": [None, "q", *cases.LAYOUTS],
    "q_dtype": [None, *cases.QUANTISED],  # None: that of q
    "scales": ["one element", "no dimensions", "heads", "strided", "unusual"],  # unusual: of heads, any of SCALES
    "norm_v": [False, True],
    "eager_rounding": [False, True],
    "attention_factor": [1.0, 1.2079441541679836],
}


def make_qkv(case, k_heads, device):
    """Returns q, k and v of a case."""
    (batch, seq, q_heads, _, head_dim, _), dtype, v_shape = case["size"], case["dtype"], case["v_shape"]

    def make(layout, heads, dim=head_dim):
        if layout == "expanded":
            return cases.LAYOUTS["bshd"](torch.Size((batch, seq, 1, dim)), dtype, device).expand(-1, -1, heads, -1)
        return cases.LAYOUTS[layout](torch.Size((batch, seq, heads, dim)), dtype, device)

    if case["q"] == "qkv":
        q, k, v = make("bshd", q_heads + 2 * k_heads).split([q_heads, k_heads, k_heads], 2)
    else:
        q, k = make(case["q"], q_heads), make(case["k"], k_heads)
        v = k if case["v"] == "k" else make(case["v"], k_heads)
    return q, k, v if v_shape is None else make(case["v"] if case["v"] in cases.LAYOUTS else "expanded", *v_shape)


def make_slots(kind, batch, seq, cells, device):
    """Returns random slots below `cells`, with the first and the last. kind: of FACTORS["slots"], and not "none"."""
    dtype = torch.int32 if "int32" in kind else torch.int64
    slots = cases.some_slots((seq,) if kind.endswith("[S]") else (batch, seq), cells, dtype, device)
    if (slots >= 0).any():
        slots[slots == slots[slots >= 0].min()] = 0
        slots[slots == slots.max()] = cells - 1
    if "strided" in kind:
        steps, gaps = (3, 2), (1, 5)
        return cases.moved(cases.spread(slots.cpu(), steps[-slots.dim() :], gaps[-slots.dim() :]), device)
    return slots.mT.contiguous().mT if "column" in kind else slots


def make_scales(kind, dtypes, heads, device):
    """Returns the scales of q, k and v, of those whose dtype is not None. kind: one of FACTORS["scales"]."""
    scales = {}
    for name, dtype, n, step in zip(("q_scale", "k_scale", "v_scale"), dtypes, heads, (4, 2, 3), strict=True):
        if dtype is None:
            continue
        scale = torch.rand(1 if kind in ("one element", "no dimensions") else n) + 0.5
        scale *= {torch.int8: 0.03, torch.float8_e4m3fn: 0.01, torch.float8_e5m2: 0.0001}[dtype]
        scale *= torch.tensor(cases.SCALES)[torch.randint(len(cases.SCALES), scale.shape)] if kind == "unusual" else 1
        scale = cases.spread(scale, (step,), (1,)) if kind == "strided" else scale
        scales[name] = scale.view(()).to(device) if kind == "no dimensions" else cases.moved(scale, device)
    return scales


CASES = cases.covering(
    FACTORS, allowed, interacting=[*cases.KERNELS[1:], ("cache", "slots", "dims")], exhaustive=cases.ALL_CALLS
)
# (size, heads and head_dim of v): k has no heads, no channels, or fewer of them than v. A head of 258 channels is more than
# the threads of CUDA take at once.
OF_V = [((2, 5, 4, 0, 32, 16), (3, 32)), ((2, 5, 4, 2, 32, 16), (2, 72)), ((2, 5, 4, 1, 0, 0), (1, 2060))]
OF_V += [((2, 5, 2, 1, 258, 258), (2, 300))]
CASES += [
    case
    | {
        "size": size,
        "source": cases.SOURCES[8],
        "v_shape": v_shape,
        "slots": "int64 [B,S]",
        "dims": 4,
        "weights": "none",
    }
    for case, (size, v_shape) in zip(CASES, OF_V * 2, strict=False)
]


@pytest.mark.core
@pytest.mark.parametrize("case", CASES, ids=cases.name_of)
def test_rotate_into_cache_writes_what_the_functional_operators_return(case, device):
    size, source, dtype = case["size"], case["source"], case["dtype"]
    cases.need(device, dtype, source.freq_dtype)
    quantised = [d if cases.supported(device, d) else torch.int8 for d in (case["q_dtype"], *case["quantised"])]
    batch, seq, q_heads, _, head_dim, _ = size
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    k_heads, angles = cases.make_angles(size, source, table_dtype, device, case["start"])
    q, k, v = make_qkv(case, k_heads, device)
    if not case["norm_v"] and case["v"] in cases.LAYOUTS:
        least = 2.0**-126 if device == "mps" and case["scales"] == "unusual" else 0  # Metal may take less for zeros
        v.copy_((numbers := garbage(v.shape, dtype)).masked_fill(numbers.abs() < least, 0))
    if case["slots"] == "none":
        cases.set_apart(angles, batch, seq + 40)
        slots, blocks = None, batch + 2
        block_size = max(positions_of(q, **angles).flatten(), default=0) + 1  # so the last cell of a block is written
    else:
        block_size = 13 if "sequence" not in case["cache"] else batch * seq + 5
        blocks = batch * seq // block_size + 2 if "sequence" not in case["cache"] else 1
        slots = make_slots(case["slots"], batch, seq, blocks * block_size, device)
        cases.misplace_pads(angles, slots)
    norm = make_norm(case["weights"], head_dim, dtype, device, heads=(q_heads, k_heads))
    caches = Caches(case["cache"], blocks, block_size, *k.shape[2:], dtype, device, case["v_shape"], quantised[1:])
    results = make_scales(case["scales"], quantised, (q_heads, k_heads, v.shape[-2]), device)
    results["norm_v"] = case["norm_v"]
    q_out = cases.LAYOUTS.get(case["q_out"], lambda *_: q)(q.shape, quantised[0] or dtype, device)
    if case["dims"] == 3:
        q, k, v, q_out = q[0], k[0], v[0], q_out[0]
    if case["q_out"]:
        results["q_out"] = q if case["q_out"] == "q" else q_out
    options = {name: case[name] for name in ("attention_factor", "interleaved", "eager_rounding")}
    check(q, k, v, caches, angles, slots, norm, results, **options)


@pytest.mark.parametrize("start", range(0, 600 if cases.EXHAUSTIVE else 60 if cases.SLOW else 120, 10))
def test_any_call_writes_the_right_values_and_nothing_else(start, device):
    """A call may have any size, and nothing to do at all: no batch, no token, no head or no channel."""
    for seed in range(start, start + 10):
        draw, case = random.Random(seed), None
        while (
            case is None or not allowed(**case) or not cases.supported(device, case["dtype"], case["source"].freq_dtype)
        ):
            case = {name: draw.choice(values) for name, values in FACTORS.items()}
            pairs, rest = draw.choice([draw.randint(0, 3), draw.randint(0, 40)]), draw.randint(0, 9)
            case["size"] = *(draw.randint(0, most) for most in (3, 8, 3, 3)), 2 * pairs + rest, 2 * pairs
            case["v_shape"] = draw.choice([None, (draw.randint(0, 3), draw.randint(0, 200))])
        test_rotate_into_cache_writes_what_the_functional_operators_return(case, device)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["sequence", "vLLM's LBNHC", "vLLM's LBHNC", "vLLM's BLHNC"])
def test_a_step_of_vllm_or_sglang_is_written(layout, tables, stored, device):
    """Their tables are the halves of one tensor, and each of their scales is one number without dimensions."""
    cases.need(device, stored or torch.bfloat16)
    q, k, v = torch.randn(9, 8, 64).bfloat16().to(device).split([4, 2, 2], 1)
    caches = Caches(layout, 3, 16, 2, 64, torch.bfloat16, device, quantised=(stored, stored))
    table = torch.cat(torch_rope.cos_sin(torch.arange(40), torch_rope.inv_freq(48)), -1).to(device, tables)
    angles = {"cos": table[:, :24], "sin": table[:, 24:], "positions": torch.randint(40, (9,)).to(device)}
    slots = cases.some_slots((9,), caches.k[..., 0, 0].numel(), torch.int64, device)
    scales = make_scales("no dimensions", (None, stored, stored), [1] * 3, device)
    check(q, k, v, caches, angles, slots, None, scales, eager_rounding=tables == torch.bfloat16)


# --- Quantised caches -------------------------------------------------------------------------------------------------


def quantised_by_torch(x, scale, dtype):
    """Returns what a quantised cache stores for x, as integers."""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    quotient = (x / scale).clamp(limits.min, limits.max)
    return bits((quotient if dtype.is_floating_point else quotient.nan_to_num(0.0).round()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", cases.QUANTISED, ids=str)
def test_all_numbers_are_quantised_as_torch_quantises_them(stored, dtype, device):
    """All float16 and all bfloat16 numbers are, and many random float32 bits: with NaNs, infinities and subnormals.

    Only the sign of a NaN is another one: PyTorch keeps it, and we drop it, because the instructions of GPUs do. Heads
    are rotated by a zero angle, which changes no finite number, or not rotated, or they are those of v.
    """
    cases.need(device, stored)
    for i, scale in enumerate(cases.SCALES[:2] if cases.on_gpu(device) else cases.SCALES):
        if dtype == torch.float32:
            n = (10000 if cases.EXHAUSTIVE else 2000) if i == 0 and not cases.on_gpu(device) else 64
            x = torch.randint(-(2**31), 2**31 - 1, (n, 8, 128)).to(torch.int32).view(torch.float32)
        else:
            x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(64, 8, 128)
        finite = x.nan_to_num(0.0, 0.0, 0.0) + 0.0  # the rotation may change the sign of a zero
        x, finite, scale = (t.to(device) for t in (x, finite, torch.tensor(scale)))
        scales = {"k_scale": scale, "v_scale": scale.view(1)}
        for pairs, k in (64 if i % 2 else 13, finite), (0, x):
            k_cache, v_cache = (torch.empty(x.shape, dtype=torch.int8, device=device).view(stored) for _ in "kv")
            angles = torch.ones(len(x), pairs, device=device), torch.zeros(len(x), pairs, device=device)
            options = scales | {"interleaved": i % 4 > 1}
            rope.rotate_into_cache_(x[:, :1].clone(), k, x, k_cache, v_cache, *angles, **options)
            for cache, given in (k_cache, k), (v_cache, x):
                found, expected = bits(cache), quantised_by_torch(given.cpu().float(), scale.cpu(), stored)
                expected = expected.where(~expected.view(stored).float().isnan(), expected & 0x7F)
                if cases.on_gpu(device):  # so may be the bits of its mantissa
                    found, expected = (t.where(~t.view(stored).float().isnan(), 0) for t in (found, expected))
                if device == "mps":  # Metal may take subnormal numbers for zeros
                    found, expected = (t.where(given.cpu().float().abs() >= 2.0**-126, 0) for t in (found, expected))
                assert torch.equal(found, expected)


@pytest.mark.parametrize("stored", cases.QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_each_head_may_have_any_scale(dtype, stored, device):
    """A head has whole vectors and a rest of channels before the rotated ones, in both of their halves, and after them."""
    cases.need(device, stored)
    case = {name: values[0] for name, values in FACTORS.items()} | {"size": (2, 3, 6, 6, 216, 132), "cache": "blocks"}
    case |= {"start": "middle", "dtype": dtype, "q_out": "bshd", "scales": "unusual"}
    case |= {"q_dtype": stored, "quantised": (stored, stored)}
    for interleaved, weights in itertools.product((False, True), ("none", "dtype of x", "over heads")):
        options = {"interleaved": interleaved, "weights": weights, "norm_v": weights != "none"}
        test_rotate_into_cache_writes_what_the_functional_operators_return(case | options, device)


def test_numbers_of_float64_are_rounded_once(device):
    """A number that float32 would round to the middle of two float8 numbers is rounded to the nearer one."""
    cases.need(device, torch.float64)
    middle = torch.tensor([1.0625, 1.1875, -17.0, 0.0009765625 * 1.5, -300.0, 447.0, 464.0], dtype=torch.float64)
    special = torch.tensor([1e300, -1e300, 1e-300, 0.0, -0.0], dtype=torch.float64)
    x = torch.cat([middle, middle * (1 + 1e-12), middle * (1 - 1e-12), special]).view(1, 1, -1)
    scale, angles = torch.tensor(0.5, device=device), torch.ones(1, 0, device=device).double()
    for dtype in cases.QUANTISED:
        cache, given = torch.empty(x.shape, dtype=torch.int8, device=device).view(dtype), x.to(device)
        scales = {"k_scale": scale, "v_scale": scale}
        rope.rotate_into_cache_(given.clone(), given, given, cache, cache.clone(), angles, angles, **scales)
        expected = quantise(x.numpy(), np.float32([0.5]), dtype)
        assert np.array_equal(numpy_of(cache), expected)
        assert np.array_equal(np.signbit(numpy_of(cache)), np.signbit(expected))


# --- Corners ----------------------------------------------------------------------------------------------------------


def a_call(batch=2, seq=5, blocks=4, dtype=torch.float32, device="cpu", layout="blocks", heads=(4, 2), head_dim=32):
    """Returns the arguments of a call: q, k, v, the caches, and a dict of the angles."""
    q, k, v = torch.randn(batch, seq, sum(heads) + heads[1], head_dim).to(dtype).to(device).split([*heads, heads[1]], 2)
    caches = Caches(layout, blocks, max(8, seq * batch), heads[1], head_dim, dtype, device)
    return q, k, v, caches, {"inv_freq": torch_rope.inv_freq(head_dim * 3 // 4, device=device)}


MOST, LEAST = 2**63 - 1, -(2**63)
# Calls with pads: slots, positions, offset. A table by position has the rows 0 to 3.
PADS = [
    ([[3, -1, -2, 0, LEAST], [-17, 7, -(2**31), -1, 8]], [[3, 4, -1, 2, MOST], [LEAST, 0, 2**32, 1, 3]], 0),
    ([[3, -1, -2, 0, LEAST], [-17, 7, -(2**31), -1, 8]], [[3, 6, 1, 5, MOST], [LEAST, 4, 2**32, 3, 2]], -2),
    ([[3, 1, -1, -1, -1], [17, -1, -1, -1, -1]], None, 2),
    ([[-1] * 5] * 2, [MOST, LEAST, MOST - 2, 0, 3], MOST),
    ([[-1] * 5] * 2, [LEAST, MOST, -1, 0, 3], LEAST),  # the sum of the first wraps around to 0
    ([[-1] * 5] * 2, None, MOST - 2),
]


@pytest.mark.parametrize(
    "dtype, weights, interleaved",
    [(torch.float32, "none", False), (torch.bfloat16, "dtype of x", True), (torch.half, "none", True)],
)
@pytest.mark.parametrize("slots, positions, offset", PADS)
def test_pads_write_nothing_and_may_be_at_any_position(slots, positions, offset, dtype, weights, interleaved, device):
    """A pad is a token with a negative slot. Its q is rotated if the table has a row for its position.

    Otherwise the rotated channels of its q become NaN, and the others are as usual.
    """
    slots, norm = torch.tensor(slots, device=device), make_norm(weights, 32, dtype, device)
    by_position = {"offset": offset} | ({} if positions is None else {"positions": torch.tensor(positions).to(device)})
    for blocks in (4, 0) if (slots < 0).all() else (4,):
        q, k, v, caches, angles = a_call(blocks=blocks, dtype=dtype, device=device)
        cos, sin = torch_rope.cos_sin(torch.arange(5, device=device), angles["inv_freq"])
        tables = {"cos": cos[:4], "sin": sin[:4], **by_position}
        check(q.clone(), k, v, caches, tables, slots, norm, interleaved=interleaved)
        check(q, k, v, caches, {"cos": cos[None], "sin": sin[None]}, slots, norm, interleaved=interleaved)


@pytest.mark.cpu
@pytest.mark.parametrize("step", [1, 3, 2**20, 2**48 + 2**16])
def test_two_tokens_with_one_cell_are_found_at_any_distance_of_cells(step):
    k, cache = torch.zeros(3, 700, 0, 2), torch.zeros(2**40, 2**20, 0, 2)  # without heads, a cache may have any size
    slots = (torch.randperm(2100) * step).view(3, 700)
    call = [torch.zeros(3, 700, 1, 2), k, k, cache, cache.clone(), None, None, torch.ones(1), None, 0, slots]
    rope.rotate_into_cache_(*call)
    slots[2, 5] = slots[1, 20]
    with pytest.raises(IndexError, match=f"{slots[2, 5]} for token 20 of sequence 1 and for token 5 of sequence 2 but"):
        rope.rotate_into_cache_(*call)


@pytest.mark.parametrize(
    "layout, weights, dtype", [("heads sequence", "dtype of x", torch.float32), ("kv blocks", "none", torch.bfloat16)]
)
def test_a_large_prompt_has_the_same_bits_with_any_number_of_threads(layout, weights, dtype, device):
    seq, head_dim = cases.many(300, device), 128
    norm = make_norm(weights, head_dim, dtype, device)
    slots = cases.some_slots((1, seq), seq, torch.int32, device) if layout == "kv blocks" else None
    for _ in cases.thread_counts():
        check(*a_call(1, seq, 1, dtype, device, layout, (8, 4), head_dim), slots, norm)


@pytest.mark.parametrize("layout", ["blocks", "blocks heads"])
def test_a_cache_may_have_more_than_2_31_elements(layout, untouched):
    k_cache, v_cache = cases.CACHES[layout](
        lambda *shape: untouched(math.prod(shape), torch.half).view(shape), 3, 2**20, 8, 128
    )
    device = k_cache.device
    q, k, v = (torch.randn(3, 1, heads, 128).half().to(device) for heads in (4, 8, 8))
    angles = {"inv_freq": torch_rope.inv_freq(128, device=device), "offset": 2**20 - 1}
    k_rotated = rope.rotate(k, **angles)
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, **angles)
    slots = torch.tensor([[3 * 2**20 - 2], [5], [2 * 2**20 + 7]], device=device)
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, **angles, slots=slots)
    for cache, x in (k_cache, k_rotated), (v_cache, v):
        for b in range(3):
            assert torch.equal(cache[b, -1], x[b, 0])
            block, index = divmod(slots[b].item(), 2**20)
            assert torch.equal(cache[block, index], x[b, 0])
