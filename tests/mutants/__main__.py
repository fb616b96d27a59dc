"""Checks the tests: plants mistakes in every back end, each of which the tests that `make test` runs must find.

Usage: python tests/mutants [cpu shared cuda metal python] [number ...]

All mistakes of a build are planted at once, in a copy of the tree under build/mutants, and an environment variable
selects one of them: see plant.py. session.py runs the tests for each of them. The mistakes themselves are in cpu.py,
cuda.py and so on. Mistakes in the Python package need no build: a copy of the tree has one of them at a time.
"""

import concurrent.futures
import importlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import plant

ROOT = Path(__file__).resolve().parents[2]
EMULATOR, SIMULATOR = "tests/backends/cuda/emulator", "tests/backends/metal/simulator"
COMPILE_SHADERS = f"""
import sys
sys.path[0] = "{SIMULATOR}"
import simulator
simulator.load()
import torch, torch_rope
x, one = torch.ones(1, 1, 2, device="mps"), torch.ones(1, device="mps")
qk, weights = (x, x), (x[0, 0], x[0, 0])
torch.ops.rope.rotate(x, inv_freq=one)
torch.ops.rope.norm_rotate_qk(*qk, *weights, inv_freq=one)
torch.ops.rope._norm_rotate_qk_backward(*qk, *qk, *weights, inv_freq=one)
torch.ops.rope._rotate_table_backward(*qk, *qk, one[None], one[None], None)
torch.ops.rope.cos_sin(one, one)
"""


@dataclass
class Build:
    """A copy of the tree that contains the mistakes of some tables."""

    tables: list[str]  # modules of this folder, such as cpu
    options: list[str] = field(default_factory=list)  # for pytest
    # Changes to the copy: file, regular expression, replacement.
    edits: list[tuple[str, str, str]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)  # builds the copy


BUILDS = {
    "plain": Build(
        ["cpu", "shared"],
        [],
        [("setup.py", '"-O3"', '"-O1"')],
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
    ),
    "emulated": Build(
        ["cuda"],
        ["--emulate=checked", "-k", "not address_sanitizer"],  # that test would build everything again
        [(f"{EMULATOR}/emulator.py", "-Werror ", "")],
        [sys.executable, "-c", f"import sys; sys.path[0] = '{EMULATOR}'; import emulator; emulator.build()"],
    ),
    "simulated": Build(
        ["metal"],
        ["--simulate"],
        [(f"{SIMULATOR}/metal/shim.h", "#define UNWATCHED .*\n", "\\0" + plant.HEADER)],
        [sys.executable, "-c", COMPILE_SHADERS],
    ),
}


def copy_of_tree(folder: Path, sources: dict[str, str]) -> None:
    """Copies the tree to a folder, with `sources` instead of these files.

    Writes only files that have changed, so that ninja compiles no others again.
    """
    there = set()
    for part in ("csrc", "shaders", "tests", "torch_rope", "benchmarks", "examples", "docs", "hub", "LICENSE", "setup.py", "pyproject.toml", "README.md"):  # fmt: skip
        for path in [ROOT / part, *(ROOT / part).rglob("*")]:
            if path.is_file() and path.suffix != ".pyc":
                name = path.relative_to(ROOT).as_posix()
                new = sources[name].encode() if name in sources else path.read_bytes()
                to = folder / name
                there.add(to)
                if not to.exists() or to.read_bytes() != new:
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.write_bytes(new)
                    shutil.copymode(path, to)
    for part in ("csrc", "shaders", "tests", "torch_rope"):
        for path in (folder / part).rglob("*"):
            if path.is_file() and path not in there and path.suffix != ".pyc":
                path.unlink()


def run(name: str, build: Build, chosen: list[str], numbers: list[int]) -> dict:
    """Builds a copy of the tree and runs the tests for its mutants in the chosen tables.

    numbers: those of the mutants, or empty for all. Returns the results: (table, number) -> {"caught": ..., ...}.
    """
    folder = ROOT / "build/mutants" / name
    folder.mkdir(parents=True, exist_ok=True)
    mutants, of_table = [], {}
    for table in build.tables:
        module = importlib.import_module(table)
        sources = {file: (ROOT / file).read_text() for file in module.FILES}
        own = plant.neighbours({f: t for f, t in sources.items() if f in module.NEIGHBOURS_IN}, module.NEIGHBOURS)
        own = plant.without(own, sources, module.EQUIVALENT)
        own += plant.written(sources, module.MUTANTS)
        for number, mutant in enumerate(own, start=len(mutants) + 1):
            mutant.number = number
            of_table[number] = table
        mutants += own

    header = ROOT / "build/mutants/mutant.h"
    if not header.exists() or header.read_text() != plant.HEADER:
        header.write_text(plant.HEADER)
    changed = {}
    for file in {m.file for m in mutants}:
        text = plant.planted((ROOT / file).read_text(), [m for m in mutants if m.file == file])
        # Shaders get the header from the simulator.
        include = "" if file.startswith("shaders/") else f"#ifndef __METAL_VERSION__\n#include <{header}>\n#endif\n"
        changed[file] = include + text
    for file, old, new in build.edits:
        text = changed.get(file) or (ROOT / file).read_text()
        if not re.search(old, text):
            raise SystemExit(f"{file} must contain {old}, but does not")
        changed[file] = re.sub(old, lambda found, new=new: new.replace("\\0", found[0]), text)
    copy_of_tree(folder, changed)

    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "TORCH_ROPE_CUDA": "0",
        "OMP_NUM_THREADS": "1",  # as in `make test`; a process with more threads could not be forked
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    begin = time.time()
    if build.command:
        made = subprocess.run(build.command, cwd=folder, env=environment, capture_output=True, text=True)
        if made.returncode:
            lines = (made.stdout + made.stderr).splitlines()
            print("\n".join([line for line in lines if "error:" in line or "rope_mutant" in line] or lines[-9:]))
            raise SystemExit(f"the build {name} failed; rope_mutant(N) in a line above is mutant N")
    print(f"{name}: {len(mutants)} mutants, built in {time.time() - begin:.0f} s", flush=True)

    wanted = [m for m in mutants if of_table[m.number] in chosen and (not numbers or m.number in numbers)]
    job = {
        "folder": str(folder),
        "options": build.options,
        "mutants": {m.number: [m.file, m.line, m.what, sys.modules[of_table[m.number]].TESTS] for m in wanted},
        "results": str(folder / "results.json"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "results.json").unlink(missing_ok=True)
    session = [sys.executable, Path(__file__).with_name("session.py"), folder / "job.json"]
    subprocess.run(session, cwd=folder, env=environment)
    if not (folder / "results.json").exists():
        raise SystemExit(f"the tests of the build {name} did not run")
    results = json.loads((folder / "results.json").read_text())
    return {(of_table[int(n)], int(n)): r for n, r in results.items()}


def run_python(numbers: list[int]) -> dict:
    """Runs the tests for the mutants of the Python package, each in a process of its own. Returns results as run() does.

    There is a copy of the tree for each job, and a copy has one mistake at a time.
    """
    import python

    jobs = int(os.environ.get("MAX_JOBS", "2"))
    known = ROOT / "build/mutants/python.json"  # the test that found each mistake last time
    kills = json.loads(known.read_text()) if known.exists() else {}
    folders, results, right = queue.Queue(), {}, {}
    for i in range(jobs):
        folder = ROOT / f"build/mutants/python-{i}"
        copy_of_tree(folder, {})
        folders.put(folder)

    def tests(folder: Path, *what: str) -> str | None:
        """Runs pytest. Returns the test that fails, or None."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *what]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
        if done.returncode == 0 or "no tests ran" in done.stdout:  # the known test has another name now
            return None
        return failed[1] if failed else done.stdout[-300:]

    def find(number: int) -> None:
        """Runs the tests of a mutant and records the result."""
        what, file, old, new, test = python.MUTANTS[number - 1]
        folder = folders.get()
        text = (folder / file).read_text()
        begin = time.time()
        try:
            start, end = plant.locate(file, text, old)
            (folder / file).write_text(text[:start] + new + text[end:])
            failed = (what in kills and tests(folder, kills[what])) or tests(folder, test)
            (folder / file).write_text(text)
            if failed and failed not in right:
                right[failed] = tests(folder, failed) is None
        finally:
            (folder / file).write_text(text)
            folders.put(folder)
        kills.pop(what, None)
        if failed:
            kills[what] = failed
        results["python", number] = {"caught": bool(failed)}
        by = f"            by {failed}{'' if right[failed] else ', WHICH FAILS WITHOUT THE MISTAKE'}" if failed else ""
        print(
            f"{number:4} {'caught' if failed else 'MISSED'} {time.time() - begin:5.1f} s  {file}: {what}\n{by}".rstrip(),
            flush=True,
        )

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(find, numbers or range(1, len(python.MUTANTS) + 1)))
    known.write_text(json.dumps(kills))
    if not all(right.values()):
        raise SystemExit("some tests fail without a mistake")
    return results


def main() -> None:
    numbers = [int(a) for a in sys.argv[1:] if a.isdigit()]
    tables = [t for build in BUILDS.values() for t in build.tables] + ["python"]
    chosen = [a for a in sys.argv[1:] if not a.isdigit()] or tables
    if unknown := set(chosen) - set(tables):
        raise SystemExit(f"there is no table {', '.join(unknown)}; the tables are {', '.join(tables)}")
    results, begin = {}, time.time()
    for name, build in BUILDS.items():
        if set(build.tables) & set(chosen):
            results |= run(name, build, chosen, numbers)
    if "python" in chosen:
        results |= run_python(numbers)
    print()
    for table in chosen:
        own = {n: r for (t, n), r in results.items() if t == table}
        missed = [n for n, r in own.items() if not r["caught"]]
        print(f"{table:8} {len(own):4} mutants  {len(own) - len(missed):4} caught  missed: {missed or 'none'}")
    print(f"{time.time() - begin:.0f} s")
    sys.exit(not all(r["caught"] for r in results.values()))


if __name__ == "__main__":
    main()
