"""Positions of images, video and packed sequences.

A token of an image has a position on several axes (time, height, width), and each pair of channels follows one of them.
Here that is a matrix: inv_freq ``[axes, rotary_dim / 2]``, with zeros where a pair does not follow an axis, so that the
angle of a pair is the sum over all axes of position times frequency. :func:`torch_rope.axial_cos_sin` makes the tables in
one step::

    inv_freq = torch_rope.multimodal.sections(torch_rope.inv_freq(128, 1e6), [16, 24, 24])  # Qwen2-VL
    inv_freq, attention_factor = torch_rope.multimodal.from_config(config)  # the same, of any model below
    cos, sin = torch_rope.axial_cos_sin(positions, inv_freq)  # positions [3, batch, seq] -> [batch, seq, 64]
    q, k = torch_rope.rotate_qk(q, k, cos, sin)  # in every layer

It is differentiable in inv_freq, and in positions that are floating. A full matrix is RoPE-Mixed (Heo et al.,
arXiv:2403.13298), whose frequencies are learned.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_rope import frequencies


def by_axis(inv_freq: Tensor, axes: Sequence[int]) -> Tensor:
    """inv_freq ``[pairs]`` where pair j follows axis ``axes[j]``: ``[max(axes) + 1, pairs]``, zero elsewhere."""
    if inv_freq.dim() != 1 or len(axes) != len(inv_freq) or min(axes, default=0) < 0:
        raise ValueError(
            f"torch_rope.multimodal: axes are {list(axes)}, inv_freq has shape {list(inv_freq.shape)}; "
            "needs one axis for each frequency, 0 or more"
        )
    rows = torch.tensor([[a == axis for a in axes] for axis in range(max(axes, default=-1) + 1)], dtype=torch.bool)
    return torch.where(rows.view(-1, len(axes)).to(inv_freq.device), inv_freq, 0.0)


def _check(inv_freq: Tensor, sections: Sequence[int]) -> None:
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != inv_freq.shape[-1]:
        raise ValueError(
            f"torch_rope.multimodal: sections are {list(sections)}, inv_freq has shape {list(inv_freq.shape)}; "
            "needs three counts of pairs that sum to its length"
        )


def sections(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Qwen2-VL's M-RoPE (arXiv:2409.12191): the first sections[0] pairs follow time, the next height, the last width.

    inv_freq ``[pairs]``, sections: three counts that sum to pairs -> ``[3, pairs]``. ValueError otherwise.
    """
    _check(inv_freq, sections)
    return by_axis(inv_freq, [axis for axis, count in enumerate(sections) for _ in range(count)])


def interleaved(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Qwen3-VL's interleaved M-RoPE (arXiv:2511.21631): the pairs follow time, height, width in turn, as long as a section
    has pairs left; what remains follows time. As :func:`sections` otherwise.
    """
    _check(inv_freq, sections)
    return by_axis(inv_freq, [j % 3 if j < 3 * sections[j % 3] else 0 for j in range(len(inv_freq))])


def height_width_time(inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Ernie 4.5 VL's order (its technical report): pairs follow height and width in turn, and the last sections[2] of
    them time. sections: [height, width, time], height equal to width. As :func:`sections` otherwise.
    """
    _check(inv_freq, sections)
    if sections[0] != sections[1]:
        raise ValueError(f"torch_rope.multimodal: sections are {list(sections)}, needs as many of height as of width")
    turns = [1, 2] * sections[0]
    return by_axis(inv_freq, turns + [0] * sections[2])


def axial(inv_freq: Tensor, axes: int = 2) -> Tensor:
    """Vision's axial RoPE: every axis has all the frequencies, one after another. inv_freq ``[n]`` ->
    ``[axes, axes * n]``, for positions ``[axes, ...]``: rows and columns.

    The vision towers of Qwen2-VL and its kin take ``axial(torch_rope.inv_freq(head_dim // 2))``.
    """
    if inv_freq.dim() != 1 or axes < 1:
        raise ValueError(
            f"torch_rope.multimodal.axial: inv_freq has shape {list(inv_freq.shape)}, axes is {axes}; needs [n] and 1 or more"
        )
    return torch.block_diag(*[inv_freq] * axes)


# model_type of transformers -> how its pairs follow time, height and width, and the sections unless its config says them
_MODELS = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "paddleocr_vl"], (sections, [16, 24, 24])),
    **dict.fromkeys(["glm4v", "glm4v_moe", "glm_image", "glm_ocr"], (sections, [8, 12, 12])),
    **dict.fromkeys(["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "cosmos3_edge"], (interleaved, [24, 20, 20])),
    **dict.fromkeys(["qwen3_5", "qwen3_5_moe", "qwen4_exp"], (interleaved, [11, 11, 10])),
    "ernie4_5_vl_moe": (height_width_time, [22, 22, 20]),
}


def from_config(config: Any) -> frequencies.Frequencies:
    """inv_freq ``[3, rotary_dim / 2]`` (float64) and attention_factor of a multimodal model's text part, for positions
    [time, height, width]; config as in :func:`torch_rope.frequencies.from_config`. ValueError for a model_type that is
    not known to have such positions: call the function of its order yourself.
    """

    def get(of: Any, name: str) -> Any:
        return of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)

    text = get(config, "text_config") or config
    name = get(text, "model_type") or get(config, "model_type") or ""
    if name.removesuffix("_text") not in _MODELS:
        raise ValueError(
            f"torch_rope.multimodal.from_config: model_type is {name!r}, needs one of {', '.join(map(repr, _MODELS))}"
        )
    order, usual = _MODELS[name.removesuffix("_text")]
    rope = get(text, "rope_scaling") or get(text, "rope_parameters") or {}
    inv_freq, attention_factor = frequencies.from_config(text)
    return frequencies.Frequencies(order(inv_freq, rope.get("mrope_section") or usual), attention_factor)


def positions_from_cu_seqlens(cu_seqlens: Tensor, total: int, offsets: Tensor | None = None) -> Tensor:
    """Positions ``[total]`` of sequences packed one after another: each begins at 0, or at its own offset.

    Args:
        cu_seqlens: ``[sequences + 1]``, int32 or int64: where each sequence begins, and the end of the last
            (FlashAttention's). Empty sequences are allowed.
        total: the number of tokens. Those past ``cu_seqlens[-1]`` are padding, with positions that count from 0.
        offsets: ``[sequences]``, added to the positions of each: the lengths of its KV cache.

    The result has cu_seqlens' dtype and device; nothing waits for the device.

    Equivalent to::

        lengths = cu_seqlens.diff().tolist()
        torch.cat([torch.arange(n) + o for n, o in zip(lengths, offsets)])

    Raises ValueError for shapes and TypeError for dtypes.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(
            f"torch_rope.positions_from_cu_seqlens: cu_seqlens has shape {list(cu_seqlens.shape)}, "
            "needs [sequences + 1]"
        )
    for name, t in (("cu_seqlens", cu_seqlens), ("offsets", offsets)):
        if t is not None and t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"torch_rope.positions_from_cu_seqlens: {name} is {t.dtype}, needs int32 or int64")
    if total < 0:
        raise ValueError(f"torch_rope.positions_from_cu_seqlens: total is {total}, needs a number that is not negative")
    if offsets is not None and offsets.shape != (len(cu_seqlens) - 1,):
        raise ValueError(
            f"torch_rope.positions_from_cu_seqlens: offsets has shape {list(offsets.shape)}, cu_seqlens has "
            f"{len(cu_seqlens) - 1} sequences; needs one offset for each"
        )
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # The last sequence that begins at or before the token; the padding counts as one more.
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    starts = cu_seqlens if offsets is None else cu_seqlens - torch.nn.functional.pad(offsets.to(cu_seqlens), (0, 1))
    return tokens - starts[sequence]
