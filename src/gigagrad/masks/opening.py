"""Open whatever says what is true of a slide's pixels as a mask of the slide's own size.

A mask may hold labels: several of each pixel, each there or not, as a channel of 0, 1 and `IGNORED`. Where a slide
holds no data, nothing is true of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from gigagrad.boxes import Box
from gigagrad.errors import ImageError, TargetError
from gigagrad.images import Image
from gigagrad.images.image import View
from gigagrad.images.opening import open_ids
from gigagrad.images.pixels import Array
from gigagrad.images.views import Resampled, Stacked, at_another_resolution
from gigagrad.masks.annotations import is_annotation_file, read_annotations
from gigagrad.masks.classes import IGNORED, ClassTable, is_ignored
from gigagrad.masks.outlines import AnnotationMask, Outlines, in_pixels, overlaps, span

if TYPE_CHECKING:
    import torch

_SIGNED: Final = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


Source: TypeAlias = "str | Path | Outlines | Image | Array | torch.Tensor"


def open_mask(
    source: Source | list[Source] | tuple[Source, ...],
    slide: Image,
    classes: ClassTable | Mapping[str, int | str] | Sequence[str] | None = None,
    *,
    labels: int = 1,
) -> Image:
    """Open the mask of an open `slide`, pixel for pixel at the slide's level.

    Args:
        source: QuPath GeoJSON, ASAP XML (or the `Outlines` of one), in pixels of the slide's level 0, or GeoJSON in
            coordinates on earth (`outlines.in_pixels`); or class ids as `open_image` takes them, of the slide's size or
            the same picture at another resolution, of which the nearest pixel counts; also of what was scanned, the
            slide's `bounds`. Of several in a list or tuple each is of one label.
        slide: where the mask belongs.
        classes: class ids by name, `{"tumour": 1, "stroma": 2, "artefact": "ignore"}`, or as `ClassTable.parse` takes
            them. Of an image, names that are numbers are the values to replace: `{"255": 1}`. Without it, outlines
            count by their names in alphabetical order, and the values of an image are class ids. Regions of several
            ids, `{"whole": "1+2", "core": "2"}`, are labels. A `ClassTable` is taken as that of a cohort, of which a
            slide may have none of the classes; other tables must name one of the outlines' classes.
        labels: of more than one, which may overlap, each has a channel of 0 and 1: of class ids or outlines that of
            class 1 first, of a mask with so many channels its own, which are 1 where they are above 0.

    Outlines are painted in their order, box by box as they are read. What none covers is ignored (255), or background
    if there is but one class; so are pixels of a mask file that hold its nodata value, which without `classes` are
    ignored. Classes whose name ends in an asterisk are ignored as in QuPath, unless `classes` names them. Ids are the
    indices of a picture with a palette, whatever its colours; unsigned ones of 16 and more bits are read as signed ones
    of more, which PyTorch computes with.

    Raises `ImageError` for a source that cannot be read or is no mask, `TargetError` for one that does not belong to
    the slide, and `ConfigError` for `classes`.
    """
    if not isinstance(slide, Image):
        raise ImageError(f"a mask needs its slide, open, and got {slide!r}: gg.open_mask(..., gg.open_image('slide'))")
    table = _table(classes)
    if isinstance(source, list | tuple):
        return (
            _stacked(source, slide, table, labels)
            if len(source) > 1
            else open_mask(source[0], slide, classes, labels=labels)
        )
    if (outlines := _outlines_in(source)) is not None:
        if outlines.names and table is not None and table is not classes:
            table.check_any_used(outlines.names, _name(source, slide))
        return _painted(outlines, slide, table or ClassTable.of_names(outlines.names), source, labels)
    assert not isinstance(source, Outlines)
    mask = open_ids(source)
    nodata = mask.nodata
    if nodata is None and mask.missing_bytes:
        mask.close()
        raise TargetError(
            f"the mask {mask.name} says by a mask inside its file where it holds data; say it by a value: "
            "gdal_translate -a_nodata 255 -mask none"
        )
    ids: dict[int | float, int] = dict(table.values.items()) if table is not None else {}
    mask = _at_size_of(slide, mask, source if isinstance(source, str | Path) else mask.name)
    if nodata is not None:
        ids = {nodata: IGNORED if table is None else table.unlabelled, **ids}
    mask = Relabelled(mask, ids) if ids or str(mask_dtype(mask)) != str(mask.dtype).removeprefix("torch.") else mask
    regions = table.regions if table is not None else ()
    if labels == 1 and not regions:
        return mask
    if mask.channels == 1:
        return _of_labels(LabelOfIds(mask, regions or [(number,) for number in range(1, labels + 1)]), labels)
    return _of_labels(Labels(mask), labels)


class Relabelled(View):
    """A mask with other numbers: those in `ids` are replaced, the others stay. Closing it closes the mask."""

    def __init__(self, mask: Image, ids: Mapping[int | float, int]) -> None:
        ignores = IGNORED in ids.values()
        super().__init__(mask, dtype=room_for_ignored(mask), nodata=IGNORED if ignores else None)
        self._ids = ids

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._image.read(box))
        renamed = pixels.astype(room_for_ignored(self))
        for value, number in self._ids.items():
            renamed[np.isnan(pixels) if math.isnan(value) else pixels == value] = number
        return renamed

    def _release(self) -> None:
        self._image.close()


def _stacked(sources: Sequence[Source], slide: Image, table: ClassTable | None, labels: int) -> Image:
    """Open a mask of each label. Of outlines all are the label's, whatever they are called."""
    with ExitStack() as opened:
        masks = []
        for source in sources:
            outlines = _outlines_in(source)
            if outlines is None:
                mask = open_mask(source, slide, table)
            else:
                names = [name for name in outlines.names if not is_ignored(name)]
                one = ClassTable(tuple((name, 1) for name in names), unlabelled=0)
                mask = _painted(outlines, slide, one, source)
            masks.append(opened.enter_context(Labels(mask)))
        stacked = Stacked(masks)
        opened.pop_all()
    return _of_labels(stacked, labels)


def _outlines_in(source: Source) -> Outlines | None:
    if isinstance(source, str | Path) and is_annotation_file(Path(source)):
        return read_annotations(source)
    return source if isinstance(source, Outlines) else None


def _of_labels(mask: Image, labels: int) -> Image:
    """Return `mask`, closed where it has not a channel for each of `labels`."""
    if mask.channels != labels:
        mask.close()
        raise TargetError(
            f"the mask {mask.name} has {mask.channels} channels and the model {labels} output channels; a mask of "
            "several labels has one for each, a mask of class ids has one"
        )
    return mask


def _table(classes: ClassTable | Mapping[str, int | str] | Sequence[str] | None) -> ClassTable | None:
    if classes is None or isinstance(classes, ClassTable):
        return classes
    if isinstance(classes, Mapping):
        return ClassTable.parse([f"{name}={number}" for name, number in classes.items()])
    return ClassTable.parse(classes)


def _painted(outlines: Outlines, slide: Image, table: ClassTable, source: Source, labels: int = 1) -> Image:
    name = _name(source, slide)
    if not len(outlines):
        raise TargetError(f"{name} has no outline that covers an area; annotate {slide.name}, or leave its mask empty")
    outlines = in_pixels(outlines, slide)
    if not overlaps(outlines, slide):
        full = slide.levels[0].shape
        raise TargetError(
            f"the outlines of {name} lie {span(outlines)}, outside their slide {slide.name} of {full[0]} x {full[1]} "
            "px; coordinates are pixels of level 0, or of the reference system that a member 'crs' names"
        )
    table.check_spelt(outlines.names, name)
    return AnnotationMask(outlines, table.ignoring(outlines.names), slide, name=name, labels=labels)


def _name(source: Source, slide: Image) -> str:
    return Path(source).stem if isinstance(source, str | Path) else slide.name


def _at_size_of(slide: Image, mask: Image, name: str | Path) -> Image:
    """Return `mask` at the level that has the slide's size, or the nearest pixels of its finest level."""
    for level, entry in enumerate(mask.levels):
        if entry.shape == slide.shape[1:]:
            if not level:
                return mask
            with mask:
                return mask.at_level(level)
    full, bounds = mask.levels[0].shape, slide.bounds
    whole, of_a_level = at_another_resolution(full, slide.shape[1:]), any(level.shape == full for level in slide.levels)
    if bounds is not None and (full == bounds.shape or (not of_a_level and at_another_resolution(full, bounds.shape))):
        if whole:
            mask.close()
            raise TargetError(
                f"the mask {name}, {full[0]} x {full[1]} px, may be of the whole slide {slide.name} or of what was "
                f"scanned of it, {bounds.height} x {bounds.width} px, as QuPath shows it; give it in the size of the "
                f"whole slide, {slide.shape[1]} x {slide.shape[2]} px"
            )
        return Resampled(mask, slide.height, slide.width, bounds, slide.levels[0].shape)
    if not whole:
        mask.close()
        raise TargetError(
            f"the mask {name} is {full[0]} x {full[1]} px and its slide {slide.shape[1]} x {slide.shape[2]} px; both "
            "must show the same part of the slide, at whatever resolution"
        )
    return Resampled(mask, slide.height, slide.width)


class Labels(Image):
    """A mask `(C, H, W)` whose channels are labels: what is above 0 is 1, and what holds no data is `IGNORED`.

    Closing it closes the mask.
    """

    def __init__(self, mask: Image, labels: int | None = None) -> None:
        super().__init__(
            shape=(labels or mask.channels, *mask.shape[1:]),
            dtype=np.dtype(np.uint8),
            name=mask.name,
            mpp=mask.mpp,
            cache_bytes=mask.cache_bytes,
            thread_bytes=mask.thread_bytes,
            decode_seconds=mask.decode_seconds,
        )
        self._image = mask

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._image.read(box))
        labels = (pixels > 0).astype(np.uint8)
        if self._image.nodata is not None:
            labels[pixels == self._image.nodata] = IGNORED
        return labels

    def _release(self) -> None:
        self._image.close()


class LabelOfIds(Labels):
    """A mask of class ids `(1, H, W)` as a channel for each of `regions`, which says where one of its ids is.

    Reading an id that is in none of them raises `TargetError`.
    """

    def __init__(self, mask: Image, regions: Sequence[Sequence[int]]) -> None:
        super().__init__(mask, len(regions))
        self._regions = regions

    def _read_inside(self, box: Box) -> Array:
        ids = np.asarray(self._image.read(box))[0]
        labels = np.stack([np.isin(ids, region) for region in self._regions]).astype(np.uint8)
        labels[:, ids == IGNORED] = IGNORED
        foreign = (ids != 0) & ~labels.any(axis=0)
        if foreign.any():
            largest = ids[foreign].max()
            raise TargetError(f"the mask of {self.name} holds class {largest:g}, none of its {self.channels} labels")
        return labels


class LabelMap(View):
    """Labels `(C, H, W)` as class ids `(1, H, W)`: where a label is there, its one of `ids`; a later one lies over an
    earlier one, as nnU-Net's `regions_class_order` has it. Closing it leaves the labels open.
    """

    def __init__(self, labels: Image, ids: Sequence[int]) -> None:
        super().__init__(labels, (1, *labels.shape[1:]), channel_names=())
        self._ids = ids

    def _read_inside(self, box: Box) -> Array:
        labels = np.asarray(self._image.read(box))
        ids = np.where(labels[0] == IGNORED, IGNORED, 0).astype(np.uint8)
        for label, number in zip(labels, self._ids, strict=True):
            ids[label == 1] = number
        return ids[None]


def ignoring_missing(mask: Image, slide: Image) -> Image:
    """Make `mask` `IGNORED` where `slide`, of the same size, has no data; itself where all is there.

    Closing it leaves both open.
    """
    return IgnoringMissing(mask, slide) if slide.missing_bytes else mask


class IgnoringMissing(View):
    """Use `ignoring_missing`."""

    def __init__(self, mask: Image, slide: Image) -> None:
        held = mask.thread_bytes + slide.missing_bytes
        super().__init__(mask, dtype=room_for_ignored(mask), nodata=IGNORED, thread_bytes=held)
        self._slide = slide

    def _read_inside(self, box: Box) -> Array:
        pixels = np.asarray(self._image.read(box)).astype(room_for_ignored(self), copy=False)
        if (missing := self._slide.missing(box)) is not None:
            pixels[:, missing] = IGNORED
        return pixels


def mask_dtype(mask: Image) -> np.dtype[np.generic]:
    """Return the dtype of a mask as arrays; signed and wider where PyTorch has next to no operators for it."""
    name = str(mask.dtype).removeprefix("torch.")
    return np.dtype(_SIGNED.get(name, name))


def room_for_ignored(mask: Image) -> np.dtype[np.generic]:
    """Return `mask_dtype`, or a wider one that holds `IGNORED`, too."""
    return np.promote_types(mask_dtype(mask), np.uint8)
