"""The report's charts as inline SVG that follows the page's colours, light or dark; and a plan as one picture, SVG or
PNG by the file's name: the trade-off curve, and its memory over time.

Matplotlib draws in the light colours; on the page each is then replaced by the CSS variable of its role, so that one
drawing serves both schemes and the printed page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gigagrad.errors import ConfigError, extra
from gigagrad.events import StepMeasured
from gigagrad.files import replacing
from gigagrad.plans import estimate
from gigagrad.plans.plan import amount_of
from gigagrad.prediction.scores import mean_sd
from gigagrad.reports.plan_study import PlanStudy, advice_in_words
from gigagrad.units import format_bytes, format_pixels, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gigagrad.reports.report import RunData

COLOURS = {
    "ink": "#1d2126",
    "muted": "#667079",
    "line": "#e2e0da",
    "first": "#2f6f9f",
    "second": "#b3591b",
    "third": "#8aa9bd",
    "alarm": "#b3261e",
    "card": "#ffffff",
    "fourth": "#c9b48a",
}
"""The page's light colours by role, which is also the name of their CSS variable."""
INK, MUTED, LINE, FIRST, SECOND, THIRD, ALARM, CARD, FOURTH = COLOURS.values()
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 11,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.color": LINE,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
STANDING_ALONE = {**_STYLE, "figure.facecolor": CARD, "axes.facecolor": CARD, "savefig.facecolor": CARD}
"""The charts' style for a picture outside the page."""
_MOST_LABELLED = 40
"""Slides that get a name each in the Dice chart; more are drawn as one row of dots."""


def own_peaks(steps: Sequence[StepMeasured]) -> list[int | None]:
    """Return the peak of each step. A process tells the highest that it has been at: a step that stayed below one
    before it has a peak that nobody knows, here None.
    """
    found: list[int | None] = []
    most = 0
    for step in steps:
        found.append(step.peak_bytes if step.peak_bytes > (step.earlier_peak_bytes or most) else None)
        most = max(most, step.peak_bytes)
    return found


def loss_chart(run: RunData) -> str | None:
    """Draw training loss by step (faint, with its running mean) and validation loss; None without a finite one."""
    train, val = _finite(run.series("train", "loss")), _finite(run.series("val", "loss"))
    if not len(train) and not len(val):
        return None
    slides = run.accumulated > 1
    with _axes("Loss by slides seen" if slides else "Loss by training step", 3.4) as (ax, svg):
        if len(train):
            window = max(1, len(train) // 25)
            smooth = window > 1
            ax.plot(*train.T, color=FIRST, alpha=0.35 if smooth else 1, lw=1.2, label=None if smooth else "train")
            if smooth:
                mean = np.convolve(train[:, 1], np.full(window, 1 / window), "valid")
                ax.plot(train[window - 1 :, 0], mean, color=FIRST, label=f"train, mean of {window}")
        if len(val):
            ax.plot(*val.T, "o-", color=SECOND, ms=4, lw=1.4, label="validation")
            best = val[val[:, 1].argmin()]
            ax.plot(*best, "o", ms=10, mfc="none", mec=SECOND, mew=1.4, label=f"best {best[1]:.4g}")
        values = np.concatenate([train[:, 1], val[:, 1]])
        if values.min() > 0 and values.max() > 30 * values.min():
            ax.set_yscale("log")
            # Powers as mathematical text would reach the page as its source.
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("")
        _whole_numbers(ax)
        _finish(ax, "slides seen" if slides else "training step", columns=2)
    return svg()


def dice_chart(scores: Mapping[str, float]) -> str | None:
    """Draw one dot per slide, worst at the bottom, with the mean and a band of one standard deviation."""
    from matplotlib.ticker import MaxNLocator

    finite = {name: value for name, value in scores.items() if math.isfinite(value)}
    if not finite:
        return None
    ordered = sorted(finite.items(), key=lambda item: item[1])
    mean, sd = mean_sd(finite.values())
    labelled = len(ordered) <= _MOST_LABELLED
    height = max(2.0, 1.2 + 0.32 * len(ordered)) if labelled else 2.4
    with _axes("Dice by slide", height) as (ax, svg):
        ax.grid(False, axis="y")
        ax.grid(True, axis="x")
        ax.axvspan(max(0, mean - sd), min(1, mean + sd), color=SECOND, alpha=0.14, lw=0)
        spread = f", sd {sd:.4f}" if len(ordered) > 1 else ""
        ax.axvline(mean, color=SECOND, lw=1.4, label=f"mean {mean:.4f}{spread}")
        values = [value for _, value in ordered]
        ax.plot(values, range(len(values)), "o", color=FIRST, ms=7 if labelled else 4, mec=CARD, mew=1)
        ax.set_yticks(range(len(values)) if labelled else [])
        if labelled:
            ax.set_yticklabels([name if len(name) <= 22 else f"{name[:11]}...{name[-8:]}" for name, _ in ordered])
        ax.set_ylim(-0.7, len(values) - 0.3)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        low = min(*values, mean - sd)
        ax.set_xlim(max(0.0, low - max(0.15 * (1 - low), 1e-3)), 1.0 + max(0.02 * (1 - low), 1e-4))
        _finish(ax, "Dice")
    return svg()


def memory_chart(steps: Sequence[StepMeasured]) -> str | None:
    """Draw the peak memory of each step that has one of its own beside what the plan predicted, and the budget."""
    peaks = own_peaks(steps)
    if not any(peaks):
        return None
    mib = 1 << 20
    x = np.arange(1, len(steps) + 1)
    with _axes("Peak memory by step", 3.4) as (ax, svg):
        predicted = [s.predicted_peak_bytes / mib for s in steps]
        measured = np.array([math.nan if peak is None else peak / mib for peak in peaks])
        ax.step(x, predicted, where="mid", color=MUTED, ls=(0, (4, 3)), label="predicted")
        ax.plot(x, measured, "o", color=FIRST, ms=4, label="measured, where it is the highest so far")
        budgets = np.array([s.budget_bytes / mib for s in steps])
        if budgets.any():
            ax.step(x, np.where(budgets > 0, budgets, np.nan), where="mid", color=ALARM, lw=1.6, label="budget")
        ax.set_ylim(bottom=0)
        ax.set_ylabel("MiB")
        _whole_numbers(ax)
        _finish(ax, "step")
    return svg()


@contextmanager
def _axes(title: str, height_inches: float) -> Iterator[tuple[Axes, Callable[[], str]]]:
    """Give the axes of one chart, and a function that gives its SVG after the block."""
    with extra("report"):
        import matplotlib as mpl
        from matplotlib.figure import Figure

    # The salt keeps the ids of several charts in one page apart.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(6.8, height_inches), layout="constrained")
        buffer = io.StringIO()
        yield figure.add_subplot(), lambda: _themed(buffer.getvalue(), title)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})


def _whole_numbers(ax: Axes) -> None:
    """Put ticks at whole steps."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _finish(ax: Axes, x_label: str, columns: int = 4) -> None:
    ax.set_xlabel(x_label)
    ax.margins(x=0.02)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, handlelength=1.6, columnspacing=1.4,
                  borderaxespad=0.2)  # fmt: skip


def _themed(svg: str, title: str) -> str:
    """Return the bare `<svg>` element with colours as CSS variables, the page's font, and a name for screen readers."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for role, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{role})")
    svg = re.sub(r"(font(?:-family)?: [^;\"]*?)'[^;\"]*", r"\1var(--sans)", svg)
    for side in ("width", "height"):
        svg = re.sub(rf'<svg ([^>]*?){side}="[^"]*"', r"<svg \1", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _finite(series: Sequence[tuple[int, float]]) -> Any:
    """Return `(n, 2)` of the finite points."""
    points = np.array(series, dtype=float).reshape(-1, 2)
    return points[np.isfinite(points[:, 1])]


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
    with mpl.rc_context({**STANDING_ALONE, "svg.fonttype": "path", "svg.hashsalt": study.model}):
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
    corners = [(p.predicted_peak_bytes, p.seconds) for p in points] + [(plan.predicted_peak_bytes, study.seconds)]
    memory, seconds = np.array(sorted(corners), dtype=float).T
    ax.step(memory, seconds, where="post", color=THIRD, lw=1.4)
    ax.plot(memory, seconds, "o", color=FIRST, ms=5)
    ax.plot(plan.predicted_peak_bytes, study.seconds, "o", color=SECOND, ms=10, mec=CARD, mew=1.5, label="this plan")
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
