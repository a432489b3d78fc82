"""Names of networks that take bags of patches:

    mil:encoder=NAME&encoder.key=value&head=NAME&head.key=value&classes=2

`encoder` is a name of `timm`, `smp` (one of its encoders), `monai` or `package.module:callable`, as `registry` has
them; its own settings bear its name and a dot, as those of the head do. `head` is one of `mil.HEADS`, `abmil` where
none is named. `classes` counts outputs: 1, the default, for regression, for a risk and for a binary loss. `features`
counts the encoder's where it cannot be asked; `mean`, `std` and `scale` are of what stands in front of it. `lora=8`
freezes the encoder but for adapters of that rank (`adapters`), with `lora.alpha`, `lora.dropout` and `lora.targets`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gigagrad.errors import ConfigError, ModelError, did_you_mean
from gigagrad.files import read_json
from gigagrad.models.adapters import add_adapters
from gigagrad.models.mil import HEADS
from gigagrad.named import Literal, parse_settings

_FORM: Final = "mil:encoder=NAME&encoder.key=value&head=NAME&head.key=value&classes=2"
_PARTS: Final = ("encoder", "head", "lora")
PREPROCESSING: Final[tuple[str, ...]] = ("scale", "mean", "std")
"""Settings of what turns pixels into a network's input."""
_SETTINGS: Final = (*_PARTS, "classes", "features", *PREPROCESSING)


def is_bag_name(name: str) -> bool:
    return name.startswith("mil:")


@dataclass(frozen=True, slots=True)
class BagName:
    """A name, read. `of` has the settings of encoder, head and adapters, `preprocessing` those before the encoder."""

    name: str
    encoder: str
    head: str
    classes: int
    features: int | None
    lora: int | None
    preprocessing: dict[str, Literal]
    of: Mapping[str, dict[str, Literal]]

    @classmethod
    def parse(cls, name: str) -> BagName:
        """Read a name. Imports and opens nothing. Raises `ModelError` for one that is malformed, or has settings that
        nothing takes.
        """
        try:
            given = parse_settings(name.partition(":")[2], name, _FORM)
        except ConfigError as error:
            raise ModelError(f"model {name!r}: {error}") from error
        of: dict[str, dict[str, Literal]] = {part: {} for part in _PARTS}
        for key in [key for key in given if "." in key]:
            part, _, setting = key.partition(".")
            if part not in of:
                raise ModelError(f"model {name!r}: there is no {part!r} to set{did_you_mean(part, of)}; write {_FORM}")
            of[part][setting] = given.pop(key)
        for key in given:
            if key not in _SETTINGS:
                raise ModelError(
                    f"model {name!r} has no setting {key!r}{did_you_mean(key, _SETTINGS)}; "
                    f"it has {', '.join(_SETTINGS)}"
                )
        encoder, head = given.get("encoder"), given.get("head", "abmil")
        if not isinstance(encoder, str):
            raise ModelError(f"model {name!r} names no encoder; write {_FORM}")
        if "?" in encoder:
            raise ModelError(f"model {name!r}: settings of an encoder bear its name; write {_FORM}")
        if not isinstance(head, str) or head not in HEADS:
            raise ModelError(
                f"unknown head {head!r} in model {name!r}{did_you_mean(str(head), HEADS)}; known are {', '.join(HEADS)}"
            )
        for part, takes in (("head", HEADS[head]), ("lora", add_adapters)):
            parameters = inspect.signature(takes).parameters.values()
            known = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY]
            for key in of[part]:
                if key not in known:
                    raise ModelError(
                        f"the {part} {given.get(part, head)!r} in model {name!r} has no setting {key!r}"
                        f"{did_you_mean(key, known)}; it has {', '.join(known) or 'none'}"
                    )
        preprocessing = {key: given[key] for key in PREPROCESSING if key in given}
        classes, features, lora = (cls._count(name, key, given.get(key)) for key in ("classes", "features", "lora"))
        if of["lora"] and lora is None:
            raise ModelError(
                f"model {name!r} sets {', '.join(of['lora'])} of no adapters; give their rank, as in lora=8"
            )
        return cls(name, encoder, head, classes or 1, features, lora, preprocessing, of)

    @staticmethod
    def _count(name: str, key: str, value: Literal) -> int | None:
        if value is None or (type(value) is int and value > 0):
            return value
        raise ModelError(f"model {name!r}: {key} must be a number from 1 on, got {value!r}")


def encoder_in(folder: Path) -> str | None:
    """Describe the network of timm in a folder as the Hugging Face Hub has it: how to name it, with the mean and the
    standard deviation that its weights were made for; None for any other folder.
    """
    try:
        said: Any = read_json(folder / "config.json")
        architecture, known = said["architecture"], said.get("pretrained_cfg", said)
        settings = {f"encoder.{key}": value for key, value in said.get("model_args", {}).items()}
        settings |= {key: known[key] for key in ("mean", "std") if key in known}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return "&".join([f"timm:{architecture}", *(f"{key}={_text(value)}" for key, value in settings.items())])


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()
