"""Tests the values and the gradients of norm_rotate_qk: they are close to the oracle, and have the same bits in every
layout. For derivatives of any order see test_autograd.py."""

import functools
import itertools

import cases
import pytest
import torch
from calls import DTYPES, LAYOUTS, SOURCES, Source, factors, make, tensor
from oracle import assert_accurate, assert_close, limits, limits_of_reference, rotate, ulp, without_factor

import torch_rope
from torch_rope import reference

rope = torch.ops.rope
norm_rotate_qk = rope.norm_rotate_qk

FACTORS = factors("_norm_rotate_qk_backward") | {
    "size": cases.SIZES,
    "source": SOURCES[:: 2 if cases.SLOW else 1],
    "norm_eps": [1e-6, 1e-5, 0.0, 0.5, 1e3],
    "dims": [4],
}


def make_norm(device, **case):
    """Returns [q, k, q_norm_weight, k_norm_weight], and the other arguments of a call of norm_rotate_qk."""
    cases.need(device, case.get("dtype"), case["source"].freq_dtype)
    call = make("norm_rotate_qk", device, **{"k_weight": "float32"} | case)
    return [call.pop(name) for name in ("q", "k", "q_norm_weight", "k_norm_weight")], call


def assert_right(outs, tensors, options, limits=limits):
    of_sides = options, without_factor(options)
    for x, out, w, of_side in zip(tensors[:2], outs, tensors[2:], of_sides, strict=True):
        assert out.dtype == x.dtype and out.shape == x.shape
        assert_close(out, rotate(x, **of_side, norm_weight=w), *limits(x.dtype, of_side, norm=True))


def like(outs):
    """Returns random dense gradients for outs, whose values do not depend on the strides of outs."""
    return [torch.randn(t.shape, dtype=t.dtype, device=t.device) for t in outs]


# ---- against the oracle ----


@pytest.mark.core
@pytest.mark.parametrize(
    "case", cases.covering(FACTORS, interacting=cases.KERNELS, exhaustive=cases.ALL_CALLS), ids=cases.name_of
)
def test_results_and_gradients_are_within_roundings_of_the_oracle(case, device):
    """A gradient has the dtype and shape of its input. Results, and gradients of q and k, have the strides of
    torch.empty_like."""
    tensors, options = make_norm(device, **case)
    before, inputs = [t.clone() for t in tensors], [t.detach().requires_grad_() for t in tensors]
    outs = norm_rotate_qk(*inputs, **options)
    assert_right(outs, tensors, options)
    given = [tensor(case[f"{name}_grad"], x.shape, x.dtype, device) for name, x in zip("qk", inputs, strict=False)]
    gradients = torch.autograd.grad(outs, inputs, given)
    assert_accurate(gradients, tensors, given, options)
    cases.assert_same(tensors, before)
    for x, g in zip(inputs, gradients, strict=True):
        assert g.dtype == x.dtype and g.shape == x.shape
    for x, out, g in zip(tensors, outs, gradients, strict=False):
        assert out.stride() == g.stride() == torch.empty_like(x).stride()
    in_place = [t.clone() for t in tensors[:2]]
    rope.norm_rotate_qk_(*in_place, *tensors[2:], **options)
    cases.assert_same(in_place, outs)
    if not cases.on_gpu(device):
        assert_right(reference.norm_rotate_qk(*tensors, **options), tensors, options, limits_of_reference)


# (head_dim for each dtype, heads of q, heads of k, whether they are normalised together); with as many heads in q as in
# k, tables are by head
LONG_SUMS = [
    ((16384, 1024, 768, 4096), 4, 2, False),
    *(((128, 64, 20, 256), *of) for of in ((3, 3, False), (12, 12, True), (65, 22, True))),
]


@pytest.mark.parametrize("head_dims, heads, k_heads, over_heads", LONG_SUMS)
@pytest.mark.parametrize("number, dtype", list(enumerate(DTYPES)), ids=str)
def test_long_sums_are_accurate(number, dtype, head_dims, heads, k_heads, over_heads, device):
    """Some heads of q hold equal values. The roundings of many equal squares all have one sign and add up."""
    size = (1, 5, heads, k_heads, *[head_dims[number]] * 2)
    source, weights = Source("head") if heads == k_heads else SOURCES[1], {"q_weight": "own", "k_weight": "own"}
    tensors, angles = make_norm(
        device, size=size, source=source, dtype=dtype, over_heads=over_heads, norm_weight_offset=1.0, **weights
    )
    if over_heads:
        tensors[0][..., ::2, :] = 1.2345
    else:
        tensors[0].copy_(torch.tensor([1.2345, 0.7071, 1e-3, 77.7])[:heads, None])
    outs = norm_rotate_qk(*tensors, **angles)
    assert_right(outs, tensors, angles)
    given = like(outs)
    gradients = rope._norm_rotate_qk_backward(*given, *tensors, **angles)
    assert_accurate(gradients, tensors, given, angles)


# ---- the same bits ----


ONE_HEAD = {
    "norm": ["none", "each head", "over heads"],
    "dtype": DTYPES,
    "head_dim": [128, 80, 7],
    "interleaved": [False, True],
}


@pytest.mark.parametrize("case", cases.covering(ONE_HEAD), ids=cases.name_of)
def test_a_head_has_the_same_bits_in_any_layout_and_any_call(case, device):
    """Also in tensors of three dimensions."""
    norm, dtype, head_dim, interleaved = case.values()
    size, over_heads = (2, 5, 6, 2, head_dim, head_dim // 2 * 2), norm == "over heads"
    (q, k, *weights), angles = make_norm(device, size=size, source=SOURCES[0], dtype=dtype, over_heads=over_heads)

    def call(q, k, q_weight=weights[0], k_weight=weights[1], offset=2):
        options = {**angles, "offset": offset, "interleaved": interleaved}
        given = () if norm == "none" else (q_weight, k_weight)
        return (norm_rotate_qk if given else rope.rotate_qk)(q, k, *given, **options)

    whole = call(q, k)
    for layouts in zip(LAYOUTS, reversed(LAYOUTS), strict=True):
        laid = [tensor(of, t.shape, dtype, device).copy_(t) for of, t in zip(layouts, (q, k), strict=True)]
        cases.assert_same(call(*laid), whole)
    for token, head in (0, 1), (4, 0):
        here = (slice(1, 2), slice(token, token + 1), slice(None) if over_heads else slice(head, head + 1))
        cases.assert_same(call(q[here], k[here], offset=2 + token), [t[here] for t in whole])
    cases.assert_same(call(q[1], k[1]), [t[1] for t in whole])
    # q has the same bits with another k, and if it is passed as k.
    assert torch.equal(call(q, q, k_weight=weights[0])[1], whole[0])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_pair_has_the_same_bits_in_a_vector_loop_and_in_its_tail(dtype, interleaved, norm, device):
    """Fewer rotated pairs move the end of the vector loop.

    The values are small integers, whose sum of squares is exact, so a head may be put into another order.
    """
    tensors, angles = make_norm(device, size=(2, 9, 3, 1, 128, 128), source=SOURCES[0], dtype=dtype)
    tensors = [torch.randint(-9, 10, t.shape, device=device).to(t.dtype) for t in tensors[: 4 if norm else 2]]
    function = norm_rotate_qk if norm else rope.rotate_qk
    whole = function(*tensors, **angles, interleaved=interleaved)
    for pairs in (1, 3, 13, 31):
        order = torch.arange(128, device=device)
        if not interleaved:  # the first pairs come first
            order = torch.cat([order[:pairs], order[64 : 64 + pairs], order[pairs:64], order[64 + pairs :]])
        tables = [angles[name][:, :pairs] for name in ("cos", "sin")]
        outs = function(*(t[..., order] for t in tensors), *tables, interleaved=interleaved)
        cases.assert_same([t[..., : 2 * pairs] for t in outs], [t[..., order[: 2 * pairs]] for t in whole])


@pytest.mark.parametrize("head_dim, over_heads, dtype", [(128, False, torch.bfloat16), (100, True, torch.float32)])
def test_many_tokens_have_the_bits_of_shorter_calls(head_dim, over_heads, dtype, device):
    """The bits do not depend on the number of threads either."""
    seq = cases.many(800, device)
    size, source = (2, seq, 8, 2, head_dim, head_dim), Source("inv_freq")
    (q, k, *weights), angles = make_norm(device, size=size, source=source, dtype=dtype, over_heads=over_heads)
    whole = norm_rotate_qk(q, k, *weights, **angles)
    for start in range(0, seq, seq // 8):
        piece = slice(start, start + seq // 8)
        outs = norm_rotate_qk(q[:, piece], k[:, piece], *weights, **angles, offset=start)
        cases.assert_same(outs, [t[:, piece] for t in whole])
    for _ in cases.thread_counts():
        cases.assert_same(norm_rotate_qk(q, k, *weights, **angles), whole)


# ---- eager rounding: the bits of a model in plain operators, but for the order of the sum ----


def llama(x, weight, eps):
    """Rounds before the weight and after it, as the norms of Llama, Qwen3 and OLMo-2 do."""
    wide, dims = x.float(), (-1, -2)[: weight.dim()]
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)).to(x.dtype)


def gemma(x, weight, eps):
    """Multiplies by 1 + weight and rounds once, as the norms of Gemma and of Qwen3.5 do."""
    wide, dims = x.float(), (-1, -2)[: weight.dim()]
    return (wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps) * (1.0 + weight.float())).type_as(x)


def torchs(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


# The formula of a model's norm, and the arguments that choose it.
MODELS = {
    llama: {"round_before_weight": True},
    gemma: {"norm_weight_offset": 1.0},
    torchs: {},
}


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of F.rms_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", MODELS, ids=lambda norm: norm.__name__)
def test_a_model_in_plain_operators_differs_in_one_of_10000_elements(norm, dtype, device):
    """A norm sums the squares in another order, so that 1 / rms may be the next float32: then a product that lies near
    the middle of two numbers is rounded to the other one. A factor of q multiplies what is rounded."""
    differ, total, flags = 0, 0, MODELS[norm]
    sizes = [(64, 1), (80, 30), (96, 1), (128, 60), (256, 20)]
    dtypes = [(dtype, dtype), (dtype, torch.float32), *([(torch.float32, dtype)] if norm is not llama else [])]
    for (head_dim, seq), over_heads, (of_weight, of_tables) in itertools.product(sizes, (False, True), dtypes):
        seq = min(seq, 5) if cases.SLOW else seq
        q, k = (torch.randn(2, seq, heads, head_dim).to(dtype) for heads in (8, 3))
        weights = [(torch.rand(*x.shape[-2:][not over_heads :]) + 0.3).to(of_weight) for x in (q, k)]
        tables = reference.cos_sin(torch.arange(40, 40 + seq), torch_rope.inv_freq(head_dim), dtype=of_tables)
        angles, expected, factor = [t[None] for t in tables], [], None if of_weight == of_tables else torch.rand(seq)
        for x, w in zip((q, k), weights, strict=True):
            x, (cos, sin) = norm(x, w, 1e-6), (torch.cat([t, t], -1).unsqueeze(2) for t in angles)
            expected.append((x * cos + rotate_half(x) * sin).to(dtype))
        if factor is not None:
            expected[0], factor = (expected[0] * factor[:, None, None]).to(dtype), factor.to(device)
        given = [t.to(device) for t in (q, k, *weights, *angles)]
        outs = norm_rotate_qk(*given, **flags, eager_rounding=True, q_factor=factor)
        for out, e in zip(map(torch.Tensor.cpu, outs), expected, strict=True):
            magnitude = e.double().unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 1, 2)
            error = (out.double() - e.double()).abs() / torch.from_numpy(ulp(magnitude.numpy(), dtype))
            assert error.max() <= 2  # the other number, rotated and rounded
            differ, total = differ + int((out != e).sum()), total + e.numel()
    assert differ <= total / 10000


def test_derivatives_of_eager_rounding_are_those_of_one_rounding(device):
    inputs, options = make_norm(device, source=SOURCES[3], dtype=torch.bfloat16, q_weight="own", k_weight="own")
    found = []
    for eager in False, True:
        function = functools.partial(norm_rotate_qk, **options, eager_rounding=eager, round_before_weight=eager)
        leaves = [t.detach().requires_grad_() for t in inputs]
        gradients = torch.autograd.grad(function(*leaves), leaves, inputs[:2])
        found.append([*gradients, *torch.func.jvp(function, tuple(inputs), tuple(inputs))[1]])
    cases.assert_same(*found)


# ---- layers without k, which share a cache, and without rotation ----


@pytest.mark.parametrize("rotary_dim", [16, 0])
@pytest.mark.parametrize("over_heads", [False, True])
@pytest.mark.parametrize("source", [Source("table", offset=3), Source("head"), Source("inv_freq", offset=-2)], ids=str)
def test_q_has_the_same_bits_without_k(source, over_heads, rotary_dim, device):
    """In every operator, and so have its gradients. Without rotation, rotary_dim is 0; norm and factor stay."""
    size, factor = (2, 5, 3, 2, 24, rotary_dim), {"q_factor": "[B,S]", "norm_weight_offset": 1.0}
    tensors, options = make_norm(device, size=size, source=source, over_heads=over_heads, **factor)
    plain = {name: a for name, a in options.items() if name != "norm_weight_offset"}
    results = []
    for heads in (tensors[1].shape[-2], 0):
        q, k, q_weight, k_weight = tensors
        k, k_weight = k[..., :heads, :], k_weight[:heads] if over_heads else k_weight
        leaves = [t.detach().requires_grad_() for t in (q, q_weight)]
        out, k_out = norm_rotate_qk(leaves[0], k, leaves[1], k_weight, **options)
        found = [out, *torch.autograd.grad(out, leaves, out.detach()), rope.rotate_qk(q, k, **plain)[0]]
        in_place, cache = [q.clone() for _ in range(3)], torch.zeros(2, 8, *tensors[1].shape[-2:], device=device)
        rope.rotate_qk_(in_place[0], k.clone(), **plain)
        rope.norm_rotate_qk_(in_place[1], k.clone(), q_weight, k_weight, **options)
        norms, cells = (
            {"q_norm_weight": q_weight, "k_norm_weight": k_weight},
            torch.arange(10, device=device).view(2, 5),
        )
        cells = {} if source.kind == "head" or "offset" not in options else {"slots": cells}
        rope.rotate_into_cache_(
            in_place[2], k, tensors[1], cache[:, :, :heads].clone(), cache, **options, **norms, **cells
        )
        results.append([*found, *in_place, cache])
        assert k_out.shape == k.shape
    cases.assert_same(*results)
    assert torch.equal(results[0][0], results[0][-2]) and cache.any()
    if rotary_dim == 0:
        assert torch.equal(results[0][3], q * options["q_factor"][..., None, None])


# ---- corners ----


@pytest.mark.parametrize("head_dim, norm_eps", [(64, 1e-6), (20, 1e-6), (64, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_special_values_give_what_the_formula_gives(dtype, head_dim, norm_eps, device):
    """The results are those of the formula in float32 in torch's operators.

    rsqrt of a sum that overflows (largest, inf) is 0, so finite numbers become 0, and an infinity and its pair become
    NaN. rsqrt(0) is infinite, so zeros without norm_eps become NaN. A NaN fills its head. Squares that underflow count
    as zero. A head changes no other head, whatever it holds.
    """
    info = torch.finfo(dtype)
    plain = torch.linspace(-2, 2, head_dim, dtype=torch.float64)
    heads = {"plain": plain, "zeros": 0 * plain, "largest": plain.sign() * info.max, "tiny": plain * info.tiny}
    for name, value in ("inf", torch.inf), ("minus inf", -torch.inf), ("nan", torch.nan), ("one large", info.max):
        heads[name] = torch.where(torch.arange(head_dim) == 3, value, plain)
    if device == "mps" and norm_eps == 0:
        del heads["tiny"]  # Metal may take subnormal numbers for zeros
    x = torch.stack([t for head in heads.values() for t in (head, plain)])[None, :, None].to(dtype).to(device)
    w = (torch.rand(head_dim) * 2 - 0.5).to(device)
    cos, sin = torch_rope.cos_sin(torch.arange(32, device=device), torch_rope.inv_freq(head_dim, device=device))
    for interleaved in (False, True):
        out, _ = norm_rotate_qk(x, x, w, w, cos, sin, norm_eps=norm_eps, interleaved=interleaved)
        wide = x.cpu().float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps) * w.cpu()
        expected = rope.rotate(normed, cos.cpu(), sin.cpu(), interleaved=interleaved).to(dtype)
        limit = 4 * info.eps
        torch.testing.assert_close(out.cpu(), expected, equal_nan=True, rtol=limit, atol=limit)
    alone = norm_rotate_qk(x[:, :1], x[:, :1], w, w, cos, sin, norm_eps=norm_eps, interleaved=True, offset=1)[0]
    assert alone.isfinite().all() and torch.equal(alone, out[:, 1:2])


# ---- gradients ----


@pytest.mark.parametrize("dtype, over_heads", [(torch.float32, False), (torch.bfloat16, True)], ids=str)
@pytest.mark.parametrize("positive", [False, True])
def test_gradients_of_weights_are_accurate_for_many_tokens(positive, dtype, over_heads, device):
    """All terms of the sum may have one sign. The bits are the same each time, with any number of threads and in any
    layout: the order of a sum is the order of tokens and heads, not of their addresses."""
    heads = (8, 2) if positive else (2, 8)
    size = (2, cases.many(1000, device), *heads, 24, 16)
    tensors, angles = make_norm(device, size=size, source=SOURCES[0], dtype=dtype, over_heads=over_heads)
    outs = norm_rotate_qk(*tensors, **angles)
    given = list(outs) if positive else like(outs)  # with outs the terms are squares times the weight
    gradients = rope._norm_rotate_qk_backward(*given, *tensors, **angles)
    assert_accurate(gradients, tensors, given, angles)
    for _ in cases.thread_counts():
        cases.assert_same(rope._norm_rotate_qk_backward(*given, *tensors, **angles), gradients)
    for layout in LAYOUTS:
        laid = [tensor(layout, t.shape, dtype, device).copy_(t) for t in (*given, *tensors[:2])]
        cases.assert_same(rope._norm_rotate_qk_backward(*laid, *tensors[2:], **angles), gradients)


@pytest.mark.parametrize("head_dim, value", [(64, torch.nan), (80, torch.inf), (7, 0.0)])
def test_a_head_that_has_no_norm_changes_no_gradient_of_another_head(head_dim, value, device):
    size = (1, 5, 3, 2, head_dim, head_dim // 2 * 2)
    tensors, angles = make_norm(device, size=size, source=SOURCES[0])
    given = like(tensors[:2])
    expected = rope._norm_rotate_qk_backward(*given, *tensors, **angles, norm_eps=0.0)
    tensors[0][0, 1, 1] = value
    gradients = rope._norm_rotate_qk_backward(*given, *tensors, **angles, norm_eps=0.0)
    assert gradients[0][0, 1, 1].isnan().any() and gradients[2].isnan().any()
    gradients[0][0, 1, 1] = expected[0][0, 1, 1]
    cases.assert_same([g for i, g in enumerate(gradients) if i != 2], [g for i, g in enumerate(expected) if i != 2])
