"""Tests of norms that patch(fuse=True) puts off until the rotation, for diffusers and timm: on layers of our own."""

import functools

import pytest
import torch
from test_conventions import Attention, apply_rot_embed, apply_rotary_plain, counting, layer_inputs
from torch import nn
from torch.nn import functional as F

from torch_rope.integrations import _put_off, timm
from torch_rope.integrations._put_off import PutOff, put_off
from torch_rope.integrations.diffusers import Rebuilder, patch

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("examine_once")]


@pytest.fixture
def fused(monkeypatch):
    """A list of the calls of the operator that normalises and rotates."""
    calls, operator = [], _put_off._norm_rotate_qk
    monkeypatch.setattr(
        _put_off, "_norm_rotate_qk", lambda *args, **kwargs: calls.append(args) or operator(*args, **kwargs)
    )
    return calls


# ---- what stands for the result ----

USES = {
    "cat": lambda q: torch.cat([q, q], 1),
    "out": lambda q: torch.add(q, q, out=torch.empty(2, 6, 16)),
    "keywords": lambda q: F.scaled_dot_product_attention(query=q, key=q, value=q),
    "index": lambda q: q[:, 1:, None],
    "plus": lambda q: 2 + q * 3 - q / 2 - (1 - q) ** 2,
    "compare": lambda q: ~(q > 0) | (q == q),
    "iter": lambda q: torch.stack([*list(q), *q.unbind(0), *q.chunk(2)[0]]),
    "numpy": lambda q: torch.from_numpy(__import__("numpy").asarray(q)),
    "contiguous": lambda q: q.transpose(0, 1).contiguous() + q.permute(1, 0, 2) + q.mT.mT.transpose(0, 1),
    "float": lambda q: q.float() + q.to(torch.float64),
    "view of a dtype": lambda q: q.view(torch.int32),
    "view by name": lambda q: q.view(size=(6, 2, 16)) + q.reshape(shape=(6, 2, 16)),
    "reshape": lambda q: q.unflatten(-1, (2, 8)).transpose(1, 2).reshape(2, 6, 16),
    "transpose": lambda q: q.transpose(dim0=-1, dim1=1),
    "len": lambda q: torch.tensor([len(q), q.dim(), q.ndim, q.size(0), q.numel(), *q.shape, q.stride(1), q.get_device()]),
    "bool": lambda q: torch.tensor(bool(q.sum() == q.sum()) and not hasattr(q, "no_such_name")),
}  # fmt: skip


def in_place(q):
    q += 1
    q[:, 0] = 2
    q.mul_(3)
    torch.sin_(q)
    return q * 1


@torch.no_grad()
@pytest.mark.parametrize("use", [*USES.values(), in_place], ids=[*USES, "in place"])
def test_any_use_of_what_is_put_off_is_one_of_the_result(use):
    norm, x = nn.RMSNorm(16, eps=1e-6), torch.randn(2, 6, 16) + 1
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    q = put_off(norm, x)
    assert type(q) is PutOff
    actual = use(q)
    assert type(actual) is torch.Tensor and torch.equal(actual, use(norm(x)))


# ---- what may stand between a norm and the rotation ----


def normed(processor, norm=None, dtype=torch.float32):
    """Returns an attention layer with a norm over heads, and its arguments."""
    attention, angle = Attention(processor), torch.randn(1, 6, 1, 8).repeat_interleave(2, -1)
    attention.norm_q = norm or nn.RMSNorm(48, eps=1e-6)
    with torch.no_grad():
        for parameter in attention.norm_q.parameters():
            parameter.uniform_(0.5, 1.5)
    return attention, (
        torch.randn(2, 6, 48, dtype=dtype).requires_grad_(),
        angle.cos().to(dtype),
        angle.sin().to(dtype),
    )


def gradients(attention, args):
    """Returns the result, and the gradients of x and of the weights."""
    result = attention(*args)
    weights = torch.linspace(-1, 1, result.numel()).view_as(result)
    leaves = [args[0], *attention.norm_q.parameters()]
    return [result, *torch.autograd.grad((result.double() * weights).sum(), leaves)]


VIEWS = [
    lambda q: q.unflatten(-1, (3, 16)),
    lambda q: q.unflatten(2, (3, -1)),
    lambda q: q.view(2, 6, 3, 16),
    lambda q: q.view(2, -1, 3, 16),
    lambda q: q.view(*q.shape[:2], 3, -1),
    lambda q: q.view([q.size(0), len(q[0]) if q is None else q.shape[1], 3, 16]),
    lambda q: q.to(q.dtype).to(q.device).type_as(q).unflatten(-1, (3, 16)),
    lambda q: q.transpose(0, 1).unflatten(-1, (3, 16)).transpose(1, 0),
    lambda q: q.unflatten(-1, (3, 16)).transpose(1, 2).transpose(-2, -3),
    lambda q: q.unflatten(-1, (3, 16)).transpose(dim0=1, dim1=1),
]
CHANGES = [
    lambda q: q.unflatten(-1, (3, 16)) * 2,
    lambda q: torch.cat([q.unflatten(-1, (3, 16))[:, :3]] * 2, 1),
    lambda q: q.view(2, 3, 6, 16).transpose(1, 2),  # the heads are not those of one token
    lambda q: q.reshape(6, 2, 3, 16).transpose(0, 1),
    lambda q: q.unflatten(-1, (3, 16)).transpose(-1, -2).transpose(-1, -2),
]


@pytest.mark.parametrize("between", [*VIEWS, *CHANGES])
def test_a_norm_is_put_off_over_views_and_called_if_something_else_stands_between(between, fused):
    rotator = Rebuilder()._examine(apply_rotary_plain).rotator
    attention, (x, cos, sin) = normed(None)
    results = []
    for norm in (functools.partial(put_off, attention.norm_q), attention.norm_q):
        y = rotator.rotate((between(norm(x)),), (cos, sin))
        weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
        results.append([y, *torch.autograd.grad((y * weights).sum(), [x, attention.norm_q.weight])])
    torch.testing.assert_close(*results)
    assert len(fused) == (between in VIEWS)
    assert between in VIEWS or all(map(torch.equal, *results))


class NormedProcessor:
    def __call__(self, attn, x, cos, sin):
        query = attn.norm_q(x).unflatten(-1, (3, 16))
        return apply_rotary_plain(query, cos, sin)


class InPlaceProcessor:
    def __call__(self, attn, x, cos, sin):
        query = attn.norm_q(x)
        heads = query.unflatten(-1, (3, 16))
        query[:, 1:] = 0.5
        return apply_rotary_plain(heads, cos, sin)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, given):
        return 2 * given


class FunctionProcessor:
    def __call__(self, attn, x, cos, sin):
        query, key = attn.norm_q(x), attn.norm_q(x)
        key = Doubles.apply(key)
        if not isinstance(query, torch.Tensor):
            raise TypeError(query)
        return apply_rotary_plain(key.unflatten(-1, (3, 16)), cos, sin)


class ReturningProcessor:
    def __call__(self, attn, x, cos, sin):
        query = attn.norm_q(x)
        if len(x) == 2:
            return query.unflatten(-1, (3, 16))
        return apply_rotary_plain(query, cos, sin)


class ChangingProcessor:
    def __call__(self, attn, x, cos, sin):
        x = x.clone()
        query = attn.norm_q(x).unflatten(-1, (3, 16))
        x.mul_(2)
        return apply_rotary_plain(query, cos, sin)


def test_a_layer_says_what_is_put_off(fused):
    attention, args = normed(NormedProcessor())
    expected = gradients(attention, args)
    handle = patch(attention, fuse=True)
    torch.testing.assert_close(gradients(attention, args), expected)
    assert len(fused) == 1 and "norm_q in norm_rotate_qk, if only views stand between" in str(handle)


@pytest.mark.parametrize("processor", [InPlaceProcessor, FunctionProcessor, ReturningProcessor])
def test_what_leaves_a_method_or_is_changed_is_not_put_off(processor, fused):
    """No other function and no caller ever sees what is put off."""
    attention, args = normed(processor())
    expected = gradients(attention, args)
    patch(attention, fuse=True)
    assert type(attention(*args)) is torch.Tensor
    assert all(map(torch.equal, gradients(attention, args), expected)) and not fused


def test_a_norm_whose_input_was_changed_since_is_an_error():
    attention, args = normed(ChangingProcessor())
    patch(attention, fuse=True)
    with pytest.raises(RuntimeError, match="input of a RMSNorm was changed in place"):
        attention(*args)


class Float32Norm(nn.RMSNorm):
    """Has results in float32."""

    def forward(self, x):
        return super().forward(x.float())


class Biased(nn.RMSNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.ones(48))

    def forward(self, x):
        return super().forward(x) + self.bias


NORMS = {
    "a bias": lambda: Biased(48, eps=1e-6),
    "no weight": lambda: nn.RMSNorm(48, eps=1e-6, elementwise_affine=False),
    "a mean": lambda: nn.LayerNorm(48, eps=1e-6),
    "another size": lambda: nn.RMSNorm((6, 48), eps=1e-6),
    "no eps": lambda: nn.RMSNorm(48),
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.RMSNorm(48, eps=1e-6), dim=None),
    "weights in bfloat16": lambda: nn.RMSNorm(48, eps=1e-6).bfloat16(),
    "results in float32": lambda: Float32Norm(48, eps=1e-6).bfloat16(),
    "x in bfloat16": lambda: nn.RMSNorm(48, eps=1e-6),
}


@pytest.mark.parametrize("kind", NORMS)
def test_other_norms_are_called(kind, fused):
    dtype = torch.bfloat16 if kind in ("results in float32", "x in bfloat16") else torch.float32
    attention, args = normed(NormedProcessor(), NORMS[kind](), dtype)
    expected = gradients(attention, args)
    patch(attention, fuse=True)
    assert all(map(torch.equal, gradients(attention, args), expected)) and not fused


@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_a_norm_with_hooks_is_called(hook, fused):
    attention, args = normed(NormedProcessor())
    expected, seen = gradients(attention, args), []
    patch(attention, fuse=True)
    handle = getattr(attention.norm_q, f"register_{hook}")(lambda *args: seen.append(args))
    assert all(map(torch.equal, gradients(attention, args), expected)) and len(seen) == 1 and not fused
    handle.remove()
    gradients(attention, args)
    assert len(seen) == len(fused) == 1


def test_a_norm_whose_forward_was_replaced_is_called(fused):
    """Accelerate and diffusers replace it to load weights."""
    attention, (x, *tables) = normed(NormedProcessor())
    patch(attention, fuse=True)
    forward = attention.norm_q.forward
    attention.norm_q.forward = lambda x: 2 * forward(x)
    assert torch.equal(attention(x, *tables), apply_rotary_plain(2 * forward(x).unflatten(-1, (3, 16)), *tables))
    assert not fused


def test_a_norm_is_called_under_autocast_and_in_a_graph(fused):
    attention, args = normed(NormedProcessor())
    expected, graphs = attention(*args), []
    with torch.autocast("cpu", torch.bfloat16):
        narrow = attention(*args)
        with patch(attention, fuse=True):
            assert torch.equal(attention(*args), narrow)
    torch._dynamo.reset()
    with patch(attention, fuse=True):
        compiled = torch.compile(attention, fullgraph=True, backend=counting(graphs))
        torch.testing.assert_close(compiled(*args), expected)
    assert graphs == [1] and not fused


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
