"""The frequencies of real models: a function for each kind, and :func:`from_config` for a model's config.

Each function returns :class:`Frequencies`: inv_freq, float64 on the CPU, radians per position, for the ``inv_freq`` of
:func:`torch_rope.rotate` or :func:`torch_rope.cos_sin`; and attention_factor, for the argument of that name. Write
``f[i] = base ** (-2 i / rotary_dim)`` for i = 0, 1, ... while 2 i < rotary_dim (Su et al., RoFormer, arXiv:2104.09864);
each kind changes f.

rotary_dim is how many channels of a head are rotated; see :func:`partial_rotary_dim` for a part of head_dim. It is even
in every model known. For an odd one there are (rotary_dim + 1) / 2 frequencies, so rotary_dim + 1 channels are rotated,
while the exponent keeps the odd number: transformers does the same.

Parameters of other engines:

- akunu: ``freq_scale`` multiplies the angle, so it is ``linear(rotary_dim, base, factor=1 / freq_scale)``; its array
  ``freqs`` holds what the position is divided by, in place of base: ``inv_freq = freq_scale / freqs``. MLX's ``freqs``
  is the same array.
- ggml: ``freq_scale`` as above. ``freq_factors`` (GGUF's rope_freqs.weight) divides the frequencies that base gives:
  ``default(rotary_dim, base).inv_freq / freq_factors``, which is how GGUF files carry llama3 and longrope.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Frequencies(NamedTuple):
    inv_freq: Tensor  # [rotary_dim / 2], float64 on the CPU, radians per position
    attention_factor: float  # multiplies the rotated channels, or cos and sin


def _require(good: bool, function: str, name: str, value: Any, needs: str) -> None:
    if not good:
        raise ValueError(f"torch_rope.frequencies.{function}: {name} is {value!r}, needs {needs}")


def _require_positive(function: str, **arguments: float) -> None:
    for name, value in arguments.items():
        _require(0 < value < math.inf, function, name, value, "a positive number")


def _require_scale(function: str, factor: float) -> None:
    _require(1 <= factor < math.inf, function, "factor", factor, "a number that is at least 1")


def _powers(function: str, rotary_dim: int, base: float, name: str = "rotary_dim") -> Tensor:
    """f of the module's docstring."""
    _require(isinstance(rotary_dim, int) and rotary_dim > 0, function, name, rotary_dim, "a positive integer")
    _require_positive(function, base=base)
    return float(base) ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)


def partial_rotary_dim(head_dim: int, partial_rotary_factor: float) -> int:
    """How many of a head's first channels are rotated: ``int(head_dim * partial_rotary_factor)``.

    Rounded down as transformers does. An odd result is passed on: it rotates one channel more (see the module's
    docstring), so it must be less than head_dim. Raises ValueError for that, for less than one channel, and for a
    factor that is not in (0, 1].
    """
    function = "partial_rotary_dim"
    _require(isinstance(head_dim, int) and head_dim > 0, function, "head_dim", head_dim, "a positive integer")
    _require(
        0 < partial_rotary_factor <= 1, function, "partial_rotary_factor", partial_rotary_factor, "a number in (0, 1]"
    )
    rotary_dim = int(head_dim * partial_rotary_factor)
    _require(
        rotary_dim > 0, function, "head_dim * partial_rotary_factor", head_dim * partial_rotary_factor, "1 at least"
    )
    _require(rotary_dim < head_dim or head_dim % 2 == 0, function, "head_dim", head_dim, "an even number")
    return rotary_dim


def default(rotary_dim: int, base: float = 10000.0) -> Frequencies:
    """``f``, attention_factor 1 (RoFormer, arXiv:2104.09864).

    Raises ValueError for a rotary_dim that is not a positive integer or a base that is not positive, as all kinds do.
    """
    return Frequencies(_powers("default", rotary_dim, base), 1.0)


def linear(rotary_dim: int, base: float, *, factor: float) -> Frequencies:
    """Position interpolation: ``f / factor``, attention_factor 1 (Chen et al., arXiv:2306.15595).

    factor is how many times longer the context becomes. Raises ValueError for one that is not positive; below 1 is
    legal, as freq_scale above 1 is elsewhere.
    """
    inv_freq = _powers("linear", rotary_dim, base)
    _require_positive("linear", factor=factor)
    return Frequencies(inv_freq / factor, 1.0)


def _raised_base(function: str, rotary_dim: int, base: float, factor: float) -> Tensor:
    _require(isinstance(rotary_dim, int) and rotary_dim > 2, function, "rotary_dim", rotary_dim, "an integer above 2")
    _require_positive(function, base=base)
    return _powers(function, rotary_dim, base * factor ** (rotary_dim / (rotary_dim - 2)))


def ntk(rotary_dim: int, base: float, *, factor: float) -> Frequencies:
    """NTK-aware scaling, fixed: f with ``base * factor ** (rotary_dim / (rotary_dim - 2))``, attention_factor 1.

    The highest frequency stays and the lowest is divided by factor (bloc97, in section 3.1 of YaRN, arXiv:2309.00071).
    Hunyuan's ``alpha`` is this factor. vLLM's "ntk" is another one, ``f[i] * factor ** (-2 (i + 1) / rotary_dim)``,
    which no config of transformers names. Raises ValueError for factor below 1 and for a rotary_dim of 2 or less.
    """
    _require_scale("ntk", factor)
    return Frequencies(_raised_base("ntk", rotary_dim, base, factor), 1.0)


def dynamic(
    rotary_dim: int, base: float, *, factor: float, original_max_position: int, seq_len: int | None = None
) -> Frequencies:
    """Dynamic NTK: :func:`ntk` by a factor that grows with the sequence (emozilla; appendix B.3 of arXiv:2309.00071).

    The factor is ``s = factor * L / original_max_position - (factor - 1)``, where L is the larger of seq_len and
    original_max_position: without seq_len, and for a short sequence, it is :func:`default`. attention_factor is 1.
    original_max_position is the model's max_position_embeddings.

    The same from the default frequencies, for an s that is a tensor: ``f[i] * s ** (-2 i / (rotary_dim - 2))``.

    Raises ValueError for factor below 1, original_max_position that is not positive and a rotary_dim of 2 or less.
    """
    _require_scale("dynamic", factor)
    _require_positive("dynamic", original_max_position=original_max_position)
    length = max(seq_len or 0, original_max_position)
    s = factor * length / original_max_position - (factor - 1)
    return Frequencies(_raised_base("dynamic", rotary_dim, base, s), 1.0)


def yarn(
    rotary_dim: int,
    base: float,
    *,
    factor: float,
    original_max_position: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
) -> Frequencies:
    """YaRN (Peng et al., arXiv:2309.00071): frequencies are kept, interpolated, or in between, by their turns.

    Args:
        factor: how many times longer the context becomes, at least 1.
        original_max_position: the length that the model was trained for, in which a pair makes so many turns.
        beta_fast, beta_slow: a pair of more turns than beta_fast is kept, one of fewer than beta_slow interpolated.
        truncate: whether the two ends of the range between are rounded outwards to whole pairs (gpt-oss: False).
        mscale, mscale_all_dim: of DeepSeek, for attention_factor; they count where both are given and neither is 0.
        attention_factor: instead of the computed one.

    Equivalent to::

        pair = lambda turns: rotary_dim * log(original_max_position / (2 pi turns)) / (2 log(base))
        low, high = pair(beta_fast), pair(beta_slow)
        low, high = (floor(low), ceil(high)) if truncate else (low, high)
        low, high = max(low, 0), min(high, rotary_dim - 1)  # and high + 0.001 where they are equal
        ramp = clamp((i - low) / (high - low), 0, 1)
        inv_freq = f * (1 - ramp) + f / factor * ramp
        m = lambda scale: 1 + 0.1 * scale * log(factor)
        attention_factor = m(mscale) / m(mscale_all_dim)  # m(1) without both

    DeepSeek multiplies the scale of its softmax by ``m(mscale_all_dim) ** 2`` besides: that is no part of the table,
    nor of this function. Where each layer type has parameters of its own, transformers looks for truncate beside the
    layer types and so never finds it; :func:`from_config` reads it where the other parameters of the layer type are.

    Raises ValueError for factor below 1, base that is not above 1, beta_slow above beta_fast, or another argument that
    is not positive.
    """
    f = _powers("yarn", rotary_dim, base)
    _require(base > 1, "yarn", "base", base, "more than 1")
    _require_scale("yarn", factor)
    _require_positive("yarn", original_max_position=original_max_position, beta_fast=beta_fast, beta_slow=beta_slow)
    _require(beta_slow <= beta_fast, "yarn", "beta_slow", beta_slow, f"at most beta_fast, {beta_fast!r}")

    def pair(turns: float) -> float:
        return rotary_dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(f), dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)

    def m(scale: float) -> float:
        return 1 + 0.1 * scale * math.log(factor)

    if attention_factor is None:
        attention_factor = m(mscale) / m(mscale_all_dim) if mscale and mscale_all_dim else m(1)
    _require_positive("yarn", attention_factor=attention_factor)
    return Frequencies(f * (1 - ramp) + f / factor * ramp, float(attention_factor))


def longrope(
    rotary_dim: int,
    base: float,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position: int,
    factor: float | None = None,
    attention_factor: float | None = None,
    seq_len: int | None = None,
    long: bool | None = None,
) -> Frequencies:
    """LongRoPE (Ding et al., arXiv:2402.13753): ``f / long_factor`` or ``f / short_factor``, a divisor for each pair.

    Args:
        short_factor, long_factor: the divisors, ``[rotary_dim / 2]``.
        original_max_position: the length that the model was trained for, above 1.
        factor: how many times longer the context is; for attention_factor alone.
        attention_factor: ``sqrt(1 + log(factor) / log(original_max_position))`` unless given, and 1 for a factor up to
            1. It is the same for short and long.
        seq_len: long_factor is taken where it is greater than original_max_position; short_factor without it.
        long: instead of seq_len: whether to take long_factor.

    Keys rotated by one list don't fit queries rotated by the other: choose once for a cache.

    Raises ValueError for lists of another length, a divisor that is not positive, neither factor nor attention_factor,
    both seq_len and long, or another argument that is not positive.
    """
    f = _powers("longrope", rotary_dim, base)
    for name, divisors in (("short_factor", short_factor), ("long_factor", long_factor)):
        _require(len(divisors) == len(f), "longrope", f"len({name})", len(divisors), f"rotary_dim / 2, {len(f)}")
        _require_positive("longrope", **{f"{name}[{i}]": divisor for i, divisor in enumerate(divisors)})
    _require(original_max_position > 1, "longrope", "original_max_position", original_max_position, "more than 1")
    if attention_factor is None:
        _require(factor is not None, "longrope", "factor", factor, "a number, or attention_factor")
        _require_positive("longrope", factor=factor)
        attention_factor = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original_max_position))
    _require_positive("longrope", attention_factor=attention_factor)
    _require(seq_len is None or long is None, "longrope", "seq_len", seq_len, "None where long is given")
    if long is None:
        long = seq_len is not None and seq_len > original_max_position
    divisors = torch.tensor(list(long_factor if long else short_factor), dtype=torch.float64, device="cpu")
    return Frequencies(f / divisors, float(attention_factor))


def llama3(
    rotary_dim: int,
    base: float,
    *,
    factor: float,
    original_max_position: int,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> Frequencies:
    """Llama 3.1 (arXiv:2407.21783, formula in Meta's llama-models): as YaRN, with a ramp over turns.

    A pair that turns more than high_freq_factor times in original_max_position is kept, one that turns less than
    low_freq_factor times is divided by factor, and between ::

        turns = original_max_position * f / (2 pi)
        s = clamp((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        inv_freq = f * s + f / factor * (1 - s)

    attention_factor is 1. Raises ValueError for factor below 1, low_freq_factor above high_freq_factor, or
    another argument that is not positive.
    """
    f = _powers("llama3", rotary_dim, base)
    _require_scale("llama3", factor)
    _require_positive("llama3", original_max_position=original_max_position, low_freq_factor=low_freq_factor)
    _require(
        low_freq_factor <= high_freq_factor < math.inf,
        "llama3",
        "high_freq_factor",
        high_freq_factor,
        f"at least low_freq_factor, {low_freq_factor!r}",
    )
    turns = original_max_position * f / (2 * math.pi)
    if low_freq_factor == high_freq_factor:  # Llama 4 Scout
        s = (turns > low_freq_factor).double()
    else:
        s = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return Frequencies(f * s + f / factor * (1 - s), 1.0)


def proportional(head_dim: int, base: float, *, partial_rotary_factor: float = 1.0, factor: float = 1.0) -> Frequencies:
    """Gemma 4's full attention: ``n = int(partial_rotary_factor * head_dim // 2)`` pairs turn, and the others stay.

    inv_freq is ``[head_dim / 2]``: ``base ** (-2 i / head_dim) / factor`` for i < n, then zeros; attention_factor is 1.
    So pair i is channels (i, i + head_dim / 2), where partial rotary pairs (i, i + rotary_dim / 2). There is no paper:
    the formula is transformers' and vLLM's.

    Raises ValueError for an odd head_dim, partial_rotary_factor outside [0, 1] or factor that is not positive.
    """
    inv_freq = _powers("proportional", head_dim, base, "head_dim")
    _require(head_dim % 2 == 0, "proportional", "head_dim", head_dim, "an even number")
    _require(
        0 <= partial_rotary_factor <= 1,
        "proportional",
        "partial_rotary_factor",
        partial_rotary_factor,
        "a number in [0, 1]",
    )
    _require_positive("proportional", factor=factor)
    inv_freq[int(partial_rotary_factor * head_dim // 2) :] = 0
    return Frequencies(inv_freq / factor, 1.0)


KINDS: dict[str, Callable[..., Frequencies]] = {
    kind.__name__: kind for kind in (default, linear, ntk, dynamic, yarn, longrope, llama3, proportional)
}

# What transformers' configuration classes fill in where a config.json is silent, for the families where that is not the
# usual: base 10000, all of hidden_size / num_attention_heads, no scaling.
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
    "gpt_oss": {
        "head_dim": 64,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "gptj": {"rotary_dim": 64},
    "helium": {"rope_theta": 1e5, "head_dim": 128},
    "llama4_text": {"rope_theta": 5e5, "head_dim": 128},
    "mixtral": {"rope_theta": 1e6},
    "modernbert": {"global_rope_theta": 160000.0, "local_rope_theta": 1e4},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo3": {"rope_theta": 5e5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen2_vl": {"rope_theta": 1e6},
    "qwen2_vl_text": {"rope_theta": 1e6},
    "qwen3": {"head_dim": 128},
    "qwen3_vl_text": {"rope_theta": 5e5, "head_dim": 128},
    "seed_oss": {"head_dim": 128},
    "smollm3": {"rope_theta": 2e6},
    "stablelm": {"partial_rotary_factor": 0.25},
}

# Our name -> what older families call it.
_OLD_NAMES = {
    "head_dim": ("attention_head_dim", "kv_channels"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions",),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
}
# rope_type of a config -> ours. mrope (Qwen2-VL) and xdrope (Hunyuan-VL) say how positions are laid out.
_OLD_KINDS = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}


def _get(config: Any, name: str) -> Any:
    """config's value of that name, from a dict or an object, None where there is none."""
    for each in (name, *_OLD_NAMES.get(name, ())):
        value = config.get(each) if isinstance(config, Mapping) else getattr(config, each, None)
        if value is not None:
            return value
    return None


def _by_layer_type(config: Any, rope: Mapping) -> dict[str, Mapping] | None:
    """Layer type -> rope parameters, or None where all layers share them."""
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {layer_type: value for layer_type, value in rope.items() if isinstance(value, Mapping)}
    # Before rope_parameters there was one rope_scaling, and a second base under a name of its own.
    if (local := _get(config, "local_rope_theta")) is not None:  # ModernBERT
        bases = {"sliding_attention": local, "full_attention": _get(config, "global_rope_theta")}
        return {layer_type: {"rope_theta": base, **rope} for layer_type, base in bases.items()}
    if (local := _get(config, "rope_local_base_freq")) is not None:  # Gemma 3
        return {"sliding_attention": {"rope_theta": local}, "full_attention": rope}
    if _get(config, "model_type") == "olmo3":
        return {"sliding_attention": {}, "full_attention": rope}
    return None


def _of_layer_type(config: Any, layer_type: str | None) -> Any:
    """config as the first layer of that type sees it: Gemma 4's types have a head_dim each."""
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
    own = _get(config, "global_head_dim") if layer_type == "full_attention" else None  # Gemma 4
    head_dim = _get(config, "head_dim") if own is None else own
    if head_dim is not None:
        return head_dim
    hidden_size, heads = _get(config, "hidden_size"), _get(config, "num_attention_heads")
    _require(hidden_size is not None, "from_config", "hidden_size", hidden_size, "a number, or head_dim")
    _require(heads is not None, "from_config", "num_attention_heads", heads, "a number, or head_dim")
    return hidden_size // heads


def parse(config: Any, layer_type: str | None = None) -> tuple[str, dict]:
    """The kind of a config's frequencies, a key of :data:`KINDS`, and the keyword arguments of its function.

    What :func:`from_config` calls, whose arguments and errors these are; for a caller that follows the length of the
    sequence by itself. seq_len and long are not among the arguments.
    """
    config = _get(config, "text_config") or config  # of a multimodal config
    if isinstance(config, Mapping):
        said = {name: value for name, value in config.items() if value is not None}
        config = {**_DEFAULTS.get(said.get("model_type"), {}), **said}

    for name in ("alibi", "rope_ratio"):  # Falcon's other positions; ChatGLM, which says neither base nor rotary_dim
        value = _get(config, name)
        _require(not value, "from_config", name, value, "a model whose rotation its config says")

    rope = _get(config, "rope_scaling") or _get(config, "rope_parameters") or {}
    layers = _by_layer_type(config, rope)
    if layers is None:  # all layers share them, whichever is asked for
        layers = {None: rope, **dict.fromkeys(_get(config, "layer_types") or (), rope)}
    choices = ", ".join(sorted(map(repr, layers)))
    _require(layer_type in layers, "from_config", "layer_type", layer_type, f"one of {choices}")
    rope, config = layers[layer_type], _of_layer_type(config, layer_type)

    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = _OLD_KINDS.get(kind, kind)
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan: the factor is fixed
        kind, rope = "ntk", {**rope, "factor": rope["alpha"]}
    if kind == "yarn" and rope.get("long_factor"):  # early files of Phi-3
        kind = "longrope"
    known = ", ".join(map(repr, [*KINDS, *_OLD_KINDS]))
    _require(kind in KINDS, "from_config", "rope_type", kind, f"one of {known}")

    part = rope.get("partial_rotary_factor")
    part = _get(config, "partial_rotary_factor") if part is None else part
    part = 1.0 if part is None else part
    if kind == "proportional":
        arguments = {"head_dim": _head_dim(config, layer_type)}
    else:
        # DeepSeek's heads have qk_rope_head_dim channels for the rotation alone; GPT-J's config says rotary_dim.
        rotary_dim = _get(config, "qk_rope_head_dim") or _get(config, "rotary_dim")
        arguments = {"rotary_dim": rotary_dim or partial_rotary_dim(_head_dim(config, layer_type), part)}
    arguments["base"] = rope.get("rope_theta") or _get(config, "rope_theta") or 10000.0

    longest = _get(config, "max_position_embeddings")
    # Phi-3 says it beside rope_scaling, and there it counts.
    trained = _get(config, "original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    trained = longest if trained is None or kind == "dynamic" else trained
    given = {**rope, "partial_rotary_factor": part, "original_max_position": trained}
    if kind in ("yarn", "longrope") and rope.get("factor") is None and longest:
        given["factor"] = longest / trained
    if kind == "longrope" and rope.get("long_mscale") is not None:  # Phi-3.5-MoE, where the two are equal
        short, long = rope.get("short_mscale"), rope["long_mscale"]
        _require(short == long, "from_config", "short_mscale", short, f"long_mscale, {long!r}")
        given["attention_factor"] = long
    for name, parameter in inspect.signature(KINDS[kind]).parameters.items():
        if name in arguments or name in ("seq_len", "long"):
            continue
        if given.get(name) is not None:
            arguments[name] = given[name]
        elif parameter.default is parameter.empty:
            name = "max_position_embeddings" if name == "original_max_position" else name
            _require(False, "from_config", name, None, f"a value for rope_type {kind!r}")
    return kind, arguments


def from_config(config: Any, layer_type: str | None = None, seq_len: int | None = None) -> Frequencies:
    """The frequencies of a model, from its config.

    Args:
        config: a config object of transformers, or a dict such as ``json.load`` of config.json; of a multimodal model
            either, its text_config counts. Read are ``rope_parameters``, for all layers or by layer type, and the
            older ``rope_scaling`` and ``rope_theta``, ``rope_local_base_freq`` (Gemma 3), ``global_rope_theta`` and
            ``local_rope_theta`` (ModernBERT), ``rotary_emb_base`` and ``rotary_pct`` (GPT-NeoX), ``rotary_dim``
            (GPT-J) and ``qk_rope_head_dim`` (DeepSeek).
        layer_type: where the layers differ (Gemma 3 and 4, ModernBERT, OLMo 3): ``"full_attention"`` or
            ``"sliding_attention"``, or what the config calls them.
        seq_len: for dynamic and longrope, which depend on the length of the sequence; others ignore it.

    A dict that leaves something out has what transformers would fill in for its model_type, for the families of the
    docs' table; for another one base is 10000 and all of ``hidden_size // num_attention_heads`` is rotated. Whether a
    layer rotates at all (Llama 4, SmolLM3 and Cohere 2 have some that don't) is not said here, nor which of a token's
    positions turns a pair (Qwen2-VL); the module of Ernie 4.5 VL keeps the same frequencies in another order.

    Raises ValueError for an unknown rope_type, a layer_type that is missing or unknown, a parameter that the rope_type
    needs and the config lacks, and what the function of the kind refuses.
    """
    kind, arguments = parse(config, layer_type)
    if kind in ("dynamic", "longrope"):
        arguments["seq_len"] = seq_len
    return KINDS[kind](**arguments)
