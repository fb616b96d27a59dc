"""The site that mkdocs builds from docs/ and the docstrings. mkdocs itself checks the links and anchors of the sources."""

import os
import re
import subprocess
import sys
from urllib.parse import unquote, urlsplit

import pytest
from cases import ROOT, needed

import torch_rope

for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    needed(module)
pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("site")]  # one process builds the site once
REPOSITORY = "https://example.invalid/owner/name"


@pytest.fixture(scope="module", params=[REPOSITORY, ""])
def site(request, tmp_path_factory):
    """The folder of the built site, and the text of its pages."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"REPOSITORY": request.param, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]  # --quiet hides warnings
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}


def test_a_browser_finds_all_that_a_page_loads_and_nothing_of_it_elsewhere(site):
    folder, pages = site
    loads = r'<(?:img|script|iframe|source|link(?! rel="(?:canonical|prev|next)"))\b[^>]*? (?:src|href)="?([^" >]+)'
    found = [(path, url) for path, text in pages.items() for url in re.findall(loads, text)]
    for path in folder.rglob("*.css"):
        found += [(path, url) for url in re.findall(r"""(?:url\(|@import)\s*["']?([^"')]+)""", path.read_text("utf-8"))]
    assert len(found) > 100
    for path, url in found:
        assert not urlsplit(url).netloc, f"{path}: {url}"
        target = (folder if url.startswith("/") else path.parent) / unquote(urlsplit(url).path).lstrip("/")
        assert target.is_file() or urlsplit(url).scheme == "data", f"{path}: {url}"


def test_every_page_of_docs_and_every_public_name_is_in_the_site_without_marks_of_markdown(site):
    folder, pages = site
    for source in (ROOT / "docs").rglob("*.md"):
        path = source.relative_to(ROOT / "docs").with_suffix("")
        assert folder / (path.parent if path.name == "index" else path) / "index.html" in pages
    for path, text in pages.items():
        text = re.sub(r"<(code|script|style)\b.*?</\1>|<[^>]*>", "", text, flags=re.S)
        assert not re.search(r"```|:(?:func|mod|class|meth):|\]\(|\{ \.|^#+ |::$|[Oo]n GitHub", text, re.M), path
    anchors = {name for text in pages.values() for name in re.findall(r'id="?(torch_rope[\w.]*)', text)}
    names = {f"torch_rope.{name}" for name in torch_rope.__all__ if name not in ("frequencies", "multimodal")}
    names |= {f"torch_rope.frequencies.{name}" for name in [*torch_rope.frequencies.KINDS, "from_config"]}
    assert names <= anchors, names - anchors
