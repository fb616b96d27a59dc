"""Tests of python -m torch_rope.selfcheck: a correct build passes, and what is broken is named, and loses nothing else."""

import os
import re
import shlex
import subprocess
import sys
from functools import partial

import pytest
import torch
from cases import EMULATED, ROOT

from torch_rope.selfcheck import metal, run, worker
from torch_rope.selfcheck.checks import Check

pytestmark = pytest.mark.skipif(EMULATED, reason="users have no emulated device")

# A Python without numpy and pytest.
PROGRAM = """
import runpy, sys
sys.modules["numpy"] = sys.modules["pytest"] = None
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# Stands for the process of a group: it writes the report of one case, and does what the test says.
STAND_IN = """
import json, os, sys, time
*_, group, file = [a for a in sys.argv if a != "--quick"]
with open(file, "w") as report:
    def record(*entry):
        print(json.dumps(entry), file=report, flush=True)
    record("case", "case 1")
    record("call", f"rope.call_of({group!r})")
    {program}
"""
END = 'record("passed", "case 1"); record("end", 0.5)'
BROKEN = {
    'record("failed", "case 1", "wrong", ["its call"]); record("end", 0.5)': ["case 1: wrong", "its call"],
    "os.abort()": ["the last call: rope.call_of('values: rotate", "the process ended with the signal SIGABRT"],
    "time.sleep(60)": ["the last call: rope.call_of('values: rotate", "the process still ran after 1 s, and was stopped"],
    "sys.exit('no memory')": ["the last case: case 1", "the process ended with status 1", "no memory"],
    "pass": ["the process ended before its checks"],
    f"{END}; report.close(); os.abort()": ["the process ended with the signal SIGABRT"],  # at the exit
}


def start_python_by(program: str, tmp_path, monkeypatch) -> None:
    """Makes the self-check start this program in place of Python."""
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setenv("TORCH_ROPE_PYTHON", shlex.join([sys.executable, str(tmp_path / "program.py")]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))


# The last run is the whole self-check, with the speeds.
@pytest.mark.parametrize("options", ["--quick --only=cos_sin", pytest.param("", marks=pytest.mark.exhaustive)])
def test_a_correct_build_passes_without_numpy_and_pytest(options, device, tmp_path, monkeypatch, capsys):
    if device != "mps" or sys.platform == "darwin":  # the simulated device starts Python itself
        start_python_by(PROGRAM, tmp_path, monkeypatch)
    assert run.main(["--device", device, *options.split()]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out and f"device {device}" in out
    assert re.search(r"values: cos_sin, axial_cos_sin +passed: \d\d, largest error \d\d%", out)
    assert re.search(r"\n\d+ groups? passed, 0 failed, in \d+ s\n$", out)
    assert options or re.search(r"rotate_qk_, 4096 tokens: .* us, .* GB/s; a copy: .* us", out)


@pytest.mark.cpu
@pytest.mark.parametrize("program", BROKEN)
def test_a_group_that_fails_is_described_and_loses_nothing_else(program, tmp_path, monkeypatch, capsys):
    fails = f"exec({program!r} if group == 'values: rotate, rotate_qk' else {END!r})"
    start_python_by(STAND_IN.replace("{program}", fails), tmp_path, monkeypatch)
    monkeypatch.setattr(run, "LIMIT", 1.0)
    assert run.main(["--device", "cpu", "--quick", "--only", "values"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [i for i, line in enumerate(lines) if "FAILED: 1, passed: " in line]
    assert lines[failed].startswith("values: rotate, rotate_qk")
    assert all(any(text in line for line in lines[failed:]) for text in BROKEN[program])
    assert lines[-2] == "to repeat a group: python -m torch_rope.selfcheck --device cpu --only 'values: rotate, rotate_qk'"
    assert sum("passed: 1, largest error 50%" in line for line in lines) == 3
    assert lines[-1].startswith("3 groups passed, 1 failed, in ")


def changed(call, wrong, *args, **options):
    """Calls an operator and changes its results by `wrong`. What it writes in place is changed too."""
    written = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
    outs = call(*args, **options)
    if outs is None:
        return [t.mul_(1.01) for t in written[:1]] and None
    return tuple(map(wrong, outs)) if isinstance(outs, tuple) else wrong(outs)


# The second has the right values, and gradients that are 1% wrong.
@pytest.mark.cpu
@pytest.mark.parametrize("wrong", [lambda out: out * 1.01, lambda out: out + 0.01 * (out - out.detach())], ids=["values", "gradients"])
def test_an_operator_that_is_one_percent_wrong_fails(wrong, request, monkeypatch):
    kind = request.node.callspec.id
    for group, cases in Check(torch.device("cpu")).groups(quick=True).items():
        if not group.startswith(kind):
            continue
        ...
