"""Checks the values, the gradients and the speed of the operators on this machine.

    python -m torch_rope.selfcheck [--device mps] [--quick] [--only TEXT]

It takes about a minute. The output is short enough to be pasted into an issue. The exit status is 0 if all checks pass,
1 if a check fails, and 2 if the device cannot be used.

Only torch is needed. The expected results come from torch_rope.reference, in float64 on the CPU. Errors are given in
ulps: an ulp (unit in the last place) is the distance between neighbouring numbers of the result's dtype, here at the
magnitude of a pair of channels.
"""

import argparse
import itertools
import platform
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

import torch_rope
from torch_rope import _C, reference

rope = torch.ops.rope
HALF = torch.float16, torch.bfloat16
ANGLE_ERROR = 5e-7  # the largest error of cos and sin that are computed from inv_freq at positions below 2^24


# ---- The expected results ----


def exact(value):
    """Returns a copy of a tensor on the CPU, in float64 if it is floating point. Returns any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    value = value.cpu().clone()
    return value.double() if value.is_floating_point() else value


def magnitude(result: Tensor, options: dict) -> Tensor:
    """Returns the magnitude of each channel's pair, or 0 for a channel that is copied and so must keep its bits."""
    rotary_dim = 2 * options["cos" if "cos" in options else "inv_freq"].shape[-1]
    rotated, rest = result.detach().split([rotary_dim, result.shape[-1] - rotary_dim], -1)
    pairs, dim = (
        (rotated.unflatten(-1, (-1, 2)), -1) if options["interleaved"] else (rotated.unflatten(-1, (2, -1)), -2)
    )
    size = pairs.norm(dim=dim, keepdim=True).expand(pairs.shape).flatten(-2)
    return torch.cat([size, rest.abs() if "q_norm_weight" in options else torch.zeros_like(rest)], -1)


def right(op: str, xs: list[Tensor], options: dict) -> list[tuple[Tensor, Tensor]]:
    """Returns the expected results: pairs of a result and the magnitude of each channel's pair.

    The results are those of x or q, of q and k, or of q and both caches.
    """
    xs, options = list(map(exact, xs)), {name: exact(value) for name, value in options.items()}
    if "cache" in op:
        q, k, v, k_cache, v_cache = xs
        before = k_cache.clone()
        reference.rotate_into_cache(*xs, **options)
        written = k_cache != before  # all other cells must keep their bits, and v is copied bit for bit
        sizes = magnitude(q, options), magnitude(k_cache, options) * written, torch.zeros_like(v_cache)
        return list(zip((q, k_cache, v_cache), sizes, strict=True))
    outs = reference.norm_rotate_qk(*xs, **options) if "norm" in op else [reference.rotate(x, **options) for x in xs]
    return [(out, magnitude(out, options)) for out in outs]


# ---- The cases ----

# (batch, seq, heads of q, heads of k and v, head_dim, rotary_dim)
SIZES = [(2, 5, 4, 2, 64, 64), (1, 1, 8, 2, 128, 128), (1, 33, 3, 1, 80, 32), (3, 7, 2, 2, 128, 64)]
CASES = list(itertools.product(SIZES, range(8), (False, True)))  # (size, source of the angles, interleaved)
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


def demand(condition: bool, otherwise: str) -> None:
    """Raises AssertionError if the condition is false. Unlike assert, it also works under python -O."""
    if not condition:
        raise AssertionError(otherwise)


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def describe_call(op: str, args: tuple, kwargs: dict) -> str:
    def text(value):
        if not isinstance(value, Tensor):
            return repr(value)
        kind = f"{str(value.dtype)[6:]}{list(value.shape)}"
        dense = value.is_contiguous() and not value.storage_offset()
        return kind if dense else f"{kind} with storage offset {value.storage_offset()}, strides {value.stride()}"

    return f"rope.{op}({', '.join([*map(text, args), *(f'{name}={text(value)}' for name, value in kwargs.items())])})"


class Check:
    """Runs groups of cases, prints a line for each group, and counts the cases that failed."""

    def __init__(self, device: torch.device, quick: bool = False, only: str = ""):
        self.device, self.quick, self.only, self.failed = device, quick, only, 0
        self.dtypes = [torch.float32, *HALF] + ([torch.float64] if device.type != "mps" else [])  # Metal has no float64

    def group(self, name: str, cases: dict) -> None:
        """Runs the cases of a group and prints a line.

        cases maps a name to a function, which raises an error if a result is wrong. A group ends after a second, so a
        slow device runs fewer cases.
        """
        if self.only not in name:
            return
        self.worst, failures, done = (-1.0, ""), [], 0
        end = time.monotonic() + 1
        for case, run in cases.items():
            if done and time.monotonic() > end:
                break
            self.last_call, done = None, done + 1
            torch.manual_seed(0)
            try:
                run()
            except Exception as e:
                call = f": {describe_call(*self.last_call)}" if self.last_call else ""
                failures.append(f"  case {case}{call}\n    {describe_error(e)}")
        count = f"{done}/{len(cases)}" if done < len(cases) else f"{done}"
        print(f"{name:<34}{count:>6}  {self.worst[1]:<28}{'FAILED' if failures else 'ok'}", flush=True)
        if failures:
            more = [f"  and {len(failures) - 3} more"] * (len(failures) > 3)
            again = f"  to repeat: python -m torch_rope.selfcheck --device {self.device} --only '{name}'"
            print(*failures[:3], *more, again, sep="\n")
        self.failed += len(failures)

    def call(self, op: str, *args, **kwargs):
        self.last_call = op, args, kwargs
        return getattr(rope, op)(*args, **kwargs)

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
        info = torch.finfo(actual.dtype)
        step = info.eps * torch.exp2(torch.frexp(size.clamp(min=info.tiny)).exponent.double() - 1)
        self.within(actual, expected, ulps + part * size / step, step, " ulp")

    def same(self, actual, expected) -> None:
        for a, e in zip(actual, expected, strict=True):
            demand(torch.equal(a.cpu(), e.cpu()), "the bits differ")

    # -- arguments --

    def make(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype).to(self.device)

    def angles(self, source: int, b: int, s: int, rotary_dim: int, dtype: torch.dtype) -> dict:
        """Returns the arguments that give the angles.

        source: 0 to 2 are tables by position, 3 and 4 are tables by token, 5 to 7 are inv_freq.
        """
        rows = s + 40
        if source < 5:
            shape = *{3: (b, s), 4: (1, s)}.get(source, (rows,)), rotary_dim // 2
            angle = torch.rand(shape, dtype=torch.float64) * 2 * torch.pi
            tables = [t.to(dtype if source in (1, 4) else torch.float32) for t in (angle.cos(), angle.sin())]
            wide = [torch.cat([t, t], -1).to(self.device) for t in tables]
            narrow = [t.to(self.device) for t in tables] if source != 2 else [t[:, : shape[-1]] for t in wide]
            found = dict(zip(("cos", "sin"), narrow, strict=True))
        else:
            found = {"inv_freq": torch_rope.inv_freq(rotary_dim).to(self.device)}
        # No two positions of a sequence are equal, because each token needs its own cell in a cache.
        some = torch.stack([torch.randperm(rows)[:s] for _ in range(b)])
        far = torch.randint(2**24 - 9, (b, s))
        positions = {1: some, 2: some[0].int() + 2, 6: some[:1].int() - 50, 7: far}.get(source)
        if positions is not None:
            found["positions"] = positions.to(self.device)
        return found | {"offset": {0: 3, 2: -2, 5: 100000, 7: 8}.get(source, 0)}

    def arguments(self, op: str, dtype: torch.dtype, number: int):
        """Returns the arguments of a case: ([q, k, v], options, the random generator for further choices)."""
        torch.manual_seed(number)
        pick, make = random.Random(number), partial(self.make, dtype=dtype)
        (b, s, *heads, d, rotary_dim), source, interleaved = CASES[number]
        heads.append(heads[-1])
        layout = pick.choice([*LAYOUTS, None])
        if layout:
            qkv = [layout(make, b, s, h, d) for h in heads]
        else:
            packed = make(b, s, sum(heads) * d)
            qkv = [t.unflatten(-1, (-1, d)) for t in packed.split([h * d for h in heads], -1)]
        if b == 1 and pick.random() < 0.3:
            qkv = [t[0] for t in qkv]
        options = self.angles(source, b, s, rotary_dim, dtype)
        options |= {"interleaved": interleaved, "attention_factor": pick.choice((1.0, 1.7))}
        if "norm" in op or ("cache" in op and pick.random() < 0.5):
            of = pick.choice((dtype, torch.float32))
            options |= {"q_norm_weight": self.make(d, dtype=of), "k_norm_weight": self.make(d, dtype=of)}
            options["norm_eps"] = pick.choice((1e-6, 0.01))
        elif "cache" not in op:
            options["inverse"] = pick.random() < 0.5
        return qkv, options, pick

    def caches(self, k, options, pick):
        """Returns ([k_cache, v_cache], options), where options contains slots, or nothing."""
        x = k if k.dim() == 4 else k[None]
        b, s, h, d = x.shape
        by_position = "cos" in options and options["cos"].dim() == 2 and pick.random() < 0.5
        n, m = (b + 1, s + 40) if by_position else (b * s // 16 + 2, 16)
        caches = pick.choice(CACHES)(partial(self.make, dtype=k.dtype), n, m, h, d)
        if by_position:
            return [t[0] for t in caches] if b == 1 and pick.random() < 0.5 else caches, {}
        cells = torch.where(torch.rand(b, s) < 0.2, -3, torch.randperm(n * m)[: b * s].view(b, s))
        return caches, {"slots": cells.to(pick.choice((torch.int32, torch.int64))).to(self.device)}

    # -- cases --

    def value(self, op: str, dtype: torch.dtype, number: int) -> None:
        """Checks all results of an operator, and that it changes nothing else."""
        (q, k, v), options, pick = self.arguments(op, dtype, number)
        xs = [q] if op in ("rotate", "rotate_") else [q, k]
        if "cache" in op:
            caches, slots = self.caches(k, options, pick)
            xs, options = [q, k, v, *caches], options | slots
        results = right(op, xs, options)
        if "cache" in op:
            results[1:1] = None, None  # k and v
        before = [t.clone() for t in (q, k, v)]
        outs = self.call(op, *xs, **options)
        in_place = op.endswith("_")
        outs = xs if in_place else outs if isinstance(outs, tuple) else (outs,)
        ulps = 6 if "q_norm_weight" in options else 2 if options["attention_factor"] == 1.0 else 3
        part = ANGLE_ERROR if "inv_freq" in options else 0.0
        # In float64 the expected result has an error of its own.
        bound = {torch.float32: (ulps, part), torch.float64: (ulps + 2,)}
        for x, out, e in zip(xs, outs, results, strict=True):
            if e:
                self.near(out, *e, *bound.get(dtype, (1,)))
                demand(out.dtype == dtype, f"the result is {out.dtype} but must be {dtype}")
                strides = torch.empty_like(x).stride()
                demand(in_place or out.stride() == strides, f"the strides are {out.stride()} but must be {strides}")
        written = [x for x, e in zip(xs, results, strict=True) if in_place and e]
        for t, old in zip((q, k, v), before, strict=True):
            if not any(t is x for x in written):
                self.same([t], [old])

    def gradient(self, op: str, dtype: torch.dtype, number: int) -> None:
        """Compares gradients with those of the reference, in ulps at the largest gradient."""
        qkv, options, _ = self.arguments(op, dtype, number)
        xs = qkv[:1] if op == "rotate" else qkv[:2]
        weights = [options.pop(name) for name in ("q_norm_weight", "k_norm_weight") if name in options]
        leaves = [t.detach().requires_grad_() for t in (*xs, *weights)]
        given = [self.make(*x.shape, dtype=dtype) for x in xs]
        found = torch.autograd.grad(self.call(op, *leaves, **options), leaves, given)
        copies = [exact(t).requires_grad_() for t in map(Tensor.detach, leaves)]
        names = ("q_norm_weight", "k_norm_weight")[: len(weights)]
        outs = [t for t, _ in right(op, copies[: len(xs)], options | dict(zip(names, copies[len(xs) :], strict=True)))]
        part = ANGLE_ERROR if dtype == torch.float32 and "inv_freq" in options else 0.0
        for out, e in zip(found, torch.autograd.grad(outs, copies, list(map(exact, given))), strict=True):
            self.near(out, e, e.abs().max().expand(e.shape), *((1,) if out.dtype in HALF else (12, part)))

    def angle(self, base: float, dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
        """Checks the angles of cos_sin, and those of rotate, which rotates the pair (1, 0) to (cos, sin)."""
        p = torch.cat([torch.arange(99), torch.randint(2**24, (400,)), torch.arange(2**24 - 99, 2**24)]).to(dtype)
        p, freq = p / 1024 if dtype.is_floating_point else p, torch_rope.inv_freq(128, base)
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
        cos, sin = rope.cos_sin(torch.arange(64).to(self.device), torch_rope.inv_freq(64).to(self.device))
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

    def run(self) -> None:
        print(f"{'':<35}cases  worst error, of the allowed error")
        numbers = list(range(len(CASES)))
        random.Random(0).shuffle(numbers)  # a slow device, which runs fewer cases, then still runs cases of all kinds
        numbers = numbers[:: 12 if self.quick else 1]
        bases = (10000.0, 500000.0, 1.0000001)
        kinds = itertools.product(bases, (torch.int64, torch.int32, torch.float32))
        self.group("angles below position 2^24", {kind: partial(self.angle, *kind) for kind in kinds})
        for dtype in self.dtypes:
            cases = {base: partial(self.angle, base, torch.int64, dtype) for base in bases}
            self.group(f"cos_sin {str(dtype)[6:]}", cases)
        ops = ["rotate", "rotate_", "rotate_qk", "rotate_qk_", "norm_rotate_qk", "rotate_into_cache_"]
        for op, dtype in itertools.product(ops, self.dtypes):
            self.group(f"{op} {str(dtype)[6:]}", {n: partial(self.value, op, dtype, n) for n in numbers})
        for op, dtype in itertools.product(ops[::2], self.dtypes):
            cases = {n: partial(self.gradient, op, dtype, n) for n in numbers[::2]}
            self.group(f"gradient, {op} {str(dtype)[6:]}", cases)
        self.group("same bits", {str(dtype): partial(self.same_bits, dtype) for dtype in self.dtypes})
        self.group("pads", {"": self.pads})
        if self.device.type != "cuda":
            self.group("out of range", {"": self.out_of_range})
        self.group("threads", {"": self.threads})
        self.group("torch.compile", {"": self.compiled})
        self.group("opcheck", {op: partial(self.opcheck, op) for op in ("rotate_qk", "rotate_into_cache_")})

    def speed(self) -> None:
        """Prints the times of operators, of a copy of the same number of bytes, and of plain torch."""
        print(
            "\nMedian time of a call. q has 32 heads, k and v have 8 heads, head_dim is 128.\n"
            "The copy is out.copy_(x) of the same number of bytes. Plain torch is torch_rope.reference.\n"
            "rotate_qk allocates new tensors. On the CPU a large tensor gets fresh pages of memory, which may take\n"
            "longer than the rotation."
        )
        print(
            f"{'[batch, seq]':<37}{'us':>9}{'GB/s':>8}{'copy us':>10}{'/ copy':>8}{'plain torch us':>16}{'/ ours':>8}"
        )
        sizes = [("rotate_qk", 1, 1), ("rotate_qk", 1, 128), ("rotate_qk", 1, 4096), ("rotate_qk_", 1, 4096)]
        sizes += [("rotate_into_cache_", 1, 1), ("rotate_into_cache_", 32, 1)]
        for dtype, (op, b, s) in itertools.product(HALF, sizes):
            name = f"{op} {str(dtype)[6:]} [{b}, {s}]"
            try:
                with torch.no_grad():
                    contenders, moved = self.contenders(op, dtype, b, s)
                    ours, copy, theirs = self.medians(contenders)
            except Exception as e:
                print(f"{name:<37}FAILED\n    {describe_error(e)}")
                self.failed += 1
                continue
            numbers = f"{ours * 1e6:>9.1f}{moved / ours / 1e9:>8.1f}{copy * 1e6:>10.1f}{ours / copy:>8.2f}"
            print(f"{name:<37}{numbers}{theirs * 1e6:>16.1f}{theirs / ours:>8.1f}", flush=True)

    def contenders(self, op: str, dtype: torch.dtype, b: int, s: int):
        """Returns ([torch_rope, a copy, plain torch], the bytes that each must read and write)."""
        q, k, v = (torch.randn(b, s, heads, 128).to(dtype).to(self.device) for heads in (32, 8, 8))
        cos, sin = rope.cos_sin(torch.arange(4096).to(self.device), torch_rope.inv_freq(128).to(self.device))
        sequence, p = torch.arange(b).to(self.device)[:, None], torch.arange(s).expand(b, s).to(self.device)
        cache = "cache" in op
        caches = [self.make(b, 8, 256, 128, dtype=dtype).transpose(1, 2) for _ in "kv"]

        def ours():
            getattr(rope, op)(q, k, *([v, *caches] if cache else []), cos, sin, positions=p)

        def theirs():
            new_q, new_k = reference.rotate_qk(q, k, cos, sin, positions=p)
            if cache:
                q.copy_(new_q)
                caches[0][sequence, p], caches[1][sequence, p] = new_k, v

        x = torch.cat([t.flatten() for t in ((q, k, v) if cache else (q, k))])
        out = torch.empty_like(x)
        return [ours, lambda: out.copy_(x), theirs], 2 * x.nbytes

    def medians(self, contenders: list, seconds: float = 1.0) -> list[float]:
        """Returns the median time of a call, in seconds, for each contender.

        The contenders alternate. Each run is so long that waiting for the device at its end is a small part of it.
        """
        wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(self.device.type, lambda: None)

        def run(call, calls):
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            wait()
            return time.perf_counter() - start

        end, counts, rounds = time.monotonic() + seconds, [], []
        for call in contenders:
            run(call, 1)  # the first call may compile
            counts.append(1)
            while counts[-1] < 4096 and run(call, counts[-1]) < 0.005:
                counts[-1] *= 4
        while not rounds or (time.monotonic() < end and len(rounds) < 30):
            rounds.append([run(call, n) / n for call, n in zip(contenders, counts, strict=True)])
        return [statistics.median(times) for times in zip(*rounds, strict=True)]


def ask(question) -> str:
    """Returns the answer to a question as text, or "unknown", because some versions of torch and machines lack it."""
    try:
        return str(question()).strip()
    except Exception:
        return "unknown"


def header(device: torch.device) -> str:
    name = {
        "cpu": lambda: f"{_C.cpu_instruction_set()} kernels, {torch.get_num_threads()} threads",
        "cuda": lambda: f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}",
        "mps": lambda: torch.backends.mps.get_name(),
    }[device.type]
    # module.cpp returns whether the shaders were compiled when torch_rope was built, or are compiled on this machine.
    library = f", Metal library: {ask(lambda: _C.metal_library)}" if device.type == "mps" else ""
    chip = platform.processor() or platform.machine()
    if sys.platform == "darwin":
        chip = ask(lambda: subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True))
    versions = f"torch_rope {torch_rope.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}\n{platform.platform()}, {chip}\ndevice {device}: {ask(name)}{library}\n"


def without(device: str) -> str:
    """Returns why a device cannot be used, or an empty string if it can."""
    if device.split(":")[0] not in _C.devices:
        return f"this build of torch_rope supports only {', '.join(_C.devices)}"
    try:
        torch.empty(1, device=device)
    except Exception as e:
        return describe_error(e).split("\n")[0]
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_rope.selfcheck", description=__doc__.split("\n")[0])
    best = next((device for device in reversed(_C.devices) if not without(device)), "cpu")
    parser.add_argument("--device", default=best, help=f"{' or '.join(_C.devices)}; the default is {best}")
    parser.add_argument("--quick", action="store_true", help="run fewer cases, and do not measure speed")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run only groups whose name contains TEXT, and do not measure speed"
    )
    options = parser.parse_args(argv)
    if problem := without(options.device):
        print(f"torch_rope.selfcheck: device {options.device} cannot be used: {problem}", file=sys.stderr)
        return 2
    check = Check(torch.device(options.device), options.quick, options.only)
    print(header(check.device))
    check.run()
    if not options.quick and not options.only:
        check.speed()
    print(f"\n{check.failed} checks failed" if check.failed else "\nAll checks passed.")
    return min(check.failed, 1)


if __name__ == "__main__":
    sys.exit(main())
