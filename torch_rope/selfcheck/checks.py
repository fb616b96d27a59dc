"""Checks of values and gradients.

torch_rope.reference computes the expected results, in float64 on the CPU. Errors are given in ulps: an ulp (unit in the
last place) is the distance between neighbouring numbers of a dtype, here at the magnitude of a pair of channels.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_rope import reference
from torch_rope.frequencies import default, has_float64, in_two_parts

rope = torch.ops.rope
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# The dtypes of quantised results, and their least and largest numbers.
QUANTISED = {torch.float8_e4m3fn: (-448, 448), torch.float8_e5m2: (-57344, 57344), torch.int8: (-128, 127)}
QUOTIENT_ERROR = 2e-6  # the largest error of a number before it is quantised, as a part of its pair's magnitude
ANGLE_ERROR = 5e-7  # the largest error of cos and sin that are computed from inv_freq at positions below 2^24

# (batch, seq, heads of q, heads of k and v, head_dim, rotary_dim)
SIZES = [(2, 5, 3, 1, 64, 64), (4, 1, 9, 3, 64, 64), (1, 130, 4, 2, 128, 128), (3, 7, 2, 2, 80, 32)]
SIZES += [(2, 3, 5, 1, 66, 66), (2, 2, 1, 1, 100, 52), (2, 6, 3, 3, 192, 64)]
# The first rotated channel, given head_dim - rotary_dim. With "middle", vectors of 16 bytes stay aligned.
STARTS = {"first": lambda rest: 0, "second": lambda rest: min(rest, 1), "middle": lambda rest: rest // 16 * 8}
STARTS["last"] = lambda rest: rest
# Where the angles come from: a table with a row for each position, token, or head, or frequencies.
SOURCES = ["position", "token", "head", "inv_freq", "inv_freq in two parts"]
# Memory layouts of a tensor [batch, seq, heads, head_dim], which is part of one that make(*shape) returns.
LAYOUTS = {
    "bshd": lambda make, *shape: make(*shape),
    "bhsd": lambda make, b, s, h, d: make(b, h, s, d).transpose(1, 2),
    "every second channel": lambda make, b, s, h, d: make(b, s, h, 2 * d)[..., ::2],
    "odd start": lambda make, b, s, h, d: make(b * s * h * d + 1)[1:].view(b, s, h, d),
}


def exact(value):
    """Returns a copy of a tensor on the CPU. What is floating point, or a dtype, becomes float64; all else stays."""
    if isinstance(value, torch.dtype):
        return torch.float64
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu().clone()
    return value.double() if value.is_floating_point() else value


def ulp(dtype: torch.dtype, size: Tensor) -> Tensor:
    """Returns the distance between neighbouring numbers of a dtype, at the given size."""
    if not dtype.is_floating_point:
        return torch.ones_like(size)
    info = torch.finfo(dtype)
    return info.eps * torch.exp2(torch.frexp(size.clamp(min=info.tiny)).exponent.double() - 1)


def magnitude(result: Tensor, options: dict) -> Tensor:
    """Returns the magnitude of each channel's pair, or 0 for a channel that is copied and so must keep its bits."""
    start = options.get("rotary_start", 0)
    end = start + 2 * options["cos" if "cos" in options else "inv_freq"].shape[-1]
    size = result.abs() if "q_norm_weight" in options else torch.zeros_like(result)
    dim, shape = (-1, (-1, 2)) if options.get("interleaved") else (-2, (2, -1))
    pairs = result[..., start:end].unflatten(-1, shape)
    size[..., start:end] = pairs.norm(dim=dim, keepdim=True).expand(pairs.shape).flatten(-2)
    return size


def limits(dtype: torch.dtype, angles: dict, attention_factor: float = 1.0, norm: bool = False) -> tuple[int, float]:
    """Returns how far a result of dtype may be from the exact one: a number of ulps, and a part of the magnitude."""
    if dtype.itemsize == 2:
        return 1, 0.0
    ulps = 6 if norm else 2 if attention_factor == 1.0 else 3
    return ulps, ANGLE_ERROR if dtype == torch.float32 and "inv_freq" in angles else 0.0


def describe_call(op: str, args: tuple, options: dict) -> str:
    def text(x) -> str:
        return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, Tensor) else str(x)

    named = [f"{name}={text(value)}" for name, value in options.items()]
    return f"rope.{op}({', '.join([*map(text, args), *named])})"


def require(condition: bool, otherwise: str) -> None:
    """Raises AssertionError if the condition is false. Unlike assert, it also works under python -O."""
    if not condition:
        raise AssertionError(otherwise)


class Check:
    """Has the checks of one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.before_call = lambda text: None  # takes the text of each call before the call is made
        self.dtypes = DTYPES[: 3 + has_float64(device)]
        self.quantised = list(QUANTISED) if device.type != "mps" else [torch.int8]  # Metal has no float8
        self.last_call = ""
        self.largest = 0.0  # the largest error so far, as a part of the allowed error

    def call(self, op: str, *args, **options):
        self.last_call = describe_call(op, args, options)
        self.before_call(self.last_call)
        return getattr(rope, op)(*args, **options)

    # ---- comparisons ----

    def compare(self, name: str, actual: Tensor, expected: Tensor, allowed: Tensor, step: Tensor) -> None:
        """Raises AssertionError unless abs(actual - expected) <= allowed. The message gives errors as multiples of step."""
        require(actual.shape == expected.shape, f"{name} has shape {list(actual.shape)}, not {list(expected.shape)}")
        actual, expected = exact(actual).double(), expected.detach()
        part, at = ((actual - expected).abs() / allowed).nan_to_num(nan=torch.inf).flatten().max(0)
        self.largest = max(self.largest, part.item())
        limit = (allowed / step).flatten()[at]
        require(
            part.item() <= 1,
            f"{name}{[int(i) for i in torch.unravel_index(at, expected.shape)]} is {actual.flatten()[at]:.9g}, expected "
            f"{expected.flatten()[at]:.9g}: the error is {part * limit:.3g} ulp but must be at most {limit:.3g}",
        )

    def near(self, name: str, actual: Tensor, expected: Tensor, size: Tensor, ulps: float, part: float = 0.0) -> None:
        """Raises AssertionError unless the error is at most this many ulps at the given size, plus part * size."""
        allowed = ulps * ulp(actual.dtype, size) + part * size
        self.compare(name, actual, expected, allowed, ulp(actual.dtype, size.maximum(expected.abs())))

    def same(self, name: str, actual: Tensor, expected: Tensor) -> None:
        require(torch.equal(actual.detach().cpu(), expected.detach().cpu()), f"{name} has other bits than expected")

    # ---- arguments ----

    def make(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype).to(self.device)

    def tables(self, rows: int, rotary_dim: int) -> dict[str, Tensor]:
        """Returns cos and sin. No kernel of torch_rope computes them, so a broken kernel fails only its own checks."""
        tables = reference.cos_sin(torch.arange(rows), default(rotary_dim).inv_freq)
        return dict(zip(("cos", "sin"), (t.to(self.device) for t in tables), strict=True))

    def angles(self, pick: random.Random, source: str, b: int, s: int, heads: int, pairs: int, dtype) -> dict:
        """Returns the arguments that give the angles."""
        # No two positions of a sequence are equal, because each token needs its own cell in a cache.
        near, positions = torch.stack([torch.randperm(s + 30)[:s] for _ in range(b)]), None
        if source.startswith("inv_freq"):
            parts = in_two_parts(default(2 * pairs).inv_freq)
            if dtype == torch.float64:  # the reference would round the products of positions and frequencies
                parts[1] = 0.0
            found = {"inv_freq": parts if source == "inv_freq in two parts" else parts[0]}
            positions = pick.choice((near.int(), torch.randint(2**24 - 9, (b, s))))
        else:
            shape = {"position": (s + 40,), "token": (pick.choice((1, b)), s), "head": (b, s, heads)}[source]
            angle = torch.rand(*shape, pairs, dtype=torch.float64) * 2 * torch.pi
            of = pick.choice((dtype, torch.float32))
            found = {"cos": angle.cos().to(of), "sin": angle.sin().to(of)}
            positions = pick.choice((None, near, near[0].int()))
        given = {**found, "positions": positions, "offset": pick.choice((0, 5))}
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in given.items()}

    def arguments(self, op: str, dtype: torch.dtype, number: int) -> tuple[list[Tensor], dict]:
        """Returns q, k, v and the caches, as far as an operator has them, and its other arguments.

        The number determines every choice.
        """
        torch.manual_seed(number)
        pick, source = random.Random(number), SOURCES[number % len(SOURCES)]
        b, s, heads, kv_heads, head_dim, rotary_dim = pick.choice(SIZES)
        start = pick.choice(list(STARTS.values()))(head_dim - rotary_dim)
        kv_heads = heads if source == "head" else kv_heads
        layout, make = pick.choice(list(LAYOUTS.values())), partial(self.make, dtype=dtype)
        xs = [layout(make, b, s, h, head_dim) for h in (heads, kv_heads, kv_heads)]
        options = self.angles(pick, source, b, s, heads, rotary_dim // 2, dtype)
        options |= {"interleaved": pick.random() < 0.5, "rotary_start": start}
        options["attention_factor"] = pick.choice((1.0, 1.7))
        is_cache = op == "rotate_into_cache_"
        by_slots = is_cache and (source.startswith("inv_freq") or pick.random() < 0.5)
        if source in ("token", "head") and (by_slots or not is_cache):  # nothing is chosen by positions
            options |= {"positions": None, "offset": 0}
        if op == "norm_rotate_qk" or (is_cache and pick.random() < 0.5):
            of, axes = pick.choice((dtype, torch.float32)), pick.choice((1, 2))  # 2: the norm is over all heads
            for name, x in zip("qk", xs, strict=False):
                options[f"{name}_norm_weight"] = self.make(*x.shape[-axes:], dtype=of)
            options["norm_eps"] = pick.choice((1e-6, 0.01))
        if not is_cache:
            options |= {} if "norm" in op else {"inverse": pick.random() < 0.5}
            return xs[: 2 if "qk" in op else 1], options
        if pick.random() < 0.5:  # v has a shape of its own
            xs[2] = make(b, s, 3, head_dim // 2 + 9)
        options["norm_v"] = pick.random() < 0.5
        blocks, cells = b * s // 16 + 2, 16
        slots = torch.where(torch.rand(b, s) < 0.2, -3, torch.randperm(blocks * cells)[: b * s].view(b, s))
        if by_slots:
            options["slots"] = slots.to(pick.choice((torch.int32, torch.int64))).to(self.device)
        else:  # a sequence has a block, and a token the cell of its position
            blocks, cells = b, s + 40
        results = []
        for name, x, shape in zip("qkv", xs, [(b, s), (blocks, cells), (blocks, cells)], strict=True):
            of = pick.choice((dtype, *self.quantised))
            results.append(LAYOUTS[pick.choice(("bshd", "bhsd"))](partial(self.make, dtype=of), *shape, *x.shape[-2:]))
            if of != dtype:  # some normally distributed numbers are saturated
                scale = (0.5 + torch.rand(pick.choice((1, x.shape[-2])))) * 3 / QUANTISED[of][1]
                options[f"{name}_scale"] = scale.to(self.device)
        if "q_scale" in options or pick.random() < 0.5:
            options["q_out"] = results[0]
        return xs + results[1:], options

    # ---- the checks ----

    def values(self, op: str, xs: list[Tensor], options: dict, reference_options: dict | None = None) -> None:
        """Checks all results of an operator, and that it changes nothing else.

        reference_options: the options of the reference, if they must not be the same.
        """
        exact_xs, before = list(map(exact, xs)), list(map(torch.clone, xs))
        exact_options = {name: exact(value) for name, value in (reference_options or options).items()}
        outs = self.call(op, *xs, **options)
        dtype, has_norm = xs[0].dtype, "q_norm_weight" in options or options.get("norm_v", False)
        ulps, part = limits(dtype, options, options.get("attention_factor", 1.0), has_norm)
        bound = ulps + 2 * (dtype == torch.float64), part  # in float64 the expected result has an error of its own
        unchanged: Sequence[int]
        if op == "rotate_into_cache_":
            unchanged = (0, 1, 2) if "q_out" in options else (1, 2)
            results = options.get("q_out", xs[0]), *xs[3:]
            self.near_results(results, exact_xs, exact_options, bound)
        else:
            unchanged = () if op.endswith("_") else range(len(xs))
            outs = xs if op.endswith("_") else outs if isinstance(outs, tuple) else (outs,)
            expected = getattr(reference, op.rstrip("_"))(*exact_xs, **exact_options)
            expected = expected if isinstance(expected, tuple) else (expected,)
            for name, x, out, e in zip("qk", xs, outs, expected, strict=False):
                require(out.dtype == x.dtype, f"{name} is {out.dtype} but must be {x.dtype}")
                self.near(name, out, e, magnitude(e, exact_options), *bound)
        for i in unchanged:
            self.same("qkv"[i], xs[i], before[i])

    def near_results(self, results: tuple, exact_xs: list[Tensor], options: dict, bound: tuple) -> None:
        """Checks the rotated q and both caches after a call of rotate_into_cache_."""
        scales = [options.pop(name, None) for name in ("q_scale", "k_scale", "v_scale")]
        k_cache, v_cache = (torch.full(cache.shape, torch.nan, dtype=torch.float64) for cache in exact_xs[3:])
        old = options.pop("q_out", None), *exact_xs[3:]
        q, k, v = exact_xs[:3]
        reference.rotate_into_cache_(q, k, v, k_cache, v_cache, **options)
        exact_results = q, k_cache, v_cache
        sizes = [magnitude(x, options) for x in exact_results[:2]]
        sizes.append(v_cache.abs() * options["norm_v"])  # v is copied if it has no norm
        names = "q", "k_cache", "v_cache"
        for name, out, before, new, size, scale in zip(names, results, old, exact_results, sizes, scales, strict=True):
            unwritten = new.isnan()
            if scale is not None:
                scale = scale.expand(new.shape[-2])[:, None]
                new, size = (new / scale).clamp(*QUANTISED[out.dtype]), size / scale
            if unwritten.any():  # cells of a cache
                new, size = torch.where(unwritten, before.double(), new), size.masked_fill(unwritten, 0.0)
            if scale is None:
                self.near(name, out, new, size, *bound)
            else:  # the nearest number of the dtype is stored
                step = ulp(out.dtype, new.abs())
                allowed = 0.5 * step + QUOTIENT_ERROR * size.maximum(new.abs())
                self.compare(name, out, new, allowed, step)

    def gradients(self, op: str, xs: list[Tensor], options: dict, of: tuple[str, ...] = ()) -> None:
        """Checks the gradients of the arguments `of`, or of all that have one."""
        args = dict(zip(("x",) if len(xs) == 1 else ("q", "k"), xs, strict=False)) | options
        constant = ("cos", "sin", "inv_freq") if "norm" in op else ()  # these have no gradient
        floating = [name for name, t in args.items() if isinstance(t, Tensor) and t.is_floating_point()]
        of = of or tuple(name for name in floating if name not in constant)
        given, found = list[Tensor](), []
        for function, copy in ((partial(self.call, op), lambda t: t), (getattr(reference, op), exact)):
            copies = {name: copy(value) for name, value in args.items()}
            leaves = {name: copies[name].detach().requires_grad_() for name in of}
            outs = function(**copies | leaves)
            outs = outs if isinstance(outs, tuple) else (outs,)
            given = given or [self.make(*out.shape, dtype=out.dtype) for out in outs]
            found.append(torch.autograd.grad(outs, list(leaves.values()), list(map(copy, given))))
        for name, actual, expected in zip(of, *found, strict=True):
            # The arithmetic has an error that is relative to the largest gradient; a 16-bit result is also rounded.
            largest, is_half = expected.abs().max().expand(expected.shape), actual.dtype.itemsize == 2
            error = ulp(torch.float32 if is_half else actual.dtype, largest)
            # In float64 the expected sums over heads and tokens have an error too.
            error *= 24 if actual.dtype == torch.float64 and name in ("cos", "sin", "inv_freq") else 12
            error += ANGLE_ERROR * largest * ("inv_freq" in args and actual.dtype != torch.float64)
            step = ulp(actual.dtype, expected.abs() if is_half else largest)
            self.compare(f"the gradient of {name}", actual, expected, error + step * is_half, step)

    def tables_of_angles(self, dtype: torch.dtype, position_dtype: torch.dtype, base: float) -> None:
        """Checks cos_sin at positions below 2^24, axial_cos_sin of three axes, and the gradients of inv_freq."""
        far = torch.cat([torch.arange(99), torch.randint(2**24, (400,)), torch.arange(2**24 - 99, 2**24)])
        far = far / 1024 if position_dtype.is_floating_point else far
        f, axes = default(64, base).inv_freq.float(), torch.randint(1000, (3, 2, 30))
        for op, p, inv_freq in (("cos_sin", far, f), ("axial_cos_sin", axes, torch.stack([f, f / 3, f * 0]))):
            p = p.to(position_dtype).to(self.device)
            args = {"positions": p, "inv_freq": inv_freq.to(self.device), "dtype": dtype}
            self.gradients(op, [], args, of=("inv_freq",))
            outs = self.call(op, **args, attention_factor=1.7)
            args = {name: exact(value) for name, value in args.items()}
            expected = getattr(reference, op)(**args, attention_factor=1.7)
            bound = (2,) if dtype == torch.float64 else (0.51, ANGLE_ERROR)
            for name, out, e in zip(("cos", "sin"), outs, expected, strict=True):
                self.near(f"{name} of {op}", out, e, torch.full(e.shape, 1.7).double(), *bound)

    def eager_rounding(self, dtype: torch.dtype, interleaved: bool) -> None:
        """Checks that eager rounding gives the bits of torch's operators."""
        tensors = [self.make(2, 9, 5, 72, dtype=dtype), *(t.to(dtype) for t in self.tables(9, 48).values())]
        options: dict[str, Any] = {"interleaved": interleaved, "attention_factor": 1.7, "rotary_start": 8}
        options["eager_rounding"] = True
        found = []
        for function, device in ((partial(self.call, "rotate"), self.device), (reference.rotate, "cpu")):
            x, cos, sin = (t.detach().to(device) for t in tensors)
            out = function(x.requires_grad_(), cos, sin, **options)
            found.append([out, *torch.autograd.grad(out, x, -x)])
        for name, actual, expected in zip(("the result", "the gradient"), *found, strict=True):
            self.same(name, actual, expected)

    def threads(self) -> None:
        """Checks the results when four Python threads call an operator at the same time."""
        calls = [self.arguments("rotate_qk", self.dtypes[n % 3], n) for n in range(60)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda call: self.values("rotate_qk", *call), calls))

    def groups(self, quick: bool) -> dict[str, dict[str, Callable[[], None]]]:
        """Returns the groups of this file: a name, and its cases by name. Making them uses no device."""

        def case(check: Callable, op: str, dtype: torch.dtype, number: int) -> None:
            check(op, *self.arguments(op, dtype, number))

        def cases(check: Callable, *ops: str) -> dict[str, Callable[[], None]]:
            every = itertools.product(range(6 if quick else 40), self.dtypes, ops)
            return {f"{op} {str(dtype)[6:]} {n}": partial(case, check, op, dtype, n) for n, dtype, op in every}

        angles = itertools.product(self.dtypes, (torch.int64, torch.int32, torch.float32), (1e4, 5e5, 1.0000001))
        eager = itertools.product(self.dtypes, (False, True))
        return {
            "values: cos_sin, axial_cos_sin": {
                f"{str(t)[6:]} of {str(p)[6:]} positions, base {base}": partial(self.tables_of_angles, t, p, base)
                for t, p, base in angles
            },
            "values: rotate, rotate_qk": cases(self.values, "rotate", "rotate_", "rotate_qk", "rotate_qk_")
            | {f"eager rounding {str(d)[6:]}, interleaved={i}": partial(self.eager_rounding, d, i) for d, i in eager}
            | {"four threads at once": self.threads},
            "values: norm_rotate_qk": cases(self.values, "norm_rotate_qk"),
            "values: rotate_into_cache_": cases(self.values, "rotate_into_cache_"),
            "gradients: rotate, rotate_qk": cases(self.gradients, "rotate", "rotate_qk"),
            "gradients: norm_rotate_qk": cases(self.gradients, "norm_rotate_qk"),
        }
