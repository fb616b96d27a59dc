"""The site that mkdocs builds from docs/ and the docstrings: each link, anchor and picture of it exists, and a reader's
browser loads nothing from elsewhere. test_docs.py checks the links of the sources."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from cases import ROOT, needed

import torch_rope

for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    needed(module)
pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("site")]  # one process builds the site once
REPOSITORY = "https://example.invalid/owner/name"


class Page(HTMLParser):
    """A page of the site: its anchors, its links, what it loads, and its text that is not code."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.links, self.loads, self.text, self.code = set(), [], [], "", 0
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
        self.code += tag in ("code", "script", "style")

    def handle_endtag(self, tag):
        self.code -= tag in ("code", "script", "style")

    def handle_data(self, data):
        self.text += "" if self.code else data


@pytest.fixture(scope="module", params=[REPOSITORY, ""])
def site(request, tmp_path_factory):
    """The folder of the built site, and its pages."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"REPOSITORY": request.param, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, {path: Page(path) for path in folder.rglob("*.html")}


def test_every_link_anchor_and_picture_exists_and_nothing_is_loaded_from_elsewhere(site):
    folder, pages = site
    wrong = []
    for path, page in pages.items():
        for url in [*page.links, *page.loads] if path.name != "404.html" else []:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                if url in page.loads or (source := url.partition("/blob/HEAD/")[2]) and not (ROOT / source).exists():
                    wrong.append(f"{path}: {url}")
                continue
            base = folder if parts.path.startswith("/") else path.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and anchor not in pages[target].anchors and anchor != "__skip"):
                wrong.append(f"{path}: {url}")
    for path in folder.rglob("*.css"):
        wrong += re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""", path.read_text("utf-8"))
    assert not wrong, "\n".join(wrong)
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_every_page_of_docs_and_every_public_name_is_in_the_site_without_marks_of_markdown(site):
    folder, pages = site
    for source in (ROOT / "docs").rglob("*.md"):
        path = source.relative_to(ROOT / "docs").with_suffix("")
        assert folder / (path.parent if path.name == "index" else path) / "index.html" in pages
    assert "Glossary" in pages[folder / "contributing" / "index.html"].text
    for path, page in pages.items():
        assert not re.search(r"```|:(?:func|mod|class|meth):|\]\(|\{ \.|^#+ |::$", page.text, re.M), path
    anchors = set().union(*(page.anchors for path, page in pages.items() if "api" in path.parts))
    names = {f"torch_rope.{name}" for name in torch_rope.__all__ if name not in ("frequencies", "multimodal")}
    names |= {f"torch_rope.frequencies.{name}" for name in [*torch_rope.frequencies.KINDS, "from_config"]}
    assert names <= anchors, names - anchors
