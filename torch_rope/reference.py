"""The operators in plain PyTorch: each function computes what its namesake in torch_rope does, up to the last bits.

::

    from torch_rope import reference

    out = reference.rotate(x, cos, sin, positions=positions)

The arithmetic is float32 (float64 if x is float64), angles are float64, and each result is rounded once, or as often as
PyTorch's operators round if eager_rounding is True. The functions check nothing, and run on any device that has float64.

To judge a result of any dtype, call a function with float64 copies of the arguments and compare: this is what
``python -m torch_rope.selfcheck`` and the benchmarks do. ``rotate_``, ``rotate_qk_`` and ``norm_rotate_qk_`` write what
``rotate``, ``rotate_qk`` and ``norm_rotate_qk`` return, and have no functions here.
"""

from typing import Any

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
    rotary_start: int = 0,
    eager_rounding: bool = False,
) -> Tensor:
    """Rotates rotary_dim channels of each head, as :func:`torch_rope.rotate` does."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    p = (torch.arange(x.shape[-3], device=x.device) if positions is None else positions.long()) + offset
    if inv_freq is not None:
        cos, sin = cos_sin(p, inv_freq, dtype=dtype)
    assert cos is not None and sin is not None  # there is a source
    if inv_freq is None and cos.dim() == 2:  # a table by position; other tables already have a row for each token
        cos, sin = cos[p], sin[p]
    if cos.dim() < 4:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [..., seq, 1, rotary_dim / 2]
    if x.shape[-2] == 0:  # tables by head have rows for the heads of another tensor
        cos, sin = cos[..., :0, :], sin[..., :0, :]
    if eager_rounding:  # PyTorch rounds each product and sum to the dtype of its operands
        dtype = torch.promote_types(x.dtype, cos.dtype)
        c, s = ((t * attention_factor).to(dtype) for t in (cos, sin))
    else:
        c, s = (t.to(dtype) * attention_factor for t in (cos, sin))
    s = -s if inverse else s
    start, end = rotary_start, rotary_start + 2 * c.shape[-1]
    axis, shape = (-1, (-1, 2)) if interleaved else (-2, (2, -1))  # of the two channels of a pair
    # Some compilers take neither an empty part nor a slice that is the whole tensor.
    part = x if end - start == x.shape[-1] else x[..., start:end]
    pairs = part.to(dtype).unflatten(-1, shape)
    rotated = pairs * c.unsqueeze(axis) + pairs.flip(axis) * torch.stack([-s, s], axis)
    rotated = rotated.reshape(part.shape).to(x.dtype)
    if part is x:
        return rotated
    parts = x[..., :start], rotated, x[..., end:]
    return torch.cat([part for part in parts if part.shape[-1]], -1)


def rotate_qk(
    q: Tensor, k: Tensor, *angles, q_factor: Tensor | None = None, eager_rounding: bool = False, **flags
) -> tuple[Tensor, Tensor]:
    """Rotates q and k, as :func:`torch_rope.rotate_qk` does. The other arguments, here and below, are those of rotate."""
    rotated_k = rotate(k, *angles, eager_rounding=eager_rounding, **flags)
    if q_factor is None:
        return rotate(q, *angles, eager_rounding=eager_rounding, **flags), rotated_k
    wide = q if eager_rounding else q.to(torch.promote_types(q.dtype, torch.float32))
    factor = (q_factor if q_factor.dim() == 3 else q_factor.unsqueeze(-1)).unsqueeze(-1)  # [..., seq, 1 or heads, 1]
    rotated_q = rotate(wide, *angles, eager_rounding=eager_rounding, **flags) * factor
    return rotated_q.reshape(q.shape).to(q.dtype), rotated_k


def norm_rotate_qk(
    q: Tensor,
    k: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    *angles,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    eager_rounding: bool = False,
    round_before_weight: bool = False,
    **flags,
) -> tuple[Tensor, Tensor]:
    """RMS-normalises q and k and rotates them, as :func:`torch_rope.norm_rotate_qk` does."""
    options = norm_eps, norm_weight_offset, eager_rounding, round_before_weight
    normalised = _normalised(q, q_norm_weight, *options), _normalised(k, k_norm_weight, *options)
    rotated_q, rotated_k = rotate_qk(*normalised, *angles, eager_rounding=eager_rounding, **flags)
    return rotated_q.to(q.dtype), rotated_k.to(q.dtype)


def _normalised(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, eager_rounding: bool, round_before_weight: bool
) -> Tensor:
    """Returns x after an RMS norm of each head, or of all heads of a token if the weight is ``[heads, head_dim]``: in the
    dtype of x if eager_rounding is True, else in at least float32."""
    dtype, dims = torch.promote_types(x.dtype, torch.float32), -1 if weight is None or weight.dim() == 1 else (-2, -1)
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(dims, keepdim=True) + eps)
    if round_before_weight:
        y = y.to(x.dtype).to(dtype)
    if weight is not None:
        y = y * (weight.to(dtype) + offset)
    return y.to(x.dtype) if eager_rounding else y


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what a quantised cache or q_out stores for x, ``[..., heads, head_dim]``.

    x is divided by the scale, saturated to the finite range of dtype and rounded to nearest even. scale has one element,
    or ``[heads]``. A NaN stays a NaN in float8 and becomes 0 in int8.
    """
    quotient = x / (scale.reshape(()) if scale.numel() == 1 else scale.unsqueeze(-1))
    if dtype.is_floating_point:
        return quotient.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    return quotient.nan_to_num(0.0).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).round().to(dtype)


def rotate_into_cache_(
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
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_out: Tensor | None = None,
    q_scale: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_v: bool = False,
    eager_rounding: bool = False,
    v_norm_weight: Tensor | None = None,
    norm_weight_offset: float = 0.0,
    q_factor: Tensor | None = None,
    round_before_weight: bool = False,
    **flags,
) -> None:
    """Rotates q, in place or into q_out, and writes rotated k, and v, to a cache.

    It does what :func:`torch_rope.rotate_into_cache_` does, but a token whose position or slot is outside the cache writes
    nothing, where the operator raises IndexError.
    """
    wide, out = torch.promote_types(q.dtype, torch.float32), q if q_out is None else q_out
    # Numbers that are quantised are not rounded to the dtype of q first, unless PyTorch's operators would do so.
    q, k = (x if scale is None or eager_rounding else x.to(wide) for x, scale in ((q, q_scale), (k, k_scale)))
    norm: dict[str, Any] = {"norm_eps": norm_eps, "norm_weight_offset": norm_weight_offset}
    norm |= {"eager_rounding": eager_rounding, "round_before_weight": round_before_weight}
    if norm_v:
        v = _normalised(v, v_norm_weight, *norm.values()).to(v.dtype if v_scale is None else wide)
    given = torch.arange(k.shape[-3], device=k.device) if positions is None else positions.long()
    p = given + offset
    # Pads outside of the table take a row of NaN.
    if slots is not None and cos is not None and sin is not None and cos.dim() == 2:
        wrapped = (p < given) != (torch.full_like(given, offset) < 0)
        outside = torch.atleast_2d(slots < 0) & ~((p >= 0) & (p < cos.shape[0]) & ~wrapped)  # [batch, seq]
        cos, sin = (t[torch.where(outside, 0, p)].masked_fill(outside.unsqueeze(-1), torch.nan) for t in (cos, sin))
    angles = cos, sin, inv_freq, positions, offset
    if q_norm_weight is None or k_norm_weight is None:
        rotated_q, rotated_k = rotate_qk(q, k, *angles, q_factor=q_factor, eager_rounding=eager_rounding, **flags)
    else:
        rotated_q, rotated_k = (
            norm_rotate_qk(x, x, weight, weight, *angles, q_factor=factor, **norm, **flags)[0]
            for x, weight, factor in ((q, q_norm_weight, q_factor), (k, k_norm_weight, None))
        )
    out.copy_(rotated_q if q_scale is None else quantise(rotated_q.to(wide), q_scale, out.dtype))
    k_cache, v_cache = (c if c.dim() == 4 else c.unsqueeze(0) for c in (k_cache, v_cache))
    blocks, block_size = k_cache.shape[:2]
    if blocks * block_size == 0:
        return
    if slots is None:  # sequence b writes to block b, each token at its position
        has_cell = (p >= 0) & (p < block_size)
        slots = p + block_size * torch.arange(k.shape[0] if k.dim() == 4 else 1, device=k.device).unsqueeze(-1)
    else:
        has_cell = (slots >= 0) & (slots < blocks * block_size)
    # No shape may depend on how many tokens have a cell: the others repeat what one writes, or what the first cell holds.
    slots = torch.where(has_cell, slots, -1).long().flatten()
    repeated = torch.nn.functional.pad(slots, (0, 1), value=-2).argmax()
    tokens = torch.where(slots < 0, repeated, torch.arange(slots.shape[0], device=k.device))
    slots = slots[tokens]
    keeps = (slots < 0)[:, None, None]
    slots = torch.where(slots < 0, 0, slots)
    # The block is looked up, because Core ML would compute slots // block_size in floating-point numbers.
    block = torch.arange(blocks, device=k.device).unsqueeze(-1).expand(-1, block_size).flatten()[slots]
    at = block, slots - block * block_size
    for cache, new, scale in ((k_cache, rotated_k, k_scale), (v_cache, v, v_scale)):
        if scale is not None:
            new = quantise(new.to(wide), scale, cache.dtype)
        cache[at] = torch.where(keeps, cache[at], new.flatten(0, -3)[tokens])


def cos_sin(
    positions: Tensor, inv_freq: Tensor, *, attention_factor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of ``positions * inv_freq``, as :func:`torch_rope.cos_sin` does."""
    frequencies = inv_freq.double() if inv_freq.dim() == 1 else inv_freq.double().sum(0)
    return _tables(positions.double().unsqueeze(-1) * frequencies, attention_factor, dtype)


def axial_cos_sin(
    positions: Tensor, inv_freq: Tensor, *, attention_factor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of ``positions * inv_freq`` summed over axes, as :func:`torch_rope.axial_cos_sin` does."""
    frequencies = inv_freq.double() if inv_freq.dim() == 2 else inv_freq.double().sum(0)
    return _tables(torch.einsum("a...,ai->...i", positions.double(), frequencies), attention_factor, dtype)


def _tables(angle: Tensor, attention_factor: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    cos, sin = ((t * attention_factor).to(dtype or torch.float32) for t in (angle.cos(), angle.sin()))
    return cos, sin
