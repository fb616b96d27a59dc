"""Writes shaders/*.metal, with their headers inlined, into a C++ file that defines the variables of csrc/mps/source.h.

    python shaders/embed.py OUT.cpp

Metal compiles these texts on the user's machine, each at the first call that needs it. If xcrun finds Metal's compiler,
the file also holds the compiled libraries. TORCH_ROPE_METALLIB=0 leaves them out; TORCH_ROPE_METALLIB=1 makes a missing
compiler an error.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Metal 3.1 is the first with bfloat.
FLAGS = ["-std=metal3.1", "-mmacosx-version-min=14.0", "-fno-fast-math", "-ffp-contract=off", "-O2"]


def sources() -> dict[str, str]:
    """Returns the text of each shader by the name of its file.

    A text has no quoted includes, because at run time Metal has no headers of this project.
    """

    def inlined(path: Path, done: set[Path]) -> str:
        if path in done:
            return ""
        done.add(path)
        return re.sub(
            r'^#include "(.+)"\n', lambda m: inlined((path.parent / m[1]).resolve(), done), path.read_text(), flags=re.M
        )

    texts = {path.stem: inlined(path, set()) for path in sorted(ROOT.glob("shaders/*.metal"))}
    for name, text in texts.items():
        if not text.isascii():
            found = "".join({c for c in text if not c.isascii()})
            raise ValueError(
                f"{name}.metal contains {found} but must be ASCII, because Metal's compiler takes only ASCII"
            )
    return texts


def library(text: str) -> bytes:
    """Returns the compiled library. It is empty if there is no compiler or TORCH_ROPE_METALLIB is 0."""
    setting = os.environ.get("TORCH_ROPE_METALLIB")
    if setting == "0" or not (setting or shutil.which("xcrun")):
        return b""
    with tempfile.TemporaryDirectory() as folder:
        source, air, out = (f"{folder}/rope.{kind}" for kind in ("metal", "air", "metallib"))
        Path(source).write_text(text)
        try:
            for command in ["metal", *FLAGS, "-c", source, "-o", air], ["metallib", air, "-o", out]:
                subprocess.run(["xcrun", "-sdk", "macosx", *command], check=True, capture_output=True, text=True)
            return Path(out).read_bytes()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            problem = getattr(error, "stderr", "") or error
    if setting:
        sys.exit(f"torch_rope: TORCH_ROPE_METALLIB is {setting}, but the shaders were not compiled: {problem}")
    print(f"torch_rope: the shaders will be compiled at the first call, not now: {problem}", file=sys.stderr)
    return b""


def write(out: Path) -> None:
    """Writes the C++ file, but only if it would change, so that ninja does not compile it again needlessly."""
    texts = sources()
    compiled = {name: library(text) for name, text in texts.items()}
    made = ['#include "csrc/mps/source.h"\n']
    for name, text in texts.items():
        made.append(f'static const char {name}_source[] = R"METAL({text})METAL";\n')
        numbers = ", ".join(map(str, compiled[name] or b"\0"))
        made.append(f"static const unsigned char {name}_library[] = {{{numbers}}};\n")
    rows = [f'{{"{name}", {name}_source, {name}_library, {len(compiled[name])}}}' for name in texts]
    made.append(f"const rope::mps::Shader rope::mps::kShaders[kShaderCount] = {{{', '.join(rows)}}};\n")
    if not out.exists() or out.read_text() != "".join(made):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(made))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
