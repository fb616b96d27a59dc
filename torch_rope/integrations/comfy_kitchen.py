"""Makes torch_rope a back end of comfy-kitchen, the library of kernels that ComfyUI calls.

After :func:`register` the rope functions of comfy_kitchen (``apply_rope``, ``rms_rope``, their split-half, one-tensor and
in-place forms) run torch_rope's operators wherever they would otherwise run comfy-kitchen's eager back end. They take
what they took before: x ``[batch, heads, seq, head_dim]`` or ``[batch, seq, heads, head_dim]``, float16, bfloat16 or
float32, with any strides, and a table ``freqs_cis`` of 2 x 2 matrices, ``[..., rotary_dim / 2, 2, 2]``, whose other
dimensions broadcast to those of x.

- **Fallback.** Comfy-kitchen calls its eager back end, which may raise an error, if the shapes do not fit, if x has more
  than four dimensions, if rms_rope is given a table by head, or if a matrix is not ``[[cos, -sin], [sin, cos]]`` times a
  factor. The matrices of a table are compared when it is first used, and again when its version has changed. A table that
  was made in inference mode has no version; if you write to one, write such matrices.
- **Rounding.** The arithmetic is float32, and each element is rounded once, at the end. The eager back end computes in the
  dtype of the table, and rounds between norm and rotation, so results differ in their last bits.
- **Gradients.** The functions of comfy_kitchen have none, with any back end: a backward pass raises RuntimeError, and so
  does an in-place function if an argument requires grad. To train, call the functions of torch_rope.

Tested with comfy-kitchen 0.2.40.
"""

import dataclasses
import functools
import itertools
import types

import torch
from comfy_kitchen._rope_utils import check_rope_inplace, trim_rope_freqs
from comfy_kitchen.constraints import FunctionConstraints, ValidationResult
from comfy_kitchen.registry import registry
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import torch_rope

NAME = "torch_rope"  # the name of the back end
FUNCTIONS = list(map("".join, itertools.product(("apply_rope", "rms_rope"), ("", "_split_half"), ("", "1"), ("", "_"))))
_ops = torch.ops.rope
_compared = WeakTensorKeyDictionary()  # for each table its version, and whether all its matrices were rotations then


def register() -> None:
    """Registers torch_rope as a back end of comfy-kitchen, just before the eager one in the order of priority.

    On CPUs and Apple GPUs it comes first. On CUDA GPUs comfy-kitchen's own back ends "cuda" and "triton" come before it.
    A second call does not change the order. ``comfy_kitchen.use_backend("torch_rope")`` and
    ``comfy_kitchen.disable_backend("torch_rope")`` do what they do for every back end.
    """
    module = types.SimpleNamespace(**{name: functools.partial(_call, name) for name in FUNCTIONS})
    registry.register(NAME, module, {name: _constraints(name) for name in FUNCTIONS})
    order = registry._priority
    if NAME not in order:
        place = order.index("eager") if "eager" in order else len(order)
        registry.set_priority([*order[:place], NAME, *order[place:]])


def unregister() -> None:
    """Removes the back end. The registry is then what it would be without :func:`register`."""
    with registry._lock:
        registry._backends.pop(NAME, None)
        registry._disabled.discard(NAME)
        for name in registry._capabilities.pop(NAME, ()):
            del registry._constraints[NAME, name]
        registry._priority = [name for name in registry._priority if name != NAME]


def _constraints(name: str) -> FunctionConstraints:
    """Returns what the function takes: what it takes in the eager back end, as far as torch_rope can compute it."""
    eager = registry.get_constraints("eager", name)
    rules = (*eager.call_rules, functools.partial(_validate, name))
    return dataclasses.replace(eager, default_devices=frozenset(torch_rope._C.devices), call_rules=rules)


def _validate(name: str, given: dict) -> ValidationResult:
    """Returns whether torch_rope can compute this call."""
    by_head, rotary_dim = name.startswith("apply_rope"), given.get("rot_dim")
    for x in _tensors(given):
        if not _fits(x, _rows(name, x, given), rotary_dim or x.shape[-1], by_head):
            return ValidationResult.fail("freqs_cis", "its shape is not one that torch_rope takes with this x")
    if not _rotates(given["freqs_cis"]):
        return ValidationResult.fail("freqs_cis", "a matrix is not a rotation times a factor")
    return ValidationResult.ok()


def _call(name: str, **given) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the function of comfy-kitchen that has this name."""
    xs, in_place = _tensors(given), name.endswith("_")
    weights = [given[key] for key in ("scale", "q_scale", "k_scale") if given.get(key) is not None]
    if in_place:
        check_rope_inplace(*xs, readonly=(given["freqs_cis"], *weights))
    alike = xs[0].shape == xs[-1].shape and xs[0].dtype == xs[-1].dtype
    options = {"interleaved": "split_half" not in name, "in_place": in_place, "epsilon": given.get("epsilon", 1e-6)}
    out = []
    for part in [slice(None)] if alike else [slice(1), slice(-1, None)]:  # both tensors at once, or one at a time
        out += _rotate(xs[part], _rows(name, xs[part][0], given), weights[part], **options)
    return tuple(out) if len(xs) == 2 else out[0]


def _tensors(given: dict) -> list[Tensor]:
    """Returns the tensors that a call rotates."""
    return [given[key] for key in ("x", "xq", "xk", "q", "k") if key in given]


def _rows(name: str, x: Tensor, given: dict) -> Tensor:
    """Returns the rows of the table for x. In comfy-kitchen only the interleaved functions take tables with more rows."""
    table = given["freqs_cis"]
    return table if "split_half" in name else trim_rope_freqs(x, table)


def _fits(x: Tensor, table: Tensor, rotary_dim: int, by_head: bool) -> bool:
    """Returns whether the table has a matrix for each pair of channels, and broadcasts to the tokens and heads of x.

    by_head: whether the matrices may differ from head to head.
    """
    sizes, rows = (1,) * (4 - x.dim()) + x.shape[:-1], (1,) * (6 - table.dim()) + table.shape[:-3]
    return (
        table.shape[-3:] == (rotary_dim // 2, 2, 2)
        and rotary_dim % 2 == 0
        and rotary_dim <= x.shape[-1]
        and len(sizes) == len(rows) == 3
        and all(row in (1, size) for row, size in zip(rows, sizes, strict=True))
        and (by_head or 1 in rows[1:])
    )


def _rotates(table: Tensor) -> bool:
    """Returns whether each matrix of the table is [[cos, -sin], [sin, cos]] times a factor."""
    version = None if table.is_inference() else table._version
    known = _compared.get(table)
    if known is None or known[0] != version:
        (a, b), (c, d) = (row.unbind(-1) for row in table.unbind(-2))
        known = _compared[table] = version, torch.equal(a, d) and torch.equal(b, -c)
    return known[1]


def _rotate(
    xs: list[Tensor], table: Tensor, weights: list[Tensor], *, interleaved: bool, in_place: bool, epsilon: float
):
    """Returns xs rotated, and normalised before if there are weights. xs: one tensor, or two of one shape and dtype."""
    column = _readable(table.select(-1, 0), xs[0])  # cos and sin: [..., rotary_dim / 2, 2]
    column = column[(None,) * (5 - column.dim())]
    axes = (1, 2) if column.shape[1] == 1 else (1, 1)  # transpose(*axes) swaps heads and seq if heads come first
    tokens = [x[(None,) * (4 - x.dim())].transpose(*axes) for x in xs]  # [batch, seq, heads, head_dim]
    # A table by token has no dimension for heads.
    cos, sin = column.transpose(*axes).expand(-1, tokens[0].shape[1], -1, -1, -1).squeeze(2).unbind(-1)

    if weights:
        q, k = (*tokens, tokens[0][:, :, :0])[:2]  # if there is only one tensor, k has no heads
        q_weight, k_weight = (_readable(weights[i], q) for i in (0, -1))
        norm = {"norm_eps": epsilon, "interleaved": interleaved}
        out = _ops.norm_rotate_qk(q, k, q_weight, k_weight, cos, sin, **norm)
    elif in_place:
        rotate_ = _ops.rotate_ if len(xs) == 1 else _ops.rotate_qk_
        rotate_(*tokens, cos, sin, interleaved=interleaved)
        return xs
    elif len(xs) == 1:
        out = [_ops.rotate(*tokens, cos, sin, interleaved=interleaved)]
    else:
        out = _ops.rotate_qk(*tokens, cos, sin, interleaved=interleaved)
    out = [y.transpose(*axes).view(x.shape) for x, y in zip(xs, out, strict=False)]
    return [x.copy_(y) for x, y in zip(xs, out, strict=True)] if in_place else out


def _readable(t: Tensor, x: Tensor) -> Tensor:
    """Returns t in a dtype that the operators take with x. Its values do not change."""
    return t if t.dtype == x.dtype else t.float()
