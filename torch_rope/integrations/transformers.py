"""torch_rope under a loaded model of Hugging Face transformers.

Such a model makes cos and sin once per forward, in a rotary module, and in each layer a function of its modeling file
rotates q and k with them. :func:`patch` lets torch_rope do the work of that function, in one model;
:func:`kernel_mapping` does it by transformers' own mechanism, the kernels package. The rotary module stays as it is, and
with it every kind of frequencies and positions that transformers knows.
"""

import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_rotate = torch.ops.rope.rotate.default
_rotate_qk = torch.ops.rope.rotate_qk.default


def patch(model: nn.Module) -> "Patch":
    """Routes the rotary step of a model of transformers through torch_rope, at once, in this model alone, for inference
    and training, until ``undo()`` of what is returned or the end of its ``with``::

        handle = patch(model)
        print(handle)  # what calls torch_rope now, and how
        handle.undo()

    What a rotary function does is found by calling it on random numbers, not by its name. Weights, hooks and caches are
    not touched, and other models of the same class do not change. A deepcopy of a patched model is patched; one that was
    pickled is not.

    q and k come back in their own dtype, where transformers promotes bfloat16 and float16 ones to float32 if cos and sin
    are float32 (under autocast): attention would round them to it next.

    Raises, with the model as it was:
        NotImplementedError: the model rotates in a way that torch_rope does not know.
        ValueError: nothing in the model rotates, or the model is patched already.
    """
    name, rebuilder, replaced = type(model).__name__, _Rebuilder(), []
    for path, module in model.named_modules():
        for method, (function, *inherited) in rebuilder.methods(type(module)):
            where = f"{name} is not patched: {type(module).__name__}.{method} of {path or 'the model itself'}"
            slot = "_old_forward" if method == "forward" and "_old_forward" in vars(module) else method  # accelerate's
            current = vars(module).get(slot)
            bound = getattr(current, "__self__", None) is module
            function = current.__func__ if bound else function
            if hasattr(function, "_torch_rope"):
                raise ValueError(
                    f"{where} calls torch_rope already: the model, or what it was copied from, was patched"
                )
            try:
                new = rebuilder.rebuild(function)
            except NotImplementedError as error:
                raise NotImplementedError(f"{where} {error}") from None
            if new is not function:
                if current is not None and not bound:
                    raise NotImplementedError(f"{where} was replaced by {current!r}")
                replaced.append(_Replaced(path, module, slot, current, types.MethodType(new, module)))
            elif re.match("_?apply_(rotary|rope)", method):
                raise NotImplementedError(f"{where} rotates by no function that could be replaced")
            elif "super" in _names(inspect.unwrap(function).__code__) and any(map(rebuilder.calls_rotary, inherited)):
                raise NotImplementedError(f"{where} calls super(), whose rotary function could not be replaced")
    if not replaced:
        raise ValueError(f"{name} is not patched: no module of it calls a rotary function")
    calls = {call for r in replaced for call in r.method.__func__._torch_rope}
    for path, module in model.named_modules():
        for tables in _sample_tables(module):
            if not any(call.of_parts or _has_form(call.rotation.tables, *tables) for call in calls):
                raise NotImplementedError(f"{name} is not patched: {path} has two angles for the channels of a pair")
    for r in replaced:
        vars(r.module)[r.slot] = r.method
        vars(r.module)[_replicate.__name__] = types.MethodType(_replicate, r.module)
    return Patch(model, replaced)


def _replicate(self: nn.Module) -> nn.Module:
    """nn.DataParallel copies a module's attributes; these methods have to be the copy's own."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name, value in vars(replica).items():
        if isinstance(value, types.MethodType) and value.__self__ is self:
            vars(replica)[name] = types.MethodType(value.__func__, replica)
    return replica


_replicate.__name__ = "_replicate_for_data_parallel"  # by which it is found, and pickled as the class's own


@dataclass
class _Replaced:
    path: str
    module: nn.Module
    slot: str  # the attribute of the module
    before: Any  # what it was, None: that of the class
    method: types.MethodType


class Patch:
    """What :func:`patch` did; str() tells it."""

    def __init__(self, model: nn.Module, replaced: list[_Replaced]):
        self._model, self._replaced = model, replaced

    def undo(self) -> None:
        """The model as it was. A second time it does nothing. RuntimeError, with nothing changed, if somebody put another
        method in the place of a patched one since, which may call it: undo that first."""
        slots = [(r, [slot for slot, value in vars(r.module).items() if value is r.method]) for r in self._replaced]
        for r, found in slots:
            if not found:
                raise RuntimeError(f"torch_rope: {r.path}.{r.slot} was replaced since it was patched: undo that first")
        for r, (slot,) in slots:
            vars(r.module).pop(_replicate.__name__, None)
            if r.before is not None or slot != r.slot:
                # As accelerate has it: the method that its hook calls.
                vars(r.module)[slot] = r.before or getattr(type(r.module), r.slot).__get__(r.module)
            else:
                del vars(r.module)[slot]
        self._replaced = []

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_) -> None:
        self.undo()

    def __repr__(self) -> str:
        if not self._replaced:
            return f"torch_rope is not in {type(self._model).__name__} any more"
        lines = {}
        for r in self._replaced:
            path = re.sub(r"\b\d+\b", "*", f"{r.path}.{r.method.__name__}".lstrip("."))
            line = f"{path} of %d {type(r.module).__name__}: {'; '.join(map(str, r.method.__func__._torch_rope))}"
            lines[line] = lines.get(line, 0) + 1
        for path, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and "original" not in name:
                    lines[f"{path}.{name}: {buffer.numel()} frequencies, as before"] = ()
        return "\n  ".join([f"torch_rope in {type(self._model).__name__}:", *(k % n for k, n in lines.items())])


# ---- What a rotary function does ----

# How a function takes cos and sin of angles a, b: made from [.., rotary_dim / 2], and read back. Most rotary modules make
# the first; the last is of llama 4's images, a table that has a dimension for the heads.
_TABLES = {
    "a, b, a, b": (
        lambda cos, sin: (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)),
        lambda cos, sin: (cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]),
    ),
    "a, a, b, b": (
        lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
        lambda cos, sin: (cos[..., ::2], sin[..., ::2]),
    ),
    "a, b": (lambda cos, sin: (cos, sin), lambda cos, sin: (cos, sin)),
    "complex": (
        lambda cos, sin: (torch.complex(cos, sin),),
        lambda table: torch.view_as_real(table).unbind(-1),
    ),
    "complex, with heads": (
        lambda cos, sin: (torch.complex(cos, sin).unsqueeze(-2),),
        lambda table: torch.view_as_real(table.squeeze(1)).unbind(-1),
    ),
}
# The last is DeepSeek V3's: of pair i, channels 2i and 2i + 1, the result goes to channels i and i + rotary_dim / 2.
_PAIRINGS = ["half-split", "interleaved", "interleaved in, half-split out"]


def _has_form(form: str, *tables: Tensor) -> bool:
    make, read = _TABLES[form]
    return len(tables) == 2 and all(map(torch.equal, make(*read(*tables)), tables))


def _sample_tables(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """What a rotary module makes of positions, along one axis or more, in all shapes that it takes. A function may be a
    rotation, and turn the channels of a pair by different angles nevertheless, if the table says so."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    arguments = code.co_varnames[1 : code.co_argcount] if code else ()
    if arguments[:2] != ("x", "position_ids"):
        return
    module = copy.deepcopy(module)  # frequencies may change by length
    x = torch.zeros(1, 5, 1, device=next((t.device for t in module.buffers()), None))
    if x.is_meta:
        return
    for shape in ((4, 1, 5), (3, 1, 5), (2, 1, 5), (2, 5), (5, 2), (1, 5)):
        positions = (3 * torch.arange(torch.Size(shape).numel(), device=x.device) % 7).view(shape)
        layer_types = getattr(module, "layer_types", None) if "layer_type" in arguments else None
        for layer_type in [(t,) for t in layer_types] if layer_types else [()]:
            try:
                tables = module(x, positions, *layer_type)
            except Exception:  # not for such positions
                continue
            if isinstance(tables, tuple):
                yield tables


def _seq_is_before_heads(table: Tensor, unsqueeze_dim: int) -> bool:
    """Whether a table [.., seq, rotary_dim], unsqueezed so, is for x [.., seq, heads, head_dim], and not for
    [.., heads, seq, head_dim]."""
    from_the_end = unsqueeze_dim - table.dim() - 1 if unsqueeze_dim >= 0 else unsqueeze_dim
    if from_the_end != -2 and from_the_end != -3:
        raise ValueError(
            f"torch_rope: tables of shape {list(table.shape)} and unsqueeze_dim {unsqueeze_dim} are neither for "
            "[.., seq, heads, head_dim] nor for [.., heads, seq, head_dim]"
        )
    return from_the_end == -2


@dataclass(frozen=True)
class _Rotation:
    tables: str
    pairing: str
    inverse: bool
    unsqueeze_dim: int | None  # None: the function has an argument of that name

    def functions(self) -> tuple[Callable, Callable]:
        """One for a tensor and one for q and k, whose other arguments are a tuple of tables and unsqueeze_dim."""
        read = _TABLES[self.tables][1]
        flags = {"interleaved": True} if self.pairing != "half-split" else {}
        if self.inverse:
            flags["inverse"] = True
        reordered = self.pairing == "interleaved in, half-split out"

        def angles(x, tables):
            cos, sin = read(*tables)
            if cos.dtype != torch.float32 and cos.dtype != x.dtype:
                cos, sin = cos.float(), sin.float()
            return cos, sin

        def reorder(x):
            return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

        def one(x, tables, unsqueeze_dim):
            cos, sin = angles(x, tables)
            as_it_is = _seq_is_before_heads(cos, unsqueeze_dim)
            x = _rotate(x if as_it_is else x.transpose(-3, -2), cos, sin, **flags)
            if reordered:
                x = reorder(x)
            return x if as_it_is else x.transpose(-3, -2)

        def two(q, k, tables, unsqueeze_dim):
            cos, sin = angles(q, tables)
            as_it_is = _seq_is_before_heads(cos, unsqueeze_dim)
            if not as_it_is:
                q, k = q.transpose(-3, -2), k.transpose(-3, -2)
            q, k = _rotate_qk(q, k, cos, sin, **flags)
            if reordered:
                q, k = reorder(q), reorder(k)
            return (q, k) if as_it_is else (q.transpose(-3, -2), k.transpose(-3, -2))

        return one, two


@dataclass(frozen=True)
class _Call:
    function: str
    operator: str
    rotation: _Rotation
    of_parts: bool = False  # called by another rotary function, with parts of x and of the tables

    def __str__(self):
        inverse = ", inverse" if self.rotation.inverse else ""
        return f"{self.function} is torch.ops.rope.{self.operator}, {self.rotation.pairing}{inverse}"


class _RotaryFunction:
    """A function of one tensor, or q and k, and cos and sin, or one complex table. NotImplementedError if it is none, or
    does not rotate."""

    def __init__(self, function: Callable):
        self.function = function
        # kernels makes a module of a function; its forward has the signature.
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        self.parameters = signature.parameters
        self.tables = [n for n in ("cos", "sin") if n in self.parameters]
        self.tables = self.tables or [n for n in self.parameters if n.startswith("freqs")]
        self.tensors = [n for n in self.parameters if n not in (*self.tables, "unsqueeze_dim", "position_ids")]
        if len(self.tables) not in (1, 2) or len(self.tensors) not in (1, 2):
            raise NotImplementedError(f"of unknown arguments, {signature}")
        choices = [_Rotation(*c) for c in product(_TABLES, _PAIRINGS, [False, True], [None, 1, -2]) if self._may_be(*c)]
        # A function without unsqueeze_dim may agree with two of them on single sequences: it is what agrees on batches too.
        agreed = [self._samples_that_agree(rotation) for rotation in choices]
        if not any(agreed) or agreed.count(max(agreed)) > 1:
            raise NotImplementedError("not a rotation of pairs of channels by the angles of cos and sin")
        self.rotation = choices[agreed.index(max(agreed))]
        for fewer in ({"q_seq": 4}, {"table_seq": 4}):
            if any(self._call(self.function, sample) for sample in self._samples(self.rotation, **fewer)):
                raise NotImplementedError("of q, k and tables that may differ in length")

    def _may_be(self, tables: str, pairing: str, inverse: bool, unsqueeze_dim: int | None) -> bool:
        if tables == "complex, with heads" and unsqueeze_dim != -2:
            return False
        is_complex = tables.startswith("complex")
        return is_complex == (len(self.tables) == 1) and (unsqueeze_dim is None) == ("unsqueeze_dim" in self.parameters)

    def _samples(self, rotation: _Rotation, head_dim=16, q_seq=5, k_seq=5, table_seq=5) -> Iterator[dict[str, Any]]:
        """Arguments in the layouts that the function may be called with: a batch with a table row per token of each, and
        one sequence without a batch (images); or a batch that shares its rows."""
        plain = {"dtype": torch.float32, "device": "cpu"}
        dims = [(4, 2)] if rotation.tables == "complex, with heads" else [(4, 3), (3, 2)]
        unsqueeze_dims = [1, 2] if rotation.unsqueeze_dim is None else [rotation.unsqueeze_dim]
        for (x_dim, table_dim), unsqueeze_dim in product(dims, unsqueeze_dims):
            g = torch.Generator().manual_seed(0)
            shape = (2, table_seq, 8)[-table_dim:]
            cos, sin = torch.randn(2, *shape, generator=g, **plain)
            if unsqueeze_dim > table_dim - 1:  # behind seq
                continue
            sample = dict(zip(self.tables, _TABLES[rotation.tables][0](cos, sin), strict=True))
            for name, seq, heads in zip(self.tensors, (q_seq, k_seq), (4, 3), strict=False):
                seq_and_heads = (seq, heads) if _seq_is_before_heads(cos, unsqueeze_dim) else (heads, seq)
                sample[name] = torch.randn((2, *seq_and_heads, head_dim)[-x_dim:], generator=g, **plain)
            if "unsqueeze_dim" in self.parameters:
                sample["unsqueeze_dim"] = unsqueeze_dim
            if "position_ids" in self.parameters:  # functions that have it do nothing with it
                sample["position_ids"] = torch.zeros(2, table_seq, dtype=torch.int64, device="cpu")
            yield sample

    def _call(self, function: Callable, sample: dict[str, Any]) -> list[Tensor] | None:
        """What it returns, or None if it is not for such arguments."""
        try:
            with torch.no_grad():
                results = function(**sample)
        except Exception:
            return None
        results = [r for r in (results if isinstance(results, tuple) else [results]) if r is not None]
        shapes = [sample[n].shape for n in self.tensors if sample[n] is not None]
        return results if [r.shape for r in results] == shapes else None

    def _samples_that_agree(self, rotation: _Rotation) -> int:
        """0 if any does not. rotary_dim is 16."""
        ours, agree = self._calling(rotation), 0
        for sample in (*self._samples(rotation, head_dim=16), *self._samples(rotation, head_dim=24)):
            expected = self._call(self.function, sample)
            if expected is not None:
                actual = self._call(ours, sample)
                if actual is None or not all(map(lambda a, e: torch.allclose(a, e, 1e-5, 1e-5), actual, expected)):
                    return 0
                agree += 1
        return agree

    def _calling(self, rotation: _Rotation, k_may_be_none: bool = False) -> Callable:
        one, two = rotation.functions()
        unsqueeze_dim = "unsqueeze_dim" if rotation.unsqueeze_dim is None else rotation.unsqueeze_dim
        arguments = [n if p.default is p.empty else f"{n}={p.default!r}" for n, p in self.parameters.items()]
        # Written out: to bind *args and **kwargs takes longer than to rotate a token.
        source = f"rotate({', '.join(self.tensors)}, ({', '.join(self.tables)},), {unsqueeze_dim})"
        if k_may_be_none:
            call = ", ".join(f"{n}={n}" for n in self.parameters)
            source += f" if {self.tensors[1]} is not None else original({call})"
        make = eval(f"lambda rotate, original: lambda {', '.join(arguments)}: {source}")
        return make(one if len(self.tensors) == 1 else two, self.function)

    def replacement(self, name: str) -> Callable:
        """A function with the same arguments that calls torch_rope."""
        without_k = [s | {n: None} for s in self._samples(self.rotation) for n in self.tensors[1:]]
        new = self._calling(self.rotation, any(self._call(self.function, sample) for sample in without_k))
        new.__name__ = new.__qualname__ = name
        new._torch_rope = (_Call(name, "rotate" if len(self.tensors) == 1 else "rotate_qk", self.rotation),)
        return new


# ---- Methods that call one ----

_ROTARY = re.compile("(^|_)(rotary|rope|rotate)(_|$)")


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class _Rebuilder:
    """Copies of functions, that call torch_rope where the original calls a global rotary function. A function's globals
    are those of its module, so the copy has its own."""

    def __init__(self):
        self._rebuilt: dict[Callable, Callable] = {}
        self._replacements: dict[Callable, Callable] = {}
        self._methods: dict[type, list[tuple[str, list[Callable]]]] = {}

    def methods(self, module_class: type) -> list[tuple[str, list[Callable]]]:
        """The methods of a class by name, each before those that it overrides, without those of torch and of
        transformers' own base classes."""
        if module_class not in self._methods:
            found = {}
            for base in module_class.__mro__:
                place = base.__module__.split(".")
                if place[0] != "torch" and (place[0] != "transformers" or place[1] == "models"):
                    for name, value in vars(base).items():
                        found.setdefault(name, []).append(value)
            self._methods[module_class] = [
                (name, functions)
                for name, functions in found.items()
                if all(isinstance(f, types.FunctionType) for f in functions)
            ]
        return self._methods[module_class]

    def calls_rotary(self, function: Callable) -> bool:
        try:
            return self.rebuild(function) is not function
        except NotImplementedError:
            return True

    def rebuild(self, function: Callable) -> Callable:
        """function itself if it calls no rotary function; NotImplementedError if it calls one that is not known."""
        if function not in self._rebuilt:
            self._rebuilt[function] = function  # for functions that call each other
            self._rebuilt[function] = self._rebuild(function)
        return self._rebuilt[function]

    def _rebuild(self, function: Callable) -> Callable:
        inner = getattr(function, "__wrapped__", None)
        if isinstance(inner, types.FunctionType):  # function is a decorator's, inner is in its closure
            new = self.rebuild(inner)
            if new is inner:
                return function
            closure = tuple(types.CellType(new) if c.cell_contents is inner else c for c in function.__closure__ or ())
            if closure == function.__closure__:
                raise NotImplementedError(f"has a decorator that is not known, {function.__code__.co_name}")
            return self._copy(function, function.__globals__, closure, new._torch_rope)
        new = {}
        for name in dict.fromkeys(_names(function.__code__)):
            value = function.__globals__.get(name)
            if callable(value) and not isinstance(value, type) and _ROTARY.search(name):
                new[name] = self._replacement(name, value)
            elif isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                rebuilt = self.rebuild(value)
                if rebuilt is not value:
                    new[name] = rebuilt
        if not new:
            return function
        # torch.compile would look for the names in the module that __name__ says.
        own = {name: value for name, value in function.__globals__.items() if name != "__name__"} | new
        return self._copy(function, own, function.__closure__, sum((f._torch_rope for f in new.values()), ()))

    @staticmethod
    def _copy(function: Callable, own_globals: dict, closure: tuple | None, calls: tuple[_Call, ...]) -> Callable:
        new = types.FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__, closure)
        functools.update_wrapper(new, function)
        del new.__wrapped__  # else inspect and torch.compile take function itself
        new.__kwdefaults__ = function.__kwdefaults__
        new._torch_rope = calls
        return new

    def _replacement(self, name: str, function: Callable) -> Callable:
        if function not in self._replacements:
            try:
                self._replacements[function] = _RotaryFunction(function).replacement(name)
            except NotImplementedError as error:
                # One that calls others for parts of the channels?
                try:
                    new = self.rebuild(function) if isinstance(function, types.FunctionType) else function
                except NotImplementedError:
                    new = function
                if new is function:
                    raise NotImplementedError(f"calls {name}: {error}") from None
                new._torch_rope = tuple(replace(call, of_parts=True) for call in new._torch_rope)
                self._replacements[function] = new
        return self._replacements[function]


# ---- transformers' own mechanism ----


def kernel_mapping() -> dict:
    """What ``kernels.use_kernel_mapping`` takes, to let torch_rope do the work of the functions that transformers names
    "rotary_pos_emb"::

        with kernels.use_kernel_mapping(kernel_mapping()):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")

    for every mode, on "cpu", "cuda" and "mps". It downloads nothing. kernels replaces a function for all models of its
    modeling file, until the next ``kernelize`` of one of them. Functions without that name stay: :func:`patch` knows them,
    and looks at the tables of the rotary module too, which a kernel does not see.
    """
    from kernels import LocalLayerRepository, Mode
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        raise ImportError(
            "kernel_mapping: this transformers does not use the kernels that is installed, so kernelize would change "
            f"nothing; it needs kernels {import_utils.KERNELS_MIN_VERSION} or later, below "
            f"{import_utils.KERNELS_MAX_VERSION}"
        )
    layer = LocalLayerRepository(Path(__file__).with_name("kernel"), layer_name=apply_rotary_transformers.__name__)
    modes = (Mode.INFERENCE, Mode.TRAINING)
    modes += tuple(mode | Mode.TORCH_COMPILE for mode in modes)
    return {"rotary_pos_emb": {device: dict.fromkeys(modes, layer) for device in ("cpu", "cuda", "mps")}}


class apply_rotary_transformers(nn.Module):  # noqa: N801  the name that transformers gives it in its own mapping
    """The layer that kernels puts under a function: it takes forward, and gives it the module that it made of the
    function, so that forward finds what that function does. NotImplementedError if it is no rotation."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return _under_kernels[_under_kernel(type(self))](q, k, cos, sin, unsqueeze_dim)


_kernels: list[type[nn.Module]] = []
_under_kernels: list[Callable] = []


@torch.compiler.assume_constant_result  # a number, as a function cannot be one
def _under_kernel(kernel: type[nn.Module]) -> int:
    """Where the replacement is of the function that kernels made this module of."""
    if kernel not in _kernels:
        function = _RotaryFunction(functools.partial(kernel.forward, None))  # it has no state
        _under_kernels.append(function.replacement(kernel.kernel_layer_name))
        _kernels.append(kernel)
    return _kernels.index(kernel)
