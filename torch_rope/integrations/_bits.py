"""Rotates with the bits of another library's rotary function: the same roundings, the same gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..frequencies import has_float64

_rotate, _rotate_qk = ops.rotate.default, ops.rotate_qk.default
_KEY = torch._C._TorchDispatchModeKey
_TRACING = (_KEY.FAKE, _KEY.PROXY, _KEY.FUNCTIONAL)  # the modes that record programs


class Rounding(NamedTuple):
    """A description of how a rotary function rounds, for one dtype of x and one of the tables."""

    x: torch.dtype  # x is converted to it first
    tables: torch.dtype  # the tables are converted to it
    result: torch.dtype  # the result is converted to it
    eager: bool  # True if each operation rounds, and False if torch_rope rounds once, at the end
    converts_each: bool = False  # True if x is converted for each product, so that gradients are rounded for each
    # True if x * cos is rounded before the sum, and the other product is not. torch_rope rounds the other product.
    rounds_first_product: bool = False
    contiguous: bool = False  # True if the gradient of x is contiguous, whatever the strides of its result's gradient

    @classmethod
    def once(cls, x: torch.dtype, tables: torch.dtype, result: torch.dtype | None = None) -> "Rounding":
        """Returns how torch_rope rounds x and tables of these dtypes by default."""
        return cls(x, tables if tables in (x, torch.float32) else torch.float32, result or x, False)


# What rotary functions compute in, given the dtypes of x and of the tables.
INSIDE = {
    "promoted": torch.promote_types,
    "float": lambda x, tables: torch.promote_types(torch.float32, tables),
    "float32": lambda x, tables: torch.float32,
    "float64": lambda x, tables: torch.float64,
    "x": lambda x, tables: x,
}


class Rounds(NamedTuple):
    """How a rotary function rounds each operation, for all dtypes."""

    inside: str = "promoted"  # a key of INSIDE
    result: str = "inside"  # the dtype of the result: "inside", "x", or the name of a dtype
    # How often x is converted: for "each" product, "once", or once to float32, so that the products convert a float32 x.
    converts: str = "each"
    contiguous: bool = True  # these two as in Rounding
    rounds_first_product: bool = False

    def of(self, x: torch.dtype, tables: torch.dtype) -> Rounding:
        inside = INSIDE[self.inside](x, tables)
        result = {"inside": inside, "x": x}.get(self.result) or getattr(torch, self.result)
        # The operators round to this dtype if it is that of x, or float32.
        direct = result == x and torch.promote_types(x, inside) == inside and inside in (x, torch.float32)
        each = x != inside and (self.converts == "each" or (self.converts == "float32" and x == torch.float32))
        return Rounding(x if direct else inside, inside, result, True, each, self.rounds_first_product, self.contiguous)

    def once(self, x: torch.dtype, tables: torch.dtype) -> Rounding:
        """Returns how torch_rope rounds once, to x, or to the narrower dtype that a few functions always return."""
        result = self.of(x, tables).result
        return Rounding.once(x, tables, min(x, result, key=lambda dtype: dtype.itemsize))


class Operands(NamedTuple):
    """All that a rotation of x [batch, seq, heads, head_dim] needs besides x."""

    cos: Tensor  # [.., seq, rotary_dim / 2], or by head [.., seq, heads, rotary_dim / 2]
    sin: Tensor
    rounding: Rounding
    flags: dict  # interleaved, inverse and rotary_start
    heads_first: bool  # whether the function takes x as [batch, heads, seq, head_dim]

    def fits(self, x: Tensor, heads_first: bool) -> bool:
        """Returns whether operators without gradients of tables can compute what the function does, in the dtype of x."""
        has_gradient = self.cos.requires_grad and torch.is_grad_enabled()
        return self.rounding.result == x.dtype and bool(self.heads_first) is heads_first and not has_gradient


def operands(cos: Tensor, sin: Tensor, rounding: Rounding, flags: dict, heads_first: bool) -> Operands:
    """Returns the operands for tables of any dtype."""
    if rounding.tables == torch.float64 and not has_float64(cos.device):
        rounding = Rounding.once(rounding.x, cos.dtype, rounding.result)
    if rounding.eager:
        flags = flags | {"eager_rounding": not rounding.rounds_first_product}
    return Operands(cos.to(rounding.tables), sin.to(rounding.tables), rounding, flags, heads_first)


def is_traced() -> bool:
    """Returns whether calls are compiled, recorded or transformed. What only watches them, as selective checkpointing does,
    is no matter."""
    return (
        torch.compiler.is_compiling()
        or (torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACING)))
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def rotated(xs: Sequence[Tensor], o: Operands) -> tuple[Tensor, ...]:
    """Returns one or two rotated tensors, whose gradients have the function's bits where autograd lets them."""
    r = o.rounding
    has_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if has_gradients and (r.converts_each or r.contiguous or r.rounds_first_product) and not is_traced():
        return _WithItsGradient.apply(o, *xs)
    return _rotated(xs, o)


def _rotated(xs: Sequence[Tensor], o: Operands) -> tuple[Tensor, ...]:
    r, cos, sin = o.rounding, o.cos, o.sin
    xs = [x if x.dtype == r.x else x.to(r.x) for x in xs]
    if r.rounds_first_product:
        # A pair (a, b) becomes the same as (-b, a) by an angle that is less by a quarter turn.
        xs, cos, sin = [_turn(x, o.flags) for x in xs], sin, -cos
    ys = _operator(xs, cos, sin, o.flags)
    return tuple([y if y.dtype == r.result else y.to(r.result) for y in ys])


def _operator(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, flags: dict) -> Sequence[Tensor]:
    return [_rotate(xs[0], cos, sin, **flags)] if len(xs) == 1 else _rotate_qk(*xs, cos, sin, **flags)


def _turn(x: Tensor, flags: dict) -> Tensor:
    """Returns x with its pairs (a, b) replaced by (-b, a), where x: [.., head_dim], all of which rotates."""
    dim, sizes = (-1, (-1, 2)) if flags.get("interleaved") else (-2, (2, -1))
    a, b = x.unflatten(-1, sizes).unbind(dim)
    turned = torch.stack([-b, a], dim).flatten(-2)
    return turned if x.is_contiguous() else torch.empty_like(x).copy_(turned)  # a result has the strides of x


class _WithItsGradient(torch.autograd.Function):
    """A rotation whose gradients have the bits and the strides that autograd gives them through the rotary function.

    Matrix products and sums over tensors with other strides may have other bits.
    """

    @staticmethod
    def forward(ctx, o: Operands, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.rounding, ctx.flags, ctx.heads_first, ctx.dtype = o.rounding, o.flags, o.heads_first, xs[0].dtype
        ctx.save_for_backward(o.cos, o.sin)
        return _rotated(xs, o)

    @staticmethod
    def backward(ctx, *results: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin), r, dtype = ctx.saved_tensors, ctx.rounding, ctx.dtype
        flags = ctx.flags | {"inverse": not ctx.flags.get("inverse"), "eager_rounding": True}
        # The operator itself rounds the products to the dtype of a gradient that it takes.
        direct = r.converts_each and r.tables in (dtype, torch.float32)
        inside = r.tables if r.converts_each else r.x
        gs = [g if direct and g.dtype == dtype else g.to(inside) for g in results]
        if r.contiguous:  # in the function's own layout
            first = ctx.heads_first
            gs = [g.transpose(1, 2).contiguous().transpose(1, 2) if first else g.contiguous() for g in gs]
        if not r.converts_each:
            return None, *(y.to(dtype) for y in _operator(gs, cos, sin, flags))
        # The gradients of the two products are rounded before they are added.
        start, zeros = flags.get("rotary_start", 0), torch.zeros_like(cos)
        channels = slice(start, start + 2 * cos.shape[-1])
        ys, others = ([y.to(dtype) for y in _operator(gs, c, s, flags)] for c, s in ((cos, zeros), (zeros, sin)))
        for y, other in zip(ys, others, strict=True):
            y[..., channels] += other[..., channels]
        return None, *ys
