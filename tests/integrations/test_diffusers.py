"""Tests of patch for diffusers: the bits of every model, and what patch changes, leaves alone and refuses."""

import copy
import functools
import io
import pickle
import re

import pytest
import torch
from cases import EXHAUSTIVE, ROOT, missing, needed
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

diffusers = needed("diffusers")
if not hasattr(diffusers, "Ideogram4Transformer2DModel"):
    missing("diffusers 0.42")

from diffusion_models import FLOAT32_ONLY, FORWARD_ONLY, MODELS, TABLES, output, to  # noqa: E402

from torch_rope.integrations import _put_off, _rotation  # noqa: E402
from torch_rope.integrations._conventions import (  # noqa: E402
    ConventionFunction,
    ConventionRotator,
    each_twice,
)
from torch_rope.integrations._put_off import PutOff, norm_of, put_off  # noqa: E402
from torch_rope.integrations.diffusers import Rebuilder, angles, patch, register  # noqa: E402

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


def many_numbers():
    """Returns rotary functions of diffusers, each with the shapes of x, its tables and its options."""
    cos, sin = torch.randn(2, 1024, 32)
    twice, halves = each_twice(cos, sin, True), each_twice(cos, sin, False)
    seq_first, seq_last = (2, 1024, 6, 64), (2, 6, 1024, 64)
    matrices = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))
    by_head = tuple(torch.randn(2, 2, 6, 1024, 32))
    embeddings, models = diffusers.models.embeddings, diffusers.models.transformers
    return {
        "shared": (embeddings.apply_rotary_emb, seq_first, twice, {"sequence_dim": 1}),
        "shared, half-split": (embeddings.apply_rotary_emb, seq_last, halves, {"use_real_unbind_dim": -2}),
        "Qwen": (
            models.transformer_qwenimage.apply_rotary_emb_qwen, seq_first, torch.complex(cos, sin), {"use_real": False}
        ),
        "LTX-2, split": (models.transformer_ltx2.apply_split_rotary_emb, seq_last, by_head, {}),
        "PRX": (models.transformer_prx.apply_rope, seq_last, matrices[None, None], {}),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["shared", "shared, half-split", "Qwen", "LTX-2, split", "PRX"])
def test_functions_have_the_bits_for_many_numbers(name, dtype):
    """Two ways to round may differ in one number of ten thousand, if the result has 16 bits."""
    function, shape, tables, options = many_numbers()[name]
    known = ConventionFunction(function, Rebuilder.conventions)
    ours, x = known.with_signature(known.rotator.rotate), torch.randn(shape).to(dtype)
    assert torch.equal(ours(x, tables, **options), function(x, tables, **options))


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
    """Returns whether no method and no processor of a model was replaced."""
    methods = [value for module in model.modules() for value in vars(module).values()]
    return not any(hasattr(f, "_torch_rope") for f in [*methods, *(type(p).__call__ for p in processors(model))])


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


def test_the_handle_lists_norms_that_another_function_calls():
    model, _ = MODELS["QwenImage21Transformer2DModel"]()
    assert "norm_q, norm_k in norm_rotate_qk" in str(patch(model, fuse=True))


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
    model, _ = MODELS["SanaWMTransformer3DModel"]()
    handle = patch(model)
    attention = model.blocks[0].attn
    replica = attention._replicate_for_data_parallel()
    replica = replica._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica and attention.forward.__self__ is attention
    handle.undo()
    assert not any("_replicate_for_data_parallel" in vars(module) for module in model.modules())


def test_processors_that_are_modules_are_patched_too(rotations):
    """So are those of IP adapters."""
    model, inputs = flux()
    transformer_flux = diffusers.models.transformers.transformer_flux
    for block in model.transformer_blocks:
        processor = transformer_flux.FluxIPAdapterAttnProcessor(64, 16, (4,), scale=[0.5])
        block.attn.set_processor(processor.eval())
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": [torch.randn(2, 4, 16)], "ip_adapter_masks": None}
    expected = train_step(model, inputs)
    for options in ({}, {"fuse": True}):
        with patch(model, **options):
            rotations.clear()
            actual = train_step(model, inputs)
            assert rotations and all(rotations) and difference(actual[1], expected[1]) < GRADIENTS
        assert same(train_step(model, inputs), expected)


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


@pytest.mark.parametrize("make, fuse", [(flux, True), (wan, False)] + [(wan, True)] * EXHAUSTIVE)
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
    assert seen == ["q", "k"] * 4  # in the unpatched model too


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
    model, inputs = MODELS["SanaWMTransformer3DModel"]()
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


def rotated(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., ::2], sin[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def apply_rotary_plain(x, cos, sin):
    """Wan does this."""
    return rotated(x, cos, sin)


def apply_rotary_scaled(x, cos, sin):
    return 2 * rotated(x, cos, sin)


def apply_rotary_of_the_first_half(x, cos, sin):
    """Leaves the second half of the tokens as it is."""
    first = torch.arange(x.shape[1])[:, None, None] < x.shape[1] / 2
    return torch.where(first, rotated(x, cos, sin), x)


def apply_rotary_by_size(x, cos, sin):
    """Does something else for many tokens."""
    if x.shape[1] > 4096:
        sin = -sin
    return rotated(x, cos, sin)


def apply_rotary_of_all_channels(x, cos, sin):
    """Reads an angle for each channel, where Wan reads one for each pair."""
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def apply_rotary_of_halves(x, cos, sin):
    """Rotates pairs (i, i + 8) by a table that is made for pairs (2i, 2i + 1)."""
    cos, sin = cos[..., ::2].repeat(1, 1, 1, 2), sin[..., 1::2].repeat(1, 1, 1, 2)
    return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin


def apply_rotary_of_one_argument(x):
    return x


# Python 3.13 has a source for the file "<string>", the program that it was started with.
exec(compile("def apply_rotary_without_source(x, cos, sin):\n    return rotated(x, cos, sin)", "<nowhere>", "exec"))
UNKNOWN = {
    apply_rotary_scaled: "computes something else",
    apply_rotary_of_the_first_half: "computes something else",
    apply_rotary_by_size: r'the function branches, and "x.shape\[1\] > 4096" in line',
    apply_rotary_of_all_channels: "computes something else",
    apply_rotary_of_halves: "computes something else",
    apply_rotary_of_one_argument: "computes something else",
    globals()["apply_rotary_without_source"]: "has no source",
}


apply_rotary_of_the_test = apply_rotary_plain


class Processor:
    def __call__(self, attn, x, cos, sin):
        return apply_rotary_of_the_test(x, cos, sin)


class Attention(nn.Module):
    def __init__(self, processor):
        super().__init__()
        self.processor = processor

    def forward(self, x, cos, sin):
        return self.processor(self, x, cos, sin)


def attention(processor):
    """Returns (a model of a Wan and an attention layer with this processor, arguments of the layer)."""
    angle = torch.randn(1, 6, 1, 8).repeat_interleave(2, -1)
    model = nn.ModuleDict({"wan": wan()[0], "attention": Attention(processor)})
    return model, (torch.randn(2, 6, 3, 16), angle.cos(), angle.sin())


@pytest.mark.parametrize("function", UNKNOWN, ids=lambda f: f.__name__)
def test_an_unknown_function_is_refused(function, monkeypatch):
    """The model also contains a Wan, which must not be patched either."""
    monkeypatch.setitem(globals(), "apply_rotary_of_the_test", function)
    model, _ = attention(Processor())
    where = "ModuleDict is not patched: Processor.__call__ of attention calls apply_rotary_of_the_test: "
    with pytest.raises(NotImplementedError, match=f"{where}.*{UNKNOWN[function]}"):
        patch(model)
    assert unpatched(model)


class ClosureProcessor:
    def __call__(self, attn, x, cos, sin):
        scale = x.shape[1] / 6

        def apply_rotary(x, cos, sin):
            return scale * rotated(x, cos, sin)

        return apply_rotary(x, cos, sin)


class DefaultsProcessor:
    def __call__(self, attn, x, cos, sin):
        def apply_rotary(x, cos, sin, scale=x.shape[1] / 6):
            return scale * rotated(x, cos, sin)

        return apply_rotary(x, cos, sin)


@pytest.mark.parametrize("processor", [ClosureProcessor, DefaultsProcessor])
def test_a_nested_function_with_a_closure_or_defaults_is_refused(processor):
    model, _ = attention(processor())
    refused = f"{processor.__name__}.__call__ of attention defines apply_rotary, which must be a function without"
    with pytest.raises(NotImplementedError, match=refused):
        patch(model)
    assert unpatched(model)


class SuperProcessor(Processor):
    def __call__(self, *args):
        return super().__call__(*args)


def test_a_processor_that_calls_super_is_refused():
    model, _ = attention(SuperProcessor())
    with pytest.raises(NotImplementedError, match=r"SuperProcessor.__call__ of attention calls super\(\)"):
        patch(model)
    assert unpatched(model)


class NestedProcessor:
    def __call__(self, attn, x, cos, sin):
        def apply_rotary(x, cos, sin):
            return rotated(x, cos, sin)

        return apply_rotary(x, cos, sin)


class ImportingProcessor:
    def __call__(self, attn, x, cos, sin):
        from diffusers.models.embeddings import apply_rotary_emb as apply_rotary

        return apply_rotary(x, (cos[0, :, 0], sin[0, :, 0]), sequence_dim=1)


@pytest.mark.parametrize("processor", [Processor, NestedProcessor, ImportingProcessor])
def test_a_processor_of_ones_own_may_rotate(processor, rotations):
    model, args = attention(processor())
    expected = model.attention(*args)
    with patch(model) as handle:
        rotations.clear()
        assert torch.equal(model.attention(*args), expected) and rotations == [True]
        assert f"attention.processor of 1 {processor.__name__}: apply_rotary" in str(handle)
    assert torch.equal(model.attention(*args), expected)


def rotate_scaled(x, cos, sin):
    cos, sin = (t[0, :, 0, ::2] for t in (cos, sin))
    return 2 * torch.ops.rope.rotate(x, cos, sin, interleaved=True, eager_rounding=True)


def apply_rotary_twice_as_large(x, cos, sin):
    return 2 * apply_rotary_plain(x, cos, sin)


def test_a_function_that_calls_a_rotary_function_is_rebuilt(monkeypatch, rotations):
    monkeypatch.setitem(globals(), "apply_rotary_of_the_test", apply_rotary_twice_as_large)
    model, args = attention(Processor())
    expected = model.attention(*args)
    with patch(model) as handle:
        rotations.clear()
        assert torch.equal(model.attention(*args), expected) and rotations == [True]
        assert "apply_rotary_plain is torch.ops.rope.rotate, interleaved" in str(handle)


def test_a_refused_function_can_be_registered(monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_of_the_test", apply_rotary_scaled)
    model, args = attention(Processor())
    expected = model.attention(*args)
    register(apply_rotary_scaled, rotate_scaled)
    try:
        with patch(model) as handle:
            assert "apply_rotary_scaled is rotate_scaled, which was registered" in str(handle)
            assert torch.equal(model.attention(*args), expected)
    finally:
        register(apply_rotary_scaled, None)
    with pytest.raises(NotImplementedError, match="computes something else"):
        patch(model)


# ---- What falls back to the function ----


def test_tables_that_are_no_rotation_are_left_to_the_function_with_one_warning(rotations):
    model, (x, *_) = attention(ImportingProcessor())
    angle = torch.randn(1, 6, 1, 16)
    expected = model.attention(x, angle.cos(), angle.sin())
    patch(model, fuse=True)
    rotations.clear()
    with pytest.warns(UserWarning) as warned:
        for _ in range(2):
            assert torch.equal(model.attention(x, angle.cos(), angle.sin()), expected)
    (warning,) = (w for w in warned if "torch_rope" in str(w.message))
    assert str(warning.message) == (
        "torch_rope: apply_rotary of attention.processor was called with different angles for the two "
        "channels of a pair, which is no rotation, so it computes as without torch_rope"
    )
    assert rotations == [False, False]


def test_a_compiled_model_rotates_by_no_wrong_tables():
    """It raises an error, unless its tables were seen before: then it computes as without torch_rope."""
    model, (x, *_) = attention(ImportingProcessor())
    angle = torch.randn(1, 6, 1, 16)
    args = x, angle.cos(), angle.sin()
    expected = model.attention(*args)
    with patch(model):
        torch._dynamo.reset()
        compiled = torch.compile(model.attention, fullgraph=True, backend="aot_eager")
        with pytest.raises(RuntimeError, match="call the model once without torch.compile"):
            compiled(*args)
        model.attention(*args)
        torch.testing.assert_close(compiled(*args), expected)


def test_tables_without_numbers(rotations):
    """Shapes are found out on the device meta and with fake tensors."""
    for fuse in (False, True):
        model, inputs = flux()
        with patch(model, fuse=fuse), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = {n: mode.from_tensor(x) for n, x in inputs.items()}
            assert out(model, fake).shape == (2, 12, 4)
        with patch(model.to("meta"), fuse=fuse):
            rotations.clear()
            assert out(model, {n: x.to("meta") for n, x in inputs.items()}).shape == (2, 12, 4)
            assert all(rotations)


def test_shapes_and_dtypes_that_were_not_tried_are_left_to_the_function(rotations):
    """x may have more dimensions, and no tokens."""
    model, (x, cos, sin) = attention(Processor())
    wide = x[None].expand(3, -1, -1, -1, -1)
    expected = model.attention(wide, cos, sin)
    with patch(model):
        rotations.clear()
        assert torch.equal(model.attention(wide, cos, sin), expected)
        assert rotations == [False]
        with pytest.raises(RuntimeError, match="must match the size"):  # the error of the function
            model.attention(x[:, :5], cos, sin)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            for tables in (torch.float64, torch.bfloat16):
                args = x.to(dtype), cos.to(tables), sin.to(tables)
                ours = model.attention(*args)
                assert ours.dtype == apply_rotary_plain(*args).dtype
                assert torch.equal(ours, apply_rotary_plain(*args))
        empty = model.attention(x[:, :0], cos[:, :0], sin[:, :0])
        assert empty.shape == (2, 0, 3, 16)


def test_tables_that_need_a_gradient_are_left_to_the_function_for_its_bits(rotations):
    model, (x, cos, sin) = attention(Processor())
    leaves = [t.requires_grad_() for t in (x, cos, sin)]
    expected = torch.autograd.grad(model.attention(x, cos, sin).square().sum(), leaves)
    for rounding in ("eager", "once"):
        with patch(model, rounding=rounding):
            rotations.clear()
            actual = torch.autograd.grad(model.attention(x, cos, sin).square().sum(), leaves)
            assert difference(actual, expected) < 1e-6
            assert rotations == [rounding == "once"]
            if rounding == "eager":
                assert all(map(torch.equal, actual, expected))


def test_transforms_of_functions(rotations):
    """vmap, jvp and gradients of gradients work as in the unpatched model."""
    model, (x, cos, sin) = attention(Processor())

    def f(x):
        return model.attention(x, cos, sin)

    def results():
        double = torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).pow(3).sum())(x).square().sum())
        forward = torch.func.jvp(f, (x,), (x.cos(),))
        return [torch.func.vmap(f)(x[:, None]), *forward, torch.func.vjp(f, x)[1](x)[0], double(x)]

    expected = results()
    with patch(model):
        rotations.clear()
        torch.testing.assert_close(results(), expected)
        assert all(rotations)


# ---- Norms that are put off ----


@pytest.fixture
def norm():
    torch.manual_seed(0)
    norm = nn.RMSNorm(16, eps=1e-6)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


USES = {
    "cat": lambda q: torch.cat([q, q], 1),
    "out": lambda q: torch.add(q, q, out=torch.empty(2, 6, 16)),
    "keywords": lambda q: F.scaled_dot_product_attention(query=q, key=q, value=q),
    "index": lambda q: q[:, 1:, None],
    "plus": lambda q: 2 + q * 3 - q / 2 - (1 - q) ** 2,
    "floor": lambda q: q // 2 % 3,
    "matmul": lambda q: torch.ones(6, 6) @ q,
    "compare": lambda q: (q > 0) | (q == q),
    "invert": lambda q: ~(q < 0),
    "iter": lambda q: torch.stack(list(q)),
    "unbind": lambda q: torch.stack(q.unbind(-1)),
    "chunk": lambda q: torch.stack(q.chunk(2, -1)),
    "in": lambda q: torch.tensor(q[0, 0, 0].item() in q),
    "numpy": lambda q: torch.from_numpy(__import__("numpy").asarray(q)),
    "contiguous": lambda q: q.transpose(0, 1).contiguous(),
    "permute": lambda q: q.permute(2, 0, 1),
    "mT": lambda q: q.mT,
    "float": lambda q: q.float() + q.to(torch.float64),
    "flatten": lambda q: q.unflatten(-1, (2, 8)).flatten(0, 1),
    "view": lambda q: q.view(12, 16),
    "view of a dtype": lambda q: q.view(torch.int32),
    "view by name": lambda q: q.view(size=(6, 2, 16)),
    "reshape": lambda q: q.unflatten(-1, (2, 8)).transpose(1, 2).reshape(2, 6, 16),
    "reshape by name": lambda q: q.reshape(shape=(6, 2, 16)),
    "transpose": lambda q: q.transpose(dim0=-1, dim1=1),
    "linear": lambda q: nn.Linear(16, 3, bias=False).requires_grad_(False)(q) * 0 + q.sum(),
    "tree": lambda q: torch.cat([*(q, [q][0])]),
    "len": lambda q: torch.tensor([len(q), q.dim(), q.ndim, q.size(0), q.numel(), *q.shape, q.stride(1), q.get_device()]),
    "bool": lambda q: torch.tensor(bool(q.sum() == q.sum()) and not hasattr(q, "no_such_name")),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("use", USES)
def test_any_use_of_what_is_put_off_is_one_of_the_result(use, norm):
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)) + 1
    torch.manual_seed(1)
    expected = USES[use](norm(x))
    torch.manual_seed(1)
    q = put_off(norm, x)
    assert type(q) is PutOff
    actual = USES[use](q)
    assert type(actual) is torch.Tensor and torch.equal(actual, expected)


def in_place(q):
    q += 1
    q[:, 0] = 2
    q.mul_(3)
    torch.sin_(q)
    return q * 1


def test_what_is_put_off_may_be_changed_in_place(norm):
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        assert torch.equal(in_place(put_off(norm, x)), in_place(norm(x)))


class NormedProcessor:
    def __call__(self, attn, x, cos, sin):
        query = attn.norm_q(x).unflatten(-1, (3, 16))
        return apply_rotary_of_the_test(query, cos, sin)


class InPlaceProcessor(NormedProcessor):
    def __call__(self, attn, x, cos, sin):
        query = attn.norm_q(x)
        heads = query.unflatten(-1, (3, 16))
        query[:, 1:] = 0.5
        return apply_rotary_of_the_test(heads, cos, sin)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, given):
        return 2 * given


class FunctionProcessor(NormedProcessor):
    def __call__(self, attn, x, cos, sin):
        query, key = attn.norm_q(x), attn.norm_q(x)
        key = Doubles.apply(key)
        if not isinstance(query, torch.Tensor):
            raise TypeError(query)
        return apply_rotary_of_the_test(key.unflatten(-1, (3, 16)), cos, sin)


class ReturningProcessor(NormedProcessor):
    def __call__(self, attn, x, cos, sin):
        query = attn.norm_q(x)
        if len(x) == 2:
            return query.unflatten(-1, (3, 16))
        return apply_rotary_of_the_test(query, cos, sin)


class ChangingProcessor(NormedProcessor):
    def __call__(self, attn, x, cos, sin):
        x = x.clone()
        query = attn.norm_q(x).unflatten(-1, (3, 16))
        x.mul_(2)
        return apply_rotary_of_the_test(query, cos, sin)


def normed(processor, norm=None):
    """Returns a model of an attention layer with a norm over heads, and the arguments of the layer."""
    model, (x, cos, sin) = attention(processor)
    model.attention.norm_q = norm or nn.RMSNorm(48, eps=1e-6)
    with torch.no_grad():
        for parameter in model.attention.norm_q.parameters():
            parameter.uniform_(0.5, 1.5)
    return model.attention, (x.flatten(2).requires_grad_(), cos, sin)


@pytest.fixture
def fused(monkeypatch):
    """A list of the calls of the operator that normalises and rotates."""
    calls, operator = [], _put_off._norm_rotate_qk
    monkeypatch.setattr(
        _put_off, "_norm_rotate_qk", lambda *args, **kwargs: calls.append(args) or operator(*args, **kwargs)
    )
    return calls


def gradients(attention, args):
    """Returns the result, and the gradients of x and of the weights."""
    result = attention(*args)
    leaves = [args[0], *attention.norm_q.parameters()]
    weights = torch.linspace(-1, 1, result.numel()).view_as(result)
    return [result, *torch.autograd.grad((result.double() * weights).sum(), leaves)]


VIEWS = [
    lambda q: q.unflatten(-1, (3, 16)),
    lambda q: q.unflatten(2, (3, -1)),
    lambda q: q.unflatten(dim=2, sizes=(3, 16)),
    lambda q: q.view(2, 6, 3, 16),
    lambda q: q.view(2, -1, 3, 16),
    lambda q: q.view((2, 6, -1, 16)),
    lambda q: q.view(*q.shape[:2], 3, -1),
    lambda q: q.view([q.size(0), len(q[0]) if q is None else q.shape[1], 3, 16]),
    lambda q: q.reshape(2, 6, 3, 16),
    lambda q: q.to(q.dtype).to(q.device).type_as(q).unflatten(-1, (3, 16)),
    lambda q: q.transpose(0, 1).unflatten(-1, (3, 16)).transpose(1, 0),
    lambda q: q.unflatten(-1, (3, 16)).transpose(1, 2).transpose(-2, -3),
    lambda q: q.unflatten(-1, (3, 16)).transpose(dim0=1, dim1=1),
]


def rotated_after(between):
    """Returns what torch_rope rotates after some function of a norm, and its gradients, for the norm put off and called."""
    rotator = Rebuilder()._examine(apply_rotary_plain).rotator
    attention, (x, cos, sin) = normed(NormedProcessor())
    results = []
    for norm in (functools.partial(put_off, attention.norm_q), attention.norm_q):
        y = rotator.rotate((between(norm(x)),), (cos, sin))
        leaves = [x, attention.norm_q.weight]
        weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
        results.append([y, *torch.autograd.grad((y * weights).sum(), leaves)])
    return results


@pytest.mark.parametrize("between", VIEWS)
def test_a_norm_is_put_off_over_views(between, fused):
    results = rotated_after(between)
    torch.testing.assert_close(*results)
    assert len(fused) == 1


CHANGES = [
    lambda q: q.unflatten(-1, (3, 16)) * 2,
    lambda q: q.unflatten(-1, (3, 16)).relu(),
    lambda q: torch.cat([q.unflatten(-1, (3, 16))[:, :3]] * 2, 1),
    lambda q: q.unflatten(-1, (3, 16)).flip(1),
    lambda q: q.view(2, 3, 6, 16).transpose(1, 2),  # the heads are not those of one token
    lambda q: q.reshape(6, 2, 3, 16).transpose(0, 1),
    lambda q: q.unflatten(-1, (3, 16)).transpose(-1, -2).transpose(-1, -2),
]


@pytest.mark.parametrize("between", CHANGES)
def test_a_norm_is_called_if_something_else_stands_between(between, fused):
    actual, expected = rotated_after(between)
    assert all(map(torch.equal, actual, expected))
    assert not fused


def test_a_layer_says_what_is_put_off(fused):
    attention, args = normed(NormedProcessor())
    expected = gradients(attention, args)
    with patch(attention, fuse=True) as handle:
        torch.testing.assert_close(gradients(attention, args), expected)
        assert len(fused) == 1
        assert "norm_q in norm_rotate_qk, if only views stand between" in str(handle)


@pytest.mark.parametrize("processor", [InPlaceProcessor, FunctionProcessor, ReturningProcessor])
def test_what_leaves_a_method_or_is_changed_is_not_put_off(processor, fused):
    """No other function and no caller ever sees what is put off."""
    attention, args = normed(processor())
    expected = gradients(attention, args)
    with patch(attention, fuse=True):
        assert type(attention(*args)) is torch.Tensor
        assert all(map(torch.equal, gradients(attention, args), expected))
    assert not fused


def test_a_norm_whose_input_was_changed_since_is_an_error():
    attention, args = normed(ChangingProcessor())
    with patch(attention, fuse=True), pytest.raises(RuntimeError, match="input of a RMSNorm was changed in place"):
        attention(*args)


class Float32Norm(nn.RMSNorm):
    """Has results in float32."""

    def forward(self, x):
        return super().forward(x.float())


NORMS = {
    "a bias": lambda: diffusers.models.normalization.RMSNorm(48, eps=1e-6, bias=True),
    "no weight": lambda: nn.RMSNorm(48, eps=1e-6, elementwise_affine=False),
    "a mean": lambda: nn.LayerNorm(48, eps=1e-6),
    "another size": lambda: nn.RMSNorm((6, 48), eps=1e-6),
    "no eps": lambda: nn.RMSNorm(48),
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.RMSNorm(48, eps=1e-6), dim=None),
}


@pytest.mark.parametrize("kind", NORMS)
def test_other_norms_are_called(kind, fused):
    attention, args = normed(NormedProcessor(), NORMS[kind]())
    expected = gradients(attention, args)
    with patch(attention, fuse=True):
        assert all(map(torch.equal, gradients(attention, args), expected))
    assert not fused


@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_a_norm_with_hooks_is_called(hook, fused):
    attention, args = normed(NormedProcessor())
    expected, seen = gradients(attention, args), []
    patch(attention, fuse=True)
    handle = getattr(attention.norm_q, f"register_{hook}")(lambda *args: seen.append(args))
    assert all(map(torch.equal, gradients(attention, args), expected))
    assert len(seen) == 1 and not fused
    handle.remove()
    gradients(attention, args)
    assert len(seen) == len(fused) == 1


def test_a_norm_whose_forward_was_replaced_is_called(fused):
    """Accelerate and diffusers replace it to load weights."""
    attention, args = normed(NormedProcessor())
    patch(attention, fuse=True)
    forward = attention.norm_q.forward
    attention.norm_q.forward = lambda x: 2 * forward(x)
    assert torch.equal(attention(*args), apply_rotary_plain(2 * forward(args[0]).unflatten(-1, (3, 16)), *args[1:]))
    assert not fused


def test_a_norm_of_another_dtype_is_called(fused):
    for norm, dtype in (
        (nn.RMSNorm(48, eps=1e-6).bfloat16(), torch.float32),
        (nn.RMSNorm(48, eps=1e-6), torch.bfloat16),
        (Float32Norm(48, eps=1e-6).bfloat16(), torch.bfloat16),
    ):
        attention, args = normed(NormedProcessor(), norm)
        x, cos, sin = (t.detach().to(dtype) for t in args)
        expected = attention(x, cos, sin)
        with patch(attention, fuse=True):
            actual = attention(x, cos, sin)
            assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    assert not fused


def test_a_norm_with_weights_in_bfloat16_is_put_off(fused):
    attention, (x, cos, sin) = normed(NormedProcessor(), nn.RMSNorm(48, eps=1e-6).bfloat16())
    x, cos, sin = (t.detach().bfloat16() for t in (x, cos, sin))
    expected = attention(x, cos, sin)
    with patch(attention, fuse=True):
        torch.testing.assert_close(attention(x, cos, sin), expected, rtol=0.02, atol=0.02)
    assert len(fused) == 1


def test_a_norm_is_called_under_autocast_and_in_a_graph(fused):
    attention, args = normed(NormedProcessor())
    with torch.autocast("cpu", torch.bfloat16):
        expected = attention(*args)
        with patch(attention, fuse=True):
            assert torch.equal(attention(*args), expected)
    assert not fused
    expected, graphs = attention(*args), []
    torch._dynamo.reset()
    with patch(attention, fuse=True):
        compiled = torch.compile(attention, fullgraph=True, backend=counting(graphs))
        torch.testing.assert_close(compiled(*args), expected)
    assert graphs == [1] and not fused


def test_the_norm_of_a_module_is_found_once(norm):
    assert norm_of(norm) is norm_of(norm) and norm_of(norm).eps == 1e-6
    assert norm_of(None) is None


# ---- Exact angles ----


def frequencies(dim, theta=10000.0):
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def by_axis(positions, dims, theta=10000.0):
    """Returns the angles of positions [.., axes] in float64, [.., pairs]."""
    parts = [p[..., None].double() * frequencies(d, theta) for p, d in zip(positions.unbind(-1), dims, strict=True)]
    return torch.cat(parts, -1)


def cos_sin(angle, interleaved=True):
    """Returns cos and sin with each number twice."""
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
    return [angle.cos(), angle.sin()]


def points(*sizes):
    return torch.cartesian_prod(*map(torch.arange, sizes))


def flux_tables(model):
    ids = torch.tensor([[0.0, 69857, 3], [1, 2, 99999]])
    return model.pos_embed(ids), cos_sin(by_axis(ids, (8, 12, 12)))


def wan_tables(model):
    angle = by_axis(points(1, 1, 1000), (12, 10, 10))
    return model.rope(torch.empty(1, 4, 1, 2, 2000)), [t[None, :, None] for t in cos_sin(angle)]


def hunyuan_video_tables(model):
    angle = by_axis(points(1, 1, 4500), (8, 12, 12), theta=256)
    return model.rope(torch.empty(1, 4, 1, 2, 9000)), cos_sin(angle)


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


def kandinsky_tables(model):
    angle = torch.arange(2000, 2048).double()[:, None] * frequencies(32)
    table = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    return model.audio_text_rope_embeddings(torch.arange(2000, 2048)).squeeze(), [table]


def ideogram_tables(model):
    ids = torch.tensor([[[69857, 65539, 70001], [1, 2, 99999]]])
    axis = torch.tensor([j % 3 if j % 3 > 0 and j < 15 else 0 for j in range(16)])
    return model.rotary_emb(ids), cos_sin(ids[..., axis].double() * frequencies(32), interleaved=False)


TABLES_OF = {
    "FluxTransformer2DModel": flux_tables,
    "WanTransformer3DModel": wan_tables,
    "HunyuanVideoTransformer3DModel": hunyuan_video_tables,
    "QwenImageTransformer2DModel": qwen_tables,
    "LTXVideoTransformer3DModel": ltx_tables,
    "Kandinsky6Transformer3DModel": kandinsky_tables,
    "Ideogram4Transformer2DModel": ideogram_tables,
}
INEXACT = ["HunyuanVideoTransformer3DModel", "QwenImageTransformer2DModel", "LTXVideoTransformer3DModel",
    "Kandinsky6Transformer3DModel", "Ideogram4Transformer2DModel"]  # fmt: skip


def ulps(tables, expected):
    """Returns the largest error in units of the last place of float32."""
    tables = [tables] if isinstance(tables, torch.Tensor) else tables
    assert all(t.dtype == torch.float32 and t.shape == e.shape for t, e in zip(tables, expected, strict=True))
    return max(((t - e).abs().max() * 2**24).item() for t, e in zip(tables, expected, strict=True))


@pytest.mark.parametrize("name", TABLES_OF)
def test_exact_angles(name, monkeypatch):
    """The tables are those of a float64 formula: for every dtype of the model, under autocast and without float64."""
    model, _ = MODELS[name]()
    assert (ulps(*TABLES_OF[name](model)) > 8) == (name in INEXACT)
    generator = torch.get_rng_state()
    with patch(model, exact_angles=True):
        assert ulps(*TABLES_OF[name](model)) <= 1
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert ulps(*TABLES_OF[name](model)) <= 1
        model.to(torch.bfloat16)
        assert ulps(*TABLES_OF[name](model)) <= 1
        monkeypatch.setattr(angles, "has_float64", lambda device: False)
        assert ulps(*TABLES_OF[name](model)) <= 1
        monkeypatch.undo()
    assert torch.equal(torch.get_rng_state(), generator) and torch.get_default_dtype() == torch.float32
    with patch(model, exact_angles=True):  # the model was cast before
        assert ulps(*TABLES_OF[name](model)) <= 1


def test_a_model_with_exact_angles_differs_by_them_only():
    """Wan's tables are exact already, so the bits are the same. Flux's too."""
    for model, inputs in (flux(), wan()):
        expected = train_step(model, inputs)
        with patch(model, exact_angles=True):
            assert same(train_step(model, inputs), expected)
        assert "forward" not in vars(model.get_submodule("rope" if hasattr(model, "rope") else "pos_embed"))


def test_exact_angles_when_the_function_fails():
    model, _ = flux()
    with patch(model, exact_angles=True):
        model.pos_embed(torch.zeros(2, 3))
        with pytest.raises(IndexError):
            model.pos_embed(torch.zeros(3))
    assert torch.get_default_dtype() == torch.float32


def test_tables_that_were_changed_are_left_as_they_are():
    model, _ = wan()
    model.rope.freqs_cos[1] += 0.01
    expected = model.rope(torch.empty(1, 4, 1, 2, 40))
    handle = patch(model, exact_angles=True)
    assert "rope: left as it is, because its tables were changed, or cannot be made again from the config" in str(
        handle
    )
    assert all(map(torch.equal, model.rope(torch.empty(1, 4, 1, 2, 40)), expected))
