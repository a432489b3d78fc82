"""Files that `predict` writes of a slide: each kind is in `OUTPUTS`, by the name that people ask for it by.

Some are written while the network runs over the slide, all in one run; the others follow from the mask, so that one
that is asked for later costs no second run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.boxes import tiles
from gigagrad.execution.sinks import Pyramid, Sink
from gigagrad.images import Image, MaskClass, write_pyramid
from gigagrad.images.georeference import geotiff_tags
from gigagrad.masks import IGNORED, LabelMap
from gigagrad.prediction.classes import Channels
from gigagrad.prediction.outlines import draw_overlay, layers, write_overlay
from gigagrad.prediction.polygons import Traced, write_annotations, write_geojson, write_instances

FORMATS: Final = {"tiff": ".tif", "ome-tiff": ".ome.tif", "cog": ".cog.tif", "ome-zarr": ".ome.zarr"}
"""Suffixes of images by the name of their format; `write_pyramid` goes by them."""
_STRIP_PX: Final = 512
"""Rows of a mask that are made of it at a time: those of its tiles."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A slide with its mask, the regions of that, and the true mask where there is one."""

    slide: Image
    mask: Image
    traced: Traced
    classes: Sequence[MaskClass]
    truth: Image | None
    ids: Sequence[int] = ()
    """The id of each class in a label map, where classes are regions."""

    @property
    def scale(self) -> tuple[float, float]:
        """Return how many level-0 pixels of the slide a pixel of the mask is high and wide."""
        full = self.slide.levels[0].shape
        return full[0] / self.slide.height, full[1] / self.slide.width


@dataclass(frozen=True, slots=True)
class Streaming:
    """Facts before the network runs: the slide as it sees it, and what its output's channels mean.

    `classes` are those of the channels (see `Channels.classes`).
    """

    seen: Image
    channels: Channels
    classes: Sequence[MaskClass]
    threshold: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One kind of file: `folder/STEM` and `suffix`, or what the images' format says where that is None.

    It is written as the network's output comes, into a `sink`, or `write` makes it of the mask and raises `WriteError`,
    and `ImageError` where the slide or a mask cannot be read.
    """

    folder: str
    suffix: str | None = None
    sink: Callable[[Path, Streaming], Sink] | None = None
    write: Callable[[Path, Predicted], None] | None = None


def _mask(path: Path, streaming: Streaming) -> Sink:
    """Write class ids in bytes; of labels a channel for each, of 0 and 1. Where the slide has no data, it has none."""
    channels, classes = streaming.channels, [kind for kind in streaming.classes if kind.id]
    said = ["gigagrad labels" if channels.labels else "gigagrad mask: 0 background"]
    said += [f"{kind.id} {kind.name}" for kind in classes]
    nodata = IGNORED if streaming.seen.missing_bytes else None
    return Pyramid(
        path,
        dtype=np.uint8,
        planes=channels.planes,
        pixels=lambda logits: channels.mask(logits, streaming.threshold).transpose(1, 2, 0),
        nearest=True,
        seen=streaming.seen,
        nodata=IGNORED,
        overwrite=True,
        description=", ".join(said if nodata is None else [*said, f"{nodata} no data"]),
        tags=geotiff_tags(streaming.seen.georeference, nodata),
        **{"channels" if channels.labels else "classes": classes},
    )


def _probabilities(path: Path, streaming: Streaming) -> Sink:
    """Write a channel for each class in bytes, 255 is 1: what every viewer takes, in a quarter of the room of floats.

    Of a slide that says where it has no data, 255 says so, and the largest probability is 254.
    """
    nodata = IGNORED if streaming.seen.missing_bytes else None
    most = 255 if nodata is None else IGNORED - 1

    def pixels(logits_NCHW: torch.Tensor) -> NDArray[np.uint8]:
        scaled = streaming.channels.probabilities(logits_NCHW)[0].mul_(255).round_().clamp_(max=most)
        return scaled.permute(1, 2, 0).to("cpu", torch.uint8).numpy()

    said = ", 255 is 1" if nodata is None else f" in 255ths, {most} at most, {nodata} no data"
    return Pyramid(
        path,
        dtype=np.uint8,
        pixels=pixels,
        seen=streaming.seen,
        nodata=IGNORED,
        overwrite=True,
        description=f"gigagrad probabilities{said}: {', '.join(kind.name for kind in streaming.classes)}",
        tags=geotiff_tags(streaming.seen.georeference, nodata),
        channels=streaming.classes,
    )


def _label_map(path: Path, predicted: Predicted) -> None:
    """Write class ids as in the files of a cohort whose classes are regions of them."""
    ids = LabelMap(predicted.mask, predicted.ids)
    kinds = [replace(kind, id=number) for number, kind in zip(predicted.ids, predicted.classes, strict=True)]
    _, height, width = ids.shape
    write_pyramid(
        path,
        (np.asarray(ids.read(strip))[0] for strip in tiles(height, width, _STRIP_PX, width)),
        shape=(height, width, 1),
        dtype=np.uint8,
        nearest=True,
        mpp=ids.mpp,
        overwrite=True,
        description=", ".join(["gigagrad mask: 0 background", *(f"{kind.id} {kind.name}" for kind in kinds)]),
        classes=kinds,
        tags=geotiff_tags(ids.georeference, None if ids.nodata is None else IGNORED),
    )


def _geojson(path: Path, predicted: Predicted) -> None:
    slide = predicted.slide
    write_geojson(path, predicted.traced, path.stem, predicted.scale, slide.georeference, slide.bounds)


def _overlay(path: Path, predicted: Predicted) -> None:
    drawn = layers(predicted.mask, predicted.classes, predicted.truth)
    write_overlay(path, draw_overlay(predicted.slide, drawn))


def _instances(path: Path, predicted: Predicted) -> None:
    write_instances(path, predicted.traced, path.stem, predicted.scale, predicted.slide.mpp)


def _tiatoolbox(path: Path, predicted: Predicted) -> None:
    write_annotations(path, predicted.traced, path.stem, predicted.scale)


OUTPUTS: Final[dict[str, Output]] = {
    "mask": Output(folder="masks", sink=_mask),
    "probabilities": Output(folder="probabilities", sink=_probabilities),
    "geojson": Output(folder="geojson", suffix=".geojson", write=_geojson),
    "overlay": Output(folder="overlays", suffix=".png", write=_overlay),
    "instances": Output(folder="instances", suffix=".csv", write=_instances),
    "tiatoolbox": Output(folder="tiatoolbox", suffix=".db", write=_tiatoolbox),
    "labelmap": Output(folder="labelmaps", write=_label_map),
}


def file_names(name: str, form: str) -> dict[str, str]:
    """Name the files of the slide `name` by output, relative to the output folder, images in this format."""
    return {
        output: f"{kind.folder}/{name}{FORMATS[form] if kind.suffix is None else kind.suffix}"
        for output, kind in OUTPUTS.items()
    }
