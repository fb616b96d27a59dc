"""Tests the back end of comfy-kitchen with stand-ins for that package: what its functions compute, and what they refuse.

tests/exhaustive/models/test_comfy_registry.py calls them through comfy-kitchen itself.
"""

import importlib
import sys
from unittest.mock import MagicMock

import oracle
import pytest
import torch
from comfy import DIM, DTYPES, arguments, formula, rotations

from torch_rope import integrations


@pytest.fixture(scope="module")
def comfy():
    """The module of torch_rope, which sees stand-ins for the modules of comfy-kitchen."""
    name, before = "torch_rope.integrations.comfy_kitchen", dict(sys.modules)
    parts = ("", "._rope_utils", ".constraints", ".registry")
    sys.modules.pop(name, None)
    sys.modules.update({f"comfy_kitchen{part}": MagicMock() for part in parts})
    sys.modules["comfy_kitchen._rope_utils"].trim_rope_freqs = lambda x, table: table[:, :, : x.shape[2]]
    result = sys.modules["comfy_kitchen.constraints"].ValidationResult
    result.ok, result.fail = (lambda: True), (lambda *why: False)
    try:
        yield importlib.import_module(name)
    finally:
        for part in parts:
            del sys.modules[f"comfy_kitchen{part}"]
        sys.modules.pop(name)
        vars(integrations).pop("comfy_kitchen", None)  # where the package keeps the module too
        sys.modules.update({n: m for n, m in before.items() if n == name or n.startswith("comfy_kitchen")})


@pytest.mark.parametrize("table_shape", [(1, 1, 9), (2, 1, 9), (1, 5, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_function_agrees_with_its_formula(comfy, dtype, table_shape, device):
    """Tables [.., seq, ...] may be longer than x [batch, heads, seq, head_dim] if the function is interleaved."""
    for name in comfy.FUNCTIONS:
        sizes = [n - 4 * (n == 9 and "split_half" in name) for n in table_shape]
        shape = (2, 5, 6, DIM) if table_shape[1] == 5 else (2, 6, 5, DIM)
        xs = [torch.randn(shape).to(dtype), torch.randn(2, 6, sizes[2], DIM).to(dtype)]
        xs[1] = xs[1] if sizes[2] > 1 else torch.randn(shape).to(dtype)
        table, scales = rotations(*sizes, DIM // 2), [torch.rand(DIM) + 0.5, torch.rand(DIM) + 2]
        norm = name.startswith("rms")
        expected = [formula(name, x, table, scale if norm else None) for x, scale in zip(xs, scales, strict=True)]
        given = arguments(name, xs, table, scales if norm else ())
        given = {key: t.to(device) for key, t in given.items()}
        assert comfy._validate(name, given)
        out = comfy._call(name, **given)
        for x, y, right in zip(given.values(), out if isinstance(out, tuple) else [out], expected, strict=False):
            assert (y.data_ptr() == x.data_ptr()) == name.endswith("_")
            oracle.assert_close(y, right, *oracle.limits(dtype, {}, 1.25, norm))


def test_what_torch_rope_cannot_compute_is_refused(comfy):
    x, table = torch.randn(2, 6, 5, DIM), rotations(1, 1, 5, 8)
    bad = [
        table + torch.tensor([[0.0, 1.0], [0.0, 0.0]]),  # a shear
        table * torch.tensor([[1.0, 1.0], [-1.0, -1.0]]),  # a reflection
        table * torch.tensor([[1.0, 1.0], [2.0, 2.0]]),
        table * torch.nan,
        rotations(1, 1, 5, 1),
        rotations(1, 1, 4, 8),
        rotations(3, 1, 5, 8),
    ]
    for wrong in bad:
        assert not comfy._validate("apply_rope1", {"x": x, "freqs_cis": wrong})
    assert comfy._validate("apply_rope1", {"x": x, "freqs_cis": rotations(1, 6, 5, 8)})  # a table by head
    assert not comfy._validate("rms_rope1", {"x": x, "freqs_cis": rotations(1, 6, 5, 8)})
    assert comfy._validate("apply_rope1", {"x": x, "freqs_cis": table})
    for mode in (torch.no_grad, torch.inference_mode):  # a table that was written is compared again
        with mode():
            table = rotations(1, 1, 5, 8)
            for factor in (1, 2, 0.5):
                table[..., 1, 1] *= factor
                assert comfy._validate("apply_rope1", {"x": x, "freqs_cis": table}) == (factor != 2)
