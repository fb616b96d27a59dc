"""Measures one case in a process of its own: checks every implementation, then times all of them alternately."""

import gc
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import Case, Data, right_answer, what_is_wrong
from .implementations import ADAPTERS, Run, compiled

ROUNDS, SECONDS = 11, 2.0  # the largest number of rounds of a case in a pass, and their approximate time
LONG = 4.0  # seconds; a call that takes longer is timed once
COLD = 0.5  # seconds; a call that takes longer finds none of its data in the processor's caches
BLOCK = 1e-3  # seconds; a shorter call is repeated, and the time of all repetitions is divided
REST = 5e-3  # seconds between contenders, so that the threads of the previous contender stop spinning
LAUNCHES = 50  # the largest number of calls in a CUDA graph, and the largest number of sets of data
Starting = Callable[[str], None]  # is called with the name of an implementation before it runs


def measure(case: Case, device: str, names=None, rounds=ROUNDS, with_facts=True, starting: Starting = lambda _: None):
    """Yields a dict for each implementation, with its status and its samples in microseconds.

    names selects implementations; None means all. If an implementation makes CUDA unusable or fails while it is timed,
    the implementations that were not measured yet get no dict.
    """
    makers = {n: m for (op, n), m in ADAPTERS.items() if op == case.op and (names is None or n in names)}
    clock = (Cuda if device == "cuda" else Cpu)(case, rounds)
    compiled.cache_clear()  # so that a process which measures many cases compiles for each of them
    torch._dynamo.reset()
    runs, facts, running = {}, {}, []
    try:
        sets = [Data(case, device) for _ in range(clock.sets())]
        expected, tokens = (None, slice(None)) if case.op == "model" else right_answer(case, sets[0])
    except Exception as error:
        yield from (line(name, *why(error)) for name in makers)
        return

    def begins(name):
        running[:] = [name]
        starting(name)

    for name, make in makers.items():
        begins(name)
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
            if not of_sets[0].limit and (error := what_is_wrong(case, results, expected)):
                yield line(name, "wrong", error)
                continue
            with of_sets[0].context():
                facts[name] = clock.facts(of_sets[0]) if with_facts and of_sets[0].counted else {}
            runs[name] = of_sets
        except Exception as error:
            yield line(name, *why(error))
            if device == "cuda":
                torch.cuda.synchronize()  # ends this process if the error has made CUDA unusable
    try:
        samples = clock.time(runs, begins)
    except Exception as error:
        yield from (line(name, *why(error)) for name in running)
        return
    for name, us in samples.items():
        yield line(name, "timed") | facts[name] | {"needed_bytes": case.needed_bytes, "samples_us": us}


def line(name: str, status: str, reason: str = "") -> dict:
    return {"implementation": name, "status": status} | ({"reason": reason} if reason else {})


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


class Operators(TorchDispatchMode):
    """Counts the operators that compute. Views do not."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not (func.is_view or func._schema.name in ("aten::detach", "aten::_unsafe_view"))
        return func(*args, **(kwargs or {}))


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
        """Returns the number of operators that a model runs, or else the peak of the memory that a call allocates."""
        if self.case.op == "model":
            with Operators() as operators:
                run.call()
            return {"launches": operators.number}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            returned = run.call()
            del returned
        memory = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = peak = 0
        for event in sorted(memory, key=lambda e: e.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        return {"peak_bytes": peak}

    def time(self, runs: dict[str, list[Run]], starting: Starting) -> dict[str, list[float]]:
        long, seconds = (60.0, 40.0) if self.case.op == "model" else (LONG, SECONDS)
        calls, samples = {}, {name: [] for name in runs}
        for name, (run,) in runs.items():
            starting(name)
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
                starting(name)
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

    def time(self, runs: dict[str, list[Run]], starting: Starting) -> dict[str, list[float]]:
        calls = {name: [partial(in_context, run) for run in of_sets] for name, of_sets in runs.items()}
        pool = torch.cuda.graph_pool_handle()  # all graphs share the pool, because nobody reads their results
        launches, replays = {}, {}
        for name, of_sets in calls.items():
            starting(name)
            launches[name] = self.launches(of_sets)
        for name, of_sets in calls.items():
            starting(name)
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
