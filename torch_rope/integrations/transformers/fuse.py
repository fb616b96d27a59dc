"""A fused forward for the attention layers of transformers that look like Llama's.

The forward normalises and rotates q and k by one operator, which also writes into a StaticCache. A layer gets it if each
name in the code of its own forward is known, and if both forwards do the same in a trial: they give the same arguments to
the attention function and to the cache, and have the same results. The trial has small random projections in the place of
the layer's own, so it needs no weights.
"""

import copy
import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, StaticCache, StaticLayer, StaticSlidingWindowLayer

from ..._modes import undisturbed
from ..._ops import ops
from .._conventions import Sample
from .._fuse import Norm, are_plain, changed, disagreement, guesses, like_norm, small_linear, unknown, untried
from .._names import copy_of
from .._patch import Fuse
from .._rotary import Rotary

PROJECTIONS, NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
SWITCHES = "use_qk_norm", "use_rope"  # the attributes that decide what a layer does
# The names and constants in the forwards of layers that are fused, besides these and the name of the rotary function.
WORDS = """
    ALL_ATTENTION_FUNCTIONS _attn_implementation attention_dropout config contiguous dropout eager_attention_forward
    get_interface getattr head_dim kwargs layer_idx o_proj reshape scaling shape sliding_window training transpose update
    view -1 0.0 1 2
"""
KNOWN = {*PROJECTIONS, *NORMS, *SWITCHES, *WORDS.split()}
ARGUMENTS = "self", "hidden_states", "position_embeddings", "attention_mask"
CACHES = "", "cache", "past_key_values"  # the names of the argument for the cache


def _parts(module: nn.Module) -> list[nn.Module]:
    """Returns the projections and the norms of an attention layer."""
    return [module._modules[name] for name in (*PROJECTIONS, *NORMS) if module._modules.get(name) is not None]


def _state_of(module: nn.Module, words: frozenset[str]) -> tuple:
    """Returns what decides what a layer does: types, switches, and the window that it tells the attention function."""
    holder = module.config if "getattr" in words else module
    window = getattr(holder, "sliding_window", None) if "sliding_window" in words else None
    return *map(type, _parts(module)), *[getattr(module, name, None) for name in SWITCHES], window


def _forward_of(
    own: Callable,
    rotary: Rotary,
    norm: Norm | None,
    state: tuple,
    words: frozenset[str],
    names: dict[str, Any],
    name_of_cache: str,
    caches: tuple[type, ...] = (type(None), DynamicCache, StaticCache),
) -> Callable:
    """Returns the fused forward of layers with a state.

    Args:
        own: the forward that computes in every other case.
        words: the names in the code of the layer's own forward.
        names: the globals of that forward.
    """
    ignored = [None] * (rotary.convention.others - 3)
    other_names = {*CACHES} - {name_of_cache}
    window = {"sliding_window": state[-1]} if "sliding_window" in words else {}

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, *args, **kwargs):
        x, more, found = hidden_states, dict(kwargs), None
        cache = args[0] if args else more.pop(name_of_cache, None)
        if (
            position_embeddings is not None
            and type(cache) in caches
            and other_names.isdisjoint(more)
            and _state_of(self, words) == state
            and are_plain(_parts(self))
            and (norm is None or norm.are(self.q_norm, self.k_norm))
            and not torch.is_autocast_enabled(x.device.type)
        ):
            # q: [batch, seq, heads, head_dim]; k and v have kv_heads
            q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, self.head_dim)) for name in PROJECTIONS)
            found = rotary.operands([q.transpose(1, 2)], (*position_embeddings, *ignored, 1))
        if found is None or not found[0].rounding.result == q.dtype == x.dtype:
            return own(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        tables, flags, weights = (found[0].cos, found[0].sin), found[0].flags, ()
        if norm:
            weights = norm.weight_of(self.q_norm, q), norm.weight_of(self.k_norm, k)
            flags = flags | {"norm_eps": getattr(self.q_norm, norm.eps)}
        if (layer := _layer_to_write(cache, self.layer_idx, k, v)) is not None:
            # The result of a projection may be held elsewhere, unless the projection is PyTorch's own.
            q_out = q if type(self.q_proj) is nn.Linear else torch.empty_like(q)
            _write(layer, q, k, v, *tables, weights, q_out=q_out, **flags)
            q, k, v = q_out.transpose(1, 2), layer.keys, layer.values
        else:
            operator = ops.norm_rotate_qk.default if norm else ops.rotate_qk.default
            q, k, v = (t.transpose(1, 2) for t in (*operator(q, k, *weights, *tables, **flags), v))
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx, **({"kwargs": more} if "kwargs" in words else {}))
        functions, eager = names["ALL_ATTENTION_FUNCTIONS"], names["eager_attention_forward"]
        attend = functions.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        out, scores = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **window, **more)
        return self.o_proj(out.flatten(2).contiguous()), scores

    forward._torch_rope = (rotary,)
    return forward


# ---- static caches ----


def _layer_to_write(cache: Cache | None, index: int, k: Tensor, v: Tensor) -> StaticLayer | None:
    """Returns the layer of a StaticCache that the operator can write k and v into, or None.

    An exported program may run with gradients, with which the operator does not write.
    """
    if type(cache) is not StaticCache or torch.is_grad_enabled() or torch.compiler._is_exporting_flag:
        return None
    layer = cache.layers[index]
    if cache.offloading or "update" in vars(cache) or type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
        return None
    if k.shape[1] > 1 and _moves(layer, k.shape[1]):
        return None
    if not layer.is_initialized:
        layer.lazy_initialization(k.transpose(1, 2), v.transpose(1, 2))
    return layer if layer.keys.dtype == k.dtype == v.dtype else None


def _moves(layer: StaticLayer, seq: int) -> bool:
    """Returns whether the next tokens move the window of a layer."""
    return type(layer) is StaticSlidingWindowLayer and layer.cumulative_length_int + seq > layer.max_cache_len


def _write(
    layer: StaticLayer, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, weights: tuple, **how
) -> None:
    """Writes rotated q to q_out, and k and v into the next cells of a layer."""
    seq, moves, positions, offset = k.shape[1], _moves(layer, k.shape[1]), None, 0
    if moves:  # the token takes the last cell
        offset = layer.max_cache_len - 1
        for cells in layer.keys, layer.values:
            cells.copy_(cells.roll(-1, 2))
    elif seq == 1:
        positions = layer.cumulative_length.view(1)
    else:
        positions = torch.arange(seq, device=k.device) + layer.cumulative_length
    caches = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
    ops.rotate_into_cache_.default(q, k, v, *caches, cos, sin, None, positions, offset, None, *weights, **how)
    if not moves:
        layer.cumulative_length.add_(seq)
    if type(layer) is StaticSlidingWindowLayer:
        layer.cumulative_length_int += seq


# ---- which layers are fused ----


def fuser() -> Fuse:
    """Returns a function that finds the forwards of one model. Layers that differ in weights only have one trial."""
    known: dict[tuple, tuple[Callable, str]] = {}

    def fuse(module: nn.Module, owner: Any, name: str, function: Callable, new: Callable) -> tuple[Callable, str]:
        if owner is not module or name != "forward":
            return new, ""
        # The name of an argument that has another one since is transformers' own matter.
        inner = inspect.unwrap(function, stop=lambda f: f.__globals__["__name__"] != "transformers.utils.deprecation")
        code, parts = inner.__code__, _parts(module)
        words = frozenset([*code.co_names, *(w for c in code.co_consts if isinstance(c, tuple) for w in c)])
        sizes = [p.shape for norm in parts[3:] for p in norm.parameters()]
        state = _state_of(module, words)
        key = function, type(module), getattr(module, "head_dim", None), *state, *sizes, are_plain(parts)
        if key not in known:
            known[key] = _fused(module, inner, new, state, words)
        return known[key]

    return fuse


def _fused(module: nn.Module, inner: Callable, new: Callable, state: tuple, words: frozenset) -> tuple[Callable, str]:
    """Returns the forward that a module gets, and a note about it."""
    # Of the functions of q, k, cos, sin and the dimension of heads.
    rotaries = [c for c in new._torch_rope if isinstance(c, Rotary) and c.convention[:2] in ((2, 3), (2, 4))]
    arguments = inner.__code__.co_varnames[: inner.__code__.co_argcount]
    name_of_cache, norms = "".join(arguments[4:]), _parts(module)[3:]
    if len(rotaries) != 1 or arguments[:4] != ARGUMENTS or name_of_cache not in CACHES:
        return new, "not fused: its arguments are others"
    if why := unknown(inner, KNOWN | {rotaries[0].name}, ("training", *SWITCHES)):
        return new, f"not fused: its forward {why}"
    if not are_plain(_parts(module)):
        return new, "not fused: a projection or a norm has hooks, or a forward of its own"
    why, once = "its norms are others", rotaries[0].rounded_once()
    for norm in guesses(*norms) if len(norms) == 2 else [None] * (not norms):
        if not (
            why := undisturbed(disagreement, _trial_of, module, inspect.unwrap(new), once, norm, words, name_of_cache)
        ):
            what = f"{'q_norm, k_norm and ' * bool(norms)}the rotation"
            forward = _forward_of(new, once, norm, state, words, inner.__globals__, name_of_cache)
            return forward, f"fused: {what}; with the write into a StaticCache"
    return new, f"not fused: {why}"


# ---- the trial ----


class _Witness:
    """Stands in the place of the attention functions and of a cache, and remembers what it is given."""

    def __init__(self):
        self.given: list = []

    def get_interface(self, *args, **kwargs):
        self.given.append((args, sorted(kwargs.items())))
        return self.attend

    def attend(self, layer, q, k, v, *args, **kwargs):
        self.given.append((layer, q, k, v, args, sorted(kwargs.items())))
        return (q + (k * v).mean((1, 2), keepdim=True)).transpose(1, 2).contiguous(), q

    def update(self, k, v, *args, **kwargs):
        self.given.append((k, v, args, sorted(kwargs.items())))
        return torch.cat([k, k + 1], 2), torch.cat([v, v - 1], 2)


def _trial_of(
    module: nn.Module, new: Callable, rotary: Rotary, norm: Norm | None, words: frozenset, name_of_cache: str
) -> tuple:
    """Returns what disagreement needs, for a layer like a module, with small projections and numbers that show."""
    head_dim, hidden, config, witness = module.head_dim, 16, copy.copy(module.config), _Witness()
    sample = Sample(2, 8, 1, head_dim, head_dim // 2, torch.float32, torch.float32)
    norms = {n: like_norm(sample, m, norm) for n in NORMS if (m := module._modules.get(n)) is not None}
    of_norms = [norms[n].weight.numel() if n in norms else 0 for n in NORMS]  # of one head or of all
    q, k = (
        of_norm if of_norm > head_dim else heads * head_dim for of_norm, heads in zip(of_norms, (4, 2), strict=True)
    )
    parts = {n: small_linear(sample, hidden, out) for n, out in zip(PROJECTIONS, (q, k, k), strict=True)}
    parts |= {**norms, "o_proj": small_linear(sample, q, hidden)}
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = 5  # less than eight tokens, as the other window
    layer = changed(module, parts, layer_idx=2, attention_dropout=0.25, scaling=0.375, sliding_window=4, config=config)
    _, _, cos, sin, *_ = next(rotary.convention.samples(sample))
    x, mask = sample.numbers(2, 8, hidden), sample.numbers(2, 1, 8)

    def outcome(forward, training, batch, seq, masked, cached):
        layer.training, witness.given = training, []
        of_tokens = [t[:batch, :seq] for t in (x, cos, sin)]
        others = [mask if masked else None, *[witness] * cached]
        return forward(layer, of_tokens[0], tuple(of_tokens[1:]), *others, another=mask), witness.given

    names = new.__globals__ | {"ALL_ATTENTION_FUNCTIONS": witness}
    own, state, caches = (
        copy_of(new, new.__code__, new.__closure__, names),
        _state_of(layer, words),
        (type(None), _Witness),
    )
    fused = _forward_of(untried, rotary, norm, state, words, names, name_of_cache, caches)
    both = False, True
    return outcome, own, fused, [*product(both, (1, 2), (1, 8), both, both if name_of_cache else both[:1])]
