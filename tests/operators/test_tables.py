"""Tests the gradients of learned cos, sin and inv_freq: they are close to the oracle, and the same each time.

For derivatives of any order see test_autograd.py.
"""

import cases
import pytest
import torch
from calls import DTYPES, SOURCES, factors, make
from oracle import ANGLE_ERROR, assert_gradients, numpy_of, table_backward

from torch_rope.selfcheck.checks import Check

rope = torch.ops.rope
TABLES = [source for source in SOURCES if "inv_freq" not in source.kind]


def gradients_of(learned, op, call, given):
    """Returns the gradients of the arguments `learned` of a call, for these gradients of its results."""
    leaves = {name: call[name].detach().requires_grad_() for name in learned}
    outs = getattr(rope, op)(**call | leaves)
    return torch.autograd.grad(outs, list(leaves.values()), given)


def split(call):
    """Returns the tensors that a call rotates, and its other arguments."""
    names = ("x", "q", "k")
    return [call[n] for n in names if n in call], {n: value for n, value in call.items() if n not in names}


FACTORS = cases.CALLS | {"op": ["rotate_qk", "rotate"], "source": TABLES}
FACTORS |= {name: factors("rotate_qk")[name] for name in ("tables", "inverse", "attention_factor")}


@pytest.mark.core
@pytest.mark.parametrize("case", cases.covering(FACTORS, exhaustive=cases.ALL_CALLS), ids=cases.name_of)
def test_gradients_of_tables_agree_with_the_oracle(case, device):
    cases.need(device, case["dtype"])
    call = make(device=device, **case)
    xs, options = split(call)
    given = [torch.randn_like(x) for x in xs]
    found, again = (gradients_of(("cos", "sin"), case["op"], call, given) for _ in range(2))
    assert_gradients(found, given, xs, options)
    for out, same, table in zip(found, again, (call["cos"], call["sin"]), strict=True):
        assert out.dtype == table.dtype and out.shape == table.shape and torch.equal(out, same)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_gradients_of_the_angles_of_a_norm_are_close_to_those_of_the_reference(source, dtype, device):
    cases.need(device, dtype, source.freq_dtype)
    call = make("norm_rotate_qk", device, source=source, dtype=dtype, interleaved=dtype.itemsize == 2)
    learned = tuple(name for name in ("cos", "sin", "inv_freq") if name in call)
    Check(torch.device(device)).gradients("norm_rotate_qk", call, learned)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [source for source in SOURCES if source.kind == "inv_freq"], ids=str)
def test_gradient_of_inv_freq_agrees_with_the_oracle(source, dtype, device):
    """The gradient is the sum over tokens of position * (sin_grad cos - cos_grad sin), with cos_grad and sin_grad of a
    table by token. In float32 cos and sin are right to 5e-7, and about ten numbers are rounded for each term."""
    cases.need(device, dtype, source.freq_dtype)
    interleaved = dtype.itemsize == 2
    flags = {"interleaved": interleaved, "inverse": not interleaved, "attention_factor": 1.3}
    call = make("rotate_qk", device, size=cases.SIZES[2], source=source, dtype=dtype, q="packed", k="sbhd", **flags)
    xs = split(call)[0]
    given = [torch.randn_like(x) for x in xs]
    [found] = gradients_of(["inv_freq"], "rotate_qk", call, given)

    freq, shape = call["inv_freq"], xs[0].shape[:2]
    positions = call.get("positions", torch.arange(shape[1])).cpu().expand(shape) + call.get("offset", 0)
    angle = positions.double().unsqueeze(-1) * freq.cpu().double()
    cos, sin = angle.cos(), angle.sin()
    cos_grad, sin_grad, *magnitudes = table_backward(given, xs, cos, sin, **flags)
    p = positions[..., None].numpy()
    expected = (p * (sin_grad * cos.numpy() - cos_grad * sin.numpy())).sum((0, 1))
    magnitude = (abs(p) * sum(magnitudes)).sum((0, 1))
    limit = magnitude * (1e-12 if dtype == freq.dtype == torch.float64 else ANGLE_ERROR + 10 * 2**-24)
    assert found.dtype == freq.dtype and (abs(numpy_of(found) - expected) <= limit).all()
