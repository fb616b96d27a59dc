import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "emulator"))


def pytest_addoption(parser):
    parser.addoption(
        "--emulate",
        nargs="?",
        const="checked",
        choices=["checked", "asan"],
        help="run the CUDA kernels on the CPU: tensors of the CPU stand in for a GPU's",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu: of the CPU back end alone")
    config.addinivalue_line("markers", "large: needs tens of gigabytes of a GPU's memory")
    emulate = config.getoption("--emulate")
    if emulate:
        import build

        build.load(build.build(sanitize=emulate == "asan"))
    import torch_rope  # noqa: F401  registers the operators


def pytest_collection_modifyitems(config, items):
    if config.getoption("--emulate"):
        skip = pytest.mark.skip(reason="of the CPU back end alone")
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(skip)


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        import torch

        devices = ["cpu"]
        if not metafunc.config.getoption("--emulate"):
            devices += ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
        metafunc.parametrize("device", devices)


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)
