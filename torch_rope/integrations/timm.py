"""Lets a loaded model of timm (PyTorch Image Models) rotate with torch_rope: EVA, DINOv3, NaFlexViT and others.

timm's rotary functions take sin and cos with each number twice. Their tables are shared by all tokens of a batch, or
belong to a head (mixed frequencies) or to an image (NaFlexViT).
"""

import re

from torch import nn

from .._mistakes import named
from ._conventions import ADJACENT, TWICE, by_options, follows, side_by_side, sin_first
from ._patch import Library, Patch, patch_model, register

__all__ = ["Patch", "patch", "register"]

SHAPES = ["batch heads seq: seq", "batch heads seq: heads seq", "batch heads seq: batch 1 seq"]
SHAPES += ["batch heads seq: batch heads seq", "batch seq: seq"]
FORMS = {False: ADJACENT, True: TWICE}

LIBRARY = Library(
    patch="torch_rope.integrations.timm.patch",
    example='timm.create_model("vit_small_patch16_dinov3")',
    rotary=re.compile("(^|_)apply_rot"),
    conventions=(
        # apply_rot_embed, and apply_rot_embed_list for one tensor; the last argument is half
        by_options({(half,): follows(sin_first(form), *SHAPES) for half, form in FORMS.items()}),
        # apply_rot_embed_cat
        by_options({(half,): follows(side_by_side(sin_first(form)), *SHAPES) for half, form in FORMS.items()}),
    ),
    texts={
        "4f8f5e43431d": "apply_rot_embed",
        "6b18cd3092d8": "apply_rot_embed_list",
        "f05dbcbbf54a": "apply_rot_embed_cat",
    },
)


@named
def patch(model: nn.Module, *, rounding: str = "eager", fuse: bool = False) -> Patch:
    """Makes a model of timm rotate q and k with torch_rope, for inference and training.

    Prefix tokens, such as class tokens and registers, stay as they are, as in timm. The rest is as in
    :func:`torch_rope.integrations.transformers.patch`: the Patch, the copies of a model, and the errors.

    Args:
        model: a model of timm, or any module that contains one.
        rounding: "eager" keeps the bits of the unpatched model's results and gradients, on a CPU without
            ``torch.compile``. Trained tables (mixed frequencies) then go to timm's own function, because it sums their
            gradients in its own order. "once" rounds once, at the end, and rotates by such tables too.
        fuse: changes nothing, because the models of timm 1.0 cut prefix tokens off between a norm and the rotation.
    """
    return patch_model(LIBRARY, model, {"rounding": rounding, "fuse": fuse}, None, None)
