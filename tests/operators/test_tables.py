"""Tests the gradients of learned cos, sin and inv_freq: they are close to the reference, and the same each time.

For derivatives of any order see test_autograd.py.
"""

import cases
import pytest
import torch
from calls import factors, make

from torch_rope.selfcheck.checks import Check

rope = torch.ops.rope


def gradients_of(learned, op, call, given):
    """Returns the gradients of the arguments `learned` of a call, for these gradients of its results."""
    leaves = {name: call[name].detach().requires_grad_() for name in learned}
    outs = getattr(rope, op)(**call | leaves)
    return torch.autograd.grad(outs, list(leaves.values()), given)


FACTORS = cases.CALLS | {"op": ["rotate_qk", "rotate", "norm_rotate_qk"]}
FACTORS |= {name: factors("rotate_qk")[name] for name in ("tables", "inverse", "attention_factor")}


@pytest.mark.core
@pytest.mark.parametrize("case", cases.covering(FACTORS, exhaustive=cases.ALL_CALLS), ids=cases.name_of)
def test_gradients_of_angles_are_close_to_those_of_the_reference(case, device):
    cases.need(device, case["dtype"], case["source"].freq_dtype)
    call = make(device=device, **case)
    learned = tuple(name for name in ("cos", "sin", "inv_freq") if name in call)
    Check(torch.device(device)).gradients(case["op"], call, learned)
    given = [torch.randn_like(call[name]) for name in ("x", "q", "k") if name in call]
    assert all(map(torch.equal, *(gradients_of(learned, case["op"], call, given) for _ in range(2))))


def test_small_terms_of_a_sum_are_not_lost(device):
    """There are far more small terms than threads, and one large term. The sum is in float64, where there is that."""
    cases.need(device, torch.float64)
    given, x, positions = torch.ones(30000, 1, 8), torch.ones(30000, 1, 8), torch.ones(30000, dtype=torch.int32)
    given[0], given[..., 4:] = 2**25, 0
    given, x, positions, table = (t.to(device) for t in (given, x, positions, torch.rand(2, 4)))
    call = {"x": x, "cos": table, "sin": table, "positions": positions}
    cos_grad, sin_grad = gradients_of(("cos", "sin"), "rotate", call, [given])
    assert (cos_grad[1] - (2**25 + 29999)).abs().max() <= 4  # an ulp of 2^25
    assert torch.equal(sin_grad, -cos_grad) and not cos_grad[0].any()


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8), (2, 3, 2, 0)], ids=str)
@pytest.mark.parametrize("of", ["table", "token", "token shared", "norm", "norm over heads"])
def test_gradients_of_empty_tensors_are_zero(shape, of, device):
    """The gradients are those of tables, or of the weights of a norm."""
    x, rows = torch.randn(shape, device=device), {"token": (1, *shape)[-4:-2], "token shared": (1, shape[-3])}
    cos = torch.ones(*rows.get(of, (9,)), shape[-1] // 2, device=device)
    weight = torch.ones(shape[-2:] if "over" in of else shape[-1:], device=device)
    call, learned, op = {"q": x, "k": x, "cos": cos, "sin": cos}, ("cos", "sin"), "rotate_qk"
    if "norm" in of:
        learned, op = ("q_norm_weight", "k_norm_weight"), "norm_rotate_qk"
        call |= dict.fromkeys(learned, weight)
    for _ in range(3):  # the results get memory that held NaN before
        left = [torch.full_like(t, torch.nan) for t in (cos, weight) * 3]
        del left
        gradients = gradients_of(learned, op, call, [x, x])
        assert all(torch.equal(g, torch.zeros_like(call[name])) for g, name in zip(gradients, learned, strict=True))
