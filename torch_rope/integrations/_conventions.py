"""Rotary functions that take x and the angles by one of several conventions, and what each convention means.

A library has many rotary functions that differ in little but how they take the angles: as cos and sin with each number
twice, as complex numbers, as matrices, as angles. A :class:`Convention` reads the arguments of such a function as cos
and sin. :class:`ConventionFunction` finds out which convention a function follows by calling it on random numbers.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._methods import Rebuilder
from ._put_off import PutOff, norm_and_rotate
from ._rotary import DTYPES, NO_ROTATION, RotaryFunction, plainly
from ._rotation import Angles, Rotation, Rotator, Rounding


class Reading(NamedTuple):
    """The angles of one call of a rotary function.

    cos and sin, [.., rotary_dim / 2], broadcast over x in all dimensions but the last one.
    """

    cos: Tensor
    sin: Tensor
    form: str  # how the function took them; functions round each form in their own way
    interleaved: bool = True
    must_be_equal: Callable[[], Iterable[tuple[Tensor, Tensor]]] = (
        tuple  # if a pair has the same angle in both channels
    )
    to: Callable[[Tensor], Tensor] | None = None  # returns x [batch, seq, heads, head_dim], or with heads before seq
    back: Callable[[Tensor], Tensor] | None = None  # returns the result in the layout of the function


class Sample:
    """Random arguments for a rotary function, of some sizes and dtypes."""

    def __init__(self, batch: int, seq: int, heads: int, head_dim: int, x: torch.dtype, tables: torch.dtype):
        self.batch, self.seq, self.heads, self.head_dim, self.dtypes = batch, seq, heads, head_dim, (x, tables)
        self._random = torch.Generator().manual_seed(0)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, dtype=torch.float64, device="cpu")

    def x(self, *shape: int) -> Tensor:
        """Returns x [*shape, head_dim]."""
        return self._randn(*shape, self.head_dim).to(self.dtypes[0])

    def angles(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [*shape, 8]: 16 channels rotate."""
        cos, sin = self._randn(2, *shape, 8).to(self.dtypes[1])
        return cos, sin


class Convention(NamedTuple):
    """A way in which rotary functions take x, or q and k, and the angles."""

    tensors: int  # 1 for x, 2 for q and k
    others: int  # how many arguments follow
    read: Callable[
        ..., Reading | None
    ]  # takes x or q, and the other arguments; None for arguments with another meaning
    samples: Callable[[Sample], Iterator[tuple]]  # yields arguments


# ---- reading tables ----


def full_width(cos: Tensor, sin: Tensor, interleaved: bool, form: str = "") -> Reading:
    """Returns what tables mean that have each number twice, [.., rotary_dim]."""
    half = cos.shape[-1] // 2
    first, second = (slice(None, None, 2), slice(1, None, 2)) if interleaved else (slice(None, half), slice(half, None))
    form = form or ("a, a, b, b" if interleaved else "a, b, a, b")
    return Reading(
        cos[..., first],
        sin[..., first],
        form,
        interleaved,
        lambda: [(t[..., first], t[..., second]) for t in (cos, sin)],
    )


def complex_numbers(table: Tensor, form: str = "complex") -> Reading:
    """Returns what a complex table [.., rotary_dim / 2] means. cos and sin are views of it, so no device needs to compute
    with complex numbers."""
    cos, sin = torch.view_as_real(table.resolve_conj()).unbind(-1)
    return Reading(cos, sin, form)


def matrices(table: Tensor, form: str = "matrices") -> Reading:
    """Returns what a table of rotation matrices [.., rotary_dim / 2, 2, 2] means."""
    (cos, minus_sin), (sin, cos_again) = (t.unbind(-1) for t in table.unbind(-2))
    return Reading(cos, sin, form, True, lambda: [(cos, cos_again), (-minus_sin, sin)])


def each_twice(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Returns tables that have each number twice."""
    if interleaved:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def place(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, bool] | None:
    """Returns x with four dimensions, the tables as the operators take them, and whether seq is before heads in x.

    Returns None if the operators cannot take them.
    """
    if not (3 <= x.dim() <= 4 and cos.dim() <= x.dim() and cos.shape == sin.shape):
        return None
    cos, sin = (t[(None,) * (x.dim() - t.dim())].to(x.device) for t in (cos, sin))
    if x.dim() == 3:  # [seq, heads, head_dim] or [batch, seq, head_dim]
        new = 0 if cos.shape[1] == 1 else 2
        x, cos, sin = (t.unsqueeze(new) for t in (x, cos, sin))
    batch, seq, heads, _ = cos.shape
    if not all(n in (1, size) for n, size in zip(cos.shape, x.shape[:3], strict=False)):
        return None
    if heads == 1:
        tables, in_order = (t[:, :, 0].expand(-1, x.shape[1], -1) for t in (cos, sin)), True
    elif seq == 1:
        tables, in_order = (t[:, 0] for t in (cos, sin)), False
    else:
        return x, cos, sin, True
    return x, *(t[0] if batch == 1 else t for t in tables), in_order


# ---- the functions ----


class ConventionRotator(Rotator):
    """Does what a rotary function does, with torch_rope.

    Arguments that the operators cannot take go to the function itself, as do tables that need a gradient if the bits
    must be those of the function, because a sum over tokens has another order in torch_rope.

    Attributes:
        first_tables: a function that returns whether torch_rope can rotate by a reading that a caller passes.
        wrong_tables: whether it returned False once. torch.compile cannot call it.
    """

    def __init__(self, function: Callable, convention: Convention, rotation: Rotation, roundings: dict | None = None):
        super().__init__(rotation, roundings)
        self.function, self.convention, self.eager = function, convention, True
        self.first_tables: Callable[[Any, Reading], bool] = lambda caller, reading: True
        self.wrong_tables = False

    def rotate(self, xs: tuple, others: tuple, caller: Any = None) -> Any:
        """Returns the rotated tensors as the rotary function does. The tensors may be put off."""
        ys = self.try_to_rotate(xs, others, caller)
        if ys is None:
            return self.function(*(x.result() if type(x) is PutOff else x for x in xs), *others)
        return ys[0] if len(xs) == 1 else ys

    def try_to_rotate(self, xs: tuple, others: tuple, caller: Any = None) -> tuple[Tensor, ...] | None:
        """Returns the rotated tensors, or None if the function itself must be called."""
        put_off = all(type(x) is PutOff and not x.is_computed() for x in xs)
        tensors = [x.x if put_off else x.result() if type(x) is PutOff else x for x in xs]
        reading = self.convention.read(tensors[0], *others)
        if reading is None:
            return None
        views = tensors if reading.to is None else [reading.to(x) for x in tensors]
        placed = [place(x, reading.cos, reading.sin) for x in views]
        if any(p is None or p[0].shape[:-2] != placed[0][0].shape[:-2] for p in placed):
            return None
        _, cos, sin, in_order = placed[0]
        if self.eager and cos.requires_grad and torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling():
            if self.wrong_tables:
                return None
            _assert_equal(reading)
        elif not self.first_tables(caller, reading):
            self.wrong_tables = True
            return None
        angles = self.operands_of(reading, tensors[0].dtype, cos, sin, in_order)
        placed = [p[0] for p in placed]
        ys = self._norm_and_rotate(xs, placed, angles) if put_off else self.rotated(placed, angles)
        if ys is None:
            return self.try_to_rotate(tuple(x.result() for x in xs), others, caller)
        return tuple(
            y.reshape(view.shape) if reading.back is None else reading.back(y)
            for y, view in zip(ys, views, strict=True)
        )

    def _norm_and_rotate(self, xs: tuple[PutOff, ...], views: list[Tensor], angles: Angles) -> list[Tensor] | None:
        """Returns the views [.., seq, heads, head_dim], or with heads before seq, normalised and rotated, or None."""
        if angles.rounding.result != views[0].dtype:
            return None
        if not angles.simple:  # the operator rounds once, at the end
            once = Rounding.once(views[0].dtype, angles.cos.dtype)
            angles = angles._replace(cos=angles.cos.to(once.tables), sin=angles.sin.to(once.tables))
        flags = angles.flags | {"eager_rounding": angles.simple and angles.rounding.eager}
        if angles.in_order:
            return norm_and_rotate(xs, views, angles.cos, angles.sin, flags)
        ys = norm_and_rotate(xs, [v.transpose(1, 2) for v in views], angles.cos, angles.sin, flags)
        return ys and [y.transpose(1, 2) for y in ys]

    def operands_of(self, reading: Reading, dtype: torch.dtype, cos: Tensor, sin: Tensor, in_order: bool) -> Any:
        """Returns the operands for x of a dtype."""
        rounding = self.roundings.get((dtype, cos.dtype, reading.form))
        return self.operands(dtype, cos, sin, in_order, rounding, {"interleaved": True} if reading.interleaved else {})


def _assert_equal(reading: Reading) -> None:
    """Lets a compiled graph raise RuntimeError if a pair has different angles in its two channels, where it can."""
    # Dynamo of torch 2.11 takes is_exporting() for True, but reads the flag.
    if reading.cos.device.type in ("cpu", "cuda") and not torch.compiler._is_exporting_flag:
        for a, b in reading.must_be_equal():
            torch._assert_async(
                (a == b).all(),
                "torch_rope: a rotary function was called with different angles for the two channels of a pair; call the "
                "model once without torch.compile, so that torch_rope sees its tables",
            )


class ConventionFunction(RotaryFunction):
    """A rotary function that follows one of some conventions.

    The constructor raises NotImplementedError if it follows none, or does something other than rotate.
    """

    table_dtypes = (*DTYPES, torch.float64)
    watches_devices = False  # diffusers computes in float32 where there is no float64

    def __init__(self, function: Callable, conventions: Sequence[Convention], rounding: str = "eager"):
        super().__init__(function)
        names, best = list(self.parameters), []
        for convention in conventions:
            if len(names) == convention.tensors + convention.others:
                self.convention, self.tensors = convention, names[: convention.tensors]
                agreed = self._agrees()
                if len(agreed) > len(best):  # a function may take single tokens in several ways
                    best, chosen = agreed, convention
        if not best:
            raise NotImplementedError(NO_ROTATION)
        self.convention, self.tensors = chosen, names[: chosen.tensors]
        self._agreed, readings = best, map(self._reading, best)
        self._forms = {r.form: r.interleaved for r in readings}
        pairings = {"interleaved" if i else "half-split": 0 for i in self._forms.values()}
        self.rotation = Rotation(" or ".join(pairings))
        self.rotator = self._rotator(None)
        self.rotator.roundings, self.remark = self._find_roundings()
        if rounding == "once":
            self.rotator.eager, self.remark = False, ", rounded once"
            for key, r in self.rotator.roundings.items():
                x, tables, _ = key
                result = r.result if r.result.itemsize <= x.itemsize else x  # a few functions always return bfloat16
                self.rotator.roundings[key] = Rounding.once(x, tables, result)
        self._examine_branches()

    def _samples(
        self, x: torch.dtype, tables: torch.dtype, form: str | None = None, sizes=((2, 5, 3), (1, 70, 2), (2, 1, 3))
    ) -> Iterator[dict[str, Any]]:
        for size, head_dim in product(sizes, (16, 24)):
            for arguments in self.convention.samples(Sample(*size, head_dim, x, tables)):
                sample = dict(zip(self.parameters, arguments, strict=True))
                if form is None or self._reading(sample).form == form:
                    yield sample

    def _agrees(self) -> list[dict[str, Any]]:
        """Returns the arguments for which the function follows the convention, or none if it does something else."""
        agreed = []
        for sample in self._samples(torch.float32, torch.float32):
            with plainly():
                expected = self._call(sample)
                if expected is None:
                    continue
                actual = self._rotate(self._rotator(None), sample)
                close = 1e-5 if expected[0].dtype == torch.float32 else 2e-2
                if actual is None or not all(
                    torch.allclose(a.float(), e.float(), close, close) for a, e in zip(actual, expected, strict=True)
                ):
                    return []
            agreed.append(sample)
        return agreed

    def _reading(self, sample: dict[str, Any]) -> Reading:
        return self.convention.read(*(v for n, v in sample.items() if n not in self.tensors[1:]))

    def _rounding_keys(self) -> Iterator[tuple]:
        return product(DTYPES, self.table_dtypes, self._forms)

    def _samples_of(self, x: torch.dtype, tables: torch.dtype, form: str) -> Iterator[dict[str, Any]]:
        if "complex" in form and tables.itemsize < 4:  # complex numbers have 32 bits or more for each part
            return iter(())
        return self._samples(x, tables, form, sizes=((2, 5, 3),))

    def _call(self, sample: dict[str, Any]) -> list[Tensor] | None:
        results = super()._call(sample)
        if results is not None and len(self.tensors) == 1 and not isinstance(self.function(**sample), Tensor):
            return None  # a function of a list of tensors calls the one that rotates
        return results

    def _rotate(self, rotator: Rotator, sample: dict[str, Any]) -> list[Tensor] | None:
        values = tuple(sample.values())
        ys = rotator.try_to_rotate(values[: len(self.tensors)], values[len(self.tensors) :])
        return None if ys is None else list(ys)

    def _rotator(self, rounding: Rounding | None, sample: dict[str, Any] | None = None) -> ConventionRotator:
        always = None if rounding is None else _Always(rounding)
        return ConventionRotator(self.function, self.convention, Rotation("interleaved"), always)

    def have_the_form(self, tables: Reading) -> bool:
        return all(torch.equal(a, b) for a, b in tables.must_be_equal())

    def with_signature(self, rotate: Callable, *first: str) -> Callable:
        """Returns a function with the arguments of this one, after some first arguments.

        It calls rotate with the tensors, the other arguments and the first arguments.
        """
        others = [n for n in self.parameters if n not in self.tensors]
        return self.with_passed(rotate, [f"({', '.join(names)},)" for names in (self.tensors, others)], *first)


class ConventionRebuilder(Rebuilder):
    """Rebuilds the methods of one model whose rotary functions follow some conventions."""

    conventions: Sequence[Convention]
    finds_written_out = True

    def _examine(self, function: Callable) -> ConventionFunction:
        return ConventionFunction(function, self.conventions, self.rounding)

    def _is_left_out(self, module: str) -> bool:
        return module.split(".")[0] in ("torch", "builtins")

    def _first_tables(self, name: str, function: RotaryFunction, caller: Any, tables: Reading) -> bool:
        """Returns whether the two channels of a pair have the same angle in the tables, which are examined when a caller
        passes tables of this shape for the first time. If not, the function itself must be called."""
        known = self._checked.setdefault(function if caller is None else caller, {})
        key = name, tables.form, tables.cos.shape
        if key not in known:
            try:
                known[key] = function.have_the_form(tables)
            except RuntimeError:  # tensors on the device meta, fake ones and those of vmap do not show their numbers
                return True
            if not known[key]:
                where = "the model" if caller is None else self.paths.get(caller, "the model")
                warnings.warn(
                    f"torch_rope: {name} of {where} was called with different angles for the "
                    "two channels of a pair, which is no rotation, so it computes as without torch_rope",
                    stacklevel=5,
                )
        return known[key]


class _Always:
    """Stands for a dictionary that has the same rounding for every key."""

    def __init__(self, rounding: Rounding):
        self.rounding = rounding

    def get(self, _: tuple) -> Rounding:
        return self.rounding
