"""Tests of patch for every transformer of diffusers that rotates: its bits, and ways to run a patched Flux and Wan.

tests/integrations/test_conventions.py tests what patch changes, leaves alone and refuses.
"""

import copy
import re

import pytest
import torch
from cases import ROOT, missing, needed
from test_conventions import counting, unpatched
from test_conventions import rotations as rotations

diffusers = needed("diffusers")
if not hasattr(diffusers, "Ideogram4Transformer2DModel"):
    missing("diffusers 0.42")

from diffusion_models import FLOAT32_ONLY, FORWARD_ONLY, MODELS, TABLES, output, to  # noqa: E402

from torch_rope.integrations import _rotation  # noqa: E402
from torch_rope.integrations.diffusers import angles, patch  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("examine_once")]

# The largest allowed differences, as parts of the largest output and of the largest gradient: about four times the
# largest ones that were seen.
OUTPUTS, GRADIENTS = 4e-6, 1e-4
BROKEN = 1e-2  # a model that does not rotate differs by more

# The models that rotate by their own functions, always or in training, and why.
NO_ROTATION = {"ErnieImageTransformer2DModel": "its tables have different angles for the two channels of a pair"}
NOT_TRAINED = {"MochiTransformer3DModel": "its tables need a gradient, which is a sum over tokens in another order"}
# The models whose gradients differ by rounding, and why.
OTHER_ORDER = {"Cosmos3OmniTransformer": "k is rotated twice, and autograd adds its gradients in another order"}
# The inputs that no gradient is compared of: the camera's is the difference of large numbers.
NO_GRADIENT = {*TABLES, "img_ids", "txt_ids", "image_cond_ids", "camera_conditions"}


def floats(value):
    """Yields the floating-point tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        yield from [value] * value.is_floating_point()
    elif isinstance(value, list):
        for v in value:
            yield from floats(v)


def train_step(model, inputs, name=""):
    """Does a training step and returns (outputs, gradients of the parameters and of the inputs)."""
    model.zero_grad()
    inputs = copy.deepcopy(inputs)
    if name in FORWARD_ONLY:
        return output(model, inputs), {}
    leaves = {f"{n} {i}": x for n, v in inputs.items() if n not in NO_GRADIENT for i, x in enumerate(floats(v))}
    for x in leaves.values():
        x.requires_grad_()
    outputs = output(model, inputs)
    # Each output gets another gradient.
    sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in outputs).backward()
    leaves |= {n.replace("_orig_mod.", ""): p for n, p in model.named_parameters()}
    return [x.detach() for x in outputs], {n: x.grad for n, x in leaves.items() if x.grad is not None}


def same(actual, expected):
    """Returns whether outputs and gradients have the same bits."""
    assert actual[1].keys() == expected[1].keys()
    return all(map(torch.equal, actual[0], expected[0])) and all(
        torch.equal(actual[1][n], x) for n, x in expected[1].items()
    )


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value of all tensors."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = ([d[n] for n in expected] for d in (actual, expected))
    if not expected:
        return 0.0
    actual, expected = (torch.cat([x.flatten().double() for x in tensors]) for tensors in (actual, expected))
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def test_the_documentation_lists_the_tested_models():
    page = (ROOT / "docs" / "integrations" / "diffusers.md").read_text()
    listed = re.findall(r"\w+", "".join(re.findall(r"^\| (\w+(?:Model|Transformer)\b[^|]*)\|", page, re.M)))
    assert sorted(listed) == sorted({name.split(",")[0] for name in MODELS})


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_has_the_bits_of_the_unpatched_model(name, rotations):
    """The outputs and all gradients have the same bits, in float32 and bfloat16."""
    model, inputs = MODELS[name]()
    for dtype in (torch.float32, torch.bfloat16):
        if dtype != torch.float32:
            if name in FLOAT32_ONLY:
                continue
            model, inputs = model.to(dtype), to(inputs, dtype)
        expected = train_step(model, inputs, name)
        with torch.inference_mode():  # torch 2.15's attention may have other bits there
            inferred = output(model, copy.deepcopy(inputs))
        with patch(model):
            rotations.clear()  # patch itself tries rotations
            actual = train_step(model, inputs, name)
            assert set(rotations) == {not (name in NO_ROTATION or name in NOT_TRAINED)}
            with torch.inference_mode():
                rotations.clear()
                assert all(map(torch.equal, output(model, copy.deepcopy(inputs)), inferred))
                assert set(rotations) == {name not in NO_ROTATION}
        if name in OTHER_ORDER:
            assert all(map(torch.equal, actual[0], expected[0]))
            assert difference(actual[1], expected[1]) < 2 * torch.finfo(dtype).eps
        else:
            assert same(actual, expected)
        assert same(train_step(model, inputs, name), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_rounds_once_or_is_fused_differs_by_rounding(name, rotations, monkeypatch):
    model, inputs = MODELS[name]()
    expected = train_step(model, inputs, name)
    for options in ({"fuse": True}, {"rounding": "once"}):
        with patch(model, **options) as handle:
            rotations.clear()
            actual = train_step(model, inputs, name)
            if name not in NOT_TRAINED:
                assert set(rotations) == {name not in NO_ROTATION}
            assert difference(actual[0], expected[0]) < OUTPUTS
            assert difference(actual[1], expected[1]) < GRADIENTS
            assert bool(re.search("rounded once(;|$)", str(handle), re.M)) == ("rounding" in options)
            if "rounding" in options and name not in NO_ROTATION:
                monkeypatch.setattr(_rotation, "_rotate", lambda x, *args, **kwargs: x)
                monkeypatch.setattr(_rotation, "_rotate_qk", lambda q, k, *args, **kwargs: (q, k))
                with torch.no_grad():
                    assert difference(output(model, copy.deepcopy(inputs)), expected[0]) > BROKEN


# ---- ways to run Flux and Wan ----


def wan():
    return MODELS["WanTransformer3DModel"]()


def flux():
    return MODELS["FluxTransformer2DModel"]()


@torch.no_grad()
def out(model, inputs):
    return output(model, inputs)[0]


both = pytest.mark.parametrize("make", [flux, wan])


@both
@pytest.mark.parametrize("fuse", [False, True])
def test_autocast_and_checkpointing(make, fuse):
    """Under autocast the norms stay as they are, so the bits are the same with fuse too."""
    model, inputs = make()
    with torch.autocast("cpu", torch.bfloat16):
        expected = train_step(model, inputs)
        with patch(model, fuse=fuse):
            assert same(train_step(model, inputs), expected)
    model.train().enable_gradient_checkpointing()
    expected = train_step(model, inputs)
    with patch(model, fuse=fuse):
        actual = train_step(model, inputs)
        assert difference(actual[1], expected[1]) < GRADIENTS if fuse else same(actual, expected)


@both
@pytest.mark.parametrize("fuse", [False, True])
def test_a_patched_model_compiles_to_one_graph_and_is_exported(make, fuse):
    """The norms stay as they are there. torch.compile compiles again after undo()."""
    model, inputs = make()
    expected, graphs = train_step(model, inputs), []
    rotations = {flux: 6, wan: 4}[make]  # of q and k of each layer
    with patch(model, fuse=fuse):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counting(graphs))
        actual = train_step(compiled, inputs)
        assert difference(actual[0], expected[0]) < OUTPUTS and difference(actual[1], expected[1]) < GRADIENTS
        program = torch.export.export(model, (), inputs)
        assert sum("rope." in str(node.target) for node in program.graph.nodes) == rotations
        assert difference([out(program.module(), inputs)], expected[0]) < OUTPUTS
    assert difference([out(compiled, inputs)], expected[0]) < OUTPUTS
    assert graphs == [rotations, 0]
    if make is wan:
        with patch(model, fuse=fuse):
            model.compile_repeated_blocks(fullgraph=True, backend=counting(graphs))
            assert difference([out(model, inputs)], expected[0]) < OUTPUTS
        assert graphs[2:] == [2]  # once for all blocks


@both
def test_adapters_and_fused_projections_may_be_added_before_or_after(make, rotations):
    peft = needed("peft")
    config = peft.LoraConfig(target_modules=["to_q", "to_k", "to_v", "norm_q_or_none"], init_lora_weights=False, r=2)

    def add_adapter(model):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.add_adapter(config)

    for change in (lambda model: model.fuse_qkv_projections(), add_adapter):
        results, (model, inputs) = [], make()
        for steps in ([change], [change, patch], [patch, change]):
            changed = copy.deepcopy(model)
            for step in steps:
                step(changed)
            rotations.clear()
            results.append(train_step(changed, inputs))
            assert len(steps) == 1 or (rotations and all(rotations))
        assert same(results[1], results[0]) and same(results[2], results[0])
    assert any("lora" in name for name in results[0][1])


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "hooks first"])
def test_hooks_of_accelerate_may_be_added_before_or_after(patch_first):
    hooks = needed("accelerate.hooks")
    model, inputs = MODELS["SanaWMTransformer3DModel"]()  # its attention layers have no processors
    expected, seen = out(model, inputs), []

    class Hook(hooks.ModelHook):
        def post_forward(self, module, output):
            seen.append(type(module).__name__)
            return output

    handle = patch(model) if patch_first else None
    for module in model.modules():
        hooks.add_hook_to_module(module, Hook())
    handle = handle or patch(model)
    assert torch.equal(out(model, inputs), expected) and seen
    hooks.remove_hook_from_submodules(model)
    handle.undo()
    assert unpatched(model) and torch.equal(out(model, inputs), expected)


# ---- pipelines ----


def test_a_pipeline_is_patched_with_all_its_models(rotations):
    """Its text encoder, which rotates too, stays as it is."""
    config = needed("transformers").Qwen2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
        num_key_value_heads=2, intermediate_size=8)  # fmt: skip
    text_encoder = needed("transformers").Qwen2Model(config)
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    pipe = diffusers.WanPipeline(tokenizer=None, text_encoder=text_encoder, vae=vae, transformer=wan()[0],
        transformer_2=wan()[0], scheduler=diffusers.FlowMatchEulerDiscreteScheduler())  # fmt: skip

    @torch.no_grad()
    def video():
        return pipe(prompt_embeds=torch.ones(1, 5, 16), negative_prompt_embeds=torch.zeros(1, 5, 16), height=32, width=32,
            num_frames=5, num_inference_steps=2, output_type="latent", generator=torch.Generator().manual_seed(0))[0]  # fmt: skip

    expected = video()
    with patch(pipe) as handle:
        for transformer in ("transformer", "transformer_2"):
            assert f"  {transformer}.blocks.*.attn1.processor of 2 WanAttnProcessor" in str(handle)
        assert unpatched(text_encoder)
        rotations.clear()
        assert torch.equal(video(), expected) and rotations and all(rotations)
    assert unpatched(pipe.transformer) and unpatched(pipe.transformer_2)


# ---- exact angles ----


def frequencies(dim, theta=10000.0):
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def by_axis(positions, dims, theta=10000.0):
    """Returns the angles of positions [.., axes] in float64, [.., pairs]."""
    parts = [p[..., None].double() * frequencies(d, theta) for p, d in zip(positions.unbind(-1), dims, strict=True)]
    return torch.cat(parts, -1)


def cos_sin(angle):
    """Returns cos and sin with each number twice."""
    angle = angle.repeat_interleave(2, -1)
    return [angle.cos(), angle.sin()]


def points(*sizes):
    return torch.cartesian_prod(*map(torch.arange, sizes))


def flux_tables(model):
    ids = torch.tensor([[0.0, 69857, 3], [1, 2, 99999]])
    return model.pos_embed(ids), cos_sin(by_axis(ids, (8, 12, 12)))


def qwen_tables(model):
    image, text = model.pos_embed([(1, 1, 8000)], device=torch.device("cpu"), max_txt_seq_len=9)
    ids = points(1, 1, 8000) - torch.tensor([0, 1, 4000])
    angle = torch.cat([by_axis(ids, (8, 12, 12)), by_axis(torch.arange(4000, 4009)[:, None].repeat(1, 3), (8, 12, 12))])
    return torch.view_as_real(torch.cat([image, text])), [torch.stack([angle.cos(), angle.sin()], -1)]


def ltx_tables(model):
    cos, sin = model.rope(torch.empty(1, 9, 4), 1, 1, 9, (1 / 3, 32.0, 700.0))
    grid = torch.stack([torch.zeros(9), torch.zeros(9), torch.arange(9) * 700 / 2048], -1).double()
    steps = 10000 ** torch.linspace(0, 1, 10, dtype=torch.float64) * torch.pi / 2
    expected = cos_sin((steps * (grid[..., None] * 2 - 1)).transpose(-1, -2).flatten(1))
    # 64 channels are no multiple of 6, so the first 4 do not rotate.
    return (cos[..., 4:], sin[..., 4:]), [t[None] for t in expected]


# The tables of each model, those of a float64 formula, and whether the model's own are as good.
TABLES_OF = {
    "FluxTransformer2DModel": (flux_tables, True),
    "QwenImageTransformer2DModel": (qwen_tables, False),
    "LTXVideoTransformer3DModel": (ltx_tables, False),
}


@pytest.mark.parametrize("name", TABLES_OF)
def test_exact_angles(name, monkeypatch):
    """The tables are those of a float64 formula: for every dtype of the model, under autocast and without float64."""
    model, inputs = MODELS[name]()
    tables_of, is_exact = TABLES_OF[name]

    def ulps():
        tables, expected = tables_of(model)
        tables = [tables] if isinstance(tables, torch.Tensor) else tables
        assert all(t.dtype == torch.float32 and t.shape == e.shape for t, e in zip(tables, expected, strict=True))
        return max(((t - e).abs().max() * 2**24).item() for t, e in zip(tables, expected, strict=True))

    assert (ulps() <= 8) == is_exact
    before = out(model, inputs)
    with patch(model, exact_angles=True):
        assert ulps() <= 1
        assert torch.equal(out(model, inputs), before) or not is_exact
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert ulps() <= 1
        model.to(torch.bfloat16)
        assert ulps() <= 1
        monkeypatch.setattr(angles, "has_float64", lambda device: False)
        assert ulps() <= 1
        monkeypatch.undo()
    with patch(model, exact_angles=True):  # the model was cast before
        assert ulps() <= 1
