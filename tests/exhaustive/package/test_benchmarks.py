"""Tests of the program benchmarks/: every implementation on small cases, the accuracy study, and the tables and
pictures in the pages."""

import dataclasses
import itertools
import os
import re
import signal
import time

import pytest
import torch
from cases import ROOT, needed

matplotlib = needed("matplotlib")
from benchmarks import accuracy, adapters, cases, plots, report, times  # noqa: E402

pytestmark = pytest.mark.cpu
ADAPTERS = adapters.ADAPTERS


def small(case: cases.Case) -> cases.Case:
    heads = {"heads": min(case.heads, 4), "kv_heads": min(case.kv_heads, 2)}
    return dataclasses.replace(case, seq=min(case.seq, 5), batch=min(case.batch, 3), **heads)


SMALL = {c.name: c for c in map(small, cases.cases("cpu")) if c.op != "model"}


@pytest.fixture
def measured(monkeypatch):
    """A function that measures a case in this process, without limiting memory and without waiting."""
    monkeypatch.setattr(times.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(times.gc, "collect", lambda *_: 0)  # which takes longer than all else
    monkeypatch.setattr(times, "REST", 0)
    monkeypatch.setattr(times, "BLOCK", 0)

    def measure(case, names):
        lines = [x for x in times.measure(case, "cpu", names, rounds=1) if isinstance(x, dict)]
        return {x["implementation"]: x for x in lines}

    return measure


@pytest.mark.parametrize("name", SMALL)
def test_every_implementation_is_right_or_skipped_with_a_reason(name, measured):
    names = [n for op, n in ADAPTERS if op == SMALL[name].op and "compiled" not in n]  # compiling takes long
    found = measured(SMALL[name], names)
    assert set(found) == set(names) and found["torch_rope"]["status"] == "timed"
    assert all(x["status"] == "timed" or (x["status"] == "skipped" and x["reason"]) for x in found.values()), found


def test_a_wrong_implementation_is_not_timed(measured, monkeypatch):
    def stale(case, data):  # returns its inputs unchanged
        return dataclasses.replace(ADAPTERS["rotate", "torch_rope"](case, data), call=lambda: [data.q, data.k])

    monkeypatch.setitem(ADAPTERS, ("rotate", "stale"), stale)
    found = measured(cases.Case("x", 5, op="rotate"), ["stale", "torch_rope"])
    assert {name: x["status"] for name, x in found.items()} == {"stale": "wrong", "torch_rope": "timed"}


class Fragile(cases.Case):
    """A case whose implementations break. The process that measures it finds them by importing this file."""


@adapters.adapter("sound", "fragile", error=None, calls=10**9)
@adapters.adapter("crashing", "fragile", error=lambda: os.kill(os.getpid(), signal.SIGSEGV))
@adapters.adapter("hanging", "fragile", error=lambda: time.sleep(1e6))
@adapters.adapter("raising when timed", "fragile", error=lambda: 1 / 0, calls=3)
def breaking(case, data, error, calls=0):
    """Returns a sound implementation that breaks after so many calls, or breaks at once."""
    run = ADAPTERS["rotate", "torch_rope"](case, data)
    sound = itertools.repeat(run.call, calls)
    return dataclasses.replace(run, call=lambda: next(sound, error)()) if calls else error()


def test_an_implementation_that_breaks_its_process_is_named_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(times, "SILENCE", 20)
    monkeypatch.setattr(times, "PRELOAD", ["benchmarks.times"])
    case = Fragile("x", 2, op="fragile")
    times.in_process(case, "cpu", ["sound"], 1)  # the first process takes longer to start
    found = {x["implementation"]: x.get("reason") for x in times.in_process(case, "cpu", None, 1)}
    assert found == {
        "sound": None,
        "crashing": "the process ended with exit code -11",
        "hanging": "nothing happened for 20 seconds",
        "raising when timed": "ZeroDivisionError: division by zero",
    }


def own_number(succeeds):
    yield {"process": os.getpid(), "status": "timed" if succeeds else "failed"}


def test_a_process_that_uses_a_gpu_is_kept_until_something_fails_in_it():
    ended = [times.sent_by("cuda", own_number, succeeds) for succeeds in (True, False, True)]
    assert [end for _, end in ended] == [""] * 3
    first, second, third = (sent[0]["process"] for sent, _ in ended)
    assert first == second != third


def test_a_run_keeps_the_lines_of_the_cases_that_it_does_not_measure():
    first, second = cases.cases("cpu")[:2]
    timed = {"implementation": "torch_rope", "status": "timed", "samples_us": [1.0, 2.0]}
    other = {"implementation": "mlx", "status": "failed", "reason": "a reason"}
    known = {"kind": "machine", "device": "cpu"}
    old = [known, {"kind": "sample", "case": second.name, "status": "timed"}, {"kind": "accuracy"}]
    found = list(times.merged(known, old, {first: [[timed, other], [timed | {"samples_us": [4.0]}]]}, [], "0a1b2c3d"))
    assert [x.get("case", x["kind"]) for x in found] == ["machine", first.name, first.name, second.name, "accuracy"]
    assert (found[1]["median_us"], found[1]["samples"], found[2]["reason"]) == (2.0, 3, "a reason")
    assert [x.get("commit") for x in found] == [None, "0a1b2c3d", "0a1b2c3d", None, None]


def test_the_tables_and_pictures_in_the_pages_are_those_of_complete_results(tmp_path):
    assert report.write_all(check=True) == [], "run: make figures"
    lines = [x for x in times.read(report.REFERENCE) if x["kind"] == "sample"]
    assert {x["status"] for x in lines} <= {"timed", "wrong"} and all(
        re.fullmatch("[0-9a-f]{8}", x["commit"]) for x in lines
    )
    assert {x["case"] for x in lines} == {case.name for case in cases.cases("cpu")}
    version = re.search(r"matplotlib ([\d.]+)", (ROOT / "docs" / "speed.svg").read_text())[1]
    if version != matplotlib.__version__:
        pytest.skip(f"matplotlib {version} drew the pictures, and {matplotlib.__version__} may draw them differently")
    for file in plots.plot(*map(times.read, (report.REFERENCE, report.H100)), tmp_path):
        assert file.read_bytes() == (ROOT / "docs" / file.name).read_bytes(), "run: make figures"


def test_the_accuracy_study_measures_torch_rope_as_it_promises_and_every_peer_as_right_up_to_rounding():
    """The error of torch_rope is at most 1 ulp in bfloat16. In float32 it is at most 2 ulps plus 5e-7 of the pair's
    magnitude. At position 1 only the arithmetic rounds; below 2^18 a float32 angle rounds too."""
    eps, dtypes = torch.finfo(torch.float32).eps, (torch.float32, torch.bfloat16)
    lines = list(accuracy.study(octaves=(0, 17), dtypes=dtypes))
    assert {x["implementation"] for x in lines} == set(accuracy.IMPLEMENTATIONS)
    assert all(x["reason"] for x in lines if "status" in x)
    for x in lines:
        if "status" in x:
            continue
        ours = x["implementation"] == "torch_rope"
        assert x["dtype"] != "bfloat16" or not ours or x["max_ulp"] <= 1, x
        limit = 2 * eps + 5e-7 if ours else 4 * eps * (2**17 if x["octave"] else 1)
        assert x["dtype"] != "float32" or x["max_relative"] <= limit, x
