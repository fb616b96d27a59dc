"""Replaces what rotates in a model. The Patch lists what is replaced now, and restores the model."""

import collections
import contextlib
import copy
import copyreg
import functools
import gc
import inspect
import re
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._mistakes import wrong_type
from ._conventions import Convention
from ._names import copy_of, renamed
from ._rotary import Rotary

ATTRIBUTE = "_torch_rope_patch"  # of a patched model: its Patch
# fuse(module, owner, name, function, new) returns what takes the place of a method that rotates, and what it fuses, or new
# and why nothing is fused. owner is the module, or its processor.
Fuse = Callable[[nn.Module, Any, str, types.FunctionType, types.FunctionType], tuple[Callable, str]]


@dataclass(frozen=True)
class Library:
    """What is special to a library of models."""

    patch: str  # the name of its function patch
    example: str  # an expression that makes a model
    rotary: re.Pattern  # matches the names of rotary functions
    conventions: Sequence[Convention]
    texts: Collection[str]  # the known texts of functions with branches
    left_out: re.Pattern = re.compile(r"(torch|builtins)\b")  # matches Python modules whose classes do not rotate

    def advice(self) -> str:
        return (
            f"{self.patch.removesuffix('patch')}register puts a function of yours in its place, or in that of what calls it "
            "(docs/integrations/transformers.md has an example)"
        )


# ---- functions ----

_registered: dict[types.FunctionType, types.FunctionType] = {}
_found: dict[tuple, Rotary] = {}  # what takes the place of rotary functions


def register(function: types.FunctionType, replacement: types.FunctionType | None) -> None:
    """Lets :func:`patch` put a function of yours in the place of a function that it refuses.

    Models that are patched from now on call the replacement where they called the function. Nothing is compared: that
    the replacement does the same is up to you. docs/integrations/transformers.md has an example.

    Args:
        function: a function of a modeling file, as the module there holds it, or a method, as its class holds it.
        replacement: a function with the same arguments, ``self`` included, or None to take the replacement back.

    Raises:
        TypeError: function or replacement is not a Python function, or their arguments have different names.
    """
    for name, value in {"function": function, "replacement": replacement or function}.items():
        if not isinstance(value, types.FunctionType):
            must_be = "a function, such as modeling_clvp.apply_rotary_pos_emb"
            raise wrong_type("torch_rope register", name, value, must_be)
    if replacement is None:
        _registered.pop(function, None)
        return
    arguments, expected = (list(inspect.signature(f).parameters) for f in (replacement, function))
    if arguments != expected:
        raise TypeError(
            f"torch_rope register: replacement has the arguments {arguments} but must have those of the function, {expected}"
        )
    new = copy_of(replacement, replacement.__code__, replacement.__closure__)
    vars(new)["_torch_rope"] = (f"{function.__name__} is {replacement.__qualname__}, which was registered",)
    _registered[function] = new


# ---- methods and processors ----


@dataclass
class Replaced:
    """A method of a module that was replaced, or a processor, which is an object that a module calls."""

    path: str
    module: nn.Module
    attribute: str  # the module's attribute that holds the method or processor
    now: Any
    before: Any  # None if the module itself had no such attribute
    calls: tuple[str, ...]  # what is called in it, in words

    @classmethod
    def method(cls, path: str, module: nn.Module, name: str, function: Callable, calls: tuple[str, ...]) -> "Replaced":
        attribute = _attribute_of(module, name)
        return cls(path, module, attribute, types.MethodType(function, module), vars(module).get(attribute), calls)

    def holder(self) -> tuple[dict, str] | None:
        """Returns the namespace that holds the replacement now, and the name in it, or None if nothing holds it."""
        namespaces = vars(self.module), self.module._modules
        return next(((ns, name) for ns in namespaces for name, value in ns.items() if value is self.now), None)

    def place(self) -> None:
        namespace = self.module._modules if self.attribute in self.module._modules else vars(self.module)
        namespace[self.attribute] = self.now
        vars(self.module)["_replicate_for_data_parallel"] = types.MethodType(_replicate_for_data_parallel, self.module)

    def undo(self) -> bool:
        """Restores the attribute. Returns False if it was replaced since."""
        if (held := self.holder()) is None:
            return False
        namespace, name = held
        vars(self.module).pop("_replicate_for_data_parallel", None)
        if not isinstance(self.now, types.MethodType):
            vars(self.before).update(vars(self.now))  # the state that the processor has now
        if self.before is None and name == self.attribute:
            del namespace[name]
        else:  # accelerate's hook, say, calls the method under another name, which must stay
            namespace[name] = self.before or getattr(type(self.module), self.attribute).__get__(self.module)
        return True

    def __str__(self) -> str:
        method = isinstance(self.now, types.MethodType)
        path = f"{self.path}.{self.now.__name__ if method else self.attribute}".lstrip(".")
        path, owner = re.sub(r"\b\d+\b", "*", path), type(self.module if method else self.now).__name__
        own = getattr(self.now, "_torch_rope_own", {}).get(self.module, 0)  # how often its own method had to compute
        fell_back = f"; fell back to its own forward in {own} calls" if own else ""
        return f"{path} of %d {owner}: {'; '.join(self.calls)}{fell_back}"


def _attribute_of(module: Any, method: str) -> str:
    """Returns the attribute of a module's own method. The hooks of accelerate keep its forward under another name."""
    return "_old_forward" if method == "forward" and "_old_forward" in vars(module) else method


# nn.DataParallel calls the method of this name, and pickle looks the name up in the class.
def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """Returns a replica whose copies of replaced methods belong to the replica and use its weights."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name, value in vars(replica).items():
        if isinstance(value, types.MethodType) and value.__self__ is self:
            vars(replica)[name] = types.MethodType(value.__func__, replica)
    return replica


def _processor_class(old: type, methods: tuple[tuple[str, Callable], ...]) -> type:
    """Returns a subclass that has these methods, and whose objects are pickled as objects of the class."""

    def reduce(self, _):  # pickle finds the old class by its name
        return copyreg._reconstructor, (old, object, None), vars(self)

    def deepcopy(self, memo):
        memo[id(self)] = new = object.__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    names = {"__module__": old.__module__, "__qualname__": old.__qualname__}
    return type(old.__name__, (old,), {**dict(methods), **names, "__reduce_ex__": reduce, "__deepcopy__": deepcopy})


class _Search:
    """Finds what must be replaced in a model so that it rotates with torch_rope, besides ours, which is replaced."""

    def __init__(self, library: Library, rounding: str, fuse: Fuse | None, name: str, ours: list[Replaced], undo: str):
        self.library, self.rounding, self.name, self.undo = library, rounding, name, undo  # errors say name and undo
        self.fuse: Fuse = fuse or (lambda module, owner, name, function, new: (new, ""))
        self.ours = {(r.module, r.attribute) for r in ours} | {(r.now, "__call__") for r in ours}
        self._known: dict[types.FunctionType, types.FunctionType] = {}
        # torch.compile compiles once for all processors of one class. A model may have many thousand modules, of few classes.
        self._class: Callable[..., type] = functools.cache(_processor_class)
        self._methods: Callable[[type], dict[str, list]] = functools.cache(self._methods_of)
        self._may_process: Callable[[type], bool] = functools.cache(_may_process)

    def of(self, model: nn.Module) -> Iterator[Replaced]:
        for path, module in model.named_modules():
            for name, function, calls in self._methods_that_rotate(module, module, path):
                yield Replaced.method(path, module, name, function, calls)
            for attribute, old in [*vars(module).items(), *module._modules.items()]:
                new = self._may_process(type(old)) and hasattr(old, "__dict__") and (module, attribute) not in self.ours
                if new and (found := [*self._methods_that_rotate(old, module, f"{path}.{attribute}".lstrip("."))]):
                    now: Any = object.__new__(self._class(type(old), tuple(method[:2] for method in found)))
                    vars(now).update(vars(old))
                    calls = tuple(dict.fromkeys(call for *_, calls in found for call in calls))
                    yield Replaced(path, module, attribute, now, old, calls)

    def _methods_of(self, cls: type) -> dict[str, list[types.FunctionType]]:
        """Returns the methods of a class by name, overriding ones first, but for base classes that are left out."""
        found: dict[str, list] = {}
        for base in cls.__mro__:
            for name, value in () if self.library.left_out.match(base.__module__) else vars(base).items():
                found.setdefault(name, []).append(value)
        return {n: fs for n, fs in found.items() if all(isinstance(f, types.FunctionType) for f in fs)}

    def _methods_that_rotate(self, owner: Any, module: nn.Module, path: str) -> Iterator[tuple]:
        """Yields the names of methods that rotate and are not patched, what takes their place, and what that calls."""
        for name, (function, *inherited) in self._methods(type(owner)).items():
            attribute = _attribute_of(owner, name)
            if (owner, attribute) in self.ours:
                continue
            method = f"{type(owner).__name__}.{name} of {path or 'the model itself'}"
            where = f"{self.name} is not patched: {method}"
            current = vars(owner).get(attribute)
            bound = getattr(current, "__self__", None) is owner
            function = current.__func__ if bound else function
            if "_torch_rope" in vars(function):
                there = "; ".join(map(str, vars(function)["_torch_rope"]))
                raise ValueError(
                    f"{self.name} cannot be patched now: {method} calls torch_rope; {self.undo}. It says: {there}"
                )
            try:
                new = self._renamed(function)
            except NotImplementedError as error:
                raise self._refused(where, error) from None
            if new is not function:
                if current is not None and not bound:
                    raise NotImplementedError(
                        f"{where} was replaced by {current!r} but must be a method of the module; patch the model before "
                        "the method is replaced"
                    )
                fused, note = self.fuse(module, owner, name, function, new)
                note = f"{'kept apart, because' if fused is new else 'fused:'} {note}" if note else ""
                # The text of a Rotary says how it rounds, so that is tried here, and not in a forward.
                yield name, fused, (*map(str, vars(fused)["_torch_rope"]), *filter(None, [note]))
            elif re.match("_?apply_(rotary|rope)", name):
                raise self._refused(where, "must call a rotary function that can be replaced but does not")
            elif "super" in inspect.unwrap(function).__code__.co_names and [*map(self._tried, inherited)] != inherited:
                raise self._refused(where, "calls super(), whose rotary function cannot be replaced")

    def _refused(self, where: str, why: Any) -> NotImplementedError:
        return NotImplementedError(f"{where} {why}; {self.library.advice()}")

    def _renamed(self, function: types.FunctionType) -> types.FunctionType:
        """Returns a method that calls torch_rope, or the method itself if it calls no rotary function."""
        return _registered.get(function) or renamed(function, self._find, self._known)

    def _tried(self, function: types.FunctionType) -> types.FunctionType | None:
        """Returns what _renamed returns, or None if the function calls a rotary function that is not known."""
        with contextlib.suppress(NotImplementedError):
            return self._renamed(function)
        return None

    def _find(self, name: str, function: types.FunctionType) -> Callable | None:
        """Returns what takes the place of a function, or None if its name is not that of a rotary function."""
        library = self.library
        if function in _registered or not library.rotary.search(name):
            return _registered.get(function)
        key = name, getattr(function, "__code__", function), function.__module__, library.patch, self.rounding
        try:
            if key not in _found:
                _found[key] = Rotary(function, name, library.conventions, library.texts, self.rounding)
            return _found[key]
        except NotImplementedError as error:
            new = self._tried(function)  # it may call other rotary functions for parts of the channels
            if new in (None, function):
                raise NotImplementedError(f"calls {name}: {error}") from None
            return new


def _may_process(cls: type) -> bool:
    """Returns whether the objects of a class may be processors, which modules call, with a method __call__ of their own."""
    call = inspect.getattr_static(cls, "__call__", None)
    return isinstance(call, types.FunctionType) and call is not nn.Module.__call__


# ---- what patch returns ----


class Patch(contextlib.AbstractContextManager):
    """What patch returns. ``str()`` of it lists what is replaced now."""

    def __init__(self, model: Any, options: dict[str, Any]):
        self._model, self.options, self.notes = model, options, list[str]()
        self._replaced: list[Replaced] = []

    def left(self) -> list[Replaced]:
        """Returns what is still in the model."""
        parts = [self._model] if isinstance(self._model, nn.Module) else self._model.components.values()
        there = {m for part in parts if isinstance(part, nn.Module) for m in part.modules()}
        return [r for r in self._replaced if r.holder() is not None and r.module in there]

    def add(self, replaced: list[Replaced], notes: list[str]) -> None:
        for r in replaced:
            r.place()
        self._replaced, self.notes = [r for r in self._replaced if r.holder() is not None] + replaced, notes
        vars(self._model)[ATTRIBUTE] = self

    def undo(self) -> None:
        """Restores the model. If the model is restored already, this does nothing.

        Warns:
            UserWarning: a method or processor was replaced after ``patch``, and stays as it is.
        """
        gone = [f"{r.path}.{r.attribute}" for r in self._replaced if not r.undo()]
        has_classes = any(not isinstance(r.now, types.MethodType) for r in self._replaced)
        self._replaced = []
        if has_classes:
            gc.collect()  # nothing else frees the classes of processors, whose code holds names in modules
        if vars(self._model).get(ATTRIBUTE) is self:
            del vars(self._model)[ATTRIBUTE]
        if gone:
            says = "was replaced after it was patched, and stays as it is; it may still call torch_rope"
            warnings.warn(f"torch_rope: {', '.join(gone)} {says}", stacklevel=2)

    def __reduce__(self):
        return type(None), ()  # a copy of the model has no Patch

    def __exit__(self, *_) -> None:
        self.undo()

    def __repr__(self) -> str:
        name, lines = type(self._model).__name__, collections.Counter(map(str, self.left()))
        if not lines:
            return f"torch_rope is not in {name} any more"
        return "\n  ".join([f"torch_rope in {name}:", *(k % n for k, n in lines.items()), *self.notes])


def packages_of(module: nn.Module) -> set[str]:
    """Returns the names of the packages that the class of a module and its base classes come from."""
    return {cls.__module__.split(".")[0] for cls in type(module).__mro__}


def patch_model(
    library: Library, model: nn.Module, options: dict, fuse: Fuse | None, angles: Callable | None, holder: Any = None
) -> Patch:
    """Patches a model, or the components of a pipeline, which is the holder. options are the arguments of patch.

    angles(model, path) returns a forward for the module of this path that computes exact angles, or None and a reason.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type(library.patch, "model", model, f"a loaded model, such as {library.example} returns")
    for name in options.keys() - {"rounding"}:
        if not isinstance(options[name], bool):
            raise wrong_type(library.patch, name, options[name], "True or False")
    if options["rounding"] not in ("eager", "once"):
        raise ValueError(f'{library.patch}: rounding is {options["rounding"]!r} but must be "eager" or "once"')
    holder = model if holder is None else holder
    patched = vars(holder).get(ATTRIBUTE)
    if patched is None or patched.options != options:
        patched = Patch(holder, options)
    undo = "it is part of a patched model, or a copy; call undo() of what patch returned for that model, then copy it"
    for module in (holder, *model.modules()):
        if (other := vars(module).get(ATTRIBUTE)) not in (None, patched):
            given = ", ".join(f"{name}={value!r}" for name, value in other.options.items())
            kind = type(module).__name__
            undo = f"the {kind} is patched: patch(that {kind}, {given}).undo() restores it"
    search = _Search(library, options["rounding"], fuse, type(holder).__name__, patched.left(), undo)
    try:
        replaced, notes = [*search.of(model)], []
        if not replaced and not search.ours:
            why = "no module of it calls a rotary function; if a method rotates by itself, "
            raise ValueError(f"{search.name} is not patched: {why}{library.advice()}")
    except (NotImplementedError, ValueError) as error:
        known = packages_of(model) & {"transformers", "diffusers", "timm"}
        if not known or library.patch.split(".")[2] in known:
            raise
        [other, *_] = known
        advice = f"a model of {other}; pass it to torch_rope.integrations.{other}.patch"
        raise type(error)(f"{library.patch}: model is of type {search.name}, {advice}") from None
    for path, module in model.named_modules():
        if angles and (module, _attribute_of(module, "forward")) not in search.ours:
            forward, note = angles(model, path)
            if forward:
                replaced.append(Replaced.method(path, module, "forward", forward, vars(forward)["_torch_rope"]))
            notes += [f"{path}: {note}"] if note else []
    patched.add(replaced, notes)
    return patched
