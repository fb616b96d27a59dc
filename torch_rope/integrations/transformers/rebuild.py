"""Rebuilds the methods that call a rotary function."""

import functools
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch_rope.integrations.transformers.rotary import Call, RotaryFunction

_ROTARY = re.compile("(^|_)(rotary|rope|rotate)(_|$)")


def names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of the globals and attributes that code and its nested functions use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names(constant)


class Rebuilder:
    """Copies functions so that they call torch_rope instead of a global rotary function.

    A function shares its globals with its module, so each copy gets globals of its own. Nothing else in the module
    changes.
    """

    def __init__(self):
        self._rebuilt: dict[Callable, Callable] = {}
        self._replacements: dict[Callable, Callable] = {}
        self._methods: dict[type, list[tuple[str, list[Callable]]]] = {}

    def methods(self, module_class: type) -> list[tuple[str, list[Callable]]]:
        """Returns the methods of a class: for each name a list of functions, in which overriding functions come first.

        Methods of torch and of transformers' own base classes are left out.
        """
        if module_class not in self._methods:
            found = {}
            for base in module_class.__mro__:
                package = base.__module__.split(".")
                if package[0] != "torch" and (package[0] != "transformers" or package[1] == "models"):
                    for name, value in vars(base).items():
                        found.setdefault(name, []).append(value)
            self._methods[module_class] = [
                (name, functions)
                for name, functions in found.items()
                if all(isinstance(f, types.FunctionType) for f in functions)
            ]
        return self._methods[module_class]

    def calls_rotary(self, function: Callable) -> bool:
        """Returns whether a function calls a rotary function, known or not."""
        try:
            return self.rebuild(function) is not function
        except NotImplementedError:
            return True

    def rebuild(self, function: Callable) -> Callable:
        """Returns a copy of function that calls torch_rope, or function itself if it calls no rotary function.

        Raises NotImplementedError if it calls a rotary function that torch_rope does not support.
        """
        if function not in self._rebuilt:
            self._rebuilt[function] = function  # ends the recursion of functions that call each other
            self._rebuilt[function] = self._rebuild(function)
        return self._rebuilt[function]

    def _rebuild(self, function: Callable) -> Callable:
        inner = getattr(function, "__wrapped__", None)
        if isinstance(inner, types.FunctionType):  # a decorator made function, and holds inner in the closure
            new = self.rebuild(inner)
            if new is inner:
                return function
            closure = tuple(types.CellType(new) if c.cell_contents is inner else c for c in function.__closure__ or ())
            if closure == function.__closure__:
                raise NotImplementedError(
                    f"has the decorator function {function.__code__.co_name}, which must hold the method in its closure"
                )
            return self._copy(function, function.__globals__, closure, new._torch_rope)
        new = {}
        for name in dict.fromkeys(names(function.__code__)):
            value = function.__globals__.get(name)
            if callable(value) and not isinstance(value, type) and _ROTARY.search(name):
                new[name] = self._replacement(name, value)
            elif isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                rebuilt = self.rebuild(value)
                if rebuilt is not value:
                    new[name] = rebuilt
        if not new:
            return function
        # __name__ is left out, because torch.compile would look for the names in the module that __name__ names.
        own = {name: value for name, value in function.__globals__.items() if name != "__name__"} | new
        return self._copy(function, own, function.__closure__, sum((f._torch_rope for f in new.values()), ()))

    @staticmethod
    def _copy(function: Callable, own_globals: dict, closure: tuple | None, calls: tuple[Call, ...]) -> Callable:
        new = types.FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__, closure)
        functools.update_wrapper(new, function)
        del new.__wrapped__  # otherwise inspect and torch.compile would use function itself
        new.__kwdefaults__ = function.__kwdefaults__
        new._torch_rope = calls
        return new

    def _replacement(self, name: str, function: Callable) -> Callable:
        if function not in self._replacements:
            try:
                self._replacements[function] = RotaryFunction(function).replacement(name)
            except NotImplementedError as error:
                # The function may call other rotary functions for parts of the channels.
                try:
                    new = self.rebuild(function) if isinstance(function, types.FunctionType) else function
                except NotImplementedError:
                    new = function
                if new is function:
                    raise NotImplementedError(f"calls {name}: {error}") from None
                new._torch_rope = tuple(replace(call, of_parts=True) for call in new._torch_rope)
                self._replacements[function] = new
        return self._replacements[function]
