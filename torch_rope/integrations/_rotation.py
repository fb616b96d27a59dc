"""Rotates as a rotary function of another library does, with torch_rope: the same pairs, the same rounding, the same
gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..frequencies import has_float64

_rotate = ops.rotate.default
_rotate_qk = ops.rotate_qk.default

# The last is DeepSeek V3's: it reads pair i from channels 2i and 2i + 1, and writes the result to channels i and
# i + rotary_dim / 2.
PAIRINGS = ["half-split", "interleaved", "interleaved in, half-split out"]


@dataclass(frozen=True)
class Rotation:
    """A description of what a rotary function does."""

    pairing: str  # one of PAIRINGS
    inverse: bool = False
    last_channels: bool = False  # True if it rotates the last channels of a head, and not the first ones
    # True if x may have more tokens than the tables; the first tokens of x then do not rotate.
    first_tokens_pass: bool = False
    # True if k and the tables may have more tokens than q, whose tokens are the last ones.
    last_rows_for_q: bool = False

    @property
    def simple(self) -> bool:
        """True if it is one operator on q and k as they are."""
        return not (self.pairing == PAIRINGS[2] or self.last_channels or self.first_tokens_pass or self.last_rows_for_q)

    @property
    def flags(self) -> dict[str, bool]:
        """The keyword arguments of the operators."""
        flags = {"interleaved": True} if self.pairing != "half-split" else {}
        return flags | ({"inverse": True} if self.inverse else {})

    def __str__(self):
        return ", ".join(
            [
                self.pairing,
                *["inverse"] * self.inverse,
                *["last channels"] * self.last_channels,
                *["first tokens as they are"] * self.first_tokens_pass,
                *["last rows of the tables for q"] * self.last_rows_for_q,
            ]
        )


@dataclass(frozen=True)
class Rounding:
    """A description of how a rotary function rounds."""

    x: torch.dtype  # x is converted to it first
    tables: torch.dtype  # the tables are converted to it
    result: torch.dtype  # the result is converted to it
    eager: bool  # True if each operation rounds, and False if torch_rope rounds once, at the end
    converts_each: bool = False  # True if x is converted for each product, so that gradients are rounded for each
    # True if x * cos is rounded before the sum, and the other product is not. torch_rope does it the other way round.
    turned: bool = False
    contiguous: bool = False  # True if the gradient of x is contiguous, whatever the strides of its result's gradient

    @classmethod
    def once(cls, x: torch.dtype, tables: torch.dtype, result: torch.dtype | None = None) -> "Rounding":
        """Returns how torch_rope rounds x and tables of these dtypes by default."""
        return cls(x, tables if tables in (x, torch.float32) else torch.float32, result or x, False)


class Angles(NamedTuple):
    """The operands of a rotation that do not depend on the layer."""

    cos: Tensor  # [.., seq, rotary_dim / 2]
    sin: Tensor
    in_order: bool  # True if x is [.., seq, heads, head_dim], and False if it is [.., heads, seq, head_dim]
    rounding: Rounding
    flags: dict[str, bool]
    simple: bool  # True if it is one operator on q and k as they are
    has_gradient: bool  # True if autograd would give the gradients other bits or strides


class Rotator:
    """Does a rotation with torch_rope.

    Args:
        rotation: the rotation.
        roundings: how to round, by the dtypes of x and of the tables. Other dtypes are rounded once.
    """

    def __init__(self, rotation: Rotation, roundings: dict | None = None):
        self.rotation = rotation
        self.roundings: dict[tuple[torch.dtype, torch.dtype], Rounding] = roundings or {}

    def operands(
        self,
        x: torch.dtype,
        cos: Tensor,
        sin: Tensor,
        in_order: bool,
        rounding: Rounding | None = None,
        flags: dict[str, bool] | None = None,
    ) -> Angles:
        """Returns the operands for x of a dtype and these tables [.., seq, rotary_dim / 2]."""
        rounding = rounding or self.roundings.get((x, cos.dtype)) or Rounding.once(x, cos.dtype)
        if rounding.tables == torch.float64 and not has_float64(cos.device):
            rounding = Rounding.once(x, cos.dtype, rounding.result)
        cos, sin = cos.to(rounding.tables), sin.to(rounding.tables)
        flags = self.rotation.flags if flags is None else flags
        if rounding.eager:
            flags["eager_rounding"] = not rounding.turned
        simple = self.rotation.simple and rounding.x == rounding.result == x and not rounding.turned
        has_gradient = rounding.converts_each or rounding.contiguous or rounding.turned
        return Angles(cos, sin, in_order, rounding, flags, simple, has_gradient)

    def rotated(self, tensors: Sequence[Tensor], angles: Angles) -> tuple[Tensor, ...]:
        """Returns the rotated tensors, whose gradients have the function's bits where autograd allows it."""
        if (
            angles.has_gradient
            and torch.is_grad_enabled()
            and any(x.requires_grad for x in tensors)
            and not torch.compiler.is_compiling()
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._functorch.peek_interpreter_stack() is None
            and torch.autograd.forward_ad._current_level < 0
        ):
            return _WithItsGradient.apply(self, angles, *tensors)
        return tuple(self._rotated(tensors, angles))

    def _rotated(self, tensors: Sequence[Tensor], angles: Angles) -> list[Tensor]:
        """Returns the rotated tensors, for every kind of rotation."""
        rounding, pairing = angles.rounding, self.rotation.pairing

        def rotate(xs: list[Tensor]) -> Sequence[Tensor]:
            if rounding.turned:
                # By an angle that is less by a quarter turn, a pair (a, b) becomes what it must become, (c, d), as (d, -c).
                ys = self._operator(xs, angles.sin, -angles.cos, angles.flags)
                return [_turn(y, angles) for y in ys]
            ys = self._operator(xs, angles.cos, angles.sin, angles.flags)
            if pairing == PAIRINGS[2]:
                ys = [y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for y in ys]
            return ys

        ys = self._between([x.to(rounding.x) for x in tensors], angles, rotate)
        return [y.to(rounding.result) for y in ys]

    def gradients(self, given: Sequence[Tensor], angles: Angles, dtype: torch.dtype) -> list[Tensor]:
        """Returns the gradients of the tensors of this dtype, from those of the results, with the function's bits."""
        cos, sin, rounding, pairing = angles.cos, angles.sin, angles.rounding, self.rotation.pairing
        each, flags = rounding.converts_each, angles.flags | {"inverse": not self.rotation.inverse}
        if rounding.turned:
            flags["eager_rounding"] = True

        def rotate(gs: list[Tensor]) -> Sequence[Tensor]:
            if pairing == PAIRINGS[2]:
                gs = [g.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for g in gs]
            if not each:
                return self._operator(gs, cos, sin, flags)
            # The gradients of the two products are rounded before they are added.
            zeros, channels = torch.zeros_like(cos), self._channels(gs[0], cos)
            ys, others = ([y.to(dtype) for y in self._operator(gs, *t, flags)] for t in ((cos, zeros), (zeros, sin)))
            for y, other in zip(ys, others, strict=True):
                y[..., channels] += other[..., channels]
            return ys

        # The operator itself rounds the products to the dtype of a gradient that it takes.
        direct = rounding.tables in (dtype, torch.float32)
        inside = rounding.tables if each else rounding.x
        gs = [g if each and direct and g.dtype == dtype else g.to(inside) for g in given]
        ys = self._between([g.contiguous() for g in gs] if rounding.contiguous else gs, angles, rotate)
        return [y.to(dtype) for y in ys]

    def _between(self, xs: list[Tensor], angles: Angles, rotate: Callable) -> list[Tensor]:
        """Returns the tensors that rotate makes from each x, taken as [.., seq, heads, head_dim], without the tokens that
        pass."""
        in_order, rows = angles.in_order, angles.cos.shape[-2]
        seq, first = -3 if in_order else -2, []
        if self.rotation.first_tokens_pass:
            first, xs = zip(*(x.split((x.shape[seq] - rows, rows), seq) for x in xs), strict=True)
        ys = rotate([x if in_order else x.transpose(-3, -2) for x in xs])
        ys = [y if in_order else y.transpose(-3, -2) for y in ys]
        return [torch.cat([f.to(y.dtype), y], seq) for f, y in zip(first, ys, strict=True)] if first else ys

    def _channels(self, x: Tensor, cos: Tensor) -> slice:
        """Returns which channels rotate."""
        dim = 2 * cos.shape[-1]
        return slice(x.shape[-1] - dim, None) if self.rotation.last_channels else slice(0, dim)

    def _operator(self, xs: list[Tensor], cos: Tensor, sin: Tensor, flags: dict[str, bool]) -> Sequence[Tensor]:
        """Returns the rotated tensors; each x: [.., seq, heads, head_dim]."""
        if self.rotation.last_channels:
            flags = flags | {"rotary_start": self._channels(xs[0], cos).start}
        if self.rotation.last_rows_for_q:
            return [_rotate(x, *(t[..., -x.shape[-3] :, :] for t in (cos, sin)), **flags) for x in xs]
        return [_rotate(*xs, cos, sin, **flags)] if len(xs) == 1 else _rotate_qk(*xs, cos, sin, **flags)


def _turn(x: Tensor, angles: Angles) -> Tensor:
    """Returns x with its pairs (d, -c) replaced by (c, d), where x: [.., head_dim], all of which rotates."""
    if angles.flags.get("interleaved"):
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class _WithItsGradient(torch.autograd.Function):
    """A rotation whose gradients have the bits and the strides that autograd gives them through the rotary function.

    Matrix products and sums over tensors with other strides may have other bits.
    """

    @staticmethod
    def forward(ctx, rotator: Rotator, angles: Angles, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rotator, ctx.angles, ctx.dtype = rotator, angles._replace(cos=None, sin=None), tensors[0].dtype
        ctx.save_for_backward(angles.cos, angles.sin)
        return tuple(rotator._rotated(tensors, angles))

    @staticmethod
    def backward(ctx, *given: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return None, None, *ctx.rotator.gradients(given, ctx.angles._replace(cos=cos, sin=sin), ctx.dtype)
