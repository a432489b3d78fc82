"""Answer a page's requests, and nobody else's: who may ask, what is answered, and what headers every answer has.

A request names slides, layers, levels and tiles by numbers; no part of it becomes a path, so nothing but what the
command named can be asked for. Every address begins with a secret token. There is no cookie: those of 127.0.0.1 are
sent to every port of it, and a page that brings none can't be made to ask in its user's name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar

import numpy as np

from gigagrad.errors import ConfigError, GigagradError, extra
from gigagrad.images.pixels import Array, TileCache
from gigagrad.threads import SideThreads
from gigagrad.view.catalog import Catalog
from gigagrad.view.layers import LEFT
from gigagrad.view.patches import Patches
from gigagrad.view.plans import read_curves, work_on, works_of
from gigagrad.view.slides import Opened, Slides

with extra("view"):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Found = TypeVar("Found")
Asked = Mapping[str, int]
"""The numbers of an address by their names, those behind its question mark among them."""
Endpoint = Callable[[Request], Awaitable[Response]]

_LONGEST_PATH: Final = 256
_LONGEST_QUERY: Final = 1024
_MOST_HEADERS: Final = 100
_LONGEST_HEADERS: Final = 2**14
_CACHED_BYTES: Final = 64 * 2**20
_FIRST: Final = "index.html"
_KINDS: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
"""Types of the page's files: those that the system knows may be others."""
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # the address holds the token
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",  # pixels of patients do not stay in a browser's files
}
"""Headers of every answer."""
_BEHIND: Final = {"channel": 2**16, "margin": 16, "live": 1}
"""Numbers that may stand behind the question mark, and the most that each may be."""


def new_token() -> str:
    return secrets.token_urlsafe(32)


def application(
    catalog: Catalog,
    slides: Slides,
    page: Mapping[str, bytes],
    *,
    token: str,
    host: str = "127.0.0.1",
    threads: int = 2,
    framed: bool = False,
) -> ASGIApp:
    """Make the application that answers: `page` has the built files by name, `host` is where it listens, so many
    `threads` read and compute, and if `framed` other pages may hold this one in a frame."""
    answers = _Answers(catalog, slides, page, SideThreads(threads, "gigagrad-view"))
    routes = [Route(f"/{name.removeprefix(_FIRST)}", answers.page) for name in page]
    routes += [Route(f"/slides/{{slide:int}}{rest}", answers.of_slide(tell)) for rest, tell in _TOLD.items()]
    routes += [Route(f"/slides/{{slide:int}}{rest}", answers.drawn(draw)) for rest, draw in _DRAWN.items()]
    routes += [
        Route("/catalog", answers.later(answers.catalog)),
        Route("/runs/{run:int}/{start:int}", answers.later(answers.curves)),
        Route("/now", answers.later(answers.now)),
    ]
    app = Starlette(routes=routes, exception_handlers={GigagradError: _told})
    return Guard(app, token, {host}, framed=framed)


_TOLD: Final[dict[str, Callable[[Opened, Asked], Any]]] = {
    "": lambda slide, _: slide.describe(),
    "/live": lambda slide, _: slide.describe_live(),
    "/patches/{number:int}": lambda slide, asked: _patches(slide, asked).ends(),
    "/patches/{number:int}/{place:int}": lambda slide, asked: _patches(slide, asked).nth(asked["place"]),
    "/patches/{number:int}/at/{y:int}/{x:int}": lambda slide, asked: _patches(slide, asked).at(asked["y"], asked["x"]),
    "/{layer:int}/counts": lambda slide, asked: _there(slide.counts(asked["layer"], asked.get("channel", 0))),
    "/pixel/{y:int}/{x:int}": lambda slide, asked: slide.values(asked["y"], asked["x"], live=bool(asked.get("live"))),
}
"""Answers about a slide, by the rest of its address."""
_DRAWN: Final[dict[str, Callable[[Opened, Asked], bytes | None]]] = {
    "/thumbnail": lambda slide, _: slide.thumbnail(),
    "/square/{x:int}/{y:int}/{side:int}": lambda slide, asked: slide.square(asked["x"], asked["y"], asked["side"]),
    "/{layer:int}/{level:int}/{column:int}/{row:int}": lambda slide, asked: slide.tile(
        *(asked.get(name, 0) for name in ("layer", "level", "column", "row", "channel", "margin"))
    ),
}
"""Pictures of a slide, by the rest of its address: JPEGs, or levels of its layers."""


class _Answers:
    """Answers by address. Work that takes time runs in threads, not if its request is gone before it begins; those of
    them that have nothing to do decode parts of what another one reads."""

    def __init__(self, catalog: Catalog, slides: Slides, page: Mapping[str, bytes], threads: SideThreads) -> None:
        self._catalog, self._slides, self._page = catalog, slides, page
        self._threads, self._free = threads, asyncio.Semaphore(threads.count)
        self._pictures = TileCache(_CACHED_BYTES)
        self._numbers = {str(item.row.slide): number for number, item in enumerate(catalog.items)}

    async def page(self, request: Request) -> Response:
        name = request.url.path.lstrip("/") or _FIRST
        return Response(self._page[name], media_type=_KINDS[PurePosixPath(name).suffix])

    def catalog(self, _: Asked) -> Response:
        slides = [
            {
                "name": item.label,
                "scores": item.scores,
                "folder": item.row.slide.parent.name if self._catalog.parts else "",
            }
            for item in self._catalog.items
        ]
        runs = [run.name for run in self._catalog.runs]
        live = self._slides.live
        predicted = (each.of for item in self._catalog.items for each in item.predictions)
        sources = list(filter(None, dict.fromkeys((*(each.name for each in live), *predicted))))
        works = bool(live or self._catalog.folders)
        return _json({"slides": slides, "runs": runs, "live": bool(live), "sources": sources, "works": works})

    def curves(self, asked: Asked) -> Response:
        runs = self._catalog.runs
        run = _there(runs[asked["run"]] if asked["run"] < len(runs) else None)
        return _json(read_curves(run.metrics, asked["start"]))

    def now(self, _: Asked) -> Response:
        """Answer with what is computed now, by runs, by predictions under way, and by the page's own networks."""
        own = [(live.name or "what is in view", live.work.describe()) for live in self._slides.live]
        here = [{"of": of, **work_on(found, self._numbers)} for of, found in own if found is not None]
        return _json([*works_of(self._catalog.folders, self._numbers), *here])

    def of_slide(self, tell: Callable[[Opened, Asked], Any]) -> Endpoint:
        """Answer with what is told of a slide."""

        def answer(asked: Asked) -> Response:
            with self._opened(asked) as opened:
                return _json(tell(opened, asked))

        return self.later(answer)

    def drawn(self, draw: Callable[[Opened, Asked], bytes | None]) -> Endpoint:
        """Answer with what is drawn of a slide, or was drawn lately where it is still there."""

        def drawn(key: tuple[tuple[str, int], ...]) -> Array:
            asked = dict(key)
            with self._opened(asked) as opened:
                return np.frombuffer(_there(draw(opened, asked)), np.uint8)

        def answer(asked: Asked) -> Response:
            kind = "application/octet-stream" if asked.get("layer") else "image/jpeg"
            return Response(self._pictures.get(tuple(asked.items()), drawn).tobytes(), media_type=kind)

        return self.later(answer)

    def _opened(self, asked: Asked) -> AbstractContextManager[Opened]:
        number = asked["slide"]
        return self._slides.opened(_there(number if number < len(self._slides.items) else None))

    def later(self, work: Callable[[Asked], Response]) -> Endpoint:
        """Make what answers requests by work in a thread."""

        async def answer(request: Request) -> Response:
            asked = _asked(request)
            async with self._free:
                if await request.is_disconnected():  # somebody has zoomed past it
                    return Response(status_code=499)
                done, left = Future[Response](), threading.Event()
                self._threads.submit(_settle, done, partial(work, asked), left)
                answered, leaving = asyncio.wrap_future(done), asyncio.ensure_future(_leaves(request))
                await asyncio.wait((answered, leaving), return_when=asyncio.FIRST_COMPLETED)
                leaving.cancel()
                left.set()
                return await answered

        return answer


def _asked(request: Request) -> Asked:
    """Return the numbers of a request. Raises `ConfigError` for what is none of ours."""
    numbers: dict[str, int] = {**request.path_params}
    for name, text in request.query_params.items():
        if name not in _BEHIND or not re.fullmatch(r"\d{1,5}", text, re.ASCII) or int(text) > _BEHIND[name]:
            raise ConfigError(f"unknown words behind the address; expected a small number for {' or '.join(_BEHIND)}")
        numbers[name] = int(text)
    return numbers


async def _leaves(request: Request) -> None:
    """Wait until whoever asked has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _settle(done: Future[Response], work: Callable[[], Response], left: threading.Event) -> None:
    """Give what work makes, or raises; of an error that a user can mend an answer with its text."""
    if not done.set_running_or_notify_cancel():  # nobody waits any more
        return
    LEFT.set(left)
    try:
        done.set_result(work())
    except CancelledError:
        done.set_result(Response(status_code=499))
    except (GigagradError, OSError) as error:
        done.set_result(PlainTextResponse(f"{error}\n", 422))
    except BaseException as error:
        done.set_exception(error)


class Guard:
    """Lets requests through that know the token, are meant for this server, and come from its own page.

    A foreign `Host` is what a name that was pointed at 127.0.0.1 brings along (DNS rebinding): `localhost`, the names
    that the command was given and addresses of numbers are ours, at any port, as tunnels have their own.
    """

    def __init__(self, app: ASGIApp, token: str, names: Collection[str], *, framed: bool = False) -> None:
        self._app, self._token = app, token.encode()
        self._places = ("document", "iframe", "object") if framed else ("document",)
        policy = HEADERS["content-security-policy"]
        unframed = {"content-security-policy": policy.replace("; frame-ancestors 'none'", "")} if framed else {}
        self._headers = [(name.encode(), value.encode()) for name, value in (HEADERS | unframed).items()]
        self._names = {"localhost", *(name.lower() for name in names), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        refused = self._refusal(scope)
        if refused is not None:
            await PlainTextResponse(refused[1] + "\n", refused[0])(scope, receive, send_guarded)
            return
        path = "/" + scope["path"].split("/", 2)[2]
        await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the words for a request that is not answered."""
        headers = scope["headers"]
        if len(scope["path"]) > _LONGEST_PATH or len(scope["query_string"]) > _LONGEST_QUERY:
            return 414, "this address is longer than any of ours"
        if len(headers) > _MOST_HEADERS or sum(len(name) + len(value) for name, value in headers) > _LONGEST_HEADERS:
            return 431, "these headers are longer than a browser's"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "only GET is answered: nothing can be changed here"
        if any(name in (b"content-length", b"transfer-encoding") and value != b"0" for name, value in headers):
            return 413, "a request for a picture has no body"
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return 421, "this name is not one of this server's; open the address that 'gigagrad view' printed"
        parts = scope["path"].split("/", 2)
        if len(parts) < 3 or not secrets.compare_digest(parts[1].encode(), self._token):
            return 403, "the address lacks the token; open the one that 'gigagrad view' printed"
        if not self._is_own(scope, hosts[0]):
            return 403, "another site asks for this; only the page that 'gigagrad view' serves may"
        return None

    def _is_ours(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_own(self, scope: Scope, host: str) -> bool:
        """Say whether a browser asks in its user's name or the page's: other pages, also those of other ports, don't.

        Following a link to the page itself is its user's doing, wherever the link stands.
        """
        told = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = told.get(b"origin")
        if origin is not None and origin != f"{scope['scheme']}://{host}":
            return False
        if told.get(b"sec-fetch-site", "none") in ("none", "same-origin"):
            return True
        is_page = scope["path"].count("/") == 2 and scope["path"].endswith("/")
        return is_page and told.get(b"sec-fetch-mode") == "navigate" and told.get(b"sec-fetch-dest") in self._places


async def _told(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 400)


def _patches(slide: Opened, asked: Asked) -> Patches:
    return _there(slide.patches(asked["number"]))


def _json(content: Any) -> Response:
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")


def _there(found: Found | None) -> Found:
    """Refuse to answer where there is nothing."""
    if found is None:
        raise HTTPException(404, "there is no such thing here")
    return found
