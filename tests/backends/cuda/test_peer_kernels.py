"""Tests of the kernels of benchmarks/peers.cu, which work as those of other libraries do. They need --emulate."""

import ctypes
import sys

import pytest
import torch
from oracle import assert_close, rotate

import torch_rope
from benchmarks.adapters import WAYS, rotate_as_peer  # noqa: E402

pytestmark = pytest.mark.emulator


@pytest.fixture
def kernel():
    return ctypes.CDLL(sys.modules["torch_rope._C"].__spec__.loader.path).rope_peer


@pytest.mark.parametrize("tokens, dtype", [(3, torch.bfloat16), (37, torch.float16)])
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (128, 128), (128, 32), (256, 256)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_q_and_k_are_rotated_in_place(way, interleaved, head_dim, rotary_dim, tokens, dtype, kernel):
    packed = torch.randn(tokens, 5, head_dim).to(dtype)
    expected = packed.clone()
    q, k, v = packed.split([3, 1, 1], 1)
    cos, sin = torch_rope.cos_sin(torch.arange(99), torch_rope.inv_freq(rotary_dim))
    positions = torch.randint(99, (tokens,))
    rotate_as_peer(kernel, way, q, k, torch.cat([cos, sin], -1), positions, rotary_dim, interleaved)
    angles = {"cos": cos, "sin": sin, "positions": positions, "interleaved": interleaved}
    assert_close(packed[:, :4], rotate(expected[:, :4], **angles), 1)
    assert torch.equal(v, expected[:, 4:])
