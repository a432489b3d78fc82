"""Files that `predict` writes of a slide: each kind is in `OUTPUTS`, by the name that people ask for it by; where they
lie, and records of them, are in `cohorts.records`.

Some outputs are written while the network runs over the slide, all in one run; the others follow from the mask, so that
one that is asked for later costs no second run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.boxes import tiles
from gigagrad.cohorts import Row
from gigagrad.cohorts.records import MadeWith
from gigagrad.config.predict import PredictConfig
from gigagrad.execution.sinks import Pyramid, Sink
from gigagrad.files import digest_of
from gigagrad.images import Image, MaskClass, write_pyramid
from gigagrad.images.georeference import geotiff_tags, level_near
from gigagrad.masks import IGNORED, LabelMap
from gigagrad.prediction.classes import Channels
from gigagrad.prediction.graphs import tissue_graph, write_graph
from gigagrad.prediction.outlines import draw_overlay, layers, write_overlay
from gigagrad.prediction.polygons import Traced, placed, write_annotations, write_geojson, write_instances

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
    only_tissue: bool = False
    """True where nothing but tissue was computed; the rest is 0."""
    nans: list[int] = field(default_factory=list)
    """Numbers of pixels, by strip, of which the network gave NaN, which no class wins; none of what is not computed."""

    @property
    def remarks(self) -> list[str]:
        """Return what the description of a file says of it."""
        return ["computed on tissue only"] if self.only_tissue else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One kind of file.

    It is written as the network's output comes, into a `sink`, or `write` makes it of the mask and raises `WriteError`,
    and `ImageError` where the slide or a mask cannot be read. One with neither is `of_bags`: a folder for each slide or
    case (`attention`).
    """

    sink: Callable[[Path, Streaming], Sink] | None = None
    write: Callable[[Path, Predicted], None] | None = None

    @property
    def of_bags(self) -> bool:
        return self.sink is None and self.write is None


def _mask(path: Path, streaming: Streaming) -> Sink:
    """Write class ids in bytes; of labels a channel for each, of 0 and 1. Where the slide has no data, it has none."""
    channels, classes = streaming.channels, [kind for kind in streaming.classes if kind.id]

    def pixels(logits_NCHW: torch.Tensor) -> NDArray[np.uint8]:
        if not streaming.only_tissue:
            streaming.nans.append(int(logits_NCHW.isnan().any(1).sum()))
        return channels.mask(logits_NCHW, streaming.threshold).transpose(1, 2, 0)

    said = ["gigagrad labels" if channels.labels else "gigagrad mask: 0 background"]
    said += [f"{kind.id} {kind.name}" for kind in classes]
    said += streaming.remarks
    nodata = IGNORED if streaming.seen.missing_bytes else None
    return Pyramid(
        path,
        dtype=np.uint8,
        planes=channels.planes,
        pixels=pixels,
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
        return probability_bytes(streaming.channels, logits_NCHW, most).transpose(1, 2, 0)

    names = [kind.name for kind in streaming.classes]
    said = ", 255 is 1" if nodata is None else f" in 255ths, {most} at most, {nodata} no data"
    return Pyramid(
        path,
        dtype=np.uint8,
        pixels=pixels,
        seen=streaming.seen,
        nodata=IGNORED,
        overwrite=True,
        description=f"gigagrad probabilities{said}: {', '.join([*names, *streaming.remarks])}",
        tags=geotiff_tags(streaming.seen.georeference, nodata),
        channels=streaming.classes,
    )


def probability_bytes(channels: Channels, logits_NCHW: torch.Tensor, most: int = 255) -> NDArray[np.uint8]:
    """Convert `(1, C, h, w)` logits to probabilities `(C, h, w)` in 255ths, `most` at most."""
    scaled = channels.probabilities(logits_NCHW)[0].mul_(255).round_().clamp_(max=most)
    return scaled.to("cpu", torch.uint8).numpy()


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


def _graph(path: Path, predicted: Predicted) -> None:
    slide, exact = predicted.slide.filled(), predicted.traced.downsample == 1
    outlines = placed(predicted.traced, path.stem) if exact else ()
    graph = tissue_graph(predicted.mask, predicted.classes, seen=slide, scale=predicted.scale, outlines=outlines)
    write_graph(path, graph)


def _tiatoolbox(path: Path, predicted: Predicted) -> None:
    write_annotations(path, predicted.traced, path.stem, predicted.scale)


OUTPUTS: Final[dict[str, Output]] = {
    "mask": Output(sink=_mask),
    "probabilities": Output(sink=_probabilities),
    "geojson": Output(write=_geojson),
    "overlay": Output(write=_overlay),
    "instances": Output(write=_instances),
    "graph": Output(write=_graph),
    "tiatoolbox": Output(write=_tiatoolbox),
    "labelmap": Output(write=_label_map),
    "attention": Output(),
}


def open_slide(config: PredictConfig, row: Row) -> Image:
    """Open a slide at the level, and with the resolution, that the settings ask for. Raises `ImageError`."""
    level = config.resolved_level
    if config.target_mpp is not None:  # which raises `ImageError` where the slide's is unknown
        with row.open(mpp=config.mpp) as slide:
            level = level_near(slide, config.target_mpp)
    return row.open(level, config.mpp)


def made_with(config: PredictConfig, model: str) -> MadeWith:
    """Describe predictions with these settings and what now lies in the file of the model."""
    digest = digest_of(config.model_path)
    level = config.resolved_level if config.target_mpp is None else None
    table, look = config.resolved_table, config.resolved_input_view
    seen, patches = (config.target_mpp, look.grey, look.bands), config.resolved_patches
    read = "" if patches is None else str(patches)
    tissue = "" if config.only_tissue is None else str(config.only_tissue)
    classes = table.entries if table else ()
    return MadeWith(model, digest, config.threshold, classes, level, *seen, config.format, read, tissue)
