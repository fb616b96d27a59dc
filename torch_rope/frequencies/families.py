"""Lists what the configs of transformers do not say about families of models, such as their pairing."""

# The families whose pairing is interleaved: channels 2i and 2i + 1 form a pair.
# Each name is the ``model_type`` of the config that describes the attention, not of an outer config. The list comes from
# every modeling file of transformers 5.24.0; tests/exhaustive/models/test_families.py compares it with the installed one.
# qwen2_5_omni_dit re-orders channels before it rotates pairs that are half-split; deepseek_v4 rotates the last channels.
INTERLEAVED = frozenset(
    """
    axk1 axk2 bailing_hybrid blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher codegen cohere
    cohere2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots3_note_text edgetam_video
    efficientloftr ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text glm glm4 glm4_moe_lite glm4v_text glm_moe_dsa
    glm_ocr_text gptj helium hy_v4_vl_text inkling2_vision lightglue llama4_text llama4_vision_model longcat_flash
    mistral4 mistral_large4_text moonshine moonshine_streaming openai_privacy_filter pe_audio_encoder
    pe_audio_video_encoder pe_video_encoder qwen2_5_omni_dit roformer sam2_video sam3_tracker_video sam3_vit_model
    sarvam_mla youtu
    """.split()
)
# The families of INTERLEAVED whose config can choose: ``config.rope_interleave = False`` makes them half-split.
ROPE_INTERLEAVE = frozenset({"axk1", "deepseek_v3", "glm4_moe_lite", "mistral4", "sarvam_mla", "youtu"})

# The families with text whose pairing is half-split, (i, i + rotary_dim / 2). Names of text configs lack their "_text".
HALF_SPLIT = frozenset(
    """
    afmoe apertus apertus1p5 arcee aria bamba beam bitnet chameleon cohere_compass cosmos3_edge csm
    csm_depth_decoder_model cwm dbrx deepseek_ocr2 deepseek_ocr2_encoder dia_decoder dia_encoder diffllama
    diffusion_gemma doge dory dots1 dots3_note_audio_encoder embedding_gemma2 emu3_text_model esm esmc eurobert
    evolla exaone exaone4 exaone4_5 exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma2 gemma3 gemma3n gemma4
    gemma4_unified glm4_moe glm4v_moe glm_image glmasr_encoder gpt_neox gpt_neox_japanese gpt_oss
    gradium_phonon_tts granite granite4_vision granite_docling granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared gte higgs_audio_v2 hrm hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4
    hyperclovax idefics internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1 kyutai_speech_to laguna
    lara_mini lasr_encoder lfm2 lfm2_moe lfm3 llama mellum mimi mimi_decoder mimi_encoder mimo_v2_flash minicpm3
    minimax minimax_m2 minimax_m3_vl ministral ministral3 mistral mixtral mllama_text_model modernbert
    modernbert-decoder molmo2 moshi muse_glimmer muse_glimmer_assistant muse_spark nanochat nemotron
    nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio neomme
    neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe paddleocr_vl persimmon phi phi3 phi4_multimodal phimoe
    pocket_tts pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder
    qwen2 qwen2_5_omni qwen2_5_omni_talker qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
    qwen3_next qwen3_omni_moe qwen3_omni_moe_talker qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_thinker
    qwen3_vl qwen3_vl_moe qwen4_exp recurrent_gemma sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2
    step3p5 t5_gemma_module t5gemma2 t5gemma2_decoder timesfm2_5 ultrabert unlimited_ocr vaultgemma
    voxtral_realtime voxtral_realtime_encoder xcodec2 zamba2 zaya
    """.split()
)

# The families in which only the layers with a sliding window rotate. Those of ALL_WITHOUT_WINDOW rotate in all layers
# if their sliding_window is None.
ALL_WITHOUT_WINDOW = frozenset({"exaone4", "exaone4_5", "exaone_moe", "kolibri1"})
ONLY_WITH_WINDOW = ALL_WITHOUT_WINDOW | {"afmoe", "cohere2", "cohere2_moe", "flint", "lara_mini"}

# The families whose frequencies do not follow from their configs alone -> what model_type must be instead.
NOT_BY_CONFIG = {
    "efficientloftr": "that of a model with one axis of positions",
    "ernie4_5_vl_moe_text": "another one: its pairs are in an order of their own; use torch_rope.multimodal.from_config",
    "lightglue": "another one: its frequencies are learned",
}
# The families that rotate without rope parameters, by the base 10000 or rope_theta, and rotary_dim channels of a head.
NO_PARAMETERS = frozenset({"codegen", "esm", "gptj", "lightglue", "roformer"})
# The families in which layer_rope_theta holds the base of each layer. In others it only says which layers rotate.
THETA_OF_LAYER = frozenset({"granite_swa", "granitemoe_swa"})
# Family, or None for one that transformers lacks -> the entry that says whether it rotates -> the values if it does.
ROTATES_IF: dict[str | None, dict[str, tuple]] = {
    None: {"position_embedding_type": (None, "rope", "rotary")},
    "esm": {"position_embedding_type": ("rotary",)},
    "falcon": {"alibi": (False,)},
    "granitemoehybrid": {"position_embedding_type": ("rope",)},
    "zamba2": {"use_mem_rope": (True,)},
}
# Family -> layer type -> its name in the rope parameters, if that is another one.
LABELS: dict[str, dict[str | None, str]] = {}
LABELS["deepseek_v4"] = dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), "compress")
LABELS["deepseek_v4"]["sliding_attention"] = "main"
