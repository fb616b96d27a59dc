"""Tests of patch for diffusers and timm, on modules of our own that rotate as theirs do: what patch changes, leaves alone
and refuses. tests/exhaustive/models tests every class of these libraries."""

import layers
import pytest
import torch
from layers import (
    Attention,
    Layer,
    Processor,
    apply_rotary_plain,
    attention_inputs,
    counting,
    layer_inputs,
    rotated,
    unpatched,
)
from layers import rotations as rotations
from torch import nn

from torch_rope.integrations import diffusers, timm
from torch_rope.integrations._bits import Rounds
from torch_rope.integrations._conventions import CONVENTIONS
from torch_rope.integrations._reading import Known
from torch_rope.integrations._rotary import Rotary

pytestmark = pytest.mark.cpu


# ---- functions as those of diffusers and timm ----


def apply_rotary_split(x, freqs):
    """LTX-2 does this: it rounds x * cos before the sum, and not the other product."""
    (cos, sin), (a, b) = freqs, x.chunk(2, -1)
    return torch.cat([(a * cos).addcmul_(-sin, b), (b * cos).addcmul_(sin, a)], -1).type_as(x)


def test_a_function_has_the_bits_for_many_numbers():
    """Two ways to round may differ in one number of ten thousand, if the result has 16 bits."""
    known = Known("ltx2", Rounds(inside="float", result="x", converts="once", rounds_first_product=True))
    rotate = Rotary(apply_rotary_split, "apply_rotary_split", known, CONVENTIONS["ltx2"])
    tables = tuple(torch.randn(2, 2, 1, 1024, 32))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 6, 1024, 64).to(dtype)
        assert torch.equal(rotate(x, tables), apply_rotary_split(x, tables))


# ---- layers ----


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", [(), (4,), (2, 1), (2, 4)], ids=["shared", "by head", "by image", "by both"])
def test_a_layer_of_timm_keeps_its_bits(shape, half, rotations):
    layer, args = Layer(), layer_inputs(*shape, half=half)
    leaves = [x.requires_grad_() for x in args[:2]]

    def step():
        out = layer(*args)
        return [*out, *torch.autograd.grad(out, leaves, [x.cos() for x in leaves])]

    expected = step()
    timm.patch(layer)
    rotations.clear()
    assert all(map(torch.equal, step(), expected)) and rotations == [True, True]


def test_processors_of_one_class_keep_one_class_and_their_state():
    first, second = (Attention(Processor()) for _ in range(2))
    other = Attention(first.processor)  # two models may share their processors
    model = nn.ModuleDict({"first": first, "second": second})
    before = first.processor
    patched = diffusers.patch(model)
    assert unpatched(other) and other.processor is before
    assert type(first.processor) is type(second.processor)  # torch.compile compiles once for both
    first.processor.scale = 3  # set_attention_backend of diffusers changes processors
    patched.undo()
    assert first.processor is before and before.scale == 3


OfTransformers = type("OfTransformers", (Attention,), {"__module__": "transformers.models.some"})
RotaryPosEmbed = type("RotaryPosEmbed", (nn.Module,), {})  # its formula is written out, as in MiniMax-H3's VAE


class Pipeline:
    def __init__(self, transformer):
        self.components = {"transformer": transformer, "text_encoder": OfTransformers(Processor()), "scheduler": self}
        self.components["vae"] = nn.Sequential(nn.Sequential(RotaryPosEmbed()))
        self.components["text_encoder"].rope = RotaryPosEmbed()


def test_a_pipeline_is_patched_with_its_models_but_not_with_those_of_transformers():
    model = Attention(Processor())
    pipe = Pipeline(model)
    patched = diffusers.patch(pipe)
    assert diffusers.patch(pipe) is patched and unpatched(pipe.components["text_encoder"]) and not unpatched(model)
    assert "torch_rope in Pipeline:\n  transformer.processor of 1 Processor" in str(patched)
    assert [line.split()[0] for line in str(patched).splitlines()[2:]] == ["vae.*.*:", "text_encoder.rope:"]
    with pytest.raises(ValueError, match="Pipeline cannot be patched now: .* of transformer.* calls"):
        diffusers.patch(Pipeline(model))
    patched.undo()
    assert unpatched(model)
    with pytest.raises(ValueError, match="Pipeline is not patched: no module of it calls a rotary function"):
        diffusers.patch(Pipeline(None))


# ---- what patch refuses ----


def rotate_half(x):
    """A usual text of it."""
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rotary_known(x, cos, sin):
    """Many write it in this way."""
    return x * cos + rotate_half(x) * sin


def apply_rotary_scaled(x, cos, sin):
    return 2 * apply_rotary_known(x, cos, sin)


def apply_rotary_with_an_object(x, cos, sin, log=object()):  # noqa: B008
    return rotated(x, cos, sin)


shell = globals() | {}
exec("def apply_rotary_of_a_shell(x, cos, sin): return rotated(x, cos, sin)", shell)
# Why these have no text.
UNKNOWN = {
    apply_rotary_with_an_object: "the defaults of apply_rotary_with_an_object are no constants",
    shell["apply_rotary_of_a_shell"]: "the source of apply_rotary_of_a_shell is not",
    lambda x, cos, sin: rotated(x, cos, sin): "the source of <lambda> is not that",
}


@pytest.mark.parametrize("function", UNKNOWN, ids=lambda f: f.__name__)
def test_an_unknown_function_is_refused_by_name(function, monkeypatch):
    """The model also contains layers that could be patched, which must not be patched either."""
    monkeypatch.setattr(layers, "apply_rotary_of_the_test", function)
    model = nn.ModuleDict({"known": Attention(Usual()), "attention": Attention(Processor())})
    where = "ModuleDict is not patched: Processor.__call__ of attention.processor calls apply_rotary_of_the_test: "
    advice = r"torch_rope.integrations.diffusers.register\(function, like=\.\.\.\) says what"
    why = f"it has no text that could be known: {UNKNOWN[function]}"
    with pytest.raises(NotImplementedError, match=f"{where}{why}.*; {advice}"):
        diffusers.patch(model)
    assert unpatched(model)


class Usual:
    def __call__(self, attn, x, cos, sin):
        return apply_rotary_known(x, cos, sin)


class WithAClosure:
    def __call__(self, attn, x, cos, sin):
        scale = x.shape[1] / 6

        def apply_rotary(x, cos, sin):
            return scale * x * cos + rotate_half(x) * sin

        return apply_rotary(x, cos, sin)


class WithDefaults:
    def __call__(self, attn, x, cos, sin):
        def apply_rotary(x, cos, sin, scale=x.shape[1] / 6):
            return x * cos + rotate_half(x) * sin

        return apply_rotary(x, cos, sin)


@pytest.mark.parametrize("processor", [WithAClosure, WithDefaults])
def test_a_nested_function_with_a_closure_or_defaults_is_refused(processor):
    model = Attention(processor())
    with pytest.raises(NotImplementedError, match="__call__ of processor calls apply_rotary: it has no text"):
        diffusers.patch(model)
    assert unpatched(model)


class Nested:
    def __call__(self, attn, x, cos, sin):
        def apply_rotary(x, cos, sin):
            return x * cos + rotate_half(x) * sin

        return apply_rotary(x, cos, sin)


class Scaled:
    """It calls a function that is not known, which calls one that is."""

    def __call__(self, attn, x, cos, sin):
        return apply_rotary_scaled(x, cos, sin)


@pytest.mark.parametrize("processor", [Usual, Nested, Scaled])
def test_a_processor_of_ones_own_may_rotate(processor, rotations):
    model, (x, *tables) = Attention(processor()), attention_inputs()
    args = x, *(t[..., ::2].repeat(1, 1, 1, 2) for t in tables)
    expected = model(*args)
    with diffusers.patch(model) as patched:
        rotations.clear()
        assert torch.equal(model(*args), expected) and rotations == [True]
        assert f"processor of 1 {processor.__name__}: apply_rotary" in str(patched)


def turned(x):
    return torch.cat((x[..., x.shape[-1] // 2 :], -x[..., : x.shape[-1] // 2]), dim=-1)


def test_a_helper_that_was_replaced_is_another_text(monkeypatch):
    """Also for a function that was known before."""
    model = Attention(Usual())
    diffusers.patch(model).undo()
    monkeypatch.setitem(globals(), "rotate_half", turned)
    with pytest.raises(NotImplementedError, match=r"calls apply_rotary_known: its text \([0-9a-f]{12}\) is not known"):
        diffusers.patch(model)


# ---- what falls back to the function ----


@pytest.mark.parametrize("another, half", [(False, True), (True, False)])
def test_tables_that_are_no_rotation_are_left_to_the_function_with_one_warning(another, half, rotations):
    """Also if another model was called with right tables of the same shape before, as HunYuan-VL is for text."""
    layer, (q, k, sin, cos, _) = Layer(), layer_inputs(half=not half)  # the channels of a pair have other angles
    expected = layer(q, k, sin, cos, half)
    if another:
        other = Layer()
        timm.patch(other)
        other(*layer_inputs(half=half))
    timm.patch(layer)
    rotations.clear()
    with pytest.warns(UserWarning) as warned:
        for _ in range(2):
            assert all(map(torch.equal, layer(q, k, sin, cos, half), expected))
    assert rotations == [False] * 4
    messages = [str(w.message) for w in warned if "torch_rope" in str(w.message)]
    assert len(messages) == 2 and messages[0] == (
        "torch_rope: apply_rot_embed was called with different angles for the two channels of a pair, which is not a "
        "rotation, so it computes as without torch_rope"
    )
    layer(q, k, sin, cos, not half)
    assert rotations[4:] == [True] * 2


def test_a_compiled_model_has_one_graph_and_rotates_by_no_wrong_tables():
    """It raises an error, unless its tables were seen before: then it computes as without torch_rope."""
    layer, graphs, (q, k, sin, cos, _) = Layer(), [], layer_inputs(half=True)
    right, wrong = (q, k, sin, cos, True), (q, k, sin, cos, False)
    expected = [layer(*args) for args in (right, wrong)]
    with timm.patch(layer):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=counting(graphs))
        torch.testing.assert_close(compiled(*right), expected[0])
        with pytest.raises(RuntimeError, match="was called with different angles for the two channels of a pair"):
            compiled(*wrong)
        layer(*wrong)
        torch.testing.assert_close(compiled(*wrong), expected[1])
    assert graphs == [2, 2, 0]


def test_shapes_and_dtypes_that_were_not_tried_are_left_to_the_function(rotations):
    """x may have more dimensions, and no tokens."""
    model, (x, cos, sin) = Attention(Processor()), attention_inputs()
    wide = x[None].expand(3, -1, -1, -1, -1)
    expected = model(wide, cos, sin)
    with diffusers.patch(model):
        rotations.clear()
        assert torch.equal(model(wide, cos, sin), expected) and rotations == [False]
        with pytest.raises(RuntimeError, match="must match the size"):  # the error of the function
            model(x[:, :5], cos, sin)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            for tables in (torch.float64, torch.bfloat16):
                args = x.to(dtype), cos.to(tables), sin.to(tables)
                ours, theirs = model(*args), apply_rotary_plain(*args)
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert model(x[:, :0], cos[:, :0], sin[:, :0]).shape == (2, 0, 3, 16)


@pytest.mark.parametrize("rounding", ["eager", "once"])
def test_tables_that_need_a_gradient_are_left_to_the_function_for_its_bits(rounding, rotations):
    model, args = Attention(Processor()), attention_inputs()
    leaves = [t.requires_grad_() for t in args]
    expected = torch.autograd.grad(model(*args).square().sum(), leaves)
    diffusers.patch(model, rounding=rounding)
    rotations.clear()
    actual = torch.autograd.grad(model(*args).square().sum(), leaves)
    assert rotations == [rounding == "once"]
    torch.testing.assert_close(actual, expected)
    if rounding == "eager":
        assert all(map(torch.equal, actual, expected))
        with torch.no_grad():
            model(*args)
        assert rotations[-1]
