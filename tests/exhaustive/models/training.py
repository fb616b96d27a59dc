"""A training step of a model, and how far the results of two training steps are apart."""

import copy

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


def cast(inputs, dtype):
    """Returns inputs of a model with their floating-point tensors in a dtype."""
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def floats(value):
    """Returns the floating-point tensors in nested lists and dicts."""
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def output(model, inputs):
    """Returns all floating-point tensors of the result, for a dict of arguments by name."""
    torch.manual_seed(0)  # some models drop random patches
    return floats(model(**copy.deepcopy(inputs)))


def train_step(model, inputs, leaves=()):
    """Returns the outputs of a training step, and the gradients of the parameters and of the inputs `leaves`, by name."""
    model.zero_grad()
    inputs = copy.deepcopy(inputs)
    named = {f"{n} {i}": t.requires_grad_() for n in leaves for i, t in enumerate(floats(inputs[n]))}
    named |= {n.replace("_orig_mod.", ""): p for n, p in model.named_parameters()}
    torch.manual_seed(0)
    outputs = floats(model(**inputs))
    # Each output gets another gradient.
    total = sum((t * torch.linspace(-1, 1, t.numel()).view_as(t).to(t)).sum() for t in outputs)
    if total.requires_grad:
        total.backward()
    return [t.detach() for t in outputs], {n: t.grad for n, t in named.items() if t.grad is not None}


def same(actual, expected):
    """Returns whether the outputs and the gradients have the same bits."""
    assert actual[1].keys() == expected[1].keys()
    return all(map(torch.equal, actual[0], expected[0])) and all(
        torch.equal(actual[1][n], t) for n, t in expected[1].items()
    )


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value of all tensors in a list or in a dict."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = ([d[n] for n in expected] for d in (actual, expected))
    actual, expected = (
        torch.cat([torch.zeros(1), *map(torch.flatten, tensors)]).double() for tensors in (actual, expected)
    )
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def close(actual, expected, outputs, gradients):
    """Returns whether the outputs differ by less than one number, and the gradients by less than another."""
    return difference(actual[0], expected[0]) < outputs and difference(actual[1], expected[1]) < gradients
