"""What a rotary function computes, found out by trying it.

:class:`Rotary` tries a function on random numbers with every convention of its library, in all dtypes, and then computes
what the function computes, with torch_rope.

Random numbers show what a function does if its code has no branches. A function with branches must have a text that the
library's table lists.
"""

import contextlib
import copy
import dis
import hashlib
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .._modes import undisturbed
from ._bits import FIRST_PRODUCT, POLICIES, Operands, Rounding, is_traced, operands, rotated
from ._conventions import Convention, Reading, Sample
from ._names import nested

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (torch.int32, torch.int64)
Size = tuple[int, int, int]  # batch, seq, heads
# How far two outcomes agree: up to rounding, in the bits of results, also of gradients, also in the strides of gradients.
_CLOSE, _BITS, _GRADIENTS, _ALL = 1, 2, 3, 4
_REMARKS = {_CLOSE: "rounded once, without the function's bits,", _BITS: "with other bits of gradients"}
_NO_ROTATION = "torch_rope: {} was called with different angles for the two channels of a pair"


def _placed(xs: Sequence[Tensor], reading: Reading) -> tuple[Tensor, Tensor, bool, Callable, Callable] | None:
    """Returns how the operators take a call: cos, sin, whether the function has heads before seq, given and result.

    given(x) returns x as [batch, seq, heads, head_dim], and result(y, x) a result of the operators as the function returns
    it. Returns None if the operators cannot take the tables.
    """
    cos, sin, to, back = reading.cos, reading.sin, reading.to, reading.back
    shapes = [tuple(to(x).shape) for x in xs]
    dim = len(shapes[0])
    if not (3 <= dim <= 4 and cos.dim() <= dim and cos.shape == sin.shape):
        return None
    cos, sin = (t[(None,) * (dim - t.dim())].to(xs[0].device) for t in (cos, sin))
    missing = None  # the dimension that x has too few
    if dim == 3:  # [seq, heads, head_dim] or [batch, seq, head_dim]
        missing = 0 if cos.shape[1] == 1 else 2
        cos, sin = cos.unsqueeze(missing), sin.unsqueeze(missing)
        shapes = [(*s[:missing], 1, *s[missing:]) for s in shapes]
    batch, seq, heads, _ = cos.shape
    if not all(n in (1, size) for shape in shapes for n, size in zip(cos.shape, shape[:3], strict=False)):
        return None
    heads_first = False
    if heads == 1 or seq == 1:
        # For one token, the heads are where x has several.
        heads_first = heads > 1 or (seq == 1 and shapes[0][2] == 1)
        cos, sin = (t[:, 0] if heads_first else t[:, :, 0].expand(-1, shapes[0][1], -1) for t in (cos, sin))
        cos, sin = (t[0] if batch == 1 else t for t in (cos, sin))
    tokens = [(s[0], s[2 if heads_first else 1]) for s in shapes]  # not in a set: a symbol for a size has no hash
    if any(other != tokens[0] for other in tokens[1:]):
        return None

    def given(x: Tensor) -> Tensor:
        x = to(x) if missing is None else to(x).unsqueeze(missing)
        return x.transpose(1, 2) if heads_first else x

    def result(y: Tensor, x: Tensor) -> Tensor:
        y = y.transpose(1, 2) if heads_first else y
        return back(y if missing is None else y.squeeze(missing), x)

    return cos, sin, heads_first, given, result


# ---- the functions ----


class Rotary:
    """A rotary function that follows one of the conventions of its library, and computes with torch_rope.

    ``str()`` says what was found out. texts has the known texts of functions with branches, see :func:`text_of`; rounding
    is that of the functions patch. How the function rounds is found out when that is needed first.

    Raises NotImplementedError if the function follows no convention, or branches in a text that is not known.
    """

    def __init__(self, function: Callable, name: str, conventions: Sequence, texts: Collection[str], rounding="eager"):
        self.function, self.name, self._once = function, name, rounding == "once"
        parameters = inspect.signature(function).parameters.values()
        self._defaults = {p.name: p.default for p in parameters if p.kind != p.VAR_KEYWORD}
        self._last: tuple | None = None  # the tables of the last call, and what was made of them
        self._roundings: dict[tuple, Rounding] = {}  # how the function rounds
        self._remarks: str | None = None  # about its bits, once it is known how it rounds
        self._checked: dict[tuple, bool] = {}  # whether the last tables of a form are those of a rotation
        self._has_warned = self._in_trial = False  # warned that tables are those of no rotation
        how = _recognised(function, texts)
        self.convention, pairings = self._by_trial(Rotary._find, conventions)
        operator = "rotate" if self.convention.tensors == 1 else "rotate_qk"
        does = ", ".join(filter(None, [pairings, self.convention.says]))
        # {} takes the remarks about bits.
        self._says = f"{name} is torch.ops.rope.{operator}, {does}{{}} ({how})"
        self._torch_rope = (self,)  # what is called, as _names.renamed tells it of functions

    def __str__(self) -> str:
        self.find_roundings()
        return self._says.format(self._remarks)

    def rounded_once(self) -> "Rotary":
        return Rotary(self.function, self.name, [self.convention], {text_of(self.function)}, "once")

    # ---- computing ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the function returns."""
        given = self._defaults | dict(zip(self._defaults, args, strict=False)) | kwargs
        ys = self._rotated([given[name] for name in self._defaults])
        if ys is not None:
            return tuple(ys) if len(ys) > 1 else ys[0]
        if False in [*self._checked.values()] and not self._has_warned:
            self._has_warned = True
            message = _NO_ROTATION + ", which is not a rotation, so it computes as without torch_rope"
            warnings.warn(message.format(self.name), stacklevel=2)
        return self.function(*args, **kwargs)

    def _rotated(self, values: Sequence[Any]) -> list[Tensor] | None:
        """Returns what the function returns for these arguments, or None if the function itself must be called."""
        xs, others = values[: self.convention.tensors], values[self.convention.tensors :]
        missing = any(v is inspect.Parameter.empty for v in values) or any(x is None for x in xs)
        if missing or (call := self.operands(xs, others)) is None:
            return None
        o, given, result = call
        return [*map(result, rotated([given(x) for x in xs], o, self._in_trial), xs)]

    def operands(self, xs: Sequence[Tensor], others: Sequence[Any]) -> tuple[Operands, Callable, Callable] | None:
        """Returns the operands for x, or for q and k, with given and result of _placed, or None to call the function itself.

        others: the function's other arguments. All layers of a model have the same tables, and so the same operands.
        """
        tables = [t for t in others if isinstance(t, Tensor)]
        # The next layer may be called with the same tables, which are then known by their identity.
        lasting = not (self._in_trial or is_traced()) and all(isinstance(v, Tensor | int | None) for v in others)
        lasting = lasting and all(type(t) is Tensor and not t.requires_grad and t.dtype not in _WHOLE for t in tables)
        if lasting:
            versions = [None if t.is_inference() else t._version for t in tables]
            key = xs[0].dtype, [x.shape for x in xs], versions, [v for v in others if not isinstance(v, Tensor)]
            seen, known, call = self._last or ((), None, None)  # another thread may change it
            if known == key and all(ref() is t for ref, t in zip(seen, tables, strict=True)):
                return call
            others = [v.data if isinstance(v, Tensor) else v for v in others]  # operands must not keep tables alive
        reading = self.convention.read(xs[0], *others)
        if not (placed := reading and _placed(xs, reading)):
            return None
        cos, sin, heads_first, *layout = placed
        # A sum over tokens, which the gradient of a table is, has another order in torch_rope.
        if (cos.requires_grad and torch.is_grad_enabled() and not self._once) or not self._are_of_a_rotation(reading):
            return None
        kind = xs[0].dtype, cos.dtype, reading.form, reading.interleaved
        self.find_roundings()
        rounding = self._roundings.get(kind) or Rounding.once(*kind[:2])
        flags: dict[str, Any] = {name: True for name in ("interleaved", "inverse") if getattr(reading, name)}
        if reading.last_channels:
            flags["rotary_start"] = xs[0].shape[-1] - 2 * cos.shape[-1]
        call = operands(cos, sin, rounding, flags, heads_first), *layout
        # A converted table that has no version would not follow a change of the table.
        if lasting and (None not in versions or call[0].cos.dtype == cos.dtype):
            self._last = [weakref.ref(t, lambda _: setattr(self, "_last", None)) for t in tables], key, call
        return call

    def _are_of_a_rotation(self, reading: Reading) -> bool:
        """Returns whether the two channels of a pair have the same angle.

        Tables of one token, which tell little, are examined only the first time, because a GPU has to be waited for.
        """
        if torch.compiler.is_compiling() and not self._in_trial:
            if self._has_warned or False in [*self._checked.values()]:
                return False
            # Dynamo of torch 2.11 takes is_exporting() for True, but reads the flag.
            if reading.cos.device.type in ("cpu", "cuda") and not torch.compiler._is_exporting_flag:
                for a, b in reading.must_be_equal():
                    torch._assert_async((a == b).all(), _NO_ROTATION.format(self.name))
            return True
        cos = reading.cos
        several = cos.shape[-3:-1].numel() > 1
        key = reading.form, several, cos.shape[-1]  # no number of tokens, for which compiled code would have a guard
        known = self._checked.get(key, True)  # another thread may change it
        if (key not in self._checked or several) and not (cos.is_cuda and torch.cuda.is_current_stream_capturing()):
            # Tensors on the device meta, fake ones and those of vmap do not show their numbers.
            with contextlib.suppress(RuntimeError):
                self._checked[key] = known = all(torch.equal(a, b) for a, b in reading.must_be_equal())
        return known

    # ---- finding out what it computes ----

    @torch.compiler.assume_constant_result  # compiled code calls it, and does not trace it
    def find_roundings(self) -> None:
        """Finds out how the function rounds, in every dtype, unless that is known."""
        if self._remarks is None:
            self._roundings, self._remarks = self._by_trial(Rotary._find_roundings)

    def _by_trial(self, find: Callable, *args: Any) -> Any:
        """Returns what a method finds in a trial: no mode of the caller reaches it, and no call of another thread sees it."""
        trial = copy.copy(self)
        trial._in_trial, trial._remarks, trial._roundings, trial._checked = True, "", {}, {}
        return undisturbed(find, trial, *args)

    def _samples(self, dtypes: tuple, sizes: Sequence[Size] = ((2, 5, 3),), pairs: int = 8) -> Iterator[tuple]:
        """Yields what decides how the function rounds, random arguments of these dtypes that it takes, and its outcome."""
        for size, more in product(sizes, (0, 8)):
            for values in self.convention.samples(Sample(*size, 2 * pairs + more, pairs, *dtypes)):
                if (outcome := self._outcome(self.function, values)) is not None:
                    reading = self.convention.read(values[0], *values[self.convention.tensors :])
                    yield (dtypes[0], reading.cos.dtype, reading.form, reading.interleaved), values, outcome

    def _outcome(self, function: Callable, values: Sequence[Any]) -> tuple[list, list] | None:
        """Returns what a function returns, and the gradients of x, or of q and k, for gradients with several strides.

        Returns None if the function does not take these arguments.
        """
        n, gradients = self.convention.tensors, list[Tensor]()
        leaves = [x.detach().requires_grad_() for x in values[:n]]
        try:
            results = function(**dict(zip(self._defaults, [*leaves, *values[n:]], strict=True)))
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

    def _agreement(self, values: Sequence[Any], expected: tuple[list, list]) -> int:
        """Returns how far torch_rope agrees with an outcome, see _CLOSE and the following."""
        actual = self._outcome(lambda **given: self._rotated([*given.values()]), values)
        if actual is None or not _close(actual[0], expected[0]):
            return 0
        strides, others = ([g.stride() for g in gradients] for _, gradients in (actual, expected))
        return [*map(_same, actual, expected), strides == others, False].index(False) + _CLOSE

    def _find(self, conventions: Sequence[Convention]) -> tuple[Convention, str]:
        """Returns the convention that the function follows, and its pairings, in words."""
        best: list[tuple] = []
        for self.convention in conventions:
            samples = [*self._samples((torch.float32,) * 2, ((2, 5, 3), (1, 70, 2), (2, 1, 3)))]
            # A function may take single tokens in several ways.
            if len(samples) > len(best) and all(self._agreement(*sample) for _, *sample in samples):
                best, found = samples, self.convention
        if not best:
            raise NotImplementedError(
                "the function must rotate pairs of channels by the angles of cos and sin but computes something else"
            )
        pairings = dict.fromkeys(kind[-1] for kind, *_ in best)
        return found, " or ".join("interleaved" if interleaved else "half-split" for interleaved in pairings)

    def _find_roundings(self) -> tuple[dict[tuple, Rounding], str]:
        """Returns how the function rounds, in every dtype, and remarks about bits that torch_rope does not have."""
        groups: dict[tuple, list] = {}
        for dtypes in product(DTYPES, (*DTYPES, torch.float64)):
            for kind, *sample in self._samples(dtypes):
                groups.setdefault(kind, []).append(sample)
        remarks: dict[str, list] = {}
        for kind, samples in groups.items():
            # With x of 16 bits, few numbers show how the sum is rounded that has 32 bits. With x of 32 bits, most do.
            wide = self._roundings.get((torch.float32, *kind[1:]))
            policies = FIRST_PRODUCT if wide and wide.rounds_first_product else [*POLICIES, *FIRST_PRODUCT]
            if remark := self._find_rounding(kind, samples, [] if self._once else policies):
                names = (str(dtype).removeprefix("torch.") for dtype in kind[:2])
                remarks.setdefault(remark, []).append("{} with tables of {}".format(*names))
        if self._once:
            return self._roundings, ", rounded once"
        parts = [f", {remark} for {' and '.join(of)}" for remark, of in remarks.items()]
        sizes = (2, 5, 3), (1, 70, 2)
        few = (sample for pairs in (3, 5) for sample in self._samples((torch.float32,) * 2, sizes, pairs))
        if forms := dict.fromkeys(kind[2] for kind, *sample in few if self._agreement(*sample) < _BITS):
            parts.append(f", with other bits of {' and '.join(forms)} if rotary_dim is not a multiple of 16")
        return self._roundings, "".join(parts)

    def _find_rounding(self, kind: tuple, samples: list, policies: list) -> str:
        """Finds how the function rounds samples of one kind. Returns a remark."""
        result, best = samples[0][1][0][0].dtype, _CLOSE
        narrower = min(kind[0], result, key=lambda dtype: dtype.itemsize)  # a few functions always return bfloat16
        found = Rounding.once(kind[0], kind[1], narrower)
        for policy in policies:
            self._roundings[kind] = policy(*kind[:2], result)
            agreement = _ALL
            for sample in samples:
                agreement = min(agreement, self._agreement(*sample))
                if agreement <= best:
                    break
            else:
                best, found = agreement, self._roundings[kind]
            if best == _ALL:
                break
        self._roundings[kind] = found
        return _REMARKS.get(best, "")


def _same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(a.dtype == e.dtype and torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def _close(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """Returns whether results have the same numbers up to rounding. A few functions always return bfloat16."""
    limit = 1e-5 if expected[0].dtype == torch.float32 else 2e-2
    return all(torch.allclose(a.float(), e.float(), limit, limit) for a, e in zip(actual, expected, strict=True))


# ---- branches ----


def _recognised(function: Callable, texts: Collection[str]) -> str:
    """Returns how a function is recognised, or raises NotImplementedError if random numbers may not show what it does."""
    parts = _with_helpers(inspect.unwrap(function))
    if not any(_branches(part.__code__) for part in parts):
        return "tried on random numbers"
    text = text_of(function)
    if text in texts:
        return "known by its source text"
    raise NotImplementedError(
        f"the function branches, and its text ({text}) is not one that torch_rope knows, so that random numbers may not show "
        "all that it computes"
    )


def text_of(function: Callable) -> str:
    """Returns a hash of the text of a function and of the functions of its package that it calls, without white space."""
    try:
        texts = [inspect.getsource(f.__code__) for f in _with_helpers(inspect.unwrap(function))]
    except (OSError, TypeError):
        return "not there"
    return hashlib.sha256("".join("".join(texts).split()).encode()).hexdigest()[:12]


def _with_helpers(function: types.FunctionType) -> list[types.FunctionType]:
    """Returns a function, and the functions of its package that it calls by name."""
    found, package = [function], function.__module__.split(".")[0]
    for part in found:  # it grows
        for name in (name for code in nested(part.__code__) for name in code.co_names):
            helper = inspect.unwrap(part.__globals__.get(name, part))
            if isinstance(helper, types.FunctionType) and helper.__module__.split(".")[0] == package:
                found += [helper] * (helper not in found)
    return found


def _branches(code: types.CodeType) -> bool:
    """Returns whether code jumps depending on a value. A loop over a known number of items is a branch too."""
    instructions = (i.opname for part in nested(code) for i in dis.get_instructions(part))
    return any(("JUMP" in name and "IF" in name) or name == "FOR_ITER" for name in instructions)
