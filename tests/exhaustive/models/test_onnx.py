"""Tests the export to ONNX: onnxruntime runs the exported model, with other sizes than it was exported with, and the
results are those of torch_rope."""

import numpy as np
import pytest
import torch
from cases import needed
from torch.export import Dim

import torch_rope

needed("onnxscript")
ort = needed("onnxruntime")
from torch_rope.integrations.onnx import TRANSLATIONS, functional  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:.isinstance.treespec")]
rope = torch.ops.rope
BATCH, SEQ, HEADS, KV_HEADS, DIM, ROTARY_DIM, ROWS = 2, 5, 4, 3, 16, 8, 64
DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
INV_FREQ = torch_rope.inv_freq(ROTARY_DIM)
TWO_PARTS = torch.stack([INV_FREQ.float(), (INV_FREQ - INV_FREQ.float()).float()])
COS, SIN = torch_rope.cos_sin(torch.arange(ROWS), INV_FREQ)
# Every flag with both values, and together with others. head_dim - 3 is odd, which the node does not take.
FLAGS = [
    {},
    {"interleaved": True},
    {"inverse": True, "attention_factor": 1.3},
    {"rotary_start": 3},
    {"rotary_start": 4, "interleaved": True, "inverse": True},
    {"rotary_start": DIM - ROTARY_DIM, "attention_factor": 0.7},
    {"eager_rounding": True, "attention_factor": 1.3},
    {"eager_rounding": True, "inverse": True, "interleaved": True, "rotary_start": 3},
]


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def export(function, args=(), dynamic_shapes=None, *, opset=23, optimize=False):
    """Exports a function, or a program of torch.export. Returns a session of onnxruntime, and the nodes of the model.

    opset: None for the default of torch, which is 20.
    optimize: whether torch simplifies the model, which takes as long as all the rest.
    """
    model = function if isinstance(function, torch.export.ExportedProgram) else Model(function).eval()
    proto = torch.onnx.export(
        model, tuple(args), dynamo=True, opset_version=opset, custom_translation_table=TRANSLATIONS, optimize=optimize,
        dynamic_shapes=dynamic_shapes and (tuple(dynamic_shapes),), verbose=False,
    ).model_proto  # fmt: skip
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]), list(proto.graph.node)


def run(session, args):
    """Returns the outputs of the model, as tensors."""
    feeds = {i.name: np.asarray(a) for i, a in zip(session.get_inputs(), args, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


def rotations(nodes):
    return [{a.name: a.i for a in n.attribute} for n in nodes if n.op_type == "RotaryEmbedding"]


def wide(tensors):
    """Returns tensors in float32 or float64, because numpy has no bfloat16."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def assert_near(actual, expected, dtype=torch.float32):
    """Asserts that a result, converted to float32 or float64, is right: float16 and bfloat16 may round another way."""
    atol, rtol = {torch.float64: (1e-14, 1e-14), torch.float32: (3e-6, 0)}.get(dtype, (1e-6, torch.finfo(dtype).eps))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64).float()


def qk(batch, seq):
    return random(batch, seq, HEADS, DIM), random(batch, seq, KV_HEADS, DIM)


def by_token(*shape):
    """Returns cos and sin of random angles."""
    return torch_rope.cos_sin(torch.randint(ROWS, shape), INV_FREQ)


def integers(low, *shape):
    return torch.randint(low, ROWS, shape)


# For each source of the angles: what follows q and k, given batch and seq; which axes of it are dynamic; the keyword
# arguments that the call makes of it; and a second dtype of q and k.
TABLE = {"cos": COS, "sin": SIN}
SOURCES = {
    "table": (lambda b, s: [], [], lambda: TABLE | {"offset": 7}, torch.float16),
    "table, positions": (lambda b, s: [integers(3, b, s).int()], [DYNAMIC],
                         lambda p: TABLE | {"positions": p, "offset": -3}, torch.bfloat16),
    "token": (by_token, [DYNAMIC] * 2, lambda c, s: {"cos": c, "sin": s}, torch.float64),
    "head": (lambda b, s: by_token(b, s, HEADS), [DYNAMIC] * 2, lambda c, s: {"cos": c, "sin": s}, torch.bfloat16),
    "inv_freq": (lambda b, s: [], [], lambda: {"inv_freq": INV_FREQ, "offset": 11}, torch.float64),
    "inv_freq, positions": (lambda b, s: [integers(-9, b, s)], [DYNAMIC],
                            lambda p: {"inv_freq": INV_FREQ.float(), "positions": p, "offset": 2}, None),
    "inv_freq in two parts": (lambda b, s: [integers(0, 1, s)], [{1: Dim.DYNAMIC}],
                              lambda p: {"inv_freq": TWO_PARTS, "positions": p}, None),
}  # fmt: skip


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("source", SOURCES)
def test_a_rotation_becomes_a_node_and_runs_in_onnxruntime(source, opset):
    """Angles of heads, float64, eager rounding and older opsets have no node. onnxruntime computes another cosine."""
    make, axes, angles_of, other = SOURCES[source]
    dtypes = [torch.float32, other] if other else [torch.float32]
    calls = [(dtype, flags) for dtype in dtypes for flags in FLAGS]

    def function(q, k, *given):
        k = q.flip(0) if source == "head" else k  # which has as many heads as the tables
        pairs = [rope.rotate_qk(q.to(d), k.to(d), **angles_of(*given), **flags) for d, flags in calls]
        return wide([t for pair in pairs for t in pair] + [rope.rotate(k, **angles_of(*given))])

    def arguments(batch, seq):
        return *qk(batch, seq), *make(batch, seq)

    session, nodes = export(function, arguments(BATCH, SEQ), [DYNAMIC] * 2 + axes, opset=opset)
    with_node = [flags for d, flags in calls if d != torch.float64 and "eager_rounding" not in flags]
    assert len(rotations(nodes)) == (0 if source == "head" or opset < 23 else 2 * len(with_node) + 1)
    for size in ((BATCH, SEQ), (3, 9), (1, 1)):
        args = arguments(*size)
        for i, (actual, expected) in enumerate(zip(run(session, args), function(*args), strict=True)):
            dtype, flags = [*calls, *calls[:1]][i // 2]
            if "eager_rounding" in flags and dtype in (torch.float32, torch.float16) and "inv_freq" not in source:
                assert torch.equal(actual, expected)
            assert_near(actual, expected, dtype)


def test_the_node_gets_the_pairing_and_an_even_number_of_channels():
    """The specification of the node asks for an even number, though onnxruntime does not."""
    full = torch_rope.cos_sin(torch.arange(ROWS), torch_rope.inv_freq(DIM))

    def function(x):
        rotated = [rope.rotate(x, COS, SIN, rotary_start=start) for start in (0, 3, 4)]
        return [rope.rotate(x, *full, interleaved=True), *rotated]

    x = random(BATCH, SEQ, HEADS, DIM)
    nodes = rotations(export(function, [x], [DYNAMIC])[1])
    # 0 means all channels that the node gets
    assert [n["rotary_embedding_dim"] for n in nodes] == [ROTARY_DIM, 0, ROTARY_DIM, 0]
    assert [n["interleaved"] for n in nodes] == [0, 0, 0, 1] and nodes[0]["num_heads"] == HEADS
    _, nodes = export(lambda x: rope.rotate(x, COS, SIN), [x], [DYNAMIC], optimize=True)
    assert not {n.op_type for n in nodes} & {"Cast", "Slice", "Transpose"}


def test_the_offset_the_heads_and_the_length_of_a_packed_sequence_may_be_data():
    function = lambda x, t: rope.rotate(x, COS, SIN, offset=t.item())  # noqa: E731
    args = random(SEQ, HEADS, DIM), torch.tensor(3)  # without a batch
    session, nodes = export(function, args, [{0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, None])
    assert not rotations(nodes)  # it needs the number of heads
    for n in (3, 0, 50):
        args = random(SEQ + n % 4, HEADS + n, DIM), torch.tensor(n)
        assert_near(run(session, args)[0], function(*args))


@pytest.mark.parametrize("over_heads, opset", [(False, 18), (False, 23), (True, 22), (True, None)])
def test_a_norm_and_a_rotation(over_heads, opset):
    weights = [torch.rand(*([n] if over_heads else []), DIM) + 0.5 for n in (HEADS, KV_HEADS)]
    single, half, double = torch.float32, torch.float16, torch.float64
    norms = [{"norm_eps": 0.3}, {"interleaved": True, "rotary_start": 3, "attention_factor": 1.3}]
    dtypes = [(single, single), (half, single), (torch.bfloat16, single), (half, half)]
    calls = [(*pair, flags) for pair in dtypes for flags in norms]
    calls += [(double, double, flags) for flags in norms]

    def function(q, k):
        pairs = [
            rope.norm_rotate_qk(q.to(d), k.to(d), *(t.to(of_w) for t in weights), COS, SIN, offset=2, **flags)
            for d, of_w, flags in calls
        ]
        return wide(t for pair in pairs for t in pair)

    session, _ = export(function, qk(BATCH, SEQ), [DYNAMIC] * 2, opset=opset)
    args = qk(3, 9)
    for i, (actual, expected) in enumerate(zip(run(session, args), function(*args), strict=True)):
        assert_near(actual, expected, calls[i // 2][0])


@pytest.mark.parametrize("opset", [18, 20, 22, 23, 24, None])
def test_tables_and_positions_are_made_in_the_graph(opset, capfd):
    """An angle of float32 is off by 4e-3 at position 131,071. The node would refuse a table of 4 rows for 9 tokens."""
    axes = torch_rope.multimodal.sections(INV_FREQ, [1, 2, 1])  # [3, ROTARY_DIM / 2]
    packed, computed = torch_rope.RotaryEmbedding(DIM, max_position=4), torch_rope.RotaryEmbedding(DIM)

    def function(p, seconds, three, x, cu_seqlens):
        out = torch_rope.cos_sin(p, INV_FREQ) + torch_rope.cos_sin(seconds, INV_FREQ.float(), dtype=torch.float16)
        out += torch_rope.cos_sin(p, TWO_PARTS, attention_factor=1.3, dtype=torch.float64)
        out += torch_rope.axial_cos_sin(three, axes)
        out += torch_rope.axial_cos_sin(three, torch.stack([axes.float(), axes.float() * 0]))
        positions = torch_rope.positions_from_cu_seqlens(cu_seqlens, x.shape[1])
        rotated = rope.rotate(x, inv_freq=INV_FREQ, positions=p), *packed(x, x, positions), *computed(x, x)
        return *rotated, *out, positions

    def arguments(batch, seq, *cu_seqlens):
        p, three = torch.randint(2**24, (batch, seq)), torch.randint(99, (3, seq, batch))
        return p, torch.rand(seq) * 99, three, qk(batch, seq)[0], torch.tensor(cu_seqlens)

    dynamic = [DYNAMIC, {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC, 2: Dim.DYNAMIC}, DYNAMIC, {0: Dim.DYNAMIC}]
    session, nodes = export(function, arguments(2, 5, 0, 2, 5), dynamic, opset=opset)
    assert "infer the signature" not in capfd.readouterr().err  # a warning of torch
    assert len(rotations(nodes)) == (5 if opset in (23, 24) else 0)
    args = arguments(3, 9, 0, 2, 2, 6, 8)  # the last token is padding
    for actual, expected in zip(run(session, args), function(*args), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3 if actual.dtype == torch.float16 else 3e-6)


@pytest.mark.parametrize("opset", [20, 23])
def test_operators_in_place_become_functional(opset):
    """The program rotates a whole tensor, and slices of a packed one through views, and fills a cache with pads."""

    def function(x, cache):
        packed, whole = x.flatten(2) * 1, x * 2
        q, k, v = packed.unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, 1], 2)
        rope.rotate_qk_(q.transpose(0, 1).transpose(0, 1), k, COS, SIN, interleaved=True)
        rope.rotate_(whole, cos=COS, sin=SIN, offset=3)
        slots = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) - 2
        rope.rotate_into_cache_(q * 1, k, k, *cache, COS, SIN, slots=slots)
        return packed, v, whole, cache

    def arguments(batch, seq):
        return random(batch, seq, HEADS + KV_HEADS + 1, DIM), random(2, 3, 16, KV_HEADS, DIM)

    program = torch.export.export(Model(function), arguments(BATCH, SEQ), dynamic_shapes=((DYNAMIC, None),))
    session, nodes = export(functional(program), opset=opset)
    assert len(rotations(nodes)) == (3 if opset == 23 else 0)
    args = arguments(3, 9)
    for actual, expected in zip(run(session, args), function(*args), strict=True):
        assert_near(actual, expected)


def test_a_cache_in_a_buffer_is_refused():
    """torch.onnx.export would leave out what the program writes there."""
    model = Model(lambda q, k: rope.rotate_into_cache_(q, k, k, model.cache, model.cache * 1, COS, SIN))
    model.register_buffer("cache", random(BATCH, ROWS, KV_HEADS, DIM))
    with pytest.raises(NotImplementedError, match="the cache is a buffer, cache, but must be an argument and a result"):
        functional(torch.export.export(model, qk(BATCH, SEQ)))
