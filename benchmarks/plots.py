"""Draws the pictures of the pages as SVG: the time of GPUs and CPUs, and the accuracy.

Each picture has its own background. If the reader's system is dark, the background and the ink change together. The
colours of the implementations have a contrast of at least 3:1 with both. The same lines give the same bytes.
"""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .cases import count

PAPER, INK, MUTED, GRID = "#ffffff", "#1f2328", "#59636e", "#dfe3e8"
DARK = {PAPER: "#0d1117", INK: "#f0f6fc", MUTED: "#9198a1", GRID: "#2a313a"}
# The colour, the marker and the label of each implementation that is drawn. An earlier curve covers a later one. Two may
# have the same colour if they are never in the same picture.
STYLES = {
    "torch_rope": ("#e03131", "o", "torch_rope"),
    "torch_rope in place": ("#c2255c", "s", "torch_rope in place"),
    "torch_rope module": ("#f08c00", "^", "torch_rope module"),
    "torch_rope float32 inv_freq": ("#e8590c", "D", "torch_rope, float32 inv_freq"),
    "transformers": ("#1c7ed6", "v", "transformers"),
    "transformers compiled": ("#3b5bdb", "^", "transformers compiled"),
    "torchtune": ("#2b8a3e", "<", "torchtune"),
    "rotary-embedding-torch": ("#ae3ec9", ">", "rotary-embedding-torch"),
    "mlx": ("#0c8599", "P", "mlx"),
    "one rounding": (MUTED, "", "one rounding"),
    "SGLang's way": ("#2b8a3e", "<", "SGLang's way"),
    "flashinfer in place": ("#0c8599", "P", "FlashInfer"),
    "vllm in place": ("#1c7ed6", "v", "vLLM"),
    "copy": (MUTED, "", "copy_, for comparison"),
}
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
    "legend.fontsize": 8,
    **{f"{axis}tick.{what}": value for axis in "xy" for what, value in (("color", GRID), ("labelcolor", MUTED))},
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
}


def plot(cpu: list[dict], gpu: list[dict], folder: Path) -> list[Path]:
    """Draws speed.svg and accuracy.svg from the lines of result files, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        figures = {folder / "speed.svg": speed([gpu, cpu]), folder / "accuracy.svg": accuracy(cpu)}
        for file, figure in figures.items():
            save(figure, file)
    return [*figures]


def speed(machines: list[list[dict]]) -> Figure:
    """Draws the time against the number of tokens, with a band between the quartiles, in a panel for each machine."""
    figure, panels = figure_of("Time against tokens", "32/8 heads of 128, bfloat16")
    for axes, lines in zip(panels, machines, strict=True):
        found = [x for x in lines if x.get("group") == "sweep" and x["status"] == "timed" and x["heads"] == 32]
        points = [
            (x["implementation"], x["seq"], *(x.get(f"{n}_us", x["median_us"]) for n in ("median", "q1", "q3")))
            for x in found
        ]
        draw(axes, points, lines[0]["name"], "tokens")
        axes.yaxis.set_major_formatter(
            lambda us, _: f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} µs"
        )
    return figure


def accuracy(lines: list[dict]) -> Figure:
    """Draws the largest error of a pair, relative to its magnitude, against the position, in a panel for each dtype."""
    words = f"error / magnitude of the pair · {lines[0]['name']} · torch {lines[0]['torch']} · largest of an octave"
    figure, panels = figure_of("Error against position", words)
    for axes, dtype in zip(panels, ("float32", "bfloat16"), strict=True):
        found = [x for x in lines if x.get("max_relative") and x["dtype"] == dtype]
        draw(axes, [(x["implementation"], 2 ** x["octave"], x["max_relative"]) for x in found], dtype, "position")
        axes.set_ylim(1e-8, 10)
    return figure


def figure_of(title: str, subtitle: str) -> tuple[Figure, list[Axes]]:
    """Returns a figure of 830 x 560 pixels with two panels."""
    figure = Figure((8.65, 5.83), dpi=72, facecolor=PAPER, layout="constrained")
    figure.suptitle(f"{title}: {subtitle}", fontsize=10, x=0.01, ha="left")
    return figure, [*figure.subplots(1, 2)]


def draw(axes: Axes, points: list[tuple], title: str, xlabel: str) -> None:
    """Draws points (implementation, x, y) or (implementation, x, y, low, high) as curves, with a legend below."""
    axes.set(xscale="log", yscale="log", xlabel=xlabel, facecolor="none")
    axes.set_title(title, fontsize=9, loc="left")
    for name, (colour, marker, label) in reversed(STYLES.items()):  # the first is drawn last, on top of the others
        if not (of_name := sorted(point[1:] for point in points if point[0] == name)):
            continue
        x, y, *band = zip(*of_name, strict=True)
        width, dashes = 2.4 if name.startswith("torch_rope") else 1.3, "-" if marker else "--"
        axes.plot(x, y, dashes, color=colour, marker=marker, linewidth=width, markersize=4, label=label)
        if band:
            axes.fill_between(x, *band, color=colour, alpha=0.2, linewidth=0)
    powers = max(point[1] for point in points).bit_length()
    axes.set_xticks([2**i for i in range(0, powers, 4)])
    axes.xaxis.set_major_formatter(lambda x, _: count(int(x)))
    axes.minorticks_off()
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(-0.02, -0.12), ncols=2, columnspacing=1)


def save(figure: Figure, file: Path) -> None:
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
