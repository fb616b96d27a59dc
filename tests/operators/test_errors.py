"""Tests of every error that the operators document: its type and its message, for real and for fake tensors. A call that
raises an error writes nothing. For errors under torch.compile see tests/pytorch/test_compile.py.

All messages have one form: `rope.rotate: x is int64 but must be float16, bfloat16, float32 or float64`.
"""

import contextlib
import functools
import itertools
import random
import re

import numpy as np
import pytest
import torch
from bad_calls import CASES, GROUPS, OVERLAPS, RANGES, B, D, H, R, S, calls
from cases import OPERATORS, on_gpu, schema_of
from programs import call_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_rope
from torch_rope.selfcheck.calls import Source

rope = torch.ops.rope
pytestmark = pytest.mark.core

# ---- tables of errors ----


def assert_raises(op, a, error, message):
    """Asserts that the call op(**a) raises this error and leaves its arguments as they are.

    With fake tensors it raises the same error, unless it is an IndexError. With learned angles it does, too.
    """
    before = {name: (t.clone(), t._version) for name, t in a.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(error, match=message) as raised:
        op(**a)
    assert type(raised.value) is error
    # All messages have this form. An IndexError of positions is about their sum with the offset.
    assert re.match(r"rope\._?[a-z]\w+: \w.* but (position \+ offset )?must ", str(raised.value))
    assert all(torch.equal(a[name], t) and a[name]._version == version for name, (t, version) in before.items())
    if op in (rope.rotate, rope.rotate_qk, rope.cos_sin, rope.axial_cos_sin):
        names = [name for name in before if name in ("cos", "sin", "inv_freq") and a[name].is_floating_point()]
        with pytest.raises(error, match=message):
            op(**a | {name: a[name].clone().requires_grad_() for name in names})
    if error is not IndexError:
        mode = FakeTensorMode()  # its tensors share a storage if the real ones do
        with mode, pytest.raises(error, match=message):
            op(**{name: mode.from_tensor(t) if name in before else t for name, t in a.items()})


@pytest.mark.parametrize("case", CASES + OVERLAPS + RANGES)
def test_a_bad_call_raises_the_error_for_real_and_for_fake_tensors_and_writes_nothing(case, device):
    for op, a, message in calls(case, device):
        if case.error is IndexError and {"positions", "slots"} & a.keys() and on_gpu(device):
            pytest.skip("on a GPU the kernel checks the values in a tensor, and raises no exception here")
        assert_raises(op, a, case.error, message)


# ---- other tensors ----


@pytest.mark.shared
@pytest.mark.parametrize("source", ["table", "inv_freq"])
@pytest.mark.parametrize("op", GROUPS["qk"])
def test_a_tensor_on_another_device_is_an_error(op, source, device):
    """All tensors must be on the device of q. The other device is meta, which every machine has."""
    of_cache = {"q_out": "bshd", "q_dtype": torch.int8, "quantised": (torch.int8, torch.int8), "slots": "int64 [B,S]"}
    good = call_of(op, device, Source(source, "int64 [B,S]"), q_weight="float32", **of_cache)
    here = re.escape(str(good["q"].device))
    for name in good.keys() - {"q"}:
        with pytest.raises(ValueError, match=rf"rope.{op}: {name} is on meta but must be on {here}, the device of q"):
            getattr(rope, op)(**good | {name: good[name].to("meta")})


@pytest.mark.shared
def test_a_message_shows_symbolic_sizes():
    rotate_qk = make_fx(lambda q, k: rope.rotate_qk(q, k, inv_freq=torch.ones(R // 2)), tracing_mode="symbolic")
    with pytest.raises(ValueError, match="rope.rotate_qk: k has seq s.* but must have seq s.*, as q has; only"):
        rotate_qk(torch.ones(B, S, H, D), torch.ones(B, S + 1, H, D))


def needed_tensors(op):
    """Returns the names of the arguments that must be tensors."""
    return [a.name for a in schema_of(op).arguments if not a.has_default_value() and a.type.kind() == "TensorType"]


@pytest.mark.shared
@pytest.mark.parametrize("op", OPERATORS)
def test_none_instead_of_a_tensor_is_an_error(op, device):
    """From Python, None passes for an argument that the schema declares as Tensor, so the operator must check it."""
    names, good = needed_tensors(op), call_of(op, device)
    with pytest.raises(ValueError, match=f"rope.{op}: {names[0]} is None but must be a tensor"):
        getattr(rope, op)(**dict.fromkeys(a.name for a in schema_of(op).arguments if not a.has_default_value()))
    for name in names if not op.startswith("_") else []:
        with pytest.raises(ValueError, match=f"rope.{op}: {name} is None but must be a tensor"):
            getattr(rope, op)(**good | {name: None})


NESTED = (
    " is a nested tensor but must be a plain tensor; pass the values of a nested tensor with layout=torch.jagged, and "
    "positions that torch_rope.positions_from_cu_seqlens makes of its offsets"
)
REFUSED = {  # how to make the tensor -> the end of the message
    "jagged": (lambda t: torch.nested.nested_tensor([*t], layout=torch.jagged), NESTED),
    "nested": (lambda t: torch.nested.nested_tensor([*t], layout=torch.strided), NESTED),
    "sparse": (torch.Tensor.to_sparse, " is a torch.sparse.FloatTensor but must be dense and not quantized"),
    "quantized": (
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        " is a QuantizedCPUQInt8Type but must be dense and not quantized",
    ),
}


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*(nested|quantiz)")
@pytest.mark.parametrize("op", OPERATORS)
def test_tensors_that_no_back_end_takes_are_refused_by_name(op):
    """The last tensor is of this kind and all others are plain. Without autograd, the error is the same."""
    names = needed_tensors(op)
    for make, message in REFUSED.values():
        given = {a.name: None for a in schema_of(op).arguments if not a.has_default_value()}
        given |= {name: torch.ones(2, 3, 1, 4) for name in names}
        given[names[-1]] = make(given[names[-1]])
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context(), pytest.raises(NotImplementedError, match=re.escape(f"rope.{op}: {names[-1]}{message}")):
                getattr(rope, op)(**given)


LEARNED = {  # what gives a number a derivative
    "requires_grad": lambda f, number: f(number.requires_grad_()),
    "forward mode": lambda f, number: torch.func.jvp(f, (number,), (number,)),
    "vmap": lambda f, number: torch.vmap(f)(number[None]),
}


@pytest.mark.cpu
@pytest.mark.parametrize("learn", LEARNED)
@pytest.mark.parametrize("op", [op for op in OPERATORS if not op.startswith("_")])
def test_a_function_reads_a_number_in_a_tensor_unless_it_is_learned(op, learn):
    """The functions leave a default out, but not one that is learned."""
    function, given = getattr(torch_rope, op), call_of(op, "cpu")
    for a in (a for a in schema_of(op).arguments if str(a.type) == "float"):
        for number in torch.tensor([a.default_value, 0.5], dtype=torch.float64):
            call = lambda number, name=a.name: function(**given | {name: number})  # noqa: E731
            call(number)
            with pytest.raises(TypeError, match=f"rope.{op}: {a.name} is of .* but must be a number; pass a float, or"):
                LEARNED[learn](call, number)


@pytest.mark.cpu
def test_a_function_whose_flag_had_another_type_takes_a_right_one_of_the_same_value():
    """No other test has this attention_factor: flags that were right once are known by their values."""
    x, options = torch.ones(2, 1, 8), {"inv_freq": torch.ones(2), "attention_factor": 1.2345}
    with pytest.raises(TypeError, match="rotary_start is 3.0 but must be an integer"):
        torch_rope.rotate(x, **options, rotary_start=3.0)
    assert torch.equal(torch_rope.rotate(x, **options, rotary_start=3)[..., :3], x[..., :3])


# ---- overlapping memory ----


@pytest.mark.cpu
def test_two_storages_of_the_same_memory_overlap():
    memory = np.zeros((1, 6, 1, 4), np.float32)
    with pytest.raises(ValueError, match="q overlaps k but must have separate memory, because both are written"):
        rope.rotate_qk_(torch.from_numpy(memory), torch.from_numpy(memory), inv_freq=torch.ones(2))


def addresses(t):
    return torch.arange(4000).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()


def share_exactly(a, b):
    return not set(addresses(a)).isdisjoint(addresses(b))


def share_a_range(a, b):
    a, b = addresses(a), addresses(b)
    return min(a) <= max(b) and min(b) <= max(a)


@pytest.mark.shared
@pytest.mark.parametrize("with_caches", [False, True])
def test_an_overlap_is_found_by_the_addresses_of_the_elements(with_caches):
    """q, q_out, k and v are compared with a cache by address ranges, all other tensors exactly. With caches the views lie
    further apart, so that some calls are legal."""
    draw, storage, freq = random.Random(0), torch.zeros(4000), torch.ones(1)

    def view(*sizes, apart):
        strides = [draw.randrange(60), draw.randrange(40), draw.randrange(20), draw.randint(1, 6)]
        return storage.as_strided(sizes, strides[-len(sizes) :], draw.randrange(apart))

    for _ in range(300):
        most, apart = ((2, 2, 2), 500) if with_caches else ((3, 4, 3), 60)
        batch, seq, heads = (draw.randint(1, n) for n in most)
        q, k, v = (view(batch, seq, h, 2, apart=apart) for h in (draw.randint(1, 2), heads, heads))
        written, exactly, by_range = [q, k], [(q, k)], []
        call = functools.partial(rope.rotate_qk_, q, k, inv_freq=freq)
        if with_caches:
            caches = [view(batch, seq, heads, 2, apart=3000) for _ in "kv"]
            weight, q_out = view(2, apart=3000), draw.choice([q, view(*q.shape, apart=apart)])
            written = [q_out, *caches]
            exactly = [caches, (q_out, k), (q_out, v), *((t, weight) for t in written)]
            exactly += [(q_out, q)] * (addresses(q_out) != addresses(q))
            by_range = itertools.product((q, q_out, k, v), caches)
            call = functools.partial(rope.rotate_into_cache_, q, k, v, *caches, None, None, freq)
            call = functools.partial(call, q_norm_weight=weight, k_norm_weight=weight, q_out=q_out)
        shared = any(len({*addresses(t)}) < t.numel() for t in written)
        shared |= any(share_exactly(*pair) for pair in exactly) or any(share_a_range(*pair) for pair in by_range)
        with pytest.raises(ValueError) if shared else contextlib.nullcontext():
            call()
