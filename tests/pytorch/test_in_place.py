"""Tests that in-place operators under torch.compile write where eager writes, and that nothing is copied.

Functionalization turns an in-place operator into a functional one on clones, and Inductor then removes them. That it
removes them, however q, k and the caches are made, is part of our contract, because a copy of a cache would cost more
than the operator.
"""

import functools
import re

import pytest
import torch
from cases import Calls, python
from programs import COMPILING, DIM, HEADS, KV_HEADS, assert_same_call, compiled, copies, operands, rope, split, tables
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import scaled_dot_product_attention

pytestmark = [*COMPILING, pytest.mark.shared]

# ---- the ways in which the tensors that are written are made ----

# Sizes that change from call to call: of the sequence, and of the cache.
SEQ, LENGTH = "the length of the sequence", "the length of the cache"
Q, K = (2, SEQ, HEADS, DIM), (2, SEQ, KV_HEADS, DIM)
QKV, PACKED, STACKED = (Q, K, K), (2, SEQ, (HEADS + 2 * KV_HEADS) * DIM), (4, 2, SEQ, HEADS, DIM)
BLOCKS, HEADS_FIRST = (3, LENGTH, KV_HEADS, DIM), (3, KV_HEADS, LENGTH, DIM)
SLOTS, X, W = (2, SEQ), (2, SEQ, 24), (24, (HEADS + 2 * KV_HEADS) * DIM)


def both(angles, q, k):
    rope.rotate_qk_(q, k, *angles)


def a_split_intermediate(angles, x):
    x = x * 2
    both(angles, *split(x)[:2])
    return x


def the_second_of_an_intermediate(angles, x, w):
    x = x @ w
    rope.rotate_(x[1], *angles)
    return x


def reads_between_writes(angles, x):
    rope.rotate_(x, *angles)
    between = x + 1
    rope.rotate_(x, *angles, inverse=True)
    return between


def into(angles, q, k, v, k_cache, v_cache, **more):
    rope.rotate_into_cache_(q, k, v, k_cache, v_cache, *angles, offset=3, **more)


def into_paged_blocks(angles, q, k, v, kv, slots):
    more = {"q_norm_weight": angles[0][:8, 0], "k_norm_weight": angles[1][:8, 1], "slots": slots}
    into(angles, q, k, v, kv[:, 0], kv[:, 1], **more, norm_eps=0.1, attention_factor=1.2, interleaved=True)


def attention_over_the_cache(angles, x, w, k_cache, v_cache):
    """The caches have their heads first, as StaticCache in transformers."""
    q, k, v = split(x @ w)
    into(angles, q, k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    return scaled_dot_product_attention(q[:, :, :KV_HEADS].transpose(1, 2), k_cache, v_cache)


# name -> (the shapes of the inputs, function, and how many buffers and kernels its program has besides our operators)
PROGRAMS = {
    "a transposed input": ([Q], lambda a, q: rope.rotate_(q.transpose(1, 2), *a)),
    "a split input": ([PACKED], lambda a, x: both(a, *split(x)[:2])),
    "a split intermediate": ([PACKED], a_split_intermediate, 1, 1),
    "an input that is read between two writes": ([Q], reads_between_writes, 1, 1),
    # The storage offsets of the views in the next programs depend on the length.
    "an unbound input": ([STACKED], lambda a, x: both(a, *x.unbind(0)[:2])),
    "the second of an intermediate": ([STACKED, (DIM, DIM)], the_second_of_an_intermediate, 1),
    "the later half of the tokens": ([STACKED], lambda a, x: rope.rotate_(x[0][:, x.shape[2] // 2 :], *a)),
    # Caches.
    "caches from a split input": ([PACKED, BLOCKS, BLOCKS], lambda a, x, c, d: into(a, *split(x), c, d)),
    "halves by index": ([*QKV, (2, *BLOCKS)], lambda a, q, k, v, kv: into(a, q, k, v, kv[0], kv[1])),  # vLLM's
    "halves of blocks, heads first": (  # FlashInfer's HND
        [*QKV, (3, 2, *HEADS_FIRST[1:])],
        lambda a, q, k, v, kv: into(a, q, k, v, *kv.transpose(2, 3).unbind(1)),
    ),
    "q_out inside a buffer": (
        [PACKED, BLOCKS, BLOCKS, (2, *Q)],
        lambda a, x, c, d, o: into(a, *split(x), c, d, q_out=o[1]),
    ),
    "q_out that is q": ([PACKED, BLOCKS, BLOCKS], lambda a, x, c, d: into(a, *split(x), c, d, q_out=split(x)[0])),
    "layers": ([*QKV, (3, 2, *BLOCKS)], lambda a, q, k, v, layers: [into(a, q, k, v, *kv) for kv in layers] and None),
    "paged blocks": ([*QKV, (LENGTH, 2, 5, KV_HEADS, DIM), SLOTS], into_paged_blocks),
    "attention over the cache": ([X, W, *[(2, *HEADS_FIRST[1:])] * 2], attention_over_the_cache, 1),
}
# The others differ in the strides and the number of views only.
CORE = ["an unbound input", "the second of an intermediate", "paged blocks"]
ALL_LENGTHS = (6, 16), (4, 20), (9, 24)


def inputs(shapes, device, seq, length):
    def make(shape):
        size = [{SEQ: seq, LENGTH: length}.get(n, n) for n in shape]
        return (torch.randperm(2 * seq).view(size).int() if shape is SLOTS else torch.randn(size)).to(device)

    return map(make, shapes)


def assert_no_copy(code, operators, buffers=0, kernels=0):
    """Checks that the compiled program has only these operators and this many buffers and kernels, and no copy."""
    body = code[code.index("def call(") :]  # the function that calls the kernels, without the source of the kernels
    body = body[: body.index("return (")]
    assert re.findall(r"rope\.(\w+)\.default\(", body) == operators, body
    assert len(re.findall(r"= empty_strided\w*\(", body)) == buffers, body
    assert len(re.findall(r"cpp_fused\w*\(|triton_\w+\.run\(", body)) == kernels, body
    assert not re.search(r"copy|clone", body), body


@pytest.mark.parametrize(
    "name", [pytest.param(p, marks=pytest.mark.core if p in CORE else pytest.mark.exhaustive) for p in PROGRAMS]
)
def test_a_compiled_program_writes_without_a_copy(name, device):
    """The first program is for the first lengths, the second for all others, which are symbols.

    The storage offsets of views are then symbols too, and Inductor must use neither the first one nor 0 for all of them
    (pytorch#198068). Besides the operators, the program has only the buffers and kernels that the function needs.
    """
    if device == "mps" and "attention" in name:
        pytest.skip("torch for Linux has no attention kernels for mps")
    shapes, of_angles, *other = PROGRAMS[name]
    angles = tables(device)
    function = lambda *inputs: of_angles(angles, *inputs)  # noqa: E731
    program = compiled(function, device)

    def run():
        for lengths in ALL_LENGTHS:
            assert_same_call(function, program, *inputs(shapes, device, *lengths))

    if device == "mps":  # its program is not Inductor's
        return run()
    with Calls() as calls:
        function(*inputs(shapes, device, *ALL_LENGTHS[0]))
    operators = [call.removeprefix("rope::") for call in calls.names if call.startswith("rope::")]
    _, programs = run_and_get_code(run)
    assert len(programs) == 2
    for code in programs:
        assert_no_copy(code, operators, *other)


# ---- operands that Inductor computes or copies ----

COPIES = {  # Inductor takes each for no operation
    "clone": torch.clone,
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "to": lambda x: x.to(x.dtype, copy=True),
    "repeat": lambda x: x.repeat(1, 1, 1, 1),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0)),
    "product": lambda x: x * torch.ones(DIM, device=x.device),
    "cat": lambda x: torch.cat([x]),
    "cat of a split": lambda x: torch.cat(x.split([1, HEADS - 1], 2), 2),
}


def of_copies(name, angles, x):
    """Returns copies of slices of an input and of an intermediate that operators have written, or views of them, or have
    read beside the cache that they are copied from."""
    copy, results = COPIES[name], []
    for whole in (x, x * 2):
        results += [copy(whole[i : i + 1]) for i in (1, 0, 1)]
        rope.rotate_qk_(results[-3], results[-2], *angles)
        rope.rotate_(results[-1].flatten(2)[..., DIM:].unflatten(-1, (-1, DIM)), *angles)
    for cells in (slice(1), slice(1, 2)):
        into(angles, whole[:, :1] + 1, copy(whole[:, cells]), copy(whole[:, cells]), whole, x)
    return (*results, whole)


def of_a_computed_layer(name, angles, x, w, k_cache, v_cache, slots):
    """Returns the qkv of a projection after operators wrote or read its slices, as in vLLM and SGLang."""
    qkv = x @ w * 2
    q, k, v = split(qkv)
    into(angles, q, k, v, k_cache, v_cache, slots=slots, q_out=(q_out := torch.empty_like(q)))
    rope.rotate_qk_(q[:, 1:], k[:, 1:], *angles)
    return qkv, q_out, q, k * 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*COPIES, "layer"])
@pytest.mark.parametrize("v2, mode", [(True, torch.no_grad), (False, torch.inference_mode)])
def test_an_operand_that_inductor_computes_or_copies_has_the_values_of_eager(name, v2, mode, device):
    """vLLM and SGLang set enable_auto_functionalized_v2 to False."""
    of, shapes = (of_a_computed_layer, [X, W, BLOCKS, BLOCKS, SLOTS]) if name == "layer" else (of_copies, [Q])
    function = functools.partial(of, name, tables(device))
    program = compiled(function, device)
    with torch._inductor.config.patch(enable_auto_functionalized_v2=v2), mode():
        for lengths in ALL_LENGTHS:
            assert_same_call(function, program, *inputs(shapes, device, *lengths))


# ---- inputs that share a storage or begin inside it ----


def test_an_input_that_starts_inside_its_storage_is_written_correctly(device, monkeypatch):
    """The storage offset of a graph input is added to that of its view. An operator is refused if nothing is replaced."""
    if device == "mps":
        pytest.skip("aot_eager in torch 2.13 reuses the first input's storage offset, for any in-place custom operator")
    angles = tables(device)
    for view in (lambda x: x[1], lambda x: x[1:], lambda x: x[:, 2:]):
        torch._dynamo.reset()
        function = lambda x, view=view: rope.rotate_(view(x), *angles)  # noqa: E731
        program = compiled(function, device)
        for i, seq in ((0, 4), (1, 4), (2, 6), (1, 7)):
            whole = torch.randn(3, 2, seq, HEADS, DIM, device=device)
            expected = whole.clone()
            function(expected[i])
            program(whole[i])
            assert torch.equal(whole, expected)
    torch._dynamo.reset()
    monkeypatch.setenv("TORCH_ROPE_LOWERING", "0")
    with pytest.raises(RuntimeError, match="rope.rotate_: TORCH_ROPE_LOWERING is 0 .* use the functional"):
        program(whole[1])
    assert torch.equal(whole, expected)


@pytest.mark.cpu
@pytest.mark.exhaustive
def test_a_slice_is_written_correctly_by_the_first_compilation_after_that_of_another_library():
    """The lowering of slices is replaced, too, if Inductor has a fallback."""
    program = """
import torch, torch_rope, torch._inductor.config
torch._inductor.config.force_disable_caches = True
clear_ = torch.library.custom_op("other::clear_", lambda x: [x.zero_()] and None, mutates_args=["x"], schema="(Tensor(a!) x) -> ()")
for clear in (clear_, lambda x: torch_rope.rotate_(x, inv_freq=torch.ones(1), offset=1)):
    compiled = torch.compile(lambda x: clear(x[1]))
    for seq in (2, 3, 4):
        compiled(x := torch.ones(2, seq, 1, 2))
print((x != 1).nonzero()[:, 0].unique().tolist())
"""
    done = python(program)
    assert done.stdout.strip() == "[1]", done.stdout + done.stderr


@pytest.mark.parametrize("op", ["rotate_qk_", "rotate_into_cache_"])
@pytest.mark.parametrize("dim, backend", [(0, "aot_eager"), (1, "inductor")])
def test_inputs_that_share_a_storage_are_written_or_left_alone(dim, backend, op, device):
    """The inputs are kv.unbind(dim) of one tensor, which is sliced outside of the compiled function.

    If they alternate in its memory and the length is dynamic, Inductor 2.13 generates a program that lacks the
    definition of a size, and raises a NameError. The error is accepted, but then nothing may have been written.
    """
    angles = tables(device)
    function = lambda *tensors: getattr(rope, op)(*tensors, *angles)  # noqa: E731
    program = compiled(function, device, backend)
    for seq in (4, 6, 9):
        kv = torch.randn(2, 2, seq + 5, KV_HEADS, DIM, device=device).unbind(dim)
        inputs = kv if op == "rotate_qk_" else (*operands(op, device, seq)[:3], *kv)
        before, expected = copies(inputs), copies(inputs)
        function(*expected)
        try:
            program(*inputs)
        except NameError:
            assert dim == 1 and seq > 4
            expected = before
        assert all(map(torch.equal, inputs, expected))
