"""Lets a loaded model or pipeline of Hugging Face diffusers rotate with torch_rope.

In each attention layer of diffusers, one of some forty functions rotates q and k. :func:`patch` replaces it in one model.
"""

import re
from typing import Any

from torch import nn

from ..._mistakes import named
from .._angles import of_diffusers
from .._patch import Library, Patch, packages_of, patch_model
from .fuse import fuser
from .known import FUNCTIONS, UNSUPPORTED

__all__ = ["Patch", "patch", "register"]

LIBRARY = Library(
    patch="torch_rope.integrations.diffusers.patch",
    example="FluxTransformer2DModel.from_pretrained(...)",
    rotary=re.compile("(^|_)rotate(_|$)|(^|_)apply_.*(rotary|rope|rot)(_|$)|(rotary|rope)_apply"),
    known=FUNCTIONS,
    unsupported=UNSUPPORTED,
)


register = LIBRARY.register


@named
def patch(model: Any, *, rounding: str = "eager", fuse: bool = False, exact_angles: bool = False) -> Patch:
    """Makes a model or pipeline of diffusers rotate q and k with torch_rope, for inference and training.

    Weights, hooks, adapters and tables are not touched. The rest is as in
    :func:`torch_rope.integrations.transformers.patch`: rounding, exact_angles, the Patch, the copies of a model, the errors
    and the warning.

    Args:
        model: a model of diffusers, any module that contains one, or a pipeline with all its models.
        fuse: also computes the RMS norms of q and k in the operator that rotates them, where a layer allows it. Results
            differ in their last bits.
    """
    options = {"rounding": rounding, "fuse": fuse, "exact_angles": exact_angles}
    angles = of_diffusers if exact_angles else None
    modules, parts, encoders = model, getattr(model, "components", None), {}
    if not isinstance(model, nn.Module) and isinstance(parts, dict):
        parts = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        encoders = {name: part for name, part in parts.items() if "transformers" in packages_of(part)}
        modules = nn.ModuleDict({name: part for name, part in parts.items() if name not in encoders})
    patched = patch_model(LIBRARY, modules, options, fuser(rounding) if fuse else None, angles, model)
    ours = [r.path for r in patched.left()]
    left = _left_as_they_are(modules, ours, "its formula is written out, in no function that torch_rope could replace")
    left += _left_as_they_are(nn.ModuleDict(encoders), [], "torch_rope.integrations.transformers has a patch for it")
    patched.notes += left
    return patched


def _left_as_they_are(model: nn.Module, ours: list[str], why: str) -> list[str]:
    """Returns notes about rotary modules around which nothing is replaced. ours: the paths of what is replaced."""
    notes = []
    for path, module in model.named_modules():
        around, kind = path.rpartition(".")[0], type(module).__name__
        if re.search("Rope|RoPE|Rotary", kind) and not any(f"{p}.".startswith(f"{around}.".lstrip(".")) for p in ours):
            notes.append(re.sub(r"\b\d+\b", "*", path) + f": {kind} rotates without torch_rope: {why}")
    return [*dict.fromkeys(notes)]
