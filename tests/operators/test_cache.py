"""Tests that rotate_into_cache_ writes the right values to q and to the caches, and changes no other bit of memory.

The right values are those of the oracle, of plain loops, and of the kernels and functions of other projects.
"""

import functools
import itertools
import math
import random

import numpy as np
import pytest
import torch
from cases import (
    ALL_CALLS,
    CACHES,
    CALLS,
    EXHAUSTIVE,
    KERNELS,
    LAYOUTS,
    QUANTISED,
    SLOW,
    SOURCES,
    covering,
    each_number_of_threads,
    has_dtype,
    make_angles,
    many,
    misplace_pads,
    moved,
    name_of,
    on_gpu,
    rotated_channels,
    set_apart,
    some_slots,
    spread,
    supported,
)
from oracle import assert_close, limits, numpy_of, quantise, rotate, ulp

import torch_rope

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the integer dtype with this many bytes


def bits(t):
    """Returns the elements as integers, on the CPU, so that NaNs and zeros compare by their bits."""
    return t.cpu().view(INTEGER[t.element_size()])


def same(a, b):
    """Returns whether two tensors have the same bits."""
    return torch.equal(bits(a), bits(b))


def garbage(shape, dtype):
    """Returns a tensor of random bits, many of them NaNs, as a cache may hold before it is written."""
    words = torch.randint(-(2**63), 2**63 - 1, (math.prod(shape) * dtype.itemsize // 8 + 1,))
    t = words.view(dtype)[: math.prod(shape)]
    if dtype.itemsize > 1:
        t[::7] = float("nan")
    return t.view(shape)


class Caches:
    """The caches k and v in one of the layouts, in memory that is filled with garbage.

    layout: a key of CACHES, or a function like its values. v_shape: the heads and head_dim of the cache v, unless they
    are those of k. quantised: the dtypes of k and v, where None stands for `dtype`. memory: the tensors that k and v are
    views of.
    """

    def __init__(
        self, layout, blocks, block_size, heads, head_dim, dtype, device, v_shape=None, quantised=(None, None)
    ):
        self.layout = layout if callable(layout) else CACHES[layout]
        self.shape, self.v_shape = (blocks, block_size, heads, head_dim), v_shape
        self.dtypes = [d or dtype for d in quantised]
        self.memory = []

        def make(dtype, *shape):
            self.memory.append(garbage(shape, dtype).to(device))
            return self.memory[-1]

        self.k, self.v = self.views(*(functools.partial(make, dtype) for dtype in self.dtypes))

    def views(self, make_k, make_v):
        """Returns the caches k and v, in memory that make_k(*shape) and make_v(*shape) return."""
        k, v = self.layout(make_k, *self.shape)
        if self.v_shape is not None or self.dtypes[0] != self.dtypes[1]:
            v = self.layout(make_v, *self.shape[:2], *(self.v_shape or self.shape[2:]))[1]
        return k, v

    def cells(self, cache, slots):
        """Returns what a cache holds for each token, on the CPU: that of cell 0 for a token with a negative slot."""
        cache = bits(cache if cache.dim() == 4 else cache[None])
        slots = torch.from_numpy(np.where(slots < 0, 0, slots))
        return cache[slots // self.shape[1], slots % self.shape[1]]

    def after(self, slots, k, v, memory):
        """Returns what the memory must hold, on the CPU, after the tokens whose slot is not negative are written.

        slots: a numpy array [batch, seq]. memory: the bits of the memory before. A plain loop writes the tokens of k and
        v to it.
        """
        rest = iter(memory)
        caches = self.views(*[lambda *_: next(rest)] * 2)
        k_cache, v_cache = (t if t.dim() == 4 else t[None] for t in caches)
        k, v = (bits(t) if t.dim() == 4 else bits(t)[None] for t in (k, v))
        for b, s in np.ndindex(slots.shape):
            block, index = divmod(int(slots[b, s]), self.shape[1])
            if block >= 0:
                k_cache[block, index], v_cache[block, index] = k[b, s], v[b, s]
        return memory


def slots_of(q, slots, positions=None, offset=0, block_size=0):
    """Returns the slot of each token, [batch, seq]. Without slots, sequence b is written to block b, by position."""
    batch, seq = (1, *q.shape)[-4:-2]
    if slots is not None:
        return np.broadcast_to(slots.cpu().numpy(), (batch, seq))
    indices = np.arange(seq) if positions is None else positions.cpu().numpy()
    return np.broadcast_to(indices + offset, (batch, seq)) + np.arange(batch)[:, None] * block_size


def inside(angles, pads):
    """Returns the angles with position 0 for each pad whose position a table by position lacks, and which pads these are.

    pads: which tokens are pads, [batch, seq].
    """
    cos, positions = angles.get("cos"), angles.get("positions")
    if cos is None or cos.dim() > 2:
        return angles, np.zeros_like(pads)
    positions = np.arange(pads.shape[1]) if positions is None else positions.cpu().numpy()
    positions = np.broadcast_to(positions.astype(object) + angles.get("offset", 0), pads.shape)  # the sum is exact
    lost = pads & ((positions < 0) | (positions >= len(cos))).astype(bool)
    if not lost.any():
        return angles, lost
    positions = torch.tensor(np.where(lost, 0, positions).astype(np.int64), device=cos.device)
    return angles | {"positions": positions, "offset": 0}, lost


def numbers_for_cache(k, v, k_rotated, angles, norm, norm_v, eager_rounding, options):
    """Returns the numbers of k and v before they are rounded or quantised, and by how much each number may be off.

    They are numpy arrays in the arithmetic type. k_rotated: k rotated by the functional operator.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    kind = np.float64 if wide == torch.float64 else np.float32
    numbers_of_v = numpy_of(v, kind), 0
    if norm_v:
        value = numpy_of(v, np.longdouble)
        value = value / np.sqrt((value**2).sum(-1, keepdims=True) / max(v.shape[-1], 1) + norm.get("norm_eps", 1e-6))
        numbers_of_v = value, 6 * ulp(abs(value), wide)
    if eager_rounding:
        return (numpy_of(k_rotated, kind), 0), numbers_of_v
    if norm:  # the order of its sum differs between dtypes
        of_k = {"norm_weight": norm["k_norm_weight"], "norm_eps": norm["norm_eps"]}
        value, magnitude = rotate(k, **angles, **options, **of_k)
        ulps, plus = limits(wide, angles, norm=True)
        return (value, ulps * ulp(magnitude, wide) + plus * magnitude), numbers_of_v
    tables = {name: t.to(wide) for name, t in angles.items() if name in ("cos", "sin")}
    return (numpy_of(torch.ops.rope.rotate(k.to(wide), **angles | tables, **options), kind), 0), numbers_of_v


def assert_stored(cells, dtype, numbers, scale, first):
    """Asserts that the cells hold the numbers: rounded to dtype or, if there is a scale, quantised.

    cells: [tokens, heads, head_dim], as integers. numbers: (values, by how much each may be off). first: the dtype that
    they are rounded to first, or None.
    """
    values, error = numbers
    found = numpy_of(cells.view(dtype))
    bounds = []
    for bound in (values - error, values + error) if np.any(error) else (values,):
        if first or scale is None:
            bound = numpy_of(torch.from_numpy(bound.astype(np.float64)).to(first or dtype))
        if first and first != torch.float64:  # then it is divided in float32
            bound = bound.astype(np.float32)
        bounds.append(bound if scale is None else quantise(bound, scale.cpu().numpy(), dtype))
    low, high = bounds[0], bounds[-1]
    nan = np.isnan(low)
    assert np.array_equal(np.isnan(found), nan)
    assert ((low <= found) & (found <= high) | nan).all()
    if low is high:
        assert np.array_equal(np.signbit(found)[~nan], np.signbit(low)[~nan])


def check(q, k, v, caches, angles, slots=None, norm=None, of_cache=None, eager_rounding=False, **options):
    """Calls the operator and checks q, k, v, the caches and all memory around the caches.

    q and the cells that are written must have the bits that the functional operators return, and these must be close to
    the oracle. Cells of a quantised cache, and those of v after a norm, must hold what the oracle stores there. The
    rotated channels of q must be NaN for a pad whose position the table lacks. All other memory must be as before.

    norm: a dict of q_norm_weight, k_norm_weight and norm_eps, or None. of_cache: a dict of k_scale, v_scale and norm_v,
    or None.
    """
    norm, of_cache, given = norm or {}, of_cache or {}, angles
    q_before, k_before, v_before = q.clone(), k.clone(), v.clone()
    where = slots_of(q, slots, angles.get("positions"), angles.get("offset", 0), block_size=caches.shape[1])
    angles, lost = inside(angles, where < 0)
    functional = torch.ops.rope.norm_rotate_qk if norm else torch.ops.rope.rotate_qk
    q_rotated, k_rotated = functional(q, k, **norm, **angles, **options, eager_rounding=eager_rounding)
    memory = [bits(m).clone() for m in caches.memory]

    around = q.as_strided((q.untyped_storage().nbytes() // q.element_size(),), (1,), 0)  # all memory of q's storage
    around_before = around.clone()

    more = norm | of_cache | options | {"eager_rounding": eager_rounding}
    torch.ops.rope.rotate_into_cache_(q, k, v, caches.k, caches.v, **given, slots=slots, **more)
    rotary_dim = 2 * angles.get("inv_freq", angles.get("cos")).shape[-1]
    rotated = rotated_channels((rotary_dim,), angles)
    lost = torch.from_numpy(lost).view(q.shape[:-2])
    found, right = q.cpu().clone(), q_rotated.cpu()
    q.copy_(q_before)
    assert same(around, around_before)
    assert found[lost][..., rotated].isnan().all()
    found[..., rotated][lost] = right[..., rotated][lost]
    assert same(found, right)
    assert same(k, k_before) and same(v, v_before)

    norm_v, scales = of_cache.get("norm_v", False), [of_cache.get(name) for name in ("k_scale", "v_scale")]
    stored, written = [k_rotated, v], where.reshape(-1) >= 0
    for i, cache in enumerate((caches.k, caches.v)):
        normalised = norm_v and i == 1
        if (scales[i] is None and not normalised) or not written.any():
            continue
        cells = caches.cells(cache, where)
        numbers = numbers_for_cache(k, v, k_rotated, angles, norm, norm_v, eager_rounding, options)[i]
        numbers = [n.reshape(where.size, *cells.shape[2:])[written] if np.ndim(n) else n for n in numbers]
        first = q.dtype if normalised and eager_rounding else None
        assert_stored(cells.flatten(0, 1)[written], caches.dtypes[i], numbers, scales[i], first)
        stored[i] = cells.view(caches.dtypes[i]).view(stored[i].shape)
    assert all(map(same, caches.memory, caches.after(where, *stored, memory)))

    # The values of the functional operators are right.
    if eager_rounding:
        return
    near = limits(q.dtype, angles, options.get("attention_factor", 1.0), bool(norm))
    for x, out, weight in (q_before, q_rotated, "q_norm_weight"), (k_before, k_rotated, "k_norm_weight"):
        with_norm = {"norm_weight": norm[weight], "norm_eps": norm["norm_eps"]} if norm else {}
        assert_close(out, rotate(x, **angles, **options, **with_norm), *near)


# --- Layouts, sources, slots, norm ------------------------------------------------------------------------------------


def allowed(size, dims, source, cache, slots, **_):
    """Returns whether the operator takes these arguments together."""
    batch = size[0]
    if batch != 1 and (dims == 3 or slots.endswith("[S]") or (slots == "none" and "sequence" in cache)):
        return False
    return slots != "none" or not source.kind.startswith(("token", "head"))


FACTORS = CALLS | {
    "source": SOURCES[1::2] if SLOW else SOURCES,
    "dims": [4, 3],
    "q": ["qkv", *LAYOUTS],  # qkv: q, k and v are slices of one tensor
    "v": list(LAYOUTS),
    "v_shape": [None, None, (1, 201), (2, 200), (3, 16), (0, 8)],  # heads and head_dim; None: those of k
    "cache": list(CACHES),
    "slots": ["none", "int64 [S]", "strided int32 [S]", "int64 [B,S]", "strided int32 [B,S]", "[B,S] by column"],
    "weights": ["none", "dtype of x", "float32", "strided", "over heads"],
    "quantised": [(None, None), *itertools.product([None, *QUANTISED], QUANTISED), (torch.int8, None)][:: 1 + 2 * SLOW],
    "scales": ["one element", "no dimensions", "heads", "strided"],
    "norm_v": [False, True],
    "eager_rounding": [False, True],
    "attention_factor": [1.0, 1.2079441541679836],
}


def make_qkv(q_layout, k_layout, v_layout, batch, seq, q_heads, k_heads, head_dim, dtype, device, v_shape=None):
    """Returns q, k and v in these layouts. If q_layout is "qkv", they are slices of one tensor.

    v_shape: the heads and head_dim of v, unless they are those of k. v is then a tensor of its own.
    """

    def make(layout, heads, dim=head_dim):
        return LAYOUTS[layout](torch.Size((batch, seq, heads, dim)), dtype, device)

    if q_layout == "qkv":
        q, k, v = make("bshd", q_heads + 2 * k_heads).split([q_heads, k_heads, k_heads], 2)
    else:
        q, k, v = make(q_layout, q_heads), make(k_layout, k_heads), make(v_layout, k_heads)
    return q, k, v if v_shape is None else make(v_layout or "bshd", *v_shape)


def make_slots(kind, batch, seq, cells, device):
    """Returns random slots below `cells`. kind: one of FACTORS["slots"] that is not "none"."""
    dtype = torch.int32 if "int32" in kind else torch.int64
    slots = some_slots((seq,) if kind.endswith("[S]") else (batch, seq), cells, dtype, device)
    if "strided" in kind:
        steps, gaps = (3, 2), (1, 5)
        return moved(spread(slots.cpu(), steps[-slots.dim() :], gaps[-slots.dim() :]), device)
    return slots.mT.contiguous().mT if "column" in kind else slots


def make_norm(kind, head_dim, dtype, device, norm_eps=1e-6, heads=(1, 1)):
    """Returns the arguments of the norm, an empty dict if there is none.

    kind: "none", "dtype of x", "float32" (q_norm_weight is float32, k_norm_weight has the dtype of x), "strided", or
    "over heads": [heads, head_dim] for these heads of q and of k.
    """
    if kind == "none":
        return {}
    shapes = [(*[n] * (kind == "over heads"), head_dim) for n in heads]
    q, k = ((torch.rand(shape, dtype=torch.float64) * 2 - 0.5).to(dtype) for shape in shapes)
    if kind == "float32":
        q = q.float()
    if kind == "strided":
        q, k = spread(q, (2,), (1,)), spread(k, (3,), (2,))
    if kind == "over heads":
        k = spread(k, (1, 2), (1, 1))
    return {"q_norm_weight": moved(q, device), "k_norm_weight": moved(k, device), "norm_eps": norm_eps}


def make_scales(kind, dtypes, heads, device):
    """Returns the scales of the caches whose dtype is not None. kind: one of FACTORS["scales"]."""
    scales = {}
    for name, dtype, n, step in zip(("k_scale", "v_scale"), dtypes, heads, (2, 3), strict=True):
        if dtype is None:
            continue
        scale = torch.rand(n if kind in ("heads", "strided") else 1) + 0.5
        scale *= {torch.int8: 0.03, torch.float8_e4m3fn: 0.01, torch.float8_e5m2: 0.0001}[dtype]
        scale = spread(scale, (step,), (1,)) if kind == "strided" else scale
        scales[name] = scale.view(()).to(device) if kind == "no dimensions" else moved(scale, device)
    return scales


CASES = covering(FACTORS, allowed, interacting=[*KERNELS[1:], ("cache", "slots", "dims")], exhaustive=ALL_CALLS)


@pytest.mark.heart
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_rotate_into_cache_writes_what_the_functional_operators_return(case, device):
    size, source, dtype = case["size"], case["source"], case["dtype"]
    if not supported(device, dtype, source):
        pytest.skip("Apple GPUs have no float64")
    quantised = [d if has_dtype(device, d) else torch.int8 for d in case["quantised"]]
    batch, seq, q_heads, _, head_dim, _ = size
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    k_heads, angles = make_angles(size, source, table_dtype, device, case["start"])
    layouts, v_shape = (case["q"], case["k"], case["v"]), case["v_shape"]
    q, k, v = make_qkv(*layouts, batch, seq, q_heads, k_heads, head_dim, dtype, device, v_shape)
    if not case["norm_v"]:
        v.copy_(garbage(v.shape, dtype))
    if case["slots"] == "none":
        slots, blocks, block_size = None, batch + 2, seq + 40
        set_apart(angles, batch, block_size)
    else:
        block_size = 13 if "sequence" not in case["cache"] else batch * seq + 5
        blocks = batch * seq // block_size + 2 if "sequence" not in case["cache"] else 1
        slots = make_slots(case["slots"], batch, seq, blocks * block_size, device)
        misplace_pads(angles, slots)
    norm = make_norm(case["weights"], head_dim, dtype, device, heads=(q_heads, k_heads))
    caches = Caches(case["cache"], blocks, block_size, k_heads, head_dim, dtype, device, v_shape, quantised)
    of_cache = make_scales(case["scales"], quantised, (k_heads, v.shape[-2]), device) | {"norm_v": case["norm_v"]}
    if case["dims"] == 3:
        q, k, v = q[0], k[0], v[0]
    options = {name: case[name] for name in ("attention_factor", "interleaved", "eager_rounding")}
    check(q, k, v, caches, angles, slots, norm, of_cache, **options)


@pytest.mark.parametrize("start", range(0, 600 if EXHAUSTIVE else 60 if SLOW else 120, 10))
def test_any_call_writes_the_right_values_and_nothing_else(start, device):
    """A call may have any size, and nothing to do at all: no batch, no token, no head or no channel."""
    for seed in range(start, start + 10):
        draw, case = random.Random(seed), None
        while case is None or not allowed(**case) or not supported(device, case["dtype"], case["source"]):
            case = {name: draw.choice(values) for name, values in FACTORS.items()}
            pairs, rest = draw.choice([draw.randint(0, 3), draw.randint(0, 40)]), draw.randint(0, 9)
            case["size"] = *(draw.randint(0, most) for most in (3, 8, 3, 3)), 2 * pairs + rest, 2 * pairs
            case["v_shape"] = draw.choice([None, (draw.randint(0, 3), draw.randint(0, 200))])
        test_rotate_into_cache_writes_what_the_functional_operators_return(case, device)


# --- Quantised caches -------------------------------------------------------------------------------------------------


def quantised_by_torch(x, scale, dtype):
    """Returns what a quantised cache stores for x, as integers."""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    quotient = (x / scale).clamp(limits.min, limits.max)
    return bits((quotient if dtype.is_floating_point else quotient.nan_to_num(0.0).round()).to(dtype))


SCALES = [0.37, -2.5, 1.0, 2.0**-20, 1e30, 1e-30, 0.0, math.inf, math.nan, 1e-45]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_all_numbers_are_quantised_as_torch_quantises_them(stored, dtype, device):
    """All float16 and all bfloat16 numbers are, and many random float32 bits: with NaNs, infinities and subnormals.

    Heads are rotated by a zero angle, which changes no finite number, or not rotated, or they are those of v.
    """
    if not has_dtype(device, stored):
        pytest.skip("Metal has no float8")
    for i, scale in enumerate(SCALES[:2] if on_gpu(device) else SCALES):
        if dtype == torch.float32:
            n = (10000 if EXHAUSTIVE else 2000) if i == 0 and not on_gpu(device) else 64
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
            torch.ops.rope.rotate_into_cache_(x[:, :1].clone(), k, x, k_cache, v_cache, *angles, **options)
            for cache, given in (k_cache, k), (v_cache, x):
                found, expected = bits(cache), quantised_by_torch(given.cpu().float(), scale.cpu(), stored)
                if on_gpu(device):  # the sign of a NaN may be any
                    found, expected = (t.where(~t.view(stored).float().isnan(), 0) for t in (found, expected))
                if device == "mps":  # Metal may take subnormal numbers for zeros
                    found, expected = (t.where(given.cpu().float().abs() >= 2.0**-126, 0) for t in (found, expected))
                assert torch.equal(found, expected)


def test_numbers_of_float64_are_rounded_once(device):
    """A number that float32 would round to the middle of two float8 numbers is rounded to the nearer one."""
    if not supported(device, torch.float64):
        pytest.skip("Apple GPUs have no float64")
    middle = torch.tensor([1.0625, 1.1875, -17.0, 0.0009765625 * 1.5, -300.0, 447.0, 464.0], dtype=torch.float64)
    special = torch.tensor([1e300, -1e300, 1e-300, 0.0, -0.0], dtype=torch.float64)
    x = torch.cat([middle, middle * (1 + 1e-12), middle * (1 - 1e-12), special]).view(1, 1, -1)
    scale, angles = torch.tensor(0.5, device=device), torch.ones(1, 0, device=device).double()
    for dtype in QUANTISED:
        cache, given = torch.empty(x.shape, dtype=torch.int8, device=device).view(dtype), x.to(device)
        scales = {"k_scale": scale, "v_scale": scale}
        torch.ops.rope.rotate_into_cache_(given.clone(), given, given, cache, cache.clone(), angles, angles, **scales)
        expected = quantise(x.numpy(), np.float32([0.5]), dtype)
        assert np.array_equal(numpy_of(cache), expected)
        assert np.array_equal(np.signbit(numpy_of(cache)), np.signbit(expected))


# --- Other projects ---------------------------------------------------------------------------------------------------


def akunu(q, k, v, k_cache, v_cache, position, interleaved, divisors, freq_scale, weights, eps):
    """The kernels of akunu that write a cache, from its documentation: rope_batch_kv_write_f16, its variants for one token
    and for NeoX pairs, and head_norm_rope_neox_kv_write_f16. All arithmetic is float32.

    q, k and v are float16 arrays [tokens, heads, head_dim], and the caches are [heads, max_seq, head_dim].
    """
    half = q.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))

    def rotate_head(x, target, angle, weight):
        x = x.astype(np.float32)
        if weight is not None:
            x = x * (1 / np.sqrt((x**2).sum() / np.float32(2 * half) + np.float32(eps)) * weight.astype(np.float32))
        target[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
        target[second] = x[first] * np.sin(angle) + x[second] * np.cos(angle)

    for token, head in np.ndindex(q.shape[:2]):
        angle = np.float32(position + token) * np.float32(freq_scale) / divisors
        rotate_head(q[token, head], q[token, head], angle, weights[0])
        if head < k.shape[1]:
            rotate_head(k[token, head], k_cache[head, position + token], angle, weights[1])
            v_cache[head, position + token] = v[token, head]


@pytest.mark.parametrize("by", ["inv_freq", "table"])
@pytest.mark.parametrize("seq, position", [(1, 23), (6, 0), (5, 17)])
@pytest.mark.parametrize(
    "interleaved, theta, scale, stretch, size, eps",  # eps: None without a norm; stretch: of the longest wave length
    [(True, 1e4, 1.0, 1, 1, None), (False, 5e5, 0.25, 8, 1, None), (False, 1e6, 1.0, 1, 0.003, 1e-5)],
)
def test_rotate_into_cache_agrees_with_akunu(interleaved, theta, scale, stretch, size, eps, seq, position, by, device):
    divisors = (theta ** (np.arange(0, 32, 2) / 32) * np.linspace(1, stretch, 16)).astype(np.float32)
    heads = [(torch.randn(seq, n, 32) * size).half() for n in (4, 2, 2)]
    caches = [torch.randn(2, 24, 32).half() for _ in "kv"]
    weights = [None] * 2 if eps is None else [*(torch.rand(2, 32) + 0.5).half()]
    theirs = [t.numpy().copy() for t in (*heads, *caches)]
    akunu(*theirs, position, interleaved, divisors, scale, [w if w is None else w.numpy() for w in weights], eps)

    angles = {"inv_freq": (scale / torch.from_numpy(divisors)).to(device)}
    if by == "table":
        angles = dict(zip(("cos", "sin"), torch_rope.cos_sin(torch.arange(24, device=device), **angles), strict=True))
    if eps is not None:
        angles |= {"q_norm_weight": weights[0].to(device), "k_norm_weight": weights[1].to(device), "norm_eps": eps}
    ours = [t.to(device, copy=True) for t in (*heads, *caches)]
    head_major = (t.transpose(0, 1) for t in ours[3:])
    torch.ops.rope.rotate_into_cache_(*ours[:3], *head_major, **angles, offset=position, interleaved=interleaved)
    here = slice(position, position + seq)
    for x, other in (ours[0], theirs[0]), (ours[3][:, here], theirs[3][:, here]):
        wide = other.astype(np.float64)  # two nearly equal numbers round to the same float16 or to neighbouring ones
        pairs = wide.reshape(*x.shape[:-1], *((16, 2) if interleaved else (2, 16)))
        norm = np.linalg.norm(pairs, axis=-1 if interleaved else -2, keepdims=True)
        assert_close(x, (wide, np.broadcast_to(norm, pairs.shape).reshape(wide.shape)), 1)
    ours[3][:, here] = torch.from_numpy(theirs[3][:, here]).to(device)
    assert all(same(x, torch.from_numpy(other)) for x, other in zip(ours[1:], theirs[1:], strict=True))


# --- Corners ----------------------------------------------------------------------------------------------------------


def a_call(batch=2, seq=5, k_heads=2, blocks=4, block_size=8, dtype=torch.float32, device="cpu", layout="blocks"):
    """Returns the arguments of a small call: q, k, v, the caches, and a dict of the angles."""
    q, k, v = make_qkv("bshd", "bhsd", "packed", batch, seq, 4, k_heads, 32, dtype, device)
    caches = Caches(layout, blocks, block_size, k_heads, 32, dtype, device)
    return q, k, v, caches, {"inv_freq": torch_rope.inv_freq(24, device=device)}


@pytest.mark.parametrize("v_layout, dtype", [("bshd", torch.bfloat16), ("every second channel", torch.float32)])
@pytest.mark.parametrize("k_heads, head_dim, v_shape", [(0, 32, (3, 32)), (2, 32, (2, 72)), (1, 0, (1, 2060))])
def test_v_is_written_if_k_has_no_heads_no_channels_or_fewer(k_heads, head_dim, v_shape, v_layout, dtype, device):
    q, k, v = make_qkv("bshd", "bhsd", v_layout, 2, 5, 4, k_heads, head_dim, dtype, device, v_shape)
    caches = Caches("blocks", 3, 16, k_heads, head_dim, dtype, device, v_shape)
    angles = {"inv_freq": torch_rope.inv_freq(head_dim // 2, device=device)}
    check(q, k, v, caches, angles, some_slots((2, 5), 48, torch.int64, device), {})


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


@pytest.mark.parametrize("dtype, interleaved", [(torch.float32, False), (torch.bfloat16, True), (torch.half, False)])
@pytest.mark.parametrize("weights", ["none", "dtype of x"])
@pytest.mark.parametrize("slots, positions, offset", PADS)
def test_pads_write_nothing_and_may_be_at_any_position(slots, positions, offset, weights, dtype, interleaved, device):
    """A pad is a token with a negative slot. Its q is rotated if the table has a row for its position.

    Otherwise the rotated channels of its q become NaN, and the others are as usual.
    """
    slots, norm = torch.tensor(slots, device=device), make_norm(weights, 32, dtype, device)
    by_position = {"offset": offset} | ({} if positions is None else {"positions": torch.tensor(positions).to(device)})
    for blocks in (4, 0) if (slots < 0).all() else (4,):
        q, k, v, caches, angles = a_call(blocks=blocks, dtype=dtype, device=device)
        cos, sin = torch_rope.cos_sin(torch.arange(5, device=device), angles["inv_freq"])
        before = [m.clone() for m in caches.memory]
        tables = {"cos": cos[:4], "sin": sin[:4], **by_position}
        check(q.clone(), k, v, caches, tables, slots, norm, interleaved=interleaved)
        tables = {"cos": cos[None], "sin": sin[None]}  # by token: there are no positions
        check(q.clone(), k, v, caches, tables, slots, norm, interleaved=interleaved)
        assert all(map(same, caches.memory, before)) == (slots < 0).all()


@pytest.mark.parametrize("layout", CACHES)
def test_the_first_and_the_last_cell_are_written(layout, device):
    blocks, block_size = (1, 32) if "sequence" in layout else (4, 8)
    q, k, v, caches, angles = a_call(1, 2, blocks=blocks, block_size=block_size, device=device, layout=layout)
    check(q, k, v, caches, angles, torch.tensor([31, 0], device=device))
    # Without slots, the last token goes to the last cell of its sequence's block.
    batch = min(blocks, 2)
    q, k, v, caches, angles = a_call(batch, 2, blocks=batch, block_size=8, device=device, layout=layout)
    check(q, k, v, caches, angles | {"offset": 6})
    check(q, k, v, caches, angles | {"positions": torch.tensor([[7, 0]], device=device)})


@pytest.mark.usefixtures("_races_are_legal")
def test_one_of_two_tokens_with_equal_slots_is_kept(device):
    """A cell that two tokens have holds one of the two. On a GPU each channel holds one of the two."""
    q, k, v, caches, angles = a_call(1, 5, blocks=2, device=device)
    rotated = torch.ops.rope.rotate(k, **angles)
    slots = torch.tensor([3, 9, 3, 9, 4], device=device)
    torch.ops.rope.rotate_into_cache_(q, k, v, caches.k, caches.v, **angles, slots=slots)
    for cache, x in (caches.k, rotated), (caches.v, v):
        cells = cache.flatten(0, 1)
        for cell, tokens in (3, (0, 2)), (9, (1, 3)), (4, (4,)):
            won = torch.stack([cells[cell] == x[0, token] for token in tokens])
            assert won.any(0).all() if on_gpu(device) else won.all(-1).any(0).all()


@pytest.mark.parametrize("weights, with_slots", [("none", False), ("none", True), ("dtype of x", True)])
def test_k_and_v_are_only_read(weights, with_slots, device):
    """They may therefore be expanded, and they may be the same tensor. So may slots, positions and tables."""
    slots = torch.randperm(32, device=device)[:10].view(2, 5) if with_slots else None
    norm = make_norm(weights, 32, torch.float32, device)
    q, k, v, caches, angles = a_call(device=device)
    check(q, k, k, caches, angles, slots, norm)
    check(q, k[:, :, :1].expand_as(k), v[:1, :, :, :1].expand_as(v), caches, angles, slots, norm)
    cos, sin = (t.expand(5, 16) for t in torch.rand(2, 1, 16, device=device))
    angles = {"cos": cos, "sin": sin, "positions": torch.tensor([[3]], device=device).expand(2, 1)}
    check(q[:, :1], k[:, :1], v[:, :1], caches, angles, slots[:, :1] if with_slots else None)


@pytest.mark.parametrize(
    "layout, weights, dtype", [("heads sequence", "dtype of x", torch.float32), ("kv blocks", "none", torch.bfloat16)]
)
def test_a_large_prompt_gives_the_same_bits_in_pieces(layout, weights, dtype, device):
    """On the CPU the bits do not depend on the number of threads either."""
    seq, q_heads, k_heads, head_dim = many(3000, device), 8, 4, 128
    with_slots = layout == "kv blocks"
    blocks, block_size = (1, seq + 8) if not with_slots else (seq // 16 + 1, 16)
    packed = torch.randn(1, seq, q_heads + 2 * k_heads, head_dim).to(dtype).to(device)
    slots = some_slots((1, seq), blocks * block_size, torch.int32, device) if with_slots else None
    norm = make_norm(weights, head_dim, dtype, device)
    inv_freq = torch_rope.inv_freq(head_dim, device=device)
    caches = Caches(layout, blocks, block_size, k_heads, head_dim, dtype, device)
    before = [m.clone() for m in caches.memory]

    def run(ends):
        for memory, first in zip(caches.memory, before, strict=True):
            memory.copy_(first)
        qkv = packed.clone()
        for start, end in itertools.pairwise([0, *ends]):
            q, k, v = qkv[:, start:end].split([q_heads, k_heads, k_heads], 2)
            piece = {"offset": start, "slots": slots[:, start:end] if with_slots else None}
            torch.ops.rope.rotate_into_cache_(q, k, v, caches.k, caches.v, inv_freq=inv_freq, **piece, **norm)
        return [qkv, *(memory.clone() for memory in caches.memory)]

    whole = run([seq])
    pieces = run([*sorted(random.Random(0).sample(range(1, seq), 20)), seq])
    assert all(map(same, whole, pieces))
    if not on_gpu(device):
        for _ in each_number_of_threads():
            assert all(map(same, whole, run([seq])))


@pytest.mark.parametrize("layout", ["blocks", "blocks heads"])
def test_a_cache_may_have_more_than_2_31_elements(layout, untouched):
    shape = (3, 2**20, 8, 128) if layout == "blocks" else (3, 8, 2**20, 128)
    k_cache, v_cache = (untouched(math.prod(shape), torch.float16).view(shape) for _ in "kv")
    device = k_cache.device
    if layout == "blocks heads":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    q, k, v = (torch.randn(3, 1, heads, 128).half().to(device) for heads in (4, 8, 8))
    angles = {"inv_freq": torch_rope.inv_freq(128, device=device), "offset": 2**20 - 1}
    k_rotated = torch.ops.rope.rotate(k, **angles)
    torch.ops.rope.rotate_into_cache_(q, k, v, k_cache, v_cache, **angles)
    slots = torch.tensor([[3 * 2**20 - 2], [5], [2 * 2**20 + 7]], device=device)
    torch.ops.rope.rotate_into_cache_(q, k, v, k_cache, v_cache, **angles, slots=slots)
    for cache, x in (k_cache, k_rotated), (v_cache, v):
        for b in range(3):
            assert same(cache[b, -1], x[b, 0])
            block, index = divmod(slots[b].item(), 2**20)
            assert same(cache[block, index], x[b, 0])
