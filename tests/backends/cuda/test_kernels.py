"""Tests of what the compiler makes of the CUDA kernels, and of how calls fill a GPU: limits, and the committed figures of
`python -m benchmarks kernels`. No test needs a GPU."""

import hashlib
import json
import re
import shutil
import sys

import pytest
from cases import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks import kernels, plan, sass  # noqa: E402

pytestmark = pytest.mark.cpu
COMMITTED = json.loads(kernels.RESULTS.read_text())
JUDGED = {(row["name"], row["arch"]): row for row in COMMITTED["judged"]}
REGISTERS = {"rotate": 72, "cache": 80, "norm": 100}  # the most of a thread
FIGURES = ("registers", "spills", "chain", "loop", "prmt", "at_once")
needs_plans = pytest.mark.skipif(not shutil.which("g++"), reason="plan.h is compiled by g++")
needs_nvcc = pytest.mark.skipif(
    not all(map(kernels.find, ("nvcc", "cuobjdump", "nvdisasm"))), reason="nvcc, cuobjdump or nvdisasm was not found"
)


@pytest.mark.parametrize("name, arch", JUDGED)
def test_registers_are_few_and_none_spills(name, arch):
    assert JUDGED[name, arch]["spills"] == 0
    assert arch != "sm_90" or JUDGED[name, arch]["registers"] <= REGISTERS.get(name, 255)


# The kernels that normalise all heads together, normalise v or write to quantised caches.
ANY = re.compile(r"norm_over_heads(_backward)?_kernel<.*|norm_wide_kernel<.*|norm_kernel<.*, true, true>")


@pytest.mark.parametrize("arch", kernels.ARCHS)
def test_no_kernel_that_can_do_everything_spills(arch):
    """Only doubles have a stack frame, for sincos of large angles."""
    rows = [row for row in COMMITTED["kernels"] if row["arch"] == f"sm_{arch}" and ANY.fullmatch(row["kernel"])]
    assert len(rows) == 3 * 4 * 5 + 4 * 2
    for row in rows:
        assert "spills" not in row and row.get("stack", 0) == (40 if "<double" in row["kernel"] else 0)


def test_a_decode_step_reads_its_tables_soon_and_no_loop_rearranges_bytes():
    rotate = JUDGED["rotate", "sm_90"]
    assert rotate["chain"] <= 50 and rotate["prmt"] == 0


@pytest.mark.parametrize("row", COMMITTED["judged"], ids=lambda row: f"{row['name']} {row['arch']}")
def test_enough_bytes_are_in_flight(row):
    assert row.get("in_flight", kernels.LITTLE) >= kernels.LITTLE


@pytest.mark.parametrize("call", ["rotate", "cache"])
def test_thread_slots_are_used_from_512_tokens_on(call):
    rows = [row for row in COMMITTED["plans"] if row["call"] == call and row["tokens"] >= 512]
    assert rows and not [row for row in rows if row["slots_used"] < 0.9]


@needs_plans
def test_the_committed_plans_are_those_of_plan_h():
    """If a plan changed on purpose, `python -m benchmarks kernels` writes the new figures."""
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    known = [
        {key: row[key] for key in row if key in new} for row, new in zip(COMMITTED["plans"], new_plans(), strict=True)
    ]
    assert known == new_plans()


def new_plans():
    return kernels.plans(COMMITTED["judged"])


@needs_plans
@pytest.mark.parametrize("tokens", kernels.TOKENS)
def test_a_call_in_place_is_divided_as_one_with_a_new_result(tokens):
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    plans = [plan.plan("rotate", tokens, (32, 8), in_place) for in_place in (True, False)]
    for key in ("block", "grid", "heads_per_thread_block", "vector"):
        assert plans[0][key] == plans[1][key]
    assert plans[0]["parameters"] != plans[1]["parameters"]


def test_the_page_shows_the_committed_figures():
    assert kernels.RESULTS.with_suffix(".md").read_text() == kernels.markdown(COMMITTED)


@needs_plans
@needs_nvcc
@pytest.mark.parametrize("source", ["rotate", "norm"])
def test_the_committed_figures_are_those_of_the_compiler(source, tmp_path):
    """Compiles the judged kernels for sm_90. If a kernel changed on purpose, `python -m benchmarks kernels` writes the new
    figures."""
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    if kernels.releases()["nvcc"] != COMMITTED["nvcc"]:
        pytest.skip(f"the committed figures are those of nvcc {COMMITTED['nvcc']}")
    found = {row["name"]: row for row in kernels.judge(*kernels.read_kernels(*compiled(source, tmp_path)))}
    assert found
    for name, row in found.items():
        committed = JUDGED[name, "sm_90"]
        assert {key: row.get(key) for key in FIGURES} == {key: committed.get(key) for key in FIGURES}


def compiled(source, folder):
    """Compiles the judged kernels of csrc/cuda/<source>.cu, or reads what was compiled of the same files before, and returns the
    log of the compiler and the fatbin."""
    # with_type() chooses the kernels that the sources compile. Here it chooses none, so that only the judged ones, whose
    # addresses are taken, are compiled.
    names = [
        row["kernel"] for row in COMMITTED["judged"] if row["arch"] == "sm_90" and row["kernel"].startswith(source)
    ]
    addresses = ", ".join(f"(const void*){name.replace('bfloat16', '__nv_bfloat16')}" for name in names)
    text = f"""
        #include "cuda/device.cuh"
        namespace rope::cuda {{
        template <typename F>
        cudaError_t with_no_type(DType, F&&) {{ return cudaSuccess; }}
        }}
        #define with_type with_no_type
        #include "cuda/{source}.cu"
        namespace rope::cuda {{
        extern const void* const judged[];
        const void* const judged[] = {{{addresses}}};
        }}
    """
    known = hashlib.sha256((text + kernels.releases()["nvcc"] + str(kernels.FLAGS)).encode())
    for path in sorted(p for p in ROOT.glob("csrc/**/*") if p.suffix in (".h", ".cuh") or p.parent.name == "cuda"):
        known.update(path.read_bytes())
    log, fatbin = (ROOT / "build/nvcc" / f"{known.hexdigest()}.{suffix}" for suffix in ("log", "fatbin"))
    if not log.exists():
        file = folder / "judged.cu"
        file.write_text(text)
        log.parent.mkdir(parents=True, exist_ok=True)
        found = kernels.compile_kernels(file, ["90"], fatbin)
        log.write_text(found)
    return log.read_text(), fatbin


# ---- the figures themselves ----


@pytest.mark.parametrize(
    "registers, threads, shared, arch, expected",
    [
        (72, 128, 0, "sm_90", 7),
        (80, 128, 0, "sm_90", 6),
        (96, 128, 0, "sm_90", 5),
        (100, 128, 0, "sm_90", 4),
        (96, 32, 0, "sm_90", 20),
        (32, 128, 0, "sm_90", 16),  # 2048 threads
        (32, 128, 0, "sm_120", 12),  # 1536 threads
        (16, 32, 0, "sm_90", 32),  # thread blocks
        (16, 32, 0, "sm_120", 24),
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
        ("IADD3 R2, P0, R0, R1, RZ", {"R0": ONES, "R1": 2}, {"R2": 1, "P0": True}),
        ("IADD3 R2, P0, R0, -R1, RZ", {"R0": 5, "R1": 6}, {"R2": ONES, "P0": False}),
        ("IADD3 R2, P0, R0, -R1, RZ", {"R0": 6, "R1": 5}, {"R2": 1, "P0": True}),
        ("IADD3.X R2, R0, ~R1, RZ, P0, !PT", {"R0": 5, "R1": 3, "P0": True}, {"R2": 2}),
        ("IMAD.X R2, R0, 0x1, R1, P0", {"R0": 5, "R1": 3, "P0": True}, {"R2": 9}),
        ("IMAD.WIDE R2, R0, 0x2, R4", {"R0": ONES, "R4": 1, "R5": 1}, {"R2": ONES, "R3": 0}),
        ("IMAD.WIDE.U32 R2, R0, 0x2, RZ", {"R0": ONES}, {"R2": ONES - 1, "R3": 1}),
        ("LEA R2, P0, R0, R1, 0x1", {"R0": 0x80000001, "R1": ONES}, {"R2": 1, "P0": True}),
        ("LEA.HI.X R2, R0, R1, R3, 0x1, P0", {"R0": 1 << 31, "R1": 4, "R3": 2, "P0": True}, {"R2": 10}),
        ("LEA.HI.X.SX32 R2, R0, R1, 0x1, P0", {"R0": ONES, "R1": 4, "P0": False}, {"R2": 3}),
        ("SHF.R.S32.HI R2, RZ, 0x1f, R0", {"R0": ONES}, {"R2": ONES}),
        ("SHF.R.U64 R2, R0, 0x1, R1", {"R0": 2, "R1": 1}, {"R2": 0x80000001}),
        ("SHF.L.U64.HI R2, R0, 0x1, R1", {"R0": 1 << 31, "R1": 1}, {"R2": 3}),
        ("ISETP.GT.AND P0, PT, R0, RZ, PT", {"R0": ONES}, {"P0": False}),
        ("ISETP.GT.U32.AND P0, PT, R0, RZ, PT", {"R0": ONES}, {"P0": True}),
        ("ISETP.GE.AND.EX P0, PT, R0, R1, PT, P1", {"R0": 1, "R1": 1, "P1": False}, {"P0": False}),
        ("ISETP.NE.OR P0, PT, R0, RZ, P1", {"R0": 0, "P1": True}, {"P0": True}),
        ("FSETP.EQ.AND P0, PT, R0, 1, PT", {"R0": 0x3F800000}, {"P0": True}),
        ("VIADDMNMX R2, R0, R1, R3, PT", {"R0": 5, "R1": ONES, "R3": 7}, {"R2": 4}),
        ("VIMNMX R2, RZ, R0, !PT", {"R0": ONES}, {"R2": 0}),
        ("SEL R2, R0, 0x7, !P0", {"R0": 5, "P0": True}, {"R2": 7}),
        ("PRMT R2, R0, 0x9910, RZ", {"R0": 0x8000}, {"R2": 0xFFFF8000}),
        ("LOP3.LUT P0, R2, R0, 0xff, RZ, 0xc0, !PT", {"R0": 0x103}, {"R2": 3, "P0": True}),
        ("PLOP3.LUT P2, PT, P0, P1, PT, 0x80, 0x0", {"P0": True, "P1": False}, {"P2": False}),
        ("P2R R2, PR, RZ, 0x4", {"P2": True}, {"R2": 4}),
        ("HFMA2.MMA R2, -RZ, RZ, 0, 5.9604644775390625e-08", {}, {"R2": 1}),
        ("LDC.U8 R2, c[0x0][R0+0x2]", {"R0": 1}, {"R2": 3}),
        ("LDC.64 R2, c[0x0][0x8]", {}, {"R2": 0x0B0A0908, "R3": 0x0F0E0D0C}),
        ("@P0 MOV R2, 0x5", {"P0": False, "R2": 3}, {"R2": 3}),
        ("IMAD.HI.U32 R2, R0, R1, R4", {"R0": 1 << 31, "R1": 4, "R4": ONES, "R5": 1}, {"R2": 3}),
        ("I2F.U32.RP R2, R0", {"R0": 4}, {"R2": 0x40800000}),
        ("MUFU.RCP R2, R0", {"R0": 0x40800000}, {"R2": 0x3E800000}),
        ("F2I.FTZ.U32.TRUNC.NTZ R2, R0", {"R0": 0x40900000}, {"R2": 4}),
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
