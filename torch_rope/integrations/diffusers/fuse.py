"""Fused attention processors: the RMS norms of q and k, the rotation, and the joining of streams are one operator.

Each form below computes what the processors compute that known_layers.py lists for it, and reads as they do. Their own
method computes in every case that a form does not know.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..._ops import ops
from .._bits import Operands, is_traced
from .._patch import Fuse
from .._rotary import Rotary
from .._text import NoText, text_of
from .known_layers import NORMS, PROCESSORS, Norm

IMAGE, TEXT = ("norm_q", "norm_k"), ("norm_added_q", "norm_added_k")  # the names of the norms of a stream

# ---- norms ----


def norm_of(kind: type) -> Norm | None:
    """Returns how a class of norms computes, or None if that is not known."""
    try:
        return NORMS.get(text_of(kind.forward, owner=kind)) if kind.__call__ is nn.Module.__call__ else None
    except (NoText, AttributeError):
        return None


def are_plain(modules: Sequence[nn.Module]) -> bool:
    """Returns whether nothing but their classes sees the calls of modules, which a fused layer does not make."""
    for own in map(vars, modules):
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return False
        if "forward" in own:
            return False
    return torch.compiler.is_compiling() or not _has_any_global_hook()


# ---- what all forms do ----


class Stream(NamedTuple):
    """The tokens of a text or of an image in a layer."""

    q: Tensor  # [batch, seq, heads, head_dim], as k and v
    k: Tensor
    v: Tensor
    norms: Sequence[Any]  # of q and of k


def stream(qkv: Sequence[Tensor], norms: Sequence[Any], heads: int = 1) -> Stream:
    """Returns a stream for q, k and v [batch, seq, heads * head_dim]. heads: how many are normalised together."""
    head_dim = len(norms[0].weight) // heads
    return Stream(*[t.unflatten(-1, (-1, head_dim)) for t in qkv], norms)


class Layer(NamedTuple):
    """What the fused methods of one class of processors share."""

    own: FunctionType  # the processor's own method
    rotary: Rotary
    eager: bool  # whether to round as the own method does
    norms: dict[type, tuple[Callable, Norm]]  # the forward of each known class of norms, when the model was patched

    def operands(self, x: Tensor, seq: int, norms: Sequence[Any], *others: Any, heads: int = 1) -> Operands | None:
        """Returns what rotates seq tokens, or None if the own method must compute.

        x: [batch, .., channels], the input. others: the arguments of the rotary function besides its x.
        """
        # Autocast computes norms in another dtype, and torch.compile fuses them itself.
        if torch.compiler.is_compiling() or x.is_meta or torch.is_autocast_enabled(x.device.type) or others[0] is None:
            return None
        if not (all(self._knows(m, x.dtype) for m in norms) and are_plain(norms)):
            return None
        if any(getattr(q, self.of(q).eps) != getattr(k, self.of(k).eps) for q, k in zip(norms[::2], norms[1::2])):
            return None
        two_heads = x[:, :1, None, :1].expand(-1, seq, 2, len(norms[0].weight) // heads)
        if (found := self.rotary.operands([two_heads], others)) is None:
            return None
        o, r = found[0], found[0].rounding
        fits = o.fits(x, False) and "inverse" not in o.flags and (r.eager, r.x) == (self.eager, x.dtype)
        return o if fits and not r.rounds_first_product else None

    def of(self, norm: nn.Module) -> Norm:
        return self.norms[type(norm)][1]

    def _knows(self, m: Any, dtype: torch.dtype) -> bool:
        """Returns whether a module is a norm that computes as it did when the model was patched."""
        if m is None or self.norms.get(type(m), (None,))[0] is not type(m).forward:
            return False
        parameters = {name: p.dtype for name, p in m._parameters.items() if p is not None}
        return parameters == {"weight": dtype} and isinstance(getattr(m, self.of(m).eps), float)

    def joined(self, streams: Sequence[Stream], o: Operands) -> Sequence[Tensor]:
        """Returns q, k and v of the tokens of all streams. q and k are normalised and rotated."""
        seqs = [s.q.shape[1] for s in streams]
        tables = zip(o.cos.split(seqs, -2), o.sin.split(seqs, -2), strict=True)  # [.., seq, rotary_dim / 2]
        weights = [[m.weight.view(-1, s.q.shape[-1]).squeeze(0) for m in s.norms] for s in streams]
        hows = [o.flags | self._how(s.norms[0]) for s in streams]
        calls = [*zip(streams, tables, weights, hows, strict=True)]
        # What writes into a part of a joint tensor has no gradient.
        if len(streams) == 1 or torch.is_grad_enabled() or is_traced():
            parts = [(*ops.norm_rotate_qk.default(*s[:2], *ws, *t, **how), s.v) for s, t, ws, how in calls]
            return parts[0] if len(parts) == 1 else [torch.cat(part, 1) for part in zip(*parts, strict=True)]
        q, k, v = (t.new_empty(len(t), sum(seqs), *t.shape[2:]) for t in streams[0][:3])
        start = 0
        for (s, (cos, sin), ws, how), part in zip(calls, q.split(seqs, 1), strict=True):
            # k and v are caches with a block for each sequence, and tables by token leave the offset to the cells.
            cos, sin = (t[None] if t.dim() == 2 else t for t in (cos, sin))
            ops.rotate_into_cache_.default(*s[:3], k, v, cos, sin, None, None, start, None, *ws, q_out=part, **how)
            start += part.shape[1]
        return q, k, v

    def _how(self, norm: nn.Module) -> dict[str, Any]:
        eps, offset, rounds = self.of(norm)
        rounds = self.eager and rounds
        return {"norm_eps": getattr(norm, eps), "norm_weight_offset": offset, "round_before_weight": rounds}

    def attended(self, processor: Any, streams: Sequence[Stream], o: Operands, mask: Tensor | None) -> Tensor:
        """Returns what attention makes of all tokens, [batch, seq, heads * head_dim]."""
        q, k, v = self.joined(streams, o)
        backend, parallel = processor._attention_backend, processor._parallel_config
        out = self.own.__globals__["dispatch_attention_fn"](
            q, k, v, attn_mask=mask, backend=backend, parallel_config=parallel
        )
        return out.flatten(2, 3).to(q.dtype)


# ---- forms ----


def flux(layer: Layer) -> Callable:
    """Flux, Bria, LongCat, Ovis: the text stands first, and all tokens rotate. A single block has one stream."""

    def call(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
    ):  # fmt: skip
        x, text = hidden_states, encoder_hidden_states
        double, seq = text is not None, 0 if text is None else text.shape[1]
        names, o = (*TEXT, *IMAGE) if double else IMAGE, None
        # A layer that is neither a double nor a single block is none of Flux.
        if double == (attn.added_kv_proj_dim is not None) == hasattr(attn, "to_out"):
            norms = [getattr(attn, name) for name in names]
            o = layer.operands(x, seq + x.shape[1], norms, image_rotary_emb, True, -1, 1)
        if o is None:
            return layer.own(self, attn, x, text, attention_mask, image_rotary_emb)
        qkv = layer.own.__globals__["_get_qkv_projections"](attn, x, text)
        streams = [stream(qkv[:3], norms[-2:])]
        if double:
            streams.insert(0, stream(qkv[3:], norms[:2]))
        out = layer.attended(self, streams, o, attention_mask)
        if not double:
            return out
        text, x = out.split([seq, x.shape[1]], 1)
        x = attn.to_out[1](attn.to_out[0](x.contiguous()))
        return x, attn.to_add_out(text.contiguous())

    return call


def flux2_parallel(layer: Layer) -> Callable:
    """Flux2's single blocks: one projection makes q, k and v, and the input of the feed-forward layer."""

    def call(self, attn, hidden_states, attention_mask=None, image_rotary_emb=None):
        x, norms = hidden_states, (attn.norm_q, attn.norm_k)
        if (o := layer.operands(x, x.shape[1], norms, image_rotary_emb, True, -1, 1)) is None:
            return layer.own(self, attn, x, attention_mask, image_rotary_emb)
        x = attn.to_qkv_mlp_proj(x)
        qkv, mlp = 3 * attn.inner_dim, attn.mlp_hidden_dim * attn.mlp_mult_factor
        here = x.shape[-1] * qkv // (qkv + mlp)  # of this rank
        x, gates = x.split([here, x.shape[-1] - here], -1)
        out = layer.attended(self, [stream(x.chunk(3, -1), norms)], o, attention_mask)
        return attn.to_out(torch.cat([out, attn.mlp_act_fn(gates)], -1))

    return call


def qwen(layer: Layer) -> Callable:
    """Qwen-Image: the text stands first, and each stream has a table."""

    def call(
        self, attn, hidden_states, encoder_hidden_states=None, encoder_hidden_states_mask=None, attention_mask=None,
        image_rotary_emb=None,
    ):  # fmt: skip
        x, text, mask, o = hidden_states, encoder_hidden_states, encoder_hidden_states_mask, None
        norms = [getattr(attn, name) for name in (*TEXT, *IMAGE)]
        if text is not None and attention_mask is None and image_rotary_emb is not None:
            tables = torch.cat(image_rotary_emb[::-1])
            o = layer.operands(x, text.shape[1] + x.shape[1], norms, tables, False, -1)
        if o is None:
            return layer.own(self, attn, x, text, mask, attention_mask, image_rotary_emb)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(x.shape[:2], dtype=torch.bool)], 1)[:, None, None]
        streams = stream(added(attn, text), norms[:2]), stream(projected(attn, x), norms[2:])
        out = layer.attended(self, streams, o, mask)
        text, x = out.split([text.shape[1], x.shape[1]], 1)
        return each(attn.to_out, x.contiguous()), attn.to_add_out(text.contiguous())

    return call


def hunyuan(layer: Layer, mask_of: Callable = lambda mask, seq: mask) -> Callable:
    """HunyuanVideo, HunyuanImage, Motif-Video: the image stands first, and it alone rotates.

    mask_of returns the mask of attention between all tokens.
    """

    def call(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None
    ):  # fmt: skip
        x, text, o = hidden_states, encoder_hidden_states, None
        double = attn.add_q_proj is not None
        norms = [getattr(attn, name) for name in ((*IMAGE, *TEXT) if double else IMAGE)]
        if text is not None:
            o = layer.operands(x, x.shape[1], norms, image_rotary_emb, True, -1, 1)
        if o is None:
            return layer.own(self, attn, x, text, attention_mask, image_rotary_emb)
        if double:
            streams = [stream(projected(attn, x), norms[:2]), stream(added(attn, text), norms[2:])]
        else:
            streams = [stream(projected(attn, torch.cat([x, text], 1)), norms)]
        # The text rotates by angles of 0.
        rest = 0, 0, 0, text.shape[1]
        o = o._replace(cos=F.pad(o.cos, rest, value=1.0), sin=F.pad(o.sin, rest))
        out = layer.attended(self, streams, o, mask_of(attention_mask, x.shape[1] + text.shape[1]))
        x, text = out.split([x.shape[1], text.shape[1]], 1)
        if getattr(attn, "to_out", None) is not None:
            x = attn.to_out[1](attn.to_out[0](x))
        return x, text if getattr(attn, "to_add_out", None) is None else attn.to_add_out(text)

    return call


def between_all(mask: Tensor, seq: int) -> Tensor:
    """Returns the mask [batch, 1, seq, seq] of HunyuanVideo 1.5 for that of the last tokens."""
    mask = F.pad(mask, (seq - mask.shape[1], 0), value=True).bool()[:, None]
    return mask[..., None, :] & mask[..., None]


def z_image(layer: Layer) -> Callable:
    """Z-Image, FIBO 2: one stream."""

    def call(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, freqs_cis=None):
        x, norms, o = hidden_states, (attn.norm_q, attn.norm_k), None
        if encoder_hidden_states is None:
            o = layer.operands(x, x.shape[1], norms, freqs_cis)
        if o is None:
            return layer.own(self, attn, x, encoder_hidden_states, attention_mask, freqs_cis)
        mask = attention_mask
        mask = mask[:, None, None] if mask is not None and mask.dim() == 2 else mask
        return each(attn.to_out, layer.attended(self, [stream(projected(attn, x), norms)], o, mask))

    return call


def wan(layer: Layer) -> Callable:
    """Wan's self-attention: the norms are over all heads."""

    def call(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        x, norms, o = hidden_states, (attn.norm_q, attn.norm_k), None
        if encoder_hidden_states is None and attn.add_k_proj is None and rotary_emb is not None:
            o = layer.operands(x, x.shape[1], norms, *rotary_emb, heads=attn.heads)
        if o is None:
            return layer.own(self, attn, x, encoder_hidden_states, attention_mask, rotary_emb)
        qkv = layer.own.__globals__["_get_qkv_projections"](attn, x, None)
        return each(attn.to_out, layer.attended(self, [stream(qkv, norms, attn.heads)], o, attention_mask))

    return call


def projected(attn: Any, x: Tensor) -> Sequence[Tensor]:
    return attn.to_q(x), attn.to_k(x), attn.to_v(x)


def added(attn: Any, text: Tensor) -> Sequence[Tensor]:
    return attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text)


def each(modules: Sequence[Any], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


FORMS: dict[str, Callable] = {
    "flux": flux,
    "flux2_parallel": flux2_parallel,
    "qwen": qwen,
    "hunyuan": hunyuan,
    "hunyuan_1_5": partial(hunyuan, mask_of=between_all),
    "z_image": z_image,
    "wan": wan,
}


def fuser(rounding: str = "eager") -> Fuse:
    """Returns a function that finds the methods of one model. torch.compile compiles once for all layers with the same."""
    methods: dict[tuple, Callable] = {}
    norms: dict[type, tuple[Callable, Norm]] = {}
    known = cache(norm_of)

    def fuse(module: nn.Module, owner: Any, name: str, function: Any, new: FunctionType) -> tuple[Callable, str]:
        rotaries = [c for c in vars(new)["_torch_rope"] if isinstance(c, Rotary)]
        try:
            text = text_of(function, {"dispatch_attention_fn", *(r.name for r in rotaries)}, type(owner))
        except NoText:
            text = ""
        if text not in PROCESSORS or name != "__call__" or len(rotaries) != 1:
            return new, "its text is not known"
        found = [getattr(module, n) for n in (*IMAGE, *TEXT) if getattr(module, n, None) is not None]
        others = [type(m).__name__ for m in found if known(type(m)) is None]
        if others or not found:
            return new, f"its norms are not known ({', '.join(dict.fromkeys(others)) or 'none'})"
        norms.update({type(m): (type(m).forward, known(type(m))) for m in found})
        form = PROCESSORS[text]
        if (new, form) not in methods:
            methods[new, form] = FORMS[form](Layer(new, rotaries[0], rounding == "eager", norms))
        call = methods[new, form]
        vars(call)["_torch_rope"] = vars(new)["_torch_rope"]
        return call, "norms of q and k, and the rotation"

    return fuse
