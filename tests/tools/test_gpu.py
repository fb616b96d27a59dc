"""Tests of `make gpu` without a GPU: its steps run with a few small tests and cases on the CPU, and a faked sanitizer."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from cases import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import gpu, implementations, jsonl, results  # noqa: E402
from benchmarks.cases import Case  # noqa: E402

pytestmark = pytest.mark.cpu

# These tests count how often they run. One loses the machine, but only once.
TESTS = """
    import os, signal
    from pathlib import Path
    import pytest

    HERE = Path(__file__).parent

    def ran(name):
        with open(HERE / "ran", "a") as file:
            file.write(name + "\\n")
        return (HERE / "ran").read_text().split().count(name)

    def test_that_passes():
        ran("passes")

    def test_that_fails():
        ran("fails")
        assert False, "the reason"

    def test_that_kills_its_process():
        ran("kills")
        os.kill(os.getpid(), signal.SIGKILL)

    def test_that_is_skipped():
        ran("skipped")
        pytest.skip()

    def test_that_loses_the_machine():
        if ran("loses") == 1 and "PROGRAM" in os.environ:
            os.kill(int(os.environ["PROGRAM"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.sanitizer
    def test_for_the_sanitizer():
        ran("sanitizer")
"""
# It runs the program that follows its options, and finds an error if its tool is initcheck.
SANITIZER = """
    import subprocess, sys

    at = sys.argv.index("--error-exitcode")
    status = subprocess.run(sys.argv[at + 2 :]).returncode
    sys.exit(int(sys.argv[at + 1]) if "initcheck" in sys.argv else status)
"""
CASES = ["mini-vllm", "--only", "torch_rope", "--only", "copy", "--passes", "2", "--rounds", "2"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes a Gpu, which has so many seconds and keeps everything in tmp_path."""
    (tmp_path / "test_few.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "sanitizer.py").write_text(textwrap.dedent(SANITIZER))
    (tmp_path / "package").mkdir()
    write = f"import sys; open(sys.argv[1] + '/_C{gpu.sysconfig.get_config_var('EXT_SUFFIX')}', 'w').write('built')"
    options = {
        "out": tmp_path / "out",
        "device": "cpu",
        "tests": [str(tmp_path / "test_few.py")],
        "cases": CASES,
        "checks": ["--help"],
        "build": [sys.executable, "-c", write, str(tmp_path / "package")],
        "sanitizer": [sys.executable, str(tmp_path / "sanitizer.py")],
        "package": tmp_path / "package",
    }
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 2)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # so that pytest starts faster
    return lambda seconds=1000.0, **others: gpu.Gpu(seconds=seconds, **(options | others))


def ran(tmp_path) -> list[str]:
    return sorted((tmp_path / "ran").read_text().split())


def test_all_steps_run_and_go_on_where_the_machine_was_lost(machine, tmp_path, capsys):
    lost = machine()
    fields = {x.name: getattr(lost, x.name) for x in dataclasses.fields(lost)}
    program = f"""
        import os
        from pathlib import PosixPath
        from benchmarks import gpu
        os.environ["PROGRAM"] = str(os.getpid())
        gpu.main(gpu.Gpu(**{fields!r}), ["build", "tests"])
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment)
    assert done.returncode == -signal.SIGKILL
    with (tmp_path / "out/journal.jsonl").open("a") as journal:
        journal.write('{"step":"tests","test":"half a li')
    (tmp_path / "package" / fields["build"][2].split("/_C")[1].split("'")[0]).unlink(missing_ok=True)

    assert gpu.main(machine(-1), []) == 3  # no time: everything is left
    assert gpu.main(machine(build=["false"]), []) == 1
    summary = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert summary["build"] == "passed  kept from an earlier call"
    assert summary["tests"] == "failed  3 passed, 2 failed, 1 skipped"
    assert summary["memcheck"].startswith("passed  1 passed") and summary["synccheck"] == summary["memcheck"]
    assert summary["initcheck"].startswith("failed") and "compute-sanitizer found errors" in summary["initcheck"]
    assert summary["selfcheck"].startswith("passed") and summary["figures"].startswith("passed")
    assert summary["benchmarks"] == "passed  1 cases"
    # The test that lost the machine ran again; those that had ended did not.
    assert ran(tmp_path) == ["fails", "kills", "loses", "loses", "passes"] + ["sanitizer"] * 4 + ["skipped"]

    measured = jsonl.read(tmp_path / "out/results.jsonl")
    assert [x["implementation"] for x in measured[1:]] == ["copy", "torch_rope"]
    assert all(x["samples"] >= 4 and x["median_us"] > 0 for x in measured[1:])
    assert "| torch_rope" in (tmp_path / "out/results.md").read_text()
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 8 and all(file.is_file() and file.stat().st_size < gpu.LARGEST for file in files)

    # Steps that have ended are not repeated, and a change of the source repeats everything.
    assert gpu.main(machine(), []) == 1 and len(ran(tmp_path)) == 10
    lines = jsonl.read(tmp_path / "out/journal.jsonl")
    jsonl.write(tmp_path / "out/journal.jsonl", [lines[0] | {"source": "another"}, *lines[1:]])
    assert gpu.main(machine(), ["build"]) == 0
    assert not (tmp_path / "out/results.jsonl").exists() and len(jsonl.read(tmp_path / "out/journal.jsonl")) == 1


def test_a_step_ends_within_its_time(machine, tmp_path):
    slow = "import time\n" + "".join(f"def test_{i}(): time.sleep(0.2)\n" for i in range(40))
    (tmp_path / "test_few.py").write_text(slow)
    some = machine(2.0)
    start = time.time()
    assert gpu.main(some, ["tests"]) == 3
    assert time.time() - start < 2 + gpu.GRACE
    first = gpu.outcomes(jsonl.read(some.journal), "tests")
    assert 0 < len(first) < 40 and set(first.values()) == {"passed"}
    (tmp_path / "test_few.py").write_text(slow.replace("sleep(0.2)", "sleep(0)"))
    assert gpu.main(machine(), ["tests"]) == 0
    assert len(gpu.outcomes(jsonl.read(some.journal), "tests")) == 40


# ---- An implementation that breaks its process ----


class Fragile(Case):
    """A case whose implementations break. The process that measures it finds them by importing this file."""


@implementations.adapter("sound", "fragile")
def sound(case, data):
    return implementations.ADAPTERS["rotate", "torch_rope"](case, data)


@implementations.adapter("crashing", "fragile", error=lambda: os.kill(os.getpid(), signal.SIGSEGV))
@implementations.adapter("hanging", "fragile", error=lambda: time.sleep(1e6))
@implementations.adapter("crashing when timed", "fragile", error=lambda: os._exit(7), calls=3)
@implementations.adapter("raising when timed", "fragile", error=lambda: 1 / 0, calls=3)
def breaking(case, data, error, calls=1):
    run = sound(case, data)
    left = iter(range(calls))

    def call():
        if next(left, None) is None:
            error()
        return run.call()

    return dataclasses.replace(run, call=call) if calls > 1 else error()


def test_an_implementation_that_breaks_its_process_is_named_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(results, "SILENCE", 5)
    monkeypatch.setattr(results, "PRELOAD", [])
    results.in_process(Fragile("x", 2, op="fragile"), "cpu", ["sound"], 1)  # the first process takes longer to start
    found = {x["implementation"]: x for x in results.in_process(Fragile("x", 2, op="fragile"), "cpu", None, 1)}
    assert {name: x["status"] for name, x in found.items()} == {
        "sound": "timed",
        "crashing": "failed",
        "hanging": "failed",
        "crashing when timed": "failed",
        "raising when timed": "failed",
    }
    assert found["crashing"]["reason"] == "the process ended with exit code -11"
    assert found["hanging"]["reason"] == "nothing happened for 5 seconds"
    assert found["crashing when timed"]["reason"] == "the process ended with exit code 7"
    assert found["raising when timed"]["reason"] == "ZeroDivisionError: division by zero"
