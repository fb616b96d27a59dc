"""A group of processes, each a rank, that all run the same function at the same time."""

import datetime
import os
import socket
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=60)  # of a collective that some rank does not join


def _join(rank, world, port, device):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, address = {"cpu": "gloo", "cuda": "nccl"}[device], f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=TIMEOUT)


def _call(function, *args):
    torch.manual_seed(0)
    return function(*args)


def _leave():
    dist.destroy_process_group()
    # A thread of gloo may still hold a tensor. If it releases the tensor while Python shuts down, torch (2.13) aborts.
    os._exit(0)


class Ranks:
    """The processes of one process group. They start at the first call, and after an error at the next call."""

    def __init__(self, world: int, device: str):
        self.world, self.device, self.processes = world, device, []

    def _start(self):
        # A server process imports the modules once, and the processes of the ranks are forks of it.
        method = mp.get_context("forkserver")
        method.set_forkserver_preload(["torch_rope.parallel", "torch.distributed.tensor.debug", "pytest"])
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        arguments = [(rank, self.world, port, self.device) for rank in range(self.world)]
        self.processes = [ProcessPoolExecutor(1, method, _join, of_rank) for of_rank in arguments]

    def __call__(self, function, *args):
        """Calls function(device, *args) on every rank, and returns the list of results. function must be at the top
        level of a module."""
        if not self.processes:
            self._start()
        calls = [process.submit(_call, function, self.device, *args) for process in self.processes]
        try:
            for call in as_completed(calls):
                call.result()
        except BaseException:  # the other ranks may be waiting for this one, until the timeout
            for process in self.processes:
                process.shutdown(wait=False)
            self.processes = []
            raise
        return [call.result() for call in calls]

    def close(self):
        for process in self.processes:
            process.submit(_leave)
        for process in self.processes:
            process.shutdown()
