"""The operators as functions. Each is one call of ``torch.ops.rope.*``; what is said here holds for both.
:mod:`torch_rope.reference` has the same functions in plain torch.

Words: head_dim is the last dimension of x; rotary_dim, even and at most head_dim, is how many of its first channels
are rotated, and the rest pass through bit for bit. inv_freq is in radians per position. A pair of channels (x, y) at
angle a becomes ``(x cos a - y sin a, y cos a + x sin a)`` (Su et al., RoFormer, arXiv:2104.09864, equation 34).
"""

import torch
from torch import Tensor

_ops = torch.ops.rope


def _flags(attention_factor: float, interleaved: bool, inverse: bool) -> dict:
    """The keyword arguments that are not at their default: each that is passed costs a decode step 0.2 microseconds."""
    if attention_factor == 1.0 and not interleaved and not inverse:
        return {}
    return {"attention_factor": attention_factor, "interleaved": interleaved, "inverse": inverse}


def _norm_flags(norm_eps: float, attention_factor: float, interleaved: bool) -> dict:
    if norm_eps == 1e-6 and attention_factor == 1.0 and not interleaved:
        return {}
    return {"norm_eps": norm_eps, "attention_factor": attention_factor, "interleaved": interleaved}


def inv_freq(rotary_dim: int, base: float = 10000.0, *, device: torch.device | str | None = None) -> Tensor:
    """Frequencies ``base ** (-2 i / rotary_dim)`` for i in 0 .. rotary_dim / 2 - 1, in radians per position.

    Computed in float64 and rounded once to float32. Raises ValueError for an odd or negative rotary_dim or a base
    that is not positive.
    """
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"torch_rope.inv_freq: rotary_dim is {rotary_dim}, needs an even number that is not negative")
    if not base > 0:
        raise ValueError(f"torch_rope.inv_freq: base is {base}, needs a positive number")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / max(rotary_dim, 1)
    return (base**-exponents).float().to(torch.get_default_device() if device is None else device)


def cos_sin(
    positions: Tensor, inv_freq: Tensor, *, attention_factor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of ``positions * inv_freq``, times attention_factor: the tables that ``rotate`` takes.

    Args:
        positions: any shape P, integer or floating (pixels, seconds). ``torch.arange(n)`` makes the table of n
            positions.
        inv_freq: ``[rotary_dim / 2]``, float32 or float64, radians per position.
        attention_factor: multiplies both (YaRN, LongRoPE).
        dtype: of the result, float32 unless said.

    Returns:
        (cos, sin), each ``[*P, rotary_dim / 2]``. They are right to 5e-7 for positions below 2^24 and abs(inv_freq) <= 1,
        where an angle multiplied in float32 is off by 4e-3 at position 131071 and by 0.5 at 2^24. With dtype float64
        the angle is computed in float64.

    Equivalent to :func:`torch_rope.reference.cos_sin`.

    Differentiable in inv_freq, and in positions where they are floating, to any order, in forward mode, and under
    torch.func; computed in float32, or float64 where anything is.
    """
    return _ops.cos_sin.default(positions, inv_freq, attention_factor=attention_factor, dtype=dtype)


def axial_cos_sin(
    positions: Tensor, inv_freq: Tensor, *, attention_factor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`cos_sin` of positions on several axes (time, row and column of an image): the angle is the sum over them.

    A frequency of 0 leaves an axis out of a pair, so inv_freq says which axes turn which pairs. The result is a table by
    token: with positions ``[axes, batch, seq]`` it is what ``rotate`` takes.

    Qwen2-VL (sections of 16, 24 and 24 pairs for time, row and column): inv_freq is ``[3, 64]``, its first row the
    frequencies of the pairs 0 to 15 and 0 elsewhere, its second those of 16 to 39, its third those of 40 to 63; positions
    are ``[3, batch, seq]``.

    A vision transformer with rows and columns: inv_freq is ``[2, rotary_dim / 2]``, the first half of the pairs with
    frequencies in the row of rows, the other half in that of columns; positions are ``[2, patches]``. With frequencies
    everywhere, learned for instance, it is RoPE-Mixed (Heo et al., arXiv:2403.13298).

    Args:
        positions: ``[axes, *P]``, integer or floating.
        inv_freq: ``[axes, rotary_dim / 2]``, float32 or float64, radians per position.
        attention_factor, dtype: as in :func:`cos_sin`.

    Returns:
        (cos, sin), each ``[*P, rotary_dim / 2]``, as right as those of :func:`cos_sin`; where all axes but one have
        frequency 0, the same to the bit.

    Equivalent to :func:`torch_rope.reference.axial_cos_sin`.

    Differentiable as :func:`cos_sin` is.
    """
    return _ops._axial_cos_sin.default(positions, inv_freq, attention_factor=attention_factor, dtype=dtype)


def rotate(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int | torch.SymInt = 0,
    *,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """x with the first rotary_dim channels of each head rotated by the angles of its token.

    Args:
        x: ``[seq, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``; float16, bfloat16, float32 or float64 (CPU,
            CUDA). Any strides: pass ``[batch, heads, seq, head_dim]`` as ``x.transpose(1, 2)``, a tensor without a
            head axis as ``x.unsqueeze(2)``.
        cos, sin: 2-D ``[max_position, rotary_dim / 2]``, a row per position; or 3-D ``[batch or 1, seq,
            rotary_dim / 2]``, a row per token, with positions None and offset 0. float32 or x's dtype.
        inv_freq: instead of cos and sin, ``[rotary_dim / 2]``, float32 or float64: the angle is computed in the kernel.
        positions: int32 or int64, ``[seq]``, ``[1, seq]`` or ``[batch, seq]``. Token s is at
            ``positions[..., s] + offset``, without positions at ``s + offset``. With inv_freq they may be negative and
            have no upper end (the 5e-7 of :func:`cos_sin` hold below 2^24; above, the error grows with the position).
        attention_factor: multiplies the rotated channels.
        interleaved: pairs (2i, 2i + 1) (GPT-J, GGUF llama) instead of (i, i + rotary_dim / 2) (NeoX, ``rotate_half``).
        inverse: rotate by the negative angle, which is the transpose.

    Equivalent to :func:`torch_rope.reference.rotate`.

    The arithmetic is float32 (float64 for float64 x) with one rounding at the end. The result has the strides of
    ``torch.empty_like(x)``.

    Differentiable in x, cos, sin and inv_freq to any order, in forward mode, and under torch.func. The gradients of cos
    and sin are summed over heads and tokens in the kernel, to float32 or better, in an order that the number of threads
    does not change. inv_freq that requires grad is the same as per-token tables from :func:`cos_sin`; where layers share
    it, make the tables once.

    Raises:
        ValueError: shapes, devices, or not exactly one angle source.
        TypeError: dtypes.
        IndexError: a position outside the table (CPU).
    """
    return _ops.rotate.default(
        x, cos, sin, inv_freq, positions, offset, **_flags(attention_factor, interleaved, inverse)
    )


def rotate_(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int | torch.SymInt = 0,
    *,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> None:
    """:func:`rotate`, written to x itself. Returns nothing.

    x may be a slice of a packed tensor, but no two of its elements may share memory, nor may it overlap what is read
    (ValueError).
    It has no gradient: RuntimeError where grad is on and an argument requires it.

    Equivalent to ``x.copy_(rotate(x, ...))``.
    """
    _ops.rotate_.default(x, cos, sin, inv_freq, positions, offset, **_flags(attention_factor, interleaved, inverse))


def rotate_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int | torch.SymInt = 0,
    *,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """q and k of one attention layer, rotated in one launch; the angles of a token are read or computed once for all
    heads of both.

    q and k are as x in :func:`rotate`, with their own strides and numbers of heads (grouped-query attention) and one
    dtype;
    batch, seq and head_dim are the same. All other arguments are those of :func:`rotate`.

    Equivalent to ``rotate(q, ...), rotate(k, ...)``, bit for bit; a gradient of the tables sums over the heads of both.
    """
    return _ops.rotate_qk.default(
        q, k, cos, sin, inv_freq, positions, offset, **_flags(attention_factor, interleaved, inverse)
    )


def rotate_qk_(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int | torch.SymInt = 0,
    *,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> None:
    """:func:`rotate_qk`, written to q and k themselves. Returns nothing.

    q and k may be slices of one packed qkv tensor, but may not overlap each other, themselves, or what is read
    (ValueError).
    It has no gradient: RuntimeError where grad is on and an argument requires it.

    Equivalent to ``rotate_(q, ...); rotate_(k, ...)``, bit for bit.
    """
    _ops.rotate_qk_.default(
        q, k, cos, sin, inv_freq, positions, offset, **_flags(attention_factor, interleaved, inverse)
    )


def norm_rotate_qk(
    q: Tensor,
    k: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int | torch.SymInt = 0,
    *,
    norm_eps: float = 1e-6,
    attention_factor: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """q and k, each head RMS-normalised (Zhang and Sennrich, arXiv:1910.07467, equation 4) and then rotated, in one pass:
    the QK-norm of Qwen3 and Gemma 3.

    Args:
        q, k: as in :func:`rotate_qk`.
        q_norm_weight, k_norm_weight: ``[head_dim]``, any stride, float32 or q's dtype. A weight that is stored as a
            difference from one (Gemma) is passed as ``1 + weight``.
        norm_eps: added to the mean of the squares.

    All other arguments are those of :func:`rotate`.

    Equivalent to :func:`torch_rope.reference.norm_rotate_qk`: nothing is rounded between the norm and the rotation.

    The squares are summed in float32 (float64 for float64 q), and overflow where those of torch's rms_norm do.

    The norm is over all head_dim channels; those past rotary_dim are normalised and not rotated, nor multiplied by
    attention_factor. Differentiable in q, k and both weights to any order, the first in one pass too; in forward mode
    and under torch.func; not in cos, sin and inv_freq (NotImplementedError). The gradients of the weights are summed in
    an order that the number of threads does not change.

    Raises: what :func:`rotate` does.
    """
    return _ops.norm_rotate_qk.default(
        q,
        k,
        q_norm_weight,
        k_norm_weight,
        cos,
        sin,
        inv_freq,
        positions,
        offset,
        **_norm_flags(norm_eps, attention_factor, interleaved),
    )


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
    offset: int | torch.SymInt = 0,
    slots: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    attention_factor: float = 1.0,
    interleaved: bool = False,
) -> None:
    """k itself stays unrotated: the rotated k is in the cache, and attention reads it from there. Where the rotated k is
    needed beside the cache, call :func:`rotate_qk` (or :func:`norm_rotate_qk`) and write k and v to the cache yourself.

    In one launch: q is rotated in place, rotated k is written to k_cache and v to v_cache. With both norm weights, q and
    k are normalised first, as in :func:`norm_rotate_qk`. Returns nothing. One token or a whole prompt.

    Args:
        q: ``[seq, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``, any strides.
        k, v: as q, with kv_heads; only read. q, k and v may be slices of one packed tensor.
        k_cache, v_cache: ``[blocks, block_size, kv_heads, head_dim]``, or ``[max_seq, kv_heads, head_dim]`` (one block),
            any strides; q's dtype; one shape. A head-major cache is passed transposed: ``[kv_heads, max_seq,
            head_dim]`` as ``cache.transpose(0, 1)``, ``[batch, kv_heads, max_seq, head_dim]`` (transformers'
            StaticCache) as ``cache.transpose(1, 2)``. A paged cache (vLLM) is passed as it is.
        positions, offset: as in :func:`rotate`.
        slots: int32 or int64, ``[batch, seq]``, or ``[seq]`` with batch 1: ``block * block_size + place``. A negative
            slot writes nothing (padding), though q is rotated still, so its position must be valid. The slots of a call
            should differ: of equal ones any may win, not always the same in both caches. Without slots row b of the
            batch writes block b, at its position.
        q_norm_weight, k_norm_weight, norm_eps: as in :func:`norm_rotate_qk`; both or neither.

    cos, sin (3-D ones need slots), inv_freq, attention_factor and interleaved are those of :func:`rotate`.

    Equivalent to :func:`torch_rope.reference.rotate_into_cache`.

    No gradient: RuntimeError where grad is on and an argument requires it.

    Raises:
        ValueError: shapes, devices, not exactly one angle source, one norm weight without the other, memory shared by
            what is written with itself or anything else (for q, k, v and a cache: address ranges that overlap).
        TypeError: dtypes.
        IndexError: a position outside the table, or a position or slot outside the cache (CPU). Nothing is written then.
    """
    _ops.rotate_into_cache_.default(
        q,
        k,
        v,
        k_cache,
        v_cache,
        cos,
        sin,
        inv_freq,
        positions,
        offset,
        slots,
        q_norm_weight,
        k_norm_weight,
        **_norm_flags(norm_eps, attention_factor, interleaved),
    )
