"""A check for each Metal kernel: a call that launches it. csrc/mps/dispatch.h says which call launches which kernel."""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from torch_rope import _C
from torch_rope.selfcheck.checks import Check, require

TYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
VECTORS = "_v8_u32", "_v4_u32", "_v1_u32", "_v8_u64", "_v4_u64", "_v1_u64"
# The files of shaders, the families of their kernels, and what follows the type in the name of a kernel.
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "rotate": {"rotate": VECTORS},
    "norm": {"norm_rotate": VECTORS, "norm_rotate_wide": ("_v4", "_v1")},
    "norm_backward": {"norm_backward": ("_v4", "_v1"), "norm_backward_wide": ("_v4", "_v1"), "sum_parts": ("",)},
    "cos_sin": {"cos_sin": ("",)},
}


def launches() -> Counter[str]:
    """Returns how often this process has launched each Metal kernel. It is empty on other devices."""
    found: Counter[str] = Counter()
    for name, _, calls in getattr(_C, "metal_pipelines", list)():
        found[name] += calls
    return found


def groups(check: Check) -> dict[str, dict[str, Callable[[], None]]]:
    """Returns a group for each file of shaders. The name of a case is that of its kernel."""
    return {
        f"Metal kernels: {file}": {
            f"{family}_{kind}{variant}": partial(check_kernel, check, family, kind, variant)
            for family, variants in families.items()
            for variant, kind in itertools.product(variants, TYPES)
            if kind != "float" or "v8" not in variant  # vectors of eight channels are for types of 2 bytes
        }
        for file, families in FILES.items()
    }


def check_kernel(check: Check, family: str, kind: str, variant: str) -> None:
    """Makes a call that launches a kernel, checks the results, and that the kernel was launched."""
    before, dtype = launches(), TYPES[kind]
    head_dim, rotary_dim = (20, 12) if "_v1" in variant else (64, 32) if "_v8" in variant else (64, 24)
    all_heads = "wide" in family and "_v4" in variant  # the norm is over all heads; otherwise heads are wide
    if "wide" in family and not all_heads:
        head_dim, rotary_dim = 512, 256
    xs = {name: check.make(2, 20, heads, head_dim, dtype=dtype) for name, heads in (("q", 5), ("k", 2))}
    options = tables = check.tables(20, rotary_dim)
    if "u64" in variant:  # the table has more than 2^31 rows, which are all the same row
        tables = {name: t[:1].expand(20, -1) for name, t in tables.items()}
        options = {name: t[:1].expand(2**31 + 8, -1) for name, t in tables.items()}
        options["positions"] = (torch.arange(20) * 113025455 + 3).to(check.device)  # the last is 2^31
    names, axes = ("q_norm_weight", "k_norm_weight"), 2 if all_heads else 1
    weights = {name: check.make(*x.shape[-axes:]) for name, x in zip(names, xs.values(), strict=True)}
    if family == "cos_sin":
        check.tables_of_angles(dtype, torch.int64, 10000.0)
    elif family == "rotate":
        check.values("rotate_qk", xs | options, xs | tables)
    elif family.startswith("norm_rotate"):
        check.values("norm_rotate_qk", xs | weights | options, xs | weights | tables)
    else:
        check.gradients("norm_rotate_qk", xs | weights | tables, of=names if family == "sum_parts" else ())
    name = f"{family}_{kind}{variant}"
    require(name in launches() - before, "the kernel was not launched")
