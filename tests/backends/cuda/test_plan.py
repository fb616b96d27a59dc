"""Tests of the launch plans of CUDA, which follow from sizes, strides and addresses alone.

The emulator runs the kernels with plans for one multiprocessor, and shows that they compute the right values. These
tests plan random calls for whole GPUs: all heads and tokens must be taken, in the widest accesses that are
aligned, and within the limits of CUDA. They need --emulate, because the emulator's module has the plans.
"""

import itertools
import random
import re
from dataclasses import dataclass, replace

import pytest
import torch
from calls import DTYPES, LAYOUTS, tensor
from cases import EXHAUSTIVE, ROOT

from torch_rope import _C

ORDER = [torch.float16, torch.bfloat16, torch.float32, torch.float64]  # the order of DType in csrc/args.h
H200 = 132  # multiprocessors
THREADS, WARP, MOST_Z, MOST_GRID = 128, 32, 64, 65535
GROUP_THREADS, HELD = 512, 32  # held: the channels that a thread has of a group
# In the backward of the norm: the most threads that take a group, those that a multiprocessor of an H100 holds, and the
# least tokens of a part of a norm over all heads.
BACKWARD_GROUP_THREADS, BACKWARD_THREADS, LEAST_TOKENS = 224, 384, 8
INT32 = 2**31 - 1
SEEDS = range(1000 if EXHAUSTIVE else 100)

pytestmark = pytest.mark.emulator


# ---- calls with tensors that have no memory ----


def meta(*shape, dtype=torch.float32, layout="bshd"):
    """Returns a tensor [batch, seq, heads, head_dim] without memory."""
    with torch.device("meta"):
        return tensor(layout, shape, dtype, "meta")


def is_aligned(t, width):
    """Returns whether neighbouring channels are adjacent, and all heads begin at multiples of `width` bytes."""
    strides = [t.storage_offset(), *(stride for n, stride in zip(t.shape[:-1], t.stride(), strict=False) if n > 1)]
    return t.stride(-1) == 1 and all(stride * t.itemsize % width == 0 for stride in strides)


@dataclass
class Call:
    """The arguments of a call. It rotates in place, or with a v only q."""

    q: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    outputs: tuple | None = None  # the results of q and k, or with a v the two caches
    rotary_dim: int | None = None
    rotary_start: int = 0
    positions: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    tables: tuple | None = None  # by position, or by head if they have four dimensions
    inv_freq: torch.Tensor | None = None
    norm: bool = False
    over_heads: bool = False  # of the norm
    norm_v: bool = False
    quantised: tuple = (False, False)  # the caches of k and v
    factor: bool = False  # of q
    weight_v: bool = False  # of the norm of v
    weight_offset: bool = False
    inverse: bool = False
    attention_factor: bool = False
    rounding: int = 0  # Rounding in csrc/args.h
    offset: int = 0
    scale_stride: int = 0
    weight_strides: tuple = (0, 1)  # head, channel

    def __post_init__(self):
        self.inputs = [self.q, self.k, self.v]
        self.results = [self.q, self.k] if self.outputs is None else [*self.outputs]
        self.results = [self.q, *self.results] if self.v is not None else [*self.results, None]
        self.head_dim, self.v_dim = self.q.shape[3], 0 if self.v is None else self.v.shape[3]
        self.rotary_dim = self.head_dim // 2 * 2 if self.rotary_dim is None else self.rotary_dim

    def arguments(self):
        """Returns the arguments of the functions of plan.cpp."""
        addresses = {}  # multiples of 16

        def given(t, dims):
            if t is None:
                return None
            address = addresses.setdefault(id(t), 2**40 + len(addresses) * 2**36)
            return address + t.storage_offset() * t.itemsize, [0] * (dims - t.dim()) + list(t.stride())

        tables = [t if t.dim() == 4 else t.unsqueeze(-2).expand(len(t), 2, -1) for t in self.tables or ()]
        by_head = tables and self.tables[0].dim() == 4
        flags = (
            self.norm,
            self.over_heads,
            self.norm_v,
            *self.quantised,
            self.factor,
            self.weight_v,
            self.weight_offset,
            self.inverse,
            self.attention_factor,
        )
        return (
            ORDER.index(self.q.dtype),
            (*self.q.shape[:2], self.head_dim, self.rotary_dim, self.rotary_start, self.v_dim),
            [0 if t is None else t.shape[2] for t in self.inputs],
            [(given(x, 4), given(out, 4)) for x, out in zip(self.inputs, self.results, strict=True)],
            (0, 0) if self.v is None else self.results[1].shape[:2],
            given(self.positions, 2),
            given(self.slots, 2),
            *(given(t, 4) for t in tables or (None, None)),
            3 if by_head else 0 if tables else 2,
            len(tables[0]) if tables else 0,
            1 if self.inv_freq is None else self.inv_freq.stride(0),
            sum(bit << i for i, bit in enumerate(flags)),
            self.rounding,
            self.offset,
            self.scale_stride,
            self.weight_strides,
        )

    def assert_accesses(self, plan, more=()):
        """Asserts that vectors are as wide as they can be. more: further tensors of the call."""
        tensors = [t for t in (*self.inputs, *self.results, *more) if t is not None and t.shape[2]]
        norm = self.norm or self.norm_v or bool(more)
        full = 16 // self.q.itemsize

        def fits(n):
            sizes = self.rotary_start, self.rotary_dim // 2, self.head_dim
            return n > 1 and all(size % n == 0 for size in sizes) and (norm or self.head_dim <= 2 * n * (THREADS - 1))

        def reaches(n):
            return all(t.shape[3] % n == 0 and is_aligned(t, n * t.itemsize) for t in tensors)

        if norm:  # the order of its sums follows from sizes, so the length of a vector does too
            expected = (full, reaches(full)) if fits(full) else (1, False)
        else:
            expected = next(((n, True) for n in (full, full // 2) if fits(n) and reaches(n)), (1, False))
        assert (plan["vector"], plan["vectors"]) == expected


def plan(call, processors=H200):
    return _C.plan(processors, *call.arguments())


def plan_backward(call, x):
    """Plans the backward of the norm. x: the tensors that were normalised."""
    return _C.plan_backward([replace(call, q=t).arguments()[3][0][0] for t in x], *call.arguments())


def assert_within_limits(plan, norm=False, most=GROUP_THREADS):
    """most: the most threads that take a group together, which is all heads of a token or a wide head."""
    x, y, z = plan["block"]
    assert plan["grid"][0] < 2**31 and plan["grid"][1] <= MOST_GRID and min(plan["grid"]) > 0
    if norm:  # every warp is full, and without groups the lanes of a head are in one
        assert x * y * z % WARP == 0 and (plan["by_block"] or (x <= WARP and x & (x - 1) == 0))
    if not plan["by_block"]:
        assert 1 <= x * y * z <= THREADS and z <= MOST_Z and y & (y - 1) == 0
    else:
        assert x * y <= most and x >= min(plan["chunks"], most) and z == 1


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
    """Returns a tensor of the same sizes that is not aligned, not adjacent, or has an element offset next to 2^31."""
    strides, start, way = list(t.stride()), 0, draw.choice(["start", "gap", "step", "far", "far"])
    axes = [d for d, n in enumerate(t.shape) if n > 1]
    # The stride of a dimension of one element does not matter.
    axis = draw.choice(axes if axes and draw.random() < 0.7 else range(t.dim()))
    few = draw.choice([1, 8 // t.itemsize, 16 // t.itemsize])
    if way == "start":
        start = few
    elif way == "gap":
        strides[axis] += few
    elif way == "step":
        strides = [2 * stride for stride in strides]
    else:
        others = (max(n - 1, 0) * strides[d] for d, n in enumerate(t.shape) if d != axis)
        last = draw.choice([INT32, INT32 + 1, INT32 - 8, INT32 + 9, 2**40])
        strides[axis] = max(0, last - sum(others)) // max(1, t.shape[axis] - 1)
    return torch.empty(0, device="meta", dtype=t.dtype).as_strided(t.shape, strides, start)


def random_call(draw):
    """Returns a call of which at most one tensor is irregular."""
    batch, seq, q_heads, k_heads, head_dim, options = random_size(draw)
    dtype, kind = draw.choice(DTYPES), draw.choice(["new", "in place", "blocks", "slots"])
    columns, source = options["rotary_dim"] // 2, draw.choice(["inv_freq", "position", "head"])
    if source == "head":
        k_heads = q_heads
    tensors = {
        "q": meta(batch, seq, q_heads, head_dim, dtype=dtype),
        "k": meta(batch, seq, k_heads, head_dim, dtype=dtype),
        "positions": torch.empty(batch, seq, device="meta"),
        "inv_freq": torch.empty(columns, device="meta"),
    }
    if kind == "new":
        tensors |= {f"{name}_out": torch.empty_like(tensors[name]) for name in "qk"}
    if kind in ("blocks", "slots"):
        v_dim = draw.choice([*[head_dim] * 4, 2 * head_dim, 3 * head_dim + 1, draw.randint(1, 2 * head_dim)])
        tensors["v"] = meta(batch, seq, k_heads, v_dim, dtype=dtype)
        options |= {"norm_v": draw.random() < 0.2, "quantised": (draw.random() < 0.2, draw.random() < 0.2)}
        for name, d, quantised in zip("kv", (head_dim, v_dim), options["quantised"], strict=True):
            tensors[f"{name}_out"] = meta(batch + 1, 5000, k_heads, d, dtype=torch.uint8 if quantised else dtype)
    if kind == "slots":
        tensors["slots"] = torch.empty(batch, seq, device="meta")
    if source != "inv_freq":
        rows = (batch, seq, q_heads) if source == "head" else (draw.choice([1, 5, 9000]),)
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        tensors |= {name: torch.empty(*rows, columns, dtype=table_dtype, device="meta") for name in ("cos", "sin")}
    if draw.random() < 0.8:
        name = draw.choice(list(tensors))
        tensors[name] = irregular(draw, tensors[name])
    outputs = [tensors.pop(name) for name in ("q_out", "k_out", "v_out") if name in tensors]
    tables = [tensors.pop(name) for name in ("cos", "sin") if name in tensors]
    norm = draw.choice(["", "", "norm", "over heads"])
    options |= {"norm": bool(norm), "over_heads": norm == "over heads"}
    return Call(**tensors, **options, outputs=outputs or None, tables=tables or None)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_takes_every_head_and_token_in_the_widest_accesses(seed):
    draw = random.Random(seed)
    for _ in range(20):
        call = random_call(draw)
        p = plan(call, processors=draw.choice([1, 20, H200]))
        call.assert_accesses(p)
        assert not p["table_vectors"] or all(is_aligned(t, 16) for t in call.tables)
        norm, (batch, seq) = call.norm or call.norm_v, call.q.shape[:2]
        heads = [0 if t is None else t.shape[2] for t in call.inputs]
        if p["chunks"] == 0:
            assert p["grid"] == (0, 0, 0)
        elif p["by_block"]:  # a thread block takes all heads of q, k or v of a token, or a wide head
            assert_within_limits(p, norm)
            groups = {3 if heads[2] else 2} if call.over_heads else {sum(heads), p["listed"]}  # v may be cut into more
            assert p["grid"][::2] == (p["seq"], batch * seq // p["seq"]) and p["grid"][1] in groups
            held = -(-max(heads) // p["block"][1]) * 2 * p["vector"]
            assert p["general"] or not call.over_heads or (held <= HELD and not call.norm_v)
        else:
            assert_within_limits(p, norm)
            assert not call.over_heads
            assert p["block"][0] >= min(p["chunks"], WARP if norm else THREADS)
            (tokens, shares, sequences), (_, teams, z) = p["grid"], p["block"]
            assert p["listed"] == heads[0] + heads[1] + heads[2] * -(-call.v_dim // call.head_dim)
            of_v = p["listed"] - heads[0] - heads[1]  # a wide v may be cut into more heads
            lists = [p["listed"]] if p["general"] else [*heads[:2], of_v]
            for n, of_list in zip(lists, p["shares"], strict=False):
                assert (of_list - 1) * teams * p["steps"] < n <= of_list * teams * p["steps"] or n == of_list == 0
            assert shares == sum(p["shares"])
            assert sequences * p["seq"] == batch * seq and p["seq"] in (seq, batch * seq)
            assert (tokens - 1) * z < p["seq"] <= tokens * z


# ---- which calls are usual ----


def model_call(q=(2, 7, 8, 128), dtype=torch.bfloat16, v=None, block_size=None, cached=None, **options):
    """Returns a call as models make it.

    v: the heads and head_dim of a v. block_size: that of caches whose blocks are apart. cached: the dtype of quantised ones.
    """
    q = q if isinstance(q, torch.Tensor) else meta(*q, dtype=dtype)
    batch, seq, _, head_dim = q.shape
    k_heads = v[0] if v else 2
    given = {"k": meta(batch, seq, k_heads, head_dim, dtype=dtype), "positions": torch.empty(batch, seq, device="meta")}
    if "inv_freq" not in options:
        given["tables"] = [torch.empty(4096, options.get("rotary_dim", head_dim) // 2, device="meta")] * 2
    if v:
        dims, size = ((k_heads, head_dim), v), block_size or 100
        whole = [torch.empty(9, 1 + bool(block_size), size, *d, dtype=cached or dtype, device="meta") for d in dims]
        given["outputs"] = [t[:, 0] for t in whole]
        given |= {"slots": torch.empty(batch, seq, device="meta"), "quantised": (bool(cached),) * 2}
        given["v"] = meta(batch, seq, *v, dtype=dtype)
    return Call(q, **given | options)


BY_HEAD = {"tables": [torch.empty(2, 7, 8, 64, device="meta")] * 2, "k": meta(2, 7, 8, 128, dtype=torch.bfloat16)}
BYTES, FREQ = torch.uint8, torch.empty(64, dtype=torch.float64, device="meta")
USUAL = [
    {},
    {"dtype": torch.float32},
    {"inv_freq": FREQ, "norm": True},
    {"rotary_dim": 64},
    {"q": (2, 7, 8, 192), "rotary_dim": 64, "rotary_start": 128},
    {"rounding": 1},
    {"inverse": True, "attention_factor": True},
    {"attention_factor": True, "norm": True, "inv_freq": FREQ},
    {"norm": True, "norm_v": True, "v": (2, 128)},
    {"norm": True, "rounding": 2, "v": (2, 128)},
    {"norm": True, "weight_offset": True, "inv_freq": FREQ},
    {"norm": True, "rounding": 1, "over_heads": True},
    {"v": (2, 128), "cached": BYTES, "block_size": 16},
    {"v": (2, 128), "block_size": 24, "slots": None},
    {"inv_freq": FREQ, "v": (2, 128), "cached": BYTES, "norm": True},
    {"q": (3, 1, 16, 64), "v": (1, 512), "block_size": 64},  # MLA
    {"q": (2, 7, 8, 512), "norm": True},
    {"q": (2, 7, 8, 1024), "norm": True},  # a thread block takes a head
    {"q": (2, 7, 64, 128), "over_heads": True, "norm": True, "v": (2, 128), "cached": BYTES},
    {"q": (2, 7, 64, 128), "over_heads": True, "norm": True, "dtype": torch.float32, "inv_freq": FREQ},
    {"q": (2, 7, 1, 8192), "over_heads": True, "norm": True},
    {"over_heads": True, "norm": True, **BY_HEAD},
    {"q": meta(2, 7, 10, 128, dtype=torch.bfloat16)[:, :, :8]},
]
FAR = torch.empty(0, dtype=torch.bfloat16, device="meta").as_strided((2, 7, 8, 128), (8, 16, 2**31 + 8, 1))
GENERAL = {  # calls that meet a rule of general_rules() in csrc/cuda/rotate_plan.h, and none before it
    "x is float64, or is not accessed in 16 bytes": [
        {"dtype": torch.float64},
        {"q": (2, 7, 8, 72)},
        {"q": (2, 7, 8, 96), "rotary_dim": 24},
        {"q": meta(2, 7, 8, 256, dtype=torch.bfloat16)[..., ::2]},
    ],
    "v has another head_dim than k": [{"v": (2, 96)}],
    "a thread block cannot hold a group": [
        {"q": (2, 7, 129, 128), "over_heads": True, "norm": True},
        {"q": (2, 7, 1, 16384), "norm": True},
    ],
    "the norm is over all heads, and v has a norm too": [
        {"over_heads": True, "norm": True, "norm_v": True, "v": (2, 128)}
    ],
    "thread blocks take more than 65,535 heads of a token": [{"q": (1, 1, 65534, 1024), "norm": True}],
    "tables are by head, but thread blocks take no groups": [BY_HEAD],
    "the rows of cos and sin are not aligned to 16 bytes": [
        {"tables": [torch.empty(4096, 66, device="meta")[:, :64]] * 2}
    ],
    "cos and sin have other strides than each other": [
        {"tables": [torch.empty(4096, n, device="meta")[:, :64] for n in (64, 128)]}
    ],
    "the frequencies are none, not adjacent, or not aligned to 16 bytes": [
        {"inv_freq": torch.empty(128, device="meta")[::2]},
        {"inv_freq": FREQ[:0], "rotary_dim": 0, "norm": True},
    ],
    "inverse, or an attention_factor of tables, is used with a norm or a cache": [
        {"inverse": True, "norm": True},
        {"inverse": True, "v": (2, 128), "inv_freq": FREQ},
        {"attention_factor": True, "norm": True},
        {"attention_factor": True, "v": (2, 128)},
    ],
    "q has a factor": [{"factor": True}],
    "the norm of v has a weight": [{"norm": True, "norm_v": True, "weight_v": True, "v": (2, 128)}],
    "a thread block takes a group, and weights have an offset": [
        {"norm": True, "weight_offset": True, "q": (2, 7, 8, 1024)},
        {"norm": True, "weight_offset": True, "over_heads": True},
    ],
    "eager_rounding is used with frequencies": [{"inv_freq": FREQ, "rounding": 1}],
    "eager_rounding is used with a norm of float32, or with a cache and no norm": [
        {"rounding": 1, "v": (2, 128)},
        {"rounding": 1, "norm": True, "dtype": torch.float32},
    ],
    "the blocks of a cache are neither adjacent nor of 2^n cells": [
        {"v": (2, 128), "block_size": 24, "positions": None}
    ],
    "no position is allowed, or 2^31 of them": [
        {"tables": [torch.empty(n, 64, device="meta")] * 2} for n in (0, 2**31)
    ],
    "results are in 8 bits, and x is float32, or eager_rounding is used": [
        {"dtype": torch.float32, "v": (2, 128), "cached": BYTES},
        {"rounding": 1, "norm": True, "v": (2, 128), "cached": BYTES},
    ],
    "the scales of a side are not adjacent": [{"v": (2, 128), "cached": BYTES, "scale_stride": 2}],
    "the weights of q and k are not adjacent, not aligned to 16 bytes, or of two dtypes or strides": [
        {"norm": True, "weight_strides": (0, 2)},
        {"norm": True, "over_heads": True, "weight_strides": (132, 1)},
    ],
    "offset, a size or a stride does not fit in 31 bits": [
        {"offset": 2**31},
        {"offset": -(2**31) - 1},
        {"q": FAR},
        {"positions": torch.empty(0, device="meta").as_strided((2, 7), (2**31, 1))},
    ],
}


@pytest.mark.parametrize("changes", USUAL, ids=str)
def test_what_models_do_is_usual(changes):
    assert plan(model_call(**changes))["general"] is None


@pytest.mark.parametrize("rule, changes", [(rule, c) for rule, calls in GENERAL.items() for c in calls], ids=str)
def test_a_call_is_general_by_a_rule(rule, changes):
    assert plan(model_call(**changes))["general"] == rule


def test_the_rules_are_tried_and_are_those_of_the_page():
    section = (ROOT / "docs/cuda.md").read_text().split("## Usual calls")[1].split("\n## ")[0]
    found = [" ".join(item.split()).rstrip(";.") for item in re.findall(r"^- (.*(?:\n  .*)*)", section, re.M)]
    assert found == plan(model_call())["rules"] == list(GENERAL)


# ---- examples of plans ----


def test_sequences_of_one_token_share_thread_blocks():
    """Those of a decode step do, and long sequences with positions that are adjacent in memory."""
    for seq, layout, has_positions, merged in [
        (1, "bhsd", False, True),
        (7, "bshd", True, True),
        (7, "bhsd", True, False),
        (7, "bshd", False, False),  # each sequence begins at position 0
    ]:
        positions = torch.empty(300, seq, device="meta") if has_positions else None
        p = plan(Call(meta(300, seq, 8, 64, layout=layout), positions=positions, inv_freq=FREQ[:32]))
        assert p["grid"][2] == (1 if merged else 300) and p["seq"] == (300 * seq if merged else seq)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "size", [(70000, 2, 2, 1, 8), (1, 1, 70000, 70000, 256), (1, 1, 140000, 1, 512), (1, INT32, 1, 1, 2)]
)
def test_sizes_past_what_a_grid_has(size, norm):
    """Sequences past 65535 take another launch; if there are too many heads, each team takes more of them."""
    batch, seq, q_heads, k_heads, head_dim = size
    for layout in "bshd", "bhsd":
        q, k = (meta(batch, seq, h, head_dim, layout=layout) for h in (q_heads, k_heads))
        p = plan(Call(q, k, norm=norm), processors=2**20)
        assert_within_limits(p, norm)
        assert p["grid"][2] * p["seq"] == batch * seq
        assert p["grid"][0] * p["block"][2] >= p["seq"]


def of_tokens(tokens, heads, kind):
    """Returns the plan of a call with one sequence and heads of 128 channels."""
    q, k = (meta(1, tokens, h, 128, dtype=torch.bfloat16) for h in heads)
    caches = [meta(1, 2**20, heads[1], 128, dtype=torch.bfloat16)] * 2
    tables = None if "inv_freq" in kind else [torch.empty(2**20, 64, device="meta")] * 2
    options = {"inv_freq": FREQ} if tables is None else {"tables": tables}
    return plan(Call(q, k, *((k, caches) if "cache" in kind else ()), norm="norm" in kind, **options))


# (kind, heads, tokens) -> (teams over heads, teams over tokens, thread blocks of a token)
# On an H100 a prototype of the rotation was fastest with the plans of 1 and of 2,048 tokens. The others were not measured.
PLANS = {
    ("rotate", (32, 8), 1): (16, 1, 3),
    ("rotate", (32, 8), 2048): (16, 1, 3),
    ("rotate", (32, 8), 8192): (16, 1, 2),
    ("rotate", (71, 1), 1): (8, 1, 10),  # 72 heads, and 80 teams
    ("inv_freq", (32, 8), 1): (16, 1, 3),
    ("inv_freq", (32, 8), 4096): (16, 1, 2),
    ("cache", (32, 8), 1): (8, 1, 6),
    ("norm cache", (32, 8), 8192): (8, 2, 3),
    ("norm cache", (14, 2), 512): (2, 8, 9),
}


@pytest.mark.parametrize("kind, heads, tokens", PLANS, ids=str)
def test_the_plan_of_many_tokens(kind, heads, tokens):
    """A thread takes one head of a few tokens. A thread block takes all heads of a side of one of many tokens."""
    p = of_tokens(tokens, heads, kind)
    assert (*p["block"][1:], p["grid"][1]) == PLANS[kind, heads, tokens] and (not p["general"])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_in_memory_are_neighbours_in_a_thread_block(dtype, norm):
    """The neighbours are the heads of a token, or the tokens of a head."""
    for seq, layout, by_heads in (500, "bshd", True), (500, "bhsd", False), (1, "bhsd", True):
        _, heads, tokens = plan(Call(meta(1, 500, 32, 128, dtype=dtype, layout=layout)[:, :seq], norm=norm))["block"]
        assert heads > tokens if by_heads else tokens > heads


# ---- the gradients of norms ----


@pytest.mark.parametrize("over_heads", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_order_of_sums_follows_from_sizes(dtype, over_heads):
    """Otherwise a layout could change bits: which parts a sum has, and how many threads share it."""
    for head_dim, seq in itertools.product((64, 7, 4096), (1, 9, 4000)):
        backward = set()
        for layouts in zip(LAYOUTS, [*LAYOUTS][::-1], strict=True):
            q, k, *x = (meta(2, seq, h, head_dim, dtype=dtype, layout=layout) for layout in layouts for h in (6, 2))
            p = plan_backward(Call(q, k, norm=True, over_heads=over_heads), x)
            backward.add(tuple(p[name] for name in ("vector", "chunks", "block", "q", "k")))
        assert len(backward) == 1


def most_parts(p):
    """Returns how many thread blocks of a plan an H100 holds at a time."""
    return H200 * (BACKWARD_THREADS // (p["block"][0] * p["block"][1]))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_backward_of_a_norm_takes_every_token(seed):
    draw = random.Random(seed)
    for _ in range(4):
        batch, seq, q_heads, k_heads, head_dim, rotated = random_size(draw)
        dtype = draw.choice(DTYPES)
        tensors = [meta(batch, seq, h, head_dim, dtype=dtype) for h in (q_heads, k_heads) * 2]
        if draw.random() < 0.6:
            i = draw.randrange(4 if k_heads else 1)
            tensors[i] = irregular(draw, tensors[i])
        q, k, *x = tensors  # the gradients of q and k, and then q and k
        call = Call(q, k, **rotated, norm=True, over_heads=draw.random() < 0.25)
        p = plan_backward(call, x)
        call.assert_accesses(p, x)
        vectors = q.dtype != torch.float64 and p["vector"] * q.itemsize == 16
        held = -(-max(q_heads, k_heads) // p["block"][1]) * 2 * p["vector"] if call.over_heads else 0
        fits = held <= HELD and p["chunks"] <= max(WARP, p["block"][0]) and call.rotary_dim > 0
        near = all(stride < INT32 / 16 for t in (q, k, *x) for stride in t.stride())
        assert (not p["general"]) <= (vectors and p["vectors"] and fits)
        assert not near or (not p["general"]) == (vectors and p["vectors"] and fits)
        assert p["by_block"] == (call.over_heads or (vectors and p["chunks"] > WARP))
        assert_within_limits(p, norm=True, most=BACKWARD_GROUP_THREADS)
        assert p["grid"] == (p["q"][0] + p["k"][0], 1, 1)
        assert p["grid"][0] <= most_parts(p)
        for heads, (parts, tokens, teams) in (q_heads, p["q"]), (k_heads, p["k"]):
            assert (parts - 1) * tokens < batch * seq <= parts * tokens if heads else parts == 0
            assert p["block"][1] % teams == 0


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (8, 8), (3, 24)], ids=str)
def test_the_parts_of_q_and_k_take_about_as_long(heads):
    """And a GPU takes all at a time. Otherwise a few thread blocks would run when the others are done."""
    for tokens, over_heads in itertools.product((512, 2048, 32768), (False, True)):
        x = [meta(1, tokens, h, 128, dtype=torch.bfloat16) for h in heads]
        p = plan_backward(Call(*x, norm=True, over_heads=over_heads), x)
        of_q, of_k = (h * p[name][1] for h, name in zip(heads, "qk", strict=True))  # heads of a part
        assert of_q == of_k
        least = LEAST_TOKENS * max(heads) if over_heads else 32  # heads of a part
        assert min(tokens * sum(heads) / least, most_parts(p)) * 0.6 <= p["grid"][0] <= most_parts(p)
