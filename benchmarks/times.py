"""Measures cases in new processes, and reads and writes files of results.

A file of results has JSON lines: one that describes the machine, one for every implementation of every case, and those of
accuracy.py. Each names its commit.
"""

import datetime
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from torch_rope import _C

from . import models  # noqa: F401  registers its adapters
from .adapters import ADAPTERS, Run, compiled
from .cases import Case, Data, cases, right_answer, what_is_wrong

FOLDER = Path(__file__).parent / "results"
SILENCE = 120  # seconds; a process that sends nothing for this long is ended
PACKAGES = ["numpy", "transformers", "rotary-embedding-torch", "mlx", "triton", "liger-kernel", "flashinfer-python"]
PACKAGES += ["vllm", "diffusers", "comfy-kitchen"]
# Modules that are imported once. Otherwise the process of each case would import them again.
PRELOAD = ["benchmarks.times", "torch._inductor.compile_fx", "comfy_kitchen"]
PRELOAD += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt_neox", "glm", "qwen3")]
PRELOAD += [f"diffusers.models.transformers.transformer_{name}" for name in ("wan", "qwenimage", "ltx")]
ROUNDS, SECONDS = 11, 2.0  # the largest number of rounds of a case in a pass, and their approximate time
LONG = 4.0  # seconds; a call that takes longer is timed once
COLD = 0.5  # seconds; a call that takes longer finds none of its data in the processor's caches
BLOCK = 1e-3  # seconds; a shorter call is repeated, and the time of all repetitions is divided
REST = 5e-3  # seconds between contenders, so that the threads of the previous contender stop spinning
LAUNCHES = 50  # the largest number of calls in a CUDA graph, and the largest number of sets of data
Timing = Generator[str, None, dict[str, list[float]]]  # yields the name of an implementation before it runs


# ---- Files of results ----


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
    yield from [x | {"commit": tree} for x in accuracy] or (x for x in old if x["kind"] == "accuracy")


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
    if device == "cuda":  # a new process finds the name, because this process must not initialise the GPU
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            name = pool.apply(torch.cuda.get_device_name)
    else:
        name = processor()
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = {package: installed.get(package, "not installed") for package in PACKAGES}
    known = {"kind": "machine", "name": name, "device": device, "system": f"{platform.system()} {platform.machine()}"}
    known |= {"threads": torch.get_num_threads(), "cpu_kernels": _C.cpu_instruction_set()}
    known |= {"python": platform.python_version(), "torch": torch.__version__}
    return known | versions | {"date": str(datetime.date.today())}


def processor() -> str:
    name, family = platform.processor() or platform.machine(), ""
    if os.path.exists("/proc/cpuinfo"):
        known = dict(re.findall(r"^(model name|cpu family)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
        name, family = known.get("model name", name), known.get("cpu family", "")
    return name + f" (family {family})" * bool(family) + f", {os.cpu_count()} cores"


def file_of(name: str) -> Path:
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.jsonl"


# ---- Processes ----


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
    """Returns what function(*arguments) yields in another process, and how it ended if it did not end well.

    On a CPU each call has a new process. A process that uses a GPU takes many seconds to start, so it is kept for the
    next call, unless something failed in it.
    """
    kept = _kept.pop(device, None)
    process, connection = kept if kept and kept[0].is_alive() else started(device)
    connection.send((function, arguments))
    sent, end = [], None
    try:
        while end is None:
            if not connection.poll(SILENCE):
                end = f"nothing happened for {SILENCE} seconds"
            elif isinstance(result := connection.recv(), Ended):
                end = result.error
            else:
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


class Ended(NamedTuple):
    """Follows what a call has yielded."""

    error: str  # that it raised, or an empty text


def serve(connection) -> None:
    """Calls what comes through a connection until it is closed. Sends what each call yields, and then Ended."""
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            for result in function(*arguments):
                connection.send(result)
            connection.send(Ended(""))
        except Exception as error:
            connection.send(Ended(why(error)[1]))


# ---- One case in one process: every implementation is checked, then all are timed alternately ----


def measure(case: Case, device: str, names: Iterable[str], rounds=ROUNDS, with_facts=True) -> Iterator[str | dict]:
    """Yields a dict for each of these implementations, with its status and its samples in microseconds, and before an
    implementation runs, its name.

    If an implementation makes CUDA unusable or fails while it is timed, those that were not measured yet get no dict.
    """
    makers = {name: ADAPTERS[case.op, name] for name in names}
    clock = (Cuda if device == "cuda" else Cpu)(case, rounds)
    compiled.cache_clear()  # so that a process which measures many cases compiles for each of them
    torch._dynamo.reset()
    runs, facts = {}, {}
    try:
        sets = [Data(case, device) for _ in range(clock.sets())]
        expected, tokens = (None, slice(None)) if case.op == "model" else right_answer(case, sets[0])
    except Exception as error:
        yield from (line(name, *why(error)) for name in makers)
        return
    for name, make in makers.items():
        yield name
        try:
            if case.op == "rotate" or "cache" in case.op:  # some implementations work in place, so q and k are restored
                fresh = Data(case, device)
                sets[0].q.copy_(fresh.q)
                sets[0].k.copy_(fresh.k)
                del fresh
            with torch.enable_grad():
                of_sets = [make(case, data) for data in sets]
            results = first_results(sets[0], of_sets[0], tokens)
            expected = expected or results  # for a model, the first implementation gives the expected results
            if of_sets[0].rotates and (error := what_is_wrong(case, results, expected)):
                yield line(name, "wrong", error)
                continue
            with of_sets[0].context():
                facts[name] = clock.facts(of_sets[0]) if with_facts else {}
            runs[name] = of_sets
        except Exception as error:
            yield line(name, *why(error))
            if device == "cuda":
                torch.cuda.synchronize()  # ends this process if the error has made CUDA unusable
    samples = yield from clock.time(runs)
    for name, us in samples.items():
        yield line(name, "timed") | facts[name] | {"needed_bytes": case.needed_bytes, "samples_us": us}


def line(name: str, status: str, reason: str = "") -> dict:
    return {"implementation": name, "status": status} | ({"reason": reason} if reason else {})


def summary(x: dict) -> str:
    if x["status"] == "timed":
        return f"{x['implementation']} {quartiles(x['samples_us'])['median_us']:.4g} us"
    return f"{x['implementation']} {x['status'].upper()}: {x['reason']}"


def why(error: Exception) -> tuple[str, str]:
    """Returns the status and the reason of an implementation that raised this error."""
    message = str(error).strip().partition("\n")[0][:160]
    if isinstance(error, ImportError):
        return "skipped", f"not installed ({message})"
    if isinstance(error, NotImplementedError):
        return "skipped", message
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return "skipped", "not enough memory"
    return "failed", f"{type(error).__name__}: {message}"


def first_results(data: Data, run: Run, tokens) -> list[torch.Tensor]:
    """Returns the results of the first call for these tokens. The call gets unchanged data and empty caches."""
    for cache in data.__dict__.get("caches", ()):
        cache.zero_()
    with run.context():
        return [x[:, tokens].clone() if x.ndim == 4 else x.clone() for x in run.results(run.call())]


def duration(call, calls: int = 1) -> float:
    """Returns the mean time of a call in seconds."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def quartiles(samples: list[float]) -> dict:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return {"median_us": median, "q1_us": q1, "q3_us": q3, "samples": len(samples)}


class Cpu:
    """Times contenders on the CPU, alternately.

    Before each timed block, the contender is called once untimed, so that the caches of the processor hold its own data
    and not the data of the previous contender. A call that takes half a second is not, because it is long enough.
    """

    def __init__(self, case: Case, rounds: int):
        self.case, self.rounds = case, rounds
        # With this limit, a lack of memory raises an error instead of ending the process.
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # on macOS
        available = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (int(0.95 * available), resource.RLIM_INFINITY))
        # This memory is touched, and the allocator keeps it. So the pages of later results exist already.
        if case.op != "model":
            torch.ones(min(available // 2, 2**26 + 4 * case.needed_bytes), dtype=torch.uint8)

    def sets(self) -> int:
        return 1

    def facts(self, run: Run) -> dict:
        """Returns the peak of the memory that a call allocates. A whole model has too many events."""
        if self.case.op == "model":
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            returned = run.call()
            del returned
        memory = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = 0
        for event in sorted(memory, key=lambda e: e.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        return {"peak_bytes": peak}

    def time(self, runs: dict[str, list[Run]]) -> Timing:
        """Returns the samples of each implementation in microseconds."""
        long, seconds = (60.0, 40.0) if self.case.op == "model" else (LONG, SECONDS)
        calls, samples = {}, {name: [] for name in runs}
        for name, (run,) in runs.items():
            yield name
            with run.context():
                once = duration(run.call)
                if once < COLD:
                    once = min(duration(run.call) for _ in range(3))
            if once > long:
                samples[name] = [once * 1e6]
            else:
                calls[name] = max(1, round(BLOCK / once)), once
        round_seconds = sum((n + (once < COLD)) * once + REST for n, once in calls.values())
        gc.collect()
        gc.disable()
        order, shuffle = list(calls), random.Random(0).shuffle
        for _ in range(min(self.rounds, max(3, round(seconds / max(round_seconds, REST))))):
            shuffle(order)  # so that no implementation always follows the same one
            for name in order:
                (repeat, once), run = calls[name], runs[name][0]
                yield name
                time.sleep(REST)
                with run.context():
                    if once < COLD:
                        run.call()
                    samples[name].append(duration(run.call, repeat) * 1e6)
        gc.enable()
        return samples


class Cuda:
    """Times contenders on a CUDA device.

    A CUDA graph of many calls is replayed, so that the time of the host does not count. The calls cycle through several
    sets of data, which together are larger than the L2 cache, so that memory is timed. The sets of a few tokens remain
    in the cache, as they do in a decode step.
    """

    def __init__(self, case: Case, rounds: int):
        self.case, self.rounds = case, rounds
        # Everything runs on one stream, because a backward runs on the stream of its forward and must be captured
        # there.
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise eager code would be timed

    def sets(self) -> int:
        if self.case.op == "model":
            return 1
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        return min(LAUNCHES, 1 + 3 * l2 // self.case.needed_bytes)

    def facts(self, run: Run) -> dict:
        """Returns the peak of the memory that a call allocates."""
        torch.cuda.synchronize()  # raises the errors of this implementation's kernels
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.call()
        torch.cuda.synchronize()
        return {"peak_bytes": torch.cuda.max_memory_allocated() - before}

    def time(self, runs: dict[str, list[Run]]) -> Timing:
        """Returns the samples of each implementation in microseconds."""
        calls = {name: [partial(in_context, run) for run in of_sets] for name, of_sets in runs.items()}
        pool = torch.cuda.graph_pool_handle()  # all graphs share the pool, because nobody reads their results
        launches, replays = {}, {}
        for name, of_sets in calls.items():
            yield name
            launches[name] = self.launches(of_sets)
        for name, of_sets in calls.items():
            yield name
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                    go_round(of_sets, launches[name])
                replays[name] = graph.replay
            except RuntimeError:  # a graph cannot capture what this contender does
                torch.cuda.synchronize()
                replays[name] = partial(go_round, of_sets, launches[name])
            replays[name]()  # an untimed round, in which an error is known to be this contender's
            torch.cuda.synchronize()
        events = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, replay in replays.items():
                events[name].append(self.between(replay))
        torch.cuda.synchronize()
        return {
            name: [start.elapsed_time(end) * 1e3 / launches[name] for start, end in pairs]
            for name, pairs in events.items()
        }

    def between(self, call) -> tuple:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        call()
        end.record()
        return start, end

    def launches(self, calls: list) -> int:
        """Returns the number of calls that takes several milliseconds. A first round compiles what needs compiling."""
        go_round(calls, len(calls))
        start, end = self.between(partial(go_round, calls, len(calls)))
        torch.cuda.synchronize()
        estimate = start.elapsed_time(end) * 1e3 / len(calls)
        return max(len(calls), min(LAUNCHES, int(5000 / max(estimate, 1))))


def in_context(run: Run):
    with run.context():
        return run.call()


def go_round(calls: list, launches: int) -> None:
    """Calls the functions cyclically, this many times in all.

    The result of a set of data is kept until the next call with this set. Otherwise all sets would write to the same
    memory.
    """
    kept = [None] * len(calls)
    for i in range(launches):
        kept[i % len(calls)] = None
        kept[i % len(calls)] = calls[i % len(calls)]()
