"""Read a run's numbers from where a page has read them last, while the run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from gigagrad.errors import ConfigError

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
