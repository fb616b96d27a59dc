"""Tests that torch.compile keeps values, gradients and errors, with one program for all lengths, offsets, positions."""

import copy
import re

import pytest
import torch
from cases import EXHAUSTIVE, checks_ranges, covering, has_dtype, name_of, schema_of
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
    backend_of,
    calls_in,
    compiled,
    copies,
    norm_weights,
    operands,
    qk,
    rope,
    run_and_see_programs,
    tables,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import torch_rope

pytestmark = COMPILING
BACKENDS = ["eager", "aot_eager", "inductor"]


# ---- values and gradients ----


@pytest.mark.heart
def test_compiled_values_are_eager_values(device):
    """The operators keep every bit, because the compiled program calls the same kernels."""
    cos, sin = tables(device, rotary_dim=4)
    positions = torch.randint(0, 60, (3, 6, 2), device=device)[1:, :, 0]
    narrow, by_head = positions.int(), torch.randint(0, 60, (2, 6, HEADS), device=device)
    freq, (q_weight, k_weight) = torch_rope.inv_freq(DIM, device=device), norm_weights(device)
    k_weight = k_weight.bfloat16()
    norm = {"norm_eps": 0.1, "attention_factor": 1.3, "interleaved": True}
    calls = {
        "interleaved": lambda q, k: rope.rotate(q, cos, sin, interleaved=True),
        "transposed": lambda q, k: rope.rotate(q.transpose(1, 2), cos, sin, offset=3).transpose(1, 2),
        "positions": lambda q, k: rope.rotate_qk(q, k, cos, sin, positions=positions, inverse=True),
        "inv_freq": lambda q, k: rope.rotate_qk(q, k, inv_freq=freq, positions=narrow),
        "rotary_start": lambda q, k: rope.rotate_qk(q, k, cos, sin, rotary_start=3, eager_rounding=True),
        "by head": lambda q, k: rope.rotate(q, cos[positions][:, :, None].expand(-1, -1, HEADS, -1), sin[by_head]),
        "norm": lambda q, k: rope.norm_rotate_qk(q, k, q_weight, k_weight, cos, sin, None, positions, **norm),
        "cos_sin": lambda q, k: rope.cos_sin(positions, freq, attention_factor=1.3, dtype=torch.float16),
        "in place": lambda q, k: rope.rotate_qk_(q, k, inv_freq=freq),
    }
    function = lambda *tensors: [call(*tensors) for call in calls.values()]  # noqa: E731
    q, k = (t.bfloat16() for t in qk(device))
    a, b = copies((q, k)), copies((q, k))
    for name, actual, expected in zip(calls, compiled(function, device)(*a), function(*b), strict=True):
        assert_same_bits(actual, expected, name)
    assert_same_bits(tuple(a), tuple(b), "in place")


@pytest.mark.parametrize("unused", [0, 1])
def test_a_compiled_backward_accepts_an_unused_output(unused, device):
    """The input of the output that is used has its gradient. The other input has none, or zeros."""
    cos, sin = tables(device)
    q, k = (t.requires_grad_() for t in qk(device))
    out = compiled(lambda q, k: rope.rotate_qk(q, k, cos, sin), device)(q, k)[1 - unused]
    out.sum().backward()
    used, other = (k, q) if unused == 0 else (q, k)
    assert torch.equal(used.grad, rope.rotate(torch.ones_like(used), cos, sin, inverse=True))
    assert other.grad is None or not other.grad.any()


def outputs_and_gradients(function, inputs, seeds, *more):
    """Returns the outputs and the gradients of inputs.

    seeds: gradients of the outputs, None for an output that is not used.
    """
    inputs = [t.detach().requires_grad_() for t in inputs]
    outs = function(*inputs, *more)
    used = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if seed is not None]
    torch.autograd.backward(*zip(*used, strict=True))
    return (*outs, *(torch.zeros_like(t) if t.grad is None else t.grad for t in inputs))


@pytest.mark.heart
@pytest.mark.parametrize("unused, over_heads", [("nothing", False), ("nothing", True), ("q", True), ("k", False)])
def test_the_compiled_norm_is_one_call_forward_and_one_backward(unused, over_heads, device):
    """This holds at every length and offset. q, k and their weights have the gradients of eager, bit for bit."""
    cos, sin = tables(device, rotary_dim=4)
    options = {"norm_eps": 0.1, "attention_factor": 1.2, "interleaved": True}

    def run():
        for seq, offset in ((6, 2), (9, 5), (4, 30)):
            inputs = operands("norm_rotate_qk", device, seq, over_heads=over_heads)
            seeds = [None if name == unused else seed for name, seed in zip("qk", qk(device, seq), strict=True)]
            actual, expected = (outputs_and_gradients(f, inputs, seeds, offset) for f in (program, function))
            assert_same_bits(actual, expected)

    function = lambda *t: rope.norm_rotate_qk(*t[:-1], cos, sin, offset=t[-1], **options)  # noqa: E731
    program = compiled(function, device, dynamic=True)
    _, programs = run_and_see_programs(device, run)
    assert list(map(calls_in, programs)) == [["norm_rotate_qk"], ["_norm_rotate_qk_backward"]] or device == "mps"


def test_a_compiled_checkpoint_runs_the_norm_again_in_the_backward(device):
    """The backward calls the forward operator again, and then the operator of its backward."""
    cos, sin = tables(device)

    def scores(*inputs):
        q, k = rope.norm_rotate_qk(*inputs, cos, sin)
        return (q @ k.mT,)

    function = lambda *inputs: checkpoint(scores, *inputs, use_reentrant=False)  # noqa: E731
    inputs, seeds = operands("norm_rotate_qk", device), [torch.randn(2, 6, HEADS, KV_HEADS, device=device)]
    program = compiled(function, device)
    actual, code = run_and_see_programs(device, outputs_and_gradients, program, inputs, seeds)
    assert_same_bits(actual, outputs_and_gradients(function, inputs, seeds))
    expected = [["norm_rotate_qk"], ["norm_rotate_qk", "_norm_rotate_qk_backward"]]
    assert list(map(calls_in, code)) == expected or device == "mps"


# ---- one program for all lengths, offsets and positions ----


class Counted:
    """Wraps a compiled function and counts its compilations.

    Its backend is aot_eager, because Dynamo guards on the same things with every backend.
    """

    def __init__(self, function, **options):
        self.counter = CompileCounterWithBackend("aot_eager")
        self.program = torch.compile(function, fullgraph=True, backend=self.counter, **options)

    def __call__(self, *args):
        return self.program(*args)

    @property
    def count(self):
        return self.counter.frame_count


@pytest.mark.heart
@pytest.mark.parametrize("op", OF_A_LAYER)
def test_a_decode_loop_does_not_recompile_for_each_offset(op, device):
    """It compiles once for the first offset, and once for all others, which Dynamo makes symbolic by itself."""
    cos, sin = tables(device)
    freq = torch_rope.inv_freq(DIM, device=device)

    def function(offset, *t):
        by_table, by_frequency = t[: len(t) // 2], t[len(t) // 2 :]
        of_table = getattr(rope, op)(*by_table, cos, sin, offset=offset)
        newer = {"rotary_start": 3, "eager_rounding": True}
        of_frequency = getattr(rope, op)(*by_frequency, inv_freq=freq[..., :2], offset=offset, **newer)
        return of_table and (*of_table, *of_frequency)

    program = Counted(function)
    for offset in (5, 6, 7, 20, 33, 2):
        assert_same_call(function, program, offset, *operands(op, device, seq=1), *operands(op, device, seq=1))
    assert program.count == 2


@pytest.mark.heart
@pytest.mark.parametrize("op", OF_A_LAYER)
def test_positions_in_a_tensor_never_recompile(op, device):
    """Slots in a tensor and an offset from .item() do not recompile either."""
    cos, sin = tables(device)
    more = {"slots"} if "cache" in op else set()

    def function(offset, positions, slots, *t):
        slots = {name: slots for name in more}
        return getattr(rope, op)(*t, cos, sin, positions=positions, offset=offset.item(), **slots)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        program = Counted(function)
        for position in range(6):
            offset, positions = torch.tensor(position % 3), torch.tensor([position], device=device)
            slots = torch.tensor([[70 - position], [position]], device=device, dtype=torch.int32)
            assert_same_call(function, program, offset, positions, slots, *operands(op, device, seq=1))
    assert program.count == 1


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("op", OF_A_LAYER)
def test_marked_dimensions_do_not_specialise(op, slots, device):
    """No check of ours fixes the batch, the length or the sizes of the caches, or mark_dynamic would raise."""
    if slots and "cache" not in op:
        return
    cos, sin = tables(device)
    function = lambda positions, slots, *t: getattr(rope, op)(*t, cos, sin, None, positions, *slots)  # noqa: E731
    program = Counted(function)
    for batch, seq in ((2, 5), (3, 7), (6, 4)):
        tensors = operands(op, device, seq, batch)
        positions = torch.stack([torch.randperm(60, device=device)[:seq] for _ in range(batch)])
        rest = (0, torch.randperm(LENGTH * batch, device=device)[: batch * seq].view(batch, seq).int()) if slots else ()
        a, b = copies(tensors), copies(tensors)
        for t in (positions, *rest[1:], *(t for t in b if t.dim() > 1)):
            torch._dynamo.mark_dynamic(t, 0)
            torch._dynamo.mark_dynamic(t, 1)
        assert_same_bits(program(positions, rest, *b), function(positions, rest, *a))
        assert_same_bits(tuple(b), tuple(a))
    assert program.count == 1


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

    counter = CompileCounterWithBackend(backend_of(device))
    program = torch.compile(function, fullgraph=True, backend=counter)
    x = torch.randn(10, HEADS, DIM, device=device)
    for kept in (4, 7, 2):
        mask = torch.arange(10, device=device) < kept
        assert_same_call(function, program, x, mask, *copies(torch.zeros(2, 12, 1, DIM, device=device)))
    assert counter.frame_count == 1


# ---- modes, subclasses, errors ----


@pytest.mark.parametrize("op, mode", [("rotate_qk_", torch.inference_mode), ("rotate_into_cache_", torch.no_grad)])
def test_inputs_that_require_grad_may_be_rotated_in_place_without_grad(op, mode, device):
    """Under no_grad and inference_mode the compiled program takes them, as eager does."""
    cos, sin = tables(device)
    norm = dict(zip(("q_norm_weight", "k_norm_weight"), norm_weights(device), strict=True)) if "cache" in op else {}
    for weight in norm.values():
        weight.requires_grad_()
    function = lambda *tensors: getattr(rope, op)(*tensors, cos, sin, **norm)  # noqa: E731
    program = compiled(function, device)
    with mode():
        for requires_grad in (False, True):
            assert_same_call(function, program, *(t.requires_grad_(requires_grad) for t in operands(op, device)))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_compiled_decode_step_reads_the_scales_of_its_quantised_cache(stored, device):
    """The caches are views of bytes, as vLLM keeps them. One program serves all steps, whatever the scales are."""
    if not has_dtype(device, stored):
        pytest.skip("Metal has no float8")
    inv_freq = torch_rope.inv_freq(DIM, device=device)

    def decode(q, k, v, k_cache, v_cache, k_scale, v_scale, offset):
        k_cache, v_cache = k_cache.view(stored), v_cache.view(stored)
        rope.rotate_into_cache_(
            q, k, v, k_cache, v_cache, inv_freq=inv_freq, offset=offset, k_scale=k_scale, v_scale=v_scale, norm_v=True
        )

    program = compiled(decode, device, dynamic=True)
    scales = [torch.rand(KV_HEADS, device=device) / 50, torch.tensor(0.02, device=device)]
    for offset in (2, 3, 9):
        tensors = operands("rotate_into_cache_", device, 1)[:3]
        tensors += [torch.zeros(2, 32, KV_HEADS, DIM, dtype=torch.int8, device=device) for _ in "kv"]
        expected = copies(tensors)
        program(*tensors, *scales, offset)
        decode(*expected, *scales, offset)
        assert_same_bits(tensors, expected)
        assert tensors[3].any() and tensors[4].any()
        for scale in scales:
            scale *= 1.7


def test_compiled_under_autocast_gives_the_result_of_eager(device):
    """The float32 tables stay float32, although the linear layer before returns bfloat16."""
    cos, sin = tables(device)
    w = torch.randn(HEADS * DIM, HEADS * DIM, device=device)

    def function(x):
        with torch.autocast(device, torch.bfloat16):
            return rope.rotate((x @ w).view(2, -1, HEADS, DIM), cos, sin)

    x = torch.randn(2, 6, HEADS * DIM, device=device)
    out = compiled(function, device, backend="aot_eager")(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, function(x))


@pytest.mark.parametrize("op", IN_PLACE)
def test_both_tensors_of_a_subclass_are_written(op, device):
    """TwoTensor is a subclass that holds two tensors."""
    tensors, freq = operands(op, device), torch_rope.inv_freq(DIM, device=device)
    expected = copies(tensors)
    getattr(rope, op)(*expected, inv_freq=freq)

    def call(*tensors):
        getattr(rope, op)(*tensors, inv_freq=freq)
        return [t * 2 for t in tensors]

    pairs = [TwoTensor(t.clone(), t.clone()) for t in tensors]
    outs = compiled(call, device, backend="aot_eager")(*pairs)
    for out, pair, t in zip(outs, pairs, expected, strict=True):
        assert torch.equal(pair.a, t) and torch.equal(pair.b, t)
        assert torch.equal(out.a, 2 * t) and torch.equal(out.b, 2 * t)


@pytest.mark.heart
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_error_has_the_message_of_eager(backend, device):
    """Dynamo wraps the error of the fake implementation in its own TorchRuntimeError."""
    x, (cos, sin) = torch.randn(2, 6, HEADS, DIM, device=device), tables(device, rotary_dim=16)
    with pytest.raises(ValueError) as eager:
        rope.rotate(x, cos, sin)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=re.escape(str(eager.value))):
        compiled(lambda x: rope.rotate(x, cos, sin), device, backend=backend)(x)


@pytest.mark.parametrize("op", ["rotate", "rotate_", "norm_rotate_qk", "rotate_into_cache_"])
def test_an_error_of_the_kernel_keeps_its_type_and_message(op, device):
    if not checks_ranges(device):
        pytest.skip("on a GPU the kernel checks positions and slots in a tensor, and raises no exception here")
    tensors, (cos, sin) = operands(op, device, seq=3), tables(device)
    before = copies(tensors)
    function = lambda p, offset, slots, *t: getattr(rope, op)(*t, cos, sin, None, p, offset, **slots)  # noqa: E731
    program = compiled(function, device, backend="inductor" if op in ("rotate", "rotate_into_cache_") else "aot_eager")
    cases = [([1, 64, 2], 0, {}), ([1, -1, 2], 0, {}), ([1, 63, 2], 1, {})]
    if op == "rotate_into_cache_":  # the cache has 128 cells
        cases.append(([1, 3, 2], 1, {"slots": torch.tensor([[0, -1, 1], [9, 128, 8]])}))
    for positions, *rest in cases:
        positions = torch.tensor(positions)
        with pytest.raises(IndexError) as eager:
            function(positions, *rest, *tensors)
        with pytest.raises(IndexError, match=re.escape(str(eager.value))):
            program(positions, *rest, *tensors)
    assert_same_bits(tuple(tensors), tuple(before))


INSTEAD = "because the in-place operator has no gradient; use "
OF_THE_CACHE = INSTEAD + "rope.rotate_qk or rope.norm_rotate_qk, and write the caches yourself, or torch.no_grad()"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "op, name, message",
    [
        ("rotate_qk_", "k", INSTEAD + "rope.rotate_qk, or torch.no_grad()"),
        ("rotate_into_cache_", "k", OF_THE_CACHE),  # k is only read
        ("rotate_into_cache_", "k_cache", OF_THE_CACHE),
        ("norm_rotate_qk", "cos", "because its gradient is not implemented"),
    ],
)
def test_requiring_a_gradient_that_does_not_exist_is_an_error(op, name, message, backend, device):
    tensors = [*operands(op, device), *tables(device)]
    tensors[[a.name for a in schema_of(op).arguments].index(name)].requires_grad_()
    function = lambda *t: getattr(rope, op)(*(x * 1 for x in t))  # noqa: E731
    with pytest.raises(RuntimeError, match=re.escape(f"{name} requires grad but must not, {message}")) as eager:
        function(*tensors)
    with pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
        compiled(function, device, backend=backend)(*tensors)


# ---- learned tables and frequencies ----


def learned(source, device):
    """Returns the learned tensors, and a function of (q, k, the learned tensors..., offset) that rotates q and k."""
    freq = torch_rope.inv_freq(4, device=device)
    if source == "tables":
        return [*tables(device, rotary_dim=4)], lambda q, k, c, s, n: rope.rotate_qk(q, k, c, s, offset=n)
    if source == "inv_freq":
        return [freq], lambda q, k, f, n: rope.rotate_qk(q, k, inv_freq=f, offset=n, attention_factor=1.2)
    if source == "cos_sin":
        return [freq], lambda q, k, f, n: rope.rotate_qk(
            q, k, *rope.cos_sin(torch.arange(q.shape[1], device=device)[None] + n, f)
        )
    assert source == "axes"
    return [torch.stack([freq, 1 - freq])], lambda q, k, f, n: rope.rotate_qk(
        q, k, *rope.axial_cos_sin((torch.arange(q.shape[1], device=device) + n).expand(2, 1, -1), f)
    )


LEARNED = ["tables", "inv_freq", "cos_sin", "axes"]
FROZEN = ["nothing", "q and k", "all but q and the last"]


@pytest.mark.parametrize(
    "case",
    # Inductor compiles kernels for the gradient of cos_sin, which is in torch's operators. That is slow, so only the
    # exhaustive run does it for all sources.
    covering(
        {"backend": BACKENDS, "source": LEARNED, "frozen": FROZEN},
        lambda backend, source, **_: EXHAUSTIVE or backend != "inductor" or source in ("tables", "axes"),
    ),
    ids=name_of,
)
def test_compiled_gradients_of_learned_angles_are_those_of_eager(case, device):
    backend, source, frozen = case.values()
    angles, function = learned(source, device)
    inputs = [*qk(device), *angles]
    needed = {"nothing": inputs, "q and k": angles, "all but q and the last": [inputs[0], angles[-1]]}[frozen]
    seeds = qk(device)

    def run(f):
        leaves = [t.detach().clone().requires_grad_(any(t is n for n in needed)) for t in inputs]
        outs = f(*leaves, 3)
        torch.autograd.backward(outs, seeds)
        return (*outs, *(t.grad for t in leaves))

    program = compiled(function, device, backend=backend_of(device) if backend == "inductor" else backend)
    for e, a, t in zip(run(function), run(program), [None, None, *inputs], strict=True):
        assert (e is None) == (a is None) == (t is not None and not any(t is n for n in needed))
        if a is not None:
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("source", LEARNED)
def test_all_lengths_and_offsets_of_learned_angles_run_one_program(source, device):
    angles, function = learned(source, device)
    program = Counted(function, dynamic=True)
    for seq, offset in ((5, 4), (6, 2), (17, 30)):
        inputs, seeds = [*qk(device, seq), *angles], qk(device, seq)
        actual, expected = (outputs_and_gradients(f, inputs, seeds, offset) for f in (program, function))
        torch.testing.assert_close(actual, expected)
    assert program.count == 1


# ---- CUDA graphs ----


@pytest.mark.parametrize("op", OF_A_LAYER)
def test_every_operator_of_a_layer_runs_in_a_cuda_graph(op, device):
    """A graph may write the caches, because they are buffers of a module, whose addresses never change."""
    if device != "cuda":
        pytest.skip("only CUDA has CUDA graphs")
    cos, sin = tables(device)

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(2, 2, LENGTH, KV_HEADS, DIM, device=device))

        def forward(self, positions, *tensors):
            tensors = [t * 1 for t in tensors]
            if op == "rotate_into_cache_":
                tensors[3:] = self.kv
            return getattr(rope, op)(*tensors, cos, sin, positions=positions) or tuple(t * 1 for t in tensors)

    module = Module()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for step in range(4):  # warm up, record, replay
            tensors, positions = operands(op, device), torch.arange(6, device=device) + step
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits(compiled(positions, *tensors), module(positions, *tensors))
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
