"""Starts a process for each group of checks, and prints what they found."""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from pathlib import Path

import torch

import torch_rope
from torch_rope import _C
from torch_rope.selfcheck import worker
from torch_rope.selfcheck.checks import Check

LIMIT = 120.0  # seconds that the process of a group may take
MOST_ERRORS = 3  # how many different errors of a group are printed with their details


def run_group(device: str, group: str, cases: int, *options: str) -> tuple[bool, list[str]]:
    """Runs a group of so many cases in a process of its own. Returns what summary returns."""
    # The simulated device needs a command of its own to start Python.
    python = shlex.split(os.environ.get("TORCH_ROPE_PYTHON", "")) or [sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report"), Path(folder, "output")
        report.touch()
        command = [*python, "-m", "torch_rope.selfcheck.worker", device, group, str(report), *options]
        with output.open("w") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            try:
                status = process.wait(LIMIT)
                death = f"the process ended with status {status}" if status else ""
                if status < 0:
                    death = f"the process ended with signal {-status} ({signal.strsignal(-status)})"
            except subprocess.TimeoutExpired:
                death = f"the process still ran after {LIMIT:.0f} s, and was stopped"
            finally:
                process.kill()
        entries = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        return summary(entries, cases, death, output.read_text(encoding="utf-8", errors="replace"))


def summary(entries: list[list], cases: int, death: str, output: str) -> tuple[bool, list[str]]:
    """Returns whether a group passed, and lines that say what was found. entries: the report of its process; see worker.py.
    cases: how many there are. death: how the process ended, if not as it should. output: what it printed."""
    found = defaultdict(list)
    for kind, *rest in entries:
        found[kind].append(rest)
    errors = defaultdict(list)  # the failed cases of each error
    for name, error, details in found["failed"]:
        errors[error].append((name, details))
    lines = [text for (text,) in found["note"]]
    for error, failed in list(errors.items())[:MOST_ERRORS]:
        lines += [f"{names(failed)}: {error}", *(f"  {text}" for text in failed[0][1])]
    if others := [case for failed in list(errors.values())[MOST_ERRORS:] for case in failed]:
        lines.append(f"also failed: {names(others)}")
    if not found["end"]:
        death = death or "the process ended before its checks"
        lines += [f"the last {kind}: {found[kind][-1][0]}" for kind in ("case", "call") if found[kind]]
    passed = f"passed: {len(found['passed'])} of {cases}"
    if not death and not errors:
        largest = found["end"][0][0]
        return True, [passed + (f", largest error {largest:.0%} of the limit" if largest else ""), *lines]
    if death:
        lines += [death, *[line[:300] for line in output.splitlines() if line.strip()][-4:]]
    return False, [f"FAILED: {len(found['failed']) + bool(death)}, {passed}", *lines]


def names(cases: list[tuple[str, list]]) -> str:
    return textwrap.shorten("; ".join(name for name, _ in cases), 600)


def environment(device: str) -> list[str]:
    """Returns lines that describe this machine and its software."""
    if device.startswith("cuda"):
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    elif device.startswith("mps"):
        mps = torch.backends.mps
        name = f"{mps.get_name()}, {mps.get_core_count()} cores"
    else:
        name = f"{_C.cpu_instruction_set()} kernels, threads: {torch.get_num_threads()}"
    return [
        f"torch_rope {torch_rope.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"{platform.platform()}, {platform.processor() or platform.machine()}",
        f"device {device}: {name}",
    ]


def problem_with(device: str) -> str:
    """Returns why a device cannot be used, or an empty string if it can."""
    if device.split(":")[0] not in _C.devices:
        return f"this build of torch_rope supports only {', '.join(_C.devices)}"
    try:
        torch.empty(1, device=device)
    except Exception as e:
        return f"{type(e).__name__}: {e}".split("\n")[0]
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torch_rope.selfcheck",
        description="Checks the values, the gradients and the speed of the operators on this machine.",
    )
    best = next((device for device in reversed(_C.devices) if not problem_with(device)), "cpu")
    parser.add_argument("--device", default=best, help=f"{' or '.join(_C.devices)}; the default is {best}")
    parser.add_argument("--quick", action="store_true", help="run fewer cases, and measure no times")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the groups whose name contains TEXT")
    options = parser.parse_args(argv)
    device, start = options.device, time.monotonic()
    if problem := problem_with(device):
        print(f"torch_rope.selfcheck: device {device} cannot be used: {problem}", file=sys.stderr)
        return 2
    all_groups = worker.groups(Check(torch.device(device)), options.quick)
    chosen = [group for group in all_groups if options.only in group]
    if not chosen:
        parser.error(f"no group's name contains {options.only}; the groups are {'; '.join(all_groups)}")
    print("\n".join(environment(device)))
    failed = []
    for group in chosen:
        print(f"{group:<30} ", end="", flush=True)  # shows what runs now
        passed, lines = run_group(device, group, len(all_groups[group]), *["--quick"] * options.quick)
        print("\n    ".join(lines), flush=True)
        failed += [] if passed else [group]
    if failed:
        print(f"to repeat a group: python -m torch_rope.selfcheck --device {device} --only '{failed[0]}'")
    print(f"{len(chosen) - len(failed)} groups passed, {len(failed)} failed, in {time.monotonic() - start:.0f} s")
    return int(bool(failed))
