"""Are the tests of Metal awake? Plants one mistake after another in the shaders and the host code, and runs the suite on
the simulator, which has to fail each time:  python tests/simulator/mutate.py [number ...]
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
TESTS = [f"tests/test_{name}.py" for name in ("metal", "tables", "values", "norm", "cache", "autograd")]

DEVICE, ROTATE, NORM, TABLES, COS_SIN = (
    f"shaders/{name}" for name in ("device.h", "rotate.metal", "norm.metal", "tables.metal", "cos_sin.metal")
)
HOST, PLAN, SHARED, ANGLE = "csrc/mps/mps.mm", "csrc/mps/plan.h", "csrc/mps/kernels.h", "csrc/angle.h"

# what is wrong, file, what stands there, what is put there
MUTATIONS = [
    ("the sign of sin swapped", DEVICE, "rotated(x, y, angles.cos[i], -angles.sin[i])", "rotated(x, y, angles.cos[i], angles.sin[i])"),
    ("stride of channels for that of heads", DEVICE, "h * I(strides[2])", "h * I(strides[3])"),
    ("stride of the input for that of the output", DEVICE, "head_of(head.out, o.out,", "head_of(head.out, o.in,"),
    ("storage offset dropped", HOST, "NSUInteger(t->storage_offset()) * t->element_size()", "NSUInteger(0)"),
    ("storage offset in elements", HOST, "NSUInteger(t->storage_offset()) * t->element_size()", "NSUInteger(t->storage_offset())"),
    ("barrier missing", NORM, "  threadgroup_barrier(mem_flags::mem_threadgroup);\n", ""),
    ("barrier of another memory", NORM, "mem_flags::mem_threadgroup", "mem_flags::mem_device"),
    ("one binding for another", HOST, "set(encoder, kBufferKIn, call.k);", "set(encoder, kBufferKOut, call.k);"),
    ("binding left out", HOST, "  set(encoder, kBufferSlots, call.slots);\n", ""),
    ("binding of an absent tensor left out", HOST, "  set(encoder, kBufferPositions, call.positions);\n", "  if (call.positions) set(encoder, kBufferPositions, call.positions);\n"),
    ("inverse ignored", DEVICE, "if (k_inverse) a.sin[i] = -a.sin[i];", ""),
    ("low half of an int64 position", DEVICE, "bytes == 8 ? static_cast<device const long*>(from)[i] : ", ""),
    ("batch stride of positions dropped", DEVICE, "b * I(p.positions[0]) + ", ""),
    ("range of positions not looked at", DEVICE, "!r.has_range || (place >= 0 && place <= r.last_place && !wrapped)", "true"),
    ("a position that overflows", DEVICE, " && !wrapped", ""),
    ("last row of a table refused", PLAN, "table ? p.rows - 1", "table ? p.rows - 2"),
    ("one row past a table", PLAN, "table ? p.rows - 1", "table ? p.rows"),
    ("padding written", DEVICE, "const bool cached = valid && cell >= 0;", "const bool cached = valid;"),
    ("slots past the cache", DEVICE, "    valid = valid && cell < p.blocks * p.block_size;\n", ""),
    ("heads past the last", ROTATE, "end = min(first + kHeads, r.heads);", "end = first + kHeads;"),
    ("a step of the sum over lanes missing", DEVICE, "for (int lane = 1; lane < k_lanes; lane *= 2)", "for (int lane = 2; lane < k_lanes; lane *= 2)"),
    ("a lane leaves before the sum", NORM, "  const Chunk<V, I> chunk = chunk_at<V, I>(r, active ? place.lane : 0);\n", "  if (!active) return;\n  const Chunk<V, I> chunk = chunk_at<V, I>(r, place.lane);\n"),
    ("lower half of attention_factor dropped", DEVICE, "scaled(a.cos[i], p.factor_hi, p.factor_lo)", "scaled(a.cos[i], p.factor_hi, 0.0f)"),
    ("vectors that are not aligned", PLAN, "if (t.storage_offset() % 4 || strides.back() != 1) return false;", "if (strides.back() != 1) return false;"),
    ("32 bits for every offset", PLAN, "return last > UINT32_MAX;", "return false;"),
    ("too little threadgroup memory", HOST, "threads * 8 * sizeof(float)", "threads * 4 * sizeof(float)"),
    ("the encoder fetched outside its queue", HOST, "        body(stream->commandEncoder());", "        body(outside);"),
    ("the encoder ended", HOST, "        body(stream->commandEncoder());", "        body(stream->commandEncoder());\n        [stream->commandEncoder() endEncoding];"),
    ("a call of ATen in the queue", HOST, "      set_params(encoder, s);", "      call.q_norm_weight_grad.zero_();\n      set_params(encoder, s);"),
    ("function constants swapped", SHARED, "X(1, interleaved)", "X(2, interleaved)"),
    ("the last threadgroup of a norm missing", HOST, "NSUInteger(ceil_div(p.grid.x, rows))", "NSUInteger(std::max(p.grid.x / rows, rope_int(1)))"),
    ("norm_eps dropped", DEVICE, " + p.norm_eps", ""),
    ("the last part not summed", NORM, "part < s.parts", "part + 1 < s.parts"),
    ("what a product loses forgotten", ANGLE, "fma(position_lo, turns_hi, lost)", "position_lo * turns_hi"),
    ("what a sum loses forgotten", DEVICE, "over = isfinite(larger) ? (larger - sum) - y : 0.0f;", "over = 0.0f;"),
    ("a sum that is too large", DEVICE, "isfinite(larger) ? (larger - sum) - y : 0.0f", "(larger - sum) - y"),
    ("the sums of wide heads begun again", NORM, "to[chunk.first] += total[0].value();", "to[chunk.first] = total[0].value();"),
    ("a tail without its second half", DEVICE, "if (c.whole) *reinterpret_cast", "if (c.rotated) *reinterpret_cast"),
    ("a number rounded twice", DEVICE, "x.of[i] = static_cast<T>(n.of[i])", "x.of[i] = static_cast<T>(static_cast<float>(static_cast<half>(n.of[i])))"),
    ("unsigned bytes read as signed", COS_SIN, "static_cast<device const uchar*>", "static_cast<device const char*>"),
    ("a table read for every head", ROTATE, "rotate(numbers_of(x[i]), angles)", "rotate(numbers_of(x[i]), angles_of<T, V>(r, buffers, token, at.x))"),
    ("the sign of a gradient of sin", TABLES, "x.of[one], -x.of[other]", "x.of[one], x.of[other]"),
    ("a head missing in a gradient of tables", TABLES, "min(first + kHeads, r.heads)", "min(first + kHeads, r.heads - 1)"),
    ("the other half of the pair", TABLES, "other = one + partner_distance(V, k_interleaved)", "other = one + partner_distance(V, !k_interleaved)"),
    ("strides of q for k", TABLES, "of_k ? n.k : n.q", "n.q"),
    ("strides of x for the gradient", TABLES, "of_k ? p.k.in : p.q.in", "of_k ? n.k : n.q"),
    ("the last token of a row missing", TABLES, "end = starts[at.z + 1];", "end = max(starts[at.z + 1] - 1, begin);"),
    ("the tokens of the row before", TABLES, "end = starts[at.z + 1];", "end = starts[at.z];"),
    ("tokens of one sequence alone", TABLES, "entry + (of_copy - of_entry * copies) * seq", "entry"),
    ("an offset ignored", TABLES, "begin = long(at.z) - tokens.shift;", "begin = long(at.z);"),
    ("rows before the first token", TABLES, "(begin >= 0 && begin < tokens.entries)", "(begin < tokens.entries)"),
    ("rows past the last token", TABLES, "(begin >= 0 && begin < tokens.entries)", "(begin >= 0)"),
    ("rows without a token left as they are", TABLES, "if (k_native_tables) {", "if (items == 0) continue;\n    if (k_native_tables) {"),
    ("the barrier of the tables missing", TABLES, "  threadgroup_barrier(mem_flags::mem_threadgroup);\n", ""),
    ("a share of the sum missing", TABLES, "share < size.y", "share + 1 < size.y"),
    ("the shares of another row", TABLES, "first_share = index - at.y * size.x", "first_share = index % size.x"),
    ("attention_factor missing in a gradient", TABLES, "    if (k_scaled) value = scaled(value, p.factor_hi, p.factor_lo);\n", ""),
    ("attention_factor for every share", TABLES, "sum.add(shared[j * threads + first_share + share * size.x]);", "sum.add(scaled(shared[j * threads + first_share + share * size.x], p.factor_hi, p.factor_lo));"),
    ("inverse ignored in a gradient", TABLES, "    if (k_inverse && of_sin) value = -value;\n", ""),
    ("gradients summed without compensation", TABLES, "cos[i].add(rotated(given.of[one], given.of[other], x.of[one], x.of[other]));", "cos[i].sum += rotated(given.of[one], given.of[other], x.of[one], x.of[other]);"),
    ("a row shared by two threadgroups", PLAN, "threads / std::min(chunks, threads))", "threads)"),
    ("too little memory for shares", HOST, "(p.constants.vectors ? 8 : 2)", "(p.constants.vectors ? 4 : 2)"),
    ("tokens that are not in order", HOST, "std::tie(order, starts) = call.order_and_starts();", "{ std::tie(order, starts) = call.order_and_starts(); order = at::empty_like(order).zero_(); }"),
    ("the first axis alone", COS_SIN, "    add_turns(more_fraction, more_rest, fraction, rest);\n", ""),
    ("one position for all axes", COS_SIN, "    position += ulong(c.position[0]);\n", ""),
    ("the frequencies of the first axis", COS_SIN, "    freq += ulong(c.inv_freq[0]);\n", ""),
    ("the last axis missing", COS_SIN, "axis < c.axes", "axis + 1 < c.axes"),
    ("what a sum of axes loses forgotten", ANGLE, "rest = rest + more_rest + error;", "rest = rest + more_rest;"),
]  # fmt: skip


def plant(text: str, file: str, old: str, new: str) -> str:
    if text.count(old) < 1:
        raise SystemExit(f"{file} has no {old!r}")
    text = text.replace(old, new)
    if "outside" in new:
        text = text.replace("  __block std::exception_ptr error;\n", "  id<MTLComputeCommandEncoder> outside = stream->commandEncoder();\n  __block std::exception_ptr error;\n", 1)  # fmt: skip
    if "X(2, interleaved)" in new:
        text = text.replace("X(2, inverse)", "X(1, inverse)")
    return text


def main() -> None:
    chosen = [int(a) for a in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "torch_rope")
        for part in ("csrc", "shaders", "tests", "build", "pyproject.toml"):
            ignore = shutil.ignore_patterns("linux-*", "emulator-*", "plan-*", "macos*", "__pycache__")
            if Path(ROOT, part).is_dir():
                shutil.copytree(ROOT / part, copy / part, ignore=ignore)
            else:
                shutil.copy2(ROOT / part, copy / part)
        run = [sys.executable, "-m", "pytest", "-q", "-x", "--simulate", "-k", "mps", "-p", "no:cacheprovider", *TESTS]
        if subprocess.run(run[: 1 - len(TESTS)], cwd=copy, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit("the tests fail without a mistake")
        for number in chosen:
            what, file, old, new = MUTATIONS[number - 1]
            right = (copy / file).read_text()
            (copy / file).write_text(plant(right, file, old, new))
            begin = time.time()
            done = subprocess.run(run, cwd=copy, capture_output=True, text=True)
            (copy / file).write_text(right)
            told = re.search(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.M)
            caught = done.returncode != 0
            print(f"{number:2} {'caught ' if caught else 'MISSED '} {time.time() - begin:4.0f} s  {what}: {file}")
            print(f"   {told[1][:150] if told else done.stdout.strip().splitlines()[-1][:150]}", flush=True)
            if not caught:
                survivors.append(number)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught", *survivors)
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
