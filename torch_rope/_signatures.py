"""The signatures of the operators, read by all rules in Python: for vmap, for DTensors, for flops.

A schema says the names and the order of the arguments, and which are written. What it does not say, the axes of each, stands
here by name; so a new argument is one line of AXES, and a new operator none.
"""

import functools
from collections.abc import Iterable

import torch

# What the dimensions of an argument are. One that has fewer of them lacks the first.
AXES = {
    **dict.fromkeys(("x", "q", "k", "v", "q_out_grad", "k_out_grad"), ("batch", "seq", "heads", "head_dim")),
    **dict.fromkeys(("k_cache", "v_cache"), ("blocks", "block_size", "heads", "head_dim")),
    **dict.fromkeys(("cos", "sin"), ("batch or 1", "seq", "columns")),
    **dict.fromkeys(("positions", "slots"), ("batch or 1", "seq")),
    **dict.fromkeys(("q_norm_weight", "k_norm_weight"), ("head_dim",)),
    "inv_freq": ("axes", "columns"),
}
BY_POSITION = "rows", "columns"  # cos and sin of two dimensions


class Signature:
    """Of one operator."""

    def __init__(self, name: str):
        self.name, self.op = name, getattr(torch.ops.rope, name).default
        arguments = self.op._schema.arguments
        self.arguments = [a.name for a in arguments]
        self.written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        self.rotated = [name for name in ("x", "q", "k") if name in self.arguments]  # none: it makes tables

    def by_name(self, args: Iterable) -> dict:
        """The positional arguments of a call, or what stands for them."""
        return dict(zip(self.arguments, args, strict=False))

    def axes(self, name: str, dim: int) -> tuple[str, ...]:
        """Of an argument with so many dimensions."""
        if name == "positions" and not self.rotated:  # of any shape
            axes = ("axes",) if self.name == "_axial_cos_sin" else ()
            return axes + ("places",) * (dim - len(axes))
        if name in ("cos", "sin") and dim == 2:
            return BY_POSITION
        return AXES[name][-dim:]


@functools.cache
def operators() -> tuple[Signature, ...]:
    """All of them: every operator has a Meta kernel."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("Meta")
    return tuple(Signature(name.removeprefix("rope::")) for name in sorted(names) if name.startswith("rope::"))
