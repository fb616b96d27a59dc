"""Reads and writes result files.

A result file has JSON lines. The first line describes the machine. The others are one line for every implementation of
every case.
"""

import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from torch_rope import _C

from .cases import Case, cases
from .implementations import ADAPTERS
from .jsonl import append, read, write
from .measure import line, measure, quartiles

FOLDER = Path(__file__).parent / "results"
SILENCE = 120  # seconds; a process that sends nothing for this long is ended
PACKAGES = "numpy transformers rotary-embedding-torch mlx onnxruntime triton liger-kernel flash-attn flashinfer-python xformers"
PACKAGES += " diffusers comfy-kitchen peft"
# Modules that are imported once. Otherwise the process of each case would import them again.
PRELOAD = ["torch._inductor.compile_fx"] + [
    f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt_neox", "glm", "qwen3")
]
PRELOAD += [f"diffusers.models.transformers.transformer_{name}" for name in ("wan", "qwenimage", "ltx")]
PRELOAD += ["comfy_kitchen", "peft"]


def machine(device: str) -> dict:
    """Returns the first line of a result file: the machine, and the versions of the packages."""
    # A new process finds the name of the device, because this process must not initialise the GPU.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        name = pool.apply(device_name, (device,))
    versions = {}
    for package in PACKAGES.split():
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
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


class Journal:
    """A file of everything that a run has measured so far. An interrupted run continues from it.

    The journal is in the folder of the result file, which write_results() makes from it.
    """

    def __init__(self, out: Path, machine: dict):
        self.path, self.out, self.machine = out.with_suffix(".journal"), out, machine
        self.entries = read(self.path)
        undated = [{k: v for k, v in m.items() if k != "date"} for m in (machine, *self.entries[:1])]
        if undated[0] != undated[-1] or not self.entries:  # the machine or a version has changed, or the journal is new
            self.entries = [machine]
        write(self.path, self.entries)  # without a line that an interrupted run has begun

    def done(self) -> set[tuple[str, int]]:
        return {(entry["case"], entry["pass"]) for entry in self.entries[1:]}

    def add(self, case: str, number: int, lines: list[dict]) -> None:
        self.entries.append({"case": case, "pass": number, "lines": lines})
        append(self.path, self.entries[-1])

    def write_results(self, ran: list[Case], whole: bool) -> None:
        """Writes the result file, in which the samples of all passes of a case are one line.

        If whole is False, the cases that were not run keep their lines.
        """
        made = [result for case in ran for result in self.pooled(case)]
        accuracy = [x for entry in self.entries[1:] if entry["case"] == "accuracy" for x in entry["lines"]]
        kept = [] if whole else read(self.out)[1:]
        fresh = {x["case"] for x in made}
        kept_samples = [x for x in kept if x["kind"] == "sample" and x["case"] not in fresh]
        kept_accuracy = [x for x in kept if x["kind"] != "sample" and not accuracy]
        order = [case.name for case in cases(self.machine["device"])]
        made = sorted(made + kept_samples, key=lambda x: order.index(x["case"]) if x["case"] in order else len(order))
        write(self.out, [self.machine, *made, *accuracy, *kept_accuracy])

    def remove(self) -> None:
        self.path.unlink()

    def pooled(self, case: Case) -> Iterator[dict]:
        """Yields the lines of a case, with the median and the quartiles of the samples of all passes."""
        passes = [entry["lines"] for entry in self.entries[1:] if entry["case"] == case.name]
        medians = {}
        for name in dict.fromkeys(x["implementation"] for lines in passes for x in lines):
            found = [x for lines in passes for x in lines if x["implementation"] == name]
            timed = [x for x in found if x["status"] == "timed"]
            result = {"kind": "sample", "case": case.name} | asdict(case) | (timed or found)[0]
            if timed:
                del result["samples_us"]
                result |= quartiles([us for x in timed for us in x["samples_us"]])
                medians[name] = result["median_us"]
                if "copy" in medians:
                    result["to_copy"] = medians[name] / medians["copy"]
            yield {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in result.items()}


def in_process(case: Case, device: str, names=None, *arguments) -> list[dict]:
    """Returns the lines of measure(case, device, names, *arguments), which runs in a new process.

    If an implementation crashes or blocks that process, this becomes its line, and another process measures the others.
    """
    left = [name for op, name in ADAPTERS if op == case.op and (names is None or name in names)]
    lines = []
    while left:
        sent, end = sent_by(measure, case, device, left, *arguments)
        found = [x for x in sent if isinstance(x, dict)]
        left = [name for name in left if name not in [x["implementation"] for x in found]]
        running = [x for x in sent if isinstance(x, str)][-1:]
        # Without a line or a name, the process could measure nothing at all.
        blamed = [name for name in left if name in running or not sent]
        lines += found + [line(name, "failed", end) for name in blamed]
        left = [name for name in left if name not in blamed]
    return lines


def sent_by(function, *arguments) -> tuple[list, str]:
    """Returns what function(*arguments) yields in a new process, and how that process ended.

    If the function is measure(), the list also has the names of the implementations that were started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.measure", *PRELOAD])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=send_all, args=(sending, function, *arguments), daemon=True)
    process.start()
    sending.close()
    sent, end = [], ""
    try:
        while receiving.poll(SILENCE):
            sent.append(receiving.recv())
        end = f"nothing happened for {SILENCE} seconds"
        process.kill()
    except EOFError:
        process.join(SILENCE)
        process.kill()
    process.join()
    return sent, end or f"the process ended with exit code {process.exitcode}"


def send_all(sending, function, *arguments) -> None:
    for result in function(*arguments, **({"starting": sending.send} if function is measure else {})):
        sending.send(result)
    sending.close()


def compare(new: list[dict], old: list[dict], widen: float = 0.25) -> tuple[int, list[str]]:
    """Compares the medians of a new run with the quartiles of an old run, which are widened by this part.

    Returns the number of medians that lie inside, and a line of text for each median that lies outside.
    """

    def timed(lines):
        return {(x["case"], x["implementation"]): x for x in lines if x.get("status") == "timed"}

    inside, outside, before = 0, [], timed(old)
    for key, x in timed(new).items():
        if key not in before:
            continue
        low, high = before[key]["q1_us"] * (1 - widen), before[key]["q3_us"] * (1 + widen)
        if low <= x["median_us"] <= high:
            inside += 1
        else:
            outside.append(f"{key[0]}; {key[1]}: {x['median_us']:.4g} us, not {low:.4g} to {high:.4g}")
    return inside, outside
