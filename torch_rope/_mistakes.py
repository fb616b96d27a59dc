"""Says in plain words what torch and Python report in words of their own: a value of the wrong type, and an argument by
its name in another library. Only calls that fail, or that torch.compile traces, are looked at in full."""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual

from ._signatures import Signature

P = ParamSpec("P")
R = TypeVar("R")
MISSING = inspect.Parameter.empty  # the value of an argument that is not given, though it must be

# The name of an argument here, and what differs -> its names in transformers, vLLM, MLX and other libraries.
_OTHER_NAMES = {
    "x": "hidden hidden_states input",
    "q": "query queries",
    "k": "key keys",
    "v": "value values",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
    "slots": "slot_mapping",
    "positions": "position_ids pos_ids input_pos input_positions pos position",
    "inv_freq": "freqs frequencies inv_freqs",
    "offset": "seq_offset position_offset past_length start_pos seqlen_offset",
    "norm_eps": "eps epsilon variance_epsilon",
    "base": "theta rope_theta rotary_base freq_base",
    "head_dim": "dim dims head_size d_head",
    "rotary_dim": "dim dims",
    "rotary_dim, the number of channels that rotate": "head_dim rope_dim",
    "rotary_dim, an integer: head_dim times that factor": "partial_rotary_factor rotary_percent rotary_pct",
    "interleaved": "traditional rope_interleave interleave",
    "interleaved, which has the opposite value": "is_neox_style is_neox",
    "max_position": "max_position_embeddings max_seq_len max_seq_length max_len",
    "kind": "rope_type scaling_type type",
    "kind, whose parameters are arguments of their own; from_config takes a config": "rope_scaling",
    "factor": "scaling_factor scale_factor interpolation_factor",
    "original_max_position": "original_max_position_embeddings original_max_seq_len",
    "fuse": "fused",
    "window": "window_size sliding_window",
    "total, the number of all tokens, not of those of the longest sequence": "max_seqlen max_seqlen_q",
}
# The types of a schema, in words.
_WORDS = {"Tensor": "a tensor", "int": "an integer", "float": "a number", "bool": "True or False"}
_WORDS["dtype"] = "a dtype, such as torch.float32"
_TYPES: dict[str, tuple[type, ...]] = {
    "dtype": (torch.dtype,),
    "Tensor": (Tensor,),
    "int": (Integral, torch.SymInt),
    "float": (Real, torch.SymFloat),
    "bool": (Integral,),
}
_BITS = {"int": 63, "float": 1023}  # these types hold all integers that are at least -2**bits and below 2**bits
_ADVICE = {
    **dict.fromkeys(("cos", "sin"), "torch_rope.cos_sin makes cos and sin"),
    "offset": "pass positions, which may be a tensor: positions=torch.arange(seq, device=q.device) + offset",
    "inv_freq": "torch_rope.inv_freq(rotary_dim, base) makes it, and Frequencies have it as their inv_freq",
    **dict.fromkeys(("q_norm_weight", "k_norm_weight", "v_norm_weight"), "pass the weight of a norm"),
    "norm_weight_offset": "pass a float, or add the tensor to the weights",
    "q_factor": "pass a factor for each token, [seq]",
    "attention_factor": "pass a float, or multiply cos and sin, or the rotated channels, by the tensor",
    "norm_eps": "pass a float, or normalise q and k by torch's operators and call rotate_qk",
    "base": "pass a float, or compute inv_freq of the tensor by torch's operators",
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), "the kernel reads it from a tensor on the device of q"),
    "interleaved": "True pairs channels 2i and 2i + 1 (GPT-J), False i and i + rotary_dim / 2 (NeoX, half-split)",
}


def unknown_argument(function: str, names: Iterable[str], known: Iterable[str]) -> TypeError:
    """Returns the error of arguments that a function does not have. known: the arguments that it has."""
    names, known = list(names), list(known)
    for ours, others in _OTHER_NAMES.items():
        for name in names:
            if name in others.split() and ours.split(",")[0] in known:
                return TypeError(f"{function}: {name} is not an argument; its name here is {ours}")
    return TypeError(f"{function}: {names[0]} is not an argument; the arguments are {', '.join(known)}")


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function say in our words that an argument has another name here, or is missing."""
    parameters = inspect.signature(function).parameters
    known, needed = list(parameters), [name for name, p in parameters.items() if p.default is MISSING]
    title = re.sub(r"\.(functional|positions|kinds|config)\b", "", f"{function.__module__}.{function.__qualname__}")

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise unknown_argument(title, [name for name in kwargs if name not in known], known)
        for name in needed if len(args) < len(needed) else ():
            if name not in kwargs and name not in known[: len(args)]:
                raise wrong_type(title, name, MISSING, "given")
        return function(*args, **kwargs)

    return called


def always_called(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function that takes unknown arguments be called without those that it needs, so that it can say how they
    are named here. They are MISSING then, which is no default for inspect.signature. A function around it, as
    :func:`named` makes one, would cost each decode step 0.15 microseconds."""
    assert isinstance(function, FunctionType)
    count = function.__code__.co_argcount - len(function.__defaults__ or ())
    function.__defaults__ = (MISSING,) * count + (function.__defaults__ or ())
    return function


def shown(value: Any) -> str:
    """Returns a value as it stands in a message, or its type if it may be long."""
    is_short = isinstance(value, int | float | str | type | None)
    return "missing" if value is MISSING else repr(value) if is_short else f"of type {type(value).__name__}"


def wrong_type(function: str, name: str, value: Any, must_be: str = "a tensor", advice: str = "") -> TypeError:
    """Returns the error of an argument with a value of a wrong type."""
    if name == "positions" and isinstance(value, int):
        advice = f"torch.arange({value}) has the positions below {value}"
        if re.match(r"rope\.(norm_)?rotate|torch_rope\.RotaryEmbedding", function):
            advice = f"pass offset={value} if the first token is at position {value}"
    elif isinstance(value, dict) and "inv_freq" in value:
        advice = "pass the angles of a module as **angles"
    elif isinstance(value, torch.fx.Proxy):
        advice = "torch.fx.symbolic_trace takes the functions: call torch_rope.rotate_qk with inv_freq=rope.inv_freq"
    elif not advice and must_be == "a tensor" and not isinstance(value, int | float | str | type | None):
        advice = "torch.as_tensor makes one of a list or an array"
    return TypeError(f"{function}: {name} is {shown(value)} but must be {must_be}" + (f"; {advice}" if advice else ""))


def is_learned(value: Any) -> bool:
    """Returns whether a value is a tensor with a derivative, which is lost where only the number is read."""
    return isinstance(value, Tensor) and (
        value.requires_grad or is_functorch_wrapped_tensor(value) or unpack_dual(value).tangent is not None
    )


def wrong_number(function: str, name: str, value: Any, must_be: str) -> Exception:
    """Returns the error of an argument that is no such number, or that is learned."""
    if is_learned(value):
        return wrong_type(function, name, value, must_be, _ADVICE.get(name, "pass a float"))
    return ValueError(f"{function}: {name} is {value!r} but must be {must_be}")


def check_tensor(function: str, name: str, t: Any, *dtypes: torch.dtype) -> None:
    """Raises TypeError unless t is a tensor, and has one of the dtypes if there are any."""
    if not isinstance(t, Tensor):
        raise wrong_type(function, name, t)
    if dtypes and t.dtype not in dtypes:
        dtype, *must_be = (str(d).removeprefix("torch.") for d in (t.dtype, *dtypes))
        raise TypeError(f"{function}: {name} is {dtype} but must be {' or '.join(must_be)}")


def whole(function: str, name: str, value: Any, least: int = 0) -> int:
    """Returns an integer that is at least `least` and fits in int64, or raises a TypeError or a ValueError. A SymInt, which
    stands for an integer in a traced program, stays one."""
    is_integer = isinstance(value, _TYPES["int"]) and not isinstance(value, bool)
    if not is_integer:
        raise wrong_type(function, name, value, "an integer")
    number = int(value) if isinstance(value, Integral) else value
    if number < least or (isinstance(number, int) and number >= 2**63):
        raise ValueError(f"{function}: {name} is {value} but must be at least {least} and below 2**63")
    return number


def whole_numbers(function: str, name: str, values: Any) -> list[int]:
    """Returns a sequence of integers, such as a list, a tuple or an array, as a list, or raises TypeError."""
    try:
        return [operator.index(value) for value in values]
    except (TypeError, ValueError):
        raise wrong_type(function, name, values, "a list of integers") from None


def mistake_in(
    signature: Signature, args: tuple, flags: tuple, unknown: Any = None, tensors: dict[str, Any] | None = None
) -> Exception | None:
    """Returns the error of a call of an operator whose arguments do not have the names and types of its schema, or else
    None. flags are in the order of the schema; unknown are arguments that the operator does not have."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true as sure  # its import takes long

    function, arguments = signature.in_words, signature.arguments
    if unknown:
        return unknown_argument(function, unknown, arguments)
    given = dict(zip((*arguments[: len(args)], *signature.flags), (*args, *flags), strict=True)) | (tensors or {})
    for name, kind in signature.types.items():
        value, bits = given.get(name), _BITS.get(kind)
        if name not in given or (value is None and kind in ("Tensor", "dtype")):
            continue
        if not isinstance(value, _TYPES[kind]):
            return wrong_type(function, name, value, _WORDS[kind], _ADVICE.get(name, ""))
        if bits and isinstance(value, int) and (sure(value >= 2**bits) or sure(value < -(2**bits))):
            return ValueError(f"{function}: {name} is {value} but must be at least -2**{bits} and below 2**{bits}")
    return None
