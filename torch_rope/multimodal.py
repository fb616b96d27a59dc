"""Frequencies for tokens that have a position on several axes: images and video.

A token of an image has a position on several axes (time, height, width), and each pair of channels follows one of them.
The functions below describe this by a matrix, inv_freq ``[axes, rotary_dim / 2]``, which is 0 if a pair does not follow
an axis. The angle of a pair is then the sum over all axes of position times frequency. :func:`torch_rope.axial_cos_sin`
makes the tables in one launch::

    of_text, _ = torch_rope.frequencies.default(128, 1e6)  # [64]
    inv_freq = torch_rope.multimodal.sections(of_text, [16, 24, 24])  # Qwen2-VL: [3, 64]
    inv_freq, attention_factor, interleaved = torch_rope.multimodal.from_config(config)  # or the same from a config
    # positions [3, batch, seq] -> cos and sin [batch, seq, 64]
    cos, sin = torch_rope.axial_cos_sin(positions, inv_freq, attention_factor=attention_factor)
    q, k = torch_rope.rotate_qk(q, k, cos, sin, interleaved=interleaved)  # in every layer
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import frequencies
from ._mistakes import check_tensor, named, whole, whole_numbers
from .frequencies.kinds import has_float64, in_two_parts


@named
def by_axis(inv_freq: Tensor, axes: Sequence[int], count: int | None = None) -> Tensor:
    """Returns the matrix in which pair j follows axis ``axes[j]``.

    Args:
        inv_freq: ``[pairs]``, or ``[2, pairs]``, the sum of two parts.
        axes: the number of an axis for each pair.
        count: how many axes the positions have. No pair need follow the last ones. Default: ``max(axes) + 1``.

    Returns:
        ``[count, pairs]``: ``inv_freq[j]`` at ``[axes[j], j]``, and 0 elsewhere. If inv_freq has two parts, so has the
        result: ``[2, count, pairs]``.

    Raises ValueError if inv_freq has another shape, or axes does not have one number for each pair, from 0 to count - 1.
    """
    function = "torch_rope.multimodal.by_axis"
    _check_parts(function, inv_freq, "pairs")
    axes = whole_numbers(function, "axes", axes)
    count = whole(function, "count", min(max(axes, default=-1) + 1, 2**63 - 1) if count is None else count)
    if len(axes) != inv_freq.shape[-1] or not all(0 <= axis < count for axis in axes):
        must_have = f"{inv_freq.shape[-1]} numbers that are at least 0 and below {count}, the number of axes"
        raise ValueError(f"{function}: axes is {axes} but must have {must_have}, one for each frequency")
    numbers = torch.arange(count, device=inv_freq.device).unsqueeze(-1)
    axis = torch.tensor(axes, dtype=torch.long, device=inv_freq.device)
    return torch.where(numbers == axis, inv_freq.unsqueeze(-2), 0.0)  # [count, pairs]


def _check_parts(function: str, inv_freq: Tensor, n: str) -> None:
    """Raises an error unless inv_freq is a tensor with one row, or with two, which are parts of a sum."""
    check_tensor(function, "inv_freq", inv_freq)
    if inv_freq.dim() != 1 and not (inv_freq.dim() == 2 and len(inv_freq) == 2):
        must_have = f"shape [{n}] or [2, {n}]"
        raise ValueError(f"{function}: inv_freq has shape {list(inv_freq.shape)} but must have {must_have}")


def _checked(function: str, inv_freq: Tensor, sections: Sequence[int]) -> list[int]:
    """Returns sections, or raises an error unless they are three counts of pairs with the sum of the frequencies."""
    function = f"torch_rope.multimodal.{function}"
    _check_parts(function, inv_freq, "pairs")
    sections = whole_numbers(function, "sections", sections)
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != inv_freq.shape[-1]:
        raise ValueError(
            f"{function}: sections is {sections} but must be three counts of pairs with the sum "
            f"{inv_freq.shape[-1]}, because inv_freq has shape {list(inv_freq.shape)}; for other axes use by_axis or axial"
        )
    return sections


@named
def sections(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Returns the frequencies of Qwen2-VL's M-RoPE (arXiv:2409.12191).

    The first sections[0] pairs follow time, the next sections[1] height, and the last sections[2] width.

    inv_freq is ``[pairs]``, or ``[2, pairs]``, the sum of two parts; sections are three counts of pairs with the sum
    ``pairs``. Returns ``[3, pairs]``, or ``[2, 3, pairs]``, for positions [time, height, width]. Raises ValueError if
    sections does not fit inv_freq.
    """
    sections = _checked("sections", inv_freq, sections)
    return by_axis(inv_freq, [axis for axis, count in enumerate(sections) for _ in range(count)], 3)


@named
def interleaved(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Returns the frequencies of Qwen3-VL's interleaved M-RoPE (arXiv:2511.21631).

    The pairs follow time, height, width, time, height, width and so on, as long as an axis has pairs left in its
    section. All other pairs follow time. Arguments, result and errors are those of :func:`sections`.
    """
    sections = _checked("interleaved", inv_freq, sections)
    return by_axis(inv_freq, [j % 3 if j < 3 * sections[j % 3] else 0 for j in range(inv_freq.shape[-1])], 3)


@named
def height_width_time(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Returns the frequencies of Ernie 4.5 VL (as in its technical report).

    The pairs follow height, width, height, width and so on, and the last sections[2] pairs follow time. The order of
    sections is [height, width, time], and the first two must be equal. Otherwise arguments, result and errors are
    those of :func:`sections`.
    """
    sections = _checked("height_width_time", inv_freq, sections)
    if sections[0] != sections[1]:
        must_have = "as many pairs of height as of width"
        raise ValueError(f"torch_rope.multimodal.height_width_time: sections is {sections} but must have {must_have}")
    return by_axis(inv_freq, [1, 2] * sections[0] + [0] * sections[2], 3)


@named
def axial(inv_freq: Tensor, axes: int = 2) -> Tensor:
    """Returns the frequencies of axial RoPE in vision models: the pairs are cut into one equal part for each axis.

    The vision towers of Qwen2-VL and related models use ``axial(frequencies.default(head_dim // 2).inv_freq)``. These are
    halves of the pairs, not of the channels: with half-split pairing, pair i is channels i and i + rotary_dim / 2, so axis 0 has
    the first and the third quarter of the channels, and axis 1 the second and the fourth. DUSt3R, MASt3R and Gemma 4's
    vision tower cut the channels instead: each half of a head is rotated for itself, by one axis, in pairs i and
    i + head_dim / 4. No matrix says that: docs/guide/several-axes.md shows how to view each half as a token.

    Args:
        inv_freq: ``[n]``, the frequencies that every axis has, or ``[2, n]``, the sum of two parts.
        axes: the number of axes, such as 2 for the vertical and the horizontal position of a patch.

    Returns:
        ``[axes, axes * n]``, for positions ``[axes, ...]``: the first n pairs follow axis 0, the next n axis 1, etc. If
        inv_freq has two parts, so has the result: ``[2, axes, axes * n]``.

    Raises ValueError if inv_freq has another shape or axes is less than 1.
    """
    _check_parts("torch_rope.multimodal.axial", inv_freq, "n")
    axes = whole("torch_rope.multimodal.axial", "axes", axes, 1)
    n = inv_freq.shape[-1]
    return by_axis(torch.cat([inv_freq] * axes, -1), [j // n for j in range(axes * n)], axes)


@named
def position_parts(positions: Tensor, inv_freq: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Returns the arguments with which axial_cos_sin has the angles of float64 positions on a device without float64 (mps).

    A position becomes the sum of two float32 numbers, and an axis becomes two: they have the same frequencies, and one of
    the two numbers each. axial_cos_sin adds up the angles of all axes.

    Args:
        positions: ``[axes, *P]``, float64, on the CPU.
        inv_freq: ``[axes, pairs]``, float64, on the CPU.
        device: where the tables are needed.

    Returns:
        (positions, inv_freq) on the device: ``[2 * axes, *P]``, float32, and ``[2 * axes, pairs]``, float64, or if the
        device has no float64 ``[2, 2 * axes, pairs]``, float32, the sum of two parts.

    Raises ValueError if positions and inv_freq do not have the same number of axes, and TypeError if one of them is not
    float64: axial_cos_sin takes integers and float32 as they are.

    Example::

        grid = torch.linspace(0, 4096, 99, dtype=torch.float64).expand(3, 99)  # [axes, seq]
        cos, sin = torch_rope.axial_cos_sin(*torch_rope.multimodal.position_parts(grid, inv_freq, "mps"))
    """
    for name, t in ("positions", positions), ("inv_freq", inv_freq):
        check_tensor("torch_rope.multimodal.position_parts", name, t, torch.float64)
    if positions.dim() == 0 or inv_freq.dim() != 2 or len(positions) != len(inv_freq):
        raise ValueError(
            f"torch_rope.multimodal.position_parts: positions has shape {list(positions.shape)} and inv_freq "
            f"{list(inv_freq.shape)} but they must be [axes, *P] and [axes, pairs]"
        )
    inv_freq = inv_freq.repeat(2, 1)
    parts = inv_freq if has_float64(device) else in_two_parts(inv_freq)
    return in_two_parts(positions).flatten(0, 1).to(device), parts.to(device)


# model_type of transformers -> the function for its order of axes, and the sections if its config does not give them
_MODELS = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "paddleocr_vl"], (sections, [16, 24, 24])),
    **dict.fromkeys(["glm4v", "glm4v_moe", "glm_image", "glm_ocr"], (sections, [8, 12, 12])),
    **dict.fromkeys(["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "cosmos3_edge"], (interleaved, [24, 20, 20])),
    **dict.fromkeys(["qwen3_5", "qwen3_5_moe", "qwen4_exp"], (interleaved, [11, 11, 10])),
    "ernie4_5_vl_moe": (height_width_time, [22, 22, 20]),
}


class AxialFrequencies(NamedTuple):
    """The frequencies of a model whose positions have several axes, the factor that goes with them, and the pairing."""

    inv_freq: Tensor  # [axes, rotary_dim / 2], float64 on the CPU
    attention_factor: float  # of axial_cos_sin
    interleaved: bool  # of rotate_qk


@named
def from_config(config: Any) -> AxialFrequencies:
    """Returns the frequencies of the text part of a multimodal model, and its pairing, read from its config.

    Args:
        config: as in :func:`torch_rope.frequencies.from_config`.

    Returns:
        inv_freq ``[3, rotary_dim / 2]``, float64, for positions [time, height, width]; attention_factor; and interleaved.

    Raises the errors of :func:`torch_rope.frequencies.from_config`, and ValueError if the model_type is not known to have
    positions on three axes. For such a model call :func:`sections`, :func:`interleaved` or :func:`height_width_time`.
    """
    text = frequencies.config.understood(config)
    name = text.model_type.removesuffix("_text")
    if name not in _MODELS:
        must_be = f"one of {', '.join(map(repr, _MODELS))}"
        raise ValueError(f"torch_rope.multimodal.from_config: model_type is {text.model_type!r} but must be {must_be}")
    order, usual = _MODELS[name]
    kind, arguments = frequencies.config.read(text)
    inv_freq, attention_factor = frequencies.KINDS[kind](**arguments)
    matrix = order(inv_freq, text.rope_parameters.get("mrope_section") or usual)
    return AxialFrequencies(matrix, attention_factor, frequencies.is_interleaved(text))
