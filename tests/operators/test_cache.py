"""Tests that rotate_into_cache_ writes the right values to q or q_out and to the caches, and no other bit of memory."""

import itertools
import math
import random

import cases
import numpy as np
import pytest
import torch
from caches import bits, check, garbage, misplace_pads
from calls import (
    CACHE,
    CACHES,
    CELLS,
    DTYPES,
    LAYOUTS,
    QUANTISED,
    SCALES,
    SOURCES,
    Source,
    allowed,
    any_size,
    describe,
    factors,
    make,
)
from oracle import numpy_of, quantise

import torch_rope

rope = torch.ops.rope


# --- Layouts, sources, slots, norm ------------------------------------------------------------------------------------


FACTORS = factors("rotate_into_cache_") | {
    "size": cases.SIZES,
    "source": (SOURCES[1::2] if cases.SLOW else SOURCES) + CELLS,
    "quantised": CACHE["quantised"][:: 1 + 2 * cases.SLOW],
}
# (size, heads and head_dim of v): k has no heads, no channels, or fewer of them than v. A head of 258 channels is more than
# the threads of CUDA take at once.
OF_V = [((2, 5, 4, 0, 32, 16), (3, 32)), ((2, 5, 4, 2, 32, 16), (2, 72)), ((2, 5, 4, 1, 0, 0), (1, 2060))]
OF_V += [((2, 5, 2, 1, 258, 258), (2, 300))]
CASES = cases.covering(
    FACTORS, allowed, interacting=[*cases.KERNELS[1:], ("cache", "slots", "dims")], exhaustive=cases.ALL_CALLS
)
ALIKE = {"source": SOURCES[6], "slots": "int64 [B,S]", "dims": 4, "q_weight": None}
CASES += [
    case | ALIKE | {"size": size, "v_shape": v_shape} for case, (size, v_shape) in zip(CASES, OF_V * 2, strict=False)
]


@pytest.mark.core
@pytest.mark.parametrize("case", CASES, ids=cases.name_of)
def test_rotate_into_cache_writes_what_the_functional_operators_return(case, device):
    cases.need(device, case["dtype"], case["source"].freq_dtype)
    call = make("rotate_into_cache_", device, **case)
    if not case["norm_v"] and case["v"] in LAYOUTS:
        least = 2.0**-126 if device == "mps" and case["scales"] == "unusual" else 0  # Metal may take less for zeros
        numbers = garbage(call["v"].shape, case["dtype"])
        call["v"].copy_(numbers.masked_fill(numbers.abs() < least, 0))
    if "slots" in call:
        misplace_pads(call)
    check(call)


@pytest.mark.parametrize("start", range(0, 600 if cases.EXHAUSTIVE else 60 if cases.SLOW else 120, 10))
def test_any_call_writes_the_right_values_and_nothing_else(start, device):
    """A call may have any size, and nothing to do at all: no batch, no token, no head or no channel."""
    for seed in range(start, start + 10):
        pick = random.Random(seed)
        case = describe("rotate_into_cache_", pick, device, **any_size(pick))
        test_rotate_into_cache_writes_what_the_functional_operators_return(case, device)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["sequence", "vLLM's LBNHC", "vLLM's LBHNC", "vLLM's BLHNC"])
def test_a_step_of_vllm_or_sglang_is_written(layout, tables, stored, device):
    """Their tables are the halves of one tensor, and each of their scales is one number without dimensions."""
    cases.need(device, stored or torch.bfloat16)
    call = make(
        "rotate_into_cache_", device, size=(1, 9, 4, 2, 64, 48), source=Source("table", "int64 [S]"), dims=3, q="qkv",
        cache=layout, quantised=(stored, stored), scales="no dimensions", slots="int64 [S]", blocks=3, cells=16,
        dtype=torch.bfloat16, eager_rounding=tables == torch.bfloat16,
    )  # fmt: skip
    table = torch.cat([call["cos"], call["sin"]], -1).to(tables)
    check(call | {"cos": table[:, :24], "sin": table[:, 24:]})


# --- Quantised caches -------------------------------------------------------------------------------------------------


def quantised_by_torch(x, scale, dtype):
    """Returns what a quantised cache stores for x, as integers."""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    quotient = (x / scale).clamp(limits.min, limits.max)
    return bits((quotient if dtype.is_floating_point else quotient.nan_to_num(0.0).round()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_all_numbers_are_quantised_as_torch_quantises_them(stored, dtype, device):
    """All float16 and all bfloat16 numbers are, and many random float32 bits: with NaNs, infinities and subnormals.

    Only the sign of a NaN is another one: PyTorch keeps it, and we drop it, because the instructions of GPUs do. Heads
    are rotated by a zero angle, which changes no finite number, or not rotated, or they are those of v.
    """
    cases.need(device, stored)
    for i, scale in enumerate(SCALES[:2] if cases.on_gpu(device) else SCALES):
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


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_head_may_have_any_scale(dtype, stored, device):
    """A head has whole vectors and a rest of channels before the rotated ones, in both of their halves, and after them."""
    cases.need(device, stored)
    case = {name: values[0] for name, values in FACTORS.items()} | {"size": (2, 3, 6, 6, 216, 132), "cache": "blocks"}
    case |= {"start": "middle", "dtype": dtype, "q_out": "bshd", "scales": "unusual"}
    case |= {"q_dtype": stored, "quantised": (stored, stored)}
    norms = (
        {"q_weight": None},
        {"q_weight": "own", "norm_v": True},
        {"q_weight": "own", "over_heads": True, "norm_v": True},
    )
    for interleaved, norm in itertools.product((False, True), norms):
        options = norm | {"interleaved": interleaved}
        test_rotate_into_cache_writes_what_the_functional_operators_return(case | options, device)


def test_a_quotient_between_two_numbers_is_rounded_to_the_even_one(device):
    """x / scale is k + 0.5 without a rounding. The product of x and a rounded 1 / scale often is not."""
    scale, ties = torch.randint(2049, 4096, (64,), device=device) / 1024, torch.arange(-100, 100, device=device) + 0.5
    (q, k, k_cache), v = torch.zeros(3, 1, 1, 2, device=device), (ties * scale[:, None])[None]
    v_cache = torch.zeros_like(v, dtype=torch.int8)
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, inv_freq=torch.ones(1, device=device), v_scale=scale)
    assert torch.equal(v_cache[0], ties.round().to(torch.int8).expand(64, -1))


def test_numbers_of_float64_are_rounded_once(device):
    """A number that float32 would round to the middle of two float8 numbers is rounded to the nearer one."""
    cases.need(device, torch.float64)
    middle = torch.tensor([1.0625, 1.1875, -17.0, 0.0009765625 * 1.5, -300.0, 447.0, 464.0], dtype=torch.float64)
    special = torch.tensor([1e300, -1e300, 1e-300, 0.0, -0.0], dtype=torch.float64)
    x = torch.cat([middle, middle * (1 + 1e-12), middle * (1 - 1e-12), special]).view(1, 1, -1)
    scale, angles = torch.tensor(0.5, device=device), torch.ones(1, 0, device=device).double()
    for dtype in QUANTISED:
        cache, given = torch.empty(x.shape, dtype=torch.int8, device=device).view(dtype), x.to(device)
        scales = {"k_scale": scale, "v_scale": scale}
        rope.rotate_into_cache_(given.clone(), given, given, cache, cache.clone(), angles, angles, **scales)
        expected = quantise(x.numpy(), np.float32([0.5]), dtype)
        assert np.array_equal(numpy_of(cache), expected)
        assert np.array_equal(np.signbit(numpy_of(cache)), np.signbit(expected))


# --- Corners ----------------------------------------------------------------------------------------------------------


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
    "dtype, q_weight, interleaved",
    [(torch.float32, None, False), (torch.bfloat16, "own", True), (torch.half, None, True)],
)
@pytest.mark.parametrize("slots, positions, offset", PADS)
def test_pads_write_nothing_and_may_be_at_any_position(slots, positions, offset, dtype, q_weight, interleaved, device):
    """A pad is a token with a negative slot. Its q is rotated if the table has a row for its position.

    Otherwise the rotated channels of its q become NaN, and the others are as usual.
    """
    description = {"size": (2, 5, 4, 2, 32, 24), "dtype": dtype, "q_weight": q_weight, "interleaved": interleaved}
    given = {"slots": torch.tensor(slots, device=device), "offset": offset}
    given |= {} if positions is None else {"positions": torch.tensor(positions, device=device)}
    for blocks in (4, 0) if (given["slots"] < 0).all() else (4,):
        check(make("rotate_into_cache_", device, **description, rows=4, blocks=blocks, cells=10) | given)
    by_token = make("rotate_into_cache_", device, **description, source=Source("token shared"), blocks=4, cells=10)
    check(by_token | {"slots": given["slots"]})


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
    "cache, q_weight, slots, dtype",
    [("heads sequence", "own", "none", torch.float32), ("kv blocks", None, "strided int32 [B,S]", torch.bfloat16)],
)
def test_a_large_prompt_has_the_same_bits_with_any_number_of_threads(cache, q_weight, slots, dtype, device):
    description = {"size": (1, cases.many(300, device), 8, 4, 128, 96), "source": SOURCES[5], "q": "qkv"}
    for _ in cases.thread_counts():
        of_cache = {"cache": cache, "slots": slots, "q_weight": q_weight}
        check(make("rotate_into_cache_", device, **description, **of_cache, dtype=dtype))


@pytest.mark.parametrize("layout", ["blocks", "blocks heads"])
def test_a_cache_may_have_more_than_2_31_elements(layout, untouched):
    k_cache, v_cache = CACHES[layout](
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
