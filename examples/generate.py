"""A decoder to copy: Llama or Qwen3 with a static KV cache, which torch_rope writes. demo.py writes text with it.

    decoder = Decoder.from_transformers(model, batch=1, max_seq=4096)
    for token in generate(decoder, prompt, step=torch.compile(decoder)): ...

The names of the parameters and the members of config are those of transformers.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_rope


class Attention(nn.Module):
    def __init__(self, config, qk_norm: bool):
        super().__init__()
        self.head_dim, self.kv_heads = config.head_dim, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        # These modules only hold the weights and eps; torch_rope computes the norms.
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None

    def allocate(self, batch: int, max_seq: int) -> None:
        """Makes the caches of k and v, as one tensor. Heads come before tokens, because attention reads them so."""
        shape = (2, batch, self.kv_heads, max_seq, self.head_dim)
        self.register_buffer("cache", self.q_proj.weight.new_zeros(shape), persistent=False)
        self.register_buffer("scale", None)  # only a quantised cache has one

    def quantise(self, dtype: torch.dtype) -> None:
        """Replaces the caches by empty ones of dtype. What they held gives the scales, one for each head."""
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        # A quarter of room for later tokens, which may be larger. What does not fit is saturated.
        self.scale = 1.25 * self.cache.abs().amax((1, 3, 4)).float().clamp(min=1e-6) / info.max
        self.cache = torch.zeros_like(self.cache, dtype=dtype)

    def forward(self, x: Tensor, angles: dict, mask: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        options = dict(angles)
        if self.q_norm is not None:
            options |= {"q_norm_weight": self.q_norm.weight, "k_norm_weight": self.k_norm.weight}
            options |= {"norm_eps": self.q_norm.eps}
        if self.scale is not None:
            options |= {"k_scale": self.scale[0], "v_scale": self.scale[1]}
        # Normalises and rotates q in place. Writes k, normalised and rotated, and v to the cells of their positions.
        torch.ops.rope.rotate_into_cache_(q, k, v, *self.cache.transpose(2, 3), **options)
        keys, values = self.cache
        if self.scale is not None:
            keys, values = (self.cache.float() * self.scale[:, None, :, None, None]).to(q.dtype)
        x = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True)
        return self.o_proj(x.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config, qk_norm: bool):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, qk_norm)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, angles: dict, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config, qk_norm: bool):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, qk_norm) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope = torch_rope.RotaryEmbedding.from_config(config)

    @classmethod
    def from_transformers(cls, model, batch: int, max_seq: int) -> "Decoder":
        """Returns a decoder that shares the weights of a model of transformers, with empty caches."""
        weights = {name.removeprefix("model."): weight for name, weight in model.state_dict().items()}
        with torch.device("meta"):  # only shapes, because load_state_dict assigns the weights
            decoder = cls(model.config, qk_norm="layers.0.self_attn.q_norm.weight" in weights)
        decoder.load_state_dict(weights, assign=True)
        for layer in decoder.layers:
            layer.self_attn.allocate(batch, max_seq)
        return decoder

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits [batch, 1, vocabulary] after tokens [batch, seq], which are at positions [seq]."""
        angles = self.rope.angles(len(positions), positions)  # arguments of the operator, the same in all layers
        cells = torch.arange(self.layers[0].self_attn.cache.shape[3], device=tokens.device)
        mask = cells <= positions[:, None]  # a token attends to itself and to the tokens before it
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angles, mask)
        return self.lm_head(self.norm(x[:, -1:]))


@torch.inference_mode()
def generate(model: Callable, prompt: Tensor, step: Callable) -> Iterator[Tensor]:
    """Yields the likeliest next tokens, [batch, 1], without end. model takes the prompt, step the single tokens."""
    positions = torch.arange(prompt.shape[1], device=prompt.device)
    logits = model(prompt, positions)
    while True:
        tokens = logits.argmax(-1)
        yield tokens
        positions = positions[-1:] + 1
        logits = step(tokens, positions)
