"""Runs groups of checks in a process of its own, and reports each step at once, so that a crash loses little.

    python -m torch_rope.selfcheck --worker '{"device": "mps", "quick": false, "groups": ["pads"], "done": 0}'

Each line of the output is a JSON object, an event. The key "event" is one of

    group    a group begins
    case     a case begins
    call     a call of an operator begins; the event has its text
    kernels  kernels that were launched since the last such event; it is sent before the wait for them
    result   a case ended
    blame    kernels that took part in the last case, which failed
    row      a row of a table of measurements
    end      a group ended; the event has the pipelines that this process has made so far
"""

import faulthandler
import json
import os
import re
import signal
import threading
import time
import traceback

import torch

from torch_rope import _C
from torch_rope.selfcheck import kernels, programs, speed
from torch_rope.selfcheck.checks import Check, Group, Skip, describe_error

MOST_REPEATED = 3  # how many failed cases of a group are repeated under the profiler


def groups(check: Check) -> list[Group]:
    """Returns all groups in the order in which they run. Making the list uses no device."""
    if check.quick:
        return [*kernels.groups(check), *check.groups()]
    first = programs.first_calls(check)
    return [*first, *kernels.groups(check), *check.groups(), *programs.groups(check), *speed.groups(check)]


def named_in(error: str) -> set[str]:
    """Returns the kernels or the library that Metal could not make, if an error of csrc/mps/mps.mm says so."""
    if library := re.search(r"Metal does not compile the kernels of (\w+)", error):
        return {f"library {library[1]}"}
    return set(re.findall(r"Metal cannot make (?:the function|a pipeline for) (\w+)", error))


def pipelines() -> list[tuple[str, float, int]]:
    """Returns the pipelines of this process as (kernel, milliseconds, calls), if the back end is Metal's."""
    return list(_C.metal_pipelines()) if hasattr(_C, "metal_pipelines") else []


class Worker:
    """Runs groups. emit takes each event."""

    def __init__(self, check: Check, emit):
        self.check, self.emit, self.lock = check, emit, threading.Lock()
        check.before_call, check.after_call, check.measured = self.before_call, self.after_call, self.measured
        self.counts, self.used = {}, set()

    def send(self, event: str, **values) -> None:
        with self.lock:
            self.emit({"event": event, **values})

    def before_call(self, text: str) -> None:
        self.text = text
        self.send("call", text=text)

    def after_call(self) -> None:
        """Reports the kernels that were launched, and waits for them: an error of theirs may appear only now."""
        counts = {}
        for name, _, calls in pipelines():
            counts[name] = counts.get(name, 0) + calls
        if launched := [name for name, calls in counts.items() if calls > self.counts.get(name, 0)]:
            self.used.update(launched)
            self.send("kernels", names=launched)
        self.counts = counts
        self.check.synchronize()

    def measured(self, table: str, row: dict) -> None:
        self.send("row", table=table, row=row)

    def run(self, group: Group, done: int = 0) -> None:
        """Runs the cases of a group, without the first ones if those are done."""
        self.send("group", name=group.name)
        start, failures = time.monotonic(), 0
        for number, (case, run) in enumerate(list(group.cases.items())[done:]):
            if number > 2 and time.monotonic() > start + group.seconds:
                break
            self.send("case", name=case)
            self.used, self.text = set(), ""
            self.check.worst = (-1.0, "")
            result = self.result(group, case, run)
            self.send("result", case=case, **result)
            if result["status"] == "failed":
                failures += 1
                if not is_usable(self.check.device):
                    os._exit(1)  # the main process goes on with the next case in a new process
                if failures <= MOST_REPEATED and not result["kernels"]:
                    self.send("blame", kernels=self.profile(run))
        self.send("end", seconds=time.monotonic() - start, pipelines=pipelines())

    def result(self, group: Group, case: str, run) -> dict:
        """Runs a case. Returns what it found."""
        torch.manual_seed(0)
        try:
            run()
            self.after_call()
            if group.names_kernels and hasattr(_C, "metal_pipelines") and case not in self.used:
                error = f"this kernel was not launched, but {', '.join(sorted(self.used)) or 'none'}"
                return {"status": "failed", "error": error, "call": self.text, "kernels": [case]}
        except Skip as e:
            return {"status": "skipped", "error": str(e), "kernels": []}
        except Exception as e:
            error, frames = describe_error(e), "".join(traceback.format_exception(e))[-4000:]
            try:
                self.after_call()
            except Exception as later:
                error += f"; then the device reports {describe_error(later)}"
            used = sorted(named_in(error) or self.used)
            return {"status": "failed", "error": error, "traceback": frames, "call": self.text, "kernels": used}
        return {"status": "passed", "kernels": sorted(self.used), "worst": self.check.worst}

    def profile(self, run) -> list[str]:
        """Repeats a failed case, and returns the CUDA kernels or the operators that ran."""
        from torch.profiler import ProfilerActivity as Activity
        from torch.profiler import profile

        cuda = self.check.device.type == "cuda"
        try:
            with profile(activities=[Activity.CPU, Activity.CUDA] if cuda else [Activity.CPU]) as profiled:
                torch.manual_seed(0)
                try:
                    run()
                except Exception:
                    pass
                finally:
                    self.check.synchronize()
            events = profiled.events()
        except Exception:
            return []
        if cuda:
            return sorted({e.name for e in events if "CUDA" in str(e.device_type) and "rope" in e.name})
        on = f" ({_C.cpu_instruction_set()})" if self.check.device.type == "cpu" else ""
        return sorted({f"{e.name}{on}" for e in events if e.name.startswith("rope::")})


def is_usable(device: torch.device) -> bool:
    """Returns whether a device still computes. After some errors a process cannot use it any more."""
    try:
        return torch.ones(1).to(device).cpu().item() == 1.0
    except Exception:
        return False


def main(argument: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    request = json.loads(argument)
    # Events have the standard output for themselves: what other libraries write there goes to the standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: dict) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    check = Check(torch.device(request["device"]), request["quick"])
    worker = Worker(check, emit)
    done = request["done"]
    for group in groups(check):
        if group.name in request["groups"]:
            worker.run(group, done)
            done = 0

    # torch's autograd threads release Python objects a moment after a backward. torch aborts if Python ends before that.
    time.sleep(0.2)
