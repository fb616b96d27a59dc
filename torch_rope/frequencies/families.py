"""Lists what a config does not say about the model families of transformers: their pairing, and which of them ignore
partial_rotary_factor.
"""

# The families whose pairing is interleaved: channels 2i and 2i + 1 form a pair. All other families are half-split:
# channels i and i + rotary_dim / 2 form a pair.
#
# Each name is the ``model_type`` of the config that describes the attention. In a multimodal model that is the config
# of the text model or of the vision tower, not the outer config. The list comes from the functions of every modeling
# file of transformers 5.24.0; tests/exhaustive/models/test_families.py compares it with the installed release.
INTERLEAVED = frozenset(
    {
        "axk1",
        "axk2",
        "bailing_hybrid",
        "blt_global_transformer",
        "blt_local_decoder",
        "blt_local_encoder",
        "blt_patcher",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",  # the last channels of a head are rotated, not the first
        "dots3_note_text",
        "edgetam_video",
        "efficientloftr",
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
        "glm",
        "glm4",
        "glm4_moe_lite",
        "glm4v_text",
        "glm_moe_dsa",
        "glm_ocr_text",
        "gptj",
        "helium",
        "hy_v4_vl_text",
        "inkling2_vision",
        "lightglue",
        "llama4_text",
        "llama4_vision_model",
        "longcat_flash",
        "mistral4",
        "mistral_large4_text",
        "moonshine",
        "moonshine_streaming",
        "openai_privacy_filter",
        "pe_audio_encoder",
        "pe_audio_video_encoder",
        "pe_video_encoder",
        "roformer",
        "sam2_video",
        "sam3_tracker_video",
        "sam3_vit_model",
        "youtu",
    }
)

# The families of INTERLEAVED whose config can choose: ``config.rope_interleave = False`` makes them half-split.
ROPE_INTERLEAVE = frozenset({"axk1", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu"})

# The families of docs/families.md whose model rotates whole heads, whatever partial_rotary_factor says, if its kind is
# "default".
WHOLE_HEADS = frozenset(
    {
        "apertus",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "granite",
        "helium",
        "llama",
        "llama4_text",
        "mistral",
        "mixtral",
        "modernbert",
        "nanochat",
        "olmo2",
        "olmo3",
        "openai_privacy_filter",
        "qwen2",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_text",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
