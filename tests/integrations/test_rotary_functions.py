"""Tests of the rotary functions of transformers that are known: what they compute, refusals, and what is registered."""

import functools
import importlib
import inspect
import weakref

import pytest
import texts
import torch
from cases import needed
from torch import nn

transformers = needed("transformers")

from known.samples import LAYOUTS  # noqa: E402
from known.trial import ALL, BITS, CLOSE, Trial, strides  # noqa: E402

import torch_rope  # noqa: E402
from torch_rope.integrations._conventions import CONVENTIONS  # noqa: E402
from torch_rope.integrations._text import NoText, plain, text_of  # noqa: E402
from torch_rope.integrations.transformers import LIBRARY, patch, register  # noqa: E402

pytestmark = [pytest.mark.cpu]


def of_model(name, function="apply_rotary_pos_emb"):
    """Returns a function of a modeling file."""
    return plain(getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), function))


apply_rotary_pos_emb = of_model("llama")


def found(function, rounding="eager"):
    """Returns the Rotary of a function whose text is known."""
    return LIBRARY.rotary_of(function, "f", rounding)


def rotate_half(x):
    """A usual text of it."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def inputs():
    """Returns q, k, cos and sin, as the function of Llama takes them."""
    angle = torch.randn(2, 5, 8).repeat(1, 1, 2)
    return torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), angle.cos(), angle.sin()


# ---- What a rotary function may do ----


SOON = {"llama", "gpt_neox", "deepseek_v3", "dinov3_vit", "gptj", "sam3"}  # the others at night


def of_release():
    """Yields each text of the installed release once, with a file that has it."""
    release = ".".join(transformers.__version__.split(".")[:2])
    for text, known in LIBRARY.known.items():
        if release in known.releases.split():
            file = next(filter(SOON.__contains__, known.files.split()), known.files.split()[0])
            marks = [] if file in SOON else [pytest.mark.exhaustive]
            yield pytest.param(text, file, id=f"{known.name} of {file}", marks=marks)


def agrees(function, known):
    """Returns whether a function does what a table says, for the arguments of all conventions that it takes."""
    convention, trial = CONVENTIONS[known.convention], Trial(function)
    alike = [name for name, other in CONVENTIONS.items() if other.tensors == convention.tensors]
    least = BITS if "gradients" in known.but else ALL

    def has_other_bits(values):
        ours = "multiple of 16" in known.but and trial.rotated(known, convention, values) is not None
        return ours and convention.read(values[0], *values[convention.tensors :]).cos.shape[-1] % 8

    for dtypes in ((torch.float32,) * 2, (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        cases = trial.cases(alike, convention.tensors, dtypes=dtypes)
        odd = {id(case): case for case in cases if has_other_bits(case.values)}
        if odd and trial.agreement(known, convention, [*odd.values()])[0] < CLOSE:
            return False
        agreement, computed = trial.agreement(known, convention, [case for case in cases if id(case) not in odd])
        if agreement < least or not (computed or not cases):
            return False
    for values, _, (expected, _) in trial.cases([known.convention], convention.tensors, layouts=LAYOUTS):
        ours = trial.rotated(known, convention, values)
        if ours is not None and [*map(strides, ours)] != [*map(strides, expected)]:
            return False
    return True


@pytest.mark.parametrize("text, file", of_release())
def test_a_known_function_does_what_the_table_says(text, file):
    """Its results have the same bits and strides, and gradients, for the arguments of all conventions that it takes: as many
    tokens as heads, or as the batch, one token, one head, and x that is not contiguous; or torch_rope leaves them to it."""
    module = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    functions = [plain(f) for name, f in vars(module).items() if LIBRARY.rotary.search(name) and inspect.isfunction(f)]
    [function] = dict.fromkeys(f for f in functions if f.__code__.co_argcount > 1 and text_of(f) == text)
    assert agrees(function, LIBRARY.known[text])


@pytest.mark.parametrize("function", texts.USUAL, ids=lambda f: f.__name__)
def test_the_usual_functions_of_other_people_are_known(function):
    """Also where there are as many tokens as heads, which no size tells apart."""
    assert agrees(function, found(function).known)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_head_that_does_not_rotate_as_a_whole_is_left_to_a_function_that_cannot(name):
    rotary, (q, k, *tables) = found(of_model(name)), inputs()
    wide = [torch.cat([x, x], -1) for x in (q, k)]
    if name == "llama":
        with pytest.raises(RuntimeError, match="must match the size"):
            rotary(*wide, *tables)
    else:
        assert all(map(torch.equal, rotary(*wide, *tables), rotary.function(*wide, *tables)))


def test_k_may_be_none_if_the_function_accepts_none():
    rotary, (q, k, *tables) = found(of_model("qwen4_exp")), inputs()
    assert torch.equal(rotary(q, None, *tables), rotary(q, k, *tables)[0])


BITS_OF_COMPLEX = "interleaved, with other bits of complex numbers if rotary_dim is not a multiple of 16"


@pytest.mark.parametrize(
    "function, rounding, says",
    [
        (apply_rotary_pos_emb, "eager", "half-split"),
        (apply_rotary_pos_emb, "once", "half-split, rounded once"),
        (of_model("nanochat"), "eager", "half-split, inverse"),
        (of_model("llama4", "apply_rotary_emb"), "eager", BITS_OF_COMPLEX),
    ],
)  # fmt: skip
def test_the_handle_says_what_a_function_does_and_where_bits_differ(function, rounding, says):
    assert str(found(function, rounding)) == f"f is torch.ops.rope.rotate_qk, {says}"


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
    other_cos.data = cos.flip(1)  # as offloading does
    check(torch.bfloat16, other_cos, other_sin)
    storage = weakref.ref(other_cos)
    del other_cos
    assert storage() is None


# ---- What patch refuses ----


def test_a_function_is_refused_by_its_own_name_and_reason():
    """And not by that of rotate_half, which it calls."""
    model = transformers.models.clvp.modeling_clvp.ClvpSelfAttention(transformers.ClvpEncoderConfig())
    with pytest.raises(
        NotImplementedError, match="calls apply_rotary_pos_emb: it rotates q, k and v, and takes positions"
    ):
        patch(model)


def rotary_of_the_test(x, cos, sin, by=1):
    return x * cos + rotate_half(x) * sin * by


def test_a_text_is_that_of_the_function_its_helpers_and_defaults(monkeypatch):
    """Comments, docstrings, annotations and white space do not matter. A decorator that is not known has no text."""
    text = text_of(rotary_of_the_test)
    assert text_of(texts.rotary_of_the_test) == text
    with pytest.raises(NoText, match="function is neither a constant nor a function|is not that of its code"):
        text_of(functools.wraps(rotary_of_the_test)(lambda *args: 2 * rotary_of_the_test(*args)))
    monkeypatch.setattr(rotary_of_the_test, "__defaults__", (2,))
    assert text_of(rotary_of_the_test) != text
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "rotate_half", torch.neg)
    assert text_of(rotary_of_the_test) != text


def test_source_that_was_edited_since_is_no_text(tmp_path, monkeypatch):
    """And the text is the new one after a reload."""
    source = inspect.getsource(texts)
    (tmp_path / "edited.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("edited")
    assert text_of(module.of_two) == text_of(texts.of_two)
    (tmp_path / "edited.py").write_text(source.replace("(-x2, x1)", "(x2, -1 * x1)"))
    with pytest.raises(NoText, match="the source of .* is not that of its code"):
        text_of(module.of_two)
    importlib.invalidate_caches()
    assert text_of(importlib.reload(module).of_two) != text_of(texts.of_two)


@pytest.mark.parametrize("library", ["transformers", "diffusers", "timm"])
def test_the_name_of_each_known_function_is_found(library):
    library = importlib.import_module(f"torch_rope.integrations.{library}").LIBRARY
    assert all(library.rotary.search(known.name) for known in library.known.values())


# ---- What is registered ----


def apply_rotary_at_positions(q, k, v, cos, sin, position_ids):
    """CLVP does this."""
    cos, sin = (t[position_ids].unsqueeze(1) for t in (cos, sin))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v


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
    "a function": (RotatesAtPositions, apply_rotary_at_positions, at_positions, r"calls apply_rotary_at_positions: its text \(.*\) is not known"),
    "a method": (
        RotatesInAMethod, RotatesInAMethod._apply_rotary_embedding, in_a_method, "must call a rotary function that .*register\\(function, replacement\\) puts",
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
        register(at_positions, rotate_half)


def apply_rotary_mine(q, k, cos, sin, scale=1.0):
    """q: [batch, seq, heads, head_dim], cos: [seq, head_dim]"""
    cos, sin = (t[None, :, None] for t in (cos * scale, sin * scale))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_of_one(x, freqs_cis):
    """x: [batch, heads, seq, head_dim], freqs_cis: [batch, seq, head_dim / 2]"""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs_cis[:, None]).flatten(-2)


def apply_rotary_like_llama(query, key, cosine, sine, dim=1):
    both = [(x, torch.cat((-x[..., 8:], x[..., :8]), -1)) for x in (query, key)]
    return tuple(x * cosine.unsqueeze(dim) + half * sine.unsqueeze(dim) for x, half in both)


class Rotates(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return apply_rotary_here(*args)  # noqa: F821  a test defines it


@pytest.mark.parametrize(
    "function, like",
    [
        (apply_rotary_mine, "half-split, [batch, seq, heads, head_dim], cos [seq, head_dim]"),
        (
            apply_rotary_of_one,
            "interleaved, x [batch, heads, seq, head_dim], complex freqs_cis [batch, seq, head_dim / 2]",
        ),
        (apply_rotary_like_llama, apply_rotary_pos_emb),
    ],
)
def test_words_or_a_known_function_say_what_a_function_does(function, like, monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_here", function)
    model, (q, k, cos, sin) = Rotates(function), inputs()
    args = q, k, cos, sin
    if function is apply_rotary_mine:  # as many tokens as heads
        args = *(x[:, :, :3].transpose(1, 2) for x in (q, k)), cos[0, :3], sin[0, :3]
    if function is apply_rotary_of_one:
        args = q, torch.polar(torch.ones(()), torch.randn(2, 5, 8))
    expected = model(*args)
    with pytest.raises(NotImplementedError, match="its text"):
        patch(model)
    register(function, like=like)
    with patch(model) as patched:
        assert "apply_rotary_here is torch.ops.rope.rotate" in str(patched)
        torch.testing.assert_close(model(*args), expected)
        if function is apply_rotary_mine:  # words say nothing of other arguments: the function itself computes
            for scale in (2.0, torch.rand(3, 1)):
                assert torch.equal(model(*args, scale)[0], function(*args, scale)[0])
    register(function)


WRONG_WORDS = {
    "half-split": "must be like",
    "half-split, [batch, seq, heads, head_dim], cosine [seq, head_dim]": "has the table cosine",
    "half-split, [batch, seq, heads], cos [seq, head_dim]": "must end with head_dim",
    "half-split, [batch, seq, heads, head_dim], cos [tokens, head_dim]": "some of the dimensions of x",
    "half-split, [batch, seq, heads, head_dim], cos [heads, seq, head_dim]": "in the same order",
}


@pytest.mark.parametrize("like", WRONG_WORDS, ids=WRONG_WORDS.values())
def test_words_that_are_not_understood_are_refused(like):
    with pytest.raises(ValueError, match=f"register: like .*{WRONG_WORDS[like]}"):
        register(apply_rotary_mine, like=like)
    with pytest.raises(ValueError, match="like is a function that is not known"):
        register(apply_rotary_mine, like=at_positions)
    with pytest.raises(ValueError, match="like says nothing of the argument position_ids, which must have a default"):
        register(texts.of_positions, like="half-split, [batch, heads, seq, head_dim], cos [seq, head_dim]")
