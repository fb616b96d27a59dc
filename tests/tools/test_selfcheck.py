"""Tests of python -m torch_rope.selfcheck: a correct build passes, and what is broken is named, and loses nothing else."""

import json
import shlex
import sys
from dataclasses import replace

import pytest
import torch
from cases import EMULATED, ROOT

from torch_rope import _C, selfcheck
from torch_rope.selfcheck import checks, programs, report, speed, worker

pytestmark = [
    pytest.mark.skipif(EMULATED, reason="users have no emulated device"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec"),
]
rope = torch.ops.rope

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
# A wrong kernel, a crash and a hang. On Metal the wrong kernel is norm_rotate_wide_bfloat.
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
            few = [replace(g, limit=4.0) for g in of(checks.Check(torch.device(device), True)) if g.name in groups]
            monkeypatch.setattr(worker, "groups", lambda check: few)
        status = selfcheck.main(["--device", device, "--json", str(file), *options])
        out = capsys.readouterr().out
        found = json.loads(file.read_text())
        assert out == report.block(found) + "\n"  # the file says all that the block says
        return status, out, found

    return selfchecked


def found_by(check: checks.Check, *names: str) -> list[dict]:
    """Runs groups in this process, and returns the results of their cases."""
    events = []
    for group in worker.groups(check):
        if group.name in names:
            worker.Worker(check, events.append).run(group)
    return [e for e in events if e["event"] == "result"]


def test_a_quick_run_passes_without_numpy_and_pytest(device, selfchecked):
    status, out, found = selfchecked("--quick")
    assert status == 0 and "FAILED" not in out and len(out.splitlines()) <= 80
    assert f"torch {torch.__version__}" in out and f"device {device}" in out
    groups = found["groups"]
    assert f"{len(groups)} checks passed" in out and all(g["status"] == "passed" for g in groups)
    assert {"kernels", "rotate float16", "gradient, tables bfloat16", "opcheck"} <= {g["name"] for g in groups}


def test_a_wrong_kernel_a_crash_and_a_hang_are_named_and_lose_nothing_else(device, selfchecked):
    status, out, found = selfchecked("--quick", planted=PLANTED, groups=("kernels", "same bits", "pads", "threads"))
    assert status == 1
    kernels, bits, pads, threads = found["groups"]
    metal = device == "mps"
    wrong = "norm_rotate_wide_bfloat" if metal else f"rope::norm_rotate_qk ({_C.cpu_instruction_set()})"
    if device != "cuda":  # there the profiler gives names that the compiler made
        assert f"kernels that fail: {wrong} (" in out
    assert {f["case"] for f in kernels["failures"]} == {"norm_rotate_wide_bfloat", "norm_backward_wide_bfloat"}
    assert kernels["passed"] == kernels["cases"] - 2
    if metal:
        row = next(line for line in out.splitlines() if line.startswith("norm_rotate_wide"))
        assert row.count("FAILED") == 1 and row.count(" ok ") == 2
    # The case after the one that hung, and the groups after the one that crashed, still run.
    assert bits["failed"] == 1 and bits["passed"] == bits["cases"] - 1
    assert "nothing happened for 4 s" in bits["failures"][0]["error"]
    assert "in same_bits" in bits["failures"][0]["output"] and "offset=5" in bits["failures"][0]["call"]
    assert pads["failures"][0]["error"].endswith("SIGABRT") and "rope.rotate_into_cache_(" in out
    assert threads["status"] == "passed"
    assert out.endswith(
        f"1 checks passed ({kernels['passed'] + bits['passed'] + 1} cases), 3 failed, 0 skipped, in {found['seconds']:.0f} s\n"
    )


def test_a_process_that_does_not_start_is_a_failure(device, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCH_ROPE_PYTHON", f"{sys.executable} -c 'raise SystemExit(3)'")
    monkeypatch.chdir(tmp_path)
    assert selfcheck.main(["--device", device, "--only", "pads"]) == 1
    assert "the process ended with status 3" in capsys.readouterr().out
    assert (tmp_path / "torch_rope_selfcheck.json").exists()


def swapped_sign(x, *args, inverse=False, **kwargs):
    return rope.rotate.default(x, *args, inverse=not inverse, **kwargs)


def an_ulp_off(x, *args, **kwargs):
    return rope.rotate.default(x, *args, **kwargs) * (1 + 4 * torch.finfo(x.dtype).eps)


def raising(*args, **kwargs):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("broken", [swapped_sign, an_ulp_off, raising])
def test_a_broken_operator_is_found(broken, device, monkeypatch):
    broken.default = rope.rotate.default
    monkeypatch.setattr(rope, "rotate", broken)
    check = checks.Check(torch.device(device), quick=True)
    for name in ("rotate float16", "gradient, rotate float16"):
        first, *_ = results = found_by(check, name)
        assert all(result["status"] == "failed" for result in results)
        assert "rope.rotate(float16[" in first["call"] and "interleaved=" in first["call"]  # to repeat it
        assert broken is not raising or first["error"] == "RuntimeError: no such kernel"


def test_a_cell_that_must_not_be_written_is_found(device, monkeypatch):
    write = rope.rotate_into_cache_

    def broken(q, k, v, k_cache, v_cache, *args, **kwargs):
        write(q, k, v, k_cache, v_cache, *args, **kwargs)
        v_cache[..., -1, -1, -1] = 0

    monkeypatch.setattr(rope, "rotate_into_cache_", broken)
    results = found_by(checks.Check(torch.device(device), quick=True), "rotate_into_cache_ bfloat16")
    failed = [result for result in results if result["status"] == "failed"]
    assert failed and all("v_cache: the error is" in result["error"] for result in failed)


def test_a_wrong_scale_is_found(device, monkeypatch):
    write = rope.rotate_into_cache_

    def broken(*args, v_scale=None, **kwargs):
        write(*args, v_scale=v_scale if v_scale is None else 1.1 * v_scale, **kwargs)

    monkeypatch.setattr(rope, "rotate_into_cache_", broken)
    check = checks.Check(torch.device(device), quick=True)
    results = [*found_by(check, "quantised caches bfloat16"), *found_by(check, "quantised caches, extremes")]
    failed = [result["case"] for result in results if result["status"] == "failed"]
    for dtype in check.cache_dtypes:
        assert str(dtype) in failed and any(case.endswith(f"'{dtype}')") for case in failed)
    assert not any(case.endswith("'None')") for case in failed)  # their v is not quantised


def test_a_norm_of_each_head_by_itself_is_found(device, monkeypatch):
    norm = rope.norm_rotate_qk

    def broken(q, k, q_norm_weight, k_norm_weight, *args, **kwargs):
        return norm(q, k, q_norm_weight[0], k_norm_weight[0], *args, **kwargs)

    monkeypatch.setattr(rope, "norm_rotate_qk", broken)
    names = "norm over all heads bfloat16", "gradient, norm over all heads bfloat16"
    results = found_by(checks.Check(torch.device(device), quick=True), *names)
    assert len(results) > 6 and all(result["status"] == "failed" for result in results)


@pytest.mark.parametrize("name", ["meta", "tpu", "nonsense:3", "cpu:"])
def test_a_missing_device_is_reported_in_one_line(name, capsys):
    assert selfcheck.main(["--device", name]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"torch_rope.selfcheck: device {name} cannot be used: ") and err.count("\n") == 1


def test_speeds_are_measured(device, monkeypatch):
    monkeypatch.setattr(speed, "CALLS", [(kind, (2,)) for kind, _ in speed.CALLS])
    medians = speed.medians
    monkeypatch.setattr(speed, "medians", lambda check, contenders, seconds: medians(check, contenders, 0))
    results = found_by(checks.Check(torch.device(device)), "speed", "decode", *programs.FIRST)
    assert len(results) == len(speed.CALLS) + 5 and all(result["status"] == "passed" for result in results), results


def test_what_a_machine_cannot_do_is_skipped_with_the_reason(device, monkeypatch):
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None)
    results = found_by(checks.Check(torch.device(device)), "graph capture", "decode, MLX")
    assert results[-1]["status"] == "skipped" and results[-1]["error"] == "mlx is not installed"
    if device != "cuda" and not hasattr(torch.mps, "metal_graph"):
        assert {result["error"] for result in results[:-1]} == {f"this torch has no graph capture for {device}"}

    def control():
        raise OSError("no compiler")

    def fails():
        raise ValueError("torch_rope is broken")

    with pytest.raises(checks.Skip, match="OSError: no compiler"):
        programs.skip_without("AOTInductor", fails, control)
    with pytest.raises(ValueError, match="torch_rope is broken"):
        programs.skip_without("AOTInductor", fails, lambda: None)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("RuntimeError: torch_rope: Metal cannot make a pipeline for sum_parts_half: no", "sum_parts_half"),
        ("RuntimeError: torch_rope: Metal cannot make the function cos_sin_float: no", "cos_sin_float"),
        ("RuntimeError: torch_rope: Metal does not compile the kernels of norm.metal: rotate_half_v4", "library norm"),
    ],
)
def test_a_kernel_that_cannot_be_made_is_named(error, name, monkeypatch):
    def fails(self):
        raise RuntimeError(error)

    monkeypatch.setattr(checks.Check, "pads", fails)
    (result,) = found_by(checks.Check(torch.device("cpu"), quick=True), "pads")
    assert result["kernels"] == [name]


@pytest.mark.cpu
def test_the_kernel_that_explains_most_failures_is_named():
    """sum_parts is wrong here. Every norm_backward that fails ran with it, and the rotation that ran with it is right."""
    failures = [{"kernels": ["rotate", f"norm_backward_{v}", "sum_parts"]} for v in ("v1", "v4", "wide")]
    counts = {
        name: {"passed": 0, "failed": 1} for name in ("norm_backward_v1", "norm_backward_v4", "norm_backward_wide")
    }
    counts |= {"rotate": {"passed": 9, "failed": 3}, "sum_parts": {"passed": 0, "failed": 3}}
    assert report.suspects({"groups": [{"failures": failures}], "kernels": counts}) == {"sum_parts": 3}
