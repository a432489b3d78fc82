"""Which code a name may bring in. What the user types may be any code at all; what a file says, only code that the user
names as well.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from gigagrad.errors import ModelError, did_you_mean

# The message below is made to be copied into a shell, so nothing that a shell reads otherwise may stand in a name.
_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def is_import_path(text: str) -> bool:
    """Whether `text` is written `package.module:callable`."""
    return _PATH.fullmatch(text) is not None


def check_trusted(path: str, origin: str | Path, trust: Collection[str]) -> None:
    """Raises `ModelError` unless `path`, which the file `origin` wants imported, is one of `trust`. Imports nothing."""
    if not is_import_path(path):
        raise ModelError(f"{origin} names {path!r}, which is no package.module:callable; nothing was imported")
    if path not in ((trust,) if isinstance(trust, str) else trust):
        raise ModelError(
            f"{origin} asks to import {path!r}, which is part of neither gigagrad nor timm, smp or monai; it was not "
            f"imported: if you know and trust that code, allow it with --trust {path} (in Python trust=[{path!r}])"
        )


def import_callable(path: str) -> Callable[..., Any]:
    """The object at `package.module:callable`; modules in the working directory are found too. Raises `ModelError`.

    Importing runs code: a path that was read in a file has to pass `check_trusted` first.
    """
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way while it is imported
        raise ModelError(f"cannot import {module_name!r} for {path!r}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(here)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ModelError(f"{module_name!r} has no {attribute!r}{did_you_mean(attribute, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ModelError(f"{path!r} is a {type(found).__name__}; expected something to call")
    return found  # type: ignore[no-any-return]
