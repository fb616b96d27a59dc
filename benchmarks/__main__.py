"""Compares torch_rope with other implementations of rotary position embedding.

run      measures this machine and writes benchmarks/results/<its name>.jsonl
table    writes the tables in README.md, docs/ and benchmarks/results/, from the committed results
plot     draws the pictures in docs/, from the committed results
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

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


def run(args) -> int:
    from . import accuracy
    from .cases import cases
    from .times import commit, file_of, in_process, machine, merged, read, sent_by, summary, write

    every = cases(args.device)
    groups = [*dict.fromkeys(case.group for case in every), "accuracy"]
    wanted = args.cases or groups
    chosen = [c for c in every if any(part == c.group if part in groups else part in c.name for part in wanted)]
    if unknown := [part for part in wanted if part not in groups and not any(part in c.name for c in every)]:
        sys.exit(f"{unknown[0]} must be a group or a part of a case's name; the groups are {', '.join(groups)}")
    found, tree = machine(args.device), commit()
    out = args.out or file_of(found["name"])
    old, passes, studied, broken, left = read(out), {}, [], False, 0
    # The first pass over all cases comes first, so that a run that is ended early has figures for all of them.
    todo = [*((number, case) for number in range(args.passes) for case in chosen)]
    todo[len(chosen) : len(chosen)] = [(0, None)] * ("accuracy" in wanted)
    print("Importing the other implementations, some 20 seconds ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    for i, (number, case) in enumerate(todo, start=1):
        if time.monotonic() - start > args.seconds:
            left = len(todo) - i + 1
            break
        if case:
            lines = in_process(case, args.device, args.only, args.rounds, number == 0)
            passes.setdefault(case, []).append(lines)
            texts = [summary(x) for x in lines if x["status"] != "skipped"] if number == 0 else [f"pass {number + 1}"]
            text = f"{case.name}: {'; '.join(texts)}"
        else:
            lines, end = sent_by(args.device, accuracy.study, args.device)
            studied, text = lines, f"accuracy: {len(lines)} lines{end and f'; {end}'}"
            broken |= bool(end)
        bad = [x["implementation"] for x in lines if x.get("status") in ("failed", "wrong")]
        broken |= any(name.startswith("torch_rope") for name in bad)
        write(out, merged(found, old, passes, studied, tree))
        print(f"[{i}/{len(todo)}, {time.monotonic() - start:.0f} s] {text}", file=sys.stderr, flush=True)
    print(f"The results are in {out}." + f" {left} of {len(todo)} measurements were left out." * bool(left))
    return 1 if broken else 3 if left else 0


def table(args) -> int:
    from . import report

    stale = report.write_all(check=args.check)
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'does not show the current results' if args.check else 'is written'}")
    return int(args.check and bool(stale))


def plot(args) -> int:
    from . import plots, report, times

    print(*plots.plot(*map(times.read, (report.REFERENCE, report.H100)), args.out), sep="\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    add = (running := commands.add_parser("run", help="measure this machine")).add_argument
    add("cases", nargs="*", metavar="case", help="a group, or a part of a case's name (default: all)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--only", action="append", metavar="IMPLEMENTATION", help="measure only this one; may be repeated")
    add("--passes", type=int, default=5, help="how often every case is measured, each time in new processes")
    add("--rounds", type=int, default=11, help="the largest number of samples of a pass")
    add("--seconds", type=float, default=math.inf, help="begin no measurement after this time (exit status 3)")
    add("--out", type=Path, metavar="FILE.jsonl", help="file of the results; cases that are not measured keep theirs")
    tabling = commands.add_parser("table", help="write the tables in README.md, docs/ and benchmarks/results/")
    tabling.add_argument("--check", action="store_true", help="write nothing; the exit status is 1 if a table is stale")
    plotting = commands.add_parser("plot", help="draw the pictures in docs/")
    plotting.add_argument("--out", type=Path, default=ROOT / "docs", metavar="FOLDER", help="folder of the pictures")
    for command, function in ((running, run), (tabling, table), (plotting, plot)):
        command.set_defaults(function=function)
    args = parser.parse_args()
    if args.function is run and any(os.environ.get(k) != v for k, v in ENVIRONMENT.items()):
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        again = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | ENVIRONMENT | {"PYTHONPATH": paths})
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
