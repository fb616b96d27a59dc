"""The modes of a caller: how a function runs where none reaches it, and what a mode of fake tensors takes."""

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def undisturbed(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Returns what a function returns for these arguments, or raises what it raises, in a thread of its own.

    PyTorch keeps its modes by thread, and a new thread has none: no default device, fake tensors, inference mode, autocast,
    no_grad, transform of torch.func, or mode for functions or operators. The current device and stream of CUDA are those
    of the caller. The default dtype is that of the process, so the function must name its dtypes. When Python ends and starts
    no thread any more, only the modes of gradients and autocast are put aside.
    """
    if torch.compiler.is_dynamo_compiling():  # it traces the function instead of calling it, and no thread
        return function(*args, **kwargs)
    result: Future = Future()
    # To ask for the stream starts CUDA, which a process that forks later must not have done.
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                result.set_result(function(*args, **kwargs))
        except BaseException as error:
            result.set_exception(error)

    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    thread = threading.Thread(target=run)
    # While PyTorch compiles a caller, with most modes put aside, another thread that compiles would wait for this one.
    if not (sys.is_finalizing() or (lock is not None and lock._is_owned())):
        with contextlib.suppress(RuntimeError):  # no thread starts any more
            thread.start()
    if thread.ident is None:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)
    thread.join()
    return result.result()


def mode_of(t: Tensor) -> contextlib.AbstractContextManager:
    """Returns the mode of a fake tensor, or a context that does nothing."""
    return contextlib.nullcontext() if type(t) is Tensor else getattr(t, "fake_mode", contextlib.nullcontext())


def as_seen(t: Tensor) -> Tensor:
    """Returns a tensor, or a fake one like it if the caller is in a mode of fake tensors, which may take no others."""
    if torch.compiler.is_dynamo_compiling() or (mode := torch._C._get_dispatch_mode(_FAKE)) is None:
        return t
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    # A program that is recorded holds the tensor, and needs its numbers.
    return t if get_proxy_mode() else mode.from_tensor(t, static_shapes=True)
