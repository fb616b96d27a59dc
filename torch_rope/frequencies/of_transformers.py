"""What transformers knows of a config: the object that it makes of a dict, and the frequencies of the model's own class.

A name in a config says little, because models read the same entry in different ways. The class that makes the tables of a
model, such as LlamaRotaryEmbedding, reads the whole config as the model does. So torch_rope makes it, and compares.
"""

import copy
import importlib.util
import inspect
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from .._modes import undisturbed
from .kinds import Frequencies

INSTEAD = "pass head_dim, base, interleaved, kind and its parameters (frequencies.KINDS) to RotaryEmbedding instead"


def _refused(error: Exception) -> ValueError:
    """Returns the error of a config that transformers itself does not take."""
    return ValueError(f"torch_rope.frequencies.from_config: transformers refuses the config: {error!r}")


def made(config: Any) -> Any:
    """Returns the config object that transformers makes of a dict, or of the config of a model that it does not have: it
    knows defaults and old names of the family. Returns other objects as they are.

    If transformers has neither the model_type nor one of the architectures, the result has the entries that are given.
    """
    if class_of(config) is None and hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        return config
    try:
        import transformers
    except ImportError as error:
        must = f"must be installed to read a dict; {INSTEAD}"
        raise ImportError(f"torch_rope.frequencies.from_config: transformers {must}") from error
    entries = copy.deepcopy(dict(config))
    model_type, inner = entries.pop("model_type", None), entries.get("text_config")
    is_known = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    cls = transformers.CONFIG_MAPPING[model_type] if is_known else None
    for name in () if is_known else entries.get("architectures") or ():
        cls = getattr(getattr(transformers, str(name), None), "config_class", cls)
    if cls is None and isinstance(inner, dict):
        return made(inner)
    text = inner if isinstance(inner, dict) else entries
    rope = text.get("rope_parameters")
    if cls is None:
        rope = rope or text.get("rope_scaling") or {}
        if isinstance(rope, dict):
            rope = {name: text.get(name) for name in ("rope_theta", "partial_rotary_factor")} | rope
        return SimpleNamespace(**entries | {"model_type": model_type, "rope_parameters": rope})
    if isinstance(rope, dict) and not any(re.search("theta|rotary_emb_base", str(name)) for name in text):
        # transformers takes the base of the class, but the model may have had another before it was lost.
        for each in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
            each.setdefault("rope_theta", None)
    try:
        return cls(**getattr(cls, "_decode_special_floats", dict)(entries))  # such as infinity, which JSON lacks
    except Exception as error:
        raise _refused(error) from error


def class_of(config: Any) -> type | None:
    """Returns the config class of a model of transformers that a config belongs to, or None."""
    known = (cls for cls in type(config).__mro__ if cls.__module__.startswith("transformers.models."))
    return next(known, None)


def _rotary_classes(cls: type) -> list[type]:
    """Returns the classes that make the tables of a model, given its config class."""
    name = cls.__module__.replace(".configuration_", ".modeling_")
    if importlib.util.find_spec(name) is None:  # the family runs the model of another one
        from transformers import MODEL_MAPPING

        name = MODEL_MAPPING[cls].__module__
    rotary = [each for name, each in vars(importlib.import_module(name)).items() if name.endswith("RotaryEmbedding")]
    # Most name the type of their config. Some name the outer config instead, though they read the inner one.
    taken = [str(next(iter(inspect.signature(each).parameters.values())).annotation) for each in rotary]
    own = [each for each, config in zip(rotary, taken, strict=True) if cls.__name__ in re.findall(r"\w+", config)]
    return own or rotary


def tables(config: Any, label: str | None, rope: Mapping) -> tuple[str, list[Frequencies]]:
    """Returns the name of the model's own class, and the frequencies that it computes: for LongRoPE those of short and of
    long sequences. There are none if transformers has no such class. rope: the rope parameters of a layer, which may
    differ from those of the config unless they have a label there, the name of a layer type."""
    cls, error = class_of(config), None
    for rotary in _rotary_classes(cls) if cls else ():
        theirs = copy.deepcopy(config)
        if label is None:
            theirs.rope_parameters = copy.deepcopy(rope)
        try:
            return rotary.__name__, undisturbed(_read, rotary, theirs, label)
        except Exception as e:  # a class of the file that is for other layers, such as those of images
            error = e
    if error is not None:
        raise _refused(error) from error
    return "", []


def _read(cls: type, config: Any, label: str | None) -> list[Frequencies]:
    """Returns the frequencies of a rotary class of transformers, or an empty list if it has none."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix, by_type = (f"{label}_", {"layer_type": label}) if label else ("", {})
    module = cls(config)
    if not hasattr(module, f"{prefix}inv_freq"):
        return []
    found = [(getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling", 1.0))]
    rope = config.rope_parameters[label] if label else config.rope_parameters
    if rope.get("rope_type") == "longrope":  # the class computes the others where it first meets a long sequence
        seq_len = rope["original_max_position_embeddings"] + 1
        found.append(ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=seq_len, **by_type))
    return [Frequencies(inv_freq.double(), float(factor)) for inv_freq, factor in found]
