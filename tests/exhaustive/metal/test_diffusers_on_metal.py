"""Tests that models of diffusers rotate on Metal, which has no float64 and is slow with complex numbers.

On a Mac these tests run on the GPU.
"""

import sys

import pytest
import torch
from cases import ROOT, needed
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

needed("diffusers")
sys.path.append(str(ROOT / "tests/exhaustive/models"))
from diffusion_models import MODELS  # noqa: E402
from training import cast, close, train_step  # noqa: E402

from torch_rope.integrations.diffusers import patch  # noqa: E402

FAR = torch.cartesian_prod(torch.arange(7), torch.tensor([1023]), torch.tensor([2047]))
# The models, and what their modules of tables are called with.
NAMES = {
    "FluxTransformer2DModel": lambda device: (FAR.to(device),),
    "QwenImageTransformer2DModel": lambda device: ([(1, 2, 2)], torch.device(device), 3),
}
# The largest allowed differences from the CPU, as parts of the largest element.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 0.03}


@pytest.fixture(autouse=True)
def _on_metal(device, monkeypatch):
    # The simulated device has no scaled_dot_product_attention, so its formula takes its place.
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


def attention(query, key, value, attn_mask=None, **_):
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return (scores if attn_mask is None else scores.where(attn_mask, -torch.inf)).softmax(-1) @ value


class Watch(TorchDispatchMode):
    """Fails if an operator computes with complex numbers or in float64. Parts of complex tables may be put together.

    Attributes:
        called: the operators of torch_rope that were called.
        devices: the devices of their tensors.
    """

    def __init__(self):
        super().__init__()
        self.called, self.devices = set(), set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if torch.is_tensor(t) and t.device.type == "mps"]
        if not operator.is_view and operator.overloadpacket.__name__ not in ("_to_copy", "cat", "clone"):
            assert not any(t.is_complex() or t.dtype == torch.float64 for t in tensors), operator
        if operator.namespace == "rope":
            self.called.add(operator.overloadpacket.__name__)
            self.devices.update(t.device.type for t in tensors)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_rotates_without_complex_numbers_and_float64(name, dtype, device):
    (model, inputs), (on_metal, _) = MODELS[name](), MODELS[name]()
    for each in (model.to(dtype), on_metal.to(dtype).to(device)):
        patch(each)
    inputs = cast(inputs, dtype)
    metal_inputs = tree_map_only(torch.Tensor, lambda t: t.to(device), inputs)
    expected = train_step(model, inputs)
    with Watch() as watch:
        watched = train_step(on_metal, metal_inputs)
    assert watch.called == {"rotate"} and watch.devices == {"mps"}
    for actual in (watched, train_step(on_metal, metal_inputs)):  # without the mode, gradients take another way
        on_cpu = tree_map_only(torch.Tensor, torch.Tensor.cpu, actual)
        assert close(on_cpu, expected, ROUNDING[dtype], ROUNDING[dtype])


@pytest.mark.parametrize("name, arguments", NAMES.items(), ids=NAMES)
def test_exact_angles_are_computed_on_the_cpu_and_have_its_bits(name, arguments, device):
    model, _ = MODELS[name]()
    stock = model.pos_embed(*arguments(device))
    patch(model, exact_angles=True)
    expected = model.pos_embed(*arguments("cpu"))
    for _ in range(2):
        tables = model.pos_embed(*arguments(device))
        assert all(t.device.type == "mps" and t.dtype == s.dtype for t, s in zip(tables, stock, strict=True))
        assert all(torch.equal(t.cpu(), e) for t, e in zip(tables, expected, strict=True))
    assert not all(torch.equal(t.cpu(), s.cpu()) for t, s in zip(tables, stock, strict=True))
