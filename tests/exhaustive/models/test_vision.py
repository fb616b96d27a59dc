"""Tests of patch for every way in which timm rotates: the bits of the results and of the gradients.

tests/integrations/test_conventions.py tests what patch changes, leaves alone and refuses.
"""

import copy
import functools

import pytest
import torch
from test_conventions import rotations as rotations
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from vision_models import MODELS, timm

from torch_rope.integrations.timm import patch

pytestmark = pytest.mark.cpu

# The largest allowed differences, as parts of the largest element of the output and of the largest gradient, if q and k
# are rounded in another way. They are three times those that were seen. A model that does not rotate differs by BROKEN
# or more.
OUTPUT = {torch.float32: 2e-6, torch.bfloat16: 0.05}
GRADIENTS, BROKEN = 7e-6, 0.08
# The models whose tables are made of frequencies that are trained.
TRAINED = [name for name in MODELS if "mixed" in name]


@functools.cache
def models(**options):
    """Returns all models, patched at once if there are options, and their inputs."""
    torch.manual_seed(0)
    made = {name: make() for name, make in MODELS.items()}
    together = nn.ModuleDict({name: model for name, (model, _) in made.items()})
    if options:
        patch(together, **options)
    return together, {name: inputs for name, (_, inputs) in made.items()}


def of(name, dtype=torch.float32, **options):
    """Returns a copy of a model, and its inputs."""
    together, inputs = models(**options)
    return copy.deepcopy(together[name]).to(dtype), cast(inputs[name], dtype)


def cast(value, dtype):
    """Returns inputs of a model with their floating point tensors in a dtype."""
    if isinstance(value, tuple):
        return tuple(cast(v, dtype) for v in value)
    if isinstance(value, dict):
        return {k: cast(v, dtype) for k, v in value.items()}
    return value.to(dtype) if value.is_floating_point() else value


def output(model, inputs):
    torch.manual_seed(0)  # some models drop random patches
    with torch.no_grad():
        return model(*inputs)


def step(model, inputs):
    """Returns the output of a training step and all gradients, by name."""
    torch.manual_seed(0)
    model.zero_grad()
    out = model(*inputs)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    named = {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach()} | named


def same(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[n], expected[n]) for n in expected)


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value."""
    return ((actual.float() - expected.float()).abs().max() / expected.abs().max()).item()


def check_rounding(actual, expected):
    assert actual.keys() == expected.keys()
    assert difference(actual["output"], expected["output"]) < OUTPUT[torch.float32]
    gradients = [torch.cat([t.flatten() for n, t in r.items() if n != "output"]) for r in (actual, expected)]
    assert difference(*gradients) < GRADIENTS
    for freqs in (n for n in expected if n.endswith("freqs")):
        assert difference(actual[freqs], expected[freqs]) < GRADIENTS


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_has_the_bits_or_differs_by_rounding(name, rotations, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        model, expected = of(name, dtype, rounding="eager"), step(*of(name, dtype))
        rotations.clear()
        assert same(step(*model), expected)
        assert rotations and set(rotations) == {name not in TRAINED}  # tables that are trained go to timm's function
        if dtype == torch.float32:
            rotations.clear()
            assert torch.equal(output(*model), output(*of(name))) and rotations and all(rotations)
            model, inputs = of(name)
            with patch(model, fuse=True):  # norms stay as they are before prefix tokens are taken out
                assert same(step(model, inputs), expected)
            assert same(step(model, inputs), expected)
    rotations.clear()
    check_rounding(step(*of(name, rounding="once")), step(*of(name)))
    assert rotations and all(rotations)
    actual, expected = (output(*of(name, torch.bfloat16, **o)) for o in ({"rounding": "once"}, {}))
    assert difference(actual, expected) < OUTPUT[torch.bfloat16]
    expected = output(*of(name))
    monkeypatch.setattr(timm.layers.pos_embed_sincos, "apply_rot_embed", lambda x, *tables, half=False: x)
    assert difference(output(*of(name)), expected) > BROKEN


@pytest.mark.parametrize("name", ["attention pool", "dinov3"])
def test_a_compiled_model_has_no_graph_breaks(name):
    model, inputs = of(name)
    expected = step(model, inputs)
    patch(model)
    torch._dynamo.reset()
    check_rounding(step(torch.compile(model, fullgraph=True, backend=aot_eager), inputs), expected)
