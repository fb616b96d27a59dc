"""Rebuilds the methods of a model that call a rotary function, so that they call torch_rope."""

import ast
import functools
import importlib
import inspect
import re
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ._put_off import results
from ._rebuild import Source, copy_of, names, wrapped
from ._rotary import Call, RotaryFunction


@dataclass(frozen=True)
class Registered:
    """A function that :func:`register` put in the place of another one."""

    function: str
    replacement: str
    of_parts = True  # nobody knows its tables

    def __str__(self):
        return f"{self.function} is {self.replacement}, which was registered"


_registered: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def register(function: Callable, replacement: Callable | None) -> None:
    """Lets :func:`patch` put a function of yours in the place of a function that it refuses.

    Models that are patched from now on call the replacement where they called the function. Nothing is compared: that
    the replacement does the same is up to you. docs/integrations/transformers.md has an example.

    Args:
        function: a function of a modeling file, as the module there holds it, or a method, as its class holds it.
        replacement: a function with the same arguments, ``self`` included, or None to take the replacement back.

    Raises:
        TypeError: function or replacement is not a Python function, or their arguments have different names.
    """
    for name, value in (("function", function), ("replacement", replacement)):
        if not isinstance(value, types.FunctionType) and (value is not None or name == "function"):
            raise TypeError(
                f"torch_rope register: {name} is {value!r} but must be a function, such as "
                "modeling_clvp.apply_rotary_pos_emb"
            )
    if replacement is None:
        _registered.pop(function, None)
        return
    arguments, expected = (list(inspect.signature(f).parameters) for f in (replacement, function))
    if arguments != expected:
        raise TypeError(
            f"torch_rope register: replacement has the arguments {arguments} but must have "
            f"those of the function, {expected}"
        )
    new = copy_of(replacement, replacement.__code__, replacement.__closure__)
    new._torch_rope = (Registered(function.__name__, replacement.__qualname__),)
    _registered[function] = new


class Calls(ast.NodeTransformer):
    """Gives the calls of rotary functions a first argument, by which the function knows who calls it.

    Takes the definitions and imports of local names out of the function, so that the names become those of its closure.
    Replaces sums x * cos + f(x) * sin by a call, where f is one of the functions in halves.
    """

    def __init__(self, rotary: set[str], first: ast.expr, local: Collection[str] = (), halves: Collection[str] = ()):
        self.rotary, self.first, self.local, self.halves, self.found = rotary, first, local, halves, []
        self.put_off: dict[str, None] | None = None  # the names of norms that are called, if they are put off
        self.rebuilt: Collection[str] = ()  # the names of functions that take what is put off as it is

    def visit_Call(self, node: ast.Call) -> ast.Call:  # noqa: N802  ast looks for this name
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if self.put_off is not None and name not in self.rebuilt:
            node.args = [_result(a) if isinstance(a, ast.Name | ast.Call) else a for a in node.args]
            for keyword in node.keywords:
                if isinstance(keyword.value, ast.Name | ast.Call) and keyword.arg:
                    keyword.value = _result(keyword.value)
        if name in self.rotary:
            self.found.append(node)
            node.func = ast.Name(with_caller(name), ast.Load())
            node.args.insert(0, self.first)
        match node:
            case ast.Call(ast.Attribute(ast.Name(), name) as norm, [_], []) if (
                self.put_off is not None and "norm" in name
            ):
                self.put_off[name] = None
                node = ast.Call(ast.Name(PUT_OFF, ast.Load()), [norm, *node.args], [])
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:  # noqa: N802
        self.generic_visit(node)
        if self.put_off is not None and node.value is not None:
            node.value = _result(node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:  # noqa: N802
        name, *arguments = product_of(node) or ("",)
        if name not in self.halves:
            return self.generic_visit(node)
        return ast.Call(ast.Name(with_caller(name), ast.Load()), [self.first, *arguments], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:  # noqa: N802
        return ast.Pass() if node.name in self.local else self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:  # noqa: N802
        node.names = [alias for alias in node.names if (alias.asname or alias.name) not in self.local]
        return node if node.names else ast.Pass()


PUT_OFF, RESULT = "_torch_rope_put_off", "_torch_rope_result"


def _result(node: ast.expr) -> ast.expr:
    """Returns an expression for a value in which the tensors that were put off are computed."""
    return ast.Call(ast.Name(RESULT, ast.Load()), [node], [])


def product_of(node: ast.AST) -> tuple[str, ast.expr, ast.expr, ast.expr] | None:
    """Returns the names f, x, cos and sin of an expression x * cos + f(x) * sin, or None for another expression."""
    match node:
        case ast.BinOp(
            ast.BinOp(ast.Name() as x, ast.Mult(), cos),
            ast.Add(),
            ast.BinOp(ast.Call(ast.Name(name), [ast.Name() as again], []), ast.Mult(), sin),
        ) if x.id == again.id:
            return name, x, cos, sin
    return None


def sum_of_products(rotate_half: Callable) -> Callable:
    """Returns the rotary function that is written out where only this function is called."""

    def rotary(x, cos, sin):
        return x * cos + rotate_half(x) * sin

    return rotary


def caller(node: ast.FunctionDef, is_method: bool) -> ast.expr:
    """Returns what a function passes on as the caller of a rotary function: self, or None outside of methods."""
    arguments = (*node.args.posonlyargs, *node.args.args)
    return ast.Name(arguments[0].arg, ast.Load()) if is_method and arguments else ast.Constant(None)


def with_caller(name: str) -> str:
    """Returns the name that a rotary function has where it is called with its caller."""
    return f"_torch_rope_{name}"


@dataclass(frozen=True)
class Site:
    """A rotary function as a rebuilt method calls it."""

    name: str
    function: RotaryFunction
    call: Call
    is_written_out: bool = False  # True if the method calls a part of it only, and the rest is written in the method


class Rebuilder(ABC):
    """Rebuilds the methods of one model.

    Args:
        rounding: "eager" or "once", see the functions patch.
        put_off: a function that is called with a norm and its argument, in place of the norm.

    Attributes:
        rotary_names: matches the names of rotary functions.
        module: where the function patch is.
        example: an expression that makes a model.
        finds_written_out: whether x * cos + rotate_half(x) * sin in a method is a rotary function too.
    """

    rotary_names: re.Pattern
    module: str
    example: str
    finds_written_out = False

    @abstractmethod
    def _examine(self, function: Callable) -> RotaryFunction:
        """Returns a rotary function with the rotation that it does. Raises NotImplementedError if it does none."""

    @abstractmethod
    def _is_left_out(self, module: str) -> bool:
        """Returns whether the classes of a Python module have no methods that rotate."""

    def __init__(self, rounding: str = "eager", put_off: Callable | None = None):
        self.rounding, self.put_off = rounding, put_off
        self.paths: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # the path of each module in the model
        self._known: dict[Callable, RotaryFunction] = {}
        # The callers whose first tables were right, each with what is known of them.
        self._checked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._rebuilt: dict[tuple[Callable, bool], Callable] = {}
        self._methods: dict[type, list[tuple[str, list[Callable]]]] = {}
        self._sums: dict[Callable, Callable] = {}
        self._local: dict[Callable, dict[str, Callable]] = {}

    def methods(self, module_class: type) -> list[tuple[str, list[Callable]]]:
        """Returns the methods of a class: for each name a list of functions, in which overriding functions come first.

        Methods of torch and of the library's own base classes are left out.
        """
        if module_class not in self._methods:
            found = {}
            for base in module_class.__mro__:
                if not self._is_left_out(base.__module__):
                    for name, value in vars(base).items():
                        found.setdefault(name, []).append(value)
            self._methods[module_class] = [
                (name, functions)
                for name, functions in found.items()
                if all(isinstance(f, types.FunctionType) for f in functions)
            ]
        return self._methods[module_class]

    def calls_rotary(self, function: Callable) -> bool:
        """Returns whether a method calls a rotary function, known or not."""
        try:
            return self.rebuild(function) is not function
        except NotImplementedError:
            return True

    def rebuild(self, function: Callable, is_method: bool = True) -> Callable:
        """Returns a copy of function that calls torch_rope, or function itself if it calls no rotary function.

        Raises NotImplementedError if it calls a rotary function that torch_rope does not support.
        """
        if function in _registered:
            return _registered[function]
        key = function, is_method
        if key not in self._rebuilt:
            self._rebuilt[key] = function  # ends the recursion of functions that call each other
            self._rebuilt[key] = self._rebuild(function, is_method)
        return self._rebuilt[key]

    def _rebuild(self, function: Callable, is_method: bool) -> Callable:
        inner = wrapped(function)
        if inner is not None:
            while wrapped(inner) is not None:
                inner = wrapped(inner)
            new = self.rebuild(inner, is_method)
            return function if new is inner else decorated(function, new)
        sites, variables = self.called(function)
        if not variables:
            return function
        source = Source(function)
        halves = {site.name for site in sites if site.is_written_out}
        called = {site.name for site in sites} - halves
        calls = Calls(called, caller(source.node, is_method), self.local_functions(function), halves)
        if self.put_off is not None:
            calls.put_off, calls.rebuilt = {}, variables
            variables = variables | {PUT_OFF: self.put_off, RESULT: results}
        source.node.body = [calls.visit(statement) for statement in source.node.body]
        new = source.rebuild(variables | self.checked(sites))
        new._torch_rope = calls_of(sites, variables)
        inside = [name for f in variables.values() for name in getattr(f, "_torch_rope_norms", ())]
        new._torch_rope_norms = (*(calls.put_off or ()), *inside)
        return new

    def called(self, function: types.FunctionType) -> tuple[list[Site], dict[str, Callable]]:
        """Returns the rotary functions that a function calls, and what takes the place of the names of its globals."""
        sites, variables = [], {}
        local = self.local_functions(function)
        for name in dict.fromkeys((*names(function.__code__), *local)):
            value = local.get(name, function.__globals__.get(name))
            if isinstance(value, types.FunctionType) and value in _registered:
                variables[name] = _registered[value]
            elif callable(value) and not isinstance(value, type) and self.rotary_names.search(name):
                site = self._written_out(function, name, value) or self._site(name, value)
                if isinstance(site, Site):
                    sites.append(site)
                    written_out, known = site.is_written_out, site.function
                    site = value if written_out else known.with_signature(known.rotator.rotate)
                variables[name] = site
            elif isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                rebuilt = self.rebuild(value, False)
                if rebuilt is not value:
                    variables[name] = rebuilt
        return sites, variables

    def local_functions(self, function: types.FunctionType) -> dict[str, Callable]:
        """Returns the rotary functions that a function defines or imports inside of it."""
        code = function.__code__
        if not any(map(self.rotary_names.search, (*code.co_varnames, *code.co_cellvars))):
            return {}
        if function not in self._local:
            self._local[function] = dict(self._find_local(function, Source(function).node))
        return self._local[function]

    def _find_local(self, function: types.FunctionType, node: ast.AST) -> Iterator[tuple[str, Callable]]:
        """Yields the names and values of the rotary functions that are defined or imported under a node."""
        for child in ast.walk(node):
            if isinstance(child, ast.FunctionDef) and child is not node and self.rotary_names.search(child.name):
                code = next(c for c in function.__code__.co_consts if getattr(c, "co_name", "") == child.name)
                if code.co_freevars or child.args.defaults or child.args.kw_defaults or child.decorator_list:
                    raise NotImplementedError(
                        f"defines {child.name}, which must be a function without defaults, decorators and names of "
                        "the function around it"
                    )
                inner = types.FunctionType(code, function.__globals__)
                inner.__module__ = function.__module__
                yield child.name, inner
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    name = alias.asname or alias.name
                    if self.rotary_names.search(name):
                        module = "." * child.level + (child.module or "")
                        module = importlib.import_module(module, function.__globals__["__package__"])
                        yield name, getattr(module, alias.name)

    def _written_out(self, function: types.FunctionType, name: str, rotate_half: Callable) -> Site | None:
        """Returns a rotary function of which a function calls only the part by this name, or None."""
        if not self.finds_written_out or len(inspect.signature(rotate_half).parameters) != 1:
            return None
        nodes = list(ast.walk(Source(function).node))
        uses = sum(isinstance(n, ast.Name) and n.id == name for n in nodes)
        if uses != sum(p[0] == name for p in map(product_of, nodes) if p):
            return None
        if rotate_half not in self._sums:
            self._sums[rotate_half] = sum_of_products(rotate_half)
        site = self._site(name, self._sums[rotate_half])
        return replace(site, is_written_out=True) if isinstance(site, Site) else None

    def _site(self, name: str, function: Callable) -> Site | Callable:
        try:
            if function not in self._known:
                self._known[function] = known = self._examine(function)
                known.rotator.first_tables = functools.partial(self._first_tables, name, known)
            known = self._known[function]
            return Site(name, known, known.call(name))
        except NotImplementedError as error:
            # The function may call other rotary functions for parts of the channels.
            try:
                new = self.rebuild(function, False) if isinstance(function, types.FunctionType) else function
            except NotImplementedError:
                new = function
            if new is function:
                raise NotImplementedError(f"calls {name}: {error}") from None
            new._torch_rope = tuple(c if c.of_parts else replace(c, of_parts=True) for c in new._torch_rope)
            return new

    def checked(self, sites: list[Site]) -> dict[str, Callable]:
        """Returns the rotary functions that take their caller first."""
        return {with_caller(s.name): s.function.with_signature(s.function.rotator.rotate, "caller") for s in sites}

    def _first_tables(self, name: str, function: RotaryFunction, caller: Any, tables: tuple) -> None:
        """Looks at the tables that a caller passes for the first time, and raises NotImplementedError if the two channels
        of a pair have different angles."""
        key = function if caller is None else caller
        if key in self._checked:
            return
        if function.have_the_form(tables):
            self._checked[key] = True
            return
        where = f" of {self.paths.get(caller, 'the model')} ({type(caller).__name__})" if caller is not None else ""
        raise NotImplementedError(
            f"torch_rope: cos and sin that {name}{where} was called with have different angles for the two "
            f"channels of a pair but must have the same angle; undo the patch, or see {self.module}.register"
        )


def decorated(function: Callable, inner: Callable) -> Callable:
    """Returns inner with the decorators of function."""
    before = wrapped(function)
    if before is None:
        return inner
    inner = decorated(before, inner)
    closure = tuple(types.CellType(inner) if c.cell_contents is before else c for c in function.__closure__ or ())
    if closure == function.__closure__:
        raise NotImplementedError(
            f"has the decorator function {function.__code__.co_name}, which must hold the method in its closure"
        )
    new = copy_of(function, function.__code__, closure)
    vars(new).update({n: v for n, v in vars(inner).items() if n.startswith("_torch_rope")})
    return new


def calls_of(sites: list[Site], variables: dict[str, Any]) -> tuple[Call | Registered, ...]:
    """Returns the calls of torch_rope in a rebuilt function, directly or through another rebuilt function."""
    inside = [call for f in variables.values() for call in getattr(f, "_torch_rope", ())]
    return (*(site.call for site in sites), *inside)
