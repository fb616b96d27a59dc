"""Tests of python -m torch_rope.selfcheck: a correct build passes, and what is broken is named, and loses nothing else."""

import json
import shlex
import sys
from dataclasses import replace

import pytest
import torch
from cases import EMULATED, ROOT

from torch_rope import _C, selfcheck
from torch_rope.selfcheck import checks, report, worker

pytestmark = [
    pytest.mark.skipif(EMULATED, reason="users have no emulated device"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec"),
]

# A program that runs modules as `python -m` does. It has no numpy and no pytest.
PROGRAM = """
import runpy, sys
sys.modules["numpy"] = sys.modules["pytest"] = None
if {device!r} == "mps" and sys.platform == "linux":
    import simulator
    simulator.load()
import torch, torch_rope
{planted}
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# A wrong kernel (on Metal norm_rotate_wide_bfloat), a crash and a hang.
PLANTED = """
import os, time
rope = torch.ops.rope
norm, rotate = rope.norm_rotate_qk, rope.rotate_qk
def wrong(q, *args, **options):
    outs = norm(q, *args, **options)
    return (outs[0] * 1.25, outs[1]) if q.dtype == torch.bfloat16 and q.shape[-1] == 512 else outs
def crash(*args, **options):
    os.abort()
def hang(q, *args, **options):
    return time.sleep(1000) if q.dtype == torch.float16 and "offset" in options else rotate(q, *args, **options)
rope.norm_rotate_qk, rope.rotate_into_cache_, rope.rotate_qk = wrong, crash, hang
"""


@pytest.fixture
def selfchecked(device, tmp_path, monkeypatch, capsys):
    """A function that runs the self-check. It returns (the exit status, the block, the report)."""

    def selfchecked(*options: str, planted: str = "", groups: tuple[str, ...] = ()):
        program, file = tmp_path / "program.py", tmp_path / "report.json"
        program.write_text(PROGRAM.format(device=device, planted=planted))
        monkeypatch.setenv("TORCH_ROPE_PYTHON", shlex.join([sys.executable, str(program)]))
        monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), *filter(None, sys.path)]))
        if groups:
            of = worker.groups
            few = [replace(g, limit=10.0) for g in of(checks.Check(torch.device(device), True)) if g.name in groups]
            monkeypatch.setattr(worker, "groups", lambda check: few)
        status = selfcheck.main(["--device", device, "--json", str(file), *options])
        out = capsys.readouterr().out
        found = json.loads(file.read_text())
        assert out == report.block(found) + "\n"  # the file says all that the block says
        return status, out, found["groups"]

    return selfchecked


# The last run is the whole self-check, with the speeds.
@pytest.mark.parametrize("options", ["--quick --only=cos_sin", pytest.param("", marks=pytest.mark.exhaustive)])
def test_a_correct_build_passes_without_numpy_and_pytest(options, device, selfchecked):
    status, out, groups = selfchecked(*options.split())
    assert status == 0 and "FAILED" not in out and len(out.splitlines()) <= 100
    assert f"torch {torch.__version__}" in out and f"device {device}" in out
    assert all(g["status"] == "passed" or g["reasons"] for g in groups)
    assert {"cos_sin float32", "cos_sin bfloat16"} <= {g["name"] for g in groups if g["status"] == "passed"}


@pytest.mark.exhaustive
def test_a_wrong_kernel_a_crash_and_a_hang_are_named_and_lose_nothing_else(device, selfchecked):
    names = "kernels", "same bits", "pads", "threads"
    status, out, (kernels, bits, pads, threads) = selfchecked("--quick", planted=PLANTED, groups=names)
    assert status == 1
    wrong = "norm_rotate_wide_bfloat" if device == "mps" else f"rope::norm_rotate_qk ({_C.cpu_instruction_set()})"
    if device != "cuda":  # there the profiler gives names that the compiler made
        assert f"{wrong} (2 cases)" in out.partition("kernels that fail: ")[2]
    assert {f["case"] for f in kernels["failures"]} == {"norm_rotate_wide_bfloat", "norm_backward_wide_bfloat"}
    # The case after the one that hung, and the groups after the one that crashed, still run.
    assert [kernels["failed"], bits["failed"], bits["passed"]] == [2, 1, bits["cases"] - 1]
    assert "nothing happened for 10 s" in bits["failures"][0]["error"]
    assert "in same_bits" in bits["failures"][0]["output"] and "offset=5" in bits["failures"][0]["call"]
    assert pads["failures"][0]["error"].endswith("SIGABRT") and "rope.rotate_into_cache_(" in out
    assert threads["status"] == "passed" and "1 checks passed" in out and "3 failed, 0 skipped" in out


@pytest.mark.parametrize("name", ["meta", "nonsense:3"])
def test_a_missing_device_is_reported_in_one_line(name, capsys):
    assert selfcheck.main(["--device", name]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"torch_rope.selfcheck: device {name} cannot be used: ") and err.count("\n") == 1


@pytest.mark.cpu
def test_a_kernel_that_cannot_be_made_is_named(monkeypatch):
    def fails(self):
        raise RuntimeError("RuntimeError: torch_rope: Metal cannot make a pipeline for sum_parts_half: no")

    monkeypatch.setattr(checks.Check, "pads", fails)
    check, events = checks.Check(torch.device("cpu"), quick=True), []
    [group] = [g for g in worker.groups(check) if g.name == "pads"]
    worker.Worker(check, events.append).run(group)
    assert [e["kernels"] for e in events if e["event"] == "result"] == [["sum_parts_half"]]
