"""Tests what patch finds out about a rotary function of transformers: the conventions that it knows, their bits, refusals."""

import functools
import importlib
import weakref
from itertools import product

import pytest
import torch
from cases import needed
from torch import nn

transformers = needed("transformers")

import torch_rope  # noqa: E402
from torch_rope.integrations._conventions import ADJACENT, TWICE  # noqa: E402
from torch_rope.integrations._rotary import Rotary, text_of  # noqa: E402
from torch_rope.integrations.transformers import patch, register  # noqa: E402
from torch_rope.integrations.transformers.conventions import CONVENTIONS, TEXTS  # noqa: E402

pytestmark = [pytest.mark.cpu]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def of_model(name, function="apply_rotary_pos_emb"):
    """Returns a function of a modeling file."""
    return getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), function)


apply_rotary_pos_emb = of_model("llama")


def found(function, rounding="eager"):
    """Returns what is found out about a function, whose text is known."""
    return Rotary(function, "f", CONVENTIONS, {*TEXTS, text_of(function)}, rounding)


def half_turn(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def inputs():
    """Returns q, k, cos and sin, as the function of Llama takes them."""
    angle = torch.randn(2, 5, 8).repeat(1, 1, 2)
    return torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), angle.cos(), angle.sin()


# ---- What a rotary function may do ----


def rotate_half_split(x, cos, sin):
    return x * cos + half_turn(x) * sin


def converts_each_after(q, k, cos, sin, unsqueeze_dim=1):
    """Flux does this. The gradients have the strides of those of the results."""
    both = [(x, half_turn(x)) for x in (q, k)]
    cos, sin = (t.unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return tuple((x.float() * cos + half.float() * sin).to(x.dtype) for x, half in both)


def by_tangents(q, k, cos, sin, unsqueeze_dim=1):
    """Rounds as nothing else does."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q + half_turn(q) * (sin / cos)) * cos, (k + half_turn(k) * (sin / cos)) * cos


# Functions, the shapes of x or of q and k, and of the angles; whether the tables hold each angle in adjacent channels, or
# are complex (None); and the channels of a head.
HEADS, TOKENS = [(2, 3, 6), (2, 2, 6)], [(2, 6, 3), (2, 6, 2)]
FORMS = {
    "Llama": (apply_rotary_pos_emb, HEADS, (2, 6), False, 16),
    "GLM, part of the channels": (of_model("glm"), HEADS, (2, 6), False, 24),
    "Cohere converts once": (of_model("cohere"), HEADS, (2, 6), True, 16),
    "converts each after": (converts_each_after, HEADS, (2, 6), False, 16),
    "DeepSeek V3": (of_model("deepseek_v3", "apply_rotary_pos_emb_interleave"), HEADS, (2, 6), False, 16),
    "DINOv3, first tokens": (of_model("dinov3_vit"), [(2, 3, 9), (2, 2, 9)], (6,), False, 16),
    "Qwen2-VL, images": (of_model("qwen2_vl", "apply_rotary_pos_emb_vision"), [(6, 3), (6, 2)], (6,), False, 16),
    "Gemma 3n, one tensor": (of_model("gemma3n"), HEADS[:1], (2, 6), False, 16),
    "NanoChat": (of_model("nanochat"), HEADS, (2, 6), False, 16),
    "DeepSeek V2": (of_model("deepseek_v2", "apply_rotary_emb"), HEADS, (2, 6), None, 16),
    "Llama 4": (of_model("llama4", "apply_rotary_emb"), TOKENS, (2, 6), None, 16),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_bits_and_the_gradients_of_the_function(form):
    function, shapes, of_tables, adjacent, head_dim = FORMS[form]
    rotary, angle = found(function), torch.randn(*of_tables, 8)
    for dtype, of_tables in product(DTYPES, DTYPES[:1] if adjacent is None else DTYPES):
        args = [torch.randn(*shape, head_dim).to(dtype).requires_grad_() for shape in shapes]
        tables = [torch.polar(torch.ones(()), angle)]
        if adjacent is not None:
            tables = [t.to(of_tables) for t in (ADJACENT if adjacent else TWICE).tables(angle.cos(), angle.sin())]
        results = []
        for f in (function, rotary):
            out = f(*args, *tables)
            out = out if isinstance(out, tuple) else (out,)
            given = [o.detach().cos().transpose(-2, -3).contiguous().transpose(-2, -3) for o in out]
            results.append([*out, *torch.autograd.grad(out, args, given)])
        for e, a in zip(*results, strict=True):
            assert a.dtype == e.dtype
            if "DINOv3" in form and e.dtype != torch.float32:  # it rounds a gradient once more
                torch.testing.assert_close(a, e)
            else:
                assert torch.equal(a, e)


def apply_rotary_of_one(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    """Qwen4's indexer rotates only q."""
    cos, sin = (t.unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return tuple(None if x is None else rotate_half_split(x, cos, sin) for x in (q, k))


def test_k_may_be_none_if_the_function_accepts_none():
    rotary, (q, k, *tables) = found(apply_rotary_of_one), inputs()
    assert all(map(torch.equal, rotary(q, k, *tables), apply_rotary_of_one(q, k, *tables)))
    (actual, none), (expected, _) = rotary(q, None, *tables), apply_rotary_of_one(q, None, *tables)
    assert none is None and torch.equal(actual, expected)


BITS = "interleaved, with other bits of complex numbers if rotary_dim is not a multiple of 16 (tried on random numbers)"


def by_length(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (t.unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return rotate_half_split(q, cos, sin), rotate_half_split(k, cos, -sin if len(k) > 99 else sin)


@pytest.mark.parametrize(
    "function, rounding, says",
    [
        (apply_rotary_pos_emb, "eager", "half-split (tried on random numbers)"),
        (apply_rotary_pos_emb, "once", "half-split, rounded once (tried on random numbers)"),
        (by_tangents, "eager", "half-split, rounded once, without the function's bits, for float32 with tables of float32"),
        (by_length, "eager", "half-split (known by its source text)"),
        (of_model("nanochat"), "eager", "half-split, inverse (tried on random numbers)"),
        (of_model("llama4", "apply_rotary_emb"), "eager", BITS),
        (of_model("deepseek_v2", "apply_rotary_emb"), "eager", BITS),
    ],
)  # fmt: skip
def test_the_handle_says_how_it_knows_a_function_and_where_bits_differ(function, rounding, says):
    assert f"f is torch.ops.rope.rotate_qk, {says}" in str(found(function, rounding))


@torch.no_grad()
def test_tables_that_are_remembered_are_those_of_the_call_and_are_forgotten_with_it():
    new, (q, k, cos, sin) = found(apply_rotary_pos_emb), inputs()
    other_cos, other_sin = cos.flip(0), sin.flip(0)

    def check(dtype, *tables):
        args = q.to(dtype), k.to(dtype), *tables
        for actual, expected in zip(new(*args), apply_rotary_pos_emb(*args), strict=True):
            assert actual.dtype == expected.dtype and torch.equal(actual, expected)

    check(torch.float32, cos, sin)
    check(torch.float32, other_cos, sin)
    check(torch.float32, other_cos, other_sin)
    check(torch.bfloat16, other_cos, other_sin)
    other_cos.mul_(2)  # the tables may be changed in place
    check(torch.bfloat16, other_cos, other_sin)
    storage = weakref.ref(other_cos)
    del other_cos
    assert storage() is None


# ---- What patch refuses ----


def apply_rotary_at_positions(q, k, v, cos, sin, position_ids):
    """CLVP does this."""
    cos, sin = (t[position_ids].unsqueeze(1) for t in (cos, sin))
    return rotate_half_split(q, cos, sin), rotate_half_split(k, cos, sin), v


def test_a_function_is_refused_by_its_own_name():
    """And not by that of rotate_half, which it calls."""
    model = transformers.models.clvp.modeling_clvp.ClvpSelfAttention(transformers.ClvpEncoderConfig())
    with pytest.raises(NotImplementedError, match="calls apply_rotary_pos_emb: "):
        patch(model)


def test_a_text_is_that_of_the_function_and_its_helpers(monkeypatch):
    """White space and decorators do not matter."""
    text = text_of(by_length)
    decorated = functools.wraps(by_length)(lambda *args: by_length(*args))
    assert text_of(decorated) == text and text_of(by_tangents) != text
    monkeypatch.setitem(globals(), "rotate_half_split", converts_each_after)
    assert text_of(by_length) != text


# ---- What is registered ----


class RotatesAtPositions(nn.Module):
    def forward(self, *args):
        return apply_rotary_at_positions(*args)


def at_positions(q, k, v, cos, sin, position_ids):
    cos, sin = (t[position_ids][..., : t.shape[-1] // 2] for t in (cos, sin))
    return *(torch_rope.rotate(x.transpose(1, 2), cos, sin, eager_rounding=True).transpose(1, 2) for x in (q, k)), v


class RotatesInAMethod(nn.Module):
    """Wav2Vec2-Conformer does this."""

    def forward(self, x, cos, sin):
        return self._apply_rotary_embedding(x, cos, sin).unbind(0)

    def _apply_rotary_embedding(self, x, cos, sin):
        return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin


def in_a_method(self, x, cos, sin):
    cos, sin = cos[..., :8], sin[..., :8]
    return torch.ops.rope.rotate(x.unsqueeze(2), cos, sin, eager_rounding=True).squeeze(2)


REFUSED = {
    "a function": (RotatesAtPositions, apply_rotary_at_positions, at_positions, "calls apply_rotary_at_positions: the function"),
    "a method": (
        RotatesInAMethod, RotatesInAMethod._apply_rotary_embedding, in_a_method, "must call a rotary function that .*transformers.register puts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model, function, replacement, refused", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_can_be_registered(model, function, replacement, refused):
    model, (q, k, cos, sin) = model(), inputs()
    args = (q[:, 0], cos, sin)
    if function is apply_rotary_at_positions:
        args = q, k, k + 1, cos[0], sin[0], torch.arange(10).view(2, 5) % 4
    expected = model(*args)
    with pytest.raises(NotImplementedError, match=refused):
        patch(model)
    register(function, replacement)
    for fuse in (False, True):
        with patch(model, fuse=fuse) as patched:
            assert f"{function.__name__} is {replacement.__name__}, which was registered" in str(patched)
            assert all(map(torch.equal, model(*args), expected))
    register(function, None)
    with pytest.raises(NotImplementedError, match=refused):
        patch(model)


def test_what_cannot_be_registered_is_refused():
    for function, replacement in ((None, at_positions), (torch.add, at_positions), (at_positions, "at_positions")):
        with pytest.raises(TypeError, match="must be a function, such as modeling_clvp.apply_rotary_pos_emb"):
            register(function, replacement)
    with pytest.raises(TypeError, match=r"replacement has the arguments \['x'\] but must have those of .*, \['q'"):
        register(at_positions, half_turn)
