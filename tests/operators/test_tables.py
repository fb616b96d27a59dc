"""Tests the gradients of cos and sin (learned tables), and of inv_freq."""

import pytest
import torch
from cases import ALL_CALLS, CALLS, DTYPES, LAYOUTS, SIZES, SOURCES, Source, covering, make_qk, name_of, thread_counts
from oracle import ANGLE_ERROR, assert_gradients, numpy_of, table_backward

rope = torch.ops.rope
TABLES = [source for source in SOURCES if "inv_freq" not in source.kind]


def make(size, source, layouts, with_k, dtype, device, table_dtype, start="first"):
    """Returns (the gradients of the results, x, the angle arguments) for a call of the operator. x is [q] or [q, k]."""
    *x, angles = make_qk(device, size, source, *layouts[2:], dtype, table_dtype, start)
    *given, _ = make_qk(device, size, source, *layouts[:2], dtype)
    return given[: 1 + with_k], x[: 1 + with_k], angles


def call(given, x, angles, flags):
    """Returns (the gradient of cos, the gradient of sin)."""
    pairs = [t for both in (given, x) for t in (*both, None)[:2]]
    return rope._rotate_table_backward(*pairs, **angles, **flags)


FACTORS = CALLS | {
    "source": TABLES,
    "q_grad": list(LAYOUTS),
    "k_grad": list(LAYOUTS),
    "tables": ["float32", "dtype of x"],
    "with_k": [True, False],
    "inverse": [False, True],
    "attention_factor": [1.0, 0.7],
}
LOOPS = [("size", "dtype", "interleaved"), ("q", "q_grad", "interleaved")]


@pytest.mark.core
@pytest.mark.parametrize("case", covering(FACTORS, interacting=LOOPS, exhaustive=ALL_CALLS), ids=name_of)
def test_gradients_of_tables_agree_with_the_oracle(case, device):
    size, dtype = case["size"], case["dtype"]
    table_dtype = torch.float32 if case["tables"] == "float32" else dtype
    layouts = [case[name] for name in ("q_grad", "k_grad", "q", "k")]
    given, x, angles = make(size, case["source"], layouts, case["with_k"], dtype, device, table_dtype, case["start"])
    flags = {name: case[name] for name in ("interleaved", "inverse", "attention_factor")}
    outs = call(given, x, angles, flags)
    assert_gradients(outs, given, x, angles, **flags)
    for out, again in zip(outs, call(given, x, angles, flags), strict=True):
        assert out.dtype == table_dtype and out.shape == angles["cos"].shape and out.is_contiguous()
        assert torch.equal(out, again)


@pytest.mark.parametrize("batch, seq", [(3, 700), (1051, 2)])
@pytest.mark.parametrize("source", [TABLES[i] for i in (0, 3, 5, 6, 9, 10)], ids=str)
def test_many_tokens_may_use_the_same_row(source, batch, seq, device):
    """Some rows have sums over thousands of heads. No token uses the other rows."""
    size = (batch, seq, 5, 2, 32, 16)
    given, x, angles = make(size, source, ["sbhd", "bhsd"] * 2, True, torch.float32, device, torch.float32)
    if "positions" in angles:
        angles["positions"] = angles["positions"] % 3 + 5 - angles.get("offset", 0)
    outs = call(given, x, angles, {})
    assert_gradients(outs, given, x, angles)
    for _ in thread_counts():  # threads may share a sequence
        assert all(map(torch.equal, outs, call(given, x, angles, {})))


def test_small_terms_of_a_sum_are_not_lost(device):
    """There are far more small terms than threads, and one large term."""
    given, x, positions = torch.ones(30000, 1, 8), torch.ones(30000, 1, 8), torch.ones(30000, dtype=torch.int32)
    given[0], given[..., 4:] = 2**25, 0
    given, x, positions, table = (t.to(device) for t in (given, x, positions, torch.rand(2, 4)))
    cos_grad, sin_grad = call([given], [x], {"cos": table, "sin": table, "positions": positions}, {})
    assert (cos_grad[1] - (2**25 + 29999)).abs().max() <= 4  # an ulp of 2^25
    assert torch.equal(sin_grad, -cos_grad) and not cos_grad[0].any()


def test_positions_at_the_end_of_int64_with_an_offset_are_right(device):
    """The offset leads back to the rows of the table."""
    size, dtypes = (1, 3, 2, 1, 8, 8), (torch.float32, device, torch.float32)
    given, x, angles = make(size, Source("table"), ["bshd"] * 4, True, *dtypes)
    angles["positions"] = torch.tensor([4, 0, 7], device=device)
    near = call(given, x, angles, {})
    angles["offset"] = 8 - torch.iinfo(torch.int64).max
    angles["positions"] -= angles["offset"]
    assert all(map(torch.equal, call(given, x, angles, {}), near))


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8), (2, 3, 2, 0)], ids=str)
@pytest.mark.parametrize("of", ["table", "token", "token shared", "norm", "norm over heads"])
def test_gradients_of_empty_tensors_are_zero(shape, of, device):
    """The gradients are those of tables, or of the weights of a norm."""
    x, rows = torch.randn(shape, device=device), {"token": (1, *shape)[-4:-2], "token shared": (1, shape[-3])}
    cos = torch.ones(*rows.get(of, (9,)), shape[-1] // 2, device=device)
    weight = torch.ones(shape[-2:] if "over" in of else shape[-1:], device=device)
    for _ in range(3):  # the results get memory that held NaN before
        left = [torch.full_like(t, torch.nan) for t in (cos, weight) * 3]
        del left
        if "norm" in of:
            gradients, like = rope._norm_rotate_qk_backward(x, x, x, x, weight, weight, cos, cos)[2:], weight
        else:
            gradients, like = rope._rotate_table_backward(x, x, x, x, cos, cos), cos
        assert all(torch.equal(g, torch.zeros_like(like)) for g in gradients)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [source for source in SOURCES if source.kind == "inv_freq"], ids=str)
def test_gradient_of_inv_freq_agrees_with_the_oracle(source, dtype, device):
    """The gradient is the sum over tokens of position * (sin_grad cos - cos_grad sin), with cos_grad and sin_grad of a
    table by token. In float32 cos and sin are right to 5e-7, and about ten numbers are rounded for each term."""
    size = SIZES[2]
    batch, seq, *_, rotary_dim = size
    interleaved = dtype.itemsize == 2
    flags = {"interleaved": interleaved, "inverse": not interleaved, "attention_factor": 1.3}
    given, x, angles = make(size, source, ["bshd", "bhsd", "packed", "sbhd"], True, dtype, device, torch.float32)
    freq = angles["inv_freq"].detach().requires_grad_()
    outs = rope.rotate_qk(*x, **angles | {"inv_freq": freq}, **flags)
    torch.autograd.backward(outs, given)

    positions = angles.get("positions", torch.arange(seq)).cpu().expand(batch, seq) + angles.get("offset", 0)
    angle = positions.double().unsqueeze(-1) * freq.detach().cpu().double()
    cos, sin = angle.cos(), angle.sin()
    cos_grad, sin_grad, *magnitudes = table_backward(given, x, cos, sin, **flags)
    p = positions[..., None].numpy()
    expected = (p * (sin_grad * cos.numpy() - cos_grad * sin.numpy())).sum((0, 1))
    magnitude = (abs(p) * sum(magnitudes)).sum((0, 1))
    limit = magnitude * (1e-12 if dtype == freq.dtype == torch.float64 else ANGLE_ERROR + 10 * 2**-24)
    assert freq.grad.dtype == freq.dtype and (abs(numpy_of(freq.grad) - expected) <= limit).all()
