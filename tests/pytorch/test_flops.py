"""Tests the number of floating-point operations that torch's FlopCounterMode counts for every operator."""

import pytest
import torch
from cases import OPERATORS
from programs import DIM, HEADS, KV_HEADS, call_of, rope
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from torch_rope.selfcheck.calls import arguments_of

pytestmark = [pytest.mark.core, pytest.mark.cpu]
TOKENS, ROTARY = torch.Size((2, 6)), 4  # batch and seq
# A rotation takes three operations for each rotated channel: four multiplications and two additions for a pair.
# A norm takes four for each channel: square, sum, scale and weight. Its backward takes eleven: these four, two for the
# gradient of the weight and five for that of the input.
ROTATION, NORM = 3 * ROTARY, 4 * DIM
FLOPS = {  # for one head
    **dict.fromkeys(("rotate", "rotate_", "rotate_qk", "rotate_qk_", "rotate_into_cache_"), ROTATION),
    "norm_rotate_qk": ROTATION + NORM,
    "_norm_rotate_qk_backward": ROTATION + 11 * DIM,
}


def flops_of(function, *args, **keywords):
    with FlopCounterMode(display=False) as counter:
        function(*args, **keywords)
    return counter.get_total_flops()


def test_operators_that_make_tables_are_not_counted():
    """A table is made once, and most of its cost is cos and sin."""
    assert {op for op in OPERATORS if getattr(rope, op) not in flop_registry} == {"cos_sin", "axial_cos_sin"}


@pytest.mark.parametrize("source", ["table", "token", "inv_freq"])
@pytest.mark.parametrize("op", FLOPS)
def test_flops_of_every_operator_are_counted(op, source):
    size = (*TOKENS, HEADS, KV_HEADS, DIM, ROTARY)
    heads = TOKENS.numel() * (HEADS if "x" in arguments_of(op) else HEADS + KV_HEADS)
    for q_weight in (None, "float32") if "cache" in op else ("float32",):
        call = call_of(op, "cpu", source, size=size, slots="int64 [B,S]", q_weight=q_weight)
        of_norm = NORM if "cache" in op and q_weight else 0
        assert flops_of(getattr(rope, op), **call) == heads * (FLOPS[op] + of_norm)
