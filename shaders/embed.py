"""Writes shaders/*.metal into a C++ file, headers inlined, for csrc/mps/source.h:  python shaders/embed.py OUT.cpp

Metal compiles the text on the user's machine at the first call. Where xcrun has Metal's compiler the compiled library
is written beside it. TORCH_ROPE_METALLIB=0 leaves that out, =1 makes a missing compiler an error.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=metal3.1", "-mmacosx-version-min=14.0", "-fno-fast-math", "-ffp-contract=off", "-O2"]  # 3.1: with bfloat


def source() -> str:
    """All shaders as one text without quoted includes: Metal takes no header from this project at run time."""
    done = set()

    def inline(path: Path) -> str:
        if path in done:
            return ""
        done.add(path)
        return re.sub(
            r'^#include "(.+)"\n', lambda m: inline((path.parent / m[1]).resolve()), path.read_text(), flags=re.M
        )

    text = "".join(inline(path) for path in sorted(ROOT.glob("shaders/*.metal")))
    if not text.isascii():
        raise ValueError("Metal's compiler takes ASCII: " + "".join({c for c in text if not c.isascii()}))
    return text


def _run(*command) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return f"{command[0]} was not found"
    return None if done.returncode == 0 else done.stderr or f"{command[0]} failed"


def library(text: str) -> bytes:
    """The compiled library; empty where there is no compiler."""
    wish = os.environ.get("TORCH_ROPE_METALLIB")
    if wish == "0" or not (wish or shutil.which("xcrun")):
        return b""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "rope.metal").write_text(text)
        problem = _run(
            "xcrun", "-sdk", "macosx", "metal", *FLAGS, "-c", path / "rope.metal", "-o", path / "rope.air"
        ) or _run("xcrun", "-sdk", "macosx", "metallib", path / "rope.air", "-o", path / "rope.metallib")
        if problem and wish:
            sys.exit(f"torch_rope: TORCH_ROPE_METALLIB is {wish}, but {problem}")
        if problem:
            print(f"torch_rope: no compiled Metal library, the source will be used: {problem}", file=sys.stderr)
        return b"" if problem else (path / "rope.metallib").read_bytes()


def write(out: Path) -> None:
    """Only where something has changed, so that ninja does not compile it again."""
    text = source()
    compiled = library(text)
    numbers = ", ".join(map(str, compiled or b"\0"))
    made = (
        '#include "csrc/mps/source.h"\n'
        f'const char rope::mps::kSource[] = R"METAL({text})METAL";\n'
        f"const unsigned char rope::mps::kLibrary[] = {{{numbers}}};\n"
        f"const std::size_t rope::mps::kLibrarySize = {len(compiled)};\n"
    )
    if not out.exists() or out.read_text() != made:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(made)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
