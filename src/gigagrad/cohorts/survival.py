"""Survival times: how long each patient was followed, and whether the event came at the end of that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from gigagrad.errors import ConfigError

_YES: Final = ("1", "1.0", "true", "yes", "dead", "deceased")
_NO: Final = ("0", "0.0", "false", "no", "alive", "living")


def survival_of(text: str) -> tuple[float, bool] | None:
    """A survival time as R prints it, `12.5`, or `12.5+` where the event had not come until then, and whether it came.

    None for what is no time.
    """
    try:
        time = float(text.removesuffix("+"))
    except ValueError:
        return None
    return (time, not text.endswith("+")) if 0 <= time < math.inf else None


def survival_label(where: str, values: Mapping[str, str]) -> str | None:
    """The label of a row of a cohort file with a time and an event; None where it has no such columns, or others.

    Raises `ConfigError` for what cannot be read.
    """
    column = next((name for name in ("event", "censored") if name in values), None)
    if column is None or "time" not in values or {"label", "mask"} & values.keys():
        return None
    if survival_of(values["time"]) is None or values["time"].endswith("+"):
        raise ConfigError(f"{where}: the time must be a number, 0 or more, got {values['time'][:80]!r}")
    # cBioPortal writes 1:DECEASED.
    said = values[column].lower().partition(":")[0]
    if said not in (*_YES, *_NO):
        raise ConfigError(f"{where}: the {column} is {values[column][:80]!r}; write 1 or 0")
    return values["time"] + ("" if (said in _YES) == (column == "event") else "+")
