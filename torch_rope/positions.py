"""Positions and slots of tokens, computed from how sequences are packed or kept."""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.functional import pad

from ._mistakes import check_tensor, named, whole


@named
def positions_from_cu_seqlens(
    cu_seqlens: Tensor, total: int, offsets: Tensor | None = None, *, cp_rank: int = 0, cp_size: int = 1
) -> Tensor:
    """Returns the positions of the tokens of packed sequences: those of each sequence begin at 0, or at its own offset.

    Args:
        cu_seqlens: ``[sequences + 1]``, int32 or int64: the index of the first token of each sequence, and the end of
            the last sequence, as in FlashAttention. Sequences may be empty.
        total: the number of tokens. Tokens past ``cu_seqlens[-1]`` are padding, and their positions count from 0.
        offsets: ``[sequences]``, int32 or int64: a number that is added to the positions of each sequence, such as the
            length of its KV cache. Default: 0 for each.
        cp_rank, cp_size: the rank and the number of ranks of context parallelism as in Megatron-LM and Transformer Engine:
            of the 2 * cp_size equal chunks of a sequence, a rank holds chunk cp_rank and chunk 2 * cp_size - 1 - cp_rank.
            cu_seqlens are those of the whole batch, and total counts the tokens of the rank. Default: one rank holds all.

    Returns:
        ``[total]``, with the dtype and device of cu_seqlens, or int64 if there are offsets or total is at least 2**31. The
        host does not wait for the device. Equivalent to joining ``torch.arange(n) + offset`` of the sequences, n long each.

    Raises:
        ValueError: a shape does not fit, total is negative, there is no such rank, or cu_seqlens on the CPU does not begin
            with 0, decreases, goes beyond total, or has unequal chunks. Compiled and exported programs, and other devices, do
            not check these numbers: there, tokens before the first sequence have positions that count from 0, and so has padding.
        TypeError: cu_seqlens or offsets is not int32 or int64, or another argument is no integer.

    Example::

        cu_seqlens = torch.tensor([0, 3, 5])
        torch_rope.positions_from_cu_seqlens(cu_seqlens, 6)  # [0, 1, 2, 0, 1, 0]: the last token is padding
    """
    function = "torch_rope.positions_from_cu_seqlens"
    for name, t in (("cu_seqlens", cu_seqlens), *([("offsets", offsets)] if offsets is not None else ())):
        check_tensor(function, name, t, torch.int32, torch.int64)
    total, rank = whole(function, "total", total), whole(function, "cp_rank", cp_rank)
    if rank >= (ranks := whole(function, "cp_size", cp_size, 1)):
        raise ValueError(f"{function}: cp_rank is {rank} but must be below cp_size, which is {ranks}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        shape = list(cu_seqlens.shape)
        raise ValueError(f"{function}: cu_seqlens has shape {shape} but must have shape [sequences + 1]")
    count = cu_seqlens.shape[0] - 1
    if offsets is not None and offsets.shape != (count,):
        must_have = f"shape [{count}], one offset for each sequence of cu_seqlens"
        raise ValueError(f"{function}: offsets has shape {list(offsets.shape)} but must have {must_have}")
    is_plain = not torch.compiler.is_compiling() and type(cu_seqlens) is Tensor and cu_seqlens.device.type == "cpu"
    if is_plain and not is_functorch_wrapped_tensor(cu_seqlens):
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts != sorted(starts):
            advice = "pass lengths as torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), and a slice of cu_seqlens "
            advice += "without its first number"
            raise ValueError(f"{function}: cu_seqlens is {starts} but must begin with 0 and never decrease; {advice}")
        if ranks > 1 and any(start % (2 * ranks) for start in starts):
            must_have = f"lengths that are multiples of 2 * cp_size, which is {2 * ranks}; pad each sequence"
            raise ValueError(f"{function}: cu_seqlens is {starts} but must have {must_have}")
        if starts[-1] // ranks > total:
            must_be = f"at least {starts[-1] // ranks}, the last number of cu_seqlens{' / cp_size' * (ranks > 1)}"
            raise ValueError(f"{function}: total is {total} but must be {must_be}")
    if offsets is not None or _is_wide(total):  # then a position may be beyond int32, even if all offsets are not
        cu_seqlens = cu_seqlens.long()
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    chunks, cu_seqlens = cu_seqlens.diff() // (2 * ranks), cu_seqlens // ranks
    # How many sequences begin at or before the token. What is before the first and the padding count as sequences too.
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True)
    positions = tokens - pad(cu_seqlens, (1, 0))[sequence]
    if ranks > 1:
        chunk = pad(chunks, (1, 1))[sequence]
        positions = positions + chunk * torch.where(positions < chunk, rank, 2 * ranks - 2 - rank).to(chunk)
    return positions if offsets is None else positions + pad(offsets.to(cu_seqlens), (1, 1))[sequence]


@named
def slots_of_window(positions: Tensor, window: int) -> Tensor:
    """Returns the slots of tokens in ring caches: position p of sequence b has cell ``p % window`` of block b.

    Of the tokens of a call, the last ``window`` positions of each sequence are kept. Older ones would be overwritten by
    them, so they get the slot -1, with which :func:`torch_rope.rotate_into_cache_` writes no cell.

    Args:
        positions: ``[seq]`` for one sequence, or ``[batch, seq]``, int32 or int64. Padding has a negative position, and
            gets the slot -1.
        window: the number of cells of a ring, which is the block_size of the cache.

    Returns:
        The slots, with the shape, dtype and device of positions: ``b * window + p % window``, or -1. If there are 2**31
        cells or more, they are int64.

    Raises:
        ValueError: positions has another shape, window is less than 1, or there are more than 2**63 cells.
        TypeError: positions is not int32 or int64, or window is no integer.

    Equivalent to (for one sequence)::

        kept = (positions >= 0) & (positions > positions.max() - window)
        torch.where(kept, positions % window, -1)

    Example::

        torch_rope.slots_of_window(torch.arange(6), 4)  # [-1, -1, 2, 3, 0, 1]
    """
    function = "torch_rope.slots_of_window"
    check_tensor(function, "positions", positions, torch.int32, torch.int64)
    if positions.dim() not in (1, 2):
        must_be = "[seq] or [batch, seq]"
        raise ValueError(f"{function}: positions has shape {list(positions.shape)} but must have shape {must_be}")
    window = whole(function, "window", window, 1)
    blocks = positions.shape[0] if positions.dim() == 2 else 1
    if isinstance(blocks, int) and blocks * window > 2**63:
        must_be = f"at most {2**63 // blocks}, because positions has batch {blocks} and a slot is an int64"
        raise ValueError(f"{function}: window is {window} but must be {must_be}")
    if positions.dtype == torch.int32 and _is_wide(blocks * window):
        positions = positions.long()
    newest = pad(positions, (1, 0), value=-1).amax(-1, keepdim=True)  # -1 if there are no tokens
    slots = positions % window
    if positions.dim() == 2:
        block = torch.arange(blocks, dtype=positions.dtype, device=positions.device)
        slots = slots + block.unsqueeze(-1) * window
    return torch.where((positions >= 0) & (positions > newest - window), slots, -1)


def _is_wide(n: int | torch.SymInt) -> bool:
    """Returns whether n is beyond int32. A symbol is not if a program is exported, which would limit its size."""
    return (type(n) is int or not torch.compiler.is_exporting()) and n >= 2**31
