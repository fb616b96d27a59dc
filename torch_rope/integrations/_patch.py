"""Replaces what rotates in a model. The handle lists what was replaced, and restores the model."""

import copy
import copyreg
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ._conventions import ConventionRebuilder
from ._methods import Rebuilder
from ._put_off import norm_of, put_off
from ._rebuild import names

HANDLE = "_torch_rope_patch"  # the attribute of a patched model that holds the handle


def forward_of(module: nn.Module) -> str:
    """Returns the attribute of the module's own forward. The hooks of accelerate keep it under another name."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


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
class Replaced:
    """An attribute of one module that was replaced: a method, or an object that the module calls."""

    path: str
    module: nn.Module
    attribute: str  # the module's attribute that holds the method or object
    before: Any  # the value of the attribute before the patch; None if the module itself had no such attribute
    now: Any
    calls: tuple = ()  # the calls of torch_rope in it
    note: str = ""  # what is fused
    after: Callable = lambda replaced: None  # is called when the model is restored

    @classmethod
    def method(cls, path: str, module: nn.Module, name: str, function: Callable, note: str = "", **more) -> "Replaced":
        """Returns a method of this name that is replaced by a function."""
        attribute = forward_of(module) if name == "forward" else name
        calls = getattr(function, "_torch_rope", ())
        now, before = types.MethodType(function, module), vars(module).get(attribute)
        return cls(path, module, attribute, before, now, calls, note, **more)

    @property
    def name(self) -> str:
        """The method, or the attribute that holds the object."""
        return self.now.__name__ if isinstance(self.now, types.MethodType) else self.attribute

    @property
    def owner(self) -> str:
        """The class that has the method."""
        return type(self.module if isinstance(self.now, types.MethodType) else self.now).__name__


def patched_before(
    model: Any, rebuilder: type[Rebuilder], options: dict[str, Any], holder: Any = None
) -> "Patch | None":
    """Returns the handle of a model that is patched already. Raises TypeError or ValueError if an argument is wrong."""
    where = f"{rebuilder.module}.patch"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: model is {model!r} but must be a loaded model, such as {rebuilder.example} returns")
    if options["rounding"] not in ("eager", "once"):
        raise ValueError(f'{where}: rounding is {options["rounding"]!r} but must be "eager" or "once"')
    return vars(model if holder is None else holder).get(HANDLE)


def patch_model(
    model: Any,
    rebuilder: type[ConventionRebuilder],
    options: dict[str, Any],
    exact_rotary: Callable | None = None,
    holder: Any = None,
) -> "Patch":
    """Patches a model whose rotary functions follow conventions, and returns the handle.

    Args:
        rebuilder: the class that rebuilds its methods.
        options: the arguments of the function patch.
        exact_rotary: returns a forward for a rotary module of an owner, and a text about it.
        holder: the pipeline of which model holds the components.
    """
    before = patched_before(model, rebuilder, options, holder)
    holder = model if holder is None else holder
    if before is not None and before.options == options:
        return before
    name = type(holder).__name__
    replaced = replaced_in(
        model, rebuilder(options["rounding"], put_off if options["fuse"] else None), before, None, name
    )
    if not replaced:
        raise ValueError(f"{name} is not patched: no module of it calls a rotary function")
    notes = []
    for path, module in model.named_modules() if options.get("exact_angles") else ():
        function, note = exact_rotary(module, _owner(model, path))
        if function is not None:
            replaced.append(Replaced.method(path, module, "forward", function, note))
        elif note:
            notes.append(f"{path}: {note}")
    return Patch(holder, replaced, options, notes)


def _owner(model: nn.Module, path: str) -> nn.Module:
    """Returns the innermost module on a path that can be made from its config, or the model."""
    parents = [path.rsplit(".", n)[0] for n in range(1, path.count(".") + 1)]
    modules = [*map(model.get_submodule, parents), model]
    return next((m for m in modules if hasattr(m, "from_config")), model)


def replaced_in(
    model: nn.Module,
    rebuilder: Rebuilder,
    before: "Patch | None" = None,
    fuse: Callable | None = None,
    name: str = "",
) -> list[Replaced]:
    """Returns what must be replaced in a model so that it rotates with torch_rope: methods of its modules, and objects
    that its modules call, such as attention processors.

    Args:
        before: the handle of an earlier patch.
        fuse: a function that is called with a module, a method of it and the rebuilt method, and returns the method that
            takes its place and a note about it.
        name: what errors call the model.

    Raises NotImplementedError if something rotates in a way that is not supported, ValueError if it is patched already.
    """
    replaced, classes = [], {}  # torch.compile compiles once for all processors of one class
    for path, module in model.named_modules():
        rebuilder.paths[module] = path or "the model itself"
        where = f"{name or type(model).__name__} is not patched: {{}} of {rebuilder.paths[module]}"
        for method, function, new in _rebuilt(where, module, rebuilder, before):
            note = _put_off_in(module, [new])
            if fuse is not None:
                new, note = fuse(module, function, new)
            replaced.append(Replaced.method(path, module, method, new, note))
        for attribute, value in [*vars(module).items(), *module._modules.items()]:
            if _is_processor(value):
                rebuilder.paths[value] = f"{path}.{attribute}".lstrip(".")
                methods = {name: new for name, _, new in _rebuilt(where, value, rebuilder, before)}
                if methods:
                    key = type(value), *methods.values()
                    classes[key] = classes.get(key) or _processor_class(type(value), methods)
                    now, calls = object.__new__(classes[key]), {c: 0 for f in methods.values() for c in f._torch_rope}
                    vars(now).update(vars(value))
                    rebuilder.paths[now] = rebuilder.paths[value]
                    note = _put_off_in(module, methods.values())
                    replaced.append(Replaced(path, module, attribute, value, now, tuple(calls), note, _keep_state))
    return replaced


def _put_off_in(module: nn.Module, methods: Iterable[Callable]) -> str:
    """Returns which norms of a module these methods put off, in words."""
    names = {name: 0 for f in methods for name in getattr(f, "_torch_rope_norms", ())}
    found = [name for name in names if norm_of(getattr(module, name, None))]
    return f"{', '.join(found)} in norm_rotate_qk, if only views stand between" if found else ""


def _rebuilt(
    where: str, owner: Any, rebuilder: Rebuilder, before: "Patch | None"
) -> Iterator[tuple[str, Callable, Callable]]:
    """Yields the methods of a module or processor that rotate: the name, the method, and the rebuilt method."""
    for method, (function, *inherited) in rebuilder.methods(type(owner)):
        there = where.format(f"{type(owner).__name__}.{method}")
        attribute = forward_of(owner) if method == "forward" else method
        current = getattr(owner, "__dict__", {}).get(attribute)
        bound = getattr(current, "__self__", None) is owner
        function = current.__func__ if bound else function
        if hasattr(function, "_torch_rope"):
            what = before or "; ".join(map(str, function._torch_rope))
            raise ValueError(
                f"{there} already calls torch_rope, because this model, or the model that it was copied from, is "
                f"patched; undo that patch first. What is there: {what}"
            )
        try:
            new = rebuilder.rebuild(function)
        except NotImplementedError as error:
            raise NotImplementedError(f"{there} {error}") from None
        if new is not function:
            if current is not None and not bound:
                raise NotImplementedError(
                    f"{there} was replaced by {current!r} but must be a method of the module; patch the model before "
                    "the method is replaced"
                )
            yield method, function, new
        elif re.match("_?apply_(rotary|rope)", method):
            raise NotImplementedError(f"{there} must call a rotary function that can be replaced but does not")
        elif "super" in names(inspect.unwrap(function).__code__) and any(map(rebuilder.calls_rotary, inherited)):
            raise NotImplementedError(f"{there} calls super(), whose rotary function cannot be replaced")


def _is_processor(value: Any) -> bool:
    """Returns whether a value is an object that a module calls, with a method __call__ of its own class."""
    call = inspect.getattr_static(type(value), "__call__", None)
    return isinstance(call, types.FunctionType) and call is not nn.Module.__call__ and hasattr(value, "__dict__")


def _processor_class(old: type, methods: dict[str, Callable]) -> type:
    """Returns a subclass that has these methods, and whose objects are pickled as objects of the class."""

    def reduce(self, _):  # pickle finds the old class by its name
        return copyreg._reconstructor, (old, object, None), vars(self)

    def deepcopy(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    more = {"__module__": old.__module__, "__qualname__": old.__qualname__}
    return type(old.__name__, (old,), methods | more | {"__reduce_ex__": reduce, "__deepcopy__": deepcopy})


def _keep_state(replaced: Replaced) -> None:
    """Gives the object that was replaced the state that its copy has now."""
    vars(replaced.before).update(vars(replaced.now))


class Patch:
    """The handle that patch returns. ``str()`` of it lists what was replaced."""

    def __init__(self, model: Any, replaced: list[Replaced], options: dict[str, Any], notes: list[str]):
        self._model, self._replaced, self.options, self.notes = model, replaced, options, notes
        for r in replaced:
            _set(r.module, r.attribute, r.now)
            vars(r.module)[_replicate.__name__] = types.MethodType(_replicate, r.module)
        vars(model)[HANDLE] = self

    def undo(self) -> None:
        """Restores the model. If the model is restored already, this does nothing.

        Raises:
            RuntimeError: what was patched was replaced after ``patch``. The new method may call the patched one, so
                nothing is changed; restore the patched method first.
        """
        attributes = [(r, [n for n, value in _attributes(r.module) if value is r.now]) for r in self._replaced]
        for r, found in attributes:
            if not found:
                raise RuntimeError(
                    f"torch_rope: {r.path}.{r.attribute} was replaced after it was patched; undo that replacement first"
                )
        for r, (name, *_) in attributes:
            vars(r.module).pop(_replicate.__name__, None)
            r.after(r)
            if r.before is not None or name != r.attribute:
                # A hook of accelerate calls the method in this attribute, so the attribute must not be deleted.
                _set(r.module, name, r.before or getattr(type(r.module), r.attribute).__get__(r.module))
            else:
                del vars(r.module)[name]
        self._replaced = []
        vars(self._model).pop(HANDLE, None)

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
            path = re.sub(r"\b\d+\b", "*", f"{r.path}.{r.name}".lstrip("."))
            does = [*map(str, r.calls), *([r.note] if r.note else [])]
            line = f"{path} of %d {r.owner}: {'; '.join(does)}"
            lines[line] = lines.get(line, 0) + 1
        lines |= dict.fromkeys(self.notes, ())
        return "\n  ".join([f"torch_rope in {type(self._model).__name__}:", *(k % n for k, n in lines.items())])


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [*vars(module).items(), *module._modules.items()]


def _set(module: nn.Module, name: str, value: Any) -> None:
    """Sets an attribute of a module, or a module in it."""
    (module._modules if name in module._modules else vars(module))[name] = value
