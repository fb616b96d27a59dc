"""Tests of `make gpu` without a GPU: its steps run with a few small tests and cases on the CPU, and a faked sanitizer."""

import dataclasses
import itertools
import os
import signal
import sys
import time

import pytest
from cases import ROOT, python

sys.path.insert(0, str(ROOT))
from benchmarks import cases, gpu, implementations, jsonl, results  # noqa: E402

pytestmark = pytest.mark.cpu
# These tests note that they run. One loses the machine, but only once.
TESTS = """
import os, signal
from pathlib import Path
import pytest

RAN = Path(__file__).with_name("ran")

@pytest.fixture(autouse=True)
def note(request):
    with RAN.open("a") as file:
        file.write(request.function.__name__.removeprefix("test_") + " ")

def test_passes(): pass
def test_fails(): assert False, "the reason"
def test_kills(): os.kill(os.getpid(), signal.SIGKILL)
def test_skipped(): pytest.skip()
def test_loses():
    if RAN.read_text().count("loses") == 1 and "PROGRAM" in os.environ:
        os.kill(int(os.environ["PROGRAM"]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
@pytest.mark.sanitizer
def test_sanitizer(): pass
"""
# It runs the program that follows its options, and finds an error if its tool is initcheck.
SANITIZER = """
import subprocess, sys
at = sys.argv.index("--error-exitcode")
status = subprocess.run(sys.argv[at + 2 :]).returncode
sys.exit(int(sys.argv[at + 1]) if "initcheck" in sys.argv else status)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "sanitizer.py").write_text(SANITIZER)
    (tmp_path / "package").mkdir()
    write = f"import sys; open(sys.argv[1] + '/_C{gpu.sysconfig.get_config_var('EXT_SUFFIX')}', 'w').write('built')"
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 2)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # so that pytest starts faster
    return gpu.Gpu(
        seconds=1000.0,
        out=tmp_path / "out",
        device="cpu",
        tests=[str(tmp_path / "test_few.py")],
        cases=["mini-vllm", "--only", "torch_rope", "--only", "copy", "--passes", "2", "--rounds", "2"],
        checks=["--help"],
        build=[sys.executable, "-c", write, str(tmp_path / "package")],
        sanitizer=[sys.executable, str(tmp_path / "sanitizer.py")],
        package=tmp_path / "package",
    )


def test_all_steps_run_and_go_on_where_the_machine_was_lost(machine, tmp_path, capsys):
    given = {x.name: getattr(machine, x.name) for x in dataclasses.fields(machine)}
    program = "import os\nfrom pathlib import PosixPath\nfrom benchmarks import gpu\n"
    program += "os.environ['PROGRAM'] = str(os.getpid())\n"
    program += f"gpu.main(gpu.Gpu(**{given!r}), ['build', 'tests'])"
    assert python(program).returncode == -signal.SIGKILL
    with (tmp_path / "out/journal.jsonl").open("a") as journal:
        journal.write('{"step":"tests","test":"half a li')

    assert gpu.main(dataclasses.replace(machine, seconds=-1), []) == 3  # no time: everything is left
    assert gpu.main(dataclasses.replace(machine, build=["false"]), []) == 1
    summary = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert summary["build"] == "passed  kept from an earlier call"
    assert summary["tests"] == "failed  3 passed, 2 failed, 1 skipped"
    assert summary["memcheck"].startswith("passed  1 passed") and summary["synccheck"] == summary["memcheck"]
    assert summary["initcheck"].startswith("failed") and "compute-sanitizer found errors" in summary["initcheck"]
    assert summary["selfcheck"].startswith("passed") and summary["figures"].startswith("passed")
    assert summary["benchmarks"] == "passed  1 cases" and "| torch_rope" in (tmp_path / "out/results.md").read_text()
    # The test that lost the machine ran again; those that had ended did not.
    ran = sorted((tmp_path / "ran").read_text().split())
    assert ran == ["fails", "kills", "loses", "loses", "passes", *["sanitizer"] * 4, "skipped"]

    # Steps that have ended are not repeated, and a change of the source repeats everything.
    assert gpu.main(machine, []) == 1 and len((tmp_path / "ran").read_text().split()) == len(ran)
    lines = jsonl.read(tmp_path / "out/journal.jsonl")
    jsonl.write(tmp_path / "out/journal.jsonl", [lines[0] | {"source": "another"}, *lines[1:]])
    assert gpu.main(machine, ["build"]) == 0
    assert not (tmp_path / "out/results.jsonl").exists() and len(jsonl.read(tmp_path / "out/journal.jsonl")) == 1


def test_a_step_ends_within_its_time(machine):
    file = machine.out.parent / "test_few.py"
    file.write_text("import time\n" + "".join(f"def test_{i}(): time.sleep(0.2)\n" for i in range(40)))
    some, start = dataclasses.replace(machine, seconds=2.0), time.time()
    assert gpu.main(some, ["tests"]) == 3
    assert time.time() - start < 2 + gpu.GRACE
    outcomes = gpu.outcomes(jsonl.read(some.journal), "tests")
    assert 0 < len(outcomes) < 40 and set(outcomes.values()) == {"passed"}


class Fragile(cases.Case):
    """A case whose implementations break. The process that measures it finds them by importing this file."""


@implementations.adapter("sound", "fragile", error=None, calls=10**9)
@implementations.adapter("crashing", "fragile", error=lambda: os.kill(os.getpid(), signal.SIGSEGV))
@implementations.adapter("hanging", "fragile", error=lambda: time.sleep(1e6))
@implementations.adapter("raising when timed", "fragile", error=lambda: 1 / 0, calls=3)
def breaking(case, data, error, calls=0):
    """Returns a sound implementation that breaks after so many calls, or breaks at once."""
    run = implementations.ADAPTERS["rotate", "torch_rope"](case, data)
    sound = itertools.repeat(run.call, calls)
    return dataclasses.replace(run, call=lambda: next(sound, error)()) if calls else error()


def test_an_implementation_that_breaks_its_process_is_named_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(results, "SILENCE", 5)
    monkeypatch.setattr(results, "PRELOAD", [])
    case = Fragile("x", 2, op="fragile")
    results.in_process(case, "cpu", ["sound"], 1)  # the first process takes longer to start
    found = {x["implementation"]: x.get("reason") for x in results.in_process(case, "cpu", None, 1)}
    assert found == {
        "sound": None,
        "crashing": "the process ended with exit code -11",
        "hanging": "nothing happened for 5 seconds",
        "raising when timed": "ZeroDivisionError: division by zero",
    }
