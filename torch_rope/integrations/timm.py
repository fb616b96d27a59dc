"""Lets a loaded model of timm (PyTorch Image Models) rotate with torch_rope: EVA, DINOv3, NaFlexViT, Perception Encoder and
others.

timm's rotary functions take sin and cos with each number twice. Their tables are shared by all tokens of a batch, or
belong to a head (mixed frequencies) or to an image (NaFlexViT).
"""

import re

import torch
from torch import nn

from torch_rope.integrations._conventions import Convention, ConventionRebuilder, each_twice, full_width
from torch_rope.integrations._methods import register
from torch_rope.integrations._patch import Patch, patch_model

__all__ = ["Patch", "patch", "register"]


def _read(x, sin, cos, half):
    return full_width(cos, sin, not half)


def _samples(s):
    shapes = (s.seq,), (s.heads, s.seq), (s.batch, 1, s.seq), (s.batch, s.heads, s.seq)
    for half in (False, True):
        for shape in shapes:
            cos, sin = each_twice(*s.angles(*shape), not half)
            yield s.x(s.batch, s.heads, s.seq)[..., :16], sin, cos, half
        cos, sin = each_twice(*s.angles(s.seq), not half)
        yield s.x(s.batch, s.seq)[..., :16], sin, cos, half


def _read_side_by_side(x, table, half):
    sin, cos = table.chunk(2, -1)
    return full_width(cos, sin, not half)


def _samples_side_by_side(s):
    for x, sin, cos, half in _samples(s):
        yield x, torch.cat([sin, cos], -1), half


class Rebuilder(ConventionRebuilder):
    """Rebuilds the methods of one model of timm."""

    rotary_names = re.compile("(^|_)apply_rot")
    module = "torch_rope.integrations.timm"
    example = 'timm.create_model("vit_small_patch16_dinov3")'
    conventions = (
        Convention(1, 3, _read, _samples),  # apply_rot_embed, and apply_rot_embed_list for one tensor
        Convention(1, 2, _read_side_by_side, _samples_side_by_side),  # apply_rot_embed_cat
    )


def patch(model: nn.Module, *, rounding: str = "eager", fuse: bool = False) -> Patch:
    """Makes a model of timm rotate q and k with torch_rope, for inference and training.

    The change takes effect at once and concerns this model only. The returned handle restores the model, either by its
    ``undo()`` method or at the end of a ``with`` block. Prefix tokens, such as class tokens and registers, stay as they
    are, as in timm.

    Args:
        model: a model of timm, or any module that contains one.
        rounding: "eager" keeps the bits of the unpatched model's results and gradients, on a CPU without
            ``torch.compile``. Tables that are trained (mixed frequencies) then go to timm's own function, because the
            order of their gradients' sums is its own. "once" rounds once, at the end, and rotates by such tables too.
        fuse: also computes the RMS norms of q and k in the operator that rotates them, if a layer does nothing in
            between but take views. Results change by rounding. The models of timm 1.0 cut prefix tokens off in between,
            so only layers of your own gain by it.

    Returns:
        A :class:`Patch`. For a model that is patched in the same way already, the handle of that patch.

    Raises:
        TypeError: model is not a module.
        NotImplementedError: the model rotates in a way that torch_rope does not support. The model is unchanged.
        ValueError: no module of the model rotates, or the model is already patched in another way. The model is
            unchanged.
    """
    return patch_model(model, Rebuilder, {"rounding": rounding, "fuse": fuse})
