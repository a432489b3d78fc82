"""Read and write bytes, seconds, pixels and image sizes as people do."""

from __future__ import annotations

import re

_BYTE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("", 1024), ("ib", 1024))
}
_IN_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_SECONDS = {"min": 60, "h": 3600, "d": 86400}


def parse_bytes(text: str | int) -> int:
    """Read `"2 GiB"`, `"512MB"`, `"1.5g"` or a plain number of bytes as a number of bytes.

    Raises `ValueError` for anything else, naming the accepted forms.
    """
    if isinstance(text, int):
        if text <= 0:
            raise ValueError(f"a number of bytes must be positive, got {text}")
        return text
    if not isinstance(text, str):
        raise ValueError(f"an amount of memory is a text like '2 GiB' or a whole number of bytes, got {text!r}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    unit = _BYTE_UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"cannot read {text!r} as an amount of memory; write it like '2 GiB', '512 MiB' or '800MB'")
    value = int(float(match.group(1)) * unit)
    if value <= 0:
        raise ValueError(f"an amount of memory must be positive, got {text!r}")
    return value


def format_bytes(count: int) -> str:
    """Write a number of bytes in binary units with three significant digits, e.g. `1.25 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if abs(size) < 100 else f"{size:.0f} TiB"


def printable_bytes(count: int) -> int:
    """Return the next number of bytes, from `count` (at least 1) on, that `format_bytes` prints without rounding:
    whoever types what was printed gets all of it.
    """
    near = count
    while (shown := parse_bytes(format_bytes(near))) < count:
        near += near - shown  # twice as far from what is shown: short of the next but one
    return shown


def parse_size(text: str) -> tuple[int, int]:
    """Read `"16000x64000"` as `(height, width)` in pixels. Raises `ValueError` for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*[xX]\s*(\d+)\s*", text)
    if match is None or not int(match.group(1)) or not int(match.group(2)):
        raise ValueError(f"cannot read {text!r} as an image size; write HEIGHTxWIDTH in pixels, e.g. 16000x64000")
    return int(match.group(1)), int(match.group(2))


def parse_seconds(text: str) -> float:
    """Read `"50us"`, `"1.5 ms"`, `"2s"`, `"90min"`, `"24h"` or `"2d"` as seconds. Raises `ValueError` for anything
    else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", text)
    if match is None or match.group(2) not in {*_IN_A_SECOND, *_SECONDS}:
        raise ValueError(f"cannot read {text!r} as a duration; write it like '50us', '1.5ms', '2s', '90min' or '24h'")
    return float(match.group(1)) / _IN_A_SECOND.get(match.group(2), 1) * _SECONDS.get(match.group(2), 1)


def format_seconds(seconds: float) -> str:
    """Write a duration that a person reads at a glance: `850 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`, `2 d 7 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    if seconds < 48 * 3600:
        return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"
    return f"{int(seconds) // 86400} d {int(seconds) % 86400 // 3600} h"


def format_pixels(count: int) -> str:
    """Write a number of pixels with a unit: `64 Mpx`, `1.02 Gpx`."""
    for scale, unit in ((10**12, "Tpx"), (10**9, "Gpx"), (10**6, "Mpx"), (10**3, "kpx")):
        if count >= 0.9995 * scale:  # rounds to 1 of this unit, not to 1000 of the next smaller one
            return f"{count / scale:.3g} {unit}"
    return f"{count} px"
