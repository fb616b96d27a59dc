"""Reads the frequencies of a model from its config."""

import inspect
from collections.abc import Mapping
from typing import Any

from .families import INTERLEAVED, ROPE_INTERLEAVE, WHOLE_HEADS
from .kinds import KINDS, Frequencies, _require, partial_rotary_dim

# The values that the configuration classes of transformers fill in if a config.json does not give them, for the
# families in which they differ from the usual ones: base 10000, hidden_size / num_attention_heads channels that are all
# rotated, no scaling.
_DEFAULTS: dict[str, dict] = {
    "apertus": {
        "rope_theta": 12e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "codegen": {"rotary_dim": 64},
    "cohere": {"rope_theta": 5e5},
    "deepseek_v2": {"qk_rope_head_dim": 64},
    "deepseek_v3": {"qk_rope_head_dim": 64},
    "ernie4_5": {"rope_theta": 5e5, "head_dim": 128},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 256},
    "gemma4_text": {
        "head_dim": 256,
        "global_head_dim": 512,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    },
    "glm": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "glm4": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25},
    **dict.fromkeys(
        ("gpt_oss", "openai_privacy_filter"),
        {
            "head_dim": 64,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
    ),
    "gptj": {"rotary_dim": 64},
    "helium": {"rope_theta": 1e5, "head_dim": 128},
    "llama4_text": {"rope_theta": 5e5, "head_dim": 128},
    "mixtral": {"rope_theta": 1e6},
    "modernbert": {"global_rope_theta": 160000.0, "local_rope_theta": 1e4},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo3": {"rope_theta": 5e5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "qwen2_vl": {"rope_theta": 1e6},
    "qwen2_vl_text": {"rope_theta": 1e6},
    "qwen3": {"head_dim": 128},
    "qwen3_vl_text": {"rope_theta": 5e5, "head_dim": 128},
    "seed_oss": {"head_dim": 128},
    "smollm3": {"rope_theta": 2e6},
    "stablelm": {"partial_rotary_factor": 0.25},
}

# Name of an entry of a config -> names that older families use for it.
_OLD_NAMES = {
    "head_dim": ("attention_head_dim", "kv_channels"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions",),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
}
# rope_type of a config -> kind. mrope (Qwen2-VL) and xdrope (Hunyuan-VL) say how positions are laid out.
_OLD_KINDS = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}


# The entries of a config that describe a rotation.
_ENTRIES = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "global_rope_theta",
    "partial_rotary_factor",
    "rotary_dim",
    "qk_rope_head_dim",
)


def _get(config: Any, name: str) -> Any:
    """Returns the value of an entry of a config, which is a dict or an object; None if it has no such entry."""
    for each in (name, *_OLD_NAMES.get(name, ())):
        value = config.get(each) if isinstance(config, Mapping) else getattr(config, each, None)
        if value is not None:
            return value
    return None


def _by_layer_type(config: Any, rope: Mapping) -> dict[str, Mapping] | None:
    """Returns layer type -> rope parameters, or None if all layers share them."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {layer_type: value for layer_type, value in rope.items() if isinstance(value, Mapping)}
    # Configs that are older than rope_parameters have one rope_scaling, and the second base under a separate name.
    if (local := _get(config, "local_rope_theta")) is not None:  # ModernBERT
        bases = {"sliding_attention": local, "full_attention": _get(config, "global_rope_theta")}
        return {layer_type: {"rope_theta": base, **rope} for layer_type, base in bases.items()}
    if (local := _get(config, "rope_local_base_freq")) is not None:  # Gemma 3
        return {"sliding_attention": {"rope_theta": local}, "full_attention": rope}
    if _get(config, "model_type") == "olmo3":
        return {"sliding_attention": {}, "full_attention": rope}
    return None


def _of_layer_type(config: Any, layer_type: str | None) -> Any:
    """Returns the config of the first layer of that type, because each layer type of Gemma 4 has its own head_dim."""
    types = _get(config, "layer_types") or []
    if layer_type not in types:
        return config
    layer = types.index(layer_type)
    if not isinstance(config, Mapping):
        return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config
    if "per_layer_config" not in config:
        return config
    own = {int(index): values for index, values in config["per_layer_config"].items()}.get(layer, {})
    return {**config, "global_head_dim": None, **own}


def _head_dim(config: Any, layer_type: str | None) -> int:
    """Returns head_dim, computed from hidden_size if the config does not give it."""
    own = _get(config, "global_head_dim") if layer_type == "full_attention" else None  # Gemma 4
    head_dim = _get(config, "head_dim") if own is None else own
    if head_dim is not None:
        return head_dim
    hidden_size, heads = _get(config, "hidden_size"), _get(config, "num_attention_heads")
    _require(hidden_size is not None, "from_config", "hidden_size", hidden_size, "a number unless head_dim is given")
    _require(heads is not None, "from_config", "num_attention_heads", heads, "a number unless head_dim is given")
    return hidden_size // heads


def parse(config: Any, layer_type: str | None = None, *, layer: int | None = None) -> tuple[str, dict]:
    """Returns the kind of a model's frequencies, a key of :data:`KINDS`, and the keyword arguments of its function.

    The arguments and errors are those of :func:`from_config`, which calls this function. Call it directly to follow the
    length of the sequence yourself: the keyword arguments do not include seq_len and long.
    """
    is_config = isinstance(config, Mapping) or hasattr(config, "__dict__")
    made_by = "which AutoConfig.from_pretrained makes of a name"
    _require(is_config, "from_config", "config", config, f"a dict, or a config object of transformers, {made_by}")
    config = _get(config, "text_config") or config  # of a multimodal model
    if isinstance(config, Mapping):
        present = {name: value for name, value in config.items() if value is not None}
        config = {**_DEFAULTS.get(present.get("model_type"), {}), **present}

    # Falcon with alibi does not rotate. The config of ChatGLM has rope_ratio, but neither the base nor rotary_dim.
    for name in ("alibi", "rope_ratio"):
        value = _get(config, name)
        _require(not value, "from_config", name, value, "absent: a config that has it does not describe a rotation")
    model_type = _get(config, "model_type")
    rotates = model_type in WHOLE_HEADS | INTERLEAVED or model_type in _DEFAULTS
    _require(
        rotates or any(_get(config, name) is not None for name in _ENTRIES),
        "from_config",
        "model_type",
        model_type,
        f"that of a model that rotates: the config has none of {', '.join(_ENTRIES)}; if the model does rotate, add one",
    )

    rope = _get(config, "rope_scaling") or _get(config, "rope_parameters") or {}
    layers = _by_layer_type(config, rope)
    if layers is None:  # all layer types, if the config lists any, share the parameters
        layers = {None: rope, **dict.fromkeys(_get(config, "layer_types") or (), rope)}
    choices = ", ".join(sorted(map(repr, layers)))
    _require(layer_type in layers, "from_config", "layer_type", layer_type, f"one of {choices}")
    rope, config = layers[layer_type], _of_layer_type(config, layer_type)

    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = _OLD_KINDS.get(kind, kind)
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan: the factor is fixed
        kind, rope = "ntk", {**rope, "factor": rope["alpha"]}
    if kind == "yarn" and rope.get("long_factor"):  # early configs of Phi-3 name the wrong type
        kind = "longrope"
    known = ", ".join(map(repr, [*KINDS, *_OLD_KINDS]))
    _require(kind in KINDS, "from_config", "rope_type", kind, f"one of {known}")

    part = rope.get("partial_rotary_factor")
    part = _get(config, "partial_rotary_factor") if part is None else part
    ignored = kind == "default" and model_type in WHOLE_HEADS
    part = 1.0 if part is None or ignored else part
    if kind == "proportional":
        arguments = {"head_dim": _head_dim(config, layer_type)}
    else:
        # DeepSeek keeps qk_rope_head_dim channels of a head for the rotation alone. GPT-J's config gives rotary_dim.
        rotary_dim = _get(config, "qk_rope_head_dim") or _get(config, "rotary_dim")
        arguments = {"rotary_dim": rotary_dim or partial_rotary_dim(_head_dim(config, layer_type), part)}
    arguments["base"] = rope.get("rope_theta") or _get(config, "rope_theta") or 10000.0

    longest = _get(config, "max_position_embeddings")
    # Phi-3 gives it next to rope_scaling, and that value takes precedence.
    trained = _get(config, "original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    trained = longest if trained is None or kind == "dynamic" else trained
    given = {**rope, "partial_rotary_factor": part, "original_max_position": trained}
    if kind in ("yarn", "longrope") and rope.get("factor") is None and longest:
        given["factor"] = longest / trained
    if kind == "longrope" and rope.get("long_mscale") is not None:  # Phi-3.5-MoE, whose two factors are equal
        short, long = rope.get("short_mscale"), rope["long_mscale"]
        _require(short == long, "from_config", "short_mscale", short, f"equal to long_mscale, which is {long!r}")
        given["attention_factor"] = long
    for name, parameter in inspect.signature(KINDS[kind]).parameters.items():
        if name in arguments or name in ("seq_len", "long"):
            continue
        if given.get(name) is not None:
            arguments[name] = given[name]
        elif parameter.default is parameter.empty:
            name = "max_position_embeddings" if name == "original_max_position" else name
            _require(False, "from_config", name, None, f"given for rope_type {kind!r}")
    return kind, arguments


def from_config(config: Any, layer_type: str | None = None, seq_len: int | None = None) -> Frequencies:
    """Returns the frequencies of a model, read from its config.

    Args:
        config: a config object of transformers, or a dict such as ``json.load`` of config.json. If it is the config of
            a multimodal model, its text_config is read. These entries are read: ``rope_parameters``, for all layers or
            by layer type, and the older ``rope_scaling`` and ``rope_theta``, ``rope_local_base_freq`` (Gemma 3),
            ``global_rope_theta`` and ``local_rope_theta`` (ModernBERT), ``rotary_emb_base`` and ``rotary_pct``
            (GPT-NeoX), ``rotary_dim`` (GPT-J) and ``qk_rope_head_dim`` (DeepSeek).
        layer_type: the type of the layer, in models whose layers differ (Gemma 3 and 4, ModernBERT, OLMo 3):
            ``"full_attention"``, ``"sliding_attention"``, or another name that the config uses.
        seq_len: the length of the sequence, for dynamic and longrope, which depend on it. Other kinds ignore it.

    If a dict leaves an entry out, the value is the one that transformers fills in for its model_type, for the families
    in docs/families.md. For any other family that has an entry about a rotation, base is 10000, and
    ``hidden_size // num_attention_heads`` channels are rotated. If the rope_type is "default", partial_rotary_factor is ignored for the families whose model ignores it,
    such as Llama (torch_rope.frequencies.families.WHOLE_HEADS).

    The result does not say whether a layer rotates at all (some layers of Llama 4, SmolLM3 and Cohere 2 do not), nor
    which of the several positions of a token rotates a pair (Qwen2-VL; see :mod:`torch_rope.multimodal`). The module of
    Ernie 4.5 VL has the same frequencies in another order.

    Raises ValueError if the config describes no rotation (BERT, GPT-2), the rope_type is unknown, layer_type is missing
    or unknown, the config lacks a parameter that the rope_type needs, or the function of the kind raises it.

    Example::

        inv_freq, attention_factor = torch_rope.frequencies.from_config(AutoConfig.from_pretrained(name))
        q, k = torch_rope.rotate_qk(q, k, inv_freq=inv_freq.to(q.device), attention_factor=attention_factor)
    """
    kind, arguments = parse(config, layer_type)
    if kind in ("dynamic", "longrope"):
        arguments["seq_len"] = seq_len
    return KINDS[kind](**arguments)


def is_interleaved(config: Any) -> bool:
    """Returns whether the model_type of a config has interleaved pairs."""
    config = _get(config, "text_config") or config
    kind = _get(config, "model_type")
    return kind in INTERLEAVED and not (kind in ROPE_INTERLEAVE and _get(config, "rope_interleave") is False)
