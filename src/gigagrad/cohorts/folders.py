"""Cohorts that are folders: nnU-Net's, and images beside masks of the same names.

    dataset.json, imagesTr/CASE_0000.png, labelsTr/CASE.png            nnU-Net v2; also imagesTs and labelsTs,
                                                                       channels in CASE_0001.png and so on, and
                                                                       labels that are regions of several ids
    images/NAME.png, masks/NAME.png                                    also `labels` or `annotations` for `masks`, and
                                                                       NAME.geojson.gz and the like
    train/images, train/masks, val/images, ...                         the same for each split

Where there is no split, every fifth case, in alphabetical order, is validated: nnU-Net's fold of a fifth, by rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from gigagrad.cohorts.rows import SPLITS, Row, slides_in, with_own_names
from gigagrad.errors import ConfigError
from gigagrad.files import read_json
from gigagrad.images.layout import plain_stem
from gigagrad.masks.compressed import annotation_stem

_MASK_FOLDERS = ("masks", "labels", "annotations")
_VALIDATED_EVERY = 5


def is_cohort_folder(folder: Path) -> bool:
    """Return whether `rows_of_folder` knows what the folder is."""
    return (folder / "dataset.json").is_file() or any((folder / place / "images").is_dir() for place in ("", *SPLITS))


def rows_of_folder(folder: Path) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Read the rows of a cohort folder, every one with a split, and its classes as `ClassTable.parse` takes them.

    Raises `ConfigError` naming the image without a mask, or what the folder lacks.
    """
    if (folder / "dataset.json").is_file():
        return _of_nnunet(folder)
    if (folder / "images").is_dir():
        rows = list(_with_splits(_matched(folder)))
    else:
        split = [each for each in SPLITS if (folder / each / "images").is_dir()]
        rows = [replace(row, split=each) for each in split for row in _matched(folder / each)]
    if not rows:
        raise ConfigError(
            f"{folder} holds no images; expected files in images/ and masks/, or in train/images and so on"
        )
    return with_own_names(rows), ()


def _matched(folder: Path) -> Iterator[Row]:
    place = next((folder / name for name in _MASK_FOLDERS if (folder / name).is_dir()), None)
    if place is None:
        raise ConfigError(f"{folder} has images/ but no folder of masks; expected one of {', '.join(_MASK_FOLDERS)}")
    masks = {_stem(path): path for path in sorted(place.iterdir()) if not path.name.startswith(".")}
    for slide in slides_in(folder / "images"):
        if _stem(slide) not in masks:
            raise ConfigError(f"{slide} has no mask; expected {place.name}/{_stem(slide)} with the suffix of a mask")
        yield Row(slide, masks[_stem(slide)])


def _stem(path: Path) -> str:
    """Return the name that an image and its mask share, without the suffixes of their formats."""
    return plain_stem(annotation_stem(path))


def _of_nnunet(folder: Path) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    path = folder / "dataset.json"
    try:
        settings: Mapping[str, Any] = read_json(path)
        classes, suffix = _classes(settings), str(settings["file_ending"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read {path} as nnU-Net's: {error}; it needs labels with an id or a list of ids, and file_ending"
        ) from error
    rows = list(_with_splits(_cases(folder, "Tr", suffix)))
    if (folder / "labelsTs").is_dir():
        rows += [replace(row, split="test") for row in _cases(folder, "Ts", suffix)]
    if not rows:
        raise ConfigError(f"{folder} has no case; expected imagesTr/CASE_0000{suffix} and labelsTr/CASE{suffix}")
    return tuple(rows), classes


def _classes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes of a dataset's labels, as `ClassTable.parse` takes them.

    Where a label is a region of several ids, all are, and `regions_class_order` has of each, later ones over earlier
    ones, the id that it becomes in a label map. The id to ignore is called so. Raises `ValueError`.
    """
    held = {str(name): ids if isinstance(ids, list) else [ids] for name, ids in settings["labels"].items()}
    if not all(ids and all(type(number) is int for number in ids) for ids in held.values()):
        raise ValueError("a label is neither an id nor a list of ids")
    ignored = held.pop("ignore", [])
    if any(len(ids) > 1 for ids in held.values()):
        regions = {name: ids for name, ids in held.items() if set(ids) != {0}}
        order = settings.get("regions_class_order")
        if not isinstance(order, list) or len(order) != len(regions):
            raise ValueError(f"regions_class_order is {order}, and there are {len(regions)} regions to have an id each")
        for (name, ids), first in zip(regions.items(), order, strict=True):
            if first not in ids:
                raise ValueError(f"regions_class_order has {first} for {name!r}, whose ids are {ids}")
            held[name] = list(dict.fromkeys([first, *ids]))
    named = [f"{name}={'+'.join(map(str, ids))}" for name, ids in held.items()]
    return (*named, *(f"{number}=ignore" for number in ignored))


def _cases(folder: Path, part: str, suffix: str) -> Iterator[Row]:
    """Yield the rows of CASE_0000, CASE_0001, ...: the files of a case hold its channels."""
    images, labels = folder / f"images{part}", folder / f"labels{part}"
    files = slides_in(images) if images.is_dir() else []
    for case, of_case in groupby(files, lambda file: file.name.removesuffix(suffix).rpartition("_")[0]):
        slides = list(of_case)
        for number, slide in enumerate(slides):
            expected = images / f"{case}_{number:04}{suffix}"
            if slide != expected:
                raise ConfigError(f"{slide} is there and {expected} is not; a case's files are numbered from 0000 on")
        mask = labels / f"{case}{suffix}"
        if not mask.is_file():
            raise ConfigError(f"{slides[0]} has no mask; expected {mask}")
        yield Row(slides[0], mask, called=case, further_slides=tuple(slides[1:]))


def _with_splits(rows: Iterable[Row]) -> Iterator[Row]:
    for index, row in enumerate(rows):
        yield replace(row, split="val" if index % _VALIDATED_EVERY == _VALIDATED_EVERY - 1 else "train")
