"""Registers what PyTorch takes only from Python: rules for vmap, the errors of nested tensors, flop formulas."""

import functools

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import is_batchedtensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter
from torch._library.simple_registry import find_torch_dispatch_rule
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula

from ._ops import add_op_namespace_prefix
from ._ops import ops as _ops
from ._signatures import Signature, operators

# ---- vmap: a loop over the samples ----


def _loop(op, size: int, dims: dict, given: dict):
    """Returns the results of the mapped call from one call for each sample."""
    mapped = {name: dim for name, dim in dims.items() if dim is not None}
    if size == 0:  # a sample without values, on the meta device, has the shapes of the results
        sample = {name: a.to("meta") if isinstance(a, Tensor) else a for name, a in given.items()}
        sample |= {name: sample[name].sum(dim, dtype=given[name].dtype) for name, dim in mapped.items()}
        device = given[next(iter(mapped))].device
        return tuple(torch.empty(0, *t.shape, dtype=t.dtype, device=device) for t in tree_leaves(op(**sample)))
    samples = [op(**given | {name: given[name].select(dim, i) for name, dim in mapped.items()}) for i in range(size)]
    return tuple(torch.stack(outs) for outs in zip(*map(tree_leaves, samples), strict=True))


def _batched(signature: Signature, *args, **kwargs):
    """Calls torch's helper, as torch.library.register_vmap does, which takes no operator with keyword-only tensors."""
    given = signature.by_name(args) | kwargs

    def by_position(*values):
        return signature.op(**dict(zip(given, values, strict=True)))

    rule, interpreter = functools.partial(_vmap, signature, list(given)), retrieve_current_functorch_interpreter()
    assert isinstance(interpreter, VmapInterpreter)  # which calls this function
    return custom_function_call_vmap_helper(interpreter, rule, by_position, *given.values())


def _vmap(signature: Signature, names: list[str], info, in_dims, *values):
    """Runs a mapped call of an operator, and returns (results, mapped dimensions), as torch's helper expects."""
    name = signature.name
    dims, given = dict(zip(names, in_dims, strict=True)), dict(zip(names, values, strict=True))
    if any(dims[written] is None for written in signature.written):
        written = next(written for written in signature.rotated if dims[written] is None)
        raise RuntimeError(
            f"rope.{name}: {written} is not mapped by vmap but must be, because it is written in place and other "
            f"arguments are mapped; use rope.{name[:-1]}"
        )
    outs = _loop(getattr(_ops, name.removesuffix("_")).default, info.batch_size, dims, given)
    if signature.written:  # only after the loop, so that an error in a sample leaves nothing half-written
        for x, out in zip(signature.rotated, outs, strict=True):
            given[x].movedim(dims[x], 0).copy_(out)
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

    def call(*args, out: Tensor, **kwargs) -> None:
        op(*args, **kwargs)

    vars(call)["_schema"] = op._schema
    mode.__torch_dispatch__(call, types, args, kwargs | {"out": kwargs.get("q_out", args[0])})


# ---- flops: 4 multiplications and 2 additions for a pair; the norm adds 4 for a channel ----


def _flops(signature: Signature, *args, out_shape=None, **kwargs) -> int:
    """Returns the floating-point operations of a call, given the shapes of its tensors."""
    shapes = signature.by_name(args) | kwargs
    rotary_dim = 2 * (shapes.get("cos") or shapes["inv_freq"])[-1]
    # The norm squares, adds, and multiplies twice.
    channel = 4 if shapes.get("q_norm_weight") is not None else 0
    if signature.name == "_norm_rotate_qk_backward":
        # In addition to the work of forward, two for the gradient of the weight and five for that of the input. With
        # n = x r and u = gradient * w they are the sums of gradient * n and of u * x, and r (u - c x).
        channel += 7
    xs = [shapes[name] for name in signature.rotated if shapes[name] is not None]
    return sum(torch.Size(x[:-1]).numel() * (3 * rotary_dim + channel * x[-1]) for x in xs)


# torch takes no rule twice, and keeps those of an earlier import whose modules were taken out of sys.modules.
_library = torch.library.Library(_ops.name, "FRAGMENT")
for _signature in operators():
    _name = add_op_namespace_prefix(_signature.name)
    if find_torch_dispatch_rule(_signature.op, NestedTensor) is not None:
        continue
    torch.library.register_torch_dispatch(_name, NestedTensor, _refuse_nested)
    if _signature.rotated:
        register_flop_formula(_signature.op.overloadpacket)(functools.partial(_flops, _signature))
    _has_cache = "k_cache" in _signature.arguments
    _rule = functools.partial(_refuse_vmap if _has_cache else _batched, _signature)
    _library.impl(_signature.name, _rule, "FuncTorchBatched")
    if _has_cache and (_mode := getattr(torch.autograd.graph, "_CloneArgBeforeMutateMode", None)):
        torch.library.register_torch_dispatch(_name, _mode, _clone_what_is_saved)
