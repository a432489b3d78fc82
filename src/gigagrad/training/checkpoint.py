"""Checkpoints of a run: everything that a step depends on, in one file that is whole or not there.

The order of slides, their turns and what random operators draw for them are functions of the seed, the epoch and the
index, so they need no state here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gigagrad.config.fit import FitConfig
from gigagrad.errors import ConfigError
from gigagrad.files import read_tensors, write_tensors

_KIND = "gigagrad checkpoint"

_KINDS: dict[str, type] = {"cohort": str, **dict.fromkeys(("config", "model", "optimizer"), dict)}
_KINDS |= dict.fromkeys(("engine", "average", "contents"), dict)
_DEFAULTS = {
    field.name: list(field.default) if isinstance(field.default, tuple) else field.default
    for field in dataclasses.fields(FitConfig)
}


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: `epoch` whole epochs (validated), then `index` slides of the next; `step` steps in all."""

    epoch: int = 0
    index: int = 0
    step: int = 0
    best_loss: float = math.inf
    best_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A run at the end of a step.

    `config` as `FitConfig.to_dict`; `cohort` is its fingerprint; `engine` the choices the engine made by measurement;
    `tile` the `(height, width)` the plan chose; `metrics_bytes` how much of the metrics file belongs to it; `average`
    is that of the weights, empty where none is kept. All ranks hold the same, the first writes it, any number go on;
    of an optimizer's state that ranks share, `optimizer` says only how many tensors lie in a folder of its own.
    `launches`: what has started those that wrote it, and starts them again. `contents`: digests of the slides, masks
    and annotations, by path, and of the labels that the run made, by name.
    """

    config: dict[str, Any]
    cohort: str
    progress: Progress
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    engine: dict[str, Any]
    tile: tuple[int, int]
    metrics_bytes: int
    average: dict[str, Tensor]
    launches: tuple[str, ...]
    contents: dict[str, str]

    def save(self, path: Path) -> None:
        """Replace `path` atomically. Raises `WriteError`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"progress": dataclasses.asdict(self.progress)}
        fields |= {"tile": list(self.tile), "launches": list(self.launches)}
        write_tensors(path, {"format": _KIND, "version": 1, **fields})

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file of `save`. Raises `ConfigError` when it is damaged, with the remedy."""
        try:
            payload = read_tensors(path, _KIND)
            payload = {
                "average": {},
                "launches": [],
                "contents": {},
            } | payload  # of those that were written before there were any
            fields = {field.name: payload[field.name] for field in dataclasses.fields(cls)}
            fields |= {"progress": Progress(**payload["progress"])}
            fields |= {"tile": tuple(payload["tile"]), "launches": tuple(payload["launches"])}
            _check_kinds(fields)
        except (ValueError, KeyError, TypeError) as error:
            reason = error if isinstance(error, ValueError) else f"{path} was written by another version"
            raise ConfigError(f"cannot continue the run: {reason}; start anew with --overwrite") from error
        return cls(**fields)

    def check_same_run(self, config: FitConfig, cohort: str) -> None:
        """Raise `ConfigError` naming the settings that differ from those the run began with."""
        new = config.to_dict()
        # A setting that did not exist when the run began had the value that is now the default.
        old = {**{name: new[name] for name in new if new[name] == _DEFAULTS.get(name)}, **self.config}
        # How long a run is decides its rates where these follow a schedule.
        free = {*config.MAY_CHANGE} - (set() if config.schedule == "constant" else {"epochs"})
        changed = [key for key in {**old, **new} if key not in free and old.get(key) != new.get(key)]
        differing = [f"{key}: {old.get(key)!r} then, {new.get(key)!r} now" for key in changed]
        if differing:
            raise ConfigError(
                f"{config.out} holds a run with other settings ({'; '.join(differing)}); "
                "use those, choose another --out, or start anew with --overwrite"
            )
        if cohort != self.cohort:
            raise ConfigError(
                f"the rows of {config.slides} changed since the run in {config.out} began; "
                "restore them, choose another --out, or start anew with --overwrite"
            )

    def check_same_contents(self, config: FitConfig, contents: Mapping[str, str]) -> None:
        """Raise `ConfigError` naming the files that are no longer what they were; those of older versions' runs, which
        did not look, may be anything.
        """
        changed = [path for path, digest in contents.items() if self.contents.get(path, digest) != digest]
        if changed:
            more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
            raise ConfigError(
                f"{changed[0]}{more} changed since the run in {config.out} began; restore what was there, choose "
                "another --out, or start anew with --overwrite"
            )


def _check_kinds(fields: Mapping[str, Any]) -> None:
    """Raise `TypeError` where something else lies in the place of what a run needs to go on."""
    progress: Progress = fields["progress"]
    counts = (progress.epoch, progress.index, progress.step, progress.best_epoch, fields["metrics_bytes"])
    kinds = [isinstance(fields[name], kind) for name, kind in _KINDS.items()]
    if not all([*kinds, *(isinstance(name, str) for name in fields["launches"])]):
        raise TypeError("a field of another type")
    if not all(type(count) is int and count >= 0 for count in counts) or type(progress.best_loss) is not float:
        raise TypeError("no progress")
