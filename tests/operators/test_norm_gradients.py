"""Tests that q, k and both weights of norm_rotate_qk have gradients to any order, which one operator call computes."""

import itertools

import pytest
import torch
from cases import (
    ALL_CALLS,
    DTYPES,
    KERNELS,
    LAYOUTS,
    SOURCES,
    Calls,
    Source,
    covering,
    each_number_of_threads,
    many,
    name_of,
)
from test_norm import FACTORS, assert_accurate, assert_same, like, make, make_case
from torch.autograd import forward_ad as fwAD
from torch.autograd import grad
from torch.func import hessian, jacfwd, jacrev, vmap

import torch_rope

rope = torch.ops.rope
norm_rotate_qk = rope.norm_rotate_qk

# ---- gradients to any order ----

NAMES = ["q", "k", "q_norm_weight", "k_norm_weight"]
EVERY = (0, 1, 2, 3)
SIZE = (2, 3, 2, 1, 6, 4)
OPTIONS = {"norm_eps": 0.01, "attention_factor": 1.3}
ANGLES = [Source("table", offset=7), Source("token"), Source("inv_freq", "int64 [B,S]", freq_dtype=torch.float64)]
over_heads_too = pytest.mark.parametrize("over_heads", [False, True], ids=["each head", "over heads"])


def leaves(device, size=SIZE, source=SOURCES[1], dtype=torch.float64, requires_grad=True, over_heads=False):
    """Returns [q, k, q_norm_weight, k_norm_weight] and the angles, in float64 because finite differences need it."""
    kinds = ("own strided", "own")
    tensors, angles = make(size, source, ("bhsd", "packed"), dtype, device, kinds, over_heads=over_heads)
    return [t.requires_grad_(requires_grad) for t in tensors], angles


def same_gradients(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def definition(
    q, k, q_norm_weight, k_norm_weight, cos=None, sin=None, inv_freq=None, positions=None, offset=0, *, norm_eps=1e-6,
    attention_factor=1.0, interleaved=False,
):  # fmt: skip
    """Computes norm_rotate_qk with torch's own operators, which torch differentiates by itself."""
    p = (torch.arange(q.shape[-3], device=q.device) if positions is None else positions) + offset
    if inv_freq is not None:
        angle = p.unsqueeze(-1) * inv_freq
        cos, sin = angle.cos(), angle.sin()
    elif cos.dim() == 2:
        cos, sin = cos[p], sin[p]
    c, s = (attention_factor * (t if t.dim() == 4 else t.unsqueeze(-2)) for t in (cos, sin))
    end = 2 * c.shape[-1]
    outs = []
    for x, w in (q, q_norm_weight), (k, k_norm_weight):
        x = x * torch.rsqrt(x.square().mean((-2, -1)[-w.dim() :], keepdim=True) + norm_eps) * w
        a, b = (x[..., 0:end:2], x[..., 1:end:2]) if interleaved else x[..., :end].chunk(2, -1)
        pairs = torch.stack([a * c - b * s, b * c + a * s], -1 if interleaved else -2).flatten(-2)
        outs.append(torch.cat([pairs, x[..., end:]], -1))
    return outs


@pytest.mark.shared
@pytest.mark.heart
@pytest.mark.parametrize(
    "source, interleaved, over_heads",
    [(ANGLES[0], True, True), (ANGLES[1], False, False), (ANGLES[2], True, False), (Source("head"), False, True)],
    ids=str,
)
def test_derivatives_to_the_third_order_are_those_of_the_definition(source, interleaved, over_heads, device):
    """torch differentiates the definition by itself."""
    inputs, angles = leaves(device, source=source, over_heads=over_heads)
    derivatives = []
    for function in norm_rotate_qk, definition:
        torch.manual_seed(1)
        outs = function(*inputs, **angles, **OPTIONS, interleaved=interleaved)
        y = sum((out.sin() * g).sum() for out, g in zip(outs, like(outs), strict=True))
        derivatives.append([])
        for _ in range(3):
            gradients = grad(y, inputs, create_graph=True)
            derivatives[-1] += gradients
            y = sum((x * g).sum() for x, g in zip(gradients, like(gradients), strict=True))
    same_gradients(*derivatives)


# ---- how accurate the gradients are ----


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
    size = (2, many(2000, device), *heads, 24, 16)
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


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8), (2, 3, 2, 0)], ids=str)
@over_heads_too
def test_gradients_of_empty_tensors_are_zero(over_heads, shape, device):
    weight = shape[-2:] if over_heads else shape[-1:]
    inputs = [torch.randn(s, device=device, requires_grad=True) for s in (shape, shape, weight, weight)]
    outs = norm_rotate_qk(*inputs, inv_freq=torch_rope.inv_freq(shape[-1], device=device))
    for _ in range(3):  # the gradients are allocated in memory that held NaNs
        left = [torch.full_like(inputs[-1], torch.nan) for _ in range(5)]
        del left
        for x, g in zip(inputs, grad(outs, inputs, like(outs), retain_graph=True), strict=True):
            assert torch.equal(g, torch.zeros_like(x))


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


# ---- what autograd calls ----


@pytest.mark.shared
@pytest.mark.parametrize("create_graph", [False, True])
def test_forward_and_backward_are_one_operator_call_each(create_graph, device):
    inputs, angles = leaves(device, dtype=torch.float32)
    with Calls() as calls:
        outs = norm_rotate_qk(*inputs, **angles)
    assert calls.names == ["rope::norm_rotate_qk"]
    given = like(outs)
    with Calls() as calls:
        gradients = grad(outs, inputs, given, create_graph=create_graph)
    assert calls.names == ["rope::_norm_rotate_qk_backward"]
    assert all(g.requires_grad == create_graph for g in gradients)


@pytest.mark.shared
@pytest.mark.parametrize("needed", [c for n in range(1, 5) for c in itertools.combinations(NAMES, n)], ids="+".join)
def test_a_frozen_input_has_no_gradient_and_changes_no_other(needed, device):
    """The gradients of the inputs that require grad have the same bits as if nothing were frozen."""
    inputs, angles = leaves(device, dtype=torch.float32)
    outs = norm_rotate_qk(*inputs, **angles, **OPTIONS)
    given = like(outs)
    expected = dict(zip(NAMES, grad(outs, inputs, given), strict=True))
    frozen = {name: t.detach().requires_grad_(name in needed) for name, t in zip(NAMES, inputs, strict=True)}
    outs = norm_rotate_qk(**frozen, **angles, **OPTIONS)
    needing = [i for i in (0, 1) if outs[i].requires_grad]
    torch.autograd.backward([outs[i] for i in needing], [given[i] for i in needing])
    for name, t in frozen.items():
        assert (t.grad is not None) == (name in needed)
        assert t.grad is None or torch.equal(t.grad, expected[name])
    with torch.no_grad():
        assert not any(out.requires_grad for out in norm_rotate_qk(**frozen, **angles, **OPTIONS))


@pytest.mark.shared
@pytest.mark.parametrize("used", [0, 1], ids=["q", "k"])
def test_an_unused_output_gives_its_inputs_no_gradient(used, device):
    """The gradient of its input and weight is None, not zeros, and the derivatives of the other ones do not change."""
    inputs, angles = leaves(device)
    of_both = norm_rotate_qk(*inputs, **angles, **OPTIONS)
    given = like(of_both)
    expected = grad(of_both, inputs, given)
    out = norm_rotate_qk(*inputs, **angles, **OPTIONS)[used]
    first = grad(out, inputs, given[used], create_graph=True, allow_unused=True)
    assert_same(first[used::2], expected[used::2])
    assert first[1 - used] is first[3 - used] is None
    second = grad(first[used].square().sum(), inputs, allow_unused=True)
    true_out = definition(*inputs, **angles, **OPTIONS)[used]
    true_first = grad(true_out, inputs[used], given[used], create_graph=True)[0]
    same_gradients(second[used::2], grad(true_first.square().sum(), inputs[used::2]))
    assert all(g is None or not g.any() for g in second[1 - used :: 2])


@pytest.mark.shared
@pytest.mark.parametrize("source", [SOURCES[3], SOURCES[8]], ids=str)
def test_backward_raises_if_a_saved_tensor_was_overwritten(source, device):
    inputs, angles = leaves(device, source=source, dtype=torch.float32)
    for saved in (*inputs, *angles.values()):
        outs = norm_rotate_qk(*inputs, **angles)
        with torch.no_grad():
            saved.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad(outs, inputs, like(outs))


# ---- forward mode and torch.func ----


@pytest.mark.shared
@pytest.mark.parametrize("grad_mode, source", [(True, ANGLES[0]), (False, ANGLES[1]), (False, ANGLES[2])], ids=str)
@pytest.mark.parametrize("moved", [*((n,) for n in NAMES), ("q", "k_norm_weight"), tuple(NAMES)], ids="+".join)
def test_tangents_are_those_of_the_definition(moved, grad_mode, source, device):
    """Some or all inputs have a tangent. An output that depends on none of them has no tangent.

    This holds with grad off too.
    """
    over_heads = source is ANGLES[0]
    inputs, angles = leaves(device, source=source, requires_grad=grad_mode, over_heads=over_heads)
    with fwAD.dual_level(), torch.set_grad_enabled(grad_mode):
        named = zip(NAMES, inputs, strict=True)
        duals = [fwAD.make_dual(t, torch.randn_like(t)) if n in moved else t for n, t in named]
        outs, expected = (f(*duals, **angles, **OPTIONS) for f in (norm_rotate_qk, definition))
        for i, (out, by_definition) in enumerate(zip(outs, expected, strict=True)):
            (value, tangent), (_, true_tangent) = fwAD.unpack_dual(out), fwAD.unpack_dual(by_definition)
            assert torch.equal(value, norm_rotate_qk(*inputs, **angles, **OPTIONS)[i])
            assert (tangent is None) == (not {NAMES[i], NAMES[i + 2]} & set(moved))
            assert tangent is None or torch.allclose(tangent, true_tangent)


def loss_of(function, **options):
    def loss(*tensors):
        q, k = function(*tensors, **options)
        return (q.sin() * k.cos()).sum()

    return loss


@pytest.mark.shared
@pytest.mark.parametrize("source, over_heads", [(ANGLES[0], True), (ANGLES[2], False)], ids=str)
def test_torch_func_gives_the_jacobians_and_hessians_of_the_definition(source, over_heads, device):
    """Forward and reverse mode are nested in every way, and mapped over the batch."""
    tensors, angles = leaves(device, (2, 1, 2, 1, 4, 4), source, requires_grad=False, over_heads=over_heads)
    function, truth = (lambda *t, f=f: f(*t, **angles, **OPTIONS) for f in (norm_rotate_qk, definition))
    loss, true_loss = (loss_of(f, **angles, **OPTIONS) for f in (norm_rotate_qk, definition))
    for mode in jacrev, jacfwd:
        for ours, theirs in zip(mode(function, EVERY)(*tensors), jacrev(truth, EVERY)(*tensors), strict=True):
            same_gradients(ours, theirs)
    over_batch = vmap(loss, in_dims=(0, 0, None, None))
    mapped = torch.func.grad(lambda q, k, *w: over_batch(q[None], k[None], *w).sum(), EVERY)(*tensors)
    same_gradients(mapped, torch.func.grad(true_loss, EVERY)(*tensors))
    expected = hessian(true_loss, EVERY)(*tensors)
    for outer, inner in itertools.product((jacfwd, jacrev), repeat=2):
        for ours, theirs in zip(outer(inner(loss, EVERY), EVERY)(*tensors), expected, strict=True):
            same_gradients(ours, theirs)
    # A transform inside plain autograd.
    inputs = [t.clone().requires_grad_() for t in tensors]
    gradients = grad(sum(g.sum() for g in torch.func.grad(loss, EVERY)(*inputs)), inputs)
    for x, found, hs in zip(inputs, gradients, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(found, sum(h.sum(tuple(range(h.dim() - x.dim()))) for h in hs))
