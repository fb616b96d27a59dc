"""Tests of patch for diffusers: the bits of every model, and what patch changes, leaves alone and refuses."""

import contextlib
import copy
import io
import pickle
import re

import pytest
import torch
from cases import missing, needed
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

diffusers = needed("diffusers")
if not hasattr(diffusers, "Ideogram4Transformer2DModel"):
    missing("diffusers 0.42")

from diffusion_models import FLOAT32_ONLY, FORWARD_ONLY, MODELS, TABLES, output, to  # noqa: E402
from diffusers.models.embeddings import apply_rotary_emb  # noqa: E402

from torch_rope.integrations import _rotation  # noqa: E402
from torch_rope.integrations._conventions import ConventionFunction, ConventionRebuilder, ConventionRotator  # noqa: E402
from torch_rope.integrations._put_off import PutOff, norm_of, put_off  # noqa: E402
from torch_rope.integrations.diffusers import angles, patch, register  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]

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
    leaves |= dict(model.named_parameters())
    return [x.detach() for x in outputs], {n: x.grad for n, x in leaves.items() if x.grad is not None}


def same(actual, expected):
    """Returns whether outputs and gradients have the same bits."""
    return all(map(torch.equal, actual[0], expected[0])) and same_tensors(actual[1], expected[1])


def same_tensors(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[n], x) for n, x in expected.items())


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value of all tensors."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = ([d[n] for n in expected] for d in (actual, expected))
    if not expected:
        return 0.0
    actual, expected = (torch.cat([x.flatten().double() for x in tensors]) for tensors in (actual, expected))
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture
def rotations(monkeypatch):
    """A list that says of each rotary function that is called in a patched model whether torch_rope rotates."""
    found, try_to_rotate = [], ConventionRotator.try_to_rotate

    def record(self, *args):
        ys = try_to_rotate(self, *args)
        found.append(ys is not None)
        return ys

    monkeypatch.setattr(ConventionRotator, "try_to_rotate", record)
    return found


EXAMINED = {}


@pytest.fixture
def examine_once(monkeypatch):
    """Lets each function be examined once for all models, which takes most of the time."""

    def examine(self, function):
        key = function, self.rounding
        if key not in EXAMINED:
            EXAMINED[key] = ConventionFunction(function, self.conventions, self.rounding)
        new = copy.copy(EXAMINED[key])
        new.rotator = copy.copy(new.rotator)
        return new

    monkeypatch.setattr(ConventionRebuilder, "_examine", examine)


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_has_the_bits_of_the_unpatched_model(name, rotations, examine_once, monkeypatch):
    """The outputs and all gradients have the same bits, in float32 and bfloat16."""
    model, inputs = MODELS[name]()
    for dtype in (torch.float32, torch.bfloat16):
        if dtype != torch.float32:
            if name in FLOAT32_ONLY:
                continue
            model, inputs = model.to(dtype), to(inputs, dtype)
        expected = train_step(model, inputs, name)
        with patch(model):
            rotations.clear()  # patch itself tries rotations
            actual = train_step(model, inputs, name)
            assert set(rotations) == {not (name in NO_ROTATION or name in NOT_TRAINED)}
            with torch.inference_mode():
                rotations.clear()
                assert all(map(torch.equal, output(model, copy.deepcopy(inputs)), expected[0]))
                assert set(rotations) == {name not in NO_ROTATION}
        if name in OTHER_ORDER:
            assert all(map(torch.equal, actual[0], expected[0]))
            assert difference(actual[1], expected[1]) < 2 * torch.finfo(dtype).eps
        else:
            assert same(actual, expected)
        assert same(train_step(model, inputs, name), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_rounds_once_or_is_fused_differs_by_rounding(name, rotations, examine_once, monkeypatch):
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


# ---- What patch changes ----


def wan():
    return MODELS["WanTransformer3DModel"]()


def flux():
    return MODELS["FluxTransformer2DModel"]()


@torch.no_grad()
def out(model, inputs):
    return output(model, inputs)[0]


def processors(model):
    return [module.processor for module in model.modules() if hasattr(module, "processor")]


def unpatched(model):
    """Returns whether no module and no processor of a model was replaced."""
    return not any("_torch_rope" in str(vars(module)) for module in model.modules()) and not any(
        hasattr(type(p).__call__, "_torch_rope") for p in processors(model)
    )


def test_patch_and_undo_change_only_this_model(rotations):
    model, inputs = flux()
    other = copy.deepcopy(model)
    expected = out(model, inputs)
    for module, its in zip(model.modules(), other.modules(), strict=True):
        if hasattr(module, "processor"):
            its.processor = module.processor  # two models may share their processors
    before = processors(model)
    handle = patch(model)
    rotations.clear()
    assert torch.equal(out(other, inputs), expected) and torch.equal(out(flux()[0], inputs), expected)
    assert not rotations and unpatched(other)
    assert torch.equal(out(model, inputs), expected) and len(rotations) == 4  # q and k of two layers
    handle.undo()
    assert torch.equal(out(model, inputs), expected) and len(rotations) == 4
    assert all(a is b for a, b in zip(processors(model), before, strict=True)) and unpatched(model)


def test_the_handle_lists_what_it_replaced():
    model, _ = flux()
    handle = patch(model)
    assert str(handle).splitlines() == [
        "torch_rope in FluxTransformer2DModel:",
        "  transformer_blocks.*.attn.processor of 1 FluxAttnProcessor: "
        "apply_rotary_emb is torch.ops.rope.rotate, interleaved or half-split",
        "  single_transformer_blocks.*.attn.processor of 1 FluxAttnProcessor: "
        "apply_rotary_emb is torch.ops.rope.rotate, interleaved or half-split",
    ]
    handle.undo()
    assert str(handle) == "torch_rope is not in FluxTransformer2DModel any more"


def test_the_handle_lists_what_is_fused_and_what_is_exact():
    model, _ = flux()
    handle = str(patch(model, rounding="once", fuse=True, exact_angles=True))
    assert "half-split, rounded once; norm_q, norm_k in norm_rotate_qk, if only views stand between" in handle
    assert "pos_embed.forward of 1 FluxPosEmbed: exact angles, by its own formula in float64" in handle


def test_patch_is_a_context_manager_and_undo_may_be_called_twice():
    model, _ = flux()
    with patch(model) as handle:
        assert not unpatched(model)
    assert unpatched(model)
    handle.undo()


def test_a_patched_model_says_what_is_there():
    model, _ = flux()
    handle = patch(model)
    assert patch(model) is handle
    for options in ({"rounding": "once"}, {"fuse": True}, {"exact_angles": True}):
        with pytest.raises(ValueError, match=r"(?s)already calls torch_rope.*What is there: .*attn.processor of 1"):
            patch(model, **options)
    with pytest.raises(ValueError, match="What is there: apply_rotary_emb is torch.ops.rope.rotate"):
        patch(model.transformer_blocks[0])
    handle.undo()
    assert patch(model) is not handle


def test_patch_leaves_weights_and_the_random_state_alone_and_a_copy_stays_patched(rotations):
    model, inputs = flux()
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    handle = patch(model)
    assert torch.equal(torch.get_rng_state(), generator) and same_tensors(model.state_dict(), state)
    copied = copy.deepcopy(model)
    assert not {*map(id, processors(model))} & {*map(id, processors(copied))}
    expected = out(model, inputs)
    handle.undo()
    rotations.clear()
    assert torch.equal(out(copied, inputs), expected) and len(rotations) == 4
    with pytest.raises(ValueError, match="the model that it was copied from"):
        patch(copied)


def test_a_pickled_model_is_not_patched_and_can_be_patched(rotations):
    model, inputs = flux()
    patch(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = out(model, inputs)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        rotations.clear()
        assert torch.equal(out(loaded, inputs), expected)
        assert not rotations and unpatched(loaded)
        with patch(loaded):
            rotations.clear()
            assert torch.equal(out(loaded, inputs), expected) and len(rotations) == 4
    processor = pickle.loads(pickle.dumps(processors(model)[0]))
    assert type(processor) is diffusers.models.transformers.transformer_flux.FluxAttnProcessor


def test_a_patched_model_can_be_saved_and_loaded(tmp_path):
    model, inputs = flux()
    patch(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert unpatched(loaded) and torch.equal(out(loaded, inputs), out(model, inputs))


def test_undo_names_the_processor_that_was_replaced_since():
    model, _ = flux()
    handle = patch(model)
    attention = model.transformer_blocks[0].attn
    ours = attention.processor
    attention.set_processor(type(ours)())
    with pytest.raises(RuntimeError, match="transformer_blocks.0.attn.processor was replaced after it was patched"):
        handle.undo()
    assert hasattr(type(model.single_transformer_blocks[0].attn.processor).__call__, "_torch_rope")
    attention.set_processor(ours)
    handle.undo()
    assert unpatched(model)


def test_undo_keeps_the_state_that_a_processor_was_given_since():
    model, inputs = flux()
    expected = out(model, inputs)
    handle = patch(model)
    model.set_attention_backend("_native_math")
    handle.undo()
    assert {p._attention_backend for p in processors(model)} == {"_native_math"}
    torch.testing.assert_close(out(model, inputs), expected)


@pytest.mark.parametrize("make", [flux, wan], ids=["flux", "wan"])
def test_projections_may_be_fused_before_or_after(make, rotations):
    model, inputs = make()
    other = copy.deepcopy(model)
    model.fuse_qkv_projections()
    expected = out(model, inputs)
    patch(model)
    patch(other)
    other.fuse_qkv_projections()
    rotations.clear()
    assert torch.equal(out(model, inputs), expected) and torch.equal(out(other, inputs), expected)
    assert len(rotations) == 8 and all(rotations)


def test_replicas_of_data_parallel_compute_with_their_own_weights():
    model, _ = MODELS["Kandinsky5Transformer3DModel"]()
    handle = patch(model)
    attention = next(r.module for r in handle._replaced if r.name != "processor")
    replica = attention._replicate_for_data_parallel()
    handle.undo()
    assert not any("_replicate_for_data_parallel" in vars(module) for module in model.modules())
    assert replica._replicate_for_data_parallel.__self__ is replica


# ---- Ways to run a patched model ----


@pytest.mark.parametrize("fuse", [False, True])
def test_autocast(fuse):
    """Under autocast the norms stay as they are, so the bits are the same with fuse too."""
    for model, inputs in (flux(), wan()):
        with torch.autocast("cpu", torch.bfloat16):
            expected = train_step(model, inputs)
            with patch(model, fuse=fuse):
                assert same(train_step(model, inputs), expected)


def test_gradient_checkpointing():
    for model, inputs in (flux(), wan()):
        model.train().enable_gradient_checkpointing()
        expected = train_step(model, inputs)
        with patch(model):
            assert same(train_step(model, inputs), expected)
        with patch(model, fuse=True):
            assert difference(train_step(model, inputs)[1], expected[1]) < GRADIENTS


def counting(graphs):
    """Returns a backend of torch.compile that appends to graphs how often each graph calls torch_rope."""

    def backend(module, inputs, **options):
        graphs.append(sum("rope." in str(node.target) for node in module.graph.nodes))
        return aot_eager(module, inputs)

    return backend


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("make", [flux, wan], ids=["flux", "wan"])
def test_a_patched_model_compiles_to_one_graph(make, fuse):
    """The norms stay as they are there. torch.compile compiles again after undo()."""
    model, inputs = make()
    expected = train_step(model, inputs)
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counting(graphs))
    with patch(model, fuse=fuse):
        actual = train_step(compiled, inputs)
        assert difference(actual[0], expected[0]) < OUTPUTS
        gradients = {n.replace("_orig_mod.", ""): g for n, g in actual[1].items()}
        assert difference(gradients, expected[1]) < GRADIENTS
    assert difference([out(compiled, inputs)], expected[0]) < OUTPUTS
    assert graphs == [4, 0]


def test_a_patched_model_compiles_block_by_block():
    model, inputs = wan()
    expected = out(model, inputs)
    graphs = []
    torch._dynamo.reset()
    with patch(model):
        model.compile_repeated_blocks(fullgraph=True, backend=counting(graphs))
        assert difference([out(model, inputs)], [expected]) < OUTPUTS
    assert graphs == [2]


def test_export():
    model, inputs = flux()
    expected = out(model, inputs)
    with patch(model):
        program = torch.export.export(model, (), inputs)
    assert sum("rope." in str(node.target) for node in program.graph.nodes) == 4
    assert difference([out(program.module(), inputs)], [expected]) < OUTPUTS


def test_hooks_on_norms_are_called():
    model, inputs = flux()
    expected, seen = out(model, inputs), []
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.norm_q.register_forward_hook(lambda *args: seen.append("q"))
        block.attn.norm_k.register_forward_pre_hook(lambda *args: seen.append("k"))
    with patch(model, fuse=True):
        assert torch.equal(out(model, inputs), expected)
    assert seen == ["q", "k"] * 2


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "adapter first"])
@pytest.mark.parametrize("make", [flux, wan], ids=["flux", "wan"])
def test_adapters_may_be_added_before_or_after(make, patch_first, rotations):
    peft = needed("peft")
    model, inputs = make()
    config = peft.LoraConfig(target_modules=["to_q", "to_k", "to_v", "norm_q_or_none"], init_lora_weights=False, r=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        other = copy.deepcopy(model)
        other.add_adapter(config)
        torch.manual_seed(0)
        if patch_first:
            patch(model)
        model.add_adapter(config)
        if not patch_first:
            patch(model)
    rotations.clear()
    actual = train_step(model, inputs)
    assert same(actual, train_step(other, inputs)) and len(rotations) in (4, 8) and all(rotations)
    assert any("lora" in name for name in actual[1])


@pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "hooks first"])
def test_hooks_of_accelerate_may_be_added_before_or_after(patch_first):
    hooks = needed("accelerate.hooks")
    model, inputs = MODELS["Kandinsky5Transformer3DModel"]()
    expected, seen = out(model, inputs), []

    class Hook(hooks.ModelHook):
        def post_forward(self, module, output):
            seen.append(type(module).__name__)
            return output

    if patch_first:
        handle = patch(model)
    for module in model.modules():
        hooks.add_hook_to_module(module, Hook())
    if not patch_first:
        handle = patch(model)
    assert torch.equal(out(model, inputs), expected) and seen
    hooks.remove_hook_from_submodules(model)
    handle.undo()
    assert unpatched(model) and torch.equal(out(model, inputs), expected)


@pytest.mark.parametrize("fuse", [False, True])
def test_blocks_may_be_offloaded(fuse):
    model, inputs = wan()
    expected = out(model, inputs)
    patch(model, fuse=fuse)
    model.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    assert difference([out(model, inputs)], [expected]) < OUTPUTS


def test_weights_may_be_stored_in_another_dtype():
    model, inputs = wan()
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    expected = out(model, inputs)
    for fuse in (False, True):
        with patch(model, fuse=fuse):
            assert difference([out(model, inputs)], [expected]) < OUTPUTS


# ---- Pipelines ----


def pipeline():
    """Returns a pipeline of two transformers and a text encoder that rotates too."""
    transformers = needed("transformers")
    config = transformers.Qwen2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
        num_key_value_heads=2, intermediate_size=8)  # fmt: skip
    text_encoder = transformers.Qwen2Model(config)
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return diffusers.WanPipeline(tokenizer=None, text_encoder=text_encoder, vae=vae, transformer=wan()[0],
        transformer_2=wan()[0], scheduler=diffusers.FlowMatchEulerDiscreteScheduler())  # fmt: skip


@torch.no_grad()
def video_of(pipe):
    return pipe(prompt_embeds=torch.ones(1, 5, 16), negative_prompt_embeds=torch.zeros(1, 5, 16), height=32, width=32,
        num_frames=5, num_inference_steps=2, output_type="latent", generator=torch.Generator().manual_seed(0))[0]  # fmt: skip


def test_a_pipeline_is_patched_with_all_its_models(rotations):
    pipe = pipeline()
    expected, encoder = video_of(pipe), copy.deepcopy(vars(pipe.text_encoder.layers[0].self_attn))
    handle = patch(pipe)
    assert patch(pipe) is handle
    assert "torch_rope in WanPipeline:" in str(handle)
    assert "  transformer.blocks.*.attn1.processor of 2 WanAttnProcessor" in str(handle)
    assert "  transformer_2.blocks.*.attn1.processor of 2 WanAttnProcessor" in str(handle)
    assert vars(pipe.text_encoder.layers[0].self_attn).keys() == encoder.keys()
    rotations.clear()
    assert torch.equal(video_of(pipe), expected) and rotations and all(rotations)
    with pytest.raises(ValueError, match="transformer already calls|already calls torch_rope"):
        patch(pipe.transformer)
    handle.undo()
    assert unpatched(pipe.transformer) and unpatched(pipe.transformer_2)
    assert str(handle) == "torch_rope is not in WanPipeline any more"


def test_two_pipelines_may_share_a_model():
    first, second = pipeline(), pipeline()
    second.transformer = first.transformer
    handle = patch(first)
    with pytest.raises(ValueError, match="WanPipeline is not patched: .* of transformer.blocks.0.attn1 already calls"):
        patch(second)
    assert unpatched(second.transformer_2) and not unpatched(first.transformer)
    handle.undo()
    patch(second)


# ---- What patch refuses ----


@pytest.mark.parametrize("model", ["black-forest-labs/FLUX.1-dev", diffusers.FluxTransformer2DModel, None], ids=str)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"model is .* but must be a loaded model, such as FluxTransformer2DModel"):
        patch(model)


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match='rounding is .exact. but must be "eager" or "once"'):
        patch(flux()[0], rounding="exact")


def test_a_model_that_does_not_rotate_is_refused():
    with pytest.raises(ValueError, match="Linear is not patched: no module of it calls a rotary function"):
        patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="DDPMPipeline is not patched: no module of it calls a rotary function"):
        patch(diffusers.DDPMPipeline(nn.Linear(2, 2), diffusers.DDPMScheduler()))
