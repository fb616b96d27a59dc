"""Tests of patch for every transformer of diffusers that rotates: its bits, and ways to run a patched Flux and Wan.

tests/integrations/test_conventions.py tests what patch changes, leaves alone and refuses.
"""

import copy
from collections import defaultdict

import pytest
import torch
from cases import missing, needed
from layers import counting, unpatched
from layers import rotations as rotations
from pages import compare, listed, said
from training import cast, close, difference, output, same, train_step

diffusers = needed("diffusers")
if not hasattr(diffusers, "Ideogram4Transformer2DModel"):
    missing("diffusers 0.42")

from diffusion_models import FLOAT32_ONLY, MODELS, TABLES  # noqa: E402

from torch_rope import frequencies  # noqa: E402
from torch_rope.integrations import _bits  # noqa: E402
from torch_rope.integrations.diffusers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

# The largest allowed differences, as parts of the largest output and of the largest gradient: about four times the
# largest ones that were seen. A model that does not rotate differs by BROKEN or more.
OUTPUTS, GRADIENTS, BROKEN = 4e-6, 1e-4, 1e-2

# The models that rotate by their own functions, always or in training, and why.
NO_ROTATION = {"ErnieImageTransformer2DModel": "its tables have different angles for the two channels of a pair"}
NOT_TRAINED = {"MochiTransformer3DModel": "its tables need a gradient, which is a sum over tokens in another order"}
# The models with layers that fuse=True fuses.
FUSED = {
    "FluxTransformer2DModel", "ChromaTransformer2DModel", "BriaTransformer2DModel", "LongCatImageTransformer2DModel",
    "OvisImageTransformer2DModel", "WanTransformer3DModel", "WanTransformer3DModel, i2v", "WanVACETransformer3DModel",
    "SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel", "WanAnimateTransformer3DModel",
}  # fmt: skip
# The models whose processors write the rotation out, and call no function that rotates.
REFUSED = ["Cosmos3OmniTransformer", "Ideogram4Transformer2DModel"]
SERVED = [name for name in MODELS if name not in REFUSED]
# The inputs that no gradient is compared of: the camera's is the difference of large numbers.
NO_GRADIENT = {*TABLES, "img_ids", "txt_ids", "image_cond_ids", "camera_conditions"}


def step(model, inputs):
    trained = any(p.requires_grad for p in model.parameters())
    return train_step(model, inputs, [n for n in inputs if trained and n not in NO_GRADIENT])


def test_the_documentation_lists_the_tested_models():
    classes = defaultdict(set, {"refused: the rotation is written out in the processor": set(REFUSED)})
    for name in SERVED:
        without = [f"computes as without torch_rope, and warns: {NO_ROTATION[name]}"] if name in NO_ROTATION else []
        for call in without or said(patch(MODELS[name]()[0])):
            classes[call].add(name.split(",")[0])
    compare("integrations/diffusers.md", classes=listed(["what patch says", "classes"], classes))


@pytest.mark.parametrize("name", SERVED)
def test_a_patched_model_has_the_bits_of_the_unpatched_model(name, rotations):
    """The outputs and all gradients have the same bits, in float32 and bfloat16."""
    model, inputs = MODELS[name]()
    for dtype in [torch.float32] if name in FLOAT32_ONLY else [torch.float32, torch.bfloat16]:
        inputs |= cast({n: value for n, value in inputs.items() if n not in TABLES}, dtype)
        expected = step(model.to(dtype), inputs)
        with torch.inference_mode():  # torch 2.15's attention may have other bits there
            inferred = output(model, inputs)
        with patch(model):
            rotations.clear()  # patch itself tries rotations
            actual = step(model, inputs)
            assert set(rotations) == {not (name in NO_ROTATION or name in NOT_TRAINED)}
            with torch.inference_mode():
                rotations.clear()
                assert all(map(torch.equal, output(model, inputs), inferred))
                assert set(rotations) == {name not in NO_ROTATION}
        assert same(actual, expected)
        assert same(step(model, inputs), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_rotation_that_is_written_out_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"{name} is not patched: .* calls _rotate_half"):
        patch(MODELS[name]()[0])


@pytest.mark.parametrize("name", SERVED)
def test_a_model_that_rounds_once_or_is_fused_differs_by_rounding(name, rotations, monkeypatch):
    model, inputs = MODELS[name]()
    expected = step(model, inputs)
    for options in ({"fuse": True}, {"rounding": "once"}):
        with patch(model, **options) as patched:
            rotations.clear()
            assert close(step(model, inputs), expected, OUTPUTS, GRADIENTS)
            fused = name in FUSED and "fuse" in options
            if name not in NOT_TRAINED:
                assert set(rotations) - {fused} == {name not in NO_ROTATION} - {fused}  # all or some layers are fused
            assert ("rounded once (" in str(patched)) == ("rounding" in options)
            assert ("; fused: " in str(patched)) == fused
            if "rounding" in options and name not in NO_ROTATION:
                monkeypatch.setattr(_bits, "_rotate", lambda x, *args, **kwargs: x)
                monkeypatch.setattr(_bits, "_rotate_qk", lambda q, k, *args, **kwargs: (q, k))
                with torch.no_grad():
                    assert difference(output(model, inputs), expected[0]) > BROKEN


# ---- ways to run Flux and Wan ----


flux, wan = MODELS["FluxTransformer2DModel"], MODELS["WanTransformer3DModel"]
both = pytest.mark.parametrize("make", [flux, wan], ids=["Flux", "Wan"])


@both
@pytest.mark.parametrize("fuse", [False, True])
def test_a_model_under_autocast_with_checkpointing_compiled_and_exported(make, fuse):
    """The norms stay as they are under autocast, torch.compile and torch.export. torch.compile compiles again after
    undo()."""
    model, inputs = make()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, inputs)
        with patch(model, fuse=fuse):
            assert same(step(model, inputs), expected)
    expected, graphs = step(model, inputs), []
    rotations = {flux: 6, wan: 4}[make]  # of q and k of each layer
    with patch(model, fuse=fuse):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counting(graphs))
        assert close(step(compiled, inputs), expected, OUTPUTS, GRADIENTS)
        program = torch.export.export(model, (), inputs)
        assert sum("rope." in str(node.target) for node in program.graph.nodes) == rotations
        assert difference(output(program.module(), inputs), expected[0]) < OUTPUTS
        model.train().enable_gradient_checkpointing()
        assert close(step(model, inputs), expected, OUTPUTS, GRADIENTS)
        model.eval().disable_gradient_checkpointing()
    assert difference(output(compiled, inputs), expected[0]) < OUTPUTS
    assert graphs == [rotations, 0]
    if make is wan:
        with patch(model, fuse=fuse):
            model.compile_repeated_blocks(fullgraph=True, backend=counting(graphs))
            assert difference(output(model, inputs), expected[0]) < OUTPUTS
        assert graphs[2:] == [2]  # once for all blocks


def add_adapter(model):
    config = needed("peft").LoraConfig(target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False, r=2)
    torch.manual_seed(0)
    model.add_adapter(config)


@both
@pytest.mark.parametrize("change", [add_adapter, lambda model: model.fuse_qkv_projections()], ids=["LoRA", "qkv"])
def test_adapters_and_fused_projections_may_be_added_before_or_after(make, change, rotations):
    results, (model, inputs) = [], make()
    for steps in ([change], [change, patch], [patch, change]):
        changed = copy.deepcopy(model)
        for apply in steps:
            apply(changed)
        rotations.clear()
        results.append(step(changed, inputs))
        assert len(steps) == 1 or set(rotations) == {True}
    assert same(results[1], results[0]) and same(results[2], results[0])


def test_a_pipeline_is_patched_with_all_its_models():
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    pipe = diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=vae, transformer=wan()[0],
        transformer_2=wan()[0], scheduler=diffusers.FlowMatchEulerDiscreteScheduler())  # fmt: skip
    with patch(pipe) as patched:
        for name in ("transformer", "transformer_2"):
            assert f"  {name}.blocks.*.attn1.processor of 2 WanAttnProcessor" in str(patched)
    assert unpatched(pipe.transformer) and unpatched(pipe.transformer_2)


# ---- exact angles ----


def qwen_tables(model):
    tables = torch.cat(model.pos_embed([(1, 1, 8000)], device=torch.device("cpu"), max_txt_seq_len=9))
    image = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(8000)) - torch.tensor([0, 1, 4000])
    ids = torch.cat([image, torch.arange(4000, 4009)[:, None].repeat(1, 3)])
    inv_freqs = [10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim) for dim in (8, 12, 12)]
    return torch.view_as_real(tables), torch.cat(list(map(torch.outer, ids.double().unbind(-1), inv_freqs)), -1)


def ltx_tables(model):
    tables = model.rope(torch.empty(1, 9, 4), 1, 1, 9, (1 / 3, 32.0, 700.0))
    ids = torch.stack([torch.zeros(9), torch.zeros(9), torch.arange(9) * 700 / 2048], -1).double()
    steps = 10000 ** torch.linspace(0, 1, 10, dtype=torch.float64) * torch.pi / 2
    # 64 channels are no multiple of 6, so the first 4 do not rotate. Each number stands twice.
    return torch.stack(tables, -1)[0, :, 4::2], (steps * (ids[..., None] * 2 - 1)).transpose(-1, -2).flatten(1)


@pytest.mark.parametrize("name, tables_of", [("QwenImage", qwen_tables), ("LTXVideo", ltx_tables)])
def test_exact_angles(name, tables_of, monkeypatch):
    """The tables are those of a float64 formula: for every dtype of the model, under autocast and without float64."""
    model, _ = next(make for key, make in MODELS.items() if key.startswith(name))()

    def ulps():
        tables, angle = tables_of(model)
        assert tables.dtype == torch.float32
        return (tables - torch.stack([angle.cos(), angle.sin()], -1)).abs().max().item() * 2**24

    assert ulps() > 8
    with patch(model, exact_angles=True):
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert ulps() <= 1
        model.to(torch.bfloat16)
        assert ulps() <= 1
        monkeypatch.setattr(frequencies, "has_float64", lambda device: False)
        assert ulps() <= 1
    with patch(model, exact_angles=True):  # the model was cast before
        assert ulps() <= 1
