"""Reads the frequencies of a model from its config, in the form that transformers gives it."""

import contextlib
import copy
import difflib
import functools
import inspect
import logging
import math
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .._mistakes import named
from . import families
from .families import HALF_SPLIT, INTERLEAVED, ROPE_INTERLEAVE, _names
from .kinds import KINDS, Frequencies, _require, is_number, partial_rotary_dim

# The entries of a config class that torch_rope or the class itself reads.
_READ = _names(
    """
    rope_parameters rope_theta partial_rotary_factor qk_rope_head_dim rotary_dim head_dim hidden_size
    num_attention_heads num_hidden_layers layer_types layer_rope_theta no_rope_layers no_rope_layer_interval alibi
    rope_scaling_layers rope_scaling compress_rope_theta max_position_embeddings original_max_position_embeddings
    use_mem_rope
    """
)
_OF_ANY_MODEL = _names("rope_parameters rope_theta rope_scaling partial_rotary_factor")
# Any other entry with such a name is refused. If the class has an entry about positions, it does not matter.
_ABOUT_ROTATION = re.compile("rope|rota[rt]|theta|yarn|mscale|ntk|xpos|alibi|axes", re.IGNORECASE)
_ABOUT_POSITIONS = re.compile(f"{_ABOUT_ROTATION.pattern}|^(?!(max|num|n)_).*position", re.IGNORECASE)
_NO_MATTER = _names("position_embedding_type rope_interleave rope_is_neox_style")  # are read whatever the class is
_NO_MATTER |= _names("rope_3d use_mrope position_embedding_xdrope")  # say how positions are laid out
_NO_MATTER |= _names("rope_full_precision fuse_rope")  # choose a dtype and a kernel
_NO_MATTER |= _names("indexer_rope_interleave rotary_value ignore_keys_at_rope_validation")  # are not about q and k
# The entries of rope parameters that every kind may have, besides the parameters of its function.
_OF_EVERY_KIND = _names("rope_type type rope_theta partial_rotary_factor original_max_position_embeddings")
_OF_EVERY_KIND |= _names("mrope_section mrope_interleaved interleaved xdrope_section")  # say how positions are laid out
_OF_EVERY_KIND |= _names("max_position_embeddings finetuned llama_4_scaling_beta")  # are not about frequencies
_NOT_BY_ROPE = {"rotary_dim", "head_dim", "base", "original_max_position", "seq_len", "long"}  # come from elsewhere
_OF_SOME_KIND = {name for kind in KINDS.values() for name in inspect.signature(kind).parameters} - _NOT_BY_ROPE
_NO_ATTENTION = {"linear_attention", "conv", "mamba", "recurrent", "moe", "mlp"}  # types of layers
_INSTEAD = "pass head_dim, base, interleaved, kind and its parameters (frequencies.KINDS) to RotaryEmbedding instead"
_AT_ONCE = "set all at once, as in config.rope_parameters = {'rope_type': 'yarn', 'rope_theta': 1e6, ...}"


def _need(good: bool, name: str, value: Any, must_be: str) -> None:
    _require(good, "from_config", name, value, must_be)


def _meant(name: str, known: Iterable[str]) -> str:
    """Returns what a message says of an unknown entry whose name is nearly a known one, or an empty text."""
    return "".join(f"absent; did you mean {near}?" for near in difflib.get_close_matches(name, [*known], 1, 0.8))


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what transformers logs in this thread."""
    thread = threading.get_ident()
    with contextlib.ExitStack() as stack:
        for handler in logging.getLogger("transformers").handlers:
            handler.addFilter(of_others := lambda record: record.thread != thread)
            stack.callback(handler.removeFilter, of_others)
        yield


def _made(config: Mapping) -> Any:
    """Returns the config object that transformers makes of a dict: it knows defaults and old names of the family."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        must = f"must be installed to read a dict; {_INSTEAD}"
        raise ImportError(f"torch_rope.frequencies.from_config: transformers {must}") from error
    config = copy.deepcopy(dict(config))
    model_type, inner = config.pop("model_type", None), config.get("text_config")
    known, text = str(model_type) in CONFIG_MAPPING, inner if isinstance(inner, dict) else config
    if text is inner and not known:
        return _made(text)
    for name in [name for name in config if "axes" in str(name)]:
        _need(False, name, config[name], "absent: several axes of positions are the matter of torch_rope.multimodal")
    _need(known, "model_type", model_type, f"one that the installed transformers knows; {_INSTEAD}")
    rope, old = (text.get(name) for name in ("rope_parameters", "rope_scaling"))
    for name, value in ("rope_parameters", rope), ("rope_scaling", old):
        _need(value is None or isinstance(value, dict), name, value, "a dict")
        for each in _parts(value):
            for entry in each.keys() - _OF_SOME_KIND - _OF_EVERY_KIND:
                meant = _meant(entry, _OF_SOME_KIND | _OF_EVERY_KIND)
                _need(not meant, entry, each[entry], meant)
            of_a_kind = {entry for entry in each if each[entry] is not None} - _OF_EVERY_KIND
            if not (each.get("rope_type") or each.get("type") or of_a_kind - _OF_SOME_KIND) and of_a_kind:
                must_have = "must have one, such as 'linear' or 'yarn'"
                raise ValueError(f"torch_rope.frequencies.from_config: {name} has no rope_type but {must_have}")
    _need(not rope or not old or rope == old, "rope_scaling", old, "absent, or equal to rope_parameters")
    if not any(re.search("theta|rotary_emb_base", str(name)) for name in text):
        # transformers takes the base of the class, but the model may have had another before it was lost.
        for each in _parts(rope):
            each.setdefault("rope_theta", None)
    try:
        with _quiet():
            cls = CONFIG_MAPPING[model_type]
            return cls(**getattr(cls, "_decode_special_floats", dict)(config))  # such as infinity, which JSON lacks
    except Exception as error:
        raise ValueError(f"torch_rope.frequencies.from_config: transformers refuses the config: {error}") from error


@functools.cache
def _of_class(cls: type) -> tuple[bool, set[str], dict]:
    """Returns whether a config class belongs to transformers, the names of the entries of that class or of the one that it
    extends, and the rope parameters that it gives by default."""
    usual = own = next((each for each in cls.__mro__ if each.__module__.startswith("transformers.")), object)
    with _quiet(), contextlib.suppress(Exception):
        usual = own()
    names = {*getattr(own, "__dataclass_fields__", ()), *getattr(usual, "__dict__", ())}
    return own is cls, names, _get(usual, "rope_parameters") or {}


def _parts(rope: Any) -> list[dict]:
    """Returns the rope parameters of each layer type, or of all layers."""
    return [value for value in rope.values() if isinstance(value, dict)] or [rope] if isinstance(rope, dict) else []


def understood(config: Any) -> Any:
    """Returns the config object that describes the attention. Raises ValueError if an entry is not understood."""
    _need(not isinstance(config, nn.Module), "config", type(config), "the config of a model; pass model.config")
    config = _made(config) if isinstance(config, Mapping) else config
    text = _get(config, "text_config") or config
    advice = "a dict, or a config object of transformers, which AutoConfig.from_pretrained makes of a name"
    _need(hasattr(text, "model_type"), "config", config, advice)
    version = getattr(sys.modules.get("transformers"), "__version__", "5.20")
    _need([*map(int, version.split(".")[:2])] >= [5, 20], "transformers", version, "at least 5.20")
    _check_names(text, text)
    _check_names(config, text)
    patch = _get(text, "patch_size") if _get(text, "vocab_size") is None else None
    _need(patch is None, "patch_size", patch, "absent: images have several axes (torch_rope.multimodal.axial)")
    return text


def _check_names(config: Any, text: Any) -> None:
    """Raises ValueError if an entry is not read, but its name is about a rotation, or nearly that of one that is read.
    text: the config that describes the attention."""
    is_own, names, _ = _of_class(type(config))
    known = names if is_own else names.union(vars(config))
    places = _parts(_get(text, "rope_parameters")) + ([vars(text)] if text is not config else [])
    for name, value in vars(config).items():
        read = [place[name] for place in places if name in place]  # the same entry, where it is read
        if name.startswith("_") or value is None or value in read or name in _NO_MATTER:
            continue
        about = (_ABOUT_ROTATION if name in known else _ABOUT_POSITIONS).search(name)
        near = [] if name in known | _READ else difflib.get_close_matches(name, known & _READ | _OF_ANY_MODEL, 1, 0.87)
        unread = (about and (read or name not in known & _READ)) or (near and not name.endswith(f"_{near[0]}"))
        absent = f"absent; did you mean {near[0]}?" if near else f"absent, because its meaning is not known; {_INSTEAD}"
        _need(not unread, name, value, f"{read[0]!r}, as where it is read" if read else absent)


def _against_rotation(config: Any) -> tuple[str, Any, str] | None:
    """Returns what says that a model does not rotate: the name and the value of an entry, and what to do; or None."""
    model_type = config.model_type
    rotates_if = {"position_embedding_type": (None, "rope", "rotary")} | families.ROTATES_IF.get(model_type, {})
    for name, values in rotates_if.items():
        if (value := _get(config, name)) not in values:
            return name, value, ""
    if model_type in families.NO_PARAMETERS or _get(config, "rope_parameters"):
        return None
    if _of_class(type(config))[2]:
        return "rope_parameters", _get(config, "rope_parameters"), f"; {_AT_ONCE}"
    inner = " or ".join(f"config.{name}" for name, value in vars(config).items() if hasattr(value, "model_type"))
    advice = f"pass the inner config, {inner}" if inner else "transformers 5 gives them to models that do"
    return "model_type", model_type, f": the config has no rope_parameters; {advice}"


def _by_type(config: Any) -> dict[str | None, Mapping | None]:
    """Returns layer type -> rope parameters, or None -> the rope parameters of all layers."""
    if config.model_type in families.NO_PARAMETERS:
        return {None: {"rope_theta": getattr(config, "rope_theta", 10000.0)}}
    rope, types, (_, _, usual) = config.rope_parameters, {*(_get(config, "layer_types") or ())}, _of_class(type(config))
    _need(isinstance(rope, dict), "rope_parameters", rope, "a dict")
    nested = {name for each in (rope, usual) for name, value in each.items() if isinstance(value, dict)}
    for name, value in rope.items() if nested else ():
        good = name in nested | types or value in (None, _get(config, "default_theta"))
        _need(good, name, value, f"given for each layer type ({', '.join(sorted(nested))}); {_AT_ONCE}")
    by_type = {name: rope[name] for name in rope if name in nested | types} if nested else {None: rope}
    for name, value in by_type.items():
        _need(value is None or isinstance(value, dict), f"rope_parameters[{name!r}]", value, "a dict")
        of_class = (usual.get(name) if nested else usual) or {}
        for entry in ("rope_theta", "partial_rotary_factor") if value is not None else ():
            lost = value.get(entry) is None and (entry == "rope_theta" or of_class.get(entry) not in (None, 1.0))
            _need(not lost, entry, None, f"given, as it is in each config of {config.model_type}; {_AT_ONCE}")
    labels = families.LABELS.get(config.model_type, {})
    return by_type | {name: by_type[label] for name, label in labels.items() if label in by_type}


def _layers(config: Any, layer_type: str | None, layer: int | None) -> list[tuple]:
    """Returns what _layer does, of the layer with an index, or all layers of a type, or all layers."""
    by_type, count, types = _by_type(config), _get(config, "num_hidden_layers") or 0, _get(config, "layer_types")
    for name in ("layer_types", "layer_rope_theta", "no_rope_layers"):
        value = _get(config, name) or [None] * count
        good = isinstance(value, list | tuple) and len(value) >= count
        _need(good, name, value, f"a list of {count} or more values, one for each layer")
    known = isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < (count or math.inf)
    _need(layer is None or known, "layer", layer, f"the index of a layer{f', 0 to {count - 1}' if count else ''}")
    names = {*by_type, *(types or ())} - {None}
    choices = f"one of {', '.join(sorted(map(repr, names)))}" if names else "None, because all layers are of one type"
    _need(layer_type is None or layer_type in names, "layer_type", layer_type, choices)
    _need(bool(types) or layer is None or None in by_type, "layer_types", types, "the type of each layer")
    indices = [layer] if layer is not None else range(count) if types or None in by_type else []
    chosen = [(i, types[i] if types else None) for i in indices]
    of_type = [(i, name) for i, name in chosen if layer_type in (None, name)]
    of_layer = f"that of layer {layer}: {dict(chosen).get(layer)!r}"
    _need(layer is None or bool(of_type), "layer_type", layer_type, of_layer)
    no_index = [(None, name) for name in by_type] if layer_type is None else [(None, layer_type)]
    return [_layer(config, by_type, i, name) for i, name in of_type or no_index]


def _layer(config: Any, by_type: Mapping, i: int | None, layer_type: str | None) -> tuple[str | None, Any, dict | None]:
    """Returns the type, the config and the rope parameters (None if it does not rotate) of the layer with index i, or
    of any layer of a type if i is None."""
    own = config.per_layer_config[i] if i is not None and _get(config, "is_heterogeneous") else config
    name, attends = None if None in by_type else layer_type, layer_type not in _NO_ATTENTION
    choices = f"one of {', '.join(map(repr, by_type))}, which have rope parameters"
    _need(not attends or name in by_type, "layer_types", layer_type, choices)
    rope, thetas, flags = by_type.get(name), _get(config, "layer_rope_theta"), _get(config, "no_rope_layers")
    rotates = attends and rope is not None and (i is None or not flags or bool(flags[i]))
    without = config.model_type in families.ALL_WITHOUT_WINDOW and _get(own, "sliding_window") is None
    if config.model_type in families.ONLY_WITH_WINDOW and not without and layer_type != "sliding_attention":
        prefix = _get(config, "prefix_dense_sliding_window_pattern") == 1 and i is not None  # Cohere 2 MoE
        rotates = prefix and config.mlp_layer_types[i] == "dense"
    if rotates and i not in (_get(config, "rope_scaling_layers") or (i,)):  # Molmo 2
        rope = {"rope_theta": rope["rope_theta"]}
    if rotates and thetas and i is not None:
        rope, rotates = {**rope, "rope_theta": thetas[i]}, thetas[i] != 0
    return layer_type, own, rope if rotates else None


def _kind(rope: Mapping) -> tuple[str, Mapping]:
    """Returns the kind of rope parameters, and the parameters that it reads. Raises ValueError if there are others."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _need(isinstance(kind, str) and kind in KINDS, "rope_type", kind, f"one of {', '.join(map(repr, KINDS))}")
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan: the factor is fixed, and parameters of YaRN mean nothing
        kind, rope = "ntk", {n: v for n, v in rope.items() if n in _OF_EVERY_KIND} | {"factor": rope["alpha"]}
    if kind == "longrope" and (long := rope.get("long_mscale")) is not None:  # Phi-3.5-MoE, whose two factors are equal
        short, rope = rope.get("short_mscale"), {n: v for n, v in rope.items() if not n.endswith("mscale")}
        _need(short == long, "short_mscale", short, f"equal to long_mscale, which is {long!r}")
        rope["attention_factor"] = long
    taken = ({*inspect.signature(KINDS[kind]).parameters} - _NOT_BY_ROPE) | _OF_EVERY_KIND
    others = [name for name, value in rope.items() if value is not None and name not in taken]
    for name in sorted(others, key=_OF_SOME_KIND.__contains__):  # first those that no kind has
        must_be = _meant(name, taken) or f"absent, because rope_type {kind!r} does not have it"
        if kind == "default" and (having := [k for k, f in KINDS.items() if name in inspect.signature(f).parameters]):
            _need(False, "rope_type", kind, f"one that has {name}, such as {min(having, key='yarn'.__ne__)!r}")
        _need(False, name, rope[name], must_be)
    return kind, rope


def _arguments(config: Any, rope: Mapping) -> tuple[str, dict]:
    """Returns the kind of frequencies of a layer by its config and rope parameters, and the arguments of the function."""
    kind, rope = _kind(rope)
    theta, part, (is_own, _, usual) = rope["rope_theta"], rope.get("partial_rotary_factor"), _of_class(type(config))
    _need(is_number(theta) and 0 < theta < math.inf, "rope_theta", theta, "a positive number")
    _need(part is None or is_number(part), "partial_rotary_factor", part, "a positive number")
    # The classes of transformers give partial_rotary_factor to models of the kind "default" that read it.
    of_default = {name for each in _parts(usual) if each.get("rope_type") == "default" for name in each}
    read = "partial_rotary_factor" in of_default or config.model_type in families.PARTIAL or not is_own
    part = 1.0 if part is None or (kind == "default" and not read) else part
    head_dim, hidden_size, heads = (_get(config, n) for n in ("head_dim", "hidden_size", "num_attention_heads"))
    sizes = {"head_dim": head_dim} if head_dim else {"hidden_size": hidden_size, "num_attention_heads": heads}
    for name, value in sizes.items():
        _need(isinstance(value, int) and value > 0, name, value, "a positive integer")
    head_dim = head_dim or hidden_size // heads
    arguments: dict[str, Any] = {"head_dim": head_dim}
    if kind != "proportional":
        # DeepSeek keeps qk_rope_head_dim channels of a head for the rotation alone. GPT-J's config gives rotary_dim.
        own = _get(config, "rotary_dim" if config.model_type in families.NO_PARAMETERS else "qk_rope_head_dim")
        dim = own if own and part == 1.0 else partial_rotary_dim(head_dim, part)
        _need(own in (None, dim), "partial_rotary_factor", part, f"such that {own} channels rotate (qk_rope_head_dim)")
        arguments = {"rotary_dim": dim}
    arguments["base"] = theta
    _need(kind != "yarn" or "factor" in rope, "factor", None, "given for rope_type 'yarn'")  # as in transformers
    longest, trained = (_get(config, f"{name}max_position_embeddings") for name in ("", "original_"))
    trained = longest if kind == "dynamic" else rope.get("original_max_position_embeddings") or trained or longest
    given = {**rope, "partial_rotary_factor": part, "original_max_position": trained}
    if kind in ("yarn", "longrope") and rope.get("factor") is None and is_number(longest) and is_number(trained):
        given["factor"] = longest / trained
    for name, parameter in inspect.signature(KINDS[kind]).parameters.items():
        if (value := arguments.get(name, given.get(name))) is not None:
            is_list = name in ("short_factor", "long_factor")
            good = isinstance(value, list | tuple) and all(map(is_number, value)) if is_list else is_number(value)
            must_be = "a list of numbers" if is_list else "True or False" if name == "truncate" else "a number"
            _need(isinstance(value, bool) if name == "truncate" else good, name, value, must_be)
            arguments[name] = value
        name = "max_position_embeddings" if name == "original_max_position" else name
        missing = value is None and parameter.default is parameter.empty
        _need(not missing, name, None, f"given for rope_type {kind!r}")
    return kind, arguments


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
    unlike = {(each[0], id(each[1]), str(each[2])): each for each in _layers(config, layer_type, layer)}
    found = [(name, _arguments(own, rope)) for name, own, rope in unlike.values() if rope is not None]
    named = ("layer_type", layer_type) if layer is None else ("layer", layer)
    _need(bool(found), *named, "that of a layer that rotates: this one does not; frequencies.rotates tells which do")
    types, first = sorted({name for name, _ in found}, key=str), found[0][1]
    if any(arguments != first for _, arguments in found):
        choices = f"one of {', '.join(map(repr, types))}, because layers differ; or pass layer"
        _need(layer_type is not None or len(types) == 1, "layer_type", None, choices)
        _need(False, "layer", layer, "the index of a layer, because layers differ")
    return first


@named
def rotates(config: Any, layer: int) -> bool:
    """Returns whether the layer with an index rotates. Some layers of Llama 4, SmolLM3, Cohere 2, EXAONE 4 and Granite
    SWA do not, nor do layers without attention.

    The config and errors are those of :func:`from_config`; ValueError, too, if a model that rotates has no such layer.
    """
    config = understood(config)
    return _against_rotation(config) is None and _layers(config, None, layer)[0][2] is not None


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

    Without layer_type and layer, all layers that rotate must have the same frequencies. A config is understood or
    refused: an entry whose name is about positions or a rotation, and any of rope parameters, must be known, and none
    may be lost. partial_rotary_factor counts if the model reads it: Llama does not, for the rope_type "default". The
    result does not say which of several positions rotates a pair (Qwen2-VL): see :mod:`torch_rope.multimodal`.

    Raises:
        ValueError: the model or the layer does not rotate (:func:`rotates` tells), positions have several axes
            (vision), transformers does not know the model_type of a dict, an entry is not understood, layer_type or
            layer is missing or unknown or they do not agree, or the function of the kind raises it.
        ImportError: config is a dict, and transformers is not installed.
    """
    kind, arguments = parse(config, layer_type, layer=layer)
    if kind in ("dynamic", "longrope"):
        arguments["seq_len"] = seq_len
    return KINDS[kind](**arguments)


def _plain(name: str) -> str:
    """Returns the name of a family without what varies, given it or a class of models such as DeepseekV3ForCausalLM."""
    name = re.sub("(For[A-Z].*|LMHeadModel|Model)$", "", name).lower()
    return name.replace("_", "").replace("-", "").removesuffix("text")


_FAMILIES = {_plain(name): name for name in INTERLEAVED | HALF_SPLIT}


@named
def is_interleaved(config: Any) -> bool:
    """Returns whether a model has interleaved pairs, by its model_type, or by its architectures if that is not known.

    The pairs are those of the weights, whatever the attention does to q and k before it rotates them. Raises ValueError
    if neither is known and the config has no rope_interleave.
    """
    with contextlib.suppress(ValueError, ImportError):  # names are enough
        config = _made(config) if isinstance(config, Mapping) else config
    text = _get(config, "text_config") or config
    named = [_get(text, "model_type"), *(_get(text, "architectures") or ())]
    family = next(filter(None, (_FAMILIES.get(_plain(name)) for name in named if isinstance(name, str))), None)
    chosen, half_split = _get(text, "rope_interleave"), _get(text, "rope_is_neox_style")
    chosen = half_split is False if chosen is None and half_split is not None else chosen
    if isinstance(chosen, bool) and (family is None or family in ROPE_INTERLEAVE):
        return chosen
    advice = "pass interleaved= to RotaryEmbedding.from_config"
    _require(family is not None, "is_interleaved", "model_type", named[0], f"known, or architectures must be; {advice}")
    interleaved = family in INTERLEAVED
    _require(chosen in (None, interleaved), "is_interleaved", "rope_interleave", chosen, f"{interleaved}; or {advice}")
    return interleaved
