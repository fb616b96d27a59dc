"""Exports models that call torch_rope to ONNX: the operators become ``RotaryEmbedding`` nodes of opset 23.

::

    from torch_rope.integrations.onnx import TRANSLATIONS

    torch.onnx.export(model, args, dynamo=True, opset_version=23, custom_translation_table=TRANSLATIONS)

``rotate``, ``rotate_qk``, ``norm_rotate_qk``, ``cos_sin`` and ``axial_cos_sin`` have a translation. A model that rotates in
place is exported by torch.export first, and :func:`functional` replaces the operators that write. ``rotate_into_cache``
is not exported.

- **Node.** The node takes x as ``[batch, seq, heads * head_dim]``, a view of what the operators take. A table by position
  becomes its cache, with ``positions + offset`` as position_ids. It is float32: float16 and bfloat16 tensors are converted
  before and after it, so each element is rounded once, as in torch_rope.
- **Angles.** Those of inv_freq are computed in double, in the graph. So position 131,071 is as right as position 1.
- **Other rotations.** A table by head, float64 and eager_rounding have no such node. They become multiplications and sums.
- **Positions.** An ONNX runtime may not report a position outside the table.

Tested with torch 2.13, onnxscript 0.7 and onnxruntime 1.32 on a CPU.
"""

import operator

import torch
from onnxscript import ir
from onnxscript import opset23 as op

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64
_rope = torch.ops.rope


def _number(value: float, dtype: ir.DataType) -> ir.Value:
    return op.Constant(value=ir.tensor(value, dtype=dtype))


def _ints(*n: int) -> ir.Value:
    return op.Constant(value=ir.tensor(list(n), dtype=INT64))


def _to(t: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Returns t in this dtype."""
    return t if t.dtype == dtype else op.Cast(t, to=dtype)


def _channels(x: ir.Value, start: int, end: int, of: int) -> ir.Value:
    """Returns the channels [start, end) of x, which has `of` channels."""
    return x if (start, end) == (0, of) else op.Slice(x, [start], [end], [-1])


def _angle(positions: ir.Value, inv_freq: ir.Value, axes: int | None = None) -> ir.Value:
    """Returns positions times inv_freq in double: [*positions.shape, rotary_dim / 2].

    axes: None, or the number of dimensions of positions, whose first dimension then is one of axes that are summed.
    """
    frequencies = _to(inv_freq, DOUBLE)
    if len(inv_freq.shape) == (2 if axes is None else 3):  # two float32 parts
        frequencies = op.ReduceSum(frequencies, [0], keepdims=0)
    positions = op.Unsqueeze(_to(positions, DOUBLE), [-1])
    if axes is None:
        return op.Mul(positions, frequencies)
    frequencies = op.Reshape(frequencies, [0, *[1] * (axes - 1), -1])  # [axes, 1, ..., rotary_dim / 2]
    return op.ReduceSum(op.Mul(positions, frequencies), [0], keepdims=0)


def _cos_sin(angle: ir.Value, attention_factor: float, dtype: int) -> tuple[ir.Value, ir.Value]:
    factor = _number(attention_factor, DOUBLE)
    return tuple(op.Cast(op.Mul(t, factor), to=dtype) for t in (op.Cos(angle), op.Sin(angle)))


def cos_sin(positions, inv_freq, *, attention_factor=1.0, dtype=-1):
    """Translates ``rope.cos_sin``. dtype: a number of ONNX, or -1 for float32."""
    return _cos_sin(_angle(positions, inv_freq), attention_factor, FLOAT if dtype == -1 else dtype)


def axial_cos_sin(positions, inv_freq, *, attention_factor=1.0, dtype=-1):
    """Translates ``rope.axial_cos_sin``."""
    angle = _angle(positions, inv_freq, axes=len(positions.shape))
    return _cos_sin(angle, attention_factor, FLOAT if dtype == -1 else dtype)


def _rotated(
    xs: list[ir.Value],
    to: ir.DataType,
    cos=None,
    sin=None,
    inv_freq=None,
    positions=None,
    offset=0,
    *,
    attention_factor=1.0,
    interleaved=False,
    inverse=False,
    rotary_start=0,
    eager_rounding=False,
) -> list[ir.Value]:
    """Returns xs rotated, in the dtype `to`. The other arguments are those of torch_rope.rotate."""
    x, rank = xs[0], len(xs[0].shape)
    dtype = DOUBLE if x.dtype == DOUBLE else FLOAT  # the dtype of the arithmetic
    if eager_rounding and cos is not None and cos.dtype == x.dtype:
        dtype = x.dtype
    ids = None  # the rows of tables by position: [seq], [1, seq] or [batch, seq]
    if inv_freq is not None or len(cos.shape) == 2:
        seq = op.Squeeze(op.Shape(x, start=rank - 3, end=rank - 2))
        ids = op.Range(_number(0, INT64), seq, _number(1, INT64)) if positions is None else _to(positions, INT64)
        ids = op.Add(ids, offset)
    if inv_freq is not None:
        cos, sin = _cos_sin(_angle(ids, inv_freq), 1.0, dtype)
        pairs, by_head, ids = inv_freq.shape[-1], False, None
    else:
        pairs, by_head = cos.shape[-1], len(cos.shape) == 4
        if not eager_rounding:  # PyTorch multiplies before it converts
            cos, sin = _to(cos, dtype), _to(sin, dtype)
    if attention_factor != 1:
        cos, sin = (op.Mul(t, op.CastLike(_number(attention_factor, DOUBLE), t)) for t in (cos, sin))
    cos, sin = op.Cast(cos, to=dtype), op.Cast(sin, to=dtype)
    sin = op.Neg(sin) if inverse else sin

    out = []
    for x in xs:
        heads, head_dim = x.shape[-2:]
        by_node = dtype == FLOAT and not (by_head or eager_rounding) and isinstance(heads, int)
        # The node may pass over the last channels, but it takes no odd number of channels.
        end = head_dim if by_node and (head_dim - rotary_start) % 2 == 0 else rotary_start + 2 * pairs
        tokens = x if rank == 4 else op.Unsqueeze(x, [0])  # [batch, seq, heads, head_dim]
        y = op.Cast(_channels(tokens, rotary_start, end, head_dim), to=dtype)
        if by_node:
            y = _by_node(y, cos, sin, ids, pairs, heads, end - rotary_start, interleaved)
        else:
            y = _by_products(y, cos, sin, ids, pairs, by_head, interleaved)
        parts = [op.Cast(y, to=to)]
        if rotary_start:
            parts.insert(0, op.Cast(_channels(tokens, 0, rotary_start, head_dim), to=to))
        if end < head_dim:
            parts.append(op.Cast(_channels(tokens, end, head_dim, head_dim), to=to))
        y = op.Concat(*parts, axis=-1) if len(parts) > 1 else parts[0]
        out.append(y if rank == 4 else op.Squeeze(y, [0]))
    return out


def _by_node(x, cos, sin, ids, pairs: int, heads: int, channels: int, interleaved: bool) -> ir.Value:
    """Returns x ``[batch, seq, heads, channels]`` rotated by the node RotaryEmbedding.

    cos, sin: tables by position, ``[max_position, pairs]``, if there are ids, else by token, ``[..., seq, pairs]``.
    """
    batch = op.Shape(x, start=0, end=1)
    if ids is None:  # the node wants [batch, seq, pairs]
        cos, sin = (op.Expand(t, op.Concat(batch, _ints(1, 1), axis=0)) for t in (cos, sin))
    else:
        ids = op.Expand(ids, op.Concat(batch, _ints(1), axis=0))
    y = op.RotaryEmbedding(
        op.Reshape(x, [0, 0, heads * channels]),
        cos,
        sin,
        ids,
        interleaved=int(interleaved),
        num_heads=heads,
        rotary_embedding_dim=0 if channels == 2 * pairs else 2 * pairs,  # 0: all channels
    )
    return op.Reshape(y, [0, 0, heads, channels])


def _by_products(x, cos, sin, ids, pairs: int, by_head: bool, interleaved: bool) -> ir.Value:
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


def rotate(x, *angles, **flags):
    """Translates ``rope.rotate``."""
    return _rotated([x], x.dtype, *angles, **flags)[0]


def rotate_qk(q, k, *angles, **flags):
    """Translates ``rope.rotate_qk``."""
    return _rotated([q, k], q.dtype, *angles, **flags)


def norm_rotate_qk(q, k, q_norm_weight, k_norm_weight, *angles, norm_eps=1e-6, eager_rounding=False, **flags):
    """Translates ``rope.norm_rotate_qk``: an RMS norm in float32, or in double, and a rotation."""
    wide, out = DOUBLE if q.dtype == DOUBLE else FLOAT, []
    for x, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        y = op.Cast(x, to=wide)
        mean = op.ReduceMean(op.Mul(y, y), [-2, -1][-len(weight.shape) :], keepdims=1)
        y = op.Div(y, op.Sqrt(op.Add(mean, _number(norm_eps, wide))))
        if eager_rounding and weight.dtype == x.dtype:
            y = op.Mul(op.Cast(y, to=x.dtype), weight)
        else:
            y = op.Mul(y, op.Cast(weight, to=wide))
        y = op.Cast(y, to=x.dtype if eager_rounding else wide)
        y.dtype, y.shape = x.dtype if eager_rounding else wide, x.shape  # the exporter sets those of results alone
        out.append(y)
    return _rotated(out, q.dtype, *angles, eager_rounding=eager_rounding, **flags)


TRANSLATIONS = {
    _rope.rotate.default: rotate,
    _rope.rotate_qk.default: rotate_qk,
    _rope.norm_rotate_qk.default: norm_rotate_qk,
    _rope.cos_sin.default: cos_sin,
    _rope.axial_cos_sin.default: axial_cos_sin,
}

IN_PLACE = {
    _rope.rotate_.default: _rope.rotate.default,
    _rope.rotate_qk_.default: _rope.rotate_qk.default,
}


def functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replaces rotate_ and rotate_qk_ in a program of torch.export by rotate and rotate_qk, and by copies of their results.

    Args:
        program: what ``torch.export.export`` returns. It is changed.

    Returns:
        The program, for ``torch.onnx.export``.

    Raises:
        NotImplementedError: the program calls rotate_into_cache_.

    Example::

        program = functional(torch.export.export(model, args))
        torch.onnx.export(program, dynamo=True, opset_version=23, custom_translation_table=TRANSLATIONS)
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target is _rope.rotate_into_cache_.default:
            raise NotImplementedError(
                "torch_rope.integrations.onnx.functional: the program calls rope.rotate_into_cache_, which is not exported: "
                "call rotate_qk or norm_rotate_qk, and write k and v to the cache in the model"
            )
        if node.target not in IN_PLACE:
            continue
        given = {
            a.name: value for a, value in zip(node.target._schema.arguments, node.args, strict=False)
        } | node.kwargs
        written = [given[name] for name in ("x", "q", "k") if name in given]
        with graph.inserting_before(node):
            out = graph.call_function(IN_PLACE[node.target], kwargs=given)
            parts = [out] if len(written) == 1 else [graph.call_function(operator.getitem, (out, i)) for i in (0, 1)]
            for x, y in zip(written, parts, strict=True):
                graph.call_function(torch.ops.aten.copy_.default, (x, y))
        graph.erase_node(node)
    program.graph_module.recompile()
    return program
