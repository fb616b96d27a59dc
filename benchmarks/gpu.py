"""Runs everything that needs an NVIDIA GPU, step by step, on a machine that may be lent for minutes.

A folder keeps for each step a file NAME.log, the output of its command, and NAME.done, which says how it ended. A step
that has ended is not repeated when this program runs again with the folder, unless it is named; if the source, torch or
the kind of GPU has changed, all steps are repeated. A step that fails does not stop the others, unless it is the build.
The folder also has the library that was built, and results.jsonl with the measurements.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED, LEFT = "passed", "FAILED", "left to do"
SHORTEST = 20.0  # seconds; with less time no step begins
PYTEST = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", "-p", "no:cacheprovider"]
# Step -> the groups of cases.cases("cuda") that it measures. That module cannot be imported before the build.
GROUPS = {
    "front": ("sweep", "norm", "norm-over-heads", "cache", "training", "models"),  # what README.md shows
    "others": ("decode", "shapes", "quantised", "accuracy"),
}


@dataclass
class Step:
    name: str
    command: list[str]
    limit: float  # seconds
    environment: dict[str, str] = field(default_factory=dict)


def steps_of(out: Path, capability: str) -> list[Step]:
    """Returns all steps. They need nvcc, torch, pytest and numpy, and use pytest-xdist and other packages if there."""
    build = {"TORCH_ROPE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability, "MAX_JOBS": str(os.cpu_count())}
    build["TORCH_ROPE_LINES"] = "1"
    parallel = ["-n", str(min(8, os.cpu_count())), "--dist", "loadgroup"] if importlib.util.find_spec("xdist") else []
    steps = [
        Step("build", [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], 1200, build),
        Step("tests", [*PYTEST, *parallel, "-m", "not cpu"], 300, {"OMP_NUM_THREADS": "1"}),
    ]
    # While a graph is captured, torch may then reuse memory sooner.
    sooner = {"PYTORCH_CUDA_ALLOC_CONF": "graph_capture_record_stream_reuse:True"}
    steps.append(Step("graphs", [*PYTEST, *parallel, "-k", "cuda and graph", "-m", "not cpu"], 300, sooner))
    # racecheck sees only shared memory: the angles from frequencies, and the sums of norms.
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        # CUDA's own errors are left out, because torch asks for some in its search for symbols.
        options = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "86", *PYTEST, "-m", "sanitizer"]
        # Memory that torch keeps for later tensors would hide accesses outside of a tensor.
        steps.append(Step(tool, command, 300, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
    steps.append(Step("selfcheck", [sys.executable, "-m", "torch_rope.selfcheck"], 300))
    measure = [sys.executable, "-m", "benchmarks", "run", "--device=cuda", "--passes=1", f"--out={out}/results.jsonl"]
    return steps + [Step(name, [*measure, *groups], 480) for name, groups in GROUPS.items()]


def identity() -> tuple[str, str]:
    """Returns a text that changes with the source, torch and the kind of GPU, and the GPU's compute capability."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no NVIDIA GPU, which make gpu needs")
    digest, folders = hashlib.sha256(), ("csrc", "shaders", "torch_rope", "tests", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    for path in sorted([*files, ROOT / "setup.py"]):
        if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp", ".inc"):
            digest.update(path.read_bytes())
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    known = digest.hexdigest()[:16], torch.__version__, sys.version[:4], torch.cuda.get_device_name()
    return ", ".join(known), capability


def run(step: Step, log: Path, seconds: float) -> int | None:
    """Runs the command of a step. Returns its exit status, or None if it took too long and was ended."""
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    settings |= step.environment
    command = ["env", *(f"{name}={value}" for name, value in settings.items()), *step.command]
    with log.open("w") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        # A session of its own, so that all processes which the command starts are ended with it.
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def copy_library(source: Path, target: Path) -> None:
    for path in (*source.glob("_C*.so"), *source.glob("built_for_torch.txt")):
        shutil.copy2(path, target / path.name)


def main(out: Path, seconds: float, steps: list[Step], known: str, named=(), package=ROOT / "torch_rope") -> int:
    """Runs the steps, or those that are named. Returns 1 if one has failed, 3 if some are left to do, otherwise 0."""
    deadline, outcomes = time.monotonic() + seconds, {}
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "known.txt").exists() or (out / "known.txt").read_text() != known:
        for path in (*out.glob("*.done"), *out.glob("results.jsonl")):
            path.unlink()
        (out / "known.txt").write_text(known)
    for step in steps:
        log, done = out / f"{step.name}.log", out / f"{step.name}.done"
        if done.exists() and step.name not in named:
            outcomes[step.name] = tuple(json.loads(done.read_text()))
            if step.name == "build":  # this may be another machine of the same kind
                copy_library(out, package)
        elif named and step.name not in named:
            continue
        elif deadline - time.monotonic() < SHORTEST or outcomes.get("build", (PASSED,))[0] != PASSED:
            outcomes[step.name] = LEFT, ""
        else:
            start, limit = time.monotonic(), min(step.limit, deadline - time.monotonic())
            print(f"{step.name}: runs for at most {limit:.0f} s, log in {log}", flush=True)
            status = run(step, log, limit)
            took = f"{time.monotonic() - start:.0f} s"
            if status is None and limit < step.limit:  # the time of this call is over, not that of the step
                outcomes[step.name] = LEFT, f"ended after {took}"
                continue
            text = f"{took}, exit status {status}" if status is not None else f"ended after {took}, its limit"
            outcomes[step.name] = (PASSED if status == 0 else FAILED), text
            if step.name == "build":
                copy_library(package, out)
            done.write_text(json.dumps(outcomes[step.name]))
    for name, (outcome, text) in outcomes.items():
        print(f"{name:16} {outcome:10} {text}")
    found = {outcome for outcome, _ in outcomes.values()}
    print(f"Everything is in {out}." + " Run this again to go on." * (LEFT in found))
    return 1 if FAILED in found else 3 if LEFT in found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="step", help="run only these steps, also if they have ended")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu", metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=480, help="the time of this call; the next one goes on")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no command goes on alone
    known, capability = identity()
    every = steps_of(args.out.resolve(), capability)
    if unknown := set(args.steps) - {step.name for step in every}:
        sys.exit(f"{min(unknown)} is not a step; the steps are {', '.join(step.name for step in every)}")
    sys.exit(main(args.out.resolve(), args.seconds, every, known, args.steps))
