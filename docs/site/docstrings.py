"""Turns the marks of Sphinx in docstrings into Markdown: roles into links, and literal blocks into code blocks."""

import re
import textwrap
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
ROLE = re.compile(r":(?:func|mod|class|meth|data):`~?([^`]+)`")
LITERAL = re.compile(r"^( *)(.*?)::\n\n((?:\1 +.*\n?|[ ]*\n)+)", re.M)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value, obj)


def markdown(text: str, obj: griffe.Object) -> str:
    """Returns a docstring in Markdown."""

    def role(found):
        name = found[1]
        scope = obj
        while scope and not name.startswith("torch_rope"):
            if name.split(".")[0] in scope.members:
                name = f"{scope.path}.{name}"
            scope = scope.parent
        path = ROOT / name.replace(".", "/")
        is_module = path.with_suffix(".py").exists() or path.is_dir()
        if is_module or not name.startswith("torch_rope."):  # a module has no heading to link to
            return f"`{found[1]}`"
        return f"[`{found[1]}`][{name}]"

    def literal(found):
        indent, label, code = found[1], found[2].strip(), textwrap.dedent(found[3]).strip("\n")
        label = label and f"{label}:\n\n"
        fenced = f"{label}```python\n{code}\n```\n"
        return textwrap.indent(fenced, indent) + "\n"

    return ROLE.sub(role, LITERAL.sub(literal, text))
