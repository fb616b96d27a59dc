"""Tests that eager_rounding=True gives the bits of the formula in plain PyTorch operators, which the reference is.

tests/exhaustive/models/test_families.py shows that these are the bits of real models.
"""

import pytest
import torch
from cases import CALLS, SOURCES, covering, make_qk, name_of
from test_norm import WEIGHTS, make_case

import torch_rope
from torch_rope import reference

rope = torch.ops.rope
# The rounding happens in the same loops as without eager_rounding, so fewer layouts and sources are enough.
LAYOUTS = ["bshd", "bhsd", "bhds", "odd start"]
FACTORS = CALLS | {
    "source": [SOURCES[i] for i in (1, 3, 6, 8, 12)],
    "q": LAYOUTS,
    "k": LAYOUTS,
    "tables": ["dtype of x", "float32"],
    "attention_factor": [1.0, 1.2079441541679836],
    "inverse": [False, True],
}
LOOPS = [("size", "dtype", "interleaved")]  # which decide which loop or kernel runs
NIGHT = (*LOOPS[0], "source", "tables")  # all of whose combinations run in make exhaustive


def on_cpu(values):
    return {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in values.items()}


def tables_of(angles, x):
    """Returns the angles with tables instead of inv_freq, made by the back end of x. The reference computes frequencies
    in float64, and their cos and sin may differ in the last bit."""
    if "inv_freq" not in angles:
        return angles
    angles = dict(angles)
    inv_freq, positions, offset = (angles.pop(name, None) for name in ("inv_freq", "positions", "offset"))
    positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions.long()
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = rope.cos_sin(torch.atleast_2d(positions + (offset or 0)), inv_freq, dtype=dtype)
    return angles | {"cos": cos, "sin": sin}


@pytest.mark.core
@pytest.mark.parametrize("case", covering(FACTORS, interacting=LOOPS, exhaustive=NIGHT), ids=name_of)
def test_results_and_gradients_have_the_bits_of_plain_operators(case, device):
    """The second derivative too: the gradient of the gradient with respect to the gradient that comes in."""
    table_dtype = torch.float32 if case["tables"] == "float32" else case["dtype"]
    q, k, angles = make_qk(device, **case, table_dtype=table_dtype)
    flags = {name: case[name] for name in ("attention_factor", "interleaved", "inverse")} | {"eager_rounding": True}
    given = [torch.randn(x.shape, dtype=torch.float64).to(x.dtype) for x in (q, k)]
    derivatives = []
    for functions, to, tables in (rope, device, angles), (reference, "cpu", on_cpu(tables_of(angles, q))):
        xs = [x.detach().to(to).requires_grad_() for x in (q, k)]
        gs = [g.to(to).requires_grad_() for g in given]
        outs = functions.rotate_qk(*xs, **tables, **flags)
        gradients = torch.autograd.grad(outs, xs, gs, create_graph=True)
        derivatives.append([*outs, *gradients, *torch.autograd.grad(gradients, gs, [g.detach() for g in gs])])
    for found, expected in zip(*derivatives, strict=True):
        assert torch.equal(found.cpu(), expected)
    (q_out, k_out, *_), _ = derivatives
    assert torch.equal(rope.rotate(q, **angles, **flags), q_out)
    rope.rotate_qk_(q, k, **angles, **flags)
    assert torch.equal(q, q_out) and torch.equal(k, k_out)


# ---- with a norm ----


def candidates(x, w, norm_eps):
    """Yields the normalised x for each scale that a sum in another order may give: the exact one and its neighbours."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(x.double().square().mean((-2, -1)[-w.dim() :], keepdim=True) + norm_eps).to(wide.dtype)
    for ulps in range(-4, 5):
        s = scale
        for _ in range(abs(ulps)):
            s = torch.nextafter(s, s.new_full((), torch.inf if ulps > 0 else 0.0))
        normalised = wide * s
        yield ((normalised.to(x.dtype) if w.dtype == x.dtype else normalised) * w).to(x.dtype)


NORM_FACTORS = {name: values for name, values in FACTORS.items() if name != "inverse"} | {
    "q_weight": WEIGHTS,
    "k_weight": WEIGHTS,
    "over_heads": [False, True],
    "norm_eps": [1e-6, 1e-2],
}


@pytest.mark.core
@pytest.mark.parametrize("case", covering(NORM_FACTORS, interacting=LOOPS, exhaustive=NIGHT), ids=name_of)
def test_a_norm_has_the_bits_of_plain_operators_but_for_the_order_of_its_sums(case, device):
    """Few elements of a 16-bit gradient have other bits, and these are neighbours."""
    tensors, angles, flags = make_case(case, device)
    norm_eps, plain = flags.pop("norm_eps"), on_cpu(tables_of(angles, tensors[0]))
    flags["eager_rounding"] = True
    inputs = [t.detach().requires_grad_() for t in tensors]
    results = rope.norm_rotate_qk(*inputs, **angles, **flags, norm_eps=norm_eps)
    for x, w, out in zip(tensors[:2], tensors[2:], results, strict=True):
        right = [
            (reference.rotate(n, **plain, **flags) == out.cpu()).flatten(-w.dim()).all(-1)
            for n in candidates(x.cpu(), w.cpu(), norm_eps)
        ]
        assert torch.stack(right).any(0).all()

    leaves = [t.detach().cpu().requires_grad_() for t in tensors]
    outs = reference.norm_rotate_qk(*leaves, **plain, **flags, norm_eps=norm_eps)
    given = [torch.randn_like(out.double()).to(out.dtype) for out in outs]
    expected = torch.autograd.grad(outs, leaves, given)
    found = torch.autograd.grad(results, inputs, [g.to(device) for g in given])
    eps = torch.finfo(tensors[0].dtype).eps
    for i, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert f.dtype == e.dtype
        f, e = f.cpu().double(), e.double()
        if i >= 2:  # a sum over all tokens and heads, which plain operators round in the dtype of x
            torch.testing.assert_close(f, e, rtol=0, atol=float(16 * eps * e.abs().amax()))
            continue
        axes = (-2, -1)[-tensors[i + 2].dim() :]
        # A gradient of q or k is a difference of two terms of about this size, which may be much larger.
        scale = torch.rsqrt(tensors[i].cpu().double().square().mean(axes, keepdim=True) + norm_eps)
        term = given[i].double().abs().amax(axes, keepdim=True) * leaves[i + 2].abs().amax() * scale
        assert ((f - e).abs() <= 8 * eps * term).all()
        if tensors[0].dtype in (torch.bfloat16, torch.float16):
            assert (f != e).double().mean() < 4e-3 + 2 / f.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_term_of_a_weights_gradient_is_rounded(dtype, device):
    """A sum over two tokens of one head has no other rounding than that of its terms and its own."""
    q, q_weight = torch.randn(1, 2, 1, 512).to(dtype), torch.rand(512).to(dtype)
    tables = [t.to(dtype) for t in torch_rope.cos_sin(torch.arange(2), torch_rope.inv_freq(512, device="cpu"))]
    given, gradients = torch.randn(1, 2, 1, 512).to(dtype), []
    for norm, to in (reference.norm_rotate_qk, "cpu"), (rope.norm_rotate_qk, device):
        weight = q_weight.to(to).requires_grad_()
        out, _ = norm(*[q.to(to)] * 2, weight, weight.detach(), *(t.to(to) for t in tables), eager_rounding=True)
        gradients.append(torch.autograd.grad(out, weight, given.to(to))[0].cpu())
    assert torch.ne(*gradients).double().mean() < 0.02
