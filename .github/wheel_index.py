"""Writes the index pages that pip reads: one for each label that the wheels have in their version, such as torch2.13.

gh api --paginate --slurp "repos/$GITHUB_REPOSITORY/releases" | python .github/wheel_index.py build/site/wheels
"""

import json
import re
import sys
from collections import defaultdict
from html import escape
from pathlib import Path


def pages(releases: list[dict]) -> dict[str, str]:
    """Returns the page of each label, given what GitHub says of each release. Links have the digest of their file."""
    links = defaultdict(list)
    for asset in (asset for release in releases for asset in release["assets"]):
        if wheel := re.fullmatch(r"torch_rope-[^-+]+\+([a-z0-9.]+)-.*\.whl", asset["name"]):
            digest = asset["digest"].replace("sha256:", "#sha256=")
            link = f'<a href="{escape(asset["browser_download_url"])}{digest}">{escape(asset["name"])}</a><br>'
            links[wheel[1]].append(link)
    return {label: "<!DOCTYPE html>\n" + "\n".join(sorted(found)) + "\n" for label, found in links.items()}


def main() -> None:
    out = Path(sys.argv[1])
    for label, page in pages([release for listed in json.load(sys.stdin) for release in listed]).items():
        folder = out / label / "torch-rope"  # pip asks for the index's address and the name of the package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
