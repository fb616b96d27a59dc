"""Compares patched models of timm with unpatched ones, and tests what patch changes, leaves alone and refuses."""

import copy
import functools
import re

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F
from vision_models import MODELS, timm

from torch_rope.integrations import _conventions, _put_off
from torch_rope.integrations.timm import patch, register

pytestmark = pytest.mark.cpu

# The largest allowed differences, as parts of the largest element of the output and of the largest gradient, if q and k
# are rounded in another way. They are three times those that were seen. A model that does not rotate differs by BROKEN
# or more.
OUTPUT = {torch.float32: 2e-6, torch.bfloat16: 0.06}
GRADIENTS, BROKEN = 7e-6, 0.1
# The models whose tables are made of frequencies that are trained.
TRAINED = [name for name in MODELS if "mixed" in name]


@functools.cache
def models(dtype=torch.float32, **options):
    """Returns all models, patched at once if there are options, and their inputs."""
    torch.manual_seed(0)
    made = {name: make() for name, make in MODELS.items()}
    together = nn.ModuleDict({name: model for name, (model, _) in made.items()}).to(dtype)
    if options:
        patch(together, **options)
    return together, {name: cast(inputs, dtype) for name, (_, inputs) in made.items()}


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
    return {"output": out.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def of(name, dtype=torch.float32, **options):
    """Returns a model and its inputs."""
    together, inputs = models(dtype, **options)
    return together[name], inputs[name]


def small(name="dinov3"):
    """Returns a new model and its inputs."""
    torch.manual_seed(0)
    return MODELS[name]()


def same(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[n], expected[n]) for n in expected)


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value."""
    return ((actual.float() - expected.float()).abs().max() / expected.abs().max()).item()


def gradients(result):
    return torch.cat([grad.flatten() for name, grad in result.items() if name != "output"])


@pytest.fixture
def calls(monkeypatch):
    """A list with True for each call of a rotary function that torch_rope computed, and False for each other one."""
    counted, rotate = [], _conventions.ConventionRotator.try_to_rotate

    def counts(*args):
        ys = rotate(*args)
        counted.append(ys is not None)
        return ys

    monkeypatch.setattr(_conventions.ConventionRotator, "try_to_rotate", counts)
    return counted


# ---- the same results ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_have_the_same_bits(name, dtype, calls):
    expected = step(*of(name, dtype))
    assert not calls
    assert same(step(*of(name, dtype, rounding="eager")), expected)
    assert calls and set(calls) == {name not in TRAINED}  # tables that are trained go to timm's own function


@pytest.mark.parametrize("name", TRAINED)
def test_tables_that_are_trained_rotate_with_torch_rope_if_they_need_no_gradient(name, calls):
    assert torch.equal(output(*of(name, rounding="eager")), output(*of(name)))
    assert calls and all(calls)


@pytest.mark.parametrize("name", MODELS)
def test_results_that_are_rounded_once_differ_by_rounding(name, calls):
    actual, expected = step(*of(name, rounding="once")), step(*of(name))
    assert calls and all(calls)
    assert actual.keys() == expected.keys()
    assert difference(actual["output"], expected["output"]) < OUTPUT[torch.float32]
    assert difference(gradients(actual), gradients(expected)) < GRADIENTS
    for freqs in (n for n in expected if n.endswith("freqs")):
        assert difference(actual[freqs], expected[freqs]) < GRADIENTS


@pytest.mark.parametrize("name", MODELS)
def test_results_in_bfloat16_that_are_rounded_once_differ_by_rounding(name):
    actual, expected = (output(*of(name, torch.bfloat16, **o)) for o in ({"rounding": "once"}, {}))
    assert difference(actual, expected) < OUTPUT[torch.bfloat16]


@pytest.mark.parametrize("name", MODELS)
def test_results_without_a_rotation_differ(name, monkeypatch):
    expected = step(*of(name))
    monkeypatch.setattr(timm.layers.pos_embed_sincos, "apply_rot_embed", lambda x, *tables, half=False: x)
    assert difference(gradients(step(*of(name))), gradients(expected)) > BROKEN


@pytest.mark.parametrize("name", ["eva02", "registers", "dinov3", "perception encoder", "attention pool"])
def test_prefix_tokens_stay_as_they_are(name, monkeypatch):
    seen, attention = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, *a, **kw: seen.append((q, k)) or attention(q, k, *a, **kw))
    before, (after, _) = of(name), of(name, rounding="once")
    for model in (before[0], after):
        output(model, before[1])
    prefix = getattr(after, "num_prefix_tokens", 1)
    for actual, expected in zip(seen[len(seen) // 2], seen[0], strict=True):  # q and k of the first layer
        assert prefix and torch.equal(actual[:, :, :prefix], expected[:, :, :prefix])
        assert not torch.equal(actual, expected)


# ---- norms ----


class Norms(nn.Module):
    """Normalises and rotates q and k [batch, heads, seq, head_dim]. The norms are those of timm."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = timm.layers.RmsNorm(16), timm.layers.RmsNorm(16)

    def forward(self, q, k, tables):
        return (
            timm_functions.apply_rot_embed_cat(self.q_norm(q), tables),
            timm_functions.apply_rot_embed_cat(self.k_norm(k), tables),
        )
