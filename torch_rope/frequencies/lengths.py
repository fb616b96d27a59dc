"""Chooses frequencies that depend on the length of the sequence, for one call of a RotaryEmbedding.

The length is a number, or a tensor on the device of the positions, for which the host does not wait.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._mistakes import whole
from .._modes import as_seen
from .kinds import in_two_parts

Offset = int | torch.SymInt
Length = int | Tensor
Sources = dict[str, Tensor]
Positions = Tensor | None


def length_of(seq: int, positions: Positions, offset: Offset) -> Length:
    """Returns the highest position plus one."""
    offset = whole("torch_rope.RotaryEmbedding", "offset", offset, -(2**63))
    if positions is None:
        return offset + seq
    if positions.numel() == 0:
        return 0
    if hasattr(positions, "full_tensor"):  # a DTensor, of which no rank has all positions
        positions = positions.full_tensor()
    return positions.amax().long() - (-1 - offset)  # offset + 1 may be beyond int64


class Dynamic(NamedTuple):
    """Dynamic NTK. The frequencies are computed on the device, by the formula of frequencies.dynamic."""

    factor: float
    original_max_position: int
    exponent: float  # -2 / (rotary_dim - 2)

    def __call__(self, sources: Sources, length: Length, positions: Positions, offset: Offset, exact: Tensor) -> tuple:
        """Returns what LongRope does. exact: the frequencies of a short sequence, float64 on the CPU: [rotary_dim / 2]."""
        return {"inv_freq": self._scaled(sources["inv_freq"], length, exact)}, positions

    def _scaled(self, inv_freq: Tensor, length: Length, exact: Tensor) -> Tensor:
        if not isinstance(length, Tensor):
            if length <= self.original_max_position:
                return inv_freq
            if inv_freq.dim() == 2:  # two parts, because the device has no float64
                return in_two_parts(self._scaled(as_seen(exact), length, exact)).to(inv_freq.device)
            length = torch.full((), length, dtype=inv_freq.dtype, device=inv_freq.device)
        s = (self.factor * length.to(inv_freq.dtype) / self.original_max_position - (self.factor - 1)).clamp(min=1.0)
        pairs = torch.arange(inv_freq.shape[-1], dtype=inv_freq.dtype, device=inv_freq.device)
        return inv_freq * s ** (pairs * self.exponent)


class LongRope(NamedTuple):
    """LongRoPE. sources holds inv_freq, or cos and sin, of short and of long sequences, stacked first. A tensor that was
    assigned by the user may be one for all lengths."""

    original_max_position: int

    def __call__(self, sources: Sources, length: Length, positions: Positions, offset: Offset, exact: Tensor) -> tuple:
        """Returns the frequencies or the tables for this length, and the positions to read the tables by."""
        is_both = {name: t.dim() > (1 if name == "inv_freq" else 2) for name, t in sources.items()}
        if not any(is_both.values()):
            return sources, positions
        both = {name: t if is_both[name] else t.expand(2, *t.shape) for name, t in sources.items()}
        long = length > self.original_max_position
        if positions is None or not isinstance(long, Tensor):
            return {name: of_both.select(0, 1 if long else 0) for name, of_both in both.items()}, positions
        if "inv_freq" in both:
            short_freq, long_freq = both["inv_freq"]
            return {"inv_freq": torch.where(long, long_freq, short_freq)}, positions
        # The long table follows the short one, so its number of rows is added to look up a row of the long table. A
        # negative position stays negative, so that the operator raises an error.
        positions = positions + both["cos"].shape[1] * (long & (positions.long() + offset >= 0))
        return {name: short_and_long.flatten(0, 1) for name, short_and_long in both.items()}, positions
