"""Speed on an NVIDIA GPU, as ratios within one run: python benchmarks/gpu.py [case ...]

A figure is the median over replays of a CUDA graph of many calls, so that no host time is in it; the contenders of a
row take turns. Calls go round several sets of random data, together larger than the L2 cache, so that memory is timed;
only a few tokens stay in the cache, as they do in a decode step. Bytes are counted once: q and k read and written, the
rows of the tables that are used, the positions.

Writes <GPU's name>.json and .md to benchmarks/results after every case; cases that were not run keep their rows.
"""

import argparse
import ctypes
import datetime
import importlib.metadata
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.cpp_extension import CUDA_HOME

import torch_rope

HERE = Path(__file__).parent
HEADS, KV_HEADS = 32, 8
LAUNCHES = 50  # in a graph, at most; and sets of data, at most
MAX_POSITION = 131072
rope = torch.ops.rope


class Gpu:
    device = "cuda"

    def __init__(self, quick: bool):
        self.rounds = 7 if quick else 21
        self.captured = True  # whether the latest figures are of graphs
        properties = torch.cuda.get_device_properties(0)
        self.name, self.l2 = properties.name, properties.L2_cache_size
        self.arch = f"sm_{properties.major}{properties.minor}"
        # Everything on one stream: a backward runs on that of its forward, and is captured there.
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of timing a peer that is not compiled

    def machine(self) -> dict:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            driver = "unknown"
        return {"gpu": self.name, "driver": driver, "cuda": torch.version.cuda, "l2_mb": round(self.l2 / 1e6)}

    def fits(self, size: float) -> bool:
        torch.cuda.empty_cache()
        return size < 0.95 * torch.cuda.mem_get_info()[0]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def microseconds(self, contenders: dict[str, list[Callable]]) -> dict[str, float]:
        """Microseconds a call of each contender: a list of the same call on different data."""
        launches = {name: self._launches(calls) for name, calls in contenders.items()}
        pool = torch.cuda.graph_pool_handle()  # one for all: results are not looked at
        try:
            replays = {name: self._graph(calls, launches[name], pool) for name, calls in contenders.items()}
            self.captured = True
        except RuntimeError:  # one of them does what a graph cannot hold: then all run without
            torch.cuda.synchronize()
            replays = {name: partial(go_round, calls, launches[name]) for name, calls in contenders.items()}
            self.captured = False
        events = {name: [] for name in contenders}
        for _ in range(self.rounds + 1):
            for name, replay in replays.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
                start.record()
                replay()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: statistics.median(start.elapsed_time(end) for start, end in pairs[1:]) * 1e3 / launches[name]
            for name, pairs in events.items()
        }

    def _launches(self, calls: list[Callable]) -> int:
        """Enough for some milliseconds, after a first round that compiles what there is to compile."""
        go_round(calls, len(calls))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        go_round(calls, len(calls))
        end.record()
        torch.cuda.synchronize()
        estimate = start.elapsed_time(end) * 1e3 / len(calls)
        return max(len(calls), min(LAUNCHES, int(5000 / max(estimate, 1))))

    def _graph(self, calls: list[Callable], launches: int, pool) -> Callable:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            go_round(calls, launches)
        return graph.replay


class Dry(Gpu):
    """Runs every case on the CPU with a few tokens, to see that it runs. Its figures mean nothing."""

    device, name, l2, captured = "cpu", "dry", 0, True

    def __init__(self):
        pass

    def machine(self) -> dict:
        return {"gpu": "none"}

    def fits(self, size: float) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def microseconds(self, contenders: dict[str, list[Callable]]) -> dict[str, float]:
        result = {}
        for name, calls in contenders.items():
            start = time.perf_counter()
            go_round(calls, 2)
            result[name] = (time.perf_counter() - start) / 2 * 1e6
        return result


def go_round(calls: list[Callable], launches: int) -> None:
    """The result of a set lives until the set's turn comes again: else all sets would write to the same memory."""
    kept = [None] * len(calls)
    for i in range(launches):
        kept[i % len(calls)] = None
        kept[i % len(calls)] = calls[i % len(calls)]()


class Bench:
    """The machine, and the rows so far."""

    def __init__(self, gpu: Gpu, folder: Path, quick: bool):
        self.gpu, self.quick, self.case = gpu, quick, ""
        self.path = folder / (gpu.name.replace(" ", "_") + ("_quick" if quick else "") + ".json")
        self.rows, self.failed = [], False
        self.machine = gpu.machine() | {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": str(datetime.date.today()),
            **{name: version(name) for name in ("triton", "transformers", *PEER_PACKAGES)},
        }

    def sizes(self, *tokens: int) -> list[int]:
        if isinstance(self.gpu, Dry):
            return [1, 16]
        return [tokens[0], tokens[len(tokens) // 2], tokens[-1]] if self.quick and len(tokens) > 3 else list(tokens)

    def sets(self, make: Callable, size: int) -> list:
        """As many sets of size bytes, results counted, as are thrice the cache; one where it is larger."""
        return [make() for _ in range(min(LAUNCHES, 1 + 3 * self.gpu.l2 // size))]

    def row(self, group: str, what: str, ours: float, other: float | None = None, limit: str = "", work: float = 1):
        """The ratio is ours / other; with a limit ">= ..." or a work it is other / ours times work, which says how many
        times as much ours does as the other. A limit in us bounds ours itself."""
        higher_is_better = limit.startswith(">") or work != 1
        ratio = None if other is None else other / ours * work if higher_is_better else ours / other
        bounded = ours if limit.endswith("us") else ratio
        holds = None
        if limit:
            sign, bound = limit.split()[:2]
            holds = {"<": bounded < float(bound), "<=": bounded <= float(bound), ">=": bounded >= float(bound)}[sign]
        what += "" if self.gpu.captured else " (not in a graph)"
        self._add(group, what, ours, other, ratio, limit, holds)

    def note(self, group: str, what: str) -> None:
        """Something that was not measured, and why."""
        self._add(group, what, None, None, None, "", None)

    def _add(self, group, what, ours, other, ratio, limit, holds):
        names = "case", "group", "what", "ours_us", "other_us", "ratio", "limit", "holds"
        row = dict(zip(names, (self.case, group, what, ours, other, ratio, limit, holds), strict=True))
        self.rows.append(row)
        print(f"{group}: {what:<80}", *cells(row), "MISSED" if holds is False else "", flush=True)

    def run(self, case: str) -> None:
        self.case = case
        print(f"\n{case}", flush=True)
        try:
            with torch.no_grad():
                CASES[case](self)
        except Exception as error:  # the other cases can still run
            traceback.print_exc()
            self.note(case, f"failed: {reason(error)}")
            self.failed = True
        earlier = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
        done = {row["case"] for row in self.rows}
        rows = self.rows + [row for row in earlier if row["case"] in CASES and row["case"] not in done]
        rows.sort(key=lambda row: list(CASES).index(row["case"]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"machine": self.machine, "rows": rows}, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(markdown(self.machine, rows))


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def cells(row: dict) -> list[str]:
    numbers = [row["ours_us"], row["other_us"], row["ratio"]]
    return [*("" if x is None else f"{x:.{max(0, 2 - int(math.log10(max(x, 1))))}f}" for x in numbers), row["limit"]]


def markdown(machine: dict, rows: list[dict]) -> str:
    lines = ["# " + machine["gpu"], "", ", ".join(f"{k} {v}" for k, v in machine.items()), ""]
    lines += ["Ratio: ours / other, or other / ours where the limit is a least one.", ""]
    for case in dict.fromkeys(row["case"] for row in rows):
        lines += [
            f"## {case}",
            "",
            "| | | ours, us | other, us | ratio | limit | holds |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row["case"] == case:
                holds = {None: "", True: "yes", False: "**no**"}[row["holds"]]
                lines.append(f"| {' | '.join([row['group'], row['what'], *cells(row), holds])} |")
        lines.append("")
    return "\n".join(lines)


def report(path: Path) -> str:
    """The rows of a group as one: the range of their ratios."""
    data = json.loads(path.read_text())
    lines = [f"Measured on one {data['machine']['gpu']} with torch {data['machine']['torch']}.", ""]
    lines += ["| | ratio | median | limit | holds |", "|---|---|---|---|---|"]
    groups = {}
    for row in data["rows"]:
        if row["ours_us"] is not None:
            groups.setdefault((row["group"], row["limit"]), []).append(row)
    for (group, limit), rows in groups.items():
        values = sorted(row["ours_us"] if row["ratio"] is None else row["ratio"] for row in rows)
        unit = " us" if rows[0]["ratio"] is None else ""
        ends = " to ".join(dict.fromkeys(f"{x:.2f}" for x in (values[0], values[-1])))
        held = f"{sum(row['holds'] for row in rows)} of {len(rows)}" if limit else ""
        lines.append(f"| {group} | {ends}{unit} | {statistics.median(values):.2f}{unit} | {limit} | {held} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Shape:
    """q and k of one call, which lie one after the other, or head by head (packed), in one piece of memory: flat."""

    tokens: int
    head_dim: int = 128
    rotary_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    interleaved: bool = False
    longest: int = 65536  # tokens of a sequence

    @property
    def seq(self) -> int:
        return min(self.tokens, self.longest)

    @property
    def batch(self) -> int:
        return self.tokens // self.seq

    @property
    def bytes(self) -> int:
        return self.tokens * (HEADS + KV_HEADS) * self.head_dim * self.dtype.itemsize

    def flat(self, device: str) -> torch.Tensor:
        return torch.randn(self.bytes // self.dtype.itemsize, dtype=self.dtype, device=device)

    def packed(self, flat: torch.Tensor) -> tuple:
        return flat.view(self.batch, self.seq, HEADS + KV_HEADS, self.head_dim).split((HEADS, KV_HEADS), 2)

    def separate(self, flat: torch.Tensor) -> tuple:
        """[batch, seq, heads, head_dim]"""
        q, k = flat.split([flat.numel() // (HEADS + KV_HEADS) * heads for heads in (HEADS, KV_HEADS)])
        return tuple(x.view(self.batch, self.seq, -1, self.head_dim) for x in (q, k))

    def heads_first(self, flat: torch.Tensor) -> tuple:
        """[batch, heads, seq, head_dim], transposed"""
        return tuple(x.view(self.batch, -1, self.seq, self.head_dim).transpose(1, 2) for x in self.separate(flat))

    def tables(self, device: str, rows: int | None = None) -> tuple:
        freq = torch_rope.inv_freq(self.rotary_dim, device=device)
        return torch_rope.cos_sin(torch.arange(rows or self.seq, device=device), freq)

    def __str__(self) -> str:
        name = f"{count(self.tokens)} tokens, {str(self.dtype)[6:]}, head_dim {self.head_dim}"
        name += f", rotary_dim {self.rotary_dim}" if self.rotary_dim < self.head_dim else ""
        return name + (", interleaved" if self.interleaved else "")


def count(tokens: int) -> str:
    return f"{tokens // 1024}k" if 1024 <= tokens < 2**20 else f"{tokens >> 20}M" if tokens >= 2**20 else str(tokens)


def rotated(op: str, q, k, **angles) -> tuple:
    """(q, k) after rope.<op>"""
    result = getattr(rope, op)(q, k, **angles)
    return (q, k) if op.endswith("_") else result


def rotated_in(views: Callable, op: str, angles: dict, flat: torch.Tensor) -> tuple:
    return rotated(op, *views(flat), **angles)


def backward(forward: Callable, gradients: tuple, *inputs: torch.Tensor) -> Callable:
    """A call of the backward alone of forward(*inputs)."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        outputs = forward(*inputs)
    return partial(torch.autograd.grad, outputs, inputs, gradients, retain_graph=True)


TOLERANCE = {torch.bfloat16: 0.125, torch.float16: 0.02, torch.float32: 1e-4}  # tables in bfloat16 are off by as much


def wrong(shape: Shape, flat: torch.Tensor, views: Callable, call: Callable, cos, sin) -> str:
    """What is wrong with (q, k) = call(flat) at some of its tokens, if anything. views: q and k in flat."""
    n = min(shape.tokens, 256)
    at = torch.linspace(0, shape.tokens - 1, n, device=flat.device, dtype=torch.float64).long()
    at = at // shape.seq, at % shape.seq
    before = [x[at][None].cpu() for x in views(flat)]
    after = [x[at][None].cpu() for x in call(flat)]
    angles = [table[at[1] % len(table)][None].cpu() for table in (cos, sin)]
    expected = rope.rotate_qk(*before, *angles, interleaved=shape.interleaved)
    error = max((a.float() - b.float()).abs().max().item() for a, b in zip(after, expected, strict=True))
    return "" if error <= TOLERANCE[shape.dtype] else f"wrong by {error:.3g}"  # so is NaN


def bandwidth(bench: Bench) -> None:
    """Share of a copy's bandwidth. The backward is torch.autograd.grad of results that are already there."""
    for tokens in bench.sizes(2**14, 2**16, 2**18, 2**20):
        for dtype in (torch.bfloat16, torch.float16):
            for layout, longest in (("[seq, heads, D]", tokens), ("[batch, heads, seq, D]", 4096)):
                shape = Shape(tokens, dtype=dtype, longest=longest)
                if bench.gpu.fits(5.5 * shape.bytes):
                    bandwidth_of(bench, shape, layout)
                else:
                    bench.note("rotate_qk / copy_", f"{shape}: not enough memory")


def bandwidth_of(bench: Bench, shape: Shape, layout: str) -> None:
    device = bench.gpu.device
    views = shape.separate if layout == "[seq, heads, D]" else shape.heads_first
    flats = bench.sets(partial(shape.flat, device), 2 * shape.bytes)
    intos = [torch.empty_like(flat) for flat in flats]
    rows = min(shape.seq, MAX_POSITION)
    cos, sin = shape.tables(device, rows)
    positions = (torch.arange(shape.seq, device=device) % rows).expand(shape.batch, -1).contiguous()
    # arguments, and the bytes of them that are read
    sources = {
        "tables": ({"cos": cos, "sin": sin, "positions": positions}, 2 * cos.nbytes + positions.nbytes),
        "inv_freq": ({"inv_freq": torch_rope.inv_freq(128, device=device)}, 256),
    }
    for (source, (angles, more)), interleaved in itertools.product(sources.items(), (False, True)):
        name = f"{count(shape.tokens)} {str(shape.dtype)[6:]} {layout}, {source}{', interleaved' * interleaved}"
        angles = angles | {"interleaved": interleaved}
        calls = {"copy_": [partial(into.copy_, flat) for into, flat in zip(intos, flats, strict=True)]}
        for op in ("rotate_qk", "rotate_qk_"):
            call = partial(rotated_in, views, op, angles)
            calls[op] = [partial(call, flat) for flat in flats]
            # inv_freq knows no end of the table
            if (source == "tables" or shape.seq <= rows) and (
                error := wrong(replace(shape, interleaved=interleaved), flats[0], views, call, cos, sin)
            ):
                bench.note(f"{op} / copy_", f"{name}: {error}")
        forward = partial(rotated, "rotate_qk", **angles)
        calls["backward"] = [backward(forward, views(flat), *views(flat)) for flat in flats]
        t = bench.gpu.microseconds(calls)
        for op in ("rotate_qk", "rotate_qk_", "backward"):
            bench.row(f"{op} / copy_", name, t[op], t["copy_"], ">= 0.95", 1 + more / (2 * shape.bytes))
        bench.machine["copy_gb_s"] = round(2e-3 * shape.bytes / t["copy_"])


@dataclass
class Peer:
    """Another implementation, called as it is fastest; ours is called on the same memory."""

    forms: dict[str, tuple[str, Callable]]  # name -> the operator of ours that does the same, flat -> (q, k)
    views: Callable  # flat -> (q, k) as ours takes them
    positions: torch.Tensor | None = None  # where theirs takes any: ours takes them too


def hugging_face(shape: Shape, device: str) -> Peer:
    """The function of the models, compiled for this shape. q and k lie as the projections leave them, [batch, seq,
    heads, head_dim], and are seen as [batch, heads, seq, head_dim]; partial rotary as in Phi."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    if shape.interleaved:
        raise NotImplementedError
    cos, sin = (torch.cat([t, t], -1).to(shape.dtype)[None] for t in shape.tables(device))

    def call(q, k):
        if shape.rotary_dim == shape.head_dim:
            return apply_rotary_pos_emb(q, k, cos, sin)
        (q, q_rest), (k, k_rest) = (x.split((shape.rotary_dim, shape.head_dim - shape.rotary_dim), -1) for x in (q, k))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return torch.cat([q, q_rest], -1), torch.cat([k, k_rest], -1)

    torch._dynamo.reset()  # else it gives up compiling after some shapes
    modes = ["default"]
    if device == "cuda" and shape.head_dim == shape.rotary_dim == 128:
        modes.append("max-autotune-no-cudagraphs")  # minutes for all shapes

    def form(mode):
        compiled = torch.compile(call, dynamic=False, mode=mode)
        return lambda flat: [x.transpose(1, 2) for x in compiled(*(x.transpose(1, 2) for x in shape.separate(flat)))]

    return Peer({mode: ("rotate_qk", form(mode)) for mode in modes}, shape.separate)


def liger(shape: Shape, device: str) -> Peer:
    """Always in place, with tables of q's dtype, as a model passes them."""
    from liger_kernel.ops.rope import LigerRopeFunction

    if shape.interleaved:
        raise NotImplementedError
    cos, sin = (torch.cat([t, t], -1).to(shape.dtype)[None] for t in shape.tables(device))

    def call(flat):
        q, k = (x.transpose(1, 2) for x in shape.separate(flat))
        return [x.transpose(1, 2) for x in LigerRopeFunction.apply(q, k, cos, sin)]

    return Peer({"in place": ("rotate_qk_", call)}, shape.separate)


def flash_attn(shape: Shape, device: str) -> Peer:
    """q and k packed, so that one launch does both, as its own layer for packed qkv has it; tables of q's dtype."""
    from flash_attn.ops.triton.rotary import apply_rotary

    cos, sin = (t.to(shape.dtype) for t in shape.tables(device))
    flags = {"interleaved": shape.interleaved}
    packed = shape.batch, shape.seq, HEADS + KV_HEADS, shape.head_dim
    if math.prod(packed) >= 2**31:  # its offsets are of 32 bits, but for the starts of sequences
        flags["cu_seqlens"] = torch.arange(0, shape.tokens + 1, shape.seq, device=device)
        flags["max_seqlen"] = shape.seq

    def call(flat, inplace):
        x = flat.view(packed)
        x = apply_rotary(x.flatten(0, 1) if "cu_seqlens" in flags else x, cos, sin, inplace=inplace, **flags)
        return x.view(packed).split((HEADS, KV_HEADS), 2)

    forms = {
        "out of place": ("rotate_qk", partial(call, inplace=False)),
        "in place": ("rotate_qk_", partial(call, inplace=True)),
    }
    return Peer(forms, shape.packed)


def flashinfer(shape: Shape, device: str) -> Peer:
    from flashinfer.rope import apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace

    if shape.rotary_dim % 32 and not shape.interleaved:  # it would read past the end of memory
        raise NotImplementedError("its vectors of 16 channels straddle the two halves")
    table = torch.cat(shape.tables(device), -1)
    positions = (torch.arange(shape.tokens, device=device) % shape.seq).int()
    arguments = shape.head_dim, table, not shape.interleaved

    def tokens(flat):
        return (x.view(shape.tokens, -1) for x in shape.separate(flat))

    def out_of_place(flat):
        pair = apply_rope_with_cos_sin_cache(positions, *tokens(flat), *arguments)
        return [x.view(shape.batch, shape.seq, -1, shape.head_dim) for x in pair]

    def in_place(flat):
        apply_rope_with_cos_sin_cache_inplace(positions, *tokens(flat), *arguments)
        return shape.separate(flat)

    forms = {"out of place": ("rotate_qk", out_of_place), "in place": ("rotate_qk_", in_place)}
    return Peer(forms, shape.separate, positions.view(shape.batch, shape.seq))


PEERS = {"hugging-face": hugging_face, "liger": liger, "flash-attn": flash_attn, "flashinfer": flashinfer}
PEER_PACKAGES = "liger-kernel", "flash-attn", "flashinfer-python"


def against(peer_name: str, bench: Bench) -> None:
    """Faster than a peer, at every size it can do."""
    tokens = bench.sizes(1, 16, 256, 2**12, 2**16, 2**20)
    shapes = [Shape(n, d, d) for d in (128, 64, 80, 96, 256) for n in tokens]
    shapes += [Shape(n, rotary_dim=r) for r in (64, 32) for n in tokens]
    shapes += [Shape(n, interleaved=True) for n in tokens]
    for shape in shapes:
        name, group = str(shape), f"ours / {peer_name}"
        if not bench.gpu.fits(4 * shape.bytes):
            bench.note(group, f"{name}: not enough memory")
            continue
        try:
            against_of(bench, group, shape, PEERS[peer_name](shape, bench.gpu.device))
        except ImportError as error:
            bench.note(group, f"not installed ({error})")
            return
        except NotImplementedError as error:
            if str(error):
                bench.note(group, f"{name}: {error}")
        except Exception as error:  # a shape they cannot do is no reason to stop
            bench.note(group, f"{name}: {reason(error)}")


def against_of(bench: Bench, group: str, shape: Shape, peer: Peer) -> None:
    device = bench.gpu.device
    flats = bench.sets(partial(shape.flat, device), 2 * shape.bytes)
    cos, sin = shape.tables(device)
    angles = {"cos": cos, "sin": sin, "positions": peer.positions, "interleaved": shape.interleaved}
    for op in dict.fromkeys(op for op, _ in peer.forms.values()):
        calls = {"ours": partial(rotated_in, peer.views, op, angles)}
        calls |= {name: call for name, (same, call) in peer.forms.items() if same == op}
        right = {}
        for name, call in calls.items():
            if error := wrong(shape, flats[0], peer.views, call, cos, sin):
                bench.note(group, f"{shape}, {name}: {error}")
            else:
                right[name] = [partial(call, flat) for flat in flats]
        if "ours" in right and len(right) > 1:
            t = bench.gpu.microseconds(right)
            ours = t.pop("ours")
            best = min(t, key=t.get)
            bench.row(group, f"{op}, {shape} / {best}", ours, t[best], "< 1")


def limit_kernel(gpu: Gpu) -> Callable:
    """limit.cu as a function of (positions, cos, sin, out, threads)."""
    library = Path(tempfile.mkdtemp()) / "limit.so"
    nvcc = Path(CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc"
    flags = ["-O3", "-shared", "-Xcompiler=-fPIC", f"-arch={gpu.arch}"]
    subprocess.run([nvcc, *flags, HERE / "limit.cu", "-o", library], check=True)
    function = ctypes.CDLL(str(library)).rope_limit
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 4 + [ctypes.c_void_p]

    def call(positions, cos, sin, out, threads):
        tokens = len(positions)
        sizes = cos.stride(0) * 4 // 16, out.nbytes // tokens // 16, tokens, threads
        pointers = (t.data_ptr() for t in (positions, cos, sin, out))
        if error := function(*pointers, *sizes, torch.cuda.current_stream().cuda_stream):
            raise RuntimeError(f"limit kernel: CUDA error {error}")

    return call


def decode(bench: Bench) -> None:
    """A few tokens, each the next one of its own sequence: against the least time there is, and against what writes the
    cache without a fused kernel."""
    device = bench.gpu.device
    try:
        least = limit_kernel(bench.gpu) if device == "cuda" else None
    except (OSError, subprocess.CalledProcessError) as error:
        bench.note("decode", f"limit.cu was not built: {error}")
        least = None
    cos, sin = Shape(8192).tables(device)
    caches = [torch.zeros(1024, 16, KV_HEADS, 128, device=device, dtype=torch.bfloat16) for _ in "kv"]
    weights = [1 + torch.randn(128, device=device).bfloat16() / 8 for _ in "qk"]
    sequences = unfused(bench, cos, sin, caches, weights)

    def rotate(token: Token):
        rope.rotate_qk_(token.q, token.k, cos, sin, None, token.positions)

    def fused(norm: bool, token: Token):
        more = weights if norm else ()
        angles = cos, sin, None, token.positions
        rope.rotate_into_cache_(token.q, token.k, token.v, *caches, *angles, 0, token.slots, *more)
        return token.q

    for tokens in bench.sizes(*(2**i for i in range(9))):
        name = f"{tokens} token{'s' * (tokens > 1)}"
        sets = bench.sets(partial(Token.random, tokens, device), tokens * (HEADS + 2 * KV_HEADS) * 128 * 4)
        calls = {"rotate": rotate, "fused": partial(fused, False), "fused with norm": partial(fused, True)}

        leasts = {HEADS + KV_HEADS: [], HEADS + 2 * KV_HEADS: []}  # heads that are written -> contenders
        for (heads, names), threads in itertools.product(leasts.items(), (64, 128, 256) if least else ()):
            out = torch.empty(tokens, heads, 128, device=device, dtype=torch.bfloat16)
            names.append(f"least of {heads} heads in blocks of {threads}")
            calls[names[-1]] = lambda token, a=(cos, sin, out, threads): least(token.positions, *a)

        torch._dynamo.reset()  # compiled for this number of tokens
        peers = {"fused": [], "fused with norm": []}  # ours -> contenders that do the same
        for (ours, names), (peer, call) in itertools.product(peers.items(), sequences.items()):
            call = partial(call, ours == "fused with norm")
            try:
                off = difference(caches, sets[0], call, calls[ours])
            except Exception as error:
                off = reason(error)
            if off:
                bench.note("best of the peers / rotate_into_cache_", f"{name}, {peer}: {off}")
            else:
                names.append(f"{peer}{' with norm' * (ours != 'fused')}")
                calls[names[-1]] = call

        t = bench.gpu.microseconds({key: [partial(call, token) for token in sets] for key, call in calls.items()})
        if least:
            two, three = (min(t[key] for key in names) for names in leasts.values())
            bench.row("rotate_qk_ / least", name, t["rotate"], two, "<= 1.15")
            bench.row("rotate_into_cache_ / least", name, t["fused"], three)
            bench.row("rotate_into_cache_ with norm / least", name, t["fused with norm"], three, "<= 1.3")
        for ours, names in peers.items():
            if names:
                best = min(names, key=t.get)
                group = f"best of the peers / rotate_into_cache_{ours[5:]}"
                bench.row(group, f"{name} / {best}", t[ours], t[best], ">= 1.5")


@dataclass
class Token:
    """Of a batch of sequences one token each: [tokens, heads, 128]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    pages: tuple  # the slots as FlashInfer takes them: a page for each sequence, prepared as a server's scheduler does

    @staticmethod
    def random(tokens: int, device: str) -> "Token":
        q, k, v = (torch.randn(tokens, h, 128, device=device).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS))
        positions = torch.randint(8192, (tokens,), device=device)
        slots = torch.randperm(1024 * 16, device=device)[:tokens]
        each = torch.arange(tokens + 1, device=device).int()
        place = (slots % 16).int()
        return Token(q, k, v, positions, slots, (each[:-1], place, (slots // 16).int(), each, place + 1))


def difference(caches: list, token: Token, theirs: Callable, ours: Callable) -> str:
    """How theirs differs from ours, if more than by rounding."""
    results = []
    for call in (theirs, ours):
        for cache in caches:
            cache.zero_()
        q = call(replace(token, q=token.q.clone(), k=token.k.clone()))
        results.append([q, *(cache.clone() for cache in caches)])
    error = max((a.float() - b.float()).abs().max().item() for a, b in zip(*results, strict=True))
    return "" if error <= TOLERANCE[torch.bfloat16] else f"wrong by {error:.3g}"


def unfused(bench: Bench, cos, sin, caches: list, weights: list) -> dict:
    """What torch_rope would replace: name -> function of (with norm or not, Token) that returns q."""
    flat = [cache.view(-1, KV_HEADS, 128) for cache in caches]
    table = torch.cat([cos, sin], -1)
    result = {}

    def write(k, v, slots):
        for cache, x in zip(flat, (k, v), strict=True):
            cache.index_copy_(0, slots, x)

    def normed(norm, q, k, rms_norm):
        return [rms_norm(x, w) for x, w in zip((q, k), weights, strict=True)] if norm else (q, k)

    def torch_norm(x, weight):
        return F.rms_norm(x, (128,), weight, 1e-6)

    try:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        wide = [torch.cat([t, t], -1).bfloat16() for t in (cos, sin)]

        @partial(torch.compile, dynamic=False)
        def whole(norm, q, k, v, positions, slots):
            q, k = normed(norm, q, k, torch_norm)
            q, k = apply_rotary_pos_emb(q[None], k[None], *(t[positions][None] for t in wide), unsqueeze_dim=2)
            write(k[0], v, slots)
            return q[0]

        result["torch.compile of all"] = lambda norm, t: whole(norm, t.q, t.k, t.v, t.positions, t.slots)
    except ImportError as error:
        bench.note("decode", f"transformers: not installed ({error})")
    try:
        from flash_attn.ops.triton.rotary import apply_rotary

        def flash(norm, token):
            q, k = normed(norm, token.q, token.k, torch_norm)
            for x in (q, k):  # one token each: the positions are offsets of sequences
                apply_rotary(x[:, None], cos, sin, token.positions, inplace=True)
            write(k, token.v, token.slots)
            return q

        result["flash-attn + index_copy_"] = flash
    except ImportError as error:
        bench.note("decode", f"flash-attn: not installed ({error})")
    try:
        from flashinfer.norm import rmsnorm
        from flashinfer.page import append_paged_kv_cache
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

        def turned(norm, token, rms_norm):
            q, k = normed(norm, token.q, token.k, rms_norm)
            apply_rope_with_cos_sin_cache_inplace(token.positions, q.flatten(1), k.flatten(1), 128, table)
            return q, k

        def copied(norm, token):
            q, k = turned(norm, token, torch_norm)
            write(k, token.v, token.slots)
            return q

        def appended(norm, token):
            q, k = turned(norm, token, lambda x, w: rmsnorm(x.flatten(0, 1), w).view(x.shape))
            batch, place, page, starts, last = token.pages
            append_paged_kv_cache(k, token.v, batch, place, tuple(caches), page, starts, last)
            return q

        result |= {"flashinfer + index_copy_": copied, "flashinfer": appended}
    except ImportError as error:
        bench.note("decode", f"flashinfer: not installed ({error})")
    return result


def tables(bench: Bench) -> None:
    device = bench.gpu.device
    freq = torch_rope.inv_freq(128, device=device)

    def ours():
        return rope.cos_sin(torch.arange(8192, device=device), freq)

    def torch_float32():
        angle = torch.outer(torch.arange(8192, device=device).float(), freq)
        return angle.cos(), angle.sin()

    t = bench.gpu.microseconds({"ours": [ours], "torch": [torch_float32]})
    bench.row("cos_sin of 8192 x 64 / torch float32", "with arange", t["ours"], t["torch"], "< 1")
    for dtype in (torch.bfloat16, torch.float32):
        gradients_of_tables(bench, Shape(bench.sizes(2**14)[-1], dtype=dtype, longest=2048))


def gradients_of_tables(bench: Bench, shape: Shape) -> None:
    """They read the gradients of q and k, and q and k: as much as a copy of one reads and writes."""
    flats = bench.sets(partial(shape.flat, bench.gpu.device), 2 * shape.bytes)
    into, (cos, sin) = torch.empty_like(flats[0]), shape.tables(bench.gpu.device)
    tensors = [(*shape.separate(torch.randn_like(flat)), *shape.separate(flat)) for flat in flats]
    positions = torch.arange(shape.seq, device=bench.gpu.device).repeat(shape.batch, 1)
    for what, angles in (("", {}), (", positions [batch, seq], which are sorted", {"positions": positions})):
        calls = {
            "copy_": [partial(into.copy_, flat) for flat in flats],
            "ours": [partial(rope._rotate_table_backward, *t, cos, sin, **angles) for t in tensors],
        }
        t = bench.gpu.microseconds(calls)
        work = 1 + cos.nbytes / shape.bytes
        bench.row(
            "gradients of tables / copy_", f"{shape}, batch {shape.batch}{what}", t["ours"], t["copy_"], work=work
        )


def mini_vllm(bench: Bench) -> None:
    """rotate_qk_ of 128 tokens in float32, with tables and int32 positions."""
    shape = Shape(128, dtype=torch.float32)
    device = bench.gpu.device
    cos, sin = shape.tables(device, 8192)
    positions = torch.randint(8192, (1, 128), dtype=torch.int32, device=device)
    calls = []
    for flat in bench.sets(partial(shape.flat, device), 2 * shape.bytes):
        q, k = shape.separate(flat)
        calls.append(partial(rope.rotate_qk_, q, k, cos, sin, None, positions))
    us = bench.gpu.microseconds({"ours": calls})["ours"]
    bench.row("128 tokens in float32, in a graph", f"{128 / us:.0f} million tokens a second", us)
    eager = one_by_one(bench, calls[0], wait=True)
    bench.row("128 tokens in float32, without a graph", f"{128 / eager:.1f} million tokens a second", eager)


def one_by_one(bench: Bench, call: Callable, wait: bool) -> float:
    """Microseconds a call without a graph; of the host alone, or until the device is done too. Batches are small enough
    that the device's queue does not fill."""
    samples = []
    for _ in range(10 * bench.gpu.rounds if bench.gpu.device == "cuda" else 2):
        bench.gpu.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            call()
        if wait:
            bench.gpu.synchronize()
        samples.append((time.perf_counter() - start) / 100 * 1e6)
    return statistics.median(samples)


def host(bench: Bench) -> None:
    """Time of the call itself, under no_grad."""
    device = bench.gpu.device
    cos, sin = Shape(8192).tables(device)
    token = Token.random(1, device)
    caches = [torch.zeros(1024, 16, KV_HEADS, 128, device=device, dtype=torch.bfloat16) for _ in "kv"]
    weights = [torch.ones(128, device=device, dtype=torch.bfloat16) for _ in "qk"]
    qk, angles = (token.q, token.k), (cos, sin, None, token.positions)
    into = *qk, token.v, *caches, *angles, 0, token.slots
    calls = {
        "rotate_qk": partial(rope.rotate_qk, *qk, *angles),
        "rotate_qk_": partial(rope.rotate_qk_, *qk, *angles),
        "torch_rope.rotate_qk_": partial(torch_rope.rotate_qk_, *qk, *angles),
        "norm_rotate_qk": partial(rope.norm_rotate_qk, *qk, *weights, *angles),
        "rotate_into_cache_": partial(rope.rotate_into_cache_, *into),
        "rotate_into_cache_ with norm": partial(rope.rotate_into_cache_, *into, *weights),
    }
    bench.gpu.captured = True  # no figure here is of a graph
    for name, call in calls.items():
        bench.row("time of the host for a call", name, one_by_one(bench, call, wait=False), None, "<= 6 us")


def norm(bench: Bench) -> None:
    """norm_rotate_qk and its backward, which reads the gradients and q and k, and writes gradients."""
    device = bench.gpu.device
    for tokens in bench.sizes(2**14, 2**16, 2**18):
        shape = Shape(tokens)
        if not bench.gpu.fits(7 * shape.bytes):
            bench.note("norm_rotate_qk / copy_", f"{shape}: not enough memory")
            continue
        flats = bench.sets(partial(shape.flat, device), 2 * shape.bytes)
        into = torch.empty_like(flats[0])
        cos, sin = shape.tables(device)
        weights = [1 + torch.randn(128, device=device).bfloat16() / 8 for _ in "qk"]

        def forward(*inputs, cos=cos, sin=sin):
            return rope.norm_rotate_qk(*inputs, cos, sin)

        calls = {
            "copy_": [partial(into.copy_, flat) for flat in flats],
            "norm_rotate_qk": [partial(forward, *shape.separate(flat), *weights) for flat in flats],
            "backward": [
                backward(forward, shape.separate(torch.randn_like(flat)), *shape.separate(flat), *weights)
                for flat in flats
            ],
        }
        t = bench.gpu.microseconds(calls)
        for name, passes in (("norm_rotate_qk", 2), ("backward", 3)):
            work = passes / 2 + 2 * cos.nbytes / (2 * shape.bytes)
            group = f"{'its ' * (name == 'backward')}{name} / copy_"
            bench.row(group, f"{count(tokens)} bfloat16", t[name], t["copy_"], work=work)


CASES = {
    "bandwidth": bandwidth,
    "decode": decode,
    "tables": tables,
    "mini-vllm": mini_vllm,
    "host": host,
    "norm": norm,
    **{peer: partial(against, peer) for peer in PEERS},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a limit is missed")
    parser.add_argument("--dry", action="store_true", help="see that all runs, on a CPU; nothing is measured")
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--report", type=Path, metavar="JSON", help="print a short table of earlier results")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(unknown)}")
    if args.report:
        print(report(args.report))
        return 0
    if not args.dry and not torch.cuda.is_available():
        sys.exit("There is no NVIDIA GPU here that torch can use. With --dry all cases run on the CPU, unmeasured.")
    folder = args.out or (Path(tempfile.mkdtemp()) if args.dry else HERE / "results")
    bench = Bench(Dry() if args.dry else Gpu(args.quick), folder, args.quick)
    print(", ".join(f"{k} {v}" for k, v in bench.machine.items()))
    for case in args.cases or CASES:
        bench.run(case)
    print("\n" + markdown(bench.machine, bench.rows))
    missed = sum(row["holds"] is False for row in bench.rows)
    print(f"{missed} limits MISSED" if missed else "all limits hold")
    return int(bench.failed or (args.strict and missed > 0))


if __name__ == "__main__":
    sys.exit(main())
