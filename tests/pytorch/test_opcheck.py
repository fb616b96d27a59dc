"""Tests that every operator agrees with its schema and its fake implementation, and is registered for all of torch."""

import pytest
import torch
from cases import CACHES, EXHAUSTIVE, LAYOUTS, OPERATORS, SOURCES, covering, name_of, set_apart, some_slots, supported
from programs import DIM, HEADS, IN_PLACE, KV_HEADS, ROTATING, copies, norm_weights, operands, rope, tables
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_rope

pytestmark = [pytest.mark.heart, pytest.mark.usefixtures("_memory_of_others")]


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_is_registered_for_all_dispatch_keys_that_it_needs(op):
    """An operator needs a kernel, a fake implementation, autograd and vmap.

    An in-place operator needs ADInplaceOrView and Negative too.
    test_parallel.py tests the rules for DTensor, and test_flops.py the flop formulas.
    """
    keys = ["CPU", "Meta", "Autograd", "FuncTorchBatched"]
    keys += ["ADInplaceOrView", "Negative"] if op in IN_PLACE else []
    assert [key for key in keys if not torch._C._dispatch_has_kernel_for_dispatch_key(f"rope::{op}", key)] == []
    assert torch.Tag.pt2_compliant_tag in getattr(rope, op).default.tags


# ---- opcheck ----


def opcheck(op, args, keywords, device):
    tests = ["test_schema", "test_faketensor"]
    if device != "mps":  # torch says itself that this check does not support mps
        tests.append("test_autograd_registration")
    if device != "mps" or EXHAUSTIVE:  # tracing with autograd and symbolic sizes is the same for every device
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(rope, op).default, args, keywords, test_utils=tests)


EXPANDED = {  # layouts with stride 0, which may be read but not written
    "batch expanded": lambda shape, dtype, device: torch.randn(1, *shape[1:], device=device).expand(shape),
    "heads expanded": lambda shape, dtype, device: torch.randn(*shape[:2], 1, shape[3], device=device).expand(shape),
}
READ_LAYOUTS = LAYOUTS | EXPANDED

NEEDS = {  # which operands require grad; with "angles" cos, sin and inv_freq do too
    "nothing": lambda i, x: False,
    "the first": lambda i, x: i == 0,
    "weights": lambda i, x: i in (2, 3),
    "all": lambda i, x: True,
    "angles": lambda i, x: True,
}
NEEDS_OF = {
    "rotate": ["nothing", "angles"],
    "rotate_qk": ["nothing", "the first", "all", "angles"],
    "_rotate_table_backward": ["nothing", "the first", "all", "angles"],
    "norm_rotate_qk": ["nothing", "the first", "weights", "all"],
    "_norm_rotate_qk_backward": ["nothing", "all"],  # its graph, of torch's own operators, is long
    **dict.fromkeys(IN_PLACE, ["nothing"]),
}


def cases_of(op):
    """Yields the cases of an operator.

    They have every source of angles, every need of a gradient and every number of dimensions. Layouts and flags change
    from case to case.
    """
    factors = {"source": SOURCES, "needs": NEEDS_OF[op], "dims": [4, 3]}
    if op == "rotate_into_cache_":
        factors |= {"cache": list(CACHES), "slots": [None, torch.int32, torch.int64], "norm": [False, True]}

    def allowed(source, needs, dims, cache="", slots=True, **_):
        if op == "_rotate_table_backward":
            return "inv_freq" not in source.kind
        if op == "_norm_rotate_qk_backward":
            return needs == "nothing" or source == SOURCES[3]
        return slots or not (source.kind.startswith(("token", "head")) or (dims == 4 and "sequence" in cache))

    crossed = {"rotate": [("source", "needs")], "rotate_into_cache_": [("dims", "slots")]}
    layouts = list(LAYOUTS if op in IN_PLACE else READ_LAYOUTS)
    for i, case in enumerate(covering(factors, allowed, strength=1, interacting=crossed.get(op, []))):
        flags = {"rotary_dim": (DIM, DIM // 2)[i % 2], "interleaved": i % 3 == 0, "inverse": i % 5 == 0}
        flags |= {"over_heads": i % 2 == 1, "norm_v": i % 3 == 0, "quantised": (None, torch.int8)[i // 2 % 2]}
        flags |= {"rotary_start": (0, 0, 0, 3)[i % 4], "eager_rounding": i % 7 == 0, "v_shape": (None, (1, 12))[i % 2]}
        yield case | {"layout": layouts[i % len(layouts)]} | flags


@pytest.mark.parametrize(
    "op, case", [pytest.param(op, case, id=f"{op}-{name_of(case)}") for op in ROTATING for case in cases_of(op)]
)
def test_rotating_operators_pass_opcheck(op, case, device):
    source, dims, needs = case["source"], case["dims"], case["needs"]
    if not supported(device, torch.float32, source):
        pytest.skip("Apple GPUs have no float64")
    names = list(LAYOUTS if op in IN_PLACE else READ_LAYOUTS)
    first, batch = names.index(case["layout"]), 2 if dims == 4 else 1
    layouts = [READ_LAYOUTS[name] for name in names[first:] + names[:first]]
    kv_heads = HEADS if source.kind.startswith("head") else KV_HEADS
    over_heads = case["over_heads"]
    xs = operands(op, device, 3, batch, dims=dims, layouts=layouts, kv_heads=kv_heads, over_heads=over_heads)
    angles = source.arguments(batch, 3, case["rotary_dim"], torch.float32, device, HEADS)
    keywords = angles | {name: case[name] for name in ("interleaved", "rotary_start", "eager_rounding")}
    keywords["attention_factor"] = 1.2
    keywords |= {"norm_eps": 0.1} if "norm" in op or "cache" in op else {"inverse": case["inverse"]}
    if "cache" in case:
        xs[3:] = CACHES[case["cache"]](lambda *shape: torch.randn(shape, device=device), batch + 1, 48, kv_heads, DIM)
        if case["v_shape"]:
            xs[2] = torch.randn(*xs[2].shape[:-2], *case["v_shape"], device=device)
            xs[4] = torch.randn(*xs[3].shape[:-2], *case["v_shape"], device=device)
        if case["slots"]:
            keywords["slots"] = some_slots((batch, 3), xs[3].shape[:-2].numel(), case["slots"], device)
        else:
            set_apart(keywords, batch, 43)
        if case["norm"]:
            weights = norm_weights(device, over_heads, kv_heads)
            keywords |= dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True))
        if case["quantised"]:
            xs[3] = xs[3].to(case["quantised"])
            keywords["k_scale"] = torch.rand(kv_heads, 2, device=device)[:, 1]
        keywords["norm_v"] = case["norm_v"]
    xs = [x.detach().requires_grad_(NEEDS[needs](i, x) and x.is_floating_point()) for i, x in enumerate(xs)]
    if needs == "angles":
        for name in {"cos", "sin", "inv_freq"} & angles.keys():
            keywords[name].requires_grad_()
    opcheck(op, xs, keywords, device)


def test_the_gradient_of_tables_without_k_passes_opcheck(device):
    (q_grad, _, q, _), (cos, sin) = operands("_rotate_table_backward", device), tables(device)
    opcheck("_rotate_table_backward", (q_grad, None, q.requires_grad_(), None, cos, sin), {}, device)


# Positions. Their first dimension is that of the axes for axial_cos_sin.
POSITIONS = {
    "int64": lambda: torch.arange(6).view(2, 3),
    "float32 strided": lambda: torch.rand(3, 2).T,
    "one position": lambda: torch.tensor([[3], [7]], dtype=torch.int32),
}


@pytest.mark.parametrize(
    "case",
    covering({"needs": ["nothing", "inv_freq", "both"], "positions": list(POSITIONS), "dtype": [None, torch.bfloat16]}),
    ids=name_of,
)
@pytest.mark.parametrize("op", [op for op in OPERATORS if op not in ROTATING])
def test_operators_that_make_tables_pass_opcheck(op, case, device):
    positions, freq = POSITIONS[case["positions"]]().to(device), torch.rand(2, 8, device=device)[:, ::2]
    if op == "cos_sin":
        positions, freq = (positions.T, freq[1]) if case["positions"] != "one position" else (positions[0, 0], freq[1])
    if case["needs"] != "nothing":
        freq.requires_grad_()
        positions.requires_grad_(case["needs"] == "both" and positions.is_floating_point())
    opcheck(op, (positions, freq), {"attention_factor": 1.5, "dtype": case["dtype"]}, device)


# ---- fake tensors have the strides of real results ----

STRIDES = {
    name: lambda d, make=make: make(torch.Size((2, 3, 4, 8)), torch.float32, d) for name, make in READ_LAYOUTS.items()
}
STRIDES |= {
    "reversed": lambda d: torch.empty(8, 4, 3, 2, device=d).permute(3, 2, 1, 0),
    "slice of packed, transposed": lambda d: torch.empty(2, 9, 3, 8, device=d)[:, 2:6].transpose(1, 2),
    "every second token": lambda d: torch.empty(2, 6, 4, 8, device=d)[:, ::2],
    "one token": lambda d: torch.empty(2, 1, 4, 8, device=d),
    "one token, transposed": lambda d: torch.empty(2, 4, 1, 8, device=d).transpose(1, 2),
    "one head, transposed": lambda d: torch.empty(2, 1, 3, 8, device=d).transpose(1, 2),
    "one token of a slice": lambda d: torch.empty(2, 1, 9, 8, device=d)[:, :, 2:6],
    "batch of one, odd stride": lambda d: torch.empty(2, 3, 4, 8, device=d)[:1],
    "all ones": lambda d: torch.empty(4, 5, 6, 7, device=d)[:1, :1, :1, :2],
    "tokens and heads expanded": lambda d: torch.empty(2, 1, 1, 8, device=d).expand(2, 3, 4, 8),
    "expanded, transposed": lambda d: torch.empty(2, 4, 1, 8, device=d).expand(2, 4, 3, 8).transpose(1, 2),
    "empty": lambda d: torch.empty(2, 0, 4, 8, device=d),
    "three dimensions": lambda d: torch.empty(4, 3, 8, device=d).transpose(0, 1),
}


@pytest.mark.parametrize("layout", STRIDES)
def test_fake_strides_are_real_strides(layout, device):
    def results(x, weight, freq):
        dense = torch.empty(x.shape, device=x.device)
        return (
            rope.rotate(x, inv_freq=freq),
            *rope.rotate_qk(x, x, inv_freq=freq),
            *rope.norm_rotate_qk(x, x, weight, weight, inv_freq=freq),
            *rope._norm_rotate_qk_backward(dense, x, x, dense, weight, weight, inv_freq=freq),
        )

    x, freq = STRIDES[layout](device), torch_rope.inv_freq(2, device=device)
    weight = torch.ones(x.shape[-1], 2, device=device)[:, 0]
    real = results(x, weight, freq)
    *like_x, like_dense, q_weight, k_weight = real
    assert all(r.stride() == torch.empty_like(x).stride() for r in like_x) and like_dense.is_contiguous()
    assert q_weight.stride() == k_weight.stride() == (1,)

    with FakeTensorMode() as mode:
        fake = results(*(mode.from_tensor(t) for t in (x, weight, freq)))
    meta = results(*(torch.empty_strided(t.shape, t.stride(), device="meta") for t in (x, weight, freq)))
    for r, f, m in zip(real, fake, meta, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype) == (m.shape, m.stride(), m.dtype)
        assert f.device == r.device and m.device.type == "meta"


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)])
def test_fake_strides_of_cos_sin_are_contiguous(shape, device):
    positions, freq = torch.zeros(shape, device=device), torch_rope.inv_freq(8, device=device)
    real = rope.cos_sin(positions, freq)
    for fake in rope.cos_sin(positions.to("meta"), freq.to("meta"), dtype=torch.float16):
        assert fake.shape == (*shape, 4) and fake.is_contiguous() and fake.dtype == torch.float16
        assert fake.stride() == real[0].stride() == real[1].stride()


def test_fake_caches_are_left_alone(device):
    """The operator returns nothing and checks no range, because fake positions and slots have no values."""
    tensors = [*operands("rotate_into_cache_", device), *tables(device)]
    before = copies(tensors)
    with FakeTensorMode() as mode:
        assert rope.rotate_into_cache_(*(mode.from_tensor(t) for t in tensors), offset=1000) is None
    assert rope.rotate_into_cache_(*(t.to("meta") for t in tensors), offset=1000) is None
    assert all(map(torch.equal, tensors, before))
