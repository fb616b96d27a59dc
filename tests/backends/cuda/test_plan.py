"""Tests of the launch plans of csrc/cuda/plan.h, which follow from sizes, strides and addresses alone. Random calls get the
plans that this file says they must get. The loops that the kernels run over a plan are repeated here in Python."""

import itertools
import math
import random
import shutil
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from cases import DTYPES, LAYOUTS, ROOT

sys.path.insert(0, str(ROOT))
from benchmarks.plan import module  # noqa: E402

ORDER = [torch.float16, torch.bfloat16, torch.float32, torch.float64]  # the order of DType in csrc/args.h
H200 = 132  # multiprocessors
THREADS, WARP, MOST_Z, MOST_GRID = 128, 32, 64, 65535
MOST_PARTS = 1024  # of the backward of the norm
INT32, INT64 = 2**31 - 1, 2**63 - 1

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="plan.h is compiled by g++")


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    return module()


# ---- calls with tensors that have no memory ----


def memory(sizes, strides, start=0, dtype=torch.float32):
    return torch.empty(0, device="meta", dtype=dtype).as_strided(sizes, strides, start)


def meta(*shape, dtype=torch.float32, layout="bshd"):
    """Returns a tensor [batch, seq, heads, head_dim] without memory."""
    return LAYOUTS[layout](torch.Size(shape), dtype, "meta")


def last_offset(t):
    """Returns the element offset of the last element."""
    return sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))


def is_aligned(t, width):
    """Returns whether neighbouring channels are adjacent, and all heads begin at multiples of `width` bytes."""
    strides = [t.storage_offset(), *(stride for n, stride in zip(t.shape[:-1], t.stride(), strict=False) if n > 1)]
    return t.stride(-1) == 1 and all(stride * t.itemsize % width == 0 for stride in strides)


@dataclass
class Call:
    """The arguments of a call. Tables of four dimensions are by head."""

    q: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    outputs: list | None = None  # the inputs, if not given; with a v they are the two caches, and q is in place
    in_place: bool = False
    rotary_dim: int | None = None
    rotary_start: int = 0
    positions: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    tables: list | None = None
    by_token: bool = False
    inv_freq: torch.Tensor | None = None
    norm: bool = False
    rounding: int = 0
    over_heads: bool = False  # of the norm
    norm_v: bool = False
    quantised: tuple = (False, False)  # the caches of k and v

    def __post_init__(self):
        inputs = [self.q, self.k, self.v]
        outputs = [*(self.outputs or inputs), None, None][:3]
        self.sides = list(zip(inputs, [*([self.q, *outputs] if self.has_cache else outputs), None][:3], strict=True))
        self.dtype, self.head_dim = self.q.dtype, self.q.shape[3]
        self.rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        self.takes_norm = self.norm or self.norm_v or any(self.quantised)
        self.by_head = self.tables is not None and self.tables[0].dim() == 4
        self.by_position = self.tables is not None and not self.by_head and not self.by_token

    @property
    def has_cache(self):
        return self.v is not None

    def arguments(self):
        """Returns the arguments of the functions of the library."""
        addresses = itertools.count(2**40, 2**36)  # multiples of 16

        def given(t, address, dims):
            if t is None:
                return None
            return address + t.storage_offset() * t.itemsize, [0] * (dims - t.dim()) + list(t.stride())

        def shared_by_heads(t):
            return t if t is None or t.dim() == 4 else t.unsqueeze(-2).expand(*t.shape[:-1], 2, -1)

        sides, stay = [], (self.in_place or self.has_cache, self.in_place, False)
        for (x, out), stays in zip(self.sides, stay, strict=True):
            address = next(addresses)
            sides.append((given(x, address, 4), given(out, address if stays else next(addresses), 4)))
        q, v = self.q, self.v
        flags = (self.norm, self.over_heads, self.norm_v, *self.quantised)
        return (
            ORDER.index(self.dtype),
            (*q.shape[:2], q.shape[3], self.rotary_dim, self.rotary_start, v.shape[3] if self.has_cache else 0),
            [0 if t is None else t.shape[2] for t in (q, self.k, v)],
            sides,
            self.sides[1][1].shape[:2] if self.has_cache else (0, 0),
            given(self.positions, next(addresses), 2),
            given(self.slots, next(addresses), 2),
            *(given(shared_by_heads(t), next(addresses), 4) for t in self.tables or (None, None)),
            2 if self.tables is None else 3 if self.by_head else int(self.by_token),
            0 if self.tables is None else self.tables[0].shape[-2],
            1 if self.inv_freq is None else self.inv_freq.stride(0),
            sum(bit << i for i, bit in enumerate(flags)),
            self.rounding,
        )

    # ---- what the plan must be ----

    def tensors(self):
        """Returns q, k, v and their results, if they have channels."""
        return [t for side in self.sides for t in side if t is not None and t.shape[2] and t.shape[3]]

    def vectors(self, *more):
        """Returns the channels of a vector, and whether it is accessed at once. more: further tensors of the call"""
        full, norm = 16 // self.dtype.itemsize, self.takes_norm or bool(more)
        v_dim = self.v.shape[3] if self.has_cache else 0

        def fits(n):
            sizes = self.rotary_start, self.rotary_dim // 2, self.head_dim
            return n > 1 and all(size % n == 0 for size in sizes) and (norm or self.head_dim <= 2 * n * (THREADS - 1))

        def reaches(n):
            tensors = [*self.tensors(), *(t for t in more if t.shape[2])]
            return v_dim % n == 0 and all(is_aligned(t, n * t.itemsize) for t in tensors)

        if norm:  # the order of its sums follows from sizes, so the length of a vector does too
            return (full, reaches(full)) if fits(full) else (1, False)
        return next(((n, True) for n in (full, full // 2) if fits(n) and reaches(n)), (1, False))

    def wide(self, *more):
        """Returns whether an element offset needs 64 bits."""
        parameters = [self.positions, self.slots, self.inv_freq, *(self.tables or ())]
        tensors = [*more, *self.tensors(), *(t for t in parameters if t is not None)]
        return any(last_offset(t) > INT32 for t in tensors)

    def of_tokens(self):
        """Returns the tensors that have a part for each token: [batch, seq, ...]."""
        (q, q_out), (k, k_out), (v, _) = self.sides
        tensors = [q, q_out, v, self.positions, self.slots, *(self.tables if self.by_token or self.by_head else ())]
        if k is not None and k.shape[2]:
            tensors += [k] if self.has_cache else [k, k_out]
        return [t for t in tensors if t is not None]

    def merges(self):
        """Returns whether all sequences are like one long one."""
        batch, seq = self.q.shape[:2]
        restarts = self.positions is None and not self.by_token and not self.by_head  # at position 0
        evenly = all(t.stride(0) == seq * t.stride(1) for t in self.of_tokens())
        return batch > 1 and (seq == 1 or (evenly and not restarts)) and not (self.has_cache and self.slots is None)

    def position_range(self):
        lasts = [self.tables[0].shape[0] - 1] if self.by_position else []
        lasts += [self.sides[1][1].shape[1] - 1] if self.has_cache and self.slots is None else []
        return (0, min(lasts)) if lasts else (-INT64 - 1, INT64)


@pytest.fixture
def plan(library):
    return lambda call, processors=H200: library.plan(processors, *call.arguments())


@pytest.fixture
def plan_backward(library):
    """Plans the backward of the norm. x: the tensors that were normalised"""

    def plan(call, x):
        return library.plan_backward([replace(call, q=t).arguments()[3][0][0] for t in x], *call.arguments())

    return plan


@pytest.fixture
def plan_tables(library):
    """Plans the gradients of tables with this many rows. The results of the call are the tensors that were rotated."""

    def plan(call, rows, copies=1, entries=None, listed=False):
        return library.plan_tables((rows, copies, rows if entries is None else entries, listed), *call.arguments())

    return plan


# ---- random calls ----


def random_size(draw):
    batch, seq = draw.choice([1, 2, 2, 5]), draw.choice([1, 1, 2, 7, 100, 4097])
    q_heads, k_heads = draw.choice([1, 2, 3, 8, 32, 71, 300]), draw.choice([0, 1, 2, 8, 40])
    head_dim = draw.choice([2, 7, 24, 64, 64, 80, 100, 128, 128, 256, 640, 2032, 2050, 4098])
    rotary_dim = draw.choice([head_dim // 2 * 2, draw.randint(0, head_dim // 2) * 2, head_dim // 4 * 2])
    rest = head_dim - rotary_dim
    rotary_start = draw.choice([0, 0, rest, rest // 16 * 8, draw.randint(0, rest)])
    return batch, seq, q_heads, k_heads, head_dim, {"rotary_dim": rotary_dim, "rotary_start": rotary_start}


def irregular(draw, t):
    """Returns a tensor of the same sizes that lies in memory in another way: one that is not aligned, not adjacent, or so
    large that an element offset is next to 2^31."""
    strides, start, way = list(t.stride()), 0, draw.choice(["start", "gap", "step", "order", "far", "far"])
    axes = [d for d, n in enumerate(t.shape) if n > 1]
    axis = draw.choice(
        axes if axes and draw.random() < 0.7 else range(t.dim())
    )  # the stride of one element does not matter
    few = draw.choice([1, 8 // t.itemsize, 16 // t.itemsize])
    if way == "start":
        start = few
    elif way == "gap":
        strides[axis] += few
    elif way == "step":
        strides = [2 * stride for stride in strides]
    elif way == "order" and t.dim() > 1:
        a, b = sorted(draw.sample(range(t.dim() - (t.dim() > 2)), 2))
        return t.transpose(a, b).contiguous().transpose(a, b)
    elif way == "far":
        rest = last_offset(t) - (t.shape[axis] - 1) * strides[axis]
        last = draw.choice([INT32, INT32 + 1, INT32 - 8, INT32 + 9, 2**40])
        strides[axis] = max(0, last - rest) // max(1, t.shape[axis] - 1)
    return memory(t.shape, strides, start, t.dtype)


def random_call(draw):
    """Returns a call of which at most one tensor is irregular."""
    batch, seq, q_heads, k_heads, head_dim, options = random_size(draw)
    dtype, options["rounding"] = draw.choice(DTYPES), draw.choice([0, 0, 1, 2])
    kind = draw.choice(["new", "in place", "blocks", "slots"])
    columns, table = options["rotary_dim"] // 2, draw.choice(["", "", "position", "token", "shared", "head"])
    if table == "head":
        k_heads = q_heads
    v_dim = draw.choice([*[head_dim] * 4, 2 * head_dim, head_dim // 2, 3 * head_dim + 1, draw.randint(1, 2 * head_dim)])
    sizes = {"q": (batch, seq, q_heads, head_dim), "k": (batch, seq, k_heads, head_dim)}
    if kind in ("blocks", "slots"):
        sizes["v"] = batch, seq, k_heads, v_dim
        for name, d in ("k_out", head_dim), ("v_out", v_dim):
            sizes[name] = batch + 1, 5000, k_heads, d
        options |= {"norm_v": draw.random() < 0.2, "quantised": (draw.random() < 0.2, draw.random() < 0.2)}
    elif kind == "new":
        sizes |= {"q_out": sizes["q"], "k_out": sizes["k"]}
    if kind == "slots":
        sizes["slots"] = batch, seq
    if draw.random() < 0.6:
        sizes["positions"] = draw.choice([(batch, seq), (seq,)])
    rows = {
        "position": (draw.choice([1, 5, 9000]),),
        "token": (batch, seq),
        "shared": (seq,),
        "head": (batch, seq, q_heads),
    }
    if table:
        sizes |= dict.fromkeys(("cos", "sin"), (*rows[table], columns))
    else:
        sizes["inv_freq"] = (columns,)

    def dtype_of(name):
        if name in ("k_out", "v_out") and options.get("quantised", (False, False))[name == "v_out"]:
            return torch.uint8
        return dtype if name[0] in "qkv" or dtype == torch.float64 else torch.float32

    if kind in ("new", "in place") and draw.random() < 0.2:
        sizes = {name: size for name, size in sizes.items() if name not in ("k", "k_out")}
    tensors = {name: torch.empty(size, dtype=dtype_of(name), device="meta") for name, size in sizes.items()}
    if draw.random() < 0.8:
        name = draw.choice(list(tensors))
        tensors[name] = irregular(draw, tensors[name])
    if kind == "slots" and draw.random() < 0.3:  # then their strides do not matter
        blocks, size = draw.choice([(2**20, 2**11 - 1), (2**20, 2**11), (2**33, 16)])
        for name in "k_out", "v_out":
            tensors[name] = memory((blocks, size, *sizes[name][2:]), (0, 0, sizes[name][3], 1))
    if "positions" in sizes and len(sizes["positions"]) == 1:
        tensors["positions"] = tensors["positions"].expand(batch, seq)
    if table == "shared":
        tensors |= {name: tensors[name].expand(batch, seq, columns) for name in ("cos", "sin")}
    norm = draw.choice(["", "", "norm", "over heads"])
    return Call(
        **{name: tensors.get(name) for name in ("q", "k", "v", "positions", "slots", "inv_freq")},
        **options,
        outputs=[tensors[name] for name in ("q_out", "k_out", "v_out") if name in tensors] or None,
        in_place=kind == "in place" and not norm,
        tables=[tensors["cos"], tensors["sin"]] if table else None,
        by_token=table in ("token", "shared"),
        norm=bool(norm),
        over_heads=norm == "over heads",
    )


def gradients(draw, batch, seq, q_heads, k_heads, head_dim):
    """Returns the gradients of q and k, and then q and k, of which at most one is irregular."""
    dtype = draw.choice(DTYPES)
    tensors = [meta(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads) * 2]
    if draw.random() < 0.6:
        i = draw.randrange(4 if k_heads else 1)
        tensors[i] = irregular(draw, tensors[i])
    return tensors


def heads_of(plan, heads):
    """Returns how often each head of q and k, and each piece of a head of v, is taken. The teams of a thread block take the
    heads of its share, a part of the list of all heads, in turns."""
    _, teams, _ = plan["block"]
    heads = [*heads[:2], heads[2] * (plan["v_pieces"] // plan["v_together"])]
    assert plan["starts"] == (0, heads[0], heads[0] + heads[1])
    counts = [0] * sum(heads)
    for first in range(0, plan["grid"][1] * plan["heads_per_thread_block"], plan["heads_per_thread_block"]):
        for team in range(teams):
            for head in range(first + team, min(first + plan["heads_per_thread_block"], len(counts)), teams):
                counts[head] += 1
    return counts


def channels_of(plan, call, norm):
    """Returns how often each channel of a head is written, with the channels of Chunk in device.cuh."""
    start, rotary_dim, head_dim = call.rotary_start, call.rotary_dim, call.head_dim

    def other(i):  # channel i of those that are not rotated
        return i if i < start else i + rotary_dim

    vector, chunks, rotated, threads = plan["vector"], plan["chunks"], plan["rotated"], plan["block"][0]
    counts = [0] * head_dim
    for thread in range(threads):
        for chunk in range(thread, chunks, threads if norm or vector == 1 else chunks):
            if chunk < rotated:
                firsts = [start + chunk * vector + half for half in (0, rotary_dim // 2)]
            else:
                firsts = [(chunk - rotated) * vector, (chunk - 2 * rotated + chunks) * vector]
                firsts = [other(first) for first in firsts if first < head_dim - rotary_dim]
            for channel in itertools.chain.from_iterable(range(first, first + vector) for first in firsts):
                counts[channel] += 1
    return counts


def assert_within_limits(plan, norm=False):
    x, y, z = plan["block"]
    assert 1 <= x * y * z <= THREADS and z <= MOST_Z and y & (y - 1) == 0
    assert plan["grid"][0] < 2**31 and max(plan["grid"][1:]) <= MOST_GRID and min(plan["grid"]) > 0
    if norm:  # the lanes of a head are in one warp, and every warp is full
        assert x & (x - 1) == 0 and x <= WARP and x * y * z % WARP == 0


@pytest.mark.parametrize("seed", range(100))
def test_a_plan_is_the_one_that_sizes_strides_and_addresses_allow(seed, plan):
    draw = random.Random(seed)
    for part in range(60):
        call = random_call(draw)
        p = plan(call, processors=draw.choice([1, 20, H200]))
        assert_accesses_are_right(p, call)
        assert_kernel_is_right(p, call)
        assert_batch_is_right(p, call)
        if part % 8 == 0:  # to count takes long
            assert_everything_is_taken_once(p, call)


def assert_accesses_are_right(p, call):
    assert (p["vector"], p["vectors"]) == call.vectors()
    assert p["wide_index"] == call.wide()
    if call.tables:
        # The strides of dimensions of one element count here, but if sequences of one token are merged, only those of sequences.
        steps = [t.stride()[:-1] for t in call.tables]
        if call.merges() and call.q.shape[1] == 1 and not call.by_position:
            steps = [(step[0], *step[2:]) for step in steps]
        starts = [t.stride(-1) == 1 and t.storage_offset() * t.itemsize % 16 == 0 for t in call.tables]
        aligned = [not any(n * t.itemsize % 16 for n in step) for t, step in zip(call.tables, steps, strict=True)]
        assert p["table_vectors"] == all(starts + aligned)
    assert p["position_range"] == call.position_range()
    assert p["narrow_slots"] == (not call.has_cache or math.prod(call.sides[1][1].shape[:2]) <= INT32)


def assert_kernel_is_right(p, call):
    """A general kernel reads tables by head, rounds every step, or copies a v with another head_dim. Only one that can do
    anything normalises v and writes to quantised caches, with or without a norm of q and k."""
    other_v = call.has_cache and call.v.shape[2] and call.v.shape[3] != call.head_dim
    assert p["any"] == (call.norm_v or any(call.quantised))
    assert p["general"] == bool(p["any"] or call.rounding or call.by_head or other_v or call.over_heads)
    v_dim = call.v.shape[3] if call.has_cache else 0
    assert p["v_pieces"] == math.ceil(v_dim / call.head_dim)
    assert p["v_together"] == (max(1, p["v_pieces"]) if call.norm_v or call.over_heads else 1)
    heads = [t.shape[2] if call.over_heads else 1 for t in (call.q, call.k) if t is not None]
    channels = [*(n * call.head_dim for n in heads), *[v_dim] * call.has_cache]
    assert all(p["per_channel"][i] == 1 / n for i, n in enumerate(channels) if n)
    if p["grid"] == (0, 0, 0) or call.over_heads:
        return
    # The kernel for wide heads is a general one for any layout, and sums over a v of another size.
    in_one_step = p["chunks"] <= WARP and not (p["general"] and (p["wide_index"] or not p["vectors"]))
    assert p["one_step"] == (in_one_step and not (call.norm_v and v_dim != call.head_dim))


def assert_batch_is_right(p, call):
    batch, seq = call.q.shape[:2]
    merged = call.merges()
    assert (p["batch"], p["seq"]) == ((1, batch * seq) if merged else (batch, seq))
    assert p["position_step"] == (0 if merged and seq == 1 and call.positions is None else 1)
    if merged:
        q, positions = call.q, call.positions
        assert p["strides"][0] == q.stride(0 if seq == 1 else 1)
        assert positions is None or p["strides"][5] == positions.stride(0 if seq == 1 else 1)


def assert_everything_is_taken_once(p, call):
    heads = [0 if t is None else t.shape[2] for t in (call.q, call.k, call.v)]
    in_place = (call.in_place and not call.has_cache) or (call.has_cache and heads[1] == 0)  # then other channels stay
    written = call.head_dim if call.takes_norm or not in_place else call.rotary_dim
    if written == 0:
        assert p["grid"] == (0, 0, 0)
        return
    first, expected = call.rotary_start, [1] * call.head_dim
    if written < call.head_dim:
        expected = [int(first <= channel < first + call.rotary_dim) for channel in range(call.head_dim)]
    assert channels_of(p, call, call.takes_norm) == expected
    x, y, z = p["block"]
    if call.over_heads:  # a thread block takes all heads of q, k or v of a token
        assert x & (x - 1) == 0 and x <= WARP and x * y == 256 and z == 1
        assert p["grid"] == (p["seq"], 3 if heads[2] and p["v_pieces"] else 2, p["batch"])
        return
    assert_within_limits(p, call.takes_norm)
    assert p["grid"][2] == p["batch"] and (p["grid"][0] - 1) * z < p["seq"] <= p["grid"][0] * z
    assert set(heads_of(p, heads)) == {1}


# ---- examples of plans ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 64), (80, 32), (66, 66), (7, 6), (4096, 4096)])
def test_the_order_of_sums_follows_from_sizes(sizes, dtype, plan, plan_backward, plan_tables):
    """Otherwise a layout could change bits. Vectors, chunks, lanes and parts are the same for every layout; only the width of
    accesses differs, and the assignment of tokens and rows to thread blocks."""
    head_dim, rotary_dim = sizes
    same = {"rotary_dim": rotary_dim}
    orders = {over_heads: set() for over_heads in (False, True)}
    for batch, seq in (1, 1), (2, 9), (600, 7):
        backward, tables = set(), set()
        for layout, x_layout in zip(LAYOUTS, [*LAYOUTS][::-1], strict=True):
            q, k, v = (meta(batch, seq, h, head_dim, dtype=dtype, layout=layout) for h in (6, 2, 2))
            x = [meta(batch, seq, h, head_dim, dtype=dtype, layout=x_layout) for h in (6, 2)]
            caches = [meta(5, 10000, 2, head_dim, dtype=dtype)] * 2
            for over_heads, order in orders.items():
                options = same | {"norm": True, "over_heads": over_heads}
                for call in Call(q, k, **options), Call(q, k, v, caches, **options):
                    p = plan(call)
                    order.add((p["vector"], p["chunks"], p["rotated"], p["block"][0]))
                p = plan_backward(Call(q, k, **options), x)
                order.add((p["vector"], p["chunks"], p["rotated"], p["block"][0]))
                backward.add((over_heads, p["block"], p["grid"], p["q"], p["k"], p["sums"]))
            tables.add(plan_tables(Call(q, k, outputs=x, **same), rows=seq, copies=batch)["block"][1])
        assert len(backward) == 2 and len(tables) == 1
    assert all(len(order) == 1 for order in orders.values())


@pytest.mark.parametrize("head_dim, wide", [(4096, True), (4, False)])
def test_so_many_pieces_of_v_need_numbers_of_64_bits(head_dim, wide, plan):
    k, v = (memory((1, 1, 2**20, d), (0, 0, 0, 1)) for d in (2, head_dim))
    assert plan(Call(meta(1, 1, 1, 2), k, v, [k, v]))["wide_index"] == wide


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "size", [(70000, 2, 2, 1, 8), (1, 1, 70000, 70000, 256), (1, 1, 131069, 1, 512), (1, 100, 500000, 3, 2), (1, INT32, 1, 1, 2), (INT32, 1, 1, 1, 2)]
)  # fmt: skip
def test_sizes_past_what_a_grid_has(size, layout, norm, plan):
    """Sequences past 65535 take another launch; if there are too many heads, each team takes more of them."""
    batch, seq, q_heads, k_heads, head_dim = size
    q, k = (meta(batch, seq, h, head_dim, layout=layout) for h in (q_heads, k_heads))
    for tensors, outputs in ([q, k], None), ([q, k, k], [meta(3, 7, k_heads, head_dim)] * 2):
        p = plan(Call(*tensors, outputs=outputs, norm=norm), processors=2**20)
        assert_within_limits(p, norm)
        assert p["grid"][2] == min(p["batch"], MOST_GRID)
        assert p["grid"][0] * p["block"][2] >= p["seq"]
        assert p["grid"][1] * p["heads_per_thread_block"] >= sum(t.shape[2] for t in tensors)


def steps_of(plan):
    """Returns the number of heads that a team takes."""
    return plan["heads_per_thread_block"] // plan["block"][1]


def of_tokens(tokens, heads, kind="rotate", dtype=torch.bfloat16, rotary_dim=128):
    """Returns a call with one sequence and heads of 128 channels."""
    q, k = (meta(1, tokens, h, 128, dtype=dtype) for h in heads)
    caches = [meta(1, 2**20, heads[1], 128, dtype=dtype)] * 2
    tensors = (q, k, k, caches) if "cache" in kind else (q, k)
    return Call(*tensors, norm="norm" in kind, rotary_dim=rotary_dim)


# (kind, tokens) -> (teams over heads, teams over tokens, heads that a team takes)
PLANS = {
    ("rotate", 1): (8, 1, 1),
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
    p = plan(of_tokens(tokens, (32, 8), kind, rotary_dim=64 if "64" in kind else 128))
    assert (*p["block"][1:], steps_of(p)) == PLANS[kind, tokens]


@pytest.mark.parametrize("kind", ["rotate", "cache", "norm cache"])
def test_few_threads_are_idle_and_many_tokens_share_their_angles(kind, plan):
    """A thread block has no teams for heads that do not exist, except a few. With one token, a thread takes one head; with many
    tokens, a thread block takes all heads of a token."""
    for heads in (32, 8), (8, 1), (64, 8), (40, 8), (71, 1), (1, 1), (28, 4), (14, 2):
        count = sum(heads) + ("cache" in kind) * heads[1]
        for tokens in 512, 1024, 2048, 3072, 4096, 32768:
            p = plan(of_tokens(tokens, heads, kind))
            assert 16 * count * tokens >= 15 * math.prod(p["grid"]) * math.prod(p["block"][1:]) * steps_of(p)
    for heads, dtype in itertools.product([(32, 8), (64, 8), (8, 8)], [torch.bfloat16, torch.float32]):
        one, many = (plan(of_tokens(tokens, heads, kind, dtype)) for tokens in (1, 2**20))
        assert steps_of(one) == 1
        assert many["grid"][1] == 1 and many["heads_per_thread_block"] >= sum(heads)
    few, more = (plan(of_tokens(128, (32, 8), kind), processors=n) for n in (H200, 1))
    assert math.prod(more["grid"]) < math.prod(few["grid"])  # the number of multiprocessors counts


def test_neighbours_in_memory_are_neighbours_in_a_thread_block(plan):
    """The neighbours are the heads of a token, or the tokens of a head."""
    for dtype, norm in itertools.product(DTYPES, (False, True)):
        _, heads, tokens = plan(Call(meta(1, 500, 32, 128, dtype=dtype), norm=norm))["block"]
        assert heads > tokens
        _, heads, tokens = plan(Call(meta(1, 500, 32, 128, dtype=dtype, layout="bhsd"), norm=norm))["block"]
        assert tokens > heads
        _, heads, tokens = plan(Call(meta(1, 9, 32, 128, layout="bhsd")[:, :1], norm=norm))["block"]
        assert heads > tokens  # there is no other token


# ---- the backward of the norm ----


@pytest.mark.parametrize("seed", range(600))
def test_the_backward_takes_every_token_and_head_once(seed, plan_backward):
    draw = random.Random(seed)
    batch, seq, q_heads, k_heads, head_dim, rotated = random_size(draw)
    rounding, over_heads = draw.randrange(2), draw.random() < 0.25
    q, k, *x = gradients(draw, batch, seq, q_heads, k_heads, head_dim)
    call = Call(q, k, **rotated, rounding=rounding, norm=True, over_heads=over_heads)
    p = plan_backward(call, x)
    assert (p["vector"], p["vectors"]) == call.vectors(*x)
    assert p["wide_index"] == call.wide(*(t for t in x if t.shape[2]))
    assert p["general"] == bool(rounding or over_heads)
    assert_within_limits(p, norm=True)
    (lanes, teams, one), tokens = p["block"], batch * seq
    wide = p["chunks"] > WARP and not over_heads  # then a thread block is one team, which takes one head at a time
    at_once = 1 if wide or rounding or over_heads else 2
    assert lanes * teams == (WARP if wide else THREADS) and one == 1
    assert p["grid"] == (p["q"][0] + p["k"][0], 1, 1)
    assert p["grid"][0] <= (384 if over_heads else MOST_PARTS) + 1
    sums = {name: (h if over_heads else 1) * head_dim for name, h in (("q", q_heads), ("k", k_heads))}
    assert p["sums"] == p["q"][0] * sums["q"] + p["k"][0] * sums["k"]
    shared = [n for n in sums.values() if over_heads and n <= 5120]
    assert p["dynamic_shared"] == 8 * max(shared, default=0)
    for heads, (parts, part_tokens, head_teams) in (q_heads, p["q"]), (k_heads, p["k"]):
        if heads == 0:
            assert parts == 0
            continue
        assert (parts - 1) * part_tokens < tokens <= parts * part_tokens
        assert head_teams & (head_teams - 1) == 0 and teams % head_teams == 0
        assert head_teams == 1 or (head_teams - 1) * at_once < 2 * heads
    assert channels_of(p, call, norm=True) == [1] * head_dim


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (64, 8), (8, 8), (3, 24)], ids=str)
def test_the_parts_of_q_and_k_take_about_as_long(heads, plan_backward):
    """Otherwise a few thread blocks would run when the others are done. Many parts even out what is left."""
    for tokens in 512, 1024, 2048, 3072, 4096, 32768:
        x = [meta(1, tokens, h, 128, dtype=torch.bfloat16) for h in heads]
        p = plan_backward(Call(*x, norm=True), x)
        of_q, of_k = (h * p[name][1] for h, name in zip(heads, "qk", strict=True))  # heads of a part
        assert of_q == of_k
        assert min(tokens * sum(heads) // 32, MOST_PARTS) / 2 <= p["grid"][0] <= MOST_PARTS + 1


# ---- the gradients of tables ----


@pytest.mark.parametrize("seed", range(400))
def test_gradients_of_tables_take_every_head_token_and_channel_once(seed, plan_tables):
    draw = random.Random(seed)
    batch, seq, q_heads, k_heads, head_dim, rotated = random_size(draw)
    rotary_dim = rotated["rotary_dim"]
    listed, own, by_head = (draw.random() < 0.5 for _ in range(3))
    if by_head:
        listed, k_heads = False, min(k_heads, 1) * q_heads
        rotated["tables"] = [memory((batch, seq, q_heads, rotary_dim // 2), (0, 0, 0, 1))] * 2
    q, k, *x = gradients(draw, batch, seq, q_heads, k_heads, head_dim)
    entries, copies = (batch * seq, 1) if own else (seq, batch)
    rows = draw.choice([1, 16, 5000]) if listed else entries
    call = Call(q, k, outputs=x, **rotated)
    p = plan_tables(call, rows, copies, entries, listed)
    rows *= q_heads if by_head else 1
    if rotary_dim == 0:
        assert p["grid"] == (0, 0, 0)
        return
    vector, vectors = call.vectors(*x)
    assert (p["vectors"], p["vector"]) == (vectors, vector if vectors else 1)
    (x, y, z), blocks, per_row = p["block"], p["grid"][0], p["blocks_per_row"]
    assert p["grid"][1:] == (1, 1) and 1 <= x * y * z <= 256 and z <= MOST_Z
    assert p["chunks"] == p["rotated"] == rotary_dim // 2 // p["vector"]
    assert (per_row - 1) * x < p["chunks"] <= per_row * x
    assert (blocks // per_row - 1) * z < rows <= blocks // per_row * z and blocks % per_row == 0


# (batch, seq, heads of q, heads of k, head_dim) -> rows, copies and entries of the tables
FILLING = {
    "batch 8, positions of all": ((8, 2048, 32, 8, 128), (2048, 8, 2048)),
    "batch 8, positions of each": ((8, 2048, 32, 8, 128), (2048, 1, 8 * 2048)),
    "a long table and few heads": ((1, 131072, 1, 1, 64), (131072, 1, 131072)),
    "a small table and many tokens of each row": ((64, 4096, 12, 12, 64), (64, 64, 4096)),
}


@pytest.mark.parametrize("name", FILLING)
def test_gradients_of_tables_fill_the_gpu(name, plan_tables):
    """There are two thread blocks of 256 threads for each multiprocessor, or for small tables at least 128 in all, and a
    thread sums more than one head before the threads add up their sums."""
    (batch, seq, q_heads, k_heads, head_dim), (rows, copies, entries) = FILLING[name]
    for dtype in torch.bfloat16, torch.float32:
        q, k = (meta(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads))
        p = plan_tables(Call(q, k), rows, copies, entries, entries != rows)
        x, y, z = p["block"]
        assert p["vectors"] and x * p["vector"] * dtype.itemsize >= 32  # adjacent bytes
        assert math.prod(p["grid"]) * x * y * z >= 256 * (128 if rows == 64 else 2 * H200)
        assert y <= max(1, copies * -(-entries // rows) * (q_heads + k_heads) // 2)
