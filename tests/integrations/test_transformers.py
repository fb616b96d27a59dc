"""Tests of patch and kernel_mapping: what they change, leave alone and refuse, and ways to run a patched model.

test_families.py tests that the results are right for every family.
"""

import contextlib
import copy
import functools
import io
import json
import pickle
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from cases import EXHAUSTIVE, needed, python
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

transformers = needed("transformers")

import torch_rope  # noqa: E402
from torch_rope.integrations import _rotation  # noqa: E402
from torch_rope.integrations import transformers as integration  # noqa: E402
from torch_rope.integrations.transformers import methods, patch, register, rotary, rotator  # noqa: E402

pytestmark = pytest.mark.cpu

# The largest allowed differences, as parts of the largest logit and of the largest gradient. test_families.py derives
# them.
LOGITS, GRADIENTS = 4e-6, 1.5e-5
SMALL = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
    bos_token_id=1, eos_token_id=None,
)  # fmt: skip


apply_rotary_pos_emb = transformers.models.llama.modeling_llama.apply_rotary_pos_emb


def make(model_type="llama", attention="sdpa", **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SMALL | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def tokens(batch=2, seq=12):
    return torch.randint(3, 96, (batch, seq), generator=torch.Generator().manual_seed(1))


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture
def calls(monkeypatch):
    """A list of the operators of torch_rope that patched models call."""
    counted = []
    for module, name in ((_rotation, "_rotate"), (_rotation, "_rotate_qk"), (rotator, "_rotate_qk")):
        operator = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, operator=operator, **kw: counted.append(operator) or operator(*args, **kw)
        )
    return counted


def pair(rounding="eager", **options):
    """Returns (an unpatched model, a patched model) with the same weights."""
    stock = make(**options)
    model = copy.deepcopy(stock)
    patch(model, rounding=rounding)
    return stock, model


# ---- What patch changes ----


def test_patch_and_undo_change_only_this_model(calls):
    model, other = make(), make()
    expected = model(tokens()).logits
    before = dict(vars(sys.modules[type(model).__module__]))
    handle = patch(model)
    calls.clear()
    for stock in (other, make()):  # one was made before the patch, one after
        assert torch.equal(stock(tokens()).logits, expected)
    assert not calls and vars(sys.modules[type(model).__module__]) == before
    assert torch.equal(model(tokens()).logits, expected)
    assert len(calls) == 2  # one for each layer
    handle.undo()
    assert torch.equal(model(tokens()).logits, expected)
    assert len(calls) == 2
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_handle_lists_what_it_replaced():
    handle = patch(make())
    assert str(handle).splitlines() == [
        "torch_rope in LlamaForCausalLM:",
        "  model.layers.*.self_attn.forward of 2 LlamaAttention: "
        "apply_rotary_pos_emb is torch.ops.rope.rotate_qk, half-split",
        "  model.rotary_emb.inv_freq: 8 frequencies, as before",
    ]
    handle.undo()
    assert str(handle) == "torch_rope is not in LlamaForCausalLM any more"


def test_patch_is_a_context_manager_and_undo_may_be_called_twice(calls):
    model = make()
    with patch(model) as handle:
        calls.clear()
        model(tokens())
        assert len(calls) == 2
    model(tokens())
    handle.undo()
    assert len(calls) == 2


def test_a_patched_model_says_what_is_there():
    model = make()
    handle = patch(model)
    assert patch(model) is handle
    for options in ({"rounding": "once"}, {"fuse": True}):
        with pytest.raises(ValueError, match=r"(?s)already calls torch_rope.*What is there: .*self_attn.forward of 2"):
            patch(model, **options)
    with pytest.raises(ValueError, match="What is there: apply_rotary_pos_emb is torch.ops.rope.rotate_qk"):
        patch(model.model)
    handle.undo()
    assert patch(model) is not handle


@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M", transformers.LlamaForCausalLM, None], ids=str)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"model is .* but must be a loaded model, such as AutoModelForCausalLM"):
        patch(model)
    with pytest.raises(ValueError, match='rounding is "exact"|rounding is .exact. but must be "eager" or "once"'):
        patch(make(), rounding="exact")


def test_a_later_assignment_to_a_global_of_the_module_is_seen(monkeypatch):
    model = make(attention="eager")
    patch(model)
    expected = model(tokens()).logits
    module, seen = sys.modules[type(model).__module__], []
    stock = module.eager_attention_forward
    monkeypatch.setattr(
        module, "eager_attention_forward", lambda *args, **kwargs: seen.append(1) or stock(*args, **kwargs)
    )
    assert torch.equal(model(tokens()).logits, expected) and len(seen) == 2


counter = 0


class Counts(nn.Module):
    def forward(self, q, k, cos, sin):
        global counter
        counter += 1
        return apply_rotary_pos_emb(q, k, cos, sin)


def test_a_method_may_assign_to_a_global():
    module, before = Counts(), counter
    args = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), torch.ones(2, 5, 16), torch.zeros(2, 5, 16)
    patch(module)
    assert torch.equal(module(*args)[0], args[0]) and counter == before + 1
    with pytest.raises(ValueError, match="cos has 4 rows") as error:
        module(*args[:2], torch.ones(2, 4, 16), torch.zeros(2, 4, 16))
    lines = [str(entry.path) + str(entry.lineno) for entry in error.traceback]
    assert any(line.startswith(__file__) for line in lines[1:])  # the method keeps its file and lines


class Axial(nn.Module):
    """Makes a table of rows and columns for half-split pairs, so that the channels of a pair have different angles."""

    def forward(self, h, w):
        row, column = torch.meshgrid(torch.arange(float(h)), torch.arange(float(w)), indexing="ij")
        angle = torch.cat([row.reshape(-1, 1) / torch.arange(1, 9), column.reshape(-1, 1) / torch.arange(1, 9)], -1)
        return angle.cos()[None], angle.sin()[None]


class AxialModel(nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.rope, self.blocks = rope, nn.ModuleList([Counts(), Counts()])

    def forward(self, q, k, h, w):
        for block in self.blocks:
            q, k = block(q, k, *self.rope(h, w))
        return q, k


class Diagonal(Axial):
    """Makes a right table."""

    def forward(self, h, w):
        angle = torch.arange(float(h * w))[:, None] / torch.arange(1, 9)
        return torch.cat([angle, angle], -1).cos()[None], torch.cat([angle, angle], -1).sin()[None]


@pytest.mark.parametrize("fuse", [False, True])
def test_the_first_tables_of_each_layer_are_looked_at(fuse):
    q, k = torch.randn(1, 3, 6, 16), torch.randn(1, 2, 6, 16)
    model = AxialModel(Axial())
    expected = model(q, k, 2, 3)
    handle = patch(model, fuse=fuse)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"apply_rotary_pos_emb of blocks.0 \(Counts\) was called with"):
            model(q, k, 2, 3)
    model.rope = Diagonal()
    model(q, k, 2, 3)
    handle.undo()
    model.rope = Axial()
    assert torch.equal(model(q, k, 2, 3)[0], expected[0])


def test_the_first_tables_of_a_later_layer_are_looked_at_too():
    q, k = torch.randn(1, 3, 6, 16), torch.randn(1, 2, 6, 16)
    layers = nn.ModuleList([Counts(), Counts()])
    patch(layers)
    layers[0](q, k, *Diagonal()(2, 3))
    with pytest.raises(NotImplementedError, match=r"apply_rotary_pos_emb of 1 \(Counts\) was called with"):
        layers[1](q, k, *Axial()(2, 3))


def test_undo_names_the_method_that_was_replaced_since():
    model = make()
    handle = patch(model)
    attention = model.model.layers[1].self_attn
    ours, attention.forward = attention.forward, lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(RuntimeError, match="model.layers.1.self_attn.forward was replaced after"):
        handle.undo()
    assert "rotate_qk" in str(handle)  # both layers are still patched
    attention.forward = ours
    handle.undo()


def test_patch_leaves_weights_and_the_random_state_alone_and_a_copy_stays_patched(calls):
    model = make()
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    handle = patch(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert list(model.state_dict()) == list(state)
    copied = copy.deepcopy(model)
    assert all(module.forward.__self__ is module for module in copied.modules())
    expected = model(tokens()).logits
    calls.clear()
    assert torch.equal(copied(tokens()).logits, expected)
    assert len(calls) == 2
    handle.undo()
    with pytest.raises(ValueError, match="the model that it was copied from"):
        patch(copied)


def test_a_pickled_model_is_not_patched_and_can_be_patched(calls):
    model = make()
    if hasattr(model.model.layers[0].self_attn, "_kernel_funcs"):
        pytest.skip("if kernels is installed, no model can be pickled")
    handle, file = patch(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = model(tokens()).logits
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        calls.clear()
        assert torch.equal(loaded(tokens()).logits, expected)
        assert not calls
        with patch(loaded):
            calls.clear()
            assert torch.equal(loaded(tokens()).logits, expected)
            assert len(calls) == 2
    handle.undo()


def test_a_patched_model_can_be_saved_and_loaded(tmp_path):
    model = make()
    patch(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_replicas_of_data_parallel_compute_with_their_own_weights(calls):
    model = make()
    handle = patch(model)
    attention = model.model.layers[0].self_attn
    replica = attention._replicate_for_data_parallel()
    replica = replica._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica and attention.forward.__self__ is attention
    assert replica.forward.__func__ is attention.forward.__func__
    handle.undo()
    assert not any("_replicate_for_data_parallel" in vars(module) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_patch_works_with_any_default_dtype(dtype, calls):
    model = make()
    torch.set_default_dtype(dtype)
    try:
        patch(model)
    finally:
        torch.set_default_dtype(torch.float32)
    calls.clear()
    model(tokens())
    assert len(calls) == 2


@pytest.mark.parametrize("undo_first", [True, False], ids=["undo first", "remove hooks first"])
@pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "hooks first"])
def test_hooks_of_accelerate_may_be_added_before_or_after(patch_first, undo_first, calls):
    hooks = needed("accelerate.hooks")
    model = make()
    expected = model(tokens()).logits

    class Hook(hooks.ModelHook):
        def post_forward(self, module, output):
            calls.append("hook")
            return output

    if patch_first:
        handle = patch(model)
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer.self_attn, Hook())
    if not patch_first:
        handle = patch(model)
    calls.clear()
    assert torch.equal(model(tokens()).logits, expected)
    assert calls == [torch.ops.rope.rotate_qk.default, "hook"] * 2
    if undo_first:
        handle.undo()
        calls.clear()
        model(tokens())
        assert calls == ["hook"] * 2
    hooks.remove_hook_from_submodules(model)
    handle.undo()
    calls.clear()
    assert torch.equal(model(tokens()).logits, expected)
    assert calls == []


# ---- What a rotary function may do ----


def last_channels(q, k, cos, sin, unsqueeze_dim=1):
    """DeepSeek V4 does this."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    n = cos.shape[-1]

    def rotate(x):
        rest, x = x[..., : x.shape[-1] - n], x[..., x.shape[-1] - n :]
        return torch.cat([rest, x * cos + rotate_half(x) * sin], -1)

    return rotate(q), rotate(k)


def longer_k(q, k, cos, sin, unsqueeze_dim=1):
    """Muse Glimmer's assistant does this."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    n = q.shape[-2]
    return q * cos[..., -n:, :] + rotate_half(q) * sin[..., -n:, :], k * cos + rotate_half(k) * sin


def prefix(q, k, cos, sin, **kwargs):
    """DINOv3 does this: the first tokens have no positions."""
    n = q.shape[-2] - sin.shape[-2]
    out = [torch.cat([x[..., :n, :], x[..., n:, :] * cos + rotate_half(x[..., n:, :]) * sin], -2) for x in (q, k)]
    return tuple(out)


def converts_each(q, k, cos, sin, unsqueeze_dim=1):
    """ESM does this."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple((x.float() * cos + rotate_half(x).float() * sin).to(x.dtype) for x in (q, k))


def converts_each_after(q, k, cos, sin, unsqueeze_dim=1):
    """Flux does this. The gradients have the strides of those of the results."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    both = [(x, rotate_half(x)) for x in (q, k)]
    return tuple((x.float() * cos + turned.float() * sin).to(x.dtype) for x, turned in both)


def converts_once(q, k, cos, sin, unsqueeze_dim=1):
    """Cohere does this."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    wide = [x.float() for x in (q, k)]
    return tuple((w * cos + rotate_half(w) * sin).to(q.dtype) for w in wide)


def rounds_tables(q, k, cos, sin, unsqueeze_dim=1):
    """Rounds cos and sin to the dtype of q."""
    cos, sin = (t.to(q.dtype).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return tuple(x * cos + rotate_half(x) * sin for x in (q, k))


def by_products(q, k, cos, sin, unsqueeze_dim=1):
    """Multiplies and adds in one operation, so that nothing else has its bits."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    wide = [torch.addcmul(x.double() * cos.double(), rotate_half(x).double(), sin.double()) for x in (q, k)]
    return tuple(w.to(x.dtype) for w, x in zip(wide, (q, k), strict=True))


FORMS = {  # the numbers of tokens of q, of k and of the tables
    last_channels: (6, 6, 6), longer_k: (3, 6, 6), prefix: (7, 7, 4),
    converts_each_after: (6, 6, 6),
    **dict.fromkeys((converts_each, converts_once, rounds_tables, apply_rotary_pos_emb), (6, 6, 6)),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("tables", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FORMS, ids=lambda f: f.__name__)
def test_every_form_has_the_bits_and_the_gradients_of_the_function(function, dtype, tables):
    new = rotary.RotaryFunction(function).replacement("new")
    q_seq, k_seq, seq = FORMS[function]
    head_dim = 24 if function is last_channels else 16
    q, k = (torch.randn(2, n, s, head_dim, generator=generator()).to(dtype) for n, s in ((3, q_seq), (2, k_seq)))
    angle = torch.randn(2, seq, 8, generator=generator(2)).repeat(1, 1, 2)
    angle = angle[0] if function is prefix else angle
    results = []
    for f in (function, new):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        out = f(*leaves, angle.cos().to(tables), angle.sin().to(tables))
        given = [torch.randn(o.transpose(1, 2).shape, generator=generator(3)).transpose(1, 2).to(o.dtype) for o in out]
        results.append([*out, *torch.autograd.grad(out, leaves, given)])
    for e, a in zip(*results, strict=True):
        assert a.dtype == e.dtype
        if function in (longer_k, prefix) and e.dtype != torch.float32 and a is not e:
            torch.testing.assert_close(a, e)  # these gradients may be rounded once more
        else:
            assert torch.equal(a, e) and a.stride() == e.stride()


def k_may_be_none(q, k, cos, sin, unsqueeze_dim=1):
    """Returns None for k that is None."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(None if x is None else x * cos + rotate_half(x) * sin for x in (q, k))


def test_k_that_is_none_is_returned():
    new = rotary.RotaryFunction(k_may_be_none).replacement("new")
    q, angle = torch.randn(2, 3, 5, 16), torch.randn(2, 5, 8).repeat(1, 1, 2)
    actual, expected = (f(q, None, angle.cos(), angle.sin()) for f in (new, k_may_be_none))
    assert torch.equal(actual[0], expected[0]) and actual[1] is expected[1] is None


def test_the_handle_says_how_it_rounds(monkeypatch):
    for function, rounding, remark in (
        (apply_rotary_pos_emb, "eager", ""),
        (apply_rotary_pos_emb, "once", ", rounded once"),
        (by_products, "eager", ", rounded once, because its bits cannot be had"),
    ):
        assert (
            str(rotary.RotaryFunction(function, rounding).call("f"))
            == f"f is torch.ops.rope.rotate_qk, half-split{remark}"
        )


def test_the_tables_of_all_layers_are_read_once_and_forgotten_with_them(monkeypatch):
    function = rotary.RotaryFunction(apply_rotary_pos_emb)
    q, k, angle = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), torch.randn(2, 5, 8).repeat(1, 1, 2)
    tables, seen = (angle.cos(), angle.sin()), []
    function.rotator.first_tables = lambda caller, tables: seen.append(caller)
    for layer in range(3):
        function.rotator.rotate((q, k), tables, 1, layer)
    assert seen == [0]
    for t in tables:
        t.mul_(2)  # the tables may be changed in place
    for actual, expected in zip(
        function.rotator.rotate((q, k), tables, 1, 3), apply_rotary_pos_emb(q, k, *tables), strict=True
    ):
        assert torch.equal(actual, expected)
    function.rotator.rotate((q.bfloat16(), k.bfloat16()), tables, 1, 4)
    others = [t.clone() for t in tables]
    function.rotator.rotate((q, k), (tables[0], others[1]), 1, 5)  # another sin
    function.rotator.rotate((q, k), others, 1, 6)  # another cos
    function.rotator.rotate((q, k), tables, 1, 7)
    assert seen == [0, 4, 5, 6, 7]
    storage = weakref.ref(tables[0])
    del tables
    assert storage() is None and function.rotator._last is None


# ---- What patch refuses ----


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def pairwise(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def apply_rotary_vjepa2(q, k, cos, sin, unsqueeze_dim=1):
    """Rotates pairs (2i, 2i + 1) by a table that is made for pairs (i, i + rotary_dim / 2)."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].repeat(1, 1, 1, 2), sin[..., :half].repeat(1, 1, 1, 2)
    return q * cos + pairwise(q) * sin, k * cos + pairwise(k) * sin


def apply_rotary_scaled(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return 2 * (q * cos + rotate_half(q) * sin), k * cos + rotate_half(k) * sin


def apply_rotary_at_positions(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    cos, sin = cos[position_ids].unsqueeze(unsqueeze_dim), sin[position_ids].unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_of_a_name_only(x):
    return x


def apply_rotary_by_size(q, k, cos, sin, unsqueeze_dim=1):
    """Does something else for more than 64 tokens."""
    if q.shape[-2] > 64:
        cos = cos / 2
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_of_shorter_tables(q, k, cos, sin, unsqueeze_dim=1):
    """Cuts q and k to the length of the tables, and gives the other tokens nothing."""
    cos, sin, n = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), cos.shape[-2]
    cut = [torch.zeros_like(x) for x in (q, k)]
    for y, x in zip(cut, (q, k), strict=True):
        y[..., :n, :] = x[..., :n, :] * cos + rotate_half(x[..., :n, :]) * sin
    return cut


def apply_rotary_of_longer_tables(q, k, cos, sin, unsqueeze_dim=1):
    """Takes the first rows of tables that are longer than q and k."""
    cos, sin = (t.unsqueeze(unsqueeze_dim)[..., : q.shape[-2], :] for t in (cos, sin))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


UNKNOWN = [f for name, f in list(globals().items()) if name.startswith("apply_rotary_") and f.__module__ == __name__]


rotary_of_the_test = None


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return rotary_of_the_test(q, k, cos, sin)


def of_length(x, sin):
    return -sin if len(x) > 99 else sin


def many(x):
    return x.shape[-2] > 500


def branching(condition):
    """Returns a rotary function that does something else if the condition of q and cos holds."""
    text = f"""
def apply_rotary_that_branches(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    sin = {condition}
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
"""
    return text


@pytest.mark.parametrize(
    "statement, refused",
    [
        ("-sin if q.shape[-2] > 128 else sin", 'and "q.shape[-2] > 128" in line 4 of'),
        ("-sin if many(q) else sin", 'and "many(q)" in line 4 of'),
        (
            "-sin if rotate_half(q).max() > 1e4 and True else sin",
            'and "rotate_half(q).max() > 10000.0 and True" in line',
        ),
        ("[s for s in [-sin, sin] if q.shape[0] > 99 or s is sin][-1]", 'and "q.shape[0] > 99" in line 4'),
        ("of_length(q, sin)", 'and "len(x) > 99" in line'),
        ("sin if sin is not None else -sin", ""),
        ("sin if q.shape[-2] > 64 else sin", ""),
        ("sin\n    if q.dim() > 9:\n        raise ValueError", ""),
        ("sin if q.dtype == torch.float32 else sin * 1", 'and "q.dtype == torch.float32" in line 4'),
    ],
)
def test_a_branch_that_was_not_taken_is_refused(statement, refused, tmp_path):
    """Functions are tried with 1, 5 and 70 tokens. A condition that was the same each time may hide another way."""
    file = tmp_path / "modeling_branching.py"
    file.write_text(branching(statement))
    names = {"rotate_half": rotate_half, "many": many, "of_length": of_length, "torch": torch, "__name__": __name__}
    exec(compile(file.read_text(), file, "exec"), names)
    function = names["apply_rotary_that_branches"]
    with pytest.raises(NotImplementedError, match=re.escape(refused)) if refused else contextlib.nullcontext():
        rotary.RotaryFunction(function)


def test_a_function_whose_file_has_changed_is_refused(tmp_path):
    file = tmp_path / "modeling_changing.py"
    file.write_text(branching("sin"))
    names = {"rotate_half": rotate_half, "__name__": __name__}
    exec(compile(file.read_text(), file, "exec"), names)
    file.write_text(branching("cos"))
    with pytest.raises(NotImplementedError, match="has a source that differs from the code that runs"):
        rotary.RotaryFunction(names["apply_rotary_that_branches"])


@pytest.mark.parametrize("function", [*UNKNOWN, rotate_half], ids=lambda f: f.__name__)
def test_an_unknown_function_is_refused(function, monkeypatch):
    """The model also contains a Llama, which must not be patched either."""
    monkeypatch.setitem(globals(), "rotary_of_the_test", function)
    model = nn.ModuleDict({"llama": make(), "attention": Attention()})
    with pytest.raises(NotImplementedError, match=r"Attention.forward of attention calls rotary_of_the_test: "):
        patch(model)
    assert not any("forward" in vars(module) for module in model.modules())


def rotate_three(q, k, v, cos, sin, position_ids, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    cos, sin = cos[position_ids][..., :half], sin[position_ids][..., :half]
    return tuple(torch_rope.rotate(x.transpose(1, 2), cos, sin, eager_rounding=True).transpose(1, 2) for x in (q, k, v))


apply_rotary_three = transformers.models.clvp.modeling_clvp.apply_rotary_pos_emb


class Three(nn.Module):
    def forward(self, *args):
        return apply_rotary_three(*args)


@pytest.fixture
def registered():
    """A function that registers, and forgets it after the test."""
    functions = []
    yield lambda function, replacement: functions.append(function) or register(function, replacement)
    for function in functions:
        register(function, None)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_refused_function_can_be_registered(registered, fuse):
    args = [torch.randn(2, h, 5, 16) for h in (3, 2, 4)]
    angle, positions = torch.randn(9, 8).repeat(1, 2), torch.randint(9, (2, 5))
    model, args = nn.ModuleDict({"attention": Three()}), (*args, angle.cos(), angle.sin(), positions)
    expected = model.attention(*args)
    with pytest.raises(NotImplementedError, match="calls apply_rotary_three: the function has the arguments"):
        patch(model, fuse=fuse)
    registered(apply_rotary_three, rotate_three)
    handle = patch(model, fuse=fuse)
    assert "apply_rotary_pos_emb is rotate_three, which was registered" in str(handle)
    assert all(map(torch.equal, model.attention(*args), expected))
    handle.undo()
    register(apply_rotary_three, None)
    with pytest.raises(NotImplementedError):
        patch(model)


def test_a_function_that_torch_rope_supports_can_be_registered_too(registered):
    def attention(*args):
        return apply_rotary_pos_emb(*args)

    registered(apply_rotary_pos_emb, lambda q, k, cos, sin, unsqueeze_dim=1: (k, q))
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    new = methods.Rebuilder().rebuild(attention)
    assert all(map(torch.equal, new(q, k, torch.ones(2, 5, 16), torch.zeros(2, 5, 16)), (k, q)))


def rotate_in_a_method(self, hidden_states, relative_position_embeddings):
    x = hidden_states.unflatten(-1, (self.num_heads, self.head_size))  # [batch, seq, heads, head_dim]
    cos, sin = relative_position_embeddings[:, : x.shape[1], 0, 0, : self.head_size // 2]
    return torch.ops.rope.rotate(x, cos, sin, eager_rounding=True).flatten(-2)


def test_a_refused_method_can_be_registered(registered):
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=9,
        position_embeddings_type="rotary", conv_dim=(8,), conv_stride=(4,), conv_kernel=(8,), num_feat_extract_layers=1,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model, sound = transformers.Wav2Vec2ConformerModel(config).eval(), torch.randn(2, 200, generator=generator())
    expected = model(sound).last_hidden_state
    with pytest.raises(NotImplementedError, match="_apply_rotary_embedding .* must call a rotary function"):
        patch(model)
    attention = type(model.encoder.layers[0].self_attn)
    registered(attention._apply_rotary_embedding, rotate_in_a_method)
    with patch(model, fuse=True) as handle:
        assert "_apply_rotary_embedding is rotate_in_a_method, which was registered" in str(handle)
        assert torch.equal(model(sound).last_hidden_state, expected)
    assert torch.equal(model(sound).last_hidden_state, expected)


def test_what_cannot_be_registered_is_refused():
    for function, replacement in ((None, rotate_three), (torch.add, rotate_three), (rotate_three, "rotate_three")):
        with pytest.raises(TypeError, match="must be a function, such as modeling_clvp.apply_rotary_pos_emb"):
            register(function, replacement)
    with pytest.raises(
        TypeError, match=r"replacement has the arguments \['x'\] but must have those of the function, \['q'"
    ):
        register(rotate_three, rotate_half)


def test_a_method_that_calls_super_is_refused():
    model = make()

    class Mine(type(model.model.layers[1].self_attn)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.model.layers[1].self_attn.__class__ = Mine
    with pytest.raises(NotImplementedError, match=r"Mine.forward of model.layers.1.self_attn calls super\(\)"):
        patch(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_refused_model_is_unchanged_and_the_error_says_why():
    vjepa2 = transformers.VJEPA2Config(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=1.0, crop_size=16, patch_size=8,
        frames_per_clip=2, pred_hidden_size=48, pred_num_hidden_layers=1, pred_num_attention_heads=2,
    )  # fmt: skip
    hunyuan_vl = transformers.models.hunyuan_vl.HunYuanVLTextConfig(
        **SMALL, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}
    )
    for config, message in [
        (
            vjepa2,
            r"VJEPA2RopeAttention.apply_rotary_embeddings of .* calls rotate_queries_or_keys: the function has the arg",
        ),
        (hunyuan_vl, r"rotary_emb has different angles for the two channels of a pair"),
    ]:
        model = transformers.AutoModel.from_config(config)
        with pytest.raises(NotImplementedError, match=message):
            patch(model)
        assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="no module of it calls a rotary function"):
        patch(make("gpt2", n_embd=64, n_layer=1, n_head=4))
    model = make()
    model.model.layers[0].self_attn.forward = lambda *args, **kwargs: None
    with pytest.raises(
        NotImplementedError, match=r"LlamaAttention.forward of model.layers.0.self_attn was replaced by"
    ):
        patch(model)


# ---- Ways to run a model ----


@pytest.mark.parametrize("model_type, attention", [("llama", "sdpa"), ("llama", "eager"), ("gemma3_text", "sdpa")])
def test_left_padding_gives_the_logits_of_the_sequence_alone(model_type, attention):
    stock, model = pair(model_type=model_type, attention=attention)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = dict(input_ids=tokens() * mask, attention_mask=mask, position_ids=positions)
    expected = stock(**inputs).logits[mask == 1]  # the logits at the padding have no meaning
    assert torch.equal(model(**inputs).logits[mask == 1], expected)
    alone = stock(tokens()[1:, 5:]).logits
    assert difference(model(**inputs).logits[1:, 5:], alone) < LOGITS


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_sequences_give_the_logits_of_each_sequence_alone(attention):
    """Two sequences are packed into one. position_ids begins again at 0 for the second one."""
    stock, model = pair(attention=attention)
    ids, positions = tokens(1, 12), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([stock(ids[:, :5]).logits, stock(ids[:, 5:]).logits], 1)
    assert torch.equal(packed, stock(ids, position_ids=positions, use_cache=False).logits)
    assert difference(packed, alone) < LOGITS


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "cohere2"])
def test_generate_gives_the_same_logits(model_type, cache, calls):
    """Decoding is greedy, with left padding. There are more tokens than fit the attention window."""
    window = {} if model_type == "llama" else {"sliding_window": 4}
    stock, model = pair(model_type=model_type, attention="eager" if model_type == "gemma2" else "sdpa", **window)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    options = dict(
        attention_mask=mask, max_new_tokens=12, do_sample=False, cache_implementation=cache, disable_compile=True,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    expected = stock.generate(tokens(2, 6), **options)
    calls.clear()
    actual = model.generate(tokens(2, 6), **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert torch.equal(torch.stack(actual.logits), torch.stack(expected.logits))
    layers_that_rotate = 2 if model_type != "cohere2" else len([t for t in stock.config.layer_types if "sliding" in t])
    assert len(calls) == 12 * layers_that_rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [{"do_sample": True, "temperature": 2.0}, {"num_beams": 3}, "speculative"], ids=str)
def test_every_way_to_generate_gives_the_same_tokens(way, dtype):
    stock, model = (m.to(dtype) for m in pair(model_type="qwen3"))
    results = []
    for m in (stock, model):
        options = {"assistant_model": copy.deepcopy(m)} if way == "speculative" else way
        if way == "speculative":  # an assistant that is often wrong
            options["assistant_model"].lm_head.weight.data += 0.1 * torch.randn(96, 64, generator=generator()).to(dtype)
        torch.manual_seed(5)
        results.append(m.generate(tokens(1, 6), max_new_tokens=20, **options))
    assert torch.equal(*results) and results[0].unique().numel() > 5


def test_longrope_still_chooses_its_frequencies_by_the_length():
    """The rotary module uses short_factor up to 8 tokens, and long_factor for more."""
    factors = dict(short_factor=[1.0] * 8, long_factor=[2.0 + i for i in range(8)])
    rope = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=8, **factors)
    stock, model = pair(model_type="phi3", rope_parameters=rope)
    for seq in (6, 12, 6):
        assert torch.equal(model(tokens(2, seq)).logits, stock(tokens(2, seq)).logits)


def train(model, **options):
    """Does a training step and returns (loss, all gradients)."""
    model.train()
    with torch.autocast("cpu", torch.bfloat16, **options):
        loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, calls):
    stock, model = pair()
    loss, expected = train(stock, enabled=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls.clear()
    checkpointed, gradients = train(model, enabled=False)
    assert len(calls) == 6  # three for each layer: the forward is computed twice, the backward once
    assert torch.equal(checkpointed, loss) and torch.equal(gradients, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_autocast_differs_by_the_rounding_of_bfloat16_if_it_rounds_once(attention):
    """A model that rounds once keeps q and k in bfloat16. An unpatched model has them in float32 until attention rounds
    them.

    The numbers that are rounded to bfloat16 differ by float32 rounding. So about one in several hundred results differs
    by an ulp of bfloat16, 2^-8.
    """
    stock, model = pair(attention=attention, rounding="once")
    exact, _ = train(copy.deepcopy(stock), enabled=False)
    (loss, expected), (ours, gradients) = train(stock), train(model)
    assert difference(ours, loss) < 2**-8 and difference(gradients, expected) < 2**-5
    assert abs(ours - exact) < 2 * abs(loss - exact) + 2**-8 * exact


@pytest.mark.parametrize("rounding", ["eager", "once"])
def test_the_cache_under_autocast(rounding):
    """For q in bfloat16 and tables in float32, functions of transformers return float32."""
    stock, model = pair(rounding=rounding)
    caches = []
    for m in (stock, model):
        cache = transformers.DynamicCache(config=model.config)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            m(tokens(), past_key_values=cache)
            m(tokens(2, 1), past_key_values=cache)
        caches.append(cache.layers[0])
    expected, actual = caches
    assert actual.keys.shape == expected.keys.shape == (2, 2, 13, 16) and expected.keys.dtype == torch.float32
    assert actual.keys.dtype == (torch.float32 if rounding == "eager" else torch.bfloat16)
    assert difference(actual.keys, expected.keys) <= (0 if rounding == "eager" else 2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_patched_model_is_about_as_near_to_a_float64_model_as_an_unpatched_one(dtype):
    """transformers rounds five times and torch_rope once."""
    exact = make().double()
    expected = exact(tokens()).logits
    stock, model = (m.to(dtype) for m in pair(rounding="once"))
    stock, ours = stock(tokens()).logits, model(tokens()).logits
    assert ours.dtype == dtype
    # The tables of a float64 model are float32: the rotary module computes in float32.
    assert difference(ours.double(), expected) < max(1.5 * difference(stock.double(), expected), 1e-12)


def counting(graphs):
    """Returns a backend of torch.compile that appends to graphs how often each graph calls torch_rope."""

    def backend(module, inputs, **options):
        graphs.append(sum("rope." in str(node.target) for node in module.graph.nodes))
        return aot_eager(module, inputs)

    return backend


@pytest.mark.parametrize("model_type", ["llama", "gptj"] + ["cohere"] * EXHAUSTIVE)
def test_a_patched_model_compiles_to_one_graph(model_type):
    """This holds for training too. torch.compile compiles again after undo()."""
    options = dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8) if model_type == "gptj" else {}
    model = make(model_type, attention="eager", **options)
    expected, gradients = model(tokens()).logits, train(copy.deepcopy(model), enabled=False)[1]
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counting(graphs))
    with patch(model):
        assert difference(compiled(tokens()).logits, expected) < LOGITS
        assert difference(train(compiled, enabled=False)[1], gradients) < GRADIENTS
    model.eval()
    assert difference(compiled(tokens()).logits, expected) < LOGITS
    calls = 4 if model_type == "gptj" else 2
    assert graphs == [calls, calls, 0]


def test_compiled_decoding_with_a_static_cache():
    stock, model = pair()
    options = dict(max_new_tokens=8, do_sample=False, cache_implementation="static")
    expected = stock.generate(tokens(1, 6), disable_compile=True, **options)
    torch._dynamo.reset()
    graphs = []
    compiled = transformers.CompileConfig(backend=counting(graphs), fullgraph=True)
    compiled._compile_all_devices = True  # without this, generate() does not compile on the CPU
    assert torch.equal(model.generate(tokens(1, 6), compile_config=compiled, **options), expected)
    assert graphs == [2]  # one call for each layer


def test_k_may_be_none_if_the_original_function_accepts_none():
    """Qwen4's indexer rotates only q."""

    def apply_rotary(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        q = q * cos + rotate_half(q) * sin
        return q if k is None else (q, k * cos + rotate_half(k) * sin)

    new = rotary.RotaryFunction(apply_rotary).replacement("apply_rotary")
    q, k, angle = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), torch.randn(2, 5, 8).repeat(1, 1, 2)
    assert torch.equal(new(q, None, angle.cos(), angle.sin()), apply_rotary(q, None, angle.cos(), angle.sin()))
    for actual, expected in zip(
        new(q, k, angle.cos(), angle.sin()), apply_rotary(q, k, angle.cos(), angle.sin()), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_tables_may_have_another_dtype_than_q():
    """This happens if the rotary module computes in bfloat16 and a norm of q computes in float32."""
    new = rotary.RotaryFunction(apply_rotary_pos_emb).replacement("apply_rotary_pos_emb")
    q, k, angle = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), torch.randn(2, 5, 8).repeat(1, 1, 2)
    tables = angle.cos().bfloat16(), angle.sin().bfloat16()
    torch.testing.assert_close(new(q, k, *tables), apply_rotary_pos_emb(q, k, *tables))


def test_a_rebuilt_function_keeps_its_decorator():
    def doubling(function):
        return functools.wraps(function)(lambda *args: [2 * x for x in function(*args)])

    @doubling
    def attention(*args):
        return apply_rotary_pos_emb(*args)

    new = methods.Rebuilder().rebuild(attention)
    args = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), torch.ones(2, 5, 16), torch.zeros(2, 5, 16)
    assert new is not attention and torch.equal(new(*args)[0], 2 * args[0])


# ---- kernelize ----

KERNELIZE = Path(__file__).with_name("kernelize.py")


def test_kernel_mapping_raises_if_transformers_does_not_use_kernels(monkeypatch):
    needed("kernels")
    monkeypatch.setattr(transformers.utils.import_utils, "is_kernels_available", lambda: False)
    with pytest.raises(ImportError, match="kernelize would change nothing; install a release of kernels"):
        integration.kernel_mapping()


def test_kernelize_gives_the_results_of_the_unpatched_model():
    """Runs in a new process, because transformers makes modules of its functions when it is imported."""
    needed("kernels")
    result = python(KERNELIZE.read_text())
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    # llama: half-split, each angle twice in the table. gpt_oss: half-split, each angle once. openai_privacy_filter:
    # interleaved.
    families, modes = ["llama", "gpt_oss", "openai_privacy_filter"], ["INFERENCE", "TRAINING"]
    modes_of = {"llama": modes + [f"{mode}|TORCH_COMPILE" for mode in modes]}
    assert [(f["family"], f["mode"]) for f in found] == [(f, mode) for f in families for mode in modes_of.get(f, modes)]
    for f in found:
        assert f["calls"] == {"rope::rotate_qk": 2}, f  # one for each layer
        assert f["logits"] < LOGITS and f["gradients"] < GRADIENTS, f
        assert f["undone"] == 0, f
