"""Compares frequencies, modules and positions that torch_rope makes from a config with those of transformers."""

import importlib
import json
import random

import pytest
import torch
from cases import needed
from test_frequencies import REAL, U32, U64, assert_same, roundings

import torch_rope
from torch_rope import frequencies, multimodal
from torch_rope.frequencies.families import DEFAULTS, WHOLE_HEADS

transformers = needed("transformers")

from transformers import AutoConfig, GlmConfig, LlamaConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding  # noqa: E402

pytestmark = pytest.mark.cpu
at_night = pytest.mark.exhaustive


def object_of(config: dict):
    """Returns the config object for the contents of a config.json.

    transformers gets a copy, because it writes into the nested dicts.
    """
    return AutoConfig.for_model(**json.loads(json.dumps(config)))


def modeling_of(config):
    """Returns the modeling file of a config object."""
    package = type(config).__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")


def tables_of_module(config):
    """Yields (layer_type, inv_freq, attention_factor) for each table that the rotary module of transformers makes."""
    (rotary,) = (
        value
        for name, value in vars(modeling_of(config)).items()
        if hasattr(value, "compute_default_rope_parameters") and "Vision" not in name
    )
    built = rotary(config.get_text_config())
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


@pytest.mark.parametrize("config, layer_type, seq_len", [case[:3] for case in REAL.values()], ids=REAL)
def test_a_real_config_gives_the_frequencies_of_transformers(config, layer_type, seq_len):
    theirs = object_of(config)
    ours = frequencies.from_config(config, layer_type, seq_len)
    assert_same(frequencies.from_config(theirs, layer_type, seq_len), ours)
    if seq_len is None:  # a module of transformers does not know the length when it is built
        tables = {layer_type: rest for layer_type, *rest in tables_of_module(theirs)}
        assert_near(config, layer_type, None, *tables[layer_type])


PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
PARTIAL = WHOLE_HEADS | {"glm", "glm4", "phi", "phi3", "gpt_neox", "stablelm", "nemotron", "persimmon", "qwen3_next"}
# Their models do not rotate, rotate by several axes, or read other entries than the config has.
REFUSED = {"bamba", "dia", "efficientloftr", "eomt_dinov3", "ernie4_5_vl_moe", "esm", "granitemoehybrid", "t5gemma"}
REFUSED |= {"minimax_m3_vl", "musicflamingo", "t5gemma2", "zamba2"}
NAMES = sorted({*transformers.CONFIG_MAPPING} - {"llama", "glm"})


@pytest.mark.parametrize("name", ["llama", "glm", *(pytest.param(name, marks=at_night) for name in NAMES)])
def test_a_family_has_the_frequencies_of_transformers(name):
    """By default, and with a partial_rotary_factor. Llama, like most families, ignores it if the kind is default."""
    try:
        config = transformers.CONFIG_MAPPING[name]()
        cases = [(config, list(tables_of_module(config)))]
    except Exception:
        pytest.skip("it has no default config, or not one rotary module for text")
    if name in PARTIAL:
        config = transformers.CONFIG_MAPPING[name]()
        text, layer_types = config.get_text_config(), [table[0] for table in cases[0][1] if table[0]]
        text.rope_parameters = {layer_type: dict(PART) for layer_type in layer_types} or dict(PART)
        cases.append((config, list(tables_of_module(config))))
    for config, tables in cases:
        for form in (config, *(json.loads(config.to_json_string(use_diff=diff)) for diff in (True, False))):
            for layer_type, inv_freq, attention_factor in tables:
                try:
                    assert_near(form, layer_type, None, inv_freq, attention_factor)
                    assert frequencies.is_interleaved(form) in (True, False)
                except ValueError:
                    assert name.removesuffix("_text") in REFUSED


@at_night
@pytest.mark.parametrize("model_type", sorted({*DEFAULTS, *WHOLE_HEADS}))
def test_missing_values_of_a_config_have_the_defaults_of_transformers(model_type):
    """The config.json has only sizes."""
    sizes = {"hidden_size": 384, "num_attention_heads": 4, "max_position_embeddings": 8192}
    if model_type in ("gptj", "codegen"):
        sizes = {"n_embd": 384, "n_head": 4, "n_positions": 8192}
    config = {"model_type": model_type, **sizes}
    theirs = object_of(config)
    parameters = getattr(theirs.get_text_config(), "rope_parameters", {})
    for layer_type in [key for key, value in parameters.items() if isinstance(value, dict)] or [None]:
        assert_same(frequencies.from_config(config, layer_type), frequencies.from_config(theirs, layer_type))


def draw(kind: str, rng: random.Random) -> tuple[dict, dict]:
    """Returns random sizes and rope_parameters of a config."""
    head_dim, original = 2 * rng.randint(8, 128), rng.randint(128, 2**18)
    part = rng.choice([1.0, 0.25, 0.5, rng.uniform(0.25, 1)])
    if kind == "yarn":  # transformers fails if rotary_dim is odd, because its ramp has one element too few
        part = 2 * rng.randint(2, head_dim // 2) / head_dim
        part += 1e-9 if int(head_dim * part) % 2 else 0
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
    for _ in range(60):
        sizes, rope = draw(kind, rng)
        config = config_of(**sizes, rope_parameters=dict(rope))
        seq_len = rng.choice([None, rng.randint(1, 2**20)])
        assert_near(config, None, seq_len, *make(config, "cpu", seq_len=seq_len))
        # The same parameters in the older form rope_scaling, and by layer type.
        ours = frequencies.from_config(config, seq_len=seq_len)
        family = {"model_type": config.model_type, **sizes}
        scaling = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
        outer = {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        assert_same(frequencies.from_config({**family, **outer, "rope_scaling": scaling}, seq_len=seq_len), ours)
        layers = {"a": rope, "b": {"rope_type": "default", "rope_theta": 7.0}}
        assert_same(frequencies.from_config({**family, "rope_parameters": layers}, "a", seq_len), ours)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe", "glm_ocr", "qwen3_5"])
def test_positions_of_text_and_images_give_the_tables_of_transformers(name):
    config = transformers.CONFIG_MAPPING[name]().text_config
    names = [n for n in vars(modeling_of(config)) if n.endswith("RotaryEmbedding") and "Vision" not in n]
    theirs = getattr(modeling_of(config), max(names, key=len))
    positions = torch.randint(0, 100, (3, 2, 7))
    inv_freq, factor = multimodal.from_config(config)
    outs = torch_rope.axial_cos_sin(positions, inv_freq, attention_factor=factor)
    for out, t in zip(outs, theirs(config)(torch.zeros(1), positions), strict=True):
        half = t[..., ::2] if torch.equal(t[..., 0], t[..., 1]) else t.chunk(2, -1)[0]
        assert (out - half).abs().max() < 2e-5  # transformers' angle is a float32 product
