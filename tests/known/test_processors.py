"""Compares each form of diffusers' processors with their own methods, and changes norms after patch."""

import pytest
import torch
from cases import needed

needed("diffusers")

from known.processors import check  # noqa: E402  first, because it knows where the next modules are

from diffusion_models import FUSED, MODELS, TABLES  # noqa: E402  isort: skip
from training import cast, difference, output  # noqa: E402  isort: skip

from torch_rope.integrations.diffusers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

# The largest allowed differences of the results and of the gradients, as parts of the largest.
LIMITS = {torch.float32: (4e-6, 1e-4), torch.bfloat16: (0.02, 0.05)}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_form_computes_what_the_processor_computes(name, dtype):
    """In bfloat16, the q and k that attention is given differ in one of 10,000 elements at most."""
    model, inputs = MODELS[name]()
    inputs |= cast({n: value for n, value in inputs.items() if n not in TABLES}, dtype)
    lines = [line[2:] for line in check(model.to(dtype), inputs)]
    elements, differing, *largest = zip(*lines, strict=True)
    assert all(max(d) < limit for d, limit in zip(largest, LIMITS[dtype], strict=True))
    assert dtype == torch.float32 or sum(differing) * 10_000 <= sum(elements)


@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "HunyuanVideoTransformer3DModel", "WanTransformer3DModel"])
def test_a_fused_model_may_round_once(name):
    model, inputs = MODELS[name]()
    exact, errors = output(model, inputs), {}
    inputs |= cast({n: value for n, value in inputs.items() if n not in TABLES}, torch.bfloat16)
    for rounding in ("eager", "once"):
        with patch(model.to(torch.bfloat16), fuse=True, rounding=rounding) as patched:
            assert ("rounded once" in str(patched)) == (rounding == "once") and "; fused: " in str(patched)
            errors[rounding] = difference(output(model, inputs), exact)
    assert errors["once"] != errors["eager"] and errors["once"] < 1.5 * errors["eager"] < 0.1


CHANGES = {
    "a hook": lambda attn, patches: attn.norm_k.register_forward_hook(lambda norm, args, y: 2 * y),
    "another module": lambda attn, patches: setattr(attn, "norm_k", torch.nn.Identity()),
    "another forward": lambda attn, patches: setattr(attn.norm_k, "forward", lambda x: 2 * x),
    "another forward of its class": lambda attn, patches: patches.setattr(type(attn.norm_k), "forward", lambda m, x: 2 * x),
    "no weight": lambda attn, patches: attn.norm_k.register_parameter("weight", None),
    "another eps": lambda attn, patches: setattr(attn.norm_k, "eps", 1.0),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel"])
def test_a_norm_that_changes_after_patch_is_called(name, change, monkeypatch):
    model, inputs = MODELS[name]()
    before = output(model, inputs)
    with patch(model, fuse=True) as patched:
        for attn in [m for m in model.modules() if hasattr(m, "norm_k")]:
            CHANGES[change](attn, monkeypatch)
        actual = output(model, inputs)
        patched.undo()
        assert all(map(torch.equal, actual, output(model, inputs))) and difference(actual, before) > 0.01


def test_what_is_not_in_the_table_is_kept_apart():
    model, inputs = MODELS["MotifVideoTransformer3DModel"]()
    printed = str(patch(model, fuse=True))
    assert printed.count("; fused: the norms of q and k, and the rotation") == 2
    assert (
        "MotifVideoCrossAttnProcessor2_0: " in printed
        and printed.count("kept apart, because its text is not known") == 1
    )
