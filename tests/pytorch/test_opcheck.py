"""Tests that every operator agrees with its schema and its fake implementation, and is registered for all of torch."""

import pytest
import torch
from cases import CACHES, EXHAUSTIVE, LAYOUTS, OPERATORS, SOURCES, name_of, need, set_apart, some_slots
from programs import DIM, HEADS, IN_PLACE, KV_HEADS, ROTATING, norm_weights, operands, rope, tables

import torch_rope

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("_memory_of_others")]


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


def opcheck(op, args, keywords, device, trace=True):
    """trace: also traces the call and its gradients with symbolic sizes, which takes long and does not depend on the
    device."""
    tests = ["test_schema", "test_faketensor"]
    if device != "mps":  # torch says itself that this check does not support mps
        tests.append("test_autograd_registration")
    if EXHAUSTIVE or (trace and device != "mps"):
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

    They have every source of angles, every need of a gradient, every cache and every number of dimensions. Layouts and
    flags change from case to case.
    """
    sources = SOURCES if EXHAUSTIVE else [SOURCES[i] for i in (0, 2, 3, 6, 9, 11, 12, 14)]
    if op == "_rotate_table_backward":
        sources = [source for source in sources if "inv_freq" not in source.kind]
    needed, caches = NEEDS_OF[op], list(CACHES)
    layouts = list(LAYOUTS if op in IN_PLACE else READ_LAYOUTS)
    traced = []
    for i in range(max(len(sources), len(needed), len(caches) if "cache" in op else 0) * (2 if EXHAUSTIVE else 1)):
        case = {"source": sources[i % len(sources)], "needs": needed[i // 2 % len(needed)], "dims": (4, 3)[i % 2]}
        case |= {"rotary_dim": (DIM, DIM // 2)[i % 2], "interleaved": i % 3 == 0, "inverse": i % 5 == 0}
        case |= {"rotary_start": (0, 0, 0, 3)[i % 4], "over_heads": i % 2 == 1}
        if "cache" in op:
            case |= {"cache": caches[i % len(caches)], "norm": i % 2 == 0, "norm_v": i % 3 == 0}
            case |= {"quantised": (None, torch.int8)[i // 2 % 2], "v_shape": (None, (1, 12))[i % 2]}
            case["q_out"] = (None, torch.float32, torch.int8)[i % 3]
            by_slots = i % 2 == 0 and "sequence" in case["cache"]
            case["slots"] = (torch.int32, torch.int64)[i % 2] if by_slots or i % 3 else None
        case["eager_rounding"] = i % 7 == 0 and not (case.get("norm_v") or case.get("norm", "norm" in op))
        traced.append((case["needs"], case.get("norm")))  # tracing takes long, so the first such case is enough
        yield case | {"layout": layouts[i % len(layouts)], "trace": traced[-1] not in traced[:-1]}


@pytest.mark.parametrize(
    "op, case", [pytest.param(op, case, id=f"{op}-{name_of(case)}") for op in ROTATING for case in cases_of(op)]
)
def test_rotating_operators_pass_opcheck(op, case, device):
    source, dims, needs = case["source"], case["dims"], case["needs"]
    need(device, source.freq_dtype)
    names = list(LAYOUTS if op in IN_PLACE else READ_LAYOUTS)
    first, batch = names.index(case["layout"]), 2 if dims == 4 else 1
    layouts = [READ_LAYOUTS[name] for name in names[first:] + names[:first]]
    kv_heads = HEADS if source.kind.startswith("head") else KV_HEADS
    over_heads = case["over_heads"]
    xs = operands(op, device, 3, batch, dims=dims, layouts=layouts, kv_heads=kv_heads, over_heads=over_heads)
    angles = source.arguments(batch, 3, case["rotary_dim"], torch.float32, device, HEADS)
    keywords = angles | {name: case[name] for name in ("interleaved", "rotary_start")}
    keywords["attention_factor"] = 1.2
    keywords |= {"norm_eps": 0.1} if "norm" in op or "cache" in op else {"inverse": case["inverse"]}
    keywords |= {"eager_rounding": True} if case["eager_rounding"] else {}
    if "cache" in case:
        xs[3:] = CACHES[case["cache"]](lambda *shape: torch.randn(shape, device=device), batch + 1, 48, kv_heads, DIM)
        if case["v_shape"]:
            xs[2] = torch.randn(*xs[2].shape[:-2], *case["v_shape"], device=device)
            xs[4] = torch.randn(*xs[3].shape[:-2], *case["v_shape"], device=device)
        if case["slots"]:
            keywords["slots"] = some_slots((batch, 3), xs[3].shape[:-2].numel(), case["slots"], device)
        else:
            if "head" in source.kind or "token" in source.kind:  # positions choose cells, and no angles
                keywords |= {"positions": torch.empty(batch, 3, dtype=torch.int32, device=device), "offset": 2}
            set_apart(keywords, batch, 43)
        if case["norm"]:
            weights = norm_weights(device, over_heads, kv_heads)
            keywords |= dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True))
        if case["quantised"]:
            xs[3] = xs[3].to(case["quantised"])
            keywords["k_scale"] = torch.rand(kv_heads, 2, device=device)[:, 1]
        keywords["norm_v"] = case["norm_v"]
        if case["q_out"]:
            out = layouts[3](torch.Size((batch, *xs[0].shape[-3:])), case["q_out"], device)
            keywords["q_out"] = out if dims == 4 else out[0]
            keywords |= {"q_scale": torch.rand(HEADS, device=device)} if case["q_out"] == torch.int8 else {}
    xs = [x.detach().requires_grad_(NEEDS[needs](i, x) and x.is_floating_point()) for i, x in enumerate(xs)]
    if needs == "angles":
        for name in {"cos", "sin", "inv_freq"} & angles.keys():
            keywords[name].requires_grad_()
    opcheck(op, xs, keywords, device, case["trace"])


def test_the_gradient_of_tables_without_k_passes_opcheck(device):
    (q_grad, _, q, _), (cos, sin) = operands("_rotate_table_backward", device), tables(device)
    opcheck("_rotate_table_backward", (q_grad, None, q.requires_grad_(), None, cos, sin), {}, device)


@pytest.mark.parametrize("op", [op for op in OPERATORS if op not in ROTATING])
def test_operators_that_make_tables_pass_opcheck(op, device):
    axes = (2,) if "axial" in op else ()
    for shape, dtype, needs in (
        ((2, 3), torch.int64, ""),
        ((), torch.int32, "inv_freq"),
        ((0, 4), torch.float32, ""),
        ((5, 3), torch.float32, "inv_freq and positions"),
    ):
        positions = torch.rand((*axes, *shape, 2), device=device).mul(9).to(dtype)[..., 0]
        freq = torch.rand(*axes, 8, device=device)[..., ::2]
        freq.requires_grad_("inv_freq" in needs)
        positions.requires_grad_("positions" in needs)
        keywords = {"attention_factor": 1.5, "dtype": torch.bfloat16 if needs else None}
        opcheck(op, (positions, freq), keywords, device, trace="positions" in needs)


# ---- fake tensors have the strides of real results ----

STRIDES = {  # besides READ_LAYOUTS
    "reversed": lambda d: torch.empty(8, 4, 3, 2, device=d).permute(3, 2, 1, 0),
    "slice of packed, transposed": lambda d: torch.empty(2, 9, 3, 8, device=d)[:, 2:6].transpose(1, 2),
    "every second token": lambda d: torch.empty(2, 6, 4, 8, device=d)[:, ::2],
    "one token, transposed": lambda d: torch.empty(2, 4, 1, 8, device=d).transpose(1, 2),
    "one token of a slice": lambda d: torch.empty(2, 1, 9, 8, device=d)[:, :, 2:6],
    "all ones": lambda d: torch.empty(4, 5, 6, 7, device=d)[:1, :1, :1, :2],
    "expanded, transposed": lambda d: torch.empty(2, 4, 1, 8, device=d).expand(2, 4, 3, 8).transpose(1, 2),
    "empty": lambda d: torch.empty(2, 0, 4, 8, device=d),
    "three dimensions": lambda d: torch.empty(4, 3, 8, device=d).transpose(0, 1),
}


@pytest.mark.shared
@pytest.mark.parametrize("layout", STRIDES)
def test_fake_strides_are_real_strides(layout, device):
    x, freq = STRIDES[layout](device).zero_(), torch_rope.inv_freq(2, device=device)
    dense, weights = x.contiguous(), torch.ones(x.shape[-1], 2, device=device).unbind(1)
    calls = {"rotate": (x,), "rotate_qk": (x, dense), "norm_rotate_qk": (x, dense, *weights)}
    for op, args in (calls | {"_norm_rotate_qk_backward": (dense, x, x, dense, *weights)}).items():
        opcheck(op, args, {"inv_freq": freq}, device, trace=False)
