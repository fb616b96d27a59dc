"""Tests that torch.compile keeps values and gradients, with one program for all lengths, offsets, positions."""

import copy
import re

import pytest
import torch
from cases import EXHAUSTIVE, schema_of
from programs import (
    COMPILING,
    DIM,
    HEADS,
    IN_PLACE,
    KV_HEADS,
    LENGTH,
    OF_A_LAYER,
    assert_same_bits,
    assert_same_call,
    compiled,
    copies,
    norm_weights,
    operands,
    qk,
    rope,
    tables,
)
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

import torch_rope

pytestmark = COMPILING


# ---- values and gradients ----


@pytest.mark.core
def test_compiled_values_are_eager_values(device):
    """The operators keep every bit, because the compiled program calls the same kernels."""
    cos, sin = tables(device, rotary_dim=4)
    positions = torch.randint(0, 60, (3, 6, 2), device=device)[1:, :, 0]
    narrow = positions.int()
    by_head = cos[positions][:, :, None].expand(-1, -1, HEADS, -1), torch.rand(2, 6, HEADS, 2, device=device)
    freq, (q_weight, k_weight) = torch_rope.inv_freq(DIM, device=device), norm_weights(device)
    k_weight = k_weight.bfloat16()
    norm = {"norm_eps": 0.1, "attention_factor": 1.3, "interleaved": True, "norm_weight_offset": 1.0}
    eager = {"eager_rounding": True, "round_before_weight": True, "q_factor": torch.rand(2, 6, device=device)}
    own = q_weight.bfloat16(), k_weight
    calls = {
        "interleaved": lambda q, k: rope.rotate(q, cos, sin, interleaved=True),
        "transposed": lambda q, k: rope.rotate(q.transpose(1, 2), cos, sin, offset=3).transpose(1, 2),
        "positions": lambda q, k: rope.rotate_qk(q, k, cos, sin, positions=positions, inverse=True),
        "inv_freq": lambda q, k: rope.rotate_qk(q, k, inv_freq=freq, positions=narrow),
        "rotary_start": lambda q, k: rope.rotate_qk(q, k, cos, sin, rotary_start=3, eager_rounding=True),
        "by head": lambda q, k: rope.rotate(q, *by_head),
        "norm": lambda q, k: rope.norm_rotate_qk(q, k, q_weight, k_weight, cos, sin, None, positions, **norm),
        "eager norm": lambda q, k: rope.norm_rotate_qk(
            q, k, *own, cos.bfloat16(), sin.bfloat16(), None, positions, **eager
        ),
        "cos_sin": lambda q, k: rope.cos_sin(positions, freq, attention_factor=1.3, dtype=torch.float16),
        "norm in place": lambda q, k: rope.norm_rotate_qk_(q, k, q_weight, k_weight, inv_freq=freq),
        "in place": lambda q, k: rope.rotate_qk_(q, k, inv_freq=freq),
    }
    function = lambda *tensors: [call(*tensors) for call in calls.values()]  # noqa: E731
    q, k = (t.bfloat16() for t in qk(device))
    a, b = copies((q, k)), copies((q, k))
    for name, actual, expected in zip(calls, compiled(function, device)(*a), function(*b), strict=True):
        assert_same_bits(actual, expected, name)
    assert_same_bits(tuple(a), tuple(b), "in place")


@pytest.mark.core
@pytest.mark.shared
def test_the_compiled_norm_is_one_call_forward_and_one_backward(device):
    """This holds at every length and offset. q, k and their weights have the gradients of eager, bit for bit."""
    cos, sin = tables(device, rotary_dim=4)
    options = {"norm_eps": 0.1, "attention_factor": 1.2, "interleaved": True, "norm_weight_offset": 1.0}

    def function(*t):  # with a factor that depends on the length
        factor = 1 + t[0].new_ones(t[0].shape[1]).cumsum(0) / 8
        return rope.norm_rotate_qk(*t[:-1], cos, sin, offset=t[-1], q_factor=factor, **options)

    graphs = AotEagerAndRecordGraphs()
    program = compiled(function, device, graphs, dynamic=True)
    for seq, offset in ((6, 2), (9, 5), (4, 30)):
        inputs, seed = operands("norm_rotate_qk", device, seq, over_heads=True), qk(device, seq)[0]
        results = []
        for f in (program, function):
            leaves = [t.detach().requires_grad_() for t in inputs]
            outs = f(*leaves, offset)
            outs[0].backward(seed)  # k is not used
            results.append((*outs, *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)))
        assert_same_bits(*results)
    calls = [str(n.target) for graph in (*graphs.fw_graphs, *graphs.bw_graphs) for n in graph.graph.nodes]
    calls = [name for name in calls if name.startswith("rope.")]
    assert calls == ["rope.norm_rotate_qk.default", "rope._norm_rotate_qk_backward.default"]


# ---- one program for all lengths, offsets and positions ----


def counted(function, **options):
    """Returns the compiled function, and an object that counts compilations in frame_count.

    The backend is aot_eager, because Dynamo guards on the same things with every backend.
    """
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def calls_of_a_layer(tensors, *args, **keywords):
    """Calls the function of each operator of a layer with its tensors and these arguments. Returns all results."""
    results = ()
    for op in OF_A_LAYER:
        more = {name: a for name, a in keywords.items() if name != "slots" or "cache" in op}
        results += getattr(torch_rope, op)(*tensors[op], *args, **more) or ()
    return results


def of_a_layer(device, seq=1, batch=2):
    return {op: operands(op, device, seq, batch) for op in OF_A_LAYER}


@pytest.mark.core
@pytest.mark.shared
def test_a_decode_loop_does_not_recompile_for_each_offset(device):
    """It compiles once for the first offset, and once for all others, which Dynamo makes symbolic by itself."""
    angles, freq = tables(device), torch_rope.inv_freq(DIM, device=device)

    def function(offset, tensors, others):
        of_frequency = {"inv_freq": freq[..., :2], "offset": offset, "rotary_start": 3}
        by_token = [t[None, :1] for t in angles]  # offset chooses cells alone
        rope.rotate_into_cache_(*tensors["rotate_into_cache_"], *by_token, offset=offset + 9)
        return calls_of_a_layer(tensors, *angles, offset=offset) + calls_of_a_layer(others, **of_frequency)

    program, counter = counted(function)
    for offset in (5, 6, 7, 20, 33, 2):
        assert_same_call(function, program, offset, of_a_layer(device), of_a_layer(device))
    assert counter.frame_count == 2


@pytest.mark.core
@pytest.mark.shared
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_lengths_positions_slots_and_an_offset_in_a_tensor_never_recompile(device):
    """No check of ours fixes the batch, the length or the sizes of the caches, or mark_dynamic would raise."""
    angles = tables(device)

    def function(offset, positions, slots, tensors):
        return calls_of_a_layer(tensors, *angles, positions=positions, offset=offset.item(), slots=slots)

    program, counter = counted(function)
    for batch, seq, offset in ((2, 5, 0), (3, 7, 2), (6, 4, 1)):
        positions = torch.randint(0, 60, (batch, seq), device=device)
        slots = torch.randperm(LENGTH * batch, device=device)[: batch * seq].view(batch, seq).int()
        inputs = torch.tensor(offset), positions, slots, of_a_layer(device, seq, batch)
        a, b = copies(inputs), copies(inputs)
        for t in tree_leaves(b[1:]):
            for dim in (0, 1) if t.dim() > 1 else ():
                torch._dynamo.mark_dynamic(t, dim)
        assert_same_bits(program(*b), function(*a))
        assert all(map(torch.equal, tree_leaves(b), tree_leaves(a)))
    assert counter.frame_count == 1


@pytest.mark.shared
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_tokens_that_is_data_compiles_once(device):
    """A mask decides how many tokens there are."""
    cos, sin = tables(device)
    weights = norm_weights(device)

    def function(x, mask, *caches):
        x = x[mask]
        results = (
            rope.rotate(x, cos, sin),
            rope.rotate(x, cos, sin, positions=mask.nonzero().flatten()),
            rope.rotate(x[:, :2], cos, sin),  # whether this is dense depends on the data; its strides must not
            *rope.rotate_qk(x.expand(2, -1, -1, -1), x[:, :2].expand(2, -1, -1, -1), cos, sin),
            *rope.norm_rotate_qk(x, x[:, :2], *weights, cos, sin),
        )
        q, k, v = x.split([HEADS - 2, 1, 1], 1)
        rope.rotate_into_cache_(q, k, v, *caches, cos, sin, slots=mask.nonzero().flatten())
        return *results, q + 1

    program, counter = counted(function)
    x = torch.randn(10, HEADS, DIM, device=device)
    for kept in (4, 7, 2):
        mask = torch.arange(10, device=device) < kept
        assert_same_call(function, program, x, mask, *copies(torch.zeros(2, 12, 1, DIM, device=device)))
    assert counter.frame_count == 1


class LongInverse(torch.nn.Module):
    def forward(self, q, k):
        return torch_rope.rotate_qk(q, k, *tables(q.device), inverse=q.shape[1] > 4)


@pytest.mark.shared
def test_a_flag_may_depend_on_a_dynamic_size(device):
    exported = torch.export.export(LongInverse(), tuple(qk(device)), dynamic_shapes=[{1: torch.export.Dim.DYNAMIC}] * 2)
    for program, seq in ((exported.module(), 6), *((counted(LongInverse(), dynamic=True)[0], seq) for seq in (6, 4))):
        assert_same_call(LongInverse(), program, *qk(device, seq))


# ---- modes and errors ----


@pytest.mark.shared
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inputs_that_require_grad_may_be_rotated_in_place_without_grad(mode, device):
    angles, op = tables(device), "rotate_into_cache_"
    norm = {f"{x}_norm_weight": w.requires_grad_() for x, w in zip("qk", norm_weights(device), strict=True)}
    function = lambda *tensors: getattr(rope, op)(*tensors, *angles, **norm)  # noqa: E731
    program = compiled(function, device, backend="aot_eager")
    with mode():
        for requires_grad in (False, True):
            assert_same_call(function, program, *(t.requires_grad_(requires_grad) for t in operands(op, device)))


@pytest.mark.shared
@pytest.mark.parametrize("op, name", [("rotate_qk_", "k"), *(("rotate_into_cache_", x) for x in ("k", "k_cache"))])
def test_requiring_a_gradient_that_does_not_exist_is_the_error_of_eager(op, name, device):
    tensors = [*operands(op, device), *tables(device)]
    tensors[[a.name for a in schema_of(op).arguments].index(name)].requires_grad_()
    function = lambda *t: getattr(rope, op)(*(x * 1 for x in t))  # noqa: E731
    with pytest.raises(RuntimeError, match=f"{name} requires grad but must not") as eager:
        function(*tensors)
    with pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
        compiled(function, device, backend="aot_eager")(*tensors)


# ---- learned tables and frequencies ----


@pytest.mark.shared
def test_one_program_gives_the_gradients_of_learned_angles_at_all_lengths_and_offsets(device):
    """The inputs that require grad get one: all, the angles alone, or q and some of the angles alone."""
    freq = torch_rope.inv_freq(4, device=device)
    angles = [*tables(device, rotary_dim=4), freq, 1 + freq, torch.stack([freq, 1 - freq])]

    def function(q, k, cos, sin, inv_freq, of_table, on_axes, offset):
        positions = torch.arange(q.shape[1], device=device)[None] + offset
        axial = rope.axial_cos_sin(positions.expand(2, 1, -1), on_axes)
        return (
            *rope.rotate_qk(q, k, cos, sin, offset=offset),
            *rope.rotate_qk(q, k, inv_freq=inv_freq, offset=offset, attention_factor=1.2),
            *rope.rotate_qk(q, k, *rope.cos_sin(positions, of_table)),
            *rope.rotate_qk(q, k, *axial),
        )

    def run(f, needed, inputs, seeds, offset):
        leaves = [t.detach().clone().requires_grad_(i in needed) for i, t in enumerate(inputs)]
        outs = f(*leaves, offset)
        torch.autograd.backward(outs, seeds * 4)
        assert [i for i, t in enumerate(leaves) if t.grad is not None] == needed
        return [*outs, *(leaves[i].grad for i in needed)]

    for needed in ([*range(7)], [0, 3, 4, 5, 6], [2, 3, 4, 5, 6])[: 3 if EXHAUSTIVE else 1]:
        program, counter = counted(function, dynamic=True)
        for seq, offset in ((5, 4), (6, 2), (17, 30)):
            given = needed, [*qk(device, seq), *angles], qk(device, seq), offset
            torch.testing.assert_close(run(program, *given), run(function, *given), rtol=1e-6, atol=1e-5)
        assert counter.frame_count == 1


# ---- CUDA graphs ----


@pytest.mark.shared
def test_the_operators_of_a_layer_run_in_a_cuda_graph(device):
    """A graph may write the caches, because they are buffers of a module, whose addresses never change."""
    if device != "cuda":
        pytest.skip("only CUDA has CUDA graphs")
    angles = tables(device)

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(2, 2, LENGTH, KV_HEADS, DIM, device=device))

        def forward(self, positions, tensors):
            tensors = {op: [t * 1 for t in tensors[op]] for op in tensors}
            tensors["rotate_into_cache_"][3:] = self.kv
            results = calls_of_a_layer(tensors, *angles, positions=positions)
            return *results, *(t * 1 for op in IN_PLACE if op in tensors for t in tensors[op])

    module = Module()
    program = torch.compile(copy.deepcopy(module), fullgraph=True, mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for step in range(4):  # warm up, record, replay
            given = torch.arange(6, device=device) + step, of_a_layer(device, 6)
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits(program(*given), module(*given))
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
