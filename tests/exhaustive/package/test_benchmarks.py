"""Tests of the program benchmarks/: implementations on small cases, wrong and broken ones, the accuracy study, and the
tables and pictures in the pages."""

import dataclasses
import os
import re
import signal
import sys
import time

import pytest
import torch
from cases import ROOT, needed

matplotlib = needed("matplotlib")
sys.path.insert(0, str(ROOT))
from benchmarks import accuracy, cases, implementations, measure, plots, report, results  # noqa: E402

pytestmark = pytest.mark.cpu
ADAPTERS = implementations.ADAPTERS
MACHINE = {"kind": "machine", "name": "a machine", "device": "cpu", "date": "today"}


def small(case: cases.Case) -> cases.Case:
    heads = {"heads": min(case.heads, 4), "kv_heads": min(case.kv_heads, 2)}
    return dataclasses.replace(case, seq=min(case.seq, 5), batch=min(case.batch, 3), **heads)


SMALL = {c.name: c for c in map(small, cases.cases("cpu")) if not c.whole}


@pytest.fixture
def measured(monkeypatch):
    """A function that measures a case in this process, without limiting memory and without waiting."""
    monkeypatch.setattr(measure.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(measure.gc, "collect", lambda *_: 0)  # which takes longer than all else
    monkeypatch.setattr(measure, "REST", 0)
    monkeypatch.setattr(measure, "BLOCK", 0)
    return lambda case, names: {x["implementation"]: x for x in measure.measure(case, "cpu", names, rounds=1)}


@pytest.mark.parametrize("name", SMALL)
def test_every_implementation_is_right_or_skipped_with_a_reason(name, measured):
    names = [n for op, n in ADAPTERS if op == SMALL[name].op and "compiled" not in n]  # compiling takes long
    found = measured(SMALL[name], names)
    assert set(found) == set(names) and found["torch_rope"]["status"] == "timed"
    assert all(x["status"] == "timed" or (x["status"] == "skipped" and x["reason"]) for x in found.values()), found


CACHE = {"positions": "int64", "cache_dtype": ""}
OPS = {"rotate": {}, "norm": {"mode": "training"}, "cache": CACHE, "quantised cache": CACHE | {"cache_dtype": "int8"}}


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_implementation_is_not_timed(op, measured, monkeypatch):
    case = cases.Case("x", 5, op=op, **OPS[op])

    def stale(case, data):  # returns its inputs unchanged
        run = ADAPTERS[op, "torch_rope"](case, data)
        return dataclasses.replace(run, call=lambda: data.q if "cache" in op else [data.q, data.k])

    monkeypatch.setitem(ADAPTERS, (op, "stale"), stale)
    found = measured(case, ["stale", "torch_rope"])
    assert found["stale"]["status"] == "wrong" and "samples_us" not in found["stale"]
    assert found["torch_rope"]["status"] == "timed"


class Fragile(cases.Case):
    """A case whose implementations break. The process that measures it finds them by importing this file."""


@implementations.adapter("sound", "fragile", error=None)
@implementations.adapter("crashing", "fragile", error=lambda: os.kill(os.getpid(), signal.SIGSEGV))
@implementations.adapter("hanging", "fragile", error=lambda: time.sleep(1e6))
@implementations.adapter("raising when timed", "fragile", error=lambda: 1 / 0, calls=3)
def breaking(case, data, error, calls=1):
    run, left = ADAPTERS["rotate", "torch_rope"](case, data), iter(range(calls))
    if error and calls == 1:
        error()
    return dataclasses.replace(run, call=lambda: run.call() if not error or next(left, None) is not None else error())


def test_an_implementation_that_breaks_its_process_is_named_and_the_others_are_measured(monkeypatch):
    monkeypatch.setattr(results, "SILENCE", 30)
    monkeypatch.setattr(results, "PRELOAD", [])
    results.in_process(Fragile("x", 2, op="fragile"), "cpu", ["sound"], 1)  # the first process takes longer to start
    lines = results.in_process(Fragile("x", 2, op="fragile"), "cpu", None, 1)
    assert {x["implementation"]: x.get("reason", x["status"]) for x in lines} == {
        "sound": "timed",
        "crashing": "the process ended with exit code -11",
        "hanging": "nothing happened for 30 seconds",
        "raising when timed": "ZeroDivisionError: division by zero",
    }


def test_an_interrupted_run_continues_unless_a_version_has_changed(tmp_path):
    case, out = cases.Case("decode", 1), tmp_path / "a.jsonl"
    journal = results.Journal(out, MACHINE)
    for number, us in enumerate(([1.0, 2.0, 3.0], [4.0, 5.0])):
        journal.add(case.name, number, [{"implementation": "torch_rope", "status": "timed", "samples_us": us}])
        with journal.path.open("a") as file:
            file.write('{"case":"a line that was interr')
        journal = results.Journal(out, MACHINE | {"date": "tomorrow"})
    journal.write_results([case], whole=True)
    ours = results.read(out)[1]
    assert (ours["median_us"], ours["q1_us"], ours["q3_us"], ours["samples"]) == (3.0, 2.0, 4.0, 5)
    assert not results.Journal(out, MACHINE | {"torch": "another"}).done()


def test_a_faster_peer_is_listed_unless_the_difference_is_noise():
    def sample(name, us, spread):
        times = {"status": "timed", "median_us": us, "q1_us": us - spread, "q3_us": us + spread}
        return {"kind": "sample", "case": "a case", "implementation": name, **times}

    lines = [MACHINE, sample("torch_rope", 100, 5), sample("copy", 50, 1), sample("peer", 92, 4)]
    assert report.wins(lines).startswith("None")
    lines[-1] = sample("peer", 80, 4)
    assert "| a case | peer | torch_rope | 0.80 | not understood yet |" in report.wins(lines)


def test_the_tables_and_pictures_in_the_pages_are_those_of_complete_results(tmp_path):
    assert report.write_all(check=True) == [], "run: make figures"
    lines = [x for x in report.cpu_results() if x["kind"] == "sample"]
    assert {x["status"] for x in lines} <= {"timed", "skipped", "wrong"}
    assert {x["case"] for x in lines} == {case.name for case in cases.cases("cpu")}
    version = re.search(r"matplotlib ([\d.]+)", (ROOT / "docs" / "bandwidth.svg").read_text())[1]
    if version != matplotlib.__version__:
        pytest.skip(f"matplotlib {version} drew the pictures, and {matplotlib.__version__} may draw them differently")
    for file in plots.plot(report.cpu_results(), tmp_path):
        assert file.read_bytes() == (ROOT / "docs" / file.name).read_bytes(), "run: make figures"


def test_the_accuracy_study_measures_torch_rope_as_it_promises_and_every_peer_as_right_up_to_rounding():
    """The error of torch_rope is at most 1 ulp in bfloat16. In float32 it is at most 2 ulps (3 with an attention factor)
    plus 5e-7 of the pair's magnitude. At position 1 only the arithmetic rounds; below 2^18 a float32 angle rounds too."""
    eps, dtypes = torch.finfo(torch.float32).eps, (torch.float32, torch.bfloat16)
    lines = list(accuracy.study(octaves=(0, 17), dtypes=dtypes, tokens=(131072,)))
    assert {x["implementation"] for x in lines} == set(accuracy.IMPLEMENTATIONS)
    assert all(x["reason"] for x in lines if "status" in x)
    for x in lines:
        if x["kind"] != "accuracy" or "status" in x:
            continue
        ours, scaled = x["implementation"] in ("torch_rope", "torch_rope tables"), x["scaling"] in ("yarn", "longrope")
        assert x["dtype"] != "bfloat16" or not ours or x["max_ulp"] <= 1, x
        limit = (3 if scaled else 2) * eps + 5e-7 if ours else 4 * eps * (2**17 if x["octave"] else 1)
        assert x["dtype"] != "float32" or x["max_relative"] <= limit, x
