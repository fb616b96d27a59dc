import pytest
import torch
from backends.metal.simulator import simulator


@pytest.fixture
def simulated(device):
    """Returns the module with the simulator's own functions. Skips the test if the device is not simulated."""
    if not hasattr(torch.ops.simulator, "last_dispatches"):
        pytest.skip("only the simulator counts accesses")
    torch.mps.synchronize()
    simulator.last_dispatches()
    yield simulator
    simulator.max_threads(1024)
    simulator.count_lines(False)
