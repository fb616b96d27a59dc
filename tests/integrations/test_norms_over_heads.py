"""Compares attention with a norm over all heads of a token with that of transformers (OLMo-2) and diffusers (Wan): the
results, and the gradients of the input, of all projections and of the weights of the norms."""

import pytest
import torch
from cases import needed
from torch.nn import functional as F

import torch_rope

pytestmark = pytest.mark.cpu
HEAD_DIM, BATCH, SEQ = 16, 2, 11

# The largest difference, as a part of the largest element. Both sides round to float32 as often, in another order. A norm
# of each head by itself differs by 0.1 or more.
ROUNDING = 4e-6


def olmo2():
    """Returns attention, the function that calls torch_rope instead, its arguments, and the modules of the norms."""
    needed("transformers", "5")
    from transformers.models.olmo2 import modeling_olmo2

    heads, kv_heads = 6, 2
    config = modeling_olmo2.Olmo2Config(
        hidden_size=heads * HEAD_DIM, num_attention_heads=heads, num_key_value_heads=kv_heads, rms_norm_eps=1e-3,
        attn_implementation="sdpa", max_position_embeddings=64,
    )  # fmt: skip
    attention = modeling_olmo2.Olmo2Attention(config, layer_idx=0)
    x, positions = torch.randn(BATCH, SEQ, heads * HEAD_DIM), torch.randint(0, 64, (BATCH, SEQ))
    tables = modeling_olmo2.Olmo2RotaryEmbedding(config)(x, positions)

    def ours(x):
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        weights = (norm.weight.view(-1, HEAD_DIM) for norm in (attention.q_norm, attention.k_norm))
        halves = (t.chunk(2, -1)[0] for t in tables)
        q, k = torch_rope.norm_rotate_qk(q, k, *weights, *halves, norm_eps=1e-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attention.o_proj(out.transpose(1, 2).flatten(2))

    return attention, lambda x: attention(x, tables, None)[0], ours, x, (attention.q_norm, attention.k_norm)


def wan():
    needed("diffusers")
    from diffusers.models.transformers import transformer_wan

    heads = 3
    processor = transformer_wan.WanAttnProcessor()
    attention = transformer_wan.WanAttention(heads * HEAD_DIM, heads, HEAD_DIM, eps=1e-3, processor=processor)
    grid = torch.randn(BATCH, heads * HEAD_DIM, 3, 2, 4)  # frames, rows and columns of a video
    tables = transformer_wan.WanRotaryPosEmbed(HEAD_DIM, (1, 1, 1), max_seq_len=32)(grid)
    x = grid.flatten(2).mT.contiguous()

    def ours(x):
        q, k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)) for p in (attention.to_q, attention.to_k, attention.to_v))
        weights = (norm.weight.view(-1, HEAD_DIM) for norm in (attention.norm_q, attention.norm_k))
        halves = (t.view(1, -1, HEAD_DIM)[..., ::2] for t in tables)  # each angle is there twice
        q, k = torch_rope.norm_rotate_qk(q, k, *weights, *halves, norm_eps=1e-3, interleaved=True)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return attention.to_out[0](out.transpose(1, 2).flatten(2))

    return attention, lambda x: attention(x, rotary_emb=tables), ours, x, (attention.norm_q, attention.norm_k)


@pytest.mark.parametrize("model", [olmo2, wan], ids=lambda model: model.__name__)
def test_attention_is_that_of_the_model(model):
    attention, theirs, ours, x, norms = model()
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0.5, 2)
        for weight in attention.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.2)  # so large that attention depends on the positions
    found = []
    inputs = [x.requires_grad_(), *attention.parameters()]
    for function in (theirs, ours):
        out = function(x)
        found.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).abs().max() <= ROUNDING * max(expected.abs().max(), 1)
