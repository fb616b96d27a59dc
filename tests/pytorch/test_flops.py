"""Tests the number of floating-point operations that torch's FlopCounterMode counts for every operator."""

import pytest
import torch
from cases import OPERATORS, schema_of
from programs import DIM, HEADS, KV_HEADS, norm_weights, operands, rope, tables
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torch_rope

pytestmark = [pytest.mark.core, pytest.mark.cpu]
TOKENS, ROTARY = 2 * 6, 4
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


@pytest.mark.parametrize("op", FLOPS)
def test_flops_of_every_operator_are_counted(op):
    tensors, (cos, sin) = operands(op, "cpu"), tables("cpu", ROTARY)
    sources = (
        {"cos": cos, "sin": sin},
        {"cos": cos[None, :6], "sin": sin[None, :6]},
        {"inv_freq": torch_rope.inv_freq(ROTARY)},
    )
    heads = TOKENS * (HEADS if "x" in [a.name for a in schema_of(op).arguments] else HEADS + KV_HEADS)
    for angles in sources:
        if op == "rotate_into_cache_":
            angles["slots"] = torch.arange(12).view(2, 6)
            norm = dict(zip(("q_norm_weight", "k_norm_weight"), norm_weights("cpu"), strict=True))
            assert flops_of(rope.rotate_into_cache_, *tensors, **angles, **norm) == heads * (FLOPS[op] + NORM)
        assert flops_of(getattr(rope, op), *tensors, **angles) == heads * FLOPS[op]
