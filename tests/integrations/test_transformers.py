"""Tests of patch for transformers on a tiny Llama: what it changes, leaves alone and refuses, and ways to run a patched
model.

tests/exhaustive/models/test_families.py tests that the results are right for every family.
"""

import copy

import pytest
import torch
from cases import needed
from layers import unpatched

transformers = needed("transformers")

from models import LOGITS, add_hook, difference, make, remove_hook, tokens, train  # noqa: E402
from models import calls as calls  # noqa: E402

from torch_rope.integrations.transformers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu]


def pair(options=None, **changes):
    """Returns (an unpatched model, a patched model) with the same weights. options: the arguments of patch."""
    stock = make(**changes)
    model = copy.deepcopy(stock)
    patch(model, **options or {})
    return stock, model


# ---- What patch changes ----

# The unusual ones are interleaved in a part of the channels, convert x, rotate by the inverse, and have norms and windows.
KINDS = ["llama", "qwen3", "glm", "cohere", "nanochat", "gemma3_text"]


@pytest.mark.parametrize("model_type", KINDS)
def test_a_patched_model_has_the_bits_of_the_unpatched_one(model_type, calls):
    """The logits, the loss and all gradients."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for enabled in (False, True) if dtype == torch.float32 else (False,):
            stock, model = (m.to(dtype) for m in pair(model_type=model_type))
            expected = stock(tokens()).logits
            calls.clear()
            assert torch.equal(model(tokens()).logits, expected) and calls == [torch.ops.rope.rotate_qk.default] * 2
            assert all(map(torch.equal, train(model, enabled=enabled), train(stock, enabled=enabled)))


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "hooks first"])
def test_hooks_of_accelerate_may_be_added_before_or_after(patch_first, calls):
    """undo() works while they are there, and after they were removed."""
    model = make()
    expected, layers = model(tokens()).logits, [layer.self_attn for layer in model.model.layers]
    for undo_first in (True, False):
        patched = patch(model) if patch_first else None
        for layer in layers:
            add_hook(layer, calls)
        patched = patched or patch(model)
        calls.clear()
        assert torch.equal(model(tokens()).logits, expected)
        assert calls == [torch.ops.rope.rotate_qk.default, "hook"] * 2
        if undo_first:
            patched.undo()
            calls.clear()
            model(tokens())
            assert calls == ["hook"] * 2
        for layer in layers:
            remove_hook(layer)
        patched.undo()
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

WINDOW = {"model_type": "gemma3_text", "sliding_window": 6, "sliding_window_pattern": 2}


@pytest.mark.parametrize(
    "options, changes, way",
    [
        ({}, {}, {"cache_implementation": "dynamic"}),
        ({}, WINDOW, {"cache_implementation": "static"}),
        ({"fuse": True}, WINDOW, {"cache_implementation": "static", "num_beams": 3}),
        ({"fuse": True}, WINDOW, {"cache_implementation": "dynamic", "num_beams": 3}),
    ],
)
def test_generate_gives_the_same_logits(options, changes, way, calls):
    """There is left padding. The tokens are more than fit the window."""
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
    keys = []
    for m in pair({"rounding": rounding}):
        cache = transformers.DynamicCache(config=m.config)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            m(tokens(), cache=cache)
            m(tokens(2, 1), cache=cache)
        keys.append(cache.layers[0].keys)
    expected, actual = keys
    assert actual.shape == expected.shape == (2, 2, 13, 16) and expected.dtype == torch.float32
    assert actual.dtype == (torch.float32 if rounding == "eager" else torch.bfloat16)
    assert difference(actual, expected) <= (0 if rounding == "eager" else 2**-8)
