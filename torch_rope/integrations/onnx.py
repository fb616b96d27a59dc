"""Exports models that call torch_rope to ONNX: ``torch.onnx.export`` takes ``TRANSLATIONS`` as custom_translation_table.

docs/integrations/onnx.md says what each operator and argument becomes. From opset 23 on it is mostly the node
``RotaryEmbedding``, in float32, which takes x as ``[batch, seq, heads * head_dim]``, a view of what the operators take.
All other nodes are of opset 18, like those that torch writes, and torch converts them to newer ones.
"""

import itertools

import torch
from onnxscript import evaluator, ir, opset23
from onnxscript import opset18 as op

from .._decompositions import IN_PLACE

FLOAT, DOUBLE, INT64 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64
rope = torch.ops.rope


def _number(value: float, dtype: ir.DataType) -> ir.Value:
    return op.Constant(value=ir.tensor(value, dtype=dtype))


def _cos_sin(positions, inv_freq, *, attention_factor=1.0, dtype=-1, axial=False) -> list:
    """Translates ``rope.cos_sin``, or ``rope.axial_cos_sin``. dtype: a number of ONNX, or -1 for float32."""
    frequencies = op.Cast(inv_freq, to=DOUBLE)
    if len(inv_freq.shape) == 2 + axial:  # two float32 parts
        frequencies = op.ReduceSum(frequencies, [0], keepdims=0)
    if axial:
        ones = [1] * (len(positions.shape) - 1)
        frequencies = op.Reshape(frequencies, [0, *ones, -1])  # [axes, 1, ..., rotary_dim / 2]
    angle = op.Mul(op.Unsqueeze(op.Cast(positions, to=DOUBLE), [-1]), frequencies)
    angle = op.ReduceSum(angle, [0], keepdims=0) if axial else angle
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
    table = inv_freq if cos is None else cos
    pairs, by_head = table.shape[-1], len(table.shape) == 4
    if len(table.shape) == 2 or cos is None:
        seq = op.Squeeze(op.Shape(x, start=rank - 3, end=rank - 2))
        p = op.Add(op.Range(0, seq, 1) if positions is None else op.Cast(positions, to=INT64), offset)
        # A row for each token. The node could look it up, but onnxruntime refuses tables with fewer rows than tokens.
        cos, sin = (op.Gather(t, p) for t in (cos, sin)) if inv_freq is None else _cos_sin(p, inv_freq, dtype=dtype)
    if attention_factor != 1:  # with eager rounding the tables are converted later, as in PyTorch
        cos, sin = (t if eager_rounding else op.Cast(t, to=dtype) for t in (cos, sin))
        cos, sin = (op.Mul(t, op.CastLike(_number(attention_factor, DOUBLE), t)) for t in (cos, sin))
    cos, sin = (op.Cast(t, to=dtype) for t in (cos, sin))
    sin = op.Neg(sin) if inverse else sin

    has_node = evaluator.default().opset.version >= 23
    out = []
    for x in xs:
        heads, head_dim = x.shape[-2:]
        by_node = has_node and dtype == FLOAT and not (by_head or eager_rounding) and isinstance(heads, int)
        # The node may pass over the last channels, but it takes no odd number of channels.
        end = head_dim if by_node and (head_dim - rotary_start) % 2 == 0 else rotary_start + 2 * pairs
        tokens = x if rank == 4 else op.Unsqueeze(x, [0])  # [batch, seq, heads, head_dim]
        parts = []
        for first, last in itertools.pairwise(sorted({0, rotary_start, end, head_dim})):
            part = tokens if last - first == head_dim else op.Slice(tokens, [first], [last], [-1])
            if first == rotary_start:
                given = op.Cast(part, to=dtype), cos, sin, pairs, interleaved
                part = _by_node(*given, heads, last - first) if by_node else _by_products(*given, by_head)
            parts.append(op.Cast(part, to=to))
        y = op.Concat(*parts, axis=-1) if len(parts) > 1 else parts[0]
        out.append(y if rank == 4 else op.Squeeze(y, [0]))
    return out


def _by_node(x, cos, sin, pairs: int, interleaved: bool, heads: int, channels: int) -> ir.Value:
    """Returns x ``[batch, seq, heads, channels]`` rotated by the node, which wants tables ``[batch, seq, pairs]``."""
    shape = op.Concat(op.Shape(x, start=0, end=1), op.Constant(value_ints=[1, 1]), axis=0)
    y = opset23.RotaryEmbedding(
        op.Reshape(x, [0, 0, heads * channels]), op.Expand(cos, shape), op.Expand(sin, shape), num_heads=heads,
        interleaved=int(interleaved), rotary_embedding_dim=0 if channels == 2 * pairs else 2 * pairs,  # 0: all channels
    )  # fmt: skip
    return op.Reshape(y, [0, 0, heads, channels])


def _by_products(x, cos, sin, pairs: int, interleaved: bool, by_head: bool) -> ir.Value:
    """Returns x ``[batch, seq, heads, 2 * pairs]`` rotated by multiplications and sums in its dtype."""
    axis, shape = (-1, [pairs, 2]) if interleaved else (-2, [2, pairs])
    cos, sin = (op.Unsqueeze(t, [axis] if by_head else [-3, axis]) for t in (cos, sin))
    a, b = op.Split(op.Reshape(x, [0, 0, 0, *shape]), axis=axis, num_outputs=2)
    c, d = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))
    return op.Reshape(op.Concat(c, d, axis=axis), [0, 0, 0, 2 * pairs])


def _norm_rotate_qk(
    q, k, q_norm_weight, k_norm_weight, *angles, norm_eps=1e-6, norm_weight_offset=0.0, eager_rounding=False,
    round_before_weight=False, **flags,
):  # fmt: skip
    """Translates ``rope.norm_rotate_qk``: an RMS norm in float32, or in double, and a rotation."""
    wide, out = DOUBLE if q.dtype == DOUBLE else FLOAT, []
    for x, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        y = op.Cast(x, to=wide)
        mean = op.ReduceMean(op.Mul(y, y), [-2, -1][-len(weight.shape) :], keepdims=1)
        y = op.Div(y, op.Sqrt(op.Add(mean, _number(norm_eps, wide))))
        y = op.Cast(op.Cast(y, to=x.dtype), to=wide) if round_before_weight else y
        y = op.Mul(y, op.Add(op.Cast(weight, to=wide), _number(norm_weight_offset, wide)))
        y = op.Cast(y, to=x.dtype) if eager_rounding else y
        y.dtype, y.shape = x.dtype if eager_rounding else wide, x.shape  # the exporter sets those of results alone
        out.append(y)
    return _rotate_qk(*out, *angles, to=q.dtype, eager_rounding=eager_rounding, **flags)


def _rotate_qk(q, k, *angles, q_factor=None, to=None, eager_rounding=False, **flags):
    """Translates ``rope.rotate_qk``. to: the dtype of the results, if it is not that of q."""
    to, flags = to or q.dtype, flags | {"eager_rounding": eager_rounding}
    if q_factor is None:
        return _rotated([q, k], to, *angles, **flags)
    wide = DOUBLE if to == DOUBLE else FLOAT
    [rotated_q] = _rotated([q], to if eager_rounding else wide, *angles, **flags)
    factor = op.Unsqueeze(op.Cast(q_factor, to=wide), [-1] if len(q_factor.shape) == 3 else [-2, -1])
    if len(q.shape) == 3 and len(q_factor.shape) > 1:
        factor = op.Squeeze(factor, [0])
    return [op.Cast(op.Mul(op.Cast(rotated_q, to=wide), factor), to=to), *_rotated([k], to, *angles, **flags)]


def _searchsorted(sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    """Translates ``aten.searchsorted``, which positions_from_cu_seqlens calls, and which torch does not translate."""
    sequence = sequence if sorter is None else op.GatherElements(sequence, sorter, axis=-1)
    sequence = op.Unsqueeze(sequence, [-2]) if len(sequence.shape) > 1 else sequence
    before = op.LessOrEqual if right or side == "right" else op.Less
    found = op.Cast(before(sequence, op.Unsqueeze(values, [-1])), to=INT64)
    return op.Cast(op.ReduceSum(found, [-1], keepdims=0), to=ir.DataType.INT32 if out_int32 else INT64)


# torch reads the annotations of these functions, and warns of a return type ir.Value.
TRANSLATIONS = {
    rope.rotate.default: lambda x, *angles, **flags: _rotated([x], x.dtype, *angles, **flags)[0],
    rope.rotate_qk.default: _rotate_qk,
    rope.norm_rotate_qk.default: _norm_rotate_qk,
    rope.cos_sin.default: _cos_sin,
    rope.axial_cos_sin.default: lambda *given, **options: _cos_sin(*given, axial=True, **options),
    torch.ops.aten.searchsorted.Tensor: _searchsorted,
}


def functional(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns a program in which functional operators and copies of their results replace the operators in place.

    Args:
        program: what ``torch.export.export`` returns. ``torch.onnx.export`` takes the result.

    Raises:
        NotImplementedError: rotate_into_cache_ writes to a buffer.
    """
    writes = program.graph_module.graph.find_nodes(op="call_function", target=rope.rotate_into_cache_.default)
    program = program.run_decompositions(IN_PLACE)
    if writes and (buffers := program.graph_signature.buffers_to_mutate.values()):
        raise NotImplementedError(
            f"torch_rope.integrations.onnx.functional: the cache is a buffer, {', '.join(buffers)}, but must be an "
            "argument and a result of the model, because torch.onnx.export leaves out what is written to buffers"
        )
    return program
