"""Compares patched models of timm with unpatched ones, and tests what patch changes, leaves alone and refuses."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F
from vision_models import MODELS, timm

import torch_rope
from torch_rope.integrations import _conventions, _put_off
from torch_rope.integrations.timm import patch, register

pytestmark = pytest.mark.cpu

apply_rot_embed, apply_rot_embed_list = timm.layers.apply_rot_embed, timm.layers.apply_rot_embed_list

# The largest allowed differences, as parts of the largest element of the output and of the largest gradient, if q and k
# are rounded in another way. They are three times those that were seen. A model that does not rotate differs by BROKEN
# or more.
OUTPUT = {torch.float32: 2e-6, torch.bfloat16: 0.05}
GRADIENTS, BROKEN = 7e-6, 0.08
# The models whose tables are made of frequencies that are trained.
TRAINED = [name for name in MODELS if "mixed" in name]


@functools.cache
def models(**options):
    """Returns all models, patched at once if there are options, and their inputs."""
    torch.manual_seed(0)
    made = {name: make() for name, make in MODELS.items()}
    together = nn.ModuleDict({name: model for name, (model, _) in made.items()})
    if options:
        patch(together, **options)
    return together, {name: inputs for name, (_, inputs) in made.items()}


def of(name, dtype=torch.float32, **options):
    """Returns a copy of a model, and its inputs."""
    together, inputs = models(**options)
    return copy.deepcopy(together[name]).to(dtype), cast(inputs[name], dtype)


def cast(value, dtype):
    """Returns inputs of a model with their floating point tensors in a dtype."""
    if isinstance(value, tuple):
        return tuple(cast(v, dtype) for v in value)
    if isinstance(value, dict):
        return {k: cast(v, dtype) for k, v in value.items()}
    return value.to(dtype) if value.is_floating_point() else value


def output(model, inputs):
    torch.manual_seed(0)  # some models drop random patches
    with torch.no_grad():
        return model(*inputs)


def step(model, inputs):
    """Returns the output of a training step and all gradients, by name."""
    torch.manual_seed(0)
    model.zero_grad()
    out = model(*inputs)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return {"output": out.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[n], expected[n]) for n in expected)


def difference(actual, expected):
    """Returns the largest difference, as a part of the largest expected value."""
    return ((actual.float() - expected.float()).abs().max() / expected.abs().max()).item()


def gradients(result):
    return torch.cat([grad.flatten() for name, grad in result.items() if name != "output"])


@pytest.fixture
def calls(monkeypatch):
    """A list with True for each call of a rotary function that torch_rope computed, and False for each other one."""
    counted, rotate = [], _conventions.ConventionRotator.try_to_rotate

    def counts(*args):
        ys = rotate(*args)
        counted.append(ys is not None)
        return ys

    monkeypatch.setattr(_conventions.ConventionRotator, "try_to_rotate", counts)
    return counted


# ---- the same results ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_have_the_same_bits(name, dtype, calls):
    model, expected = of(name, dtype, rounding="eager"), step(*of(name, dtype))
    calls.clear()
    assert same(step(*model), expected)
    assert calls and set(calls) == {name not in TRAINED}  # tables that are trained go to timm's own function


@pytest.mark.parametrize("name", TRAINED)
def test_tables_that_are_trained_rotate_with_torch_rope_if_they_need_no_gradient(name, calls):
    model = of(name, rounding="eager")
    calls.clear()
    assert torch.equal(output(*model), output(*of(name)))
    assert calls and all(calls)


@pytest.mark.parametrize("name", MODELS)
def test_results_that_are_rounded_once_differ_by_rounding(name, calls):
    model, expected = of(name, rounding="once"), step(*of(name))
    calls.clear()
    actual = step(*model)
    assert calls and all(calls)
    assert actual.keys() == expected.keys()
    assert difference(actual["output"], expected["output"]) < OUTPUT[torch.float32]
    assert difference(gradients(actual), gradients(expected)) < GRADIENTS
    for freqs in (n for n in expected if n.endswith("freqs")):
        assert difference(actual[freqs], expected[freqs]) < GRADIENTS


@pytest.mark.parametrize("name", MODELS)
def test_results_in_bfloat16_that_are_rounded_once_differ_by_rounding(name):
    actual, expected = (output(*of(name, torch.bfloat16, **o)) for o in ({"rounding": "once"}, {}))
    assert difference(actual, expected) < OUTPUT[torch.bfloat16]


@pytest.mark.parametrize("name", MODELS)
def test_results_without_a_rotation_differ(name, monkeypatch):
    expected = output(*of(name))
    monkeypatch.setattr(timm.layers.pos_embed_sincos, "apply_rot_embed", lambda x, *tables, half=False: x)
    assert difference(output(*of(name)), expected) > BROKEN


@pytest.mark.parametrize("name", ["eva02", "registers", "dinov3", "perception encoder", "attention pool"])
def test_prefix_tokens_stay_as_they_are(name, monkeypatch):
    seen, attention = [], F.scaled_dot_product_attention

    def sees(q, k, *args, **kwargs):
        seen.append((q, k))
        return attention(q, k, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sees)
    (model, inputs), (patched, _) = of(name), of(name, rounding="once")
    prefix = getattr(model, "num_prefix_tokens", 1)
    output(model, inputs)
    layers = len(seen)
    output(patched, inputs)
    for actual, expected in zip(seen[layers], seen[0], strict=True):  # q and k of the first layer
        assert prefix and torch.equal(actual[:, :, :prefix], expected[:, :, :prefix])
        assert not torch.equal(actual, expected)


# ---- norms ----


class Norms(nn.Module):
    """Normalises and rotates q and k [batch, heads, seq, head_dim], without prefix tokens."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = timm.layers.RmsNorm(16), timm.layers.RmsNorm(16)

    def forward(self, q, k, sin, cos):
        return apply_rot_embed(self.q_norm(q), sin, cos), apply_rot_embed(self.k_norm(k), sin, cos)


def qk_and_tables(half=False, kv_heads=2):
    """Returns q and k [2, heads, 5, 16], sin and cos [5, 16]."""
    angles = torch.rand(5, 8) * 6
    angles = angles.repeat(1, 2) if half else angles.repeat_interleave(2, 1)
    return torch.randn(2, 4, 5, 16), torch.randn(2, kv_heads, 5, 16), angles.sin(), angles.cos()


def test_fuse_computes_norms_in_the_operator_that_rotates(monkeypatch):
    module, inputs, fused = Norms(), qk_and_tables(), []
    operator = _put_off._norm_rotate_qk
    monkeypatch.setattr(_put_off, "_norm_rotate_qk", lambda *a, **kw: fused.append(1) or operator(*a, **kw))
    expected = module(*inputs)
    handle = patch(module, fuse=True)
    assert "q_norm, k_norm in norm_rotate_qk" in str(handle)
    for actual, wanted in zip(module(*inputs), expected, strict=True):
        assert difference(actual, wanted) < OUTPUT[torch.float32]
    assert len(fused) == 2


@pytest.mark.parametrize("name", [name for name in MODELS if "norms" in name or "naflex, dinov3" in name])
def test_norms_before_prefix_tokens_are_taken_out_stay_as_they_are(name):
    model, inputs = of(name)
    expected = step(model, inputs)
    patch(model, fuse=True)
    assert same(step(model, inputs), expected)


# ---- what patch changes ----


class Lists(nn.Module):
    """Rotates a list of tensors."""

    def forward(self, q, k, sin, cos, half):
        return apply_rot_embed_list([q, k], sin, cos, half)


@pytest.mark.parametrize("half", [False, True])
def test_a_list_of_tensors_rotates(half, calls):
    module, inputs = Lists(), (*qk_and_tables(half), half)
    expected = module(*inputs)
    handle = patch(module)
    calls.clear()
    assert all(map(torch.equal, module(*inputs), expected)) and calls == [True, True]
    assert str(handle).splitlines() == [
        "torch_rope in Lists:",
        "  forward of 1 Lists: apply_rot_embed is torch.ops.rope.rotate, interleaved or half-split",
    ]


def test_the_handle_lists_what_it_replaced():
    model, _ = of("dinov3")
    handle = patch(model)
    does = "apply_rot_embed_cat is torch.ops.rope.rotate, interleaved or half-split"
    assert str(handle).splitlines() == [
        "torch_rope in Eva:",
        f"  rope.forward of 1 RotaryEmbeddingDinoV3: {does}",
        f"  blocks.*.attn.forward of 2 EvaAttention: {does}",
    ]
    handle.undo()
    assert str(handle) == "torch_rope is not in Eva any more"


def test_patch_and_undo_change_only_this_model(calls):
    (model, inputs), (other, _) = of("dinov3"), of("dinov3")
    before, expected = [dict(vars(m)) for m in model.modules()], output(model, inputs)
    with patch(model) as handle:
        calls.clear()
        for stock in (other, of("dinov3")[0]):  # one was made before the patch, one after
            assert torch.equal(output(stock, inputs), expected) and not calls
        assert torch.equal(output(model, inputs), expected) and calls == [True] * 4
        assert patch(model) is handle
        with pytest.raises(ValueError, match=r"(?s)already calls torch_rope.*What is there: .*attn.forward of 2"):
            patch(model, rounding="once")
    assert [dict(vars(m)) for m in model.modules()] == before
    assert torch.equal(output(model, inputs), expected) and len(calls) == 4


def test_undo_restores_all_models(calls):
    together, inputs = copy.deepcopy(models())
    with patch(together):
        pass
    calls.clear()
    for name, model in together.items():
        assert torch.equal(output(model, inputs[name]), output(*of(name)))
    assert not calls


def test_a_copy_of_a_patched_model_is_patched(calls):
    model, inputs = of("dinov3")
    expected = output(model, inputs)
    patch(model)
    copied = copy.deepcopy(model)
    calls.clear()
    assert torch.equal(output(copied, inputs), expected) and calls == [True] * 4
    assert all(module.forward.__self__ is module for module in copied.modules())


@pytest.mark.parametrize("train", [False, True])
def test_a_compiled_model_has_no_graph_breaks(train):
    model, inputs = of("attention pool")
    expected = step(model, inputs) if train else output(model, inputs)
    patch(model)
    torch._dynamo.reset()
    actual = (step if train else output)(torch.compile(model, fullgraph=True, backend=aot_eager), inputs)
    if train:
        actual = {n.removeprefix("_orig_mod."): t for n, t in actual.items()}
        assert actual.keys() == expected.keys()
        assert difference(gradients(actual), gradients(expected)) < GRADIENTS
        actual, expected = actual["output"], expected["output"]
    assert difference(actual, expected) < OUTPUT[torch.float32]


# ---- what patch refuses ----


def apply_rot_embed_scaled(x, sin_emb, cos_emb):
    return 2 * (x * cos_emb + timm.layers.pos_embed_sincos.rot(x) * sin_emb)


class Scales(nn.Module):
    def forward(self, q, k, sin, cos):
        return apply_rot_embed_scaled(q, sin, cos), apply_rot_embed(k, sin, cos)


def test_a_function_that_computes_something_else_is_refused():
    module, inputs = nn.Sequential(Scales()), qk_and_tables()
    expected = module[0](*inputs)
    with pytest.raises(NotImplementedError, match="Scales.forward of 0 calls apply_rot_embed_scaled: .* must rotate"):
        patch(module)
    assert all(map(torch.equal, module[0](*inputs), expected))
    assert "forward" not in vars(module[0])


def apply_rot_embed_scaled_by_rope(x, sin_emb, cos_emb):
    return 2 * torch_rope.rotate(x.transpose(1, 2), cos_emb[:, ::2], sin_emb[:, ::2], interleaved=True).transpose(1, 2)


def test_a_function_that_is_refused_can_be_registered():
    module, inputs = Scales(), qk_and_tables()
    expected = module(*inputs)
    register(apply_rot_embed_scaled, apply_rot_embed_scaled_by_rope)
    try:
        assert "apply_rot_embed_scaled is apply_rot_embed_scaled_by_rope" in str(patch(module))
    finally:
        register(apply_rot_embed_scaled, None)
    for actual, wanted in zip(module(*inputs), expected, strict=True):
        assert difference(actual, wanted) < OUTPUT[torch.float32]


def test_tables_that_are_no_rotation_go_to_the_function_of_timm(calls):
    module = Lists()
    q, k, sin, cos = qk_and_tables(half=True)  # with half=False, the channels of a pair have different angles
    expected = module(q, k, sin, cos, False)
    patch(module)
    calls.clear()
    with pytest.warns(UserWarning, match="apply_rot_embed of .* was called with different angles for the two channels"):
        out = module(q, k, sin, cos, False)
    assert all(map(torch.equal, out, expected)) and not any(calls)
    calls.clear()
    assert all(map(torch.equal, module(q, k, sin, cos, True), Lists()(q, k, sin, cos, True))) and all(calls)


def test_a_model_that_does_not_rotate_is_refused():
    with pytest.raises(ValueError, match="is not patched: no module of it calls a rotary function"):
        patch(timm.create_model("test_resnet"))


@pytest.mark.parametrize("model", ["vit_small_patch16_dinov3", timm.models.Eva, None], ids=str)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r'such as timm.create_model\("vit_small_patch16_dinov3"\) returns'):
        patch(model)


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match="rounding is .exact. but must be .eager. or .once."):
        patch(Lists(), rounding="exact")
