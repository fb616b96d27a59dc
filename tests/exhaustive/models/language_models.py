"""Makes a tiny random language model of any family of transformers, and compares its fused layers with its own."""

import copy
import functools
import sys

import pytest
import torch
from cases import needed
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

transformers = needed("transformers")

from models import MLA, MOE, SMALL, difference, logits, new_cache, tokens  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from torch_rope.integrations.transformers import patch  # noqa: E402

# A config gets those of these sizes that it knows. Scores go beyond soft caps, q, k and v beyond clip_qkv.
MORE = dict(
    attn_layer_indices=[0, 1], attn_logit_softcapping=5.0, block_types=["attention"], clip_qkv=2.0, eos_token_id=2,
    expert_ffn_hidden_size=32, ffn_hidden_size=64, indexer_budget=64, indexer_compress_ratio=1, indexer_head_dim=16,
    indexer_kv_heads=1, indexer_n_heads=4, mamba_d_state=16, mamba_chunk_size=8, num_kv_shared_layers=0, num_layers=2,
    rotary_dim=8, sliding_window=8, use_cache=False, use_mem_rope=True, use_sliding_window=True, vocab_size_per_layer_input=96,
)  # fmt: skip
HYBRID = "BailingHybrid", "GraniteMoeHybrid", "Lfm2Moe", "Lfm3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp"
CHANGES = dict.fromkeys(HYBRID, {"layer_types": ["full_attention"] * 2}) | {
    "Bamba": dict(mamba_n_heads=8),
    "CohereCompass": dict(rope_parameters={"full_attention": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}}),
    "Dbrx": dict(attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=2.0), ffn_config=dict(ffn_hidden_size=64)),
    "Zamba2": dict(layers_block_type=["linear_attention", "hybrid"]),
    "Zaya": dict(num_experts_per_tok=1),
}


def made(name, **changes):
    cls = getattr(transformers, f"{name}ForCausalLM")
    config, known = cls.config_class, cls.config_class.__dataclass_fields__
    sizes = SMALL | MOE | MLA | MORE | {"num_key_value_heads": 4 if "kv_lora_rank" in known else 2}
    sizes = {n if n in known else config.attribute_map.get(n): v for n, v in sizes.items()}
    torch.manual_seed(0)
    config = config(**{n: v for n, v in sizes.items() if n in known} | CHANGES.get(name, {}) | changes)
    model = cls._from_config(config, attn_implementation="eager").eval()
    for n, p in model.named_parameters():
        if "norm" in n and p.dim() == 1:
            nn.init.uniform_(p, 0.5, 1.5)
    return model


# ---- comparing ----

CACHES = {"DeepseekV4": ["dynamic"], "Dory": [], "MiniMax": []}  # those that a model takes, if not both
NAMES = {n[:-11] for n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if n.endswith("ForCausalLM")}
NAMES -= {"Blt", "Fuyu", "Gemma4Assistant", "Gemma4UnifiedAssistant", "Phi4Multimodal"}  # for bytes, images, drafts
NAMES -= {"Inkling2", "Jamba", "NemotronH"}  # whose text is not rotated


def file_of(name):
    return sys.modules[getattr(transformers, f"{name}ForCausalLM").__module__]


ROTATING = sorted(name for name in NAMES if any("apply_rot" in n for n in vars(file_of(name))))
SHARING = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# One or more for each form of attention, with what their configs have besides.
FORMS = {
    "Llama": {}, "Qwen3": {}, "Gemma3": {}, "Olmo2": {}, "Qwen3Next": {}, "Phi3": {}, "Cohere2": {}, "GptOss": {},
    "Exaone4": {"layer_types": ["sliding_attention", "full_attention"]}, "SmolLM3": {"no_rope_layers": [1, 0]},
    "DeepseekV2": {}, "DeepseekV3": {}, "Mistral4": {}, "Ministral3": {}, "Gemma3n": SHARING,
    "Gemma4": SHARING | {"attention_k_eq_v": True},
    "Llama4": {"use_qk_norm": False, "no_rope_layers": [1, 0], "floor_scale": 4},
}  # fmt: skip


def results(model, name, file):
    """Returns all that attention functions get, and the logits, for a text at once and with caches beyond the window."""
    given, own = [], vars(file).get("eager_attention_forward")

    def attention(layer, *args, **kwargs):
        given.append(tree_map_only(Tensor, torch.clone, (args, sorted(kwargs.items()))))
        return own(layer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(file, "eager_attention_forward", attention, raising=False)
        caches = [new_cache(kind, model) for kind in CACHES.get(name, ("dynamic", "static"))]
        ways = [(None, 12), *((cache, 6, 1, 1, 1, 1, 2) for cache in caches)]
        outputs = [logits(model, tokens(2, 12), *way) for way in ways]
    return given, outputs, [[getattr(layer, n, None) for layer in c.layers for n in ("keys", "values")] for c in caches]


def compared(name, **changes):
    """Returns what str() of a fused model says, and whether it gives the same to attention functions and to caches."""
    model, file = made(name, **changes), file_of(name)
    with patch(model, fuse=True) as patched:
        actual, says = results(model, name, file), str(patched)
    expected = results(model, name, file)
    assert expected[0] or "; fused" not in says, name
    ours, theirs = map(tree_leaves, (actual, expected))
    return says, len(ours) == len(theirs) and all(map(alike, ours, theirs))


def alike(a, e):
    if not (isinstance(a, Tensor) and isinstance(e, Tensor)):
        return a is e or (type(a) is type(e) and a == e)
    return a.shape == e.shape and bool(torch.equal(a, e) or difference(a, e) < 1e-4)


def check(names):
    """Prints, for families, whether their layers are fused, and whether they compute the same."""
    for name in names or sorted(NAMES):
        if any("apply_rot" in n for n in vars(file_of(name))):
            says, same = compared(name)
            how = "differs" if not same else "fused" if "kept apart" not in says else "kept apart"
            print(name, how, *(says.splitlines()[1:] if how != "fused" or "fell back" in says else []), sep="\n    ")


# ---- layers one by one ----


def calls_of_layers(model, *ways):
    """Returns the attention layers that a model calls, with their arguments, for texts in parts: (cache, *lengths)."""
    found, hooks = [], []
    for module in model.modules():
        if "Attention" in type(module).__name__ or "MLA" in type(module).__name__:
            hook = functools.partial(lambda m, args, kwargs: found.append((m, *copy.deepcopy((args, kwargs)))))
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    for way in ways:
        logits(model, tokens(2, sum(way[1:])), *way)
    for hook in hooks:
        hook.remove()
    return found


def qk_of(calls, file):
    """Returns the q and k that layers give to the attention function."""
    given, own = [], file.eager_attention_forward

    def attention(layer, q, k, *args, **kwargs):
        given.append((q.clone(), k.clone()))
        return own(layer, q, k, *args, **kwargs)

    with pytest.MonkeyPatch.context() as watched, torch.no_grad():
        watched.setattr(file, "eager_attention_forward", attention)
        for module, args, kwargs in calls:
            args, kwargs = copy.deepcopy((args, kwargs))
            module(*args, **kwargs)
    return given
