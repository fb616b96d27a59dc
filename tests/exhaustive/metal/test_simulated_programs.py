"""Tests of processes with the simulated mps device: modules, and a compiler that contracts."""

import os
import re
import subprocess
import sys

import pytest
import torch
from backends.metal.simulator import simulator
from cases import ROOT, python

from torch_rope.selfcheck import metal
from torch_rope.selfcheck.checks import Check

pytestmark = pytest.mark.simulator
SOURCE = """#include <metal_stdlib>
kernel void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const float a = x[i];
  x[i] = a * a - 1.00048828125;
}
"""


def run(program, **environment):
    """Runs a program in a new process, which must give no warning, and returns what it prints."""
    done = python(program, PYTHONWARNINGS="error", **environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_modules_run_with_the_simulated_device(tmp_path):
    """Two processes compile the same new shader at once, and each starts another one."""
    (tmp_path / "program.py").write_text("""
import os, shlex, subprocess, sys, torch, torch_rope
x = torch.ones(4, device="mps")
torch.ops.simulator_test.launch(sys.argv[1], [x], 1, -1, [4, 1, 1], [4, 1, 1], 0, [])
torch_rope.rotate(x.view(1, 1, 4), inv_freq=torch.ones(2, device="mps"))
(library, time, _), (kernel, _, calls) = torch_rope._C.metal_pipelines()
print(__name__, x.sum().item() < 0, library == f"library {kernel}", time > 0, kernel, calls, flush=True)
if sys.argv[2:]:
    raise SystemExit(subprocess.call([*shlex.split(os.environ["TORCH_ROPE_PYTHON"]), "-m", "program", sys.argv[1]]))
""")
    command = [sys.executable, simulator.__file__, "-m", "program", f"{SOURCE}// {tmp_path}", "once more"]
    options = dict(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, **options) for _ in range(2)]
    assert [p.communicate()[0] for p in processes] == ["__main__ True True True rotate_float_v1_u32 1\n" * 2] * 2
    assert not any(p.returncode for p in processes)


def test_a_call_compiles_only_the_kernels_that_it_launches():
    """Decoding with Llama needs one kernel, training Qwen3 three more. Other function constants need no compilation."""
    program = """
import re, torch, torch_rope
from pathlib import Path
from backends.metal.simulator import simulator
simulator.load()
def make(*shape):
    return torch.randn(shape, dtype=torch.bfloat16).to("mps").requires_grad_()
cos, sin = torch.rand(9, 64).to("mps"), torch.rand(9, 64).to("mps")
with torch.no_grad():
    for offset in 7, 8:
        caches = make(2, 9, 8, 128), make(2, 9, 8, 128)
        torch_rope.rotate_into_cache_(make(2, 1, 32, 128), *(make(2, 1, 8, 128) for _ in "kv"), *caches, cos, sin, offset=offset)
print(simulator.compilations())
for _ in range(2):
    q, k = torch_rope.norm_rotate_qk(make(2, 9, 16, 128), make(2, 9, 8, 128), make(128), make(128), cos, sin)
    (q.sum() + k.sum()).backward()
names = [name for name, *_ in torch_rope._C.metal_pipelines() if not name.startswith("library")]
print(simulator.compilations(), *sorted(names))
for folder in set(re.findall(r"/.*/shaders/.*(?=/library.so)", Path("/proc/self/maps").read_text())):
    print(Path(folder, "program_source").read_text().count("INSTANCE("))
"""
    decode, training, *instances = run(program).splitlines()
    assert decode == "1" and instances == ["1"] * 4
    kernels = ["norm_backward_bfloat_v4", "norm_rotate_bfloat_v8_u32", "rotate_bfloat_v8_u32", "sum_parts_bfloat"]
    assert training.split() == ["4", *kernels]


def test_the_program_of_github_s_macs_makes_every_pipeline(tmp_path):
    """.github/workflows/metal.yml compiles and runs it on macOS."""
    program, source, kernels = tmp_path / "pipelines", "tests/exhaustive/metal/pipelines.mm", tmp_path / "kernels"
    assert len((ROOT / source).read_text().splitlines()) <= 120
    simulator.program(source, program)
    kernels.mkdir()
    assert not subprocess.run([program, kernels], check=True, capture_output=True).stdout
    names = {path.stem for path in kernels.iterdir()}
    assert names >= {name for cases in metal.groups(Check(torch.device("cpu"))).values() for name in cases}
    assert all(path.read_text().count("[[host_name(") == 1 for path in kernels.iterdir())
    *lines, last = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    found = {line.split()[0]: int(re.search(r"maxTotalThreadsPerThreadgroup +(\d+)", line)[1]) for line in lines}
    assert found.keys() == names and set(found.values()) == {128, 256} and last.startswith("cos_sin_float: error ")


def test_the_rotation_does_not_depend_on_contraction():
    """A small kernel shows first that the compiler does fuse multiplications and additions when it may."""
    program = f"""
import torch, torch_rope
from backends.metal.simulator import simulator
simulator.load()
a = torch.full((4,), 1 + 2**-12, device="mps")
torch.ops.simulator_test.launch({SOURCE!r}, [a], 1, -1, [4, 1, 1], [4, 1, 1], 0, [])
print(int(a[0].item() != 0))
torch.manual_seed(0)
x, w, outs = torch.randn(2, 9, 4, 96).to("mps"), torch.rand(96).to("mps"), []
for rotary_dim in 64, 96:
    inv_freq = torch_rope.inv_freq(rotary_dim, device="mps")
    outs += torch_rope.norm_rotate_qk(x, x, w, w, inv_freq=inv_freq[0], offset=100003, attention_factor=1.3)
    outs += torch_rope.cos_sin(torch.arange(1000, 1100, device="mps"), inv_freq)
    positions = torch.randint(0, 2**24, (3, 100)).to("mps")
    outs += torch.ops.rope.axial_cos_sin(positions, torch.rand(2, 3, 48).to("mps"), attention_factor=1.3)
    tables = torch_rope.cos_sin(torch.arange(9, device="mps"), inv_freq)
    for dtype in torch.float32, torch.float16:
        args = [t.to(dtype) for t in (x, x * w, w, w, *tables)]
        outs += torch.ops.rope.norm_rotate_qk(*args, attention_factor=1.3)
print(torch.hash_tensor(torch.cat([t.cpu().float().flatten() for t in outs])).item())
"""
    found = [run(program, TORCH_ROPE_SIMULATOR_CONTRACT=contract).split() for contract in "01"]
    assert [fused for fused, _ in found] == ["0", "1"] and found[0][1] == found[1][1]
