"""The conventions of transformers' rotary functions.

The comments name modeling files of transformers 5.24 that follow a convention. Others may follow it too.
"""

import torch
from torch import Tensor

from .._conventions import ADJACENT, COMPLEX, ONCE, TWICE, Convention, Form, by_options, follows, sin_first

# The functions with branches that follow a convention, by text_of: the modeling files of these texts.
TEXTS = {
    "6d7cdb8d99fe": "vision_apply_rotary_emb of Llama 4",
    "77c84e5e3a49": "apply_rotary_pos_emb_interleave of Mistral Large 4",
    "6aed09280df3": "apply_rotary_pos_emb of Qwen 4",
}


def _unsqueezed(form: Form, tensors: int = 2, ignored: int = 0, **more) -> Convention:
    """Returns the convention of functions that unsqueeze cos and sin [batch, seq, ..], or [seq, ..], at their last argument."""
    # Pixtral has 0.
    shapes = {1: "batch heads seq: batch - seq", 2: "batch seq heads: batch seq -", 0: "batch heads seq: - seq"}
    return by_options({(dim,): follows(form, of, tensors=tensors, **more) for dim, of in shapes.items()}, ignored)


def _split_channels(x: Tensor) -> Tensor:
    """Returns x with the first channels of all pairs before the second ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _read_after_prefix(x, cos, sin):
    sizes = x.shape[-2] - cos.shape[-2], cos.shape[-2]
    return TWICE.read(cos, sin)._replace(
        to=lambda x: x.split(sizes, -2)[1], back=lambda y, x: torch.cat([x.split(sizes, -2)[0], y], -2)
    )


def _after_prefix(s):
    yield *(s.x(s.batch, heads, s.seq + 2) for heads in (3, 2)), *TWICE.tables(*s.angles(s.seq))


READS = "which reads interleaved pairs"
CONVENTIONS = (
    _unsqueezed(TWICE),  # Llama, and most others
    _unsqueezed(TWICE, interleaved=True),  # Ernie 4.5, GLM, Helium
    _unsqueezed(ADJACENT),  # Cohere
    _unsqueezed(ONCE, interleaved=False),  # GPT-OSS
    _unsqueezed(ONCE),  # OpenAI's privacy filter
    _unsqueezed(TWICE, says="inverse", inverse=True),  # NanoChat
    _unsqueezed(TWICE, says=READS, to=_split_channels),  # Mistral Large 4
    _unsqueezed(TWICE, ignored=1, says=READS, to=_split_channels),  # DeepSeek V3, with an argument position_ids
    _unsqueezed(TWICE, ignored=1),  # GLM-ASR
    _unsqueezed(TWICE, tensors=1),  # Gemma 3n, Gemma 4
    _unsqueezed(ONCE, tensors=1, says="last channels", last_channels=True),  # DeepSeek V4
    Convention(2, 2, _read_after_prefix, _after_prefix, "the first tokens stay as they are"),  # DINOv3
    follows(TWICE, "seq heads: seq -", tensors=2),  # vision towers of Qwen2-VL and others
    follows(ADJACENT, "seq heads: seq -", tensors=2),  # Inkling 2
    follows(ADJACENT, "batch heads seq: seq", tensors=2),  # SAM 3
    follows(sin_first(ONCE), "batch seq heads: batch seq -"),  # GPT-J
    follows(COMPLEX, "batch heads seq: batch - seq", tensors=2),  # DeepSeek V2
    follows(COMPLEX, "batch seq heads: batch seq -", tensors=2),  # Llama 4
    follows(COMPLEX, "batch seq heads: seq 1", tensors=2),  # Llama 4's images
)
