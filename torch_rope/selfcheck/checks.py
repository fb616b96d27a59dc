"""Checks of values, gradients and errors.

The expected results come from torch_rope.reference, in float64 on the CPU. Errors are given in ulps: an ulp (unit in
the last place) is the distance between neighbouring numbers of the result's dtype, here at the magnitude of a pair of
channels.
"""

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import torch_rope
from torch_rope import reference
from torch_rope.frequencies import on_device

rope = torch.ops.rope
HALF = torch.float16, torch.bfloat16
# The dtypes of quantised caches, and their least and largest numbers.
QUANTISED = {torch.float8_e4m3fn: (-448, 448), torch.float8_e5m2: (-57344, 57344), torch.int8: (-128, 127)}
QUOTIENT_ERROR = 2e-6  # the largest error of a number before it is quantised, as a part of its pair's magnitude
ANGLE_ERROR = 5e-7  # the largest error of cos and sin that are computed from inv_freq at positions below 2^24


class Skip(Exception):
    """Says that a check cannot run here, and why."""


@dataclass
class Group:
    """Checks that are reported together. A case raises Skip, or another error if a result is wrong."""

    name: str
    cases: dict[str, Callable[[], None]]
    seconds: float = 1.0  # a group begins few cases after this time, so a slow device runs fewer cases
    apart: bool = False  # runs in a process of its own
    names_kernels: bool = False  # a case has the name of the Metal kernel that it must run
    limit: float = 60.0  # the process is killed if it reports nothing for so many seconds


# ---- The expected results ----


def exact(value):
    """Returns a copy of a tensor on the CPU, in float64 if it is floating point. Returns any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    value = value.cpu().clone()
    return value.double() if value.is_floating_point() else value


def magnitude(result: Tensor, options: dict) -> Tensor:
    """Returns the magnitude of each channel's pair, or 0 for a channel that is copied and so must keep its bits."""
    rotary_dim, start = 2 * options["cos" if "cos" in options else "inv_freq"].shape[-1], options["rotary_start"]
    before, rotated, after = result.detach().tensor_split((start, start + rotary_dim), -1)
    pairs, dim = (
        (rotated.unflatten(-1, (-1, 2)), -1) if options["interleaved"] else (rotated.unflatten(-1, (2, -1)), -2)
    )
    size = pairs.norm(dim=dim, keepdim=True).expand(pairs.shape).flatten(-2)
    rest = [t.abs() if "q_norm_weight" in options else torch.zeros_like(t) for t in (before, after)]
    return torch.cat([rest[0], size, rest[1]], -1)


def ulp(dtype: torch.dtype, size: Tensor) -> Tensor:
    """Returns the distance between neighbouring numbers of a floating-point dtype, at the given size."""
    info = torch.finfo(dtype)
    return info.eps * torch.exp2(torch.frexp(size.clamp(min=info.tiny)).exponent.double() - 1)


def in_parts(rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns frequencies for results of dtype in two parts. For float64 the second is 0, because the expected angle is
    a product in float64, which then is exact."""
    inv_freq = torch_rope.inv_freq(rotary_dim)
    high = inv_freq.float()
    return high, (inv_freq - high).float() * (dtype != torch.float64)


def right(op: str, xs: list[Tensor], options: dict) -> list[tuple[Tensor, Tensor]]:
    """Returns the expected results: pairs of a result and the magnitude of each channel's pair.

    The results are those of x or q, of q and k, or of q and both caches. What a quantised cache stores is not rounded.
    """
    dtypes = [x.dtype for x in xs[3:]]
    xs, options = list(map(exact, xs)), {name: exact(value) for name, value in options.items()}
    if "cache" in op:
        scales = options.pop("k_scale", None), options.pop("v_scale", None)
        caches = [torch.full(cache.shape, torch.nan, dtype=torch.float64) for cache in xs[3:]]
        reference.rotate_into_cache(*xs[:3], *caches, **options)
        # Without a norm, v is copied bit for bit.
        sizes = magnitude(caches[0], options), caches[1].abs() * options["norm_v"]
        results = [(xs[0], magnitude(xs[0], options))]
        for new, size, old, scale, dtype in zip(caches, sizes, xs[3:], scales, dtypes, strict=True):
            unwritten = new.isnan()  # these cells must keep their bits
            if scale is not None:
                scale = scale.expand(new.shape[-2])[:, None]
                new, size = (new / scale).clamp(*QUANTISED[dtype]), size.maximum(new.abs()) / scale
            results.append((torch.where(unwritten, old, new), size.masked_fill(unwritten, 0.0)))
        return results
    outs = reference.norm_rotate_qk(*xs, **options) if "norm" in op else [reference.rotate(x, **options) for x in xs]
    return [(out, magnitude(out, options)) for out in outs]


# ---- The cases ----

# (batch, seq, heads of q, heads of k and v, head_dim, rotary_dim, rotary_start)
SIZES = [(2, 5, 4, 2, 64, 64, 0), (1, 1, 8, 2, 128, 128, 0), (1, 33, 3, 1, 80, 32, 17), (3, 7, 2, 2, 128, 64, 64)]
CASES = list(itertools.product(SIZES, range(10), (False, True)))  # (size, source of the angles, interleaved)
LAYOUTS = [
    lambda make, b, s, h, d: make(b, s, h, d),
    lambda make, b, s, h, d: make(b, h, s, d).transpose(1, 2),
    lambda make, b, s, h, d: make(s, b, h, d).transpose(0, 1),
    lambda make, b, s, h, d: make(b, s, h, 2 * d)[..., ::2],
    lambda make, b, s, h, d: make(b * s * h * d + 1)[1:].view(b, s, h, d),
]
CACHES = [  # each makes (k_cache, v_cache) of n blocks of m cells
    lambda make, n, m, h, d: (make(n, m, h, d), make(n, m, h, d)),
    lambda make, n, m, h, d: tuple(make(n, h, m, d).transpose(1, 2) for _ in "kv"),
    lambda make, n, m, h, d: make(2, n, m, h, d).unbind(0),
    lambda make, n, m, h, d: make(n, 2, m, h, d).unbind(1),
]


# Tables by position, by token and by head: the shape of cos without its pairs, and positions of 2 sequences of 9 tokens.
TABLES = [
    ((12,), None),
    ((12,), [[0, 9, 2, 5, 7, 1, 8, 3, 10], [4, 4, 4, 9, 9, 0, 1, 2, 3]]),  # some rows rotate several tokens
    ((12,), [5] * 9),
    ((2, 9), None),
    ((1, 9), None),
    ((2, 9, 4), None),
]


@contextmanager
def describing(name: str):
    """Puts the name of a result before the message of an AssertionError."""
    try:
        yield
    except AssertionError as e:
        raise AssertionError(f"{name}: {e}") from None


def demand(condition: bool, otherwise: str) -> None:
    """Raises AssertionError if the condition is false. Unlike assert, it also works under python -O."""
    if not condition:
        raise AssertionError(otherwise)


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:4000]}"


def describe_call(op: str, args: tuple, kwargs: dict) -> str:
    def text(value):
        if not isinstance(value, Tensor):
            return repr(value)
        kind = f"{str(value.dtype)[6:]}{list(value.shape)}"
        dense = value.is_contiguous() and not value.storage_offset()
        return kind if dense else f"{kind} with storage offset {value.storage_offset()}, strides {value.stride()}"

    return f"rope.{op}({', '.join([*map(text, args), *(f'{name}={text(value)}' for name, value in kwargs.items())])})"


class Check:
    """Has the checks of one device. It tells a worker of each call through functions, which the worker replaces."""

    def __init__(self, device: torch.device, quick: bool = False):
        self.device, self.quick = device, quick
        self.dtypes = [torch.float32, *HALF] + ([torch.float64] if device.type != "mps" else [])  # Metal has no float64
        self.cache_dtypes = list(QUANTISED) if device.type != "mps" else [torch.int8]  # and no float8
        self.worst = (-1.0, "")  # the largest error so far: its part of the allowed error, and a text
        self.before_call: Callable[[str], None] = lambda text: None
        self.after_call: Callable[[], None] = lambda: None
        self.measured: Callable[[str, dict], None] = lambda table, row: None  # reports a row of a table

    def call(self, op: str, *args, **kwargs):
        self.before_call(describe_call(op, args, kwargs))
        result = getattr(rope, op)(*args, **kwargs)
        self.after_call()
        return result

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

    # -- comparisons --

    def within(self, actual: Tensor, expected: Tensor, bound, step=1.0, unit: str = "") -> None:
        """Raises AssertionError unless abs(actual - expected) <= bound * step for all elements."""
        demand(actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}")
        actual, expected = actual.detach().cpu().double(), expected.detach()
        error = ((actual - expected).abs() / step).nan_to_num(nan=torch.inf, posinf=torch.inf).flatten()
        bound = torch.as_tensor(bound, dtype=torch.float64).expand(expected.shape).flatten()
        part, at = (error / bound).max(0)
        text = f"{error[at]:.3g} of {bound[at]:.3g}{unit}"
        self.worst = max(self.worst, (part.item(), text))
        index = [int(i) for i in torch.unravel_index(at, expected.shape)]
        found = f"{actual.flatten()[at]:.9g}, expected {expected.flatten()[at]:.9g}"
        demand(part <= 1, f"the error is {text} at {index}: {found}")

    def near(self, actual: Tensor, expected: Tensor, size: Tensor, ulps: float, part: float = 0.0) -> None:
        """Raises AssertionError unless the error is at most this many ulps at the given size, plus part * size."""
        step = ulp(actual.dtype, size)
        self.within(actual, expected, ulps + part * size / step, step, " ulp")

    def nearest(self, actual: Tensor, expected: Tensor, size: Tensor) -> None:
        """Raises AssertionError unless the numbers of a quantised cache are the nearest ones to the expected numbers."""
        floating = actual.dtype.is_floating_point
        step = ulp(actual.dtype, expected.abs()) if floating else torch.ones_like(expected)
        self.within(actual, expected, 0.5 + QUOTIENT_ERROR * size / step, step, " ulp")

    def near_largest(self, name: str, actual: Tensor, expected: Tensor, part: float = 0.0, ulps: float = 12) -> None:
        """Raises AssertionError unless a gradient's error is a few ulps of its largest element."""
        with describing(name):
            size = expected.abs().max().expand(expected.shape)
            self.near(actual, expected, size, *((1, 0.0) if actual.dtype in HALF else (ulps, part)))

    def same(self, actual, expected) -> None:
        for a, e in zip(actual, expected, strict=True):
            demand(torch.equal(a.cpu(), e.cpu()), "the bits differ")

    # -- arguments --

    def make(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype).to(self.device)

    def tables(self, rows: int, rotary_dim: int) -> list[Tensor]:
        """Returns cos and sin. No kernel of torch_rope computes them, so a broken kernel fails only its own checks."""
        tables = reference.cos_sin(torch.arange(rows), torch_rope.inv_freq(rotary_dim))
        return [t.to(self.device) for t in tables]

    def angles(self, source: int, b: int, s: int, heads: int, rotary_dim: int, dtype: torch.dtype) -> dict:
        """Returns the arguments that give the angles.

        source: 0 to 2 are tables by position, 3 and 4 are tables by token, 5 to 7 are inv_freq, 8 and 9 are tables by head.
        """
        rows = s + 40
        if source not in (5, 6, 7):
            shapes = {3: (b, s), 4: (1, s), 8: (b, s, heads), 9: (1, s, heads)}
            shape = *shapes.get(source, (rows,)), rotary_dim // 2
            angle = torch.rand(shape, dtype=torch.float64) * 2 * torch.pi
            tables = [t.to(dtype if source in (1, 4, 9) else torch.float32) for t in (angle.cos(), angle.sin())]
            wide = [torch.cat([t, t], -1).to(self.device) for t in tables]
            narrow = [t.to(self.device) for t in tables] if source != 2 else [t[:, : shape[-1]] for t in wide]
            found = dict(zip(("cos", "sin"), narrow, strict=True))
        else:
            high, low = in_parts(rotary_dim, dtype)
            of_device = on_device(high.double() + low, self.device)  # two parts if there is no float64
            found = {"inv_freq": {5: high, 6: torch.stack([high, low]), 7: of_device}[source].to(self.device)}
        # No two positions of a sequence are equal, because each token needs its own cell in a cache.
        some = torch.stack([torch.randperm(rows)[:s] for _ in range(b)])
        far = torch.randint(2**24 - 9, (b, s))
        positions = {1: some, 2: some[0].int() + 2, 6: some[:1].int() - 50, 7: far}.get(source)
        if positions is not None:
            found["positions"] = positions.to(self.device)
        return found | {"offset": {0: 3, 2: -2, 5: 100000, 7: 8}.get(source, 0)}

    def arguments(self, op: str, dtype: torch.dtype, number: int, over_heads: bool = False):
        """Returns the arguments of a case: ([q, k, v], options, the random generator for further choices).

        If over_heads is True, there is a norm, and it normalises all heads of a token together.
        """
        torch.manual_seed(number)
        pick, make = random.Random(number), partial(self.make, dtype=dtype)
        (b, s, *heads, d, rotary_dim, rotary_start), source, interleaved = CASES[number]
        heads = [heads[0]] * 3 if source > 7 else [*heads, heads[-1]]
        layout = pick.choice([*LAYOUTS, None])
        if layout:
            qkv = [layout(make, b, s, h, d) for h in heads]
        else:
            packed = make(b, s, sum(heads) * d)
            qkv = [t.unflatten(-1, (-1, d)) for t in packed.split([h * d for h in heads], -1)]
        if b == 1 and pick.random() < 0.3:
            qkv = [t[0] for t in qkv]
        if "cache" in op and pick.random() < 0.5:  # v has a shape of its own
            qkv[2] = make(*qkv[0].shape[:-2], 3, d // 2 + 9)
        options = self.angles(source, b, s, heads[0], rotary_dim, dtype)
        options |= {"interleaved": interleaved, "attention_factor": pick.choice((1.0, 1.7))}
        options["rotary_start"] = rotary_start
        if "cache" in op:
            options["norm_v"] = pick.random() < 0.5
        if "norm" in op or over_heads or ("cache" in op and pick.random() < 0.5):
            of = pick.choice((dtype, torch.float32))
            for name, x in zip(("q_norm_weight", "k_norm_weight"), qkv, strict=False):
                options[name] = self.make(*x.shape[-2 if over_heads else -1 :], dtype=of)
        elif "cache" not in op:
            options["inverse"] = pick.random() < 0.5
        if "q_norm_weight" in options or "norm_v" in options:
            options["norm_eps"] = pick.choice((1e-6, 0.01))
        return qkv, options, pick

    def caches(self, k, v, dtypes, options, pick):
        """Returns ([k_cache, v_cache], options), where options contains slots, or nothing. The caches have these dtypes."""
        x = k if k.dim() == 4 else k[None]
        b, s, h, d = x.shape
        by_position = "cos" in options and options["cos"].dim() == 2 and pick.random() < 0.5
        n, m = (b + 1, s + 40) if by_position else (b * s // 16 + 2, 16)
        layout = pick.choice(CACHES)
        caches = layout(partial(self.make, dtype=dtypes[0]), n, m, h, d)
        if k.shape != v.shape or dtypes[0] != dtypes[1]:
            caches = caches[0], layout(partial(self.make, dtype=dtypes[1]), n, m, *v.shape[-2:])[1]
        if by_position:
            return [t[0] for t in caches] if b == 1 and pick.random() < 0.5 else caches, {}
        cells = torch.where(torch.rand(b, s) < 0.2, -3, torch.randperm(n * m)[: b * s].view(b, s))
        return caches, {"slots": cells.to(pick.choice((torch.int32, torch.int64))).to(self.device)}

    def scale(self, dtype: torch.dtype, heads: int) -> Tensor:
        """Returns a scale for a quantised cache. With it, some normally distributed numbers are saturated."""
        return ((0.5 + torch.rand(heads)) * 3 / QUANTISED[dtype][1]).to(self.device)

    # -- cases --

    def value(self, op: str, dtype: torch.dtype, number: int, over_heads=False, cache_dtypes=(None, None)) -> None:
        """Checks all results of an operator, and that it changes nothing else.

        A dtype of None means that this cache is not quantised.
        """
        (q, k, v), options, pick = self.arguments(op, dtype, number, over_heads)
        xs = [q] if op in ("rotate", "rotate_") else [q, k]
        if "cache" in op:
            caches, slots = self.caches(k, v, [of or dtype for of in cache_dtypes], options, pick)
            xs, options = [q, k, v, *caches], options | slots
            for name, cache in zip(("k_scale", "v_scale"), caches, strict=True):
                if cache.dtype in QUANTISED:
                    options[name] = self.scale(cache.dtype, pick.choice((1, cache.shape[-2])))
        results = right(op, xs, options)
        if "cache" in op:
            results[1:1] = None, None  # k and v
        before = [t.clone() for t in (q, k, v)]
        outs = self.call(op, *xs, **options)
        in_place = op.endswith("_")
        outs = xs if in_place else outs if isinstance(outs, tuple) else (outs,)
        ulps = 6 if "norm_eps" in options else 2 if options["attention_factor"] == 1.0 else 3
        part = ANGLE_ERROR if "inv_freq" in options else 0.0
        # In float64 the expected result has an error of its own.
        bound = {torch.float32: (ulps, part), torch.float64: (ulps + 2,)}
        for name, x, out, e in zip(("q", "k", "v", "k_cache", "v_cache"), xs, outs, results):  # noqa: B905
            if e:
                with describing(name):
                    if out.dtype in QUANTISED:
                        self.nearest(out, *e)
                    else:
                        self.near(out, *e, *bound.get(dtype, (1,)))
                demand(out.dtype == x.dtype, f"the result is {out.dtype} but must be {x.dtype}")
                strides = torch.empty_like(x).stride()
                demand(in_place or out.stride() == strides, f"the strides are {out.stride()} but must be {strides}")
        written = [x for x, e in zip(xs, results, strict=True) if in_place and e]
        for t, old in zip((q, k, v), before, strict=True):
            if not any(t is x for x in written):
                self.same([t], [old])

    def gradient(self, op: str, dtype: torch.dtype, number: int, over_heads: bool = False) -> None:
        """Compares gradients with those of the reference, in ulps at the largest gradient."""
        qkv, options, _ = self.arguments(op, dtype, number, over_heads)
        xs = qkv[:1] if op == "rotate" else qkv[:2]
        weights = [options.pop(name) for name in ("q_norm_weight", "k_norm_weight") if name in options]
        leaves = [t.detach().requires_grad_() for t in (*xs, *weights)]
        given = [self.make(*x.shape, dtype=dtype) for x in xs]
        found = torch.autograd.grad(self.call(op, *leaves, **options), leaves, given)
        self.after_call()
        copies = [exact(t).requires_grad_() for t in map(Tensor.detach, leaves)]
        names = ("q_norm_weight", "k_norm_weight")[: len(weights)]
        outs = [t for t, _ in right(op, copies[: len(xs)], options | dict(zip(names, copies[len(xs) :], strict=True)))]
        part = ANGLE_ERROR if dtype == torch.float32 and "inv_freq" in options else 0.0
        expected = torch.autograd.grad(outs, copies, list(map(exact, given)))
        for name, out, e in zip((*"qk"[: len(xs)], *names), found, expected, strict=True):
            self.near_largest(f"gradient of {name}", out, e, part)

    def table_gradient(self, dtype: torch.dtype, table: int, interleaved: bool, head_dim: int) -> None:
        """Compares gradients of cos and sin with those of the reference."""
        rotary_dim = head_dim // 8 * 4
        shape, positions = TABLES[table]
        q, k = (self.make(2, 9, heads, head_dim, dtype=dtype) for heads in ((4, 4) if len(shape) == 3 else (5, 2)))
        tables = [self.make(*shape, rotary_dim // 2, dtype=torch.float32 if table % 2 else dtype) for _ in "cs"]
        options = {"interleaved": interleaved, "offset": 1 if len(shape) == 1 else 0, "attention_factor": 1.5}
        options["rotary_start"] = head_dim // 4
        if positions is not None:
            options["positions"] = torch.tensor(positions)
        on_device = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in options.items()}
        leaves = [t.detach().requires_grad_() for t in tables]
        outs = self.call("rotate_qk", q, k, *leaves, **on_device)
        given = [self.make(*x.shape, dtype=dtype) for x in (q, k)]
        found = torch.autograd.grad(outs, leaves, given)
        self.after_call()
        copies = [exact(t).requires_grad_() for t in tables]
        outs = reference.rotate_qk(exact(q), exact(k), *copies, **options)
        expected = torch.autograd.grad(outs, copies, list(map(exact, given)))
        # In float64 the expected sum over heads and tokens has an error of its own.
        ulps = 24 if dtype == torch.float64 else 12
        for name, out, e in zip(("cos", "sin"), found, expected, strict=True):
            self.near_largest(f"gradient of {name}", out, e, ulps=ulps)

    def eager(self, dtype: torch.dtype, table_dtype: torch.dtype, interleaved: bool) -> None:
        """Checks that eager rounding gives the bits of torch's operators, up to the order of a norm's sum."""
        q, k = (self.make(2, 9, heads, 72, dtype=dtype) for heads in (5, 2))
        tables = [t.to(table_dtype) for t in self.tables(9, 48)]
        options = {"interleaved": interleaved, "attention_factor": 1.7, "rotary_start": 8, "eager_rounding": True}
        found, given = [], [t.cpu() for t in (q, k)]
        for f, device in ((partial(self.call, "rotate_qk"), self.device), (reference.rotate_qk, "cpu")):
            leaves = [t.detach().to(device).requires_grad_() for t in (q, k)]
            outs = f(*leaves, *(t.to(device) for t in tables), **options)
            found.append([*outs, *torch.autograd.grad(outs, leaves, [g.to(device) for g in given])])
            self.after_call()
        self.same(*found)
        for shapes in (((72,), (72,)), ((5, 72), (2, 72))):  # a norm of each head, and over all heads
            weights = [self.make(*shape, dtype=of) for shape, of in zip(shapes, (dtype, torch.float32), strict=True)]
            outs = self.call("norm_rotate_qk", q, k, *weights, *tables, **options)
            expected = reference.norm_rotate_qk(*(t.cpu() for t in (q, k, *weights, *tables)), **options)
            sizes = {"cos": tables[0], "rotary_start": 8, "interleaved": interleaved, "q_norm_weight": weights[0]}
            for name, out, e in zip("qk", outs, map(exact, expected), strict=True):
                with describing(f"{name} with weights of shape {list(shapes[0])}"):
                    self.near(out, e, magnitude(e, sizes), 3 if dtype in HALF else 6)

    def axes(self, dtype: torch.dtype, position_dtype: torch.dtype) -> None:
        """Checks the tables of three axes, which are those of one axis if the other positions are 0."""
        positions = torch.randint(1000, (3, 2, 30)).to(position_dtype)
        inv_freq = torch.stack(in_parts(64, dtype))[:, None] * (torch.arange(32) % 3 == torch.arange(3)[:, None])
        expected = reference.axial_cos_sin(positions, inv_freq, attention_factor=1.25, dtype=torch.float64)
        found = self.call(
            "axial_cos_sin", *(t.to(self.device) for t in (positions, inv_freq)), attention_factor=1.25, dtype=dtype
        )
        bound = (2,) if dtype == torch.float64 else (0.51, ANGLE_ERROR)
        for name, out, e in zip(("cos", "sin"), found, expected, strict=True):
            with describing(name):
                self.near(out, e, torch.full(e.shape, 1.25).double(), *bound)

    def angle(self, base: float, dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
        """Checks the angles of cos_sin, and those of rotate, which rotates the pair (1, 0) to (cos, sin)."""
        p = torch.cat([torch.arange(99), torch.randint(2**24, (400,)), torch.arange(2**24 - 99, 2**24)]).to(dtype)
        p, freq = p / 1024 if dtype.is_floating_point else p, torch_rope.inv_freq(128, base).float()
        angle = p.double().unsqueeze(-1) * freq.double()
        p, freq = p.to(self.device), freq.to(self.device)
        if out_dtype:  # the result must be rounded only once, after the multiplication by the factor
            outs = self.call("cos_sin", p, freq, attention_factor=1.7, dtype=out_dtype)
            bound = (2,) if out_dtype == torch.float64 else (0.51, ANGLE_ERROR)
            for out, e in zip(outs, (angle.cos(), angle.sin()), strict=True):
                self.near(out, e * 1.7, torch.full(e.shape, 1.7).double(), *bound)
            return
        pair = torch.stack([angle.cos(), angle.sin()], -1)
        self.within(torch.stack(self.call("cos_sin", p, freq), -1), pair, ANGLE_ERROR)
        if not dtype.is_floating_point:
            x = torch.tensor([1.0, 0.0]).to(self.device).expand(len(p), 64, 2).reshape(len(p), 1, 128)
            out = self.call("rotate", x, inv_freq=freq, positions=p, interleaved=True)
            self.within(out.view(pair.shape), pair, ANGLE_ERROR)

    def layer(self, seq: int = 50, dtype: torch.dtype = torch.float32):
        """Returns q, k, cos and sin of a small layer."""
        cos, sin = self.tables(64, 64)
        return self.make(2, seq, 4, 64, dtype=dtype), self.make(2, seq, 2, 64, dtype=dtype), cos, sin

    def same_bits(self, dtype: torch.dtype) -> None:
        """Checks that a second call, another layout and another operator give the same bits."""
        q, k, cos, sin = self.layer(dtype=dtype)
        expected = self.call("rotate_qk", q, k, cos, sin, offset=5)
        for layout in LAYOUTS:
            q2, k2 = (layout(partial(self.make, dtype=dtype), *t.shape).copy_(t) for t in (q, k))
            for _ in range(2):
                self.same(self.call("rotate_qk", q2, k2, cos, sin, offset=5), expected)
            self.same([self.call("rotate", q2, cos, sin, offset=5)], expected[:1])
            self.call("rotate_qk_", q2, k2, cos, sin, offset=5)
            self.same((q2, k2), expected)

    def threads(self) -> None:
        """Checks the results when four Python threads call an operator at the same time."""
        layers = [self.layer(20 + i) for i in range(4)]
        expected = [self.call("rotate_qk", *layer) for layer in layers]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda layer: [rope.rotate_qk(*layer) for _ in range(30)], layers)
            for outs, e in zip(found, expected, strict=True):
                for out in outs:
                    self.same(out, e)

    def pads(self) -> None:
        """Checks tokens with a negative slot: they write no cell, and their positions may be out of range."""
        cos, sin = (t[:8, :8] for t in self.layer()[2:])
        q, k, v, *caches = (self.make(4, 2, 32) for _ in range(5))
        positions, slots = (torch.tensor(t).to(self.device) for t in ([0, 8, -1, 3], [-1, -1, -9, -1]))
        before = [t.clone() for t in (q, *caches)]
        self.call("rotate_into_cache_", q, k, v, *caches, cos, sin, positions=positions, slots=slots)
        self.same((q[:, :, 16:], *caches), (before[0][:, :, 16:], *before[1:]))
        nan = q.isnan().cpu()
        demand(nan[1:3, :, :16].all().item() and not nan[::3].any(), "the wrong channels are NaN")

    def extremes(self, cache_dtype: torch.dtype) -> None:
        """Checks what a quantised cache stores for numbers between two of its own, for large ones, and for NaN."""
        numbers = torch.tensor(
            [torch.nan, torch.inf, 1e30, 465, 447, 128, 127.5, 18, 17, 2.5, 1.5, 0.5, 2**-9, 2**-10, 0]
        )
        v, scale = torch.cat([numbers, -numbers])[None, None] * 2, torch.tensor([2.0])
        q, k, k_cache = (self.make(1, 1, 16) for _ in range(3))
        v_cache = torch.zeros(v.shape, dtype=cache_dtype, device=self.device)
        args = q, k, v.to(self.device), k_cache, v_cache, *self.tables(1, 16)
        self.call("rotate_into_cache_", *args, v_scale=scale.to(self.device))
        found, expected = v_cache.cpu().double(), reference.quantise(v, scale, cache_dtype).double()
        wrong = (found != expected) & ~(found.isnan() & expected.isnan())
        cases = ", ".join(
            f"{n} as {a}, not {e}"
            for n, a, e in zip(*(t[wrong].tolist() for t in (v / 2, found, expected)), strict=True)
        )
        demand(not cases, f"wrong numbers are stored: {cases}")

    def out_of_range(self) -> None:
        """Checks what happens if a position or a slot is out of range.

        The CPU raises IndexError. Metal writes NaN to the token's rotated channels, and no cell of the cache. CUDA is
        not checked, because a kernel assertion would end this process.
        """
        cos, sin = (t[:8, :8] for t in self.layer()[2:])
        q, k, v = (self.make(4, 2, 32) for _ in "qkv")
        caches = self.make(8, 2, 32), self.make(8, 2, 32)
        positions, slots = (torch.tensor(t).to(self.device) for t in ([0, 8, -1, 3], [0, 1, 2, 99]))
        before = [t.clone() for t in (q, *caches)]
        for op, xs, more in (
            ("rotate_into_cache_", (q, k, v, *caches), {"slots": slots}),
            ("rotate", (before[0],), {}),
        ):
            try:
                out = self.call(op, *xs, cos, sin, positions=positions, **more)
            except IndexError:
                demand(self.device.type == "cpu", "IndexError was raised, which only the CPU can do")
                self.same((q, *caches), before)
                continue
            demand(self.device.type == "mps", "IndexError was not raised")
            out = (q if out is None else out).cpu()
            demand(out[1:3, :, :16].isnan().all().item() and not out[0].isnan().any(), "the wrong channels are NaN")
            self.same([out[1:3, :, 16:]], [before[0][1:3, :, 16:]])
            self.same([caches[1][0], *(t[1:] for t in caches)], [v[0], *(t[1:] for t in before[1:])])

    def compiled(self) -> None:
        """Checks that torch.compile gives the bits and the gradients of eager mode.

        The backend is aot_eager, because it needs no compiler.
        """

        def functional(q, k, cos, sin):
            return rope.rotate_qk(q * 2, k, cos, sin, offset=3)

        def in_place(q, k, cos, sin):
            x = k * 2
            rope.rotate_(x, cos, sin)
            return x

        q, k, cos, sin = self.layer()
        found = []
        for wrap in (lambda f: f, partial(torch.compile, backend="aot_eager", fullgraph=True)):
            leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
            outs = wrap(functional)(*leaves, cos, sin)
            found.append([*outs, *torch.autograd.grad(outs, leaves, (q, k)), wrap(in_place)(q, k, cos, sin)])
        self.same(*found)

    def opcheck(self, op: str) -> None:
        tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
        if self.device.type != "mps":  # on Metal torch itself raises NotImplementedError in this test
            tests.append("test_autograd_registration")
        q, k, cos, sin = self.layer(6)
        more = [k.clone(), self.make(2, 8, 2, 64), self.make(2, 8, 2, 64)] if "cache" in op else []
        if not more:
            q.requires_grad_()
        torch.library.opcheck(getattr(rope, op).default, (q, k, *more, cos, sin), test_utils=tests)

    # -- all checks --

    def groups(self) -> list[Group]:
        """Returns the groups of this file. Making the list uses no device."""
        numbers = list(range(len(CASES)))
        random.Random(0).shuffle(numbers)  # a slow device, which runs fewer cases, then still runs cases of all kinds
        numbers = numbers[:: 12 if self.quick else 1]
        bases = (10000.0, 500000.0, 1.0000001)
        integers = torch.int64, torch.int32
        found = []

        def group(name: str, cases: dict) -> None:
            found.append(Group(name, {str(case): run for case, run in cases.items()}))

        def for_each_dtype(name: str, cases: Callable[[torch.dtype], dict]) -> None:
            for dtype in self.dtypes:
                group(f"{name} {str(dtype)[6:]}", cases(dtype))

        ops = ["rotate", "rotate_", "rotate_qk", "rotate_qk_", "norm_rotate_qk", "rotate_into_cache_"]

        def over_heads(check: Callable, op: str) -> Callable[[torch.dtype], dict]:
            return lambda dtype: {n: partial(check, op, dtype, n, over_heads=True) for n in numbers}

        kinds = list(itertools.product((*self.cache_dtypes, None), repeat=2))[:-1]  # without (None, None)
        stored = list(zip(itertools.cycle(numbers), kinds * (1 if self.quick else 6)))

        for op in ops:
            for_each_dtype(op, lambda dtype, op=op: {n: partial(self.value, op, dtype, n) for n in numbers})
        for op in ops[::2]:
            for_each_dtype(
                f"gradient, {op}", lambda dtype, op=op: {n: partial(self.gradient, op, dtype, n) for n in numbers[::2]}
            )
        for_each_dtype("norm over all heads", over_heads(self.value, "norm_rotate_qk"))
        for_each_dtype("norm over all heads, cache", over_heads(self.value, "rotate_into_cache_"))
        for_each_dtype("gradient, norm over all heads", over_heads(self.gradient, "norm_rotate_qk"))
        for_each_dtype(
            "quantised caches",
            lambda dtype: {
                (n, *map(str, kind)): partial(self.value, "rotate_into_cache_", dtype, n, cache_dtypes=kind)
                for n, kind in stored
            },
        )
        group("quantised caches, extremes", {dtype: partial(self.extremes, dtype) for dtype in self.cache_dtypes})
        kinds = list(itertools.product(range(len(TABLES)), (False, True), (64, 20)))
        random.Random(0).shuffle(kinds)
        kinds = kinds[:: 3 if self.quick else 1]
        for_each_dtype(
            "gradient, tables", lambda dtype: {kind: partial(self.table_gradient, dtype, *kind) for kind in kinds}
        )
        for_each_dtype(
            "eager rounding",
            lambda dtype: {
                (str(t), i): partial(self.eager, dtype, t, i) for t in {dtype, torch.float32} for i in (False, True)
            },
        )
        for_each_dtype("cos_sin", lambda dtype: {base: partial(self.angle, base, torch.int64, dtype) for base in bases})
        for_each_dtype(
            "several axes", lambda dtype: {str(p): partial(self.axes, dtype, p) for p in (*integers, torch.float32)}
        )
        kinds = itertools.product(bases, (*integers, torch.float32))
        group("angles below position 2^24", {kind: partial(self.angle, *kind) for kind in kinds})
        group("same bits", {dtype: partial(self.same_bits, dtype) for dtype in self.dtypes})
        group("pads", {"": self.pads})
        if self.device.type != "cuda":
            group("out of range", {"": self.out_of_range})
        group("threads", {"": self.threads})
        group("torch.compile, aot_eager", {"": self.compiled})
        group("opcheck", {op: partial(self.opcheck, op) for op in ("rotate_qk", "rotate_into_cache_")})
        return found
