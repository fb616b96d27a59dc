"""The ways in which rotary functions take the angles, as data.

A library has many rotary functions that differ in little but how they take the angles: as cos and sin with each number
twice, as complex numbers, as matrices. A :class:`Convention` reads the arguments of such a function as cos and sin.
_conventions.py has all conventions by name, and the tables of known functions say which one a function follows.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._bits import Rounds


class Reading(NamedTuple):
    """The angles of one call of a rotary function.

    cos and sin, [.., rotary_dim / 2], broadcast over x in all dimensions but the last one.
    """

    cos: Tensor
    sin: Tensor
    form: str  # how the function took them, in words
    interleaved: bool = True
    # Yields pairs of tensors that are equal if both channels of a pair have the same angle.
    must_be_equal: Callable[[], Iterable[tuple[Tensor, Tensor]]] = tuple
    to: Callable[[Tensor], Tensor] = lambda x: x  # returns x with its heads, [.., head_dim], as cos broadcasts over it
    back: Callable[[Tensor, Tensor], Tensor] = lambda y, x: y  # returns the result in the layout of x, from it and x
    inverse: bool = False
    last_channels: bool = False  # whether the last rotary_dim channels of a head rotate, and not the first


Read = Callable[..., Any]  # returns a Reading, or None


class Convention(NamedTuple):
    """A way in which rotary functions take x, or q and k, and the angles."""

    tensors: int  # 1 for x, 2 for q and k
    others: int  # how many arguments follow
    read: Read  # takes x, and the other arguments; None for arguments with another meaning
    says: str  # in words


class Known(NamedTuple):
    """What a rotary function does, by its text."""

    convention: str  # its name in CONVENTIONS
    rounds: Rounds | dict[str, Rounds]  # how it rounds, or how it rounds each form of the angles
    partial: bool = False  # whether it takes heads with more channels than rotate
    dense: bool = False  # whether its results are contiguous, whatever the strides of x
    but: str = ""  # in which bits torch_rope differs
    name: str = ""  # of the function, in these files of these releases
    files: str = ""
    releases: str = ""


# ---- forms of tables ----


class Form(NamedTuple):
    """A form that the angles of a call have."""

    read: Read  # returns what tables mean
    arguments: int = 2
    interleaved: bool = True


def _each_twice(adjacent: bool) -> Form:
    """Returns the form of tables that have each number twice, [.., rotary_dim].

    adjacent: whether both stand side by side, as in a, a, b, b, and not as in a, b, a, b. So do the channels of a pair.
    """

    def read(*tables):
        if tables[0].shape[-1] % 2:
            return None
        both = [(t[..., ::2], t[..., 1::2]) if adjacent else t.tensor_split(2, -1) for t in tables]
        return Reading(both[0][0], both[1][0], "a, a, b, b" if adjacent else "a, b, a, b", adjacent, lambda: both)

    return Form(read, interleaved=adjacent)


TWICE, ADJACENT = _each_twice(False), _each_twice(True)
ONCE = Form(lambda cos, sin: Reading(cos, sin, "a, b"))
# cos and sin are views of the table, so no device needs to compute with complex numbers.
COMPLEX = Form(
    lambda t: ONCE.read(*torch.view_as_real(t.resolve_conj()).unbind(-1))._replace(form="complex numbers"), 1
)


def sin_first(form: Form) -> Form:
    return form._replace(read=lambda *tables: form.read(*tables[::-1]))


def side_by_side(form: Form) -> Form:
    """Returns the form of one table whose channels are those of two."""
    return form._replace(read=lambda table: form.read(*table.chunk(2, -1)), arguments=1)


# ---- conventions ----


class _At:
    """``at[:, None]`` is the index with which a function makes its tables broadcast over x."""

    def __getitem__(self, index: Any) -> Any:
        return index


at = _At()


def follows(
    form: Form,
    index: Any = ...,
    tensors: int = 1,
    together: bool = False,
    says: str = "",
    rank: int = 0,
    **changes: Any,
) -> Convention:
    """Returns the convention of functions that take x, or q and k, and tables of one form.

    Args:
        index: makes the tables broadcast over x, see :class:`_At`.
        tensors: 2 for q and k.
        together: whether cos and sin are one argument.
        rank: how many dimensions x must have, or 0.
        changes: what a reading has besides.
    """

    def read(x, *tables):
        known = not rank or x.dim() == rank
        reading = form.read(*(t[index] for t in (tables[0] if together else tables))) if known else None
        return reading and reading._replace(**changes)

    interleaved = changes.get("interleaved", form.interleaved)
    pairing = "interleaved" if interleaved else "half-split"
    return Convention(tensors, 1 if together else form.arguments, read, ", ".join(filter(None, [pairing, says])))


def by_options(cases: dict[tuple, Convention], ignored: int = 0) -> Convention:
    """Returns the convention of functions that follow one of several, which their last arguments choose.

    ignored: how many arguments before these mean nothing.
    """
    (options, case), *_ = cases.items()
    n = case.others

    def read(x, *given):
        chosen = cases.get(given[n + ignored :])
        return chosen and chosen.read(x, *given[:n])

    says = " or ".join(dict.fromkeys(c.says for c in cases.values()))
    return Convention(case.tensors, n + ignored + len(options), read, says)


def gathered(convention: Convention) -> Convention:
    """Returns the convention of functions that take cos and sin [max_position, ..], and then positions, which choose rows."""

    def read(x, cos, sin, positions, *options):
        return convention.read(x, cos[positions], sin[positions], *options)

    return convention._replace(others=convention.others + 1, read=read)


# ---- conventions in words ----

_DIMS = r"\[(.+?)\]"
_WORDS = re.compile(rf"(half-split|interleaved), (?:[a-z_ ,]+ )?{_DIMS}, (complex )?(\w+)(?:(?:,| and) \w+)? {_DIMS}")
WORDS = "half-split, [batch, heads, seq, head_dim], cos [batch, seq, head_dim]"


def in_words(words: str, function: Callable) -> Convention:
    """Returns the convention that words describe, such as those of WORDS, for a function with these arguments.

    The dimensions of the tables have the names of those of x over which they broadcast. Their last one is head_dim if they
    hold each number twice, and head_dim / 2 if once. The tables are the argument that is named and the next one, or one
    argument that is named complex. The arguments before them are q and k, or x.

    Raises ValueError if the words are not understood, or do not fit the arguments.
    """
    if not (found := _WORDS.fullmatch(" ".join(words.split()))):
        raise ValueError(f'like is {words!r} but must be like "{WORDS}", or a known function')
    pairing, of_x, is_complex, name, of_tables = found.groups()
    x, (*dims, last) = ([dim.strip() for dim in text.split(",")] for text in (of_x, of_tables))
    twice, half = last == "head_dim", pairing == "half-split"
    broadcast = [dim for dim in x[:-1] if dim in dims]
    if x[-1] != "head_dim" or last not in ("head_dim", "head_dim / 2") or dims != broadcast or (twice and is_complex):
        raise ValueError(
            f"like is {words!r}, but x must end with head_dim, and the tables must have some of the dimensions of x before, "
            "in the same order, and then head_dim (each number twice) or head_dim / 2"
        )
    parameters = inspect.signature(function).parameters
    if name not in parameters or (tensors := [*parameters].index(name)) not in (1, 2):
        raise ValueError(
            f"like has the table {name}, but the second or third of {[*parameters]} must be the first table"
        )
    form = COMPLEX if is_complex else TWICE if twice and half else ADJACENT if twice else ONCE
    form = sin_first(form) if name == "sin" else form
    index = tuple(slice(None) if dim in dims else None for dim in x[:-1])
    tables = follows(form, index, tensors, interleaved=not half)
    others = [*parameters.values()][tensors + form.arguments :]
    if needed := [p.name for p in others if p.default is p.empty]:
        raise ValueError(f"like says nothing of the argument {needed[0]}, which must have a default")

    def read(q, *given):
        both, more = given[: form.arguments], given[form.arguments :]
        as_said = q.dim() == len(x) and all(isinstance(t, Tensor) and t.dim() == len(dims) + 1 for t in both)
        usual = all(type(v) is type(p.default) and v == p.default for v, p in zip(more, others, strict=True))
        return tables.read(q, *both) if as_said and usual else None

    return tables._replace(others=len(parameters) - tensors, read=read)
