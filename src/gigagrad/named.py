"""Parse names with settings, as people write models, losses and optimizers: `NAME?key=value&key=value`.

Values are read as literals: `3`, `1e-3`, `true`, `none`, comma-separated tuples of those, else text.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from gigagrad.errors import ConfigError

Literal = int | float | bool | str | None | tuple["Literal", ...]


def parse_named(text: str) -> tuple[str, dict[str, Literal]]:
    """Split `text` into name and settings. Raises `ConfigError` for a setting that is none, or is given twice."""
    name, _, query = text.partition("?")
    if "&" in name and "=" in name:
        raise ConfigError(f"cannot read {text!r}; settings begin with a question mark: {name.replace('&', '?', 1)}")
    return name, parse_settings(query, text)


def parse_settings(query: str, text: str, form: str = "NAME?key=value&key=value") -> dict[str, Literal]:
    """Read `key=value&key=value`, a part of `text`, of that `form`; where that has a dot, keys may have one.

    Raises `ConfigError` for a setting that is none, or is given twice.
    """
    settings: dict[str, Literal] = {}
    for item in filter(None, query.split("&")):
        key, equals, value = item.partition("=")
        known = key.replace(".", "", 1) if "." in form else key
        if not equals or not known.isidentifier():
            raise ConfigError(f"cannot read {item!r} in {text!r}; settings are written {form}")
        if key in settings:
            raise ConfigError(f"{text!r} sets {key!r} twice")
        settings[key] = parse_literal(unquote(value))
    return settings


def parse_literal(text: str) -> Literal:
    if "," in text:
        return tuple(parse_literal(part) for part in text.split(",") if part)
    word = text.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    if word in ("none", "null"):
        return None
    if re.fullmatch(r"[+-]?\d+", word):
        return int(word)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", word):
        return float(word)
    return text
