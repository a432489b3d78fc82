"""Show slides in a notebook: the page in a frame, served by a thread of this process, else a picture."""

from __future__ import annotations

import contextlib
import html
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gigagrad.errors import ConfigError, GigagradError
from gigagrad.view.serving import Viewed, catalog_of, networks, ready
from gigagrad.view.slides import Slides

if TYPE_CHECKING:
    from gigagrad.execution import Engine

_MOST: Final = 8
"""Frames of a process that are served; of more, the first are closed."""
_served: deque[Frame] = deque()


class Frame:
    """A view of slides in the cell of a notebook: of files and folders, or of images that are open.

    Where no server can be started (the extra `view` or the built page is missing) or reached (the notebook's process
    has ended, or runs on another machine), the cell shows a picture of the first slide, and `why` says what is missing.
    """

    def __init__(
        self,
        *sources: Viewed,
        masks: Sequence[str | Path] = (),
        predictions: str | Path | None = None,
        model: str | Path | Engine | None = None,
        classes: Sequence[str] = (),
        height_px: int = 600,
        **settings: Any,
    ) -> None:
        """Take what `view` takes, and the height of the frame. Raises `ConfigError` and `ModelError` as it does."""
        self._catalog = catalog_of(sources, masks, predictions, classes)
        self.address, self.why, self._height_px = "", "", height_px
        live = networks(self._catalog, model, {"classes": classes, **settings}, lambda line: None)
        with contextlib.ExitStack() as stack:
            try:
                serving = ready(self._catalog, Slides(self._catalog.items, live), framed=True)
                run, stop, self.address = stack.enter_context(serving)
            except ConfigError as error:
                self.why = str(error)
                return
            thread = threading.Thread(target=run, daemon=True)
            stack.callback(thread.join)
            stack.callback(stop)
            thread.start()
            self._open = stack.pop_all()
        _served.append(self)
        while len(_served) > _MOST:
            _served.popleft().close()

    def close(self) -> None:
        """End the server and close all files; the cell goes on to show the picture."""
        if self.address:
            self.address = ""
            self._open.close()

    def _repr_html_(self) -> str:
        why = f"<p>{html.escape(self.why)}</p>" if self.why else ""
        picture = ""
        for item in self._catalog.items[:1]:
            with contextlib.suppress(GigagradError, OSError), item.open() as slide:
                picture = slide._repr_html_()
        if not self.address:
            return picture + why
        # What is inside is shown where the address cannot be reached.
        style = f"width:100%;height:{self._height_px}px;border:0"
        return f'<object type="text/html" data="{self.address}" style="{style}" aria-label="Slides">{picture}</object>'
