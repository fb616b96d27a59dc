"""Checks the tests: plants mistakes in every back end, each of which the tests that `make test` runs must find.

Usage: python tests/mutants [cpu cuda metal python] [number ...]

All mistakes of a build are planted at once, in a copy of the tree under build/mutants, and an environment variable
selects one of them: see plant.py. session.py runs the tests for each of them. Mistakes in the Python package need no
build: a copy of the tree has one of them at a time. mistakes.py has the mistakes.

The exit status is 0 if the tests find every written mistake and nineteen of twenty generated ones. A generated mistake may
be none: if two members are always equal, for example, one may be read instead of the other.
"""

import concurrent.futures
import json
import os
import queue
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mistakes
import plant

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/mutants"
JOBS = int(os.environ.get("MAX_JOBS", "2"))
COPIED = "csrc shaders tests torch_rope benchmarks examples docs hub setup.py pyproject.toml README.md LICENSE Makefile"
ENVIRONMENT = {
    "TORCH_ROPE_CUDA": "0",
    "OMP_NUM_THREADS": "1",  # as in make test; a process with more threads could not be forked
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def copy_of_tree(folder: Path, sources: dict[str, str]) -> None:
    """Makes a folder a copy of the tree, with `sources` instead of these files. Writes only what has changed."""
    there = set()
    for part in COPIED.split():
        for path in [ROOT / part, *(ROOT / part).rglob("*")]:
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                name = path.relative_to(ROOT).as_posix()
                new = sources[name].encode() if name in sources else path.read_bytes()
                there.add(to := folder / name)
                if not to.exists() or to.read_bytes() != new:  # ninja compiles a file again if it was written
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.write_bytes(new)
                    shutil.copymode(path, to)
    for path in (folder / "tests").rglob("*.py"):
        if path not in there:
            path.unlink()


def copy_library(folder: Path) -> None:
    """Copies the compiled library, for a copy of the tree whose own build does not make one."""
    for file in [*(ROOT / "torch_rope").glob("_C*.so"), ROOT / "torch_rope/built_for_torch.txt"]:
        shutil.copy(file, folder / "torch_rope")


def run(name: str, numbers: list[int]) -> dict[str, list]:
    """Builds a copy of the tree with all mistakes of a build, and runs the tests for those with these numbers, or all.

    Returns for each number the test that found the mistake, or None, and whether the mistake is a written one.
    """
    build, folder = mistakes.BUILDS[name], BUILD / name
    sources = {file: (ROOT / file).read_text() for file in build.files}
    generated = plant.neighbours({f: sources[f] for f in build.neighbours_in}, mistakes.NEIGHBOURS + build.neighbours)
    mutants = generated + plant.written(sources, build.written)
    for number, mutant in enumerate(mutants, start=1):
        mutant.number = number

    folder.mkdir(parents=True, exist_ok=True)
    header = BUILD / "mutant.h"
    if not header.exists() or header.read_text() != plant.HEADER:
        header.write_text(plant.HEADER)
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(folder)}
    while True:
        changed = {}
        for file, text in sources.items():
            include = f"#ifndef __METAL_VERSION__\n#include <{header}>\n#endif\n"  # shaders get it from the simulator
            changed[file] = include + plant.planted(text, [m for m in mutants if m.file == file])
        for file, old, new in build.edits:
            text = changed.get(file) or (ROOT / file).read_text()
            if not re.search(old, text):
                raise SystemExit(f"{file} must contain {old}, but does not")
            changed[file] = re.sub(old, lambda found, new=new: new.replace("\\0", found[0]), text)
        copy_of_tree(folder, changed)
        if name != "cpu":
            copy_library(folder)
        made = subprocess.run(
            [sys.executable, *build.command], cwd=folder, env=environment, capture_output=True, text=True
        )
        if made.returncode == 0:
            break
        # A neighbour that another struct lacks does not compile. The message shows the line, and where the name begins.
        output = made.stdout + made.stderr
        wrong = set()
        for path, line, column in re.findall(r"^(\S+?):(\d+):(\d+): error:", output, re.M):
            text, planted = (folder / path).read_text().splitlines()[int(line) - 1], r"rope_mutant\((\d+)\)"
            before = re.findall(planted, text[: int(column)])  # none before a cast
            wrong |= {int(n) for n in before[-1:] or re.findall(planted, text)[:1]}
        wrong &= {m.number for m in generated if m in mutants}
        if not wrong:
            raise SystemExit(f"{output[-5000:]}\nthe build {name} failed; rope_mutant(N) in a line above is mutant N")
        mutants = [m for m in mutants if m.number not in wrong]

    results = folder / "results.json"
    results.unlink(missing_ok=True)
    chosen = {m.number: f"{m.file}:{m.line}: {m.what}" for m in mutants if not numbers or m.number in numbers}
    job = {"options": build.options, "tests": build.tests, "mutants": chosen, "results": str(results)}
    (folder / "job.json").write_text(json.dumps(job))
    session = [sys.executable, Path(__file__).with_name("session.py"), folder / "job.json"]
    subprocess.run(session, cwd=folder, env=environment)
    if not results.exists():
        raise SystemExit(f"the tests of the build {name} did not run")
    return {n: [test, int(n) > len(generated)] for n, test in json.loads(results.read_text()).items()}


def run_python(numbers: list[int]) -> dict[str, list]:
    """Runs the tests of each mistake of the Python package in a process of its own. Returns results as run() does."""
    folders: queue.Queue[Path] = queue.Queue()
    for i in range(JOBS):
        copy_of_tree(folder := BUILD / f"python-{i}", {})
        copy_library(folder)
        folders.put(folder)

    def find(number: int) -> tuple[str, list]:
        what, file, old, new, test = mistakes.PYTHON[number - 1]
        folder = folders.get()
        source = folder / "torch_rope" / file
        text = source.read_text()
        start, end = plant.locate(file, text, old)
        source.write_text(text[:start] + new + text[end:])
        command = [sys.executable, "-m", "pytest", "-qx", "-pno:cacheprovider", "-pno:xdist", f"tests/{test}.py"]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        source.write_text(text)
        folders.put(folder)
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M) if done.returncode else None
        print(f"{number:>4} {'caught' if failed else 'MISSED'}  {file}: {what}", flush=True)
        return str(number), [failed and failed[1], True]

    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        return dict(pool.map(find, numbers or range(1, len(mistakes.PYTHON) + 1)))


def main() -> None:
    numbers = [int(a) for a in sys.argv[1:] if a.isdigit()]
    names = [*mistakes.BUILDS, "python"]
    chosen = [a for a in sys.argv[1:] if not a.isdigit()] or names
    if unknown := set(chosen) - set(names):
        raise SystemExit(f"there is no build {', '.join(unknown)}; the builds are {', '.join(names)}")
    results = {name: run_python(numbers) if name == "python" else run(name, numbers) for name in chosen}
    good = True
    for name, found in results.items():
        for kind in (False, True):
            own = {n: test for n, (test, written) in found.items() if written == kind}
            missed = [int(n) for n, test in own.items() if not test]
            print(f"{name:7} {len(own):4} {'written' if kind else 'generated'} mistakes, missed: {missed or 'none'}")
            good &= len(missed) * 20 <= len(own) * (not kind)
    sys.exit(not good)


if __name__ == "__main__":
    main()
