"""Finds the RMS norms of a model, by calling them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Norm:
    """An RMS norm that was found in a module."""

    eps: float
    weight: bool  # False if it has none
    plus_one: bool  # True if it multiplies by 1 + weight (Gemma)

    def weight_of(self, module: nn.Module, x: Tensor) -> Tensor:
        """Returns the weight that x [.., heads, head_dim] is multiplied by, [head_dim] or [heads, head_dim]."""
        w = module._parameters.get("weight")
        if w is None:  # a parametrisation computes it
            w = module.weight
        if self.plus_one:
            w = 1.0 + w.float()
        elif w.dtype != x.dtype and w.dtype != torch.float32:
            w = w.float()
        return w if w.shape[0] == x.shape[-1] else w.view(-1, x.shape[-1])


def find_norm(module: nn.Module) -> Norm | None:
    """Returns the RMS norm that a module computes, which is found out by calling it, or None."""
    eps = next(
        (v for n in ("eps", "variance_epsilon", "norm_eps") if isinstance(v := vars(module).get(n), float)), None
    )
    parameters = dict(module.named_parameters())
    if eps is None or next(module.children(), None) is not None or not set(parameters) <= {"weight"}:
        return None
    weight = parameters.get("weight")
    if weight is None:
        dim, w, dtype, device = 64, torch.ones(64), torch.float32, torch.get_default_device()
    else:
        if weight.dim() != 1 or weight.is_meta:
            return None
        dim, w, dtype, device = len(weight), weight.detach().cpu().float(), weight.dtype, weight.device
    with quietly():
        # With small numbers, eps decides as much as the numbers.
        x = torch.randn(7, dim, device="cpu", dtype=torch.float32) * eps**0.5 * torch.tensor([[1.0]] * 4 + [[1e4]] * 3)
        x = x.to(dtype).float()
        try:
            actual = module(x.to(device, dtype))
        except Exception:  # the module takes something else
            return None
        if not isinstance(actual, Tensor) or actual.dtype != dtype:
            return None
        actual = actual.float().cpu()
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        for plus_one in (False, True):
            if close(actual, expected * (w + plus_one), dtype):
                return Norm(eps, weight is not None, plus_one and weight is not None)
    return None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leaves the random state as it is, and makes the results independent of the modes of the caller."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(0)
        yield


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether two results differ by no more than rounding to dtype, as a part of the largest number."""
    tolerance = 2e-5 if dtype in (torch.float32, torch.float64) else 2**-6
    if actual.shape != expected.shape or not actual.numel():
        return actual.shape == expected.shape
    return bool((actual.double() - expected.double()).abs().max() <= tolerance * expected.double().abs().max())
