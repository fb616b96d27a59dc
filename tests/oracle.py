"""The oracle: the operators in numpy, and how far a result may be from them.

The oracle computes in float64, or in long double if x is float64. It shares no code with torch_rope but the limits
of the self-check.
"""

import numpy as np
import torch

from torch_rope.selfcheck.checks import ANGLE_ERROR, limits


def numpy_of(t: torch.Tensor, kind=np.float64) -> np.ndarray:
    """Returns a tensor as a numpy array of dtype kind."""
    t = t.detach().cpu()
    return (t if t.dtype == torch.float64 or not t.is_floating_point() else t.double()).numpy().astype(kind)


def cos_sin(positions: np.ndarray, inv_freq: np.ndarray, kind) -> tuple[np.ndarray, np.ndarray]:
    """Returns cos and sin of positions * inv_freq, each [*positions.shape, rotary_dim / 2].

    A long double has a mantissa of 64 bits, but the product of a position and a float64 frequency has up to 77. So the
    frequency is split into a larger and a smaller part whose products with a position are exact, and the two angles are
    added by the addition theorems of cos and sin.
    """
    high = inv_freq.astype(np.float32).astype(np.float64)
    p = positions[..., None].astype(kind)
    a, b = p * high.astype(kind), p * (inv_freq - high).astype(kind)
    return np.cos(a) * np.cos(b) - np.sin(a) * np.sin(b), np.sin(a) * np.cos(b) + np.cos(a) * np.sin(b)


def channels_of_pairs(pairs: int, rotary_start: int, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first channels of all pairs, and the second ones."""
    channels = rotary_start + np.arange(2 * pairs)
    return (channels[0::2], channels[1::2]) if interleaved else (channels[:pairs], channels[pairs:])


def rotate(
    x, cos=None, sin=None, inv_freq=None, positions=None, offset=0, *, attention_factor=1.0, interleaved=False,
    inverse=False, rotary_start=0, q_factor=None, norm_weight=None, norm_eps=1e-6, norm_weight_offset=0.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Returns the rotated x, and the magnitude of each element's rotated pair, both in x's shape.

    The magnitude of a pair (a, b) is sqrt(a^2 + b^2), and that of a channel that is not rotated is its absolute value. The
    error of a result is measured against it.

    The arguments are those of torch.ops.rope.rotate: torch tensors, x is [batch, seq, heads, head_dim] or [seq, heads,
    head_dim]. With norm_weight, [head_dim] or [heads, head_dim], each head is first RMS-normalised over all its channels,
    or all heads of a token together. The results are multiplied by q_factor, [seq], [batch or 1, seq] or [batch or 1, seq,
    heads].
    """
    kind = np.longdouble if x.dtype == torch.float64 else np.float64
    values = numpy_of(x, kind)
    values = values if values.ndim == 4 else values[None]
    if norm_weight is not None:
        axes = (-2, -1)[-norm_weight.ndim :]
        mean = (values**2).sum(axes, keepdims=True) / max(norm_weight.numel(), 1)
        values = values / np.sqrt(mean + kind(norm_eps)) * (numpy_of(norm_weight, kind) + kind(norm_weight_offset))
    batch, seq = values.shape[:2]
    p = np.arange(seq)[None] if positions is None else np.atleast_2d(numpy_of(positions, np.int64))
    p = np.broadcast_to(p + offset, (batch, seq))
    if inv_freq is not None:
        c, s = cos_sin(p, numpy_of(inv_freq) if inv_freq.ndim == 1 else numpy_of(inv_freq).sum(0), kind)
    else:
        c, s = numpy_of(cos, kind), numpy_of(sin, kind)
        if c.ndim == 2:
            c, s = c[p], s[p]
    if c.ndim == 3:
        c, s = c[:, :, None], s[:, :, None]
    c, s = c * kind(attention_factor), s * kind(attention_factor)
    if inverse:
        s = -s
    pairs = c.shape[-1]
    first, second = channels_of_pairs(pairs, rotary_start, interleaved)
    a, b = values[..., first], values[..., second]
    out, size = values.copy(), np.abs(values)
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    size[..., first] = size[..., second] = np.hypot(out[..., first], out[..., second])
    if q_factor is not None:
        factor = numpy_of(q_factor, kind)
        factor = (factor if factor.ndim == 3 else factor[..., None])[..., None]
        out, size = out * factor, size * np.abs(factor)
    return out.reshape(x.shape), size.reshape(x.shape)


def quantise(x: np.ndarray, scale: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns the numbers that a quantised cache of this dtype stores for x, [..., heads, head_dim].

    scale: one element, or [heads]. The number next to x / scale is looked up among all numbers of dtype; of two that are
    equally near, it is the one with the even code. Its sign is kept if it is zero.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double().numpy()
    order = np.array([i for i in np.argsort(numbers, kind="stable") if np.isfinite(numbers[i]) and i != 0x80])
    if not dtype.is_floating_point:
        order = np.argsort(numbers)
    numbers = numbers[order]
    with np.errstate(all="ignore"):
        quotient = x / (scale.reshape(()) if scale.size == 1 else scale[:, None]).astype(x.dtype)
        wide = quotient.astype(np.longdouble)
        above = np.clip(np.searchsorted(numbers, wide), 1, len(numbers) - 1)
        nearer = np.abs(wide - numbers[above]) - np.abs(wide - numbers[above - 1])
        tie_to_above = (nearer == 0) & (order[above] % 2 == 0)
        stored = np.where((nearer < 0) | tie_to_above, numbers[above], numbers[above - 1])
    stored = np.where(wide >= numbers[-1], numbers[-1], np.where(wide <= numbers[0], numbers[0], stored))
    if not dtype.is_floating_point:
        return np.where(np.isnan(quotient), 0, stored)
    return np.copysign(np.where(np.isnan(quotient), np.nan, stored), quotient.astype(np.float64))


def table_backward(
    given, x, cos, sin, positions=None, offset=0, *, attention_factor=1.0, interleaved=False, inverse=False,
    rotary_start=0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Returns the gradients of cos and sin, and for each the sum of the magnitudes of its terms, in the shape of cos.

    x: a list of the tensors that were rotated, each [batch, seq, heads, head_dim] or [seq, heads, head_dim].
    given: a list of the gradients of their results, in the same shapes.
    """
    kind = np.longdouble if x[0].dtype == torch.float64 else np.float64
    shape, pairs = tuple(cos.shape), cos.shape[-1]
    sums = np.zeros((4, *shape), kind)
    for g, t in zip(given, x, strict=True):
        g, t = (a if a.ndim == 4 else a[None] for a in (numpy_of(g, kind), numpy_of(t, kind)))
        batch, seq = t.shape[:2]
        first, second = channels_of_pairs(pairs, rotary_start, interleaved)
        a, b, ga, gb = t[..., first], t[..., second], g[..., first], g[..., second]
        sign = -1 if inverse else 1
        terms = [ga * a + gb * b, sign * (gb * a - ga * b)]
        terms += [np.abs(ga * a) + np.abs(gb * b), np.abs(gb * a) + np.abs(ga * b)]
        if len(shape) > 2:  # a row for each token, or for each token and head, of one sequence or of all
            one = (shape[0], *t.shape[1 : len(shape) - 1])
            rows = np.broadcast_to(np.arange(np.prod(one)).reshape(one), (batch, *one[1:]))
        else:
            p = np.arange(seq)[None] if positions is None else np.atleast_2d(numpy_of(positions, np.int64))
            rows = np.broadcast_to(p + offset, (batch, seq))
        for total, term in zip(sums, terms, strict=True):
            summed = term if len(shape) == 4 else term.sum(2)
            np.add.at(total.reshape(-1, pairs), rows, summed * kind(attention_factor))
    sums[2:] = np.abs(sums[2:])
    return tuple(sums)


def without_factor(options: dict) -> dict:
    """Returns the options of k, which has no factor."""
    return {name: value for name, value in options.items() if name != "q_factor"}


def ulp(magnitude: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns the distance between neighbouring numbers of dtype at this magnitude."""
    info = torch.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(magnitude, info.tiny).astype(np.float64)))
    return np.exp2(exponent) * info.eps


def limits_of_reference(dtype: torch.dtype, angles: dict, attention_factor: float = 1.0, norm: bool = False):
    """Returns how far a result of torch_rope.reference may be from the oracle, as limits() does.

    The reference rounds once. Its angles, of up to 256 radians in the tests, are rounded to float64.
    """
    ulps, plus = limits(dtype, angles, attention_factor, norm)
    return (0.51, 0.0) if dtype.itemsize == 2 else (ulps, max(plus, 256 * 2.0**-53))


def assert_close(actual: torch.Tensor, expected: tuple[np.ndarray, np.ndarray], ulps: float, plus: float = 0.0) -> None:
    """Asserts that every element of `actual` is close to `expected`: (values, magnitudes), as rotate() returns them.

    An element may be off by `ulps` times ulp(magnitude, dtype), and by `plus` times the magnitude.
    """
    value, magnitude = expected
    error = np.abs(numpy_of(actual, value.dtype.type) - value)
    limit = ulps * ulp(magnitude, actual.dtype) + plus * magnitude
    worst = np.max(error / limit, initial=0.0)
    assert worst <= 1, f"{float(worst):.3f} of the limit of {ulps} ulp"


def gradients_by_the_oracle(x, weight, gradient, norm_eps=1e-6, norm_weight_offset=0.0, **rotation):
    """Returns (gradient, size) of x and of weight.

    The size is the same formula with every term positive. The error of a rounding is a fraction of it.
    """
    h, pair = rotate(gradient, **rotation, inverse=True)
    x, w = (numpy_of(t, h.dtype.type) for t in (x, weight))
    w = w + h.dtype.type(norm_weight_offset)
    axes = (-2, -1)[-w.ndim :]
    r = 1 / np.sqrt((x**2).mean(axes, keepdims=True) + h.dtype.type(norm_eps))

    def formula(h, x, w, minus):
        of_x = r * (h * w - minus * r**2 * (h * w * x).mean(axes, keepdims=True) * x)
        return of_x, (h * x * r).sum(tuple(range(x.ndim - w.ndim)))

    return zip(formula(h, x, w, 1), formula(pair, abs(x), abs(w), -1), strict=True)


def assert_accurate(gradients, tensors, out_gradients, angles, **options):
    """Checks that the gradients are within twelve roundings of the oracle, or thirteen with a factor.

    The pair, its scaled cos and sin, the weight, 1 / rms, the two means and the last product are rounded. The roundings
    of a sum over tokens even out, as those of its terms do. Rounding to the dtype of the result adds one more, and
    inv_freq adds the error of cos and sin.
    """
    wide = tensors[0].dtype == torch.float64
    fraction = (12 + ("q_factor" in angles)) * (2.0**-53 if wide else 2.0**-24)
    fraction += ANGLE_ERROR if not wide and "inv_freq" in angles else 0
    for i in (0, 1):
        of_side = angles if i == 0 else without_factor(angles)
        expected = gradients_by_the_oracle(tensors[i], tensors[i + 2], out_gradients[i], **of_side, **options)
        for actual, (value, size) in zip(gradients[i::2], expected, strict=True):
            limit = fraction * size
            if actual.dtype != (torch.float64 if wide else torch.float32):
                limit = limit + ulp(np.abs(value), actual.dtype)
            error = np.abs(numpy_of(actual, value.dtype.type) - value)
            assert (error <= limit).all(), f"{float((error / limit).max()):.3f} of the limit"


def assert_gradients(outs, given, x, angles, **flags):
    """Asserts that the gradients of cos and sin are right within the roundings of the kernels.

    Each product and each term is rounded, and the sum is rounded once to the dtype of the table. In float64 every
    partial sum is rounded as well. In float32 the sums are compensated, or in double.
    """
    cos_grad, sin_grad, *magnitudes = table_backward(given, x, **angles, **flags)
    terms = 2 * sum(t[..., 0].numel() for t in x)
    roundings = (terms + 4) * 2.0**-53 if x[0].dtype == torch.float64 else 4 * 2.0**-24
    for out, expected, magnitude in zip(outs, (cos_grad, sin_grad), magnitudes, strict=True):
        limit = ulp(abs(expected), out.dtype) + magnitude * roundings
        assert (abs(numpy_of(out, expected.dtype.type) - expected) <= limit).all()
