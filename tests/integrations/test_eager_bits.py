"""Tests that eager_rounding=True gives the bits of transformers' and diffusers' own functions, called as they are.

The functions run in eager mode on the CPU. The gradients of q and k have the same bits too, unless the function converts
x more than once: then PyTorch rounds the gradients of 16-bit tensors once more.
"""

import ast
import importlib
import inspect
import os
import random
import textwrap

import pytest
import torch
from cases import needed

import torch_rope

needed("transformers")
needed("diffusers")
SHAPES = int(os.environ.get("ROPE_EXAMPLES", 40))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def nested(module, name):
    """Returns the function `name` that is defined inside another function of a module."""
    module = importlib.import_module(module)
    tree = ast.parse(inspect.getsource(module))
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    names = {}
    exec(textwrap.dedent(ast.unparse(node)), vars(module) | {"torch": torch}, names)
    return names[name]


def transformers(model, name="apply_rotary_pos_emb"):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def diffusers(module, name):
    return getattr(importlib.import_module(f"diffusers.models.{module}"), name)


# ---- how each function is called, on q and k [batch, seq, heads, head_dim], cos and sin [batch, seq, pairs] ----


def twice(t):
    return torch.cat([t, t], -1)


def each_twice(t):
    return t.repeat_interleave(2, -1)


def of_transformers(model, wide=twice, name="apply_rotary_pos_emb"):
    def call(q, k, cos, sin):
        out = transformers(model, name)(q.transpose(1, 2), k.transpose(1, 2), wide(cos), wide(sin))
        return [x.transpose(1, 2) for x in out]

    return call


def each(function):
    """Returns a call of a function that rotates one tensor."""
    return lambda q, k, cos, sin: [function(x, cos, sin) for x in (q, k)]


def flux(wide, dim, sequence_dim):
    def call(x, cos, sin):
        x = x.transpose(1, 2) if sequence_dim == 2 else x
        out = diffusers("embeddings", "apply_rotary_emb")(
            x, (wide(cos[0]), wide(sin[0])), use_real_unbind_dim=dim, sequence_dim=sequence_dim
        )
        return out.transpose(1, 2) if sequence_dim == 2 else out

    return each(call)


def qwen(x, cos, sin):
    function = diffusers("transformers.transformer_qwenimage", "apply_rotary_emb_qwen")
    return function(x, torch.complex(cos[0], sin[0]), use_real=False)


def lumina(x, cos, sin):
    return diffusers("embeddings", "apply_rotary_emb")(x, torch.complex(cos, sin), use_real=False)


def wan(x, cos, sin):
    function = nested("diffusers.models.transformers.transformer_wan", "apply_rotary_emb")
    return function(x, *(each_twice(t).unsqueeze(-2) for t in (cos, sin)))


def ltx(x, cos, sin):
    """LTX rotates all channels of a token as one head."""
    function = diffusers("transformers.transformer_ltx", "apply_rotary_emb")
    return function(x.flatten(-2), (each_twice(cos), each_twice(sin))).unflatten(-1, x.shape[-2:])


def halves(x):
    """Moves the first channels of all pairs before the second ones, as DeepSeek's function does."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


class Case:
    """A function, and how torch_rope is called for the same bits.

    tables: the dtype of cos and sin: that of x ("x") or float32. converts: the function converts x more than once.
    pairs: the numbers of pairs that are tried.
    """

    def __init__(
        self,
        call,
        *,
        interleaved=False,
        partial=False,
        tables="x",
        converts=False,
        angles="token",
        pairs=(),
        after=None,
    ):
        self.call, self.interleaved, self.partial, self.tables = call, interleaved, partial, tables
        self.pairs = pairs or (1, 2, 3, 8, 16, 20, 32, 64)
        self.converts, self.angles, self.after = converts, angles, after or (lambda x: x)


IN_FLOAT32 = {"tables": "float32", "converts": True}
# PyTorch multiplies those complex numbers that whole vectors leave over by fma, so their bits depend on their place.
COMPLEX = {"tables": "float32", "interleaved": True, "pairs": (8, 16, 32, 64)}
CASES = {
    "llama": Case(of_transformers("llama")),
    "qwen3": Case(of_transformers("qwen3")),
    "gemma3": Case(of_transformers("gemma3")),
    "gpt_neox": Case(of_transformers("gpt_neox"), partial=True),
    "phi3": Case(of_transformers("phi3"), partial=True),
    "glm": Case(of_transformers("glm"), interleaved=True, partial=True),
    "cohere": Case(of_transformers("cohere", each_twice), interleaved=True, tables="float32"),
    "deepseek_v3": Case(of_transformers("deepseek_v3")),
    "deepseek_v3 interleaved": Case(
        of_transformers("deepseek_v3", name="apply_rotary_pos_emb_interleave"), interleaved=True, after=halves
    ),
    "diffusers, interleaved": Case(flux(each_twice, -1, 2), interleaved=True, angles="shared", **IN_FLOAT32),
    "diffusers, half-split": Case(flux(twice, -2, 1), angles="shared", **IN_FLOAT32),
    "diffusers, complex": Case(each(lumina), **COMPLEX),
    "Qwen-Image": Case(each(qwen), angles="shared", **COMPLEX),
    "Wan": Case(each(wan), interleaved=True, **IN_FLOAT32),
    "LTX": Case(each(ltx), interleaved=True, angles="one head", **IN_FLOAT32),
}


def tensors(case, dtype, draw):
    """Returns q, k, cos and sin of a random shape."""
    batch, seq, heads, kv_heads = (draw.randint(1, n) for n in (3, 12, 4, 4))
    pairs = draw.choice(case.pairs)
    head_dim = 2 * pairs + (2 * draw.randint(0, 9) if case.partial else 0)
    kv_heads = heads if case.angles == "one head" else kv_heads
    q, k = (torch.randn(batch, seq, n, head_dim).to(dtype).requires_grad_() for n in (heads, kv_heads))
    shapes = {"token": (batch, seq, pairs), "shared": (1, seq, pairs), "one head": (batch, seq, heads * pairs)}
    angle = torch.randn(shapes[case.angles]) * 5
    return q, k, *(t.to(torch.float32 if case.tables == "float32" else dtype) for t in (angle.cos(), angle.sin()))


def ours(case, q, k, cos, sin, rotate_qk):
    one_head = case.angles == "one head"
    xs = [x.flatten(-2).unsqueeze(-2) if one_head else x for x in (q, k)]
    outs = rotate_qk(*xs, cos, sin, interleaved=case.interleaved, eager_rounding=True)
    return [case.after(out.view(x.shape) if one_head else out) for out, x in zip(outs, (q, k), strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_model(name, dtype):
    case, draw = CASES[name], random.Random(0)
    for _ in range(SHAPES):
        q, k, cos, sin = tensors(case, dtype, draw)
        expected, found = case.call(q, k, cos, sin), ours(case, q, k, cos, sin, torch_rope.rotate_qk)
        for e, f in zip(expected, found, strict=True):
            assert f.dtype == e.dtype and torch.equal(f, e), (q.shape, k.shape, cos.shape)
        if case.converts and dtype != torch.float32:
            continue
        given = [torch.randn_like(e) for e in expected]
        gradients = torch.autograd.grad(found, (q, k), given)
        for g, e in zip(gradients, torch.autograd.grad(expected, (q, k), given), strict=True):
            assert torch.equal(g, e), (q.shape, k.shape, cos.shape)


# How many elements of a result, and of a gradient of q, may have other bits than the model's, because the squares are
# summed in another order.
NORM_DIFFERS = {torch.bfloat16: (5e-5, 1e-4), torch.float16: (2e-4, 4e-4), torch.float32: (0.2, 0.4)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["Qwen3RMSNorm", "Gemma3RMSNorm"])
def test_a_norm_has_the_bits_of_the_model_but_for_the_order_of_its_sum(name, dtype):
    model = name.removesuffix("RMSNorm").lower()
    norms = [transformers(model, name)(128, eps=1e-6) for _ in "qk"]
    for norm in norms:
        norm.weight.data.copy_(torch.randn(128) * 0.2 + (model == "qwen3"))
        norm.to(dtype)
    q, k = (torch.randn(2, 300, n, 128).to(dtype).requires_grad_() for n in (8, 2))
    cos, sin = (t.to(dtype) for t in torch_rope.cos_sin(torch.arange(300), torch_rope.inv_freq(128)))
    tables = [twice(t)[None] for t in (cos, sin)]
    rotate = transformers(model, "apply_rotary_pos_emb")
    expected = rotate(norms[0](q), norms[1](k), *tables, unsqueeze_dim=2)
    weights = [norm.weight if model == "qwen3" else 1 + norm.weight.float() for norm in norms]
    found = torch_rope.norm_rotate_qk(q, k, *weights, cos, sin, norm_eps=1e-6, eager_rounding=True)
    given = torch.randn_like(q)
    gradients = (torch.autograd.grad(outs[0], q, given)[0] for outs in (expected, found))
    few, few_of_gradients = NORM_DIFFERS[dtype]
    assert (found[0] != expected[0]).double().mean() < few and (found[1] != expected[1]).double().mean() < few
    assert torch.ne(*gradients).double().mean() < few_of_gradients
