"""The ways in which rotary functions take the angles, as data.

A library has many rotary functions that differ in little but how they take the angles: as cos and sin with each number
twice, as complex numbers, as matrices. A :class:`Convention` reads the arguments of such a function as cos and sin. Each
library has a table of conventions, from which _rotary.py finds the one that a function follows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Reading(NamedTuple):
    """The angles of one call of a rotary function.

    cos and sin, [.., rotary_dim / 2], broadcast over x in all dimensions but the last one.
    """

    cos: Tensor
    sin: Tensor
    form: str  # how the function took them, in words; functions round each form in their own way
    interleaved: bool = True
    # Yields pairs of tensors that are equal if both channels of a pair have the same angle.
    must_be_equal: Callable[[], Iterable[tuple[Tensor, Tensor]]] = tuple
    to: Callable[[Tensor], Tensor] = lambda x: x  # returns x with its heads, [.., head_dim], as cos broadcasts over it
    back: Callable[[Tensor, Tensor], Tensor] = lambda y, x: y  # returns the result in the layout of x, from it and x
    inverse: bool = False
    last_channels: bool = False  # whether the last rotary_dim channels of a head rotate, and not the first


class Sample:
    """Random arguments for a rotary function, of some sizes and dtypes."""

    def __init__(self, batch: int, seq: int, heads: int, head_dim: int, pairs: int, *dtypes: torch.dtype):
        self.batch, self.seq, self.heads, self.head_dim, self.pairs = batch, seq, heads, head_dim, pairs
        self.dtypes = dtypes  # of x and of the tables
        self._random = torch.Generator().manual_seed(0)

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns numbers, of the dtype of x if no other is given."""
        numbers = torch.randn(shape, generator=self._random, dtype=torch.float64, device="cpu")
        return numbers.to(dtype or self.dtypes[0])

    def x(self, *shape: int) -> Tensor:
        """Returns x [*shape, head_dim]."""
        return self.numbers(*shape, self.head_dim)

    def angles(self, *shape: int) -> tuple[Tensor, ...]:
        """Returns cos and sin [*shape, pairs]."""
        return self.numbers(2, *shape, self.pairs, dtype=self.dtypes[1]).unbind()


class Convention(NamedTuple):
    """A way in which rotary functions take x, or q and k, and the angles."""

    tensors: int  # 1 for x, 2 for q and k
    others: int  # how many arguments follow
    read: Callable[..., Reading | None]  # takes x, and the other arguments; None for arguments with another meaning
    samples: Callable[[Sample], Iterator[tuple]]  # yields arguments
    says: str = ""  # what is special, in words


# ---- forms of tables ----


class Form(NamedTuple):
    """A form that the angles of a call have."""

    tables: Callable[..., tuple[Tensor, ...]]  # makes tables of cos and sin [.., rotary_dim / 2]
    read: Callable[..., Reading]  # returns what tables mean
    arguments: int = 2


def _each_twice(adjacent: bool) -> Form:
    """Returns the form of tables that have each number twice, [.., rotary_dim].

    adjacent: whether both stand side by side, as in a, a, b, b, and not as in a, b, a, b. So do the channels of a pair.
    """

    def tables(*angles):
        return tuple(t.repeat_interleave(2, -1) if adjacent else torch.cat([t, t], -1) for t in angles)

    def read(*tables):
        both = [(t[..., ::2], t[..., 1::2]) if adjacent else t.tensor_split(2, -1) for t in tables]
        return Reading(both[0][0], both[1][0], "a, a, b, b" if adjacent else "a, b, a, b", adjacent, lambda: both)

    return Form(tables, read)


TWICE, ADJACENT = _each_twice(False), _each_twice(True)
ONCE = Form(lambda *tables: tables, lambda cos, sin: Reading(cos, sin, "a, b"))
COMPLEX = Form(  # cos and sin are views of the table, so no device needs to compute with complex numbers
    lambda cos, sin: (torch.complex(cos, sin),),
    lambda table: ONCE.read(*torch.view_as_real(table.resolve_conj()).unbind(-1))._replace(form="complex numbers"),
    1,
)


def sin_first(form: Form) -> Form:
    return Form(lambda *tables: form.tables(*tables)[::-1], lambda *tables: form.read(*tables[::-1]))


def side_by_side(form: Form) -> Form:
    """Returns the form of one table whose channels are those of two."""
    return Form(lambda *tables: (torch.cat(form.tables(*tables), -1),), lambda t: form.read(*t.chunk(2, -1)), 1)


# ---- conventions ----


def follows(
    form: Form, *shapes: str, tensors: int = 1, together: bool = False, says: str = "", **changes: Any
) -> Convention:
    """Returns the convention of functions that take x, or q and k, and tables of one form.

    Args:
        shapes: pairs of the shape of x without head_dim and the shape of the tables without channels, "batch seq: seq".
            A - stands for a dimension that the function adds to the tables. All shapes have it in the same places.
        tensors: 2 for q and k.
        together: whether cos and sin are one argument.
        changes: what a reading has besides. Its member back makes x of a sample too.
    """
    back = changes.get("back", lambda x, _: x)
    before, dash, _ = shapes[0].partition(": ")[2].rpartition("-")
    index = *(None if dim == "-" else slice(None) for dim in (before + dash).split()), ...  # makes the tables broadcast

    def read(x, *tables):
        return form.read(*(t[index] for t in (tables[0] if together else tables)))._replace(**changes)

    def samples(s):
        if form is COMPLEX and s.dtypes[1].itemsize < 4:
            return  # complex numbers have parts of 32 bits or more
        sizes = {"batch": s.batch, "seq": s.seq, "heads": s.heads, "1": 1}
        for of_x, of_tables in (shape.replace("-", "").split(": ") for shape in shapes):
            tables = form.tables(*s.angles(*(sizes[n] for n in of_tables.split())))
            xs = [s.x(*(sizes[n] + i * (n == "heads") for n in of_x.split())) for i in range(tensors)]
            yield *(back(x, x) for x in xs), *((tables,) if together else tables)

    return Convention(tensors, 1 if together else form.arguments, read, samples, says)


def by_options(cases: dict[tuple, Convention], ignored: int = 0) -> Convention:
    """Returns the convention of functions that follow one of several, which their last arguments choose.

    ignored: how many arguments before these mean nothing.
    """
    (options, case), *_ = cases.items()
    n = case.others

    def read(x, *given):
        chosen = cases.get(given[n + ignored :])
        return chosen and chosen.read(x, *given[:n])

    def samples(s):
        for options, chosen in cases.items():
            for values in chosen.samples(s):
                yield *values, *[None] * ignored, *options

    return Convention(case.tensors, n + ignored + len(options), read, samples, case.says)
