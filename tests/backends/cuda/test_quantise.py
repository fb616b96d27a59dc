"""Tests that quantised caches have the numbers that a division by the scale gives, though no kernel divides."""

import random

import pytest
from cases import EXHAUSTIVE

from torch_rope import _C

# Scales with ordinary, with extreme and with special exponents. All bits of the mantissa of the last two are set.
SCALES = "1 0.03 -448 0x1.5p-59 0x1.5p-61 0x1.9p61 0x1.3p127 0x1.7p-126 0x1.7p-140 0x1p-149 -0 0 inf -inf nan "
SCALES += "0x1.fffffep0 0x1.fffffep-9"


@pytest.mark.emulator
def test_quotients_are_those_of_a_division():
    """All float16 and bfloat16 numbers are, by each of the scales, and random float32 numbers by random scales."""
    count, seed = 10**8 if EXHAUSTIVE else 10**6, random.SystemRandom().getrandbits(32)
    scales = [float.fromhex(s) if "x" in s else float(s) for s in SCALES.split()]
    assert not (wrong := _C.wrong_divisions(count, seed, scales)), (seed, wrong)
