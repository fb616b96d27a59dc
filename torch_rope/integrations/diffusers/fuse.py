"""Fused attention of diffusers: the norms of q and k, the rotation, and the joining of text and image are one operator.

known_layers.py says which processors compute what a form below computes. A form returns None where it does not know what to
do, and the processor's own method computes.
"""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..._ops import ops
from .._bits import is_traced
from .._fuse import are_plain
from .._patch import Fuse
from .._rotary import Rotary
from .._text import NoText, text_of
from .known_layers import NORMS, PROCESSORS, Norm

IMAGE, TEXT = ("norm_q", "norm_k"), ("norm_added_q", "norm_added_k")  # the norms of the two streams


class Plan(NamedTuple):
    """How the streams of a layer are normalised and rotated."""

    cos: Tensor  # [seq, rotary_dim / 2] or [batch, seq, rotary_dim / 2], for the tokens of all streams
    sin: Tensor
    weights: list[Tensor]  # of q and of k for each stream, [head_dim] or [heads, head_dim]
    flags: dict[str, Any]  # of the operators


class Layer(NamedTuple):
    """What the fused methods of one class of processors share."""

    own: FunctionType  # the processor's own method
    rotary: Rotary
    eager: bool  # whether to round as the own method does
    norms: dict[type, tuple[Callable, Norm]]  # the known norms, with their forward when the model was patched

    def plan(self, attn: Any, names: Sequence[str], x: Tensor, seq: int, *others: Any, heads: int = 1) -> Plan | None:
        """Returns how to compute for these norms of the layer, or None if that is not known.

        x: [batch, .., channels], the input. seq: how many tokens rotate. others: the other arguments of the rotary
        function. heads: how many are normalised together.
        """
        norms = [getattr(attn, name) for name in names]
        if others[0] is None or (flags := self._flags(norms, x.dtype)) is None:
            return None
        weights = [m.weight.unflatten(-1, (heads, -1)) if heads > 1 else m.weight for m in norms]
        two_heads = x[:, :1, None, :1].expand(-1, seq, 2, weights[0].shape[-1])
        if (found := self.rotary.operands([two_heads], others)) is None:
            return None
        o, r = found[0], found[0].rounding
        if (
            not o.fits(x, False)
            or (r.eager, r.x) != (self.eager, x.dtype)
            or r.rounds_first_product
            or "inverse" in o.flags
        ):
            return None
        return Plan(o.cos, o.sin, weights, o.flags | flags)

    def _flags(self, norms: Sequence[Any], dtype: torch.dtype) -> dict[str, Any] | None:
        """Returns the flags for norms that compute as when the model was patched, all alike, or None."""
        forward, norm = self.norms.get(type(norms[0]), (None, None))
        if norm is None or any(type(m) is not type(norms[0]) or type(m).forward is not forward for m in norms):
            return None
        eps, *others = [getattr(m, norm.eps) for m in norms]
        parameters = [{n: p.dtype for n, p in m._parameters.items() if p is not None} for m in norms]
        if eps is None or any(e != eps for e in others) or any(p != {"weight": dtype} for p in parameters):
            return None
        rounds = self.eager and norm.rounds
        flags = {"norm_eps": eps, "norm_weight_offset": norm.offset, "round_before_weight": rounds}
        return flags if are_plain(norms) else None

    def attended(self, processor: Any, plan: Plan, streams: Sequence, mask: Tensor | None) -> Tensor:
        """Returns what attention makes of the tokens of all streams, [batch, seq, heads * head_dim].

        streams: q, k and v of each, [batch, seq, heads * head_dim].
        """
        q, k, v = _joined(plan, streams)
        how = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config}
        out = self.own.__globals__["dispatch_attention_fn"](q, k, v, attn_mask=mask, **how)
        return out.flatten(2, 3).to(q.dtype)


def _joined(plan: Plan, streams: Sequence) -> Sequence[Tensor]:
    """Returns q, k and v of the tokens of all streams, [batch, seq, heads, head_dim], normalised and rotated."""
    head_dim = plan.weights[0].shape[-1]
    streams = [[t.unflatten(-1, (-1, head_dim)) for t in qkv] for qkv in streams]
    seqs = [q.shape[1] for q, *_ in streams]
    tables = zip(plan.cos.split(seqs, -2), plan.sin.split(seqs, -2), strict=True)
    weights = zip(plan.weights[::2], plan.weights[1::2], strict=True)
    calls = zip(streams, weights, tables, strict=True)
    # What writes to joint tensors has no gradient, and a single stream needs none.
    if len(streams) == 1 or torch.is_grad_enabled() or is_traced():
        parts = [(*ops.norm_rotate_qk.default(q, k, *w, *t, **plan.flags), v) for (q, k, v), w, t in calls]
        return [torch.cat(part, 1) for part in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]
    q, k, v = (t.new_empty(len(t), sum(seqs), *t.shape[2:]) for t in streams[0])
    start = 0
    for (qkv, w, t), q_out in zip(calls, q.split(seqs, 1), strict=True):
        # Joint k and v are caches with a block for each sequence. Tables by token leave the offset to the cells.
        by_token = [table[None] if table.dim() == 2 else table for table in t]
        ops.rotate_into_cache_.default(*qkv, k, v, *by_token, None, None, start, None, *w, q_out=q_out, **plan.flags)
        start += q_out.shape[1]
    return q, k, v


# ---- forms ----


def flux(
    layer, self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None,
    *, contiguous=True,
):  # fmt: skip
    """Double blocks, where the text stands first, and single blocks, which have one stream. All tokens rotate."""
    x, text, double = hidden_states, encoder_hidden_states, encoder_hidden_states is not None
    if not double == (attn.added_kv_proj_dim is not None) == hasattr(attn, "to_out"):
        return None
    seqs = [text.shape[1], x.shape[1]] if double else [x.shape[1]]
    names = (*TEXT, *IMAGE) if double else IMAGE
    if (plan := layer.plan(attn, names, x, sum(seqs), image_rotary_emb, True, -1, 1)) is None:
        return None
    qkv = layer.own.__globals__["_get_qkv_projections"](attn, x, text)
    out = layer.attended(self, plan, [qkv[3:], qkv[:3]] if double else [qkv[:3]], attention_mask)
    if not double:
        return out
    text, x = (t.contiguous() if contiguous else t for t in out.split(seqs, 1))
    return each(attn.to_out, x), attn.to_add_out(text)


def flux2_parallel(layer, self, attn, hidden_states, attention_mask=None, image_rotary_emb=None):
    """Single blocks in which one projection makes q, k, v and the input of the feed-forward layer."""
    x = hidden_states
    if (plan := layer.plan(attn, IMAGE, x, x.shape[1], image_rotary_emb, True, -1, 1)) is None:
        return None
    x, qkv, mlp = attn.to_qkv_mlp_proj(x), 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
    of_rank = x.shape[-1] * qkv // (qkv + mlp)  # each rank has a part of both
    x, gates = x.split([of_rank, x.shape[-1] - of_rank], -1)
    out = layer.attended(self, plan, [x.chunk(3, -1)], attention_mask)
    return attn.to_out(torch.cat([out, attn.mlp_act_fn(gates)], -1))


def qwen(
    layer, self, attn, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None,
    attention_mask=None, image_rotary_emb=None,
):  # fmt: skip
    """The text stands first. Each stream has a table."""
    x, text, mask = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
    if text is None or attention_mask is not None or image_rotary_emb is None:
        return None
    seqs, table = [text.shape[1], x.shape[1]], torch.cat(image_rotary_emb[::-1])
    if (plan := layer.plan(attn, (*TEXT, *IMAGE), x, sum(seqs), table, False, -1)) is None:
        return None
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(x.shape[:2], dtype=torch.bool)], 1)[:, None, None]
    text, x = layer.attended(self, plan, [added(attn, text), projected(attn, x)], mask).split(seqs, 1)
    return each(attn.to_out, x.contiguous()), attn.to_add_out(text.contiguous())


def hunyuan(
    layer, self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None,
    *, mask_of=lambda mask, seq: mask,
):  # fmt: skip
    """The image stands first, and it alone rotates. Single blocks project both by the same weights."""
    x, text, double = hidden_states, encoder_hidden_states, attn.add_q_proj is not None
    if text is None:
        return None
    seqs, names = [x.shape[1], text.shape[1]], (*IMAGE, *TEXT) if double else IMAGE
    if (plan := layer.plan(attn, names, x, x.shape[1], image_rotary_emb, True, -1, 1)) is None:
        return None
    rest = 0, 0, 0, text.shape[1]  # the text rotates by angles of 0
    plan = plan._replace(cos=pad(plan.cos, rest, value=1.0), sin=pad(plan.sin, rest))
    qkvs = [projected(attn, x), added(attn, text)] if double else [projected(attn, torch.cat([x, text], 1))]
    x, text = layer.attended(self, plan, qkvs, mask_of(attention_mask, sum(seqs))).split(seqs, 1)
    x = x if getattr(attn, "to_out", None) is None else each(attn.to_out, x)
    return x, text if getattr(attn, "to_add_out", None) is None else attn.to_add_out(text)


def hunyuan_1_5(*args, **kwargs):
    """The mask [batch, tokens] of the last tokens becomes one between all tokens."""

    def mask_of(mask, seq):
        mask = pad(mask, (seq - mask.shape[1], 0), value=True).bool()[:, None]
        return mask[..., None, :] & mask[..., None]

    return hunyuan(*args, **kwargs, mask_of=mask_of)


def z_image(
    layer, self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, freqs_cis=None
):  # fmt: skip
    """One stream."""
    x, mask = hidden_states, attention_mask
    if encoder_hidden_states is not None or (plan := layer.plan(attn, IMAGE, x, x.shape[1], freqs_cis)) is None:
        return None
    mask = mask[:, None, None] if mask is not None and mask.dim() == 2 else mask
    return each(attn.to_out, layer.attended(self, plan, [projected(attn, x)], mask))


def wan(layer, self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
    """Self-attention, whose norms are over all heads."""
    x = hidden_states
    if encoder_hidden_states is not None or attn.add_k_proj is not None or rotary_emb is None:
        return None
    if (plan := layer.plan(attn, IMAGE, x, x.shape[1], *rotary_emb, heads=attn.heads)) is None:
        return None
    qkv = layer.own.__globals__["_get_qkv_projections"](attn, x, None)
    return each(attn.to_out, layer.attended(self, plan, [qkv], attention_mask))


def projected(attn, x):
    return attn.to_q(x), attn.to_k(x), attn.to_v(x)


def added(attn, text):
    return attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text)


def each(modules, x):
    for module in modules:
        x = module(x)
    return x


# ---- which processors are fused ----

FORMS: dict[str, Callable] = {f.__name__: f for f in (flux, flux2_parallel, qwen, hunyuan, hunyuan_1_5, z_image, wan)}
FORMS["bria"] = functools.partial(flux, contiguous=False)


def _method(form: Callable, layer: Layer) -> Callable:
    @functools.wraps(layer.own)
    def call(self, attn, hidden_states, *args, **kwargs):
        # Autocast computes norms in another dtype, and torch.compile fuses them itself.
        out, device = None, hidden_states.device.type
        if not (torch.compiler.is_compiling() or device == "meta" or torch.is_autocast_enabled(device)):
            out = form(layer, self, attn, hidden_states, *args, **kwargs)
        return layer.own(self, attn, hidden_states, *args, **kwargs) if out is None else out

    return call


def _norm_of(kind: type) -> Norm | None:
    """Returns how a class of norms computes, or None if that is not known."""
    try:
        return NORMS.get(text_of(kind.forward, owner=kind)) if kind.__call__ is nn.Module.__call__ else None
    except (NoText, AttributeError):
        return None


def fuser(rounding: str) -> Fuse:
    """Returns a function that finds the methods of one model. torch.compile compiles once for all layers with the same."""
    norms: dict[type, tuple[Callable, Norm]] = {}
    method = functools.cache(
        lambda form, own, rotary: _method(FORMS[form], Layer(own, rotary, rounding == "eager", norms))
    )

    def fuse(module: nn.Module, owner: Any, name: str, function: Any, new: FunctionType) -> tuple[Callable, str]:
        rotaries = [c for c in vars(new)["_torch_rope"] if isinstance(c, Rotary)]
        try:
            text = text_of(function, {"dispatch_attention_fn", *(r.name for r in rotaries)}, type(owner))
        except NoText:
            text = ""
        if text not in PROCESSORS or name != "__call__" or len(rotaries) != 1:
            return new, "its text is not known"
        kinds = {type(m) for n in (*IMAGE, *TEXT) if (m := getattr(module, n, None)) is not None}
        known = {kind: (kind.forward, norm) for kind in kinds if (norm := _norm_of(kind))}
        if known.keys() != kinds or len(kinds) != 1:
            return new, f"its norms are not known: {', '.join(kind.__name__ for kind in kinds) or 'none'}"
        if getattr(module, "is_cross_attention", False):
            return new, "it is cross-attention"
        norms.update(known)
        return method(PROCESSORS[text], new, rotaries[0]), "the norms of q and k, the rotation, and the streams"

    return fuse
