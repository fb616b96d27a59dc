"""Runs one group of checks, in a process of its own.

    python -m torch_rope.selfcheck.worker DEVICE GROUP FILE [--quick]

It writes to FILE what it does next, so that the file says where the process was if it crashes or hangs. Each line is a
list in JSON, one of

    ["case", name]                     a case begins
    ["call", text]                     a call of an operator begins
    ["passed", name]                   the case has passed
    ["failed", name, error, details]   the case has failed
    ["note", text]                     a line to print
    ["end", error]                     all cases have run; the largest error, as a part of the allowed one
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from torch_rope.selfcheck import metal, speed
from torch_rope.selfcheck.checks import Check

SECONDS = 60.0  # after this time no other case of a group begins, so a slow device runs fewer cases


def groups(check: Check, quick: bool) -> dict[str, dict[str, Callable]]:
    """Returns the groups in the order in which they run: the cases of each by name. Making them uses no device."""
    found = metal.groups(check) if check.device.type == "mps" else {}
    return found | check.groups(quick) | ({} if quick else speed.groups(check))


def run(check: Check, cases: dict[str, Callable], record: Callable) -> None:
    """Runs cases. A case raises an error if it fails, and may return a line to print."""
    check.before_call, end = partial(record, "call"), time.monotonic() + SECONDS
    for name, case in cases.items():
        if time.monotonic() > end:
            record("note", f"the other cases did not run, because these took {SECONDS:.0f} s")
            break
        record("case", name)
        torch.manual_seed(0)
        check.last_call, before = "", metal.launches()
        try:
            if note := case():
                record("note", note)
            record("passed", name)
        except Exception as e:
            text = " ".join(str(e).split())[:600]
            details = [f"call: {check.last_call}"] if check.last_call else []
            if launched := metal.launches() - before:
                details.append(f"Metal kernels: {', '.join(sorted(launched))}")
            record("failed", name, text if isinstance(e, AssertionError) else f"{type(e).__name__}: {text}", details)
    record("end", check.largest)


def main(device: str, group: str, file: str, *options: str) -> None:
    check = Check(torch.device(device))
    with open(file, "wb", buffering=0) as report:  # nothing of it may be lost in a crash

        def record(*entry) -> None:
            report.write(json.dumps(entry).encode() + b"\n")

        run(check, groups(check, "--quick" in options)[group], record)
    # torch's autograd threads release Python objects a moment after a backward. torch aborts if Python ends before that.
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
