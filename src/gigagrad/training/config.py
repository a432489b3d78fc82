"""What a training run is told: one frozen record, from YAML or built by hand, saved resolved with the results."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from gigagrad.errors import ConfigError, did_you_mean
from gigagrad.files import write_text
from gigagrad.images import Look
from gigagrad.losses import check_loss
from gigagrad.models.registry import check_network
from gigagrad.models.trust import check_trusted
from gigagrad.ranks import TIMEOUT_SECONDS
from gigagrad.settings import Settings, read_yaml
from gigagrad.stores import parse_storage
from gigagrad.training.schedule import SCHEDULES
from gigagrad.training.trackers import TRACKERS

_CHOICES = {"schedule": SCHEDULES, "precision": (None, "bfloat16", "float16"), "trackers": tuple(TRACKERS)}


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """Settings of `fit`.

    Attributes:
        slides: the cohort file or folder (see `cohorts`).
        out: the run folder; made if missing.
        model: a name that `gigagrad.models.resolve` knows.
        weights: what the network begins with: a file or folder as `models.load_weights_into` takes it.
        loss: a name in `losses`, or `package.module:callable`, with settings as in `tversky?false_negatives=0.8`;
            several are added up, with factors: `ce + 0.5*mine:dice`.
        class_weights: of each class in the loss, background first, or `balanced`: the inverse of its share of the
            training masks' pixels, or of the training labels, scaled to a mean of 1.
        classes: class ids by name, or by value in mask files, as `masks.ClassTable.parse` takes them; in YAML, a
            mapping. A run saves those it trained with, so that predictions bear their names.
        fold: of a cohort file with folds, the one to validate.
        memory: the budget, like `"2 GiB"`; None lets the engine choose.
        scratch: an existing folder for what does not fit in `memory`; None: it is computed again.
        storage: how training steps store the fields they keep, as `gigagrad.compile` has it; None: bit for bit.
        device: `"cpu"` or `"cuda"`.
        epochs: passes over the training slides.
        learning_rate: the highest, after the warm-up.
        optimizer: a class of `torch.optim` in any case, or `package.module:Class`, with settings: `sgd?momentum=0.9`.
        weight_decay: of the optimizer.
        schedule: of the learning rate over all steps: `constant`, `cosine` or `linear`.
        warmup: steps in which the learning rate rises in a line.
        frozen: modules or parameters that are not trained: `network.encoder`, `*.bias`.
        rates: factors of the learning rate, as `network.encoder=0.1`; of several patterns the first counts.
        accumulate: slides whose mean gradient makes a step.
        clip: largest 2-norm of a step's gradient over all parameters; larger ones are scaled down to it.
        ema: decay, as 0.999, of a moving average of the weights, which is validated and kept instead of them; 0: none.
        patience: epochs without a lower validation loss after which training ends; 0: never.
        precision: `bfloat16` or `float16` as autocast would; None: the model's own.
        augment: turn and mirror each training slide, anew in every epoch.
        stain_jitter: vary haematoxylin and eosin of training slides, 0 to 1 (0.05 is usual; see `colours.Jitter`).
        colour_jitter: vary brightness and contrast of each channel of training slides, 0 to 1.
        seed: of the initial weights, the order of slides, the augmentation and random operators.
        level: pyramid level of slides and masks to train on; 0 is full resolution.
        grey: read slides in grey, one channel, as `Image.grey` does; for networks that grey their input anyway.
        bands: channels of slides to read, in this order, by name or counted from 1; none given: all.
        checkpoint_seconds: a checkpoint follows the first step that ends this long after the last one; 0 = every step.
        trackers: programs that get the settings and the numbers of a run: `mlflow`, `tensorboard`, `trackio`, `wandb`.
        mesh: `DxT`: the slides of a step are shared out to D groups of T ranks, the tiles of a slide to the ranks of a
            group; None: one group of all that were started.
        journal: write down finished parts of steps in the run's folder, so that a killed run goes on behind them.
        shard_optimizer: share the optimizer's state among ranks, each of which steps its part of the parameters.
        rank_timeout: seconds after which a rank that is silent is given up.
    """

    slides: str
    out: str
    model: str = "paper-unet"
    weights: str | None = None
    loss: str = "bce"
    class_weights: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    fold: int | None = None
    memory: str | None = None
    scratch: str | None = None
    storage: str | None = None
    device: str = "cpu"
    epochs: int = 20
    learning_rate: float = 1e-3
    optimizer: str = "adam"
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    frozen: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()
    accumulate: int = 1
    clip: float | None = None
    ema: float = 0.0
    patience: int = 0
    precision: str | None = None
    augment: bool = True
    stain_jitter: float = 0.0
    colour_jitter: float = 0.0
    seed: int = 0
    level: int = 0
    grey: bool = False
    bands: tuple[int | str, ...] = ()
    checkpoint_seconds: float = 30.0
    trackers: tuple[str, ...] = ()
    mesh: str | None = None
    journal: bool = False
    shard_optimizer: bool = False
    rank_timeout: float = TIMEOUT_SECONDS

    LIMITS: ClassVar = {
        "epochs": (1, math.inf),
        "learning_rate": (0, math.inf),
        "weight_decay": (0, math.inf),
        "warmup": (0, math.inf),
        "accumulate": (1, math.inf),
        "clip": (0, math.inf),
        "ema": (0, 1),
        "patience": (0, math.inf),
        "stain_jitter": (0, 1),
        "colour_jitter": (0, 1),
        "seed": (0, 2**63 - 1),
        "level": (0, math.inf),
        "checkpoint_seconds": (0, math.inf),
        "rank_timeout": (1, 1e6),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0:
            raise ConfigError("learning_rate must be above 0, got 0")
        for name, known in _CHOICES.items():
            given = getattr(self, name)
            for value in set(given if isinstance(given, tuple) else (given,)) - set(known):
                offered = ", ".join(str(choice) for choice in known if choice is not None)
                raise ConfigError(
                    f"{name} must be one of {offered}, got {value!r}{did_you_mean(str(value), map(str, known))}"
                )
        parse_storage(self.storage)
        if self.mesh is not None and not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", self.mesh):
            raise ConfigError(f"mesh must be groups x ranks of a group, as 2x4, got {self.mesh!r}")

    @property
    def mesh_shape(self) -> tuple[int, int] | None:
        """Groups, and ranks of a group."""
        if self.mesh is None:
            return None
        groups, _, size = self.mesh.partition("x")
        return int(groups), int(size)

    @property
    def look(self) -> Look:
        """How slides are looked at."""
        return Look(self.grey, self.bands)

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

        Relative paths in the file are taken from its folder; those of `overrides` must be absolute. A model, loss or
        optimizer of the file's that is neither gigagrad's nor a library's must be one of `trust`, as in `load_model`.
        Raises `ConfigError` and `ModelError`.
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
        if "loss" not in (overrides or {}):
            check_loss(config.loss, path, trust)
        if "optimizer" not in (overrides or {}) and ":" in config.optimizer:
            check_trusted(config.optimizer.partition("?")[0], path, trust)
        return config

    def to_dict(self) -> dict[str, Any]:
        settings = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    def save(self, path: Path) -> None:
        """Write every setting, defaults included, as YAML. Raises `WriteError`."""
        write_text(path, yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))
