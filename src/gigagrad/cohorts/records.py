"""Records of what was predicted of each slide, with what, and how it went: `records/NAME.json`, which makes a run
resumable, and `predictions.json` of all, the same whoever predicted them. Reading them needs no PyTorch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from gigagrad.errors import ConfigError
from gigagrad.files import read_json, write_json

FORMATS: Final = {"tiff": ".tif", "ome-tiff": ".ome.tif", "cog": ".cog.tif", "ome-zarr": ".ome.zarr"}
"""Suffixes of images by the name of their format; `write_pyramid` goes by them."""
PLACES: Final[dict[str, tuple[str, str | None]]] = {
    "mask": ("masks", None),
    "probabilities": ("probabilities", None),
    "geojson": ("geojson", ".geojson"),
    "overlay": ("overlays", ".png"),
    "instances": ("instances", ".csv"),
    "graph": ("graphs", ".npz"),
    "tiatoolbox": ("tiatoolbox", ".db"),
    "labelmap": ("labelmaps", None),
    "attention": ("attention", ""),
}
"""Folder and suffix of each output, by the name that people ask for it by; None is the suffix of the images' format."""
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
    """The format of the images, a key of `FORMATS`."""
    patches: str = ""
    """Which patches of a slide are read, "" where it is read whole."""
    only_tissue: str = ""
    """The setting of this name, "" where all of a slide was computed."""


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
    given: str | None = None
    """A digest of what was given of the slide beside its file: its resolution, and where its patches are; "" for
    nothing, None in records of earlier versions."""
    content: str | None = None
    """A digest of the slide's own files (`files.content_digest`), None in records of earlier versions."""
    truth: str = ""
    """A digest of the true masks that `dice` and `iou` compare with, "" where there are none."""

    @property
    def failed(self) -> bool:
        return self.status == "failed"


def file_names(name: str, form: str) -> dict[str, str]:
    """Name the files of the slide `name` by output, relative to the output folder, images in this format."""
    return {
        output: f"{folder}/{name}{FORMATS[form] if suffix is None else suffix}"
        for output, (folder, suffix) in PLACES.items()
    }


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
