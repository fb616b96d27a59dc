"""Reads the frequencies of a model from its config, in the form that transformers gives it."""

import contextlib
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from .._mistakes import named, wrong_number
from . import families, of_transformers
from .families import HALF_SPLIT, INTERLEAVED, ROPE_INTERLEAVE
from .kinds import KINDS, Frequencies, _require, is_number, partial_rotary_dim
from .of_transformers import INSTEAD

# In the config of a model that transformers does not have, an entry with such a name must be one of those below.
_ABOUT_POSITIONS = re.compile(r"rope|rota[rt]|theta|yarn|mscale|ntk|xpos|alibi|axes|^(?!(max|num|n)_).*position", re.I)
_READ = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "qk_rope_head_dim", "rotary_dim"}
_READ |= {"no_rope_layers", "original_max_position_embeddings", "position_embedding_type", "rope_interleave"}
_READ |= {"rope_is_neox_style"}
_READ |= {"rope_full_precision", "fuse_rope", "use_mrope", "ignore_keys_at_rope_validation"}  # do not matter
# The entries of its rope parameters besides the parameters of the function of the kind.
_OF_EVERY_KIND = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_OF_EVERY_KIND |= {"max_position_embeddings", "finetuned"}  # do not matter
_NOT_BY_ROPE = {"rotary_dim", "head_dim", "base", "original_max_position", "seq_len", "long"}  # come from elsewhere
_NO_ATTENTION = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"}  # types of layers
_AT_ONCE = "set all at once, as in config.rope_parameters = {'rope_type': 'yarn', 'rope_theta': 1e6, ...}"
_OF_GTE = "; pass kind='ntk' to RotaryEmbedding for NTK-aware scaling, or assign GTE's own formula to its inv_freq, "
_OF_GTE += "default(rotary_dim, rope_theta * factor).inv_freq / factor ** (2 / rotary_dim)"


def _need(good: bool, name: str, value: Any, must_be: str) -> None:
    _require(good, "from_config", name, value, must_be)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def understood(config: Any) -> Any:
    """Returns the config object that describes the attention. Raises ValueError if transformers does not have its model, and
    it has an entry about positions or a rotation that is not read."""
    _need(not isinstance(config, nn.Module), "config", type(config), "the config of a model; pass model.config")
    config = of_transformers.made(config)
    text = of_transformers.made(_get(config, "text_config") or config)
    named = isinstance(getattr(text, "model_type", 0), str | None)
    _need(named, "config", config, "a dict, or a config object of transformers (AutoConfig), with a model_type")
    for name, value in vars(text).items() if of_transformers.class_of(text) is None else ():
        is_read = value is None or name in _READ or not _ABOUT_POSITIONS.search(name)
        _need(is_read, name, value, f"absent, because its meaning is not known; {INSTEAD}")
    outer, inner = (_get(each, "rope_parameters") for each in (config, text))
    _need(outer in (None, inner), "rope_parameters", outer, f"{inner!r}, as in its text_config; pass the inner config")
    patch = _get(text, "patch_size") if _get(text, "vocab_size") is None else None
    _need(patch is None, "patch_size", patch, "absent: images have several axes (torch_rope.multimodal.axial)")
    return text


def _against_rotation(config: Any) -> tuple[str, Any, str] | None:
    """Returns what says that a model does not rotate: the name and the value of an entry, and what to do; or None."""
    family = config.model_type if of_transformers.class_of(config) else None
    for name, values in families.ROTATES_IF.get(family, {}).items():
        if (value := _get(config, name)) not in values:
            return name, value, ""
    if config.model_type in families.NO_PARAMETERS or _get(config, "rope_parameters"):
        return None
    inner = " or ".join(f"config.{name}" for name, value in vars(config).items() if hasattr(value, "model_type"))
    advice = f"pass the inner config, {inner}" if inner else "transformers 5 gives them to models that do"
    return "model_type", config.model_type, f": the config has no rope_parameters; {advice}"


def _by_type(config: Any) -> dict[str | None, Mapping | None]:
    """Returns layer type -> rope parameters, or None -> the rope parameters of all layers."""
    if config.model_type in families.NO_PARAMETERS:
        return {None: {"rope_theta": getattr(config, "rope_theta", 10000.0)}}
    rope, types = config.rope_parameters, _get(config, "layer_types") or ()
    _need(isinstance(rope, dict), "rope_parameters", rope, "a dict")
    return {n: v for n, v in rope.items() if isinstance(v, dict) or (v is None and n in types)} or {None: rope}


def _layers(config: Any, layer_type: str | None, layer: int | None) -> list[tuple]:
    """Returns what _layer does, of the layer with an index, or all layers of a type, or all layers."""
    by_type, count, types = _by_type(config), _get(config, "num_hidden_layers") or 0, _get(config, "layer_types")
    for name in ("layer_types", "layer_rope_theta", "no_rope_layers"):
        value = _get(config, name) or [None] * count
        _need(isinstance(value, list | tuple) and len(value) >= count, name, value, f"a list of {count} or more values")
    known = isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < (count or math.inf)
    _need(layer is None or known, "layer", layer, f"the index of a layer{f', 0 to {count - 1}' if count else ''}")
    names = {*(types or by_type), *families.LABELS.get(config.model_type, {}).values()} - {None}
    choices = f"one of {', '.join(sorted(map(repr, names)))}" if names else "None, because all layers are of one type"
    _need(layer_type is None or layer_type in names, "layer_type", layer_type, choices)
    _need(bool(types) or layer is None or None in by_type, "layer_types", types, "the type of each layer")
    if not types and None not in by_type:
        return [_layer(config, by_type, None, name) for name in by_type if layer_type in (None, name)]
    indices, types = [layer] if layer is not None else range(count), types or [None] * max(count, (layer or 0) + 1)
    found = [_layer(config, by_type, i, types[i]) for i in indices if layer_type in (None, types[i])]
    _need(layer is None or bool(found), "layer_type", layer_type, f"that of layer {layer}")
    return found or [_layer(config, by_type, None, layer_type)]  # of a label, or of a config without a number of layers


def _layer(config: Any, by_type: Mapping, i: int | None, layer_type: str | None) -> tuple[str | None, dict | None]:
    """Returns the rope parameters of the layer with index i, or of any layer of a type if i is None, after their name in the
    config; None if the layer does not rotate, or attends to another sequence."""
    label = None if None in by_type else families.LABELS.get(config.model_type, {}).get(layer_type, layer_type)
    attends = layer_type not in _NO_ATTENTION and i not in (_get(config, "cross_attention_layers") or ())  # Mllama
    _need(not attends or label in by_type, "layer_types", layer_type, f"one of {', '.join(map(repr, by_type))}")
    rope, thetas, flags = by_type.get(label), _get(config, "layer_rope_theta"), _get(config, "no_rope_layers")
    rotates = attends and rope is not None and (i is None or ((not flags or flags[i]) and (not thetas or thetas[i])))
    without = config.model_type in families.ALL_WITHOUT_WINDOW and _get(config, "sliding_window") is None
    if config.model_type in families.ONLY_WITH_WINDOW and not without and layer_type != "sliding_attention":
        prefix = _get(config, "prefix_dense_sliding_window_pattern") == 1 and i is not None  # Cohere 2 MoE
        rotates = prefix and config.mlp_layer_types[i] == "dense"
    if rope is None or not rotates:
        return label, None
    if i not in (_get(config, "rope_scaling_layers") or (i,)):  # Molmo 2
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if config.model_type in families.THETA_OF_LAYER and i is not None:
        rope = {**rope, "rope_theta": thetas[i]}
    return label, rope


def _kind(rope: Mapping, config: Any) -> tuple[str, Mapping]:
    """Returns the kind of rope parameters, and the parameters with the names that its function takes."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kinds = [repr(kind) for kind in KINDS if kind != "ntk"]
    _need(repr(kind) in kinds, "rope_type", kind, f"one of {', '.join(kinds)}{_OF_GTE if kind == 'ntk' else ''}")
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan: the factor is fixed, and parameters of YaRN mean nothing
        return "ntk", {**rope, "factor": rope["alpha"]}
    if config.model_type == "phimoe" and (long := rope.get("long_mscale")) is not None:  # its forward reads them
        short = rope.get("short_mscale")
        _need(short == long, "short_mscale", short, f"equal to long_mscale, which is {long!r}")
        rope = {**rope, "attention_factor": long}
    taken = ({*inspect.signature(KINDS[kind]).parameters} - _NOT_BY_ROPE) | _OF_EVERY_KIND
    for name in () if of_transformers.class_of(config) else rope.keys() - taken:
        _need(rope[name] is None, name, rope[name], f"absent, because rope_type {kind!r} does not have it")
    return kind, rope


def _rotary_dim(config: Any, part: float | None) -> int:
    """Returns how many channels of a head are rotated, by the entries that say so in most configs."""
    head_dim, hidden_size, heads = (_get(config, n) for n in ("head_dim", "hidden_size", "num_attention_heads"))
    good = isinstance(head_dim, int) or (head_dim is None and isinstance(hidden_size, int) and isinstance(heads, int))
    _need(good, "head_dim", head_dim, f"an integer, or hidden_size and num_attention_heads must be; {INSTEAD}")
    # DeepSeek keeps qk_rope_head_dim channels of a head for the rotation alone.
    own = _get(config, "rotary_dim") or _get(config, "qk_rope_head_dim")
    dim = own if own and part in (None, 1.0) else partial_rotary_dim(head_dim or hidden_size // heads, part or 1.0)
    _need(own in (None, dim), "partial_rotary_factor", part, f"such that {own} channels rotate, as another entry says")
    return dim


def _arguments(config: Any, label: str | None, rope: Mapping) -> tuple[str, dict]:
    """Returns the kind of frequencies of a layer, and the arguments of its function, of what _layer returns. Raises
    ValueError unless the function gives what the model's own class in transformers does."""
    kind, rope = _kind(rope, config)
    theta, longest = _get(rope, "rope_theta"), _get(config, "max_position_embeddings")
    _need(is_number(theta) and 0 < theta < math.inf, "rope_theta", theta, f"a positive number; {_AT_ONCE}")
    trained = label is None and _get(config, "original_max_position_embeddings")
    trained = trained or rope.get("original_max_position_embeddings") or longest
    given = {**rope, "original_max_position": longest if kind == "dynamic" else trained}
    if kind in ("yarn", "longrope") and rope.get("factor") is None and longest and trained:
        given["factor"] = longest / trained
    if label is not None:  # transformers looks for it beside the layer types
        given["truncate"] = config.rope_parameters.get("truncate")
    of_dim, _, *names = inspect.signature(KINDS[kind]).parameters.values()
    arguments = {"base": theta} | {p.name: given[p.name] for p in names if given.get(p.name) is not None}
    for p in names:
        good = p.name in arguments or p.default is not p.empty
        _need(good, p.name.replace("original_", ""), None, f"given for rope_type {kind!r}")
    cls, theirs = of_transformers.tables(config, label, rope)
    if not theirs or config.model_type in families.NOT_BY_CONFIG:  # whose frequencies are in an order of their own
        arguments = {of_dim.name: _rotary_dim(config, rope.get("partial_rotary_factor")), **arguments}
        KINDS[kind](**arguments)  # raises an error if they do not fit together
        return kind, arguments
    even, odd = ({of_dim.name: 2 * len(theirs[0].inv_freq) - i, **arguments} for i in (0, 1))
    if (difference := _difference(kind, even, theirs)) is None:
        return kind, even
    if kind != "proportional" and _difference(kind, odd, theirs) is None:  # an odd number rotates one more channel
        return kind, odd
    name, ours, must_be = difference
    must_be = f"{must_be}, as in {cls} of transformers, which reads this config otherwise; {INSTEAD}"
    raise wrong_number("torch_rope.frequencies.from_config", name, ours, must_be)


def _difference(kind: str, arguments: dict, theirs: list[Frequencies]) -> tuple | None:
    """Returns what of a kind differs from a class of transformers by more than float32 does (its name, ours, theirs), or None."""
    for lengths, (b, factor) in zip(({}, {"long": True}), theirs, strict=False):
        a, ours = KINDS[kind](**arguments, **lengths)
        i = int(((a - b).abs() - 2**-15 * b).argmax())  # differs most
        if abs(a[i] - b[i]) > 2**-15 * b[i]:
            return f"the frequency of pair {i}", a[i].item(), b[i].item()
        if not math.isclose(ours, factor, rel_tol=2**-20):
            return "attention_factor", ours, factor
    return None


@named
def parse(config: Any, layer_type: str | None = None, *, layer: int | None = None) -> tuple[str, dict]:
    """Returns the kind of a model's frequencies, a key of :data:`torch_rope.frequencies.KINDS`, and the arguments of its
    function, without seq_len and long: call it to follow the length of the sequence yourself. The arguments and errors
    are those of :func:`from_config`, which calls this function."""
    config = understood(config)
    must_be = families.NOT_BY_CONFIG.get(config.model_type, "")
    _need(not must_be, "model_type", config.model_type, must_be)
    return read(config, layer_type, layer)


def read(config: Any, layer_type: str | None = None, layer: int | None = None) -> tuple[str, dict]:
    """Returns what :func:`parse` does, of a config that is understood, and for families of NOT_BY_CONFIG, too."""
    if against := _against_rotation(config):
        _need(False, *against[:2], f"that of a model that rotates{against[2]}")
    unlike = {str(found): found for found in _layers(config, layer_type, layer)}
    found = [(name, _arguments(config, name, rope)) for name, rope in unlike.values() if rope is not None]
    name, value = ("layer_type", layer_type) if layer is None else ("layer", layer)
    _need(bool(found), name, value, "that of a layer that rotates; frequencies.rotates tells which do")
    types, first = sorted({name for name, _ in found}, key=str), found[0][1]
    if any(arguments != first for _, arguments in found):
        choices = f"one of {', '.join(map(repr, types))}, because layers differ; or pass layer"
        _need(layer_type is not None or len(types) == 1, "layer_type", None, choices)
        _need(False, "layer", layer, "the index of a layer, because layers differ")
    return first


@named
def rotates(config: Any, layer: int) -> bool:
    """Returns whether the layer with an index rotates. Some layers of Llama 4, SmolLM3, Cohere 2, EXAONE 4 and Granite SWA
    do not, nor do layers without attention, or that attend to another sequence (Mllama).

    The config and errors are those of :func:`from_config`; ValueError, too, if a model that rotates has no such layer.
    """
    config = understood(config)
    return _against_rotation(config) is None and _layers(config, None, layer)[0][1] is not None


@named
def from_config(
    config: Any, layer_type: str | None = None, seq_len: int | None = None, *, layer: int | None = None
) -> Frequencies:
    """Returns the frequencies of a model, read from its config.

    Args:
        config: a config object of transformers; or the dict of a config.json, of which transformers makes an object. If
            it is the config of a multimodal model, its text_config is read.
        layer_type: the type of the layer, in models whose layers differ by type (Gemma 3 and 4, ModernBERT, OLMo 3):
            ``"full_attention"``, ``"sliding_attention"``, or another name that the config uses.
        seq_len: the length of the sequence, for dynamic and longrope, which depend on it. Other kinds ignore it.
        layer: the index of the layer, instead of layer_type or together with it (Granite SWA: layers of a type differ).

    Without layer_type and layer, all layers that rotate must have the same frequencies. If transformers has the model, its
    own class makes frequencies of the config, too, and must agree: then no other entry matters. In the config of another
    model (a dict, remote code), each entry whose name is about positions or a rotation must be known. The result does not
    say which of several positions rotates a pair (Qwen2-VL): see :mod:`torch_rope.multimodal`.

    Raises:
        ValueError: the model or the layer does not rotate (:func:`rotates` tells), positions have several axes (vision),
            transformers refuses the config or reads it otherwise, an entry is not known, layer_type or layer is missing
            or unknown or they do not agree, or the function of the kind raises it.
        ImportError: config is a dict, and transformers is not installed.
    """
    kind, arguments = parse(config, layer_type, layer=layer)
    if kind in ("dynamic", "longrope"):
        arguments["seq_len"] = seq_len
    return KINDS[kind](**arguments)


@named
def is_interleaved(config: Any) -> bool:
    """Returns whether a model has interleaved pairs, by its model_type, or by its architectures if that is not known.

    The pairs are those of the weights, whatever the attention does to q and k before it rotates them. Raises ValueError
    if neither is known and the config has no rope_interleave.
    """
    with contextlib.suppress(ValueError, ImportError):  # a name is enough
        config = of_transformers.made(config)
    text = _get(config, "text_config") or config
    model_type, chosen, half_split = (_get(text, n) for n in ("model_type", "rope_interleave", "rope_is_neox_style"))
    chosen = half_split is False if chosen is None and half_split is not None else chosen
    family = {str(model_type), str(model_type).removesuffix("_text")} & (INTERLEAVED | HALF_SPLIT)
    if isinstance(chosen, bool) and (not family or family & ROPE_INTERLEAVE):
        return chosen
    advice = "pass interleaved= to RotaryEmbedding.from_config"
    _require(bool(family), "is_interleaved", "model_type", model_type, f"known, or architectures must be; {advice}")
    interleaved = bool(family & INTERLEAVED)
    _require(chosen in (None, interleaved), "is_interleaved", "rope_interleave", chosen, f"{interleaved}; or {advice}")
    return interleaved
