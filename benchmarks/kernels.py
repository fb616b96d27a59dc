"""Collects what the compiler reports about the CUDA kernels: registers, spills, and the width of loads and stores.

Usage: python benchmarks/kernels.py [--cuobjdump PATH]

Compiles every csrc/cuda/*.cu and writes kernels.json and kernels.md to benchmarks/results. No GPU is needed. cuobjdump,
which comes with CUDA and with triton, reads the machine code; without it, the figures of the machine code are left out.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ["80", "90", "100", "120"]
FLAGS = ["-std=c++20", "-O3", "--fmad=false", "-I", "csrc"]
SHOWN = "sm_90"


def find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return (
        shutil.which("nvcc")
        or shutil.which("nvcc", path=f"{home}/bin")
        or sys.exit(f"nvcc was not found on PATH or in {home}/bin; set CUDA_HOME")
    )


def find_cuobjdump(given: str | None) -> str | None:
    folders = [os.environ["PATH"], str(Path(find_nvcc()).parent)]
    if triton := importlib.util.find_spec("triton"):
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return given or shutil.which("cuobjdump", path=os.pathsep.join(folders))


def run(*command, env=None) -> str:
    """Returns the output of a command; ends the program if the command fails."""
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


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
            "spill_stores": number(r"(\d+) bytes spill stores", frame),
            "spill_loads": number(r"(\d+) bytes spill loads", frame),
            "shared": number(r"(\d+) bytes smem"),
            "constant": sum(map(int, re.findall(r"(\d+) bytes cmem", entry))),
        }
    return result


def instructions(sass: str) -> dict:
    """Returns figures of the machine code of one architecture, as a dict from mangled names."""
    result = {}
    for function in re.split(r"Function : ", sass)[1:]:
        name = function.split(None, 1)[0]
        codes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", function)
        counts = Counter(code for code in codes if code != "NOP")
        loads, stores = Counter(), Counter()
        kinds = {"LDG": loads, "LD": loads, "STG": stores, "ST": stores}  # LD and ST use generic addresses
        for code, n in counts.items():
            kind, *parts = code.split(".")
            if kind in kinds:
                width = next((part for part in parts if re.fullmatch(r"256|128|64|[US](8|16)", part)), "32")
                kinds[kind][width] += n
        result[name] = {
            "instructions": counts.total(),
            "loads": dict(loads),
            "stores": dict(stores),
            "local": sum(n for code, n in counts.items() if code.split(".")[0] in ("LDL", "STL")),
        }
    return result


def readable(names: list[str]) -> dict:
    """Returns a dict from mangled names to kernel<template arguments>, without namespaces and parameters."""
    result = {}
    for name, full in zip(names, run("c++filt", *names).splitlines(), strict=True):
        full = re.sub(r"\(anonymous namespace\)::|\b[a-z]\w*::|^void ", "", full)
        full = re.sub(r"\((?:\w+)\)(?=-?\d)", "", full)  # c++filt writes (int)4 for 4
        result[name] = re.sub(r"__(nv_)?", "", full).partition("(")[0]
    return result


def compile_all(cuobjdump: str | None) -> list[dict]:
    nvcc = find_nvcc()
    rows = []
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "kernels.o"
            targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
            log = run(nvcc, *FLAGS, *targets, "--threads=0", "-Xptxas=-v", "-c", source, "-o", output)
            found = resources(log)
            if cuobjdump:
                # cuobjdump calls nvdisasm, which it looks for in PATH.
                path = {"PATH": f"{Path(cuobjdump).parent}{os.pathsep}{os.environ['PATH']}"}
                for arch in ARCHS:
                    sass = run(cuobjdump, "--dump-sass", "-arch", f"sm_{arch}", output, env=os.environ | path)
                    for name, figures in instructions(sass).items():
                        found[name, f"sm_{arch}"] |= figures
        names = readable(sorted({name for name, _ in found}))
        rows += [
            {"file": source.name, "kernel": names[name], "arch": arch, **figures}
            for (name, arch), figures in sorted(found.items(), key=lambda item: (item[0][1], names[item[0][0]]))
        ]
    return rows


def widths(counts: dict) -> str:
    order = "256", "128", "64", "32", "U16", "S16", "U8", "S8"
    return ", ".join(f"{counts[width]} x {width}" for width in order if width in counts)


def markdown(rows: list[dict]) -> str:
    release = re.search(r"release [\d.]+", run(find_nvcc(), "--version")).group()
    lines = [
        "# Kernels",
        "",
        f"Figures of the kernels that nvcc ({release}, {' '.join(FLAGS)}) compiles. No GPU was used, and no time is measured.",
        "Loads and stores of global memory are given as instructions x bits. A kernel has loads for every kind of positions,",
        "tables and frequencies; one call executes few of them. Kernels of doubles have 40 bytes of stack for sincos of large",
        "angles.",
        "",
        "- `rotate_kernel<dtype, channels of a vector, into a cache, interleaved, offsets>`",
        "- `norm_kernel` and `norm_backward_kernel`: `<dtype, channels of a vector, a vector is one access, a warp holds a head, interleaved>`",
        "- `table_backward_kernel<dtype, channels of a vector, interleaved>`",
        "- `cos_sin_kernel<dtype, channels of a vector, several axes>`",
        "",
    ]
    lines += [
        f"{SHOWN}:",
        "",
        "| kernel | registers | stack | spills | instructions | loads | stores | local |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["arch"] == SHOWN:
            sass = [str(row.get("instructions", "")), *(widths(row.get(kind, {})) for kind in ("loads", "stores"))]
            spills = row["spill_stores"] + row["spill_loads"]
            cells = [f"`{row['kernel']}`", row["registers"], row["stack"], spills, *sass, row.get("local", "")]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append("")
    for arch in dict.fromkeys(row["arch"] for row in rows):
        of = [row for row in rows if row["arch"] == arch]
        spilling = [row for row in of if row["spill_stores"] + row["spill_loads"]]
        line = f"- {arch}: {len(of)} kernels, at most {max(row['registers'] for row in of)} registers, "
        line += f"{len(spilling)} spill" + (
            f" (`{'`, `'.join(row['kernel'] for row in spilling)}`)" if spilling else ""
        )
        line += f", {sum(row['stack'] > 0 for row in of)} with a stack frame"
        if "local" in of[0]:
            line += f", {sum(row['local'] > 0 for row in of)} use local memory"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuobjdump", help="path of cuobjdump; nvdisasm must be in the same folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    args = parser.parse_args()
    cuobjdump = find_cuobjdump(args.cuobjdump)
    if not cuobjdump:
        print("cuobjdump was not found; the figures of the machine code are left out")
    rows = compile_all(cuobjdump)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "kernels.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    (args.out / "kernels.md").write_text(markdown(rows))
    print(markdown(rows).rpartition("\n\n")[2], end="")


if __name__ == "__main__":
    main()
