"""Mends how torch.compile lowers the operands of in-place operators.

Functionalization writes the operand of an in-place operator as a view of its base. torch gets three of these wrong, and
the operator then silently writes to another place in memory. So parts of torch are replaced before it writes such a
graph. docs/inductor-slices.md has a program that shows the fault. With TORCH_ROPE_LOWERING=0 nothing is replaced.
"""

import functools
import os

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ._signatures import Signature, operators


@functools.cache
def _replace_lowering_of_slices() -> None:
    """Replaces what torch does with views whose storage offsets are not 0, in functionalization and in Inductor."""
    from torch._higher_order_ops import auto_functionalize
    from torch._inductor import ir
    from torch._inductor.lowering import fallbacks, lowerings, register_lowering
    from torch._inductor.virtualized import V

    # A slice of a base that does not begin where its storage begins gets a start that counts from there: no elements of
    # x[1] are written if the operand is x[1][1:]. Without a slice, torch writes as_strided.
    if try_use_slice := getattr(auto_functionalize, "try_use_slice", None):

        def only_from_the_beginning(base, tensor):
            offset = base.storage_offset()
            return try_use_slice(base, tensor) if isinstance(offset, int) and offset == 0 else None

        auto_functionalize.try_use_slice = only_from_the_beginning

    def expression(offset: int | torch.SymInt):
        return offset.node.expr if isinstance(offset, torch.SymInt) else int(offset)

    # Inductor has no lowering for a storage offset that is a symbol, and continues with 0: an operator on x[1], of a
    # tensor with a dynamic size, writes to x[0]. If that has happened, a fallback has taken the place of a lowering.
    storage_offset = torch.ops.aten.sym_storage_offset.default
    if storage_offset not in lowerings or storage_offset in fallbacks:

        @register_lowering(storage_offset, type_promotion_kind=None)
        def lowering(x):
            return expression(V.graph.current_node.meta["val"])

    # Before torch 2.13, Inductor counts the storage offset of an input of the graph twice, in its pointer and in
    # as_strided: an operator on a view of the input x[1] writes past the end of x.
    if torch.__version__ < (2, 13):
        as_strided = lowerings[torch.ops.aten.as_strided.default]

        @register_lowering(torch.ops.aten.as_strided.default, type_promotion_kind=None)
        def relative_to_the_input(x, size, stride, storage_offset=None):
            view = as_strided(x, size, stride, storage_offset)
            buffer, layout = view.data.data, view.data.layout
            name = buffer.get_name()
            if storage_offset is not None and name in V.graph.graph_inputs:
                [node] = [n for n in V.graph.graph.nodes if n.op == "placeholder" and n.target == name]
                offset = layout.offset - expression(node.meta["val"].storage_offset())
                layout = ir.FixedLayout(layout.device, layout.dtype, layout.size, layout.stride, offset)
            return ir.TensorBox(ir.ReinterpretView(data=buffer, layout=layout))


def _refuse_slices(signature: Signature, given: dict) -> None:
    """Raises an error if torch's own lowering may write an operand to another place."""
    from torch._higher_order_ops.auto_functionalize import get_base

    for name in sorted(name for name in signature.written if given.get(name) is not None):
        base, offset = get_base(given[name]), given[name].storage_offset()
        if not isinstance(offset, int) or (base is not None and base.storage_offset() != 0):
            raise RuntimeError(
                f"rope.{signature.name}: {name} is a slice that torch's lowering may write elsewhere, but must not be one, "
                "because TORCH_ROPE_LOWERING is 0; pass a contiguous clone, and copy it back into the slice"
            )


def _watch_functionalization(signature: Signature) -> None:
    """Replaces how slices are lowered when an operator is functionalized with a tensor that begins inside its storage."""

    @signature.op.py_impl(FunctionalTensorMode)
    def functionalize(mode, *args, **kwargs):
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if os.environ.get("TORCH_ROPE_LOWERING") == "0":
            _refuse_slices(signature, signature.by_name(args) | kwargs)
        elif any(not isinstance(offset, int) or offset for offset in map(Tensor.storage_offset, tensors)):
            _replace_lowering_of_slices()
        with mode:  # continues as if this function were not registered
            return signature.op._op_dk(torch._C.DispatchKey.Python, *args, **kwargs)


for _signature in operators():
    if _signature.written and FunctionalTensorMode not in _signature.op.python_key_table:  # by an earlier import
        _watch_functionalization(_signature)
