"""Gradients to any order, forward mode, torch.func and vmap; what in-place operators owe to autograd."""

import pytest
import torch
from torch.autograd import forward_ad as fwAD
from torch.autograd import gradcheck, gradgradcheck

import torch_rope

rope = torch.ops.rope


def angles(source, interleaved, device):
    freq = torch_rope.inv_freq(6, device=device).double()
    options = {"interleaved": interleaved, "attention_factor": 1.3}
    if source == "inv_freq":
        return options | {"inv_freq": freq, "positions": torch.tensor([[3, 0, 2, 9], [1, 1, 5, 4]], device=device)}
    if source == "table":
        cos, sin = torch_rope.cos_sin(torch.arange(12, device=device), freq, dtype=torch.float64)
        return options | {"cos": cos, "sin": sin, "offset": 5}
    cos, sin = torch_rope.cos_sin(torch.rand(2, 4, device=device), freq, dtype=torch.float64)
    return options | {"cos": cos, "sin": sin, "inverse": True}


SOURCES = ["table", "token", "inv_freq"]


def doubles(device, *shapes, requires_grad=True):
    """float64, because finite differences need it."""
    if device == "mps":
        pytest.skip("Apple GPUs have no float64")
    return [torch.randn(s, dtype=torch.float64, device=device, requires_grad=requires_grad) for s in shapes]


def transposed(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_gradcheck(source, interleaved, device):
    q, k = doubles(device, (2, 4, 3, 8), (2, 4, 1, 8))
    a = angles(source, interleaved, device)
    every_mode = dict(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    for function, inputs in (
        (lambda x: rope.rotate(x, **a), (q,)),
        (lambda x: rope.rotate(transposed(x), **a), (q,)),
        (lambda q, k: rope.rotate_qk(q, k, **a), (q, k)),
    ):
        assert gradcheck(function, inputs, **every_mode)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_backward_is_the_inverse_rotation_times_attention_factor(device):
    x = torch.randn(2, 4, 3, 8, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    freq = torch_rope.inv_freq(6, device=device)
    rope.rotate(x, inv_freq=freq, attention_factor=1.3).backward(grad)
    assert torch.equal(x.grad, rope.rotate(grad, inv_freq=freq, attention_factor=1.3, inverse=True))


@pytest.mark.parametrize("used, needed", [("q", "qk"), ("k", "qk"), ("qk", "q"), ("qk", "k")])
def test_one_of_two_gradients(used, needed, device):
    """Where the loss uses one output, or one input is frozen: no zero-filled work, and no gradient where none is asked for."""
    freq = torch_rope.inv_freq(8, device=device)
    q, k = (torch.randn(2, 4, h, 8, device=device, requires_grad=n in needed) for h, n in ((3, "q"), (1, "k")))
    q_out, k_out = rope.rotate_qk(q, k, inv_freq=freq)
    loss = sum(out.square().sum() for out, name in ((q_out, "q"), (k_out, "k")) if name in used)
    loss.backward()
    for x, name in ((q, "q"), (k, "k")):
        if name in used and name in needed:
            torch.testing.assert_close(x.grad, 2 * x.detach())  # a rotation keeps the norm
        else:
            assert x.grad is None


def test_backward_complains_if_what_it_saved_was_written(device):
    x = torch.randn(2, 4, 3, 8, device=device, requires_grad=True)
    cos, sin = torch_rope.cos_sin(torch.arange(4, device=device), torch_rope.inv_freq(8, device=device))
    out = rope.rotate(x, cos, sin)
    cos.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["cos", "sin", "inv_freq"])
@pytest.mark.parametrize(
    "op, count", [("rotate", 1), ("rotate_qk", 2), ("norm_rotate_qk", 2), ("_norm_rotate_qk_backward", 4)]
)
def test_angles_have_no_gradient(op, count, name, device):
    x = torch.randn(4, 3, 8, device=device)
    freq = torch_rope.inv_freq(8, device=device)
    cos, sin = torch_rope.cos_sin(torch.arange(4, device=device), freq)
    a = {"inv_freq": freq} if name == "inv_freq" else {"cos": cos, "sin": sin}
    tensors = (x,) * count + ((x[0, 0], x[0, 0]) if "norm" in op else ())
    call = getattr(rope, op)
    with torch.no_grad():
        call(*tensors, **a | {name: a[name].clone().requires_grad_()})
    with pytest.raises(NotImplementedError, match=rf"rope.{op}: {name} requires grad"):
        call(*tensors, **a | {name: a[name].clone().requires_grad_()})
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match=rf"rope.{op}: {name} has a forward-mode tangent"):
        call(*tensors, **a | {name: fwAD.make_dual(a[name], torch.ones_like(a[name]))})


def test_cos_sin_has_no_gradient(device):
    positions, freq = torch.rand(4, device=device), torch_rope.inv_freq(8, device=device)
    for p, f, name in (
        (positions.clone().requires_grad_(), freq, "positions"),
        (positions, freq.clone().requires_grad_(), "inv_freq"),
    ):
        with pytest.raises(NotImplementedError, match=rf"rope.cos_sin: {name} requires grad"):
            rope.cos_sin(p, f)
        with torch.no_grad():
            assert not rope.cos_sin(p, f)[0].requires_grad
    with (
        fwAD.dual_level(),
        pytest.raises(NotImplementedError, match="rope.cos_sin: positions requires grad or has a tangent"),
    ):
        rope.cos_sin(fwAD.make_dual(positions, positions), freq)


# ---- in place ----

# What each writes.
IN_PLACE = {"rotate_": ["x"], "rotate_qk_": ["q", "k"], "rotate_into_cache_": ["q", "k_cache", "v_cache"]}
# What a message recommends.
FUNCTIONAL = {
    "rotate_": "rope.rotate",
    "rotate_qk_": "rope.rotate_qk",
    "rotate_into_cache_": "rope.rotate_qk or rope.norm_rotate_qk, and write the cache yourself",
}
EACH_WRITTEN = [(op, name) for op, names in IN_PLACE.items() for name in names]


def in_place_arguments(op, device, source="table"):
    """Every tensor that the operator takes and that could have a gradient."""
    q, k, cache, weight = (2, 4, 3, 8), (2, 4, 1, 8), (2, 5, 1, 8), (8,)
    shapes = {
        "rotate_": {"x": q},
        "rotate_qk_": {"q": q, "k": k},
        "rotate_into_cache_": {"q": q, "k": k, "v": k, "k_cache": cache, "v_cache": cache}
        | {"q_norm_weight": weight, "k_norm_weight": weight},
    }
    good = {name: torch.randn(shape, device=device) for name, shape in shapes[op].items()}
    freq = torch_rope.inv_freq(8, device=device)
    if source == "inv_freq":
        return good | {"inv_freq": freq}
    cos, sin = torch_rope.cos_sin(torch.arange(4, device=device), freq)
    return good | {"cos": cos, "sin": sin}


def negated(t):
    """A view that torch negates when it is read."""
    view = torch.complex(t, -t).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize("op", IN_PLACE)
def test_negated_views_are_read_and_never_written(op, device):
    good = in_place_arguments(op, device)
    expected = {n: t.clone() for n, t in good.items()}
    getattr(rope, op)(**expected)
    for name in good:
        a = {n: t.clone() for n, t in good.items()}
        if name in IN_PLACE[op]:
            with pytest.raises(NotImplementedError, match=rf"rope.{op}: {name} is a negated view, .* resolve_neg"):
                getattr(rope, op)(**a | {name: negated(a[name])})
            assert all(torch.equal(t, good[n]) and t._version == 0 for n, t in a.items())
        else:
            getattr(rope, op)(**a | {name: negated(a[name])})
            assert all(torch.equal(a[n], expected[n]) for n in IN_PLACE[op])


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_bumps_the_version(op, device):
    a = in_place_arguments(op, device)
    for count, context in enumerate((torch.enable_grad, torch.no_grad, torch.inference_mode), 1):
        with context():
            getattr(rope, op)(**a)
        assert {n: t._version for n, t in a.items()} == {n: count if n in IN_PLACE[op] else 0 for n in a}
    with torch.inference_mode():  # an inference tensor has no version, and works
        getattr(rope, op)(**{n: t.clone() for n, t in a.items()})


@pytest.mark.parametrize("op, written", EACH_WRITTEN)
def test_what_backward_saved_may_not_be_rotated_in_place(op, written, device):
    a = in_place_arguments(op, device)
    weight = torch.randn_like(a[written], requires_grad=True)
    loss = (weight * a[written]).sum()
    getattr(rope, op)(**a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("source", ["table", "inv_freq"])
@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_refuses_gradients_and_tangents(op, source, device):
    good = in_place_arguments(op, device, source)
    before = {n: t.clone() for n, t in good.items()}
    for name in good:
        a = good | {name: good[name].clone().requires_grad_() * 1}
        message = f"rope.{op}: {name} requires grad, .* use {FUNCTIONAL[op]}, or torch.no_grad"
        with pytest.raises(RuntimeError, match=message):
            getattr(rope, op)(**a)
        with torch.no_grad():
            getattr(rope, op)(**{n: t.clone() for n, t in a.items()})
        message = f"rope.{op}: {name} has a forward-mode tangent, .* use {FUNCTIONAL[op]}$"
        with fwAD.dual_level():
            a = good | {name: fwAD.make_dual(good[name], torch.ones_like(good[name]))}
            for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with context(), pytest.raises(RuntimeError, match=message):
                    getattr(rope, op)(**a)
        assert all(torch.equal(t, before[n]) and t._version == 0 for n, t in good.items())


@pytest.mark.parametrize("op, written", EACH_WRITTEN)
def test_an_inference_tensor_is_refused_before_anything_is_written(op, written, device):
    a = in_place_arguments(op, device)
    with torch.inference_mode():
        read = {n: t.clone() for n, t in a.items() if n not in IN_PLACE[op]}  # may be inference tensors
        a |= read | {written: a[written].clone()}
    before = {n: t.clone() for n, t in a.items()}
    message = f"rope.{op}: {written} is an inference tensor, .* use {FUNCTIONAL[op]}$"
    with pytest.raises(RuntimeError, match=message):
        getattr(rope, op)(**a)
    assert all(torch.equal(t, before[n]) for n, t in a.items())
    assert all(a[n]._version == 0 for n in IN_PLACE[op] if n != written)


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_under_torch_func_is_an_error_or_right(op, device):
    good = in_place_arguments(op, device)
    for name in good:

        def loss(x, name=name):
            y = x * 1
            getattr(rope, op)(**good | {name: y})
            return y.square().sum()

        with pytest.raises(RuntimeError, match=f"rope.{op}: {name} requires grad"):
            torch.func.grad(loss)(good[name])
        with pytest.raises(RuntimeError, match=f"rope.{op}: {name} has a forward-mode tangent"):
            torch.func.jvp(loss, (good[name],), (good[name],))


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "slots", "q_norm_weight", "inv_freq"])
def test_a_cache_cannot_be_mapped(name, device):
    good = in_place_arguments("rotate_into_cache_", device, "inv_freq")
    good["slots"] = torch.arange(8, device=device).view(2, 4)
    before = {n: t.clone() for n, t in good.items()}
    message = "vmap: rope.rotate_into_cache_ cannot be mapped; pass the mapped dimension as the batch"
    with pytest.raises(RuntimeError, match=message):
        torch.func.vmap(lambda t: rope.rotate_into_cache_(**good | {name: t}))(torch.stack([good[name]] * 2))
    assert all(torch.equal(t, before[n]) for n, t in good.items())


# ---- forward mode and torch.func ----


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_a_tangent_is_rotated_like_x(mode, device):
    """Also without grad, where the shortcut past the autograd function is taken."""
    q, k = torch.randn(2, 4, 3, 8, device=device), torch.randn(2, 4, 1, 8, device=device)
    freq = torch_rope.inv_freq(8, device=device)
    with fwAD.dual_level(), torch.set_grad_enabled(mode == "grad"):
        tangent = torch.randn_like(q)
        dual = fwAD.make_dual(q, tangent)
        assert torch.equal(
            fwAD.unpack_dual(rope.rotate(dual, inv_freq=freq)).tangent, rope.rotate(tangent, inv_freq=freq)
        )
        q_out, k_out = rope.rotate_qk(dual, k, inv_freq=freq)
        assert torch.equal(fwAD.unpack_dual(q_out).tangent, rope.rotate(tangent, inv_freq=freq))
        assert fwAD.unpack_dual(k_out).tangent is None


def test_torch_func(device):
    """Every transform and their nesting agree with plain autograd."""
    q, k = doubles(device, (2, 4, 3, 8), (2, 4, 1, 8), requires_grad=False)
    a = angles("table", True, device)

    def loss(q, k):
        q, k = rope.rotate_qk(q, k, **a)
        return (q.sin() * k.cos()).sum()

    q1, k1 = q.clone().requires_grad_(), k.clone().requires_grad_()
    expected = torch.autograd.grad(loss(q1, k1), (q1, k1))
    for actual in (
        torch.func.grad(loss, (0, 1))(q, k),
        torch.func.vjp(loss, q, k)[1](torch.ones((), dtype=q.dtype, device=device)),
        torch.func.vmap(torch.func.grad(loss, (0, 1)))(q, k),
        torch.func.grad(lambda q, k: torch.func.vmap(loss)(q, k).sum(), (0, 1))(q, k),
    ):
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y)

    small = q[:1, :2, :1]
    f = lambda x: rope.rotate(x, **a)  # noqa: E731
    g = lambda x: f(x).sin().sum()  # noqa: E731
    hessian = torch.autograd.functional.hessian(g, small)
    for actual in (
        torch.func.hessian(g)(small),
        torch.func.jacrev(torch.func.jacrev(g))(small),
        torch.func.jacfwd(torch.func.jacfwd(g))(small),
        torch.func.jacrev(torch.func.jacfwd(g))(small),
    ):
        torch.testing.assert_close(actual, hessian)
    torch.testing.assert_close(torch.func.jacfwd(f)(small), torch.func.jacrev(f)(small))
    # Also around and inside plain autograd.
    x = small.clone().requires_grad_()
    torch.func.grad(g)(x).sum().backward()
    torch.testing.assert_close(x.grad, hessian.sum(dim=(0, 1, 2, 3)))
    # The error of an operator inside a transform leaves torch.func usable.
    with pytest.raises(ValueError, match="no angle source"):
        torch.func.grad(lambda x: rope.rotate(x).sum())(small)
    torch.testing.assert_close(torch.func.hessian(g)(small), hessian)


def test_gradient_checkpointing_and_hooks(device):
    x = torch.randn(2, 4, 3, 8, device=device, requires_grad=True)
    freq = torch_rope.inv_freq(8, device=device)
    function = lambda x: rope.rotate(x, inv_freq=freq).square().sum()  # noqa: E731
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, device):
    """The result has x's dtype, and the tables stay as they are."""
    q = torch.randn(1, 6, 2, 8, device=device).to(dtype)
    cos, sin = torch_rope.cos_sin(torch.arange(6, device=device), torch_rope.inv_freq(8, device=device))
    with torch.autocast(device, dtype=dtype):
        out = rope.rotate(q, cos, sin)
    assert out.dtype == dtype and torch.equal(out, rope.rotate(q, cos, sin))
