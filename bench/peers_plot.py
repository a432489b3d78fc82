"""The picture of `bench/peers.py`: time and memory against the image's size, a cross where a method dies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gigagrad.files import replacing
from gigagrad.reports.charts import ALARM, FIRST, INK, MUTED, SECOND, STANDING_ALONE, THIRD
from gigagrad.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOOKS: dict[str, dict[str, Any]] = {
    "plain": {"color": MUTED, "marker": "s", "label": "plain autograd"},
    "save_on_cpu": {"color": INK, "marker": "v", "ls": (0, (2, 3)), "label": "save_on_cpu"},
    "checkpoint": {"color": THIRD, "marker": "^", "label": "checkpoint"},
    "lightstream": {"color": SECOND, "marker": "D", "label": "lightstream"},
    "gigagrad": {"color": FIRST, "marker": "o", "lw": 2.6, "label": "gigagrad"},
}
_TITLES = {
    "paper-unet": "The paper's U-Net, dense",
    "resnet18": "ResNet-18, frozen norms, one label",
    "resnet18-train": "ResNet-18, norms in training mode",
}
_MEASURES = (("seconds_per_megapixel", "seconds per megapixel"), ("peak_rss_bytes", "peak of the process"))
UNSIGNED = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}


def draw(line: dict[str, Any], path: Path) -> None:
    """`line` is what `bench/peers.py` prints last; SVG or PNG by the file's name."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    networks = line["networks"]
    style = {**STANDING_ALONE, "svg.hashsalt": "peers", "axes.grid.axis": "both"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5.2 * len(networks) + 0.4, 7.4), layout="constrained")
        axes = figure.subplots(2, len(networks), sharex="col", sharey="row", squeeze=False)
        for column, (network, methods) in enumerate(networks.items()):
            for row, (measure, label) in enumerate(_MEASURES):
                _draw_measure(axes[row][column], methods, measure, line["memory_bytes"])
                axes[row][0].set_ylabel(label)
            axes[0][column].set_title(_TITLES[network], loc="left", fontsize=11)
            axes[1][column].set_xlabel("megapixels" + _not_tried(methods))
        seen = {text: handle for ax in axes.flat for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)}
        if any("died" in found for methods in networks.values() for found in methods.values()):
            seen["dies there"] = Line2D([], [], ls="", marker="X", ms=9, color=MUTED, mec="white")
        figure.legend(seen.values(), seen.keys(), loc="outside upper center", ncols=2 * len(networks), handlelength=2.6)
        with replacing(path) as file:
            kind = path.suffix.lower()
            figure.savefig(file, format=kind.removeprefix("."), dpi=150, metadata=UNSIGNED[kind])


def _draw_measure(ax: Axes, methods: dict[str, Any], measure: str, limit: int) -> None:
    memory = measure == "peak_rss_bytes"
    sizes: set[float] = set()
    for method, found in sorted(methods.items(), key=lambda item: item[0].startswith("gigagrad")):
        sizes |= _draw_method(ax, method, found, measure, limit)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2 if memory else 10)
    ax.set_xticks(sorted(sizes))
    ax.xaxis.set_major_formatter("{x:g}")
    if memory:
        ax.axhline(limit, color=ALARM, lw=1.2, ls=(0, (4, 3)), label=f"limit, {format_bytes(limit)}")
        ax.yaxis.set_major_formatter(lambda value, _: format_bytes(int(value)))
    else:
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    ax.margins(x=0.06, y=0.1)


def _draw_method(ax: Axes, method: str, found: dict[str, Any], measure: str, limit: int) -> set[float]:
    """A method's line; its sizes."""
    kind, _, own = method.partition(":")
    look = {"lw": 1.6, "ms": 6, **_LOOKS[kind]}
    if own:
        label = f"gigagrad in {format_bytes(parse_bytes(own))}" if kind == "gigagrad" else f"{kind}, tiles of {own} px"
        look |= {"label": label, "mfc": "white", "ls": (0, (5, 2)), "lw": 1.8}
    points = [(float(size), result[measure]) for size, result in found.get("sizes", {}).items()]
    if points:
        ax.plot(*zip(*points, strict=True), **look)
    dead = found.get("died")
    if dead is None or not (points or measure == "peak_rss_bytes"):
        return {size for size, _ in points}
    # At the limit where it wanted more; what its time would have been is not known, so that stays where it was.
    over = dead["peak_rss_bytes"] > limit or "alloc" in dead["died"]
    height = limit if over else dead["peak_rss_bytes"]
    last = points[-1] if points else (dead["megapixels"], height)
    end = (dead["megapixels"], height if measure == "peak_rss_bytes" else last[1])
    ax.plot(*zip(last, end, strict=True), color=look["color"], lw=1, ls=":")
    name = {} if points else {"label": look["label"]}
    ax.plot(*end, ls="", marker="X", ms=10, color=look["color"], mec="white", zorder=3, **name)
    return {size for size, _ in [*points, end]}


def _not_tried(methods: dict[str, Any]) -> str:
    """A line below the axis for every method that has none in it."""
    words = {"cannot": "cannot", "absent": "is not installed"}
    lines = {
        f"\n({method.partition(':')[0]} {word})": None
        for method, found in methods.items()
        for key, word in words.items()
        if key in found
    }
    return "".join(lines)
