"""Files that `predict` writes of a slide: each kind is in `OUTPUTS`, by the name that people ask for it by; and records
of what was predicted, with what, and how it went: `records/NAME.json` of each slide, which makes a run resumable, and
`predictions.json` of all, the same whoever predicted them.

Some outputs are written while the network runs over the slide, all in one run; the others follow from the mask, so that
one that is asked for later costs no second run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.boxes import tiles
from gigagrad.config.predict import PredictConfig
from gigagrad.errors import ConfigError
from gigagrad.execution.sinks import Pyramid, Sink
from gigagrad.files import read_json, write_json
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
    only_tissue: bool = False
    """True where nothing but tissue was computed; the rest is 0."""

    @property
    def remarks(self) -> list[str]:
        """Return what the description of a file says of it."""
        return ["computed on tissue only"] if self.only_tissue else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One kind of file: `folder/STEM` and `suffix`, or what the images' format says where that is None.

    It is written as the network's output comes, into a `sink`, or `write` makes it of the mask and raises `WriteError`,
    and `ImageError` where the slide or a mask cannot be read. One with neither is `of_bags`: a folder for each slide or
    case (`attention`).
    """

    folder: str
    suffix: str | None = None
    sink: Callable[[Path, Streaming], Sink] | None = None
    write: Callable[[Path, Predicted], None] | None = None

    @property
    def of_bags(self) -> bool:
        return self.sink is None and self.write is None


def _mask(path: Path, streaming: Streaming) -> Sink:
    """Write class ids in bytes; of labels a channel for each, of 0 and 1. Where the slide has no data, it has none."""
    channels, classes = streaming.channels, [kind for kind in streaming.classes if kind.id]
    said = ["gigagrad labels" if channels.labels else "gigagrad mask: 0 background"]
    said += [f"{kind.id} {kind.name}" for kind in classes]
    said += streaming.remarks
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
    "attention": Output(folder="attention", suffix=""),
}


def file_names(name: str, form: str) -> dict[str, str]:
    """Name the files of the slide `name` by output, relative to the output folder, images in this format."""
    return {
        output: f"{kind.folder}/{name}{FORMATS[form] if kind.suffix is None else kind.suffix}"
        for output, kind in OUTPUTS.items()
    }


FILE_NAME: Final = "predictions.json"
FOLDER: Final = "records"


@dataclass(frozen=True, slots=True)
class MadeWith:
    """Everything that a prediction follows from beside the slide itself; two equal ones give the same mask."""

    model: str
    model_sha256: str
    threshold: float
    classes: tuple[str, ...]
    """Entries that `masks.ClassTable.parse` takes."""
    level: int | None
    """None where `target_mpp` chose it slide by slide."""
    target_mpp: float | None = None
    grey: bool = False
    bands: tuple[int | str, ...] = ()
    format: str = "tiff"
    """The format of the images, a key of `outputs.FORMATS`."""
    patches: str = ""
    """Which patches of a slide are read, "" where it is read whole."""
    only_tissue: str = ""
    """The setting of this name, "" where all of a slide was computed."""

    @classmethod
    def of(cls, config: PredictConfig, model: str) -> Self:
        """Describe predictions with these settings and what now lies in the file of the model."""
        with config.model_path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        level = config.resolved_level if config.target_mpp is None else None
        table, look = config.resolved_table, config.resolved_input_view
        seen, patches = (config.target_mpp, look.grey, look.bands), config.resolved_patches
        read = "" if patches is None else str(patches)
        tissue = "" if config.only_tissue is None else str(config.only_tissue)
        classes = table.entries if table else ()
        return cls(model, digest, config.threshold, classes, level, *seen, config.format, read, tissue)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideResult:
    """A record of one slide's prediction. `files` are by output, relative to the output folder; `slide` is absolute.

    `running` is what remains of a run that was stopped there. Sizes are in pixels and `mpp` in micrometres per pixel,
    both of the level predicted. `classes` counts those that the mask tells apart, the background included; pixels whose
    true value is `ignored` do not count. `dice` and `iou` are None where no true mask was given. `traced_downsample`
    above 1 means that the outlines in the GeoJSON file follow every 2nd, 4th, ... pixel because there were too many
    corners. A model that gives no image has, in the place of the files, `scores` of the slide by column (see
    `slide_scores`) and what they mean, `predicted`; `label` is the cohort's, "" where there is none.
    """

    name: str
    slide: str
    slide_bytes: int
    made_with: MadeWith
    status: Literal["running", "done", "failed"]
    error: str = ""
    files: dict[str, str] = field(default_factory=dict)
    height: int = 0
    width: int = 0
    mpp: float | None = None
    seconds: float = 0.0
    classes: int = 0
    ignored: int | None = None
    regions: int = 0
    traced_downsample: int = 1
    dice: float | None = None
    iou: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    predicted: str = ""
    label: str = ""
    patches: int = 0
    """The number of patches of a bag, 0 of a slide that is read whole."""
    case: str = ""
    """The name that the slides of one patient share in the cohort; "" where there is none."""

    @property
    def failed(self) -> bool:
        return self.status == "failed"


def mask_of(name: str, result: SlideResult | None) -> str:
    """Return the mask of the slide `name` in the output folder; of one from elsewhere, what it would be called."""
    return (result.files if result is not None else {}).get("mask") or file_names(name, "tiff")["mask"]


def read_records(out: Path, names: Iterable[str] | None = None) -> dict[str, SlideResult]:
    """Read results by slide name, of the slides of these names or of all; what has no record of its own is taken
    from `predictions.json`. Raises `ConfigError` if a file is damaged.
    """
    path = out / FILE_NAME
    files = sorted((out / FOLDER).glob("*.json")) if names is None else [_file_of(out, name) for name in names]
    try:
        entries = read_json(path)["slides"] if path.is_file() else []
        found = {entry["name"]: _parse(entry) for entry in entries}
        for path in filter(Path.is_file, files):
            result = _parse(read_json(path))
            if path != _file_of(out, result.name):
                raise ValueError(f"it is of {result.name!r}")
            found[result.name] = result
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged or of another version ({error}); move it away or choose another --out"
        ) from error
    return found


def write_record(out: Path, result: SlideResult) -> None:
    """Replace the record of a slide. Raises `WriteError`."""
    write_json(_file_of(out, result.name), dataclasses.asdict(result))


def summary(records: Sequence[SlideResult]) -> str:
    """Write `predictions.json` as text: all but how long it took, which is another time with everybody."""
    entries = [dataclasses.asdict(result) for result in records]
    for entry in entries:
        del entry["seconds"]
    return json.dumps({"format": 1, "slides": entries}, indent=1) + "\n"


def _file_of(out: Path, name: str) -> Path:
    return out / FOLDER / f"{name}.json"


def _parse(entry: Mapping[str, Any]) -> SlideResult:
    made_with = dict(entry["made_with"])
    made_with["classes"] = tuple(made_with["classes"])
    made_with["bands"] = tuple(made_with.get("bands", ()))
    entry = {**entry, "made_with": MadeWith(**made_with)}
    if "bag" in entry:  # as the case was called
        entry["case"] = entry.pop("bag")
    # Of a time when there were these three outputs only.
    earlier = {output: file for output in ("mask", "geojson", "overlay") if (file := entry.pop(output, ""))}
    result = SlideResult(**{"files": earlier, **entry})
    ours = file_names(result.name, result.made_with.format)
    outside = any(ours[output] != file for output, file in result.files.items())
    if not all(isinstance(score, float) for score in result.scores.values()):
        raise ValueError(f"the scores of {result.name!r} are no numbers")
    if outside or Path(result.name).name != result.name or not isinstance(result.made_with.level, int | None):
        raise ValueError(f"{result.name!r} is not as predict writes it")
    return result
