"""Tests of the launch plans of csrc/cuda/plan.h: the width of accesses and of element offsets, and the grid, which follow
from sizes, strides and addresses alone. The loops that the kernels run over a plan are repeated here in Python."""

import itertools
import math
import random
import shutil
import sys

import pytest
import torch
from cases import DTYPES, LAYOUTS, ROOT

sys.path.insert(0, str(ROOT))
from benchmarks.plan import module  # noqa: E402

ORDER = [torch.float16, torch.bfloat16, torch.float32, torch.float64]  # the order of DType in csrc/args.h
H200 = 132  # multiprocessors
THREADS, WARP, MOST_Z, MOST_GRID = 128, 32, 64, 65535
MOST_PARTS = 1024  # of the backward of the norm

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="plan.h is compiled by g++")


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    return module()


# ---- calls with tensors that have no memory ----


def meta(*shape, dtype=torch.float32, layout="bshd", start=0):
    """Returns a tensor [batch, seq, heads, head_dim] without memory, `start` elements after an aligned address."""
    t = LAYOUTS[layout](torch.Size(shape), dtype, "meta")
    return t.as_strided(t.shape, t.stride(), t.storage_offset() + start)


def arguments(
    q, k=None, v=None, outputs=None, *, in_place=False, rotary_dim=None, rotary_start=0, positions=None, slots=None,
    tables=None, by_token=False, inv_freq=None, norm=False, rounding=0, over_heads=False, norm_v=False,
    quantised=(False, False),
):  # fmt: skip
    """Returns the arguments of the plan functions for a call. outputs: the results, which have the strides of the inputs if
    not given; with a v they are the two caches, and q is in place. Tables of four dimensions are by head. over_heads: of the norm.
    quantised: the caches of k and v are."""
    addresses = itertools.count(2**40, 2**36)  # multiples of 16

    def given(t, address, dims):
        if t is None:
            return None
        return address + t.storage_offset() * t.itemsize, [0] * (dims - t.dim()) + list(t.stride())

    def shared_by_heads(t):
        return t if t is None or t.dim() == 4 else t.unsqueeze(-2).expand(*t.shape[:-1], 2, -1)

    inputs = [q, k, v]
    outputs = [*([q, *outputs] if v is not None else outputs or inputs), None][:3]
    sides = []
    for x, out, stays in zip(inputs, outputs, [in_place or v is not None, in_place, False], strict=True):
        address = next(addresses)
        sides.append((given(x, address, 4), given(out, address if stays else next(addresses), 4)))
    return (
        ORDER.index(q.dtype),
        (
            *(q.shape[0], q.shape[1], q.shape[3], q.shape[3] if rotary_dim is None else rotary_dim, rotary_start),
            0 if v is None else v.shape[3],
        ),
        [0 if t is None else t.shape[2] for t in inputs],
        sides,
        (0, 0) if v is None else outputs[1].shape[:2],
        given(positions, next(addresses), 2),
        given(slots, next(addresses), 2),
        *(given(shared_by_heads(t), next(addresses), 4) for t in tables or (None, None)),
        2 if tables is None else 3 if tables[0].dim() == 4 else int(by_token),
        0 if tables is None else tables[0].shape[-2],
        1 if inv_freq is None else inv_freq.stride(0),
        sum(bit << i for i, bit in enumerate((norm, over_heads, norm_v, *quantised))),
        rounding,
    )


@pytest.fixture
def plan(library):
    return lambda *tensors, processors=H200, **options: library.plan(processors, *arguments(*tensors, **options))


@pytest.fixture
def plan_backward(library):
    """Plans the backward of the norm. x: the tensors that were normalised, which are like their gradients if not given."""

    def plan(*tensors, x=None, **options):
        of_x = [given for given, _ in arguments(*(x or tensors))[3][:2]]
        return library.plan_backward(of_x, *arguments(*tensors, **options, norm=True))

    return plan


@pytest.fixture
def plan_tables(library):
    """Plans the gradients of tables with this many rows. outputs: the tensors that were rotated."""

    def plan(*tensors, rows, copies=1, entries=None, listed=False, **options):
        tokens = rows, copies, rows if entries is None else entries, listed
        return library.plan_tables(tokens, *arguments(*tensors, **options))

    return plan


def width(plan, dtype):
    """Returns the bytes of an access."""
    return plan["vector"] * dtype.itemsize if plan["vectors"] else dtype.itemsize


# ---- the width of accesses ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "packed"])
def test_accesses_have_16_bytes_if_memory_allows_it(layout, dtype, plan):
    for head_dim, rotary_dim in (64, 64), (128, 128), (128, 64), (96, 32), (256, 256):
        q, k = (meta(2, 5, heads, head_dim, dtype=dtype, layout=layout) for heads in (8, 2))
        for in_place in (False, True):
            for tensors in [(q,), (q, k)]:
                assert width(plan(*tensors, rotary_dim=rotary_dim, in_place=in_place), dtype) == 16


# The bytes of an access for sizes: both halves of the rotated channels, and the channels past them, are cut into vectors.
@pytest.mark.parametrize(
    "dtype, head_dim, rotary_dim, expected",
    [
        (torch.bfloat16, 80, 80, 16),
        (torch.bfloat16, 24, 24, 8),
        (torch.bfloat16, 104, 104, 8),
        (torch.bfloat16, 100, 64, 8),
        (torch.bfloat16, 66, 64, 2),
        (torch.bfloat16, 64, 36, 2),
        (torch.float16, 64, 24, 8),
        (torch.float16, 6, 6, 2),
        (torch.float32, 64, 4, 8),
        (torch.float32, 66, 64, 8),
        (torch.float32, 64, 6, 4),
        (torch.float32, 7, 6, 4),
        (torch.float64, 64, 4, 16),
        (torch.float64, 64, 6, 8),
        (torch.float64, 66, 64, 16),
    ],
)
def test_sizes_limit_the_width_of_accesses(dtype, head_dim, rotary_dim, expected, plan):
    q = meta(1, 3, 4, head_dim, dtype=dtype)
    assert width(plan(q, rotary_dim=rotary_dim), dtype) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addresses_and_strides_limit_the_width_of_accesses(dtype, plan):
    """Addresses and strides of q, k, v and their results count. Channels that are not adjacent are accessed one by one."""
    item, full = dtype.itemsize, 16 // dtype.itemsize

    def narrowed(steps):
        """Returns the widest access to memory that is this many elements away from a multiple of 16 bytes."""
        return next(b for b in (16, 8, item) if b >= max(8, item) and steps * item % b == 0 or b == item)

    def good(heads=2):
        return meta(2, 5, heads, 64, dtype=dtype)

    for steps in range(full):
        off = meta(2, 5, 2, 64, dtype=dtype, start=steps)
        assert width(plan(off, in_place=True), dtype) == narrowed(steps)
        assert width(plan(good(), off), dtype) == narrowed(steps)
        assert width(plan(good(), good(), outputs=[good(), off]), dtype) == narrowed(steps)
        assert width(plan(good(), good(), off, outputs=[good(), good()]), dtype) == narrowed(steps)
        assert width(plan(good(), good(), good(), outputs=[good(), off]), dtype) == narrowed(steps)
        for dimension in range(3):  # sequences, tokens or heads are further apart
            stride = list(good().stride())
            stride[dimension] += steps
            off = good().as_strided((2, 5, 2, 64), stride)
            assert width(plan(off, good()), dtype) == narrowed(steps)
            assert width(plan(good(), good(), good(), outputs=[off, good()]), dtype) == narrowed(steps)
            once = off.narrow(dimension, 0, 1)  # the stride of one element does not matter
            assert width(plan(once), dtype) == 16
        cut = meta(2, 5, 2, 64 + full, dtype=dtype)[..., : 64 + steps]  # the channels of v are not whole vectors
        assert width(plan(good(), good(), cut, outputs=[good(), cut]), dtype) == narrowed(steps)
    apart = meta(2, 5, 2, 128, dtype=dtype)[..., ::2]
    assert width(plan(apart), dtype) == width(plan(good(), apart), dtype) == item


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "head_dim, rotary_dim", [(128, 128), (128, 64), (80, 32), (66, 66), (7, 6), (24, 24), (4096, 4096)]
)
def test_the_order_of_a_norms_sums_follows_from_sizes(head_dim, rotary_dim, dtype, plan, plan_backward):
    """Vectors, chunks and lanes are the same for every layout; only the width of accesses differs."""
    expected = None
    for layout, (batch, seq) in itertools.product(LAYOUTS, [(1, 1), (2, 9), (3, 4000)]):
        q, k = (meta(batch, seq, h, head_dim, dtype=dtype, layout=layout) for h in (6, 2))
        cache = meta(5, 10000, 2, head_dim, dtype=dtype)
        backward = plan_backward(q, k, rotary_dim=rotary_dim)
        for p in (
            plan(q, rotary_dim=rotary_dim, norm=True),
            plan(q, k, rotary_dim=rotary_dim, norm=True),
            plan(q, k, k, outputs=[cache, cache], rotary_dim=rotary_dim, norm=True),
            backward,
        ):
            order = p["vector"], p["chunks"], p["rotated"], p["block"][0]
            expected = expected or order
            assert order == expected
    vector = 16 // dtype.itemsize
    fits = rotary_dim // 2 % vector == 0 and head_dim % vector == 0
    assert expected[0] == (vector if fits else 1)


@pytest.mark.parametrize(
    "columns, start, step, expected", [(64, 0, 1, True), (62, 0, 1, False), (64, 2, 1, False), (64, 0, 2, False)]
)
def test_aligned_table_rows_are_read_in_vectors(columns, start, step, expected, plan):
    good = torch.empty(100, columns, device="meta")
    table = torch.empty(100, columns * step, device="meta")[:, ::step]
    table = table.as_strided(table.shape, table.stride(), start)
    for tables in (table, table), (good, table), (table, good):
        assert plan(meta(1, 5, 2, 128), rotary_dim=2 * columns, tables=tables)["table_vectors"] == expected


@pytest.mark.parametrize("gap, expected", [(8, True), (2, False)])
@pytest.mark.parametrize("dimension", range(3))
def test_tables_of_several_sequences_and_heads_are_read_in_vectors_if_aligned(dimension, gap, expected, plan):
    by_head, strides = torch.empty(3, 5, 2, 64, device="meta"), [640, 128, 64, 1]
    strides[dimension] += gap
    odd = by_head.as_strided(by_head.shape, strides)
    for good, table, options in (by_head, odd, {}), (by_head[:, :, 0], odd[:, :, 0], {"by_token": True}):
        if dimension >= table.dim() - 1:
            continue  # the heads share the table
        for tables in (table, table), (good, table), (table, good):
            assert plan(meta(3, 5, 2, 128), rotary_dim=128, tables=tables, **options)["table_vectors"] == expected


@pytest.mark.parametrize("axis", ["address", 0, 1, 2])
def test_one_tensor_that_is_not_aligned_narrows_the_accesses(axis, plan, plan_backward, plan_tables):
    """Its start is not aligned, or its stride along one axis; the other axes have one element."""
    shape = [2 if d == axis else 1 for d in range(3)] + [64]
    good = meta(*shape)
    odd = (
        meta(*shape, start=1)
        if axis == "address"
        else good.as_strided(shape, [64 + (d == axis) for d in range(3)] + [1])
    )
    for i in range(4):
        *tensors, out, other = (odd if i == n else good for n in range(4))
        x = [odd if i % 2 == n else good for n in range(2)]
        for p in (
            plan(*tensors, outputs=[out, other]),
            plan_backward(*tensors, outputs=[out, other]),
            plan_backward(good, good, x=x),
            plan_tables(*tensors, outputs=[out, other], rows=1),
        ):
            assert width(p, torch.float32) == 4


# ---- the width of element offsets ----


@pytest.mark.parametrize("dimension", range(3))
def test_element_offsets_have_64_bits_if_one_passes_2_31(dimension, plan, plan_backward):
    """The element offsets in q, k, v and their results count, in a backward also those in the gradients."""
    shape, good, one_head = (3, 5, 3, 64), meta(3, 5, 3, 64), meta(3, 5, 1, 64)
    for last, wide in (2**31 - 1, False), (2**31 + 3, True), (2**40, True):
        stride = list(good.stride())
        rest = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) - (shape[dimension] - 1) * stride[dimension]
        stride[dimension] = (last - rest) // (shape[dimension] - 1)
        t = good.as_strided(shape, stride)
        for p in (
            plan(t),
            plan(t, rotary_dim=32),
            plan(good, t),
            plan(good, t, rotary_dim=32),
            plan(good, one_head, outputs=[t, one_head]),
            plan(one_head, good, outputs=[one_head, t]),
            plan(good, good, t, outputs=[good, good]),
            plan(good, good, good, outputs=[t, good]),
            plan(good, good, good, outputs=[good, t]),
            plan_backward(good, t, x=[good, good]),
            plan_backward(good, one_head, x=[t, one_head], rotary_dim=32),
            plan_backward(one_head, good, x=[one_head, t]),
        ):
            assert p["wide_index"] == wide


@pytest.mark.parametrize("last, wide", [(2**31 - 1, False), (2**31, True)])
def test_an_element_offset_of_2_31_is_the_first_that_needs_64_bits(last, wide, plan):
    q = torch.empty(0, device="meta").as_strided((1, 1, 2, 2), (0, 0, last - 1, 1))
    assert plan(q)["wide_index"] == wide
    cache = torch.empty(0, device="meta").as_strided((2, 1, 2, 2), (last - 3, 0, 2, 1))
    good = meta(1, 1, 2, 2)
    assert plan(good, good, good, outputs=[cache, meta(2, 1, 2, 2)])["wide_index"] == wide


@pytest.mark.parametrize("last, wide", [(2**31 - 1, False), (2**31, True)])
def test_element_offsets_of_positions_slots_tables_and_frequencies_count(last, wide, plan):
    def of(*strides):
        return torch.empty(0, device="meta").as_strided((2,) * len(strides), strides)

    q, cache = meta(2, 2, 2, 4), meta(9, 16, 2, 4)
    good = of(2, 1)
    for options in (
        {"positions": of(last - 3, 3)},
        {"positions": of(3, last - 3)},
        {"tables": (of(last - 1, 1), good)},
        {"tables": (good, of(1, last - 1))},
        {"tables": (of(last - 3, 2, 1), good), "by_token": True},
        {"tables": (good, of(1, last - 3, 2)), "by_token": True},
        {"tables": (of(1, 2, last - 4, 1), of(1, 1, 1, 1))},
        {"tables": (of(1, 1, 1, 1), of(1, 2, last - 4, 1))},
        {"inv_freq": of(last)},
    ):
        assert plan(q, **options)["wide_index"] == plan(q, q, **options)["wide_index"] == wide
    assert plan(q, q, q, outputs=[cache, cache], slots=of(last - 3, 3))["wide_index"] == wide


@pytest.mark.parametrize("last, wide", [(2**31 - 64, False), (2**31 + 64, True)])
def test_element_offsets_along_each_axis_of_positions_slots_and_tables_count(last, wide, plan):
    def of(*sizes, axis):
        strides = [last // (sizes[axis] - 1) if d == axis else 1 for d in range(len(sizes))]
        return torch.empty(0, device="meta").as_strided(sizes, strides)

    q, cache = meta(3, 5, 2, 12), meta(9, 16, 2, 12)
    for axis in range(2):
        assert plan(q, q, rotary_dim=8, positions=of(3, 5, axis=axis))["wide_index"] == wide
        assert plan(q, q, q, outputs=[cache, cache], slots=of(3, 5, axis=axis))["wide_index"] == wide
    good = torch.empty(3, 5, 4, device="meta")
    for axis in range(3):
        for tables in (good, of(3, 5, 4, axis=axis)), (of(3, 5, 4, axis=axis), good):
            assert plan(q, q, rotary_dim=8, tables=tables, by_token=True)["wide_index"] == wide
    assert plan(q, q, rotary_dim=8, inv_freq=of(4, axis=0))["wide_index"] == wide
    by_position = torch.empty(7, 4, device="meta"), of(7, 4, axis=0)
    for tables in by_position, by_position[::-1]:
        assert plan(q, q, rotary_dim=8, tables=tables)["wide_index"] == wide


@pytest.mark.parametrize("head_dim, wide", [(4096, True), (4, False)])
def test_so_many_pieces_of_v_need_numbers_of_64_bits(head_dim, wide, plan):
    q, (k, v) = meta(1, 1, 1, 2), (torch.empty(0, device="meta").as_strided((1, 1, 2**20, d), (0, 0, 0, 1)) for d in (2, head_dim))  # fmt: skip
    assert plan(q, k, v, outputs=[k, v])["wide_index"] == wide


# ---- general kernels ----


def test_a_general_kernel_runs_only_where_it_is_needed(plan, plan_backward):
    """It reads tables by head, rounds every step, or copies a v with another head_dim."""
    q, k, narrow, wide = (meta(2, 5, 2, d) for d in (64, 64, 32, 80))
    by_token = torch.empty(2, 5, 32, device="meta")
    by_head = by_token.unsqueeze(2).expand(2, 5, 2, 32)
    for norm in (False, True):
        usual = {}, {"rounding": 0, "rotary_start": 8, "rotary_dim": 32}, {"tables": [by_token] * 2, "by_token": True}
        general = {"rounding": 1}, {"rounding": 2}, {"tables": [by_head] * 2}
        for expected, cases in (False, usual), (True, general):
            for options in cases:
                assert plan(q, k, **options, norm=norm)["general"] == expected
                assert plan(q, k, k, **options, norm=norm, outputs=[k, k])["general"] == expected
                assert plan_backward(q, k, **options)["general"] == expected
        for v in (narrow, wide):
            assert plan(q, k, v, outputs=[k, v], norm=norm)["general"]
        # A norm of a whole head at once has a general kernel only for vectors and offsets of 32 bits.
        for layout, x_dtype in ("bshd", torch.float32), ("every second channel", torch.bfloat16):
            x = meta(2, 5, 2, 64, dtype=x_dtype, layout=layout)
            for rounding in (0, 1):
                p = plan(x, x, rounding=rounding, norm=True)
                assert p["one_step"] == (rounding == 0 or p["vectors"])
    far = q.as_strided(q.shape, (2**31, 128, 64, 1))
    assert plan(far, norm=True)["one_step"] and not plan(far, norm=True, rounding=1)["one_step"]


def test_what_only_a_general_kernel_with_a_norm_can_do(plan):
    """It normalises v and writes to quantised caches, with or without a norm of q and k."""
    q, k = (meta(2, 5, h, 64, dtype=torch.bfloat16) for h in (8, 2))
    for norm in (False, True):
        assert not plan(q, k, k, outputs=[k, k], norm=norm)["any"]
        for more in {"norm_v": True}, {"quantised": (True, False)}, {"quantised": (False, True)}:
            p = plan(q, k, k, outputs=[k, k], norm=norm, **more)
            assert p["any"] and p["general"] and p["one_step"] and p["vectors"]
            assert_within_limits(p, norm=True)
            assert heads_of(p, (8, 2, 2)) == [[1] * 8, [1] * 2, [1] * 2]
            for v_dim in 32, 200:  # only the kernel for wide heads sums over a v of another size
                v = meta(2, 5, 3, v_dim, dtype=torch.bfloat16)
                p = plan(q, k, v, outputs=[k, v], norm=norm, **more)
                together = p["v_pieces"] if "norm_v" in more else 1
                assert p["v_pieces"] == math.ceil(v_dim / 64) and p["v_together"] == together
                assert p["one_step"] == ("norm_v" not in more)
                assert p["per_channel"] == (1 / 64, 1 / 64, 1 / v_dim)
                p["v_pieces"] //= together
                assert heads_of(p, (8, 2, 3)) == [[1] * 8, [1] * 2, [1] * 3 * p["v_pieces"]]


@pytest.mark.parametrize("which", [0, 1])
def test_the_strides_of_a_quantised_cache_count_bytes(which, plan):
    """16 bytes of x become 8 bytes of a cache of bfloat16, which must be aligned."""
    q, k = (meta(2, 5, h, 64, dtype=torch.bfloat16) for h in (8, 2))
    for row, start, expected in (128, 0, True), (136, 8, True), (128, 4, False), (132, 0, False):
        cache = meta(6, 7, 1, row, dtype=torch.uint8, start=start)[..., :128].view(6, 7, 2, 64)
        caches, quantised = [k, k], [False, False]
        caches[which], quantised[which] = cache, True
        p = plan(q, k, k, outputs=caches, quantised=quantised)
        assert p["vectors"] == p["one_step"] == expected and p["vector"] == 8
    apart = meta(6, 7, 2, 68, dtype=torch.bfloat16)[..., :64]
    assert plan(q, k, k, outputs=[apart] * 2)["vector"] == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, rotary_dim", [(128, 128), (80, 32), (7, 6), (4096, 4096)])
def test_the_order_of_the_sums_over_all_heads_follows_from_sizes(head_dim, rotary_dim, dtype, plan, plan_backward):
    """A thread block takes all heads of q, k or v of a token; the order of its sums follows from its shape."""
    v_dim, expected = head_dim + 16, None
    for layout, (batch, seq) in itertools.product(LAYOUTS, [(1, 1), (2, 9), (3, 4000)]):
        q, k, v = (
            meta(batch, seq, h, d, dtype=dtype, layout=layout) for h, d in ((60, head_dim), (2, head_dim), (3, v_dim))
        )
        caches = [meta(5, 10000, h, d, dtype=dtype) for h, d in ((2, head_dim), (3, v_dim))]
        options = {"rotary_dim": rotary_dim, "norm": True, "over_heads": True}
        for p in plan(q, **options), plan(q, k, **options), plan(q, k, v, outputs=caches, **options):
            order = p["vector"], p["chunks"], p["rotated"], p["block"]
            expected = expected or order
            assert order == expected and p["general"]
            assert p["grid"] == (p["seq"], 3 if p["v_pieces"] else 2, p["batch"])
            assert p["batch"] * p["seq"] == batch * seq
            assert p["per_channel"][0] == 1 / (60 * head_dim)
        assert p["per_channel"] == (1 / (60 * head_dim), 1 / (2 * head_dim), 1 / v_dim)
        x, y, z = p["block"]
        assert x & (x - 1) == 0 and x <= WARP and x * y == 256 and z == 1
        assert channels_of(p, head_dim, rotary_dim, 0, norm=True) == [1] * head_dim
        b = plan_backward(q, k, rotary_dim=rotary_dim, over_heads=True)
        assert (b["vector"], b["chunks"], b["rotated"], b["block"]) == (*expected[:3], (x, THREADS // x, 1))
        assert b["grid"] == (b["q"][0] + b["k"][0], 1, 1) and b["grid"][0] <= 385
        for parts, tokens, _ in b["q"], b["k"]:
            assert (parts - 1) * tokens < batch * seq <= parts * tokens
        sums = 60 * head_dim, 2 * head_dim
        assert b["sums"] == b["q"][0] * sums[0] + b["k"][0] * sums[1]
        assert b["dynamic_shared"] == 8 * max([n for n in sums if n <= 5120], default=0)


@pytest.mark.parametrize(
    "blocks, block_size, narrow", [(2**20, 2**11 - 1, True), (2**20, 2**11, False), (2**33, 16, False)]
)
def test_slots_have_32_bits_if_all_of_them_fit(blocks, block_size, narrow, plan):
    cache = torch.empty(0, device="meta").as_strided((blocks, block_size, 1, 2), (0, 0, 0, 1))
    q = meta(1, 5, 1, 2)
    slots = torch.empty(1, 5, device="meta")
    assert plan(q, q, q, outputs=[cache, cache], slots=slots)["narrow_slots"] == narrow


# ---- the range of position + offset ----


def test_positions_are_within_the_table_and_the_cache(plan):
    every_position = (-(2**63), 2**63 - 1)
    q = meta(2, 5, 1, 8)
    table, cache = meta(1, 30, 1, 4)[0, :, 0], meta(3, 20, 1, 8)
    slots = positions = torch.empty(2, 5, device="meta")
    by_token = [meta(1, 5, 1, 4)[:, :, 0]] * 2
    assert plan(q)["position_range"] == every_position
    assert plan(q, positions=positions)["position_range"] == every_position
    assert plan(q, tables=by_token, by_token=True)["position_range"] == every_position
    assert plan(q, tables=[table] * 2)["position_range"] == (0, 29)
    for tables, last in (None, 19), ([table[:7]] * 2, 6), ([table] * 2, 19):
        assert plan(q, q, q, outputs=[cache, cache], tables=tables)["position_range"] == (0, last)
    assert plan(q, q, q, outputs=[cache, cache], slots=slots)["position_range"] == every_position
    assert plan(q, q, q, outputs=[cache, cache], slots=slots, tables=[table] * 2)["position_range"] == (0, 29)


# ---- the grid ----


def heads_of(plan, heads):
    """Returns how often each head of q and k, and each piece of a head of v, is taken. The teams of a thread block take the
    heads of its share, a part of the list of all heads, in turns."""
    _, teams, _ = plan["block"]
    heads = [*heads[:2], heads[2] * plan["v_pieces"]]
    assert plan["starts"] == (0, heads[0], heads[0] + heads[1])
    counts = [0] * sum(heads)
    for first in range(0, plan["grid"][1] * plan["heads_per_thread_block"], plan["heads_per_thread_block"]):
        for team in range(teams):
            for head in range(first + team, min(first + plan["heads_per_thread_block"], len(counts)), teams):
                counts[head] += 1
    return [counts[start : start + n] for start, n in zip(plan["starts"], heads, strict=True)]


def channels_of(plan, head_dim, rotary_dim, rotary_start, norm):
    """Returns how often each channel of a head is written, with the channels of Chunk in device.cuh."""

    def other(i):  # channel i of those that are not rotated
        return i if i < rotary_start else i + rotary_dim

    vector, chunks, rotated, threads = plan["vector"], plan["chunks"], plan["rotated"], plan["block"][0]
    counts = [0] * head_dim
    for thread in range(threads):
        step = threads if norm or vector == 1 else chunks
        for chunk in range(thread, chunks, step):
            if chunk < rotated:
                starts = [rotary_start + chunk * vector + half for half in (0, rotary_dim // 2)]
            else:
                starts = [(chunk - rotated) * vector, (chunk - 2 * rotated + chunks) * vector]
                starts = [other(start) for start in starts if start < head_dim - rotary_dim]
            for start in starts:
                assert start + vector <= head_dim
                for channel in range(start, start + vector):
                    counts[channel] += 1
    return counts


def assert_within_limits(plan, norm=False):
    x, y, z = plan["block"]
    assert 1 <= x * y * z <= THREADS and z <= MOST_Z and y & (y - 1) == 0
    assert plan["grid"][0] < 2**31 and max(plan["grid"][1:]) <= MOST_GRID and min(plan["grid"]) > 0
    if norm:  # the lanes of a head are in one warp, and every warp is full
        assert x & (x - 1) == 0 and x <= WARP and x * y * z % WARP == 0


def random_size(draw):
    batch, seq = draw.choice([1, 1, 2, 5]), draw.choice([1, 1, 2, 7, 100, 4097])
    q_heads, k_heads = draw.choice([1, 2, 3, 8, 32, 71, 300]), draw.choice([0, 1, 2, 8, 40])
    head_dim = draw.choice([2, 7, 24, 64, 80, 100, 128, 256, 640, 2032, 2050, 4098])
    rotary_dim = draw.choice([head_dim // 2 * 2, draw.randint(0, head_dim // 2) * 2, head_dim // 4 * 2])
    rest = head_dim - rotary_dim
    rotary_start = draw.choice([0, rest, rest // 16 * 8, draw.randint(0, rest)])
    return batch, seq, q_heads, k_heads, head_dim, {"rotary_dim": rotary_dim, "rotary_start": rotary_start}


@pytest.mark.parametrize("seed", range(200))
def test_every_head_token_and_channel_is_taken_once(seed, plan):
    draw = random.Random(seed)
    batch, seq, q_heads, k_heads, head_dim, rotated = random_size(draw)
    rotary_dim = rotated["rotary_dim"]
    dtype, kind, norm = draw.choice(DTYPES), draw.choice(["new", "in place", "cache"]), draw.random() < 0.4
    q, k = (
        meta(batch, seq, h, head_dim, dtype=dtype, layout=draw.choice(["bshd", "bhsd", "packed", "odd start"]))
        for h in (q_heads, k_heads)
    )
    options = rotated | {"norm": norm, "rounding": draw.randrange(3), "processors": draw.choice([1, 20, H200])}
    v_dim = draw.choice([head_dim, 2 * head_dim, head_dim // 2, 3 * head_dim + 1, draw.randint(1, 2 * head_dim)])
    if kind == "cache":
        tensors = [q, k, meta(batch, seq, k_heads, v_dim, dtype=dtype)]
        options["outputs"] = [meta(batch + 1, 5000, k_heads, d, dtype=dtype) for d in (head_dim, v_dim)]
    else:
        tensors = draw.choice([[q], [q, k]])
        options["in_place"] = kind == "in place" and not norm
    p = plan(*tensors, **options)
    heads = ([t.shape[2] for t in tensors] + [0, 0])[:3]
    in_place = kind == "in place" or (kind == "cache" and k_heads == 0)  # then other channels stay as they are
    written = head_dim if norm or not in_place else rotary_dim
    if written == 0:
        assert p["grid"] == (0, 0, 0)
        return
    assert_within_limits(p, norm)
    assert p["batch"] * p["seq"] == batch * seq and p["grid"][2] == p["batch"]
    assert (p["grid"][0] - 1) * p["block"][2] < p["seq"] <= p["grid"][0] * p["block"][2]
    pieces = math.ceil(v_dim / head_dim) if kind == "cache" else 0
    assert p["v_pieces"] == pieces and heads_of(p, heads) == [[1] * heads[0], [1] * heads[1], [1] * heads[2] * pieces]
    start = rotated["rotary_start"]
    expected = [int(written == head_dim or start <= channel < start + rotary_dim) for channel in range(head_dim)]
    assert channels_of(p, head_dim, **rotated, norm=norm) == expected


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "batch, seq, q_heads, k_heads, head_dim",
    [
        (70000, 2, 2, 1, 8),
        (1, 1, 70000, 70000, 256),
        (1, 1, 131069, 1, 512),
        (1, 100, 500000, 3, 2),
        (1, 2**31 - 1, 1, 1, 2),
        (2**31 - 1, 1, 1, 1, 2),
    ],
)
def test_sizes_past_what_a_grid_has(batch, seq, q_heads, k_heads, head_dim, layout, norm, plan):
    """Sequences past 65535 take another launch; if there are too many heads, each team takes more of them."""
    q, k = (meta(batch, seq, h, head_dim, layout=layout) for h in (q_heads, k_heads))
    for tensors, outputs in (([q, k], None), ([q, k, k], [meta(3, 7, k_heads, head_dim)] * 2)):
        p = plan(*tensors, outputs=outputs, norm=norm, processors=2**20)
        assert_within_limits(p, norm)
        assert p["grid"][2] == min(p["batch"], MOST_GRID)
        assert p["grid"][0] * p["block"][2] >= p["seq"]
        assert p["grid"][1] * p["heads_per_thread_block"] >= sum(t.shape[2] for t in tensors)
        assert p["starts"] == (0, q_heads, q_heads + k_heads)


def steps_of(plan):
    """Returns the number of heads that a team takes."""
    return plan["heads_per_thread_block"] // plan["block"][1]


def of_tokens(plan, tokens, heads, kind="rotate", dtype=torch.bfloat16, **options):
    """Returns the plan of one sequence with heads of 128 channels."""
    q_heads, k_heads = heads
    q, k = (meta(1, tokens, h, 128, dtype=dtype) for h in heads)
    cache = meta(1, 2**20, k_heads, 128, dtype=dtype)
    tensors, outputs = ([q, k, k], [cache, cache]) if "cache" in kind else ([q, k], None)
    return plan(*tensors, outputs=outputs, norm="norm" in kind, **options)


# (kind, tokens) -> (teams over heads, teams over tokens, heads that a team takes)
PLANS = {
    ("rotate", 1): (8, 1, 1),
    ("rotate", 16): (8, 2, 1),
    ("rotate", 128): (8, 2, 1),
    ("rotate", 512): (4, 4, 2),  # two heads take no longer than one
    ("rotate", 1024): (8, 2, 5),
    ("rotate", 2048): (4, 4, 10),  # (8, 2, 5) would leave a small part of the thread blocks for a second round
    ("rotate", 3072): (8, 2, 5),
    ("rotate", 4096): (2, 8, 20),  # (8, 2, 5) would leave a small part of the thread blocks for a third round
    ("rotate", 32768): (8, 2, 5),
    ("rotate 64 channels", 1024): (8, 2, 5),  # memory takes as long as for 128 channels
    ("cache", 1): (16, 1, 1),
    ("cache", 512): (8, 2, 2),
    ("cache", 1024): (8, 2, 6),
    ("cache", 2048): (16, 1, 3),
}


@pytest.mark.parametrize("kind, tokens", PLANS)
def test_the_plan_of_many_tokens(kind, tokens, plan):
    p = of_tokens(plan, tokens, (32, 8), kind, rotary_dim=64 if "64" in kind else 128)
    assert (*p["block"][1:], steps_of(p)) == PLANS[kind, tokens]


@pytest.mark.parametrize("kind", ["rotate", "cache", "norm cache"])
def test_few_threads_are_idle(kind, plan):
    """A thread block has no teams for heads that do not exist, except a few."""
    for heads in (32, 8), (8, 1), (64, 8), (40, 8), (71, 1), (1, 1), (28, 4), (14, 2):
        count = sum(heads) + ("cache" in kind) * heads[1]
        for tokens in 512, 1024, 2048, 3072, 4096, 32768:
            p = of_tokens(plan, tokens, heads, kind)
            assert 16 * count * tokens >= 15 * math.prod(p["grid"]) * math.prod(p["block"][1:]) * steps_of(p)


@pytest.mark.parametrize("kind", ["rotate", "cache", "norm cache"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_token_is_spread_and_many_share_their_angles(dtype, kind, plan):
    """With one token, a thread takes one head. With many tokens, a thread block takes all heads of a token."""
    for heads in (32, 8), (64, 8), (8, 8):
        one, many = (of_tokens(plan, tokens, heads, kind, dtype) for tokens in (1, 2**20))
        assert steps_of(one) == 1
        assert many["grid"][1] == 1 and many["heads_per_thread_block"] >= sum(heads)
    few, more = (of_tokens(plan, 128, (32, 8), kind, processors=n) for n in (H200, 1))
    assert math.prod(more["grid"]) < math.prod(few["grid"])  # the number of multiprocessors counts


@pytest.mark.parametrize("norm", [False, True])
def test_neighbours_in_memory_are_neighbours_in_a_thread_block(norm, plan):
    """The neighbours are the heads of a token, or the tokens of a head."""
    for dtype in DTYPES:
        _, heads, tokens = plan(meta(1, 500, 32, 128, dtype=dtype), norm=norm)["block"]
        assert heads > tokens
        _, heads, tokens = plan(meta(1, 500, 32, 128, dtype=dtype, layout="bhsd"), norm=norm)["block"]
        assert tokens > heads
    one = plan(meta(1, 9, 32, 128, layout="bhsd")[:, :1], norm=norm)["block"]  # there is no other token
    assert one[1] > one[2]


# ---- sequences that are merged into one ----


def merged(plan):
    return plan["batch"] == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "packed", "every second channel"])
def test_a_decode_step_is_one_sequence(layout, plan):
    """[batch, 1, heads, head_dim] is one sequence of `batch` tokens, wherever their positions come from."""
    q, k = (meta(300, 1, h, 64, layout=layout) for h in (8, 2))
    one, each = torch.empty(1, device="meta"), torch.empty(300, 1, device="meta")
    table, tokens = torch.empty(500, 32, device="meta"), torch.empty(300, 1, 32, device="meta")
    for options in (
        {},
        {"tables": (table, table)},
        {"positions": one, "tables": (table, table)},
        {"positions": each},
        {"tables": (tokens, tokens), "by_token": True},
        {"tables": (tokens[0], tokens[0]), "by_token": True},
        {"tables": [tokens.unsqueeze(2).expand(300, 1, 2, 32)] * 2},
    ):
        for p in (plan(q, k, **options), plan(q, in_place=True, **options)):
            assert merged(p) and p["seq"] == 300 and p["position_step"] == ("positions" in options)
            assert p["strides"][0] == q.stride(0)
        assert p["strides"][5] == (options.get("positions") is each)
    # A thread block takes several heads or several tokens.
    assert plan(q)["block"][2] > 1 or plan(q)["block"][1] > 1


def test_sequences_that_follow_each_other_in_memory_are_merged(plan):
    """Their positions, or the rows of a table by token, must follow each other too."""
    q, k = meta(3, 7, 8, 64), meta(3, 7, 2, 64, layout="packed")
    positions, tokens = torch.empty(3, 7, device="meta"), torch.empty(3, 7, 32, device="meta")
    by_head = torch.empty(3, 7, 8, 32, device="meta")
    for options in (
        {"positions": positions},
        {"tables": (tokens, tokens), "by_token": True},
        {"tables": [by_head] * 2},
    ):
        p = plan(q, k, **options)
        assert merged(p) and p["seq"] == 21 and p["position_step"] == 1
        assert p["strides"][:4] == (8 * 64, 8 * 64, 5 * 64, 5 * 64)
    cache, slots = meta(9, 16, 2, 64), torch.empty(3, 7, device="meta")
    assert merged(plan(q, k, k, outputs=[cache, cache], slots=slots, positions=positions))


def test_sequences_are_not_merged_if_strides_or_positions_differ(plan):
    q, k = meta(3, 7, 8, 64), meta(3, 7, 2, 64)
    positions, tokens = torch.empty(3, 7, device="meta"), torch.empty(3, 7, 32, device="meta")
    other = tokens.transpose(0, 1).contiguous().transpose(0, 1)
    cache, slots = meta(9, 16, 2, 64), torch.empty(3, 7, device="meta")
    for p in (
        plan(q, k),  # each sequence begins at position 0
        plan(q, k, positions=positions[:1].squeeze(0)),  # each sequence has these positions
        plan(q, k, positions=positions.mT.contiguous().mT),
        plan(meta(3, 7, 8, 64, layout="bhsd"), k, positions=positions),
        plan(q, meta(3, 7, 2, 64, layout="sbhd"), positions=positions),
        plan(q[:, 1:], k[:, 1:], positions=positions[:, 1:]),
        plan(q, k, outputs=[q, meta(3, 7, 2, 64, layout="bhsd")], positions=positions),
        plan(q, k, tables=(tokens[0], tokens[0]), by_token=True),
        plan(q, k, tables=[torch.empty(1, 7, 8, 32, device="meta").expand(3, 7, 8, 32)] * 2),
        plan(q, k, tables=(tokens, other), by_token=True),
        plan(q, k, tables=(other, tokens), by_token=True),
        plan(q, k, k, outputs=[cache, cache], positions=positions),  # sequence b is written to block b
        plan(q[:, :1], k[:, :1], k[:, :1], outputs=[cache, cache], positions=positions[:, :1]),
        plan(q, k, k, outputs=[cache, cache], slots=slots),  # without positions
        plan(q, k, k, outputs=[cache, cache], slots=slots.mT.contiguous().mT, positions=positions),
        plan(q, k, meta(3, 7, 2, 64, layout="bhsd"), outputs=[cache, cache], slots=slots, positions=positions),
    ):
        assert not merged(p) and p["batch"] == 3 and p["grid"][2] == 3 and p["position_step"] == 1


# ---- the backward of the norm ----


@pytest.mark.parametrize("seed", range(100))
def test_the_backward_takes_every_token_and_head_once(seed, plan_backward):
    draw = random.Random(seed)
    batch, seq, q_heads, k_heads, head_dim, rotated = random_size(draw)
    dtype = draw.choice(DTYPES)
    q, k = (meta(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads))
    p = plan_backward(q, k, **rotated, rounding=(rounding := draw.randrange(2)))
    assert_within_limits(p, norm=True)
    (lanes, teams, one), tokens = p["block"], batch * seq
    wide = p["chunks"] > WARP  # then a thread block is one team, which takes one head at a time
    at_once = 1 if wide or rounding else 2
    assert lanes * teams == (WARP if wide else THREADS) and one == 1
    assert p["grid"] == (p["q"][0] + p["k"][0], 1, 1) and p["grid"][0] <= MOST_PARTS + 1
    for heads, (parts, part_tokens, head_teams) in (q_heads, p["q"]), (k_heads, p["k"]):
        if heads == 0:
            assert parts == 0
            continue
        assert (parts - 1) * part_tokens < tokens <= parts * part_tokens
        assert head_teams & (head_teams - 1) == 0 and teams % head_teams == 0
        assert head_teams == 1 or (head_teams - 1) * at_once < 2 * heads
        token_teams = teams // head_teams
        counts = [0] * min(part_tokens, tokens)
        for first, team in itertools.product(range(0, len(counts), token_teams), range(token_teams)):
            if first + team < len(counts):
                counts[first + team] += 1
        assert set(counts) == {1}
        steps = range(0, heads, at_once * head_teams)
        taken = [first + i * head_teams + team for first in steps for i in range(at_once) for team in range(head_teams)]
        assert [head for head in taken if head < heads] == list(range(heads))
    assert channels_of(p, head_dim, **rotated, norm=True) == [1] * head_dim


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (64, 8), (8, 8), (3, 24)], ids=str)
@pytest.mark.parametrize("tokens", [512, 1024, 2048, 3072, 4096, 32768])
def test_the_parts_of_q_and_k_take_about_as_long(tokens, heads, plan_backward):
    """Otherwise a few thread blocks would run when the others are done. Many parts even out what is left."""
    p = plan_backward(*(meta(1, tokens, h, 128, dtype=torch.bfloat16) for h in heads))
    of_q, of_k = (h * p[name][1] for h, name in zip(heads, "qk", strict=True))  # heads of a part
    assert of_q == of_k
    assert min(tokens * sum(heads) // 32, MOST_PARTS) / 2 <= p["grid"][0] <= MOST_PARTS + 1


def test_the_parts_of_a_weights_gradient_follow_from_sizes(plan_backward):
    """Otherwise a layout could change the bits of a weight's gradient."""
    plans = []
    for layout in LAYOUTS:
        q, k = (meta(2, 9999, h, 80, dtype=torch.bfloat16, layout=layout) for h in (6, 2))
        p = plan_backward(q, k)
        plans.append({name: value for name, value in p.items() if name != "vectors"})
    assert all(p == plans[0] for p in plans)


# ---- the gradients of tables ----


def taken(heads, entries, copies, teams):
    """Returns how often each head of each token of a table row is taken by the loop of table_backward_kernel."""
    counts = [0] * (entries * copies * heads)
    head_teams = min(-(-heads // 2), teams)  # a thread loads two heads at a time
    token_teams = teams // head_teams
    for token_team, head_team in itertools.product(range(token_teams), range(head_teams)):
        entry, copy = divmod(token_team, copies)
        while entry < entries:
            for head in range(head_team, heads, head_teams):
                counts[(entry * copies + copy) * heads + head] += 1
            entry, copy = entry + token_teams // copies, copy + token_teams % copies
            if copy >= copies:
                entry, copy = entry + 1, copy - copies
    return counts


@pytest.mark.parametrize("seed", range(150))
def test_gradients_of_tables_take_every_head_token_and_channel_once(seed, plan_tables):
    draw = random.Random(seed)
    batch, seq, q_heads, k_heads, head_dim, rotated = random_size(draw)
    rotary_dim = rotated["rotary_dim"]
    dtype, listed, own, by_head = draw.choice(DTYPES), *(draw.random() < 0.5 for _ in range(3))
    if by_head:
        listed, k_heads = False, min(k_heads, 1) * q_heads
        rotated["tables"] = [torch.empty(1, 1, 1, 1, device="meta").expand(batch, seq, q_heads, rotary_dim // 2)] * 2
    layouts = [draw.choice(["bshd", "bhsd", "packed", "odd start"]) for _ in "qkqk"]
    heads = [q_heads, k_heads, q_heads, k_heads]
    q, k, *x = (
        meta(batch, seq, h, head_dim, dtype=dtype, layout=layout) for h, layout in zip(heads, layouts, strict=True)
    )
    entries, copies = (batch * seq, 1) if own else (seq, batch)
    rows = draw.choice([1, 16, 5000]) if listed else entries
    tokens = {"rows": rows, "copies": copies, "entries": entries, "listed": listed}
    p = plan_tables(q, k, outputs=x, **rotated, **tokens)
    if by_head:
        rows *= q_heads
    if rotary_dim == 0:
        assert p["grid"] == (0, 0, 0)
        return
    (x, y, z), blocks, per_row = p["block"], p["grid"][0], p["blocks_per_row"]
    assert p["grid"][1:] == (1, 1) and 1 <= x * y * z <= 256 and z <= MOST_Z
    assert (
        p["chunks"] == p["rotated"] == rotary_dim // 2 // p["vector"] and (per_row - 1) * x < p["chunks"] <= per_row * x
    )
    assert (blocks // per_row - 1) * z < rows <= blocks // per_row * z and blocks % per_row == 0
    for h in {min(h, 1) if by_head else h for h in (q_heads, k_heads)} - {0}:
        for of_row in {0, 1, 3} | {entries // rows} if listed else {1}:
            if of_row * copies * h < 20000:
                assert set(taken(h, of_row, copies, y)) <= {1}


@pytest.mark.parametrize("head_dim, rotary_dim", [(128, 128), (128, 64), (80, 32), (66, 66), (7, 6), (24, 24)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_terms_that_a_thread_sums_follow_from_sizes(dtype, head_dim, rotary_dim, plan_tables):
    """Otherwise a layout could change the bits of a table's gradient. It may change only the width of accesses and the
    assignment of rows and chunks to thread blocks."""
    for batch, seq, rows in ((8, 999, 999), (1, 5, 5), (600, 7, 7)):
        threads = set()
        for layout, x_layout in itertools.product(LAYOUTS, LAYOUTS):
            q, k = (meta(batch, seq, h, head_dim, dtype=dtype, layout=layout) for h in (6, 2))
            x = [meta(batch, seq, h, head_dim, dtype=dtype, layout=x_layout) for h in (6, 2)]
            p = plan_tables(q, k, outputs=x, rotary_dim=rotary_dim, rows=rows, copies=batch)
            threads.add(p["block"][1])
            aligned = all(plan_tables(t, rotary_dim=rotary_dim, rows=rows)["vectors"] for t in (q, k, *x))
            assert p["vectors"] == aligned and p["vector"] == (16 // dtype.itemsize if aligned else 1)
        assert len(threads) == 1


# (batch, seq, heads of q, heads of k, head_dim) -> rows, copies and entries of the tables
FILLING = {
    "batch 8, positions of all": ((8, 2048, 32, 8, 128), (2048, 8, 2048)),
    "batch 8, a longer table": ((8, 2048, 32, 8, 128), (131072, 8, 2048)),
    "batch 8, positions of each": ((8, 2048, 32, 8, 128), (2048, 1, 8 * 2048)),
    "one sequence": ((1, 4096, 32, 8, 128), (4096, 1, 4096)),
    "a long table and few heads": ((1, 131072, 1, 1, 64), (131072, 1, 131072)),
    "a small table and a long batch": ((4096, 64, 12, 12, 64), (64, 4096, 64)),
    "a small table and many tokens of each row": ((64, 4096, 12, 12, 64), (64, 64, 4096)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FILLING)
def test_gradients_of_tables_fill_the_gpu(name, dtype, plan_tables):
    """There are two thread blocks of 256 threads for each multiprocessor, or for small tables at least 128 in all, and a
    thread sums more than one head before the threads add up their sums."""
    (batch, seq, q_heads, k_heads, head_dim), (rows, copies, entries) = FILLING[name]
    q, k = (meta(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads))
    p = plan_tables(q, k, rows=rows, copies=copies, entries=entries, listed=entries != rows)
    x, y, z = p["block"]
    assert p["vectors"] and x * p["vector"] * dtype.itemsize >= 32  # adjacent bytes
    assert math.prod(p["grid"]) * x * y * z >= 256 * (128 if rows == 64 else 2 * H200)
    assert y <= max(1, copies * -(-entries // rows) * (q_heads + k_heads) // 2)
