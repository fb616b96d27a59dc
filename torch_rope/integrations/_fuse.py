"""What fused layers of all libraries have in common: the look at their code, their norms, and the parts of a trial.

A fused method does what it knows. So a layer is fused only if its own code has no name, constant or branch that the fused
method does not know, and if both methods do the same with random numbers.
"""

import dis
import re
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from ._bits import is_traced
from ._conventions import Sample
from ._names import nested

# ---- what is known ----

# Instructions that may do something else for other numbers, or leave something behind.
_REFUSED = {"COMPARE_OP", "CONTAINS_OP", "FOR_ITER", "STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR"}


def unknown(function: types.FunctionType, words: Collection[str], switches: Collection[str] = ()) -> str:
    """Returns what the code of a function has that is not known, or an empty text.

    Args:
        words: the known names of attributes, globals and keywords, and constants.
        switches: the names whose truth may decide a branch. Whether something is None may always do that.
    """
    for code in nested(function.__code__):
        steps = [i for i in dis.get_instructions(code) if i.opname not in ("TO_BOOL", "NOT_TAKEN")]
        constants = [i.argval for i in steps if i.opname == "LOAD_SMALL_INT"]
        constants += [c for c in code.co_consts if c != function.__doc__ and not isinstance(c, types.CodeType)]
        for word in (*code.co_names, *re.findall(r"[\w.-]+", repr(constants))):
            if word not in words and word != "None":
                return f"uses {word}"
        for before, i in zip(steps, steps[1:], strict=False):
            decides = "JUMP" in i.opname and "IF" in i.opname and "NONE" not in i.opname
            if i.opname in _REFUSED or (decides and before.opname != "IS_OP" and before.argval not in switches):
                return "branches, compares or loops in a way that is not known"
    return ""


def are_plain(modules: Collection[nn.Module]) -> bool:
    """Returns whether nothing but their classes sees the calls of modules, which a fused layer may not make."""
    names = "forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    watched = any(vars(module).get(name) for module in modules for name in names)
    return not watched and (torch.compiler.is_compiling() or not _has_any_global_hook())


# ---- norms ----

_OF_NORMS = """
    torch dtype to float32 float pow mean keepdim rsqrt weight variance_epsilon eps _norm type_as F rms_norm
    normalized_shape True -1 1.0 2
"""  # the names and constants in the code of RMS norms
_sums = WeakTensorKeyDictionary()  # weight -> its version, and 1 + weight


class Norm(NamedTuple):
    """A kind of RMS norm with a weight."""

    kind: type
    eps: str  # the name of its attribute
    plus_one: bool  # True if it multiplies by 1 + weight (Gemma)

    def are(self, *modules: nn.Module) -> bool:
        """Returns whether modules are of this kind, with the same eps."""
        return all(type(m) is self.kind for m in modules) and len({getattr(m, self.eps) for m in modules}) == 1

    def weight_of(self, module: nn.Module, x: Tensor) -> Tensor:
        """Returns the weight that x [.., heads, head_dim] is multiplied by, [head_dim] or [heads, head_dim]."""
        w = module.weight
        if self.plus_one:
            w = _plus_one(w)
        elif w.dtype not in (x.dtype, torch.float32):
            w = w.float()
        return w if len(w) == x.shape[-1] else w.view(-1, x.shape[-1])


def _plus_one(weight: Tensor) -> Tensor:
    if torch.is_grad_enabled() or is_traced() or weight.is_inference():
        return 1.0 + weight.float()
    version, result = _sums.get(weight, (-1, None))
    if version != weight._version:  # each step of decoding has the weights of the one before
        result = 1.0 + weight.float()
        _sums[weight] = weight._version, result
    return result


def norm_of(*modules: nn.Module) -> Norm | None:
    """Returns the kind of RMS norm that modules have, as far as their code and their attributes tell, or None."""
    kind, first = type(modules[0]), vars(modules[0])
    methods = [f for name in ("forward", "_norm") if isinstance(f := getattr(kind, name, None), types.FunctionType)]
    known = not any(unknown(f, _OF_NORMS.split()) for f in methods)
    known &= all([(n, p.dim()) for n, p in m.named_parameters()] == [("weight", 1)] for m in modules)
    eps = [name for name in ("eps", "variance_epsilon") if isinstance(first.get(name), float)]
    norm = Norm(kind, "".join(eps), any("1.0" in map(repr, f.__code__.co_consts) for f in methods))
    return norm if known and len(eps) == 1 and norm.are(*modules) else None


# ---- the parts of a trial ----


def changed(module: nn.Module, modules: dict[str, nn.Module | None], **attributes: Any) -> nn.Module:
    """Returns a module like another one, but with other modules, other attributes where it has them, and no parameters."""
    new = object.__new__(type(module))
    attributes = {name: value for name, value in attributes.items() if getattr(module, name, None) is not None}
    vars(new).update({**vars(module), **attributes, "_modules": modules, "_parameters": {}, "_buffers": {}})
    return new


def like_norm(sample: Sample, module: nn.Module, norm: Norm) -> nn.Module:
    """Returns a norm like a module, on the CPU, whose numbers show what it does."""
    new = changed(module, {}, **{norm.eps: 0.25})
    new._parameters["weight"] = nn.Parameter(sample.numbers(module.weight.numel()))
    return new


def small_linear(sample: Sample, channels: int, out: int) -> nn.Linear:
    """Returns a random projection on the CPU, which takes no random numbers from the program."""
    new = nn.Linear(channels, out, device="meta")
    new.weight, new.bias = (nn.Parameter(sample.numbers(*shape)) for shape in ((out, channels), (out,)))
    return new


def untried(*args, **kwargs):
    raise NotImplementedError("its fused method does not take what the trial gives")


def disagreement(trial_of: Callable[..., tuple], *args: Any) -> str:
    """Returns why a fused method must not take the place of a layer's own method, or an empty text.

    trial_of(*args) returns outcome, the own method, the fused one, and cases: outcome(method, *case) calls a method on
    random numbers, and returns all that it returns and gives to others. The fused one may differ by rounding.
    """
    with torch.no_grad():
        try:
            outcome, own, fused, cases = trial_of(*args)
            expected = [outcome(own, *case) for case in cases]
        except Exception as error:
            advice = "if it was quantised or sharded, patch the model before that"
            return f"it could not be tried ({type(error).__name__}: {error}); {advice}"
        try:
            alike = all(_are_equal(outcome(fused, *case), e) for case, e in zip(cases, expected, strict=True))
        except Exception as error:
            return str(error)
    return "" if alike else "the results would differ"


def _are_equal(actual: Any, expected: Any) -> bool:
    (ours, structure), (theirs, other) = tree_flatten(actual), tree_flatten(expected)
    return structure == other and all(map(_is_equal, ours, theirs))


def _is_equal(actual: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return actual is expected or (type(actual) is type(expected) and actual == expected)
    alike = (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    return alike and bool((actual - expected).abs().max() <= 2e-5 * expected.abs().max())
