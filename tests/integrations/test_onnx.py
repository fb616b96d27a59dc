"""Tests the export to ONNX: onnxruntime runs the exported model, with other sizes than it was exported with, and the
results are those of torch_rope."""

import numpy as np
import pytest
import torch
from cases import EXHAUSTIVE, needed
from torch.export import Dim

import torch_rope
from torch_rope import reference

needed("onnxscript")
ort = needed("onnxruntime")
from torch_rope.integrations.onnx import TRANSLATIONS, functional  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:.isinstance.treespec")]
rope = torch.ops.rope
BATCH, SEQ, HEADS, KV_HEADS, DIM, ROTARY_DIM, ROWS = 2, 5, 4, 3, 16, 8, 64
DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
INV_FREQ = torch_rope.inv_freq(ROTARY_DIM)
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


def export(function, args=(), dynamic_shapes=None, *, optimize=False):
    """Exports a function, or a program of torch.export. Returns a session of onnxruntime, and the nodes of the model.

    optimize: whether torch simplifies the model, which takes as long as all the rest.
    """
    program = isinstance(function, torch.export.ExportedProgram)
    model = function if program else Model(function).eval()
    shapes = dynamic_shapes if dynamic_shapes is None else (tuple(dynamic_shapes),)
    proto = torch.onnx.export(
        model, tuple(args), dynamo=True, opset_version=23, custom_translation_table=TRANSLATIONS, dynamic_shapes=shapes,
        optimize=optimize, verbose=False,
    ).model_proto  # fmt: skip
    assert [i.version for i in proto.opset_import if i.domain == ""] == [23]
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session, list(proto.graph.node)


def run(session, args):
    """Returns the outputs of the model, as tensors."""
    feeds = {i.name: np.asarray(a) for i, a in zip(session.get_inputs(), args, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


def of_type(nodes, op):
    return [{a.name: a.i for a in n.attribute} for n in nodes if n.op_type == op]


def assert_near(actual, expected, dtype):
    """Asserts that a result, converted to float32 or float64, is right: float16 and bfloat16 may round another way."""
    atol, rtol = {torch.float64: (1e-14, 1e-14), torch.float32: (3e-6, 0)}.get(dtype, (1e-6, torch.finfo(dtype).eps))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def random(*shape):
    return torch.randn(shape, dtype=torch.float64).float()


def by_token(*shape):
    """Returns cos and sin of random angles."""
    return torch_rope.cos_sin(torch.randint(ROWS, shape), INV_FREQ)


# For each source of the angles: what follows q and k, given batch and seq; which axes of it are dynamic; and the keyword
# arguments that the call makes of it.
SOURCES = {
    "table": (lambda b, s: [], [], lambda: {"cos": COS, "sin": SIN}),
    "table, offset": (lambda b, s: [], [], lambda: {"cos": COS, "sin": SIN, "offset": 7}),
    "table, positions": (
        lambda b, s: [torch.randint(3, ROWS, (b, s))],
        [DYNAMIC],
        lambda p: {"cos": COS, "sin": SIN, "positions": p, "offset": -3},
    ),
    "table, shared int32 positions": (
        lambda b, s: [torch.randint(ROWS, (s,), dtype=torch.int32)],
        [{0: Dim.DYNAMIC}],
        lambda p: {"cos": COS, "sin": SIN, "positions": p},
    ),
    "token": (lambda b, s: by_token(b, s), [DYNAMIC] * 2, lambda c, s: {"cos": c, "sin": s}),
    "token, shared": (lambda b, s: by_token(1, s), [{1: Dim.DYNAMIC}] * 2, lambda c, s: {"cos": c, "sin": s}),
    "head": (lambda b, s: by_token(b, s, HEADS), [DYNAMIC] * 2, lambda c, s: {"cos": c, "sin": s}),
    "inv_freq": (lambda b, s: [], [], lambda: {"inv_freq": INV_FREQ, "offset": 11}),
    "inv_freq, positions": (
        lambda b, s: [torch.randint(-9, 99, (b, s))],
        [DYNAMIC],
        lambda p: {"inv_freq": INV_FREQ.float(), "positions": p, "offset": 2},
    ),
    "inv_freq in two parts": (
        lambda b, s: [torch.randint(99, (1, s))],
        [{1: Dim.DYNAMIC}],
        lambda p: {"inv_freq": torch.stack([INV_FREQ.float(), (INV_FREQ - INV_FREQ.float()).float()]), "positions": p},
    ),
}
DTYPES = {"table": torch.float16, "head": torch.bfloat16, "token": torch.bfloat16, "inv_freq": torch.float64}


def dtypes_of(source):
    return list(dict.fromkeys([torch.float32, DTYPES.get(source, torch.float32)]))


def flags_of(source):
    return FLAGS if EXHAUSTIVE else FLAGS[list(SOURCES).index(source) % 3 :: 3]


def rotate_by(source, q, k, given):
    """Returns the results of all calls for a source of the angles, in float32 or float64: numpy has no bfloat16."""
    angles, out = SOURCES[source][2](*given), []
    for dtype in dtypes_of(source):
        x, y = q.to(dtype), k.to(dtype)
        rotated = [t for f in flags_of(source) for t in rope.rotate_qk(x, y, **angles, **f)]
        out += [t.to(torch.promote_types(dtype, torch.float32)) for t in [*rotated, rope.rotate(y, **angles)]]
    return out


one_process = pytest.mark.xdist_group("onnx")  # which exports the model


@pytest.fixture(scope="module")
def rotated():
    """The nodes of one model with all sources, and for each source pairs of a result of onnxruntime and one of torch_rope,
    for several sizes. An export takes seconds, however small the model is."""

    def arguments(batch, seq):
        x = [random(batch, seq, heads, DIM) for heads in (HEADS, KV_HEADS, HEADS)]
        return *x, *(t for make, *_ in SOURCES.values() for t in make(batch, seq))

    def function(q, k, k_of_heads, *given):
        given, out = iter(given), []
        for source, (_, axes, _) in SOURCES.items():
            of_source = [next(given) for _ in axes]
            out.append(rotate_by(source, q, k_of_heads if source == "head" else k, of_source))
        return out

    axes = [a for _, of_source, _ in SOURCES.values() for a in of_source]
    session, nodes = export(function, arguments(BATCH, SEQ), [DYNAMIC] * 3 + axes)
    pairs = {source: [] for source in SOURCES}
    for batch, seq in ((BATCH, SEQ), (3, 9), (1, 1)):
        args = arguments(batch, seq)
        actual = iter(run(session, args))
        for source, results in zip(SOURCES, function(*args), strict=True):
            pairs[source] += [(next(actual), t) for t in results]
        assert next(actual, None) is None
    return nodes, pairs


@one_process
@pytest.mark.parametrize("source", SOURCES)
def test_a_rotation_runs_in_onnxruntime(source, rotated):
    """Each source gets some of the flags."""
    pairs = rotated[1][source]
    calls = 2 * len(flags_of(source)) + 1
    assert len(pairs) == 3 * calls * len(dtypes_of(source))
    for i, (actual, expected) in enumerate(pairs):
        assert_near(actual, expected, dtypes_of(source)[i // calls % len(dtypes_of(source))])


@one_process
def test_every_rotation_becomes_a_node_but_for_angles_of_heads_and_float64(rotated):
    expected = 0
    for source in SOURCES:
        rotations = 2 * sum("eager_rounding" not in f for f in flags_of(source)) + 1
        expected += rotations * (source != "head") * len([d for d in dtypes_of(source) if d != torch.float64])
    assert len(of_type(rotated[0], "RotaryEmbedding")) == expected


def test_the_node_gets_the_pairing_and_the_number_of_rotated_channels():
    full = torch_rope.cos_sin(torch.arange(ROWS), torch_rope.inv_freq(DIM))

    def function(x):
        return rope.rotate(x, *full, interleaved=True), rope.rotate(x, COS, SIN)

    _, nodes = export(function, [random(BATCH, SEQ, HEADS, DIM)], [DYNAMIC], optimize=True)
    assert of_type(nodes, "RotaryEmbedding") == [
        {"num_heads": HEADS, "rotary_embedding_dim": 0, "interleaved": 1},
        {"num_heads": HEADS, "rotary_embedding_dim": ROTARY_DIM, "interleaved": 0},
    ]
    assert not of_type(nodes, "Cast") and not of_type(nodes, "Slice") and not of_type(nodes, "Transpose")


def test_the_node_gets_an_even_number_of_channels():
    """The specification of the node asks for it, though onnxruntime does not."""
    function = lambda x: [rope.rotate(x, COS, SIN, rotary_start=start) for start in (3, 4)]  # noqa: E731
    _, nodes = export(function, [random(BATCH, SEQ, HEADS, DIM)])
    # 0 means all channels that the node gets
    assert [n["rotary_embedding_dim"] for n in of_type(nodes, "RotaryEmbedding")] == [0, ROTARY_DIM]


def test_eager_rounding_keeps_the_bits():
    """With tables of float16 or bfloat16, a runtime may compute them in float32, as onnxruntime does on a CPU."""

    def function(x):
        flags = {"eager_rounding": True, "attention_factor": 1.3}
        out = [rope.rotate(t, COS, SIN, interleaved=i, **flags) for i in (False, True) for t in (x, x.half())]
        out.append(rope.rotate(x.double(), COS, SIN, **flags))  # the tables are multiplied in float32
        return *out, rope.rotate(x.half(), COS.half(), SIN.half(), eager_rounding=True)

    x = random(BATCH, SEQ, HEADS, DIM)
    *actual, half = run(export(function, (x,))[0], (x,))
    *expected, expected_half = function(x)
    assert all(map(torch.equal, actual, expected))
    torch.testing.assert_close(half, expected_half, rtol=0, atol=0.004)


def test_a_packed_sequence_without_a_batch():
    positions = torch.tensor([0, 1, 2, 0, 1])

    def function(q, k, p):
        return *rope.rotate_qk(q, k, COS, SIN, positions=p), rope.rotate(q, COS, SIN, interleaved=True, rotary_start=3)

    args = random(SEQ, HEADS, DIM), random(SEQ, KV_HEADS, DIM), positions
    session, nodes = export(function, args, [{0: Dim.DYNAMIC}] * 3)
    assert len(of_type(nodes, "RotaryEmbedding")) == 3
    for n in (SEQ, 3):
        given = [t[:n] for t in args]
        for actual, expected in zip(run(session, given), function(*given), strict=True):
            assert_near(actual, expected, torch.float32)


def test_far_positions_are_right():
    """An angle that is computed in float32 is off by 4e-3 at position 131,071."""
    x, positions = random(1, 3, HEADS, DIM), torch.tensor([0, 131_071, 2**24 - 1])
    session, _ = export(lambda x, p: rope.rotate(x, inv_freq=INV_FREQ, positions=p), (x, positions))
    expected = reference.rotate(x.double(), inv_freq=INV_FREQ, positions=positions)
    assert (run(session, (x, positions))[0] - expected).abs().max() < 5e-6


def test_the_offset_may_be_data():
    x, offset = random(BATCH, SEQ, HEADS, DIM), torch.tensor(3)
    function = lambda x, t: rope.rotate(x, COS, SIN, offset=t.item())  # noqa: E731
    session, _ = export(function, (x, offset))
    for n in (3, 0, 50):
        assert_near(run(session, (x, torch.tensor(n)))[0], function(x, torch.tensor(n)), torch.float32)


def test_the_number_of_heads_may_be_dynamic():
    session, nodes = export(lambda x: rope.rotate(x, COS, SIN), [random(BATCH, SEQ, HEADS, DIM)], [{2: Dim.DYNAMIC}])
    x = random(BATCH, SEQ, HEADS + 3, DIM)
    assert not of_type(nodes, "RotaryEmbedding")
    assert_near(run(session, (x,))[0], rope.rotate(x, COS, SIN), torch.float32)


NORMS = [
    {"norm_eps": 0.3},
    {"interleaved": True, "rotary_start": 3, "attention_factor": 1.3},
    {"eager_rounding": True, "norm_eps": 0.3},
]


@pytest.mark.parametrize("over_heads", [False, True])
def test_a_norm_and_a_rotation(over_heads):
    shapes = [(*([n] if over_heads else []), DIM) for n in (HEADS, KV_HEADS)]
    weights = [torch.rand(shape) + 0.5 for shape in shapes]
    calls = [
        (dtype, torch.float32, flags) for dtype in (torch.float32, torch.float16, torch.bfloat16) for flags in NORMS
    ]
    calls += [(torch.float16, torch.float16, flags) for flags in NORMS]
    calls += [(torch.float64, torch.float64, flags) for flags in NORMS[:2]]
    calls = calls if EXHAUSTIVE else calls[over_heads::2]

    def function(q, k):
        out = []
        for dtype, of_weights, flags in calls:
            w = [t.to(of_weights) for t in weights]
            pair = rope.norm_rotate_qk(q.to(dtype), k.to(dtype), *w, COS, SIN, offset=2, **flags)
            out += [t.to(torch.promote_types(dtype, torch.float32)) for t in pair]
        return out

    session, _ = export(function, (random(BATCH, SEQ, HEADS, DIM), random(BATCH, SEQ, KV_HEADS, DIM)), [DYNAMIC] * 2)
    args = random(3, 9, HEADS, DIM), random(3, 9, KV_HEADS, DIM)
    for i, (actual, expected) in enumerate(zip(run(session, args), function(*args), strict=True)):
        dtype, of_weights, flags = calls[i // 2]
        if "eager_rounding" in flags and of_weights == torch.float16:  # onnxruntime rounds less often
            torch.testing.assert_close(actual, expected, rtol=0, atol=0.008)
        else:
            assert_near(actual, expected, dtype)


def test_tables_are_made_in_the_graph():
    two = torch.stack([INV_FREQ.float(), (INV_FREQ - INV_FREQ.float()).float()])
    axes = torch_rope.multimodal.sections(INV_FREQ, [1, 2, 1])  # [3, ROTARY_DIM / 2]

    def function(p, seconds, three):
        out = [*torch_rope.cos_sin(p, INV_FREQ), *torch_rope.cos_sin(p, two, attention_factor=1.3, dtype=torch.float64)]
        out += torch_rope.cos_sin(seconds, INV_FREQ.float(), dtype=torch.float16)
        out += torch_rope.axial_cos_sin(three, axes)
        return out + [*torch_rope.axial_cos_sin(three, torch.stack([axes.float(), axes.float() * 0]))]

    args = torch.randint(10**6, (2, 5)), torch.rand(4) * 99, torch.randint(99, (3, 2, 5))
    session, _ = export(function, args, [DYNAMIC, {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC, 2: Dim.DYNAMIC}])
    args = torch.randint(10**6, (3, 7)), torch.rand(6) * 99, torch.randint(99, (3, 4, 1))
    for actual, expected in zip(run(session, args), function(*args), strict=True):
        assert actual.dtype == expected.dtype
        tolerance = torch.finfo(torch.float16).eps if actual.dtype == torch.float16 else 1e-6
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_operators_in_place_become_functional():
    """The program rotates a whole tensor, and slices of a packed one through views."""

    def function(x):
        packed = x.flatten(2) * 1
        q, k, v = packed.unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, 1], 2)
        rope.rotate_qk_(q.transpose(0, 1).transpose(0, 1), k, COS, SIN, interleaved=True)
        whole = x * 2
        rope.rotate_(whole, cos=COS, sin=SIN, offset=3)
        return packed, v, whole

    x = random(BATCH, SEQ, HEADS + KV_HEADS + 1, DIM)
    program = torch.export.export(Model(function), (x,), dynamic_shapes=((DYNAMIC,),))
    session, nodes = export(functional(program))
    assert len(of_type(nodes, "RotaryEmbedding")) == 3
    x = random(3, 9, HEADS + KV_HEADS + 1, DIM)
    for actual, expected in zip(run(session, (x,)), function(x), strict=True):
        assert_near(actual, expected, torch.float32)


def test_a_cache_is_refused():
    def function(q, k, cache):
        rope.rotate_into_cache_(q, k, k, cache, cache * 1, COS, SIN)
        return q * 1

    args = random(BATCH, SEQ, HEADS, DIM), random(BATCH, SEQ, KV_HEADS, DIM), random(BATCH, ROWS, KV_HEADS, DIM)
    with pytest.raises(NotImplementedError, match="rope.rotate_into_cache_, which is not exported: call rotate_qk"):
        functional(torch.export.export(Model(function), args))
