"""What a training run is told: one frozen record, from YAML or built by hand, saved resolved with the results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from gigagrad.errors import ConfigError
from gigagrad.files import write_text
from gigagrad.models.registry import check_downloads_nothing, check_network
from gigagrad.settings import Settings, read_yaml
from gigagrad.stores import parse_storage
from gigagrad.training.losses import check_loss


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """Settings of `fit`.

    Attributes:
        slides: the cohort file or folder (see `cohorts`).
        out: the run folder; made if missing.
        model: a name that `gigagrad.models.resolve` knows.
        weights: what the network begins with: a file or folder as `models.load_weights_into` takes it.
        loss: a name in `losses`, or `package.module:callable`.
        classes: class ids by name, or by value in mask files, as `masks.ClassTable.parse` takes them; in YAML, a
            mapping. A run saves those it trained with, so that predictions bear their names.
        fold: of a cohort file with folds, the one to validate.
        memory: the budget, like `"2 GiB"`; None lets the engine choose.
        scratch: an existing folder for what does not fit in `memory`; None: it is computed again.
        storage: how training steps store the fields they keep, as `gigagrad.compile` has it; None: bit for bit.
        device: `"cpu"` or `"cuda"`.
        epochs: passes over the training slides.
        learning_rate: of Adam.
        augment: turn and mirror each training slide, anew in every epoch.
        seed: of the initial weights, the order of slides, the augmentation and random operators.
        level: pyramid level of slides and masks to train on; 0 is full resolution.
        grey: read slides in grey, one channel, as `Image.grey` does; for networks that grey their input anyway.
        checkpoint_seconds: a checkpoint follows the first step that ends this long after the last one; 0 = every step.
    """

    slides: str
    out: str
    model: str = "paper-unet"
    weights: str | None = None
    loss: str = "bce"
    classes: tuple[str, ...] = ()
    fold: int | None = None
    memory: str | None = None
    scratch: str | None = None
    storage: str | None = None
    device: str = "cpu"
    epochs: int = 20
    learning_rate: float = 1e-3
    augment: bool = True
    seed: int = 0
    level: int = 0
    grey: bool = False
    checkpoint_seconds: float = 30.0

    LIMITS: ClassVar = {
        "epochs": (1, math.inf),
        "learning_rate": (0, math.inf),
        "seed": (0, 2**63 - 1),
        "level": (0, math.inf),
        "checkpoint_seconds": (0, math.inf),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0:
            raise ConfigError("learning_rate must be above 0, got 0")
        parse_storage(self.storage)

    def relative_to(self, folder: Path) -> Self:
        """The same settings with absolute paths; relative ones are taken from `folder`."""
        base = folder.absolute()
        scratch = None if self.scratch is None else str(base / self.scratch)
        weights = None if self.weights is None else str(base / self.weights)
        slides, out = str(base / self.slides), str(base / self.out)
        return dataclasses.replace(self, slides=slides, out=out, scratch=scratch, weights=weights)

    @classmethod
    def from_yaml(
        cls, path: str | Path, overrides: Mapping[str, Any] | None = None, trust: Collection[str] = ()
    ) -> Self:
        """A config from a YAML file, with `overrides` in the place of the file's settings of these names.

        Relative paths in the file are taken from its own folder; those of `overrides` must be absolute. A model or loss
        of the file's that is neither gigagrad's nor a library's must be one of `trust`, as in `load_model`, and none
        may ask for published weights. Raises `ConfigError` and `ModelError`.
        """
        path = Path(path)
        try:
            settings = read_yaml(path)
        except ValueError as error:
            raise ConfigError(f"cannot read the config {path}: {error}") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"{path} must hold one 'setting: value' per line, got {type(settings).__name__}")
        try:
            config = cls.from_dict({**settings, **(overrides or {})}).relative_to(path.parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if "model" not in (overrides or {}):
            check_network(config.model, path, trust)
            check_downloads_nothing(config.model, path)
        if "loss" not in (overrides or {}):
            check_loss(config.loss, path, trust)
        return config

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "classes": list(self.classes)}

    def save(self, path: Path) -> None:
        """Write every setting, defaults included, as YAML. Raises `WriteError`."""
        write_text(path, yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))
