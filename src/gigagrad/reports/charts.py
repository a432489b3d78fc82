"""A plan as one picture, SVG or PNG by the file's name: the trade-off curve, and its memory over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gigagrad.errors import ConfigError, extra
from gigagrad.files import replacing
from gigagrad.plans import estimate
from gigagrad.plans.plan import amount_of
from gigagrad.reports.plan_study import PlanStudy, advice_in_words
from gigagrad.units import format_bytes, format_pixels, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, LINE = "#1d2126", "#667079", "#e2e0da"
FIRST, SECOND, THIRD, FOURTH = "#2f6f9f", "#b3591b", "#8aa9bd", "#c9b48a"
ALARM, CARD = "#b3261e", "#ffffff"
STANDING_ALONE = {
    "svg.fonttype": "path",
    "text.parse_math": False,
    "font.size": 11,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.linewidth": 0.8,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), CARD),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), LINE),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), MUTED),
    **dict.fromkeys(("text.color", "legend.labelcolor"), INK),
}
"""Matplotlib's settings for a picture."""
_PARTS = (
    ("process", (estimate.PROCESS, estimate.STEP, estimate.COMPILED, estimate.ALLOCATOR_CACHE), MUTED),
    ("pixels on their way", (estimate.READERS, estimate.WAITING, estimate.OUTPUT), LINE),
    ("parameters", (estimate.OPTIMIZER, estimate.GRADIENTS, estimate.SUMS), FOURTH),
    ("whole-field operators", (estimate.WHOLE, estimate.WHOLE_FRAGMENTATION), INK),
    ("fields kept", (estimate.FIELDS,), FIRST),
    ("cotangents", (estimate.COTANGENTS,), THIRD),
    ("tiles", (estimate.TILES, estimate.FRAGMENTATION), SECOND),
)
_UNSIGNED = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
"""The kinds of picture, and what each would say of when and by what it was made."""


def check_picture(path: Path) -> None:
    """Refuse a file name before anything is worked out. Raises `ConfigError`."""
    if path.suffix.lower() not in _UNSIGNED or path.is_dir():
        raise ConfigError(f"cannot draw {path}: name a file that ends in {' or '.join(_UNSIGNED)}")


def draw_plan(study: PlanStudy, path: Path) -> None:
    """Write the picture. Raises `ConfigError` for another kind of file, `WriteError` if it cannot be written."""
    with extra("report"):
        import matplotlib as mpl
        from matplotlib.figure import Figure

    check_picture(path)
    kind = path.suffix.lower()
    height, width = study.plan.image_shape[-2:]
    with mpl.rc_context({**STANDING_ALONE, "svg.hashsalt": study.model}):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        figure.suptitle(f"{study.model}, {height} x {width} px ({format_pixels(height * width)})", fontsize=13)
        curve, held = figure.subplots(1, 2, width_ratios=(5, 6))
        draw_curve(curve, study)
        _draw_memory(held, study)
        if study.advice:
            figure.supxlabel("What would help: " + "; ".join(advice_in_words(study)), fontsize=9, color=MUTED)
        with replacing(path) as file:
            figure.savefig(file, format=kind.removeprefix("."), dpi=150, metadata=_UNSIGNED[kind])


def draw_curve(ax: Axes, study: PlanStudy) -> None:
    """Draw time against memory, both logarithmic: what a factor of memory buys as a factor of time."""
    ax.set_title("Memory against time", loc="left", fontsize=11)
    plan, points = study.plan, study.points
    own = plan.predicted_peak_bytes, plan.predicted_seconds
    corners = [(point.predicted_peak_bytes, point.seconds) for point in points] + [own]
    memory, seconds = np.array(sorted(corners), dtype=float).T
    ax.step(memory, seconds, where="post", color=THIRD, lw=1.4)
    ax.plot(memory, seconds, "o", color=FIRST, ms=5)
    ax.plot(*own, "o", color=SECOND, ms=10, mec=CARD, mew=1.5, label="this plan")
    if plan.budget_bytes is not None:
        ax.axvline(plan.budget_bytes, color=ALARM, lw=1.4, label=f"budget {format_bytes(plan.budget_bytes)}")
    known = [*memory, *([plan.budget_bytes] if plan.budget_bytes else [])]
    ax.set_xscale("log", base=2)
    ax.set_xticks(_ticks(min(known), max(known), 4))
    if min(seconds) > 0:  # a plan without segments takes none
        ax.set_yscale("log")
        ax.set_yticks(_ticks(min(seconds), max(seconds), 5))
    ax.xaxis.set_major_formatter(lambda value, _: format_bytes(int(value)))
    ax.yaxis.set_major_formatter(lambda value, _: format_seconds(value))
    ax.minorticks_off()
    ax.margins(0.08)
    ax.set_xlabel("peak memory")
    ax.set_ylabel("time of a step")
    ax.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.14), ncols=2)  # below, where no line crosses it


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return a few places from low to high, evenly spaced by factor; one where they are the same."""
    return [float(value) for value in np.unique(np.geomspace(low, high, count))]


def _draw_memory(ax: Axes, study: PlanStudy) -> None:
    """Draw what is in memory during each pass, stacked."""
    ax.set_title("What is in memory, pass by pass", loc="left", fontsize=11)
    moments, plan = study.moments, study.plan
    edges = np.arange(len(moments) + 1) + 0.5
    shown = [(name, [amount_of(moment, *part) for moment in moments], color) for name, part, color in _PARTS]
    base = np.zeros(len(moments))
    for name, sizes, color in shown:
        if any(sizes):
            top = base + np.array(sizes, dtype=float)
            ax.stairs(top, edges, baseline=base, fill=True, color=color, ec=CARD, lw=0.3, label=name)
            base = top
    ax.axhline(plan.predicted_peak_bytes, color=INK, lw=1.2, ls=(0, (4, 3)), label="predicted peak")
    top = plan.predicted_peak_bytes
    if plan.budget_bytes is not None and plan.budget_bytes < 3 * top:
        ax.axhline(plan.budget_bytes, color=ALARM, lw=1.4, label="budget")
        top = max(top, plan.budget_bytes)
    ax.set_ylim(0, 1.05 * top)
    ax.set_xlim(edges[0], max(edges[-1], 1.5))  # a plan without segments has no pass
    ax.set_xticks(range(1, len(moments) + 1, max(1, -(-len(moments) // 12))))
    ax.set_yticks(range(0, int(1.05 * top), 1 << max(0, int(top // 5).bit_length())))
    ax.yaxis.set_major_formatter(lambda value, _: format_bytes(int(value)))
    ax.set_xlabel("pass")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
