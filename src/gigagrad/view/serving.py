"""Serve the page until it is stopped, and say where it is; in a notebook in a frame, by a thread of its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gigagrad.errors import ConfigError, GigagradError, extra
from gigagrad.images import Image, open_image
from gigagrad.images.pixels import Array
from gigagrad.view.catalog import Catalog, few, find
from gigagrad.view.page import read_page
from gigagrad.view.slides import Slides

if TYPE_CHECKING:
    import torch

    from gigagrad.execution import Engine
    from gigagrad.view.live import Live

import html
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gigagrad.execution import Engine

_MOST_CLIENTS: Final = 256
_WAITING: Final = 3
"""Threads for each network, in which pictures wait for it; those of slides do not wait with them."""
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


Viewed: TypeAlias = "str | Path | Image | Array | torch.Tensor"
"""Files and folders, images that are open, and arrays `(C, H, W)` of pixels."""


def view(
    sources: Sequence[Viewed],
    *,
    masks: Sequence[str | Path] = (),
    predictions: str | Path | None = None,
    model: str | Path | Engine | None = None,
    classes: Sequence[str] = (),
    trust: Sequence[str] = (),
    memory: str | None = None,
    device: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
    tell: Callable[[str], None] = print,
) -> None:
    """Show slides and runs in a web page until Ctrl-C or SIGTERM: its address, with a secret token, is told.

    Args:
        sources: slides, folders of them, cohort files, and folders that `fit` or `predict` wrote; of several runs, the
            networks predict what is in view, side by side. Of another folder also what is up to three folders
            below it. Also images that are open, and arrays `(C, H, W)`.
        masks: what is true of the slide; of several slides folders with a file for each.
        predictions: a folder that `predict` wrote, or a file of the one slide.
        model: a run or a saved model that predicts what is in view; `memory`, `device`, `trust` as for `predict`. Or an
            engine of `gigagrad.compile`, which has these: its model predicts with the weights that it has then.
        classes: names of classes, as `ClassTable.parse` takes them.
        host: where it listens; others than this machine can only ask an address that is not loopback.
        port: 0 takes any that is free.
        browser: open the page in the browser of whoever asked.
        tell: called with lines for a person.

    Raises `ConfigError` for what can't be shown or served, and where the page is not built.
    """
    catalog = catalog_of(sources, masks, predictions, classes)
    settings: dict[str, Any] = {"memory": memory, "device": device, "classes": classes, "trust": trust}
    slides = Slides(catalog.items, networks(catalog, model, settings, tell))
    with ready(catalog, slides, host, port) as (run, _, address):
        if host not in _LOOPBACK:
            tell(f"warning: whoever reaches {host} and knows this address sees these slides, and nothing is encrypted")
        counts = ((len(catalog.items), "slide"), (len(catalog.runs), "run"))
        shown = " and ".join(f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts if count)
        shown += f" of {few(catalog.parts, 12)}" if catalog.parts else ""
        if catalog.passed:
            tell(f"passed over: {few(catalog.passed)}; name it to see it")
        tell(f"{shown} at {address} (Ctrl-C ends it)")
        threading.Thread(target=_read_ahead, args=(slides,), daemon=True).start()
        if browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):  # how a server ends; there is nothing to go on from
            run()


def catalog_of(
    sources: Sequence[Viewed], masks: Sequence[str | Path], predictions: str | Path | None, classes: Sequence[str]
) -> Catalog:
    """Find what `view` takes. Raises `ConfigError`, and `ImageError` for an array that is no image."""
    opened = [Path(each) if isinstance(each, str | Path) else open_image(each) for each in sources]
    return find(opened, [*map(Path, masks)], None if predictions is None else Path(predictions), classes)


@contextlib.contextmanager
def ready(
    catalog: Catalog, slides: Slides, host: str = _LOOPBACK[0], port: int = 0, *, framed: bool = False
) -> Iterator[tuple[Callable[[], None], Callable[[], None], str]]:
    """Open a port; give what serves until it is stopped, what stops it, and the page's address. `framed`: other pages
    may hold it in a frame. Raises `ConfigError` for what can't be served, and where the page is not built."""
    with extra("view"):
        import uvicorn

    from gigagrad.view.server import application, new_token

    page, token = read_page(), new_token()
    threads = (os.cpu_count() or 1) + _WAITING * len(slides.live)
    app = application(catalog, slides, page, token=token, host=host, threads=threads, framed=framed)
    with contextlib.closing(slides), _listening(host, port) as listening:
        config = uvicorn.Config(
            app,
            http="h11",  # which bounds what it reads of a request
            ws="none",
            lifespan="off",
            access_log=False,  # addresses hold the token
            log_level="error",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CLIENTS,
            timeout_graceful_shutdown=1,
        )

        class Server(uvicorn.Server):
            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                """Close what a browser holds open, too: it would wait for an answer where nobody reads any more."""
                await super().shutdown(sockets)
                for connection in list(self.server_state.connections):
                    if (transport := getattr(connection, "transport", None)) is not None:
                        transport.abort()
                await asyncio.sleep(0.1)

        server = Server(config)

        def stop() -> None:
            server.should_exit = True

        yield (
            lambda: server.run(sockets=[listening]),
            stop,
            f"http://{_shown(host)}:{listening.getsockname()[1]}/{token}/",
        )


def _read_ahead(slides: Slides) -> None:
    """Open the first slide and its overview while the browser starts; what is wrong with it is told when it asks."""
    with contextlib.suppress(GigagradError, OSError, IndexError), slides.opened(0) as opened:
        opened.thumbnail()


def networks(
    catalog: Catalog, model: str | Path | Engine | None, settings: Mapping[str, Any], tell: Callable[[str], None]
) -> list[Live]:
    """Load the networks that predict what is in view: `model`, else those of several runs that were named, and tell of
    a run that has none. Raises `ConfigError` and `ModelError` where `model` can't be used. PyTorch is imported for
    these alone: it takes seconds."""
    several = any(each.of for item in catalog.items for each in item.predictions)
    called = str(model) if isinstance(model, str | Path) else "the engine"
    named: list[tuple[str | Path | Engine, str]] = [(model, called if several else "")] if model is not None else []
    runs = [run for run in catalog.runs if run.named]
    if model is None and len(runs) > 1:
        named = [(run.folder, run.name) for run in runs]
    networks = []
    for source, name in named:
        from gigagrad.view.live import Live

        try:
            networks.append(Live(source, name=name, **settings))
        except GigagradError as error:
            if model is not None:
                raise
            tell(f"warning: {name} predicts nothing here: {error}")
    return networks


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open the socket here, so that its number is known before anybody asks. Raises `ConfigError`."""
    if not 0 <= port < 2**16:  # some systems take the rest of a division
        raise ConfigError(f"got --port {port}, expected 1 to {2**16 - 1}, or 0 for one that is free")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}: {error.strerror or error}; leave out --host") from error
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:  # whoever asks before the server is there waits for it
        opened = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host} port {port}: {error}; choose another --port") from error
    with opened:
        yield opened


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104 - shown, not bound


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
