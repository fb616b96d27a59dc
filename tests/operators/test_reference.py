"""Tests torch_rope.reference, which says in plain torch what every operator computes.

The operators agree with the reference, and the reference agrees with the oracle. The functions of torch_rope have the
same arguments as the operators, and pass them on.
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
BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM = 2, 5, 3, 2, 24, 16
ROUNDED_ANGLE = 64 * 2.0**-53  # how far an angle of up to 64 radians may be off that is rounded to float64
FLAGS = [{}, {"interleaved": True}, {"attention_factor": 1.2, "inverse": True}]
# (source, dtype, number): every source with every dtype. The number selects the other options of a call, so that each
# option occurs with many sources and dtypes.
COVER = [(source, dtype, i + j) for i, source in enumerate(SOURCES) for j, dtype in enumerate(DTYPES)]


def on_cpu(value, exact):
    """Returns a copy of value, with its tensors on the CPU. If exact, floating-point tensors become float64."""
    if isinstance(value, dict):
        return {name: on_cpu(v, exact) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [on_cpu(v, exact) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.cpu().clone()
    return value.double() if exact and value.is_floating_point() else value


def assert_near(actual, right, interleaved, start, ulps, plus):
    """Asserts that `actual` is close to `right`, the result of the reference on float64 copies of the arguments.

    If `actual` is float64, the reference may be wrong by as much as the operator, so the limit is doubled; and its
    angles, which are rounded to float64, may be wrong by the last bit of an angle of 64 radians.
    """
    plus = max(plus, ROUNDED_ANGLE) if actual.dtype == torch.float64 else plus
    channels = slice(start, start + ROTARY_DIM)
    rotated = right[..., channels].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    size = right.abs()
    size[..., channels] = rotated.norm(dim=-1 if interleaved else -2, keepdim=True).expand(rotated.shape).flatten(-2)
    assert_close(actual, (right.numpy(), size.numpy()), 2 * ulps if actual.dtype == torch.float64 else ulps, plus)


def arguments(source, dtype, device, start, batch=BATCH):
    """Returns [q, k, v], [q_norm_weight, k_norm_weight], and a dict of the arguments for the angles."""
    if not supported(device, dtype, source):
        pytest.skip("Apple GPUs have no float64")
    size, table_dtype = (batch, SEQ, HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM), torch.promote_types(dtype, torch.float32)
    k_heads, angles = make_angles(size, source, table_dtype, device, start)
    xs = [torch.randn(batch, SEQ, h, HEAD_DIM).to(dtype).to(device) for h in (HEADS, k_heads, KV_HEADS)]
    weights = [torch.randn(HEAD_DIM).to(dtype).to(device) for _ in "qk"]
    return xs, weights, angles


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("source, dtype, number", COVER, ids=str)
def test_rotations_agree_with_the_reference(source, dtype, number, norm, device):
    xs, weights, angles = arguments(source, dtype, device, [*STARTS][number % 4])
    xs, weights, flags = xs[:2], weights if norm else [], dict(FLAGS[number % 3])
    if norm:
        flags.pop("inverse", None)
        flags["norm_eps"] = 1e-3
    op = "norm_rotate_qk" if norm else "rotate_qk"
    limit = limits(dtype, angles, flags.get("attention_factor", 1.0), norm)

    found = getattr(rope, op)(*xs, *weights, **angles, **flags)
    right = getattr(reference, op)(*on_cpu([*xs, *weights], True), **on_cpu(angles, True), **flags)
    for actual, r in zip(found, right, strict=True):
        assert_near(actual, r, "interleaved" in flags, angles.get("rotary_start", 0), *limit)

    # On arguments of the dtype of x the reference is within the same limits of the oracle, and rounds once.
    limit = (0.51, 0.0) if dtype in (torch.float16, torch.bfloat16) else (limit[0], max(limit[1], ROUNDED_ANGLE))
    own = getattr(reference, op)(*on_cpu([*xs, *weights], False), **on_cpu(angles, False), **flags)
    for x, weight, actual in zip(xs, weights or (None, None), own, strict=True):
        assert actual.dtype == dtype
        assert_close(actual, rotate(x, **angles, **flags, **({"norm_weight": weight} if norm else {})), *limit)
    if not norm:
        assert torch.equal(reference.rotate(xs[0].cpu(), **on_cpu(angles, False), **flags), own[0])


@pytest.mark.parametrize("source, dtype, number", COVER, ids=str)
def test_rotate_into_cache_agrees_with_the_reference(source, dtype, number, device):
    cache, batch = [("sequence", 1), ("blocks", 2), ("blocks kv heads", 2)][number % 3]
    xs, weights, angles = arguments(source, dtype, device, [*STARTS][number % 4], batch)
    start = angles.get("rotary_start", 0)
    blocks, size = batch + 1, SEQ + 47
    options = dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=True)) if number % 2 else {}
    paged = source.kind.startswith(("token", "head")) or number % 4 > 1
    if paged:
        cells = size if cache == "sequence" else blocks * size
        options["slots"] = some_slots((batch, SEQ), cells, torch.int32, device)
    else:
        set_apart(angles, batch, SEQ + 40)
    if cache == "sequence":
        xs = [x[0] for x in xs]
    make = lambda *shape: torch.randn(shape).to(dtype).to(device)  # noqa: E731
    caches = CACHES[cache](make, blocks, size, xs[1].shape[-2], HEAD_DIM)
    if number % 5 == 0:  # v has a shape of its own
        xs[2] = make(*xs[2].shape[:-2], 1, HEAD_DIM + 7)
        caches = caches[0], CACHES[cache](make, blocks, size, 1, HEAD_DIM + 7)[1]
    elif xs[1].shape[-2] != KV_HEADS:
        xs[2] = make(*xs[1].shape)
    before, right = on_cpu(caches, True), on_cpu([*xs, *caches], True)
    reference.rotate_into_cache(*right, **on_cpu(angles, True), **on_cpu(options, True), interleaved=True)
    rope.rotate_into_cache_(*xs, *caches, **angles, **options, interleaved=True)
    limit = limits(dtype, angles, norm=number % 2 == 1)
    assert_near(xs[0], right[0], True, start, *limit)
    assert_near(caches[0], right[3], True, start, *limit)
    assert torch.equal(caches[1].cpu().double(), right[4])
    tokens = (options["slots"] >= 0).sum().item() if paged else batch * SEQ
    for found, r, b in zip(caches, right[3:], before, strict=True):
        others = (r == b).all(-1).all(-1)
        assert (~others).sum() == tokens and torch.equal(found.cpu().double()[others], b[others])


@pytest.mark.parametrize("eager_rounding", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


@pytest.mark.parametrize("slots, positions, offset", PADS)
def test_pads_agree_with_the_reference(slots, positions, offset, device):
    xs = [torch.randn(2, 5, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)] + [torch.zeros(4, 8, 2, HEAD_DIM)] * 2
    angles = dict(
        zip(("cos", "sin"), torch_rope.cos_sin(torch.arange(4), torch_rope.inv_freq(ROTARY_DIM)), strict=True)
    )
    angles |= {} if positions is None else {"positions": torch.tensor(positions)}
    angles |= {"slots": torch.tensor(slots)}
    right, found = on_cpu(xs, False), [x.to(device, copy=True) for x in xs]
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
            for tables in (
                functions.cos_sin(p, f, **options),
                functions.axial_cos_sin(p[None], f.unsqueeze(-2), **options),
            ):
                for table, value in zip(tables, right, strict=True):
                    assert table.dtype == (dtype or torch.float32)
                    size = np.full(value.shape, attention_factor)
                    assert_close(table, (value * attention_factor, size), *limits(table.dtype, {"inv_freq": inv_freq}))


def test_the_angles_of_all_axes_are_added(device):
    positions, inv_freq = torch.randint(0, 99, (3, 2, SEQ)), torch.rand(3, 8)
    right = reference.axial_cos_sin(positions, inv_freq, dtype=torch.float64)
    for table, value in zip(torch_rope.axial_cos_sin(positions.to(device), inv_freq.to(device)), right, strict=True):
        assert (table.cpu() - value).abs().max() <= 5e-7
    angle = sum(p.unsqueeze(-1) * f for p, f in zip(positions.double(), inv_freq.double(), strict=True))
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
