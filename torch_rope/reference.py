"""The operators in plain torch: what each of them is equivalent to, up to the last bits.

::

    from torch_rope import reference

    out = reference.rotate(x, cos, sin, positions=positions)

The arithmetic is float32 (float64 for float64 x), the angles are float64, and each result is rounded once. Nothing is
checked, and any device that has float64 will do. On float64 copies of its arguments a function says what is right, for
results of any other dtype: ``python -m torch_rope.selfcheck`` and the benchmarks compare with that.

``rotate_`` and ``rotate_qk_`` write to x, q and k what ``rotate`` and ``rotate_qk`` return.
"""

import torch
from torch import Tensor


def rotate(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int = 0,
    *,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """What :func:`torch_rope.rotate` is equivalent to."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    p = (torch.arange(x.shape[-3], device=x.device) if positions is None else positions) + offset
    if inv_freq is not None:
        cos, sin = cos_sin(p, inv_freq, dtype=dtype)
    elif cos.dim() == 2:  # a row per position; else one per token
        cos, sin = cos[p], sin[p]
    c, s = (t.to(dtype).unsqueeze(-2) * attention_factor for t in (cos, sin))  # [..., seq, 1, rotary_dim / 2]
    s = -s if inverse else s
    pairs = c.shape[-1]
    first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    a, b = x[..., first].to(dtype), x[..., second].to(dtype)
    out = x.clone()  # of the other channels
    out[..., first] = a * c - b * s  # rounded here
    out[..., second] = b * c + a * s
    return out


def rotate_qk(q: Tensor, k: Tensor, *angles, **flags) -> tuple[Tensor, Tensor]:
    """What :func:`torch_rope.rotate_qk` is equivalent to. The other arguments are those of :func:`rotate`."""
    return rotate(q, *angles, **flags), rotate(k, *angles, **flags)


def norm_rotate_qk(
    q: Tensor, k: Tensor, q_norm_weight: Tensor, k_norm_weight: Tensor, *angles, norm_eps: float = 1e-6, **flags
) -> tuple[Tensor, Tensor]:
    """What :func:`torch_rope.norm_rotate_qk` is equivalent to. The other arguments are those of :func:`rotate`."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps) * weight

    rotated = rotate_qk(norm(q, q_norm_weight), norm(k, k_norm_weight), *angles, **flags)
    return tuple(x.to(q.dtype) for x in rotated)


def rotate_into_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int = 0,
    slots: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    **flags,
) -> None:
    """What :func:`torch_rope.rotate_into_cache` is equivalent to."""
    angles = cos, sin, inv_freq, positions, offset
    if q_norm_weight is None:
        rotated_q, rotated_k = rotate_qk(q, k, *angles, **flags)
    else:
        rotated_q, rotated_k = norm_rotate_qk(q, k, q_norm_weight, k_norm_weight, *angles, **flags)
    q.copy_(rotated_q)
    block_size = k_cache.shape[-3]
    if slots is None:  # row b of the batch writes block b, at its positions
        p = (torch.arange(k.shape[-3], device=k.device) if positions is None else positions) + offset
        slots = p + block_size * torch.arange(k.shape[:-3].numel(), device=k.device).unsqueeze(-1)
    slots = slots.flatten()
    written = slots >= 0
    block, place = slots[written] // block_size, slots[written] % block_size
    for cache, new in ((k_cache, rotated_k), (v_cache, v)):
        blocks = cache if cache.dim() == 4 else cache.unsqueeze(0)
        blocks[block, place] = new.flatten(0, -3)[written]


def cos_sin(
    positions: Tensor, inv_freq: Tensor, *, attention_factor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """What :func:`torch_rope.cos_sin` is equivalent to."""
    angle = positions.double().unsqueeze(-1) * inv_freq.double()
    return tuple((t * attention_factor).to(dtype or torch.float32) for t in (angle.cos(), angle.sin()))


def axial_cos_sin(
    positions: Tensor, inv_freq: Tensor, *, attention_factor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """What :func:`torch_rope.axial_cos_sin` is equivalent to."""
    angle = torch.einsum("a...,ai->...i", positions.double(), inv_freq.double())
    return tuple((t * attention_factor).to(dtype or torch.float32) for t in (angle.cos(), angle.sin()))
