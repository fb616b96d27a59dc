"""Tests of patch for transformers on a tiny Llama: what it changes, leaves alone and refuses, and ways to run a patched
model.

tests/exhaustive/models/test_families.py tests that the results are right for every family.
"""

import copy
import functools

import pytest
import torch
from cases import needed
from test_conventions import unpatched
from torch import nn

transformers = needed("transformers")

from torch_rope.integrations import _rotation  # noqa: E402
from torch_rope.integrations.transformers import patch, rotator  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("examine_once")]

# The differences are parts of the largest logit, and of the largest gradient. LOGITS and GRADIENTS are the largest
# allowed. Both models round q and k to float32, but in another order; with scores of up to 60 that changes a
# probability by 60 * 2^-24 = 4e-6.
LOGITS, GRADIENTS = 4e-6, 1.5e-5
# initializer_range is ten times the usual value, so that attention depends on the positions.
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


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def train(model, **options):
    """Does a training step and returns (loss, all gradients)."""
    model.train()
    with torch.autocast("cpu", torch.bfloat16, **options):
        loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


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


def pair(options=None, **changes):
    """Returns (an unpatched model, a patched model) with the same weights. options: the arguments of patch."""
    stock = make(**changes)
    model = copy.deepcopy(stock)
    patch(model, **options or {})
    return stock, model


# ---- What patch changes ----

counter, step = 0, 1


class Counts(nn.Module):
    def forward(self, q, k, cos, sin):
        global counter
        counter += step
        return apply_rotary_pos_emb(q, k, cos, sin)


def test_a_method_keeps_its_globals_and_its_lines(monkeypatch):
    """A later assignment to a global is seen."""
    module, before = Counts(), counter
    args = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16), torch.ones(2, 5, 16), torch.zeros(2, 5, 16)
    patch(module)
    monkeypatch.setitem(globals(), "step", 3)
    assert torch.equal(module(*args)[0], args[0]) and counter == before + 3
    with pytest.raises(ValueError, match="cos has 4 rows") as error:
        module(*args[:2], torch.ones(2, 4, 16), torch.zeros(2, 4, 16))
    lines = [str(entry.path) + str(entry.lineno) for entry in error.traceback]
    assert any(line.startswith(__file__) for line in lines[1:])


class Rotary(nn.Module):
    """Makes tables for half-split pairs. If they are wrong, the two channels of a pair have different angles."""

    def __init__(self, wrong=False):
        super().__init__()
        self.divisors = torch.arange(1, 9).repeat(2) + torch.arange(16) * wrong

    def forward(self, x, position_ids):
        angle = position_ids[:1, :, None] / self.divisors
        return angle.cos(), angle.sin()


@pytest.mark.parametrize("fuse", [False, True])
def test_the_first_tables_of_each_layer_are_looked_at(fuse):
    q, k, positions = torch.randn(1, 3, 6, 16), torch.randn(1, 2, 6, 16), torch.arange(6.0)[None]
    wrong, right = (Rotary(wrong)(q, positions) for wrong in (True, False))
    layers = nn.ModuleList([Counts(), Counts()])
    expected = layers[1](q, k, *wrong)
    handle = patch(layers, fuse=fuse)
    layers[0](q, k, *right)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"apply_rotary_pos_emb of 1 \(Counts\) was called with"):
            layers[1](q, k, *wrong)
    layers[1](q, k, *right)
    handle.undo()
    assert all(map(torch.equal, layers[1](q, k, *wrong), expected))
    rotary = nn.ModuleDict({"rotary_emb": Rotary(True), "layer": layers[0]})
    with pytest.raises(NotImplementedError, match="rotary_emb has different angles for the two channels of a pair"):
        patch(rotary, fuse=fuse)
    assert unpatched(rotary)


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


def add_hook(module, calls):
    """Does what add_hook_to_module of accelerate does."""

    def forward(module, *args, **kwargs):
        out = module._old_forward(*args, **kwargs)
        calls.append("hook")
        return out

    module._old_forward, module.forward = module.forward, functools.partial(forward, module)


def remove_hook(module):
    module.forward = module._old_forward
    del module._old_forward


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "hooks first"])
def test_hooks_of_accelerate_may_be_added_before_or_after(patch_first, calls):
    """undo() works while they are there, and after they were removed."""
    model = make()
    expected, layers = model(tokens()).logits, [layer.self_attn for layer in model.model.layers]
    for undo_first in (True, False):
        handle = patch(model) if patch_first else None
        for layer in layers:
            add_hook(layer, calls)
        handle = handle or patch(model)
        calls.clear()
        assert torch.equal(model(tokens()).logits, expected)
        assert calls == [torch.ops.rope.rotate_qk.default, "hook"] * 2
        if undo_first:
            handle.undo()
            calls.clear()
            model(tokens())
            assert calls == ["hook"] * 2
        for layer in layers:
            remove_hook(layer)
        handle.undo()
        calls.clear()
        assert torch.equal(model(tokens()).logits, expected) and calls == []


# ---- What patch refuses ----


def test_a_method_that_was_replaced_or_calls_super_is_refused():
    model = make()

    class Mine(type(model.model.layers[1].self_attn)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.model.layers[1].self_attn.__class__ = Mine
    with pytest.raises(NotImplementedError, match=r"Mine.forward of model.layers.1.self_attn calls super\(\)"):
        patch(model)
    assert unpatched(model)
    model = make()
    model.model.layers[0].self_attn.forward = lambda *args, **kwargs: None
    with pytest.raises(NotImplementedError, match="LlamaAttention.forward of model.layers.0.self_attn was replaced by"):
        patch(model)


# ---- Ways to run a model ----

LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=8, short_factor=[1.0] * 8,
    long_factor=[2.0 + i for i in range(8)],
)  # fmt: skip


WINDOW = {"model_type": "gemma3_text", "sliding_window": 6, "sliding_window_pattern": 2}


@pytest.mark.parametrize(
    "options, changes, way",
    [
        ({}, {"rope_parameters": LONGROPE}, {"cache_implementation": "dynamic"}),
        ({}, WINDOW, {"cache_implementation": "static"}),
        ({"fuse": True}, WINDOW, {"cache_implementation": "static", "num_beams": 3}),
        ({"fuse": True}, WINDOW, {"cache_implementation": "dynamic", "num_beams": 3}),
    ],
)
def test_generate_gives_the_same_logits(options, changes, way, calls):
    """There is left padding. The tokens are more than fit the window, and than the short frequencies of longrope."""
    stock, model = pair(options, **changes)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    way |= dict(attention_mask=mask, max_new_tokens=12, do_sample=False, disable_compile=True)
    way |= dict(output_logits=True, return_dict_in_generate=True)
    expected = stock.generate(tokens(2, 6), **way)
    calls.clear()
    actual = model.generate(tokens(2, 6), **way)
    assert torch.equal(actual.sequences, expected.sequences)
    assert difference(torch.stack(actual.logits), torch.stack(expected.logits)) <= (LOGITS if options else 0)
    assert options or len(calls) == 2 * len(actual.logits)  # one for each layer


@pytest.mark.parametrize("rounding", ["eager", "once"])
def test_the_cache_under_autocast(rounding):
    """For q in bfloat16 and tables in float32, functions of transformers return float32."""
    stock, model = pair({"rounding": rounding})
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
