"""Tests of patch(fuse=True): what is fused, what is not and why, and ways to run a fused model."""

import copy

import pytest
import torch
from cases import Calls, needed
from test_transformers import GRADIENTS, LOGITS, counting, difference, make, tokens, train
from torch import nn

transformers = needed("transformers")

from torch_rope.integrations.transformers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("examine_once")]
Dynamic, Static = transformers.DynamicCache, transformers.StaticCache
at_night = pytest.mark.exhaustive


def pair(model_type, **options):
    """Returns an unpatched and a fused model with the same weights, whose norms have weights of their own."""
    stock = make(model_type, **MODELS.get(model_type, {}) | options)
    for name, p in stock.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5)
    fused = copy.deepcopy(stock)
    fused.handle = patch(fused, fuse=True)
    return stock, fused


def new_cache(kind, model):
    return Static(config=model.config, max_cache_len=24) if kind == "static" else Dynamic(config=model.config)


# ---- what is fused ----

# Each of these has another norm or cache: none, per head, 1 + weight and windows, over all heads, norms that rotate not
# in every layer, q and k rotated one by one with a norm of v.
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "cohere2": {"sliding_window": 6},
    "gemma4_text": {"sliding_window": 6, "vocab_size_per_layer_input": 96},
}
NORMS = dict.fromkeys(MODELS, ", with q_norm, k_norm") | {"llama": "", "cohere2": ""}
NORMS["gemma4_text"] += ", v_norm"


@pytest.mark.parametrize("model_type, batch", [("llama", 1), ("qwen3", 3), pytest.param("olmo2", 1, marks=at_night)])
def test_a_decode_step_computes_by_one_operator(model_type, batch):
    """Attention converts its own mask. The norms of Llama are outside of attention."""
    _, model = pair(model_type)
    cache = new_cache("static", model)
    with torch.no_grad():
        for seq in (5, 1, 1):
            with Calls() as calls:
                model(tokens(batch, seq), past_key_values=cache)
    views = {"view", "_unsafe_view", "transpose", "slice", "unsqueeze", "expand", "select", "t", "as_strided", "alias"}
    of_the_mask = {"scalar_tensor", "where", "full_like", "zeros_like", "masked_fill", "full"}
    names = [n.split("::")[1].split(".")[0] for n in calls.names]
    names = [n for n in names if n not in views | of_the_mask]
    ends = [i for i, name in enumerate(names) if name.startswith("_scaled_dot_product")]
    assert len(ends) == 2  # layers
    for end in ends:
        assert names[end - 3] in ("mm", "addmm") and names[end - 2 : end] == ["rotate_into_cache_", "add_"]
    assert [int(layer.cumulative_length) for layer in cache.layers] == [7, 7]


@pytest.mark.parametrize(
    "model_type, kind",
    [("llama", "dynamic"), ("qwen3", "dynamic"), ("gemma3_text", "static"), ("olmo2", "dynamic"), ("gemma4_text", "static")]
    + [pytest.param(m, k, marks=at_night) for m in MODELS for k in ("dynamic", "static")],
)  # fmt: skip
def test_a_fused_model_decodes_as_the_unpatched_one(model_type, kind):
    """A prompt, single tokens, and several tokens that follow, until the window is full and after."""
    stock, fused = pair(model_type)
    assert f"in rotate_into_cache_{NORMS[model_type]}; in place without gradients\n" in str(fused.handle)
    assert "not fused" not in str(fused.handle) and "nothing fused" not in str(fused.handle)
    caches = [new_cache(kind, model) for model in (stock, fused)]
    with torch.no_grad():
        for seq in (4, 1, 1, 1, 1, 3, 1, 1):
            expected, actual = (
                m(tokens(2, seq), past_key_values=c).logits for m, c in zip((stock, fused), caches, strict=True)
            )
            assert difference(actual, expected) < LOGITS
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        assert type(ours) is type(theirs) and ours.get_seq_length() == theirs.get_seq_length()
        if kind == "static":
            assert int(ours.cumulative_length) == int(theirs.cumulative_length)
        for name in ("keys", "values"):
            assert difference(getattr(ours, name), getattr(theirs, name)) < LOGITS


@pytest.mark.parametrize(
    "model_type, checkpointing",
    [("qwen3", True), ("olmo2", False), ("gemma4_text", False)]
    + [pytest.param(m, c, marks=at_night) for m in MODELS for c in (False, True)],
)
def test_a_fused_model_trains_as_the_unpatched_one(model_type, checkpointing):
    stock, fused = pair(model_type)
    loss, gradients = train(stock, enabled=False)
    if checkpointing:
        fused.gradient_checkpointing_enable({"use_reentrant": False})
    actual, actual_gradients = train(fused, enabled=False)
    assert difference(actual, loss) < LOGITS and difference(actual_gradients, gradients) < GRADIENTS


# ---- ways to generate ----

GREEDY, BEAMS = dict(do_sample=False), dict(do_sample=False, num_beams=3)


@pytest.mark.parametrize(
    "how, kind", [(GREEDY, "dynamic"), (BEAMS, "static"), pytest.param(BEAMS, "dynamic", marks=at_night)]
)
def test_generate_gives_the_same_tokens(how, kind):
    """The batch has left padding, and there are more tokens than fit the attention window."""
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    options = how | dict(
        attention_mask=mask, max_new_tokens=12, cache_implementation=kind, disable_compile=True, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    results = []
    for model in pair("gemma3_text"):
        results.append(model.generate(tokens(2, 6), **options))
    assert torch.equal(results[1].sequences, results[0].sequences)
    assert difference(*(torch.stack(r.logits) for r in results[::-1])) < LOGITS


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy], ids=["deepcopy", "copy"])
def test_two_continuations_of_one_prefix_do_not_disturb_each_other(copied):
    stock, fused = pair("qwen3")
    prefix, continuations = tokens(2, 6), (tokens(2, 4), tokens(2, 4).flip(1))
    expected = [stock(torch.cat([prefix, c], 1)).logits[:, 6:] for c in continuations]
    with torch.no_grad():
        cache = Dynamic(config=fused.config)
        fused(prefix[:, :5], past_key_values=cache)
        fused(prefix[:, 5:], past_key_values=cache)  # now the cache has room for more tokens
        other = copied(cache)
        other.layers = [copied(layer) for layer in cache.layers]
        results = [[], []]
        for token in range(4):
            for i, c in enumerate((cache, other)):
                results[i].append(fused(continuations[i][:, token : token + 1], past_key_values=c).logits)
    for actual, e in zip(results, expected, strict=True):
        assert difference(torch.cat(actual, 1), e) < LOGITS


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_a_cache_may_be_reset_and_used_by_an_unpatched_model(inference):
    """transformers zeroes the number of tokens in place, which the slots must follow."""
    stock, fused = pair("qwen3")
    with inference():
        expected = stock(tokens(2, 9)).logits
        for kind, batch in (("static", 2), ("static", 1), ("dynamic", 2)):
            cache = new_cache(kind, fused)
            fused(tokens(batch, 4).flip(0), past_key_values=cache)
            fused(tokens(batch, 1), past_key_values=cache)
            cache.reset()
            turns = [(fused, 0, 5), (fused, 5, 6), (stock, 6, 7), (fused, 7, 8), (fused, 8, 9)]
            logits = [m(tokens(2, 9)[:batch, a:b], past_key_values=cache).logits for m, a, b in turns]
            assert difference(torch.cat(logits, 1), expected[:batch]) < LOGITS


def test_a_dynamic_cache_that_began_in_inference_mode_can_be_used_outside():
    stock, fused = pair("llama")
    cache = Dynamic(config=fused.config)
    with torch.inference_mode():
        for seq in (4, 1):
            fused(tokens(2, 6)[:, :seq], past_key_values=cache)
        cache.crop(-1)
        fused(tokens(2, 6)[:, 4:5], past_key_values=cache)
    with torch.no_grad():
        actual = fused(tokens(2, 6)[:, 5:], past_key_values=cache).logits
        assert difference(actual, stock(tokens(2, 6)).logits[:, 5:]) < LOGITS


def test_memory_doubles_when_a_dynamic_cache_is_full():
    _, fused = pair("llama")
    cache = Dynamic(config=fused.config)
    addresses = []
    with torch.no_grad():
        for seq in (4, 1, 1, 1, 1, 1, 1, 1):
            fused(tokens(1, seq), past_key_values=cache)
            addresses.append(cache.layers[0].keys.data_ptr())
    assert cache.layers[0].keys.shape == (1, 2, 11, 16)
    # 4 tokens, room for 10 after the fifth, for 22 after the eleventh
    assert [a == b for a, b in zip(addresses, addresses[1:], strict=False)] == [False, *[True] * 5, False]


@pytest.mark.parametrize(
    "model_type, kind",
    [("qwen3", "static")]
    + [pytest.param(m, k, marks=at_night) for m in ("llama", "qwen3", "gemma3_text") for k in ("static", "dynamic")],
)
def test_a_fused_model_compiles_to_one_graph(model_type, kind):
    stock, fused = pair(model_type)
    graphs, caches = [], [new_cache(kind, model) for model in (stock, fused)]
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend=counting(graphs), dynamic=False)
    with torch.no_grad():
        for model, cache in zip((stock, fused), caches, strict=True):
            model(tokens(2, 4), past_key_values=cache)
        for model in (compiled, compiled, fused):
            expected = stock(tokens(2, 1), past_key_values=caches[0]).logits
            assert difference(model(tokens(2, 1), past_key_values=caches[1]).logits, expected) < LOGITS
    assert set(graphs) == {2}  # one call for each layer


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


class Rotary(nn.Module):
    def forward(self, x, position_ids):
        angle = position_ids[..., None] * 10.0 ** -torch.arange(8).float()
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


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


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_a_module_may_be_replaced_after_the_patch(tmp_path):
    """LoRA replaces the projections, and weights may be replaced too."""
    model, x, results = Model("nothing", tmp_path), torch.randn(2, 5, 32), []
    handle = patch(model, fuse=True)
    model.attention.q_proj, model.attention.k_norm = Lora(model.attention.q_proj), nn.RMSNorm(16, 1e-6)
    nn.init.uniform_(model.attention.k_norm.weight)
    for _ in range(2):
        with torch.no_grad():
            inferred = model(x)
        out = model(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), model.attention.q_proj.b.weight)
        results.append((inferred, out, gradient))
        handle.undo()
    for limit, actual, expected in zip((LOGITS, LOGITS, GRADIENTS), *results, strict=True):
        assert difference(actual, expected) < limit
