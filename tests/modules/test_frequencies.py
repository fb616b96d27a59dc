"""Tests torch_rope.frequencies: frozen values of real models, configs, and errors. tests/integrations/test_configs.py
compares with transformers."""

import math

import pytest
import torch
from cases import needed
from real_configs import (
    DEEPSEEK_V3,
    DYNAMIC,
    GEMMA_3,
    GEMMA_4,
    HUNYUAN,
    LLAMA_2,
    LLAMA_3,
    PHI_3_5,
    PYTHIA,
    QWEN_2_5,
    REAL,
    U64,
    YARN,
    assert_same,
    model,
    rescaled,
    roundings,
)

from torch_rope import frequencies

needed("transformers")
pytestmark = [pytest.mark.cpu, pytest.mark.core]


@pytest.mark.parametrize("config, layer_type, seq_len, count, values, factor", REAL.values(), ids=REAL)
def test_a_real_model_has_its_frozen_frequencies(config, layer_type, seq_len, count, values, factor):
    ours = frequencies.from_config(config, layer_type, seq_len)
    assert ours.inv_freq.shape == (count,) and ours.inv_freq.dtype == torch.float64
    kind, arguments = frequencies.parse(config, layer_type)
    allowed = U64 * roundings(kind, arguments, ours.inv_freq) * ours.inv_freq
    assert [i for i, value in values.items() if abs(ours.inv_freq[i] - value) > allowed[i]] == []
    assert type(ours.attention_factor) is float and ours.attention_factor == pytest.approx(factor, rel=4 * U64, abs=0)


PARTLY = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}
# Pairs of configs that mean the same.
SAME = {
    "older type of Phi-3": (PHI_3_5, rescaled(PHI_3_5, type="yarn")),
    "sections": (model("qwen2_vl", 256, 4), model("qwen2_vl", 256, 4, {"type": "mrope", "mrope_section": [9] * 3})),
    "null": (LLAMA_2, LLAMA_2 | dict.fromkeys(("rope_scaling", "head_dim", "text_config"))),
    "names of GPT-NeoX": (PYTHIA, model("gpt_neox", 768, 8, rope_parameters=PARTLY)),
    "mscale": (rescaled(PHI_3_5, attention_factor=1.25), rescaled(PHI_3_5, short_mscale=1.25, long_mscale=1.25)),
    "of YaRN": (HUNYUAN, rescaled(HUNYUAN, beta_fast=32, beta_slow=1, mscale=1.0)),
    "of no matter": (LLAMA_2, LLAMA_2 | {"rope_full_precision": True, "rope_interleave": False, "use_logn_attn": True}),
    "max_position": (DYNAMIC, rescaled(DYNAMIC, original_max_position_embeddings=4096)),  # as transformers scales
    "outer": (LLAMA_2, {"model_type": "unheard_of", "text_config": LLAMA_2}),
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


def test_default_device_and_dtype_of_torch_do_not_matter():
    expected = frequencies.from_config(PHI_3_5)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert_same(frequencies.from_config(PHI_3_5), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- errors ----

ABSENT, LOST = "but must be absent", "rope_theta is None but must be given, as it is in each config of llama; set all"
INSTEAD = "but must be one that the installed transformers knows; pass head_dim, base, interleaved, kind"
NEW = {"rope_type": "linear", "factor": 8.0}
ERRORS = [
    (rescaled(QWEN_2_5, type="alibi"), "rope_type is 'alibi' but must be one of 'default', 'linear', 'n"),
    (rescaled(QWEN_2_5, base=1), f"base is 1 {ABSENT}, because rope_type 'yarn' does not have it"),
    (rescaled(QWEN_2_5, factor="4"), "factor is '4' but must be a number"),
    (rescaled(DYNAMIC, type="linear", factor=None), "factor is None but must be given for rope_type 'linear'"),
    (rescaled(PHI_3_5, short_mscale=1, long_mscale=2), "short_mscale is 1 but must be equal to long_mscale, w"),
    (LLAMA_2 | {"rope_scaling": {"factor": 8.0}}, "rope_scaling has no rope_type but must have one, such as 'linear'"),
    (rescaled(QWEN_2_5, type="default"), "rope_type is 'default' but must be one that has factor, such as 'yarn'"),
    (rescaled(QWEN_2_5, factr=4.0), f"factr is 4.0 {ABSENT}; did you mean factor?"),
    (
        LLAMA_2 | {"rope_scaling": {"factor": 8.0, "rope_typ": "yarn"}},
        f"rope_typ is 'yarn' {ABSENT}; did you mean rope_type?",
    ),
    (LLAMA_2 | {"rope_scaling": [8.0]}, "rope_scaling is [8.0] but must be a dict"),
    (LLAMA_2 | {"hidden_size": "4096"}, "transformers refuses the config: Validation error for field 'hidden_size'"),
    (LLAMA_2 | {"rope_theta": None}, LOST),
    (LLAMA_2 | {"rope_parameters": NEW}, LOST),
    (LLAMA_2 | {"rope_scaling": NEW, "rope_parameters": NEW | {"factor": 4.0}}, "rope_scaling is {'rope_type': 'lin"),
    (LLAMA_2 | {"model_type": "falcon", "alibi": True}, "alibi is True but must be that of a model that rotates"),
    (LLAMA_2 | {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi' but must be that of a mod"),
    ({"model_type": "bert"}, "model_type is 'bert' but must be that of a model that rotates: the config has no rope_p"),
    ({"model_type": "qwen2_5_omni"}, "model_type is 'qwen2_5_omni' but must be that of a model that rotates: the conf"),
    ({"model_type": "dinov3_vit"}, f"patch_size is 16 {ABSENT}: images have"),
    (LLAMA_2 | {"axes_dims": [16, 56, 56]}, f"axes_dims is [16, 56, 56] {ABSENT}: several axes of positions"),
    ({"model_type": "qwen", "rotary_emb_base": 10000}, f"model_type is 'qwen' {INSTEAD}"),
    ({"dim": 4096, "n_heads": 32, "rope_theta": 1e6}, f"model_type is None {INSTEAD}"),  # params.json of Mistral
    ("config.json", "config is 'config.json' but must be a dict, or a config object of transformers"),
    (GEMMA_3 | {"rope_theta": 5.0}, "rope_theta is 5.0 but must be 10000.0, as where it is read"),
    (GEMMA_3, "layer_type is None but must be one of 'full_attention', 'sliding_attention'"),
    (LLAMA_2, "layer_type is 'full_attention' but must be None, because all layers are of one type", "full_attention"),
    (SIZE | {"model_type": "cohere2"}, "layer_type is 'full_attention' but must be that of a layer", "full_attention"),
    (THETAS, "layer is None but must be the index of a layer, because layers differ", "sliding_attention"),
    (THETAS | {"layer_rope_theta": [7.0, 0]}, "layer_rope_theta is [7.0, 0] but must be a list of 4 or more values"),
]
UNKNOWN = ("rotary_base", "yarn_factor", "mscale", "use_dynamic_ntk", "ntk_alpha", "use_xpos", "rotary")
UNKNOWN += ("no_rope_layer_interval", "position_scale")
NO_THETAS = ("10000", math.nan, -1, 0, True, [])
NEAR = {"rop_scaling": "rope_scaling", "partial_rotry_factor": "partial_rotary_factor", "rope_tetha": "rope_theta"}
NEAR |= {"head_dims": "head_dim", "hiden_size": "hidden_size"}
ERRORS += [
    (LLAMA_2 | {name: 8}, f"{name} is 8 {ABSENT}, because its meaning is not known; pass head") for name in UNKNOWN
]
ERRORS += [(LLAMA_2 | {name: 64}, f"{name} is 64 {ABSENT}; did you mean {near}?") for name, near in NEAR.items()]
ERRORS += [(LLAMA_2 | {"rope_theta": v}, f"rope_theta is {v!r} but must be a positive number") for v in NO_THETAS]


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_a_wrong_config_raises_an_error(case):
    config, message, *layer_type = case
    with pytest.raises(ValueError) as error:
        frequencies.from_config(config, *layer_type)
    assert str(error.value).startswith("torch_rope.frequencies.from_config: " + message)
