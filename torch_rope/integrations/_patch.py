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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._mistakes import wrong_type
from ._bits import Rounds
from ._conventions import CONVENTIONS
from ._known import FUNCTIONS as OTHERS
from ._names import copy_of, renamed
from ._reading import Convention, Known, in_words
from ._rotary import Rotary
from ._text import NoText, text_of

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
    known: Mapping[str, Known]  # rotary functions by their texts
    unsupported: Mapping[str, str]  # texts of rotary functions, and why torch_rope does not support them
    left_out: re.Pattern = re.compile(r"(torch|builtins)\b")  # matches Python modules whose classes do not rotate

    def rotary_of(self, function: Callable, name: str, rounding: str) -> Rotary:
        """Returns the Rotary of a function whose text is known, or raises NotImplementedError."""
        try:
            text = text_of(function)
        except NoText as error:
            raise NotImplementedError(f"it has no text that could be known: {error}") from None
        if found := self.known.get(text, OTHERS.get(text)):
            return Rotary(function, name, found, CONVENTIONS[found.convention], rounding)
        raise NotImplementedError(self.unsupported.get(text, f"its text ({text}) is not known"))

    def advice(self) -> str:
        return (
            f"{self.patch.removesuffix('patch')}register(function, like=...) says what a function of yours does, and register("
            "function, replacement) puts another one in its place (docs/integrations/transformers.md has examples)"
        )

    def register(
        self,
        function: types.FunctionType,
        replacement: types.FunctionType | None = None,
        *,
        like: str | Callable | None = None,
    ) -> None:
        """Tells ``patch`` what a rotary function of yours does, or puts another function in its place.

        It holds for models that are patched from now on. Nothing is tried: that the function does so is up to you. Without
        replacement and like, what was registered of the function is forgotten. docs/integrations/transformers.md has examples.

        Args:
            function: a function of a modeling file, as the module there holds it, or a method, as its class holds it.
            replacement: a function with the same arguments, ``self`` included, that is called in its place.
            like: a function whose text is known, with arguments that mean the same in the same order, or words such as
                ``"half-split, [batch, heads, seq, head_dim], cos [batch, seq, head_dim]"``: the pairing (half-split or
                interleaved), the dimensions of x, and the first table by the name of its argument. The tables broadcast over
                the dimensions of x that they do not name; ``head_dim / 2`` at last means that they have each number once, and
                ``complex freqs_cis [..]`` that the table is complex. A table ``sin`` comes before ``cos``. Other arguments
                must have their defaults in a call, or the function itself is called, as for other numbers of dimensions.
                Each operation rounds then, in the dtype to which x and the tables promote.

        Raises:
            TypeError: function or replacement is not a Python function, or their arguments have different names.
            ValueError: like is not understood, does not fit the arguments, or is a function that is not known.
        """
        name = f"{self.patch.removesuffix('patch')}register"
        for argument, value in {"function": function, "replacement": replacement or function}.items():
            if not isinstance(value, types.FunctionType):
                must_be = "a function, such as modeling_clvp.apply_rotary_pos_emb"
                raise wrong_type(name, argument, value, must_be)
        if replacement is not None and like is not None:
            raise ValueError(f"{name}: replacement and like are both given but must be one of them")
        arguments, expected = (list(inspect.signature(f).parameters) for f in (replacement or function, function))
        if arguments != expected:
            raise TypeError(
                f"{name}: replacement has the arguments {arguments} but must have those of the function, {expected}"
            )
        if replacement is not None:
            new = copy_of(replacement, replacement.__code__, replacement.__closure__)
            vars(new)["_torch_rope"] = (f"{function.__name__} is {replacement.__qualname__}, which was registered",)
            _registered[function] = new
        elif isinstance(like, str):
            try:
                convention = in_words(like, function)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            _registered[function] = Known(like, Rounds(), partial=True), convention
        elif like is not None:
            try:
                model = self.rotary_of(like, "", "eager")
            except NotImplementedError as error:
                raise ValueError(f"{name}: like is a function that is not known: {error}") from None
            if (n := model.convention.tensors + model.convention.others) != len(expected):
                raise ValueError(f"{name}: like is a function of {n} arguments, but function has {expected}")
            _registered[function] = model.known, model.convention
        else:
            _registered.pop(function, None)


# What takes the place of functions of users: a function, or what it does.
_registered: dict[types.FunctionType, types.FunctionType | tuple[Known, Convention]] = {}


# ---- methods and processors ----


@dataclass
class Replaced:
    """A module or a processor, which is an object that a module calls, whose class was replaced by a subclass.

    A module keeps its identity and gets the other class. A processor, which other models may share, is replaced.
    """

    path: str
    module: nn.Module
    attribute: str  # the module's attribute that holds the processor, or an empty text
    now: Any  # the class, or the processor
    before: Any
    methods: dict[str, types.FunctionType]  # by name
    calls: tuple  # what is called in them; str() of it is in words

    def is_there(self) -> bool:
        if not self.attribute:
            return isinstance(self.module, self.now)  # FSDP makes a subclass
        return any(value is self.now for space in (vars(self.module), self.module._modules) for value in space.values())

    def place(self) -> None:
        if self.attribute:
            space = self.module._modules if self.attribute in self.module._modules else vars(self.module)
            space[self.attribute] = self.now
        else:
            self.module.__class__ = self.now
            self._bind(self.before, self.now)

    def undo(self) -> bool:
        """Restores the class or the processor. Returns False if it was replaced since."""
        if not self.attribute:
            if type(self.module) is self.now:
                self.module.__class__ = self.before
                self._bind(self.now, self.before)
            return type(self.module) is self.before
        for space in (vars(self.module), self.module._modules):
            for name in [name for name, value in space.items() if value is self.now]:
                vars(self.before).update(vars(self.now))  # the state that the processor has now
                space[name] = self.before
                return True
        return False

    def _bind(self, old: type, new: type) -> None:
        """Replaces the methods that the module itself holds, as the hooks of accelerate make it hold them."""
        functions = {getattr(old, name): getattr(new, name) for name in self.methods}
        for name, value in vars(self.module).items():
            if isinstance(value, types.MethodType) and value.__self__ is self.module and value.__func__ in functions:
                vars(self.module)[name] = types.MethodType(functions[value.__func__], self.module)

    def __str__(self) -> str:
        path, owner = re.sub(r"\b\d+\b", "*", self.name()), type(self.now if self.attribute else self.module).__name__
        own = sum(getattr(f, "_torch_rope_own", {}).get(self.module, 0) for f in self.methods.values())
        fell_back = [f"fell back to its own forward in {own} calls"] if own else []
        return f"{path} of %d {owner}: {'; '.join([*map(str, self.calls), *fell_back])}"

    def name(self) -> str:
        return f"{self.path}.{self.attribute or ', '.join(self.methods)}".lstrip(".")


def _subclass(old: type, methods: tuple[tuple[str, types.FunctionType], ...]) -> type:
    """Returns a subclass that has these methods. Its objects are copied as they are, and pickled as objects of the class."""

    def reduce(self, protocol):  # pickle finds the old class by its name
        same = object.__new__(old)
        vars(same).update(vars(self))
        return copyreg._reconstructor, (old, object, None), same.__reduce_ex__(protocol)[2]

    def shallow(self):
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def deepcopy(self, memo):
        memo[id(self)] = new = object.__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    names = {"__module__": old.__module__, "__qualname__": old.__qualname__, "__doc__": old.__doc__}
    copies = {"__reduce_ex__": reduce, "__copy__": shallow, "__deepcopy__": deepcopy}
    return type(old.__name__, (old,), {**dict(methods), **names, **copies})


class _Search:
    """Finds what must be replaced in a model so that it rotates with torch_rope, besides ours, which is replaced."""

    def __init__(self, library: Library, rounding: str, fuse: Fuse | None, name: str, ours: list[Replaced], undo: str):
        self.library, self.rounding, self.name, self.undo = library, rounding, name, undo  # errors say name and undo
        self.fuse: Fuse = fuse or (lambda module, owner, name, function, new: (new, ""))
        self.ours = {id(r.now if r.attribute else r.module) for r in ours}
        # torch.compile compiles once for all layers and processors of one class. A model may have many thousand modules,
        # of few classes.
        self.subclass: Callable[..., type] = functools.cache(_subclass)
        self._known: dict[types.FunctionType, types.FunctionType] = {}
        self._rotaries: dict[tuple, Rotary] = {}
        self._methods: Callable[[type], dict[str, list]] = functools.cache(self._methods_of)
        self._may_process: Callable[[type], bool] = functools.cache(_may_process)

    def of(self, model: nn.Module) -> Iterator[Replaced]:
        for path, module in model.named_modules():
            if id(module) not in self.ours and (found := [*self._methods_that_rotate(module, module, path)]):
                yield self.replaced(path, module, "", type(module), found)
            for attribute, old in [*vars(module).items(), *module._modules.items()]:
                new = self._may_process(type(old)) and hasattr(old, "__dict__") and id(old) not in self.ours
                if new and (found := [*self._methods_that_rotate(old, module, f"{path}.{attribute}".lstrip("."))]):
                    yield self.replaced(path, module, attribute, old, found)

    def replaced(self, path: str, module: nn.Module, attribute: str, before: Any, found: list[tuple]) -> Replaced:
        methods, calls = tuple(method[:2] for method in found), tuple(call for *_, calls in found for call in calls)
        now: Any = self.subclass(type(before) if attribute else before, methods)
        if attribute:
            now = object.__new__(now)
            vars(now).update(vars(before))
        return Replaced(path, module, attribute, now, before, dict(methods), tuple(dict.fromkeys(calls)))

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
            method = f"{type(owner).__name__}.{name} of {path or 'the model itself'}"
            where = f"{self.name} is not patched: {method}"
            # The hooks of accelerate keep a module's own forward under another name.
            held = vars(owner).get("_old_forward") if name == "forward" else None
            held = vars(owner).get(name) if held is None else held
            bound = getattr(held, "__self__", None) is owner and held.__func__ is function
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
                if held is not None and not bound:
                    raise NotImplementedError(
                        f"{where} was replaced by {held!r} but must be a method of the class; patch the model before "
                        "the method is replaced"
                    )
                fused, note = self.fuse(module, owner, name, function, new)
                note = f"{'kept apart, because' if fused is new else 'fused:'} {note}" if note else ""
                yield name, fused, (*vars(fused)["_torch_rope"], *filter(None, [note]))
            elif re.match("_?apply_(rotary|rope)", name):
                raise self._refused(where, "must call a rotary function that can be replaced but does not")
            elif "super" in inspect.unwrap(function).__code__.co_names and [*map(self._tried, inherited)] != inherited:
                raise self._refused(where, "calls super(), whose rotary function cannot be replaced")

    def _refused(self, where: str, why: Any) -> NotImplementedError:
        return NotImplementedError(f"{where} {why}; {self.library.advice()}")

    def _renamed(self, function: types.FunctionType) -> types.FunctionType:
        """Returns a method that calls torch_rope, or the method itself if it calls no rotary function."""
        new = _registered.get(function)
        return new if isinstance(new, types.FunctionType) else renamed(function, self._find, self._known)

    def _tried(self, function: types.FunctionType) -> types.FunctionType | None:
        """Returns what _renamed returns, or None if the function calls a rotary function that is not known."""
        with contextlib.suppress(NotImplementedError):
            return self._renamed(function)
        return None

    def _find(self, name: str, function: types.FunctionType) -> Callable | None:
        """Returns what takes the place of a function, or None if its name is not that of a rotary function."""
        new = _registered.get(function)
        if isinstance(new, types.FunctionType) or not (new or self.library.rotary.search(name)):
            return new
        # A function that a method defines is made anew for each layer, by the same code.
        of_it = function.__globals__, function.__defaults__, *(function.__closure__ or ())
        key = name, function.__code__, *map(id, of_it)
        try:
            if key not in self._rotaries:
                found = new and Rotary(function, name, *new, self.rounding)
                self._rotaries[key] = found or self.library.rotary_of(function, name, self.rounding)
            return self._rotaries[key]
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
        return [r for r in self._replaced if r.is_there() and r.module in there]

    def add(self, replaced: list[Replaced], notes: list[str]) -> None:
        for r in replaced:
            r.place()
        self._replaced, self.notes = [r for r in self._replaced if r.is_there()] + replaced, notes
        vars(self._model)[ATTRIBUTE] = self

    def undo(self) -> None:
        """Restores the model. If the model is restored already, this does nothing.

        Warns:
            UserWarning: a method or processor was replaced after ``patch``, and stays as it is.
        """
        gone = [r.name() for r in self._replaced if not r.undo()]
        self._replaced = []
        gc.collect()  # nothing else frees the classes, whose code holds names in modules
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
        if angles and id(module) not in search.ours:
            forward, note = angles(model, path)
            if forward:
                found = [("forward", forward, vars(forward)["_torch_rope"])]
                replaced.append(search.replaced(path, module, "", type(module), found))
            notes += [f"{path}: {note}"] if note else []
    patched.add(replaced, notes)
    return patched
