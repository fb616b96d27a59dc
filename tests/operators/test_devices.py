"""Tests the operators on a device that has no kernels: the definition computes there."""

from pathlib import Path

import pytest
from cases import python


@pytest.mark.cpu
def test_a_device_without_kernels_gets_the_results_of_the_definition_and_one_warning():
    done = python(Path(__file__).with_name("spare.py").read_text())
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has no kernels for spare") == done.stderr.count("Warning") == 1
