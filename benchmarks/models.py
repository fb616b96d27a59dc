"""Adapters for whole models of transformers, and for the rotary functions of diffusers and comfy-kitchen."""

import functools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from .adapters import FUNCTIONS, OURS, Run, adapter, run_of, wan_rotation
from .cases import Case, Data

# The kind of a model, and the numbers of its config that are not the defaults of transformers.
MODELS = {
    "SmolLM2-135M": (
        "llama",
        dict(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
        ),
    ),
    "Qwen3-0.6B": (
        "qwen3",
        dict(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        ),
    ),
    **{
        f"Qwen3 of {n} layers": (
            "qwen3",
            dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=n, num_key_value_heads=8, head_dim=128),
        )
        for n in (12, 8)
    },
}  # fmt: skip


# ---- Whole models ----


@adapter("torch_rope fused compiled", "model", patch={"fuse": True}, compile=True)
@adapter("torch_rope compiled", "model", patch={}, compile=True)
@adapter("transformers compiled", "model", compile=True)
@adapter("torch_rope fused", "model", patch={"fuse": True})
@adapter(OURS, "model", patch={})
@adapter("transformers", "model")
def model(case: Case, data: Data, patch: dict | None = None, compile=False) -> Run:
    """A model of transformers with the shape of a known one and random weights. The results are its logits or its loss.

    patch: the options of torch_rope.integrations.transformers.patch, or None. A decode step appends a token to a
    StaticCache, which is emptied when it is full. All implementations have the same weights.
    """
    from transformers import StaticCache

    from torch_rope.integrations import transformers as integration

    if compile and case.mode == "decoding after":
        raise NotImplementedError("its step changes the length of the cache, for which it would be compiled again")
    model = stock(case.model, data.dtype, data.device)
    model = deepcopy(model, {id(p): p for p in model.parameters()})
    if patch is not None:
        integration.patch(model, **patch)
    seed = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (case.batch, case.seq + 1), generator=seed).to(data.device)
    for layer in model.model.layers if compile else ():  # the whole model would take minutes to compile
        layer.compile(dynamic=False)

    def train():
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad()
        return loss

    def prompt():
        return model(tokens[:, : case.seq], use_cache=False, logits_to_keep=1).logits

    if case.mode == "training on":
        return Run(train, lambda x: [x.detach()], context=torch.enable_grad)
    if case.mode == "prompt of":
        return Run(prompt, lambda x: [x])
    length = 4 * case.seq
    cache, used = StaticCache(config=model.config, max_cache_len=length), case.seq
    with torch.no_grad():
        model(tokens[:, : case.seq], cache=cache)

    def step():
        nonlocal used
        if used == length:
            cache.reset()
            used = 0
        used += 1
        return model(tokens[:, case.seq :], cache=cache).logits

    return Run(step, lambda x: [x])


@functools.cache
def stock(name: str, dtype: torch.dtype, device: str) -> Any:
    """Returns a model with random weights, which no implementation changes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).to(device, dtype)


# ---- Diffusion models: the rotary functions of diffusers and comfy-kitchen ----


def function_of(case: Case, data: Data) -> tuple[Callable, list, dict]:
    """Returns the rotary function of a model of diffusers, and its arguments after x: the tables in its form, and its
    options."""
    from diffusers.models import embeddings
    from diffusers.models.transformers import transformer_ltx, transformer_qwenimage

    # [1, seq, rotary_dim]
    cos, sin = (t.repeat_interleave(2, -1) if case.interleaved else torch.cat([t, t], -1) for t in data.rows)
    pair = [(cos[0], sin[0])]
    if case.model == "Wan":
        return wan_rotation(), [cos[:, :, None], sin[:, :, None]], {}
    if case.model == "Flux":
        return embeddings.apply_rotary_emb, pair, {"sequence_dim": 1}
    if case.model == "Cosmos":
        return embeddings.apply_rotary_emb, pair, {"use_real_unbind_dim": -2}
    if case.model == "Qwen-Image":
        return transformer_qwenimage.apply_rotary_emb_qwen, [torch.complex(data.cos, data.sin)], {"use_real": False}
    return transformer_ltx.apply_rotary_emb, [(cos, sin)], {}


@adapter(OURS, "function of diffusers", patched=True)
@adapter("diffusers", "function of diffusers")
def rotary_function(case: Case, data: Data, patched=False) -> Run:
    """The rotary function of a model of diffusers, or what takes its place in a patched model, for q and for k."""
    from torch_rope.integrations.diffusers import LIBRARY

    function, tables, options = function_of(case, data)
    if patched:
        function = LIBRARY.rotary_of(function, case.model, "eager")

    def rotate(x):
        if case.model == "LTX":  # x is [batch, seq, channels]
            return function(x[:, :, 0], *tables, **options)[:, :, None]
        return function(x, *tables, **options)

    # Cosmos has the heads before the tokens.
    return run_of(case, data, lambda q, k: (rotate(q), rotate(k)), heads_first=case.model == "Cosmos")


@adapter(OURS, *FUNCTIONS[1:], backend="torch_rope")
@adapter("comfy-kitchen", *FUNCTIONS[1:], backend="eager")
def comfy_kitchen(case: Case, data: Data, backend: str) -> Run:
    """A function of comfy-kitchen for q and k with one of its back ends. Tables are matrices, as in ComfyUI's Wan."""
    import comfy_kitchen

    from torch_rope.integrations.comfy_kitchen import register

    register()
    cos, sin = (t[:, :, None] for t in data.rows)
    matrices = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))
    function, weights = getattr(comfy_kitchen, case.model), getattr(data, "weights", ())

    def forward(q, k):
        with comfy_kitchen.use_backend(backend):
            return function(q, k, matrices, *weights)

    return run_of(case, data, forward)
