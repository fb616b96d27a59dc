"""Tests of the package: the release of torch that it is built for, its public names, and the operators' schemas."""

import inspect
import os
import subprocess
import sys
from importlib import metadata, resources

import pytest
import torch
from cases import python

import torch_rope
from torch_rope import _C


def test_another_torch_release_raises_before_the_library_is_loaded():
    result = python("import torch; torch.__version__ = '2.9.1'; import torch_rope")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: torch_rope was built for torch {torch.__version__} and this is torch 2.9.1")
    result = python(
        "import sys, torch\ntorch.__version__ = '2.9.1'\ntry: import torch_rope\nexcept ImportError: print('torch_rope._C' in sys.modules)"
    )
    assert result.stdout.strip() == "False"


def test_a_patch_release_of_the_same_torch_is_accepted():
    version = ".".join(torch.__version__.split(".")[:2])
    assert python(f"import torch; torch.__version__ = '{version}.99+cu130'; import torch_rope").returncode == 0


@pytest.mark.cpu
def test_the_build_names_its_devices_and_its_instruction_set():
    assert _C.devices in (("cpu",), ("cpu", "cuda"))
    assert _C.cpu_instruction_set() in ("plain", "avx2", "avx512")


def test_the_installed_package_has_its_version_and_type_marker():
    try:
        version = metadata.version("torch-rope")
    except metadata.PackageNotFoundError:
        pytest.skip("torch_rope was built in its folder and is not installed")
    assert torch_rope.__version__ == version.partition("+")[0]
    assert resources.files(torch_rope).joinpath("py.typed").is_file()


def test_a_folder_with_the_name_of_the_package_does_not_hide_it(tmp_path):
    """Python is often started beside a clone, whose folder is called torch_rope too."""
    (tmp_path / "torch_rope").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import torch_rope; print(torch_rope.__version__)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if "No module named" in done.stderr:
        pytest.skip("torch_rope was built in its folder and is not installed")
    assert done.stdout.strip() == torch_rope.__version__, done.stderr


# The public names that are not operators.
OTHER_NAMES = {
    "RotaryEmbedding",
    "frequencies",
    "inv_freq",
    "multimodal",
    "positions_from_cu_seqlens",
    "rotary_embedding",
}


def test_every_public_name_has_a_docstring_and_every_function_names_its_equivalent():
    for name in torch_rope.__all__:
        value = getattr(torch_rope, name)
        is_function = inspect.isfunction(value) and name != "inv_freq"  # its docstring has a formula
        assert value.__doc__ and ("Equivalent to" in value.__doc__ or not is_function), name


def test_schemas_do_not_change():
    """Graphs that users have exported contain these schemas."""
    source = "Tensor? cos=None, Tensor? sin=None, Tensor? inv_freq=None, Tensor? positions=None, SymInt offset=0, "
    newer = ", int rotary_start=0, bool eager_rounding=False"
    angles = source + "*, float attention_factor=1., bool interleaved=False, bool inverse=False" + newer
    norm = "float norm_eps=9.9999999999999995e-07, float attention_factor=1., bool interleaved=False"
    cos_sin = "(Tensor positions, Tensor inv_freq, *, float attention_factor=1., ScalarType? dtype=None) "
    cos_sin += "-> (Tensor cos, Tensor sin)"
    schemas = {
        "cos_sin": cos_sin,
        "axial_cos_sin": cos_sin,
        "rotate": f"(Tensor x, {angles}) -> Tensor",
        "rotate_": f"(Tensor(a!) x, {angles}) -> ()",
        "rotate_qk": f"(Tensor q, Tensor k, {angles}) -> (Tensor, Tensor)",
        "rotate_qk_": f"(Tensor(a!) q, Tensor(b!) k, {angles}) -> ()",
        "norm_rotate_qk": f"(Tensor q, Tensor k, Tensor q_norm_weight, Tensor k_norm_weight, {source}"
        f"*, {norm}{newer}) -> (Tensor, Tensor)",
        "rotate_into_cache_": f"(Tensor(a!) q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, {source}"
        "Tensor? slots=None, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, *, Tensor? k_scale=None, "
        f"Tensor? v_scale=None, {norm}, bool norm_v=False{newer}) -> ()",
    }
    assert {name: str(getattr(torch.ops.rope, name).default._schema) for name in schemas} == {
        name: f"rope::{name}{schema}" for name, schema in schemas.items()
    }
    # A function has the name of its operator, except rotate_into_cache: no functional operator has that name, so the
    # function needs no underscore.
    assert {*schemas} | OTHER_NAMES == {*torch_rope.__all__} - {"rotate_into_cache"} | {"rotate_into_cache_"}
