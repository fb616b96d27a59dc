"""Runs a function where no mode of the caller reaches it."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def undisturbed(function: Callable, *args: Any) -> Any:
    """Returns what a function returns for these arguments, or raises what it raises, in a thread of its own.

    PyTorch keeps its modes by thread, and a new thread has none: no default device, fake tensors, inference mode, autocast,
    no_grad, transform of torch.func, or mode for functions or operators. The current device and stream of CUDA are those
    of the caller. The default dtype is that of the process, so the function must name its dtypes.
    """
    # To ask for the stream starts CUDA, which a process that forks later must not have done.
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> Any:
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            return function(*args)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
