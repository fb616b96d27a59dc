"""Tests that AddressSanitizer reports the mistakes of kernels that were built with it: --emulate=asan."""

import pytest
from backends.cuda.emulator import emulator
from cases import python

pytestmark = pytest.mark.cpu
PROGRAM = """
import sys, torch
from backends.cuda.emulator import emulator
library = emulator.load(emulator.build(sanitize=True))
x, out = torch.randint(-9, 9, (4, 256)).float(), torch.empty(4)
for order in range(3):
    library.thread_order(order)
    library.run("block_sum", 4, 256, x.data_ptr(), out.data_ptr(), 0)
    assert torch.equal(out, x.sum(1))
    try:
        library.run("full_mask_in_a_branch", 1, 32, x.data_ptr(), x.data_ptr(), 0)
    except RuntimeError as e:
        print(e)
del out
sys.stdout.flush()
library.run("past_the_end", 1, 1, x.data_ptr(), x.data_ptr(), x.numel())
"""


def test_a_build_with_address_sanitizer_reports_mistakes():
    done = python(PROGRAM, **emulator.environment())
    assert "__shfl_xor_sync" in done.stdout
    assert done.returncode and "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr
    assert "selftest.cu" in done.stderr
