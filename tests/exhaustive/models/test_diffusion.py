"""Tests ways to run a patched Flux and Wan, and exact angles of models of diffusers.

test_bits.py tests the bits of every model, and tests/integrations/test_conventions.py what patch changes and refuses.
"""

import copy

import pytest
import torch
from cases import needed
from layers import counting, unpatched
from layers import rotations as rotations
from training import close, difference, output, same, train_step

diffusers = needed("diffusers")

from diffusion_models import MODELS, NO_GRADIENT  # noqa: E402

from torch_rope import frequencies  # noqa: E402
from torch_rope.integrations.diffusers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

# The largest allowed differences, as parts of the largest output and of the largest gradient.
OUTPUTS, GRADIENTS = 4e-6, 1e-4


def step(model, inputs):
    return train_step(model, inputs, [n for n in inputs if n not in NO_GRADIENT])


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
