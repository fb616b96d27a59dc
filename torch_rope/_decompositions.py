"""The operators as operators of PyTorch, for compilers of exported programs that know no others."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import reference
from ._ops import ops as rope


def _rotate_(x: Tensor, *angles, **flags) -> None:
    x.copy_(rope.rotate(x, *angles, **flags))


def _qk_in_place(operator: Callable, q: Tensor, k: Tensor, *args, **flags) -> None:
    for x, rotated in zip((q, k), operator(q, k, *args, **flags), strict=True):
        x.copy_(rotated)


IN_PLACE: dict[torch._ops.OpOverload, Callable] = {
    rope.rotate_.default: _rotate_,
    rope.rotate_qk_.default: functools.partial(_qk_in_place, rope.rotate_qk),
    rope.norm_rotate_qk_.default: functools.partial(_qk_in_place, rope.norm_rotate_qk),
    rope.rotate_into_cache_.default: reference.rotate_into_cache_,
}


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Returns a table for ``ExportedProgram.run_decompositions``, which leaves only operators of PyTorch.

    Equivalent to ``{torch.ops.rope.rotate.default: torch_rope.reference.rotate, ...}``. Batch, seq and offset may be
    dynamic, and what is written in place becomes a copy. A position or slot outside a cache writes nothing, where the
    operator raises IndexError. The operators of the backward have no entry: a program of torch.export has none of them.

    Example::

        table = {**torch.export.default_decompositions(), **torch_rope.decompositions()}
        program = torch.export.export(model, args).run_decompositions(table)
    """
    names = "rotate", "rotate_qk", "norm_rotate_qk", "cos_sin", "axial_cos_sin"
    return IN_PLACE | {getattr(rope, name).default: getattr(reference, name) for name in names}


def _decompose_by_table(op: torch._ops.OpOverload) -> None:
    """Lets a table decompose an operator that writes in place.

    PyTorch looks into the table only after it has made auto_functionalized, a node without decomposition, of such an
    operator. But before that it asks whether the operator decomposes itself, as this one does if the table has it.
    """

    @op.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)
    def decompose(*args, **kwargs):
        from torch.fx.experimental import proxy_tensor  # takes long to import

        of_older_torch = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {})  # 2.11
        table = getattr(proxy_tensor.get_proxy_mode(), "decomposition_table", of_older_torch)
        return table[op](*args, **kwargs) if op in table else NotImplemented


for _op in IN_PLACE:
    if torch._C.DispatchKey.CompositeImplicitAutograd not in _op.py_kernels:  # nor has an earlier import
        _decompose_by_table(_op)
