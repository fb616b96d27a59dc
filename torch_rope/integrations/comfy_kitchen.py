"""Makes torch_rope a back end of comfy-kitchen, the library of kernels that ComfyUI calls.

docs/integrations/others.md says which calls torch_rope computes, how it rounds, and what has no gradient.
"""

import dataclasses
import functools
import itertools
import types

import torch
from comfy_kitchen._rope_utils import check_rope_inplace, trim_rope_freqs
from comfy_kitchen.constraints import ValidationResult
from comfy_kitchen.registry import registry
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _C
from .._ops import ops

NAME = "torch_rope"  # the name of the back end
FUNCTIONS = list(map("".join, itertools.product(("apply_rope", "rms_rope"), ("", "_split_half"), ("", "1"), ("", "_"))))
XS, WEIGHTS = ("x", "xq", "xk", "q", "k"), ("scale", "q_scale", "k_scale")  # names of arguments
_compared = WeakTensorKeyDictionary()  # for each table its version, and whether all its matrices were rotations then


def register() -> None:
    """Registers torch_rope as a back end of comfy-kitchen, just before the eager one in the order of priority."""
    constraints, devices = {}, frozenset(_C.devices)
    for name in FUNCTIONS:  # each takes what it takes in the eager back end, as far as torch_rope can compute it
        eager = registry.get_constraints("eager", name)
        rules = (*eager.call_rules, functools.partial(_validate, name))
        constraints[name] = dataclasses.replace(eager, default_devices=devices, call_rules=rules)
    module = types.SimpleNamespace(**{name: functools.partial(_call, name) for name in FUNCTIONS})
    registry.register(NAME, module, constraints)
    order = [*registry._priority]
    if NAME not in order:  # a second call does not change the order
        order.insert(order.index("eager") if "eager" in order else len(order), NAME)
        registry.set_priority(order)


def unregister() -> None:
    """Removes the back end. The registry is then what it would be without :func:`register`."""
    with registry._lock:
        registry._backends.pop(NAME, None)
        registry._disabled.discard(NAME)
        for name in registry._capabilities.pop(NAME, ()):
            del registry._constraints[NAME, name]
        registry._priority = [name for name in registry._priority if name != NAME]


def _as_computed(name: str, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x with four dimensions, and the rows of the table for it with six."""
    if "split_half" not in name:  # the other functions take tables with more rows
        table = trim_rope_freqs(x, table)
    return x[(None,) * (4 - x.dim())], table[(None,) * (6 - table.dim())]


def _validate(name: str, given: dict) -> ValidationResult:
    """Returns whether torch_rope can compute this call."""
    for x in filter(torch.is_tensor, map(given.get, XS)):
        x, table = _as_computed(name, x, given["freqs_cis"])
        rotary_dim = given.get("rot_dim") or x.shape[-1]
        if not (
            (x.dim(), table.dim()) == (4, 6)
            and table.shape[3:] == (rotary_dim // 2, 2, 2)
            and rotary_dim in range(0, x.shape[-1] + 1, 2)
            and all(rows in (1, size) for rows, size in zip(table.shape, x.shape[:3], strict=False))
            and (1 in table.shape[1:3] or name.startswith("apply_rope"))  # without a norm the table may be by head
        ):
            return ValidationResult.fail("freqs_cis", "its shape is not one that torch_rope takes with this x")
    table = given["freqs_cis"]
    version = None if table.is_inference() else table._version
    known, rotates = _compared.get(table, (-1, False))
    if version is None or known != version:
        (a, b), (c, d) = (row.unbind(-1) for row in table.unbind(-2))
        rotates = torch.equal(a, d) and torch.equal(b, -c)
        _compared[table] = version, rotates
    return ValidationResult.ok() if rotates else ValidationResult.fail("freqs_cis", "a matrix is not a rotation")


def _call(name: str, freqs_cis: Tensor, epsilon: float = 1e-6, **given) -> Tensor | tuple:
    """Computes the function of comfy-kitchen that has this name."""
    xs, weights = ([*filter(torch.is_tensor, map(given.get, names))] for names in (XS, WEIGHTS))
    interleaved, in_place = "split_half" not in name, name.endswith("_")
    if in_place:
        check_rope_inplace(*xs, readonly=(freqs_cis, *weights))
    if (xs[0].shape, xs[0].dtype) != (xs[-1].shape, xs[-1].dtype):  # one at a time
        each = itertools.zip_longest(xs, weights)  # without weights the scale is None
        return tuple(_call(name, x=x, scale=scale, freqs_cis=freqs_cis, epsilon=epsilon) for x, scale in each)
    given_xs, tables = zip(*(_as_computed(name, x, freqs_cis) for x in xs), strict=True)
    # The operators take cos, sin and weights in the dtype of x or in float32.
    column, *weights = (t if t.dtype == xs[0].dtype else t.float() for t in (tables[0].select(-1, 0), *weights))
    axes = (1, 2) if column.shape[1] == 1 else (1, 1)  # transpose(*axes) swaps heads and seq if heads come first
    tokens = [x.transpose(*axes) for x in given_xs]  # [batch, seq, heads, head_dim]
    # A table by token has no dimension for heads.
    cos, sin = column.transpose(*axes).expand(-1, tokens[0].shape[1], -1, -1, -1).squeeze(2).unbind(-1)
    if weights:
        q, k = (*tokens, tokens[0][:, :, :0])[:2]  # if there is only one tensor, k has no heads
        operator = ops.norm_rotate_qk_ if in_place else ops.norm_rotate_qk
        out = operator(q, k, weights[0], weights[-1], cos, sin, norm_eps=epsilon, interleaved=interleaved)
    else:
        operator = getattr(ops, "rotate" + "_qk" * (len(xs) == 2) + "_" * in_place)
        out = operator(*tokens, cos, sin, interleaved=interleaved)
    out = tokens if in_place else [out] if isinstance(out, Tensor) else out
    out = [y.transpose(*axes).view(x.shape) for x, y in zip(xs, out, strict=False)]
    return tuple(out) if len(xs) == 2 else out[0]
