"""Tests of what PyTorch does with the operators on Metal: compiled programs, and memory.

On a Mac these tests run on the GPU.
"""

import json
import zipfile

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec")
rope = torch.ops.rope


class Layer(torch.nn.Module):
    """Writes k and v into a cache and rotates q: views and operators, and no other computation."""

    def __init__(self):
        super().__init__()
        for name, rows in ("cos", 64), ("sin", 64):
            self.register_buffer(name, torch.randn(rows, 8, device="mps"))
        for name in "k_cache", "v_cache":
            self.register_buffer(name, torch.zeros(64, 2, 16, device="mps"))

    def forward(self, qkv):
        q, k, v = qkv.view(-1, 8, 16).split([4, 2, 2], 1)
        rope.rotate_into_cache_(q, k, v, self.k_cache, self.v_cache, self.cos, self.sin, offset=3)
        q, k = rope.rotate_qk(q, k, self.cos, self.sin, inverse=True)
        return q.transpose(0, 1), k


@pytest.fixture
def layer(device):
    """Returns a layer, its input, and a function that checks the results of a program, and what the program wrote."""
    layer, qkv = Layer(), torch.randn(8, 8 * 16, device="mps")
    state = qkv, layer.k_cache, layer.v_cache
    before = [t.clone() for t in state]
    expected = [t.clone() for t in (*layer(qkv), *state)]
    for t, first in zip(state, before, strict=True):
        t.copy_(first)

    def check(outs):
        assert all(torch.equal(a, e) for a, e in zip((*outs, *state), expected, strict=True))

    return layer, qkv, check


@pytest.mark.exhaustive
def test_inductor_calls_the_operators_and_compiles_no_shader(layer):
    from torch._inductor.utils import run_and_get_code  # takes seconds

    layer, qkv, check = layer
    with torch.compiler.config.patch(force_disable_caches=True):
        outs, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), qkv)
    check(outs)
    for op in "rotate_into_cache_", "rotate_qk":
        assert code.count(f"torch.ops.rope.{op}.default(") == 1
    assert "compile_mps_shader" not in code


@pytest.mark.exhaustive
def test_aot_inductor_calls_the_operators_through_the_proxy_executor(layer, tmp_path):
    """A simulated device makes the program of the package; a Mac also compiles and runs it."""
    layer, qkv, check = layer
    simulated = hasattr(torch.ops.simulator, "last_dispatches")
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(layer, (qkv.clone(),)),
        package_path=str(tmp_path / "rope.pt2"),
        inductor_configs={"aot_inductor.package_cpp_only": simulated, "aot_inductor.precompile_headers": False},
    )
    if not simulated:
        return check(torch._inductor.aoti_load_package(package)(qkv))
    files = zipfile.ZipFile(package)
    read = lambda end: next(files.read(name).decode() for name in files.namelist() if name.endswith(end))  # noqa: E731
    operators = [node["node"]["target"] for node in json.loads(read("wrapper.json"))["nodes"]]
    assert operators == ["rope::rotate_into_cache_", "rope::rotate_qk"]
    assert read("wrapper.cpp").count("aoti_torch_proxy_executor_call_function(proxy_executor,") == 2


def allocated(function):
    """Returns the sizes of the tensors that one operator allocates."""
    function()  # the first call of all makes a tensor that is kept
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        function()
    events = [event for event in recorded.events() if event.name in ("aten::empty", "aten::empty_strided")]
    return [event.concrete_inputs[0] for event in events]


def test_a_call_allocates_its_results_and_the_sums_of_a_weight(device):
    q, k = torch.randn(2, 5, 4, 16, device="mps"), torch.randn(2, 5, 2, 16, device="mps")
    cos, sin, weight = torch.rand(9, 8, device="mps"), torch.rand(9, 8, device="mps"), torch.rand(16, device="mps")
    caches = torch.zeros(2, 2, 9, 2, 16, device="mps")
    results = [list(q.shape), list(k.shape)]
    assert allocated(lambda: rope.rotate_qk_(q, k, cos, sin)) == []
    assert allocated(lambda: rope.rotate_into_cache_(q, k, k, *caches, cos, sin)) == []
    assert allocated(lambda: rope.rotate_qk(q, k, cos, sin)) == results
    parts = torch.rand(9, 8, 2, device="mps").unbind(-1)  # of complex numbers
    assert allocated(lambda: rope.rotate_qk(q, k, *parts, interleaved=True)) == results
    assert allocated(lambda: rope.norm_rotate_qk(q, k, weight, weight, cos, sin)) == results
    gradients = allocated(lambda: rope._norm_rotate_qk_backward(q, k, q, k, weight, weight, cos, sin))
    assert gradients == [*results, [16], [16], [1, 2 * 16]]
    both = cos.repeat(1, 8)[:4, :16], sin.repeat(1, 8)[:2, :16]  # the weights of a norm over all heads
    gradients = allocated(lambda: rope._norm_rotate_qk_backward(q, k, q, k, *both, cos, sin))
    assert gradients == [*results, [4, 16], [2, 16], [1, (4 + 2) * 16]]
    assert allocated(lambda: rope._rotate_table_backward(q, k, q, k, cos, sin)) == [[9, 8], [9, 8]]
