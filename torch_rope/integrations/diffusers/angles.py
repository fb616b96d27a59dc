"""Makes the rotary modules of diffusers compute their angles in float64.

A rotary module of diffusers multiplies positions and frequencies in float32 in many models, on Apple GPUs in all, and
under autocast some multiply in bfloat16. :func:`exact_rotary` returns a forward that runs the module's own formula with
every float32 replaced by float64, on the CPU if the device has no float64, and rounds the tables once, at the end.
"""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_rope.frequencies import has_float64

_NAMES = re.compile("rope|rotary|posembed|embednd", re.I)
_WIDER = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_WIDER[torch.complex64] = torch.complex128
_SHORT = {getattr(Tensor, name): torch.float64 for name in ("float", "half", "bfloat16")} | {
    Tensor.cfloat: torch.complex128
}


class _InFloat64(TorchFunctionMode):
    """Makes every function of torch compute in float64 that would compute in a narrower dtype."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _SHORT:
            return args[0].to(_SHORT[function])
        args, kwargs = _map(args, _wider_dtype), _map(kwargs or {}, _wider_dtype)
        return function(*args, **kwargs)


def _wider_dtype(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


def exact_rotary(module: nn.Module, owner: nn.Module) -> tuple[Callable | None, str]:
    """Returns a forward for a rotary module that computes exact angles, and a text about it.

    Args:
        module: any module. A rotary module has a name such as FluxPosEmbed, and no parameters.
        owner: the model that made the module.

    Returns:
        (forward, text). forward takes the module and the arguments of its forward and returns tables of the same
        shapes and dtypes, or is None if the module must be left as it is; text says why. It is empty for a module that
        is no rotary module.
    """
    name = type(module).__name__
    if not _NAMES.search(name) or re.search("patch|sinusoidal", name, re.I):
        return None, ""
    if next(module.parameters(), None) is not None:
        return None, "left as it is, because it has weights"
    copies = _copies(module, owner)
    if copies is None:
        return None, "left as it is, because its tables were changed, or cannot be made again from the config"
    exact, plain = copies
    original, dtypes = type(module).forward, {}

    def forward(self, *args, **kwargs):
        given = list(_tensors((args, kwargs)))
        key = tuple(t.dtype for t in given)
        device = next((t.device for t in given), torch.device("cpu"))
        for value in (*args, *kwargs.values()):
            device = torch.device(value) if isinstance(value, torch.device) else device
        if key not in dtypes:  # the dtypes of the tables
            with torch.no_grad():
                tables = original(self if plain is None else _moved(plain, device), *args, **kwargs)
            dtypes[key] = [t.dtype for t in _tensors(tables)]
        there = device if has_float64(device) else torch.device("cpu")
        wide_args, wide_kwargs = (_map(v, lambda value: _wider(value, there)) for v in (args, kwargs))
        if there not in of_devices:
            of_devices[there] = _moved(exact, there)
        with _in_float64():
            tables = original(of_devices[there], *wide_args, **wide_kwargs)
        wanted = iter(dtypes[key])
        return _map(tables, lambda t: t.to(device, next(wanted)) if isinstance(t, Tensor) else t)

    of_devices: dict[torch.device, nn.Module] = {}
    return forward, "exact angles, by its own formula in float64"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _tensors(v)


def _map(value: Any, function: Callable) -> Any:
    """Returns nested tuples, lists and dictionaries with the function's values."""
    if isinstance(value, dict):
        return {k: _map(v, function) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_map(v, function) for v in value)
    return function(value)


def _wider(value: Any, device: torch.device) -> Any:
    """Returns a tensor in float64 on a device, and any other value so that it names this device."""
    if isinstance(value, Tensor):
        return value.to(device, _WIDER.get(value.dtype, value.dtype))
    return device if isinstance(value, torch.device) else value


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Returns a module on a device, with the tensors that are no buffers."""
    module = copy.deepcopy(module)
    for m in module.modules():
        for name, value in [*vars(m).items(), *m._buffers.items()]:
            if isinstance(value, Tensor):
                (m._buffers if name in m._buffers else vars(m))[name] = value.to(device)
    return module


def _copies(module: nn.Module, owner: nn.Module) -> tuple[nn.Module, nn.Module | None] | None:
    """Returns a module that does the same in float64, and if the module holds tables, one that was not cast.

    A module that holds tables is made again. Returns None if that cannot be done, or if the tables that it holds are
    others, and were not only cast to another dtype.
    """
    held = dict(_held(module))
    if not held:
        return copy.deepcopy(module), None
    try:
        args, kwargs = _arguments(module, owner)
        with torch.device("cpu"), torch.inference_mode(False):
            plain = type(module)(*args, **kwargs)
            with _in_float64():
                exact = type(module)(*args, **kwargs)
    except Exception:
        return None
    again = dict(_held(plain))
    for name, table in held.items():
        new = again.get(name)
        if new is None or new.shape != table.shape or table.is_meta:
            return None
        casts = (table.dtype,) if table.is_complex() else (table.dtype, torch.bfloat16, torch.float16)
        if not any(torch.allclose(new.to(dtype).to(table.dtype), table.cpu(), 1e-5, 1e-6) for dtype in casts):
            return None
    return exact, plain


def _arguments(module: nn.Module, owner: nn.Module) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments that a module was made with: its attributes by their names, or else what the owner passes
    when it is made again, without memory."""
    parameters = list(inspect.signature(type(module).__init__).parameters.values())[1:]
    if all(hasattr(module, p.name) for p in parameters):
        return (), {p.name: getattr(module, p.name) for p in parameters}
    calls, make = [], type(module).__init__

    def record(self, *args, **kwargs):
        calls.append((args, kwargs))
        make(self, *args, **kwargs)

    type(module).__init__ = record
    try:
        with torch.device("meta"):
            type(owner).from_config(dict(owner.config))
    finally:
        type(module).__init__ = make
    return calls[[m for m in owner.modules() if type(m) is type(module)].index(module)]


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a module holds, with their names."""
    for path, m in module.named_modules():
        for name, value in [*vars(m).items(), *m._buffers.items()]:
            if isinstance(value, Tensor):
                yield f"{path}.{name}", value
