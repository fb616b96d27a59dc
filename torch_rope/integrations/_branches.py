"""Finds the conditions of a function that were always true, or always false, while it ran."""

import ast
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field

from ._rebuild import Source, names

_WENT = "_torch_rope_went"


@dataclass
class _Condition:
    """A condition in the source of a function."""

    where: str  # the function, the line and the condition
    raises: set[bool]  # the values after which the function raises an error
    values: set[bool] = field(default_factory=set)  # the values that it had


class Branches:
    """A function that notes which values its conditions have, when it is called as ``branches.function``.

    The functions that it calls by name are watched too, if they are in the same package. Raises NotImplementedError if
    a function has no source.

    Args:
        function: the function.
        devices: whether to watch conditions on the device too.
    """

    def __init__(self, function: Callable, devices: bool = True):
        self._devices = devices
        self._conditions: list[_Condition] = []
        self._watched: dict[types.FunctionType, Callable] = {}
        self.function = self._watch(function)

    def one_way(self) -> str | None:
        """Returns a condition that had one value only, and where it is, or None.

        Conditions after which the function raises an error are left out, as are comparisons with None.
        """
        for c in self._conditions:
            if c.values and len(c.values | c.raises) < 2:
                return f"{c.where} was always {c.values.pop()}"
        return None

    def _watch(self, function: Callable) -> Callable:
        if function in self._watched:
            return self._watched[function]
        self._watched[function] = function  # ends the recursion of functions that call each other
        source = Source(function)
        source.node = _Watch(function, self._conditions, self._devices).visit(source.node)
        package = function.__module__.split(".")[0]
        inside = inspect.getclosurevars(function).nonlocals
        called = {
            name: inside.get(name, function.__globals__.get(name)) for name in {*names(function.__code__), *inside}
        }
        variables = {
            name: self._watch(value)
            for name, value in called.items()
            if isinstance(value, types.FunctionType) and (name in inside or value.__module__.split(".")[0] == package)
        }
        self._watched[function] = source.rebuild(variables | {_WENT: self._went})
        return self._watched[function]

    def _went(self, index: int, value: object) -> object:
        self._conditions[index].values.add(bool(value))
        return value


def _is_none(test: ast.expr) -> bool:
    """Returns whether a condition compares with None."""
    if isinstance(test, ast.UnaryOp):
        return _is_none(test.operand)
    return isinstance(test, ast.Compare) and any(
        isinstance(c, ast.Constant) and c.value is None for c in test.comparators
    )


class _Watch(ast.NodeTransformer):
    """Passes the value of each condition of a function to a function of the name _WENT."""

    def __init__(self, function: Callable, conditions: list[_Condition], devices: bool):
        self.function, self.conditions, self.devices = function, conditions, devices

    def _is_left_out(self, test: ast.expr) -> bool:
        return not self.devices and "device" in ast.unparse(test)

    def _condition(self, test: ast.expr, *ways: list[ast.stmt]) -> ast.expr:
        """Returns the test, watched. The ways are the statements for True and for False."""
        if _is_none(test) or self._is_left_out(test):
            return test
        code = self.function.__code__
        where = f'"{ast.unparse(test)}" in line {test.lineno} of {code.co_filename}'
        raises = {
            value for value, way in zip((True, False), ways, strict=False) if way and isinstance(way[-1], ast.Raise)
        }
        call = ast.Call(ast.Name(_WENT, ast.Load()), [ast.Constant(len(self.conditions)), test], [])
        self.conditions.append(_Condition(where, raises))
        return call

    def visit_If(self, node: ast.If) -> ast.If:  # noqa: N802  ast looks for these names
        node.test = self._condition(node.test, node.body, node.orelse)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp | ast.While) -> ast.AST:  # noqa: N802
        node.test = self._condition(node.test)
        return self.generic_visit(node)

    visit_While = visit_IfExp  # noqa: N815

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:  # noqa: N802
        if not self._is_left_out(node):
            node.values[:-1] = [self._condition(value) for value in node.values[:-1]]
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.ifs = [self._condition(test) for test in node.ifs]
        return self.generic_visit(node)
