"""What a training run is told: one frozen record, from YAML or built by hand, saved resolved with the results."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from gigagrad.errors import ConfigError, did_you_mean
from gigagrad.files import write_text
from gigagrad.models.registry import check_network
from gigagrad.stores import parse_storage
from gigagrad.training.losses import check_loss
from gigagrad.units import parse_bytes

_LIMITS: dict[str, tuple[float, float]] = {
    "epochs": (1, math.inf),
    "learning_rate": (0, math.inf),
    "seed": (0, 2**63 - 1),
    "level": (0, math.inf),
    "checkpoint_seconds": (0, math.inf),
}


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Settings of `fit`. Raises `ConfigError` for a value of the wrong type or out of range.

    Attributes:
        slides: the cohort file (see `cohort`).
        out: the run folder; made if missing.
        model: a name that `gigagrad.models.resolve` knows.
        loss: a name in `losses`, or `package.module:callable`.
        memory: the budget, like `"2 GiB"`; None lets the engine choose.
        scratch: an existing folder for what does not fit in `memory`; None: it is computed again.
        storage: how training steps store the fields they keep, as `gigagrad.compile` has it; None: bit for bit.
        device: `"cpu"` or `"cuda"`.
        epochs: passes over the training slides.
        learning_rate: of Adam.
        augment: turn and mirror each training slide, anew in every epoch.
        seed: of the initial weights, the order of slides, the augmentation and random operators.
        level: pyramid level of slides and masks to train on; 0 is full resolution.
        checkpoint_seconds: a checkpoint follows the first step that ends this long after the last one; 0 = every step.
    """

    slides: str
    out: str
    model: str = "paper-unet"
    loss: str = "bce"
    memory: str | None = None
    scratch: str | None = None
    storage: str | None = None
    device: str = "cpu"
    epochs: int = 20
    learning_rate: float = 1e-3
    augment: bool = True
    seed: int = 0
    level: int = 0
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _coerce(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be {_range(low, high)}, got {value}")
        if self.learning_rate == 0:
            raise ConfigError("learning_rate must be above 0, got 0")
        parse_storage(self.storage)
        if self.memory is not None:
            try:
                parse_bytes(self.memory)
            except ValueError as error:
                raise ConfigError(f"memory: {error}") from error

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], *, folder: Path | None = None) -> Self:
        """A config from plain values. Relative paths are taken from `folder`, without one from the working directory.

        Raises `ConfigError` for unknown or missing settings and unusable values.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                meant = did_you_mean(str(key), known) or f"; known settings are {', '.join(known)}"
                raise ConfigError(f"unknown setting {key!r}{meant}")
        missing = [
            f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in settings
        ]
        if missing:
            raise ConfigError(f"the setting {missing[0]!r} is missing; give it in the config or as --{missing[0]}")
        config = cls(**settings)
        base = (folder or Path.cwd()).absolute()
        scratch = None if config.scratch is None else str(base / config.scratch)
        return dataclasses.replace(
            config, slides=str(base / config.slides), out=str(base / config.out), scratch=scratch
        )

    @classmethod
    def from_yaml(
        cls, path: str | Path, overrides: Mapping[str, Any] | None = None, trust: Collection[str] = ()
    ) -> Self:
        """A config from a YAML file, with `overrides` in the place of the file's settings of these names.

        Relative paths in the file are taken from its own folder; those of `overrides` must be absolute. A model or loss
        of the file's that is neither gigagrad's nor a library's must be one of `trust`, as in `load_model`. Raises
        `ConfigError` and `ModelError`.
        """
        path = Path(path)
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            raise ConfigError(f"cannot read the config {path}: {reason}") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"{path} must hold one 'setting: value' per line, got {type(settings).__name__}")
        try:
            config = cls.from_dict({**settings, **(overrides or {})}, folder=path.absolute().parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if "model" not in (overrides or {}):
            check_network(config.model, path, trust)
        if "loss" not in (overrides or {}):
            check_loss(config.loss, path, trust)
        return config

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: Path) -> None:
        """Write every setting, defaults included, as YAML. Raises `WriteError`."""
        write_text(path, yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))


def _coerce(name: str, value: object, hint: Any) -> object:
    """`value` as the field's type where nothing is lost by it (YAML reads `1e-3` as text and `2` as an integer)."""
    accepted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, Path) and str in accepted:
        return str(value)
    if isinstance(value, str) and float in accepted:
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, int) and not isinstance(value, bool) and float in accepted:
        return float(value)
    # By exact type, because a bool is an int to isinstance.
    if type(value) in accepted or (value is None and type(None) in accepted):
        return value
    kinds = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in accepted)
    raise ConfigError(f"{name} must be {kinds}, got {reprlib.repr(value)[:200]}")


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
