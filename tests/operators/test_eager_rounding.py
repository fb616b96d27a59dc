"""Tests that eager_rounding=True gives the bits of the formula in plain PyTorch operators, which the reference is.

tests/exhaustive/models/test_families.py shows that these are the bits of real models.
"""

import pytest
import torch
from cases import CALLS, SOURCES, covering, make_qk, name_of

from torch_rope import reference

rope = torch.ops.rope
# The rounding happens in the same loops as without eager_rounding, so fewer layouts and sources are enough.
LAYOUTS = ["bshd", "bhsd", "bhds", "odd start"]
FACTORS = CALLS | {
    "source": [SOURCES[i] for i in (0, 3, 5, 8, 12)],
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
