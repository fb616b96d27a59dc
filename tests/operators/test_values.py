"""Tests that the values of every operator are close to the float64 oracle, and do not depend on the layout."""

import cases
import pytest
import torch
from calls import SOURCES, Source, factors
from oracle import assert_close, limits, limits_of_reference, rotate, without_factor
from same_bits import bits

import torch_rope
from torch_rope import reference

rope = torch.ops.rope

# A table may have the dtype of x; with float64 x it is float64 or float32.
NAMES = "tables", "attention_factor", "inverse", "q_factor"
FACTORS = cases.CALLS | {name: factors("rotate_qk")[name] for name in NAMES}


@pytest.mark.core
@pytest.mark.parametrize(
    "case", cases.covering(FACTORS, interacting=cases.KERNELS, exhaustive=cases.ALL_CALLS), ids=cases.name_of
)
def test_every_operator_is_within_ulps_of_the_oracle(case, device):
    q, k, options = cases.make_qk(device, **case)
    q_before, k_before = q.clone(), k.clone()
    q_out, k_out = rope.rotate_qk(q, k, **options)
    without = without_factor(options)
    by_reference = reference.rotate_qk(q, k, **options) if not cases.on_gpu(device) else (None, None)
    for x, out, other, of_side in (q, q_out, by_reference[0], options), (k, k_out, by_reference[1], without):
        expected = rotate(x, **of_side)
        assert_close(out, expected, *limits(x.dtype, of_side, case["attention_factor"]))
        assert out.stride() == torch.empty_like(x).stride()
        if other is not None:
            assert_close(other, expected, *limits_of_reference(x.dtype, of_side, case["attention_factor"]))
    kept = torch.ones(case["size"][-2], dtype=torch.bool)
    kept.narrow(0, options.get("rotary_start", 0), case["size"][-1]).zero_()
    assert torch.equal(k_out[..., kept], k[..., kept])
    assert torch.equal(q, q_before) and torch.equal(k, k_before)

    # The other operators give the same bits.
    assert torch.equal(rope.rotate(k, **without), k_out)
    rope.rotate_qk_(q, k, **options)
    assert torch.equal(q, q_out) and torch.equal(k, k_out)
    q_out = rope.rotate(q_before, **without)
    assert torch.equal(q_out[..., kept], q_before[..., kept])
    rope.rotate_(q_before, **without)
    assert torch.equal(q_before, q_out) and ("q_factor" in options or torch.equal(q, q_out))


@pytest.mark.cpu
@pytest.mark.parametrize("tokens", [1100, 3])
@pytest.mark.parametrize("layouts", [("bshd", "every second channel"), ("bhds", "bhds")])
def test_the_number_of_threads_does_not_change_a_bit(layouts, tokens):
    """If tokens are adjacent in memory, as in a convolution's q, threads divide the heads, and not the tokens."""
    size, (of_q, of_k) = (2, tokens, 7, 3, 24, 16), layouts
    q, k, angles = cases.make_qk("cpu", size=size, source=Source("inv_freq"), q=of_q, k=of_k)
    q, k = q[..., :16], k[..., :16]  # results have other strides
    expected = torch_rope.rotate_qk(q.contiguous(), k.contiguous(), **angles)
    by_head = torch.rand(2, 2, tokens, 7, 8).unbind(0)
    for _ in cases.thread_counts():
        assert all(map(torch.equal, torch_rope.rotate_qk(q, k, **angles), expected))
        in_place = [t.clone(memory_format=torch.preserve_format) for t in (q, k)]
        torch_rope.rotate_qk_(*in_place, **angles)
        assert all(map(torch.equal, in_place, expected))
        assert torch.equal(torch_rope.rotate(q, *by_head), torch_rope.rotate(q.contiguous(), *by_head))


@pytest.mark.parametrize("heads, head_dim", [(0, 8), (2, 0)])
def test_tokens_without_elements_are_no_work(heads, head_dim, device):
    """No machine could walk through so many tokens."""
    x, cos = torch.empty(2**40, heads, head_dim, device=device), torch.rand(3, head_dim // 2, device=device)
    positions, weight = torch.zeros(1, dtype=torch.int64, device=device).expand(2**40), torch.ones(head_dim).to(device)
    of_norm, given = (x, x, weight, weight, None, None, cos[0]), (cos, cos, None, positions)
    torch_rope.rotate_into_cache_(x, x, x, x, x.clone(), *given, slots=positions)
    *grads, of_weight, _ = rope._norm_rotate_qk_backward(x, x, *of_norm)
    outs = *torch_rope.norm_rotate_qk(*of_norm), *torch_rope.rotate_qk(x, x, *given), *grads
    assert all(out.shape == x.shape for out in outs) and not of_weight.any()
    assert torch_rope.cos_sin(positions, cos[0, :0])[0].shape == (2**40, 0)


def test_inputs_may_be_expanded(device):
    """A tensor that is only read may have stride 0, such as one head seen as four, or one table row for all tokens."""
    x, freq = torch.randn(2, 5, 1, 16, device=device), torch_rope.inv_freq(16, device=device)
    three = torch.tensor([3], device=device)
    cos, sin = torch_rope.cos_sin(three, freq)
    many = x.expand(2, 5, 4, 16)
    out = rope.rotate(many, cos.expand(5, 8), sin.expand(5, 8))
    assert torch.equal(out, rope.rotate(many.contiguous(), cos.repeat(5, 1), sin.repeat(5, 1)))
    assert torch.equal(out, rope.rotate(many, inv_freq=freq, positions=three.int().expand(5)))
    rows, equal = (cos.expand(5, 8), sin.expand(5, 8)), torch.rand(1, device=device).expand(16)
    normed = rope.norm_rotate_qk(many, many, equal, equal, *rows)
    dense = [t.contiguous() for t in (many, many, equal, equal, *rows)]
    assert all(map(torch.equal, normed, rope.norm_rotate_qk(*dense)))
    for result in (out, *normed):
        assert result.stride() == torch.empty_like(many).stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_nan_with_any_payload_stays_a_nan(dtype, device):
    """A NaN may have all its bits set. Rounding that to bfloat16 by an addition would carry it into a zero."""
    nan = torch.full((4,), -1, dtype=torch.int32, device=device).view(torch.float32)
    x = torch.ones(1, 1, 2, 8, device=device, dtype=dtype)
    freq = torch_rope.inv_freq(8, device=device)
    for out in (
        torch_rope.rotate(x, inv_freq=nan),
        torch_rope.rotate(x, nan[None], nan[None]),
        torch_rope.norm_rotate_qk(x, x, nan.repeat(2), nan.repeat(2), inv_freq=freq)[0],
        torch_rope.cos_sin(nan, freq, dtype=dtype)[0],
        torch_rope.cos_sin(nan.new_ones(3), nan, dtype=dtype)[1],
    ):
        assert out.isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_special_values_round_as_in_torch(dtype, interleaved, device):
    """Infinities, NaNs, subnormals and the largest numbers round as torch rounds them. A NaN changes only its pair."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.tiny, info.smallest_normal / 8, info.max, -info.max, torch.inf, torch.nan, 1, 65519, 3e-8]
    x = torch.tensor(values * 8, dtype=torch.float64).to(dtype).view(1, 11, 1, 8).to(device)
    cos, sin = torch_rope.cos_sin(torch.arange(11, device=device), torch_rope.inv_freq(8, device=device))
    out = torch_rope.rotate(x, cos, sin, interleaved=interleaved)
    x, cos, sin, out = (t.cpu() for t in (x, cos, sin, out))
    pair = -1 if interleaved else -2
    a, b = x.float().unflatten(-1, (4, 2) if interleaved else (2, 4)).unbind(pair)
    c, s = cos.view(1, 11, 1, 4), sin.view(1, 11, 1, 4)
    expected = torch.stack([torch.addcmul(-b * s, a, c), torch.addcmul(a * s, b, c)], pair).flatten(-2).to(dtype)
    same_kind = torch.isfinite(out) == torch.isfinite(expected)
    assert same_kind.all() and torch.equal(out.isnan(), expected.isnan())
    finite = torch.isfinite(expected)
    smallest = 2**-24 if dtype == torch.float16 else 2 * info.tiny if device == "mps" else 0  # Metal may flush
    torch.testing.assert_close(out[finite], expected[finite], rtol=2 * info.eps, atol=smallest)


# ---- eager rounding: the bits of the formula in plain PyTorch operators, which the reference is ----
# tests/exhaustive/models/test_families.py shows that these are the bits of real models.

# The rounding happens in the same loops as without eager_rounding, so fewer layouts and sources are enough.
OF_EAGER = ["bshd", "bhsd", "bhds", "odd start"]
EAGER = cases.CALLS | {
    "source": [SOURCES[i] for i in (0, 2, 3, 6, 14)],
    "q": OF_EAGER,
    "k": OF_EAGER,
    "tables": ["dtype of x", "float32"],
    "attention_factor": [1.0, 1.2079441541679836],
    "inverse": [False, True],
    "eager_rounding": [True],
    "q_factor": [None, "[S]", "[B,S,H]"],
}
LOOPS = [("size", "dtype", "interleaved")]  # which decide which loop or kernel runs
NIGHT = (*LOOPS[0], "source", "tables")  # all of whose combinations run in make exhaustive


def on_cpu(values):
    return {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in values.items()}


def tables_of(angles, x):
    """Returns the angles with tables instead of inv_freq, made by the back end of x. The reference computes frequencies
    in float64, and their cos and sin may differ in the last bit."""
    if "inv_freq" not in angles:
        return angles
    angles = dict(angles)
    inv_freq, positions, offset = (angles.pop(name, None) for name in ("inv_freq", "positions", "offset"))
    positions = torch.arange(x.shape[1], device=x.device) if positions is None else positions.long()
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = rope.cos_sin(torch.atleast_2d(positions + (offset or 0)), inv_freq, dtype=dtype)
    return angles | {"cos": cos, "sin": sin}


@pytest.mark.core
@pytest.mark.parametrize("case", cases.covering(EAGER, interacting=LOOPS, exhaustive=NIGHT), ids=cases.name_of)
def test_results_and_gradients_have_the_bits_of_plain_operators(case, device):
    """The second derivative too: the gradient of the gradient with respect to the gradient that comes in."""
    q, k, options = cases.make_qk(device, **case)
    given = [torch.randn(x.shape, dtype=torch.float64).to(x.dtype) for x in (q, k)]
    derivatives = []
    for functions, to, its_own in (rope, device, options), (reference, "cpu", on_cpu(tables_of(options, q))):
        xs = [x.detach().to(to).requires_grad_() for x in (q, k)]
        gs = [g.to(to).requires_grad_() for g in given]
        outs = functions.rotate_qk(*xs, **its_own)
        gradients = torch.autograd.grad(outs, xs, gs, create_graph=True)
        derivatives.append([*outs, *gradients, *torch.autograd.grad(gradients, gs, [g.detach() for g in gs])])
    for found, expected in zip(*derivatives, strict=True):
        assert torch.equal(found.cpu(), expected)
    (q_out, k_out, *_), _ = derivatives
    assert torch.equal(rope.rotate(k, **without_factor(options)), k_out)
    rope.rotate_qk_(q, k, **options)
    assert torch.equal(q, q_out) and torch.equal(k, k_out)


# ---- the bits of the CPU ----


def test_results_have_the_bits_of_the_cpu(device, tmp_path):
    """All back ends compile the same files for the rotation and for angles."""
    if not cases.on_gpu(device):
        pytest.skip("compares a GPU with the CPU")
    expected = bits("cpu", device)
    if cases.EMULATED:  # then this process has no CPU kernels
        file = tmp_path / "bits"
        done = cases.python(f"import same_bits, torch; torch.save(list(same_bits.bits('cpu', 'cpu')), {str(file)!r})")
        assert done.returncode == 0, done.stderr
        expected = torch.load(file)
    for actual, e in zip(bits(device, device), expected, strict=True):
        assert torch.equal(actual.cpu(), e)


# ---- element offsets ----


@pytest.mark.parametrize(
    "strides",
    [
        *([2**30 + 2**20, 2**30, 2**28], [2**28, 2**30, 2**30 + 2**20]),  # none exceeds 2^31, and only their sum does
        *([far, *rest] for far in (2**31 + 8, 2**32 + 16) for rest in ([128, 64], [64, 128])),
    ],
    ids=str,
)
def test_sequences_tokens_and_heads_may_be_far_apart_in_memory(strides, untouched, device):
    x = untouched(sum(strides) + 2**20, torch.bfloat16).as_strided((2, 2, 2, 64), (*strides, 1), 2**19)
    x.copy_(torch.randn(x.shape, device=device))
    dense, freq, weight = x.contiguous(), torch_rope.inv_freq(64, device=device), torch.rand(64, device=device)
    y, slots = dense.clone(), torch.tensor([[4, 1], [3, 6]], device=device)
    results = []
    for t in x, dense:
        caches = torch.zeros(2, 3, 4, 2, 64, device=device).bfloat16()
        rope.rotate_into_cache_(y.clone(), t, t, *caches, inv_freq=freq, slots=slots)
        found = [*caches, *rope.norm_rotate_qk(t, y, weight, weight, inv_freq=freq)]
        found += [out for eager in (False, True) for out in rope.rotate_qk(t, y, inv_freq=freq, eager_rounding=eager)]
        found += rope._norm_rotate_qk_backward(t, y, t, y, weight, weight, inv_freq=freq)
        rope.rotate_(t, inv_freq=freq)
        results.append([*found, t])
    assert all(map(torch.equal, *results))


FAR = [  # the shapes of arguments; in each case one of them has elements far from its first
    dict(k_scale=(2,), v_scale=(2,), k_cache=(3, 2, 4), v_cache=(3, 2, 4), inv_freq=(2, 2)),
    dict(q_scale=(2,), q_out=(1, 2, 2, 4), inv_freq=(2,)),
    dict(q_norm_weight=(4,), k_norm_weight=(4,), cos=(2, 2), sin=(2, 2), positions=(2,), slots=(2,)),
    dict(q_norm_weight=(2, 4), k_norm_weight=(2, 4), cos=(1, 2, 2, 2), sin=(1, 2, 2, 2), slots=(2,)),
]


@pytest.mark.parametrize("shapes", FAR, ids=" ".join)
def test_element_offsets_of_each_argument_may_exceed_2_32(shapes, untouched, device):
    far, expected, half = 2**32 + 16, None, torch.float16
    near = {x: torch.randn(1, 2, 2, 4).to(half) for x in "qkv"}
    near |= {f"{x}_cache": torch.zeros(3, 2, 4, dtype=half) for x in "kv"}
    for name, shape in shapes.items():
        if name in ("positions", "slots"):
            near[name] = torch.tensor([1, 0])
        elif name.endswith("cache") or name == "q_out":
            near[name] = torch.zeros(shape, dtype=torch.int8)
        else:
            near[name] = torch.rand(shape).to(torch.float32 if name.endswith(("scale", "freq")) else half)
    near = {name: t.to(device) for name, t in near.items()}
    for name in [None, *shapes]:
        tensors = {n: t.clone() for n, t in near.items()}
        if name:
            t = near[name]
            strides = {1: (far,), 2: (far, 1), 3: (4, far, 1), 4: (8, 4, far, 1)}[t.dim()]
            tensors[name] = untouched(3 * far + 64, t.dtype).as_strided(t.shape, strides).copy_(t)
        rope.rotate_into_cache_(**tensors)
        found = [tensors[n].contiguous() for n in ("q", "q_out", "k_cache", "v_cache") if n in tensors]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), name
