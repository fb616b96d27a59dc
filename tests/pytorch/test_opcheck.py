"""Tests that every operator agrees with its schema and its fake implementation, and is registered for all of torch."""

import pytest
import torch
from calls import EXPANDED, allowed, factors, make
from cases import EXHAUSTIVE, OPERATORS, covering, name_of, need
from programs import DIM, FUNCTIONAL, HEADS, IN_PLACE, KV_HEADS, ROTATING, rope

import torch_rope

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("_memory_of_others")]


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_is_registered_for_all_dispatch_keys_that_it_needs(op):
    """test_parallel.py tests the rules for DTensor, and test_flops.py the flop formulas."""
    keys = ["CPU", "Meta", "Autograd", "FuncTorchBatched"]
    keys += ["ADInplaceOrView", "Negative"] if op in IN_PLACE else []
    assert [key for key in keys if not torch._C._dispatch_has_kernel_for_dispatch_key(f"rope::{op}", key)] == []
    assert torch.Tag.pt2_compliant_tag in getattr(rope, op).default.tags


# ---- opcheck ----


def opcheck(op, call, device, trace=True):
    """trace: also traces the call and its gradients with symbolic sizes, which takes long and does not depend on the
    device."""
    tests = ["test_schema", "test_faketensor"]
    if device != "mps":  # torch says itself that this check does not support mps
        tests.append("test_autograd_registration")
    if EXHAUSTIVE or (trace and device != "mps"):
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(rope, op).default, (), call, test_utils=tests)


ANGLES, WEIGHTS = ("cos", "sin", "inv_freq"), ("q_norm_weight", "k_norm_weight")
NEEDS = {  # which arguments require grad
    "rotate": [(), ("x", *ANGLES)],
    "rotate_qk": [(), ("q",), ("q", "k"), ("q", "k", *ANGLES)],
    "norm_rotate_qk": [(), ("q",), WEIGHTS, ("q", "k", *WEIGHTS)],
    # Its graph, of torch's own operators, is long.
    "_norm_rotate_qk_backward": [(), ("q_out_grad", "k_out_grad", "q", "k", *WEIGHTS)],
}


def cases_of(op):
    """Yields cases in which every factor has each of its values, and whether the case is traced."""
    values = factors(op) | {"size": [(2, 3, HEADS, KV_HEADS, DIM, dim) for dim in (DIM, 4)], "dtype": [torch.float32]}
    values["size"] += [(1, *size[1:]) for size in values["size"]]
    values |= {"needed": NEEDS.get(op, [()]), "attention_factor": [1.2]}
    if "quantised" in values:  # torch's check of schemas cannot compare float8
        values |= {"quantised": [(None, None), (None, torch.int8), (torch.int8, None)], "q_dtype": [None, torch.int8]}
    if not EXHAUSTIVE:
        values["source"] = [values["source"][i] for i in (0, 1, 2, 4, 7, 9, 13, 14, *range(15, len(values["source"])))]
    if op not in IN_PLACE:
        values |= {name: [*values[name], *EXPANDED] for name in ("q", "k")}
    traced = set()  # tracing takes long, so the first case with a need of gradients and a norm is enough
    for case in covering(values, allowed, strength=1, exhaustive=("source", "needed", "dims")):
        kind = case["needed"], bool(case.get("q_weight"))
        yield case, kind not in traced
        traced.add(kind)


@pytest.mark.parametrize(
    "op, case, trace",
    [pytest.param(op, *case, id=f"{op}-{name_of(case[0])}") for op in ROTATING for case in cases_of(op)],
)
def test_rotating_operators_pass_opcheck(op, case, trace, device):
    need(device, case["source"].freq_dtype)
    call = make(op, device, **{name: value for name, value in case.items() if name != "needed"})
    call |= {name: call[name].detach().requires_grad_() for name in call.keys() & {*case["needed"]}}
    opcheck(op, call, device, trace)


@pytest.mark.parametrize("op", [op for op in FUNCTIONAL if op not in ROTATING])
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
        call = {"positions": positions, "inv_freq": freq, "attention_factor": 1.5}
        opcheck(op, call | ({"dtype": torch.bfloat16} if needs else {}), device, trace="positions" in needs)


# ---- fake tensors have the strides of real results ----

STRIDES = {  # besides LAYOUTS and EXPANDED
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
    dense, weight = x.contiguous(), torch.ones(x.shape[-1], device=device)
    rotated = {"q": x, "k": dense, "inv_freq": freq}
    norm = rotated | {"q_norm_weight": weight, "k_norm_weight": weight, "norm_weight_offset": 1.0}
    opcheck("rotate", {"x": x, "inv_freq": freq}, device, trace=False)
    opcheck("rotate_qk", rotated, device, trace=False)
    opcheck("norm_rotate_qk", norm, device, trace=False)
    opcheck("_norm_rotate_qk_backward", norm | {"q_out_grad": dense, "k_out_grad": x}, device, trace=False)
