"""The RMS norms of attention layers. The trial of a fused layer shows which of the guesses is right."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Norm(NamedTuple):
    """An RMS norm with a weight."""

    eps: float
    plus_one: bool  # True if it multiplies by 1 + weight (Gemma)

    def weight_of(self, module: nn.Module, x: Tensor) -> Tensor:
        """Returns the weight that x [.., heads, head_dim] is multiplied by, [head_dim] or [heads, head_dim]."""
        w = module.weight
        if self.plus_one:
            w = 1.0 + w.float()
        elif w.dtype not in (x.dtype, torch.float32):
            w = w.float()
        return w if len(w) == x.shape[-1] else w.view(-1, x.shape[-1])


def guesses(*modules: nn.Module) -> list[Norm]:
    """Returns the RMS norms that modules may all be, as far as their attributes tell."""
    names, every_eps = ("eps", "variance_epsilon", "norm_eps"), set()
    for module in modules:
        every_eps.add(next((v for n in names if isinstance(v := vars(module).get(n), float)), None))
        if [n for n, p in module.named_parameters() if p.dim() == 1] != ["weight"]:
            return []
    return [Norm(eps, plus_one) for eps in every_eps if eps and len(every_eps) == 1 for plus_one in (False, True)]


def close(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether two results differ by no more than rounding to their dtype, as a part of the largest number."""
    tolerance = 2e-5 if expected.dtype in (torch.float32, torch.float64) else 2**-6
    if actual.shape != expected.shape or not actual.numel():
        return actual.shape == expected.shape
    return bool((actual.double() - expected.double()).abs().max() <= tolerance * expected.double().abs().max())
