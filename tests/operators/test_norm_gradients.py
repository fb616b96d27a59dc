"""Tests how accurate the gradients of norm_rotate_qk are, and that they have the same bits in every layout.

For higher derivatives see test_autograd.py."""

import pytest
import torch
from cases import (
    ALL_CALLS,
    DTYPES,
    KERNELS,
    LAYOUTS,
    Source,
    covering,
    each_number_of_threads,
    many,
    name_of,
)
from test_norm import FACTORS, assert_accurate, assert_same, like, make, make_case
from torch.autograd import grad

rope = torch.ops.rope
norm_rotate_qk = rope.norm_rotate_qk

over_heads_too = pytest.mark.parametrize("over_heads", [False, True], ids=["each head", "over heads"])
GRADIENTS = FACTORS | {"q_grad": list(LAYOUTS), "k_grad": list(LAYOUTS)}


@pytest.mark.parametrize("case", covering(GRADIENTS, interacting=KERNELS[-1:], exhaustive=ALL_CALLS), ids=name_of)
def test_gradients_are_within_roundings_of_the_oracle(case, device):
    """A gradient has the dtype and shape of its input. Those of q and k have the strides of torch.empty_like."""
    tensors, angles, options = make_case(case, device)
    inputs = [t.requires_grad_() for t in tensors]
    given = [LAYOUTS[case[f"{name}_grad"]](x.shape, x.dtype, device) for name, x in zip("qk", inputs, strict=False)]
    gradients = grad(norm_rotate_qk(*inputs, **angles, **options), inputs, given)
    for x, g in zip(inputs, gradients, strict=True):
        assert g.dtype == x.dtype and g.shape == x.shape
        assert x.dim() < 3 or g.stride() == torch.empty_like(x).stride()
    assert_accurate(gradients, tensors, given, angles, **options)


@pytest.mark.parametrize("dtype, over_heads", [(torch.float32, False), (torch.bfloat16, True)], ids=str)
@pytest.mark.parametrize("positive", [False, True])
def test_gradients_of_weights_are_accurate_for_many_tokens(positive, dtype, over_heads, device):
    """All terms of the sum may have one sign. The bits are the same each time and with any number of threads."""
    heads = (8, 2) if positive else (2, 8)
    size = (2, many(1000, device), *heads, 24, 16)
    tensors, angles = make(size, Source("table"), ("bshd", "bhsd"), dtype, device, over_heads=over_heads)
    outs = norm_rotate_qk(*tensors, **angles)
    given = list(outs) if positive else like(outs)  # with outs the terms are squares times the weight
    run = lambda: rope._norm_rotate_qk_backward(*given, *tensors, **angles)  # noqa: E731
    gradients = run()
    assert_accurate(gradients, tensors, given, angles, norm_eps=1e-6)
    assert_same(run(), gradients)
    for _ in each_number_of_threads():
        assert_same(run(), gradients)


@pytest.mark.parametrize("head_dim, dtype", list(zip((64, 20, 64, 64), DTYPES, strict=True)), ids=str)
@over_heads_too
def test_gradients_have_the_same_bits_in_any_layout(over_heads, head_dim, dtype, device):
    """The order of a sum is the order of tokens and heads, not of their addresses."""
    size = (2, 5, 3, 2, head_dim, 20)
    tensors, angles = make(size, Source("table"), ("bshd", "bshd"), dtype, device, over_heads=over_heads)
    given = like(tensors[:2])
    expected = rope._norm_rotate_qk_backward(*given, *tensors, **angles)
    for layout in LAYOUTS.values():
        laid = [layout(t.shape, dtype, device).copy_(t) for t in (*given, *tensors[:2])]
        assert_same(rope._norm_rotate_qk_backward(*laid, *tensors[2:], **angles), expected)
        assert_same(rope._norm_rotate_qk_backward(*laid[:2], *tensors, **angles), expected)


@pytest.mark.parametrize("head_dim, value", [(64, torch.nan), (80, torch.inf), (7, 0.0)])
def test_a_head_that_has_no_norm_changes_no_gradient_of_another_head(head_dim, value, device):
    size = (1, 5, 3, 2, head_dim, head_dim // 2 * 2)
    tensors, angles = make(size, Source("table"), ("bshd", "bshd"), torch.float32, device)
    given = like(tensors[:2])
    expected = rope._norm_rotate_qk_backward(*given, *tensors, **angles, norm_eps=0.0)
    tensors[0][0, 1, 1] = value
    gradients = rope._norm_rotate_qk_backward(*given, *tensors, **angles, norm_eps=0.0)
    assert gradients[0][0, 1, 1].isnan().any() and gradients[2].isnan().any()
    gradients[0][0, 1, 1] = expected[0][0, 1, 1]
    assert_same([g for i, g in enumerate(gradients) if i != 2], [g for i, g in enumerate(expected) if i != 2])
