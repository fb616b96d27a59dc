"""Modules that rotate as those of diffusers and timm do, and what tests of patch look at."""

import pytest
import torch
from known.samples import adjacent, twice
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from torch_rope.integrations import _patch
from torch_rope.integrations._bits import Rounds
from torch_rope.integrations._conventions import CONVENTIONS
from torch_rope.integrations._reading import Known
from torch_rope.integrations._rotary import Rotary


@pytest.fixture
def rotations(monkeypatch):
    """A list that says of each rotary function that is called in a patched model whether torch_rope rotates."""
    found, rotated = [], Rotary._rotated

    def record(self, values):
        ys = rotated(self, values)
        found.append(ys is not None)
        return ys

    monkeypatch.setattr(Rotary, "_rotated", record)
    return found


def counting(graphs):
    """Returns a backend of torch.compile that appends to graphs how often each graph calls torch_rope."""

    def backend(module, inputs, **options):
        graphs.append(sum("rope." in str(node.target) for node in module.graph.nodes))
        return aot_eager(module, inputs)

    return backend


def rotated(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., ::2], sin[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def apply_rotary_plain(x, cos, sin):
    """Wan does this."""
    return rotated(x, cos, sin)


def turn(x, half):
    (a, b), (c, d) = x.chunk(2, -1), (x[..., ::2], x[..., 1::2])
    return (torch.stack([-d, c], -1).flatten(-2), torch.cat([-b, a], -1))[half]


def apply_rot_embed(x, sin, cos, half=False):
    """timm has these two."""
    return x * cos + turn(x, half) * sin


def apply_rot_embed_cat(x, table, half=False):
    sin, cos = table.chunk(2, -1)
    return x * cos + turn(x, half) * sin


_patch._registered |= {
    apply_rotary_plain: (Known("wan", Rounds()), CONVENTIONS["wan"]),
    apply_rot_embed: (Known("timm", Rounds()), CONVENTIONS["timm"]),
    apply_rot_embed_cat: (Known("timm, one table", Rounds()), CONVENTIONS["timm, one table"]),
}
apply_rotary_of_the_test = apply_rotary_plain  # a test replaces it


class Processor:
    def __call__(self, attn, x, cos, sin):
        return apply_rotary_of_the_test(x, cos, sin)


class Attention(nn.Module):
    def __init__(self, processor):
        super().__init__()
        self.processor = processor

    def forward(self, x, cos, sin):
        return self.processor(self, x, cos, sin)


class Layer(nn.Module):
    """A layer of timm."""

    def forward(self, q, k, sin, cos, half=False):
        return apply_rot_embed(q, sin, cos, half), apply_rot_embed_cat(k, torch.cat([sin, cos], -1), half)


def attention_inputs():
    """Returns the arguments of an attention layer."""
    angle = torch.randn(1, 6, 1, 8).repeat_interleave(2, -1)
    return torch.randn(2, 6, 3, 16), angle.cos(), angle.sin()


def layer_inputs(*shape, half=False):
    """Returns q and k [2, 4, 5, 16], sin and cos [*shape, 5, 16]."""
    cos, sin = (twice if half else adjacent)(*torch.randn(2, *shape, 5, 8))
    return torch.randn(2, 4, 5, 16), torch.randn(2, 4, 5, 16), sin, cos, half


def unpatched(model):
    """Returns whether no method and no processor of a model was replaced."""
    found = [value for module in model.modules() for value in (module, *vars(module).values())]
    calls = [getattr(type(value), name, None) for value in found for name in ("forward", "__call__")]
    return not any(hasattr(f, "_torch_rope") for f in found + calls)
