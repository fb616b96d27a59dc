"""Tests of the wheel, the source distribution, and the index for pip. `make wheel` tries a wheel in a new environment, and
runs auditwheel, twine and check-wheel-contents."""

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser

import pytest
import torch
from cases import ROOT, needed

import torch_rope
from torch_rope import _C

needed("build")
pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("wheel")]  # every build writes into the source folder
TORCH = ".".join(torch.__version__.split(".")[:2])
LABEL = f"torch{TORCH}" + (f".cu{torch.version.cuda.replace('.', '')}" if "cuda" in _C.devices else "")


def checked(*command, **options) -> str:
    """Runs Python, and returns what it prints."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, **{"cwd": ROOT, "timeout": 600} | options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the source distribution and the wheel, which holds the library that ninja has compiled already."""
    folder = tmp_path_factory.mktemp("dist")
    for kind in ["--sdist", "--wheel"]:
        checked("-m", "build", "--no-isolation", kind, "--outdir", folder, ROOT)
    return folder


@pytest.fixture
def wheel(dist):
    return next(dist.glob("*.whl"))


def metadata(text: str) -> tuple[str, list[str]]:
    """Returns the version and the requirements that belong to no extra."""
    fields = HeaderParser().parsestr(text)
    return fields["Version"], [line for line in fields.get_all("Requires-Dist") if "extra ==" not in line]


def test_the_wheel_has_the_package_and_names_its_torch(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        [info] = [name for name in names if name.endswith("/METADATA")]
        found = metadata(archive.read(info).decode())
        assert archive.read("torch_rope/built_for_torch.txt").decode().strip() == torch.__version__
    assert found == (f"{torch_rope.__version__}+{LABEL}", [f"torch=={TORCH}.*"])
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "torch_rope").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert {name for name in names if ".dist-info/" not in name} == package


def test_the_source_distribution_builds_the_same(dist, tmp_path):
    """test_package.py shows that it has every file."""
    with tarfile.open(dist / f"torch_rope-{torch_rope.__version__}.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    assert metadata((source / "PKG-INFO").read_text()) == (torch_rope.__version__, ["torch>=2.11"])
    checked("setup.py", "egg_info", "--egg-base", tmp_path, cwd=source)
    installed = metadata((tmp_path / "torch_rope.egg-info/PKG-INFO").read_text())
    assert installed == (torch_rope.__version__, [f"torch=={TORCH}.*"])  # pip refuses another version


def test_pip_finds_the_wheel_of_its_torch_on_an_index_page(wheel, dist, tmp_path):
    """pip also knows the source distribution, which an index for all releases of torch has, and prefers the wheel."""
    other = wheel.with_name(wheel.name.replace(f"+{LABEL}-", "+torch2.9-"))
    digest = "sha256:" + hashlib.sha256(wheel.read_bytes()).hexdigest()
    files = [*((f.name, (dist / f.name).as_uri(), digest) for f in (wheel, other)), ("a.tar.gz", "file:///nowhere", "")]
    assets = [dict(zip(("name", "browser_download_url", "digest"), file, strict=True)) for file in files]
    releases = json.dumps([[{"assets": assets}], [{"assets": []}]])
    checked(ROOT / ".github/wheel_index.py", tmp_path, input=releases)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted([LABEL, "torch2.9"])
    command = ["-m", "pip", "install", "--isolated", "--no-deps", "--dry-run", "--ignore-installed"]
    command += ["--index-url", (tmp_path / LABEL).as_uri(), "--find-links", dist, "--no-build-isolation"]
    checked(*command, "--report", tmp_path / "report.json", "torch-rope")
    [install] = json.loads((tmp_path / "report.json").read_text())["install"]
    assert install["metadata"]["version"] == f"{torch_rope.__version__}+{LABEL}"
