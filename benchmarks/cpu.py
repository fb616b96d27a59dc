"""Speed on the CPU, as ratios within one run: python benchmarks/cpu.py [case ...]

All contenders of a case take turns, so that what disturbs the machine disturbs all, and each is called once untimed before
it is timed, so that it finds its own caches and not its neighbour's; each figure is a median. The allocator is kept
warm, because fresh pages cost a large result more than the rotation does.
"""

import argparse
import os
import statistics
import sys
import time

WARM_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
if __name__ == "__main__" and any(os.environ.get(k) != v for k, v in WARM_ALLOCATOR.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | WARM_ALLOCATOR)

import torch  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

import torch_rope  # noqa: E402
from torch_rope import _C  # noqa: E402

THREADS, ROUNDS = 2, 41
rope = torch.ops.rope


def medians(contenders: dict, rounds: int = ROUNDS, calls: int = 1) -> dict:
    """Microseconds a call of each contender."""
    samples = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            call()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(s) for name, s in samples.items()}


class Table:
    """Prints a row per comparison, and remembers which missed their limit."""

    def __init__(self):
        self.missed = 0
        print(f"{'case':<44}{'ours':>12}{'other':>12}{'ratio':>8}   limit")

    def row(self, case, ours, other, limit, higher_is_better=False):
        ratio = other / ours if higher_is_better else ours / other
        good = ratio >= limit if higher_is_better else ratio <= limit
        self.missed += not good
        sign = ">=" if higher_is_better else "<="
        print(
            f"{case:<44}{ours:>9.1f} us{other:>9.1f} us{ratio:>8.2f}   {sign} {limit:g} {'' if good else 'MISSED'}",
            flush=True,
        )

    def limit(self, case, ours, limit):
        self.missed += ours > limit
        print(
            f"{case:<44}{ours:>9.2f} us{'':>12}{'':>8}   <= {limit:g} us {'' if ours <= limit else 'MISSED'}",
            flush=True,
        )


def prefill(table: Table, dtype: torch.dtype, layout: str, seq=2048, q_heads=32, k_heads=8, head_dim=128) -> None:
    name = f"{str(dtype)[6:]} {layout}"

    def make(heads):
        shape = (1, seq, heads, head_dim) if layout == "bshd" else (1, heads, seq, head_dim)
        return torch.randn(shape).to(dtype)

    def ours(x):
        return x if layout == "bshd" else x.transpose(1, 2)

    q, k = make(q_heads), make(k_heads)
    q_into, k_into = torch.empty_like(q), torch.empty_like(k)
    freq = torch_rope.inv_freq(head_dim)
    cos, sin = torch_rope.cos_sin(torch.arange(seq), freq)
    wide_cos, wide_sin = (torch.cat([t, t], -1).to(dtype)[None] for t in (cos, sin))
    axis = 2 if layout == "bshd" else 1
    compiled = torch.compile(apply_rotary_pos_emb, dynamic=False)

    def copy():
        q_into.copy_(q)
        k_into.copy_(k)

    # Rotating forth and back keeps the numbers where they were.
    turn = [False]

    def in_place(**angles):
        turn[0] = not turn[0]
        rope.rotate_qk_(ours(q), ours(k), inverse=turn[0], **angles)

    t = medians(
        {
            "copy": copy,
            "clone": lambda: (q.clone(), k.clone()),
            "in place": lambda: in_place(cos=cos, sin=sin),
            "in place interleaved": lambda: in_place(cos=cos, sin=sin, interleaved=True),
            "in place inv_freq": lambda: in_place(inv_freq=freq),
            "functional": lambda: rope.rotate_qk(ours(q), ours(k), cos, sin),
            "functional interleaved": lambda: rope.rotate_qk(ours(q), ours(k), cos, sin, interleaved=True),
            "functional inv_freq": lambda: rope.rotate_qk(ours(q), ours(k), inv_freq=freq),
            "compiled": lambda: compiled(q, k, wide_cos, wide_sin, axis),
            "eager": lambda: apply_rotary_pos_emb(q, k, wide_cos, wide_sin, axis),
        }
    )
    half = dtype == torch.bfloat16
    table.row(f"{name} in place, copy_", t["in place"], t["copy"], 1.25)
    table.row(f"{name} in place interleaved, copy_", t["in place interleaved"], t["copy"], 1.25)
    table.row(f"{name} functional, clone", t["functional"], t["clone"], 1.25)
    table.row(f"{name} functional interleaved, clone", t["functional interleaved"], t["clone"], 1.25)
    table.row(
        f"{name} functional, HF compiled", t["functional"], t["compiled"], 2.9 if half else 3.0, higher_is_better=True
    )
    table.row(f"{name} functional, HF eager", t["functional"], t["eager"], 6.5 if half else 5.0, higher_is_better=True)
    table.row(f"{name} in place inv_freq, tables", t["in place inv_freq"], t["in place"], 1.5)
    table.row(f"{name} functional inv_freq, tables", t["functional inv_freq"], t["functional"], 1.5)


def decode(table: Table) -> None:
    q, k = torch.randn(1, 1, 9, 64), torch.randn(1, 1, 3, 64)
    cos, sin = torch_rope.cos_sin(torch.arange(128), torch_rope.inv_freq(64))
    positions = torch.tensor([[77]])
    for mode, context, limit in (
        ("inference_mode", torch.inference_mode, 4),
        ("no_grad", torch.no_grad, 5),
        ("grad", torch.enable_grad, 8),
    ):
        q_in, k_in = (t.clone().requires_grad_(mode == "grad") for t in (q, k))
        contenders = {
            "rotate_qk, positions": lambda q=q_in, k=k_in: rope.rotate_qk(q, k, cos, sin, positions=positions),
            "rotate_qk, offset": lambda q=q_in, k=k_in: rope.rotate_qk(q, k, cos, sin, offset=77),
            "torch_rope.rotate_qk": lambda q=q_in, k=k_in: torch_rope.rotate_qk(q, k, cos, sin, positions=positions),
        }
        if mode != "grad":
            contenders["rotate_qk_"] = lambda q=q_in, k=k_in: rope.rotate_qk_(q, k, cos, sin, positions=positions)
        with context():
            for name, us in medians(contenders, calls=2000).items():
                table.limit(f"decode {mode} {name}", us, limit)


def tables(table: Table) -> None:
    freq = torch_rope.inv_freq(128)

    def torch_float32():
        angle = torch.outer(torch.arange(8192).float(), freq)
        return angle.cos(), angle.sin()

    t = medians({"ours": lambda: rope.cos_sin(torch.arange(8192), freq), "torch": torch_float32})
    table.row("cos_sin of 8192 x 64, torch float32", t["ours"], t["torch"], 1.0)


CASES = {
    "tables": tables,
    "decode": decode,
    **{
        f"{str(d)[6:]}-{layout}": lambda table, d=d, layout=layout: prefill(table, d, layout)
        for d in (torch.float32, torch.bfloat16)
        for layout in ("bshd", "bhsd")
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    cases = parser.parse_args().cases or list(CASES)
    torch.set_num_threads(THREADS)
    print(
        f"torch {torch.__version__}, kernels {_C.cpu_instruction_set()}, {THREADS} threads, medians of {ROUNDS} rounds"
    )
    print("q [1, 2048, 32, 128] and k [1, 2048, 8, 128] (bshd), or the same as [batch, heads, seq, head_dim] (bhsd)")
    table = Table()
    for case in cases:
        CASES[case](table)
    print(f"{table.missed} limits missed" if table.missed else "all limits hold")
    return table.missed > 0


if __name__ == "__main__":
    sys.exit(main())
