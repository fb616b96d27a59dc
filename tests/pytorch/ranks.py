"""Processes that run one function at a time together, each a rank of one process group."""

import datetime
import os
import socket
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 120  # for a collective that some rank does not come to


def _serve(rank, world, port, device, pipe):
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
    os._exit(0)  # a thread of gloo may still hold a tensor: if it lets go while Python ends, torch (2.13) aborts


class Ranks:
    def __init__(self, world: int, device: str):
        self.world, self.device, self.processes = world, device, []

    def _start(self):
        # The first process imports, and those of the ranks are forks of it.
        method = mp.get_context("forkserver")
        method.set_forkserver_preload(["torch.distributed.tensor", "torch._dynamo", "torch_rope"])
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
        """function(device, *args) on every rank, which a test module has at its top level -> what each returns."""
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
                if error:  # the others may wait for this rank
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
