"""Tests that eager_rounding=True gives the bits of transformers' own functions, called as they are in eager mode on the
CPU. tests/exhaustive/models tests it for all families and for diffusers, by patch."""

import importlib
import os
import random

import pytest
import torch
from cases import needed

import torch_rope

needed("transformers")
pytestmark = pytest.mark.cpu
SHAPES = int(os.environ.get("ROPE_EXAMPLES", 10))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# How many elements of a result, and of a gradient of q, may have other bits than the model's, because the squares are
# summed in another order.
NORM_DIFFERS = {torch.bfloat16: (5e-5, 1e-4), torch.float16: (2e-4, 4e-4), torch.float32: (0.2, 0.4)}


def of(model, name="apply_rotary_pos_emb"):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", ["llama", "gpt_neox", "glm", "cohere", "deepseek_v3"])
def test_the_bits_are_those_of_the_model(model, dtype):
    draw, interleaved = random.Random(0), model in ("glm", "cohere")
    for _ in range(SHAPES):
        batch, seq, heads, kv_heads = (draw.randint(1, n) for n in (3, 12, 4, 4))
        pairs = draw.choice((1, 2, 3, 8, 16, 20, 32, 64))
        head_dim = 2 * pairs + (2 * draw.randint(0, 9) if model in ("gpt_neox", "glm") else 0)
        q, k = (torch.randn(batch, seq, n, head_dim).to(dtype).requires_grad_() for n in (heads, kv_heads))
        angle = torch.randn(batch, seq, pairs) * 5
        tables = [t.to(torch.float32 if model == "cohere" else dtype) for t in (angle.cos(), angle.sin())]
        wide = [t.repeat_interleave(2, -1) if model == "cohere" else t.repeat(1, 1, 2) for t in tables]
        expected = [x.transpose(1, 2) for x in of(model)(q.transpose(1, 2), k.transpose(1, 2), *wide)]
        found = torch_rope.rotate_qk(q, k, *tables, interleaved=interleaved, eager_rounding=True)
        given = [torch.randn_like(e) for e in expected]
        results = [[*out, *torch.autograd.grad(out, (q, k), given)] for out in (found, expected)]
        for f, e in zip(*results, strict=True):
            assert f.dtype == e.dtype and torch.equal(f, e), (q.shape, k.shape, angle.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model, norm", [("qwen3", "Qwen3RMSNorm"), ("gemma3", "Gemma3RMSNorm")])
def test_a_norm_has_the_bits_of_the_model_but_for_the_order_of_its_sum(model, norm, dtype):
    norms = [of(model, norm)(128, eps=1e-6) for _ in "qk"]
    for norm in norms:
        norm.weight.data.copy_(torch.randn(128) * 0.2 + (model == "qwen3"))
        norm.to(dtype)
    q, k = (torch.randn(2, 300, n, 128).to(dtype).requires_grad_() for n in (8, 2))
    tables = [t.to(dtype) for t in torch_rope.cos_sin(torch.arange(300), torch_rope.inv_freq(128))]
    wide = [t.repeat(1, 2)[None] for t in tables]
    expected = of(model)(norms[0](q), norms[1](k), *wide, unsqueeze_dim=2)
    weights = [norm.weight if model == "qwen3" else 1 + norm.weight.float() for norm in norms]
    found = torch_rope.norm_rotate_qk(q, k, *weights, *tables, norm_eps=1e-6, eager_rounding=True)
    given, (few, few_of_gradients) = torch.randn_like(q), NORM_DIFFERS[dtype]
    assert all((f != e).double().mean() < few for f, e in zip(found, expected, strict=True))
    gradients = (torch.autograd.grad(outs[0], q, given)[0] for outs in (expected, found))
    assert torch.ne(*gradients).double().mean() < few_of_gradients
