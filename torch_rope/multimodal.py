"""Frequencies, positions and slots for images, video, packed sequences and sliding windows.

A token of an image has a position on several axes (time, height, width), and each pair of channels follows one of them.
The functions below describe this by a matrix, inv_freq ``[axes, rotary_dim / 2]``, which is 0 if a pair does not follow
an axis. The angle of a pair is then the sum over all axes of position times frequency. :func:`torch_rope.axial_cos_sin`
makes the tables in one launch::

    inv_freq = torch_rope.multimodal.sections(torch_rope.inv_freq(128, 1e6), [16, 24, 24])  # Qwen2-VL
    inv_freq, attention_factor = torch_rope.multimodal.from_config(config)  # or the same from a config
    # positions [3, batch, seq] -> cos and sin [batch, seq, 64]
    cos, sin = torch_rope.axial_cos_sin(positions, inv_freq, attention_factor=attention_factor)
    q, k = torch_rope.rotate_qk(q, k, cos, sin)  # in every layer

axial_cos_sin is differentiable in inv_freq, and in positions if they are floating-point. RoPE-Mixed (Heo et al.,
arXiv:2403.13298) learns an inv_freq without zeros.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from . import frequencies


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
    _check_parts("by_axis", inv_freq, "pairs")
    count = max(axes, default=-1) + 1 if count is None else count
    if len(axes) != inv_freq.shape[-1] or not all(0 <= axis < count for axis in axes):
        raise ValueError(
            f"torch_rope.multimodal.by_axis: axes is {list(axes)} but must have {inv_freq.shape[-1]} numbers that are at "
            f"least 0 and below {count}, the number of axes, one for each frequency"
        )
    numbers, axis = (torch.tensor(n, dtype=torch.long, device=inv_freq.device) for n in (range(count), axes))
    return torch.where(numbers.unsqueeze(-1) == axis, inv_freq.unsqueeze(-2), 0.0)  # [count, pairs]


def _check_parts(function: str, inv_freq: Tensor, n: str) -> None:
    """Raises ValueError unless inv_freq has one row, or two, which are parts of a sum."""
    if inv_freq.dim() != 1 and not (inv_freq.dim() == 2 and len(inv_freq) == 2):
        raise ValueError(
            f"torch_rope.multimodal.{function}: inv_freq has shape {list(inv_freq.shape)} but must have shape [{n}] or "
            f"[2, {n}]"
        )


def _check(function: str, inv_freq: Tensor, sections: Sequence[int]) -> None:
    """Raises ValueError unless sections are three counts of pairs that add up to the number of frequencies."""
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != inv_freq.shape[-1]:
        raise ValueError(
            f"torch_rope.multimodal.{function}: sections is {list(sections)} but must be three counts of pairs with "
            f"the sum {inv_freq.shape[-1]}, because inv_freq has shape {list(inv_freq.shape)}; for other axes use by_axis "
            "or axial"
        )


def sections(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Returns the frequencies of Qwen2-VL's M-RoPE (arXiv:2409.12191).

    The first sections[0] pairs follow time, the next sections[1] height, and the last sections[2] width.

    Args:
        inv_freq: ``[pairs]``, or ``[2, pairs]``, the sum of two parts.
        sections: three counts of pairs with the sum ``pairs``.

    Returns:
        ``[3, pairs]``, or ``[2, 3, pairs]``, for positions [time, height, width].

    Raises ValueError if sections does not fit inv_freq.
    """
    _check("sections", inv_freq, sections)
    return by_axis(inv_freq, [axis for axis, count in enumerate(sections) for _ in range(count)], 3)


def interleaved(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Returns the frequencies of Qwen3-VL's interleaved M-RoPE (arXiv:2511.21631).

    The pairs follow time, height, width, time, height, width and so on, as long as an axis has pairs left in its
    section. All other pairs follow time. Arguments, result and errors are those of :func:`sections`.
    """
    _check("interleaved", inv_freq, sections)
    return by_axis(inv_freq, [j % 3 if j < 3 * sections[j % 3] else 0 for j in range(inv_freq.shape[-1])], 3)


def height_width_time(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Returns the frequencies of Ernie 4.5 VL (as in its technical report).

    The pairs follow height, width, height, width and so on, and the last sections[2] pairs follow time. The order of
    sections is [height, width, time], and the first two must be equal. In all else arguments, result and errors are
    those of :func:`sections`.
    """
    _check("height_width_time", inv_freq, sections)
    if sections[0] != sections[1]:
        raise ValueError(
            f"torch_rope.multimodal.height_width_time: sections is {list(sections)} but must have as many pairs of "
            "height as of width"
        )
    height_and_width = [1, 2] * sections[0]
    return by_axis(inv_freq, height_and_width + [0] * sections[2], 3)


def axial(inv_freq: Tensor, axes: int = 2) -> Tensor:
    """Returns the frequencies of axial RoPE in vision models: the pairs are cut into one equal part for each axis.

    The vision towers of Qwen2-VL and related models use ``axial(torch_rope.inv_freq(head_dim // 2))``. These are halves
    of the pairs, not of the channels: with half-split pairing, pair i is channels i and i + rotary_dim / 2, so axis 0 has
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
    _check_parts("axial", inv_freq, "n")
    if axes < 1:
        raise ValueError(f"torch_rope.multimodal.axial: axes is {axes} but must be at least 1")
    n = inv_freq.shape[-1]
    return by_axis(torch.cat([inv_freq] * axes, -1), [j // n for j in range(axes * n)], axes)


# model_type of transformers -> the function for its order of axes, and the sections if its config does not give them
_MODELS = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "paddleocr_vl"], (sections, [16, 24, 24])),
    **dict.fromkeys(["glm4v", "glm4v_moe", "glm_image", "glm_ocr"], (sections, [8, 12, 12])),
    **dict.fromkeys(["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "cosmos3_edge"], (interleaved, [24, 20, 20])),
    **dict.fromkeys(["qwen3_5", "qwen3_5_moe", "qwen4_exp"], (interleaved, [11, 11, 10])),
    "ernie4_5_vl_moe": (height_width_time, [22, 22, 20]),
}


def from_config(config: Any) -> frequencies.Frequencies:
    """Returns the frequencies of the text part of a multimodal model, read from its config.

    Args:
        config: as in :func:`torch_rope.frequencies.from_config`.

    Returns:
        inv_freq ``[3, rotary_dim / 2]``, float64, for positions [time, height, width]; and attention_factor.

    Raises ValueError if the model_type is not known to have positions on three axes. For such a model call
    :func:`sections`, :func:`interleaved` or :func:`height_width_time` yourself.
    """

    def get(of: Any, name: str) -> Any:
        return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)

    text = get(config, "text_config") or config
    name = get(text, "model_type") or get(config, "model_type") or ""
    if name.removesuffix("_text") not in _MODELS:
        raise ValueError(
            f"torch_rope.multimodal.from_config: model_type is {name!r} but must be one of "
            f"{', '.join(map(repr, _MODELS))}"
        )
    order, usual = _MODELS[name.removesuffix("_text")]
    rope = get(text, "rope_scaling") or get(text, "rope_parameters") or {}
    kind, arguments = frequencies.config.read(text)
    inv_freq, attention_factor = frequencies.KINDS[kind](**arguments)
    return frequencies.Frequencies(order(inv_freq, rope.get("mrope_section") or usual), attention_factor)


def positions_from_cu_seqlens(cu_seqlens: Tensor, total: int, offsets: Tensor | None = None) -> Tensor:
    """Returns the positions of the tokens of packed sequences: those of each sequence begin at 0, or at its own offset.

    Args:
        cu_seqlens: ``[sequences + 1]``, int32 or int64: the index of the first token of each sequence, and the end of
            the last sequence, as in FlashAttention. Sequences may be empty.
        total: the number of tokens. Tokens past ``cu_seqlens[-1]`` are padding, and their positions count from 0.
        offsets: ``[sequences]``, int32 or int64: a number that is added to the positions of each sequence, such as the
            length of its KV cache. Default: 0 for each.

    Returns:
        ``[total]``, with the dtype and device of cu_seqlens. The host does not wait for the device.

    Raises:
        ValueError: a shape does not fit, total is negative, or cu_seqlens on the CPU does not begin with 0, decreases, or
            goes beyond total. Compiled and exported programs, and other devices, do not check these numbers: there, tokens
            before the first sequence have positions that count from 0, and so has padding.
        TypeError: cu_seqlens or offsets is not int32 or int64.

    Equivalent to (without padding)::

        lengths = cu_seqlens.diff().tolist()
        torch.cat([torch.arange(n) + o for n, o in zip(lengths, offsets)])

    Example::

        cu_seqlens = torch.tensor([0, 3, 5])
        torch_rope.positions_from_cu_seqlens(cu_seqlens, 6)  # [0, 1, 2, 0, 1, 0]: the last token is padding
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"torch_rope.positions_from_cu_seqlens: cu_seqlens has shape {list(cu_seqlens.shape)} but must have shape "
            "[sequences + 1]"
        )
    for name, t in (("cu_seqlens", cu_seqlens), ("offsets", offsets)):
        if t is not None:
            _check_whole("positions_from_cu_seqlens", name, t)
    if total < 0:
        raise ValueError(f"torch_rope.positions_from_cu_seqlens: total is {total} but must be at least 0")
    if offsets is not None and offsets.shape != (cu_seqlens.shape[0] - 1,):
        raise ValueError(
            f"torch_rope.positions_from_cu_seqlens: offsets has shape {list(offsets.shape)} but must have shape "
            f"[{cu_seqlens.shape[0] - 1}], one offset for each sequence of cu_seqlens"
        )
    if _shows_its_numbers(cu_seqlens):
        starts = cu_seqlens.tolist()
        if starts != sorted(starts) or starts[0] != 0 or starts[-1] > total:
            raise ValueError(
                f"torch_rope.positions_from_cu_seqlens: cu_seqlens is {cu_seqlens} but must begin with 0, never decrease, "
                f"and end at or before {total}, the total; of a slice, subtract the first number"
            )
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # How many sequences begin at or before the token. What is before the first and the padding count as sequences too.
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True)
    starts = torch.nn.functional.pad(cu_seqlens, (1, 0))
    if offsets is not None:
        starts = starts - torch.nn.functional.pad(offsets.to(cu_seqlens), (1, 1))
    return tokens - starts[sequence]


def slots_of_window(positions: Tensor, window: int) -> Tensor:
    """Returns the slots of tokens in ring caches: position p of sequence b has cell ``p % window`` of block b.

    Of the tokens of a call, the last ``window`` positions of each sequence are kept. Older ones would be overwritten by
    them, so they get the slot -1, with which :func:`torch_rope.rotate_into_cache` writes no cell.

    Args:
        positions: ``[seq]`` for one sequence, or ``[batch, seq]``, int32 or int64. Padding has a negative position, and
            gets the slot -1.
        window: the number of cells of a ring, which is the block_size of the cache.

    Returns:
        The slots, with the shape, dtype and device of positions: ``b * window + p % window``, or -1.

    Raises:
        ValueError: positions has another shape, or window is less than 1.
        TypeError: positions is not int32 or int64.

    Equivalent to (for one sequence)::

        kept = (positions >= 0) & (positions > positions.max() - window)
        torch.where(kept, positions % window, -1)

    Example::

        torch_rope.slots_of_window(torch.arange(6), 4)  # [-1, -1, 2, 3, 0, 1]
    """
    if positions.dim() not in (1, 2):
        raise ValueError(
            f"torch_rope.slots_of_window: positions has shape {list(positions.shape)} but must have shape [seq] or "
            "[batch, seq]"
        )
    _check_whole("slots_of_window", "positions", positions)
    if window < 1:
        raise ValueError(f"torch_rope.slots_of_window: window is {window} but must be at least 1")
    newest = torch.nn.functional.pad(positions, (1, 0), value=-1).amax(-1, keepdim=True)  # -1 if there are no tokens
    slots = positions % window
    if positions.dim() == 2:
        blocks = torch.arange(positions.shape[0], dtype=positions.dtype, device=positions.device)
        slots = slots + blocks.unsqueeze(-1) * window
    return torch.where((positions >= 0) & (positions > newest - window), slots, -1)


def _shows_its_numbers(t: Tensor) -> bool:
    """Returns whether a tensor is a plain one on the CPU, and neither traced nor mapped by vmap."""
    if torch.compiler.is_compiling() or type(t) is not Tensor:
        return False
    return t.device.type == "cpu" and not is_functorch_wrapped_tensor(t)


def _check_whole(function: str, name: str, t: Tensor) -> None:
    """Raises TypeError unless a tensor is int32 or int64."""
    if t.dtype not in (torch.int32, torch.int64):
        dtype = str(t.dtype).removeprefix("torch.")
        raise TypeError(f"torch_rope.{function}: {name} is {dtype} but must be int32 or int64")
