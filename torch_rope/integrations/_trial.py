"""What fused layers of all libraries have in common: the look at their code, their norms, and the parts of a trial.

A fused method does what it knows. So a layer is fused only if its own code says nothing that the fused method does not
know, and if both methods do the same with random numbers.
"""

import dis
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_flatten

from ._conventions import Sample
from ._names import nested

# ---- code ----

# Instructions that move values, call, or end, in Python 3.10 to 3.13. What another Python has besides is not known.
_MOVES = re.compile(
    "RESUME|NOP|PRECALL|PUSH_NULL|CALL|CALL_(KW|METHOD|INTRINSIC_1|FUNCTION.*)|STORE_FAST.*|LIST_.*|DICT_MERGE|RETURN_VALUE"
    "|BUILD_(TUPLE|LIST|MAP|CONST_KEY_MAP)|UNPACK_SEQUENCE|JUMP_FORWARD|POP_TOP|SWAP|COPY|DUP_TOP|ROT_(TWO|THREE)"
)


def _said(code: types.CodeType) -> Iterator[str]:
    """Yields what code says, in words: globals, ``self.name``, ``.name`` of something else, constants, ``[0:2]``, operators,
    ``if`` with what decides, and the names of other instructions."""
    before, last = "", ""
    for i in dis.get_instructions(code):
        name, value, words = i.opname, i.argval, []
        if name in ("TO_BOOL", "NOT_TAKEN"):
            continue
        if name == "LOAD_GLOBAL":
            words = [value]
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            words = [f"{last if last in ('self', 'attn') else ''}.{value}"]
        elif name in ("LOAD_CONST", "RETURN_CONST", "LOAD_SMALL_INT", "KW_NAMES"):
            value = code.co_consts[i.arg or 0] if name == "KW_NAMES" else value
            value = [value] if not isinstance(value, tuple) else value
            words = [f"[{v.start}:{v.stop}]" if isinstance(v, slice) else repr(v) for v in value]
        elif name in ("BUILD_SLICE", "BINARY_SLICE"):
            words = [f"[{before}:{last}]"]
        elif "JUMP" in name and "IF" in name and value > i.offset:  # not a loop
            words = [f"if {'None' if 'NONE' in name else last}"]
        elif name == "IS_OP":
            words = [f"is {last}"]
        elif name == "BINARY_SUBSCR" or i.argrepr == "[]":
            words = [] if ":" in last else [f"[{last}]"]
        elif not _MOVES.fullmatch(name) and not name.startswith("LOAD_FAST"):
            words = [i.argrepr if name == "BINARY_OP" else name]
        yield from words
        local = value[-1] if isinstance(value, tuple) else value
        before, last = last, words[-1] if words else str(local) if "LOAD" in name else ""
        last = "" if name == "BINARY_SLICE" else last  # which indexes, too


def said(function: types.FunctionType) -> list[str]:
    """Returns what the code of a function and of the functions that it defines says, see _said."""
    return [word for code in nested(function.__code__) for word in _said(code) if not word.startswith("<code ")]


def unknown(function: types.FunctionType, words: Collection[str]) -> str:
    """Returns what a function says that is not among the words, or an empty text."""
    if function.__code__.co_kwonlyargcount or any(d is not None for d in function.__defaults__ or ()):
        return "has arguments of its own"
    other = next((word for word in said(function) if word not in words), None)
    return "" if other is None else f"uses {re.sub(r'^(self|attn)?[.](?=[^0-9])', '', other)}"


def are_plain(modules: Collection[nn.Module]) -> bool:
    """Returns whether nothing but their classes sees the calls of modules, which a fused layer may not make."""
    for own in map(vars, modules):  # without more loops, because each layer of a decode step asks
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return False
        if "forward" in own or "_norm" in own:
            return False
    return torch.compiler.is_compiling() or not _has_any_global_hook()


# ---- norms ----

# What the code of RMS norms says.
_OF_NORMS = """
    torch .float32 .float .dtype .to .type_as .pow 2 .mean -1 'keepdim' True .rsqrt + * BINARY_ADD BINARY_MULTIPLY 1.0
    self.weight self.variance_epsilon self.eps self._norm F .rms_norm self.normalized_shape
"""


class Norm(NamedTuple):
    """A kind of RMS norm with a weight."""

    kind: type
    shapes: tuple[torch.Size, ...]  # of the weights of q and k
    eps: str  # the name of its attribute
    offset: float  # is added to the weights: 1 if the norm multiplies by 1 + weight (Gemma)

    def are(self, q_norm: nn.Module, k_norm: nn.Module) -> bool:
        """Returns whether two norms are of this kind, with the same eps."""
        weights = [m._parameters.get("weight") for m in (q_norm, k_norm) if type(m) is self.kind]
        if tuple([w.shape for w in weights if w is not None]) != self.shapes:
            return False
        eps = vars(q_norm)[self.eps]
        return eps is not None and eps == vars(k_norm)[self.eps]

    def weight_of(self, module: Any, x: Tensor) -> Tensor:
        """Returns the weight that x [.., heads, head_dim] is multiplied by, [head_dim] or [heads, head_dim]."""
        w: Tensor = module.weight
        w = w.float() if w.dtype != x.dtype else w
        return w if len(w) == x.shape[-1] else w.view(-1, x.shape[-1])


def norm_of(norms: Sequence[nn.Module]) -> Norm | str:
    """Returns the kind of RMS norm that two modules are, as far as their code and attributes tell, or why they are none."""
    q_norm, k_norm = norms[0], norms[-1]
    others = f"its norms are {' and '.join(type(m).__name__ for m in norms)} but must be two RMS norms with a weight"
    kind, parameters = type(q_norm), [*q_norm.named_parameters(), *k_norm.named_parameters()]
    methods = [getattr(kind, name) for name in ("forward", "_norm") if hasattr(kind, name)]
    eps = [name for name in ("eps", "variance_epsilon") if isinstance(vars(q_norm).get(name), float)]
    known = all(isinstance(f, types.FunctionType) and not unknown(f, _OF_NORMS.split()) for f in methods)
    known &= kind.__call__ is nn.Module.__call__ and [(n, p.dim()) for n, p in parameters] == [("weight", 1)] * 2
    if not known or len(norms) != 2 or len(eps) != 1:
        return others
    norm = Norm(kind, tuple(p.shape for _, p in parameters), eps[0], float(any("1.0" in said(f) for f in methods)))
    return norm if norm.are(q_norm, k_norm) else others


# ---- the parts of a trial ----


def changed(module: nn.Module, modules: Mapping[str, nn.Module | None], **attributes: Any) -> nn.Module:
    """Returns a module like another one, but with other modules, other attributes where it has them, and no parameters."""
    new = object.__new__(type(module))
    attributes = {name: value for name, value in attributes.items() if getattr(module, name, None) is not None}
    vars(new).update({**vars(module), **attributes, "_modules": modules, "_parameters": {}, "_buffers": {}})
    return new


def like_norm(sample: Sample, module: Any, norm: Norm) -> nn.Module:
    """Returns a norm like a module, on the CPU, whose numbers show what it does."""
    new = changed(module, {}, **{norm.eps: 0.25})
    new._parameters["weight"] = nn.Parameter(sample.numbers(module.weight.numel()))
    return new


def small_linear(sample: Sample, channels: int, out: int) -> nn.Module:
    """Returns a random projection on the CPU, which takes no random numbers from the program."""
    new = nn.Linear(channels, out, device="meta")
    new.weight, new.bias = (nn.Parameter(sample.numbers(*shape)) for shape in ((out, channels), (out,)))
    return new


def untried(*args, **kwargs):
    raise NotImplementedError("its trial gave what only its own method takes")


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
