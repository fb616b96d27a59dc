"""Tiny random models of transformers, one or more for each way in which a family rotates."""

import torch
from cases import needed

transformers = needed("transformers")

import models  # noqa: E402
from models import MLA, MOE  # noqa: E402

SMALL = models.SMALL | dict(eos_token_id=2, use_cache=False)
V4 = dict(num_key_value_heads=1, head_dim=32, layer_types=["sliding_attention"] * 2)
LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=8,
    short_factor=[1 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)],
)  # fmt: skip
VISION = dict(depth=2, hidden_size=64, num_heads=4, patch_size=2, temporal_patch_size=1, initializer_range=0.2)
IMAGE_TOKENS = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)


def tokens():
    return {"input_ids": torch.randint(3, 80, (2, 12))}


def pixels():
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def made(kind, model_type, inputs=tokens, **changes):
    config = transformers.AutoConfig.for_model(model_type, **SMALL | changes)
    return getattr(transformers, f"AutoModel{kind}").from_config(config, attn_implementation="eager"), inputs()


def causal(model_type, **changes):
    return made("ForCausalLM", model_type, **changes)


def qwen_vl(model_type, section, vision, **rope):
    """Returns a model and its inputs: text and an image of 4 x 4 patches, whose tokens have positions on three axes."""
    rope |= {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    text = SMALL | {"rope_parameters": rope}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=text, vision_config=VISION | vision, **IMAGE_TOKENS
    )
    inputs = tokens()
    inputs["input_ids"][:, 2:8] = torch.tensor([92, 90, 90, 90, 90, 93])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 90).int()
    inputs |= {"pixel_values": torch.randn(32, 12), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    inputs["use_cache"] = False
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager"), inputs


def falcon():
    """Has no head_dim in its config."""
    config = transformers.FalconConfig(**{n: v for n, v in SMALL.items() if n != "head_dim"}, alibi=False)
    return transformers.FalconForCausalLM._from_config(config, attn_implementation="eager"), tokens()


def gemma4_vision():
    positions = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1)
    inputs = {"pixel_values": torch.rand(2, 16, 12), "pixel_position_ids": positions}
    changes = dict(num_key_value_heads=4, patch_size=2, position_embedding_size=16, pooling_kernel_size=2)
    return made("", "gemma4_vision", lambda: inputs, **changes)


def llama4_vision():
    config = transformers.Llama4VisionConfig(
        **SMALL | dict(intermediate_size=256, image_size=16, patch_size=4, vision_output_dim=64),
        projector_input_dim=64, projector_output_dim=64,
    )  # fmt: skip
    return transformers.Llama4VisionModel._from_config(config, attn_implementation="eager"), pixels()


# Functions that return a model and its inputs, by model_type.
CASES = {
    **{
        name: lambda name=name: causal(name)
        for name in [
            "apertus", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
            "glm4", "gpt_neox", "granite", "helium", "llama", "mistral", "nanochat", "nemotron", "olmo2",
            "olmo3", "persimmon", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
        ]  # fmt: skip
    },
    **{name: lambda name=name: causal(name, **MOE) for name in ("gpt_oss", "mixtral", "qwen3_moe")},
    "deepseek_v2": lambda: causal("deepseek_v2", **MOE | MLA),
    "deepseek_v3": lambda: causal("deepseek_v3", **MOE | MLA),
    "deepseek_v3 without rope_interleave": lambda: causal("deepseek_v3", **MOE | MLA, rope_interleave=False),
    "deepseek_v4": lambda: causal("deepseek_v4", **MOE | MLA | V4),
    "dinov3_vit": lambda: made(
        "", "dinov3_vit", pixels, patch_size=4, image_size=16, num_register_tokens=2, layer_norm_eps=1e-5, layerscale_value=1.0
    ),
    "falcon": falcon,
    "gemma4_text": lambda: causal("gemma4_text", vocab_size_per_layer_input=96),
    "gemma4_vision": gemma4_vision,
    "gptj": lambda: causal("gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64),
    "llama4_text": lambda: causal("llama4_text", **MOE, intermediate_size_mlp=64),
    "llama4_vision_model": llama4_vision,
    "modernbert": lambda: made("ForMaskedLM", "modernbert"),
    "openai_privacy_filter": lambda: made("ForTokenClassification", "openai_privacy_filter", **MOE),
    "phi": lambda: causal("phi", partial_rotary_factor=0.5),
    "phi3": lambda: causal("phi3", rope_parameters=LONGROPE),
    "pixtral": lambda: made(
        "", "pixtral", lambda: pixels() | {"image_sizes": torch.tensor([[16, 16], [16, 12]])}, image_size=16, patch_size=4
    ),
    "sam3_vit_model": lambda: made(
        "", "sam3_vit_model", pixels, patch_size=4, image_size=16, pretrain_image_size=16, window_size=2, global_attn_indexes=[1]
    ),
    "qwen2_vl": lambda: qwen_vl("qwen2_vl", [2, 3, 3], {"embed_dim": 64, "mlp_ratio": 2}),
    "qwen3_vl": lambda: qwen_vl(
        "qwen3_vl", [4, 2, 2], {"out_hidden_size": 64, "intermediate_size": 64, "deepstack_visual_indexes": [0]},
        mrope_interleaved=True,
    ),
}  # fmt: skip
