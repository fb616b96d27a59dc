"""The attention layers and the norms of transformers whose texts are known, see text_of.

A record has words of the own forward, as Python. Their names are ``self``, the arguments of the forward, ``out`` for the
result of the attention function [batch, seq, channels], and the globals of the modeling file.
"""

import re
from typing import NamedTuple

from .._fuse import Norm

DROPOUT, SCALING = "dropout=0.0 if not self.training else self.attention_dropout", "scaling=self.scaling"
WINDOW = f"{DROPOUT}, {SCALING}, sliding_window=self.sliding_window"
WINDOW_OF_CONFIG = "sliding_window=getattr(self.config, 'sliding_window', None)"
RESIDUAL_DROPOUT = "nn.functional.dropout(self.o_proj(out), p=self.residual_dropout, training=self.training)"
BY_CONFIG = "'apply_rotary_pos_emb_interleave' if self.config.rope_interleave else 'apply_rotary_pos_emb'"
_BETA, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
_PARAMETERS = f"self.config.rope_parameters.get('{_BETA}'), self.config.rope_parameters.get('{_LENGTH}')"
_SEEN = "(cache.get_seq_length(self.layer_idx) if cache is not None else 0)"
_POSITIONS = f"(torch.arange(hidden_states.shape[1], device=hidden_states.device) + {_SEEN}).float()"
_TEMPERATURE = f"(torch.log1p(torch.floor(({_POSITIONS} + 1.0) / self.floor_scale)) * self.attn_scale + 1.0)"
LLAMA_4_TEMPERATURE = f"{_TEMPERATURE} if self.attn_temperature_tuning and (not self.use_rope) else None"
LLAMA_4_SCALE = f"get_llama_4_attn_scale(position_ids, {_PARAMETERS}).to(hidden_states.dtype)"


class Layer(NamedTuple):
    """What is special to the own forward of a layer, in its words."""

    form: str = "separate"  # the function of fuse.py that computes q, k and v
    arguments: str = "hidden_states position_embeddings attention_mask cache"  # all but self
    tells: str = f"{DROPOUT}, {SCALING}"  # the keywords that the attention function gets
    out: str = "self.o_proj(out)"
    norms: str = ""  # the norms of q and of k, before the rotation
    norm_of_v: str = ""
    normed: str = "True"  # whether q and k are normalised
    rotated: str = "True"  # whether q and k are rotated
    rotary: str = "''"  # the name of the rotary function, if there are several
    channels: str = "self.head_dim"  # of q that the rotary function gets, the first of a head
    heads_first: bool = True  # whether the rotary function takes q as [batch, heads, seq, head_dim]
    factor: str = "None"  # of q, after the rotation
    update: str = "kwargs=kwargs"  # the keywords that the cache gets
    reads: str = "None"  # the key of shared_kv_states that a layer without k reads
    stores: str = "None"  # the key that other layers read
    never: str = "''"  # why the layer cannot be fused


NORMS = {
    "3d6c78683b7e": Norm("variance_epsilon", rounds=True),  # Llama, Qwen3
    "8bea457825a4": Norm("eps", rounds=True),  # Llama 4
    "5fecbee720f4": Norm("eps", offset=1.0),  # Gemma, Qwen3-Next
    "71aadedb67be": Norm("eps"),  # Gemma 3n, Gemma 4, with or without a weight
    "321413e14433": Norm("eps"),  # Moshi
    "b8d51883479e": Norm("variance_epsilon"),  # OLMo-2, GPT-OSS
    "911b15d56740": Norm("variance_epsilon"),  # Helium
}
# The texts of forwards in transformers 5.24, those in 5.20 to 5.23, and the record for both. The comments name attention
# classes. tests/known/forwards.py makes the rows.
_ROWS = [
    (
        "1e8f28960eda 2105a06a4aa5 b5da3e7dce50 16495bed85b3",
        "8187ea67a6d0 c60ecbc3233c 788a7cedde18 ed4d7a97a050",
        Layer(),
    ),  # Arcee, AriaText, Bamba, Cosmos3EdgeText, Csm, DeepseekOcr2Text, DiaSelf, Emu3, Ernie4_5, Ernie4_5_Moe, Ernie4_5_VLMoeText, EuroBert, Evolla, Gemma, Glm, Glm4, GradiumPhononTTS, Granite, Granite4VisionText, GraniteDoclingText, GraniteMoe, GraniteMoeShared, Helium, HiggsAudioV2, HyperCLOVAX, Jais2, Llama, Phimoe, PocketTTS, Qwen2Moe, SolarOpen, UnlimitedOcrText, Dots3NoteAudio, Nemotron, Glm4vMoeText, GlmImageText, Glm4vText, GlmOcrText
    (
        "49912a223f57 93d9bc5d50f6 f75ac25a97da",
        "453ebd8d9c4b 6de2d167ba6e c1f768e9abb3",
        Layer(tells=WINDOW, norms="q_norm k_norm"),
    ),  # Dots1, Mellum, Qwen3, Qwen3Moe, Qwen3OmniMoeThinkerText, Qwen3OmniMoeTalkerCodePredictor, Qwen3OmniMoeCode2Wav, Gemma3, T5Gemma2Self, Olmo3
    (
        "7f0cbad7ce92",
        "ba54531b8872",
        Layer(tells=f"{DROPOUT}, {SCALING}, {WINDOW_OF_CONFIG}"),
    ),  # MiniMax, Mistral, Mixtral, VoxtralRealtime, VoxtralRealtimeText
    ("a84485b836c5", "11263f9068bd", Layer(tells=WINDOW)),  # Cwm, DeepseekOcr2Vision, Ministral, Qwen2
    (
        "88b42e705859",
        "279c8976d5ff",
        Layer(
            tells=f"{DROPOUT}, {SCALING}, sliding_window=self.sliding_window if self.is_sliding else None",
            norms="q_norm k_norm",
            rotated="self.sliding_window is None or self.is_sliding",
        ),
    ),  # Exaone4, Exaone4_5_, ExaoneMoe, Kolibri1
    (
        "61e1e6c0145a",
        "03c412c371a9",
        Layer(
            arguments="hidden_states attention_mask position_ids cache position_embeddings",
            tells=f"{DROPOUT}, {SCALING}, sliding_window=self.sliding_window, position_ids=position_ids",
        ),
    ),  # PaddleOCR, Qwen2_5Omni, Qwen2_5_VL, Qwen2VL
    (
        "2a6c49756e0e 97764c01d5bc f6f67cbb4dd1",
        "f6e0d31fc9a9 05ef61efd34e 00bcf5d84f8f",
        Layer(norms="q_norm k_norm"),
    ),  # Apertus, Apertus1p5Text, HYV3, FlexOlmo, MiniMaxM2, Olmo2, Qwen3VLText, Qwen3VLMoeText
    (
        "9fc6a167cde5 6a5f9daea698",
        "780c7f577c16 3871032d22a2",
        Layer(form="latent", channels="self.qk_rope_head_dim", norm_of_v="kv_a_layernorm", rotary=BY_CONFIG),
    ),  # DeepseekV3, Glm4MoeLite, Youtu, AXK1
    (
        "a3e76c298533",
        "a704b408bb66",
        Layer(tells=f"{DROPOUT}, {SCALING}, sliding_window=self.sliding_window, softcap=self.attn_logit_softcapping"),
    ),  # Gemma2, T5GemmaSelf, VaultGemma
    (
        "58b276c53a17",
        "",
        Layer(arguments="hidden_states attention_mask position_embeddings"),
    ),  # Gte, JinaEmbeddingsV3, NomicBert
    (
        "641d4dc4019f 2af146fe00ce",
        "ff9ad4d15726 750b61498620",
        Layer(never="'its norms follow the rotation'"),
    ),  # HunYuanDenseV1, HunYuanMoEV1, HunYuanVLDenseV1, NanoChat
    (
        "8aae0feed3e2",
        "2c0ae977ede1",
        Layer(form="gated", out="self.o_proj(out * torch.sigmoid(gate))", norms="q_norm k_norm"),
    ),  # Qwen3_5, Qwen3_5Moe, Qwen3Next
    ("53aa4f65e000", "4c8e456725ad", Layer(norms="q_norm k_norm", normed="self.use_qk_norm")),  # Cohere, Glm4Moe
    (
        "cf764578b6b8",
        "29f81216a54b f7c8e7b3f052",
        Layer(
            form="shared",
            arguments="hidden_states position_embeddings attention_mask shared_kv_states cache",
            tells=WINDOW,
            norms="q_norm k_norm",
            norm_of_v="v_norm",
            reads="self.layer_type",
            stores="self.layer_type",
        ),
    ),  # Gemma4Text, Gemma4UnifiedText
    (
        "f22a6be59399",
        "044824583d41",
        Layer(
            tells=f"{DROPOUT}, {SCALING}, sliding_window=self.sliding_window, s_aux=self.sinks",
        ),
    ),  # GraniteSWA, GraniteMoeSWA
    (
        "a67b3739e5f6",
        "a08e036a77d4",
        Layer(tells="dropout=0.0, scaling=self.scaling", out="self.out_proj(out)", norms="q_layernorm k_layernorm"),
    ),  # Lfm2, Lfm2Moe
    (
        "a52d8f857032",
        "d9a697893e9c",
        Layer(form="packed", tells=f"{DROPOUT}, {SCALING}, {WINDOW_OF_CONFIG}"),
    ),  # Phi3, Phi4Multimodal
    ("828a2b508d2a", "8b27aede1da8", Layer(out="self.o_proj(self.attn_sub_norm(out))")),  # BitNet
    (
        "1eb228c3cfef",
        "5f1e93f5f6c8",
        Layer(
            arguments="hidden_states attention_mask position_ids cache output_attentions use_cache position_embeddings",
            norms="q_norm k_norm",
        ),
    ),  # Chameleon
    ("273a00ca38fd", "1b2347d19d56", Layer(tells=WINDOW, rotated="self.sliding_window is not None")),  # Cohere2
    (
        "f24b6f5d1713",
        "2509ade6cd8b",
        Layer(tells=WINDOW, rotated="self.sliding_window is not None or self.force_rope"),
    ),  # Cohere2Moe
    ("4cdcac6995dc", "d288531a4448", Layer(tells=WINDOW)),  # CohereCompass
    (
        "65b97544b97e",
        "f207ca7f46cd",
        Layer(
            form="latent",
            channels="self.qk_rope_head_dim",
            arguments="hidden_states attention_mask cache position_embeddings",
            norm_of_v="kv_a_layernorm",
        ),
    ),  # DeepseekV2
    (
        "e2670298ea55",
        "",
        Layer(
            arguments="hidden_states attention_mask position_embeddings",
            tells=WINDOW,
            norms="q_norm k_norm",
            norm_of_v="v_norm",
        ),
    ),  # EmbeddingGemma2
    (
        "2ba939c1b794",
        "ccbd8f6f3d20",
        Layer(
            tells=f"{DROPOUT}, {SCALING}, sliding_window=self.sliding_window, s_aux=self.sinks",
            norms="q_norm k_norm",
            rotated="self.sliding_window is not None",
        ),
    ),  # Flint
    (
        "33a2d1ea2516",
        "e6639e2639b4",
        Layer(
            form="shared",
            arguments="hidden_states position_embeddings attention_mask cache shared_kv_states",
            tells=WINDOW,
            norms="q_norm k_norm",
            norm_of_v="v_norm",
            reads="self.layer_type",
            stores="self.layer_type",
        ),
    ),  # Gemma3nText
    (
        "e9a5c1028302",
        "5efdd47ac739",
        Layer(tells=f"{DROPOUT}, {SCALING}, sliding_window=self.sliding_window, s_aux=self.sinks"),
    ),  # GptOss
    (
        "aadff14ec1c0",
        "6b152f8e0f09",
        Layer(
            arguments="hidden_states attention_mask cache position_embeddings",
        ),
    ),  # GraniteMoeHybrid
    (
        "773198bad169",
        "",
        Layer(tells=WINDOW, norms="q_norm k_norm"),
    ),  # LaraMini
    (
        "de2f84b106bf",
        "499b9a87c08b",
        Layer(
            rotated="self.use_rope",
            heads_first=False,
            factor=LLAMA_4_TEMPERATURE,
            never="'its norms follow the rotation' if hasattr(self, 'qk_norm') else ''",
        ),
    ),  # Llama4Text
    (
        "42ec0a09a60c",
        "7b860df2b949",
        Layer(form="latent", channels="self.qk_rope_head_dim", norm_of_v="kv_a_layernorm"),
    ),  # MiniCPM3
    (
        "67f3d876c917",
        "169d34d25c1b",
        Layer(
            arguments="hidden_states position_embeddings attention_mask position_ids cache",
            tells=f"{DROPOUT}, {SCALING}, {WINDOW_OF_CONFIG}, position_ids=position_ids",
            factor=LLAMA_4_SCALE,
        ),
    ),  # Ministral3
    (
        "9f382002722a",
        "518e282b079c",
        Layer(
            form="latent",
            channels="self.qk_rope_head_dim",
            arguments="hidden_states position_embeddings attention_mask position_ids cache",
            tells=f"{DROPOUT}, {SCALING}, position_ids=position_ids",
            norm_of_v="kv_a_layernorm",
            rotary=BY_CONFIG,
            factor=LLAMA_4_SCALE,
        ),
    ),  # Mistral4
    (
        "6d485eb10a7f",
        "",
        Layer(
            form="thirds",
            arguments="hidden_states position_embeddings attention_mask",
            tells=f"{DROPOUT}, scaling=self.head_dim ** (-0.5), sliding_window=self.sliding_window, deterministic=self.deterministic_flash_attn",
            out="self.out_drop(self.Wo(out))",
        ),
    ),  # ModernBert
    ("045118910b91", "cf290fd3392d", Layer(tells=WINDOW, out="self.out_drop(self.Wo(out))")),  # ModernBertDecoder
    (
        "19752c16408a",
        "ed0b1c4b63db",
        Layer(norms="q_norm k_norm"),
    ),  # OlmoHybrid
    (
        "4b57de10f07e",
        "5fab9f844e19",
        Layer(
            out="self.dense(out)",
            norms="q_layernorm k_layernorm",
            normed="self.qk_layernorm",
            channels="self.rotary_ndims",
        ),
    ),  # Phi
    ("b57e123d687e", "08f9e467153f", Layer(out=RESIDUAL_DROPOUT)),  # SeedOss
    ("8d7b8ea1141f", "c46cc27d4c37", Layer(tells=WINDOW, rotated="self.use_rope")),  # SmolLM3
    (
        "986f69074353",
        "52553d407c7d",
        Layer(
            arguments="hidden_states attention_mask position_ids cache output_attentions use_cache position_embeddings",
            tells=f"{DROPOUT}, {SCALING}, position_ids=position_ids",
            norms="q_layernorm k_layernorm",
            normed="self.qk_layernorm",
            channels="self.rotary_ndims",
        ),
    ),  # StableLm
    (
        "8d67b3b0d313",
        "a84875bb8a06",
        Layer(tells=f"{DROPOUT}, {SCALING}, {WINDOW_OF_CONFIG}", out=RESIDUAL_DROPOUT),
    ),  # Starcoder2
    (
        "8910ce4dcecd",
        "",
        Layer(arguments="hidden_states position_embeddings attention_mask", tells=WINDOW),
    ),  # Ultrabert
    (
        "",
        "729656641104",
        Layer(
            form="shared",
            arguments="hidden_states position_embeddings attention_mask cache shared_kv_states",
            tells=WINDOW,
            norms="q_norm k_norm",
            norm_of_v="v_norm",
            reads="self.kv_shared_layer_index",
            stores="self.layer_idx",
        ),
    ),  # Gemma3nText, until 5.22
    (
        "",
        "9538c8288b15",
        Layer(
            arguments="hidden_states position_embeddings attention_mask position_ids cache",
            tells=f"{DROPOUT}, {SCALING}, {WINDOW_OF_CONFIG}",
            factor=LLAMA_4_SCALE,
        ),
    ),  # Ministral3, until 5.22
    (
        "",
        "e96b776975c6",
        Layer(
            form="latent",
            channels="self.qk_rope_head_dim",
            arguments="hidden_states position_embeddings attention_mask position_ids cache",
            norm_of_v="kv_a_layernorm",
            rotary=BY_CONFIG,
            factor=LLAMA_4_SCALE,
        ),
    ),  # Mistral4, until 5.22
]


def _before(record: Layer) -> Layer:
    """Returns the record for transformers 5.20 to 5.23, where the cache had another name and got no keywords."""
    arguments, factor = (re.sub(r"\bcache\b", "past_key_values", words) for words in (record.arguments, record.factor))
    return record._replace(arguments=arguments, factor=factor, update="")


FORWARDS = {text: record for texts, _, record in _ROWS for text in texts.split()}
FORWARDS |= {text: _before(record) for _, texts, record in _ROWS for text in texts.split()}
