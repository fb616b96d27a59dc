"""Makes the tables of README.md and of pages in docs/ from the result files, so that no figure is typed by hand.

The text between <!-- table: NAME --> and <!-- end --> is what the function BLOCKS[NAME] returns. The result file of
each other machine gets a page of its own in the same folder.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .implementations import ADAPTERS
from .results import FOLDER, read

ROOT = FOLDER.parent.parent
PAGES = [ROOT / name for name in ("README.md", "docs/index.md", "docs/benchmarks.md", "docs/accuracy.md")]
REFERENCE = FOLDER / "AMD_EPYC_family_26_2_cores.jsonl"  # the results in the pages and pictures
OURS = ["torch_rope", "torch_rope inv_freq", "torch_rope in place"]
PEER = "transformers"
PATCHED = "torch_rope", "torch_rope fused"  # whole models, and blocks
DIFFUSION = "diffusers", "comfy-kitchen"

# Why a peer is faster, as far as it is understood: (a part of the case's name, the peer's name) -> reason.
REASONS: dict[tuple[str, str], str] = {}


def cpu_results() -> list[dict]:
    """Returns the reference's lines, and those of groups that it lacks from the results of other machines with a CPU."""
    lines = read(REFERENCE)
    for path in sorted(FOLDER.glob("*.jsonl")):
        groups = {x.get("group") for x in lines}
        found, *others = read(path)
        if found["device"] == "cpu":
            lines += [x | {"machine": found} for x in others if x.get("group") not in groups]
    return lines


def timed(lines: list[dict], **fields) -> list[dict]:
    return [
        x for x in lines if x.get("status") == "timed" and all(x.get(name) == value for name, value in fields.items())
    ]


def one(lines: list[dict], implementation: str, **fields) -> dict | None:
    """Returns the line of an implementation for a case, or None. Fields that are not given have their usual values."""
    usual = {"heads": 32, "kv_heads": 8, "head_dim": 128, "rotary_dim": 128, "layout": "bshd", "interleaved": False}
    usual |= {"batch": 1, "mode": "inference", "op": "rotate"}
    found = timed(lines, implementation=implementation, **(usual | fields))
    return found[0] if found else None


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def time(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:.3g} µs" if us < 999.5 else f"{us / 1e3:.3g} ms" if us < 999.5e3 else f"{us / 1e6:.3g} s"


def ratio(x: float | None) -> str:
    return "" if x is None else f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 1.95 else f"{x:.2f}"


def over(a: dict | None, b: dict | None) -> float | None:
    return a["median_us"] / b["median_us"] if a and b else None


def qk_bytes(x: dict) -> int:
    size = {"float64": 8, "float32": 4}.get(x["dtype"], 2)
    return x["batch"] * x["seq"] * (x["heads"] + x["kv_heads"]) * x["head_dim"] * size


def implementations(lines: list[dict]) -> list[str]:
    """Returns the names of the implementations in lines, in the order of ADAPTERS: the copy, torch_rope, the peers."""
    found = {x["implementation"] for x in lines if x["kind"] == "sample"}
    return [name for name in dict.fromkeys(name for _, name in ADAPTERS) if name in found]


def label(x: dict) -> str:
    return x["case"].partition(": ")[2].replace(", bfloat16", ", bf16") or x["case"]


SHOWN = "python", "torch", "transformers", "mlx", "onnxruntime", "diffusers", "comfy-kitchen"

# ---- The blocks. Each function returns the text of a block from the lines of a result file. ----


def machine(lines: list[dict]) -> str:
    """Returns a sentence about the machine, the date and the versions."""
    found = lines[0]
    versions = [f"{k} {v}" for k, v in found.items() if k in SHOWN]
    threads = (
        f"{found['threads']} threads, kernels {found['cpu_kernels']}" if found["device"] == "cpu" else "CUDA graphs"
    )
    return f"Measured on {found['name']}, {threads}, {found['date']}; {', '.join(versions)}."


def elsewhere(lines: list[dict]) -> str:
    """Returns a paragraph about the machine of lines that are not from the machine of the page, or nothing."""
    found = next((x["machine"] for x in lines if "machine" in x), None)
    return f"\n\n{machine([found])}" if found else ""


def group(name: str) -> Callable[[list[dict]], str]:
    """Makes a block of the times of the copy and of torch_rope, and the ratios of the peers' times to torch_rope's."""

    def block(lines: list[dict]) -> str:
        of_group = [x for x in lines if x.get("group") == name]
        shown = {x["implementation"] for x in of_group if x["status"] in ("timed", "wrong")}
        names = [n for n in implementations(lines) if n in shown]
        first = [n for n in ("copy", *OURS) if n in names]
        peers = [n for n in names if n not in first]
        header = [""] + first + [f"{n}, ratio" for n in peers]
        rows = []
        for case in dict.fromkeys(x["case"] for x in of_group):
            by_name = {x["implementation"]: x for x in of_group if x["case"] == case}
            times = {n: x["median_us"] for n, x in by_name.items() if x["status"] == "timed"}
            cells = [time(times.get(n)) for n in first]
            for n in peers:
                status = by_name.get(n, {}).get("status")
                cell = status if status in ("wrong", "failed") else ""
                if n in times:  # torch_rope has no time if its results do not fit the memory of the machine
                    cell = ratio(times[n] / times[OURS[0]]) if OURS[0] in times else time(times[n])
                    cell = f"**{cell}**" if OURS[0] in times and faster(by_name[n], by_name[OURS[0]]) else cell
                cells.append(cell)
            rows.append([label(next(iter(by_name.values()))), *cells])
        return markdown(header, rows) + elsewhere(of_group)

    return block


def details(**fields) -> Callable[[list[dict]], str]:
    """Makes a block with all figures of one case."""

    def block(lines: list[dict]) -> str:
        rows = []
        for name in implementations(lines):
            if not (x := one(lines, name, **fields)):
                continue
            tokens, size = x["batch"] * x["seq"], qk_bytes(x)
            us, moved, flops = x["median_us"], x.get("moved_bytes"), x.get("flops")
            rows.append(
                [
                    name,
                    f"{time(us)} ({time(x['q1_us'])} to {time(x['q3_us'])})",
                    ratio(x.get("to_copy")),
                    f"{x['needed_bytes'] / us / 1e3:.3g}",
                    f"{tokens / us:.3g}",
                    ratio(x["peak_bytes"] / size) if "peak_bytes" in x else "",
                    str(x.get("launches", "")),
                    ratio(moved / size) if moved else "",
                    f"{flops / moved:.2f}" if flops and moved else "",
                ]
            )
        header = ["", "median (quartiles)", "time / copy", "GB/s", "million tokens/s", "peak memory", "launches"]
        return markdown([*header, "bytes moved", "FLOPs per byte"], rows)

    return block


def speed(lines: list[dict]) -> str:
    """Returns a summary: ratios of times, in float32 and bfloat16."""

    def row(text: str, a: str, b: str, **fields) -> list[str]:
        kinds = ("float32", "bfloat16")
        return [text, *(ratio(over(one(lines, a, dtype=t, **fields), one(lines, b, dtype=t, **fields))) for t in kinds)]

    prefill = {"group": "shapes", "seq": 2048}
    other = {**prefill, "interleaved": True}
    training = {"group": "training", "mode": "training"}
    norm, learned = {**training, "group": "norm", "op": "norm"}, {**training, "op": "learned"}
    cache = {"group": "cache", "op": "cache", "seq": 2048}
    normed = {**cache, "op": "norm cache"}
    rows = [
        row("`rotate_qk_` / a copy of q and k", OURS[2], "copy", **prefill),
        row("`rotate_qk` / a copy of q and k", OURS[0], "copy", **prefill),
        row("`rotate_qk`, interleaved / a copy of q and k", OURS[0], "copy", **other),
        row("`rotate_qk` with `inv_freq` / a copy of q and k", OURS[1], "copy", **prefill),
        row("`rotate_into_cache` / copies of q, and of k and v into the cache", OURS[0], "copy", **cache),
        row("`rotate_into_cache` with QK-norm / copies of q, and of k and v into the cache", OURS[0], "copy", **normed),
        row("transformers / `rotate_qk`", "transformers", OURS[0], **prefill),
        row("transformers, compiled / `rotate_qk`", "transformers compiled", OURS[0], **prefill),
        row("MLX's `mx.fast.rope` / `rotate_qk`", "mlx", OURS[0], **prefill),
        row("ONNX Runtime / `rotate_qk`", "onnxruntime", OURS[0], **prefill),
        row("torchtune's formula / `rotate_qk`, interleaved", "torchtune", OURS[0], **other),
        row("forward and backward: transformers, compiled / `rotate_qk`", "transformers compiled", OURS[0], **training),
        row(
            "forward and backward with learned cos and sin: transformers, compiled / `rotate_qk`",
            "transformers compiled",
            OURS[0],
            **learned,
        ),
        row(
            "forward and backward with QK-norm: transformers' Qwen3, compiled / `norm_rotate_qk`",
            "transformers compiled",
            OURS[0],
            **norm,
        ),
    ]
    return markdown(["time / time", "float32", "bfloat16"], rows)


def front(lines: list[dict]) -> str:
    """Returns the README's table of times, in float32 and bfloat16, and the machine."""

    def row(what: str, call: str, name: str, **fields) -> list[str]:
        found = (one(lines, name, dtype=t, **fields) for t in ("float32", "bfloat16"))
        return [what, call, *(time(x and x["median_us"]) for x in found)]

    prompt, token, cache = {"group": "shapes", "seq": 2048}, {"group": "decode", "seq": 1}, {"group": "cache", "seq": 1}
    rows = [
        row("2,048 tokens", "**`rotate_qk`**", OURS[0], **prompt),
        row("", "**`rotate_qk_`**, in place", OURS[2], **prompt),
        row("", "a copy of q and k", "copy", **prompt),
        row("", "transformers", PEER, **prompt),
        row("", "transformers, compiled", f"{PEER} compiled", **prompt),
        row("1 token", "**`rotate_qk`**", OURS[0], **token),
        row("", "transformers", PEER, **token),
        row("", "transformers, compiled", f"{PEER} compiled", **token),
        row("1 token, with QK-norm and cache", "**`rotate_into_cache`**", OURS[0], op="norm cache", **cache),
        row("", "transformers", PEER, op="norm cache", **cache),
    ]
    return f"{markdown(['', 'call', 'float32', 'bfloat16'], rows)}\n\n{machine(lines)}"


def reasons(lines: list[dict]) -> str:
    """Returns the three reasons of README.md and docs/index.md, each with its figures."""

    def error(name: str, dtype: str) -> float:
        fields = {"kind": "accuracy", "implementation": name, "dtype": dtype, "scaling": "default", "octave": 17}
        (found,) = [x for x in lines if fields.items() <= x.items()]
        return found["max_ulp"]

    def times(name: str, **fields) -> str:
        """Returns how many times as long as torch_rope an implementation takes, in float32 and bfloat16."""
        both = [over(*(one(lines, n, dtype=t, **fields) for n in (name, OURS[0]))) for t in ("float32", "bfloat16")]
        return " to ".join(dict.fromkeys(map(ratio, sorted(both))))

    prompt, cache = {"group": "shapes", "seq": 2048}, {"group": "cache", "op": "norm cache", "seq": 1}
    return "\n".join(
        [
            "1. **Fast.** One call reads and writes q and k once. On 2,048 tokens transformers' function takes "
            f"{times(PEER, **prompt)} times as long, and {times(PEER + ' compiled', **prompt)} times when compiled.",
            "2. **Accurate.** At positions from 131,072 to 262,143 the largest error of `RotaryEmbedding` is "
            f"{number(error('torch_rope', 'float32'))} ulps (units in the last place) in float32, and "
            f"{number(error('torch_rope', 'bfloat16'))} in bfloat16. Implementations that multiply position and frequency in "
            f"float32 reach {error(PEER, 'float32'):,.0f} and {number(error(PEER, 'bfloat16'))}.",
            "3. **Complete.** Functional operators have gradients to any order; all work with `torch.compile` and DTensor. "
            "`rotate_into_cache` fuses QK-norm, rotation and the KV-cache write of one token: transformers' separate functions "
            f"take {times(PEER, **cache)} times as long, torch_rope's separate functions {times('torch_rope, then index_copy_', **cache)}.",
        ]
    )


def whole_models(lines: list[dict]) -> str:
    """Returns the times of whole models and the number of operators that compute: unpatched, patched and fused."""
    rows = []
    for case in dict.fromkeys(x["case"] for x in timed(lines, group="models")):
        known = {x["implementation"]: x for x in timed(lines, case=case)}
        for compiled in ("", " compiled"):
            found = [known.get(name + compiled) for name in (PEER, *PATCHED)]
            if all(found):
                stock, *others = found
                ratios = [gain(stock, x) for x in others]
                operators = " / ".join(str(x.get("launches", "")) for x in found) if not compiled else ""
                what = f"{case.removeprefix('models: ')}{compiled and ', compiled'}"
                rows.append([what, *(time(x["median_us"]) for x in found), *ratios, operators])
    header = ["", "transformers", "patched", "fused", "transformers / patched", "transformers / fused", "operators"]
    return markdown(header, rows) + elsewhere(timed(lines, group="models"))


def rotary_functions(lines: list[dict]) -> str:
    """Returns the times and the memory of rotary functions of other libraries, and of torch_rope in their place."""
    found = [x for x in timed(lines, group="diffusion") if x["op"] != "block"]
    rows = []
    for case in dict.fromkeys(x["case"] for x in found):
        known = {x["implementation"]: x for x in found if x["case"] == case}
        ours = known.get(OURS[0])
        for name in DIFFUSION:
            if ours and (theirs := known.get(name)):
                shape = f"{ours['seq']:,} x {ours['heads']} of {ours['head_dim']}, {ours['dtype']}"
                step = "forward and backward" if ours["mode"] == "training" else "forward"
                times = [time(x and x["median_us"]) for x in (known.get("copy"), theirs, ours)]
                memory = [ratio(x["peak_bytes"] / qk_bytes(x)) for x in (theirs, ours)]
                what = f"{name}, {ours['model']}"
                rows.append([what, shape, step, *times, ratio(over(theirs, ours)), " / ".join(memory)])
    header = ["", "tokens x heads", "", "copy", "library", "torch_rope", "library / torch_rope", "peak memory"]
    return markdown(header, rows) + elsewhere(found)


def diffusion_blocks(lines: list[dict]) -> str:
    """Returns the times and the memory of a block of a diffusion model: unpatched, patched and fused."""
    found = timed(lines, group="diffusion", op="block")
    rows = []
    for case in dict.fromkeys(x["case"] for x in found):
        known = {x["implementation"]: x for x in found if x["case"] == case}
        three = [known.get(name) for name in (DIFFUSION[0], *PATCHED)]
        if all(three):
            stock, *others = three
            what = f"{stock['model']}, {'training step with LoRA' if stock['mode'] == 'training' else 'forward'}"
            memory = " / ".join(f"{x['peak_bytes'] / 1e6:,.0f}" for x in three)
            times = [time(x["median_us"]) for x in three]
            rows.append([what, *times, *(gain(stock, x) for x in others), memory])
    header = ["", "diffusers", "patched", "fused", "diffusers / patched", "diffusers / fused", "peak memory, MB"]
    return markdown(header, rows) + elsewhere(found)


def gain(stock: dict, ours: dict) -> str:
    """Returns how many times as fast as the unpatched model a patched model is, and whether this is noise."""
    return f"{over(stock, ours):.2f}" + ("" if faster(stock, ours) or faster(ours, stock) else " (noise)")


def faster(peer: dict, ours: dict) -> bool:
    """Returns whether a peer is faster by more than noise: its upper quartile is below the lower quartile of ours."""
    return peer["q3_us"] < ours["q1_us"]


def wins(lines: list[dict]) -> str:
    """Returns the cases in which a peer is faster than an operator of torch_rope for the same task, and the reasons."""
    rows = []
    for peer in timed(lines):
        if (
            peer["implementation"] in ("copy", *OURS)
            or peer["implementation"] in LEAST
            or peer.get("op") in ("model", "block")
        ):
            continue
        for name in OURS:
            for ours in timed(lines, case=peer["case"], implementation=name):
                if faster(peer, ours):
                    known = [
                        r for (case, p), r in REASONS.items() if case in peer["case"] and p == peer["implementation"]
                    ]
                    reason = known[0] if known else "not understood yet"
                    rows.append([peer["case"], peer["implementation"], name, ratio(over(peer, ours)), reason])
    if not rows:
        cases = len({x["case"] for x in timed(lines)})
        return f"None, in {cases} cases."
    return markdown(["case", "faster implementation", "slower operator", "time / time", "reason"], rows)


@dataclass(frozen=True)
class Limit:
    """A requirement: in all cases of a group that fit, `ours` takes at most `most` times as long as any of `others`."""

    device: str
    group: str
    ours: str
    others: tuple[str, ...]
    most: float
    fit: Callable[[dict], bool] = lambda x: True


def usual(x: dict) -> bool:
    return x["head_dim"] == x["rotary_dim"] == 128 and x["dtype"] in ("float32", "bfloat16")


LEAST = tuple(f"least, blocks of {n}" for n in (64, 128, 256))
PEERS = "transformers compiled", "liger", "flash-attn", "flashinfer", "xformers", "transformers"
WAYS = "SGLang's way", "FlashInfer's way"
LIMITS = [
    Limit("cpu", "shapes", OURS[2], ("copy",), 1.25, usual),
    Limit("cpu", "shapes", OURS[0], ("copy",), 1.25, usual),
    Limit("cpu", "shapes", OURS[1], (OURS[0],), 1.5, usual),
    Limit("cpu", "shapes", OURS[0], ("transformers compiled",), 0.35, usual),
    Limit("cpu", "cache", OURS[0], ("copy",), 1.3, lambda x: x["seq"] == 2048),
    Limit("cpu", "cache", OURS[0], ("torch_rope, then index_copy_",), 0.6, lambda x: x["seq"] * x["batch"] == 1),
    Limit("cpu", "tables", OURS[0], ("torch",), 1.0),
    Limit("cuda", "sweep", OURS[0], ("copy",), 1.05, lambda x: x["batch"] * x["seq"] >= 2**14),
    Limit("cuda", "sweep", OURS[2], ("copy",), 1.05, lambda x: x["batch"] * x["seq"] >= 2**14),
    Limit("cuda", "decode", OURS[2], LEAST, 1.15),
    Limit("cuda", "cache", OURS[0], LEAST, 1.3, lambda x: x["seq"] == 1),
    Limit("cuda", "cache", OURS[0], PEERS, 0.67, lambda x: x["seq"] == 1),
    *(Limit("cuda", group, OURS[0], PEERS, 1.0) for group in ("sweep", "decode", "shapes", "training", "norm")),
    *(Limit("cuda", group, OURS[2], WAYS, 1.0) for group in ("sweep", "decode", "shapes")),
]


def limits(lines: list[dict]) -> str:
    """Returns the limits that torch_rope must keep, and the worst case of each limit."""
    rows = []
    for limit in LIMITS:
        if limit.device != lines[0]["device"]:
            continue
        found = []
        for ours in timed(lines, group=limit.group, implementation=limit.ours):
            others = [x for x in timed(lines, case=ours["case"]) if x["implementation"] in limit.others]
            if others and limit.fit(ours):
                found.append((max(over(ours, x) for x in others), ours))
        if found:
            worst, where = max(found, key=lambda pair: pair[0])
            holds = "" if worst <= limit.most else " **exceeded**"
            name = limit.others[0] if len(limit.others) == 1 else "the fastest of " + ", ".join(limit.others)
            rows.append(
                [f"{limit.group}: {limit.ours} / {name}", f"{limit.most:g}", ratio(worst) + holds, label(where)]
            )
    return markdown(["time / time", "limit", "worst", "worst case"], rows)


def not_timed(lines: list[dict]) -> str:
    """Returns the reasons why implementations were not timed, and the number of cases for each reason."""
    counts: dict[tuple, list] = {}
    for x in lines:
        if x["kind"] == "sample" and x["status"] != "timed":
            reason = "the error is larger than rounding explains" if x["status"] == "wrong" else x["reason"]
            counts.setdefault((x["implementation"], x["status"], reason), []).append(x)
    order = implementations(lines)
    rows = [
        [name, status, reason, str(len(found))]
        for (name, status, reason), found in sorted(counts.items(), key=lambda item: order.index(item[0][0]))
    ]
    absent = dict.fromkeys(name for name, _, reason, _ in rows if reason.startswith("not installed"))
    named = f"Not installed: {', '.join(absent)}.\n\n" if absent else ""
    return named + markdown(["implementation", "status", "reason", "cases"], rows)


def accuracy(dtype: str, figure: str) -> Callable[[list[dict]], str]:
    """Makes a block with one figure, in some octaves of positions, for frequencies of the kind default."""
    octaves = (0, 10, 14, 17, 20, 24)

    def block(lines: list[dict]) -> str:
        fields = {"kind": "accuracy", "dtype": dtype, "scaling": "default"}
        measured = [x for x in lines if fields.items() <= x.items() and figure in x]
        rows = []
        for name in dict.fromkeys(x["implementation"] for x in measured):
            found = {x["octave"]: x[figure] for x in measured if x["implementation"] == name}
            rows.append([name, *(number(found[o]) if o in found else "not finite" for o in octaves)])
        return markdown([f"{dtype}, positions from"] + [f"{2**o}" for o in octaves], rows)

    return block


def number(x: float) -> str:
    return f"{x:.2f}" if 0.1 <= x < 100 else f"{x:.0f}" if 100 <= x < 1e4 else f"{x:.1e}"


def scalings(lines: list[dict]) -> str:
    """Returns the largest float32 errors, in ulps, at positions from 131072 to 262143, for each kind of frequencies."""
    lines = [x for x in lines if x["kind"] == "accuracy" and x.get("dtype") == "float32" and x.get("octave") == 17]
    kinds = [*dict.fromkeys(x["scaling"] for x in lines)]
    rows = []
    for name in dict.fromkeys(x["implementation"] for x in lines):
        found = {x["scaling"]: x["max_ulp"] for x in lines if x["implementation"] == name and "max_ulp" in x}
        rows.append([name, *(number(found[k]) if k in found else "" for k in kinds)])
    return markdown(["", *kinds], rows)


def scores(lines: list[dict]) -> str:
    """Returns the effect on attention: the mean error of a score, and the weight that moves to other keys."""
    lines = [x for x in lines if x["kind"] == "scores" and x.get("scaling") == "default" and "mean_error" in x]
    columns = [(t, n) for t in ("float32", "bfloat16") for n in (131072, 1048576)]
    rows = []
    for name in dict.fromkeys(x["implementation"] for x in lines):
        found = {(x["dtype"], x["tokens"]): x for x in lines if x["implementation"] == name}
        cells = [f"{c['mean_error']:.1e}, {c['moved_weight']:.2%}" if (c := found.get(key)) else "" for key in columns]
        rows.append([name, *cells])
    names = [f"{t}, {n >> 10}k" if n < 2**20 else f"{t}, {n >> 20}M" for t, n in columns]
    return markdown(["mean error of a score, moved weight", *names], rows)


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
    rows = []
    for name, what in STEPS.items():
        cells = []
        for fields, figure, form in (
            ({"kind": "accuracy", "octave": 17}, "max_ulp", number),
            ({"kind": "scores", "tokens": 131072}, "moved_weight", "{:.2%}".format),
        ):
            for dtype in ("float32", "bfloat16"):
                wanted = fields | {"scaling": "default", "implementation": name, "dtype": dtype}
                (found,) = [x for x in lines if wanted.items() <= x.items()]
                cells.append(form(found[figure]))
        rows.append([what, name, *cells])
    header = ["", "implementation", "largest error, float32", "largest error, bfloat16"]
    return markdown([*header, "moved weight, float32", "moved weight, bfloat16"], rows)


BLOCKS: dict[str, Callable[[list[dict]], str]] = {
    "machine": machine,
    "speed": speed,
    "front": front,
    "reasons": reasons,
    "whole models": whole_models,
    "rotary functions": rotary_functions,
    "diffusion blocks": diffusion_blocks,
    "details": details(group="sweep", seq=4096),
    "mini-vllm": details(group="mini-vllm"),
    **{name: group(name) for name in ("sweep", "decode", "shapes", "training", "norm", "norm-over-heads")},
    **{name: group(name) for name in ("cache", "quantised", "host", "tables")},
    "wins": wins,
    "limits": limits,
    "not timed": not_timed,
    "ulps float32": accuracy("float32", "max_ulp"),
    "ulps bfloat16": accuracy("bfloat16", "max_ulp"),
    "ulps float16": accuracy("float16", "max_ulp"),
    "mean ulps float32": accuracy("float32", "mean_ulp"),
    "scalings": scalings,
    "scores": scores,
    "story": story,
}
BLOCK = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.S)


def filled(text: str, lines: list[dict]) -> str:
    """Returns the text of a page with its blocks made from lines."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]](lines)}\n\n{found[3]}", text)


def page_of(lines: list[dict]) -> str:
    """Returns a page of all tables that have rows. Those that only explain or repeat figures are left out."""
    left_out = "reasons", "story", "wins"
    found = {name: block(lines).strip() for name, block in BLOCKS.items() if name not in left_out}
    blocks = [f"## {name}\n\n{text}" for name, text in found.items() if set(text.splitlines()[-1]) - set("| -")]
    return f"# {lines[0]['name']}\n\n" + "\n\n".join(blocks) + "\n"


def write_all(check: bool) -> list[Path]:
    """Returns the pages whose tables do not show the current results. Writes these pages, unless check is True."""
    wanted = {page: filled(page.read_text(), cpu_results()) for page in PAGES}
    for path in sorted(FOLDER.glob("*.jsonl")):
        if path != REFERENCE:
            wanted[path.with_suffix(".md")] = page_of(read(path))
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text() != text]
    for page in stale if not check else []:
        page.write_text(wanted[page])
    return stale
