"""Measures the operators, a copy of the same number of bytes, plain torch, and MLX."""

import importlib
import importlib.util
import itertools
import statistics
import time
from functools import partial

import torch

import torch_rope
from torch_rope import reference
from torch_rope.selfcheck.checks import Check, Group, Skip, demand, rope
from torch_rope.selfcheck.kernels import memory

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES = (HEADS + KV_HEADS) * DIM * 2
DTYPE = torch.bfloat16
# The kind of call, and its numbers of tokens.
CALLS = [
    ("rotate_qk_", (1, 32, 512, 4096, 32768)),
    ("rotate_qk", (1, 4096)),
    ("rotate_qk_ interleaved", (4096,)),
    ("rotate_qk_ inv_freq", (4096,)),
    ("rotate_qk_ not in vectors", (4096,)),
    ("norm_rotate_qk", (1, 4096)),
    ("norm_rotate_qk backward", (4096,)),
    ("norm_rotate_qk over heads", (1, 4096)),
    ("norm_rotate_qk backward over heads", (4096,)),
    ("table backward", (4096,)),
]


def groups(check: Check) -> list[Group]:
    sizes = [(kind, tokens) for kind, all_tokens in CALLS for tokens in all_tokens]
    sizes.sort(key=lambda size: size[1])  # so that a slow device measures small sizes of all kinds
    cases = {f"{kind} [{tokens}]": partial(bandwidth, check, kind, tokens) for kind, tokens in sizes}
    against = {op: partial(decode, check, op) for op in ("rotate_qk_", "rotate_into_cache_", "rotate_into_cache_ int8")}
    return [
        Group("speed", cases, seconds=20, apart=True),
        Group("decode", against, seconds=10, apart=True),
        Group("decode, MLX", {"": partial(mlx, check)}, seconds=10, apart=True),
    ]


def medians(check: Check, contenders: list, seconds: float) -> list[float]:
    """Returns the median time of a call, in seconds, for each contender.

    The contenders alternate. Each run is so long that waiting for the device at its end is a small part of it. On Metal
    the GPU begins only at that wait, so a time is the sum of what host and GPU need.
    """

    def run(call, calls):
        check.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        check.synchronize()
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


def bandwidth(check: Check, kind: str, tokens: int) -> None:
    """Measures a call, and a copy of the bytes that the call must read and write."""
    bytes_of_q_and_k = tokens * TOKEN_BYTES
    if memory() and 4 * bytes_of_q_and_k > memory() / 8:  # this function makes up to four such tensors
        raise Skip(f"{tokens} tokens need more than an eighth of the memory")
    new = partial(torch.randn, device=check.device, dtype=DTYPE)
    q, k = (new(1, tokens, heads, DIM) for heads in (HEADS, KV_HEADS))
    cos, sin = check.tables(tokens, DIM)
    inv_freq = torch_rope.inv_freq(DIM, device=check.device)
    weights = [torch.ones(x.shape[-2 if "over heads" in kind else -1 :], device=check.device) for x in (q, k)]
    moved = 2 * bytes_of_q_and_k
    op, _, variant = kind.partition(" ")
    if kind == "table backward":
        call = partial(rope._rotate_table_backward, q, k, q, k, cos, sin)  # reads gradients and q and k
    elif variant.startswith("backward"):  # reads gradients and q and k, and writes gradients
        call = partial(rope._norm_rotate_qk_backward, q, k, q, k, *weights, cos, sin)
        moved = 3 * bytes_of_q_and_k
    elif op == "norm_rotate_qk":
        call = partial(rope.norm_rotate_qk, q, k, *weights, cos, sin)
    elif variant == "inv_freq":
        call = partial(rope.rotate_qk_, q, k, inv_freq=inv_freq)
    else:
        if variant == "not in vectors":  # the storage offset is odd
            q, k = (torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t) for t in (q, k))
        call = partial(getattr(rope, op), q, k, cos, sin, interleaved=variant == "interleaved")
    x = new(moved // 4)
    out = torch.empty_like(x)
    with torch.no_grad():
        ours, copy = medians(check, [call, lambda: out.copy_(x)], 0.4)
    row = {"call": kind, "tokens": tokens, "us": ours * 1e6, "GB/s": moved / ours / 1e9}
    check.measured("speed", row | {"copy us": copy * 1e6, "copy GB/s": moved / copy / 1e9, "of copy": ours / copy})


def new_token(check: Check):
    """Returns q, k and v of one token, and cos and sin."""
    q, k, v = (torch.randn(1, 1, h, DIM).to(DTYPE).to(check.device) for h in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v, *check.tables(4096, DIM)


def decode(check: Check, op_and_dtype: str) -> None:
    """Measures an operator on one token, with a wait after many calls and after each call, and plain torch."""
    q, k, v, cos, sin = new_token(check)
    p = torch.tensor([[77]]).to(check.device)
    op, _, quantised = op_and_dtype.partition(" ")
    dtype = getattr(torch, quantised) if quantised else DTYPE
    cache = [torch.zeros(1, 256, KV_HEADS, DIM, dtype=dtype, device=check.device) for _ in "kv"]
    scale = torch.full((1,), 0.03, device=check.device)
    row = torch.arange(1, device=check.device)[:, None]

    def plain():
        new_q, new_k = reference.rotate_qk(q, k, cos, sin, positions=p)
        q.copy_(new_q)
        if "cache" in op:
            new = [reference.quantise(x, scale, dtype) for x in (new_k, v)] if quantised else (new_k, v)
            cache[0][row, p], cache[1][row, p] = new
        else:
            k.copy_(new_k)

    def wait_after(call):
        call()
        check.synchronize()

    scales = {"k_scale": scale, "v_scale": scale} if quantised else {}
    ours = partial(getattr(rope, op), q, k, *([v, *cache] if "cache" in op else []), cos, sin, positions=p, **scales)
    calls = [ours, plain, partial(wait_after, ours), partial(wait_after, plain)]
    with torch.no_grad():
        times = medians(check, calls, 1.0)
    for name, many, each in (("torch_rope", *times[::2]), ("plain torch", *times[1::2])):
        check.measured("decode", {"call": op_and_dtype, "by": name, "us": many * 1e6, "us with a wait": each * 1e6})


def mlx(check: Check) -> None:
    """Measures MLX with the inputs of rotate_qk_ on one token, and compares its values with ours."""
    if not importlib.util.find_spec("mlx"):
        raise Skip("mlx is not installed")
    try:
        mx = importlib.import_module("mlx.core")
    except Exception as e:
        raise Skip(f"mlx cannot be imported: {type(e).__name__}: {e}") from None
    q, k, _, cos, sin = new_token(check)
    # MLX has heads before tokens.
    xs = [mx.array(t.float().cpu().transpose(1, 2).tolist()).astype(mx.bfloat16) for t in (q, k)]

    def rotate():
        return [mx.fast.rope(x, DIM, traditional=False, base=10000.0, scale=1.0, offset=77) for x in xs]

    outs = rotate()
    mx.eval(outs)
    rope.rotate_qk_(q, k, cos, sin, offset=77)
    for name, theirs, ours in zip("qk", outs, (q, k), strict=True):
        theirs = torch.tensor(theirs.astype(mx.float32).tolist()).transpose(1, 2)
        error = (theirs - ours.float().cpu()).abs().max().item()
        demand(error < 0.05, f"{name} differs from MLX's by {error:.3g}")

    def median(run, calls: int) -> float:
        times, end = [], time.monotonic() + 0.5
        while not times or (time.monotonic() < end and len(times) < 100):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times) * 1e6

    many = median(lambda: mx.eval(list(itertools.chain(*(rotate() for _ in range(200))))), 200)
    each = median(lambda: mx.eval(rotate()), 1)
    by = f"MLX {getattr(mx, '__version__', '')} on {mx.default_device()}"
    check.measured("decode", {"call": "rotate_qk_", "by": by, "us": many, "us with a wait": each})
