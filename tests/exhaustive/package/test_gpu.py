"""Tests of `make gpu` without a GPU: its program runs other commands in place of the steps."""

import sys
import time

import pytest
from cases import ROOT, python

from benchmarks import cases, gpu  # noqa: E402

pytestmark = pytest.mark.cpu
HANG = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs steps, given by their Python code, and returns the exit status, what each step came to, and
    the names of the steps that ran."""
    package, ran = tmp_path / "package", tmp_path / "ran"
    package.mkdir()

    def call(steps: dict[str, str], seconds=1000.0, limit=100.0, known="source 1", named=()):
        note = f"import os, pathlib\nos.chdir({str(package)!r})\nopen({str(ran)!r}, 'a').write('%s ')\n"
        made = [gpu.Step(name, [sys.executable, "-c", note % name + code], limit) for name, code in steps.items()]
        ran.write_text("")
        status = gpu.main(tmp_path / "out", seconds, made, known, named, package)
        lines = capsys.readouterr().out.splitlines()
        outcomes = {line[:16].strip(): line[17:27].strip() for line in lines if line[:16].strip() in steps}
        return status, outcomes, ran.read_text()

    return call


def test_a_step_that_has_ended_is_not_repeated_unless_it_is_named_or_the_source_has_changed(run, tmp_path):
    steps = {
        "build": "pathlib.Path('_C.so').write_text('built')",
        "tests": "exit(1)",
        "memcheck": "print('found nothing')",
    }
    outcomes = {"build": "passed", "tests": "FAILED", "memcheck": "passed"}
    assert run(steps) == (1, outcomes, "build tests memcheck ")
    assert (tmp_path / "out/memcheck.log").read_text().endswith("found nothing\n")
    (tmp_path / "package/_C.so").unlink()  # the folder was copied to another machine
    (tmp_path / "out/results.jsonl").write_text("")
    assert run(steps) == (1, outcomes, "") and (tmp_path / "package/_C.so").read_text() == "built"
    assert run(steps | {"tests": ""}, named=["tests"]) == (0, outcomes | {"tests": "passed"}, "tests ")
    assert run(steps, known="source 2")[2] == "build tests memcheck " and not (tmp_path / "out/results.jsonl").exists()


def test_a_step_that_hangs_is_ended_at_its_limit_and_the_others_run(run):
    start = time.monotonic()
    assert run({"hangs": HANG, "next": ""}, limit=2) == (1, {"hangs": "FAILED", "next": "passed"}, "hangs next ")
    assert time.monotonic() - start < 30


def test_what_the_budget_does_not_allow_is_left_for_the_next_call(run, monkeypatch):
    monkeypatch.setattr(gpu, "SHORTEST", 1)
    steps = {"first": "", "long": HANG, "last": ""}
    assert run(steps, seconds=3) == (3, {"first": "passed", "long": "left to do", "last": "left to do"}, "first long ")
    assert run(steps | {"long": ""}) == (0, dict.fromkeys(steps, "passed"), "long last ")


def test_nothing_runs_after_a_build_that_fails(run):
    assert run({"build": "exit(1)", "tests": ""}) == (1, {"build": "FAILED", "tests": "left to do"}, "build ")


def test_the_steps_are_those_of_the_page_and_measure_every_group(tmp_path):
    names = [step.name for step in gpu.steps_of(tmp_path, "9.0")]
    assert all(f"`{name}`" in (ROOT / "docs/cuda.md").read_text() for name in names)
    groups = [group for groups in gpu.GROUPS.values() for group in groups]
    assert sorted(groups) == sorted({case.group for case in cases.cases("cuda")} | {"accuracy"})
    done = python("import runpy; runpy.run_module('benchmarks.gpu', run_name='__main__')")
    assert "finds no NVIDIA GPU" in done.stderr
