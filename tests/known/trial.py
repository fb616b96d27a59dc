"""What a rotary function does, found out by calling it on random numbers with every convention of its library."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from known.samples import LAYOUTS, SAMPLES, SIZES, Sample
from torch import Tensor

from torch_rope.integrations._bits import INSIDE, Rounds
from torch_rope.integrations._conventions import CONVENTIONS
from torch_rope.integrations._reading import Convention, Known
from torch_rope.integrations._rotary import Rotary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = list(product(DTYPES, (*DTYPES, torch.float64)))  # of dtypes of x and of the tables
# How far two outcomes agree: up to rounding, in the bits of results, also of gradients, also in the strides of gradients.
CLOSE, BITS, GRADIENTS, ALL = 1, 2, 3, 4
REMARKS = {CLOSE: "rounded once, without the function's bits,", BITS: "with other bits of gradients"}
RESULTS = ("inside", "x", "float32", "bfloat16")
# The usual ways to round come first.
CANDIDATES = [
    Rounds(inside, result, each, contiguous, first)
    for first, contiguous, each, result, inside in product(
        (False, True), (True, False), ("each", "once", "float32"), RESULTS, INSIDE
    )
]


def samples(name: str, pairs=8, dtypes=PAIRS[0], sizes=SIZES, layouts=("dense",)) -> Iterator[tuple]:
    """Yields arguments of a convention: where heads have as many channels as rotate, or more, and in several layouts."""
    for size, more, layout in product(sizes, (0, 8), layouts):
        for values in SAMPLES[name](Sample(size, pairs, more, layout, *dtypes)):
            yield more, values


def outcome(function: Callable, names: Sequence[str], values: Sequence[Any], n: int) -> tuple[list, list] | None:
    """Returns what a function returns, and the gradients of its first n arguments, for gradients with several strides.

    Returns None if the function does not take these arguments.
    """
    leaves = [x.detach().requires_grad_() for x in values[:n]]
    gradients: list[Tensor] = []
    try:
        results = function(**dict(zip(names, [*leaves, *values[n:]], strict=True)))
    except Exception:
        return None
    results = [results] if isinstance(results, Tensor) else [*filter(torch.is_tensor, results or ())]
    if [r.shape for r in results] != [x.shape for x in leaves]:
        return None
    for dims in ((-1, -1), (-2, -3), (-1, -2)):
        turned = [r.transpose(*dims) for r in results]
        given = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape).transpose(*dims) for t in turned]
        gradients += torch.autograd.grad(results, leaves, given, retain_graph=True)
    return [r.detach() for r in results], gradients


def strides(t: Tensor) -> list[int]:
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]


class Case(NamedTuple):
    values: tuple  # arguments that the function takes
    more: int  # how many channels of x they leave as they are
    expected: tuple  # the outcome


class Trial:
    """A function, and what it returns for the arguments of every convention that it takes, of two dtypes."""

    def __init__(self, function: Callable):
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self.names = [p.name for p in parameters if p.kind != p.VAR_KEYWORD]

    def cases(self, conventions: Iterable[str], n: int, **kind: Any) -> list[Case]:
        found = []
        for more, values in (s for name in conventions for s in samples(name, **kind)):
            if len(values) == len(self.names) and (expected := outcome(self.function, self.names, values, n)):
                found.append(Case(values, more, expected))
        return found

    def rotated(self, known: Known, convention: Convention, values: tuple) -> list[Tensor] | None:
        try:
            return Rotary(self.function, "f", known, convention)._rotated(values)
        except (IndexError, RuntimeError, AttributeError, TypeError, ValueError):  # the arguments mean something else
            return None

    def agreement(self, known: Known, convention: Convention, cases: list[Case], at_least: int = 0) -> tuple[int, int]:
        """Returns how far torch_rope agrees in all cases that it computes, or a number that is not above at_least, and how
        many these are. It leaves the others to the function."""
        least, computed = ALL, 0
        for values, _, expected in cases:
            if self.rotated(known, convention, values) is None:
                continue
            computed += 1
            ours = Rotary(self.function, "f", known, convention)
            actual = outcome(
                lambda r=ours, **given: r._rotated([*given.values()]), self.names, values, len(expected[0])
            )
            if actual is None or not _close(actual[0], expected[0]):
                return 0, computed
            alike = [*map(strides, actual[1])] == [*map(strides, expected[1])]
            least = min(least, [*map(_same, actual, expected), alike, False].index(False) + CLOSE)
            if least <= at_least:
                break
        return least, computed


def _same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(a.dtype == e.dtype and torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def _close(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Returns whether results have the same numbers up to rounding. A few functions always return bfloat16."""
    limit = 1e-5 if expected[0].dtype == torch.float32 else 2e-2
    return all(torch.allclose(a.float(), e.float(), limit, limit) for a, e in zip(actual, expected, strict=True))


def found(function: Callable) -> Known | str:
    """Returns what a function does, or what cannot be told of it, in words.

    The convention must hold for the arguments of all conventions that the function takes, or leave them to the function.
    """
    trial, most = Trial(function), 0
    for n in (1, 2):
        names = [name for name in CONVENTIONS if CONVENTIONS[name].tensors == n]
        cases = trial.cases(names, n)
        for name in names:
            known = Known(name, Rounds(), any(case.more for case in cases))
            own = trial.cases([name], n)
            _, of_own = trial.agreement(known, CONVENTIONS[name], own)
            if 2 * of_own <= len(own):
                continue
            agreement, computed = trial.agreement(known, CONVENTIONS[name], cases)
            if agreement and computed > most:
                chosen, most = (known, CONVENTIONS[name]), computed
    if not most:
        return "it rotates no pairs of channels by the angles of cos and sin, or in a way that is not known"
    known, convention = chosen
    of_dtypes = {}
    for dtypes in PAIRS:
        for case in trial.cases([known.convention], convention.tensors, dtypes=dtypes, sizes=SIZES[:1] + SIZES[-1:]):
            form = convention.read(case.values[0], *case.values[convention.tensors :]).form
            of_dtypes.setdefault(form, {}).setdefault(dtypes, []).append(case)
    remarks: dict[str, list] = {}
    rounds = {form: _rounds_of(trial, known, convention, of, remarks) for form, of in of_dtypes.items()}
    known = known._replace(rounds=[*rounds.values()][0] if len({*rounds.values()}) == 1 else rounds)
    cases = trial.cases([known.convention], convention.tensors, layouts=LAYOUTS)
    alike = [dense for dense in (False, True) if _has_strides(trial, known._replace(dense=dense), convention, cases)]
    if not alike:
        return "its results have strides that are not known"
    known = known._replace(dense=alike[0])
    parts = [f"{remark} for {' and '.join(of)}" for remark, of in remarks.items()]
    few = (case for pairs in (3, 5) for case in trial.cases([known.convention], convention.tensors, pairs=pairs))
    odd = (case.values for case in few if trial.agreement(known, convention, [case])[0] < BITS)
    if forms := {convention.read(x, *given[convention.tensors - 1 :]).form for x, *given in odd}:
        parts.append(f"with other bits of {' and '.join(sorted(forms))} if rotary_dim is not a multiple of 16")
    return known._replace(but=", ".join(parts))


def _has_strides(trial: Trial, known: Known, convention: Convention, cases: list[Case]) -> bool:
    """Returns whether results have the strides of the function's results."""
    for values, _, (expected, _) in cases:
        ours = trial.rotated(known, convention, values)
        if ours is not None and [*map(strides, ours)] != [*map(strides, expected)]:
            return False
    return True


def _rounds_of(trial: Trial, known: Known, convention: Convention, of_dtypes: dict, remarks: dict) -> Rounds:
    """Returns how a function rounds a form, for all dtypes, and notes where bits differ."""
    best, most = Rounds(), -1
    for candidate in CANDIDATES:
        agreements = []
        for cases in of_dtypes.values():
            agreement, _ = trial.agreement(known._replace(rounds=candidate), convention, cases, at_least=CLOSE)
            agreements.append(agreement)
            if agreement < BITS and most >= 0:
                break
        if len(agreements) == len(of_dtypes) and sum(agreements) > most:
            best, most = candidate, sum(agreements)
        if most == ALL * len(of_dtypes):
            break
    for dtypes, cases in of_dtypes.items():
        if remark := REMARKS.get(trial.agreement(known._replace(rounds=best), convention, cases)[0]):
            names = (str(dtype).removeprefix("torch.") for dtype in dtypes)
            remarks.setdefault(remark, []).append("{} with tables of {}".format(*names))
    return best
