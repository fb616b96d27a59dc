"""Tests which tensors may be written in place: none that shares memory with itself or with another argument.

Slices of one tensor whose address ranges interleave, but which share no element, may be written. For the messages see
test_errors.py.
"""

import contextlib
import functools
import itertools

import numpy as np
import pytest
import torch
from cases import supported

rope = torch.ops.rope
pytestmark = [pytest.mark.heart, pytest.mark.shared]


def test_dimensions_that_are_not_nested_may_be_written(device):
    """Two dimensions of size 2 with strides 2 and 3 are not nested, but their four elements are distinct."""
    storage = torch.randn(400, device=device)
    x = storage.as_strided((2, 2, 1, 2), (2, 3, 1, 100))
    expected = rope.rotate(x, inv_freq=torch.ones(1, device=device))
    rope.rotate_(x, inv_freq=torch.ones(1, device=device))
    assert torch.equal(x, expected)


def test_sharing_half_of_an_element_is_an_overlap(device):
    if not supported(device, torch.float64):
        pytest.skip("Apple GPUs have no float64")
    x = torch.zeros(1, 6, 1, 4, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match="x overlaps positions but must have separate memory"):
        rope.rotate_(x, inv_freq=torch.ones(2, device=device), positions=x.view(torch.int32)[0, :, 0, 1])


@pytest.mark.cpu
def test_two_storages_of_the_same_memory_overlap():
    memory = np.zeros((1, 6, 1, 4), np.float32)
    with pytest.raises(
        ValueError, match="q overlaps k but must have separate memory, because both are written in place"
    ):
        rope.rotate_qk_(torch.from_numpy(memory), torch.from_numpy(memory), inv_freq=torch.ones(2))


class RandomViews:
    """Makes views of one storage with random strides, and compares the addresses of their elements."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.storage = torch.zeros(4000)

    def pick(self, n):
        return int(torch.randint(0, n, (), generator=self.generator))

    def view(self, *sizes, apart):
        strides = [self.pick(60), self.pick(40), self.pick(20), 1 + self.pick(6)]
        return self.storage.as_strided(sizes, strides[-len(sizes) :], self.pick(apart))


def addresses(t):
    return torch.arange(4000).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()


def share_exactly(a, b):
    return not set(addresses(a)).isdisjoint(addresses(b))


def share_a_range(a, b):
    a, b = addresses(a), addresses(b)
    return min(a) <= max(b) and min(b) <= max(a)


@pytest.mark.parametrize("with_caches", [False, True])
def test_an_overlap_is_found_by_the_addresses_of_the_elements(with_caches):
    """q, k and v are compared with a cache by address ranges, all other tensors exactly. With caches the views lie further
    apart, so that some calls are legal."""
    for seed in range(300):
        views = RandomViews(seed)
        batch, seq, heads = 1 + views.pick(2), 1 + views.pick(3), 1 + views.pick(2)
        apart, freq = 500 if with_caches else 60, torch.ones(1)
        q, k, v = (views.view(batch, seq, h, 2, apart=apart) for h in (1 + views.pick(2), heads, heads))
        written, exactly, by_range = [q, k], [(q, k)], []
        call = functools.partial(rope.rotate_qk_, q, k, inv_freq=freq)
        if with_caches:
            caches = [views.view(batch, seq, heads, 2, apart=3000) for _ in "kv"]
            weight = views.view(2, apart=3000)
            written = [q, *caches]
            exactly = [caches, (q, k), (q, v), *((t, weight) for t in written)]
            by_range = itertools.product((q, k, v), caches)
            call = functools.partial(rope.rotate_into_cache_, q, k, v, *caches, None, None, freq)
            call = functools.partial(call, q_norm_weight=weight, k_norm_weight=weight)
        shared = any(len({*addresses(t)}) < t.numel() for t in written)
        shared |= any(share_exactly(*pair) for pair in exactly) or any(share_a_range(*pair) for pair in by_range)
        with pytest.raises(ValueError) if shared else contextlib.nullcontext():
            call()
