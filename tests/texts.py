"""A function with the text of one in tests/integrations/test_rotary_functions.py, written in another way."""

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
