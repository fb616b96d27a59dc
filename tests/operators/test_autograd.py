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
@pytest.mark.parametrize("op, count", [("norm_rotate_qk", 2), ("_norm_rotate_qk_backward", 4)])
def test_the_norm_has_no_gradient_of_angles(op, count, name, device):
    x = torch.randn(4, 3, 8, device=device)
    freq = torch_rope.inv_freq(8, device=device)
    cos, sin = torch_rope.cos_sin(torch.arange(4, device=device), freq)
    a = {"inv_freq": freq} if name == "inv_freq" else {"cos": cos, "sin": sin}
    tensors = (x,) * count + (x[0, 0], x[0, 0])
    call = getattr(rope, op)
    with torch.no_grad():
        call(*tensors, **a | {name: a[name].clone().requires_grad_()})
    with pytest.raises(NotImplementedError, match=rf"rope.{op}: {name} requires grad"):
        call(*tensors, **a | {name: a[name].clone().requires_grad_()})
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match=rf"rope.{op}: {name} has a forward-mode tangent"):
        call(*tensors, **a | {name: fwAD.make_dual(a[name], torch.ones_like(a[name]))})


# ---- learned tables and frequencies ----

EVERY_MODE = dict(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
LEARNED = {
    # name: (shape of what is learned for batch 2, seq 4, rotary_dim 6; the other arguments)
    "table": ((12, 3), {"offset": 5}),
    "table at positions [S]": ((12, 3), {"positions": [3, 0, 2, 3], "offset": 1}),
    "table at positions [1,S]": ((12, 3), {"positions": [[11, 0, 2, 9]], "inverse": True}),
    "table at positions [B,S]": ((12, 3), {"positions": [[3, 0, 2, 9], [1, 1, 5, 4]], "attention_factor": 1.3}),
    "token": ((2, 4, 3), {"attention_factor": -0.7}),
    "token shared": ((1, 4, 3), {"inverse": True}),
    "inv_freq": ((3,), {"offset": 3, "attention_factor": 1.3}),
    "inv_freq at positions [S]": ((3,), {"positions": [3, 0, -2, 9], "inverse": True}),
    "inv_freq at positions [B,S]": ((3,), {"positions": [[3, 0, 2, 9], [1, 1, 5, 4]], "offset": -2}),
}


def learned(source, interleaved, device, dtype=torch.float64):
    """(what is learned, function of (tensors to rotate..., what is learned) -> tuple)"""
    shape, options = LEARNED[source]
    options = options | {"interleaved": interleaved}
    if "positions" in options:
        options["positions"] = torch.tensor(options["positions"], device=device)
    names = ["inv_freq"] if len(shape) == 1 else ["cos", "sin"]

    def rotated(*tensors):
        xs, angles = tensors[: -len(names)], dict(zip(names, tensors[-len(names) :], strict=True))
        return (rope.rotate if len(xs) == 1 else rope.rotate_qk)(*xs, **angles, **options)

    return [torch.rand(shape, device="cpu").to(dtype).to(device).requires_grad_() for _ in names], rotated


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("source", LEARNED)
def test_gradcheck_of_learned_angles(source, interleaved, device):
    q, k = doubles(device, (2, 4, 3, 8), (2, 4, 1, 8))
    angles, rotated = learned(source, interleaved, device)
    for inputs in ((q, *angles), (q, k, *angles)):
        assert gradcheck(rotated, inputs, **EVERY_MODE)
        assert gradgradcheck(rotated, inputs, check_fwd_over_rev=True)


def test_gradcheck_of_three_dimensions(device):
    q, k = doubles(device, (4, 3, 8), (4, 1, 8))
    for source in ("table", "token shared", "inv_freq"):
        angles, rotated = learned(source, False, device)
        assert gradcheck(rotated, (q, k, *angles), **EVERY_MODE)


@pytest.mark.parametrize("with_k", [False, True])
def test_gradcheck_of_the_gradient_of_tables(with_k, device):
    """Any derivative of the operator that backward calls; none in cos and sin, which say but a shape."""
    shapes = [(2, 4, 3, 8), (2, 4, 1, 8)]
    g_q, g_k, q, k = doubles(device, *shapes, *shapes)
    cos, sin = doubles(device, (12, 3), (12, 3))

    def gradients(*tensors):
        pairs = tensors if with_k else (tensors[0], None, tensors[1], None)
        return rope._rotate_table_backward(*pairs, cos, sin, offset=3, attention_factor=1.3, inverse=True)

    inputs = (g_q, g_k, q, k) if with_k else (g_q, q)
    assert gradcheck(gradients, inputs, **EVERY_MODE)
    assert gradgradcheck(gradients, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
def test_gradcheck_of_cos_sin(shape, device):
    positions, freq, on_axes, freqs = doubles(device, shape, (4,), (3, *shape), (3, 4))
    options = {"attention_factor": 1.3, "dtype": torch.float64}
    for function, inputs in (
        (lambda p, f: rope.cos_sin(p, f, **options), (positions, freq)),
        (lambda p, f: rope._axial_cos_sin(p, f, **options), (on_axes, freqs)),
        (lambda f: rope._axial_cos_sin(on_axes.detach().mul(9).long(), f, **options), (freqs,)),
    ):
        assert gradcheck(function, inputs, **EVERY_MODE)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_integer_positions_have_no_gradient(device):
    freq = torch_rope.inv_freq(8, device=device).requires_grad_()
    cos, sin = rope.cos_sin(torch.arange(5, device=device), freq)
    (cos + sin).sum().backward()
    assert freq.grad.dtype == torch.float32
    with torch.no_grad():
        assert not rope.cos_sin(torch.arange(5, device=device), freq)[0].requires_grad


@pytest.mark.parametrize("used", ["q", "k", "qk"])
@pytest.mark.parametrize("needed", [{"cos"}, {"sin"}, {"cos", "sin"}, {"q", "cos"}, {"k", "sin"}, {"q", "k", "sin"}])
def test_some_of_the_gradients(needed, used, device):
    """Where the loss uses one output, or something is frozen: the gradients that are asked for, to the bit what the
    operators give, and no others."""
    inputs = dict(zip("qk", (torch.randn(2, 4, h, 8, device=device) for h in (3, 1)), strict=True))
    inputs |= {name: torch.randn(4, 4, device=device) for name in ("cos", "sin")}
    for name, t in inputs.items():
        t.requires_grad_(name in needed)
    outs = dict(zip("qk", rope.rotate_qk(**inputs, attention_factor=1.3), strict=True))
    given = {name: torch.randn_like(outs[name]) for name in used}
    torch.autograd.backward([outs[name] for name in used], [given[name] for name in used])
    q, k, cos, sin = (t.detach() for t in inputs.values())
    pairs = [*given.values(), None][:2], [*(inputs[name].detach() for name in used), None][:2]
    expected = dict(
        zip(
            ("cos", "sin"),
            rope._rotate_table_backward(*pairs[0], *pairs[1], cos, sin, attention_factor=1.3),
            strict=True,
        )
    )
    for name in used:
        expected[name] = rope.rotate(given[name], cos, sin, attention_factor=1.3, inverse=True)
    for name, t in inputs.items():
        if name in needed and name in expected:
            assert torch.equal(t.grad, expected[name])
        else:
            assert t.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_narrow_tables_have_their_dtype(dtype, device):
    """Also those of the second order, whose tables are gradients."""
    x = torch.randn(2, 4, 3, 8, device=device).to(torch.bfloat16).requires_grad_()
    cos, sin = (torch.randn(4, 3, device=device).to(dtype).requires_grad_() for _ in "cs")
    first = torch.autograd.grad(rope.rotate(x, cos, sin).float().square().sum(), (x, cos, sin), create_graph=True)
    second = torch.autograd.grad(sum(g.float().square().sum() for g in first), (x, cos, sin))
    for gradients in (first, second):
        assert [g.dtype for g in gradients] == [torch.bfloat16, dtype, dtype]


def test_x_is_saved_only_for_the_gradients_of_tables(device):
    x = torch.randn(4, 3, 8, device=device)
    scale = torch.ones(3, 8, device=device, requires_grad=True)
    for needed in (False, True):
        cos, sin = (torch.randn(4, 4, device=device, requires_grad=needed) for _ in "cs")
        rotated = x * scale
        out = rope.rotate(rotated, cos, sin)
        with torch.no_grad():
            rotated.zero_()
        if needed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()


def test_inv_freq_that_requires_grad_changes_no_value(device):
    """Bit for bit: the tables that are made of it are the angles of the kernel."""
    q, k = torch.randn(2, 4, 3, 8, device=device), torch.randn(2, 4, 1, 8, device=device)
    freq = torch_rope.inv_freq(8, device=device)
    for more in ({"offset": 70000}, {"positions": torch.tensor([5, -3, 2**20, 7], device=device), "inverse": True}):
        expected = rope.rotate_qk(q, k, inv_freq=freq, attention_factor=1.3, **more)
        outs = rope.rotate_qk(q, k, inv_freq=freq.clone().requires_grad_(), attention_factor=1.3, **more)
        for out, e in zip(outs, expected, strict=True):
            assert out.requires_grad and torch.equal(out, e)


def test_errors_of_learned_angles_are_those_of_the_operator(device):
    x = torch.randn(4, 3, 8, device=device)
    cos, freq = (torch.rand(shape, device=device, requires_grad=True) for shape in ((4, 5), (5,)))
    for angles in ({"cos": cos, "sin": cos}, {"inv_freq": freq}):
        with pytest.raises(ValueError, match="rope.rotate: .* rotary_dim 10 is larger than head_dim"):
            rope.rotate(x, **angles)
    with pytest.raises(ValueError, match="rope.rotate: cos without sin"):
        rope.rotate(x, cos)
    with pytest.raises(ValueError, match="rope.cos_sin: inv_freq has 2 dimensions"):
        rope.cos_sin(torch.arange(3, device=device), cos)


def test_torch_func_of_learned_angles(device):
    """Every transform and their nesting agree with plain autograd."""
    q, k = doubles(device, (2, 4, 3, 8), (2, 4, 1, 8), requires_grad=False)
    for source in LEARNED:
        angles, rotated = learned(source, True, device)
        inputs = (q, k, *(t.detach() for t in angles))
        every = tuple(range(len(inputs)))

        def loss(*inputs, rotated=rotated):
            q, k = rotated(*inputs)
            return (q.sin() * k.cos()).sum()

        leaves = [t.clone().requires_grad_() for t in inputs]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        tangents = tuple(torch.randn_like(t) for t in inputs)
        for actual in (
            torch.func.grad(loss, every)(*inputs),
            torch.func.vjp(loss, *inputs)[1](torch.ones((), dtype=q.dtype, device=device)),
            [g[0] for g in torch.func.vmap(torch.func.grad(loss, every))(*(t[None] for t in inputs))],
        ):
            for x, y in zip(actual, expected, strict=True):
                torch.testing.assert_close(x, y)
        torch.testing.assert_close(
            torch.func.jvp(loss, inputs, tangents)[1],
            sum((x * y).sum() for x, y in zip(expected, tangents, strict=True)),
        )


def test_hessian_of_learned_angles(device):
    (q,) = doubles(device, (1, 2, 1, 6), requires_grad=False)
    for source in ("token shared", "inv_freq"):
        shape = {"token shared": (1, 2, 3), "inv_freq": (3,)}[source]
        name = "cos" if source == "token shared" else "inv_freq"
        (angle,) = doubles(device, shape, requires_grad=False)
        other = {"sin": angle.cos()} if name == "cos" else {"offset": 3}
        f = lambda a: rope.rotate(q, **{name: a}, **other)  # noqa: B023, E731
        g = lambda a: f(a).sin().sum()  # noqa: B023, E731
        hessian = torch.autograd.functional.hessian(g, angle)
        for actual in (
            torch.func.hessian(g)(angle),
            torch.func.jacrev(torch.func.jacrev(g))(angle),
            torch.func.jacfwd(torch.func.jacfwd(g))(angle),
            torch.func.jacrev(torch.func.jacfwd(g))(angle),
        ):
            torch.testing.assert_close(actual, hessian)
        torch.testing.assert_close(torch.func.jacfwd(f)(angle), torch.func.jacrev(f)(angle))


@pytest.mark.parametrize("mapped", ["x", "tables", "both"])
def test_vmap_of_gradients_of_tables(mapped, device):
    """Of each sample, whether it is one launch or a loop."""
    x, cos, sin = (torch.randn(3, *shape, device=device) for shape in ((2, 4, 3, 8), (4, 4), (4, 4)))
    dims = tuple(0 if mapped in (kind, "both") else None for kind in ("x", "tables", "tables"))
    inputs = [t if d == 0 else t[0] for t, d in zip((x, cos, sin), dims, strict=True)]
    gradient = torch.func.grad(lambda x, cos, sin: rope.rotate(x, cos, sin).sin().sum(), (0, 1, 2))
    actual = torch.func.vmap(gradient, dims)(*inputs)
    for i in range(3):
        expected = gradient(*(t if d is None else t[i] for t, d in zip(inputs, dims, strict=True)))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a[i], e)
    # Around the whole batch: the sum of the gradients of the samples where the tables are shared.
    whole = torch.func.grad(
        lambda *t: torch.func.vmap(lambda *t: rope.rotate(*t).sin().sum(), dims)(*t).sum(), (0, 1, 2)
    )
    for a, e, d in zip(whole(*inputs), actual, dims, strict=True):
        torch.testing.assert_close(a, e if d == 0 else e.sum(0))


@pytest.mark.parametrize("op", ["_rotate_table_backward", "_norm_rotate_qk_backward"])
def test_vmap_of_sums_over_tokens(op, device):
    """Each sample has its own, also where the gradient of the result is the same for all."""
    q, k = (torch.randn(3, 2, 5, heads, 8, device=device) for heads in (4, 2))
    weights = [torch.rand(8, device=device) for _ in "qk"] if "norm" in op else []
    tables = [torch.rand(5, 4, device=device) for _ in "cs"]
    sample = lambda *xs: getattr(rope, op)(q[0], k[0], *xs, *weights, *tables)  # noqa: E731
    expected = map(torch.stack, zip(*map(sample, q, k), strict=True))
    for actual, e in zip(torch.func.vmap(sample)(q, k), expected, strict=True):
        assert torch.equal(actual, e)


@pytest.mark.parametrize("mapped", ["positions", "inv_freq", "both"])
def test_vmap_of_cos_sin(mapped, device):
    for op, positions, freq in (
        (rope.cos_sin, torch.rand(3, 5, device=device), torch.rand(3, 4, device=device)),
        (rope._axial_cos_sin, torch.rand(3, 2, 5, device=device), torch.rand(3, 2, 4, device=device)),
    ):
        dims = tuple(0 if mapped in (name, "both") else None for name in ("positions", "inv_freq"))
        inputs = [t if d == 0 else t[0] for t, d in zip((positions, freq), dims, strict=True)]
        samples = [[t if d is None else t[i] for t, d in zip(inputs, dims, strict=True)] for i in range(3)]
        for outs, *expected in zip(
            torch.func.vmap(op, dims)(*inputs), *(op(*sample) for sample in samples), strict=True
        ):
            assert torch.equal(outs, torch.stack(expected))
        gradient = torch.func.grad(lambda *t: sum(out.square().sin().sum() for out in op(*t)), (0, 1))  # noqa: B023
        for outs, *expected in zip(
            torch.func.vmap(gradient, dims)(*inputs), *(gradient(*sample) for sample in samples), strict=True
        ):
            torch.testing.assert_close(outs, torch.stack(expected))


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
