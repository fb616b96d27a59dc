"""Tests of what is special to the Metal back end: its limits, its bits, and how the host launches kernels.

On a Mac these tests run on the GPU, except those that make limits smaller or ask which kernel ran.
"""

import collections
import json
import math
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from metal_calls import INTERLEAVED, NORM, freqs, ops, randn, tables, weights_of
from torch.profiler import ProfilerActivity, profile

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
    for out, e in zip(op(q, k, *extra, cos, sin, positions=positions), expected, strict=True):
        assert torch.equal(out[right], e) and out[wrong][..., :32].isnan().all() and not out[..., 32:].isnan().any()
    tabled, slots = dict(cos=cos, sin=sin), dict(slots=torch.tensor([1, 2, 4, 0, 3, -1]).to("mps"))
    # Without slots the table or the cache ends after position 7.
    for angles, where, size, cells in (
        (tabled, slots, 12, [1]),
        (tabled, {}, 12, [3, 7]),
        (dict(inv_freq=freqs(32)), {}, 8, [3, 7]),
        (dict(cos=cos[None, :6], sin=sin[None, :6]), {}, 8, [3, 7]),  # positions choose cells alone
    ):
        caches, x = [torch.zeros(size, 2, 48, device="mps") for _ in "kv"], q.clone()
        ops.rotate_into_cache_(x, k, v, *caches, **angles, positions=positions, **where, **weights)
        assert x[wrong][..., :32].isnan().all() and not x[right].isnan().any() and not x[..., 32:].isnan().any()
        assert all(rows(cache) == cells for cache in caches)


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


# ---- bits ----


def aligned_and_shifted(*shape):
    """Returns float16 numbers twice; the second time they begin 8 bytes past an aligned address."""
    base = randn(4 + math.prod(shape), dtype=torch.float16)
    return [t.view(shape) for t in (base[:-4], torch.cat([base[-4:], base[:-4]])[4:])]


@INTERLEAVED
@pytest.mark.parametrize("head_dim, rotary_dim, start, v_dim", [(64, 64, 0, 24), (56, 48, 8, 56), (48, 32, 8, 200)])
def test_the_bits_are_the_same_with_vectors_of_eight_and_of_four(
    head_dim, rotary_dim, start, v_dim, interleaved, device, simulated
):
    """The order of a norm's sum shows in few of many numbers, after they are rounded to 16 bits."""
    inputs = zip(aligned_and_shifted(100, 24, head_dim), aligned_and_shifted(100, 5, v_dim), strict=True)
    angles, options, results = tables(100, rotary_dim), dict(interleaved=interleaved, rotary_start=start), []
    with_norm = weights_of(head_dim) | dict(norm_v=True)
    for q, v in inputs:
        k, caches = q[:, :3].clone(), [torch.empty_like(x) for x in (q[:, :3], v, q[:, :3], v)]
        ops.rotate_into_cache_(q, k, v, *caches[:2], *angles, **options)
        ops.rotate_into_cache_(q, k, v, *caches[2:], *angles, **options, **with_norm)
        results.append([q, *caches])
    assert [d["kernel"][-7:] for d in simulated.last_dispatches()] == ["_v8_u32"] * 2 + ["_v4_u32"] * 2
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("head_dim, value", [(128, 1e30), (300, float("inf")), (1024, float("nan"))])
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
    heads, dim, tokens = (2, 2, 8300) if over_heads else (4, 67, 8300)
    q, k, freq = torch.randn(tokens, heads, dim), torch.randn(tokens, 1, dim), torch_rope.inv_freq(dim // 2 * 2).float()
    given = torch.randn(tokens, heads, dim), torch.randn(tokens, 1, dim)
    leaves = [q, k, *(torch.randn(*(h, dim)[not over_heads :]) for h in (heads, 1))]
    found = ops._norm_rotate_qk_backward(*(t.to("mps") for t in (*given, *leaves)), inv_freq=freq.to("mps"))
    leaves = [t.double().requires_grad_() for t in leaves]
    outs = reference.norm_rotate_qk(*leaves, inv_freq=freq.double())
    expected = torch.autograd.grad(outs, leaves, [t.double() for t in given])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-6, atol=2e-6 * b.abs().max().item())


# ---- sizes ----


@pytest.mark.parametrize("head_dim, rotary_dim, threads", [(128, 128, 32), (96, 40, 96), (512, 64, 96), (7, 6, 32)])
def test_small_threadgroups_give_the_same_results(head_dim, rotary_dim, threads, device, simulated):
    """A pipeline allows only small threadgroups if its kernel needs many registers."""
    q, k, freq = randn(1, 9, 5, head_dim), randn(1, 9, 2, head_dim), freqs(rotary_dim)
    norm, over_heads = weights_of(head_dim).values(), weights_of(5, head_dim, k_shape=(2, head_dim)).values()
    results = []
    for most in threads, 1024:
        simulated.max_threads(most)
        same = [*ops.rotate_qk(q, k, inv_freq=freq), *ops.norm_rotate_qk(q, k, *norm, inv_freq=freq)]
        same += ops.norm_rotate_qk(q, k, *over_heads, inv_freq=freq)
        same += ops._norm_rotate_qk_backward(q * 2, k * 2, q, k, *over_heads, inv_freq=freq)
        close = ops._norm_rotate_qk_backward(q * 2, k * 2, q, k, *norm, inv_freq=freq)
        results.append((same, close))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantised, norm", [(False, False), (True, True)], ids=["", "int8 norm"])
def test_one_tensor_that_is_not_aligned_is_enough(quantised, norm, device):
    """One tensor at a time begins, or has its second head, past an aligned address. No result changes."""
    values = {name: randn(40, 9, 64, dtype=torch.float16) for name in ("q", "k", "v", "k_cache", "v_cache")}
    changed = [(name, 0, 1) for name in values]
    if quantised:
        values |= {f"{x}_cache": values[f"{x}_cache"].to(torch.int8) for x in "kv"}
        values |= {f"{x}_scale": torch.rand(9).to("mps") / 50 for x in "kv"}
        changed += [(f"{x}_cache", 4, 0) for x in "kv"]
    values |= dict(zip(("cos", "sin"), tables(41, 64), strict=True)) | (weights_of(64) if norm else {})
    expected = None
    for name, start, more in [("q", 0, 0), *((name, 1, 0) for name in values), *changed]:
        tensors = {name: t.clone() for name, t in values.items()}
        t = tensors[name]
        strides = [stride + more * stride // 64 for stride in t.stride()]
        memory = torch.zeros(start + 2 * t.numel(), dtype=t.dtype, device="mps")
        tensors[name] = memory.as_strided(t.shape, strides, start).copy_(t)
        ops.rotate_into_cache_(**tensors, slots=torch.arange(40).flip(0).to("mps"), offset=1)
        found = [tensors[name].contiguous() for name in ("q", "k_cache", "v_cache")]
        expected = expected or found
        assert all(map(torch.equal, found, expected)), (name, start, more)


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
        assert [d["kernel"][-len(kernel) :] for d in simulated.last_dispatches()] == [kernel]


@pytest.mark.parametrize("size", [(2**31, 1, 1, 2), (1, 2**31, 1, 2), (1, 1, 2**31, 2), (1, 1, 1, 2**31)], ids=str)
def test_sizes_past_2_31_are_refused(size, device):
    """The tensors need no memory: q has no heads, k is expanded, and the caches have no blocks."""
    batch, seq, heads, head_dim = size
    q, k = torch.empty(batch, seq, 0, head_dim, device="mps"), randn(1, 1, 1, 1).expand(size)
    cache, slots = torch.empty(0, 16, heads, head_dim, device="mps"), torch.tensor([[-1]]).to("mps").expand(batch, seq)
    with pytest.raises(NotImplementedError, match=r"rope.rotate_into_cache_: .* is \d+ but .*; .* too large for Metal"):
        ops.rotate_into_cache_(q, k, k, cache, cache.clone(), inv_freq=randn(1), slots=slots)


# ---- the host ----


def test_float64_is_refused(device):
    x, wrong = randn(2, 3, 16), torch.zeros(16, device="mps")
    try:
        wrong = wrong.view(torch.float64)
    except TypeError:
        pytest.skip("torch makes no float64 tensor on mps")
    for call, name in (
        (lambda: ops.rotate(x, inv_freq=wrong), "rotate: inv_freq"),
        (lambda: ops.cos_sin(x[0, 0], wrong), "cos_sin: inv_freq"),
        (lambda: ops.cos_sin(wrong, freqs(16)), "cos_sin: positions"),
    ):
        with pytest.raises(NotImplementedError, match=f"rope.{name} is float64 .* no float64"):
            call()


@pytest.mark.parametrize("name", ["q_out", "k_cache", "v_cache"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_refused(dtype, name, device):
    x, scales = randn(2, 3, 16), {f"{n}_scale": torch.ones(1, device="mps") for n in "qkv"}
    results = {n: torch.zeros(2, 3, 16, dtype=torch.int8, device="mps") for n in ("q_out", "k_cache", "v_cache")}
    results[name] = results[name].view(dtype)
    match = f"{name} is {str(dtype)[6:]} but must be int8 or the dtype of {name[0]}, because Metal has no float8"
    with pytest.raises(NotImplementedError, match=f"rope.rotate_into_cache_: {match}"):
        ops.rotate_into_cache_(x, x, x, **results, inv_freq=freqs(16), **scales)


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
    """A kernel is compiled by itself, when it is first used."""

    def counts():
        found = collections.Counter()
        for kernel, milliseconds, calls in torch_rope._C.metal_pipelines():
            assert milliseconds > 0
            found[kernel] += calls
        return found

    x, freq = randn(3, 2, 10), freqs(10)
    ops.rotate(x, inv_freq=freq)
    before = counts()
    assert before["library rotate_float_v1_u32"] == 0
    for inverse in False, True, True:
        ops.rotate(x, inv_freq=freq, inverse=inverse)
    ops.cos_sin(torch.arange(3).to("mps"), freq)
    assert counts() - before == {"rotate_float_v1_u32": 3, "cos_sin_float": 1} and "library cos_sin_float" in counts()


def test_calls_are_reported_to_the_profiler_of_torch(device, simulated):
    """The profiler ends the encoder after each call, so every call has to begin anew with a new encoder."""
    x, weight, freq = randn(3, 2, 64), randn(64), freqs(64)
    expected = ops.rotate(x, inv_freq=freq)
    simulated.profile(True)
    found = ops.rotate(x, inv_freq=freq)
    ops._norm_rotate_qk_backward(x, x, x, x, weight, weight, inv_freq=freq)
    ops.cos_sin(torch.arange(3).to("mps"), freq)
    assert simulated.profile(False).split() == ["rotate_float_v1_u32", "norm_backward_float_v4", "cos_sin_float"]
    ops.rotate_(x, inv_freq=freq)
    assert not simulated.profile(False) and torch.equal(x, expected) and torch.equal(found, expected)


# ---- what PyTorch does with the operators: compiled programs, and memory ----


class Layer(torch.nn.Module):
    """Writes k and v into a cache and rotates q: views and operators, and no other computation."""

    def __init__(self):
        super().__init__()
        for name, rows in ("cos", 64), ("sin", 64):
            self.register_buffer(name, torch.randn(rows, 8, device="mps"))
        for name in "k_cache", "v_cache":
            self.register_buffer(name, torch.zeros(64, 2, 16, device="mps"))

    def forward(self, qkv):
        q, k, v = qkv.view(-1, 8, 16).split([4, 2, 2], 1)
        ops.rotate_into_cache_(q, k, v, self.k_cache, self.v_cache, self.cos, self.sin, offset=3)
        q, k = ops.rotate_qk(q, k, self.cos, self.sin, inverse=True)
        return q.transpose(0, 1), k


@pytest.fixture
def layer(device):
    """Returns a layer, its input, and a function that checks the results of a program, and what the program wrote."""
    layer, qkv = Layer(), torch.randn(8, 8 * 16, device="mps")
    state = qkv, layer.k_cache, layer.v_cache
    before = [t.clone() for t in state]
    expected = [t.clone() for t in (*layer(qkv), *state)]
    for t, first in zip(state, before, strict=True):
        t.copy_(first)

    def check(outs):
        assert all(torch.equal(a, e) for a, e in zip((*outs, *state), expected, strict=True))

    return layer, qkv, check


@pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec")
@pytest.mark.exhaustive
def test_inductor_calls_the_operators_and_compiles_no_shader(layer):
    from torch._inductor.utils import run_and_get_code  # takes seconds

    layer, qkv, check = layer
    with torch.compiler.config.patch(force_disable_caches=True):
        outs, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), qkv)
    check(outs)
    for op in "rotate_into_cache_", "rotate_qk":
        assert code.count(f"torch.ops.rope.{op}.default(") == 1
    assert "compile_mps_shader" not in code


@pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec")
@pytest.mark.exhaustive
def test_aot_inductor_calls_the_operators_through_the_proxy_executor(layer, tmp_path):
    """A simulated device makes the program of the package; a Mac also compiles and runs it."""
    layer, qkv, check = layer
    simulated = hasattr(torch.ops.simulator, "last_dispatches")
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(layer, (qkv.clone(),)),
        package_path=str(tmp_path / "rope.pt2"),
        inductor_configs={"aot_inductor.package_cpp_only": simulated, "aot_inductor.precompile_headers": False},
    )
    if not simulated:
        return check(torch._inductor.aoti_load_package(package)(qkv))
    files = zipfile.ZipFile(package)
    read = lambda end: next(files.read(name).decode() for name in files.namelist() if name.endswith(end))  # noqa: E731
    operators = [node["node"]["target"] for node in json.loads(read("wrapper.json"))["nodes"]]
    assert operators == ["rope::rotate_into_cache_", "rope::rotate_qk"]
    assert read("wrapper.cpp").count("aoti_torch_proxy_executor_call_function(proxy_executor,") == 2


def allocated(function):
    """Returns the sizes of the tensors that one operator allocates."""
    function()  # the first call of all makes a tensor that is kept
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        function()
    events = [event for event in recorded.events() if event.name in ("aten::empty", "aten::empty_strided")]
    return [event.concrete_inputs[0] for event in events]


def test_a_call_allocates_its_results_and_the_sums_of_a_weight(device):
    q, k = torch.randn(2, 5, 4, 16, device="mps"), torch.randn(2, 5, 2, 16, device="mps")
    cos, sin, weight = torch.rand(9, 8, device="mps"), torch.rand(9, 8, device="mps"), torch.rand(16, device="mps")
    caches = torch.zeros(2, 2, 9, 2, 16, device="mps")
    results = [list(q.shape), list(k.shape)]
    assert allocated(lambda: ops.rotate_qk_(q, k, cos, sin)) == []
    assert allocated(lambda: ops.rotate_into_cache_(q, k, k, *caches, cos, sin)) == []
    assert allocated(lambda: ops.rotate_qk(q, k, cos, sin)) == results
    parts = torch.rand(9, 8, 2, device="mps").unbind(-1)  # of complex numbers
    assert allocated(lambda: ops.rotate_qk(q, k, *parts, interleaved=True)) == results
    assert allocated(lambda: ops.norm_rotate_qk(q, k, weight, weight, cos, sin)) == results
    gradients = allocated(lambda: ops._norm_rotate_qk_backward(q, k, q, k, weight, weight, cos, sin))
    assert gradients == [results[0], [16], results[1], [16], [1, 2 * 16]]
    both = cos.repeat(1, 8)[:4, :16], sin.repeat(1, 8)[:2, :16]  # the weights of a norm over all heads
    gradients = allocated(lambda: ops._norm_rotate_qk_backward(q, k, q, k, *both, cos, sin))
    assert gradients == [results[0], [4, 16], results[1], [2, 16], [1, (4 + 2) * 16]]
