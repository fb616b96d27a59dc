"""Tests which tensors may be written in place: none that shares memory with itself or with another argument.

Slices of one tensor whose address ranges interleave, but which share no element, may be written. For the messages see
test_errors.py.
"""

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

    def view(self, *sizes, apart=60):
        strides = [self.pick(60), self.pick(40), self.pick(20), 1 + self.pick(6)]
        return self.storage.as_strided(sizes, strides[-len(sizes) :], self.pick(apart))

    def addresses(self, t):
        return torch.arange(4000).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()

    def share_exactly(self, a, b):
        return not set(self.addresses(a)).isdisjoint(self.addresses(b))

    def share_a_range(self, a, b):
        a, b = self.addresses(a), self.addresses(b)
        return min(a) <= max(b) and min(b) <= max(a)

    def shares_with_itself(self, t):
        addresses = self.addresses(t)
        return len(set(addresses)) < len(addresses)


def assert_error_if(shared, op, *args, **kwargs):
    try:
        op(*args, **kwargs)
    except ValueError:
        assert shared
    else:
        assert not shared


def test_an_overlap_is_found_exactly():
    """The sets of the elements' addresses say whether q and k overlap."""
    for seed in range(300):
        views = RandomViews(seed)
        batch, seq, heads = 1 + views.pick(3), 1 + views.pick(4), 1 + views.pick(3)
        q, k = views.view(batch, seq, heads, 2), views.view(batch, seq, 1 + views.pick(3), 2)
        shared = views.shares_with_itself(q) or views.shares_with_itself(k) or views.share_exactly(q, k)
        assert_error_if(shared, rope.rotate_qk_, q, k, inv_freq=torch.ones(1))


def test_an_overlap_with_a_cache_is_found_by_address_ranges():
    """q, k and v are compared with a cache by address ranges, all other tensors exactly. The views lie further apart than
    in the previous test, so that some calls are legal."""
    for seed in range(300):
        views = RandomViews(seed)
        batch, seq, heads = 1 + views.pick(2), 1 + views.pick(2), 1 + views.pick(2)
        q, k, v = (views.view(batch, seq, h, 2, apart=500) for h in (1 + views.pick(2), heads, heads))
        k_cache, v_cache = (views.view(batch, seq, heads, 2, apart=3000) for _ in "kv")
        weight = views.view(2, apart=3000)
        shared = any(views.shares_with_itself(t) for t in (q, k_cache, v_cache))
        exactly = [(k_cache, v_cache), (q, k), (q, v), *((t, weight) for t in (q, k_cache, v_cache))]
        shared = shared or any(views.share_exactly(*pair) for pair in exactly)
        by_range = itertools.product((q, k, v), (k_cache, v_cache))
        shared = shared or any(views.share_a_range(*pair) for pair in by_range)
        weights = {"q_norm_weight": weight, "k_norm_weight": weight, "inv_freq": torch.ones(1)}
        assert_error_if(shared, rope.rotate_into_cache_, q, k, v, k_cache, v_cache, **weights)
