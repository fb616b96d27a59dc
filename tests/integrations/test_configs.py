"""Compares frequencies, modules and positions that torch_rope makes from a config with those of transformers."""

import copy
import importlib
import inspect
import random
import re
import sys

import pytest
import torch
from cases import needed
from real_configs import REAL, U32, U64, assert_same, roundings

import torch_rope
from torch_rope import frequencies, multimodal

transformers = needed("transformers")

from transformers import AutoConfig, GlmConfig, LlamaConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding  # noqa: E402

pytestmark = pytest.mark.cpu
at_night = pytest.mark.exhaustive


def object_of(config: dict):
    """Returns the config object for the contents of a config.json. transformers writes into nested dicts: it gets a copy."""
    return AutoConfig.for_model(**copy.deepcopy(config))


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


@pytest.mark.parametrize("config, layer_type, seq_len", [case[:3] for case in REAL.values()], ids=REAL)
def test_a_real_config_gives_the_frequencies_of_transformers(config, layer_type, seq_len, capfd, recwarn):
    """The config stays as it is, and nothing is logged."""
    theirs, before = object_of(config), copy.deepcopy(config)
    as_dict, _ = theirs.to_dict(), capfd.readouterr()
    ours = frequencies.from_config(config, layer_type, seq_len)
    assert_same(frequencies.from_config(theirs, layer_type, seq_len), ours)
    assert config == before and theirs.to_dict() == as_dict and capfd.readouterr() == ("", "") and not recwarn.list
    if seq_len is None:  # a module of transformers does not know the length when it is built
        tables = {layer_type: rest for layer_type, *rest in tables_of_module(theirs.get_text_config())}
        assert_near(config, layer_type, None, *tables[layer_type])


# Their models do not rotate by default, rotate by several axes, or read other entries than the config has.
REFUSED = {"bamba", "deepseek_v4", "dots3_note_text", "efficientloftr", "ernie4_5_vl_moe_text", "esm", "zamba2"}
REFUSED |= {"glm4_moe_lite", "granitemoehybrid", "mistral_large4_text", "musicflamingo", "qwen3_omni_moe_text"}
NAMES = sorted({*transformers.CONFIG_MAPPING} - {"llama", "glm"})


@pytest.mark.parametrize("name", ["llama", "glm", *(pytest.param(name, marks=at_night) for name in NAMES)])
def test_a_family_has_the_frequencies_of_transformers(name):
    """As an object, a dict, and the model_type alone; by default, and with a part, which most ignore if it is default."""
    try:
        config, halved = transformers.CONFIG_MAPPING[name](), transformers.CONFIG_MAPPING[name]()
        assert list(tables_of_module(config))
    except Exception:
        pytest.skip("it has no default config, or no rotary module with one axis")
    rope = getattr(halved, "rope_parameters", {})
    for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        parameters["partial_rotary_factor"] = 0.5
    for form in (config, config.to_dict(), {"model_type": name}, halved, halved.to_dict()):
        theirs = object_of(form) if isinstance(form, dict) else form
        for layer_type, inv_freq, attention_factor in tables_of_module(theirs):
            try:
                assert_near(form, layer_type, None, inv_freq, attention_factor)
                assert frequencies.is_interleaved(form) in (True, False)
            except ValueError:
                assert name in REFUSED or hasattr(theirs, "patch_size")


@pytest.mark.parametrize("family", ["qwen3", "glm4", "qwen3_next", "gpt_neox", "gemma3_text"])
def test_rope_parameters_that_were_lost_are_an_error(family):
    config, linear = transformers.CONFIG_MAPPING[family](), {"rope_type": "linear", "factor": 8.0}
    config.rope_parameters = dict(linear)  # loses the base, the part of a head that rotates, and all layer types
    config.standardize_rope_params()  # as config.rope_scaling = ... does, too
    with_base = copy.deepcopy(config)
    with_base.rope_parameters = linear | {"rope_theta": 1e6}  # which is all that Qwen3 has
    for case in [config, config.to_dict(), with_base][: 2 if family == "qwen3" else 3]:
        with pytest.raises(ValueError, match="; set all at once, as in config.rope_parameters ="):
            frequencies.from_config(case, layer=0)


def test_yarn_without_a_factor_is_an_error_as_in_transformers():
    one, by_type = LlamaConfig(), transformers.CONFIG_MAPPING["gemma3_text"]()
    one.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4}
    by_type.rope_parameters["full_attention"] = one.rope_parameters
    for config, layer_type in ((one, None), (by_type, "full_attention")):
        with pytest.raises(ValueError, match="factor is None but must be given for rope_type 'yarn'"):
            frequencies.from_config(config, layer_type)


@pytest.mark.parametrize("version, message", [(None, "must be installed to read a dict; pass"), ("5.19.0", "5.20")])
def test_a_dict_needs_transformers(version, message, monkeypatch):
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises((ImportError, ValueError), match=message):
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
    for _ in range(60):
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
