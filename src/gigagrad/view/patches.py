"""Read which patches of a bag a model attended to, from the tiles that `predict` writes for QuPath."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.files import read_json

_SHOWN: Final = 12
"""Patches with most attention, and as many with least."""


def read_patches(path: Path, bounds: Box | None) -> dict[str, Any]:
    """Return the patches with `most` and with `least` attention, each `[x, y, side, attention, rank]` in pixels of
    level 0, and how many there are; `bounds` is what was scanned, from whose corner the file counts.

    Raises `ConfigError` for a file that `predict` has not written.
    """
    corner = (0, 0) if bounds is None else (bounds.x0, bounds.y0)
    try:
        found = [_patch(feature, corner) for feature in read_json(path)["features"]]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ConfigError(f"{path.name} is damaged or not as predict writes it ({error}); predict again") from error
    found.sort(key=lambda patch: -patch[3])
    most, others = found[:_SHOWN], found[_SHOWN:]
    return {"most": most, "least": others[-_SHOWN:][::-1], "count": len(found)}


def _patch(feature: Any, corner: tuple[int, int]) -> list[float]:
    (x, y), (right, _) = feature["geometry"]["coordinates"][0][:2]
    measured = feature["properties"]["measurements"]
    values = float(measured["attention"]), float(measured["attention rank"])
    if not all(map(math.isfinite, values)):
        raise ValueError("attention that is no number")
    return [int(x) + corner[0], int(y) + corner[1], int(right) - int(x), *values]
