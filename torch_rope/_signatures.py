"""The signatures of the operators, which the rules in Python for vmap, for DTensors and for flops are derived from.

The schema of an operator gives the names and the order of its arguments, and says which of them are written. AXES adds
what a schema lacks: the axes of each tensor, by the name of the argument. So a new argument needs one line in AXES, and
a new operator needs nothing here.
"""

import functools
from collections.abc import Iterable

import torch

from ._ops import add_op_namespace_prefix, ops

# The dimensions of each argument, last dimension last. A tensor with fewer dimensions lacks the first ones.
AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("x", "q", "k", "v", "q_out", "q_out_grad", "k_out_grad"), ("batch", "seq", "heads", "head_dim")),
    **dict.fromkeys(("k_cache", "v_cache"), ("blocks", "block_size", "heads", "head_dim")),
    **dict.fromkeys(("cos", "sin"), ("batch or 1", "seq", "heads", "pairs")),  # heads: only if there are four
    **dict.fromkeys(("positions", "slots"), ("batch or 1", "seq")),
    **dict.fromkeys(("q_norm_weight", "k_norm_weight"), ("heads", "head_dim")),  # heads: for a norm over all heads
    "v_norm_weight": ("head_dim",),
    "q_factor": ("batch or 1", "seq", "heads"),  # heads: only if there are three
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), ("heads",)),  # a scale of one element has no heads
    "inv_freq": ("part", "axes", "pairs"),  # axes: only in axial_cos_sin
}
BY_POSITION = "rows", "pairs"  # the axes of cos and sin if they are 2-D, that is, tables by position


class Signature:
    """The arguments of one operator."""

    def __init__(self, name: str):
        self.name = name
        self.op: torch._ops.OpOverload = getattr(ops, name).default
        # What the operator calls in its __call__, in which Python spends 0.3 microseconds.
        self.function = getattr(self.op, "_op", self.op)
        arguments = self.op._schema.arguments
        self.in_words = self.op._schema.name.replace("::", ".")
        self.arguments: list[str] = [a.name for a in arguments]
        self.types = {a.name: str(a.type).removeprefix("Optional[").removesuffix("]") for a in arguments}
        self.types |= {"dtype": "dtype"} if "dtype" in self.types else {}  # the schema says that it is an integer
        self.written: set[str] = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        flags = [a for a in arguments if a.kwarg_only and self.types[a.name] != "Tensor"]
        self.flags, self.defaults = [a.name for a in flags], tuple(a.default_value for a in flags)
        numbers = [i for i, name in enumerate(self.flags) if self.types[name] == "float"]
        self.numbers = (numbers * 3)[:3]  # where in flags the numbers are, of which an operator has at most three
        # Empty if the operator makes tables.
        self.rotated: list[str] = [name for name in ("x", "q", "k") if name in self.arguments]

    def by_name(self, args: Iterable) -> dict:
        """Returns argument name -> value, given one value for each positional argument of a call."""
        return dict(zip(self.arguments, args, strict=False))

    def axes(self, name: str, dim: int) -> tuple[str, ...]:
        """Returns the axes of an argument that has this many dimensions."""
        if name == "positions" and not self.rotated:  # they may have any shape
            of_axes = self.name == "axial_cos_sin"
            return ("axes",) * of_axes + ("positions",) * (dim - of_axes)
        if name in ("cos", "sin") and dim == 2:
            return BY_POSITION
        axes = AXES[name] if name != "q_factor" or dim == 3 else AXES[name][:2]
        if (name in ("cos", "sin") and dim == 3) or (name == "inv_freq" and self.name != "axial_cos_sin"):
            axes = axes[:-2] + axes[-1:]
        return axes[-dim:]


@functools.cache
def operators() -> tuple[Signature, ...]:
    """Returns all operators. They are found by their Meta kernels, because every operator has one."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("Meta")
    own = add_op_namespace_prefix("")
    return tuple(Signature(name.removeprefix(own)) for name in sorted(names) if name.startswith(own))
