"""Tests that vmap of every operator gives what a loop over the samples gives."""

import pytest
import torch
from cases import written_by
from programs import FUNCTIONAL, IN_PLACE, ROTATING, call_of, copies, operands, rope, tables, tensors_of
from torch.func import grad, vmap

import torch_rope
from torch_rope.selfcheck.calls import Source

pytestmark = [pytest.mark.core, pytest.mark.shared, pytest.mark.usefixtures("no_vmap_fallback")]

N = 3  # samples
REFUSED = ["rotate_into_cache_"]


@pytest.fixture
def no_vmap_fallback():
    """Makes torch's slow fallback an error. It would give the right values, with a warning."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def loop(function, in_dims, *args):
    """Returns what vmap is defined to return, by a loop over the samples."""
    samples = [
        tensors_of(function(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))))
        for i in range(N)
    ]
    return tuple(torch.stack(outs) for outs in zip(*samples, strict=True))


def assert_vmap(function, in_dims, *args, close=torch.equal):
    a, b = copies(args), copies(args)
    expected = loop(function, in_dims, *b)
    for out, wanted in zip(tensors_of(vmap(function, in_dims)(*a)), expected, strict=True):
        assert close(out, wanted)
    for x, y in zip(a, b, strict=True):  # what was written in place
        assert torch.equal(x, y)


# ---- every argument of every operator ----


def a_call_of(op, device):
    """Returns the tensors of a call, by name. The angles are a table, or frequencies if the operator takes no table."""
    options = {"slots": "int64 [B,S]", "q_weight": "float32", "q_out": "bshd", "q_factor": "[B,S]"}
    return call_of(op, device, Source("table", "int32 [B,S]"), **options)


def with_samples(call, names):
    """Returns in_dims and the arguments. Those in names get a dimension of samples: the first, the second or the last."""
    dims = {
        name: None if name not in names else (-1, 0, min(1, call[name].dim()))[i % 3] for i, name in enumerate(call)
    }
    stacked = lambda t, dim: t if dim is None else torch.stack([t, t.flip(0), t.roll(1, 0)], dim)  # noqa: E731
    return tuple(dims.values()), tuple(map(stacked, call.values(), dims.values()))


def mapped_of(op):
    """Returns lists of the arguments that are mapped together: each argument with those that the operator writes in
    place, the arguments that are rotated, and all arguments."""
    call, written = list(a_call_of(op, "cpu")), written_by(op)
    alone = [[name, *written] for name in call if name not in written]
    rotated = [name for name in call if name in ("x", "q", "k", *written)]
    return [*alone, *([rotated] if rotated else []), call]


@pytest.mark.parametrize("op", IN_PLACE + FUNCTIONAL)
def test_each_argument_can_be_mapped_or_is_an_error(op, device):
    """The error says what to do instead. No samples have empty results, and no values: position 0 is not in the table."""
    call, written = a_call_of(op, device), written_by(op)
    call["positions"] -= 64 if op in ROTATING else 0

    def function(*args):
        arguments = dict(zip(call, args, strict=True))
        more = {"offset": 64} if op in ROTATING else {"attention_factor": 1.3, "dtype": torch.float16}
        result = getattr(rope, op)(**arguments, **more)
        return tuple(arguments[name] for name in written) if result is None else result

    for names in mapped_of(op):
        in_dims, args = with_samples(call, names)
        before = copies(args)
        if op not in REFUSED:
            assert_vmap(function, in_dims, *args)
            none = [a if d is None else a.narrow(d, 0, 0) for a, d in zip(args, in_dims, strict=True)]
            some, outs = (tensors_of(vmap(function, in_dims)(*given)) for given in (args, none))
            assert [(t.shape, t.dtype) for t in outs] == [((0, *t.shape[1:]), t.dtype) for t in some]
            continue
        with pytest.raises(RuntimeError, match="is mapped by vmap but must not be; pass the mapped dimension"):
            vmap(function, in_dims)(*args)
        assert all(map(torch.equal, args, before))


@pytest.mark.parametrize("of_result", [lambda out: out.square().sin().sum(), torch.sum], ids=["mapped", "the same"])
@pytest.mark.parametrize("which", ["the first", "what is rotated", "angles", "all"])
@pytest.mark.parametrize("op", FUNCTIONAL)
def test_vmap_of_gradients_agrees_with_gradients_of_vmap(op, which, of_result, device):
    """The incoming gradient is mapped, or the same for all samples. That of a shared argument is a sum over samples."""
    call = a_call_of(op, device)
    angles = ("cos", "sin") if op in ROTATING else ("inv_freq",)
    rotated = [name for name in call if name in ("x", "q", "k", "q_out_grad", "k_out_grad")]
    names = {"the first": list(call)[:1], "what is rotated": rotated, "angles": angles[:1], "all": call}[which]
    in_dims, args = with_samples(call, names or call)  # an operator that makes tables rotates nothing
    without = angles if "norm" in op or "backward" in op else ()
    numbers = tuple(i for i, (name, t) in enumerate(call.items()) if t.is_floating_point() and name not in without)

    def loss(*args):
        outs = getattr(rope, op)(**dict(zip(call, args, strict=True)))
        return sum(map(of_result, tensors_of(outs)))

    gradients = grad(loss, numbers)
    assert_vmap(gradients, in_dims, *args, close=lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-4))
    each = vmap(gradients, in_dims)(*args)
    of_all = grad(lambda *args: vmap(loss, in_dims)(*args).sum(), numbers)(*args)
    for number, one, many in zip(numbers, each, of_all, strict=True):
        dim = in_dims[number]
        torch.testing.assert_close(many, one.sum(0) if dim is None else one.movedim(0, dim), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", [op for op in IN_PLACE if op not in REFUSED])
def test_a_tensor_that_is_written_must_be_mapped(op, device):
    """torch's own in-place operators raise an error too."""
    xs = operands(op, device)
    before = copies(xs)
    positions = torch.randint(0, 60, (N, 6), device=device)
    with pytest.raises(RuntimeError, match=f"rope.{op}: (x|q) is not mapped by vmap but must be"):
        vmap(lambda p: getattr(rope, op)(*xs, *tables(device), positions=p))(positions)
    assert all(map(torch.equal, xs, before))


# ---- corners ----


# Where k and inv_freq are in the memory of q: how far the samples are apart, and where the first one begins.
SHARED = {
    "q overlaps k but": ((320, 24), (4, 2000)),
    "q overlaps inv_freq but": ((320, 1000), (320, 320)),  # that of the sample before
    r"k has shape \[3, 5, 2, 8\] and strides \[0, 32, 8, 1\], so some": ((0, 1000), (4, 2000)),
}


@pytest.mark.parametrize("message", SHARED)
def test_all_samples_of_what_is_written_must_have_separate_memory(message, device):
    memory, ((k_step, k_start), (freq_step, freq_start)) = torch.zeros(3000, device=device), SHARED[message]
    q, k = (memory.as_strided((N, 5, n, 8), (d, 32, 8, 1), i) for n, d, i in ((4, 320, 0), (2, k_step, k_start)))
    freq = memory.as_strided((N, 4), (freq_step, 1), freq_start)
    for dim, f in ((0, freq), (None, freq[0])):
        with pytest.raises(ValueError, match=f"rope.rotate_qk_: {message}"):
            vmap(lambda q, k, f: rope.rotate_qk_(q, k, inv_freq=f), (0, 0, dim))(q, k, f)


def test_vmap_errors_are_those_of_a_sample_and_leave_nothing_written(device):
    x, freq = torch.randn(2, 5, 3, 2, 8, device=device), torch_rope.inv_freq(8, device=device)
    with pytest.raises(ValueError, match="rope.rotate: positions has batch 10 but must have batch 5, as x has"):
        vmap(lambda x: rope.rotate(x, inv_freq=freq, positions=torch.zeros(10, 3, dtype=torch.int64, device=device)))(x)
    if device != "cpu":
        return  # on a GPU the kernel checks the range, and raises no exception here
    before, cos = x.clone(), torch.randn(2, 5, 4)
    positions = torch.tensor([[0, 1, 2], [0, 1, 9]])
    with pytest.raises(IndexError):
        vmap(lambda x, c, p: (rope.rotate_(x, c, c, positions=p), x.sum())[1])(x, cos, positions)
    assert torch.equal(x, before)
