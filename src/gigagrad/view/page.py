"""Find the built page: wheels bring it; in a checkout it is built once."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from gigagrad.errors import ConfigError

_NAMES: Final = ("index.html", "page.js", "page.css", "icon.svg", "licences.txt")


def read_page() -> dict[str, bytes]:
    """Read the files of the page by name. Raises `ConfigError` where it is not built, with the command that does it."""
    folder = files("gigagrad.view") / "page"
    found = {name: path.read_bytes() for name in _NAMES if (path := folder / name).is_file()}
    if missing := [name for name in _NAMES if name not in found]:
        raise ConfigError(
            f"the page is not built ({missing[0]} is missing); in a checkout run 'make page', which needs Node.js 20 "
            "and its npm; wheels bring the page"
        )
    return found
