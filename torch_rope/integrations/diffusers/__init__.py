"""Lets a loaded model or pipeline of Hugging Face diffusers rotate with torch_rope.

A model of diffusers makes tables of angles once per forward. In each attention layer, a rotary function rotates q and k
by them: one of some forty functions, of which each takes the tables in a way of its own. :func:`patch` replaces it in the
attention processors and modules of one model.
"""

import re
from typing import Any

from torch import nn

from torch_rope.integrations._conventions import ConventionRebuilder
from torch_rope.integrations._methods import register
from torch_rope.integrations._patch import Patch, patch_model
from torch_rope.integrations.diffusers.angles import exact_rotary
from torch_rope.integrations.diffusers.conventions import CONVENTIONS

__all__ = ["Patch", "patch", "register"]


class Rebuilder(ConventionRebuilder):
    """Rebuilds the methods and attention processors of one model of diffusers."""

    rotary_names = re.compile("(^|_)rotate(_|$)|(^|_)apply_.*(rotary|rope|rot)(_|$)|(rotary|rope)_apply")
    module = "torch_rope.integrations.diffusers"
    conventions = CONVENTIONS
    example = "FluxTransformer2DModel.from_pretrained(...)"


def patch(model: Any, *, rounding: str = "eager", fuse: bool = False, exact_angles: bool = False) -> Patch:
    """Makes a model or pipeline of diffusers rotate q and k with torch_rope, for inference and training.

    The change takes effect at once and concerns this model only. The returned handle restores the model, either by its
    ``undo()`` method or at the end of a ``with`` block::

        handle = patch(pipeline)
        print(handle)  # lists what calls torch_rope now
        handle.undo()

    ``patch`` finds out what a rotary function does by calling it on random numbers. Weights, hooks, adapters and tables
    are not touched, and other models of the same class do not change. A deepcopy of a patched model is patched; a model
    that was pickled and loaded is not.

    Args:
        model: a model of diffusers, any module that contains one, or a pipeline, of which every such component is
            patched.
        rounding: "eager" keeps the bits of the unpatched model's results and gradients, on a CPU without
            ``torch.compile``. The handle lists the functions whose bits cannot be had. "once" rounds once, at the end.
        fuse: also computes the RMS norms of q and k in the operator that rotates them, if a layer does nothing in
            between but take views. Results change by rounding. Under ``torch.compile`` and autocast the norms stay as
            they are.
        exact_angles: also makes the rotary modules compute in float64, on the CPU if the device has no float64, whatever
            autocast says. The handle lists the modules that are left as they are, and why.

    Returns:
        A :class:`Patch`. For a model that is patched in the same way already, the handle of that patch.

    Raises:
        TypeError: model is neither a module nor a pipeline.
        NotImplementedError: the model rotates in a way that torch_rope does not support. The model is unchanged;
            :func:`register` can help.
        ValueError: nothing in the model rotates, or the model is already patched in another way. The model is
            unchanged.

    Warns:
        UserWarning: in a forward, if a rotary function is called with tables that are no rotation, with different angles
            for the two channels of a pair. The function then computes as without torch_rope.
    """
    options = {"rounding": rounding, "fuse": fuse, "exact_angles": exact_angles}
    parts = getattr(model, "components", None)
    if isinstance(model, nn.Module) or not isinstance(parts, dict):
        return patch_model(model, Rebuilder, options, exact_rotary)
    modules = nn.ModuleDict({name: part for name, part in parts.items() if _is_of_diffusers(part)})
    return patch_model(modules, Rebuilder, options, exact_rotary, holder=model)


def _is_of_diffusers(part: Any) -> bool:
    """Returns whether a component of a pipeline is a module that diffusers defines, and not a text encoder of transformers."""
    return isinstance(part, nn.Module) and not any(c.__module__.startswith("transformers.") for c in type(part).__mro__)
