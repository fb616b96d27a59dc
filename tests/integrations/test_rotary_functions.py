"""Tests what patch finds out about a rotary function of transformers: the forms that it knows, their bits, and refusals."""

import contextlib
import functools
import re
import weakref
from itertools import product

import pytest
import torch
from cases import needed
from test_conventions import unpatched
from test_transformers import make
from torch import nn

transformers = needed("transformers")

import torch_rope  # noqa: E402
from torch_rope.integrations import _methods  # noqa: E402
from torch_rope.integrations.transformers import methods, patch, register, rotary  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("examine_once")]
apply_rotary_pos_emb = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
apply_rotary_pos_emb_interleave = transformers.models.deepseek_v3.modeling_deepseek_v3.apply_rotary_pos_emb_interleave
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def inputs():
    """Returns q, k, cos and sin, as the function of Llama takes them."""
    angle = torch.randn(2, 5, 8).repeat(1, 1, 2)
    return torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), angle.cos(), angle.sin()


# ---- What a rotary function may do ----

# The tables are made for x [.., heads, seq, head_dim], so no function adds a dimension to them but those of transformers.


def turned(x, cos, sin):
    return x * cos + rotate_half(x) * sin


def last_channels(q, k, cos, sin):
    """DeepSeek V4 does this."""
    n = cos.shape[-1]
    return tuple(torch.cat([x[..., :-n], turned(x[..., -n:], cos, sin)], -1) for x in (q, k))


def longer_k(q, k, cos, sin):
    """Muse Glimmer's assistant does this."""
    n = q.shape[-2]
    return turned(q, cos[..., -n:, :], sin[..., -n:, :]), turned(k, cos, sin)


def prefix(q, k, cos, sin, **kwargs):
    """DINOv3 does this: the first tokens have no positions."""
    n = q.shape[-2] - sin.shape[-2]
    return tuple(torch.cat([x[..., :n, :], turned(x[..., n:, :], cos, sin)], -2) for x in (q, k))


def converts_each_after(q, k, cos, sin):
    """Flux does this. The gradients have the strides of those of the results."""
    both = [(x, rotate_half(x)) for x in (q, k)]
    return tuple((x.float() * cos + half.float() * sin).to(x.dtype) for x, half in both)


def converts_once(q, k, cos, sin):
    """Cohere does this."""
    return tuple(turned(x.float(), cos, sin).to(x.dtype) for x in (q, k))


def by_products(q, k, cos, sin):
    """Multiplies and adds in one operation, so that nothing else has its bits."""
    wide = [torch.addcmul(x.double() * cos.double(), rotate_half(x).double(), sin.double()) for x in (q, k)]
    return tuple(w.to(x.dtype) for w, x in zip(wide, (q, k), strict=True))


def k_may_be_none(q, k=None, cos=None, sin=None):
    """Qwen4's indexer rotates only q."""
    return tuple(None if x is None else turned(x, cos, sin) for x in (q, k))


FORMS = [last_channels, longer_k, prefix, converts_each_after, converts_once]
FORMS += [apply_rotary_pos_emb, apply_rotary_pos_emb_interleave]
LENGTHS = {longer_k: (3, 6, 6), prefix: (7, 7, 4)}  # the numbers of tokens of q, of k and of the tables


@functools.cache
def found(function):
    return rotary.RotaryFunction(function)


@pytest.mark.parametrize("function", FORMS, ids=lambda f: f.__name__)
def test_every_form_has_the_bits_and_the_gradients_of_the_function(function):
    new, (q_seq, k_seq, seq) = found(function).replacement("new"), LENGTHS.get(function, (6, 6, 6))
    head_dim = 24 if function is last_channels else 16
    angle = torch.randn(2, seq, 8).repeat(1, 1, 2)
    angle = angle if function.__module__.startswith("transformers") else angle[0]
    for dtype, of_tables in product(DTYPES, DTYPES):
        args = [torch.randn(2, n, s, head_dim).to(dtype).requires_grad_() for n, s in ((3, q_seq), (2, k_seq))]
        results = []
        for f in (function, new):
            out = f(*args, angle.cos().to(of_tables), angle.sin().to(of_tables))
            given = [o.detach().cos().transpose(1, 2).contiguous().transpose(1, 2) for o in out]
            results.append([*out, *torch.autograd.grad(out, args, given)])
        for e, a in zip(*results, strict=True):
            assert a.dtype == e.dtype
            if function in (longer_k, prefix) and e.dtype != torch.float32:
                torch.testing.assert_close(a, e)  # these gradients may be rounded once more
            else:
                assert torch.equal(a, e)
                assert a.stride() == e.stride() or function is apply_rotary_pos_emb_interleave


def test_k_may_be_none_if_the_function_accepts_none():
    new, (q, k, cos, sin) = found(k_may_be_none).replacement("new"), inputs()
    assert all(map(torch.equal, new(q, k, cos[0], sin[0]), k_may_be_none(q, k, cos[0], sin[0])))
    (actual, none), (expected, _) = new(q, None, cos[0], sin[0]), k_may_be_none(q, None, cos[0], sin[0])
    assert none is None and torch.equal(actual, expected)


def test_the_handle_says_how_it_rounds():
    for function, rounding, remark in (
        (apply_rotary_pos_emb, "eager", ""),
        (apply_rotary_pos_emb, "once", ", rounded once"),
        (by_products, "eager", ", rounded once, because its bits cannot be had"),
    ):
        does = f"f is torch.ops.rope.rotate_qk, half-split{remark}"
        assert str(rotary.RotaryFunction(function, rounding).call("f")) == does


@torch.no_grad()
def test_tables_that_are_remembered_are_those_of_the_call_and_are_forgotten_with_it():
    new, (q, k, cos, sin) = found(apply_rotary_pos_emb).replacement("new"), inputs()
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


def test_a_rebuilt_function_keeps_its_decorator():
    def doubling(function):
        return functools.wraps(function)(lambda *args: [2 * x for x in function(*args)])

    @doubling
    def attention(*args):
        return apply_rotary_pos_emb(*args)

    new, args = methods.Rebuilder().rebuild(attention), inputs()
    assert new is not attention and all(map(torch.equal, new(*args), attention(*args)))


# ---- What patch refuses ----


def apply_rotary_scaled(q, k, cos, sin):
    return 2 * turned(q, cos, sin), turned(k, cos, sin)


def apply_rotary_at_positions(q, k, v, cos, sin, position_ids):
    """CLVP does this."""
    cos, sin = (t[position_ids].unsqueeze(1) for t in (cos, sin))
    return turned(q, cos, sin), turned(k, cos, sin), v


def apply_rotary_by_size(q, k, cos, sin):
    """Does something else for more than 64 tokens."""
    return tuple(turned(x, cos / 2 if q.shape[-2] > 64 else cos, sin) for x in (q, k))


def apply_rotary_of_longer_tables(q, k, cos, sin, unsqueeze_dim=1):
    """Takes the first rows of tables that are longer than q and k."""
    cos, sin = (t[..., : q.shape[-2], :].unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return turned(q, cos, sin), turned(k, cos, sin)


UNKNOWN = [f for name, f in list(globals().items()) if name.startswith("apply_rotary_") and f.__module__ == __name__]
rotary_of_the_test = None


class Attention(nn.Module):
    def forward(self, *args):
        return rotary_of_the_test(*args)


@pytest.mark.parametrize("function", UNKNOWN, ids=lambda f: f.__name__)
def test_an_unknown_function_is_refused(function, monkeypatch):
    """The model also contains a Llama, which must not be patched either."""
    monkeypatch.setitem(globals(), "rotary_of_the_test", function)
    model = nn.ModuleDict({"llama": make(), "attention": Attention()})
    with pytest.raises(NotImplementedError, match=r"Attention.forward of attention calls rotary_of_the_test: "):
        patch(model)
    assert unpatched(model)


def of_length(x, sin):
    return -sin if len(x) > 99 else sin


def branching(statement, file):
    """Returns a rotary function, written to a file, that does something else if a condition of q and cos holds."""
    text = f"""
def apply_rotary_that_branches(q, k, cos, sin):
    sin = {statement}
    return turned(q, cos, sin), turned(k, cos, sin)
"""
    file.write_text(text)
    names = dict(globals())
    exec(compile(text, file, "exec"), names)
    return names["apply_rotary_that_branches"]


@pytest.mark.parametrize(
    "statement, refused",
    [
        ("-sin if q.shape[-2] > 128 else sin", 'and "q.shape[-2] > 128" in line 3 of'),
        ("-sin if rotate_half(q).max() > 1e4 and True else sin", 'and "rotate_half(q).max() > 10000.0 and True" in'),
        ("[s for s in [-sin, sin] if q.shape[0] > 99 or s is sin][-1]", 'and "q.shape[0] > 99" in line 3'),
        ("of_length(q, sin)", 'and "len(x) > 99" in line'),
        ("sin if q.dtype == torch.float32 else sin * 1", 'and "q.dtype == torch.float32" in line 3'),
        ("sin if sin is not None else -sin", ""),
        ("sin if q.shape[-2] > 64 else sin", ""),
        ("sin\n    if q.dim() > 9:\n        raise ValueError", ""),
    ],
)
def test_a_branch_that_was_not_taken_is_refused(statement, refused, tmp_path):
    """Functions are tried with 1, 5 and 70 tokens. A condition that was the same each time may hide another way."""
    function = branching(statement, tmp_path / "modeling_branching.py")
    with pytest.raises(NotImplementedError, match=re.escape(refused)) if refused else contextlib.nullcontext():
        rotary.RotaryFunction(function)


def test_a_function_whose_file_has_changed_is_refused(tmp_path):
    function = branching("sin", tmp_path / "modeling_changing.py")
    branching("cos", tmp_path / "modeling_changing.py")
    with pytest.raises(NotImplementedError, match="has a source that differs from the code that runs"):
        rotary.RotaryFunction(function)


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
    "a function": (RotatesAtPositions, apply_rotary_at_positions, at_positions, "the function has the arguments"),
    "a method": (
        RotatesInAMethod, RotatesInAMethod._apply_rotary_embedding, in_a_method, "must call a rotary function that",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model, function, replacement, refused", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_can_be_registered(model, function, replacement, refused, monkeypatch):
    monkeypatch.setattr(_methods, "_registered", weakref.WeakKeyDictionary())
    model, (q, k, cos, sin) = model(), inputs()
    args = (q[:, 0], cos, sin)
    if function is apply_rotary_at_positions:
        args = q, k, k + 1, cos[0], sin[0], torch.arange(10).view(2, 5) % 4
    expected = model(*args)
    with pytest.raises(NotImplementedError, match=refused):
        patch(model)
    register(function, replacement)
    for fuse in (False, True):
        with patch(model, fuse=fuse) as handle:
            assert f"{function.__name__} is {replacement.__name__}, which was registered" in str(handle)
            assert all(map(torch.equal, model(*args), expected))
    register(function, None)
    with pytest.raises(NotImplementedError, match=refused):
        patch(model)


def test_a_function_that_torch_rope_supports_can_be_registered_too(monkeypatch):
    monkeypatch.setattr(_methods, "_registered", weakref.WeakKeyDictionary())

    def attention(*args):
        return apply_rotary_pos_emb(*args)

    register(apply_rotary_pos_emb, lambda q, k, cos, sin, unsqueeze_dim=1: (k, q))
    q, k, *tables = inputs()
    assert all(map(torch.equal, methods.Rebuilder().rebuild(attention)(q, k, *tables), (k, q)))


def test_what_cannot_be_registered_is_refused():
    for function, replacement in ((None, at_positions), (torch.add, at_positions), (at_positions, "at_positions")):
        with pytest.raises(TypeError, match="must be a function, such as modeling_clvp.apply_rotary_pos_emb"):
            register(function, replacement)
    with pytest.raises(TypeError, match=r"replacement has the arguments \['x'\] but must have those of .*, \['q'"):
        register(at_positions, rotate_half)
