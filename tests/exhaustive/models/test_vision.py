"""Tests of patch for every way in which timm rotates: the bits of the results and of the gradients.

tests/integrations tests what patch changes, leaves alone and refuses.
"""

import pytest
import torch
from layers import rotations as rotations
from torch._dynamo.backends.debugging import aot_eager
from training import cast, close, difference, output, same, train_step
from vision_models import MODELS, make, timm

from torch_rope.integrations.timm import patch

pytestmark = [pytest.mark.cpu]

# The largest allowed differences, as parts of the largest output and of the largest gradient, if q and k are rounded in
# another way. They are three times those that were seen. A model that does not rotate differs by BROKEN or more.
OUTPUTS, OF_BFLOAT16, GRADIENTS, BROKEN = 2e-6, 0.05, 7e-6, 0.08


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_has_the_bits_or_differs_by_rounding(name, rotations, monkeypatch):
    model, inputs = make(name)
    expected, inferred = train_step(model, inputs), output(model, inputs)
    with patch(model):
        rotations.clear()  # patch itself tries rotations
        assert same(train_step(model, inputs), expected)
        assert set(rotations) == {"mixed" not in name}  # tables of frequencies that are trained go to timm's function
        rotations.clear()
        with torch.no_grad():
            assert torch.equal(output(model, inputs)[0], inferred[0]) and set(rotations) == {True}
    with patch(model, fuse=True):  # norms stay as they are before prefix tokens are taken out
        assert same(train_step(model, inputs), expected)
    with patch(model, rounding="once"):
        rotations.clear()
        actual = train_step(model, inputs)
        assert close(actual, expected, OUTPUTS, GRADIENTS) and set(rotations) == {True}
        for freqs in (n for n in expected[1] if n.endswith("freqs")):
            assert difference([actual[1][freqs]], [expected[1][freqs]]) < GRADIENTS
    with monkeypatch.context() as broken:
        broken.setattr(timm.layers.pos_embed_sincos, "apply_rot_embed", lambda x, *tables, half=False: x)
        assert difference(output(model, inputs), inferred) > BROKEN
    model, inputs = model.to(torch.bfloat16), cast(inputs, torch.bfloat16)
    expected = train_step(model, inputs)
    with patch(model):
        assert same(train_step(model, inputs), expected)
    assert same(train_step(model, inputs), expected)
    patch(model, rounding="once")
    assert difference(output(model, inputs), expected[0]) < OF_BFLOAT16


@pytest.mark.parametrize("name", ["attention pool", "dinov3"])
def test_a_compiled_model_has_no_graph_breaks(name):
    model, inputs = make(name)
    expected = train_step(model, inputs)
    patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=aot_eager)
    assert close(train_step(compiled, inputs), expected, OUTPUTS, GRADIENTS)
