"""Fits the pages to the site: links that leave docs/, pages from elsewhere, and labels of code blocks.

The pages are written for GitHub, so their links to files outside of docs/ are relative to the repository. On the site such a
link leads to the repository, if its address is known, and otherwise its text stands alone.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ADDRESS = "https://github.com/OWNER/torch_rope"  # a placeholder
ROOT = Path(__file__).resolve().parents[2]
# The pages of the site that are files outside of docs/.
PAGES = {
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
} | {
    f"results/{path.name}": f"benchmarks/results/{path.name}"
    for path in (ROOT / "benchmarks/results").glob("[A-Z]*.md")
}
SITE = {source: page for page, source in PAGES.items()} | {"README.md": "index.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|/)([^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"^(```.*?^```)", re.S | re.M)


def on_config(config):
    if config.extra["repository"]:
        icon = {"icon": "fontawesome/brands/github", "name": "Source code"}
        config.extra["social"] = [icon | {"link": config.extra["repository"]}]
    return config


def on_files(files, config):
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    path = page.file.src_uri
    source = PAGES.get(path, f"docs/{path}")  # in the repository
    if path.startswith("results/"):  # their tables take the whole width
        page.meta["hide"] = ["navigation", "toc"]

    def link(found):
        picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if not target:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = SITE.get(target) or (target.startswith("docs/") and target.removeprefix("docs/"))
        if inside:
            return f"{picture}[{text}]({posixpath.relpath(inside, posixpath.dirname(path) or '.')}{anchor})"
        assert not picture and (ROOT / target).exists(), f"{source} links to {target}"
        if repository := config.extra["repository"]:
            return f"[{text}]({repository}/blob/HEAD/{target}{anchor})"
        return f"`{text}`" if text.rstrip("/") in target else text  # a path is set as code

    markdown = re.sub(r"<!-- on GitHub -->\n.*\n", "", markdown)
    parts = CODE.split(markdown.replace(ADDRESS, config.extra["repository"] or ADDRESS))
    markdown = "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)
    # The output of a block is labelled for the tests; for the highlighter it is text.
    return re.sub(r"^```output$", "``` { .text .output }", markdown, flags=re.M)
