"""The scores of a set of slides for the terminal: one line per slide, mean and standard deviation below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gigagrad.units import format_pixels

if TYPE_CHECKING:
    from rich.table import Table

    from gigagrad.prediction import Evaluation


def score_table(evaluation: Evaluation) -> Table:
    """`evaluation` for a rich console; the spread is the sample standard deviation over slides."""
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", show_footer=True)
    (dice, dice_sd), (iou, iou_sd) = evaluation.dice, evaluation.iou
    table.add_column("Slide", footer="mean +/- sd", overflow="fold")
    table.add_column("Pixels", justify="right")
    table.add_column("Dice", footer=f"{dice:.4f} +/- {dice_sd:.4f}", justify="right", no_wrap=True)
    table.add_column("IoU", footer=f"{iou:.4f} +/- {iou_sd:.4f}", justify="right", no_wrap=True)
    for score in evaluation.scores:
        table.add_row(Text(score.name), format_pixels(score.pixels), f"{score.dice:.4f}", f"{score.iou:.4f}")
    return table
