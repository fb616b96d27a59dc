"""The conventions of diffusers' rotary functions.

The comments name functions of diffusers 0.42 that follow a convention. Functions of other names and releases may follow
it too.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_rope.integrations._conventions import (
    Convention,
    Reading,
    complex_numbers,
    each_twice,
    full_width,
    matrices,
)

# ---- apply_rotary_emb of embeddings.py: Flux, HunyuanVideo, CogVideoX, Cosmos, Lumina and others ----


def _read_shared(x, freqs, use_real, unbind_dim, sequence_dim):
    if not use_real:
        return complex_numbers(freqs.unsqueeze(2))
    if unbind_dim not in (-1, -2) or sequence_dim not in (1, 2):
        return None
    cos, sin = (t[None, None] if sequence_dim == 2 else t[None, :, None] for t in freqs)
    return full_width(cos, sin, unbind_dim == -1)


def _shared(s):
    for unbind_dim in (-1, -2):
        tables = each_twice(*s.angles(s.seq), unbind_dim == -1)
        yield s.x(s.batch, s.heads, s.seq), tables, True, unbind_dim, 2
        yield s.x(s.batch, s.seq, s.heads), tables, True, unbind_dim, 1
    if s.dtypes[1].itemsize >= 4:
        yield s.x(s.batch, s.seq, s.heads), torch.complex(*s.angles(s.batch, s.seq)), False, -1, 1


# ---- apply_rotary_emb_qwen: Qwen-Image, Nucleus ----


def _read_qwen(x, freqs, use_real, unbind_dim):
    if not use_real:
        return complex_numbers(freqs.unsqueeze(1))
    if unbind_dim not in (-1, -2):
        return None
    cos, sin = (t[None, None] for t in freqs)
    return full_width(cos, sin, unbind_dim == -1)


def _qwen(s):
    for unbind_dim in (-1, -2):
        yield s.x(s.batch, s.heads, s.seq), each_twice(*s.angles(s.seq), unbind_dim == -1), True, unbind_dim
    if s.dtypes[1].itemsize >= 4:
        yield s.x(s.batch, s.seq, s.heads), torch.complex(*s.angles(s.seq)), False, -1


# ---- one complex table ----


def _complex(*shape):
    """Returns samples of x [batch, seq, heads, head_dim] and a complex table of this shape."""

    def samples(s):
        if s.dtypes[1].itemsize >= 4:
            sizes = {"batch": s.batch, "seq": s.seq}
            table = torch.complex(*s.angles(*(sizes.get(n, n) for n in shape)))
            yield s.x(s.batch, s.seq, s.heads), table

    return samples


def _read_transposed(x, freqs):
    """x: [batch, heads, head_dim, seq]."""
    reading = complex_numbers(freqs)
    return reading._replace(to=lambda x: x.transpose(2, 3), back=lambda y: y.transpose(2, 3))


def _transposed(s):
    if s.dtypes[1].itemsize >= 4:
        yield s.x(s.batch, s.heads, s.seq).transpose(2, 3), torch.complex(*s.angles(1, 1, s.seq))


# ---- one table that is not complex ----


def _matrices(s):
    for shape in ((s.batch, s.seq, 1), (1, 1, s.seq), (s.seq, 1)):
        cos, sin = s.angles(*shape)
        x_shape = (s.heads, s.seq) if shape[0] == shape[1] == 1 else (s.seq, s.heads)
        yield s.x(s.batch, *x_shape), torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))


def _two_with_matrices(s):
    cos, sin = s.angles(s.batch, s.seq, 1)
    table = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))
    yield s.x(s.batch, s.seq, s.heads), s.x(s.batch, s.seq, s.heads + 1), table


def _of_angles(angles: Tensor) -> Reading:
    """Returns what angles [.., rotary_dim] mean, each of which is there twice."""
    half = angles.shape[-1] // 2
    first, second = angles[..., :half], angles[..., half:]
    return Reading(first.cos(), first.sin(), "angles", False, lambda: [(first, second)])


def _angles(s):
    a, _ = s.angles(s.batch, s.seq, 1)
    yield s.x(s.batch, s.seq, s.heads), torch.cat([a, a], -1)


def _read_last_angles(x, angles):
    return _of_angles(angles[-x.shape[-3] :].float().unsqueeze(1))


def _last_angles(s):
    a, _ = s.angles(s.seq + 2)
    yield s.x(s.batch, s.seq, s.heads), torch.cat([a, a], -1)


def _read_once(s, *shape):
    """Returns tables of which the even channels of cos and the odd channels of sin are read. The others hold something
    else."""
    cos, sin, other = *s.angles(*shape), s.angles(*shape)[0]
    return torch.stack([cos, other], -1).flatten(-2), torch.stack([other, sin], -1).flatten(-2)


def _read_side_by_side(x, table):
    """table: [batch, seq, 2 * rotary_dim], cos and sin side by side."""
    cos, sin = table.unsqueeze(-2).chunk(2, -1)
    return Reading(cos[..., ::2], sin[..., 1::2], "a, a, b, b, side by side")


def _side_by_side(s):
    yield s.x(s.batch, s.seq, s.heads), torch.cat(_read_once(s, s.batch, s.seq), -1)


# ---- cos and sin as one argument ----


def _read_whole(x, freqs):
    """x: [batch, seq, channels], all of which rotate with angles of their own."""
    return full_width(*freqs, True)


def _whole(s):
    yield s.x(s.batch, s.seq)[..., :16], each_twice(*s.angles(s.batch, s.seq), True)
    yield s.x(s.batch, s.seq)[..., :16], each_twice(*s.angles(1, s.seq), True)


def _read_split(x, freqs):
    """x: [batch, heads, seq, head_dim], or [batch, seq, channels] with tables [batch, heads, seq, head_dim / 2]."""
    cos, sin = freqs
    reading = Reading(cos, sin, "a, b", False)
    if x.dim() == 4 or cos.dim() != 4:
        return reading
    batch, heads, seq, _ = cos.shape
    return reading._replace(
        cos=cos.transpose(1, 2),
        sin=sin.transpose(1, 2),
        to=lambda x: x.reshape(batch, seq, heads, -1),
        back=lambda y: y.reshape(batch, seq, -1),
    )


def _split(s):
    yield s.x(s.batch, s.heads, s.seq)[..., :16], s.angles(s.batch, s.heads, s.seq)
    yield s.x(s.batch, s.seq)[..., :16], s.angles(s.batch, s.seq)
    if s.head_dim == 16:
        yield s.x(s.batch, s.seq, s.heads).flatten(2), s.angles(s.batch, s.heads, s.seq)


def _tables(shape, interleaved, index, x_shape=("batch", "seq", "heads"), tensors=1, apart=False):
    """Returns a convention: cos and sin of this shape, which broadcast over x with this index.

    apart: whether cos and sin are two arguments.
    """

    def read(x, *freqs):
        cos, sin = (t[index] for t in (freqs if apart else freqs[0]))
        return full_width(cos, sin, interleaved)

    def samples(s):
        sizes = {"batch": s.batch, "seq": s.seq, "heads": s.heads}
        tables = each_twice(*s.angles(*(sizes[n] for n in shape)), interleaved)
        xs = [s.x(*(sizes[n] for n in x_shape)) for _ in range(tensors)]
        yield *xs, *(tables if apart else (tables,))

    return Convention(tensors, 2 if apart else 1, read, samples)


_ALL = slice(None)

# ---- cos and sin as two arguments ----


def _read_even_odd(x, cos, sin):
    return Reading(cos[..., ::2], sin[..., 1::2], "a, a, b, b, of which one is read")


def _even_odd(s):
    yield s.x(s.batch, s.seq, s.heads)[..., :16], *_read_once(s, 1, s.seq, 1)


def _apart(s):
    yield s.x(s.batch, s.seq, s.heads)[..., :16], *s.angles(s.seq, s.heads)
    yield s.x(s.batch, s.seq, s.heads)[..., :16], *s.angles(s.seq, 1)


def _written_out(s):
    yield s.x(s.batch, s.seq, s.heads)[..., :16], *each_twice(*s.angles(s.batch, s.seq, 1), False)
    yield s.x(s.seq, s.heads)[..., :16], *each_twice(*s.angles(s.seq, 1), False)


def _read_unsqueezed(x, cos, sin, unsqueeze_dim):
    return full_width(cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), False)


def _unsqueezed(s):
    for dim, shape in ((1, (s.heads, s.seq)), (2, (s.seq, s.heads))):
        yield s.x(s.batch, *shape), *each_twice(*s.angles(s.batch, s.seq), False), dim


# ---- tables by position ----


def _read_grid(x, sizes, freqs, stride):
    """sizes: [batch, 3], frames, height and width. freqs: [max_position, head_dim / 2], a part for each of the three."""
    (frames, height, width), *others = sizes.tolist()
    if any(other != [frames, height, width] for other in others) or frames * height * width != x.shape[1]:
        return None
    pairs = x.shape[-1] // 2
    of_frames, of_height, of_width = freqs.split([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3], 1)
    parts = (
        of_frames[: frames * stride : stride].view(frames, 1, 1, -1),
        of_height[:height].view(1, height, 1, -1),
        of_width[:width].view(1, 1, width, -1),
    )
    table = torch.cat([part.expand(frames, height, width, -1) for part in parts], -1)
    return complex_numbers(table.view(1, x.shape[1], 1, -1))


def _grid(s):
    if s.dtypes[1].itemsize >= 4 and s.head_dim == 16:
        for stride in (1, 2):
            sizes = torch.tensor([[1, 1, s.seq]] * s.batch if s.seq < 9 else [[5, 2, s.seq // 10]] * s.batch)
            yield s.x(s.batch, s.seq, s.heads), sizes, torch.complex(*s.angles(s.seq + 5)), stride


def _read_by_position(x, positions, cos, sin):
    cos, sin = (F.embedding(positions, t)[:, None] for t in (cos, sin))
    return full_width(cos, sin, False)


def _by_position(s):
    positions = (torch.arange(s.batch * s.seq) * 3 % 7).view(s.batch, s.seq)
    yield s.x(s.batch, s.heads, s.seq)[..., :16], positions, *each_twice(*s.angles(7), False)


CONVENTIONS = (
    Convention(1, 4, _read_shared, _shared),
    Convention(1, 3, _read_qwen, _qwen),
    Convention(1, 1, lambda x, f: complex_numbers(f.unsqueeze(2)), _complex("batch", "seq")),  # Z-Image, Bria FIBO 2
    Convention(1, 1, lambda x, f: complex_numbers(f), _complex(1, "seq", 1)),  # AnyFlow
    Convention(1, 1, _read_transposed, _transposed),  # Sana-WM
    Convention(1, 1, lambda x, f: matrices(f), _matrices),  # PRX, Kandinsky
    Convention(2, 1, lambda x, f: matrices(f), _two_with_matrices),  # HiDream
    Convention(1, 1, lambda x, f: _of_angles(f), _angles),  # Ernie
    Convention(1, 1, _read_last_angles, _last_angles),  # Stable Audio 3
    Convention(1, 1, _read_side_by_side, _side_by_side),  # Helios
    Convention(1, 1, _read_whole, _whole),  # LTX
    Convention(1, 1, _read_split, _split),  # LTX-2
    _tables(("seq",), False, (None, _ALL, None)),  # LongCat
    _tables(("seq",), False, (_ALL, None), ("seq", "heads")),  # MiniMax Music
    _tables(("seq",), True, (None, _ALL, None), tensors=2),  # JoyImage
    _tables(("batch", "seq"), True, (_ALL, _ALL, None), tensors=2),  # JoyImage Edit Plus
    Convention(1, 2, _read_even_odd, _even_odd),  # Wan, SkyReels, ChronoEdit, Sana-Video
    Convention(1, 2, lambda x, cos, sin: Reading(cos, sin, "a, b"), _apart),  # Mochi
    _tables(("seq",), False, (None, _ALL, None), apart=True),  # MiniMax H3
    Convention(1, 2, lambda x, cos, sin: full_width(cos, sin, False), _written_out),  # Ideogram 4, Cosmos 3
    Convention(1, 3, _read_unsqueezed, _unsqueezed),  # Anima
    Convention(1, 3, _read_by_position, _by_position),  # Allegro, along each axis
    Convention(1, 3, _read_grid, _grid),  # Wan-Animate 2
)
