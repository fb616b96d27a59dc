"""Lets a loaded model or pipeline of Hugging Face diffusers rotate with torch_rope."""

import re

from torch import nn

from torch_rope.integrations._conventions import ConventionRebuilder
from torch_rope.integrations._patch import Patch, patched_before, replaced_in
from torch_rope.integrations._put_off import put_off
from torch_rope.integrations.diffusers.conventions import CONVENTIONS


class Rebuilder(ConventionRebuilder):
    """Rebuilds the methods and attention processors of one model of diffusers."""

    rotary_names = re.compile("(^|_)rotate(_|$)|(^|_)apply_.*(rotary|rope|rot)(_|$)|(rotary|rope)_apply")
    module = "torch_rope.integrations.diffusers"
    conventions = CONVENTIONS


def patch(model: nn.Module, *, rounding: str = "eager", fuse: bool = False, exact_angles: bool = False) -> Patch:
    options = {"rounding": rounding, "fuse": fuse, "exact_angles": exact_angles}
    before = patched_before(model, Rebuilder.module, options, "FluxTransformer2DModel.from_pretrained(...)")
    if before is not None and before.options == options:
        return before
    replaced = replaced_in(model, Rebuilder(rounding, put_off if fuse else None), before)
    if not replaced:
        raise ValueError(f"{type(model).__name__} is not patched: no module of it calls a rotary function")
    return Patch(model, replaced, options, [])
