"""Makes the tables of README.md and of pages in docs/ from the files of results, so that no figure is typed by hand.

The text between <!-- table: NAME --> and <!-- end --> is what the function BLOCKS[NAME] returns. Each file of results
also has a page of its own in the same folder, with all rows and columns.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .cases import count
from .implementations import ADAPTERS, OURS
from .results import FOLDER, read

ROOT = FOLDER.parent.parent
PAGES = [ROOT / name for name in ("README.md", "docs/index.md", "docs/benchmarks.md", "docs/accuracy.md")]
REFERENCE = FOLDER / "AMD_EPYC_family_25_2_cores.jsonl"  # the newest results of all cases, for pages and pictures
H100, H200 = (FOLDER / f"NVIDIA_{name}.jsonl" for name in ("H100_80GB", "H200"))
MODULE, IN_PLACE, FUSED = "torch_rope module", "torch_rope in place", "torch_rope fused"
APART, PEER, COMPILED = "torch_rope, then index_copy_", "transformers", "transformers compiled"
LEAST = [f"least, blocks of {n}" for n in (64, 128, 256)]
# What has a time in the tables. All others have the ratio of their time to that of torch_rope.
TIMED = ["copy", *LEAST, OURS, f"{OURS} inv_freq", IN_PLACE, MODULE]
ORDER = [*dict.fromkeys([*TIMED, FUSED, *(name for _, name in ADAPTERS)])]  # of columns
LEGEND = """A label says `batch x seq, heads/kv_heads of head_dim`, and what differs from half-split pairs and memory in
the order `[batch, seq, heads, head_dim]`. The copy, torch_rope and its other forms have times. All others have a ratio:
their time divided by that of `torch_rope`. A ratio in bold means that the other is faster; noise means that the
quartiles overlap. Memory is what a call allocates, in sizes of q and k together. A cell is empty where an
implementation cannot do the case, or was not measured. On a CPU two rivals are weak: MLX is made for GPUs, and
onnxruntime runs a whole session for this one operator."""

# The commits whose kernels have changed since, and the groups of cases that this touches: all, or some. Rows of these are
# marked until they are measured again.
EARLIER = {"7bc218f9": None, "7b4affbc": None, "806f44d2": None, "2a2987c3": ("quantised",), "7cfd72a0": ("quantised",)}

# The rows of each group that docs/benchmarks.md shows, by the beginnings of their labels, and its columns.
SHORT = "copy", OURS, IN_PLACE, FUSED, APART, "rms_norm, then torch_rope", PEER, COMPILED, "diffusers", "comfy-kitchen"
ROWS = {
    "sweep": ("1 x 1,", "1 x 4k,", "1 x 1M,"),
    "decode": ("1 x 1, 32/8 of 128, bf16, int64", "64 x 1,"),
    "cache": ("1 x 1, 32/8 of 128, bf16", "64 x 1, 32/8 of 128, bf16, cache"),
    "quantised": ("1 x 1, 32/8 of 128, bf16, quantised",),
    "shapes": tuple(f"1 x 2k, 32/8 of {x}" for x in ("80, bf16", "128, bf16 ", "128, float32 ")),
    "training": ("1 x 2k, 32/8 of 128, bf16, training", "1 x 2k, 32/8 of 128, float32, training"),
    "norm": ("1 x 2k, 32/8 of 128, bf16",),
    "norm-over-heads": ("1 x 4k, 12/12 of 128, bf16, interleaved, norm over heads ",),
    "models": ("SmolLM2-135M, decoding after 128, bf16", "Qwen3-0.6B, decoding after 128, bf16", "Qwen3-0.6B, prompt"),
    "diffusion": ("Flux, 1 x 4k,", "rms_rope, 1 x 4k,"),
}


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def grid(corner: str, cells: dict[tuple[str, str], str], rows: Iterable[str] = (), columns: Iterable[str] = ()) -> str:
    """Returns a table from cells (row, column) -> text. Rows and columns come in this order, or as in cells."""
    rows, columns = (order or dict.fromkeys(key[i] for key in cells) for i, order in enumerate((rows, columns)))
    lines = [[row, *(cells.get((row, c), "") for c in columns)] for row in rows]
    return markdown([corner, *columns], lines) if cells else ""


def time(x: dict | None) -> str:
    if x is None:
        return ""
    us = x["median_us"]
    return f"{us:.3g} µs" if us < 999.5 else f"{us / 1e3:.3g} ms" if us < 999.5e3 else f"{us / 1e6:.3g} s"


def ratio(x: float) -> str:
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 1.95 else f"{x:.2f}"


def number(x: float) -> str:
    return f"{x:.2f}" if 0.1 <= x < 100 else f"{x:.0f}" if 100 <= x < 1e4 else f"{x:.1e}"


def label(x: dict) -> str:
    return x["case"].partition(": ")[2].replace(", bfloat16", ", bf16") + " †" * is_earlier(x)


def is_earlier(x: dict) -> bool:
    groups = EARLIER.get(x["commit"], ())
    return groups is None or x["group"] in groups


def one(lines: list[dict], case: str, implementation: str) -> dict | None:
    found = (x for x in lines if x.get("case") == case and x["implementation"] == implementation)
    return next((x for x in found if x["status"] == "timed"), None)


# ---- A table of a group of cases, with a row for each case and a column for each implementation ----


def in_time(x: dict, ours: dict | None) -> tuple[str, str]:
    """Returns the column and the text of a cell of times and ratios."""
    name, status = x["implementation"], x["status"]
    if name in TIMED or status != "timed":
        return name if name in TIMED else f"{name}, ratio", time(x) if status == "timed" else status
    if ours is None:  # the results of torch_rope do not fit the memory of the machine
        return f"{name}, ratio", time(x)
    text = ratio(x["median_us"] / ours["median_us"])
    (low, high), (our_low, our_high) = quartiles_of(x), quartiles_of(ours)
    overlap = low <= our_high and our_low <= high
    return f"{name}, ratio", f"{text} (noise)" if overlap else f"**{text}**" if high < our_low else text


def quartiles_of(x: dict) -> tuple[float, float]:
    """Returns the lower and the upper quartile, or the median in place of both if nothing else is known."""
    return x.get("q1_us", x["median_us"]), x.get("q3_us", x["median_us"])


def in_memory(x: dict, ours: dict | None) -> tuple[str, str]:
    if x["op"] == "model":
        return x["implementation"], f"{x['peak_bytes'] / 2**20:,.0f} MiB" if "peak_bytes" in x else ""
    size = {"float64": 8, "float32": 4}.get(x["dtype"], 2)
    q_and_k = x["batch"] * x["seq"] * (x["heads"] + x["kv_heads"]) * x["head_dim"] * size
    return x["implementation"], ratio(x["peak_bytes"] / q_and_k) if "peak_bytes" in x else ""


def in_operators(x: dict, ours: dict | None) -> tuple[str, str]:
    return x["implementation"], str(x.get("launches", ""))


def table(lines: list[dict], group: str, cell: Callable = in_time, rows=("",), columns=ORDER, commits=False) -> str:
    """Returns the rows whose labels begin with one of rows, and those columns that have text. commits: and one for these."""
    found = [x for x in lines if x.get("group") == group and (label(x) + " ").startswith(rows)]
    found = [x for x in found if x["implementation"] in columns]
    cells = {}
    for x in sorted(found, key=lambda x: columns.index(x["implementation"])):
        column, text = cell(x, one(lines, x["case"], OURS))
        cells |= {(label(x), column): text} if text else {}
    cells |= {(label(x), "commit"): x["commit"] for x in found if commits}
    earlier = {x["commit"] for x in found if is_earlier(x)}
    note = f"\n\n† Measured before the kernels changed, at {', '.join(sorted(earlier))}." if earlier and cells else ""
    return grid("", cells, dict.fromkeys(map(label, found)), dict.fromkeys(column for _, column in cells)) + note


# ---- Accuracy ----


def errors(lines: list[dict], **fields) -> list[dict]:
    found = [x for x in lines if fields.items() <= x.items()]
    return [x for x in found if x.get("status", "wrong") == "wrong"]


def ulps(lines: list[dict], dtypes: tuple[str, ...], octaves: tuple[int, ...]) -> str:
    """Returns the largest errors in ulps, for frequencies of the kind default."""
    cells = {
        (x["implementation"], f"{t}, {2**octave:,}"): number(x["max_ulp"]) if "max_ulp" in x else "not finite"
        for t in dtypes
        for octave in octaves
        for x in errors(lines, dtype=t, octave=octave)
    }
    return grid("positions from", cells)


def scores(lines: list[dict]) -> str:
    """Returns the effect on attention: the mean error of a score, and the weight that moves to other keys."""
    cells = {}
    for x in (x for dtype in FLOATS[:2] for x in errors(lines, kind="scores", dtype=dtype)):
        if "mean_error" in x:
            column = f"{x['dtype']}, {x['tokens']:,} tokens"
            cells[x["implementation"], column] = f"{x['mean_error']:.1e}, {x['moved_weight']:.2%}"
    return grid("mean error of a score, moved weight", cells)


FLOATS = "float32", "bfloat16", "float16"
# The steps of docs/accuracy.md, each with an implementation that makes it.
STEPS = {
    "one rounding": "everything is exact, and rounded once",
    "torch_rope": "float64 frequencies, exact angles",
    "torch_rope float32 inv_freq": "frequencies in float32, exact products",
    "torchtune": "step 1: products in float32",
    "transformers": "step 4: tables in the dtype of x too",
    "rotary-embedding-torch": "step 2: positions in the dtype of x",
}


def story(lines: list[dict]) -> str:
    """Returns the errors near position 131,072 and the weight that they move, for implementations that make a step."""
    cells = {}
    for x in (x for dtype in FLOATS[:2] for x in errors(lines, dtype=dtype) if x["implementation"] in STEPS):
        row = f"{STEPS[x['implementation']]} (`{x['implementation']}`)"
        if x.get("octave") == 17:
            cells[row, f"largest error, {x['dtype']}"] = number(x["max_ulp"])
        if x.get("tokens") == 131072:
            cells[row, f"moved weight, {x['dtype']}"] = f"{x['moved_weight']:.2%}"
    return grid("", cells)


# ---- The pages ----


def machine(lines: list[dict]) -> str:
    """Returns a sentence about the machine, the date and the versions."""
    found = lines[0]
    packages = "python", "torch", "transformers", "mlx", "onnxruntime", "diffusers", "comfy-kitchen"
    packages += "liger-kernel", "flashinfer-python", "vllm"
    versions = [f"{k} {found[k]}" for k in packages if found.get(k, "not installed") != "not installed"]
    no_quartiles = any("median_us" in x and "q1_us" not in x for x in lines)
    on_cpu = f"{found.get('threads')} threads, kernels {found.get('cpu_kernels')}"
    how = on_cpu if found["device"] == "cpu" else "CUDA graphs"
    note = " The quartiles were not kept, so no ratio is noise." * no_quartiles
    return f"Measured on {found['name']}, {how}, {found['date']}; {', '.join(versions)}.{note}"


@dataclass(frozen=True)
class Front:
    """A table of README.md or docs/benchmarks.md: times of a few cases in one file of results."""

    file: Path
    corner: str
    rows: dict[str, str]  # label -> case; if the label is in MEMORY, the row has memory instead of times
    columns: dict[str, str | tuple]  # header -> implementation, or the first of several that has the case

    def __call__(self, _) -> str:
        lines, used, cells = read(self.file), [], {}
        for (label, case), (header, names) in itertools.product(self.rows.items(), self.columns.items()):
            names = (names,) if isinstance(names, str) else names
            if x := next(filter(None, (one(lines, case, name) for name in names)), None):
                cells[label, header] = in_memory(x, None)[1] if label in MEMORY else time(x)
                used.append(x)
        machine, commits = lines[0], ", ".join(sorted({x["commit"] for x in used}))
        note = " The kernels have changed since." * any(map(is_earlier, used))
        return (
            f"{grid(self.corner, cells, self.rows, self.columns)}\n\n"
            f"{machine['name']}, {machine['date']}, torch {machine['torch']}, commit {commits}.{note}"
        )


MEMORY = "memory that it allocates, in sizes of q and k", "its peak of memory"
DECODE = "32/8 of 128, bfloat16, norm cache, int64 positions"
OPERATORS = {"`copy_`": "copy", "`rotate_qk`": OURS, "`rotate_qk_`": IN_PLACE}
ENGINES = {"SGLang's way": "SGLang's way", "FlashInfer": "flashinfer in place", "vLLM": "vllm in place"}
SEPARATE = "separate operators of torch_rope"
LIBRARIES = {"`copy_`": "copy", "torch_rope": OURS, SEPARATE: ("rms_norm, then torch_rope", APART), "Liger": "liger"}
LIBRARIES |= {"transformers, diffusers": (PEER, "diffusers"), "transformers, compiled": COMPILED}
SWEEP = {n: f"sweep: 1 x {count(n)}, 32/8 of 128, bfloat16, int64 positions" for n in (1, 64, 2048, 32768)}
TRAINING = "norm: 1 x 2k, 32/8 of 128, bfloat16, norm, training"
LAYERS = "models: Qwen3 of 12 layers, {}, bfloat16"
STEP = LAYERS.format("training on 2 x 2048")
OVER_HEADS = "norm-over-heads: 1 x {0}, {1}/{1} of 128, bfloat16, interleaved, norm over heads"
FRONT = {
    "engines": Front(H100, "tokens", {f"{n:,}": case for n, case in SWEEP.items()}, OPERATORS | ENGINES),
    "libraries": Front(
        H200,
        "tokens",
        {
            "2,048, rotation": "shapes: 1 x 2k, 32/8 of 128, bfloat16",
            "2,048, QK-norm and rotation": "norm: 1 x 2k, 32/8 of 128, bfloat16, norm",
            "the same, forward and backward": TRAINING,
            MEMORY[0]: TRAINING,
            "1, QK-norm, rotation and cache": f"cache: 1 x 1, {DECODE}",
            "4,096 of Wan, norm over 40 heads": OVER_HEADS.format("4k", 40),
        },
        LIBRARIES,
    ),
    "layers": Front(
        H100,
        "12 layers of Qwen3, hidden size 2,048",
        {
            "training step, 2 x 2,048 tokens": STEP,
            MEMORY[1]: STEP,
            "prompt of 4,096 tokens": LAYERS.format("prompt of 4096"),
        },
        {"transformers": PEER, "`patch`": OURS, "`patch`, `fuse=True`": FUSED},
    ),
    "compiled": Front(
        H100,
        "8 layers of Qwen3",
        {f"{what} step, torch.compile": f"models: Qwen3 of 8 layers, {what} step" for what in ("training", "decode")},
        {"transformers": COMPILED, "`patch`": "torch_rope compiled"},
    ),
    "heads": Front(
        H100,
        "tokens and heads of Wan",
        {f"{n:,}, {heads}": OVER_HEADS.format(count(n), heads) for n, heads in ((4096, 12), (4096, 40), (32760, 40))},
        {"`copy_`": "copy", "torch_rope": OURS, SEPARATE: "rms_norm, then torch_rope"},
    ),
    "cpu": Front(
        REFERENCE,
        "tokens",
        {
            "2,048": "shapes: 1 x 2k, 32/8 of 128, bfloat16",
            "1": "decode: 1 x 1, 32/8 of 128, bfloat16, int64 positions",
            "1, QK-norm and cache": f"cache: 1 x 1, {DECODE}",
        },
        {"`copy_`": "copy", "torch_rope": OURS, "in place": IN_PLACE, "transformers": PEER, "compiled": COMPILED},
    ),
}


def reasons(_) -> str:
    """Returns the three reasons of README.md and docs/index.md, with figures of a GPU."""
    gpu = read(H100)
    names = IN_PLACE, "copy", "SGLang's way", "vllm in place"
    ours, copy, sglang, vllm = (time(one(gpu, SWEEP[2048], name)) for name in names)
    step, fused = (time(one(gpu, STEP, name)) for name in (PEER, FUSED))
    return f"""\
1. **Fast.** On an H100, the rotation of 2,048 tokens in place takes {ours}, a copy {copy}, SGLang's way {sglang} and \
vLLM's kernel {vllm}; a training step of 12 Qwen3 layers takes {fused} with `fuse=True`, and {step} without torch_rope \
([measured](docs/benchmarks.md)).
2. **Accurate.** Angles stay right at any position below 2^24, while products in float32 lose bits of them from 32,768 on \
([why](docs/accuracy.md)).
3. **Complete.** One operator does QK-norm, rotation and the write to a KV cache; functional operators have gradients to \
any order; all work with `torch.compile` and DTensor ([all of them](docs/guide/index.md))."""


BLOCKS: dict[str, Callable[[list[dict]], str]] = {
    "machine": machine,
    "reasons": reasons,
    **FRONT,
    "story": story,
    **{group: partial(table, group=group, rows=rows, columns=SHORT) for group, rows in ROWS.items()},
    "models, operators": partial(table, group="models", cell=in_operators, rows=ROWS["models"][1:2], columns=SHORT),
    "diffusion, memory": partial(table, group="diffusion", cell=in_memory, rows=ROWS["diffusion"], columns=SHORT[1:]),
    "ulps": partial(ulps, dtypes=FLOATS[:2], octaves=(0, 17)),
}
BLOCK = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.S)


def page_of(lines: list[dict]) -> str:
    """Returns the page of a file of results: tables of times of each group, of its memory and of its operators."""
    parts = {"": f"{machine(lines)}\n\n{LEGEND}"}
    for group in dict.fromkeys(x["group"] for x in lines if x["kind"] == "sample"):
        parts[group] = table(lines, group, commits=True)
        parts[f"{group}, memory"] = table(lines, group, in_memory)
        parts[f"{group}, operators"] = table(lines, group, in_operators)
    parts |= {f"largest errors in ulps, {t}": ulps(lines, (t,), (0, 10, 14, 17, 20, 24)) for t in FLOATS}
    parts["effect on attention"] = scores(lines)
    texts = (f"## {title}\n\n{text}" if title else text for title, text in parts.items() if text)
    return f"# {lines[0]['name']}\n\n" + "\n\n".join(texts) + "\n"


def write_all(check: bool) -> list[Path]:
    """Returns the pages whose tables do not show the current results. Writes these pages, unless check is True."""
    lines = read(REFERENCE)

    def fill(page: Path) -> str:
        """Returns the text of a page with its tables. Their links begin in the folder of README.md."""
        text = BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]](lines)}\n\n{found[3]}", page.read_text())
        return text if page.parent == ROOT else text.replace("(docs/", "(")

    wanted = {page: fill(page) for page in PAGES}
    wanted |= {path.with_suffix(".md"): page_of(read(path)) for path in sorted(FOLDER.glob("*.jsonl"))}
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text() != text]
    for page in stale if not check else []:
        page.write_text(wanted[page])
    return stale
