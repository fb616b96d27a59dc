"""A group of processes, each a rank, that all run the same function at the same time."""

import datetime
import os
import socket
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 120  # the timeout of a collective that some rank does not join


def _serve(rank, world, port, device, pipe):
    """Runs the functions that come through the pipe, as one rank, until None comes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timeout
    )
    while (call := pipe.recv()) is not None:
        function, args = call
        torch.manual_seed(0)
        try:
            pipe.send((function(device, *args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()
    # A thread of gloo may still hold a tensor. If it releases the tensor while Python shuts down, torch (2.13) aborts.
    os._exit(0)


class Ranks:
    """The processes of one process group. They start at the first call."""

    def __init__(self, world: int, device: str):
        self.world, self.device, self.processes = world, device, []

    def _start(self):
        # A server process imports the modules once, and the processes of the ranks are forks of it. torch_rope comes
        # first, so it registers its rules when torch.distributed.tensor is imported.
        method = mp.get_context("forkserver")
        method.set_forkserver_preload(["torch_rope", "torch.distributed.tensor.debug", "pytest"])
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for rank in range(self.world):
            ours, theirs = method.Pipe()
            process = method.Process(target=_serve, args=(rank, self.world, port, self.device, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append((process, ours))

    def __call__(self, function, *args):
        """Calls function(device, *args) on every rank, and returns the list of results. function must be at the top
        level of a module."""
        if not self.processes:
            self._start()
        for _, pipe in self.processes:
            pipe.send((function, args))
        results, waiting = {}, {pipe: rank for rank, (_, pipe) in enumerate(self.processes)}
        while waiting:
            for pipe in wait(list(waiting)):
                rank = waiting.pop(pipe)
                try:
                    results[rank], error = pipe.recv()
                except EOFError:
                    error = "the process ended"
                if error:  # the other ranks may be waiting for this one
                    self.close(at_once=True)
                    raise AssertionError(f"rank {rank} of {self.world}:\n{error}")
        return [results[rank] for rank in range(self.world)]

    def close(self, at_once=False):
        for process, pipe in self.processes:
            if at_once:
                process.kill()
            else:
                pipe.send(None)
        for process, _ in self.processes:
            process.join()
        self.processes = []
