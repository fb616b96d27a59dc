"""The functions of torch_rope. Each one that rotates is a single call of an operator in ``torch.ops.rope``, so a docstring
here also describes the operator. :mod:`torch_rope.reference` has the same functions in plain PyTorch, and docs/guide/index.md
lists them by job. On a device for which torch_rope has no kernels, the operators are computed by those of PyTorch: more
slowly, with one warning.

The docstrings use these words:

- ``head_dim`` is the number of channels of a head, which is the last dimension of x.
- ``rotary_dim`` is the number of channels of a head that are rotated. They are its first channels, or those from
  channel ``rotary_start`` on. rotary_dim is even and at most head_dim. The other channels keep their values bit for bit.
- The *position* of a token is the number that its angles are computed from.
- ``inv_freq`` holds one frequency for each pair of channels, in radians per position: the angle of pair i at position p
  is ``p * inv_freq[i]``.
- To rotate a pair of channels (x, y) by the angle a is to replace it by ``(x cos a - y sin a, y cos a + x sin a)`` (Su
  et al., RoFormer, arXiv:2104.09864, equation 34).
"""

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._mistakes import always_called, is_learned, mistake_in, named, wrong_number
from ._signatures import operators
from .frequencies.kinds import is_number, on_device, powers

_OPERATORS = {signature.name: signature for signature in operators()}


@functools.lru_cache(maxsize=1024)
def _not_default(operator: str, flags: tuple) -> dict[str, Any]:
    """Returns the flags of an operator that do not have their default value, by name. Raises TypeError if one has another
    type than its default: a tensor, whose value may change, or 4.0, which a call with 4 would find in the cache."""
    signature = _OPERATORS[operator]
    each = list(zip(signature.flags, flags, signature.defaults, strict=True))
    if any(type(flag) is not type(default) for _, flag, default in each if flag is not None and default is not None):
        raise TypeError
    return {name: flag for name, flag, default in each if flag != default and (flag or default)}  # None is False


def call(
    name: str,
    args: tuple,
    flags: tuple,
    offset: int | torch.SymInt = 0,
    unknown: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Any:
    """Calls an operator with its positional arguments, one of which may be offset, and its flags in the order of its schema.

    A flag with its default value is left out, because each one costs a decode step 0.2 microseconds.
    unknown: the arguments of the caller that the operator does not have, which are an error.
    tensors: those of its keyword-only tensors that are given.
    """
    operator = _OPERATORS[name]
    if type(args[0]) is not Tensor and hasattr(args[0], "device_mesh"):
        from . import parallel  # noqa: F401  registers the rules for DTensors
    # type() is quicker than isinstance(). torch.compile shows an error that is raised here, but not what torch raises.
    compiles = is_dynamo_compiling()
    i, j, k = operator.numbers
    unusual = type(offset) is not int or not (type(flags[i]) is type(flags[j]) is type(flags[k]) is float)
    is_checked = compiles or unknown or (unusual and (isinstance(offset, Tensor) or any(map(is_learned, flags))))
    if is_checked and (mistake := mistake_in(operator, args, flags, unknown, tensors)) is not None:
        raise mistake
    given = tensors or {}
    try:
        try:
            if not compiles and flags != operator.defaults:
                given = _not_default(name, flags) | given if given else _not_default(name, flags)
        except TypeError:
            compiles = True  # or exports, or a flag has a type of its own
        if compiles:
            return operator.op(*args, **given, **dict(zip(operator.flags, flags, strict=True)))
        return operator.function(*args, **given) if given else operator.function(*args)
    except (RuntimeError, ValueError):
        if (mistake := mistake_in(operator, args, flags, unknown, tensors)) is not None:
            raise mistake from None
        raise


@named
def inv_freq(
    rotary_dim: int,
    base: float = 10000.0,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Returns the usual frequencies of RoPE, ``base ** (-2 i / rotary_dim)`` for i = 0 .. rotary_dim / 2 - 1.

    :mod:`torch_rope.frequencies` has the frequencies of models with a longer context (YaRN, LongRoPE, Llama 3.1, ...).

    Args:
        rotary_dim: how many channels of a head are rotated. It must be even.
        base: the base of the powers, often called ``rope_theta``. Default: 10000.
        dtype: the dtype of the result. float32 costs accuracy at far positions: an angle is off by up to 0.002 radians
            at position 131,072, and by 0.02 at a million. Default: float64, or two float32 parts on a device without
            float64.
        device: the device of the result. Default: PyTorch's default device.

    Returns:
        ``[rotary_dim / 2]``, in radians per position, computed in float64. If dtype is None and the device has no float64
        (Apple GPUs), ``[2, rotary_dim / 2]``, float32: two parts whose sum is the float64 number to 48 bits, which all
        functions take in its place.

    Raises ValueError if rotary_dim is odd, negative or beyond int64, or base is not positive, and TypeError if base is a
    tensor with a gradient.

    Source of the formula: Su et al., RoFormer, arXiv:2104.09864, section 3.2.2.

    Example::

        inv_freq = torch_rope.inv_freq(128, base=500000.0)  # [64]
    """
    good = isinstance(rotary_dim, torch.SymInt) or (isinstance(rotary_dim, int) and rotary_dim < 2**63)
    if not good or rotary_dim < 0 or rotary_dim % 2:
        must_be = "an even number that is at least 0 and below 2**63"
        raise ValueError(f"torch_rope.inv_freq: rotary_dim is {rotary_dim!r} but must be {must_be}")
    if not is_number(base) or not base > 0:
        raise wrong_number("torch_rope.inv_freq", "base", base, "a positive number")
    exact, device = powers(rotary_dim, base), torch.get_default_device() if device is None else device
    return on_device(exact, device) if dtype is None else exact.to(dtype=dtype).to(device)


@named
def cos_sin(
    positions: Tensor, inv_freq: Tensor, *, attention_factor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of ``positions * inv_freq``, times attention_factor: the tables that :func:`rotate` takes.

    Args:
        positions: a tensor of any shape P, integer, float32 or float64 (pixels, seconds). float16 and bfloat16 are a
            TypeError, because they hold no large position. ``torch.arange(n)`` makes a table by position for the
            positions below n.
        inv_freq: ``[rotary_dim / 2]``, float32 or float64, in radians per position, or ``[2, rotary_dim / 2]``, float32,
            which is the sum of two parts.
        attention_factor: a factor for both cos and sin (YaRN, LongRoPE). Default: 1.
        dtype: the dtype of the result. Default: float32.

    Returns:
        (cos, sin), each ``[*P, rotary_dim / 2]``. In float32, with attention_factor 1, their absolute error is at most
        5e-7 for positions below 2^24 and abs(inv_freq) <= 1. If dtype is float64, the angle is computed in float64.

    Raises:
        ValueError: a shape or a device does not fit, or attention_factor is not finite.
        TypeError: a dtype is not supported.

    Differentiable in inv_freq, and in positions if they are floating-point: to any order, in forward mode, and under
    torch.func. The gradients are computed in float32, or in float64 if positions, inv_freq or dtype is float64.

    Equivalent to :func:`torch_rope.reference.cos_sin`.

    Example::

        inv_freq = torch_rope.frequencies.default(128).inv_freq  # [64]
        cos, sin = torch_rope.cos_sin(torch.arange(8192), inv_freq)  # [8192, 64] each: a table by position
    """
    return call("cos_sin", (positions, inv_freq), (attention_factor, dtype))


@named
def axial_cos_sin(
    positions: Tensor, inv_freq: Tensor, *, attention_factor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin for tokens with a position on each of several axes, such as time, height and width.

    The angle of a pair is the sum over the axes of position times frequency. A frequency of 0 makes a pair independent
    of that axis, so inv_freq says which axes rotate which pairs.

    Args:
        positions: ``[axes, *P]``, with a dtype as in :func:`cos_sin`.
        inv_freq: ``[axes, rotary_dim / 2]``, float32 or float64, in radians per position, or
            ``[2, axes, rotary_dim / 2]``, float32, which is the sum of two parts.
        attention_factor, dtype: as in :func:`cos_sin`.

    Returns:
        (cos, sin), each ``[*P, rotary_dim / 2]``, with the error bound of :func:`cos_sin`. For a pair that has the
        frequency 0 on all axes but one they are bit for bit what cos_sin returns. If positions is
        ``[axes, batch, seq]``, the results are tables by token, as :func:`rotate` takes them.

    The errors and the derivatives are those of :func:`cos_sin`. Equivalent to :func:`torch_rope.reference.axial_cos_sin`.

    The functions of :mod:`torch_rope.multimodal` make inv_freq, as for Qwen2-VL, which has sections of 16, 24 and 24 pairs
    for time, height and width. RoPE-Mixed (Heo et al., arXiv:2403.13298) has a frequency on every axis for every pair.

    Example::

        of_text, _ = torch_rope.frequencies.default(128, 1e6)  # [64]
        inv_freq = torch_rope.multimodal.sections(of_text, [16, 24, 24])  # [3, 64]
        # positions [3, batch, seq] -> tables [batch, seq, 64]
        cos, sin = torch_rope.axial_cos_sin(positions, inv_freq)
        q, k = torch_rope.rotate_qk(q, k, cos, sin)
    """
    return call("axial_cos_sin", (positions, inv_freq), (attention_factor, dtype))


@always_called
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
    rotary_start: int = 0,
    eager_rounding: bool = False,
    **unknown: NoReturn,
) -> Tensor:
    """Rotates rotary_dim channels of each head, by default the first ones, by the angles of its token.

    The angles come from exactly one source: either cos and sin, or inv_freq.

    Args:
        x: ``[seq, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``, with any strides. float16, bfloat16,
            float32, or (on CPU and CUDA) float64. Pass a ``[batch, heads, seq, head_dim]`` tensor as
            ``x.transpose(1, 2)``, and a tensor without a head axis as ``x.unsqueeze(-2)``.
        cos, sin: tables from :func:`cos_sin`, float32 or the dtype of x. Tables by position,
            ``[max_position, rotary_dim / 2]``, have a row for each position. Tables by token,
            ``[batch or 1, seq, rotary_dim / 2]``, have a row for each token; tables by head,
            ``[batch or 1, seq, heads, rotary_dim / 2]``, have a row for each token and head. With either of the two,
            positions must be None and offset 0.
        inv_freq: ``[rotary_dim / 2]``, float32 or float64, in radians per position, or ``[2, rotary_dim / 2]``, float32,
            which is the sum of two parts (:func:`inv_freq` makes it). The kernel computes the angles.
        positions: ``[seq]``, ``[1, seq]`` or ``[batch, seq]``, int32 or int64. The position of token s is
            ``positions[..., s] + offset``, or ``s + offset`` if positions is None. With tables by position it must be
            at least 0 and below max_position. With inv_freq it may be negative and has no upper limit; the error bound
            of :func:`cos_sin`, 5e-7, holds below 2^24, and above that the error grows with the position.
        offset: an integer that is added to all positions, such as the number of tokens in a KV cache. Add a tensor to
            positions instead. Default: 0.
        attention_factor: a factor for the rotated channels (YaRN, LongRoPE). Default: 1.
        interleaved: which channels form a pair. If False, i and i + rotary_dim / 2 (half-split: NeoX, ``rotate_half``).
            If True, 2i and 2i + 1 (GPT-J, GGUF llama). Default: False.
        inverse: if True, rotates by the negative angles, which is the transpose of the rotation. Default: False.
        rotary_start: the first channel that is rotated (DeepSeek: the channels without a position). The channels
            ``rotary_start .. rotary_start + rotary_dim - 1`` are rotated. Default: 0.
        eager_rounding: if True, the result has the bits of the formula in plain PyTorch operators: the dtype of each
            product and each sum is the one that ``torch.promote_types`` gives for x and cos, and each of them is rounded
            to it. The backward has the bits of autograd through that formula, in which x is converted to this dtype
            once. attention_factor multiplies cos and sin first. Default: False.

    Returns:
        A tensor with the shape and dtype of x, and the strides of ``torch.empty_like(x)``. The arithmetic is float32
        (float64 if x is float64), and each element is rounded once, at the end, unless eager_rounding is True.

    Raises:
        ValueError: a shape, a device or attention_factor does not fit, or there is not exactly one angle source.
        TypeError: a dtype is not supported.
        IndexError: a position is outside the table. On a GPU, a position in a tensor is checked in the kernel instead;
            docs/cuda.md and docs/metal.md say what happens there.

    Differentiable in x, cos, sin and inv_freq: to any order, in forward mode, and under torch.func. The gradients of cos
    and sin are sums over heads and tokens, in float32 or better, in an order that does not depend on the number of
    threads. The backward of an inv_freq that requires grad makes tables by token with :func:`cos_sin`; if several layers
    share it, make the tables once and pass them.

    Equivalent to :func:`torch_rope.reference.rotate`.

    Example::

        x = torch.randn(2, 5, 8, 128)  # [batch, seq, heads, head_dim]
        inv_freq = torch_rope.frequencies.default(128).inv_freq  # [64]
        y = torch_rope.rotate(x, inv_freq=inv_freq)  # token s has position s
        y = torch_rope.rotate(x, inv_freq=inv_freq, offset=100)  # token s has position 100 + s
        cos, sin = torch_rope.cos_sin(torch.arange(4096), inv_freq)  # [4096, 64] each
        y = torch_rope.rotate(x, cos, sin, positions=torch.tensor([0, 1, 2, 0, 1]))  # two packed sequences
    """
    args = x, cos, sin, inv_freq, positions, offset
    flags = attention_factor, interleaved, inverse, rotary_start, eager_rounding
    return call("rotate", args, flags, offset, unknown)


@always_called
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
    rotary_start: int = 0,
    eager_rounding: bool = False,
    **unknown: NoReturn,
) -> None:
    """Rotates x in place: writes to x what :func:`rotate` returns.

    The arguments are those of :func:`rotate`. x may be a slice of a packed tensor. Its elements must not share memory
    with each other or with another argument.

    Raises the errors of :func:`rotate`; ValueError, too, if memory that is written is shared; and RuntimeError if grad
    mode is on and an argument requires grad, because the function has no gradient.

    Equivalent to ``x.copy_(rotate(x, ...))``.
    """
    args = x, cos, sin, inv_freq, positions, offset
    flags = attention_factor, interleaved, inverse, rotary_start, eager_rounding
    call("rotate_", args, flags, offset, unknown)


@always_called
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
    rotary_start: int = 0,
    eager_rounding: bool = False,
    q_factor: Tensor | None = None,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k of an attention layer in one launch.

    The angles of a token are read or computed once for all heads of q and k.

    Args:
        q: as x in :func:`rotate`.
        k: as q, with the same dtype, batch, seq and head_dim. Its number of heads (grouped-query attention) and its
            strides may differ. It may have 0 heads: ``q[..., :0, :]`` in a layer that reads the cache of another one.
        q_factor: float32, ``[seq]``, ``[batch or 1, seq]`` or ``[batch or 1, seq, heads]``, with any strides. All head_dim
            channels of rotated q are multiplied by that of their token, or of their head, before they are rounded: the
            attention temperature of Llama 4, Ministral 3 and Mistral Large 3. With eager_rounding, rotated q is rounded
            first, and the product again. Default: None, for no factor.

    All other arguments, and the errors, are those of :func:`rotate`.

    Returns:
        (q, k), rotated, each with the shape and dtype of its argument.

    Differentiable like :func:`rotate`, and in q_factor. The gradients of cos, sin and inv_freq are sums over the heads of
    q and of k. If only one of q and k requires grad, only its result does.

    Equivalent to ``rotate(q, ...), rotate(k, ...)``, bit for bit if there is no q_factor.

    Example::

        # q [batch, seq, 32, 128], k [batch, seq, 8, 128]
        q, k = torch_rope.rotate_qk(q, k, inv_freq=inv_freq)  # a prompt
        q, k = torch_rope.rotate_qk(q, k, inv_freq=inv_freq, offset=cache_length)  # a decode step
    """
    args = q, k, cos, sin, inv_freq, positions, offset
    flags = attention_factor, interleaved, inverse, rotary_start, eager_rounding
    return call("rotate_qk", args, flags, offset, unknown, None if q_factor is None else {"q_factor": q_factor})


@always_called
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
    rotary_start: int = 0,
    eager_rounding: bool = False,
    q_factor: Tensor | None = None,
    **unknown: NoReturn,
) -> None:
    """Rotates q and k in place: writes to them what :func:`rotate_qk` returns.

    The arguments are those of :func:`rotate_qk`, and the errors those of :func:`rotate_`. q and k may be slices of one
    packed qkv tensor. Their elements must not share memory with each other or with another argument.

    Equivalent to ``rotate_(q, ...); rotate_(k, ...)``, bit for bit if there is no q_factor.

    Example::

        q, k, v = qkv.split([32, 8, 8], dim=-2)  # qkv [batch, seq, 48, 128]
        torch_rope.rotate_qk_(q, k, inv_freq=inv_freq)  # changes qkv
    """
    args = q, k, cos, sin, inv_freq, positions, offset
    flags = attention_factor, interleaved, inverse, rotary_start, eager_rounding
    call("rotate_qk_", args, flags, offset, unknown, None if q_factor is None else {"q_factor": q_factor})


@always_called
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
    norm_weight_offset: float = 0.0,
    q_factor: Tensor | None = None,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    rotary_start: int = 0,
    eager_rounding: bool = False,
    round_before_weight: bool = False,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor]:
    """RMS-normalises q and k and then rotates them, in one pass: the QK-norm of Qwen3, Gemma, OLMo-2 and Wan.

    Args:
        q, k: as in :func:`rotate_qk`.
        q_norm_weight, k_norm_weight: float32 or the dtype of q, with any strides. ``[head_dim]`` normalises each head by
            itself (Qwen3, Gemma). ``[heads, head_dim]``, with the heads of q or of k, normalises all heads of a token
            together (OLMo-2, Wan, LTX, MiniMax-M2): pass ``weight.unflatten(-1, (heads, head_dim))``. Both weights have
            the same number of dimensions.
        norm_eps: the number that is added to the mean of the squares. Default: 1e-6.
        norm_weight_offset: the number that is added to the weights, in float32 (float64 if q is float64): 1 for a norm
            that multiplies by ``1 + weight`` (Gemma, Qwen3-Next, Qwen3.5). Default: 0.
        q_factor: as in :func:`rotate_qk`.
        eager_rounding: if True, the result of the norm is rounded to the dtype of q before the rotation, which then
            rounds as in :func:`rotate`: as a model in plain PyTorch. At most one element in 10,000 differs from that
            model's, by one rounding, because the squares are summed in another order. Default: False.
        round_before_weight: with eager_rounding, where the norm rounds. If False, once, after the weight: Gemma's norm and
            ``F.rms_norm``. If True, before the weight too: the norm of Llama and Qwen3. Then the weights must have the
            dtype of q. Default: False.

    All other arguments are those of :func:`rotate`.

    The norm is taken over all head_dim channels of a head, or over the heads * head_dim channels of a token, for q and
    for k separately (Zhang and Sennrich, arXiv:1910.07467, equation 4). Channels past rotary_dim are normalised, but they
    are neither rotated nor multiplied by attention_factor. Without eager_rounding nothing is rounded between the norm and
    the rotation. The squares are summed in float32 (float64 if q is float64), and overflow for the same values as in
    PyTorch's rms_norm.

    Returns:
        (q, k), each with the shape and dtype of its argument.

    Raises:
        ValueError, TypeError, IndexError: as :func:`rotate` does, and ValueError if norm_eps is negative or not finite,
            if norm_weight_offset is not finite, or if round_before_weight is True without eager_rounding.

    Differentiable in q, k, both weights, q_factor, cos, sin and inv_freq: to any order, in forward mode, and under
    torch.func. The first derivatives for q, k and the weights, too, are computed in one pass; the others cost more. With
    eager_rounding they are the same. Sums over tokens have an order that does not depend on the number of threads.

    Equivalent to :func:`torch_rope.reference.norm_rotate_qk`.

    Example::

        # q [batch, seq, 32, 128], k [batch, seq, 8, 128], norm weights [128]
        q, k = torch_rope.norm_rotate_qk(q, k, q_norm.weight, k_norm.weight, inv_freq=inv_freq)  # Qwen3
        q, k = torch_rope.norm_rotate_qk(
            q, k, q_norm.weight, k_norm.weight, inv_freq=inv_freq, norm_weight_offset=1.0
        )  # Gemma 3, Qwen3.5
        q_weight, k_weight = q_norm.weight.view(32, 128), k_norm.weight.view(8, 128)  # OLMo-2
        q, k = torch_rope.norm_rotate_qk(q, k, q_weight, k_weight, inv_freq=inv_freq)
    """
    args = q, k, q_norm_weight, k_norm_weight, cos, sin, inv_freq, positions, offset
    flags = (
        norm_eps,
        norm_weight_offset,
        attention_factor,
        interleaved,
        rotary_start,
        eager_rounding,
        round_before_weight,
    )
    return call("norm_rotate_qk", args, flags, offset, unknown, None if q_factor is None else {"q_factor": q_factor})


@always_called
def norm_rotate_qk_(
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
    norm_weight_offset: float = 0.0,
    q_factor: Tensor | None = None,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    rotary_start: int = 0,
    eager_rounding: bool = False,
    round_before_weight: bool = False,
    **unknown: NoReturn,
) -> None:
    """RMS-normalises q and k and rotates them in place: writes to them what :func:`norm_rotate_qk` returns.

    The arguments are those of :func:`norm_rotate_qk`, and the errors are also those of :func:`rotate_`. q and k may be
    slices of one packed tensor.

    Equivalent to ``q_new, k_new = norm_rotate_qk(q, k, ...); q.copy_(q_new); k.copy_(k_new)``.
    """
    args = q, k, q_norm_weight, k_norm_weight, cos, sin, inv_freq, positions, offset
    flags = (
        norm_eps,
        norm_weight_offset,
        attention_factor,
        interleaved,
        rotary_start,
        eager_rounding,
        round_before_weight,
    )
    call("norm_rotate_qk_", args, flags, offset, unknown, None if q_factor is None else {"q_factor": q_factor})


@always_called
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
    offset: int | torch.SymInt = 0,
    slots: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_out: Tensor | None = None,
    q_scale: Tensor | None = None,
    norm_eps: float = 1e-6,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    norm_v: bool = False,
    rotary_start: int = 0,
    eager_rounding: bool = False,
    v_norm_weight: Tensor | None = None,
    norm_weight_offset: float = 0.0,
    q_factor: Tensor | None = None,
    round_before_weight: bool = False,
    **unknown: NoReturn,
) -> None:
    """Rotates q, in place or into q_out, and writes rotated k, and v, to a KV cache, in one launch.

    k itself is not rotated: attention reads the rotated k from the cache. A call takes any number of tokens: one in a decode
    step, or a whole prompt. With both norm weights, q and k are normalised first, as in :func:`norm_rotate_qk`.

    Two tokens of a call must not write the same cell. On a CPU that is an IndexError; on a GPU the cell may then mix the
    two: k of one and v of the other, or channels of both in one head. Without slots, tokens of one sequence that share a position write the same
    cell, such as the padding of a left-padded batch and its first real token. Give padding the slot -1.
    :func:`torch_rope.slots_of_window` makes the slots of a sliding window.

    A cache and q_out may be *quantised*: float8_e4m3fn, float8_e5m2 or int8, with a scale. They store a number x as
    x / scale, in float32 (float64 if q is float64), saturated to the finite range of the dtype (448, 57344; -128 to 127)
    and rounded once, to nearest even; attention multiplies what it reads by the scale. Infinities are saturated too. A
    NaN stays a NaN in float8 and becomes 0 in int8. With eager_rounding, x is rounded to the dtype of q before it is
    divided. The scale is read by the kernel, never by the host, so a CUDA graph uses its new value.

    Args:
        q: ``[seq, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``, with any strides. It is written, unless there
            is a q_out.
        k: as q, with kv_heads heads, which may be 0. It is only read.
        v: as k, or with heads and a head_dim of its own, ``[batch, seq, v_heads, v_dim]``: whatever belongs to a token,
            such as the latent of multi-head latent attention (DeepSeek). It is only read. v_heads may be 0. q, k and v
            may be slices of one packed tensor.
        k_cache, v_cache: ``[blocks, block_size, kv_heads, head_dim]``, or ``[max_seq, kv_heads, head_dim]`` for a cache
            of one block. Both have the same blocks and block_size, the heads and head_dim of k and of v, the dtype of q
            or each one of a quantised cache, and any strides; they may be slices of one tensor. Pass a head-major cache
            transposed: a ``[kv_heads, max_seq, head_dim]`` cache as ``cache.transpose(0, 1)``, a ``[batch, kv_heads,
            max_seq, head_dim]`` cache (StaticCache of transformers) as ``cache.transpose(1, 2)``, and vLLM's ``[blocks,
            kv_heads, block_size, 2 * head_dim]`` as ``cache.transpose(1, 2).split(head_dim, -1)``.
        cos, sin, inv_freq: as in :func:`rotate`.
        positions, offset: as in :func:`rotate`. Without slots they also choose the cell of each token, which must be at
            least 0 and below block_size. With tables by token or by head that is all they do, so they must be None and 0
            if slots are given. A decode step may pass the length of its cache, a ``[1]`` tensor, as positions.
        slots: ``[batch, seq]``, or ``[seq]`` if batch is 1, int32 or int64: the cell of the cache that each token is
            written to, ``block * block_size + index in the block``. A token with a negative slot is a pad: it writes no
            cell and its position is never an error, but if the table has no row for that position, the rotated channels
            of its q become NaN. If slots is None, sequence b of the batch writes to block b, each token to the cell of its
            position.
        q_norm_weight, k_norm_weight, norm_eps: as in :func:`norm_rotate_qk`. Pass both weights or neither.
        k_scale, v_scale, q_scale: float32 tensors, one element or ``[heads]`` of that cache or of q. Pass one for each
            quantised cache, and for a quantised q_out, and no other.
        q_out: the rotated q is written here, and q is only read. It has the shape of q, any strides, and the dtype of q
            or one of a quantised cache. It may be q itself.
        norm_v: RMS-normalise each head of v over its v_dim channels, with norm_eps: without a weight (Gemma 4), or with
            v_norm_weight.
        v_norm_weight: ``[v_dim]``, float32 or the dtype of q, for all heads of v: the norm of the latent of multi-head
            latent attention (DeepSeek, GLM, Mistral 4, Kimi). It needs norm_v.
        attention_factor, interleaved, rotary_start: as in :func:`rotate`.
        norm_weight_offset, round_before_weight: as in :func:`norm_rotate_qk`, for the norms of q, k and v.
        eager_rounding: as in :func:`norm_rotate_qk` with norms, and else as in :func:`rotate`.
        q_factor: as in :func:`rotate_qk`.

    Raises:
        ValueError: arguments do not fit together, as above; or a tensor that is written shares memory with itself or with
            another argument (between a cache and q, q_out, k or v it is enough that their address ranges overlap).
        TypeError: a dtype is not supported.
        IndexError: a position is outside the table, a position or a slot is outside the cache, or two tokens write one
            cell. Nothing is written then. On a GPU, positions and slots in tensors are checked in the kernel instead;
            docs/cuda.md and docs/metal.md say what happens there.
        NotImplementedError: a cache or q_out on an Apple GPU is float8, which Metal lacks.
        RuntimeError: grad mode is on and an argument requires grad. The function has no gradient.

    Equivalent to :func:`torch_rope.reference.rotate_into_cache_`.

    Example::

        # One decode step with a cache of transformers. q [batch, 1, 32, 128], k and v [batch, 1, 8, 128],
        # k_cache and v_cache [batch, 8, max_seq, 128].
        torch_rope.rotate_into_cache_(
            q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2),
            inv_freq=inv_freq, offset=cache_length,
        )
    """
    args = q, k, v, k_cache, v_cache, cos, sin, inv_freq, positions, offset, slots, q_norm_weight, k_norm_weight
    flags = (norm_eps, attention_factor, interleaved, norm_v, rotary_start, eager_rounding,
             norm_weight_offset, round_before_weight)  # fmt: skip
    tensors = {}  # a loop would take 0.2 microseconds
    if k_scale is not None:
        tensors["k_scale"] = k_scale
    if v_scale is not None:
        tensors["v_scale"] = v_scale
    if q_out is not None:
        tensors["q_out"] = q_out
    if q_scale is not None:
        tensors["q_scale"] = q_scale
    if v_norm_weight is not None:
        tensors["v_norm_weight"] = v_norm_weight
    if q_factor is not None:
        tensors["q_factor"] = q_factor
    call("rotate_into_cache_", args, flags, offset, unknown, tensors)
