"""Rebuilds functions from their source, so that they call something else by a name of theirs."""

import __future__

import ast
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of the globals and attributes that code and its nested functions use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names(constant)


def wrapped(function: Callable) -> types.FunctionType | None:
    """Returns the function that a decorator made this function from, or None."""
    inner = getattr(function, "__wrapped__", None)
    return inner if isinstance(inner, types.FunctionType) else None


class Source:
    """The source of a function.

    A function that is rebuilt keeps its globals, its defaults, its closure and the lines of its file. So a later
    assignment to a global of its module is seen, and an error shows the line where it happened. Only the names that
    rebuild is told become variables of a closure.

    Raises NotImplementedError if the source is not there, or is not the source that Python runs.
    """

    def __init__(self, function: types.FunctionType):
        self.function = function
        try:
            lines, _ = inspect.findsource(function)
            functions, self._imports = _parse("".join(lines))
        except (OSError, SyntaxError):
            raise NotImplementedError("has no source, which is needed to rebuild it") from None
        code = function.__code__
        self._parents, node = functions.get((code.co_firstlineno, code.co_name), ((), None))
        self.node = copy.deepcopy(node)  # the caller changes it
        if node is not None:
            self.node.decorator_list = []
        if node is None or not _same(self._compile(()), code):
            raise NotImplementedError("has a source that differs from the code that runs")

    def _compile(self, variables: tuple[str, ...]) -> types.CodeType:
        """Returns the code of the function, in which the variables are free."""
        body: ast.stmt = self.node
        for name in self._parents:  # super() and private names need the class
            body = ast.ClassDef(name, bases=[], keywords=[], body=[body], decorator_list=[], type_params=[])
        code = self.function.__code__
        free = dict.fromkeys((*variables, *(n for n in code.co_freevars if n != "__class__")))
        arguments = ast.arguments([], [ast.arg(n) for n in free], None, [], [], None, [])
        outer = ast.FunctionDef("outer", arguments, [body], [], type_params=[])
        module = ast.fix_missing_locations(ast.Module([*self._imports, outer], []))
        flags = code.co_flags & _FUTURE
        compiled = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
        return next(
            c for c in _nested(compiled) if c.co_name == self.node.name and c.co_firstlineno == self.node.lineno
        )

    def rebuild(self, variables: Mapping[str, Any]) -> types.FunctionType:
        """Returns the function, in which each of these names is a variable of the closure with this value."""
        function, code = self.function, self._compile(tuple(variables))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells |= {name: types.CellType(value) for name, value in variables.items()}
        return copy_of(function, code, tuple(cells[name] for name in code.co_freevars))


def copy_of(function: types.FunctionType, code: types.CodeType, closure: tuple) -> types.FunctionType:
    """Returns a function with everything of this function but its code and its closure."""
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    vars(new).update({name: value for name, value in vars(function).items() if name != "__wrapped__"})
    for name in ("__module__", "__qualname__", "__doc__", "__kwdefaults__"):
        setattr(new, name, getattr(function, name))
    new.__annotations__ = getattr(function, "__annotations__", {})
    return new


_FUTURE = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)


@functools.lru_cache(maxsize=8)
def _parse(text: str) -> tuple[dict, list[ast.stmt]]:
    """Returns the functions of a file, and its imports: Python calls a method of an imported name by other instructions.

    The functions are a dict from (first line, name) to (the classes around the function, the function).
    """
    tree = ast.parse(text)
    return dict(_functions(tree, ())), [
        node
        for node in _statements(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__"
    ]


def _functions(node: ast.AST, parents: tuple[str, ...]) -> Iterator[tuple[tuple, tuple]]:
    """Yields the keys and values of the dict of functions. The parents are the classes around the node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
            yield (first, child.name), (parents, child)
        inside = (child.name,) if isinstance(child, ast.ClassDef) else parents
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = ()
        yield from _functions(child, inside)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements outside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from _statements(child)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _same(a: types.CodeType, b: types.CodeType) -> bool:
    """Returns whether two pieces of code do the same, wherever they stand."""
    if (a.co_code, a.co_names, a.co_varnames, len(a.co_consts)) != (
        b.co_code,
        b.co_names,
        b.co_varnames,
        len(b.co_consts),
    ):
        return False
    for x, y in zip(a.co_consts, b.co_consts, strict=True):
        both = isinstance(x, types.CodeType) and isinstance(y, types.CodeType)
        if not (_same(x, y) if both else x == y):
            return False
    return True
