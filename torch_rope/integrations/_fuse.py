"""RMS norms that a fused layer computes itself: those whose forward has a known text."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook

from ._text import NoText, text_of


class Norm(NamedTuple):
    """What the forward of an RMS norm computes."""

    eps: str  # the name of the attribute that is added to the mean of the squares
    offset: float = 0.0  # is added to the weight: 1 if the norm multiplies by 1 + weight (Gemma)
    rounds: bool = False  # whether x is rounded to its dtype before it is multiplied by the weight (Llama)


class Norms(NamedTuple):
    """The norms of a layer, which are of one class."""

    kind: type[nn.Module]
    forward: Callable  # of the class, when its text was read
    norm: Norm

    def are(self, modules: Collection[nn.Module], x: Tensor, eager: bool) -> bool:
        """Returns whether the operators compute what norms of x do: with one eps, and with their rounding if eager."""
        kind, name, first, rounds = self.kind, self.norm.eps, None, eager and self.norm.rounds
        for module in modules:
            own = module.__dict__
            if type(module) is not kind or not is_plain(own) or own[name] is None:
                return False
            if first is not None and own[name] != first:
                return False
            first = own[name]
            if rounds and ((weight := own["_parameters"].get("weight")) is None or weight.dtype is not x.dtype):
                return False
        return kind.forward is self.forward and (is_compiling() or not _has_any_global_hook())

    def flags(self, module: nn.Module, eager: bool) -> dict:
        """Returns how the operators compute a norm."""
        eps = module.__dict__[self.norm.eps]
        rounds = eager and self.norm.rounds
        return {"norm_eps": eps, "norm_weight_offset": self.norm.offset, "round_before_weight": rounds}


def known_norms(modules: Collection[nn.Module], norms: Mapping[str, Norm]) -> Norms | str:
    """Returns what the norms of a layer are, or why they are not known. norms: what the texts of forwards compute."""
    kinds: list[type[nn.Module]] = [*dict.fromkeys(map(type, modules))]
    kind, *others = kinds
    try:
        norm = norms.get(text_of(kind.forward, owner=kind)) if kind.__call__ is nn.Module.__call__ else None
    except NoText:
        norm = None
    if others or norm is None:
        return f"its norms are {' and '.join(k.__name__ for k in kinds)} but must be RMS norms of one known class"
    return Norms(kind, kind.forward, norm)


def weight_of(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the weight that x [.., heads, head_dim] is multiplied by, [head_dim] or [heads, head_dim]."""
    w: Any = module.weight
    w = w.float() if w.dtype != x.dtype else w
    return w if len(w) == x.shape[-1] else w.view(-1, x.shape[-1])


def is_plain(own: dict) -> bool:
    """Returns whether nothing but its class sees the calls of a module with these attributes."""
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not (hooks or "forward" in own or "_norm" in own)
