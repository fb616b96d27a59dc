"""Tests of `make gpu` without a GPU: its steps run with a few small tests and cases on the CPU, and a faked sanitizer."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
from cases import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import gpu, jsonl  # noqa: E402

pytestmark = pytest.mark.cpu
# These tests count how often they run. One loses the machine, but only once.
TESTS = """
import os, signal
from pathlib import Path
import pytest

@pytest.fixture(autouse=True)
def runs(request):
    with open(Path(__file__).with_name("ran"), "a") as file:
        file.write(request.function.__name__ + "\\n")
    return Path(file.name).read_text().split().count(request.function.__name__)

def test_passes(): pass
def test_fails(): assert False, "the reason"
def test_kills(): os.kill(os.getpid(), signal.SIGKILL)
def test_skipped(): pytest.skip()
def test_loses(runs):
    if runs == 1 and "PROGRAM" in os.environ:
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
    """A function that makes a Gpu, which has so many seconds and keeps everything in tmp_path."""
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "sanitizer.py").write_text(SANITIZER)
    (tmp_path / "package").mkdir()
    write = f"import sys; open(sys.argv[1] + '/_C{gpu.sysconfig.get_config_var('EXT_SUFFIX')}', 'w').write('built')"
    options = {
        "out": tmp_path / "out",
        "device": "cpu",
        "tests": [str(tmp_path / "test_few.py")],
        "cases": ["mini-vllm", "--only", "torch_rope", "--only", "copy", "--passes", "2", "--rounds", "2"],
        "checks": ["--help"],
        "build": [sys.executable, "-c", write, str(tmp_path / "package")],
        "sanitizer": [sys.executable, str(tmp_path / "sanitizer.py")],
        "package": tmp_path / "package",
    }
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 2)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # so that pytest starts faster
    return lambda seconds=1000.0, **others: gpu.Gpu(seconds=seconds, **(options | others))


def test_all_steps_run_and_go_on_where_the_machine_was_lost(machine, tmp_path, capsys):
    lost = machine()
    program = f"""
import os
from pathlib import PosixPath
from benchmarks import gpu
os.environ["PROGRAM"] = str(os.getpid())
gpu.main(gpu.Gpu(**{ {x.name: getattr(lost, x.name) for x in dataclasses.fields(lost)}!r}), ["build", "tests"])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == -signal.SIGKILL
    with (tmp_path / "out/journal.jsonl").open("a") as journal:
        journal.write('{"step":"tests","test":"half a li')

    assert gpu.main(machine(-1), []) == 3  # no time: everything is left
    assert gpu.main(machine(build=["false"]), []) == 1
    summary = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert summary["build"] == "passed  kept from an earlier call"
    assert summary["tests"] == "failed  3 passed, 2 failed, 1 skipped"
    assert summary["memcheck"].startswith("passed  1 passed") and summary["synccheck"] == summary["memcheck"]
    assert summary["initcheck"].startswith("failed") and "compute-sanitizer found errors" in summary["initcheck"]
    assert summary["selfcheck"].startswith("passed") and summary["figures"].startswith("passed")
    assert summary["benchmarks"] == "passed  1 cases" and "| torch_rope" in (tmp_path / "out/results.md").read_text()
    # The test that lost the machine ran again; those that had ended did not.
    ran = sorted((tmp_path / "ran").read_text().replace("test_", "").split())
    assert ran == ["fails", "kills", "loses", "loses", "passes", *["sanitizer"] * 4, "skipped"]

    # Steps that have ended are not repeated, and a change of the source repeats everything.
    assert gpu.main(machine(), []) == 1 and len((tmp_path / "ran").read_text().split()) == len(ran)
    lines = jsonl.read(tmp_path / "out/journal.jsonl")
    jsonl.write(tmp_path / "out/journal.jsonl", [lines[0] | {"source": "another"}, *lines[1:]])
    assert gpu.main(machine(), ["build"]) == 0
    assert not (tmp_path / "out/results.jsonl").exists() and len(jsonl.read(tmp_path / "out/journal.jsonl")) == 1


def test_a_step_ends_within_its_time(machine, tmp_path):
    slow = "import time\n" + "".join(f"def test_{i}(): time.sleep(0.2)\n" for i in range(40))
    (tmp_path / "test_few.py").write_text(slow)
    some, start = machine(2.0), time.time()
    assert gpu.main(some, ["tests"]) == 3 and time.time() - start < 2 + gpu.GRACE
    assert 0 < len(gpu.outcomes(jsonl.read(some.journal), "tests")) < 40
    (tmp_path / "test_few.py").write_text(slow.replace("sleep(0.2)", "sleep(0)"))
    assert gpu.main(machine(), ["tests"]) == 0 and len(gpu.outcomes(jsonl.read(some.journal), "tests")) == 40
