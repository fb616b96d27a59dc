"""Lets a loaded model of timm (PyTorch Image Models) rotate with torch_rope: EVA, DINOv3, NaFlexViT and others.

timm's rotary functions take sin and cos with each number twice. Their tables are shared by all tokens of a batch, or
belong to a head (mixed frequencies) or to an image (NaFlexViT).
"""

import re

from torch import nn

from .._mistakes import named
from ._known_timm import FUNCTIONS, UNSUPPORTED
from ._patch import Library, Patch, patch_model

__all__ = ["Patch", "patch", "register"]


LIBRARY = Library(
    patch="torch_rope.integrations.timm.patch",
    example='timm.create_model("vit_small_patch16_dinov3")',
    rotary=re.compile("(^|_)apply_rot"),
    known=FUNCTIONS,
    unsupported=UNSUPPORTED,
)


register = LIBRARY.register


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
