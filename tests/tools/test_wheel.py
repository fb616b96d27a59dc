"""Tests of the wheel and the source distribution, of what the build says if it cannot build, and of the index for pip."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch
from cases import ROOT, missing, python

import torch_rope
from torch_rope import _C

pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("wheel")]  # every build writes into the source folder
TORCH = ".".join(torch.__version__.split(".")[:2])
LABEL = f"torch{TORCH}" + (f".cu{torch.version.cuda.replace('.', '')}" if "cuda" in _C.devices else "")
COMMANDS = 'pip install "setuptools>=77" pybind11 ninja && pip install --no-build-isolation .'


def run(*command, **options) -> subprocess.CompletedProcess:
    """Runs a program of this environment."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = {"cwd": ROOT, "env": os.environ | {"PATH": tools}} | options
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600, **options)


def checked(*command, **options) -> str:
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the source distribution and the wheel, which holds the library that ninja has compiled already."""
    for tool in ["build", "twine", "check_wheel_contents"]:
        if not (Path(sysconfig.get_path("purelib")) / tool).exists():
            missing(f'{tool} is not installed: pip install --no-build-isolation -e ".[wheel]"')
    folder = tmp_path_factory.mktemp("dist")
    for stale in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(stale)
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


def test_the_wheel_has_the_package_and_names_its_torch(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        info = next(name for name in names if name.endswith("/METADATA"))
        version, requirements = metadata(archive.read(info).decode())
        built_for = archive.read("torch_rope/built_for_torch.txt").decode().strip()
    assert version == f"{torch_rope.__version__}+{LABEL}" and requirements == [f"torch=={TORCH}.*"]
    assert built_for == torch.__version__
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "torch_rope").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert {name for name in names if ".dist-info/" not in name} == package


def test_the_wheel_passes_the_checks_of_indexes(wheel, tmp_path):
    if sys.platform == "linux":
        command = re.search('^repair-wheel-command = "(auditwheel .*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
        checked(*shlex.split(command.format(dest_dir=tmp_path, wheel=wheel)))
        wheel = next(tmp_path.glob("*.whl"))
        assert "-manylinux_2_" in wheel.name
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
    done = run(here, "-c", program, cwd=tmp_path, env={"PATH": "/nowhere"})
    assert done.stdout.split() == [str(site / "torch_rope/__init__.py"), "192"], done.stderr


def test_the_source_distribution_builds_the_same(dist, tmp_path):
    archive = next(dist.glob("*.tar.gz"))
    assert archive.name == f"torch_rope-{torch_rope.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    source = next(tmp_path.iterdir())
    assert metadata((source / "PKG-INFO").read_text()) == (torch_rope.__version__, ["torch>=2.11"])
    built = {".so", ".pyc"}
    for folder in ["csrc", "shaders", "torch_rope"]:
        files = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix not in built}
        inside = {p.relative_to(source) for p in (source / folder).rglob("*") if p.is_file()}
        assert inside == files - {Path("torch_rope/built_for_torch.txt")}
    for file in ["setup.py", "pyproject.toml", "README.md", "LICENSE"]:
        assert (source / file).read_bytes() == (ROOT / file).read_bytes()
    checked(sys.executable, "setup.py", "egg_info", "--egg-base", tmp_path, cwd=source)
    installed = metadata((tmp_path / "torch_rope.egg-info/PKG-INFO").read_text())
    assert installed == (torch_rope.__version__, [f"torch=={TORCH}.*"])  # pip refuses another version


# Changes of what setup.py finds, and what it then says.
REFUSED = [
    # pip's build isolation leaves torch and pybind11 out. This pip would install the newest torch if we asked for it.
    ("sys.modules['torch'] = None", f"this build found no torch, and it needs the torch that .* run: {COMMANDS}"),
    ("sys.modules['pybind11'] = None", f"this build found no pybind11, .* run: {COMMANDS}"),
    ("torch.__version__ = '2.10.1'", "torch_rope needs torch 2.11 or later, and this is torch 2.10.1."),
    ("torch.version.hip = '7.0'", "torch_rope supports Linux and macOS. It does not support Windows or ROCm builds"),
    ("sysconfig.get_path = lambda name: '/nowhere'", "torch_rope needs Python.h: install Python's headers"),
    ("os.environ['PATH'] = '/nowhere'", r"torch_rope needs a C\+\+ compiler, and found no c\+\+: install g\+\+"),
    ("os.environ['CXX'] = 'no-such-c++ -m64'", r"needs a C\+\+ compiler, and found no no-such-c\+\+"),
    ("os.environ['TORCH_ROPE_CUDA'] = '1'; torch.version.cuda = None", "TORCH_ROPE_CUDA is 1, but torch .* no CUDA"),
]


def test_a_build_that_cannot_work_says_why_in_one_line(tmp_path):
    program = f"""
import logging; logging.disable()  # a torch with CUDA logs that there is no GPU
import os, runpy, sys, sysconfig, torch, torch.utils.cpp_extension, pybind11
os.chdir({str(ROOT)!r}); os.environ.pop("CXX", None); sys.argv = ["setup.py", "--version"]
for i, change in enumerate({[change for change, _ in REFUSED]}):
    if not os.fork():  # because the import of torch takes seconds
        os.dup2(os.open(f"{tmp_path}/{{i}}", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
        exec(change)
        runpy.run_path("setup.py")
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = python(program)
    assert done.stdout.split() == ["1"] * len(REFUSED), done.stdout + done.stderr
    for i, (change, message) in enumerate(REFUSED):
        [line] = (tmp_path / str(i)).read_text().strip().splitlines()
        assert re.search(message, line), (change, line)


def test_pip_finds_the_wheel_of_its_torch_on_an_index_page(wheel, dist, tmp_path):
    """pip also knows the source distribution, which an index for all releases of torch has, and prefers the wheel."""
    other = wheel.with_name(wheel.name.replace(f"+{LABEL}-", "+torch2.9-"))
    assets = [
        {
            "name": file.name,
            "browser_download_url": (dist / file.name).as_uri(),
            "digest": "sha256:" + hashlib.sha256(wheel.read_bytes()).hexdigest(),
        }
        for file in [wheel, other]
    ]
    assets.append({"name": "torch_rope-0.2.0.tar.gz", "browser_download_url": "file:///nowhere", "digest": ""})
    releases = json.dumps([[{"assets": assets}], [{"assets": []}]])
    checked(sys.executable, ROOT / ".github/wheel_index.py", tmp_path, input=releases)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted([LABEL, "torch2.9"])
    command = [sys.executable, "-m", "pip", "install", "--isolated", "--no-deps", "--dry-run", "--ignore-installed"]
    command += ["--index-url", (tmp_path / LABEL).as_uri(), "--find-links", dist, "--no-build-isolation"]
    report = tmp_path / "report.json"
    checked(*command, "--report", report, "torch-rope")
    [install] = json.loads(report.read_text())["install"]
    assert install["metadata"]["version"] == f"{torch_rope.__version__}+{LABEL}"
