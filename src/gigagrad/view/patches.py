"""Read which patches of a bag a model attended to, from the tiles that `predict` writes for QuPath, and where its maps
of them lie."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gigagrad.boxes import Box
from gigagrad.errors import ConfigError
from gigagrad.files import read_json

_SHOWN: Final = 12
"""Patches with most attention, and as many with least."""


def map_cell(path: Path) -> int | None:
    """Return how many pixels of level 0 a pixel of a map of attention is wide and high, as `predict` writes it; None of
    any other file. Micrometres do not say: both files may have others, or none."""
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            found = re.match(r"gigagrad attention of patches, a pixel is (\d+) px", str(file.pages.first.description))
    except Exception:  # anybody's file
        return None
    return None if found is None else int(found[1])


class Patches:
    """The patches of a bag, those with most attention first, each `[x, y, side, attention, rank]` in pixels of level 0;
    a rank is the share of patches that have less.
    """

    def __init__(self, path: Path, bounds: Box | None) -> None:
        """Read a file; `bounds` is what was scanned, from whose corner it counts.

        Raises `ConfigError` for a file that `predict` has not written.
        """
        corner = (0, 0) if bounds is None else (bounds.x0, bounds.y0)
        try:
            found = [_patch(feature, corner) for feature in read_json(path)["features"]]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            reason = f"{path.name} is damaged or not as predict writes it ({error}); predict again"
            raise ConfigError(reason) from error
        found.sort(key=lambda patch: -patch[3])
        self._patches = np.array(found, np.float64).reshape(-1, 5)

    def ends(self) -> dict[str, Any]:
        """Return the patches with `most` and with `least` attention, and how many there are."""
        most, others = self._patches[:_SHOWN], self._patches[_SHOWN:]
        least = others[-_SHOWN:][::-1]
        return {"most": _plain(most), "least": _plain(least), "count": len(self._patches)}

    def nth(self, place: int) -> dict[str, Any] | None:
        """Return the patch with the most attention but `place`, None where there are not so many."""
        if not 0 <= place < len(self._patches):
            return None
        return {"patch": _plain(self._patches[place : place + 1])[0], "place": place, "count": len(self._patches)}

    def at(self, y: int, x: int) -> dict[str, Any] | None:
        """Return the patch that holds a pixel, of several the one whose middle is nearest; None where none does."""
        left, top, side = self._patches[:, :3].T
        apart = np.maximum(abs(left + side / 2 - x - 0.5), abs(top + side / 2 - y - 0.5))
        apart[apart >= side / 2] = np.inf
        nearest = int(apart.argmin()) if len(apart) else 0
        return self.nth(nearest) if len(apart) and math.isfinite(apart[nearest]) else None


def _plain(patches: NDArray[np.float64]) -> list[list[float]]:
    return [[*map(int, patch[:3]), *map(float, patch[3:])] for patch in patches]


def _patch(feature: Any, corner: tuple[int, int]) -> list[float]:
    (x, y), (right, _) = feature["geometry"]["coordinates"][0][:2]
    measured = feature["properties"]["measurements"]
    values = float(measured["attention"]), float(measured["attention rank"])
    if not all(map(math.isfinite, values)):
        raise ValueError("attention that is no number")
    return [int(x) + corner[0], int(y) + corner[1], int(right) - int(x), *values]
