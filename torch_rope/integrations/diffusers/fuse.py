"""A fused attention processor for Wan and Flux: the RMS norms of q and k and the rotation are one operator.

A layer gets it if each word in the code of its own processor is known, and if both processors do the same in a trial.
"""

import inspect
from collections.abc import Callable
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..._modes import undisturbed
from ..._ops import ops
from .._conventions import Sample
from .._names import copy_of
from .._patch import Fuse
from .._rotary import Rotary
from .._trial import Norm, are_plain, changed, disagreement, like_norm, norm_of, small_linear, unknown, untried

# The last arguments of the processors of Wan and Flux, in which shape they are tables [seq, head_dim], and what follows
# x in a call of the rotary function.
_TABLES = {
    "rotary_emb": (lambda t: t[None, :, None], lambda tables: tables),
    "image_rotary_emb": (lambda t: t, lambda tables: (tables, True, -1, 1)),
}
# What the code of the processors that are fused says.
_WORDS = """
    attn.add_k_proj attn.added_kv_proj_dim attn.head_dim attn.heads attn.norm_added_k attn.norm_added_q attn.norm_k attn.norm_q
    attn.to_add_out attn.to_out self._attention_backend self._parallel_config _get_added_kv_projections
    _get_qkv_projections apply_rotary_emb dispatch_attention_fn torch .Tensor .cat .contiguous .dtype .empty_like .flatten
    .shape .split_with_sizes .to .type_as .unbind .unflatten 'attn_mask' 'backend' 'dim' 'dropout_p' 'freqs_cos' 'freqs_sin'
    'hidden_states' 'is_causal' 'parallel_config' 'sequence_dim' [image_context_length:None] [None:image_context_length]
    [None:None] [None:2] * + - -1 0 0.0 1 2 3 512 Ellipsis False None STORE_SUBSCR MAKE_FUNCTION [] [0] [1]
"""


def _fused(own: FunctionType, norm: Norm, rotary: Rotary, others: Callable) -> Callable:
    """Returns a processor's method that fuses a norm of q and of k. Its own method computes in every other case."""
    of_file = own.__globals__

    def call(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None,
        *, image_rotary_emb=None,
    ):  # fmt: skip
        norms, x, found = (attn.norm_q, attn.norm_k), hidden_states, None
        tables = rotary_emb if image_rotary_emb is None else image_rotary_emb
        tried = tables is not None and encoder_hidden_states is None and norm.are(*norms) and are_plain(norms)
        # Autocast computes norms in another dtype, and torch.compile fuses them itself.
        tried = tried and not (x.is_meta or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling())
        if tried and all(m.weight.dtype == x.dtype for m in norms):
            two_heads = x[:, :, None, :1].expand(-1, -1, 2, attn.inner_dim // attn.heads)
            found = rotary.operands([two_heads], others(tables)[: rotary.convention.others])
        if found is None or not found[0].fits(x, False) or not found[0].flags.get("interleaved"):
            return own(self, attn, hidden_states, encoder_hidden_states, attention_mask, tables)
        qkv = of_file["_get_qkv_projections"](attn, x, None)[:3]
        q, k, v = (t.unflatten(-1, (-1, two_heads.shape[-1])) for t in qkv)  # [batch, seq, heads, head_dim]
        weights = norm.weight_of(attn.norm_q, q), norm.weight_of(attn.norm_k, k)
        halves = (t if t.dtype == q.dtype else t.float() for t in (found[0].cos, found[0].sin))
        eps = getattr(attn.norm_q, norm.eps)
        q, k = ops.norm_rotate_qk.default(q, k, *weights, *halves, interleaved=True, norm_eps=eps)
        out = of_file["dispatch_attention_fn"](
            q, k, v, attn_mask=attention_mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        out = out.flatten(2, 3).to(q.dtype)  # which a single block of Flux projects later
        return attn.to_out[1](attn.to_out[0](out)) if hasattr(attn, "to_out") else out

    return call


def fuser() -> Fuse:
    """Returns a function that finds the methods of one model. torch.compile compiles once for all layers with the same."""
    known: dict[tuple, Callable] = {}

    def fuse(module: nn.Module, owner: Any, name: str, function: Any, new: FunctionType) -> tuple[Callable, str]:
        tables = [*inspect.signature(function).parameters][-1]
        rotaries = [c for c in vars(new)["_torch_rope"] if isinstance(c, Rotary)]
        norms: list[Any] = [getattr(module, n, None) for n in ("norm_q", "norm_k")]
        others = getattr(module, "added_kv_proj_dim", None) is not None or getattr(module, "is_cross_attention", False)
        others |= tables not in _TABLES or len(rotaries) != 1
        if name != "__call__" or None in norms or others or not hasattr(module, "to_q"):
            return new, "it must be self-attention as in Wan or in Flux's single blocks but is not"
        if why := unknown(function, {*_WORDS.split(), "if None"}):
            return new, f"its processor {why}"
        if isinstance(norm := norm_of(norms), str):
            return new, norm
        form, others_of = _TABLES[tables]
        how = norm, rotaries[0], others_of
        if why := undisturbed(disagreement, _trial_of, module, owner, new, form, how):
            return new, why
        call = known.setdefault((new, *how), _fused(new, *how))
        vars(call)["_torch_rope"] = vars(new)["_torch_rope"]
        return call, "norm_q, norm_k and the rotation"

    return fuse


def _trial_of(attn: Any, processor: Any, new: FunctionType, form: Callable, how: tuple) -> tuple:
    """Returns what disagreement needs, for a layer with small projections."""
    given, inner, hidden = [], attn.inner_dim, 16
    sample = Sample(2, 8, 1, hidden, inner // attn.heads // 4, torch.float32, torch.float32)

    def witness(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        given.append((q, k, v, attn_mask, dropout_p, is_causal, sorted(more.items())))
        return q + (k * v).mean((1, 2), keepdim=True)

    parts = {name: like_norm(sample, getattr(attn, name), how[0]) for name in ("norm_q", "norm_k")}
    parts |= {name: small_linear(sample, hidden, inner) for name in ("to_q", "to_k", "to_v")}
    if hasattr(attn, "to_out"):
        parts["to_out"] = nn.ModuleList([small_linear(sample, inner, hidden), nn.Identity()])
    layer = changed(attn, parts, fused_projections=False)
    # The four channels of two pairs have the same angle, in either pairing.
    tables = [t.repeat_interleave(2, -1).repeat(1, 2) for t in sample.angles(8)]
    x, mask = sample.x(2, 8), sample.numbers(2, 1, 8, 8)

    def outcome(method, batch, seq, masked):
        given.clear()
        rotary = tuple(form(t[:seq]) for t in tables)
        return method(processor, layer, x[:batch, :seq], None, mask if masked else None, rotary), [*given]

    names = new.__globals__ | {"dispatch_attention_fn": witness}
    own, other = copy_of(new, new.__code__, new.__closure__, names), FunctionType(untried.__code__, names)
    return outcome, own, _fused(other, *how), [*product((1, 2), (1, 8), (False, True))]
