"""Tests of what is special to the Metal back end: its limits, its bits, and how the host launches kernels.

On a Mac these tests run on the GPU, except those that make limits smaller or ask which kernel ran.
"""

import collections
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import ALL_CALLS, CALLS, KERNELS, covering, make_qk, moved
from metal_calls import HALVES, INTERLEAVED, NORM, freqs, one_dispatch, ops, randn, table_backward, tables, weights_of

import torch_rope
from torch_rope import reference

# ---- positions and slots that are out of range ----


def rows(x):
    """Returns the numbers of the rows that have an element other than zero."""
    return x.flatten(1).any(-1).nonzero().flatten().tolist()


@NORM
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_position_out_of_range_gives_nan_and_writes_no_cell(dtype, norm, device):
    far = 2**31 - 1 if dtype == torch.int32 else 2**40
    positions = torch.tensor([3, 8, -1, far, -far, 7], dtype=dtype).to("mps")
    wrong, right, (cos, sin) = [1, 2, 3, 4], [0, 5], tables(8, 32)
    q, k, v, weights = randn(6, 5, 48), randn(6, 2, 48), randn(6, 2, 48), weights_of(48) if norm else {}
    op, extra = ops.norm_rotate_qk if norm else ops.rotate_qk, weights.values()
    expected = op(q[right], k[right], *extra, cos, sin, positions=positions[right])
    outs = op(q, k, *extra, cos, sin, positions=positions)
    for out, e, x in zip(outs, expected, (q, k), strict=True):
        assert torch.equal(out[right], e) and out[wrong][..., :32].isnan().all()
        assert not out[..., 32:].isnan().any() and (norm or torch.equal(out[..., 32:], x[..., 32:]))
    tabled, slots = dict(cos=cos, sin=sin), dict(slots=torch.tensor([1, 2, 4, 0, 3, -1]).to("mps"))
    # Without slots the table or the cache ends after position 7.
    for angles, where, size, cells in (
        (tabled, slots, 12, [1]),
        (tabled, {}, 12, [3, 7]),
        (dict(inv_freq=freqs(32)), {}, 8, [3, 7]),
    ):
        caches, x = [torch.zeros(size, 2, 48, device="mps") for _ in "kv"], q.clone()
        ops.rotate_into_cache_(x, k, v, *caches, **angles, positions=positions, **where, **weights)
        assert x[wrong][..., :32].isnan().all() and not x[right].isnan().any() and not x[..., 32:].isnan().any()
        assert all(rows(cache) == cells and cache.count_nonzero() == len(cells) * 2 * 48 for cache in caches)
    grads = table_backward(q, q, cos, sin, positions)
    for out, e in zip(grads, table_backward(q[right], q[right], cos, sin, positions[right]), strict=True):
        assert torch.equal(out, e) and not set(rows(out)) - {3, 7}


@NORM
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_slot_past_the_cache_gives_nan_in_q_and_writes_no_cell(dtype, norm, device):
    far = 2**31 - 1 if dtype == torch.int32 else 2**33 + 1
    slots = torch.tensor([5, 12, far, -far, 0], dtype=dtype).to("mps")
    for shapes in ((64,), (64,)), ((4, 64), (2, 64)):  # a norm of each head, and over all heads
        q, k, v = randn(5, 4, 64), randn(5, 2, 64), randn(5, 3, 64)
        weights = weights_of(*shapes[0], k_shape=shapes[1]) if norm else {}
        caches = [torch.zeros(3, 4, heads, 64, device="mps") for heads in (2, 3)]
        ops.rotate_into_cache_(q, k, v, *caches, *tables(5, 64), slots=slots, **weights, norm_v=norm)
        assert q[1:3].isnan().all() and not q[[0, 3, 4]].isnan().any()
        assert norm or torch.equal(caches[1].view(12, 3, 64)[[5, 0]], v[[0, 4]])
        assert all(rows(cache.flatten(0, 1)) == [0, 5] for cache in caches)


def test_a_position_that_overflows_is_out_of_range(device):
    positions = torch.tensor([2**63 - 3, -(2**63) + 3, 0], device="mps")
    q, k, (cos, sin) = randn(3, 1, 32), randn(3, 1, 32), tables(8, 32)
    for offset, inside, entries in (5, [2], [5]), (-(2**63), [], []), (-(2**63) + 5, [0], [2]), (2**63 - 1, [1], [2]):
        out, _ = ops.rotate_qk(q, k, cos, sin, positions=positions, offset=offset)
        assert [i for i in range(3) if not out[i].isnan().all()] == inside
        x, caches = q.clone(), [torch.zeros(9, 1, 32, device="mps") for _ in "kv"]
        ops.rotate_into_cache_(x, k, k, *caches, inv_freq=freqs(32), positions=positions, offset=offset)
        assert [i for i in range(3) if not x[i].isnan().any()] == inside
        assert all(rows(cache) == entries for cache in caches)
        assert all(rows(grad) == entries for grad in table_backward(q, k, cos, sin, positions, offset))


# ---- bits ----

SAME_BITS = [  # head_dim, rotary_dim, rotary_start, dtype, interleaved, heads first
    (32, 32, 0, torch.float32, False, True),
    (32, 32, 0, torch.bfloat16, True, False),
    (56, 48, 8, torch.bfloat16, True, True),
    (56, 48, 8, torch.bfloat16, False, False),
    (48, 32, 8, torch.float16, False, False),
    (12, 8, 4, torch.float32, True, True),
    (66, 66, 0, torch.float32, False, True),  # with a norm these heads are wide
]


@pytest.mark.parametrize("head_dim, rotary_dim, start, dtype, interleaved, heads_first", SAME_BITS, ids=str)
def test_a_token_has_the_same_bits_among_many_tokens(
    head_dim, rotary_dim, start, dtype, interleaved, heads_first, device
):
    """Among many tokens a thread takes several heads and long vectors, alone it takes one head and short ones."""
    seq = 41 if head_dim == 66 else 201

    def make(heads, seq=seq, head_dim=head_dim):
        x = randn(2, heads, seq, head_dim, dtype=dtype).transpose(1, 2)
        return x if heads_first else x.contiguous()

    v_dim = 40 if heads_first else head_dim
    q, k, v, caches = make(17), make(5), make(5, head_dim=v_dim), [make(5, seq + 4), make(5, seq + 4, v_dim)]
    weights = dict(q_norm_weight=randn(head_dim), k_norm_weight=randn(head_dim, dtype=dtype))
    options = dict(interleaved=interleaved, rotary_start=start)
    options |= dict(zip(("cos", "sin"), tables(seq + 4, rotary_dim), strict=True))

    def results(at, offset):
        """Returns the results of all operators for the tokens of the slice."""
        xs = [t[:, at] for t in (q, k, v)]
        found = [ops.rotate(xs[1], offset=offset, inverse=True, **options)]
        found += ops.rotate_qk(*xs[:2], offset=offset, **options)
        found += ops.norm_rotate_qk(*xs[:2], *weights.values(), offset=offset, **options)
        for norm in {}, weights:
            x, kv = xs[0].clone(), [c.clone() for c in caches]
            ops.rotate_into_cache_(x, *xs[1:], *kv, offset=offset, **options, **norm)
            found += [x, *(c[:, offset : offset + x.shape[1]] for c in kv)]
        return [t.cpu() for t in found]

    many = results(slice(None), 3)
    for at in slice(0, 1), slice(seq // 2, seq // 2 + 2), slice(seq - 1, seq):
        assert all(torch.equal(a, b[:, at]) for a, b in zip(results(at, at.start + 3), many, strict=True))


def aligned_and_shifted(*shape):
    """Returns float16 numbers twice; the second time they begin 8 bytes past an aligned address."""
    base = randn(4 + math.prod(shape), dtype=torch.float16)
    return [t.view(shape) for t in (base[:-4], torch.cat([base[-4:], base[:-4]])[4:])]


@INTERLEAVED
@pytest.mark.parametrize("head_dim, rotary_dim, start, v_dim", [(64, 64, 0, 24), (56, 48, 8, 56), (48, 32, 8, 200)])
def test_norms_have_the_same_bits_with_vectors_of_eight_and_of_four(
    head_dim, rotary_dim, start, v_dim, interleaved, device, simulated
):
    """The order of a sum shows in few of many numbers, after they are rounded to 16 bits."""
    weights, angles = weights_of(head_dim), tables(200, rotary_dim)
    inputs = zip(aligned_and_shifted(200, 24, head_dim), aligned_and_shifted(200, 24, v_dim), strict=True)
    options, results = dict(interleaved=interleaved, rotary_start=start, norm_v=True), []
    for q, v in inputs:
        k, v_cache = torch.empty_like(q[:, :3]), torch.empty_like(v)
        ops.rotate_into_cache_(q, q[:, :3].clone(), v, k, v_cache, *angles, **weights, **options)
        results.append([q, k, v_cache])
    assert [d["kernel"][-7:] for d in simulated.last_dispatches()] == ["_v8_u32", "_v4_u32"]
    assert all(map(torch.equal, *results))


def test_the_bits_are_those_of_the_cpu(device):
    """The rotation in every layout and the angles have the same bits, because both compile the same files.

    A norm is left out: the order of its sum differs.
    """
    for case in covering(CALLS | {"dtype": HALVES}, interacting=KERNELS, exhaustive=ALL_CALLS):
        if case["source"].freq_dtype == torch.float64:
            continue
        q, k, angles = make_qk("cpu", **case)
        there = {name: moved(a, "mps") if isinstance(a, torch.Tensor) else a for name, a in angles.items()}
        options = dict(interleaved=case["interleaved"], attention_factor=1.1)
        expected = ops.rotate_qk(q, k, **angles, **options)
        for x, e in zip(ops.rotate_qk(moved(q, "mps"), moved(k, "mps"), **there, **options), expected, strict=True):
            assert torch.equal(x.cpu(), e)
    positions = torch.randint(-(2**40), 2**40, (3, 500))
    positions[:, 250:] %= 7  # the sum over axes rounds small angles
    for kind in (torch.int64, torch.float32):
        for op, given in ((ops.cos_sin, positions[0]), (ops.axial_cos_sin, positions)):
            freq = torch_rope.inv_freq(64).float() * torch.rand(*given.shape[:-1], 32)
            outs = op(given.to(kind).to("mps"), freq.to("mps"))
            assert all(torch.equal(t.cpu(), e) for t, e in zip(outs, op(given.to(kind), freq), strict=True))


@pytest.mark.parametrize("head_dim, value", [(128, 1e30), (300, float("inf")), (1024, float("nan")), (1024, 1e30)])
def test_a_norm_whose_sum_overflows_gives_what_the_cpu_gives(value, head_dim, device):
    """A value that is too large for a sum makes this sum infinite and changes nothing else."""
    x, weight = torch.ones(1, 3, 2, head_dim), torch.ones(head_dim)
    x[0, 1, 0, 3] = value
    freq, results = torch_rope.inv_freq(head_dim).float(), []
    for where in "cpu", "mps":
        leaves = [t.to(where).requires_grad_() for t in (x, x.clone(), weight, weight.clone())]
        outs = ops.norm_rotate_qk(*leaves, inv_freq=freq.to(where), norm_eps=0.5)
        results.append([t.cpu() for t in (*outs, *torch.autograd.grad(outs, leaves, [o.detach() for o in outs]))])
    torch.testing.assert_close(*reversed(results), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("over_heads", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_gradients_of_weights_sum_over_many_tokens(over_heads, device):
    """There are so many tokens that a part adds to its sums more than once. The heads of 67 channels are wide."""
    heads, dim, tokens = (3, 2, 8300) if over_heads else (4, 67, 8300)
    q, k, freq = torch.randn(tokens, heads, dim), torch.randn(tokens, 1, dim), torch_rope.inv_freq(dim // 2 * 2).float()
    given = torch.randn(tokens, heads, dim), torch.randn(tokens, 1, dim)
    leaves = [q, k, *(torch.randn(*(h, dim)[not over_heads :]) for h in (heads, 1))]
    found = ops._norm_rotate_qk_backward(*(t.to("mps") for t in (*given, *leaves)), inv_freq=freq.to("mps"))
    leaves = [t.double().requires_grad_() for t in leaves]
    outs = reference.norm_rotate_qk(*leaves, inv_freq=freq.double())
    expected = torch.autograd.grad(outs, leaves, [t.double() for t in given])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-6, atol=2e-6 * b.abs().max().item())


def test_a_gradient_of_a_table_that_overflows_is_infinite(device):
    """The gradient is infinite where its sum is, and no NaN appears. A NaN stays in its pair."""
    x = torch.ones(3, 2, 8)
    x[0, 0, 0], x[2, 1, 1] = 1e30, float("nan")
    cos_grad, sin_grad = (t.cpu() for t in table_backward(x.to("mps"), x.to("mps"), *tables(4, 8)))
    assert cos_grad[0].tolist() == [float("inf"), 4, 4, 4] and cos_grad[1].tolist() == [4] * 4
    assert cos_grad[2].isnan().tolist() == sin_grad[2].isnan().tolist() == [False, True, False, False]
    assert not sin_grad[:2].any() and not cos_grad[3].any()


# ---- sizes ----


@pytest.mark.parametrize(
    "head_dim, rotary_dim, threads", [(128, 128, 32), (96, 40, 96), (1024, 64, 32), (512, 512, 96), (7, 6, 32)]
)
def test_small_threadgroups_give_the_same_results(head_dim, rotary_dim, threads, device, simulated):
    """A pipeline allows only small threadgroups if its kernel needs many registers."""
    q, k, freq = randn(2, 9, 5, head_dim), randn(2, 9, 2, head_dim), freqs(rotary_dim)
    norm, over_heads = weights_of(head_dim).values(), weights_of(5, head_dim, k_shape=(2, head_dim)).values()
    angles = *tables(9, rotary_dim), torch.arange(9).to("mps") // 4
    results = []
    for most in threads, 1024:
        simulated.max_threads(most)
        same = [*ops.rotate_qk(q, k, inv_freq=freq), *ops.norm_rotate_qk(q, k, *norm, inv_freq=freq)]
        same += ops.norm_rotate_qk(q, k, *over_heads, inv_freq=freq)
        same += ops._norm_rotate_qk_backward(q * 2, k * 2, q, k, *over_heads, inv_freq=freq)
        close = ops._norm_rotate_qk_backward(q * 2, k * 2, q, k, *norm, inv_freq=freq)
        results.append((same, [*close, *table_backward((q * 2, k * 2), (q, k), *angles)]))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


@NORM
@pytest.mark.parametrize("quantised", [False, True], ids=["", "int8"])
def test_one_tensor_that_is_not_aligned_is_enough(quantised, norm, device):
    """One tensor at a time begins, or has its second head, past an aligned address. No result changes."""
    values = {name: randn(40, 9, 64, dtype=torch.float16) for name in ("q", "k", "v", "k_cache", "v_cache")}
    strided = list(values)
    if quantised:
        values |= {f"{x}_cache": values[f"{x}_cache"].to(torch.int8) for x in "kv"}
        values |= {f"{x}_scale": torch.rand(9).to("mps") / 50 for x in "kv"}
    values |= dict(zip(("cos", "sin"), tables(41, 64), strict=True)) | (weights_of(64) if norm else {})
    odd = [
        None,
        *((name, start, 0) for name, t in values.items() for start in ((1, 4) if t.dtype == torch.int8 else (1,))),
        *((name, 0, 1) for name in strided),
    ]
    expected = None
    for case in odd:
        tensors = {name: t.clone() for name, t in values.items()}
        if case:
            name, start, more = case
            t = tensors[name]
            strides = [stride + more * stride // 64 for stride in t.stride()] if more else t.stride()
            memory = torch.zeros(start + 2 * t.numel(), dtype=t.dtype, device="mps")
            tensors[name] = memory.as_strided(t.shape, strides, start).copy_(t)
        ops.rotate_into_cache_(**tensors, slots=torch.arange(40).flip(0).to("mps"), offset=1)
        found = [tensors[name].contiguous() for name in ("q", "k_cache", "v_cache")]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), case


def test_strides_choose_the_kernel(untouched, device, simulated):
    """The stride of a dimension of size 1 does not count. The last element decides how wide element offsets must be."""
    for x, kernel in (
        (randn(16 * 256).as_strided((1, 1, 256, 16), (3, 5, 16, 1)), "v4_u32"),
        (untouched(2**31 + 2048, torch.float16).as_strided((2, 128, 16), (2**31, 16, 1)).zero_(), "v4_u32"),
        (untouched(2**32 + 2048, torch.float16).as_strided((2, 128, 16), (2**32, 16, 1)).zero_(), "v4_u64"),
        (untouched(2**32 + 8192, torch.float16).as_strided((2, 512, 16), (2**32, 16, 1)).zero_(), "v8_u64"),
        (randn(8196, dtype=torch.float16)[4:].view(1, 2, 256, 16), "v4_u32"),  # aligned to 8 bytes
        (randn(2048, dtype=torch.float16).as_strided((1, 2, 32, 16), (0, 512, 16, 1)), "v1_u32"),  # few threads
    ):
        simulated.last_dispatches()
        ops.rotate(x, inv_freq=freqs(16))
        assert one_dispatch(simulated)["kernel"].endswith(kernel)


@pytest.mark.parametrize("strides", [(64, 16, 1), (16, 64, 1)])
def test_element_offsets_may_exceed_2_31_and_2_32(strides, untouched, device):
    for far in (2**31 + 8, 2**32 + 16):
        q = untouched(far + 256, torch.float16).as_strided((2, 3, 2, 16), (far, *strides), 8)
        q.copy_(randn(2, 3, 2, 16, dtype=torch.float16))
        dense, weight, angles = q.contiguous(), randn(16), tables(3, 8)
        results = []
        for x in q, dense:
            found = [ops.rotate(x, *angles), *ops.norm_rotate_qk(x, x, weight, weight, *angles)]
            found += table_backward(x, x, *angles) + table_backward(x[..., 1:], x[..., 1:], *angles)
            ops.rotate_(x, *angles)
            results.append([*found, x])
        assert all(map(torch.equal, *results))


FAR = [  # the shapes of arguments; in each case one of them has elements far from its first
    dict(k_scale=(2,), v_scale=(2,), k_cache=(3, 2, 4), v_cache=(3, 2, 4), inv_freq=(2, 2)),
    dict(q_norm_weight=(4,), k_norm_weight=(4,), cos=(2, 2), sin=(2, 2), positions=(2,), slots=(2,)),
    dict(q_norm_weight=(2, 4), k_norm_weight=(2, 4), cos=(1, 2, 2, 2), sin=(1, 2, 2, 2), slots=(2,)),
]


@pytest.mark.parametrize("shapes", FAR, ids=" ".join)
def test_element_offsets_of_each_argument_may_exceed_2_32(shapes, untouched, device):
    far, near = 2**32 + 16, {x: randn(1, 2, 2, 4, dtype=torch.float16) for x in "qkv"}
    near |= {f"{x}_cache": torch.zeros(3, 2, 4, dtype=torch.float16, device="mps") for x in "kv"}
    for name, shape in shapes.items():
        dtype = {"scale": torch.float32, "cache": torch.int8, "freq": torch.float32}.get(
            name.split("_")[-1], torch.float16
        )
        near[name] = (torch.rand(shape).to(dtype) if "cache" not in name else torch.zeros(shape, dtype=dtype)).to("mps")
        if name in ("positions", "slots"):
            near[name] = torch.tensor([1, 0]).to("mps")
    expected = None
    for name in [None, *shapes]:
        tensors = {n: t.clone() for n, t in near.items()}
        if name:
            t = near[name]
            strides = {1: (far,), 2: (far, 1), 3: (4, far, 1), 4: (8, 4, far, 1)}[t.dim()]
            tensors[name] = untouched(3 * far + 64, t.dtype).as_strided(t.shape, strides).copy_(t)
        ops.rotate_into_cache_(**tensors)
        found = [tensors[n].contiguous() for n in ("q", "k_cache", "v_cache")]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), name


def test_tensors_without_elements_may_have_any_size_and_start(device):
    x, freq = randn(2, 2, 16), freqs(16)
    expected = ops.rotate(x, inv_freq=freq)
    empty = x.as_strided((2, 0, 16), (32, 16, 1), 300)  # begins past the end of its storage
    out, none = ops.rotate_qk(x, empty, inv_freq=freq)
    assert none.shape == empty.shape and torch.equal(out, expected)
    cache, slots = torch.empty(2**32, 0, 16, device="mps"), torch.tensor([3, 4]).to("mps")
    ops.rotate_into_cache_(x, none, none, cache, cache.clone(), inv_freq=freq, slots=slots)
    assert torch.equal(x, expected)
    ops.rotate_(torch.empty(2**31, 0, 16, device="mps"), inv_freq=freq)


@pytest.mark.parametrize("size", [(2**31, 1, 1, 2), (1, 2**31, 1, 2), (1, 1, 2**31, 2), (1, 1, 1, 2**31)], ids=str)
def test_sizes_past_2_31_are_refused(size, device):
    """The tensors need no memory: q has no heads, k is expanded, and the caches have no blocks."""
    batch, seq, heads, head_dim = size
    q, k = torch.empty(batch, seq, 0, head_dim, device="mps"), randn(1, 1, 1, 1).expand(size)
    cache, slots = torch.empty(0, 16, heads, head_dim, device="mps"), torch.tensor([[-1]]).to("mps").expand(batch, seq)
    with pytest.raises(NotImplementedError, match=r"rope.rotate_into_cache_: .* is \d+ but .*; .* too large for Metal"):
        ops.rotate_into_cache_(q, k, k, cache, cache.clone(), inv_freq=randn(1), slots=slots)


# ---- the host ----


def test_every_operator_has_a_metal_kernel():
    """An operator without one would run on the CPU unnoticed if PYTORCH_ENABLE_MPS_FALLBACK is set."""
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("rope::")}
    registered = {n for n in torch._C._dispatch_get_registrations_for_dispatch_key("MPS") if n.startswith("rope::")}
    if not registered:
        pytest.skip("there is no Metal back end in this process")
    assert len(names) == 10 and names == registered


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dtypes_that_metal_lacks_are_refused(dtype, device):
    x, numbers, scale = randn(2, 3, 16), torch.zeros(2, 3, 16, device="mps"), torch.ones(1, device="mps")
    try:
        wrong = (numbers if dtype.itemsize == 8 else numbers.to(torch.uint8)).view(dtype)
    except TypeError:
        pytest.skip(f"torch makes no {dtype} tensor on mps")

    def refused(operator, match, *args, **given):
        q = x.clone()
        with pytest.raises(NotImplementedError, match=f"rope.{operator}: {match}"):
            getattr(ops, operator)(q, *args, **given)
        assert torch.equal(q, x) and not numbers.any()

    if dtype == torch.float64:
        match = "inv_freq is float64 .* no float64; pass torch_rope.inv_freq"
        refused("rotate", match, inv_freq=wrong[0, 0])
        return refused("cos_sin", match, wrong[0, 0])
    for name in "kv":
        caches = {f"{n}_cache": wrong if n == name else torch.zeros_like(numbers, dtype=torch.int8) for n in "kv"}
        match = f"{name}_cache is {str(dtype)[6:]} but must be int8 or the dtype of {name}, because Metal has no float8"
        refused("rotate_into_cache_", match, x, x, **caches, inv_freq=freqs(16), k_scale=scale, v_scale=scale)


def test_an_error_inside_the_queue_reaches_the_caller(simulated):
    """The simulator raises an error there: it allows threadgroups of 16 threads, and this kernel needs 32."""
    x, weight = randn(1, 1, 67), randn(67)
    simulated.max_threads(16)
    with pytest.raises(RuntimeError, match="a threadgroup has 32 threads but must have at most 16"):
        ops._norm_rotate_qk_backward(x, x, x, x, weight, weight, inv_freq=freqs(66))


def test_threads_of_the_host_may_call_at_the_same_time(device):
    """Many threads make the first calls with new function constants, so they all want new pipelines."""
    q, k, angles = randn(2, 6, 4, 64), randn(2, 6, 2, 64), tables(300, 64)

    def calls(offset):
        flags = [dict(interleaved=bool(i & 1), inverse=bool(i & 2)) for i in range(8)]
        return [out for given in flags for out in ops.rotate_qk(q, k, *angles, offset=offset, **given)]

    with ThreadPoolExecutor(8) as pool:
        for offset, found in enumerate(pool.map(calls, range(8))):
            assert all(map(torch.equal, found, calls(offset)))


def test_the_module_counts_the_calls_of_each_kernel(device):
    """A kernel is compiled with its file alone, when it is first used."""

    def counts():
        found = collections.Counter()
        for kernel, milliseconds, calls in torch_rope._C.metal_pipelines():
            assert milliseconds > 0
            found[kernel] += calls
        return found

    x, freq = randn(3, 2, 10), freqs(10)
    ops.rotate(x, inv_freq=freq)
    before = counts()
    assert before["library rotate"] == 0
    for inverse in False, True, True:
        ops.rotate(x, inv_freq=freq, inverse=inverse)
    ops.cos_sin(torch.arange(3).to("mps"), freq)
    assert counts() - before == {"rotate_float_v1_u32": 3, "cos_sin_float": 1} and "library cos_sin" in counts()


def test_calls_are_reported_to_the_profiler_of_torch(device, simulated):
    """The profiler ends the encoder after each call, so every call has to begin anew with a new encoder."""
    x, weight, freq = randn(3, 2, 64), randn(64), freqs(64)
    expected = ops.rotate(x, inv_freq=freq)
    simulated.profile(True)
    found = ops.rotate(x, inv_freq=freq)
    ops._norm_rotate_qk_backward(x, x, x, x, weight, weight, inv_freq=freq)
    ops.cos_sin(torch.arange(3).to("mps"), freq)
    assert simulated.profile(False) == ["rotate_float_v1_u32", "norm_backward_float_v4", "cos_sin_float"]
    ops.rotate_(x, inv_freq=freq)
    assert not simulated.profile(False) and torch.equal(x, expected) and torch.equal(found, expected)
