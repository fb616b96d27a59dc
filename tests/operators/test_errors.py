"""Tests of every error that the operators document: its type and its message, for real tensors, for fake tensors and
under torch.compile. A call that raises an error writes nothing. Errors of overlapping memory: see test_overlap.py.

All messages have one form: `rope.rotate: x is int64 but must be float16, bfloat16, float32 or float64`.
"""

import re

import pytest
import torch
from cases import OPERATORS, checks_ranges, schema_of
from table_of_errors import OWN, B, D, H, R, S, arguments, calls, table
from test_autograd import call_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_rope

rope = torch.ops.rope
pytestmark = pytest.mark.heart

CASES = table("""
[all: ValueError]
q=ones(S, D) -> {q} has shape [6, 16] but must have shape [seq, heads, head_dim] or [batch, seq, heads, head_dim];
    if the head axis is missing, pass {q}.unsqueeze(-2)
q=ones(1, B, S, H, D) -> {q} has shape [1, 2, 6, 3, 16] but must have shape [seq
q=None -> {q} is None but must be a tensor
cos=None, sin=None -> cos, sin and inv_freq are None but must not all be None; pass one angle source: cos and sin, or
    inv_freq
inv_freq=ones(4) -> inv_freq is given but must be None, because cos and sin are given; pass one angle source: cos and
    sin, or inv_freq
sin=None -> sin is None but must be given together with cos; pass one angle source: cos and sin, or inv_freq
cos=None, inv_freq=ones(4) -> cos is None but must be given together with sin; pass one angle source
cos=ones(20, 32), sin=ones(20, 32) -> cos has 32 columns but must have at most 8, because {q} has head_dim 16:
    rotary_dim 64 is larger than head_dim
cos=ones(4), sin=ones(4) -> cos has shape [4] but must have shape [max_position, rotary_dim / 2],
    [batch or 1, seq, rotary_dim / 2] or [batch or 1, seq, heads, rotary_dim / 2]
**both(1, B, S, 1, 4) -> cos has shape [1, 2, 6, 1, 4] but must have shape [max_position
sin=ones(20, 3) -> sin has shape [20, 3] but must have shape [20, 4], the shape of cos
sin=ones(19, 4) -> sin has shape [19, 4] but must have shape [20, 4], the shape of cos
sin=ones(1, 20, 4) -> sin has shape [1, 20, 4] but must have shape [20, 4], the shape of cos
cos=ones(B, S, 4), sin=ones(B, S) -> sin has shape [2, 6] but must have shape [2, 6, 4], the shape of cos
**both(1, 5, 4) -> cos has 5 rows per sequence but must have 6, the seq of {q}: such a table has a row per token
**both(3, S, 4) -> cos has batch 3 but must have batch 2, as {q} has, or batch 1
**both(1, S, 4), positions=ints(S) -> positions is given but must be None, because cos has shape [1, 6, 4]: such a table
    has a row per token; pass a 2-D table to select rows by position
**both(1, S, 4), offset=3 -> offset is 3 but must be 0, because cos has shape [1, 6, 4]: such a table has a row per
    token; pass a 2-D table to select rows by position
**both(1, S, 4), offset=2**62 -> offset is 4611686018427387904 but must be 0
**both(1, S, 4), offset=-(2**63) -> offset is -9223372036854775808 but must be 0
**both(B, S, 2, 4) -> cos has 2 heads but must have 3, as {q} has: a 4-D table has a row per token and head
**both(3, S, 3, 4) -> cos has batch 3 but must have batch 2, as {q} has, or batch 1
**both(1, S, 3, 4), positions=ints(S) -> positions is given but must be None, because cos has
rotary_start=-1 -> rotary_start is -1 but must be at least 0
rotary_start=9 -> rotary_start is 9 but must be at most 8, because {q} has head_dim 16 and 8 channels are rotated
rotary_start=2**63 - 1 -> rotary_start is 9223372036854775807 but must be at most 8
**freq(1, 4) -> inv_freq has shape [1, 4] but must have shape [rotary_dim / 2] or [2, rotary_dim / 2]
**freq(9) -> inv_freq has 9 frequencies but must have at most 8, because {q} has head_dim 16: rotary_dim 18 is larger than
    head_dim
positions=ints(1, 1, S) -> positions has shape [1, 1, 6] but must have shape [seq], [1, seq] or [batch, seq]
positions=ints() -> positions has shape [] but must have shape [seq], [1, seq] or [batch, seq]
positions=ints(5) -> positions has shape [5] but must have shape [seq], [1, seq] or [batch, seq] with seq 6, as {q} has
positions=ints(3, S) -> positions has batch 3 but must have batch 2, as {q} has, or batch 1

[all: TypeError]
q=ints(B, S, H, D) -> {q} is int64 but must be float16, bfloat16, float32 or float64
q=ones(B, S, H, D).cfloat() -> {q} is complex64 but must be float16
sin=sin.bfloat16() -> sin is bfloat16 but must be float32, the dtype of cos
cos=cos.half(), sin=sin.half() -> cos and sin are float16 but must be float32, the dtype of {q}
cos=cos.double(), sin=sin.double() -> cos and sin are float64 but must be float32, the dtype of {q}
**freq(2, 4, dtype=torch.float64) -> inv_freq has shape [2, 4] and is float64 but must be float32, because it is the sum
    of two parts
**freq(4, dtype=torch.half) -> inv_freq is float16 but must be float32 or float64
positions=ones(S) -> positions is float32 but must be int32 or int64
positions=ints(S).short() -> positions is int16 but must be int32 or int64

[qk: ValueError]
k=ones(S, 1, D) -> k has 3 dimensions but must have 4, as q has
k=ones(1, S, 1, D) -> k has batch 1 but must have batch 2, as q has; only the heads may differ
k=ones(B, 5, 1, D) -> k has seq 5 but must have seq 6, as q has; only the heads may differ
k=ones(B, S, 1, 12) -> k has head_dim 12 but must have head_dim 16, as q has; only the heads may differ
**both(B, S, 3, 4) -> cos has 3 heads but must have 1, as k has: a 4-D table has a row per token and head

[qk: TypeError]
k=k.bfloat16() -> k is bfloat16 but must be float32, the dtype of q
k=k.int() -> k is int32 but must be float16

[norm: ValueError]
q_norm_weight=ones(1, 1, D) -> q_norm_weight has shape [1, 1, 16] but must have shape [head_dim], to normalise each head,
    or [heads, head_dim], to normalise all heads of a token together
q_norm_weight=ones(1, D) -> q_norm_weight has 1 heads but must have 3, as q has: a 2-D weight has a row for each head
q_norm_weight=ones(H, D), k_norm_weight=ones(H, D) -> k_norm_weight has 3 heads but must have 1, as k has: a 2-D weight
q_norm_weight=ones(H, R) -> q_norm_weight has shape [3, 8] but must have shape [heads, head_dim] with head_dim 16, as q
q_norm_weight=ones(H, D) -> k_norm_weight has shape [16] but must have shape [heads, head_dim], as q_norm_weight has
k_norm_weight=ones(1, D) -> k_norm_weight has shape [1, 16] but must have shape [head_dim], as q_norm_weight has
k_norm_weight=ones() -> k_norm_weight has shape [] but must have shape [head_dim]
q_norm_weight=ones(1) -> q_norm_weight has shape [1] but must have shape [head_dim] with head_dim 16, as q has
k_norm_weight=ones(R) -> k_norm_weight has shape [8] but must have shape [head_dim] with head_dim 16, as q has

[norm: TypeError]
q_norm_weight=ones(D).bfloat16() -> q_norm_weight is bfloat16 but must be float32, the dtype of q
k_norm_weight=ones(D).double() -> k_norm_weight is float64 but must be float32, the dtype of q

[cache: ValueError]
k_norm_weight=None -> k_norm_weight is None but must be given together with q_norm_weight; pass both, or neither
q_norm_weight=None -> q_norm_weight is None but must be given together with k_norm_weight; pass both, or neither
v=ones(S, D) -> v has shape [6, 16] but must have shape [seq, heads, head_dim] or
v=ones(S, 1, D) -> v has 3 dimensions but must have 4, as q has
v=ones(1, S, 1, D) -> v has batch 1 but must have batch 2, as q has; only the heads and head_dim may differ
v=ones(B, 5, 1, D) -> v has seq 5 but must have seq 6, as q has; only the heads and
**int8, v_scale=ones(1) -> k_scale is None but must be given, because k_cache is int8
v_cache=ints(B, 20, 1, D).char().view(torch.float8_e5m2) -> v_scale is None but must be given, because v_cache is
    float8_e5m2
k_scale=ones(1) -> k_scale is given but must be None, because k_cache is float32, the dtype of k
k_cache=int8["k_cache"], **scales -> v_scale is given but must be None, because v_cache is float32, the dtype of v
**int8 | scales | dict(v_scale=ones(2)) -> v_scale has shape [2] but must have one element, or shape [heads] with 1
    heads, as v_cache has
**int8 | scales | three_heads | dict(k_scale=ones(0)) -> k_scale has shape [0] but must have one element, or shape
    [heads] with 3 heads, as k_cache has
**int8 | scales | three_heads | dict(k_scale=ones(1, H)) -> k_scale has shape [1, 3] but must have one element, or
k_cache=ones(20, D) -> k_cache has shape [20, 16] but must have shape [blocks, block_size, kv_heads, head_dim] or
    [max_seq, kv_heads, head_dim]
v_cache=ones(2, B, 20, 1, D) -> v_cache has shape [2, 2, 20, 1, 16] but must have shape [blocks
k_cache=ones(B, 1, 20, D) -> k_cache has 20 heads but must have 1, as k has; pass a head-major cache as
    k_cache.transpose(-3, -2)
v_cache=ones(B, 20, H, D) -> v_cache has 3 heads but must have 1, as v has; pass a head-major cache as v_cache.transpose
k_cache=ones(B, 20, 1, 12) -> k_cache has head_dim 12 but must have head_dim 16, as k has
v=ones(B, S, 1, 12) -> v_cache has head_dim 16 but must have head_dim 12, as v has
v_cache=ones(20, 1, D) -> v_cache has shape [20, 1, 16] but must have the blocks and block_size of k_cache, which has
    shape [2, 20, 1, 16]
v_cache=ones(B, 19, 1, D) -> v_cache has shape [2, 19, 1, 16] but must have the blocks and block_size of k_cache
v_cache=ones(3, 20, 1, D) -> v_cache has shape [3, 20, 1, 16] but must have the blocks and block_size of k_cache
**both(B, S, 4) -> slots is None but must be given, because cos has shape [2, 6, 4]: such a table has a row per token
**both(B, S, 3, 4), k=ones(B, S, H, D), k_cache=ones(B, 20, H, D) -> slots is None but must be given, because cos has
k_cache=ones(1, 20, 1, D), v_cache=ones(1, 20, 1, D) -> k_cache has shape [1, 20, 1, 16] but must have at least 2 blocks,
    the batch of q: without slots, sequence b is written to block b
k_cache=ones(20, 1, D), v_cache=ones(20, 1, D) -> k_cache has shape [20, 1, 16] but must have at least 2 blocks
slots=ints() -> slots has shape [] but must have shape [seq] or [batch, seq]
slots=ints(1, B, S) -> slots has shape [1, 2, 6] but must have shape [seq] or [batch, seq]
slots=ints(B, 5) -> slots has shape [2, 5] but must have shape [seq] or [batch, seq] with seq 6, as q has
slots=ints(S) -> slots has shape [6] but must have shape [batch, seq] with batch 2, as q has: each token needs its own
slots=ints(1, S) -> slots has shape [1, 6] but must have shape [batch, seq] with batch 2, as q has: each token needs
slots=ints(3, S) -> slots has shape [3, 6] but must have shape [batch, seq] with batch 2, as q has: each token needs its
    own slot

[cache: TypeError]
v=v.bfloat16() -> v is bfloat16 but must be float32, the dtype of q
k_cache=k_cache.bfloat16() -> k_cache is bfloat16 but must be float32, the dtype of k
v_cache=v_cache.byte() -> v_cache is uint8 but must be float32, the dtype of v, or float8_e4m3fn, float8_e5m2 or int8
**int8 | scales | dict(k_scale=ones(1).bfloat16()) -> k_scale is bfloat16 but must be float32
**int8 | scales | dict(v_scale=ones(1).double()) -> v_scale is float64 but must be float32
slots=ones(B, S) -> slots is float32 but must be int32 or int64
slots=ints(B, S).short() -> slots is int16 but must be int32 or int64
""")
# Errors that depend on the values of positions and slots, which only the kernel reads. Without slots, a position is also
# the index of a cell in a block. The position of a token with a negative slot is no error, and is not in the message.
RANGES = table("""
[all: IndexError]
offset=15 -> positions go from 0 to 5 with offset 15 but position + offset must be at least 0 and below 20, the number of
    rows of cos
offset=-1 -> positions go from 0 to 5 with offset -1 but ... below 20, the number of rows of cos
positions=values([0, 3, -1, 7, 2, 2]) -> positions go from -1 to 7 with offset 0 but ... below 20, the number of rows
positions=values([[0] * 6, [1, 2, 3, 4, 5, 20]]).int() -> positions go from 0 to 20 with offset 0 but ... rows of cos
offset=1, positions=values([0, 0, 0, 0, 0, 2**63 - 1]) -> positions go from 0 to 9223372036854775807 with offset 1 but
offset=2**63 - 1 -> positions go from 0 to 5 with offset 9223372036854775807 but ... the number of rows of cos

[cache: IndexError]
**freq(4), offset=15 -> positions go from 0 to 5 with offset 15 but position + offset must be at least 0 and below 20,
    the block_size (or max_seq) of k_cache
**freq(4), positions=values([0, 1, 2, -1, 3, 3]) -> positions go from -1 to 3 with offset 0 but ... below 20, the block_s
**freq(4), offset=2**63 - 5 -> positions go from 0 to 5 with offset 9223372036854775803 but ... the block_size (or max
k_cache=ones(B, 12, 1, D), v_cache=ones(B, 12, 1, D), offset=7 -> positions go from 0 to 5 with offset 7 but ... below 12,
    the block_size (or max_seq) of k_cache
slots=values([[0, 1, 2, 3, 4, 5], [-1, -1, 40, 8, 9, 10]]) -> slots go up to 40 but must be below 40, the number of cells
    of each cache (blocks * block_size = 2 * 20)
slots=values([[2**62, 1, 2, 3, 4, 5], [-(2**63), -1, 7, 8, 9, 10]]) -> slots go up to 4611686018427387904 but must be
    below 40
q=q[0], k=k[0], v=v[0], k_cache=k_cache[0], v_cache=v_cache[0], slots=values([0, 1, 20, -1, 4, 5]).int() -> slots go up to
    20 but must be below 20, the number of cells of each cache (blocks * block_size = 1 * 20)
positions=values([[-1, 2, 20, 30, 4, 5], [0, 1, 2, 3, 2**62, 5]]), slots=values([[-1, 0, 1, -2, 3, 4],
    [-1, 8, 9, 10, -1, 12]]) -> positions go from 1 to 20 with offset 0 but ... below 20, the number of rows of cos
offset=16, slots=values([[-1, 0, 1, -1, -1, -1], [-1, -1, -1, -1, 9, -1]]) -> positions go from 1 to 4 with offset 16 but
""")


@pytest.mark.parametrize("case", RANGES)
def test_a_position_or_slot_out_of_range_is_an_error_and_nothing_is_written(case, device):
    for op, a, message in calls(case, device):
        if {"positions", "slots"} & a.keys() and not checks_ranges(device):
            pytest.skip("on a GPU the kernel checks the values in a tensor, and raises no exception here")
        assert_raises(op, a, IndexError, message)


def assert_raises(op, a, error, message):
    """Asserts that the call op(**a) raises this error and leaves its arguments as they are.

    With fake tensors it raises the same error, unless it is an IndexError.
    """
    before = {name: (t.clone(), t._version) for name, t in a.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(error, match=message) as raised:
        op(**a)
    assert type(raised.value) is error
    # All messages have this form. An IndexError of positions is about their sum with the offset.
    assert re.match(r"rope\._?[a-z]\w+: \w.* but (position \+ offset )?must ", str(raised.value))
    assert all(torch.equal(a[name], t) and a[name]._version == version for name, (t, version) in before.items())
    if error is not IndexError:
        mode = FakeTensorMode()  # its tensors share a storage if the real ones do
        with mode, pytest.raises(error, match=message):
            op(**{name: mode.from_tensor(t) if name in before else t for name, t in a.items()})


@pytest.mark.shared
@pytest.mark.parametrize("case", CASES)
def test_a_bad_call_raises_the_error_for_real_and_for_fake_tensors_and_writes_nothing(case, device):
    for op, a, message in calls(case, device):
        assert_raises(op, a, case.error, message)


# Dynamo treats shapes and dtypes in the same way in every case, and each costs a compilation.
@pytest.mark.shared
@pytest.mark.parametrize("case", CASES[::12] + RANGES[:6:5])
def test_a_bad_call_under_torch_compile_raises_the_same_message(case, device):
    """Dynamo wraps the exception that the fake implementation raises. The kernel raises the IndexErrors."""
    op, a, message = list(calls(case, device))[-1]
    torch._dynamo.reset()
    with pytest.raises(IndexError if case.error is IndexError else torch._dynamo.exc.TorchRuntimeError, match=message):
        torch.compile(lambda a: op(**a), fullgraph=True, backend="aot_eager")(a)


# ---- other operators ----

BACKWARDS = """
[{op}: TypeError]
q=q.bfloat16() -> q is bfloat16 but must be float32, the dtype of q_out_grad
[{op}: ValueError]
q=ones(S, H, D) -> q has shape [6, 3, 16] but must have shape [2, 6, 3, 16], the shape of q_out_grad
k=ones(B, S, 2, D) -> k has shape [2, 6, 2, 16] but must have shape [2, 6, 1, 16], the shape of k_out_grad
cos=None, sin=None -> cos, sin and inv_freq are None but must not all be None
"""
OTHERS = table(
    BACKWARDS.replace("{op}", "_norm_rotate_qk_backward")
    + """
k_norm_weight=ones(R) -> k_norm_weight has shape [8] but must have shape [head_dim]
"""
    + BACKWARDS.replace("{op}", "_rotate_table_backward")
    + """
**freq(4) -> inv_freq is given but must be None, because this operator computes the gradients of cos and sin
k=None -> k is None but must be given together with k_out_grad
k_out_grad=None -> k_out_grad is None but must be given together with k

[cos_sin: TypeError]
positions=ints(3).to(torch.uint16) -> positions is uint16 but must be int8, uint8, int16, int32, int64, float16, bfloat16,
    float32 or float64
positions=ints(3).bool() -> positions is bool but must be int8
positions=ints(3).cfloat() -> positions is complex64 but must be int8
inv_freq=ones(4).half() -> inv_freq is float16 but must be float32 or float64
inv_freq=ints(4) -> inv_freq is int64 but must be float32 or float64
dtype=torch.int64 -> dtype is int64 but must be float16, bfloat16, float32 or float64
[cos_sin: ValueError]
inv_freq=ones(3, 4) -> inv_freq has shape [3, 4] but must have shape [rotary_dim
[axial_cos_sin: ValueError]
positions=values(3) -> positions has shape [] but must have shape [axes, ...]
positions=ints(3, 5) -> positions has 3 axes but must have 2, as inv_freq has
"""
)


@pytest.mark.shared
@pytest.mark.parametrize("case", OTHERS)
def test_the_operators_for_tables_and_for_gradients_raise_errors(case, device):
    for op, a, message in calls(case, device):
        assert_raises(op, a, case.error, message)


@pytest.mark.shared
@pytest.mark.parametrize("op", [op for op in OWN if len(OWN[op]) > 1])
def test_a_tensor_on_another_device_is_an_error(op, device):
    """All tensors must be on the device of x. The other device is meta, which every machine has."""
    a = arguments(op, device) | {"positions": torch.arange(S, device=device)}
    freq = {"cos": None, "sin": None, "inv_freq": torch_rope.inv_freq(R, device=device)}
    changed = dict.fromkeys([*a][1:], {}) | {"inv_freq": freq}
    if "cache" in op:
        quantised = {n: a[n].to(torch.int8) for n in ("k_cache", "v_cache")}
        quantised |= {n: torch.ones(1, device=device) for n in ("k_scale", "v_scale")}
        changed |= {"slots": {"slots": torch.arange(B * S, device=device).view(B, S)}}
        changed |= {"k_scale": quantised, "v_scale": quantised}
    here = re.escape(str(a["q"].device))
    for name, changes in changed.items():
        call = a | changes
        call[name] = call[name].to("meta")
        with pytest.raises(ValueError, match=rf"rope.{op}: {name} is on meta but must be on {here}, the device of q"):
            getattr(rope, op)(**call)


@pytest.mark.shared
def test_a_message_shows_symbolic_sizes():
    rotate_qk = make_fx(lambda q, k: rope.rotate_qk(q, k, inv_freq=torch.ones(R // 2)), tracing_mode="symbolic")
    with pytest.raises(
        ValueError, match="rope.rotate_qk: k has seq s.* but must have seq s.*, as q has; only the heads"
    ):
        rotate_qk(torch.ones(B, S, H, D), torch.ones(B, S + 1, H, D))
    rotate = make_fx(lambda x, freq: rope.rotate(x, inv_freq=freq), tracing_mode="symbolic")
    with pytest.raises(
        ValueError, match="inv_freq has s.* but must have at most .*s.*, because x has head_dim s.*: rotary"
    ):
        rotate(torch.ones(S, H, D), torch.ones(D))


def needed_tensors(op):
    """Returns the names of the arguments that must be tensors."""
    return [a.name for a in schema_of(op).arguments if not a.has_default_value() and a.type.kind() == "TensorType"]


@pytest.mark.shared
@pytest.mark.parametrize("op", OPERATORS)
def test_none_instead_of_a_tensor_is_an_error(op, device):
    """From Python, None passes for an argument that the schema declares as Tensor, so the operator must check it."""
    names, good = needed_tensors(op), call_of(op, device)
    with pytest.raises(ValueError, match=f"rope.{op}: {names[0]} is None but must be a tensor"):
        getattr(rope, op)(**dict.fromkeys(a.name for a in schema_of(op).arguments if not a.has_default_value()))
    for name in names if not op.startswith("_") else []:
        with pytest.raises(ValueError, match=f"rope.{op}: {name} is None but must be a tensor"):
            getattr(rope, op)(**good | {name: None})


class OnXpu(torch.Tensor):
    """A tensor on a device for which there are no kernels."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device="xpu")

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return op(*args, **kwargs)


NESTED = (
    " is a nested tensor but must be a plain tensor; pass the values of a nested tensor with layout=torch.jagged, and "
    "positions that torch_rope.positions_from_cu_seqlens makes of its offsets"
)
REFUSED = {  # how to make the tensor -> the end of the message
    "jagged": (lambda t: torch.nested.nested_tensor([*t], layout=torch.jagged), NESTED),
    "nested": (lambda t: torch.nested.nested_tensor([*t], layout=torch.strided), NESTED),
    "sparse": (torch.Tensor.to_sparse, " is a torch.sparse.FloatTensor but must be dense and not quantized"),
    "quantized": (
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        " is a QuantizedCPUQInt8Type but must be dense and not quantized",
    ),
    "xpu": (OnXpu, " is on xpu but must be on a device for which this build of torch_rope has kernels"),
}


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*(nested|quantiz)")
@pytest.mark.parametrize("op", OPERATORS)
def test_tensors_that_no_back_end_takes_are_refused_by_name(op):
    """The last tensor is of this kind and all others are plain. Without autograd, the error is the same."""
    names = needed_tensors(op)
    for make, message in REFUSED.values():
        given = {a.name: None for a in schema_of(op).arguments if not a.has_default_value()}
        given |= {name: torch.ones(2, 3, 1, 4) for name in names}
        given[names[-1]] = make(given[names[-1]])
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context(), pytest.raises(NotImplementedError, match=re.escape(f"rope.{op}: {names[-1]}{message}")):
                getattr(rope, op)(**given)


@pytest.mark.shared
@pytest.mark.parametrize("op", OWN)
def test_an_argument_that_is_no_int64_is_an_error(op):
    function = getattr(torch_rope, op.removesuffix("_") if "cache" in op else op)
    a = arguments(op)
    own = [a.pop(name) for name in OWN[op][:5]]
    for name in ("offset", "rotary_start"):
        for n in (2**63, -(2**63) - 1):
            with pytest.raises(
                ValueError, match=f"rope.{op}: {name} is {n} but must be at least -2..63 and below 2..63"
            ):
                function(*own, **a | {name: n})
