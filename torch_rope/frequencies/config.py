"""Reads the frequencies of a model from its config."""

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from . import families
from .families import DEFAULTS, HALF_SPLIT, INTERLEAVED, ROPE_INTERLEAVE, WHOLE_HEADS
from .kinds import KINDS, Frequencies, _require, is_number, partial_rotary_dim

# Name of an entry of a config -> names that older families use for it, or the params.json of Mistral.
_OLD_NAMES = {
    "head_dim": ("attention_head_dim", "kv_channels"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "n_heads", "encoder_num_attention_heads"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "max_position_embeddings": ("n_positions",),
    "layer_types": ("layers_block_type",),
    "attn_layer_indices": ("full_attn_idxs",),
    "rotary_dim": ("attn_rotary_emb",),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("partial_rotary_factors", "rotary_pct", "rope_pct", "rotary_emb_fraction"),
    "rope_interleave": ("rotary_emb_interleaved",),
}
# rope_type of a config -> kind. mrope (Qwen2-VL) and xdrope (Hunyuan-VL) say how positions are laid out.
_OLD_KINDS = {"su": "longrope", "deepseek_yarn": "yarn", "mrope": "default", "xdrope": "dynamic"}

# The entries of a config that describe a rotation.
_ENTRIES = ("rope_parameters", "rope_scaling", "rope_theta", "layer_rope_theta", "rope_local_base_freq")
_ENTRIES += ("global_rope_theta", "partial_rotary_factor", "rotary_dim", "qk_rope_head_dim", "yarn")
# A model does not rotate if its config has one of these as False.
_SWITCHES = ("rope", "rotary", "use_mem_rope", "use_rope", "use_rotary_embedding", "use_rotary_pos_emb")
# Entries that may have a value for each layer.
_BY_LAYER = ("layer_rope_theta", "rope_theta", "partial_rotary_factor", "no_rope_layers", "use_rope_layers")
# Entries that have a number for the type of each layer: DeepSeek-V4, MiMo-V2, MiniMax.
_TYPE_NUMBERS = {
    "compress_ratios": {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"},
    "hybrid_layer_pattern": {0: "full_attention", 1: "sliding_attention"},
    "attn_type_list": {0: "linear_attention", 1: "full_attention"},
}

# An entry with such a name is read, or does not matter, or is refused.
_ABOUT_ROTATION = re.compile("rope|rotary|theta|yarn|mscale", re.IGNORECASE)
_READ = {
    *_ENTRIES,
    *_SWITCHES,
    *_BY_LAYER,
    "rope_interleave",
    "rope_is_neox_style",
    *(old for names in _OLD_NAMES.values() for old in names),
}
_READ |= {"local_rope_theta", "compress_rope_theta", "swa_rope_theta", "no_rope_layer_interval", "rope_ratio"}
_READ |= {"rope_scaling_layers", "yarn_only_types"}
_NO_MATTER = {
    "rope_full_precision",  # says in which dtype angles are computed
    "fuse_rope",  # chooses a kernel
    "rope_3d",  # says how positions are laid out, as the next two do
    "use_mrope",
    "position_embedding_xdrope",
    "indexer_rope_interleave",  # is the pairing in the indexer of sparse attention
    "rotary_value",  # says whether v is rotated as well
    "ignore_keys_at_rope_validation",  # belongs to transformers itself
}
# The entries of rope parameters that every kind may have, besides the parameters of its function.
_OF_EVERY_KIND = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_OF_EVERY_KIND |= {
    "mrope_section",  # says how positions are laid out, as the next three do
    "mrope_interleaved",
    "interleaved",
    "xdrope_section",
    "max_position_embeddings",  # repeats the entry of the config
    "finetuned",  # says how the model was made
    "llama_4_scaling_beta",  # scales q
}
# Entry of the section "yarn" of Mistral's params.json -> entry of rope parameters.
_YARN_SECTION = {name: name for name in ("factor", "original_max_position_embeddings")}
_YARN_SECTION |= {"beta": "beta_fast", "alpha": "beta_slow"}

_NO_ATTENTION = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"}  # types of layers


def _need(good: bool, name: str, value: Any, must_be: str) -> None:
    _require(good, "from_config", name, value, must_be)


def _get(config: Any, name: str) -> Any:
    """Returns the value of an entry of a config, which is a dict or an object; None if it has no such entry."""
    for each in (name, *_OLD_NAMES.get(name, ())):
        value = config.get(each) if isinstance(config, Mapping) else getattr(config, each, None)
        if value is not None:
            return value
    return None


def _size(config: Any, name: str) -> int | None:
    """Returns an entry that is a positive number, or None."""
    value = _get(config, name)
    _need(value is None or (is_number(value) and value > 0), name, value, "a positive number")
    return value


def entries(config: Any) -> Mapping[str, Any]:
    """Returns the entries of a config. Raises ValueError if it is not a config."""
    advice = "a dict, or a config object of transformers, which AutoConfig.from_pretrained makes of a name"
    _need(not isinstance(config, nn.Module), "config", type(config), "the config of a model; pass model.config")
    _need(isinstance(config, Mapping) or hasattr(config, "__dict__"), "config", config, advice)
    return config if isinstance(config, Mapping) else vars(config)


def _about_rotation(config: Any) -> dict[str, Any]:
    """Returns the entries of a config whose names are about a rotation, without those that do not matter."""
    named = {name: value for name, value in entries(config).items() if _ABOUT_ROTATION.search(str(name))}
    return {n: value for n, value in named.items() if value is not None and n not in _NO_MATTER and str(n)[0] != "_"}


def _understood(config: Any) -> Any:
    """Returns the config that describes the attention, with the defaults of its family if it is a dict.

    Raises ValueError if it has an entry about a rotation that is not read, or describes another kind of rotation.
    """
    outer, text = _about_rotation(config), _get(config, "text_config") or config
    for name, value in outer.items():
        same = text is config or _get(text, name) == value
        _need(same, name, value, "absent, or that of text_config; pass the text_config alone to rotate text")
    for name, value in _about_rotation(text).items():
        if name == "rope_type":
            _need(False, name, value, "in the rope_parameters of a config; pass the whole config")
        _need(name in _READ, name, value, "absent, because its meaning is not known; remove it if it means nothing")
    if isinstance(text, Mapping):
        defaults = DEFAULTS.get(text.get("model_type"), {})
        present = {name: value for name, value in text.items() if value is not None or name == "sliding_window"}
        both = {"rope_parameters"} if "rope_scaling" in present else {}  # the default ones are replaced
        text = {name: value for name, value in defaults.items() if name not in both} | present
    # The config of ChatGLM has neither the base nor rotary_dim.
    ratio = _get(text, "rope_ratio")
    _need(not ratio, "rope_ratio", ratio, "absent: a config that has it does not describe a rotation")
    patch = _get(text, "patch_size") if _get(text, "vocab_size") is None else None
    _need(patch is None, "patch_size", patch, "absent: images have several axes (torch_rope.multimodal.axial)")
    return text


def _against_rotation(config: Any) -> tuple[str, Any, str] | None:
    """Returns what says that a model does not rotate: the name and the value of an entry, and what to do; or None."""
    model_type, style = _get(config, "model_type"), _get(config, "position_embedding_type")
    for name in ("alibi", *_SWITCHES):
        value = _get(config, name)
        if value is not None and bool(value) == (name == "alibi"):
            return name, value, ""
    if style == "nope" or style != {"esm": "rotary", "granitemoehybrid": "rope"}.get(model_type, style):
        return "position_embedding_type", style, ""
    if model_type in families.WITHOUT_ROTATION:
        return "model_type", model_type, ""
    known = model_type in WHOLE_HEADS | INTERLEAVED or model_type in DEFAULTS
    if known or any(_get(config, name) is not None for name in _ENTRIES):
        return None
    none = f": the config has none of {', '.join(_ENTRIES)}; if the model does rotate, add one"
    return "model_type", model_type, none


def _rope_parameters(config: Any) -> Mapping:
    """Returns the rope parameters of a config, whatever their name is."""
    given = {name: _get(config, name) for name in ("rope_scaling", "rope_parameters", "yarn")}
    given = {name: value for name, value in given.items() if value is not None and value != {}}
    for name, value in given.items():
        _need(isinstance(value, Mapping), name, value, "a dict")
        first = next(iter(given))
        _need(value == given[first], name, value, f"absent, or equal to {first}")
    if "yarn" not in given:
        return next(iter(given.values()), {})
    yarn = {name: value for name, value in given["yarn"].items() if value is not None}
    scaled = yarn.pop("apply_scale", True)
    for name, value in yarn.items():
        _need(name in _YARN_SECTION, f"yarn.{name}", value, f"absent: the section has {', '.join(_YARN_SECTION)}")
    rope = {"rope_type": "yarn"} | {_YARN_SECTION[name]: value for name, value in yarn.items()}
    return rope if scaled else rope | {"attention_factor": 1.0}


def _layer_types(config: Any, count: int | None) -> list[str] | None:
    """Returns the type of each layer, or None if the config does not tell."""
    if types := _get(config, "layer_types"):
        return list(types)
    for name, types in _TYPE_NUMBERS.items():
        if (numbers := _get(config, name)) is not None:
            good = isinstance(numbers, list | tuple) and all(number in types for number in numbers)
            _need(good, name, numbers, f"a list of {', '.join(map(str, types))}")
            return [types[number] for number in numbers]
    if count is not None and (attending := _get(config, "attn_layer_indices")) is not None:  # Bamba, LFM2
        return ["full_attention" if i in attending else "linear_attention" for i in range(count)]
    if count is not None and (blocks := _get(config, "block_types")):  # RecurrentGemma
        return [blocks[i % len(blocks)] for i in range(count)]
    names = ("sliding_window_pattern", "global_attn_every_n_layers", "full_attention_interval")
    name = next((name for name in names if _get(config, name)), None)
    if count is None or name is None:
        return None
    every = _get(config, name)
    other = "linear_attention" if name == "full_attention_interval" else "sliding_attention"  # the first is Qwen3-Next
    if isinstance(every, str):  # such as "LLLG"
        return [other if every[i % len(every)] == "L" else "full_attention" for i in range(count)]
    first = 0 if str(_get(config, "model_type")).startswith("modernbert") else 1
    return [other if (i + first) % every else "full_attention" for i in range(count)]


def _by_type(config: Any, rope: Mapping, types: list[str]) -> dict[str | None, Mapping | None]:
    """Returns layer type -> rope parameters. If all types share them, the dict has the key None as well."""
    nested = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    if nested:
        shared = {name: value for name, value in rope.items() if name not in nested and name not in types}
        layers = {name: {**shared, **value} for name, value in nested.items()}
        if {"main", "compress"} - layers.keys():
            return layers | {name: None for name in types if name in rope and rope[name] is None}
        main, compress = layers["main"], layers["compress"]
    # Older configs have one rope_scaling, and the second base under a separate name.
    elif (local := _get(config, "local_rope_theta")) is not None:  # ModernBERT
        bases = {"sliding_attention": local, "full_attention": _get(config, "global_rope_theta")}
        return {layer_type: {"rope_theta": base, **rope} for layer_type, base in bases.items()}
    elif (theta := _get(config, "compress_rope_theta")) is not None:  # DeepSeek-V4
        is_yarn = "yarn" in (rope.get("rope_type"), rope.get("type"))
        main, compress = {}, ({"attention_factor": 1.0} if is_yarn else {}) | {**rope, "rope_theta": theta}
    else:
        unpaired = _get(config, "global_rope_theta")
        _need(unpaired is None, "global_rope_theta", unpaired, "absent, or given together with local_rope_theta")
        local = [_get(config, name) for name in ("rope_local_base_freq", "swa_rope_theta")]  # Gemma 3, MiMo-V2
        local = next(({"rope_theta": theta} for theta in local if theta is not None), None)
        if _get(config, "model_type") == "olmo3":
            local = {}
        if local is not None:
            return {"sliding_attention": local, "full_attention": rope}
        scaled = _get(config, "yarn_only_types")  # Step 3.5
        names = types if scaled is None else ("sliding_attention", "full_attention", *types)
        if scaled is None or not rope:
            return {None: rope, **dict.fromkeys(names, rope)}
        return {name: rope if name in scaled else {} for name in names}
    compressed = dict.fromkeys(("compress", "compressed_sparse_attention", "heavily_compressed_attention"), compress)
    return {"main": main, "sliding_attention": main, **compressed}


class _Layer(NamedTuple):
    """What the frequencies of a layer depend on."""

    layer_type: str | None
    rope: Mapping | None  # its rope parameters
    theta: Any
    part: Any  # partial_rotary_factor
    rotates: bool
    own: int | None  # the index of the layer, if it has a config of its own


def _layers(config: Any, layer_type: str | None, layer: int | None) -> list[_Layer]:
    """Returns the layer with an index, or all layers of a type, or all layers. Layers that are alike occur once."""
    rope = _rope_parameters(config)
    by_layer = {name: _get(config, name) for name in (*_BY_LAYER, "layer_types", *_TYPE_NUMBERS)}
    if isinstance(rope.get("rope_theta"), list | tuple):
        by_layer["rope_theta"] = rope["rope_theta"]
    by_layer = {name: value for name, value in by_layer.items() if isinstance(value, list | tuple) and value}
    count = _size(config, "num_hidden_layers") or min(map(len, by_layer.values()), default=None)
    for name, value in by_layer.items():
        _need(len(value) >= count, name, value, f"a list of {count} or more values, one for each layer")
    types = _layer_types(config, count)
    layers = _by_type(config, rope, types or [])
    names = ", ".join(sorted(map(repr, layers.keys() - {None})))
    choices = f"one of {names}" if names else "None, because all layers are of one type"
    _need(layer_type is None or layer_type in layers, "layer_type", layer_type, choices)

    indices = range(count or 0) if types or None in layers else []
    if layer is not None:
        known = isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < (count or math.inf)
        _need(known, "layer", layer, f"the index of a layer{f', 0 to {count - 1}' if count else ''}")
        by_window = _get(config, "model_type") in families.ONLY_WITH_WINDOW or None not in layers
        untold = by_window and types is None and layer_type is None
        _need(not untold, "layer_types", None, "the type of each layer, because layers rotate by their types")
        indices = [layer]
    chosen = [(i, types[i] if types else layer_type) for i in indices]
    if types and layer_type is not None:  # if types share no rope parameters, those of a type tell which type it is
        own = None if None in layers else layers[layer_type]
        chosen = [
            (i, name) for i, name in chosen if name == layer_type or (own is not None and layers.get(name) is own)
        ]
        _need(layer is None or bool(chosen), "layer_type", layer_type, f"that of layer {layer}: {types[layer or 0]!r}")
    if not chosen:
        chosen = [(None, name) for name in layers if layer_type in (None, name)]
    found: list[_Layer] = []
    for each in (_layer(config, layers, by_layer, *indexed) for indexed in chosen):
        if each not in found:
            found.append(each)
    return found


def _layer(config: Any, layers: Mapping, by_layer: Mapping, i: int | None, layer_type: str | None) -> _Layer:
    """Returns the layer with an index, or any layer of a type if the index is None."""
    attends = layer_type not in _NO_ATTENTION
    known = not attends or layer_type in layers or None in layers
    _need(known, "layer_types", layer_type, f"one of {', '.join(map(repr, layers))} in every layer")
    rope = layers[layer_type] if layer_type in layers else layers.get(None)
    scaled = _get(config, "rope_scaling_layers")  # Molmo 2
    if rope and scaled is not None and i is not None and i not in scaled:
        rope = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}

    def of_layer(name: str) -> Any:
        value = (rope or {}).get(name)
        value = by_layer.get(name, _get(config, name)) if value is None or isinstance(value, list | tuple) else value
        return value[i] if value is by_layer.get(name) and value and i is not None else value

    theta = of_layer("layer_rope_theta")
    theta = of_layer("rope_theta") if theta is None else theta
    theta = 10000.0 if theta is None else theta
    rotates = attends and rope is not None and (theta != 0 or theta is False)
    if i is not None:
        every = _get(config, "no_rope_layer_interval")
        flags = by_layer.get("no_rope_layers") or by_layer.get("use_rope_layers")
        rotates &= bool(flags[i] if flags else not every or (i + 1) % every)
    given, model_type = entries(config), _get(config, "model_type")
    no_window = model_type in families.ALL_WITHOUT_WINDOW and given.get("sliding_window", 0) is None
    if model_type in families.ONLY_WITH_WINDOW and not no_window and layer_type is not None:
        prefix = _get(config, "prefix_dense_sliding_window_pattern") == 1 and _get(config, "mlp_layer_types")
        dense = bool(prefix) and i is not None and prefix[i] == "dense"  # Cohere 2 MoE
        rotates &= layer_type == "sliding_attention" or dense
    own = getattr(config, "is_heterogeneous", False)
    if isinstance(config, Mapping):
        own = i in map(int, config.get("per_layer_config", ()))
    return _Layer(layer_type, rope, theta, of_layer("partial_rotary_factor"), rotates, i if own else None)


def _own_config(config: Any, layer: int | None) -> Any:
    """Returns the config of a layer that has one of its own, or else the config of all layers."""
    if layer is None or not isinstance(config, Mapping):
        return config if layer is None else config.per_layer_config[layer]
    own = {int(index): values for index, values in config["per_layer_config"].items()}
    return {**config, "global_head_dim": None, **own[layer]}


def _head_dim(config: Any, layer_type: str | None) -> int:
    """Returns head_dim, computed from hidden_size if the config does not give it."""
    names = {"full_attention": "global_head_dim", "sliding_attention": "swa_head_dim"}  # Gemma 4, MiMo-V2
    own = _size(config, names[layer_type]) if layer_type in names else None
    head_dim = _size(config, "head_dim") if own is None else own
    if head_dim is not None:
        return head_dim
    hidden_size, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    _need(hidden_size is not None, "hidden_size", hidden_size, "a number unless head_dim is given")
    _need(heads is not None, "num_attention_heads", heads, "a number unless head_dim is given")
    return hidden_size // heads


def _kind(rope: Mapping) -> tuple[str, Mapping]:
    """Returns the kind of rope parameters, and the parameters that it reads. Raises ValueError if there are others."""
    given = [rope[name] for name in ("rope_type", "type") if rope.get(name) not in (None, "mrope")]
    known = ", ".join(map(repr, [*KINDS, *_OLD_KINDS]))
    for value in given:
        good = isinstance(value, str) and (value in KINDS or value in _OLD_KINDS)
        _need(good, "rope_type", value, f"one of {known}")
    kinds = {_OLD_KINDS.get(value, value) for value in given} or {"default"}
    _need(len(kinds) == 1, "rope_type", rope.get("rope_type"), f"equal to type, which is {rope.get('type')!r}")
    (kind,) = kinds
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan: the factor is fixed, and parameters of YaRN mean nothing
        kind, rope = "ntk", {n: v for n, v in rope.items() if n in _OF_EVERY_KIND} | {"factor": rope["alpha"]}
    if kind == "yarn" and rope.get("long_factor"):  # early configs of Phi-3 name the wrong type
        kind = "longrope"
    taken = {*inspect.signature(KINDS[kind]).parameters, *_OF_EVERY_KIND}
    taken |= {"short_mscale", "long_mscale"} if kind == "longrope" else set()
    for name, value in rope.items():
        _need(value is None or name in taken, name, value, f"absent, because rope_type {kind!r} does not have it")
    return kind, rope


def _arguments(config: Any, layer: _Layer) -> tuple[str, dict]:
    """Returns the kind of the frequencies of a layer, and the arguments of its function."""
    config, (kind, rope) = _own_config(config, layer.own), _kind(layer.rope or {})
    theta, model_type = layer.theta, _get(config, "model_type")
    for name, value, good in (
        ("rope_theta", theta, is_number(theta) and 0 < theta < math.inf),
        ("partial_rotary_factor", layer.part, layer.part is None or is_number(layer.part)),
    ):
        _need(good, name, value, "a positive number" + ("; pass layer" if isinstance(value, list | tuple) else ""))
    part = 1.0 if layer.part is None or (kind == "default" and model_type in WHOLE_HEADS) else layer.part
    if kind == "proportional":
        arguments = {"head_dim": _head_dim(config, layer.layer_type)}
    else:
        # DeepSeek keeps qk_rope_head_dim channels of a head for the rotation alone. GPT-J's config gives rotary_dim, which
        # transformers does not read for MiniMax-M3.
        own, rotary_dim = _get(config, "qk_rope_head_dim"), _get(config, "rotary_dim")
        if not own and (rotary_dim is None or layer.part is not None or model_type == "minimax_m3_vl_text"):
            of_part = partial_rotary_dim(_head_dim(config, layer.layer_type), part)
            advice = f"head_dim * partial_rotary_factor, which is {of_part}"
            _need(rotary_dim in (None, of_part), "rotary_dim", rotary_dim, advice)
            rotary_dim = of_part
        arguments = {"rotary_dim": own or rotary_dim}
    arguments["base"] = theta

    longest = _size(config, "max_position_embeddings")
    # Phi-3 gives it next to rope_scaling, and that value takes precedence.
    trained = _size(config, "original_max_position_embeddings") or _size(rope, "original_max_position_embeddings")
    trained = longest if trained is None or kind == "dynamic" else trained
    given = {**rope, "partial_rotary_factor": part, "original_max_position": trained}
    if kind in ("yarn", "longrope") and rope.get("factor") is None and longest:
        given["factor"] = longest / trained
    if kind == "longrope" and rope.get("long_mscale") is not None:  # Phi-3.5-MoE, whose two factors are equal
        short, long = rope.get("short_mscale"), rope["long_mscale"]
        _need(short == long, "short_mscale", short, f"equal to long_mscale, which is {long!r}")
        given["attention_factor"] = long
    for name, parameter in inspect.signature(KINDS[kind]).parameters.items():
        if name in arguments or name in ("seq_len", "long"):
            continue
        if given.get(name) is not None:
            arguments[name] = given[name]
        elif parameter.default is parameter.empty:
            name = "max_position_embeddings" if name == "original_max_position" else name
            _need(False, name, None, f"given for rope_type {kind!r}")
    for name, value in arguments.items():
        if name == "truncate":
            _need(isinstance(value, bool), name, value, "True or False")
        elif name in ("short_factor", "long_factor"):
            good = isinstance(value, list | tuple) and all(map(is_number, value))
            _need(good, name, value, "a list of numbers")
        else:
            _need(is_number(value), name, value, "a number")
    return kind, arguments


def parse(config: Any, layer_type: str | None = None, *, layer: int | None = None) -> tuple[str, dict]:
    """Returns the kind of a model's frequencies, and the keyword arguments of its function.

    The kind is a key of :data:`torch_rope.frequencies.KINDS`. The arguments and errors are those of :func:`from_config`,
    which calls this function. Call it directly to follow the length of the sequence yourself: the keyword arguments do
    not include seq_len and long.
    """
    model_type = _get(_get(config, "text_config") or config, "model_type")
    must_be = families.NOT_BY_CONFIG.get(model_type, "")
    _need(not must_be, "model_type", model_type, must_be)
    return read(config, layer_type, layer)


def read(config: Any, layer_type: str | None = None, layer: int | None = None) -> tuple[str, dict]:
    """Returns what :func:`parse` does, and of the families whose frequencies need more than a config, too."""
    config = _understood(config)
    if against := _against_rotation(config):
        _need(False, *against[:2], f"that of a model that rotates{against[2]}")
    layers = _layers(config, layer_type, layer)
    rotating = [each for each in layers if each.rotates]
    if all(each.theta == 0 and each.theta is not False for each in layers):
        _need(False, "rope_theta", 0, "a positive number: 0 means that there is no rotation")
    named = ("layer_type", layer_type) if layer is None else ("layer", layer)
    _need(bool(rotating), *named, "that of a layer that rotates: this one does not; frequencies.rotates tells which do")
    found: list[tuple[str, dict]] = []
    for each in rotating:
        if (arguments := _arguments(config, each)) not in found:
            found.append(arguments)
    types = sorted({each.layer_type for each in rotating}, key=str)
    if layer_type is None and 1 < len(found) <= len(types):
        _need(False, "layer_type", None, f"one of {', '.join(map(repr, types))}, because layers differ; or pass layer")
    _need(len(found) == 1, "layer", layer, "the index of a layer, because layers differ")
    return found[0]


def rotates(config: Any, layer: int) -> bool:
    """Returns whether a layer of a model rotates, by its config.

    Some layers of Llama 4, SmolLM3, Cohere 2, EXAONE 4 and Granite SWA do not, nor do layers without attention.

    Args:
        config: as in :func:`from_config`.
        layer: the index of the layer.

    Raises ValueError if the model has no such layer, or the config is not understood, as in :func:`from_config`.
    """
    config = _understood(config)
    return any(each.rotates for each in _layers(config, None, layer)) and _against_rotation(config) is None


def from_config(
    config: Any, layer_type: str | None = None, seq_len: int | None = None, *, layer: int | None = None
) -> Frequencies:
    """Returns the frequencies of a model, read from its config.

    Args:
        config: a config object of transformers, or a dict such as ``json.load`` of config.json or of Mistral's
            params.json. If it is the config of a multimodal model, its text_config is read.
        layer_type: the type of the layer, in models whose layers differ by type (Gemma 3 and 4, ModernBERT, OLMo 3):
            ``"full_attention"``, ``"sliding_attention"``, or another name that the config uses.
        seq_len: the length of the sequence, for dynamic and longrope, which depend on it. Other kinds ignore it.
        layer: the index of the layer, instead of layer_type or together with it. Layers may differ within a type
            (Granite SWA, Step 3.5).

    Without layer_type and layer, all layers that rotate must have the same frequencies.

    A config is understood or refused: any entry whose name holds "rope", "rotary", "theta", "yarn" or "mscale", and any
    entry of rope parameters, must be known. If a dict leaves an entry out, the value is the one that transformers fills
    in for its model_type, for the families in docs/families.md. For any other family that has an entry about a rotation,
    base is 10000, and ``hidden_size // num_attention_heads`` channels are rotated. If the rope_type is "default",
    partial_rotary_factor is ignored for the families whose model ignores it, such as Llama
    (torch_rope.frequencies.families.WHOLE_HEADS).

    The result does not say which of the several positions of a token rotates a pair (Qwen2-VL; see
    :mod:`torch_rope.multimodal`).

    Raises ValueError if the model or the layer does not rotate (:func:`rotates` tells), the positions have several axes
    (vision), an entry is not known or is not a number where it must be one, the rope_type is unknown, layer_type or layer
    is missing or unknown or they do not agree, a list has fewer values than the model has layers, the config lacks a
    parameter that the rope_type needs, or the function of the kind raises it.

    Example::

        config = AutoConfig.from_pretrained(name)
        inv_freq, attention_factor = torch_rope.frequencies.from_config(config).to(q.device)
        q, k = torch_rope.rotate_qk(q, k, inv_freq=inv_freq, attention_factor=attention_factor)
    """
    kind, arguments = parse(config, layer_type, layer=layer)
    if kind in ("dynamic", "longrope"):
        arguments["seq_len"] = seq_len
    return KINDS[kind](**arguments)


def _plain(name: str) -> str:
    """Returns the name of a family without what varies, given it or a class of models such as DeepseekV3ForCausalLM."""
    return re.sub("(For[A-Z].*|LMHeadModel|Model)$", "", name).lower().replace("_", "").replace("-", "")


_FAMILIES = {_plain(name): name for name in INTERLEAVED | HALF_SPLIT}


def is_interleaved(config: Any) -> bool:
    """Returns whether a model has interleaved pairs, by its model_type, or by its architectures if that is not known.

    Raises ValueError if neither is known and the config has no rope_interleave. Mistral's params.json is such a config:
    the weights next to it are interleaved, and those next to config.json half-split.
    """
    entries(config)  # raises an error unless it is a config
    config = _get(config, "text_config") or config
    named = [_get(config, "model_type"), *(_get(config, "architectures") or ())]
    plain = [_plain(name) for name in named if isinstance(name, str)]
    forms = [form for name in plain for form in (name, name.removesuffix("text"), f"{name}text")]
    family = next((_FAMILIES[form] for form in forms if form in _FAMILIES), None)
    chosen, half_split = _get(config, "rope_interleave"), _get(config, "rope_is_neox_style")
    chosen = not half_split if chosen is None and half_split is not None else chosen
    if isinstance(chosen, bool) and (family is None or family in ROPE_INTERLEAVE):
        return chosen
    advice = "pass interleaved= to RotaryEmbedding.from_config"
    _require(family is not None, "is_interleaved", "model_type", named[0], f"known, or architectures must be; {advice}")
    interleaved = family in INTERLEAVED
    _require(chosen in (None, interleaved), "is_interleaved", "rope_interleave", chosen, f"{interleaved}; or {advice}")
    return interleaved
