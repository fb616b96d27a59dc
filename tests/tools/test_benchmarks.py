"""Tests of the program benchmarks/: implementations on small cases, wrong implementations, files, tables, pictures."""

import dataclasses
import re
import subprocess
import sys

import matplotlib
import pytest
import torch
from cases import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import cases, implementations, measure, plots, report, results  # noqa: E402

pytestmark = pytest.mark.cpu
MACHINE = {"kind": "machine", "name": "a machine", "device": "cpu", "date": "today"}


def small(case: cases.Case) -> cases.Case:
    heads = {"heads": min(case.heads, 4), "kv_heads": min(case.kv_heads, 2)}
    return dataclasses.replace(case, seq=min(case.seq, 5), batch=min(case.batch, 3), **heads)


ON_GPUS = (*report.LEAST, *report.WAYS)  # not in the results of a CPU
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
    case = SMALL[name]
    names = [n for op, n in implementations.ADAPTERS if op == case.op and "compiled" not in n]  # compiling takes long
    found = measured(case, names)
    assert set(found) == set(names)
    for x in found.values():
        assert x["status"] in ("timed", "skipped"), x
        assert x["status"] == "timed" or x["reason"]
    assert found["torch_rope"]["status"] == "timed"


@pytest.mark.parametrize(
    "group, name",
    [
        ("decode", "transformers compiled"),
        ("quantised", "transformers compiled"),
        ("norm-over-heads", "diffusers compiled"),
    ],
)
def test_a_compiled_implementation_is_right(group, name, measured):
    case = [case for case in SMALL.values() if case.group == group][-1]
    assert measured(case, [name])[name]["status"] == "timed"


TINY = "qwen3", dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
                     num_key_value_heads=2, vocab_size=31)  # fmt: skip


@pytest.mark.parametrize("mode", ["decoding after", "prompt of", "training on"])
def test_whole_models_are_compared_with_the_unpatched_one(mode, measured, monkeypatch):
    monkeypatch.setitem(cases.MODELS, "tiny", TINY)
    case = cases.Case("models", 5, op="model", model="tiny", mode=mode, dtype="float32")

    def other_weights(case, data):
        return implementations.model(case, cases.Data(case, "cpu"), patch={})

    monkeypatch.setitem(implementations.ADAPTERS, ("model", "other weights"), other_weights)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # so that a second model has other weights
    found = measured(case, ["transformers", "torch_rope", "torch_rope fused", "other weights"])
    assert found.pop("other weights")["status"] == "wrong"
    assert {x["status"] for x in found.values()} == {"timed"}
    operators = [found[name]["launches"] for name in ("transformers", "torch_rope", "torch_rope fused")]
    assert operators == sorted(set(operators), reverse=True)


def test_the_table_of_whole_models_marks_what_is_within_noise():
    lines = []
    for name, us, launches in (("transformers", 130.0, 30), ("torch_rope", 129.0, 20), ("torch_rope fused", 100.0, 10)):
        times = {"status": "timed", "median_us": us, "q1_us": us - 5, "q3_us": us + 5, "launches": launches}
        lines.append({"case": "models: X, prompt of 5, float32", "group": "models", "implementation": name} | times)
    row = "| X, prompt of 5, float32 | 130 µs | 129 µs | 100 µs | 1.01 (noise) | 1.30 | 30 / 20 / 10 |"
    assert row in report.whole_models(lines)


@pytest.mark.parametrize("model, mode", [("attention of Wan", "inference"), ("block of Wan", "training")])
def test_blocks_are_compared_with_the_unpatched_one(model, mode, measured, monkeypatch):
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    monkeypatch.setattr(implementations, "FFN", 32)
    case = cases.Case("diffusion", 5, heads=2, kv_heads=2, head_dim=16, op="block", model=model, mode=mode)

    def other_weights(case, data):
        return implementations.block(case, cases.Data(case, "cpu"), patch={})

    monkeypatch.setitem(implementations.ADAPTERS, ("block", "other weights"), other_weights)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # so that a second block has other weights
    found = measured(case, ["diffusers", "torch_rope", "torch_rope fused", "other weights"])
    assert found.pop("other weights")["status"] == "wrong"
    assert {x["status"] for x in found.values()} == {"timed"}
    assert all(x["peak_bytes"] > 0 for x in found.values())


def test_the_tables_of_diffusion_models_show_times_and_memory():
    lines = []
    for op, mode, model in (
        ("function of diffusers", "inference", "Wan"),
        ("norm of comfy-kitchen", "inference", "rms_rope"),
        ("block", "training", "block of Wan"),
    ):
        case = cases.Case("diffusion", 4096, heads=12, kv_heads=12, op=op, mode=mode, model=model)
        library = "comfy-kitchen" if "comfy" in op else "diffusers"
        for name, us, memory in ((library, 300.0, 4), ("torch_rope", 100.0, 1), ("torch_rope fused", 110.0, 2)):
            times = {"status": "timed", "median_us": us, "q1_us": us - 9, "q3_us": us + 9, "implementation": name}
            lines.append(dataclasses.asdict(case) | times | {"case": case.name, "peak_bytes": memory * 25165824 * 2})
    table = report.rotary_functions(lines)
    assert "| diffusers, Wan | 4,096 x 12 of 128, bfloat16 | forward | | 300 µs | 100 µs | 3.0 | 8.0 / 2.0 |" in table
    assert "| comfy-kitchen, rms_rope |" in table and "block" not in table
    row = "| block of Wan, training step with LoRA | 300 µs | 100 µs | 110 µs | 3.00 | 2.73 | 201 / 50 / 101 |"
    assert row in report.diffusion_blocks(lines)


def of_cache(op: str) -> dict:
    """Returns the arguments of Case that a cache needs, or nothing for another op."""
    return {"positions": "int64", "cache_dtype": "int8" * (op == "quantised cache")} if "cache" in op else {}


@pytest.mark.parametrize(
    "op, mode",
    [
        ("rotate", "inference"),
        ("rotate", "training"),
        ("norm", "training"),
        ("norm over heads", "training"),
        ("cache", "inference"),
        ("quantised cache", "inference"),
    ],
)
def test_a_wrong_implementation_is_not_timed(op, mode, measured, monkeypatch):
    case = cases.Case("x", 5, op=op, mode=mode, **of_cache(op))
    right = implementations.ADAPTERS[op, "torch_rope"]

    def pair_of_neighbours(case, data):
        return right(dataclasses.replace(case, interleaved=True), data)

    def stale(case, data):  # returns its inputs unchanged
        run = right(case, data)
        return dataclasses.replace(run, call=lambda: data.q if "cache" in op else [data.q, data.k])

    if op == "rotate":
        monkeypatch.setitem(implementations.ADAPTERS, (op, "wrong"), pair_of_neighbours)
        assert measured(case, ["wrong"])["wrong"]["status"] == "wrong"
    monkeypatch.setitem(implementations.ADAPTERS, (op, "stale"), stale)
    found = measured(case, ["stale", "torch_rope"])
    assert found["stale"]["status"] == "wrong" and "samples_us" not in found["stale"]
    assert found["torch_rope"]["status"] == "timed"


@pytest.mark.parametrize("dtype", cases.LARGEST)
def test_another_scale_of_a_quantised_cache_is_wrong(dtype, measured, monkeypatch):
    case = cases.Case("x", 5, op="quantised cache", positions="int64", cache_dtype=dtype)
    right = implementations.ADAPTERS["quantised cache", "torch_rope"]

    def other_scale(case, data):
        scales, data.scales = data.scales, [data.scales[0], data.scales[1] * 1.25]
        run = right(case, data)
        data.scales = scales
        return run

    monkeypatch.setitem(implementations.ADAPTERS, ("quantised cache", "other scale"), other_scale)
    assert measured(case, ["other scale"])["other scale"]["status"] == "wrong"


def test_bytes_of_a_quantised_cache_are_counted(measured):
    """q, k and v are read and q is written in bfloat16; k and v are written as int8; there are 64 rows of tables."""
    case = cases.Case("x", 64, op="quantised cache", positions="int64", cache_dtype="int8")
    numbers, kv = 64 * 128, 64 * 8 * 128
    found = measured(case, ["torch_rope"])["torch_rope"]
    assert found["moved_bytes"] == 2 * numbers * (32 + 32 + 8 + 8) + 2 * kv + 64 * 64 * 2 * 4
    assert found["needed_bytes"] == found["moved_bytes"] + 8 * 64


def test_launches_memory_and_bytes_of_a_call_are_counted(measured):
    """torch_rope reads and writes q and k once, with one operator. transformers moves the same size several times."""
    case = cases.Case("x", 64)
    size = case.rotated * case.itemsize
    found = measured(case, ["copy", "torch_rope", "torch_rope in place", "transformers"])
    ours, in_place, eager = (found[name] for name in ("torch_rope", "torch_rope in place", "transformers"))
    assert (ours["launches"], ours["peak_bytes"]) == (1, size)
    assert ours["moved_bytes"] == case.needed_bytes() == ours["needed_bytes"] == 2 * size + 64 * 64 * 2 * 4
    assert ours["flops"] == 6 * case.rotated // 2
    assert (in_place["launches"], in_place["peak_bytes"]) == (1, 0)
    assert eager["launches"] > 1 and eager["moved_bytes"] > 2 * ours["moved_bytes"] and eager["peak_bytes"] > size
    assert found["copy"]["moved_bytes"] >= 2 * size and found["copy"]["peak_bytes"] == 0


def test_a_lack_of_memory_is_no_failure():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**50)
    assert measure.why(error.value) == ("skipped", "not enough memory")


def test_names_of_cases_are_unique():
    for device in ("cpu", "cuda"):
        names = [case.name for case in cases.cases(device)]
        assert len(names) == len(set(names))


def test_an_interrupted_run_continues(tmp_path):
    case, out = cases.Case("decode", 1), tmp_path / "a.jsonl"

    def lines(*us):
        copy = {"implementation": "copy", "status": "timed", "samples_us": [1.0, 2.0, 3.0]}
        return [copy, {"implementation": "torch_rope", "status": "timed", "samples_us": list(us)}]

    first = results.Journal(out, MACHINE)
    first.add(case.name, 0, lines(1.0, 2.0, 3.0))
    with first.path.open("a") as file:
        file.write('{"case":"a line that was interr')
    journal = results.Journal(out, MACHINE | {"date": "tomorrow"})
    assert journal.done() == {(case.name, 0)}
    journal.add(case.name, 1, lines(4.0, 5.0))
    journal.write_results([case], whole=True)
    machine, copy, ours = results.read(out)
    assert machine == MACHINE | {"date": "tomorrow"} and copy["implementation"] == "copy"
    assert (ours["median_us"], ours["q1_us"], ours["q3_us"], ours["samples"], ours["to_copy"]) == (
        3.0,
        2.0,
        4.0,
        5,
        1.5,
    )
    journal.remove()
    assert not results.Journal(out, MACHINE).done()


def test_a_run_with_other_versions_starts_from_the_beginning(tmp_path):
    results.Journal(tmp_path / "a.jsonl", MACHINE).add("a case", 0, [])
    assert not results.Journal(tmp_path / "a.jsonl", MACHINE | {"torch": "another"}).done()


def test_compare_lists_medians_outside_the_widened_quartiles():
    def sample(us):
        return {"case": "a", "implementation": "b", "status": "timed", "median_us": us, "q1_us": 90.0, "q3_us": 110.0}

    for us, inside in ((100, 1), (68, 1), (67, 0), (137, 1), (138, 0)):
        assert results.compare([sample(us)], [sample(100)])[0] == inside
        assert len(results.compare([sample(us)], [sample(100)])[1]) == 1 - inside


def test_a_faster_peer_is_listed_with_its_reason_if_that_is_known(monkeypatch):
    def sample(name, us, spread):
        return {
            "kind": "sample",
            "case": "a case",
            "implementation": name,
            "status": "timed",
            "median_us": us,
            "q1_us": us - spread,
            "q3_us": us + spread,
        }

    lines = [MACHINE, sample("torch_rope", 100, 5), sample("copy", 50, 1), sample("peer", 92, 4)]
    assert report.wins(lines).startswith("None")  # the peer is faster, but within noise
    lines[-1] = sample("peer", 80, 4)
    assert "| a case | peer | torch_rope | 0.80 | not understood yet |" in report.wins(lines)
    monkeypatch.setitem(report.REASONS, ("a case", "peer"), "it cheats")
    assert "| a case | peer | torch_rope | 0.80 | it cheats |" in report.wins(lines)


def test_a_table_shows_the_peers_if_torch_rope_was_not_timed():
    sample = {"kind": "sample", "group": "sweep", "case": "sweep: a case"}
    timed = {"status": "timed", "median_us": 2.0, "q1_us": 1.0, "q3_us": 3.0}
    ours = {"status": "skipped", "reason": "not enough memory"}
    for lines in ([sample | ours | {"implementation": "torch_rope"}], []):
        lines = [MACHINE, *lines, sample | timed | {"implementation": "mlx"}]
        assert "| a case |" in report.group("sweep")(lines) and "2 µs |" in report.group("sweep")(lines)


def test_the_tables_in_the_pages_are_those_of_the_results():
    assert report.write_all(check=True) == [], "run: make figures"
    for page in report.PAGES:
        assert set(report.BLOCK.findall(page.read_text()))
    shown = re.findall(r"<!-- table: (.*?) -->", "".join(page.read_text() for page in report.PAGES))
    assert set(shown) == set(report.BLOCKS)


def test_the_pictures_in_docs_are_those_of_the_results(tmp_path):
    drawn = (ROOT / "docs" / "bandwidth.svg").read_text()
    version = re.search(r"matplotlib ([\d.]+)", drawn)[1]
    if version != matplotlib.__version__:
        pytest.skip(f"matplotlib {version} drew the pictures, and {matplotlib.__version__} may draw them differently")
    files = plots.plot(report.cpu_results(), tmp_path)
    assert [f.name for f in files] == ["bandwidth.svg", "decode.svg", "accuracy.svg", "memory.svg"]
    for file in files:
        assert file.read_bytes() == (ROOT / "docs" / file.name).read_bytes(), "run: make figures"


def test_the_committed_results_are_complete():
    """They have every case of the program with every implementation, and no measurement failed."""
    lines = report.cpu_results()
    assert lines[0]["kind"] == "machine" and lines[0]["device"] == "cpu"
    found = {}
    for x in lines:
        if x["kind"] == "sample":
            found.setdefault(x["case"], set()).add(x["implementation"])
            assert x["status"] in ("timed", "skipped", "wrong"), x
            assert x["status"] != "timed" or x["q1_us"] <= x["median_us"] <= x["q3_us"]
    for case in cases.cases("cpu"):
        assert found.pop(case.name) >= {n for op, n in implementations.ADAPTERS if op == case.op and n not in ON_GPUS}
    assert not found


def test_a_page_shows_where_peers_win_and_which_are_not_installed():
    """The lines are faked: on a GPU, kernels in the way of others are faster, and one peer is missing."""
    lines = [MACHINE | {"device": "cuda", "python": "3", "torch": "2"}]
    for case in (cases.Case("decode", 1, 4, positions="int64"), cases.Case("sweep", 4**7)):
        for name, us in (("copy", 9.0), ("torch_rope", 12.0), ("torch_rope in place", 11.0), ("SGLang's way", 10.0)):
            times = {"status": "timed", "median_us": us, "q1_us": us - 0.1, "q3_us": us + 0.1}
            facts = {"to_copy": us / 9, "needed_bytes": case.needed_bytes()}
            sample = {"kind": "sample", "case": case.name, **dataclasses.asdict(case), "implementation": name}
            lines.append(sample | times | facts)
        lines.append(sample | {"implementation": "liger", "status": "skipped", "reason": "not installed (No module)"})
    page = report.page_of(lines)
    assert "| sweep: 1 x 16k, 32/8 of 128, bfloat16 | SGLang's way | torch_rope | 0.83 | not understood yet |" in page
    assert page.count("| SGLang's way | torch_rope in place | 0.91 |") == 2
    assert "1.33 **exceeded**" in page and "Not installed: liger." in page


def test_the_program_compares_two_files_and_refuses_unknown_cases(tmp_path):
    def program(*arguments):
        command = [sys.executable, "-m", "benchmarks", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")

    same = program("compare", str(report.REFERENCE))
    assert same.returncode == 0 and "medians lie inside" in same.stdout
    for command, message in (("run", "nonsense must be a group"), ("gpu", "nonsense must be one of the steps")):
        unknown = program(command, "nonsense")
        assert unknown.returncode and message in unknown.stderr
