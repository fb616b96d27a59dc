"""Tests that in-place operators under torch.compile write where eager writes, and that nothing is copied.

Functionalization turns an in-place operator into a functional one on clones, and Inductor then removes them. That it
removes them, however q, k and the caches are made, is part of our contract, because a copy of a cache would cost more
than the operator.
"""

import copy
import math
import re

import pytest
import torch
from cases import covering, name_of, python
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


# ---- the ways in which the tensors that are written are made ----

PROGRAMS = {}


def program(inputs, *operators, buffers=0, kernels=0):
    """Decorates a function that is compiled below, and says what its compiled program must be.

    inputs: a function of (randn, seq, length of the cache) that returns the inputs. operators, buffers, kernels: the
    operators that the program calls, and how many buffers and kernels of its own it has.
    """

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


# The storage offsets of the views in the next functions depend on the length.


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
    """Returns a function that makes q, k, v and caches of these shapes, in which "n" is the length of the cache."""

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
def into_heads_first(q, k, v, k_cache, v_cache):  # the layout of StaticCache in transformers
    into(q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))


@program(caches((KV_HEADS, "n", DIM), ("n", KV_HEADS, DIM)), "rotate_into_cache_")
def without_batch(q, k, v, k_cache, v_cache):
    into(q[0], k[0], v[0], k_cache.transpose(0, 1), v_cache)


@program(caches((2, 3, "n", KV_HEADS, DIM)), "rotate_into_cache_")
def into_halves_by_index(q, k, v, kv):  # the layout of vLLM's FlashAttention backend
    into(q, k, v, kv[0], kv[1])


@program(caches((3, 2, "n", KV_HEADS, DIM)), "rotate_into_cache_")
def into_halves_of_blocks(q, k, v, kv):  # FlashInfer's layout NHD
    into(q, k, v, kv[:, 0], kv[:, 1])


@program(caches((3, 2, KV_HEADS, "n", DIM)), "rotate_into_cache_")
def into_halves_of_blocks_heads_first(q, k, v, kv):  # FlashInfer's layout HND
    into(q, k, v, *kv.transpose(2, 3).unbind(1))


@program(caches((3, "n", KV_HEADS, 2 * DIM)), "rotate_into_cache_")
def into_halves_of_the_last_dimension(q, k, v, kv):
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


def blocks_and_slots(randn, seq, n):
    slots = torch.randperm(5 * n)[: 2 * seq].view(2, seq).int()
    return *caches(("n", 2, 5, KV_HEADS, DIM))(randn, seq, n), slots.to(randn(0).device)


@program(blocks_and_slots, "rotate_into_cache_")
def into_paged_blocks(q, k, v, kv, slots):
    norm = dict(zip(("q_norm_weight", "k_norm_weight"), (tables_here[0][:8, 0], tables_here[1][:8, 1]), strict=True))
    into(q, k, v, kv[:, 0], kv[:, 1], slots=slots, norm_eps=0.1, attention_factor=1.2, interleaved=True, **norm)


def packed_and_caches(randn, seq, n):
    return *packed(randn, seq, n), randn(3, n, KV_HEADS, DIM), randn(3, KV_HEADS, n, DIM)


def projection_and_caches(randn, seq, n):
    qkv = (HEADS + 2 * KV_HEADS) * DIM
    return randn(2, seq, 24), randn(24, qkv), randn(2, KV_HEADS, n, DIM), randn(2, KV_HEADS, n, DIM)


@program(packed_and_caches, "rotate_into_cache_")
def from_a_split_input(qkv, k_cache, v_cache):
    into(*split(qkv), k_cache, v_cache.transpose(1, 2))


@program(projection_and_caches, "rotate_into_cache_", buffers=1)
def from_a_projection(x, w, k_cache, v_cache):
    q, k, v = split(x @ w)
    into(q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    return q


@program(projection_and_caches, "rotate_into_cache_", buffers=1)
def attention_over_the_cache(x, w, k_cache, v_cache):
    q, k, v = split(x @ w)
    into(q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    return scaled_dot_product_attention(q[:, :, :KV_HEADS].transpose(1, 2), k_cache, v_cache)


HEART = [on_a_split_input, on_an_unbound_input, into_halves_of_blocks, into_paged_blocks]


@pytest.mark.parametrize(
    "function",
    [pytest.param(f, marks=pytest.mark.heart if f in HEART else ()) for f in PROGRAMS],
    ids=lambda f: f.__name__,
)
def test_a_compiled_program_writes_without_a_copy(function, device):
    """The first program is for the first lengths, the second for all others, which are symbols.

    The storage offsets of views are then symbols too, and Inductor must use neither the first one nor 0 for all of them
    (pytorch#198068). Besides the operators, the program has only the buffers and kernels that the function needs.
    """
    if device == "mps" and "attention" in function.__name__:
        pytest.skip("torch for Linux has no attention kernels for mps")
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


# ---- shared storages, clones, and reads between writes ----


VIEWS = {  # of [batch, seq, heads, DIM]
    "a sequence": lambda x: x[1],
    "the last sequences": lambda x: x[1:],
    "the first sequence": lambda x: x[:1],
    "the last tokens": lambda x: x[:, 2:],
    "heads": lambda x: x[:, :, 1:3],
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("view", VIEWS)
def test_an_input_that_starts_inside_its_storage_is_written_correctly(view, dynamic, device):
    """The storage offset of a graph input is added to that of its view."""
    if device == "mps":
        pytest.skip("aot_eager in torch 2.13 reuses the first input's storage offset, for any in-place custom operator")
    function = lambda x: rope.rotate_(VIEWS[view](x), *tables_here)  # noqa: E731
    compiled_function = compiled(function, device, dynamic=dynamic)
    for i, seq in ((0, 4), (1, 4), (2, 6), (1, 7)):
        whole = torch.randn(3, 2, seq, HEADS, DIM, device=device)
        expected = whole.clone()
        function(expected[i])
        compiled_function(whole[i])
        assert torch.equal(whole, expected)


@pytest.mark.cpu
def test_the_first_compilation_of_a_process_writes_a_slice_correctly():
    """torch is mended for a storage offset that is a number too."""
    program = """
import torch, torch_rope
x, inv_freq = torch.ones(2, 3, 1, 2, 2), torch.ones(1)
torch.compile(lambda x: torch_rope.rotate_(x[1:], inv_freq=inv_freq, offset=1), backend="aot_eager")(x[1])
print((x != 1).nonzero()[:, :2].unique(dim=0).tolist())
"""
    done = python(program)
    assert done.stdout.strip() == "[[1, 1], [1, 2]]", done.stdout + done.stderr


@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
def test_inputs_that_share_a_storage_are_written_correctly(op, device):
    """The inputs are kv[0] and kv[1] of one tensor. The storage offset of the second depends on the length."""
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
def test_inputs_that_are_slices_of_one_tensor_are_written_or_left_alone(case, device):
    """q and k, or the caches, are split outside of the compiled function, and torch makes one input of them.

    If the length is dynamic, Inductor 2.13 then generates a program that lacks the definition of a size, and raises a
    NameError. The error is accepted, but then nothing may have been written.
    """
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


def test_a_clone_that_is_written_together_with_its_source_stays_a_clone(device):
    """If Inductor removed the clone, q and k would be one tensor, which is rotated twice."""

    def function(x):
        y = x.clone()
        rope.rotate_qk_(y, x, *tables_here)
        return y

    assert_same_call(function, compiled(function, device), qk(device)[0])


def test_a_read_between_two_writes_sees_the_first_write(device):
    """x is rotated, read, and rotated back."""

    def function(x):
        before = x + 1
        rope.rotate_(x, *tables_here)
        between = x + 1
        rope.rotate_(x, *tables_here, inverse=True)
        return before, between, x + 1

    assert_same_call(function, compiled(function, device), qk(device)[0])


# ---- a model ----


class Attention(torch.nn.Module):
    """Computes attention with QK-norm and rotation, and has a cache of its own."""

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


def test_a_model_with_its_caches_as_buffers_copies_no_cache(device):
    """Two prompts and then single tokens make three programs: for the first prompt, for other prompts, for tokens."""
    if device == "mps":
        pytest.skip("torch for Linux has no attention kernels for mps")
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
