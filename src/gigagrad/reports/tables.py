"""Scores and rates as tables for a rich console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gigagrad.units import format_pixels

if TYPE_CHECKING:
    from gigagrad.execution.calibration import Calibration
    from gigagrad.prediction import Evaluation


def score_table(evaluation: Evaluation) -> Table:
    """One line per slide; below them the mean and the sample standard deviation over slides."""
    table = Table(header_style="bold", show_footer=True)
    (dice, dice_sd), (iou, iou_sd) = evaluation.dice, evaluation.iou
    table.add_column("Slide", footer="mean +/- sd", overflow="fold")
    table.add_column("Pixels", justify="right")
    table.add_column("Dice", footer=f"{dice:.4f} +/- {dice_sd:.4f}", justify="right", no_wrap=True)
    table.add_column("IoU", footer=f"{iou:.4f} +/- {iou_sd:.4f}", justify="right", no_wrap=True)
    for score in evaluation.scores:
        table.add_row(Text(score.name), format_pixels(score.pixels), f"{score.dice:.4f}", f"{score.iou:.4f}")
    return table


def rates_table(calibration: Calibration) -> Table:
    """The rates of one thread, of its further threads, and of the tiers."""
    machine, disk = calibration.machine, calibration.disk
    way = "direct" if disk.direct else "through the page cache"
    rows = {
        "convolutions": f"{machine.flops_per_second / 1e9:,.0f} GFLOP/s",
        "operators, values in the cache": f"{machine.cached_bytes_per_second / 1e9:,.1f} GB/s",
        "operators, values in memory": f"{machine.memory_bytes_per_second / 1e9:,.1f} GB/s",
        "a call of an operator": f"{machine.seconds_per_operator * 1e6:,.0f} us",
        "a further thread, a tile each": f"{machine.side_by_side_efficiency:.0%}",
        "a further thread, the same tile": f"{machine.shared_efficiency:.0%}",
        "copies in memory": f"{machine.copy_bytes_per_second / 1e9:,.1f} GB/s",
        f"disk, write ({way})": f"{disk.write / 1e9:,.2f} GB/s",
        f"disk, read ({way})": f"{disk.read / 1e9:,.2f} GB/s",
        "fields in files, one thread's work": f"{machine.file_bytes_per_second / 1e9:,.2f} GB/s",
        "lossless codec": f"{machine.codec_bytes_per_second / 1e9:,.2f} GB/s, {machine.codec_ratio:.2f} : 1",
    }
    table = Table(header_style="bold", caption=f"measured in {calibration.seconds:.0f} s")
    table.add_column("What one thread does")
    table.add_column("Rate", justify="right")
    for name, rate in rows.items():
        table.add_row(name, rate)
    return table
