"""Checks that need a process of their own: they compile, depend on what ran before, or may crash or hang."""

import atexit
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import torch

from torch_rope import reference
from torch_rope.selfcheck.checks import Check, Group, Skip, describe_error, exact, rope


def first_calls(check: Check) -> list[Group]:
    """Returns groups that measure the first calls of a process.

    They run before all others. The second group then finds what Metal keeps on disk.
    """
    return [Group(name, {"": partial(measure_first_calls, check, name)}, apart=True, limit=180.0) for name in FIRST]


def groups(check: Check) -> list[Group]:
    threads = {"one kernel": partial(two_threads, check, False), "different kernels": partial(two_threads, check, True)}
    compiled = {name: partial(inductor, check, name) for name in COMPILED}
    packages = {
        name: partial(aot_inductor, check, name) for name in ("an operator alone", "between pointwise operations")
    }
    return [
        Group("two threads, new pipelines", threads, apart=True),
        Group(
            "graph capture",
            {op: partial(graph_capture, check, op) for op in ("rotate_qk", "norm_rotate_qk")}
            | {"a scale": partial(scale_in_graph, check)},
            apart=True,
        ),
        Group("exit while work runs", {"": partial(leave_work, check)}, apart=True),
        Group("torch.compile, inductor", compiled, seconds=60, apart=True, limit=120.0),
        Group("AOTInductor", packages, seconds=60, apart=True, limit=180.0),
    ]


def layer(check: Check, dtype: torch.dtype = torch.float32):
    """Returns q, k, cos, sin and two norm weights."""
    q, k = (check.make(2, 9, heads, 64, dtype=dtype) for heads in (4, 2))
    return q, k, *check.tables(9, 64), check.make(64), check.make(64)


# ---- the first calls of a process ----

FIRST = "first calls", "first calls, again"


def measure_first_calls(check: Check, name: str) -> None:
    def seconds(call) -> float:
        start = time.perf_counter()
        call()
        check.synchronize()
        return time.perf_counter() - start

    row = {"start of the device": seconds(lambda: layer(check))}
    q, k, cos, sin, q_weight, k_weight = layer(check, torch.bfloat16)
    cos, leaf = cos.requires_grad_(), q.detach().requires_grad_()
    calls = {
        "rotate": lambda: rope.rotate_qk(q, k, cos.detach(), sin),
        "norm_rotate": lambda: rope.norm_rotate_qk(q, k, q_weight, k_weight, cos.detach(), sin),
        "norm_backward": lambda: (
            rope.norm_rotate_qk(leaf, k, q_weight, k_weight, cos.detach(), sin)[0].sum().backward()
        ),
        "table_backward": lambda: rope.rotate(q, cos, sin).sum().backward(),
        "cos_sin": lambda: rope.cos_sin(torch.arange(9, device=check.device), torch.ones(32, device=check.device)),
    }
    for family, call in calls.items():
        row[family] = seconds(call)
    row["all of them again"] = seconds(lambda: [call() for call in calls.values()])
    check.measured(name, {case: round(1000 * s, 3) for case, s in row.items()})


# ---- threads, graphs and the exit ----


def two_threads(check: Check, different: bool) -> None:
    """Calls operators from two threads at once, which both need a pipeline that does not exist yet."""
    dtypes = (torch.float16, torch.bfloat16) if different else (torch.float32,) * 2
    layers, barrier = [layer(check, dtype) for dtype in dtypes], Barrier(2)

    def run(args):
        q, k, cos, sin, *weights = args
        barrier.wait(30)
        return [*rope.rotate_qk(q, k, cos, sin), *rope.norm_rotate_qk(q, k, *weights, cos, sin)]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, layers))
    for outs, args in zip(found, layers, strict=True):
        q, k, cos, sin, *weights = map(exact, args)
        expected = [*reference.rotate_qk(q, k, cos, sin), *reference.norm_rotate_qk(q, k, *weights, cos, sin)]
        for out, e in zip(outs, expected, strict=True):
            check.near_largest("a result", out, e)


def captured(check: Check, call):
    """Captures a call in a graph. Returns the graph and what the call returned."""
    graphs = {"cuda": ("CUDAGraph", "graph"), "mps": ("MetalGraph", "metal_graph")}.get(check.device.type)
    module = getattr(torch, check.device.type, None)
    if not graphs or not all(hasattr(module, name) for name in graphs):
        raise Skip(f"this torch has no graph capture for {check.device.type}")
    call()  # makes the pipeline before the capture
    check.synchronize()
    graph = getattr(module, graphs[0])()
    with getattr(module, graphs[1])(graph):
        outs = call()
    return graph, outs


def graph_capture(check: Check, op: str) -> None:
    """Captures a call in a graph, and replays it with another input."""
    q, k, cos, sin, *weights = layer(check)
    args = [*(weights if "norm" in op else []), cos, sin]
    other = check.make(*q.shape)
    expected = check.call(op, other, k, *args)
    graph, outs = captured(check, lambda: getattr(rope, op)(q, k, *args))
    q.copy_(other)
    graph.replay()
    check.synchronize()
    check.same(outs, expected)


def scale_in_graph(check: Check) -> None:
    """Captures a call that writes quantised caches, and replays it with another scale."""
    q, k, cos, sin, *_ = layer(check)
    caches = [torch.zeros(k.shape, dtype=torch.int8, device=check.device) for _ in "kv"]
    scale = torch.full((1,), 0.02, device=check.device)
    args, scales = (q, k, -k, *caches, cos, sin), {"k_scale": scale, "v_scale": scale}
    graph, _ = captured(check, lambda: rope.rotate_into_cache_(*args, **scales))
    scale.fill_(0.05)
    graph.replay()
    check.synchronize()
    found = [cache.clone() for cache in caches]
    check.call("rotate_into_cache_", *args, **scales)
    check.same(found, caches)


def leave_work(check: Check) -> None:
    """Makes the process end while its calls may still run. The main process waits for the end, and checks its status."""
    x, (cos, sin) = check.make(1, 256, 32, 128), check.tables(256, 128)

    def work():
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            for _ in range(50):
                rope.rotate_(x, cos, sin)
            x[0, 0, 0].to("cpu", non_blocking=True)  # Metal begins to work only when torch commits

    atexit.register(work)


# ---- compilers ----


def skip_without(what: str, run, control) -> None:
    """Runs a check. If it raises an error, and so does the control, which uses nothing of torch_rope, it is skipped."""
    try:
        run()
    except AssertionError:
        raise
    except Exception:
        try:
            control()
        except Exception as e:
            raise Skip(f"{what} does not work here without torch_rope either: {describe_error(e)}") from None
        raise


# All operations around the operators are exact, so that compiled code must give the bits of eager mode.
COMPILED = {
    "an operator alone": lambda q, k, cos, sin, *_: rope.rotate_qk(q, k, cos, sin),
    "between pointwise operations": lambda q, k, cos, sin, *_: [
        -x for x in rope.rotate_qk(q * 2, torch.relu(k), cos, sin, offset=0)
    ],
    "a norm": lambda q, k, cos, sin, q_weight, k_weight: [
        x * 2 for x in rope.norm_rotate_qk(-q, k, q_weight, k_weight, cos, sin)
    ],
    "a norm over all heads": lambda q, k, cos, sin, *_: [
        x * 2 for x in rope.norm_rotate_qk(-q, k, q[0, 0], k[0, 0], cos, sin)
    ],
    "a cache": lambda q, k, cos, sin, *_: into_cache(q * 2, k, cos, sin),
    "a quantised cache": lambda q, k, cos, sin, *_: into_cache(q * 2, k, cos, sin, torch.int8),
    "cos_sin": lambda q, k, cos, *_: rope.cos_sin(k[0, :, 0, 0] * 2, cos[0].abs()),
}


def into_cache(q, k, cos, sin, quantised=None):
    caches = [torch.zeros_like(k, dtype=quantised) for _ in "kv"]
    scale = torch.full((1,), 0.02, device=k.device) if quantised else None
    rope.rotate_into_cache_(q, k, -k, *caches, cos, sin, k_scale=scale, v_scale=scale, norm_v=bool(quantised))
    return q, *caches


def inductor(check: Check, name: str) -> None:
    """Compares the results and the gradients of compiled code with those of eager mode."""
    given = layer(check, torch.float16 if "pointwise" in name else torch.float32)
    torch._dynamo.reset()
    gradients = name not in ("a cache", "a quantised cache", "cos_sin")

    def results(function):
        leaves = [t.clone().requires_grad_(gradients and i not in (2, 3)) for i, t in enumerate(given)]
        outs = function(*leaves)
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        of = torch.autograd.grad(outs, leaves, [o.detach() for o in outs], allow_unused=True) if gradients else []
        check.after_call()
        return [*outs, *(g for g in of if g is not None)]

    def run():
        check.same(results(torch.compile(COMPILED[name], fullgraph=True)), results(COMPILED[name]))

    skip_without("torch.compile", run, lambda: torch.compile(lambda x: torch.relu(x) * 3)(given[0]))


class Model(torch.nn.Module):
    def __init__(self, name, cos, sin):
        super().__init__()
        self.name, self.cos, self.sin = name, cos, sin

    def forward(self, q, k):
        return tuple(COMPILED[self.name](q, k, self.cos, self.sin))


class Control(torch.nn.Module):
    def forward(self, q, k):
        return -q, k * 2


def aot_inductor(check: Check, name: str) -> None:
    """Compares the results of an exported and compiled package with those of eager mode."""
    q, k, cos, sin, *_ = layer(check)

    def run(model):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            package = torch._inductor.aoti_compile_and_package(
                torch.export.export(model, (q, k)),
                package_path=str(Path(folder) / "model.pt2"),
                inductor_configs={"aot_inductor.precompile_headers": False},  # shorter for a single package
            )
            check.same(torch._inductor.aoti_load_package(package)(q, k), model(q, k))
            check.after_call()

    skip_without("AOTInductor", lambda: run(Model(name, cos, sin)), lambda: run(Control()))
