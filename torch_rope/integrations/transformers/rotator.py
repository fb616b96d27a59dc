"""Rotates as a rotary function of transformers does, with torch_rope."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._ops import ops
from .. import _rotation
from .._rotation import Angles

_rotate_qk = ops.rotate_qk.default

# The forms of the tables that rotary functions take, shown for two angles a and b. Each form is a pair of functions:
# the first makes the tables from cos and sin [.., rotary_dim / 2], the second reads cos and sin back from the tables.
# Most rotary modules make the first form. The last form, with a dimension for the heads, is that of Llama 4's images.
TABLES = {
    "a, b, a, b": (
        lambda cos, sin: (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)),
        lambda cos, sin: (cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]),
    ),
    "a, a, b, b": (
        lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
        lambda cos, sin: (cos[..., ::2], sin[..., ::2]),
    ),
    "a, b": (lambda cos, sin: (cos, sin), lambda cos, sin: (cos, sin)),
    "complex": (
        lambda cos, sin: (torch.complex(cos, sin),),
        lambda table: torch.view_as_real(table).unbind(-1),
    ),
    "complex, with heads": (
        lambda cos, sin: (torch.complex(cos, sin).unsqueeze(-2),),
        lambda table: torch.view_as_real(table.squeeze(1)).unbind(-1),
    ),
}


def has_form(form: str, *tables: Tensor) -> bool:
    """Returns whether tables are cos and sin in this form of TABLES."""
    make, read = TABLES[form]
    return len(tables) == 2 and all(map(torch.equal, make(*read(*tables)), tables))


def seq_is_before_heads(table: Tensor, unsqueeze_dim: int) -> bool:
    """Returns True if a table [.., seq, rotary_dim], unsqueezed at unsqueeze_dim, broadcasts over x
    [.., seq, heads, head_dim], and False if it broadcasts over x [.., heads, seq, head_dim]."""
    from_the_end = unsqueeze_dim - table.dim() - 1 if unsqueeze_dim >= 0 else unsqueeze_dim
    if from_the_end != -2 and from_the_end != -3:
        raise ValueError(
            f"torch_rope: unsqueeze_dim is {unsqueeze_dim} but must be {table.dim() - 1} for x [.., seq, heads, "
            f"head_dim] or {table.dim() - 2} for x [.., heads, seq, head_dim], because the tables have shape "
            f"{list(table.shape)}"
        )
    return from_the_end == -2


@dataclass(frozen=True, kw_only=True)
class Rotation(_rotation.Rotation):
    """A description of what a rotary function of transformers does."""

    tables: str  # a key of TABLES
    unsqueeze_dim: int | None  # None if the function has an argument of this name; 0 for tables [seq, rotary_dim]

    def has_form(self, tables: tuple[Tensor, ...]) -> bool:
        """Returns whether both channels of a pair have the same angle in these tables."""
        return len(tables) == 1 or has_form(self.tables, *tables)

    __str__ = _rotation.Rotation.__str__


class Rotator(_rotation.Rotator):
    """Does a rotation with torch_rope.

    Args:
        rotation: the rotation.
        roundings: how to round, by the dtypes of x and of the tables. Other dtypes are rounded once.
        returns_none: True if it returns (x, None) for the tensors (x, None), and False if it returns x.

    Attributes:
        first_tables: a function that is called with a caller and its tables, unless the last call had the same tables.
    """

    def __init__(self, rotation: Rotation, roundings: dict | None = None, returns_none: bool = False):
        super().__init__(rotation, roundings)
        self.returns_none = returns_none
        self.first_tables: Any = None
        self._last: tuple | None = None

    def rotate(
        self, tensors: tuple[Tensor | None, ...], tables: tuple[Tensor, ...], unsqueeze_dim: int, caller: Any = None
    ) -> Any:
        """Returns the rotated tensors as a rotary function does. The caller is a module, or None."""
        angles = self.angles(tensors[0], tables, unsqueeze_dim, caller)
        alone = len(tensors) == 1 or tensors[1] is None
        if alone or not angles.simple or (angles.has_gradient and torch.is_grad_enabled()):
            ys = self.rotated(tensors[:1] if alone else tensors, angles)
            return ys if not alone else (*ys, None) if len(tensors) == 2 and self.returns_none else ys[0]
        cos, sin, in_order, _, flags, _, _ = angles
        q, k = tensors
        if in_order:
            return _rotate_qk(q, k, cos, sin, **flags)
        q, k = _rotate_qk(q.transpose(-3, -2), k.transpose(-3, -2), cos, sin, **flags)
        return q.transpose(-3, -2), k.transpose(-3, -2)

    def angles(self, x: Tensor, tables: tuple[Tensor, ...], unsqueeze_dim: int, caller: Any = None) -> Angles:
        """Returns the operands for these tables. They are remembered, because all layers have the same tables."""
        if torch.compiler.is_compiling():
            return self._angles(x, tables, unsqueeze_dim)._replace(has_gradient=False)
        last = self._last
        if (
            last is not None
            and last[0]() is tables[0]
            and last[1]() is tables[-1]
            and last[2] is x.dtype
            and last[3] == unsqueeze_dim
            and not torch._C._len_torch_dispatch_stack()
        ):
            return last[4]
        if self.first_tables is not None:
            self.first_tables(caller, tables)
        if (
            any(type(t) is not Tensor or t.requires_grad for t in tables)
            or torch._C._len_torch_dispatch_stack()
            or torch._C._get_tracing_state() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return self._angles(x, tables, unsqueeze_dim)
        # Views of the tables themselves would keep the tables alive; views of their data do not.
        angles = self._angles(x, tuple(t.data for t in tables), unsqueeze_dim)
        if angles.cos.data_ptr() == tables[0].data_ptr():  # views, which follow if the tables are changed in place
            first, second = weakref.ref(tables[0], self._forget), weakref.ref(tables[-1])
            self._last = first, second, x.dtype, unsqueeze_dim, angles
        return angles

    def _forget(self, table: weakref.ref) -> None:
        last = self._last
        if last is not None and last[0] is table:
            self._last = None

    def _angles(self, x: Tensor, tables: tuple[Tensor, ...], unsqueeze_dim: int) -> Angles:
        cos, sin = TABLES[self.rotation.tables][1](*tables)
        if unsqueeze_dim == 0 and cos.dim() == 3 and len(cos) == 1:  # the function multiplies by the tables as they are
            cos, sin = cos[0], sin[0]
        return self.operands(x.dtype, cos, sin, seq_is_before_heads(cos, unsqueeze_dim))
