"""The site that mkdocs builds from docs/ and the docstrings: each link, anchor and picture of it exists, and a reader's
browser loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from cases import EXHAUSTIVE, ROOT, needed

pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("site")]  # one process builds the site once
REPOSITORY = "https://example.invalid/owner/name"
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """A page of the site: its anchors, its links, what it loads, and its text that is not code."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.loads, self.text, self.title = set(), [], [], "", ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(found["href"])
        if tag in ("img", "script", "iframe", "source") and found.get("src"):
            self.loads.append(found["src"])
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"code", "script", "style"} & set(self._open):
            self.text += data
        if "h1" in self._open:
            self.title += data


@pytest.fixture(scope="module", params=[REPOSITORY, ""] if EXHAUSTIVE else [REPOSITORY])
def site(request, tmp_path_factory):
    """The folder of the built site, and its pages."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        needed(module)
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"REPOSITORY": request.param, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: Page(path) for path in folder.rglob("*.html")}
    return folder, pages


def local(folder: Path, page: Path, url: str) -> tuple[Path, str] | None:
    """Returns (file, anchor) of a link within the site, or None."""
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return None
    base = folder if parts.path.startswith("/") else page.parent
    target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
    return (target / "index.html" if target.is_dir() else target), unquote(parts.fragment)


def test_every_page_of_docs_is_in_the_site(site):
    folder, pages = site
    for source in (ROOT / "docs").rglob("*.md"):
        path = source.relative_to(ROOT / "docs").with_suffix("")
        path = path.parent if path.name == "index" else path
        assert pages[folder / path / "index.html"].title, source
    assert "Glossary" in pages[folder / "contributing" / "index.html"].text


def test_every_link_anchor_and_picture_exists(site):
    folder, pages = site
    wrong = []
    for path, page in pages.items():
        for url in [*page.links, *page.loads]:
            if path.name == "404.html" or not (found := local(folder, path, url)):
                continue
            target, anchor = found
            if not target.is_file() or (anchor and anchor not in pages[target].anchors and anchor != "__skip"):
                wrong.append(f"{path.relative_to(folder)}: {url}")
    assert not wrong, "\n".join(wrong)
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_links_to_the_repository_lead_to_files(site):
    folder, pages = site
    found = {url for page in pages.values() for url in page.links if url.startswith(REPOSITORY + "/blob/HEAD/")}
    sources = {urlsplit(url).path.partition("/blob/HEAD/")[2] for url in found}
    assert all((ROOT / source).exists() for source in sources)
    assert not sources or {"torch_rope/reference.py", "csrc/ops.cpp", "examples/generate.py"} <= sources


def test_a_browser_loads_nothing_from_elsewhere(site):
    folder, pages = site
    elsewhere = {url for page in pages.values() for url in page.loads if urlsplit(url).netloc}
    for path in folder.rglob("*.css"):
        elsewhere |= set(re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""", path.read_text("utf-8")))
    assert not elsewhere


def test_no_mark_of_markdown_or_sphinx_is_left(site):
    folder, pages = site
    for path, page in pages.items():
        assert not re.search(r"```|:(?:func|mod|class|meth):|\]\(|\{ \.|^#+ |::$", page.text, re.M), path


def test_the_reference_has_every_public_name(site):
    import torch_rope

    folder, pages = site
    anchors = set().union(*(page.anchors for path, page in pages.items() if "api" in path.parts))
    names = {f"torch_rope.{name}" for name in torch_rope.__all__ if name not in ("frequencies", "multimodal")}
    names |= {f"torch_rope.frequencies.{name}" for name in [*torch_rope.frequencies.KINDS, "from_config"]}
    assert names <= anchors, names - anchors
