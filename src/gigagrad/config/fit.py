"""Settings of a training run: one frozen record, from YAML or built by hand, saved resolved with the results."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from gigagrad.config import Settings, read_yaml
from gigagrad.errors import ConfigError
from gigagrad.files import write_text
from gigagrad.images import InputView


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """Settings of `fit`.

    Attributes:
        slides: the cohort file or folder (see `cohorts`).
        out: the run folder; made if missing.
        model: `paper-unet`, `timm:NAME`, `smp:NAME?key=value`, `monai:NAME?key=value` or `package.module:callable`.
        weights: what the network begins with: `.pt`, `.pth`, `.safetensors`, a run, a model's folder; other heads are
            left out.
        loss: `bce`, `bce_dice`, `ce`, `cox`, `dice`, `focal`, `mse`, `tversky` or `package.module:callable`, with
            settings as in `tversky?false_negatives=0.8`; several are added up, with factors: `ce + 0.5*mine:dice`.
        class_weights: of each class in the loss, background first, or `balanced`: the inverse of its share of the
            training masks' pixels, or of the training labels, scaled to a mean of 1.
        classes: class ids by name, or by value in mask files, as `masks.ClassTable.parse` takes them; in YAML, a
            mapping. A run saves those it trained with, so that predictions bear their names.
        fold: the one to validate, of a cohort with a column `fold` or with split files.
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
        precision: `bfloat16` or `float16`, as autocast would; none given: the model's own.
        augment: turn and mirror each training slide, anew in every epoch.
        stain_jitter: vary haematoxylin and eosin of training slides, 0 to 1 (0.05 is usual; see `augment.Jitter`).
        colour_jitter: vary brightness and contrast of each channel of training slides, 0 to 1.
        seed: of the initial weights, the order of slides, the augmentation and random operators.
        level: pyramid level of slides and masks to train on; 0 is full resolution.
        grey: read slides in grey, one channel, as `Image.grey` does; for networks that grey their input anyway.
        bands: channels of slides to read, in this order, by name or counted from 1; none given: all.
        checkpoint_seconds: a checkpoint follows the first step that ends this long after the last one; 0 = every step.
        trackers: programs that get the settings and the numbers of a run: `mlflow`, `tensorboard`, `trackio`, `wandb`.
        mesh: `DxT`: the slides of a step are shared out to D groups of T ranks, the tiles of a slide to the ranks of a
            group; none given: one group of all that were started.
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
    rank_timeout: float = 600.0

    PATHS: ClassVar = "slides", "out", "scratch", "weights"
    CHOICES: ClassVar = {
        "schedule": ("constant", "cosine", "linear"),
        "precision": (None, "bfloat16", "float16"),
        "trackers": ("mlflow", "tensorboard", "trackio", "wandb"),
    }
    MAY_CHANGE: ClassVar = (
        *("epochs", "memory", "scratch", "out", "checkpoint_seconds", "patience", "trackers", "mesh", "journal"),
        *("shard_optimizer", "rank_timeout"),
    )
    """Between the parts of a run: how long, where and in how much memory, but not what is computed."""
    MAY_DIFFER: ClassVar = "memory", "scratch", "out", "trackers", "checkpoint_seconds", "rank_timeout"
    """Among the ranks of a run."""
    LIMITS: ClassVar = {
        **dict.fromkeys(("epochs", "accumulate"), (1, math.inf)),
        **dict.fromkeys(("learning_rate", "weight_decay", "warmup", "clip", "patience", "level"), (0, math.inf)),
        **dict.fromkeys(("ema", "stain_jitter", "colour_jitter"), (0, 1)),
        "seed": (0, 2**63 - 1),
        "checkpoint_seconds": (0, math.inf),
        "rank_timeout": (1, 1e6),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0:
            raise ConfigError("learning_rate must be above 0, got 0")
        if self.storage is not None:
            from gigagrad.stores import parse_storage

            parse_storage(self.storage)
        if self.mesh is not None and not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", self.mesh):
            raise ConfigError(f"mesh must be groups x ranks of a group, as 2x4, got {self.mesh!r}")

    @property
    def mesh_shape(self) -> tuple[int, int] | None:
        """Return the number of groups, and of ranks of a group."""
        if self.mesh is None:
            return None
        groups, _, size = self.mesh.partition("x")
        return int(groups), int(size)

    @property
    def input_view(self) -> InputView:
        """Return what the network sees of slides."""
        return InputView(self.grey, self.bands)

    @classmethod
    def from_yaml(
        cls, path: str | Path, overrides: Mapping[str, Any] | None = None, trust: Collection[str] = ()
    ) -> Self:
        """Read a config from a YAML file, with `overrides` in the place of the file's settings of these names.

        Relative paths in the file are taken from its folder; those of `overrides` must be absolute. A model, loss or
        optimizer of the file's that is neither gigagrad's nor a library's must be one of `trust`, as in `load_model`.
        Raises `ConfigError` and `ModelError`.
        """
        from gigagrad.losses import check_loss
        from gigagrad.models.registry import check_network, check_trusted

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
