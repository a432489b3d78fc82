"""Open the slides of a catalogue when they are looked at, with what is shown over them, a few at a time."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import GigagradError, ImageError
from gigagrad.images import Image, MaskClass, open_image
from gigagrad.images.opening import open_ids
from gigagrad.images.pixels import Array, is_nodata
from gigagrad.images.thumbnails import names_shown, range_shown, samples
from gigagrad.masks import ClassTable, LabelMap, is_annotation_file, open_mask, read_annotations
from gigagrad.masks.classes import IGNORED, as_bytes, class_names, is_ignored, mask_classes
from gigagrad.masks.outlines import in_pixels
from gigagrad.view.catalog import Item, Predicted
from gigagrad.view.layers import ERRORS, Layer, Shades, apart, classes_in, differences, jpeg
from gigagrad.view.patches import Patches, map_cell
from gigagrad.view.plans import read_plan
from gigagrad.view.pyramids import (
    TILE,
    ImagePyramid,
    MadePyramid,
    OutlinePyramid,
    PlacedPyramid,
    Pyramid,
    Shapes,
    errors,
)

if TYPE_CHECKING:
    from PIL import Image as Pillow

    from gigagrad.view.live import Live

MOST_OPEN: Final = 4
"""Slides that are open at a time: each keeps decoded tiles."""
_LOOKED_AT_PX: Final = 1024
"""From this size on a level is large enough to find the classes of a mask."""
_MOST_CLASSES: Final = 32
"""A file of bytes with more values than this holds probabilities, not class ids."""
_THUMBNAIL_PX: Final = 256
_STAMP_PX: Final = 128


class Opened:
    """A slide that is open, its layers, and what is told of both. Closing it closes all files."""

    def __init__(self, item: Item, live: Sequence[Live] = ()) -> None:
        """Open everything but what `live` predict, which waits for `predict`. Raises `GigagradError` where the slide
        can't be read; of a layer that can't, `problems` has the reason."""
        item.check_same()
        self.item, self.problems = item, list[str]()
        self._plans: list[Callable[[], dict[str, Any]]] = []
        """Calls that describe the plan of each network."""
        self._patches: dict[int, Patches] = {}
        self._live, self._lock, self._files = live, threading.Lock(), ExitStack()
        try:
            self.slide = self._files.enter_context(item.open())
            self.pyramid = ImagePyramid(self.slide)
            self._files.callback(self.pyramid.close)
            self.shades = _shades(self.slide)
            self.layers = tuple(self._layers(item))
        except BaseException:
            self._files.close()
            raise

    def close(self) -> None:
        self._files.close()

    def predict(self) -> None:
        """Add the layers that are predicted when they are looked at, once; of a network that can't, `problems` has the
        reason."""
        with self._lock:
            for live in self._live:
                try:
                    layers, plan = live.layers(self.slide, self.item.row, self._files)
                except GigagradError as error:
                    self.problems.append(f"{live.name}: {error}" if live.name else str(error))
                    continue
                self.layers += layers
                self._plans.append(plan)
            self.layers += tuple(_differences([layer for layer in self.layers if layer.live])) if self._live else ()
            self._live = ()

    def _layers(self, item: Item) -> Iterator[Layer]:
        """Yield what lies over the slide: labels, what was predicted, and what is wrong with that."""
        labels = [self._tried(partial(self._label, item, paths)) for paths in item.labels]
        yield from filter(None, labels)
        label = next(filter(None, labels), None)
        layers: list[Layer] = []
        for predicted in item.predictions:
            own = self._of(predicted, predicted.table or item.table, label)
            layers += [dataclasses.replace(layer, of=predicted.of) for layer in own]
        yield from layers
        yield from _differences(layers)

    def _of(self, predicted: Predicted, table: ClassTable | None, label: Layer | None) -> Iterator[Layer]:
        """Yield the layers of one prediction."""
        ways = {
            self._predicted: predicted.mask,
            self._probabilities: predicted.probabilities,
            self._attention: predicted.attention,
        }
        found = {make: self._tried(partial(make, path, table)) for make, path in ways.items() if path is not None}
        yield from filter(None, found.values())
        mask = found.get(self._predicted)
        if label is not None and mask is not None and mask.kind == "classes":
            ids = self._on(mask.part, mask.pyramid.shapes, label)
            several = len(mask.classes) > 1 or len(label.classes) > 1
            kinds = ERRORS if several else ERRORS[:-1]  # of one class nothing can be of another
            yield Layer("Errors", "errors", MadePyramid(errors, mask.pyramid, ids), kinds, mask.part)

    def _tried(self, make: Callable[[], Layer]) -> Layer | None:
        try:
            return make()
        except (GigagradError, OSError) as error:
            self.problems.append(str(error))
            return None

    def _label(self, item: Item, paths: tuple[Path, ...]) -> Layer:
        """Open masks or outlines, one or one of each label. Raises `GigagradError`."""
        several = len(paths) > 1
        table = item.table or next((each.table for each in item.predictions if each.table is not None), None)
        name = _label_name(paths[0], [each[0] for each in item.labels], item.name)
        if not several:
            return self._classes(name, paths[0], table, gaps=IGNORED if table is None else table.unlabelled)
        first, *others = [self._classes(name, path, None, one=True) for path in paths]
        pyramids = [first.pyramid, *(self._on(first.part, first.pyramid.shapes, other) for other in others)]

        def stacked(*labels: Array) -> Array:
            return _label_map(np.concatenate(labels))

        known = table is not None and table.foreground
        named = class_names(len(paths) + 1, table)[1:] if known else [plain_name(path, "") for path in paths]
        classes = mask_classes(len(paths), named)
        return Layer(name, "classes", MadePyramid(stacked, *pyramids), classes, first.part)

    def _on(self, part: Box | None, shapes: Shapes, layer: Layer) -> Pyramid:
        """Return class ids of a layer on the pixels of a picture of a part of the slide, None for all of it."""
        if layer.part == part:
            return layer.pyramid
        whole = Box.whole(*self.slide.shape[1:])
        return PlacedPyramid(layer.pyramid, layer.part or whole, part or whole, shapes)

    def _predicted(self, path: Path, table: ClassTable | None) -> Layer:
        if not is_annotation_file(path) and _holds_shares(path):
            return self._probabilities(path, table)
        return self._classes("Prediction", path, table)

    def _classes(
        self, name: str, path: Path, table: ClassTable | None, *, gaps: int = IGNORED, one: bool = False
    ) -> Layer:
        """Open class ids, which are `gaps` where a file holds no data, or outlines; of `one` label, which is 1 wherever
        there is any."""
        if is_annotation_file(path):
            outlines = in_pixels(read_annotations(path), self.slide)
            if one:
                names = [each for each in outlines.names if not is_ignored(each)]
                table = ClassTable(tuple((each, 1) for each in names), unlabelled=0)
            with open_mask(outlines, self.slide, table):  # refuses outlines that do not belong here
                pass
            table = (table or ClassTable.of_names(outlines.names)).ignoring(outlines.names)
            pyramid: Pyramid = OutlinePyramid(outlines, table, self.slide, self.pyramid.shapes)
            named = [(number, name) for number, name in enumerate(table.foreground, 1)]
            return Layer(name, "classes", pyramid, _known(named))
        with open_mask(path, self.slide, table) as checked:  # refuses a mask of something else
            planes = checked.channels
        image = self._files.enter_context(open_ids(path))
        pyramid = own = ImagePyramid(image, ids=True)
        self._files.callback(own.close)
        values: dict[int | float, int] = {} if table is None else dict(table.values.items())
        if image.nodata is not None:
            values = {image.nodata: gaps, **values}
        elif table is None and set(np.unique(_coarse(own)).tolist()) - {0} == {IGNORED}:
            values = {IGNORED: 1}  # of one value, that is the foreground
        if planes > 1:
            pyramid = MadePyramid(_label_map, own)
        elif one:
            pyramid = MadePyramid(partial(_there, image.nodata), own)
        elif values:
            pyramid = MadePyramid(lambda ids: _renamed(ids, values), own)
        seen = _coarse(pyramid)
        known = _known(enumerate(table.foreground, 1)) if table is not None else ()
        return Layer(name, "classes", pyramid, classes_in(seen, known), self._place(image))

    def _probabilities(self, path: Path, table: ClassTable | None) -> Layer:
        image = self._files.enter_context(open_image(path))
        pyramid: Pyramid = (own := ImagePyramid(image))
        self._files.callback(own.close)
        if image.nodata is not None:
            pyramid = MadePyramid(partial(_filled, image.nodata), own)
        names = [name for name in image.channel_names if name]
        if len(names) != image.channels:
            # Labels have a channel each, as one class has; of classes the background has one, too.
            labels = image.channels == 1 or (table is not None and len(table.foreground) == image.channels)
            names = list(class_names(image.channels + labels, table)[labels:])
        classes = tuple(MaskClass(number, name, (0, 0, 0)) for number, name in enumerate(names))
        return Layer("Probabilities", "probabilities", pyramid, classes, self._place(image))

    def _attention(self, path: Path, _: ClassTable | None) -> Layer:
        """Show the share of patches that have less attention: attention itself is next to 0 almost everywhere."""
        image = self._files.enter_context(open_image(path))
        pyramid = ImagePyramid(image, ids=True)  # a pixel is a part of a patch, and is not averaged
        self._files.callback(pyramid.close)
        values = pyramid.read(0, Box.whole(*pyramid.shapes[0]))
        ordered = np.sort(values[values > 0])

        def ranked(attention: Array) -> Array:
            ranks = np.searchsorted(ordered, attention, "right") / max(len(ordered), 1)
            return np.where(attention > 0, ranks, 0).astype(np.float32)

        part = None
        if (side := map_cell(path)) is not None:  # the last pixels may reach out of the slide
            part = Box.whole(image.height * side, image.width * side)
        return Layer("Attention (rank)", "probabilities", MadePyramid(ranked, pyramid), (), part)

    def _place(self, image: Image) -> Box | None:
        """Return the part of the slide that a picture shows: what was scanned where that has its proportions, else
        all."""
        bounds = self.slide.bounds
        if bounds is None:
            return None
        full, whole = image.levels[0].shape, self.slide.levels[0].shape
        off = [abs(full[0] * shape[1] / (full[1] * shape[0]) - 1) for shape in (bounds.shape, whole)]
        return bounds if off[0] < off[1] else None

    def describe(self) -> dict[str, Any]:
        """Say what a page has to know before it asks for tiles."""
        slide = self.slide
        return {
            "name": self.item.label or self.item.name,
            "height": slide.height,
            "width": slide.width,
            "mpp": slide.mpp,
            "channels": names_shown(slide),
            "dtype": str(slide.dtype),
            "tile": TILE,
            "levels": self.pyramid.shapes,
            "colors": [kind.color for kind in mask_classes(IGNORED - 1)],
            "layers": [_described(layer) for layer in self.layers if not layer.live],
            "problems": list(self.problems),
            "plans": list(filter(None, (read_plan(*plan, slide) for plan in self.item.plans))),
            "patches": [each.of for each in self.item.predictions if each.patches is not None],
            "scores": self.item.scores,
        }

    def describe_live(self) -> dict[str, Any]:
        """Say the same of the layers that are predicted now, where the tiles of their plans lie and what one takes."""
        before = len(self.problems)
        self.predict()
        layers = [_described(layer) for layer in self.layers if layer.live]
        return {"layers": layers, "plans": [tell() for tell in self._plans], "problems": self.problems[before:]}

    def patches(self, number: int) -> Patches | None:
        """Read the patches of the prediction with that number among those that have any; None where there is none.
        Raises `ConfigError`."""
        files = [each.patches for each in self.item.predictions if each.patches is not None]
        if number >= len(files):
            return None
        with self._lock:
            if number not in self._patches:
                self._patches[number] = Patches(files[number], self.slide.bounds)
            return self._patches[number]

    def square(self, x: int, y: int, side: int) -> bytes | None:
        """Draw a part of the slide, in pixels of level 0, at about the size of a stamp; None outside of the slide."""
        part = Box(y, x, y + side, x + side).clamp(self.slide.height, self.slide.width)
        if part.empty:
            return None
        shares = [rows / self.slide.height for rows, _ in self.pyramid.shapes]
        level = max(index for index, share in enumerate(shares) if not index or side * share >= _STAMP_PX)
        y0, x0, y1, x1 = (edge * shares[level] for edge in (part.y0, part.x0, part.y1, part.x1))
        box = Box(int(y0), int(x0), math.ceil(y1), math.ceil(x1))
        return jpeg(self.shades.of(self.pyramid.read(level, box)))

    def tile(self, layer: int, level: int, column: int, row: int, channel: int = 0, margin: int = 0) -> bytes | None:
        """Draw a tile of the slide (layer 0) as JPEG, or return the levels of a layer's; None where there is none."""
        if layer > len(self.layers):
            self.predict()  # which this slide had before it was closed
        if layer:
            found = self.layers[layer - 1] if layer <= len(self.layers) else None
            return None if found is None else found.tile(level, column, row, channel, margin)
        box = self.pyramid.tile(level, column, row)
        return None if box is None else jpeg(self.shades.of(self.pyramid.read(level, box)))

    def counts(self, layer: int, channel: int) -> dict[str, Any] | None:
        """Count the pixels of a layer, as `Layer.counts` does; None where there is none."""
        return self.layers[layer - 1].counts(channel) if 0 < layer <= len(self.layers) else None

    def thumbnail(self) -> bytes:
        """Draw all of the slide, a few hundred pixels large."""
        return jpeg(np.asarray(self.overview(_THUMBNAIL_PX)))

    def overview(self, side: int) -> Pillow.Image:
        """Return a picture of all of the slide, at most so many pixels high and wide."""
        from PIL import Image as Pillow

        level = self.pyramid.level_of(side)
        pixels = self.shades.of(self.pyramid.read(level, Box.whole(*self.pyramid.shapes[level])))
        picture = Pillow.fromarray(np.ascontiguousarray(pixels))
        picture.thumbnail((side, side), Pillow.Resampling.LANCZOS)
        return picture

    def values(self, y: int, x: int, *, live: bool = False) -> dict[str, Any] | None:
        """Return what is stored at a pixel of the slide and what its layers have there, with what is predicted now if
        `live`; None outside."""
        slide = self.slide
        if not (0 <= y < slide.height and 0 <= x < slide.width):
            return None
        stored = np.asarray(slide.read(Box(y, x, y + 1, x + 1)))[:, 0, 0].tolist()
        pixel = [value if math.isfinite(value) else None for value in stored]  # JSON has no word for it
        found = {}
        for number, layer in enumerate(self.layers, 1):
            part = layer.part or Box.whole(slide.height, slide.width)
            at = (y + 0.5 - part.y0) / part.height, (x + 0.5 - part.x0) / part.width
            if (live or not layer.live) and all(0 <= share < 1 for share in at):
                found[number] = layer.value(*at)
        return {"pixel": pixel, "layers": found}


class Slides:
    """The slides of a catalogue by number: opened when they are asked for, those unused for longest closed again."""

    def __init__(self, items: Sequence[Item], live: Sequence[Live] = ()) -> None:
        self.items, self.live = tuple(items), tuple(live)
        self._open: OrderedDict[int, Opened] = OrderedDict()
        self._users: dict[int, int] = {}
        self._opening = [threading.Lock() for _ in self.items]
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, number: int) -> Iterator[Opened]:
        """Hold a slide open in the block. Raises `GigagradError` where it can't be opened, `IndexError` where there is
        none of this number."""
        with self._lock:
            self._users[number] = self._users.get(number, 0) + 1
        try:
            with self._opening[number]:
                found = self._open.get(number)
                if found is None:
                    found = Opened(self.items[number], self.live)
            with self._lock:
                self._open[number] = found
                self._open.move_to_end(number)
            yield found
        finally:
            with self._lock:
                self._users[number] -= 1
                idle = [each for each in self._open if not self._users[each]]
                closing = [self._open.pop(each) for each in idle[: max(0, len(self._open) - MOST_OPEN)]]
            for each in closing:
                each.close()

    def close(self) -> None:
        """Close everything; nobody looks any more."""
        with self._lock:
            while self._open:
                with suppress(ImageError):
                    self._open.popitem()[1].close()


def plain_name(path: Path, slide: str) -> str:
    """Return a file's name without its suffix and without the slide's."""
    return path.stem.removeprefix(slide).strip("._- ") or path.stem


def _label_name(path: Path, labels: Sequence[Path], slide: str) -> str:
    """Name one of a slide's labels for a person: with its suffix, or its folder, where others are called the same."""
    if len(labels) == 1:
        return "Label"
    own = plain_name(path, slide)
    alike = [each for each in labels if each != path and plain_name(each, slide) == own]
    name = path.name if any(each.parent == path.parent for each in alike) else own
    elsewhere = any(each.parent != path.parent for each in alike)
    return f"Label {name}" + (f" in {path.parent.name}" if elsewhere else "")


def _differences(layers: Sequence[Layer]) -> Iterator[Layer]:
    """Yield what compares two predictions of several: where classes differ, and by how much probabilities do."""
    for one, other in combinations([layer for layer in layers if layer.of], 2):
        same = (one.name, one.kind, one.part) == (other.name, other.kind, other.part)
        if not same or one.of == other.of or not one.name.startswith(("Prediction", "Probabilities")):
            continue
        between, now = (one.of, other.of), " now" if one.live else ""
        if one.kind == "classes":
            pyramid = MadePyramid(
                partial(_differing, _as_named(one.classes, other.classes)), one.pyramid, other.pyramid
            )
            kinds, name = differences(*between), f"Difference{now}"
            yield Layer(name, "errors", pyramid, kinds, one.part, one.live, between=between)
        elif len(one.classes) == len(other.classes):
            pyramid, name = MadePyramid(apart, one.pyramid, other.pyramid), f"Difference of probabilities{now}"
            yield Layer(name, "probabilities", pyramid, one.classes, one.part, one.live, between=between)


def _as_named(ours: Sequence[MaskClass], theirs: Sequence[MaskClass]) -> Mapping[int | float, int]:
    """Return our ids of their classes, by name; a class that we do not have gets an id that nobody has."""
    ids = {kind.name: kind.id for kind in ours}
    free = max((kind.id for kind in (*ours, *theirs)), default=0) + 1
    return {kind.id: ids.get(kind.name, min(free, IGNORED - 1)) for kind in theirs}


def _differing(ids: Mapping[int | float, int], one: Array, other: Array) -> Array:
    return errors(one, _renamed(other, ids))


def _described(layer: Layer) -> dict[str, Any]:
    part = layer.part
    return {
        "name": layer.name,
        "kind": layer.kind,
        "of": layer.of,
        "between": layer.between,
        "live": layer.live,
        "levels": layer.pyramid.shapes,
        "part": None if part is None else [part.x0, part.y0, part.width, part.height],
        "classes": [{"id": each.id, "name": each.name, "color": each.color} for each in layer.classes],
    }


def _shades(slide: Image) -> Shades:
    """Return the ranges in which samples are drawn: all of a byte's, else where those of some boxes lie, one of all
    colours and one of each stain or band."""
    assert isinstance(slide.dtype, np.dtype)
    if slide.dtype == np.uint8 and slide.channels >= 3:
        return Shades(((0, 255),))
    drawn = samples(slide)[: 3 if slide.channels >= 3 else 1]
    if slide.dtype == np.uint8:  # in grey, or a mask of few values
        largest = float(drawn[0].max(initial=1))
        return Shades(((0, 255 if largest >= _MOST_CLASSES else largest),))
    apart = [np.concatenate(drawn)] if slide.fill else drawn
    return Shades(tuple(range_shown(values[np.isfinite(values)], slide.dtype) for values in apart))


def _known(named: Any) -> tuple[MaskClass, ...]:
    """Give classes their usual colours."""
    named = list(named)
    usual = mask_classes(max((number for number, _ in named), default=1))
    return tuple(MaskClass(number, name, usual[number - 1].color) for number, name in named)


def _coarse(pyramid: Pyramid) -> Array:
    """Read a level of a mask that is small, but shows its classes."""
    level = pyramid.level_of(_LOOKED_AT_PX)
    height, width = (min(side, 4 * _LOOKED_AT_PX) for side in pyramid.shapes[level])
    return pyramid.read(level, Box.whole(height, width))


def _holds_shares(path: Path) -> bool:
    """Say whether a picture holds probabilities and no class ids: floats, or bytes of many values."""
    with open_ids(path) as image, closing(ImagePyramid(image, ids=True)) as pyramid:
        if image.dtype != np.uint8 or image.channels > 1:
            return str(image.dtype).startswith("float")
        return len(np.unique(_coarse(pyramid))) > _MOST_CLASSES


def _label_map(labels: Array) -> Array:
    """Turn labels, a channel each, into class ids; a later one lies over an earlier one."""
    from gigagrad.images.views import ArrayImage

    image = ArrayImage(np.ascontiguousarray(as_bytes(labels)))
    return np.asarray(LabelMap(image, range(1, len(labels) + 1)).read(Box.whole(*labels.shape[1:])))


def _filled(nodata: int | float, shares: Array) -> Array:
    """Return probabilities with 0 where there is no data."""
    return np.where(is_nodata(shares, nodata), shares.dtype.type(0), shares)


def _there(nodata: int | float | None, label: Array) -> Array:
    """Return 1 where a label is, and `IGNORED` where nothing says whether it is."""
    there = (label > 0).astype(np.uint8)
    if nodata is not None:
        there[is_nodata(label, nodata)] = IGNORED
    return there


def _renamed(ids: Array, values: Mapping[int | float, int]) -> Array:
    found = as_bytes(ids).copy()
    for value, number in values.items():
        found[ids == value] = number
    return found
