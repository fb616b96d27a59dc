"""Tests torch_rope.multimodal, axial_cos_sin with its frequencies, and positions_from_cu_seqlens."""

import itertools

import pytest
import torch
from test_rotary_embedding import Seen

import torch_rope
from torch_rope import multimodal

pytestmark = pytest.mark.heart

PAIRS = 64
# name of the function -> (sections, the axis that pair j follows)
ORDERS = {
    "sections": ([16, 24, 24], lambda j: 0 if j < 16 else 1 if j < 40 else 2),
    "interleaved": ([24, 20, 20], lambda j: j % 3 if j < 60 else 0),
    "height_width_time": ([22, 22, 20], lambda j: 0 if j >= 44 else 1 + j % 2),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("order", ORDERS)
def test_each_pair_follows_its_axis(order, dtype, device):
    sections, axis_of = ORDERS[order]
    inv_freq = torch_rope.inv_freq(2 * PAIRS, device=device)  # on mps two parts, which the matrix has too
    positions = torch.randint(0, 50000, (3, 2, 9)).to(dtype).to(device)
    matrix = getattr(multimodal, order)(inv_freq, sections)
    assert matrix.shape == (*inv_freq.shape[:-1], 3, PAIRS) and torch.equal(matrix.sum(-2), inv_freq)
    with Seen() as seen:
        cos, sin = torch_rope.axial_cos_sin(positions, matrix, attention_factor=1.2)
    assert seen.ops == {torch.ops.rope.axial_cos_sin.default}  # one launch
    axes = torch.tensor([axis_of(j) for j in range(PAIRS)])
    angle = positions.cpu().double()[axes].movedim(0, -1) * torch_rope.inv_freq(2 * PAIRS)
    for out, exact in ((cos, angle.cos()), (sin, angle.sin())):
        assert out.shape == (2, 9, PAIRS) and (out.cpu() - 1.2 * exact).abs().max() <= 1.2 * 5e-7 + 1e-7
    # The tables have a row for each token, as every layer takes them.
    q, k = torch.randn(2, 9, 4, 128).to(device), torch.randn(2, 9, 1, 128).to(device)
    outs = torch_rope.rotate_qk(q, k, cos, sin)
    text = torch.arange(9).to(dtype).to(device).expand(3, 2, 9)  # the positions of text are the same on all axes
    outs = torch_rope.rotate_qk(q, k, *torch_rope.axial_cos_sin(text, matrix))
    for out, plain in zip(outs, torch_rope.rotate_qk(q, k, inv_freq=inv_freq), strict=True):
        assert torch.equal(out, plain)


def test_axial_has_all_frequencies_on_every_axis(device):
    inv_freq = torch_rope.inv_freq(40, device=device)
    positions = torch.stack([torch.arange(12) // 4, torch.arange(12) % 4]).to(device)  # [2, tokens]
    cos, sin = torch_rope.axial_cos_sin(positions, multimodal.axial(inv_freq))
    for out, one in zip((cos, sin), torch_rope.cos_sin(positions, inv_freq), strict=True):
        assert torch.equal(out, torch.cat([one[0], one[1]], -1))


def test_gradients_of_learned_frequencies_agree_with_plain_torch(device):
    """The frequencies are those of RoPE-Mixed, and plain torch computes in float64."""
    matrix = torch.rand(2, 8).to(device).requires_grad_()
    positions = torch.rand(2, 30).to(device).mul(20).requires_grad_()
    x, given = torch.randn(30, 3, 16).to(device), torch.randn(30, 3, 16).to(device)
    out = torch_rope.rotate(x, *(t[None] for t in torch_rope.axial_cos_sin(positions, matrix)))
    found = torch.autograd.grad(out, (matrix, positions), given)
    exact = [t.detach().cpu().double().requires_grad_() for t in (matrix, positions)]
    angle = torch.einsum("aj,at->tj", *exact)[:, None]
    a, b = x.cpu().double().chunk(2, -1)
    rotated = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    for g, e in zip(found, torch.autograd.grad(rotated, exact, given.cpu().double()), strict=True):
        # The terms are rounded to float32. They are summed over 30 tokens with positions up to 20, 8 pairs and 3 heads.
        assert (g.cpu() - e).abs().max() <= 1e-5 * e.abs().max()


@pytest.mark.cpu
def test_wrong_axes_and_sections_raise_an_error():
    inv_freq = torch_rope.inv_freq(16)
    for order, wrong in itertools.product(ORDERS, ([4, 4], [4, 4, 1], [9, -1, 0], [1, 2, 5, 0])):
        with pytest.raises(
            ValueError, match=f"multimodal.{order}: sections is .* but must be three counts of pairs with the sum 8"
        ):
            getattr(multimodal, order)(inv_freq, wrong)
    with pytest.raises(ValueError, match="but must have as many pairs of height as of width"):
        multimodal.height_width_time(inv_freq, [3, 4, 1])
    with pytest.raises(ValueError, match="axes is .0, 1. but must have 8 numbers that are at least 0"):
        multimodal.by_axis(inv_freq, [0, 1])
    with pytest.raises(ValueError, match="numbers that are at least 0"):
        multimodal.by_axis(inv_freq, [0, 1, 0, 1, 0, 1, 0, -1])
    with pytest.raises(ValueError, match="axes is 0 but must be at least 1"):
        multimodal.axial(inv_freq, 0)
    with pytest.raises(ValueError, match="model_type is 'llama' but must be one of 'qwen2_vl'"):
        multimodal.from_config({"model_type": "llama", "head_dim": 64})
    with pytest.raises(ValueError, match="positions has 2 axes but must have 3, as inv_freq has"):
        torch_rope.axial_cos_sin(torch.zeros(2, 5), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="inv_freq has shape .8. but must have shape .axes, rotary_dim / 2."):
        torch_rope.axial_cos_sin(torch.zeros(2, 5), inv_freq)
    with pytest.raises(TypeError, match="positions is bool"):
        torch_rope.axial_cos_sin(torch.zeros(1, 5, dtype=torch.bool), inv_freq[None])


# ---- packed sequences ----


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[3], [1, 4, 2], [0, 3, 0, 0, 5, 0], [], [700, 1, 90]], ids=str)
def test_positions_of_packed_sequences_begin_at_their_offsets(lengths, dtype, device):
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype).to(device)
    offsets = torch.randint(0, 1000, (len(lengths),)).to(device)
    total, padding = sum(lengths), 5
    for more, starts in (({}, [0] * len(lengths)), ({"offsets": offsets}, offsets.tolist())):
        with Seen() as seen:
            found = torch_rope.positions_from_cu_seqlens(cu_seqlens, total + padding, **more)
        assert torch.ops.aten._local_scalar_dense.default not in seen.ops  # nothing waits for the device
        expected = [p for n, o in zip(lengths, starts, strict=True) for p in range(o, o + n)] + [*range(padding)]
        assert found.dtype == dtype and found.device == cu_seqlens.device and found.tolist() == expected


def test_positions_from_cu_seqlens_compiles_for_any_total(device):
    compiled = torch.compile(torch_rope.positions_from_cu_seqlens, backend="aot_eager", fullgraph=True, dynamic=True)
    for cu in ([0, 4, 9], [0, 1, 2, 30]):
        cu_seqlens = torch.tensor(cu).to(device)
        found = compiled(cu_seqlens, cu[-1])
        assert torch.equal(found, torch_rope.positions_from_cu_seqlens(cu_seqlens, cu[-1]))


@pytest.mark.cpu
def test_wrong_arguments_of_positions_from_cu_seqlens_raise_an_error():
    with pytest.raises(ValueError, match="cu_seqlens has shape .1, 2. but must have shape .sequences . 1."):
        torch_rope.positions_from_cu_seqlens(torch.zeros(1, 2, dtype=torch.int32), 3)
    with pytest.raises(TypeError, match="cu_seqlens is float32 but must be int32 or int64"):
        torch_rope.positions_from_cu_seqlens(torch.zeros(2), 3)
    with pytest.raises(TypeError, match="offsets is float32 but must be int32 or int64"):
        torch_rope.positions_from_cu_seqlens(torch.tensor([0, 3]), 3, torch.zeros(1))
    with pytest.raises(ValueError, match="total is -1 but must be at least 0"):
        torch_rope.positions_from_cu_seqlens(torch.tensor([0, 3]), -1)
    with pytest.raises(ValueError, match="offsets has shape .3. but must have shape .1., one offset for each sequence"):
        torch_rope.positions_from_cu_seqlens(torch.tensor([0, 3]), 3, torch.zeros(3, dtype=torch.long))
