"""Read where the tiles of a run lie: those that its plan names, and those that are being computed now; and its numbers,
from where a page has read them last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gigagrad.at_work import works_in
from gigagrad.errors import ConfigError
from gigagrad.files import read_json
from gigagrad.images import Image

_NUMBERS: Final = ("done", "jobs", "segment", "segments", "tile", "tiles", "seconds_left")
_TEXTS: Final = ("job", "detail", "phase")
_LONGEST: Final = 200
_MOST_TILES: Final = 64


def read_plan(of: str, path: Path, slide: Image) -> dict[str, Any] | None:
    """Return the tiles of each segment of a run's plan, and what they are computed from, with the shapes that both are
    of; no `segments` where the plan is of another size than a slide's, whose `shape` is told. None where the file is
    damaged, or tells none of this.
    """
    try:
        plan = read_json(path)
        *bag, _, height, width = map(int, plan["image_shape"])
        if path.is_symlink() or bag != [1]:
            return None
        fits = any((height, width) == level.shape for level in slide.levels)
        segments = [_segment(each) for each in plan["segments"]] if fits else []
    except (ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError, RecursionError):
        return None
    return {"of": of, "shape": [height, width], "segments": segments, "exact": None}


def _segment(told: Mapping[str, Any]) -> dict[str, list[float]]:
    """Check what a plan says of a segment. Raises `KeyError` for plans of earlier versions."""
    found = {name: _numbers(told[name], 2) for name in ("tile", "shape", "crop", "read_shape")}
    if min(side for name, sides in found.items() if name != "crop" for side in sides) <= 0:
        raise ValueError("a tile without pixels")
    return found


def works_of(folders: Iterable[tuple[str, Path]], slides: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield what is computed now for folders, each with its name; `slides` are numbers of slides by their paths."""
    for of, folder in folders:
        for told in works_in(folder):
            try:
                yield {"of": of, **work_on(told, slides)}
            except (ValueError, TypeError, KeyError, OverflowError):
                continue  # not as we write it


def work_on(told: Mapping[str, Any], slides: Mapping[str, int]) -> dict[str, Any]:
    """Check what a job says of itself, for a page. Raises `ValueError`, `TypeError` or `KeyError`."""
    path = str(told["slide"])
    found: dict[str, Any] = {"slide": slides.get(path), "name": Path(path).name[:_LONGEST]}
    found |= {name: float(told[name]) for name in _NUMBERS if name in told}
    found |= {name: str(told[name])[:_LONGEST] for name in _TEXTS if name in told}
    if "boxes" in told:
        boxes = [_numbers(box, 4) for box in list(told["boxes"])[:_MOST_TILES]]
        far = [bool(each) for each in told["far"]]
        grid = _numbers(told["grid"], 2)
        if min(grid) <= 0 or len(far) != 2:
            raise ValueError("a tile without pixels")
        found |= {"boxes": boxes, "crop": _numbers(told["crop"], 4), "grid": grid, "far": far}
    elif "patches" in told:
        found["patches"] = _numbers(told["patches"], 2)
    if not all(map(math.isfinite, (found[name] for name in _NUMBERS if name in found))):
        raise ValueError("no number")
    return found


def _numbers(values: Any, count: int) -> list[float]:
    found = [float(value) for value in values]
    if len(found) != count or not all(map(math.isfinite, found)):
        raise ValueError(f"expected {count} numbers")
    return found


_MOST_BYTES: Final = 2**20
"""Bytes of the file that are read at a time; the page asks for the rest."""


def read_curves(metrics: Path, start: int) -> dict[str, Any]:
    """Return the numbers that stand in the file from byte `start` on, `[split, name, step, value]` each, where to
    read next, and whether there is more already.

    A value that is no finite number is None. A file that has become shorter begins anew: from 0, `begins` says so.
    Raises `ConfigError` for a file that has become a link, and `OSError` for one that is gone.
    """
    if metrics.resolve() != metrics:
        raise ConfigError(f"{metrics.name} has become a link since this page was started; start it anew")
    if not metrics.exists():
        return {"points": [], "next": 0, "begins": True, "more": False}
    with metrics.open("rb") as file:
        size = file.seek(0, 2)
        start = start if start <= size else 0
        file.seek(start)
        data = file.read(_MOST_BYTES)
    whole = data.rfind(b"\n") + 1  # what is behind it is still being written
    points = [point for line in data[:whole].splitlines() for point in _points(line)]
    return {"points": points, "next": start + whole, "begins": start == 0, "more": whole > 0 and start + whole < size}


def _points(line: bytes) -> list[list[Any]]:
    try:
        record = json.loads(line)
        if record.get("event") != "metrics":
            return []
        split, step, values = str(record["split"]), int(record["step"]), dict(record["values"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    finite = {
        str(name): float(value) if type(value) in (int, float) and math.isfinite(value) else None
        for name, value in values.items()
    }
    return [[split, name, step, value] for name, value in finite.items()]
