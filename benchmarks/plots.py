"""Draws the pictures of one result file as SVG: bandwidth, latency of a decode step, accuracy and memory.

Each picture has its own background. If the reader's system is dark, the background and the ink change together. The
colours of the implementations have a contrast of at least 3:1 with both backgrounds. The same lines give the same
bytes.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

PAPER, INK, MUTED, GRID = "#ffffff", "#1f2328", "#59636e", "#dfe3e8"
DARK = {PAPER: "#0d1117", INK: "#f0f6fc", MUTED: "#9198a1", GRID: "#2a313a"}

# The colour and the marker of each implementation. Bars have this order, and an earlier curve covers a later one. Two
# implementations may have the same colour if they are never in the same picture.
STYLES = {
    "torch_rope": ("#e03131", "o"),
    "torch_rope in place": ("#c2255c", "s"),
    "torch_rope inv_freq": ("#e8590c", "D"),
    "torch_rope tables": ("#c2255c", "s"),
    "torch_rope float32 inv_freq": ("#e8590c", "D"),
    "transformers": ("#1c7ed6", "v"),
    "transformers compiled": ("#3b5bdb", "^"),
    "torchtune": ("#2b8a3e", "<"),
    "rotary-embedding-torch": ("#ae3ec9", ">"),
    "mlx": ("#0c8599", "P"),
    "torch.onnx.ops": ("#a06a00", "X"),
    "onnxruntime": ("#7a6a4f", "d"),
    "xformers": ("#5c940d", "p"),
    "flash-attn": ("#7048e8", "h"),
    "flash-attn in place": ("#845ef7", "H"),
    "liger": ("#8d5a3a", "*"),
    "flashinfer": ("#0c8599", "8"),
    "flashinfer in place": ("#1098ad", "."),
    "SGLang's way": ("#2b8a3e", "<"),
    "FlashInfer's way": ("#0b7285", "8"),
    "one rounding": (MUTED, ""),
    "copy": (MUTED, ""),
}
UNKNOWN = (MUTED, ".")
LIMITS = {"one rounding": "one rounding: the limit", "copy": "copy: the limit"}  # the labels of dashed curves

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

Curves = dict[str, list[tuple[float, ...]]]  # implementation -> (x, y) or (x, y, low, high), sorted by x


def plot(lines: list[dict], folder: Path, suffix: str = "") -> list[Path]:
    """Draws bandwidth, decode, accuracy and memory from the lines of one result file.

    Args:
        lines: lines of the kinds machine, sample and accuracy. Cases without figures are not drawn.
        folder: the folder of the pictures, which is made if it does not exist.
        suffix: the end of the files' names, such as "-h200" for bandwidth-h200.svg.

    Returns:
        The paths of the files. If lines has no figures for a picture, the picture is not made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context(SETTINGS):
        for draw in (bandwidth, decode, accuracy, memory):
            if figure := draw(lines):
                files.append(folder / f"{draw.__name__}{suffix}.svg")
                _save(figure, files[-1])
    return files


def bandwidth(lines: list[dict]) -> Figure | None:
    """Draws needed_bytes / time against the number of tokens, with a band between the quartiles."""
    if not (samples := _timed(lines, "sweep")):
        return None
    figure = _figure("Bandwidth against tokens", _subtitle(lines, samples))
    times = ("median_us", "q3_us", "q1_us")
    curves = _curves(
        (x["implementation"], x["batch"] * x["seq"], *(x["needed_bytes"] / x[time] / 1e3 for time in times))
        for x in samples
    )
    axes = _axes(figure, 50, 425, xlabel="tokens", ylabel="needed bytes / time, GB/s")
    _draw(axes, curves)
    _label(axes, curves)
    return figure


def decode(lines: list[dict]) -> Figure | None:
    """Draws the time of a decode step against the batch, with a band between the quartiles."""
    if not (samples := _timed(lines, "decode")):
        return None
    figure = _figure("Latency of a decode step against batch", _subtitle(lines, samples))
    curves = _curves((x["implementation"], x["batch"], x["median_us"], x["q1_us"], x["q3_us"]) for x in samples)
    axes = _axes(figure, 50, 425, xlabel="sequences, one token each", ylabel="latency, µs")
    _draw(axes, curves)
    _label(axes, curves)
    return figure


def accuracy(lines: list[dict]) -> Figure | None:
    """Draws the largest error of a pair, relative to its magnitude, against the position, in a panel for each dtype."""
    measured = [x for x in lines if x["kind"] == "accuracy" and x.get("scaling") == "default" and x.get("max_relative")]
    dtypes = [dtype for dtype in ("float32", "bfloat16") if any(x["dtype"] == dtype for x in measured)]
    if not dtypes:
        return None
    height = HEIGHT + 45
    figure = _figure(
        "Error against position", _subtitle(lines, [], "largest of an octave, unscaled frequencies"), height
    )
    axes, drawn = None, {}
    for i, dtype in enumerate(dtypes):
        axes = _axes(figure, 50 + 285 * i, 270, 85, sharey=axes, xlabel="position")
        axes.set_title(dtype, fontsize=9, loc="left", pad=4)
        axes.tick_params(labelleft=i == 0)
        points = ((x["implementation"], 2 ** x["octave"], x["max_relative"]) for x in measured if x["dtype"] == dtype)
        drawn |= _draw(axes, _curves(points))
        for j, line in enumerate(axes.lines):
            line.set_markevery((j % 5, 5))  # many curves coincide, so each has its markers elsewhere
    figure.axes[0].set_ylabel("error / magnitude of the pair")
    # The ends of the curves coincide too, so there is a legend instead of labels.
    names = _ordered(drawn)
    legend = figure.legend([drawn[x] for x in names], [LIMITS.get(x, x) for x in names], ncols=4, loc="lower left")
    for text in legend.get_texts():
        text.set_fontweight(_weight(text.get_text()))
    return figure


def memory(lines: list[dict]) -> Figure | None:
    """Draws bars of peak_bytes / bytes of q and k.

    The number of tokens is the one for which most implementations have figures. If several numbers have equally many,
    it is 4096, or else the largest of them.
    """
    sizes = defaultdict(dict)
    for x in _timed(lines, "sweep"):
        if x.get("peak_bytes") is not None:
            sizes[x["batch"] * x["seq"]].setdefault(x["implementation"], x)
    if not sizes:
        return None
    tokens = max(sizes, key=lambda tokens: (len(sizes[tokens]), tokens == 4096, tokens))
    names = _ordered(sizes[tokens])
    samples = [sizes[tokens][name] for name in names]
    subtitle = _subtitle(lines, samples, f"{tokens} tokens")
    figure = _figure("Memory allocated by a call", subtitle, 95 + 17 * len(names))
    axes = _axes(figure, 165, 415, xlabel="peak bytes above the inputs / bytes of q and k")
    for y, (name, x) in enumerate(zip(names, samples, strict=True)):
        itemsize = {"float32": 4, "float64": 8}.get(x["dtype"], 2)
        ratio = x["peak_bytes"] / (tokens * (x["heads"] + x["kv_heads"]) * x["head_dim"] * itemsize)
        axes.barh(y, ratio, 0.62, color=STYLES.get(name, UNKNOWN)[0])
        axes.annotate(f"{ratio:.2f}", (ratio, y), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(names)), names, color=INK)
    for label in axes.get_yticklabels():
        label.set_fontweight(_weight(label.get_text()))
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set_xlim(0, max(axes.get_xlim()[1], 1))
    return figure


def _timed(lines: list[dict], group: str) -> list[dict]:
    """Returns the timed lines of the cases that differ from the first case of the group only in size."""
    samples = [x for x in lines if x["kind"] == "sample" and x["group"] == group]
    form = ("op", "head_dim", "rotary_dim", "dtype", "layout", "interleaved", "mode")
    return [x for x in samples if x["status"] == "timed" and all(x[key] == samples[0][key] for key in form)]


def _ordered(names: Iterable[str]) -> list[str]:
    order = list(STYLES)
    return sorted(names, key=lambda name: (order.index(name) if name in STYLES else len(order), name))


def _weight(name: str) -> str:
    return "bold" if name.startswith("torch_rope") else "normal"


def _curves(points: Iterable[tuple]) -> Curves:
    """Returns curves from points (implementation, x, y, ...). Of several points at one x, the first counts."""
    curves = defaultdict(dict)
    for name, x, *rest in points:
        curves[name].setdefault(x, (x, *rest))
    return {name: [curve[x] for x in sorted(curve)] for name, curve in curves.items()}


def _subtitle(lines: list[dict], samples: list[dict], end: str = "") -> str:
    machine = next((x for x in lines if x["kind"] == "machine"), {})
    words = [machine.get("name"), f"torch {machine['torch']}" if "torch" in machine else ""]
    heads = {}  # large sizes may have fewer heads, to fit the memory of the machine
    for x in samples:
        heads.setdefault(f"{x['heads']}/{x['kv_heads']}", f"{_binary(x['batch'] * x['seq'])} tokens")
    if samples:
        usual, *others = heads
        but = "".join(f" ({other} at {heads[other]})" for other in others)
        words += [f"{usual} heads of {samples[0]['head_dim']}{but}", samples[0]["dtype"]]
    return " · ".join(word for word in [*words, end] if word)


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


def _draw(axes: Axes, curves: Curves) -> dict[str, Line2D]:
    """Draws curves on logarithmic axes and returns their lines."""
    axes.set(xscale="log", yscale="log")
    axes.margins(x=0.02)
    lines = {}
    for name in _ordered(curves)[::-1]:  # the first curve is drawn last, on top of the others
        colour, marker = STYLES.get(name, UNKNOWN)
        x, y, *band = zip(*curves[name], strict=True)
        width, size = (2.4, 5) if name.startswith("torch_rope") else (1.3, 4)
        style = {"color": colour, "marker": marker, "linewidth": width, "markersize": size, "markeredgewidth": 0}
        dashes, height = ("--", 3) if name in LIMITS else ("-", 2)
        (lines[name],) = axes.plot(x, y, dashes, zorder=height, **style)
        if band:
            axes.fill_between(x, *band, color=colour, alpha=0.2, linewidth=0)
    powers = max(curve[-1][0] for curve in curves.values()).bit_length()
    axes.set_xticks([2**i for i in range(0, powers, max(1, round(powers * 35 / axes.bbox.width)))])
    axes.xaxis.set_major_formatter(lambda x, _: _binary(x))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,), numticks=12))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}" if y >= 0.01 else f"{y:.0e}".replace("e-0", "e-"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    return lines


def _binary(x: float) -> str:
    """Returns a number as text in units of 1024, such as 64k for 65536."""
    return next((f"{x / size:g}{unit}" for size, unit in ((2**20, "M"), (2**10, "k")) if x >= size), f"{x:g}")


def _label(axes: Axes, curves: Curves) -> None:
    """Writes names at the right of the axes, each with a dotted line from the end of its curve."""
    to_axes = axes.transData - axes.transAxes
    ends = {name: to_axes.transform(curves[name][-1][:2]) for name in _ordered(curves)[::-1]}
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = _spread([ends[name][1] for name in names], 13 / axes.bbox.height)
    point = 1 / axes.bbox.width
    for name, height in zip(names, heights, strict=True):
        colour, marker = STYLES.get(name, UNKNOWN)
        (x, y), edge = ends[name], 1 + 16 * point
        line = {"color": colour, "transform": axes.transAxes, "clip_on": False, "linewidth": 0.8}
        axes.plot([x, 1 + 2 * point, edge], [y, height, height], ":", **line)
        axes.plot([edge], [height], marker, **line, markersize=5, markeredgewidth=0)
        axes.text(
            edge + 6 * point,
            height,
            LIMITS.get(name, name),
            transform=axes.transAxes,
            va="center",
            fontweight=_weight(name),
        )


def _spread(wanted: list[float], gap: float) -> list[float]:
    """Returns heights from 0 to 1, at least a gap apart, as near as possible to the wanted heights.

    The sum of the squared distances is least. The wanted heights must be in ascending order.
    """
    gap = min(gap, 1 / max(len(wanted) - 1, 1))
    groups = []  # groups of neighbours that touch: (the mean of their heights minus the gaps below them, their number)
    for i, height in enumerate(wanted):
        mean, count = height - i * gap, 1
        while groups and groups[-1][0] > mean:
            other, others = groups.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        groups.append((mean, count))
    means = [mean for mean, count in groups for _ in range(count)]
    return [min(max(mean, 0), 1 - (len(wanted) - 1) * gap) + i * gap for i, mean in enumerate(means)]


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
