"""Tests of the grid emulator itself: correct kernels give correct results in every order of threads, and each mistake is
reported. They need --emulate."""

import ctypes
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch


@pytest.fixture
def library(request):
    if not request.config.getoption("--emulate"):
        pytest.skip("needs --emulate")
    return sys.modules["torch_rope._C"]


@pytest.fixture(params=[0, 1, 2], ids=["forward", "backward", "scrambled"])
def any_order(library, request):
    library.thread_order(request.param)
    yield library
    library.thread_order(0)


def run(library, kernel, blocks, threads, x, out, n=None, dynamic=0):
    error = library.run(kernel, blocks, threads, x.data_ptr(), out.data_ptr(), x.numel() if n is None else n, dynamic)
    library.check_guards()
    assert error == "no error"
    return out


def fresh(*shape):
    """Returns an input and an output in memory that the emulator knows. Tensors from before it was loaded are not."""
    return torch.randn(shape), torch.empty(shape)


def test_a_copy_is_right_and_its_accesses_are_counted(any_order):
    x, out = fresh(1000)
    any_order.last_launches()
    assert torch.equal(run(any_order, "copy<float>", 4, 256, x, out), x)
    assert torch.equal(run(any_order, "copy<float4>", 2, 128, x, torch.empty(1000)), x)
    one, four = any_order.last_launches()
    assert one["grid"] == (4, 1, 1) and one["block"] == (256, 1, 1)
    assert "copy<float>" in one["kernel"] and "copy<float4>" in four["kernel"]
    assert one["bytes_read"] == one["bytes_written"] == four["bytes_read"] == four["bytes_written"] == 4000
    assert one["loads"] == one["stores"] == {4: 1000}
    assert four["loads"] == four["stores"] == {16: 250}
    assert any_order.last_launches() == []


def test_a_sum_in_shared_memory_is_right(any_order):
    for blocks, kernel in (1, "block_sum"), (7, "block_sum"), (7, "block_sum dynamic"):
        x = torch.randint(-9, 9, (blocks, 256)).float()
        assert torch.equal(run(any_order, kernel, blocks, 256, x, torch.empty(blocks), dynamic=1024), x.sum(1))


def test_several_host_threads_may_launch_kernels(library):
    def sums(seed):
        x = torch.full((5, 256), float(seed))
        for _ in range(5):
            assert torch.equal(run(library, "block_sum", 5, 256, x, torch.empty(5)), x.sum(1))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(sums, range(8)))


def test_shuffles_and_warp_barriers_are_right(any_order):
    x = torch.randint(-9, 9, (6, 32)).float()
    assert torch.equal(run(any_order, "warp_sum", 2, 96, x, torch.empty(6, 32)), x.sum(1, True).expand(6, 32))

    out = run(any_order, "part_of_a_warp", 1, 9, x, torch.zeros(9))
    lane = torch.arange(8)
    below = torch.where(lane % 4 + 2 < 4, lane + 2, lane)  # past the end of its group, a lane gets its own value
    assert torch.equal(out[:8], x[0, below] + lane // 4 * 4 + 1)

    lane = torch.arange(32)
    out = run(any_order, "two_masks", 2, 32, x, torch.empty(2, 32))
    assert torch.equal(out, x[:2, torch.where(lane % 2 == 1, lane ^ 2, lane ^ 4)])

    out = run(any_order, "through_a_warp<true>", 3, 64, x, torch.empty(6, 32))
    assert torch.equal(out, x[:, lane ^ 1])


def test_arithmetic_functions_are_right(library):
    x, out = fresh(64)
    assert torch.allclose(run(library, "angle", 1, 64, x, out), torch.ones(64), rtol=1e-6)


def test_shared_memory_is_new_in_every_thread_block(any_order):
    out = run(any_order, "shared_at_first", 5, 4, torch.empty(0), torch.empty(40), dynamic=16)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_conversions_round_as_torch_does(library, dtype):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype).float()
    finite = numbers[numbers.isfinite()].unique()
    ties = (finite[1:].double() + finite[:-1].double()).div(2).float()
    largest = torch.finfo(dtype).max
    end = torch.tensor([largest * (1 + torch.finfo(dtype).eps / 4)]).double().float()  # the tie with infinity
    around = torch.cat([ties, end, -end, finite])
    inf = torch.tensor(float("inf"))
    x = torch.cat([around, around.nextafter(inf), around.nextafter(-inf), numbers, torch.randn(1000) * 1e-6])
    x = torch.cat([x, torch.tensor([inf, -inf, float("nan"), 1e-45, -1e-45, 3.4e38])])
    out = torch.empty(65536 + x.numel())
    run(library, {torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype], x.numel() // 256 + 1, 256, x, out)
    for ours, theirs in ((out[:65536], numbers), (out[65536:], x.to(dtype).float())):
        same = ours.view(torch.int32) == theirs.view(torch.int32)
        assert (same | (ours.isnan() & theirs.isnan())).all()


MEMORY = "of an allocation of 1024 bytes"
# kernel, threads, regular expression of the message; None: no mistake
SHUFFLE = "__shfl_xor_sync in line"
MISTAKES = [
    ("past_the_end", 1, f"read of 4 bytes, 0 bytes past the end {MEMORY}.*selftest.cu"),
    ("before_the_start", 1, f"write of 4 bytes, .*8 bytes before the start {MEMORY}"),
    ("null_pointer", 1, "read of 4 bytes through a null pointer"),
    ("misaligned", 1, "misaligned pointer"),
    ("past_shared", 1, "read of 4 bytes, 0 bytes past the end of the launch's shared memory of 256 bytes"),
    ("two_writes", 2, r"two writes of memory at byte 0 of 1024, with block \(0, 0, 0\), thread \([01], 0, 0\)"),
    ("neighbour", 8, "read after write of memory|write after read of memory"),
    ("halves_of_an_element", 2, None),
    ("block_sum without barrier", 256, "race, .* of shared memory"),
    ("through_a_warp<false>", 32, "race, .* of shared memory"),
    ("half_at_a_barrier", 64, r"leaves the kernel while \d+ others wait at __syncthreads in line|__syncthreads .* after \d+ threads of the block"),
    ("two_barriers", 64, "__syncthreads in line .* while other threads of the block wait at __syncthreads in line"),
    ("full_mask_in_a_branch", 32, f"leaves the kernel while lane .* waits for it at {SHUFFLE}|which has left the kernel"),
    ("barrier_against_shuffle", 32, "__syncthreads in line .*waits for it at __shfl_xor_sync|lane 3, which waits at __syncthreads in line"),
    ("two_shuffles", 32, f"{SHUFFLE} .*: lane .* waits at {SHUFFLE}"),
    ("other_lane", 32, "reads lane 4, which the mask does not name"),
    ("warp_sum", 40, "mask names lane 8, which does not exist"),
    ("asserts", 8, r'device-side assert triggered: int\(threadIdx.x\) != 5 && "five", .*selftest.cu:\d+.*thread \(5, 0, 0\)'),
    ("dependent<true>", 8, None),
    ("dependent<false>", 8, "read of memory before the thread waits for the previous launch"),
    ("overflow", 1, r"integer overflow in \+"),
]  # fmt: skip


@pytest.mark.parametrize("kernel, threads, message", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_reported(any_order, kernel, threads, message):
    x, out = fresh(256)
    for _ in range(2):  # a failed launch does not change the next one
        if message is None:
            run(any_order, kernel, 1, threads, x, out, dynamic=256)
            continue
        with pytest.raises(RuntimeError) as error:
            run(any_order, kernel, 1, threads, x, out, dynamic=256)
        assert re.search(message, str(error.value)), error.value
        assert kernel.split()[0] in str(error.value)
    run(any_order, "warp_sum", 4, 64, x, out)


def test_a_race_of_two_thread_blocks_is_reported(any_order):
    x, out = fresh(256)
    with pytest.raises(RuntimeError, match=r"two writes of memory at byte 0 of 1024, with block \(\d, 0, 0\), thread"):
        run(any_order, "two_writes", 5, 1, x, out)
    any_order.check_races(False)
    run(any_order, "two_writes", 5, 1, x, out)
    any_order.check_races(True)
    run(any_order, "two_writes", 1, 1, x, out)
    run(any_order, "two_writes", 1, 1, x, out)  # two launches are no race: one follows the other


def test_freed_and_foreign_memory_must_not_be_touched(library):
    x, out = fresh(256)
    freed = out.data_ptr()
    del out
    with pytest.raises(RuntimeError, match="write of 4 bytes, at byte 0 of a freed allocation of 1024 bytes"):
        library.run("two_writes", 1, 1, x.data_ptr(), freed, 0, 0)
    foreign = (ctypes.c_float * 4)()
    with pytest.raises(RuntimeError, match="write of 4 bytes"):
        library.run("two_writes", 1, 1, x.data_ptr(), ctypes.addressof(foreign), 0, 0)
    library.allow_foreign(True)
    library.run("two_writes", 1, 1, x.data_ptr(), ctypes.addressof(foreign), 0, 0)
    with pytest.raises(RuntimeError, match="freed"):
        library.run("two_writes", 1, 1, x.data_ptr(), freed, 0, 0)
    library.allow_foreign(False)
    assert foreign[0] == 1.0


@pytest.mark.parametrize("distance", [-1, 0, 63], ids=["before", "after", "far"])
def test_a_write_of_the_host_next_to_an_allocation_is_reported(library, distance):
    message = "1 bytes before the start" if distance < 0 else f"{distance} bytes past the end"
    x, out = fresh(256)
    neighbour = ctypes.c_char.from_address(out.data_ptr() + (1024 if distance >= 0 else 0) + distance)
    for then in (lambda: run(library, "copy<float>", 1, 256, x, out), library.check_guards, None):
        neighbour.value = b"x"
        if then is None:
            del out, neighbour
        with pytest.raises(RuntimeError, match=f"{message} {MEMORY}"):
            (then or library.check_guards)()
    library.check_guards()


def test_a_launch_past_the_limits_of_gpus_is_refused(library):
    x, out = fresh(4)
    for blocks, threads, dynamic in (0, 1, 0), (1, 0, 0), (1, 1025, 0), (1, 1, 48 * 1024 + 1), (2**31, 1, 0):
        error = library.run("two_writes", blocks, threads, x.data_ptr(), out.data_ptr(), 4, dynamic)
        assert error == "invalid configuration argument"
