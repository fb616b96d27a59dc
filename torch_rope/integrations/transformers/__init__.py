"""Lets a loaded model of Hugging Face transformers rotate with torch_rope.

A model of transformers makes cos and sin once per forward, in its rotary module. In each layer, a function of the
model's modeling file rotates q and k by them: the rotary function. :func:`patch` replaces the rotary function in one
model by torch_rope. :func:`kernel_mapping` replaces it through transformers' own mechanism, the kernels package. The
rotary module is not changed, so every kind of frequencies and positions that transformers supports still works.
"""

import inspect
import re
import types
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_rope.integrations.transformers.hub import apply_rotary_transformers, kernel_mapping
from torch_rope.integrations.transformers.rebuild import Rebuilder, names
from torch_rope.integrations.transformers.rotary import has_form, sample_tables

__all__ = ["Patch", "apply_rotary_transformers", "kernel_mapping", "patch"]


def patch(model: nn.Module) -> "Patch":
    """Makes a model of transformers rotate q and k with torch_rope, for inference and training.

    The change takes effect at once and concerns this model only. The returned handle restores the model, either by its
    ``undo()`` method or at the end of a ``with`` block::

        handle = patch(model)
        print(handle)  # lists the methods that call torch_rope now
        handle.undo()

    ``patch`` finds out what a rotary function does by calling it on random numbers, not by its name. Weights, hooks and
    caches are not touched, and other models of the same class do not change. A deepcopy of a patched model is patched;
    a model that was pickled and loaded is not.

    The rotated q and k have the dtype of q and k. transformers returns float32 if q and k are bfloat16 or float16 and
    cos and sin are float32, as under autocast; attention then rounds q and k back to their dtype.

    Args:
        model: a model of transformers, or any module that contains one.

    Returns:
        A :class:`Patch`.

    Raises:
        NotImplementedError: the model rotates in a way that torch_rope does not support. The model is unchanged.
        ValueError: no module of the model rotates, or the model is already patched. The model is unchanged.
    """
    name, rebuilder, replaced = type(model).__name__, Rebuilder(), []
    for path, module in model.named_modules():
        for method, (function, *inherited) in rebuilder.methods(type(module)):
            where = f"{name} is not patched: {type(module).__name__}.{method} of {path or 'the model itself'}"
            # The hooks of accelerate keep the module's own forward in this attribute, and call it.
            attribute = "_old_forward" if method == "forward" and "_old_forward" in vars(module) else method
            current = vars(module).get(attribute)
            bound = getattr(current, "__self__", None) is module
            function = current.__func__ if bound else function
            if hasattr(function, "_torch_rope"):
                raise ValueError(
                    f"{where} already calls torch_rope, because this model, or the model that it was copied from, "
                    "is patched"
                )
            try:
                new = rebuilder.rebuild(function)
            except NotImplementedError as error:
                raise NotImplementedError(f"{where} {error}") from None
            if new is not function:
                if current is not None and not bound:
                    raise NotImplementedError(
                        f"{where} was replaced by {current!r} but must be a method of the module; patch the model "
                        "before the method is replaced"
                    )
                replaced.append(_Replaced(path, module, attribute, current, types.MethodType(new, module)))
            elif re.match("_?apply_(rotary|rope)", method):
                raise NotImplementedError(f"{where} must call a rotary function that can be replaced but does not")
            elif "super" in names(inspect.unwrap(function).__code__) and any(map(rebuilder.calls_rotary, inherited)):
                raise NotImplementedError(f"{where} calls super(), whose rotary function cannot be replaced")
    if not replaced:
        raise ValueError(f"{name} is not patched: no module of it calls a rotary function")
    calls = {call for r in replaced for call in r.method.__func__._torch_rope}
    for path, module in model.named_modules():
        for tables in sample_tables(module):
            if not any(call.of_parts or has_form(call.rotation.tables, *tables) for call in calls):
                raise NotImplementedError(
                    f"{name} is not patched: {path} has different angles for the two channels of a pair but must have "
                    "the same angle"
                )
    for r in replaced:
        vars(r.module)[r.attribute] = r.method
        vars(r.module)[_replicate.__name__] = types.MethodType(_replicate, r.module)
    return Patch(model, replaced)


def _replicate(self: nn.Module) -> nn.Module:
    """Returns a replica for nn.DataParallel whose replaced methods belong to the replica.

    nn.DataParallel copies the attributes of a module. The copied methods would still be bound to the original module,
    and so compute with its weights.
    """
    replica = type(self)._replicate_for_data_parallel(self)
    for name, value in vars(replica).items():
        if isinstance(value, types.MethodType) and value.__self__ is self:
            vars(replica)[name] = types.MethodType(value.__func__, replica)
    return replica


# nn.DataParallel calls the method of this name, and pickle looks the name up in the class.
_replicate.__name__ = "_replicate_for_data_parallel"


@dataclass
class _Replaced:
    """A method of one module that :func:`patch` replaced."""

    path: str
    module: nn.Module
    attribute: str  # the module's attribute that holds the method
    before: Any  # the value of the attribute before the patch; None if the module itself had no such attribute
    method: types.MethodType


class Patch:
    """The handle that :func:`patch` returns. ``str()`` of it lists the replaced methods."""

    def __init__(self, model: nn.Module, replaced: list[_Replaced]):
        self._model, self._replaced = model, replaced

    def undo(self) -> None:
        """Restores the model. If the model is restored already, this does nothing.

        Raises:
            RuntimeError: a patched method was replaced after ``patch``. The new method may call the patched one, so
                nothing is changed; restore the patched method first.
        """
        attributes = [
            (r, [name for name, value in vars(r.module).items() if value is r.method]) for r in self._replaced
        ]
        for r, found in attributes:
            if not found:
                raise RuntimeError(
                    f"torch_rope: {r.path}.{r.attribute} was replaced after it was patched; undo that replacement first"
                )
        for r, (name,) in attributes:
            vars(r.module).pop(_replicate.__name__, None)
            if r.before is not None or name != r.attribute:
                # A hook of accelerate calls the method in this attribute, so the attribute must not be deleted.
                vars(r.module)[name] = r.before or getattr(type(r.module), r.attribute).__get__(r.module)
            else:
                del vars(r.module)[name]
        self._replaced = []

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_) -> None:
        self.undo()

    def __repr__(self) -> str:
        if not self._replaced:
            return f"torch_rope is not in {type(self._model).__name__} any more"
        lines = {}
        for r in self._replaced:
            path = re.sub(r"\b\d+\b", "*", f"{r.path}.{r.method.__name__}".lstrip("."))
            line = f"{path} of %d {type(r.module).__name__}: {'; '.join(map(str, r.method.__func__._torch_rope))}"
            lines[line] = lines.get(line, 0) + 1
        for path, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and "original" not in name:
                    lines[f"{path}.{name}: {buffer.numel()} frequencies, as before"] = ()
        return "\n  ".join([f"torch_rope in {type(self._model).__name__}:", *(k % n for k, n in lines.items())])
