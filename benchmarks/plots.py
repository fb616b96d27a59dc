"""Pictures of one result file: achieved bandwidth, latency of decode, accuracy and memory, as SVG.

Each paints its own background, and changes that and its ink together where the reader's system is dark; the colours of
the implementations stand out from both by 3:1 and more. The same lines give the same bytes.
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

# Colour and marker of each implementation, in the order of bars and of what covers what. Some never meet in a picture.
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
    "one rounding": (MUTED, ""),
    "copy": (MUTED, ""),
}
UNKNOWN = (MUTED, ".")
LIMITS = {"one rounding": "one rounding: the limit", "copy": "copy: the limit"}  # dashed, and their labels

SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "torch_rope",  # the same names of elements every time
    "font.size": 9,  # 12 pixels where the picture is as wide as GitHub shows it
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
WIDTH, HEIGHT = 622.5, 345  # points: 830 and 460 pixels

Curves = dict[str, list[tuple[float, ...]]]  # implementation: (x, y) or (x, y, low, high), by x


def plot(lines: list[dict], folder: Path, suffix: str = "") -> list[Path]:
    """Draws bandwidth, decode, accuracy and memory from the lines of one result file.

    Args:
        lines: of the kinds machine, sample and accuracy. What was not timed or not measured is not drawn.
        folder: where to; made if absent.
        suffix: of the files' names: "-h200" for bandwidth-h200.svg.

    Returns:
        The files. A picture of which lines has no figures is not made.
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
    """needed_bytes / time against tokens, with the band between the quartiles."""
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
    """Time of a decode step against batch, with the band between the quartiles."""
    if not (samples := _timed(lines, "decode")):
        return None
    figure = _figure("Latency of a decode step against batch", _subtitle(lines, samples))
    curves = _curves((x["implementation"], x["batch"], x["median_us"], x["q1_us"], x["q3_us"]) for x in samples)
    axes = _axes(figure, 50, 425, xlabel="sequences, one token each", ylabel="latency, µs")
    _draw(axes, curves)
    _label(axes, curves)
    return figure


def accuracy(lines: list[dict]) -> Figure | None:
    """Largest error of a pair, relative to its magnitude, against position: a panel for each dtype."""
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
            line.set_markevery((j % 5, 5))  # many of these curves coincide: each shows its markers elsewhere
    figure.axes[0].set_ylabel("error / magnitude of the pair")
    # The ends coincide too: a legend instead of labels.
    names = _ordered(drawn)
    legend = figure.legend([drawn[x] for x in names], [LIMITS.get(x, x) for x in names], ncols=4, loc="lower left")
    for text in legend.get_texts():
        text.set_fontweight(_weight(text.get_text()))
    return figure


def memory(lines: list[dict]) -> Figure | None:
    """peak_bytes / bytes of q and k: bars at 4096 tokens, or at the most tokens that all (or most) have figures for."""
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
    for place, (name, x) in enumerate(zip(names, samples, strict=True)):
        itemsize = {"float32": 4, "float64": 8}.get(x["dtype"], 2)
        ratio = x["peak_bytes"] / (tokens * (x["heads"] + x["kv_heads"]) * x["head_dim"] * itemsize)
        axes.barh(place, ratio, 0.62, color=STYLES.get(name, UNKNOWN)[0])
        axes.annotate(f"{ratio:.2f}", (ratio, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(names)), names, color=INK)
    for label in axes.get_yticklabels():
        label.set_fontweight(_weight(label.get_text()))
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set_xlim(0, max(axes.get_xlim()[1], 1))
    return figure


def _timed(lines: list[dict], group: str) -> list[dict]:
    """Of the group's cases those which differ from its first in size alone."""
    samples = [x for x in lines if x["kind"] == "sample" and x["group"] == group]
    form = ("op", "head_dim", "rotary_dim", "dtype", "layout", "interleaved", "mode")
    return [x for x in samples if x["status"] == "timed" and all(x[key] == samples[0][key] for key in form)]


def _ordered(names: Iterable[str]) -> list[str]:
    order = list(STYLES)
    return sorted(names, key=lambda name: (order.index(name) if name in STYLES else len(order), name))


def _weight(name: str) -> str:
    return "bold" if name.startswith("torch_rope") else "normal"


def _curves(points: Iterable[tuple]) -> Curves:
    """Points (implementation, x, y, ...) as curves; of several at one x the first counts."""
    curves = defaultdict(dict)
    for name, x, *rest in points:
        curves[name].setdefault(x, (x, *rest))
    return {name: [curve[x] for x in sorted(curve)] for name, curve in curves.items()}


def _subtitle(lines: list[dict], samples: list[dict], end: str = "") -> str:
    machine = next((x for x in lines if x["kind"] == "machine"), {})
    words = [machine.get("name"), f"torch {machine['torch']}" if "torch" in machine else ""]
    heads = {}  # the sizes that do not fit the machine have fewer
    for x in samples:
        heads.setdefault(f"{x['heads']}/{x['kv_heads']}", f"{_binary(x['batch'] * x['seq'])} tokens")
    if samples:
        usual, *others = heads
        but = "".join(f" ({other} at {heads[other]})" for other in others)
        words += [f"{usual} heads of {samples[0]['head_dim']}{but}", samples[0]["dtype"]]
    return " · ".join(word for word in [*words, end] if word)


def _figure(title: str, subtitle: str, height: float = HEIGHT) -> Figure:
    figure = Figure((WIDTH / 72, height / 72), dpi=72, facecolor=PAPER)  # a pixel is a point
    figure.text(10 / WIDTH, 1 - 20 / height, title, fontsize=12, fontweight="bold")
    figure.text(10 / WIDTH, 1 - 36 / height, subtitle, color=MUTED)
    return figure


def _axes(figure: Figure, left: float, width: float, below: float = 38, **options) -> Axes:
    """Axes under the titles. left, width, below: points."""
    height = figure.bbox.height
    box = (left / WIDTH, below / height, width / WIDTH, (height - below - 58) / height)
    return figure.add_axes(box, facecolor="none", **options)


def _draw(axes: Axes, curves: Curves) -> dict[str, Line2D]:
    """Curves on logarithmic axes: the line of each."""
    axes.set(xscale="log", yscale="log")
    axes.margins(x=0.02)
    lines = {}
    for name in _ordered(curves)[::-1]:  # the first on top
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
    """65536 as 64k."""
    return next((f"{x / size:g}{unit}" for size, unit in ((2**20, "M"), (2**10, "k")) if x >= size), f"{x:g}")


def _label(axes: Axes, curves: Curves) -> None:
    """Names right of the axes, each led to by dots from the end of its curve."""
    to_axes = axes.transData - axes.transAxes
    ends = {name: to_axes.transform(curves[name][-1][:2]) for name in _ordered(curves)[::-1]}
    names = sorted(ends, key=lambda name: ends[name][1])
    places = _spread([ends[name][1] for name in names], 13 / axes.bbox.height)
    point = 1 / axes.bbox.width
    for name, place in zip(names, places, strict=True):
        colour, marker = STYLES.get(name, UNKNOWN)
        (x, y), edge = ends[name], 1 + 16 * point
        line = {"color": colour, "transform": axes.transAxes, "clip_on": False, "linewidth": 0.8}
        axes.plot([x, 1 + 2 * point, edge], [y, place, place], ":", **line)
        axes.plot([edge], [place], marker, **line, markersize=5, markeredgewidth=0)
        axes.text(
            edge + 6 * point,
            place,
            LIMITS.get(name, name),
            transform=axes.transAxes,
            va="center",
            fontweight=_weight(name),
        )


def _spread(wanted: list[float], gap: float) -> list[float]:
    """Places in 0 .. 1, at least a gap apart, with the least sum of squared distances from those wanted, which ascend."""
    gap = min(gap, 1 / max(len(wanted) - 1, 1))
    groups = []  # neighbours that touch: their mean, less the gaps below them, and their number
    for i, place in enumerate(wanted):
        mean, count = place - i * gap, 1
        while groups and groups[-1][0] > mean:
            other, others = groups.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        groups.append((mean, count))
    means = [mean for mean, count in groups for _ in range(count)]
    return [min(max(mean, 0), 1 - (len(wanted) - 1) * gap) + i * gap for i, mean in enumerate(means)]


def _save(figure: Figure, file: Path) -> None:
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": f"matplotlib {matplotlib.__version__}"})
    # Colours are written into each element: a rule that asks for the colour itself overrides them.
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    text = file.read_text(encoding="utf-8").replace("<defs>", style + "<defs>", 1)
    file.write_text(text, encoding="utf-8")
