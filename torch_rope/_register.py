"""What torch takes from Python only: vmap rules, rules for DTensor, one remedy for Inductor, flop formulas."""

import functools
import importlib.abc
import sys
import warnings

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.rope


# ---- vmap ----
#
# Where only x (q, k) is mapped, or positions and per-token tables with it, the mapped dimension joins the batch and one
# launch does it all. What remains (a table or inv_freq for each sample, and what the operator will refuse) is a loop.


def _in_front(t: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped dimension moved (or expanded) to the front."""
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _per_token(t: Tensor, dim: int | None, size: int, batch: int, shared: bool) -> Tensor | None:
    """[size, batch or 1, ...] -> [size * batch, ...], or [1, ...] that serves all; None for another batch."""
    t = _in_front(t, dim, size)
    if t.shape[1] not in (1, batch):
        return None
    return t[0] if shared and t.shape[1] == 1 else t.expand(size, batch, *t.shape[2:]).flatten(0, 1)


def _joins_as_a_view(x: Tensor) -> bool:
    """Whether the first dimension joins the batch without a copy."""
    return x.dim() == 4 or x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _vmap_one_launch(op, count, own, size, in_dims, args, kwargs):
    """The mapped call as one call of op on a larger batch, or None where there is none. count: how many are rotated;
    own: how many arguments come before cos."""
    cos, sin, inv_freq, positions, *_ = args[own:]
    cos_dim, sin_dim, freq_dim, positions_dim, *_ = in_dims[own:]
    weights_mapped = any(d is not None for d in in_dims[count:own])
    if size == 0 or freq_dim is not None or weights_mapped or any(d is None for d in in_dims[:count]):
        return None
    xs = [x.movedim(d, 0) for x, d in zip(args[:count], in_dims[:count], strict=True)]
    if any(x.dim() not in (4, 5) for x in xs) or (op._schema.is_mutable and not all(map(_joins_as_a_view, xs))):
        return None
    flat = [x if x.dim() == 4 else x.flatten(0, 1) for x in xs]
    batch = flat[0].shape[0] // size
    tables_shared = cos_dim is None and sin_dim is None
    if cos is not None and sin is not None and not (tables_shared and cos.dim() == 2):
        if cos.dim() - (cos_dim is not None) != 3 or sin.dim() - (sin_dim is not None) != 3:
            return None
        cos = _per_token(cos, cos_dim, size, batch, tables_shared)
        sin = _per_token(sin, sin_dim, size, batch, tables_shared)
        if cos is None or sin is None:
            return None
    if positions is not None:
        rows = _in_front(positions, positions_dim, size)  # [size, seq] or [size, batch or 1, seq]
        rows = rows.unsqueeze(1) if rows.dim() == 2 else rows
        positions = _per_token(rows, 0, size, batch, positions_dim is None) if rows.dim() == 3 else None
        if positions is None:
            return None
    outs = op(*flat, *args[count:own], cos, sin, inv_freq, positions, *args[own + 4 :], **kwargs)
    if op._schema.is_mutable:
        return ()
    outs = outs if isinstance(outs, tuple) else (outs,)
    return tuple(out if x.dim() == 4 else out.unflatten(0, x.shape[:2]) for out, x in zip(outs, xs, strict=True))


def _vmap_loop(op, size, in_dims, args, kwargs):
    """Sample by sample."""
    if size == 0:  # one sample of zeros tells the shapes
        args = [
            a if d is None else a.new_zeros([1 if i == d else n for i, n in enumerate(a.shape)])
            for a, d in zip(args, in_dims, strict=True)
        ]
    samples = [
        op(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)), **kwargs)
        for i in range(max(size, 1))
    ]
    samples = [s if isinstance(s, tuple) else (s,) for s in samples]
    return tuple(torch.stack(outs)[:size] for outs in zip(*samples, strict=True))


def _register_vmap(name: str, count: int, own: int) -> None:
    op = getattr(_ops, name).default
    in_place = op._schema.is_mutable
    functional = getattr(_ops, name[:-1]).default if in_place else op

    def rule(info, in_dims, *args, **kwargs):
        missing = max(0, own + 4 - len(args))  # trailing arguments at their default are not passed
        args, in_dims = (*args, *[None] * missing), (*in_dims[: len(args)], *[None] * missing)
        if in_place and any(d is None for d in in_dims[:count]):
            raise RuntimeError(
                f"vmap: rope.{name} writes in place to a tensor that is not mapped over, while other arguments are; "
                f"use rope.{name[:-1]}"
            )
        outs = _vmap_one_launch(op, count, own, info.batch_size, in_dims, args, kwargs)
        if outs is None:
            outs = _vmap_loop(functional, info.batch_size, in_dims, args, kwargs)
            if in_place:  # only now, so that an error in a sample leaves nothing half-written
                for x, d, out in zip(args[:count], in_dims[:count], outs, strict=True):
                    x.movedim(d, 0).copy_(out)
        if in_place:
            return None, None
        return (outs[0], 0) if len(outs) == 1 else (outs, (0,) * len(outs))

    torch.library.register_vmap(f"rope::{name}", rule)


for _name, _count, _own in (
    ("rotate", 1, 1),
    ("rotate_", 1, 1),
    ("rotate_qk", 2, 2),
    ("rotate_qk_", 2, 2),
    ("norm_rotate_qk", 2, 4),
):
    _register_vmap(_name, _count, _own)


@functools.partial(torch.library.register_vmap, "rope::_norm_rotate_qk_backward")
def _norm_backward_vmap(info, in_dims, *args, **kwargs):
    # Each sample has weight gradients of its own.
    op = _ops._norm_rotate_qk_backward.default
    return _vmap_loop(op, info.batch_size, in_dims, args, kwargs), (0, 0, 0, 0)


@functools.partial(torch.library.register_vmap, "rope::_rotate_table_backward")
def _table_backward_vmap(info, in_dims, *args, **kwargs):
    # Each sample has gradients of the tables of its own.
    op = _ops._rotate_table_backward.default
    return _vmap_loop(op, info.batch_size, in_dims[: len(args)], args, kwargs), (0, 0)


@functools.partial(torch.library.register_vmap, "rope::rotate_into_cache_")
def _rotate_into_cache_vmap(info, in_dims, *args, **kwargs):
    raise RuntimeError("vmap: rope.rotate_into_cache_ cannot be mapped; pass the mapped dimension as the batch")


def _register_cos_sin_vmap(name: str, axes_dim: int) -> None:
    """axes_dim: how many dimensions of positions come before P."""
    op = getattr(_ops, name).default

    def rule(info, in_dims, positions, inv_freq, **kwargs):
        positions_dim, freq_dim, *_ = in_dims
        if freq_dim is None and positions.dim() > axes_dim:
            outs = op(positions.movedim(positions_dim, axes_dim), inv_freq, **kwargs)
            return outs, (0, 0)
        dims, args = (positions_dim, freq_dim), (positions, inv_freq)
        return _vmap_loop(op, info.batch_size, dims, args, kwargs), (0, 0)

    torch.library.register_vmap(f"rope::{name}", rule)


_register_cos_sin_vmap("cos_sin", 0)
_register_cos_sin_vmap("_axial_cos_sin", 1)


# ---- DTensor ----
#
# Its module takes half as long to import as torch itself, and who has no DTensor does not need it. So the rules follow
# when it is imported.


def _register_sharding() -> None:
    try:
        import torch_rope._sharding  # noqa: F401
    except (ImportError, AttributeError, TypeError) as e:  # they use what torch has not made public
        warnings.warn(f"torch_rope's operators do not take DTensors under torch {torch.__version__}: {e}", stacklevel=2)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers the rules after the module has been imported, by whoever finds and loads it."""

    def find_spec(self, name, path=None, target=None):
        if name != _DTENSOR:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register_sharding()

            spec.loader.exec_module = execute_and_register
        return spec


_DTENSOR = "torch.distributed.tensor"
if _DTENSOR in sys.modules:
    _register_sharding()
elif torch.distributed.is_available():
    sys.meta_path.insert(0, _AfterImport())


# ---- torch.compile of in-place operators ----
#
# Inductor (2.13) has no lowering for the storage offset of a view, which functionalization writes into the graph where
# that offset is a symbol. It goes on with offset 0: an in-place operator on x[1], of a tensor with a dynamic size,
# silently writes to x[0]. So it is taught the lowering before it comes to such a graph.


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
        with mode:  # as without us
            return op._op_dk(torch._C.DispatchKey.Python, *args, **kwargs)


_watch_functionalization(_ops.rotate_.default)
_watch_functionalization(_ops.rotate_qk_.default)
_watch_functionalization(_ops.rotate_into_cache_.default)


# ---- flops: 4 multiplications and 2 additions a pair; the norm multiplies twice and squares, 4 a channel ----


def _flops(shapes, cos_shape, inv_freq_shape, norm: bool) -> int:
    rotary_dim = 2 * (cos_shape if cos_shape is not None else inv_freq_shape)[-1]
    return sum(torch.Size(s[:-1]).numel() * (3 * rotary_dim + (4 * s[-1] if norm else 0)) for s in shapes)


@register_flop_formula([_ops.rotate, _ops.rotate_])
def _rotate_flops(x, cos=None, sin=None, inv_freq=None, *args, out_shape=None, **kwargs) -> int:
    return _flops([x], cos, inv_freq, norm=False)


@register_flop_formula([_ops.rotate_qk, _ops.rotate_qk_])
def _rotate_qk_flops(q, k, cos=None, sin=None, inv_freq=None, *args, out_shape=None, **kwargs) -> int:
    return _flops([q, k], cos, inv_freq, norm=False)


@register_flop_formula(_ops._rotate_table_backward)
def _table_backward_flops(q_out_grad, k_out_grad, q, k, cos, *args, out_shape=None, **kwargs) -> int:
    # For each pair of channels and each of the two tables two products, their sum, and one more addition.
    return sum(torch.Size(s[:-1]).numel() * 8 * cos[-1] for s in (q, k) if s is not None)


@register_flop_formula(_ops.norm_rotate_qk)
def _norm_rotate_qk_flops(q, k, q_norm, k_norm, cos=None, sin=None, inv_freq=None, *args, out_shape=None, **kwargs):
    return _flops([q, k], cos, inv_freq, norm=True)


@register_flop_formula(_ops._norm_rotate_qk_backward)
def _norm_backward_flops(dq, dk, q, k, q_norm, k_norm, cos=None, sin=None, inv_freq=None, *args, **kwargs) -> int:
    # Beside what forward does, for each channel two for the weight, five for the input: with n = x r and u = gradient * w,
    # sums of gradient * n and of u * x, and r (u - c x).
    return _flops([q, k], cos, inv_freq, norm=True) + sum(7 * torch.Size(s).numel() for s in (q, k))


@register_flop_formula(_ops.rotate_into_cache_)
def _rotate_into_cache_flops(
    q, k, v, k_cache, v_cache, cos=None, sin=None, inv_freq=None, positions=None, offset=0, slots=None, q_norm=None,
    *args, **kwargs,
) -> int:  # fmt: skip
    return _flops([q, k], cos, inv_freq, norm=q_norm is not None)
