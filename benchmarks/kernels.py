"""Judges the CUDA kernels without a GPU: what the compiler made of them, how a call is divided among thread blocks, and the
time that a simple model predicts. No time is measured.

Compiles every csrc/cuda/*.cu with nvcc, reads the machine code with cuobjdump, follows one thread through it (sass.py),
asks csrc/cuda/plan.h for the launch plans (plan.py), and writes kernels.json and kernels.md to benchmarks/results.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from . import plan, sass

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "kernels.json"
ARCHS = ["80", "90", "100", "120"]
FLAGS = ["-std=c++20", "-O3", "--fmad=false", "-I", "csrc"]
SHOWN = "sm_90"

# The kernels that are judged, in bfloat16 with half-split pairs: (name, its template arguments, the call that it runs).
JUDGED = [
    ("rotate", r"rotate_kernel<bfloat16, 8, false, false, int, false>", "rotate"),
    ("cache", r"rotate_kernel<bfloat16, 8, true, false, int, false>", "cache"),
    ("norm", r"norm_kernel<bfloat16, 8, true, false, int, false, false>", "norm cache"),
    ("quantised cache", r"norm_kernel<bfloat16, 8, true, false, int, true, true>", None),
    ("norm backward", r"norm_backward_kernel<bfloat16, 8, true, false, int, false>", None),
]
CALLS = ["rotate", "cache", "norm cache"]
HEADS = [(32, 8), (8, 1), (64, 8)]
TOKENS = [1, 16, 128, 512, 1024, 2048, 3072, 4096, 32768]

# A multiprocessor of each architecture: threads, thread blocks, kilobytes of shared memory, and the addresses of the
# constant bank at which a kernel finds blockDim and its parameters.
LIMITS = {"80": (2048, 32, 164), "90": (2048, 32, 228), "100": (2048, 32, 228), "120": (1536, 24, 100)}
BANK = {"80": (0, 0x160), "90": (0, 0x210), "100": (0x360, 0x380), "120": (0x360, 0x380)}
THREADS = 128  # of a thread block

# The model of an H200. Only the bandwidth was ever measured; the others are assumptions.
BANDWIDTH = 4.3e12  # bytes a second
CLOCK = 1.755e9  # cycles a second
LATENCY = 0.4e-6  # seconds from a load to its value
BUSY_LATENCY = 0.8e-6  # the same while memory is busy
LAUNCH = 1.0e-6  # seconds of a kernel that does nothing
CYCLES = 2  # of a thread for an instruction: some wait for the one before
ISSUED = 4  # instructions a cycle and multiprocessor
# Bytes that a multiprocessor must be loading at any time. Half of the bandwidth is for loads, half for stores.
LITTLE = BANDWIDTH / 2 / plan.PROCESSORS * BUSY_LATENCY


# ---- tools ----


def folders() -> list[str]:
    """Returns the folders that may hold the programs of CUDA: those of PATH, of CUDA itself, of its packages and of triton."""
    found = [*os.environ["PATH"].split(os.pathsep), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    with contextlib.suppress(ModuleNotFoundError):
        found += [f"{path}/bin" for path in importlib.util.find_spec("nvidia.cu13").submodule_search_locations]
    if triton := importlib.util.find_spec("triton"):
        found.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return found


def find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join(folders()))


def run(program: str, *arguments) -> str:
    """Returns the output of a program of CUDA; ends this program if that one fails."""
    command = [find(program) or sys.exit(f"{program} was not found; put it on PATH, or set CUDA_HOME"), *arguments]
    # cuobjdump calls nvdisasm, which it looks for in PATH.
    environment = os.environ | {"PATH": os.pathsep.join(folders())}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def releases() -> dict:
    return {name: re.search(r"release [\d.]+", run(name, "--version")).group() for name in ("nvcc", "cuobjdump")}


# ---- what the compiler made of a kernel ----


def resources(log: str) -> dict:
    """Returns the figures that ptxas prints, as a dict from (mangled name, architecture)."""
    result = {}
    for entry in log.split("Compiling entry function ")[1:]:
        name, arch = re.match(r"'(\S+)' for '(\w+)'", entry).groups()
        frame = re.search(rf"Function properties for {re.escape(name)}\s+(.*)", entry).group(1)

        def number(pattern, text=entry):
            found = re.search(pattern, text)
            return int(found.group(1)) if found else 0

        result[name, arch] = {
            "registers": number(r"Used (\d+) registers"),
            "stack": number(r"(\d+) bytes stack frame", frame),
            "spills": number(r"(\d+) bytes spill stores", frame) + number(r"(\d+) bytes spill loads", frame),
            "shared": number(r"(\d+) bytes smem"),
        }
    return result


def instructions(code: dict[int, sass.Instruction]) -> dict:
    """Returns figures of the machine code of a kernel."""
    counts = Counter(instruction.op for instruction in code.values() if instruction.op != "NOP")
    loads, stores = Counter(), Counter()
    kinds = {"LDG": loads, "LD": loads, "STG": stores, "ST": stores}  # LD and ST use generic addresses
    for op, n in counts.items():
        kind, *parts = op.split(".")
        if kind in kinds:
            width = next((part for part in parts if re.fullmatch(r"256|128|64|[US](8|16)", part)), "32")
            kinds[kind][width] += n
    return {
        "instructions": counts.total(),
        "loads": dict(loads),
        "stores": dict(stores),
        "local": sum(n for op, n in counts.items() if op.split(".")[0] in ("LDL", "STL")),
    }


def readable(names: list[str]) -> dict:
    """Returns a dict from mangled names to kernel<template arguments>, without namespaces and parameters."""
    result = {}
    for name, full in zip(names, run("c++filt", *names).splitlines(), strict=True):
        full = re.sub(r"\(anonymous namespace\)::|\b[a-z]\w*::|^void ", "", full)
        full = re.sub(r"\((?:\w+)\)(?=-?\d)", "", full)  # c++filt writes (int)4 for 4
        result[name] = re.sub(r"__(nv_)?", "", full).partition("(")[0]
    return result


def compile_kernels(source: Path, archs: list[str], output: Path) -> str:
    """Compiles a file to a fatbin and returns what ptxas prints."""
    threads = f"--threads={os.environ.get('MAX_JOBS', 0)}"  # 0: as many as there are processors
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return run("nvcc", *FLAGS, *targets, threads, "-Xptxas=-v", "-fatbin", source, "-o", output)


def read_kernels(log: str, output: Path) -> tuple[list[dict], dict]:
    """Returns a row of figures for each kernel of a fatbin and each architecture, and the code of each as a dict from kernel
    and architecture."""
    found, codes = resources(log), {}
    names = readable(sorted({name for name, _ in found}))
    for arch in sorted({arch for _, arch in found}):
        for name, code in sass.functions(run("cuobjdump", "--dump-sass", "-arch", arch, output)).items():
            codes[names[name], arch] = code
            found[name, arch] |= instructions(code)
    rows = [
        {"kernel": names[name], "arch": arch, **{key: value for key, value in figures.items() if value}}
        for (name, arch), figures in sorted(
            found.items(), key=lambda item: (len(item[0][1]), item[0][1], names[item[0][0]])
        )
    ]
    return rows, codes


# ---- what a thread executes ----


def follow(code, arch: str, planned: dict, share: int = 0) -> list[sass.Step] | None:
    """Returns the instructions that the first thread of a share of the heads executes in a planned call, or None if they
    depend on what is not known."""
    dims, start = BANK[arch.removeprefix("sm_")]
    bank = bytearray(start) + planned["parameters"]
    for i, size in enumerate(planned["block"]):
        bank[dims + 4 * i : dims + 4 * i + 4] = size.to_bytes(4, "little")
    special = {f"SR_{kind}.{axis}": 0 for kind in ("TID", "CTAID") for axis in "XYZ"} | {"SR_CTAID.Y": share}
    # The position and the slot of the token are 0.
    load = {"positions": 0, "slots": 0}.get
    with contextlib.suppress(sass.Unknown):
        return sass.Thread(code, bytes(bank), special, plan.tensor_at, lambda tensor, _: load(tensor)).run()


def is_head(step: sass.Step) -> bool:
    """Returns whether a step loads channels of a head."""
    return step.op.startswith("LDG") and step.tensor in ("q", "k", "v")


def stores_of(steps: list[sass.Step]) -> list[int]:
    """Returns where a thread stores to memory: a rotation stores nothing but heads."""
    return [i for i, step in enumerate(steps) if step.op.startswith("STG")]


def loads_of_heads(steps: list[sass.Step]) -> int:
    """Returns how often a thread loads heads, all that it loads at once counted as one."""
    kinds = "".join("L" if is_head(step) else "S" for step in steps if is_head(step) or step.op.startswith("STG"))
    return len(re.findall("L+", kinds))


def chain(steps: list[sass.Step]) -> int | None:
    """Returns the number of instructions from the first that needs the position to the first load of a table row, both
    included."""
    first = next((i for i, step in enumerate(steps) if "positions" in step.uses), None)
    table = next((i for i, step in enumerate(steps) if step.tensor in ("cos", "sin")), None)
    return table - first + 1 if first is not None and table is not None else None


def hot_loop(steps: list[sass.Step]) -> dict:
    """Returns figures of the part that a thread repeats for the heads of a tensor: the instructions from one store of a head
    until the thread reaches the same store again."""
    stores = stores_of(steps)
    again = [i for i in stores if steps[i].pc == steps[stores[0]].pc] if stores else []
    if len(again) < 3:
        return {}
    length = statistics.mode(b - a for a, b in zip(again, again[1:]))  # noqa: B905
    start = next(a for a, b in zip(again, again[1:]) if b - a == length)  # noqa: B905
    loop = steps[start : start + length]
    bits = [int((re.findall(r"\.(64|128|256)\b", step.op) or ["32"])[0]) for step in loop if is_head(step)]
    return {
        "loop": length,
        "prmt": sum(step.op.startswith("PRMT") for step in loop),
        "at_once": sum(bits) // 8,
    }


def resident(registers: int, threads: int, shared: int, arch: str) -> int:
    """Returns the thread blocks that a multiprocessor holds. Each of its four quarters has 16384 registers, and a warp takes
    a multiple of 256 of them; a thread block takes 1 KB of shared memory besides its own."""
    most_threads, most_blocks, kilobytes = LIMITS[arch.removeprefix("sm_")]
    warps = -(-threads // 32)
    in_registers = 4 * (16384 // (-(-registers * 32 // 256) * 256)) // warps
    return min(most_threads // (warps * 32), most_blocks, in_registers, kilobytes * 1024 // (shared + 1024))


def judge(rows: list[dict], codes: dict) -> list[dict]:
    """Returns the figures of the judged kernels."""
    result = []
    for row in rows:
        for name, pattern, call in JUDGED:
            if not re.fullmatch(pattern, row["kernel"]):
                continue
            held = resident(row["registers"], THREADS, row.get("shared", 0), row["arch"])
            figures = {key: row.get(key, 0) for key in ("registers", "spills", "stack", "shared")}
            figures |= {"thread_blocks": held, "warps": held * THREADS // 32}
            if call:
                code = codes[row["kernel"], row["arch"]]
                few = follow(code, row["arch"], plan.plan(call, 1, HEADS[0]))
                many = follow(code, row["arch"], plan.plan(call, TOKENS[-1], (256, 8)))
                figures["chain"] = chain(few or [])
                figures |= hot_loop(many or [])
                if "at_once" in figures:
                    figures["in_flight"] = held * THREADS * figures["at_once"]
            result.append({"name": name, "kernel": row["kernel"], "arch": row["arch"], **figures})
    return sorted(result, key=lambda row: [name for name, *_ in JUDGED].index(row["name"]))


# ---- how a call is divided, and the predicted time ----


def listed_heads(call: str, heads: tuple[int, int]) -> int:
    """Returns the number of heads of q, k and, for a cache, v."""
    return heads[0] + heads[1] * (2 if "cache" in call else 1)


def divide(call: str, heads: tuple[int, int], tokens: int, kernel: dict) -> dict:
    """Returns how a call is divided among the thread blocks of an H200. kernel: the judged figures of its kernel.

    A thread slot is one step of one team, in which it can take one head of one token."""
    planned = plan.plan(call, tokens, heads)
    (x, y, z), (groups, shares, _) = planned["block"], planned["grid"]
    steps = -(-planned["heads_per_thread_block"] // y)
    thread_blocks = groups * shares
    held = resident(kernel["registers"], x * y * z, kernel["shared"], kernel["arch"])
    return {
        "thread_blocks": thread_blocks,
        "threads": x * y * z,
        "waves": round(thread_blocks / (held * plan.PROCESSORS), 2),
        "slots_used": round(listed_heads(call, heads) * tokens / (thread_blocks * y * z * steps), 3),
    }


def predict(call: str, heads: tuple[int, int], tokens: int, divided: dict, code) -> dict:
    """Returns the predicted time of a call on an H200, in microseconds, and its parts."""
    planned = plan.plan(call, tokens, heads)
    threads = [follow(code, SHOWN, planned, share) for share in range(planned["grid"][1])]
    if None in threads:
        return {}
    first_store = stores_of(threads[0])[0]
    rounds = max(1, math.ceil(divided["waves"])) * max(loads_of_heads(steps) for steps in threads)
    executed = statistics.mean(map(len, threads)) * divided["thread_blocks"] * -(-divided["threads"] // 32)
    row_bytes = plan.HEAD_DIM * 4 + 8 + 8 * ("cache" in call)  # of a token: cos and sin, position and slot
    first = 2 * LATENCY + first_store * CYCLES / CLOCK  # the position, then the row of the table
    parts = {
        "launch": LAUNCH,
        "latency": first + (rounds - 1) * BUSY_LATENCY,
        "issue": executed / (plan.PROCESSORS * ISSUED * CLOCK),
        "memory": tokens * (listed_heads(call, heads) * plan.HEAD_DIM * 2 * 2 + row_bytes) / BANDWIDTH,
    }
    time = LAUNCH + max(parts["latency"], first + max(parts["issue"], parts["memory"]))
    return {
        **{name: round(seconds * 1e6, 2) for name, seconds in parts.items()},
        "predicted": round(time * 1e6, 1),
        "bound": max(parts, key=parts.get),
    }


def plans(judged: list[dict], codes: dict | None = None) -> list[dict]:
    """Returns a row for each judged call; without codes it has no predicted time."""
    kernels = {row["name"]: row for row in judged if row["arch"] == SHOWN}
    rows = []
    for name, _, call in JUDGED:
        for heads in HEADS if call and name in kernels else []:
            for tokens in TOKENS:
                row = divide(call, heads, tokens, kernels[name])
                if codes:
                    row |= predict(call, heads, tokens, row, codes[kernels[name]["kernel"], SHOWN])
                rows.append({"call": call, "heads": "/".join(map(str, heads)), "tokens": tokens, **row})
    return rows


# ---- files ----


def table(columns: dict[str, str], rows: list[dict]) -> list[str]:
    """Returns the lines of a table: columns are the headings and the keys of the rows."""
    cells = [[str(row.get(key, "")) if row.get(key) is not None else "" for key in columns.values()] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in [list(columns), ["---"] * len(columns), *cells]]


def widths(counts: dict) -> str:
    order = "256", "128", "64", "32", "U16", "S16", "U8", "S8"
    return ", ".join(f"{counts[width]} x {width}" for width in order if width in counts)


def markdown(found: dict) -> str:
    kernels, judged = found["kernels"], found["judged"]
    lines = [
        "# Kernels",
        "",
        f"nvcc ({found['nvcc']}, {' '.join(FLAGS)}) compiled the kernels and cuobjdump ({found['cuobjdump']}) read their code.",
        "`python -m benchmarks kernels` writes this page. No GPU was used: every time here is predicted, none is measured.",
        "",
        "## The judged kernels",
        "",
        "These take bfloat16 with half-split pairs, vectors of 8 channels, and offsets of 32 bits.",
        "",
        "- Thread blocks and warps are those that a multiprocessor holds at the same time, in thread blocks of 128 threads.",
        "- Bytes in flight are those of the heads that all these threads load at once. Little's law asks for "
        f"{LITTLE / 1000:.0f} KB: half of",
        f"  {BANDWIDTH / 1e12} TB/s over {plan.PROCESSORS} multiprocessors, if a load of a busy memory takes {BUSY_LATENCY * 1e9:.0f} ns.",
        "- Position to table: the instructions that the first thread of a call on one token executes from the first that needs",
        "  the position to the first load of a table row, both included. The call has int64 positions, float32 tables whose",
        "  rows are aligned, and slots if it writes to a cache.",
        "- Hot loop: the instructions that a thread executes from one store of a head until it reaches that store again, while",
        "  it stays in one tensor. PRMT is how many of them rearrange bytes.",
        "",
    ]
    shown = [
        row
        | {
            "in_flight": f"{row['in_flight'] / 1000:.0f} KB" if "in_flight" in row else None,
            "kernel": f"`{row['kernel']}`",
        }
        for row in judged
    ]
    lines += table(
        {
            "kernel": "kernel",
            "architecture": "arch",
            "registers": "registers",
            "spills": "spills",
            "stack": "stack",
            "thread blocks": "thread_blocks",
            "warps": "warps",
            "in flight": "in_flight",
            "position to table": "chain",
            "hot loop": "loop",
            "PRMT": "prmt",
        },
        shown,
    )
    lines += [
        "",
        "## The judged calls, predicted for an H200",
        "",
        "Heads are those of q and k, of 128 channels; a cache takes k and v, with slots. A call in place has the same plan as a",
        "call with a new result. Waves are thread blocks over those that the GPU holds at once. A thread slot is one step of",
        "one team, in which it can take one head of one token.",
        "",
        "The predicted time is launch + the first of latency + the largest of what is left of latency, issue and memory. Its",
        "bound is the largest of the four:",
        "",
        f"- launch: {LAUNCH * 1e6} us, a kernel that does nothing;",
        f"- latency: first {LATENCY * 1e9:.0f} ns for the position, as much for the row of the table, and {CYCLES} cycles at {CLOCK / 1e9} GHz",
        "  for each instruction that a thread executes before its first store. What is left is the number of times, less one,",
        f"  that a multiprocessor must wait for heads, one after another, {BUSY_LATENCY * 1e9:.0f} ns each;",
        f"- issue: all instructions of all warps, {ISSUED} a cycle and multiprocessor;",
        f"- memory: all bytes that are read and written, at {BANDWIDTH / 1e12} TB/s.",
        "",
    ]
    times = ("predicted", "launch", "latency", "issue", "memory")
    lines += table(
        {
            "call": "call",
            "heads": "heads",
            "tokens": "tokens",
            "thread blocks": "thread_blocks",
            "threads": "threads",
            "waves": "waves",
            "slots used": "slots_used",
            **{f"{name} us": name for name in times},
            "bound": "bound",
        },
        [row | {"slots_used": f"{row['slots_used']:.0%}"} for row in found["plans"]],
    )
    lines += [
        "",
        "## All kernels",
        "",
        "Loads and stores of global memory are given as instructions x bits. A kernel has loads for every kind of positions,",
        "tables and frequencies; one call executes few of them. Kernels of doubles have 40 bytes of stack for sincos of large",
        "angles.",
        "",
        "- `rotate_kernel<dtype, channels of a vector, into a cache, interleaved, offsets, general>`",
        "- `norm_backward_kernel<dtype, channels of a vector, a vector is one access, interleaved, offsets, general>`",
        "- `norm_kernel`: the same, and whether it also normalises v and writes to quantised caches",
        "- `norm_wide_kernel` and `norm_wide_backward_kernel`, for heads that no warp holds at once, `norm_over_heads_kernel` and",
        "  `norm_over_heads_backward_kernel`: `<dtype, channels of a vector, a vector is one access, interleaved>`",
        "- `table_backward_kernel<dtype, channels of a vector, interleaved>`",
        "- `cos_sin_kernel<dtype, channels of a vector, several axes>`",
        "",
    ]
    for arch in dict.fromkeys(row["arch"] for row in kernels):
        of = [row for row in kernels if row["arch"] == arch]
        spilling = [f"`{row['kernel']}`" for row in of if "spills" in row]
        line = f"- {arch}: {len(of)} kernels, at most {max(row['registers'] for row in of)} registers, {len(spilling)} spill"
        line += f" ({', '.join(spilling)})" if spilling else ""
        line += f", {sum('stack' in row for row in of)} with a stack frame, {sum('local' in row for row in of)} use local memory"
        lines.append(line)
    long = [
        row
        | {"kernel": f"`{row['kernel']}`"}
        | {key: row.get(key, 0) for key in ("stack", "spills", "local")}
        | {kind: widths(row.get(kind, {})) for kind in ("loads", "stores")}
        for row in kernels
        if row["arch"] == SHOWN
    ]
    names = ["kernel", "registers", "stack", "spills", "instructions", "loads", "stores", "local"]
    lines += ["", f"{SHOWN}:", "", *table(dict(zip(names, names, strict=True)), long)]
    return "\n".join(lines) + "\n"


def compact(found: dict) -> str:
    """Returns JSON with one row in each line."""
    rows = {key: value for key, value in found.items() if isinstance(value, list)}
    lists = ",\n".join(f'"{key}": [\n' + ",\n".join(map(json.dumps, value)) + "\n]" for key, value in rows.items())
    rest = json.dumps({key: value for key, value in found.items() if key not in rows})
    return f"{rest[:-1]},\n{lists}}}\n"


def main(out: Path) -> int:
    found = releases()
    kernels, codes = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
            output = Path(folder) / source.with_suffix(".fatbin").name
            rows, more = read_kernels(compile_kernels(source, ARCHS, output), output)
            kernels += rows
            codes |= more
    judged = judge(kernels, codes)
    found |= {"judged": judged, "plans": plans(judged, codes), "kernels": kernels}
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernels.json").write_text(compact(found))
    (out / "kernels.md").write_text(markdown(found))
    print(f"{out / 'kernels.md'} is written.")
    return 0
