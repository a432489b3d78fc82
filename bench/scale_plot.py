"""The picture of `bench/scale.py`: how many times faster a step is on many ranks, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers_plot import UNSIGNED
from gigagrad.files import replacing
from gigagrad.reports.charts import FIRST, MUTED, SECOND, STANDING_ALONE
from gigagrad.scaling import Link


def draw(line: dict[str, Any], path: Path) -> None:
    """`line` is what `bench/scale.py` prints last; SVG or PNG by the file's name."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    predicted = {int(count): times for count, times in line["predicted_times_faster"].items()}
    measured = {int(count): found["times_faster"] for count, found in line["runs"].items()}
    counts = sorted(predicted)
    style = {**STANDING_ALONE, "svg.hashsalt": "scale", "axes.grid.axis": "both"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        ax = figure.subplots()
        ax.plot(counts, counts, color=MUTED, lw=1, ls=(0, (4, 3)), label="as many times as ranks")
        ax.plot(*zip(*sorted(predicted.items()), strict=True), color=FIRST, marker="o", ms=5, lw=2, label="predicted")
        look: dict[str, Any] = {"color": SECOND, "ls": "", "marker": "X", "ms": 11, "mec": "white"}
        clock = "processes" if line["clock"] == "wall" else "processes, each with a virtual clock"
        ax.plot(*zip(*sorted(measured.items()), strict=True), label=clock, zorder=3, **look)
        for axis, scale in ((ax.xaxis, ax.set_xscale), (ax.yaxis, ax.set_yscale)):
            scale("log", base=2)
            axis.set_major_formatter("{x:g}")
        ax.set_xticks(counts)
        ax.set_xlabel("ranks")
        ax.set_ylabel("times faster")
        title = f"{line['network']}\n{line['side']} x {line['side']} px, one image; {Link(**line['link'])}"
        ax.set_title(title, loc="left", fontsize=11)
        ax.legend(loc="upper left")
        kind = path.suffix.lower()
        with replacing(path) as file:
            figure.savefig(file, format=kind.removeprefix("."), dpi=150, metadata=UNSIGNED[kind])
