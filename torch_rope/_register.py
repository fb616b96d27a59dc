"""Registers what PyTorch takes only from Python: rules for vmap, the errors of nested tensors, flop formulas."""

import functools
import sys
import warnings

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import is_batchedtensor
from torch._library.simple_registry import find_torch_dispatch_rule
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils.flop_counter import register_flop_formula

from ._ops import add_op_namespace_prefix
from ._ops import ops as _ops
from ._signatures import AXES, BY_POSITION, Signature, operators

# ---- vmap ----
#
# If only x (or q and k) is mapped, or positions and tables by token are mapped with it, the mapped dimension joins the
# batch and the whole call is one launch. All other calls loop over the samples: those with a table or an inv_freq for
# each sample, the backward operators that sum over the tokens of a sample, and calls that are errors.


def _joins_as_a_view(x: Tensor) -> bool:
    """Returns whether the first dimension of x can be merged with its batch without a copy."""
    return x.dim() == 4 or x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _tables_in_one_launch(signature: Signature, dims: dict, given: dict):
    """Returns the tables of all samples from one call, or None if it cannot be one call.

    Positions may have any shape P, so the mapped dimension becomes the first dimension of P.
    """
    first = signature.axes("positions", 1).count("axes")
    if dims["inv_freq"] is not None or given["positions"].dim() == first:
        return None
    return signature.op(**given | {"positions": given["positions"].movedim(dims["positions"], first)})


def _one_launch(signature: Signature, size: int, dims: dict, given: dict):
    """Returns the results of the mapped call from one call on a larger batch, or None if it cannot be one call."""
    if not signature.rotated:
        return _tables_in_one_launch(signature, dims, given)
    if signature.name.endswith("_backward") or any(dims[name] is None for name in signature.rotated):
        return None
    xs = [given[name].movedim(dims[name], 0) for name in signature.rotated]
    if any(x.dim() not in (4, 5) for x in xs) or (signature.written and not all(map(_joins_as_a_view, xs))):
        return None
    flat = [x if x.dim() == 4 else x.flatten(0, 1) for x in xs]
    batch = 1 if xs[0].dim() == 4 else xs[0].shape[1]
    joined = given | dict(zip(signature.rotated, flat, strict=True))
    for name in dims:
        t = given[name]
        if name in signature.rotated or not isinstance(t, Tensor):
            continue
        # cos and sin must have the same shape, so if one of them is mapped, both are expanded.
        shared = all(dims.get(n) is None for n in (("cos", "sin") if name in ("cos", "sin") else (name,)))
        axes = signature.axes(name, t.dim() - (dims[name] is not None))
        if "batch or 1" not in AXES[name] or axes == BY_POSITION:
            if not shared:
                return None
            continue
        if shared and ("batch or 1" not in axes or t.shape[0] == 1):
            continue  # the same values serve all sequences
        t = t.expand(size, *t.shape) if dims[name] is None else t.movedim(dims[name], 0)
        if "batch or 1" not in axes:
            t, axes = t.unsqueeze(1), ("batch or 1", *axes)
        if t.dim() != 1 + len(axes) or t.shape[1] not in (1, batch):
            return None
        joined[name] = t.expand(size, batch, *t.shape[2:]).flatten(0, 1)  # [size * batch, ...]
    outs = signature.op(**joined)
    if signature.written:
        return ()
    outs = outs if isinstance(outs, tuple) else (outs,)
    return tuple(out if x.dim() == 4 else out.unflatten(0, x.shape[:2]) for out, x in zip(outs, xs, strict=True))


def _loop(op, size: int, dims: dict, given: dict):
    """Returns the results of the mapped call from one call for each sample."""
    mapped = {name: dim for name, dim in dims.items() if dim is not None}
    if size == 0:  # a sample without values, on the meta device, has the shapes of the results
        sample = {name: a.to("meta") if isinstance(a, Tensor) else a for name, a in given.items()}
        sample |= {name: sample[name].sum(dim, dtype=given[name].dtype) for name, dim in mapped.items()}
        outs, device = op(**sample), given[next(iter(mapped))].device
        outs = outs if isinstance(outs, tuple) else (outs,)
        return tuple(torch.empty(0, *out.shape, dtype=out.dtype, device=device) for out in outs)
    samples = [op(**given | {name: given[name].select(dim, i) for name, dim in mapped.items()}) for i in range(size)]
    samples = [s if isinstance(s, tuple) else (s,) for s in samples]
    return tuple(torch.stack(outs) for outs in zip(*samples, strict=True))


def _vmap(signature: Signature, info, in_dims, *args, **kwargs):
    """Runs a mapped call of an operator, and returns (results, mapped dimensions), as register_vmap expects."""
    name, size = signature.name, info.batch_size
    dims, given = signature.by_name(in_dims[: len(args)]), signature.by_name(args) | kwargs
    if any(dims[written] is None for written in signature.written):
        written = next(written for written in signature.rotated if dims[written] is None)
        raise RuntimeError(
            f"rope.{name}: {written} is not mapped by vmap but must be, because it is written in place and other "
            f"arguments are mapped; use rope.{name[:-1]}"
        )
    outs = _one_launch(signature, size, dims, given)
    if outs is None:
        functional = getattr(_ops, name.removesuffix("_")).default
        outs = _loop(functional, size, dims, given)
        if signature.written:  # written only after the loop, so that an error in a sample leaves nothing half-written
            for x, out in zip(signature.rotated, outs, strict=True):
                given[x].movedim(dims[x], 0).copy_(out)
    if signature.written:
        return None, None
    return (outs[0], 0) if len(outs) == 1 else (outs, (0,) * len(outs))


def _refuse_vmap(signature: Signature, *args, **kwargs):
    """Raises the error of the cache operator, of which no argument may be mapped."""
    given = signature.by_name(args) | kwargs
    mapped = next(name for name, a in given.items() if isinstance(a, Tensor) and is_batchedtensor(a))
    raise RuntimeError(
        f"rope.{signature.name}: {mapped} is mapped by vmap but must not be; pass the mapped dimension as the batch"
    )


def _refuse_nested(cls: type, op: torch._ops.OpOverload, types: tuple, args: tuple, kwargs: dict):
    """Calls the kernel that raises the error of nested tensors."""
    return op._op_dk(DispatchKey.NestedTensorCPU, *args, **kwargs)


def _clone_what_is_saved(mode, op: torch._ops.OpOverload, types: tuple, args: tuple, kwargs: dict) -> None:
    """Calls the mode of allow_mutation_on_saved_tensors, which takes a keyword that is written for one named out."""
    call = lambda *args, out, **kwargs: op(*args, **kwargs)  # noqa: E731
    call._schema = op._schema
    mode.__torch_dispatch__(call, types, args, kwargs | {"out": kwargs.get("q_out", args[0])})


# ---- flops: 4 multiplications and 2 additions for a pair; the norm adds 4 for a channel ----


def _flops(signature: Signature, *args, out_shape=None, **kwargs) -> int:
    """Returns the floating-point operations of a call, given the shapes of its tensors."""
    shapes = signature.by_name(args) | kwargs
    rotary_dim = 2 * (shapes.get("cos") or shapes["inv_freq"])[-1]
    # 6 for each pair of a rotation, so 3 for each rotated channel. A gradient of tables takes 8 for each pair: two
    # products, their sum, and the addition to the sum over tokens, for each of the two tables.
    rotated = 4 if signature.name == "_rotate_table_backward" else 3
    # The norm squares, adds, and multiplies twice.
    channel = 4 if shapes.get("q_norm_weight") is not None else 0
    if signature.name == "_norm_rotate_qk_backward":
        # In addition to the work of forward, two for the gradient of the weight and five for that of the input. With
        # n = x r and u = gradient * w they are the sums of gradient * n and of u * x, and r (u - c x).
        channel += 7
    xs = [shapes[name] for name in signature.rotated if shapes[name] is not None]
    return sum(torch.Size(x[:-1]).numel() * (rotated * rotary_dim + channel * x[-1]) for x in xs)


# torch takes no rule twice, and keeps those of an earlier import whose modules were taken out of sys.modules.
_library = torch.library.Library(_ops.name, "FRAGMENT")
for _signature in operators():
    _name = add_op_namespace_prefix(_signature.name)
    if find_torch_dispatch_rule(_signature.op, NestedTensor) is not None:
        continue
    torch.library.register_torch_dispatch(_name, NestedTensor, _refuse_nested)
    if _signature.rotated:
        register_flop_formula(_signature.op.overloadpacket)(functools.partial(_flops, _signature))
    if "k_cache" not in _signature.arguments:
        torch.library.register_vmap(_name, functools.partial(_vmap, _signature))
        continue
    # register_vmap takes no operator with tensors that are keyword-only.
    _library.impl(_signature.name, functools.partial(_refuse_vmap, _signature), "FuncTorchBatched")
    if _mode := getattr(torch.autograd.graph, "_CloneArgBeforeMutateMode", None):
        torch.library.register_torch_dispatch(_name, _mode, _clone_what_is_saved)


# ---- DTensor, which takes long to import: if that comes after torch_rope, a program imports torch_rope.parallel too ----

if "torch.distributed.tensor" in sys.modules:
    try:
        from . import parallel  # noqa: F401
    except (ImportError, AttributeError, TypeError) as e:  # the rules use private parts of torch
        warnings.warn(f"torch_rope's operators do not take DTensors in torch {torch.__version__}: {e}", stacklevel=2)
