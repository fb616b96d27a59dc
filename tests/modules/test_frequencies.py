"""Tests torch_rope.frequencies: frozen values of real models, configs, and errors. tests/integrations/test_configs.py
compares with transformers.

The frozen values were computed to 40 digits with mpmath, by the formulas of the papers, and rounded to double.
torch_rope computes in float64, and transformers in float32, by the same steps. `roundings` bounds the error of these
steps for each frequency. So it bounds the distance of torch_rope from the frozen values, and of transformers from
torch_rope.
"""

import math

import pytest
import torch

from torch_rope import frequencies

pytestmark = [pytest.mark.cpu, pytest.mark.heart]

U32, U64 = 2.0**-24, 2.0**-53  # unit roundoffs

# The divisors of Phi-3.5-mini, to two decimals. Its config.json has them as float32.
SHORT = [1, 1.02, 1.03, 1.03, *[1.05] * 5, 1.07, 1.1, 1.11, 1.16, 1.16, 1.17, 1.29, 1.34, 1.68, 1.79, 1.82, 1.85, 1.88]
SHORT += [1.91, 1.94, 1.99, *[2.02] * 6, *[2.03] * 9, 2.08, 2.09, 2.19, 2.22, 2.59, 2.73, 2.75, 2.84]
LONG = [
    1.08,
    1.11,
    1.14,
    1.34,
    1.59,
    1.6,
    1.62,
    2.62,
    3.23,
    3.23,
    4.79,
    7.4,
    7.7,
    9.09,
    12.2,
    17.67,
    24.46,
    28.57,
    30.42,
]
LONG += [30.84, 32.59, 32.93, 42.32, 44.96, 50.34, 50.45, 57.55, 57.93, 58.21, 60.14, 62.61, 62.62, 62.71, 63.14, 63.14]
LONG += [63.77, 63.93, 63.96, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84]

# The entries of each model's config.json that matter.
LLAMA_2 = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
LLAMA_3_1 = {
    **LLAMA_2,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
PYTHIA = {
    "model_type": "gpt_neox",
    "hidden_size": 768,
    "num_attention_heads": 8,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
}
PHI_3_5 = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
}
QWEN_2_5 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
GEMMA_3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}
GEMMA_4 = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_hidden_layers": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
DYNAMIC = {  # like InternLM2.5
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}
HUNYUAN = {
    "model_type": "hunyuan_v1_dense",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
}

# (config, layer_type, seq_len, the number of frequencies, index -> frequency for some of them, attention_factor)
REAL = {
    "Llama 2": (LLAMA_2, None, None, 64, {0: 1, 1: 0.8659643233600653, 63: 0.00011547819846894582}, 1),
    "Pythia": (PYTHIA, None, None, 12, {0: 1, 1: 0.46415888336127786, 11: 0.00021544346900318837}, 1),
    "Llama 3.1": (
        LLAMA_3_1,
        None,
        None,
        64,
        {
            0: 1,
            1: 0.8146172338565447,
            28: 0.003211445994752591,  # the last one that is kept
            29: 0.0021665707635033587,
            32: 0.0005248461609929547,
            34: 0.0001785078127679964,
            35: 9.556212353964683e-05,  # the first one that is divided by 8
            63: 3.068925988914511e-07,
        },
        1,
    ),
    "Phi-3.5-mini, short": (
        PHI_3_5,
        None,
        None,
        48,
        {0: 1, 1: 0.8092197894784494, 16: 0.03463872263890134, 47: 4.265942459959818e-05},
        1.1902380714238083,
    ),
    "Phi-3.5-mini, long": (
        PHI_3_5,
        None,
        4097,
        48,
        {0: 0.9259259259259259, 1: 0.743607374115332, 16: 0.0018976242165219864, 47: 1.8684880608090506e-06},
        1.1902380714238083,
    ),
    "Qwen2.5, YaRN": (
        QWEN_2_5,
        None,
        None,
        64,
        {
            0: 1,
            23: 0.006978305848598663,  # the last one that is kept
            24: 0.005375321490790102,
            39: 6.490394320837029e-05,
            40: 4.445698525097307e-05,  # the first one that is divided by 4
            63: 3.102344401879299e-07,
        },
        1.138629436111989,
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        None,
        None,
        32,
        {
            0: 1,
            10: 0.05623413251903491,
            11: 0.03900692656714386,
            16: 0.0055,
            22: 0.00017782794100389227,
            23: 3.33380358040831e-05,
            31: 3.33380358040831e-06,
        },
        1,
    ),
    "gpt-oss": (
        GPT_OSS,
        None,
        None,
        32,
        {
            0: 1,
            8: 0.050813274815461475,
            9: 0.03170569618466377,
            12: 0.006794959489732218,
            17: 0.00012931870124506273,
            18: 3.8308812373753384e-05,
            31: 3.0235114281192144e-07,
        },
        1.3465735902799727,
    ),
    "Gemma 3, full": (
        GEMMA_3,
        "full_attention",
        None,
        128,
        {0: 0.125, 1: 0.11221089155591428, 64: 0.000125, 127: 1.3924673249935028e-07},
        1,
    ),
    "Gemma 3, sliding": (
        GEMMA_3,
        "sliding_attention",
        None,
        128,
        {0: 1, 1: 0.930572040929699, 64: 0.01, 127: 0.00010746078283213175},
        1,
    ),
    "Gemma 4, full": (
        GEMMA_4,
        "full_attention",
        None,
        256,
        {0: 1, 1: 0.9474635256553754, 63: 0.033376246942920386, 64: 0, 255: 0},
        1,
    ),
    "Gemma 4, sliding": (
        GEMMA_4,
        "sliding_attention",
        None,
        128,
        {0: 1, 1: 0.930572040929699, 64: 0.01, 127: 0.00010746078283213175},
        1,
    ),
    "dynamic NTK, short": (DYNAMIC, None, 32768, 64, {0: 1, 1: 0.8058421877614819, 63: 1.2409377607517195e-06}, 1),
    "dynamic NTK, long": (
        DYNAMIC,
        None,
        65536,
        64,
        {0: 1, 1: 0.7919114945129184, 32: 0.0005723381508381237, 63: 4.136459202505732e-07},
        1,
    ),
    "Hunyuan, NTK": (
        HUNYUAN,
        None,
        None,
        64,
        {0: 1, 1: 0.7760343630469744, 32: 0.000299357729472049, 63: 1.1547819846894582e-07},
        1,
    ),
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


@pytest.mark.parametrize("config, layer_type, seq_len, count, values, attention_factor", REAL.values(), ids=REAL)
def test_a_real_model_has_its_frozen_frequencies(config, layer_type, seq_len, count, values, attention_factor):
    ours = frequencies.from_config(config, layer_type, seq_len)
    assert ours.inv_freq.shape == (count,) and ours.inv_freq.dtype == torch.float64
    kind, arguments = frequencies.parse(config, layer_type)
    allowed = U64 * roundings(kind, arguments, ours.inv_freq) * ours.inv_freq
    assert {i: abs(ours.inv_freq[i] - value) <= allowed[i] for i, value in values.items()} == dict.fromkeys(
        values, True
    )
    assert type(ours.attention_factor) is float
    assert ours.attention_factor == pytest.approx(attention_factor, rel=4 * U64, abs=0)


# Pairs of configs that mean the same.
SAME = {
    "type of Phi-3": (PHI_3_5, {**PHI_3_5, "rope_scaling": {**PHI_3_5["rope_scaling"], "type": "su"}}),
    "older type of Phi-3": (PHI_3_5, {**PHI_3_5, "rope_scaling": {**PHI_3_5["rope_scaling"], "type": "yarn"}}),
    "both types": (QWEN_2_5, {**QWEN_2_5, "rope_scaling": {**QWEN_2_5["rope_scaling"], "rope_type": "yarn"}}),
    "sections": (LLAMA_2, {**LLAMA_2, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}),
    "null": (LLAMA_2, {**LLAMA_2, "rope_scaling": None, "head_dim": None, "rope_theta": None, "text_config": None}),
    "rotary_dim": (PYTHIA, {"rotary_dim": 24, "n_embd": 768, "n_head": 8}),
    "one factor for both lengths": (
        {**PHI_3_5, "rope_scaling": {**PHI_3_5["rope_scaling"], "attention_factor": 1.25}},
        {**PHI_3_5, "rope_scaling": {**PHI_3_5["rope_scaling"], "short_mscale": 1.25, "long_mscale": 1.25}},
    ),
    "xdrope": (HUNYUAN, {**HUNYUAN, "rope_scaling": {**HUNYUAN["rope_scaling"], "type": "xdrope"}}),
}


@pytest.mark.parametrize("one, other", SAME.values(), ids=SAME)
def test_configs_that_mean_the_same_give_the_same_frequencies(one, other):
    assert_same(frequencies.from_config(one), frequencies.from_config(other))


@pytest.mark.parametrize(
    "old, layer_type, kind, base",
    [
        ({"rope_local_base_freq": 5.0, "rope_theta": 50.0}, "sliding_attention", "default", 5.0),
        ({"rope_local_base_freq": 5.0, "rope_theta": 50.0}, "full_attention", "linear", 50.0),
        ({"local_rope_theta": 5.0, "global_rope_theta": 50.0}, "sliding_attention", "linear", 5.0),
        ({"local_rope_theta": 5.0, "global_rope_theta": 50.0}, "full_attention", "linear", 50.0),
        ({"model_type": "olmo3", "rope_theta": 50.0}, "sliding_attention", "default", 50.0),
        ({"model_type": "olmo3", "rope_theta": 50.0}, "full_attention", "linear", 50.0),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_old_config_with_two_bases_gives_each_layer_type_its_own(old, layer_type, kind, base):
    """Gemma 3 and OLMo 3 scale only full attention, ModernBERT scales both layer types. transformers 5.23 gives the
    sliding layers of OLMo 3 its default base of 500000 instead of the rope_theta of the config."""
    config = {"head_dim": 64, "rope_scaling": {"type": "linear", "factor": 8.0}, **old}
    expected = {"rotary_dim": 64, "base": base} | ({"factor": 8.0} if kind == "linear" else {})
    assert frequencies.parse(config, layer_type) == (kind, expected)


def test_truncate_of_a_layer_type_is_read():
    """transformers looks for truncate next to the layer types, does not find it, and rounds."""
    layers = {"full_attention": {**GPT_OSS["rope_scaling"], "rope_theta": 150000}}
    config = {"head_dim": 64, "max_position_embeddings": 131072, "rope_parameters": layers}
    assert_same(frequencies.from_config(config, "full_attention"), frequencies.from_config(GPT_OSS))


def test_parse_returns_the_kind_and_the_arguments_of_its_function():
    kind, arguments = frequencies.parse(DYNAMIC)
    assert (kind, arguments) == (
        "dynamic",
        {"rotary_dim": 128, "base": 1000000, "factor": 2.0, "original_max_position": 32768},
    )
    # transformers scales by max_position_embeddings, even if there is an original_max_position_embeddings.
    assert frequencies.parse(DYNAMIC | {"original_max_position_embeddings": 4096}) == (kind, arguments)


def test_a_layer_may_have_a_head_dim_of_its_own():
    """per_layer_config gives it by the index of the layer, as transformers writes the config of such a model."""
    config = GEMMA_4["text_config"] | {"per_layer_config": {"5": {"head_dim": 128}}}
    sizes = {kind: len(frequencies.from_config(config, kind).inv_freq) for kind in {*config["layer_types"]}}
    assert sizes == {"sliding_attention": 128, "full_attention": 64}


def test_dynamic_equals_the_default_times_a_power():
    """The docstring of dynamic gives this formula for an s that is a tensor."""
    i = torch.arange(64, dtype=torch.float64)
    s = torch.tensor(2.0 * 65536 / 32768 - 1, dtype=torch.float64)
    torch.testing.assert_close(
        frequencies.default(128, 1e6).inv_freq * s ** (-2 * i / 126),
        frequencies.from_config(DYNAMIC, seq_len=65536).inv_freq,
        rtol=40 * U64,  # two powers
        atol=0,
    )


def test_longrope_chooses_its_list_by_seq_len_or_by_long():
    _, arguments = frequencies.parse(PHI_3_5)
    for long, lengths in ((False, [None, 1, 4096]), (True, [4097, 131072])):
        chosen = frequencies.longrope(**arguments, long=long)
        for seq_len in lengths:
            assert_same(frequencies.longrope(**arguments, seq_len=seq_len), chosen)


def test_partial_rotary_dim_rounds_down_and_may_be_odd():
    """An odd rotary_dim stays odd in the exponent, and its last channel has a frequency too."""
    assert [frequencies.partial_rotary_dim(80, part) for part in (1.0, 0.25, 0.4, 0.01875)] == [80, 20, 32, 1]
    assert frequencies.partial_rotary_dim(64, 0.3) == 19
    expected = [1, 0.37926901907322497, 0.0004281332398719394, 0.00016237767391887218]
    assert frequencies.default(19, 10000).inv_freq[[0, 1, 8, 9]].tolist() == pytest.approx(
        expected, rel=20 * U64, abs=0
    )


def test_parameters_of_other_engines_translate_as_documented():
    """The angle at a position is the one that akunu and ggml compute, as the docstring of the module says."""
    position, freq_scale, base = 1000.0, 0.25, 10000.0
    freqs = [base ** (2 * i / 8) for i in range(4)]  # akunu
    expected = [position * freq_scale / divisor for divisor in freqs]
    assert (position * frequencies.linear(8, base, factor=1 / freq_scale).inv_freq).tolist() == pytest.approx(expected)
    assert (position * freq_scale / torch.tensor(freqs)).tolist() == pytest.approx(expected)

    freq_factors = torch.tensor([1.0, 1.5, 4.0, 8.0], dtype=torch.float64)  # ggml
    listed = {"short_factor": [1.0] * 4, "long_factor": freq_factors.tolist(), "attention_factor": 1.0}
    divided = frequencies.default(8, base).inv_freq / freq_factors
    assert torch.equal(frequencies.longrope(8, base, **listed, original_max_position=512, long=True).inv_freq, divided)


def test_default_device_and_dtype_of_torch_do_not_matter():
    with torch.device("meta"):
        torch.set_default_dtype(torch.float16)
        try:
            found = [frequencies.from_config(*case[:3]) for case in REAL.values()]
        finally:
            torch.set_default_dtype(torch.float32)
    for case, inside in zip(REAL.values(), found, strict=True):
        assert inside.inv_freq.device.type == "cpu"
        assert_same(inside, frequencies.from_config(*case[:3]))


YARN = {"rotary_dim": 64, "base": 1e4, "factor": 4.0, "original_max_position": 4096}
LONGROPE = {"rotary_dim": 4, "base": 1e4, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
LONGROPE |= {"original_max_position": 4096, "factor": 2.0}
LLAMA3 = {"rotary_dim": 64, "base": 1e4, "factor": 8.0, "original_max_position": 8192}


@pytest.mark.parametrize(
    "kind, good, bad, message",
    [
        (
            "partial_rotary_dim",
            {"head_dim": 64, "partial_rotary_factor": 0.5},
            {"head_dim": 64.0},
            "a positive integer",
        ),
        ("partial_rotary_dim", {"head_dim": 64}, {"partial_rotary_factor": 1.5}, "a number in (0, 1]"),
        ("partial_rotary_dim", {"partial_rotary_factor": 1.0}, {"head_dim": 65}, "an even number to rotate all"),
        ("default", {"base": 1e4}, {"rotary_dim": 0}, "a positive integer"),
        ("default", {"base": 1e4}, {"rotary_dim": 64.0}, "a positive integer"),
        ("default", {"rotary_dim": 64}, {"base": -1.0}, "a positive number"),
        ("default", {"rotary_dim": 64}, {"base": math.nan}, "a positive number"),
        ("linear", {"rotary_dim": 64, "base": 1e4}, {"factor": 0}, "a positive number"),
        ("ntk", {"rotary_dim": 64, "base": 1e4}, {"factor": 0.5}, "at least 1"),
        ("ntk", {"base": 1e4, "factor": 2.0}, {"rotary_dim": 2}, "an integer above 2"),
        ("ntk", {"rotary_dim": 64, "factor": 2.0}, {"base": 0}, "a positive number"),
        ("dynamic", {"rotary_dim": 64, "base": 1e4, "original_max_position": 9}, {"factor": 0.5}, "at least 1"),
        ("dynamic", {"rotary_dim": 64, "base": 1e4, "factor": 2.0}, {"original_max_position": 0}, "a positive number"),
        ("yarn", YARN, {"factor": 0.5}, "a number that is at least 1"),
        ("yarn", YARN, {"base": 1}, "more than 1"),
        ("yarn", YARN, {"original_max_position": 0}, "a positive number"),
        ("yarn", YARN, {"beta_fast": 0}, "a positive number"),
        ("yarn", YARN, {"beta_slow": 33.0}, "at most beta_fast, which is 32.0"),
        ("yarn", YARN, {"attention_factor": -1.0}, "a positive number"),
        ("longrope", LONGROPE, {"rotary_dim": -2}, "a positive integer"),
        ("longrope", LONGROPE, {"original_max_position": 1}, "more than 1"),
        ("longrope", LONGROPE, {"factor": None}, "a number unless attention_factor is given"),
        ("longrope", {**LONGROPE, "long": True}, {"seq_len": 5}, "None if long is given"),
        ("llama3", LLAMA3, {"factor": 0.5}, "a number that is at least 1"),
        ("llama3", LLAMA3, {"high_freq_factor": 0.5}, "at least low_freq_factor, which is 1.0"),
        ("llama3", LLAMA3, {"low_freq_factor": 0}, "a positive number"),
        ("proportional", {"base": 1e4}, {"head_dim": 63}, "an even number"),
        ("proportional", {"head_dim": 64, "base": 1e4}, {"partial_rotary_factor": -0.5}, "a number in [0, 1]"),
        ("proportional", {"head_dim": 64, "base": 1e4}, {"factor": 0}, "a positive number"),
    ],
    ids=str,
)
def test_a_wrong_argument_raises_an_error(kind, good, bad, message):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError) as error:
        getattr(frequencies, kind)(**{**good, **bad})
    text = str(error.value)
    assert text.startswith(f"torch_rope.frequencies.{kind}: {name} is {value!r} but must be ")
    assert text.endswith(message)


def test_wrong_lists_of_longrope_raise_an_error():
    with pytest.raises(ValueError, match=r"longrope: len\(long_factor\) is 3 but must be rotary_dim / 2, which is 2$"):
        frequencies.longrope(**{**LONGROPE, "long_factor": [1.0] * 3})
    with pytest.raises(ValueError, match=r"longrope: short_factor\[1\] is 0 but must be a positive number$"):
        frequencies.longrope(**{**LONGROPE, "short_factor": [1.0, 0]})


@pytest.mark.parametrize(
    "config, layer_type, message",
    [
        (
            {**LLAMA_2, "rope_scaling": {"type": "alibi"}},
            None,
            "rope_type is 'alibi' but must be one of 'default', 'linear', 'n",
        ),
        ({**LLAMA_2, "model_type": "falcon", "alibi": True}, None, "alibi is True but must be absent"),
        ({**LLAMA_2, "model_type": "chatglm", "rope_ratio": 500}, None, "rope_ratio is 500 but must be absent"),
        (GEMMA_3, None, "layer_type is None but must be one of 'full_attention', 'sliding_attention'"),
        (GEMMA_3, "local", "layer_type is 'local' but must be one of 'full_attention', 'sliding_attention'"),
        (LLAMA_2, "full_attention", "layer_type is 'full_attention' but must be one of None"),
        ("config.json", None, "config is 'config.json' but must be a dict, or a config object of transformers"),
        (
            7,
            None,
            "config is 7 but must be a dict, or a config object of transformers, which AutoConfig.from_pretrained",
        ),
        (
            {"model_type": "llama", "num_attention_heads": 4},
            None,
            "hidden_size is None but must be a number unless head_dim is given",
        ),
        (
            {"hidden_size": 256, "rope_theta": 1e4},
            None,
            "num_attention_heads is None but must be a number unless head_dim is given",
        ),
        (
            {"model_type": "unheard_of", "hidden_size": 256, "num_attention_heads": 4, "rope_theta": None},
            None,
            "model_type is 'unheard_of' but must be that of a model that rotates: the config has none of rope_parameters",
        ),
        (
            {"head_dim": 64, "rope_scaling": {"type": "linear"}},
            None,
            "factor is None but must be given for rope_type 'linear'",
        ),
        (
            {"head_dim": 64, "rope_scaling": {"type": "dynamic", "factor": 2}},
            None,
            "max_position_embeddings is None but must be given for rope_type 'dynamic'",
        ),
        (
            {**PHI_3_5, "rope_scaling": {**PHI_3_5["rope_scaling"], "short_mscale": 1.0, "long_mscale": 1.25}},
            None,
            "short_mscale is 1.0 but must be equal to long_mscale, which is 1.25",
        ),
    ],
    ids=str,
)
def test_a_wrong_config_raises_an_error(config, layer_type, message):
    with pytest.raises(ValueError) as error:
        frequencies.from_config(config, layer_type)
    assert str(error.value).startswith("torch_rope.frequencies.from_config: " + message)


def test_llama3_has_no_ramp_if_its_two_factors_are_equal():
    """Llama 4 Scout keeps the frequencies of pairs that make more turns than this factor, and divides the others."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    found = frequencies.from_config({"model_type": "llama4_text", "head_dim": 128, "rope_parameters": rope}).inv_freq
    f = frequencies.default(128, 5e5).inv_freq
    kept = 8192 * f / (2 * math.pi) > 1
    assert torch.equal(found, torch.where(kept, f, f / 16)) and kept.any() and not kept.all()
