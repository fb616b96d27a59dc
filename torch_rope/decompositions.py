"""The operators as operators of PyTorch: a table for ``ExportedProgram.run_decompositions``."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

from . import reference
from ._ops import ops as rope


def _rotate_(x: Tensor, *angles, **flags) -> None:
    x.copy_(rope.rotate(x, *angles, **flags))


def _rotate_qk_(q: Tensor, k: Tensor, *angles, **flags) -> None:
    for x, rotated in zip((q, k), rope.rotate_qk(q, k, *angles, **flags), strict=True):
        x.copy_(rotated)


# What the operators in place do, by operators that return their results and copies of these.
IN_PLACE = {
    rope.rotate_.default: _rotate_,
    rope.rotate_qk_.default: _rotate_qk_,
    rope.rotate_into_cache_.default: reference.rotate_into_cache,
}


def decompositions() -> dict[OpOverload, Callable]:
    """Returns ..."""
    names = "rotate", "rotate_qk", "norm_rotate_qk", "cos_sin", "axial_cos_sin"
    return IN_PLACE | {getattr(rope, name).default: getattr(reference, name) for name in names}


# torch writes an operator in place as auto_functionalized before it reads the table, unless the operator decomposes
# itself. So these do, while a program is traced with a table that names them. All other callers get NotImplemented, and
# go on as if there were no such kernel.


def _decompose_by_table(op: OpOverload) -> None:
    @op.py_impl(DispatchKey.CompositeImplicitAutograd)
    def decompose(*args, **kwargs):
        from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes long to import

        table = getattr(get_proxy_mode(), "decomposition_table", {})
        return table[op](*args, **kwargs) if op in table else NotImplemented


for _op in IN_PLACE:
    _decompose_by_table(_op)
