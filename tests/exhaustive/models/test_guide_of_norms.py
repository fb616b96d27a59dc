"""Tests the table of docs/guide/qk-norm.md: with the arguments of a row, a call computes what the attention layers of
these models of transformers compute."""

import re
import sys

import pytest
import torch
from cases import ROOT, needed

transformers = needed("transformers")

from language_models import made  # noqa: E402
from models import tokens  # noqa: E402

import torch_rope  # noqa: E402

pytestmark = [pytest.mark.cpu]

PAGE = (ROOT / "docs/guide/qk-norm.md").read_text().split("## What models need")[1].split("\n## ")[0]
# Models, and the function and its other arguments in Python.
ROWS = re.findall(r"^\| (`[^|]*) \| `(\w+)\(\.\.\., (.*?)\)` \|", PAGE, re.M)
CASES = [(name, *row[1:]) for row in ROWS for name in re.findall(r"`(\w+)`", row[0])]
# What makes the tiny models do what is special.
TEMPERED = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8}
YARN = TEMPERED | {"rope_type": "yarn", "factor": 8.0, "partial_rotary_factor": 0.5}
CHANGES = {
    "Gemma3n": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4},
    "Gemma4": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4},
    "Glm4Moe": {"use_qk_norm": True},
    "Llama4": {"no_rope_layers": [0, 0], "floor_scale": 8},
    "Olmoe": {"clip_qkv": None},
    "Ministral3": {"rope_parameters": TEMPERED | {"rope_type": "default"}},
    "Mistral4": {"rope_parameters": YARN},
}


def layers_of(model):
    """Returns what each attention layer of a model gets and computes: (layer, its arguments, q, k, v of its attention
    function, the layer of the cache), q, k and v as [batch, seq, heads, head_dim]."""
    found, cache = [], transformers.DynamicCache(config=model.config)
    file = sys.modules[type(model).__module__]
    own = file.eager_attention_forward

    def attention(layer, q, k, v, *args, **kwargs):
        found[-1] += tuple(t.transpose(1, 2) for t in (q, k, v))
        return own(layer, q, k, v, *args, **kwargs)

    def note(layer, args, kwargs):
        found.append((layer, dict(zip(("hidden_states", "position_embeddings"), args, strict=False)) | kwargs))

    layers = [m for m in model.modules() if "Attention" in type(m).__name__ and hasattr(m, "layer_idx")]
    with pytest.MonkeyPatch.context() as watched, torch.no_grad():
        watched.setattr(file, "eager_attention_forward", attention)
        hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        model(tokens(2, 40), cache=cache, use_cache=True)
        for hook in hooks:
            hook.remove()
    return [(*of_layer, cache) for of_layer in found]


def of_layer(cache, layer):
    """Returns what a layer's cache holds of a latent and of rotated k, in this order of the operator: k, v."""
    cells = cache.layers[layer.layer_idx]
    return cells.values, cells.keys


def operands(layer, x, q_right):
    """Returns q, k and v [batch, seq, heads, head_dim] as the projections of a layer give them. v is the latent of a layer
    that has one, and q and k are the channels that rotate."""
    if hasattr(layer, "kv_a_layernorm"):
        nope, rope = layer.qk_nope_head_dim, layer.qk_rope_head_dim
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).unflatten(-1, (-1, nope + rope))[..., nope:]
        latent, k = layer.kv_a_proj_with_mqa(x).split([layer.kv_lora_rank, rope], -1)
        return q, k.unsqueeze(2), latent.unsqueeze(2)
    _, _, heads, head_dim = q_right.shape
    q = layer.q_proj(x).unflatten(-1, (heads, -1))[..., :head_dim]  # without the gate
    if getattr(layer, "is_kv_shared_layer", False):
        return q, q[..., :0, :], None
    k = layer.k_proj(x).unflatten(-1, (-1, head_dim))
    return q, k, layer.v_proj(x).unflatten(-1, (-1, head_dim)) if layer.v_proj is not None else k


def norms_of(layer, head_dim, keyword):
    """Returns the arguments of a layer's norms of q and k, if it has some."""
    norms = [getattr(layer, n) for n in ("q_norm", "k_norm", "q_layernorm", "k_layernorm") if hasattr(layer, n)]
    eps = getattr(layer.config, "rms_norm_eps", None) or getattr(layer.config, "norm_eps", 1e-6)
    if not norms:
        return {"norm_eps": eps} if keyword else {}
    weights = [m.weight if len(m.weight) == head_dim else m.weight.view(-1, head_dim) for m in (norms[0], norms[-1])]
    return dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True)) | {"norm_eps": eps}


def factor_of(layer, given):
    """Returns the attention temperature of each token, as a layer computes it."""
    x = given["hidden_states"]
    if hasattr(layer, "attn_scale"):
        positions = torch.arange(x.shape[1])
        return torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
    rope, file = layer.config.rope_parameters, sys.modules[type(layer).__module__]
    beta, length = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    return file.get_llama_4_attn_scale(given["position_ids"], beta, length)[:, 0, :, 0].to(x.dtype).float()


def angles_of(layer, given):
    tables = given["position_embeddings"]
    if not getattr(layer, "use_rope", True) or not isinstance(tables, tuple):
        return {"inv_freq": torch.zeros(0)}
    return {name: t[..., : t.shape[-1] // 2] for name, t in zip(("cos", "sin"), tables, strict=True)}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name, function, arguments", CASES, ids=lambda text: text if text.isidentifier() else "")
def test_a_call_computes_what_a_layer_computes(name, function, arguments, dtype):
    model, differ, total = made(name, **CHANGES.get(name, {})).to(dtype), 0, 0
    for layer, given, *right, cache in layers_of(model):
        x = given["hidden_states"]
        q, k, v = operands(layer, x, right[0])
        names = {"torch": torch, "weight": getattr(getattr(layer, "kv_a_layernorm", None), "weight", None)}
        names["factor"] = factor_of(layer, given) if "factor" in arguments else None
        options = eval(f"dict({arguments})", names) | angles_of(layer, given)
        options |= norms_of(layer, q.shape[-1], "norm_v" in options)
        if names["weight"] is not None:  # the heads of q have other channels before, and pairs are written to halves
            right = [right[0][..., -q.shape[-1] :], *(t.transpose(1, 2) for t in of_layer(cache, layer))]
            options["norm_eps"] = layer.kv_a_layernorm.variance_epsilon
        if v is None:  # it shares the cache of another layer
            options = {name: value for name, value in options.items() if name != "norm_v"}
            options["k_norm_weight"], right = options["q_norm_weight"], right[:1]
            outs = torch_rope.norm_rotate_qk(q, k, **options)[:1]
        elif function == "rotate_into_cache_":
            q, k_cache, v_cache = q.clone(), torch.empty_like(k), torch.empty_like(v)
            options |= {"slots": torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2])}
            torch_rope.rotate_into_cache_(q, k, v, k_cache, v_cache, **options)
            outs = q, k_cache, v_cache
        else:
            outs, right = getattr(torch_rope, function)(q, k, **options), right[:2]
        if options.get("interleaved"):
            outs = [*(t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in outs[:2]), outs[2]]
        for out, expected in zip(outs, right, strict=True):
            assert out.shape == expected.shape
            differ, total = differ + int((out != expected).sum()), total + out.numel()
    assert total and differ <= max(1, total / 10000)
