"""Tests that torch.export and AOTInductor keep the operators, and that their programs are right."""

import copy
import io
from functools import partial

import pytest
import torch
from calls import SOURCES
from cases import EXHAUSTIVE, python
from programs import (
    COMPILING,
    DIM,
    HEADS,
    IN_PLACE,
    KV_HEADS,
    LENGTH,
    OF_A_LAYER,
    Everything,
    assert_same_bits,
    norm_weights,
    rope,
    split,
    tables,
)
from torch.export import Dim
from torch.utils._pytree import tree_leaves, tree_map

import torch_rope
from torch_rope import reference

pytestmark = [*COMPILING, pytest.mark.shared]


class Rotating(torch.nn.Module):
    """Rotates q and k of a packed projection by one of the operators. Returns q, k, v and the cache if there is one."""

    def __init__(self, op, device):
        super().__init__()
        self.op = op
        cos, sin = tables(device)
        self.register_buffer("cos", cos)
        # On a GPU torch loads only contiguous tensors.
        self.register_buffer("sin", sin if device == "cpu" else sin.contiguous())
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


def test_an_exported_program_survives_saving_decomposing_and_copying(device):
    """Each program runs at other lengths, batches and offsets than it was exported with."""
    module = Layers(device)
    exported = torch.export.export(
        module,
        (packed_qkv(device, 6), 3),
        dynamic_shapes={"qkv": {0: Dim("batch", max=6), 1: Dim("seq", min=2, max=60)}, "offset": Dim.DYNAMIC},
    )
    targets = {node.target for node in exported.graph.nodes}
    assert {getattr(rope, op).default for op in (*OF_A_LAYER, "rotate_")} <= targets
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    decomposed = loaded.run_decompositions()
    targets = {node.target for node in decomposed.graph.nodes}
    assert {rope.rotate_qk.default, rope.norm_rotate_qk.default} <= targets
    assert not {getattr(rope, op).default for op in IN_PLACE} & targets
    programs = [exported, loaded, decomposed, copy.deepcopy(exported)]
    for seq, batch, offset in ((6, 2, 3), (11, 3, 0), (2, 5, 40)):
        qkv = packed_qkv(device, seq, batch)
        for program in programs:
            assert_same_layers(program.module()(qkv, offset), module(qkv, offset))


@pytest.mark.cpu
@pytest.mark.parametrize("source", SOURCES if EXHAUSTIVE else SOURCES[1:2], ids=str)
def test_decompositions_leave_only_operators_of_pytorch(source, device):
    def arguments(batch, seq):
        slots = torch.randperm(4 * LENGTH)[: batch * seq].view(batch, seq) - 3
        q, angles = packed_qkv(device, seq, batch), source.arguments(batch, seq, DIM - 4, torch.float32, device, HEADS)
        return copy.deepcopy((split(q)[0], slots, angles))  # torch.export fails if an input is a view

    axes = tree_map(lambda t: [Dim.AUTO] * t.dim() if isinstance(t, torch.Tensor) else Dim.AUTO, arguments(2, 6))
    program = torch.export.export(Everything(), arguments(2, 6), dynamic_shapes=axes)
    for default in ({}, torch.export.default_decompositions())[: 2 if EXHAUSTIVE else 1]:
        decomposed = program.run_decompositions({**default, **torch_rope.decompositions()})
        assert not [n for n in decomposed.graph.nodes if "rope" in str(n.target) or "functionalized" in str(n.target)]
        given = arguments(3, 9)
        torch.testing.assert_close(decomposed.module()(*given), Everything()(*given), rtol=1e-5, atol=1e-5)


# Positions or slots of two tokens in each of two sequences, and the tokens that are written, by cell. A block has 4 cells.
WITHOUT_CELL = {
    "positions": [([[3, 4], [1, 2]], {3: 0, 5: 2, 6: 3}), ([[2**40, 2], [4, -1]], {2: 1}), ([[-1, 4], [5, 4]], {})],
    "slots": [([[7, 0], [-1, 8]], {7: 0, 0: 1}), ([[-7, 2**40], [2, -1]], {2: 2}), ([[-1, -9], [8, -1]], {})],
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", WITHOUT_CELL)
def test_a_token_without_a_cell_writes_nothing_and_a_decomposed_program_copies_each_cache_once(name, device):
    class Step(torch.nn.Module):
        def forward(self, k, v, *caches_and_cells, write=rope.rotate_into_cache_):
            *caches, cells = caches_and_cells
            write(k + 1, k, v, *caches, inv_freq=torch.zeros(4), v_scale=torch.ones(1), **{name: cells})

    k, v = torch.randint(-9, 9, (2, 2, 2, 3, 8)).float()
    caches = torch.ones(2, 4, 3, 8), torch.ones(2, 4, 3, 8, dtype=torch.int8)
    program = torch.export.export(Step(), (k, v, *caches, torch.arange(4).view(2, 2)))
    program = program.run_decompositions({**torch.export.default_decompositions(), **torch_rope.decompositions()})
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    unknown_to_some = "alias.default", "bitwise_or.Tensor", "div.Tensor_mode", "view.dtype"
    assert not {str(node.target) for node in nodes} & {f"aten.{op}" for op in unknown_to_some}
    large = [node.target for node in nodes if tree_leaves(node.meta["val"])[0].numel() >= caches[0].numel()]
    assert large == [torch.ops.aten.index_put.default] * 2
    for cells, written in WITHOUT_CELL[name]:
        for run in program.module(), partial(Step(), write=reference.rotate_into_cache_):
            found = copy.deepcopy(caches)
            run(k, v, *found, torch.tensor(cells))
            for cache, before, x in zip(found, caches, (k, v), strict=True):
                expected = before.clone()
                expected.view(8, 3, 8)[[*written]] = x.view(4, 3, 8)[[*written.values()]].to(cache.dtype)
                assert torch.equal(cache, expected)


# torch's backends decompose the program that they get, so one that is decomposed already must work too.
@pytest.mark.exhaustive
@pytest.mark.parametrize("decomposed", [False, True])
def test_an_aot_inductor_package_does_what_its_module_does(decomposed, device, tmp_path):
    """The batch and the length are dynamic, and the position is data.

    The package writes q and k in place, at a storage offset that depends on batch and length, and keeps the cache.
    """
    if device == "mps":
        pytest.skip("tests/backends/metal/test_metal.py has a package for Metal")

    class Module(Layers):
        def forward(self, qkv, offset):
            return super().forward(qkv, offset.item())

    module = Module(device)
    shapes = {0: Dim("batch", min=2, max=6), 1: Dim("seq", min=2, max=60)}, None
    exported = torch.export.export(module, (packed_qkv(device, 6), torch.tensor(3)), dynamic_shapes=shapes)
    if decomposed:
        exported = exported.run_decompositions()
    quick = {"aot_inductor.precompile_headers": False}  # shorter, because the package is compiled only once
    path = str(tmp_path / "rope.pt2")
    run = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=quick)
    )
    for b, s, offset in ((2, 6, 3), (5, 9, 0), (3, 2, 17)):
        inputs = packed_qkv(device, s, b), torch.tensor(offset)
        assert_same_layers(run(*inputs), module(*inputs))


def test_torch_fx_traces_the_functions_as_calls_of_the_operators(device):
    """It cannot trace the module, and the error says so."""
    cos, sin = tables(device)
    function = lambda q, k: torch_rope.rotate_qk(q, k, cos, sin, offset=3)  # noqa: E731
    traced, inputs = torch.fx.symbolic_trace(function), split(packed_qkv(device, 6))[:2]
    assert rope.rotate_qk.default in [node.target for node in traced.graph.nodes]
    assert_same_bits(traced(*inputs), function(*inputs))
    for module in (torch_rope.RotaryEmbedding(DIM), torch.nn.Sequential(torch_rope.RotaryEmbedding(DIM))):
        with pytest.raises(TypeError, match="q is of type Proxy .* call torch_rope.rotate_qk with inv_freq"):
            torch.fx.symbolic_trace(module)


@pytest.mark.cpu
@pytest.mark.exhaustive
@torch._dynamo.config.patch(enable_aot_compile=True)
@torch._inductor.config.patch(force_disable_caches=False)
def test_a_saved_function_with_a_module_loads(tmp_path):
    """torch.compile saves what it guards on, and leaves out the tensors of other objects."""
    rope, q = torch_rope.RotaryEmbedding(DIM), torch.randn(1, 6, HEADS, DIM)
    function = lambda rope, q: rope(q, q)  # noqa: E731
    with torch.no_grad():
        path, saved = str(tmp_path / "saved"), torch.compile(function, fullgraph=True).aot_compile(((rope, q), {}))
        saved.save_compiled_function(path)
        with open(path, "rb") as file:
            assert_same_bits(torch.compiler.load_compiled_function(file)(rope, q), rope(q, q))


@pytest.mark.cpu
@pytest.mark.exhaustive
def test_a_program_that_another_process_functionalized_compiles_correctly(tmp_path):
    class Module(torch.nn.Module):
        def forward(self, x, cos, sin):
            copy = x[1:].clone()
            rope.rotate_(copy[..., 2:, :], cos, sin)
            return copy

    x, path = torch.randn(2, 6, HEADS, DIM), tmp_path / "saved.pt2"
    torch.export.save(torch.export.export(Module(), (x, *tables("cpu"))).run_decompositions(), path)
    torch.save((x, *tables("cpu")), tmp_path / "inputs")
    program = f"""
import torch, torch_rope
module, inputs = torch.export.load({str(path)!r}).module(), torch.load({str(tmp_path / "inputs")!r})
assert torch.equal(torch.compile(module)(*inputs), module(*inputs))
"""
    done = python(program)
    assert not done.returncode, done.stderr
