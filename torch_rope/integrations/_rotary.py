"""Finds out how a rotary function rounds, by calling it."""

import contextlib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ._branches import Branches
from ._rotation import Rotation, Rotator, Rounding


@dataclass(frozen=True)
class Call:
    """A call of torch_rope that stands for a call of a rotary function."""

    function: str
    operator: str
    rotation: Rotation
    remark: str  # how it rounds
    of_parts: bool = False  # True if another rotary function calls it with parts of x and of the tables

    def __str__(self):
        return f"{self.function} is torch.ops.rope.{self.operator}, {self.rotation}{self.remark}"


class RotaryFunction(ABC):
    """A rotary function, and the rotation that it was found to do.

    Attributes:
        function: the rotary function.
        parameters: its parameters by name.
        tensors: the names of those that are rotated.
        rotation: the rotation.
        rotator: does it with torch_rope.
        remark: how it rounds, in words.
    """

    table_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    watches_devices = True  # whether a function with a condition on the device is refused
    tensors: list[str]
    rotation: Rotation
    rotator: Rotator
    remark: str

    def __init__(self, function: Callable):
        self.function = function
        # The kernels package turns a function into a module whose forward has the signature.
        self.signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        self.parameters: Mapping[str, inspect.Parameter] = self.signature.parameters
        self._agreed: list[dict[str, Any]] = []  # arguments for which torch_rope has the results of the function

    # ---- what a library's functions have of their own ----

    @abstractmethod
    def _samples_of(self, x: torch.dtype, tables: torch.dtype, *form: str) -> Iterator[dict[str, Any]]:
        """Yields random arguments of these dtypes, on the CPU."""

    @abstractmethod
    def _rotate(self, rotator: Rotator, sample: dict[str, Any]) -> list[Tensor] | None:
        """Returns the results of torch_rope, or None if it does not take these arguments."""

    @abstractmethod
    def _rotator(self, rounding: Rounding, sample: dict[str, Any]) -> Rotator:
        """Returns a rotator that rounds the dtypes of a sample so."""

    def _call(self, sample: dict[str, Any]) -> list[Tensor] | None:
        """Returns the function's results as a list, or None if the function does not take these arguments."""
        try:
            results = self.function(**sample)
        except Exception:
            return None
        results = [r for r in (results if isinstance(results, tuple | list) else [results]) if r is not None]
        shapes = [sample[n].shape for n in self.tensors if sample[n] is not None]
        return results if [r.shape for r in results] == shapes else None

    # ---- finding out how it rounds ----

    def _find_roundings(self) -> tuple[dict[tuple[torch.dtype, torch.dtype], Rounding], str]:
        """Returns how the function rounds, by the dtypes of x and of the tables, and a remark about the exceptions."""
        found, other = {}, []
        for key in self._rounding_keys():
            x, tables, *form = key
            # With x of 16 bits, few numbers show how the sum is rounded that has 32 bits. With x of 32 bits, most do.
            wide = found.get((torch.float32, tables, *form))
            rounding = self._find_rounding(*key, turned=wide is not None and wide.turned)
            if rounding:
                found[key] = rounding
                if not rounding.eager:
                    other.append(f"{_name(x)} with tables of {_name(tables)}")
        if not any(r.eager for (x, *_), r in found.items() if x == torch.float32):
            return found, ", rounded once, because its bits cannot be had"
        other = dict.fromkeys(other)
        return found, f", rounded once for {' and '.join(other)}, because those bits cannot be had" if other else ""

    def _rounding_keys(self) -> Iterator[tuple]:
        """Yields what roundings depend on: the dtypes of x and of the tables, and what else samples_of takes."""
        return product(DTYPES, self.table_dtypes)

    def _find_rounding(self, x: torch.dtype, tables: torch.dtype, *form: str, turned: bool = False) -> Rounding | None:
        """Returns how the function rounds x and tables of these dtypes, or None if it does not take them.

        turned: whether it is known to round x * cos before the sum, and not the other product.
        """
        with plainly():
            called = [(s, self._call(s)) for s in self._samples_of(x, tables, *form)]
        samples = [sample for sample, results in called if results is not None]
        if not samples:
            return None
        result = next(results[0].dtype for _, results in called if results is not None)
        for inside in () if turned else dict.fromkeys((torch.promote_types(x, tables), torch.float32, x)):
            # The operators round to this dtype if it is that of x, or float32.
            direct = result == x and torch.promote_types(x, inside) == inside and inside in (x, torch.float32)
            rounding = Rounding(x if direct else inside, inside, result, True)
            if all(self._has_the_bits(rounding, sample) for sample in samples):
                return self._with_gradients(rounding, samples)
        rounding = Rounding(x, torch.float32, result, True, turned=True)
        if result == x and all(self._has_the_bits(rounding, sample) for sample in samples):
            return self._with_gradients(rounding, samples)
        return Rounding.once(x, tables, result)

    def _has_the_bits(self, rounding: Rounding, sample: dict[str, Any]) -> bool:
        """Returns whether torch_rope, rounding so, has the function's bits."""
        with plainly():
            return _same(self._rotate(self._rotator(rounding, sample), sample), self._call(sample))

    def _with_gradients(self, rounding: Rounding, samples: list[dict[str, Any]]) -> Rounding:
        """Returns the rounding, with how the function rounds and lays out the gradients.

        If nothing has their bits and strides, nothing that has their bits, and nothing else, the rounding is as it was:
        then the gradients may be rounded once more, or have other strides.
        """
        choices = [
            replace(rounding, converts_each=each, contiguous=contiguous)
            for contiguous, each in product([False, True], [False, True])
        ]
        for strides in (True, False):
            for choice in choices:
                if all(self._has_the_gradients(choice, sample, strides) for sample in samples):
                    return choice
        return rounding

    def _has_the_gradients(self, rounding: Rounding, sample: dict[str, Any], strides: bool) -> bool:
        """Returns whether torch_rope, rounding so, has the bits of the function's gradients, and their strides."""
        for transposed in ((-1, -1), (-2, -3), (-1, -2)):  # gradients of the results come with any strides
            outs = []
            with plainly(), torch.enable_grad():
                for call in (self._call, functools.partial(self._rotate, self._rotator(rounding, sample))):
                    leaves = {n: sample[n].detach().requires_grad_() for n in self.tensors}
                    results = call(sample | leaves)
                    given = [
                        torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.transpose(*transposed).shape)
                        for r in results
                    ]
                    given = [g.transpose(*transposed) for g in given]
                    outs.append(torch.autograd.grad(results, list(leaves.values()), given))
            if not _same(*outs) or (strides and [g.stride() for g in outs[0]] != [g.stride() for g in outs[1]]):
                return False
        return True

    def _examine_branches(self) -> None:
        """Raises NotImplementedError if a condition of the function was the same for all arguments that were tried."""
        function, first = self.function, ()
        if isinstance(function, functools.partial):
            function, first = function.func, function.args
        elif isinstance(function, nn.Module):
            function, first = type(function).forward, (function,)
        branches = Branches(function, self.watches_devices)
        with plainly():
            for sample in self._agreed:
                branches.function(*first, **sample)
        if condition := branches.one_way():
            raise NotImplementedError(f"the function branches, and {condition} when it was tried with up to 70 tokens")

    # ---- functions that do the same ----

    def with_passed(self, rotate: Callable, passed: Sequence[str], *first: str) -> Callable:
        """Returns a function with the arguments of this one, after some first arguments.

        It calls rotate with the arguments in passed, which are Python expressions, and the first arguments.
        """
        arguments = [*first]
        for name, p in self.parameters.items():
            if p.kind == p.VAR_KEYWORD:
                arguments.append(f"**{name}")
            else:
                arguments.append(name if p.default is p.empty else f"{name}={p.default!r}")
        # The arguments are written out in source code, because binding *args and **kwargs takes longer than rotating a
        # token.
        return eval(f"lambda rotate: lambda {', '.join(arguments)}: rotate({', '.join([*passed, *first])})")(rotate)

    @abstractmethod
    def have_the_form(self, tables: tuple) -> bool:
        """Returns whether both channels of a pair have the same angle in these tables."""

    @abstractmethod
    def with_signature(self, rotate: Callable, *first: str) -> Callable:
        """Returns a function with the arguments of this one, after some first arguments, that rotate is called by."""

    def call(self, name: str) -> Call:
        """Returns the call of torch_rope that stands for a call of this function by a name."""
        return Call(name, "rotate" if len(self.tensors) == 1 else "rotate_qk", self.rotation, self.remark)

    def replacement(self, name: str) -> Callable:
        """Returns a function of this name, with the arguments of this one, that calls torch_rope."""
        new = self.with_signature(self.rotator.rotate)
        new.__name__ = new.__qualname__ = name
        new._torch_rope = (self.call(name),)
        return new


NO_ROTATION = "the function must rotate pairs of channels by the angles of cos and sin but computes something else"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _same(actual: Sequence[Tensor] | None, expected: Sequence[Tensor]) -> bool:
    """Returns whether tensors have the same dtypes and numbers."""
    return actual is not None and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(actual, expected, strict=True)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Makes results independent of the modes of the caller."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield
