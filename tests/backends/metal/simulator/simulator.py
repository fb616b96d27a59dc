"""Gives torch a simulated device "mps" on Linux. After load() tensors can be on it.

    python simulator.py -m MODULE [arguments]

runs a module as python itself does, after load(). That function sets the environment variable TORCH_ROPE_PYTHON to the
command that does it, for programs that start further processes.
"""

import json
import os
import runpy
import shlex
import sys

import simulator_build
import torch


def load(compiled: bool = False) -> None:
    """Loads the simulated device.

    compiled: True if the library must hold shaders that were compiled ahead, and not only their source.
    """
    import torch_rope  # defines the operators whose kernels the library registers

    torch.ops.load_library(simulator_build.build(compiled))
    os.environ["TORCH_ROPE_PYTHON"] = shlex.join([sys.executable, os.path.abspath(__file__)])
    # A build of torch and torch_rope for macOS has these.
    torch_rope._C.devices = ("cpu", "mps")
    torch._C._has_mps = True
    torch._C._mps_is_available = lambda: True
    torch._C._mps_is_on_macos_or_newer = lambda major, minor: True
    torch._C._mps_deviceSynchronize = lambda: torch.ops.simulator.synchronize()
    torch._C._mps_get_core_count = lambda: 8
    torch._C._mps_get_name = lambda: "simulated"
    torch_rope._C.metal_library = "compiled with the extension" if compiled else "compiled at the first call"
    torch_rope._C.metal_pipelines = lambda: [tuple(p) for p in json.loads(torch.ops.simulator.pipelines())]
    torch.mps._default_mps_generator = torch.Generator()
    torch.UntypedStorage.mps = lambda self: (
        torch.empty(self.nbytes(), dtype=torch.uint8, device="mps").untyped_storage().copy_(self, False)
    )


def last_dispatches(clear: bool = True) -> list[dict]:
    """Returns records of the kernels that ran, at most the last 1000, and forgets them if `clear`.

    A record has the keys kernel, threads (of the grid, [x, y, z]), group (the threads of a threadgroup), groups (the number
    of threadgroups), rints (the number of calls of rint), messages (name to the number that the encoder got since the
    previous dispatch), constants (name to value) and buffers. The last maps the index of a buffer to its bytes, bytes_read,
    bytes_written, loads and stores; these two map the size of an access in bytes to the number of accesses. A buffer that
    is bound twice has the same numbers twice, and one that the function constants leave out has no entry.
    """
    dispatches = json.loads(torch.ops.simulator.last_dispatches(clear))
    for d in dispatches:
        d["buffers"] = {int(index): buffer for index, buffer in d["buffers"].items()}
    return dispatches


def check_guards() -> None:
    """Raises RuntimeError if memory next to a buffer was written."""
    torch.ops.simulator.check_guards()


def check_races(check: bool) -> None:
    """Sets whether races on buffers are errors. Races on threadgroup memory always are."""
    torch.ops.simulator.check_races(check)


def count_lines(count: bool) -> None:
    """Sets whether the records of buffers have lines_read and lines_written, which costs time.

    These are sums over all loads or stores that SIMD groups execute. A load or store counts the lines of 128 bytes that the
    threads of the SIMD group touch in it. If a kernel loads each line of a tensor once, lines_read * 128 is the tensor's
    size; if two instructions load half of each line, it is twice the size. Iterations of a loop are different loads.
    """
    torch.ops.simulator.count_lines(count)


def allow_foreign(allow: bool) -> None:
    """Sets whether kernels may touch buffers of more than 256 MiB, which are sparse and have no guards."""
    torch.ops.simulator.allow_foreign(allow)


def thread_order(order: int) -> None:
    """Sets the order in which threadgroups, and the threads in each, run: 0 forward, 1 backward, 2 scrambled."""
    torch.ops.simulator.thread_order(order)


def profile(on: bool) -> list[str]:
    """Starts or stops torch's profiler. Returns the names of the kernels that it saw since the call before."""
    return torch.ops.simulator.profile(on).split()


def max_threads(threads: int) -> None:
    """Sets maxTotalThreadsPerThreadgroup of every pipeline."""
    torch.ops.simulator.max_threads(threads)


if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    sys.path[0] = os.getcwd()
    load()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
