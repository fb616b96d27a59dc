"""Exports models that call torch_rope to ONNX: ``torch.onnx.export`` takes ``TRANSLATIONS`` as custom_translation_table.

docs/integrations/onnx.md says what each operator and argument becomes. Mostly it is the node ``RotaryEmbedding`` of opset
23, in float32, which takes x as ``[batch, seq, heads * head_dim]``, a view of what the operators take.
"""

import itertools
import operator

import torch
from onnxscript import ir
from onnxscript import opset23 as op

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64
rope = torch.ops.rope


def _number(value: float, dtype: ir.DataType) -> ir.Value:
    return op.Constant(value=ir.tensor(value, dtype=dtype))


def _cos_sin(positions, inv_freq, *, attention_factor=1.0, dtype=-1, axes=0) -> list[ir.Value]:
    """Translates ``rope.cos_sin``, and ``rope.axial_cos_sin`` if there are axes.

    dtype: a number of ONNX, or -1 for float32.
    axes: 0, or the number of dimensions of positions, whose first dimension then is one of axes that are summed.
    """
    frequencies = op.Cast(inv_freq, to=DOUBLE)
    if len(inv_freq.shape) == 2 + bool(axes):  # two float32 parts
        frequencies = op.ReduceSum(frequencies, [0], keepdims=0)
    if axes:
        frequencies = op.Reshape(frequencies, [0, *[1] * (axes - 1), -1])  # [axes, 1, ..., rotary_dim / 2]
    angle = op.Mul(op.Unsqueeze(op.Cast(positions, to=DOUBLE), [-1]), frequencies)
    angle = op.ReduceSum(angle, [0], keepdims=0) if axes else angle
    factor = _number(attention_factor, DOUBLE)
    return [op.Cast(op.Mul(f(angle), factor), to=FLOAT if dtype == -1 else dtype) for f in (op.Cos, op.Sin)]


def _rotated(
    xs, to: ir.DataType, cos=None, sin=None, inv_freq=None, positions=None, offset=0, *, attention_factor=1.0,
    interleaved=False, inverse=False, rotary_start=0, eager_rounding=False,
) -> list[ir.Value]:  # fmt: skip
    """Returns xs rotated, in the dtype `to`. The other arguments are those of torch_rope.rotate."""
    x, rank = xs[0], len(xs[0].shape)
    dtype = DOUBLE if x.dtype == DOUBLE else FLOAT  # the dtype of the arithmetic
    if eager_rounding and cos is not None and cos.dtype == x.dtype:
        dtype = x.dtype
    ids = None  # the rows of tables by position: [seq], [1, seq] or [batch, seq]
    if inv_freq is not None or len(cos.shape) == 2:
        seq = op.Squeeze(op.Shape(x, start=rank - 3, end=rank - 2))
        ids = op.Range(_number(0, INT64), seq, _number(1, INT64)) if positions is None else op.Cast(positions, to=INT64)
        ids = op.Add(ids, offset)
    pairs, by_head = (cos if inv_freq is None else inv_freq).shape[-1], inv_freq is None and len(cos.shape) == 4
    if inv_freq is not None:
        (cos, sin), ids = _cos_sin(ids, inv_freq, dtype=dtype), None
    if not eager_rounding:  # PyTorch multiplies before it converts
        cos, sin = (op.Cast(t, to=dtype) for t in (cos, sin))
    if attention_factor != 1:
        cos, sin = (op.Mul(t, op.CastLike(_number(attention_factor, DOUBLE), t)) for t in (cos, sin))
    cos, sin = (op.Cast(t, to=dtype) for t in (cos, sin))
    sin = op.Neg(sin) if inverse else sin

    out = []
    for x in xs:
        heads, head_dim = x.shape[-2:]
        by_node = dtype == FLOAT and not (by_head or eager_rounding) and isinstance(heads, int)
        # The node may pass over the last channels, but it takes no odd number of channels.
        end = head_dim if by_node and (head_dim - rotary_start) % 2 == 0 else rotary_start + 2 * pairs
        tokens = x if rank == 4 else op.Unsqueeze(x, [0])  # [batch, seq, heads, head_dim]
        parts = []
        for first, last in itertools.pairwise(sorted({0, rotary_start, end, head_dim})):
            part = tokens if last - first == head_dim else op.Slice(tokens, [first], [last], [-1])
            if first == rotary_start:
                given = op.Cast(part, to=dtype), cos, sin, ids, pairs, interleaved
                part = _by_node(*given, heads, last - first) if by_node else _by_products(*given, by_head)
            parts.append(op.Cast(part, to=to))
        y = op.Concat(*parts, axis=-1) if len(parts) > 1 else parts[0]
        out.append(y if rank == 4 else op.Squeeze(y, [0]))
    return out


def _by_node(x, cos, sin, ids, pairs: int, interleaved: bool, heads: int, channels: int) -> ir.Value:
    """Returns x ``[batch, seq, heads, channels]`` rotated by the node. cos and sin are by position if there are ids."""
    # The node wants the tables as [batch, seq, pairs], or the ids as [batch, seq].
    ones = op.Constant(value_ints=[1, 1] if ids is None else [1])
    shape = op.Concat(op.Shape(x, start=0, end=1), ones, axis=0)
    given = [op.Expand(t, shape) for t in ((cos, sin) if ids is None else (ids,))]
    y = op.RotaryEmbedding(
        op.Reshape(x, [0, 0, heads * channels]), *(given if ids is None else [cos, sin, *given]),
        interleaved=int(interleaved), num_heads=heads,
        rotary_embedding_dim=0 if channels == 2 * pairs else 2 * pairs,  # 0: all channels
    )  # fmt: skip
    return op.Reshape(y, [0, 0, heads, channels])


def _by_products(x, cos, sin, ids, pairs: int, interleaved: bool, by_head: bool) -> ir.Value:
    """Returns x ``[batch, seq, heads, 2 * pairs]`` rotated by multiplications and sums in its dtype."""
    if ids is not None:
        cos, sin = op.Gather(cos, ids), op.Gather(sin, ids)
    if not by_head:
        cos, sin = op.Unsqueeze(cos, [-2]), op.Unsqueeze(sin, [-2])
    split = op.Reshape(x, [0, 0, 0, pairs, 2] if interleaved else [0, 0, 0, 2, pairs])
    axis = -1 if interleaved else -2
    a, b = (op.Gather(split, _number(i, INT64), axis=axis) for i in (0, 1))
    y = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))
    return op.Reshape(op.Concat(*(op.Unsqueeze(t, [axis]) for t in y), axis=axis), [0, 0, 0, 2 * pairs])


def _norm_rotate_qk(q, k, q_norm_weight, k_norm_weight, *angles, norm_eps=1e-6, eager_rounding=False, **flags):
    """Translates ``rope.norm_rotate_qk``: an RMS norm in float32, or in double, and a rotation."""
    wide, out = DOUBLE if q.dtype == DOUBLE else FLOAT, []
    narrow = q.dtype if eager_rounding else wide  # what the norm is rounded to
    for x, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        y = op.Cast(x, to=wide)
        mean = op.ReduceMean(op.Mul(y, y), [-2, -1][-len(weight.shape) :], keepdims=1)
        y = op.Div(y, op.Sqrt(op.Add(mean, _number(norm_eps, wide))))
        inside = narrow if weight.dtype == q.dtype else wide
        y = op.Cast(op.Mul(op.Cast(y, to=inside), op.Cast(weight, to=inside)), to=narrow)
        y.dtype, y.shape = narrow, x.shape  # the exporter sets those of results alone
        out.append(y)
    return _rotated(out, q.dtype, *angles, eager_rounding=eager_rounding, **flags)


TRANSLATIONS = {
    rope.rotate.default: lambda x, *angles, **flags: _rotated([x], x.dtype, *angles, **flags)[0],
    rope.rotate_qk.default: lambda q, k, *angles, **flags: _rotated([q, k], q.dtype, *angles, **flags),
    rope.norm_rotate_qk.default: _norm_rotate_qk,
    rope.cos_sin.default: _cos_sin,
    rope.axial_cos_sin.default: lambda p, inv_freq, **options: _cos_sin(p, inv_freq, axes=len(p.shape), **options),
}
IN_PLACE = {rope.rotate_.default: rope.rotate.default, rope.rotate_qk_.default: rope.rotate_qk.default}


def functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replaces rotate_ and rotate_qk_ in a program by rotate and rotate_qk, and by copies of their results.

    Args:
        program: what ``torch.export.export`` returns. It is changed, and is what ``torch.onnx.export`` takes then.

    Raises:
        NotImplementedError: the program calls rotate_into_cache_.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is rope.rotate_into_cache_.default:
            raise NotImplementedError(
                "torch_rope.integrations.onnx.functional: the program calls rope.rotate_into_cache_, which is not exported: "
                "call rotate_qk or norm_rotate_qk, and write k and v to the cache in the model"
            )
        if node.target not in IN_PLACE:
            continue
        names = (argument.name for argument in node.target._schema.arguments)
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        written = [given[name] for name in ("x", "q", "k") if name in given]
        with graph.inserting_before(node):
            out = graph.call_function(IN_PLACE[node.target], kwargs=given)
            parts = [out] if len(written) == 1 else [graph.call_function(operator.getitem, (out, i)) for i in (0, 1)]
            for x, y in zip(written, parts, strict=True):
                graph.call_function(torch.ops.aten.copy_.default, (x, y))
        graph.erase_node(node)
    program.graph_module.recompile()
    return program
