"""The kinds of frequencies: one function for each."""

import math
from array import array
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._mistakes import is_learned, named, wrong_number


class Frequencies(NamedTuple):
    """The frequencies of a model, and the factor that goes with them."""

    inv_freq: Tensor  # [rotary_dim / 2], float64 on the CPU, radians per position
    attention_factor: float  # multiplies the rotated channels, or cos and sin

    def to(self, device: torch.device | str) -> "Frequencies":
        """Returns the same with inv_freq on a device. If the device has no float64 (Apple GPUs), inv_freq becomes
        ``[2, rotary_dim / 2]``, float32: two parts whose sum is the float64 number to 48 bits."""
        return self._replace(inv_freq=on_device(self.inv_freq, device))


def in_two_parts(x: Tensor) -> Tensor:
    """Returns float64 numbers as two float32 parts, stacked first, which add up to them to 48 bits."""
    high = x.float()
    return torch.stack([high, (x - high).float()])


def has_float64(device: torch.device | str) -> bool:
    """Returns whether a device has float64. Of those that the operators run on, only Apple GPUs do not."""
    return torch.device(device).type != "mps"


def on_device(inv_freq: Tensor, device: torch.device | str) -> Tensor:
    """Returns float64 frequencies ``[..., pairs]`` on a device, in two parts, ``[..., 2, pairs]``, if it has no float64."""
    return (inv_freq if has_float64(device) else in_two_parts(inv_freq).movedim(0, -2)).to(device)


def is_rounded(theirs: Tensor, ours: Tensor) -> bool:
    """Returns whether theirs may be these frequencies, computed in float32 or better and rounded to another dtype."""
    if theirs.shape != ours.shape or not theirs.is_floating_point():
        return False
    if theirs.is_meta or hasattr(theirs, "fake_mode"):  # a fake tensor has no numbers
        return True
    dtype = torch.finfo(theirs.dtype)
    return torch.allclose(theirs.cpu().double(), ours, rtol=dtype.eps + 2**-19, atol=dtype.tiny * dtype.eps)


def _require(good: bool, function: str, name: str, value: Any, must_be: str) -> None:
    """Raises ValueError, or TypeError if it is learned, about the argument `name` of `function` unless its value is good."""
    if not good:
        raise wrong_number(f"torch_rope.frequencies.{function}", name, value, must_be)


def is_number(value: Any) -> bool:
    """Returns whether a value is a real number, or a tensor of one that is not learned, and no truth value or text."""
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() < 1024  # float64 has no larger ones
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not is_learned(value))


def _require_numbers(function: str, good: Callable[[Any], bool], must_be: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        _require(is_number(value) and bool(good(value)), function, name, value, must_be)


def _require_positive(function: str, **arguments: float) -> None:
    _require_numbers(function, lambda value: 0 < value < math.inf, "a positive number", **arguments)


def _require_scale(function: str, factor: float) -> None:
    _require_numbers(function, lambda value: 1 <= value < math.inf, "a number that is at least 1", factor=factor)


# The constructors of torch may be wrapped to make floating-point tensors of another dtype, as deepspeed.zero.Init does.
# So numbers begin as integers, or as the bytes of float64.


def float64_range(*bounds: int) -> Tensor:
    """Returns range(*bounds) as a float64 tensor on the CPU."""
    return torch.arange(*bounds, device="cpu").double()


def float64(numbers: Sequence) -> Tensor:
    """Returns numbers, or lists of numbers, as a float64 tensor on the CPU."""
    if isinstance(numbers[0], list):
        return torch.stack([*map(float64, numbers)])
    return torch.frombuffer(array("d", numbers), dtype=torch.float64)


def powers(rotary_dim: int, base: float) -> Tensor:
    """Returns ``base ** (-2 i / rotary_dim)`` for i = 0, 1, ... while 2 i < rotary_dim, float64 on the CPU."""
    return float(base) ** -(float64_range(0, rotary_dim, 2) / max(rotary_dim, 1))


def _require_size(function: str, name: str, value: int) -> None:
    good = isinstance(value, int) and 0 < value < 2**63
    _require(good, function, name, value, "a positive integer below 2**63")


def _powers(function: str, rotary_dim: int, base: float, name: str = "rotary_dim") -> Tensor:
    """Returns f, as the docstring of the module defines it."""
    _require_size(function, name, rotary_dim)
    _require_positive(function, base=base)
    return powers(rotary_dim, base)


@named
def partial_rotary_dim(head_dim: int, partial_rotary_factor: float) -> int:
    """Returns how many channels of a head are rotated: ``int(head_dim * partial_rotary_factor)``, as in transformers.

    If the number is odd, one more channel is rotated (see the docstring of the module), so it must be less than head_dim.
    Raises ValueError if it is not, if the number is less than 1, or if partial_rotary_factor is not in (0, 1].
    """
    function, part = "partial_rotary_dim", partial_rotary_factor
    _require_size(function, "head_dim", head_dim)
    _require(is_number(part) and 0 < part <= 1, function, "partial_rotary_factor", part, "a number in (0, 1]")
    rotary_dim = int(head_dim * part)
    _require(rotary_dim > 0, function, "head_dim * partial_rotary_factor", head_dim * part, "at least 1")
    _require(rotary_dim < head_dim or head_dim % 2 == 0, function, "head_dim", head_dim, "an even number to rotate all")
    return rotary_dim


@named
def default(rotary_dim: int, base: float = 10000.0) -> Frequencies:
    """Returns the frequencies of RoFormer (arXiv:2104.09864): ``f``, and attention_factor 1.

    Like all kinds, raises ValueError if rotary_dim is not a positive integer or base is not positive.
    """
    return Frequencies(_powers("default", rotary_dim, base), 1.0)


@named
def linear(rotary_dim: int, base: float, *, factor: float) -> Frequencies:
    """Returns the frequencies of position interpolation (Chen et al., arXiv:2306.15595): ``f / factor``.

    factor is how many times longer the context becomes. attention_factor is 1. Raises ValueError if factor is at most 0.
    """
    inv_freq = _powers("linear", rotary_dim, base)
    _require_positive("linear", factor=factor)
    return Frequencies(inv_freq / float(factor), 1.0)


def _raised_base(function: str, rotary_dim: int, base: float, factor: float) -> Tensor:
    """Returns f with a base that is raised so that the lowest frequency is divided by factor."""
    _require(isinstance(rotary_dim, int) and rotary_dim > 2, function, "rotary_dim", rotary_dim, "an integer above 2")
    _require_positive(function, base=base)
    return _powers(function, rotary_dim, base * factor ** (rotary_dim / (rotary_dim - 2)))


@named
def ntk(rotary_dim: int, base: float, *, factor: float) -> Frequencies:
    """Returns the frequencies of NTK-aware scaling by a fixed factor.

    They are f with the base ``base * factor ** (rotary_dim / (rotary_dim - 2))``: the highest frequency stays as it is
    and the lowest is divided by factor (bloc97, in section 3.1 of YaRN, arXiv:2309.00071). attention_factor is 1. The
    ``alpha`` of Hunyuan is this factor. The "ntk" of vLLM is another formula.

    Raises ValueError if factor is below 1 or rotary_dim is 2 or less.
    """
    _require_scale("ntk", factor)
    return Frequencies(_raised_base("ntk", rotary_dim, base, factor), 1.0)


@named
def dynamic(
    rotary_dim: int, base: float, *, factor: float, original_max_position: int, seq_len: int | None = None
) -> Frequencies:
    """Returns the frequencies of dynamic NTK: :func:`ntk` with a factor that grows with the length of the sequence.

    The factor is ``s = factor * L / original_max_position - (factor - 1)``, where L is the larger of seq_len and
    original_max_position, max_position_embeddings in a config (emozilla; appendix B.3 of arXiv:2309.00071). So without
    seq_len, or for a short sequence, the result is that of :func:`default`. attention_factor is 1.

    The result depends on seq_len alone. transformers remembers the longest length: after a long sequence it rotates a
    shorter one, unless that is shorter than original_max_position, by the frequencies of the long one.

    Raises ValueError if factor is below 1, original_max_position is not positive, or rotary_dim is 2 or less.
    """
    _require_scale("dynamic", factor)
    _require_positive("dynamic", original_max_position=original_max_position)
    _require(seq_len is None or is_number(seq_len), "dynamic", "seq_len", seq_len, "an integer")
    length = max(seq_len or 0, original_max_position)
    s = factor * length / original_max_position - (factor - 1)
    return Frequencies(_raised_base("dynamic", rotary_dim, base, s), 1.0)


@named
def yarn(
    rotary_dim: int,
    base: float,
    *,
    factor: float,
    original_max_position: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
) -> Frequencies:
    """Returns the frequencies of YaRN (Peng et al., arXiv:2309.00071).

    A pair makes ``original_max_position * f / (2 pi)`` turns over the length that the model was trained for. With many
    turns its frequency is kept, with few turns it is divided by factor, and in between there is a ramp.

    Args:
        factor: how many times longer the context becomes, at least 1.
        original_max_position: the length that the model was trained for.
        beta_fast, beta_slow: the numbers of turns above which a pair is kept, and below which it is divided.
        truncate: if True, the two ends of the ramp are rounded outwards to whole pairs. (False for gpt-oss.)
        mscale, mscale_all_dim: parameters of DeepSeek for attention_factor, used if both are given and neither is 0.
        attention_factor: that of the result, instead of the computed one.

    Equivalent to::

        pair = lambda turns: rotary_dim * log(original_max_position / (2 pi turns)) / (2 log(base))
        low, high = pair(beta_fast), pair(beta_slow)
        low, high = (floor(low), ceil(high)) if truncate else (low, high)
        low, high = max(low, 0), min(high, rotary_dim - 1)  # then high += 0.001 if they are equal
        ramp = clamp((i - low) / (high - low), 0, 1)
        inv_freq = f * (1 - ramp) + f / factor * ramp
        m = lambda scale: 1 + 0.1 * scale * log(factor)
        attention_factor = m(mscale) / m(mscale_all_dim)  # m(1) unless both are given

    DeepSeek also multiplies the scale of its softmax by ``m(mscale_all_dim) ** 2``, which is not part of the rotation.

    Raises ValueError if factor is below 1, base at most 1, beta_slow above beta_fast, or another argument not positive.
    """
    f = _powers("yarn", rotary_dim, base)
    _require(base > 1, "yarn", "base", base, "more than 1")
    _require_scale("yarn", factor)
    _require_positive("yarn", original_max_position=original_max_position, beta_fast=beta_fast, beta_slow=beta_slow)
    _require(beta_slow <= beta_fast, "yarn", "beta_slow", beta_slow, f"at most beta_fast, which is {beta_fast!r}")

    def pair(turns: float) -> float:
        return rotary_dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((float64_range(len(f)) - low) / (high - low)).clamp(0, 1)

    def m(scale: float) -> float:
        return 1 + 0.1 * scale * math.log(factor)

    if attention_factor is None:
        attention_factor = m(mscale) / m(mscale_all_dim) if mscale and mscale_all_dim else m(1)
    _require_positive("yarn", attention_factor=attention_factor)
    return Frequencies(f * (1 - ramp) + f / float(factor) * ramp, float(attention_factor))


@named
def longrope(
    rotary_dim: int,
    base: float,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position: int,
    factor: float | None = None,
    attention_factor: float | None = None,
    seq_len: int | None = None,
    long: bool | None = None,
) -> Frequencies:
    """Returns the frequencies of LongRoPE (Ding et al., arXiv:2402.13753): f divided by a number for each pair.

    They are ``f / long_factor`` for a long sequence and ``f / short_factor`` for a short one. Keys that are rotated
    with one list do not fit queries that are rotated with the other, so choose once for the lifetime of a KV cache.

    Args:
        short_factor, long_factor: the divisors, ``[rotary_dim / 2]`` each.
        original_max_position: the length that the model was trained for, above 1.
        factor: how many times longer the context is. It only serves to compute attention_factor.
        attention_factor: that of the result, for short and long. Default:
            ``sqrt(1 + log(factor) / log(original_max_position))``, or 1 if factor is at most 1.
        seq_len: the length of the sequence. long_factor is used if it is greater than original_max_position.
        long: whether to use long_factor; instead of seq_len.

    Raises ValueError if a list does not have rotary_dim / 2 elements, a divisor is not positive, neither factor nor
    attention_factor is given, both seq_len and long are given, or another argument is not positive.
    """
    f = _powers("longrope", rotary_dim, base)
    for name, divisors in (("short_factor", short_factor), ("long_factor", long_factor)):
        length = getattr(divisors, "__len__", lambda: None)()
        _require(length == len(f), "longrope", f"len({name})", length, f"rotary_dim / 2, which is {len(f)}")
        _require_positive("longrope", **{f"{name}[{i}]": divisor for i, divisor in enumerate(divisors)})
    _require_numbers("longrope", lambda n: n > 1, "more than 1", original_max_position=original_max_position)
    if attention_factor is None:
        if factor is None:
            must_be = "a number unless attention_factor is given"
            raise wrong_number("torch_rope.frequencies.longrope", "factor", factor, must_be)
        _require_positive("longrope", factor=factor)
        attention_factor = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original_max_position))
    _require_positive("longrope", attention_factor=attention_factor)
    good = seq_len is None or (long is None and is_number(seq_len))
    _require(good, "longrope", "seq_len", seq_len, "None if long is given, or an integer")
    if long is None:
        long = seq_len is not None and seq_len > original_max_position
    return Frequencies(f / float64(long_factor if long else short_factor), float(attention_factor))


@named
def llama3(
    rotary_dim: int,
    base: float,
    *,
    factor: float,
    original_max_position: int,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Frequencies:
    """Returns the frequencies of Llama 3.1 (arXiv:2407.21783; the formula is in Meta's llama-models).

    They are like those of :func:`yarn`, but the ramp is linear in the turns that a pair makes in original_max_position:
    from low_freq_factor, where the frequency is divided by factor, to high_freq_factor, where it is kept::

        turns = original_max_position * f / (2 pi)
        s = clamp((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        inv_freq = f * s + f / factor * (1 - s)

    attention_factor is 1. Raises ValueError if factor is below 1, low_freq_factor is above high_freq_factor, or another
    argument is not positive.
    """
    f = _powers("llama3", rotary_dim, base)
    _require_scale("llama3", factor)
    _require_positive("llama3", original_max_position=original_max_position, low_freq_factor=low_freq_factor)
    must_be, low = f"at least low_freq_factor, which is {low_freq_factor!r}", low_freq_factor
    _require_numbers("llama3", lambda high: low <= high < math.inf, must_be, high_freq_factor=high_freq_factor)
    turns = float(original_max_position) * f / (2 * math.pi)
    if low_freq_factor == high_freq_factor:  # Llama 4 Scout: there is no ramp
        s = (turns > low_freq_factor).double()
    else:
        s = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return Frequencies(f * s + f / float(factor) * (1 - s), 1.0)


@named
def proportional(head_dim: int, base: float, *, partial_rotary_factor: float = 1.0, factor: float = 1.0) -> Frequencies:
    """Returns the frequencies of the full-attention layers of Gemma 4, in which only the first pairs of a head rotate.

    inv_freq is ``[head_dim / 2]``: ``base ** (-2 i / head_dim) / factor`` for the first
    ``int(partial_rotary_factor * head_dim // 2)`` pairs, and 0 for the others, which therefore stay as they are. So
    pair i is the channels (i, i + head_dim / 2), while with :func:`partial_rotary_dim` it is (i, i + rotary_dim / 2).
    attention_factor is 1. There is no paper: the formula is that of transformers and vLLM. Raises ValueError if head_dim
    is odd, partial_rotary_factor is outside [0, 1], or factor is not positive.
    """
    inv_freq = _powers("proportional", head_dim, base, "head_dim")
    _require(head_dim % 2 == 0, "proportional", "head_dim", head_dim, "an even number")
    part = partial_rotary_factor
    _require(is_number(part) and 0 <= part <= 1, "proportional", "partial_rotary_factor", part, "a number in [0, 1]")
    _require_positive("proportional", factor=factor)
    inv_freq[int(part * head_dim // 2) :] = 0
    return Frequencies(inv_freq / float(factor), 1.0)


KINDS: dict[str, Callable[..., Frequencies]] = {
    kind.__name__: kind for kind in (default, linear, ntk, dynamic, yarn, longrope, llama3, proportional)
}
