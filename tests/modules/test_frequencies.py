"""Tests torch_rope.frequencies: frozen values of real models, configs, and errors. Compares frequencies, modules and
positions that torch_rope makes from a config with those of transformers.

The frozen values were computed to 40 digits with mpmath, by the formulas of the papers, and rounded to double.
torch_rope computes in float64, and transformers in float32, by the same steps. `roundings` bounds the error of these
steps for each frequency. So it bounds the distance of torch_rope from the frozen values, and of transformers from
torch_rope.
"""

import copy
import importlib
import inspect
import math
import random
import re
import sys

import pytest
import torch
from cases import EXHAUSTIVE, default_dtype, needed

import torch_rope
from torch_rope import frequencies, multimodal

transformers = needed("transformers")

from transformers import AutoConfig, GlmConfig, LlamaConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.core]

U32, U64 = 2.0**-24, 2.0**-53  # unit roundoffs

# The divisors of Phi-3.5-mini, to two decimals. Its config.json has them as float32.
SHORT = [1, 1.02, 1.03, 1.03, *[1.05] * 5, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17, 1.29, 1.34, 1.68, 1.79, 1.82, 1.85, 1.88]
SHORT += [1.91, 1.94, 1.99, *[2.02] * 6, *[2.03] * 9, 2.08, 2.09, 2.19, 2.22, 2.59, 2.73, 2.75, 2.84]
LONG = [1.08, 1.11, 1.14, 1.34, 1.59, 1.6, 1.62, 2.62, 3.23, 3.23, 4.79, 7.4, 7.7, 9.09, 12.2, 17.67, 24.46, 28.57]
LONG += [30.42, 30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21, 60.14, 62.61, 62.62, 62.71, 63.14]
LONG += [63.14, 63.77, 63.93, 63.96, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84]


def model(model_type, hidden_size, heads, scaling=None, **more):
    """Returns the entries of a config.json that matter. scaling: its rope_scaling, if it has one."""
    sizes = {"model_type": model_type, "hidden_size": hidden_size, "num_attention_heads": heads}
    return sizes | more | ({"rope_scaling": scaling} if scaling else {})


def object_of(config: dict):
    """Returns the config object for the contents of a config.json. transformers writes into nested dicts: it gets a copy."""
    return AutoConfig.for_model(**copy.deepcopy(config))


def rescaled(config, **changes):
    """Returns a config with changes to its rope_scaling."""
    return config | {"rope_scaling": config["rope_scaling"] | changes}


TRAINED, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
LLAMA_2 = model("llama", 4096, 32)
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, TRAINED: 8192}
LLAMA_3_1 = model("llama", 4096, 32, LLAMA_3, rope_theta=500000.0) | {LONGEST: 131072}
PYTHIA = model("gpt_neox", 768, 8, rotary_pct=0.25, rotary_emb_base=10000)
PHI_3_5 = model("phi3", 3072, 32, {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}, rope_theta=10000.0)
PHI_3_5 |= {LONGEST: 131072, TRAINED: 4096}
PHI_MOE = rescaled(PHI_3_5, **{TRAINED: 4096}) | {"model_type": "phimoe"}
QWEN_2_5 = {LONGEST: 131072, "rope_theta": 1000000.0}
QWEN_2_5 |= model("qwen2", 3584, 28, {"type": "yarn", "factor": 4.0, TRAINED: 32768})
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, TRAINED: 4096}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK_V3 = model("deepseek_v3", 7168, 128, YARN, qk_rope_head_dim=64, rope_theta=10000) | {LONGEST: 163840}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, TRAINED: 4096, "truncate": False}
GPT_OSS = model("gpt_oss", 2880, 64, YARN, head_dim=64, rope_theta=150000) | {LONGEST: 131072}
GEMMA_3 = {"model_type": "gemma3_text", "hidden_size": 2560, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
GEMMA_3 = {"model_type": "gemma3", "text_config": GEMMA_3}
ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA_4 = model("gemma4_text", 2560, 8, head_dim=256, global_head_dim=512, num_hidden_layers=6, rope_parameters=ROPE)
GEMMA_4 |= {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
GEMMA_4 = {"model_type": "gemma4", "text_config": GEMMA_4}
DYNAMIC = model("llama", 4096, 32, {"type": "dynamic", "factor": 2.0}, rope_theta=1000000)  # like InternLM2.5
DYNAMIC |= {LONGEST: 32768}
HUNYUAN = model("hunyuan_v1_dense", 4096, 32, {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}, rope_theta=10000.0)
HUNYUAN |= {"head_dim": 128, LONGEST: 32768}


FULL, SLIDING = {"layer_type": "full_attention"}, {"layer_type": "sliding_attention"}
# What from_config must give: the number of frequencies, some of them by index, and the attention_factor.
REAL = {
    "Llama 2": (LLAMA_2, {}, 64, 1, {0: 1, 1: 0.8659643233600653, 63: 0.00011547819846894582}),
    "Pythia": (PYTHIA, {}, 12, 1, {0: 1, 1: 0.46415888336127786, 11: 0.00021544346900318837}),
    # 28 is the last one that is kept, 35 the first one that is divided by 8.
    "Llama 3.1": (
        *(LLAMA_3_1, {}, 64, 1),
        {0: 1, 28: 0.003211445994752591, 29: 0.0021665707635033587, 32: 0.0005248461609929547}
        | {34: 0.0001785078127679964, 35: 9.556212353964683e-05, 63: 3.068925988914511e-07},
    ),
    "Phi-3.5-mini, short": (
        *(PHI_3_5, {}, 48, 1.1902380714238083),
        {1: 0.8092197894784494, 16: 0.03463872263890134, 47: 4.265942459959818e-05},
    ),
    "Phi-3.5-mini, long": (
        *(PHI_3_5, {"seq_len": 4097}, 48, 1.1902380714238083),
        {16: 0.0018976242165219864, 47: 1.8684880608090506e-06},
    ),
    # 23 is the last one that is kept, 40 the first one that is divided by 4.
    "Qwen2.5, YaRN": (
        *(QWEN_2_5, {}, 64, 1.138629436111989),
        {0: 1, 23: 0.006978305848598663, 24: 0.005375321490790102, 39: 6.490394320837029e-05}
        | {40: 4.445698525097307e-05, 63: 3.102344401879299e-07},
    ),
    "DeepSeek-V3": (
        *(DEEPSEEK_V3, {}, 32, 1),
        {0: 1, 10: 0.05623413251903491, 11: 0.03900692656714386, 16: 0.0055, 22: 0.00017782794100389227}
        | {23: 3.33380358040831e-05, 31: 3.33380358040831e-06},
    ),
    "gpt-oss": (
        *(GPT_OSS, {}, 32, 1.3465735902799727),
        {0: 1, 8: 0.050813274815461475, 9: 0.03170569618466377, 12: 0.006794959489732218}
        | {17: 0.00012931870124506273, 18: 3.8308812373753384e-05, 31: 3.0235114281192144e-07},
    ),
    "Gemma 3, full": (GEMMA_3, FULL, 128, 1, {0: 0.125, 1: 0.11221089155591428, 127: 1.3924673249935028e-07}),
    "Gemma 4, full": (GEMMA_4, FULL, 256, 1, {1: 0.9474635256553754, 63: 0.033376246942920386, 64: 0, 255: 0}),
    "Gemma 4, sliding": (GEMMA_4, SLIDING, 128, 1, {1: 0.930572040929699, 127: 0.00010746078283213175}),
    "NTK, short": (DYNAMIC, {"seq_len": 32768}, 64, 1, {1: 0.8058421877614819, 63: 1.2409377607517195e-06}),
    "NTK, long": (DYNAMIC, {"seq_len": 65536}, 64, 1, {1: 0.7919114945129184, 63: 4.136459202505732e-07}),
    "Hunyuan": (HUNYUAN, {}, 64, 1, {1: 0.7760343630469744, 32: 0.000299357729472049, 63: 1.1547819846894582e-07}),
}


def roundings(kind: str, arguments: dict, inv_freq: torch.Tensor) -> torch.Tensor:
    """Returns how many roundings each frequency may be off by, relative to itself: 4 for the first, 20 if -ln f is 16.

    f = 1 / base ** e. The rounding of e moves f by e ln base = -ln f roundings, that of base by e (at most one), that
    of the power by two (an ulp), and the division by one. Later steps multiply or divide by one or two rounded numbers.
    """
    if kind in ("default", "ntk", "dynamic"):  # f, or f with another base
        return 4 - inv_freq.log()
    f = frequencies.default(arguments.get("rotary_dim") or arguments["head_dim"], arguments["base"]).inv_freq
    of_f = 4 - f.log()
    # The ramp of yarn and llama3 is a difference divided by a difference, so its error is absolute. It moves the result
    # by that fraction of f, and f is up to factor times the result.
    if kind == "yarn":  # (i - low) / (high - low), with low <= rotary_dim / 2, or all frequencies are kept
        turns = arguments.get("beta_fast", 32) / arguments.get("beta_slow", 1)
        low = max(math.log(arguments["base"]) / math.log(turns), 1)  # at least low / (high - low)
        return of_f + 6 + (low + 5) * f / inv_freq
    if kind == "llama3":  # (turns - low) / (high - low), with turns <= high
        low, high = arguments["low_freq_factor"], arguments["high_freq_factor"]
        return of_f + 6 + (high / (high - low) * (of_f + 4) + 2) * f / inv_freq
    return of_f + 2


def assert_same(a: frequencies.Frequencies, b: frequencies.Frequencies):
    assert torch.equal(a.inv_freq, b.inv_freq) and a.attention_factor == b.attention_factor


@pytest.mark.parametrize("config, of, count, factor, values", REAL.values(), ids=REAL)
def test_a_real_model_has_its_frozen_frequencies(config, of, count, factor, values, capfd, recwarn):
    """The config stays as it is, and nothing is logged. Torch's default device and dtype do not matter."""
    theirs, before = object_of(config), copy.deepcopy(config)
    as_dict, _ = theirs.to_dict(), capfd.readouterr()
    with default_dtype(torch.float16), torch.device("meta"):
        ours = frequencies.from_config(config, **of)
    assert_same(frequencies.from_config(theirs, **of), ours)
    assert config == before and theirs.to_dict() == as_dict and capfd.readouterr() == ("", "") and not recwarn.list
    assert ours.inv_freq.shape == (count,) and ours.inv_freq.dtype == torch.float64
    kind, arguments = frequencies.parse(config, of.get("layer_type"))
    allowed = U64 * roundings(kind, arguments, ours.inv_freq) * ours.inv_freq
    assert [i for i, value in values.items() if abs(ours.inv_freq[i] - value) > allowed[i]] == []
    assert type(ours.attention_factor) is float and ours.attention_factor == pytest.approx(factor, rel=4 * U64, abs=0)


# What published configs say of the rotation, the base, and the number of channels that their models rotate.
PUBLISHED = [
    (model("llama", 2048, 16, rope_interleaved=False, rope_theta=1e5), 1e5, 128),  # SmolLM2
    (model("minimax_m2", 2048, 16, head_dim=128, rotary_dim=64, rope_theta=5e6), 5e6, 64),
    (model("minimax_m3_vl_text", 2048, 16, partial_rotary_factor=0.5, rotary_dim=64, rope_theta=5e6), 5e6, 64),
    (model("cohere2", 2048, 16, rotary_pct=1.0, position_embedding_type="rope_gptj"), 1e4, 128),  # Command R7B
    (model("hunyuan_v1_dense", 2048, 16, head_dim=128, use_rotary_pos_emb=True), 1e4, 128),
    (model("modernbert", 768, 12, local_rope_theta=1.6e5, position_embedding_type="sans_pos"), 1.6e5, 64),  # mmBERT
    (model("nomic_bert", 768, 12, rotary_emb_base=1000, rotary_emb_interleaved=False), 1e3, 64),
    ({"model_type": "gptj", "rotary": True, "rotary_dim": 64}, 1e4, 64),
    (model("step3p5", 2048, 16, head_dim=128, rope_theta=5e6, partial_rotary_factors=[0.5] * 45), 5e6, 64),
]


@pytest.mark.parametrize("config, base, rotary_dim", PUBLISHED, ids=str)
def test_a_published_config_is_read(config, base, rotary_dim):
    for each in (config, object_of(config)):
        found = torch_rope.RotaryEmbedding.from_config(each)
        assert (found.base, found.rotary_dim) == (base, rotary_dim)


PARTLY = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}
# Pairs of configs that mean the same.
SAME = {
    "older type of Phi-3": (PHI_3_5, rescaled(PHI_3_5, type="yarn")),
    "sections": (model("qwen2_vl", 256, 4), model("qwen2_vl", 256, 4, {"type": "mrope", "mrope_section": [9] * 3})),
    "null": (LLAMA_2, LLAMA_2 | dict.fromkeys(("rope_scaling", "head_dim", "text_config"))),
    "names of GPT-NeoX": (PYTHIA, model("gpt_neox", 768, 8, rope_parameters=PARTLY)),
    "mscale": (rescaled(PHI_3_5, attention_factor=1.25), rescaled(PHI_MOE, short_mscale=1.25, long_mscale=1.25)),
    "of YaRN": (HUNYUAN, rescaled(HUNYUAN, beta_fast=32, beta_slow=1, mscale=1.0)),
    "of no matter": (LLAMA_2, LLAMA_2 | dict.fromkeys(("rotary_base", "rop_scaling", "mscale"), 8)),
    "max_position": (DYNAMIC, rescaled(DYNAMIC, original_max_position_embeddings=4096)),  # as transformers scales
    "outer": (LLAMA_2, {"model_type": "unheard_of", "text_config": LLAMA_2}),
    "architecture": (DEEPSEEK_V3, DEEPSEEK_V3 | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}),
    "remote DeepSeek": (DEEPSEEK_V3, DEEPSEEK_V3 | {"model_type": "kimi_k2"}),
    "remote InternLM": (DYNAMIC, DYNAMIC | {"model_type": "internlm2", "bias": False}),
    "remote Ling": (model("glm", 64, 4, head_dim=16), model("ling", 64, 4, partial_rotary_factor=0.5, rope_theta=1e4)),
}


@pytest.mark.parametrize("one, other", SAME.values(), ids=SAME)
def test_configs_that_mean_the_same_give_the_same_frequencies(one, other):
    assert_same(frequencies.from_config(one), frequencies.from_config(other))


SIZE = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 4}
TYPES = {"head_dim": 64, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
SCALED = TYPES | {"rope_theta": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "rope_scaling": YARN}
THETAS = SIZE | {"model_type": "granite_swa", "layer_rope_theta": [7.0, 0, 8.0, 7.0]}
OWN = GEMMA_4["text_config"] | {"per_layer_config": {"05": {"head_dim": 128}}}  # as transformers writes it
STEP = TYPES | {"model_type": "step3p5", "rope_theta": [1e4, 5e6], "partial_rotary_factors": [1.0, 0.5]}
LAYERS = [
    (THETAS, [7.0, None, 8.0, 7.0]),
    (SIZE | {"model_type": "cohere2"}, [1e4, 1e4, 1e4, None]),
    (TYPES | {"model_type": "exaone4", "sliding_window": None}, [1e4] * 2),
    (SIZE | {"model_type": "exaone4", "sliding_window_pattern": 2}, [1e4, None] * 2),
    (SIZE | {"model_type": "smollm3", "no_rope_layers": [0, 1, 1, 1]}, [None, 2e6, 2e6, 2e6]),
    (THETAS | {"model_type": "muse_glimmer_text", "rope_theta": 5.0}, [5.0, None, 5.0, 5.0]),
    (SIZE | {"model_type": "mllama_text_model", "cross_attention_layers": [1, 2]}, [5e5, None, None, 5e5]),
    (SIZE | {"model_type": "modernbert"}, [160000.0, 1e4, 1e4, 160000.0]),
    (SIZE | {"model_type": "qwen3_next", "full_attention_interval": 2}, [None, ("default", 16, 1e4)] * 2),
    (TYPES | {"model_type": "mimo_v2_flash"}, [("default", 21, 1e4), ("default", 21, 5e6)]),
    (V4, [("default", 64, 1e4), ("yarn", 64, 160000.0), ("yarn", 64, 160000.0)]),
    (STEP | {"rope_scaling": LLAMA_3}, [("default", 64, 1e4), ("llama3", 32, 5e6)]),
    (OWN, [("default", 256, 1e4)] * 5 + [("proportional", 128, 1e6)]),
    # transformers gives the sliding layers of OLMo 3 its default base.
    (SCALED | {"model_type": "olmo3", "head_dim": 128}, [("default", 128, 5e5), ("linear", 128, 50.0)]),
    (SCALED | {"model_type": "gemma3_text", "rope_local_base_freq": 5.0}, [("default", 64, 5.0), ("linear", 64, 50.0)]),
]


@pytest.mark.parametrize("config, layers", LAYERS, ids=str)
def test_a_layer_has_its_own_frequencies_or_does_not_rotate(config, layers):
    """Each layer is the kind, the number of channels and the base, or the base alone, or None if it does not rotate."""
    for layer, expected in enumerate(layers):
        assert frequencies.rotates(config, layer) == (expected is not None)
        if expected is None:
            with pytest.raises(ValueError, match="rotat"):
                frequencies.from_config(config, layer=layer)
            continue
        found = frequencies.parse(config, layer=layer)
        dim, base = list(found[1].values())[:2]
        assert expected in (base, (found[0], dim, base))
        if name := config.get("layer_types", {layer: None})[layer]:
            assert found == frequencies.parse(config, name, layer=layer) == frequencies.parse(config, name)
    for layer in (-1, len(layers), True):
        with pytest.raises(ValueError, match=f"layer is {layer} but must be the index of a layer"):
            frequencies.rotates(config, layer)
    assert frequencies.from_config(V4, layer=1).attention_factor == 1


def test_pairing_follows_from_model_type_or_architectures():
    names = ("DeepseekV3ForCausalLM", "Glm4vForConditionalGeneration", "Qwen2VLModel", "KimiModel")
    kimi, glm, qwen, other = ({"model_type": "unheard_of", "architectures": [name]} for name in names)
    half_split = [LLAMA_2, PYTHIA, GEMMA_4, qwen, kimi | {"rope_interleave": False}]
    interleaved = [DEEPSEEK_V3, kimi, {"text_config": kimi}, glm]
    assert [*map(frequencies.is_interleaved, half_split + interleaved)] == [False] * 5 + [True] * 4
    for config in (other, {"rope_theta": 1e4}, LLAMA_2 | {"rope_interleave": True}):
        with pytest.raises(ValueError, match="pass interleaved= to RotaryEmbedding.from_config$"):
            frequencies.is_interleaved(config)


def test_llama3_has_no_ramp_if_its_two_factors_are_equal():
    """Llama 4 Scout keeps the frequencies of pairs that make more turns than this factor, and divides the others."""
    sizes = {"factor": 16.0, "original_max_position": 8192, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    found, f = frequencies.llama3(128, 5e5, **sizes).inv_freq, frequencies.default(128, 5e5).inv_freq
    kept = 8192 * f / (2 * math.pi) > 1
    assert torch.equal(found, torch.where(kept, f, f / 16)) and kept.any() and not kept.all()


def test_partial_rotary_dim_rounds_down_and_may_be_odd():
    """An odd rotary_dim stays odd in the exponent, and its last channel has a frequency too."""
    assert [frequencies.partial_rotary_dim(80, part) for part in (1.0, 0.25, 0.4, 0.01875)] == [80, 20, 32, 1]
    assert frequencies.partial_rotary_dim(64, 0.3) == 19
    expected = [1, 0.37926901907322497, 0.0004281332398719394, 0.00016237767391887218]
    found = frequencies.default(19, 10000).inv_freq[[0, 1, 8, 9]]
    assert found.tolist() == pytest.approx(expected, rel=20 * U64, abs=0)


# ---- errors ----

ABSENT, LOST = "but must be absent", "rope_theta is None but must be a positive number; set all at once, as in config.r"
REMOTE, NO_ROPE = LLAMA_2 | {"model_type": "unheard_of", "rope_theta": 1e4}, "but must be that of a model that rotates"
NEW = {"rope_type": "linear", "factor": 8.0}
ERRORS = [
    (rescaled(QWEN_2_5, type="alibi"), "rope_type is 'alibi' but must be one of 'default', 'linear', 'd"),
    (
        REMOTE | {"rope_scaling": {"type": "ntk", "factor": 8.0}},
        "rope_type is 'ntk' but must be one of 'default', 'lin",
    ),
    (REMOTE | {"rope_scaling": NEW | {"base": 1}}, f"base is 1 {ABSENT}, because rope_type 'linear' does not have it"),
    (REMOTE | {"rope_scaling": [8.0]}, "rope_parameters is [8.0] but must be a dict"),
    (REMOTE | {"rope_theta": None}, LOST),
    (REMOTE | {"hidden_size": None}, "head_dim is None but must be an integer, or hidden_size and num_attention_heads"),
    (
        REMOTE | {"rotary_dim": 64, "partial_rotary_factor": 0.25},
        "partial_rotary_factor is 0.25 but must be such that 64",
    ),
    (REMOTE | {"position_embedding_type": "alibi"}, f"position_embedding_type is 'alibi' {NO_ROPE}"),
    (rescaled(DYNAMIC, type="linear", factor=None), "factor is None but must be given for rope_type 'linear'"),
    (rescaled(QWEN_2_5, truncate=False, type="llama3"), "transformers refuses the config: KeyError"),
    (rescaled(PHI_MOE, short_mscale=1, long_mscale=2), "short_mscale is 1 but must be equal to long_mscale, w"),
    (LLAMA_2 | {"hidden_size": "4096"}, "transformers refuses the config: "),
    (LLAMA_2 | {"rope_theta": None}, LOST),
    (LLAMA_2 | {"model_type": "falcon", "alibi": True}, f"alibi is True {NO_ROPE}"),
    ({"model_type": "bert"}, f"model_type is 'bert' {NO_ROPE}: the config has no rope_p"),
    ({"model_type": "qwen2_5_omni"}, f"model_type is 'qwen2_5_omni' {NO_ROPE}: the conf"),
    ({"model_type": "musicflamingo"}, "rope_parameters is {'rope_theta': 1200.0, "),
    ({"model_type": "dinov3_vit"}, f"patch_size is 16 {ABSENT}: images have"),
    ("config.json", "config is 'config.json' but must be a dict, or a config object of transformers"),
    (GEMMA_3, "layer_type is None but must be one of 'full_attention', 'sliding_attention'"),
    (LLAMA_2, "layer_type is 'full_attention' but must be None, because all layers are of one type", "full_attention"),
    (SIZE | {"model_type": "cohere2"}, "layer_type is 'full_attention' but must be that of a layer", "full_attention"),
    (THETAS, "layer is None but must be the index of a layer, because layers differ", "sliding_attention"),
    (THETAS | {"layer_rope_theta": [7.0, 0]}, "layer_rope_theta is [7.0, 0] but must be a list of 4 or more values"),
]
UNKNOWN = ("rotary_base", "yarn_factor", "mscale", "use_dynamic_ntk", "ntk_alpha", "use_xpos", "rotary", "rope_ratio")
UNKNOWN += ("no_rope_layer_interval", "position_scale", "axes_dims", "rotary_emb_base", "rope_tetha")
NO_THETAS = ("10000", math.nan, -1, 0, True, [])
ERRORS += [
    (REMOTE | {name: 8}, f"{name} is 8 {ABSENT}, because its meaning is not known; pass head") for name in UNKNOWN
]
ERRORS += [(LLAMA_2 | {"rope_theta": v}, f"rope_theta is {v!r} but must be a positive number") for v in NO_THETAS]


for family in "qwen3", "glm4", "gpt_neox":
    config = transformers.CONFIG_MAPPING[family]()
    config.rope_parameters = dict(NEW)  # loses the base
    config.standardize_rope_params()  # as config.rope_scaling = ... does, too
    ERRORS += [(config, LOST), (config.to_dict(), LOST)]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: str(case)[:200])
def test_a_wrong_config_raises_an_error(case):
    config, message, *layer_type = case
    with pytest.raises(ValueError) as error:
        frequencies.from_config(config, *layer_type)
    assert str(error.value).startswith("torch_rope.frequencies.from_config: " + message)


# ---- compared with transformers ----


def modeling_of(config):
    """Returns the modeling file of a config object."""
    package = type(config).__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")


def tables_of_module(config):
    """Yields (layer_type, inv_freq, attention_factor) for each table of the rotary modules of a class of configs."""
    for cls in vars(modeling_of(config)).values():
        if not hasattr(cls, "compute_default_rope_parameters"):
            continue
        annotation = str(inspect.signature(cls).parameters["config"].annotation)
        if type(config).__name__ not in re.findall(r"\w+", annotation):
            continue
        built = cls(config)
        for name, inv_freq in built.named_buffers():
            if name.endswith("inv_freq") and "original" not in name:
                prefix = name.removesuffix("inv_freq")
                yield prefix.removesuffix("_") or None, inv_freq, getattr(built, f"{prefix}attention_scaling")


def assert_near(config, layer_type, seq_len, theirs: torch.Tensor, attention_factor: float):
    """Asserts that frequencies of transformers and those that torch_rope makes from the config differ by rounding."""
    ours = frequencies.from_config(config, layer_type, seq_len)
    assert theirs.dtype == torch.float32 and theirs.shape == ours.inv_freq.shape
    allowed = U32 * roundings(*frequencies.parse(config, layer_type), ours.inv_freq) * ours.inv_freq
    assert ((theirs.double() - ours.inv_freq).abs() <= allowed).all()
    assert ours.attention_factor == pytest.approx(attention_factor, rel=4 * U64, abs=0)


# Their models do not rotate by default, rotate by several axes, or have an outer config with tables of its own.
REFUSED = {"bamba", "efficientloftr", "ernie4_5_vl_moe_text", "esm", "granitemoehybrid", "musicflamingo", "zamba2"}
NAMES = sorted({*transformers.CONFIG_MAPPING} - {"llama", "glm"})
OTHER_KINDS = [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2.0}, LLAMA_3, YARN, {}]


@pytest.mark.parametrize(
    "name", ["llama", "glm", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES)]
)
def test_a_family_has_the_frequencies_of_transformers(name):
    """As an object, a dict, and the model_type alone; by default, and with each kind and a part of the channels."""
    try:
        config = transformers.CONFIG_MAPPING[name]()
        assert list(tables_of_module(config))
    except Exception:
        pytest.skip("it has no default config, or no rotary module with one axis")
    forms = [config, config.to_dict(), {"model_type": name}]
    for kind in OTHER_KINDS:
        forms += [changed := copy.deepcopy(config)]
        rope = getattr(changed, "rope_parameters", {})
        for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
            parameters.update(kind, partial_rotary_factor=0.5)
        forms += [changed.to_dict()]
    for form in forms:
        try:
            theirs = object_of(form) if isinstance(form, dict) else form
            tables = list(tables_of_module(theirs))
        except Exception:  # transformers refuses it
            tables = [(None, None, None)]
        for layer_type, inv_freq, attention_factor in tables:
            of_images = hasattr(theirs, "patch_size") and not hasattr(theirs, "vocab_size")
            if inv_freq is None or name in REFUSED or of_images:
                with pytest.raises(ValueError):
                    frequencies.from_config(form, layer_type)
            else:
                assert_near(form, layer_type, None, inv_freq, attention_factor)
                assert frequencies.is_interleaved(form) in (True, False)


def test_a_model_that_reads_its_config_otherwise_is_an_error_that_shows_both(monkeypatch):
    f = frequencies.from_config(LLAMA_2).inv_freq.float()
    for theirs, what in (((f, 1.5), "attention_factor"), ((1.5 * f, 1.0), "the frequency of pair 0")):
        compute = staticmethod(lambda config, found=theirs: found)
        monkeypatch.setattr(LlamaRotaryEmbedding, "compute_default_rope_parameters", compute)
        with pytest.raises(ValueError, match=f"{what} is 1.0 but must be 1.5, as in LlamaRotaryEmbedding of tr"):
            frequencies.from_config(LLAMA_2)


def test_a_dict_needs_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="must be installed to read a dict; pass"):
        frequencies.from_config({"model_type": "llama"})
    assert not frequencies.is_interleaved({"model_type": "llama"})


def draw(kind: str, rng: random.Random) -> tuple[dict, dict]:
    """Returns random sizes and rope_parameters of a config."""
    head_dim, original = 4 * rng.randint(4, 64), rng.randint(128, 2**18)
    part = rng.choice([1.0, 0.5] if kind == "yarn" else [1.0, 0.25, 0.5, rng.uniform(0.25, 1)])  # yarn: not odd
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    sizes["max_position_embeddings"] = original * rng.randint(1, 64)
    rope = {"rope_type": kind, "rope_theta": 10 ** rng.uniform(2, 7.5), "partial_rotary_factor": part}
    if kind != "default":
        rope["factor"] = rng.choice([1.0, rng.uniform(1, 64)])
    if kind == "yarn":
        fast = rng.uniform(4, 64)
        rope |= {"beta_fast": fast, "beta_slow": fast / rng.uniform(2, 32), "truncate": rng.random() < 0.5}
        rope |= rng.choice([{}, {"mscale": rng.random(), "mscale_all_dim": rng.random()}, {"mscale": 0.7}])
    if kind == "longrope":
        pairs = range(0, int(head_dim * part), 2)
        rope |= {name: [rng.uniform(1, 64) for _ in pairs] for name in ("short_factor", "long_factor")}
    if kind == "llama3":
        low = rng.uniform(0.5, 4)
        rope |= {"low_freq_factor": low, "high_freq_factor": low * rng.uniform(1.5, 8)}
    if kind in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = original
    if kind in ("yarn", "longrope"):
        rope |= rng.choice([{}, {"attention_factor": rng.uniform(0.5, 2)}, {"factor": None}])
    return sizes, rope


@pytest.mark.parametrize("kind", [*ROPE_INIT_FUNCTIONS, "default"])
def test_random_parameters_give_the_frequencies_of_transformers(kind):
    """GLM's formula of the kind default serves parts of heads, also with an odd rotary_dim."""
    rng, config_of = random.Random(kind), GlmConfig if kind == "default" else LlamaConfig
    make = ROPE_INIT_FUNCTIONS.get(kind, GlmRotaryEmbedding.compute_default_rope_parameters)
    for _ in range(60 if EXHAUSTIVE else 15):
        sizes, rope = draw(kind, rng)
        config = config_of(**sizes, rope_parameters=dict(rope))
        seq_len = rng.choice([None, rng.randint(1, 2**20)])
        assert_near(config, None, seq_len, *make(config, "cpu", seq_len=seq_len))
        # The same parameters in the older form rope_scaling.
        scaling = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
        outer = {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        older = {"model_type": config.model_type, **sizes, **outer, "rope_scaling": scaling}
        assert_same(frequencies.from_config(older, seq_len=seq_len), frequencies.from_config(config, seq_len=seq_len))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe", "glm_ocr", "qwen3_5"])
def test_positions_of_text_and_images_give_the_tables_of_transformers(name):
    config = transformers.CONFIG_MAPPING[name]().text_config
    names = [n for n in vars(modeling_of(config)) if n.endswith("RotaryEmbedding") and "Vision" not in n]
    theirs = getattr(modeling_of(config), max(names, key=len))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    positions, (q, k) = torch.randint(0, 100, (3, 2, 7)), torch.randn(2, 2, 4, 7, head_dim)
    expected = modeling_of(config).apply_rotary_pos_emb(q, k, *theirs(config)(q, positions))
    inv_freq, attention_factor, interleaved = multimodal.from_config(config)
    outs = torch_rope.axial_cos_sin(positions, inv_freq, attention_factor=attention_factor)
    found = torch_rope.rotate_qk(q.transpose(1, 2), k.transpose(1, 2), *outs, interleaved=interleaved)
    assert all((a.transpose(1, 2) - b).abs().max() < 1e-4 for a, b in zip(found, expected, strict=True))
