"""Tests of the grid emulator itself: it reports each mistake in every order of threads, and no other. They need --emulate."""

import ctypes
import re

import pytest
import torch

from torch_rope import _C

pytestmark = pytest.mark.emulator


@pytest.fixture(params=[0, 1, 2], ids=["forward", "backward", "scrambled"])
def any_order(request):
    _C.thread_order(request.param)
    yield
    _C.thread_order(0)


def run(kernel, blocks, threads, x, out):
    error = _C.run(kernel, blocks, threads, x.data_ptr(), out.data_ptr(), x.numel())
    _C.check_guards()
    assert error == "no error"
    return out


def fresh(*shape):
    """Returns an input and an output in memory that the emulator knows. Tensors from before it was loaded are not."""
    return torch.randint(-9, 9, shape).float(), torch.empty(shape)


def test_threads_that_wait_for_each_other_see_what_was_written_before(any_order):
    x, out = fresh(7, 256)
    assert torch.equal(run("block_sum", 7, 256, x, out[0, :7]), x.sum(1))
    lanes = x.view(-1, 32)
    assert torch.equal(run("warp_sum", 7, 256, x, out).view(-1, 32), lanes.sum(1, True).expand_as(lanes))
    assert torch.equal(run("through_a_warp", 7, 256, x, out), x.view(7, -1, 2).flip(2).view(7, 256))


def test_memory_that_was_not_written_holds_nans(any_order):
    """A tensor does, and shared memory does again in every thread block."""
    out = torch.empty(20)
    assert out.isnan().all()
    assert run("not_written_before", 5, 4, torch.empty(0), out.zero_()).isnan().all()


MEMORY = "of an allocation of 1024 bytes"
SHUFFLE = "__shfl_xor_sync in line"
# kernel, blocks, threads of a block, regular expression of the message; None: no mistake
MISTAKES = [
    ("past_the_end", 1, 1, f"read of 4 bytes, 0 bytes past the end {MEMORY}.*selftest.cu"),
    ("before_the_start", 1, 1, f"write of 4 bytes, 8 bytes before the start {MEMORY}"),
    ("null_pointer", 1, 1, "read of 4 bytes through a null pointer"),
    ("misaligned", 1, 1, "misaligned pointer"),
    ("two_writes", 1, 2, r"two writes of memory at byte 0 of 1024, with block \(0, 0, 0\), thread \([01], 0, 0\)"),
    ("two_writes", 5, 1, r"two writes of memory at byte 0 of 1024, with block \(\d, 0, 0\), thread"),
    ("neighbour", 1, 8, "read after write of memory|write after read of memory"),
    ("halves_of_an_element", 1, 2, None),
    ("block_sum without barrier", 1, 256, "race, .* of shared memory.*block_sum"),
    ("through_a_warp without barrier", 1, 32, "race, .* of shared memory"),
    ("half_at_a_barrier", 1, 64, r"__syncthreads in line \d+ .* thread \(32, 0, 0\), which has left the kernel"),
    ("two_barriers", 1, 64, r"__syncthreads in line .* thread \(32, 0, 0\), which is at __syncthreads in line"),
    ("full_mask_in_a_branch", 1, 32, fr"{SHUFFLE} .* thread \(16, 0, 0\), which has left the kernel"),
    ("part_of_a_mask", 1, 32, "the mask does not name exactly the lanes of the warp"),
    ("warp_sum", 1, 40, "the mask does not name exactly the lanes of the warp"),
    ("barrier_against_shuffle", 1, 32, fr"{SHUFFLE} .* thread \(3, 0, 0\), which is at __syncthreads in line"),
    ("two_shuffles", 1, 32, fr"{SHUFFLE} .* thread \(1, 0, 0\), which is at {SHUFFLE}"),
    ("asserts", 1, 8, r'device-side assert triggered: int\(threadIdx.x\) != 5 && "five", .*selftest.cu:.*thread \(5, 0, 0\)'),
    ("two_writes", 1, 1, None),
    ("dependent", 1, 8, None),
    ("dependent that does not wait", 1, 8, "read of memory before the thread waits for the previous launch"),
    ("overflow", 1, 1, r"integer overflow in \+"),
]  # fmt: skip


@pytest.mark.parametrize("kernel, blocks, threads, message", MISTAKES, ids=[kernel for kernel, *_ in MISTAKES])
def test_a_mistake_is_reported(kernel, blocks, threads, message, any_order):
    x, out = fresh(256)
    for _ in range(2):  # a launch does not change the next one, and is no race with it
        if message is None:
            run(kernel, blocks, threads, x, out)
            continue
        with pytest.raises(RuntimeError) as error:
            run(kernel, blocks, threads, x, out)
        assert re.search(message, str(error.value)), error.value
    run("warp_sum", 4, 64, x, out)


def test_freed_and_foreign_memory_must_not_be_touched():
    x, out = fresh(256)
    foreign = (ctypes.c_float * 4)()
    freed, address = out.data_ptr(), ctypes.addressof(foreign)
    del out
    for to, message in (freed, "at byte 0 of a freed allocation of 1024 bytes"), (address, "write of 4 bytes"):
        with pytest.raises(RuntimeError, match=message):
            _C.run("two_writes", 1, 1, x.data_ptr(), to, 0)
    _C.allow_foreign(True)
    _C.run("two_writes", 1, 1, x.data_ptr(), address, 0)
    with pytest.raises(RuntimeError, match="freed"):
        _C.run("two_writes", 1, 1, x.data_ptr(), freed, 0)
    _C.allow_foreign(False)
    assert foreign[0] == 1.0


@pytest.mark.parametrize("distance", [-1, 0, 63], ids=["before", "after", "far"])
def test_a_write_of_the_host_next_to_an_allocation_is_reported(distance):
    """The next launch reports it, the next check, or the check after the memory was freed."""
    message = "1 bytes before the start" if distance < 0 else f"{distance} bytes past the end"
    x, out = fresh(256)
    neighbour = ctypes.c_char.from_address(out.data_ptr() + (1024 if distance >= 0 else 0) + distance)
    for then in (lambda: run("dependent", 1, 256, x, out), _C.check_guards, None):
        neighbour.value = b"x"
        if then is None:
            del out, neighbour
        with pytest.raises(RuntimeError, match=f"{message} {MEMORY}"):
            (then or _C.check_guards)()
    _C.check_guards()


def test_a_launch_past_the_limits_of_gpus_is_refused():
    x, out = fresh(4)
    for blocks, threads in (0, 1), (1, 0), (1, 1025), (2**31, 1):
        error = _C.run("two_writes", blocks, threads, x.data_ptr(), out.data_ptr(), 4)
        assert error == "invalid configuration argument"
