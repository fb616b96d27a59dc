"""The frequencies of real models.

They were computed to 40 digits with mpmath, by the formulas of the papers, and rounded to double. torch_rope computes in
float64, and transformers in float32, by the same steps. `roundings` bounds the error of these steps for each frequency. So
it bounds the distance of torch_rope from these values, and of transformers from torch_rope.
"""

import math

import torch

from torch_rope import frequencies

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


def real(config, count, values, factor=1, layer_type=None, seq_len=None):
    """Returns what from_config must give: the number of frequencies, some of them by index, the attention_factor."""
    return config, layer_type, seq_len, count, values, factor


REAL = {
    "Llama 2": real(LLAMA_2, 64, {0: 1, 1: 0.8659643233600653, 63: 0.00011547819846894582}),
    "Pythia": real(PYTHIA, 12, {0: 1, 1: 0.46415888336127786, 11: 0.00021544346900318837}),
    # 28 is the last one that is kept, 35 the first one that is divided by 8.
    "Llama 3.1": real(
        LLAMA_3_1,
        64,
        {0: 1, 28: 0.003211445994752591, 29: 0.0021665707635033587, 32: 0.0005248461609929547}
        | {34: 0.0001785078127679964, 35: 9.556212353964683e-05, 63: 3.068925988914511e-07},
    ),
    "Phi-3.5-mini, short": real(
        PHI_3_5, 48, {1: 0.8092197894784494, 16: 0.03463872263890134, 47: 4.265942459959818e-05}, 1.1902380714238083
    ),
    "Phi-3.5-mini, long": real(
        PHI_3_5, 48, {16: 0.0018976242165219864, 47: 1.8684880608090506e-06}, 1.1902380714238083, seq_len=4097
    ),
    # 23 is the last one that is kept, 40 the first one that is divided by 4.
    "Qwen2.5, YaRN": real(
        QWEN_2_5,
        64,
        {0: 1, 23: 0.006978305848598663, 24: 0.005375321490790102, 39: 6.490394320837029e-05}
        | {40: 4.445698525097307e-05, 63: 3.102344401879299e-07},
        factor=1.138629436111989,
    ),
    "DeepSeek-V3": real(
        DEEPSEEK_V3,
        32,
        {0: 1, 10: 0.05623413251903491, 11: 0.03900692656714386, 16: 0.0055, 22: 0.00017782794100389227}
        | {23: 3.33380358040831e-05, 31: 3.33380358040831e-06},
    ),
    "gpt-oss": real(
        GPT_OSS,
        32,
        {0: 1, 8: 0.050813274815461475, 9: 0.03170569618466377, 12: 0.006794959489732218}
        | {17: 0.00012931870124506273, 18: 3.8308812373753384e-05, 31: 3.0235114281192144e-07},
        factor=1.3465735902799727,
    ),
    "Gemma 3, full": real(
        GEMMA_3, 128, {0: 0.125, 1: 0.11221089155591428, 127: 1.3924673249935028e-07}, layer_type="full_attention"
    ),
    "Gemma 4, full": real(
        GEMMA_4, 256, {1: 0.9474635256553754, 63: 0.033376246942920386, 64: 0, 255: 0}, layer_type="full_attention"
    ),
    "Gemma 4, sliding": real(
        GEMMA_4, 128, {1: 0.930572040929699, 127: 0.00010746078283213175}, layer_type="sliding_attention"
    ),
    "dynamic NTK, short": real(DYNAMIC, 64, {1: 0.8058421877614819, 63: 1.2409377607517195e-06}, seq_len=32768),
    "dynamic NTK, long": real(DYNAMIC, 64, {1: 0.7919114945129184, 63: 4.136459202505732e-07}, seq_len=65536),
    "Hunyuan, NTK": real(HUNYUAN, 64, {1: 0.7760343630469744, 32: 0.000299357729472049, 63: 1.1547819846894582e-07}),
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
