"""Slides of a prediction folder as a report holds them: one overview each, and the levels of what lies over it.

A slide is opened where its record says that it lies, if it is still as large there; else the picture stands in that
`predict` drew. All pictures together are bounded in bytes, whatever their number.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from glob import escape
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from gigagrad.boxes import Box
from gigagrad.cohorts import Row
from gigagrad.cohorts.records import SlideResult
from gigagrad.errors import GigagradError
from gigagrad.files import size_of
from gigagrad.reports.tables import counted
from gigagrad.units import format_seconds
from gigagrad.view.catalog import Item, find
from gigagrad.view.layers import Layer, deflated
from gigagrad.view.pyramids import TILE, nearest
from gigagrad.view.slides import Opened

MOST: Final = 24
"""More slides would leave few pixels for each; the worst ones by Dice are the ones to look at."""
_BYTES: Final = 3_000_000
"""Bytes of all pictures together, of which base64 makes 4 MB."""
_SIDE_PX: Final = 2048
_LAYER_PX: Final = 1024
_LEAST_PX: Final = 64
_MOST_CLASSES: Final = 12
"""Classes of which a slide's probabilities are drawn."""
_QUALITY: Final = 75


def slides_of(
    run_dir: Path, predictions_dir: Path, records: Sequence[SlideResult]
) -> tuple[list[dict[str, Any]], int, list[str]]:
    """Return the pictures of the slides with the lowest Dice as the page takes them, how many slides more have any, and
    the names of those of which a picture cannot be read.

    A picture is a dictionary: `info` as the page is told of a slide, `picture` as a data URI, `layers` as the levels of
    each class of each, deflated and in base64, `caption` and `alt`.
    """
    items = _items(run_dir, predictions_dir)
    wanted = [(each, _wanted(each, _item(each, items), predictions_dir)) for each in records]
    pictured = sorted(filter(itemgetter(1), wanted), key=lambda each: 2.0 if each[0].dice is None else each[0].dice)
    shown = [(record.name, ways) for record, found in pictured[:MOST] for ways in found]
    room = _BYTES // max(1, len(shown))
    drawn = [next(filter(None, (_drawn(item, room, **told) for item, told in ways)), None) for _, ways in shown]
    lost = [name for (name, _), picture in zip(shown, drawn, strict=True) if picture is None]
    return [picture for picture in drawn if picture is not None], len(pictured[MOST:]), lost


def _items(run_dir: Path, predictions_dir: Path) -> Mapping[Path, Item]:
    """Find the slides that were predicted, with the labels that the run's cohort has of them."""
    for sources in ([run_dir, predictions_dir], [predictions_dir]):
        with suppress(GigagradError, OSError, ValueError, RecursionError):
            return {item.row.slide: item for item in find(sources).items if any(each.mask for each in item.predictions)}
    return {}


def _item(record: SlideResult, items: Mapping[Path, Item]) -> Item | None:
    with suppress(OSError, ValueError, RuntimeError):  # what is no path, links in a circle
        item = items.get(Path(record.slide).resolve())
        return item if item is not None and size_of(item.row.slide) == record.slide_bytes else None
    return None


_Ways = list[tuple[Item, dict[str, str]]]
"""Files that may be drawn, the best first, and the words for each."""


def _wanted(record: SlideResult, item: Item | None, folder: Path) -> list[_Ways]:
    """List the pictures of a slide, or of a bag: each slide's attention, and the patches with most and least."""
    name, files = record.name, record.files
    if "attention" in files:
        count = counted(record.patches, "patch", "patches")
        paths = _inside(folder, f"{escape(files['attention'])}/*.png")
        kinds = {path: f"attention in {path.stem}" for path in paths if path.name != "patches.png"}
        kinds |= {path: "most and least attention" for path in paths if path.name == "patches.png"}
        return [
            [(Item(Row(path), label=name), {"caption": f"{kind}, {count}", "alt": f"{kind}, {name}"})]
            for path, kind in kinds.items()
        ]
    facts = [] if record.dice is None else [f"Dice {record.dice:.4f}"]
    facts += [f"{record.height} x {record.width} px", counted(record.regions, "region")]
    caption = ", ".join(facts + ([format_seconds(record.seconds)] if record.seconds else []))
    ways = [] if item is None else [(item, {"caption": caption, "alt": f"Slide {name}"})]
    outlines = _inside(folder, escape(files["overlay"])) if "overlay" in files else []
    ways += [(Item(Row(path), label=name), {"caption": caption, "alt": f"Outlines on {name}"}) for path in outlines]
    return [ways] if ways else []


def _inside(folder: Path, pattern: str) -> list[Path]:
    """List the files that are called so, without those that links lead out of the folder."""
    with suppress(OSError, ValueError, RuntimeError):  # a name that is too long, links in a circle
        found = (path.resolve() for path in sorted(folder.glob(pattern)))
        return [path for path in found if path.is_file() and path.is_relative_to(folder.resolve())]
    return []


def _drawn(item: Item, room: int, caption: str, alt: str) -> dict[str, Any] | None:
    """Draw a slide into so many bytes; None where it cannot be read."""
    try:
        with closing(Opened(item)) as opened:
            info = opened.describe()
            layers = [_layer(layer, room) for layer in opened.layers]
            taken = sum(len(data) for pictures, _, _ in layers for data in pictures)
            data, shape = _overview(opened, room - taken)
    except (GigagradError, OSError, ValueError, RuntimeError):
        return None
    info |= {"tile": _SIDE_PX, "levels": [shape], "patches": []}
    for told, (_, classes, size) in zip(info["layers"], layers, strict=True):
        told |= {"levels": [size], "classes": [told["classes"][number] for number in classes]}
    levels = [[_base64(each) for each in pictures] for pictures, _, _ in layers]
    picture = f"data:image/jpeg;base64,{_base64(data)}"
    return {"info": info, "picture": picture, "layers": levels, "caption": caption, "alt": alt}


def _layer(layer: Layer, room: int) -> tuple[list[bytes], list[int], tuple[int, int]]:
    """Deflate the levels of a layer, and say of which of its classes and how large: class ids once, probabilities of
    the classes that there is most of, as large as half of the room allows."""
    shares = layer.kind == "probabilities"
    side = TILE if shares else _LAYER_PX
    while True:
        height, width = layer.pyramid.shapes[0]
        scale = min(1.0, side / max(height, width))
        shape = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = nearest(layer.pyramid, shape, Box.whole(*shape))
        if not shares:
            return [deflated(layer.levels(pixels), 9)], list(range(len(layer.classes))), shape
        levels = [layer.levels(pixels, channel) for channel in range(len(pixels))]
        most = sorted(sorted(range(len(levels)), key=lambda number: -levels[number].mean())[:_MOST_CLASSES])
        pictures = [deflated(levels[number], 9) for number in most]
        if sum(map(len, pictures)) <= room // 2 or side <= _LEAST_PX:
            return pictures, most[: len(layer.classes)], shape
        side //= 2


def _overview(opened: Opened, room: int) -> tuple[bytes, tuple[int, int]]:
    """Draw all of a slide as JPEG, as large as so many bytes allow, and say how large."""
    from PIL import Image as Pillow

    picture = opened.overview(_SIDE_PX)
    while True:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=_QUALITY, optimize=True)
        largest = max(picture.size)
        if file.tell() <= room or largest <= _LEAST_PX:
            return file.getvalue(), (picture.height, picture.width)
        side = max(_LEAST_PX, int(largest * min(0.9, 0.97 * math.sqrt(max(1, room) / file.tell()))))
        picture.thumbnail((side, side), Pillow.Resampling.LANCZOS)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
