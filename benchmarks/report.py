"""Makes the tables of README.md and of pages in docs/ from the files of results, so that no figure is typed by hand.

The text between <!-- table: NAME --> and <!-- end --> is what the function BLOCKS[NAME] returns. Each file of results
also has a page of its own in the same folder, with all rows and columns.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from .cases import count
from .implementations import ADAPTERS, OURS
from .results import FOLDER, read

ROOT = FOLDER.parent.parent
PAGES = [ROOT / name for name in ("README.md", "docs/index.md", "docs/benchmarks.md", "docs/accuracy.md")]
REFERENCE = FOLDER / "AMD_EPYC_family_25_2_cores.jsonl"  # the newest results of all cases, for pages and pictures
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
EARLIER = {"7b4affbc": None, "806f44d2": None, "2a2987c3": ("quantised",), "7cfd72a0": ("quantised",)}

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
    overlap = x["q1_us"] <= ours["q3_us"] and ours["q1_us"] <= x["q3_us"]
    return f"{name}, ratio", f"{text} (noise)" if overlap else f"**{text}**" if x["q3_us"] < ours["q1_us"] else text


def in_memory(x: dict, ours: dict | None) -> tuple[str, str]:
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


def beside_copy(lines: list[dict]) -> str:
    """Returns a sentence about the numbers of tokens with which torch_rope takes less time than a copy."""
    sweep = [x for x in lines if x.get("group") == "sweep" and x["status"] == "timed"]
    us = {(x["implementation"], x["seq"]): x["median_us"] for x in sweep}
    less = [count(seq) for name, seq in us if name == OURS and us[name, seq] < us["copy", seq]]
    return (
        f"In these sweeps torch_rope takes less time than `copy_` with {', '.join(less)} tokens, and more with others."
    )


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
    versions = [f"{k} {found[k]}" for k in packages if found.get(k, "not installed") != "not installed"]
    threads = f"{found['threads']} threads, kernels {found['cpu_kernels']}"
    threads = threads if found["device"] == "cpu" else "CUDA graphs"
    return f"Measured on {found['name']}, {threads}, {found['date']}; {', '.join(versions)}."


# The README's table of times: the tokens, the name of a case without its dtype, and implementations; and their calls.
PROMPT = "shapes: 1 x 2k, 32/8 of 128, {}"
CACHE = "cache: 1 x 1, 32/8 of 128, {}, norm cache, int64 positions"
FRONT = (
    ("2,048 tokens", PROMPT, (OURS, IN_PLACE, MODULE, "copy", PEER, COMPILED)),
    ("1 token", "decode: 1 x 1, 32/8 of 128, {}, int64 positions", (OURS, MODULE, PEER, COMPILED)),
    ("1 token, with QK-norm and cache", CACHE, (OURS, PEER)),
)
CALLS = {OURS: "**`rotate_qk`**", IN_PLACE: "**`rotate_qk_`**, in place", MODULE: "**`rope(q, k)`**, the module"}
CALLS |= {"copy": "`copy_` of q and k", COMPILED: "transformers, compiled"}


def front(lines: list[dict]) -> str:
    """Returns the README's table of times, and the machine."""
    rows = []
    for tokens, case, names in FRONT:
        for name in names:
            call = "**`rotate_into_cache_`**" if (case, name) == (CACHE, OURS) else CALLS.get(name, name)
            times = [time(one(lines, case.format(dtype), name)) for dtype in FLOATS[:2]]
            rows.append([tokens if name == names[0] else "", call, *times])
    return f"{markdown(['', 'call', 'float32', 'bfloat16'], rows)}\n\n{machine(lines)}"


def reasons(lines: list[dict]) -> str:
    """Returns the three reasons of README.md and docs/index.md, each with its figures."""

    def figure(name: str, dtype: str, which: str = "max_ulp", **where) -> float:
        return errors(lines, implementation=name, dtype=dtype, **(where or {"octave": 17}))[0][which]

    def times(name: str, case: str) -> str:
        """Returns how many times as long as torch_rope an implementation takes, in float32 and bfloat16."""
        both = [[one(lines, case.format(t), n)["median_us"] for n in (name, OURS)] for t in FLOATS[:2]]
        return " to ".join(dict.fromkeys(map(ratio, sorted(theirs / ours for theirs, ours in both))))

    return f"""\
1. **Fast.** One call reads and writes q and k once. On 2,048 tokens transformers' function takes \
{times(PEER, PROMPT)} times as long, and {times(COMPILED, PROMPT)} times when compiled.
2. **Accurate.** At positions from 131,072 to 262,143 the largest error of `RotaryEmbedding` is \
{number(figure(OURS, "float32"))} ulps (units in the last place) in float32, and {number(figure(OURS, "bfloat16"))} in \
bfloat16. Implementations that multiply position and frequency in float32 reach {figure(PEER, "float32"):,.0f} and \
{number(figure(PEER, "bfloat16"))}. In float32 that moves {figure(PEER, "float32", "moved_weight", tokens=131072):.2%} \
of the weight of attention over 131,072 tokens.
3. **Complete.** Functional operators have gradients to any order; all work with `torch.compile` and DTensor. \
`rotate_into_cache_` fuses QK-norm, rotation and the KV-cache write of one token: transformers' separate functions \
take {times(PEER, CACHE)} times as long, torch_rope's separate functions {times(APART, CACHE)}."""


BLOCKS: dict[str, Callable[[list[dict]], str]] = {
    "machine": machine,
    "front": front,
    "reasons": reasons,
    "story": story,
    "beside copy": beside_copy,
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
    fill = partial(BLOCK.sub, lambda found: f"{found[1]}\n{BLOCKS[found[2]](lines)}\n\n{found[3]}")
    wanted = {page: fill(page.read_text()) for page in PAGES}
    wanted |= {path.with_suffix(".md"): page_of(read(path)) for path in sorted(FOLDER.glob("*.jsonl"))}
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text() != text]
    for page in stale if not check else []:
        page.write_text(wanted[page])
    return stale
