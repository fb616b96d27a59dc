"""Compares torch_rope with other implementations of rotary position embedding.

gpu      runs the tests, the sanitizers and the measurements on a machine with a GPU, step by step
run      measures this machine and writes benchmarks/results/<its name>.jsonl; continues an interrupted run
table    writes the tables in README.md and in pages of docs/, from the committed results
plot     draws the pictures in docs/, from the committed results
compare  lists the medians of a second run that lie outside the quartiles of the first run, widened by 25%
"""

import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path

from .gpu import STEPS

# The allocator must keep its memory, because fresh pages for a large result take longer than the rotation. Inductor
# must compile in the process itself, because helper processes would compete with the timed code.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "1099511627776",
    "MALLOC_TRIM_THRESHOLD_": "1099511627776",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "KINETO_LOG_LEVEL": "99",
}
ROOT = Path(__file__).resolve().parent.parent
PASSES = 5
UNFINISHED = 3  # the exit status of a run that has to be continued


def run(args) -> int:
    from . import accuracy
    from .cases import cases
    from .results import Journal, file_of, in_process, machine, sent_by

    every = cases(args.device)
    groups = [*dict.fromkeys(case.group for case in every), "accuracy"]
    wanted = args.cases or groups
    matching = {part: [case for case in every if part == case.group or part in case.name] for part in wanted}
    for part in wanted:
        if part != "accuracy" and not matching[part]:
            sys.exit(f"{part} must be a group or a part of a case's name; the groups are {', '.join(groups)}")
    chosen = [case for case in every if any(case in found for found in matching.values())]
    start = time.monotonic()
    found = machine(args.device)
    out = args.out or file_of(found["name"])
    journal = Journal(out, found)
    # The first pass over all cases comes first, so that a run that is ended early has figures for all of them.
    todo = [(case.name, number, case) for number in range(args.passes) for case in chosen]
    todo += [("accuracy", 0, None)] * ("accuracy" in wanted)
    longest = left = 0
    for i, (name, number, case) in enumerate(todo, start=1):
        if (name, number) in journal.done():
            continue
        began = time.monotonic()
        if left or began - start + longest > args.seconds:
            left += 1
            continue
        if case:
            lines = in_process(case, args.device, args.only, args.rounds, number == 0)
            text = summary(case, lines) if number == 0 else f"{name}, pass {number + 1}"
        else:
            lines, end = sent_by(accuracy.study, args.device)
            text = f"accuracy: {len(lines)} lines; {end}"
        journal.add(name, number, lines)
        longest = max(longest, time.monotonic() - began)
        print(f"[{i}/{len(todo)}, {time.monotonic() - start:.0f} s] {text}", file=sys.stderr, flush=True)
    journal.write_results(chosen, whole=not args.cases)
    if left:
        print(
            f"The results so far are in {out}. Run this again to continue: {left} of {len(todo)} measurements are left."
        )
        return UNFINISHED
    journal.remove()
    print(f"The results are in {out}.")
    return 0


def summary(case, lines: list[dict]) -> str:
    from .measure import quartiles

    parts = []
    for x in lines:
        if x["status"] == "timed":
            parts.append(f"{x['implementation']} {quartiles(x['samples_us'])['median_us']:.4g} us")
        elif x["status"] != "skipped":
            parts.append(f"{x['implementation']} {x['status'].upper()}: {x['reason']}")
    return f"{case.name}: {'; '.join(parts)}"


def table(args) -> int:
    from . import report

    stale = report.write_all(check=args.check)
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'does not show the current results' if args.check else 'is written'}")
    return int(args.check and bool(stale))


def plot(args) -> int:
    from . import plots, report

    for path in sorted(report.FOLDER.glob("*.jsonl")):
        suffix = "" if path == report.REFERENCE else f"-{path.stem}"
        for picture in plots.plot(report.read(path), args.out or ROOT / "docs", suffix):
            print(picture)
    return 0


def gpu(args) -> int:
    from .gpu import Gpu, main

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no command of a step goes on alone
    return main(Gpu(args.out, args.seconds), args.steps)


def compare(args) -> int:
    from .results import compare, file_of, read

    new = read(args.new)
    old_path = args.old or file_of(new[0]["name"])
    if not old_path.exists():
        sys.exit(f"{old_path} does not exist; pass the file of another machine to compare with")
    inside, outside = compare(new, read(old_path))
    print("\n".join(outside))
    print(f"{inside} of {inside + len(outside)} medians lie inside the quartiles of {old_path.name}, widened by 25%.")
    return int(bool(outside))


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="measure this machine")
    running.add_argument("cases", nargs="*", metavar="case", help="a group, or a part of a case's name (default: all)")
    running.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    running.add_argument(
        "--only", action="append", metavar="IMPLEMENTATION", help="measure only this implementation; may be repeated"
    )
    running.add_argument(
        "--passes", type=int, default=PASSES, help="how often every case is measured, each time in new processes"
    )
    running.add_argument("--rounds", type=int, default=11, help="the largest number of samples of a pass")
    running.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="end after about this time; run again to continue (exit status 3)",
    )
    running.add_argument("--out", type=Path, metavar="FILE.jsonl", help="file of the results")
    lending = commands.add_parser("gpu", help="run everything that needs a GPU")
    lending.add_argument("steps", nargs="*", metavar="step", help=f"{', '.join(STEPS)} (default: all)")
    lending.add_argument("--out", type=Path, default=ROOT / "build/gpu", metavar="FOLDER", help="what is found out")
    lending.add_argument("--seconds", type=float, default=480, help="end after about this time; run again to continue")
    tabling = commands.add_parser("table", help="write the tables in README.md and docs/")
    tabling.add_argument("--check", action="store_true", help="write nothing; the exit status is 1 if a table is stale")
    plotting = commands.add_parser("plot", help="draw the pictures in docs/")
    plotting.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the pictures")
    comparing = commands.add_parser("compare", help="compare a second run with the first")
    comparing.add_argument("new", type=Path, help="file of the second run")
    comparing.add_argument("old", type=Path, nargs="?", help="file of the first run (default: this machine's)")
    chosen = (
        (running, run),
        (tabling, table),
        (plotting, plot),
        (comparing, compare),
        (lending, gpu),
    )
    for command, function in chosen:
        command.set_defaults(function=function)
    args = parser.parse_args()
    if args.function is run and any(os.environ.get(k) != v for k, v in ENVIRONMENT.items()):
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        again = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | ENVIRONMENT | {"PYTHONPATH": paths})
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
