"""The conventions that rotary functions follow, by name.

A name is that of a model that follows the convention, or says what a function of other people's code does.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ._reading import (
    ADJACENT,
    COMPLEX,
    ONCE,
    TWICE,
    Convention,
    Form,
    Reading,
    at,
    by_options,
    follows,
    gathered,
    side_by_side,
    sin_first,
)

# ---- forms of tables ----


def _read_matrices(table: Tensor) -> Reading:
    (cos, minus_sin), (sin, cos_again) = (t.unbind(-1) for t in table.unbind(-2))
    return Reading(cos, sin, "matrices", True, lambda: [(cos, cos_again), (-minus_sin, sin)])


def _read_angles(table: Tensor) -> Reading | None:
    reading = TWICE.read(table.cos(), table.sin())
    return reading and reading._replace(form="angles")


MATRICES, ANGLES = Form(_read_matrices, 1), Form(_read_angles, 1, False)
# The even channels of cos and the odd channels of sin are read.
HALF_READ = Form(lambda cos, sin: Reading(cos[..., ::2], sin[..., 1::2], "a, a, b, b, of which one is read"))


# ---- functions with options, other arguments, or another layout of x ----


def _unsqueezed(form: Form, tensors: int = 2, ignored: int = 0, **more) -> Convention:
    """Returns the convention of functions that unsqueeze cos and sin at their last argument."""
    # Pixtral has 0.
    dims = {1: at[:, None], 2: at[:, :, None], 0: at[None]}
    return by_options({(dim,): follows(form, index, tensors, **more) for dim, index in dims.items()}, ignored)


def _split_channels(x: Tensor) -> Tensor:
    """Returns x with the first channels of all pairs before the second ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _read_after_prefix(x, cos, sin):
    sizes = x.shape[-2] - cos.shape[-2], cos.shape[-2]
    reading = TWICE.read(cos, sin)
    return reading and reading._replace(
        to=lambda x: x.split(sizes, -2)[1], back=lambda y, x: torch.cat([x.split(sizes, -2)[0], y], -2)
    )


def _read_viewed(x, table):
    """x: [batch, seq, heads, head_dim]"""
    return COMPLEX.read(table.view(1, x.shape[1], 1, -1)) if x.dim() == 4 else None


def _read_split(x, freqs):
    """x: [batch, heads, seq, head_dim], or [batch, seq, channels] with tables [batch, heads, seq, head_dim / 2]."""
    if x.dim() == 4 or freqs[0].dim() != 4:
        return Reading(*freqs, "a, b", False)
    cos, sin = (t.transpose(1, 2) for t in freqs)
    return Reading(cos, sin, "a, b", False, to=lambda x: x.reshape(*cos.shape[:3], -1), back=lambda y, _: y.flatten(2))


def _read_both_viewed(x, freqs):
    """x: [batch, seq, heads, head_dim]"""
    return ADJACENT.read(*(t.view(1, x.shape[1], 1, -1) for t in freqs)) if x.dim() == 4 else None


def _read_grid(x, sizes, freqs, stride):
    """sizes: [batch, 3], frames, height and width. freqs: [max_position, head_dim / 2], a part for each of the three."""
    first, *others = sizes.tolist()
    frames, height, width = first
    if any(other != first for other in others) or frames * height * width != x.shape[1]:
        return None
    pairs = x.shape[-1] // 2
    of_frames, of_height, of_width = freqs.split([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3], 1)
    parts = of_frames[: frames * stride : stride, None, None], of_height[:height, None], of_width[:width]
    table = torch.cat([part.expand(*first, -1) for part in parts], -1)
    return COMPLEX.read(table.flatten(0, 2)[None, :, None])


def _by_half(change: Callable[[Form], Form]) -> Convention:
    """Returns the convention of functions whose last argument, half, chooses the pairing."""
    return by_options({(half,): follows(change(form)) for half, form in {False: ADJACENT, True: TWICE}.items()})


READS = "which reads interleaved pairs"
SEQ_THIRD, SEQ_SECOND = at[None, None], at[None, :, None]
CONVENTIONS = {
    # transformers
    "llama": _unsqueezed(TWICE),
    "glm": _unsqueezed(TWICE, interleaved=True),
    "cohere": _unsqueezed(ADJACENT),
    "gpt_oss": _unsqueezed(ONCE, interleaved=False),
    "openai_privacy_filter": _unsqueezed(ONCE),
    "nanochat": _unsqueezed(TWICE, says="inverse", inverse=True),
    "mistral_large4": _unsqueezed(TWICE, says=READS, to=_split_channels),
    "deepseek_v3": _unsqueezed(TWICE, ignored=1, says=READS, to=_split_channels),  # with an argument position_ids
    "glmasr": _unsqueezed(TWICE, ignored=1),
    "gemma4": _unsqueezed(TWICE, tensors=1),
    "deepseek_v4": _unsqueezed(ONCE, tensors=1, says="last channels", last_channels=True),
    "dinov3": Convention(2, 2, _read_after_prefix, "half-split, the first tokens stay as they are"),
    "qwen2_vl": follows(TWICE, at[..., None, :], 2),  # images
    "minimax_m3_vl": follows(TWICE, at[:, None, :], 2),  # images
    "inkling2": follows(ADJACENT, at[..., None, :], 2),
    "sam3": follows(ADJACENT, tensors=2),
    "gptj": follows(sin_first(ONCE), at[:, :, None]),
    "deepseek_v2": follows(COMPLEX, at[:, None], 2, rank=4),
    "llama4": follows(COMPLEX, at[:, :, None], 2, rank=4),
    "llama4 images": Convention(2, 1, _read_viewed, "interleaved"),
    # other people's code
    "plain": follows(TWICE, tensors=2),
    "plain, one": follows(TWICE),
    "plain, together": follows(TWICE, together=True),
    "gathered": gathered(_unsqueezed(TWICE)),  # transformers 4.36 and its forks
    "gathered, deepseek_v3": gathered(_unsqueezed(TWICE, says=READS, to=_split_channels)),
    "glm, ignored": _unsqueezed(TWICE, ignored=1, interleaved=True),
    "cohere, ignored": _unsqueezed(ADJACENT, ignored=1),
    "gathered, dim 1": gathered(follows(TWICE, at[:, None], 2)),
    # diffusers
    # apply_rotary_emb of embeddings.py
    "flux": by_options({  # use_real, unbind_dim, sequence_dim
        (True, -1, 2): follows(ADJACENT, SEQ_THIRD, together=True, rank=4),
        (True, -2, 2): follows(TWICE, SEQ_THIRD, together=True, rank=4),
        (True, -1, 1): follows(ADJACENT, SEQ_SECOND, together=True, rank=4),
        (True, -2, 1): follows(TWICE, SEQ_SECOND, together=True, rank=4),
        (False, -1, 2): follows(COMPLEX, at[:, :, None], rank=4),
    }),
    "qwen_image": by_options({  # use_real, unbind_dim
        (True, -1): follows(ADJACENT, SEQ_THIRD, together=True, rank=4),
        (True, -2): follows(TWICE, SEQ_THIRD, together=True, rank=4),
        (False, -1): follows(COMPLEX, at[:, None], rank=4),
    }),
    "anima": by_options({(1,): follows(TWICE, at[:, None]), (2,): follows(TWICE, at[:, :, None])}),  # unsqueeze_dim
    "z_image": follows(COMPLEX, at[:, :, None], rank=4),
    "anyflow": follows(COMPLEX, rank=4),
    # x is [batch, heads, head_dim, seq].
    "sana_wm": follows(COMPLEX, rank=4, to=lambda x: x.transpose(2, 3), back=lambda y, _: y.transpose(2, 3)),
    "prx": follows(MATRICES),
    "hidream": follows(MATRICES, tensors=2),
    "ernie": follows(ANGLES),
    "stable_audio3": Convention(1, 1, lambda x, t: ANGLES.read(t[-x.shape[-3] :].float().unsqueeze(1)), "half-split"),
    "helios": follows(side_by_side(HALF_READ), at[..., None, :]),
    "ltx": follows(ADJACENT, together=True, rank=3),
    "ltx2": Convention(1, 1, _read_split, "half-split"),
    "longcat": follows(TWICE, SEQ_SECOND, together=True),
    "minimax_music": follows(TWICE, at[:, None], together=True),
    "joyimage": Convention(2, 1, _read_both_viewed, "interleaved"),
    "joyimage_edit": follows(ADJACENT, at[:, :, None], tensors=2, together=True, rank=4),
    "wan": follows(HALF_READ),
    "mochi": follows(ONCE),
    "minimax_h3": follows(TWICE, SEQ_SECOND),
    # along each axis
    "allegro": Convention(1, 3, lambda x, p, cos, sin: TWICE.read(cos[p][:, None], sin[p][:, None]), "half-split"),
    "wan_animate2": Convention(1, 3, _read_grid, "interleaved"),
    # timm, whose tables may have a batch or heads
    "timm": _by_half(sin_first),
    "timm, one table": _by_half(lambda form: side_by_side(sin_first(form))),
}  # fmt: skip
