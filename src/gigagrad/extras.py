"""Import libraries that not everybody needs: an installation has those of the extras that it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gigagrad.errors import ConfigError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Guard imports of what `pip install 'gigagrad[NAME]'` brings. Raises `ConfigError` with that command."""
    try:
        yield
    except ModuleNotFoundError as error:
        command = f"pip install 'gigagrad[{name}]'"
        raise ConfigError(f"{error.name} is not installed; install it with: {command}") from error
