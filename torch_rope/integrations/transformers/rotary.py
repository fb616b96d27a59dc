"""Finds out what a rotary function does, by calling it."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from torch_rope.integrations.transformers.branches import Branches
from torch_rope.integrations.transformers.rotator import (
    PAIRINGS,
    TABLES,
    Rotation,
    Rotator,
    Rounding,
    seq_is_before_heads,
)


def sample_tables(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
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


@dataclass(frozen=True)
class Call:
    """A call of torch_rope that stands for a call of a rotary function."""

    function: str
    operator: str
    rotation: Rotation
    remark: str  # how it rounds
    of_parts: bool = False  # True if another rotary function calls it with parts of x and of the tables

    def __str__(self):
        return f"{self.function} is torch.ops.rope.{self.operator}, {self.rotation}{self.remark}"


class RotaryFunction:
    """A rotary function, and the rotation that it was found to do.

    The function takes one tensor or q and k, and cos and sin or one complex table. The constructor raises
    NotImplementedError if the function has other arguments, or does something other than rotate.

    Args:
        function: the rotary function.
        rounding: "eager" or "once", see :func:`torch_rope.integrations.transformers.patch`.

    Attributes:
        rotation: the rotation.
        rotator: does it with torch_rope.
        remark: how it rounds, in words.
    """

    def __init__(self, function: Callable, rounding: str = "eager"):
        self.function = function
        # The kernels package turns a function into a module whose forward has the signature.
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        self.parameters = signature.parameters
        self.tables = [n for n in ("cos", "sin") if n in self.parameters]
        self.tables = self.tables or [n for n in self.parameters if n.startswith("freqs")]
        ignored = [n for n, p in self.parameters.items() if p.kind == p.VAR_KEYWORD or n in _IGNORED]
        self.tensors = [n for n in self.parameters if n not in (*self.tables, *ignored)]
        if len(self.tables) not in (1, 2) or len(self.tensors) not in (1, 2):
            raise NotImplementedError(
                f"the function has the arguments {signature} but must have one or two tensors, and cos and sin or freqs"
            )
        self._agreed: list[dict[str, Any]] = []  # arguments for which torch_rope has the results of the function
        self.rotation = self._find_rotation()
        roundings, self.remark = self._find_roundings() if rounding == "eager" else ({}, ", rounded once")
        self.rotator = Rotator(self.rotation, roundings, self._returns_none())
        self._examine_branches()

    @functools.cached_property
    def fused(self) -> Rotator:
        """A rotator for fused operators, whose results have the dtype of q. It rounds once if the function's have not."""
        same = {dtypes: r for dtypes, r in self.rotator.roundings.items() if r.x == r.result == dtypes[0]}
        rotator = Rotator(self.rotation, same)
        rotator.first_tables = self.rotator.first_tables
        return rotator

    # ---- calling the function ----

    def _samples(
        self, rotation: Rotation, head_dim=16, seqs=(5, 5, 5), dtypes=(torch.float32, torch.float32), one_for_all=False
    ) -> Iterator[dict[str, Any]]:
        """Yields random arguments in the layouts that models use.

        Without a dimension for the heads in the tables: a batch with a table row for each token of each sequence, and
        one sequence without a batch dimension (images). With it, and if the tables are multiplied as they are: a batch
        whose sequences share their table rows.

        Args:
            rotation: the rotation that the function may do, which has the layout of the tables.
            head_dim: the channels of a head, of which 16 are rotated.
            seqs: the numbers of tokens of q, of k and of the tables.
            dtypes: the dtype of q and k, and the dtype of cos and sin.
            one_for_all: whether a batch shares tables [1, seq, rotary_dim].
        """
        plain = {"dtype": torch.float32, "device": "cpu"}
        dims = [(4, 2), (3, 2)] if rotation.unsqueeze_dim == 0 else [(4, 3), (3, 2)]
        if rotation.tables == "complex, with heads":
            dims = [(4, 2)]
        elif one_for_all:
            dims = [(4, 3)]
        unsqueeze_dims = [1, 2] if rotation.unsqueeze_dim is None else [rotation.unsqueeze_dim]
        for (x_dim, table_dim), unsqueeze_dim in product(dims, unsqueeze_dims):
            g = torch.Generator().manual_seed(0)
            shape = (1 if one_for_all else 2, seqs[2], 8)[-table_dim:]
            cos, sin = torch.randn(2, *shape, generator=g, **plain).to(dtypes[1])
            if unsqueeze_dim > table_dim - 1:  # the new dimension would be after rotary_dim
                continue
            sample = dict(zip(self.tables, TABLES[rotation.tables][0](cos, sin), strict=True))
            for name, seq, heads in zip(self.tensors, seqs, (4, 3), strict=False):
                in_order = unsqueeze_dim != 0 and seq_is_before_heads(cos, unsqueeze_dim)
                seq_and_heads = (seq, heads) if in_order else (heads, seq)
                x = torch.randn((2, *seq_and_heads, head_dim)[-x_dim:], generator=g, **plain)
                sample[name] = x.to(dtypes[0])
            if "unsqueeze_dim" in self.parameters:
                sample["unsqueeze_dim"] = unsqueeze_dim
            if "position_ids" in self.parameters:
                sample["position_ids"] = torch.zeros(2, seqs[2], dtype=torch.int64, device="cpu")
            yield sample

    def _call(self, sample: dict[str, Any]) -> list[Tensor] | None:
        """Returns the function's results as a list, or None if the function does not take these arguments."""
        try:
            results = self.function(**sample)
        except Exception:
            return None
        results = [r for r in (results if isinstance(results, tuple | list) else [results]) if r is not None]
        shapes = [sample[n].shape for n in self.tensors if sample[n] is not None]
        return results if [r.shape for r in results] == shapes else None

    def _rotate(self, rotator: Rotator, sample: dict[str, Any]) -> list[Tensor] | None:
        """Returns the results of torch_rope, or None if it does not take these arguments."""
        tensors, tables = (tuple(sample[n] for n in names) for names in (self.tensors, self.tables))
        try:
            results = rotator.rotate(tensors, tables, sample.get("unsqueeze_dim", rotator.rotation.unsqueeze_dim))
        except (RuntimeError, ValueError, IndexError):
            return None
        return list(results) if isinstance(results, tuple) else [results]

    # ---- finding out what it does ----

    def _agrees(self, rotation: Rotation, **kind: Any) -> int | None:
        """Returns for how many samples of this kind the function does this rotation.

        Returns 0 if it does something else for any of them, and None if it takes none of them.
        """
        agreed = []
        for sample in self._samples(rotation, **kind):
            with _plainly():
                expected, actual = self._call(sample), self._rotate(Rotator(rotation), sample)
            if expected is not None:
                if actual is None or not all(map(lambda a, e: torch.allclose(a, e, 1e-5, 1e-5), actual, expected)):
                    return 0
                agreed.append(sample)
        self._agreed += agreed
        return len(agreed) or None

    def _find_rotation(self) -> Rotation:
        choices = [Rotation(*c) for c in product(TABLES, PAIRINGS, [False, True], [None, 1, -2, 0]) if self._may_be(*c)]
        # A function without unsqueeze_dim may agree with two choices on single sequences. The right choice is the one
        # that agrees on batches too.
        agreed = [self._agrees(rotation) or 0 for rotation in choices]
        if not any(agreed) or agreed.count(max(agreed)) > 1:
            raise NotImplementedError(_NO_ROTATION)
        rotation = choices[agreed.index(max(agreed))]
        if self._agrees(rotation, head_dim=24) == 0:
            rotation = replace(rotation, last_channels=True)
            if not self._agrees(rotation, head_dim=24):
                raise NotImplementedError(_NO_ROTATION)
        for seqs, kind in (((7, 7, 5), "first_tokens_pass"), ((5, 7, 7), "last_rows_for_q")):
            if self._agrees(rotation, seqs=seqs) == 0:
                rotation = replace(rotation, **{kind: True})
        for seqs in ((7, 7, 5), (5, 7, 7), (7, 5, 7), (5, 5, 7), (5, 7, 5), (7, 5, 5)):
            if self._agrees(rotation, seqs=seqs) == 0:
                raise NotImplementedError(
                    "the function accepts q, k and tables of different lengths but must accept only one length"
                )
        for seq, one_for_all in ((1, False), (70, False), (6, True)):
            if self._agrees(rotation, seqs=(seq,) * 3, one_for_all=one_for_all) == 0:
                raise NotImplementedError(f"{_NO_ROTATION} for {seq} tokens")
        return rotation

    def _may_be(self, tables: str, pairing: str, inverse: bool, unsqueeze_dim: int | None) -> bool:
        """Returns whether the function's arguments allow this rotation."""
        if tables == "complex, with heads" and unsqueeze_dim != -2:
            return False
        is_complex = tables.startswith("complex")
        return is_complex == (len(self.tables) == 1) and (unsqueeze_dim is None) == ("unsqueeze_dim" in self.parameters)

    def _returns_none(self) -> bool:
        """Returns whether the function returns (q, None) for k=None. Raises nothing if it does not take k=None."""
        for sample in self._samples(self.rotation):
            with _plainly():
                sample |= dict.fromkeys(self.tensors[1:])
                if self.tensors[1:] and self._call(sample) is not None:
                    return isinstance(self.function(**sample), tuple)
        return False

    def _find_roundings(self) -> tuple[dict[tuple[torch.dtype, torch.dtype], Rounding], str]:
        """Returns how the function rounds, by the dtypes of x and of the tables, and a remark about the exceptions."""
        found, other = {}, []
        for x, tables in product(_DTYPES, repeat=2):
            rounding = self._find_rounding(x, tables)
            if rounding:
                found[x, tables] = rounding
                if not rounding.eager:
                    other.append(f"{_name(x)} with tables of {_name(tables)}")
        if not found[torch.float32, torch.float32].eager:
            return found, ", rounded once, because its bits cannot be had"
        return found, f", rounded once for {' and '.join(other)}, because those bits cannot be had" if other else ""

    def _find_rounding(self, x: torch.dtype, tables: torch.dtype) -> Rounding | None:
        """Returns how the function rounds x and tables of these dtypes, or None if it does not take them."""
        if len(self.tables) == 1 and tables.itemsize < 4:  # complex numbers have 32 bits or more for each part
            return None
        more = {"seqs": (7, 7, 5)} if self.rotation.first_tokens_pass else {}
        more = {"seqs": (5, 7, 7)} if self.rotation.last_rows_for_q else more
        with _plainly():
            called = [(s, self._call(s)) for s in self._samples(self.rotation, dtypes=(x, tables), **more)]
        samples = [sample for sample, results in called if results is not None]
        if not samples:
            return None
        result = next(results[0].dtype for _, results in called if results is not None)
        for inside in dict.fromkeys((torch.promote_types(x, tables), torch.float32, x)):
            # The operators round to this dtype if it is that of x, or float32.
            direct = result == x and torch.promote_types(x, inside) == inside and inside in (x, torch.float32)
            rounding = Rounding(x if direct else inside, inside, result, True)
            if all(self._has_the_bits(rounding, sample) for sample in samples):
                return self._with_gradients(rounding, samples)
        return Rounding.once(x, tables, result)

    def _has_the_bits(self, rounding: Rounding, sample: dict[str, Any]) -> bool:
        """Returns whether torch_rope, rounding so, has the function's bits."""
        with _plainly():
            return _same(self._rotate(self._rotator(rounding, sample), sample), self._call(sample))

    def _rotator(self, rounding: Rounding, sample: dict[str, Any]) -> Rotator:
        x, table = sample[self.tensors[0]], sample[self.tables[0]]
        return Rotator(self.rotation, {(x.dtype, table.dtype.to_real()): rounding})

    def _with_gradients(self, rounding: Rounding, samples: list[dict[str, Any]]) -> Rounding:
        """Returns the rounding, with how the function rounds and lays out the gradients.

        If nothing has their bits and strides, nothing that has their bits, and nothing else, the rounding is as it was:
        then the gradients may be rounded once more, or have other strides.
        """
        choices = [
            replace(rounding, converts_each=each, contiguous=contiguous)
            for contiguous, each in product([False, True], [False, True])
        ]
        for strides in (True, False):
            for choice in choices:
                if all(self._has_the_gradients(choice, sample, strides) for sample in samples):
                    return choice
        return rounding

    def _has_the_gradients(self, rounding: Rounding, sample: dict[str, Any], strides: bool) -> bool:
        """Returns whether torch_rope, rounding so, has the bits of the function's gradients, and their strides."""
        for transposed in ((-1, -1), (-2, -3), (-1, -2)):  # gradients of the results come with any strides
            outs = []
            with _plainly(), torch.enable_grad():
                for call in (self._call, functools.partial(self._rotate, self._rotator(rounding, sample))):
                    leaves = {n: sample[n].detach().requires_grad_() for n in self.tensors}
                    results = call(sample | leaves)
                    given = [
                        torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.transpose(*transposed).shape)
                        for r in results
                    ]
                    given = [g.transpose(*transposed) for g in given]
                    outs.append(torch.autograd.grad(results, list(leaves.values()), given))
            if not _same(*outs) or (strides and [g.stride() for g in outs[0]] != [g.stride() for g in outs[1]]):
                return False
        return True

    def _examine_branches(self) -> None:
        """Raises NotImplementedError if a condition of the function was the same for all arguments that were tried."""
        function, first = self.function, ()
        if isinstance(function, functools.partial):
            function, first = function.func, function.args
        elif isinstance(function, nn.Module):
            function, first = type(function).forward, (function,)
        branches = Branches(function)
        with _plainly():
            for sample in self._agreed:
                branches.function(*first, **sample)
        if condition := branches.one_way():
            raise NotImplementedError(f"the function branches, and {condition} when it was tried with up to 70 tokens")

    # ---- functions that do the same ----

    def with_signature(self, rotate: Callable, *first: str) -> Callable:
        """Returns a function with the arguments of this one, after some first arguments.

        It calls rotate with the tensors, the tables, unsqueeze_dim and the first arguments.
        """
        unsqueeze_dim = "unsqueeze_dim" if self.rotation.unsqueeze_dim is None else self.rotation.unsqueeze_dim
        arguments = [*first]
        for name, p in self.parameters.items():
            if p.kind == p.VAR_KEYWORD:
                arguments.append(f"**{name}")
            else:
                arguments.append(name if p.default is p.empty else f"{name}={p.default!r}")
        # The arguments are written out in source code, because binding *args and **kwargs takes longer than rotating a
        # token.
        passed = ", ".join(
            [f"({', '.join(self.tensors)},)", f"({', '.join(self.tables)},)", str(unsqueeze_dim), *first]
        )
        return eval(f"lambda rotate: lambda {', '.join(arguments)}: rotate({passed})")(rotate)

    def call(self, name: str) -> Call:
        """Returns the call of torch_rope that stands for a call of this function by a name."""
        return Call(name, "rotate" if len(self.tensors) == 1 else "rotate_qk", self.rotation, self.remark)

    def replacement(self, name: str) -> Callable:
        """Returns a function of this name, with the arguments of this one, that calls torch_rope."""
        new = self.with_signature(self.rotator.rotate)
        new.__name__ = new.__qualname__ = name
        new._torch_rope = (self.call(name),)
        return new


_IGNORED = ("unsqueeze_dim", "position_ids")  # rotary functions that have position_ids do not use them
_NO_ROTATION = "the function must rotate pairs of channels by the angles of cos and sin but computes something else"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _same(actual: Sequence[Tensor] | None, expected: Sequence[Tensor]) -> bool:
    """Returns whether tensors have the same dtypes and numbers."""
    return actual is not None and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(actual, expected, strict=True)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Makes results independent of the modes of the caller."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield
