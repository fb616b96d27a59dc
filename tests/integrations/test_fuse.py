"""Tests of patch(fuse=True): what is fused, what is not and why, and ways to run a fused model."""

import copy
import functools
from itertools import product

import pytest
import torch
from cases import Calls, needed
from test_conventions import counting
from test_transformers import GRADIENTS, LOGITS, difference, make, tokens, train
from torch import nn
from torch.export import Dim

transformers = needed("transformers")

from transformers.models.qwen3 import modeling_qwen3  # noqa: E402

from torch_rope.integrations.transformers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu]
Dynamic, Static = transformers.DynamicCache, transformers.StaticCache
at_night = pytest.mark.exhaustive


@functools.cache
def _pair(model_type, layers):
    stock = make(model_type, num_hidden_layers=layers, **MODELS[model_type])
    for name, p in stock.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5)
    fused = copy.deepcopy(stock)
    fused.patched = str(patch(fused, fuse=True))
    return stock, fused


def pair(model_type, layers=2):
    """Returns an unpatched and a fused model with the same weights, whose norms have weights of their own."""
    return copy.deepcopy(_pair(model_type, layers))


def new_cache(kind, model):
    return Static(config=model.config, max_cache_len=24) if kind == "static" else Dynamic(config=model.config)


def logits(model, text, cache, *lengths):
    """Returns the logits of a text, of which a model gets parts of these lengths."""
    with torch.no_grad():
        return torch.cat([model(part, cache=cache).logits for part in text.split(lengths, 1)], 1)


# ---- what is fused ----

# Each of these has other norms or caches: none, per head, 1 + weight and windows, over all heads.
MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2},
    "olmo2": {},
}
PLAIN, NORMED = ["rope::rotate_qk", "rope::rotate_qk_"], ["rope::norm_rotate_qk"] * 2


@pytest.mark.parametrize("model_type, alone", [("llama", PLAIN), ("qwen3", NORMED), ("olmo2", NORMED)])
def test_each_layer_computes_by_one_operator(model_type, alone):
    """With gradients, with a DynamicCache, and with a StaticCache, which it writes."""
    _, model = pair(model_type)

    def operators(*args, **kwargs):
        with Calls() as calls:
            model(*args, **kwargs)
        names = [name.partition(".")[0] for name in calls.names]
        return [name for name in names if name.startswith("rope::")], names.count("aten::rsqrt")

    of_layers, others = 2, 5  # the norms that are no norms of q and k: two of each layer, and the last one
    assert operators(tokens(1, 5)) == (alone[:1] * of_layers, others)
    with torch.no_grad():
        for cache, operator in (
            (new_cache("dynamic", model), alone[1]),
            (new_cache("static", model), "rope::rotate_into_cache_"),
        ):
            for seq in (5, 1, 1):
                assert operators(tokens(1, seq), cache=cache) == ([operator] * of_layers, others)


@pytest.mark.parametrize(
    "model_type, kind",
    [("llama", "dynamic"), ("qwen3", "static"), ("gemma3_text", "static"), ("olmo2", "dynamic")]
    + [pytest.param(m, k, marks=at_night) for m in MODELS for k in ("dynamic", "static")],
)  # fmt: skip
def test_a_fused_model_decodes_as_the_unpatched_one(model_type, kind):
    """A prompt, single tokens, and several tokens that follow, until the window is full and after."""
    stock, fused = pair(model_type)
    norms = "" if model_type == "llama" else "q_norm, k_norm and "
    assert f"; fused: {norms}the rotation" in fused.patched and "not fused" not in fused.patched
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
            a, b = getattr(ours, name), getattr(theirs, name)
            assert difference(a, b) < LOGITS and a.stride() == b.stride()
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()  # what is saved is as small


@pytest.mark.parametrize("model_type", MODELS)
def test_a_fused_model_trains_as_the_unpatched_one(model_type):
    stock, fused = pair(model_type)
    loss, gradients = train(stock, enabled=False)
    if model_type in ("llama", "qwen3"):
        fused.activation_checkpointing_enable({"use_reentrant": False})
    actual, actual_gradients = train(fused, enabled=False)
    assert difference(actual, loss) < LOGITS and difference(actual_gradients, gradients) < GRADIENTS


# ---- ways to generate ----


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


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    "model_type, kind",
    [("qwen3", "static"), *(pytest.param(*case, marks=at_night) for case in product(MODELS, ("static", "dynamic")))],
)
def test_a_patched_model_compiles_to_one_graph(model_type, kind, fuse):
    """Without fuse, the logits have the bits of the unpatched model when it is compiled."""
    stock, _ = pair(model_type, layers=1)
    model, graphs, text, results = copy.deepcopy(stock), [], tokens(2, 7), []
    for is_patched in (False, True):
        cache, patched = new_cache(kind, stock), patch(model, fuse=fuse) if is_patched else None
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counting(graphs), dynamic=False)
        results.append(
            torch.cat([logits(stock, text[:, :4], cache, 4), logits(compiled, text[:, 4:], cache, 1, 1, 1)], 1)
        )
    patched.undo()
    assert difference(results[1], results[0]) <= (LOGITS if fuse else 0)
    assert {0, 1} == set(graphs) and graphs == sorted(graphs)


@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"exact_angles": True}])
def test_a_patched_model_has_one_program_for_all_lengths(options):
    model, graphs, sizes = pair("qwen3", layers=1)[0].eval(), [], {0: Dim.AUTO, 1: Dim.AUTO}
    model.config.use_cache = False
    with patch(model, **options), torch.no_grad():
        program = torch.export.export(model, (tokens(2, 5),), dynamic_shapes={"input_ids": sizes}).module()
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counting(graphs))
        for batch, seq in ((2, 5), (2, 6), (2, 7), (2, 9)):
            compiled(text := tokens(batch, seq))
            assert difference(program(text).logits, model(text).logits) == 0
    assert graphs == [1, 1]


# ---- what a layer does otherwise ----

apply_rotary_pos_emb = modeling_qwen3.apply_rotary_pos_emb
eager_attention_forward = modeling_qwen3.eager_attention_forward


class Changed(modeling_qwen3.Qwen3Attention):
    """Qwen3's attention, but for what subclasses change."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        before = q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k, v = self.change(q, k, v, before)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out, scores = eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.after(self.o_proj(out.flatten(2))), scores

    def change(self, q, k, v, before):
        return q, k, v

    def after(self, out):
        return out


class ScalesK(Changed):
    def change(self, q, k, v, before):
        return q, 2 * k, v


class DropsOut(Changed):
    """StarCoder2 does this in training, which is not the mode that a loaded model is in."""

    def after(self, out):
        return nn.functional.dropout(out, 0.5, self.training)


class Reduces(Changed):
    """Does something else with gradients."""

    def change(self, q, k, v, before):
        return q, k, v.detach()


DIFFERS = "not fused: the results would differ"
CASES_OF_LAYERS = [
    ((Changed, Changed), "fused: q_norm, k_norm and the rotation; with the write into a StaticCache"),
    ((ScalesK, ScalesK), DIFFERS),
    ((Reduces, Reduces), DIFFERS),
    ((DropsOut, DropsOut), DIFFERS),
    ((Changed, ScalesK), DIFFERS),
]


@pytest.mark.parametrize(
    "classes, says", CASES_OF_LAYERS, ids=lambda value: "" if isinstance(value, str) else value[1].__name__
)
def test_what_would_change_the_results_is_not_fused(classes, says):
    stock = make("qwen3", attention="eager")
    for layer, cls in zip(stock.model.layers, classes, strict=True):
        layer.self_attn.__class__ = cls
    model = copy.deepcopy(stock)
    assert f" (tried); {says}" in str(patch(model, fuse=True))
    for mode in (False, True):
        results = []
        for m in (stock.train(mode), model.train(mode)):
            torch.manual_seed(1)
            results.append(m(tokens()).logits)
        assert difference(*results) < LOGITS


@pytest.mark.parametrize("kind", [None, "dynamic", "static"])
@pytest.mark.parametrize("name", ["q_proj", "q_norm"])
def test_a_hook_sees_what_it_saw_before(name, kind):
    """The layer then computes by its own forward."""
    stock, model = pair("qwen3")
    results, seen = [], []
    for m in (stock, model):
        part = getattr(m.model.layers[1].self_attn, name)
        part.register_forward_hook(lambda m, args, out: seen.append((args[0].clone(), out.clone())))
        results.append(logits(m, tokens(), new_cache(kind, m) if kind else None, 11, 1))
    assert difference(results[1], results[0]) < LOGITS and len(seen) == 4
    for theirs, ours in zip(seen[:2], seen[2:], strict=True):
        assert difference(ours[0], theirs[0]) < LOGITS and difference(ours[1], theirs[1]) < LOGITS
