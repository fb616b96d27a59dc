"""Tests of the package: the torch that it is built for, what setup.py says and packs, public names and schemas."""

import functools
import inspect
import os
import re
import subprocess
import sys
from importlib import resources

import errors
import pytest
import torch
from cases import EXHAUSTIVE, ROOT, python

import torch_rope
from torch_rope import _C

pytestmark = pytest.mark.cpu
RELEASE = ".".join(torch.__version__.split(".")[:2])
COMMANDS = 'pip install "setuptools>=77" pybind11 ninja && pip install --no-build-isolation .'


def test_the_build_names_its_devices_and_its_instruction_set_and_has_a_type_marker():
    assert _C.devices in (("cpu",), ("cpu", "cuda"))
    assert _C.cpu_instruction_set() in ("plain", "avx2", "avx512")
    assert resources.files(torch_rope).joinpath("py.typed").is_file()


# Changes of what setup.py finds, and what it then says.
REFUSED = {
    # pip's build isolation leaves torch and pybind11 out. This pip would install the newest torch if we asked for it.
    "sys.modules['torch'] = None": f"this build found no torch, and it needs the torch that .* run: {COMMANDS}",
    "sys.modules['pybind11'] = None": f"this build found no pybind11, .* run: {COMMANDS}",
    "torch.__version__ = '2.10.1'": "torch_rope needs torch 2.11 or later, and this is torch 2.10.1.",
    "torch.version.hip = '7.0'": "torch_rope supports Linux and macOS. It does not support Windows or ROCm builds",
    "sysconfig.get_path = lambda name: '/nowhere'": "torch_rope needs Python.h: install Python's headers",
    "os.environ['PATH'] = '/nowhere'": r"torch_rope needs a C\+\+ compiler, and found no c\+\+: install g\+\+",
    "os.environ['CXX'] = 'no-such-c++ -m64'": r"needs a C\+\+ compiler, and found no no-such-c\+\+",
    "os.environ['CXX'] = static": r"static finds no libstdc\+\+.so, .* Install libstdc\+\+'s development files",
    "os.environ['TORCH_ROPE_CUDA'] = '1'": "for CUDA: torch .* has no CUDA. Unset TORCH_ROPE_CUDA",
    "torch.version.cuda = '13.0'; torch.utils.cpp_extension.CUDA_HOME = None": "for CUDA: nvcc was not .* set TORCH_ROPE_CUDA=0",
    "has_nvcc('12.6', torch_cuda='13.0')": "for CUDA: nvcc in .* is of CUDA 12.6, and this torch is of CUDA 13.0. Install the",
    "has_nvcc('13.0', torch_cuda='13.2'); os.environ['TORCH_ROPE_KERNELS'] = '/nowhere'": "TORCH_ROPE_KERNELS is /nowhere, a folder without",
}
# Releases of torch's CUDA and of nvcc, and the processor. The last two decide for which GPUs the kernels are compiled.
ARCHITECTURES = {
    ("12.6", "12.8", "aarch64"): "7.5;8.0;8.9;9.0;10.0;12.0+PTX",
    ("12.8", "12.6", "x86_64"): "7.5;8.0;8.9;9.0+PTX",
    ("13.2", "13.0", "x86_64"): "7.5;8.0;8.9;9.0;10.0;12.0+PTX",
    ("13.0", "13.2", "aarch64"): "7.5;8.0;8.9;9.0;10.0;11.0;12.0+PTX",
}
# What packs, and for which torch: with TORCH_ROPE_CUDA=0 a torch that has CUDA needs no nvcc, and in an environment
# without torch, where uv lock reads the metadata, every torch will do.
PACKS = {"torch.version.cuda = '13.0'": f"torch=={RELEASE}.*", "sys.modules['torch'] = None": "torch>=2.11"}


def test_setup_and_import_say_in_one_line_why_they_cannot_work_and_setup_packs_every_file(tmp_path):
    repository = {"GIT_DIR": str(tmp_path / "git"), "TORCH_ROPE_CUDA": "0"}
    command = "git init --quiet && git remote add origin git@host.org:some/rope.git"
    subprocess.run(command, shell=True, env=os.environ | repository)
    packs = [f"{change}; pack({str(tmp_path / requirement)!r})" for change, requirement in PACKS.items()]
    programs = [f"{change}; runpy.run_path('setup.py')" for change in [*REFUSED, *packs]]
    programs += [
        f"has_nvcc({nvcc!r}, {cuda!r}); platform.machine = lambda: {machine!r}; runpy.run_path('setup.py'); "
        f"assert os.environ['TORCH_CUDA_ARCH_LIST'] == {known!r}"
        for (cuda, nvcc, machine), known in ARCHITECTURES.items()
    ]
    # Another release is refused before the library is loaded, but a patch release is not. A Python without a GIL stays so.
    programs += ["torch.__version__ = '2.9.1'; import torch_rope"]
    programs += [f"torch.__version__ = '{RELEASE}.99+cu130'; import torch_rope; assert 'torch_rope._C' in sys.modules"]
    programs[-1] += "; assert not sysconfig.get_config_var('Py_GIL_DISABLED') or not sys._is_gil_enabled()"
    # A second import in one process works, also after one that was interrupted.
    again = "[sys.modules.pop(name) for name in [*sys.modules] if 'torch_rope' in name]; import torch_rope"
    interrupted = "sys.modules['torch_rope._decompositions'] = None\ntry: import torch_rope\nexcept ImportError: "
    programs += [f"{first}{again}" for first in ("import torch_rope; ", interrupted)]
    done = python(f"""
import logging; logging.disable()  # a torch with CUDA logs that there is no GPU
import os, pathlib, platform, runpy, sys, sysconfig, torch, torch.utils.cpp_extension, pybind11
os.chdir({str(ROOT)!r}); os.environ.pop("CXX", None); os.environ.pop("TORCH_ROPE_CUDA", None); sys.argv = ["setup.py", "--version"]
torch.version.cuda = None
static = {str(tmp_path / "static")!r}  # a compiler that finds no library
pathlib.Path(static).write_text("#!/bin/sh\\necho libstdc++.so")
pathlib.Path(static).chmod(0o755)
def has_nvcc(release, torch_cuda):
    home = pathlib.Path({str(tmp_path)!r}, "cuda")
    for file in "bin/nvcc", "include/cuda_runtime.h":
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(f"#!/bin/sh\\necho 'Cuda compilation tools, release {{release}}, V{{release}}.99'")
        (home / file).chmod(0o755)
    torch.version.cuda, torch.utils.cpp_extension.CUDA_HOME = torch_cuda, str(home)
def pack(folder):
    os.mkdir(folder); os.environ.update({repository}); sys.argv = ["setup.py", "--quiet", "egg_info", "--egg-base", folder]
for i, program in enumerate({programs}):
    if not os.fork():  # because the import of torch takes seconds
        os.dup2(os.open(f"{tmp_path}/{{i}}", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
        sys.stdout = sys.stderr
        try:
            exec(program)
        except BaseException as error:
            os.write(2, str(error).encode())
            os._exit(2 if "torch_rope._C" in sys.modules else getattr(error, "code", 1) is not None)  # None: sys.exit()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
""")
    assert done.stdout.split() == ["1"] * len(REFUSED) + ["0"] * len([*PACKS, *ARCHITECTURES]) + ["1"] + ["0"] * 3, (
        done.stdout + done.stderr
    )
    printed = [(tmp_path / str(i)).read_text().strip() for i in range(len(programs))]
    for message, line in zip(REFUSED.values(), printed, strict=False):
        assert re.search(message, line) and "\n" not in line, line
    assert printed[-4].startswith(f"torch_rope was built for torch {torch.__version__} and this is torch 2.9.1")
    for requirement in PACKS.values():
        information = (tmp_path / requirement / "torch_rope.egg-info/PKG-INFO").read_text()
        assert f"Requires-Dist: {requirement}\n" in information
        # An address, that of a page, and a link. setup.py asks git for them in a clone only.
        found = [f"https://host.org/some/rope{path}" in information for path in (" ", "/issues", "/blob/HEAD/docs/")]
        assert found == [(ROOT / ".git").exists()] * 3
    lines = (tmp_path / f"torch=={RELEASE}.*/torch_rope.egg-info/SOURCES.txt").read_text().splitlines()
    packed = {line.removeprefix("./") for line in lines}
    folders = (path for folder in ("csrc", "shaders", "torch_rope") for path in (ROOT / folder).rglob("*"))
    files = {str(p.relative_to(ROOT)) for p in folders if p.is_file() and p.suffix not in (".so", ".pyc")}
    files |= {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert not files - packed - {"torch_rope/built_for_torch.txt"} and "torch_rope/built_for_torch.txt" not in packed


def test_no_target_of_the_makefile_compiles_what_is_compiled():
    """All need one build, and every build finds the ninja of .venv, which compiles only what has changed."""
    targets = {*re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.M)} - {"help", "gpu", "clean"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    options = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run(["make", "--dry-run", "--always-make", *targets], cwd=ROOT, **options)
    builds = {*re.findall(".*(?: -e |-m build .*--wheel|tests/exhaustive/package).*", done.stdout)}
    assert len(builds) == 3 and all(f'PATH="{ROOT}/.venv/bin:$PATH" ' in line for line in builds), builds or done.stderr
    if not (found := [*ROOT.glob(f"build/*-{sys.implementation.cache_tag}-torch-{torch.__version__}/build.ninja")]):
        pytest.skip("ninja has built nothing here")
    done = subprocess.run([f"{sys.prefix}/bin/ninja", "-n"], cwd=found[0].parent, **options)
    assert "no work to do" in done.stdout, f"a source is newer than the library: make .venv/built\n{done.stdout}"


def pattern_of(message):
    return re.escape(message).replace(r"\.\.\.", ".*")


# A compiled program does not look at the numbers of cu_seqlens. torch.compile traces no threads, which the class of a
# config needs, no functools.cache that is made in a function, which the search of a model needs, and no torch.jit.
NOT_TRACED = re.compile(r"positions_of\(\[\d, \d, \d+\]|\d, cp_size|jit|from_config\(\{|patch\((linear|of_\w+)\)")


@pytest.mark.parametrize("usage, message, error", errors.CASES)
def test_a_wrong_usage_prints_what_a_user_needs(usage, message, error):
    with pytest.raises(error, match=pattern_of(message)):
        errors.run(usage)


TRACED = [(usage, message) for usage, message, _ in errors.CASES if not NOT_TRACED.search(usage)]


@pytest.mark.parametrize("usage, message", TRACED if EXHAUSTIVE else TRACED[::8])
def test_a_wrong_usage_prints_the_same_when_it_is_compiled(usage, message):
    with pytest.raises(Exception) as raised:
        errors.run(usage, functools.partial(torch.compile, fullgraph=True, backend="eager"))
    assert re.search(pattern_of(message), str(raised.value).replace("\\", ""))


def test_no_test_imports_another_test():
    for path in (ROOT / "tests").rglob("*.py"):
        assert {*re.findall(r"\b(?:import|from) (test_\w+)", path.read_text())} <= {path.stem}, path


def test_every_public_name_has_a_docstring_and_every_function_names_its_equivalent():
    for name in torch_rope.__all__:
        value = getattr(torch_rope, name)
        is_function = inspect.isfunction(value) and name != "inv_freq"  # its docstring has a formula
        assert value.__doc__ and ("Equivalent to" in value.__doc__ or not is_function), name


def test_schemas_and_public_names_do_not_change():
    """Graphs that users have exported contain these schemas."""
    source = "Tensor? cos=None, Tensor? sin=None, Tensor? inv_freq=None, Tensor? positions=None, SymInt offset=0, "
    newer, before = ", int rotary_start=0, bool eager_rounding=False", ", bool round_before_weight=False"
    pairs, q_factor = "float attention_factor=1., bool interleaved=False", "Tensor? q_factor=None"
    angles, offset = f"{source}*, {pairs}, bool inverse=False{newer}", "float norm_weight_offset=0."
    eps = "float norm_eps=9.9999999999999995e-07"
    norm = f"Tensor q_norm_weight, Tensor k_norm_weight, {source}*, {eps}, {offset}, {q_factor}, {pairs}{newer}{before}"
    cos_sin = "(Tensor positions, Tensor inv_freq, *, float attention_factor=1., ScalarType? dtype=None) "
    cos_sin += "-> (Tensor cos, Tensor sin)"
    schemas = {
        "cos_sin": cos_sin,
        "axial_cos_sin": cos_sin,
        "rotate": f"(Tensor x, {angles}) -> Tensor",
        "rotate_": f"(Tensor(a!) x, {angles}) -> ()",
        "rotate_qk": f"(Tensor q, Tensor k, {angles}, {q_factor}) -> (Tensor, Tensor)",
        "rotate_qk_": f"(Tensor(a!) q, Tensor(b!) k, {angles}, {q_factor}) -> ()",
        "norm_rotate_qk": f"(Tensor q, Tensor k, {norm}) -> (Tensor, Tensor)",
        "norm_rotate_qk_": f"(Tensor(a!) q, Tensor(b!) k, {norm}) -> ()",
        "rotate_into_cache_": f"(Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, {source}"
        "Tensor? slots=None, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, *, Tensor? k_scale=None, "
        f"Tensor? v_scale=None, Tensor(d!)? q_out=None, Tensor? q_scale=None, {eps}, {pairs}, bool norm_v=False{newer}, "
        f"Tensor? v_norm_weight=None, {offset}, {q_factor}{before}) -> ()",
    }
    for name, schema in schemas.items():
        assert str(getattr(torch.ops.rope, name).default._schema) == f"rope::{name}{schema}"
    others = "RotaryEmbedding decompositions frequencies inv_freq multimodal positions_from_cu_seqlens slots_of_window"
    assert {*schemas, *others.split()} == {*torch_rope.__all__}
