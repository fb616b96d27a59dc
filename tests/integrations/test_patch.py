"""Tests of what patch changes in a model of each library, what it leaves alone, and how it is undone."""

import copy
import functools
import gc
import inspect
import pickle
import re
import sys
from unittest import mock

import pytest
import texts
import torch
from cases import ROOT, Calls, default_dtype
from layers import Attention, Layer, Processor, attention_inputs, layer_inputs, unpatched
from models import make, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_rope.integrations import diffusers, timm, transformers

pytestmark = [pytest.mark.cpu]
EITHER = "is torch.ops.rope.rotate, interleaved or half-split"
# The integration, makers of a model and of the arguments of its forward, how often it rotates, and what the Patch lists.
LIBRARIES = {
    "transformers": (
        transformers, make, lambda: (tokens(),), 2,
        ["torch_rope in LlamaForCausalLM:",
         "  model.layers.*.self_attn.forward of 2 LlamaAttention: "
         "apply_rotary_pos_emb is torch.ops.rope.rotate_qk, half-split"],
    ),
    "diffusers": (
        diffusers, lambda: Attention(Processor()), attention_inputs, 1,
        ["torch_rope in Attention:",
         "  processor of 1 Processor: apply_rotary_of_the_test is torch.ops.rope.rotate, interleaved"],
    ),
    "timm": (
        timm, Layer, layer_inputs, 2,
        ["torch_rope in Layer:", f"  forward of 1 Layer: apply_rot_embed {EITHER}; apply_rot_embed_cat {EITHER}"],
    ),
}  # fmt: skip


def results(model, args):
    """Returns how often a model calls torch_rope, and the tensors of its output."""
    with Calls() as calls:
        out = model(*args)
    out = getattr(out, "logits", out)
    return sum(name.startswith("rope::") for name in calls.names), out if isinstance(out, tuple) else (out,)


def test_a_class_is_looked_at_once_for_all_its_modules():
    model = make()
    model.experts = nn.ModuleList(nn.ModuleList() for _ in range(500))
    with mock.patch.object(inspect, "getattr_static", wraps=inspect.getattr_static) as looked:
        transformers.patch(model)
    assert looked.call_count < 100


@pytest.mark.parametrize("library, make, arguments, rotations, lists", LIBRARIES.values(), ids=LIBRARIES)
def test_patch_and_undo_change_only_this_model(library, make, arguments, rotations, lists):
    model, args, patch = make(), arguments(), library.patch
    other, (_, expected) = copy.deepcopy(model), results(model, args)
    state, generator = list(model.state_dict()), torch.get_rng_state()

    def check(model, rotations):
        calls, outputs = results(model, args)
        assert calls == rotations and all(map(torch.equal, outputs, expected))

    with patch(model) as patched:
        assert str(patched).splitlines() == lists
        check(model, rotations)
        check(other, 0)
        assert unpatched(other) and not unpatched(model)
        assert list(model.state_dict()) == state and torch.equal(torch.get_rng_state(), generator)
        assert patch(model) is patched
        for options in ({"rounding": "once"}, {"fuse": True}):
            with pytest.raises(
                ValueError, match=r", rounding='eager', fuse=False.*\)\.undo\(\) restores it\. It says: apply_rot"
            ):
                patch(model, **options)
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        check(copied, rotations)
        assert unpatched(loaded)
        check(loaded, 0)
        with patch(loaded):
            check(loaded, rotations)
    assert str(patched) == f"torch_rope is not in {type(model).__name__} any more" and unpatched(model)
    check(model, 0)
    check(copied, rotations)
    with pytest.raises(ValueError, match="or a copy; call undo"):
        patch(copied)
    patched.undo()  # does nothing more
    assert patch(model) is not patched


class Refused(nn.Module):
    def apply_rotary(self, x):
        return x


@pytest.mark.parametrize("library, make, arguments, rotations, _", LIBRARIES.values(), ids=LIBRARIES)
def test_modules_hold_no_names_of_models_that_are_not_patched(library, make, arguments, rotations, _):
    def names():
        return {(m, name) for m, module in [*sys.modules.items()] for name in vars(module) if "_torch_rope_" in name}

    gc.collect()
    before, model, other = names(), make(), make()
    patched, (calls, _) = library.patch(model), results(other, arguments())
    with library.patch(other):
        patched.undo()
        assert names() > before and (calls, results(other, arguments())[0]) == (0, rotations)
    assert names() == before
    for options in ({}, {"fuse": True}):
        with pytest.raises(NotImplementedError, match="must call a rotary function"):
            library.patch(nn.ModuleDict({"served": model, "refused": Refused()}), **options)
    gc.collect()
    assert names() == before


def test_patch_again_patches_what_is_new_and_undo_restores_what_is_still_ours():
    model, args = nn.ModuleDict({"kept": Attention(Processor()), "changed": Attention(Processor())}), attention_inputs()
    patched = diffusers.patch(model)
    model.changed.processor, model.new = Processor(), Attention(Processor())

    def rotations():
        return [results(model[name], args)[0] for name in ("kept", "changed", "new")]

    assert rotations() == [1, 0, 0] and str(patched).splitlines()[1].startswith("  kept.processor of 1 Processor: ")
    assert diffusers.patch(model) is patched and rotations() == [1, 1, 1]
    assert [line.split()[0] for line in str(patched).splitlines()[1:]] == [
        f"{n}.processor" for n in ("kept", "changed", "new")
    ]
    ours, removed = model.changed.processor, model.pop("new")
    model.changed.processor = lambda *args: ours(*args)
    assert [r.path for r in patched.left()] == ["kept"] and results(removed, args)[0] == 1
    with pytest.warns(UserWarning, match="changed.processor was replaced after it was patched.* stays as it is"):
        patched.undo()
    assert [results(m, args)[0] for m in (*model.values(), removed)] == [0, 1, 0] and "any more" in str(patched)


def test_no_code_sets_what_the_whole_process_sees():
    """The selfcheck is a program of its own, which may."""
    setters = re.compile(r"set_default_|torch\.manual_seed|fork_rng|_rng_state|(?<!_)setattr\((?!self|new,)")
    files = [p for p in (ROOT / "torch_rope").rglob("*.py") if "selfcheck" not in p.parts]
    assert [p.name for p in files if setters.search(p.read_text())] == [] and len(files) > 20


def test_a_patch_that_has_lost_everything_is_replaced():
    """As Flux's with an IP-Adapter, which replaces all processors."""
    model = Attention(Processor())
    patched, model.processor = diffusers.patch(model), Processor()
    assert str(patched) == "torch_rope is not in Attention any more"
    again = diffusers.patch(model, rounding="once")
    assert again is not patched and "rounded once" in str(again)


MODES = [lambda: torch.device("meta"), FakeTensorMode, torch.inference_mode, torch.autograd.forward_ad.dual_level]
MODES = [(mode, torch.float32) for mode in MODES] + [(torch.no_grad, torch.bfloat16), (torch.no_grad, torch.float64)]


@pytest.mark.parametrize("mode, dtype", MODES)
def test_no_mode_of_the_caller_reaches_patch(mode, dtype):
    model, other, args, options = make(), make(), (tokens(),), {"fuse": True, "exact_angles": True}
    expected, (calls, (logits,)) = str(transformers.patch(model, **options)), results(model, args)
    with default_dtype(dtype), mode():
        assert str(transformers.patch(other, **options)) == expected
    assert results(other, args)[0] == calls and torch.equal(results(other, args)[1][0], logits)


def test_replicas_of_data_parallel_compute_with_their_own_weights():
    module = Layer()
    with timm.patch(module):
        replica = module._replicate_for_data_parallel()._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica and type(replica) is type(module)
    assert type(module) is Layer


def shared(layer):
    """Returns a copy of an attention layer that shares all but a projection, as adapters make it."""
    new = copy.copy(layer)
    new._modules, new.scaling = {**layer._modules, "q_proj": nn.Linear(64, 64)}, 0.01
    return new


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, shared, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_copy_of_a_patched_layer_computes_with_its_own_weights(copied, fuse):
    found = []
    for is_patched in (False, True):
        model = make("qwen3")
        if is_patched:
            transformers.patch(model, fuse=fuse)
        torch.manual_seed(1)
        new = copied(model.model.layers[0].self_attn)
        nn.init.ones_(new.v_proj.weight.data) if copied is copy.deepcopy else None
        model.model.layers[0].self_attn = new
        found.append(model(tokens()).logits)
    torch.testing.assert_close(*found) if fuse else torch.testing.assert_close(*found, rtol=0, atol=0)


compiled = []
apply_rotary_pos_emb = torch.compile(texts.of_two, backend=lambda graph, inputs: compiled.append(1) or graph)


class Compiled(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


def test_a_compiled_function_is_not_called_by_patch_nor_in_a_patched_model():
    model, (q, k, sin, cos, _) = Compiled(), layer_inputs(half=True)
    with transformers.patch(model):
        model(q, k, cos, sin)
        assert compiled == []
    model(q, k, cos, sin)
    assert compiled == [1]


def test_gradients_keep_their_bits_under_selective_checkpointing():
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts, gradients = functools.partial(create_selective_checkpoint_contexts, policy), []
    for is_patched in (False, True):
        model = make("qwen3").train()
        if is_patched:
            transformers.patch(model)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)
