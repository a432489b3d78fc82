"""Compute the features of all patches of a cohort's slides, or of a share of them, in TRIDENT's layout.

    OUT/20x_224px_0px_overlap/features_ENCODER/SLIDE.h5

A run can be stopped and started again: files are written whole or not at all, so a slide whose file is there is done.
A slide that fails does not stop the others.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from gigagrad.cohorts import Row, find_slides
from gigagrad.cohorts.slides import rows_of, run_job
from gigagrad.config.predict import EmbedConfig
from gigagrad.errors import ConfigError, GigagradError, ImageError, WriteError, extra
from gigagrad.events import Events, Listener, Notice
from gigagrad.files import content_digest
from gigagrad.images.coordinates import trident_attributes
from gigagrad.masks import is_annotation_file
from gigagrad.models import load_weights_into, resolve_encoder
from gigagrad.models.libraries import LIBRARIES
from gigagrad.models.networks import check_intensities
from gigagrad.models.registry import asks_for_weights
from gigagrad.prediction.encoding import Encoder
from gigagrad.prediction.features import features_of, made_of_file, open_features
from gigagrad.shares import Share
from gigagrad.units import format_seconds

_OF_PATCHES: Final = ("patch_size", "patch_mpp", "overlap", "tissue", "least_tissue")
"""Settings that say which patches of a slide there are."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The features of one slide, now or before: their file, and how many there are of how many patches."""

    name: str
    file: Path
    patches: int
    length: int


def embed(
    config: EmbedConfig | Mapping[str, Any] | None = None, listeners: Iterable[Listener] = (), **settings: Any
) -> tuple[Embedded, ...]:
    """Compute the features of every slide of `config`, or of its share; one result per slide, in order.

    `embed(slides=["x.svs"], encoder="timm:resnet18?pretrained=true", out="features")` names `settings` of an
    `EmbedConfig`; of a `config` they take the place of its own. Slides that are done are left alone.

    A slide that fails is told (`Notice`) and left out; the others go on. Emits the job `embed`, counted in slides, and
    for each the job `patches`.

    Raises `ConfigError`, `ModelError` and `WriteError` for what concerns all slides, before any of them is computed,
    and `ImageError` at the end where some failed.
    """
    if isinstance(config, EmbedConfig):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    job = _Job(EmbedConfig.from_dict({**(config or {}), **settings}), Events(tuple(listeners)))
    return job.run()


class _Job:
    """The settings and the encoder of all slides."""

    def __init__(self, config: EmbedConfig, events: Events) -> None:
        self._config, self._events, self._folder = config, events, config.folder
        with extra("bags"):  # before anything takes long
            import h5py  # noqa: F401
        network = _network(config, events)
        self._encoder = Encoder(network, memory=config.memory, device=config.device, precision=config.precision)

    def run(self) -> tuple[Embedded, ...]:
        config, share = self._config, Share.parse(self._config.share)
        rows = rows_of(share, find_slides(config.slides, config.split))
        done = {row for row in rows if self._is_done(row)}

        def work(row: Row) -> tuple[Embedded, str]:
            start = time.perf_counter()
            if row not in done:
                self._write(row)
            made = self._made(row)
            return made, "done before" if row in done else _in_words(made, time.perf_counter() - start)

        failures = GigagradError, OSError
        return tuple(
            run_job(
                "embed", rows, share, self._folder, self._events, work, done, failures=failures, subject=config.encoder
            )
        )

    def _path(self, row: Row) -> Path:
        return self._folder / f"{row.name}.h5"

    def _is_done(self, row: Row) -> bool:
        """Say whether an earlier run has computed these features of the slide as it is now.

        Raises `ConfigError` where the file has others, and `WriteError` where somebody else wrote it.
        """
        path = self._path(row)
        if self._config.overwrite or not path.exists():
            return False
        known = made_of_file(path)
        if known is None:
            raise WriteError(f"{path} exists, but was not written here; choose another --out or pass --overwrite")
        asked = self._asked(row)
        before = known.get("asked")
        same = isinstance(before, dict) and {**before, "slide": asked["slide"]} == asked
        if known.get("encoder") != self._encoder.digest or not same:
            raise ConfigError(
                f"{path} holds features of another encoder, or of other patches; choose another --out or --name, or "
                "pass --overwrite"
            )
        return bool(before == asked)

    def _asked(self, row: Row) -> dict[str, Any]:
        """Return what the patches of a slide follow from, known without opening it."""
        config = self._config
        found: dict[str, Any] = {name: getattr(config, name) for name in _OF_PATCHES}
        coords, mask = config.patches.file(row), row.mask if config.tissue == "mask" else None
        return found | {
            "mpp": config.mpp or row.mpp,
            "slide": [content_digest(path) for path in row.slides],
            "coords": None if coords is None else content_digest(coords, whole=True),
            "mask": None if mask is None else content_digest(mask, whole=is_annotation_file(mask)),
        }

    def _write(self, row: Row) -> None:
        config = self._config
        with row.open(mpp=config.mpp) as slide:
            if slide.mpp is None:
                raise ImageError(
                    f"{slide.name} has no micrometres per pixel in its metadata; give them with --mpp, or in a "
                    "column mpp"
                )
            check_intensities(self._encoder.network, slide)
            with config.patches.open(row, slide) as bag:
                features_of(
                    bag,
                    self._encoder,
                    self._folder,
                    name=row.name,
                    files=row.slides,
                    attributes={
                        "features": {"encoder": config.encoder_name},
                        "coords": {**trident_attributes(bag, self._folder.parent), "name": row.name},
                    },
                    asked=self._asked(row),
                    overwrite=config.overwrite,
                    events=self._events,
                )

    def _made(self, row: Row) -> Embedded:
        path = self._path(row)
        return Embedded(row.name, path, *open_features(path).features.shape)


def _in_words(made: Embedded, seconds: float) -> str:
    return f"{made.patches} patches, {format_seconds(seconds)}"


def _network(config: EmbedConfig, events: Events) -> nn.Module:
    """Build the encoder. Weights that nobody names are those of one seed."""
    name, weights = config.encoder, config.weights
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = resolve_encoder(name, published=weights is None)
    if weights is not None:
        report = load_weights_into(network, weights)
        events.emit(Notice(str(report), warning=not report.complete))
    elif name.partition(":")[0] in LIBRARIES and asks_for_weights(name) is None:
        told = f"the weights of {name} are random; ask for published ones, as ?pretrained=true, or give --weights FILE"
        events.emit(Notice(told, warning=True))
    return network
