"""Lets a loaded model of Hugging Face transformers rotate with torch_rope.

In each layer, a function of the model's modeling file rotates q and k: the rotary function. :func:`patch` replaces it in
one model. :func:`kernel_mapping` replaces it through transformers' own mechanism, the kernels package.
"""

import re

from torch import nn

from ..._mistakes import named
from .._angles import of_transformers
from .._patch import Library, Patch, patch_model
from .hub import apply_rotary_transformers, kernel_mapping
from .known import FUNCTIONS, UNSUPPORTED

__all__ = ["Patch", "apply_rotary_transformers", "kernel_mapping", "patch", "register"]

LIBRARY = Library(
    patch="torch_rope.integrations.transformers.patch",
    example="AutoModelForCausalLM.from_pretrained(...)",
    rotary=re.compile("(^|_)(rotary|rope|rotate)(_|$)"),
    known=FUNCTIONS,
    unsupported=UNSUPPORTED,
    left_out=re.compile(r"(torch|builtins|transformers(?!\.models\b))\b"),
)


register = LIBRARY.register


@named
def patch(model: nn.Module, *, rounding: str = "eager", fuse: bool = False, exact_angles: bool = False) -> "Patch":
    """Makes a model of transformers rotate q and k with torch_rope, for inference and training.

    ``patch`` knows rotary functions and attention layers by their texts, and refuses a function whose text it does not know.
    The change takes effect at once and concerns this model only: a layer gets a subclass of its class. Weights, hooks and
    caches are not touched. A copy of a patched model or layer is patched; one that was pickled and loaded is not. To patch
    a model again adds what is new in it.

    Args:
        model: a model of transformers, or any module that contains one.
        rounding: "eager" keeps the bits of the unpatched model's logits and gradients, on a CPU without
            ``torch.compile``. The Patch lists the functions whose bits differ. "once" rounds once, at the end,
            which is more accurate; q and k keep their dtype then, also where the tables are wider (autocast).
        fuse: also fuses what stands around the rotation in attention layers that are known: the norm of q and k, and the
            write into a StaticCache. Results differ in the last bits of a norm's sum. The Patch lists the layers that are
            not fused, and why.
        exact_angles: also makes the rotary modules compute in float64. The Patch lists the modules that do not, and why.
            If a rotary module is changed later, its next forward follows the change, or raises ValueError.

    Returns:
        A :class:`Patch`, which lists what calls torch_rope now, and whose ``undo()`` or ``with`` block restores the model.
        For a model that is patched in the same way already, the Patch that it has.

    Raises:
        TypeError: model is not a module.
        NotImplementedError: the model rotates in a way that torch_rope does not support; ``register`` can help.
        ValueError: nothing in the model rotates, or it is patched in another way. After an error it is unchanged.

    Warns:
        UserWarning: in a forward, if a rotary function is called with different angles for the two channels of a pair.
            It then computes as without torch_rope.
    """
    options = {"rounding": rounding, "fuse": fuse, "exact_angles": exact_angles}
    if fuse:
        from .fuse import fuser  # transformers must be installed for it
    angles = (lambda model, path: of_transformers(model.get_submodule(path))) if exact_angles else None
    return patch_model(LIBRARY, model, options, fuser(rounding) if fuse else None, angles)
