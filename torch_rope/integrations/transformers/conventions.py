"""The conventions of transformers' rotary functions, and of the functions that users write like them.

Each name is that of a model that follows the convention. known.py says which functions follow it.
"""

import torch
from torch import Tensor

from .._conventions import (
    ADJACENT,
    COMPLEX,
    ONCE,
    TWICE,
    Convention,
    Form,
    at,
    by_options,
    follows,
    gathered,
    sin_first,
)


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


READS = "which reads interleaved pairs"
CONVENTIONS = {
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
    "sam3": follows(ADJACENT, at[...], 2),
    "gptj": follows(sin_first(ONCE), at[:, :, None]),
    "deepseek_v2": follows(COMPLEX, at[:, None], 2, rank=4),
    "llama4": follows(COMPLEX, at[:, :, None], 2, rank=4),
    "llama4 images": Convention(2, 1, _read_viewed, "interleaved"),
    # Functions of other people's code
    "plain": follows(TWICE, at[...], 2),
    "plain, one": follows(TWICE, at[...]),
    "plain, together": follows(TWICE, at[...], together=True),
    "gathered": gathered(_unsqueezed(TWICE)),  # transformers 4.36 and its forks
    "gathered, deepseek_v3": gathered(_unsqueezed(TWICE, says=READS, to=_split_channels)),
    "glm, ignored": _unsqueezed(TWICE, ignored=1, interleaved=True),
    "cohere, ignored": _unsqueezed(ADJACENT, ignored=1),
    "gathered, dim 1": gathered(follows(TWICE, at[:, None], 2)),
}
