"""Lets a loaded model of Hugging Face transformers rotate with torch_rope.

A model of transformers makes cos and sin once per forward, in its rotary module. In each layer, a function of the
model's modeling file rotates q and k by them: the rotary function. :func:`patch` replaces the rotary function in one
model by torch_rope. :func:`kernel_mapping` replaces it through transformers' own mechanism, the kernels package. The
rotary module is not changed, so every kind of frequencies and positions that transformers supports still works.
"""

from collections.abc import Callable

from torch import nn

from .._methods import register
from .._patch import Patch, Replaced, patched_before, replaced_in
from .angles import exact_rotary, restore
from .hub import apply_rotary_transformers, kernel_mapping
from .methods import Rebuilder
from .rotary import sample_tables
from .rotator import has_form

__all__ = ["Patch", "apply_rotary_transformers", "kernel_mapping", "patch", "register"]


def patch(model: nn.Module, *, rounding: str = "eager", fuse: bool = False, exact_angles: bool = False) -> "Patch":
    """Makes a model of transformers rotate q and k with torch_rope, for inference and training.

    The change takes effect at once and concerns this model only. The returned handle restores the model, either by its
    ``undo()`` method or at the end of a ``with`` block::

        handle = patch(model)
        print(handle)  # lists the methods that call torch_rope now
        handle.undo()

    ``patch`` finds out what a rotary function does by calling it on random numbers, not by its name. Weights, hooks and
    caches are not touched, and other models of the same class do not change. A deepcopy of a patched model is patched;
    a model that was pickled and loaded is not.

    Args:
        model: a model of transformers, or any module that contains one.
        rounding: "eager" keeps the bits of the unpatched model's logits and gradients, on a CPU without
            ``torch.compile``: torch_rope rounds after each operation, as PyTorch's operators do. The handle lists the
            functions whose bits cannot be had. "once" rounds once, at the end, which is more accurate; q and k keep their
            dtype then, also where the tables are wider (autocast).
        fuse: also fuses what stands around the rotation, as far as a layer allows it: the norm of q and k, the write into
            a StaticCache or DynamicCache, and the rotation in place if no gradient is needed. Each layer is tried on
            random numbers, and what would change its results by more than rounding is left as it is; the handle says
            what and why.
        exact_angles: also replaces the rotary modules, so that positions times frequencies are computed exactly, for any
            position and whatever dtype the model has. The handle lists the modules that are left as they are, and why.

    Returns:
        A :class:`Patch`. For a model that is patched in the same way already, the handle of that patch.

    Raises:
        TypeError: model is not a module.
        NotImplementedError: the model rotates in a way that torch_rope does not support. The model is unchanged;
            :func:`register` can help. A model whose tables cannot be seen now raises it in its first forward, if the two
            channels of a pair have different angles.
        ValueError: no module of the model rotates, or the model is already patched in another way. The model is
            unchanged.
    """
    options = {"rounding": rounding, "fuse": fuse, "exact_angles": exact_angles}
    before = patched_before(model, Rebuilder, options)
    if before is not None and before.options == options:
        return before
    name, rebuilder, notes = type(model).__name__, Rebuilder(rounding), []
    replaced = replaced_in(model, rebuilder, before, _fuser(model, rebuilder) if fuse else None)
    if not replaced:
        raise ValueError(f"{name} is not patched: no module of it calls a rotary function")
    calls = {call for r in replaced for call in r.calls}
    for path, module in model.named_modules():
        for tables in sample_tables(module):
            if not any(call.of_parts or has_form(call.rotation.tables, *tables) for call in calls):
                raise NotImplementedError(
                    f"{name} is not patched: {path} has different angles for the two channels of a pair but must have "
                    "the same angle"
                )
    for path, module in model.named_modules() if exact_angles else ():
        function, note = exact_rotary(module)
        if function is not None:
            replaced.append(Replaced.method(path, module, "forward", function, note, after=restore))
        elif note:
            notes.append(f"{path}: {note}")
    exact = {r.module for r in replaced if r.after is restore}
    notes += [
        f"{path}.{name}: {buffer.numel()} frequencies, as before"
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name and module not in exact
    ]
    return Patch(model, replaced, options, notes)


def _fuser(model: nn.Module, rebuilder: Rebuilder) -> Callable:
    from .fuse import Fuser  # transformers must be installed for it

    return Fuser(model, rebuilder).fuse
