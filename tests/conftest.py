import collections
import functools
import gc
import itertools
import os
import sys
from pathlib import Path

import pytest

# The folder of benchmarks and hub. pytest itself adds this folder, whose modules all tests import.
sys.path.insert(0, str(Path(__file__).parents[1]))
ORDERS = ["forward", "backward", "scrambled"]


def pytest_addoption(parser):
    parser.addoption(
        "--emulate",
        nargs="?",
        const="checked",
        choices=["checked", "asan"],
        help="run the CUDA kernels in an emulator on the CPU, with CPU tensors instead of GPU tensors",
    )
    parser.addoption(
        "--simulate",
        action="store_true",
        help="run the Metal back end on Linux, on a simulated device mps, and no other back end",
    )
    parser.addoption("--thread-order", choices=ORDERS, default="forward", help="the order of emulated threads")


def pytest_configure(config):
    emulate, simulate = config.getoption("--emulate"), config.getoption("--simulate")
    if emulate and simulate:
        raise pytest.UsageError("--emulate and --simulate exclude each other")
    order = ORDERS.index(config.getoption("--thread-order"))
    if emulate:
        from backends.cuda.emulator import emulator

        library = emulator.load(emulator.build(sanitize=emulate == "asan"))
        library.thread_order(order)
    if simulate:
        from backends.metal.simulator import simulator

        simulator.load()
        simulator.thread_order(order)
    import torch_rope  # noqa: F401  (the import registers the operators)


def pytest_collection_modifyitems(config, items):
    """Puts the longest tests first. Selects those with a device or of a back end for the emulator or the simulator."""
    # Otherwise one process waits for them at the end.
    slow = {"selfcheck", "package", "cpu", "cuda", "parallel", "in_place", "fuse", "compile"}
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in slow)
    back_end = "cuda" if config.getoption("--emulate") else "metal" if config.getoption("--simulate") else None
    exhaustive = os.environ.get("ROPE_EXHAUSTIVE") == "1"
    elsewhere = ["exhaustive"] * (not exhaustive)
    if back_end:
        elsewhere += ["cpu"] + ["shared"] * (not exhaustive)
    elsewhere += ["emulator"] * (back_end != "cuda") + ["simulator"] * (back_end != "metal")

    def runs(item):
        here = back_end is None or "device" in item.fixturenames or item.path.parent.name == back_end
        return here and not any(map(item.get_closest_marker, elsewhere))

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


@functools.cache
def has_memory(device: str) -> bool:
    """Returns whether the device gives memory for a tensor. That of a virtual Mac may not."""
    import torch

    try:
        return torch.empty(1, device=device).numel() == 1
    except RuntimeError:
        return False


def pytest_generate_tests(metafunc):
    """Runs a test with the argument `device` on each device that is available, and a test of a GPU's back end on its own."""
    if "device" in metafunc.fixturenames:
        import torch

        import torch_rope

        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available() and has_memory("mps")}
        devices = ["cpu"] + [d for d, is_there in there.items() if is_there and d in torch_rope._C.devices]
        devices = ["mps"] if metafunc.config.getoption("--simulate") else devices
        own = {"metal": "mps", "cuda": "cpu" if metafunc.config.getoption("--emulate") else "cuda"}
        folder = metafunc.definition.path.parent.name
        none = pytest.param(None, marks=pytest.mark.skip(f"no device here runs the kernels of {folder}"))
        metafunc.parametrize("device", [d for d in devices if d == own.get(folder, d)] or [none])


def pytest_terminal_summary(terminalreporter):
    """Says in one line how many tests were skipped, and the most frequent reasons."""
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    if reasons:
        named = [f"{reason} ({count})" for reason, count in collections.Counter(reasons).most_common(3)]
        terminalreporter.write_line(f"{len(reasons)} skipped: {', '.join(named)}; -rs lists all")


def pytest_collection_finish():
    gc.freeze()  # else the garbage collector visits all tests again and again


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.default_generator.manual_seed(0)
    if torch.accelerator.is_available():  # else torch.manual_seed takes milliseconds to note the seed for a GPU
        torch.manual_seed(0)


@pytest.fixture
def _memory_of_others(request):
    """Lets a test pass memory that the emulator or the simulator does not know.

    The emulator then accepts tensors whose memory is a file or was allocated by copy.deepcopy. The simulator accepts
    tensors of more than 256 MiB.
    """
    if request.config.getoption("--simulate"):
        from backends.metal.simulator import simulator as library
    else:
        from torch_rope import _C as library
    allow_foreign = getattr(library, "allow_foreign", lambda _: None)
    allow_foreign(True)
    yield
    allow_foreign(False)


@pytest.fixture
def _nothing_compiled():
    """Takes no compiled program from an earlier test or from the cache on disk, whose key does not depend on this
    library's code."""
    import torch

    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def untouched(device, tmp_path, _memory_of_others):
    """Returns a function (elements, dtype) -> 1-D tensor of any size, of which a test may read and write only a little.

    On the CPU and on the simulated device its memory is sparse: it takes only what is touched.
    """
    import torch

    file_number = itertools.count()

    def make(elements, dtype):
        if device == "cpu":
            return torch.from_file(str(tmp_path / str(next(file_number))), shared=True, size=elements, dtype=dtype)
        if device == "cuda":
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < elements * dtype.itemsize + 2**30:
                pytest.skip(f"needs {elements * dtype.itemsize / 2**30:.0f} GiB of free memory")
        return torch.empty(elements, dtype=dtype, device=device)

    return make
