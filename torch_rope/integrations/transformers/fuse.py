"""A fused forward for the attention layers of transformers that look like Llama's.

The forward normalises and rotates q and k by one operator, which also writes into a StaticCache. A trial decides whether
a layer gets it: on random numbers it must compute what the layer's own forward computes, in training, without a cache,
and with a DynamicCache and a StaticCache.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, StaticCache, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..._ops import ops
from .._conventions import Sample
from .._fuse import Norm, are_watched, disagreement, guesses, trained
from .._patch import Fuse
from .._rotary import Rotary, plainly

PROJECTIONS, NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Returns the projections and the norms of an attention layer."""
    return [layer._modules[name] for name in (*PROJECTIONS, *NORMS) if layer._modules.get(name) is not None]


def _forward_of(own: Callable, rotary: Rotary, norm: Norm | None) -> Callable:
    """Returns the fused forward of an attention module, whose own forward computes in every other case."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        def unfused():
            given = hidden_states, position_embeddings, attention_mask, cache
            return own(self, *given[: 3 if cache is None else 4], **kwargs)  # the cache may be past_key_values instead

        if position_embeddings is None or are_watched(*_parts(self)):
            return unfused()
        # q: [batch, seq, heads, head_dim]; k and v have kv_heads
        q, k, v = (getattr(self, n)(hidden_states).unflatten(-1, (-1, self.head_dim)) for n in PROJECTIONS)
        others = *position_embeddings, *[None] * (rotary.convention.others - 3), 1
        found = rotary.operands([q.transpose(1, 2)], others)
        if found is None or found[0].rounding.result != q.dtype:
            return unfused()
        o, _ = found
        flags, weights = o.flags, (None, None)
        if norm:  # the operators round once, after the norm and the rotation
            flags = {n: value for n, value in flags.items() if n != "eager_rounding"} | {"norm_eps": norm.eps}
            weights = norm.weight_of(self.q_norm, q), norm.weight_of(self.k_norm, k)
        used = kwargs.get("past_key_values", cache)  # its name before transformers 5.24
        if (layer := _layer_to_write(used, self.layer_idx, k, v)) is not None:
            slots = _next_slots(layer, k)
            caches = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
            ops.rotate_into_cache_.default(q, k, v, *caches, o.cos, o.sin, None, None, 0, slots, *weights, **flags)
            layer.cumulative_length.add_(k.shape[1])
            q, k, v = q.transpose(1, 2), layer.keys, layer.values
        else:
            if norm:
                q, k = ops.norm_rotate_qk.default(q, k, *weights, o.cos, o.sin, **flags)
            elif torch.is_grad_enabled():
                q, k = ops.rotate_qk.default(q, k, o.cos, o.sin, **flags)
            else:
                ops.rotate_qk_.default(q, k, o.cos, o.sin, **flags)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if used is not None:
                k, v = used.update(k, v, self.layer_idx)
        kwargs = {n: value for n, value in kwargs.items() if n != "past_key_values"}
        if getattr(self, "sliding_window", None) is not None:
            kwargs.setdefault("sliding_window", self.sliding_window)
        eager = sys.modules[own.__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        out, scores = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2).contiguous()), scores

    forward._torch_rope = (rotary,)
    return forward


def _layer_to_write(cache: Any, index: int, k: Tensor, v: Tensor) -> StaticLayer | None:
    """Returns the layer of a StaticCache that the operator can write k and v into, or None."""
    if cache is None or torch.is_grad_enabled() or type(cache).update is not Cache.update or cache.offloading:
        return None
    layer = cache.layers[index] if index < len(cache.layers) else None
    if type(layer) is not StaticLayer:
        return None
    if not layer.is_initialized:
        layer.lazy_initialization(k.transpose(1, 2), v.transpose(1, 2))
    return layer if layer.keys.dtype == k.dtype else None


def _next_slots(layer: StaticLayer, k: Tensor) -> Tensor:
    """Returns where the next tokens of a layer go, [batch, seq]."""
    batch, seq = k.shape[:2]
    tokens = torch.arange(seq, device=k.device) + layer.cumulative_length
    return tokens + layer.keys.shape[2] * torch.arange(batch, device=k.device)[:, None]


def fuser() -> Fuse:
    """Returns a function that finds the forwards of one model. Layers that differ in weights only have one trial."""
    known: dict[tuple, tuple[Callable, str]] = {}

    def fuse(module: nn.Module, owner: Any, name: str, function: Callable, new: Callable) -> tuple[Callable, str]:
        if owner is not module or name != "forward":
            return new, ""
        plain = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str) and n != "layer_idx"}
        tensors = [(n, t.shape, t.dtype, t.device) for n, t in module.named_parameters()]
        watched = bool(are_watched(*_parts(module)))  # a trial would call the hooks
        key = type(module), function, watched, *plain.items(), *tensors, *map(type, module.children())
        if key not in known:
            hooks = new, "not fused: a projection or a norm has hooks"
            known[key] = hooks if watched else _fused(module, function, new)
        return known[key]

    return fuse


def _fused(module: nn.Module, function: Callable, new: Callable) -> tuple[Callable, str]:
    """Returns the forward that a module gets, and a note about it."""
    # Of the functions of q, k, cos, sin and the dimension of heads.
    rotaries = [c for c in new._torch_rope if isinstance(c, Rotary) and c.convention[:2] in ((2, 3), (2, 4))]
    arguments = [*inspect.signature(inspect.unwrap(function)).parameters][1:4]
    if len(rotaries) != 1 or arguments != ["hidden_states", "position_embeddings", "attention_mask"]:
        return new, "not fused: its arguments are others"
    norms, why = [module._modules[n] for n in NORMS if module._modules.get(n) is not None], "its norms are others"
    once = rotaries[0].rounded_once()
    for norm in guesses(*norms) if len(norms) == 2 else [None] * (not norms):
        forward = _forward_of(new, once, norm)
        if not (why := disagreement(new, forward, _trials(module, rotaries[0]))):
            what = f"{'q_norm, k_norm and ' * bool(norms)}the rotation"
            return forward, f"fused: {what}; with the write into a StaticCache"
    return new, f"not fused: {why}"


# ---- the trial ----


def _trials(module: nn.Module, rotary: Rotary) -> list[Callable]:
    """Returns functions that call a forward of a module, in training, without a cache and with caches."""
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if weight is None or weight.is_meta or not hasattr(module, "head_dim"):
        return []
    sample = Sample(2, 7, 1, module.head_dim, module.head_dim // 2, weight.dtype, weight.dtype)
    _, _, cos, sin, *_ = next(rotary.convention.samples(sample))
    sample.head_dim = module.config.hidden_size
    x, *tables = (t.to(weight.device) for t in (sample.x(2, 7), cos, sin))

    def with_cache(make: Callable[..., Cache], forward: Callable, **more: int) -> list[Tensor]:
        """Returns the results of a prompt of five tokens and of two single tokens, and what the cache holds."""
        cache, found = make(config=module.config, **more), []
        for begin, end in ((0, 5), (5, 6), (6, 7)):
            seen = torch.ones(end, more.get("max_cache_len", end), dtype=torch.bool, device=x.device).tril()[begin:]
            mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)[None, None]
            found.append(forward(module, x[:, begin:end], [t[:, begin:end] for t in tables], mask, cache)[0])
        layer = cache.layers[module.layer_idx]
        return [*found, layer.keys, layer.values]

    return [
        lambda forward: trained(module, lambda x: forward(module, x, tables, None)[0], x),
        plainly()(lambda forward: [forward(module, x, tables, None)[0]]),
        plainly()(lambda forward: with_cache(DynamicCache, forward)),
        plainly()(lambda forward: with_cache(StaticCache, forward, max_cache_len=7)),
    ]
