"""Tests of the judge of the CUDA kernels, and of the committed figures of `python -m benchmarks kernels`: what the compiler
makes of the kernels, and how calls fill a GPU. No test needs a GPU or a compiler for one."""

import json
import re
import shutil
import sys

import pytest
from cases import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import kernels, sass  # noqa: E402

pytestmark = pytest.mark.cpu
COMMITTED = json.loads(kernels.RESULTS.read_text())
JUDGED = {(row["name"], row["arch"]): row for row in COMMITTED["judged"]}
REGISTERS = {"rotate": 72, "cache": 80, "norm": 100}  # the most of a thread
needs_plans = pytest.mark.skipif(not shutil.which("g++"), reason="plan.h is compiled by g++")


# The kernels that normalise all heads together, normalise v or write to quantised caches.
ANY = re.compile(r"norm_over_heads(_backward)?_kernel<.*|norm_wide_kernel<.*|norm_kernel<.*, true, true>")


def test_registers_are_few_and_none_spills():
    for (name, arch), row in JUDGED.items():
        assert row["spills"] == 0 and row.get("in_flight", kernels.LITTLE) >= kernels.LITTLE
        assert arch != "sm_90" or row["registers"] <= REGISTERS.get(name, 255)
    rows = [row for row in COMMITTED["kernels"] if ANY.fullmatch(row["kernel"])]
    assert len(rows) == len(kernels.ARCHS) * (3 * 4 * 5 + 4 * 2)
    for row in rows:  # only doubles have a stack frame, for sincos of large angles
        assert "spills" not in row and row.get("stack", 0) == (40 if "<double" in row["kernel"] else 0)
    # A decode step reads its tables soon, and no loop rearranges bytes.
    assert JUDGED["rotate", "sm_90"]["chain"] <= 50 and JUDGED["rotate", "sm_90"]["prmt"] == 0


@pytest.mark.parametrize("call", ["rotate", "cache"])
def test_thread_slots_are_used_from_512_tokens_on(call):
    rows = [row for row in COMMITTED["plans"] if row["call"] == call and row["tokens"] >= 512]
    assert rows and not [row for row in rows if row["slots_used"] < 0.9]


@needs_plans
def test_the_committed_plans_are_those_of_plan_h():
    """If a plan changed on purpose, `python -m benchmarks kernels` writes the new figures."""
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    plans = kernels.plans(COMMITTED["judged"])
    rows = zip(COMMITTED["plans"], plans, strict=True)
    assert [{key: row[key] for key in row if key in new} for row, new in rows] == plans


def test_the_page_shows_the_committed_figures():
    assert kernels.RESULTS.with_suffix(".md").read_text() == kernels.markdown(COMMITTED)


# ---- the figures themselves ----


@pytest.mark.parametrize(
    "registers, threads, shared, arch, expected",
    [
        (72, 128, 0, "sm_90", 7),
        (100, 128, 0, "sm_90", 4),
        (96, 32, 0, "sm_90", 20),
        (32, 128, 0, "sm_90", 16),  # 2048 threads
        (16, 32, 0, "sm_90", 32),  # thread blocks
        (80, 88, 0, "sm_90", 8),  # three warps
        (16, 128, 31 * 1024, "sm_120", 3),  # 100 KB, and 1 KB of each thread block is reserved
    ],
)
def test_thread_blocks_that_a_multiprocessor_holds(registers, threads, shared, arch, expected):
    assert kernels.resident(registers, threads, shared, arch) == expected


@needs_plans
def test_the_predicted_time_is_the_sum_of_what_cannot_overlap(monkeypatch):
    """Each thread loads heads once, and stores them as its last of 101 instructions."""
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    load, other, store = (
        sass.Step(16 * i, op, tensor, frozenset())
        for i, (op, tensor) in enumerate([("LDG.E.128", "q"), ("FMUL", None), ("STG.E.128", "q")])
    )
    monkeypatch.setattr(kernels, "follow", lambda *_: [load, *[other] * 99, store])
    for tokens, bound in (1, "launch"), (32768, "memory"):
        divided = {"waves": tokens / 2000, "thread_blocks": tokens // 2, "threads": 128}
        row = kernels.predict("rotate", (32, 8), tokens, divided, None)
        first, waits = 2 * 0.4 + 100 * 2 / 1755, {1: 0, 32768: 16 * 0.8}[tokens]
        memory = tokens * (40 * 128 * 2 * 2 + 64 * 2 * 4 + 8) / 4.3e6
        assert row["bound"] == bound and row["memory"] == pytest.approx(memory, abs=0.01)
        assert row["latency"] == pytest.approx(first + waits, abs=0.01)
        assert row["issue"] == pytest.approx(tokens // 2 * 4 * 101 / (132 * 4 * 1755), abs=0.01)
        assert row["predicted"] == pytest.approx(1 + first + memory, abs=0.06)


ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    "instruction, before, after",
    [
        ("IADD3 R2, P0, R0, -R1, RZ", {"R0": 6, "R1": 5}, {"R2": 1, "P0": True}),
        ("IADD3.X R2, R0, ~R1, RZ, P0, !PT", {"R0": 5, "R1": 3, "P0": True}, {"R2": 2}),
        ("IMAD.WIDE R2, R0, 0x2, R4", {"R0": ONES, "R4": 1, "R5": 1}, {"R2": ONES, "R3": 0}),
        ("LEA.HI.X.SX32 R2, R0, R1, 0x1, P0", {"R0": ONES, "R1": 4, "P0": False}, {"R2": 3}),
        ("ISETP.GT.AND P0, PT, R0, RZ, PT", {"R0": ONES}, {"P0": False}),
        ("ISETP.GE.AND.EX P0, PT, R0, R1, PT, P1", {"R0": 1, "R1": 1, "P1": False}, {"P0": False}),
        ("PRMT R2, R0, 0x9910, RZ", {"R0": 0x8000}, {"R2": 0xFFFF8000}),
        ("LOP3.LUT P0, R2, R0, 0xff, RZ, 0xc0, !PT", {"R0": 0x103}, {"R2": 3, "P0": True}),
        ("PLOP3.LUT P2, PT, P0, P1, PT, 0x80, 0x0", {"P0": True, "P1": False}, {"P2": False}),
        ("LDC.U8 R2, c[0x0][R0+0x2]", {"R0": 1}, {"R2": 3}),
        ("@P0 MOV R2, 0x5", {"P0": False, "R2": 3}, {"R2": 3}),
        ("MUFU.EX2 R2, R0", {"R0": 3, "R2": 3}, {"R2": None}),
    ],
)
def test_an_instruction(instruction, before, after):
    thread = sass.Thread(code(instruction), bytes(range(16)), {}, None, None)
    thread.registers |= before
    thread.run()
    assert {name: thread.registers[name] for name in after} == after


def code(*instructions):
    lines = [f"/*{16 * i:04x}*/ {text} ;" for i, text in enumerate([*instructions, "EXIT"])]
    return sass.functions("Function : f\n" + "\n".join(lines))["f"]


def test_the_figures_of_a_thread():
    """The thread reads its position, a row of the table and three heads, one after another. R4 counts the heads."""
    thread = sass.Thread(
        code(
            "LDG.E R0, desc[UR4][R2.64]",  # position
            "MOV R4, 0x3",
            "IMAD.WIDE R6, R0, 0x4, R8",
            "LDG.E.128 R12, desc[UR4][R6.64+0x10]",  # cos
            "LDG.E.128 R16, desc[UR4][R10.64]",  # q; the loop begins
            "PRMT R16, R16, 0x5410, R17",
            "STG.E.128 desc[UR4][R10.64], R16",
            "IADD3 R4, R4, -0x1, RZ",
            "ISETP.NE.AND P0, PT, R4, RZ, PT",
            "@P0 BRA 0x40",
        ),
        b"",
        {},
        {1 << 40: "positions", 2 << 40 | 36: "cos", 3 << 40: "q"}.get,
        lambda tensor, _: 5 if tensor == "positions" else None,
    )
    thread.registers |= {"R2": 0, "R3": 1 << 8, "R8": 0, "R9": 2 << 8, "R10": 0, "R11": 3 << 8}
    ran = thread.run()
    assert kernels.chain(ran) == 2
    assert kernels.hot_loop(ran) == {"loop": 6, "prmt": 1, "at_once": 16}
    assert [step.tensor for step in ran if step.tensor] == ["positions", "cos", *["q"] * 6]


def test_a_thread_stops_where_its_path_is_not_known():
    for unknown in ("@P0 BRA 0x0", "@P0 EXIT", "CALL.ABS.NOINC R2", "BRX R0 -0x10"):
        with pytest.raises(sass.Unknown):
            sass.Thread(code(unknown), b"", {}, None, None).run()
