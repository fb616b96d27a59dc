"""Compares torch_rope with other implementations (peers) of the rotation. Other tests compare it with the functions of
transformers, diffusers, timm and ComfyUI.

The largest allowed difference of two results is derived, not tuned. u is the unit roundoff of a dtype.
- x cos - y sin is computed as two rounded products and one rounded sum. The result is off by at most 2 u of the pair's
  magnitude, because |x cos| + |y sin| <= hypot(x, y). Two results from the same cos and sin therefore differ by at most
  4 u.
- A peer that rounds cos and sin to the dtype adds 1 u.
- Each rounding of a float32 angle changes it by up to u |angle|, which changes the result by as much, as a part of the
  magnitude.
- Channels from rotary_dim on are equal bit for bit.
"""

import itertools

import numpy as np
import pytest
import torch
from cases import needed

import torch_rope
from torch_rope import rotate

F32 = 2.0**-24  # unit roundoff of float32
OUR_ANGLE = 5e-7  # the error that cos and sin from inv_freq may add to an element, as a part of the pair's magnitude
LAST = 2048  # positions are below this if the peer's angles are float32; then 1 u of an angle is at most 1.2e-4
SINGLE_OR_HALF = [torch.float32, torch.float16, torch.bfloat16]

# (batch, seq, heads, head_dim, rotary_dim)
SIZES = [(2, 7, 3, 64, 64), (1, 33, 8, 128, 128), (2, 13, 8, 80, 32), (1, 1, 1, 128, 64), (2, 3, 3, 64, 6)]


def every(values):
    """Parametrizes a test with every combination of a size, a pairing and one of the values."""
    return pytest.mark.parametrize("size, interleaved, of", list(itertools.product(SIZES, (False, True), values)))


def heads_of(size, dtype):
    """Returns random heads [batch, seq, heads, head_dim] on the CPU.

    In memory they are [batch, heads, seq, head_dim], the layout of the peers, which x.transpose(1, 2) restores.
    """
    batch, seq, heads, head_dim, _ = size
    return torch.randn(batch, heads, seq, head_dim, dtype=torch.float64).to(dtype).transpose(1, 2)


def angles(positions, inv_freq):
    """Returns the angles [batch or 1, seq, rotary_dim / 2] in float64, on the CPU."""
    return torch.atleast_2d(positions).double().unsqueeze(-1) * inv_freq.double()


def assert_agree(ours, theirs, x, rotary_dim, interleaved, *, roundings=4, angle=0.0):
    """Asserts that two results of rotating x [batch, seq, heads, head_dim] agree.

    They may differ by (roundings u + angle), as a part of a pair's magnitude. angle is a number, or a tensor
    [batch or 1, seq, rotary_dim / 2].
    """

    def pairs_of(t):  # the first channels and the second channels of the pairs, in float64
        t = t[..., :rotary_dim].double()
        return (t[..., 0::2], t[..., 1::2]) if interleaved else t.chunk(2, -1)

    ours = ours.cpu()
    assert ours.shape == theirs.shape == x.shape and ours.dtype == theirs.dtype == x.dtype
    assert torch.equal(ours[..., rotary_dim:], theirs[..., rotary_dim:])
    info = torch.finfo(x.dtype)
    # Below the smallest normal number, the error of a rounding no longer shrinks with the rounded number.
    magnitude = torch.hypot(*pairs_of(x)).clamp(min=info.smallest_normal)
    angle = angle.unsqueeze(-2) if torch.is_tensor(angle) else angle
    difference = torch.stack(pairs_of(ours.double() - theirs.double())).abs()
    assert (difference / ((roundings * info.eps / 2 + angle) * magnitude)).max() <= 1


def assert_agrees_with_mlx(x, rotary_dim, interleaved, ours, angle, roundings, **options):
    mx = needed("mlx.core")
    # The values are converted through float32, because numpy has no bfloat16. This is exact.
    there = mx.array(x.transpose(1, 2).float().numpy()).astype(getattr(mx, str(x.dtype).removeprefix("torch.")))
    options = {name: mx.array(v.numpy()) if torch.is_tensor(v) else v for name, v in options.items()}
    # MLX runs on the CPU: the limits below are for its cos and sin there, not for the fast ones of a GPU.
    theirs = mx.fast.rope(there, rotary_dim, traditional=interleaved, stream=mx.cpu, **options)
    theirs = torch.from_numpy(np.array(theirs.astype(mx.float32))).to(x.dtype).transpose(1, 2)
    # In float32 MLX's polynomials for cos and sin have errors of about 2 u. In other dtypes MLX rounds cos and sin to
    # the dtype, which adds 1 u.
    limits = {"roundings": 6 if x.dtype == torch.float32 else 5, "angle": OUR_ANGLE + angle.abs() * roundings * F32}
    assert_agree(ours, theirs, x, rotary_dim, interleaved, **limits)


BASES = [(1e4, 1.0, 0), (5e5, 1.0, 1900), (1e4, 0.25, 37), (5e5, 1.5, 1001)]


@every([(dtype, *base) for dtype in SINGLE_OR_HALF for base in BASES])
def test_rotate_agrees_with_mlx(size, interleaved, of, device):
    dtype, base, scale, offset = of
    rotary_dim, x = size[-1], heads_of(size, dtype)
    # MLX scales the position, which has the same effect as scaling the frequency.
    inv_freq = torch_rope.inv_freq(rotary_dim, base) * scale
    # MLX's frequency is exp2(i * float32(log(base) / half) * float32(log2(e))). These are 4 roundings of the exponent,
    # and each changes the frequency by a part u |log(frequency)| of it. 8 more roundings: exp2's polynomial (4),
    # position * scale, the product of that and the frequency, our frequency, and our frequency times scale.
    angle = angles(torch.arange(size[1]) + offset, inv_freq)
    roundings = 8 + 4 * (inv_freq / scale).double().log().abs()
    ours = rotate(x.to(device), inv_freq=inv_freq.to(device), offset=offset, interleaved=interleaved)
    options = {"base": base, "scale": scale, "offset": offset}
    assert_agrees_with_mlx(x, rotary_dim, interleaved, ours, angle, roundings, **options)


@every(SINGLE_OR_HALF)
def test_rotate_agrees_with_mlx_with_freqs_and_an_offset_per_sequence(size, interleaved, of, device):
    batch, seq, *_, rotary_dim = size
    x, freqs = heads_of(size, of), torch.empty(rotary_dim // 2).uniform_(1, 1000)
    offset = torch.randint(0, LAST - seq, (batch,), dtype=torch.int32)
    inv_freq, positions = 1 / freqs, offset.unsqueeze(1) + torch.arange(seq, dtype=torch.int32)
    ours = rotate(x.to(device), inv_freq=inv_freq.to(device), positions=positions.to(device), interleaved=interleaved)
    # The angle is rounded 3 times: MLX's reciprocal, our reciprocal, and MLX's product.
    options = {"base": None, "scale": 1.0, "freqs": freqs, "offset": offset}
    assert_agrees_with_mlx(x, rotary_dim, interleaved, ours, angles(positions, inv_freq), 3, **options)


# rotary-embedding-torch counts positions in x's dtype. bfloat16 has all integers up to 256, and float16 up to 2048.
@pytest.mark.parametrize("dtype, offset", [(torch.float32, LAST - 40), (torch.float16, 5), (torch.bfloat16, 200)])
@pytest.mark.parametrize("size", SIZES)
def test_rotate_agrees_with_rotary_embedding_torch(size, dtype, offset, device):
    peer, x = needed("rotary_embedding_torch").RotaryEmbedding(size[-1], theta=5e5), heads_of(size, dtype)
    inv_freq = peer.freqs.detach()
    theirs = peer.rotate_queries_or_keys(x.transpose(1, 2), offset=offset).transpose(1, 2)
    ours = rotate(x.to(device), inv_freq=inv_freq.to(device), offset=offset, interleaved=True)
    # The peer multiplies angles in float32 and uses torch's cos and sin, which are right to 1 u.
    angle = OUR_ANGLE + F32 + angles(torch.arange(size[1]) + offset, inv_freq) * F32
    assert_agree(ours, theirs, x, size[-1], True, angle=angle)
