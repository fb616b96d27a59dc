"""Rotary functions as users write them, and one with the text of another, which is written in another way."""

import torch
from torch import Tensor


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2:]  # fmt: skip
    return torch.cat((-x2, x1), dim=-1)


def rotary_of_the_test(x: Tensor, cos: Tensor, sin: Tensor, by: int = 1) -> Tensor:
    """It has a docstring."""
    # and a comment
    return (x * cos) + (rotate_half(x) * sin * by)  # fmt: skip


def of_two(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def of_one(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def of_a_pair(x, freqs):
    cos, sin = freqs
    return x * cos + rotate_half(x) * sin


def of_positions(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    """As that of transformers 4.36."""
    cos = cos[position_ids].unsqueeze(unsqueeze_dim)
    sin = sin[position_ids].unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def of_a_part(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    n = cos.shape[-1]
    q = torch.cat([q[..., :n] * cos + rotate_half(q[..., :n]) * sin, q[..., n:]], dim=-1)
    return q, torch.cat([k[..., :n] * cos + rotate_half(k[..., :n]) * sin, k[..., n:]], dim=-1)


USUAL = [of_two, of_one, of_a_pair, of_positions, of_a_part]
