"""Lets a loaded model of Hugging Face transformers rotate with torch_rope.

A model of transformers makes cos and sin once per forward, in its rotary module. In each layer, a function of the
model's modeling file rotates q and k by them: the rotary function. :func:`patch` replaces the rotary function in one
model by torch_rope. :func:`kernel_mapping` replaces it through transformers' own mechanism, the kernels package. The
rotary module is not changed, so every kind of frequencies and positions that transformers supports still works.
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
    """Makes a model of transformers rotate q and k with torch_rope, for inference and training.

    The change takes effect at once and concerns this model only. The returned handle restores the model, either by its
    ``undo()`` method or at the end of a ``with`` block::

        handle = patch(model)
        print(handle)  # lists the methods that call torch_rope now
        handle.undo()

    ``patch`` finds out what a rotary function does by calling it on random numbers, not by its name. Weights, hooks and
    caches are not touched, and other models of the same class do not change. A deepcopy of a patched model is patched;
    a model that was pickled and loaded is not.

    The rotated q and k have the dtype of q and k. transformers returns float32 if q and k are bfloat16 or float16 and
    cos and sin are float32, as under autocast; attention then rounds q and k back to their dtype.

    Args:
        model: a model of transformers, or any module that contains one.

    Returns:
        A :class:`Patch`.

    Raises:
        NotImplementedError: the model rotates in a way that torch_rope does not support. The model is unchanged.
        ValueError: no module of the model rotates, or the model is already patched. The model is unchanged.
    """
    name, rebuilder, replaced = type(model).__name__, _Rebuilder(), []
    for path, module in model.named_modules():
        for method, (function, *inherited) in rebuilder.methods(type(module)):
            where = f"{name} is not patched: {type(module).__name__}.{method} of {path or 'the model itself'}"
            # The hooks of accelerate keep the module's own forward in this attribute, and call it.
            attribute = "_old_forward" if method == "forward" and "_old_forward" in vars(module) else method
            current = vars(module).get(attribute)
            bound = getattr(current, "__self__", None) is module
            function = current.__func__ if bound else function
            if hasattr(function, "_torch_rope"):
                raise ValueError(
                    f"{where} already calls torch_rope, because this model, or the model that it was copied from, "
                    "is patched"
                )
            try:
                new = rebuilder.rebuild(function)
            except NotImplementedError as error:
                raise NotImplementedError(f"{where} {error}") from None
            if new is not function:
                if current is not None and not bound:
                    raise NotImplementedError(
                        f"{where} was replaced by {current!r} but must be a method of the module; patch the model "
                        "before the method is replaced"
                    )
                replaced.append(_Replaced(path, module, attribute, current, types.MethodType(new, module)))
            elif re.match("_?apply_(rotary|rope)", method):
                raise NotImplementedError(f"{where} must call a rotary function that can be replaced but does not")
            elif "super" in _names(inspect.unwrap(function).__code__) and any(map(rebuilder.calls_rotary, inherited)):
                raise NotImplementedError(f"{where} calls super(), whose rotary function cannot be replaced")
    if not replaced:
        raise ValueError(f"{name} is not patched: no module of it calls a rotary function")
    calls = {call for r in replaced for call in r.method.__func__._torch_rope}
    for path, module in model.named_modules():
        for tables in _sample_tables(module):
            if not any(call.of_parts or _has_form(call.rotation.tables, *tables) for call in calls):
                raise NotImplementedError(
                    f"{name} is not patched: {path} has different angles for the two channels of a pair but must have "
                    "the same angle"
                )
    for r in replaced:
        vars(r.module)[r.attribute] = r.method
        vars(r.module)[_replicate.__name__] = types.MethodType(_replicate, r.module)
    return Patch(model, replaced)


def _replicate(self: nn.Module) -> nn.Module:
    """Returns a replica for nn.DataParallel whose replaced methods belong to the replica.

    nn.DataParallel copies the attributes of a module. The copied methods would still be bound to the original module,
    and so compute with its weights.
    """
    replica = type(self)._replicate_for_data_parallel(self)
    for name, value in vars(replica).items():
        if isinstance(value, types.MethodType) and value.__self__ is self:
            vars(replica)[name] = types.MethodType(value.__func__, replica)
    return replica


# nn.DataParallel calls the method of this name, and pickle looks the name up in the class.
_replicate.__name__ = "_replicate_for_data_parallel"


@dataclass
class _Replaced:
    """A method of one module that :func:`patch` replaced."""

    path: str
    module: nn.Module
    attribute: str  # the module's attribute that holds the method
    before: Any  # the value of the attribute before the patch; None if the module itself had no such attribute
    method: types.MethodType


class Patch:
    """The handle that :func:`patch` returns. ``str()`` of it lists the replaced methods."""

    def __init__(self, model: nn.Module, replaced: list[_Replaced]):
        self._model, self._replaced = model, replaced

    def undo(self) -> None:
        """Restores the model. If the model is restored already, this does nothing.

        Raises:
            RuntimeError: a patched method was replaced after ``patch``. The new method may call the patched one, so
                nothing is changed; restore the patched method first.
        """
        attributes = [
            (r, [name for name, value in vars(r.module).items() if value is r.method]) for r in self._replaced
        ]
        for r, found in attributes:
            if not found:
                raise RuntimeError(
                    f"torch_rope: {r.path}.{r.attribute} was replaced after it was patched; undo that replacement first"
                )
        for r, (name,) in attributes:
            vars(r.module).pop(_replicate.__name__, None)
            if r.before is not None or name != r.attribute:
                # A hook of accelerate calls the method in this attribute, so the attribute must not be deleted.
                vars(r.module)[name] = r.before or getattr(type(r.module), r.attribute).__get__(r.module)
            else:
                del vars(r.module)[name]
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


# ---- Finding out what a rotary function does ----

# The forms of the tables that rotary functions take, shown for two angles a and b. Each form is a pair of functions:
# the first makes the tables from cos and sin [.., rotary_dim / 2], the second reads cos and sin back from the tables.
# Most rotary modules make the first form. The last form, with a dimension for the heads, is that of Llama 4's images.
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
# The last is DeepSeek V3's: it reads pair i from channels 2i and 2i + 1, and writes the result to channels i and
# i + rotary_dim / 2.
_PAIRINGS = ["half-split", "interleaved", "interleaved in, half-split out"]


def _has_form(form: str, *tables: Tensor) -> bool:
    """Returns whether tables are cos and sin in this form of _TABLES."""
    make, read = _TABLES[form]
    return len(tables) == 2 and all(map(torch.equal, make(*read(*tables)), tables))


def _sample_tables(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tables that a rotary module makes from positions of several shapes, along one axis or several axes.

    The tables must be examined as well as the function: even if the function is a rotation, a table may contain
    different angles for the two channels of a pair. Yields nothing if the module is no rotary module.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    arguments = code.co_varnames[1 : code.co_argcount] if code else ()
    if arguments[:2] != ("x", "position_ids"):
        return
    module = copy.deepcopy(module)  # the call may change the frequencies, if they depend on the length
    x = torch.zeros(1, 5, 1, device=next((t.device for t in module.buffers()), None))
    if x.is_meta:
        return
    for shape in ((4, 1, 5), (3, 1, 5), (2, 1, 5), (2, 5), (5, 2), (1, 5)):
        positions = (3 * torch.arange(torch.Size(shape).numel(), device=x.device) % 7).view(shape)
        layer_types = getattr(module, "layer_types", None) if "layer_type" in arguments else None
        for layer_type in [(t,) for t in layer_types] if layer_types else [()]:
            try:
                tables = module(x, positions, *layer_type)
            except Exception:  # the module does not take positions of this shape
                continue
            if isinstance(tables, tuple):
                yield tables


def _seq_is_before_heads(table: Tensor, unsqueeze_dim: int) -> bool:
    """Returns True if a table [.., seq, rotary_dim], unsqueezed at unsqueeze_dim, broadcasts over x
    [.., seq, heads, head_dim], and False if it broadcasts over x [.., heads, seq, head_dim]."""
    from_the_end = unsqueeze_dim - table.dim() - 1 if unsqueeze_dim >= 0 else unsqueeze_dim
    if from_the_end != -2 and from_the_end != -3:
        raise ValueError(
            f"torch_rope: unsqueeze_dim is {unsqueeze_dim} but must be {table.dim() - 1} for x [.., seq, heads, "
            f"head_dim] or {table.dim() - 2} for x [.., heads, seq, head_dim], because the tables have shape "
            f"{list(table.shape)}"
        )
    return from_the_end == -2


@dataclass(frozen=True)
class _Rotation:
    """A description of what a rotary function does."""

    tables: str  # a key of _TABLES
    pairing: str  # one of _PAIRINGS
    inverse: bool
    unsqueeze_dim: int | None  # None if the function has an argument of this name

    def functions(self) -> tuple[Callable, Callable]:
        """Returns two functions that do this rotation with torch_rope: one of x, and one of q and k.

        Their other arguments are a tuple of tables, and unsqueeze_dim.
        """
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

        def rotate_x(x, tables, unsqueeze_dim):
            cos, sin = angles(x, tables)
            seq_first = _seq_is_before_heads(cos, unsqueeze_dim)
            x = _rotate(x if seq_first else x.transpose(-3, -2), cos, sin, **flags)
            if reordered:
                x = reorder(x)
            return x if seq_first else x.transpose(-3, -2)

        def rotate_q_and_k(q, k, tables, unsqueeze_dim):
            cos, sin = angles(q, tables)
            seq_first = _seq_is_before_heads(cos, unsqueeze_dim)
            if not seq_first:
                q, k = q.transpose(-3, -2), k.transpose(-3, -2)
            q, k = _rotate_qk(q, k, cos, sin, **flags)
            if reordered:
                q, k = reorder(q), reorder(k)
            return (q, k) if seq_first else (q.transpose(-3, -2), k.transpose(-3, -2))

        return rotate_x, rotate_q_and_k


@dataclass(frozen=True)
class _Call:
    """A call of torch_rope that stands for a call of a rotary function."""

    function: str
    operator: str
    rotation: _Rotation
    of_parts: bool = False  # True if another rotary function calls it with parts of x and of the tables

    def __str__(self):
        inverse = ", inverse" if self.rotation.inverse else ""
        return f"{self.function} is torch.ops.rope.{self.operator}, {self.rotation.pairing}{inverse}"


class _RotaryFunction:
    """A rotary function, and the rotation that it was found to do.

    The function takes one tensor or q and k, and cos and sin or one complex table. The constructor raises
    NotImplementedError if the function has other arguments, or does something other than rotate.
    """

    def __init__(self, function: Callable):
        self.function = function
        # The kernels package turns a function into a module whose forward has the signature.
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        self.parameters = signature.parameters
        self.tables = [n for n in ("cos", "sin") if n in self.parameters]
        self.tables = self.tables or [n for n in self.parameters if n.startswith("freqs")]
        self.tensors = [n for n in self.parameters if n not in (*self.tables, "unsqueeze_dim", "position_ids")]
        if len(self.tables) not in (1, 2) or len(self.tensors) not in (1, 2):
            raise NotImplementedError(
                f"the function has the arguments {signature} but must have one or two tensors, and cos and sin or freqs"
            )
        choices = [_Rotation(*c) for c in product(_TABLES, _PAIRINGS, [False, True], [None, 1, -2]) if self._may_be(*c)]
        # A function without unsqueeze_dim may agree with two choices on single sequences. The right choice is the one
        # that agrees on batches too.
        agreed = [self._samples_that_agree(rotation) for rotation in choices]
        if not any(agreed) or agreed.count(max(agreed)) > 1:
            raise NotImplementedError(
                "the function must rotate pairs of channels by the angles of cos and sin but computes something else"
            )
        self.rotation = choices[agreed.index(max(agreed))]
        for fewer in ({"q_seq": 4}, {"table_seq": 4}):
            if any(self._call(self.function, sample) for sample in self._samples(self.rotation, **fewer)):
                raise NotImplementedError(
                    "the function accepts q, k and tables of different lengths but must accept only one length"
                )

    def _may_be(self, tables: str, pairing: str, inverse: bool, unsqueeze_dim: int | None) -> bool:
        """Returns whether the function's arguments allow this rotation."""
        if tables == "complex, with heads" and unsqueeze_dim != -2:
            return False
        is_complex = tables.startswith("complex")
        return is_complex == (len(self.tables) == 1) and (unsqueeze_dim is None) == ("unsqueeze_dim" in self.parameters)

    def _samples(self, rotation: _Rotation, head_dim=16, q_seq=5, k_seq=5, table_seq=5) -> Iterator[dict[str, Any]]:
        """Yields random arguments in the layouts that models use.

        Without a dimension for the heads in the tables: a batch with a table row for each token of each sequence, and
        one sequence without a batch dimension (images). With it: a batch whose sequences share their table rows.
        """
        plain = {"dtype": torch.float32, "device": "cpu"}
        dims = [(4, 2)] if rotation.tables == "complex, with heads" else [(4, 3), (3, 2)]
        unsqueeze_dims = [1, 2] if rotation.unsqueeze_dim is None else [rotation.unsqueeze_dim]
        for (x_dim, table_dim), unsqueeze_dim in product(dims, unsqueeze_dims):
            g = torch.Generator().manual_seed(0)
            shape = (2, table_seq, 8)[-table_dim:]
            cos, sin = torch.randn(2, *shape, generator=g, **plain)
            if unsqueeze_dim > table_dim - 1:  # the new dimension would be after rotary_dim
                continue
            sample = dict(zip(self.tables, _TABLES[rotation.tables][0](cos, sin), strict=True))
            for name, seq, heads in zip(self.tensors, (q_seq, k_seq), (4, 3), strict=False):
                seq_and_heads = (seq, heads) if _seq_is_before_heads(cos, unsqueeze_dim) else (heads, seq)
                sample[name] = torch.randn((2, *seq_and_heads, head_dim)[-x_dim:], generator=g, **plain)
            if "unsqueeze_dim" in self.parameters:
                sample["unsqueeze_dim"] = unsqueeze_dim
            if "position_ids" in self.parameters:  # functions that have this argument ignore it
                sample["position_ids"] = torch.zeros(2, table_seq, dtype=torch.int64, device="cpu")
            yield sample

    def _call(self, function: Callable, sample: dict[str, Any]) -> list[Tensor] | None:
        """Returns the function's results as a list, or None if the function does not take these arguments."""
        try:
            with torch.no_grad():
                results = function(**sample)
        except Exception:
            return None
        results = [r for r in (results if isinstance(results, tuple) else [results]) if r is not None]
        shapes = [sample[n].shape for n in self.tensors if sample[n] is not None]
        return results if [r.shape for r in results] == shapes else None

    def _samples_that_agree(self, rotation: _Rotation) -> int:
        """Returns for how many samples this rotation by torch_rope gives the results of the function.

        Returns 0 if the results differ for any sample. rotary_dim is 16.
        """
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
        """Returns a function with the arguments of this one that does the rotation with torch_rope."""
        rotate_x, rotate_q_and_k = rotation.functions()
        unsqueeze_dim = "unsqueeze_dim" if rotation.unsqueeze_dim is None else rotation.unsqueeze_dim
        arguments = [n if p.default is p.empty else f"{n}={p.default!r}" for n, p in self.parameters.items()]
        # The arguments are written out in source code, because binding *args and **kwargs takes longer than rotating a
        # token.
        source = f"rotate({', '.join(self.tensors)}, ({', '.join(self.tables)},), {unsqueeze_dim})"
        if k_may_be_none:
            call = ", ".join(f"{n}={n}" for n in self.parameters)
            source += f" if {self.tensors[1]} is not None else original({call})"
        make = eval(f"lambda rotate, original: lambda {', '.join(arguments)}: {source}")
        return make(rotate_x if len(self.tensors) == 1 else rotate_q_and_k, self.function)

    def replacement(self, name: str) -> Callable:
        """Returns a function of this name, with the arguments of this one, that calls torch_rope."""
        without_k = [s | {n: None} for s in self._samples(self.rotation) for n in self.tensors[1:]]
        new = self._calling(self.rotation, any(self._call(self.function, sample) for sample in without_k))
        new.__name__ = new.__qualname__ = name
        new._torch_rope = (_Call(name, "rotate" if len(self.tensors) == 1 else "rotate_qk", self.rotation),)
        return new


# ---- Rebuilding the methods that call a rotary function ----

_ROTARY = re.compile("(^|_)(rotary|rope|rotate)(_|$)")


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of the globals and attributes that code and its nested functions use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class _Rebuilder:
    """Copies functions so that they call torch_rope instead of a global rotary function.

    A function shares its globals with its module, so each copy gets globals of its own. Nothing else in the module
    changes.
    """

    def __init__(self):
        self._rebuilt: dict[Callable, Callable] = {}
        self._replacements: dict[Callable, Callable] = {}
        self._methods: dict[type, list[tuple[str, list[Callable]]]] = {}

    def methods(self, module_class: type) -> list[tuple[str, list[Callable]]]:
        """Returns the methods of a class: for each name a list of functions, in which overriding functions come first.

        Methods of torch and of transformers' own base classes are left out.
        """
        if module_class not in self._methods:
            found = {}
            for base in module_class.__mro__:
                package = base.__module__.split(".")
                if package[0] != "torch" and (package[0] != "transformers" or package[1] == "models"):
                    for name, value in vars(base).items():
                        found.setdefault(name, []).append(value)
            self._methods[module_class] = [
                (name, functions)
                for name, functions in found.items()
                if all(isinstance(f, types.FunctionType) for f in functions)
            ]
        return self._methods[module_class]

    def calls_rotary(self, function: Callable) -> bool:
        """Returns whether a function calls a rotary function, known or not."""
        try:
            return self.rebuild(function) is not function
        except NotImplementedError:
            return True

    def rebuild(self, function: Callable) -> Callable:
        """Returns a copy of function that calls torch_rope, or function itself if it calls no rotary function.

        Raises NotImplementedError if it calls a rotary function that torch_rope does not support.
        """
        if function not in self._rebuilt:
            self._rebuilt[function] = function  # ends the recursion of functions that call each other
            self._rebuilt[function] = self._rebuild(function)
        return self._rebuilt[function]

    def _rebuild(self, function: Callable) -> Callable:
        inner = getattr(function, "__wrapped__", None)
        if isinstance(inner, types.FunctionType):  # a decorator made function, and holds inner in the closure
            new = self.rebuild(inner)
            if new is inner:
                return function
            closure = tuple(types.CellType(new) if c.cell_contents is inner else c for c in function.__closure__ or ())
            if closure == function.__closure__:
                raise NotImplementedError(
                    f"has the decorator function {function.__code__.co_name}, which must hold the method in its closure"
                )
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
        # __name__ is left out, because torch.compile would look for the names in the module that __name__ names.
        own = {name: value for name, value in function.__globals__.items() if name != "__name__"} | new
        return self._copy(function, own, function.__closure__, sum((f._torch_rope for f in new.values()), ()))

    @staticmethod
    def _copy(function: Callable, own_globals: dict, closure: tuple | None, calls: tuple[_Call, ...]) -> Callable:
        new = types.FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__, closure)
        functools.update_wrapper(new, function)
        del new.__wrapped__  # otherwise inspect and torch.compile would use function itself
        new.__kwdefaults__ = function.__kwdefaults__
        new._torch_rope = calls
        return new

    def _replacement(self, name: str, function: Callable) -> Callable:
        if function not in self._replacements:
            try:
                self._replacements[function] = _RotaryFunction(function).replacement(name)
            except NotImplementedError as error:
                # The function may call other rotary functions for parts of the channels.
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
    """Returns a mapping for ``kernels.use_kernel_mapping`` that replaces rotary functions by torch_rope.

    It replaces the functions that transformers names "rotary_pos_emb", for every mode, on "cpu", "cuda" and "mps"::

        with kernels.use_kernel_mapping(kernel_mapping()):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")

    Nothing is downloaded. The kernels package replaces a function for all models of its modeling file, until the next
    ``kernelize`` of one of them. Functions without that name stay as they are; :func:`patch` replaces them too.
    :func:`patch` also examines the tables of the rotary module, which a kernel does not see.

    Raises:
        ImportError: kernels is not installed, or transformers does not use the installed release of it.
    """
    from kernels import LocalLayerRepository, Mode
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        raise ImportError(
            "torch_rope.integrations.transformers.kernel_mapping: transformers does not use the installed release of "
            "kernels, so kernelize would change nothing; install a release of kernels from "
            f"{import_utils.KERNELS_MIN_VERSION} on, below {import_utils.KERNELS_MAX_VERSION}"
        )
    layer = LocalLayerRepository(Path(__file__).with_name("kernel"), layer_name=apply_rotary_transformers.__name__)
    modes = (Mode.INFERENCE, Mode.TRAINING)
    modes += tuple(mode | Mode.TORCH_COMPILE for mode in modes)
    return {"rotary_pos_emb": {device: dict.fromkeys(modes, layer) for device in ("cpu", "cuda", "mps")}}


class apply_rotary_transformers(nn.Module):  # noqa: N801  transformers' own mapping has this name
    """The layer that the kernels package substitutes for a rotary function.

    kernels makes a module from the rotary function and gives it this forward. So ``type(self)`` in forward is the
    module's class, by which forward finds out what the original function does. forward raises NotImplementedError if
    the function is not a rotation that torch_rope supports.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return _under_kernels[_under_kernel(type(self))](q, k, cos, sin, unsqueeze_dim)


_kernels: list[type[nn.Module]] = []
_under_kernels: list[Callable] = []


@torch.compiler.assume_constant_result  # the constant is an index, because a function cannot be a constant
def _under_kernel(kernel: type[nn.Module]) -> int:
    """Returns the index in _under_kernels of the replacement for the function that this module class was made from."""
    if kernel not in _kernels:
        # The module has no state, so self may be None.
        function = _RotaryFunction(functools.partial(kernel.forward, None))
        _under_kernels.append(function.replacement(kernel.kernel_layer_name))
        _kernels.append(kernel)
    return _kernels.index(kernel)
