"""Tests that the functions of torch_rope and of its reference have the arguments of the operators, and pass them on.

The values of the reference are compared where those of the operators are.
"""

import inspect

import pytest
from cases import schema_of

import torch_rope
from torch_rope import _signatures, reference

NONE = inspect.Parameter.empty
# Every operator, except those for gradients, has a function of its name.
FUNCTIONS = [s.name for s in _signatures.operators() if not s.name.endswith("_backward")]


def arguments_of(op):
    """Returns (name, whether it is keyword-only, default) for each argument of an operator."""
    arguments = schema_of(op).arguments
    return [(a.name, a.kwarg_only, a.default_value if a.has_default_value() else NONE) for a in arguments]


def parameters_of(function):
    """Returns the same as arguments_of for the parameters of a Python function, except *args and **kwargs."""
    found = [
        p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return [(p.name, p.kind == p.KEYWORD_ONLY, p.default) for p in found]


@pytest.mark.parametrize("op", FUNCTIONS)
def test_the_functions_have_the_arguments_of_the_schemas(op):
    """A function of the reference may have fewer, because it passes the others on by *args and **kwargs."""
    assert parameters_of(getattr(torch_rope, op)) == arguments_of(op)
    in_reference = op if hasattr(reference, op) else op.removesuffix("_")  # rotate_ writes to x what rotate returns
    assert set(parameters_of(getattr(reference, in_reference))) <= set(arguments_of(op))


@pytest.mark.parametrize("op", FUNCTIONS)
def test_the_functions_pass_every_argument(op, monkeypatch):
    calls = []
    [signature] = [s for s in _signatures.operators() if s.name == op]
    for name in ("op", "function"):
        monkeypatch.setattr(signature, name, lambda *args, **kwargs: calls.append((args, kwargs)))
    positional = {name: object() for name, by_keyword, _ in arguments_of(op) if not by_keyword}
    defaults = {name: default for name, by_keyword, default in arguments_of(op) if by_keyword}
    for name in defaults:
        given = positional | {name: object()}
        getattr(torch_rope, op)(**given)
        args, kwargs = calls.pop()
        assert defaults | dict(zip(positional, args, strict=True)) | kwargs == defaults | given


def test_every_tensor_has_axes():
    schemas = [s.op._schema for s in _signatures.operators()]
    assert {a.name for s in schemas for a in s.arguments if "Tensor" in str(a.type)} == set(_signatures.AXES)
