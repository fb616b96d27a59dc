import itertools
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE / part) for part in ("operators", "modules", "backends/cuda/emulator", "backends/metal/simulator")
]
ORDERS = ["forward", "backward", "scrambled"]


def pytest_addoption(parser):
    parser.addoption(
        "--emulate",
        nargs="?",
        const="checked",
        choices=["checked", "asan"],
        help="run the CUDA kernels on the CPU: tensors of the CPU stand in for a GPU's",
    )
    parser.addoption(
        "--simulate",
        action="store_true",
        help="run the Metal back end on Linux, on a simulated device mps, and no other",
    )
    parser.addoption("--thread-order", choices=ORDERS, default="forward", help="of emulated threads")


def pytest_configure(config):
    config.addinivalue_line("markers", "heart: of make check, the short loop")
    config.addinivalue_line(
        "markers",
        "shared: of code that no back end has its own of; on the emulator and the simulator make exhaustive alone runs it",
    )
    config.addinivalue_line("markers", "cpu: of no GPU: not run again on the emulator and the simulator")
    config.addinivalue_line("markers", "large: needs tens of gigabytes of a GPU's memory")
    config.addinivalue_line("markers", "sanitizer: every kernel in few and small calls, for compute-sanitizer too")
    config.addinivalue_line("markers", "xdist_group: of pytest-xdist, where it is installed")
    emulate, simulate = config.getoption("--emulate"), config.getoption("--simulate")
    if emulate and simulate:
        raise pytest.UsageError("--emulate and --simulate exclude each other")
    order = ORDERS.index(config.getoption("--thread-order"))
    if emulate:
        import emulator

        library = emulator.load(emulator.build(sanitize=emulate == "asan"))
        library.thread_order(order)
    if simulate:
        import simulator

        simulator.load()
        simulator.thread_order(order)
    import torch_rope  # noqa: F401  registers the operators


def pytest_collection_modifyitems(config, items):
    """On the emulator and on the simulator: what runs on a device, and the tests of that back end."""
    back_end = "cuda" if config.getoption("--emulate") else "metal" if config.getoption("--simulate") else None
    if back_end is None:
        return
    elsewhere = ["cpu"] + ["shared"] * (os.environ.get("ROPE_EXHAUSTIVE") != "1")

    def runs(item):
        here = "device" in item.fixturenames or item.path.parent.name == back_end
        return here and not any(map(item.get_closest_marker, elsewhere))

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        import torch

        import torch_rope

        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        devices = ["cpu"] + [d for d, is_there in there.items() if is_there and d in torch_rope._C.devices]
        metafunc.parametrize("device", ["mps"] if metafunc.config.getoption("--simulate") else devices)


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


def _told(config, name, value):
    """To the emulator, if there is one."""
    if config.getoption("--simulate"):
        import simulator as library
    else:
        from torch_rope import _C as library
    tell = getattr(library, name, lambda _: None)
    tell(value)
    yield
    tell(not value)


@pytest.fixture
def _races_are_legal(request):
    yield from _told(request.config, "check_races", False)


@pytest.fixture
def _memory_of_others(request):
    """Tensors whose memory is a file's, or was allocated by copy.deepcopy, may go through an emulated kernel; on the
    simulated device those of more than 256 MiB."""
    yield from _told(request.config, "allow_foreign", True)


@pytest.fixture
def untouched(device, tmp_path, _memory_of_others):
    """Makes tensors (elements, dtype) of any size, of which little may be touched: sparse on the CPU, and on the simulated device."""
    import torch

    made = itertools.count()

    def make(elements, dtype):
        if device == "cpu":
            return torch.from_file(str(tmp_path / str(next(made))), shared=True, size=elements, dtype=dtype)
        if device == "cuda":
            torch.cuda.empty_cache()
            if torch.cuda.mem_get_info()[0] < elements * dtype.itemsize + 2**30:
                pytest.skip(f"needs {elements * dtype.itemsize / 2**30:.0f} GiB of free memory")
        return torch.empty(elements, dtype=dtype, device=device)

    return make
