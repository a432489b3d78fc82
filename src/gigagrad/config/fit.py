"""Settings of a training run: one frozen record, from YAML or built by hand, saved resolved with the results; and a
settings file to begin with: what a cohort calls for, and every other setting with its default and its meaning.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import psutil
import yaml

from gigagrad.cohorts import Cohort, class_table, folds_of, read_cohort, read_rows, survival_of
from gigagrad.cohorts.patches import TISSUE, Patches
from gigagrad.config import Settings, described, read_yaml
from gigagrad.errors import ConfigError, WriteError
from gigagrad.files import write_text
from gigagrad.images import InputView
from gigagrad.images.pixels import Array
from gigagrad.images.thumbnails import full_range, range_shown, samples


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """Settings of `fit`.

    Attributes:
        slides: the cohort file or folder (see `cohorts`).
        out: the run folder; made if missing.
        model: `paper-unet`, `timm:NAME`, `smp:NAME?key=value`, `monai:NAME?key=value`, `package.module:callable` or, of
            patches, `mil:encoder=timm:NAME&head=abmil&classes=2`.
        weights: what the network begins with: `.pt`, `.pth`, `.safetensors`, a run, a model's folder; other heads are
            left out.
        loss: `bce`, `bce_dice`, `ce`, `clam`, `cox`, `dice`, `focal`, `mse`, `tversky` or `package.module:callable`,
            with settings as in `tversky?false_negatives=0.8`; several are added up, with factors: `ce + 0.5*mine:dice`.
        class_weights: of each class in the loss, background first, or `balanced`: the inverse of its share of the
            training masks' pixels, or of the training labels, scaled to a mean of 1.
        classes: class ids by name, or by value in mask files, as `masks.ClassTable.parse` takes them; in YAML, a
            mapping. A run saves those it trained with, so that predictions bear their names.
        fold: the one to validate, of a cohort with a column `fold` or with split files.
        memory: the budget, like `"2 GiB"`; None lets the engine choose.
        scratch: an existing folder for what does not fit in `memory`; None: it is computed again.
        storage: how training steps store the activations they save, as `gigagrad.compile` has it; None: bit for bit.
        device: `"cpu"` or `"cuda"`.
        epochs: passes over the training slides.
        learning_rate: the highest, after the warm-up.
        optimizer: a class of `torch.optim` in any case, `apollo`, one of the library pytorch-optimizer, or
            `package.module:Class`, with settings: `sgd?momentum=0.9`.
        weight_decay: of the optimizer; none given: its own, 0.01 of `adamw` and 0 of most.
        schedule: of the learning rate over all steps: `constant`, `cosine` or `linear`.
        warmup: steps in which the learning rate rises in a line.
        frozen: modules or parameters that are not trained: `network.encoder.blocks.[0-5]`, `*.bias`.
        rates: factors of the learning rate, as `network.encoder=0.1`; of several patterns the first counts.
        accumulate: slides whose mean gradient makes a step.
        clip: largest 2-norm of a step's gradient over all parameters; larger ones are scaled down to it.
        ema: decay, as 0.999, of a moving average of the weights, which is validated and kept instead of them; 0: none.
        patience: epochs without a lower validation loss after which training ends; 0: never.
        precision: `bfloat16` or `float16`, as autocast would; none given: the model's own.
        augment: turn and mirror each training slide, anew in every epoch.
        stain_jitter: vary haematoxylin and eosin of training slides, 0 to 1 (0.05 is usual; see `dataset.Jitter`).
        colour_jitter: vary brightness and contrast of each channel of training slides, 0 to 1.
        seed: of the initial weights, the order of slides, the augmentation and random operators.
        level: pyramid level of slides and masks to train on; 0 is full resolution.
        grey: read slides in grey, one channel, as `Image.grey` does; for networks that grey their input anyway.
        bands: channels of slides to read, in this order, by name or counted from 1; none given: all.
        patch_size: pixels a side of the patches that a slide is read as, for models of bags (`mil:`); 0: whole slides.
        patch_mpp: micrometres per pixel of the patches; None: level 0 as it is.
        overlap: of patches beside each other, in their pixels.
        tissue: `auto` takes patches on tissue, by our own recipe; `mask` those on the mask in a column of this name;
            `all` takes every patch.
        least_tissue: share of a patch that has to be tissue.
        coords: a folder with the corners of the patches of each slide, in files of TRIDENT, CLAM or CSV, called by the
            slide; then `overlap` and `tissue` are theirs.
        features: a folder for the features of patches, which are computed once where the encoder is frozen and patches
            are not varied; runs may share it; none given: in the run's folder.
        checkpoint_seconds: a checkpoint follows the first step that ends this long after the last one, and each epoch
            whose weights are the best so far; 0 = every step.
        trackers: programs that get the settings and the numbers of a run: `mlflow`, `tensorboard`, `trackio`, `wandb`.
        mesh: `DxT`: the slides of a step are divided among D groups of T ranks, the tiles of a slide to the ranks of a
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
    weight_decay: float | None = None
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
    patch_size: int = 0
    patch_mpp: float | None = 0.5
    overlap: int = 0
    tissue: str = "auto"
    least_tissue: float = 0.1
    coords: str | None = None
    features: str | None = None
    checkpoint_seconds: float = 30.0
    trackers: tuple[str, ...] = ()
    mesh: str | None = None
    journal: bool = False
    shard_optimizer: bool = False
    rank_timeout: float = 600.0

    PATHS: ClassVar = "slides", "out", "scratch", "weights", "coords", "features"
    CHOICES: ClassVar = {
        "tissue": TISSUE,
        "schedule": ("constant", "cosine", "linear"),
        "precision": (None, "bfloat16", "float16"),
        "trackers": ("mlflow", "tensorboard", "trackio", "wandb"),
    }
    MAY_CHANGE: ClassVar = (
        *("epochs", "memory", "scratch", "out", "checkpoint_seconds", "patience", "trackers", "mesh", "journal"),
        *("shard_optimizer", "rank_timeout", "features"),
    )
    """Between the parts of a run: how long, where and in how much memory, but not what is computed."""
    MAY_DIFFER: ClassVar = "memory", "scratch", "out", "trackers", "checkpoint_seconds", "rank_timeout"
    """Among the ranks of a run."""
    LIMITS: ClassVar = {
        **dict.fromkeys(("epochs", "accumulate"), (1, math.inf)),
        **dict.fromkeys(("learning_rate", "weight_decay", "warmup", "clip", "patience", "level"), (0, math.inf)),
        **dict.fromkeys(("patch_size", "overlap"), (0, math.inf)),
        **dict.fromkeys(("ema", "stain_jitter", "colour_jitter", "least_tissue"), (0, 1)),
        "seed": (0, 2**63 - 1),
        "checkpoint_seconds": (0, math.inf),
        "rank_timeout": (1, 1e6),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0:
            raise ConfigError("learning_rate must be above 0, got 0")
        if self.ema == 1:
            raise ConfigError("ema must be below 1, got 1, which would keep the weights of the beginning; say 0.999")
        if self.clip == 0:
            raise ConfigError("clip must be above 0, got 0, which would leave nothing of any gradient; leave it out")
        if self.storage is not None:
            from gigagrad.stores import parse_storage

            parse_storage(self.storage)
        if self.patches is None and (self.coords is not None or self.overlap):
            raise ConfigError("coords and overlap are of patches, and slides are read whole; give patch_size, as 224")
        if self.model.startswith("mil:"):
            from gigagrad.models.bag_names import BagName

            BagName.parse(self.model)  # what is misspelt comes before what is missing
        if self.patches is None and self.model.startswith("mil:"):
            raise ConfigError(f"{self.model} takes patches, and slides are read whole; give patch_size, as 224")
        if self.patches is not None and self.level:
            raise ConfigError(f"patches are read at patch_mpp, got level {self.level}; leave it out")
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

    @property
    def patches(self) -> Patches | None:
        """Return which patches are read of slides, None where these are read whole."""
        if not self.patch_size:
            return None
        coords = None if self.coords is None else Path(self.coords)
        return Patches(self.patch_size, self.patch_mpp, self.overlap, self.tissue, self.least_tissue, coords)

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
        write_text(path, yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=math.inf))


_WIDTH = 100
_LOOKED_AT: Final = 3
"""Slides."""
_PATCH_PX: Final = 224
"""Side of the patches that are proposed, as encoders take them."""
_MPP: Final = 0.5
_FEW: Final = 4
"""Patches a side from which on a slide is proposed to be read as these."""
_COMPARED: Final = 8
"""Patients whose risks a step compares with each other."""
_OF_SCALE: Final = (
    "Its scale says which values are 0 and 1 in each channel: the 2nd and 98th percentiles, from a look at {} of the "
    "slides. Better is what you know of the data (reflectance: scale=0,10000)."
)


def write_template(path: Path, slides: Path, *, overwrite: bool = False) -> Path:
    """Write `path`, YAML that `fit` takes, for the cohort `slides`, of which a few are looked at.

    Settings that the cohort calls for stand in it; the others are comments with their defaults. Raises `ConfigError`
    for the cohort, `ImageError` for a slide that cannot be read and `WriteError` for a file that exists.
    """
    if path.exists() and not overwrite:
        raise WriteError(f"{path} exists; choose another --out or pass --overwrite")
    columns, rows = ((), ()) if slides.is_dir() else read_rows(slides)
    fold = next(iter(folds_of(slides, columns, rows)), None)
    cohort = read_cohort(slides, fold)
    looked, channels, scale, patches = _look_at(cohort)
    labelled = all(row.label is not None and not row.masks for row in cohort.rows)
    patches = patches if labelled and channels == 3 and not scale else {}
    chosen = _chosen(cohort, slides, path, survival="time" in columns and "label" not in columns, bags=bool(patches))
    chosen |= patches
    if channels != 3:
        chosen["model"] += f"&{'in_chans' if chosen['model'].startswith('timm:') else 'in_channels'}={channels}"
    if scale:
        numbers = (f"{value:.6g}" for pair in (scale[:1] if len(set(scale)) == 1 else scale) for value in pair)
        chosen["model"] += f"&scale={','.join(numbers)}"
    if fold is not None:
        chosen["fold"] = fold
    lines = [
        "# Settings of gigagrad fit. Uncomment what you want to change; paths are taken from this file's folder.",
        "",
    ]
    meanings = described(FitConfig)
    for field in dataclasses.fields(FitConfig):
        remark = f" {_OF_SCALE.format(looked)}" if field.name == "model" and scale else ""
        lines += [f"# {line}" for line in textwrap.wrap(meanings[field.name] + remark, _WIDTH)]
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        given = field.name in chosen
        value = {field.name: chosen[field.name] if given else default}
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=math.inf).rstrip()
        lines += [line if given else f"# {line}" for line in text.splitlines()] + [""]
    write_text(path, "\n".join(lines))
    return path


def _look_at(cohort: Cohort) -> tuple[int, int, list[tuple[float, float]], dict[str, Any]]:
    """Look at a few slides. Returns how many, how many channels they have, and which values are 0 and 1 in each: of
    bytes, and where it is what networks take for granted, none. And which patches they may be read as, if they are
    larger than a few.
    """
    looked, sides, known_mpp = list[list[Array]](), list[float](), True
    for row in cohort.rows[:_LOOKED_AT]:
        with cohort.telling(row), row.open() as slide:
            looked.append(samples(slide))
            sides.append(min(slide.shape[1:]) * (slide.mpp or _MPP) / _MPP)
            known_mpp = known_mpp and slide.mpp is not None
    patches = {"patch_size": _PATCH_PX, "patch_mpp": _MPP if known_mpp else None}
    alike = [values for values in looked if len(values) == len(looked[0])]
    channels = [np.concatenate(values) for values in zip(*alike, strict=True)]
    scale = [range_shown(values, values.dtype) for values in channels]
    known = all(pair == full_range(values.dtype) for pair, values in zip(scale, channels, strict=True))
    scale = [] if known or channels[0].dtype.itemsize == 1 else scale
    return len(alike), len(channels), scale, patches if min(sides) >= _FEW * _PATCH_PX else {}


def _chosen(cohort: Cohort, slides: Path, path: Path, *, survival: bool, bags: bool) -> dict[str, Any]:
    table = class_table(cohort)
    labels = [row.label for row in cohort.rows if row.label is not None]
    of_pixel = len(table.regions if table is not None else ()) or len(cohort.rows[0].masks)
    model, loss = "smp:Unet?encoder_name=resnet34", "bce_dice"
    times = [label for label in labels if survival_of(label) is not None]
    survival = bool(times) and (survival or any(label.endswith("+") for label in times))
    if labels:
        count = 1 if survival else table.count if table is not None else _classes_in(labels)
        model = f"mil:encoder=timm:resnet18&classes={count}" if bags else f"timm:resnet18?num_classes={count}"
        loss = "cox" if survival else "ce" if count > 1 else "mse"
    elif of_pixel > 1:
        model += f"&classes={of_pixel}"
    elif table is not None and table.count > 2:
        model, loss = f"{model}&classes={table.count}", "ce"
    chosen: dict[str, Any] = {
        "slides": str(slides.absolute()),
        "out": f"runs/{path.stem}",
        "model": model,
        "loss": loss,
        "memory": f"{max(1, psutil.virtual_memory().total // 2**31)} GiB",
    }
    if survival:
        chosen["accumulate"] = _COMPARED
    if table is not None and not cohort.rows[0].further_masks:  # these are named by their columns
        named = (entry.rpartition("=")[::2] for entry in table.entries)
        chosen["classes"] = {name: int(text) if text.isdecimal() else text for name, text in named}
    return chosen


def _classes_in(labels: Sequence[str]) -> int:
    """Count the classes of labels that are numbers from 0 on; 1 where they measure something."""
    numbers = {float(label) for label in labels}
    highest = max(numbers)
    ids = min(numbers) >= 0 and all(number.is_integer() for number in numbers) and highest < 2 * len(numbers)
    return max(2, int(highest) + 1) if ids else 1
