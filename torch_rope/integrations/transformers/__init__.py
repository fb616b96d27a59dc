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

from torch_rope.integrations.transformers.angles import exact_rotary, restore
from torch_rope.integrations.transformers.hub import apply_rotary_transformers, kernel_mapping
from torch_rope.integrations.transformers.methods import Rebuilder, register
from torch_rope.integrations.transformers.rebuild import names
from torch_rope.integrations.transformers.rotary import sample_tables
from torch_rope.integrations.transformers.rotator import has_form

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
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"torch_rope.integrations.transformers.patch: model is {model!r} but must be a loaded model, such as "
            "AutoModelForCausalLM.from_pretrained(...) returns"
        )
    if rounding not in ("eager", "once"):
        raise ValueError(
            f'torch_rope.integrations.transformers.patch: rounding is {rounding!r} but must be "eager" or "once"'
        )
    options = {"rounding": rounding, "fuse": fuse, "exact_angles": exact_angles}
    before = vars(model).get(_HANDLE)
    if before is not None and before.options == options:
        return before
    name, rebuilder, replaced, notes = type(model).__name__, Rebuilder(rounding), [], []
    fuser = None
    for path, module in model.named_modules():
        rebuilder.paths[module] = path or "the model itself"
        for method, (function, *inherited) in rebuilder.methods(type(module)):
            where = f"{name} is not patched: {type(module).__name__}.{method} of {path or 'the model itself'}"
            attribute = _forward_of(module) if method == "forward" else method
            current = vars(module).get(attribute)
            bound = getattr(current, "__self__", None) is module
            function = current.__func__ if bound else function
            if hasattr(function, "_torch_rope"):
                there = before or "; ".join(map(str, function._torch_rope))
                raise ValueError(
                    f"{where} already calls torch_rope, because this model, or the model that it was copied from, "
                    f"is patched; undo that patch first. What is there: {there}"
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
                note = ""
                if fuse:
                    fuser = fuser or _fuser(model, rebuilder)
                    new, note = fuser.fuse(module, function, new)
                replaced.append(_Replaced(path, module, attribute, current, types.MethodType(new, module), note))
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
    for path, module in model.named_modules() if exact_angles else ():
        function, note = exact_rotary(module)
        if function is not None:
            attribute, method = _forward_of(module), types.MethodType(function, module)
            replaced.append(_Replaced(path, module, attribute, vars(module).get(attribute), method, note))
        elif note:
            notes.append(f"{path}: {note}")
    for r in replaced:
        vars(r.module)[r.attribute] = r.method
        vars(r.module)[_replicate.__name__] = types.MethodType(_replicate, r.module)
    vars(model)[_HANDLE] = handle = Patch(model, replaced, options, notes)
    return handle


def _forward_of(module: nn.Module) -> str:
    """Returns the attribute of the module's own forward. The hooks of accelerate keep it under another name."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


_HANDLE = "_torch_rope_patch"  # the attribute of a patched model that holds the handle


def _fuser(model: nn.Module, rebuilder: Rebuilder) -> Any:
    from torch_rope.integrations.transformers.fuse import Fuser  # transformers must be installed for it

    return Fuser(model, rebuilder)


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
    note: str  # what is fused


class Patch:
    """The handle that :func:`patch` returns. ``str()`` of it lists the replaced methods."""

    def __init__(self, model: nn.Module, replaced: list[_Replaced], options: dict[str, Any], notes: list[str]):
        self._model, self._replaced, self.options, self.notes = model, replaced, options, notes

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
            restore(r.module)
            if r.before is not None or name != r.attribute:
                # A hook of accelerate calls the method in this attribute, so the attribute must not be deleted.
                vars(r.module)[name] = r.before or getattr(type(r.module), r.attribute).__get__(r.module)
            else:
                del vars(r.module)[name]
        self._replaced = []
        vars(self._model).pop(_HANDLE, None)

    def __reduce__(self):
        return type(None), ()  # a copy of the model has no handle

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
            calls = getattr(r.method.__func__, "_torch_rope", ())  # a rotary module has none
            does = [*map(str, calls), *([r.note] if r.note else [])]
            line = f"{path} of %d {type(r.module).__name__}: {'; '.join(does)}"
            lines[line] = lines.get(line, 0) + 1
        lines |= dict.fromkeys(self.notes, ())
        for path, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                exact = any(r.module is module for r in self._replaced)
                if name.endswith("inv_freq") and "original" not in name and not exact:
                    lines[f"{path}.{name}: {buffer.numel()} frequencies, as before"] = ()
        return "\n  ".join([f"torch_rope in {type(self._model).__name__}:", *(k % n for k, n in lines.items())])
