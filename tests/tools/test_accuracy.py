"""Tests of the accuracy study: its exact results, its calls of every implementation, and its figures for torch_rope."""

import sys

import pytest
import torch
from cases import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import accuracy  # noqa: E402

pytestmark = pytest.mark.cpu
REDUCED = {"octaves": (0, 17, 24), "dtypes": (torch.float32, torch.bfloat16), "tokens": (131072,)}
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def lines():
    return list(accuracy.study(**REDUCED))


def figures(lines, **which):
    """Returns the lines that have figures and these values. Their kind is accuracy, unless another kind is given."""
    which = {"kind": "accuracy", **which}
    found = [line for line in lines if "status" not in line and which.items() <= line.items()]
    assert found
    return found


def test_every_implementation_is_measured_or_skipped_with_a_reason(lines):
    assert {line["implementation"] for line in lines} == set(accuracy.IMPLEMENTATIONS)
    for line in lines:
        assert line.get("status", "skipped") == "skipped", line
        assert "status" not in line or line["reason"]
    cuda = [name for name, implementation in accuracy.IMPLEMENTATIONS.items() if implementation.device == "cuda"]
    assert all("cuda" in line["reason"] for line in lines if line["implementation"] in cuda)


def test_an_implementation_that_cannot_be_imported_gives_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx", None)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    (line,) = accuracy.study(implementations=["mlx"], **REDUCED)
    assert (line["implementation"], line["status"]) == ("mlx", "skipped") and "ModuleNotFoundError" in line["reason"]


def test_the_study_gives_the_same_lines_each_time(lines):
    some = ["torch_rope", "torchtune", "torch.onnx.ops"]
    again = list(accuracy.study(implementations=some, **REDUCED))
    assert again == [line for name in some for line in lines if line["implementation"] == name]


def test_one_rounding_is_off_by_half_an_ulp(lines):
    for line in figures(lines, implementation="one rounding"):
        # The limit is above 0.5, because torch rounds float64 first to float32 and then to bfloat16.
        assert 0.4 < line["max_ulp"] <= 0.5001


@pytest.mark.parametrize("name", ["torch_rope", "torch_rope tables"])
def test_torch_rope_is_as_accurate_as_it_promises(lines, name):
    """The error is at most 1 ulp in bfloat16.

    In float32 it is at most 2 ulps (3 with an attention factor) plus 5e-7 of the pair's magnitude.
    """
    for line in figures(lines, implementation=name, dtype="bfloat16"):
        assert line["max_ulp"] <= 1, line
    for line in figures(lines, implementation=name, dtype="float32"):
        ulps = 3 if line["scaling"] in ("yarn", "longrope") else 2
        assert line["max_relative"] <= ulps * EPS + 5e-7, line


def test_all_implementations_are_right_up_to_rounding(lines):
    """A wrong frequency or factor would give far larger errors than these limits.

    At position 1 only the arithmetic rounds. Below position 2^18, an angle in float32 is off by at most four roundings:
    of the frequency, of its logarithm or power, and of the product.
    """
    for line in figures(lines, dtype="float32", octave=0):
        assert line["max_relative"] <= 4 * EPS, line
    for line in figures(lines, dtype="float32", octave=17):
        assert line["max_relative"] <= 4 * 2**18 * EPS / 2, line


def test_scores_of_torch_rope_have_the_error_of_one_rounding(lines):
    def mean_error(name, dtype):
        return [x["mean_error"] for x in figures(lines, kind="scores", implementation=name, dtype=dtype)]

    for name in ("torch_rope", "torch_rope tables"):
        assert mean_error(name, "bfloat16") == pytest.approx(mean_error("one rounding", "bfloat16"), rel=0.02)
        assert max(mean_error(name, "float32")) < 2e-7
