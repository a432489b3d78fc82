"""The learning rate over the steps of a run: a function of nothing but the step, so that no state has to be kept."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine", "linear")


def rate_share(schedule: str, warmup: int, step: int, steps: int) -> float:
    """Of the learning rate in step `step` of `steps`: up in a line over `warmup` steps, then as the schedule says.

    `cosine` falls to 0 along half a wave (Loshchilov and Hutter, 2017, without restarts), `linear` in a line.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    match schedule:
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return 1 - done
    return 1.0
