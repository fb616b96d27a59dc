"""Reads and writes files of JSON lines, so that a program that is killed at any time leaves files that it can go on with."""

import json
from collections.abc import Iterable
from pathlib import Path


def read(path: Path) -> list[dict]:
    """Returns the lines of a file, without a last line that was not written to its end."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def write(path: Path, lines: Iterable[dict]) -> None:
    """Writes a whole file. If the program is interrupted, the file keeps its old contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    temporary.replace(path)


def append(path: Path, line: dict) -> None:
    """Appends a line in one piece, so that several processes may append to one file."""
    with path.open("a") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
