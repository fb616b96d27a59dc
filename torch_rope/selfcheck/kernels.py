"""One check for each Metal kernel. On other devices the same calls are checks of values like others.

csrc/mps/plan.h says which call runs which kernel.
"""

import itertools
import os
from functools import partial

import torch
from torch import Tensor

import torch_rope
from torch_rope import reference
from torch_rope.selfcheck.checks import ANGLE_ERROR, Check, Group, Skip, exact

TYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
FAMILIES = {  # each kernel's family, and what follows the type in its name
    "rotate": ("_v8_u32", "_v4_u32", "_v1_u32", "_v8_u64", "_v4_u64", "_v1_u64"),
    "norm_rotate": ("_v8_u32", "_v4_u32", "_v1_u32", "_v8_u64", "_v4_u64", "_v1_u64"),
    "norm_rotate_wide": ("",),
    "norm_rotate_over_heads": ("_v4", "_v1"),
    "norm_backward": ("_v4", "_v1"),
    "norm_backward_wide": ("",),
    "norm_backward_over_heads": ("_v4", "_v1"),
    "sum_parts": ("",),
    "table_backward": ("_v4_u32", "_v1_u32"),  # its kernels for 64 bits need tensors that are large
    "cos_sin": ("",),
}
LARGE = 2**32  # an element offset that does not fit in 32 bits


def groups(check: Check) -> list[Group]:
    cases = {
        name_of(family, kind, variant): partial(kernel, check, family, kind, variant)
        for family, variants in FAMILIES.items()
        for variant, kind in itertools.product(variants, TYPES)
        if exists(kind, variant)
    }
    found = [Group("kernels", cases, seconds=20 if check.quick else 90, names_kernels=True)]
    if not check.quick:
        far = itertools.product(("rotate", "norm_rotate", "table_backward"), ("_v8_u64", "_v4_u64", "_v1_u64"), TYPES)
        cases = {
            name_of(family, kind, variant): partial(far_kernel, check, family, kind, variant)
            for family, variant, kind in far
            if exists(kind, variant) and (family, variant) != ("table_backward", "_v8_u64")
        }
        # In a process of its own, because it takes much memory.
        found.append(
            Group("tensors past 2^32 elements", cases, seconds=15, apart=True, names_kernels=True, limit=180.0)
        )
    return found


def name_of(family: str, kind: str, variant: str) -> str:
    return f"{family}_{kind}{variant}"


def exists(kind: str, variant: str) -> bool:
    """Returns whether there is a kernel of this type: vectors of eight channels are for types of 2 bytes."""
    return kind != "float" or "v8" not in variant


def sizes(family: str, variant: str) -> tuple[int, int]:
    """Returns a head_dim and a rotary_dim for which a kernel of this variant runs, if there are enough tokens."""
    if "wide" in family:
        return 512, 256
    return (20, 12) if "_v1" in variant else (64, 32) if "_v8" in variant else (64, 24)


def kernel(check: Check, family: str, kind: str, variant: str) -> None:
    """Makes a call that runs this kernel, and checks the result."""
    dtype, (head_dim, rotary_dim) = TYPES[kind], sizes(family, variant)
    if family == "cos_sin":
        positions, inv_freq = torch.arange(40), torch_rope.inv_freq(64).float()
        expected = reference.cos_sin(positions, inv_freq, dtype=torch.float64)
        outs = check.call("cos_sin", positions.to(check.device), inv_freq.to(check.device), dtype=dtype)
        for out, e in zip(outs, expected, strict=True):
            check.near(out, e, torch.ones_like(e), 0.51, ANGLE_ERROR)
        return
    q, k = (check.make(2, 20, heads, head_dim, dtype=dtype) for heads in (5, 2))
    weights = [check.make(*x.shape[-2 if "over_heads" in family else -1 :]) for x in (q, k)]
    far = "u64" in variant
    cos, sin = check.tables(1 if far else 20, rotary_dim)
    given, positions = [cos, sin], None
    if far:  # a table of more than 2^31 rows, which are all the same row
        given = [t.expand(2**31 + 8, -1) for t in (cos, sin)]
        positions = (torch.arange(20) * 113025455 + 3).to(check.device)  # the last is 2^31
        cos, sin = (t.expand(20, -1) for t in (cos, sin))
    if family == "rotate":
        outs = check.call("rotate_qk", q, k, *given, positions=positions)
        expected = reference.rotate_qk(*map(exact, (q, k, cos, sin)))
    elif family.startswith("norm_rotate"):
        outs = check.call("norm_rotate_qk", q, k, *weights, *given, positions=positions)
        expected = reference.norm_rotate_qk(*map(exact, (q, k, *weights, cos, sin)))
    elif family == "table_backward":
        outs, expected = gradients(check, (q, k, cos, sin), [2, 3], "rotate_qk")
    else:
        of = [2, 3] if family == "sum_parts" else [0, 1, 2, 3]  # sum_parts computes the gradients of the weights
        outs, expected = gradients(check, (q, k, *weights, cos, sin), of, "norm_rotate_qk")
    for out, e in zip(outs, expected, strict=True):
        if "backward" in family or family == "sum_parts":
            check.near_largest(f"a gradient of shape {list(e.shape)}", out, e)
        else:
            check.near(out, e, pair_size(e, rotary_dim), ulps_of(family, dtype))


def ulps_of(family: str, dtype: torch.dtype) -> int:
    """Returns the allowed error."""
    return 1 if dtype != torch.float32 else 2 if family == "rotate" else 6


def pair_size(x: Tensor, rotary_dim: int) -> Tensor:
    """Returns the magnitude of each channel's pair, and of each channel that is not rotated."""
    rotated, rest = x.split([rotary_dim, x.shape[-1] - rotary_dim], -1)
    first, second = rotated.chunk(2, -1)
    return torch.cat([torch.hypot(first, second).repeat((1,) * (x.dim() - 1) + (2,)), rest.abs()], -1)


def gradients(check: Check, args: tuple, of: list[int], op: str) -> tuple[tuple, tuple]:
    """Returns the gradients of some arguments of an operator, and the expected gradients."""
    given = [check.make(*x.shape, dtype=x.dtype) for x in args[:2]]
    found = []
    for f, convert in ((partial(check.call, op), Tensor.detach), (getattr(reference, op), exact)):
        args = [convert(x) for x in args]
        leaves = [args[i].requires_grad_() for i in of]
        found.append(torch.autograd.grad(f(*args), leaves, [convert(x) for x in given]))
        check.after_call()
    return found[0], found[1]


def memory() -> int:
    """Returns the bytes of memory of this machine, or 0 if they are unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def memory_of(device: torch.device) -> int:
    """Returns the bytes of memory that a device can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":  # a whole tensor must be in memory while a kernel uses it
        return torch.mps.recommended_max_memory()
    return memory()


def far_kernel(check: Check, family: str, kind: str, variant: str) -> None:
    """Rotates two sequences that are more than 2^32 elements apart, of a tensor that is otherwise untouched."""
    dtype, (head_dim, rotary_dim) = TYPES[kind], sizes(family, variant)
    needed = LARGE * dtype.itemsize
    if check.device.type == "mps" and hasattr(torch.ops.simulator, "allow_foreign"):  # simulated; its memory is sparse
        torch.ops.simulator.allow_foreign(True)
    elif (has := memory_of(check.device)) < 3 * needed:
        raise Skip(f"{dtype} needs {3 * needed >> 30} GiB of memory, and there are {has >> 30}")
    try:
        base = torch.empty(LARGE + 2**14, dtype=dtype, device=check.device)
    except RuntimeError as e:
        raise Skip(f"torch cannot allocate {needed >> 30} GiB: {e}") from None
    shape, n = (2, 40, 4, head_dim), 160 * head_dim
    values = check.make(*shape, dtype=dtype)
    parts = base[:n], base[LARGE : LARGE + n]
    for part, value in zip(parts, values, strict=True):
        part.copy_(value.flatten())
    if not all(torch.equal(part.cpu(), value.flatten().cpu()) for part, value in zip(parts, values, strict=True)):
        raise Skip("torch itself does not copy to and from memory past 4 GiB")
    x = base.as_strided(shape, (LARGE, 4 * head_dim, head_dim, 1))
    cos, sin = check.tables(40, rotary_dim)
    if family == "rotate":
        check.call("rotate_", x, cos, sin)
        out = torch.stack([part.cpu().view(shape[1:]) for part in parts])
        expected = reference.rotate(*map(exact, (values, cos, sin)))
    elif family == "norm_rotate":
        weight = check.make(head_dim)
        out = check.call("norm_rotate_qk", x, x[..., :1, :], weight, weight, cos, sin)[0]
        expected = reference.norm_rotate_qk(*map(exact, (values, values, weight, weight, cos, sin)))[0]
    else:
        cos.requires_grad_()
        given = check.make(*shape, dtype=dtype)
        (out,) = torch.autograd.grad(check.call("rotate", x, cos, sin), cos, given)
        check.after_call()
        copy = exact(cos.detach()).requires_grad_()
        (expected,) = torch.autograd.grad(reference.rotate(exact(values), copy, exact(sin)), copy, exact(given))
        return check.near_largest("gradient of cos", out, expected)
    check.near(out, expected, pair_size(expected, rotary_dim), ulps_of(family, dtype))
