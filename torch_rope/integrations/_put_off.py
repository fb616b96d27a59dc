"""Puts an RMS norm off until the rotation, so that one operator does both.

A method of a diffusion model normalises q in one place and rotates it in another. In between it may take views of q, or
join it with other tensors. :class:`PutOff` stands for the normalised tensor: a view of it is put off too, a rotary
function takes it as it is, and anything else computes the norm.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .._ops import ops
from ._norm import Norm, find_norm

_norm_rotate_qk = ops.norm_rotate_qk.default
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # the norm of each module, or None


def norm_of(module: Any) -> Norm | None:
    """Returns the RMS norm with a weight that a module computes, or None."""
    if not isinstance(module, nn.Module):
        return None
    if module not in _known:
        norm = find_norm(module)
        _known[module] = norm if norm is not None and norm.weight else None
    return _known[module]


def put_off(module: Any, x: Any) -> Any:
    """Returns module(x), or an object that stands for it if the module is an RMS norm that nobody watches."""
    if type(x) is not Tensor or x.is_meta or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
        return module(x)
    norm = norm_of(module)
    if norm is None or module.weight.dtype != x.dtype or module.weight.shape != x.shape[-1:]:
        return module(x)
    m = module
    if "forward" in vars(m):  # accelerate and diffusers put their hooks there
        return module(x)
    if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks or _has_any_global_hook():
        return module(x)
    return PutOff(module, norm, x)


class PutOff:
    """Stands for a normalised tensor that was not computed yet.

    Args:
        module: computes the norm.
        norm: what it computes.
        x: what the result would be made of, with the views that were taken of the result.
        base: what this is a view of, and a function that takes the view.
    """

    def __init__(self, module: nn.Module, norm: Norm, x: Tensor, base: tuple["PutOff", Callable] | None = None):
        self.module, self.norm, self.x = module, norm, x
        self._base, self._result = base, None
        self._version = None if x.is_inference() else x._version

    def check(self) -> None:
        """Raises RuntimeError if the tensor to be normalised was changed in place since. Inference tensors do not tell."""
        if self._version is not None and self.x._version != self._version:
            raise RuntimeError(
                f"torch_rope: the input of a {type(self.module).__name__} was changed in place before its result was used, "
                "but the norm was put off until then; patch the model with fuse=False"
            )

    def result(self) -> Tensor:
        """Returns the normalised tensor."""
        if self._result is None:
            self.check()
            self._result = self.module(self.x) if self._base is None else self._base[1](self._base[0].result())
        return self._result

    def is_computed(self) -> bool:
        """Returns whether the norm was computed. The result may have been changed in place since."""
        return self._result is not None or (self._base is not None and self._base[0].is_computed())

    # ---- what stays put off ----

    def _view(self, x: Tensor, method: str, *args: Any) -> "PutOff":
        return PutOff(self.module, self.norm, x, (self, lambda result: getattr(result, method)(*args)))

    def _is_whole(self) -> bool:
        """Returns whether the last dimension is the one that is normalised, and was not divided into heads."""
        return self.x.shape[-1] == self.module.weight.shape[0]

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Any:
        if self._is_whole() and dim in (-1, self.x.dim() - 1) and len(sizes) == 2:
            return self._view(self.x.unflatten(dim, sizes), "unflatten", dim, sizes)
        return self.result().unflatten(dim, sizes)

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        return self._divided("view", shape, kwargs)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return self._divided("reshape", shape, kwargs)

    def _divided(self, method: str, shape: tuple, kwargs: dict) -> Any:
        """Returns a view or reshaped tensor, which is put off if it only divides the last dimension into two."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        *first, heads, dim = sizes if len(sizes) == self.x.dim() + 1 else (None, 0, 0)
        divides = all(n in (-1, size) for n, size in zip(first, self.x.shape, strict=False))
        if self._is_whole() and divides and not kwargs and (-1 not in first or heads * dim == self.x.shape[-1]):
            return self._view(self.x.unflatten(-1, (heads, dim)), method, sizes)
        return getattr(self.result(), method)(*shape, **kwargs)

    def transpose(self, dim0: int, dim1: int) -> Any:
        last = self.x.dim() - 1
        if last in (dim0 % self.x.dim(), dim1 % self.x.dim()):
            return self.result().transpose(dim0, dim1)
        return self._view(self.x.transpose(dim0, dim1), "transpose", dim0, dim1)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and args in ((self.x.dtype,), (self.x.device,)):
            return self
        return self.result().to(*args, **kwargs)

    def type_as(self, other: Any) -> Any:
        return self.to(other.dtype)

    # ---- what does not need the numbers ----

    shape = property(lambda self: self.x.shape)
    dtype = property(lambda self: self.x.dtype)
    device = property(lambda self: self.x.device)
    ndim = property(lambda self: self.x.ndim)

    def size(self, *args: Any) -> Any:
        return self.x.size(*args)

    def dim(self) -> int:
        return self.x.dim()

    def __len__(self) -> int:
        return len(self.x)

    # ---- what computes the norm ----

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.result(), name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        return function(*results(args), **results(kwargs or {}))


def _operator(name: str) -> Callable:
    return lambda self, *args: getattr(self.result(), name)(*results(args))


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_OTHERS = ("getitem", "setitem", "iter", "contains", "reversed", "bool", "float", "int", "index", "array", "neg", "pos")
_OTHERS += ("abs", "invert", "eq", "ne", "lt", "le", "gt", "ge")
for _name in (*_OTHERS, *_BINARY, *(side + name for side in "ri" for name in _BINARY)):
    setattr(PutOff, f"__{_name}__", _operator(f"__{_name}__"))


def results(value: Any) -> Any:
    """Returns a value in which the tensors that were put off are computed. If there are none, it is the value itself."""
    if isinstance(value, PutOff):
        return value.result()
    if type(value) in (tuple, list):
        new = [results(v) for v in value]
        return value if all(map(operator.is_, new, value)) else type(value)(new)
    if type(value) is dict:
        return dict(zip(value, results([*value.values()]), strict=True))
    return value


def norm_and_rotate(
    xs: Sequence[PutOff], views: list[Tensor], cos: Tensor, sin: Tensor, flags: dict
) -> list[Tensor] | None:
    """Returns tensors that were put off, normalised and rotated by one operator, or None if it cannot do so.

    Args:
        views: their numbers, each [.., seq, heads, head_dim].
        cos, sin, flags: as the operator takes them.
    """
    if len({x.norm.eps for x in xs}) > 1 or (cos.dim() == 4 and len(xs) == 1):
        return None
    weights = []
    for x, view in zip(xs, views, strict=True):
        x.check()
        if x.module.weight.shape[0] not in (view.shape[-1], view.shape[-1] * view.shape[-2]):
            return None  # the heads are not those of one token
        weights.append(x.norm.weight_of(x.module, view))
    q, k = views if len(xs) == 2 else (views[0], views[0][..., :0, :])
    if len(xs) == 1:
        weights.append(weights[0] if weights[0].dim() == 1 else weights[0][:0])
    return list(_norm_rotate_qk(q, k, *weights, cos, sin, norm_eps=xs[0].norm.eps, **flags)[: len(xs)])
