"""torch.compile, export, fake tensors, vmap and opcheck: every operator is what its schema and its fake implementation say."""

import copy
import io
import math
import re
import sys

import pytest
import torch
from cases import CACHES, LAYOUTS, SOURCES, checks_ranges, opcheck, set_apart, some_slots
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_rope

rope = torch.ops.rope

pytestmark = [
    pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec"),
    pytest.mark.usefixtures("_memory_of_others"),
]

HEADS, KV_HEADS, DIM = 4, 2, 8

FUNCTIONAL = ["rotate", "rotate_qk", "norm_rotate_qk", "_norm_rotate_qk_backward"]
IN_PLACE = ["rotate_", "rotate_qk_", "rotate_into_cache_"]
OF_A_LAYER = ["rotate_qk", "rotate_qk_", "norm_rotate_qk", "rotate_into_cache_"]


@pytest.fixture(autouse=True)
def _compiled_here_and_now():
    """Nothing compiled is taken from an earlier test, or from a cache on disk: its key knows nothing of this library."""
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def backend_of(device):
    """Inductor compiles kernels of its own for Metal, which takes a Mac."""
    return "aot_eager" if device == "mps" else "inductor"


@pytest.fixture(autouse=True)
def _default_backend(request, monkeypatch):
    if "device" in request.fixturenames:
        compile, default = torch.compile, backend_of(request.getfixturevalue("device"))
        monkeypatch.setattr(torch, "compile", lambda f, backend=default, **o: compile(f, backend=backend, **o))


def tables(device, rotary_dim=DIM, rows=64):
    """cos, sin of [rows, rotary_dim / 2]"""
    return rope.cos_sin(torch.arange(rows, device=device), torch_rope.inv_freq(rotary_dim, device=device))


def qk(device, seq=6, batch=2):
    return torch.randn(batch, seq, HEADS, DIM, device=device), torch.randn(batch, seq, KV_HEADS, DIM, device=device)


def norm_weights(device):
    return [torch.rand(DIM, device=device) + 0.5 for _ in "qk"]


def operands(op, device, seq=6, batch=2, make=None):
    """What op takes before its angles. make(heads): q, k, v, or the gradient of one; [batch, seq, heads, DIM] unless given."""
    make = make or (lambda heads: torch.randn(batch, seq, heads, DIM, device=device))
    q, k = make(HEADS), make(KV_HEADS)
    if op in ("rotate", "rotate_"):
        return [q]
    if op in ("rotate_qk", "rotate_qk_"):
        return [q, k]
    if op == "rotate_into_cache_":
        caches = [torch.randn(*q.shape[:-3], 64, KV_HEADS, DIM, device=device) for _ in "kv"]
        return [q, k, make(KV_HEADS), *caches]
    gradients = [make(HEADS), make(KV_HEADS)] if op == "_norm_rotate_qk_backward" else []
    return [*gradients, q, k, *norm_weights(device)]


def clones(tensors):
    return [t.clone() for t in tensors]


def tensors_of(result):
    return () if result is None else result if isinstance(result, tuple) else (result,)


def assert_same_bits(actual, expected):
    actual, expected = tensors_of(actual), tensors_of(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e) and a.stride() == e.stride()


def assert_same_call(function, other, *inputs):
    """Same results, and the same left in the inputs. Views of one tensor stay views of one tensor."""
    a, b = copy.deepcopy(inputs), copy.deepcopy(inputs)
    assert_same_bits(other(*b), function(*a))
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


# ---- opcheck ----

EXPANDED = {  # stride 0, which may only be read
    "batch expanded": lambda shape, dtype, device: torch.randn(1, *shape[1:], device=device).expand(shape),
    "heads expanded": lambda shape, dtype, device: torch.randn(*shape[:2], 1, shape[3], device=device).expand(shape),
}
READ_LAYOUTS = LAYOUTS | EXPANDED

# (layout, angle source, rotary_dim of head_dim 8, interleaved): every layout and every source, both pairings, partial rotary.
OPCHECKS = [
    pytest.param(layout, source, (8, 4)[i % 2], i % 3 == 0, id=f"{layout}-{source}")
    for i, (layout, source) in enumerate(
        zip((list(READ_LAYOUTS) * 2)[: len(SOURCES)], SOURCES, strict=True)  # more sources than layouts
    )
]


def arguments(op, layout, source, rotary_dim, interleaved, device, dims=4):
    if device == "mps" and source.freq_dtype == torch.float64:
        pytest.skip("Apple GPUs have no float64")
    batch = 2 if dims == 4 else 1

    def make(heads):
        x = READ_LAYOUTS[layout](torch.Size((batch, 3, heads, DIM)), torch.float32, device)
        return x if dims == 4 else x[0]

    keywords = source.arguments(batch, 3, rotary_dim, torch.float32, device) | {"interleaved": interleaved}
    return operands(op, device, make=make), keywords


@pytest.mark.parametrize("layout, source, rotary_dim, interleaved", OPCHECKS)
@pytest.mark.parametrize("op", [*FUNCTIONAL, "rotate_", "rotate_qk_"])
def test_opcheck(op, layout, source, rotary_dim, interleaved, device):
    if op.endswith("_") and layout in EXPANDED:
        layout = "packed"  # what is written may not share memory with itself
    xs, keywords = arguments(op, layout, source, rotary_dim, interleaved, device)
    if not op.endswith("_"):  # an in-place operator refuses inputs that require grad
        xs = [x.detach().requires_grad_(i == 0) for i, x in enumerate(xs)]
    opcheck(op, xs, keywords, device)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("op", [*FUNCTIONAL, *IN_PLACE])
def test_opcheck_of_three_dimensions(op, requires_grad, device):
    xs, keywords = arguments(op, "bhsd", SOURCES[2], 4, True, device, dims=3)
    xs = [x.requires_grad_(requires_grad and not op.endswith("_")) for x in xs]
    keywords |= {"attention_factor": 1.5} | ({"norm_eps": 0.1} if "norm" in op or "cache" in op else {"inverse": True})
    opcheck(op, xs, keywords, device)


# (cache, layout, source, slots, norm, dims): every cache with q, k, v of both numbers of dimensions
CACHE_OPCHECKS = [
    (cache, list(LAYOUTS)[i % 7], SOURCES[i % 10], i % 3 > 0, i % 2 > 0, dims)
    for i, (cache, dims) in enumerate((cache, dims) for dims in (3, 4) for cache in CACHES)
]


@pytest.mark.parametrize("cache, layout, source, slots, norm, dims", CACHE_OPCHECKS, ids=str)
def test_opcheck_of_rotate_into_cache(cache, layout, source, slots, norm, dims, device):
    (q, k, v, *_), keywords = arguments("rotate_into_cache_", layout, source, 4, norm, device, dims)
    batch = len(q) if dims == 4 else 1
    one_block = "sequence" in cache
    slots = slots or source.kind.startswith("token") or (one_block and batch > 1)
    k_cache, v_cache = CACHES[cache](lambda *shape: torch.randn(shape, device=device), batch + 1, 48, KV_HEADS, DIM)
    if slots:
        cells = k_cache.shape[:-2].numel()
        keywords["slots"] = some_slots((batch, 3), cells, torch.int32 if norm else torch.int64, device)
    else:
        set_apart(keywords, batch, 43)
    if norm:
        keywords |= dict(zip(("q_norm_weight", "k_norm_weight"), norm_weights(device), strict=True))
    opcheck("rotate_into_cache_", (q, k, v, k_cache, v_cache), keywords, device)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "positions",
    [torch.arange(6).view(2, 3), torch.rand(3, 2).T, torch.tensor(3)],
    ids=["int64", "float32 strided", "scalar"],
)
def test_opcheck_of_cos_sin(positions, dtype, device):
    freq = torch_rope.inv_freq(8, device=device)
    opcheck("cos_sin", (positions.to(device), freq), {"attention_factor": 1.5, "dtype": dtype}, device)


# ---- fake tensors say the strides of the result ----

STRIDES = {
    "contiguous": lambda d: torch.empty(2, 3, 4, 8, device=d),
    "transposed": lambda d: torch.empty(2, 4, 3, 8, device=d).transpose(1, 2),
    "channels first": lambda d: torch.empty(2, 8, 3, 4, device=d).permute(0, 2, 3, 1),
    "reversed": lambda d: torch.empty(8, 4, 3, 2, device=d).permute(3, 2, 1, 0),
    "slice of packed": lambda d: torch.empty(2, 3, 9, 8, device=d)[:, :, 2:6],
    "slice of packed, transposed": lambda d: torch.empty(2, 9, 3, 8, device=d)[:, 2:6].transpose(1, 2),
    "every second channel": lambda d: torch.empty(2, 3, 4, 16, device=d)[..., ::2],
    "every second token": lambda d: torch.empty(2, 6, 4, 8, device=d)[:, ::2],
    "one token": lambda d: torch.empty(2, 1, 4, 8, device=d),
    "one token, transposed": lambda d: torch.empty(2, 4, 1, 8, device=d).transpose(1, 2),
    "one head, transposed": lambda d: torch.empty(2, 1, 3, 8, device=d).transpose(1, 2),
    "one token of a slice": lambda d: torch.empty(2, 1, 9, 8, device=d)[:, :, 2:6],
    "batch of one, odd stride": lambda d: torch.empty(2, 3, 4, 8, device=d)[:1],
    "all ones": lambda d: torch.empty(4, 5, 6, 7, device=d)[:1, :1, :1, :2],
    "batch expanded": lambda d: torch.empty(1, 3, 4, 8, device=d).expand(2, 3, 4, 8),
    "heads expanded": lambda d: torch.empty(2, 3, 1, 8, device=d).expand(2, 3, 4, 8),
    "tokens and heads expanded": lambda d: torch.empty(2, 1, 1, 8, device=d).expand(2, 3, 4, 8),
    "expanded, transposed": lambda d: torch.empty(2, 4, 1, 8, device=d).expand(2, 4, 3, 8).transpose(1, 2),
    "empty": lambda d: torch.empty(2, 0, 4, 8, device=d),
    "three dimensions": lambda d: torch.empty(4, 3, 8, device=d).transpose(0, 1),
}


@pytest.mark.parametrize("layout", STRIDES)
def test_fake_strides_are_real_strides(layout, device):
    def results(x, weight, freq):
        dense = torch.empty(x.shape, device=x.device)
        return (
            rope.rotate(x, inv_freq=freq),
            *rope.rotate_qk(x, x, inv_freq=freq),
            *rope.norm_rotate_qk(x, x, weight, weight, inv_freq=freq),
            *rope._norm_rotate_qk_backward(dense, x, x, dense, weight, weight, inv_freq=freq),
        )

    x, freq = STRIDES[layout](device), torch_rope.inv_freq(2, device=device)
    weight = torch.ones(x.shape[-1], 2, device=device)[:, 0]
    real = results(x, weight, freq)
    *like_x, like_dense, q_weight, k_weight = real
    assert all(r.stride() == torch.empty_like(x).stride() for r in like_x) and like_dense.is_contiguous()
    assert q_weight.stride() == k_weight.stride() == (1,)

    with FakeTensorMode() as mode:
        fake = results(*(mode.from_tensor(t) for t in (x, weight, freq)))
    meta = results(*(torch.empty_strided(t.shape, t.stride(), device="meta") for t in (x, weight, freq)))
    for r, f, m in zip(real, fake, meta, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype) == (m.shape, m.stride(), m.dtype)
        assert f.device == r.device and m.device.type == "meta"


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)])
def test_fake_strides_of_cos_sin_are_contiguous(shape, device):
    positions, freq = torch.zeros(shape, device=device), torch_rope.inv_freq(8, device=device)
    real = rope.cos_sin(positions, freq)
    for fake in rope.cos_sin(positions.to("meta"), freq.to("meta"), dtype=torch.float16):
        assert fake.shape == (*shape, 4) and fake.is_contiguous() and fake.dtype == torch.float16
        assert fake.stride() == real[0].stride() == real[1].stride()


def test_fake_caches_are_left_alone(device):
    """Nothing is returned, and nothing is looked at: positions and slots have no values."""
    tensors = [*operands("rotate_into_cache_", device), *tables(device)]
    before = clones(tensors)
    with FakeTensorMode() as mode:
        assert rope.rotate_into_cache_(*(mode.from_tensor(t) for t in tensors), offset=1000) is None
    assert rope.rotate_into_cache_(*(t.to("meta") for t in tensors), offset=1000) is None
    assert_same_bits(tuple(tensors), tuple(before))


# ---- torch.compile ----


def body_of(code):
    """The calls of the compiled program, without the kernels' source."""
    body = code[code.index("def call(") :]
    return body[: body.index("return (")]


def calls_in(code):
    """Our operators in the compiled program, in order."""
    return re.findall(r"rope\.(\w+)\.default\(", body_of(code))


def skip_attention_of_metal(device):
    if device == "mps" and sys.platform == "linux":
        pytest.skip("torch's attention for mps is not in its build for Linux")


def run_and_see_programs(device, run, *args):
    """(what it returns, Inductor's programs); no programs where Inductor does not compile."""
    return (run(*args), []) if device == "mps" else run_and_get_code(run, *args)


def assert_no_copy(code, operators, buffers=0, kernels=0):
    """Beside the operators the compiled program has so many buffers and kernels of its own, and nothing else."""
    body = body_of(code)
    assert calls_in(code) == operators, body
    assert len(re.findall(r"= empty_strided\w*\(", body)) == buffers, body
    assert len(re.findall(r"cpp_fused\w*\(|triton_\w+\.run\(|generated_kernel\w*\(", body)) == kernels, body
    assert not re.search(r"copy|clone", body), body


def test_compiled_values_are_eager_values(device):
    """Alone, the operators keep every bit: the compiled program calls the same kernels."""
    q, k = qk(device)
    cos, sin = tables(device, rotary_dim=4)
    positions = torch.randint(0, 60, (2, 6), device=device)
    weights = norm_weights(device)
    norm = {"norm_eps": 0.1, "attention_factor": 1.3, "interleaved": True}
    for function in (
        lambda q, k: rope.rotate(q, cos, sin, interleaved=True),
        lambda q, k: rope.rotate(q.transpose(1, 2), cos, sin, offset=3).transpose(1, 2),
        lambda q, k: rope.rotate_qk(q, k, cos, sin, positions=positions, inverse=True),
        lambda q, k: rope.rotate_qk_(q, k, inv_freq=torch_rope.inv_freq(8, device=device)),
        lambda q, k: rope.rotate_(k, cos, sin, positions=positions.int()),
        lambda q, k: rope.norm_rotate_qk(q, k, *weights, cos, sin, positions=positions, **norm),
        lambda q, k: rope.cos_sin(positions, torch_rope.inv_freq(8, device=device), attention_factor=1.3),
    ):
        torch._dynamo.reset()
        assert_same_call(function, torch.compile(function, fullgraph=True), q, k)


@pytest.mark.parametrize("which", ["q and k", "q only", "k only"])
def test_a_compiled_training_step_has_eager_gradients(which, device):
    cos, sin = tables(device, rotary_dim=4)

    def step(x, w):
        q, k = (x @ w).view(2, 6, HEADS + KV_HEADS, DIM).split([HEADS, KV_HEADS], 2)
        q, k = rope.rotate_qk(q, k, cos, sin, offset=2, attention_factor=1.2)
        q, k = q.sin() * (which != "k only"), k.cos() * (which != "q only")
        (q.sum() + k.sum()).backward()
        return x.grad, w.grad

    x, w = torch.randn(2, 6, 16, device=device), torch.randn(16, (HEADS + KV_HEADS) * DIM, device=device)
    expected = step(x.clone().requires_grad_(), w.clone().requires_grad_())
    compiled = torch.compile(step, fullgraph=False)  # Dynamo splits the graph at backward()
    actual = compiled(x.clone().requires_grad_(), w.clone().requires_grad_())
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("unused", [0, 1])
def test_a_compiled_backward_with_one_unused_output(unused, device):
    """The backward of the other one alone."""
    cos, sin = tables(device)
    compiled = torch.compile(lambda q, k: rope.rotate_qk(q, k, cos, sin), fullgraph=True)
    q, k = (t.requires_grad_() for t in qk(device))
    out = compiled(q, k)[1 - unused]
    out.sum().backward()
    used, other = (k, q) if unused == 0 else (q, k)
    assert torch.equal(used.grad, rope.rotate(torch.ones_like(used), cos, sin, inverse=True))
    assert other.grad is None or not other.grad.any()


def outputs_and_gradients(function, inputs, seeds, **keywords):
    """seeds: gradients of the outputs."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    outs = function(*inputs, **keywords)
    torch.autograd.backward(*zip(*[pair for pair in zip(outs, seeds, strict=True) if pair[1] is not None], strict=True))
    return (*outs, *(torch.zeros_like(t) if t.grad is None else t.grad for t in inputs))


@pytest.mark.parametrize("unused", ["nothing", "q", "k"])
def test_the_compiled_norm_is_one_call_forward_and_one_backward(unused, device):
    """At every length and offset. And q, k, and their weights have the gradients of eager, bit for bit."""
    cos, sin = tables(device, rotary_dim=4)
    options = {"norm_eps": 0.1, "attention_factor": 1.2, "interleaved": True}

    def run():
        for seq, offset in ((6, 2), (9, 5), (4, 30)):
            inputs = operands("norm_rotate_qk", device, seq)
            seeds = [None if name == unused else seed for name, seed in zip("qk", qk(device, seq), strict=True)]
            actual, expected = (outputs_and_gradients(f, inputs, seeds, offset=offset) for f in (compiled, function))
            assert_same_bits(actual, expected)

    function = lambda *inputs, offset: rope.norm_rotate_qk(*inputs, cos, sin, offset=offset, **options)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    _, programs = run_and_see_programs(device, run)
    assert list(map(calls_in, programs)) == [["norm_rotate_qk"], ["_norm_rotate_qk_backward"]] or device == "mps"


def test_a_compiled_checkpoint_of_the_norm(device):
    """The backward calls the operator again, and then its backward."""
    cos, sin = tables(device)

    def scores(*inputs):
        q, k = rope.norm_rotate_qk(*inputs, cos, sin)
        return (q @ k.mT,)

    function = lambda *inputs: checkpoint(scores, *inputs, use_reentrant=False)  # noqa: E731
    inputs, seeds = operands("norm_rotate_qk", device), [torch.randn(2, 6, HEADS, KV_HEADS, device=device)]
    compiled = torch.compile(function, fullgraph=True)
    actual, code = run_and_see_programs(device, outputs_and_gradients, compiled, inputs, seeds)
    assert_same_bits(actual, outputs_and_gradients(function, inputs, seeds))
    expected = [["norm_rotate_qk"], ["norm_rotate_qk", "_norm_rotate_qk_backward"]]
    assert list(map(calls_in, code)) == expected or device == "mps"


@pytest.mark.parametrize("op", ["rotate_qk", "norm_rotate_qk"])
def test_all_lengths_run_the_program_of_the_first_with_dynamic_shapes(op, device):
    cos, sin = tables(device)
    function = lambda q, k, *weights: getattr(rope, op)(q.transpose(1, 2), k, *weights, cos, sin)  # noqa: E731
    counter = CompileCounterWithBackend(backend_of(device))
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for seq in (5, 6, 17, 40):
        q, *rest = operands(op, device, seq)
        q = q.transpose(1, 2).contiguous()
        assert_same_bits(compiled(q, *rest), function(q, *rest))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "op, slots",
    [("rotate_qk_", False), ("norm_rotate_qk", False), ("rotate_into_cache_", False), ("rotate_into_cache_", True)],
)
def test_marked_dimensions_do_not_specialise(op, slots, device):
    """mark_dynamic raises where a check of ours fixes the marked size: of the batch, the length, the caches."""
    cos, sin = tables(device)
    function = lambda positions, slots, *t: getattr(rope, op)(*t, cos, sin, None, positions, *slots)  # noqa: E731
    counter = CompileCounterWithBackend(backend_of(device))
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for batch, seq in ((2, 5), (3, 7), (6, 4)):
        tensors = operands(op, device, seq, batch)
        positions = torch.stack([torch.randperm(60, device=device)[:seq] for _ in range(batch)])
        rest = (0, torch.randperm(64 * batch, device=device)[: batch * seq].view(batch, seq)) if slots else ()
        a, b = clones(tensors), clones(tensors)
        for t in (positions, *rest[1:], *(t for t in b if t.dim() > 1)):
            torch._dynamo.mark_dynamic(t, 0)
            torch._dynamo.mark_dynamic(t, 1)
        assert_same_bits(compiled(positions, rest, *b), function(positions, rest, *a))
        assert_same_bits(tuple(b), tuple(a))
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", OF_A_LAYER)
@pytest.mark.parametrize("source", ["table", "inv_freq"])
def test_a_decode_loop_does_not_recompile_for_each_offset(source, op, device):
    """Once for the first offset, once for all others (which Dynamo's automatic dynamic shapes make symbolic)."""
    cos, sin = tables(device) if source == "table" else (None, None)
    freq = torch_rope.inv_freq(DIM, device=device) if source == "inv_freq" else None
    function = lambda offset, *t: getattr(rope, op)(*t, cos, sin, freq, offset=offset)  # noqa: E731
    counter = CompileCounterWithBackend(backend_of(device))
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for offset in (5, 6, 7, 8, 9, 20, 33, 2):
        assert_same_call(function, compiled, offset, *operands(op, device, seq=1))
    assert counter.frame_count == 2


@pytest.mark.parametrize("op", OF_A_LAYER)
def test_positions_in_a_tensor_never_recompile(op, device):
    """Nor do slots."""
    cos, sin = tables(device)
    function = lambda positions, slots, *t: getattr(rope, op)(*t, cos, sin, None, positions, **slots)  # noqa: E731
    counter = CompileCounterWithBackend(backend_of(device))
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for position in range(8):
        positions = torch.tensor([position], device=device)
        slots = {"slots": torch.tensor([[70 - position], [position]], device=device)} if "cache" in op else {}
        tensors = operands(op, device, seq=1)
        a, b = clones(tensors), clones(tensors)
        assert_same_bits(compiled(positions, slots, *b), function(positions, slots, *a))
        assert_same_bits(tuple(b), tuple(a))
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("op", OF_A_LAYER)
def test_an_offset_that_is_data(op, device):
    """``offset=t.item()`` neither breaks the graph nor is guarded on."""
    cos, sin = tables(device)
    function = lambda t, *tensors: getattr(rope, op)(*tensors, cos, sin, offset=t.item())  # noqa: E731
    counter = CompileCounterWithBackend(backend_of(device))
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for offset in (0, 1, 17):
        assert_same_call(function, compiled, torch.tensor(offset), *operands(op, device))
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_tokens_that_is_data(device):
    """As many tokens as a mask keeps."""
    cos, sin = tables(device)

    weights = norm_weights(device)

    def function(x, mask, *caches):
        x = x[mask]
        results = (
            rope.rotate(x, cos, sin),
            rope.rotate(x, cos, sin, positions=mask.nonzero().flatten()),
            rope.rotate(x[:, :2], cos, sin),  # whether this is dense depends on the data: the strides must not
            *rope.rotate_qk(x.expand(2, -1, -1, -1), x[:, :2].expand(2, -1, -1, -1), cos, sin),
            *rope.norm_rotate_qk(x, x[:, :2], *weights, cos, sin),
        )
        q, k, v = x.split([HEADS - 2, 1, 1], 1)
        rope.rotate_into_cache_(q, k, v, *caches, cos, sin, slots=mask.nonzero().flatten())
        return *results, q + 1

    counter = CompileCounterWithBackend(backend_of(device))
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    x = torch.randn(10, HEADS, DIM, device=device)
    for kept in (4, 7, 2):
        mask = torch.arange(10, device=device) < kept
        assert_same_call(function, compiled, x, mask, *clones(torch.zeros(2, 12, 1, DIM, device=device)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
def test_compiled_without_grad(op, mode, device):
    """Under no_grad what requires grad may be rotated in place, compiled as well as not."""
    cos, sin = tables(device)
    norm = dict(zip(("q_norm_weight", "k_norm_weight"), norm_weights(device), strict=True)) if "cache" in op else {}
    for weight in norm.values():
        weight.requires_grad_()
    function = lambda *tensors: getattr(rope, op)(*tensors, cos, sin, **norm)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True)
    with mode():
        for requires_grad in (False, True):
            assert_same_call(function, compiled, *(t.requires_grad_(requires_grad) for t in operands(op, device)))


def test_compiled_under_autocast(device):
    """float32 tables stay float32 where the linear layer before became bfloat16."""
    cos, sin = tables(device)
    w = torch.randn(HEADS * DIM, HEADS * DIM, device=device)

    def function(x):
        with torch.autocast(device, torch.bfloat16):
            return rope.rotate((x @ w).view(2, -1, HEADS, DIM), cos, sin)

    x = torch.randn(2, 6, HEADS * DIM, device=device)
    out = torch.compile(function, fullgraph=True)(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, function(x))


# ---- in place ----
#
# Functionalised, an in-place operator becomes a functional one on clones; Inductor then takes the clones away again. That it
# does, for each way in which q and k come to be, is part of the contract.


def split(qkv):
    return qkv.view(*qkv.shape[:2], HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], 2)


def on_inputs(q, k):
    rope.rotate_qk_(q, k, *tables_here)


def on_an_intermediate(q, k):
    x = q * 2
    rope.rotate_(x, *tables_here)
    return x


def on_a_transposed_input(q, k):
    rope.rotate_(q.transpose(1, 2), *tables_here)


def on_a_split_input(qkv):
    q, k, _ = split(qkv)
    rope.rotate_qk_(q, k, *tables_here)


def on_slices_of_an_input(qkv):
    x = qkv.view(*qkv.shape[:2], -1, DIM)
    rope.rotate_(x[:, :, :HEADS], *tables_here)
    rope.rotate_(x[:, :, HEADS : HEADS + KV_HEADS], *tables_here)


def on_a_split_intermediate(qkv):
    qkv = qkv * 2
    q, k, _ = split(qkv)
    rope.rotate_qk_(q, k, *tables_here)
    return qkv


def on_an_unbound_input(x):
    q, k = x.unbind(0)[:2]
    rope.rotate_qk_(q, k, *tables_here)


def on_the_second_of_an_input(x):
    rope.rotate_(x[1], *tables_here)


def on_the_second_of_an_intermediate(x):
    x = x * 2
    rope.rotate_(x[1], *tables_here)
    return x


def on_each_unbound(x):
    q, k = x.unbind(0)[:2]
    rope.rotate_(q, *tables_here)
    rope.rotate_(k, *tables_here)


def on_the_later_half_of_the_tokens(x):
    rope.rotate_(x[0][:, x.shape[2] // 2 :], *tables_here)


def on_halves_of_the_batch(x):
    q, k = x.flatten(0, 1).chunk(2)
    rope.rotate_qk_(q, k, *tables_here)


@pytest.fixture
def _tables_of(device):
    global tables_here
    tables_here = tables(device)


def inputs_of(function, device, seq=6):
    name = function.__name__
    if "split" in name or "slices" in name:
        return (torch.randn(2, seq, (HEADS + 2 * KV_HEADS) * DIM, device=device),)
    if any(word in name for word in ("unbound", "second", "later", "halves")):
        return (torch.randn(4, 2, seq, HEADS, DIM, device=device),)
    return qk(device, seq)


# function -> how many intermediates it has
NO_COPY = {
    on_inputs: 0,
    on_an_intermediate: 1,
    on_a_transposed_input: 0,
    on_a_split_input: 0,
    on_slices_of_an_input: 0,
    on_a_split_intermediate: 1,
    # Where these start in their storage depends on the length.
    on_an_unbound_input: 0,
    on_the_second_of_an_input: 0,
    on_the_second_of_an_intermediate: 1,
}


@pytest.mark.usefixtures("_tables_of")
@pytest.mark.parametrize(
    "function, intermediates, dynamic",
    [
        pytest.param(function, count, dynamic, id=function.__name__ + ("-dynamic" if dynamic else ""))
        for dynamic in (False, True)
        for function, count in NO_COPY.items()
    ],
)
def test_in_place_copies_nothing(function, intermediates, dynamic, device):
    """Beside the operators the compiled program has a buffer and a kernel for each intermediate, and nothing else."""
    inputs = inputs_of(function, device)
    a, b = clones(inputs), clones(inputs)
    expected = function(*a)
    if dynamic:
        for t in b:
            torch._dynamo.mark_dynamic(t, 1)
    actual, code = run_and_see_programs(device, torch.compile(function, fullgraph=True), *b)
    assert_same_bits(actual, expected)
    assert_same_bits(tuple(b), tuple(a))
    if device == "mps":
        return
    (code,) = code
    assert set(calls_in(code)) <= {"rotate_", "rotate_qk_"}
    assert_no_copy(code, calls_in(code), intermediates, intermediates)


IN_PLACE_VIEWS = [
    on_a_split_input,
    on_a_split_intermediate,
    on_an_unbound_input,
    on_each_unbound,
    on_the_second_of_an_input,
    on_the_second_of_an_intermediate,
    on_the_later_half_of_the_tokens,
    on_halves_of_the_batch,
]


@pytest.mark.usefixtures("_tables_of")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", IN_PLACE_VIEWS, ids=lambda f: f.__name__)
def test_a_view_is_written_where_it_is_at_every_length(function, dynamic, device):
    """Its storage offset depends on the length: Inductor must not take the first one, nor 0 (pytorch#198068), for all."""
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for seq in (4, 6, 10):
        assert_same_call(function, compiled, *inputs_of(function, device, seq))


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_input_that_starts_inside_its_storage(dynamic, device):
    """The offset of a graph input and that of a view of it add up."""
    if device == "mps":
        pytest.skip("aot_eager (torch 2.13) keeps the offset of the first input, for any in-place custom operator")
    cos, sin = tables(device)
    function = lambda x: rope.rotate_(x[1], cos, sin)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for i, seq in ((0, 4), (1, 4), (2, 6), (1, 7)):
        whole = torch.randn(3, 2, 2, seq, HEADS, DIM, device=device)
        expected = whole.clone()
        function(expected[i])
        compiled(whole[i])
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
def test_inputs_that_share_a_storage(op, device):
    """kv[0] and kv[1] of one cache: the second starts at an offset that depends on the length."""
    cos, sin = tables(device)
    function = lambda *tensors: getattr(rope, op)(*tensors, cos, sin)  # noqa: E731
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for seq in (4, 6, 9):
            kv = torch.randn(2, 2, seq + 5, KV_HEADS, DIM, device=device)
            inputs = (*kv,) if op == "rotate_qk_" else (*operands(op, device, seq)[:3], *kv)
            assert_same_call(function, compiled, *inputs)


@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
@pytest.mark.parametrize("dynamic", [False, None, True])
def test_inputs_that_are_slices_of_one_tensor(dynamic, op, device):
    """q and k, or the caches, split outside of the compiled function. torch makes one input of them, and where the length is
    dynamic Inductor 2.13 then forgets to define a size: an error is all that we can ask for, but nothing may be half done."""
    cos, sin = tables(device)
    function = lambda *tensors: getattr(rope, op)(*tensors, cos, sin)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for seq in (4, 6, 9):
        if op == "rotate_qk_":
            inputs = torch.randn(2, seq, HEADS + KV_HEADS, DIM, device=device).split([HEADS, KV_HEADS], 2)
        else:
            caches = torch.randn(3, 2, seq + 5, KV_HEADS, DIM, device=device).unbind(1)
            inputs = (*operands(op, device, seq)[:3], *caches)
        before, expected = copy.deepcopy(inputs), copy.deepcopy(inputs)
        function(*expected)
        try:
            compiled(*inputs)
        except NameError:
            assert dynamic is not False
            expected = before
        assert all(map(torch.equal, inputs, expected))


def test_a_clone_that_is_written_beside_its_source_stays_a_clone(device):
    """Without it, q and k would be one tensor, rotated twice."""
    cos, sin = tables(device)

    def function(x):
        y = x.clone()
        rope.rotate_qk_(y, x, cos, sin)
        return y

    assert_same_call(function, torch.compile(function, fullgraph=True), qk(device)[0])


def test_written_twice_and_read_between(device):
    """Rotated, read, and rotated back."""
    cos, sin = tables(device)

    def function(x):
        before = x + 1
        rope.rotate_(x, cos, sin)
        between = x + 1
        rope.rotate_(x, cos, sin, inverse=True)
        return before, between, x + 1

    assert_same_call(function, torch.compile(function, fullgraph=True), qk(device)[0])


# ---- caches ----
#
# What is written in place is large here, so a copy would cost more than the operator. None is made, however the caches
# come to be, as long as k_cache and v_cache of one call are not two inputs that share a storage.


def into(q, k, v, k_cache, v_cache, **options):
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, *tables_here, offset=3, **options)


def two_inputs(q, k, v, k_cache, v_cache):
    into(q, k, v, k_cache, v_cache)


def heads_first(q, k, v, k_cache, v_cache):
    into(q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))


def no_batch(q, k, v, k_cache, v_cache):
    into(q[0], k[0], v[0], k_cache.transpose(0, 1), v_cache.transpose(0, 1))


def halves_by_index(q, k, v, kv):
    into(q, k, v, kv[0], kv[1])


def halves_unbound(q, k, v, kv):
    into(q, k, v, *kv.unbind(0))


def halves_of_blocks(q, k, v, kv):
    into(q, k, v, kv[:, 0], kv[:, 1])


def halves_of_blocks_heads_first(q, k, v, kv):
    into(q, k, v, *kv.transpose(2, 3).unbind(1))


def halves_of_a_row(q, k, v, kv):
    into(q, k, v, *kv.chunk(2, -1))


def paged(q, k, v, kv, slots):
    norm = dict.fromkeys(("q_norm_weight", "k_norm_weight"), tables_here[0].flatten()[:DIM])
    into(q, k, v, kv[:, 0], kv[:, 1], slots=slots, norm_eps=0.1, attention_factor=1.2, interleaved=True, **norm)


def layers(q, k, v, kv):
    for i in range(3):
        into(q, k, v, kv[i, 0], kv[i, 1])


def layers_of_blocks(q, k, v, kv):
    for layer in kv.unbind(0):
        into(q, k, v, *layer.unbind(1))


def layers_as_inputs(q, k, v, *kv):
    for layer in kv:
        into(q, k, v, *layer)


def qkv_of_a_split_input(qkv, k_cache, v_cache):
    into(*split(qkv), k_cache, v_cache)


def qkv_of_a_projection(x, w, k_cache, v_cache):
    q, k, v = split(x @ w)
    into(q, k, v, k_cache, v_cache)
    return q


def attention_over_the_cache(x, w, k_cache, v_cache):
    q, k, v = split(x @ w)
    into(q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    return scaled_dot_product_attention(q[:, :, :KV_HEADS].transpose(1, 2), k_cache, v_cache)


# function -> shapes of what holds the caches, by their length
IN_CACHE = {
    two_inputs: lambda n: [(3, n, KV_HEADS, DIM)] * 2,
    heads_first: lambda n: [(3, KV_HEADS, n, DIM)] * 2,  # StaticCache of transformers
    no_batch: lambda n: [(KV_HEADS, n, DIM)] * 2,
    halves_by_index: lambda n: [(2, 3, n, KV_HEADS, DIM)],  # vLLM's FlashAttention
    halves_unbound: lambda n: [(2, 3, n, KV_HEADS, DIM)],
    halves_of_blocks: lambda n: [(3, 2, n, KV_HEADS, DIM)],  # FlashInfer's NHD
    halves_of_blocks_heads_first: lambda n: [(3, 2, KV_HEADS, n, DIM)],  # and its HND
    halves_of_a_row: lambda n: [(3, n, KV_HEADS, 2 * DIM)],
    paged: lambda n: [(n, 2, 5, KV_HEADS, DIM)],
    layers: lambda n: [(3, 2, 3, n, KV_HEADS, DIM)],
    layers_of_blocks: lambda n: [(3, 3, 2, n, KV_HEADS, DIM)],
    layers_as_inputs: lambda n: [(3, 2, 3, n, KV_HEADS, DIM)],
    qkv_of_a_split_input: lambda n: [(3, n, KV_HEADS, DIM)] * 2,
    qkv_of_a_projection: lambda n: [(3, n, KV_HEADS, DIM)] * 2,
    attention_over_the_cache: lambda n: [(2, KV_HEADS, n, DIM)] * 2,
}


def cache_inputs(function, seq, length, device):
    width, name = (HEADS + 2 * KV_HEADS) * DIM, function.__name__
    if "split" in name:
        shapes = [(2, seq, width)]
    elif "projection" in name or "attention" in name:
        shapes = [(2, seq, 24), (24, width)]
    else:
        shapes = [(2, seq, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    *inputs, last = [torch.randn(shape, device=device) for shape in shapes + IN_CACHE[function](length)]
    if name == "layers_as_inputs":
        return *inputs, *last
    if name == "paged":
        return *inputs, last, torch.randperm(5 * length, device=device)[: 2 * seq].view(2, seq)
    return *inputs, last


@pytest.mark.usefixtures("_tables_of")
@pytest.mark.parametrize("function", IN_CACHE, ids=lambda f: f.__name__)
def test_a_cache_is_written_where_it_is(function, device):
    """With the first lengths, and with all others, which are symbols: so are the offsets at which the caches begin. A packed
    qkv that the graph computes, its one buffer, is not copied either."""
    if "attention" in function.__name__:
        skip_attention_of_metal(device)

    def run():
        for seq, length in ((6, 16), (4, 20), (9, 24)):
            assert_same_call(function, compiled, *cache_inputs(function, seq, length, device))

    compiled = torch.compile(function, fullgraph=True)
    _, programs = run_and_see_programs(device, run)
    assert len(programs) == 2 or device == "mps"
    name = function.__name__
    for code in programs:
        calls = ["rotate_into_cache_"] * (3 if "layers" in name else 1)
        assert_no_copy(code, calls, buffers=1 if "projection" in name or "attention" in name else 0)


class Attention(torch.nn.Module):
    """With a cache of its own, rotated and normalised."""

    def __init__(self, length, device):
        super().__init__()
        self.qkv = torch.nn.Linear(24, 3 * KV_HEADS * DIM)
        self.out = torch.nn.Linear(KV_HEADS * DIM, 24)
        self.q_norm, self.k_norm = (torch.nn.Parameter(w) for w in norm_weights("cpu"))
        self.register_buffer("kv", torch.zeros(2, 2, KV_HEADS, length, DIM))
        self.to(device)

    def forward(self, x, mask, cos, sin, offset):
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM)).chunk(3, 2)
        k_cache, v_cache = self.kv
        norm = {"q_norm_weight": self.q_norm, "k_norm_weight": self.k_norm}
        rope.rotate_into_cache_(
            q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2), cos, sin, offset=offset, **norm
        )
        heads = scaled_dot_product_attention(q.transpose(1, 2), k_cache, v_cache, mask)
        return self.out(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_with_its_caches_as_buffers(mode, device):
    """Prompts of two lengths, then token by token: a program for the first prompt, one for others, one for tokens."""
    skip_attention_of_metal(device)
    cos, sin = tables(device)
    length = 48
    model = torch.nn.ModuleList([Attention(length, device) for _ in range(2)])
    twin = copy.deepcopy(model)

    def forward(model, x, mask, offset):
        for layer in model:
            x = layer(x, mask, cos, sin, offset)
        return x

    def run():
        for start, seq in ((0, 5), (0, 7), *((position, 1) for position in range(7, 14))):
            x = torch.randn(2, seq, 24, device=device)
            hidden = torch.arange(length) > torch.arange(start, start + seq)[:, None]
            mask = torch.where(hidden, -math.inf, 0.0).to(device)
            with mode():
                torch.testing.assert_close(compiled(twin, x, mask, start), forward(model, x, mask, start))
        for buffer, expected in zip(twin.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected)
            assert not buffer[..., 14:, :].any() and buffer[..., :14, :].all()

    compiled = torch.compile(forward, fullgraph=True)
    _, programs = run_and_see_programs(device, run)
    assert len(programs) == 3 or device == "mps"
    for code in programs:
        assert calls_in(code) == ["rotate_into_cache_"] * 2
        sizes = re.findall(r"= empty_strided\w*\(\(([^()]*)\)", body_of(code))
        sizes = [math.prod(int(n) for n in re.findall(r"\b\d+\b", size)) for size in sizes]  # a symbol counts as 1
        assert max(sizes) < 2 * length * KV_HEADS * DIM


@pytest.mark.parametrize("op", ["rotate_", "rotate_qk_", "rotate_into_cache_"])
def test_tensor_subclasses(op, device):
    """A subclass that is made of two tensors: both are written."""
    freq = torch_rope.inv_freq(DIM, device=device)
    q, k = qk(device)
    shapes = {"rotate_": [q], "rotate_qk_": [q, k], "rotate_into_cache_": [q, k, k, torch.zeros_like(k), k + 1]}
    expected = clones(shapes[op])
    getattr(rope, op)(*expected, inv_freq=freq)

    def call(*tensors):
        getattr(rope, op)(*tensors, inv_freq=freq)
        return [t * 2 for t in tensors]

    pairs = [TwoTensor(t.clone(), t.clone()) for t in shapes[op]]
    outs = torch.compile(call, fullgraph=True, backend="aot_eager")(*pairs)
    for out, pair, t in zip(outs, pairs, expected, strict=True):
        assert torch.equal(pair.a, t) and torch.equal(pair.b, t)
        assert torch.equal(out.a, 2 * t) and torch.equal(out.b, 2 * t)


# ---- errors ----


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_an_error_has_eagers_message(backend, device):
    """What the fake implementation raises is wrapped by Dynamo."""
    x, (cos, sin) = torch.randn(2, 6, HEADS, DIM, device=device), tables(device, rotary_dim=16)
    with pytest.raises(ValueError) as eager:
        rope.rotate(x, cos, sin)
    compiled = torch.compile(lambda x: rope.rotate(x, cos, sin), fullgraph=True, backend=backend)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=re.escape(str(eager.value))):
        compiled(x)


@pytest.mark.parametrize("op", ["rotate", "rotate_", "norm_rotate_qk", "rotate_into_cache_"])
def test_an_error_of_the_kernel_keeps_its_type(op, device):
    if not checks_ranges(device):
        pytest.skip("positions and slots in a tensor are looked at by the kernel, without an exception here")
    tensors, (cos, sin) = operands(op, device, seq=3), tables(device)
    before = clones(tensors)
    function = lambda p, offset, slots, *t: getattr(rope, op)(*t, cos, sin, None, p, offset, **slots)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True)
    cases = [([1, 64, 2], 0, {}), ([1, -1, 2], 0, {}), ([1, 63, 2], 1, {})]
    if op == "rotate_into_cache_":  # of 128 cells
        cases.append(([1, 3, 2], 1, {"slots": torch.tensor([[0, -1, 1], [9, 128, 8]])}))
    for positions, *rest in cases:
        positions = torch.tensor(positions)
        with pytest.raises(IndexError) as eager:
            function(positions, *rest, *tensors)
        with pytest.raises(IndexError, match=re.escape(str(eager.value))):
            compiled(positions, *rest, *tensors)
    assert_same_bits(tuple(tensors), tuple(before))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    "op, which, instead",
    [
        ("rotate_qk_", 1, "use rope.rotate_qk, or torch.no_grad()"),
        ("rotate_into_cache_", 1, "use rope.rotate_qk or rope.norm_rotate_qk, and write the cache yourself, or torch."),
        ("rotate_into_cache_", 3, "use rope.rotate_qk or rope.norm_rotate_qk, and write the cache yourself, or torch."),
    ],
)
def test_in_place_on_what_requires_grad_is_an_error(op, which, instead, backend, device):
    """Also on what is only read, k here."""
    tensors, (cos, sin) = operands(op, device), tables(device)
    tensors[which].requires_grad_()
    function = lambda *t: getattr(rope, op)(*(x * 1 for x in t), cos, sin)  # noqa: E731
    with pytest.raises(RuntimeError, match=re.escape("in-place operator has no gradient; " + instead)) as eager:
        function(*tensors)
    with pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
        torch.compile(function, fullgraph=True, backend=backend)(*tensors)


# ---- learned tables and frequencies ----


def learned(source, device):
    """(what is learned, function of (q, k, what is learned..., offset) -> q, k)"""
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
        q, k, *rope._axial_cos_sin((torch.arange(q.shape[1], device=device) + n).expand(2, 1, -1), f)
    )


LEARNED = ["tables", "inv_freq", "cos_sin", "axes"]


@pytest.mark.parametrize("frozen", ["nothing", "q and k", "all but q and the last"])
@pytest.mark.parametrize("source", LEARNED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_gradients_of_learned_angles(backend, source, frozen, device):
    if backend == "inductor":
        backend = backend_of(device)
    angles, function = learned(source, device)
    inputs = [*qk(device), *angles]
    needed = {"nothing": inputs, "q and k": angles, "all but q and the last": [inputs[0], angles[-1]]}[frozen]
    seeds = qk(device)

    def run(f):
        leaves = [t.clone().requires_grad_(any(t is n for n in needed)) for t in inputs]
        outs = f(*leaves, 3)
        torch.autograd.backward(outs, seeds)
        return (*outs, *(t.grad for t in leaves))

    expected, actual = run(function), run(torch.compile(function, fullgraph=True, backend=backend))
    for e, a, t in zip(expected, actual, [None, None, *inputs], strict=True):
        assert (e is None) == (a is None) == (t is not None and not any(t is n for n in needed))
        if a is not None:
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("source", LEARNED)
def test_all_lengths_and_offsets_of_learned_angles_run_one_program(source, device):
    angles, function = learned(source, device)
    counter = CompileCounterWithBackend(backend_of(device))
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for seq, offset in ((5, 4), (6, 2), (17, 30)):
        inputs, seeds = [*qk(device, seq), *angles], qk(device, seq)
        actual, expected = (outputs_and_gradients(f, inputs, seeds, n=offset) for f in (compiled, function))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)
    assert counter.frame_count == 1


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("source", LEARNED)
def test_frequencies_are_learned(source, compile, device):
    """From the angles of other frequencies, as the rotation shows them."""
    angles, function = learned(source, device)
    q, k = qk(device)
    with torch.no_grad():
        goal = function(q, k, *(a * 1.3 for a in angles), 1)
    step = torch.compile(function, fullgraph=True) if compile else function
    angles = [torch.nn.Parameter(a.clone()) for a in angles]
    optimizer = torch.optim.Adam(angles, lr=0.02)
    losses = []
    for _ in range(60):
        loss = sum((out - g).square().mean() for out, g in zip(step(q, k, *angles, 1), goal, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("op", ["rotate", "rotate_qk", "_rotate_table_backward"])
@pytest.mark.parametrize("source", [source for source in SOURCES if source.freq_dtype == torch.float32], ids=str)
def test_opcheck_of_learned_angles(op, source, device):
    angles = source.arguments(2, 3, 4, torch.float32, device)
    xs = operands("rotate" if op == "rotate" else "rotate_qk", device, seq=3)
    if op == "_rotate_table_backward":
        if source.kind == "inv_freq":
            return  # it has tables alone
        xs += [torch.randn_like(x) for x in xs]
    for name in ("cos", "sin", "inv_freq"):
        if name in angles:
            angles[name] = angles[name].detach().requires_grad_()
    opcheck(op, [x.requires_grad_() for x in xs], angles | {"attention_factor": 1.2}, device)


@pytest.mark.parametrize("op", ["cos_sin", "_axial_cos_sin"])
def test_opcheck_of_learned_frequencies(op, device):
    axes = () if op == "cos_sin" else (2,)
    positions, freq = torch.rand(*axes, 5, 3, device=device), torch.rand(*axes, 4, device=device)
    opcheck(op, (positions.requires_grad_(), freq.requires_grad_()), {"attention_factor": 1.2}, device)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_norm_with_tables_that_require_grad_is_an_error(backend, device):
    tensors, (cos, sin) = operands("norm_rotate_qk", device), tables(device)
    compiled = torch.compile(lambda *t: rope.norm_rotate_qk(*t), fullgraph=True, backend=backend)
    with pytest.raises((NotImplementedError, RuntimeError), match="cos requires grad, and its gradient is not"):
        compiled(*tensors, cos.requires_grad_(), sin)


# ---- export ----


class Rotating(torch.nn.Module):
    """q and k from one packed projection, rotated by one of the operators; and the cache, if there is one."""

    def __init__(self, op, device):
        super().__init__()
        self.op = op
        cos, sin = tables(device)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("kv", torch.zeros(2, 6, 64, KV_HEADS, DIM, device=device) if "cache" in op else None)
        self.register_buffer("norm", torch.stack(norm_weights(device)) if "norm" in op else None)

    def forward(self, qkv, offset):
        q, k, v = split(qkv * 1)
        tensors = (q, k) if self.kv is None else (q, k, v, *self.kv)
        norm = () if self.norm is None else self.norm
        result = getattr(rope, self.op)(*tensors, *norm, self.cos, self.sin, offset=offset)
        q, k = result or (q, k)
        return q + 0, k + 0, v + 0, *(() if self.kv is None else self.kv + 0)


def packed_qkv(device, seq, batch=2):
    return torch.randn(batch, seq, (HEADS + 2 * KV_HEADS) * DIM, device=device)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("op", OF_A_LAYER)
def test_export_round_trip(op, strict, device):
    """Saved and loaded, run at other lengths, batches and offsets; decomposed; copied."""
    module = Rotating(op, device)
    exported = torch.export.export(
        module,
        (packed_qkv(device, 6), 3),
        dynamic_shapes={"qkv": {0: Dim("batch", max=6), 1: Dim("seq", min=2, max=60)}, "offset": Dim.DYNAMIC},
        strict=strict,
    )
    assert any(f"rope.{op}.default" in str(node.target) for node in exported.graph.nodes)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    programs = {
        "exported": exported,
        "loaded": loaded,
        "decomposed": loaded.run_decompositions(),
        "copied": copy.deepcopy(exported),
    }
    for seq, batch, offset in ((6, 2, 3), (11, 3, 0), (2, 5, 40)):
        qkv = packed_qkv(device, seq, batch)
        for program in programs.values():
            assert_same_bits(program.module()(qkv, offset), module(qkv, offset))


@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
def test_decomposed_the_in_place_operator_mutates_nothing(op, device):
    exported = torch.export.export(Rotating(op, device), (packed_qkv(device, 6), 3))
    decomposed = exported.run_decompositions()
    targets = [node.target for node in decomposed.graph.nodes if node.op == "call_function"]
    assert getattr(rope, op).default not in targets
    assert torch.ops.higher_order.auto_functionalized_v2 in targets


@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
def test_export_of_an_input_that_is_written(op, device):
    """An exported program writes to the caller's tensor, as the module does."""
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


def test_export_with_an_offset_that_is_data(device):
    """No guard on it is needed: its range is checked by the kernel."""
    cos, sin = tables(device)

    class Module(torch.nn.Module):
        def forward(self, x, t):
            return rope.rotate(x, cos, sin, offset=t.item())

    x = torch.randn(2, 6, HEADS, DIM, device=device)
    exported = torch.export.export(Module(), (x, torch.tensor(3)))
    for offset in (0, 3, 58):
        assert_same_bits(exported.module()(x, torch.tensor(offset)), Module()(x, torch.tensor(offset)))
    with pytest.raises(IndexError):
        exported.module()(x, torch.tensor(59))


class Unbound(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        cos, sin = tables(device)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x):
        x = x * 1
        rope.rotate_(x[1], self.cos, self.sin)
        return x


@pytest.mark.parametrize("decomposed", [False, True])
def test_aot_inductor_package(decomposed, device, tmp_path):
    """Compiled ahead of time, with a dynamic batch and length; q and k written in place at an offset that depends on both, a
    cache that the package keeps, at a position that is data."""
    if device == "mps":
        pytest.skip("an AOTInductor package for Metal is not what this library ships")

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.functional, self.in_place = Rotating("rotate_qk", device), Unbound(device)
            self.norm, self.cache = Rotating("norm_rotate_qk", device), Rotating("rotate_into_cache_", device)

        def forward(self, qkv, x, offset):
            offset = offset.item()
            return *self.functional(qkv, 3), self.in_place(x), *self.norm(qkv, offset), *self.cache(qkv, offset)

    module = Module()
    example = packed_qkv(device, 6), torch.randn(3, 2, 6, HEADS, DIM, device=device), torch.tensor(3)
    batch, seq = Dim("batch", min=2, max=6), Dim("seq", min=2, max=60)
    exported = torch.export.export(module, example, dynamic_shapes=({0: batch, 1: seq}, {1: batch, 2: seq}, None))
    if decomposed:
        exported = exported.run_decompositions()
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "rope.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for b, s, offset in ((2, 6, 3), (5, 9, 0), (3, 2, 17)):
        inputs = packed_qkv(device, s, b), torch.randn(3, b, s, HEADS, DIM, device=device), torch.tensor(offset)
        assert_same_bits(tuple(run(*inputs)), module(*inputs))


# ---- other tracers ----


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("op", OF_A_LAYER)
def test_make_fx(op, tracing_mode, device):
    cos, sin = tables(device)

    def function(*tensors):
        tensors = tuple(t * 1 for t in tensors)
        return getattr(rope, op)(*tensors, cos, sin, offset=1) or tensors

    graph = make_fx(function, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*operands(op, device))
    assert any(node.target is getattr(rope, op).default for node in graph.graph.nodes)
    assert_same_call(function, graph, *operands(op, device))


@pytest.mark.parametrize("op", ["rotate", "rotate_"])
def test_functionalize(op, device):
    """torch.func.functionalize takes the functional operators as they are, and refuses in-place ones that are not ATen's."""
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
def test_jit_trace(op, device):
    cos, sin = tables(device)
    function = lambda *tensors: getattr(torch_rope, op)(*tensors, cos, sin)  # noqa: E731
    traced = torch.jit.trace(function, tuple(operands(op, device, 6)))
    assert_same_call(function, traced, *operands(op, device, 9))


# ---- vmap ----


@pytest.fixture
def no_vmap_fallback():
    """torch's slow path would give right values as well, with a warning: here it is an error."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


N = 3  # samples


def loop(function, in_dims, *args):
    """What vmap means."""
    samples = [
        tensors_of(function(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))))
        for i in range(N)
    ]
    return tuple(torch.stack(outs) for outs in zip(*samples, strict=True))


def assert_vmap(function, in_dims, *args):
    a, b = clones(args), clones(args)
    for actual, expected in zip(tensors_of(vmap(function, in_dims)(*a)), loop(function, in_dims, *b), strict=True):
        assert torch.equal(actual, expected)
    for x, y in zip(a, b, strict=True):  # what was written in place
        assert torch.equal(x, y)


def mapped(make, dim):
    """N samples, stacked along dim."""
    return torch.stack([make() for _ in range(N)], dim)


class Launches(TorchDispatchMode, list):
    """The calls of our operators that reach a back end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "rope":
            self.append(func.name().removeprefix("rope::"))
        return func(*args, **kwargs or {})


# name -> (function of (device) giving the angle arguments of one sample, how many of them are mapped over)
def vmap_angles(device):
    freq = torch_rope.inv_freq(DIM, device=device)
    cos, sin = tables(device)
    token = lambda: torch.rand(2, 6, DIM // 2, device=device)  # noqa: E731
    table = lambda: torch.rand(64, DIM // 2, device=device)  # noqa: E731
    positions = lambda *shape: lambda: torch.randint(0, 60, shape, device=device)  # noqa: E731
    nothing = (None,) * 4
    return {
        "nothing": ((cos, sin, None, None), nothing),
        "positions [S]": ((cos, sin, None, mapped(positions(6), 1)), (None, None, None, 1)),
        "positions [1, S]": ((cos, sin, None, mapped(positions(1, 6), 0)), (None, None, None, 0)),
        "positions [B, S]": ((cos, sin, None, mapped(positions(2, 6), 2)), (None, None, None, 2)),
        "positions, with inv_freq": ((None, None, freq, mapped(positions(6), 0)), (None, None, None, 0)),
        "shared positions": ((cos, sin, None, positions(2, 6)()), nothing),
        "shared token table": ((token(), token(), None, None), nothing),
        "token tables": ((mapped(token, 0), mapped(token, 1), None, None), (0, 1, None, None)),
        "one of two token tables": ((mapped(token, 0), token(), None, None), (0, None, None, None)),
        "tables": ((mapped(table, 0), mapped(table, 2), None, None), (0, 2, None, None)),
        "inv_freq": ((None, None, mapped(lambda: torch.rand(DIM // 2, device=device), 1), None), (None, None, 1, None)),
    }


@pytest.mark.usefixtures("no_vmap_fallback")
@pytest.mark.parametrize("dims", [(0, 0), (2, 1), (4, 3)], ids=str)
@pytest.mark.parametrize("angles", vmap_angles("cpu"))
@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_", "norm_rotate_qk"])
def test_vmap_is_a_loop(op, angles, dims, device):
    angles, angle_dims = vmap_angles(device)[angles]
    given = [i for i, a in enumerate(angles) if a is not None]
    count = 2 if "qk" in op else 1
    weights = norm_weights(device) if "norm" in op else ()

    def function(*args):
        xs, some = args[:count], dict(zip(given, args[count:], strict=True))
        out = getattr(rope, op)(*xs, *weights, *(some.get(i) for i in range(4)), interleaved=True)
        return xs if out is None else out  # the loop stacks what was written

    xs = [
        mapped(lambda heads=heads: torch.randn(2, 6, heads, DIM, device=device), d)
        for heads, d in zip((4, 2), dims, strict=True)
    ]
    assert_vmap(function, (*dims[:count], *(angle_dims[i] for i in given)), *xs[:count], *(angles[i] for i in given))


@pytest.mark.usefixtures("no_vmap_fallback")
@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_", "norm_rotate_qk"])
def test_vmap_of_three_dimensions(op, device):
    """The samples become the batch: one launch."""
    cos, sin = tables(device)
    count = 2 if "qk" in op else 1
    weights = norm_weights(device) if "norm" in op else ()

    def function(*xs):
        out = getattr(rope, op)(*xs, *weights, cos, sin, offset=5)
        return xs if out is None else out

    for dims in ((0, 0), (1, 2), (3, 0)):
        xs = [
            mapped(lambda heads=heads: torch.randn(6, heads, DIM, device=device), d)
            for heads, d in zip((4, 2), dims, strict=True)
        ]
        with Launches() as launches:
            vmap(function, dims[:count])(*clones(xs[:count]))
        assert launches == [op]
        assert_vmap(function, dims[:count], *xs[:count])


@pytest.mark.usefixtures("no_vmap_fallback")
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 1), (0, 0, None, 0), (None, None, 0, 0), (1, None, None, None)], ids=str)
def test_vmap_with_weights_of_their_own(in_dims, device):
    """A loop, for each sample has its own norm."""
    cos, sin = tables(device)
    tensors = operands("norm_rotate_qk", device)
    args = [
        t if d is None else torch.stack([t * (i + 1) for i in range(N)], d)
        for t, d in zip(tensors, in_dims, strict=True)
    ]
    function = lambda *t: rope.norm_rotate_qk(*t, cos, sin, offset=1, norm_eps=0.1)  # noqa: E731
    with Launches() as launches:
        vmap(function, in_dims)(*args)
    assert launches == ["norm_rotate_qk"] * N
    assert_vmap(function, in_dims, *args)


@pytest.mark.usefixtures("no_vmap_fallback")
@pytest.mark.parametrize("in_dims", [(0,) * 5, (0, 0, 0, None, None), (None, None, 0, None, None)], ids=str)
def test_vmap_of_a_cache_is_an_error(in_dims, device):
    tensors = operands("rotate_into_cache_", device)
    tensors = [t if d is None else torch.stack([t] * N) for t, d in zip(tensors, in_dims, strict=True)]
    before = clones(tensors)
    with pytest.raises(
        RuntimeError, match="rotate_into_cache_ cannot be mapped; pass the mapped dimension as the batch"
    ):
        vmap(lambda *t: rope.rotate_into_cache_(*t, *tables(device)), in_dims)(*tensors)
    assert_same_bits(tuple(tensors), tuple(before))


@pytest.mark.usefixtures("no_vmap_fallback")
def test_vmap_over_the_angles_only(device):
    """One x, rotated by each sample's positions or tables; k shared with q mapped."""
    x, k = qk(device)
    cos, sin = tables(device)
    positions = torch.randint(0, 60, (N, 6), device=device)
    token = torch.rand(N, 2, 6, DIM // 2, device=device)
    assert_vmap(lambda x, p: rope.rotate(x, cos, sin, positions=p), (None, 0), x, positions)
    assert_vmap(lambda x, c: rope.rotate(x, c, c), (None, 0), x, token)
    assert_vmap(lambda q, k: rope.rotate_qk(q, k, cos, sin), (0, None), torch.stack([x] * N), k)


@pytest.mark.usefixtures("no_vmap_fallback")
@pytest.mark.parametrize("which", ["cos", "sin"])
def test_vmap_with_one_of_two_tables_mapped(which, device):
    x, mapped, shared = (torch.randn(s, device=device) for s in ((2, 3, 2, 8), (2, 1, 3, 4), (1, 3, 4)))

    def sample(x, table):
        return rope.rotate(x, *((table, shared) if which == "cos" else (shared, table)))

    assert torch.equal(vmap(sample)(x, mapped), torch.stack([sample(*each) for each in zip(x, mapped, strict=True)]))


def test_vmap_over_nothing(device):
    freq = torch_rope.inv_freq(8, device=device)
    assert vmap(lambda x: rope.rotate(x, inv_freq=freq))(torch.ones(0, 2, 3, 8, device=device)).shape == (0, 2, 3, 8)
    x = torch.ones(2, 3, 8, device=device)
    assert vmap(lambda c: rope.rotate(x, c, c))(torch.ones(0, 5, 4, device=device)).shape == (0, 2, 3, 8)
    assert vmap(lambda p: rope.cos_sin(p, freq)[0])(torch.ones(0, 5, device=device)).shape == (0, 5, 4)


def test_vmap_errors_are_those_of_a_sample_and_leave_nothing_written(device):
    x, freq = torch.randn(2, 5, 3, 2, 8, device=device), torch_rope.inv_freq(8, device=device)
    with pytest.raises(ValueError, match="rope.rotate: positions has batch 10, x has batch 5"):
        vmap(lambda x: rope.rotate(x, inv_freq=freq, positions=torch.zeros(10, 3, dtype=torch.int64, device=device)))(x)
    if not checks_ranges(device):
        return  # they are looked at by the kernel, without an exception here
    before, cos = x.clone(), torch.randn(2, 5, 4)
    positions = torch.tensor([[0, 1, 2], [0, 1, 9]])
    with pytest.raises(IndexError):
        vmap(lambda x, c, p: (rope.rotate_(x, c, c, positions=p), x.sum())[1])(x, cos, positions)
    assert torch.equal(x, before)


def test_vmap_of_cos_sin(device):
    freq = torch_rope.inv_freq(DIM, device=device)
    positions = torch.randint(0, 60, (5, N), device=device)
    assert_vmap(lambda p, f: rope.cos_sin(p, f), (1, None), positions, freq)
    assert_vmap(lambda p, f: rope.cos_sin(p, f, dtype=torch.float16), (1, 0), positions, torch.stack([freq] * N))
    assert_vmap(lambda p, f: rope.cos_sin(p, f), (None, 0), positions, torch.rand(N, 4, device=device))


@pytest.mark.usefixtures("no_vmap_fallback")
@pytest.mark.parametrize("op", ["rotate_qk", "rotate_qk_"])
def test_nested_vmap(op, device):
    cos, sin = tables(device)
    q, k = (torch.randn(N, 2, 6, N, heads, DIM, device=device) for heads in (4, 2))
    positions = torch.randint(0, 60, (N, 6), device=device)

    def function(q, k, positions):
        return getattr(rope, op)(q, k, cos, sin, positions=positions) or (q, k)

    inner = vmap(function, in_dims=(2, 2, None))
    expected_inner = lambda q, k, p: loop(function, (2, 2, None), q, k, p)  # noqa: E731
    a, b = clones((q, k)), clones((q, k))
    actual, expected = vmap(inner)(*a, positions), loop(expected_inner, (0, 0, 0), *b, positions)
    for x, y in zip((*actual, *a), (*expected, *b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("no_vmap_fallback")
def test_what_is_written_must_be_mapped(device):
    """As for torch's own in-place operators."""
    cos, sin = tables(device)
    x, positions = qk(device)[0], torch.randint(0, 60, (N, 6), device=device)
    before = x.clone()
    with pytest.raises(RuntimeError, match="writes in place to a tensor that is not mapped over"):
        vmap(lambda p: rope.rotate_(x, cos, sin, positions=p))(positions)
    assert torch.equal(x, before)


@pytest.mark.usefixtures("no_vmap_fallback")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("op", ["rotate_qk", "rotate_qk_"])
def test_compiled_vmap(op, dynamic, device):
    cos, sin = tables(device)

    def function(q, k, positions):
        sample = lambda q, k, p: getattr(rope, op)(q, k, cos, sin, positions=p) or (q * 1, k * 1)  # noqa: E731
        return vmap(sample)(q, k, positions)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for seq in (4, 6):
        q, k = (torch.randn(N, 2, seq, heads, DIM, device=device) for heads in (4, 2))
        assert_same_call(function, compiled, q, k, torch.randint(0, 60, (N, seq), device=device))


# ---- flops ----


@pytest.mark.parametrize("source", ["table", "token", "inv_freq"])
@pytest.mark.parametrize("op", [*FUNCTIONAL, *IN_PLACE])
def test_flops(op, source, device):
    """For each rotated channel three: four multiplications and two additions a pair. For each channel of a norm four: squared,
    summed, scaled, weighted. Of its backward eleven: these, two for the weight's gradient, five for the input's."""
    tensors = operands(op, device)
    cos, sin = tables(device, rotary_dim=4)
    if source == "inv_freq":
        keywords = {"inv_freq": torch_rope.inv_freq(4, device=device)}
    else:
        keywords = {"cos": cos, "sin": sin} if source == "table" else {"cos": cos[None, :6], "sin": sin[None, :6]}
    heads = 2 * 6 * (HEADS if op in ("rotate", "rotate_") else HEADS + KV_HEADS)
    expected = {"norm_rotate_qk": 4 * DIM, "_norm_rotate_qk_backward": 11 * DIM}.get(op, 0) + 3 * 4
    if "cache" in op:
        keywords["slots"] = torch.arange(12, device=device).view(2, 6)
    with FlopCounterMode(display=False) as counter:
        getattr(rope, op)(*tensors, **keywords)
    assert counter.get_total_flops() == heads * expected
    if "cache" in op:
        with FlopCounterMode(display=False) as counter:
            q_norm, k_norm = norm_weights(device)
            getattr(rope, op)(*tensors, **keywords, q_norm_weight=q_norm, k_norm_weight=k_norm)
        assert counter.get_total_flops() == heads * (expected + 4 * DIM)


@pytest.mark.parametrize("op, channel", [("rotate_qk", 2 * 3), ("norm_rotate_qk", 2 * 3 + 4 + 11)])
def test_flops_of_a_training_step(op, channel, device):
    """The backward is a rotation as well."""
    q, k, *weights = (t.requires_grad_() for t in operands(op, device))
    with FlopCounterMode(display=False) as counter:
        sum(t.sum() for t in getattr(rope, op)(q, k, *weights, *tables(device))).backward()
    assert counter.get_total_flops() == channel * (q.numel() + k.numel())


@pytest.mark.parametrize("with_k", [False, True])
def test_flops_of_gradients_of_tables(with_k, device):
    q, k = qk(device)
    xs = [q, k] if with_k else [q, None]
    with FlopCounterMode(display=False) as counter:
        rope._rotate_table_backward(*xs, *xs, *tables(device))
    assert counter.get_total_flops() == 4 * sum(x.numel() for x in xs if x is not None)


# ---- CUDA graphs ----


@pytest.mark.parametrize("op", OF_A_LAYER)
def test_cuda_graphs(op, device):
    """The caches are buffers of a module, whose address stays: they may be written by a graph."""
    if device != "cuda":
        pytest.skip("CUDA graphs are of CUDA")
    cos, sin = tables(device)

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kv", torch.zeros(2, 2, 64, KV_HEADS, DIM, device=device))

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
