"""Makes the tables of docs/ that list what patch says of each model."""

import re

from cases import ROOT

from benchmarks.report import BLOCK, markdown  # noqa: E402


def said(patched):
    """Returns what a Patch says of each rotary function: the operator, the pairing, and what is special."""
    return set(re.findall(r"torch\.ops\.rope\.(.*?)(?:;|$)", str(patched), re.M))


def listed(header, *columns):
    """Returns a table. columns: the names of models of each row."""
    rows = [[row, *(", ".join(sorted(c.get(row, ()))) for c in columns)] for row in sorted(set().union(*columns))]
    return markdown(header, sorted(rows, key=lambda row: (not row[0].startswith("rotate"), -len(row[-1]))))


def compare(name, **tables):
    """Writes a page with these tables between its marks to build/, and fails if the page in docs/ has others."""
    page = ROOT / "docs" / name
    wanted = BLOCK.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", page.read_text())
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / page.name).write_text(wanted)
    assert page.read_text() == wanted, f"docs/{name} is not what patch says now; cp build/{page.name} docs/{name}"
