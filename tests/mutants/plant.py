"""Finds in a source the texts that mistakes replace, and writes a source that contains all mistakes at once.

The environment variable ROPE_MUTANT selects the one mistake that a process makes. Without it a process makes none.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# These functions are not instrumented, because the emulator and the simulator check every load of a kernel. The number
# is read once in each process; a fork reads it again.
HEADER = r"""#pragma once
extern "C" {
char* getenv(const char*) noexcept;
int atoi(const char*) noexcept;
int pthread_atfork(void (*)(), void (*)(), void (*)()) noexcept;
}
namespace {
#define ROPE_PLAIN __attribute__((noinline, no_sanitize("thread", "address", "undefined"), unused))
int rope_mutant_number = -1;
ROPE_PLAIN void rope_forget_mutant() { rope_mutant_number = -1; }
ROPE_PLAIN __attribute__((const)) bool rope_mutant(int n) {
  if (rope_mutant_number < 0) {
    const char* const text = getenv("ROPE_MUTANT");
    rope_mutant_number = text ? atoi(text) : 0;
    pthread_atfork(nullptr, nullptr, rope_forget_mutant);
  }
  return rope_mutant_number == n;
}
}  // namespace
"""


@dataclass
class Mutant:
    """A mistake: text[start:end] of a file, which is `old`, is replaced by `new`."""

    file: str
    start: int
    end: int
    old: str
    new: str
    what: str  # what is wrong
    line: int
    number: int = 0

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def locate(file: str, text: str, pattern: str) -> tuple[int, int]:
    """Returns start and end of `pattern` in text, or of the part of it that is in «». It must occur exactly once."""
    before, mark, rest = pattern.partition("«")
    inside, _, after = rest.partition("»") if mark else (pattern, "", "")
    whole = pattern.replace("«", "").replace("»", "")
    if (n := text.count(whole)) != 1:
        raise SystemExit(f"{file}: the pattern occurs {n} times but must occur once: {pattern}")
    start = text.index(whole) + (len(before) if mark else 0)
    return start, start + len(inside)


def written(sources: dict[str, str], table: Iterable[tuple[str, str, str, str]]) -> list[Mutant]:
    """Returns the mutants of a table of (what is wrong, file, pattern, replacement)."""
    mutants = []
    for what, file, old, new in table:
        text = sources[file]
        start, end = locate(file, text, old)
        mutants.append(Mutant(file, start, end, text[start:end], new, what, text.count("\n", 0, start) + 1))
    return mutants


def code_of(text: str) -> str:
    """Returns text with spaces instead of comments, strings, static_asserts and preprocessor lines."""
    blank = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\bstatic_assert\(.*?\);|^#(?:if|include|pragma|elif)[^\n]*'
    return re.sub(blank, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S | re.M)


def neighbours(sources: dict[str, str], table: list[str]) -> list[Mutant]:
    """Returns the mutants that use a neighbour of a name instead of the name. table: see NEIGHBOURS in mistakes.py."""
    unique = {}
    for file, text in sources.items():
        code = code_of(text)
        for line in table:
            owners, colon, names = line.rpartition(":")
            names, owner = names.split(), "|".join(owners.split()) or r"\w+"
            before = r"(?<![\w.>])" if colon and not owners else rf"\b(?:\w+(?:\.|->))*(?:{owner})(?:\.|->)"
            for name, other in zip(names, names[1:] + names[:1], strict=True):
                for found in re.finditer(rf"{before}{re.escape(name)}(?![\w\[(])", code):
                    new = found[0][: -len(name)] + other
                    around = text[text.rfind("\n", 0, found.start()) + 1 : text.find("\n", found.end())].strip()
                    what = f"{found[0]} -> {new} in `{around}`"
                    at = (file, found.start(), found.end(), found[0], new, what, text.count("\n", 0, found.start()) + 1)
                    if name != other:
                        unique[file, found.start(), new] = Mutant(*at)
    return sorted(unique.values(), key=lambda m: (m.file, m.start))


def planted(text: str, mutants: list[Mutant], start: int = 0, end: int | None = None) -> str:
    """Returns text[start:end] with all these mutants in it. Each takes effect if rope_mutant(its number) is true."""
    end = len(text) if end is None else end
    parts, at = [], start
    for m in sorted(mutants, key=lambda m: (m.start, -m.end)):
        if m.start < at:
            continue  # it is inside the last one or replaces the same text, and is already written
        here = [o for o in mutants if o.start < m.end and m.start < o.end]
        if crossing := [o for o in here if o.start < m.start or o.end > m.end]:
            raise SystemExit(f"two mutants overlap, but neither is inside the other: {m} and {crossing[0]}")
        now = planted(text, [o for o in here if (o.start, o.end) != (m.start, m.end)], m.start, m.end)
        for o in here:
            if (o.start, o.end) == (m.start, m.end):
                if o.old.rstrip().endswith((";", "}")):  # whole statements, not an expression
                    now = f"{{ if (rope_mutant({o.number})) {{ {o.new} }} else {{ {now} }} }}"
                else:
                    now = f"(rope_mutant({o.number}) ? ({o.new}) : ({now}))"
        parts += [text[at : m.start], now]
        at = m.end
    return "".join([*parts, text[at:end]])
