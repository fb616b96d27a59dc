"""The conventions of diffusers' rotary functions.

The comments name functions of diffusers 0.42 that follow a convention. Others may follow it too.
"""

import torch
from torch import Tensor

from .._conventions import ADJACENT, COMPLEX, ONCE, TWICE, Convention, Form, Reading, by_options, follows, side_by_side

# The functions with branches that follow a convention, by text_of.
TEXTS = {
    "11726922bd1e": "apply_rotary_emb of embeddings.py",
    "301574f536e5": "apply_rotary_emb_qwen",
    "6e852a495b0c": "_apply_rotary_emb_nucleus",
    "4360264c87d6": "apply_rotary_emb of Z-Image",
    "a5ab635283e5": "apply_rotary_emb of AnyFlow",
    "20a2ac90a51b": "_apply_rotary_emb of JoyImage",
    "9238acdc6238": "apply_split_rotary_emb of LTX-2",
    "7d8542ec16ce": "rope_apply of Wan-Animate 2",
}

# ---- forms of tables ----


def _read_matrices(table: Tensor) -> Reading:
    (cos, minus_sin), (sin, cos_again) = (t.unbind(-1) for t in table.unbind(-2))
    return Reading(cos, sin, "matrices", True, lambda: [(cos, cos_again), (-minus_sin, sin)])


MATRICES = Form(lambda c, s: (torch.stack([c, -s, s, c], -1).unflatten(-1, (2, 2)),), _read_matrices, 1)
ANGLES = Form(lambda a, _: (torch.cat([a, a], -1),), lambda a: TWICE.read(a.cos(), a.sin())._replace(form="angles"), 1)
# The even channels of cos and the odd channels of sin are read. In samples the others hold something else.
HALF_READ = Form(
    lambda cos, sin: (torch.stack([cos, -sin], -1).flatten(-2), torch.stack([-cos, sin], -1).flatten(-2)),
    lambda cos, sin: Reading(cos[..., ::2], sin[..., 1::2], "a, a, b, b, of which one is read"),
)


# ---- functions with other arguments, or another layout of x ----


def _last_angles(s):
    yield s.x(s.batch, s.seq, s.heads), *ANGLES.tables(*s.angles(s.seq + 2))


def _read_split(x, freqs):
    """x: [batch, heads, seq, head_dim], or [batch, seq, channels] with tables [batch, heads, seq, head_dim / 2]."""
    if x.dim() == 4 or freqs[0].dim() != 4:
        return Reading(*freqs, "a, b", False)
    cos, sin = (t.transpose(1, 2) for t in freqs)
    return Reading(cos, sin, "a, b", False, to=lambda x: x.reshape(*cos.shape[:3], -1), back=lambda y, _: y.flatten(2))


def _split(s):
    yield s.x(s.batch, s.heads, s.seq), s.angles(s.batch, s.heads, s.seq)
    yield s.x(s.batch, s.seq), s.angles(s.batch, s.seq)
    if s.head_dim == 2 * s.pairs:
        yield s.x(s.batch, s.seq, s.heads).flatten(2), s.angles(s.batch, s.heads, s.seq)


def _by_position(s):
    positions = (torch.arange(s.batch * s.seq) * 3 % 7).view(s.batch, s.seq)
    yield s.x(s.batch, s.heads, s.seq), positions, *TWICE.tables(*s.angles(7))


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


def _grid(s):
    if s.dtypes[1].itemsize >= 4 and s.head_dim == 2 * s.pairs:  # complex numbers have parts of 32 bits or more
        for stride in (1, 2):
            sizes = torch.tensor([[1, 1, s.seq]] * s.batch if s.seq < 9 else [[5, 2, s.seq // 10]] * s.batch)
            yield s.x(s.batch, s.seq, s.heads), sizes, torch.complex(*s.angles(s.seq + 5)), stride


CONVENTIONS = (
    # apply_rotary_emb of embeddings.py: Flux, HunyuanVideo, CogVideoX, Lumina and others
    by_options({  # use_real, unbind_dim, sequence_dim
        (True, -1, 2): follows(ADJACENT, "batch heads seq: - - seq", together=True),
        (True, -2, 2): follows(TWICE, "batch heads seq: - - seq", together=True),
        (True, -1, 1): follows(ADJACENT, "batch seq heads: - seq -", together=True),
        (True, -2, 1): follows(TWICE, "batch seq heads: - seq -", together=True),
        (False, -1, 2): follows(COMPLEX, "batch seq heads: batch seq -"),
    }),
    by_options({  # Qwen-Image, Nucleus: use_real, unbind_dim
        (True, -1): follows(ADJACENT, "batch heads seq: - - seq", together=True),
        (True, -2): follows(TWICE, "batch heads seq: - - seq", together=True),
        (False, -1): follows(COMPLEX, "batch seq heads: seq -"),
    }),
    by_options({  # Anima: unsqueeze_dim
        (1,): follows(TWICE, "batch heads seq: batch - seq"),
        (2,): follows(TWICE, "batch seq heads: batch seq -"),
    }),
    follows(COMPLEX, "batch seq heads: batch seq -"),  # Z-Image, Bria FIBO 2
    follows(COMPLEX, "batch seq heads: 1 seq 1"),  # AnyFlow
    # Sana-WM, whose x is [batch, heads, head_dim, seq]
    follows(COMPLEX, "batch heads seq: 1 1 seq", to=lambda x: x.transpose(2, 3), back=lambda y, _: y.transpose(2, 3)),
    follows(MATRICES, "batch heads seq: batch 1 seq", "batch seq heads: seq 1"),  # PRX, Kandinsky
    follows(MATRICES, "batch seq heads: batch seq 1", tensors=2),  # HiDream
    follows(ANGLES, "batch seq heads: batch seq 1"),  # Ernie
    Convention(1, 1, lambda x, table: ANGLES.read(table[-x.shape[-3] :, None].float()), _last_angles),  # Stable Audio 3
    follows(side_by_side(HALF_READ), "batch seq heads: batch seq -"),  # Helios
    follows(ADJACENT, "batch seq: batch seq", "batch seq: 1 seq", together=True),  # LTX
    Convention(1, 1, _read_split, _split),  # LTX-2
    follows(TWICE, "batch seq heads: - seq -", together=True),  # LongCat
    follows(TWICE, "seq heads: seq -", together=True),  # MiniMax Music
    follows(ADJACENT, "batch seq heads: - seq -", tensors=2, together=True),  # JoyImage
    follows(ADJACENT, "batch seq heads: batch seq -", tensors=2, together=True),  # JoyImage Edit Plus
    follows(HALF_READ, "batch seq heads: 1 seq 1"),  # Wan, SkyReels, ChronoEdit, Sana-Video
    follows(ONCE, "batch seq heads: seq heads", "batch seq heads: seq 1"),  # Mochi
    follows(TWICE, "batch seq heads: - seq -"),  # MiniMax H3
    follows(TWICE, "batch seq heads: batch seq 1", "seq heads: seq 1"),  # Ideogram 4, Cosmos 3
    # Allegro, along each axis
    Convention(1, 3, lambda x, p, cos, sin: TWICE.read(cos[p][:, None], sin[p][:, None]), _by_position),
    Convention(1, 3, _read_grid, _grid),  # Wan-Animate 2
)  # fmt: skip
