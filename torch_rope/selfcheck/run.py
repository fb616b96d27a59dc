"""Starts the processes that run the checks, and collects what they report."""

import argparse
import json
import os
import platform
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import torch_rope
from torch_rope import _C
from torch_rope.selfcheck import report as reports
from torch_rope.selfcheck import worker
from torch_rope.selfcheck.checks import Check, Group, describe_error
from torch_rope.selfcheck.kernels import memory

WHOLE_RUN = 600.0  # seconds; groups that would begin later are skipped
STARTS = 120.0  # seconds that a process may take until its first group begins
MOST_DEATHS = 3  # a group whose process died so often is not continued
INTERRUPTED = "interrupted"
MOST_DETAILS = 3  # how many failures of a group are reported with all their details


def python() -> list[str]:
    """Returns the command that starts Python. The simulated device needs a command of its own."""
    return shlex.split(os.environ.get("TORCH_ROPE_PYTHON", "")) or [sys.executable]


class Process:
    """A process that runs groups. It is killed if it reports nothing for too long."""

    def __init__(self, request: dict):
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*python(), "-m", "torch_rope.selfcheck", "--worker", json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # so that its own children are killed too
        )
        self.events = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:  # half a line of a process that died
                continue
            self.events.put(event)
        self.events.put(None)

    def event(self, limit: float) -> dict | None:
        """Returns the next event, or None if there is no other. Raises queue.Empty after `limit` seconds."""
        return self.events.get(timeout=limit)

    def kill(self) -> None:
        for stop in (signal.SIGUSR1, signal.SIGKILL):  # at the first one Python writes where its threads are
            try:
                os.killpg(self.process.pid, stop)
                self.process.wait(1)
            except (ProcessLookupError, PermissionError):
                return
            except subprocess.TimeoutExpired:
                pass

    def end(self) -> str:
        """Waits for the end. Returns how the process ended, or an empty string if all is well."""
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            return "the process did not end in 60 s"
        if status < 0:
            return f"the process ended with the signal {signal.Signals(-status).name}"
        return f"the process ended with status {status}" if status else ""

    def said(self) -> str:
        """Returns the end of what the process wrote to the standard error."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-6000:].strip()


@dataclass
class Place:
    """How far a process has come."""

    record: dict | None  # of the group that has begun
    done: int  # cases of that group that have begun
    ended: int = 0  # groups
    began: bool = False  # the process has begun a group
    case: str | None = None  # the case that runs
    call: str = ""  # its last call
    launched: list[str] = field(default_factory=list)  # its kernels


class Run:
    """One run of the self-check. self.report holds all that it found."""

    def __init__(self, device: str, quick: bool, only: str, json_file: str):
        self.device, self.quick, self.json_file = device, quick, json_file
        self.groups = [g for g in worker.groups(Check(torch.device(device), quick)) if only in g.name]
        self.report = {"device": device, "quick": quick, "only": only, **environment(device)}
        self.report |= {"groups": [], "kernels": {}, "processes": [], "rows": []}
        self.start = time.monotonic()

    # -- the report --

    def begin(self, group: Group) -> dict:
        record = {"name": group.name, "status": "passed", "cases": len(group.cases), "passed": 0, "failed": 0}
        record |= {"skipped": 0, "seconds": 0.0, "worst": [-1.0, ""], "failures": [], "reasons": []}
        self.report["groups"].append(record)
        return record

    def add(self, record: dict, result: dict) -> None:
        """Adds the result of a case to the record of its group."""
        status = result["status"]
        record[status] += 1
        for name in result["kernels"]:
            kernel = self.report["kernels"].setdefault(name, {"passed": 0, "failed": 0})
            kernel[status] = kernel.get(status, 0) + 1
        if status == "passed":
            record["worst"] = max(record["worst"], result["worst"])
        elif status == "skipped":
            if result["error"] not in record["reasons"]:
                record["reasons"].append(result["error"])
        else:
            details = ("error", "call", "kernels", "traceback", "output")
            failure = {name: result[name] for name in details if name in result}
            if len(record["failures"]) >= MOST_DETAILS:
                failure |= {"error": result["error"][:300], "traceback": ""}
            record["failures"].append({"case": result["case"], **failure})

    def close(self, record: dict) -> None:
        """Ends the record of a group, and shows it."""
        if record["failed"]:
            record["status"] = "failed"
        elif not record["passed"]:
            record["status"] = "skipped"
        print(f"  {record['name']}: {reports.outcome(record)}", file=sys.stderr, flush=True)
        self.save()

    def skip(self, groups: list[Group], reason: str) -> None:
        begun = {record["name"] for record in self.report["groups"]}
        for group in [group for group in groups if group.name not in begun]:
            record = self.begin(group)
            record |= {"status": "skipped", "reasons": [reason]}

    def save(self) -> None:
        self.report["seconds"] = round(time.monotonic() - self.start, 1)
        self.report["failing_kernels"] = reports.suspects(self.report)
        if not self.json_file:
            return
        try:
            Path(self.json_file).write_text(json.dumps(self.report, indent=1), encoding="utf-8")
        except OSError as e:
            print(f"torch_rope.selfcheck: {self.json_file} cannot be written: {e}", file=sys.stderr)
            self.json_file = ""

    # -- the processes --

    def run(self) -> None:
        """Runs all groups. Neighbouring groups share a process, except those that need one of their own."""
        left, done = list(self.groups), 0
        try:
            while left and time.monotonic() < self.start + WHOLE_RUN:
                together = left[:1]
                while not together[0].apart and len(together) < len(left) and not left[len(together)].apart:
                    together.append(left[len(together)])
                ended, done = self.run_together(together, done)
                left = left[ended:]
            self.skip(left, f"not run, because {WHOLE_RUN:.0f} s are over")
        except KeyboardInterrupt:
            for record in self.report["groups"][-1:]:
                self.close(record)
            self.skip(left, INTERRUPTED)
        finally:
            self.save()

    def run_together(self, groups: list[Group], done: int) -> tuple[int, int]:
        """Runs groups in one process, without the first `done` cases of the first group.

        Returns how many groups are finished, and how many cases of the next one, which is not 0 if the process died.
        """
        request = {"device": self.device, "quick": self.quick, "groups": [g.name for g in groups], "done": done}
        process = Process(request)
        at = Place(self.report["groups"][-1] if done else None, done)
        self.report["processes"].append([])
        try:
            how = self.follow(process, groups, at) or process.end()
        finally:
            if process.process.poll() is None:
                process.kill()
        alive = at.ended == len(groups)
        if not alive or how:
            how = how or "the process ended before its checks"
            record = at.record or self.begin(Group("exit of the process", {}) if alive else groups[at.ended])
            # A process also ends after a failed case if the device cannot be used any more. Then no other case failed.
            if alive or at.case is not None or not at.began:
                failure = {"case": "exit" if alive else at.case or "start", "error": how, "call": at.call}
                failure |= {"output": process.said(), "kernels": sorted(set(at.launched))}
                self.add(record, failure | {"status": "failed"})
            at.record = record
        if alive:
            if at.record:
                self.close(at.record)
            return at.ended, 0
        record["deaths"] = record.get("deaths", 0) + 1
        if 0 < at.done < len(groups[at.ended].cases) and record["deaths"] < MOST_DEATHS:
            return at.ended, at.done
        self.close(record)
        return at.ended + 1, 0

    def follow(self, process: Process, groups: list[Group], at: Place) -> str:
        """Takes the events of a process until its end. Returns why it was killed, or an empty string if it was not."""
        while True:
            group = groups[min(at.ended, len(groups) - 1)]
            limit = group.limit if at.began else STARTS
            try:
                event = process.event(limit)
            except queue.Empty:
                process.kill()
                return f"nothing happened for {limit:.0f} s, so the process was killed"
            if event is None:
                return ""
            kind = event.pop("event")
            if kind == "group":
                at.began, at.record = True, at.record or self.begin(group)
            elif kind == "case":
                at.case, at.call, at.launched, at.done = event["name"], "", [], at.done + 1
            elif kind == "call":
                at.call = event["text"]
            elif kind == "kernels":
                at.launched += event["names"]
            elif kind == "result":
                self.add(at.record, event)
                at.case, at.call, at.launched = None, "", []
            elif kind == "blame":
                self.blame(at.record, event["kernels"])
            elif kind == "row":
                self.report["rows"].append(event)
            elif kind == "end":
                at.record["seconds"] += round(event["seconds"], 3)
                self.report["processes"][-1] = event["pipelines"]
                at.ended, at.done = at.ended + 1, 0
                if not group.apart:  # the group of a process of its own ends with the process
                    self.close(at.record)
                    at.record = None

    def blame(self, record: dict, kernels: list[str]) -> None:
        record["failures"][-1]["kernels"] = kernels
        for name in kernels:
            self.report["kernels"].setdefault(name, {"passed": 0, "failed": 0})["failed"] += 1


def ask(question) -> str:
    """Returns the answer to a question as text, or "unknown", because some versions of torch and machines lack it."""
    try:
        return str(question()).strip()
    except Exception:
        return "unknown"


def environment(device: str) -> dict:
    """Describes this machine and its software."""
    kind = device.split(":")[0]
    name = {
        "cpu": lambda: f"{_C.cpu_instruction_set()} kernels, {torch.get_num_threads()} threads",
        "cuda": lambda: f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}",
        "mps": lambda: f"{torch.backends.mps.get_name()}, {torch.backends.mps.get_core_count()} cores",
    }[kind]
    chip = platform.processor() or platform.machine()
    if sys.platform == "darwin":
        chip = ask(lambda: subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True))
    found = {
        "versions": f"torch_rope {torch_rope.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{platform.platform()}, {chip}, {memory() / 2**30:.0f} GiB",
        "device_name": ask(name),
    }
    if kind == "mps":
        # module.cpp returns whether the shaders were compiled when torch_rope was built, or are compiled here.
        found["metal_library"] = ask(lambda: _C.metal_library)
    return found


def without(device: str) -> str:
    """Returns why a device cannot be used, or an empty string if it can."""
    if device.split(":")[0] not in _C.devices:
        return f"this build of torch_rope supports only {', '.join(_C.devices)}"
    try:
        torch.empty(1, device=device)
    except Exception as e:
        return describe_error(e).split("\n")[0]
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torch_rope.selfcheck",
        description="Checks the values, the gradients and the speed of the operators on this machine.",
    )
    best = next((device for device in reversed(_C.devices) if not without(device)), "cpu")
    parser.add_argument("--device", default=best, help=f"{' or '.join(_C.devices)}; the default is {best}")
    parser.add_argument("--quick", action="store_true", help="run fewer cases, and nothing in a process of its own")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only groups whose name contains TEXT")
    parser.add_argument(
        "--json",
        default="torch_rope_selfcheck.json",
        metavar="FILE",
        help="write the whole report to FILE; the default is torch_rope_selfcheck.json, and - is none",
    )
    options = parser.parse_args(argv)
    if problem := without(options.device):
        print(f"torch_rope.selfcheck: device {options.device} cannot be used: {problem}", file=sys.stderr)
        return 2
    run = Run(options.device, options.quick, options.only, options.json.strip("-"))
    run.run()
    print(reports.block(run.report))
    return int(any(g["status"] == "failed" or INTERRUPTED in g["reasons"] for g in run.report["groups"]))
