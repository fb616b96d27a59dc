"""Makes the block of text from a report. It uses nothing but the report, so the JSON file says all that the block says."""

import textwrap
from collections import Counter

from torch_rope.selfcheck.kernels import FAMILIES, TYPES, exists

DTYPES = "float32", "float16", "bfloat16", "float64"
MOST_FAILURES = 8  # how many different failures the block describes
WIDTH = 118


def outcome(group: dict) -> str:
    """Returns the result of a group in a few words."""
    ran = group["passed"] + group["failed"] + group["skipped"]
    left = group["cases"] - ran  # a group begins few cases after its time
    if group["status"] == "failed":
        return f"FAILED {group['failed']} of {ran}"
    if group["status"] == "skipped":
        return f"skipped: {shorten(group['reasons'][0] if group['reasons'] else 'no case ran', 200)}"
    worst = f", {group['worst'][0]:.0%}" if group["worst"][0] >= 0 else ""
    skipped = f", {group['skipped']} skipped" if group["skipped"] else ""
    return f"{group['passed']} ok{worst}{skipped}" + (f", no time for {left}" if left else "")


def shorten(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]} ..."


def wrap(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def failures(report: dict) -> list[tuple[dict, dict]]:
    return [(group, failure) for group in report["groups"] for failure in group["failures"]]


def suspects(report: dict) -> dict[str, int]:
    """Returns the kernels that explain the failed cases, and how many cases each explains.

    A failed case is explained by the kernel that fails most often of those that it ran. If several kernels fail equally
    often, it is the one that explains most cases.
    """
    left = [set(failure["kernels"]) for _, failure in failures(report) if failure["kernels"]]
    found: dict[str, int] = {}
    while left:
        explained = Counter(name for names in left for name in names)

        def rank(name: str, explained=explained):
            counts = report["kernels"].get(name, {"passed": 0, "failed": 1})
            return counts["failed"] / max(counts["passed"] + counts["failed"], 1), explained[name], name

        worst = max(explained, key=rank)
        found[worst] = explained[worst]
        left = [names for names in left if worst not in names]
    return found


def pipelines(report: dict) -> dict[str, dict]:
    """Returns the times of making each kernel's pipelines in milliseconds, and its calls, in all processes together."""
    found: dict[str, dict] = {}
    for process in report["processes"]:
        for name, ms, calls in process:
            entry = found.setdefault(name, {"ms": [], "calls": 0})
            entry["ms"].append(ms)
            entry["calls"] += calls
    return found


def kernel_table(report: dict) -> list[str]:
    made, blamed = pipelines(report), suspects(report)
    if not made:
        return []
    lines = ["Metal kernels: result, ms for the slowest of its n pipelines, calls"]
    lines.append(f"{'':<24}" + "".join(f"{kind:<31}" for kind in TYPES).rstrip())
    for family in FAMILIES:
        starts = {f"{family}_{kind}": kind for kind in TYPES}
        rest = [
            name.removeprefix(start)
            for name in {*made, *report["kernels"]}
            for start in starts
            if name.startswith(start)
        ]
        for variant in sorted({*rest, *FAMILIES[family]}):
            cells = []
            for start in starts:
                name = start + variant
                entry = made.get(name)
                result = "FAILED" if name in blamed else "ok" if entry and entry["calls"] else "not run"
                times = f" {max(entry['ms']):.1f} ms/{len(entry['ms'])}, {entry['calls']}" if entry else ""
                cells.append(f"{result}{times}" if exists(starts[start], variant) else "")
            if report["only"] and all(cell in ("", "not run") for cell in cells):
                continue
            lines.append(f"{family + variant:<24}" + "".join(f"{cell:<31}" for cell in cells).rstrip())
    times = [ms for name, entry in made.items() for ms in entry["ms"] if not name.startswith("library")]
    lines.append(f"{len(times)} pipelines in {len(report['processes'])} processes, {sum(times):.0f} ms in all")
    libraries = {name: entry for name, entry in made.items() if name.startswith("library")}
    if libraries:
        times = [f"{name} {', '.join(f'{ms:.0f}' for ms in entry['ms'][:3])}" for name, entry in libraries.items()]
        lines += wrap(f"ms to load or compile, in the first processes: {'; '.join(times)}")
    return [*lines, ""]


def has_dtype(group: dict) -> bool:
    """Returns whether the name of a group ends in a dtype."""
    return group["name"].rpartition(" ")[2] in DTYPES


def value_table(report: dict) -> list[str]:
    """Returns the table of the groups that exist for each dtype."""
    rows: dict[str, dict[str, str]] = {}
    for group in report["groups"]:
        name, _, dtype = group["name"].rpartition(" ")
        if has_dtype(group):
            cell = "skipped" if group["status"] == "skipped" else outcome(group)
            rows.setdefault(name, {})[dtype] = cell
    if not rows:
        return []
    dtypes = [dtype for dtype in DTYPES if any(dtype in row for row in rows.values())]
    lines = [f"{'cases, worst part of the allowed error':<40}" + "".join(f"{d:<20}" for d in dtypes).rstrip()]
    for name, row in rows.items():
        lines.append(f"{name:<40}" + "".join(f"{row.get(d, ''):<20}" for d in dtypes).rstrip())
    return [*lines, ""]


def other_groups(report: dict) -> list[str]:
    others = [g for g in report["groups"] if not has_dtype(g)]
    passed = [f"{g['name']} ({outcome(g)})" for g in others if g["status"] == "passed"]
    lines = wrap(f"passed: {'; '.join(passed)}") if passed else []
    skipped: dict[str, list[str]] = {}
    for group in report["groups"]:
        for reason in group["reasons"][:2]:
            skipped.setdefault(reason, []).append(group["name"])
    for reason, names in skipped.items():
        lines += wrap(f"skipped: {'; '.join(names)}: {shorten(reason, 180)}")
    return [*lines, ""] if lines else []


def output_of(failure: dict) -> list[str]:
    """Returns the lines of a crashed process that say why it crashed."""
    lines = [line for line in failure.get("output", "").splitlines() if line.strip()]
    fatal = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines))
    return [shorten(line, WIDTH - 6) for line in lines[max(fatal - 3, 0) : fatal + 1]]


def kind_of(group: dict, failure: dict) -> str:
    """Returns a text that is the same for failures that need to be described only once."""
    if failure["kernels"] and failure["kernels"][0].startswith("library"):
        return failure["kernels"][0]
    # A pipeline that cannot be made fails many cases with one message. Wrong values differ from case to case.
    return group["name"] if failure["error"].startswith("AssertionError") else failure["error"][:200]


def failure_list(report: dict) -> list[str]:
    """Describes a failure for each kernel that fails, and then failures of other kinds."""
    found = failures(report)
    if not found:
        return []
    shown: list[tuple[dict, dict]] = []
    for name in suspects(report):
        with_it = [pair for pair in found if name in pair[1]["kernels"]]
        shown.append(min(with_it, key=lambda pair: len(pair[1]["kernels"])))
    kinds = {kind_of(*pair) for pair in shown}
    for pair in found:
        if kind_of(*pair) not in kinds:
            kinds.add(kind_of(*pair))
            shown.append(pair)
    lines = []
    for group, failure in shown[:MOST_FAILURES]:
        kernels = ", ".join(failure["kernels"]) or "unknown"
        lines += wrap(f"FAILED {group['name']}, case {failure['case'] or 1}, kernels: {kernels}")
        for text in (failure.get("call", ""), *output_of(failure)):
            lines += [f"    {line}" for line in wrap(shorten(text, 330))]
        error = [line for line in failure["error"].splitlines() if line.strip()]
        lines += [f"    {shorten(line, WIDTH)}" for line in error[:12]]
    if len(shown) > MOST_FAILURES:
        lines.append(f"and {len(shown) - MOST_FAILURES} other failures")
    others = [group["name"] for group in report["groups"] if group["failures"] and not has_dtype(group)]
    if others:
        lines += wrap(f"failed: {'; '.join(others)}")
    name = found[0][0]["name"]
    return [*lines, f"to repeat: python -m torch_rope.selfcheck --device {report['device']} --only '{name}'", ""]


def tables(report: dict) -> list[str]:
    """Returns the tables of measurements."""
    rows: dict[str, list[dict]] = {}
    for entry in report["rows"]:
        rows.setdefault(entry["table"], []).append(entry["row"])
    lines = []
    for name in [name for name in rows if name.startswith("first calls")]:
        for row in rows.pop(name):
            lines += wrap(f"{name} of a process, ms: " + ", ".join(f"{case} {ms:.1f}" for case, ms in row.items()))
    if lines:
        lines.append("")
    for name, table in rows.items():
        heads = "1 new token" if name == "decode" else "bfloat16, 32 heads of q and 8 of k, head_dim 128"
        waits = "; the GPU begins when the host waits" if report["device"].startswith("mps") else ""
        lines.append(f"{name}: {heads}{waits}")
        texts = [
            {key: f"{value:,.1f}" if isinstance(value, float) else str(value) for key, value in row.items()}
            for row in table
        ]
        widths = {key: max(len(key), *(len(row[key]) for row in texts)) + 2 for key in texts[0]}
        for row in ({key: key for key in widths}, *texts):
            cells = [
                f"{row[key]:<{width}}" if key in ("call", "by") else f"{row[key]:>{width}}"
                for key, width in widths.items()
            ]
            lines.append("".join(cells).rstrip())
        lines.append("")
    return lines


def block(report: dict) -> str:
    """Returns the text to paste into an issue."""
    library = f", Metal library: {report['metal_library']}" if "metal_library" in report else ""
    lines = [report["versions"], report["machine"], f"device {report['device']}: {report['device_name']}{library}", ""]
    lines += kernel_table(report) + value_table(report) + other_groups(report) + failure_list(report) + tables(report)
    if names := suspects(report):
        lines += wrap(
            "kernels that fail: " + ", ".join(f"{name} ({n} case{'s' * (n > 1)})" for name, n in names.items())
        )
    counts = Counter(group["status"] for group in report["groups"])
    cases = sum(group["passed"] for group in report["groups"])
    summary = (
        f"{counts['passed']} checks passed ({cases} cases), {counts['failed']} failed, {counts['skipped']} skipped"
    )
    return "\n".join([*lines, f"{summary}, in {report['seconds']:.0f} s"])
