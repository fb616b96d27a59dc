"""Tiny random models of transformers, and what tests of patch do with them."""

import functools

import pytest
import torch
from cases import needed

from torch_rope.integrations import _bits

transformers = needed("transformers")

# The differences are parts of the largest logit, and of the largest gradient. LOGITS and GRADIENTS are the largest
# allowed. Both models round q and k to float32, but in another order; with scores of up to 60 that changes a
# probability by 60 * 2^-24 = 4e-6.
LOGITS, GRADIENTS = 4e-6, 1.5e-5
# initializer_range is ten times the usual value, so that attention depends on the positions.
SMALL = dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
    bos_token_id=1, eos_token_id=None,
)  # fmt: skip


def make(model_type="llama", attention="sdpa", **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SMALL | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def tokens(batch=2, seq=12):
    return torch.randint(3, 96, (batch, seq), generator=torch.Generator().manual_seed(1))


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def train(model, **options):
    """Does a training step and returns (loss, all gradients)."""
    model.train()
    with torch.autocast("cpu", torch.bfloat16, **options):
        loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def calls(monkeypatch):
    """A list of the operators of torch_rope that patched models call."""
    counted = []
    for name in ("_rotate", "_rotate_qk"):
        operator = getattr(_bits, name)
        monkeypatch.setattr(
            _bits, name, lambda *args, operator=operator, **kw: counted.append(operator) or operator(*args, **kw)
        )
    return counted


def add_hook(module, calls):
    """Does what add_hook_to_module of accelerate does."""

    def forward(module, *args, **kwargs):
        out = module._old_forward(*args, **kwargs)
        calls.append("hook")
        return out

    module._old_forward, module.forward = module.forward, functools.partial(forward, module)


def remove_hook(module):
    module.forward = module._old_forward
    del module._old_forward


def new_cache(kind, model):
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=24)
    return transformers.DynamicCache(config=model.config)


def logits(model, text, cache, *lengths):
    """Returns the logits of a text, of which a model gets parts of these lengths."""
    with torch.no_grad():
        return torch.cat([model(part, cache=cache).logits for part in text.split(lengths, 1)], 1)


# The seeds are fixed, so that no token is so near to the boundary between two experts that rounding decides.
MOE = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MLA = dict(
    q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_shared_experts=1,
    n_group=1, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4,
)  # fmt: skip
