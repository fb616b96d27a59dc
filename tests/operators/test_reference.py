"""Tests torch_rope.reference, which says in plain torch what every operator computes.

The reference agrees with the oracle, and with the operators where these write caches. The functions of torch_rope have
the same arguments as the operators, and pass them on.
"""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import CACHES, DTYPES, QUANTISED, SOURCES, STARTS, has_dtype, make_angles, set_apart, some_slots, supported
from oracle import assert_close, cos_sin, limits, rotate
from test_cache import PADS

import torch_rope
from torch_rope import _signatures, reference

rope = torch.ops.rope
SEQ, HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM = 5, 3, 2, 24, 16
ROUNDED_ANGLE = 64 * 2.0**-53  # how far an angle of up to 64 radians may be off that is rounded to float64
FLAGS = [{}, {"interleaved": True}, {"attention_factor": 1.2, "inverse": True}]
# (source, dtype, number): every source with two dtypes. The number selects the other options of a call, so that each
# option occurs with many sources and dtypes.
COVER = [(source, DTYPES[(i + j) % 4], i + j) for i, source in enumerate(SOURCES) for j in (0, 1)]


def arguments(source, dtype, start, batch=2):
    """Returns [q, k, v], [q_norm_weight, k_norm_weight], and a dict of the arguments for the angles."""
    size, table_dtype = (batch, SEQ, HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM), torch.promote_types(dtype, torch.float32)
    k_heads, angles = make_angles(size, source, table_dtype, "cpu", start)
    xs = [torch.randn(batch, SEQ, h, HEAD_DIM).to(dtype) for h in (HEADS, k_heads, KV_HEADS)]
    return xs, [torch.randn(HEAD_DIM).to(dtype) for _ in "qk"], angles


@pytest.mark.cpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("source, dtype, number", COVER, ids=str)
def test_the_rotations_of_the_reference_agree_with_the_oracle(source, dtype, number, norm):
    """They round once."""
    xs, weights, angles = arguments(source, dtype, [*STARTS][number % 4])
    flags = dict(FLAGS[number % 3])
    if norm:
        flags.pop("inverse", None)
        flags["norm_eps"] = 1e-3
    ulps, plus = limits(dtype, angles, flags.get("attention_factor", 1.0), norm)
    limit = (0.51, 0.0) if dtype.itemsize == 2 else (ulps, max(plus, ROUNDED_ANGLE))
    found = getattr(reference, "norm_rotate_qk" if norm else "rotate_qk")(*xs[:2], *weights * norm, **angles, **flags)
    for x, weight, out in zip(xs, weights, found, strict=False):
        assert out.dtype == dtype
        assert_close(out, rotate(x, **angles, **flags, **({"norm_weight": weight} if norm else {})), *limit)
    if not norm:
        assert torch.equal(reference.rotate(xs[0], **angles, **flags), found[0])


@pytest.mark.cpu
@pytest.mark.parametrize("source, number", [*zip(SOURCES, range(len(SOURCES)), strict=True)], ids=str)
def test_rotate_into_cache_agrees_with_the_reference(source, number):
    cache, batch = [("sequence", 1), ("blocks", 2), ("blocks kv heads", 2)][number % 3]
    xs, weights, angles = arguments(source, torch.float64, [*STARTS][number % 4], batch)
    blocks, size = batch + 1, SEQ + 47
    options = dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True)) if number % 2 else {}
    paged = source.kind.startswith(("token", "head")) or number % 4 > 1
    if paged:
        cells = size if cache == "sequence" else blocks * size
        options["slots"] = some_slots((batch, SEQ), cells, torch.int32, "cpu")
    else:
        set_apart(angles, batch, SEQ + 40)
    make = lambda *shape: torch.randn(shape, dtype=torch.float64)  # noqa: E731
    caches = CACHES[cache](make, blocks, size, xs[1].shape[-2], HEAD_DIM)
    if number % 5 == 0:  # v has a shape of its own
        xs[2] = make(batch, SEQ, 1, HEAD_DIM + 7)
        caches = caches[0], CACHES[cache](make, blocks, size, 1, HEAD_DIM + 7)[1]
    elif xs[1].shape[-2] != KV_HEADS:
        xs[2] = make(*xs[1].shape)
    if cache == "sequence":
        xs = [x[0] for x in xs]
    right, found = ([t.clone() for t in (*xs, *caches)] for _ in range(2))
    reference.rotate_into_cache(*right, **angles, **options, interleaved=True)
    rope.rotate_into_cache_(*found, **angles, **options, interleaved=True)
    for actual, r in zip(found, right, strict=True):
        torch.testing.assert_close(actual, r, rtol=0, atol=1e-12)
    tokens = (options["slots"] >= 0).sum() if paged else batch * SEQ
    for r, before in zip(right[3:], caches, strict=True):
        assert (r != before).any(-1).any(-1).sum() == tokens


@pytest.mark.shared
@pytest.mark.parametrize("dtype, eager_rounding", [(torch.float32, True), (torch.bfloat16, False), (torch.half, True)])
@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_quantised_caches_agree_with_the_reference(stored, dtype, eager_rounding, device):
    """All heads of q and k are normalised together, and v too. A number near the middle of two may go to either."""
    if not has_dtype(device, stored):
        pytest.skip("Metal has no float8")
    heads = HEADS, KV_HEADS, KV_HEADS
    xs = [torch.randn(2, SEQ, n, HEAD_DIM).to(dtype) for n in heads]
    caches = [torch.zeros(3, SEQ + 5, KV_HEADS, HEAD_DIM, dtype=torch.int8).view(stored) for _ in "kv"]
    options = {"inv_freq": torch_rope.inv_freq(ROTARY_DIM, dtype=torch.float32)}
    options |= {"k_scale": torch.rand(KV_HEADS) / 30 + 0.02, "v_scale": torch.tensor(0.03)}
    options |= {f"{x}_norm_weight": torch.rand(n, HEAD_DIM) for x, n in zip("qk", heads, strict=False)}
    flags = {"norm_v": True, "norm_eps": 1e-2, "offset": 3, "eager_rounding": eager_rounding}
    right, found = ([t.clone().to(d) for t in (*xs, *caches)] for d in ("cpu", device))
    reference.rotate_into_cache(*right, **options, **flags)
    torch_rope.rotate_into_cache(*found, **{name: t.to(device) for name, t in options.items()}, **flags)
    torch.testing.assert_close(found[0].cpu(), right[0])
    for actual, expected in zip(found[3:], right[3:], strict=True):
        codes = [t.cpu().view(torch.int8).int() for t in (actual, expected)]
        assert codes[1].any() and (codes[0] - codes[1]).abs().max() <= 1
        assert torch.ne(*codes).float().mean() < 0.01


@pytest.mark.shared
@pytest.mark.parametrize("slots, positions, offset", PADS)
def test_pads_agree_with_the_reference(slots, positions, offset, device):
    xs = [torch.randn(2, 5, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)] + [torch.zeros(4, 8, 2, HEAD_DIM)] * 2
    cos, sin = torch_rope.cos_sin(torch.arange(4), torch_rope.inv_freq(ROTARY_DIM))
    angles = {"cos": cos, "sin": sin, "slots": torch.tensor(slots)}
    angles |= {} if positions is None else {"positions": torch.tensor(positions)}
    right, found = ([x.to(where, copy=True) for x in xs] for where in ("cpu", device))
    reference.rotate_into_cache(*right, **angles, offset=offset)
    torch_rope.rotate_into_cache(*found, **{name: t.to(device) for name, t in angles.items()}, offset=offset)
    for actual, r in zip(found, right, strict=True):
        torch.testing.assert_close(actual.cpu(), r, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("attention_factor", [1.0, 1.3])
@pytest.mark.parametrize("positions", [torch.tensor([0, 3, 2**24 - 1]), torch.rand(2, 3) * 100], ids=["int64", "float"])
def test_tables_and_their_reference_agree_with_the_oracle(positions, attention_factor, device):
    inv_freq = torch_rope.inv_freq(ROTARY_DIM, dtype=torch.float32)  # so the products of the reference are exact
    right = cos_sin(positions.numpy(), inv_freq.double().numpy(), np.longdouble)
    for dtype in (None, *DTYPES):
        if not supported(device, dtype):
            continue
        options = {"attention_factor": attention_factor, "dtype": dtype}
        for functions, where in (torch_rope, device), (reference, "cpu"):
            p, f = positions.to(where), inv_freq.to(where)
            axial = functions.axial_cos_sin(p[None], f.unsqueeze(-2), **options)
            for tables in functions.cos_sin(p, f, **options), axial:
                for table, value in zip(tables, right, strict=True):
                    assert table.dtype == (dtype or torch.float32)
                    size = np.full(value.shape, attention_factor)
                    assert_close(table, (value * attention_factor, size), *limits(table.dtype, {"inv_freq": inv_freq}))


def test_the_angles_of_all_axes_are_added(device):
    positions, inv_freq = torch.randint(0, 99, (3, 2, SEQ)), torch.rand(3, 8)
    right = reference.axial_cos_sin(positions, inv_freq, dtype=torch.float64)
    for table, value in zip(torch_rope.axial_cos_sin(positions.to(device), inv_freq.to(device)), right, strict=True):
        assert (table.cpu() - value).abs().max() <= 5e-7
    angle = torch.einsum("abs,aj->bsj", positions.double(), inv_freq.double())
    torch.testing.assert_close(right, (angle.cos(), angle.sin()), rtol=0, atol=1e-12)


# ---- signatures ----

NONE = inspect.Parameter.empty
FUNCTIONS = {  # operator -> function of torch_rope, for every operator except those for gradients
    s.name: {"rotate_into_cache_": "rotate_into_cache"}.get(s.name, s.name)
    for s in _signatures.operators()
    if not s.name.endswith("_backward")
}


def arguments_of(op):
    """Returns (name, whether it is keyword-only, default) for each argument of an operator."""
    arguments = getattr(rope, op).default._schema.arguments
    return [(a.name, a.kwarg_only, a.default_value if a.has_default_value() else NONE) for a in arguments]


def parameters_of(function):
    """Returns the same as arguments_of for the parameters of a Python function, except *args and **kwargs."""
    found = [
        p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return [(p.name, p.kind == p.KEYWORD_ONLY, p.default) for p in found]


@pytest.mark.parametrize("op, function", FUNCTIONS.items())
def test_the_functions_have_the_arguments_of_the_schemas(op, function):
    """A function of the reference may have fewer, because it passes the others on by *args and **kwargs."""
    assert parameters_of(getattr(torch_rope, function)) == arguments_of(op)
    assert set(parameters_of(getattr(reference, function.removesuffix("_")))) <= set(arguments_of(op))


@pytest.mark.parametrize("op, function", FUNCTIONS.items())
def test_the_functions_pass_every_argument(op, function, monkeypatch):
    calls = []
    recorder = SimpleNamespace(default=lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(torch_rope.functional, "_ops", SimpleNamespace(**{op: recorder}))
    positional = {name: object() for name, by_keyword, _ in arguments_of(op) if not by_keyword}
    defaults = {name: default for name, by_keyword, default in arguments_of(op) if by_keyword}
    for name in defaults:
        given = positional | {name: object()}
        getattr(torch_rope, function)(**given)
        args, kwargs = calls.pop()
        assert defaults | dict(zip(positional, args, strict=True)) | kwargs == defaults | given


def test_every_tensor_has_axes():
    schemas = [s.op._schema for s in _signatures.operators()]
    assert {a.name for s in schemas for a in s.arguments if "Tensor" in str(a.type)} == set(_signatures.AXES)
