"""Makes rotary modules compute exact angles: by their own formula in float64, rounded once, at the end.

A rotary module makes tables of cos and sin, or complex numbers, from positions and frequencies. Many multiply them in
float32, which loses digits at far positions; a few hold tables or frequencies that become bfloat16 with the model.
"""

import copy
import inspect
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import frequencies
from .._modes import undisturbed

_CPU = torch.device("cpu")
_WIDER = dict.fromkeys((torch.half, torch.bfloat16, torch.float), torch.double) | {torch.cfloat: torch.cdouble}
_PLAIN = (int, float, str, list, tuple, dict)
_NO_ATTRIBUTES = {*vars(nn.Module()), "forward"}


class _InFloat64(TorchFunctionMode):
    """Makes every function of torch that a thread calls compute in float64 where it would compute in a narrower dtype."""

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def changed(change: Callable) -> tuple[list, dict]:
            return [change(a) for a in args], {name: change(a) for name, a in (kwargs or {}).items()}

        if function is Tensor.float:
            return args[0].double()
        args, kwargs = changed(lambda a: _WIDER.get(a, a) if isinstance(a, torch.dtype) else a)
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dtype not in _WIDER:
            return result
        # A new tensor has the default dtype, and so has a quotient of whole numbers, say.
        if not _tensors(args, kwargs):
            return function(*args, **kwargs | {"dtype": _WIDER[result.dtype]})
        args, kwargs = changed(lambda a: a.double() if isinstance(a, Tensor) and not a.is_complex() else a)
        return function(*args, **kwargs)


def _tensors(*values: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists and dictionaries."""
    return [v for v in tree_leaves(values) if isinstance(v, Tensor)]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the buffers and other attributes of a module, but for methods."""
    both = vars(module) | module._buffers
    return {name: value for name, value in both.items() if name not in _NO_ATTRIBUTES and not inspect.ismethod(value)}


def _marks(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns what differs after an attribute was changed, as long as the tensors are kept."""
    marks: dict[str, Any] = {}
    for name, value in attributes.items():
        tensors = [(id(t), t.data_ptr(), t.tolist() if t.is_inference() else t._version) for t in _tensors(value)]
        marks[name] = tensors or (repr(value) if isinstance(value, _PLAIN) else id(value))
    return marks


def _is_cast(table: Tensor, new: Tensor) -> bool:
    """Returns whether a table is a new one, or was cast to another dtype, perhaps and back."""
    casts = (table.dtype, torch.bfloat16, torch.float16) if table.is_floating_point() else (table.dtype,)
    off = 1e-6 if table.dim() > 1 else 0.0  # cos and sin have absolute errors, frequencies have relative ones
    alike = (torch.allclose(new.to(dtype).to(table.dtype), table.cpu(), 1e-5, off) for dtype in casts)
    return table.shape == new.shape and any(alike)


class _Twin:
    """A module that computes in the place of a rotary module, for arguments on one device.

    exact, of the class cls, has the tables of a new module in float64, on the CPU if the device has no float64. All other
    attributes are those of the rotary module.

    Raises ValueError, with the reason, if the rotary module has other tables than a new one, but for rounding.
    """

    def __init__(
        self, module: nn.Module, cls: type, make: Callable[[type, nn.Module], nn.Module], device: torch.device
    ):
        self.device, self.there = device, device if frequencies.has_float64(device) else _CPU
        kind = cls.__name__
        for name, value in _attributes(module).items():
            if any(t.is_meta or isinstance(t, FakeTensor) for t in _tensors(value)):
                raise ValueError(f"{name} of {kind} is on the meta device, or fake, and has no numbers")
        self.follow(module)
        make = make if _tensors(self.followed) else _copied
        try:
            new = _attributes(make(cls, module))
            with _InFloat64():
                self.exact = make(cls, module)
        except Exception as error:
            raise ValueError(f"no {kind} like it can be made: {error}") from None
        for name, value in _attributes(self.exact).items():
            if _tensors(value):
                setattr(self.exact, name, tree_map_only(Tensor, lambda t: t.to(self.there), value))
        for name, value in self.followed.items():
            if not (tables := _tensors(value)):
                setattr(self.exact, name, value)
                continue
            # A forward may store a table where a new module has None, and its frequencies for short or long sequences.
            others = [new.get(name.replace("inv_freq", f"{of}inv_freq")) for of in ("", "original_", "long_")]
            alike = [all(map(_is_cast, tables, o)) for o in map(_tensors, others) if len(o) == len(tables)]
            if others[0] is not None and not any(alike):
                must = f"must be as a new {kind} has it; change the config instead, and load the model again"
                raise ValueError(f"{name} of {kind} was changed but {must}")

    def follow(self, module: nn.Module) -> None:
        """Remembers the attributes that the rotary module has now."""
        self.followed = _attributes(module)
        self.marks = _marks(self.followed)


def _copied(cls: type, module: nn.Module) -> nn.Module:
    new: Any = object.__new__(cls)
    vars(new).update(copy.deepcopy(vars(module)))
    return new


def _exact(module: nn.Module, make: Callable, unread: str = "") -> tuple[Callable | None, str]:
    """Returns a forward for a module, and for its deepcopies, that computes exact angles by their twins, and a text.
    unread: the name of the first argument if a forward reads none of its numbers, which are many."""
    twins: dict[int, _Twin] = {}
    cls, own = type(module), type(module).forward  # the module gets a subclass

    @torch.compiler.assume_constant_result  # the constant is a key, because a twin cannot be a constant
    def key_of(module: nn.Module, device: torch.device) -> int:
        twin = twins.get(id(module))
        attributes = _attributes(module)
        # torch.export may have replaced the tensors by fake ones, which cannot be compared with the twin's.
        fake = any(isinstance(t, FakeTensor) for t in _tensors(attributes))
        same = torch.compiler.is_exporting() if fake else twin is not None and twin.marks == _marks(attributes)
        if twin is None or twin.device != device or not same:
            twins[id(module)] = undisturbed(_Twin, module, cls, make, device)
        if twin is None:
            weakref.finalize(module, twins.pop, id(module), None).atexit = False
        return id(module)

    def forward(self, *args, **kwargs):
        leaves = tree_leaves((args, kwargs))
        devices = [v for v in leaves if isinstance(v, torch.device)] + [t.device for t in _tensors(leaves)]
        twin = twins[key_of(self, devices[0] if devices else _CPU)]
        if torch.compiler.is_compiling():  # compiled code is used as long as what is compared here is the same
            for name, value in twin.followed.items():
                value == getattr(self, name) if isinstance(value, _PLAIN) else value is getattr(self, name)
        with torch.autocast(twin.device.type, enabled=False):  # for the dtypes, and for what it changes in the module
            dtypes = iter([t.dtype for t in _tensors(own(self, *args, **kwargs))])
        args, kwargs = tree_map_only(torch.device, lambda _: twin.there, (args, kwargs))
        x = kwargs.get(unread, *args[:1]) if unread else None
        args, kwargs = tree_map_only(Tensor, lambda t: t[:0] if t is x else t, (args, kwargs))
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(twin.there, _WIDER.get(t.dtype, t.dtype)), (args, kwargs))
        with _InFloat64(), torch.autocast(twin.there.type, enabled=False):
            tables = own(twin.exact, *args, **kwargs)
        if not torch.compiler.is_compiling():
            twin.follow(self)
        return tree_map_only(Tensor, lambda t: t.to(twin.device, next(dtypes)), tables)

    before = getattr(module, "_old_forward", module.forward)  # the hooks of accelerate set both
    try:
        if next(module.parameters(), None) is not None:
            raise ValueError("it has weights, which may change its angles")
        if getattr(before, "__func__", None) is not own:
            raise ValueError("its forward was replaced")
        key_of(module, _CPU)
    except ValueError as error:
        return None, f"left as it is, because {error}"
    vars(forward)["_torch_rope"] = ("exact angles, by its own formula in float64",)
    # Dynamic frequencies change for good in a forward, which cannot be compiled as a whole.
    return torch.compiler.disable(forward) if "dynamic" in str(getattr(module, "rope_type", "")) else forward, ""


def of_diffusers(model: nn.Module, path: str) -> tuple[Callable | None, str]:
    """Returns a forward for the rotary module at a path that computes exact angles, or None and why there is none.

    The text is empty if the name is not that of a rotary module.
    """
    module, names = model.get_submodule(path), path.split(".")
    kind = type(module).__name__
    if not re.search("rope|rotary|posembed|embednd", kind, re.I) or re.search("patch|sinusoidal", kind, re.I):
        return None, ""
    around = [getattr(model.get_submodule(".".join(names[:n])), "config", None) for n in range(len(names))]
    config = {name: value for c in around if isinstance(c, dict) for name, value in c.items()}

    def new(cls: type, module: nn.Module) -> nn.Module:
        # Some modules do not keep every argument: the config has it, the frequencies tell it, or it is the default.
        known = config | {"dim": 2 * len(getattr(module, "inv_freq", ()))} | vars(module)
        return cls(**{n: known[n] for n in inspect.signature(cls).parameters if n in known})

    return _exact(module, new)


def of_transformers(module: nn.Module) -> tuple[Callable | None, str]:
    """Returns what of_diffusers does, for a rotary module of transformers, which takes x, position_ids and perhaps more."""
    if [*inspect.signature(type(module).forward).parameters][1:3] != ["x", "position_ids"]:
        is_rotary = re.search("rope|rotary", type(module).__name__, re.I)
        return None, "left as it is, because it does not take x and position_ids" if is_rotary else ""
    return _exact(module, _new_and_grown, "x")


def _new_and_grown(cls: type, module: Any) -> nn.Module:
    """Returns a new module, after the longest sequence that a module has had if its frequencies follow the length."""
    new = cls(module.config)
    kinds = getattr(new, "rope_type", "")
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [("", kinds)]:
        if kind in ("dynamic", "longrope"):
            length = int(getattr(module, f"{layer_type}_max_seq_len_cached", module.max_seq_len_cached))
            new(torch.zeros(1), torch.tensor([[length - 1]]), *filter(None, [layer_type]))
    return new
