"""Measures cases in new processes, and reads and writes files of results. Such a file has JSON lines: one that
describes the machine, one for every implementation of every case, and those of accuracy.py. Each names its commit."""

import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from torch_rope import _C

from .cases import Case, cases
from .implementations import ADAPTERS
from .measure import line, measure, quartiles

FOLDER = Path(__file__).parent / "results"
SILENCE = 120  # seconds; a process that sends nothing for this long is ended
PACKAGES = ["numpy", "transformers", "rotary-embedding-torch", "mlx", "onnxruntime", "triton", "liger-kernel"]
PACKAGES += ["flash-attn", "flashinfer-python", "diffusers", "comfy-kitchen"]
# Modules that are imported once. Otherwise the process of each case would import them again.
PRELOAD = ["benchmarks.measure", "torch._inductor.compile_fx", "comfy_kitchen"]
PRELOAD += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt_neox", "glm", "qwen3")]
PRELOAD += [f"diffusers.models.transformers.transformer_{name}" for name in ("wan", "qwenimage", "ltx")]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, lines: Iterable[dict]) -> None:
    """Writes a whole file. If the program is interrupted, the file keeps its old contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    temporary.replace(path)


def commit() -> str:
    """Returns the commit of this tree, with a + if files have changed since. ROPE_COMMIT names it where there is no git."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+"]
    found = shutil.which("git") and subprocess.run(command, cwd=FOLDER, capture_output=True, text=True).stdout.strip()
    return found or os.environ.get("ROPE_COMMIT", "unknown")


def merged(machine: dict, old: list[dict], passes: dict[Case, list], accuracy: list[dict], tree: str) -> Iterator[dict]:
    """Yields the lines of a file: the new ones, and those of its cases that were not measured again. tree: the commit."""
    yield machine
    fresh = {case.name: [x | {"commit": tree} for x in pooled(case, lines)] for case, lines in passes.items()}
    kept = [x for x in old if x["kind"] == "sample" and x["case"] not in fresh]
    for case in cases(machine["device"]):
        yield from fresh.get(case.name) or (x for x in kept if x["case"] == case.name)
    yield from [x | {"commit": tree} for x in accuracy] or (x for x in old if x["kind"] in ("accuracy", "scores"))


def pooled(case: Case, passes: list[list[dict]]) -> Iterator[dict]:
    """Yields the lines of a case, but for what was skipped, with the quartiles of the samples of all passes."""
    every = [x for lines in passes for x in lines if x["status"] != "skipped"]
    for name in dict.fromkeys(x["implementation"] for x in every):
        found = [x for x in every if x["implementation"] == name]
        timed = [x for x in found if x["status"] == "timed"]
        result = {"kind": "sample", "case": case.name} | asdict(case) | (timed or found)[0]
        if timed:
            del result["samples_us"]
            result |= quartiles([us for x in timed for us in x["samples_us"]])
        yield {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in result.items()}


def machine(device: str) -> dict:
    """Returns the first line of a file of results: the machine, and the versions of the packages."""
    # A new process finds the name of the device, because this process must not initialise the GPU.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        name = pool.apply(device_name, (device,))
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = {package: installed.get(package, "not installed") for package in PACKAGES}
    known = {"kind": "machine", "name": name, "device": device, "system": f"{platform.system()} {platform.machine()}"}
    known |= {"threads": torch.get_num_threads(), "cpu_kernels": _C.cpu_instruction_set()}
    known |= {"python": platform.python_version(), "torch": torch.__version__}
    return known | versions | {"date": str(datetime.date.today())}


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    name, family = platform.processor() or platform.machine(), ""
    if os.path.exists("/proc/cpuinfo"):
        known = dict(re.findall(r"^(model name|cpu family)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
        name, family = known.get("model name", name), known.get("cpu family", "")
    return name + f" (family {family})" * bool(family) + f", {os.cpu_count()} cores"


def file_of(name: str) -> Path:
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.jsonl"


def in_process(case: Case, device: str, names=None, *arguments) -> list[dict]:
    """Returns the lines of measure(case, device, names, *arguments), which runs in another process.

    If an implementation crashes or blocks that process, this becomes its line, and another process measures the others.
    """
    left = [name for op, name in ADAPTERS if op == case.op and (names is None or name in names)]
    lines = []
    while left:
        sent, end = sent_by(device, measure, case, device, left, *arguments)
        found = [x for x in sent if isinstance(x, dict)]
        left = [name for name in left if name not in [x["implementation"] for x in found]]
        running = [x for x in sent if isinstance(x, str)][-1:]
        # Without a line or a name, the process could measure nothing at all.
        blamed = [name for name in left if name in running or not sent]
        lines += found + [line(name, "failed", end) for name in blamed]
        left = [name for name in left if name not in blamed]
    return lines


def sent_by(device: str, function: Callable, *arguments) -> tuple[list, str]:
    """Returns what function(*arguments) yields in another process, and how that process ended if it ended too early.

    On a CPU each call has a new process. A process that uses a GPU takes many seconds to start, so it is kept for the
    next call, unless something failed in it. measure() also sends the names of the implementations that it starts.
    """
    kept = _kept.pop(device, None)
    process, connection = kept if kept and kept[0].is_alive() else started(device)
    connection.send((function, arguments))
    sent, end = [], f"nothing happened for {SILENCE} seconds"
    try:
        while connection.poll(SILENCE):
            if (result := connection.recv()) is None:
                end = ""
                break
            sent.append(result)
    except (EOFError, ConnectionError):
        process.join(SILENCE)
        end = f"the process ended with exit code {process.exitcode}"
    if device == "cuda" and not end and not any(isinstance(x, dict) and x.get("status") == "failed" for x in sent):
        _kept[device] = process, connection
    else:
        connection.close()  # which ends a process that waits
        process.join(1 if end else SILENCE)
        process.kill()
        process.join()
    return sent, end


_kept: dict[str, tuple] = {}  # device -> a process that waits for a call, and the connection with it


def started(device: str) -> tuple:
    # A forked process cannot use CUDA if its parent has, and modules that are preloaded may.
    context = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
    if device != "cuda":
        context.set_forkserver_preload(PRELOAD)
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def serve(connection) -> None:
    """Calls what comes through a connection until it is closed, and sends what that yields, and then None."""
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        for result in function(*arguments, **({"starting": connection.send} if function is measure else {})):
            connection.send(result)
        connection.send(None)
