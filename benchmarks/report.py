"""Makes the tables of README.md and of pages in docs/ from the files of results, so that no figure is typed by hand.

The text between <!-- table: NAME --> and <!-- end --> is what BLOCKS[NAME] returns. Each file of results also has a page
of its own in the same folder, with all cases and implementations.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from .adapters import OURS
from .cases import count
from .times import FOLDER, read

ROOT = FOLDER.parent.parent
PAGES = [ROOT / name for name in ("README.md", "docs/index.md", "docs/benchmarks.md", "docs/accuracy.md")]
REFERENCE = FOLDER / "AMD_EPYC_family_25_2_cores.jsonl"  # the newest results of all cases, for pages and pictures
H100, H200 = (FOLDER / f"NVIDIA_{name}.jsonl" for name in ("H100_80GB", "H200"))
# The commits whose kernels have changed since, and the group of cases that this touches; "" stands for all.
EARLIER = {"7bc218f9": "", "7b4affbc": "", "806f44d2": "", "2a2987c3": "quantised", "7cfd72a0": "quantised"}
LEGEND = """A label says `batch x seq, heads/kv_heads of head_dim`, and what differs from half-split pairs and memory in
the order `[batch, seq, heads, head_dim]`. Memory is what a call allocates, in sizes of q and k together. A cell is empty
where an implementation cannot do the case, or was not measured."""

# ---- Cells ----


def time(x: dict) -> str:
    us = x["median_us"]
    return f"{us:.3g} µs" if us < 999.5 else f"{us / 1e3:.3g} ms" if us < 999.5e3 else f"{us / 1e6:.3g} s"


def memory(x: dict) -> str:
    """Returns the peak of the memory that a call allocates: in sizes of q and k together, or in MiB for a model."""
    if "peak_bytes" not in x or x["op"] == "model":
        return f"{x['peak_bytes'] / 2**20:,.0f} MiB" if "peak_bytes" in x else ""
    numbers = x["batch"] * x["seq"] * (x["heads"] + x["kv_heads"]) * x["head_dim"]
    return number(x["peak_bytes"] / (numbers * {"float64": 8, "float32": 4}.get(x["dtype"], 2)))


def number(x: float) -> str:
    return f"{x:.2f}" if x == 0 or 0.1 <= x < 100 else f"{x:.0f}" if 100 <= x < 1e4 else f"{x:.1e}"


# ---- Tables ----


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in lines)


def grid(corner: str, cells: dict[tuple[str, str], str]) -> str:
    """Returns a table from cells (row, column) -> text, without rows and columns that have none."""
    filled = [{key[i] for key, text in cells.items() if text} for i in (0, 1)]
    rows, columns = ([n for n in dict.fromkeys(key[i] for key in cells) if n in filled[i]] for i in (0, 1))
    return markdown([corner, *columns], [[row, *(cells.get((row, c), "") for c in columns)] for row in rows])


def table(lines: list[dict], corner: str, rows: dict, columns: dict[str, tuple], cell: Callable = time) -> str:
    """Returns a table of cases and implementations, and the commits that were measured.

    rows: label -> case, or (case, the function of its cells). columns: header -> implementations, of which the first that
    was measured counts.
    """
    measured = {(x["case"], x["implementation"]): x for x in lines if x["kind"] == "sample"}
    cells, used = {}, []
    for label, row in rows.items():
        case, text = row if isinstance(row, tuple) else (row, cell)
        for header, names in columns.items():
            found = [measured[case, name] for name in names if (case, name) in measured][:1]
            cells[label, header] = "".join(text(x) if x["status"] == "timed" else x["status"] for x in found)
            used += found
    if not any(cells.values()):
        return ""
    is_earlier = any(EARLIER.get(x["commit"]) in ("", x["group"]) for x in used)
    commits = ", ".join(sorted({x["commit"] for x in used}))
    of = f"{lines[0]['name']}, {lines[0]['date']}, torch {lines[0]['torch']}, commit {commits}."
    return f"{grid(corner, cells)}\n\n{of}{' The kernels have changed since.' * is_earlier}"


def ulps(lines: list[dict], octaves: tuple[int, ...], dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> str:
    """Returns the largest errors in ulps, for the positions from a number up to twice that number."""
    return grid(
        "positions from",
        {
            (x["implementation"], f"{x['dtype']}, {2 ** x['octave']:,}"): number(x["max_ulp"])
            if "max_ulp" in x
            else x["status"]
            for x in lines
            if x.get("octave") in octaves and x["dtype"] in dtypes
        },
    )


# ---- The pages ----

SWEEP = "sweep: 1 x {}, 32/8 of 128, bfloat16, int64 positions"
TRAINING, DECODE = (
    "norm: 1 x 2k, 32/8 of 128, bfloat16, norm, training",
    "32/8 of 128, bfloat16, norm cache, int64 positions",
)
STEP, OF_8_LAYERS = "models: Qwen3 of 12 layers, training on 2 x 2048, bfloat16", "models: Qwen3 of 8 layers, {} step"
OVER_HEADS = "norm-over-heads: 1 x {0}, {1}/{1} of 128, bfloat16, interleaved, norm over heads"
FLUX = "diffusion: Flux, 1 x 4k, 24/24 of 128, bfloat16, interleaved, function of diffusers"
OF_TOKENS = {"`copy_`": ("copy",), "torch_rope": (OURS,)}
SEPARATE = {"separate operators of torch_rope": (f"rms_norm, then {OURS}", f"{OURS}, then index_copy_")}
OTHERS = {"transformers, diffusers": ("transformers", "diffusers", "comfy-kitchen")}
OTHERS |= {"transformers, compiled": ("transformers compiled",)}
# Name of a table -> file of results, corner, rows and columns.
TABLES: dict[str, tuple[Path, str, dict, dict[str, tuple]]] = {
    "engines": (
        H100,
        "tokens",
        {f"{n:,}": SWEEP.format(count(n)) for n in (1, 64, 2048, 32768)},
        {"`copy_`": ("copy",), "`rotate_qk`": (OURS,), "`rotate_qk_`": (f"{OURS} in place",)}
        | {"SGLang's way": ("SGLang's way",), "FlashInfer": ("flashinfer in place",), "vLLM": ("vllm in place",)},
    ),
    "libraries": (
        H200,
        "tokens",
        {
            "2,048, rotation": "shapes: 1 x 2k, 32/8 of 128, bfloat16",
            "2,048, QK-norm and rotation": "norm: 1 x 2k, 32/8 of 128, bfloat16, norm",
            "the same, forward and backward": TRAINING,
            "memory that it allocates, in sizes of q and k": (TRAINING, memory),
            "1, QK-norm, rotation and cache": f"cache: 1 x 1, {DECODE}",
            "4,096 of Wan, norm over 40 heads": OVER_HEADS.format("4k", 40),
        },
        OF_TOKENS | SEPARATE | {"Liger": ("liger",)} | OTHERS,
    ),
    "models": (
        H100,
        "layers of Qwen3",
        {
            "12, training step of 2 x 2,048 tokens": STEP,
            "its peak of memory": (STEP, memory),
            "12, prompt of 4,096 tokens": "models: Qwen3 of 12 layers, prompt of 4096, bfloat16",
            "8, training step": OF_8_LAYERS.format("training"),
            "8, decode step": OF_8_LAYERS.format("decode"),
        },
        {"transformers": ("transformers",), "`patch`": (OURS,), "`patch`, `fuse=True`": (f"{OURS} fused",)}
        | {"transformers, compiled": ("transformers compiled",), "`patch`, compiled": (f"{OURS} compiled",)},
    ),
    "cpu": (
        REFERENCE,
        "tokens",
        {
            "2,048": "shapes: 1 x 2k, 32/8 of 128, bfloat16",
            "1": "decode: 1 x 1, 32/8 of 128, bfloat16, int64 positions",
            "1, QK-norm and cache": f"cache: 1 x 1, {DECODE}",
        },
        OF_TOKENS | {"in place": (f"{OURS} in place",), "transformers": ("transformers",)} | {"compiled": ("transformers compiled",)},
    ),
    "cases": (
        REFERENCE,
        "tokens",
        {
            "1": "sweep: 1 x 1, 32/8 of 128, bfloat16",
            "4,096": "sweep: 1 x 4k, 32/8 of 128, bfloat16",
            "1,048,576, with 4 heads of q and 1 of k": "sweep: 1 x 1M, 4/1 of 128, bfloat16",
            "1 of each of 64 sequences": "decode: 64 x 1, 32/8 of 128, bfloat16, int64 positions",
            "1, into a cache": "cache: 1 x 1, 32/8 of 128, bfloat16, cache, int64 positions",
            "1, QK-norm, into a cache": f"cache: 1 x 1, {DECODE}",
            "1, into float8 pages": "quantised: 1 x 1, 32/8 of 128, bfloat16, quantised cache, int64 positions, float8_e4m3fn pages",
            "2,048, head_dim 80": "shapes: 1 x 2k, 32/8 of 80, bfloat16",
            "2,048, float32": "shapes: 1 x 2k, 32/8 of 128, float32",
            "2,048, forward and backward": "training: 1 x 2k, 32/8 of 128, bfloat16, training",
            "2,048, QK-norm": "norm: 1 x 2k, 32/8 of 128, bfloat16, norm",
            "2,048, QK-norm, forward and backward": TRAINING,
            "4,096 of Wan, norm over 12 heads": OVER_HEADS.format("4k", 12),
            "4,096 of Flux": FLUX,
            "4,096 of Flux, forward and backward": f"{FLUX}, training",
            "memory that it allocates, in sizes of q and k": (f"{FLUX}, training", memory),
            "4,096 of ComfyUI's `rms_rope`": "diffusion: rms_rope, 1 x 4k, 24/24 of 128, bfloat16, interleaved, norm of comfy-kitchen",
        },
        OF_TOKENS | {"in place": (f"{OURS} in place",)} | SEPARATE | OTHERS,
    ),
    "models on a CPU": (
        REFERENCE,
        "model",
        {
            "SmolLM2-135M, decode step": "models: SmolLM2-135M, decoding after 128, bfloat16",
            "Qwen3-0.6B, decode step": "models: Qwen3-0.6B, decoding after 128, bfloat16",
            "Qwen3-0.6B, prompt of 512 tokens, float32": "models: Qwen3-0.6B, prompt of 512, float32",
        },
        {"transformers": ("transformers",), "`patch`": (OURS,), "`patch`, `fuse=True`": (f"{OURS} fused",)},
    ),
}  # fmt: skip


def reasons() -> str:
    """Returns the three reasons of README.md and docs/index.md, with figures of a GPU."""
    found = {(x["case"], x["implementation"]): time(x) for x in read(H100) if x.get("status") == "timed"}
    names = f"{OURS} in place", "copy", "SGLang's way", "vllm in place"
    ours, copy, sglang, vllm = (found[SWEEP.format("2k"), name] for name in names)
    step, fused = (found[STEP, name] for name in ("transformers", f"{OURS} fused"))
    return f"""\
1. **Fast.** On an H100, the rotation of 2,048 tokens in place takes {ours}, a copy {copy}, SGLang's way {sglang} and \
vLLM's kernel {vllm}; a training step of 12 Qwen3 layers takes {fused} with `fuse=True`, and {step} without torch_rope \
([measured](docs/benchmarks.md)).
2. **Accurate.** Angles stay right at any position below 2^24, while products in float32 lose bits of them from 32,768 on \
([why](docs/accuracy.md)).
3. **Complete.** One operator does QK-norm, rotation and the write to a KV cache; functional operators have gradients to \
any order; all work with `torch.compile` and DTensor ([all of them](docs/guide/index.md))."""


def machine(lines: list[dict]) -> str:
    """Returns a sentence about the machine, the date and the versions."""
    found = lines[0]
    packages = (
        "python",
        "torch",
        "transformers",
        "diffusers",
        "comfy-kitchen",
        "liger-kernel",
        "flashinfer-python",
        "vllm",
    )
    versions = [f"{k} {found[k]}" for k in packages if found.get(k, "not installed") != "not installed"]
    on_cpu = f"{found.get('threads')} threads, kernels {found.get('cpu_kernels')}"
    how = on_cpu if found["device"] == "cpu" else "CUDA graphs"
    return f"Measured on {found['name']}, {how}, {found['date']}; {', '.join(versions)}."


BLOCKS: dict[str, Callable[[], str]] = {
    "machine": lambda: machine(read(REFERENCE)),
    "reasons": reasons,
    "ulps": lambda: ulps(read(REFERENCE), (0, 17)),
    "far ulps": lambda: ulps(read(REFERENCE), (17,)),
    **{name: partial(lambda file, *rest: table(read(file), *rest), *given) for name, given in TABLES.items()},
}
BLOCK = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.S)


def page_of(lines: list[dict]) -> str:
    """Returns the page of a file of results: all times, memory and operators of each group, and the accuracy."""
    parts = {"": f"{machine(lines)}\n\n{LEGEND}"}
    samples = [x for x in lines if x["kind"] == "sample"]
    for group in dict.fromkeys(x["group"] for x in samples):
        of_group = [x for x in samples if x["group"] == group]
        rows = {x["case"].partition(": ")[2].replace(", bfloat16", ", bf16"): x["case"] for x in of_group}
        columns = {x["implementation"]: (x["implementation"],) for x in of_group}
        for title, cell in ((group, time), (f"{group}, memory", memory)):
            parts[title] = table(lines, "", rows, columns, cell)
    parts |= {
        f"largest errors in ulps, {t}": ulps(lines, (0, 10, 14, 17, 20, 24), (t,))
        for t in ("float32", "bfloat16", "float16")
    }
    texts = (f"## {title}\n\n{text}" if title else text for title, text in parts.items() if text)
    return f"# {lines[0]['name']}\n\n" + "\n\n".join(texts) + "\n"


def write_all(check: bool) -> list[Path]:
    """Returns the pages whose tables do not show the current results. Writes these pages, unless check is True."""

    def fill(page: Path) -> str:
        """Returns the text of a page with its tables. Their links begin in the folder of README.md."""
        text = BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[3]}", page.read_text())
        return text if page.parent == ROOT else text.replace("(docs/", "(")

    wanted = {page: fill(page) for page in PAGES}
    wanted |= {path.with_suffix(".md"): page_of(read(path)) for path in sorted(FOLDER.glob("*.jsonl"))}
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text() != text]
    for page in stale if not check else []:
        page.write_text(wanted[page])
    return stale
