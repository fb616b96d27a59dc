"""Runs everything that needs a GPU, on a machine that may be lent for minutes and lost at any time.

The steps below run one after another until the time is over. A folder keeps what they have found out, so that another
call goes on from there, also on another machine to which the folder was copied. A step that fails does not stop the
others. The folder has few small files:

journal.jsonl           what every test and every step has come to; the first line says for what source and machine
log.txt                 the output of all commands
_C*.so                  the library, which is built once
results.jsonl, .journal the measurements, and those of a run that is not complete yet
results.md, pictures.zip  tables and pictures of the measurements
"""

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
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import jsonl

ROOT = Path(__file__).resolve().parent.parent
PASSED, FAILED, LEFT = "passed", "failed", "left"
GRACE = 20  # seconds after the deadline, in which a command may end by itself
LARGEST = 16 * 2**20  # bytes; a larger library is not kept
ERRORS = 86  # the exit status of compute-sanitizer if it has found an error

Outcome = tuple[str, str]  # PASSED, FAILED or LEFT, and a text


@dataclass
class Gpu:
    """A call of this program: the commands, where they run and how long. The tests replace those that need a GPU."""

    out: Path
    seconds: float
    device: str = "cuda"
    tests: list[str] = field(default_factory=lambda: ["-k", "cuda"])
    cases: list[str] = field(default_factory=list)  # arguments of `benchmarks run`
    checks: list[str] = field(default_factory=list)  # arguments of torch_rope.selfcheck
    build: list[str] = field(default_factory=lambda: [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"])
    sanitizer: list[str] = field(default_factory=lambda: ["compute-sanitizer"])
    package: Path = ROOT / "torch_rope"

    def __post_init__(self):
        self.out, self.deadline = self.out.resolve(), time.time() + self.seconds
        self.journal, self.log = self.out / "journal.jsonl", self.out / "log.txt"
        self.results = self.out / "results.jsonl"

    @property
    def left(self) -> float:
        return self.deadline - time.time()

    def begin(self) -> None:
        """Begins anew if the source or the machine has changed."""
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            sys.exit(f"torch {torch.__version__} finds no NVIDIA GPU; without one, only the step figures runs")
        capability = "{}.{}".format(*torch.cuda.get_device_capability()) if self.device == "cuda" else ""
        known = {"source": digest_of_sources(), "torch": torch.__version__, "capability": capability}
        known |= {"library": "_C" + sysconfig.get_config_var("EXT_SUFFIX")}
        self.machine = known
        lines = jsonl.read(self.journal)
        if lines[:1] != [known]:
            lines = [known]
            for path in (self.out / known["library"], self.results, self.results.with_suffix(".journal")):
                path.unlink(missing_ok=True)
        jsonl.write(self.journal, lines)

    def start(self, command: list, **environment: str) -> subprocess.Popen:
        """Starts a command, whose output goes to the log."""
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": paths} | environment
        with self.log.open("a") as log:
            log.write(f"\n$ {shlex.join(map(str, command))}\n")
            log.flush()
            # One group for all processes that the command starts, so that stop() ends them too.
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, preexec_fn=os.setpgrp)

    def run(self, command: list, **environment: str) -> int | None:
        """Runs a command. Returns its exit status, or None if the time was over."""
        process = self.start(command, **environment)
        try:
            return process.wait(self.left + GRACE)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop(process)


def stop(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def digest_of_sources() -> str:
    digest = hashlib.sha256((ROOT / "setup.py").read_bytes())
    for folder in ("csrc", "shaders", "torch_rope", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp", ".inc"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# ---- The steps ----


def build(gpu: Gpu) -> Outcome:
    """Builds for the GPU that is there, or takes the library that the folder keeps."""
    library = gpu.machine["library"]
    built, kept = gpu.package / library, gpu.out / library
    if kept.exists():
        temporary = built.with_suffix(".tmp")
        shutil.copy(kept, temporary)
        temporary.replace(built)
        (gpu.package / "built_for_torch.txt").write_text(gpu.machine["torch"] + "\n")
        return PASSED, "kept from an earlier call"
    jobs, cuda = str(os.cpu_count()), str(int(gpu.device == "cuda"))
    arch = {"TORCH_CUDA_ARCH_LIST": gpu.machine["capability"]} if gpu.device == "cuda" else {}
    status = gpu.run(gpu.build, MAX_JOBS=jobs, TORCH_ROPE_CUDA=cuda, **arch)
    if status != 0:
        return (LEFT if status is None else FAILED), f"exit status {status}"
    if built.stat().st_size < LARGEST:
        shutil.copy(built, kept.with_suffix(".tmp"))
        kept.with_suffix(".tmp").replace(kept)
    return PASSED, ""


def tests(gpu: Gpu) -> Outcome:
    """Runs the tests in a process for each core. pytest-xdist is not used, because it hangs after a crash."""
    return pytest(gpu, "tests", [], ["-m", "not cpu"], limit=120, shares=min(16, os.cpu_count()))


def sanitizer(tool: str) -> Callable[[Gpu], Outcome]:
    """Makes a step that runs the tests with the mark sanitizer in compute-sanitizer.

    Its tool racecheck is not used, because it sees only shared memory, of which the kernels use little. The emulator
    finds races on tensors too.
    """

    def step(gpu: Gpu) -> Outcome:
        # CUDA's own errors are left out, because torch asks for some in its search for symbols.
        options = ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = [*gpu.sanitizer, "--tool", tool, *options, "--error-exitcode", str(ERRORS)]
        # Memory that torch keeps for later tensors would hide accesses outside of a tensor.
        return pytest(gpu, tool, command, ["-m", "sanitizer"], limit=300, PYTORCH_NO_CUDA_MEMORY_CACHING="1")

    return step


def pytest(
    gpu: Gpu, step: str, tool: list[str], options: list[str], limit: int, shares: int = 1, **environment: str
) -> Outcome:
    """Runs those tests that have no outcome yet, each share of them in a process.

    A test that ends its process fails, and another process runs the rest of its share.
    """
    command = [
        *tool,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.once",
    ]
    settings = {"journal": str(gpu.journal), "step": step, "deadline": gpu.deadline, "limit": limit}

    def start(share: int) -> tuple[subprocess.Popen, dict]:
        of_share = settings | {"share": [share, shares], "run": f"{share}-{len(jsonl.read(gpu.journal))}"}
        once = {"ROPE_ONCE": json.dumps(of_share), "OMP_NUM_THREADS": "1"}
        return gpu.start([*command, *gpu.tests, *options], **environment, **once), of_share

    running = {share: start(share) for share in range(shares)}
    left, problems = False, []
    try:
        while running and gpu.left > -GRACE:
            time.sleep(0.1)
            for share, (process, of_share) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[share]
                lines = [line for line in jsonl.read(gpu.journal) if line.get("run") == of_share["run"]]
                ends = [line["exitstatus"] for line in lines if "exitstatus" in line]
                if process.returncode == ERRORS:
                    jsonl.append(gpu.journal, {"step": step, "errors": "compute-sanitizer found errors"})
                for test, outcome in outcomes(lines, step).items():
                    if outcome == "started":
                        reason = {"reason": "it ended its process, or took too long"}
                        jsonl.append(gpu.journal, {"step": step, "test": test, "outcome": FAILED} | reason)
                if ends in ([0], [1], [5]):  # all tests passed, some failed, or no test was left
                    problems += ["pytest failed"] * (ends == [1])
                elif gpu.left < 0:
                    left = True
                elif lines and not ends:
                    running[share] = start(share)
                else:
                    problems.append(f"pytest ended with exit status {process.returncode}")
    finally:
        for process, _ in running.values():
            stop(process)
    lines = jsonl.read(gpu.journal)
    found = outcomes(lines, step).values()
    if left or running:
        return LEFT, counts(gpu, step)
    problems += [line["errors"] for line in lines if line.get("step") == step and "errors" in line]
    failed = problems or FAILED in found or not found
    return (FAILED if failed else PASSED), "; ".join(dict.fromkeys([counts(gpu, step), *problems]))


def outcomes(lines: list[dict], step: str) -> dict[str, str]:
    """Returns the last outcome of each test of a step. A test that has begun and not ended is "started"."""
    return {line["test"]: line["outcome"] for line in lines if line.get("step") == step and "test" in line}


def counts(gpu: Gpu, step: str) -> str:
    found = list(outcomes(jsonl.read(gpu.journal), step).values())
    return ", ".join(f"{found.count(x)} {x}" for x in (PASSED, FAILED, "skipped"))


def selfcheck(gpu: Gpu) -> Outcome:
    if gpu.left < 150:
        return LEFT, ""
    command = [sys.executable, "-m", "torch_rope.selfcheck", "--json", str(gpu.out / "selfcheck.json")]
    status = gpu.run([*command, "--device", gpu.device, *gpu.checks])
    return (PASSED if status == 0 else LEFT if status is None else FAILED), ""


def benchmarks(gpu: Gpu) -> Outcome:
    """Measures all cases once, then again. A failure of torch_rope is a failure of the step, that of a peer is a result."""
    if gpu.left < 60:
        return LEFT, ""
    seconds = ["--seconds", str(gpu.left - 30)]
    command = [sys.executable, "-m", "benchmarks", "run", "--device", gpu.device, "--out", str(gpu.results)]
    status = gpu.run([*command, *seconds, *gpu.cases])
    lines = [x for x in jsonl.read(gpu.results) if x["kind"] == "sample"]
    wrong = [x for x in lines if x["implementation"].startswith("torch_rope") and x["status"] in ("failed", "wrong")]
    text = f"{len({x['case'] for x in lines})} cases"
    if wrong:
        text += "; " + "; ".join(f"{x['case']}: {x['implementation']} is {x['status']}" for x in wrong[:5])
    if status in (None, 3):
        return LEFT, text
    return (FAILED if status or wrong else PASSED), text


def figures(gpu: Gpu) -> Outcome:
    """Makes the tables and the pictures of what is measured so far. It needs no GPU."""
    if not gpu.results.exists():
        return LEFT, "nothing is measured yet"
    from . import report

    lines = jsonl.read(gpu.results)
    (gpu.out / "results.md").write_text(report.page_of(lines))
    if not importlib.util.find_spec("matplotlib"):
        return PASSED, "without pictures, because matplotlib is not installed"
    from . import plots

    with tempfile.TemporaryDirectory() as folder:
        plots.plot(lines, Path(folder))
        shutil.make_archive(str(gpu.out / "pictures"), "zip", folder)
    return PASSED, ""


STEPS: dict[str, Callable[[Gpu], Outcome]] = {"build": build, "tests": tests}
STEPS |= {tool: sanitizer(tool) for tool in ("memcheck", "initcheck", "synccheck")}
STEPS |= {"selfcheck": selfcheck, "benchmarks": benchmarks, "figures": figures}


def main(gpu: Gpu, steps: list[str]) -> int:
    """Runs steps, or all. Returns 1 if one has failed, 3 if something is left to do, and otherwise 0."""
    if unknown := [name for name in steps if name not in STEPS]:
        sys.exit(f"{unknown[0]} must be one of the steps {', '.join(STEPS)}")
    gpu.out.mkdir(parents=True, exist_ok=True)
    if steps != ["figures"]:
        gpu.begin()
    summary = {}
    for name in steps or STEPS:
        ended = [line for line in jsonl.read(gpu.journal) if line.get("ended") == name]
        if ended and name != "build":
            summary[name] = ended[-1]["outcome"], ended[-1]["text"]
            continue
        started = time.time()
        try:
            if name != "figures" and gpu.left < 0:
                summary[name] = LEFT, ""
                continue
            outcome, text = summary[name] = STEPS[name](gpu)
        except Exception as error:
            outcome, text = summary[name] = FAILED, f"{type(error).__name__}: {error}"
        if outcome != LEFT and name not in ("build", "figures"):
            jsonl.append(gpu.journal, {"ended": name, "outcome": outcome, "text": text})
        print(f"{name}: {outcome}, {time.time() - started:.0f} s", flush=True)
        if name == "build" and outcome == FAILED:
            break
    print(f"\nEverything is in {gpu.out}:")
    for name, (outcome, text) in summary.items():
        print(f"{name:10}  {outcome:6}  {text}")
    failures = [line for line in jsonl.read(gpu.journal) if line.get("outcome") == FAILED and "test" in line]
    for line in failures[:20]:
        print(f"\n{line['step']}: {line['test']}\n{line['reason'][-600:]}")
    found = [outcome for outcome, _ in summary.values()]
    if LEFT in found:
        print("\nRun this again to continue.")
    return 1 if FAILED in found else 3 if LEFT in found else 0
