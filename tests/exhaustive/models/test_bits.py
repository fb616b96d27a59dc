"""Compares models of each family of transformers, each class of diffusers, and each way in which timm rotates, with
themselves after patch: the outputs, and all gradients of a training step.

tests/integrations tests what patch changes, leaves alone and refuses.
"""

from collections import defaultdict

import pytest
import torch
from diffusion_models import FLOAT32_ONLY, FUSED, NO_GRADIENT, TABLES
from diffusion_models import MODELS as DIFFUSION
from families import CASES as FAMILIES
from layers import rotations as rotations
from models import calls as calls
from pages import compare, listed, said
from torch._dynamo.backends.debugging import aot_eager
from training import cast, close, difference, output, same, train_step
from vision_models import MODELS as VISION
from vision_models import make as make_vision

from torch_rope.frequencies.families import INTERLEAVED
from torch_rope.integrations import _bits, diffusers, timm, transformers

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

# If q and k are rounded in another way, an output and a gradient may differ by these parts of the largest: by three or four
# times what was seen. A model that does not rotate differs by the third number or more.
LIMITS = {
    transformers: {torch.float32: (4e-6, 1.5e-5, 0.05)},
    diffusers: {torch.float32: (4e-6, 1e-4, 0.01)},
    timm: {torch.float32: (2e-6, 7e-6, 0.08), torch.bfloat16: (0.05, 1, 0.08)},
}
# The models that rotate by their own functions, always or in training, and why.
NO_ROTATION = {"ErnieImageTransformer2DModel": "its tables have different angles for the two channels of a pair"}
# The tables of these need a gradient, which is a sum over tokens in another order.
NOT_TRAINED = {"MochiTransformer3DModel", *(name for name in VISION if "mixed" in name)}
# The models whose processors write the rotation out, and call no function that rotates.
REFUSED = ["Cosmos3OmniTransformer", "Ideogram4Transformer2DModel"]
SERVED = [name for name in DIFFUSION if name not in REFUSED]
CASES = {transformers: FAMILIES, diffusers: SERVED, timm: VISION}
CASES = [pytest.param(library, name, id=name) for library, names in CASES.items() for name in names]


def make(name):
    return make_vision(name) if name in VISION else (FAMILIES | DIFFUSION)[name]()


def dtypes_of(library, name, model):
    """Returns the dtypes in which a model works, and those of autocast."""
    if name in FLOAT32_ONLY:
        return [(torch.float32, None)]
    if library is not transformers:
        return [(torch.float32, None), (torch.bfloat16, None)]
    others = [] if any(b.is_complex() for b in model.buffers()) else [(torch.bfloat16, None), (torch.float16, None)]
    return [(torch.float32, None), (torch.float32, torch.bfloat16), *others]


def in_dtype(dtype, model, inputs):
    model = model if dtype == torch.float32 else model.to(dtype)  # which would make a complex table real
    return model, inputs | cast({n: value for n, value in inputs.items() if n not in TABLES}, dtype)


def step(model, inputs):
    trained = any(p.requires_grad for p in model.parameters())
    return train_step(model, inputs, [n for n in inputs if trained and n not in NO_GRADIENT])


def test_the_documentation_lists_the_tested_models():
    classes = defaultdict(set, {"refused: the rotation is written out in the processor": set(REFUSED)})
    for name in SERVED:
        without = [f"computes as without torch_rope, and warns: {NO_ROTATION[name]}"] if name in NO_ROTATION else []
        for call in without or said(diffusers.patch(make(name)[0])):
            classes[call].add(name.split(",")[0])
    compare("integrations/diffusers.md", classes=listed(["what patch says", "classes"], classes))


@pytest.mark.parametrize("name", REFUSED)
def test_a_rotation_that_is_written_out_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"{name} is not patched: .* calls _rotate_half"):
        diffusers.patch(make(name)[0])


@pytest.mark.parametrize("library, name", CASES)
def test_a_patched_model_has_the_bits_of_the_unpatched_model(library, name, rotations, calls):
    """The outputs and all gradients have the same bits in each dtype and under autocast."""
    model, inputs = make(name)
    rotates = name not in NO_ROTATION
    for dtype, autocast in dtypes_of(library, name, model):
        model, inputs = in_dtype(dtype, model, inputs)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            expected = step(model, inputs)
            assert all(t.isfinite().all() for t in expected[0])
            with torch.inference_mode():  # torch 2.15's attention may have other bits there
                inferred = output(model, inputs)
            with library.patch(model) as patched:
                rotations.clear()
                actual = step(model, inputs)
                assert set(rotations) == {rotates and name not in NOT_TRAINED}
                with torch.inference_mode():
                    rotations.clear()
                    calls.clear()
                    assert all(map(torch.equal, output(model, inputs), inferred))
                assert set(rotations) == {rotates}
                operators = {str(operator).split(".")[1] for operator in calls}
                assert operators == {call.split(",")[0] for call in said(patched) if rotates}
                assert "rounded" not in str(patched)
                if library is transformers:
                    assert (name in INTERLEAVED) in {"interleaved" in call for call in said(patched)}
            assert same(actual, expected)
            assert same(step(model, inputs), expected)


@pytest.mark.parametrize("library, name", CASES)
def test_a_model_that_rounds_once_or_is_fused_differs_by_rounding(library, name, rotations, monkeypatch):
    model, inputs = make(name)
    for dtype, (outputs, gradients, broken) in LIMITS[library].items():
        model, inputs = in_dtype(dtype, model, inputs)
        expected = step(model, inputs)
        with library.patch(model, fuse=True) as patched:
            rotations.clear()
            fused = "; fused: " in str(patched)
            assert "; kept apart, " in str(patched) or fused if library is transformers else fused == (name in FUSED)
            if fused:  # all or some layers
                assert close(step(model, inputs), expected, outputs, gradients) and set(rotations) <= {True}
            else:
                assert same(step(model, inputs), expected)
        with library.patch(model, rounding="once") as patched:
            rotations.clear()
            actual = step(model, inputs)
            assert "rounded once" in str(patched) and set(rotations) == {name not in NO_ROTATION}
            learned = [n for n in actual[1] if n.endswith("freqs")]
            assert close(actual, expected, outputs, gradients)
            assert all(difference([actual[1][n]], [expected[1][n]]) < gradients for n in learned)
            if name not in NO_ROTATION:
                with monkeypatch.context() as unrotated:
                    unrotated.setattr(_bits, "_rotate", lambda x, *args, **kwargs: x)
                    unrotated.setattr(_bits, "_rotate_qk", lambda q, k, *args, **kwargs: (q, k))
                    found, found_gradients = step(model, inputs)  # without those of learned frequencies
                wanted = {n: expected[1][n] for n in found_gradients}
                assert difference(found, expected[0]) > broken
                assert not wanted or difference(found_gradients, wanted) > broken


@pytest.mark.parametrize("name", ["attention pool", "dinov3"])
def test_a_compiled_model_of_timm_has_no_graph_breaks(name):
    model, inputs = make(name)
    expected = step(model, inputs)
    timm.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=aot_eager)
    assert close(step(compiled, inputs), expected, *LIMITS[timm][torch.float32][:2])
