"""Tests norm_rotate_qk.

The values lie within the ulp limits of the float64 oracle, have the same bits in every layout, and agree with other
implementations. q, k and both weights have gradients to any order, which one operator call computes.
"""

import importlib
import itertools

import numpy as np
import pytest
import torch
from cases import (
    ALL_CALLS,
    CALLS,
    DTYPES,
    EXHAUSTIVE,
    KERNELS,
    LAYOUTS,
    SOURCES,
    Calls,
    Source,
    covering,
    each_number_of_threads,
    make_qk,
    many,
    name_of,
    on_gpu,
    supported,
)
from oracle import assert_close, limits, numpy_of, rotate, ulp
from torch.autograd import forward_ad as fwAD
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import torch_rope

rope = torch.ops.rope
norm_rotate_qk = rope.norm_rotate_qk

# A weight is kept in float32 or in the dtype of x ("own"). Its elements are adjacent in memory unless it is strided.
WEIGHTS = ["float32", "own", "float32 strided", "own strided"]
FACTORS = CALLS | {
    "q_weight": WEIGHTS,
    "k_weight": WEIGHTS,
    "over_heads": [False, True],
    "norm_eps": [1e-6, 1e-5, 0.0, 0.5, 1e3],
    "attention_factor": [1.0, 1.2079441541679836, -0.37],
}


def weight(kind, head_dim, dtype, device, *heads):
    """Returns [head_dim] or [heads, head_dim] weights between -0.5 and 1.5, of both signs."""
    dtype = torch.float32 if "float32" in kind else dtype
    step = {"float32 strided": 3, "own strided": 2}.get(kind, 1)
    return (torch.rand(*heads, head_dim * step, dtype=torch.float64) * 2 - 0.5).to(dtype).to(device)[..., ::step]


def make(
    size, source, q_layout, k_layout, dtype, device, kinds=("float32", "float32"), start="first", over_heads=False
):
    """Returns [q, k, q_norm_weight, k_norm_weight] and the arguments that give the angles.

    over_heads: there is a weight for each head, so all heads of a token are normalised together.
    """
    q, k, angles = make_qk(device, size, source, q_layout, k_layout, dtype, start=start)
    heads = [x.shape[2:3] if over_heads else () for x in (q, k)]
    return [q, k, *(weight(kind, size[-2], dtype, device, *h) for kind, h in zip(kinds, heads, strict=True))], angles


def make_case(case, device):
    """Returns what make() returns for a case of FACTORS, and the options of the call."""
    where = [case[name] for name in ("size", "source", "q", "k", "dtype")]
    options = {name: case[name] for name in ("norm_eps", "attention_factor", "interleaved")}
    return *make(*where, device, (case["q_weight"], case["k_weight"]), case["start"], case["over_heads"]), options


def assert_right(outs, tensors, angles, norm_eps, **options):
    for x, out, w in zip(tensors[:2], outs, tensors[2:], strict=True):
        assert out.dtype == x.dtype and out.shape == x.shape
        expected = rotate(x, **angles, **options, norm_weight=w, norm_eps=norm_eps)
        assert_close(out, expected, *limits(x.dtype, angles, norm=True))


def assert_same(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- against the oracle ----


@pytest.mark.heart
@pytest.mark.parametrize("case", covering(FACTORS, interacting=KERNELS, exhaustive=ALL_CALLS), ids=name_of)
def test_the_result_is_within_ulps_of_the_oracle(case, device):
    tensors, angles, options = make_case(case, device)
    before = [t.clone() for t in tensors]
    outs = norm_rotate_qk(*tensors, **angles, **options)
    assert_right(outs, tensors, angles, **options)
    assert_same(tensors, before)
    for x, out in zip(tensors, outs, strict=False):
        assert out.stride() == torch.empty_like(x).stride()
    assert_same(torch_rope.norm_rotate_qk(*tensors, **angles, **options), outs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_dim_is_accurate(dtype, interleaved, device):
    """head_dim may be odd, and any number of pairs is rotated."""
    for head_dim in (*range(1, 132), 255, 256, 257, 1000):
        rotary_dim = 2 * torch.randint(0, head_dim // 2 + 1, ()).item()
        size = (1, 3, 2, 1, head_dim, rotary_dim)
        tensors, angles = make(size, SOURCES[7], "bshd", "packed", dtype, device, over_heads=head_dim % 3 == 0)
        outs = norm_rotate_qk(*tensors, **angles, interleaved=interleaved, attention_factor=1.3)
        assert_right(outs, tensors, angles, 1e-6, interleaved=interleaved, attention_factor=1.3)


@pytest.mark.parametrize(
    "head_dim, dtype", [*itertools.product((768, 1024, 4096), DTYPES), (65536, torch.float32)], ids=str
)
def test_wide_heads_of_equal_values_are_accurate(head_dim, dtype, device):
    """This is the worst case of a long sum: the roundings of many equal squares all have one sign and add up."""
    size = (1, 7, 4, 1, head_dim, head_dim)
    (q, k, *weights), angles = make(size, SOURCES[2], "bshd", "bshd", dtype, device)
    values = torch.tensor([1.2345, 0.7071, 1e-3, 77.7], device=device).to(dtype)[:, None]
    tensors = [values.expand_as(q), values[:1].expand_as(k), *weights]
    assert_right(norm_rotate_qk(*tensors, **angles), tensors, angles, 1e-6)


@pytest.mark.parametrize("heads", [1, 12, 40, 65, 130])
@pytest.mark.parametrize("head_dim, dtype", [*zip((128, 64, 20, 256), DTYPES, strict=True)], ids=str)
def test_every_number_of_heads_is_normalised_together(head_dim, dtype, heads, device):
    """Half of the heads of q hold equal values, whose roundings all have one sign and add up."""
    size = (1, 5, heads, heads // 3 + 1, head_dim, head_dim)
    tensors, angles = make(size, SOURCES[2], "bshd", "bhsd", dtype, device, ("own", "float32"), over_heads=True)
    tensors[0][..., ::2, :] = 1.2345
    outs = norm_rotate_qk(*tensors, **angles)
    assert_right(outs, tensors, angles, 1e-6)
    given = like(outs)
    gradients = rope._norm_rotate_qk_backward(*given, *tensors, **angles)
    assert_accurate(gradients, tensors, given, angles, norm_eps=1e-6)


@pytest.mark.parametrize("norm_eps", [1e-6, 0.0])
@pytest.mark.parametrize("size", [1e-4, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_and_large_heads_are_accurate(dtype, size, norm_eps, device):
    """norm_eps dominates the sum for small heads and is lost in it for large ones."""
    (q, k, *weights), angles = make((2, 9, 4, 1, 96, 64), SOURCES[2], "bhsd", "bshd", dtype, device)
    tensors = [q * size, k * size, *weights]
    assert_right(norm_rotate_qk(*tensors, **angles, norm_eps=norm_eps), tensors, angles, norm_eps)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_tables_of_half_precision_inputs_may_be_half_precision(table_dtype, interleaved, device):
    tensors, angles = make((2, 9, 4, 1, 96, 64), SOURCES[3], "bhsd", "bshd", table_dtype, device, ("own", "float32"))
    angles |= {name: angles[name].to(table_dtype) for name in ("cos", "sin")}
    outs = norm_rotate_qk(*tensors, **angles, interleaved=interleaved)
    assert_right(outs, tensors, angles, 1e-6, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_past_rotary_dim_are_only_normalised(dtype, interleaved, device):
    """They have the same bits at any angle and with any attention_factor.

    On the CPU they have these bits also if nothing is rotated. On CUDA rotary_dim decides the order in which a norm is
    summed.
    """
    tensors, angles = make((2, 9, 4, 1, 96, 64), SOURCES[7], "bshd", "bshd", dtype, device)
    nothing, zero_angle = ({"inv_freq": f} for f in (angles["inv_freq"][:0], torch.zeros_like(angles["inv_freq"])))
    norm = norm_rotate_qk(*tensors, **nothing)
    rotated_by_zero = norm_rotate_qk(*tensors, **zero_angle, interleaved=interleaved)
    assert_right(norm, tensors, nothing, 1e-6)
    for attention_factor in (1.0, 1.3):
        outs = norm_rotate_qk(*tensors, **angles, attention_factor=attention_factor, interleaved=interleaved)
        assert_right(outs, tensors, angles, 1e-6, attention_factor=attention_factor, interleaved=interleaved)
        for expected in [rotated_by_zero] if on_gpu(device) else [rotated_by_zero, norm]:
            assert_same([t[..., 64:] for t in outs], [t[..., 64:] for t in expected])


# ---- the same bits ----


@pytest.mark.parametrize(
    "dtype, head_dim, interleaved, eager_rounding, over_heads",
    [
        tuple(case.values())
        for case in covering(
            {"dtype": DTYPES, "head_dim": [128, 80, 7], "interleaved": [0, 1], "eager": [0, 1], "over_heads": [0, 1]}
        )
    ],
    ids=str,
)
def test_a_head_has_the_same_bits_in_any_layout_and_any_call(
    dtype, head_dim, interleaved, eager_rounding, over_heads, device
):
    """The result of a head does not depend on the layout, nor on the other tokens and heads of the call.

    It is the same in tensors of three dimensions and of four.
    """
    size = (2, 20, 6, 2, head_dim, head_dim // 2 * 2)
    (q, k, *weights), angles = make(
        size, Source("table", offset=2), "bshd", "bshd", dtype, device, over_heads=over_heads
    )
    tables = angles["cos"], angles["sin"]
    options = {"interleaved": bool(interleaved), "eager_rounding": bool(eager_rounding)}
    whole = norm_rotate_qk(q, k, *weights, *tables, offset=2, **options)
    for q_layout, k_layout in zip(LAYOUTS.values(), reversed(LAYOUTS.values()), strict=True):
        x, y = (f(t.shape, dtype, device).copy_(t) for f, t in ((q_layout, q), (k_layout, k)))
        assert_same(norm_rotate_qk(x, y, *weights, *tables, offset=2, **options), whole)
    for token, head in (0, 1), (19, 0):
        here = (slice(1, 2), slice(token, token + 1), slice(None) if over_heads else slice(head, head + 1))
        alone = norm_rotate_qk(q[here], k[here], *weights, *tables, offset=2 + token, **options)
        assert_same(alone, [t[here] for t in whole])
    assert_same(norm_rotate_qk(q[1], k[1], *weights, *tables, offset=2, **options), [t[1] for t in whole])
    # q has the same bits with another k, and if it is passed as k.
    assert torch.equal(norm_rotate_qk(q, q, weights[0], weights[0], *tables, offset=2, **options)[1], whole[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pair_has_the_same_bits_in_a_vector_loop_and_in_its_tail(dtype, interleaved, device):
    """Fewer rotated pairs move the end of the vector loop.

    The values are small integers, whose sum of squares is exact, so a head may be put into another order.
    """
    tensors, angles = make((2, 9, 3, 1, 128, 128), SOURCES[0], "bshd", "bshd", dtype, device)
    tensors = [torch.randint(-9, 10, t.shape, device=device).to(t.dtype) for t in tensors]
    whole = norm_rotate_qk(*tensors, **angles, interleaved=interleaved)
    for pairs in (1, 3, 13, 31):
        order = torch.arange(128, device=device)
        if not interleaved:  # the first pairs come first
            order = torch.cat([order[:pairs], order[64 : 64 + pairs], order[pairs:64], order[64 + pairs :]])
        tables = [angles[name][:, :pairs] for name in ("cos", "sin")]
        outs = norm_rotate_qk(*(t[..., order] for t in tensors), *tables, interleaved=interleaved)
        assert_same([t[..., : 2 * pairs] for t in outs], [t[..., order[: 2 * pairs]] for t in whole])


@pytest.mark.parametrize("head_dim, over_heads", [(128, False), (100, False), (64, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_tokens_have_the_bits_of_shorter_calls(dtype, head_dim, over_heads, device):
    """The bits do not depend on the number of threads either."""
    seq = many(1500, device)
    size = (2, seq, 8, 2, head_dim, head_dim)
    (q, k, *weights), angles = make(size, Source("inv_freq"), "bshd", "bhsd", dtype, device, over_heads=over_heads)
    whole = norm_rotate_qk(q, k, *weights, **angles)
    for start in range(0, seq, 133):
        piece = slice(start, start + 133)
        outs = norm_rotate_qk(q[:, piece], k[:, piece], *weights, **angles, offset=start)
        assert_same(outs, [t[:, piece] for t in whole])
    for _ in each_number_of_threads():
        assert_same(norm_rotate_qk(q, k, *weights, **angles), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tables_of_cos_sin_and_inv_freq_give_the_same_bits(dtype, device):
    tensors, angles = make((2, 33, 3, 1, 80, 64), Source("inv_freq", offset=5), "bshd", "bshd", dtype, device)
    tables = torch_rope.cos_sin(torch.arange(60, device=device), angles["inv_freq"])
    rows = [t[5:38].unsqueeze(0) for t in tables]
    by_frequency = norm_rotate_qk(*tensors, **angles)
    assert_same(norm_rotate_qk(*tensors, *tables, offset=5), by_frequency)
    assert_same(norm_rotate_qk(*tensors, *rows), by_frequency)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_and_stride_of_a_weight_change_no_bit(dtype, device):
    (q, k, *_), angles = make((2, 9, 4, 1, 80, 80), SOURCES[0], "bshd", "bshd", dtype, device)
    w = weight("float32", 80, dtype, device).bfloat16().float()
    expected = norm_rotate_qk(q, k, w, w, **angles)
    strided = torch.stack([w, -w], -1)[:, 0]
    assert_same(norm_rotate_qk(q, k, strided, w.to(dtype), **angles), expected)
    assert_same(norm_rotate_qk(q, k, w.to(dtype), strided.to(dtype), **angles), expected)
    one = w[:1].expand(80)  # stride 0
    assert_same(norm_rotate_qk(q, k, one, one, **angles), norm_rotate_qk(q, k, one.clone(), one.clone(), **angles))


def test_expanded_inputs_are_read(device):
    """A tensor that is only read may have stride 0: here one head is expanded to four."""
    one, w = torch.randn(2, 5, 1, 16, device=device), torch.rand(16, device=device)
    freq = torch_rope.inv_freq(16, device=device)
    many = one.expand(2, 5, 4, 16)
    outs = norm_rotate_qk(many, many, w, w, inv_freq=freq)
    assert_same(outs, norm_rotate_qk(many.contiguous(), many.contiguous(), w, w, inv_freq=freq))
    assert outs[0].stride() == torch.empty_like(many).stride()


# ---- corners ----


@pytest.mark.parametrize(
    "shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8), (3, 0, 8), (2, 3, 2, 0)], ids=str
)
def test_empty_tensors_are_accepted(shape, device):
    x, w = torch.randn(shape, device=device), torch.ones(shape[-1], device=device)
    freq = torch_rope.inv_freq(shape[-1], device=device)
    for angles in ((None, None, freq), torch_rope.cos_sin(torch.arange(4, device=device), freq)):
        a, b = norm_rotate_qk(x, x, w, w, *angles)
        assert a.shape == b.shape == shape
    if shape[-2] == 0:  # the other tensor has heads
        y = torch.randn(*shape[:-2], 3, 8, device=device)
        assert_same(norm_rotate_qk(x, y, w, w, *angles), reversed(norm_rotate_qk(y, x, w, w, *angles)))


def special_heads(head_dim, dtype):
    """Returns a dict from a name to one head in float64, made of numbers that dtype can hold."""
    info = torch.finfo(dtype)
    plain = torch.linspace(-2, 2, head_dim, dtype=torch.float64)
    heads = {"plain": plain, "zeros": 0 * plain, "largest": plain.sign() * info.max, "tiny": plain * info.tiny}
    for name, value in ("inf", torch.inf), ("minus inf", -torch.inf), ("nan", torch.nan), ("one large", info.max):
        heads[name] = torch.where(torch.arange(head_dim) == 3, value, plain)
    return heads


@pytest.mark.parametrize("norm_eps", [1e-6, 0.0])
@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_special_values_give_what_the_formula_gives(dtype, head_dim, norm_eps, device):
    """The results are those of the formula in float32 in torch's operators.

    rsqrt of a sum that overflows (largest, inf) is 0, so finite numbers become 0, and an infinity and its pair become
    NaN. rsqrt(0) is infinite, so zeros without norm_eps become NaN. A NaN fills its head. Squares that underflow count
    as zero. A head changes no other head, whatever it holds.
    """
    heads = special_heads(head_dim, dtype)
    if device == "mps" and norm_eps == 0:
        del heads["tiny"]  # Metal may take subnormal numbers for zeros
    x = torch.stack([t for head in heads.values() for t in (head, heads["plain"])])[None, :, None].to(dtype).to(device)
    w = weight("float32", head_dim, dtype, device)
    cos, sin = torch_rope.cos_sin(torch.arange(32, device=device), torch_rope.inv_freq(head_dim, device=device))
    for interleaved in (False, True):
        out, _ = norm_rotate_qk(x, x, w, w, cos, sin, norm_eps=norm_eps, interleaved=interleaved)
        wide = x.cpu().float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps) * w.cpu()
        expected = rope.rotate(normed, cos.cpu(), sin.cpu(), interleaved=interleaved).to(dtype)
        torch.testing.assert_close(
            out.cpu(), expected, equal_nan=True, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
        )
    alone = norm_rotate_qk(x[:, :1], x[:, :1], w, w, cos, sin, norm_eps=norm_eps, interleaved=True, offset=1)[0]
    assert alone.isfinite().all() and torch.equal(alone, out[:, 1:2])


@pytest.mark.parametrize("head_dim", [64, 80, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0], ids=str)
def test_a_head_that_has_no_norm_changes_no_other_head(value, dtype, head_dim, device):
    """A head has no norm if it holds a NaN or an infinity, or only zeros without norm_eps."""
    size = (1, 5, 3, 2, head_dim, head_dim // 2 * 2)
    (q, k, *weights), angles = make(size, Source("table"), "bshd", "bshd", dtype, device)
    expected = norm_rotate_qk(q, k, *weights, **angles, norm_eps=0.0)
    q[0, 1, 1] = value
    q_out, k_out = norm_rotate_qk(q, k, *weights, **angles, norm_eps=0.0)
    assert not q_out[0, 1, 1].isfinite().all()
    q_out[0, 1, 1] = expected[0][0, 1, 1]
    assert_same((q_out, k_out), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_weight_that_is_nan_or_infinite_changes_only_its_pair(value, device):
    tensors, angles = make((1, 5, 3, 2, 80, 64), Source("inv_freq", offset=1), "bshd", "bshd", torch.float32, device)
    q_expected, k_expected = norm_rotate_qk(*tensors, **angles)
    tensors[2][3] = value
    q_out, k_out = norm_rotate_qk(*tensors, **angles)
    pair = torch.tensor([3, 3 + 32], device=device)
    assert not q_out[..., pair].isfinite().any() and torch.equal(k_out, k_expected)
    assert torch.equal(q_out.index_fill(-1, pair, 0), q_expected.index_fill(-1, pair, 0))


# ---- other implementations ----


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm_eps", [1e-6, 0.1])
def test_agrees_with_rms_norm_of_torch_followed_by_rotate(norm_eps, interleaved, device):
    """The comparison is in float64. The limit is our 6 ulps and 6 more for torch's norm, which rounds as often."""
    size = (2, 9, 4, 1, 96, 64)
    tensors, angles = make(size, SOURCES[3], "bhsd", "packed", torch.float64, device, ("own", "own"))
    options = {"attention_factor": 1.3, "interleaved": interleaved}
    outs = norm_rotate_qk(*tensors, **angles, norm_eps=norm_eps, **options)
    for x, out, w in zip(tensors[:2], outs, tensors[2:], strict=True):
        normed = torch.nn.functional.rms_norm(x, (96,), w, norm_eps)
        theirs = rope.rotate(normed, **angles, **options)
        assert_close(out, (numpy_of(theirs), rotate(normed, **angles, **options)[1].astype(float)), 6 + 6)


@pytest.mark.parametrize("model, norm", [("qwen3", "Qwen3RMSNorm"), ("gemma3", "Gemma3RMSNorm")])
def test_agrees_with_the_query_and_key_of_transformers(model, norm, device):
    """The comparison is in float32, with the same tables. Gemma stores a weight as its difference from one."""
    pytest.importorskip("transformers", minversion="5", reason="transformers 5 or later is not installed")
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    source = Source("inv_freq", "int64 [B,S]")
    (q, k, *weights), angles = make((2, 17, 8, 2, 128, 128), source, "bshd", "bshd", torch.float32, device)
    angle = angles["positions"].unsqueeze(-1) * angles["inv_freq"]
    cos, sin = angle.cos(), angle.sin()
    theirs = []
    with torch.no_grad():
        for x, w in zip((q, k), weights, strict=True):
            module = getattr(modeling, norm)(128, eps=1e-6).to(device)
            module.weight.copy_(w - 1 if model == "gemma3" else w)
            w.copy_(1 + module.weight if model == "gemma3" else module.weight)
            theirs.append(module(x).transpose(1, 2))
    theirs = modeling.apply_rotary_pos_emb(*theirs, *(torch.cat([t, t], -1) for t in (cos, sin)))
    ours = norm_rotate_qk(q, k, *weights, cos, sin)
    for x, w, out, other in zip((q, k), weights, ours, theirs, strict=True):
        _, magnitude = rotate(x, cos, sin, norm_weight=w)
        assert_close(out, (numpy_of(other.transpose(1, 2)), magnitude), 6 + 6)


# ---- gradients to any order ----

NAMES = ["q", "k", "q_norm_weight", "k_norm_weight"]
SIZE = (2, 3, 2, 1, 6, 4)
OPTIONS = {"norm_eps": 0.01, "attention_factor": 1.3}
EVERY_MODE = dict(check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
ANGLES = [Source("table", offset=7), Source("token"), Source("inv_freq", "int64 [B,S]", freq_dtype=torch.float64)]
by_source = pytest.mark.parametrize("source", ANGLES, ids=str)
by_pairing = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


over_heads_too = pytest.mark.parametrize("over_heads", [False, True], ids=["each head", "over heads"])


def leaves(device, size=SIZE, source=SOURCES[1], dtype=torch.float64, requires_grad=True, over_heads=False):
    """Returns [q, k, q_norm_weight, k_norm_weight] and the angles, in float64 because finite differences need it."""
    kinds = ("own strided", "own")
    tensors, angles = make(size, source, "bhsd", "packed", dtype, device, kinds, over_heads=over_heads)
    return [t.requires_grad_(requires_grad) for t in tensors], angles


def like(outs):
    """Returns random dense gradients for outs, whose values do not depend on the strides of outs."""
    return [torch.randn(t.shape, dtype=t.dtype, device=t.device) for t in outs]


def same_gradients(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def definition(
    q, k, q_norm_weight, k_norm_weight, cos=None, sin=None, inv_freq=None, positions=None, offset=0, *, norm_eps=1e-6,
    attention_factor=1.0, interleaved=False,
):  # fmt: skip
    """Computes norm_rotate_qk with torch's own operators, which torch differentiates by itself."""
    p = (torch.arange(q.shape[-3], device=q.device) if positions is None else positions) + offset
    if inv_freq is not None:
        angle = p.unsqueeze(-1) * inv_freq
        cos, sin = angle.cos(), angle.sin()
    elif cos.dim() == 2:
        cos, sin = cos[p], sin[p]
    c, s = (attention_factor * t.unsqueeze(-2) for t in (cos, sin))
    end = 2 * c.shape[-1]
    outs = []
    for x, w in (q, q_norm_weight), (k, k_norm_weight):
        x = x * torch.rsqrt(x.square().mean((-2, -1)[-w.dim() :], keepdim=True) + norm_eps) * w
        a, b = (x[..., 0:end:2], x[..., 1:end:2]) if interleaved else x[..., :end].chunk(2, -1)
        pairs = torch.stack([a * c - b * s, b * c + a * s], -1 if interleaved else -2).flatten(-2)
        outs.append(torch.cat([pairs, x[..., end:]], -1))
    return outs


@pytest.mark.shared
@pytest.mark.heart
@pytest.mark.parametrize(
    "case",
    covering(
        {
            "source": [*ANGLES, Source("head")],
            "dims": [(6, 4), (4, 4), (3, 0)],
            "interleaved": [False, True],
            "over_heads": [False, True],
        }
    ),
    ids=name_of,
)
def test_gradients_pass_gradcheck(case, device):
    inputs, angles = leaves(device, (2, 2, 2, 1, *case["dims"]), case["source"], over_heads=case["over_heads"])
    function = lambda *t: norm_rotate_qk(*t, **angles, **OPTIONS, interleaved=case["interleaved"])  # noqa: E731
    assert gradcheck(function, inputs, **EVERY_MODE)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.shared
@by_pairing
@over_heads_too
def test_gradients_of_the_backward_pass_gradcheck(over_heads, interleaved, device):
    """The backward is an operator of its own, which is differentiable in all six inputs."""
    inputs, angles = leaves(device, (1, 2, 2, 1, 3, 2), over_heads=over_heads)
    inputs = [g.requires_grad_() for g in like(inputs[:2])] + inputs
    function = lambda *t: rope._norm_rotate_qk_backward(*t, **angles, **OPTIONS, interleaved=interleaved)  # noqa: E731
    assert gradcheck(function, inputs, **EVERY_MODE)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


@by_pairing
@by_source
@over_heads_too
def test_derivatives_to_the_third_order_are_those_of_the_definition(over_heads, source, interleaved, device):
    """torch differentiates the definition by itself."""
    inputs, angles = leaves(device, source=source, over_heads=over_heads)
    derivatives = []
    for function in norm_rotate_qk, definition:
        torch.manual_seed(1)
        outs = function(*inputs, **angles, **OPTIONS, interleaved=interleaved)
        y = sum((out.sin() * g).sum() for out, g in zip(outs, like(outs), strict=True))
        derivatives.append([])
        for _ in range(3):
            gradients = grad(y, inputs, create_graph=True)
            derivatives[-1] += gradients
            y = sum((x * g).sum() for x, g in zip(gradients, like(gradients), strict=True))
    same_gradients(*derivatives)


# ---- how accurate the gradients are ----


def gradients_by_the_oracle(x, weight, gradient, angles, norm_eps, **options):
    """Returns (gradient, size) of x and of weight.

    The size is the same formula with every term positive. The error of a rounding is a fraction of it.
    """
    h, pair = rotate(gradient, **angles, **options, inverse=True)
    x, w = (numpy_of(t, h.dtype.type) for t in (x, weight))
    axes = (-2, -1)[-w.ndim :]
    r = 1 / np.sqrt((x**2).mean(axes, keepdims=True) + h.dtype.type(norm_eps))

    def formula(h, x, w, minus):
        of_x = r * (h * w - minus * r**2 * (h * w * x).mean(axes, keepdims=True) * x)
        return of_x, (h * x * r).sum(tuple(range(x.ndim - w.ndim)))

    return zip(formula(h, x, w, 1), formula(pair, abs(x), abs(w), -1), strict=True)


def assert_accurate(gradients, tensors, out_gradients, angles, **options):
    """Checks that the gradients are within twelve roundings of the oracle.

    The pair, its scaled cos and sin, the weight, 1 / rms, the two means and the last product are rounded. The roundings
    of a sum over tokens even out, as those of its terms do. Rounding to the dtype of the result adds one more, and
    inv_freq adds the error of cos and sin.
    """
    wide = tensors[0].dtype == torch.float64
    fraction = 12 * 2.0**-53 if wide else 12 * 2.0**-24 + (5e-7 if "inv_freq" in angles else 0)
    for i in (0, 1):
        expected = gradients_by_the_oracle(tensors[i], tensors[i + 2], out_gradients[i], angles, **options)
        for actual, (value, size) in zip(gradients[i::2], expected, strict=True):
            limit = fraction * size
            if actual.dtype != (torch.float64 if wide else torch.float32):
                limit = limit + ulp(np.abs(value), actual.dtype)
            error = np.abs(numpy_of(actual, value.dtype.type) - value)
            assert (error <= limit).all(), f"{float((error / limit).max()):.3f} of the limit"


@pytest.mark.parametrize(
    "case",
    covering(
        FACTORS | {"q_grad": list(LAYOUTS), "k_grad": list(LAYOUTS)}, interacting=KERNELS[-1:], exhaustive=ALL_CALLS
    ),
    ids=name_of,
)
def test_gradients_are_within_roundings_of_the_oracle(case, device):
    """A gradient has the dtype and shape of its input. Those of q and k have the strides of torch.empty_like."""
    tensors, angles, options = make_case(case, device)
    inputs = [t.requires_grad_() for t in tensors]
    given = [
        LAYOUTS[case[name]](x.shape, x.dtype, device) for name, x in zip(("q_grad", "k_grad"), inputs, strict=False)
    ]
    gradients = grad(norm_rotate_qk(*inputs, **angles, **options), inputs, given)
    for x, g in zip(inputs, gradients, strict=True):
        assert g.dtype == x.dtype and g.shape == x.shape
        assert x.dim() < 3 or g.stride() == torch.empty_like(x).stride()
    assert_accurate(gradients, tensors, given, angles, **options)


@pytest.mark.parametrize(
    "dtype, positive, over_heads",
    [(torch.float32, False, False), (torch.bfloat16, True, False), (torch.float32, True, True)]
    + [(torch.bfloat16, False, False), (torch.float32, True, False), (torch.bfloat16, True, True)] * EXHAUSTIVE,
    ids=str,
)
def test_gradients_of_weights_are_accurate_for_many_tokens(dtype, positive, over_heads, device):
    """All terms of the sum may have one sign. The bits are the same each time and with any number of threads."""
    heads = (8, 2) if positive else (2, 8)
    size = (2, many(10000, device), *heads, 24, 16)
    tensors, angles = make(size, Source("table"), "bshd", "bhsd", dtype, device, over_heads=over_heads)
    outs = norm_rotate_qk(*tensors, **angles)
    given = list(outs) if positive else like(outs)  # with outs the terms are squares times the weight
    run = lambda: rope._norm_rotate_qk_backward(*given, *tensors, **angles)  # noqa: E731
    gradients = run()
    assert_accurate(gradients, tensors, given, angles, norm_eps=1e-6)
    assert_same(run(), gradients)
    for _ in each_number_of_threads():
        assert_same(run(), gradients)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 20])
@over_heads_too
def test_gradients_have_the_same_bits_in_any_layout(over_heads, head_dim, dtype, device):
    """The order of a sum is the order of tokens and heads, not of their addresses."""
    size = (2, 9, 5, 2, head_dim, 20)
    tensors, angles = make(size, Source("table"), "bshd", "bshd", dtype, device, over_heads=over_heads)
    given = like(tensors[:2])
    expected = rope._norm_rotate_qk_backward(*given, *tensors, **angles)
    for layout in LAYOUTS.values():
        laid = [layout(t.shape, dtype, device).copy_(t) for t in (*given, *tensors[:2])]
        assert_same(rope._norm_rotate_qk_backward(*laid, *tensors[2:], **angles), expected)
        assert_same(rope._norm_rotate_qk_backward(*laid[:2], *tensors, **angles), expected)


def test_incoming_gradients_may_be_expanded(device):
    """The backward of out.sum() passes a gradient with stride 0."""
    inputs, angles = leaves(device)
    by_sum = grad(sum(out.sum() for out in norm_rotate_qk(*inputs, **angles)), inputs)
    outs = norm_rotate_qk(*inputs, **angles)
    assert_same(by_sum, grad(outs, inputs, [torch.ones_like(out) for out in outs]))


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (0, 2, 8), (2, 3, 2, 0)], ids=str)
@over_heads_too
def test_gradients_of_empty_tensors_are_zero(over_heads, shape, device):
    weight = shape[-2:] if over_heads else shape[-1:]
    inputs = [torch.randn(s, device=device, requires_grad=True) for s in (shape, shape, weight, weight)]
    outs = norm_rotate_qk(*inputs, inv_freq=torch_rope.inv_freq(shape[-1], device=device))
    for _ in range(3):  # the gradients are allocated in memory that held NaNs
        left = [torch.full_like(inputs[-1], torch.nan) for _ in range(5)]
        del left
        for x, g in zip(inputs, grad(outs, inputs, like(outs), retain_graph=True), strict=True):
            assert torch.equal(g, torch.zeros_like(x))


@pytest.mark.parametrize("head_dim", [64, 80, 7])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0], ids=str)
def test_a_head_that_has_no_norm_changes_no_gradient_of_another_head(value, head_dim, device):
    size = (1, 5, 3, 2, head_dim, head_dim // 2 * 2)
    tensors, angles = make(size, Source("table"), "bshd", "bshd", torch.float32, device)
    given = like(tensors[:2])
    expected = rope._norm_rotate_qk_backward(*given, *tensors, **angles, norm_eps=0.0)
    tensors[0][0, 1, 1] = value
    gradients = rope._norm_rotate_qk_backward(*given, *tensors, **angles, norm_eps=0.0)
    assert gradients[0][0, 1, 1].isnan().any() and gradients[2].isnan().any()
    gradients[0][0, 1, 1] = expected[0][0, 1, 1]
    assert_same([g for i, g in enumerate(gradients) if i != 2], [g for i, g in enumerate(expected) if i != 2])


@pytest.mark.parametrize("dtype, fraction", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
@over_heads_too
def test_second_derivatives_are_accurate_in_the_dtypes_of_training(over_heads, dtype, fraction, device):
    """The error is at most this fraction of the largest element that torch finds for the definition in float64."""
    if not supported(device, torch.float64):
        pytest.skip("Apple GPUs have no float64")
    kinds = ("float32", "own")
    tensors, angles = make(
        (2, 9, 4, 2, 16, 12), SOURCES[2], "bhsd", "packed", dtype, device, kinds, over_heads=over_heads
    )
    found = []
    for function, wide in (norm_rotate_qk, False), (definition, True):
        inputs = [(t.double() if wide else t).detach().requires_grad_() for t in tensors]
        torch.manual_seed(1)
        outs = function(*inputs, **angles, **OPTIONS)
        given = [torch.randn(t.shape, device=device).to(t.dtype).requires_grad_() for t in outs]
        first = grad(outs, inputs, given, create_graph=True)
        found.append(grad(first, [*inputs, *given], [torch.randn(t.shape, device=device).to(t.dtype) for t in first]))
    for actual, expected, t in zip(*found, [*tensors, *tensors[:2]], strict=True):
        assert actual.dtype == t.dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=fraction * expected.abs().max().item())


# ---- what autograd calls ----


@pytest.mark.parametrize("create_graph", [False, True])
def test_forward_and_backward_are_one_operator_call_each(create_graph, device):
    inputs, angles = leaves(device, dtype=torch.float32)
    with Calls() as calls:
        outs = norm_rotate_qk(*inputs, **angles)
    assert calls.names == ["rope::norm_rotate_qk"]
    given = like(outs)
    with Calls() as calls:
        gradients = grad(outs, inputs, given, create_graph=create_graph)
    assert calls.names == ["rope::_norm_rotate_qk_backward"]
    assert all(g.requires_grad == create_graph for g in gradients)


@pytest.mark.parametrize("needed", [c for n in range(1, 5) for c in itertools.combinations(NAMES, n)], ids="+".join)
def test_a_frozen_input_has_no_gradient_and_changes_no_other(needed, device):
    """The gradients of the inputs that require grad have the same bits as if nothing were frozen."""
    inputs, angles = leaves(device, dtype=torch.float32)
    outs = norm_rotate_qk(*inputs, **angles, **OPTIONS)
    given = like(outs)
    expected = dict(zip(NAMES, grad(outs, inputs, given), strict=True))
    frozen = {name: t.detach().requires_grad_(name in needed) for name, t in zip(NAMES, inputs, strict=True)}
    outs = norm_rotate_qk(**frozen, **angles, **OPTIONS)
    torch.autograd.backward(
        *zip(*((out, g) for out, g in zip(outs, given, strict=True) if out.requires_grad), strict=True)
    )
    for name, t in frozen.items():
        assert (t.grad is not None) == (name in needed)
        assert t.grad is None or torch.equal(t.grad, expected[name])
    with torch.no_grad():
        assert not any(out.requires_grad for out in norm_rotate_qk(**frozen, **angles, **OPTIONS))


@pytest.mark.parametrize("used", [0, 1], ids=["q", "k"])
def test_an_unused_output_gives_its_inputs_no_gradient(used, device):
    """The gradient of its input and weight is None, not zeros, and the derivatives of the other ones do not change."""
    inputs, angles = leaves(device)
    of_both = norm_rotate_qk(*inputs, **angles, **OPTIONS)
    given = like(of_both)
    expected = grad(of_both, inputs, given)
    out = norm_rotate_qk(*inputs, **angles, **OPTIONS)[used]
    first = grad(out, inputs, given[used], create_graph=True, allow_unused=True)
    assert_same(first[used::2], expected[used::2])
    assert first[1 - used] is first[3 - used] is None
    second = grad(first[used].square().sum(), inputs, allow_unused=True)
    true_out = definition(*inputs, **angles, **OPTIONS)[used]
    true_first = grad(true_out, inputs[used], given[used], create_graph=True)[0]
    same_gradients(second[used::2], grad(true_first.square().sum(), inputs[used::2]))
    assert all(g is None or not g.any() for g in second[1 - used :: 2])


def test_one_tensor_as_q_and_k_gets_the_sum_of_both_gradients(device):
    (q, _, w, _), angles = leaves(device)
    outs = norm_rotate_qk(q, q, w, w, **angles)
    given = like(outs)
    same_gradients(grad(outs, (q, w), given), grad(definition(q, q, w, w, **angles), (q, w), given))


@pytest.mark.parametrize("name", [*NAMES, "cos", "sin", "inv_freq", "positions"])
def test_backward_raises_if_a_saved_tensor_was_overwritten(name, device):
    source = SOURCES[8] if name in ("inv_freq", "positions") else SOURCES[3]
    inputs, angles = leaves(device, source=source, dtype=torch.float32)
    outs = norm_rotate_qk(*inputs, **angles)
    with torch.no_grad():
        (dict(zip(NAMES, inputs, strict=True)) | angles)[name].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(outs, inputs, like(outs))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_bits(use_reentrant, device):
    inputs, angles = leaves(device, dtype=torch.float32)
    function = lambda *t: sum(out.sin().sum() for out in norm_rotate_qk(*t, **angles))  # noqa: E731
    function(*inputs).backward()
    expected = [t.grad for t in inputs]
    again = [t.detach().requires_grad_() for t in inputs]
    checkpoint(function, *again, use_reentrant=use_reentrant).backward()
    assert_same([t.grad for t in again], expected)


# ---- forward mode and torch.func ----


@pytest.mark.shared
@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("moved", [*((n,) for n in NAMES), ("q", "k_norm_weight"), tuple(NAMES)], ids="+".join)
@by_source
def test_tangents_are_those_of_the_definition(source, moved, mode, device):
    """Some or all inputs have a tangent. An output that depends on none of them has no tangent.

    This holds with grad off too.
    """
    over_heads = source is ANGLES[0]
    inputs, angles = leaves(device, source=source, requires_grad=mode == "grad", over_heads=over_heads)
    with fwAD.dual_level(), torch.set_grad_enabled(mode == "grad"):
        duals = [
            fwAD.make_dual(t, torch.randn_like(t)) if n in moved else t for n, t in zip(NAMES, inputs, strict=True)
        ]
        outs, expected = (f(*duals, **angles, **OPTIONS) for f in (norm_rotate_qk, definition))
        for i, (out, by_definition) in enumerate(zip(outs, expected, strict=True)):
            (value, tangent), (_, true_tangent) = fwAD.unpack_dual(out), fwAD.unpack_dual(by_definition)
            assert torch.equal(value, norm_rotate_qk(*inputs, **angles, **OPTIONS)[i])
            assert (tangent is None) == (not {NAMES[i], NAMES[i + 2]} & set(moved))
            assert tangent is None or torch.allclose(tangent, true_tangent)


def loss_of(function, **options):
    def loss(*tensors):
        q, k = function(*tensors, **options)
        return (q.sin() * k.cos()).sum()

    return loss


EVERY = (0, 1, 2, 3)


@pytest.mark.shared
def test_torch_func_gives_the_gradients_of_the_definition(device):
    tensors, angles = leaves(device, requires_grad=False)
    loss, truth = (loss_of(f, **angles, **OPTIONS) for f in (norm_rotate_qk, definition))
    inputs = [t.clone().requires_grad_() for t in tensors]
    expected = grad(truth(*inputs), inputs)
    over_batch = dict(in_dims=(0, 0, None, None))
    same_gradients(torch.func.grad(loss, EVERY)(*tensors), expected)
    same_gradients(vjp(loss, *tensors)[1](torch.ones((), dtype=tensors[0].dtype, device=device)), expected)
    same_gradients(torch.func.grad(lambda *t: vmap(loss, **over_batch)(*t).sum(), EVERY)(*tensors), expected)
    tangents = like(tensors)
    same_gradients(jvp(loss, tuple(tensors), tuple(tangents)), jvp(truth, tuple(tensors), tuple(tangents)))


@pytest.mark.shared
@pytest.mark.parametrize("source, over_heads", [*((s, False) for s in ANGLES), (ANGLES[0], True)], ids=str)
def test_torch_func_gives_the_jacobians_and_hessians_of_the_definition(source, over_heads, device):
    """Forward and reverse mode are nested in every way."""
    tensors, angles = leaves(device, (2, 2, 2, 1, 4, 4), source, requires_grad=False, over_heads=over_heads)
    function, truth = (lambda *t, f=f: f(*t, **angles, **OPTIONS) for f in (norm_rotate_qk, definition))
    loss, true_loss = (loss_of(f, **angles, **OPTIONS) for f in (norm_rotate_qk, definition))
    for mode in jacrev, jacfwd:
        for ours, theirs in zip(mode(function, EVERY)(*tensors), jacrev(truth, EVERY)(*tensors), strict=True):
            same_gradients(ours, theirs)
    expected = hessian(true_loss, EVERY)(*tensors)
    for outer, inner in itertools.product((jacfwd, jacrev), repeat=2):
        for ours, theirs in zip(outer(inner(loss, EVERY), EVERY)(*tensors), expected, strict=True):
            same_gradients(ours, theirs)
    # A transform inside plain autograd.
    inputs = [t.clone().requires_grad_() for t in tensors]
    gradients = grad(sum(g.sum() for g in torch.func.grad(loss, EVERY)(*inputs)), inputs)
    by_input = zip(*expected, strict=True)
    same_gradients(
        gradients,
        [sum(h.sum(tuple(range(h.dim() - x.dim()))) for h in hs) for x, hs in zip(inputs, by_input, strict=True)],
    )
