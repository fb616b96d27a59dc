"""Gives torch a simulated device "mps" on Linux: load(), and tensors can be on it."""

import json

import simulator_build
import torch


def load(compiled: bool = False) -> None:
    """compiled: with shaders that were compiled ahead."""
    import torch_rope  # the operators that get kernels

    torch.ops.load_library(simulator_build.build(compiled))
    # What a build for macOS has here.
    torch_rope._C.devices = ("cpu", "mps")
    torch._C._has_mps = True
    torch._C._mps_is_available = lambda: True
    torch._C._mps_is_on_macos_or_newer = lambda major, minor: True
    torch._C._mps_deviceSynchronize = lambda: torch.ops.simulator.synchronize()
    torch._C._mps_get_core_count = lambda: 8
    torch._C._mps_get_name = lambda: "simulated"
    torch.mps._default_mps_generator = torch.Generator()
    torch.UntypedStorage.mps = lambda self: (
        torch.empty(self.nbytes(), dtype=torch.uint8, device="mps").untyped_storage().copy_(self, False)
    )


def last_dispatches(clear: bool = True) -> list[dict]:
    """What kernels ran, at most 1000: kernel, threads (of the grid), group, rints, constants, and buffers by their index:
    bytes, bytes_read, bytes_written, loads and stores by their size. A buffer bound twice has the same numbers twice."""
    dispatches = json.loads(torch.ops.simulator.last_dispatches(clear))
    for d in dispatches:
        d["buffers"] = {int(index): buffer for index, buffer in d["buffers"].items()}
    return dispatches


def check_guards() -> None:
    """Raises where memory beside a buffer was written."""
    torch.ops.simulator.check_guards()


def check_races(check: bool) -> None:
    """Whether races on buffers are errors; those on threadgroup memory always are."""
    torch.ops.simulator.check_races(check)


def allow_foreign(allow: bool) -> None:
    """Whether kernels may touch buffers of more than 256 MiB, which are sparse."""
    torch.ops.simulator.allow_foreign(allow)


def thread_order(order: int) -> None:
    """Of threadgroups and the threads in each: 0 forward, 1 backward, 2 scrambled."""
    torch.ops.simulator.thread_order(order)


def max_threads(threads: int) -> None:
    """maxTotalThreadsPerThreadgroup of every pipeline."""
    torch.ops.simulator.max_threads(threads)
