"""Measures the error of each implementation from position 1 to 2^24.

Every implementation is used end to end: its own code makes the angles from positions, and rotates. Peers that take
tables made by their users are left out: their error is that of the tables. The exact result is computed in float64.

A line has the errors for one octave of positions, from 2^octave to 2^(octave + 1) - 1 (octave 24 is only position 2^24).
max_ulp is the largest error in ulps: an ulp is the distance between neighbouring numbers of the dtype at the magnitude of
the rotated pair. max_relative is the largest error as a part of that magnitude. "one rounding" rounds the exact result
once, so that an element is off by at most half an ulp; no other can be better.

Frequencies that are rounded to float32 still make a rotary embedding, in which a score depends only on the distance. So
the error of "torch_rope float32 inv_freq" is a distance from the formula.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor

import torch_rope

BASE, HEAD_DIM, HEADS, TOKENS = 1e4, 128, 4, 32
DTYPES = torch.float32, torch.bfloat16, torch.float16


# ---- The exact result ----


def rotated(x: Tensor, positions: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the exact result, the magnitude of each element's pair)."""
    # torch_rope.reference is not exact enough: at position 2^24 its float64 angle is off by 2e-9, 3% of a float32 ulp.
    inv_freq, p = torch_rope.inv_freq(HEAD_DIM, BASE).numpy(), positions.cpu().numpy()[:, None, None].astype(np.float64)
    high = inv_freq.astype(np.float32).astype(np.float64)
    rotation = np.exp(1j * (p * high)) * np.exp(1j * (p * (inv_freq - high)))
    first, second = np.split(x.cpu().double().numpy(), 2, -1)
    pairs = (first + 1j * second) * rotation
    return np.concatenate([pairs.real, pairs.imag], -1), np.tile(np.abs(pairs), 2)


# ---- The implementations ----
# Each function returns, for a dtype and a device, a function of x [tokens, heads, HEAD_DIM] and positions, which
# returns x rotated. The pairs of x are half-split.


def one_rounding(dtype, device):
    return lambda x, p: torch.from_numpy(rotated(x, p)[0]).to(x)


def ours(dtype, device):
    module = torch_rope.RotaryEmbedding(HEAD_DIM, BASE).to(device)
    return lambda x, p: module(x, x, p)[0]


def ours_float32(dtype, device):
    inv_freq = torch_rope.inv_freq(HEAD_DIM, BASE, dtype=torch.float32, device=device)
    return lambda x, p: torch_rope.rotate(x, inv_freq=inv_freq, positions=p)


def transformers(dtype, device):
    """Uses the rotary module of a model: frequencies and angles are float32, cos and sin have x's dtype."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

    module = LlamaRotaryEmbedding(LlamaConfig(head_dim=HEAD_DIM, rope_theta=BASE)).to(device)

    return lambda x, p: apply_rotary_pos_emb(x, x, *module(x, p[None]), unsqueeze_dim=2)[0][0]


def torchtune(dtype, device):
    """Uses torchtune's formula: tables and arithmetic in float32. Only the table rows that are needed are made."""
    inv_freq = 1.0 / BASE ** (torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM)

    def call(x, p):
        angle = torch.outer(p.float(), inv_freq)[:, None]
        even, odd = x.float().chunk(2, -1)  # torchtune has interleaved pairs; the arithmetic is the same
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).type_as(x)

    return call


def rotary_embedding_torch(dtype, device):
    """Does what rotate_queries_or_keys does for a token at an offset. It counts positions in x's dtype."""
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

    module = RotaryEmbedding(HEAD_DIM, theta=BASE, cache_max_seq_len=1).to(device)

    def call(x, p):
        pairs = torch.stack(x.chunk(2, -1), -1).flatten(-2)  # interleaved
        out = apply_rotary_emb(module(p.to(dtype)), pairs.transpose(0, 1)).transpose(0, 1)
        return torch.cat([out[..., 0::2], out[..., 1::2]], -1)

    return call


def mlx(dtype, device):
    """Uses mx.fast.rope on the CPU."""
    import mlx.core as mx

    def call(x, p):
        with mx.stream(mx.cpu):
            # x is a batch of sequences of one token. It is converted through float32, because numpy has no bfloat16;
            # this is exact.
            array = mx.array(x[:, :, None].cpu().float().numpy()).astype(getattr(mx, str(dtype)[6:]))
            offset = mx.array(p.cpu().int().numpy())
            out = mx.fast.rope(array, HEAD_DIM, traditional=False, base=BASE, scale=1.0, offset=offset)
            return torch.from_numpy(np.array(out.astype(mx.float32)))[:, :, 0].to(x)

    return call


IMPLEMENTATIONS = {
    "one rounding": one_rounding,
    "torch_rope": ours,
    "torch_rope float32 inv_freq": ours_float32,
    "transformers": transformers,
    "torchtune": torchtune,
    "rotary-embedding-torch": rotary_embedding_torch,
    "mlx": mlx,
}


# ---- The measurements ----


class Octave:
    """Random vectors at positions of an octave, among them the first and the last, and their exact rotation."""

    def __init__(self, octave: int, dtype: torch.dtype, device: str):
        first, end = 2**octave, 2 ** min(octave + 1, 24) + (octave == 24)
        positions = np.random.default_rng(octave).integers(first, end, TOKENS)
        positions[[0, -1]] = first, end - 1
        x = np.random.default_rng([octave, 1]).standard_normal((TOKENS, HEADS, HEAD_DIM))
        self.x, self.positions = torch.from_numpy(x).to(dtype), torch.from_numpy(positions)
        self.exact, self.magnitude = rotated(self.x, self.positions)
        self.x, self.positions = self.x.to(device), self.positions.to(device)

    def errors(self, call: Callable) -> dict:
        """Returns the errors of a function, or why there are none."""
        try:
            result = call(self.x, self.positions)
        except Exception as error:  # an implementation that fails must not prevent the others
            return {"status": "failed", "reason": reason(error)}
        assert result.dtype == self.x.dtype and result.shape == self.x.shape
        if not result.isfinite().all():
            return {"status": "wrong", "reason": "the result is not finite"}
        info = torch.finfo(self.x.dtype)
        error, size = np.abs(result.cpu().double().numpy() - self.exact), np.maximum(self.magnitude, info.tiny)
        ulp = np.ldexp(info.eps, np.frexp(size)[1] - 1)
        largest = {"max_ulp": (error / ulp).max(), "max_relative": (error / size).max()}
        return {name: float(f"{value:.4g}") for name, value in largest.items()}


def study(
    device: str = "cpu", octaves: Collection[int] = range(25), dtypes: Collection[torch.dtype] = DTYPES
) -> Iterator[dict]:
    """Yields the lines, implementation by implementation. A line with a "status" has no figures but a "reason"."""
    made = functools.cache(Octave)
    for (name, make), dtype in itertools.product(IMPLEMENTATIONS.items(), dtypes):
        which = {"kind": "accuracy", "implementation": name, "dtype": str(dtype)[6:]}
        try:
            call = make(dtype, device)
        except Exception as error:  # any exception, because packages that do not fit this torch fail in many ways
            yield {**which, "status": "failed", "reason": reason(error)}
            continue
        for octave in octaves:
            yield {**which, "octave": octave, **made(octave, dtype, device).errors(call)}


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
