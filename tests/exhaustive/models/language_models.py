"""Makes a tiny random language model of any family of transformers."""

import torch
from cases import needed
from torch import nn

transformers = needed("transformers")

from models import MLA, MOE, SMALL  # noqa: E402

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
