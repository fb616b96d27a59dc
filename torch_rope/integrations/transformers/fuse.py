"""Fused forwards for the attention layers of transformers whose text is known.

They normalise and rotate q and k by one operator, which also writes into a StaticCache. All else they compute in the words of
the own forward, which computes itself where the operators cannot.
"""

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_compiling
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from ..._ops import ops
from .._bits import Operands, is_traced
from .._fuse import Norms, is_plain, known_norms, weight_of
from .._patch import Fuse
from .._rotary import Rotary, Seen
from .._text import NoText, plain, text_of
from .known_layers import FORWARDS, NORMS, Layer

ALWAYS = "hidden_states", "position_embeddings", "attention_mask"  # the arguments of all forwards
ROLES = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"  # what a forward calls, whatever its text is
UPDATES = StaticCache.update, StaticLayer.update, StaticSlidingWindowLayer.update  # others may replace them


class Call(NamedTuple):
    """The arguments of a forward that is fused."""

    x: Tensor  # [batch, seq, hidden]
    cache: Any
    mask: Tensor | None
    named: dict  # other arguments that the own forward names
    more: dict  # its other keywords
    rotation: tuple[Operands, Callable, Callable]  # see Rotary.operands


class Fused:
    """What the fused forwards of layers with one text have in common."""

    def __init__(self, record: Layer, own: Callable, rotary: Rotary, norms: Norms | None, eager: bool):
        self.record, self.rotary, self.norms, self.eager = record, rotary, norms, eager
        self.channels: Callable = eval(f"lambda self: {record.channels}")
        self.names, self.globals = record.arguments.split(), plain(own).__globals__
        self.cache = "cache" if "cache" in self.names else "past_key_values"
        self.others = {*self.names} - {*ALWAYS, self.cache}
        self.norms_of_qk, self.parts = record.norms.split(), (*record.norms.split(), *record.norm_of_v.split())
        words = record.rotated, record.normed, record.factor, record.reads, record.stores
        self.rotated, self.normed, self.factor, self.reads, self.stores = map(self.meaning, words)
        self.tells, self.update = (self.meaning(f"dict({words})") for words in (record.tells, record.update))
        self.out: Callable = eval(f"lambda self, out, gate: {record.out}", self.globals)
        self.calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of the own forward, by layer
        self._seen: dict[int, Seen] = {}  # rotations, by the identity of their first table

    def meaning(self, words: str) -> Callable:
        """Returns a function of what said gives it: what words mean for a layer in a call."""
        return eval(f"lambda self, hidden_states, {self.cache}, kwargs, position_ids=None, **_: {words}", self.globals)

    def said(self, meaning: Callable, layer: Any, c: Call) -> Any:
        return meaning(layer, c.x, c.cache, c.more, **c.named)

    # ---- whether a call is fused ----

    def call(self, layer: Any, args: tuple, kwargs: dict) -> Call | None:
        """Returns the arguments of a call that the operators can compute, or None."""
        more = {**kwargs, **dict(zip(self.names, args, strict=False))}
        x, tables = more.pop("hidden_states", None), more.pop("position_embeddings", None)
        rotation = None if "past_key_values" in more and self.cache == "cache" else self.look(layer, x, tables)
        if rotation is None:
            return None
        mask, cache = more.pop("attention_mask", None), more.pop(self.cache, None)
        return Call(x, cache, mask, {name: more.pop(name, None) for name in self.others}, more, rotation)

    def look(self, layer: Any, x: Any, tables: Any) -> tuple | None:
        """Returns how the operators rotate q and k, or None if they cannot compute what the layer does."""
        if x is None or tables is None or (_is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)):
            return None
        if self.parts:
            modules = layer._modules
            norms = [modules[name] for name in self.parts if name in modules]
            if norms and not (self.norms and self.norms.are(norms, x, self.eager)):
                return None
        # The layers of a model have the same tables.
        first, last = (tables, tables) if isinstance(tables, Tensor) else tables
        both = (first,) if first is last else (first, last)
        key = id(first)
        if not is_compiling() and (seen := self._seen.get(key)) is not None and seen.is_of([x], both):
            return seen.call
        rotation = self._rotation(layer, x, both)
        found = None if rotation is None or is_traced() else Seen.of([x], both, lambda _: self._seen.pop(key, None))
        # A converted table would not follow a change.
        if found and rotation and rotation[0].cos.data_ptr() == first.data_ptr():
            self._seen[key] = found._replace(call=rotation)
        return rotation

    def _rotation(self, layer: Any, x: Tensor, tables: tuple) -> tuple | None:
        heads_first, others = self.record.heads_first, self.rotary.convention.others
        # Several heads tell which dimension is theirs.
        two_heads = x[:, None, :, :1].expand(-1, 2, -1, self.channels(layer))
        two_heads = two_heads if heads_first else two_heads.transpose(1, 2)
        more = [*[None] * (others - 3), 1] if others > 2 else []  # the dimension of heads in q
        rotation = None if x.is_meta else self.rotary.operands([two_heads], (*tables, *more))
        if rotation is None or not (o := rotation[0]).fits(x, heads_first):
            return None
        return rotation if self.eager == o.flags.get("eager_rounding", False) and o.rounding.x == x.dtype else None

    # ---- what the forms have in common ----

    def rotate(self, layer: Any, c: Call, q: Tensor, k: Tensor, v: Tensor | None, projection: Any) -> tuple | None:
        """Returns q [batch, heads, seq, head_dim], normalised and rotated, and k and v as the cache returns them.

        The arguments are [batch, seq, heads, head_dim]. v is None for a layer that reads k and v of another layer.
        projection: the module whose result q is a part of. Returns None if the dtypes differ.
        """
        if not q.dtype == k.dtype == c.x.dtype:
            return None
        o, cache, latent, modules = c.rotation[0], c.cache, self.record.form == "latent", layer._modules
        rotated, normed, factor = (self.said(words, layer, c) for words in (self.rotated, self.normed, self.factor))
        tables = (o.cos, o.sin) if rotated else (o.cos[..., :0], o.sin[..., :0])
        flags = o.flags if factor is None else o.flags | {"q_factor": factor.float().reshape(-1, q.shape[1])}
        norms = [modules[name] for name in self.norms_of_qk if normed and name in modules]
        norms = norms if v is not None else norms[:1] * 2  # a layer without k may have no norm of k
        weights = [weight_of(m, t) for m, t in zip(norms, (q, k), strict=False)]
        norms_of_v = [modules[name] for name in self.record.norm_of_v.split() if v is not None]
        of_norms = self.norms.flags([*norms, *norms_of_v][0], self.eager) if self.norms and norms + norms_of_v else {}
        # An exported program may run with gradients, with which the operator does not write.
        writes = type(cache) is StaticCache and not (torch.is_grad_enabled() or torch.compiler._is_exporting_flag)
        if writes and v is not None:
            # The result of a projection may be held elsewhere, unless the projection is PyTorch's own.
            q_out = q if type(projection) is nn.Linear and is_plain(vars(projection)) else torch.empty_like(q)
            how = {**flags, **of_norms, "q_out": q_out}
            if norms_of_v:
                how |= {"norm_v": True, "v_norm_weight": getattr(norms_of_v[0], "weight", None)}
            held = _write(cache, layer.layer_idx, q, k, v, tables, weights, latent, how)
            if held is not None:
                return q_out.transpose(1, 2), *held
        if norms:
            q, k = ops.norm_rotate_qk.default(q, k, *weights, *tables, **flags, **of_norms)
        elif rotated or factor is not None:
            q, k = ops.rotate_qk.default(q, k, *tables, **flags)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if v is None:
            return q, k, v
        v = (norms_of_v[0](v) if norms_of_v else v).transpose(1, 2)
        held = (v, k) if latent else (k, v)
        return q, *(held if cache is None else cache.update(*held, layer.layer_idx, **self.said(self.update, layer, c)))

    def finished(self, layer: Any, c: Call, qkv: tuple | None, gate: Tensor | None = None) -> tuple | None:
        """Returns what the forward returns for q, k and v [batch, heads, seq, head_dim], or None if there are none."""
        if qkv is None:
            return None
        functions, eager = self.globals["ALL_ATTENTION_FUNCTIONS"], self.globals["eager_attention_forward"]
        attention = functions.get_interface(layer.config._attn_implementation, eager)
        out, scores = attention(layer, *qkv, c.mask, **self.said(self.tells, layer, c), **c.more)
        return self.out(layer, out.reshape(*c.x.shape[:-1], -1).contiguous(), gate), scores


# ---- forms of attention ----


def _separate(f: Fused, self: Any, c: Call) -> tuple | None:
    """Llama, and most others."""
    shape = *c.x.shape[:-1], -1, self.head_dim
    q = self.q_proj(c.x).view(shape)  # [batch, seq, heads, head_dim]
    k, v = self.k_proj(c.x).view(shape), self.v_proj(c.x).view(shape)  # [batch, seq, kv_heads, head_dim]
    return f.finished(self, c, f.rotate(self, c, q, k, v, self.q_proj))


def _gated(f: Fused, self: Any, c: Call) -> tuple | None:
    """Qwen3-Next and Qwen3.5: each head of q is followed by its gate."""
    shape = *c.x.shape[:-1], -1, self.head_dim
    q, gate = self.q_proj(c.x).view(*c.x.shape[:-1], -1, 2 * self.head_dim).chunk(2, -1)
    k, v = self.k_proj(c.x).view(shape), self.v_proj(c.x).view(shape)
    return f.finished(self, c, f.rotate(self, c, q, k, v, self.q_proj), gate.flatten(-2))


def _packed(f: Fused, self: Any, c: Call) -> tuple | None:
    """Phi-3: one projection for the heads of q, of k, and of v."""
    heads, kv_heads = self.config.num_attention_heads, self.num_key_value_heads
    qkv = self.qkv_proj(c.x).view(*c.x.shape[:-1], -1, self.head_dim)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], -2)
    return f.finished(self, c, f.rotate(self, c, q, k, v, self.qkv_proj))


def _in_thirds(f: Fused, self: Any, c: Call) -> tuple | None:
    """ModernBERT: one projection for q, k and v, which have the same number of heads."""
    q, k, v = self.Wqkv(c.x).view(*c.x.shape[:-1], 3, -1, self.head_dim).unbind(-3)
    return f.finished(self, c, f.rotate(self, c, q, k, v, self.Wqkv))


def _latent(f: Fused, self: Any, c: Call) -> tuple | None:
    """DeepSeek: the last channels of q rotate, and k is one head for all. v is the latent, which the cache has as its keys."""
    q = self.q_proj(c.x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(c.x)))
    q = q.view(*c.x.shape[:-1], -1, self.qk_head_dim).transpose(1, 2)  # [batch, heads, seq, qk_head_dim]
    q_pass, q_rot = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    latent, k_rot = self.kv_a_proj_with_mqa(c.x)[:, None].split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    _, to_operator, _ = c.rotation  # some read interleaved pairs, and write the first channels of all pairs first
    if (qkv := f.rotate(self, c, to_operator(q_rot), to_operator(k_rot), latent.transpose(1, 2), None)) is None:
        return None
    q_rot, latent, k_rot = qkv
    if (factor := f.said(f.factor, self, c)) is not None:
        q_pass = q_pass * factor
    return f.finished(self, c, (torch.cat([q_pass, q_rot], -1), *self.expand_kv(latent, k_rot)))


def _shared(f: Fused, self: Any, c: Call) -> tuple | None:
    """Gemma 4 and Gemma 3n: some layers have no k, and read k and v of an earlier layer."""
    shape = *c.x.shape[:-1], -1, self.head_dim
    q, shared = self.q_proj(c.x).view(shape), c.named["shared_kv_states"]
    if self.is_kv_shared_layer:
        qkv = f.rotate(self, c, q, q[:, :, :0], None, None)
        qkv = qkv and (qkv[0], *(t.to(q.device) for t in shared[f.said(f.reads, self, c)]))
    else:
        k = self.k_proj(c.x).view(shape)
        v = k if self.v_proj is None else self.v_proj(c.x).view(shape)
        qkv = f.rotate(self, c, q, k, v, self.q_proj)
    if qkv is not None and self.store_full_length_kv:
        shared[f.said(f.stores, self, c)] = qkv[1:]
    return f.finished(self, c, qkv)


FORMS = {
    "separate": _separate,
    "gated": _gated,
    "packed": _packed,
    "thirds": _in_thirds,
    "latent": _latent,
    "shared": _shared,
}


# ---- the write into a cache ----


def _write(
    cache: StaticCache,
    index: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple,
    weights: list,
    v_first: bool,
    how: dict,
) -> tuple[Tensor, Tensor] | None:
    """Writes rotated q to q_out, and k and v into the next cells of a layer of a cache. Returns the layer's keys and values.

    Returns None, and writes nothing, if the layer's own update must write. v_first: whether v are the keys.
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
        layer.lazy_initialization(*(t.transpose(1, 2) for t in ((v, k) if v_first else (k, v))))
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
    caches = [t.transpose(1, 2) for t in (layer.keys, layer.values)]
    rows = (t[None] if t.dim() == 2 else t for t in tables)  # [batch or 1, seq, pairs], a row for each token
    k_cache, v_cache = caches[::-1] if v_first else caches
    ops.rotate_into_cache_.default(q, k, v, k_cache, v_cache, *rows, None, positions, offset, None, *weights, **how)
    if not moves:
        layer.cumulative_length.add_(seq)
    if slides:
        layer.cumulative_length_int += seq
    return layer.keys, layer.values


# ---- which layers are fused ----


def fuser(rounding: str = "eager") -> Fuse:
    """Returns a function that finds the forwards of one model. Layers that differ in weights only have the same forward."""
    made: dict[tuple, tuple[Callable, str]] = {}

    def fuse(module: nn.Module, owner: Any, name: str, function: Any, new: FunctionType) -> tuple[Callable, str]:
        if owner is not module or name != "forward":
            return new, ""
        kinds = [(n, type(m)) for n, m in module._modules.items()]
        key = function, type(module), getattr(module, "head_dim", None), *kinds
        if key not in made:
            made[key] = _fused(module, function, new, rounding == "eager")
        return made[key]

    return fuse


def _fused(module: nn.Module, function: Any, new: FunctionType, eager: bool) -> tuple[Callable, str]:
    """Returns the forward that a module gets, and what it fuses, or new and why nothing is fused."""
    rotaries = {c.name: c for c in vars(new)["_torch_rope"] if isinstance(c, Rotary)}
    try:
        record = FORWARDS.get(text_of(function, {*ROLES, *rotaries}, type(module)))
    except NoText:
        record = None
    if record is None or not rotaries:
        return new, "its text is not known"
    never, name = (eval(f"lambda self: {words}")(module) for words in (record.never, record.rotary))
    if never:
        return new, never
    modules: Any = [m for n, m in module._modules.items() if n in (*record.norms.split(), *record.norm_of_v.split())]
    norms = known_norms(modules, NORMS) if modules else None
    if isinstance(norms, str):
        return new, norms
    rotary = rotaries[name or [*rotaries][0]]
    if record.form != "latent" and rotary.convention.says.partition(", ")[2] not in ("", "last channels"):
        return new, f"its rotary function is special: {rotary.convention.says}"
    fused, form = Fused(record, new, rotary, norms, eager), FORMS[record.form]

    def forward(self, *args, **kwargs):
        call = fused.call(self, args, kwargs)
        if call is not None and (result := form(fused, self, call)) is not None:
            return result
        if not is_compiling():
            fused.calls[self] = fused.calls.get(self, 0) + 1
        return new(self, *args, **kwargs)

    vars(forward).update(_torch_rope=vars(new)["_torch_rope"], _torch_rope_own=fused.calls)
    note = f"{record.norms.replace(' ', ', ')} and the rotation" if record.norms and modules else "the rotation"
    writes = f"; with {record.norm_of_v} and the write into a StaticCache".replace("with  and", "with")
    return forward, note + writes * (fused.cache in fused.names)
