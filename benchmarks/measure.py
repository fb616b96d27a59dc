"""Measures one case in a process of its own: checks every implementation, then times all of them alternately."""

import gc
import math
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import Case, Data, right_answer, what_is_wrong
from .implementations import ADAPTERS, Run

ROUNDS, SECONDS = 11, 2.0  # the largest number of rounds of a case in a pass, and their approximate time
LONG = 4.0  # seconds; a call that takes longer is timed once
COLD = 0.5  # seconds; a call that takes longer finds none of its data in the processor's caches
BLOCK = 1e-3  # seconds; a shorter call is repeated, and the time of all repetitions is divided
PAGES = 16  # a call that gets this many new pages from the system is timed again
REST = 5e-3  # seconds between contenders, so that the threads of the previous contender stop spinning


def measure(
    case: Case,
    device: str,
    names=None,
    rounds: int = ROUNDS,
    with_facts: bool = True,
    starting: Callable[[str], None] = lambda name: None,
) -> Iterator[dict]:
    """Yields a dict for each implementation, with its status and its samples in microseconds.

    names selects implementations; None means all. starting is called with the name of an implementation before it runs,
    so that the caller knows which one was running if the process ends. If an implementation makes CUDA unusable or
    fails while it is timed, the implementations that were not measured yet get no dict.
    """
    makers = {n: m for (op, n), m in ADAPTERS.items() if op == case.op and (names is None or n in names)}
    clock = (Cuda if device == "cuda" else Cpu)(case, rounds)
    if device == "cpu":  # with this limit, a lack of memory raises an error instead of ending the process
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # on macOS
        available = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (int(0.95 * available), resource.RLIM_INFINITY))
        # This memory is touched, and the allocator keeps it. So the pages of later results exist already.
        if not case.whole:
            torch.ones(min(available // 2, 2**26 + 8 * case.rotated * case.itemsize), dtype=torch.uint8)
    sets, runs, facts = [], {}, {}
    try:
        sets = [Data(case, device) for _ in range(clock.sets())]
        expected, tokens = (None, slice(None)) if case.whole else right_answer(case, sets[0])
    except Exception as error:
        yield from (line(name, *why(error)) for name in makers)
        return
    for name, make in makers.items():
        starting(name)
        try:
            if case.op == "rotate" or "cache" in case.op:  # some implementations work in place, so q and k are restored
                fresh = Data(case, device)
                sets[0].q.copy_(fresh.q)
                sets[0].k.copy_(fresh.k)
                del fresh
            with torch.enable_grad():
                of_sets = [make(case, data) for data in sets]
            results = first_results(case, sets[0], of_sets[0], tokens)
            expected = expected or results  # for a model or block, the first implementation gives the expected results
            if not of_sets[0].limit and (error := what_is_wrong(case, results, expected)):
                yield line(name, "wrong", error)
                continue
            facts[name] = facts_of(case, of_sets[0], device) if with_facts else {}
            if device == "cuda":
                torch.cuda.synchronize()  # raises the errors of this implementation's kernels
            runs[name] = of_sets
        except Exception as error:
            yield line(name, *why(error))
            if device == "cuda" and is_lost():
                return
    timing = []

    def starting_to_time(name):
        timing[:] = [name]
        starting(name)

    try:
        samples = clock.time(runs, starting_to_time)
    except Exception as error:
        yield from (line(name, *why(error)) for name in timing)
        return
    for name, us in samples.items():
        yield line(name, "timed") | facts[name] | {"needed_bytes": case.needed_bytes(runs[name][0].in_place)} | us


def is_lost() -> bool:
    """Returns whether an error has made CUDA unusable in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


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


def first_results(case: Case, data: Data, run: Run, tokens) -> list[torch.Tensor]:
    """Returns the results of the first call for these tokens. The call gets unchanged data and empty caches."""
    for cache in data.__dict__.get("caches", ()):
        cache.zero_()
    with run.context():
        if run.compiled:
            metrics.reset()
        results = run.results(run.call())
        if run.compiled:
            run.loops = metrics.generated_kernel_count
        return [x[:, tokens].clone() if x.ndim == 4 else x.clone() for x in results]


def facts_of(case: Case, run: Run, device: str) -> dict:
    """Returns the figures of a call that need no timing."""
    with run.context():
        facts = {"launches": run.loops} if run.loops else {}
        if run.counted:
            facts |= cuda_facts(run) if device == "cuda" else cpu_facts(case, run)
        return facts


def cpu_facts(case: Case, run: Run) -> dict:
    """Returns the peak of the memory that a call allocates, and figures of the operators of torch that it runs.

    The figures are the number of operators that compute, the bytes that they read and write, and their floating-point
    operations; for a whole model, only the first of them. For a compiled function only the memory is returned, because
    its loops were counted during compilation; so it is in the group "diffusion", of which nothing else is shown.
    """
    if case.op == "model":
        with Counter(case) as counter:
            run.call()
        return {"launches": counter.total["launches"]}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        returned = run.call()
        del returned
    memory = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(memory, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    if run.compiled or case.group == "diffusion":
        return {"peak_bytes": peak}
    with Counter(case) as counter:
        run.call()
    return {"peak_bytes": peak} | counter.total


def cuda_facts(run: Run) -> dict:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = run.call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del returned
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run.call()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return {"peak_bytes": peak, "launches": len(kernels)}


ARITHMETIC = {"mul", "mul_", "add", "add_", "sub", "neg", "div", "pow", "rsqrt", "mean", "sum", "cos", "sin", "addcmul"}
SPARSE = {"index", "index_copy_", "index_put_", "index_select"}  # they move the bytes of their smallest tensor


class Counter(TorchDispatchMode):
    """Counts the work of torch's operators. Views cost nothing; others read their tensors and write results once."""

    def __init__(self, case: Case):
        super().__init__()
        self.case, self.total = case, {"launches": 0, "moved_bytes": 0, "flops": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name in ("aten::detach", "aten::_unsafe_view"):
            return result
        given, made = tensors([args, kwargs or {}]), tensors(result)
        name = func._schema.name.partition("::")[2]
        self.total["launches"] += 1
        if func.namespace == "rope":
            moved, flops = self.ours(func, args)
        elif name in SPARSE:
            # A number is a floating-point number or has one byte; an index is neither.
            moved, flops = 2 * min(size(t) for t in given + made if t.is_floating_point() or t.itemsize == 1), 0
        else:
            written = made or [a for a, of in zip(args, func._schema.arguments, strict=False) if of.is_write]
            read = given[1:] if name == "copy_" else given
            moved = sum(size(t) for t in read + written)
            flops = max(t.numel() for t in given + made) if name in ARITHMETIC else 0
        self.total["moved_bytes"] += moved
        self.total["flops"] += flops
        return result

    def ours(self, func, args) -> tuple[int, int]:
        """Returns the bytes and the floating-point operations of an operator of torch_rope.

        Heads are read and written once. Only the table rows and the cells of the call's tokens count.
        """
        case, by_name = self.case, dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        heads = {
            name: x
            for name, x in by_name.items()
            if isinstance(x, torch.Tensor) and x.ndim >= 3 and "cache" not in name
        }
        norm = any("norm_weight" in name and x is not None for name, x in by_name.items())
        backward = "backward" in func._schema.name
        written = {name: x for name, x in heads.items() if name in ("q", "k")} if backward else heads
        moved = sum(size(x) for x in heads.values())
        # k and v are written in the dtype of their caches.
        moved += sum(size(x) // x.itemsize * by_name.get(f"{name}_cache", x).itemsize for name, x in written.items())
        return moved + case.rows * case.rotary_dim * 4, case.flops_of(norm)


def tensors(tree) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def size(t: torch.Tensor) -> int:
    """Returns the size of a tensor in bytes. An expanded dimension counts once."""
    return t.itemsize * math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride)


class Cpu:
    """Times contenders on the CPU, alternately.

    Before each timed block, the contender is called once untimed, so that the caches of the processor hold its own data
    and not the data of the previous contender. A call that takes half a second is not, because it is long enough.
    """

    def __init__(self, case: Case, rounds: int):
        self.case, self.rounds = case, rounds

    def sets(self) -> int:
        return 1

    def time(self, runs: dict[str, list[Run]], starting: Callable[[str], None]) -> dict[str, dict]:
        if not runs:
            return {}
        long, seconds = {"model": (60.0, 40.0), "block": (LONG, 10.0)}.get(self.case.op, (LONG, SECONDS))
        # A call of a whole model may get memory from the system, as it does where it is used.
        warm = duration if self.case.whole else warm_duration
        calls, samples = {}, {name: [] for name in runs}
        for name, (run,) in runs.items():
            starting(name)
            with run.context():
                once = duration(run.call, 1)
                if once < COLD:
                    once = min(duration(run.call, 1) for _ in range(3))
            if once > long:
                samples[name] = [once * 1e6]
            else:
                calls[name] = max(1, round(BLOCK / once)), once
        round_seconds = sum((n + (once < COLD)) * once + REST for n, once in calls.values())
        gc.collect()
        gc.disable()
        order, shuffle = list(calls), random.Random(0).shuffle
        for _ in range(max(3, min(self.rounds, round(seconds / max(round_seconds, REST))))):
            shuffle(order)  # so that no implementation always follows the same one
            for name in order:
                (repeat, once), run = calls[name], runs[name][0]
                starting(name)
                time.sleep(REST)
                with run.context():
                    if once < COLD:
                        run.call()
                    samples[name].append(warm(run.call, repeat) * 1e6)
        gc.enable()
        return {name: {"samples_us": s} for name, s in samples.items()}


def warm_duration(call, calls: int) -> float:
    """Returns the duration of a call. Measures up to four times if the allocator had to get memory from the system."""
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds = duration(call, calls)
        if resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < PAGES * calls:
            break
    return seconds


def duration(call, calls: int) -> float:
    """Returns the mean time of a call in seconds."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


LAUNCHES = 50  # the largest number of calls in a CUDA graph, and the largest number of sets of data


class Cuda:
    """Times contenders on a CUDA device.

    A CUDA graph of many calls is replayed, so that the time of the host does not count. In the group "host", only the
    time of the host counts. The calls cycle through several sets of data, which together are larger than the L2 cache,
    so that memory is timed. The sets of a few tokens remain in the cache, as they do in a decode step.
    """

    def __init__(self, case: Case, rounds: int):
        self.case, self.rounds = case, rounds
        # Everything runs on one stream, because a backward runs on the stream of its forward and must be captured
        # there.
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise eager code would be timed

    def sets(self) -> int:
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        return min(LAUNCHES, 1 + 3 * l2 // max(1, self.case.needed_bytes()))

    def time(self, runs: dict[str, list[Run]], starting: Callable[[str], None]) -> dict[str, dict]:
        calls = {name: [partial(in_context, run) for run in of_sets] for name, of_sets in runs.items()}
        if self.case.group == "host":
            return {name: {"samples_us": self.of_host(name, of_sets[0], starting)} for name, of_sets in calls.items()}
        pool = torch.cuda.graph_pool_handle()  # all graphs share the pool, because nobody reads their results
        launches, replays, graphs = {}, {}, {}
        for name, of_sets in calls.items():
            starting(name)
            launches[name] = self.launches(of_sets)
        for name, of_sets in calls.items():
            starting(name)
            try:
                replays[name], graphs[name] = self.graph(of_sets, launches[name], pool), True
            except RuntimeError:  # a graph cannot capture what this contender does
                torch.cuda.synchronize()
                replays[name], graphs[name] = partial(go_round, of_sets, launches[name]), False
        for name, replay in replays.items():  # an untimed round, in which an error is known to be this contender's
            starting(name)
            replay()
            torch.cuda.synchronize()
        events = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, replay in replays.items():
                events[name].append(self.between(replay))
        torch.cuda.synchronize()
        return {
            name: {
                "samples_us": [start.elapsed_time(end) * 1e3 / launches[name] for start, end in pairs],
                "in_graph": graphs[name],
            }
            for name, pairs in events.items()
        }

    def of_host(self, name: str, call, starting: Callable[[str], None]) -> list[float]:
        """Returns samples of the host's time of a call. Batches are so small that the device's queue does not fill."""
        starting(name)
        samples = []
        for _ in range(10 * self.rounds):
            torch.cuda.synchronize()
            samples.append(duration(call, 100) * 1e6)
        return samples

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

    def graph(self, calls: list, launches: int, pool):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            go_round(calls, launches)
        return graph.replay


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


def quartiles(samples: list[float]) -> dict:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return {"median_us": median, "q1_us": q1, "q3_us": q3, "samples": len(samples)}
