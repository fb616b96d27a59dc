"""A fused forward for the attention layers of transformers that look like Llama's.

The forward normalises and rotates q and k by one operator, which also writes into a StaticCache. A layer gets it if each
word in the code of its own forward is known, and if both forwards do the same in a trial: they give the same arguments to
the attention function and to the cache, and have the same results. The trial has small random projections in the place of
the layer's own, so it needs no weights.
"""

import copy
import inspect
from collections.abc import Callable, Collection
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from ..._modes import undisturbed
from ..._ops import ops
from .._conventions import Sample
from .._fuse import Norm, are_plain, changed, disagreement, like_norm, norm_of, said, small_linear, unknown, untried
from .._names import copy_of
from .._patch import Fuse
from .._rotary import Rotary

PROJECTIONS, NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
SWITCHES = "use_qk_norm", "use_rope"  # the attributes that decide what a layer does
# What the forwards of layers that are fused say, besides the name of the rotary function.
_WORDS = """
    self.q_proj self.k_proj self.v_proj self.o_proj self.q_norm self.k_norm self.config self.head_dim self.layer_idx
    self.scaling self.attention_dropout self.sliding_window self.training self.use_qk_norm self.use_rope
    .shape .view .transpose .reshape .contiguous .update .get_interface ._attn_implementation
    ALL_ATTENTION_FUNCTIONS eager_attention_forward getattr 'dropout' 'scaling' 'sliding_window' 'kwargs' -1 0.0 1 2
"""
WORDS = {*_WORDS.split(), "[None:-1]", "None", "is None", "if None", "if is None"}
WORDS |= {f"if self.{name}" for name in ("training", *SWITCHES)}
OF_OTHERS = {word.strip(".'") for word in WORDS if word[0] in ".'"} - {"scaling", "sliding_window"}
ARGUMENTS = "self", "hidden_states", "position_embeddings", "attention_mask"
NAMES_OF_CACHE = "", "cache", "past_key_values"  # the argument for the cache, if there is one
CACHES = type(None), DynamicCache, StaticCache
UPDATES = StaticCache.update, StaticLayer.update, StaticSlidingWindowLayer.update  # others may replace them


def _parts(module: nn.Module) -> list[nn.Module]:
    """Returns the projections and the norms of an attention layer."""
    return [part for name in (*PROJECTIONS, *NORMS) if (part := module._modules.get(name)) is not None]


def _state_of(module: nn.Module, words: Collection[str]) -> tuple:
    """Returns what decides what a layer does, whose own forward says these words: types, switches, and the window that it
    reads, which it may tell the attention function or branch on."""
    own, told = "self.sliding_window" in words, "'sliding_window'" in words
    holder = module if own else getattr(module, "config", None)
    window = getattr(holder, "sliding_window", None) if own or told else None
    return *map(type, _parts(module)), *map(vars(module).get, SWITCHES), window


def _name_of_cache(function: Callable) -> str:
    """Returns the name of the argument after those of ARGUMENTS, or of all that follow, or an empty text."""
    return ", ".join(function.__code__.co_varnames[len(ARGUMENTS) : function.__code__.co_argcount])


def _forward_of(own: Callable, like: FunctionType, state: tuple, rotary: Rotary, norm: Norm | None, caches) -> Callable:
    """Returns the fused forward of layers with a state and a forward like this, for caches of these types.

    In every other case, own computes.
    """
    words, names, name_of_cache = frozenset(said(like)), like.__globals__, _name_of_cache(like)
    ignored, other_names = [None] * (rotary.convention.others - 3), {*NAMES_OF_CACHE} - {name_of_cache}
    window = {"sliding_window": state[-1]} if "'sliding_window'" in words else {}

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, *args, **kwargs):
        x, more, found, written = hidden_states, dict(kwargs), None, None
        cache = args[0] if args else more.pop(name_of_cache, None)
        if (
            position_embeddings is not None
            and len(args) <= bool(name_of_cache)
            and type(cache) in caches
            and other_names.isdisjoint(more)
            and _state_of(self, words) == state
            and are_plain(_parts(self))
            and (norm is None or norm.are(self.q_norm, self.k_norm))
            and not (x.is_meta or torch.is_autocast_enabled(x.device.type))
        ):
            one_head = x[:, None, :, :1].expand(-1, -1, -1, self.head_dim)
            found = rotary.operands([one_head], (*position_embeddings, *ignored, 1))
        if tried := found is not None and found[0].fits(x, True):
            # q: [batch, seq, heads, head_dim]; k and v have kv_heads
            q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, self.head_dim)) for name in PROJECTIONS)
        if not tried or not q.dtype == k.dtype == x.dtype:
            return own(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        tables, flags, weights = (found[0].cos, found[0].sin), found[0].flags, ()
        if norm:
            weights = norm.weight_of(self.q_norm, q), norm.weight_of(self.k_norm, k)
            flags = flags | {"norm_eps": getattr(self.q_norm, norm.eps), "norm_weight_offset": norm.offset}
        # An exported program may run with gradients, with which the operator does not write.
        if type(cache) is StaticCache and not (torch.is_grad_enabled() or torch.compiler._is_exporting_flag):
            # The result of a projection may be held elsewhere, unless the projection is PyTorch's own.
            q_out = q if type(self.q_proj) is nn.Linear else torch.empty_like(q)
            written = _write(cache, self.layer_idx, q, k, v, tables, weights, q_out=q_out, **flags)
        if written is not None:
            q, k, v = q_out.transpose(1, 2), written.keys, written.values
        else:
            operator = ops.norm_rotate_qk.default if norm else ops.rotate_qk.default
            q, k, v = (t.transpose(1, 2) for t in (*operator(q, k, *weights, *tables, **flags), v))
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx, **({"kwargs": more} if "'kwargs'" in words else {}))
        functions, eager = names["ALL_ATTENTION_FUNCTIONS"], names["eager_attention_forward"]
        attend = functions.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        out, scores = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **window, **more)
        return self.o_proj(out.reshape(*x.shape[:-1], -1).contiguous()), scores

    vars(forward)["_torch_rope"] = (rotary,)
    return forward


def _write(cache: StaticCache, index: int, q, k, v, tables: tuple, weights: tuple, **how: Any) -> StaticLayer | None:
    """Writes rotated q to q_out, and k and v into the next cells of a layer of a cache. Returns that layer.

    Returns None, and writes nothing, if the layer's own update must write.
    """
    layer, seq, positions, offset = cache.layers[index], k.shape[1], None, 0
    slides = type(layer) is StaticSlidingWindowLayer
    updates = StaticCache.update, StaticLayer.update, StaticSlidingWindowLayer.update
    replaced = "update" in vars(cache) or "update" in vars(layer) or updates != UPDATES
    if cache.offloading or replaced or not (slides or type(layer) is StaticLayer):
        return None
    moves = slides and layer.cumulative_length_int + seq > layer.max_cache_len
    if moves and seq > 1:
        return None
    if not layer.is_initialized:
        layer.lazy_initialization(k.transpose(1, 2), v.transpose(1, 2))
    if layer.keys.shape[0] != k.shape[0] or not layer.keys.dtype == k.dtype == v.dtype:
        return None
    if moves:  # the token takes the last cell
        offset = layer.max_cache_len - 1
        for cells in layer.keys, layer.values:
            cells.copy_(cells.roll(-1, 2))
    elif seq == 1:
        positions = layer.cumulative_length.view(1)
    else:
        positions = torch.arange(seq, device=k.device) + layer.cumulative_length
    caches = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
    rows = (t[None] if t.dim() == 2 else t for t in tables)  # [batch or 1, seq, pairs], a row for each token
    ops.rotate_into_cache_.default(q, k, v, *caches, *rows, None, positions, offset, None, *weights, **how)
    if not moves:
        layer.cumulative_length.add_(seq)
    if slides:
        layer.cumulative_length_int += seq
    return layer


# ---- which layers are fused ----


def fuser() -> Fuse:
    """Returns a function that finds the forwards of one model. Layers that differ in weights only have one trial."""
    known: dict[tuple, tuple[Callable, str]] = {}

    def fuse(module: nn.Module, owner: Any, name: str, function: Any, new: FunctionType) -> tuple[Callable, str]:
        if owner is not module or name != "forward":
            return new, ""
        # An argument that had another name before is transformers' own matter.
        inner = inspect.unwrap(function, stop=lambda f: f.__globals__["__name__"] != "transformers.utils.deprecation")
        parts, state = _parts(module), _state_of(module, said(inner))
        sizes = [p.shape for norm in parts[3:] for p in norm.parameters()]
        key = function, type(module), getattr(module, "head_dim", None), *state, *sizes, are_plain(parts)
        if key not in known:
            known[key] = _fused(module, inner, new, state)
        return known[key]

    return fuse


def _fused(module: nn.Module, inner: FunctionType, new: FunctionType, state: tuple) -> tuple[Callable, str]:
    """Returns the forward that a module gets, and what it fuses, or new and why nothing is fused."""
    # Of the functions of q, k, cos, sin and the dimension of heads.
    rotaries = [c for c in vars(new)["_torch_rope"] if isinstance(c, Rotary) and c.convention[:2] in ((2, 3), (2, 4))]
    arguments, cache = inner.__code__.co_varnames[: len(ARGUMENTS)], _name_of_cache(inner)
    norms = _parts(module)[3:]
    if len(rotaries) != 1:
        return new, "its forward must rotate q and k by one function of q, k, cos and sin but does not"
    if arguments != ARGUMENTS or cache not in NAMES_OF_CACHE:
        takes = ", ".join(filter(None, [*arguments, cache]))
        return new, f"its forward takes {takes} but must take {', '.join(ARGUMENTS)}, past_key_values"
    if why := unknown(inner, WORDS | {rotaries[0].name}):
        return new, f"its forward {why}"
    if absent := [name for name in PROJECTIONS if name not in module._modules]:
        return new, f"it must have a module {absent[0]} but has none; patch the model before that is replaced or merged"
    if own := sorted(name for name in OF_OTHERS if hasattr(module, name)):
        return new, f"it has an attribute {own[0]}, which its forward may mean"
    if not are_plain(_parts(module)):
        return new, "a projection or a norm has hooks, or a forward of its own"
    if isinstance(norm := norm_of(norms) if norms else None, str):
        return new, norm
    once = rotaries[0].rounded_once()
    if why := undisturbed(disagreement, _trial_of, module, inner, once, norm):
        return new, why
    note = "q_norm, k_norm and " * bool(norms) + "the rotation"
    note += "; with the write into a StaticCache" * bool(cache)
    return _forward_of(new, inner, state, once, norm, CACHES), note


def _trial_of(module: Any, inner: FunctionType, rotary: Rotary, norm: Norm | None) -> tuple:
    """Returns what disagreement needs, for a layer like a module, with small projections and numbers that show."""
    head_dim, hidden, config, given = module.head_dim, 16, copy.copy(module.config), []
    sample = Sample(2, 8, 1, head_dim, head_dim // 2, torch.float32, torch.float32)
    norms: dict[str, Any] = {n: like_norm(sample, module._modules[n], norm) for n in NORMS if norm}
    of_norms = [norms[n].weight.numel() if norm else 0 for n in NORMS]  # of one head or of all
    q, k = (n if n > head_dim else heads * head_dim for n, heads in zip(of_norms, (4, 2), strict=True))
    parts = {n: small_linear(sample, hidden, out) for n, out in zip(PROJECTIONS, (q, k, k), strict=True)}
    parts |= {**norms, "o_proj": small_linear(sample, q, hidden)}
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = 5  # less than eight tokens, as the other window
    now = {"layer_idx": 2, "attention_dropout": 0.25, "scaling": 0.375, "sliding_window": 4, "config": config}
    layer = changed(module, parts, **now)
    _, _, cos, sin, *_ = next(rotary.convention.samples(sample))
    x, mask = sample.numbers(2, 8, hidden), sample.numbers(2, 1, 8)

    def remembered(answer):
        return lambda *args, **kwargs: given.append((args, sorted(kwargs.items()))) or answer(*args)

    def attend(layer, q, k, v, mask):
        return (q + (k * v).mean((1, 2), keepdim=True)).transpose(1, 2).contiguous(), q

    # Stands in the place of the attention functions and of a cache.
    witness = SimpleNamespace(
        get_interface=remembered(lambda *_: remembered(attend)),
        update=remembered(lambda k, v, _: (torch.cat([k, k + 1], 2), torch.cat([v, v - 1], 2))),
    )

    def outcome(forward, training, batch, seq, masked, cached):
        layer.training = training
        given.clear()
        of_tokens = [t[:batch, :seq] for t in (x, cos, sin)]
        others = [mask if masked else None, *[witness] * cached]
        return forward(layer, of_tokens[0], tuple(of_tokens[1:]), *others, another=mask), [*given]

    own = copy_of(inner, inner.__code__, inner.__closure__, inner.__globals__ | {"ALL_ATTENTION_FUNCTIONS": witness})
    fused = _forward_of(untried, own, _state_of(layer, said(own)), rotary, norm, (type(None), SimpleNamespace))
    both, has_cache = (False, True), bool(_name_of_cache(own))
    return outcome, own, fused, [*product(both, (1, 2), (1, 8), both, (False, has_cache))]
