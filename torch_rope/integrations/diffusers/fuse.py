"""Fused attention of diffusers: the norms of q and k, the rotation, and the joining of text and image are one operator.

known_layers.py says which form, flux to wan, computes what a processor computes. Its own method does where no form knows how.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._ops import ops
from .._bits import is_traced
from .._fuse import Norms, known_norms
from .._patch import Fuse
from .._rotary import Rotary
from .._text import NoText, text_of
from .known_layers import NORMS, PROCESSORS

IMAGE, TEXT = ("norm_q", "norm_k"), ("norm_added_q", "norm_added_k")  # the norms of q and k of a stream


class NotKnown(Exception):
    """Says that the own method must compute."""


class Layer(NamedTuple):
    """What the fused methods of one class of processors share."""

    own: Any  # the processor's own method
    rotary: Rotary
    eager: bool  # whether to round as the own method does
    norms: Norms

    def attention(self, processor, attn, names, x, seq, *others, heads=1, rest=0) -> Callable[..., Tensor]:
        """Returns a function of the projections of each stream and of a mask, or raises NotKnown.

        names: of the norms of q and k of each stream. x: [batch, seq, channels]. seq: how many tokens rotate, and rest: how
        many follow that do not. others: those of the rotary function's arguments. heads: how many a norm takes together.
        """
        norms = [getattr(attn, name) for name in names]
        of_x = {"weight": x.dtype}
        alike = all(m and {n: p.dtype for n, p in m._parameters.items() if p is not None} == of_x for m in norms)
        if others[0] is None or not alike or not self.norms.are(norms, x, self.eager):
            raise NotKnown
        weights = [m.weight.unflatten(-1, (heads, -1)) if heads > 1 else m.weight for m in norms]
        two_heads = x[:, :1, None, :1].expand(-1, seq, 2, weights[0].shape[-1])
        o, *_ = self.rotary.operands([two_heads], others) or [None]
        if o is None or not o.fits(x, False) or o.rounding.x != x.dtype:
            raise NotKnown
        if o.flags.get("eager_rounding", False) != self.eager:  # the operator cannot round as the rotary function does
            raise NotKnown
        tables = [t[None] if t.dim() == 2 else t for t in (o.cos, o.sin)]  # [batch or 1, seq, rotary_dim / 2]
        if rest:  # rotates by angles of 0
            tables = [F.pad(t, (0, 0, 0, rest), value=value) for t, value in zip(tables, (1.0, 0.0), strict=True)]

        def attend(streams: Sequence, mask: Tensor | None) -> Tensor:
            q, k, v = _joined(streams, weights, tables, o.flags | self.norms.flags(norms[0], self.eager))
            how = {"backend": processor._attention_backend, "parallel_config": processor._parallel_config}
            out = self.own.__globals__["dispatch_attention_fn"](q, k, v, attn_mask=mask, **how)
            return out.flatten(2, 3).to(q.dtype)

        return attend


def _joined(streams: Sequence, weights: Sequence[Tensor], tables: Sequence[Tensor], flags: dict) -> Sequence[Tensor]:
    """Returns q, k and v of the tokens of all streams, [batch, seq, heads, head_dim], normalised and rotated.

    streams: q, k and v [batch, seq, heads * head_dim] of each. weights: of q and of k for each stream.
    """
    streams = [[t.unflatten(-1, (-1, weights[0].shape[-1])) for t in qkv] for qkv in streams]
    seqs = [q.shape[1] for q, *_ in streams]
    cos, sin = (t.split(seqs, -2) for t in tables)
    calls = [*zip(streams, weights[::2], weights[1::2], cos, sin, strict=True)]
    # What writes to joint tensors has no gradient. A single stream needs none.
    if len(streams) == 1 or torch.is_grad_enabled() or is_traced():
        parts = [(*ops.norm_rotate_qk.default(q, k, *more, **flags), v) for (q, k, v), *more in calls]
        return [torch.cat(part, 1) for part in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]
    q, k, v = (t.new_empty(len(t), sum(seqs), *t.shape[2:]) for t in streams[0])
    for (qkv, *norms, cos, sin), start, part in zip(calls, (0, seqs[0]), q.split(seqs, 1), strict=True):
        # k and v are caches with a block for each sequence, and the offset is that of the cells.
        ops.rotate_into_cache_.default(*qkv, k, v, cos, sin, None, None, start, None, *norms, q_out=part, **flags)
    return q, k, v


def flux(
    layer, processor, attn, x, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None, contiguous=True
):  # fmt: skip
    """Double blocks, in which the text stands first, and single blocks of one stream. All tokens rotate."""
    text, double = encoder_hidden_states, encoder_hidden_states is not None
    if not double == (attn.added_kv_proj_dim is not None) == (getattr(attn, "to_out", None) is not None):
        raise NotKnown
    seqs, names = ([text.shape[1], x.shape[1]], TEXT + IMAGE) if double else ([x.shape[1]], IMAGE)
    attend = layer.attention(processor, attn, names, x, sum(seqs), image_rotary_emb, True, -1, 1)
    qkv = layer.own.__globals__["_get_qkv_projections"](attn, x, text)
    out = attend([qkv[3:], qkv[:3]] if double else [qkv[:3]], attention_mask)
    if not double:
        return out
    text, x = (t.contiguous() if contiguous else t for t in out.split(seqs, 1))
    return each(attn.to_out, x), attn.to_add_out(text)


def flux2_parallel(layer, processor, attn, x, attention_mask=None, image_rotary_emb=None):
    """Single blocks in which one projection makes q, k, v and the input of the feed-forward layer."""
    attend = layer.attention(processor, attn, IMAGE, x, x.shape[1], image_rotary_emb, True, -1, 1)
    x, qkv, mlp = attn.to_qkv_mlp_proj(x), 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
    of_rank = x.shape[-1] * qkv // (qkv + mlp)  # each rank has a part of both
    x, gates = x.split([of_rank, x.shape[-1] - of_rank], -1)
    return attn.to_out(torch.cat([attend([x.chunk(3, -1)], attention_mask), attn.mlp_act_fn(gates)], -1))


def qwen(
    layer, processor, attn, x, encoder_hidden_states=None, encoder_hidden_states_mask=None, attention_mask=None,
    image_rotary_emb=None,
):  # fmt: skip
    """The text stands first. Each stream has a table."""
    text, mask = encoder_hidden_states, encoder_hidden_states_mask
    if text is None or attention_mask is not None or image_rotary_emb is None:
        raise NotKnown
    seqs, table = [text.shape[1], x.shape[1]], torch.cat(image_rotary_emb[::-1])
    attend = layer.attention(processor, attn, TEXT + IMAGE, x, sum(seqs), table, False, -1)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(x.shape[:2], dtype=torch.bool)], 1)[:, None, None]
    text, x = attend([added(attn, text), projected(attn, x)], mask).split(seqs, 1)
    return each(attn.to_out, x.contiguous()), attn.to_add_out(text.contiguous())


def hunyuan(
    layer, processor, attn, x, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None, by_pair=False
):  # fmt: skip
    """The image stands first, and it alone rotates. Single blocks project both by the same weights."""
    text, double, mask = encoder_hidden_states, attn.add_q_proj is not None, attention_mask
    if text is None:
        raise NotKnown
    seqs, names = [x.shape[1], text.shape[1]], IMAGE + TEXT if double else IMAGE
    attend = layer.attention(processor, attn, names, x, seqs[0], image_rotary_emb, True, -1, 1, rest=seqs[1])
    if by_pair:  # the mask [batch, tokens] is that of the last tokens
        mask = F.pad(mask, (sum(seqs) - mask.shape[1], 0), value=True).bool()[:, None]
        mask = mask[..., None, :] & mask[..., None]  # [batch, 1, seq, seq]
    streams = [projected(attn, x), added(attn, text)] if double else [projected(attn, torch.cat([x, text], 1))]
    x, text = attend(streams, mask).split(seqs, 1)
    x = x if getattr(attn, "to_out", None) is None else each(attn.to_out, x)
    return x, text if getattr(attn, "to_add_out", None) is None else attn.to_add_out(text)


def z_image(layer, processor, attn, x, encoder_hidden_states=None, attention_mask=None, freqs_cis=None):
    """One stream."""
    if encoder_hidden_states is not None:
        raise NotKnown
    attend, mask = layer.attention(processor, attn, IMAGE, x, x.shape[1], freqs_cis), attention_mask
    mask = mask[:, None, None] if mask is not None and mask.dim() == 2 else mask
    return each(attn.to_out, attend([projected(attn, x)], mask))


def wan(layer, processor, attn, x, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
    """Self-attention, whose norms are over all heads."""
    if encoder_hidden_states is not None or attn.add_k_proj is not None or rotary_emb is None:
        raise NotKnown
    attend = layer.attention(processor, attn, IMAGE, x, x.shape[1], *rotary_emb, heads=attn.heads)
    return each(attn.to_out, attend([layer.own.__globals__["_get_qkv_projections"](attn, x, None)], attention_mask))


def projected(attn, x):
    return attn.to_q(x), attn.to_k(x), attn.to_v(x)


def added(attn, text):
    return attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text)


def each(modules, x):
    for module in modules:
        x = module(x)
    return x


FORMS = {form.__name__: form for form in (flux, flux2_parallel, qwen, hunyuan, z_image, wan)}
# The convention of the rotary function whose arguments a form gives.
CONVENTIONS = {"flux2_parallel": "flux", "hunyuan": "flux", "qwen": "qwen_image"}


def fuser(rounding: str) -> Fuse:
    """Returns a function that finds the methods of one model. torch.compile compiles once for all layers with the same."""

    @functools.cache
    def method(text: str, own: FunctionType, rotary: Rotary, norms: Norms) -> Callable:
        layer, (form, arguments) = Layer(own, rotary, rounding == "eager", norms), PROCESSORS[text]

        @functools.wraps(own)
        def call(self, attn, hidden_states, *args, **kwargs):
            # Autocast computes norms in another dtype, and torch.compile fuses them itself.
            device = hidden_states.device.type
            if not (torch.compiler.is_compiling() or device == "meta" or torch.is_autocast_enabled(device)):
                with contextlib.suppress(NotKnown):
                    return FORMS[form](layer, self, attn, hidden_states, *args, **kwargs, **arguments)
            return own(self, attn, hidden_states, *args, **kwargs)

        return call

    def fuse(module: nn.Module, owner: Any, name: str, function: Any, new: FunctionType) -> tuple[Callable, str]:
        rotaries = [c for c in vars(new)["_torch_rope"] if isinstance(c, Rotary)]
        modules = [m for name in IMAGE + TEXT if isinstance(m := getattr(module, name, None), nn.Module)]
        try:
            text = text_of(function, {"dispatch_attention_fn", *(r.name for r in rotaries)}, type(owner))
        except NoText as error:
            return new, f"its text is not known: {error}"
        if text not in PROCESSORS or name != "__call__" or len(rotaries) != 1:
            return new, "its text is not known"
        form, _ = PROCESSORS[text]
        if rotaries[0].known.convention != CONVENTIONS.get(form, form):
            return new, f"{rotaries[0].name} takes other arguments than that of diffusers"
        if getattr(module, "is_cross_attention", False):
            return new, "it is cross-attention"
        norms = known_norms(modules, NORMS) if modules else "it has no norms"
        if isinstance(norms, str):
            return new, norms
        return method(text, new, rotaries[0], norms), "the norms of q and k, and the rotation"

    return fuse
