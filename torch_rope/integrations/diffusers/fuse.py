"""A fused attention processor for Wan and Flux: the RMS norms of q and k and the rotation are one operator.

A layer gets it if it computes what the layer's own processor computes, with gradients too, in a trial on random numbers.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..._ops import ops
from .._conventions import Sample
from .._fuse import Norm, are_watched, disagreement, guesses, trained

# The last arguments of the processors of Wan and Flux, and in which shape they are tables [seq, head_dim].
_TABLES = {"rotary_emb": lambda t: t[None, :, None], "image_rotary_emb": lambda t: t}


@functools.lru_cache(16)  # torch.compile compiles once for all layers with the same method
def _fused(own: Callable, norm: Norm) -> Callable:
    """Returns a processor's method that fuses a norm of q and of k. Its own method computes in every other case."""
    of_file = own.__globals__

    def call(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None,
        *, image_rotary_emb=None,
    ):  # fmt: skip
        tables = rotary_emb if image_rotary_emb is None else image_rotary_emb
        if tables is None or encoder_hidden_states is not None or not _is_plain(attn, hidden_states):
            return own(self, attn, hidden_states, encoder_hidden_states, attention_mask, tables)
        cos, sin = (t[:, :, 0].squeeze(0) if t.dim() == 4 else t for t in tables)  # [.., seq, head_dim]
        qkv = of_file["_get_qkv_projections"](attn, hidden_states, None)[:3]
        q, k, v = (x.unflatten(-1, (-1, cos.shape[-1])) for x in qkv)  # [batch, seq, heads, head_dim]
        weights = norm.weight_of(attn.norm_q, q), norm.weight_of(attn.norm_k, k)
        halves = (t if t.dtype == q.dtype else t.float() for t in (cos[..., ::2], sin[..., 1::2]))
        q, k = ops.norm_rotate_qk.default(q, k, *weights, *halves, interleaved=True, norm_eps=norm.eps)
        out = of_file["dispatch_attention_fn"](
            q, k, v, attn_mask=attention_mask, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        out = out.flatten(2, 3).to(q.dtype)  # which a single block of Flux projects later
        return attn.to_out[1](attn.to_out[0](out)) if hasattr(attn, "to_out") else out

    return call


def _is_plain(attn: nn.Module, x: Tensor) -> bool:
    """Returns whether nothing watches the norms of a layer, or computes in another dtype, or fuses them itself."""
    norms = attn.norm_q, attn.norm_k
    fuses_itself = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    return not fuses_itself and not are_watched(*norms) and all(m.weight.dtype == x.dtype for m in norms)


def fuse(module: nn.Module, owner: Any, name: str, function: Callable, new: Callable) -> tuple[Callable, str]:
    """Returns what takes the place of a processor's method that rotates, and a note about it."""
    form = _TABLES.get([*inspect.signature(function).parameters][-1])
    norms = [getattr(module, n, None) for n in ("norm_q", "norm_k")]
    others = getattr(module, "added_kv_proj_dim", None) is not None or getattr(module, "is_cross_attention", False)
    if form is None or name != "__call__" or None in norms or others or not hasattr(module, "to_q"):
        return new, "not fused: only self-attention as in Wan and in Flux's single blocks is"
    for norm in guesses(*norms):
        call = _fused(new, norm)
        trial = functools.partial(_in_training, module, owner, form)
        if not disagreement(new, call, [trial]):
            call._torch_rope = new._torch_rope
            return call, "fused: norm_q, norm_k and the rotation"
    return new, "not fused: its norms are not two RMS norms with weights, or the results would differ"


def _in_training(attn: nn.Module, processor: Any, form: Callable, method: Callable) -> list[Tensor]:
    """Returns what a method of a processor computes for random numbers, and its gradient."""
    weight = attn.to_q.weight
    sample = Sample(2, 5, 1, weight.shape[1], weight.shape[0] // attn.heads // 4, weight.dtype, weight.dtype)
    x, *tables = (t.to(weight.device) for t in (sample.x(2, 5), *sample.angles(5)))
    # The four channels of two pairs have the same angle, in either pairing.
    tables = [form(t.repeat_interleave(2, -1).repeat(1, 2)) for t in tables]
    return trained(attn, lambda x: method(processor, attn, x, None, None, tables), x)
