"""Measures five calls, and a copy of the bytes that each of them must read and write."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from torch_rope.selfcheck.checks import Check, rope

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CALLS = [(op, 1) for op in ("rotate_qk_", "rotate_into_cache_")]
CALLS += [(op, 4096) for op in ("rotate_qk_", "norm_rotate_qk", "_norm_rotate_qk_backward")]
NAME = f"speed: bfloat16, {HEADS} + {KV_HEADS} heads"


def groups(check: Check) -> dict[str, dict[str, Callable[[], str]]]:
    return {NAME: {f"{op}, seq {tokens}": partial(measure, check, op, tokens) for op, tokens in CALLS}}


def measure(check: Check, op: str, tokens: int) -> str:
    """Returns a line with the times of a call and of a copy."""
    new = partial(torch.randn, device=check.device, dtype=torch.bfloat16)
    q, k = (new(1, tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS))
    weights = [torch.ones(HEAD_DIM, device=check.device) for _ in "qk"]
    others, moved = {  # the other arguments, and the tensors that are read or written
        "rotate_qk_": ([], [q, k] * 2),
        "rotate_into_cache_": ([k, k.clone(), k.clone()], [q, k, k] * 2),
        "norm_rotate_qk": (weights, [q, k] * 2),
        "_norm_rotate_qk_backward": ([q, k, *weights], [q, k] * 3),
    }[op]
    call = partial(getattr(rope, op), q, k, *others, **check.tables(tokens, HEAD_DIM))
    size = sum(t.nbytes for t in moved)
    source = torch.zeros(size // 2, device=check.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    with torch.no_grad():
        seconds = median_times(check.device, [call, lambda: target.copy_(source)])
    ours, copied = (f"{1e6 * t:.1f} us, {size / t / 1e9:.1f} GB/s" for t in seconds)
    return f"{op}, seq {tokens}: {ours}; a copy: {copied}"


def median_times(device: torch.device, calls: list[Callable]) -> list[float]:
    """Returns the median time of each call in seconds. The calls alternate.

    Each run is so long that waiting for the device at its end is a small part of it. On Metal the GPU begins only at that
    wait, so a time is the sum of what host and GPU need.
    """

    def run(call: Callable, repeats: int) -> float:
        zero.item()  # waits for the device
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        zero.item()
        return time.perf_counter() - start

    zero, rounds = torch.zeros((), device=device), list[list[float]]()
    once = [min(run(call, 1), run(call, 1)) for call in calls]  # the first call may compile
    repeats = [min(max(int(0.005 / seconds), 1), 1000) for seconds in once]
    end = time.monotonic() + 0.5
    while not rounds or (time.monotonic() < end and len(rounds) < 30):
        rounds.append([run(call, n) / n for call, n in zip(calls, repeats, strict=True)])
    return [statistics.median(times) for times in zip(*rounds, strict=True)]
