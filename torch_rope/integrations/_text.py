"""The text of a function: all that decides what it computes.

Two functions with the same text compute the same. The text is that of the source, without comments, docstrings, annotations
and white space, with the defaults, with the texts of the functions that it calls, and with the other names that it uses. A
function has no text if one of these is not there: no source, a source that was changed since it was compiled, or a name of
something that is neither a constant nor a function.
"""

import ast
import builtins
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

# What has the same text in all functions: these packages do not change what their functions compute.
_FIXED = {"torch", "math", "builtins", "numpy", "typing", "collections", "functools", "operator"}
_PLAIN = (int, float, str, bool, torch.dtype, type(None))
_NO_MEANING = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
# Decorators that do not change what a function computes, by the module that defines them.
_DECORATORS = ("torch._dynamo.", "transformers.utils.deprecation", "transformers.integrations.hub_kernels")


class NoText(Exception):
    """Says why a function has no text."""


def text_of(function: Callable, roles: Collection[str] = (), owner: type = object) -> str:
    """Returns a hash of the text of a function, or raises NoText.

    Args:
        roles: the names of globals whose text is left out, because others look at them.
        owner: the class of self, whose methods that the function calls belong to the text.
    """
    return hashlib.sha256(_described(plain(function), frozenset(roles), owner, ()).encode()).hexdigest()[:12]


def plain(function: Any) -> Any:
    """Returns a function without the decorators that do not change what it computes."""
    while isinstance(inner := getattr(function, "__wrapped__", None), types.FunctionType):
        code = getattr(function, "__code__", None)
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if code is None or not home.startswith(_DECORATORS):
            break
        function = inner
    return function


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields code, and the code of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def _described(function: Any, roles: frozenset, owner: type, outer: tuple) -> str:
    if not isinstance(function, types.FunctionType):
        raise NoText(f"{function!r} is no function of Python")
    tree, outer = _tree(function), (*outer, function)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    expected = [*tree.args.defaults, *filter(None, tree.args.kw_defaults)]
    if not _is_plain(defaults) or len(defaults) != len(expected):
        raise NoText(f"the defaults of {function.__name__} are no constants, or not there")
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        held = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    except ValueError:
        raise NoText(f"{function.__name__} needs names of the function around it") from None
    local = {name for code in nested(function.__code__) for name in (*code.co_varnames, *code.co_cellvars)}
    names = {node.id for node in ast.walk(ast.Module(_meaning(tree.body), [])) if isinstance(node, ast.Name)} - local
    parts = [_dumped(tree.args) + _dumped(tree.body), repr(defaults)]
    for name in sorted(names - roles):
        value = held.get(name, getattr(builtins, name, None))
        parts.append(f"{name}: {_of_global(name, value, roles, outer)}")
    me = function.__code__.co_varnames[:1]
    for name in sorted({n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_name(n.value, me)}):
        method = inspect.getattr_static(owner, name, None)
        if (
            isinstance(method, types.FunctionType)
            and not method.__module__.startswith("torch.")
            and method not in outer
        ):
            parts.append(f"self.{name}: {_described(plain(method), roles, owner, outer)}")
    return "; ".join(parts)


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a constant, or holds constants alone."""
    if isinstance(value, dict):
        return _is_plain([*value, *value.values()])
    return (
        all(map(_is_plain, value)) if isinstance(value, list | tuple | set | frozenset) else isinstance(value, _PLAIN)
    )


def _constant(value: Any) -> str:
    """Returns the text of a constant, in which sets and dictionaries are sorted."""
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_constant(k)}: {_constant(v)}' for k, v in value.items()))}}}"
    return f"{{{', '.join(sorted(map(_constant, value)))}}}" if isinstance(value, set | frozenset) else repr(value)


def _is_name(node: ast.AST, names: Collection[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _of_global(name: str, value: Any, roles: frozenset, outer: tuple) -> str:
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    if _is_plain(value):
        return _constant(value)
    is_code = isinstance(value, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType)
    if module.partition(".")[0] in _FIXED and (is_code or module.startswith("typing")):
        return f"{module}.{getattr(value, '__qualname__', '')}"
    if isinstance(value := plain(value), types.FunctionType):
        return "itself" if value in outer else f"({_described(value, roles, object, outer)})"
    raise NoText(f"{name} is neither a constant nor a function")


def _tree(function: types.FunctionType) -> ast.FunctionDef:
    """Returns the source of a function, which is that of its code."""
    try:
        lines, _ = inspect.findsource(function.__code__)
        trees, codes = _read("".join(lines))
    except (OSError, SyntaxError, TypeError, IndexError):
        raise NoText(f"the source of {function.__name__} is not there") from None
    key = function.__code__.co_name, function.__code__.co_firstlineno
    if key not in trees or function.__code__ not in codes:
        raise NoText(f"the source of {function.__name__} is not that of its code")
    return trees[key]


@functools.lru_cache(16)  # most functions of a model stand in one file
def _read(source: str) -> tuple[dict, set]:
    """Returns the functions of a file by their names and first lines, and all code that the file has."""
    module = ast.parse(source)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    trees = {(f.name, min([f.lineno, *(d.lineno for d in f.decorator_list)])): f for f in functions}
    return trees, {*nested(compile(module, "", "exec", dont_inherit=True))}


def _meaning(body: list) -> list:
    """Returns the statements of a body, without docstrings."""
    return [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]


def _dumped(node: Any) -> str:
    """Returns the structure of a tree, the same in all releases of Python."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dumped, _meaning(node)))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _NO_MEANING]
    return f"{type(node).__name__}({', '.join(f'{n}={_dumped(v)}' for n, v in fields if v is not None and v != [])})"
