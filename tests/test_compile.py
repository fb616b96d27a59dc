"""torch.compile, export, fake tensors, vmap and opcheck: every operator is what its schema and its fake implementation say."""

import copy
import io
import re

import pytest
import torch
from cases import LAYOUTS, SOURCES
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import torch_rope

rope = torch.ops.rope

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec")

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(autouse=True)
def _compiled_here_and_now():
    """Nothing compiled is taken from an earlier test, or from a cache on disk: its key knows nothing of this library."""
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def tables(device, rotary_dim=DIM, rows=64):
    """cos, sin of [rows, rotary_dim / 2]"""
    return rope.cos_sin(torch.arange(rows, device=device), torch_rope.inv_freq(rotary_dim, device=device))


def qk(device, seq=6, batch=2):
    return torch.randn(batch, seq, HEADS, DIM, device=device), torch.randn(batch, seq, KV_HEADS, DIM, device=device)


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
    xs = [READ_LAYOUTS[layout](torch.Size((batch, 3, heads, 8)), torch.float32, device) for heads in (3, 1)]
    xs = xs if "qk" in op else xs[:1]
    keywords = source.arguments(batch, 3, rotary_dim, torch.float32, device) | {"interleaved": interleaved}
    return [x if dims == 4 else x[0] for x in xs], keywords


def opcheck(op, xs, keywords):
    torch.library.opcheck(getattr(rope, op).default, tuple(xs), keywords)


@pytest.mark.parametrize("layout, source, rotary_dim, interleaved", OPCHECKS)
@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_"])
def test_opcheck(op, layout, source, rotary_dim, interleaved, device):
    if op.endswith("_") and layout in EXPANDED:
        layout = "packed"  # what is written may not share memory with itself
    xs, keywords = arguments(op, layout, source, rotary_dim, interleaved, device)
    if not op.endswith("_"):  # an in-place operator refuses inputs that require grad
        xs = [x.detach().requires_grad_(i == 0) for i, x in enumerate(xs)]
    opcheck(op, xs, keywords)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_"])
def test_opcheck_of_three_dimensions(op, requires_grad, device):
    xs, keywords = arguments(op, "bhsd", SOURCES[2], 4, True, device, dims=3)
    xs = [x.requires_grad_(requires_grad and not op.endswith("_")) for x in xs]
    opcheck(op, xs, keywords | {"attention_factor": 1.5, "inverse": True})


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "positions",
    [torch.arange(6).view(2, 3), torch.rand(3, 2).T, torch.tensor(3)],
    ids=["int64", "float32 strided", "scalar"],
)
def test_opcheck_of_cos_sin(positions, dtype, device):
    freq = torch_rope.inv_freq(8, device=device)
    opcheck("cos_sin", (positions.to(device), freq), {"attention_factor": 1.5, "dtype": dtype})


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
    x, freq = STRIDES[layout](device), torch_rope.inv_freq(2, device=device)
    real = rope.rotate(x, inv_freq=freq), *rope.rotate_qk(x, x, inv_freq=freq)
    assert all(r.stride() == torch.empty_like(x).stride() for r in real)

    with FakeTensorMode() as mode:
        fake_x, fake_freq = mode.from_tensor(x), mode.from_tensor(freq)
        fake = rope.rotate(fake_x, inv_freq=fake_freq), *rope.rotate_qk(fake_x, fake_x, inv_freq=fake_freq)
    meta_x = torch.empty_strided(x.shape, x.stride(), device="meta")
    meta_freq = freq.to("meta")
    meta = rope.rotate(meta_x, inv_freq=meta_freq), *rope.rotate_qk(meta_x, meta_x, inv_freq=meta_freq)
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


# ---- torch.compile ----


def test_compiled_values_are_eager_values(device):
    """Alone, the operators keep every bit: the compiled program calls the same kernels."""
    q, k = qk(device)
    cos, sin = tables(device, rotary_dim=4)
    positions = torch.randint(0, 60, (2, 6), device=device)
    for function in (
        lambda q, k: rope.rotate(q, cos, sin, interleaved=True),
        lambda q, k: rope.rotate(q.transpose(1, 2), cos, sin, offset=3).transpose(1, 2),
        lambda q, k: rope.rotate_qk(q, k, cos, sin, positions=positions, inverse=True),
        lambda q, k: rope.rotate_qk_(q, k, inv_freq=torch_rope.inv_freq(8, device=device)),
        lambda q, k: rope.rotate_(k, cos, sin, positions=positions.int()),
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


def test_all_lengths_run_the_program_of_the_first_with_dynamic_shapes(device):
    cos, sin = tables(device)
    function = lambda q, k: rope.rotate_qk(q.transpose(1, 2), k, cos, sin)  # noqa: E731
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for seq in (5, 6, 17, 40):
        q, k = torch.randn(2, HEADS, seq, DIM, device=device), torch.randn(2, seq, KV_HEADS, DIM, device=device)
        assert_same_bits(compiled(q, k), function(q, k))
    assert counter.frame_count == 1


def test_marked_dimensions_do_not_specialise(device):
    """mark_dynamic raises where a check of ours fixes the marked size."""
    cos, sin = tables(device)
    function = lambda q, k, positions: rope.rotate_qk_(q, k, cos, sin, positions=positions)  # noqa: E731
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for batch, seq in ((2, 5), (3, 7), (6, 4)):
        q, k = qk(device, seq, batch)
        positions = torch.randint(0, 60, (batch, seq), device=device)
        a, b = clones((q, k)), clones((q, k))
        for t in (*b, positions):
            torch._dynamo.mark_dynamic(t, 0)
            torch._dynamo.mark_dynamic(t, 1)
        function(*a, positions)
        compiled(*b, positions)
        assert_same_bits(tuple(b), tuple(a))
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", ["rotate_qk", "rotate_qk_"])
@pytest.mark.parametrize("source", ["table", "inv_freq"])
def test_a_decode_loop_does_not_recompile_for_each_offset(source, op, device):
    """Once for the first offset, once for all others (which Dynamo's automatic dynamic shapes make symbolic)."""
    cos, sin = tables(device) if source == "table" else (None, None)
    freq = torch_rope.inv_freq(DIM, device=device) if source == "inv_freq" else None
    function = lambda q, k, offset: getattr(rope, op)(q, k, cos, sin, freq, offset=offset)  # noqa: E731
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    q, k = qk(device, seq=1)
    for offset in (5, 6, 7, 8, 9, 20, 33, 2):
        assert_same_call(lambda q, k, o=offset: function(q, k, o), lambda q, k, o=offset: compiled(q, k, o), q, k)
    assert counter.frame_count == 2


def test_positions_in_a_tensor_never_recompile(device):
    cos, sin = tables(device)
    function = lambda q, k, positions: rope.rotate_qk(q, k, cos, sin, positions=positions)  # noqa: E731
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    q, k = qk(device, seq=1)
    for position in range(8):
        positions = torch.tensor([position], device=device)
        assert_same_bits(compiled(q, k, positions), function(q, k, positions))
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_an_offset_that_is_data(device):
    """``offset=t.item()`` neither breaks the graph nor is guarded on."""
    cos, sin = tables(device)
    function = lambda q, k, t: rope.rotate_qk(q, k, cos, sin, offset=t.item())  # noqa: E731
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    q, k = qk(device)
    for offset in (0, 1, 17):
        t = torch.tensor(offset)
        assert_same_bits(compiled(q, k, t), function(q, k, t))
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_tokens_that_is_data(device):
    """As many tokens as a mask keeps."""
    cos, sin = tables(device)

    def function(x, mask):
        x = x[mask]
        return (
            rope.rotate(x, cos, sin),
            rope.rotate(x, cos, sin, positions=mask.nonzero().flatten()),
            rope.rotate(x[:, :2], cos, sin),  # whether this is dense depends on the data: the strides must not
            *rope.rotate_qk(x.expand(2, -1, -1, -1), x[:, :2].expand(2, -1, -1, -1), cos, sin),
        )

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    x = torch.randn(10, HEADS, DIM, device=device)
    for kept in (4, 7, 2):
        mask = torch.arange(10, device=device) < kept
        assert_same_bits(compiled(x, mask), function(x, mask))
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_without_grad(mode, device):
    """Under no_grad what requires grad may be rotated in place, compiled as well as not."""
    cos, sin = tables(device)
    function = lambda q, k: rope.rotate_qk_(q, k, cos, sin)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True)
    with mode():
        assert_same_call(function, compiled, *qk(device))
        q, k = (t.requires_grad_() for t in qk(device))
        expected = rope.rotate_qk(q, k, cos, sin)
        compiled(q, k)
        assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


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


def body_of(code):
    """The calls of the compiled program, without the kernels' source."""
    (code,) = code
    body = code[code.index("def call(") :]
    return body[: body.index("return (")]


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
    actual, code = run_and_get_code(torch.compile(function, fullgraph=True), *b)
    assert_same_bits(actual, expected)
    assert_same_bits(tuple(b), tuple(a))
    body = body_of(code)
    assert re.search(r"rope\.rotate(_qk)?_\.default\(", body)
    assert not re.search(r"rope\.rotate(_qk)?\.default\(", body), body
    assert len(re.findall(r"= empty_strided\w*\(", body)) == intermediates, body
    kernels = re.findall(r"cpp_fused\w*\(|triton_\w+\.run\(|generated_kernel\w*\(", body)
    assert len(kernels) == intermediates, body
    assert not re.search(r"copy|clone", body), body


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
    cos, sin = tables(device)
    function = lambda x: rope.rotate_(x[1], cos, sin)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for i, seq in ((0, 4), (1, 4), (2, 6), (1, 7)):
        whole = torch.randn(3, 2, 2, seq, HEADS, DIM, device=device)
        expected = whole.clone()
        function(expected[i])
        compiled(whole[i])
        assert torch.equal(whole, expected)


def test_inputs_that_share_a_storage(device):
    """kv[0] and kv[1] of one cache: the second starts at an offset that depends on the length."""
    cos, sin = tables(device)
    function = lambda q, k: rope.rotate_qk_(q, k, cos, sin)  # noqa: E731
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        for seq in (4, 6, 9):
            kv = torch.randn(2, 2, seq, HEADS, DIM, device=device)
            expected = kv.clone()
            function(*expected)
            compiled(*kv)
            assert torch.equal(kv, expected)


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_inputs_that_are_slices_of_one_tensor(dynamic, device):
    """q and k split outside of the compiled function. torch makes one input of them, and where the length is dynamic Inductor
    2.13 then forgets to define a size: an error is all that we can ask for, but nothing may be half done."""
    cos, sin = tables(device)
    function = lambda q, k: rope.rotate_qk_(q, k, cos, sin)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for seq in (4, 6, 9):
        packed = torch.randn(2, seq, HEADS + KV_HEADS, DIM, device=device)
        before, expected = packed.clone(), packed.clone()
        function(*expected.split([HEADS, KV_HEADS], 2))
        try:
            compiled(*packed.split([HEADS, KV_HEADS], 2))
        except NameError:
            assert dynamic is not False
            assert torch.equal(packed, before)
        else:
            assert torch.equal(packed, expected)


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


@pytest.mark.parametrize("op", ["rotate", "rotate_"])
def test_an_error_of_the_kernel_keeps_its_type(op, device):
    if device != "cpu":
        pytest.skip("positions are checked on the device, without an exception here")
    x, (cos, sin) = torch.randn(2, 3, HEADS, DIM, device=device), tables(device)
    before = x.clone()
    compiled = torch.compile(lambda x, p, o: getattr(rope, op)(x, cos, sin, positions=p, offset=o), fullgraph=True)
    for positions, offset in (([1, 64, 2], 0), ([1, -1, 2], 0), ([1, 63, 2], 1)):
        positions = torch.tensor(positions)
        with pytest.raises(IndexError) as eager:
            getattr(rope, op)(x, cos, sin, positions=positions, offset=offset)
        with pytest.raises(IndexError, match=re.escape(str(eager.value))):
            compiled(x, positions, offset)
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_in_place_on_what_requires_grad_is_an_error(backend, device):
    (q, k), (cos, sin) = qk(device), tables(device)
    message = "in-place operator has no gradient; use rope.rotate_qk, or torch.no_grad()"
    compiled = torch.compile(lambda q, k: rope.rotate_qk_(q * 1, k * 1, cos, sin), fullgraph=True, backend=backend)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        compiled(q, k.requires_grad_())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_tables_that_require_grad_are_an_error(backend, device):
    (q, _), (cos, sin) = qk(device), tables(device)
    compiled = torch.compile(lambda x, cos, sin: rope.rotate(x, cos, sin), fullgraph=True, backend=backend)
    with pytest.raises((NotImplementedError, RuntimeError), match="cos requires grad, and its gradient is not"):
        compiled(q, cos.requires_grad_(), sin)


# ---- export ----


class Rotating(torch.nn.Module):
    """q and k from one packed projection, rotated by the functional or by the in-place operator."""

    def __init__(self, op, device):
        super().__init__()
        self.op = op
        cos, sin = tables(device)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, qkv, offset):
        q, k, v = split(qkv * 1)
        result = getattr(rope, self.op)(q, k, self.cos, self.sin, offset=offset)
        q, k = result or (q, k)
        return q + 0, k + 0, v + 0


def packed_qkv(device, seq, batch=2):
    return torch.randn(batch, seq, (HEADS + 2 * KV_HEADS) * DIM, device=device)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("op", ["rotate_qk", "rotate_qk_"])
def test_export_round_trip(op, strict, device):
    """Saved and loaded, run at other lengths, batches and offsets; decomposed; copied."""
    module = Rotating(op, device)
    exported = torch.export.export(
        module,
        (packed_qkv(device, 6), 3),
        dynamic_shapes={"qkv": {0: Dim("batch", max=64), 1: Dim("seq", min=2, max=60)}, "offset": Dim.DYNAMIC},
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


def test_decomposed_the_in_place_operator_mutates_nothing(device):
    exported = torch.export.export(Rotating("rotate_qk_", device), (packed_qkv(device, 6), 3))
    decomposed = exported.run_decompositions()
    targets = [node.target for node in decomposed.graph.nodes if node.op == "call_function"]
    assert rope.rotate_qk_.default not in targets
    assert torch.ops.higher_order.auto_functionalized_v2 in targets


def test_export_of_an_input_that_is_written(device):
    """An exported program writes to the caller's tensor, as the module does."""
    cos, sin = tables(device)

    class Module(torch.nn.Module):
        def forward(self, x):
            q, k = x.unbind(0)[:2]
            rope.rotate_qk_(q, k, cos, sin)
            return x + 0

    example = torch.randn(3, 2, 6, HEADS, DIM, device=device)
    exported = torch.export.export(Module(), (example,), dynamic_shapes={"x": {2: Dim("seq", min=2, max=60)}})
    for program in (exported, exported.run_decompositions()):
        for seq in (6, 4, 9):
            x = torch.randn(3, 2, seq, HEADS, DIM, device=device)
            assert_same_call(Module(), program.module(), x)


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
    if device == "cpu":
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
    """Compiled ahead of time, with a dynamic batch and length; q and k written in place at an offset that depends on both."""
    if device == "mps":
        pytest.skip("an AOTInductor package for Metal is not what this library ships")

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.functional, self.in_place = Rotating("rotate_qk", device), Unbound(device)

        def forward(self, qkv, x):
            return *self.functional(qkv, 3), self.in_place(x)

    module = Module()
    example = packed_qkv(device, 6), torch.randn(3, 2, 6, HEADS, DIM, device=device)
    batch, seq = Dim("batch", min=2, max=64), Dim("seq", min=2, max=60)
    exported = torch.export.export(module, example, dynamic_shapes=({0: batch, 1: seq}, {1: batch, 2: seq}))
    if decomposed:
        exported = exported.run_decompositions()
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "rope.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for b, s in ((2, 6), (5, 9), (3, 2)):
        inputs = packed_qkv(device, s, b), torch.randn(3, b, s, HEADS, DIM, device=device)
        assert_same_bits(tuple(run(*inputs)), module(*inputs))


# ---- other tracers ----


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("op", ["rotate_qk", "rotate_qk_"])
def test_make_fx(op, tracing_mode, device):
    cos, sin = tables(device)

    def function(q, k):
        q, k = q * 1, k * 1
        return getattr(rope, op)(q, k, cos, sin, offset=1) or (q, k)

    graph = make_fx(function, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*qk(device))
    assert any(node.target is getattr(rope, op).default for node in graph.graph.nodes)
    assert_same_call(function, graph, *qk(device))


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
def test_jit_trace(device):
    cos, sin = tables(device)
    function = lambda q, k: torch_rope.rotate_qk(q, k, cos, sin)  # noqa: E731
    traced = torch.jit.trace(function, qk(device, 6))
    assert_same_call(function, traced, *qk(device, 9))


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
@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_"])
def test_vmap_is_a_loop(op, angles, dims, device):
    angles, angle_dims = vmap_angles(device)[angles]
    given = [i for i, a in enumerate(angles) if a is not None]
    count = 2 if "qk" in op else 1

    def function(*args):
        xs, some = args[:count], dict(zip(given, args[count:], strict=True))
        out = getattr(rope, op)(*xs, *(some.get(i) for i in range(4)), interleaved=True)
        return xs if out is None else out  # the loop stacks what was written

    xs = [
        mapped(lambda heads=heads: torch.randn(2, 6, heads, DIM, device=device), d)
        for heads, d in zip((4, 2), dims, strict=True)
    ]
    assert_vmap(function, (*dims[:count], *(angle_dims[i] for i in given)), *xs[:count], *(angles[i] for i in given))


@pytest.mark.usefixtures("no_vmap_fallback")
@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_"])
def test_vmap_of_three_dimensions(op, device):
    """The samples become the batch: one launch."""
    cos, sin = tables(device)
    count = 2 if "qk" in op else 1

    def function(*xs):
        out = getattr(rope, op)(*xs, cos, sin, offset=5)
        return xs if out is None else out

    for dims in ((0, 0), (1, 2), (3, 0)):
        xs = [
            mapped(lambda heads=heads: torch.randn(6, heads, DIM, device=device), d)
            for heads, d in zip((4, 2), dims, strict=True)
        ]
        assert_vmap(function, dims[:count], *xs[:count])


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
    if device != "cpu":
        return  # ranges are checked on the device, without an exception here
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
@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_"])
def test_flops(op, source, device):
    """Four multiplications and two additions a pair: three for each rotated channel."""
    q, k = qk(device)
    cos, sin = tables(device, rotary_dim=4)
    if source == "inv_freq":
        keywords = {"inv_freq": torch_rope.inv_freq(4, device=device)}
    else:
        keywords = {"cos": cos, "sin": sin} if source == "table" else {"cos": cos[None, :6], "sin": sin[None, :6]}
    tensors = (q, k) if "qk" in op else (q,)
    with FlopCounterMode(display=False) as counter:
        getattr(rope, op)(*tensors, **keywords)
    rotated = sum(t.shape[:-1].numel() * 4 for t in tensors)
    assert counter.get_total_flops() == 3 * rotated


def test_flops_of_a_training_step(device):
    """The backward is a rotation as well."""
    q, k = (t.requires_grad_() for t in qk(device))
    with FlopCounterMode(display=False) as counter:
        sum(t.sum() for t in rope.rotate_qk(q, k, *tables(device))).backward()
    assert counter.get_total_flops() == 2 * 3 * (q.numel() + k.numel())


# ---- CUDA graphs ----


@pytest.mark.parametrize("op", ["rotate_qk", "rotate_qk_"])
def test_cuda_graphs(op, device):
    if device != "cuda":
        pytest.skip("CUDA graphs are of CUDA")
    cos, sin = tables(device)

    def function(q, k, positions):
        q, k = q * 1, k * 1
        return getattr(rope, op)(q, k, cos, sin, positions=positions) or (q, k)

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for step in range(4):  # warm up, record, replay
        q, k = qk(device)
        positions = torch.arange(6, device=device) + step
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_bits(compiled(q, k, positions), function(q, k, positions))
