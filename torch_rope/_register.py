"""What torch takes from Python only: vmap rules, one remedy for Inductor, flop formulas."""

import functools

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.rope


# ---- vmap ----
#
# Where only x (q, k) is mapped, or positions and per-token tables with it, the mapped dimension joins the batch and one launch does it all.
# What remains (a table or inv_freq for each sample) is a loop.


def _in_front(t: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The mapped dimension moved (or expanded) to the front."""
    if t is None:
        return None
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _batched(t: Tensor, size: int, shared: bool, batch: int) -> Tensor:
    """[size, batch or 1, ...] -> [size * batch, ...]; shared: [1, ...] serves every sample."""
    return t[0, :1] if shared and t.shape[1] == 1 else t.expand(size, batch, *t.shape[2:]).flatten(0, 1)


def _joins_as_a_view(x: Tensor) -> bool:
    """Whether the first dimension joins the batch without a copy."""
    return x.dim() == 4 or x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _vmap_one_launch(op, count, info, in_dims, args, kwargs):
    """The mapped call as one call of op on a larger batch, or None where there is none. count: how many tensors are rotated."""
    size, (cos, sin, inv_freq, positions, *_) = info.batch_size, args[count:]
    cos_dim, sin_dim, freq_dim, positions_dim, *_ = in_dims[count:]
    if freq_dim is not None or any(d is None for d in in_dims[:count]):
        return None
    tables = (cos, cos_dim), (sin, sin_dim)
    if any(d is not None and t.dim() != 4 for t, d in tables):  # mapped, and not [size, batch, seq, rotary_dim / 2]
        return None
    xs = [_in_front(x, d, size) for x, d in zip(args[:count], in_dims[:count], strict=True)]
    if op._schema.is_mutable and not all(_joins_as_a_view(x) for x in xs):
        return None
    flat = [x if x.dim() == 4 else x.flatten(0, 1) for x in xs]
    batch = flat[0].shape[0] // max(size, 1)
    per_token = [
        t if t is None or (d is None and t.dim() == 2) else _batched(_in_front(t, d, size), size, d is None, batch)
        for t, d in tables
    ]
    if positions is not None:
        rows = _in_front(positions, positions_dim, size)
        positions = _batched(rows if rows.dim() == 3 else rows.unsqueeze(1), size, positions_dim is None, batch)
    outs = op(*flat, *per_token, inv_freq, positions, *args[count + 4 :], **kwargs)
    if outs is None:
        return (None,)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return tuple(
        out.view(x.shape) if x.dim() == 4 else out.unflatten(0, x.shape[:2]) for out, x in zip(outs, xs, strict=True)
    )


def _vmap_loop(op, info, in_dims, args, kwargs):
    samples = [
        op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)), **kwargs)
        for i in range(info.batch_size)
    ]
    if op._schema.is_mutable:
        return (None,)
    if isinstance(samples[0], tuple):
        return tuple(torch.stack(outs) for outs in zip(*samples, strict=True))
    return (torch.stack(samples),)


def _register_vmap(name: str, count: int) -> None:
    op = getattr(_ops, name).default

    def rule(info, in_dims, *args, **kwargs):
        missing = count + 4 - len(args) if count else 0  # trailing arguments at their default are not passed
        args, in_dims = (*args, *[None] * missing), (*in_dims[: len(args)], *[None] * missing)
        if op._schema.is_mutable and any(d is None for d in in_dims[:count]):
            raise RuntimeError(
                f"vmap: rope.{name} writes in place to a tensor that is not mapped over, while other arguments are; use rope.{name[:-1]}"
            )
        outs = _vmap_one_launch(op, count, info, in_dims, args, kwargs) if count else None
        if outs is None:
            outs = _vmap_loop(op, info, in_dims, args, kwargs)
        if op._schema.is_mutable:
            return None, None
        return (outs[0], 0) if len(outs) == 1 else (outs, (0,) * len(outs))

    torch.library.register_vmap(f"rope::{name}", rule)


for _name, _count in {"rotate": 1, "rotate_": 1, "rotate_qk": 2, "rotate_qk_": 2, "cos_sin": 0}.items():
    _register_vmap(_name, _count)


# ---- torch.compile of in-place operators ----
#
# Inductor (2.13) has no lowering for the storage offset of a view, which functionalization writes into the graph where that offset is a
# symbol. It goes on with offset 0: an in-place operator on x[1], of a tensor with a dynamic size, silently writes to x[0]. So it is taught
# the lowering before it comes to such a graph.


@functools.cache
def _teach_inductor_storage_offsets() -> None:
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    storage_offset = torch.ops.aten.sym_storage_offset.default
    if storage_offset not in lowerings:

        @register_lowering(storage_offset, type_promotion_kind=None)
        def lowering(x):
            value = V.graph.current_node.meta["val"]
            return value.node.expr if isinstance(value, torch.SymInt) else int(value)


def _watch_functionalization(op: torch._ops.OpOverload) -> None:
    @op.py_impl(FunctionalTensorMode)
    def functionalize(mode, *args, **kwargs):
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if any(not isinstance(t.storage_offset(), int) for t in tensors):
            _teach_inductor_storage_offsets()
        return mode.__torch_dispatch__(op, [type(t) for t in tensors], args, kwargs)  # as without us


_watch_functionalization(_ops.rotate_.default)
_watch_functionalization(_ops.rotate_qk_.default)


# ---- flops: 4 multiplications and 2 additions a pair ----


def _rotary_dim(cos_shape, inv_freq_shape) -> int:
    return 2 * (cos_shape if cos_shape is not None else inv_freq_shape)[-1]


@register_flop_formula([_ops.rotate, _ops.rotate_])
def _rotate_flops(x_shape, cos_shape=None, sin_shape=None, inv_freq_shape=None, *args, out_shape=None, **kwargs) -> int:
    return 3 * torch.Size(x_shape[:-1]).numel() * _rotary_dim(cos_shape, inv_freq_shape)


@register_flop_formula([_ops.rotate_qk, _ops.rotate_qk_])
def _rotate_qk_flops(
    q_shape, k_shape, cos_shape=None, sin_shape=None, inv_freq_shape=None, *args, out_shape=None, **kwargs
) -> int:
    rows = torch.Size(q_shape[:-1]).numel() + torch.Size(k_shape[:-1]).numel()
    return 3 * rows * _rotary_dim(cos_shape, inv_freq_shape)
