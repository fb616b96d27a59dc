"""Tests the back end of comfy-kitchen with stand-ins for that package: what its functions compute, and what they refuse.

tests/exhaustive/models/test_comfy_registry.py calls them through comfy-kitchen itself.
"""

import importlib
import sys
from unittest.mock import MagicMock

import oracle
import pytest
import torch
from cases import spread

from torch_rope import integrations

DIM, DTYPES = 16, [torch.float32, torch.bfloat16, torch.float16]


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


def rotations(*shape, dtype=torch.float32, factor=1.25):
    """Returns a table of rotations by random angles, times a factor: [*shape, 2, 2], with gaps between its elements."""
    angle = torch.randn(shape, dtype=torch.float64) * 100
    cos, sin = factor * angle.cos(), factor * angle.sin()
    table = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)).to(dtype)
    return spread(table, (1,) * len(shape) + (2, 3), (0,) * (len(shape) + 2))


def arguments(name, xs, table, scales=(), **more):
    """Returns the arguments of a function by name."""
    keys = ["x"] if "1" in name else ["xq", "xk"] if name.startswith("apply") else ["q", "k"]
    scale_keys = ["scale"] if "1" in name else ["q_scale", "k_scale"]
    return dict(zip(keys, xs, strict=False)) | {"freqs_cis": table} | dict(zip(scale_keys, scales, strict=False)) | more


def formula(name, x, table, scale=None, epsilon=1e-6, rot_dim=0):
    """Returns the result of a function, and the magnitude of each element's pair, in float64."""
    x, table = x.double(), table.double()
    if scale is not None:
        x = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * scale.double()
    interleaved, rotary_dim = "split_half" not in name, rot_dim or x.shape[-1]
    if interleaved and x.dim() == 4 and table.dim() == 6 and table.shape[2] > 1:
        table = table[:, :, : x.shape[2]]  # the table may be longer
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = [table[..., row, 0] * a + table[..., row, 1] * b for row in (0, 1)]
    size = [torch.hypot(*pair)] * 2
    parts = (torch.stack(t, -1).flatten(-2) if interleaved else torch.cat(t, -1) for t in (pair, size))
    value, size = (part.view(rotated.shape) for part in parts)
    return torch.cat([value, rest], -1).numpy(), torch.cat([size, rest.abs()], -1).numpy()


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
