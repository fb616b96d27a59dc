"""The layout for the Hugging Face Hub: kernel-builder's own parser reads build.toml, and a CPU build of the layout, loaded
by the kernels package beside torch_rope, computes the same bits."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import OPERATORS, ROOT, missing, needed, python
from hub_build import FOLDER, build, build_toml, layout
from programs import assert_same_bits, assert_same_call, norm_weights, operands, qk, tables

import torch_rope

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.xdist_group("hub"),  # one process builds
    pytest.mark.skipif(sys.platform != "linux", reason="the CPU variant is built for Linux here"),
]
CONFIG = build_toml()
POSITIONS, FREQUENCIES = torch.arange(12).view(2, 6), torch.rand(2, 3)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    layout.write(folder)
    return folder


@pytest.fixture(scope="module")
def kernel():
    """The build, as the kernels package loads it."""
    if needed("kernels").__version__ < "0.17":
        missing("kernels 0.17 or later")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"somebody/torch-rope={build().parents[1]}")
        return needed("kernels").get_kernel("somebody/torch-rope", version=1)


# ---- the tree for kernel-builder ----


def test_kernel_builder_accepts_build_toml(tree):
    rust = needed("kernels._rust")
    assert {str(b) for b in rust.Build.open(tree).general.backends} == {"cpu", "cuda", "metal"}
    text = (tree / "build.toml").read_text()
    (tree / "build.toml").write_text(text.replace("cxx-flags", "flags", 1))
    with pytest.raises(ValueError, match="flags"):
        rust.Build.open(tree)
    (tree / "build.toml").write_text(text)


def section_of(file: str) -> str:
    """Returns the section of build.toml in which a file of csrc/ belongs."""
    if file.startswith("csrc/cuda/"):
        return "cuda"
    if re.match(r"csrc/mps/.*\.(mm|cpp)$", file):
        return "metal"
    return "cpu" if file == "csrc/cpu/kernels.h" else "torch"


def test_every_source_is_in_the_section_of_its_back_end(tree):
    files = sorted(str(path.relative_to(tree)) for path in (tree / "csrc").rglob("*") if path.is_file())
    assert "csrc/module.cpp" not in files and "csrc/mps/shaders.cpp" in files
    for name, section in {"torch": CONFIG["torch"], **CONFIG["kernel"]}.items():
        assert sorted(f for f in section["src"] if "csrc" in f) == [f for f in files if section_of(f) == name], name
        assert all((tree / f).is_file() for f in section["src"])
    assert {k["backend"] for k in CONFIG["kernel"].values()} == set(CONFIG["general"]["backends"])


def test_the_flags_are_those_of_setup_py():
    values, linux = {}, []
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in (
            "FLAGS",
            "NVCC_FLAGS",
            "ARCHITECTURES",
        ):
            values[node.targets[0].id] = ast.literal_eval(node.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "FLAGS.append":
            linux += [f"$<$<PLATFORM_ID:Linux>:{ast.literal_eval(node.args[0])}>"]
    flags = [flag for flag in values["FLAGS"] if flag not in ("-O3", "-g0", "-Wall")]  # kernel-builder has its own
    cuda = CONFIG["kernel"]["cuda"]
    assert CONFIG["torch"]["cxx-flags"] == flags + linux
    assert cuda["cxx-flags"] == [flag for flag in flags if not flag.startswith("-W")]
    assert cuda["cuda-flags"] == [flag for flag in values["NVCC_FLAGS"] if not flag.startswith("-std")]
    assert cuda["cuda-capabilities"] == values["ARCHITECTURES"].split(";")


def test_the_package_imports_only_itself_torch_and_python(tree):
    """The Hub loads it under another name, so it must not import torch_rope; and it may need transformers only later."""
    package = tree / "torch-ext/torch_rope"
    for path in package.rglob("*.py"):
        nodes = ast.parse(path.read_text())
        for node in ast.walk(nodes):
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.rope"), path
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in (name.partition(".")[0] for name in names):
                later = node not in nodes.body or path.name == "fuse.py"  # which is imported later
                known = name == "torch" or name in sys.stdlib_module_names
                assert known or (later and name in ("transformers", "kernels")), f"{path} imports {name}"


def test_the_metal_kernels_are_text(tree):
    metal = CONFIG["kernel"]["metal"]
    [shaders] = [f for f in metal["src"] if f.endswith(".cpp")]
    command = ["c++", "-std=c++20", "-fsyntax-only", *(f"-I{path}" for path in metal["include"]), shaders]
    subprocess.run(command, cwd=tree, check=True)
    text = (tree / shaders).read_text()
    assert text.count("[[kernel]]") > 5 and text.count("_library[] = {0}") == 5


# ---- the build ----


def ops(kernel):
    return getattr(torch.ops, kernel.__name__)


def arguments(op: str) -> tuple:
    if op.endswith("cos_sin"):
        return (
            (POSITIONS[..., None].expand(2, 6, 2).movedim(-1, 0), FREQUENCIES)
            if "axial" in op
            else (POSITIONS, FREQUENCIES[0])
        )
    return (*operands(op, "cpu"), *tables("cpu"))


def test_the_library_serves_every_python(kernel):
    [library] = Path(kernel.__file__).parent.glob("*.so")
    assert library.name == f"{kernel.__name__}.abi3.so"
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    assert re.findall(r" U (_?Py\w+)", symbols) == ["PyModule_Create2"] and "pybind11" not in symbols


def test_the_kernel_is_torch_rope_under_another_name(kernel):
    assert kernel is needed("kernels").get_local_kernel(FOLDER / "build")
    assert kernel is not torch_rope and kernel.rotate is not torch_rope.rotate
    assert set(kernel.__all__) == {"layers", *torch_rope.__all__}
    assert issubclass(kernel.layers.apply_rotary_transformers, torch.nn.Module)
    assert isinstance(kernel.RotaryEmbedding(8)(*qk("cpu")), tuple)
    with pytest.raises(ValueError, match=r"^rope\.rotate: cos, sin and inv_freq are None"):
        kernel.rotate(torch.ones(1, 1, 2))
    with pytest.raises(RuntimeError, match=r"^rope\.rotate_: x requires grad .*; use rope\.rotate, or"):
        kernel.rotate_(torch.ones(1, 1, 2, requires_grad=True), inv_freq=torch.ones(1))


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_is_registered_alike_and_computes_the_same_bits(op, kernel):
    def keys(namespace):
        return [k for k in KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{op}", k)]

    there = "CPU Meta Autograd ADInplaceOrView Negative CompositeExplicitAutograd"
    KEYS = [*there.split(), "FuncTorchBatched", "NestedTensorCPU", "NestedTensorCUDA"]
    assert keys(kernel.__name__) == keys("rope")
    mine, other = getattr(ops(kernel), op).default, getattr(torch.ops.rope, op).default
    assert str(mine._schema).partition("::")[2] == str(other._schema).partition("::")[2]
    assert_same_call(other, mine, *arguments(op))


@pytest.mark.parametrize("op", ["rotate_qk_", "norm_rotate_qk"])
def test_operators_pass_opcheck(op, kernel):
    given = [
        x.requires_grad_(x.is_floating_point() and i < 2 and not op.endswith("_")) for i, x in enumerate(arguments(op))
    ]
    torch.library.opcheck(getattr(ops(kernel), op).default, given)


def test_gradients_vmap_and_compiled_programs_are_the_same(kernel):
    given, inv_freq = (*qk("cpu"), *tables("cpu"), *norm_weights("cpu")), torch_rope.inv_freq(8)

    def results(rope):
        q, k, cos, sin, *weights = (x.clone().requires_grad_() for x in given)

        def both(q, k):
            rotated = rope.rotate_qk(q, k, cos, sin, offset=3)
            return *rotated, *rope.norm_rotate_qk(*rotated, *weights, inv_freq=inv_freq)

        def in_place(x):
            rope.rotate_(x[1], inv_freq=inv_freq)
            return x

        outs, run = both(q, k), torch.compile(both, fullgraph=True, backend="aot_eager")
        assert_same_bits(run(q, k), outs)
        grads = torch.autograd.grad(sum(out.square().sum() for out in outs), [q, k, cos, sin, *weights])
        x, mapped = q.detach().clone(), torch.func.vmap(lambda x: rope.rotate(x, inv_freq=inv_freq))
        compiled = torch.compile(in_place, fullgraph=True, backend="aot_eager")
        return *outs, *grads, mapped(q.detach()[:, None]), compiled(x.clone()), in_place(x)

    with torch.profiler.profile() as profile:
        mine = results(kernel)
    assert_same_bits(mine, results(torch_rope))
    assert not [e.key for e in profile.key_averages() if e.key.startswith("rope::")]  # it calls only its own operators


def test_flops_are_counted(kernel):
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        kernel.rotate_qk(*qk("cpu"), *tables("cpu"))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as expected:
        torch_rope.rotate_qk(*qk("cpu"), *tables("cpu"))
    assert counter.get_total_flops() == expected.get_total_flops() > 0


def test_the_kernel_works_without_torch_rope(kernel):
    program = f"""
import sys
from pathlib import Path
import kernels, torch
kernel = kernels.get_local_kernel(Path({str(FOLDER / "build")!r}))
assert torch.func.vmap(lambda x: kernel.rotate(x, inv_freq=torch.ones(4)))(torch.randn(3, 2, 5, 4, 8)).shape[0] == 3
has_rule = torch._C._dispatch_has_kernel_for_dispatch_key("{kernel.__name__}::rotate", "FuncTorchBatched")
print(has_rule, "torch_rope" in sys.modules, hasattr(torch.ops.rope, "rotate"))
"""
    done = python(program)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


def test_both_have_rules_for_dtensor_if_it_is_imported_after_them(kernel):
    program = f"""
import sys
from pathlib import Path
import torch_rope, kernels
assert "torch.distributed.tensor" not in sys.modules
kernels.get_local_kernel(Path({str(FOLDER / "build")!r}))
import torch.distributed.tensor
print(*sorted(name for name in sys.modules if name.endswith("rope._sharding") or name == "{kernel.__name__}._sharding"))
"""
    done = python(program)
    assert done.stdout.split() == sorted([f"{kernel.__name__}._sharding", "torch_rope._sharding"]), done.stderr


def test_kernelize_rotates_with_the_build(kernel):
    """A model of transformers keeps its results in inference and in training, half-split and interleaved."""
    done = python(Path(__file__).with_name("kernelize.py").read_text(), ROPE_KERNEL=str(FOLDER / "build"))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    modes = [("llama", "INFERENCE"), ("llama", "TRAINING|TORCH_COMPILE"), ("openai_privacy_filter", "TRAINING")]
    assert [(f["family"], f["mode"]) for f in found] == modes
    for f in found:
        assert f["calls"] == {f"{kernel.__name__}::rotate_qk": 2}, f
        assert f["logits"] < 4e-6 and f["gradients"] < 1.5e-5 and f["undone"] == 0, f
