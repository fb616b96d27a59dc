"""Tests of the kernels of benchmarks/peers.cu, which work as those of SGLang and FlashInfer do. They need --emulate."""

import ctypes
import sys

import pytest
import torch
from cases import ROOT, covering, name_of
from oracle import assert_close, rotate

import torch_rope

sys.path.insert(0, str(ROOT))
from benchmarks.implementations import rotate_as_peer  # noqa: E402


@pytest.fixture
def kernel(request):
    if not request.config.getoption("--emulate"):
        pytest.skip("needs --emulate")
    return ctypes.CDLL(sys.modules["torch_rope._C"].__spec__.loader.path).rope_peer


@pytest.mark.parametrize(
    "case",
    covering(
        {
            "way": ["SGLang", "FlashInfer"],
            "dtype": [torch.bfloat16, torch.float16],
            "interleaved": [False, True],
            "sizes": [(64, 64), (128, 128), (128, 32), (256, 256)],  # head_dim, rotary_dim
            "tokens": [3, 37],  # fewer and more than the threads that run at a time
        },
        interacting=[("way", "interleaved", "sizes")],
    ),
    ids=name_of,
)
def test_q_and_k_are_rotated_in_place(case, kernel):
    head_dim, rotary_dim = case["sizes"]
    packed = torch.randn(case["tokens"], 5, head_dim).to(case["dtype"])
    expected = packed.clone()
    q, k, v = packed.split([3, 1, 1], 1)
    cos, sin = torch_rope.cos_sin(torch.arange(99), torch_rope.inv_freq(rotary_dim))
    positions = torch.randint(99, (case["tokens"],))
    cos_sin = torch.cat([cos, sin], -1)
    rotate_as_peer(kernel, case["way"], q, k, cos_sin, positions, rotary_dim, case["interleaved"])
    angles = {"cos": cos, "sin": sin, "positions": positions, "interleaved": case["interleaved"]}
    assert_close(packed[:, :4], rotate(expected[:, :4], **angles), 1)
    assert torch.equal(v, expected[:, 4:])
