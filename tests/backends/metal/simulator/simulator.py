"""Gives torch a simulated device "mps" on Linux. After load() tensors can be on it.

    python simulator.py -m MODULE [arguments]

runs a module as python itself does, after load(). That function sets the environment variable TORCH_ROPE_PYTHON to the
command that does it, for programs that start further processes.
"""

import ast
import os
import runpy
import shlex
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[3]))
from backends.metal.simulator import simulator_build  # noqa: E402


def load() -> None:
    """Loads the simulated device."""
    import torch_rope  # defines the operators whose kernels the library registers

    torch.ops.load_library(simulator_build.build())
    os.environ["TORCH_ROPE_PYTHON"] = shlex.join([sys.executable, os.path.abspath(__file__)])
    # A build of torch and torch_rope for macOS has these.
    torch_rope._C.devices = ("cpu", "mps")
    torch._C._has_mps = True
    torch._C._mps_is_available = lambda: True
    torch._C._mps_is_on_macos_or_newer = lambda major, minor: True
    torch._C._mps_deviceSynchronize = lambda: torch.ops.simulator.synchronize()
    torch._C._mps_get_core_count = lambda: 8
    torch._C._mps_get_name = lambda: "simulated"
    torch_rope._C.metal_pipelines = lambda: ast.literal_eval(torch.ops.simulator.pipelines())
    torch.mps._default_mps_generator = torch.Generator()
    torch.UntypedStorage.mps = lambda self: (
        torch.empty(self.nbytes(), dtype=torch.uint8, device="mps").untyped_storage().copy_(self, False)
    )


def last_dispatches() -> list[dict]:
    """Returns records of the kernels that ran since the call before, at most 1000.

    A record has the keys kernel, source (the path of its library's source, as C++), constants (index to value of function
    constants), threads (of the grid, [x, y, z]), group (the threads of a threadgroup), groups (the number
    of threadgroups), rints (the number of calls of rint), messages (name to the number that the encoder got since the
    previous dispatch) and buffers. The last maps the index of a buffer to its bytes, bytes_read, bytes_written, loads and
    stores; these two map the size of an access in bytes to the number of accesses. A buffer that is bound twice has the same
    numbers twice, and one that the function constants leave out has no entry.

    After count_lines(True) buffers also have lines_read and lines_written. A load or store that a SIMD group executes counts
    the lines of 128 bytes that its threads touch. If a kernel loads each line of a tensor once, lines_read * 128 is the
    tensor's size; if two instructions load half of each line, it is twice the size.
    """
    return ast.literal_eval(torch.ops.simulator.last_dispatches())


def __getattr__(name: str):
    """Returns one of the other functions of the library, which device.cpp defines."""
    return getattr(torch.ops.simulator, name)


if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    sys.path[0] = os.getcwd()
    load()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
