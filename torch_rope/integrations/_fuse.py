"""What fused layers of all libraries have in common: their norms, and the trial that shows whether they are right."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode

from ._rotary import plainly


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
        if [(n, p.dim()) for n, p in module.named_parameters()] != [("weight", 1)]:
            return []
    return [Norm(eps, plus_one) for eps in every_eps if eps and len(every_eps) == 1 for plus_one in (False, True)]


def are_watched(*modules: nn.Module) -> bool:
    """Returns whether something sees the calls of modules, which a fused layer does not make."""
    names = "forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    watched = any(vars(module).get(name) for module in modules for name in names)
    return watched or (_has_any_global_hook() and not torch.compiler.is_compiling())


class _WithoutChance(TorchFunctionMode):
    """Makes dropout multiply by the share that it keeps, so that a trial draws no random numbers of the program."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is nn.functional.dropout:  # torch passes all but the first argument by name
            return args[0] * (1 - kwargs["p"]) if kwargs["training"] else args[0]
        kept = 1.0
        if function is nn.functional.scaled_dot_product_attention:
            kept -= kwargs.pop("dropout_p", 0.0)
        result = function(*args, **kwargs)
        return result if kept == 1 else result * kept


def disagreement(own: Callable, fused: Callable, trials: Iterable[Callable]) -> str:
    """Returns why a fused method must not take the place of a layer's own method, or an empty text.

    Each trial calls a method on random numbers. The fused one must have the results of the own one, but for rounding.
    """
    why = "it could not be tried"
    for results in trials:
        try:
            with _WithoutChance():
                expected = results(own)
        except Exception:  # the layer does not support this
            continue
        try:
            with _WithoutChance():
                why = "" if all(map(_close, results(fused), expected)) else "the results would differ"
        except Exception as error:
            why = str(error)
        if why:
            return why
    return why


def trained(layer: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Returns what a layer computes in training, and the gradient of x."""
    modes = {module: module.training for module in layer.modules()}
    layer.train()
    try:
        with plainly(), torch.enable_grad():
            x = x.detach().requires_grad_()
            out = forward(x)
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x])]
    finally:
        for module, mode in modes.items():
            module.training = mode


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether two results differ by no more than rounding to their dtype, as a part of the largest number."""
    tolerance = 2e-5 if expected.dtype in (torch.float32, torch.float64) else 2**-6
    if actual.shape != expected.shape or not actual.numel():
        return actual.shape == expected.shape
    return bool((actual.double() - expected.double()).abs().max() <= tolerance * expected.double().abs().max())
