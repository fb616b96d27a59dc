"""Tests of patch(fuse=True): what is fused, what is not and why, and ways to run a fused model."""

import copy
import functools
import inspect
import re
import textwrap
from itertools import product

import pytest
import torch
from cases import Calls, needed
from layers import counting
from torch import nn
from torch.export import Dim

transformers = needed("transformers")

from models import GRADIENTS, LOGITS, MLA, MOE, difference, logits, make, new_cache, tokens, train  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3  # noqa: E402

from torch_rope.integrations.transformers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu]
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


# ---- what is fused ----

# Each of these has other norms or caches: none, per head, 1 + weight and windows, over all heads, of the latent.
MODELS = {
    "llama": {}, "qwen3": {}, "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2}, "olmo2": {},
    "deepseek_v3": MOE | MLA,
}  # fmt: skip
PLAIN, NORMED = "rope::rotate_qk", "rope::norm_rotate_qk"


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
    assert operators(tokens(1, 5)) == ([alone] * of_layers, others)
    with torch.no_grad():
        for cache, operator in (
            (new_cache("dynamic", model), alone),
            (new_cache("static", model), "rope::rotate_into_cache_"),
        ):
            for seq in (5, 1, 1):
                assert operators(tokens(1, seq), cache=cache) == ([operator] * of_layers, others)


# Operators that compute nothing, and those of a projection and of attention.
VIEWS = "alias expand select slice t transpose unsqueeze view _unsafe_view mm scalar_tensor where"


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2"])
def test_a_decode_step_has_one_operator_and_the_counter_of_the_cache(model_type):
    _, model = pair(model_type)
    attention, given, cache = model.model.layers[1].self_attn, {}, new_cache("static", model)
    attention.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(tokens(2, 5), cache=cache)
        model(tokens(2, 1), cache=cache)
        with Calls() as calls:
            attention(**given)
    names = [name.split("::")[1].split(".")[0] for name in calls.names]
    names = [name for name in names if name not in VIEWS.split() and "attention" not in name]
    assert names == ["rotate_into_cache_", "add_"]


@pytest.mark.parametrize(
    "model_type, kind",
    [("llama", "dynamic"), ("qwen3", "static"), ("gemma3_text", "static"), ("olmo2", "dynamic")]
    + [pytest.param(m, k, marks=at_night) for m in MODELS for k in ("dynamic", "static")],
)  # fmt: skip
def test_a_fused_model_decodes_as_the_unpatched_one(model_type, kind):
    """A prompt, single tokens, and several tokens that follow, until the window is full and after."""
    stock, fused = pair(model_type)
    norms = "" if model_type in ("llama", "deepseek_v3") else "q_norm, k_norm and "
    assert f"; fused: {norms}the rotation" in fused.patched and "kept apart" not in fused.patched
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
@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3"])
def test_a_cache_may_be_reset_and_used_by_an_unpatched_model(model_type, inference):
    """transformers zeroes the number of tokens in place, which the slots must follow."""
    stock, fused = pair(model_type)
    text = tokens(2, 9)
    for kind, batch in (("static", 2), ("static", 1), ("dynamic", 2)):
        cache = new_cache(kind, fused)
        with inference():
            logits(fused, tokens(batch, 5).flip(0), cache, 4, 1)
            cache.reset()
            turns = [(fused, 0, 5), (fused, 5, 6), (stock, 6, 7), (fused, 7, 8), (fused, 8, 9)]
            results = [logits(m, text[:batch, a:b], cache, b - a) for m, a, b in turns]
        assert difference(torch.cat(results, 1), stock(text[:batch]).logits) < LOGITS


@pytest.mark.parametrize("fuse", [pytest.param(True, marks=at_night), False])
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


@pytest.mark.parametrize("exact_angles", [True, pytest.param(False, marks=at_night)])
def test_a_patched_model_has_one_program_for_all_lengths(exact_angles):
    model, graphs, sizes = pair("qwen3", layers=1)[0].eval(), [], {0: Dim.AUTO, 1: Dim.AUTO}
    model.config.use_cache = False
    with patch(model, fuse=True, exact_angles=exact_angles), torch.no_grad():
        program = torch.export.export(model, (tokens(2, 5),), dynamic_shapes={"input_ids": sizes}).module()
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counting(graphs))
        for batch, seq in ((2, 5), (2, 6), (2, 7), (2, 9)):
            compiled(text := tokens(batch, seq))
            assert difference(program(text).logits, model(text).logits) == 0
    assert graphs == [1, 1]


# ---- which layers are kept apart ----


# What stands in the place of a part of the forward.
EDITS = {
    "nothing": ("", ""),
    "a comment": ("    cos, sin =", "    # angles\n    cos, sin ="),
    "a clamp": ("    cos, sin =", "    key_states = key_states.clamp(-8, 8)\n    cos, sin ="),
    "a factor": ("pos_emb(query_states, ", "pos_emb(query_states * 2, "),
    "a default": ("**kwargs:", "*, cap=abs, **kwargs:"),
    "other cells": ("cache.update(key_states, value_states,", "cache.update(value_states, key_states,"),
    "more dropout": ("0.0 if not self.training else self.attention_dropout", "self.attention_dropout"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_layer_with_another_text_is_kept_apart(name, tmp_path):
    text, file = inspect.getsource(inspect.unwrap(modeling_qwen3.Qwen3Attention.forward)), tmp_path / "edited.py"
    old, new = EDITS[name]
    assert old in text
    file.write_text(textwrap.dedent(text).replace(old, new))  # a forward without a file has no text
    exec(compile(file.read_text(), str(file), "exec"), namespace := vars(modeling_qwen3) | {})
    model = make("qwen3", num_hidden_layers=1)
    methods = {"forward": namespace["forward"]}
    model.model.layers[0].self_attn.__class__ = type("Edited", (modeling_qwen3.Qwen3Attention,), methods)
    says = str(patch(model, fuse=True))
    same = name in ("nothing", "a comment")
    assert ("; fused: q_norm, k_norm and the rotation" in says) == same
    assert says.endswith("; kept apart, because its text is not known") != same


def test_other_norms_and_norms_after_the_rotation_are_kept_apart():
    model = make("qwen3", num_hidden_layers=1)
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(16)
    says = "its norms are LayerNorm and Qwen3RMSNorm but must be RMS norms of one known class"
    assert str(patch(model, fuse=True)).endswith(f"; kept apart, because {says}")
    says = "its norms follow the rotation"
    assert str(patch(make("hunyuan_v1_dense"), fuse=True)).endswith(f"; kept apart, because {says}")


# ---- what changes after patch ----


class Kept(nn.Module):
    """A wrapper of a projection that keeps what it returns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        self.kept = self.inner(x)
        return self.kept


# What somebody does to an attention layer.
CHANGED_LATER = {
    "a wrapper": lambda layer: setattr(layer, "q_proj", Kept(layer.q_proj)),
    "another norm": lambda layer: setattr(layer, "q_norm", nn.LayerNorm(16, bias=False)),
    "another eps": lambda layer: setattr(layer.q_norm, "variance_epsilon", 0.5),
    "a hook of a projection": lambda layer: layer.q_proj.register_forward_hook(lambda module, args, out: 2 * out),
    "a hook of a norm": lambda layer: layer.k_norm.register_forward_hook(lambda module, args, out: 2 * out),
    "an own forward": lambda layer: setattr(layer.k_norm, "forward", lambda x: 2 * x),
    "another scaling": lambda layer: setattr(layer, "scaling", 0.5),
    "other weights": lambda layer: setattr(layer.q_norm.weight, "data", 3 * layer.q_norm.weight),
}


class Counting(transformers.DynamicCache):
    def update(self, *args, **kwargs):
        k, v = super().update(*args, **kwargs)
        return 2 * k, v


@pytest.mark.parametrize("change", CHANGED_LATER.values(), ids=CHANGED_LATER)
def test_what_changes_after_patch_is_followed(change):
    stock, model = pair("qwen3")
    for cache in (None, new_cache("dynamic", model), new_cache("static", model), Counting(config=model.config)):
        results = []
        for m in (stock, model):
            if cache is None:
                change(m.model.layers[1].self_attn)
            results.append(logits(m, tokens(), copy.deepcopy(cache), 11, 1))
        assert difference(results[1], results[0]) < LOGITS


@pytest.mark.parametrize("own", ["autocast", "a hook of a norm"])
def test_calls_that_are_not_fused_are_counted(own):
    patched = patch(model := make("qwen3"), fuse=True)
    if own == "a hook of a norm":
        model.model.layers[1].self_attn.k_norm.register_forward_hook(lambda module, args, out: out)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=own == "autocast"):
        for _ in range(3):
            model(tokens())
    layers = "2" if own == "autocast" else "1"
    assert re.search(f"forward of {layers} Qwen3Attention.*; fell back to its own forward in 3 calls", str(patched))


def test_a_norm_class_whose_forward_is_replaced_is_followed(monkeypatch):
    stock, model = pair("qwen3")
    norm = modeling_qwen3.Qwen3RMSNorm
    with torch.no_grad():
        before = model(tokens()).logits
        monkeypatch.setattr(norm, "forward", lambda self, x, own=norm.forward: own(self, x) / 2)
        assert (
            difference(model(tokens()).logits, stock(tokens()).logits)
            < LOGITS
            < difference(before, stock(tokens()).logits)
        )


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_an_update_that_was_replaced_is_called(kind):
    results = []
    for m in pair("qwen3"):
        layer = (cache := new_cache(kind, m)).layers[1]

        def update(*args, own=layer.update, **kwargs):
            k, v = own(*args, **kwargs)
            return 2 * k, v

        layer.update = update
        results.append(logits(m, tokens(), cache, 11, 1))
    assert difference(results[1], results[0]) < LOGITS


def test_an_exported_program_that_writes_a_cache_runs_with_gradients():
    stock, model = pair("llama", layers=1)
    sizes = {"batch_size": 1, "max_cache_len": 8}
    how = dict(use_cache=True, cache_implementation="static", max_length=8, cache_config=sizes)
    model.generation_config = transformers.GenerationConfig(**how)
    first, place = torch.tensor([[3]]), torch.tensor([0])
    export = transformers.integrations.executorch.convert_and_export_with_cache
    program = export(model, example_input_ids=first, example_cache_position=place).module()
    actual = program(input_ids=first, cache_position=place)
    assert difference(actual, stock(first).logits) < LOGITS
