"""Computes what a known rotary function computes, with torch_rope."""

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._bits import Operands, is_traced, operands, rotated
from ._reading import Convention, Known, Reading

_WHOLE = (torch.int32, torch.int64)
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


class Seen(NamedTuple):
    """The tables of a call, with which the next layer may be called, and what was made of them."""

    dtype: torch.dtype  # of x
    shapes: list[torch.Size]  # of x, or of q and k
    others: list[tuple]  # the other arguments, tensors as weak references with their marks
    call: Any = None

    @classmethod
    def of(cls, xs: Sequence[Tensor], others: Sequence[Any], forget: Callable) -> "Seen | None":
        """Returns what tells a call from others, or None if nothing tells that its tables have not changed."""
        for v in others:
            is_table = type(v) is Tensor and not v.requires_grad and v.dtype not in _WHOLE
            if not (is_table or v is None or type(v) is int):
                return None
        seen = [(weakref.ref(v, forget), _mark(v)) if isinstance(v, Tensor) else (v, None) for v in others]
        return cls(xs[0].dtype, [x.shape for x in xs], seen)

    def is_of(self, xs: Sequence[Tensor], others: Sequence[Any]) -> bool:
        """Returns whether a call has the same tables, and x of the same shapes and dtype."""
        if xs[0].dtype is not self.dtype or [x.shape for x in xs] != self.shapes:
            return False
        for value, (seen, mark) in zip(others, self.others, strict=True):
            if mark is None:
                same = value is seen or (type(value) is int and value == seen)
            else:
                same = seen() is value and _mark(value) == mark
            if not same:
                return False
        return True


def _mark(t: Tensor) -> tuple:
    """Returns what differs after a table has got other memory or numbers, or needs a gradient."""
    return t.data_ptr(), None if t.is_inference() else t._version, t.shape, t.requires_grad


class Rotary:
    """A rotary function that follows a convention, and computes with torch_rope.

    ``str()`` says what it does. rounding is that of patch. One model has its own Rotary, so what is remembered here
    belongs to that model.
    """

    def __init__(self, function: Callable, name: str, known: Known, convention: Convention, rounding: str = "eager"):
        self.function, self.name, self.known, self.convention = function, name, known, convention
        self.once = rounding == "once"
        parameters = inspect.signature(function).parameters.values()
        self._defaults = {p.name: p.default for p in parameters if p.kind != p.VAR_KEYWORD}
        self._last: Seen | None = None
        self._checked: dict[tuple, bool] = {}  # whether the last tables of a form are those of a rotation
        self._has_warned = False  # that tables are those of no rotation
        operator = "rotate" if convention.tensors == 1 else "rotate_qk"
        bits = "rounded once" if self.once else known.but
        does = ", ".join(filter(None, [convention.says, bits]))
        self._says = f"{name} is torch.ops.rope.{operator}, {does}"
        self._torch_rope = (self,)  # what is called, as _names.renamed tells it of functions

    def __str__(self) -> str:
        return self._says

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
        ys = [*map(result, rotated([given(x) for x in xs], o), xs)]
        return [y.contiguous() for y in ys] if self.known.dense else ys

    def operands(self, xs: Sequence[Tensor], others: Sequence[Any]) -> tuple[Operands, Callable, Callable] | None:
        """Returns the operands for x, or for q and k, with given and result of _placed, or None to call the function itself.

        others: the function's other arguments. All layers of a model have the same tables, and so the same operands.
        """
        last = self._last  # another thread may change it
        if last is not None and not torch.compiler.is_compiling() and last.is_of(xs, others):
            return last.call
        seen = None if is_traced() else Seen.of(xs, others, lambda _: setattr(self, "_last", None))
        if seen:  # what is remembered must not keep tables alive
            others = [v.data if isinstance(v, Tensor) else v for v in others]
        reading = self.convention.read(xs[0], *others)
        if not (placed := reading and _placed(xs, reading)):
            return None
        cos, sin, heads_first, *layout = placed
        whole = all(2 * cos.shape[-1] == x.shape[-1] for x in map(reading.to, xs))
        if not (whole or self.known.partial) or not self._are_of_a_rotation(reading):
            return None
        # A sum over tokens, which the gradient of a table is, has another order in torch_rope.
        if cos.requires_grad and torch.is_grad_enabled() and not self.once:
            return None
        rounds = self.known.rounds
        found = rounds.get(reading.form) if isinstance(rounds, dict) else rounds
        if found is None:
            return None
        rounding = (found.once if self.once else found.of)(xs[0].dtype, cos.dtype)
        flags: dict[str, Any] = {name: True for name in ("interleaved", "inverse") if getattr(reading, name)}
        if reading.last_channels:
            flags["rotary_start"] = xs[0].shape[-1] - 2 * cos.shape[-1]
        given, result = layout
        call = operands(cos, sin, rounding, flags, heads_first), given, result
        # A table that was converted would not follow a change that no version counts.
        if seen and call[0].cos.data_ptr() == cos.data_ptr():
            self._last = seen._replace(call=call)
        return call

    def _are_of_a_rotation(self, reading: Reading) -> bool:
        """Returns whether the two channels of a pair have the same angle.

        On a GPU, which has to be waited for, tables of one token are examined only the first time.
        """
        if torch.compiler.is_compiling():
            if self._has_warned or False in [*self._checked.values()]:
                return False
            # Dynamo of torch 2.11 takes is_exporting() for True, but reads the flag.
            if reading.cos.device.type in ("cpu", "cuda") and not torch.compiler._is_exporting_flag:
                for a, b in reading.must_be_equal():
                    torch._assert_async((a == b).all(), _NO_ROTATION.format(self.name))
            return True
        cos = reading.cos
        examined = cos.device.type == "cpu" or cos.shape[-3:-1].numel() > 1
        key = reading.form, examined, cos.shape[-1]  # no number of tokens, for which compiled code would have a guard
        known = self._checked.get(key, True)  # another thread may change it
        if (key not in self._checked or examined) and not (cos.is_cuda and torch.cuda.is_current_stream_capturing()):
            # Tensors on the device meta, fake ones and those of vmap do not show their numbers.
            with contextlib.suppress(RuntimeError):
                self._checked[key] = known = all(torch.equal(a, b) for a, b in reading.must_be_equal())
        return known
