"""Tests cos_sin, axial_cos_sin and inv_freq: angles are accurate, and cos and sin are rounded once."""

import numpy as np
import pytest
import torch
from cases import covering, name_of, need, on_gpu
from oracle import ANGLE_ERROR, cos_sin, numpy_of, ulp

import torch_rope
from torch_rope import reference
from torch_rope.selfcheck.calls import DTYPES

# ---- values ----

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
# The largest position that a dtype holds exactly, if it is less than 2 ** 20.
LARGEST = {torch.int16: 2**15 - 1, torch.int8: 127, torch.uint8: 255}
FACTORS = {
    "axes": [None, 0, 1, 2, 3, 40],  # None: cos_sin, else axial_cos_sin
    "tokens": [(), (2, 3, 4), (3, 0), (2000,)],
    "positions": [torch.float32, torch.float64, *INTEGERS],
    "frequencies": ["float32", "float64", "two parts"],
    "dtype": [None, *DTYPES],  # of the tables
    "strided": [False, True],
    "attention_factor": [1.0, 1.7],
}


@pytest.mark.parametrize("case", covering(FACTORS), ids=name_of)
def test_cos_and_sin_are_rounded_once(case, device):
    """RoPE-Mixed (Heo et al., arXiv:2403.13298) has a frequency on every axis, and an angle is a sum over the axes."""
    axes, tokens, positions_dtype, frequencies, dtype, strided, factor = case.values()
    freq_dtype = torch.float64 if frequencies == "float64" else torch.float32
    need(device, positions_dtype, freq_dtype, dtype)
    number = 1 if axes is None else axes
    most = LARGEST.get(positions_dtype, 2**20)
    positions = torch.randint(0 if positions_dtype == torch.uint8 else -most, most, (number, *tokens))
    positions[..., ::2] %= 50  # few turns, so that the rounding of a sum over axes matters
    positions = positions.to(positions_dtype)
    freq = torch.rand(2, number, 9 if tokens == (2000,) else 3000, dtype=freq_dtype, device="cpu")
    freq[1] *= 2.0**-25
    freq = freq if frequencies == "two parts" else freq[0]
    if strided:
        positions, freq = (t.repeat_interleave(2, -1)[..., ::2] for t in (positions, freq))
    whole = numpy_of(freq, np.longdouble)
    whole = whole.sum(0) if frequencies == "two parts" else whole
    angle = np.einsum("a...,ai->...i", numpy_of(positions, np.longdouble), whole)
    if axes is None:
        positions, freq = positions[0], freq[..., 0, :]
    name, options = "cos_sin" if axes is None else "axial_cos_sin", {"attention_factor": factor, "dtype": dtype}
    found = [(getattr(torch_rope, name)(positions.to(device), freq.to(device), **options), 1e-11)]
    if not on_gpu(device):  # the angles of the reference are rounded to float64
        rounded = number * 2.0**-52 * np.max(abs(angle), initial=1)
        found.append((getattr(reference, name)(positions, freq, **options), rounded))
    for tables, error in found:
        for table, exact in zip(tables, (np.cos(angle) * factor, np.sin(angle) * factor), strict=True):
            assert table.dtype == (dtype or torch.float32) and table.is_contiguous()
            limit = error if dtype == torch.float64 else factor * ANGLE_ERROR
            if dtype not in (None, torch.float32, torch.float64) or factor != 1:
                limit = limit + 0.5001 * ulp(abs(exact), table.dtype)
            assert table.shape == exact.shape and (abs(numpy_of(table, np.longdouble) - exact) <= limit).all()


POSITIONS = torch.cat([torch.arange(1000), torch.randint(0, 2**24, (3000,)), torch.arange(2**24 - 500, 2**24)])


@pytest.mark.parametrize("freq_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("base", [500000.0, 1.0000001])
def test_cos_and_sin_are_right_to_5e_7_up_to_position_2_24(base, freq_dtype, device):
    need(device, freq_dtype)
    freq = (base ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)).to(freq_dtype)
    angle = POSITIONS.double().unsqueeze(-1) * freq.double()
    for positions in (POSITIONS, POSITIONS.int(), -POSITIONS):
        sign = -1 if positions[1] < 0 else 1
        cos, sin = torch_rope.cos_sin(positions.to(device), freq.to(device))
        assert (cos.cpu().double() - angle.cos()).abs().max() <= ANGLE_ERROR
        assert (sin.cpu().double() - sign * angle.sin()).abs().max() <= ANGLE_ERROR
    # The angles inside rotate are the same: the pair (1, 0) becomes (cos, sin).
    x = torch.zeros(len(POSITIONS), 1, 128, device=device)
    x[..., :64] = 1
    out = torch_rope.rotate(x, inv_freq=freq.to(device), positions=POSITIONS.to(device)).cpu().double().squeeze(1)
    assert (out - torch.cat([angle.cos(), angle.sin()], -1)).abs().max() <= ANGLE_ERROR


def test_positions_past_2_24_keep_their_low_bits(device):
    """A position is exact to 48 bits in float32 arithmetic. The frequencies keep the angles below 2^24."""
    positions = torch.tensor([2**24 + 1, 2**30 + 3, 2**40 + 5, -(2**40) - 7])
    freq = 1.37 * 2.0 ** -torch.arange(17, 49, dtype=torch.float64)
    angle = positions.double().unsqueeze(-1) * freq.float().double()
    cases = [torch_rope.cos_sin(positions.to(device), freq.float().to(device))]
    two = (torch.stack([t, torch.zeros_like(t)]).to(device) for t in (positions, freq.float()))  # the second axis is 0
    cases.append(torch.ops.rope.axial_cos_sin(*two))
    for cos, sin in cases:
        assert (cos.cpu().double() - angle.cos()).abs().max() <= ANGLE_ERROR
        assert (sin.cpu().double() - angle.sin()).abs().max() <= ANGLE_ERROR


def test_the_product_with_attention_factor_is_rounded_once(device):
    positions, freq = torch.arange(1, 500, device=device), torch_rope.inv_freq(16, device=device)
    factor = 1 + 0.4999 * torch.finfo(torch.float32).eps  # half an ulp from a float32
    tables = torch_rope.cos_sin(positions, freq, attention_factor=factor)
    for scaled, plain in zip(tables, torch_rope.cos_sin(positions, freq), strict=True):
        assert torch.equal(scaled.cpu(), (plain.cpu().double() * factor).float())
    # float32 cannot hold 1e39
    assert all(t.isinf().all() for t in torch_rope.cos_sin(positions, freq, attention_factor=1e39))


def test_float64_tables_have_float64_precision(device):
    need(device, torch.float64)
    positions = POSITIONS[::10]
    for freq in (torch_rope.inv_freq(128).double(), 10000.0 ** -(torch.arange(0, 128, 2).double() / 128)):
        exact = cos_sin(positions.numpy(), freq.numpy(), np.longdouble)
        tables = torch_rope.cos_sin(positions.to(device), freq.to(device), dtype=torch.float64)
        for table, values in zip(tables, exact, strict=True):
            assert np.abs(numpy_of(table, np.longdouble) - values).max() <= 2.0**-52
    huge = torch_rope.cos_sin(torch.tensor([2**60 - 12345], device=device), freq.to(device), dtype=torch.float64)
    # A double does not hold this position exactly, but cos and sin are still those of a rotation.
    assert max(t.abs().max() for t in huge) <= 1 + 1e-15


def test_inv_freq_is_computed_in_float64():
    exact = torch.tensor([1e6 ** (-2 * i / 128) for i in range(64)], dtype=torch.float64)
    torch.testing.assert_close(torch_rope.inv_freq(128, 1e6), exact, rtol=3e-16, atol=0)
    assert torch.equal(torch_rope.inv_freq(128, 1e6, dtype=torch.float32), exact.float())
    assert torch_rope.inv_freq(0).shape == (0,)
    for bad in ((3,), (-2,), (4, 0.0), (4, torch.nan)):
        with pytest.raises(ValueError, match="torch_rope.inv_freq"):
            torch_rope.inv_freq(*bad)
