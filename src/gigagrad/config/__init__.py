"""Settings of training and prediction, apart from what trains and predicts: flags are made of them without PyTorch.

Names are known, types are right, values in range, or one clear line says what is not.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from gigagrad.errors import ConfigError, did_you_mean
from gigagrad.units import parse_bytes


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of a frozen dataclass of settings. Raises `ConfigError` for a value of the wrong type or out of range.

    Fields are plain values, tuples of them, or paths. A mapping is a tuple of texts `key=value`. A field named `memory`
    is an amount of memory as people write it.
    """

    LIMITS: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Smallest and largest value of a field, both included. None, where a field accepts it, is never out of range."""
    CHOICES: ClassVar[Mapping[str, Collection[str | None]]] = {}
    """Known values of a field, or of each text in a tuple."""
    PATHS: ClassVar[tuple[str, ...]] = ()
    """Fields that are paths."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _coerce(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
        for name, (low, high) in self.LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
                raise ConfigError(f"{name} must be {limits}, got {value}")
        for name, known in self.CHOICES.items():
            given = getattr(self, name)
            for value in set(given if isinstance(given, tuple) else (given,)) - set(known):
                offered = [str(choice) for choice in known if choice is not None]
                hint = did_you_mean(str(value), offered)
                raise ConfigError(f"{name} must be one of {', '.join(offered)}, got {value!r}{hint}")
        memory = getattr(self, "memory", None)
        if memory is not None:
            try:
                parse_bytes(memory)
            except ValueError as error:
                raise ConfigError(f"memory: {error}") from error

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make settings of plain values. Raises `ConfigError` for unknown or missing names and unusable values."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                meant = did_you_mean(str(key), known) or f"; known settings are {', '.join(known)}"
                raise ConfigError(f"unknown setting {key!r}{meant}")
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in settings:
                raise ConfigError(f"the setting {field.name!r} is missing; give it in the config or as --{field.name}")
        return cls(**settings)

    def relative_to(self, folder: Path) -> Self:
        """Make the paths absolute; relative ones are taken from `folder`."""

        def absolute(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(absolute, value))
            return value if value is None else str(folder.absolute() / value)

        changes: dict[str, Any] = {name: absolute(getattr(self, name)) for name in self.PATHS}
        return dataclasses.replace(self, **changes)


def read_yaml(path: Path) -> Any:
    """Read a YAML file of plain values. Raises `ValueError` with the reason for a missing or damaged file."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ValueError(reason) from error


def _coerce(name: str, value: object, hint: Any) -> object:
    """Convert `value` to the field's type where nothing is lost by it (YAML reads `1e-3` as text, `2` as an int)."""
    if typing.get_origin(hint) is tuple:
        if isinstance(value, Mapping):
            value = [f"{key}={item}" for key, item in value.items()]
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(_coerce(name, item, typing.get_args(hint)[0]) for item in items)
    accepted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, Path) and str in accepted:
        return str(value)
    if isinstance(value, str) and float in accepted:
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # NumPy's as well
        if isinstance(value, numbers.Integral) and int in accepted:
            return int(value)
        if float in accepted:
            return float(value)
    # By exact type, because a bool is an int to isinstance.
    if type(value) in accepted or (value is None and type(None) in accepted):
        return value
    kinds = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in accepted)
    raise ConfigError(f"{name} must be {kinds}, got {reprlib.repr(value)[:200]}")


def described(settings: type[Settings]) -> dict[str, str]:
    """Return the meaning of each field of a class of settings, from the `Attributes` of its docstring."""
    text = inspect.cleandoc(_docstring(settings)).partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, meaning = line.strip().partition(": ")
        if colon and not line.startswith(" " * 8) and name.isidentifier():
            found[name] = meaning
        elif found and line.strip():
            found[list(found)[-1]] += f" {line.strip()}"
    return found


def _docstring(settings: type[Settings]) -> str:
    """Return the docstring as it is written, also where `python -OO` has left it out."""
    if "Attributes:" in (settings.__doc__ or ""):
        return settings.__doc__ or ""
    (written,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(written, ast.ClassDef)
    return ast.get_docstring(written) or ""


def schema(settings: type[Settings]) -> dict[str, Any]:
    """Make a JSON schema (draft 2020-12) of a file of these settings, for editors that check and complete YAML."""
    hints, meanings = typing.get_type_hints(settings), described(settings)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        rule: dict[str, Any] = {"description": meanings[field.name], **_rule(hints[field.name])}
        low, high = settings.LIMITS.get(field.name, (-math.inf, math.inf))
        rule |= {key: limit for key, limit in (("minimum", low), ("maximum", high)) if math.isfinite(limit)}
        if field.default is not dataclasses.MISSING:
            rule["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
        properties[field.name] = rule
    required = [field.name for field in dataclasses.fields(settings) if field.default is dataclasses.MISSING]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": settings.__name__,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", Path: "string"}


def _rule(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is tuple:
        return {"anyOf": [{"type": "array"}, {"type": "object"}, {"type": "string"}]}
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return {"type": [_JSON_TYPES[kind] for kind in kinds] if len(kinds) > 1 else _JSON_TYPES[kinds[0]]}
