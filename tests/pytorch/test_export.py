"""Tests that torch.export, AOTInductor and the other tracers keep the operators, and that their programs are right."""

import copy
import io

import pytest
import torch
from cases import EXHAUSTIVE
from programs import (
    COMPILING,
    DIM,
    HEADS,
    KV_HEADS,
    LENGTH,
    OF_A_LAYER,
    assert_same_bits,
    assert_same_call,
    norm_weights,
    operands,
    qk,
    rope,
    split,
    tables,
)
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import torch_rope

pytestmark = [*COMPILING, pytest.mark.shared]


class Rotating(torch.nn.Module):
    """Rotates q and k of a packed projection by one of the operators. Returns q, k, v and the cache if there is one."""

    def __init__(self, op, device):
        super().__init__()
        self.op = op
        cos, sin = tables(device)
        self.register_buffer("cos", cos)
        # On mps torch loads only contiguous tensors.
        self.register_buffer("sin", sin if device != "mps" else sin.contiguous())
        self.register_buffer("kv", torch.zeros(2, 6, LENGTH, KV_HEADS, DIM, device=device) if "cache" in op else None)
        self.register_buffer("norm", torch.stack(norm_weights(device)) if "norm" in op else None)

    def forward(self, qkv, offset):
        q, k, v = split(-qkv)  # Inductor removes a product with 1 and a sum with 0
        tensors = (q, k) if self.kv is None else (q, k, v, *self.kv)
        norm = () if self.norm is None else self.norm
        result = getattr(rope, self.op)(*tensors, *norm, self.cos, self.sin, offset=offset)
        q, k = result or (q, k)
        return -q, -k, -v, *(() if self.kv is None else -self.kv)


class Layers(torch.nn.Module):
    """Has a layer for each operator, and writes an intermediate at a storage offset that depends on the shape."""

    def __init__(self, device):
        super().__init__()
        self.layers = torch.nn.ModuleDict({op: Rotating(op, device) for op in OF_A_LAYER})

    def forward(self, qkv, offset):
        results = {op: layer(qkv, offset) for op, layer in self.layers.items()}
        stack = torch.stack([split(qkv)[0]] * 3)
        rope.rotate_(stack[1], self.layers["rotate_qk"].cos, self.layers["rotate_qk"].sin)
        return results | {"rotate_": stack}


def assert_same_layers(actual, expected):
    assert actual.keys() == expected.keys()
    for op in expected:
        assert_same_bits(actual[op], expected[op], op)


def packed_qkv(device, seq, batch=2):
    return torch.randn(batch, seq, (HEADS + 2 * KV_HEADS) * DIM, device=device)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_survives_saving_decomposing_and_copying(strict, device):
    """Each program runs at other lengths, batches and offsets than it was exported with."""
    module = Layers(device)
    exported = torch.export.export(
        module,
        (packed_qkv(device, 6), 3),
        dynamic_shapes={"qkv": {0: Dim("batch", max=6), 1: Dim("seq", min=2, max=60)}, "offset": Dim.DYNAMIC},
        strict=strict,
    )
    targets = {node.target for node in exported.graph.nodes}
    assert {getattr(rope, op).default for op in (*OF_A_LAYER, "rotate_")} <= targets
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    decomposed = loaded.run_decompositions()
    targets = {node.target for node in decomposed.graph.nodes}
    assert {
        rope.rotate_qk.default,
        rope.norm_rotate_qk.default,
        torch.ops.higher_order.auto_functionalized_v2,
    } <= targets
    assert not {rope.rotate_.default, rope.rotate_qk_.default, rope.rotate_into_cache_.default} & targets
    programs = [exported, loaded, decomposed, copy.deepcopy(exported)]
    for seq, batch, offset in ((6, 2, 3), (11, 3, 0), (2, 5, 40)):
        qkv = packed_qkv(device, seq, batch)
        for program in programs:
            assert_same_layers(program.module()(qkv, offset), module(qkv, offset))


@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
def test_an_exported_program_writes_to_the_tensor_of_the_caller(op, device):
    """The module itself does so too."""
    cos, sin = tables(device)

    class Module(torch.nn.Module):
        def forward(self, qkv, kv):
            q, k, v = qkv.unbind(0)
            getattr(rope, op)(q, k, *((v, *kv.unbind(1)) if "cache" in op else ()), cos, sin)
            return qkv + 0

    seq, length = (Dim(name, min=2, max=60) for name in ("seq", "length"))
    qkv = lambda n: torch.randn(3, 2, n, HEADS, DIM, device=device)  # noqa: E731
    kv = lambda n: torch.randn(3, 2, n, HEADS, DIM, device=device)  # noqa: E731
    exported = torch.export.export(Module(), (qkv(6), kv(8)), dynamic_shapes={"qkv": {2: seq}, "kv": {2: length}})
    for program in (exported, exported.run_decompositions()):
        for n in (6, 4, 9):
            assert_same_call(Module(), program.module(), qkv(n), kv(n + 5))


def test_an_exported_offset_may_be_data(device):
    """Its value needs no guard, because the kernel checks its range."""
    cos, sin = tables(device)

    class Module(torch.nn.Module):
        def forward(self, x, t):
            return rope.rotate(x, cos, sin, offset=t.item())

    x = qk(device)[0]
    exported = torch.export.export(Module(), (x, torch.tensor(3)))
    for offset in (0, 3, 58):
        assert_same_bits(exported.module()(x, torch.tensor(offset)), Module()(x, torch.tensor(offset)))
    with pytest.raises(IndexError):
        exported.module()(x, torch.tensor(59))


# torch's backends decompose the program that they get. make exhaustive also gives them one that is decomposed already.
@pytest.mark.parametrize("decomposed", [False, True] if EXHAUSTIVE else [False])
def test_an_aot_inductor_package_does_what_its_module_does(decomposed, device, tmp_path):
    """The batch and the length are dynamic, and the position is data.

    The package writes q and k in place, at a storage offset that depends on batch and length, and keeps the cache.
    """
    if device == "mps":
        pytest.skip("tests/backends/metal/test_torch.py has a package for Metal")

    class Module(Layers):
        def forward(self, qkv, offset):
            return super().forward(qkv, offset.item())

    module = Module(device)
    batch, seq = Dim("batch", min=2, max=6), Dim("seq", min=2, max=60)
    example = packed_qkv(device, 6), torch.tensor(3)
    exported = torch.export.export(module, example, dynamic_shapes=({0: batch, 1: seq}, None))
    if decomposed:
        exported = exported.run_decompositions()
    quick = {"aot_inductor.precompile_headers": False}  # shorter, because the package is compiled only once
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "rope.pt2"), inductor_configs=quick
    )
    run = torch._inductor.aoti_load_package(package)
    for b, s, offset in ((2, 6, 3), (5, 9, 0), (3, 2, 17)):
        inputs = packed_qkv(device, s, b), torch.tensor(offset)
        assert_same_layers(run(*inputs), module(*inputs))


# ---- other tracers ----


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("op", OF_A_LAYER)
def test_make_fx_keeps_the_operator(op, tracing_mode, device):
    cos, sin = tables(device)

    def function(*tensors):
        tensors = tuple(t * 1 for t in tensors)
        return getattr(rope, op)(*tensors, cos, sin, offset=1) or tensors

    graph = make_fx(function, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*operands(op, device))
    assert any(node.target is getattr(rope, op).default for node in graph.graph.nodes)
    assert_same_call(function, graph, *operands(op, device))


@pytest.mark.parametrize("op", ["rotate", "rotate_"])
def test_functionalize_takes_only_functional_operators(op, device):
    """torch.func.functionalize keeps them, and refuses every in-place operator that is not one of ATen."""
    cos, sin = tables(device)

    def function(x):
        x = x * 1
        out = getattr(rope, op)(x, cos, sin)
        return x if out is None else out

    x = qk(device)[0]
    if op == "rotate":
        assert_same_bits(torch.func.functionalize(function)(x), function(x))
    else:
        with pytest.raises(RuntimeError, match="output has alias annotations"):
            torch.func.functionalize(function)(x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("op", ["rotate_qk", "norm_rotate_qk"])
def test_jit_trace_gives_the_same_results_at_another_length(op, device):
    cos, sin = tables(device)
    function = lambda *tensors: getattr(torch_rope, op)(*tensors, cos, sin)  # noqa: E731
    traced = torch.jit.trace(function, tuple(operands(op, device, 6)))
    assert_same_call(function, traced, *operands(op, device, 9))
