"""The kernel for the Hugging Face Hub: kernel-builder's own parser reads build.toml, and a CPU build of the layout, loaded
by the kernels package beside torch_rope, computes the same bits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import OPERATORS, missing, needed, python
from hub_build import FOLDER, build, layout
from programs import assert_same_bits, assert_same_call, norm_weights, operands, qk, tables

import torch_rope

if needed("kernels").__version__ < "0.17":
    missing("kernels 0.17 or later")
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.xdist_group("hub"),  # one process builds
    pytest.mark.skipif(sys.platform != "linux", reason="the CPU variant is built for Linux here"),
]
POSITIONS, FREQUENCIES = torch.arange(12).view(2, 6), torch.rand(2, 3)


@pytest.fixture(scope="module")
def kernel():
    """The build, as the kernels package loads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"somebody/torch-rope={build().parents[1]}")
        return needed("kernels").get_kernel("somebody/torch-rope", version=1)


def test_kernel_builder_accepts_build_toml(tmp_path):
    layout.write(tmp_path)
    rust, text = needed("kernels._rust"), (tmp_path / "build.toml").read_text()
    assert {str(b) for b in rust.Build.open(tmp_path).general.backends} == {"cpu", "cuda", "metal"}
    (tmp_path / "build.toml").write_text(text.replace("cxx-flags", "flags", 1))
    with pytest.raises(ValueError, match="flags"):
        rust.Build.open(tmp_path)


def test_the_library_serves_every_python(kernel):
    [library] = Path(kernel.__file__).parent.glob("*.so")
    assert library.name == f"{kernel.__name__}.abi3.so"
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    assert re.findall(r" U (_?Py\w+)", symbols) == ["PyModule_Create2"] and "pybind11" not in symbols


def test_the_kernel_is_torch_rope_under_another_name(kernel):
    assert kernel is not torch_rope and kernel.rotate is not torch_rope.rotate
    assert set(kernel.__all__) == {"layers", *torch_rope.__all__}
    assert issubclass(kernel.layers.apply_rotary_transformers, torch.nn.Module)
    with pytest.raises(ValueError, match=r"^rope\.rotate: cos, sin and inv_freq are None"):
        kernel.rotate(torch.ones(1, 1, 2))
    with pytest.raises(RuntimeError, match=r"^rope\.rotate_: x requires grad .*; use rope\.rotate, or"):
        kernel.rotate_(torch.ones(1, 1, 2, requires_grad=True), inv_freq=torch.ones(1))


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_is_registered_alike_and_computes_the_same_bits(op, kernel):
    keys = "CPU Meta Autograd ADInplaceOrView Negative CompositeExplicitAutograd FuncTorchBatched NestedTensorCPU"
    for key in [*keys.split(), "NestedTensorCUDA"]:
        names = f"{kernel.__name__}::{op}", f"rope::{op}"
        assert len({torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in names}) == 1, key
    namespaces = getattr(torch.ops, kernel.__name__), torch.ops.rope
    mine, other = (getattr(namespace, op).default for namespace in namespaces)
    assert str(mine._schema).partition("::")[2] == str(other._schema).partition("::")[2]
    if op.endswith("cos_sin"):
        axial = POSITIONS[..., None].expand(2, 6, 2).movedim(-1, 0), FREQUENCIES
        given = axial if "axial" in op else (POSITIONS, FREQUENCIES[0])
    else:
        given = *operands(op, "cpu"), *tables("cpu")
    assert_same_call(other, mine, *given)


def test_gradients_vmap_and_compiled_programs_are_the_same(kernel):
    given, inv_freq = (*qk("cpu"), *tables("cpu"), *norm_weights("cpu")), torch_rope.inv_freq(8)

    def results(rope):
        q, k, cos, sin, *weights = leaves = [x.clone().requires_grad_() for x in given]

        def both(q, k):
            rotated = rope.rotate_qk(q, k, cos, sin, offset=3)
            return *rotated, *rope.norm_rotate_qk(*rotated, *weights, inv_freq=inv_freq)

        outs = both(q, k)
        assert_same_bits(torch.compile(both, fullgraph=True, backend="aot_eager")(q, k), outs)
        grads = torch.autograd.grad(sum(out.square().sum() for out in outs), leaves)
        return *outs, *grads, torch.func.vmap(lambda x: rope.rotate(x, inv_freq=inv_freq))(q.detach()[:, None])

    with torch.profiler.profile() as profile:
        mine = results(kernel)
    assert_same_bits(mine, results(torch_rope))
    assert not [e.key for e in profile.key_averages() if e.key.startswith("rope::")]  # it calls only its own operators


def test_the_kernel_works_without_torch_rope(kernel):
    done = python(f"""
import importlib, sys
from pathlib import Path
import torch, kernels
kernel = kernels.get_local_kernel(Path({str(FOLDER / "build")!r}))
mapped = torch.func.vmap(lambda x: kernel.rotate(x, inv_freq=torch.ones(4)))(torch.ones(3, 2, 5, 4, 8))
DTensor = importlib.import_module(kernel.__name__ + ".parallel").DTensor
rules, op = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs, getattr(torch.ops, kernel.__name__).rotate.default
print(len(mapped), "torch_rope" in sys.modules, hasattr(torch.ops.rope, "rotate"), op in rules)
""")
    assert done.stdout.split() == ["3", "False", "False", "True"], done.stderr


def test_kernel_mapping_raises_if_transformers_does_not_use_kernels(monkeypatch):
    monkeypatch.setattr(needed("transformers").utils.import_utils, "is_kernels_available", lambda: False)
    with pytest.raises(ImportError, match="kernelize would change nothing; install a release of kernels"):
        needed("torch_rope.integrations.transformers").kernel_mapping()


def test_kernelize_rotates_with_torch_rope_or_with_the_build_and_keeps_results_and_gradients(kernel):
    """Runs in a new process, because transformers makes modules of its functions when it is imported."""
    done = python(Path(__file__).with_name("kernelize.py").read_text(), ROPE_KERNEL=str(FOLDER / "build"))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 12
    for f in found:
        assert f["calls"] == {f"{kernel.__name__ if f['build'] else 'rope'}::rotate_qk": 2}, f  # one for each layer
        assert f["logits"] < 4e-6 and f["gradients"] < 1.5e-5 and f["undone"] == 0, f
