"""Tests torch_rope.rotary_embedding, the function that PyTorch's pull request 187286 proposes.

The results are compared with the formula in float64, written here with the broadcasting of PyTorch.
"""

import pytest
import torch
from cases import Calls, covering, name_of, need
from oracle import assert_close, limits

import torch_rope
from torch_rope import reference

pytestmark = pytest.mark.shared

BATCH, HEADS, SEQ, HEAD_DIM, ROWS = 2, 3, 5, 8, 11
PAIRS = HEAD_DIM // 2
# The shapes of cos and sin, or the dtype and shape of position_ids. No two of batch, heads and seq are equal.
SHAPES = [
    *((SEQ, PAIRS), (1, PAIRS), (PAIRS,), (HEADS, SEQ, PAIRS), (1, SEQ, PAIRS), (HEADS, 1, PAIRS)),
    *((1, 1, SEQ, PAIRS), (BATCH, 1, SEQ, PAIRS), (1, HEADS, SEQ, PAIRS), (BATCH, HEADS, SEQ, PAIRS)),
    *((BATCH, 1, 1, PAIRS), (BATCH, HEADS, 1, PAIRS), (BATCH, 1, SEQ, 1)),
    *((torch.int32, (BATCH, SEQ)), (torch.int64, (1, SEQ)), (torch.int32, (SEQ,)), (torch.int64, (BATCH, SEQ))),
]
KINDS = {"dtype": [torch.float32, torch.bfloat16, torch.float64], "interleaved": [False, True]}


def formula(x, cos, sin, position_ids=None, interleaved=False):
    """Returns the rotated x, and the magnitude of each element's pair, in float64."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    if position_ids is not None:
        cos, sin = (t[position_ids.expand(len(x), -1)][:, None] for t in (cos, sin))
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pairs = [(a * cos - b * sin, b * cos + a * sin), (a.hypot(b),) * 2]
    return [torch.stack(p, -1).flatten(-2) if interleaved else torch.cat(p, -1) for p in pairs]


def tables(*shape, dtype=torch.float32, device="cpu"):
    angle = torch.rand(shape, dtype=torch.float64) * 7
    return [t.to(dtype).to(device) for t in (angle.cos(), angle.sin())]


def random(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


def angles_of(shape, dtype=torch.float32, device="cpu"):
    """Returns cos, sin and position_ids. shape: that of cos and sin, or (dtype, shape) of position_ids."""
    if not isinstance(shape[0], torch.dtype):
        return *tables(*shape, dtype=torch.promote_types(dtype, torch.float32), device=device), None
    position_ids = torch.randint(ROWS, shape[1], dtype=shape[0], device=device)
    return *tables(ROWS, PAIRS, dtype=dtype, device=device), position_ids


@pytest.mark.parametrize("case", covering({"shape": SHAPES} | KINDS, strength=1), ids=name_of)
def test_tables_broadcast_and_positions_choose_rows(case, device):
    """The memory of the result is written once: the tables are read through their strides."""
    shape, dtype, interleaved = case.values()
    need(device, dtype)
    x = random(BATCH, SEQ, HEADS, HEAD_DIM, dtype=dtype, device=device).transpose(1, 2)
    cos, sin, position_ids = angles_of(shape, dtype, device)
    sins = [sin, *([tables(SEQ, 1, dtype=sin.dtype, device=device)[1]] if position_ids is None else [])]
    for sin in sins:  # the second has another shape than cos
        given = [t if t is None else t.cpu() for t in (x, cos, sin, position_ids)]
        right = [t.numpy() for t in formula(*given, interleaved)]
        with Calls() as calls:
            out = torch_rope.rotary_embedding(x, cos, sin, position_ids, interleaved=interleaved)
        assert calls.names.count("rope::rotate") == 1
        assert not {"aten::clone", "aten::copy_", "aten::index.Tensor", "aten::cat"} & set(calls.names)
        assert out.shape == x.shape and out.dtype == x.dtype and out.stride() == torch.empty_like(x).stride()
        for result in (out, reference.rotary_embedding(*given, interleaved=interleaved)):
            assert_close(result, right, *limits(x.dtype, {}))


@pytest.mark.parametrize("shape", [(HEADS, 1, PAIRS), (torch.int64, (BATCH, SEQ))], ids=str)
def test_gradients_flow_to_x_and_the_tables(shape):
    cos, sin, position_ids = angles_of(shape, torch.float64)
    given = [t.requires_grad_() for t in (random(BATCH, HEADS, SEQ, HEAD_DIM, dtype=torch.float64), cos, sin)]
    rotated = lambda x, c, s: torch_rope.rotary_embedding(x, c, s, position_ids)  # noqa: E731
    assert torch.autograd.gradcheck(rotated, given, fast_mode=True)


def test_it_compiles_without_a_graph_break(device):
    compiled = torch.compile(torch_rope.rotary_embedding, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq in (SEQ, SEQ + 2):
        x, position_ids = random(BATCH, HEADS, seq, HEAD_DIM, device=device), torch.arange(seq, device=device)
        by_position, by_head = tables(ROWS, PAIRS, device=device), tables(1, HEADS, seq, PAIRS, device=device)
        for given in (x, *by_position, position_ids), (x, *by_head):
            assert torch.equal(compiled(*given), torch_rope.rotary_embedding(*given))


@pytest.mark.cpu
def test_a_position_outside_the_table_is_an_error():
    with pytest.raises(IndexError, match="11"):
        torch_rope.rotary_embedding(random(1, 2, SEQ, HEAD_DIM), *tables(ROWS, PAIRS), torch.arange(SEQ) + 7)
