"""Tests of the wheel, the source distribution, and the index for pip."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch
from cases import ROOT, needed

import torch_rope
from torch_rope import _C

for tool in ("build", "twine", "check_wheel_contents"):
    needed(tool)
pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("wheel")]  # every build writes into the source folder
TORCH = ".".join(torch.__version__.split(".")[:2])
LABEL = f"torch{TORCH}" + (f".cu{torch.version.cuda.replace('.', '')}" if "cuda" in _C.devices else "")


def checked(*command, **options) -> str:
    """Runs a program of this environment, and returns what it prints."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = {"cwd": ROOT, "env": os.environ | {"PATH": tools}, "timeout": 600} | options
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the source distribution and the wheel, which holds the library that ninja has compiled already."""
    folder = tmp_path_factory.mktemp("dist")
    for kind in ["--sdist", "--wheel"]:
        checked(sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", folder, ROOT)
    return folder


@pytest.fixture
def wheel(dist):
    return next(dist.glob("*.whl"))


def metadata(text: str) -> tuple[str, list[str]]:
    """Returns the version and the requirements that belong to no extra."""
    fields = HeaderParser().parsestr(text)
    return fields["Version"], [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]


def test_the_wheel_has_the_package_names_its_torch_and_passes_the_checks_of_indexes(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        [info] = [name for name in names if name.endswith("/METADATA")]
        found = metadata(archive.read(info).decode())
        assert archive.read("torch_rope/built_for_torch.txt").decode().strip() == torch.__version__
    assert found == (f"{torch_rope.__version__}+{LABEL}", [f"torch=={TORCH}.*"])
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "torch_rope").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert {name for name in names if ".dist-info/" not in name} == package
    if sys.platform == "linux":
        command = re.search('^repair-wheel-command = "(auditwheel .*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
        checked(*shlex.split(command.format(dest_dir=tmp_path, wheel=wheel)))
        [wheel] = tmp_path.glob("*-manylinux_2_*.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert [name for name in archive.namelist() if ".so" in name] == [f"torch_rope/{Path(_C.__file__).name}"]
    checked("twine", "check", "--strict", wheel)
    checked("check-wheel-contents", wheel)


def test_the_wheel_works_in_a_new_environment_without_a_compiler(wheel, tmp_path):
    venv.create(tmp_path)
    here = tmp_path / "bin/python"
    site = Path(checked(here, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    checked(sys.executable, "-m", "pip", "--python", here, "install", "--no-deps", "--no-index", wheel)
    site.joinpath("torch.pth").write_text(str(Path(torch.__file__).parents[1]))  # torch alone is not installed again
    program = "import torch, torch_rope; x = torch.randn(2, 3, 4, 8, requires_grad=True); "
    program += "torch_rope.rotate(x, inv_freq=torch_rope.inv_freq(8)).sum().backward(); "
    program += "print(torch_rope.__file__, x.grad.count_nonzero().item())"
    printed = checked(here, "-c", program, cwd=tmp_path, env={"PATH": "/nowhere"})
    assert printed.split() == [str(site / "torch_rope/__init__.py"), "192"]


def test_the_source_distribution_builds_the_same(dist, tmp_path):
    """test_package.py shows that it has every file."""
    with tarfile.open(dist / f"torch_rope-{torch_rope.__version__}.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    assert metadata((source / "PKG-INFO").read_text()) == (torch_rope.__version__, ["torch>=2.11"])
    checked(sys.executable, "setup.py", "egg_info", "--egg-base", tmp_path, cwd=source)
    installed = metadata((tmp_path / "torch_rope.egg-info/PKG-INFO").read_text())
    assert installed == (torch_rope.__version__, [f"torch=={TORCH}.*"])  # pip refuses another version


def test_pip_finds_the_wheel_of_its_torch_on_an_index_page(wheel, dist, tmp_path):
    """pip also knows the source distribution, which an index for all releases of torch has, and prefers the wheel."""
    other = wheel.with_name(wheel.name.replace(f"+{LABEL}-", "+torch2.9-"))
    digest = "sha256:" + hashlib.sha256(wheel.read_bytes()).hexdigest()
    files = [*((f.name, (dist / f.name).as_uri(), digest) for f in (wheel, other)), ("a.tar.gz", "file:///nowhere", "")]
    assets = [dict(zip(("name", "browser_download_url", "digest"), file, strict=True)) for file in files]
    releases = json.dumps([[{"assets": assets}], [{"assets": []}]])
    checked(sys.executable, ROOT / ".github/wheel_index.py", tmp_path, input=releases)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted([LABEL, "torch2.9"])
    command = [sys.executable, "-m", "pip", "install", "--isolated", "--no-deps", "--dry-run", "--ignore-installed"]
    command += ["--index-url", (tmp_path / LABEL).as_uri(), "--find-links", dist, "--no-build-isolation"]
    checked(*command, "--report", tmp_path / "report.json", "torch-rope")
    [install] = json.loads((tmp_path / "report.json").read_text())["install"]
    assert install["metadata"]["version"] == f"{torch_rope.__version__}+{LABEL}"
