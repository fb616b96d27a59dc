"""Tests gradients to any order, forward mode and torch.func, and what in-place operators do under autograd."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from calls import Source, make
from cases import Calls, covering, name_of, need, written_by
from programs import FUNCTIONAL, call_of, tensors_of
from programs import IN_PLACE as WRITING
from torch.autograd import forward_ad as fwAD
from torch.autograd import gradcheck, gradgradcheck

rope = torch.ops.rope
pytestmark = pytest.mark.shared

EVERY_MODE = dict(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
# They are small because finite differences vary each element by itself.
SIZE = (2, 2, 2, 1, 5, 4)

# The sources of the angles, and the other arguments.
SOURCES = {
    Source("table", offset=3): {},
    Source("table", "int64 [S]", offset=1): {"start": "second"},
    Source("table", "int64 [1,S]"): {"inverse": True},
    Source("table", "int64 [B,S]"): {"eager_rounding": True, "inverse": True},
    Source("token"): {"attention_factor": -0.7},
    Source("token shared"): {"inverse": True, "start": "second", "eager_rounding": True},
    Source("head"): {"inverse": True, "start": "second"},
    Source("head shared"): {"attention_factor": 0.7},
    Source("inv_freq", offset=3): {"attention_factor": 1.3},
    Source("inv_freq", "int64 [S]"): {"inverse": True},
    Source("inv_freq", "int64 [B,S]", offset=-2): {},
}


def call_in_float64(op, source, device, **more):
    """Returns (tensors, how many of them are angles, a function of these tensors).

    The tensors are those to rotate, the weights if there is a norm, and the angles. The function returns what op returns.
    """
    need(device, torch.float64)
    description = SOURCES[source] | more | {"size": SIZE if more.get("dims", 4) == 4 else (1, *SIZE[1:]), "rows": 5}
    source = dataclasses.replace(source, freq_dtype=torch.float64)
    weights = {"q_weight": "own", "k_weight": "own", "norm_eps": 0.01} if "norm" in op else {}
    call = make(op, device, source=source, dtype=torch.float64, tables="dtype of x", **description, **weights)
    tensors = {name: t for name, t in call.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    angles = len({"cos", "sin", "inv_freq"} & tensors.keys())

    def function(*given):
        return getattr(rope, op)(**call | dict(zip(tensors, given, strict=True)))

    return [t.detach().contiguous().requires_grad_() for t in tensors.values()], angles, function


FACTORS = {"op": ["rotate", "rotate_qk", "norm_rotate_qk"], "source": list(SOURCES), "learned": [1, 0], "dims": [4, 3]}
FACTORS |= {"interleaved": [False, True], "over_heads": [False, True]}


def possible(op, over_heads, **_):
    return "norm" in op or not over_heads


@pytest.mark.core
@pytest.mark.parametrize("case", covering(FACTORS, possible), ids=name_of)
def test_gradients_pass_gradcheck(case, device):
    """The angles are constant in some cases and learned in others."""
    learned = case.pop("learned")
    inputs, angles, function = call_in_float64(**case, device=device)
    for t in inputs[-angles:]:
        t.requires_grad_(bool(learned))
    assert gradcheck(function, inputs, **EVERY_MODE)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("over_heads", [False, True])
def test_gradients_of_the_gradient_of_a_norm_pass_gradcheck(over_heads, device):
    """So the third derivative of the norm is right."""
    source = Source("inv_freq", offset=3)
    inputs, _, function = call_in_float64("_norm_rotate_qk_backward", source, device, over_heads=over_heads)
    inputs[-1].requires_grad_(False)
    assert gradcheck(function, inputs, **EVERY_MODE)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_gradients_of_cos_sin_pass_gradcheck(shape, device):
    need(device, torch.float64)
    leaf = {"dtype": torch.float64, "device": device, "requires_grad": True}
    positions, freq, on_axes, freqs = (torch.randn(s, **leaf) for s in (shape, (3,), (2, *shape), (2, 3)))
    options = {"attention_factor": 1.3, "dtype": torch.float64}
    for function, inputs in (
        (lambda p, f: rope.cos_sin(p, f, **options), (positions, freq)),
        (lambda p, f: rope.axial_cos_sin(p, f, **options), (on_axes, freqs)),
        (lambda f: rope.axial_cos_sin(on_axes.detach().mul(9).long(), f, **options), (freqs,)),
    ):
        assert gradcheck(function, inputs, **EVERY_MODE)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True)
    position, freq = torch.tensor(1000, device=device), freq.detach()  # sin is float32, but the gradient is exact
    grad = torch.func.grad(lambda f: rope.cos_sin(position, f)[1].sum())(freq)
    assert torch.allclose(grad, position * (position * freq).cos(), rtol=1e-10)


# ---- every argument of every operator ----


@pytest.mark.core
@pytest.mark.parametrize(
    "op, source",
    [
        *((op, "table") for op in FUNCTIONAL),
        *((op, "inv_freq") for op in ("rotate", "rotate_qk", "norm_rotate_qk", "_norm_rotate_qk_backward")),
    ],
)
def test_every_argument_has_a_gradient_and_a_tangent(op, source, device):
    """There are tangents with grad off too. In-place operators have a test of their own."""
    good, call = call_of(op, device, source, q_factor="[B,S,H]"), getattr(rope, op)
    for name in good:
        leaf = good[name].clone().requires_grad_()
        with torch.no_grad():
            call(**good | {name: leaf})
        with fwAD.dual_level():
            dual = good | {name: fwAD.make_dual(good[name], torch.ones_like(good[name]))}
            with torch.set_grad_enabled(name in ("x", "sin", "q_norm_weight")):
                tangents = [fwAD.unpack_dual(out.exp().sum()).tangent for out in tensors_of(call(**dual))]
        outs = [out.exp().sum() for out in tensors_of(call(**good | {name: leaf})) if out.requires_grad]
        sum(outs).backward()
        assert leaf.grad.any(), name
        tangent = sum(t for t in tangents if t is not None)
        torch.testing.assert_close(tangent, leaf.grad.sum().to(tangent), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "op, source, learned",
    [*(("rotate", "table", n) for n in (False, True)), *(("norm_rotate_qk", s, False) for s in ("table", "inv_freq"))],
)
def test_backward_raises_if_a_saved_tensor_was_overwritten(op, source, learned, device):
    """A rotation saves x only if a table requires grad."""
    angles = {"cos", "sin", "inv_freq"}
    for name in (call := call_of(op, device, source)):
        leaves = {n: t.clone().requires_grad_(learned or n not in angles) for n, t in call.items()}
        out = tensors_of(getattr(rope, op)(**leaves))
        with torch.no_grad():
            leaves[name].mul_(2)
        is_saved = pytest.raises(RuntimeError, match="modified by an inplace operation")
        with is_saved if learned or name != "x" else contextlib.nullcontext():
            sum(o.sum() for o in out).backward()


# ---- learned tables and frequencies ----


def test_each_part_of_split_frequencies_has_the_gradient_of_the_sum(device):
    whole = torch.rand(4, device=device)
    first = whole * torch.rand(4, device=device)
    x, positions = torch.randn(2, 5, 3, 10, device=device), torch.arange(5, device=device) * 1.5
    given, tangent = torch.randn(2, 5, 3, 10, device=device), torch.randn(4, device=device)

    def loss(freq):
        matrix = freq.unsqueeze(-2).expand(*freq.shape[:-1], 3, 4)  # the same on each of three axes
        cos, sin = rope.axial_cos_sin(positions.expand(3, 5), matrix)
        rotated = rope.rotate(x, inv_freq=freq, offset=3, rotary_start=1)
        return sum(rope.cos_sin(positions, freq)).sin().sum() + (cos * sin).sum() + (rotated * given).sum()

    parts = torch.stack([first, whole - first]).requires_grad_()
    (expected,) = torch.autograd.grad(loss(whole.requires_grad_()), whole)
    (found,) = torch.autograd.grad(loss(parts), parts)
    torch.testing.assert_close(found, torch.stack([expected, expected]), rtol=1e-4, atol=1e-3)
    directional = torch.func.jvp(loss, (parts.detach(),), (torch.stack([tangent, -2 * tangent]),))[1]
    torch.testing.assert_close(directional, -(expected * tangent).sum(), rtol=1e-3, atol=1e-3)


# The results of each operator that require grad if only one input does.
REQUIRING = {
    "rotate_qk": {"q": [True, False], "k": [False, True], "cos": [True, True]},
    "norm_rotate_qk": {"q": [True, False], "q_norm_weight": [True, False], "k": [False, True]},
    "_norm_rotate_qk_backward": {"q_out_grad": [True, False] * 2, "k": [False, True] * 2},
}


@pytest.mark.parametrize("op, name", [(op, name) for op, names in REQUIRING.items() for name in names])
def test_a_result_has_a_derivative_only_if_an_input_that_it_depends_on_has(op, name, device):
    """This holds under torch.compile too."""
    call = call_of(op, device)
    leaf = call[name].clone().requires_grad_()

    def function(t):
        return getattr(rope, op)(**call | {name: t})

    torch._dynamo.reset()
    gradients = []
    for how in (function, torch.compile(function, backend="aot_eager", fullgraph=True))[: 1 + (name != "k")]:
        outs = how(leaf)
        assert [out.requires_grad for out in outs] == REQUIRING[op][name]
        gradients += torch.autograd.grad([o.square().sum() for o in outs if o.requires_grad], leaf)
    assert torch.equal(gradients[0], gradients[-1]) and gradients[0].any()
    with fwAD.dual_level():
        outs = function(fwAD.make_dual(call[name], call[name]))
        assert [fwAD.unpack_dual(out).tangent is not None for out in outs] == REQUIRING[op][name]


NEEDED = {
    "rotate_qk": ["q", "k", "q k", "cos", "sin", "cos sin", "q cos", "k sin", "q k sin"],
    "norm_rotate_qk": ["q", "k q_norm_weight", "k_norm_weight", "q k q_norm_weight k_norm_weight", "cos", "q sin"],
}


@pytest.mark.parametrize("used", ["q", "k", "qk"])
@pytest.mark.parametrize("op, needed", [(op, names) for op, needed in NEEDED.items() for names in needed])
def test_backward_computes_only_the_gradients_that_are_needed(op, needed, used, device):
    """Some inputs are frozen, and the loss may use one output only. Other gradients have the bits of the operators."""
    inputs, flags = call_of(op, device), {"attention_factor": 1.3}
    leaves = {name: t.clone().requires_grad_(name in needed.split()) for name, t in inputs.items()}
    with Calls() as calls:
        outs = dict(zip("qk", getattr(rope, op)(**leaves, **flags), strict=True))
    assert calls.names == [f"rope::{op}"]
    given = {name: torch.randn_like(outs[name]) for name in used}
    of = [name for name in used if outs[name].requires_grad]
    with Calls() as calls:
        torch.autograd.backward([outs[name] for name in of], [given[name] for name in of])
    names = [name for name in calls.names if name.startswith("rope::")]
    if "norm" in op:
        assert names == ["rope::_norm_rotate_qk_backward"] * (bool(of) and needed != "cos")
        gradients = [given.get(name, torch.zeros_like(outs[name])) for name in "qk"]
        expected = rope._norm_rotate_qk_backward(*gradients, **inputs, **flags)
        expected = {name: g for name, g in zip(inputs, expected, strict=False) if name[0] in used}
    else:
        rotated = len({*needed.split()} & {*used})  # the gradients that backward rotates: those of q, k or both
        assert names == [f"rope::rotate{'_qk' * (rotated - 1)}"] * bool(rotated)
        tables = {"cos": inputs["cos"], "sin": inputs["sin"]}
        expected = {name: rope.rotate(given[name], **tables, **flags, inverse=True) for name in used}
    for name, leaf in leaves.items():
        is_angle = name in ("cos", "sin")  # gradcheck has shown that their gradients are right
        assert (leaf.grad is not None) == (leaf.requires_grad and (is_angle or name in expected))
        assert leaf.grad is None or is_angle or torch.equal(leaf.grad, expected[name])


def test_gradients_of_cos_sin_are_computed_in_float32_if_the_tables_have_16_bits(device):
    inputs = [torch.rand(n, device=device, requires_grad=True) for n in (5, 4)]
    given = torch.randn(2, 5, 4, device=device).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        found.append(torch.autograd.grad(rope.cos_sin(*inputs, dtype=dtype), inputs, [*given.to(dtype)]))
    assert all(map(torch.equal, *found))


# ---- in place ----

# The arguments that each in-place operator writes: without q_out and, where the name says so, with it. Then q is read.
IN_PLACE = {op: [n for n in written_by(op) if n != "q_out"] for op in WRITING}
TO_Q_OUT = " to q_out"
IN_PLACE["rotate_into_cache_" + TO_Q_OUT] = ["q_out", "k_cache", "v_cache"]
# The operators that the error message of each in-place operator recommends instead.
INSTEAD = {
    "rotate_": "rope.rotate",
    "rotate_qk_": "rope.rotate_qk",
    "norm_rotate_qk_": "rope.norm_rotate_qk",
    "rotate_into_cache_": "rope.rotate_qk or rope.norm_rotate_qk, and write the caches yourself",
}


def in_place_call(name, device, source="table"):
    """Returns an operator and its arguments, for a name in IN_PLACE."""
    op = name.removesuffix(TO_Q_OUT)
    call = call_of(op, device, source)
    return op, call | ({"q_out": torch.zeros_like(call["q"])} if op != name else {})


def negated(t):
    """Returns a view with the values of t, which torch negates when they are read."""
    view = torch.complex(t, -t).conj().imag
    assert view.is_neg()
    return view


@torch.inference_mode()
def inference(t):
    return t.clone()


# Which tensors in-place operators refuse: how such a tensor is made, the error, the end of the message.
REFUSED = {
    "negated": (negated, NotImplementedError, "is a negated view but must not be one, .* resolve_neg"),
    "inference": (inference, RuntimeError, "is an inference tensor but must be a normal tensor .* use {}$"),
    "requires grad": (
        lambda t: t.clone().requires_grad_() * 1,
        RuntimeError,
        "requires grad but must not, .* use {}, or torch.no_grad",
    ),
    "has a tangent": (
        lambda t: fwAD.make_dual(t, torch.ones_like(t)),
        RuntimeError,
        "has a forward-mode tangent but must not, .* use {}$",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("source", ["table", "inv_freq"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_refuse_tensors_before_anything_is_written(name, source, kind, device):
    """Negated views and inference tensors may be read, and tensors that require grad may be written under no_grad."""
    (op, good), (make, error, message) = in_place_call(name, device, source), REFUSED[kind]
    before = {n: (t.clone(), t._version) for n, t in good.items()}
    for argument in IN_PLACE[name] if kind in ("negated", "inference") else good:
        with fwAD.dual_level():
            a = good | {argument: make(good[argument])}
            for context in (torch.enable_grad, torch.no_grad, torch.inference_mode)[: 3 if "tangent" in kind else 1]:
                with context(), pytest.raises(error, match=f"rope.{op}: {argument} {message.format(INSTEAD[op])}"):
                    getattr(rope, op)(**a)
        if kind == "requires grad":
            with torch.no_grad():
                getattr(rope, op)(**{n: t.clone() for n, t in a.items()})
    assert all(torch.equal(good[n], t) and good[n]._version == version for n, (t, version) in before.items())


@pytest.mark.parametrize("make", [negated, inference])
@pytest.mark.parametrize("name", IN_PLACE)
def test_negated_views_and_inference_tensors_are_read_correctly(name, make, device):
    op, good = in_place_call(name, device)
    expected = {n: t.clone() for n, t in good.items()}
    getattr(rope, op)(**expected)
    for argument in good.keys() - {*IN_PLACE[name]}:
        a = {n: t.clone() for n, t in good.items()} | {argument: make(good[argument])}
        getattr(rope, op)(**a)
        assert all(torch.equal(a[n], expected[n]) for n in IN_PLACE[name])


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_in_place_operator_bumps_the_version_of_what_it_writes(name, device):
    op, a = in_place_call(name, device)
    before = {n: t._version for n, t in a.items()}
    for count, context in enumerate((torch.enable_grad, torch.no_grad, torch.inference_mode), 1):
        with context():
            getattr(rope, op)(**a)
        assert all(a[n]._version == version + count * (n in IN_PLACE[name]) for n, version in before.items())
    with torch.inference_mode():  # inference tensors have no version, and the operator takes them
        getattr(rope, op)(**{n: t.clone() for n, t in a.items()})


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_autograd_saved_is_cloned_before_it_is_written(name, device):
    """torch.autograd.graph.allow_mutation_on_saved_tensors does so, and the gradient is that of the old values."""
    for written in IN_PLACE[name]:
        op, given = in_place_call(name, device)
        leaf = given[written].requires_grad_()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            given[written] = leaf * 1
            loss = given[written].square().sum()
            with torch.no_grad():
                getattr(rope, op)(**given)
            loss.backward()
        assert torch.equal(leaf.grad, leaf * 2) and not torch.equal(given[written], leaf)


# ---- forward mode and torch.func ----


@pytest.mark.core
@pytest.mark.parametrize(
    "number, op, over_heads",
    [
        (3, "rotate_qk", False),
        (5, "norm_rotate_qk", False),
        (6, "rotate_qk", False),
        (9, "rotate_qk", False),
        (8, "norm_rotate_qk", True),
    ],
)
def test_torch_func_agrees_with_plain_autograd(number, op, over_heads, device):
    """So does every nesting of forward and reverse mode, and a transform inside plain autograd."""
    source, more = [*SOURCES][number], {"interleaved": True, "over_heads": over_heads}
    inputs, angles, function = call_in_float64(op, source, device, **more)
    inputs = [t.detach() for t in inputs]
    varied = tuple(inputs[:-angles] if "norm" in op else inputs)
    every = tuple(range(len(varied)))

    def loss(*varied):
        q, k = function(*varied, *inputs[len(varied) :])
        return (q.sin() * k.cos()).sum()

    def loss_of_last(t):
        return loss(*varied[:-1], t)

    leaves = [t.clone().requires_grad_() for t in varied]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for actual in (
        torch.func.grad(loss, every)(*varied),
        torch.func.vjp(loss, *varied)[1](torch.ones((), dtype=torch.float64, device=device)),
        [g[0] for g in torch.func.vmap(torch.func.grad(loss, every))(*(t[None] for t in varied))],
    ):
        torch.testing.assert_close(tuple(actual), expected)
    tangents = tuple(torch.randn_like(t) for t in varied)
    tangent = sum((x * y).sum() for x, y in zip(expected, tangents, strict=True))
    torch.testing.assert_close(torch.func.jvp(loss, varied, tangents)[1], tangent)

    last = leaves[-1]
    hessian = torch.autograd.functional.hessian(loss_of_last, last.detach())
    for outer, inner in itertools.product((torch.func.jacfwd, torch.func.jacrev), repeat=2):
        torch.testing.assert_close(outer(inner(loss_of_last))(last.detach()), hessian)
    (gradient,) = torch.autograd.grad(torch.func.grad(loss_of_last)(last).sum(), last)
    torch.testing.assert_close(gradient, hessian.sum(dim=tuple(range(last.dim()))))


@pytest.mark.parametrize("op", FUNCTIONAL)
def test_autocast_changes_nothing(op, device):
    half = {"x", "q", "k", "q_out_grad", "k_out_grad", "k_norm_weight"}
    call = {name: t.bfloat16() if name in half else t for name, t in call_of(op, device).items()}
    expected = tensors_of(getattr(rope, op)(**call))
    with torch.autocast(device, dtype=torch.bfloat16):
        outs = tensors_of(getattr(rope, op)(**call))
    assert all(out.dtype == e.dtype and torch.equal(out, e) for out, e in zip(outs, expected, strict=True))
