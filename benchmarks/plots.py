"""Draws the pictures of the pages as SVG: the time of GPUs and CPUs, and the accuracy.

Each picture has its own background. If the reader's system is dark, the background and the ink change together. The
colours of the implementations have a contrast of at least 3:1 with both. The same lines give the same bytes.
"""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from .cases import count

PAPER, INK, MUTED, GRID = "#ffffff", "#1f2328", "#59636e", "#dfe3e8"
DARK = {PAPER: "#0d1117", INK: "#f0f6fc", MUTED: "#9198a1", GRID: "#2a313a"}

# The colour and the marker of each implementation that is drawn. An earlier curve covers a later one. Two may have the
# same colour if they are never in the same picture.
STYLES = {
    "torch_rope": ("#e03131", "o"),
    "torch_rope in place": ("#c2255c", "s"),
    "torch_rope inv_freq": ("#e8590c", "D"),
    "torch_rope module": ("#f08c00", "^"),
    "torch_rope float32 inv_freq": ("#e8590c", "D"),
    "transformers": ("#1c7ed6", "v"),
    "transformers compiled": ("#3b5bdb", "^"),
    "torchtune": ("#2b8a3e", "<"),
    "rotary-embedding-torch": ("#ae3ec9", ">"),
    "mlx": ("#0c8599", "P"),
    "one rounding": (MUTED, ""),
    "SGLang's way": ("#2b8a3e", "<"),
    "flashinfer in place": ("#0c8599", "P"),
    "vllm in place": ("#1c7ed6", "v"),
    "copy": (MUTED, ""),
}
LABELS = {"copy": "copy_, for comparison", "mlx": "mlx, made for GPUs"}
LABELS |= {"flashinfer in place": "FlashInfer", "vllm in place": "vLLM"}

SETTINGS = {
    "svg.fonttype": "none",  # text remains text and does not become outlines
    "svg.hashsalt": "torch_rope",  # gives elements the same names every time
    "font.size": 9,  # 12 pixels at the width of GitHub's pages
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
WIDTH, HEIGHT = 622.5, 345  # points; 830 and 460 pixels


def plot(cpu: list[dict], gpu: list[dict], folder: Path) -> list[Path]:
    """Draws speed.svg and accuracy.svg from the lines of result files, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        figures = {"speed": speed([gpu, cpu]), "accuracy": accuracy(cpu)}
        files = {folder / f"{name}.svg": figure for name, figure in figures.items()}
        for file, figure in files.items():
            _save(figure, file)
    return [*files]


def speed(machines: list[list[dict]]) -> Figure:
    """Draws the time against the number of tokens, with a band between the quartiles, in a panel for each machine."""
    figure = _figure("Time against tokens", "32/8 heads of 128, bfloat16", HEIGHT + 75)
    for i, lines in enumerate(machines):
        axes = _axes(figure, 50 + 295 * i, 255, 115, xlabel="tokens")
        axes.set_title(lines[0]["name"], fontsize=9, loc="left", pad=4)
        points = [
            (x["implementation"], x["seq"], *(x.get(us, x["median_us"]) for us in ("median_us", "q1_us", "q3_us")))
            for x in lines
            if x.get("group") == "sweep" and x["status"] == "timed" and x["heads"] == 32
        ]
        drawn = _draw(axes, [point for point in points if point[0] != "torch_rope inv_freq"])
        axes.yaxis.set_major_formatter(
            lambda us, _: f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} µs"
        )
        labels = {name: LABELS.get(name, name) for name in STYLES if name in drawn}
        _legend(axes, drawn, labels, loc="upper left", bbox_to_anchor=(-0.02, -0.12), ncols=2, columnspacing=1)
    return figure


def accuracy(lines: list[dict]) -> Figure:
    """Draws the largest error of a pair, relative to its magnitude, against the position, in a panel for each dtype."""
    words = f"{lines[0]['name']} · torch {lines[0]['torch']} · largest of an octave"
    figure, axes = _figure("Error against position", words, HEIGHT + 75), None
    for i, dtype in enumerate(("float32", "bfloat16")):
        axes = _axes(figure, 50 + 285 * i, 270, 115, sharey=axes, xlabel="position")
        axes.set_title(dtype, fontsize=9, loc="left", pad=4)
        axes.tick_params(labelleft=i == 0)
        of_dtype = [x for x in lines if x.get("max_relative") and x["dtype"] == dtype]
        points = [(x["implementation"], 2 ** x["octave"], x["max_relative"]) for x in of_dtype]
        labels = _distinct(points)
        drawn = _draw(axes, [point for point in points if point[0] in labels])
        _legend(axes, drawn, labels, loc="upper left", bbox_to_anchor=(-0.02, -0.12))
    figure.axes[0].set_ylabel("error / magnitude of the pair")
    return figure


def _distinct(points: list[tuple]) -> dict[str, str]:
    """Returns labels of curves. One curve stands for all that differ from it by less than half."""
    curves = {name: {x: y for n, x, y in points if n == name} for name in STYLES}
    groups = {}
    for name, curve in ((name, curve) for name, curve in curves.items() if curve):
        near = (first for first in groups if all(2 / 3 < y / curves[first][x] < 3 / 2 for x, y in curve.items()))
        groups.setdefault(next(near, name), []).append(name)
    return {n: ", ".join(same) if len(same) < 3 else f"{n} and {len(same) - 1} others" for n, same in groups.items()}


def _figure(title: str, subtitle: str, height: float = HEIGHT) -> Figure:
    figure = Figure((WIDTH / 72, height / 72), dpi=72, facecolor=PAPER)  # at 72 dpi a pixel is a point
    figure.text(10 / WIDTH, 1 - 20 / height, title, fontsize=12, fontweight="bold")
    figure.text(10 / WIDTH, 1 - 36 / height, subtitle, color=MUTED)
    return figure


def _axes(figure: Figure, left: float, width: float, below: float = 38, **options) -> Axes:
    """Adds axes under the titles. left, width and below are in points."""
    height = figure.bbox.height
    box = (left / WIDTH, below / height, width / WIDTH, (height - below - 58) / height)
    return figure.add_axes(box, facecolor="none", **options)


def _draw(axes: Axes, points: list[tuple]) -> dict[str, Line2D]:
    """Draws points (implementation, x, y) or (implementation, x, y, low, high) as curves, and returns their lines."""
    axes.set(xscale="log", yscale="log")
    axes.margins(x=0.02)
    lines = {}
    for name, (colour, marker) in reversed(STYLES.items()):  # the first is drawn last, on top of the others
        if not (of_name := sorted(point[1:] for point in points if point[0] == name)):
            continue
        x, y, *band = zip(*of_name, strict=True)
        width, size = (2.4, 5) if name.startswith("torch_rope") else (1.3, 4)
        style = {"color": colour, "marker": marker, "linewidth": width, "markersize": size, "markeredgewidth": 0}
        dashes, height = ("-", 2) if marker else ("--", 3)
        (lines[name],) = axes.plot(x, y, dashes, zorder=height, **style)
        if band:
            axes.fill_between(x, *band, color=colour, alpha=0.2, linewidth=0)
    powers = max(point[1] for point in points).bit_length()
    axes.set_xticks([2**i for i in range(0, powers, max(1, round(powers * 35 / axes.bbox.width)))])
    axes.xaxis.set_major_formatter(lambda x, _: count(int(x)))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,), numticks=12))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}" if y >= 0.01 else f"{y:.0e}".replace("e-0", "e-"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    return lines


def _legend(axes: Axes, drawn: dict[str, Line2D], labels: dict[str, str], **options) -> None:
    legend = axes.legend([drawn[name] for name in labels], labels.values(), **options)
    for text in legend.get_texts():
        text.set_fontweight("bold" if text.get_text().startswith("torch_rope") else "normal")


def _save(figure: Figure, file: Path) -> None:
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": f"matplotlib {matplotlib.__version__}"})
    # Each element contains its colour, so the rules select elements by their colour and override it.
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    text = file.read_text(encoding="utf-8").replace("<defs>", style + "<defs>", 1)
    file.write_text(text, encoding="utf-8")
