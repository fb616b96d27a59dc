"""Tests torch_rope.multimodal, axial_cos_sin with its frequencies, positions_from_cu_seqlens and slots_of_window."""

import itertools

import pytest
import torch
from cases import Calls

import torch_rope
from torch_rope import multimodal

pytestmark = pytest.mark.core

PAIRS, FREQ = 64, torch.ones(8)
# name of the function -> (sections, the axis that pair j follows, the dtype of positions)
ORDERS = {
    "sections": ([16, 24, 24], lambda j: 0 if j < 16 else 1 if j < 40 else 2, torch.int64),
    "interleaved": ([24, 20, 20], lambda j: j % 3 if j < 60 else 0, torch.int32),
    "height_width_time": ([22, 22, 20], lambda j: 0 if j >= 44 else 1 + j % 2, torch.float32),
}


@pytest.mark.parametrize("axes", [1, 3])
def test_positions_of_float64_keep_their_angles(axes, device):
    """The numbers are as far from float32 as they can be: an angle of them rounded is off by up to 0.5."""
    positions = (torch.rand(axes, 2, 50, dtype=torch.float64) - 0.5) * 2.0 ** torch.arange(1, 51) % 2**24
    inv_freq = torch.rand(axes, 8, dtype=torch.float64)
    parts = multimodal.position_parts(positions, inv_freq, device)
    assert parts[0].shape == (2 * axes, 2, 50) and all(t.device.type == device for t in parts)
    expected = torch_rope.reference.axial_cos_sin(positions, inv_freq, dtype=torch.float64)
    for out, exact in zip(torch_rope.axial_cos_sin(*parts), expected, strict=True):
        assert (out.cpu() - exact).abs().max() <= axes * 5e-7


@pytest.mark.parametrize("order", ORDERS)
def test_each_pair_follows_its_axis(order, device):
    sections, axis_of, dtype = ORDERS[order]
    inv_freq = torch_rope.inv_freq(2 * PAIRS, device=device)  # on mps two parts, which the matrix has too
    positions = torch.randint(0, 50000, (3, 2, 9)).to(dtype).to(device)
    matrix = getattr(multimodal, order)(inv_freq, sections)
    assert matrix.shape == (*inv_freq.shape[:-1], 3, PAIRS) and torch.equal(matrix.sum(-2), inv_freq)
    with Calls() as calls:
        cos, sin = torch_rope.axial_cos_sin(positions, matrix, attention_factor=1.2)
    assert calls.names == ["rope::axial_cos_sin"]  # one launch
    axes = torch.tensor([axis_of(j) for j in range(PAIRS)])
    angle = positions.cpu().double()[axes].movedim(0, -1) * torch_rope.inv_freq(2 * PAIRS)
    for out, exact in ((cos, angle.cos()), (sin, angle.sin())):
        assert out.shape == (2, 9, PAIRS) and (out.cpu() - 1.2 * exact).abs().max() <= 1.2 * 5e-7 + 1e-7
    for some in [4, 4, 0], [0, 0, 8]:  # an axis that no pair follows stays
        assert getattr(multimodal, order)(FREQ, some).shape == (3, 8)
    # The tables have a row for each token, as every layer takes them. The positions of text are the same on all axes.
    q, k = torch.randn(2, 9, 4, 128).to(device), torch.randn(2, 9, 1, 128).to(device)
    text = torch.arange(9).to(dtype).to(device).expand(3, 2, 9)
    outs = torch_rope.rotate_qk(q, k, *torch_rope.axial_cos_sin(text, matrix))
    assert all(map(torch.equal, outs, torch_rope.rotate_qk(q, k, inv_freq=inv_freq)))


def test_axial_has_all_frequencies_on_every_axis(device):
    inv_freq = torch_rope.inv_freq(40, device=device)
    positions = torch.stack([torch.arange(12) // 4, torch.arange(12) % 4]).to(device)  # [2, tokens]
    found = torch_rope.axial_cos_sin(positions, multimodal.axial(inv_freq))
    for out, one in zip(found, torch_rope.cos_sin(positions, inv_freq), strict=True):
        assert torch.equal(out, torch.cat([one[0], one[1]], -1))
    assert multimodal.by_axis(FREQ, [0] * 8, 4).shape == (4, 8) and multimodal.axial(FREQ[:0], 3).shape == (3, 0)


@pytest.mark.parametrize("rank, ranks", [(0, 1), (0, 2), (1, 2), (1, 3)])
def test_positions_of_packed_sequences_begin_at_their_offsets(rank, ranks, device):
    """A rank of context parallelism has two of the equal chunks of each sequence."""
    for dtype, counts in itertools.product(
        [torch.int32, torch.int64], [[3], [1, 4, 2], [0, 3, 0, 0, 5, 0], [], [700, 1, 90]]
    ):
        lengths = counts if ranks == 1 else [2 * ranks * n for n in counts]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype).to(device)
        offsets = torch.randint(2**31 - 500, 2**31 + 500, (len(lengths),)).to(device)
        for more, starts in (({}, [0] * len(lengths)), ({"offsets": offsets}, offsets.tolist())):
            with Calls() as calls:
                given = cu_seqlens, sum(lengths) // ranks + 5
                found = torch_rope.positions_from_cu_seqlens(*given, **more, cp_rank=rank, cp_size=ranks)
            assert "aten::_local_scalar_dense" not in calls.names  # nothing waits for the device
            expected = []
            for n, o in zip(lengths, starts, strict=True):
                chunks = [range(o + n * i // (2 * ranks), o + n * (i + 1) // (2 * ranks)) for i in range(2 * ranks)]
                expected += [*chunks[rank], *chunks[-1 - rank]]
            assert found.tolist() == [*expected, *range(5)]  # the positions of padding begin at 0
            assert found.dtype == (torch.int64 if more else dtype) and found.device == cu_seqlens.device


def test_positions_and_slots_compile_for_any_size(device):
    functions = torch_rope.positions_from_cu_seqlens, torch_rope.slots_of_window
    positions, slots = (torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True) for f in functions)
    for cu in ([0, 4, 9], [0, 1, 2, 30]):
        cu_seqlens, rows = torch.tensor(cu).to(device), torch.arange(6 * cu[-1]).view(2, -1).to(device)
        assert torch.equal(slots(rows, 4), functions[1](rows, 4))
        for given, rank in (((cu_seqlens, cu[-1]), {}), ((6 * cu_seqlens, 2 * cu[-1]), {"cp_rank": 1, "cp_size": 3})):
            assert torch.equal(positions(*given, **rank), functions[0](*given, **rank))
    # A compiled program does not look at the numbers. Tokens before the first sequence count from 0.
    assert positions(torch.tensor([2, 5, 9, 10]).to(device), 11).tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 0]
    assert torch.vmap(lambda cu: functions[0](cu, 3))(torch.tensor([[0, 1, 3]])).tolist() == [[0, 0, 1]]  # nor vmap


def test_slots_of_window_keep_the_last_positions_of_each_sequence(device):
    positions = torch.tensor([[-1, -1, 0, 1, 2], [4, 5, 6, 7, 8]], dtype=torch.int32).to(device)
    slots = torch_rope.slots_of_window(positions, 4)
    assert slots.tolist() == [[-1, -1, 0, 1, 2], [-1, 5, 6, 7, 4]] and slots.dtype == torch.int32
    far = torch_rope.slots_of_window(positions[:, 2:].expand(2, 3), 2**31 - 1)  # beyond int32
    assert far.tolist() == [[0, 1, 2], [2**31 + 5, 2**31 + 6, 2**31 + 7]]
    one, none = torch_rope.slots_of_window(positions[1], 4), torch_rope.slots_of_window(positions[:, :0], 4)
    assert one.tolist() == [-1, 1, 2, 3, 0] and none.shape == (2, 0)
