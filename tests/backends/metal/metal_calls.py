"""Short names for calls on Metal."""

import pytest
import torch

import torch_rope

HALVES = [torch.float32, torch.float16, torch.bfloat16]
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
NORM = pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
ops = torch.ops.rope


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).to("mps")


def freqs(rotary_dim):
    return torch_rope.inv_freq(rotary_dim, device="mps")


def tables(rows, rotary_dim):
    return [t.to("mps") for t in torch_rope.cos_sin(torch.arange(rows), torch_rope.inv_freq(rotary_dim))]


def weights_of(*shape, k_shape=None):
    return dict(q_norm_weight=randn(*shape), k_norm_weight=randn(*k_shape or shape))
