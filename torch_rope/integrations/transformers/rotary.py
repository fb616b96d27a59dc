"""Finds out what a rotary function of transformers does, by calling it."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .. import _rotary
from .._rotary import NO_ROTATION, plainly
from .._rotation import PAIRINGS, Rounding
from .rotator import TABLES, Rotation, Rotator, seq_is_before_heads


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


class RotaryFunction(_rotary.RotaryFunction):
    """A rotary function, and the rotation that it was found to do.

    The function takes one tensor or q and k, and cos and sin or one complex table. The constructor raises
    NotImplementedError if the function has other arguments, or does something other than rotate.

    Args:
        function: the rotary function.
        rounding: "eager" or "once", see :func:`torch_rope.integrations.transformers.patch`.
    """

    def __init__(self, function: Callable, rounding: str = "eager"):
        super().__init__(function)
        self.tables = [n for n in ("cos", "sin") if n in self.parameters]
        self.tables = self.tables or [n for n in self.parameters if n.startswith("freqs")]
        ignored = [n for n, p in self.parameters.items() if p.kind == p.VAR_KEYWORD or n in _IGNORED]
        self.tensors = [n for n in self.parameters if n not in (*self.tables, *ignored)]
        if len(self.tables) not in (1, 2) or len(self.tensors) not in (1, 2):
            raise NotImplementedError(
                f"the function has the arguments {self.signature} but must have one or two tensors, and cos and sin or freqs"
            )
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
            with plainly():
                expected, actual = self._call(sample), self._rotate(Rotator(rotation), sample)
            if expected is not None:
                if actual is None or not all(map(lambda a, e: torch.allclose(a, e, 1e-5, 1e-5), actual, expected)):
                    return 0
                agreed.append(sample)
        self._agreed += agreed
        return len(agreed) or None

    def _find_rotation(self) -> Rotation:
        choices = [
            Rotation(tables=t, pairing=p, inverse=i, unsqueeze_dim=u)
            for t, p, i, u in product(TABLES, PAIRINGS, [False, True], [None, 1, -2, 0])
            if self._may_be(t, u)
        ]
        # A function without unsqueeze_dim may agree with two choices on single sequences. The right choice is the one
        # that agrees on batches too.
        agreed = [self._agrees(rotation) or 0 for rotation in choices]
        if not any(agreed) or agreed.count(max(agreed)) > 1:
            raise NotImplementedError(NO_ROTATION)
        rotation = choices[agreed.index(max(agreed))]
        if self._agrees(rotation, head_dim=24) == 0:
            rotation = replace(rotation, last_channels=True)
            if not self._agrees(rotation, head_dim=24):
                raise NotImplementedError(NO_ROTATION)
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
                raise NotImplementedError(f"{NO_ROTATION} for {seq} tokens")
        return rotation

    def _may_be(self, tables: str, unsqueeze_dim: int | None) -> bool:
        """Returns whether the function's arguments allow this rotation."""
        if tables == "complex, with heads" and unsqueeze_dim != -2:
            return False
        is_complex = tables.startswith("complex")
        return is_complex == (len(self.tables) == 1) and (unsqueeze_dim is None) == ("unsqueeze_dim" in self.parameters)

    def _returns_none(self) -> bool:
        """Returns whether the function returns (q, None) for k=None. Raises nothing if it does not take k=None."""
        for sample in self._samples(self.rotation):
            with plainly():
                sample |= dict.fromkeys(self.tensors[1:])
                if self.tensors[1:] and self._call(sample) is not None:
                    return isinstance(self.function(**sample), tuple)
        return False

    def _rotator(self, rounding: Rounding, sample: dict[str, Any]) -> Rotator:
        x, table = sample[self.tensors[0]], sample[self.tables[0]]
        return Rotator(self.rotation, {(x.dtype, table.dtype.to_real()): rounding})

    def _samples_of(self, x: torch.dtype, tables: torch.dtype) -> Iterator[dict[str, Any]]:
        """Yields random arguments of these dtypes."""
        if len(self.tables) == 1 and tables.itemsize < 4:  # complex numbers have 32 bits or more for each part
            return iter(())
        more = {"seqs": (7, 7, 5)} if self.rotation.first_tokens_pass else {}
        more = {"seqs": (5, 7, 7)} if self.rotation.last_rows_for_q else more
        return self._samples(self.rotation, dtypes=(x, tables), **more)

    # ---- functions that do the same ----

    def have_the_form(self, tables: tuple) -> bool:
        return self.rotation.has_form(tables)

    def with_signature(self, rotate: Callable, *first: str) -> Callable:
        """Returns a function with the arguments of this one, after some first arguments.

        It calls rotate with the tensors, the tables, unsqueeze_dim and the first arguments.
        """
        unsqueeze_dim = "unsqueeze_dim" if self.rotation.unsqueeze_dim is None else self.rotation.unsqueeze_dim
        passed = [f"({', '.join(self.tensors)},)", f"({', '.join(self.tables)},)", str(unsqueeze_dim)]
        return self.with_passed(rotate, passed, *first)


_IGNORED = ("unsqueeze_dim", "position_ids")  # rotary functions that have position_ids do not use them
