"""In-place operators under torch.compile write where eager writes, and nothing is copied.

Functionalised, an in-place operator becomes a functional one on clones; Inductor then takes the clones away again. That it
does, for each way in which q and k and the caches come to be, is part of the contract. A copy of a cache would cost more
than the operator.
"""

import copy
import math
import re

import pytest
import torch
from cases import covering, name_of
from programs import (
    COMPILING,
    DIM,
    HEADS,
    KV_HEADS,
    assert_no_copy,
    assert_same_call,
    body_of,
    calls_in,
    compiled,
    copies,
    norm_weights,
    operands,
    qk,
    rope,
    run_and_see_programs,
    split,
    tables,
)
from torch.nn.functional import scaled_dot_product_attention

pytestmark = COMPILING


@pytest.fixture(autouse=True)
def _tables_of(device):
    global tables_here
    tables_here = tables(device)


# ---- ways in which what is written comes to be ----

PROGRAMS = {}


def program(inputs, *operators, buffers=0, kernels=0):
    """Says of a function what its inputs are, by functions of (randn, seq, length of the cache), and what it compiles to."""

    def add(function):
        PROGRAMS[function] = (inputs, list(operators), buffers, kernels)
        return function

    return add


def q_and_k(randn, seq, _):
    return randn(2, seq, HEADS, DIM), randn(2, seq, KV_HEADS, DIM)


def packed(randn, seq, _):
    return (randn(2, seq, (HEADS + 2 * KV_HEADS) * DIM),)


def stacked(randn, seq, _):
    return (randn(4, 2, seq, HEADS, DIM),)


@program(q_and_k, "rotate_qk_")
def on_inputs(q, k):
    rope.rotate_qk_(q, k, *tables_here)


@program(q_and_k, "rotate_")
def on_a_transposed_input(q, _):
    rope.rotate_(q.transpose(1, 2), *tables_here)


@program(q_and_k, "rotate_", buffers=1, kernels=1)
def on_an_intermediate(q, _):
    x = q * 2
    rope.rotate_(x, *tables_here)
    return x


@program(packed, "rotate_qk_")
def on_a_split_input(qkv):
    q, k, _ = split(qkv)
    rope.rotate_qk_(q, k, *tables_here)


@program(packed, "rotate_", "rotate_")
def on_slices_of_an_input(qkv):
    x = qkv.view(*qkv.shape[:2], -1, DIM)
    rope.rotate_(x[:, :, :HEADS], *tables_here)
    rope.rotate_(x[:, :, HEADS : HEADS + KV_HEADS], *tables_here)


@program(packed, "rotate_qk_", buffers=1, kernels=1)
def on_a_split_intermediate(qkv):
    qkv = qkv * 2
    q, k, _ = split(qkv)
    rope.rotate_qk_(q, k, *tables_here)
    return qkv


# Where the next ones start in their storage depends on the length.


@program(stacked, "rotate_qk_")
def on_an_unbound_input(x):
    q, k = x.unbind(0)[:2]
    rope.rotate_qk_(q, k, *tables_here)


@program(stacked, "rotate_", "rotate_")
def on_each_unbound(x):
    q, k = x.unbind(0)[:2]
    rope.rotate_(q, *tables_here)
    rope.rotate_(k, *tables_here)


@program(stacked, "rotate_")
def on_the_second_of_an_input(x):
    rope.rotate_(x[1], *tables_here)


@program(stacked, "rotate_", buffers=1, kernels=1)
def on_the_second_of_an_intermediate(x):
    x = x * 2
    rope.rotate_(x[1], *tables_here)
    return x


@program(stacked, "rotate_")
def on_the_later_half_of_the_tokens(x):
    rope.rotate_(x[0][:, x.shape[2] // 2 :], *tables_here)


@program(stacked, "rotate_qk_")
def on_halves_of_the_batch(x):
    q, k = x.flatten(0, 1).chunk(2)
    rope.rotate_qk_(q, k, *tables_here)


# ---- caches ----


def caches(*shapes):
    """Inputs: q, k, v and tensors in whose shapes n is the length of the cache."""

    def inputs(randn, seq, n):
        memory = [randn(*(n if size == "n" else size for size in shape)) for shape in shapes]
        return *(randn(2, seq, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)), *memory

    return inputs


def into(q, k, v, k_cache, v_cache, **options):
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, *tables_here, offset=3, **options)


@program(caches((3, "n", KV_HEADS, DIM), (3, "n", KV_HEADS, DIM)), "rotate_into_cache_")
def into_two_inputs(q, k, v, k_cache, v_cache):
    into(q, k, v, k_cache, v_cache)


@program(caches((3, KV_HEADS, "n", DIM), (3, KV_HEADS, "n", DIM)), "rotate_into_cache_")
def into_heads_first(q, k, v, k_cache, v_cache):  # StaticCache of transformers
    into(q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))


@program(caches((KV_HEADS, "n", DIM), ("n", KV_HEADS, DIM)), "rotate_into_cache_")
def without_batch(q, k, v, k_cache, v_cache):
    into(q[0], k[0], v[0], k_cache.transpose(0, 1), v_cache)


@program(caches((2, 3, "n", KV_HEADS, DIM)), "rotate_into_cache_")
def into_halves_by_index(q, k, v, kv):  # vLLM's FlashAttention
    into(q, k, v, kv[0], kv[1])


@program(caches((3, 2, "n", KV_HEADS, DIM)), "rotate_into_cache_")
def into_halves_of_blocks(q, k, v, kv):  # FlashInfer's NHD
    into(q, k, v, kv[:, 0], kv[:, 1])


@program(caches((3, 2, KV_HEADS, "n", DIM)), "rotate_into_cache_")
def into_halves_of_blocks_heads_first(q, k, v, kv):  # and its HND
    into(q, k, v, *kv.transpose(2, 3).unbind(1))


@program(caches((3, "n", KV_HEADS, 2 * DIM)), "rotate_into_cache_")
def into_halves_of_a_row(q, k, v, kv):
    into(q, k, v, *kv.chunk(2, -1))


@program(caches((3, 2, 3, "n", KV_HEADS, DIM)), *["rotate_into_cache_"] * 3)
def into_layers(q, k, v, kv):
    for i in range(3):
        into(q, k, v, kv[i, 0], kv[i, 1])


@program(caches((3, 3, 2, "n", KV_HEADS, DIM)), *["rotate_into_cache_"] * 3)
def into_layers_of_blocks(q, k, v, kv):
    for layer in kv.unbind(0):
        into(q, k, v, *layer.unbind(1))


def layers_of_one_tensor(randn, seq, n):
    *qkv, kv = caches((3, 2, 3, "n", KV_HEADS, DIM))(randn, seq, n)
    return *qkv, *kv


@program(layers_of_one_tensor, *["rotate_into_cache_"] * 3)
def into_layers_that_are_inputs(q, k, v, *kv):
    for layer in kv:
        into(q, k, v, *layer)


def pages_and_slots(randn, seq, n):
    slots = torch.randperm(5 * n)[: 2 * seq].view(2, seq).int()
    return *caches(("n", 2, 5, KV_HEADS, DIM))(randn, seq, n), slots.to(randn(0).device)


@program(pages_and_slots, "rotate_into_cache_")
def into_pages(q, k, v, kv, slots):
    norm = dict(zip(("q_norm_weight", "k_norm_weight"), (tables_here[0][:8, 0], tables_here[1][:8, 1]), strict=True))
    into(q, k, v, kv[:, 0], kv[:, 1], slots=slots, norm_eps=0.1, attention_factor=1.2, interleaved=True, **norm)


def packed_and_caches(randn, seq, n):
    return *packed(randn, seq, n), randn(3, n, KV_HEADS, DIM), randn(3, KV_HEADS, n, DIM)


def projection_and_caches(randn, seq, n):
    qkv = (HEADS + 2 * KV_HEADS) * DIM
    return randn(2, seq, 24), randn(24, qkv), randn(2, KV_HEADS, n, DIM), randn(2, KV_HEADS, n, DIM)


@program(packed_and_caches, "rotate_into_cache_")
def of_a_split_input(qkv, k_cache, v_cache):
    into(*split(qkv), k_cache, v_cache.transpose(1, 2))


@program(projection_and_caches, "rotate_into_cache_", buffers=1)
def of_a_projection(x, w, k_cache, v_cache):
    q, k, v = split(x @ w)
    into(q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    return q


@program(projection_and_caches, "rotate_into_cache_", buffers=1)
def attention_over_the_cache(x, w, k_cache, v_cache):
    q, k, v = split(x @ w)
    into(q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    return scaled_dot_product_attention(q[:, :, :KV_HEADS].transpose(1, 2), k_cache, v_cache)


HEART = [on_a_split_input, on_an_unbound_input, into_halves_of_blocks, into_pages]


@pytest.mark.parametrize(
    "function",
    [pytest.param(f, marks=pytest.mark.heart if f in HEART else ()) for f in PROGRAMS],
    ids=lambda f: f.__name__,
)
def test_it_is_written_where_it_is(function, device):
    """With the first lengths, and with all others, which are symbols: so are the offsets at which views begin (Inductor must
    not take the first one, nor 0, for all: pytorch#198068). Beside the operators the program has a buffer for what the
    function itself computes, and nothing else."""
    if device == "mps" and "attention" in function.__name__:
        pytest.skip("torch's attention for mps is not in its build for Linux")
    inputs, operators, buffers, kernels = PROGRAMS[function]
    randn = lambda *shape: torch.randn(shape, device=device)  # noqa: E731

    def run():
        for seq, length in ((6, 16), (4, 20), (9, 24)):
            assert_same_call(function, compiled_function, *inputs(randn, seq, length))

    compiled_function = compiled(function, device)
    _, programs = run_and_see_programs(device, run)
    assert len(programs) == 2 or device == "mps"
    for code in programs:
        assert_no_copy(code, operators, buffers, kernels)


# ---- storages that are shared, clones, what is read between ----


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_input_that_starts_inside_its_storage(dynamic, device):
    """The offset of a graph input and that of a view of it add up."""
    if device == "mps":
        pytest.skip("aot_eager (torch 2.13) keeps the offset of the first input, for any in-place custom operator")
    function = lambda x: rope.rotate_(x[1], *tables_here)  # noqa: E731
    compiled_function = compiled(function, device, dynamic=dynamic)
    for i, seq in ((0, 4), (1, 4), (2, 6), (1, 7)):
        whole = torch.randn(3, 2, 2, seq, HEADS, DIM, device=device)
        expected = whole.clone()
        function(expected[i])
        compiled_function(whole[i])
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
def test_inputs_that_share_a_storage(op, device):
    """kv[0] and kv[1] of one cache: the second starts at an offset that depends on the length."""
    function = lambda *tensors: getattr(rope, op)(*tensors, *tables_here)  # noqa: E731
    compiled_function = compiled(function, device, **{"backend": "aot_eager"} if op == "rotate_qk_" else {})
    for seq in (4, 6, 9):
        kv = torch.randn(2, 2, seq + 5, KV_HEADS, DIM, device=device)
        inputs = (*kv,) if op == "rotate_qk_" else (*operands(op, device, seq)[:3], *kv)
        assert_same_call(function, compiled_function, *inputs)


@pytest.mark.parametrize(
    "case",
    covering({"dynamic": [False, None, True], "op": ["rotate_qk_", "rotate_into_cache_"]}, strength=1),
    ids=name_of,
)
def test_inputs_that_are_slices_of_one_tensor(case, device):
    """q and k, or the caches, split outside of the compiled function. torch makes one input of them, and where the length is
    dynamic Inductor 2.13 then forgets to define a size: an error is all that we can ask for, but nothing may be half done."""
    dynamic, op = case.values()
    function = lambda *tensors: getattr(rope, op)(*tensors, *tables_here)  # noqa: E731
    compiled_function = compiled(function, device, dynamic=dynamic)
    for seq in (4, 6, 9):
        if op == "rotate_qk_":
            inputs = torch.randn(2, seq, HEADS + KV_HEADS, DIM, device=device).split([HEADS, KV_HEADS], 2)
        else:
            caches = torch.randn(3, 2, seq + 5, KV_HEADS, DIM, device=device).unbind(1)
            inputs = (*operands(op, device, seq)[:3], *caches)
        before, expected = copies(inputs), copies(inputs)
        function(*expected)
        try:
            compiled_function(*inputs)
        except NameError:
            assert dynamic is not False
            expected = before
        assert all(map(torch.equal, inputs, expected))


def test_a_clone_that_is_written_beside_its_source_stays_a_clone(device):
    """Without it, q and k would be one tensor, rotated twice."""

    def function(x):
        y = x.clone()
        rope.rotate_qk_(y, x, *tables_here)
        return y

    assert_same_call(function, compiled(function, device), qk(device)[0])


def test_written_twice_and_read_between(device):
    """Rotated, read, and rotated back."""

    def function(x):
        before = x + 1
        rope.rotate_(x, *tables_here)
        between = x + 1
        rope.rotate_(x, *tables_here, inverse=True)
        return before, between, x + 1

    assert_same_call(function, compiled(function, device), qk(device)[0])


# ---- a model ----


class Attention(torch.nn.Module):
    """With a cache of its own, rotated and normalised."""

    def __init__(self, length, device):
        super().__init__()
        self.qkv = torch.nn.Linear(24, 3 * KV_HEADS * DIM)
        self.out = torch.nn.Linear(KV_HEADS * DIM, 24)
        self.q_norm, self.k_norm = (torch.nn.Parameter(w) for w in norm_weights("cpu"))
        self.register_buffer("kv", torch.zeros(2, 2, KV_HEADS, length, DIM))
        self.to(device)

    def forward(self, x, mask, offset):
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM)).chunk(3, 2)
        k_cache, v_cache = self.kv
        norm = {"q_norm_weight": self.q_norm, "k_norm_weight": self.k_norm}
        rope.rotate_into_cache_(
            q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2), *tables_here, offset=offset, **norm
        )
        heads = scaled_dot_product_attention(q.transpose(1, 2), k_cache, v_cache, mask)
        return self.out(heads.transpose(1, 2).flatten(2))


def test_a_model_with_its_caches_as_buffers(device):
    """Prompts of two lengths, then token by token: a program for the first prompt, one for others, one for tokens."""
    if device == "mps":
        pytest.skip("torch's attention for mps is not in its build for Linux")
    length = 48
    model = torch.nn.ModuleList([Attention(length, device) for _ in range(2)])
    twin = copy.deepcopy(model)

    def forward(model, x, mask, offset):
        for layer in model:
            x = layer(x, mask, offset)
        return x

    def run():
        for start, seq in ((0, 5), (0, 7), *((position, 1) for position in range(7, 14))):
            x = torch.randn(2, seq, 24, device=device)
            hidden = torch.arange(length) > torch.arange(start, start + seq)[:, None]
            mask = torch.where(hidden, -math.inf, 0.0).to(device)
            with torch.inference_mode():
                torch.testing.assert_close(compiled_forward(twin, x, mask, start), forward(model, x, mask, start))
        for buffer, expected in zip(twin.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected)
            assert not buffer[..., 14:, :].any() and buffer[..., :14, :].all()

    compiled_forward = compiled(forward, device)
    _, programs = run_and_see_programs(device, run)
    assert len(programs) == 3
    for code in programs:
        assert calls_in(code) == ["rotate_into_cache_"] * 2
        sizes = re.findall(r"= empty_strided\w*\(\(([^()]*)\)", body_of(code))
        sizes = [math.prod(int(n) for n in re.findall(r"\b\d+\b", size)) for size in sizes]  # a symbol counts as 1
        assert max(sizes) < 2 * length * KV_HEADS * DIM
