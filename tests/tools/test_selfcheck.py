"""Tests of python -m torch_rope.selfcheck: a correct build passes, and what is broken is named, and loses nothing else."""

import itertools
import re
import shlex
import sys

import pytest
import torch
from cases import EMULATED, ROOT

from torch_rope.selfcheck import metal, run, worker
from torch_rope.selfcheck.checks import Check

pytestmark = pytest.mark.skipif(EMULATED, reason="users have no emulated device")

# A Python without numpy and pytest.
PYTHON = """
import runpy, sys
sys.modules["numpy"] = sys.modules["pytest"] = None
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# Stands for the process of a group. It makes a call, and ends as the test wants.
STAND_IN = """
import json, os, sys, time
device, group, file = sys.argv[3:6]
record = lambda *entry: print(json.dumps(entry), file=open(file, "a"))
record("case", "case 1"), record("call", "rope.rotate(x)")
exec(BROKEN if group == "values: rotate, rotate_qk" else GOOD)
"""
GOOD = "record('passed', 'case 1'), record('end', 0.5)"
BROKEN = {
    "record('failed', 'case 1', 'wrong', ['its call']), record('end', 0.5)": "case 1: wrong|its call",
    "os.abort()": "the last call: rope.rotate(x)|the process ended with signal 6 (Aborted)",
    "time.sleep(60)": "the last call: rope.rotate(x)|the process still ran after 3 s, and was stopped",
    "sys.exit('no memory')": "the last case: case 1|the process ended with status 1|no memory",
    "sys.exit(0)": "the last call: rope.rotate(x)|the process ended before its checks",
    f"{GOOD}, os.abort()": "the process ended with signal 6 (Aborted)",  # at the exit
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Makes the self-check start a program in place of Python."""
    monkeypatch.setenv("TORCH_ROPE_PYTHON", shlex.join([sys.executable, str(tmp_path / "program.py")]))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), *filter(None, sys.path)]))
    return (tmp_path / "program.py").write_text


def entries_of(check, cases):
    """Runs cases, and returns what the process of a group would write to its file."""
    entries = []
    worker.run(check, cases, lambda *entry: entries.append(entry))
    return entries


# The last run is the whole self-check, with the speeds.
@pytest.mark.parametrize("options", ["--quick --only=cos_sin", pytest.param("", marks=pytest.mark.exhaustive)])
def test_a_correct_build_passes_without_numpy_and_pytest(options, device, start, capsys):
    start(
        "from backends.metal.simulator import simulator\nsimulator.load()"
        * (device == "mps" and sys.platform == "linux")
        + PYTHON
    )
    assert run.main(["--device", device, *options.split()]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out and f"device {device}" in out
    assert re.search(r" axial_cos_sin +passed: (\d\d) of \1, largest error \d\d% of the limit\n", out)
    assert options or re.search(r"\n    rotate_qk_, seq 4096: .* us, .* GB/s; a copy: .* us, .* GB/s\n", out)


@pytest.mark.parametrize("broken", BROKEN)
def test_a_group_that_fails_is_described_and_loses_nothing_else(broken, start, monkeypatch, capsys):
    start(f"BROKEN, GOOD = {broken!r}, {GOOD!r}\n{STAND_IN}")
    monkeypatch.setattr(run, "LIMIT", 3.0)
    assert run.main(["--device", "cpu", "--quick", "--only", "values"]) == 1
    out = capsys.readouterr().out
    described = out.partition("\nvalues: rotate, rotate_qk      FAILED: 1, passed: ")[2].splitlines()
    assert set(BROKEN[broken].split("|")) <= {line.strip() for line in described}
    assert out.count(", largest error 50% of the limit\n") == 3 and "\n3 groups passed, 1 failed, in " in out
    assert " -m torch_rope.selfcheck --device cpu --only 'values: rotate, rotate_qk'\n" in out


def test_operators_whose_results_and_gradients_are_one_percent_wrong_fail_every_case():
    def wrong(op, **call):
        outs = correct(op, **call)
        if outs is None:
            next(iter(call.values())).mul_(1.01)
            return None
        return tuple(1.01 * out for out in outs) if isinstance(outs, tuple) else 1.01 * outs

    check = Check(torch.device("cpu"))
    correct, check.call = check.call, wrong
    for cases in check.groups(quick=True).values():
        assert [entry[1] for entry in entries_of(check, cases) if entry[0] == "failed"] == list(cases)


def test_each_metal_kernel_has_a_check_which_fails_if_it_is_not_launched():
    kernel = r"template <typename T(, int V)?(, typename I)?>\s+ROPE_KERNEL\(\w+\)\s+void (\w+)_kernel\("
    shaders = "".join(path.read_text() for path in (ROOT / "shaders").glob("*.metal"))
    expected = {
        f"{family}_{kind}{f'_v{vector}' * bool(has_vector)}{f'_u{bits}' * bool(has_bits)}"
        for has_vector, has_bits, family in re.findall(kernel, shaders)
        for kind, vector, bits in itertools.product(metal.TYPES, (1, 4, 8), (32, 64))
        # Vectors of eight channels are for 16 bits and usual norms.
        if vector != 8 or (kind != "float" and family in ("rotate", "norm_rotate"))
    }
    groups = metal.groups(check := Check(torch.device("cpu")))
    assert {name for cases in groups.values() for name in cases} == expected
    entries = entries_of(check, groups["Metal kernels: cos_sin"])
    assert ("failed", "cos_sin_half", "the kernel was not launched") in [entry[:3] for entry in entries]


@pytest.mark.parametrize("name", ["meta", "nonsense:3"])
def test_a_missing_device_is_reported_in_one_line(name, capsys):
    assert run.main(["--device", name]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"torch_rope.selfcheck: device {name} cannot be used: ") and err.count("\n") == 1
