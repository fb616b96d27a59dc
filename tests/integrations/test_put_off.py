"""Tests of norms that patch(fuse=True) puts off until the rotation, for diffusers and timm: on layers of our own."""

import copy
import functools

import pytest
import torch
from test_conventions import Attention, apply_rot_embed, layer_inputs, written
from torch import nn

from torch_rope.integrations import _put_off, timm
from torch_rope.integrations.diffusers import patch

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("examine_once")]


@pytest.fixture
def fused(monkeypatch):
    """A list of the calls of the operator that normalises and rotates."""
    calls, operator = [], _put_off._norm_rotate_qk
    monkeypatch.setattr(
        _put_off, "_norm_rotate_qk", lambda *args, **more: calls.append(args) or operator(*args, **more)
    )
    return calls


HEADS = "query = query.unflatten(-1, (3, 16))"
BODY = """
    x = x.clone()
    query = attn.norm_q(x)
    {}
    return apply_rotary_plain(query, cos, sin)
"""


def normed(folder, between=HEADS, norm=None, dtype=torch.float32):
    """Returns an attention layer with a norm, and its arguments. between: what it does between norm and rotation."""
    attention, angle = Attention(written(BODY.format(between), folder)), torch.randn(1, 6, 1, 8)
    attention.norm_q = norm or nn.RMSNorm(48, eps=1e-6)
    for parameter in attention.norm_q.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    tables = (t.repeat_interleave(2, -1).to(dtype) for t in (angle.cos(), angle.sin()))
    return attention, (torch.randn(2, 6, 48, dtype=dtype).requires_grad_(), *tables)


def gradients(attention, args):
    """Returns the result, and the gradients of x and of the weights."""
    result = attention(*args)
    assert type(result) is torch.Tensor
    weights = torch.linspace(-1, 1, result.numel()).view_as(result)
    leaves = [args[0], *attention.norm_q.parameters()]
    return [result, *torch.autograd.grad((result.double() * weights).sum(), leaves)]


VIEWS = [
    HEADS,
    "query = query.unflatten(2, (3, -1))",
    "query = query.view(2, -1, 3, 16)",
    "query = query.view([query.size(0), query.shape[1], 3, 16])",
    "query = query.reshape(*query.shape[:2], 3, -1)",
    "query = query.to(query.dtype).to(query.device).type_as(x).unflatten(-1, (3, 16))",
    "query = query.transpose(0, 1).unflatten(-1, (3, 16)).transpose(dim0=1, dim1=0)",
]
CHANGES = [
    "query = 2 * query.unflatten(-1, (3, 16))",
    "query = torch.cat([query.unflatten(-1, (3, 16))[:, :3]] * 2, 1)",
    "query = query.view(2, 3, 6, 16).transpose(1, 2)",  # the heads are not those of one token
    "query = query.reshape(6, 2, 3, 16).transpose(0, 1)",
    "heads, query[:, 1:] = query.unflatten(-1, (3, 16)), 0.5; query = heads",
    "query = of_another_function(query).unflatten(-1, (3, 16))",
    "return query.unflatten(-1, (3, 16))",
]


@pytest.mark.parametrize("between", [*VIEWS, *CHANGES])
def test_a_norm_is_put_off_over_views_and_called_if_something_else_follows(between, fused, tmp_path):
    attention, args = normed(tmp_path, between)
    expected = gradients(attention, args)
    handle = patch(attention, fuse=True)
    assert "norm_q in norm_rotate_qk, if only views stand between" in str(handle)
    actual = gradients(attention, args)
    torch.testing.assert_close(actual, expected)
    assert len(fused) == (between in VIEWS)
    assert between in VIEWS or all(map(torch.equal, actual, expected))


def test_a_norm_whose_input_was_changed_since_is_an_error(tmp_path):
    attention, args = normed(tmp_path, f"{HEADS}; x.mul_(2)")
    patch(attention, fuse=True)
    with pytest.raises(RuntimeError, match="input of a RMSNorm was changed in place"):
        attention(*args)


class Float32Norm(nn.RMSNorm):
    """Has results in float32."""

    def forward(self, x):
        return super().forward(x.float())


NORMS = {
    "no weight": lambda: nn.RMSNorm(48, eps=1e-6, elementwise_affine=False),
    "a mean": lambda: nn.LayerNorm(48, eps=1e-6),
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.RMSNorm(48, eps=1e-6), dim=None),
    "results in float32": lambda: Float32Norm(48, eps=1e-6).bfloat16(),
    "x in bfloat16": lambda: nn.RMSNorm(48, eps=1e-6),
}


@pytest.mark.parametrize("kind", NORMS)
def test_other_norms_are_called(kind, fused, tmp_path):
    dtype = torch.bfloat16 if kind in ("results in float32", "x in bfloat16") else torch.float32
    attention, args = normed(tmp_path, norm=NORMS[kind](), dtype=dtype)
    expected = gradients(attention, args)
    patch(attention, fuse=True)
    assert all(map(torch.equal, gradients(attention, args), expected)) and not fused


def replace_forward(norm):
    """Accelerate and diffusers do this to load weights."""
    norm.forward = functools.partial(lambda forward, x: 2 * forward(x), norm.forward)


WATCHED = {
    "a forward hook": lambda norm: norm.register_forward_hook(lambda norm, args, result: 2 * result),
    "a forward pre-hook": lambda norm: norm.register_forward_pre_hook(lambda norm, args: 2 * args[0]),
    "a backward hook": lambda norm: norm.register_full_backward_hook(lambda norm, given, _: (2 * given[0],)),
    "another forward": replace_forward,
}


@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
def test_a_norm_that_was_changed_after_the_patch_is_called(watch, fused, tmp_path):
    attention, args = normed(tmp_path)
    plain, stock = gradients(attention, args), copy.deepcopy(attention)
    patch(attention, fuse=True)
    for layer in (stock, attention):
        watch(layer.norm_q)
    expected = gradients(stock, args)
    assert all(map(torch.equal, gradients(attention, args), expected)) and not fused
    assert not all(map(torch.equal, plain, expected))


class NormedLayer(nn.Module):
    """A layer of timm: q is [batch, heads, seq, head_dim]."""

    def __init__(self):
        super().__init__()
        self.q_norm = nn.RMSNorm(16, eps=1e-6)

    def forward(self, q, sin, cos, half):
        return apply_rot_embed(self.q_norm(q), sin, cos, half)


def test_a_norm_before_heads_and_seq_change_places_is_put_off(fused):
    layer, (q, _, *tables) = NormedLayer(), layer_inputs()
    expected = layer(q, *tables)
    assert "q_norm in norm_rotate_qk" in str(timm.patch(layer, fuse=True))
    torch.testing.assert_close(layer(q, *tables), expected)
    assert len(fused) == 1
