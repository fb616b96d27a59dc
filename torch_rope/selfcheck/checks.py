"""Checks of values and gradients.

torch_rope.reference computes the expected results, in float64 on the CPU. Errors are given in ulps: an ulp (unit in the
last place) is the distance between neighbouring numbers of a dtype, here at the magnitude of a pair of channels.
"""

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_rope import reference
from torch_rope.frequencies import default, has_float64
from torch_rope.selfcheck.calls import DTYPES, QUANTISED, SOURCES, describe, filled, make

rope = torch.ops.rope
QUOTIENT_ERROR = 2e-6  # the largest error of a number before it is quantised, as a part of its pair's magnitude
ANGLE_ERROR = 5e-7  # the largest error of cos and sin that are computed from inv_freq at positions below 2^24
# In float64 the reference would round the products of positions and of these frequencies.
EXACT_SOURCES = [s for s in SOURCES if s.freq_dtype == torch.float32 and "parts" not in s.kind]


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


def magnitude(name: str, result: Tensor, options: dict) -> Tensor:
    """Returns the magnitude of each channel's pair, or 0 for a channel that is copied and so must keep its bits. name: that
    of the argument which was rotated."""
    start = options.get("rotary_start", 0)
    end = start + 2 * options["cos" if "cos" in options else "inv_freq"].shape[-1]
    is_scaled = "q_norm_weight" in options or f"{name}_factor" in options
    size = result.abs() if is_scaled else torch.zeros_like(result)
    dim, shape = (-1, (-1, 2)) if options.get("interleaved") else (-2, (2, -1))
    pairs = result[..., start:end].unflatten(-1, shape)
    size[..., start:end] = pairs.norm(dim=dim, keepdim=True).expand(pairs.shape).flatten(-2)
    return size


def limits(dtype: torch.dtype, angles: dict, attention_factor: float = 1.0, norm: bool = False) -> tuple[int, float]:
    """Returns how far a result of dtype may be from the exact one: a number of ulps, and a part of the magnitude."""
    if dtype.itemsize == 2:
        return 1, 0.0
    ulps = 6 if norm else 2 + (attention_factor != 1.0) + ("q_factor" in angles)
    return ulps, ANGLE_ERROR if dtype == torch.float32 and "inv_freq" in angles else 0.0


def text_of(op: str, call: dict) -> str:
    def text(x) -> str:
        return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, Tensor) else str(x)

    return f"rope.{op}({', '.join(f'{name}={text(value)}' for name, value in call.items())})"


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
        self.last_call = ""
        self.largest = 0.0  # the largest error so far, as a part of the allowed error

    def call(self, op: str, **call):
        self.last_call = text_of(op, call)
        self.before_call(self.last_call)
        return getattr(rope, op)(**call)

    # ---- comparisons ----

    def compare(self, name: str, actual: Tensor, expected: Tensor, allowed: Tensor, step: Tensor) -> None:
        """Raises AssertionError unless abs(actual - expected) <= allowed. The message gives errors as multiples of step."""
        require(actual.shape == expected.shape, f"{name} has shape {list(actual.shape)}, not {list(expected.shape)}")
        if not expected.numel():
            return
        actual, expected = exact(actual).double(), expected.detach()
        part, at = ((actual - expected).abs() / allowed).nan_to_num(nan=torch.inf).flatten().max(0)
        self.largest = max(self.largest, part.item())
        limit = (allowed / step).flatten()[at]
        require(
            bool(part <= 1),
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
        return filled(dtype, self.device)(*shape)

    def tables(self, rows: int, rotary_dim: int) -> dict[str, Tensor]:
        """Returns cos and sin. No kernel of torch_rope computes them, so a broken kernel fails only its own checks."""
        tables = reference.cos_sin(torch.arange(rows), default(rotary_dim).inv_freq)
        return dict(zip(("cos", "sin"), (t.to(self.device) for t in tables), strict=True))

    def arguments(self, op: str, dtype: torch.dtype, number: int) -> dict:
        """Returns the arguments of a call. The number determines every choice."""
        torch.manual_seed(number)
        pick = random.Random(number)
        exact_source = {"source": pick.choice(EXACT_SOURCES)} if dtype == torch.float64 else {}
        call = make(op, self.device, **describe(op, pick, self.device, dtype=dtype, **exact_source))
        if "inv_freq" in call and "positions" in call and op != "rotate_into_cache_" and pick.random() < 0.5:
            far = torch.randint(2**24 - 9, call["positions"].shape, dtype=call["positions"].dtype)
            call["positions"] = far.to(self.device)
        return call

    # ---- the checks ----

    def values(self, op: str, call: dict, reference_call: dict | None = None) -> None:
        """Checks all results of an operator, and that it changes nothing else. reference_call: the arguments of the
        reference, if they must not be the same."""
        exact_call = {name: exact(value) for name, value in (reference_call or call).items()}
        before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
        outs, dtype = self.call(op, **call), next(iter(call.values())).dtype
        has_norm = "q_norm_weight" in call or call.get("norm_v", False)
        ulps, part = limits(dtype, call, call.get("attention_factor", 1.0), has_norm)
        bound = ulps + 2 * (dtype == torch.float64), part  # in float64 the expected result has an error of its own
        if op == "rotate_into_cache_":
            self.near_results(call, before, exact_call, bound)
            unchanged = ["k", "v", *(["q"] if call.get("q_out", call["q"]) is not call["q"] else [])]
        else:
            xs = {name: call[name] for name in ("x", "q", "k") if name in call}
            unchanged = [] if op.endswith("_") else list(xs)
            outs = xs.values() if op.endswith("_") else tree_leaves(outs)
            expected = tree_leaves(getattr(reference, op.rstrip("_"))(**exact_call))
            for (name, x), out, e in zip(xs.items(), outs, expected, strict=True):
                require(out.dtype == x.dtype, f"{name} is {out.dtype} but must be {x.dtype}")
                self.near(name, out, e, magnitude(name, e, exact_call), *bound)
        for name in unchanged:
            self.same(name, call[name], before[name])

    def near_results(self, call: dict, before: dict, exact_call: dict, bound: tuple) -> None:
        """Checks the rotated q and both caches after a call of rotate_into_cache_. before: the tensors before it."""
        scales = [exact_call.pop(name, None) for name in ("q_scale", "k_scale", "v_scale")]
        exact_call.pop("q_out", None)
        caches = {name: torch.full(call[name].shape, torch.nan, dtype=torch.float64) for name in ("k_cache", "v_cache")}
        reference.rotate_into_cache_(**exact_call | caches)
        news = exact_call["q"], *caches.values()
        sizes = [magnitude(name, x, exact_call) for name, x in zip("qk", news[:2], strict=True)]
        sizes.append(news[2].abs() * call.get("norm_v", False))  # v is copied if it has no norm
        names = "q_out" if "q_out" in call else "q", "k_cache", "v_cache"
        for name, new, size, scale in zip(names, news, sizes, scales, strict=True):
            out, unwritten = call[name], new.isnan()
            if scale is not None:
                scale = scale.expand(new.shape[-2])[:, None]
                new, size = (new / scale).clamp(*QUANTISED[out.dtype]), size / scale
            if unwritten.any():  # cells of a cache
                new = torch.where(unwritten, before[name].cpu().double(), new)
                size = size.masked_fill(unwritten, 0.0)
            if scale is None:
                self.near(name, out, new, size, *bound)
            else:  # the nearest number of the dtype is stored
                step = ulp(out.dtype, new.abs())
                allowed = 0.5 * step + QUOTIENT_ERROR * size.maximum(new.abs())
                self.compare(name, out, new, allowed, step)

    def gradients(self, op: str, call: dict, of: tuple[str, ...] = ()) -> None:
        """Checks the gradients of the arguments `of`, or of all that have one."""
        of = of or tuple(name for name, t in call.items() if isinstance(t, Tensor) and t.is_floating_point())
        given: list[Tensor] = []
        found = []
        for function, copy in ((partial(self.call, op), lambda t: t), (getattr(reference, op), exact)):
            copies = {name: copy(value) for name, value in call.items()}
            leaves = {name: copies[name].detach().requires_grad_() for name in of}
            outs = tree_leaves(function(**copies | leaves))
            given = given or [self.make(*out.shape, dtype=out.dtype) for out in outs]
            found.append(torch.autograd.grad(outs, list(leaves.values()), list(map(copy, given))))
        x = call.get("x", call.get("q"))
        for name, actual, expected in zip(of, *found, strict=True):
            # The arithmetic has an error that is relative to the largest gradient; a 16-bit result is also rounded.
            largest, is_half = expected.abs().max().expand(expected.shape), actual.dtype.itemsize == 2
            in_float64 = actual.dtype == torch.float64 and (x is None or x.dtype == torch.float64)
            error = ulp(torch.float64 if in_float64 else torch.float32, largest)
            # In float64 the expected sums over heads and tokens have an error too.
            error *= 24 if in_float64 and name in ("cos", "sin", "inv_freq") else 12
            error += ANGLE_ERROR * largest * ("inv_freq" in call and not in_float64)
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
            self.gradients(op, args, of=("inv_freq",))
            outs = self.call(op, **args, attention_factor=1.7)
            args = {name: exact(value) for name, value in args.items()}
            expected = getattr(reference, op)(**args, attention_factor=1.7)
            bound = (2,) if dtype == torch.float64 else (0.51, ANGLE_ERROR)
            for name, out, e in zip(("cos", "sin"), outs, expected, strict=True):
                self.near(f"{name} of {op}", out, e, torch.full(e.shape, 1.7).double(), *bound)

    def eager_rounding(self, dtype: torch.dtype, interleaved: bool) -> None:
        """Checks that eager rounding gives the bits of torch's operators."""
        tables = {name: t.to(dtype) for name, t in self.tables(9, 48).items()}
        tensors = {"x": self.make(2, 9, 5, 72, dtype=dtype)} | tables
        options = {"attention_factor": 1.7, "rotary_start": 8, "eager_rounding": True}
        found = []
        for function, device in ((partial(self.call, "rotate"), self.device), (reference.rotate, "cpu")):
            given: dict[str, Any] = {name: t.detach().to(device) for name, t in tensors.items()} | options
            x = given["x"].requires_grad_()
            out = function(**given, interleaved=interleaved)
            found.append([out, *torch.autograd.grad(out, x, -x)])
        for name, actual, expected in zip(("the result", "the gradient"), *found, strict=True):
            self.same(name, actual, expected)

    def threads(self) -> None:
        """Checks the results when four Python threads call an operator at the same time."""
        calls = [self.arguments("rotate_qk", self.dtypes[n % 3], n) for n in range(60)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda call: self.values("rotate_qk", call), calls))

    def groups(self, quick: bool) -> dict[str, dict[str, Callable[[], None]]]:
        """Returns the groups of this file: a name, and its cases by name. Making them uses no device."""

        def case(check: Callable, op: str, dtype: torch.dtype, number: int) -> None:
            check(op, self.arguments(op, dtype, number))

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
            "values: norm_rotate_qk": cases(self.values, "norm_rotate_qk", "norm_rotate_qk_"),
            "values: rotate_into_cache_": cases(self.values, "rotate_into_cache_"),
            "gradients: rotate, rotate_qk": cases(self.gradients, "rotate", "rotate_qk"),
            "gradients: norm_rotate_qk": cases(self.gradients, "norm_rotate_qk"),
        }
