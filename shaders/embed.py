"""Writes shaders/*.metal, with their headers inlined, into a C++ file that defines kShaders of csrc/mps/source.h.

python shaders/embed.py OUT.cpp
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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


def write(out: Path) -> None:
    """Writes the C++ file, but only if it would change, so that ninja does not compile it again needlessly."""
    rows = "".join(f'    {{"{name}", R"METAL({text})METAL"}},\n' for name, text in sources().items())
    made = (
        f'#include "csrc/mps/source.h"\n\nconst rope::mps::Shader rope::mps::kShaders[kShaderCount] = {{\n{rows}}};\n'
    )
    if not out.exists() or out.read_text() != made:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(made)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
