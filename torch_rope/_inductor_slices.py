"""Mends what torch.compile does with the operands of in-place operators.

Functionalization writes the operand of an in-place operator as a view of its base. torch gets some of these wrong, and
the operator then silently writes to another place in memory, or reads another. So parts of torch are replaced before it
writes a graph with such an operator. docs/inductor-slices.md has a program that shows the faults. With
TORCH_ROPE_LOWERING=0 nothing is replaced, and to compile such an operator is an error.
"""

import functools
import os
import sys

import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ._signatures import operators


@functools.cache
def _replace_lowering_of_slices() -> None:
    """Replaces what torch does with slices, in functionalization and in Inductor."""
    from torch._higher_order_ops import auto_functionalize
    from torch._inductor import ir
    from torch._inductor.lowering import fallbacks, lowerings, register_lowering
    from torch._inductor.virtualized import V
    from torch._prims_common import compute_required_storage_length
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    # torch clones the memory between the first and the last element. If Inductor computes a slice, that is not there.
    def clone(x):
        size = compute_required_storage_length(x.size(), x.stride(), x.storage_offset())
        memory = torch.empty_strided((size,), (1,), dtype=x.dtype, device=x.device)
        return memory.as_strided(x.size(), x.stride(), x.storage_offset()).copy_(x)

    auto_functionalize.clone_preserve_strides = clone

    # A slice of a base that does not begin where its storage begins gets a start that counts from there: no elements of
    # x[1] are written if the operand is x[1][1:]. Without a slice, torch writes as_strided.
    if try_use_slice := getattr(auto_functionalize, "try_use_slice", None):
        auto_functionalize.try_use_slice = lambda base, tensor: (
            try_use_slice(base, tensor) if statically_known_true(base.storage_offset() == 0) else None
        )

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
    if torch.__version__ < "2.13":  # no text, but a version
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


@functools.cache
def _keep_copies() -> None:
    """Stops Inductor from removing copies in graphs with an in-place operator of torch_rope. In place of x[1:].clone(),
    x * 1 or torch.cat(x.split(2)) it passes on x, and forgets that x begins elsewhere in memory, or must not change."""
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.fx_utils import get_node_storage

    functional = torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2
    in_place = {signature.op for signature in operators() if signature.written}
    same_meta, remove_no_ops = getattr(post_grad, "same_meta", None), getattr(joint_graph, "remove_no_ops", None)

    def writes(graph):
        return any(n.args[0] in in_place for f in functional for n in graph.find_nodes(op="call_function", target=f))

    def is_no_copy(node, source):
        is_view = get_node_storage(node) == get_node_storage(source)
        return same_meta(node, source) and (is_view or not writes(node.graph))

    def remove_unless_written(gm, *args):
        return None if writes(gm.graph) else remove_no_ops(gm, *args)

    def applies(check, match):
        return not writes(match.nodes[0].graph) and check(match)

    post_grad.same_meta, joint_graph.remove_no_ops = is_no_copy, remove_unless_written
    for entry in (e for p in post_grad.pass_patterns for entries in p.patterns.values() for e in entries):
        handler = getattr(getattr(entry, "handler", None), "__name__", "")
        if handler in ("splitwithsizes_cat_replace", "cat_splitwithsizes_replace"):
            entry.extra_check = functools.partial(applies, entry.extra_check)


def _trace(op: torch._ops.OpOverload, mode: FakeTensorMode | FunctionalTensorMode, *args, **kwargs) -> None:
    """Replaces parts of torch before an operator is functionalized, or Inductor traces a program that was functionalized
    in another process, and continues as if this function were not registered."""
    functionalizes, replaces = type(mode) is FunctionalTensorMode, os.environ.get("TORCH_ROPE_LOWERING") != "0"
    if functionalizes and not replaces:
        raise RuntimeError(
            f"{op._schema.name.replace('::', '.')}: TORCH_ROPE_LOWERING is 0 but must not be, because torch.compile may "
            "then write to the wrong memory; unset it, or use the functional operator"
        )
    if replaces and (functionalizes or "torch._inductor.compile_fx" in sys.modules):
        _replace_lowering_of_slices()
        _keep_copies()
    with mode:
        op._op_dk(torch._C.DispatchKey.Python, *args, **kwargs)


for _signature in operators():
    for _mode in (FakeTensorMode, FunctionalTensorMode) if _signature.written else ():
        if _mode not in _signature.op.python_key_table:  # nor has an earlier import registered it
            _signature.op.py_impl(_mode)(functools.partial(_trace, _signature.op))
