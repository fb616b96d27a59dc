"""Tests of patch(fuse=True): what is fused, what is not and why, and ways to run a fused model."""

import copy
import functools
from itertools import product

import pytest
import torch
from cases import Calls, needed
from test_conventions import counting
from test_transformers import GRADIENTS, LOGITS, Rotary, difference, make, tokens, train
from torch import nn

transformers = needed("transformers")

from torch_rope.integrations.transformers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("examine_once")]
Dynamic, Static = transformers.DynamicCache, transformers.StaticCache
at_night = pytest.mark.exhaustive


@functools.cache
def _pair(model_type, layers):
    stock = make(model_type, num_hidden_layers=layers, **MODELS[model_type][0])
    for name, p in stock.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5)
    fused = copy.deepcopy(stock)
    fused.handle = str(patch(fused, fuse=True))
    return stock, fused


def pair(model_type, layers=2):
    """Returns an unpatched and a fused model with the same weights, whose norms have weights of their own."""
    return copy.deepcopy(_pair(model_type, layers))


def new_cache(kind, model):
    return Static(config=model.config, max_cache_len=24) if kind == "static" else Dynamic(config=model.config)


def logits(model, text, cache, *lengths):
    """Returns the logits of a text, of which a model gets parts of these lengths."""
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in text.split(lengths, 1)], 1)


# ---- what is fused ----

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
# Each of these has another norm or cache: none, per head, 1 + weight and windows, over all heads, q and k rotated one by
# one with a norm of v. After the changes to its config stand its norms.
MODELS = {
    "llama": ({}, ""),
    "qwen3": ({"rope_parameters": DYNAMIC}, ", with q_norm, k_norm"),
    "gemma3_text": ({"sliding_window": 6, "sliding_window_pattern": 2}, ", with q_norm, k_norm"),
    "olmo2": ({}, ", with q_norm, k_norm"),
    "gemma4_text": ({"sliding_window": 6, "vocab_size_per_layer_input": 96}, ", with q_norm, k_norm, v_norm"),
}


@pytest.mark.parametrize("model_type, batch", [("llama", 1), ("qwen3", 3), ("olmo2", 1)])
def test_a_decode_step_computes_by_one_operator(model_type, batch):
    """Between the last projection and the count of the tokens there is nothing else. Llama has no norms there."""
    _, model = pair(model_type)
    cache = new_cache("static", model)
    for seq in (5, 1, 1):
        with Calls() as calls:
            logits(model, tokens(batch, seq), cache, seq)
    views = {"view", "_unsafe_view", "transpose", "slice"}
    names = [name for n in calls.names if (name := n.removeprefix("aten::").partition(".")[0]) not in views]
    places = [i for i, name in enumerate(names) if name == "rope::rotate_into_cache_"]
    assert [names[i - 1 : i + 2 : 2] for i in places] == [["mm", "add_"]] * 2  # layers


@pytest.mark.parametrize(
    "model_type, kind",
    [("llama", "dynamic"), ("qwen3", "dynamic"), ("gemma3_text", "static"), ("olmo2", "dynamic"), ("gemma4_text", "static")]
    + [pytest.param(m, k, marks=at_night) for m in MODELS for k in ("dynamic", "static")],
)  # fmt: skip
def test_a_fused_model_decodes_as_the_unpatched_one(model_type, kind):
    """A prompt, single tokens, and several tokens that follow, until the window is full and after."""
    stock, fused = pair(model_type)
    assert f"in rotate_into_cache_{MODELS[model_type][1]}; in place without gradients\n" in fused.handle
    assert "not fused" not in fused.handle and "nothing fused" not in fused.handle
    caches = [new_cache(kind, model) for model in (stock, fused)]
    expected, actual = (
        logits(model, tokens(2, 13), cache, 4, 1, 1, 1, 1, 3, 1, 1)
        for model, cache in zip((stock, fused), caches, strict=True)
    )
    assert difference(actual, expected) < LOGITS
    for theirs, ours in zip(*(cache.layers for cache in caches), strict=True):
        assert type(ours) is type(theirs) and ours.get_seq_length() == theirs.get_seq_length()
        if kind == "static":
            assert int(ours.cumulative_length) == int(theirs.cumulative_length)
        for name in ("keys", "values"):
            assert difference(getattr(ours, name), getattr(theirs, name)) < LOGITS


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", *(pytest.param(m, marks=at_night) for m in MODELS)])
def test_a_fused_model_trains_as_the_unpatched_one(model_type):
    stock, fused = pair(model_type)
    loss, gradients = train(stock, enabled=False)
    if model_type in ("llama", "qwen3"):
        fused.gradient_checkpointing_enable({"use_reentrant": False})
    actual, actual_gradients = train(fused, enabled=False)
    assert difference(actual, loss) < LOGITS and difference(actual_gradients, gradients) < GRADIENTS


# ---- ways to generate ----


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy], ids=["deepcopy", "copy"])
def test_two_continuations_of_one_prefix_do_not_disturb_each_other(copied):
    stock, fused = pair("qwen3")
    prefix, continuations = tokens(2, 6), (tokens(2, 4), tokens(2, 4).flip(1))
    cache, results = Dynamic(config=fused.config), [[], []]
    with torch.inference_mode():
        logits(fused, prefix, cache, 5, 1)  # then the cache has room for more tokens
    other = copied(cache)
    other.layers = [copied(layer) for layer in cache.layers]
    for token in range(4):
        for result, text, c in zip(results, continuations, (cache, other), strict=True):
            result.append(logits(fused, text[:, token : token + 1], c, 1))
    for actual, text in zip(results, continuations, strict=True):
        assert difference(torch.cat(actual, 1), stock(torch.cat([prefix, text], 1)).logits[:, 6:]) < LOGITS


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_a_cache_may_be_reset_and_used_by_an_unpatched_model(inference):
    """transformers zeroes the number of tokens in place, which the slots must follow."""
    stock, fused = pair("qwen3")
    text = tokens(2, 9)
    for kind, batch in (("static", 2), ("static", 1), ("dynamic", 2)):
        cache = new_cache(kind, fused)
        with inference():
            logits(fused, tokens(batch, 5).flip(0), cache, 4, 1)
            cache.reset()
            turns = [(fused, 0, 5), (fused, 5, 6), (stock, 6, 7), (fused, 7, 8), (fused, 8, 9)]
            results = [logits(m, text[:batch, a:b], cache, b - a) for m, a, b in turns]
        assert difference(torch.cat(results, 1), stock(text[:batch]).logits) < LOGITS


def test_memory_doubles_when_a_dynamic_cache_is_full():
    _, fused = pair("llama")
    cache, addresses = Dynamic(config=fused.config), []
    for seq in (4, 1, 1, 1, 1, 1, 1, 1):
        logits(fused, tokens(1, seq), cache, seq)
        addresses.append(cache.layers[0].keys.data_ptr())
    # 4 tokens, room for 10 after the fifth, for 22 after the eleventh
    assert [a == b for a, b in zip(addresses, addresses[1:], strict=False)] == [False, *[True] * 5, False]


KINDS = product(("llama", "qwen3", "gemma3_text"), ("static", "dynamic"))


@pytest.mark.parametrize("fuse", [True, pytest.param(False, marks=at_night)])
@pytest.mark.parametrize(
    "model_type, kind", [("qwen3", "static"), *(pytest.param(*case, marks=at_night) for case in KINDS)]
)
def test_a_patched_model_compiles_to_one_graph(model_type, kind, fuse):
    stock, _ = pair(model_type, layers=1)
    model, cache, graphs, text = copy.deepcopy(stock), new_cache(kind, stock), [], tokens(2, 7)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counting(graphs), dynamic=False)
    results = [logits(stock, text[:, :4], cache, 4)]
    with patch(model, fuse=fuse, exact_angles=True):
        results.append(logits(compiled, text[:, 4:6], cache, 1, 1))
    results.append(logits(model, text[:, 6:], cache, 1))
    assert difference(torch.cat(results, 1), stock(text).logits) < LOGITS
    assert set(graphs) == {2}  # exact angles, and the layer


# ---- what a layer does otherwise ----

SOURCE = """
class Changed(Attention):
    def forward(self, hidden_states, position_embeddings, past_key_values=None):
        shape = (*hidden_states.shape[:-1], -1, 16)
        q = before = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return attend(4 * q, k, v)
"""
ROTATES = "q, k = apply_rotary_pos_emb(q, k, cos, sin)"
CHANGES = {  # what is replaced by what, and what the handle says then
    "nothing": ("before", "before", "fused: q_norm and k_norm in norm_rotate_qk; the write into a StaticCache or "
        "DynamicCache in rotate_into_cache_, with q_norm, k_norm; in place without gradients"),
    "reads q": ("(4 * q, k, v)", "(4 * q, k, v, before)", "nothing fused: the results would differ"),
    "scales k": (ROTATES, ROTATES + "; k = 2 * k", "fused: q_norm and k_norm in norm_rotate_qk; in place without "
        "gradients; not fused: the cache: what is stored is not the rotated k alone"),
    # q is a view of the input, which must not be overwritten
    "rotates its input": ("self.q_norm(self.q_proj(hidden_states).view(shape))", "hidden_states.view(shape)", "nothing fused: "),
    "skips long sequences": (ROTATES, f"\n        if hidden_states.shape[1] < 20:\n            {ROTATES}", "fused: "),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, layer_idx=0):
        super().__init__()
        self.layer_idx = layer_idx
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = (nn.RMSNorm(16, 1e-6) for _ in range(2))


def attend(q, k, v, more=0):
    return (nn.functional.scaled_dot_product_attention(q, k, v) + more).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """A layer of attention, of which one thing is changed."""

    def __init__(self, change, folder):
        super().__init__()
        names = globals() | vars(transformers.models.llama.modeling_llama) | {"Attention": Attention}
        text, file = SOURCE.replace(*CHANGES[change][:2], 1), folder / "modeling.py"
        file.write_text(text)
        exec(compile(text, file, "exec"), names)
        self.rotary, self.attention = Rotary(), names["Changed"]()

    def forward(self, x, past_key_values=None):
        return self.attention(x, self.rotary(x, torch.arange(x.shape[1])[None]), past_key_values)


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_the_results_is_not_fused(change, tmp_path):
    torch.manual_seed(0)
    model, x = Model(change, tmp_path), torch.randn(2, 5, 32)
    before = x.clone()

    def results():
        with torch.no_grad():
            cache = Dynamic()
            return [model(x), model(x, cache), cache.layers[0].keys, model(x.clone().requires_grad_())]

    expected = results()
    handle = patch(model, fuse=True)
    for actual, e in zip(results(), expected, strict=True):
        assert difference(actual, e) < LOGITS
    assert torch.equal(x, before)
    assert CHANGES[change][2] in str(handle)
    if change == "skips long sequences":
        with pytest.raises(RuntimeError, match="Changed took another way than when it was patched"):
            model(torch.randn(1, 21, 32))


@pytest.mark.parametrize("make_cache", [lambda: None, Dynamic], ids=["no cache", "cache"])
@pytest.mark.parametrize("name", ["q_proj", "q_norm"])
def test_a_hook_sees_what_it_saw_before(name, make_cache, tmp_path):
    """With a cache the fused layer would overwrite the result of q_proj."""
    torch.manual_seed(0)
    model, x, seen = Model("nothing", tmp_path), torch.randn(2, 5, 32), []
    patch(model, fuse=True)
    with torch.no_grad():
        expected = model(x, make_cache())
        hook = getattr(model.attention, name).register_forward_hook(lambda m, args, out: seen.append((args, out)))
        assert difference(model(x, make_cache()), expected) < LOGITS
        hook.remove()
        ((arguments, out),) = seen
        assert torch.equal(getattr(model.attention, name)(*arguments), out)


def test_a_module_may_be_replaced_after_the_patch(tmp_path):
    """LoRA replaces the projections, and weights may be replaced too."""
    model, x, results = Model("nothing", tmp_path), torch.randn(2, 5, 32), []
    handle, attention = patch(model, fuse=True), model.attention
    attention.q_proj, attention.k_norm = nn.Sequential(attention.q_proj, nn.Linear(32, 32)), nn.RMSNorm(16, 1e-6)
    nn.init.uniform_(attention.k_norm.weight)
    for _ in range(2):
        with torch.no_grad():
            inferred = model(x)
        out = model(x)
        results.append((inferred, out, *torch.autograd.grad(out.square().sum(), attention.q_proj[1].weight)))
        handle.undo()
    for limit, actual, expected in zip((LOGITS, LOGITS, GRADIENTS), *results, strict=True):
        assert difference(actual, expected) < limit
