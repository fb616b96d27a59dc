"""Tests that attention layers of diffusers rotate on Metal, which has no float64 and is slow with complex numbers.

On a Mac these tests run on the GPU.
"""

import pytest
import torch
from cases import needed
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

needed("diffusers")
from diffusers.models.attention_processor import Attention  # noqa: E402
from diffusers.models.transformers import transformer_qwenimage as qwen  # noqa: E402
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxPosEmbed  # noqa: E402

from torch_rope.integrations.diffusers import patch  # noqa: E402

# The largest allowed differences from the CPU, as parts of the largest element.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 0.03}
AXES = [4, 6, 6]


@pytest.fixture(autouse=True)
def _on_metal(device, monkeypatch):
    # The simulated device has no scaled_dot_product_attention, so its formula takes its place.
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


class Watch(TorchDispatchMode):
    """Fails if an operator computes with complex numbers or in float64. Views of a complex table may be taken.

    Attributes:
        called: the operators of torch_rope that were called.
        devices: the devices of their tensors.
    """

    def __init__(self):
        super().__init__()
        self.called, self.devices = set(), set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if torch.is_tensor(t)]
        if not operator.is_view:
            assert not any(t.is_complex() or t.dtype == torch.float64 for t in tensors), operator
        if operator.namespace == "rope":
            self.called.add(operator.overloadpacket.__name__)
            self.devices.update(t.device.type for t in tensors)
        return out


class Layer(nn.Module):
    """An attention layer and the module of its tables. It attends to 4 tokens of an image, and often 3 of text."""

    def __init__(self, rope, attention, tables, forward):
        super().__init__()
        self.rope, self.attention = rope, attention
        self.tables_on = lambda device: tables(self.rope, device)
        self.forward = lambda *inputs: forward(self.attention, *inputs)


def flux():
    positions = torch.cartesian_prod(torch.arange(7), torch.tensor([1023]), torch.tensor([2047]))
    return Layer(
        FluxPosEmbed(10000, AXES),
        FluxAttention(32, 2, 16, added_kv_proj_dim=32),
        lambda rope, device: rope(positions.to(device)),
        lambda attention, image, text, tables: attention(image, text, image_rotary_emb=tables),
    )


def qwen_image():
    sizes = dict(query_dim=32, added_kv_proj_dim=32, dim_head=16, heads=2, out_dim=32, context_pre_only=False)
    return Layer(
        qwen.QwenEmbedRope(10000, AXES, scale_rope=True),
        Attention(**sizes, bias=True, qk_norm="rms_norm", processor=qwen.QwenDoubleStreamAttnProcessor2_0()),
        lambda rope, device: rope([(1, 2, 2)], torch.device(device), 3),
        lambda attention, image, text, tables: attention(image, encoder_hidden_states=text, image_rotary_emb=tables),
    )


def attention(query, key, value, **_):
    return (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1) @ value


def step(layer, image, text, tables):
    """Returns the results of a layer as one tensor, and all gradients as another."""
    given = [x.clone().requires_grad_() for x in (image, text)]
    results = layer(*given, tables)
    result = torch.cat([r.flatten() for r in results])
    used = [*given[: len(results)], *layer.parameters()]
    weights = torch.linspace(-1, 1, len(result)).to(result)
    gradients = torch.autograd.grad(result, used, weights, allow_unused=True)
    return result, torch.cat([g.flatten() for g in gradients if g is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [flux, qwen_image])
def test_a_layer_rotates_without_complex_numbers_and_float64(make, dtype, device):
    layer, on_metal = make().to(dtype), make().to(dtype).to(device)
    on_metal.load_state_dict(layer.state_dict())
    for each in (layer, on_metal):
        patch(each)
    inputs = [torch.randn(2, 4, 32).to(dtype), torch.randn(2, 3, 32).to(dtype), make().tables_on("cpu")]
    expected = step(layer, *inputs)
    metal_inputs = tree_map(lambda t: t.to(device), inputs)
    with Watch() as watch:
        watched = step(on_metal, *metal_inputs)
    assert watch.called == {"rotate"} and watch.devices == {"mps"}
    for actual in (watched, step(on_metal, *metal_inputs)):  # without the mode, gradients are computed in another way
        for a, e in zip(actual, expected, strict=True):
            assert (a.cpu().float() - e.float()).abs().max() < ROUNDING[dtype] * e.abs().max()


@pytest.mark.parametrize("make", [flux, qwen_image])
def test_exact_angles_are_computed_on_the_cpu_and_have_its_bits(make, device):
    layer = make().to(device)
    stock = layer.tables_on(device)
    patch(layer, exact_angles=True)
    expected = layer.tables_on("cpu")
    for _ in range(2):
        tables = layer.tables_on(device)
        assert all(t.device.type == "mps" and t.dtype == s.dtype for t, s in zip(tables, stock, strict=True))
        assert all(torch.equal(t.cpu(), e) for t, e in zip(tables, expected, strict=True))
    assert not all(torch.equal(t.cpu(), s.cpu()) for t, s in zip(tables, stock, strict=True))
