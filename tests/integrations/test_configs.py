"""Compares frequencies, modules and positions that torch_rope makes from a config with those of transformers."""

import importlib
import json
import math
import random

import pytest
import torch
from cases import needed
from test_frequencies import REAL, U32, U64, assert_same, roundings
from test_rotary_embedding import module

import torch_rope
from torch_rope import RotaryEmbedding, frequencies, multimodal
from torch_rope.families import WHOLE_HEADS

transformers = needed("transformers")

from transformers import AutoConfig, GlmConfig, LlamaConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding  # noqa: E402
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions  # noqa: E402

pytestmark = pytest.mark.cpu

# fmt: off
FAMILIES = [
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen2_vl", "qwen3_vl", "gemma", "gemma2", "gemma3",
    "gemma4", "phi", "phi3", "gpt_neox", "gptj", "falcon", "stablelm", "glm", "glm4", "cohere", "cohere2", "olmo2",
    "deepseek_v2", "deepseek_v3", "llama4", "gpt_oss", "granite", "starcoder2", "modernbert", "ernie4_5", "smollm3",
    "exaone4", "nemotron", "persimmon", "helium", "olmo3", "seed_oss", "apertus", "deepseek_v4", "minimax_m2",
    "qwen3_next",
]
# fmt: on


def transformers_config(config: dict):
    """Returns transformers' config object for the contents of a config.json.

    transformers gets a copy, because it writes into the nested dicts.
    """
    return AutoConfig.for_model(**json.loads(json.dumps(config)))


def tables_of_module(config):
    """Yields (layer_type, inv_freq, attention_factor) for each table that the rotary module of transformers makes."""
    package = type(config).__module__.rpartition(".")[0]
    module = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    (rotary,) = (
        value
        for name, value in vars(module).items()
        if hasattr(value, "compute_default_rope_parameters") and "Vision" not in name
    )
    built = rotary(config.get_text_config())
    for name, inv_freq in built.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            prefix = name.removesuffix("inv_freq")
            yield prefix.removesuffix("_") or None, inv_freq, getattr(built, f"{prefix}attention_scaling")


def assert_near(
    ours: frequencies.Frequencies, theirs: torch.Tensor, attention_factor: float, kind: str, arguments: dict
):
    assert theirs.dtype == torch.float32 and theirs.shape == ours.inv_freq.shape
    off = (theirs.double() - ours.inv_freq).abs()
    assert (off <= U32 * roundings(kind, arguments, ours.inv_freq) * ours.inv_freq).all()
    assert ours.attention_factor == pytest.approx(attention_factor, rel=4 * U64, abs=0)


@pytest.mark.parametrize("config, layer_type, seq_len", [case[:3] for case in REAL.values()], ids=REAL)
def test_a_real_config_gives_the_frequencies_of_transformers(config, layer_type, seq_len):
    theirs = transformers_config(config)
    ours = frequencies.from_config(config, layer_type, seq_len)
    assert_same(frequencies.from_config(theirs, layer_type, seq_len), ours)
    if seq_len is None:  # a module of transformers does not know the length when it is built
        tables = {layer_type: rest for layer_type, *rest in tables_of_module(theirs)}
        assert_near(ours, *tables[layer_type], *frequencies.parse(config, layer_type))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_a_default_config_gives_the_frequencies_of_transformers(family):
    """The config is given as an object, and as the config.json that the object saves."""
    config = AutoConfig.for_model(family)
    saved = json.loads(config.to_json_string(use_diff=False))
    if family == "gptj":  # gptj has no rotary module, but a function that makes sin and cos of position times frequency
        theirs = create_sinusoidal_positions(2, config.rotary_dim)[1, : config.rotary_dim // 2].asin()
        ours = frequencies.from_config(config).inv_freq
        # The frequency comes from asin of a rounded sine. At 1 rad the rounding is divided by the cosine, which makes
        # the error at most twice as large. The rounding of the frequency itself is added.
        assert (theirs.double() / ours - 1).abs().max() <= U32 * (4 + math.log(10000) + 4)
        assert_same(frequencies.from_config(saved), frequencies.from_config(config))
        return
    tables = list(tables_of_module(config))
    assert tables
    for layer_type, inv_freq, attention_factor in tables:
        kind, arguments = frequencies.parse(config, layer_type)
        ours = frequencies.from_config(config, layer_type)
        assert_near(ours, inv_freq, attention_factor, kind, arguments)
        assert_same(frequencies.from_config(saved, layer_type), ours)


PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("llama", "glm") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in sorted({*FAMILIES, "nanochat"} - {"gptj", "gemma4", "deepseek_v4"})
    ],
)
def test_partial_rotary_factor_is_ignored_if_the_family_ignores_it(family):
    """Llama, like most families, rotates whole heads if the kind is default. GLM and others rotate a part.

    The rope_parameters of the three families that are left out have other entries.
    """
    config = AutoConfig.for_model(family)
    text = config.get_text_config()
    layer_types = [name for name, value in text.rope_parameters.items() if isinstance(value, dict)]
    text.rope_parameters = {name: dict(PART) for name in layer_types} or dict(PART)
    for layer_type, inv_freq, attention_factor in tables_of_module(config):
        ours = frequencies.from_config(config, layer_type)
        assert_near(ours, inv_freq, attention_factor, *frequencies.parse(config, layer_type))


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_a_model_that_does_not_rotate_is_refused(name):
    config = getattr(transformers, f"{name}Config")()
    for given in (config, json.loads(config.to_json_string(use_diff=False))):
        with pytest.raises(
            ValueError, match=f"from_config: model_type is '{config.model_type}' but must be that of a mo"
        ):
            RotaryEmbedding.from_config(given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", sorted({*frequencies._DEFAULTS, *WHOLE_HEADS}))
def test_missing_values_of_a_config_have_the_defaults_of_transformers(model_type):
    """The config.json has only sizes."""
    sizes = {"hidden_size": 384, "num_attention_heads": 4, "max_position_embeddings": 8192}
    if model_type in ("gptj", "codegen"):
        sizes = {"n_embd": 384, "n_head": 4, "n_positions": 8192}
    config = {"model_type": model_type, **sizes}
    theirs = transformers_config(config)
    parameters = getattr(theirs.get_text_config(), "rope_parameters", {})
    for layer_type in [key for key, value in parameters.items() if isinstance(value, dict)] or [None]:
        assert_same(frequencies.from_config(config, layer_type), frequencies.from_config(theirs, layer_type))


def draw(kind: str, rng: random.Random) -> tuple[dict, dict, dict]:
    """Returns random arguments of a kind's function, and sizes and rope_parameters of an equivalent config."""
    head_dim = 2 * rng.randint(8, 128)
    part = rng.choice([1.0, 0.25, 0.5, rng.uniform(0.25, 1)])
    if kind == "yarn":  # transformers fails if rotary_dim is odd, because its ramp has one element too few
        part = 2 * rng.randint(2, head_dim // 2) / head_dim
        part += 1e-9 if int(head_dim * part) % 2 else 0
    rotary_dim, original = int(head_dim * part), rng.randint(128, 2**18)
    rope = {"rope_type": kind, "rope_theta": 10 ** rng.uniform(2, 7.5), "partial_rotary_factor": part}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    sizes["max_position_embeddings"] = original * rng.randint(1, 64)
    own = {"factor": rng.choice([1.0, rng.uniform(1, 64)])}
    if kind == "yarn":
        fast = rng.uniform(4, 64)
        own |= {"beta_fast": fast, "beta_slow": fast / rng.uniform(2, 32), "truncate": rng.random() < 0.5}
        own |= rng.choice([{}, {"mscale": rng.random(), "mscale_all_dim": rng.random()}, {"mscale": 0.7}])
    if kind == "longrope":
        short, long = ([rng.uniform(1, 64) for _ in range(0, rotary_dim, 2)] for _ in range(2))
        own |= {"short_factor": short, "long_factor": long}
    if kind == "llama3":
        low = rng.uniform(0.5, 4)
        own |= {"low_freq_factor": low, "high_freq_factor": low * rng.uniform(1.5, 8)}
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        own["attention_factor"] = rng.uniform(0.5, 2)
    arguments = {"rotary_dim": rotary_dim, "base": rope["rope_theta"], **own}
    rope |= own
    if kind in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = arguments["original_max_position"] = original
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        rope["factor"] = None
        arguments["factor"] = sizes["max_position_embeddings"] / original
    if kind == "dynamic":
        arguments["original_max_position"] = sizes["max_position_embeddings"]
    if kind == "proportional":
        arguments["partial_rotary_factor"], arguments["head_dim"] = part, head_dim
        del arguments["rotary_dim"]
    return arguments, sizes, rope


@pytest.mark.parametrize("kind", ROPE_INIT_FUNCTIONS)
def test_random_parameters_give_the_frequencies_of_transformers(kind):
    rng = random.Random(kind)
    for _ in range(60):
        arguments, sizes, rope = draw(kind, rng)
        config = LlamaConfig(**sizes, rope_parameters=dict(rope))
        seq_len = rng.choice([None, rng.randint(1, 2**20)])
        ours = frequencies.from_config(config, seq_len=seq_len)
        assert_near(ours, *ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len), kind, arguments)

        by_length = {"seq_len": seq_len} if kind in ("dynamic", "longrope") else {}
        assert_same(frequencies.KINDS[kind](**arguments, **by_length), ours)
        # The same parameters in the older form rope_scaling, and by layer type.
        scaling = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
        outer = {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        assert_same(frequencies.from_config({**sizes, **outer, "rope_scaling": scaling}, seq_len=seq_len), ours)
        layers = {"a": rope, "b": {"rope_type": "default", "rope_theta": 7.0}}
        assert_same(frequencies.from_config({**sizes, "rope_parameters": layers}, "a", seq_len), ours)


def test_a_random_part_of_a_head_gives_the_frequencies_of_transformers():
    """GLM's formula of the kind default serves parts of heads, also with an odd rotary_dim."""
    rng, odd = random.Random(0), 0
    for _ in range(60):
        arguments, sizes, rope = draw("default", rng)
        del rope["factor"], arguments["factor"]
        config = GlmConfig(**sizes, rope_parameters=rope)
        ours = frequencies.from_config(config)
        assert_near(ours, *GlmRotaryEmbedding.compute_default_rope_parameters(config), "default", arguments)
        assert_same(frequencies.default(**arguments), ours)
        odd += arguments["rotary_dim"] % 2
    assert odd


def test_torch_rope_has_all_kinds_of_transformers():
    assert {*ROPE_INIT_FUNCTIONS, "default", "ntk"} == {*frequencies.KINDS}


def test_a_layer_type_may_be_given_and_sometimes_must():
    config = AutoConfig.for_model("gemma2")  # all layers share the frequencies
    assert_same(frequencies.from_config(config, "sliding_attention"), frequencies.from_config(config))
    config = transformers.Gemma3TextConfig()
    sliding, full = (
        RotaryEmbedding.from_config(config, kind, max_position=9) for kind in ("sliding_attention", "full_attention")
    )
    assert (sliding.base, full.base) == (1e4, 1e6) and sliding.cos.shape == (9, 128)
    for function in (RotaryEmbedding.from_config, frequencies.from_config):
        with pytest.raises(ValueError, match="layer_type is None but must be one of 'full_attention', 'sliding_atten"):
            function(config)


# ---- Modules ----


@pytest.mark.parametrize("max_position", [None, 50])
def test_from_pretrained_restores_the_buffers_of_a_module(max_position, tmp_path):
    """transformers gives buffers that are not saved uninitialised memory."""

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.linear, self.rope = torch.nn.Linear(2, 2), module("longrope", max_position)
            self.post_init()

    model = Model(transformers.PretrainedConfig())
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for a, b in zip(loaded.rope.buffers(), model.rope.buffers(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# ---- Several axes ----


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe", "glm_ocr", "qwen3_5"])
def test_positions_of_text_and_images_give_the_tables_of_transformers(name):
    config = transformers.CONFIG_MAPPING[name]().text_config
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    theirs = [
        c
        for n, c in vars(modeling).items()
        if n.endswith("RotaryEmbedding") and "Vision" not in n and n != "RotaryEmbedding"
    ]
    positions = torch.randint(0, 100, (3, 2, 7))
    inv_freq, factor = multimodal.from_config(config)
    outs = torch_rope.axial_cos_sin(positions, inv_freq, attention_factor=factor)
    for out, t in zip(outs, theirs[0](config)(torch.zeros(1), positions), strict=True):
        half = t.view(*t.shape[:-1], -1, 2)[..., 0] if torch.equal(t[..., 0], t[..., 1]) else t[..., : t.shape[-1] // 2]
        assert (out - half).abs().max() < 2e-5  # transformers' angle is a float32 product
