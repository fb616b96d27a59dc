"""The rotary functions of transformers that are known, by their texts, see _text.py.

``make known`` makes this table from the releases that it names.
"""

from .._bits import Rounds
from .._conventions import Known

FUNCTIONS = {
    "602ecf5a3bb4": Known(
        "llama",
        Rounds(),
        name="apply_rotary_pos_emb",
        files="afmoe apertus apertus1p5 arcee aria axk1 axk2 bitnet chameleon cohere_compass cosmos3_edge csm cwm dbrx deepseek_ocr2 deepseek_v3 deepseek_v32 dia diffllama doge dory dots1 embedding_gemma2 emu3 esmc esmfold2 eurobert exaone4 exaone4_5 exaone_moe falcon falcon_h1 flint gemma gemma2 gemma3 glm4_moe_lite gpt_neox_japanese gradium_phonon_tts granite granite4_vision granite_docling granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax idefics jais2 jamba jetmoe jina_embeddings_v3 kolibri1 kyutai_speech_to_text lara_mini lasr lfm2 lfm2_moe llama mellum mimi minicpm3 minimax ministral ministral3 mistral mistral4 mixtral mllama molmo2 moshi muse_glimmer muse_spark nemotron_asr_streaming nemotron_h neucodec nomic_bert olmoe paddleocr_vl parakeet persimmon phi phimoe pixtral pocket_tts pocket_tts_audio_tokenizer qwen2 qwen2_5_omni qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open stablelm starcoder2 t5gemma t5gemma2 timesfm2_5 ultrabert unlimited_ocr vaultgemma voxtral_realtime xcodec2 youtu zamba2",
        releases="5.24",
    ),
    "7427e7afd8b6": Known(
        "qwen2_vl",
        Rounds(inside="float32", result="x", converts="once"),
        name="apply_rotary_pos_emb_vision",
        files="cohere_compass dots3_note ernie4_5_vl_moe exaone4_5 glm4v glm4v_moe glm5_next glm_ocr kimi_k25 lfm3_vl mlcd muse_glimmer muse_spark paddleocr_vl qwen2_5_omni qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp step3p7 video_llama_3",
        releases="5.24",
    ),
    "75e60552aa4d": Known(
        "llama",
        Rounds(),
        partial=True,
        dense=True,
        name="apply_rotary_pos_emb",
        files="bamba glm4_moe glm4v_moe glm_image gpt_neox laguna mimo_v2_flash minimax_m2 minimax_m3_vl neomme qwen3_5 qwen3_5_moe qwen3_next recurrent_gemma step3p7 zaya",
        releases="5.24",
    ),
    "122064f9b3f8": Known(
        "deepseek_v3",
        Rounds(),
        name="apply_rotary_pos_emb_interleave",
        files="axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite glm_moe_dsa longcat_flash mistral4 youtu",
        releases="5.24",
    ),
    "2af8358ab572": Known(
        "cohere",
        Rounds(inside="float", result="x", converts="float32"),
        but="with other bits of gradients for bfloat16 with tables of float64 and float16 with tables of float64",
        name="apply_rotary_pos_emb",
        files="cohere cohere2 cohere2_moe efficientloftr lightglue",
        releases="5.24",
    ),
    "4754d908b936": Known(
        "glmasr",
        Rounds(),
        partial=True,
        dense=True,
        name="apply_rotary_pos_emb",
        files="glmasr nemotron3_5_transcribe nemotron3_diarization",
        releases="5.24",
    ),
    "eaf5bc2feb09": Known(
        "llama",
        Rounds(result="x"),
        name="apply_rotary_pos_emb",
        files="beam flex_olmo lfm3 olmo olmo2 olmo3 olmo_hybrid",
        releases="5.24",
    ),
    "39ad62e28c4f": Known(
        "gemma4",
        Rounds(),
        name="apply_rotary_pos_emb",
        files="diffusion_gemma gemma3n gemma4 gemma4_unified",
        releases="5.24",
    ),
    "5f5cc6e17c3e": Known(
        "llama",
        Rounds(inside="float", result="x"),
        name="apply_rotary_pos_emb",
        files="esm evolla modernbert modernbert_decoder",
        releases="5.24",
    ),
    "11038ce4e10c": Known(
        "glm",
        Rounds(),
        partial=True,
        dense=True,
        name="apply_rotary_pos_emb",
        files="glm glm4 moonshine moonshine_streaming",
        releases="5.24",
    ),
    "133c99307212": Known(
        "glm",
        Rounds(converts="once"),
        dense=True,
        name="apply_rotary_pos_emb",
        files="pe_audio pe_audio_video pe_video",
        releases="5.24",
    ),
    "3aa4d95b05cd": Known(
        "dinov3", Rounds(), name="apply_rotary_pos_emb", files="dinov3_vit eomt_dinov3 sapiens2", releases="5.24"
    ),
    "3669904c2532": Known(
        "glm",
        Rounds(inside="float", result="x"),
        name="apply_rotary_pos_emb",
        files="ernie4_5 ernie4_5_moe hy_v4_vl",
        releases="5.24",
    ),
    "c51707503ae0": Known(
        "llama", Rounds(), name="apply_rotary_pos_emb", files="muse_glimmer_assistant", releases="5.24"
    ),
    "3c9dc6640715": Known(
        "openai_privacy_filter",
        Rounds(),
        dense=True,
        name="apply_rotary_pos_emb",
        files="openai_privacy_filter",
        releases="5.24",
    ),
    "97ddb577f923": Known(
        "llama",
        Rounds(),
        partial=True,
        dense=True,
        name="apply_rotary_pos_emb",
        files="phi3 phi4_multimodal",
        releases="5.24",
    ),
    "48b14fd0c1ca": Known(
        "llama",
        Rounds(),
        partial=True,
        dense=True,
        name="apply_rotary_pos_emb",
        files="dots3_note nemotron",
        releases="5.24",
    ),
    "e220427e8804": Known(
        "sam3",
        Rounds(inside="float", result="x", converts="float32"),
        but="with other bits of gradients for bfloat16 with tables of float64 and float16 with tables of float64",
        name="apply_rotary_pos_emb_2d_self_attn",
        files="edgetam_video sam3",
        releases="5.24",
    ),
    "70782d8fb983": Known(
        "cohere",
        Rounds(inside="float", result="x"),
        name="apply_rotary_pos_emb",
        files="ernie4_5_vl_moe",
        releases="5.24",
    ),
    "7eb98ad97af8": Known(
        "mistral_large4", Rounds(), name="apply_rotary_pos_emb_interleave", files="mistral_large4", releases="5.24"
    ),
    "05b8c5e13695": Known(
        "cohere",
        Rounds(),
        partial=True,
        dense=True,
        name="apply_rotary_pos_emb",
        files="glm4v glm_ocr",
        releases="5.24",
    ),
    "8d33498a5fa4": Known(
        "qwen2_vl",
        Rounds(),
        partial=True,
        dense=True,
        name="apply_rotary_pos_emb_vision",
        files="minimax_m3_vl",
        releases="5.24",
    ),
    "506a4d4f9596": Known("gptj", Rounds(), name="apply_rotary_pos_emb", files="codegen gptj", releases="5.24"),
    "4132b47434c8": Known(
        "deepseek_v2",
        Rounds(result="x", converts="once"),
        but="with other bits of complex numbers if rotary_dim is not a multiple of 16",
        name="apply_rotary_emb",
        files="deepseek_v2",
        releases="5.24",
    ),
    "9413fc176797": Known(
        "deepseek_v4",
        Rounds(inside="float", result="x"),
        partial=True,
        dense=True,
        name="apply_rotary_pos_emb",
        files="deepseek_v4",
        releases="5.24",
    ),
    "3b7c57094c57": Known(
        "llama",
        Rounds(inside="float32", result="x", converts="once"),
        name="apply_rotary_pos_emb",
        files="hunyuan_vl",
        releases="5.24",
    ),
    "5aae6bb79095": Known(
        "llama", Rounds(), partial=True, dense=True, name="apply_rotary_pos_emb", files="qwen4_exp", releases="5.24"
    ),
    "49e74b9673aa": Known("nanochat", Rounds(), name="apply_rotary_pos_emb", files="nanochat", releases="5.24"),
    "a9d9a7a03ae0": Known(
        "inkling2",
        Rounds(inside="float32", result="x", converts="once"),
        name="apply_rotary_pos_emb_vision",
        files="inkling2",
        releases="5.24",
    ),
    "337ca50b5772": Known(
        "gpt_oss", Rounds(), dense=True, name="apply_rotary_pos_emb", files="gpt_oss", releases="5.24"
    ),
    "1887e7b72493": Known(
        "llama4",
        Rounds(result="x", converts="once"),
        but="with other bits of complex numbers if rotary_dim is not a multiple of 16",
        name="apply_rotary_emb",
        files="llama4",
        releases="5.24",
    ),
    "cd633ad2bbbf": Known(
        "llama4 images",
        Rounds(result="x", converts="once"),
        but="with other bits of complex numbers if rotary_dim is not a multiple of 16",
        name="vision_apply_rotary_emb",
        files="llama4",
        releases="5.24",
    ),
    "d190fb1db5f9": Known("glm", Rounds(), name="apply_rotary_pos_emb", files="helium", releases="5.24"),
    "fe70d602413c": Known("cohere", Rounds(), name="apply_rotary_pos_emb", files="blt", releases="5.24"),
}
# Why torch_rope does not support these.
UNSUPPORTED = {
    "11de348682e7": "it rotates q, k and v, and takes positions",  # clvp
    "fba76cf16007": "it rotates k with tables of its own, repeated for each frame",  # edgetam_video
    "83c7f514b0de": "it computes in another dtype on Apple GPUs, and does not rotate q and k",  # musicflamingo
    "feb1eb6523cd": "k may be longer than q, and the tables are repeated for it",  # sam2_video sam3_tracker_video
    "0c427935a984": "the two channels of a pair have different angles, which is not a rotation",  # vjepa2
}
