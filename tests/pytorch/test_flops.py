"""What torch's counter of floating-point operations says of every operator."""

import pytest
import torch
from cases import OPERATORS, schema_of
from programs import DIM, HEADS, KV_HEADS, norm_weights, operands, qk, rope, tables
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torch_rope

pytestmark = pytest.mark.shared
TOKENS, ROTARY = 2 * 6, 4
# For each rotated channel three: four multiplications and two additions a pair. For each channel of a norm four: squared,
# summed, scaled, weighted. Of its backward eleven: these, two for the weight's gradient, five for the input's. For each
# rotated channel of the gradients of tables four: for both tables two products, their sum, and one more addition, a pair.
ROTATION, NORM = 3 * ROTARY, 4 * DIM
FLOPS = {  # of a head; None: a table is made once, and costs what its cosines do
    "cos_sin": None,
    "_axial_cos_sin": None,
    **dict.fromkeys(("rotate", "rotate_", "rotate_qk", "rotate_qk_", "rotate_into_cache_"), ROTATION),
    "norm_rotate_qk": ROTATION + NORM,
    "_norm_rotate_qk_backward": ROTATION + 11 * DIM,
    "_rotate_table_backward": 4 * ROTARY,
}


def flops_of(function, *args, **keywords):
    with FlopCounterMode(display=False) as counter:
        function(*args, **keywords)
    return counter.get_total_flops()


@pytest.mark.heart
@pytest.mark.parametrize("source", ["table", "token", "inv_freq"])
@pytest.mark.parametrize("op", OPERATORS)
def test_flops(op, source, device):
    if FLOPS[op] is None:
        assert getattr(rope, op) not in flop_registry
        return
    tensors = operands(op, device)
    cos, sin = tables(device, ROTARY)
    angles = {
        "table": {"cos": cos, "sin": sin},
        "token": {"cos": cos[None, :6], "sin": sin[None, :6]},
        "inv_freq": {"inv_freq": torch_rope.inv_freq(ROTARY, device=device)},
    }[source]
    heads = TOKENS * (HEADS if "x" in [a.name for a in schema_of(op).arguments] else HEADS + KV_HEADS)
    if op == "_rotate_table_backward":
        if source == "inv_freq":
            return  # it has tables alone
        without_k = [t if i % 2 == 0 else None for i, t in enumerate(tensors)]
        assert flops_of(getattr(rope, op), *without_k, **angles) == TOKENS * HEADS * FLOPS[op]
    if op == "rotate_into_cache_":
        angles["slots"] = torch.arange(12, device=device).view(2, 6)
        norm = dict(zip(("q_norm_weight", "k_norm_weight"), norm_weights(device), strict=True))
        assert flops_of(rope.rotate_into_cache_, *tensors, **angles, **norm) == heads * (FLOPS[op] + NORM)
    assert flops_of(getattr(rope, op), *tensors, **angles) == heads * FLOPS[op]


@pytest.mark.parametrize("op, channel", [("rotate_qk", 2 * 3), ("norm_rotate_qk", 2 * 3 + 4 + 11)])
def test_flops_of_a_training_step(op, channel, device):
    """The backward is a rotation as well."""
    inputs = [t.requires_grad_() for t in operands(op, device)]
    step = lambda: sum(t.sum() for t in getattr(rope, op)(*inputs, *tables(device))).backward()  # noqa: E731
    assert flops_of(step) == channel * sum(t.numel() for t in qk(device))
