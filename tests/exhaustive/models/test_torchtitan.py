"""Tests examples/torchtitan: torchtitan's mechanism puts the overrides in place, and they rotate as its own modules do."""

import importlib
import sys
import types
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from cases import ROOT, Calls, needed
from torch.distributed.tensor import DTensor, Replicate, Shard

if sys.version_info < (3, 11):
    pytest.skip("torchtitan needs Python 3.11", allow_module_level=True)
common = types.ModuleType("torchtitan.models.common")  # its __init__ imports triton, which a CPU build of torch lacks
common.__path__ = [f"{path}/models/common" for path in needed("torchtitan").__path__]
sys.modules.setdefault(common.__name__, common)
config, rope = needed("torchtitan.config"), needed("torchtitan.models.common.rope")
sys.path.append(str(ROOT / "examples" / "torchtitan"))
override = importlib.import_module("torch_rope_override")

pytestmark = pytest.mark.cpu
BATCH, SEQ, DIM, LENGTH = 2, 5, 16, 32
LENGTHS = [name for name in ("max_seq_len", "max_context_length") if name in rope.RoPE.Config.__dataclass_fields__]
# torchtitan 0.3 has q [batch, seq, heads, head_dim], later ones [tokens, heads, head_dim].
TOKENS = (BATCH, SEQ) if LENGTHS == ["max_seq_len"] else (BATCH * SEQ,)
KINDS = {"complex_rope": rope.ComplexRoPE, "cos_sin_rope": rope.CosSinRoPE}


def settings(kind, **more):
    return KINDS[kind].Config(dim=DIM, **{LENGTHS[0]: LENGTH}, **more)


def modules(kind, **more):
    """Returns torchtitan's module, and the one that the override makes of its config."""
    return settings(kind, **more).build(), getattr(override, kind)(settings(kind, **more)).build()


def qk(dtype=torch.float32):
    return [torch.randn(*TOKENS, heads, DIM).to(dtype) for heads in (4, 2)]


class Axes(rope.CosSinRoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(rope.CosSinRoPE.Config):
        pass


class Model(config.Configurable):
    """Has a config with three rotary embeddings, as the model of a Trainer.Config has them."""

    @dataclass(kw_only=True, slots=True)
    class Config(config.Configurable.Config):
        a: rope.ComplexRoPE.Config
        b: rope.CosSinRoPE.Config
        c: rope.CosSinRoPE.Config


def test_torchtitan_applies_both_overrides_and_no_subclass_is_claimed():
    a = settings("complex_rope", theta=5e5, scaling="llama")
    root = Model.Config(a=a, b=settings("cos_sin_rope", theta=1e6), c=Axes.Config(dim=DIM, **{LENGTHS[0]: LENGTH}))
    targets = [f"torch_rope_override.{kind}" for kind in KINDS]
    assert len(config.apply_overrides(config.OverrideConfig(imports=targets), root)) == 2
    assert type(root.c) is Axes.Config and type(root.a.build()) is override.FusedComplexRoPE
    assert (root.a.theta, root.a.scaling) == (5e5, "llama")
    assert type(root.b) is override.FusedCosSinRoPE.Config and root.b.theta == 1e6


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_rotates_as_that_of_torchtitan(kind, positions):
    theirs, ours = modules(kind, scaling="yarn", rope_factor=4.0)
    given = [t.requires_grad_() for t in qk(torch.bfloat16 if positions else torch.float32)]
    p = torch.randint(LENGTH, TOKENS) if positions else None
    with Calls() as calls:
        out = ours(*given, p)
    assert [n for n in calls.names if n.startswith("rope::")] == ["rope::rotate_qk"]
    assert not {"aten::index.Tensor", "aten::gather", "aten::clone"} & set(calls.names)
    expected = theirs(*given, p)
    torch.testing.assert_close(out, tuple(expected))
    seeds = [torch.randn_like(t) for t in out]
    torch.testing.assert_close(*(torch.autograd.grad(y, given, seeds) for y in (out, expected)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_survives_meta_initialisation_compiles_and_takes_sharded_heads(kind, tmp_path):
    """On one process: q, k and the cache are DTensors, and positions are a plain tensor, as in torchtitan."""
    theirs, _ = modules(kind)
    with torch.device("meta"):
        ours = modules(kind)[1]
    ours.to_empty(device="cpu")
    ours._init_self_buffers()
    given, p = qk(), torch.randint(LENGTH, TOKENS)
    expected = tuple(theirs(*given, p))
    torch.testing.assert_close(torch.compile(ours, fullgraph=True, backend="aot_eager")(*given, p), expected)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        ours.cache = DTensor.from_local(ours.cache, mesh, [Replicate()])
        out = ours(*(DTensor.from_local(t, mesh, [Shard(len(TOKENS))]) for t in given), p)
        assert all(y.placements == (Shard(len(TOKENS)),) for y in out)
        torch.testing.assert_close(tuple(y.to_local() for y in out), expected)
    finally:
        dist.destroy_process_group()
